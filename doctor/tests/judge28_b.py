"""Small training programs in pairs (faulty and careful)."""
import contextlib
import copy
import math
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


@contextlib.contextmanager
def evaluating(*modules):
    modes = [(m, m.training) for mod in modules for m in mod.modules()]
    for mod in modules:
        mod.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


CASES = []


CASES.append({
    "name": "house_price_mlp",
    "field": "tabular",
    "what": 'The prediction has shape (B, 1) and the target (B,), so the hand-written squared error broadcasts to (B, B) and the net is pulled to the mean price.',
})


def house_price_mlp_bad():
    torch.manual_seed(0)
    n, d = 1536, 12
    x = torch.randn(n, d)
    w = torch.randn(d)
    y = x @ w + 2.0 * torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] + 0.2 * torch.randn(n)
    mu, sd = y[:1024].mean(), y[:1024].std()
    y = (y - mu) / sd
    train = TensorDataset(x[:1024], y[:1024])
    x_test, y_test = x[1024:], y[1024:]

    class PriceNet(nn.Module):
        def __init__(self, d_in, hidden=64):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(d_in, hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(),
                nn.Linear(hidden, 1),
            )

        def forward(self, inp):
            return self.net(inp)

    model = PriceNet(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(train, batch_size=64, shuffle=True))

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        pred = model(xb)
        loss = ((pred - yb) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return ((model(x_test).view(-1) - y_test) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_price_mlp_good():
    torch.manual_seed(0)
    n, d = 1536, 12
    x = torch.randn(n, d)
    w = torch.randn(d)
    y = x @ w + 2.0 * torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] + 0.2 * torch.randn(n)
    mu, sd = y[:1024].mean(), y[:1024].std()
    y = (y - mu) / sd
    train = TensorDataset(x[:1024], y[:1024])
    x_test, y_test = x[1024:], y[1024:]

    class PriceNet(nn.Module):
        def __init__(self, d_in, hidden=64):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(d_in, hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(),
                nn.Linear(hidden, 1),
            )

        def forward(self, inp):
            return self.net(inp)

    model = PriceNet(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(train, batch_size=64, shuffle=True))

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        pred = model(xb).squeeze(-1)
        loss = ((pred - yb) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return ((model(x_test).view(-1) - y_test) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "credit_finetune",
    "field": "tabular",
    "what": 'The optimizer is built before the pretrained head is replaced, so it holds the parameters of the discarded head and the new head is never updated.',
})


def credit_finetune_bad():
    torch.manual_seed(1)
    d, n_classes = 16, 4
    proj = torch.randn(d, 6) / d ** 0.5
    x_src = torch.randn(1024, d)
    y_src = torch.tanh(2 * x_src @ proj[:, :2]).sum(1, keepdim=True)
    x_all = torch.randn(5000, d)
    y_all = (torch.tanh(2 * x_all @ proj) @ torch.randn(6, n_classes)).argmax(1)
    x_test, y_test = x_all[4000:], y_all[4000:]

    class CreditNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.head = nn.Linear(64, 1)

        def forward(self, inp):
            return self.head(self.backbone(inp))

    model = CreditNet()
    pre = torch.optim.Adam(model.parameters(), lr=3e-3)
    for k in range(120):
        idx = torch.randint(0, len(x_src), (64,))
        pre.zero_grad()
        F.mse_loss(model(x_src[idx]), y_src[idx]).backward()
        pre.step()
    pre.zero_grad()

    optimizer = torch.optim.SGD([
        {"params": model.backbone.parameters(), "lr": 0.005},
        {"params": model.head.parameters(), "lr": 0.05},
    ], momentum=0.9)
    model.head = nn.Linear(64, n_classes)
    criterion = nn.CrossEntropyLoss()
    batches = cycle(DataLoader(TensorDataset(x_all[:4000], y_all[:4000]), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def credit_finetune_good():
    torch.manual_seed(1)
    d, n_classes = 16, 4
    proj = torch.randn(d, 6) / d ** 0.5
    x_src = torch.randn(1024, d)
    y_src = torch.tanh(2 * x_src @ proj[:, :2]).sum(1, keepdim=True)
    x_all = torch.randn(5000, d)
    y_all = (torch.tanh(2 * x_all @ proj) @ torch.randn(6, n_classes)).argmax(1)
    x_test, y_test = x_all[4000:], y_all[4000:]

    class CreditNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.head = nn.Linear(64, 1)

        def forward(self, inp):
            return self.head(self.backbone(inp))

    model = CreditNet()
    pre = torch.optim.Adam(model.parameters(), lr=3e-3)
    for k in range(120):
        idx = torch.randint(0, len(x_src), (64,))
        pre.zero_grad()
        F.mse_loss(model(x_src[idx]), y_src[idx]).backward()
        pre.step()
    pre.zero_grad()

    model.head = nn.Linear(64, n_classes)
    optimizer = torch.optim.SGD([
        {"params": model.backbone.parameters(), "lr": 0.005},
        {"params": model.head.parameters(), "lr": 0.05},
    ], momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    batches = cycle(DataLoader(TensorDataset(x_all[:4000], y_all[:4000]), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return criterion(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "load_forecast_window_norm",
    "field": "time series",
    "what": 'The target window is standardised with its own mean and standard deviation instead of those of the input window, so level and scale of the forecast relative to the history are never learned.',
})


def load_forecast_window_norm_bad():
    torch.manual_seed(2)
    L, H = 48, 12
    t = torch.arange(1600).float()
    level = 10 + 4 * torch.sin(2 * math.pi * t / 160) + 0.002 * t
    amp = 1.0 + 0.5 * torch.sin(2 * math.pi * t / 400)
    series = level + amp * torch.sin(2 * math.pi * t / 24) + 0.1 * torch.randn(len(t))

    class WindowDataset(Dataset):
        def __init__(self, values, lookback, horizon):
            self.values, self.lookback, self.horizon = values, lookback, horizon

        def __len__(self):
            return len(self.values) - self.lookback - self.horizon + 1

        def __getitem__(self, idx):
            x = self.values[idx:idx + self.lookback]
            y = self.values[idx + self.lookback:idx + self.lookback + self.horizon]
            mean, std = x.mean(), x.std() + 1e-5
            return (x - mean) / std, (y - y.mean()) / (y.std() + 1e-5)

    class Forecaster(nn.Module):
        def __init__(self, lookback, horizon, hidden=64):
            super().__init__()
            self.linear = nn.Linear(lookback, horizon)
            self.mlp = nn.Sequential(nn.Linear(lookback, hidden), nn.GELU(), nn.Linear(hidden, horizon))

        def forward(self, x):
            return self.linear(x) + self.mlp(x)

    train = WindowDataset(series[:1200], L, H)
    test = series[1200:].unfold(0, L + H, 3)
    model = Forecaster(L, H)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = cycle(DataLoader(train, batch_size=64, shuffle=True))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            x, y = test[:, :L], test[:, L:]
            mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            forecast = model((x - mean) / std) * std + mean
            return (forecast - y).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def load_forecast_window_norm_good():
    torch.manual_seed(2)
    L, H = 48, 12
    t = torch.arange(1600).float()
    level = 10 + 4 * torch.sin(2 * math.pi * t / 160) + 0.002 * t
    amp = 1.0 + 0.5 * torch.sin(2 * math.pi * t / 400)
    series = level + amp * torch.sin(2 * math.pi * t / 24) + 0.1 * torch.randn(len(t))

    class WindowDataset(Dataset):
        def __init__(self, values, lookback, horizon):
            self.values, self.lookback, self.horizon = values, lookback, horizon

        def __len__(self):
            return len(self.values) - self.lookback - self.horizon + 1

        def __getitem__(self, idx):
            x = self.values[idx:idx + self.lookback]
            y = self.values[idx + self.lookback:idx + self.lookback + self.horizon]
            mean, std = x.mean(), x.std() + 1e-5
            return (x - mean) / std, (y - mean) / std

    class Forecaster(nn.Module):
        def __init__(self, lookback, horizon, hidden=64):
            super().__init__()
            self.linear = nn.Linear(lookback, horizon)
            self.mlp = nn.Sequential(nn.Linear(lookback, hidden), nn.GELU(), nn.Linear(hidden, horizon))

        def forward(self, x):
            return self.linear(x) + self.mlp(x)

    train = WindowDataset(series[:1200], L, H)
    test = series[1200:].unfold(0, L + H, 3)
    model = Forecaster(L, H)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = cycle(DataLoader(train, batch_size=64, shuffle=True))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            x, y = test[:, :L], test[:, L:]
            mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
            forecast = model((x - mean) / std) * std + mean
            return (forecast - y).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "demand_quantiles",
    "field": "time series",
    "what": 'The pinball loss takes the error as prediction minus target instead of target minus prediction, so the head for quantile q learns quantile 1 - q.',
})


def demand_quantiles_bad():
    torch.manual_seed(3)
    L = 28
    t = torch.arange(1800).float()
    noise = -torch.log(torch.rand(len(t)))
    base = 3 + torch.sin(2 * math.pi * t / 7) + 0.5 * torch.sin(2 * math.pi * t / 91)
    demand = base + 0.8 * noise
    demand = (demand - demand[:1300].mean()) / demand[:1300].std()
    windows = demand.unfold(0, L + 1, 1)
    x_train, y_train = windows[:1300, :L], windows[:1300, L]
    x_test, y_test = windows[1340:, :L], windows[1340:, L]
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    class QuantileNet(nn.Module):
        def __init__(self, lookback, n_q):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(lookback, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(48, 1) for _ in range(n_q)])

        def forward(self, x):
            h = self.body(x)
            return torch.cat([head(h) for head in self.heads], dim=1)

    def pinball(pred, target, q):
        err = pred - target.unsqueeze(1)
        return torch.maximum(q * err, (q - 1) * err).mean()

    model = QuantileNet(L, len(quantiles))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.7)
    batches = cycle(DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = pinball(model(xb), yb, quantiles)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            diff = y_test.unsqueeze(1) - model(x_test)
            below = (diff < 0).float()
            return ((quantiles - below) * diff).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def demand_quantiles_good():
    torch.manual_seed(3)
    L = 28
    t = torch.arange(1800).float()
    noise = -torch.log(torch.rand(len(t)))
    base = 3 + torch.sin(2 * math.pi * t / 7) + 0.5 * torch.sin(2 * math.pi * t / 91)
    demand = base + 0.8 * noise
    demand = (demand - demand[:1300].mean()) / demand[:1300].std()
    windows = demand.unfold(0, L + 1, 1)
    x_train, y_train = windows[:1300, :L], windows[:1300, L]
    x_test, y_test = windows[1340:, :L], windows[1340:, L]
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    class QuantileNet(nn.Module):
        def __init__(self, lookback, n_q):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(lookback, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(48, 1) for _ in range(n_q)])

        def forward(self, x):
            h = self.body(x)
            return torch.cat([head(h) for head in self.heads], dim=1)

    def pinball(pred, target, q):
        err = target.unsqueeze(1) - pred
        return torch.maximum(q * err, (q - 1) * err).mean()

    model = QuantileNet(L, len(quantiles))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.7)
    batches = cycle(DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = pinball(model(xb), yb, quantiles)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            diff = y_test.unsqueeze(1) - model(x_test)
            below = (diff < 0).float()
            return ((quantiles - below) * diff).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "sensor_gru_regressor",
    "field": "sequences",
    "what": 'The regressor reads out[:, -1] of right-padded batches, so short sequences are judged by the state after many padding steps instead of at their last real step.',
})


def sensor_gru_regressor_bad():
    torch.manual_seed(4)

    def make(n):
        seqs, ys = [], []
        for _ in range(n):
            length = int(torch.randint(4, 41, (1,)))
            s = torch.randn(length, 2)
            ema = torch.zeros(())
            for k in range(length):
                ema = 0.7 * ema + 0.3 * s[k, 0] * (s[k, 1] > -0.5)
            seqs.append(s)
            ys.append(ema * 3)
        return seqs, torch.stack(ys)

    class SeqDataset(Dataset):
        def __init__(self, seqs, ys):
            self.seqs, self.ys = seqs, ys

        def __len__(self):
            return len(self.seqs)

        def __getitem__(self, idx):
            return self.seqs[idx], self.ys[idx]

    def collate(items):
        seqs, ys = zip(*items)
        lengths = torch.tensor([len(s) for s in seqs])
        return nn.utils.rnn.pad_sequence(seqs, batch_first=True), lengths, torch.stack(ys)

    class GRURegressor(nn.Module):
        def __init__(self, n_in=2, hidden=32):
            super().__init__()
            self.gru = nn.GRU(n_in, hidden, batch_first=True)
            self.out = nn.Linear(hidden, 1)

        def forward(self, x, lengths):
            h, _ = self.gru(x)
            last = h[:, -1]
            return self.out(last).squeeze(-1)

    train, test = SeqDataset(*make(500)), SeqDataset(*make(200))
    x_test, len_test, y_test = collate([test[k] for k in range(len(test))])
    model = GRURegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    batches = cycle(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate))

    def step(i):
        model.train()
        x, lengths, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, lengths), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.mse_loss(model(x_test, len_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sensor_gru_regressor_good():
    torch.manual_seed(4)

    def make(n):
        seqs, ys = [], []
        for _ in range(n):
            length = int(torch.randint(4, 41, (1,)))
            s = torch.randn(length, 2)
            ema = torch.zeros(())
            for k in range(length):
                ema = 0.7 * ema + 0.3 * s[k, 0] * (s[k, 1] > -0.5)
            seqs.append(s)
            ys.append(ema * 3)
        return seqs, torch.stack(ys)

    class SeqDataset(Dataset):
        def __init__(self, seqs, ys):
            self.seqs, self.ys = seqs, ys

        def __len__(self):
            return len(self.seqs)

        def __getitem__(self, idx):
            return self.seqs[idx], self.ys[idx]

    def collate(items):
        seqs, ys = zip(*items)
        lengths = torch.tensor([len(s) for s in seqs])
        return nn.utils.rnn.pad_sequence(seqs, batch_first=True), lengths, torch.stack(ys)

    class GRURegressor(nn.Module):
        def __init__(self, n_in=2, hidden=32):
            super().__init__()
            self.gru = nn.GRU(n_in, hidden, batch_first=True)
            self.out = nn.Linear(hidden, 1)

        def forward(self, x, lengths):
            h, _ = self.gru(x)
            last = h[torch.arange(len(h)), lengths - 1]
            return self.out(last).squeeze(-1)

    train, test = SeqDataset(*make(500)), SeqDataset(*make(200))
    x_test, len_test, y_test = collate([test[k] for k in range(len(test))])
    model = GRURegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    batches = cycle(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate))

    def step(i):
        model.train()
        x, lengths, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, lengths), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.mse_loss(model(x_test, len_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "tcn_next_step",
    "field": "sequences",
    "what": 'The dilated convolutions pad on both sides, so each position sees the next value it must predict; training loss falls but real forecasts at the end of the series are poor.',
})


def tcn_next_step_bad():
    torch.manual_seed(5)

    def make(n, length):
        e = torch.randn(n, length + 20)
        s = torch.zeros(n, length + 20)
        for k in range(3, length + 20):
            s[:, k] = 1.5 * s[:, k - 1] - 0.8 * s[:, k - 2] + 0.2 * torch.tanh(s[:, k - 3]) + 0.3 * e[:, k]
        return s[:, 20:]

    train_series = make(400, 49)
    test_series = make(300, 49)
    scale = train_series.std()
    train_series, test_series = train_series / scale, test_series / scale

    class TemporalBlock(nn.Module):
        def __init__(self, c_in, c_out, kernel, dilation):
            super().__init__()
            self.pad = (kernel - 1) * dilation
            self.conv = nn.Conv1d(c_in, c_out, kernel, dilation=dilation)
            self.skip = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

        def forward(self, x):
            h = self.conv(F.pad(x, (self.pad // 2, self.pad - self.pad // 2)))
            return torch.relu(h) + self.skip(x)

    class TCN(nn.Module):
        def __init__(self, channels=24):
            super().__init__()
            self.blocks = nn.Sequential(
                TemporalBlock(1, channels, 3, 1),
                TemporalBlock(channels, channels, 3, 2),
                TemporalBlock(channels, channels, 3, 4),
            )
            self.head = nn.Conv1d(channels, 1, 1)

        def forward(self, x):
            return self.head(self.blocks(x.unsqueeze(1))).squeeze(1)

    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(train_series), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        (s,) = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(s[:, :-1]), s[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            forecast = model(test_series[:, :-1])[:, -1]
            return F.mse_loss(forecast, test_series[:, -1]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tcn_next_step_good():
    torch.manual_seed(5)

    def make(n, length):
        e = torch.randn(n, length + 20)
        s = torch.zeros(n, length + 20)
        for k in range(3, length + 20):
            s[:, k] = 1.5 * s[:, k - 1] - 0.8 * s[:, k - 2] + 0.2 * torch.tanh(s[:, k - 3]) + 0.3 * e[:, k]
        return s[:, 20:]

    train_series = make(400, 49)
    test_series = make(300, 49)
    scale = train_series.std()
    train_series, test_series = train_series / scale, test_series / scale

    class TemporalBlock(nn.Module):
        def __init__(self, c_in, c_out, kernel, dilation):
            super().__init__()
            self.pad = (kernel - 1) * dilation
            self.conv = nn.Conv1d(c_in, c_out, kernel, dilation=dilation)
            self.skip = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

        def forward(self, x):
            h = self.conv(F.pad(x, (self.pad, 0)))
            return torch.relu(h) + self.skip(x)

    class TCN(nn.Module):
        def __init__(self, channels=24):
            super().__init__()
            self.blocks = nn.Sequential(
                TemporalBlock(1, channels, 3, 1),
                TemporalBlock(channels, channels, 3, 2),
                TemporalBlock(channels, channels, 3, 4),
            )
            self.head = nn.Conv1d(channels, 1, 1)

        def forward(self, x):
            return self.head(self.blocks(x.unsqueeze(1))).squeeze(1)

    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(train_series), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        (s,) = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(s[:, :-1]), s[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            forecast = model(test_series[:, :-1])[:, -1]
            return F.mse_loss(forecast, test_series[:, -1]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "molecule_gnn",
    "field": "graphs",
    "what": 'Graphs are concatenated into one batch without adding the node offset to edge_index, so all messages pass among the nodes of the first graph and the other graphs get none.',
})


def molecule_gnn_bad():
    torch.manual_seed(6)

    def make(n):
        graphs = []
        for _ in range(n):
            k = int(torch.randint(6, 13, (1,)))
            x = torch.randn(k, 4)
            a, b = torch.triu_indices(k, k, 1)
            keep = torch.rand(len(a)) < 0.3
            src, dst = torch.cat([a[keep], b[keep]]), torch.cat([b[keep], a[keep]])
            nb = torch.zeros(k).index_add_(0, dst, x[src, 0])
            y = (x[:, 1] * nb).mean() + 0.5 * torch.relu(nb).mean()
            graphs.append((x, torch.stack([src, dst]), y))
        return graphs

    def collate(graphs):
        xs, edges, batch, ys = [], [], [], []
        offset = 0
        for g, (x, edge_index, y) in enumerate(graphs):
            xs.append(x)
            edges.append(edge_index)
            batch.append(torch.full((len(x),), g))
            ys.append(y)
            offset += len(x)
        return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(batch), torch.stack(ys)

    class SumConv(nn.Module):
        def __init__(self, c_in, c_out):
            super().__init__()
            self.self_lin = nn.Linear(c_in, c_out)
            self.nbr_lin = nn.Linear(c_in, c_out, bias=False)

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x).index_add(0, dst, x[src])
            return self.self_lin(x) + self.nbr_lin(agg)

    class GraphNet(nn.Module):
        def __init__(self, c_in=4, hidden=48):
            super().__init__()
            self.conv1 = SumConv(c_in, hidden)
            self.conv2 = SumConv(hidden, hidden)
            self.readout = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

        def forward(self, x, edge_index, batch, n_graphs):
            h = torch.relu(self.conv1(x, edge_index))
            h = torch.relu(self.conv2(h, edge_index))
            pooled = torch.zeros(n_graphs, h.shape[1]).index_add(0, batch, h)
            counts = torch.bincount(batch, minlength=n_graphs).unsqueeze(1)
            return self.readout(pooled / counts).squeeze(-1)

    train, test = make(512), make(80)
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate))

    def step(i):
        model.train()
        x, edge_index, batch, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, edge_index, batch, len(y)), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total = 0.0
        with evaluating(model), torch.no_grad():
            for x, edge_index, y in test:
                pred = model(x, edge_index, torch.zeros(len(x), dtype=torch.long), 1)
                total += (pred[0] - y).pow(2).item()
        return total / len(test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def molecule_gnn_good():
    torch.manual_seed(6)

    def make(n):
        graphs = []
        for _ in range(n):
            k = int(torch.randint(6, 13, (1,)))
            x = torch.randn(k, 4)
            a, b = torch.triu_indices(k, k, 1)
            keep = torch.rand(len(a)) < 0.3
            src, dst = torch.cat([a[keep], b[keep]]), torch.cat([b[keep], a[keep]])
            nb = torch.zeros(k).index_add_(0, dst, x[src, 0])
            y = (x[:, 1] * nb).mean() + 0.5 * torch.relu(nb).mean()
            graphs.append((x, torch.stack([src, dst]), y))
        return graphs

    def collate(graphs):
        xs, edges, batch, ys = [], [], [], []
        offset = 0
        for g, (x, edge_index, y) in enumerate(graphs):
            xs.append(x)
            edges.append(edge_index + offset)
            batch.append(torch.full((len(x),), g))
            ys.append(y)
            offset += len(x)
        return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(batch), torch.stack(ys)

    class SumConv(nn.Module):
        def __init__(self, c_in, c_out):
            super().__init__()
            self.self_lin = nn.Linear(c_in, c_out)
            self.nbr_lin = nn.Linear(c_in, c_out, bias=False)

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x).index_add(0, dst, x[src])
            return self.self_lin(x) + self.nbr_lin(agg)

    class GraphNet(nn.Module):
        def __init__(self, c_in=4, hidden=48):
            super().__init__()
            self.conv1 = SumConv(c_in, hidden)
            self.conv2 = SumConv(hidden, hidden)
            self.readout = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

        def forward(self, x, edge_index, batch, n_graphs):
            h = torch.relu(self.conv1(x, edge_index))
            h = torch.relu(self.conv2(h, edge_index))
            pooled = torch.zeros(n_graphs, h.shape[1]).index_add(0, batch, h)
            counts = torch.bincount(batch, minlength=n_graphs).unsqueeze(1)
            return self.readout(pooled / counts).squeeze(-1)

    train, test = make(512), make(80)
    model = GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate))

    def step(i):
        model.train()
        x, edge_index, batch, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, edge_index, batch, len(y)), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        total = 0.0
        with evaluating(model), torch.no_grad():
            for x, edge_index, y in test:
                pred = model(x, edge_index, torch.zeros(len(x), dtype=torch.long), 1)
                total += (pred[0] - y).pow(2).item()
        return total / len(test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "dqn_point_reacher",
    "field": "reinforcement learning",
    "what": 'The environment updates its state tensor in place and the replay buffer stores that tensor without a copy, so state and next state of all transitions of an episode become the same final state.',
})


def dqn_point_reacher_bad():
    torch.manual_seed(10)
    random.seed(10)
    moves = torch.tensor([[0.0, 0.0], [0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])

    class PointEnv:
        def reset(self):
            self.state = torch.rand(4) * 2 - 1
            self.t = 0
            return self.state

        def step(self, action):
            self.state[:2] += moves[action]
            self.state[:2].clamp_(-1.2, 1.2)
            self.t += 1
            reward = -(self.state[:2] - self.state[2:]).norm().item()
            return self.state, reward, self.t >= 20

    class ReplayBuffer:
        def __init__(self, capacity):
            self.data = deque(maxlen=capacity)

        def push(self, s, a, r, s2):
            self.data.append((s, a, r, s2))

        def sample(self, n):
            s, a, r, s2 = zip(*random.sample(self.data, n))
            return torch.stack(s), torch.tensor(a), torch.tensor(r), torch.stack(s2)

    class QNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

        def forward(self, s):
            return self.net(s)

    q_net = QNet()
    target_net = copy.deepcopy(q_net).requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    env, buffer, gamma = PointEnv(), ReplayBuffer(4000), 0.9
    eval_start = torch.rand(128, 4) * 2 - 1
    run = {"state": env.reset()}

    def interact(epsilon):
        state = run["state"]
        obs = state
        if random.random() < epsilon:
            action = random.randrange(5)
        else:
            with torch.no_grad():
                action = int(q_net(obs).argmax())
        next_state, reward, timeout = env.step(action)
        buffer.push(obs, action, reward, next_state)
        run["state"] = env.reset() if timeout else next_state

    for _ in range(400):
        interact(1.0)

    def step(i):
        q_net.train()
        for _ in range(4):
            interact(max(0.1, 1.0 - i / 300))
        s, a, r, s2 = buffer.sample(64)
        with torch.no_grad():
            target = r + gamma * target_net(s2).max(1).values
        q = q_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(q_net.parameters(), target_net.parameters()):
                tp.lerp_(p, 0.02)
        return loss.item()

    def probe():
        with evaluating(q_net), torch.no_grad():
            s, cost = eval_start.clone(), 0.0
            for _ in range(20):
                s[:, :2] = (s[:, :2] + moves[q_net(s).argmax(1)]).clamp(-1.2, 1.2)
                cost += (s[:, :2] - s[:, 2:]).norm(dim=1).mean().item()
        return cost / 20

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_point_reacher_good():
    torch.manual_seed(10)
    random.seed(10)
    moves = torch.tensor([[0.0, 0.0], [0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])

    class PointEnv:
        def reset(self):
            self.state = torch.rand(4) * 2 - 1
            self.t = 0
            return self.state

        def step(self, action):
            self.state[:2] += moves[action]
            self.state[:2].clamp_(-1.2, 1.2)
            self.t += 1
            reward = -(self.state[:2] - self.state[2:]).norm().item()
            return self.state, reward, self.t >= 20

    class ReplayBuffer:
        def __init__(self, capacity):
            self.data = deque(maxlen=capacity)

        def push(self, s, a, r, s2):
            self.data.append((s.clone(), a, r, s2.clone()))

        def sample(self, n):
            s, a, r, s2 = zip(*random.sample(self.data, n))
            return torch.stack(s), torch.tensor(a), torch.tensor(r), torch.stack(s2)

    class QNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

        def forward(self, s):
            return self.net(s)

    q_net = QNet()
    target_net = copy.deepcopy(q_net).requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    env, buffer, gamma = PointEnv(), ReplayBuffer(4000), 0.9
    eval_start = torch.rand(128, 4) * 2 - 1
    run = {"state": env.reset()}

    def interact(epsilon):
        state = run["state"]
        obs = state.clone()
        if random.random() < epsilon:
            action = random.randrange(5)
        else:
            with torch.no_grad():
                action = int(q_net(obs).argmax())
        next_state, reward, timeout = env.step(action)
        buffer.push(obs, action, reward, next_state)
        run["state"] = env.reset() if timeout else next_state

    for _ in range(400):
        interact(1.0)

    def step(i):
        q_net.train()
        for _ in range(4):
            interact(max(0.1, 1.0 - i / 300))
        s, a, r, s2 = buffer.sample(64)
        with torch.no_grad():
            target = r + gamma * target_net(s2).max(1).values
        q = q_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, tp in zip(q_net.parameters(), target_net.parameters()):
                tp.lerp_(p, 0.02)
        return loss.item()

    def probe():
        with evaluating(q_net), torch.no_grad():
            s, cost = eval_start.clone(), 0.0
            for _ in range(20):
                s[:, :2] = (s[:, :2] + moves[q_net(s).argmax(1)]).clamp(-1.2, 1.2)
                cost += (s[:, :2] - s[:, 2:]).norm(dim=1).mean().item()
        return cost / 20

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "reinforce_balance",
    "field": "reinforcement learning",
    "what": 'The discounted returns are computed backwards but appended without reversing, so the last actions before a fall get the largest return and the good early ones the smallest.',
})


def reinforce_balance_bad():
    torch.manual_seed(11)
    max_len, gamma = 60, 0.95

    def dynamics(s, force):
        omega = s[..., 1] + 0.1 * (3.0 * torch.sin(s[..., 0]) + 2.0 * force)
        theta = s[..., 0] + 0.1 * omega
        return torch.stack([theta, omega], dim=-1)

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, obs):
            return self.net(obs)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    eval_start = 0.6 * (torch.rand(128, 2) - 0.5)

    def run_episode():
        s = 0.6 * (torch.rand(2) - 0.5)
        log_probs, rewards = [], []
        for _ in range(max_len):
            dist = torch.distributions.Categorical(logits=policy(s), validate_args=False)
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            s = dynamics(s, 2.0 * action - 1.0)
            rewards.append(1.0)
            if abs(float(s[0])) > 0.6:
                break
        return log_probs, rewards

    def step(i):
        policy.train()
        log_probs, rewards = run_episode()
        returns, running = [], 0.0
        for r in reversed(rewards):
            running = r + gamma * running
            returns.append(running)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(log_probs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy), torch.no_grad():
            s, alive, steps = eval_start.clone(), torch.ones(128), 0.0
            for _ in range(max_len):
                s = dynamics(s, 2.0 * policy(s).argmax(1) - 1.0)
                alive = alive * (s[:, 0].abs() <= 0.6)
                steps += alive.mean().item()
        return 1.0 / (1.0 + steps)

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def reinforce_balance_good():
    torch.manual_seed(11)
    max_len, gamma = 60, 0.95

    def dynamics(s, force):
        omega = s[..., 1] + 0.1 * (3.0 * torch.sin(s[..., 0]) + 2.0 * force)
        theta = s[..., 0] + 0.1 * omega
        return torch.stack([theta, omega], dim=-1)

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, obs):
            return self.net(obs)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    eval_start = 0.6 * (torch.rand(128, 2) - 0.5)

    def run_episode():
        s = 0.6 * (torch.rand(2) - 0.5)
        log_probs, rewards = [], []
        for _ in range(max_len):
            dist = torch.distributions.Categorical(logits=policy(s), validate_args=False)
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            s = dynamics(s, 2.0 * action - 1.0)
            rewards.append(1.0)
            if abs(float(s[0])) > 0.6:
                break
        return log_probs, rewards

    def step(i):
        policy.train()
        log_probs, rewards = run_episode()
        returns, running = [], 0.0
        for r in reversed(rewards):
            running = r + gamma * running
            returns.insert(0, running)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(log_probs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy), torch.no_grad():
            s, alive, steps = eval_start.clone(), torch.ones(128), 0.0
            for _ in range(max_len):
                s = dynamics(s, 2.0 * policy(s).argmax(1) - 1.0)
                alive = alive * (s[:, 0].abs() <= 0.6)
                steps += alive.mean().item()
        return 1.0 / (1.0 + steps)

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "ddpg_servo",
    "field": "reinforcement learning",
    "what": "Actor loss and critic loss are backpropagated together without freezing the critic, so the actor's objective also pushes the critic to inflate its own Q values.",
})


def ddpg_servo_bad():
    torch.manual_seed(12)
    gamma, tau, noise_std = 0.9, 0.02, 0.3

    def dynamics(s, a):
        pos = s[:, 0] + 0.3 * s[:, 1]
        vel = 0.8 * s[:, 1] + 0.6 * a[:, 0] - 0.2 * torch.sin(2 * s[:, 0])
        nxt = torch.stack([pos, vel, s[:, 2]], dim=1).clamp(-3, 3)
        reward = -(nxt[:, 0] - nxt[:, 2]).abs() - 0.05 * a[:, 0].pow(2)
        return nxt, reward

    def start(n):
        return torch.cat([torch.rand(n, 1) * 2 - 1, torch.zeros(n, 1), torch.rand(n, 1) * 2 - 1], dim=1)

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s):
            return torch.tanh(self.net(s))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], dim=1)).squeeze(1)

    actor, critic = Actor(), Critic()
    actor_t, critic_t = copy.deepcopy(actor).requires_grad_(False), copy.deepcopy(critic).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    eval_start = start(128)
    size, n_env = 6000, 8
    buf = {k: torch.zeros(size, d) for k, d in (("s", 3), ("a", 1), ("r", 1), ("s2", 3))}
    run = {"s": start(n_env), "t": 0, "n": 0}

    def interact(explore):
        s = run["s"]
        if explore:
            a = torch.rand(n_env, 1) * 2 - 1
        else:
            with torch.no_grad():
                a = (actor(s) + noise_std * torch.randn(n_env, 1)).clamp(-1, 1)
        s2, r = dynamics(s, a)
        at = torch.arange(run["n"], run["n"] + n_env) % size
        buf["s"][at], buf["a"][at], buf["r"][at], buf["s2"][at] = s, a, r.unsqueeze(1), s2
        run["n"] += n_env
        run["t"] += 1
        run["s"] = start(n_env) if run["t"] % 20 == 0 else s2

    for _ in range(60):
        interact(True)

    def step(i):
        actor.train()
        critic.train()
        interact(False)
        idx = torch.randint(0, min(run["n"], size), (128,))
        s, a, r, s2 = buf["s"][idx], buf["a"][idx], buf["r"][idx, 0], buf["s2"][idx]
        with torch.no_grad():
            target = r + gamma * critic_t(s2, actor_t(s2))
        critic_loss = F.mse_loss(critic(s, a), target)
        actor_loss = -critic(s, actor(s)).mean()
        actor_opt.zero_grad()
        critic_opt.zero_grad()
        (critic_loss + actor_loss).backward()
        critic_opt.step()
        actor_opt.step()
        with torch.no_grad():
            for net, net_t in ((actor, actor_t), (critic, critic_t)):
                for p, tp in zip(net.parameters(), net_t.parameters()):
                    tp.lerp_(p, tau)
        return critic_loss.item()

    def probe():
        with evaluating(actor), torch.no_grad():
            s, cost = eval_start.clone(), 0.0
            for _ in range(20):
                s, r = dynamics(s, actor(s))
                cost -= r.mean().item()
        return cost / 20

    return {"model": {"actor": actor, "critic": critic}, "optimizer": [actor_opt, critic_opt],
            "steps": 20, "step": step, "probe": probe}


def ddpg_servo_good():
    torch.manual_seed(12)
    gamma, tau, noise_std = 0.9, 0.02, 0.3

    def dynamics(s, a):
        pos = s[:, 0] + 0.3 * s[:, 1]
        vel = 0.8 * s[:, 1] + 0.6 * a[:, 0] - 0.2 * torch.sin(2 * s[:, 0])
        nxt = torch.stack([pos, vel, s[:, 2]], dim=1).clamp(-3, 3)
        reward = -(nxt[:, 0] - nxt[:, 2]).abs() - 0.05 * a[:, 0].pow(2)
        return nxt, reward

    def start(n):
        return torch.cat([torch.rand(n, 1) * 2 - 1, torch.zeros(n, 1), torch.rand(n, 1) * 2 - 1], dim=1)

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s):
            return torch.tanh(self.net(s))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], dim=1)).squeeze(1)

    actor, critic = Actor(), Critic()
    actor_t, critic_t = copy.deepcopy(actor).requires_grad_(False), copy.deepcopy(critic).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
    eval_start = start(128)
    size, n_env = 6000, 8
    buf = {k: torch.zeros(size, d) for k, d in (("s", 3), ("a", 1), ("r", 1), ("s2", 3))}
    run = {"s": start(n_env), "t": 0, "n": 0}

    def interact(explore):
        s = run["s"]
        if explore:
            a = torch.rand(n_env, 1) * 2 - 1
        else:
            with torch.no_grad():
                a = (actor(s) + noise_std * torch.randn(n_env, 1)).clamp(-1, 1)
        s2, r = dynamics(s, a)
        at = torch.arange(run["n"], run["n"] + n_env) % size
        buf["s"][at], buf["a"][at], buf["r"][at], buf["s2"][at] = s, a, r.unsqueeze(1), s2
        run["n"] += n_env
        run["t"] += 1
        run["s"] = start(n_env) if run["t"] % 20 == 0 else s2

    for _ in range(60):
        interact(True)

    def step(i):
        actor.train()
        critic.train()
        interact(False)
        idx = torch.randint(0, min(run["n"], size), (128,))
        s, a, r, s2 = buf["s"][idx], buf["a"][idx], buf["r"][idx, 0], buf["s2"][idx]
        with torch.no_grad():
            target = r + gamma * critic_t(s2, actor_t(s2))
        critic_loss = F.mse_loss(critic(s, a), target)
        critic.requires_grad_(False)
        actor_loss = -critic(s, actor(s)).mean()
        critic.requires_grad_(True)
        actor_opt.zero_grad()
        critic_opt.zero_grad()
        (critic_loss + actor_loss).backward()
        critic_opt.step()
        actor_opt.step()
        with torch.no_grad():
            for net, net_t in ((actor, actor_t), (critic, critic_t)):
                for p, tp in zip(net.parameters(), net_t.parameters()):
                    tp.lerp_(p, tau)
        return critic_loss.item()

    def probe():
        with evaluating(actor), torch.no_grad():
            s, cost = eval_start.clone(), 0.0
            for _ in range(20):
                s, r = dynamics(s, actor(s))
                cost -= r.mean().item()
        return cost / 20

    return {"model": {"actor": actor, "critic": critic}, "optimizer": [actor_opt, critic_opt],
            "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "implicit_ncf",
    "field": "recommenders",
    "what": 'Positive and negative items are flattened row by row but the labels are laid out as all ones followed by all zeros, so labels do not belong to the pairs they are compared with.',
})


def implicit_ncf_bad():
    torch.manual_seed(13)
    n_users, n_items, k, n_neg = 200, 150, 5, 4
    pu, qi = torch.randn(n_users, k), torch.randn(n_items, k)
    probs = torch.softmax(1.2 * pu @ qi.t() + 0.5 * torch.randn(n_items), dim=1)
    items = torch.multinomial(probs, 40, replacement=False)
    train_items, test_items = items[:, :34], items[:, 34:]
    seen = torch.zeros(n_users, n_items, dtype=torch.bool).scatter_(1, train_items, True)

    class NCF(nn.Module):
        def __init__(self, n_users, n_items, dim=16):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.item_bias = nn.Embedding(n_items, 1)
            self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, users, items):
            u, v = self.user(users), self.item(items)
            deep = self.mlp(torch.cat([u, v], dim=-1)).squeeze(-1)
            return (u * v).sum(-1) + deep + self.item_bias(items).squeeze(-1)

    model = NCF(n_users, n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    criterion = nn.BCEWithLogitsLoss()
    pairs = TensorDataset(torch.arange(n_users).repeat_interleave(34), train_items.reshape(-1))
    batches = cycle(DataLoader(pairs, batch_size=256, shuffle=True))

    def step(i):
        model.train()
        users, pos = next(batches)
        neg = torch.multinomial((~seen[users]).float(), n_neg)
        candidates = torch.cat([pos.unsqueeze(1), neg], dim=1)
        flat_users = users.repeat_interleave(1 + n_neg)
        labels = torch.cat([torch.ones(len(users)), torch.zeros(len(users) * n_neg)])
        optimizer.zero_grad()
        loss = criterion(model(flat_users, candidates.reshape(-1)), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            users = torch.arange(n_users).repeat_interleave(n_items)
            scores = model(users, torch.arange(n_items).repeat(n_users)).view(n_users, n_items)
            scores = scores.masked_fill(seen, float("-inf"))
            held = scores.gather(1, test_items)
            rank = (scores.unsqueeze(1) > held.unsqueeze(2)).sum(2)
            return (rank.float().mean().item() + 1) / n_items

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def implicit_ncf_good():
    torch.manual_seed(13)
    n_users, n_items, k, n_neg = 200, 150, 5, 4
    pu, qi = torch.randn(n_users, k), torch.randn(n_items, k)
    probs = torch.softmax(1.2 * pu @ qi.t() + 0.5 * torch.randn(n_items), dim=1)
    items = torch.multinomial(probs, 40, replacement=False)
    train_items, test_items = items[:, :34], items[:, 34:]
    seen = torch.zeros(n_users, n_items, dtype=torch.bool).scatter_(1, train_items, True)

    class NCF(nn.Module):
        def __init__(self, n_users, n_items, dim=16):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.item_bias = nn.Embedding(n_items, 1)
            self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, users, items):
            u, v = self.user(users), self.item(items)
            deep = self.mlp(torch.cat([u, v], dim=-1)).squeeze(-1)
            return (u * v).sum(-1) + deep + self.item_bias(items).squeeze(-1)

    model = NCF(n_users, n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    criterion = nn.BCEWithLogitsLoss()
    pairs = TensorDataset(torch.arange(n_users).repeat_interleave(34), train_items.reshape(-1))
    batches = cycle(DataLoader(pairs, batch_size=256, shuffle=True))

    def step(i):
        model.train()
        users, pos = next(batches)
        neg = torch.multinomial((~seen[users]).float(), n_neg)
        candidates = torch.cat([pos.unsqueeze(1), neg], dim=1)
        flat_users = users.repeat_interleave(1 + n_neg)
        labels = torch.cat([torch.ones(len(users), 1), torch.zeros(len(users), n_neg)], dim=1).reshape(-1)
        optimizer.zero_grad()
        loss = criterion(model(flat_users, candidates.reshape(-1)), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            users = torch.arange(n_users).repeat_interleave(n_items)
            scores = model(users, torch.arange(n_items).repeat(n_users)).view(n_users, n_items)
            scores = scores.masked_fill(seen, float("-inf"))
            held = scores.gather(1, test_items)
            rank = (scores.unsqueeze(1) > held.unsqueeze(2)).sum(2)
            return (rank.float().mean().item() + 1) / n_items

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "two_tower_retrieval",
    "field": "recommenders",
    "what": 'The interaction log is sorted by item and the loader does not shuffle, so the in-batch negatives are nearly all the positive item itself and the softmax carries no signal.',
})


def two_tower_retrieval_bad():
    torch.manual_seed(14)
    n_users, n_items, k = 400, 120, 6
    user_feat = torch.randn(n_users, 12)
    taste = torch.tanh(user_feat @ torch.randn(12, k) / 3)
    item_vec = torch.randn(n_items, k)
    probs = torch.softmax(2.5 * taste @ item_vec.t(), dim=1)
    users = torch.arange(n_users).repeat_interleave(20)
    items = torch.multinomial(probs, 20, replacement=True).reshape(-1)
    held = torch.rand(len(users)) < 0.15
    u_test, i_test = users[held], items[held]
    u_train, i_train = users[~held], items[~held]
    order = torch.argsort(i_train, stable=True)
    log = TensorDataset(user_feat[u_train[order]], i_train[order])

    class TwoTower(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.user_tower = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, dim))
            self.item_tower = nn.Embedding(n_items, dim)

        def forward(self, feats, items):
            u = F.normalize(self.user_tower(feats), dim=1)
            v = F.normalize(self.item_tower(items), dim=1)
            return u @ v.t() / 0.1

    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(DataLoader(log, batch_size=64, drop_last=True))

    def step(i):
        model.train()
        feats, pos = next(batches)
        optimizer.zero_grad()
        logits = model(feats, pos)
        loss = F.cross_entropy(logits, torch.arange(len(pos)))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            scores = model(user_feat[u_test], torch.arange(n_items))
            rank = (scores > scores.gather(1, i_test.unsqueeze(1))).sum(1)
            return (rank.float().mean().item() + 1) / n_items

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_tower_retrieval_good():
    torch.manual_seed(14)
    n_users, n_items, k = 400, 120, 6
    user_feat = torch.randn(n_users, 12)
    taste = torch.tanh(user_feat @ torch.randn(12, k) / 3)
    item_vec = torch.randn(n_items, k)
    probs = torch.softmax(2.5 * taste @ item_vec.t(), dim=1)
    users = torch.arange(n_users).repeat_interleave(20)
    items = torch.multinomial(probs, 20, replacement=True).reshape(-1)
    held = torch.rand(len(users)) < 0.15
    u_test, i_test = users[held], items[held]
    u_train, i_train = users[~held], items[~held]
    order = torch.argsort(i_train, stable=True)
    log = TensorDataset(user_feat[u_train[order]], i_train[order])

    class TwoTower(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.user_tower = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, dim))
            self.item_tower = nn.Embedding(n_items, dim)

        def forward(self, feats, items):
            u = F.normalize(self.user_tower(feats), dim=1)
            v = F.normalize(self.item_tower(items), dim=1)
            return u @ v.t() / 0.1

    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(DataLoader(log, batch_size=64, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        feats, pos = next(batches)
        optimizer.zero_grad()
        logits = model(feats, pos)
        loss = F.cross_entropy(logits, torch.arange(len(pos)))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            scores = model(user_feat[u_test], torch.arange(n_items))
            rank = (scores > scores.gather(1, i_test.unsqueeze(1))).sum(1)
            return (rank.float().mean().item() + 1) / n_items

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "forced_relaxation_pinn",
    "field": "physics-informed",
    "what": "The time derivative is taken without create_graph, so the residual's derivative is a constant for the optimizer and only the plain u terms receive a gradient.",
})


def forced_relaxation_pinn_bad():
    torch.manual_seed(15)
    k, w, u0, t_max = 1.0, 2.0, 1.5, 3.0

    class PINN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(1, hidden), nn.Tanh(),
                nn.Linear(hidden, hidden), nn.Tanh(),
                nn.Linear(hidden, 1),
            )

        def forward(self, t):
            return self.net(t)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    t_init = torch.zeros(1, 1)
    t_eval = torch.linspace(0, t_max, 101).unsqueeze(1)
    a, b = k * k / (k * k + w * w), k * w / (k * k + w * w)
    exact = a * torch.cos(w * t_eval) + b * torch.sin(w * t_eval) + (u0 - a) * torch.exp(-k * t_eval)

    def step(i):
        model.train()
        t = (torch.rand(128, 1) * t_max).requires_grad_(True)
        u = model(t)
        u_t = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True)[0]
        residual = u_t + k * u - k * torch.cos(w * t)
        loss = residual.pow(2).mean() + 5 * (model(t_init) - u0).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return (model(t_eval) - exact).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forced_relaxation_pinn_good():
    torch.manual_seed(15)
    k, w, u0, t_max = 1.0, 2.0, 1.5, 3.0

    class PINN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(1, hidden), nn.Tanh(),
                nn.Linear(hidden, hidden), nn.Tanh(),
                nn.Linear(hidden, 1),
            )

        def forward(self, t):
            return self.net(t)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    t_init = torch.zeros(1, 1)
    t_eval = torch.linspace(0, t_max, 101).unsqueeze(1)
    a, b = k * k / (k * k + w * w), k * w / (k * k + w * w)
    exact = a * torch.cos(w * t_eval) + b * torch.sin(w * t_eval) + (u0 - a) * torch.exp(-k * t_eval)

    def step(i):
        model.train()
        t = (torch.rand(128, 1) * t_max).requires_grad_(True)
        u = model(t)
        u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        residual = u_t + k * u - k * torch.cos(w * t)
        loss = residual.pow(2).mean() + 5 * (model(t_init) - u0).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return (model(t_eval) - exact).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "irregular_neural_ode",
    "field": "neural ODEs",
    "what": 'The integrator advances with one average step size although the observations are irregularly spaced, so the learned vector field is fitted to wrong times.',
})


def irregular_neural_ode_bad():
    torch.manual_seed(16)

    def true_field(z):
        x, v = z[..., 0], z[..., 1]
        return torch.stack([v, -1.5 * torch.sin(x) - 0.2 * v], dim=-1)

    def sample(n, n_obs):
        z = torch.randn(n, 2)
        gaps = 0.02 + 0.15 * torch.rand(n, n_obs - 1).pow(2) * 3
        ts = torch.cat([torch.zeros(n, 1), gaps.cumsum(1)], dim=1)
        zs = [z]
        for k in range(n_obs - 1):
            h = gaps[:, k:k + 1] / 8
            for _ in range(8):
                k1 = true_field(z)
                k2 = true_field(z + 0.5 * h * k1)
                z = z + h * k2
            zs.append(z)
        return ts, torch.stack(zs, dim=1)

    t_train, z_train = sample(256, 12)
    t_test, z_test = sample(128, 12)

    class ODEFunc(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2))

        def forward(self, z):
            return self.net(z)

    def rk4(func, z, h):
        k1 = func(z)
        k2 = func(z + 0.5 * h * k1)
        k3 = func(z + 0.5 * h * k2)
        k4 = func(z + h * k3)
        return z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def odeint(func, z, ts):
        path = [z]
        h = (ts[:, -1:] - ts[:, :1]) / (ts.shape[1] - 1)
        for k in range(ts.shape[1] - 1):
            z = rk4(func, z, h)
            path.append(z)
        return torch.stack(path, dim=1)

    func = ODEFunc()
    optimizer = torch.optim.Adam(func.parameters(), lr=5e-3)
    batches = cycle(DataLoader(TensorDataset(t_train, z_train), batch_size=32, shuffle=True))

    def step(i):
        func.train()
        ts, zs = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(odeint(func, zs[:, 0], ts), zs)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(func), torch.no_grad():
            z, total = z_test[:, 0], 0.0
            for k in range(t_test.shape[1] - 1):
                z = rk4(func, z, t_test[:, k + 1:k + 2] - t_test[:, k:k + 1])
                total += F.mse_loss(z, z_test[:, k + 1]).item()
        return total / (t_test.shape[1] - 1)

    return {"model": func, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def irregular_neural_ode_good():
    torch.manual_seed(16)

    def true_field(z):
        x, v = z[..., 0], z[..., 1]
        return torch.stack([v, -1.5 * torch.sin(x) - 0.2 * v], dim=-1)

    def sample(n, n_obs):
        z = torch.randn(n, 2)
        gaps = 0.02 + 0.15 * torch.rand(n, n_obs - 1).pow(2) * 3
        ts = torch.cat([torch.zeros(n, 1), gaps.cumsum(1)], dim=1)
        zs = [z]
        for k in range(n_obs - 1):
            h = gaps[:, k:k + 1] / 8
            for _ in range(8):
                k1 = true_field(z)
                k2 = true_field(z + 0.5 * h * k1)
                z = z + h * k2
            zs.append(z)
        return ts, torch.stack(zs, dim=1)

    t_train, z_train = sample(256, 12)
    t_test, z_test = sample(128, 12)

    class ODEFunc(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2))

        def forward(self, z):
            return self.net(z)

    def rk4(func, z, h):
        k1 = func(z)
        k2 = func(z + 0.5 * h * k1)
        k3 = func(z + 0.5 * h * k2)
        k4 = func(z + h * k3)
        return z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def odeint(func, z, ts):
        path = [z]
        for k in range(ts.shape[1] - 1):
            h = ts[:, k + 1:k + 2] - ts[:, k:k + 1]
            z = rk4(func, z, h)
            path.append(z)
        return torch.stack(path, dim=1)

    func = ODEFunc()
    optimizer = torch.optim.Adam(func.parameters(), lr=5e-3)
    batches = cycle(DataLoader(TensorDataset(t_train, z_train), batch_size=32, shuffle=True))

    def step(i):
        func.train()
        ts, zs = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(odeint(func, zs[:, 0], ts), zs)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(func), torch.no_grad():
            z, total = z_test[:, 0], 0.0
            for k in range(t_test.shape[1] - 1):
                z = rk4(func, z, t_test[:, k + 1:k + 2] - t_test[:, k:k + 1])
                total += F.mse_loss(z, z_test[:, k + 1]).item()
        return total / (t_test.shape[1] - 1)

    return {"model": func, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "deepsurv_cox",
    "field": "survival analysis",
    "what": 'The Cox loss builds its risk sets with a cumulative log-sum-exp but the batch is not sorted by descending time, so the risk sets are arbitrary.',
})


def deepsurv_cox_bad():
    torch.manual_seed(20)
    n, d = 1800, 8
    x = torch.randn(n, d)
    risk = 1.2 * x[:, 0] - 0.9 * x[:, 1] + 1.0 * x[:, 2] * x[:, 3]
    event_time = -torch.log(torch.rand(n)) * torch.exp(-risk)
    censor_time = -torch.log(torch.rand(n)) * 30.0
    time = torch.minimum(event_time, censor_time)
    event = (event_time <= censor_time).float()
    x_test, t_test, e_test = x[1400:], time[1400:], event[1400:]

    class DeepSurv(nn.Module):
        def __init__(self, d_in):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(d_in, 32), nn.ReLU(), nn.Dropout(0.1),
                nn.Linear(32, 32), nn.ReLU(),
                nn.Linear(32, 1, bias=False),
            )

        def forward(self, inp):
            return self.net(inp).squeeze(-1)

    def cox_loss(log_risk, time, event):
        log_denominator = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_denominator) * event).sum() / event.sum().clamp(min=1)

    model = DeepSurv(d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    train = TensorDataset(x[:1400], time[:1400], event[:1400])
    batches = cycle(DataLoader(train, batch_size=100, shuffle=True))

    def step(i):
        model.train()
        xb, tb, eb = next(batches)
        optimizer.zero_grad()
        loss = cox_loss(model(xb), tb, eb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            r = model(x_test)
            comparable = (t_test[:, None] < t_test[None, :]) & (e_test[:, None] > 0)
            concordant = (r[:, None] > r[None, :]) & comparable
            return 1.0 - (concordant.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def deepsurv_cox_good():
    torch.manual_seed(20)
    n, d = 1800, 8
    x = torch.randn(n, d)
    risk = 1.2 * x[:, 0] - 0.9 * x[:, 1] + 1.0 * x[:, 2] * x[:, 3]
    event_time = -torch.log(torch.rand(n)) * torch.exp(-risk)
    censor_time = -torch.log(torch.rand(n)) * 30.0
    time = torch.minimum(event_time, censor_time)
    event = (event_time <= censor_time).float()
    x_test, t_test, e_test = x[1400:], time[1400:], event[1400:]

    class DeepSurv(nn.Module):
        def __init__(self, d_in):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(d_in, 32), nn.ReLU(), nn.Dropout(0.1),
                nn.Linear(32, 32), nn.ReLU(),
                nn.Linear(32, 1, bias=False),
            )

        def forward(self, inp):
            return self.net(inp).squeeze(-1)

    def cox_loss(log_risk, time, event):
        order = torch.argsort(time, descending=True)
        log_risk, event = log_risk[order], event[order]
        log_denominator = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_denominator) * event).sum() / event.sum().clamp(min=1)

    model = DeepSurv(d)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    train = TensorDataset(x[:1400], time[:1400], event[:1400])
    batches = cycle(DataLoader(train, batch_size=100, shuffle=True))

    def step(i):
        model.train()
        xb, tb, eb = next(batches)
        optimizer.zero_grad()
        loss = cox_loss(model(xb), tb, eb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            r = model(x_test)
            comparable = (t_test[:, None] < t_test[None, :]) & (e_test[:, None] > 0)
            concordant = (r[:, None] > r[None, :]) & comparable
            return 1.0 - (concordant.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "discrete_hazard_net",
    "field": "survival analysis",
    "what": 'The event indicator is left out of the likelihood, so each censored subject counts as an event in its last interval and survival is underestimated.',
})


def discrete_hazard_net_bad():
    torch.manual_seed(21)
    n, d, n_bins = 2000, 6, 12
    x = torch.randn(n, d)
    base = torch.linspace(-3.0, -1.5, n_bins)
    true_hazard = torch.sigmoid(base + (x[:, :1] - 0.8 * x[:, 1:2] + 0.5 * x[:, 2:3] * x[:, 3:4]))
    died = torch.rand(n, n_bins) < true_hazard
    event_bin = torch.where(died.any(1), died.float().argmax(1), torch.full((n,), n_bins))
    censor_bin = torch.randint(0, n_bins + 4, (n,)).clamp(max=n_bins - 1)
    event = (event_bin <= censor_bin).float()
    observed_bin = torch.minimum(event_bin, censor_bin)
    true_survival = torch.cumprod(1 - true_hazard, dim=1)[1500:]
    x_test = x[1500:]

    class HazardNet(nn.Module):
        def __init__(self, d_in, n_bins):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d_in, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, n_bins))

        def forward(self, inp):
            return self.net(inp)

    def hazard_nll(logits, last_bin, event):
        bins = torch.arange(logits.shape[1])
        at_risk = (bins <= last_bin[:, None]).float()
        target = F.one_hot(last_bin, logits.shape[1]).float()
        nll = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (nll * at_risk).sum(1).mean()

    model = HazardNet(d, n_bins)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    train = TensorDataset(x[:1500], observed_bin[:1500], event[:1500])
    batches = cycle(DataLoader(train, batch_size=100, shuffle=True))

    def step(i):
        model.train()
        xb, bb, eb = next(batches)
        optimizer.zero_grad()
        loss = hazard_nll(model(xb), bb, eb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            survival = torch.cumprod(1 - torch.sigmoid(model(x_test)), dim=1)
            return (survival - true_survival).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def discrete_hazard_net_good():
    torch.manual_seed(21)
    n, d, n_bins = 2000, 6, 12
    x = torch.randn(n, d)
    base = torch.linspace(-3.0, -1.5, n_bins)
    true_hazard = torch.sigmoid(base + (x[:, :1] - 0.8 * x[:, 1:2] + 0.5 * x[:, 2:3] * x[:, 3:4]))
    died = torch.rand(n, n_bins) < true_hazard
    event_bin = torch.where(died.any(1), died.float().argmax(1), torch.full((n,), n_bins))
    censor_bin = torch.randint(0, n_bins + 4, (n,)).clamp(max=n_bins - 1)
    event = (event_bin <= censor_bin).float()
    observed_bin = torch.minimum(event_bin, censor_bin)
    true_survival = torch.cumprod(1 - true_hazard, dim=1)[1500:]
    x_test = x[1500:]

    class HazardNet(nn.Module):
        def __init__(self, d_in, n_bins):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(d_in, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, n_bins))

        def forward(self, inp):
            return self.net(inp)

    def hazard_nll(logits, last_bin, event):
        bins = torch.arange(logits.shape[1])
        at_risk = (bins <= last_bin[:, None]).float()
        target = F.one_hot(last_bin, logits.shape[1]).float() * event[:, None]
        nll = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (nll * at_risk).sum(1).mean()

    model = HazardNet(d, n_bins)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    train = TensorDataset(x[:1500], observed_bin[:1500], event[:1500])
    batches = cycle(DataLoader(train, batch_size=100, shuffle=True))

    def step(i):
        model.train()
        xb, bb, eb = next(batches)
        optimizer.zero_grad()
        loss = hazard_nll(model(xb), bb, eb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            survival = torch.cumprod(1 - torch.sigmoid(model(x_test)), dim=1)
            return (survival - true_survival).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "sine_maml",
    "field": "meta-learning",
    "what": 'The query loss is evaluated with the initial weights instead of the adapted ones, so the outer loop trains an average predictor and never learns to adapt.',
})


def sine_maml_bad():
    torch.manual_seed(22)
    n_tasks, k_shot, inner_lr = 6, 10, 0.05

    def sample_tasks(n):
        amp = 0.5 + 1.5 * torch.rand(n, 1, 1)
        sign = torch.where(torch.rand(n, 1, 1) < 0.5, -1.0, 1.0)
        phase = 0.6 * torch.rand(n, 1, 1)
        x = torch.rand(n, 2 * k_shot, 1) * 4 - 2
        y = sign * amp * torch.sin(1.5 * x + phase)
        return x[:, :k_shot], y[:, :k_shot], x[:, k_shot:], y[:, k_shot:]

    class Regressor(nn.Module):
        def __init__(self, hidden=40):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

        def forward(self, x):
            return self.net(x)

    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    test_tasks = sample_tasks(40)

    def adapt(params, x, y, create_graph):
        loss = F.mse_loss(torch.func.functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
        return {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}

    def step(i):
        model.train()
        xs, ys, xq, yq = sample_tasks(n_tasks)
        params = dict(model.named_parameters())
        optimizer.zero_grad()
        meta_loss = 0.0
        for k in range(n_tasks):
            fast = adapt(params, xs[k], ys[k], create_graph=True)
            fast = adapt(fast, xs[k], ys[k], create_graph=True)
            pred = model(xq[k])
            meta_loss = meta_loss + F.mse_loss(pred, yq[k])
        meta_loss = meta_loss / n_tasks
        meta_loss.backward()
        optimizer.step()
        return meta_loss.item()

    def probe():
        total = 0.0
        with evaluating(model):
            for xs, ys, xq, yq in zip(*test_tasks):
                fast = {name: p.detach().requires_grad_(True) for name, p in model.named_parameters()}
                for _ in range(2):
                    fast = adapt(fast, xs, ys, create_graph=False)
                with torch.no_grad():
                    total += F.mse_loss(torch.func.functional_call(model, fast, (xq,)), yq).item()
        return total / len(test_tasks[0])

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sine_maml_good():
    torch.manual_seed(22)
    n_tasks, k_shot, inner_lr = 6, 10, 0.05

    def sample_tasks(n):
        amp = 0.5 + 1.5 * torch.rand(n, 1, 1)
        sign = torch.where(torch.rand(n, 1, 1) < 0.5, -1.0, 1.0)
        phase = 0.6 * torch.rand(n, 1, 1)
        x = torch.rand(n, 2 * k_shot, 1) * 4 - 2
        y = sign * amp * torch.sin(1.5 * x + phase)
        return x[:, :k_shot], y[:, :k_shot], x[:, k_shot:], y[:, k_shot:]

    class Regressor(nn.Module):
        def __init__(self, hidden=40):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

        def forward(self, x):
            return self.net(x)

    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    test_tasks = sample_tasks(40)

    def adapt(params, x, y, create_graph):
        loss = F.mse_loss(torch.func.functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
        return {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}

    def step(i):
        model.train()
        xs, ys, xq, yq = sample_tasks(n_tasks)
        params = dict(model.named_parameters())
        optimizer.zero_grad()
        meta_loss = 0.0
        for k in range(n_tasks):
            fast = adapt(params, xs[k], ys[k], create_graph=True)
            fast = adapt(fast, xs[k], ys[k], create_graph=True)
            pred = torch.func.functional_call(model, fast, (xq[k],))
            meta_loss = meta_loss + F.mse_loss(pred, yq[k])
        meta_loss = meta_loss / n_tasks
        meta_loss.backward()
        optimizer.step()
        return meta_loss.item()

    def probe():
        total = 0.0
        with evaluating(model):
            for xs, ys, xq, yq in zip(*test_tasks):
                fast = {name: p.detach().requires_grad_(True) for name, p in model.named_parameters()}
                for _ in range(2):
                    fast = adapt(fast, xs, ys, create_graph=False)
                with torch.no_grad():
                    total += F.mse_loss(torch.func.functional_call(model, fast, (xq,)), yq).item()
        return total / len(test_tasks[0])

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "uncertainty_multitask",
    "field": "multi-task learning",
    "what": 'The learned uncertainty weights lack the log-variance regulariser, so the optimizer lowers the loss by driving all task weights to zero and the tasks stop learning.',
})


def uncertainty_multitask_bad():
    torch.manual_seed(23)
    n, d = 6000, 10
    x = torch.randn(n, d)
    shared = torch.tanh(x @ torch.randn(d, 5) / 2)
    y_a = shared @ torch.randn(5) + 0.3 * torch.randn(n)
    y_b = (shared[:, :3] @ torch.randn(3)) * shared[:, 3] + 0.3 * torch.randn(n)
    y_a, y_b = y_a / y_a.std(), y_b / y_b.std()
    test = slice(5000, n)

    class MultiTaskNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.head_a = nn.Linear(64, 1)
            self.head_b = nn.Linear(64, 1)
            self.log_var = nn.Parameter(torch.zeros(2))

        def forward(self, inp):
            h = self.trunk(inp)
            return self.head_a(h).squeeze(-1), self.head_b(h).squeeze(-1)

    model = MultiTaskNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train = TensorDataset(x[:5000], y_a[:5000], y_b[:5000])
    batches = cycle(DataLoader(train, batch_size=64, shuffle=True))

    def step(i):
        model.train()
        xb, ya, yb = next(batches)
        optimizer.zero_grad()
        pa, pb = model(xb)
        losses = torch.stack([F.mse_loss(pa, ya), F.mse_loss(pb, yb)])
        loss = (torch.exp(-model.log_var) * losses).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            pa, pb = model(x[test])
            return (F.mse_loss(pa, y_a[test]) + F.mse_loss(pb, y_b[test])).item() / 2

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def uncertainty_multitask_good():
    torch.manual_seed(23)
    n, d = 6000, 10
    x = torch.randn(n, d)
    shared = torch.tanh(x @ torch.randn(d, 5) / 2)
    y_a = shared @ torch.randn(5) + 0.3 * torch.randn(n)
    y_b = (shared[:, :3] @ torch.randn(3)) * shared[:, 3] + 0.3 * torch.randn(n)
    y_a, y_b = y_a / y_a.std(), y_b / y_b.std()
    test = slice(5000, n)

    class MultiTaskNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.head_a = nn.Linear(64, 1)
            self.head_b = nn.Linear(64, 1)
            self.log_var = nn.Parameter(torch.zeros(2))

        def forward(self, inp):
            h = self.trunk(inp)
            return self.head_a(h).squeeze(-1), self.head_b(h).squeeze(-1)

    model = MultiTaskNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train = TensorDataset(x[:5000], y_a[:5000], y_b[:5000])
    batches = cycle(DataLoader(train, batch_size=64, shuffle=True))

    def step(i):
        model.train()
        xb, ya, yb = next(batches)
        optimizer.zero_grad()
        pa, pb = model(xb)
        losses = torch.stack([F.mse_loss(pa, ya), F.mse_loss(pb, yb)])
        loss = (torch.exp(-model.log_var) * losses + model.log_var).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            pa, pb = model(x[test])
            return (F.mse_loss(pa, y_a[test]) + F.mse_loss(pb, y_b[test])).item() / 2

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "pointnet_shapes",
    "field": "point clouds",
    "what": 'The clouds of shape (B, N, 3) are brought to (B, 3, N) with view instead of transpose, so each column mixes coordinates of different points.',
})


def pointnet_shapes_bad():
    torch.manual_seed(24)
    n_pts = 64

    def cloud(kind):
        u, v = torch.rand(n_pts) * 2 * math.pi, torch.rand(n_pts) * 2 - 1
        if kind == 0:
            r = (1 - v ** 2).sqrt()
            p = torch.stack([r * u.cos(), r * u.sin(), v], dim=1)
        elif kind == 1:
            p = torch.stack([u.cos(), u.sin(), v], dim=1)
        elif kind == 2:
            r = (1 - v) / 2
            p = torch.stack([r * u.cos(), r * u.sin(), v], dim=1)
        else:
            w = torch.rand(n_pts) * 2 * math.pi
            p = torch.stack([(0.7 + 0.3 * w.cos()) * u.cos(), (0.7 + 0.3 * w.cos()) * u.sin(), 0.3 * w.sin()], dim=1)
        q, _ = torch.linalg.qr(torch.randn(3, 3))
        p = p @ q + 0.03 * torch.randn(n_pts, 3)
        p = p - p.mean(0)
        return p / p.norm(dim=1).max()

    def make(n):
        y = torch.randint(0, 4, (n,))
        return torch.stack([cloud(int(k)) for k in y]), y

    class PointNet(nn.Module):
        def __init__(self, n_classes=4):
            super().__init__()
            self.mlp = nn.Sequential(
                nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(),
                nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
                nn.Conv1d(64, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
            )
            self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, n_classes))

        def forward(self, points):
            b, n, _ = points.shape
            h = self.mlp(points.view(b, 3, n))
            return self.head(h.max(dim=2).values)

    train, (x_test, y_test) = make(800), make(300)
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(*train), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        points, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_shapes_good():
    torch.manual_seed(24)
    n_pts = 64

    def cloud(kind):
        u, v = torch.rand(n_pts) * 2 * math.pi, torch.rand(n_pts) * 2 - 1
        if kind == 0:
            r = (1 - v ** 2).sqrt()
            p = torch.stack([r * u.cos(), r * u.sin(), v], dim=1)
        elif kind == 1:
            p = torch.stack([u.cos(), u.sin(), v], dim=1)
        elif kind == 2:
            r = (1 - v) / 2
            p = torch.stack([r * u.cos(), r * u.sin(), v], dim=1)
        else:
            w = torch.rand(n_pts) * 2 * math.pi
            p = torch.stack([(0.7 + 0.3 * w.cos()) * u.cos(), (0.7 + 0.3 * w.cos()) * u.sin(), 0.3 * w.sin()], dim=1)
        q, _ = torch.linalg.qr(torch.randn(3, 3))
        p = p @ q + 0.03 * torch.randn(n_pts, 3)
        p = p - p.mean(0)
        return p / p.norm(dim=1).max()

    def make(n):
        y = torch.randint(0, 4, (n,))
        return torch.stack([cloud(int(k)) for k in y]), y

    class PointNet(nn.Module):
        def __init__(self, n_classes=4):
            super().__init__()
            self.mlp = nn.Sequential(
                nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(),
                nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
                nn.Conv1d(64, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
            )
            self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, n_classes))

        def forward(self, points):
            b, n, _ = points.shape
            h = self.mlp(points.transpose(1, 2))
            return self.head(h.max(dim=2).values)

    train, (x_test, y_test) = make(800), make(300)
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(*train), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        points, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "ellipsoid_axes_net",
    "field": "point clouds",
    "what": 'The jitter augmentation works in place on the stored clouds, so the noise piles up with every epoch and the training shapes dissolve.',
})


def ellipsoid_axes_net_bad():
    torch.manual_seed(25)
    n_pts = 64

    def make(n):
        axes = 0.4 + 0.8 * torch.rand(n, 3)
        p = F.normalize(torch.randn(n, n_pts, 3), dim=2) * axes[:, None]
        return p, axes

    class CloudDataset(Dataset):
        def __init__(self, points, axes, jitter=0.05):
            self.points, self.axes, self.jitter = points, axes, jitter

        def __len__(self):
            return len(self.points)

        def __getitem__(self, idx):
            pts = self.points[idx]
            pts += self.jitter * torch.randn(pts.shape)
            return pts, self.axes[idx]

    class AxesNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.local = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
            self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 3))

        def forward(self, points):
            h = self.local(points)
            return self.head(torch.cat([h.max(dim=1).values, h.mean(dim=1)], dim=1))

    train_set = CloudDataset(*make(192))
    x_test, y_test = make(200)
    model = AxesNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(DataLoader(train_set, batch_size=32, shuffle=True))

    def step(i):
        model.train()
        points, axes = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), axes)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ellipsoid_axes_net_good():
    torch.manual_seed(25)
    n_pts = 64

    def make(n):
        axes = 0.4 + 0.8 * torch.rand(n, 3)
        p = F.normalize(torch.randn(n, n_pts, 3), dim=2) * axes[:, None]
        return p, axes

    class CloudDataset(Dataset):
        def __init__(self, points, axes, jitter=0.05):
            self.points, self.axes, self.jitter = points, axes, jitter

        def __len__(self):
            return len(self.points)

        def __getitem__(self, idx):
            pts = self.points[idx]
            pts = pts + self.jitter * torch.randn(pts.shape)
            return pts, self.axes[idx]

    class AxesNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.local = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
            self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 3))

        def forward(self, points):
            h = self.local(points)
            return self.head(torch.cat([h.max(dim=1).values, h.mean(dim=1)], dim=1))

    train_set = CloudDataset(*make(192))
    x_test, y_test = make(200)
    model = AxesNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(DataLoader(train_set, batch_size=32, shuffle=True))

    def step(i):
        model.train()
        points, axes = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), axes)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "pump_autoencoder",
    "field": "anomaly detection",
    "what": 'The decoder ends in a sigmoid although the readings are standardised, so values below 0 or above 1 can never be reconstructed and normal data gets large scores.',
})


def pump_autoencoder_bad():
    torch.manual_seed(26)
    n, d = 1500, 16
    mix = torch.randn(3, d)

    def normal_data(n):
        z = torch.randn(n, 3)
        return torch.tanh(z @ mix) * torch.linspace(1, 5, d) + 20 + 0.2 * torch.randn(n, d)

    raw, raw_test = normal_data(n), normal_data(400)
    mean, std = raw.mean(0), raw.std(0)
    x_train, x_test = (raw - mean) / std, (raw_test - mean) / std
    x_anom = torch.stack([x_test[torch.randperm(400), j] for j in range(d)], dim=1)

    class AutoEncoder(nn.Module):
        def __init__(self, d_in, latent=4):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d_in, 48), nn.ReLU(), nn.Linear(48, latent))
            self.decoder = nn.Sequential(
                nn.Linear(latent, 48), nn.ReLU(),
                nn.Linear(48, d_in),
                nn.Sigmoid(),
            )

        def forward(self, inp):
            return self.decoder(self.encoder(inp))

    model = AutoEncoder(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(x_train), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        (xb,) = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb), xb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            s_norm = (model(x_test) - x_test).pow(2).mean(1)
            s_anom = (model(x_anom) - x_anom).pow(2).mean(1)
            return (s_norm.mean() / s_anom.mean()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pump_autoencoder_good():
    torch.manual_seed(26)
    n, d = 1500, 16
    mix = torch.randn(3, d)

    def normal_data(n):
        z = torch.randn(n, 3)
        return torch.tanh(z @ mix) * torch.linspace(1, 5, d) + 20 + 0.2 * torch.randn(n, d)

    raw, raw_test = normal_data(n), normal_data(400)
    mean, std = raw.mean(0), raw.std(0)
    x_train, x_test = (raw - mean) / std, (raw_test - mean) / std
    x_anom = torch.stack([x_test[torch.randperm(400), j] for j in range(d)], dim=1)

    class AutoEncoder(nn.Module):
        def __init__(self, d_in, latent=4):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d_in, 48), nn.ReLU(), nn.Linear(48, latent))
            self.decoder = nn.Sequential(
                nn.Linear(latent, 48), nn.ReLU(),
                nn.Linear(48, d_in),
            )

        def forward(self, inp):
            return self.decoder(self.encoder(inp))

    model = AutoEncoder(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(x_train), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        (xb,) = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb), xb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            s_norm = (model(x_test) - x_test).pow(2).mean(1)
            s_anom = (model(x_anom) - x_anom).pow(2).mean(1)
            return (s_norm.mean() / s_anom.mean()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "vibration_denoising_ae",
    "field": "anomaly detection",
    "what": 'The denoising autoencoder is trained to reproduce its noisy input instead of the clean signal, so it learns to pass the noise on.',
})


def vibration_denoising_ae_bad():
    torch.manual_seed(27)
    L, noise_std = 32, 0.5
    t = torch.arange(L).float()

    def make(n):
        f = 0.15 + 0.25 * torch.rand(n, 1)
        phase = 2 * math.pi * torch.rand(n, 1)
        return torch.sin(2 * math.pi * f * t / 2 + phase) + 0.4 * torch.sin(2 * math.pi * f * t + 2 * phase)

    x_train, x_test = make(1500), make(300)
    noisy_test = x_test + noise_std * torch.randn_like(x_test)

    class DenoisingAE(nn.Module):
        def __init__(self, length, hidden=96):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(length, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.decoder = nn.Linear(hidden, length)

        def forward(self, inp):
            return self.decoder(self.encoder(inp))

    model = DenoisingAE(L)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(x_train), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        (clean,) = next(batches)
        noisy = clean + noise_std * torch.randn_like(clean)
        optimizer.zero_grad()
        recon = model(noisy)
        loss = F.mse_loss(recon, noisy)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.mse_loss(model(noisy_test), x_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vibration_denoising_ae_good():
    torch.manual_seed(27)
    L, noise_std = 32, 0.5
    t = torch.arange(L).float()

    def make(n):
        f = 0.15 + 0.25 * torch.rand(n, 1)
        phase = 2 * math.pi * torch.rand(n, 1)
        return torch.sin(2 * math.pi * f * t / 2 + phase) + 0.4 * torch.sin(2 * math.pi * f * t + 2 * phase)

    x_train, x_test = make(1500), make(300)
    noisy_test = x_test + noise_std * torch.randn_like(x_test)

    class DenoisingAE(nn.Module):
        def __init__(self, length, hidden=96):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(length, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.decoder = nn.Linear(hidden, length)

        def forward(self, inp):
            return self.decoder(self.encoder(inp))

    model = DenoisingAE(L)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(DataLoader(TensorDataset(x_train), batch_size=64, shuffle=True))

    def step(i):
        model.train()
        (clean,) = next(batches)
        noisy = clean + noise_std * torch.randn_like(clean)
        optimizer.zero_grad()
        recon = model(noisy)
        loss = F.mse_loss(recon, clean)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model), torch.no_grad():
            return F.mse_loss(model(noisy_test), x_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
