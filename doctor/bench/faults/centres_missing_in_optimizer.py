"""The centre loss has learnable centres, which no optimizer holds, so they stay where they began.

Threads: https://github.com/KaiyangZhou/pytorch-center-loss/issues/11
    https://github.com/KaiyangZhou/pytorch-center-loss/issues/22
Names: S3
"""

import torch
import torch.nn.functional as F
from torch import nn


class CenterLoss(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, width))

    def forward(self, features, labels):
        return (features - self.centers[labels]).pow(2).sum(dim=1).mean() / 2


class DigitNet(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.PReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.embed = nn.Linear(8 * 25, 6)
        self.act = nn.PReLU()
        self.classify = nn.Linear(6, classes)

    def forward(self, x):
        features = self.act(self.embed(self.body(x)))
        return features, self.classify(features)


def main():
    torch.manual_seed(7)
    shapes = torch.randn(8, 1, 12, 12)
    net = DigitNet()
    center_loss = CenterLoss(8, 6)
    # broken
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    # mended
    # params = [*net.parameters(), *center_loss.parameters()]
    # optimizer = torch.optim.SGD(params, lr=0.03, momentum=0.9)
    # end
    for step in range(20):
        labels = torch.randint(8, (36,))
        images = shapes[labels] + 0.6 * torch.randn(36, 1, 12, 12)
        features, logits = net(images)
        loss = F.cross_entropy(logits, labels) + 0.05 * center_loss(features, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(step, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
