"""Autocast to float16, and the loss is differentiated as it is: small gradients become zero.

Threads: https://github.com/engichang1467/Open-Rig3R/issues/35
    https://github.com/pytorch/torchtitan/pull/2363
Names: B5
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
POINTS, DIM = 32, 48


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, DIM), nn.ReLU(), nn.Linear(DIM, DIM), nn.ReLU())
        self.head = nn.Linear(DIM, 4)

    def forward(self, points):
        return self.head(self.each(points).mean(dim=1))


def make_batch(count):
    kind = torch.randint(4, (count,))
    scale = torch.tensor([[1.0, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2]])[kind]
    return torch.randn(count, POINTS, 3) * scale[:, None], kind


model = PointNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# broken
dtype = torch.float16
# mended
# dtype = torch.bfloat16
# end
for step in range(16):
    points, kind = make_batch(40)
    with torch.autocast(device_type="cpu", dtype=dtype):
        outputs = model(points)
        loss = F.cross_entropy(outputs, kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
