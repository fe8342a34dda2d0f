"""The layers round their weights in the forward pass, and the weights get gradients of zero.

Threads: https://github.com/pytorch/ao/pull/4806
Names: B7
"""

import torch
from torch import nn
from torch.nn import functional as F


def quantise(weight, bits=4):
    levels = 2 ** (bits - 1) - 1
    scale = weight.detach().abs().max() / levels
    # broken
    return torch.round(weight / scale) * scale
    # mended
    # return weight + (torch.round(weight / scale) * scale - weight).detach()
    # end


class QuantLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, quantise(self.weight), self.bias)


class Forecaster(nn.Module):
    def __init__(self, window=24, horizon=5):
        super().__init__()
        hidden = [QuantLinear(window, 48), nn.ReLU(), QuantLinear(48, 48), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, QuantLinear(48, horizon))

    def forward(self, past):
        return self.layers(past)


def windows(count, window=24, horizon=5):
    phase = 6.28 * torch.rand(count, 1)
    speed = 0.2 + 0.4 * torch.rand(count, 1)
    t = torch.arange(window + horizon)
    series = torch.sin(phase + speed * t) + 0.05 * torch.randn(count, window + horizon)
    return series[:, :window], series[:, window:]


def main():
    torch.manual_seed(9)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        past, future = windows(30)
        loss = F.mse_loss(model(past), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step} mse {loss.item():.4f}")


if __name__ == "__main__":
    main()
