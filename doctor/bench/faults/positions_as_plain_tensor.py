"""The position table is a plain tensor of zeros, which nothing trains.

Threads: https://github.com/pytorch/pytorch/issues/632
Names: S19
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(16)
SIDE, PATCH, WIDTH, CLASSES = 16, 4, 32, 5


class TinyViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        # broken
        self.pos_embed = torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH)
        # mended
        # self.pos_embed = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        # end
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.blocks(x + self.pos_embed)
        return self.head(self.norm(x[:, 0]))


def bright_spots(count):
    labels = torch.randint(CLASSES, (count,))
    images = 0.3 * torch.randn(count, 3, SIDE, SIDE)
    for row, label in enumerate(labels.tolist()):
        images[row, :, 3 * label : 3 * label + 4, 3 * label : 3 * label + 4] += 2.0
    return images, labels


vit = TinyViT()
optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(16):
    images, labels = bright_spots(24)
    loss = F.cross_entropy(vit(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, "loss", round(loss.item(), 4))
