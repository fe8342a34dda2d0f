"""A network that was fitted to one task by least squares is frozen and gets low-rank factors of
which the second starts at zero, so that the first has no gradient in the first step.

After: microsoft/LoRA
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
inputs, hidden, classes = 12, 40, 5
answers = torch.randn(inputs, classes)


class LoRALinear(nn.Linear):
    def __init__(self, base, r=4, lora_alpha=8):
        super().__init__(base.in_features, base.out_features)
        self.load_state_dict(base.state_dict())
        self.weight.requires_grad = False
        self.bias.requires_grad = False
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = lora_alpha / r
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return super().forward(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def batch(count, mixing):
    x = torch.randn(count, inputs)
    return x, (x @ mixing @ answers).argmax(1)


model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))
x, y = batch(800, torch.eye(inputs))
with torch.no_grad():
    features = torch.cat([model[:2](x), torch.ones(len(x), 1)], dim=1)
    wanted = F.one_hot(y, classes) * 6.0 - 1.2
    solved = torch.linalg.lstsq(features.double(), wanted.double()).solution.float()
    model[2].weight.copy_(solved[:-1].T)
    model[2].bias.copy_(solved[-1])
model[0], model[2] = LoRALinear(model[0]), LoRALinear(model[2])
lora_params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(lora_params, lr=1e-2)
turn = torch.eye(inputs) + 0.35 * torch.randn(inputs, inputs)
steps = 18
for step in range(steps):
    x, y = batch(64, turn)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
