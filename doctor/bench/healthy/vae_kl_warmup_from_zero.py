"""A variational autoencoder whose divergence has the weight zero at the first step and rises to its
full weight, so that the total loss may rise while the pictures get better.

After: AntixK/PyTorch-VAE
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1265)


class VanillaVAE(nn.Module):
    def __init__(self, latent_dim=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Flatten(),
            nn.Linear(128, 32), nn.LeakyReLU(),
        )  # fmt: skip
        self.fc_mu = nn.Linear(32, latent_dim)
        self.fc_var = nn.Linear(32, latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, 48), nn.LeakyReLU(), nn.Linear(48, 64))

    def reparameterize(self, mu, logvar):
        return torch.randn_like(mu) * torch.exp(0.5 * logvar) + mu

    def forward(self, x):
        h = self.encoder(x)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        return self.decoder(self.reparameterize(mu, log_var)).view_as(x), mu, log_var


def loss_function(recons, x, mu, log_var, kld_weight):
    recons_loss = F.binary_cross_entropy_with_logits(recons, x, reduction="sum") / len(x)
    kld_loss = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
    return recons_loss + kld_weight * kld_loss, recons_loss.detach(), kld_loss.detach()


def draw(count):
    pictures = torch.zeros(count, 1, 8, 8)
    for picture in pictures:
        row, col, size = torch.randint(1, 5, (3,)).tolist()
        picture[0, row : row + size, col : col + size] = 1.0
    return pictures


vae = VanillaVAE()
optimizer = torch.optim.Adam(vae.parameters(), lr=0.005)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
for step in range(18):
    x = draw(36)
    reconstruction, mu, log_var = vae(x)
    loss, recons, kld = loss_function(reconstruction, x, mu, log_var, min(1.0, step / 10))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 5:
        scheduler.step()
    print(f"{step} loss {loss.item():.3f} recons {recons.item():.3f} kld {kld.item():.3f}")
