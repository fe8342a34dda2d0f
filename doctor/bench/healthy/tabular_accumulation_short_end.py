"""Gradient accumulation over four small batches; the last window has two only, and its losses are
divided by two, so that each step is a mean of its own batches.

After: huggingface/accelerate
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_table(rows):
    numbers = torch.randn(rows, 6)
    kind = torch.randint(0, 5, (rows,))
    effect = torch.tensor([-1.5, -0.5, 0.0, 1.0, 2.0])
    target = numbers[:, 0] * 1.5 - numbers[:, 1] + effect[kind] + 0.1 * torch.randn(rows)
    return TensorDataset(numbers, kind, target)


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(5, 3)
        self.body = nn.Sequential(
            nn.Linear(9, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
        )

    def forward(self, numbers, kind):
        return self.body(torch.cat([numbers, self.kinds(kind)], dim=-1)).squeeze(-1)


def main():
    torch.manual_seed(0)
    loader = DataLoader(make_table(12 * 22), batch_size=12, shuffle=True)
    model = TabularNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 5))
    accumulation = 4
    for epoch in range(3):
        running = 0.0
        for index, (numbers, kind, target) in enumerate(loader):
            window_start = index - index % accumulation
            window = min(accumulation, len(loader) - window_start)
            loss = nn.functional.mse_loss(model(numbers, kind), target)
            (loss / window).backward()
            running += loss.item()
            if (index + 1) % accumulation == 0 or index + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: {running / len(loader):.4f}")


if __name__ == "__main__":
    main()
