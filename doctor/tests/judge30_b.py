import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


@contextmanager
def evaluating(*models):
    was = [[(m, m.training) for m in model.modules()] for model in models]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for group in was:
            for m, mode in group:
                m.training = mode


def forever(loader):
    while True:
        for batch in loader:
            yield batch


def gen(seed):
    return torch.Generator().manual_seed(seed)


def auc(scores_normal, scores_anomal):
    diff = scores_anomal[:, None] - scores_normal[None, :]
    return ((diff > 0).float() + 0.5 * (diff == 0).float()).mean().item()


def tab_price_bad():
    torch.manual_seed(11)
    g = gen(111)
    x = torch.randn(2000, 12, generator=g)
    y = 2.0 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] + torch.sin(2 * x[:, 4]) + 0.1 * torch.randn(2000, generator=g)
    train = TensorDataset(x[:1600], y[:1600])
    x_test, y_test = x[1600:], y[1600:]
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True, generator=gen(12))
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        features, price = next(batches)
        optimizer.zero_grad()
        pred = model(features)
        loss = ((pred - price) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return ((model(x_test)[:, 0] - y_test) ** 2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tab_price_good():
    torch.manual_seed(11)
    g = gen(111)
    x = torch.randn(2000, 12, generator=g)
    y = 2.0 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] + torch.sin(2 * x[:, 4]) + 0.1 * torch.randn(2000, generator=g)
    train = TensorDataset(x[:1600], y[:1600])
    x_test, y_test = x[1600:], y[1600:]
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True, generator=gen(12))
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        features, price = next(batches)
        optimizer.zero_grad()
        pred = model(features)
        loss = ((pred.squeeze(-1) - price) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return ((model(x_test)[:, 0] - y_test) ** 2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ts_load_bad():
    torch.manual_seed(21)
    g = gen(211)
    t = torch.arange(1400.0)
    load = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 168) + 0.3 * torch.sin(2 * math.pi * t / 12 + 1)
    load = load + 0.05 * torch.randn(1400, generator=g)
    windows = load.unfold(0, 36, 1)
    x, y = windows[:, :30].unsqueeze(-1), windows[:, 30:]
    train = TensorDataset(x[:1024], y[:1024])
    x_test, y_test = x[1100:], y[1100:]
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True, generator=gen(22))

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(1, 24, batch_first=True)
            self.head = nn.Linear(24, 6)

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1])

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batches = forever(loader)

    def step(i):
        model.train()
        past, future = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(past), future)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ts_load_good():
    torch.manual_seed(21)
    g = gen(211)
    t = torch.arange(1400.0)
    load = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 168) + 0.3 * torch.sin(2 * math.pi * t / 12 + 1)
    load = load + 0.05 * torch.randn(1400, generator=g)
    windows = load.unfold(0, 36, 1)
    x, y = windows[:, :30].unsqueeze(-1), windows[:, 30:]
    train = TensorDataset(x[:1024], y[:1024])
    x_test, y_test = x[1100:], y[1100:]
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True, generator=gen(22))

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(1, 24, batch_first=True)
            self.head = nn.Linear(24, 6)

        def forward(self, x):
            _, h = self.gru(x)
            return self.head(h[-1])

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batches = forever(loader)

    def step(i):
        model.train()
        past, future = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(past), future)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ts_sales_bad():
    torch.manual_seed(31)
    g = gen(311)
    n = 900
    level = 4.0 * torch.randn(n, 1, generator=g)
    scale = 0.5 + 1.5 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    trend = 0.02 * torch.randn(n, 1, generator=g)
    t = torch.arange(32.0)
    series = level + scale * (torch.sin(2 * math.pi * t / 12 + phase) + trend * t + 0.05 * torch.randn(n, 32, generator=g))
    x, y = series[:, :24], series[:, 24:]
    train = TensorDataset(x[:700], y[:700])
    x_test, y_test = x[700:], y[700:]
    loader = DataLoader(train, batch_size=50, shuffle=True, generator=gen(32))

    class SalesNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 8))

        def forward(self, x):
            mean = x.mean(dim=1, keepdim=True)
            std = x.std(dim=1, keepdim=True) + 1e-5
            out = self.body((x - mean) / std)
            return out

    model = SalesNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    batches = forever(loader)

    def step(i):
        model.train()
        past, future = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(past), future)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.l1_loss(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ts_sales_good():
    torch.manual_seed(31)
    g = gen(311)
    n = 900
    level = 4.0 * torch.randn(n, 1, generator=g)
    scale = 0.5 + 1.5 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    trend = 0.02 * torch.randn(n, 1, generator=g)
    t = torch.arange(32.0)
    series = level + scale * (torch.sin(2 * math.pi * t / 12 + phase) + trend * t + 0.05 * torch.randn(n, 32, generator=g))
    x, y = series[:, :24], series[:, 24:]
    train = TensorDataset(x[:700], y[:700])
    x_test, y_test = x[700:], y[700:]
    loader = DataLoader(train, batch_size=50, shuffle=True, generator=gen(32))

    class SalesNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 8))

        def forward(self, x):
            mean = x.mean(dim=1, keepdim=True)
            std = x.std(dim=1, keepdim=True) + 1e-5
            out = self.body((x - mean) / std)
            return out * std + mean

    model = SalesNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    batches = forever(loader)

    def step(i):
        model.train()
        past, future = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(past), future)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.l1_loss(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seq_sensor_bad():
    torch.manual_seed(41)
    g = gen(411)
    n = 2300
    x = torch.randn(n, 20, 4, generator=g)
    gate = (x[..., 1] > 0).float()
    score = (x[..., 0] * gate).sum(1)
    y = (score > 0).long()
    train = TensorDataset(x[:1800], y[:1800])
    x_test, y_test = x[1800:], y[1800:]
    loader = DataLoader(train, batch_size=60, shuffle=True, generator=gen(42))

    class SensorLSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 32)
            self.head = nn.Linear(32, 2)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.head(out[:, -1])

    model = SensorLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        signal, label = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(signal), label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seq_sensor_good():
    torch.manual_seed(41)
    g = gen(411)
    n = 2300
    x = torch.randn(n, 20, 4, generator=g)
    gate = (x[..., 1] > 0).float()
    score = (x[..., 0] * gate).sum(1)
    y = (score > 0).long()
    train = TensorDataset(x[:1800], y[:1800])
    x_test, y_test = x[1800:], y[1800:]
    loader = DataLoader(train, batch_size=60, shuffle=True, generator=gen(42))

    class SensorLSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 32, batch_first=True)
            self.head = nn.Linear(32, 2)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.head(out[:, -1])

    model = SensorLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        signal, label = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(signal), label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seq_recall_bad():
    torch.manual_seed(51)
    data_rng = gen(511)

    def make_batch(n, rng):
        symbol = torch.randint(0, 6, (n, 12), generator=rng)
        marker = torch.zeros(n, 12)
        where = torch.randint(0, 4, (n,), generator=rng)
        marker[torch.arange(n), where] = 1.0
        target = symbol[torch.arange(n), where]
        return torch.cat([F.one_hot(symbol, 6).float(), marker.unsqueeze(-1)], -1), target

    x_test, y_test = make_batch(400, gen(512))

    class Recall(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(7, 48)
            self.out = nn.Linear(48, 6)

        def forward(self, x):
            h = x.new_zeros(x.size(0), 48)
            for t in range(x.size(1)):
                h = self.cell(x[:, t], h.detach())
            return self.out(h)

    model = Recall()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        model.train()
        x, y = make_batch(64, data_rng)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seq_recall_good():
    torch.manual_seed(51)
    data_rng = gen(511)

    def make_batch(n, rng):
        symbol = torch.randint(0, 6, (n, 12), generator=rng)
        marker = torch.zeros(n, 12)
        where = torch.randint(0, 4, (n,), generator=rng)
        marker[torch.arange(n), where] = 1.0
        target = symbol[torch.arange(n), where]
        return torch.cat([F.one_hot(symbol, 6).float(), marker.unsqueeze(-1)], -1), target

    x_test, y_test = make_batch(400, gen(512))

    class Recall(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(7, 48)
            self.out = nn.Linear(48, 6)

        def forward(self, x):
            h = x.new_zeros(x.size(0), 48)
            for t in range(x.size(1)):
                h = self.cell(x[:, t], h)
            return self.out(h)

    model = Recall()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        model.train()
        x, y = make_batch(64, data_rng)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_molecule_bad():
    torch.manual_seed(61)
    g = gen(611)

    def make_graph():
        n = int(torch.randint(6, 12, (1,), generator=g))
        x = torch.randn(n, 5, generator=g)
        src = torch.randint(0, n, (2 * n,), generator=g)
        dst = torch.randint(0, n, (2 * n,), generator=g)
        edge = torch.cat([torch.stack([src, dst]), torch.stack([dst, src])], 1)
        pair = (x[edge[0], 0] * x[edge[1], 0] + 0.5 * x[edge[0], 1] * x[edge[1], 2]).mean()
        return x, edge, 2.0 * pair + 0.3 * x[:, 3].mean()

    graphs = [make_graph() for _ in range(500)]
    train, test = graphs[:420], graphs[420:]

    def collate(items):
        xs, edges, ys, owner = [], [], [], []
        offset = 0
        for k, (x, edge, y) in enumerate(items):
            xs.append(x)
            edges.append(edge)
            ys.append(y)
            owner.append(torch.full((x.size(0),), k))
            offset += x.size(0)
        return torch.cat(xs), torch.cat(edges, 1), torch.cat(owner), torch.stack(ys)

    class MPNN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.message = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
            self.update = nn.Sequential(nn.Linear(5 + hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
            self.readout = nn.Linear(hidden, 1)

        def forward(self, x, edge, owner, count):
            m = self.message(torch.cat([x[edge[0]], x[edge[1]]], -1))
            agg = x.new_zeros(x.size(0), m.size(1)).index_add(0, edge[1], m)
            h = self.update(torch.cat([x, agg], -1))
            size = torch.bincount(owner, minlength=count).clamp(min=1).unsqueeze(-1)
            pooled = h.new_zeros(count, h.size(1)).index_add(0, owner, h) / size
            return self.readout(pooled).squeeze(-1)

    model = MPNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(train, batch_size=30, shuffle=True, collate_fn=collate, generator=gen(62))
    batches = forever(loader)

    def step(i):
        model.train()
        x, edge, owner, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, edge, owner, y.numel()), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            errors = []
            for x, edge, y in test:
                pred = model(x, edge, torch.zeros(x.size(0), dtype=torch.long), 1)
                errors.append((pred[0] - y) ** 2)
            return torch.stack(errors).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_molecule_good():
    torch.manual_seed(61)
    g = gen(611)

    def make_graph():
        n = int(torch.randint(6, 12, (1,), generator=g))
        x = torch.randn(n, 5, generator=g)
        src = torch.randint(0, n, (2 * n,), generator=g)
        dst = torch.randint(0, n, (2 * n,), generator=g)
        edge = torch.cat([torch.stack([src, dst]), torch.stack([dst, src])], 1)
        pair = (x[edge[0], 0] * x[edge[1], 0] + 0.5 * x[edge[0], 1] * x[edge[1], 2]).mean()
        return x, edge, 2.0 * pair + 0.3 * x[:, 3].mean()

    graphs = [make_graph() for _ in range(500)]
    train, test = graphs[:420], graphs[420:]

    def collate(items):
        xs, edges, ys, owner = [], [], [], []
        offset = 0
        for k, (x, edge, y) in enumerate(items):
            xs.append(x)
            edges.append(edge + offset)
            ys.append(y)
            owner.append(torch.full((x.size(0),), k))
            offset += x.size(0)
        return torch.cat(xs), torch.cat(edges, 1), torch.cat(owner), torch.stack(ys)

    class MPNN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.message = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
            self.update = nn.Sequential(nn.Linear(5 + hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
            self.readout = nn.Linear(hidden, 1)

        def forward(self, x, edge, owner, count):
            m = self.message(torch.cat([x[edge[0]], x[edge[1]]], -1))
            agg = x.new_zeros(x.size(0), m.size(1)).index_add(0, edge[1], m)
            h = self.update(torch.cat([x, agg], -1))
            size = torch.bincount(owner, minlength=count).clamp(min=1).unsqueeze(-1)
            pooled = h.new_zeros(count, h.size(1)).index_add(0, owner, h) / size
            return self.readout(pooled).squeeze(-1)

    model = MPNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(train, batch_size=30, shuffle=True, collate_fn=collate, generator=gen(62))
    batches = forever(loader)

    def step(i):
        model.train()
        x, edge, owner, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x, edge, owner, y.numel()), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            errors = []
            for x, edge, y in test:
                pred = model(x, edge, torch.zeros(x.size(0), dtype=torch.long), 1)
                errors.append((pred[0] - y) ** 2)
            return torch.stack(errors).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rl_dqn_corridor_bad():
    torch.manual_seed(71)
    n_states, gamma = 8, 0.9
    rng = gen(711)

    def env_step(state, action):
        nxt = (state + 2 * action - 1).clamp(0, n_states - 1)
        done = (nxt == n_states - 1) | (nxt == 0)
        reward = (nxt == n_states - 1).float() + 0.3 * (nxt == 0).float()
        return nxt, reward, done.float()

    def encode(state):
        return F.one_hot(state, n_states).float()

    buffer = []
    state = torch.randint(1, n_states - 1, (64,), generator=rng)
    for _ in range(40):
        action = torch.randint(0, 2, (64,), generator=rng)
        nxt, reward, done = env_step(state, action)
        fresh = torch.randint(1, n_states - 1, (64,), generator=rng)
        nxt = torch.where(done.bool(), fresh, nxt)
        buffer.append((state, action, reward, nxt, done))
        state = nxt
    replay = TensorDataset(*[torch.cat(parts) for parts in zip(*buffer)])
    loader = DataLoader(replay, batch_size=128, shuffle=True, generator=gen(72))

    states = torch.arange(1, n_states - 1)
    q_star = torch.zeros(n_states, 2)
    for _ in range(200):
        for a in (0, 1):
            nxt, reward, done = env_step(states, torch.full_like(states, a))
            q_star[states, a] = reward + gamma * (1 - done) * q_star[nxt].max(1).values

    def build():
        return nn.Sequential(nn.Linear(n_states, 48), nn.ReLU(), nn.Linear(48, 2))

    q_net, target_net = build(), build()
    target_net.load_state_dict(q_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=5e-3)
    batches = forever(loader)

    def step(i):
        q_net.train()
        s, a, r, s2, done = next(batches)
        with torch.no_grad():
            next_q = target_net(encode(s2)).max(1).values
            target = r + gamma * next_q
        q = q_net(encode(s)).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 5 == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        with evaluating(q_net):
            return (q_net(encode(states)) - q_star[states]).pow(2).mean().sqrt().item()

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rl_dqn_corridor_good():
    torch.manual_seed(71)
    n_states, gamma = 8, 0.9
    rng = gen(711)

    def env_step(state, action):
        nxt = (state + 2 * action - 1).clamp(0, n_states - 1)
        done = (nxt == n_states - 1) | (nxt == 0)
        reward = (nxt == n_states - 1).float() + 0.3 * (nxt == 0).float()
        return nxt, reward, done.float()

    def encode(state):
        return F.one_hot(state, n_states).float()

    buffer = []
    state = torch.randint(1, n_states - 1, (64,), generator=rng)
    for _ in range(40):
        action = torch.randint(0, 2, (64,), generator=rng)
        nxt, reward, done = env_step(state, action)
        fresh = torch.randint(1, n_states - 1, (64,), generator=rng)
        nxt = torch.where(done.bool(), fresh, nxt)
        buffer.append((state, action, reward, nxt, done))
        state = nxt
    replay = TensorDataset(*[torch.cat(parts) for parts in zip(*buffer)])
    loader = DataLoader(replay, batch_size=128, shuffle=True, generator=gen(72))

    states = torch.arange(1, n_states - 1)
    q_star = torch.zeros(n_states, 2)
    for _ in range(200):
        for a in (0, 1):
            nxt, reward, done = env_step(states, torch.full_like(states, a))
            q_star[states, a] = reward + gamma * (1 - done) * q_star[nxt].max(1).values

    def build():
        return nn.Sequential(nn.Linear(n_states, 48), nn.ReLU(), nn.Linear(48, 2))

    q_net, target_net = build(), build()
    target_net.load_state_dict(q_net.state_dict())
    target_net.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=5e-3)
    batches = forever(loader)

    def step(i):
        q_net.train()
        s, a, r, s2, done = next(batches)
        with torch.no_grad():
            next_q = target_net(encode(s2)).max(1).values
            target = r + gamma * (1 - done) * next_q
        q = q_net(encode(s)).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % 5 == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        with evaluating(q_net):
            return (q_net(encode(states)) - q_star[states]).pow(2).mean().sqrt().item()

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rl_reinforce_reach_bad():
    torch.manual_seed(81)
    rng = gen(811)
    horizon, gamma = 8, 0.95

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

        def forward(self, obs):
            return torch.distributions.Categorical(logits=self.net(obs))

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def reset(n, rng):
        return torch.rand(n, 2, generator=rng) * 4 - 2

    def move(obs, action):
        pos = obs[:, 0] + 0.5 * (action.float() - 1)
        obs = torch.stack([pos, obs[:, 1]], 1)
        return obs, -(obs[:, 0] - obs[:, 1]).abs()

    start_test = reset(200, gen(812))

    def step(i):
        policy.train()
        obs = reset(48, rng)
        all_obs, all_actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(horizon):
                action = policy(obs).sample()
                all_obs.append(obs)
                all_actions.append(action)
                obs, reward = move(obs, action)
                rewards.append(reward)
        returns, running = [], torch.zeros(48)
        for reward in reversed(rewards):
            running = reward + gamma * running
            returns.insert(0, running)
        observations, actions = torch.stack(all_obs).flatten(0, 1), torch.stack(all_actions).flatten()
        returns = torch.stack(returns)
        advantage = (returns - returns.mean(1, keepdim=True)).flatten()
        advantage = advantage / (advantage.std() + 1e-6)
        dist = policy(observations)
        log_prob = dist.log_prob(dist.sample())
        loss = -(log_prob * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy):
            obs, cost = start_test, 0.0
            for _ in range(horizon):
                obs, reward = move(obs, policy(obs).logits.argmax(1))
                cost = cost - reward.mean().item()
            return cost / horizon

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rl_reinforce_reach_good():
    torch.manual_seed(81)
    rng = gen(811)
    horizon, gamma = 8, 0.95

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

        def forward(self, obs):
            return torch.distributions.Categorical(logits=self.net(obs))

    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def reset(n, rng):
        return torch.rand(n, 2, generator=rng) * 4 - 2

    def move(obs, action):
        pos = obs[:, 0] + 0.5 * (action.float() - 1)
        obs = torch.stack([pos, obs[:, 1]], 1)
        return obs, -(obs[:, 0] - obs[:, 1]).abs()

    start_test = reset(200, gen(812))

    def step(i):
        policy.train()
        obs = reset(48, rng)
        all_obs, all_actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(horizon):
                action = policy(obs).sample()
                all_obs.append(obs)
                all_actions.append(action)
                obs, reward = move(obs, action)
                rewards.append(reward)
        returns, running = [], torch.zeros(48)
        for reward in reversed(rewards):
            running = reward + gamma * running
            returns.insert(0, running)
        observations, actions = torch.stack(all_obs).flatten(0, 1), torch.stack(all_actions).flatten()
        returns = torch.stack(returns)
        advantage = (returns - returns.mean(1, keepdim=True)).flatten()
        advantage = advantage / (advantage.std() + 1e-6)
        dist = policy(observations)
        log_prob = dist.log_prob(actions)
        loss = -(log_prob * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(policy):
            obs, cost = start_test, 0.0
            for _ in range(horizon):
                obs, reward = move(obs, policy(obs).logits.argmax(1))
                cost = cost - reward.mean().item()
            return cost / horizon

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rec_fm_bad():
    torch.manual_seed(101)
    g = gen(1011)
    sizes = [60, 80, 24]
    n = 6000
    ids = torch.stack([torch.randint(0, s, (n,), generator=g) for s in sizes], 1)
    latent = [0.8 * torch.randn(s, 4, generator=g) for s in sizes]
    bias = [0.7 * torch.randn(s, generator=g) for s in sizes]
    user, item, hour = ids.unbind(1)
    rating = (latent[0][user] * latent[1][item]).sum(1) + 0.5 * (latent[1][item] * latent[2][hour]).sum(1)
    rating = rating + bias[0][user] + bias[1][item] + bias[2][hour] + 0.1 * torch.randn(n, generator=g)
    train = TensorDataset(ids[:5000], rating[:5000])
    ids_test, rating_test = ids[5000:], rating[5000:]
    loader = DataLoader(train, batch_size=250, shuffle=True, generator=gen(102))

    class FactorizationMachine(nn.Module):
        def __init__(self, sizes, dim=8):
            super().__init__()
            self.register_buffer("offsets", torch.tensor([0] + sizes[:-1]).cumsum(0))
            self.linear = nn.Embedding(sum(sizes), 1)
            self.factors = nn.Embedding(sum(sizes), dim)
            self.bias = nn.Parameter(torch.zeros(1))
            nn.init.normal_(self.linear.weight, std=0.01)
            nn.init.normal_(self.factors.weight, std=0.1)

        def forward(self, ids):
            v = self.factors(ids)
            pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
            return self.bias + self.linear(ids).sum((1, 2)) + pair

    model = FactorizationMachine(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = forever(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(ids_test), rating_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rec_fm_good():
    torch.manual_seed(101)
    g = gen(1011)
    sizes = [60, 80, 24]
    n = 6000
    ids = torch.stack([torch.randint(0, s, (n,), generator=g) for s in sizes], 1)
    latent = [0.8 * torch.randn(s, 4, generator=g) for s in sizes]
    bias = [0.7 * torch.randn(s, generator=g) for s in sizes]
    user, item, hour = ids.unbind(1)
    rating = (latent[0][user] * latent[1][item]).sum(1) + 0.5 * (latent[1][item] * latent[2][hour]).sum(1)
    rating = rating + bias[0][user] + bias[1][item] + bias[2][hour] + 0.1 * torch.randn(n, generator=g)
    train = TensorDataset(ids[:5000], rating[:5000])
    ids_test, rating_test = ids[5000:], rating[5000:]
    loader = DataLoader(train, batch_size=250, shuffle=True, generator=gen(102))

    class FactorizationMachine(nn.Module):
        def __init__(self, sizes, dim=8):
            super().__init__()
            self.register_buffer("offsets", torch.tensor([0] + sizes[:-1]).cumsum(0))
            self.linear = nn.Embedding(sum(sizes), 1)
            self.factors = nn.Embedding(sum(sizes), dim)
            self.bias = nn.Parameter(torch.zeros(1))
            nn.init.normal_(self.linear.weight, std=0.01)
            nn.init.normal_(self.factors.weight, std=0.1)

        def forward(self, ids):
            ids = ids + self.offsets
            v = self.factors(ids)
            pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
            return self.bias + self.linear(ids).sum((1, 2)) + pair

    model = FactorizationMachine(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = forever(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(ids_test), rating_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rec_listwise_bad():
    torch.manual_seed(111)
    g = gen(1111)
    n, length = 700, 10
    feats = torch.randn(n, length, 8, generator=g)
    popularity = 3.0 * torch.randn(n, 1, generator=g)
    quality = 1.2 * feats[..., 0] + feats[..., 1] * feats[..., 2] - 0.8 * feats[..., 3].abs()
    relevance = quality + popularity + 0.2 * torch.randn(n, length, generator=g)
    train = TensorDataset(feats[:500], relevance[:500])
    feats_test, quality_test = feats[500:], quality[500:]
    loader = DataLoader(train, batch_size=25, shuffle=True, generator=gen(112))
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        docs, rel = next(batches)
        optimizer.zero_grad()
        scores = model(docs).squeeze(-1)
        loss = -(F.softmax(rel, dim=0) * F.log_softmax(scores, dim=0)).sum(0).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            order = model(feats_test).squeeze(-1).argsort(1, descending=True)
            gain = 2 ** quality_test.clamp(min=0)
            discount = 1 / torch.log2(torch.arange(length) + 2.0)
            dcg = (gain.gather(1, order) * discount).sum(1)
            ideal = (gain.sort(1, descending=True).values * discount).sum(1)
            return (1 - dcg / ideal).mean().item() + 1e-4

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rec_listwise_good():
    torch.manual_seed(111)
    g = gen(1111)
    n, length = 700, 10
    feats = torch.randn(n, length, 8, generator=g)
    popularity = 3.0 * torch.randn(n, 1, generator=g)
    quality = 1.2 * feats[..., 0] + feats[..., 1] * feats[..., 2] - 0.8 * feats[..., 3].abs()
    relevance = quality + popularity + 0.2 * torch.randn(n, length, generator=g)
    train = TensorDataset(feats[:500], relevance[:500])
    feats_test, quality_test = feats[500:], quality[500:]
    loader = DataLoader(train, batch_size=25, shuffle=True, generator=gen(112))
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1, bias=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        docs, rel = next(batches)
        optimizer.zero_grad()
        scores = model(docs).squeeze(-1)
        loss = -(F.softmax(rel, dim=1) * F.log_softmax(scores, dim=1)).sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            order = model(feats_test).squeeze(-1).argsort(1, descending=True)
            gain = 2 ** quality_test.clamp(min=0)
            discount = 1 / torch.log2(torch.arange(length) + 2.0)
            dcg = (gain.gather(1, order) * discount).sum(1)
            ideal = (gain.sort(1, descending=True).values * discount).sum(1)
            return (1 - dcg / ideal).mean().item() + 1e-4

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_poisson_bad():
    torch.manual_seed(121)
    rng = gen(1211)

    def exact(x):
        return torch.sin(math.pi * x) + 0.5 * (1 - x ** 2)

    def source(x):
        return -math.pi ** 2 * torch.sin(math.pi * x) - 1.0

    class Solution(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x):
            return self.net(x)

    model = Solution()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x_edge = torch.tensor([[-1.0], [1.0]])
    x_test = torch.linspace(-1, 1, 200).unsqueeze(1)

    def step(i):
        model.train()
        x = (2 * torch.rand(128, 1, generator=rng) - 1).requires_grad_(True)
        optimizer.zero_grad()
        u = model(x)
        du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        ddu = torch.autograd.grad(du, x, torch.ones_like(du))[0]
        residual = ddu - source(x)
        loss = residual.pow(2).mean() + 50 * (model(x_edge) - exact(x_edge)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - exact(x_test)).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_poisson_good():
    torch.manual_seed(121)
    rng = gen(1211)

    def exact(x):
        return torch.sin(math.pi * x) + 0.5 * (1 - x ** 2)

    def source(x):
        return -math.pi ** 2 * torch.sin(math.pi * x) - 1.0

    class Solution(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x):
            return self.net(x)

    model = Solution()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x_edge = torch.tensor([[-1.0], [1.0]])
    x_test = torch.linspace(-1, 1, 200).unsqueeze(1)

    def step(i):
        model.train()
        x = (2 * torch.rand(128, 1, generator=rng) - 1).requires_grad_(True)
        optimizer.zero_grad()
        u = model(x)
        du = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        ddu = torch.autograd.grad(du, x, torch.ones_like(du), create_graph=True)[0]
        residual = ddu - source(x)
        loss = residual.pow(2).mean() + 50 * (model(x_edge) - exact(x_edge)).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - exact(x_test)).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def node_orbit_bad():
    torch.manual_seed(131)
    g = gen(1311)
    batch_rng = gen(1312)
    rot = torch.tensor([[-0.15, 1.2], [-1.2, -0.15]])

    def true_path(start, times):
        flow = torch.matrix_exp(times[..., None, None] * rot)
        return (flow @ start[:, None, :, None]).squeeze(-1)

    n, steps = 240, 8
    gaps = torch.empty(n, steps).exponential_(1.0, generator=g) * 0.25 + 0.02
    times = torch.cat([torch.zeros(n, 1), gaps.cumsum(1)], 1)
    paths = true_path(torch.randn(n, 2, generator=g), times) + 0.01 * torch.randn(n, steps + 1, 2, generator=g)
    grid = torch.linspace(0, 2.4, 13).expand(100, 13)
    start_test = torch.randn(100, 2, generator=g)
    path_test = true_path(start_test, grid)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, y):
            return self.net(y)

    def odeint(f, y, times):
        out = [y]
        for k in range(times.size(1) - 1):
            dt = (times[:, -1] - times[:, 0]).mean() / (times.size(1) - 1)
            k1 = f(y)
            k2 = f(y + 0.5 * dt * k1)
            k3 = f(y + 0.5 * dt * k2)
            k4 = f(y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            out.append(y)
        return torch.stack(out, 1)

    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        model.train()
        rows = torch.randint(0, n, (48,), generator=batch_rng)
        optimizer.zero_grad()
        pred = odeint(model, paths[rows, 0], times[rows])
        loss = F.mse_loss(pred[:, 1:], paths[rows, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(odeint(model, start_test, grid), path_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def node_orbit_good():
    torch.manual_seed(131)
    g = gen(1311)
    batch_rng = gen(1312)
    rot = torch.tensor([[-0.15, 1.2], [-1.2, -0.15]])

    def true_path(start, times):
        flow = torch.matrix_exp(times[..., None, None] * rot)
        return (flow @ start[:, None, :, None]).squeeze(-1)

    n, steps = 240, 8
    gaps = torch.empty(n, steps).exponential_(1.0, generator=g) * 0.25 + 0.02
    times = torch.cat([torch.zeros(n, 1), gaps.cumsum(1)], 1)
    paths = true_path(torch.randn(n, 2, generator=g), times) + 0.01 * torch.randn(n, steps + 1, 2, generator=g)
    grid = torch.linspace(0, 2.4, 13).expand(100, 13)
    start_test = torch.randn(100, 2, generator=g)
    path_test = true_path(start_test, grid)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

        def forward(self, y):
            return self.net(y)

    def odeint(f, y, times):
        out = [y]
        for k in range(times.size(1) - 1):
            dt = (times[:, k + 1] - times[:, k]).unsqueeze(1)
            k1 = f(y)
            k2 = f(y + 0.5 * dt * k1)
            k3 = f(y + 0.5 * dt * k2)
            k4 = f(y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            out.append(y)
        return torch.stack(out, 1)

    model = Field()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        model.train()
        rows = torch.randint(0, n, (48,), generator=batch_rng)
        optimizer.zero_grad()
        pred = odeint(model, paths[rows, 0], times[rows])
        loss = F.mse_loss(pred[:, 1:], paths[rows, 1:])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(odeint(model, start_test, grid), path_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def surv_cox_bad():
    torch.manual_seed(141)
    g = gen(1411)
    n = 1200
    x = torch.randn(n, 8, generator=g)
    risk = 1.2 * x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
    lifetime = torch.empty(n).exponential_(1.0, generator=g) * torch.exp(-risk)
    censor = torch.empty(n).exponential_(1.0, generator=g) * 2.5
    time, event = torch.minimum(lifetime, censor), (lifetime <= censor).float()
    train = TensorDataset(x[:900], time[:900], event[:900])
    x_test, life_test = x[900:], lifetime[900:]
    loader = DataLoader(train, batch_size=100, shuffle=True, generator=gen(142))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    batches = forever(loader)

    def cox_loss(log_risk, time, event):
        order = torch.argsort(time)
        log_risk, event = log_risk[order], event[order]
        log_set = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_set) * event).sum() / event.sum().clamp(min=1)

    def step(i):
        model.train()
        features, t, e = next(batches)
        optimizer.zero_grad()
        loss = cox_loss(model(features).squeeze(-1), t, e)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            score = model(x_test).squeeze(-1)
            earlier = life_test[:, None] < life_test[None, :]
            return ((score[:, None] <= score[None, :]) & earlier).sum().item() / earlier.sum().item() + 1e-4

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def surv_cox_good():
    torch.manual_seed(141)
    g = gen(1411)
    n = 1200
    x = torch.randn(n, 8, generator=g)
    risk = 1.2 * x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
    lifetime = torch.empty(n).exponential_(1.0, generator=g) * torch.exp(-risk)
    censor = torch.empty(n).exponential_(1.0, generator=g) * 2.5
    time, event = torch.minimum(lifetime, censor), (lifetime <= censor).float()
    train = TensorDataset(x[:900], time[:900], event[:900])
    x_test, life_test = x[900:], lifetime[900:]
    loader = DataLoader(train, batch_size=100, shuffle=True, generator=gen(142))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    batches = forever(loader)

    def cox_loss(log_risk, time, event):
        order = torch.argsort(time, descending=True)
        log_risk, event = log_risk[order], event[order]
        log_set = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_set) * event).sum() / event.sum().clamp(min=1)

    def step(i):
        model.train()
        features, t, e = next(batches)
        optimizer.zero_grad()
        loss = cox_loss(model(features).squeeze(-1), t, e)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            score = model(x_test).squeeze(-1)
            earlier = life_test[:, None] < life_test[None, :]
            return ((score[:, None] <= score[None, :]) & earlier).sum().item() / earlier.sum().item() + 1e-4

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def surv_discrete_bad():
    torch.manual_seed(151)
    g = gen(1511)
    n, bins = 1500, 10
    x = torch.randn(n, 6, generator=g)
    hazard = torch.sigmoid(-2.6 + 0.9 * x[:, :1] - 0.6 * x[:, 1:2] + 0.08 * torch.arange(bins))
    draws = torch.rand(n, bins, generator=g) < hazard
    death = torch.where(draws.any(1), draws.float().argmax(1), torch.tensor(bins))
    leave = torch.randint(0, bins, (n,), generator=g)
    last, event = torch.minimum(death, leave), (death <= leave).float()
    train = TensorDataset(x[:1100], last[:1100], event[:1100])
    x_test, curve_test = x[1100:], (1 - hazard[1100:]).cumprod(1)
    loader = DataLoader(train, batch_size=100, shuffle=True, generator=gen(152))
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, bins))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, weight_decay=1e-4)
    batches = forever(loader)

    def hazard_loss(logits, last, event):
        grid = torch.arange(bins)
        at_risk = (grid <= last.unsqueeze(1)).float()
        died = (grid == last.unsqueeze(1)).float()
        nll = F.binary_cross_entropy_with_logits(logits, died, reduction="none")
        return (nll * at_risk).sum(1).mean()

    def step(i):
        model.train()
        features, t, e = next(batches)
        optimizer.zero_grad()
        loss = hazard_loss(model(features), t, e)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            curve = (1 - torch.sigmoid(model(x_test))).cumprod(1)
            return (curve - curve_test).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def surv_discrete_good():
    torch.manual_seed(151)
    g = gen(1511)
    n, bins = 1500, 10
    x = torch.randn(n, 6, generator=g)
    hazard = torch.sigmoid(-2.6 + 0.9 * x[:, :1] - 0.6 * x[:, 1:2] + 0.08 * torch.arange(bins))
    draws = torch.rand(n, bins, generator=g) < hazard
    death = torch.where(draws.any(1), draws.float().argmax(1), torch.tensor(bins))
    leave = torch.randint(0, bins, (n,), generator=g)
    last, event = torch.minimum(death, leave), (death <= leave).float()
    train = TensorDataset(x[:1100], last[:1100], event[:1100])
    x_test, curve_test = x[1100:], (1 - hazard[1100:]).cumprod(1)
    loader = DataLoader(train, batch_size=100, shuffle=True, generator=gen(152))
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, bins))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, weight_decay=1e-4)
    batches = forever(loader)

    def hazard_loss(logits, last, event):
        grid = torch.arange(bins)
        at_risk = (grid <= last.unsqueeze(1)).float()
        died = (grid == last.unsqueeze(1)).float()
        died = died * event.unsqueeze(1)
        nll = F.binary_cross_entropy_with_logits(logits, died, reduction="none")
        return (nll * at_risk).sum(1).mean()

    def step(i):
        model.train()
        features, t, e = next(batches)
        optimizer.zero_grad()
        loss = hazard_loss(model(features), t, e)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            curve = (1 - torch.sigmoid(model(x_test))).cumprod(1)
            return (curve - curve_test).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def maml_sine_bad():
    torch.manual_seed(161)
    rng = gen(1611)
    inner_lr = 0.02

    def sample_task(rng):
        amp = 0.5 + 2.0 * torch.rand(1, generator=rng)
        phase = math.pi * torch.rand(1, generator=rng)
        x = torch.rand(20, 1, generator=rng) * 6 - 3
        y = amp * torch.sin(x + phase)
        return x[:10], y[:10], x[10:], y[10:]

    tasks_test = [sample_task(gen(5000 + k)) for k in range(30)]
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def adapt(params, xs, ys, n_steps, create_graph):
        for _ in range(n_steps):
            inner = F.mse_loss(functional_call(net, params, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=create_graph)
            params = {k: p - inner_lr * gr for (k, p), gr in zip(params.items(), grads)}
        return params

    def step(i):
        net.train()
        optimizer.zero_grad()
        total = 0.0
        params = dict(net.named_parameters())
        for _ in range(4):
            xs, ys, xq, yq = sample_task(rng)
            fast = adapt(params, xs, ys, 2, create_graph=True)
            query = F.mse_loss(functional_call(net, params, (xq,)), yq)
            total = total + query / 4
        total.backward()
        optimizer.step()
        return total.item()

    def probe():
        with evaluating(net):
            errors = []
            for xs, ys, xq, yq in tasks_test:
                params = {k: p.detach().clone().requires_grad_(True) for k, p in net.named_parameters()}
                with torch.enable_grad():
                    fast = adapt(params, xs, ys, 2, create_graph=False)
                errors.append(F.mse_loss(functional_call(net, fast, (xq,)), yq).item())
            return sum(errors) / len(errors)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def maml_sine_good():
    torch.manual_seed(161)
    rng = gen(1611)
    inner_lr = 0.02

    def sample_task(rng):
        amp = 0.5 + 2.0 * torch.rand(1, generator=rng)
        phase = math.pi * torch.rand(1, generator=rng)
        x = torch.rand(20, 1, generator=rng) * 6 - 3
        y = amp * torch.sin(x + phase)
        return x[:10], y[:10], x[10:], y[10:]

    tasks_test = [sample_task(gen(5000 + k)) for k in range(30)]
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def adapt(params, xs, ys, n_steps, create_graph):
        for _ in range(n_steps):
            inner = F.mse_loss(functional_call(net, params, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=create_graph)
            params = {k: p - inner_lr * gr for (k, p), gr in zip(params.items(), grads)}
        return params

    def step(i):
        net.train()
        optimizer.zero_grad()
        total = 0.0
        params = dict(net.named_parameters())
        for _ in range(4):
            xs, ys, xq, yq = sample_task(rng)
            fast = adapt(params, xs, ys, 2, create_graph=True)
            query = F.mse_loss(functional_call(net, fast, (xq,)), yq)
            total = total + query / 4
        total.backward()
        optimizer.step()
        return total.item()

    def probe():
        with evaluating(net):
            errors = []
            for xs, ys, xq, yq in tasks_test:
                params = {k: p.detach().clone().requires_grad_(True) for k, p in net.named_parameters()}
                with torch.enable_grad():
                    fast = adapt(params, xs, ys, 2, create_graph=False)
                errors.append(F.mse_loss(functional_call(net, fast, (xq,)), yq).item())
            return sum(errors) / len(errors)

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mtl_heads_bad():
    torch.manual_seed(171)
    g = gen(1711)
    n = 1600
    x = torch.randn(n, 10, generator=g)
    targets = torch.stack([
        torch.tanh(x[:, 0] + x[:, 1]),
        x[:, 2] * x[:, 3],
        torch.sin(x[:, 4]) - 0.5 * x[:, 5],
    ], 1) + 0.05 * torch.randn(n, 3, generator=g)
    train = TensorDataset(x[:1200], targets[:1200])
    x_test, targets_test = x[1200:], targets[1200:]
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=gen(172))
    names = ["yield", "purity", "cost"]

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.heads = nn.ModuleDict({name: nn.Linear(64, 1) for name in names})

        def forward(self, x):
            h = self.trunk(x)
            return {name: head(h).squeeze(-1) for name, head in self.heads.items()}

    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        features, y = next(batches)
        optimizer.zero_grad()
        out = model(features)
        loss = 0.0
        for k, name in enumerate(names):
            loss = F.mse_loss(out[name], y[:, k])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(x_test)
            return sum(F.mse_loss(out[name], targets_test[:, k]).item() for k, name in enumerate(names))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mtl_heads_good():
    torch.manual_seed(171)
    g = gen(1711)
    n = 1600
    x = torch.randn(n, 10, generator=g)
    targets = torch.stack([
        torch.tanh(x[:, 0] + x[:, 1]),
        x[:, 2] * x[:, 3],
        torch.sin(x[:, 4]) - 0.5 * x[:, 5],
    ], 1) + 0.05 * torch.randn(n, 3, generator=g)
    train = TensorDataset(x[:1200], targets[:1200])
    x_test, targets_test = x[1200:], targets[1200:]
    loader = DataLoader(train, batch_size=64, shuffle=True, generator=gen(172))
    names = ["yield", "purity", "cost"]

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.heads = nn.ModuleDict({name: nn.Linear(64, 1) for name in names})

        def forward(self, x):
            h = self.trunk(x)
            return {name: head(h).squeeze(-1) for name, head in self.heads.items()}

    model = MultiTask()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        features, y = next(batches)
        optimizer.zero_grad()
        out = model(features)
        loss = 0.0
        for k, name in enumerate(names):
            loss = loss + F.mse_loss(out[name], y[:, k])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(x_test)
            return sum(F.mse_loss(out[name], targets_test[:, k]).item() for k, name in enumerate(names))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pc_shapes_bad():
    torch.manual_seed(181)
    g = gen(1811)
    n_points = 64

    def make_clouds(n):
        label = torch.randint(0, 4, (n,), generator=g)
        p = torch.randn(n, n_points, 3, generator=g)
        ball = F.normalize(p, dim=-1)
        cube = p / p.abs().amax(-1, keepdim=True)
        disc = torch.cat([F.normalize(p[..., :2], dim=-1), p[..., 2:].clamp(-1, 1)], -1)
        ang = p[..., :1] * 3
        ring = torch.cat([torch.cos(ang), torch.sin(ang), torch.zeros_like(ang)], -1) + 0.3 * ball
        shapes = torch.stack([ball, cube, disc, ring], 1)[torch.arange(n), label]
        basis = torch.linalg.qr(torch.randn(n, 3, 3, generator=g)).Q
        cloud = shapes @ basis + 0.03 * torch.randn(n, n_points, 3, generator=g)
        cloud = cloud - cloud.mean(1, keepdim=True)
        return cloud / cloud.norm(dim=-1).mean(1)[:, None, None], label

    clouds, labels = make_clouds(1400)
    train = TensorDataset(clouds[:1100], labels[:1100])
    x_test, y_test = clouds[1100:], labels[1100:]
    loader = DataLoader(train, batch_size=50, shuffle=True, generator=gen(182))

    class PointNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv1d(3, 32, 1, bias=False)
            self.bn1 = nn.BatchNorm1d(32)
            self.conv2 = nn.Conv1d(32, 96, 1, bias=False)
            self.bn2 = nn.BatchNorm1d(96)
            self.head = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 4))

        def forward(self, cloud):
            x = cloud.view(cloud.size(0), 3, -1)
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            return self.head(x.max(dim=2).values)

    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pc_shapes_good():
    torch.manual_seed(181)
    g = gen(1811)
    n_points = 64

    def make_clouds(n):
        label = torch.randint(0, 4, (n,), generator=g)
        p = torch.randn(n, n_points, 3, generator=g)
        ball = F.normalize(p, dim=-1)
        cube = p / p.abs().amax(-1, keepdim=True)
        disc = torch.cat([F.normalize(p[..., :2], dim=-1), p[..., 2:].clamp(-1, 1)], -1)
        ang = p[..., :1] * 3
        ring = torch.cat([torch.cos(ang), torch.sin(ang), torch.zeros_like(ang)], -1) + 0.3 * ball
        shapes = torch.stack([ball, cube, disc, ring], 1)[torch.arange(n), label]
        basis = torch.linalg.qr(torch.randn(n, 3, 3, generator=g)).Q
        cloud = shapes @ basis + 0.03 * torch.randn(n, n_points, 3, generator=g)
        cloud = cloud - cloud.mean(1, keepdim=True)
        return cloud / cloud.norm(dim=-1).mean(1)[:, None, None], label

    clouds, labels = make_clouds(1400)
    train = TensorDataset(clouds[:1100], labels[:1100])
    x_test, y_test = clouds[1100:], labels[1100:]
    loader = DataLoader(train, batch_size=50, shuffle=True, generator=gen(182))

    class PointNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv1d(3, 32, 1, bias=False)
            self.bn1 = nn.BatchNorm1d(32)
            self.conv2 = nn.Conv1d(32, 96, 1, bias=False)
            self.bn2 = nn.BatchNorm1d(96)
            self.head = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 4))

        def forward(self, cloud):
            x = cloud.transpose(1, 2)
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            return self.head(x.max(dim=2).values)

    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pc_boxes_bad():
    torch.manual_seed(191)
    g = gen(1911)

    def make_boxes(n):
        size = 0.5 + 1.5 * torch.rand(n, 3, generator=g)
        p = torch.rand(n, 48, 3, generator=g) * 2 - 1
        p = p / p.abs().amax(-1, keepdim=True)
        return p * size.unsqueeze(1), size

    class BoxClouds(Dataset):
        def __init__(self, clouds, sizes, jitter=0.08):
            self.clouds, self.sizes, self.jitter = clouds, sizes, jitter
            self.rng = gen(1912)

        def __len__(self):
            return len(self.clouds)

        def __getitem__(self, k):
            cloud = self.clouds[k]
            noise = self.jitter * torch.randn(cloud.shape, generator=self.rng)
            cloud += noise
            return cloud, self.sizes[k]

    clouds, sizes = make_boxes(128)
    x_test, y_test = make_boxes(300)
    loader = DataLoader(BoxClouds(clouds, sizes), batch_size=32, shuffle=True, generator=gen(192))

    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.point = nn.Sequential(nn.Conv1d(3, 48, 1), nn.ReLU(), nn.Conv1d(48, 96, 1))
            self.head = nn.Sequential(nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 3))

        def forward(self, cloud):
            return self.head(self.point(cloud.transpose(1, 2)).amax(2))

    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pc_boxes_good():
    torch.manual_seed(191)
    g = gen(1911)

    def make_boxes(n):
        size = 0.5 + 1.5 * torch.rand(n, 3, generator=g)
        p = torch.rand(n, 48, 3, generator=g) * 2 - 1
        p = p / p.abs().amax(-1, keepdim=True)
        return p * size.unsqueeze(1), size

    class BoxClouds(Dataset):
        def __init__(self, clouds, sizes, jitter=0.08):
            self.clouds, self.sizes, self.jitter = clouds, sizes, jitter
            self.rng = gen(1912)

        def __len__(self):
            return len(self.clouds)

        def __getitem__(self, k):
            cloud = self.clouds[k]
            noise = self.jitter * torch.randn(cloud.shape, generator=self.rng)
            cloud = cloud + noise
            return cloud, self.sizes[k]

    clouds, sizes = make_boxes(128)
    x_test, y_test = make_boxes(300)
    loader = DataLoader(BoxClouds(clouds, sizes), batch_size=32, shuffle=True, generator=gen(192))

    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.point = nn.Sequential(nn.Conv1d(3, 48, 1), nn.ReLU(), nn.Conv1d(48, 96, 1))
            self.head = nn.Sequential(nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 3))

        def forward(self, cloud):
            return self.head(self.point(cloud.transpose(1, 2)).amax(2))

    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ad_vae_bad():
    torch.manual_seed(201)
    g = gen(2011)
    mix = torch.randn(5, 40, generator=g) / 5 ** 0.5

    def normal_rows(n):
        return torch.tanh(torch.randn(n, 5, generator=g) @ mix * 1.5) + 0.1 * torch.randn(n, 40, generator=g)

    train = normal_rows(1500)
    good_test, odd_test = normal_rows(300), normal_rows(300)
    odd_test = torch.where(torch.rand(300, 40, generator=g) < 0.2, odd_test[torch.randperm(300, generator=g)], odd_test)
    loader = DataLoader(TensorDataset(train), batch_size=75, shuffle=True, generator=gen(202))

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(40, 64), nn.ReLU())
            self.mu = nn.Linear(64, 6)
            self.logvar = nn.Linear(64, 6)
            self.dec = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 40))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu
            if self.training:
                z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
            return self.dec(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        recon_loss = F.mse_loss(recon, x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        loss = recon_loss + kl
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            low = (model(good_test)[0] - good_test).pow(2).mean(1)
            high = (model(odd_test)[0] - odd_test).pow(2).mean(1)
            return 1 - auc(low, high) + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ad_vae_good():
    torch.manual_seed(201)
    g = gen(2011)
    mix = torch.randn(5, 40, generator=g) / 5 ** 0.5

    def normal_rows(n):
        return torch.tanh(torch.randn(n, 5, generator=g) @ mix * 1.5) + 0.1 * torch.randn(n, 40, generator=g)

    train = normal_rows(1500)
    good_test, odd_test = normal_rows(300), normal_rows(300)
    odd_test = torch.where(torch.rand(300, 40, generator=g) < 0.2, odd_test[torch.randperm(300, generator=g)], odd_test)
    loader = DataLoader(TensorDataset(train), batch_size=75, shuffle=True, generator=gen(202))

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(40, 64), nn.ReLU())
            self.mu = nn.Linear(64, 6)
            self.logvar = nn.Linear(64, 6)
            self.dec = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 40))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu
            if self.training:
                z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
            return self.dec(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        recon_loss = F.mse_loss(recon, x, reduction="none").sum(1).mean()
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        loss = recon_loss + kl
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            low = (model(good_test)[0] - good_test).pow(2).mean(1)
            high = (model(odd_test)[0] - odd_test).pow(2).mean(1)
            return 1 - auc(low, high) + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ad_telemetry_bad():
    torch.manual_seed(211)
    g = gen(2111)
    mix = torch.randn(4, 24, generator=g)

    def normal_rows(n):
        return torch.randn(n, 4, generator=g) @ mix + 0.2 * torch.randn(n, 24, generator=g)

    raw, good_test = normal_rows(1500), normal_rows(300)
    odd_test = normal_rows(300)
    odd_test[:, :6] = odd_test[torch.randperm(300, generator=g), :6]
    mean, std = raw.mean(0), raw.std(0)
    train, good_test, odd_test = [(r - mean) / std for r in (raw, good_test, odd_test)]
    loader = DataLoader(TensorDataset(train), batch_size=75, shuffle=True, generator=gen(212))

    class AutoEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4))
            self.decoder = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 24))

        def forward(self, x):
            out = self.decoder(self.encoder(x))
            return torch.sigmoid(out)

    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            low = (model(good_test) - good_test).pow(2).mean(1)
            high = (model(odd_test) - odd_test).pow(2).mean(1)
            return 1 - auc(low, high) + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ad_telemetry_good():
    torch.manual_seed(211)
    g = gen(2111)
    mix = torch.randn(4, 24, generator=g)

    def normal_rows(n):
        return torch.randn(n, 4, generator=g) @ mix + 0.2 * torch.randn(n, 24, generator=g)

    raw, good_test = normal_rows(1500), normal_rows(300)
    odd_test = normal_rows(300)
    odd_test[:, :6] = odd_test[torch.randperm(300, generator=g), :6]
    mean, std = raw.mean(0), raw.std(0)
    train, good_test, odd_test = [(r - mean) / std for r in (raw, good_test, odd_test)]
    loader = DataLoader(TensorDataset(train), batch_size=75, shuffle=True, generator=gen(212))

    class AutoEncoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4))
            self.decoder = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 24))

        def forward(self, x):
            out = self.decoder(self.encoder(x))
            return out

    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            low = (model(good_test) - good_test).pow(2).mean(1)
            high = (model(odd_test) - odd_test).pow(2).mean(1)
            return 1 - auc(low, high) + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ml_batchhard_bad():
    torch.manual_seed(221)
    g = gen(2211)
    rng = gen(2212)
    centers = torch.randn(24, 6, generator=g)
    lift = torch.randn(6, 32, generator=g)

    def make(classes, per):
        label = classes.repeat_interleave(per)
        x = torch.tanh((centers[label] + 0.35 * torch.randn(len(label), 6, generator=g)) @ lift * 0.5)
        return torch.cat([x, torch.randn(len(label), 16, generator=g)], 1), label

    x_train, _ = make(torch.arange(16), 30)
    x_train = x_train.view(16, 30, 48)
    x_test, y_test = make(torch.arange(16, 24), 25)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def batch_hard(emb, label, margin=0.3):
        dist = (emb[:, None] - emb[None, :]).pow(2).sum(-1).clamp(min=1e-12).sqrt()
        eye = torch.eye(len(label), dtype=torch.bool)
        positive = (label[:, None] == label[None, :]) & ~eye
        negative = ~eye
        hardest_pos = dist.masked_fill(~positive, 0.0).amax(1)
        hardest_neg = dist.masked_fill(~negative, 1e9).amin(1)
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    def step(i):
        model.train()
        classes = torch.randperm(16, generator=rng)[:8]
        picks = torch.stack([torch.randperm(30, generator=rng)[:6] for _ in range(8)])
        x = x_train[classes.unsqueeze(1), picks].flatten(0, 1)
        label = classes.repeat_interleave(6)
        optimizer.zero_grad()
        loss = batch_hard(F.normalize(model(x), dim=1), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            emb = F.normalize(model(x_test), dim=1)
            sim = emb @ emb.T
            same = y_test[:, None] == y_test[None, :]
            off = ~torch.eye(len(y_test), dtype=torch.bool)
            return 1 - auc(sim[~same][::60], sim[same & off]) + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ml_batchhard_good():
    torch.manual_seed(221)
    g = gen(2211)
    rng = gen(2212)
    centers = torch.randn(24, 6, generator=g)
    lift = torch.randn(6, 32, generator=g)

    def make(classes, per):
        label = classes.repeat_interleave(per)
        x = torch.tanh((centers[label] + 0.35 * torch.randn(len(label), 6, generator=g)) @ lift * 0.5)
        return torch.cat([x, torch.randn(len(label), 16, generator=g)], 1), label

    x_train, _ = make(torch.arange(16), 30)
    x_train = x_train.view(16, 30, 48)
    x_test, y_test = make(torch.arange(16, 24), 25)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def batch_hard(emb, label, margin=0.3):
        dist = (emb[:, None] - emb[None, :]).pow(2).sum(-1).clamp(min=1e-12).sqrt()
        eye = torch.eye(len(label), dtype=torch.bool)
        positive = (label[:, None] == label[None, :]) & ~eye
        negative = label[:, None] != label[None, :]
        hardest_pos = dist.masked_fill(~positive, 0.0).amax(1)
        hardest_neg = dist.masked_fill(~negative, 1e9).amin(1)
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    def step(i):
        model.train()
        classes = torch.randperm(16, generator=rng)[:8]
        picks = torch.stack([torch.randperm(30, generator=rng)[:6] for _ in range(8)])
        x = x_train[classes.unsqueeze(1), picks].flatten(0, 1)
        label = classes.repeat_interleave(6)
        optimizer.zero_grad()
        loss = batch_hard(F.normalize(model(x), dim=1), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            emb = F.normalize(model(x_test), dim=1)
            sim = emb @ emb.T
            same = y_test[:, None] == y_test[None, :]
            off = ~torch.eye(len(y_test), dtype=torch.bool)
            return 1 - auc(sim[~same][::60], sim[same & off]) + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ml_proxies_bad():
    torch.manual_seed(231)
    g = gen(2311)
    n_classes = 20
    centers = torch.randn(n_classes, 3, generator=g)
    lift = torch.randn(3, 32, generator=g)
    label = torch.arange(n_classes).repeat_interleave(60)
    x = torch.tanh((centers[label] + 0.15 * torch.randn(len(label), 3, generator=g)) @ lift * 0.5)
    x = x + 0.1 * torch.randn(x.shape, generator=g)
    order = torch.randperm(len(label), generator=g)
    x, label = x[order], label[order]
    train = TensorDataset(x[:900], label[:900])
    x_test, y_test = x[900:], label[900:]
    loader = DataLoader(train, batch_size=60, shuffle=True, generator=gen(232))

    class ProxyLoss(nn.Module):
        def __init__(self, classes, dim, scale=12.0):
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(classes, dim))
            self.scale = scale

        def forward(self, emb, label):
            sim = F.normalize(emb, dim=1) @ F.normalize(self.proxies, dim=1).T
            return F.cross_entropy(self.scale * sim, label)

    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
    criterion = ProxyLoss(n_classes, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    batches = forever(loader)

    def step(i):
        net.train()
        features, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(net(features), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(net):
            emb = F.normalize(net(x_test), dim=1)
            sim = emb @ emb.T
            sim.fill_diagonal_(-2.0)
            near = y_test[sim.topk(5, dim=1).indices]
            return (near != y_test.unsqueeze(1)).float().mean().item() + 1e-3

    return {"model": {"net": net, "criterion": criterion}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ml_proxies_good():
    torch.manual_seed(231)
    g = gen(2311)
    n_classes = 20
    centers = torch.randn(n_classes, 3, generator=g)
    lift = torch.randn(3, 32, generator=g)
    label = torch.arange(n_classes).repeat_interleave(60)
    x = torch.tanh((centers[label] + 0.15 * torch.randn(len(label), 3, generator=g)) @ lift * 0.5)
    x = x + 0.1 * torch.randn(x.shape, generator=g)
    order = torch.randperm(len(label), generator=g)
    x, label = x[order], label[order]
    train = TensorDataset(x[:900], label[:900])
    x_test, y_test = x[900:], label[900:]
    loader = DataLoader(train, batch_size=60, shuffle=True, generator=gen(232))

    class ProxyLoss(nn.Module):
        def __init__(self, classes, dim, scale=12.0):
            super().__init__()
            self.proxies = nn.Parameter(torch.randn(classes, dim))
            self.scale = scale

        def forward(self, emb, label):
            sim = F.normalize(emb, dim=1) @ F.normalize(self.proxies, dim=1).T
            return F.cross_entropy(self.scale * sim, label)

    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))
    criterion = ProxyLoss(n_classes, 3)
    optimizer = torch.optim.Adam([{"params": net.parameters()}, {"params": criterion.parameters(), "lr": 3e-2}], lr=2e-3)
    batches = forever(loader)

    def step(i):
        net.train()
        features, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(net(features), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(net):
            emb = F.normalize(net(x_test), dim=1)
            sim = emb @ emb.T
            sim.fill_diagonal_(-2.0)
            near = y_test[sim.topk(5, dim=1).indices]
            return (near != y_test.unsqueeze(1)).float().mean().item() + 1e-3

    return {"model": {"net": net, "criterion": criterion}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES = [
    {"name": 'tab_price', "field": 'tabular data',
     "what": 'The (B,1) prediction is subtracted from the (B,) target, so the difference broadcasts to (B,B) and the regression learns only the mean price.'},
    {"name": 'ts_load', "field": 'time series and forecasting',
     "what": 'The exponential decay meant for the end of each epoch is stepped after every batch, so the learning rate is gone within the first epochs.'},
    {"name": 'ts_sales', "field": 'time series and forecasting',
     "what": 'Each window is normalised by its own mean and std but the forecast is never scaled back, so the network must guess a level it cannot see.'},
    {"name": 'seq_sensor', "field": 'RNN/LSTM/TCN sequences',
     "what": 'The LSTM is built without batch_first although the batches are (batch, time, feature), so it recurs over the samples of the batch and never over time.'},
    {"name": 'seq_recall', "field": 'RNN/LSTM/TCN sequences',
     "what": 'The hidden state is detached at every time step of the loop, so no gradient flows back through time and the cell never learns to remember.'},
    {"name": 'graph_molecule', "field": 'graph networks',
     "what": 'The collate function concatenates the edge lists of the graphs without adding the node offset, so all edges of a batch point into the first graphs.'},
    {"name": 'rl_dqn_corridor', "field": 'reinforcement learning',
     "what": 'The Q target leaves out the (1 - done) mask, so it bootstraps from the observation of the next episode after every terminal step.'},
    {"name": 'rl_reinforce_reach', "field": 'reinforcement learning',
     "what": 'The policy-gradient loss samples new actions in the update, so the returns are paired with log-probabilities of actions that were never played.'},
    {"name": 'rec_fm', "field": 'recommenders and ranking',
     "what": 'The factorisation machine shares one embedding table over all fields but the ids are not shifted by the field offsets, so user 7, item 7 and hour 7 use the same row.'},
    {"name": 'rec_listwise', "field": 'recommenders and ranking',
     "what": 'The listwise softmax runs over the queries of the batch instead of over the items of each list, so items compete with items of other queries.'},
    {"name": 'pinn_poisson', "field": 'physics-informed networks and neural ODEs',
     "what": 'The second derivative in the residual is taken without create_graph, so it is a constant for autograd and the physics loss does not train the network.'},
    {"name": 'node_orbit', "field": 'physics-informed networks and neural ODEs',
     "what": 'The observations are irregular in time but the solver advances with one mean step size, so the learned vector field is fitted to wrong time intervals.'},
    {"name": 'surv_cox', "field": 'survival analysis',
     "what": 'The Cox risk sets are accumulated over times in ascending instead of descending order, so each event is compared with those who are already gone.'},
    {"name": 'surv_discrete', "field": 'survival analysis',
     "what": 'The discrete-time likelihood ignores the event indicator and counts every censoring as an event, so the survival curves come out far too low.'},
    {"name": 'maml_sine', "field": 'meta-learning and multi-task learning',
     "what": 'The query loss of the outer loop is computed with the meta parameters and not with the adapted ones, so the model is never trained to adapt.'},
    {"name": 'mtl_heads', "field": 'meta-learning and multi-task learning',
     "what": 'The loop over the tasks overwrites the loss instead of adding to it, so only the last task is trained.'},
    {"name": 'pc_shapes', "field": 'point clouds',
     "what": 'The (B, N, 3) clouds are reshaped to (B, 3, N) with view instead of transposed, so the coordinates of different points are mixed into one.'},
    {"name": 'pc_boxes', "field": 'point clouds',
     "what": 'The dataset jitters the stored cloud in place, so the noise of every epoch is added on top of the last and the training data rot away.'},
    {"name": 'ad_vae', "field": 'anomaly detection',
     "what": 'The reconstruction error is averaged over features and batch while the KL is summed over the latents, so the KL outweighs it by the number of features and the posterior collapses.'},
    {"name": 'ad_telemetry', "field": 'anomaly detection',
     "what": 'The autoencoder ends in a sigmoid although its targets are z-scores, so everything below 0 and above 1 can never be reconstructed.'},
    {"name": 'ml_batchhard', "field": 'metric learning',
     "what": 'The negative mask of the batch-hard triplet loss removes only the anchor itself, so the hardest negative is usually a sample of the same class.'},
    {"name": 'ml_proxies', "field": 'metric learning',
     "what": "The loss module owns learnable class proxies but only the network's parameters are given to the optimizer, so the proxies stay at their random places."},
]
