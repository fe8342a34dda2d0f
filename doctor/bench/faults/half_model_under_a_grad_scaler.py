"""The whole model is fp16 and a GradScaler is used: it refuses to unscale FP16 gradients.

Threads: https://github.com/Lightning-AI/pytorch-lightning/issues/5140
    https://github.com/bitsandbytes-foundation/bitsandbytes/issues/945
Names: S7
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(101)
DEFECTS = 2


class ScrewNet(nn.Module):
    def __init__(self, width=14):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2)
        self.head = nn.Linear(width, DEFECTS)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.head(x.mean((2, 3)))


def photographs(size):
    defect = torch.randint(DEFECTS, (size,))
    images = 0.3 * torch.randn(size, 1, 15, 15)
    images[defect == 1, :, 5:9, 4:12] += 1.0
    return images, defect


model = ScrewNet()
# broken
model.half()
# mended
# end
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)

for step in range(16):
    images, defect = photographs(20)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(images)
        loss = F.cross_entropy(logits.float(), defect)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
