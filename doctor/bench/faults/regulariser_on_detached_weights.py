"""The regulariser is computed from detached coordinates, so its weight changes nothing.

Threads: https://github.com/yifita/deep_cage/issues/16
Names: F2
"""

import torch
import torch.nn as nn


class CageDeformer(nn.Module):
    def __init__(self, cage_points):
        super().__init__()
        self.cage = nn.Parameter(torch.randn(cage_points, 3))
        self.offset = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, cage_points * 3))

    def forward(self, points, target_mean):
        distance = torch.cdist(points, self.cage.expand(len(points), -1, -1))
        weights = torch.softmax(-3 * distance, dim=-1)
        code = torch.cat([points.mean(1), target_mean], dim=-1)
        moved = self.cage + self.offset(code).view(len(points), -1, 3)
        deformed = weights @ moved
        # broken
        weights = weights.detach()
        # mended
        # end
        return deformed, weights


def main():
    torch.manual_seed(9)
    model = CageDeformer(cage_points=14)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    wreg_weight = 0.5
    for step in range(16):
        points = torch.randn(10, 37, 3)
        shift = torch.randn(10, 1, 3)
        target = 1.3 * points + shift
        deformed, weights = model(points, target.mean(1))
        fit = (deformed - target).pow(2).mean()
        entropy = -(weights * (weights + 1e-8).log()).sum(-1).mean()
        loss = fit + wreg_weight * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} fit {fit.item():.3f} wreg {entropy.item():.3f}")


if __name__ == "__main__":
    main()
