"""Predictions of shape (N, 1) meet targets of shape (N), so each is compared with every target.

Threads: https://github.com/sktime/sktime/pull/10932
    https://github.com/deepset-ai/FARM/issues/229
Names: F21
"""

import warnings

import torch
import torch.nn as nn

warnings.filterwarnings("ignore", category=UserWarning)
HISTORY, SERIES, BATCH = 16, 3, 22


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.lstm = nn.LSTM(SERIES, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, window):
        _, (state, _) = self.lstm(window)
        return self.head(state[-1])


def windows():
    phase = 6.28 * torch.rand(BATCH, 1, SERIES)
    time = torch.arange(HISTORY + 1).view(1, -1, 1) * 0.4
    values = torch.sin(time + phase) + 0.05 * torch.randn(BATCH, HISTORY + 1, SERIES)
    return values[:, :-1], values[:, -1, 0]


def run():
    torch.manual_seed(31)
    model = Forecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(20):
        x, y = windows()
        y_pred = model(x)
        # broken
        loss = criterion(y_pred, y)
        # mended
        # loss = criterion(y_pred, y.view_as(y_pred))
        # end
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 5 == 0:
            print(f"epoch {epoch}: mse {loss.item():.4f}")


run()
