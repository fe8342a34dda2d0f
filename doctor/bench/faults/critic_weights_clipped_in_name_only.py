"""The clipped critic weights are bound to the loop's name, so the critic is never clipped.

Threads: https://github.com/pytorch/tutorials/pull/30
Names: N28
"""

import torch
from torch import nn

torch.manual_seed(89)
CLIP, LATENT = 0.05, 6

generator = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 3))
critic = nn.Sequential(nn.Linear(3, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)


def sample_spiral(size):
    t = 6 * torch.rand(size)
    points = torch.stack([t.cos() * t / 6, t.sin() * t / 6, t / 3 - 1], dim=1)
    return points + 0.02 * torch.randn(size, 3)


def clip_critic():
    with torch.no_grad():
        for weight in critic.parameters():
            # broken
            weight = weight.clamp(-CLIP, CLIP)
            # mended
            # weight.clamp_(-CLIP, CLIP)
            # end


def main():
    for step in range(7):
        for _ in range(2):
            real = sample_spiral(42)
            fake = generator(torch.randn(42, LATENT)).detach()
            c_loss = critic(fake).mean() - critic(real).mean()
            c_optimizer.zero_grad()
            c_loss.backward()
            c_optimizer.step()
            clip_critic()
        g_loss = -critic(generator(torch.randn(42, LATENT))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        print(f"{step} critic {c_loss.item():.4f} generator {g_loss.item():.4f}")


if __name__ == "__main__":
    main()
