"""The divergence is a sum over the batch and the reconstruction a mean, so the code collapses.

Threads: https://github.com/zdebruine/MMVAE/pull/19
    https://github.com/SeldonIO/alibi-detect/issues/90
Names: F40
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

GENES, LATENT, CELLS = 96, 5, 44


class ExpressionVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(GENES, 64), nn.ReLU())
        self.fc_mean = nn.Linear(64, LATENT)
        self.fc_var = nn.Linear(64, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, GENES))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.fc_mean(h), self.fc_var(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def vae_loss(predicted, target, mu, logvar):
    # broken
    recon = F.mse_loss(predicted, target)
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    # mended
    # recon = F.mse_loss(predicted, target, reduction="sum") / len(target)
    # kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(target)
    # end
    return recon + kl, recon, kl


def main():
    torch.manual_seed(6)
    programs = torch.randn(3, GENES)
    vae = ExpressionVAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=2e-3)
    for step in range(20):
        cells = torch.randn(CELLS, 3) @ programs + 0.2 * torch.randn(CELLS, GENES)
        predicted, mu, logvar = vae(cells)
        loss, recon, kl = vae_loss(predicted, cells, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"{step} recon {recon.item():.3f} kl {kl.item():.4f}")


main()
