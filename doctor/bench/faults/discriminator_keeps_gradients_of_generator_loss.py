"""The generator's loss leaves gradients on the discriminator, and its own step adds to them.

Threads: https://github.com/Lightning-AI/pytorch-lightning/issues/557
    https://github.com/FoundationVision/OmniTokenizer/issues/15
Names: N1
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 2))
discriminator = nn.Sequential(nn.Linear(2, 40), nn.LeakyReLU(0.2), nn.Linear(40, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))


def sample_ring(size):
    angle = torch.rand(size) * 6.2832
    ring = torch.stack([angle.cos(), angle.sin()], dim=1)
    return 2 * ring + 0.05 * torch.randn(size, 2)


for step in range(18):
    real = sample_ring(36)
    noise = torch.randn(36, 8)

    g_optimizer.zero_grad()
    fake_score = discriminator(generator(noise))
    g_loss = F.binary_cross_entropy_with_logits(fake_score, torch.ones_like(fake_score))
    g_loss.backward()
    g_optimizer.step()

    # broken
    # mended
    # d_optimizer.zero_grad()
    # end
    real_score = discriminator(real)
    fake_score = discriminator(generator(noise).detach())
    d_loss = F.binary_cross_entropy_with_logits(real_score, torch.ones_like(real_score))
    d_loss = d_loss + F.binary_cross_entropy_with_logits(fake_score, torch.zeros_like(fake_score))
    d_loss.backward()
    d_optimizer.step()
    # broken
    d_optimizer.zero_grad()
    # mended
    # end
    print(f"{step} G {g_loss.item():.3f} D {d_loss.item():.3f}")
