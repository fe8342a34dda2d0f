"""A backbone is fine-tuned with small rates for its early layers while its batch norm stays in
evaluation mode and keeps its statistics.

After: facebookresearch/detectron2
"""

import torch
import torch.nn.functional as F
from torch import nn, optim


class Finetuned(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.early = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.late = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.late(self.early(x)), 2).flatten(1))

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
                module.eval()
        return self


def gratings(classes, offset, count=25):
    y = torch.randint(0, classes, (count,))
    wave = torch.arange(12.0) * (0.5 + 0.45 * (y + offset)).view(-1, 1, 1, 1)
    x = torch.sin(wave + 6 * torch.rand(count, 1, 1, 1)) + 0.3 * torch.randn(count, 1, 12, 12)
    return x, y


def run(model, optimizer, steps, classes, offset):
    model.train()
    for step in range(steps):
        x, y = gratings(classes, offset)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


torch.manual_seed(0)
net = Finetuned(classes=4)
run(net, optim.Adam(net.parameters(), lr=5e-3), 10, classes=4, offset=0)
net.head = nn.Linear(64, 3)
for module in net.modules():
    if isinstance(module, nn.BatchNorm2d):
        module.requires_grad_(False)
rates = [(net.early[0], 1e-4), (net.late[0], 5e-4), (net.head, 1e-2)]
groups = [{"params": part.parameters(), "lr": lr} for part, lr in rates]
run(net, optim.Adam(groups), 10, classes=3, offset=1)
