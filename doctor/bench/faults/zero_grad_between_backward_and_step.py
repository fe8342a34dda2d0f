"""The gradients are cleared after backward and before the step, so no weight changes.

Threads: https://github.com/lucidrains/byol-pytorch/issues/93
    https://github.com/Tony-Y/pytorch_warmup/issues/12
Names: N2
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(5)


class Encoder(nn.Module):
    def __init__(self, width=16, out=24):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.project = nn.Linear(width * 36, out)

    def forward(self, images):
        hidden = F.relu(self.norm(self.conv(images)))
        return F.normalize(self.project(hidden.flatten(1)), dim=-1)


def two_views(size):
    images = torch.rand(size, 3, 1, 1) + 0.5 * torch.randn(size, 3, 12, 12)
    first = images + 0.2 * torch.randn_like(images)
    second = images.flip(-1) + 0.2 * torch.randn_like(images)
    return first, second


def contrastive_loss(first, second, temperature=0.2):
    similarity = first @ second.t() / temperature
    labels = torch.arange(len(first))
    return 0.5 * (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.t(), labels))


def main():
    encoder = Encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    for step in range(16):
        first, second = two_views(20)
        loss = contrastive_loss(encoder(first), encoder(second))
        # broken
        loss.backward()
        optimizer.zero_grad()
        # mended
        # optimizer.zero_grad()
        # loss.backward()
        # end
        optimizer.step()
        print(step, round(loss.item(), 4))


if __name__ == "__main__":
    main()
