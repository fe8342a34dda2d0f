"""A difference of (N, 1) and (N) becomes a square of pairs, so the fares drift to their mean.

Threads: https://github.com/jsboige/CoursIA/pull/926
    https://github.com/sktime/sktime/pull/10932
Names: F21
"""

import torch
from torch import nn

torch.manual_seed(77)
rides = 420
distance = torch.rand(rides) * 4
hour = torch.randint(0, 24, (rides,))
zone = torch.randint(0, 6, (rides,))
zone_fee = torch.tensor([0.0, 0.3, 0.6, 1.0, 1.4, 2.0])
fare = 0.5 + 0.9 * distance + zone_fee[zone] + 0.4 * (hour > 20) + 0.1 * torch.randn(rides)


class FareNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hour = nn.Embedding(24, 4)
        self.zone = nn.Embedding(6, 3)
        self.layers = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 1))

    def forward(self, distance, hour, zone):
        columns = [distance.unsqueeze(1), self.hour(hour), self.zone(zone)]
        return self.layers(torch.cat(columns, dim=1))


net = FareNet()
opt = torch.optim.AdamW(net.parameters(), lr=8e-3)
for step in range(18):
    rows = torch.randperm(rides)[:35]
    estimate = net(distance[rows], hour[rows], zone[rows])
    # broken
    error = estimate - fare[rows]
    # mended
    # error = estimate.squeeze(1) - fare[rows]
    # end
    loss = error.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 6 == 0:
        print(f"{step} rmse {loss.sqrt().item():.3f}")
