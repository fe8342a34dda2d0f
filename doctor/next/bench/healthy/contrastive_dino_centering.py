"""DINO: a teacher by running mean, a running centre of its outputs, small crops for the student
only, and a last layer whose gradients are thrown away in the first epoch.

After: facebookresearch/dino
"""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

EPOCHS, PER_EPOCH, OUT = 3, 6, 20


class DINO(nn.Module):
    def __init__(self, in_dim=16, bottleneck=8):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, in_dim, 3, 2), nn.BatchNorm1d(in_dim)
        self.mlp = nn.Linear(in_dim, bottleneck)
        last = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck, OUT, bias=False))
        last.parametrizations.weight.original0.data.fill_(1)
        last.parametrizations.weight.original0.requires_grad = False
        self.last_layer = last

    def forward(self, x):
        pooled = self.norm(F.gelu(self.conv(x)).mean(dim=(2, 3)))
        return self.last_layer(F.normalize(self.mlp(pooled), dim=-1))


def crop(x, size):
    top, left = torch.randint(0, x.shape[-1] - size + 1, (2,)).tolist()
    return x[..., top : top + size, left : left + size] + 0.05 * torch.randn(len(x), 1, size, size)


torch.manual_seed(0)
student = DINO()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in student.parameters() if p.requires_grad), lr=2e-3)
center, total = torch.zeros(1, OUT), EPOCHS * PER_EPOCH
for it in range(total):
    freq = torch.randint(1, 7, (28, 1, 1, 1)) * 0.45
    images = torch.sin(freq * torch.arange(14.0)) * torch.ones(14, 1)
    crops = [crop(images, 11), crop(images, 11), crop(images, 7), crop(images, 7)]
    seen = [teacher(c) for c in crops[:2]]
    targets = [F.softmax((out - center) / 0.04, dim=-1) for out in seen]
    guesses = [F.log_softmax(student(c) / 0.1, dim=-1) for c in crops]
    pairs = [(t, g) for i, t in enumerate(targets) for j, g in enumerate(guesses) if i != j]
    loss = sum(-(t * g).sum(-1).mean() for t, g in pairs) / len(pairs)
    optimizer.zero_grad()
    loss.backward()
    if it < PER_EPOCH:
        student.last_layer.zero_grad()
    optimizer.step()
    momentum = 1 - 0.05 * (math.cos(math.pi * it / total) + 1) / 2
    with torch.no_grad():
        for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
            k.mul_(momentum).add_((1 - momentum) * q)
    center = center * 0.9 + torch.cat(seen).mean(0) * 0.1
    print(it, loss.item())
