"""The score of the chosen branch is divided by itself, so what is left of its gradient is rounding.

Threads: https://github.com/jingyaogong/minimind/issues/858
    https://github.com/jingyaogong/minimind/pull/859
Names: B7 M2
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
SENSORS, WIDTH, BRANCHES, STATES = 12, 24, 4, 5


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(SENSORS, WIDTH)
        self.gate = nn.Linear(WIDTH, BRANCHES, bias=False)
        self.branch = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES))
        self.leave = nn.Linear(WIDTH, STATES)

    def forward(self, x):
        h = self.enter(x).relu()
        score, chosen = self.gate(h).exp().max(dim=-1)
        # broken
        weight = score / (score + 1e-12)
        # mended
        # weight = self.gate(h).softmax(dim=-1).amax(dim=-1)
        # end
        every = torch.stack([branch(h) for branch in self.branch], dim=1)
        return self.leave(h + weight[:, None] * every[torch.arange(len(h)), chosen])


centres = torch.randn(STATES, SENSORS)
net = Branches()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(16):
    state = torch.randint(STATES, (64,))
    loss = F.cross_entropy(net(centres[state] + 0.5 * torch.randn(64, SENSORS)), state)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
