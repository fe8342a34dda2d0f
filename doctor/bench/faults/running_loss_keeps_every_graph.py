"""The running loss is summed as a tensor, so the graphs of all steps stay in memory.

Threads: https://github.com/BatsResearch/labelmodels/issues/4
    https://github.com/jostmey/NakedAttention/issues/1
Names: N27
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(73)
SOURCES, CLASSES = 7, 3
skill = torch.rand(SOURCES) * 0.5 + 0.4


class LabelModel(nn.Module):
    def __init__(self, hidden=30):
        super().__init__()
        self.votes = nn.Embedding(CLASSES + 1, 6)
        self.layers = nn.Sequential(
            nn.Linear(6 * SOURCES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)
        )

    def forward(self, votes):
        return self.layers(self.votes(votes).flatten(1))


def weak_labels(size):
    truth = torch.randint(CLASSES, (size,))
    noise = torch.randint(CLASSES, (size, SOURCES))
    votes = torch.where(torch.rand(size, SOURCES) < skill, truth[:, None], noise)
    abstained = torch.rand(size, SOURCES) < 0.1
    return votes.masked_fill(abstained, CLASSES), truth


model = LabelModel()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

STEPS = 18
running_loss = 0.0
for _ in range(STEPS):
    votes, truth = weak_labels(38)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(votes), truth)
    loss.backward()
    optimizer.step()
    # broken
    running_loss += loss
    # mended
    # running_loss += loss.item()
    # end
print(f"mean loss {running_loss / STEPS:.4f}")
