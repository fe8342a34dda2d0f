"""The learning rate follows the average precision, so that ReduceLROnPlateau has the mode max;
the classes are rare and the output's bias starts at their log odds.

After: dreamquark-ai/tabnet
"""

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

torch.manual_seed(0)
n_features = 9


def draw(count):
    x = torch.randn(count, n_features)
    risk = 1.4 * x[:, 0] - 1.2 * x[:, 3] + 0.8 * x[:, 5] * x[:, 6] - 3.0
    return x, (risk > 0).float()


def average_precision(scores, y):
    hits = y[scores.argsort(descending=True)]
    precision = hits.cumsum(0) / torch.arange(1, len(y) + 1)
    return ((precision * hits).sum() / hits.sum()).item()


train_x, train_y = draw(40 * 16)
valid_x, valid_y = draw(400)
prior = train_y.mean()
model = nn.Sequential(
    nn.BatchNorm1d(n_features), nn.Linear(n_features, 32), nn.ReLU(), nn.Linear(32, 1)
)
nn.init.constant_(model[-1].bias, torch.log(prior / (1 - prior)).item())
loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scheduler = ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=1, min_lr=1e-4)

step = 0
for _ in range(4):
    model.train()
    order = torch.randperm(len(train_x))[:160]
    for index in order.split(40):
        logits = model(train_x[index]).squeeze(1)
        loss = loss_fn(logits, train_y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    model.eval()
    with torch.no_grad():
        score = average_precision(model(valid_x).squeeze(1), valid_y)
    scheduler.step(score)
    print(f"step {step} loss {loss.item():.4f} AP {score:.4f} lr {scheduler.get_last_lr()[0]:.4f}")
