"""Faces are flipped with their key points, but left and right points keep their places in the list.

Threads: https://github.com/ildoonet/tf-pose-estimation/issues/33
    https://github.com/robertklee/COCO-Human-Pose/pull/29
Names: D19
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(149)
SIDE = 20
face = torch.tensor([[-4.0, -3.0], [4.0, -3.0], [0.0, 0.0], [-3.0, 4.0], [3.0, 4.0]])
PAIRS = [1, 0, 2, 4, 3]


def draw(points):
    grid = torch.arange(SIDE).float()
    columns = (grid[None, None, :] - points[..., 0, None]).square()
    rows = (grid[None, None, :] - points[..., 1, None]).square()
    spots = torch.exp(-(rows[..., :, None] + columns[..., None, :]) / 2)
    return spots.sum(1, keepdim=True)


def make_batch(size):
    centre = SIDE / 2 + 2 * torch.randn(size, 1, 2)
    points = centre + face * (0.8 + 0.3 * torch.rand(size, 1, 1))
    points = points + 0.2 * torch.randn(size, 5, 2)
    images = draw(points) + 0.1 * torch.randn(size, 1, SIDE, SIDE)
    return images, points


def augment(images, points):
    flipped = torch.rand(len(images)) < 0.5
    images, points = images.clone(), points.clone()
    images[flipped] = images[flipped].flip(-1)
    mirrored = points[flipped]
    mirrored[..., 0] = SIDE - 1 - mirrored[..., 0]
    # broken
    points[flipped] = mirrored
    # mended
    # points[flipped] = mirrored[:, PAIRS]
    # end
    return images, points


model = nn.Sequential(
    nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(16):
    images, points = augment(*make_batch(36))
    predicted = model(images).view(-1, 5, 2) * SIDE
    loss = F.mse_loss(predicted, points)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.3f}")
