"""The attack on each batch is made in evaluation mode, and the model trains on its result only.

After: locuslab/robust_overfitting
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
EPSILON, ALPHA, ATTACK_ITERS = 0.1, 0.04, 4


class PreActBlock(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(planes), nn.Conv2d(planes, planes, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(planes), nn.Conv2d(planes, planes, 3, padding=1)

    def forward(self, x):
        out = self.conv1(F.relu(self.bn1(x)))
        return x + self.conv2(F.relu(self.bn2(out)))


def attack_pgd(model, x, y):
    model.eval()
    delta = torch.empty_like(x).uniform_(-EPSILON, EPSILON)
    for _ in range(ATTACK_ITERS):
        delta.requires_grad_(True)
        loss = F.cross_entropy(model(torch.clamp(x + delta, 0, 1)), y)
        (grad,) = torch.autograd.grad(loss, delta)
        with torch.no_grad():
            delta = torch.clamp(delta + ALPHA * grad.sign(), -EPSILON, EPSILON)
    model.train()
    return torch.clamp(x + delta.detach(), 0, 1)


def squares(count):
    y = torch.randint(0, 4, (count,))
    x = 0.2 + 0.05 * torch.randn(count, 1, 9, 9)
    for picture, kind in zip(x, y.tolist(), strict=True):
        row, col = torch.randint(0, 5, (2,)).tolist()
        picture[0, row : row + 4, col : col + 4] = (0.35, 0.55, 0.75, 1.0)[kind]
    return x.clamp(0, 1), y


model = nn.Sequential(
    nn.Conv2d(1, 9, 3), PreActBlock(9), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=18)
for epoch in range(18):
    x, y = squares(22)
    output = model(attack_pgd(model, x, y))
    robust_loss = F.cross_entropy(output, y)
    opt.zero_grad()
    robust_loss.backward()
    opt.step()
    scheduler.step()
    print(epoch, robust_loss.item(), (output.argmax(1) == y).float().mean().item())
