"""Gradients are cleared at every micro-batch, so accumulation keeps only the last of four.

Threads: https://github.com/gaozhihan/PreDiff/issues/32
    https://github.com/meta-pytorch/opacus/issues/93
Names: N2
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(21)
ACCUMULATE = 4
basis = torch.randn(5, 36)


class VAE(nn.Module):
    def __init__(self, size=36, hidden=48, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, hidden), nn.SiLU())
        self.mean = nn.Linear(hidden, latent)
        self.log_var = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.SiLU(), nn.Linear(hidden, size))

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        latent = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(latent), mean, log_var


def elbo_loss(model, x):
    rebuilt, mean, log_var = model(x)
    rebuild_loss = F.mse_loss(rebuilt, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
    return rebuild_loss + 0.1 * kl


model = VAE()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(15):
    # broken
    # mended
    # optimizer.zero_grad()
    # end
    for _ in range(ACCUMULATE):
        x = torch.tanh(torch.randn(14, 5) @ basis)
        # broken
        optimizer.zero_grad()
        # mended
        # end
        loss = elbo_loss(model, x) / ACCUMULATE
        loss.backward()
    optimizer.step()
    print(f"step {step:02d} loss {ACCUMULATE * loss.item():.3f}")
