"""Two views of a row are compared through a predictor with a slow copy of the encoder, without any
negatives, and the loss of both orders is a mean of squared distances between unit vectors.

After: lucidrains/byol-pytorch
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(14)
inputs, projection, rows = 18, 12, 56


def update_average(old, new, beta=0.97):
    return old * beta + (1 - beta) * new


def mlp(dim, out):
    layers = nn.Linear(dim, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, out)
    return nn.Sequential(*layers)


def loss_fn(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online_encoder, self.predictor = mlp(inputs, projection), mlp(projection, projection)
        self.target_encoder = copy.deepcopy(self.online_encoder)
        self.target_encoder.requires_grad_(False)

    def update_moving_average(self):
        encoders = self.online_encoder, self.target_encoder
        for new, old in zip(*(e.parameters() for e in encoders), strict=True):
            old.data = update_average(old.data, new.data)

    def forward(self, x):
        noise = 0.6 * torch.randn(2, *x.shape)
        first, second = x + noise[0], x * (torch.rand_like(x) > 0.1) + noise[1]
        online = self.predictor(self.online_encoder(torch.cat((first, second)))).chunk(2)
        with torch.no_grad():
            target = self.target_encoder(torch.cat((first, second))).chunk(2)
        return (loss_fn(online[0], target[1]) + loss_fn(online[1], target[0])).mean()


learner = BYOL()
opt, basis = torch.optim.Adam(learner.parameters(), lr=3e-3), torch.randn(4, inputs)
steps = 20
for step in range(steps):
    loss = learner(torch.randn(rows, 4) @ basis)
    opt.zero_grad()
    loss.backward()
    opt.step()
    learner.update_moving_average()
    print(step, loss.item())
