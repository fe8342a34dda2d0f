"""The layer-wise scale of the rate is an integer division, so all layers but the head have rate 0.

Threads: https://github.com/jaehyunnn/ViTPose_pytorch/issues/20
Names: N24
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(67)
CLASSES, SIDE, PATCH, WIDTH, DEPTH = 5, 16, 4, 32, 4
LR = 1e-3
templates = torch.randn(CLASSES, 1, SIDE, SIDE)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def depth_of(name):
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1])
    return DEPTH + 1 if name.startswith("head") else 0


model = VisionTransformer()
groups = []
for name, parameter in model.named_parameters():
    depth = depth_of(name) + 1
    # broken
    scale = depth // (DEPTH + 2)
    # mended
    # scale = depth / (DEPTH + 2)
    # end
    groups.append({"params": [parameter], "lr": LR * scale})
optimizer = torch.optim.AdamW(groups, weight_decay=0.05)

for step in range(15):
    label = torch.randint(CLASSES, (18,))
    images = templates[label] + 0.8 * torch.randn(18, 1, SIDE, SIDE)
    loss = F.cross_entropy(model(images), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.4f}")
