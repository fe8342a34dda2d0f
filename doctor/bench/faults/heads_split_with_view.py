"""view brings the heads to the front in place of a transpose, which mixes times and heads.

Threads: https://github.com/zhouhaoyi/Informer2020/issues/59
Names: F30
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class AttentionLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def split(self, x):
        B, L, D = x.shape
        x = x.view(B, L, self.heads, D // self.heads)
        # broken
        return x.view(B, self.heads, L, -1)
        # mended
        # return x.transpose(1, 2)
        # end

    def forward(self, x):
        qkv = [self.split(layer(x)) for layer in (self.query, self.key, self.value)]
        y = F.scaled_dot_product_attention(*qkv)
        return self.out(y.transpose(1, 2).flatten(2))


class Informer(nn.Module):
    def __init__(self, variables=5, width=32, horizon=7):
        super().__init__()
        self.embed = nn.Conv1d(variables, width, 3, padding=1)
        self.attention = AttentionLayer(width, heads=4)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, horizon)

    def forward(self, x):
        x = self.embed(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x + self.attention(x)).mean(dim=1))


torch.manual_seed(61)
t = torch.arange(31)
model = Informer()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(18):
    phase = 6.28 * torch.rand(24, 1, 5)
    load = torch.sin(phase + t.view(1, -1, 1) * torch.linspace(0.2, 0.9, 5))
    past, future = load[:, :24], load[:, 24:, 0]
    loss = F.mse_loss(model(past), future)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step:2d} {loss.item():.4f}")
