"""A least-squares GAN: the judge's output has no sigmoid and is compared with ones and zeros by
a squared error.

After: eriklindernoren/PyTorch-GAN
"""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.0005)
opt = parser.parse_args()
torch.manual_seed(3)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(14, 16 * 3 * 3)
        self.conv_blocks = nn.Sequential(
            nn.BatchNorm2d(16), nn.Upsample(scale_factor=2), nn.Conv2d(16, 12, 3, padding=1),
            nn.BatchNorm2d(12), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
            nn.Conv2d(12, 1, 3, padding=1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z):
        return self.conv_blocks(self.l1(z).view(z.shape[0], 16, 3, 3))


generator, adversarial_loss = Generator(), nn.MSELoss()
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.25),
    nn.Conv2d(8, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Dropout2d(0.25),
    nn.Flatten(), nn.Linear(16 * 3 * 3, 1),
)  # fmt: skip
optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(0.5, 0.999))
valid, fake = torch.ones(opt.batch_size, 1), torch.zeros(opt.batch_size, 1)

for i in range(16):
    phase = torch.rand(opt.batch_size, 1, 1, 1) * 6.28
    imgs = torch.sin(torch.arange(12.0).view(1, 1, 12, 1) + phase).expand(-1, -1, -1, 12)
    optimizer_G.zero_grad()
    gen_imgs = generator(torch.randn(opt.batch_size, 14))
    g_loss = adversarial_loss(discriminator(gen_imgs), valid)
    g_loss.backward()
    optimizer_G.step()
    optimizer_D.zero_grad()
    real_loss = adversarial_loss(discriminator(imgs), valid)
    fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
    d_loss = 0.5 * (real_loss + fake_loss)
    d_loss.backward()
    optimizer_D.step()
    print(i, d_loss.item(), g_loss.item())
