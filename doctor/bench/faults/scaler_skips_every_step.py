"""The distance of equal points has a NaN gradient, so the scaler skips every step.

Threads: https://github.com/NVIDIA/apex/issues/834 https://github.com/pytorch/pytorch/issues/40497
Names: N15 B4 N17 F5
"""

import torch
from torch import nn

torch.manual_seed(53)
PEOPLE = 12
faces = torch.randn(PEOPLE, 3, 12, 12)

net = nn.Sequential(
    nn.Conv2d(3, 12, 3, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(12 * 25, 20),
)


def distances(points):
    squared = (points[:, None] - points[None]).square().sum(-1)
    # broken
    return squared.sqrt()
    # mended
    # return (squared + 1e-6).sqrt()
    # end


def triplet_loss(points, person, margin=0.5):
    gaps = distances(points.float())
    same = (person[:, None] == person[None]).float()
    furthest = (gaps * same).max(1).values
    nearest = (gaps + 1e4 * same).min(1).values
    return (furthest - nearest + margin).clamp(min=0).mean()


optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)

for step in range(18):
    person = torch.randint(PEOPLE, (9,)).repeat_interleave(2)
    images = faces[person] + 0.6 * torch.randn(18, 3, 12, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        points = net(images)
    loss = triplet_loss(points, person)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{step} loss {loss.item():.4f} scale {scaler.get_scale():.1f}")
