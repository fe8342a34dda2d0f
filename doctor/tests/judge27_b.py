import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset


CASES = []


def _cycle(loader):
    while True:
        for batch in loader:
            yield batch


def _case(name, what):
    CASES.append({"name": name, "what": what})


# --------------------------------------------------------------------------- house prices
class HouseNet(nn.Module):
    def __init__(self, n_num, cardinalities, hidden, use_embeddings):
        super().__init__()
        self.use_embeddings = use_embeddings
        self.cardinalities = cardinalities
        if use_embeddings:
            self.embeds = nn.ModuleList([nn.Embedding(c, min(16, (c + 1) // 2)) for c in cardinalities])
            n_cat = sum(e.embedding_dim for e in self.embeds)
        else:
            n_cat = len(cardinalities)
        self.layers = nn.Sequential(
            nn.Linear(n_num + n_cat, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1))

    def forward(self, x_num, x_cat):
        if self.use_embeddings:
            cat = torch.cat([e(x_cat[:, j]) for j, e in enumerate(self.embeds)], dim=1)
        else:
            card = torch.tensor(self.cardinalities, dtype=torch.float32)
            cat = 2 * x_cat.float() / (card - 1) - 1
        return self.layers(torch.cat([x_num, cat], dim=1)).squeeze(1)


def _house_prices(good):
    torch.manual_seed(0)
    n, cards = 4000, [40, 12, 7]
    x_num = torch.randn(n, 5)
    x_cat = torch.stack([torch.randint(0, c, (n,)) for c in cards], dim=1)
    effects = [torch.randn(c) for c in cards]
    y = x_num @ torch.tensor([0.6, -0.4, 0.3, 0.0, 0.2]) + 0.3 * x_num[:, 0] * x_num[:, 1]
    y = y + effects[0][x_cat[:, 0]] + 0.6 * effects[1][x_cat[:, 1]] + 0.4 * effects[2][x_cat[:, 2]]
    y = y + 0.2 * torch.randn(n)
    y = (y - y[:3200].mean()) / y[:3200].std()
    train = TensorDataset(x_num[:3200], x_cat[:3200], y[:3200])
    loader = _cycle(DataLoader(train, batch_size=128, shuffle=True))

    model = HouseNet(5, cards, 64, use_embeddings=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        xn, xc, target = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xn, xc), target)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(x_num[3200:], x_cat[3200:]), y[3200:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("house_price_categories",
      "Label-encoded nominal categories (neighbourhood, type, ...) are fed to the MLP as plain (scaled) numbers instead "
      "of through embeddings; the net sees a meaningless order and cannot fit the per-category effects.")


def house_price_categories_bad():
    return _house_prices(False)


def house_price_categories_good():
    return _house_prices(True)


# --------------------------------------------------------------------------- fraud
def _fraud(good):
    torch.manual_seed(1)
    n, d = 8000, 12
    X = torch.randn(n, d)
    w = torch.randn(d)
    score = X @ w / w.norm() + 0.5 * X[:, 0] * X[:, 1] + 0.5 * torch.randn(n)
    y = (score > torch.quantile(score, 0.95)).float()
    X_train, y_train, X_val, y_val = X[:6000], y[:6000], X[6000:], y[6000:]
    loader = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=128, shuffle=True))

    model = nn.Sequential(
        nn.Linear(d, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    n_pos, n_neg = (y_train == 1).sum(), (y_train == 0).sum()
    pos_weight = n_neg / n_pos if good else n_pos / n_neg
    criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        logits = model(xb).squeeze(-1)
        loss = criterion(logits, yb)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        was = model.training
        model.eval()
        pred = (torch.sigmoid(model(X_val).squeeze(-1)) > 0.5).float()
        model.train(was)
        recall = (pred[y_val == 1] == 1).float().mean()
        specificity = (pred[y_val == 0] == 0).float().mean()
        return (1 - (recall + specificity) / 2).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("fraud_detection_weights",
      "BCEWithLogitsLoss pos_weight is computed as n_pos/n_neg instead of n_neg/n_pos on 5% positives; the rare class is "
      "weighted down further and is practically never predicted.")


def fraud_detection_weights_bad():
    return _fraud(False)


def fraud_detection_weights_good():
    return _fraud(True)


# --------------------------------------------------------------------------- point cloud fine-tuning
class PointNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv1d(3, 32, 1)
        self.conv2 = nn.Conv1d(32, 64, 1)
        self.conv3 = nn.Conv1d(64, 128, 1)
        self.fc1 = nn.Linear(128, 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, points):
        x = points.transpose(1, 2)
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.conv3(x)
        x = x.max(dim=2).values
        return self.head(F.relu(self.fc1(x)))


def _shapes(n, kinds, n_points=64):
    clouds, labels = [], []
    for _ in range(n):
        k = int(torch.randint(0, len(kinds), (1,)))
        p = torch.randn(n_points, 3)
        kind = kinds[k]
        if kind == "sphere":
            p = p / p.norm(dim=1, keepdim=True)
        elif kind == "ball":
            p = p / p.norm(dim=1, keepdim=True) * torch.rand(n_points, 1) ** (1 / 3)
        elif kind == "cube":
            p = torch.rand(n_points, 3) * 2 - 1
            p = p / p.abs().max(dim=1, keepdim=True).values
        elif kind == "disc":
            p[:, 2] = 0
            p = p / p.norm(dim=1, keepdim=True) * torch.rand(n_points, 1).sqrt()
        elif kind == "cylinder":
            a = torch.rand(n_points) * 2 * math.pi
            p = torch.stack([a.cos(), a.sin(), torch.rand(n_points) * 2 - 1], dim=1)
        elif kind == "cone":
            a, h = torch.rand(n_points) * 2 * math.pi, torch.rand(n_points).sqrt()
            p = torch.stack([h * a.cos(), h * a.sin(), 1 - 2 * h], dim=1)
        elif kind == "torus":
            a, b = torch.rand(2, n_points) * 2 * math.pi
            p = torch.stack([(1 + 0.4 * b.cos()) * a.cos(), (1 + 0.4 * b.cos()) * a.sin(), 0.4 * b.sin()], dim=1)
        elif kind == "line":
            p = 0.1 * p
            p[:, 2] = torch.rand(n_points) * 2 - 1
        elif kind == "helix":
            a = torch.rand(n_points) * 4 * math.pi
            p = torch.stack([a.cos(), a.sin(), a / (2 * math.pi) - 1], dim=1)
        p = p + 0.03 * torch.randn(n_points, 3)
        p = p - p.mean(dim=0)
        clouds.append(p / p.norm(dim=1).max())
        labels.append(k)
    return torch.stack(clouds), torch.tensor(labels)


def _pointnet_finetune(good):
    torch.manual_seed(2)
    model = PointNet(num_classes=4)
    source_x, source_y = _shapes(600, ["sphere", "cube", "line", "disc"])
    pretrain = torch.optim.Adam(model.parameters(), lr=1e-3)
    for xb, yb in DataLoader(TensorDataset(source_x, source_y), batch_size=32, shuffle=True):
        pretrain.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        pretrain.step()

    target_x, target_y = _shapes(900, ["ball", "cylinder", "cone", "torus", "helix"])
    loader = _cycle(DataLoader(TensorDataset(target_x[:600], target_y[:600]), batch_size=32, shuffle=True))

    if good:
        model.head = nn.Linear(model.head.in_features, 5)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
        model.head = nn.Linear(model.head.in_features, 5)
    model.zero_grad()

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(target_x[600:]), target_y[600:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("pointnet_finetune_head",
      "A pretrained PointNet gets a new classification head after the optimizer was built from model.parameters(); the "
      "new head is not in the optimizer and stays at its random initial values.")


def pointnet_finetune_head_bad():
    return _pointnet_finetune(False)


def pointnet_finetune_head_good():
    return _pointnet_finetune(True)


# --------------------------------------------------------------------------- click-through with target encoding
def _encode(ids, clicks, n_ids, prior, smoothing=1.0):
    total = torch.zeros(n_ids).index_add_(0, ids, clicks)
    count = torch.zeros(n_ids).index_add_(0, ids, torch.ones_like(clicks))
    return (total + smoothing * prior) / (count + smoothing)


def _ctr(good):
    torch.manual_seed(3)
    n, n_train, n_ids = 6000, 4000, 1200
    site, device = torch.randint(0, n_ids, (n,)), torch.randint(0, n_ids, (n,))
    num = torch.randn(n, 4)
    logit = 0.5 * torch.randn(n_ids)[site] + 0.5 * torch.randn(n_ids)[device] + num @ torch.tensor([0.9, -0.7, 0.5, 0.0])
    click = torch.bernoulli(torch.sigmoid(logit - 0.5))

    prior = click[:n_train].mean()
    columns = []
    for ids in (site, device):
        encoded = _encode(ids[:n_train], click[:n_train], n_ids, prior)[ids]
        if good:
            fold = torch.randperm(n_train, generator=torch.Generator().manual_seed(0)) % 5
            for k in range(5):
                rest = fold != k
                table = _encode(ids[:n_train][rest], click[:n_train][rest], n_ids, prior)
                encoded[:n_train][fold == k] = table[ids[:n_train][fold == k]]
        columns.append(encoded)
    enc = torch.stack(columns, dim=1)
    enc = (enc - enc[:n_train].mean(0)) / enc[:n_train].std(0)
    X = torch.cat([num, enc], dim=1)
    loader = _cycle(DataLoader(TensorDataset(X[:n_train], click[:n_train]), batch_size=128, shuffle=True))

    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb)[:, 0], yb)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        return criterion(model(X[n_train:])[:, 0], click[n_train:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("ctr_target_encoding",
      "High-cardinality ids are target-encoded with means that include the row's own label (no out-of-fold split); the "
      "training features leak the label, the net over-trusts them and is badly calibrated on new rows.")


def ctr_target_encoding_bad():
    return _ctr(False)


def ctr_target_encoding_good():
    return _ctr(True)


# --------------------------------------------------------------------------- LSTM forecaster
class LSTMForecaster(nn.Module):
    def __init__(self, hidden_size=32):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden_size, batch_first=True)
        self.fc = nn.Linear(hidden_size, 1)

    def forward(self, x, hidden=None):
        out, hidden = self.lstm(x, hidden)
        return self.fc(out[:, -1]), hidden


def _lstm_forecast(good):
    torch.manual_seed(4)
    t = torch.arange(1500).float()
    series = torch.sin(2 * math.pi * t / 25) + 0.6 * torch.sin(2 * math.pi * t / 9 + 1) + 0.1 * torch.randn(1500)
    series = (series - series[:1200].mean()) / series[:1200].std()
    window = 10
    X = series.unfold(0, window, 1)[:-1].unsqueeze(-1)
    y = series[window:].unsqueeze(-1)
    split = 1200 - window
    train = TensorDataset(X[:split], y[:split])
    loader = _cycle(DataLoader(train, batch_size=64, shuffle=True, drop_last=True))

    model = LSTMForecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()
    state = {"hidden": None}

    def step(i):
        model.train()
        xb, yb = next(loader)
        hidden = state["hidden"]
        if good:
            hidden = None
        elif hidden is not None:
            hidden = tuple(h.detach() for h in hidden)
        optimizer.zero_grad()
        pred, hidden = model(xb, hidden)
        loss = criterion(pred, yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state["hidden"] = hidden

    @torch.no_grad()
    def probe():
        pred, _ = model(X[1200:])
        return criterion(pred, y[1200:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("lstm_forecast_hidden",
      "The LSTM's hidden state is carried from one batch to the next although the windows are shuffled and unrelated; "
      "each window starts from another window's state, which is noise the model must cope with.")


def lstm_forecast_hidden_bad():
    return _lstm_forecast(False)


def lstm_forecast_hidden_good():
    return _lstm_forecast(True)


# --------------------------------------------------------------------------- sensor classification with Conv1d
class ActivityCNN(nn.Module):
    def __init__(self, n_channels, n_classes, transpose):
        super().__init__()
        self.transpose = transpose
        self.n_channels = n_channels
        self.features = nn.Sequential(
            nn.Conv1d(n_channels, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(32, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.classifier = nn.Linear(32, n_classes)

    def forward(self, x):
        batch, length, _ = x.shape
        if self.transpose:
            x = x.transpose(1, 2)
        else:
            x = x.view(batch, self.n_channels, length)
        return self.classifier(self.features(x).flatten(1))


def _activity(good):
    torch.manual_seed(5)
    n, length, channels, classes = 1800, 48, 6, 5
    y = torch.randint(0, classes, (n,))
    t = torch.arange(length).float()
    freq = 0.04 + 0.10 * torch.rand(classes, channels)
    amp = 0.3 + torch.rand(classes, channels)
    phase = 2 * math.pi * torch.rand(n, 1, 1)
    X = amp[y].unsqueeze(1) * torch.sin(2 * math.pi * freq[y].unsqueeze(1) * t.view(1, -1, 1) + phase)
    X = X + 0.9 * torch.randn(n, length, channels)
    X = (X - X[:1200].mean((0, 1))) / X[:1200].std((0, 1))
    loader = _cycle(DataLoader(TensorDataset(X[:1200], y[:1200]), batch_size=64, shuffle=True, drop_last=True))

    model = ActivityCNN(channels, classes, transpose=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        was = model.training
        model.eval()
        loss = criterion(model(X[1200:]), y[1200:]).item()
        model.train(was)
        return loss

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("activity_conv1d_layout",
      "Sensor windows (batch, time, channels) are brought to (batch, channels, time) for Conv1d with view instead of "
      "transpose; time steps and channels are scrambled together.")


def activity_conv1d_layout_bad():
    return _activity(False)


def activity_conv1d_layout_good():
    return _activity(True)


# --------------------------------------------------------------------------- TCN
class TemporalBlock(nn.Module):
    def __init__(self, n_in, n_out, kernel_size, dilation, causal):
        super().__init__()
        total = (kernel_size - 1) * dilation
        self.pad = (total, 0) if causal else (total // 2, total // 2)
        self.conv = nn.Conv1d(n_in, n_out, kernel_size, dilation=dilation)
        self.downsample = nn.Conv1d(n_in, n_out, 1) if n_in != n_out else nn.Identity()

    def forward(self, x):
        return F.relu(self.conv(F.pad(x, self.pad))) + self.downsample(x)


class TCN(nn.Module):
    def __init__(self, channels, levels, causal):
        super().__init__()
        blocks = []
        for i in range(levels):
            blocks.append(TemporalBlock(1 if i == 0 else channels, channels, 3, 2 ** i, causal))
        self.network = nn.Sequential(*blocks)
        self.out = nn.Conv1d(channels, 1, 1)

    def forward(self, x):
        return self.out(self.network(x.transpose(1, 2))).transpose(1, 2)


def _tcn(good):
    torch.manual_seed(6)
    t = torch.arange(3000).float()
    series = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 7) + 0.15 * torch.randn(3000)
    series = (series - series[:2400].mean()) / series[:2400].std()
    length = 48
    windows = series.unfold(0, length + 1, 1).unsqueeze(-1)
    train, test = windows[:2400 - length], windows[2400:]
    loader = _cycle(DataLoader(TensorDataset(train), batch_size=32, shuffle=True))

    model = TCN(24, 3, causal=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (window,) = next(loader)
        inputs, targets = window[:, :-1], window[:, 1:]
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        forecast = model(test[:, :-1])[:, -1]
        return F.mse_loss(forecast, test[:, -1]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("tcn_next_value",
      "The dilated convolutions of a TCN that predicts the next value at every position are padded symmetrically instead "
      "of on the left only; every position sees its own target and the model learns to copy, useless at the series' end.")


def tcn_next_value_bad():
    return _tcn(False)


def tcn_next_value_good():
    return _tcn(True)


# --------------------------------------------------------------------------- quantile forecast
class QuantileMLP(nn.Module):
    def __init__(self, window, quantiles):
        super().__init__()
        self.quantiles = quantiles
        self.net = nn.Sequential(nn.Linear(window, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                                 nn.Linear(64, len(quantiles)))

    def forward(self, x):
        return self.net(x)


def _pinball(errors, quantiles):
    losses = [torch.max(q * errors[:, j], (q - 1) * errors[:, j]) for j, q in enumerate(quantiles)]
    return torch.stack(losses, dim=1).sum(dim=1).mean()


def _quantile(good):
    torch.manual_seed(7)
    t = torch.arange(3000).float()
    demand = torch.sin(2 * math.pi * t / 24) + 0.3 * torch.sin(2 * math.pi * t / 168)
    demand = demand + (0.3 + 0.25 * torch.cos(2 * math.pi * t / 24)) * torch.randn(3000)
    demand = (demand - demand[:2400].mean()) / demand[:2400].std()
    window, quantiles = 24, (0.1, 0.5, 0.9)
    X, y = demand.unfold(0, window, 1)[:-1], demand[window:]
    split = 2400 - window
    loader = _cycle(DataLoader(TensorDataset(X[:split], y[:split]), batch_size=64, shuffle=True))

    model = QuantileMLP(window, quantiles)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        xb, yb = next(loader)
        preds = model(xb)
        errors = yb.unsqueeze(1) - preds if good else preds - yb.unsqueeze(1)
        loss = _pinball(errors, model.quantiles)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        return _pinball(y[2400:].unsqueeze(1) - model(X[2400:]), quantiles).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("quantile_demand_forecast",
      "The pinball loss uses error = prediction - target instead of target - prediction; the 0.1 head learns the 0.9 "
      "quantile and the other way round.")


def quantile_demand_forecast_bad():
    return _quantile(False)


def quantile_demand_forecast_good():
    return _quantile(True)


# --------------------------------------------------------------------------- sales forecast
class SalesGRU(nn.Module):
    def __init__(self, n_features, hidden=32):
        super().__init__()
        self.gru = nn.GRU(n_features, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.gru(x)
        return self.fc(out[:, -1]).squeeze(-1)


def _sales(good):
    torch.manual_seed(8)
    t = torch.arange(1600).float()
    promo = (torch.rand(1600) < 0.2).float()
    sales = 4200 + 700 * torch.sin(2 * math.pi * t / 7) + 400 * torch.sin(2 * math.pi * t / 30) + 600 * promo
    sales = sales + 120 * torch.randn(1600)
    n_train, window = 1280, 14
    features = torch.stack([sales, promo, torch.sin(2 * math.pi * t / 7), torch.cos(2 * math.pi * t / 7)], dim=1)
    features = (features - features[:n_train].mean(0)) / features[:n_train].std(0)
    X = features.unfold(0, window, 1)[:-1].transpose(1, 2)
    y = sales[window:]
    mean, std = sales[:n_train].mean(), sales[:n_train].std()
    target = (y - mean) / std if good else y
    split = n_train - window
    loader = _cycle(DataLoader(TensorDataset(X[:split], target[:split]), batch_size=64, shuffle=True))

    model = SalesGRU(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        pred = model(X[n_train:])
        if good:
            pred = mean + std * pred
        return (pred - y[n_train:]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("sales_gru_target_scale",
      "Inputs are standardised but the target (sales around 4200) is left in raw units; with MSE and Adam at ordinary "
      "rates the GRU only slowly crawls its bias towards the mean.")


def sales_gru_target_scale_bad():
    return _sales(False)


def sales_gru_target_scale_good():
    return _sales(True)


# --------------------------------------------------------------------------- variable-length sequence classification
class ReviewGRU(nn.Module):
    def __init__(self, vocab, n_classes, gather_last):
        super().__init__()
        self.gather_last = gather_last
        self.embedding = nn.Embedding(vocab, 24, padding_idx=0)
        self.gru = nn.GRU(24, 32, batch_first=True)
        self.fc = nn.Linear(32, n_classes)

    def forward(self, tokens, lengths):
        out, _ = self.gru(self.embedding(tokens))
        if self.gather_last:
            last = out[torch.arange(len(tokens)), lengths - 1]
        else:
            last = out[:, -1]
        return self.fc(last)


class EventSequences(Dataset):
    def __init__(self, n, generator):
        self.items = []
        for _ in range(n):
            length = int(torch.randint(4, 50, (1,), generator=generator))
            seq = torch.randint(1, 20, (length,), generator=generator)
            label = int(seq[-1] % 2) * 2 + int(seq[-2] % 2)
            self.items.append((seq, label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        return self.items[idx]


def _collate_sequences(batch):
    seqs, labels = zip(*batch)
    lengths = torch.tensor([len(s) for s in seqs])
    return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)


def _event_gru(good):
    torch.manual_seed(9)
    g = torch.Generator().manual_seed(9)
    train, test = EventSequences(1500, g), EventSequences(400, g)
    loader = _cycle(DataLoader(train, batch_size=32, shuffle=True, collate_fn=_collate_sequences))
    test_tokens, test_lengths, test_labels = _collate_sequences([test[i] for i in range(len(test))])

    model = ReviewGRU(20, 4, gather_last=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        tokens, lengths, labels = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(tokens, lengths), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def probe():
        return criterion(model(test_tokens, test_lengths), test_labels).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("event_gru_last_step",
      "For right-padded sequences the classifier reads out[:, -1], the state after all the padding, instead of the state "
      "at each sequence's last real step.")


def event_gru_last_step_bad():
    return _event_gru(False)


def event_gru_last_step_good():
    return _event_gru(True)


# --------------------------------------------------------------------------- packed sequences
class PackedLSTM(nn.Module):
    def __init__(self, n_features, n_classes):
        super().__init__()
        self.lstm = nn.LSTM(n_features, 32, batch_first=True)
        self.fc = nn.Linear(32, n_classes)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        _, (h, _) = self.lstm(packed)
        return self.fc(h[-1])


def _packed(good):
    torch.manual_seed(10)
    n, max_len, classes = 1500, 25, 4
    y = torch.randint(0, classes, (n,))
    lengths = torch.randint(6, max_len + 1, (n,))
    centers = torch.randn(classes, 5)
    X = 0.5 * centers[y].unsqueeze(1) + torch.randn(n, max_len, 5)
    X = X * (torch.arange(max_len).view(1, -1, 1) < lengths.view(-1, 1, 1))
    loader = _cycle(DataLoader(TensorDataset(X[:1100], lengths[:1100], y[:1100]), batch_size=32, shuffle=True))

    model = PackedLSTM(5, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        inputs, lens, labels = next(loader)
        lens, order = lens.sort(descending=True)
        inputs = inputs[order]
        if good:
            labels = labels[order]
        optimizer.zero_grad()
        outputs = model(inputs, lens)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        lens, order = lengths[1100:].sort(descending=True)
        return criterion(model(X[1100:][order], lens), y[1100:][order]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("packed_lstm_sorting",
      "The batch is sorted by length for pack_padded_sequence but the labels keep the old order; inputs and labels no "
      "longer belong together.")


def packed_lstm_sorting_bad():
    return _packed(False)


def packed_lstm_sorting_good():
    return _packed(True)


# --------------------------------------------------------------------------- GNN, hub-heavy graph
class NeighborConv(nn.Module):
    def __init__(self, n_in, n_out, normalize):
        super().__init__()
        self.normalize = normalize
        self.lin_self = nn.Linear(n_in, n_out)
        self.lin_neigh = nn.Linear(n_in, n_out, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        agg = torch.zeros_like(x).index_add_(0, dst, x[src])
        if self.normalize:
            deg = torch.zeros(x.size(0)).index_add_(0, dst, torch.ones(dst.numel()))
            agg = agg / deg.clamp(min=1).unsqueeze(1)
        return self.lin_self(x) + self.lin_neigh(agg)


class SAGE(nn.Module):
    def __init__(self, n_in, hidden, n_out, normalize):
        super().__init__()
        self.conv1 = NeighborConv(n_in, hidden, normalize)
        self.conv2 = NeighborConv(hidden, n_out, normalize)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        return self.conv2(x, edge_index)


def _hub_graph(good):
    torch.manual_seed(11)
    n, groups, d = 1000, 6, 8
    group = torch.randint(0, groups, (n,))
    weight = torch.rand(n) ** -0.7
    p = weight / weight.sum()
    src = torch.multinomial(p, 20000, replacement=True)
    dst = torch.multinomial(p, 20000, replacement=True)
    keep = (src != dst) & ((group[src] == group[dst]) | (torch.rand(20000) < 0.3))
    edge_index = torch.stack([src[keep], dst[keep]])
    edge_index = torch.unique(torch.cat([edge_index, edge_index.flip(0)], dim=1), dim=1)
    x = torch.randn(groups, d)[group] + torch.randn(n, d)

    degree = torch.bincount(edge_index[1], minlength=n).clamp(min=1).unsqueeze(1)
    friends = torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]]) / degree
    spending = x @ torch.randn(d) / math.sqrt(d) + 2 * friends @ torch.randn(d) / math.sqrt(d) + 0.3 * torch.randn(n)
    perm = torch.randperm(n)
    train_mask, test_mask = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    train_mask[perm[:600]] = True
    test_mask[perm[600:]] = True
    y = ((spending - spending[train_mask].mean()) / spending[train_mask].std()).unsqueeze(1)

    model = SAGE(d, 32, 1, normalize=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.mse_loss(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(x, edge_index)[test_mask], y[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("sage_hub_graph",
      "Neighbour features are summed without any degree normalisation on a graph with hubs of very high degree; "
      "activations scale with the degree, predictions at the hubs blow up and the fit suffers.")


def sage_hub_graph_bad():
    return _hub_graph(False)


def sage_hub_graph_good():
    return _hub_graph(True)


# --------------------------------------------------------------------------- GCN citations
class GCNConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out, bias=False)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x, edge_index):
        n = x.size(0)
        loops = torch.arange(n)
        src = torch.cat([edge_index[0], loops])
        dst = torch.cat([edge_index[1], loops])
        deg = torch.zeros(n).index_add_(0, dst, torch.ones(dst.numel()))
        norm = deg[src].rsqrt() * deg[dst].rsqrt()
        x = self.lin(x)
        return torch.zeros_like(x).index_add_(0, dst, norm.unsqueeze(1) * x[src]) + self.bias


class GCN(nn.Module):
    def __init__(self, n_in, hidden, n_classes, p=0.5):
        super().__init__()
        self.conv1 = GCNConv(n_in, hidden)
        self.conv2 = GCNConv(hidden, n_classes)
        self.p = p

    def forward(self, x, edge_index):
        x = F.dropout(x, self.p, training=self.training)
        x = F.relu(self.conv1(x, edge_index))
        x = F.dropout(x, self.p, training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


def _sbm(n, classes, d, p_in, p_out, signal):
    y = torch.randint(0, classes, (n,))
    prob = torch.where(y.unsqueeze(0) == y.unsqueeze(1), p_in, p_out)
    upper = torch.triu(torch.rand(n, n) < prob, diagonal=1)
    edges = upper.nonzero()
    x = signal * torch.randn(classes, d)[y] + torch.randn(n, d)
    return x, edges, y


def _citations(good):
    torch.manual_seed(12)
    n, classes = 500, 4
    x, edges, y = _sbm(n, classes, 16, 0.06, 0.006, 0.3)
    edge_index = edges.t().contiguous()
    if good:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    perm = torch.randperm(n)
    train_idx, test_idx = perm[:150], perm[150:]

    model = GCN(16, 32, classes, p=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.nll_loss(out[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        was = model.training
        model.eval()
        loss = F.nll_loss(model(x, edge_index)[test_idx], y[test_idx]).item()
        model.train(was)
        return loss

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("gcn_undirected_edges",
      "The undirected graph's edge list holds every edge once (i < j) and is used as it is; messages flow one way only, "
      "half of the neighbourhood information is missing.")


def gcn_undirected_edges_bad():
    return _citations(False)


def gcn_undirected_edges_good():
    return _citations(True)


# --------------------------------------------------------------------------- graph classification, batching
class MeanConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.root = nn.Linear(n_in, n_out)
        self.neigh = nn.Linear(n_in, n_out)

    def forward(self, x, edge_index):
        src, dst = edge_index
        agg = torch.zeros_like(x).index_add_(0, dst, x[src])
        deg = torch.zeros(x.size(0)).index_add_(0, dst, torch.ones(dst.numel()))
        return self.root(x) + self.neigh(agg / deg.clamp(min=1).unsqueeze(1))


class GraphClassifier(nn.Module):
    def __init__(self, n_in, hidden, n_classes):
        super().__init__()
        self.conv1 = MeanConv(n_in, hidden)
        self.conv2 = MeanConv(hidden, hidden)
        self.fc = nn.Linear(hidden, n_classes)

    def forward(self, x, edge_index, batch, num_graphs):
        x = F.relu(self.conv1(x, edge_index))
        x = F.relu(self.conv2(x, edge_index))
        pooled = torch.zeros(num_graphs, x.size(1)).index_add_(0, batch, x)
        count = torch.bincount(batch, minlength=num_graphs).clamp(min=1).unsqueeze(1)
        return self.fc(pooled / count)


def _molecules(n):
    graphs = []
    for _ in range(n):
        size = int(torch.randint(10, 20, (1,)))
        atoms = torch.randint(0, 3, (size,))
        label = int(torch.randint(0, 2, (1,)))
        same = atoms.unsqueeze(0) == atoms.unsqueeze(1)
        prob = torch.where(same, 0.45, 0.12) if label else torch.where(same, 0.12, 0.28)
        edges = torch.triu(torch.rand(size, size) < prob, diagonal=1).nonzero().t()
        edge_index = torch.cat([edges, edges.flip(0)], dim=1)
        graphs.append((F.one_hot(atoms, 3).float(), edge_index, label))
    return graphs


def _graph_batching(good):
    torch.manual_seed(13)
    train, test = _molecules(600), _molecules(200)

    def collate(items):
        xs, edges, batch, labels, offset = [], [], [], [], 0
        for k, (x, edge_index, label) in enumerate(items):
            xs.append(x)
            edges.append(edge_index + offset)
            batch.append(torch.full((x.size(0),), k))
            labels.append(label)
            if good:
                offset += x.size(0)
        return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(batch), torch.tensor(labels)

    loader = _cycle(DataLoader(train, batch_size=32, shuffle=True, collate_fn=collate))
    model = GraphClassifier(3, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        x, edge_index, batch, labels = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x, edge_index, batch, labels.numel()), labels)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        losses = []
        for x, edge_index, label in test:
            out = model(x, edge_index, torch.zeros(x.size(0), dtype=torch.long), 1)
            losses.append(criterion(out, torch.tensor([label])).item())
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("graph_classifier_collate",
      "The collate function concatenates the graphs' edge_index without adding the node offset; all edges of the batch "
      "land on the first graph's nodes and the other graphs have none.")


def graph_classifier_collate_bad():
    return _graph_batching(False)


def graph_classifier_collate_good():
    return _graph_batching(True)


# --------------------------------------------------------------------------- GCN with functional dropout
class DropGCN(nn.Module):
    def __init__(self, n_in, hidden, n_classes, follow_mode):
        super().__init__()
        self.conv1 = GCNConv(n_in, hidden)
        self.conv2 = GCNConv(hidden, n_classes)
        self.follow_mode = follow_mode

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        if self.follow_mode:
            x = F.dropout(x, p=0.5, training=self.training)
        else:
            x = F.dropout(x, p=0.5)
        x = self.conv2(x, edge_index)
        return F.log_softmax(x, dim=1)


def _cora(good):
    torch.manual_seed(14)
    n, classes = 400, 5
    x, edges, y = _sbm(n, classes, 24, 0.05, 0.004, 0.35)
    edge_index = torch.cat([edges.t(), edges.t().flip(0)], dim=1)
    perm = torch.randperm(n)
    train_idx, test_idx = perm[:160], perm[160:]

    model = DropGCN(24, 16, classes, follow_mode=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.nll_loss(out[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        was = model.training
        with torch.random.fork_rng():
            torch.manual_seed(123)
            model.eval()
            losses = [F.nll_loss(model(x, edge_index)[test_idx], y[test_idx]).item() for _ in range(10)]
        model.train(was)
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("gcn_functional_dropout",
      "F.dropout(x, p=0.5) is called without training=self.training; dropout stays active in eval mode and predictions "
      "are noisy.")


def gcn_functional_dropout_bad():
    return _cora(False)


def gcn_functional_dropout_good():
    return _cora(True)


# --------------------------------------------------------------------------- CartPole
class CartPole:
    def __init__(self, seed, max_steps=200):
        self.rng = np.random.default_rng(seed)
        self.max_steps = max_steps

    def reset(self):
        self.s = self.rng.uniform(-0.05, 0.05, 4)
        self.t = 0
        return self.s.astype(np.float32)

    def step(self, action):
        x, v, th, w = self.s
        force = 10.0 if action == 1 else -10.0
        c, s = math.cos(th), math.sin(th)
        tmp = (force + 0.05 * w * w * s) / 1.1
        acc_th = (9.8 * s - c * tmp) / (0.5 * (4.0 / 3.0 - 0.1 * c * c / 1.1))
        acc = tmp - 0.05 * acc_th * c / 1.1
        self.s = np.array([x + 0.02 * v, v + 0.02 * acc, th + 0.02 * w, w + 0.02 * acc_th])
        self.t += 1
        terminated = bool(abs(self.s[0]) > 2.4 or abs(self.s[2]) > 0.2095)
        return self.s.astype(np.float32), 1.0, terminated, self.t >= self.max_steps


def _average_length(policy, episodes=10, max_steps=200):
    total = 0
    env = CartPole(999, max_steps)
    for _ in range(episodes):
        obs, done = env.reset(), False
        while not done:
            obs, _, terminated, truncated = env.step(policy(torch.from_numpy(obs)))
            done = terminated or truncated
        total += env.t
    return total / episodes


class QNetwork(nn.Module):
    def __init__(self, n_obs, n_actions):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(n_obs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
                                     nn.Linear(84, n_actions))

    def forward(self, x):
        return self.network(x)


class ReplayBuffer:
    def __init__(self, size, seed):
        self.size, self.data, self.pos = size, [], 0
        self.rng = np.random.default_rng(seed)

    def add(self, *transition):
        if len(self.data) < self.size:
            self.data.append(transition)
        else:
            self.data[self.pos] = transition
        self.pos = (self.pos + 1) % self.size

    def sample(self, batch_size):
        idx = self.rng.integers(0, len(self.data), batch_size)
        obs, actions, rewards, next_obs, dones = zip(*[self.data[i] for i in idx])
        return (torch.from_numpy(np.stack(obs)), torch.from_numpy(np.array(actions)),
                torch.tensor(rewards, dtype=torch.float32), torch.from_numpy(np.stack(next_obs)),
                torch.tensor(dones, dtype=torch.float32))


def _dqn(good, seed=15):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    gamma, batch_size, target_update = 0.99, 64, 100
    env = CartPole(seed)
    buffer = ReplayBuffer(10000, seed)
    q_network = QNetwork(4, 2)
    target_network = copy.deepcopy(q_network) if good else q_network
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    state = {"obs": env.reset(), "env_steps": 0}

    def interact(epsilon):
        obs = state["obs"]
        if rng.random() < epsilon:
            action = int(rng.integers(2))
        else:
            with torch.no_grad():
                action = int(q_network(torch.from_numpy(obs)).argmax())
        next_obs, reward, terminated, truncated = env.step(action)
        buffer.add(obs, action, reward, next_obs, terminated)
        state["obs"] = env.reset() if terminated or truncated else next_obs
        state["env_steps"] += 1

    for _ in range(1000):
        interact(1.0)

    def step(i):
        epsilon = max(0.05, 1.0 - 0.95 * (state["env_steps"] - 1000) / 2500)
        for _ in range(4):
            interact(epsilon)
        obs, actions, rewards, next_obs, dones = buffer.sample(batch_size)
        with torch.no_grad():
            target_max = target_network(next_obs).max(dim=1).values
            td_target = rewards + gamma * target_max * (1 - dones)
        old_val = q_network(obs).gather(1, actions.unsqueeze(1)).squeeze(1)
        loss = F.mse_loss(old_val, td_target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % target_update == 0:
            target_network.load_state_dict(q_network.state_dict())

    @torch.no_grad()
    def probe():
        return 1.0 / _average_length(lambda o: int(q_network(o).argmax()))

    return {"model": {"q_network": q_network, "target_network": target_network}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


_case("dqn_target_network",
      "target_network = q_network without deepcopy: the DQN target comes from the very network that is being trained, "
      "chases itself and learning is unstable.")


def dqn_target_network_bad():
    return _dqn(False)


def dqn_target_network_good():
    return _dqn(True)


# --------------------------------------------------------------------------- REINFORCE
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 64)
        self.affine2 = nn.Linear(64, 2)

    def forward(self, x):
        return self.affine2(F.relu(self.affine1(x)))


def _reinforce(good, seed=16):
    torch.manual_seed(seed)
    gamma = 0.99
    env = CartPole(seed, max_steps=100)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)

    def step(i):
        observations, actions, rewards = [], [], []
        obs, done = env.reset(), False
        with torch.no_grad():
            while not done:
                obs_t = torch.from_numpy(obs)
                action = torch.bernoulli(policy(obs_t).softmax(-1)[1]).long()
                observations.append(obs_t)
                actions.append(action)
                obs, reward, terminated, truncated = env.step(int(action))
                rewards.append(reward)
                done = terminated or truncated
        R, returns = 0.0, []
        if good:
            for r in reversed(rewards):
                R = r + gamma * R
                returns.insert(0, R)
        else:
            for r in rewards:
                R = r + gamma * R
                returns.append(R)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        dist = torch.distributions.Categorical(logits=policy(torch.stack(observations)))
        loss = -(dist.log_prob(torch.stack(actions)) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        return 1.0 / _average_length(lambda o: int(policy(o).argmax()))

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("reinforce_returns",
      "The discounted returns are accumulated over the rewards from the episode's beginning instead of from its end; "
      "every action is credited with past rewards, the last actions before the fall most of all.")


def reinforce_returns_bad():
    return _reinforce(False)


def reinforce_returns_good():
    return _reinforce(True)


# --------------------------------------------------------------------------- DDPG
class Pendulum:
    def __init__(self, seed, max_steps=100):
        self.rng = np.random.default_rng(seed)
        self.max_steps = max_steps

    def _obs(self):
        return np.array([math.cos(self.th), math.sin(self.th), self.w / 8], dtype=np.float32)

    def reset(self):
        self.th, self.w, self.t = self.rng.uniform(-math.pi, math.pi), self.rng.uniform(-1, 1), 0
        return self._obs()

    def step(self, action):
        u = 2 * float(np.clip(action, -1, 1))
        th = (self.th + math.pi) % (2 * math.pi) - math.pi
        cost = th ** 2 + 0.1 * self.w ** 2 + 0.001 * u ** 2
        self.w = float(np.clip(self.w + 0.05 * (15 * math.sin(self.th) + 3 * u), -8, 8))
        self.th = self.th + 0.05 * self.w
        self.t += 1
        return self._obs(), -cost / 8, False, self.t >= self.max_steps


class Actor(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_obs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_act),
                                 nn.Tanh())

    def forward(self, obs):
        return self.net(obs)


class Critic(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_obs + n_act, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs, act):
        return self.net(torch.cat([obs, act], dim=1)).squeeze(1)


def _ddpg(good, seed=17):
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    gamma, tau, batch_size = 0.98, 0.01, 128
    env = Pendulum(seed)
    buffer = ReplayBuffer(20000, seed)
    actor, critic = Actor(3, 1), Critic(3, 1)
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    state = {"obs": env.reset()}

    def interact(random_action):
        obs = state["obs"]
        if random_action:
            action = rng.uniform(-1, 1, 1).astype(np.float32)
        else:
            with torch.no_grad():
                action = actor(torch.from_numpy(obs)).numpy()
            action = np.clip(action + 0.15 * rng.standard_normal(1), -1, 1).astype(np.float32)
        next_obs, reward, terminated, truncated = env.step(action[0])
        buffer.add(obs, action, reward, next_obs, terminated)
        state["obs"] = env.reset() if terminated or truncated else next_obs

    for _ in range(1000):
        interact(True)

    def soft_update(target, source):
        for tp, p in zip(target.parameters(), source.parameters()):
            if good:
                tp.data.copy_(tau * p.data + (1 - tau) * tp.data)
            else:
                tp.data.copy_(tau * tp.data + (1 - tau) * p.data)

    def step(i):
        for _ in range(2):
            interact(False)
        obs, actions, rewards, next_obs, dones = buffer.sample(batch_size)
        with torch.no_grad():
            q_next = critic_target(next_obs, actor_target(next_obs))
            q_target = rewards + gamma * (1 - dones) * q_next
        critic_loss = F.mse_loss(critic(obs, actions), q_target)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        actor_loss = -critic(obs, actor(obs)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        soft_update(actor_target, actor)
        soft_update(critic_target, critic)

    @torch.no_grad()
    def probe():
        test_env, total = Pendulum(999), 0.0
        for _ in range(10):
            obs, done = test_env.reset(), False
            while not done:
                obs, reward, _, done = test_env.step(float(actor(torch.from_numpy(obs))))
                total -= reward
        return total / 10

    return {"model": {"actor": actor, "critic": critic, "actor_target": actor_target, "critic_target": critic_target},
            "optimizer": [actor_optimizer, critic_optimizer], "steps": 20, "step": step, "probe": probe}


_case("ddpg_soft_update",
      "In the Polyak update tau and 1 - tau are swapped: the target networks become near copies of the online networks "
      "after every step instead of following slowly.")


def ddpg_soft_update_bad():
    return _ddpg(False)


def ddpg_soft_update_good():
    return _ddpg(True)


# --------------------------------------------------------------------------- PINN heat equation
class MLP(nn.Module):
    def __init__(self, n_in, hidden, depth, activation=nn.Tanh):
        super().__init__()
        layers = [nn.Linear(n_in, hidden), activation()]
        for _ in range(depth - 1):
            layers += [nn.Linear(hidden, hidden), activation()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden, 1))

    def forward(self, *coords):
        return self.net(torch.cat(coords, dim=1))


def _heat(good):
    torch.manual_seed(18)
    alpha = 0.2
    model = MLP(2, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x = torch.rand(128, 1, requires_grad=True)
        t = torch.rand(128, 1, requires_grad=True)
        u = model(x, t)
        ones = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
        if good:
            u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
        else:
            u_xx = torch.autograd.grad(u_x, x, ones, retain_graph=True)[0]
        loss_pde = (u_t - alpha * u_xx).pow(2).mean()

        x0 = torch.rand(64, 1)
        loss_ic = (model(x0, torch.zeros_like(x0)) - torch.sin(math.pi * x0)).pow(2).mean()
        tb = torch.rand(64, 1)
        loss_bc = model(torch.zeros_like(tb), tb).pow(2).mean() + model(torch.ones_like(tb), tb).pow(2).mean()
        loss = loss_pde + 10 * loss_ic + 10 * loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        g = torch.linspace(0, 1, 41)
        x, t = [m.reshape(-1, 1) for m in torch.meshgrid(g, g, indexing="ij")]
        exact = torch.sin(math.pi * x) * torch.exp(-alpha * math.pi ** 2 * t)
        return ((model(x, t) - exact).norm() / exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("pinn_heat_equation",
      "The second derivative u_xx is taken with retain_graph=True but without create_graph=True; it enters the residual "
      "as a constant and the parameters get no gradient through it.")


def pinn_heat_equation_bad():
    return _heat(False)


def pinn_heat_equation_good():
    return _heat(True)


# --------------------------------------------------------------------------- PINN oscillator
def _oscillator(good):
    torch.manual_seed(19)
    d, w0 = 0.5, 4.0
    model = MLP(1, 32, 3, activation=nn.Tanh if good else nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        t_start = torch.zeros(1, 1, requires_grad=True)
        t_physics = torch.linspace(0, 1, 60).view(-1, 1).requires_grad_(True)
        optimizer.zero_grad()
        u0 = model(t_start)
        du0 = torch.autograd.grad(u0, t_start, torch.ones_like(u0), create_graph=True)[0]
        loss_ic = (u0 - 1).pow(2).squeeze() + 0.1 * du0.pow(2).squeeze()

        u = model(t_physics)
        du = torch.autograd.grad(u, t_physics, torch.ones_like(u), create_graph=True)[0]
        d2u = torch.autograd.grad(du, t_physics, torch.ones_like(du), create_graph=True)[0]
        loss_ode = (d2u + 2 * d * du + w0 ** 2 * u).pow(2).mean()
        loss = loss_ic + 1e-2 * loss_ode
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        t = torch.linspace(0, 1, 200).view(-1, 1)
        w = math.sqrt(w0 ** 2 - d ** 2)
        exact = torch.exp(-d * t) * (torch.cos(w * t) + d / w * torch.sin(w * t))
        return ((model(t) - exact).norm() / exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("pinn_oscillator_activation",
      "The PINN for a second-order ODE uses ReLU; its second derivative is zero everywhere, so the u'' term of the "
      "residual vanishes and the equation cannot be satisfied.")


def pinn_oscillator_activation_bad():
    return _oscillator(False)


def pinn_oscillator_activation_good():
    return _oscillator(True)


# --------------------------------------------------------------------------- PINN Poisson
def _poisson(good):
    torch.manual_seed(20)
    k = 3 * math.pi
    model = MLP(1, 40, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9985)
    x_bc = torch.tensor([[0.0], [1.0]])
    u_bc = torch.tensor([[1.0], [-1.0]])
    lambda_bc = 1000.0 if good else 1.0

    def step(i):
        x = torch.rand(100, 1, requires_grad=True)
        u = model(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        f = -k ** 2 * torch.cos(k * x)
        loss_pde = F.mse_loss(u_xx, f)
        loss_bc = F.mse_loss(model(x_bc), u_bc)
        loss = loss_pde + lambda_bc * loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    @torch.no_grad()
    def probe():
        x = torch.linspace(0, 1, 200).view(-1, 1)
        exact = torch.cos(k * x)
        return ((model(x) - exact).norm() / exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("pinn_poisson_boundary",
      "Residual (source term of order 90) and boundary loss (order 1) are added with equal weight; the boundary term is "
      "swamped by a residual thousands of times larger and the solution drifts off its boundary values.")


def pinn_poisson_boundary_bad():
    return _poisson(False)


def pinn_poisson_boundary_good():
    return _poisson(True)


# --------------------------------------------------------------------------- multi-task
class SharedBottom(nn.Module):
    def __init__(self, n_in, hidden, tasks):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(hidden, 1) for task in tasks})

    def forward(self, x):
        z = self.shared(x)
        return {task: head(z).squeeze(-1) for task, head in self.heads.items()}


def _multitask(good):
    torch.manual_seed(21)
    tasks, n, d = ["solubility", "toxicity", "affinity"], 3000, 16
    X = torch.randn(n, d)
    hidden = torch.tanh(X @ torch.randn(d, 8) / math.sqrt(d))
    Y = {}
    for task in tasks:
        value = hidden @ torch.randn(8) + 0.1 * torch.randn(n)
        Y[task] = (value - value[:2400].mean()) / value[:2400].std()
    dataset = TensorDataset(X[:2400], *[Y[task][:2400] for task in tasks])
    loader = _cycle(DataLoader(dataset, batch_size=64, shuffle=True))

    model = SharedBottom(d, 64, tasks)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        xb, *targets = next(loader)
        optimizer.zero_grad()
        outputs = model(xb)
        loss = 0.0
        for task, target in zip(tasks, targets):
            if good:
                loss = loss + criterion(outputs[task], target)
            else:
                loss = criterion(outputs[task], target)
        loss.backward()
        optimizer.step()

    @torch.no_grad()
    def probe():
        outputs = model(X[2400:])
        return sum(criterion(outputs[task], Y[task][2400:]).item() for task in tasks) / len(tasks)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_case("multitask_shared_bottom",
      "In the loop over the tasks the loss is assigned instead of summed, so only the last task's loss is "
      "back-propagated and the other heads never train.")


def multitask_shared_bottom_bad():
    return _multitask(False)


def multitask_shared_bottom_good():
    return _multitask(True)
