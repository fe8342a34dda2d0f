"""The backbone is frozen, but model.train() lets its batch norms go on averaging new data.

Threads: https://github.com/pgniewko/gt-pyg/issues/112
    https://github.com/ultralytics/ultralytics/pull/8753
Names: N12
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(41)
NEW_CLASSES = 3
new_kinds = 0.5 * torch.randn(NEW_CLASSES, 3, 10, 10)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16 * 16, classes)

    def forward(self, images):
        return self.head(self.backbone(images).flatten(1))


def batch(kinds, size):
    label = torch.randint(len(kinds), (size,))
    return kinds[label] + 0.8 * torch.randn(size, 3, 10, 10), label


model = Net(NEW_CLASSES)
for parameter in model.backbone.parameters():
    parameter.data = 0.15 * torch.randn_like(parameter) + (parameter.dim() == 1)
    parameter.requires_grad_(False)
optimizer = torch.optim.Adam(model.head.parameters(), lr=2e-3)

for epoch in range(2):
    model.train()
    # broken
    # mended
    # model.backbone.eval()
    # end
    for _ in range(9):
        images, label = batch(new_kinds, 25)
        loss = F.cross_entropy(model(images), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
