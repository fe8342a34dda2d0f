import copy
import math
import random
from collections import deque
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


CASES = [
    {"name": "tabular_mse_broadcast",
     "what": "Regression net returns (B, 1) while the targets are (B,); the hand-written MSE broadcasts to (B, B), so every prediction is pulled to the batch mean."},
    {"name": "tabular_unscaled_features",
     "what": "Raw columns (income, age, balance, ...) of wildly different magnitude go into the MLP without standardisation; training is dominated by the large columns and stalls."},
    {"name": "tabular_eval_mode_left_on",
     "what": "The validation routine calls model.eval() and nobody goes back to model.train(), so dropout and batch statistics are off for all training after the first epoch; the net overfits."},
    {"name": "forecast_target_off_by_one",
     "what": "The sliding window's target is the last value of the window itself instead of the next one; the net learns to copy its input and can't forecast."},
    {"name": "forecast_relu_output",
     "what": "The forecaster ends in a ReLU although the series is standardised (half the targets are negative); negative values can't be predicted."},
    {"name": "ts_transformer_no_causal_mask",
     "what": "A decoder-style time series transformer predicts the next value at each position without a causal mask; it reads the answer from the following position and fails when the future is absent."},
    {"name": "forecast_scheduler_per_batch",
     "what": "StepLR meant in epochs is stepped after every batch; the learning rate decays to nothing within a few epochs."},
    {"name": "rnn_batch_first_missing",
     "what": "nn.LSTM is built without batch_first=True but fed (batch, time, features); recurrence runs over the samples of the batch and not over time."},
    {"name": "rnn_last_padded_step",
     "what": "Padded variable-length sequences (names by language) are classified from out[:, -1], the state after the padding, instead of the state at the last real step."},
    {"name": "rnn_missing_zero_grad",
     "what": "optimizer.zero_grad() is missing, so gradients pile up over all the steps and the updates overshoot."},
    {"name": "gcn_edges_one_direction",
     "what": "An undirected graph's edge list holds each edge once and is used as it is, without the reverse edges; messages flow only one way."},
    {"name": "gcn_functional_dropout_always_on",
     "what": "F.dropout(x, p) is called without training=self.training, so dropout stays active in evaluation too."},
    {"name": "dqn_no_done_mask",
     "what": "The TD target bootstraps from the next state also at terminal transitions (no (1 - done)); Q-values don't see that falling ends the episode."},
    {"name": "reinforce_returns_order",
     "what": "Discounted returns are computed backwards through the episode but appended and never reversed, so each action gets the return of the mirrored time step."},
    {"name": "mf_positives_only",
     "what": "Implicit-feedback matrix factorisation is trained with BCE on observed interactions only, without negative samples; it learns to say yes to everything."},
    {"name": "fm_missing_field_offsets",
     "what": "A factorisation machine keeps all fields in one embedding table but the per-field offsets aren't added; user 3, item 3 and genre 3 share the same row."},
    {"name": "pinn_relu_second_derivative",
     "what": "The PINN for a second-order equation uses ReLU; its second derivative is zero everywhere, so the residual gives no gradient."},
    {"name": "cox_ascending_sort",
     "what": "The Cox partial likelihood takes logcumsumexp for the risk set after sorting by ascending instead of descending time; the risk set is made of those already gone."},
    {"name": "maml_deepcopy_learner",
     "what": "The inner loop adapts a deepcopy of the model and the query loss is backpropagated into the copy; the meta-parameters never get a gradient and don't move."},
    {"name": "mtl_heads_python_list",
     "what": "Task heads are kept in a plain Python list instead of nn.ModuleList; they are not in model.parameters() and never trained."},
    {"name": "pointnet_view_instead_of_transpose",
     "what": "Point clouds (B, N, 3) are brought to (B, 3, N) with view instead of transpose; coordinates of different points are mixed."},
    {"name": "siamese_labels_flipped",
     "what": "The contrastive loss counts label 1 as dissimilar while the pair dataset gives 1 for same class; equal pairs are pushed apart and different ones pulled together."},
]


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


@contextmanager
def evaluating(*models):
    flags = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1234)
        try:
            yield
        finally:
            for m, flag in flags:
                m.training = flag


# --------------------------------------------------------------------------
# tabular
# --------------------------------------------------------------------------

def _tabular_mse_broadcast(bad):
    torch.manual_seed(0)
    X = torch.randn(1200, 8)
    y = X[:, 0] * 1.5 - X[:, 1] + torch.sin(2 * X[:, 2]) + 0.1 * torch.randn(1200)
    y = (y - y[:1000].mean()) / y[:1000].std()
    train_ds = TensorDataset(X[:1000], y[:1000])
    X_val, y_val = X[1000:], y[1000:]
    loader = cycle(DataLoader(train_ds, batch_size=64, shuffle=True))

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(8, 64), nn.ReLU(),
                nn.Linear(64, 32), nn.ReLU(),
                nn.Linear(32, 1),
            )

        def forward(self, x):
            out = self.net(x)
            return out if bad else out.squeeze(-1)

    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        pred = model(xb)
        loss = torch.mean((pred - yb) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(X_val).reshape(-1), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_mse_broadcast_bad():
    return _tabular_mse_broadcast(True)


def tabular_mse_broadcast_good():
    return _tabular_mse_broadcast(False)


def _tabular_unscaled_features(bad):
    torch.manual_seed(1)
    n = 1600
    age = 20 + 50 * torch.rand(n)
    income = torch.exp(10.6 + 0.5 * torch.randn(n))
    balance = 3000 * torch.randn(n) + 8000
    debt_ratio = torch.rand(n)
    late = torch.poisson(torch.full((n,), 1.0))
    X = torch.stack([age, income, balance, debt_ratio, late], dim=1)
    score = (3.0 * (debt_ratio - 0.5) / 0.29 + 1.5 * (late - 1)
             - 0.8 * (age - 45) / 14 - 0.5 * (income - 45000) / 25000)
    y = (torch.rand(n) < torch.sigmoid(score)).float()
    X_train, y_train, X_test, y_test = X[:1200], y[:1200], X[1200:], y[1200:]
    if not bad:
        mean, std = X_train.mean(0), X_train.std(0)
        X_train = (X_train - mean) / std
        X_test = (X_test - mean) / std
    loader = cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True))

    model = nn.Sequential(
        nn.Linear(5, 32), nn.ReLU(),
        nn.Linear(32, 16), nn.ReLU(),
        nn.Linear(16, 1),
    )
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb).squeeze(1), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(X_test).squeeze(1), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_unscaled_features_bad():
    return _tabular_unscaled_features(True)


def tabular_unscaled_features_good():
    return _tabular_unscaled_features(False)


def _tabular_eval_mode_left_on(bad):
    torch.manual_seed(2)
    n = 900
    X = torch.randn(n, 20)
    logits = 2.0 * X[:, 0] - 1.5 * X[:, 1] + 1.5 * X[:, 2]
    y = (torch.rand(n) < torch.sigmoid(logits)).long()
    train_ds = TensorDataset(X[:320], y[:320])
    val_ds = TensorDataset(X[320:480], y[320:480])
    X_test, y_test = X[480:], y[480:]
    train_loader = DataLoader(train_ds, batch_size=64, shuffle=True)
    val_loader = DataLoader(val_ds, batch_size=160)
    batches = cycle(train_loader)
    steps_per_epoch = len(train_loader)

    class MLP(nn.Module):
        def __init__(self, in_features, hidden, num_classes, p=0.5):
            super().__init__()
            self.fc1 = nn.Linear(in_features, hidden)
            self.bn1 = nn.BatchNorm1d(hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.bn2 = nn.BatchNorm1d(hidden)
            self.drop = nn.Dropout(p)
            self.out = nn.Linear(hidden, num_classes)

        def forward(self, x):
            x = self.drop(F.relu(self.bn1(self.fc1(x))))
            x = self.drop(F.relu(self.bn2(self.fc2(x))))
            return self.out(x)

    model = MLP(20, 64, 2)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    history = []

    def validate():
        model.eval()
        total, correct = 0.0, 0
        with torch.no_grad():
            for xb, yb in val_loader:
                out = model(xb)
                total += criterion(out, yb).item() * len(yb)
                correct += (out.argmax(1) == yb).sum().item()
        if not bad:
            model.train()
        return total / len(val_ds), correct / len(val_ds)

    model.train()

    def step(i):
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % steps_per_epoch == 0:
            history.append(validate())
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_eval_mode_left_on_bad():
    return _tabular_eval_mode_left_on(True)


def tabular_eval_mode_left_on_good():
    return _tabular_eval_mode_left_on(False)


# --------------------------------------------------------------------------
# time series
# --------------------------------------------------------------------------

def _make_series(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(n, dtype=torch.float32)
    s = torch.sin(2 * math.pi * t / 7) + 0.7 * torch.sin(2 * math.pi * t / 12 + 1.0)
    s = s + 0.15 * torch.randn(n, generator=g)
    return s


def _forecast_target_off_by_one(bad):
    torch.manual_seed(3)
    series = _make_series(1500, 3)
    train, test = series[:1200], series[1200:]
    mean, std = train.mean(), train.std()
    train, test = (train - mean) / std, (test - mean) / std
    seq_len = 24

    def create_sequences(data, seq_len):
        xs, ys = [], []
        for k in range(len(data) - seq_len):
            xs.append(data[k:k + seq_len])
            ys.append(data[k + seq_len - 1] if bad else data[k + seq_len])
        return torch.stack(xs).unsqueeze(-1), torch.stack(ys).unsqueeze(-1)

    X_train, y_train = create_sequences(train, seq_len)
    loader = cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True))
    windows = test.unfold(0, seq_len + 1, 1)
    X_test, y_test = windows[:, :seq_len].unsqueeze(-1), windows[:, seq_len:]

    class LSTMModel(nn.Module):
        def __init__(self, hidden_size=32):
            super().__init__()
            self.lstm = nn.LSTM(1, hidden_size, batch_first=True)
            self.fc = nn.Linear(hidden_size, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = LSTMModel()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_target_off_by_one_bad():
    return _forecast_target_off_by_one(True)


def forecast_target_off_by_one_good():
    return _forecast_target_off_by_one(False)


def _forecast_relu_output(bad):
    torch.manual_seed(4)
    g = torch.Generator().manual_seed(4)
    t = torch.arange(1600, dtype=torch.float32)
    load = 300 + 80 * torch.sin(2 * math.pi * t / 24) + 30 * torch.sin(2 * math.pi * t / 168)
    load = load + 10 * torch.randn(1600, generator=g)
    mean, std = load[:1200].mean(), load[:1200].std()
    load = (load - mean) / std
    lookback, horizon = 48, 6

    def make_windows(series):
        w = series.unfold(0, lookback + horizon, 1)
        return w[:, :lookback].contiguous(), w[:, lookback:].contiguous()

    X_train, y_train = make_windows(load[:1200])
    X_test, y_test = make_windows(load[1200:])
    loader = cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True))

    layers = [
        nn.Linear(lookback, 64), nn.ReLU(),
        nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, horizon),
    ]
    if bad:
        layers.append(nn.ReLU())
    model = nn.Sequential(*layers)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_relu_output_bad():
    return _forecast_relu_output(True)


def forecast_relu_output_good():
    return _forecast_relu_output(False)


class _PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=200):
        super().__init__()
        pos = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(pos * div)
        pe[:, 1::2] = torch.cos(pos * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(1)]


def _ts_transformer_no_causal_mask(bad):
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(5)
    n_series, T = 400, 33
    phase = 2 * math.pi * torch.rand(n_series, 1, generator=g)
    period = 5 + 6 * torch.rand(n_series, 1, generator=g)
    t = torch.arange(T, dtype=torch.float32)
    data = math.sqrt(2) * torch.sin(2 * math.pi * t / period + phase)
    data = (data + 0.1 * torch.randn(n_series, T, generator=g)).unsqueeze(-1)
    train, test = data[:320], data[320:]
    loader = cycle(DataLoader(TensorDataset(train), batch_size=32, shuffle=True))

    class TimeSeriesTransformer(nn.Module):
        def __init__(self, d_model=32, nhead=4, num_layers=2):
            super().__init__()
            self.input_proj = nn.Linear(1, d_model)
            self.pos = _PositionalEncoding(d_model)
            layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward=64, dropout=0.0,
                                               batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(d_model),
                                                 enable_nested_tensor=False)
            self.head = nn.Linear(d_model, 1)

        def forward(self, x):
            h = self.pos(self.input_proj(x))
            if bad:
                h = self.encoder(h)
            else:
                mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
                h = self.encoder(h, mask=mask, is_causal=True)
            return self.head(h)

    model = TimeSeriesTransformer()
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (seq,) = next(loader)
        inputs, targets = seq[:, :-1], seq[:, 1:]
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            errors = []
            for k in range(12, T, 4):
                pred = model(test[:, :k])[:, -1]
                errors.append(F.mse_loss(pred, test[:, k]).item())
            return sum(errors) / len(errors)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ts_transformer_no_causal_mask_bad():
    return _ts_transformer_no_causal_mask(True)


def ts_transformer_no_causal_mask_good():
    return _ts_transformer_no_causal_mask(False)


def _forecast_scheduler_per_batch(bad):
    torch.manual_seed(6)
    series = _make_series(900, 6)
    mean, std = series[:600].mean(), series[:600].std()
    series = (series - mean) / std
    lookback = 28
    w_train = series[:600].unfold(0, lookback + 1, 1)
    w_test = series[600:].unfold(0, lookback + 1, 1)
    train_ds = TensorDataset(w_train[:, None, :lookback].contiguous(), w_train[:, lookback:].contiguous())
    X_test, y_test = w_test[:, None, :lookback].contiguous(), w_test[:, lookback:].contiguous()
    train_loader = DataLoader(train_ds, batch_size=64, shuffle=True)
    batches = cycle(train_loader)

    model = nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(),
        nn.Conv1d(16, 16, 5, padding=2), nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * lookback, 1),
    )
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        if bad or (i + 1) % len(train_loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_scheduler_per_batch_bad():
    return _forecast_scheduler_per_batch(True)


def forecast_scheduler_per_batch_good():
    return _forecast_scheduler_per_batch(False)


# --------------------------------------------------------------------------
# recurrent networks
# --------------------------------------------------------------------------

def _rnn_batch_first_missing(bad):
    torch.manual_seed(7)
    n, T = 1000, 20
    y = torch.randint(0, 3, (n,))
    freq = torch.tensor([0.08, 0.16, 0.28])[y]
    t = torch.arange(T, dtype=torch.float32)
    phase = 2 * math.pi * torch.rand(n, 1)
    base = 2 * math.pi * freq[:, None] * t + phase
    X = torch.stack([torch.sin(base), torch.cos(base), torch.zeros_like(base)], dim=-1)
    X = X + 0.4 * torch.randn(n, T, 3)
    loader = cycle(DataLoader(TensorDataset(X[:800], y[:800]), batch_size=32, shuffle=True))
    X_test, y_test = X[800:], y[800:]

    class ActivityLSTM(nn.Module):
        def __init__(self, n_features, hidden_dim, n_classes):
            super().__init__()
            if bad:
                self.lstm = nn.LSTM(n_features, hidden_dim)
            else:
                self.lstm = nn.LSTM(n_features, hidden_dim, batch_first=True)
            self.fc = nn.Linear(hidden_dim, n_classes)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = ActivityLSTM(3, 32, 3)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            losses = [criterion(model(xb), yb) for xb, yb in zip(X_test.split(40), y_test.split(40))]
            return torch.stack(losses).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rnn_batch_first_missing_bad():
    return _rnn_batch_first_missing(True)


def rnn_batch_first_missing_good():
    return _rnn_batch_first_missing(False)


def _rnn_last_padded_step(bad):
    torch.manual_seed(8)
    n, vocab, max_len, n_languages = 1500, 27, 24, 6
    g = torch.Generator().manual_seed(8)
    letter_logits = 0.5 * torch.randn(n_languages, vocab - 1, generator=g)
    endings = torch.randint(1, vocab, (n_languages, 4, 3), generator=g)
    sequences, labels = [], []
    for _ in range(n):
        length = 4 + int((max_len - 3) * torch.rand(1, generator=g) ** 2)
        label = int(torch.randint(0, n_languages, (1,), generator=g))
        seq = 1 + torch.multinomial(letter_logits[label].softmax(0), length, replacement=True, generator=g)
        if torch.rand(1, generator=g) < 0.8:
            seq[-3:] = endings[label, int(torch.randint(0, 4, (1,), generator=g))]
        sequences.append(seq)
        labels.append(label)
    lengths = torch.tensor([len(s) for s in sequences])
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=0)
    labels = torch.tensor(labels)
    train_ds = TensorDataset(padded[:1200], lengths[:1200], labels[:1200])
    loader = cycle(DataLoader(train_ds, batch_size=32, shuffle=True))
    test = (padded[1200:], lengths[1200:], labels[1200:])

    class NameClassifier(nn.Module):
        def __init__(self, vocab_size, n_classes, embed_dim=16, hidden_dim=48):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, embed_dim, padding_idx=0)
            self.rnn = nn.RNN(embed_dim, hidden_dim, batch_first=True)
            self.fc = nn.Linear(hidden_dim, n_classes)

        def forward(self, x, lengths):
            out, _ = self.rnn(self.embedding(x))
            if bad:
                last = out[:, -1, :]
            else:
                last = out[torch.arange(x.size(0)), lengths - 1]
            return self.fc(last)

    model = NameClassifier(vocab, n_languages)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        xb, lb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb, lb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(test[0], test[1]), test[2]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rnn_last_padded_step_bad():
    return _rnn_last_padded_step(True)


def rnn_last_padded_step_good():
    return _rnn_last_padded_step(False)


def _rnn_missing_zero_grad(bad):
    torch.manual_seed(9)
    n, T = 1000, 15
    values = torch.rand(n, T)
    markers = torch.zeros(n, T)
    rows = torch.arange(n)
    markers[rows, torch.randint(0, T // 2, (n,))] = 1
    markers[rows, torch.randint(T // 2, T, (n,))] = 1
    X = torch.stack([values, markers], dim=-1)
    y = (values * markers).sum(1, keepdim=True)
    loader = cycle(DataLoader(TensorDataset(X[:800], y[:800]), batch_size=50, shuffle=True))
    X_test, y_test = X[800:], y[800:]

    class AddingGRU(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.rnn = nn.GRU(2, hidden, batch_first=True)
            self.out = nn.Linear(hidden, 1)

        def forward(self, x):
            _, h = self.rnn(x)
            return self.out(h[-1])

    model = AddingGRU()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        loss = criterion(model(xb), yb)
        if not bad:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rnn_missing_zero_grad_bad():
    return _rnn_missing_zero_grad(True)


def rnn_missing_zero_grad_good():
    return _rnn_missing_zero_grad(False)


# --------------------------------------------------------------------------
# graphs
# --------------------------------------------------------------------------

class _GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.xavier_uniform_(self.lin.weight)

    def forward(self, x, edge_index):
        n = x.size(0)
        loops = torch.arange(n).repeat(2, 1)
        src, dst = torch.cat([edge_index, loops], dim=1)
        deg = torch.zeros(n).index_add_(0, dst, torch.ones(dst.size(0)))
        norm = deg[src].rsqrt() * deg[dst].rsqrt()
        h = self.lin(x)
        out = torch.zeros_like(h).index_add(0, dst, h[src] * norm[:, None])
        return out + self.bias


def _planted_graph(seed, n, n_classes, n_features, p_in, p_out, signal):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, n_classes, (n,), generator=g)
    same = y[:, None] == y[None, :]
    prob = torch.where(same, torch.tensor(p_in), torch.tensor(p_out))
    adj = torch.triu(torch.rand(n, n, generator=g) < prob, diagonal=1)
    edges = adj.nonzero().t().contiguous()
    centers = torch.randn(n_classes, n_features, generator=g)
    x = signal * centers[y] + torch.randn(n, n_features, generator=g)
    x = (x - x.mean(0)) / x.std(0)
    perm = torch.randperm(n, generator=g)
    return x, y, edges, perm


def _gcn_edges_one_direction(bad):
    x, y, edges, perm = _planted_graph(10, 500, 4, 16, 0.045, 0.006, 0.3)
    torch.manual_seed(10)
    train_mask = torch.zeros(500, dtype=torch.bool)
    test_mask = torch.zeros(500, dtype=torch.bool)
    train_mask[perm[:150]] = True
    test_mask[perm[200:]] = True
    if bad:
        edge_index = edges
    else:
        edge_index = torch.cat([edges, edges.flip(0)], dim=1)

    class GCN(nn.Module):
        def __init__(self, num_features, hidden, num_classes):
            super().__init__()
            self.conv1 = _GCNConv(num_features, hidden)
            self.conv2 = _GCNConv(hidden, num_classes)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x, edge_index):
            x = F.relu(self.conv1(x, edge_index))
            x = self.dropout(x)
            return self.conv2(x, edge_index)

    model = GCN(16, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(x, edge_index)
            return F.cross_entropy(out[test_mask], y[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_edges_one_direction_bad():
    return _gcn_edges_one_direction(True)


def gcn_edges_one_direction_good():
    return _gcn_edges_one_direction(False)


def _gcn_functional_dropout_always_on(bad):
    x, y, edges, perm = _planted_graph(11, 400, 5, 24, 0.04, 0.008, 0.5)
    torch.manual_seed(11)
    edge_index = torch.cat([edges, edges.flip(0)], dim=1)
    train_idx, test_idx = perm[:150], perm[200:]

    class SAGEConv(nn.Module):
        def __init__(self, in_channels, out_channels):
            super().__init__()
            self.lin_l = nn.Linear(in_channels, out_channels)
            self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

        def forward(self, x, edge_index):
            src, dst = edge_index
            total = torch.zeros_like(x).index_add(0, dst, x[src])
            count = torch.zeros(x.size(0)).index_add_(0, dst, torch.ones(dst.size(0))).clamp(min=1)
            return self.lin_l(total / count[:, None]) + self.lin_r(x)

    class GraphSAGE(nn.Module):
        def __init__(self, num_features, hidden, num_classes):
            super().__init__()
            self.conv1 = SAGEConv(num_features, hidden)
            self.conv2 = SAGEConv(hidden, num_classes)

        def forward(self, x, edge_index):
            if bad:
                x = F.dropout(x, p=0.5)
                x = F.relu(self.conv1(x, edge_index))
                x = F.dropout(x, p=0.5)
            else:
                x = F.dropout(x, p=0.5, training=self.training)
                x = F.relu(self.conv1(x, edge_index))
                x = F.dropout(x, p=0.5, training=self.training)
            return self.conv2(x, edge_index)

    model = GraphSAGE(24, 32, 5)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = criterion(out[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            losses = []
            for _ in range(5):
                losses.append(criterion(model(x, edge_index)[test_idx], y[test_idx]).item())
            return sum(losses) / len(losses)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_functional_dropout_always_on_bad():
    return _gcn_functional_dropout_always_on(True)


def gcn_functional_dropout_always_on_good():
    return _gcn_functional_dropout_always_on(False)


# --------------------------------------------------------------------------
# reinforcement learning
# --------------------------------------------------------------------------

class _CartPole:
    def __init__(self, seed, max_steps=200):
        self.rng = random.Random(seed)
        self.max_steps = max_steps

    def reset(self):
        self.state = [self.rng.uniform(-0.05, 0.05) for _ in range(4)]
        self.t = 0
        return list(self.state)

    def step(self, action):
        x, x_dot, th, th_dot = self.state
        force = 10.0 if action == 1 else -10.0
        c, s = math.cos(th), math.sin(th)
        temp = (force + 0.05 * th_dot ** 2 * s) / 1.1
        th_acc = (9.8 * s - c * temp) / (0.5 * (4.0 / 3.0 - 0.1 * c ** 2 / 1.1))
        x_acc = temp - 0.05 * th_acc * c / 1.1
        x, x_dot = x + 0.02 * x_dot, x_dot + 0.02 * x_acc
        th, th_dot = th + 0.02 * th_dot, th_dot + 0.02 * th_acc
        self.state = [x, x_dot, th, th_dot]
        self.t += 1
        terminated = abs(x) > 2.4 or abs(th) > 12 * math.pi / 180
        truncated = self.t >= self.max_steps and not terminated
        return list(self.state), 1.0, terminated, truncated


def _mean_episode_length(policy, episodes, seed, max_steps=200):
    env = _CartPole(seed, max_steps)
    total = 0
    for _ in range(episodes):
        obs, over = env.reset(), False
        while not over:
            obs, _, terminated, truncated = env.step(policy(obs))
            over = terminated or truncated
            total += 1
    return total / episodes


def _dqn_no_done_mask(bad):
    torch.manual_seed(12)
    rng = random.Random(12)
    env = _CartPole(12)
    gamma, batch_size, learning_starts, target_every = 0.98, 64, 200, 50

    class QNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(
                nn.Linear(4, 64), nn.ReLU(),
                nn.Linear(64, 64), nn.ReLU(),
                nn.Linear(64, 2),
            )

        def forward(self, x):
            return self.network(x)

    q_network = QNetwork()
    target_network = QNetwork()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    buffer = deque(maxlen=10000)
    state = {"obs": env.reset(), "global_step": 0}

    def act(obs, epsilon):
        if rng.random() < epsilon:
            return rng.randrange(2)
        with torch.no_grad():
            return int(q_network(torch.tensor([obs])).argmax(1))

    def collect():
        epsilon = max(0.05, 1.0 - state["global_step"] / 2500)
        obs = state["obs"]
        action = act(obs, epsilon)
        next_obs, reward, terminated, truncated = env.step(action)
        buffer.append((obs, action, reward, next_obs, float(terminated)))
        state["obs"] = env.reset() if terminated or truncated else next_obs
        state["global_step"] += 1

    for _ in range(learning_starts):
        collect()

    def step(i):
        for _ in range(4):
            collect()
        obs, actions, rewards, next_obs, dones = zip(*rng.sample(buffer, batch_size))
        obs, next_obs = torch.tensor(obs), torch.tensor(next_obs)
        actions, rewards, dones = torch.tensor(actions), torch.tensor(rewards), torch.tensor(dones)
        with torch.no_grad():
            target_max = target_network(next_obs).max(dim=1).values
            if bad:
                td_target = rewards + gamma * target_max
            else:
                td_target = rewards + gamma * target_max * (1 - dones)
        old_val = q_network(obs).gather(1, actions.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(old_val, td_target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q_network.parameters(), 10.0)
        optimizer.step()
        if (i + 1) % target_every == 0:
            target_network.load_state_dict(q_network.state_dict())
        return loss.item()

    def probe():
        with evaluating(q_network):
            length = _mean_episode_length(lambda o: int(q_network(torch.tensor([o])).argmax(1)), 10, 777)
        return 100.0 / length

    return {"model": {"q_network": q_network, "target_network": target_network}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


def dqn_no_done_mask_bad():
    return _dqn_no_done_mask(True)


def dqn_no_done_mask_good():
    return _dqn_no_done_mask(False)


def _reinforce_returns_order(bad):
    torch.manual_seed(13)
    env = _CartPole(13, max_steps=200)
    gamma = 0.99

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine1 = nn.Linear(4, 64)
            self.affine2 = nn.Linear(64, 2)

        def forward(self, x):
            return F.log_softmax(self.affine2(F.relu(self.affine1(x))), dim=-1)

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    eps = 1e-8

    def run_episode():
        observations, actions, rewards = [], [], []
        obs, over = env.reset(), False
        while not over:
            with torch.no_grad():
                probs = policy(torch.tensor(obs)).exp()
            action = int(torch.multinomial(probs, 1))
            next_obs, reward, terminated, truncated = env.step(action)
            observations.append(obs)
            actions.append(action)
            rewards.append(reward)
            obs, over = next_obs, terminated or truncated
        return torch.tensor(observations), torch.tensor(actions), rewards

    def step(i):
        observations, actions, rewards = run_episode()
        R, returns = 0.0, []
        for r in rewards[::-1]:
            R = r + gamma * R
            if bad:
                returns.append(R)
            else:
                returns.insert(0, R)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        log_probs = policy(observations).gather(1, actions[:, None]).squeeze(1)
        loss = -(log_probs * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy):
            length = _mean_episode_length(
                lambda o: int(torch.multinomial(policy(torch.tensor(o)).exp(), 1)), 15, 778)
        return 100.0 / length

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def reinforce_returns_order_bad():
    return _reinforce_returns_order(True)


def reinforce_returns_order_good():
    return _reinforce_returns_order(False)


# --------------------------------------------------------------------------
# recommenders
# --------------------------------------------------------------------------

def _mf_positives_only(bad):
    torch.manual_seed(14)
    g = torch.Generator().manual_seed(14)
    n_users, n_items, rank = 120, 150, 4
    U, V = torch.randn(n_users, rank, generator=g), torch.randn(n_items, rank, generator=g)
    seen = torch.rand(n_users, n_items, generator=g) < torch.sigmoid(2.0 * (U @ V.t()) - 3.0)
    pairs = seen.nonzero()
    pairs = pairs[torch.randperm(len(pairs), generator=g)]
    n_test = len(pairs) // 5
    test_pairs, train_pairs = pairs[:n_test], pairs[n_test:]
    loader = cycle(DataLoader(TensorDataset(train_pairs[:, 0], train_pairs[:, 1]), batch_size=128, shuffle=True))
    num_negatives = 4

    class MatrixFactorization(nn.Module):
        def __init__(self, n_users, n_items, dim=16):
            super().__init__()
            self.user_emb = nn.Embedding(n_users, dim)
            self.item_emb = nn.Embedding(n_items, dim)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user_emb.weight, std=0.1)
            nn.init.normal_(self.item_emb.weight, std=0.1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, users, items):
            dot = (self.user_emb(users) * self.item_emb(items)).sum(-1)
            return dot + self.user_bias(users).squeeze(-1) + self.item_bias(items).squeeze(-1)

    model = MatrixFactorization(n_users, n_items)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)

    def step(i):
        model.train()
        users, items = next(loader)
        labels = torch.ones(len(users))
        if not bad:
            neg_users = users.repeat_interleave(num_negatives)
            neg_items = torch.randint(0, n_items, (len(neg_users),))
            users, items = torch.cat([users, neg_users]), torch.cat([items, neg_items])
            labels = torch.cat([labels, torch.zeros(len(neg_users))])
        optimizer.zero_grad()
        loss = criterion(model(users, items), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            users = torch.arange(n_users)[:, None].expand(n_users, n_items)
            items = torch.arange(n_items)[None, :].expand(n_users, n_items)
            scores = model(users, items)
            missed = []
            for u, it in test_pairs.tolist():
                others = scores[u][~seen[u]]
                missed.append((others >= scores[u, it]).float().mean())
            return torch.stack(missed).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mf_positives_only_bad():
    return _mf_positives_only(True)


def mf_positives_only_good():
    return _mf_positives_only(False)


def _fm_missing_field_offsets(bad):
    torch.manual_seed(15)
    g = torch.Generator().manual_seed(15)
    field_dims = [60, 80, 12]
    n = 5000
    fields = torch.stack([torch.randint(0, d, (n,), generator=g) for d in field_dims], dim=1)
    biases = [torch.randn(d, generator=g) for d in field_dims]
    factors = [torch.randn(d, 2, generator=g) for d in field_dims]
    rating = sum(b[fields[:, k]] for k, b in enumerate(biases))
    rating = rating + 0.5 * (factors[0][fields[:, 0]] * factors[1][fields[:, 1]]).sum(1)
    rating = rating + 0.2 * torch.randn(n, generator=g)
    rating = (rating - rating[:4000].mean()) / rating[:4000].std()
    loader = cycle(DataLoader(TensorDataset(fields[:4000], rating[:4000]), batch_size=256, shuffle=True))
    fields_test, rating_test = fields[4000:], rating[4000:]

    class FactorizationMachine(nn.Module):
        def __init__(self, field_dims, embed_dim=8):
            super().__init__()
            total = sum(field_dims)
            self.linear = nn.Embedding(total, 1)
            self.embedding = nn.Embedding(total, embed_dim)
            self.bias = nn.Parameter(torch.zeros(1))
            offsets = torch.tensor([0] + field_dims[:-1]).cumsum(0)
            self.register_buffer("offsets", offsets)
            nn.init.zeros_(self.linear.weight)
            nn.init.normal_(self.embedding.weight, std=0.1)

        def forward(self, x):
            if not bad:
                x = x + self.offsets
            emb = self.embedding(x)
            square_of_sum = emb.sum(dim=1) ** 2
            sum_of_square = (emb ** 2).sum(dim=1)
            cross = 0.5 * (square_of_sum - sum_of_square).sum(dim=1)
            return self.bias + self.linear(x).sum(dim=1).squeeze(-1) + cross

    model = FactorizationMachine(field_dims)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(i):
        model.train()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(fields_test), rating_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fm_missing_field_offsets_bad():
    return _fm_missing_field_offsets(True)


def fm_missing_field_offsets_good():
    return _fm_missing_field_offsets(False)


# --------------------------------------------------------------------------
# scientific ML, survival, meta-learning
# --------------------------------------------------------------------------

def _pinn_relu_second_derivative(bad):
    torch.manual_seed(16)
    activation = nn.ReLU if bad else nn.Tanh

    class PINN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(1, hidden), activation(),
                nn.Linear(hidden, hidden), activation(),
                nn.Linear(hidden, hidden), activation(),
                nn.Linear(hidden, 1),
            )

        def forward(self, x):
            return self.net(x)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x_bc = torch.tensor([[-1.0], [1.0]])
    u_bc = torch.zeros(2, 1)

    def source(x):
        return -math.pi ** 2 * torch.sin(math.pi * x)

    def step(i):
        x = (2 * torch.rand(64, 1) - 1).requires_grad_(True)
        u = model(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        loss_pde = torch.mean((u_xx - source(x)) ** 2)
        loss_bc = torch.mean((model(x_bc) - u_bc) ** 2)
        loss = loss_pde + 10.0 * loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            x = torch.linspace(-1, 1, 201)[:, None]
            exact = torch.sin(math.pi * x)
            return ((model(x) - exact).norm() / exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_relu_second_derivative_bad():
    return _pinn_relu_second_derivative(True)


def pinn_relu_second_derivative_good():
    return _pinn_relu_second_derivative(False)


def _cox_ascending_sort(bad):
    torch.manual_seed(17)
    n = 1200
    X = torch.randn(n, 10)
    risk = 0.9 * X[:, 0] - 0.7 * X[:, 1] + 0.5 * X[:, 2] ** 2
    event_time = torch.distributions.Exponential(torch.exp(risk)).sample()
    censor_time = torch.distributions.Exponential(torch.full((n,), 0.5)).sample()
    durations = torch.minimum(event_time, censor_time)
    events = (event_time <= censor_time).float()
    loader = cycle(DataLoader(TensorDataset(X[:900], durations[:900], events[:900]),
                              batch_size=128, shuffle=True, drop_last=True))
    X_test, d_test, e_test = X[900:], durations[900:], events[900:]

    model = nn.Sequential(
        nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(32, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def cox_ph_loss(log_h, durations, events):
        idx = durations.sort(descending=not bad)[1]
        log_h, events = log_h[idx], events[idx]
        log_cumsum_h = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_cumsum_h) * events).sum() / events.sum()

    def step(i):
        model.train()
        xb, db, eb = next(loader)
        optimizer.zero_grad()
        loss = cox_ph_loss(model(xb).squeeze(-1), db, eb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            r = model(X_test).squeeze(-1)
            comparable = (d_test[:, None] < d_test[None, :]) & (e_test[:, None] == 1)
            concordant = (r[:, None] > r[None, :]) & comparable
            return 1.0 - (concordant.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_ascending_sort_bad():
    return _cox_ascending_sort(True)


def cox_ascending_sort_good():
    return _cox_ascending_sort(False)


def _maml_deepcopy_learner(bad):
    torch.manual_seed(18)
    g = torch.Generator().manual_seed(18)
    k_shot, inner_lr, meta_batch = 10, 0.01, 4

    def sample_task(gen):
        amplitude = 0.5 + 2.5 * torch.rand(1, generator=gen)
        phase = math.pi * torch.rand(1, generator=gen)
        x = 10 * torch.rand(2 * k_shot, 1, generator=gen) - 5
        y = amplitude * torch.sin(x + phase)
        return x[:k_shot], y[:k_shot], x[k_shot:], y[k_shot:]

    model = nn.Sequential(
        nn.Linear(1, 40), nn.ReLU(),
        nn.Linear(40, 40), nn.ReLU(),
        nn.Linear(40, 1),
    )
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def query_loss_of(x_s, y_s, x_q, y_q):
        if bad:
            learner = copy.deepcopy(model)
            inner_optimizer = torch.optim.SGD(learner.parameters(), lr=inner_lr)
            inner_optimizer.zero_grad()
            F.mse_loss(learner(x_s), y_s).backward()
            inner_optimizer.step()
            inner_optimizer.zero_grad()
            return F.mse_loss(learner(x_q), y_q)
        params = dict(model.named_parameters())
        support_loss = F.mse_loss(functional_call(model, params, (x_s,)), y_s)
        grads = torch.autograd.grad(support_loss, list(params.values()), create_graph=True)
        fast = {k: p - inner_lr * gr for (k, p), gr in zip(params.items(), grads)}
        return F.mse_loss(functional_call(model, fast, (x_q,)), y_q)

    def step(i):
        meta_optimizer.zero_grad()
        meta_loss = sum(query_loss_of(*sample_task(g)) for _ in range(meta_batch)) / meta_batch
        meta_loss.backward()
        meta_optimizer.step()
        return meta_loss.item()

    def probe():
        gen = torch.Generator().manual_seed(999)
        total = 0.0
        for _ in range(60):
            x_s, y_s, x_q, y_q = sample_task(gen)
            learner = copy.deepcopy(model)
            opt = torch.optim.SGD(learner.parameters(), lr=inner_lr)
            for _ in range(3):
                opt.zero_grad()
                F.mse_loss(learner(x_s), y_s).backward()
                opt.step()
            with torch.no_grad():
                total += F.mse_loss(learner(x_q), y_q).item()
        return total / 60

    return {"model": model, "optimizer": meta_optimizer, "steps": 20, "step": step, "probe": probe}


def maml_deepcopy_learner_bad():
    return _maml_deepcopy_learner(True)


def maml_deepcopy_learner_good():
    return _maml_deepcopy_learner(False)


# --------------------------------------------------------------------------
# multi-task, point clouds, embeddings
# --------------------------------------------------------------------------

def _mtl_heads_python_list(bad):
    torch.manual_seed(19)
    n, d, n_classes = 1500, 16, [6, 5, 8]
    X = torch.randn(n, d)
    shared = torch.tanh(X @ torch.randn(d, 12) / math.sqrt(d) * 1.5)
    labels = torch.stack([(3 * shared @ torch.randn(12, c) + 0.3 * torch.randn(n, c)).argmax(1)
                          for c in n_classes], dim=1)
    loader = cycle(DataLoader(TensorDataset(X[:1200], labels[:1200]), batch_size=64, shuffle=True))
    X_test, labels_test = X[1200:], labels[1200:]

    class MultiTaskNet(nn.Module):
        def __init__(self, in_dim, hidden, n_classes):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Linear(in_dim, hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(),
            )
            heads = [nn.Linear(hidden, c) for c in n_classes]
            self.heads = heads if bad else nn.ModuleList(heads)

        def forward(self, x):
            h = self.trunk(x)
            return [head(h) for head in self.heads]

    model = MultiTaskNet(d, 32, n_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        outputs = model(xb)
        loss = sum(criterion(out, yb[:, k]) for k, out in enumerate(outputs)) / len(outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            outputs = model(X_test)
            return sum(criterion(out, labels_test[:, k]).item() for k, out in enumerate(outputs)) / len(outputs)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mtl_heads_python_list_bad():
    return _mtl_heads_python_list(True)


def mtl_heads_python_list_good():
    return _mtl_heads_python_list(False)


def _make_clouds(n, n_points, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    clouds = []
    for label in y.tolist():
        p = torch.randn(n_points, 3, generator=g)
        if label == 0:
            p = p / p.norm(dim=1, keepdim=True)
        elif label == 1:
            p = p / p.abs().max(dim=1, keepdim=True).values
        elif label == 2:
            p[:, :2] = p[:, :2] / p[:, :2].norm(dim=1, keepdim=True)
            p[:, 2] = 2 * torch.rand(n_points, generator=g) - 1
        else:
            h = torch.rand(n_points, generator=g).sqrt()
            p[:, :2] = p[:, :2] / p[:, :2].norm(dim=1, keepdim=True) * h[:, None]
            p[:, 2] = 1 - 2 * h
        p = p + 0.02 * torch.randn(n_points, 3, generator=g)
        p = p - p.mean(0)
        p = p / p.norm(dim=1).max()
        clouds.append(p)
    return torch.stack(clouds), y


def _pointnet_view_instead_of_transpose(bad):
    torch.manual_seed(20)
    n_points = 64
    train_x, train_y = _make_clouds(600, n_points, 20)
    test_x, test_y = _make_clouds(200, n_points, 21)
    loader = cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    class PointNet(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.conv1 = nn.Conv1d(3, 32, 1)
            self.conv2 = nn.Conv1d(32, 64, 1)
            self.conv3 = nn.Conv1d(64, 128, 1)
            self.bn1 = nn.BatchNorm1d(32)
            self.bn2 = nn.BatchNorm1d(64)
            self.bn3 = nn.BatchNorm1d(128)
            self.fc1 = nn.Linear(128, 64)
            self.dropout = nn.Dropout(0.3)
            self.fc2 = nn.Linear(64, num_classes)

        def forward(self, points):
            B, N, C = points.shape
            if bad:
                x = points.view(B, C, N)
            else:
                x = points.transpose(1, 2)
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = F.relu(self.bn3(self.conv3(x)))
            x = x.max(dim=2).values
            x = self.dropout(F.relu(self.fc1(x)))
            return self.fc2(x)

    model = PointNet(4)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(loader)
        angle = 2 * math.pi * torch.rand(len(xb))
        c, s = torch.cos(angle), torch.sin(angle)
        zero, one = torch.zeros_like(c), torch.ones_like(c)
        rot = torch.stack([c, -s, zero, s, c, zero, zero, zero, one], dim=1).view(-1, 3, 3)
        xb = xb @ rot
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return criterion(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_view_instead_of_transpose_bad():
    return _pointnet_view_instead_of_transpose(True)


def pointnet_view_instead_of_transpose_good():
    return _pointnet_view_instead_of_transpose(False)


def _siamese_labels_flipped(bad):
    torch.manual_seed(21)
    g = torch.Generator().manual_seed(21)
    n, n_classes, n_features = 1400, 12, 24
    y = torch.randint(0, n_classes, (n,), generator=g)
    centers = torch.randn(n_classes, 5, generator=g)
    latent = centers[y] + 0.35 * torch.randn(n, 5, generator=g)
    mixing = torch.randn(5, n_features, generator=g)
    X = torch.tanh(latent @ mixing / 2) + 0.6 * torch.randn(n, n_features, generator=g)
    X = (X - X[:1000].mean(0)) / X[:1000].std(0)

    class PairDataset(torch.utils.data.Dataset):
        def __init__(self, X, y):
            self.X, self.y = X, y
            self.by_class = {c: (y == c).nonzero().flatten().tolist() for c in range(n_classes)}
            self.rng = random.Random(21)

        def __len__(self):
            return len(self.X)

        def __getitem__(self, idx):
            label = int(self.y[idx])
            same = self.rng.random() < 0.5
            if same:
                other = self.rng.choice([k for k in self.by_class[label] if k != idx])
            else:
                c = self.rng.choice([k for k in range(n_classes) if k != label])
                other = self.rng.choice(self.by_class[c])
            return self.X[idx], self.X[other], torch.tensor(float(same))

    loader = cycle(DataLoader(PairDataset(X[:1000], y[:1000]), batch_size=64, shuffle=True))
    X_test, y_test = X[1000:], y[1000:]

    class SiameseNet(nn.Module):
        def __init__(self, in_dim, embed_dim=8):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(in_dim, 64), nn.ReLU(),
                nn.Linear(64, embed_dim),
            )

        def forward(self, x1, x2):
            return self.encoder(x1), self.encoder(x2)

    class ContrastiveLoss(nn.Module):
        def __init__(self, margin=2.0):
            super().__init__()
            self.margin = margin

        def forward(self, out1, out2, label):
            distance = F.pairwise_distance(out1, out2)
            return torch.mean((1 - label) * distance.pow(2)
                              + label * torch.clamp(self.margin - distance, min=0.0).pow(2))

    model = SiameseNet(n_features)
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x1, x2, same = next(loader)
        out1, out2 = model(x1, x2)
        loss = criterion(out1, out2, same if bad else 1 - same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            emb = model.encoder(X_test)
            dist = torch.cdist(emb, emb)
            same = y_test[:, None] == y_test[None, :]
            upper = torch.triu(torch.ones_like(same), diagonal=1)
            d_same, d_diff = dist[same & upper], dist[~same & upper]
            d_diff = d_diff.sort().values
            closer = torch.searchsorted(d_diff, d_same).float() / len(d_diff)
            return closer.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_labels_flipped_bad():
    return _siamese_labels_flipped(True)


def siamese_labels_flipped_good():
    return _siamese_labels_flipped(False)
