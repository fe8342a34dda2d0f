"""Three quantiles at once: targets of one column are compared with outputs of three columns on
purpose, and the pinball loss does not end at zero.

After: jdb78/pytorch-forecasting
"""

import torch
from torch import nn

torch.manual_seed(0)
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def quantile_loss(y_pred, target):
    errors = target.unsqueeze(-1) - y_pred
    return torch.maximum((QUANTILES - 1) * errors, QUANTILES * errors).mean()


class GatedResidual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + nn.functional.glu(self.fc2(nn.functional.elu(self.fc1(x)))))


class Quantiles(nn.Module):
    def __init__(self, inputs, width=24):
        super().__init__()
        self.prescaler = nn.Linear(inputs, width)
        self.blocks = nn.Sequential(GatedResidual(width), GatedResidual(width))
        self.lowest = nn.Linear(width, 1)
        self.gaps = nn.Linear(width, len(QUANTILES) - 1)

    def forward(self, x):
        x = self.blocks(self.prescaler(x))
        gaps = nn.functional.softplus(self.gaps(x))
        return torch.cumsum(torch.cat([self.lowest(x), gaps], dim=-1), dim=-1)


model = Quantiles(inputs=4)
steps = 20
optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=2e-2, total_steps=steps, pct_start=0.3, cycle_momentum=False
)
for step in range(steps):
    x = torch.rand(56, 4) * 2 - 1
    spread = 0.3 + 0.5 * x[:, 1].abs()
    y = 2 * x[:, 0] + torch.sin(3 * x[:, 2]) + spread * torch.randn(56)
    prediction = model(x)
    loss = quantile_loss(prediction, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    inside = (y > prediction[:, 0]) & (y < prediction[:, 2])
    print(step, round(loss.item(), 4), round(inside.float().mean().item(), 3))
