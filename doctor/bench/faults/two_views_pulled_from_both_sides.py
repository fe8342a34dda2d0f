"""Both views carry a gradient in the cosine loss, so the shortest way is one answer for all rows.

Threads:
Names: F57
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

SHAPES, SIDE, BATCH = 8, 16, 26


class SiameseNet(nn.Module):
    def __init__(self, dim=48, hidden=24):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(96, dim), nn.BatchNorm1d(dim))
        self.predictor = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, first, second):
        z1 = self.projector(self.backbone(first))
        z2 = self.projector(self.backbone(second))
        return self.predictor(z1), self.predictor(z2), z1, z2


def views(shapes):
    picture = shapes[torch.randint(0, SHAPES, (BATCH,))]
    first = picture + 0.3 * torch.randn_like(picture)
    second = picture.roll(int(torch.randint(-2, 3, (1,))), -1) + 0.3 * torch.randn_like(picture)
    return first, second


torch.manual_seed(18)
shapes = F.interpolate(torch.randn(SHAPES, 1, 4, 4), size=SIDE, mode="bilinear")
model = SiameseNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
for epoch in range(18):
    p1, p2, z1, z2 = model(*views(shapes))
    # broken
    loss = -0.5 * (F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())
    # mended
    # z1, z2 = z1.detach(), z2.detach()
    # loss = -0.5 * (F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())
    # end
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 6 == 0:
        print(epoch, f"{loss.item():.4f}")
