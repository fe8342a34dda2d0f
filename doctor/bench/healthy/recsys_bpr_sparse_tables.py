"""Matrix factorisation with sampled negatives: tables have sparse gradients, most rows get none
in a step, and two optimizers share the model.

After: guoyang9/BPR-pytorch
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class BPR(nn.Module):
    def __init__(self, user_num, item_num, factor_num):
        super().__init__()
        self.embed_user = nn.Embedding(user_num, factor_num, sparse=True)
        self.embed_item = nn.Embedding(item_num, factor_num, sparse=True)
        self.item_bias = nn.Parameter(torch.zeros(item_num))
        nn.init.normal_(self.embed_user.weight, std=0.1)
        nn.init.normal_(self.embed_item.weight, std=0.1)

    def forward(self, user, item_i, item_j):
        user = self.embed_user(user)
        pos, neg = self.embed_item(item_i), self.embed_item(item_j)
        prediction_i = (user * pos).sum(dim=-1) + self.item_bias[item_i]
        prediction_j = (user * neg).sum(dim=-1) + self.item_bias[item_j]
        return prediction_i, prediction_j


def main():
    torch.manual_seed(0)
    users, items = 60, 90
    taste = torch.randn(users, 3) @ torch.randn(3, items)
    liked = taste > taste.quantile(0.85, dim=1, keepdim=True)
    pairs = liked.nonzero()
    model = BPR(users, items, factor_num=8)
    tables = [model.embed_user.weight, model.embed_item.weight]
    optimizers = [
        torch.optim.SparseAdam(tables, lr=0.02),
        torch.optim.SGD([model.item_bias], lr=0.5),
    ]
    for step in range(20):
        user, item_i = pairs[torch.randint(0, len(pairs), (130,))].T
        item_j = torch.randint(0, items, user.shape)
        for _ in range(20):
            wrong = liked[user, item_j]
            item_j[wrong] = torch.randint(0, items, (int(wrong.sum()),))
        prediction_i, prediction_j = model(user, item_i, item_j)
        loss = -F.logsigmoid(prediction_i - prediction_j).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        right = (prediction_i > prediction_j).float().mean()
        print(step, f"loss {loss.item():.4f} pairs in order {right.item():.3f}")


if __name__ == "__main__":
    main()
