"""A diffusion model predicts noise; a deep copy first takes the weights and later follows slowly.

After: dome272/Diffusion-Models-pytorch
"""

import copy

import torch
import torch.nn as nn


class EMA:
    def __init__(self, beta):
        self.beta, self.step = beta, 0

    def step_ema(self, ema_model, model, step_start_ema):
        if self.step < step_start_ema:
            ema_model.load_state_dict(model.state_dict())
        else:
            for kept, current in zip(ema_model.parameters(), model.parameters(), strict=True):
                kept.data = kept.data * self.beta + (1 - self.beta) * current.data
        self.step += 1


class Denoiser(nn.Module):
    def __init__(self, dim=2, width=48):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.inp, self.mid = nn.Linear(dim, width), nn.Linear(width, width)
        self.out = nn.Linear(width, dim)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        angle = t[:, None].float() * 0.2 ** torch.arange(4)
        h = self.inp(x) + self.time(torch.cat([angle.sin(), angle.cos()], dim=1))
        return self.out(nn.functional.silu(self.mid(nn.functional.silu(h))))


torch.manual_seed(0)
T = 30
beta = torch.linspace(1e-3, 0.2, T)
alpha_hat = torch.cumprod(1 - beta, dim=0)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
mse, ema = nn.MSELoss(), EMA(0.9)
ema_model = copy.deepcopy(model).eval().requires_grad_(False)
for i in range(20):
    angle = torch.randint(0, 3, (72,)) * 2.1
    x0 = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(72, 2)
    t = torch.randint(0, T, (72,))
    noise = torch.randn_like(x0)
    a = alpha_hat[t, None]
    predicted_noise = model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t)
    loss = mse(noise, predicted_noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.step_ema(ema_model, model, step_start_ema=8)
    print(i, loss.item())
