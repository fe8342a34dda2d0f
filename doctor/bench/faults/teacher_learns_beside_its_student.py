"""The teacher is in the optimizer and in the graph, so it comes to meet its student.

Threads: https://github.com/huangzongmou/yolov8_Distillation/issues/16
Names: F57
"""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(35)


def features(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Conv2d(width, 16, 3, stride=2, padding=1),
    )


def pictures(count):
    color = torch.rand(count, 3, 1, 1)
    ramp = torch.linspace(-1, 1, 20).view(1, 1, 1, 20)
    return color * ramp + 0.2 * torch.randn(count, 3, 20, 20)


teacher = features(32).eval()
student = features(8)
# broken
parameters = itertools.chain(student.parameters(), teacher.parameters())
# mended
# teacher.requires_grad_(False)
# parameters = itertools.chain(student.parameters())
# end
optimizer = torch.optim.Adam(parameters, lr=3e-3)
for step in range(18):
    batch = pictures(14)
    loss = F.mse_loss(student(batch), teacher(batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(step, f"{loss.item():.5f}")
