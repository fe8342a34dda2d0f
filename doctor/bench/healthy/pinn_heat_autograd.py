"""A network that solves the heat equation: there are no targets but zero for the residual, whose
derivatives come from autograd.grad with respect to the inputs.

After: okada39/pinn_burgers
"""

import math

import torch
from torch import nn

torch.manual_seed(0)
ALPHA = 0.3


class PINN(nn.Module):
    def __init__(self, width=24, depth=2):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def derivative(y, x):
    return torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)[0]


def residual(model, x, t):
    u = model(x.requires_grad_(True), t.requires_grad_(True))
    return derivative(u, t) - ALPHA * derivative(derivative(u, x), x)


model = PINN()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
x_start = torch.linspace(0, 1, 30).view(-1, 1)
u_start = torch.sin(math.pi * x_start)
for step in range(20):
    x, t = torch.rand(2, 70, 1)
    t_edge = torch.rand(26, 1)
    loss_pde = residual(model, x, t).pow(2).mean()
    loss_start = (model(x_start, torch.zeros(30, 1)) - u_start).pow(2).mean()
    left, right = model(torch.zeros(26, 1), t_edge), model(torch.ones(26, 1), t_edge)
    loss_edge = left.pow(2).mean() + right.pow(2).mean()
    loss = 0.1 * loss_pde + loss_start + loss_edge
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, f"pde {loss_pde.item():.4f} start {loss_start.item():.4f} {loss.item():.4f}")
