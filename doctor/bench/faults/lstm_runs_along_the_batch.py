"""The LSTM lacks batch_first and is given the batch first, so it runs from row to row.

Threads: https://github.com/aipixel/AEMatter/issues/3
Names: S21
"""

import torch
import torch.nn as nn

torch.manual_seed(27)
LENGTH, FEATURES, HIDDEN = 18, 3, 24


class DemandForecaster(nn.Module):
    def __init__(self):
        super().__init__()
        # broken
        self.lstm = nn.LSTM(FEATURES, HIDDEN)
        # mended
        # self.lstm = nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        # end
        self.fc = nn.Sequential(nn.Linear(HIDDEN, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, window):
        output, _ = self.lstm(window)
        return self.fc(output[:, -1]).squeeze(1)


def shops(count):
    level = 0.2 * torch.randn(count, 1)
    phase = 6.28 * torch.rand(count, 1)
    t = torch.arange(LENGTH + 1)
    sales = level + torch.sin(phase + 0.5 * t) + 0.05 * torch.randn(count, LENGTH + 1)
    weekday = torch.stack([torch.sin(6.28 * t / 7), torch.cos(6.28 * t / 7)], dim=-1)
    features = torch.cat([sales.unsqueeze(-1), weekday.expand(count, -1, -1)], dim=-1)
    return features[:, :-1], sales[:, -1]


model = DemandForecaster()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
history = []
for _ in range(20):
    window, target = shops(36)
    optimizer.zero_grad()
    loss = criterion(model(window), target)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    history.append(loss.item())
print("first and last loss:", round(history[0], 4), round(history[-1], 4))
