"""A U-Net: the border of each picture has the label 255, which cross entropy and Dice leave out.

After: milesial/Pytorch-UNet
"""

import torch
import torch.nn.functional as F
from torch import nn


def double_conv(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes):
        super().__init__()
        self.inc, self.down = double_conv(n_channels, 8), double_conv(8, 16)
        self.up, self.conv = nn.ConvTranspose2d(16, 8, 2, 2), double_conv(16, 8)
        self.outc = nn.Conv2d(8, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.up(self.down(F.max_pool2d(x1, 2)))
        dy, dx = x1.shape[2] - x2.shape[2], x1.shape[3] - x2.shape[3]
        x2 = F.pad(x2, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


def dice_loss(probs, target, known, eps=1e-6):
    inter, sets = 2 * probs * target * known, (probs + target) * known
    return 1 - ((inter.sum((0, 2, 3)) + eps) / (sets.sum((0, 2, 3)) + eps)).mean()


def scenes(count, height=15, width=18):
    masks = torch.zeros(count, height, width, dtype=torch.long)
    for mask, (r, c) in zip(masks, torch.randint(1, 9, (count, 2)).tolist(), strict=True):
        mask[r : r + 5, c : c + 6] = 1
        mask[c : c + 4, r : r + 7] = 2
    images = F.one_hot(masks, 3).movedim(-1, 1)[:, 1:] + 0.5 * torch.randn(count, 2, 15, 18)
    masks[:, [0, -1]] = 255
    return images, masks


torch.manual_seed(0)
model = UNet(n_channels=2, n_classes=3)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
for step in range(16):
    images, true_masks = scenes(7)
    masks_pred, known = model(images), (true_masks != 255).unsqueeze(1)
    loss = F.cross_entropy(masks_pred, true_masks, ignore_index=255)
    target = F.one_hot(true_masks.clamp(max=2), 3).movedim(-1, 1)
    loss += dice_loss(masks_pred.softmax(dim=1), target, known)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
