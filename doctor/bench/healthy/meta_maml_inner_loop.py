"""MAML on sine waves: the inner loop makes new weights without an optimizer, keeps its graph, and
only the outer loss, after the inner step, moves the shared weights.

After: cbfinn/maml
"""

import torch
from torch import nn
from torch.func import functional_call

META_BATCH, SHOTS, QUERY, INNER_LR, INNER_STEPS = 6, 10, 15, 0.05, 2


def sample_task():
    amplitude = torch.rand(()) * 1.5 + 0.5
    phase = torch.rand(()) * 3.14

    def draw(count):
        x = torch.rand(count, 1) * 6 - 3
        return x, amplitude * torch.sin(x + phase)

    return draw(SHOTS), draw(QUERY)


def adapt(model, weights, x, y):
    for _ in range(INNER_STEPS):
        loss = nn.functional.mse_loss(functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = zip(weights.items(), slopes, strict=True)
        weights = {name: weight - INNER_LR * slope for (name, weight), slope in moved}
    return weights


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    model.append(nn.Linear(32, 1))
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for iteration in range(18):
        weights = dict(model.named_parameters())
        before, meta_loss = 0.0, 0.0
        for _ in range(META_BATCH):
            (x_s, y_s), (x_q, y_q) = sample_task()
            with torch.no_grad():
                before += nn.functional.mse_loss(model(x_q), y_q).item() / META_BATCH
            fast = adapt(model, weights, x_s, y_s)
            query_loss = nn.functional.mse_loss(functional_call(model, fast, (x_q,)), y_q)
            meta_loss = meta_loss + query_loss / META_BATCH
        meta_optimizer.zero_grad()
        meta_loss.backward()
        meta_optimizer.step()
        print(f"{iteration} before {before:.3f} after {meta_loss.item():.3f}")


if __name__ == "__main__":
    main()
