"""DINO: small crops go to the student only, and the gradients of the last layer are thrown away in
the first epoch.

After: facebookresearch/dino
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

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
        x = self.mlp(self.norm(F.gelu(self.conv(x)).mean(dim=(2, 3))))
        return self.last_layer(F.normalize(x, dim=-1))


def crop(x, size):
    start = int(torch.randint(0, x.shape[-1] - size + 1, ()))
    return x[..., :size, start : start + size] + 0.05 * torch.randn(len(x), 1, size, size)


torch.manual_seed(0)
student = DINO()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in student.parameters() if p.requires_grad), lr=2e-3)
center = torch.zeros(1, OUT)
for it in range(EPOCHS * PER_EPOCH):
    freq = torch.randint(1, 7, (28, 1, 1, 1)) * 0.45
    images = torch.sin(freq * torch.arange(14.0)) * torch.ones(14, 1)
    crops = [crop(images, size) for size in (11, 11, 7, 7)]
    seen = teacher(torch.cat(crops[:2]))
    targets = F.softmax((seen - center) / 0.04, dim=-1).chunk(2)
    guesses = [F.log_softmax(student(c) / 0.1, dim=-1) for c in crops]
    pairs = [(t, g) for i, t in enumerate(targets) for j, g in enumerate(guesses) if i != j]
    loss = torch.stack([-(t * g).sum(-1).mean() for t, g in pairs]).mean()
    optimizer.zero_grad()
    loss.backward()
    if it < PER_EPOCH:
        student.last_layer.zero_grad()
    optimizer.step()
    with torch.no_grad():
        for q, k in zip(student.parameters(), teacher.parameters(), strict=True):
            k.lerp_(q, 0.05)
    center = center * 0.9 + seen.mean(0) * 0.1
    print(it, loss.item())
