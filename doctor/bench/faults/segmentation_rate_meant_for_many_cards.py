"""The learning rate is far too large for the batch, and the loss explodes after a few steps.

Threads: https://github.com/facebookresearch/maskrcnn-benchmark/issues/295
    https://github.com/guillaumegenthial/sequence_tagging/issues/47
Names: N5 F5 N17
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(17)


def draw_squares(size, side=20):
    masks = torch.zeros(size, side, side)
    for mask in masks:
        top, left = torch.randint(side - 8, (2,)).tolist()
        mask[top : top + 7, left : left + 6] = 1
    images = masks[:, None] + 0.4 * torch.randn(size, 1, side, side)
    return images, masks.long()


net = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(12, 12, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(12, 2, 1),
)
# broken
optimizer = torch.optim.SGD(net.parameters(), lr=8.0, momentum=0.9)
# mended
# optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
# end

for step in range(16):
    images, masks = draw_squares(6)
    loss = F.cross_entropy(net(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
