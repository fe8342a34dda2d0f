"""The old model is a shallow copy that shares its weights, so it forgets together with the new one.

Threads: https://github.com/DerrickXuNu/dvrl_pytorch/issues/2
    https://github.com/andri27-ts/Reinforcement-Learning/issues/14
Names: F7 F2
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(131)
TASK_CLASSES = 4
clusters = 1.5 * torch.randn(2 * TASK_CLASSES, 20)


def task_batch(size, first):
    label = first + torch.randint(TASK_CLASSES, (size,))
    return clusters[label] + torch.randn(size, 20), label


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.head = nn.Linear(32, 2 * TASK_CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    model = Learner()
    # broken
    old_model = copy.copy(model)
    # mended
    # old_model = copy.deepcopy(model).requires_grad_(False)
    # end
    old_model.eval()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(18):
        x, label = task_batch(30, TASK_CLASSES)
        scores = model(x)
        with torch.no_grad():
            remembered = old_model(x)[:, :TASK_CLASSES].softmax(-1)
        forgetting = F.kl_div(
            scores[:, :TASK_CLASSES].log_softmax(-1), remembered, reduction="batchmean"
        )
        loss = F.cross_entropy(scores, label) + forgetting
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{step} loss {loss.item():.4f} forgetting {forgetting.item():.4f}")


if __name__ == "__main__":
    main()
