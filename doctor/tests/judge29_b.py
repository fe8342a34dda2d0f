import copy
import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


def endless(loader):
    while True:
        for batch in loader:
            yield batch


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@contextmanager
def evaluating(*models):
    saved = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in saved:
            m.training = flag


CASES = []


CASES.append({
    "name": 'house_prices',
    "field": 'tabular data',
    "what": 'The loss subtracts targets of shape (B,) from predictions of shape (B, 1), so it broadcasts to a (B, B) matrix of all pairs and the network is pulled towards the mean target.',
})


class PriceNet(nn.Module):
    def __init__(self, n_in, hidden=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_in, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.net(x)


def house_data(n, seed):
    g = seeded(seed)
    x = torch.randn(n, 10, generator=g)
    y = 1.5 * x[:, 0] - x[:, 1] * x[:, 2] + torch.sin(2 * x[:, 3]) + 0.8 * x[:, 4].abs()
    y = y + 0.1 * torch.randn(n, generator=g)
    return x, y


def house_prices_bad():
    torch.manual_seed(11)
    x_train, y_train = house_data(2000, 1)
    x_test, y_test = house_data(500, 2)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, generator=seeded(3))
    batches = endless(loader)
    model = PriceNet(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        pred = model(x)
        err = pred - y
        loss = (err ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test).squeeze(-1) - y_test).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_prices_good():
    torch.manual_seed(11)
    x_train, y_train = house_data(2000, 1)
    x_test, y_test = house_data(500, 2)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, generator=seeded(3))
    batches = endless(loader)
    model = PriceNet(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        pred = model(x)
        err = pred.squeeze(-1) - y
        loss = (err ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test).squeeze(-1) - y_test).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'credit_transfer',
    "field": 'tabular data',
    "what": "The classification head is replaced after the optimizer was built, so the optimizer holds the old head's weights and the new head is never updated.",
})


class TabEncoder(nn.Module):
    def __init__(self, n_in, n_out, hidden=48):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(n_in, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
        )
        self.head = nn.Linear(hidden, n_out)

    def forward(self, x):
        return self.head(self.backbone(x))


def credit_data(n, seed, target):
    g = seeded(seed)
    x = torch.randn(n, 12, generator=g)
    a = x[:, 0] * x[:, 1] + torch.sin(x[:, 2])
    b = x[:, 3].abs() - x[:, 4] * x[:, 5]
    if target == "source":
        return x, torch.stack([a, b, a - b], dim=1)
    y = (a > 0.2).long() + 2 * (b > 0.3).long()
    return x, y


def credit_transfer_bad():
    torch.manual_seed(12)
    x_src, y_src = credit_data(1024, 1, "source")
    x_train, y_train = credit_data(1500, 2, "target")
    x_test, y_test = credit_data(600, 3, "target")

    model = TabEncoder(12, 3)
    pretrain_opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        pretrain_opt.zero_grad()
        F.mse_loss(model(x_src), y_src).backward()
        pretrain_opt.step()
    pretrain_opt.zero_grad()

    optimizer = torch.optim.Adam([
        {"params": model.backbone.parameters(), "lr": 1e-4},
        {"params": model.head.parameters(), "lr": 1e-2},
    ])
    model.head = nn.Linear(model.head.in_features, 4)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, generator=seeded(4))
    batches = endless(loader)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def credit_transfer_good():
    torch.manual_seed(12)
    x_src, y_src = credit_data(1024, 1, "source")
    x_train, y_train = credit_data(1500, 2, "target")
    x_test, y_test = credit_data(600, 3, "target")

    model = TabEncoder(12, 3)
    pretrain_opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        pretrain_opt.zero_grad()
        F.mse_loss(model(x_src), y_src).backward()
        pretrain_opt.step()
    pretrain_opt.zero_grad()

    model.head = nn.Linear(model.head.in_features, 4)
    optimizer = torch.optim.Adam([
        {"params": model.backbone.parameters(), "lr": 1e-4},
        {"params": model.head.parameters(), "lr": 1e-2},
    ])
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, generator=seeded(4))
    batches = endless(loader)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'load_forecast',
    "field": 'time series and forecasting',
    "what": 'The window dataset takes as target the last value that is already inside the input window, so the model learns to copy its last input instead of forecasting one step ahead.',
})


class LoadGRU(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x.unsqueeze(-1))
        return self.out(h[:, -1]).squeeze(-1)


def load_series(n, seed):
    t = torch.arange(n, dtype=torch.float32)
    noise = 0.05 * torch.randn(n, generator=seeded(seed))
    return torch.sin(2 * math.pi * t / 8) + 0.5 * torch.cos(2 * math.pi * t / 5) + noise


def load_forecast_bad():
    class WindowDataset(Dataset):
        def __init__(self, series, window):
            self.series = series
            self.window = window

        def __len__(self):
            return len(self.series) - self.window

        def __getitem__(self, i):
            x = self.series[i:i + self.window]
            y = self.series[i + self.window - 1]
            return x, y

    torch.manual_seed(13)
    window = 16
    series = load_series(1200, 1)
    train_series, test_series = series[:900], series[900:]
    test_x = test_series.unfold(0, window + 1, 1)[:, :window]
    test_y = test_series.unfold(0, window + 1, 1)[:, window]
    loader = DataLoader(WindowDataset(train_series, window), batch_size=32, shuffle=True, generator=seeded(2))
    batches = endless(loader)
    model = LoadGRU()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(test_x), test_y).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def load_forecast_good():
    class WindowDataset(Dataset):
        def __init__(self, series, window):
            self.series = series
            self.window = window

        def __len__(self):
            return len(self.series) - self.window

        def __getitem__(self, i):
            x = self.series[i:i + self.window]
            y = self.series[i + self.window]
            return x, y

    torch.manual_seed(13)
    window = 16
    series = load_series(1200, 1)
    train_series, test_series = series[:900], series[900:]
    test_x = test_series.unfold(0, window + 1, 1)[:, :window]
    test_y = test_series.unfold(0, window + 1, 1)[:, window]
    loader = DataLoader(WindowDataset(train_series, window), batch_size=32, shuffle=True, generator=seeded(2))
    batches = endless(loader)
    model = LoadGRU()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(test_x), test_y).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'retail_horizon',
    "field": 'time series and forecasting',
    "what": "The forecast target is normalised with its own mean and deviation instead of those of the input window, so the model never learns the change of level and scale that it needs when its output is mapped back with the window's statistics.",
})


class HorizonMLP(nn.Module):
    def __init__(self, lookback, horizon, hidden=64):
        super().__init__()
        self.trend = nn.Linear(lookback, horizon)
        self.net = nn.Sequential(nn.Linear(lookback, hidden), nn.GELU(), nn.Linear(hidden, horizon))

    def forward(self, x):
        return self.trend(x) + self.net(x)


def retail_windows(n, lookback, horizon, seed):
    g = seeded(seed)
    t = torch.arange(lookback + horizon, dtype=torch.float32)
    level = 20 + 80 * torch.rand(n, 1, generator=g)
    slope = level * 0.02 * torch.randn(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    amp = level * (0.05 + 0.2 * torch.rand(n, 1, generator=g))
    s = level + slope * t + amp * torch.sin(2 * math.pi * t / 12 + phase)
    s = s + 0.02 * level * torch.randn(n, lookback + horizon, generator=g)
    return s[:, :lookback], s[:, lookback:]


def retail_horizon_bad():
    torch.manual_seed(14)
    lookback, horizon = 36, 8
    train = TensorDataset(*retail_windows(1500, lookback, horizon, 1))
    x_test, y_test = retail_windows(400, lookback, horizon, 2)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=seeded(3)))
    model = HorizonMLP(lookback, horizon)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        x, y = next(batches)
        mean = x.mean(dim=1, keepdim=True)
        std = x.std(dim=1, keepdim=True) + 1e-5
        x_norm = (x - mean) / std
        y_norm = (y - y.mean(dim=1, keepdim=True)) / (y.std(dim=1, keepdim=True) + 1e-5)
        optimizer.zero_grad()
        loss = F.l1_loss(model(x_norm), y_norm)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mean = x_test.mean(dim=1, keepdim=True)
            std = x_test.std(dim=1, keepdim=True) + 1e-5
            forecast = model((x_test - mean) / std) * std + mean
            return ((forecast - y_test).abs() / y_test.abs().mean(dim=1, keepdim=True)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def retail_horizon_good():
    torch.manual_seed(14)
    lookback, horizon = 36, 8
    train = TensorDataset(*retail_windows(1500, lookback, horizon, 1))
    x_test, y_test = retail_windows(400, lookback, horizon, 2)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=seeded(3)))
    model = HorizonMLP(lookback, horizon)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        x, y = next(batches)
        mean = x.mean(dim=1, keepdim=True)
        std = x.std(dim=1, keepdim=True) + 1e-5
        x_norm = (x - mean) / std
        y_norm = (y - mean) / std
        optimizer.zero_grad()
        loss = F.l1_loss(model(x_norm), y_norm)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mean = x_test.mean(dim=1, keepdim=True)
            std = x_test.std(dim=1, keepdim=True) + 1e-5
            forecast = model((x_test - mean) / std) * std + mean
            return ((forecast - y_test).abs() / y_test.abs().mean(dim=1, keepdim=True)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'gesture_gru',
    "field": 'RNN/LSTM/TCN sequences',
    "what": 'Batches of shape (batch, time, feature) are fed to a GRU built without batch_first, so it recurs over the samples of the batch and sees only one time step of each sequence.',
})


def gesture_data(n, seed):
    g = seeded(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(24, dtype=torch.float32)
    freq = torch.tensor([0.06, 0.1, 0.15, 0.22])[y].unsqueeze(1)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    a = torch.sin(2 * math.pi * freq * t + phase)
    b = torch.cos(2 * math.pi * freq * t + phase)
    x = torch.stack([a, b, torch.zeros_like(a)], dim=-1)
    return x + 0.3 * torch.randn(x.shape, generator=g), y


def gesture_gru_bad():
    class GestureNet(nn.Module):
        def __init__(self, n_features, n_classes, hidden=32):
            super().__init__()
            self.rnn = nn.GRU(n_features, hidden)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):
            out, _ = self.rnn(x)
            return self.fc(out[:, -1, :])

    torch.manual_seed(15)
    train = TensorDataset(*gesture_data(1200, 1))
    x_test, y_test = gesture_data(300, 2)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, generator=seeded(3)))
    model = GestureNet(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gesture_gru_good():
    class GestureNet(nn.Module):
        def __init__(self, n_features, n_classes, hidden=32):
            super().__init__()
            self.rnn = nn.GRU(n_features, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):
            out, _ = self.rnn(x)
            return self.fc(out[:, -1, :])

    torch.manual_seed(15)
    train = TensorDataset(*gesture_data(1200, 1))
    x_test, y_test = gesture_data(300, 2)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, generator=seeded(3)))
    model = GestureNet(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'vibration_tcn',
    "field": 'RNN/LSTM/TCN sequences',
    "what": 'The dilated convolutions pad on both sides, so the output at time t sees the value at t+1 that it is trained to predict; at the end of a sequence that value does not exist and forecasts are poor.',
})


def vibration_data(n, length, seed):
    g = seeded(seed)
    t = torch.arange(length, dtype=torch.float32)
    s = 0
    for period in (7.0, 11.0):
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        amp = 0.5 + 0.5 * torch.rand(n, 1, generator=g)
        s = s + amp * torch.sin(2 * math.pi * t / period + phase)
    return s + 0.05 * torch.randn(n, length, generator=g)


def vibration_tcn_bad():
    class TemporalBlock(nn.Module):
        def __init__(self, c_in, c_out, kernel_size, dilation):
            super().__init__()
            self.conv = nn.Conv1d(c_in, c_out, kernel_size, dilation=dilation,
                                  padding=(kernel_size - 1) * dilation // 2)
            self.skip = nn.Conv1d(c_in, c_out, 1)

        def forward(self, x):
            out = self.conv(x)
            return torch.relu(out) + self.skip(x)

    class TCN(nn.Module):
        def __init__(self, channels=16):
            super().__init__()
            self.blocks = nn.Sequential(
                TemporalBlock(1, channels, 3, 1),
                TemporalBlock(channels, channels, 3, 2),
                TemporalBlock(channels, channels, 3, 4),
            )
            self.head = nn.Conv1d(channels, 1, 1)

        def forward(self, x):
            return self.head(self.blocks(x.unsqueeze(1))).squeeze(1)

    torch.manual_seed(16)
    train = TensorDataset(vibration_data(800, 49, 1))
    test = vibration_data(300, 49, 2)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, generator=seeded(3)))
    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        seq, = next(batches)
        optimizer.zero_grad()
        pred = model(seq[:, :-1])
        loss = F.mse_loss(pred, seq[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            forecast = model(test[:, :-1])[:, -1]
            return F.mse_loss(forecast, test[:, -1]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vibration_tcn_good():
    class TemporalBlock(nn.Module):
        def __init__(self, c_in, c_out, kernel_size, dilation):
            super().__init__()
            self.left = (kernel_size - 1) * dilation
            self.conv = nn.Conv1d(c_in, c_out, kernel_size, dilation=dilation)
            self.skip = nn.Conv1d(c_in, c_out, 1)

        def forward(self, x):
            out = self.conv(F.pad(x, (self.left, 0)))
            return torch.relu(out) + self.skip(x)

    class TCN(nn.Module):
        def __init__(self, channels=16):
            super().__init__()
            self.blocks = nn.Sequential(
                TemporalBlock(1, channels, 3, 1),
                TemporalBlock(channels, channels, 3, 2),
                TemporalBlock(channels, channels, 3, 4),
            )
            self.head = nn.Conv1d(channels, 1, 1)

        def forward(self, x):
            return self.head(self.blocks(x.unsqueeze(1))).squeeze(1)

    torch.manual_seed(16)
    train = TensorDataset(vibration_data(800, 49, 1))
    test = vibration_data(300, 49, 2)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, generator=seeded(3)))
    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        seq, = next(batches)
        optimizer.zero_grad()
        pred = model(seq[:, :-1])
        loss = F.mse_loss(pred, seq[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            forecast = model(test[:, :-1])[:, -1]
            return F.mse_loss(forecast, test[:, -1]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'recall_cell',
    "field": 'RNN/LSTM/TCN sequences',
    "what": 'The hidden state is detached at every time step of the loop, so no gradient flows back through time and the cell cannot learn to keep what it saw early in the sequence.',
})


def recall_data(n, length, seed):
    g = seeded(seed)
    x = torch.randn(n, length, 4, generator=g)
    y = torch.randint(0, 4, (n,), generator=g)
    x[:, 0] = x[:, 0] * 0.3 + 2.0 * F.one_hot(y, 4)
    return x, y


def recall_cell_bad():
    class RecallNet(nn.Module):
        def __init__(self, n_in, n_classes, hidden=32):
            super().__init__()
            self.hidden = hidden
            self.cell = nn.GRUCell(n_in, hidden)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):
            h = x.new_zeros(x.size(0), self.hidden)
            for t in range(x.size(1)):
                h = self.cell(x[:, t], h.detach())
            return self.fc(h)

    torch.manual_seed(17)
    train = TensorDataset(*recall_data(1600, 10, 1))
    x_test, y_test = recall_data(400, 10, 2)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=seeded(3)))
    model = RecallNet(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def recall_cell_good():
    class RecallNet(nn.Module):
        def __init__(self, n_in, n_classes, hidden=32):
            super().__init__()
            self.hidden = hidden
            self.cell = nn.GRUCell(n_in, hidden)
            self.fc = nn.Linear(hidden, n_classes)

        def forward(self, x):
            h = x.new_zeros(x.size(0), self.hidden)
            for t in range(x.size(1)):
                h = self.cell(x[:, t], h)
            return self.fc(h)

    torch.manual_seed(17)
    train = TensorDataset(*recall_data(1600, 10, 1))
    x_test, y_test = recall_data(400, 10, 2)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=seeded(3)))
    model = RecallNet(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'citation_nodes',
    "field": 'graph networks',
    "what": 'Messages are summed with indexed += on repeated destination indices, which keeps only one message per node, so almost all neighbours are silently ignored.',
})


def citation_graph(seed):
    g = seeded(seed)
    n, k = 400, 4
    y = torch.randint(0, k, (n,), generator=g)
    same = y[:, None] == y[None, :]
    prob = torch.where(same, torch.tensor(0.08), torch.tensor(0.006))
    adj = torch.rand(n, n, generator=g) < prob
    adj = (adj | adj.t()).fill_diagonal_(False)
    src, dst = adj.nonzero(as_tuple=True)
    centers = torch.randn(k, 16, generator=g)
    x = 0.5 * centers[y] + torch.randn(n, 16, generator=g)
    order = torch.randperm(n, generator=g)
    train_mask = torch.zeros(n, dtype=torch.bool)
    train_mask[order[:160]] = True
    return x, src, dst, y, train_mask


def citation_nodes_bad():
    class MeanConv(nn.Module):
        def __init__(self, n_in, n_out):
            super().__init__()
            self.lin_self = nn.Linear(n_in, n_out)
            self.lin_nbr = nn.Linear(n_in, n_out, bias=False)

        def forward(self, x, src, dst):
            agg = torch.zeros_like(x)
            agg[dst] += x[src]
            deg = torch.bincount(dst, minlength=x.size(0)).clamp(min=1).unsqueeze(1)
            return self.lin_self(x) + self.lin_nbr(agg / deg)

    class NodeNet(nn.Module):
        def __init__(self, n_in, n_classes, hidden=32):
            super().__init__()
            self.conv1 = MeanConv(n_in, hidden)
            self.conv2 = MeanConv(hidden, n_classes)
            self.drop = nn.Dropout(0.3)

        def forward(self, x, src, dst):
            h = self.drop(torch.relu(self.conv1(x, src, dst)))
            return self.conv2(h, src, dst)

    torch.manual_seed(18)
    x, src, dst, y, train_mask = citation_graph(1)
    test_mask = ~train_mask
    model = NodeNet(16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, src, dst)
        loss = criterion(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x, src, dst)[test_mask], y[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def citation_nodes_good():
    class MeanConv(nn.Module):
        def __init__(self, n_in, n_out):
            super().__init__()
            self.lin_self = nn.Linear(n_in, n_out)
            self.lin_nbr = nn.Linear(n_in, n_out, bias=False)

        def forward(self, x, src, dst):
            agg = torch.zeros_like(x)
            agg.index_add_(0, dst, x[src])
            deg = torch.bincount(dst, minlength=x.size(0)).clamp(min=1).unsqueeze(1)
            return self.lin_self(x) + self.lin_nbr(agg / deg)

    class NodeNet(nn.Module):
        def __init__(self, n_in, n_classes, hidden=32):
            super().__init__()
            self.conv1 = MeanConv(n_in, hidden)
            self.conv2 = MeanConv(hidden, n_classes)
            self.drop = nn.Dropout(0.3)

        def forward(self, x, src, dst):
            h = self.drop(torch.relu(self.conv1(x, src, dst)))
            return self.conv2(h, src, dst)

    torch.manual_seed(18)
    x, src, dst, y, train_mask = citation_graph(1)
    test_mask = ~train_mask
    model = NodeNet(16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, src, dst)
        loss = criterion(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x, src, dst)[test_mask], y[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'pole_dqn',
    "field": 'reinforcement learning (value based)',
    "what": 'The TD target bootstraps from the next state even where the episode ended there, so falling costs nothing and all action values drift to the same constant.',
})


def pole_dynamics(state, action):
    pos, vel = state.unbind(-1)
    force = (2.0 * action.float() - 1.0) * 1.5
    new_vel = (vel + 0.2 * (1.5 * pos + force)).clamp(-2.0, 2.0)
    new_pos = pos + 0.2 * new_vel
    done = new_pos.abs() > 1.0
    return torch.stack([new_pos, new_vel], dim=-1), torch.ones_like(pos), done


def pole_start(n, g, width):
    return (2 * torch.rand(n, 2, generator=g) - 1) * torch.tensor(width)


class ReplayBuffer:
    def __init__(self, seed):
        self.g = seeded(seed)
        self.rows = []

    def push(self, *row):
        self.rows.append(row)

    def finish(self):
        self.data = [torch.cat(col) for col in zip(*self.rows)]

    def sample(self, n):
        idx = torch.randint(0, len(self.data[0]), (n,), generator=self.g)
        return [col[idx] for col in self.data]


class QNet(nn.Module):
    def __init__(self, n_obs, n_actions, hidden=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_obs, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, n_actions),
        )

    def forward(self, s):
        return self.net(s)


def pole_dqn_bad():
    torch.manual_seed(21)
    g = seeded(1)
    buffer = ReplayBuffer(2)
    state = pole_start(64, g, [0.9, 1.5])
    for _ in range(80):
        action = torch.randint(0, 2, (64,), generator=g)
        next_state, reward, done = pole_dynamics(state, action)
        buffer.push(state, action, reward, next_state, done.float())
        state = torch.where(done.unsqueeze(1), pole_start(64, g, [0.9, 1.5]), next_state)
    buffer.finish()

    gamma = 0.9
    policy_net = QNet(2, 2)
    target_net = QNet(2, 2)
    target_net.load_state_dict(policy_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=2e-3)
    test_start = pole_start(128, seeded(5), [0.4, 0.3])

    def step(i):
        s, a, r, s2, d = buffer.sample(128)
        q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_a = policy_net(s2).argmax(dim=1, keepdim=True)
            next_q = target_net(s2).gather(1, next_a).squeeze(1)
            target = r + gamma * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        if (i + 1) % 10 == 0:
            target_net.load_state_dict(policy_net.state_dict())
        return loss.item()

    def probe():
        with evaluating(policy_net):
            s = test_start.clone()
            alive = torch.ones(len(s), dtype=torch.bool)
            length = torch.zeros(len(s))
            for _ in range(60):
                s, _, done = pole_dynamics(s, policy_net(s).argmax(dim=1))
                alive = alive & ~done
                length += alive.float()
            return 1.0 + 60.0 - length.mean().item()

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pole_dqn_good():
    torch.manual_seed(21)
    g = seeded(1)
    buffer = ReplayBuffer(2)
    state = pole_start(64, g, [0.9, 1.5])
    for _ in range(80):
        action = torch.randint(0, 2, (64,), generator=g)
        next_state, reward, done = pole_dynamics(state, action)
        buffer.push(state, action, reward, next_state, done.float())
        state = torch.where(done.unsqueeze(1), pole_start(64, g, [0.9, 1.5]), next_state)
    buffer.finish()

    gamma = 0.9
    policy_net = QNet(2, 2)
    target_net = QNet(2, 2)
    target_net.load_state_dict(policy_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=2e-3)
    test_start = pole_start(128, seeded(5), [0.4, 0.3])

    def step(i):
        s, a, r, s2, d = buffer.sample(128)
        q = policy_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_a = policy_net(s2).argmax(dim=1, keepdim=True)
            next_q = target_net(s2).gather(1, next_a).squeeze(1)
            target = r + gamma * next_q * (1.0 - d)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        if (i + 1) % 10 == 0:
            target_net.load_state_dict(policy_net.state_dict())
        return loss.item()

    def probe():
        with evaluating(policy_net):
            s = test_start.clone()
            alive = torch.ones(len(s), dtype=torch.bool)
            length = torch.zeros(len(s))
            for _ in range(60):
                s, _, done = pole_dynamics(s, policy_net(s).argmax(dim=1))
                alive = alive & ~done
                length += alive.float()
            return 1.0 + 60.0 - length.mean().item()

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'gridpoint_reinforce',
    "field": 'reinforcement learning (policy gradient)',
    "what": 'The update takes the log-probability of a freshly sampled action instead of the action that was played, so advantages are credited to unrelated actions and the gradient is pure noise.',
})


MOVES = torch.tensor([[0.0, 0.0], [0.15, 0.0], [-0.15, 0.0], [0.0, 0.15], [0.0, -0.15]])


class Policy(nn.Module):
    def __init__(self, n_obs, n_actions, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_obs, hidden), nn.Tanh(), nn.Linear(hidden, n_actions))

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.net(obs))


def gridpoint_reinforce_bad():
    torch.manual_seed(22)
    g = seeded(1)
    policy = Policy(2, 5)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    test_start = torch.rand(100, 2, generator=seeded(2)) * 2 - 1
    gamma, horizon, n_envs = 0.9, 10, 48

    def rollout():
        obs = torch.rand(n_envs, 2, generator=g) * 2 - 1
        states, actions, rewards = [], [], []
        for _ in range(horizon):
            with torch.no_grad():
                action = policy(obs).sample()
            states.append(obs)
            actions.append(action)
            obs = (obs + MOVES[action]).clamp(-1.5, 1.5)
            rewards.append(-obs.abs().sum(dim=1))
        return torch.stack(states), torch.stack(actions), torch.stack(rewards)

    def step(i):
        states, actions, rewards = rollout()
        returns = torch.zeros_like(rewards)
        running = torch.zeros(n_envs)
        for t in reversed(range(horizon)):
            running = rewards[t] + gamma * running
            returns[t] = running
        advantage = returns - returns.mean(dim=1, keepdim=True)
        advantage = advantage / (advantage.std() + 1e-8)
        dist = policy(states)
        log_prob = dist.log_prob(dist.sample())
        loss = -(log_prob * advantage).mean() - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy):
            obs, cost = test_start.clone(), 0.0
            for _ in range(horizon):
                obs = (obs + MOVES[policy.net(obs).argmax(dim=1)]).clamp(-1.5, 1.5)
                cost += obs.abs().sum(dim=1).mean().item()
            return cost / horizon

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gridpoint_reinforce_good():
    torch.manual_seed(22)
    g = seeded(1)
    policy = Policy(2, 5)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    test_start = torch.rand(100, 2, generator=seeded(2)) * 2 - 1
    gamma, horizon, n_envs = 0.9, 10, 48

    def rollout():
        obs = torch.rand(n_envs, 2, generator=g) * 2 - 1
        states, actions, rewards = [], [], []
        for _ in range(horizon):
            with torch.no_grad():
                action = policy(obs).sample()
            states.append(obs)
            actions.append(action)
            obs = (obs + MOVES[action]).clamp(-1.5, 1.5)
            rewards.append(-obs.abs().sum(dim=1))
        return torch.stack(states), torch.stack(actions), torch.stack(rewards)

    def step(i):
        states, actions, rewards = rollout()
        returns = torch.zeros_like(rewards)
        running = torch.zeros(n_envs)
        for t in reversed(range(horizon)):
            running = rewards[t] + gamma * running
            returns[t] = running
        advantage = returns - returns.mean(dim=1, keepdim=True)
        advantage = advantage / (advantage.std() + 1e-8)
        dist = policy(states)
        log_prob = dist.log_prob(actions)
        loss = -(log_prob * advantage).mean() - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy):
            obs, cost = test_start.clone(), 0.0
            for _ in range(horizon):
                obs = (obs + MOVES[policy.net(obs).argmax(dim=1)]).clamp(-1.5, 1.5)
                cost += obs.abs().sum(dim=1).mean().item()
            return cost / horizon

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'cart_ddpg',
    "field": 'reinforcement learning (actor-critic)',
    "what": "The critic's gradients are not cleared between the actor's backward and its own, so every critic update also contains the actor loss and the critic is pushed to overrate the policy's actions.",
})


class Actor(nn.Module):
    def __init__(self, n_obs, n_act, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_obs, hidden), nn.ReLU(), nn.Linear(hidden, n_act), nn.Tanh())

    def forward(self, s):
        return self.net(s)


class Critic(nn.Module):
    def __init__(self, n_obs, n_act, hidden=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_obs + n_act, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, s, a):
        return self.net(torch.cat([s, a], dim=1))


def cart_dynamics(s, a):
    pos, vel = s[:, :1], s[:, 1:]
    reward = -(pos ** 2 + 0.1 * vel ** 2 + 0.02 * a ** 2)
    nxt = torch.cat([pos + 0.2 * vel, vel + 0.3 * a], dim=1)
    return nxt, reward


def cart_ddpg_bad():
    torch.manual_seed(23)
    g = seeded(1)
    states = torch.rand(5000, 2, generator=g) * 3 - 1.5
    actions = torch.rand(5000, 1, generator=g) * 2 - 1
    next_states, rewards = cart_dynamics(states, actions)
    loader = DataLoader(TensorDataset(states, actions, rewards, next_states), batch_size=128,
                        shuffle=True, drop_last=True, generator=seeded(2))
    batches = endless(loader)
    actor, critic = Actor(2, 1), Critic(2, 1)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    target_actor.requires_grad_(False)
    target_critic.requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    gamma, tau = 0.9, 0.05
    test_start = torch.rand(64, 2, generator=seeded(3)) * 2 - 1

    def soft_update(net, target):
        with torch.no_grad():
            for p, tp in zip(net.parameters(), target.parameters()):
                tp.lerp_(p, tau)

    def step(i):
        s, a, r, s2 = next(batches)
        actor_opt.zero_grad()
        critic_opt.zero_grad()
        actor_loss = -critic(s, actor(s)).mean()
        actor_loss.backward()
        actor_opt.step()

        with torch.no_grad():
            target_q = r + gamma * target_critic(s2, target_actor(s2))
        critic_loss = F.mse_loss(critic(s, a), target_q)
        critic_loss.backward()
        critic_opt.step()

        soft_update(actor, target_actor)
        soft_update(critic, target_critic)
        return critic_loss.item()

    def probe():
        with evaluating(actor):
            s, cost = test_start.clone(), 0.0
            for _ in range(30):
                s, reward = cart_dynamics(s, actor(s))
                cost -= reward.mean().item()
            return cost

    return {"model": {"actor": actor, "critic": critic}, "optimizer": [actor_opt, critic_opt],
            "steps": 20, "step": step, "probe": probe}


def cart_ddpg_good():
    torch.manual_seed(23)
    g = seeded(1)
    states = torch.rand(5000, 2, generator=g) * 3 - 1.5
    actions = torch.rand(5000, 1, generator=g) * 2 - 1
    next_states, rewards = cart_dynamics(states, actions)
    loader = DataLoader(TensorDataset(states, actions, rewards, next_states), batch_size=128,
                        shuffle=True, drop_last=True, generator=seeded(2))
    batches = endless(loader)
    actor, critic = Actor(2, 1), Critic(2, 1)
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    target_actor.requires_grad_(False)
    target_critic.requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    gamma, tau = 0.9, 0.05
    test_start = torch.rand(64, 2, generator=seeded(3)) * 2 - 1

    def soft_update(net, target):
        with torch.no_grad():
            for p, tp in zip(net.parameters(), target.parameters()):
                tp.lerp_(p, tau)

    def step(i):
        s, a, r, s2 = next(batches)
        actor_opt.zero_grad()
        actor_loss = -critic(s, actor(s)).mean()
        actor_loss.backward()
        actor_opt.step()

        with torch.no_grad():
            target_q = r + gamma * target_critic(s2, target_actor(s2))
        critic_loss = F.mse_loss(critic(s, a), target_q)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        soft_update(actor, target_actor)
        soft_update(critic, target_critic)
        return critic_loss.item()

    def probe():
        with evaluating(actor):
            s, cost = test_start.clone(), 0.0
            for _ in range(30):
                s, reward = cart_dynamics(s, actor(s))
                cost -= reward.mean().item()
            return cost

    return {"model": {"actor": actor, "critic": critic}, "optimizer": [actor_opt, critic_opt],
            "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'click_fm',
    "field": 'recommenders and ranking',
    "what": 'The per-field offsets are missing before the lookup in the shared embedding table, so equal category numbers of different fields share one embedding and most of the table is never used.',
})


CLICK_FIELDS = [40, 30, 16, 8]


def click_data(n, seed):
    tg = seeded(100)
    weights = [torch.randn(k, generator=tg) * 0.8 for k in CLICK_FIELDS]
    factors = [torch.randn(k, 3, generator=tg) * 0.8 for k in CLICK_FIELDS]
    g = seeded(seed)
    x = torch.stack([torch.randint(0, k, (n,), generator=g) for k in CLICK_FIELDS], dim=1)
    logit = sum(w[x[:, j]] for j, w in enumerate(weights))
    for a in range(4):
        for b in range(a + 1, 4):
            logit = logit + (factors[a][x[:, a]] * factors[b][x[:, b]]).sum(dim=1)
    y = (torch.rand(n, generator=g) < torch.sigmoid(logit)).float()
    return x, y


def click_fm_bad():
    class FactorizationMachine(nn.Module):
        def __init__(self, field_dims, embed_dim=8):
            super().__init__()
            total = sum(field_dims)
            self.register_buffer("offsets", torch.tensor([0] + field_dims[:-1]).cumsum(0))
            self.embedding = nn.Embedding(total, embed_dim)
            self.linear = nn.Embedding(total, 1)
            self.bias = nn.Parameter(torch.zeros(1))
            nn.init.normal_(self.embedding.weight, std=0.1)
            nn.init.zeros_(self.linear.weight)

        def forward(self, x):
            e = self.embedding(x)
            pair = 0.5 * (e.sum(dim=1) ** 2 - (e ** 2).sum(dim=1)).sum(dim=1)
            return self.bias + self.linear(x).sum(dim=(1, 2)) + pair

    torch.manual_seed(24)
    train = TensorDataset(*click_data(6000, 1))
    x_test, y_test = click_data(1500, 2)
    batches = endless(DataLoader(train, batch_size=128, shuffle=True, generator=seeded(3)))
    model = FactorizationMachine(list(CLICK_FIELDS))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def click_fm_good():
    class FactorizationMachine(nn.Module):
        def __init__(self, field_dims, embed_dim=8):
            super().__init__()
            total = sum(field_dims)
            self.register_buffer("offsets", torch.tensor([0] + field_dims[:-1]).cumsum(0))
            self.embedding = nn.Embedding(total, embed_dim)
            self.linear = nn.Embedding(total, 1)
            self.bias = nn.Parameter(torch.zeros(1))
            nn.init.normal_(self.embedding.weight, std=0.1)
            nn.init.zeros_(self.linear.weight)

        def forward(self, x):
            x = x + self.offsets
            e = self.embedding(x)
            pair = 0.5 * (e.sum(dim=1) ** 2 - (e ** 2).sum(dim=1)).sum(dim=1)
            return self.bias + self.linear(x).sum(dim=(1, 2)) + pair

    torch.manual_seed(24)
    train = TensorDataset(*click_data(6000, 1))
    x_test, y_test = click_data(1500, 2)
    batches = endless(DataLoader(train, batch_size=128, shuffle=True, generator=seeded(3)))
    model = FactorizationMachine(list(CLICK_FIELDS))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'movie_bpr',
    "field": 'recommenders and ranking',
    "what": 'Negative items are drawn from range(n_users) instead of range(n_items), so most items never occur as negatives, their scores are only ever pushed up and the ranking suffers.',
})


class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, dim=16):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        self.item_bias = nn.Embedding(n_items, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(dim=-1) + self.item_bias(i).squeeze(-1)


def movie_data(n_users, n_items, seed):
    g = seeded(seed)
    taste = torch.randn(n_users, 4, generator=g)
    genre = torch.randn(n_items, 4, generator=g)
    popularity = torch.randn(n_items, generator=g)
    score = taste @ genre.t() + popularity + 0.5 * torch.randn(n_users, n_items, generator=g)
    liked = score.topk(30, dim=1).indices
    liked = torch.stack([row[torch.randperm(30, generator=g)] for row in liked])
    return liked[:, :22], liked[:, 22:]


def movie_bpr_bad():
    torch.manual_seed(25)
    n_users, n_items = 80, 240
    train_items, test_items = movie_data(n_users, n_items, 1)
    seen = torch.zeros(n_users, n_items, dtype=torch.bool).scatter_(1, train_items, True)
    held_out = torch.zeros(n_users, n_items, dtype=torch.bool).scatter_(1, test_items, True)
    pairs = TensorDataset(torch.arange(n_users).repeat_interleave(train_items.size(1)), train_items.reshape(-1))
    batches = endless(DataLoader(pairs, batch_size=128, shuffle=True, generator=seeded(2)))
    sampler = seeded(3)
    model = MatrixFactorization(n_users, n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def sample_negatives(users):
        high = n_users
        neg = torch.randint(0, high, users.shape, generator=sampler)
        clash = seen[users, neg]
        while clash.any():
            neg[clash] = torch.randint(0, high, (int(clash.sum()),), generator=sampler)
            clash = seen[users, neg]
        return neg

    def step(i):
        users, pos = next(batches)
        neg = sample_negatives(users)
        optimizer.zero_grad()
        loss = -F.logsigmoid(model(users, pos) - model(users, neg)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            u = torch.arange(n_users).unsqueeze(1).expand(n_users, n_items)
            it = torch.arange(n_items).unsqueeze(0).expand(n_users, n_items)
            scores = model(u, it)
            errors = []
            for k in range(n_users):
                pos = scores[k][held_out[k]]
                neg = scores[k][~held_out[k] & ~seen[k]]
                errors.append((pos.unsqueeze(1) <= neg).float().mean())
            return torch.stack(errors).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def movie_bpr_good():
    torch.manual_seed(25)
    n_users, n_items = 80, 240
    train_items, test_items = movie_data(n_users, n_items, 1)
    seen = torch.zeros(n_users, n_items, dtype=torch.bool).scatter_(1, train_items, True)
    held_out = torch.zeros(n_users, n_items, dtype=torch.bool).scatter_(1, test_items, True)
    pairs = TensorDataset(torch.arange(n_users).repeat_interleave(train_items.size(1)), train_items.reshape(-1))
    batches = endless(DataLoader(pairs, batch_size=128, shuffle=True, generator=seeded(2)))
    sampler = seeded(3)
    model = MatrixFactorization(n_users, n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def sample_negatives(users):
        high = n_items
        neg = torch.randint(0, high, users.shape, generator=sampler)
        clash = seen[users, neg]
        while clash.any():
            neg[clash] = torch.randint(0, high, (int(clash.sum()),), generator=sampler)
            clash = seen[users, neg]
        return neg

    def step(i):
        users, pos = next(batches)
        neg = sample_negatives(users)
        optimizer.zero_grad()
        loss = -F.logsigmoid(model(users, pos) - model(users, neg)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            u = torch.arange(n_users).unsqueeze(1).expand(n_users, n_items)
            it = torch.arange(n_items).unsqueeze(0).expand(n_users, n_items)
            scores = model(u, it)
            errors = []
            for k in range(n_users):
                pos = scores[k][held_out[k]]
                neg = scores[k][~held_out[k] & ~seen[k]]
                errors.append((pos.unsqueeze(1) <= neg).float().mean())
            return torch.stack(errors).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'decay_pinn',
    "field": 'physics-informed networks and neural ODEs',
    "what": "The time derivative is taken without create_graph, so the residual's derivative term is a constant for backward and the network is not trained to satisfy the equation.",
})


class FieldNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def forward(self, t):
        return self.net(t)


def decay_exact(t, k=1.5, w=3.0):
    c = (k * torch.cos(w * t) + w * torch.sin(w * t)) / (k * k + w * w)
    return c + (1.0 - k / (k * k + w * w)) * torch.exp(-k * t)


def decay_pinn_bad():
    torch.manual_seed(26)
    g = seeded(1)
    k, w = 1.5, 3.0
    model = FieldNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    t0 = torch.zeros(1, 1)
    t_test = torch.linspace(0, 2, 101).unsqueeze(1)
    u_test = decay_exact(t_test)

    def step(i):
        t = (2.0 * torch.rand(64, 1, generator=g)).requires_grad_(True)
        u = model(t)
        u_t = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True)[0]
        residual = u_t + k * u - torch.cos(w * t)
        initial = model(t0) - 1.0
        loss = residual.pow(2).mean() + 5.0 * initial.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(t_test) - u_test).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def decay_pinn_good():
    torch.manual_seed(26)
    g = seeded(1)
    k, w = 1.5, 3.0
    model = FieldNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    t0 = torch.zeros(1, 1)
    t_test = torch.linspace(0, 2, 101).unsqueeze(1)
    u_test = decay_exact(t_test)

    def step(i):
        t = (2.0 * torch.rand(64, 1, generator=g)).requires_grad_(True)
        u = model(t)
        u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        residual = u_t + k * u - torch.cos(w * t)
        initial = model(t0) - 1.0
        loss = residual.pow(2).mean() + 5.0 * initial.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(t_test) - u_test).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'beam_pinn',
    "field": 'physics-informed networks and neural ODEs',
    "what": 'The network input is rescaled to [-1, 1] and the derivatives are taken with respect to the rescaled variable without the chain-rule factor, so a different equation is solved.',
})


class BeamNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def forward(self, z):
        return self.net(z)


def beam_pinn_bad():
    torch.manual_seed(27)
    g = seeded(1)
    length = 5.0
    model = BeamNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ends = torch.tensor([[-1.0], [1.0]])
    x_test = torch.linspace(0, length, 101).unsqueeze(1)
    u_test = torch.sin(math.pi * x_test / length) + 0.3 * torch.sin(2 * math.pi * x_test / length)

    def source(x):
        a = math.pi / length
        return a ** 2 * torch.sin(a * x) + 0.3 * (2 * a) ** 2 * torch.sin(2 * a * x)

    def derivative(u, v):
        return torch.autograd.grad(u, v, torch.ones_like(u), create_graph=True)[0]

    def step(i):
        x = length * torch.rand(64, 1, generator=g)
        z = (2.0 * x / length - 1.0).requires_grad_(True)
        u = model(z)
        u_xx = derivative(derivative(u, z), z)
        residual = u_xx + source(x)
        boundary = model(ends)
        loss = residual.pow(2).mean() + boundary.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(2.0 * x_test / length - 1.0) - u_test).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def beam_pinn_good():
    torch.manual_seed(27)
    g = seeded(1)
    length = 5.0
    model = BeamNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ends = torch.tensor([[-1.0], [1.0]])
    x_test = torch.linspace(0, length, 101).unsqueeze(1)
    u_test = torch.sin(math.pi * x_test / length) + 0.3 * torch.sin(2 * math.pi * x_test / length)

    def source(x):
        a = math.pi / length
        return a ** 2 * torch.sin(a * x) + 0.3 * (2 * a) ** 2 * torch.sin(2 * a * x)

    def derivative(u, v):
        return torch.autograd.grad(u, v, torch.ones_like(u), create_graph=True)[0]

    def step(i):
        x = length * torch.rand(64, 1, generator=g)
        x.requires_grad_(True)
        z = 2.0 * x / length - 1.0
        u = model(z)
        u_xx = derivative(derivative(u, x), x)
        residual = u_xx + source(x)
        boundary = model(ends)
        loss = residual.pow(2).mean() + boundary.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(2.0 * x_test / length - 1.0) - u_test).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'trial_cox',
    "field": 'survival analysis',
    "what": "The batch is sorted by ascending time before the cumulative log-sum-exp, so each event's risk set holds the subjects who had already left instead of those still at risk.",
})


class RiskNet(nn.Module):
    def __init__(self, n_in, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, hidden), nn.SELU(), nn.Linear(hidden, 1, bias=False))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def trial_data(n, seed):
    g = seeded(seed)
    x = torch.randn(n, 8, generator=g)
    risk = 1.2 * x[:, 0] - 0.9 * x[:, 1] + 0.8 * x[:, 2] * x[:, 3]
    t = -torch.log(torch.rand(n, generator=g).clamp(min=1e-6)) / torch.exp(risk)
    c = -torch.log(torch.rand(n, generator=g).clamp(min=1e-6)) * 2.0
    return x, torch.minimum(t, c), (t <= c).float()


def trial_cox_bad():
    torch.manual_seed(131)
    train = TensorDataset(*trial_data(1500, 1))
    x_test, t_test, e_test = trial_data(400, 2)
    batches = endless(DataLoader(train, batch_size=128, shuffle=True, drop_last=True, generator=seeded(3)))
    model = RiskNet(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)

    def cox_loss(log_risk, time, event):
        order = torch.argsort(time)
        log_risk, event = log_risk[order], event[order]
        log_cum = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_cum) * event).sum() / event.sum().clamp(min=1.0)

    def step(i):
        x, t, e = next(batches)
        optimizer.zero_grad()
        loss = cox_loss(model(x), t, e)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            risk = model(x_test)
            comparable = (t_test[:, None] < t_test[None, :]) & (e_test[:, None] > 0)
            wrong = (risk[:, None] <= risk[None, :]) & comparable
            return (wrong.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def trial_cox_good():
    torch.manual_seed(131)
    train = TensorDataset(*trial_data(1500, 1))
    x_test, t_test, e_test = trial_data(400, 2)
    batches = endless(DataLoader(train, batch_size=128, shuffle=True, drop_last=True, generator=seeded(3)))
    model = RiskNet(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)

    def cox_loss(log_risk, time, event):
        order = torch.argsort(time, descending=True)
        log_risk, event = log_risk[order], event[order]
        log_cum = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_cum) * event).sum() / event.sum().clamp(min=1.0)

    def step(i):
        x, t, e = next(batches)
        optimizer.zero_grad()
        loss = cox_loss(model(x), t, e)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            risk = model(x_test)
            comparable = (t_test[:, None] < t_test[None, :]) & (e_test[:, None] > 0)
            wrong = (risk[:, None] <= risk[None, :]) & comparable
            return (wrong.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'churn_hazard',
    "field": 'survival analysis',
    "what": 'The event indicator is left out of the hazard target, so every censored customer counts as churned at the time of censoring and survival is underestimated.',
})


N_BINS = 10


class HazardNet(nn.Module):
    def __init__(self, n_in, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, N_BINS))

    def forward(self, x):
        return self.net(x)


def churn_data(n, seed):
    g = seeded(seed)
    x = torch.randn(n, 6, generator=g)
    logit = -2.5 + 0.9 * x[:, :1] - 0.7 * x[:, 1:2].abs() + 0.08 * torch.arange(N_BINS)
    hazard = torch.sigmoid(logit)
    fails = torch.rand(n, N_BINS, generator=g) < hazard
    fails = torch.cat([fails, torch.ones(n, 1, dtype=torch.bool)], dim=1)
    t = fails.float().argmax(dim=1)
    c = torch.randint(0, N_BINS, (n,), generator=g)
    event = t <= c
    survival = torch.cumprod(1 - hazard, dim=1)
    return x, torch.minimum(t, c), event.float(), survival


def churn_hazard_bad():
    torch.manual_seed(32)
    x_train, t_train, e_train, _ = churn_data(2500, 1)
    x_test, _, _, s_test = churn_data(500, 2)
    loader = DataLoader(TensorDataset(x_train, t_train, e_train), batch_size=128, shuffle=True, generator=seeded(3))
    batches = endless(loader)
    model = HazardNet(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        x, t, e = next(batches)
        at_risk = (torch.arange(N_BINS) <= t.unsqueeze(1)).float()
        target = F.one_hot(t, N_BINS).float()
        optimizer.zero_grad()
        nll = F.binary_cross_entropy_with_logits(model(x), target, reduction="none")
        loss = (nll * at_risk).sum(dim=1).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            survival = torch.cumprod(1 - torch.sigmoid(model(x_test)), dim=1)
            return (survival - s_test).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def churn_hazard_good():
    torch.manual_seed(32)
    x_train, t_train, e_train, _ = churn_data(2500, 1)
    x_test, _, _, s_test = churn_data(500, 2)
    loader = DataLoader(TensorDataset(x_train, t_train, e_train), batch_size=128, shuffle=True, generator=seeded(3))
    batches = endless(loader)
    model = HazardNet(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        x, t, e = next(batches)
        at_risk = (torch.arange(N_BINS) <= t.unsqueeze(1)).float()
        target = F.one_hot(t, N_BINS).float() * e.unsqueeze(1)
        optimizer.zero_grad()
        nll = F.binary_cross_entropy_with_logits(model(x), target, reduction="none")
        loss = (nll * at_risk).sum(dim=1).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            survival = torch.cumprod(1 - torch.sigmoid(model(x_test)), dim=1)
            return (survival - s_test).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'assay_multitask',
    "field": 'meta-learning and multi-task learning',
    "what": "Missing labels are filled with zero and enter the loss like measured values, so all tasks' predictions are shrunk towards zero.",
})


class MultiTaskNet(nn.Module):
    def __init__(self, n_in, n_tasks, hidden=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(hidden, 1) for _ in range(n_tasks))

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def assay_data(n, seed, missing):
    tg = seeded(200)
    w1, w2 = torch.randn(12, 6, generator=tg) / 3, torch.randn(6, 5, generator=tg)
    g = seeded(seed)
    x = torch.randn(n, 12, generator=g)
    y = torch.tanh(x @ w1 * 1.5) @ w2 + torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0])
    y = y + 0.1 * torch.randn(y.shape, generator=g)
    if missing:
        y[torch.rand(y.shape, generator=g) < 0.5] = float("nan")
    return x, y


def assay_multitask_bad():
    torch.manual_seed(33)
    train = TensorDataset(*assay_data(1600, 1, True))
    x_test, y_test = assay_data(400, 2, False)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=seeded(3)))
    model = MultiTaskNet(12, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(batches)
        y = torch.nan_to_num(y, nan=0.0)
        optimizer.zero_grad()
        err = F.mse_loss(model(x), y, reduction="none")
        loss = err.mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def assay_multitask_good():
    torch.manual_seed(33)
    train = TensorDataset(*assay_data(1600, 1, True))
    x_test, y_test = assay_data(400, 2, False)
    batches = endless(DataLoader(train, batch_size=64, shuffle=True, generator=seeded(3)))
    model = MultiTaskNet(12, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(batches)
        known = ~torch.isnan(y)
        y = torch.nan_to_num(y, nan=0.0)
        optimizer.zero_grad()
        err = F.mse_loss(model(x), y, reduction="none")
        loss = err[known].mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'scan_pointnet',
    "field": 'point clouds',
    "what": 'The (B, N, 3) clouds are brought to (B, 3, N) with reshape instead of transpose, which mixes coordinates of different points so that no column is a real point any more.',
})


def shape_clouds(n, n_points, seed):
    g = seeded(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    u = torch.rand(n, n_points, generator=g) * 2 * math.pi
    v = torch.rand(n, n_points, generator=g) * 2 - 1
    r = torch.sqrt((1 - v ** 2).clamp(min=0))
    sphere = torch.stack([r * torch.cos(u), r * torch.sin(u), v], dim=-1)
    ball = sphere * torch.rand(n, n_points, 1, generator=g).pow(1 / 3)
    tube = torch.stack([torch.cos(u), torch.sin(u), v], dim=-1)
    cone = torch.stack([0.5 * (1 - v) * torch.cos(u), 0.5 * (1 - v) * torch.sin(u), v], dim=-1)
    pts = torch.stack([sphere, ball, tube, cone], dim=1)[torch.arange(n), y]
    pts = pts * (0.7 + 0.6 * torch.rand(n, 1, 3, generator=g))
    pts = pts + 0.05 * torch.randn(pts.shape, generator=g)
    order = torch.stack([torch.randperm(n_points, generator=g) for _ in range(n)])
    pts = pts.gather(1, order.unsqueeze(-1).expand_as(pts))
    return pts, y


def scan_pointnet_bad():
    class PointNet(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.mlp = nn.Sequential(
                nn.Conv1d(3, 32, 1, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
                nn.Conv1d(32, 64, 1, bias=False), nn.BatchNorm1d(64), nn.ReLU(),
            )
            self.fc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, n_classes))

        def forward(self, pts):
            x = pts.reshape(pts.size(0), 3, -1)
            feat = self.mlp(x).max(dim=2)[0]
            return self.fc(feat)

    torch.manual_seed(34)
    train = TensorDataset(*shape_clouds(800, 96, 1))
    x_test, y_test = shape_clouds(200, 96, 2)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, drop_last=True, generator=seeded(3)))
    model = PointNet(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def scan_pointnet_good():
    class PointNet(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.mlp = nn.Sequential(
                nn.Conv1d(3, 32, 1, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
                nn.Conv1d(32, 64, 1, bias=False), nn.BatchNorm1d(64), nn.ReLU(),
            )
            self.fc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, n_classes))

        def forward(self, pts):
            x = pts.transpose(1, 2)
            feat = self.mlp(x).max(dim=2)[0]
            return self.fc(feat)

    torch.manual_seed(34)
    train = TensorDataset(*shape_clouds(800, 96, 1))
    x_test, y_test = shape_clouds(200, 96, 2)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, drop_last=True, generator=seeded(3)))
    model = PointNet(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'surface_normals',
    "field": 'point clouds',
    "what": 'The random rotation augmentation turns the points but not their target normals, so inputs and targets live in different frames.',
})


class NormalNet(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, pts):
        h = self.local(pts)
        pooled = h.max(dim=1, keepdim=True)[0].expand_as(h)
        return F.normalize(self.head(torch.cat([h, pooled], dim=-1)), dim=-1)


def ellipsoids(n, n_points, seed):
    g = seeded(seed)
    axes = 0.6 + 0.8 * torch.rand(n, 1, 3, generator=g)
    unit = F.normalize(torch.randn(n, n_points, 3, generator=g), dim=-1)
    return unit * axes, F.normalize(unit / axes, dim=-1)


def random_rotation(n, g):
    angle = 2 * math.pi * torch.rand(n, generator=g)
    c, s, o, z = torch.cos(angle), torch.sin(angle), torch.ones(n), torch.zeros(n)
    return torch.stack([c, -s, z, s, c, z, z, z, o], dim=1).view(n, 3, 3)


def surface_normals_bad():
    torch.manual_seed(35)
    train = TensorDataset(*ellipsoids(500, 64, 1))
    p_test, n_test = ellipsoids(100, 64, 2)
    rot_test = random_rotation(100, seeded(4))
    p_test, n_test = p_test @ rot_test.transpose(1, 2), n_test @ rot_test.transpose(1, 2)
    batches = endless(DataLoader(train, batch_size=16, shuffle=True, generator=seeded(3)))
    aug = seeded(5)
    model = NormalNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        pts, normals = next(batches)
        rot = random_rotation(pts.size(0), aug)
        pts = pts @ rot.transpose(1, 2)
        optimizer.zero_grad()
        loss = (1 - (model(pts) * normals).sum(dim=-1)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (1 - (model(p_test) * n_test).sum(dim=-1)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def surface_normals_good():
    torch.manual_seed(35)
    train = TensorDataset(*ellipsoids(500, 64, 1))
    p_test, n_test = ellipsoids(100, 64, 2)
    rot_test = random_rotation(100, seeded(4))
    p_test, n_test = p_test @ rot_test.transpose(1, 2), n_test @ rot_test.transpose(1, 2)
    batches = endless(DataLoader(train, batch_size=16, shuffle=True, generator=seeded(3)))
    aug = seeded(5)
    model = NormalNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        pts, normals = next(batches)
        rot = random_rotation(pts.size(0), aug)
        pts = pts @ rot.transpose(1, 2)
        normals = normals @ rot.transpose(1, 2)
        optimizer.zero_grad()
        loss = (1 - (model(pts) * normals).sum(dim=-1)).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (1 - (model(p_test) * n_test).sum(dim=-1)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'pump_autoencoder',
    "field": 'anomaly detection',
    "what": 'The scheduler, meant to decay the learning rate once per epoch, is stepped after every batch, so the rate vanishes within the first epochs and training freezes.',
})


class AutoEncoder(nn.Module):
    def __init__(self, n_in, bottleneck=4, hidden=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, bottleneck))
        self.decoder = nn.Sequential(nn.Linear(bottleneck, hidden), nn.ReLU(), nn.Linear(hidden, n_in))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def pump_data(n, seed):
    mix = torch.randn(4, 16, generator=seeded(300))
    g = seeded(seed)
    z = torch.randn(n, 4, generator=g)
    return torch.tanh(z @ mix * 0.6) + 0.05 * torch.randn(n, 16, generator=g)


def pump_autoencoder_bad():
    torch.manual_seed(36)
    train = pump_data(1280, 1)
    normal = pump_data(400, 2)
    faulty = normal + 0.35 * torch.randn(normal.shape, generator=seeded(4))
    loader = DataLoader(TensorDataset(train), batch_size=64, shuffle=True, generator=seeded(3))
    batches = endless(loader)
    model = AutoEncoder(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def step(i):
        x, = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            a = (model(normal) - normal).pow(2).mean(dim=1)
            b = (model(faulty) - faulty).pow(2).mean(dim=1)
            return (b.unsqueeze(1) <= a).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pump_autoencoder_good():
    torch.manual_seed(36)
    train = pump_data(1280, 1)
    normal = pump_data(400, 2)
    faulty = normal + 0.35 * torch.randn(normal.shape, generator=seeded(4))
    loader = DataLoader(TensorDataset(train), batch_size=64, shuffle=True, generator=seeded(3))
    batches = endless(loader)
    model = AutoEncoder(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def step(i):
        x, = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            a = (model(normal) - normal).pow(2).mean(dim=1)
            b = (model(faulty) - faulty).pow(2).mean(dim=1)
            return (b.unsqueeze(1) <= a).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'badge_triplet',
    "field": 'metric learning',
    "what": 'Same-class distances are zeroed by a mask before the minimum over negatives, so the hardest negative distance is always zero and the loss only pulls everything together.',
})


class Embedder(nn.Module):
    def __init__(self, n_in, dim=8, hidden=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


class ClassBatches:
    def __init__(self, x, y, per_class, seed):
        self.x, self.y, self.per_class = x, y, per_class
        self.g = seeded(seed)
        self.index = [torch.nonzero(y == c).squeeze(1) for c in range(int(y.max()) + 1)]

    def draw(self):
        pick = torch.cat([ix[torch.randperm(len(ix), generator=self.g)[:self.per_class]] for ix in self.index])
        return self.x[pick], self.y[pick]


def badge_data(n, seed):
    centers = torch.randn(8, 6, generator=seeded(400))
    g = seeded(seed)
    y = torch.arange(n) % 8
    signal = centers[y] + 0.35 * torch.randn(n, 6, generator=g)
    nuisance = 1.0 * torch.randn(n, 10, generator=g)
    return torch.cat([signal, nuisance], dim=1), y


def badge_triplet_bad():
    torch.manual_seed(37)
    sampler = ClassBatches(*badge_data(1200, 1), per_class=6, seed=2)
    x_test, y_test = badge_data(320, 3)
    model = Embedder(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    margin = 0.3

    def batch_hard(emb, labels):
        dist = (emb.unsqueeze(1) - emb.unsqueeze(0)).pow(2).sum(dim=2)
        same = labels.unsqueeze(1) == labels.unsqueeze(0)
        hardest_pos = (dist * same.float()).max(dim=1)[0]
        hardest_neg = (dist * (~same).float()).min(dim=1)[0]
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    def step(i):
        x, y = sampler.draw()
        optimizer.zero_grad()
        loss = batch_hard(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            emb = model(x_test)
            sim = (emb @ emb.t()).fill_diagonal_(-2.0)
            order = sim.argsort(dim=1, descending=True)[:, :-1]
            hit = (y_test[order] == y_test.unsqueeze(1)).float()
            precision = hit.cumsum(dim=1) / torch.arange(1, hit.size(1) + 1)
            return 1.0 - ((precision * hit).sum(dim=1) / hit.sum(dim=1)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def badge_triplet_good():
    torch.manual_seed(37)
    sampler = ClassBatches(*badge_data(1200, 1), per_class=6, seed=2)
    x_test, y_test = badge_data(320, 3)
    model = Embedder(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    margin = 0.3

    def batch_hard(emb, labels):
        dist = (emb.unsqueeze(1) - emb.unsqueeze(0)).pow(2).sum(dim=2)
        same = labels.unsqueeze(1) == labels.unsqueeze(0)
        hardest_pos = (dist * same.float()).max(dim=1)[0]
        hardest_neg = dist.masked_fill(same, float("inf")).min(dim=1)[0]
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    def step(i):
        x, y = sampler.draw()
        optimizer.zero_grad()
        loss = batch_hard(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            emb = model(x_test)
            sim = (emb @ emb.t()).fill_diagonal_(-2.0)
            order = sim.argsort(dim=1, descending=True)[:, :-1]
            hit = (y_test[order] == y_test.unsqueeze(1)).float()
            precision = hit.cumsum(dim=1) / torch.arange(1, hit.size(1) + 1)
            return 1.0 - ((precision * hit).sum(dim=1) / hit.sum(dim=1)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
