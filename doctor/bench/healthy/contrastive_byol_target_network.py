"""BYOL: the target network is a deep copy that is moved by hand after each step and never by an
optimizer; the loss is two minus two cosines.

After: lucidrains/byol-pytorch
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def MLP(dim, projection_size, hidden_size=48):
    return nn.Sequential(
        nn.Linear(dim, hidden_size), nn.BatchNorm1d(hidden_size), nn.ReLU(inplace=True),
        nn.Linear(hidden_size, projection_size),
    )  # fmt: skip


def loss_fn(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)


class BYOL(nn.Module):
    def __init__(self, net, dim, projection_size=12, moving_average_decay=0.95):
        super().__init__()
        self.online_encoder = nn.Sequential(net, MLP(dim, projection_size))
        self.online_predictor = MLP(projection_size, projection_size)
        self.target_encoder = copy.deepcopy(self.online_encoder).requires_grad_(False)
        self.beta = moving_average_decay

    def update_moving_average(self):
        pairs = zip(self.online_encoder.parameters(), self.target_encoder.parameters(), strict=True)
        for current, kept in pairs:
            kept.data = kept.data * self.beta + (1 - self.beta) * current.data

    def forward(self, one, two):
        images = torch.cat((one, two), dim=0)
        online_one, online_two = self.online_predictor(self.online_encoder(images)).chunk(2)
        with torch.no_grad():
            target_one, target_two = self.target_encoder(images).chunk(2)
        return (loss_fn(online_one, target_two) + loss_fn(online_two, target_one)).mean()


learner = BYOL(nn.Sequential(nn.Conv1d(2, 10, 5, 2), nn.ReLU(), nn.Flatten()), dim=100)
opt = torch.optim.Adam(learner.parameters(), lr=2e-3)
grid = torch.arange(24.0)
for step in range(18):
    speed = torch.rand(26, 2, 1) * 1.2 + 0.2
    series = torch.sin(speed * grid)
    views = [series + 0.25 * torch.randn_like(series) for _ in range(2)]
    loss = learner(*views)
    opt.zero_grad()
    loss.backward()
    opt.step()
    learner.update_moving_average()
    print(step, loss.item())
