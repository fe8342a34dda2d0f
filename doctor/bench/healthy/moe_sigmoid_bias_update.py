"""Routers of sigmoids choose experts with a bias that gets no gradient and is moved by hand after
each step, by the sign of each expert's lack of tokens, and no loss of balance is used.

After: deepseek-ai/DeepSeek-V3
"""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2)
dim, n_experts, n_active, inputs, outputs = 20, 8, 3, 10, 4


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_experts, dim) * dim**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(n_experts))
        self.register_buffer("load", torch.zeros(n_experts))

    def forward(self, x):
        scores = (x @ self.weight.T).sigmoid()
        indices = (scores + self.e_score_correction_bias).topk(n_active)[1]
        self.load += torch.bincount(indices.flatten(), minlength=n_experts)
        return F.normalize(scores.gather(1, indices), p=1, dim=-1), indices

    @torch.no_grad()
    def update_bias(self, speed=0.01):
        self.e_score_correction_bias += speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(inputs, dim), Gate()
        self.w1 = nn.Parameter(torch.randn(n_experts, dim, 16) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(n_experts, 16, dim) * 0.25)
        self.shared, self.head = nn.Linear(dim, dim), nn.Linear(dim, outputs)

    def forward(self, x):
        weights, indices = self.gate(x := F.silu(self.up(x)))
        hidden = F.silu(torch.einsum("bd,bkdh->bkh", x, self.w1[indices]))
        routed = torch.einsum("bkh,bkhd,bk->bd", hidden, self.w2[indices], weights)
        return self.head(x + self.shared(x) + routed)


centres, model = torch.randn(outputs * 3, inputs) * 1.5, MoE()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
train_steps = 20
for step in range(train_steps):
    which = torch.randint(len(centres), (48,))
    x, y = centres[which] + torch.randn(48, inputs), which % outputs
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.gate.update_bias()
    print(step, loss.item(), model.gate.e_score_correction_bias.tolist()[:3])
