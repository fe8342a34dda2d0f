"""The list of residual blocks is multiplied, so every place in it holds the same block.

Threads: https://github.com/zalandoresearch/pytorch-vq-vae/issues/2
    https://github.com/linkedin/Liger-Kernel/pull/269
Names: S30
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)


class Residual(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, hidden, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 1),
        )

    def forward(self, x):
        return x + self.block(x)


class ResidualStack(nn.Module):
    def __init__(self, channels, hidden, depth):
        super().__init__()
        # broken
        self.layers = nn.ModuleList([Residual(channels, hidden)] * depth)
        # mended
        # self.layers = nn.ModuleList([Residual(channels, hidden) for _ in range(depth)])
        # end

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return F.relu(x)


model = nn.Sequential(
    nn.Conv2d(1, 16, 4, stride=2, padding=1),
    ResidualStack(16, 8, depth=4),
    nn.Conv2d(16, 3, 1),
    ResidualStack(3, 8, depth=3),
    nn.ConvTranspose2d(3, 1, 4, stride=2, padding=1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
grid = torch.linspace(-1, 1, 14)
for step in range(16):
    centre = 1.2 * torch.rand(20, 2, 1, 1) - 0.6
    squared = (grid.view(1, -1, 1) - centre[:, 0]) ** 2 + (grid.view(1, 1, -1) - centre[:, 1]) ** 2
    images = torch.exp(-6 * squared).unsqueeze(1)
    loss = F.mse_loss(model(images), images)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"reconstruction {loss.item():.5f}")
