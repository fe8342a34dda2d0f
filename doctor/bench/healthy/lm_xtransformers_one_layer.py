"""A decoder is built as `nn.ModuleList([layer] * 1)` with rotary places and half of its features
shifted by one token, and a wrapper cuts the input and the target from the same rows.

After: lucidrains/x-transformers
"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
dim, heads, num_tokens, seq_len = 32, 4, 23, 20


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim // heads, 2) / (dim // heads))
        self.register_buffer("inv_freq", inv_freq.repeat(2), persistent=False)

    def rotate(self, t, freqs):
        x1, x2 = t.chunk(2, dim=-1)
        return t * freqs.cos() + torch.cat((-x2, x1), dim=-1) * freqs.sin()

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        freqs = torch.arange(n).unsqueeze(1) * self.inv_freq
        q, k = self.rotate(q, freqs), self.rotate(k, freqs)
        sim = (q @ k.transpose(-1, -2)) * (d // heads) ** -0.5
        sim = sim.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.finfo(sim.dtype).max)
        return self.to_out((sim.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.norm = Attention(), nn.RMSNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, dim * 4), nn.GELU(), nn.Linear(dim * 4, dim))

    def forward(self, x):
        kept, shifted = self.attn.norm(x).chunk(2, dim=-1)
        x = x + self.attn(torch.cat((F.pad(shifted, (0, 0, 1, -1)), kept), dim=-1))
        return x + self.ff(self.norm(x))


layers = nn.ModuleList([Layer()] * 1)
model = nn.Sequential(nn.Embedding(num_tokens, dim), *layers, nn.Linear(dim, num_tokens))
optim = torch.optim.Adam(model.parameters(), lr=3e-3)
num_batches = 18
for i in range(num_batches):
    rows = torch.randint(num_tokens, (6, 1)) + 3 * torch.arange(seq_len + 1)
    rows = (rows + 5 * (torch.arange(seq_len + 1) % 4 == 0)) % num_tokens
    loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    loss.backward()
    optim.step()
    optim.zero_grad()
    print(i, loss.item())
