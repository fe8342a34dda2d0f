"""The noise of the target is not the noise of the input, so the loss stays at its variance of 1.

Threads:
Names: F23
Missed: no check asks which draw a target is; none was admitted, for no public thread was found.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TIMESTEPS, BATCH = 100, 64


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, width)
        self.first = nn.Linear(2, width)
        self.last = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        return self.last(F.silu(self.first(x) + self.time(t)))


class Diffusion:
    def __init__(self):
        betas = torch.linspace(1e-4, 0.08, TIMESTEPS)
        self.alpha_bar = (1 - betas).cumprod(0)

    def q_sample(self, x0, t, noise=None):
        noise = torch.randn_like(x0) if noise is None else noise
        a = self.alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def p_losses(self, model, x0):
        t = torch.randint(0, TIMESTEPS, (len(x0),))
        noise = torch.randn_like(x0)
        # broken
        noisy = self.q_sample(x0, t)
        # mended
        # noisy = self.q_sample(x0, t, noise)
        # end
        return F.mse_loss(model(noisy, t), noise)


def two_moons(count):
    angle = torch.pi * torch.rand(count)
    side = torch.randint(0, 2, (count,)) * 2 - 1
    return torch.stack([side * angle.cos() + 0.5 * side, side * angle.sin()], 1)


torch.manual_seed(90)
diffusion = Diffusion()
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(20):
    loss = diffusion.p_losses(model, two_moons(BATCH))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
