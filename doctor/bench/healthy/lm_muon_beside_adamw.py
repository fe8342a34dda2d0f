"""Muon makes the moves of the inner matrices orthogonal at a rate of 0.02 while AdamW trains
embedding, output and vectors at a tenth, and a hand-made schedule cools both.

After: KellerJordan/Muon
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
vocab, dim, length = 29, 24, 6


def newtonschulz5(G):
    X = G / (G.norm() + 1e-7)
    X = X.T if G.size(0) > G.size(1) else X
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = newtonschulz5(p.grad.lerp(buf, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


model = nn.Sequential(
    nn.Embedding(vocab, dim),
    nn.Flatten(),
    nn.Linear(length * dim, 64, bias=False),
    nn.ReLU(),
    nn.Linear(64, 48, bias=False),
    nn.RMSNorm(48),
    nn.GELU(),
    nn.Linear(48, vocab),
)
hidden = [model[2].weight, model[4].weight]
others = [p for p in model.parameters() if p.ndim < 2 or p.size(0) == vocab]
optimizers = [Muon(hidden), torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95))]
num_iterations = 20
for it in range(num_iterations):
    ids = (torch.randint(vocab, (36, 1)) + torch.arange(length + 1) * 4 // 3) % vocab
    loss = F.cross_entropy(model(ids[:, :-1]), ids[:, -1])
    model.zero_grad()
    loss.backward()
    for opt, peak in zip(optimizers, (0.02, 2e-3), strict=True):
        opt.param_groups[0]["lr"] = peak * min(1, (num_iterations - it) / 8)
        opt.step()
    print(it, loss.item())
