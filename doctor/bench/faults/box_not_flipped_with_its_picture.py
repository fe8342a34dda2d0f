"""Pictures are flipped at random and their boxes are not, so the box is on the wrong side.

Threads: https://github.com/KaihuaTang/Scene-Graph-Benchmark.pytorch/pull/92
    https://github.com/open-mmlab/mmcv/issues/2526
Names: D19
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(139)
SIDE = 24


class Boxes(Dataset):
    def __init__(self, size):
        self.boxes = torch.rand(size, 4) * torch.tensor([14.0, 14.0, 6.0, 6.0])
        self.boxes[:, 2:] += self.boxes[:, :2] + 4

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, index):
        box = self.boxes[index].clone()
        x1, y1, x2, y2 = box.round().long().tolist()
        image = 0.2 * torch.rand(1, SIDE, SIDE)
        image[:, y1:y2, x1:x2] += 1
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
            # broken
            # mended
            # box[[0, 2]] = SIDE - box[[2, 0]]
            # end
        return image, box / SIDE


model = nn.Sequential(
    nn.Conv2d(1, 12, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(12, 16, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 36, 4),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = DataLoader(Boxes(640), batch_size=40, shuffle=True)

for step, (images, boxes) in enumerate(loader):
    loss = F.smooth_l1_loss(model(images), boxes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.5f}")
