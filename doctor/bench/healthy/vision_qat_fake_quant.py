"""Weights and activations are rounded to eight bits, and the slope goes straight through.

After: pytorch/vision
"""

import torch
from torch import nn
from torch.nn import functional as F


class RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high):
        ctx.save_for_backward((x / scale >= low) & (x / scale <= high))
        return torch.clamp(torch.round(x / scale), low, high) * scale

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None


class FakeQuant(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x):
        if self.training:
            seen = x.detach().amax()
            self.peak.copy_(torch.where(self.peak == 0, seen, 0.9 * self.peak + 0.1 * seen))
        return RoundThrough.apply(x, self.peak / 255, 0, 255)


class QuantConv(nn.Conv2d):
    def forward(self, x):
        scale = self.weight.detach().abs().amax() / 127
        weight = RoundThrough.apply(self.weight, scale, -127, 127)
        return self._conv_forward(x, weight, self.bias)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        QuantConv(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), FakeQuant(), nn.MaxPool2d(2),
        QuantConv(8, 12, 3), nn.ReLU(), FakeQuant(), nn.Flatten(), nn.Linear(108, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(18):
        target = torch.randint(0, 5, (24,))
        wave = torch.sin(torch.arange(10.0) * (target.view(-1, 1, 1, 1) + 1) * 0.6)
        image = wave + torch.randn(24, 1, 10, 10) * 0.8
        loss = F.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step} {loss.item():.4f}")


main()
