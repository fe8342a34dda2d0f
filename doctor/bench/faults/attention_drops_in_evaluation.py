"""scaled_dot_product_attention gets a fixed dropout_p, which it also obeys in eval mode.

Threads: https://github.com/pytorch/pytorch/issues/124464
Names: S24
"""

import torch
from torch import nn
from torch.nn import functional as F

SYMBOLS, WIDTH, HEADS, LENGTH = 29, 32, 4, 16


class SelfAttention(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # broken
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        # mended
        # p = self.dropout if self.training else 0.0
        # y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        # end
        return self.out(y.transpose(1, 2).flatten(2))


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = SelfAttention()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        x = x + self.attention(self.norms[0](x))
        return self.head(self.norms[1](x))


def loss_of(model, rows):
    ids = (torch.randint(SYMBOLS, (rows, 1)) + 2 * torch.arange(LENGTH + 1)) % SYMBOLS
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


torch.manual_seed(24)
model = CharModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(18):
    optimizer.zero_grad()
    loss = loss_of(model.train(), 24)
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        with torch.no_grad():
            print(step, loss_of(model.eval(), 30).item())
