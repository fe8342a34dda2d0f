"""BEGAN: the discriminator is an autoencoder, and the weight of its loss on generated pictures
begins at zero and rises slowly.

After: eriklindernoren/PyTorch-GAN
"""

import torch
import torch.nn as nn

torch.manual_seed(5)
latent_dim, size, batch_size = 7, 8, 30
gamma, lambda_k, k = 0.75, 0.01, 0.0


def sample_crosses(count):
    imgs = -torch.ones(count, 1, size, size)
    where = torch.randint(1, size - 1, (count, 2))
    for img, (row, col) in zip(imgs, where, strict=True):
        img[0, row, :] = 1
        img[0, :, col] = 1
    return imgs * 0.8


generator = nn.Sequential(
    nn.Linear(latent_dim, 12 * 4), nn.Unflatten(1, (12, 2, 2)),
    nn.BatchNorm2d(12), nn.Upsample(scale_factor=2), nn.Conv2d(12, 12, 3, 1, 1),
    nn.BatchNorm2d(12), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
    nn.Conv2d(12, 1, 3, 1, 1), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Conv2d(1, 10, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(160, 24), nn.BatchNorm1d(24),
    nn.ReLU(), nn.Linear(24, 160), nn.BatchNorm1d(160), nn.ReLU(), nn.Unflatten(1, (10, 4, 4)),
    nn.Upsample(scale_factor=2), nn.Conv2d(10, 1, 3, 1, 1),
)  # fmt: skip
optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))

for batch in range(16):
    real_imgs = sample_crosses(batch_size)
    optimizer_G.zero_grad()
    gen_imgs = generator(torch.randn(batch_size, latent_dim))
    g_loss = torch.mean(torch.abs(discriminator(gen_imgs) - gen_imgs))
    g_loss.backward()
    optimizer_G.step()

    optimizer_D.zero_grad()
    d_real = discriminator(real_imgs)
    d_fake = discriminator(gen_imgs.detach())
    d_loss_real = torch.mean(torch.abs(d_real - real_imgs))
    d_loss_fake = torch.mean(torch.abs(d_fake - gen_imgs.detach()))
    d_loss = d_loss_real - k * d_loss_fake
    d_loss.backward()
    optimizer_D.step()

    diff = (gamma * d_loss_real - d_loss_fake).item()
    k = min(max(k + lambda_k * diff, 0), 1)
    M = d_loss_real.item() + abs(diff)
    print(f"{batch} D {d_loss.item():.4f} G {g_loss.item():.4f} M {M:.4f} k {k:.4f}")
