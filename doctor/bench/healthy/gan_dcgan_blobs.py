"""A DCGAN whose discriminator sums the gradients of two backward calls before its one step.

After: pytorch/examples
"""

import torch
from torch import nn, optim

torch.manual_seed(999)
nz, ngf, ndf, batch_size = 12, 8, 8, 20
real_label, fake_label = 1.0, 0.0


def load_blobs(count):
    axis = torch.arange(16.0)
    cx, cy = torch.rand(2, count, 1, 1) * 8 + 4
    distance = (axis.view(1, 16, 1) - cy) ** 2 + (axis.view(1, 1, 16) - cx) ** 2
    return (2 * torch.exp(-distance / 8) - 1).unsqueeze(1)


def weights_init(m):
    if "Conv" in type(m).__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in type(m).__name__:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
    nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, True),
    nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
)  # fmt: skip
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))

for i, real in enumerate(load_blobs(batch_size * 16).split(batch_size)):
    netD.zero_grad()
    label = torch.full((real.size(0),), real_label)
    errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(real.size(0), nz, 1, 1))
    label.fill_(fake_label)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(real_label)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    print(i, f"Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
