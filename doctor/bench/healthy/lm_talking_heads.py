"""Attention whose heads talk: a matrix mixes the heads before and after the softmax, so the rows of
weights no longer sum to one, and masked places stay at zero all the same.

After: lucidrains/vit-pytorch
"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)
vocab, dim, heads, length, batch = 19, 32, 4, 15, 7


class TalkingHeads(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)
        self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, dim * 2)
        self.mix_pre = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))
        self.mix_post = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        (b, n, _), x = x.shape, self.norm(x)
        qkv = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q, k, v = (t.reshape(b, n, heads, -1).transpose(1, 2) for t in qkv)
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * (dim // heads) ** -0.5
        dots = torch.einsum("bhij,hg->bgij", dots, self.mix_pre)
        dots = dots.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.finfo(dots.dtype).max)
        attn = self.dropout(dots.softmax(dim=-1))
        attn = torch.einsum("bhij,hg->bgij", attn, self.mix_post)
        return self.to_out((attn @ v).transpose(1, 2).reshape(b, n, dim))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, dim), nn.Parameter(torch.randn(length, dim))
        self.layers = nn.ModuleList([TalkingHeads() for _ in range(2)])
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, vocab))

    def forward(self, ids):
        x = self.token(ids) + self.place
        for layer in self.layers:
            x = layer(x) + x
        return self.head(x)


model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
steps = 20
for step in range(steps):
    first = torch.randint(vocab, (batch, 3))
    ids = torch.cat([(first + 2 * i) % vocab for i in range(6)], dim=1)[:, : length + 1]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
