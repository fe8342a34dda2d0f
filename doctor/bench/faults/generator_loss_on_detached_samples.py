"""The generator's adversarial loss is taken on samples that are cut off from the generator.

Threads: https://github.com/nikhilsinghmus/image2reverb/issues/37
    https://github.com/samet-akcay/skip-ganomaly/issues/5
Names: B8
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(31)
LENGTH, NOISE = 24, 6


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.seed = nn.Linear(NOISE, 16 * 6)
        self.up = nn.Sequential(
            nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose1d(8, 1, 4, stride=2, padding=1),
        )

    def forward(self, noise):
        return self.up(self.seed(noise).unflatten(1, (16, 6)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 12, 5, stride=2), nn.LeakyReLU(0.2), nn.Flatten())
        self.score = nn.Linear(12 * 10, 1)

    def forward(self, waves):
        return self.score(self.body(waves))


def sample_waves(size):
    phase = 6.2832 * torch.rand(size, 1, 1)
    pitch = 1 + torch.rand(size, 1, 1)
    return torch.sin(phase + pitch * torch.linspace(0, 6.2832, LENGTH))


generator, discriminator = Generator(), Discriminator()
g_optimizer = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))

for step in range(16):
    real = sample_waves(32)
    waves = generator(torch.randn(32, NOISE))

    d_optimizer.zero_grad()
    d_loss = (
        F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(waves.detach())).mean()
    )
    d_loss.backward()
    d_optimizer.step()

    g_optimizer.zero_grad()
    # broken
    g_loss = F.softplus(-discriminator(waves.detach())).mean()
    # mended
    # g_loss = F.softplus(-discriminator(waves)).mean()
    # end
    g_loss.backward()
    g_optimizer.step()
    print(f"{step} D {d_loss.item():.3f} G {g_loss.item():.3f}")
