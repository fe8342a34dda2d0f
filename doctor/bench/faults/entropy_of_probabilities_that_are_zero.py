"""The entropy is p * log(p) with probabilities that are exactly 0, so the loss is NaN.

Threads: https://github.com/maudzung/RTM3D/issues/13
    https://github.com/NVIDIA/apex/issues/358
Names: N17
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

USERS, ITEMS, TOP, BATCH = 60, 25, 5, 24


class Recommender(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.user = nn.Embedding(USERS, width)
        self.item = nn.Linear(width, ITEMS)

    def forward(self, user):
        scores = self.item(self.user(user))
        floor = scores.topk(TOP, dim=-1).values[:, -1:]
        short_list = scores.masked_fill(scores < floor, float("-inf"))
        return scores, short_list.softmax(-1)


def main():
    torch.manual_seed(55)
    taste = torch.randint(0, ITEMS, (USERS,))
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(18):
        user = torch.randint(0, USERS, (BATCH,))
        bought = (taste[user] + torch.randint(0, 2, (BATCH,))) % ITEMS
        scores, shares = model(user)
        # broken
        entropy = -(shares * shares.log()).sum(-1).mean()
        # mended
        # entropy = -(shares * shares.clamp(min=1e-8).log()).sum(-1).mean()
        # end
        loss = F.cross_entropy(scores, bought) - 0.05 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
