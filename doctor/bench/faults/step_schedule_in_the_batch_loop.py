"""The schedule counts epochs and is stepped at every batch, so the rate is gone in one epoch.

Threads: https://github.com/ivadomed/ivadomed/pull/55
    https://github.com/automl/Auto-PyTorch/pull/210
Names: N9 N11
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)
rows = torch.randn(198, 9)
price = (rows[:, 0] * rows[:, 1] + rows[:, 2].clamp(min=0) - 0.5 * rows[:, 3])[:, None]
loader = DataLoader(TensorDataset(rows, price), batch_size=33, shuffle=True)

model = nn.Sequential(
    nn.Linear(9, 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
criterion = nn.MSELoss()


def main():
    for epoch in range(3):
        total = 0.0
        for features, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), target)
            loss.backward()
            optimizer.step()
            # broken
            scheduler.step()
            # mended
            # end
            total += loss.item()
        # broken
        # mended
        # scheduler.step()
        # end
        rate = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch} loss {total / len(loader):.4f} rate {rate:.2e}")


if __name__ == "__main__":
    main()
