"""The parameters are counted from a generator first, and the optimizer gets what is left of it.

Threads: https://github.com/YanaiEliyahu/AdasOptimizer/issues/2
    https://github.com/pytorch/pytorch/issues/47594
Names: S2
"""

import torch
from torch import nn
from torch.nn import functional as F


class MatrixFactoriser(nn.Module):
    def __init__(self, users, items, width=12):
        super().__init__()
        self.user = nn.Embedding(users, width)
        self.item = nn.Embedding(items, width)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        for table in self.children():
            nn.init.normal_(table.weight, std=0.2)

    def forward(self, users, items):
        score = (self.user(users) * self.item(items)).sum(-1)
        return score + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0]


def make_ratings(users, items):
    taste = torch.randn(users, 3)
    kind = torch.randn(items, 3)
    return 3 + 0.7 * taste @ kind.t()


def main():
    torch.manual_seed(30)
    users, items = 90, 70
    ratings = make_ratings(users, items)
    model = MatrixFactoriser(users, items)
    params = filter(lambda p: p.requires_grad, model.parameters())
    # broken
    # mended
    # params = list(params)
    # end
    print("trainable:", sum(p.numel() for p in params))
    optimizer = torch.optim.Adam([{"params": params, "weight_decay": 1e-5}], lr=0.03)
    for step in range(20):
        u = torch.randint(users, (400,))
        i = torch.randint(items, (400,))
        optimizer.zero_grad()
        loss = F.mse_loss(model(u, i), ratings[u, i])
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}: mse {loss.item():.3f}")


if __name__ == "__main__":
    main()
