"""Each step climbs first, takes a second gradient on the same batch, comes back and descends.

After: davda54/sam
"""

import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    def params(self):
        return (p for g in self.param_groups for p in g["params"] if p.grad is not None)

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for p in self.params()]).norm()
        for p in self.params():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * self.defaults["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.params():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


def set_momentum(model, value):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = value


def main():
    torch.manual_seed(42)
    body = nn.Conv2d(2, 12, 3, 2), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*body, nn.Linear(108, 5))
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9)
    criterion, kinds = nn.CrossEntropyLoss(), torch.randn(5, 2, 8, 8)
    for step in range(16):
        targets = torch.randint(0, 5, (24,))
        inputs = kinds[targets] + torch.randn(24, 2, 8, 8)
        set_momentum(model, 0.1)
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.first_step()
        set_momentum(model, 0.0)
        criterion(model(inputs), targets).backward()
        optimizer.second_step()
        print(step, loss.item())


main()
