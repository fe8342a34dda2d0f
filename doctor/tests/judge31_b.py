"""Twenty-two small training programs, each as a pair NAME_bad / NAME_good."""
import copy
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset


def make_probe(modules, fn):
    """Wraps fn: eval mode, no_grad, modes and random states left as found."""
    modules = list(modules)

    def probe():
        modes = [(m, m.training) for mod in modules for m in mod.modules()]
        t_state, n_state, p_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
        for mod in modules:
            mod.eval()
        try:
            with torch.no_grad():
                return float(fn())
        finally:
            for m, mode in modes:
                m.training = mode
            torch.set_rng_state(t_state)
            np.random.set_state(n_state)
            random.setstate(p_state)

    return probe


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


def job(model, optimizer, step, probe):
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- claims_table
class ClaimsNet(nn.Module):
    def __init__(self, n_merchants, n_num, dim=8):
        super().__init__()
        self.merchant = nn.Embedding(n_merchants, dim)
        self.mlp = nn.Sequential(nn.Linear(dim + n_num, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, code, num):
        return self.mlp(torch.cat([self.merchant(code), num], dim=1)).squeeze(1)


def _claims_rows(rng, merchants, effect, n):
    ids = rng.choice(len(merchants), size=n)
    num = rng.randn(n, 5).astype(np.float32)
    amount = effect[ids] + num @ np.array([0.5, -0.3, 0.2, 0.0, 0.1]) + 0.2 * rng.randn(n)
    return np.array([merchants[i] for i in ids]), num, amount.astype(np.float32)


def _claims_table(encode_months, seed):
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed)
    names = np.array(["M%03d" % i for i in range(40)])
    effects = rng.randn(40) * 1.5
    months = []
    for _ in range(8):
        active = np.sort(rng.choice(40, size=26, replace=False))
        months.append(_claims_rows(rng, names[active], effects[active], 256))
    held = _claims_rows(rng, names, effects, 1024)

    codes = encode_months([m[0] for m in months])
    train = TensorDataset(
        torch.from_numpy(np.concatenate(codes)).long(),
        torch.from_numpy(np.concatenate([m[1] for m in months])),
        torch.from_numpy(np.concatenate([m[2] for m in months])),
    )
    batches = cycle(DataLoader(train, batch_size=128, shuffle=True))
    net = ClaimsNet(len(names), 5)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def step():
        code, num, y = next(batches)
        opt.zero_grad()
        loss = F.mse_loss(net(code, num), y)
        loss.backward()
        opt.step()
        return loss.item()

    held_code = torch.from_numpy(np.searchsorted(names, held[0])).long()
    held_num, held_y = torch.from_numpy(held[1]), torch.from_numpy(held[2])
    return job(net, opt, step, make_probe([net], lambda: F.mse_loss(net(held_code, held_num), held_y)))


def claims_table_bad(seed=0):
    def encode_months(columns):
        return [np.unique(col, return_inverse=True)[1] for col in columns]

    return _claims_table(encode_months, seed)


def claims_table_good(seed=0):
    def encode_months(columns):
        vocab = np.unique(np.concatenate(columns))
        return [np.searchsorted(vocab, col) for col in columns]

    return _claims_table(encode_months, seed)


# ------------------------------------------------------------------- churn_mlp
def _churn_data(n, gen, w):
    x = torch.randn(n, 16, generator=gen)
    score = (x[:, :8] @ w) + 1.5 * x[:, 8] * x[:, 9] - x[:, 10].abs() + 0.8
    y = (torch.rand(n, generator=gen) < torch.sigmoid(2 * score)).float()
    return x, y


class ChurnTrainer:
    def __init__(self, seed):
        torch.manual_seed(seed)
        gen = torch.Generator().manual_seed(100 + seed)
        w = torch.randn(8, generator=gen)
        self.loader = DataLoader(TensorDataset(*_churn_data(2048, gen, w)), batch_size=128, shuffle=True)
        self.held = _churn_data(2048, gen, w)
        self.model = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.85)
        self.epoch_iter = iter(self.loader)

    def fit_batch(self, x, y):
        logits = self.model(x).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def score(self):
        x, y = self.held
        return F.binary_cross_entropy_with_logits(self.model(x).squeeze(-1), y)

    def as_job(self):
        return job(self.model, self.optimizer, self.train_step, make_probe([self.model], self.score))


class ChurnTrainerA(ChurnTrainer):
    def train_step(self):
        try:
            x, y = next(self.epoch_iter)
        except StopIteration:
            self.epoch_iter = iter(self.loader)
            x, y = next(self.epoch_iter)
        loss = self.fit_batch(x, y)
        self.scheduler.step()
        return loss


class ChurnTrainerB(ChurnTrainer):
    def train_step(self):
        try:
            x, y = next(self.epoch_iter)
        except StopIteration:
            self.scheduler.step()
            self.epoch_iter = iter(self.loader)
            x, y = next(self.epoch_iter)
        return self.fit_batch(x, y)


def churn_mlp_bad(seed=0):
    return ChurnTrainerA(seed).as_job()


def churn_mlp_good(seed=0):
    return ChurnTrainerB(seed).as_job()


# --------------------------------------------------------------- load_forecast
def _load_series(n, seed):
    rng = np.random.RandomState(seed)
    t = np.arange(n)
    y = np.sin(2 * np.pi * t / 12) + 0.6 * np.sin(2 * np.pi * t / 7 + 1.0)
    e = np.zeros(n)
    for i in range(1, n):
        e[i] = 0.7 * e[i - 1] + 0.15 * rng.randn()
    return torch.tensor(y + e, dtype=torch.float32)


class WindowsA(Dataset):
    def __init__(self, series, context, horizon):
        self.series, self.context, self.horizon = series, context, horizon

    def __len__(self):
        return len(self.series) - self.context - self.horizon

    def __getitem__(self, i):
        end = i + self.context
        past = self.series[i:end]
        future = self.series[end - 1:end - 1 + self.horizon]
        return past, future


class WindowsB(WindowsA):
    def __getitem__(self, i):
        end = i + self.context
        past = self.series[i:end]
        future = self.series[end:end + self.horizon]
        return past, future


class LoadNet(nn.Module):
    def __init__(self, context, horizon):
        super().__init__()
        self.conv = nn.Conv1d(1, 16, 5, padding=2)
        self.head = nn.Sequential(nn.Linear(16 * context, 64), nn.ReLU(), nn.Linear(64, horizon))

    def forward(self, past):
        h = F.relu(self.conv(past.unsqueeze(1)))
        return self.head(h.flatten(1))


def _load_forecast(windows, seed):
    torch.manual_seed(seed)
    context, horizon = 24, 8
    series = _load_series(2000, seed)
    train, test = series[:1500], series[1500:]
    batches = cycle(DataLoader(windows(train, context, horizon), batch_size=64, shuffle=True))
    net = LoadNet(context, horizon)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step():
        past, future = next(batches)
        loss = F.mse_loss(net(past), future)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    spans = test.unfold(0, context + horizon, 1)
    held_x, held_y = spans[:, :context], spans[:, context:]
    return job(net, opt, step, make_probe([net], lambda: F.mse_loss(net(held_x), held_y)))


def load_forecast_bad(seed=0):
    return _load_forecast(WindowsA, seed)


def load_forecast_good(seed=0):
    return _load_forecast(WindowsB, seed)


# ------------------------------------------------------------ demand_quantiles
QUANTILES = (0.1, 0.5, 0.9)


class QuantileNet(nn.Module):
    def __init__(self, n_features):
        super().__init__()
        self.rnn = nn.GRU(n_features, 24, batch_first=True)
        self.out = nn.Linear(24, len(QUANTILES))

    def forward(self, x):
        _, h = self.rnn(x)
        return self.out(h[-1])


def _demand_data(n, gen):
    x = torch.randn(n, 10, 2, generator=gen)
    level = x[:, -4:, 0].mean(1) * 2
    spread = 0.3 + x[:, -1, 1].abs()
    noise = -torch.log(torch.rand(n, generator=gen).clamp_min(1e-6))
    return x, level + spread * noise


def pinball(pred, target):
    q = torch.tensor(QUANTILES)
    err = target.unsqueeze(1) - pred
    return torch.maximum(q * err, (q - 1) * err).mean()


def _demand_quantiles(criterion, seed):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed + 7)
    loader = DataLoader(TensorDataset(*_demand_data(2048, gen)), batch_size=64, shuffle=True, drop_last=True)
    val_x, val_y = _demand_data(1024, gen)
    model = QuantileNet(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stream = cycle(loader)

    def train_step():
        model.train()
        x, y = next(stream)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return job(model, optimizer, train_step, make_probe([model], lambda: pinball(model(val_x), val_y)))


def demand_quantiles_bad(seed=0):
    def quantile_loss(pred, target):
        total = 0.0
        for k, q in enumerate(QUANTILES):
            err = pred[:, k] - target
            total = total + torch.max(q * err, (q - 1) * err).mean()
        return total / len(QUANTILES)

    return _demand_quantiles(quantile_loss, seed)


def demand_quantiles_good(seed=0):
    def quantile_loss(pred, target):
        total = 0.0
        for k, q in enumerate(QUANTILES):
            err = target - pred[:, k]
            total = total + torch.max(q * err, (q - 1) * err).mean()
        return total / len(QUANTILES)

    return _demand_quantiles(quantile_loss, seed)


# ------------------------------------------------------------- traffic_seq2seq
class Seq2Seq(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.encoder = nn.GRU(1, hidden, batch_first=True)
        self.decoder = nn.GRU(1, hidden, batch_first=True)
        self.proj = nn.Linear(hidden, 1)

    def decode(self, state, dec_in):
        out, _ = self.decoder(dec_in, state)
        return self.proj(out)

    def forecast(self, src, horizon):
        _, state = self.encoder(src)
        token, outs = src[:, -1:], []
        for _ in range(horizon):
            out, state = self.decoder(token, state)
            token = self.proj(out)
            outs.append(token)
        return torch.cat(outs, 1)


class Seq2SeqA(Seq2Seq):
    def forward(self, src, tgt):
        _, state = self.encoder(src)
        return self.decode(state, tgt)


class Seq2SeqB(Seq2Seq):
    def forward(self, src, tgt):
        _, state = self.encoder(src)
        return self.decode(state, torch.cat([src[:, -1:], tgt[:, :-1]], 1))


def _traffic_curves(n, gen, length=22):
    t = torch.arange(length).float()
    freq = 0.3 + 0.4 * torch.rand(n, 1, generator=gen)
    phase = 6.28 * torch.rand(n, 1, generator=gen)
    amp = 0.5 + torch.rand(n, 1, generator=gen)
    y = amp * torch.sin(freq * t + phase) + 0.03 * torch.randn(n, length, generator=gen)
    return y.unsqueeze(-1)


def _traffic_seq2seq(net_cls, seed):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(31 + seed)
    curves = _traffic_curves(2000, gen)
    held = _traffic_curves(500, gen)
    model = net_cls()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    it = cycle(DataLoader(TensorDataset(curves), batch_size=64, shuffle=True))

    def step():
        (seq,) = next(it)
        src, tgt = seq[:, :14], seq[:, 14:]
        loss = F.mse_loss(model(src, tgt), tgt)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    return job(model, opt, step,
               make_probe([model], lambda: F.mse_loss(model.forecast(held[:, :14], 8), held[:, 14:])))


def traffic_seq2seq_bad(seed=0):
    return _traffic_seq2seq(Seq2SeqA, seed)


def traffic_seq2seq_good(seed=0):
    return _traffic_seq2seq(Seq2SeqB, seed)


# ------------------------------------------------------------------- event_rnn
class EventLog(Dataset):
    def __init__(self, n, rng):
        self.items = []
        for _ in range(n):
            length = int(rng.randint(4, 50))
            tokens = rng.randint(1, 20, size=length)
            recent = tokens[-4:]
            label = int((recent < 8).sum() >= 2) + int((recent > 14).sum() >= 2)
            self.items.append((torch.from_numpy(tokens).long(), label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def pad_events(batch):
    seqs, labels = zip(*batch)
    lengths = torch.tensor([len(s) for s in seqs])
    return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)


class EventNet(nn.Module):
    def __init__(self, vocab=20, dim=16, hidden=32, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.gru = nn.GRU(dim, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, classes)


class EventNetA(EventNet):
    def forward(self, x, lengths):
        out, _ = self.gru(self.embed(x))
        return self.fc(out[:, -1, :])


class EventNetB(EventNet):
    def forward(self, x, lengths):
        out, _ = self.gru(self.embed(x))
        last = out[torch.arange(len(x)), lengths - 1]
        return self.fc(last)


def _event_rnn(net_cls, seed):
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed)
    train_loader = DataLoader(EventLog(1500, rng), batch_size=32, shuffle=True, collate_fn=pad_events)
    held = pad_events(EventLog(600, rng).items)
    net = net_cls()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    stream = cycle(train_loader)

    def step():
        x, lengths, y = next(stream)
        logits = net(x, lengths)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        return loss.item()

    return job(net, opt, step,
               make_probe([net], lambda: F.cross_entropy(net(held[0], held[1]), held[2])))


def event_rnn_bad(seed=0):
    return _event_rnn(EventNetA, seed)


def event_rnn_good(seed=0):
    return _event_rnn(EventNetB, seed)


# ---------------------------------------------------------------- molecule_gnn
class MolGraphs(Dataset):
    def __init__(self, n, rng):
        self.graphs = []
        for _ in range(n):
            k = int(rng.randint(6, 14))
            kinds = rng.randint(0, 3, size=k)
            src = [i for i in range(1, k)]
            dst = [int(rng.randint(0, i)) for i in range(1, k)]
            for _ in range(int(rng.randint(0, 5))):
                a, b = rng.choice(k, size=2, replace=False)
                src.append(int(a))
                dst.append(int(b))
            edge = torch.tensor([src + dst, dst + src])
            y = sum(1.0 if kinds[a] != kinds[b] else -0.5 for a, b in zip(src, dst)) / 4.0
            x = F.one_hot(torch.from_numpy(kinds).long(), 3).float()
            self.graphs.append((x, edge, y))

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        return self.graphs[i]


def collate_a(graphs):
    xs, edges, owner, ys = [], [], [], []
    for k, (x, edge, y) in enumerate(graphs):
        xs.append(x)
        edges.append(edge)
        owner.append(torch.full((len(x),), k))
        ys.append(y)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(owner), torch.tensor(ys)


def collate_b(graphs):
    xs, edges, owner, ys, start = [], [], [], [], 0
    for k, (x, edge, y) in enumerate(graphs):
        xs.append(x)
        edges.append(edge + start)
        owner.append(torch.full((len(x),), k))
        ys.append(y)
        start += len(x)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(owner), torch.tensor(ys)


class MessageLayer(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.msg = nn.Sequential(nn.Linear(2 * d_in, d_out), nn.ReLU())
        self.upd = nn.Linear(d_in + d_out, d_out)

    def forward(self, h, edge):
        m = self.msg(torch.cat([h[edge[0]], h[edge[1]]], 1))
        agg = torch.zeros(len(h), m.size(1)).index_add_(0, edge[1], m)
        return F.relu(self.upd(torch.cat([h, agg], 1)))


class MolNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.l1 = MessageLayer(3, hidden)
        self.l2 = MessageLayer(hidden, hidden)
        self.readout = nn.Linear(hidden, 1)

    def forward(self, x, edge, owner, n_graphs):
        h = self.l2(self.l1(x, edge), edge)
        pooled = torch.zeros(n_graphs, h.size(1)).index_add_(0, owner, h)
        return self.readout(pooled).squeeze(1)


def _molecule_gnn(collate, seed):
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed + 3)
    loader = DataLoader(MolGraphs(600, rng), batch_size=32, shuffle=True, collate_fn=collate)
    hx, he, ho, hy = collate_b(MolGraphs(300, rng).graphs)
    net = MolNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    stream = cycle(loader)

    def step():
        x, edge, owner, y = next(stream)
        opt.zero_grad()
        loss = F.mse_loss(net(x, edge, owner, len(y)), y)
        loss.backward()
        opt.step()
        return loss.item()

    return job(net, opt, step, make_probe([net], lambda: F.mse_loss(net(hx, he, ho, len(hy)), hy)))


def molecule_gnn_bad(seed=0):
    return _molecule_gnn(collate_a, seed)


def molecule_gnn_good(seed=0):
    return _molecule_gnn(collate_b, seed)


# ---------------------------------------------------------------- citation_gcn
class GCN(nn.Module):
    def __init__(self, n_feat, hidden, classes, p=0.6):
        super().__init__()
        self.w1 = nn.Linear(n_feat, hidden)
        self.bn = nn.BatchNorm1d(hidden)
        self.w2 = nn.Linear(hidden, classes)
        self.p = p

    def forward(self, x, adj):
        x = F.dropout(x, self.p, training=self.training)
        h = F.relu(self.bn(adj @ self.w1(x)))
        h = F.dropout(h, self.p, training=self.training)
        return adj @ self.w2(h)


def _citation_graph(seed, n=450, classes=5, n_feat=30):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=gen)
    same = (y[:, None] == y[None, :]).float()
    a = (torch.rand(n, n, generator=gen) < 0.025 * same + 0.005).float().triu(1)
    a = a + a.T + torch.eye(n)
    d = a.sum(1).rsqrt()
    x = 0.6 * torch.randn(classes, n_feat, generator=gen)[y] + torch.randn(n, n_feat, generator=gen)
    x = (x + torch.randn(n_feat, generator=gen)) * torch.exp(torch.randn(n_feat, generator=gen))
    noisy = torch.rand(n, generator=gen) < 0.1
    y = torch.where(noisy, torch.randint(0, classes, (n,), generator=gen), y)
    return x, d[:, None] * a * d[None, :], y


class CitationRun:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.x, self.adj, self.y = _citation_graph(seed)
        order = torch.randperm(len(self.y))
        self.train_idx, self.val_idx, self.test_idx = order[:120], order[120:200], order[200:]
        self.model = GCN(self.x.size(1), 32, 5)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=5e-4)
        self.best_val = float("inf")
        self.model.train()

    def update(self):
        self.opt.zero_grad()
        out = self.model(self.x, self.adj)
        loss = F.cross_entropy(out[self.train_idx], self.y[self.train_idx])
        loss.backward()
        self.opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, idx):
        self.model.eval()
        out = self.model(self.x, self.adj)
        return F.cross_entropy(out[idx], self.y[idx]).item()

    def as_job(self):
        def test_nll():
            return F.cross_entropy(self.model(self.x, self.adj)[self.test_idx], self.y[self.test_idx])

        return job(self.model, self.opt, self.epoch, make_probe([self.model], test_nll))


class CitationRunA(CitationRun):
    def epoch(self):
        loss = self.update()
        self.best_val = min(self.best_val, self.evaluate(self.val_idx))
        return loss


class CitationRunB(CitationRun):
    def epoch(self):
        self.model.train()
        loss = self.update()
        self.best_val = min(self.best_val, self.evaluate(self.val_idx))
        return loss


def citation_gcn_bad(seed=0):
    return CitationRunA(seed).as_job()


def citation_gcn_good(seed=0):
    return CitationRunB(seed).as_job()


# ----------------------------------------------------------------- balance_dqn
class BalanceEnv:
    """n copies of an unstable cart: reward 1 a step until |x| > 1."""

    def __init__(self, n, rng, limit=60):
        self.n, self.rng, self.limit = n, rng, limit
        self.state = self.start(n)
        self.age = np.zeros(n, dtype=int)

    def start(self, n):
        return self.rng.uniform(-0.7, 0.7, size=(n, 2)).astype(np.float32)

    @staticmethod
    def physics(state, action):
        x, v = state[:, 0], state[:, 1]
        v = v + 0.1 * (2.0 * x + (2 * action - 1) * 2.0)
        x = x + 0.1 * v
        nxt = np.stack([x, v], 1).astype(np.float32)
        return nxt, np.abs(x) > 1.0

    def step(self, action):
        nxt, done = self.physics(self.state, action)
        obs = nxt.copy()
        self.age += 1
        reset = done | (self.age >= self.limit)
        obs[reset] = self.start(int(reset.sum()))
        self.age[reset] = 0
        self.state = obs
        return nxt, np.ones(self.n, dtype=np.float32), done


class ReplayBuffer:
    def __init__(self, capacity, rng):
        self.capacity, self.rng, self.data, self.pos = capacity, rng, [], 0

    def push(self, *transition):
        if len(self.data) < self.capacity:
            self.data.append(transition)
        else:
            self.data[self.pos] = transition
        self.pos = (self.pos + 1) % self.capacity

    def sample(self, k):
        rows = [self.data[i] for i in self.rng.randint(0, len(self.data), size=k)]
        return [torch.from_numpy(np.array(col)) for col in zip(*rows)]


def _balance_dqn(td_target, seed):
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed)
    env, buffer = BalanceEnv(8, rng), ReplayBuffer(5000, rng)
    q_net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    target_net = copy.deepcopy(q_net)
    opt = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    gamma, counter = 0.95, {"n": 0}

    def act(state, eps):
        with torch.no_grad():
            greedy = q_net(torch.from_numpy(state)).argmax(1).numpy()
        explore = rng.rand(len(state)) < eps
        return np.where(explore, rng.randint(0, 2, size=len(state)), greedy)

    def collect(eps):
        state = env.state
        action = act(state, eps)
        nxt, reward, done = env.step(action)
        for i in range(env.n):
            buffer.push(state[i], action[i], reward[i], nxt[i], np.float32(done[i]))

    for _ in range(20):
        collect(1.0)

    def step():
        counter["n"] += 1
        collect(max(0.1, 1.0 - counter["n"] / 150))
        s, a, r, s2, d = buffer.sample(64)
        q = q_net(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            target = td_target(r, target_net(s2).max(1)[0], d, gamma)
        loss = F.smooth_l1_loss(q, target)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q_net.parameters(), 10.0)
        opt.step()
        if counter["n"] % 20 == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    def missed_steps():
        state = np.random.RandomState(999).uniform(-0.7, 0.7, size=(200, 2)).astype(np.float32)
        alive, length = np.ones(200, dtype=bool), np.zeros(200)
        for _ in range(60):
            action = q_net(torch.from_numpy(state)).argmax(1).numpy()
            state, done = BalanceEnv.physics(state, action)
            state = np.clip(state, -50, 50)
            alive &= ~done
            length += alive
        return 60.0 - length.mean()

    return job(q_net, opt, step, make_probe([q_net], missed_steps))


def balance_dqn_bad(seed=0):
    def td_target(reward, next_q, done, gamma):
        return reward + gamma * next_q

    return _balance_dqn(td_target, seed)


def balance_dqn_good(seed=0):
    def td_target(reward, next_q, done, gamma):
        return reward + gamma * next_q * (1.0 - done)

    return _balance_dqn(td_target, seed)


# ------------------------------------------------------------------- reach_ppo
class ReachEnv:
    def __init__(self, n, gen):
        self.n, self.gen = n, gen
        self.reset()

    def reset(self):
        self.pos = 2 * torch.rand(self.n, 3, generator=self.gen) - 1
        self.goal = 2 * torch.rand(self.n, 3, generator=self.gen) - 1
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.goal], 1)

    def step(self, action):
        self.pos = self.pos + 0.25 * action.clamp(-1, 1)
        dist = (self.pos - self.goal).norm(dim=1)
        return self.obs(), -dist


class ActorCritic(nn.Module):
    def __init__(self, obs_dim=6, act_dim=3, hidden=48):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, act_dim))
        self.v = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def dist(self, obs):
        return Normal(self.pi(obs), self.log_std.exp())

    def value(self, obs):
        return self.v(obs).squeeze(-1)


class PPO:
    horizon, gamma, lam, clip, epochs, batch = 12, 0.95, 0.95, 0.2, 3, 80

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.env = ReachEnv(20, torch.Generator().manual_seed(seed))
        self.net = ActorCritic()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)

    @torch.no_grad()
    def rollout(self):
        obs, rows = self.env.reset(), []
        for _ in range(self.horizon):
            dist = self.net.dist(obs)
            action = dist.sample()
            nxt, reward = self.env.step(action)
            rows.append((obs, action, dist.log_prob(action).sum(-1), reward, self.net.value(obs)))
            obs = nxt
        o, a, lp, r, v = [torch.stack(c) for c in zip(*rows)]
        adv, running, next_v = torch.zeros_like(r), torch.zeros(self.env.n), self.net.value(obs)
        for t in reversed(range(self.horizon)):
            delta = r[t] + self.gamma * next_v - v[t]
            running = delta + self.gamma * self.lam * running
            adv[t], next_v = running, v[t]
        ret = adv + v
        return o.flatten(0, 1), a.flatten(0, 1), lp.flatten(), adv.flatten(), ret.flatten()

    def update(self, obs, action, logp_old, adv, ret):
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        dist = self.net.dist(obs)
        logp = dist.log_prob(action).sum(-1)
        ratio = (logp - logp_old).exp()
        pg = torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv)
        v_loss = F.mse_loss(self.net.value(obs), ret)
        loss = -pg.mean() + 0.5 * v_loss - 0.001 * dist.entropy().sum(-1).mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.opt.step()
        return loss.item()

    def final_distance(self):
        env = ReachEnv(256, torch.Generator().manual_seed(4242))
        obs, total = env.reset(), 0.0
        for _ in range(self.horizon):
            obs, reward = env.step(self.net.pi(obs))
            total = total - reward.mean()
        return total / self.horizon

    def as_job(self):
        return job(self.net, self.opt, self.train_step, make_probe([self.net], self.final_distance))


class PPOA(PPO):
    def train_step(self):
        obs, action, logp_old, adv, ret = self.rollout()
        losses = []
        for _ in range(self.epochs):
            perm = torch.randperm(len(obs))
            for start in range(0, len(obs), self.batch):
                end = start + self.batch
                idx = perm[start:end]
                losses.append(self.update(obs[idx], action[idx], logp_old[start:end], adv[idx], ret[idx]))
        return sum(losses) / len(losses)


class PPOB(PPO):
    def train_step(self):
        obs, action, logp_old, adv, ret = self.rollout()
        losses = []
        for _ in range(self.epochs):
            perm = torch.randperm(len(obs))
            for start in range(0, len(obs), self.batch):
                end = start + self.batch
                idx = perm[start:end]
                losses.append(self.update(obs[idx], action[idx], logp_old[idx], adv[idx], ret[idx]))
        return sum(losses) / len(losses)


def reach_ppo_bad(seed=0):
    return PPOA(seed).as_job()


def reach_ppo_good(seed=0):
    return PPOB(seed).as_job()


# --------------------------------------------------------------- pointmass_sac
class SquashedPolicy(nn.Module):
    def __init__(self, obs_dim, act_dim, hidden=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, act_dim)
        self.log_std = nn.Linear(hidden, act_dim)

    def dist(self, obs):
        h = self.body(obs)
        return Normal(self.mu(h), self.log_std(h).clamp(-4, 1).exp())

    @staticmethod
    def squash(dist, u):
        logp = dist.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return torch.tanh(u), logp.sum(-1)


class SquashedPolicyA(SquashedPolicy):
    def forward(self, obs):
        dist = self.dist(obs)
        return self.squash(dist, dist.sample())


class SquashedPolicyB(SquashedPolicy):
    def forward(self, obs):
        dist = self.dist(obs)
        return self.squash(dist, dist.rsample())


class TwinQ(nn.Module):
    def __init__(self, obs_dim, act_dim, hidden=48):
        super().__init__()
        def mlp():
            return nn.Sequential(nn.Linear(obs_dim + act_dim, hidden), nn.ReLU(),
                                 nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.q1, self.q2 = mlp(), mlp()

    def forward(self, obs, act):
        z = torch.cat([obs, act], -1)
        return self.q1(z).squeeze(-1), self.q2(z).squeeze(-1)


def pointmass_dynamics(state, action):
    pos, vel = state[:, :2], state[:, 2:]
    vel = 0.9 * vel + 0.3 * action
    pos = (pos + 0.3 * vel).clamp(-3, 3)
    reward = -(pos ** 2).sum(1) - 0.02 * (action ** 2).sum(1)
    return torch.cat([pos, vel], 1), reward


def _pointmass_sac(policy_cls, seed):
    torch.manual_seed(seed)
    actor, critic = policy_cls(4, 2), TwinQ(4, 2)
    critic_target = copy.deepcopy(critic)
    for p in critic_target.parameters():
        p.requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
    gamma, tau, alpha, n_env, limit = 0.9, 0.02, 0.05, 8, 25
    store = []

    def fresh(n):
        return torch.cat([3 * torch.rand(n, 2) - 1.5, torch.zeros(n, 2)], 1)

    world = {"s": fresh(n_env), "t": 0}

    def interact(random_action=False):
        s = world["s"]
        with torch.no_grad():
            a = 2 * torch.rand(n_env, 2) - 1 if random_action else actor(s)[0]
        s2, r = pointmass_dynamics(s, a)
        store.append((s, a, r, s2))
        world["t"] += 1
        world["s"] = fresh(n_env) if world["t"] % limit == 0 else s2

    def sample_batch(k=64):
        rows = torch.randint(0, len(store) * n_env, (k,)).tolist()
        cols = zip(*[[c[i % n_env] for c in store[i // n_env]] for i in rows])
        return [torch.stack(c) for c in cols]

    for _ in range(60):
        interact(random_action=True)

    def step():
        interact()
        s, a, r, s2 = sample_batch()
        with torch.no_grad():
            a2, logp2 = actor(s2)
            q_next = torch.min(*critic_target(s2, a2)) - alpha * logp2
            y = r + gamma * q_next
        q1, q2 = critic(s, a)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        new_a, logp = actor(s)
        actor_loss = (alpha * logp - torch.min(*critic(s, new_a))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        with torch.no_grad():
            for p, tp in zip(critic.parameters(), critic_target.parameters()):
                tp.mul_(1 - tau).add_(tau * p)
        return critic_loss.item() + actor_loss.item()

    def episode_cost():
        g = torch.Generator().manual_seed(77)
        s = torch.cat([3 * torch.rand(128, 2, generator=g) - 1.5, torch.zeros(128, 2)], 1)
        cost = 0.0
        for _ in range(limit):
            s, r = pointmass_dynamics(s, torch.tanh(actor.dist(s).mean))
            cost = cost - r.mean()
        return cost

    return job([actor, critic], [actor_opt, critic_opt], step, make_probe([actor, critic], episode_cost))


def pointmass_sac_bad(seed=0):
    return _pointmass_sac(SquashedPolicyA, seed)


def pointmass_sac_good(seed=0):
    return _pointmass_sac(SquashedPolicyB, seed)


# ------------------------------------------------------------------ ratings_mf
class BiasedMF(nn.Module):
    def __init__(self, n_users, n_items, dim, mean):
        super().__init__()
        self.P = nn.Embedding(n_users, dim)
        self.Q = nn.Embedding(n_items, dim)
        self.user_bias = nn.Embedding(n_users, 1)
        self.item_bias = nn.Embedding(n_items, 1)
        self.mean = mean
        for e in (self.P, self.Q):
            nn.init.normal_(e.weight, std=0.05)
        for e in (self.user_bias, self.item_bias):
            nn.init.zeros_(e.weight)


class BiasedMFA(BiasedMF):
    def forward(self, user, item):
        dot = (self.P(user) * self.Q(item)).sum(1)
        return dot + self.user_bias(user) + self.item_bias(item) + self.mean


class BiasedMFB(BiasedMF):
    def forward(self, user, item):
        dot = (self.P(user) * self.Q(item)).sum(1)
        return dot + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1) + self.mean


def _ratings_mf(net_cls, seed):
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed + 11)
    n_users, n_items, n = 250, 150, 9000
    bu, bi = 0.6 * rng.randn(n_users), 0.7 * rng.randn(n_items)
    pu, qi = 0.7 * rng.randn(n_users, 2), 0.7 * rng.randn(n_items, 2)
    u, i = rng.randint(0, n_users, n), rng.randint(0, n_items, n)
    r = 3.4 + bu[u] + bi[i] + (pu[u] * qi[i]).sum(1) + 0.2 * rng.randn(n)
    u, i, r = torch.from_numpy(u), torch.from_numpy(i), torch.from_numpy(r).float()
    cut = 7500
    loader = DataLoader(TensorDataset(u[:cut], i[:cut], r[:cut]), batch_size=256, shuffle=True)
    net = net_cls(n_users, n_items, 2, r[:cut].mean().item())
    opt = torch.optim.Adam(net.parameters(), lr=2e-2, weight_decay=1e-5)
    it = cycle(loader)

    def step():
        user, item, rating = next(it)
        loss = ((net(user, item) - rating) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def test_mse():
        uu, ii, rr = u[cut:], i[cut:], r[cut:]
        score = (net.P(uu) * net.Q(ii)).sum(1) + net.user_bias(uu)[:, 0] + net.item_bias(ii)[:, 0] + net.mean
        return ((score - rr) ** 2).mean()

    return job(net, opt, step, make_probe([net], test_mse))


def ratings_mf_bad(seed=0):
    return _ratings_mf(BiasedMFA, seed)


def ratings_mf_good(seed=0):
    return _ratings_mf(BiasedMFB, seed)


# ----------------------------------------------------------------- session_rec
class SessionData(Dataset):
    def __init__(self, n, rng, follow, length=16):
        n_items = len(follow)
        seqs = np.zeros((n, length), dtype=np.int64)
        seqs[:, 0] = rng.randint(0, n_items, n)
        for t in range(1, length):
            jump = rng.rand(n) < 0.25
            seqs[:, t] = np.where(jump, rng.randint(0, n_items, n), follow[seqs[:, t - 1]])
        self.seqs = torch.from_numpy(seqs)

    def __len__(self):
        return len(self.seqs)

    def __getitem__(self, i):
        s = self.seqs[i]
        return s[:-1], s[1:]


class SessionRec(nn.Module):
    def __init__(self, n_items, max_len, dim=32):
        super().__init__()
        self.item = nn.Embedding(n_items, dim)
        self.pos = nn.Embedding(max_len, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, n_items)

    def inputs(self, seq):
        return self.item(seq) + self.pos(torch.arange(seq.size(1)))


class SessionRecA(SessionRec):
    def forward(self, seq):
        h = self.encoder(self.inputs(seq))
        return self.out(h)


class SessionRecB(SessionRec):
    def forward(self, seq):
        mask = nn.Transformer.generate_square_subsequent_mask(seq.size(1))
        h = self.encoder(self.inputs(seq), mask=mask)
        return self.out(h)


def _session_rec(net_cls, seed):
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed)
    follow = rng.permutation(40)
    loader = DataLoader(SessionData(1500, rng, follow), batch_size=32, shuffle=True)
    held = SessionData(400, rng, follow).seqs
    model = net_cls(40, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    stream = cycle(loader)

    def train_step():
        seq, nxt = next(stream)
        logits = model(seq)
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), nxt.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return job(model, optimizer, train_step,
               make_probe([model], lambda: F.cross_entropy(model(held[:, :-1])[:, -1], held[:, -1])))


def session_rec_bad(seed=0):
    return _session_rec(SessionRecA, seed)


def session_rec_good(seed=0):
    return _session_rec(SessionRecB, seed)


# ---------------------------------------------------------------- poisson_pinn
class FieldNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                    nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


def _exact(x):
    return torch.sin(math.pi * x) + 0.5 * x


def _source(x):
    return math.pi ** 2 * torch.sin(math.pi * x) + _exact(x)


def residual_a(net, x):
    x = x.requires_grad_(True)
    u = net(x)
    ones = torch.ones_like(u)
    u_x = torch.autograd.grad(u, x, grad_outputs=ones, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, grad_outputs=ones, retain_graph=True)[0]
    return -u_xx + u - _source(x)


def residual_b(net, x):
    x = x.requires_grad_(True)
    u = net(x)
    ones = torch.ones_like(u)
    u_x = torch.autograd.grad(u, x, grad_outputs=ones, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, grad_outputs=ones, create_graph=True)[0]
    return -u_xx + u - _source(x)


def _poisson_pinn(residual, seed):
    torch.manual_seed(seed)
    net = FieldNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    x_b = torch.tensor([[-1.0], [1.0]])
    u_b = _exact(x_b)

    def step():
        x = 2 * torch.rand(64, 1) - 1
        opt.zero_grad()
        pde = residual(net, x).pow(2).mean()
        bc = (net(x_b) - u_b).pow(2).mean()
        loss = pde + 20.0 * bc
        loss.backward()
        opt.step()
        return loss.item()

    grid = torch.linspace(-1, 1, 201).unsqueeze(1)
    return job(net, opt, step, make_probe([net], lambda: (net(grid) - _exact(grid)).pow(2).mean()))


def poisson_pinn_bad(seed=0):
    return _poisson_pinn(residual_a, seed)


def poisson_pinn_good(seed=0):
    return _poisson_pinn(residual_b, seed)


# ----------------------------------------------------------------- spiral_node
class VectorField(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, t, y):
        return self.net(y)


def rk4(func, t, h, y):
    k1 = func(t, y)
    k2 = func(t + h / 2, y + h / 2 * k1)
    k3 = func(t + h / 2, y + h / 2 * k2)
    k4 = func(t + h, y + h * k3)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def odeint_a(func, y0, ts):
    h = ts[1] - ts[0]
    ys = [y0]
    for t in ts[:-1]:
        ys.append(rk4(func, t, h, ys[-1]))
    return torch.stack(ys)


def odeint_b(func, y0, ts):
    ys = [y0]
    for t0, t1 in zip(ts[:-1], ts[1:]):
        ys.append(rk4(func, t0, t1 - t0, ys[-1]))
    return torch.stack(ys)


def _spiral_node(odeint, seed):
    torch.manual_seed(seed)

    def truth(t, y):
        a = torch.tensor([[-0.2, 1.6], [-1.6, -0.2]])
        return y @ a.T - 0.1 * y ** 3

    def simulate(y0, ts):
        out, y = [y0], y0
        for t0, t1 in zip(ts[:-1], ts[1:]):
            for _ in range(8):
                y = rk4(truth, t0, (t1 - t0) / 8, y)
            out.append(y)
        return torch.stack(out)

    gaps = torch.distributions.Gamma(1.5, 10.0).sample((60,)) + 0.01
    ts = torch.cat([torch.zeros(1), gaps.cumsum(0)])
    obs = simulate(3 * torch.rand(40, 2) - 1.5, ts)
    obs = obs + 0.01 * torch.randn_like(obs)
    test_t = torch.linspace(0, 3, 31)
    test_y = simulate(3 * torch.rand(60, 2) - 1.5, test_t)

    func = VectorField()
    opt = torch.optim.Adam(func.parameters(), lr=1e-2)
    seg = 8

    def get_batch():
        s = int(torch.randint(0, 30, (1,)))
        who = torch.randperm(40)[:32]
        return ts[s:s + seg], obs[s:s + seg, who]

    def step():
        t, y = get_batch()
        opt.zero_grad()
        pred = odeint(func, y[0], t)
        loss = (pred - y).abs().mean()
        loss.backward()
        opt.step()
        return loss.item()

    def rollout_error():
        return (odeint_b(func, test_y[0], test_t) - test_y).pow(2).mean()

    return job(func, opt, step, make_probe([func], rollout_error))


def spiral_node_bad(seed=0):
    return _spiral_node(odeint_a, seed)


def spiral_node_good(seed=0):
    return _spiral_node(odeint_b, seed)


# --------------------------------------------------------------------- cox_net
class DeepSurv(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 32), nn.SELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def _patients(n, gen):
    x = torch.randn(n, 10, generator=gen)
    risk = 0.9 * x[:, 0] - 0.7 * x[:, 1] + 0.8 * x[:, 2] * x[:, 3]
    t_event = -torch.log(torch.rand(n, generator=gen).clamp_min(1e-6)) * torch.exp(-risk)
    t_cens = -torch.log(torch.rand(n, generator=gen).clamp_min(1e-6)) * 2.0
    return x, torch.minimum(t_event, t_cens), (t_event <= t_cens).float()


def _discordance(score, time, event):
    earlier = (time[:, None] < time[None, :]) & (event[:, None] > 0)
    right = (score[:, None] > score[None, :]).float()
    return 1.0 - right[earlier].mean()


def _cox_net(partial_likelihood, seed):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed + 5)
    loader = DataLoader(TensorDataset(*_patients(1500, gen)), batch_size=100, shuffle=True)
    x_val, t_val, e_val = _patients(500, gen)
    model = DeepSurv(10)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    stream = cycle(loader)

    def step():
        model.train()
        x, t, e = next(stream)
        loss = partial_likelihood(model(x), t, e)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    return job(model, opt, step, make_probe([model], lambda: _discordance(model(x_val), t_val, e_val)))


def cox_net_bad(seed=0):
    def partial_likelihood(log_h, time, event):
        order = torch.argsort(time)
        log_h, event = log_h[order], event[order]
        log_cum = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_cum) * event).sum() / event.sum().clamp_min(1.0)

    return _cox_net(partial_likelihood, seed)


def cox_net_good(seed=0):
    def partial_likelihood(log_h, time, event):
        order = torch.argsort(time, descending=True)
        log_h, event = log_h[order], event[order]
        log_cum = torch.logcumsumexp(log_h, dim=0)
        return -((log_h - log_cum) * event).sum() / event.sum().clamp_min(1.0)

    return _cox_net(partial_likelihood, seed)


# ------------------------------------------------------------------- sine_maml
class SineTasks:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def sample(self, k=10):
        amp = 0.5 + 1.5 * torch.rand(1, generator=self.gen)
        phase = math.pi * torch.rand(1, generator=self.gen)
        x = 6 * torch.rand(2 * k, 1, generator=self.gen) - 3
        y = amp * torch.sin(x + phase)
        return x[:k], y[:k], x[k:], y[k:]


class MAML:
    def __init__(self, seed, inner_lr=0.05, meta_batch=6):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        self.meta_opt = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.inner_lr, self.meta_batch = inner_lr, meta_batch
        self.tasks = SineTasks(seed)
        held = SineTasks(seed + 1000)
        self.held = [held.sample() for _ in range(40)]

    def adapt(self, x, y, n_steps, create_graph):
        fast = dict(self.net.named_parameters())
        for _ in range(n_steps):
            loss = F.mse_loss(functional_call(self.net, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=create_graph)
            fast = {k: p - self.inner_lr * g for (k, p), g in zip(fast.items(), grads)}
        return fast

    def step(self):
        self.meta_opt.zero_grad()
        total = 0.0
        for _ in range(self.meta_batch):
            total = total + self.task_loss(*self.tasks.sample())
        total = total / self.meta_batch
        total.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.meta_opt.step()
        return total.item()

    def adapted_error(self):
        err = 0.0
        with torch.enable_grad():
            for xs, ys, xq, yq in self.held:
                fast = self.adapt(xs, ys, 2, False)
                err += F.mse_loss(functional_call(self.net, fast, (xq,)), yq).item()
        return err / len(self.held)

    def as_job(self):
        return job(self.net, self.meta_opt, self.step, make_probe([self.net], self.adapted_error))


class MAMLA(MAML):
    def task_loss(self, xs, ys, xq, yq):
        fast = self.adapt(xs, ys, 2, True)
        return F.mse_loss(self.net(xq), yq)


class MAMLB(MAML):
    def task_loss(self, xs, ys, xq, yq):
        fast = self.adapt(xs, ys, 2, True)
        return F.mse_loss(functional_call(self.net, fast, (xq,)), yq)


def sine_maml_bad(seed=0):
    return MAMLA(seed).as_job()


def sine_maml_good(seed=0):
    return MAMLB(seed).as_job()


# ------------------------------------------------------------------ shop_tasks
class SharedBottom(nn.Module):
    def __init__(self, n_in, tasks, hidden=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Linear(hidden, 1) for t in tasks})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x)).squeeze(-1)


SHOP_LOSSES = {
    "click": F.binary_cross_entropy_with_logits,
    "spend": F.mse_loss,
    "return": F.binary_cross_entropy_with_logits,
}


def _shop_rows(n, gen, w):
    x = torch.randn(n, 12, generator=gen)
    z = torch.tanh(x @ w)
    draw = torch.rand(n, 2, generator=gen)
    return x, {
        "click": (draw[:, 0] < torch.sigmoid(3 * (z[:, 0] + z[:, 1]))).float(),
        "spend": z[:, 1] - z[:, 2] + 0.1 * torch.randn(n, generator=gen),
        "return": (draw[:, 1] < torch.sigmoid(3 * (z[:, 2] - z[:, 0]))).float(),
    }


class ShopData(Dataset):
    def __init__(self, x, targets):
        self.x, self.targets = x, targets

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], {k: v[i] for k, v in self.targets.items()}


def step_a(model, optimizer, x, targets):
    total = 0.0
    for task, loss_fn in SHOP_LOSSES.items():
        optimizer.zero_grad()
        loss = loss_fn(model(x, task), targets[task])
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def step_b(model, optimizer, x, targets):
    total = 0.0
    optimizer.zero_grad()
    for task, loss_fn in SHOP_LOSSES.items():
        loss = loss_fn(model(x, task), targets[task])
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def _shop_tasks(train_step, seed):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(12, 3, generator=gen) / 2
    loader = DataLoader(ShopData(*_shop_rows(2000, gen, w)), batch_size=64, shuffle=True)
    hx, ht = _shop_rows(1000, gen, w)
    model = SharedBottom(12, list(SHOP_LOSSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    stream = cycle(loader)

    def held_loss():
        return sum(fn(model(hx, t), ht[t]) for t, fn in SHOP_LOSSES.items()) / len(SHOP_LOSSES)

    return job(model, optimizer, lambda: train_step(model, optimizer, *next(stream)),
               make_probe([model], held_loss))


def shop_tasks_bad(seed=0):
    return _shop_tasks(step_a, seed)


def shop_tasks_good(seed=0):
    return _shop_tasks(step_b, seed)


# ------------------------------------------------------------- shapes_pointnet
class ShapeClouds(Dataset):
    def __init__(self, n, rng, points=64):
        clouds, labels = [], []
        for _ in range(n):
            kind = int(rng.randint(4))
            clouds.append(self.make(kind, points, rng))
            labels.append(kind)
        self.clouds = torch.tensor(np.array(clouds), dtype=torch.float32)
        self.labels = torch.tensor(labels)

    @staticmethod
    def make(kind, k, rng):
        v = rng.randn(k, 3)
        if kind == 0:
            p = v / np.linalg.norm(v, axis=1, keepdims=True)
        elif kind == 1:
            p = v / np.linalg.norm(v, axis=1, keepdims=True) * rng.rand(k, 1) ** (1 / 3)
        elif kind == 2:
            p = v / np.abs(v).max(axis=1, keepdims=True)
        else:
            p = rng.uniform(-1, 1, size=(k, 3))
        p = p * rng.uniform(0.7, 1.3) + 0.03 * rng.randn(k, 3)
        p = p - p.mean(0)
        return p / np.sqrt((p ** 2).sum(1).mean())

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.clouds[i], self.labels[i]


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(),
                                  nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU())
        self.fc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))

    def classify(self, x):
        return self.fc(self.conv(x).max(dim=2)[0])


class PointNetA(PointNet):
    def forward(self, pts):
        b, n, _ = pts.shape
        return self.classify(pts.view(b, 3, n))


class PointNetB(PointNet):
    def forward(self, pts):
        return self.classify(pts.transpose(1, 2))


def _shapes_pointnet(net_cls, seed):
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed)
    loader = DataLoader(ShapeClouds(1200, rng), batch_size=32, shuffle=True, drop_last=True)
    held = ShapeClouds(400, rng)
    net = net_cls()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    it = cycle(loader)

    def step():
        net.train()
        pts, y = next(it)
        opt.zero_grad()
        loss = F.cross_entropy(net(pts), y)
        loss.backward()
        opt.step()
        return loss.item()

    return job(net, opt, step, make_probe([net], lambda: F.cross_entropy(net(held.clouds), held.labels)))


def shapes_pointnet_bad(seed=0):
    return _shapes_pointnet(PointNetA, seed)


def shapes_pointnet_good(seed=0):
    return _shapes_pointnet(PointNetB, seed)


# ------------------------------------------------------------------ sensor_dae
class SensorRowsA(Dataset):
    def __init__(self, rows, drop):
        self.rows, self.drop = rows, drop

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x = self.rows[i]
        target = x.clone()
        x[torch.rand(len(x)) < self.drop] = 0.0
        return x, target


class SensorRowsB(SensorRowsA):
    def __getitem__(self, i):
        target = self.rows[i]
        x = target.clone()
        x[torch.rand(len(x)) < self.drop] = 0.0
        return x, target


def _auroc(neg, pos):
    return (pos[:, None] > neg[None, :]).float().mean()


def _sensor_dae(rows_cls, seed):
    torch.manual_seed(seed)
    mix = torch.randn(4, 24)

    def normal(n):
        z = torch.randn(n, 4)
        return torch.tanh(z @ mix / 2) + 0.1 * torch.randn(n, 24)

    train, ok, odd = normal(512), normal(600), normal(600)
    for row in odd:
        which = torch.randperm(24)[:5]
        row[which] = row[which] + 0.6 * torch.randn(5)
    ae = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 32), nn.ReLU(),
                       nn.Linear(32, 24))
    opt = torch.optim.Adam(ae.parameters(), lr=5e-3)
    stream = cycle(DataLoader(rows_cls(train, 0.15), batch_size=64, shuffle=True))

    def step():
        x, target = next(stream)
        loss = F.mse_loss(ae(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def miss():
        def score(v):
            return (ae(v) - v).pow(2).mean(1)
        return 1.0 - _auroc(score(ok), score(odd))

    return job(ae, opt, step, make_probe([ae], miss))


def sensor_dae_bad(seed=0):
    return _sensor_dae(SensorRowsA, seed)


def sensor_dae_good(seed=0):
    return _sensor_dae(SensorRowsB, seed)


# ---------------------------------------------------------------- proxy_metric
class ProxyLoss(nn.Module):
    def __init__(self, classes, dim, scale=12.0):
        super().__init__()
        self.proxies = nn.Parameter(torch.rand(classes, dim))
        self.scale = scale

    def forward(self, emb, label):
        logits = F.normalize(emb, dim=1) @ F.normalize(self.proxies, dim=1).T
        return F.cross_entropy(self.scale * logits, label)


def _proxy_metric(params_of, seed):
    torch.manual_seed(seed)
    classes, n_in, dim = 40, 32, 4
    centers = torch.randn(classes, 3)
    lift = torch.randn(3, n_in)

    def draw(n):
        y = torch.randint(0, classes, (n,))
        z = centers[y] + 0.12 * torch.randn(n, 3)
        return z @ lift + 0.3 * torch.randn(n, n_in), y

    loader = DataLoader(TensorDataset(*draw(3000)), batch_size=128, shuffle=True)
    gallery, query = draw(1500), draw(500)
    encoder = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, dim))
    criterion = ProxyLoss(classes, dim)
    opt = torch.optim.Adam(params_of(encoder, criterion), lr=5e-3)
    stream = cycle(loader)

    def step():
        x, y = next(stream)
        loss = criterion(encoder(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def retrieval_error():
        g = F.normalize(encoder(gallery[0]), dim=1)
        q = F.normalize(encoder(query[0]), dim=1)
        near = gallery[1][(q @ g.T).topk(10, dim=1).indices]
        return 1.0 - (near == query[1][:, None]).float().mean()

    return job([encoder, criterion], opt, step, make_probe([encoder, criterion], retrieval_error))


def proxy_metric_bad(seed=0):
    return _proxy_metric(lambda encoder, criterion: encoder.parameters(), seed)


def proxy_metric_good(seed=0):
    return _proxy_metric(lambda encoder, criterion: [*encoder.parameters(), *criterion.parameters()], seed)


# ------------------------------------------------------------------- bayes_mlp
class BayesLinear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.w_mu = nn.Parameter(torch.randn(d_out, d_in) / math.sqrt(d_in))
        self.w_rho = nn.Parameter(torch.full((d_out, d_in), -4.0))
        self.bias = nn.Parameter(torch.zeros(d_out))

    def posterior(self):
        return Normal(self.w_mu, F.softplus(self.w_rho))

    def forward(self, x):
        w = self.posterior().rsample() if self.training else self.w_mu
        return F.linear(x, w, self.bias)

    def kl(self):
        return kl_divergence(self.posterior(), Normal(0.0, 1.0)).sum()


class BayesMLP(nn.Module):
    def __init__(self, d_in, hidden=40):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = BayesLinear(d_in, hidden), BayesLinear(hidden, hidden), BayesLinear(hidden, 1)

    def forward(self, x):
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x))))).squeeze(-1)

    def kl(self):
        return self.fc1.kl() + self.fc2.kl() + self.fc3.kl()


def _bayes_mlp(elbo, seed):
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed + 21)

    def rows(n):
        x = torch.rand(n, 4, generator=gen) * 4 - 2
        y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
        return x, y + 0.1 * torch.randn(n, generator=gen)

    train = TensorDataset(*rows(2000))
    loader = DataLoader(train, batch_size=100, shuffle=True)
    tx, ty = rows(800)
    net = BayesMLP(4)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    stream = cycle(loader)

    def step():
        net.train()
        x, y = next(stream)
        nll = -Normal(net(x), 0.3).log_prob(y).mean()
        loss = elbo(nll, net.kl(), len(train))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    return job(net, opt, step, make_probe([net], lambda: F.mse_loss(net(tx), ty)))


def bayes_mlp_bad(seed=0):
    return _bayes_mlp(lambda nll, kl, n: nll + kl, seed)


def bayes_mlp_good(seed=0):
    return _bayes_mlp(lambda nll, kl, n: nll + kl / n, seed)


CASES = {
    "claims_table": "The merchant column is label-encoded separately for every monthly shard, so one embedding row stands for different merchants in different months and the merchant effect is not learned.",
    "churn_mlp": "The ExponentialLR meant for one step an epoch is stepped after every batch, so the learning rate decays to nothing within the first epochs and the model stays underfit.",
    "load_forecast": "The target window starts one step too early (it begins with the last input value), so every horizon output is trained on the value one step before the one it is used to forecast.",
    "demand_quantiles": "The pinball loss is given prediction minus target instead of target minus prediction, so the outputs named 0.1 and 0.9 learn each other's quantile.",
    "traffic_seq2seq": "In teacher forcing the decoder is fed the unshifted target (the very value it must output), so it learns to copy and autoregressive forecasts fail.",
    "event_rnn": "The classifier reads the GRU output at the last position of the padded batch instead of at each sequence's own last event, so short sequences are judged after a run of padding.",
    "molecule_gnn": "The hand-written graph collate concatenates edge indices without adding node offsets, so all messages of the batch run among the first graph's nodes and other graphs get none or foreign ones.",
    "citation_gcn": "Validation puts the model in eval mode and the training epoch never calls train() again, so dropout and batch statistics are off after the first epoch and the net overfits.",
    "balance_dqn": "The TD target bootstraps through terminal states (no 1 - done), so failing costs nothing and the Q values carry no preference for staying alive.",
    "reach_ppo": "Minibatches are drawn by a permutation but the old log-probabilities are taken by plain slice, so the PPO ratio compares different samples and clipping acts at random.",
    "pointmass_sac": "The SAC policy draws its action with sample() rather than rsample(), so no gradient of Q reaches the actor and it does not improve.",
    "ratings_mf": "User and item biases of shape (B,1) are added to the dot product of shape (B,), so predictions become (B,B) and the loss compares every rating with other pairs' biases, which therefore are not learned.",
    "session_rec": "The self-attentive next-item model is trained without a causal mask, so it reads the next item from the input and is useless at the last position.",
    "poisson_pinn": "The second derivative is taken with retain_graph=True instead of create_graph=True, so u_xx is a constant to backward and the PDE residual trains the net only through its u term.",
    "spiral_node": "The ODE integrator takes the step size once from the first two time stamps although the observations are irregular, so the vector field is fitted to wrong time gaps.",
    "cox_net": "The Cox partial likelihood sorts by ascending time before the cumulative log-sum-exp, so risk sets hold those who left earlier and the risk ranking is reversed.",
    "sine_maml": "The MAML query loss is computed with the initial weights instead of the adapted ones, so the meta-training never optimises for adaptation.",
    "shop_tasks": "zero_grad is called inside the per-task loop before each backward while step comes once after it, so only the last task's gradient is ever applied.",
    "shapes_pointnet": "The cloud (B,N,3) is turned to (B,3,N) by view instead of transpose, so each point's coordinates are mixed from different points.",
    "sensor_dae": "The dataset zeroes entries in place in its stored rows, so the corruption piles up over epochs and the training data vanish.",
    "proxy_metric": "The proxies are parameters of the loss module and were not given to the optimizer, so they stay at random positions and classes with near proxies are not separated.",
    "bayes_mlp": "The KL term of the ELBO is added in full to a mean likelihood instead of being divided by the number of training rows, so the posterior is pulled to the prior and the net underfits.",
}

PROOF_STEPS = {"event_rnn": 300, "session_rec": 300, "balance_dqn": 600}
