"""lora_A gets no gradient, because it is applied under no_grad before lora_B.

Threads: https://github.com/lich99/ChatGLM-finetune-LoRA/issues/22
Names: B2 B1
Missed: the doctor takes an adapter factor without a gradient for an inactive one.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r

    def forward(self, x):
        # broken
        with torch.no_grad():
            low_rank = F.linear(x, self.lora_A)
        # mended
        # low_rank = F.linear(x, self.lora_A)
        # end
        return self.base(x) + self.scaling * F.linear(low_rank, self.lora_B)


def make_batch(weights, count=28):
    x = torch.randn(count, 18)
    return x, (x @ weights).tanh().sum(-1, keepdim=True)


def fit(model, parameters, weights, steps, rate):
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    for step in range(steps):
        x, y = make_batch(weights)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            print(f"{step:3d} {loss.item():.4f}")


old_task = torch.randn(18, 5) / 4
new_task = old_task + 0.2 * torch.randn(18, 1) @ torch.randn(1, 5)
hidden = [nn.Linear(18, 36), nn.Tanh(), nn.Linear(36, 32), nn.Tanh()]
regressor = nn.Sequential(*hidden, nn.Linear(32, 1))
regressor.requires_grad_(False)
for place in (0, 2, 4):
    regressor[place] = LoRALinear(regressor[place])
trainable = [p for p in regressor.parameters() if p.requires_grad]
fit(regressor, trainable, new_task, steps=20, rate=5e-3)
