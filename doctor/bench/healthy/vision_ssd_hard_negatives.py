"""A one-shot detector: boxes are learned only where an object is, and of the empty places only the
hardest three per object count.

After: amdegroot/ssd.pytorch
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
NUM_CLASSES, GRID, CELL = 4, 5, 4


def make_batch(count):
    images = torch.randn(count, 3, GRID * CELL, GRID * CELL) * 0.3
    conf = torch.zeros(count, GRID * GRID, dtype=torch.long)
    loc = torch.zeros(count, GRID * GRID, 4)
    for n in range(count):
        for place in torch.randperm(GRID * GRID)[:2].tolist():
            kind = int(torch.randint(1, NUM_CLASSES, ()))
            row, col = divmod(place, GRID)
            h, w = torch.randint(1, CELL + 1, (2,)).tolist()
            images[n, kind - 1, row * CELL : row * CELL + h, col * CELL : col * CELL + w] += 3
            conf[n, place] = kind
            loc[n, place] = torch.tensor([w / 2, h / 2, w, h]) / CELL
    return images, loc, conf


class SSD(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, CELL, CELL), nn.ReLU()
        )
        self.loc = nn.Conv2d(24, 4, 1)
        self.conf = nn.Conv2d(24, NUM_CLASSES, 1)

    def forward(self, x):
        x = self.features(x)
        return self.loc(x).flatten(2).mT, self.conf(x).flatten(2).mT


net = SSD()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
for iteration in range(20):
    images, loc_t, conf_t = make_batch(12)
    loc_p, conf_p = net(images)
    pos = conf_t > 0
    num_pos = pos.sum(dim=1, keepdim=True)
    loss_l = F.smooth_l1_loss(loc_p[pos], loc_t[pos], reduction="sum")
    ce = F.cross_entropy(conf_p.mT, conf_t, reduction="none")
    rank = ce.detach().masked_fill(pos, 0).argsort(dim=1, descending=True).argsort(dim=1)
    neg = rank < torch.clamp(3 * num_pos, max=GRID * GRID - 1)
    loss_c = ce[pos | neg].sum()
    loss = (loss_l + loss_c) / num_pos.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"iter {iteration} loc {loss_l.item():.3f} conf {loss_c.item():.3f} {loss.item():.4f}")
