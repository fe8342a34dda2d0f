"""A vision transformer has a distillation token that a frozen convolutional teacher instructs.

After: lucidrains/vit-pytorch
"""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, DIM = 5, 24
centres = torch.randn(CLASSES, 1, 8, 8, generator=torch.manual_seed(6))


def batch(size):
    labels = torch.randint(0, CLASSES, (size,))
    return centres[labels] + 0.6 * torch.randn(size, 1, 8, 8), labels


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, DIM, 4, 4)
        self.pos, self.cls = nn.Parameter(torch.randn(5, DIM)), nn.Parameter(torch.randn(1, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 3, 48, 0.1, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mlp_head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))

    def forward(self, img, distill_token):
        x = self.patch(img).flatten(2).mT
        x = torch.cat((self.cls.expand(len(x), 1, -1), x), dim=1) + self.pos
        x = self.transformer(torch.cat((x, distill_token.expand(len(x), 1, -1)), dim=1))
        return self.mlp_head(x[:, 0]), x[:, -1]


class DistillWrapper(nn.Module):
    def __init__(self, teacher, student, temperature=3.0, alpha=0.5):
        super().__init__()
        self.teacher, self.student, self.T, self.alpha = teacher, student, temperature, alpha
        self.distillation_token = nn.Parameter(torch.randn(1, DIM))
        self.distill_mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES))

    def forward(self, img, labels):
        with torch.no_grad():
            soft = F.softmax(self.teacher(img) / self.T, dim=-1)
        logits, tokens = self.student(img, self.distillation_token)
        guess = F.log_softmax(self.distill_mlp(tokens) / self.T, dim=-1)
        distill = F.kl_div(guess, soft, reduction="batchmean") * self.T**2
        return F.cross_entropy(logits, labels) * (1 - self.alpha) + distill * self.alpha


teacher = nn.Sequential(nn.Conv2d(1, CLASSES, 8), nn.Flatten()).eval().requires_grad_(False)
teacher[0].weight.copy_(centres * 0.08)
distiller = DistillWrapper(teacher, Student())
optimizer = torch.optim.Adam((p for p in distiller.parameters() if p.requires_grad), lr=2e-3)
for step in range(18):
    loss = distiller(*batch(26))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
