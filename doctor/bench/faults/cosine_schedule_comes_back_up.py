"""T_max counts epochs and the cosine is stepped at every batch, so the rate falls and rises.

Threads: https://github.com/ivadomed/ivadomed/issues/57
Names: N9
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(23)
WINDOW, HORIZON, EPOCHS = 30, 4, 3
time = torch.arange(400).float()
series = torch.sin(time / 7) + 0.4 * torch.sin(time / 3) + 0.1 * torch.randn(400)
windows = series.unfold(0, WINDOW + HORIZON, 2)
dataset = TensorDataset(windows[:, :WINDOW, None], windows[:, WINDOW:])
loader = DataLoader(dataset, batch_size=30, shuffle=True, drop_last=True)


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, HORIZON)

    def forward(self, past):
        hidden, _ = self.rnn(past)
        return self.out(hidden[:, -1])


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
# broken
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
# mended
# scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
# end

for epoch in range(EPOCHS):
    for past, future in loader:
        loss = F.mse_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(epoch, f"{loss.item():.4f}", scheduler.get_last_lr())
