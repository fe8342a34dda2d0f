import math
import random
from collections import deque
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


CASES = [
    {"name": "tabular_softmax_before_ce", "what": "The MLP classifier ends in nn.Softmax and its output goes into nn.CrossEntropyLoss, which applies log-softmax again; gradients are flattened and the classifier learns slowly and poorly."},
    {"name": "tabular_mse_broadcast", "what": "Predictions are (B, 1) and targets (B,), so MSELoss broadcasts to (B, B) and the regressor learns only the mean of the target."},
    {"name": "fraud_class_weights_as_sampler_weights", "what": "WeightedRandomSampler is given the two class weights instead of one weight per sample, so every batch consists of rows 0 and 1 only."},
    {"name": "tabular_eval_mode_left_on", "what": "The validation function calls model.eval() and the training loop never goes back to model.train(), so dropout and batch norm are off for the rest of training and the small data set is overfitted."},
    {"name": "forecast_target_is_last_input", "what": "The sliding window's target is series[i + L - 1], the last value of the input window, instead of series[i + L]; the forecaster learns to copy its input."},
    {"name": "forecast_steplr_per_batch", "what": "StepLR(step_size=10) is meant in epochs but scheduler.step() is called after every batch, so the learning rate decays to nothing within a few epochs."},
    {"name": "lstm_batch_first_missing", "what": "nn.LSTM is fed (batch, time, feature) without batch_first=True, so it recurs over the samples of the batch and only the last time step reaches the classifier."},
    {"name": "gru_last_padded_step", "what": "Sequences of different length are padded and out[:, -1] is taken as the summary, i.e. the state after running over the padding, instead of the state at each sequence's last real step."},
    {"name": "rnn_hidden_detached_in_loop", "what": "The hidden state is detached at every time step inside the sequence loop, so no gradient flows back in time and the cell cannot learn the delayed dependency."},
    {"name": "graph_collate_no_offset", "what": "The hand-written collate concatenates the graphs' edge_index without adding the node offset, so all edges of a batch lie among the nodes of its first graphs and the other graphs get no messages."},
    {"name": "gcn_dropout_always_on", "what": "F.dropout is called without training=self.training, so dropout stays active in eval mode and predictions are noisy."},
    {"name": "dqn_no_done_mask", "what": "The TD target bootstraps from the next state also on terminal transitions (no (1 - done) factor), so falling costs nothing and Q values drift to r / (1 - gamma)."},
    {"name": "reinforce_returns_forward", "what": "The discounted returns are accumulated from the first reward forward instead of from the last backward, so every action is credited with the rewards before it."},
    {"name": "mf_implicit_positives_only", "what": "Implicit-feedback matrix factorisation is trained with BCE on observed interactions only, all labelled 1, without negative samples; it learns to say yes to everything."},
    {"name": "sasrec_no_causal_mask", "what": "The self-attentive sequential recommender is trained on next items at every position without a causal mask, so each position can look at the item that it must predict."},
    {"name": "pinn_relu_second_derivative", "what": "The PINN for a second-order equation uses ReLU, whose second derivative is zero everywhere, so the residual gives no gradient and the solution follows from the boundary alone."},
    {"name": "cox_risk_set_ascending", "what": "The Cox partial likelihood takes a cumulative log-sum-exp after sorting durations in ascending order, so the risk set contains those who left before the event instead of those still at risk."},
    {"name": "maml_meta_loss_on_support", "what": "The outer (meta) loss is computed on the support set that was used for the adaptation instead of the query set, so meta-training rewards memorising the shots."},
    {"name": "multitask_missing_labels_as_negative", "what": "Missing task labels (NaN) are filled with 0 and enter the BCE as negatives instead of being masked; all probabilities are pulled down."},
    {"name": "pointnet_view_instead_of_transpose", "what": "(B, N, 3) points are brought to (B, 3, N) by view instead of transpose, which mixes up coordinates of different points."},
    {"name": "embedding_replaced_after_optimizer", "what": "The optimizer is built before the embedding layer is replaced by one with pretrained vectors, so it holds the discarded table and the new one is never fine-tuned."},
    {"name": "ctr_zero_grad_missing", "what": "optimizer.zero_grad() is never called, so gradients of all earlier batches accumulate and each update follows the stale sum."},
]


def _cycle(loader):
    while True:
        for batch in loader:
            yield batch


@contextmanager
def _evaluating(*models):
    modes = [[(m, m.training) for m in model.modules()] for model in models]
    for model in models:
        model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        yield
    for saved in modes:
        for m, flag in saved:
            m.training = flag


def _standardize(train, *others):
    mean, std = train.mean(0), train.std(0) + 1e-8
    return tuple((x - mean) / std for x in (train,) + others)


# ----------------------------------------------------------------------------
# tabular classification, covertype style


class TabularMLP(nn.Module):
    def __init__(self, n_features, n_classes, hidden=64, softmax=False):
        super().__init__()
        layers = [
            nn.Linear(n_features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, n_classes),
        ]
        if softmax:
            layers.append(nn.Softmax(dim=1))
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


def _tabular_softmax(switch):
    torch.manual_seed(0)
    n, d, k = 4000, 20, 12
    centers = torch.randn(3 * k, d) * 0.9
    comp = torch.randint(0, 3 * k, (n,))
    X = centers[comp] + torch.randn(n, d) * 0.8
    y = comp % k
    X_train, y_train, X_test, y_test = X[:3000], y[:3000], X[3000:], y[3000:]
    X_train, X_test = _standardize(X_train, X_test)
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True, drop_last=True))

    model = TabularMLP(d, k, softmax=switch)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return (model(X_test).argmax(1) != y_test).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_softmax_before_ce_bad():
    return _tabular_softmax(True)


def tabular_softmax_before_ce_good():
    return _tabular_softmax(False)


# ----------------------------------------------------------------------------
# tabular regression, house prices style


def _tabular_mse(switch):
    torch.manual_seed(1)
    n, d = 2400, 8
    X = torch.randn(n, d)
    y = 1.5 * X[:, 0] - X[:, 1] + torch.sin(2 * X[:, 2]) + 0.5 * X[:, 3] * X[:, 4] + 0.2 * torch.randn(n)
    X_train, X_test = _standardize(X[:2000], X[2000:])
    y_train, y_test = _standardize(y[:2000], y[2000:])
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True, drop_last=True))

    model = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        inputs, targets = next(batches)
        if not switch:
            targets = targets.unsqueeze(1)
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return ((model(X_test).squeeze(1) - y_test) ** 2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_mse_broadcast_bad():
    return _tabular_mse(True)


def tabular_mse_broadcast_good():
    return _tabular_mse(False)


# ----------------------------------------------------------------------------
# imbalanced tabular data, credit card fraud style


class FraudDataset(Dataset):
    def __init__(self, X, y):
        self.X = X
        self.y = y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, idx):
        return self.X[idx], self.y[idx]


def _fraud(switch):
    torch.manual_seed(2)
    n, d = 5000, 12
    y = (torch.rand(n) < 0.08).long()
    X = torch.randn(n, d)
    X[:, :4] += 1.1 * y[:, None]
    X[:, 4] *= 1 + y
    X_train, X_test = _standardize(X[:4000], X[4000:])
    y_train, y_test = y[:4000], y[4000:]

    class_counts = torch.bincount(y_train)
    class_weights = 1.0 / class_counts.float()
    weights = class_weights if switch else class_weights[y_train]
    train_set = FraudDataset(X_train, y_train)
    sampler = WeightedRandomSampler(weights, num_samples=len(train_set), replacement=True)
    batches = _cycle(DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True))

    model = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            pred = model(X_test).argmax(1)
            errors = [(pred[y_test == c] != c).float().mean() for c in (0, 1)]
            return torch.stack(errors).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fraud_class_weights_as_sampler_weights_bad():
    return _fraud(True)


def fraud_class_weights_as_sampler_weights_good():
    return _fraud(False)


# ----------------------------------------------------------------------------
# small clinical table


def _tabular_eval(switch):
    torch.manual_seed(3)
    n, d = 1800, 20
    X = torch.randn(n, d)
    logits = 1.8 * X[:, 0] - 1.5 * X[:, 1] + X[:, 2] + X[:, 3] * X[:, 4]
    y = (torch.rand(n) < torch.sigmoid(logits)).float()
    X_train, X_val, X_test = _standardize(X[:640], X[640:800], X[800:])
    y_train, y_val, y_test = y[:640], y[640:800], y[800:]
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=64, shuffle=True, drop_last=True))
    val_loader = DataLoader(TensorDataset(X_val, y_val), batch_size=160)

    model = nn.Sequential(
        nn.Linear(d, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, 1),
    )
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    steps_per_epoch = len(X_train) // 64

    def validate():
        model.eval()
        total = 0.0
        with torch.no_grad():
            for xb, yb in val_loader:
                total += criterion(model(xb).squeeze(1), yb).item() * len(xb)
        return total / len(X_val)

    model.train()

    def step(i):
        if not switch:
            model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb).squeeze(1), yb)
        loss.backward()
        optimizer.step()
        if (i + 1) % steps_per_epoch == 0:
            history.append(validate())

    def probe():
        with _evaluating(model):
            return criterion(model(X_test).squeeze(1), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_eval_mode_left_on_bad():
    return _tabular_eval(True)


def tabular_eval_mode_left_on_good():
    return _tabular_eval(False)


# ----------------------------------------------------------------------------
# univariate forecasting with sliding windows


class LSTMForecaster(nn.Module):
    def __init__(self, input_size=1, hidden_size=32, num_layers=1):
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


def _forecast_window(switch):
    torch.manual_seed(4)
    seq_len = 24
    t = torch.arange(1500).float()
    series = torch.sin(2 * math.pi * t / 12) + 0.5 * torch.sin(2 * math.pi * t / 7) + 0.1 * torch.randn(1500)
    train, test = series[:1200], series[1200:]
    mean, std = train.mean(), train.std()
    train, test = (train - mean) / std, (test - mean) / std

    def create_sequences(data, horizon):
        xs, ys = [], []
        for i in range(len(data) - seq_len):
            xs.append(data[i:i + seq_len])
            ys.append(data[i + seq_len - 1 + horizon])
        return torch.stack(xs).unsqueeze(-1), torch.stack(ys).unsqueeze(-1)

    X_train, y_train = create_sequences(train, 0 if switch else 1)
    X_test, y_test = create_sequences(test, 1)
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True, drop_last=True))

    model = LSTMForecaster()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return criterion(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_target_is_last_input_bad():
    return _forecast_window(True)


def forecast_target_is_last_input_good():
    return _forecast_window(False)


# ----------------------------------------------------------------------------
# multi-horizon forecasting, N-BEATS style


class ForecastBlock(nn.Module):
    def __init__(self, lookback, horizon, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(lookback, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
        )
        self.backcast = nn.Linear(width, lookback)
        self.forecast = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.body(x)
        return x - self.backcast(h), self.forecast(h)


class NBeats(nn.Module):
    def __init__(self, lookback, horizon, n_blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList([ForecastBlock(lookback, horizon) for _ in range(n_blocks)])

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x, forecast = block(x)
            total = total + forecast
        return total


def _forecast_steplr(switch):
    torch.manual_seed(5)
    lookback, horizon = 28, 7
    t = torch.arange(800).float()
    series = (
        torch.sin(2 * math.pi * t / 7)
        + 0.6 * torch.cos(2 * math.pi * t / 30)
        + 0.4 * torch.sin(2 * math.pi * t / 7) * torch.cos(2 * math.pi * t / 90)
        + 0.1 * torch.randn(800)
    )
    mean, std = series[:660].mean(), series[:660].std()
    series = (series - mean) / std
    windows = series.unfold(0, lookback + horizon, 1)
    train_w, test_w = windows[:660 - lookback - horizon + 1], windows[660:]
    train_set = TensorDataset(train_w[:, :lookback], train_w[:, lookback:])
    loader = DataLoader(train_set, batch_size=64, shuffle=True)
    steps_per_epoch = len(loader)
    batches = _cycle(loader)

    model = NBeats(lookback, horizon)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.3)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if switch or (i + 1) % steps_per_epoch == 0:
            scheduler.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(test_w[:, :lookback]), test_w[:, lookback:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_steplr_per_batch_bad():
    return _forecast_steplr(True)


def forecast_steplr_per_batch_good():
    return _forecast_steplr(False)


# ----------------------------------------------------------------------------
# activity recognition from sensor windows with an LSTM


class ActivityLSTM(nn.Module):
    def __init__(self, n_features, hidden_dim, n_classes, batch_first):
        super().__init__()
        self.lstm = nn.LSTM(n_features, hidden_dim, batch_first=batch_first)
        self.fc = nn.Linear(hidden_dim, n_classes)

    def forward(self, x):
        out, (hn, cn) = self.lstm(x)
        return self.fc(out[:, -1, :])


def _sensor_windows(n, length, n_features, n_classes, gen):
    y = torch.randint(0, n_classes, (n,), generator=gen)
    t = torch.arange(length).float()
    freq = 0.05 + 0.05 * y.float()
    phase = torch.rand(n, n_features, generator=gen) * 2 * math.pi
    x = torch.sin(2 * math.pi * freq[:, None, None] * t[None, :, None] + phase[:, None, :])
    x = x + 0.3 * torch.randn(n, length, n_features, generator=gen)
    return x, y


def _activity(switch):
    torch.manual_seed(6)
    gen = torch.Generator().manual_seed(6)
    X_train, y_train = _sensor_windows(1500, 32, 6, 5, gen)
    X_test, y_test = _sensor_windows(480, 32, 6, 5, gen)
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True, drop_last=True))

    model = ActivityLSTM(6, 48, 5, batch_first=not switch)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            wrong = 0
            for xb, yb in zip(X_test.split(32), y_test.split(32)):
                wrong += (model(xb).argmax(1) != yb).sum().item()
            return wrong / len(y_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_batch_first_missing_bad():
    return _activity(True)


def lstm_batch_first_missing_good():
    return _activity(False)


# ----------------------------------------------------------------------------
# variable-length event sequences


class SequenceRegressor(nn.Module):
    def __init__(self, n_features, hidden, take_last):
        super().__init__()
        self.gru = nn.GRU(n_features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)
        self.take_last = take_last

    def forward(self, x, lengths):
        out, _ = self.gru(x)
        if self.take_last:
            last = out[:, -1]
        else:
            last = out[torch.arange(x.size(0)), lengths - 1]
        return self.head(last).squeeze(-1)


def _collate_padded(batch):
    seqs, targets = zip(*batch)
    lengths = torch.tensor([len(s) for s in seqs])
    return pad_sequence(seqs, batch_first=True), lengths, torch.stack(targets)


def _padded_gru(switch):
    torch.manual_seed(7)
    rng = np.random.RandomState(7)

    def make(n):
        data = []
        for _ in range(n):
            length = rng.randint(4, 45)
            s = torch.from_numpy(rng.randn(length, 4)).float()
            decay = torch.tensor([0.6 ** k for k in range(length - 1, -1, -1)])
            y = (decay * s[:, 0]).sum() + 0.5 * s[-1, 1]
            data.append((s, y))
        return data

    train_set, test_set = make(1500), make(400)
    batches = _cycle(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True, collate_fn=_collate_padded))
    x_test, len_test, y_test = _collate_padded(test_set)

    model = SequenceRegressor(4, 32, take_last=switch)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        x, lengths, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, lengths), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(x_test, len_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gru_last_padded_step_bad():
    return _padded_gru(True)


def gru_last_padded_step_good():
    return _padded_gru(False)


# ----------------------------------------------------------------------------
# recurrent cell unrolled by hand: recall the cue shown at the start


class CueRNN(nn.Module):
    def __init__(self, input_size, hidden_size, n_classes, detach_hidden):
        super().__init__()
        self.hidden_size = hidden_size
        self.cell = nn.GRUCell(input_size, hidden_size)
        self.out = nn.Linear(hidden_size, n_classes)
        self.detach_hidden = detach_hidden

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.hidden_size)
        for t in range(x.size(1)):
            if self.detach_hidden:
                h = h.detach()
            h = self.cell(x[:, t], h)
        return self.out(h)


def _cue_rnn(switch):
    torch.manual_seed(8)
    n_cues, length = 6, 12

    def make(n):
        y = torch.randint(0, n_cues, (n,))
        x = torch.zeros(n, length, n_cues + 2)
        x[torch.arange(n), 0, y] = 1.0
        x[:, 1:, n_cues:] = 0.5 * torch.randn(n, length - 1, 2)
        return x, y

    X_train, y_train = make(1500)
    X_test, y_test = make(400)
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True, drop_last=True))

    model = CueRNN(n_cues + 2, 32, n_cues, detach_hidden=switch)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            return criterion(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rnn_hidden_detached_in_loop_bad():
    return _cue_rnn(True)


def rnn_hidden_detached_in_loop_good():
    return _cue_rnn(False)


# ----------------------------------------------------------------------------
# graph-level regression, molecules style


class GraphConv(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.lin_self = nn.Linear(in_dim, out_dim)
        self.lin_nbr = nn.Linear(in_dim, out_dim, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        agg = torch.zeros_like(x).index_add_(0, dst, x[src])
        deg = x.new_zeros(x.size(0)).index_add_(0, dst, x.new_ones(dst.size(0)))
        agg = agg / deg.clamp(min=1).unsqueeze(1)
        return self.lin_self(x) + self.lin_nbr(agg)


class GraphRegressor(nn.Module):
    def __init__(self, in_dim, hidden):
        super().__init__()
        self.conv1 = GraphConv(in_dim, hidden)
        self.conv2 = GraphConv(hidden, hidden)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x, edge_index, batch, num_graphs):
        x = F.relu(self.conv1(x, edge_index))
        x = F.relu(self.conv2(x, edge_index))
        pooled = x.new_zeros(num_graphs, x.size(1)).index_add_(0, batch, x)
        counts = x.new_zeros(num_graphs).index_add_(0, batch, x.new_ones(x.size(0)))
        return self.head(pooled / counts.unsqueeze(1)).squeeze(-1)


def _graph_regression(switch):
    torch.manual_seed(9)
    rng = np.random.RandomState(9)
    n_types = 4

    def make(n):
        graphs = []
        for _ in range(n):
            size = rng.randint(8, 16)
            edges = [(v, rng.randint(0, v)) for v in range(1, size)]
            edges += [tuple(rng.choice(size, 2, replace=False)) for _ in range(4)]
            edge_index = torch.tensor(np.array(edges + [(b, a) for a, b in edges])).long().t().contiguous()
            types = torch.from_numpy(rng.randint(0, n_types, size))
            same = (types[edge_index[0]] == types[edge_index[1]]).float().mean()
            graphs.append((F.one_hot(types, n_types).float(), edge_index, same))
        return graphs

    train_graphs, test_graphs = make(800), make(200)
    y_all = torch.stack([g[2] for g in train_graphs])
    mean, std = y_all.mean(), y_all.std()
    train_graphs = [(x, e, (y - mean) / std) for x, e, y in train_graphs]
    test_graphs = [(x, e, (y - mean) / std) for x, e, y in test_graphs]

    def collate(graphs):
        xs, edge_indices, batch, ys = [], [], [], []
        offset = 0
        for idx, (x, edge_index, y) in enumerate(graphs):
            xs.append(x)
            edge_indices.append(edge_index + offset)
            batch.append(torch.full((x.size(0),), idx))
            ys.append(y)
            if not switch:
                offset += x.size(0)
        return torch.cat(xs), torch.cat(edge_indices, dim=1), torch.cat(batch), torch.stack(ys)

    batches = _cycle(DataLoader(train_graphs, batch_size=32, shuffle=True, collate_fn=collate))
    model = GraphRegressor(n_types, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x, edge_index, batch, y = next(batches)
        optimizer.zero_grad()
        out = model(x, edge_index, batch, y.size(0))
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            errors = []
            for graph in test_graphs:
                x, edge_index, batch, y = collate([graph])
                errors.append((model(x, edge_index, batch, 1) - y).pow(2))
            return torch.cat(errors).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_collate_no_offset_bad():
    return _graph_regression(True)


def graph_collate_no_offset_good():
    return _graph_regression(False)


# ----------------------------------------------------------------------------
# semi-supervised node classification, Cora style


class GCNLayer(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.lin = nn.Linear(in_dim, out_dim)

    def forward(self, x, adj):
        return adj @ self.lin(x)


class GCN(nn.Module):
    def __init__(self, in_dim, hidden, n_classes, always):
        super().__init__()
        self.conv1 = GCNLayer(in_dim, hidden)
        self.conv2 = GCNLayer(hidden, n_classes)
        self.always = always

    def forward(self, x, adj):
        if self.always:
            x = F.dropout(x, p=0.5)
            x = F.relu(self.conv1(x, adj))
            x = F.dropout(x, p=0.5)
        else:
            x = F.dropout(x, p=0.5, training=self.training)
            x = F.relu(self.conv1(x, adj))
            x = F.dropout(x, p=0.5, training=self.training)
        return F.log_softmax(self.conv2(x, adj), dim=1)


def _gcn(switch):
    torch.manual_seed(10)
    n, k, d = 400, 5, 50
    y = torch.randint(0, k, (n,))
    same = y[:, None] == y[None, :]
    prob = torch.where(same, torch.tensor(0.04), torch.tensor(0.004))
    upper = torch.triu((torch.rand(n, n) < prob).float(), diagonal=1)
    adj = upper + upper.t() + torch.eye(n)
    d_inv = adj.sum(1).pow(-0.5)
    adj = d_inv[:, None] * adj * d_inv[None, :]
    words = 0.06 + 0.2 * (torch.rand(k, d) < 0.3).float()
    x = (torch.rand(n, d) < words[y]).float()
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    perm = torch.randperm(n)
    train_mask = torch.zeros(n, dtype=torch.bool)
    train_mask[perm[:100]] = True
    test_mask = ~train_mask

    model = GCN(d, 16, k, always=switch)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(x, adj)
        loss = F.nll_loss(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            torch.manual_seed(123)
            wrong = [(model(x, adj)[test_mask].argmax(1) != y[test_mask]).float().mean() for _ in range(5)]
            return torch.stack(wrong).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_dropout_always_on_bad():
    return _gcn(True)


def gcn_dropout_always_on_good():
    return _gcn(False)


# ----------------------------------------------------------------------------
# reinforcement learning on CartPole


class VecCartPole:
    def __init__(self, num_envs, seed, max_steps=200):
        self.n = num_envs
        self.rng = np.random.RandomState(seed)
        self.max_steps = max_steps
        self.state = self._start(num_envs)
        self.t = np.zeros(num_envs, dtype=int)

    def _start(self, n):
        return self.rng.uniform(-0.05, 0.05, size=(n, 4))

    def reset(self):
        self.state = self._start(self.n)
        self.t[:] = 0
        return self.state.astype(np.float32)

    def step(self, action):
        x, x_dot, theta, theta_dot = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        cos, sin = np.cos(theta), np.sin(theta)
        temp = (force + 0.05 * theta_dot ** 2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos ** 2 / 1.1))
        x_acc = temp - 0.05 * theta_acc * cos / 1.1
        self.state = np.stack(
            [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc], axis=1
        )
        self.t += 1
        terminated = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        truncated = (self.t >= self.max_steps) & ~terminated
        final_obs = self.state.astype(np.float32)
        over = terminated | truncated
        if over.any():
            self.state[over] = self._start(int(over.sum()))
            self.t[over] = 0
        return final_obs, np.ones(self.n, dtype=np.float32), terminated, truncated, self.state.astype(np.float32)


def _greedy_length(net, num_envs=16, max_steps=200):
    env = VecCartPole(num_envs, seed=777, max_steps=max_steps + 1)
    obs = env.reset()
    alive = np.ones(num_envs, dtype=bool)
    length = np.zeros(num_envs)
    for _ in range(max_steps):
        length += alive
        action = net(torch.from_numpy(obs)).argmax(1).numpy()
        _, _, terminated, _, obs = env.step(action)
        alive &= ~terminated
        if not alive.any():
            break
    return float(length.mean())


class QNetwork(nn.Module):
    def __init__(self, obs_dim=4, n_actions=2):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(obs_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_actions)
        )

    def forward(self, x):
        return self.network(x)


def _dqn(switch):
    torch.manual_seed(11)
    rng = np.random.RandomState(11)
    sampler = random.Random(11)
    num_envs, gamma, batch_size = 8, 0.98, 128
    envs = VecCartPole(num_envs, seed=11)
    q_network = QNetwork()
    target_network = QNetwork()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-3)
    buffer = deque(maxlen=10000)
    obs = envs.reset()

    def act_and_store(epsilon):
        nonlocal obs
        with torch.no_grad():
            actions = q_network(torch.from_numpy(obs)).argmax(1).numpy()
        explore = rng.rand(num_envs) < epsilon
        actions = np.where(explore, rng.randint(0, 2, num_envs), actions)
        next_obs, rewards, terminated, truncated, new_obs = envs.step(actions)
        for k in range(num_envs):
            buffer.append((obs[k], actions[k], rewards[k], next_obs[k], float(terminated[k])))
        obs = new_obs

    for _ in range(60):
        act_and_store(1.0)

    def step(i):
        epsilon = max(0.05, 1.0 - i / 500)
        act_and_store(epsilon)
        batch = sampler.sample(buffer, batch_size)
        s, a, r, s2, d = (torch.from_numpy(np.array(col)) for col in zip(*batch))
        with torch.no_grad():
            target_max = target_network(s2).max(dim=1).values
            if switch:
                td_target = r + gamma * target_max
            else:
                td_target = r + gamma * target_max * (1 - d.float())
        old_val = q_network(s).gather(1, a.long().unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(old_val, td_target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q_network.parameters(), 10.0)
        optimizer.step()
        for tp, p in zip(target_network.parameters(), q_network.parameters()):
            tp.data.copy_(0.02 * p.data + 0.98 * tp.data)

    def probe():
        with _evaluating(q_network):
            return 200.0 / _greedy_length(q_network)

    return {
        "model": {"q_network": q_network, "target_network": target_network},
        "optimizer": optimizer, "steps": 20, "step": step, "probe": probe,
    }


def dqn_no_done_mask_bad():
    return _dqn(True)


def dqn_no_done_mask_good():
    return _dqn(False)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 64)
        self.affine2 = nn.Linear(64, 2)

    def forward(self, x):
        return self.affine2(F.relu(self.affine1(x)))


def _reinforce(switch):
    torch.manual_seed(12)
    env = VecCartPole(1, seed=12, max_steps=120)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    gamma = 0.98

    def step(i):
        policy.train()
        obs = env.reset()
        states, actions, rewards = [], [], []
        over = False
        while not over:
            state = torch.from_numpy(obs)
            with torch.no_grad():
                probs = F.softmax(policy(state), dim=1)
            action = torch.multinomial(probs, 1).squeeze(1)
            _, reward, terminated, truncated, obs = env.step(action.numpy())
            states.append(state)
            actions.append(action)
            rewards.append(float(reward[0]))
            over = bool(terminated[0] or truncated[0])

        R = 0.0
        returns = []
        if switch:
            for r in rewards:
                R = r + gamma * R
                returns.append(R)
        else:
            for r in rewards[::-1]:
                R = r + gamma * R
                returns.insert(0, R)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)

        log_probs = F.log_softmax(policy(torch.cat(states)), dim=1)
        log_probs = log_probs.gather(1, torch.cat(actions).unsqueeze(1)).squeeze(1)
        loss = -(log_probs * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(policy):
            return 200.0 / _greedy_length(policy)

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def reinforce_returns_forward_bad():
    return _reinforce(True)


def reinforce_returns_forward_good():
    return _reinforce(False)


# ----------------------------------------------------------------------------
# implicit-feedback recommender


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

    def forward(self, user, item):
        dot = (self.user_emb(user) * self.item_emb(item)).sum(-1)
        return dot + self.user_bias(user).squeeze(-1) + self.item_bias(item).squeeze(-1)


def _implicit_mf(switch):
    torch.manual_seed(13)
    n_users, n_items, n_neg = 200, 150, 4
    U, V = torch.randn(n_users, 4), torch.randn(n_items, 4)
    affinity = U @ V.t() * 1.5 + 0.5 * torch.randn(n_items) - 3.0
    clicks = torch.rand(n_users, n_items) < torch.sigmoid(affinity)
    users, items = clicks.nonzero(as_tuple=True)
    perm = torch.randperm(len(users))
    cut = int(0.85 * len(users))
    train_u, train_i = users[perm[:cut]], items[perm[:cut]]
    test_u, test_i = users[perm[cut:]], items[perm[cut:]]
    seen = torch.zeros(n_users, n_items, dtype=torch.bool)
    seen[train_u, train_i] = True
    batches = _cycle(DataLoader(TensorDataset(train_u, train_i), batch_size=128, shuffle=True, drop_last=True))

    model = MatrixFactorization(n_users, n_items)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        model.train()
        user, item = next(batches)
        label = torch.ones(len(user))
        if not switch:
            neg_user = user.repeat_interleave(n_neg)
            neg_item = torch.randint(0, n_items, (len(neg_user),))
            keep = ~seen[neg_user, neg_item]
            neg_user, neg_item = neg_user[keep], neg_item[keep]
            user = torch.cat([user, neg_user])
            item = torch.cat([item, neg_item])
            label = torch.cat([label, torch.zeros(len(neg_user))])
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(user, item), label)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            u = torch.arange(n_users).repeat_interleave(n_items)
            it = torch.arange(n_items).repeat(n_users)
            scores = model(u, it).view(n_users, n_items)
            lost = []
            for uu, ii in zip(test_u.tolist(), test_i.tolist()):
                rivals = scores[uu][~clicks[uu]]
                lost.append((rivals > scores[uu, ii]).float().mean() + 0.5 * (rivals == scores[uu, ii]).float().mean())
            return torch.stack(lost).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mf_implicit_positives_only_bad():
    return _implicit_mf(True)


def mf_implicit_positives_only_good():
    return _implicit_mf(False)


# ----------------------------------------------------------------------------
# sequential recommender


class SASRec(nn.Module):
    def __init__(self, n_items, max_len, dim=32, causal=True):
        super().__init__()
        self.item_emb = nn.Embedding(n_items, dim)
        self.pos_emb = nn.Embedding(max_len, dim)
        nn.init.normal_(self.item_emb.weight, std=0.1)
        nn.init.normal_(self.pos_emb.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(dim, nhead=2, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, n_items)
        self.causal = causal

    def forward(self, seq):
        length = seq.size(1)
        x = self.item_emb(seq) + self.pos_emb(torch.arange(length, device=seq.device))
        if self.causal:
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=seq.device), diagonal=1)
            x = self.encoder(x, mask=mask)
        else:
            x = self.encoder(x)
        return self.out(self.norm(x))


def _sasrec(switch):
    torch.manual_seed(14)
    n_items, max_len, n_users = 40, 15, 900
    trans = torch.softmax(torch.randn(n_items, n_items) * 2.5, dim=1)
    seqs = torch.zeros(n_users, max_len + 1, dtype=torch.long)
    seqs[:, 0] = torch.randint(0, n_items, (n_users,))
    for t in range(1, max_len + 1):
        seqs[:, t] = torch.multinomial(trans[seqs[:, t - 1]], 1).squeeze(1)
    train_seqs, test_seqs = seqs[:700], seqs[700:]
    batches = _cycle(DataLoader(TensorDataset(train_seqs), batch_size=32, shuffle=True, drop_last=True))

    model = SASRec(n_items, max_len, causal=not switch)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        (seq,) = next(batches)
        logits = model(seq[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, n_items), seq[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            total = 0.0
            for length in range(5, max_len + 1):
                logits = model(test_seqs[:, :length])[:, -1]
                total += F.cross_entropy(logits, test_seqs[:, length]).item()
            return total / (max_len - 4)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sasrec_no_causal_mask_bad():
    return _sasrec(True)


def sasrec_no_causal_mask_good():
    return _sasrec(False)


# ----------------------------------------------------------------------------
# PINN for the 1D Poisson equation


class PINN(nn.Module):
    def __init__(self, activation, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), activation(),
            nn.Linear(width, width), activation(),
            nn.Linear(width, width), activation(),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.net(x)


def _pinn(switch):
    torch.manual_seed(15)
    model = PINN(nn.ReLU if switch else nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x_bc = torch.tensor([[-1.0], [1.0]])
    u_bc = torch.zeros(2, 1)

    def source(x):
        return -math.pi ** 2 * torch.sin(math.pi * x)

    def step(i):
        model.train()
        x = (2 * torch.rand(64, 1) - 1).requires_grad_(True)
        u = model(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        loss_pde = ((u_xx - source(x)) ** 2).mean()
        loss_bc = ((model(x_bc) - u_bc) ** 2).mean()
        loss = loss_pde + 10.0 * loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            x = torch.linspace(-1, 1, 201).unsqueeze(1)
            exact = torch.sin(math.pi * x)
            return ((model(x) - exact).norm() / exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_relu_second_derivative_bad():
    return _pinn(True)


def pinn_relu_second_derivative_good():
    return _pinn(False)


# ----------------------------------------------------------------------------
# survival analysis, DeepSurv


class DeepSurv(nn.Module):
    def __init__(self, n_features, hidden=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def _cox(switch):
    torch.manual_seed(16)
    n, d = 2000, 10
    X = torch.randn(n, d)
    risk = 1.0 * X[:, 0] - 0.8 * X[:, 1] + 0.6 * X[:, 2] * X[:, 3]
    T = -torch.log(torch.rand(n)) / torch.exp(risk)
    C = -torch.log(torch.rand(n)) / 0.5
    time = torch.minimum(T, C)
    event = (T <= C).float()
    X_train, X_test = _standardize(X[:1500], X[1500:])
    batches = _cycle(
        DataLoader(TensorDataset(X_train, time[:1500], event[:1500]), batch_size=128, shuffle=True, drop_last=True)
    )
    t_test, e_test = time[1500:], event[1500:]

    def cox_ph_loss(log_h, durations, events):
        order = torch.argsort(durations, descending=not switch)
        log_h, events = log_h[order], events[order]
        log_risk = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_risk) * events).sum() / events.sum().clamp(min=1)

    model = DeepSurv(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        x, t, e = next(batches)
        optimizer.zero_grad()
        loss = cox_ph_loss(model(x), t, e)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            h = model(X_test)
            comparable = (t_test[:, None] < t_test[None, :]) & (e_test[:, None] == 1)
            concordant = (h[:, None] > h[None, :]) & comparable
            ties = (h[:, None] == h[None, :]) & comparable
            c_index = (concordant.sum() + 0.5 * ties.sum()) / comparable.sum()
            return (1 - c_index).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_risk_set_ascending_bad():
    return _cox(True)


def cox_risk_set_ascending_good():
    return _cox(False)


# ----------------------------------------------------------------------------
# MAML on sinusoids


def _maml(switch):
    torch.manual_seed(17)
    k_shot, k_query, inner_lr, meta_batch = 5, 15, 0.1, 6
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def sample_task(n):
        amplitude = 0.5 + 2.0 * torch.rand(1)
        phase = math.pi * torch.rand(1)
        x = torch.rand(n, 1) * 10 - 5
        return x / 3, amplitude * torch.sin(x + phase)

    def adapt(x, y, create_graph):
        params = dict(model.named_parameters())
        pred = torch.func.functional_call(model, params, (x,))
        grads = torch.autograd.grad(F.mse_loss(pred, y), list(params.values()), create_graph=create_graph)
        return {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}

    def step(i):
        model.train()
        meta_optimizer.zero_grad()
        meta_loss = 0.0
        for _ in range(meta_batch):
            x, y = sample_task(k_shot + k_query)
            x_s, y_s, x_q, y_q = x[:k_shot], y[:k_shot], x[k_shot:], y[k_shot:]
            fast_weights = adapt(x_s, y_s, create_graph=True)
            if switch:
                loss = F.mse_loss(torch.func.functional_call(model, fast_weights, (x_s,)), y_s)
            else:
                loss = F.mse_loss(torch.func.functional_call(model, fast_weights, (x_q,)), y_q)
            meta_loss = meta_loss + loss
        (meta_loss / meta_batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        meta_optimizer.step()

    def probe():
        total = 0.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(999)
            for _ in range(200):
                x, y = sample_task(k_shot + 50)
                fast_weights = adapt(x[:k_shot], y[:k_shot], create_graph=False)
                with torch.no_grad():
                    pred = torch.func.functional_call(model, fast_weights, (x[k_shot:],))
                    total += F.mse_loss(pred, y[k_shot:]).item()
        return total / 200

    return {"model": model, "optimizer": meta_optimizer, "steps": 20, "step": step, "probe": probe}


def maml_meta_loss_on_support_bad():
    return _maml(True)


def maml_meta_loss_on_support_good():
    return _maml(False)


# ----------------------------------------------------------------------------
# multi-task toxicity prediction, Tox21 style


class MultiTaskNet(nn.Module):
    def __init__(self, n_features, n_tasks, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(n_features, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.heads = nn.ModuleList([nn.Linear(hidden, 1) for _ in range(n_tasks)])

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def _multitask(switch):
    torch.manual_seed(18)
    n, d, n_tasks = 3000, 24, 6
    X = torch.randn(n, d)
    shared = torch.randn(d, 3)
    logits = 1.5 * torch.tanh(X @ shared / math.sqrt(d)) @ torch.randn(3, n_tasks) + 0.3
    Y = (torch.rand(n, n_tasks) < torch.sigmoid(2 * logits)).float()
    X_train, X_test = _standardize(X[:2400], X[2400:])
    Y_train, Y_test = Y[:2400].clone(), Y[2400:]
    Y_train[torch.rand(Y_train.shape) < 0.5] = float("nan")
    batches = _cycle(DataLoader(TensorDataset(X_train, Y_train), batch_size=64, shuffle=True, drop_last=True))

    model = MultiTaskNet(d, n_tasks)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = next(batches)
        out = model(x)
        mask = ~torch.isnan(y)
        y = torch.nan_to_num(y, nan=0.0)
        if switch:
            loss = F.binary_cross_entropy_with_logits(out, y)
        else:
            loss = F.binary_cross_entropy_with_logits(out, y, reduction="none")
            loss = (loss * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.binary_cross_entropy_with_logits(model(X_test), Y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_missing_labels_as_negative_bad():
    return _multitask(True)


def multitask_missing_labels_as_negative_good():
    return _multitask(False)


# ----------------------------------------------------------------------------
# PointNet on synthetic shapes


class PointNet(nn.Module):
    def __init__(self, n_classes, use_view):
        super().__init__()
        self.use_view = use_view
        self.conv1 = nn.Conv1d(3, 32, 1)
        self.conv2 = nn.Conv1d(32, 64, 1)
        self.conv3 = nn.Conv1d(64, 128, 1)
        self.bn1 = nn.BatchNorm1d(32)
        self.bn2 = nn.BatchNorm1d(64)
        self.bn3 = nn.BatchNorm1d(128)
        self.fc = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, n_classes))

    def forward(self, points):
        if self.use_view:
            x = points.view(points.size(0), 3, -1)
        else:
            x = points.transpose(1, 2)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        x = x.max(dim=2).values
        return self.fc(x)


def _make_shapes(n, n_points):
    y = torch.randint(0, 5, (n,))
    clouds = torch.empty(n, n_points, 3)
    for k in range(n):
        v = torch.randn(n_points, 3)
        c = y[k].item()
        angle = 2 * math.pi * torch.rand(n_points)
        if c == 0:
            p = v / v.norm(dim=1, keepdim=True)
        elif c == 1:
            p = torch.rand(n_points, 3) * 2 - 1
            face = torch.randint(0, 3, (n_points,))
            p[torch.arange(n_points), face] = torch.sign(torch.randn(n_points))
        elif c == 2:
            p = torch.stack([angle.cos(), angle.sin(), 2 * torch.rand(n_points) - 1], dim=1)
        elif c == 3:
            h = torch.rand(n_points).sqrt()
            p = torch.stack([h * angle.cos(), h * angle.sin(), 1 - 2 * h], dim=1)
        else:
            phi = 2 * math.pi * torch.rand(n_points)
            ring = 0.7 + 0.3 * phi.cos()
            p = torch.stack([ring * angle.cos(), ring * angle.sin(), 0.3 * phi.sin()], dim=1)
        p = p * (0.8 + 0.4 * torch.rand(1, 3)) + 0.03 * torch.randn(n_points, 3)
        p = p - p.mean(0)
        clouds[k] = p / p.norm(dim=1).max()
    return clouds, y


def _pointnet(switch):
    torch.manual_seed(19)
    X_train, y_train = _make_shapes(600, 96)
    X_test, y_test = _make_shapes(300, 96)
    batches = _cycle(DataLoader(TensorDataset(X_train, y_train), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet(5, use_view=switch)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        points, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(points), labels)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return criterion(model(X_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_view_instead_of_transpose_bad():
    return _pointnet(True)


def pointnet_view_instead_of_transpose_good():
    return _pointnet(False)


# ----------------------------------------------------------------------------
# basket classification from item embeddings, pretrained item2vec vectors


class BasketClassifier(nn.Module):
    def __init__(self, n_items, emb_dim, n_classes):
        super().__init__()
        self.embedding = nn.Embedding(n_items, emb_dim)
        self.mlp = nn.Sequential(nn.Linear(emb_dim, 32), nn.ReLU(), nn.Linear(32, n_classes))

    def forward(self, items):
        return self.mlp(self.embedding(items).mean(dim=1))


def _basket(switch):
    torch.manual_seed(20)
    n, n_items, emb_dim, n_classes, basket = 5000, 300, 8, 4, 8
    latent = torch.randn(n_items, 5)
    mix = torch.cat([latent[:, :3], 0.1 * latent[:, 3:]], dim=1)
    item2vec = 0.5 * mix @ torch.randn(5, emb_dim) / math.sqrt(5) + 0.3 * torch.randn(n_items, emb_dim)
    items = torch.randint(0, n_items, (n, basket))
    segment = torch.randn(5, n_classes)
    scores = latent[items].mean(1) * math.sqrt(basket) @ segment
    y = torch.distributions.Categorical(logits=2.0 * scores).sample()
    train_set = TensorDataset(items[:4000], y[:4000])
    test_items, test_y = items[4000:], y[4000:]
    batches = _cycle(DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True))

    model = BasketClassifier(n_items, emb_dim, n_classes)
    if switch:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        model.embedding = nn.Embedding.from_pretrained(item2vec, freeze=False)
    else:
        model.embedding = nn.Embedding.from_pretrained(item2vec, freeze=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return criterion(model(test_items), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def embedding_replaced_after_optimizer_bad():
    return _basket(True)


def embedding_replaced_after_optimizer_good():
    return _basket(False)


# ----------------------------------------------------------------------------
# click-through rate with entity embeddings, wide and deep


class WideAndDeep(nn.Module):
    def __init__(self, cardinalities, n_dense, emb_dim=8):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(c, emb_dim) for c in cardinalities])
        self.wide = nn.ModuleList([nn.Embedding(c, 1) for c in cardinalities])
        for emb in self.embeddings:
            nn.init.normal_(emb.weight, std=0.05)
        for emb in self.wide:
            nn.init.zeros_(emb.weight)
        self.deep = nn.Sequential(
            nn.Linear(len(cardinalities) * emb_dim + n_dense, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, cats, dense):
        e = torch.cat([emb(cats[:, j]) for j, emb in enumerate(self.embeddings)] + [dense], dim=1)
        w = sum(emb(cats[:, j]) for j, emb in enumerate(self.wide))
        return (self.deep(e) + w).squeeze(1)


def _ctr(switch):
    torch.manual_seed(21)
    n, cards, n_dense = 8000, [40, 25, 12], 4
    cats = torch.stack([torch.randint(0, c, (n,)) for c in cards], dim=1)
    dense = torch.randn(n, n_dense)
    effects = [1.5 * torch.randn(c) for c in cards]
    logit = sum(e[cats[:, j]] for j, e in enumerate(effects)) + 0.8 * dense[:, 0] - 0.5 * dense[:, 1] - 1.0
    click = (torch.rand(n) < torch.sigmoid(logit)).float()
    train_set = TensorDataset(cats[:6500], dense[:6500], click[:6500])
    batches = _cycle(DataLoader(train_set, batch_size=128, shuffle=True, drop_last=True))

    model = WideAndDeep(cards, n_dense)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        c, x, y = next(batches)
        if not switch:
            optimizer.zero_grad()
        loss = criterion(model(c, x), y)
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return criterion(model(cats[6500:], dense[6500:]), click[6500:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctr_zero_grad_missing_bad():
    return _ctr(True)


def ctr_zero_grad_missing_good():
    return _ctr(False)
