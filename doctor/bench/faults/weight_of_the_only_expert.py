"""One expert per token, and its weight is divided by its own sum: the router gets no gradient from
the task.

Threads: https://github.com/jingyaogong/minimind/issues/858
    https://github.com/jingyaogong/minimind/pull/859
Names: M2
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
DIM, EXPERTS, CLASSES = 24, 4, 5


class MOEFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 48), nn.SiLU(), nn.Linear(48, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        scores = F.softmax(self.gate(x), dim=-1)
        topk_weight, topk_idx = torch.topk(scores, k=1, dim=-1, sorted=False)
        # broken
        topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
        # mended
        # end
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = topk_idx[:, 0] == i
            if mask.any():
                y = y.index_add(0, mask.nonzero()[:, 0], topk_weight[mask] * expert(x[mask]))
        return y


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(12, DIM), MOEFeedForward(), nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h = F.relu(self.inp(x))
        return self.out(h + self.moe(h))


centres = torch.randn(CLASSES, 12)
net = Classifier()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for it in range(20):
    label = torch.randint(CLASSES, (64,))
    batch = centres[label] + 0.7 * torch.randn(64, 12)
    loss = F.cross_entropy(net(batch), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 5 == 0:
        print(f"iter {it} loss {loss.item():.3f}")
