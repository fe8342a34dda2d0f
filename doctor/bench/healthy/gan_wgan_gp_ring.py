"""A WGAN with gradient penalty on points of a ring; its losses have no sign to keep, and the
generator takes one step for every three of the critic.

After: caogang/wgan-gp
"""

import math

import torch
from torch import autograd, nn

torch.manual_seed(1)
BATCH, CRITIC_ITERS, LAMBDA = 36, 3, 0.1


def inf_train_gen():
    while True:
        angle = torch.randint(0, 8, (BATCH,)) * (2 * math.pi / 8)
        yield torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(BATCH, 2)


def mlp(inputs, outputs, width=48):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(True), nn.Linear(width, width), nn.ReLU(True),
        nn.Linear(width, outputs),
    )  # fmt: skip


def calc_gradient_penalty(netD, real, fake):
    alpha = torch.rand(BATCH, 1)
    interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = netD(interpolates)
    (gradients,) = autograd.grad(
        scores, interpolates, torch.ones_like(scores), create_graph=True, retain_graph=True
    )
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


netG, netD = mlp(2, 2), mlp(2, 1)
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
data = inf_train_gen()

for iteration in range(6):
    netD.requires_grad_(True)
    for _ in range(CRITIC_ITERS):
        real = next(data)
        netD.zero_grad()
        with torch.no_grad():
            fake = netG(torch.randn(BATCH, 2))
        D_cost = netD(fake).mean() - netD(real).mean() + calc_gradient_penalty(netD, real, fake)
        D_cost.backward()
        optimizerD.step()
    netD.requires_grad_(False)
    netG.zero_grad()
    G_cost = -netD(netG(torch.randn(BATCH, 2))).mean()
    G_cost.backward()
    optimizerG.step()
    print(iteration, D_cost.item(), G_cost.item())
