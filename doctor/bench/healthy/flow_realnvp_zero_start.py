"""A normalising flow that starts as the identity because the last layers are zero; its loss is a
negative log-likelihood and falls below zero.

After: kamenbliznashki/normalizing_flows
"""

import math

import torch
from torch import nn


class Coupling(nn.Module):
    def __init__(self, size, hidden, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        body = nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.ReLU()
        self.net = nn.Sequential(*body)
        self.out = nn.Linear(hidden, 2 * size)
        self.out.weight.data.zero_()
        self.out.bias.data.zero_()

    def forward(self, x):
        s, t = self.out(self.net(x * self.mask)).chunk(2, dim=-1)
        s = torch.tanh(s) * (1 - self.mask)
        return x * self.mask + (1 - self.mask) * (x - t) * torch.exp(-s), -s


class RealNVP(nn.Module):
    def __init__(self, n_blocks, size, hidden):
        super().__init__()
        masks = [(torch.arange(size) + i).remainder(2).float() for i in range(n_blocks)]
        self.layers = nn.ModuleList(Coupling(size, hidden, mask) for mask in masks)

    def log_prob(self, x):
        total = 0
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return torch.sum(total - 0.5 * (x**2 + math.log(2 * math.pi)), dim=1)


def spiral(count):
    t = torch.rand(count) * 3
    return torch.stack([t.cos() * t, t.sin() * t, t], dim=1) * 0.3 + 0.02 * torch.randn(count, 3)


def main():
    torch.manual_seed(4)
    model = RealNVP(n_blocks=5, size=3, hidden=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-6)
    for i in range(20):
        loss = -model.log_prob(spiral(90)).mean(0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {i} loss {loss.item():.3f}")


main()
