"""SimCLR: the labels are always zero because the positive pair comes first in each row, and a mask
takes out the product of a row with itself.

After: sthalles/SimCLR
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
N_VIEWS, BATCH_SIZE, TEMPERATURE, STEPS, WARMUP = 2, 24, 0.2, 20, 4


def scenes(count):
    axis = torch.arange(10.0)
    fx, fy = torch.rand(2, count, 1, 1) * 1.5 + 0.3
    return torch.sin(fx * axis.view(10, 1) + fy * axis).unsqueeze(1)


def augment(images):
    images = images * (0.6 + 0.8 * torch.rand(len(images), 1, 1, 1))
    kept = (torch.rand_like(images) > 0.15).float()
    return images * kept + 0.1 * torch.randn_like(images)


def info_nce_loss(features):
    labels = torch.cat([torch.arange(BATCH_SIZE) for _ in range(N_VIEWS)])
    labels = labels.unsqueeze(0) == labels.unsqueeze(1)
    features = F.normalize(features, dim=1)
    similarity = features @ features.T
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity = similarity[~mask].view(similarity.shape[0], -1)
    positives = similarity[labels].view(labels.shape[0], -1)
    negatives = similarity[~labels].view(similarity.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / TEMPERATURE, torch.zeros(logits.shape[0], dtype=torch.long)


model = nn.Sequential(
    nn.Conv2d(1, 12, 3, 2), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(192, 40),
    nn.ReLU(), nn.Linear(40, 16),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - WARMUP, eta_min=0)
criterion = nn.CrossEntropyLoss()

for step in range(STEPS):
    images = scenes(BATCH_SIZE)
    views = torch.cat([augment(images) for _ in range(N_VIEWS)], dim=0)
    logits, labels = info_nce_loss(model(views))
    loss = criterion(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step >= WARMUP:
        scheduler.step()
    top1 = (logits.argmax(dim=1) == labels).float().mean()
    print(step, loss.item(), top1.item(), scheduler.get_last_lr()[0])
