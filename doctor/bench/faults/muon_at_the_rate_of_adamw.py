"""Muon in its original convention gets AdamW's rate, and the hidden matrices hardly move.

Threads: https://github.com/KellerJordan/Muon/issues/49
    https://github.com/NVIDIA-NeMo/Emerging-Optimizers/issues/80
Names: N5b N5
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(6)
ITEMS, LENGTH, WIDTH = 70, 14, 48


class NextItemModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.up = nn.Linear(WIDTH, 96)
        self.down = nn.Linear(96, WIDTH)
        self.score = nn.Linear(WIDTH, ITEMS)

    def forward(self, history):
        hidden, _ = self.mixer(self.items(history))
        hidden = hidden + self.down(F.gelu(self.up(hidden)))
        return self.score(hidden)


model = NextItemModel()
hidden_names = ("mixer.weight", "up.weight", "down.weight")
hidden, rest = [], []
for name, parameter in model.named_parameters():
    group = hidden if name.startswith(hidden_names) else rest
    group.append(parameter)
# broken
muon = torch.optim.Muon(hidden, lr=3e-4, weight_decay=0.01)
# mended
# muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.01)
# end
adamw = torch.optim.AdamW(rest, lr=3e-4, weight_decay=0.01)

for step in range(18):
    first = torch.randint(ITEMS, (26, 1))
    stride = torch.randint(1, 4, (26, 1))
    history = (first + stride * torch.arange(LENGTH)) % ITEMS
    logits = model(history[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, ITEMS), history[:, 1:].reshape(-1))
    muon.zero_grad()
    adamw.zero_grad()
    loss.backward()
    muon.step()
    adamw.step()
    print(step, f"{loss.item():.4f}")
