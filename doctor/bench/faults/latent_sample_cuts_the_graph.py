"""The latent is drawn with sample(), so the reconstruction teaches the encoder nothing.

Threads: https://github.com/jankrepl/deepdow/pull/106
    https://github.com/huggingface/lerobot/pull/599
Names: F22
"""

import torch
import torch.nn as nn
from torch.distributions import Normal, kl_divergence

ASSETS, DAYS, FACTORS, BATCH = 10, 8, 4, 36


class ReturnsVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(ASSETS * DAYS, 64), nn.Tanh())
        self.location = nn.Linear(64, FACTORS)
        self.log_scale = nn.Linear(64, FACTORS)
        self.decode = nn.Sequential(nn.Linear(FACTORS, 64), nn.Tanh(), nn.Linear(64, 80))

    def forward(self, returns):
        h = self.encode(returns)
        posterior = Normal(self.location(h), self.log_scale(h).exp())
        # broken
        latent = posterior.sample()
        # mended
        # latent = posterior.rsample()
        # end
        return self.decode(latent).view_as(returns), posterior


def market(loadings):
    trend = torch.randn(BATCH, 1, 2)
    wave = torch.linspace(0.5, 1.5, DAYS).view(1, DAYS, 1)
    return (trend * wave) @ loadings + 0.1 * torch.randn(BATCH, DAYS, ASSETS)


def main():
    torch.manual_seed(72)
    loadings = torch.randn(2, ASSETS)
    model = ReturnsVAE()
    prior = Normal(torch.zeros(FACTORS), torch.ones(FACTORS))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(18):
        returns = market(loadings)
        rebuilt, posterior = model(returns)
        reconstruction = (rebuilt - returns).pow(2).flatten(1).sum(1).mean()
        divergence = kl_divergence(posterior, prior).sum(1).mean()
        loss = reconstruction + divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 6 == 0:
            print(epoch, f"{reconstruction.item():.3f} {divergence.item():.3f}")


main()
