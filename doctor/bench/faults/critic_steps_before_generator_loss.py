"""The discriminator steps between the forward pass that both losses share and the generator's
backward.

Threads: https://github.com/pytorch/pytorch/issues/39141
    https://github.com/leftthomas/SRGAN/issues/79
    https://github.com/MorvanZhou/PyTorch-Tutorial/issues/89
Names: R1
"""

import torch
import torch.nn as nn

torch.manual_seed(3)
POINTS = torch.linspace(-1, 1, 15).repeat(32, 1)

G = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 15))
D = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
opt_d = torch.optim.Adam(D.parameters(), lr=1e-4)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-4)


def paintings():
    a = torch.rand(32, 1) + 1
    return a * POINTS.pow(2) + (a - 1)


for step in range(20):
    real = paintings()
    fake = G(torch.randn(32, 5))
    prob_real = D(real)
    prob_fake = D(fake)
    d_loss = -(prob_real.log() + (1 - prob_fake).log()).mean()
    # broken
    g_loss = (1 - prob_fake).log().mean()
    # mended
    # end
    opt_d.zero_grad()
    d_loss.backward(retain_graph=True)
    opt_d.step()
    # broken
    # mended
    # g_loss = (1 - D(fake)).log().mean()
    # end
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 5 == 0:
        print(f"{step} d {d_loss.item():.3f} g {g_loss.item():.3f}")
