"""Some sets are empty and masked from end to end, so their attention is NaN and with it the loss.

Threads: https://github.com/pytorch/pytorch/issues/24816
    https://github.com/dmlc/dgl/issues/2657
Names: F5
"""

import torch
from torch import nn
from torch.nn import functional as F

MAX_ITEMS, FEATURES, BATCH = 9, 6, 20


class BasketEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(FEATURES, 32)
        self.query_key_value = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.score = nn.Linear(32, 1)

    def forward(self, items, padding):
        x = self.project(items)
        # broken
        key_padding = padding
        # mended
        # key_padding = padding & ~padding.all(1, keepdim=True)
        # end
        query, key, value = self.query_key_value(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / 32**0.5
        scores = scores.masked_fill(key_padding[:, None], float("-inf"))
        x = self.norm(x + scores.softmax(-1) @ value)
        real = (~padding).unsqueeze(-1)
        return self.score((x * real).sum(1) / real.sum(1).clamp(min=1)).squeeze(-1)


def baskets(true_weight):
    count = torch.randint(0, MAX_ITEMS + 1, (BATCH,))
    items = torch.randn(BATCH, MAX_ITEMS, FEATURES)
    padding = torch.arange(MAX_ITEMS) >= count[:, None]
    items = items.masked_fill(padding.unsqueeze(-1), 0.0)
    return items, padding, items.sum(1) @ true_weight / count.clamp(min=1)


def main():
    torch.manual_seed(21)
    true_weight = torch.randn(FEATURES)
    model = BasketEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(18):
        *inputs, total = baskets(true_weight)
        loss = F.mse_loss(model(*inputs), total)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
