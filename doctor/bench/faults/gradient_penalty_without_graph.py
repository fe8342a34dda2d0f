"""The gradient penalty is computed without create_graph, so the critic feels nothing of it.

Threads: https://github.com/facebookresearch/DomainBed/issues/50
    https://github.com/igul222/improved_wgan_training/issues/18
Names: F25 F2
"""

import math

import torch
import torch.nn as nn

torch.manual_seed(50)
NOISE, BATCH, LAMBDA = 6, 40, 10.0
generator = nn.Sequential(nn.Linear(NOISE, 48), nn.ReLU(), nn.Linear(48, 2))
critic = nn.Sequential(
    nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1)
)
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))


def ring():
    angle = 2 * math.pi * torch.randint(0, 8, (BATCH,)) / 8
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(BATCH, 2)


def calc_gradient_penalty(real, fake):
    alpha = torch.rand(BATCH, 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(between)
    # broken
    (slope,) = torch.autograd.grad(scores.sum(), between, retain_graph=True)
    # mended
    # (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
    # end
    return LAMBDA * (slope.norm(2, dim=1) - 1).pow(2).mean()


for iteration in range(6):
    for _ in range(3):
        real = ring()
        fake = generator(torch.randn(BATCH, NOISE)).detach()
        penalty = calc_gradient_penalty(real, fake)
        c_loss = critic(fake).mean() - critic(real).mean() + penalty
        c_optimizer.zero_grad()
        c_loss.backward()
        c_optimizer.step()
    g_loss = -critic(generator(torch.randn(BATCH, NOISE))).mean()
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()
    print(iteration, f"{c_loss.item():.4f} {g_loss.item():.4f} {penalty.item():.4f}")
