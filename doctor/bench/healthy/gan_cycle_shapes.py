"""A CycleGAN on shapes that are dark or bright: one optimizer holds both generators, the pictures
are unpaired, and old generated pictures come out of a buffer.

After: junyanz/pytorch-CycleGAN-and-pix2pix
"""

import itertools
import random

import torch
from torch import nn

random.seed(torch.manual_seed(2).initial_seed())


def query(pool, images):
    for image in images.detach():
        if len(pool) < 12:
            pool.append(image)
        elif random.random() > 0.5:
            place = random.randrange(12)
            pool[place], image = image, pool[place]
        yield image


def conv(*channels, stride=1):
    layers = []
    for a, b in zip(channels, channels[1:], strict=False):
        layers += [nn.Conv2d(a, b, 3, stride, 1), nn.InstanceNorm2d(b), nn.ReLU(True)]
    return layers[:-2]


def photos(sign):
    return sign * torch.eye(10)[torch.randint(0, 10, (6,))].view(6, 1, 10, 1).repeat(1, 1, 1, 10)


G_A, G_B = (nn.Sequential(*conv(1, 8, 8, 1), nn.Tanh()) for _ in range(2))
D_A, D_B = (nn.Sequential(*conv(1, 8, 1, stride=2)) for _ in range(2))
gan, l1, pools = nn.MSELoss(), nn.L1Loss(), ([], [])
opt_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), 2e-3, (0.5, 0.999))
opt_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), 2e-3, (0.5, 0.999))
for step in range(15):
    real_A, real_B = photos(1), photos(-1)
    fake_B, fake_A = G_A(real_A), G_B(real_B)
    nn.ModuleList([D_A, D_B]).requires_grad_(False)
    opt_G.zero_grad()
    score_A, score_B = D_A(fake_B), D_B(fake_A)
    loss_G = ((score_A - 1) ** 2).mean() + ((score_B - 1) ** 2).mean()
    loss_cycle = l1(G_B(fake_B), real_A) + l1(G_A(fake_A), real_B)
    loss_idt = l1(G_A(real_B), real_B) + l1(G_B(real_A), real_A)
    (loss_G + 10 * loss_cycle + 5 * loss_idt).backward()
    opt_G.step()
    opt_D.zero_grad()
    for D, real, fake, pool in ((D_A, real_B, fake_B, pools[0]), (D_B, real_A, fake_A, pools[1])):
        D.requires_grad_(True)
        on_real, on_fake = D(real), D(torch.stack(list(query(pool, fake))))
        loss_D = gan(on_real, torch.ones_like(on_real)) + gan(on_fake, torch.zeros_like(on_fake))
        (loss_D / 2).backward()
    opt_D.step()
    print(step, loss_G.item(), loss_cycle.item(), loss_idt.item(), loss_D.item())
