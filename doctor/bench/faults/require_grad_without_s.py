"""The flag is written require_grad, which torch does not know, and the features go on learning.

Threads: https://github.com/udacity/deep-learning-v2-pytorch/issues/12
    https://github.com/NVIDIA/TensorRT/issues/2608
Names: S18
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)


class SmallVGG(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 20, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(20 * 9, classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def flowers(prototypes, count):
    labels = torch.randint(len(prototypes), (count,))
    return prototypes[labels] + 0.5 * torch.randn(count, 3, 12, 12), labels


def fit(model, parameters, prototypes, steps, lr):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    for step in range(steps):
        images, labels = flowers(prototypes, 25)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(f"step {step + 1} loss {loss.item():.3f}")


vgg = SmallVGG(classes=10)
with torch.no_grad():
    for layer in (vgg.features[0], vgg.features[3]):
        layer.weight.mul_(1.5)  # stands in for weights of an earlier training
for param in vgg.features.parameters():
    # broken
    param.require_grad = False
    # mended
    # param.requires_grad = False
    # end
vgg.classifier = nn.Linear(20 * 9, 6)
fit(vgg, vgg.parameters(), torch.randn(6, 3, 12, 12), steps=18, lr=2e-3)
