"""Cosine annealing with warm restarts by fractions of an epoch: the rate falls almost to zero and
jumps back twice within the run; a soft ordinal target is not a one-hot row.

After: pytorch/pytorch
"""

import torch
import torch.nn as nn

torch.manual_seed(2)
classes, features, batch = 6, 7, 34
direction = torch.nn.functional.normalize(torch.randn(features), dim=0)
levels = torch.arange(classes)


def soft_ordinal(y):
    return torch.softmax(-2.0 * (levels - y.unsqueeze(1)).abs(), dim=1)


def table(rows):
    x = torch.randn(rows, features)
    score = x @ direction + 0.1 * torch.randn(rows)
    return x, (score * 1.5 + 3).floor().clamp(0, classes - 1).long()


train_x, train_y = table(batch * 5)
model = nn.Sequential(
    nn.Linear(features, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, classes)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
criterion = nn.CrossEntropyLoss()
iters = len(train_x) // batch

for epoch in range(4):
    permutation = torch.randperm(len(train_x))
    for i in range(iters):
        index = permutation[i * batch : (i + 1) * batch]
        inputs, labels = train_x[index], train_y[index]
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, soft_ordinal(labels))
        loss.backward()
        optimizer.step()
        print(epoch, i, f"lr {optimizer.param_groups[0]['lr']:.4f} loss {loss.item():.4f}")
        scheduler.step(epoch + (i + 1) / iters)
    with torch.no_grad():
        distance = (model(train_x).argmax(1) - train_y).abs().float().mean()
    print(f"mean distance {distance.item():.3f}")
