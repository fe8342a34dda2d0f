"""The gradients of the meta loss stay in a deep copy, and the optimizer steps without one.

Threads: https://github.com/RobinLu1209/ST-GFSL/issues/3
    https://github.com/skorch-dev/skorch/issues/317
Names: B8 S3
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)


def sine_task():
    return 0.5 + 2 * torch.rand(1), 3.14 * torch.rand(1)


def points(task, count):
    amplitude, phase = task
    x = 10 * torch.rand(count, 1) - 5
    return x, amplitude * torch.sin(x + phase)


net = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 1))
meta_optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for episode in range(16):
    meta_optimizer.zero_grad()
    total = 0.0
    for _ in range(3):
        task = sine_task()
        learner = copy.deepcopy(net)
        x, y = points(task, 10)
        inner = F.mse_loss(learner(x), y)
        slopes = torch.autograd.grad(inner, list(learner.parameters()))
        with torch.no_grad():
            for weight, slope in zip(learner.parameters(), slopes, strict=True):
                weight -= 0.01 * slope
        x, y = points(task, 15)
        outer = F.mse_loss(learner(x), y)
        # broken
        outer.backward()
        # mended
        # slopes = torch.autograd.grad(outer, list(learner.parameters()))
        # for weight, slope in zip(net.parameters(), slopes, strict=True):
        #     weight.grad = slope if weight.grad is None else weight.grad + slope
        # end
        total += outer.item()
    meta_optimizer.step()
    print(f"episode {episode} loss {total / 3:.4f}")
