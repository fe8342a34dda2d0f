"""The whole network is frozen, head and all, and the loss is only made to require a gradient.

Threads: https://github.com/ymcui/Chinese-LLaMA-Alpaca-2/pull/578
Names: S1 F1
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)


class Backbone(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 10, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(10, 20, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
        )
        self.fc = nn.Linear(180, classes)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def photos(patterns, count):
    labels = torch.randint(len(patterns), (count,))
    return patterns[labels] + 0.7 * torch.randn(count, 3, 14, 14), labels


def train(model, patterns, steps, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        images, labels = photos(patterns, 26)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        # broken
        loss.requires_grad_(True)
        # mended
        # end
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"step {step} loss {loss.item():.3f}")


model = Backbone(classes=5)
for param in model.features.parameters():
    param.data.mul_(1.5 + torch.rand_like(param))  # stands in for trained weights
    param.requires_grad = False
# broken
for param in model.fc.parameters():
    param.requires_grad = False
# mended
# end
train(model, torch.randn(5, 3, 14, 14), steps=18, lr=0.01)
