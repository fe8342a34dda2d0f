"""The hash layer takes the sign of its features, so the encoder before it gets gradients of zero.

Threads: https://github.com/snap-stanford/GEARS/issues/36
Names: B7
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)


class DeepHash(nn.Module):
    def __init__(self, channels=3, bits=20, classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 12, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.to_bits = nn.Linear(24 * 9, bits)
        self.classifier = nn.Linear(bits, classes)

    def forward(self, images):
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x)).flatten(1)
        real = torch.tanh(self.to_bits(x))
        # broken
        code = torch.sign(real)
        # mended
        # code = real + (torch.sign(real) - real).detach()
        # end
        return self.classifier(code)


prototypes = torch.randn(6, 3, 12, 12)


def batch(size=22):
    labels = torch.randint(6, (size,))
    return prototypes[labels] + 0.8 * torch.randn(size, 3, 12, 12), labels


model = DeepHash()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
running = None
for step in range(20):
    images, labels = batch()
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = loss.item() if running is None else 0.8 * running + 0.2 * loss.item()
    if step % 4 == 3:
        print(f"step {step}: loss {running:.3f}")
