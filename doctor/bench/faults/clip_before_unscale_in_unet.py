"""Gradients are clipped while they carry the scaler's factor, so almost nothing of them is left.

Threads: https://github.com/Lightning-AI/pytorch-lightning/issues/9599
    https://github.com/milesial/Pytorch-UNet/issues/468
Names: N7
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(13)


class SmallUNet(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 1, 1)

    def forward(self, image):
        skip = F.relu(self.enter(image))
        deep = F.relu(self.down(skip))
        return self.out(torch.cat([skip, self.up(deep)], dim=1))


def blobs(size, side=16):
    grid = torch.arange(side).float()
    centre = torch.rand(size, 2) * side
    rows = (grid[None, :, None] - centre[:, 0, None, None]).square()
    columns = (grid[None, None, :] - centre[:, 1, None, None]).square()
    mask = (rows + columns < 18).float()[:, None]
    return mask + 0.5 * torch.randn_like(mask), mask


model = SmallUNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for step in range(18):
    image, mask = blobs(9)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(image)
    loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    # broken
    # mended
    # scaler.unscale_(optimizer)
    # end
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"{step} {loss.item():.4f}")
