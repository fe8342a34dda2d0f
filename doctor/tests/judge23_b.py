"""Small training programs, each in two forms (NAME_bad / NAME_good)."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASES = [
    {"name": "housing_amp",
     "what": "Tabular regression with GradScaler: gradients are clipped before scaler.unscale_, so the scaled "
             "gradients (x65536) are cut to norm 1 and then divided by the scale; with SGD the model hardly moves."},
    {"name": "churn_dropout",
     "what": "Tabular classification: validate() puts the model in eval mode inside the loop and nothing calls "
             "model.train() again, so dropout is off for all training and the small data set is overfitted."},
    {"name": "load_gru",
     "what": "GRU load forecaster: ExponentialLR meant for epochs is stepped after every batch, so the learning "
             "rate dies within the first epoch."},
    {"name": "tcn_nextstep",
     "what": "TCN next-step forecaster with symmetric (same) padding and no chomp: position t sees x[t+1], its own "
             "target; at the true end of the series the forecast fails."},
    {"name": "wave_transformer",
     "what": "batch_first transformer forecaster with the tutorial's positional encoding pe[:x.size(0)]: the code "
             "is added by batch index, not by time, so the model has no order information (and noise per row)."},
    {"name": "graph_collate",
     "what": "Graph batches: collate concatenates edge_index without adding the node offset, so all edges fall on "
             "the nodes of the first graphs and most graphs get no messages."},
    {"name": "cartpole_dqn",
     "what": "DQN target without the (1 - done) mask: it bootstraps through terminal states, every state is worth "
             "about 1/(1-gamma), falling costs nothing."},
    {"name": "thermostat_reinforce",
     "what": "REINFORCE: the discounted return is accumulated forwards over the rewards (no reversed), so an action "
             "is credited with the past rewards instead of the rewards to come."},
    {"name": "dock_a2c",
     "what": "One-step actor-critic: critic returns (N,1), rewards are (N,); target and advantage broadcast to (N,N), "
             "so the critic and the policy's credit are mixed over the batch (policy becomes myopic)."},
    {"name": "ridge_awr",
     "what": "Offline advantage-weighted regression: returns-to-go over the flat buffer are not reset at done, so "
             "falling is not penalised (the next episode's rewards flow in)."},
    {"name": "two_tower",
     "what": "Two-tower retrieval with in-batch softmax on L2-normalised embeddings and no temperature: the logits "
             "lie in [-1, 1], the softmax stays near uniform, ranking is learned poorly."},
    {"name": "pinn_reaction",
     "what": "PINN for -u'' + u = f: the second derivative is taken with retain_graph=True but without create_graph, "
             "so the residual's gradient misses the u'' term and the solution is wrong."},
    {"name": "cox_survival",
     "what": "Cox partial likelihood with times sorted ascending before logcumsumexp: the risk set is those who "
             "left earlier instead of those still at risk; the risk order is learned wrongly."},
    {"name": "proto_episodes",
     "what": "Prototypical network: class-major support embeddings are reshaped as (k_shot, n_way), so every "
             "prototype averages over several classes."},
    {"name": "multitask_heads",
     "what": "Multi-task training with one backward per task: optimizer.zero_grad() sits inside the task loop, so "
             "only the last task's gradients survive to optimizer.step()."},
    {"name": "sensor_vae",
     "what": "VAE anomaly detector: reconstruction is averaged over batch and features while the KL is summed; the "
             "KL dominates, the posterior collapses and reconstruction errors say nothing."},
    {"name": "bayes_regression",
     "what": "Bayes by backprop: mean NLL plus the full KL (not divided by the number of training points); the "
             "prior dominates and the network underfits."},
    {"name": "arm_mdn",
     "what": "Mixture density network: loss is the pi-weighted sum of component log densities instead of the "
             "logsumexp of log pi + log density; the mixture degenerates to one wide component."},
    {"name": "jet_sets",
     "what": "Attention pooling over padded particle sets: key_padding_mask gets True for the real points (PyTorch "
             "ignores True), so the pooling attends to the padding only."},
    {"name": "bilstm_tagger",
     "what": "Sequence tagger: logits (B,T,C) are brought to (B,C,T) for cross-entropy with view instead of "
             "transpose, so scores and labels are scrambled."},
    {"name": "rollout_control",
     "what": "Policy trained by backprop through a simulator: the state is detached at every step of the rollout, "
             "so an action only feels its one-step cost and cannot plan for the position."},
    {"name": "pointnet_ema",
     "what": "EMA weights for evaluation: the update rebinds the loop variable instead of writing in place, so the "
             "EMA model keeps its initial weights for ever."},
]


# --------------------------------------------------------------------------- helpers

def forever(loader):
    while True:
        for batch in loader:
            yield batch


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# --------------------------------------------------------------------------- 1 tabular regression, AMP

def _housing_amp(bug):
    torch.manual_seed(101)
    n = 6000
    x = torch.randn(n, 12)
    price = (2.0 * torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.7 * x[:, 3].abs()
             - 0.5 * x[:, 4] + 0.3 * x[:, 5] ** 2)
    price = (price - price.mean()) / price.std() + 0.15 * torch.randn(n)
    train = TensorDataset(x[:5000], price[:5000])
    x_test, y_test = x[5000:], price[5000:]

    model = mlp(12, 192, 192, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    data = forever(DataLoader(train, batch_size=500, shuffle=True, drop_last=True))

    def step(i):
        xb, yb = next(data)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(xb)
        loss = F.mse_loss(out.float().squeeze(1), yb)
        scaler.scale(loss).backward()
        if not bug:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(x_test).squeeze(1), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def housing_amp_bad():
    return _housing_amp(True)


def housing_amp_good():
    return _housing_amp(False)


# --------------------------------------------------------------------------- 2 tabular classification, dropout

class ChurnNet(nn.Module):
    def __init__(self, n_features, hidden=512, p=0.5):
        super().__init__()
        self.fc1 = nn.Linear(n_features, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = self.drop(F.relu(self.fc1(x)))
        x = self.drop(F.relu(self.fc2(x)))
        return self.out(x)


def _churn_dropout(bug):
    torch.manual_seed(202)

    def make(n):
        x = torch.randn(n, 30)
        score = 1.2 * x[:, 0] - x[:, 1] + 0.8 * x[:, 2] * x[:, 3] + 0.6 * x[:, 4]
        y = torch.bernoulli(torch.sigmoid(1.5 * score)).long()
        return x, y

    x_train, y_train = make(400)
    x_val, y_val = make(200)
    x_test, y_test = make(3000)

    model = ChurnNet(30)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    loader = forever(DataLoader(TensorDataset(x_train, y_train), batch_size=100, shuffle=True))
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            logits = model(x_val)
            history.append((F.cross_entropy(logits, y_val).item(),
                            (logits.argmax(1) == y_val).float().mean().item()))
        if not bug:
            model.train()

    model.train()

    def step(i):
        if i % 6 == 0:
            validate()
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        mode = model.training
        model.eval()
        with torch.no_grad():
            value = F.cross_entropy(model(x_test), y_test).item()
        model.train(mode)
        return value

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def churn_dropout_bad():
    return _churn_dropout(True)


def churn_dropout_good():
    return _churn_dropout(False)


# --------------------------------------------------------------------------- 3 GRU forecaster with scheduler

class WindowDataset(Dataset):
    def __init__(self, series, context, horizon):
        self.series, self.context, self.horizon = series, context, horizon

    def __len__(self):
        return len(self.series) - self.context - self.horizon + 1

    def __getitem__(self, k):
        a, b = k + self.context, k + self.context + self.horizon
        return self.series[k:a, None], self.series[a:b]


class GRUForecaster(nn.Module):
    def __init__(self, hidden=48, horizon=6):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def _load_gru(bug):
    torch.manual_seed(303)
    t = torch.arange(2600.0)
    load = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 9.5 + 1.0)
    noise = torch.zeros_like(t)
    eps = 0.15 * torch.randn(len(t))
    for k in range(1, len(t)):
        noise[k] = 0.7 * noise[k - 1] + eps[k]
    load = load + noise
    load = (load - load[:2000].mean()) / load[:2000].std()

    train = WindowDataset(load[:2000], 30, 6)
    test = WindowDataset(load[2000:], 30, 6)
    x_test = torch.stack([test[k][0] for k in range(len(test))])
    y_test = torch.stack([test[k][1] for k in range(len(test))])

    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = GRUForecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)
    batches = forever(loader)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if bug:
            scheduler.step()
        elif (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def load_gru_bad():
    return _load_gru(True)


def load_gru_good():
    return _load_gru(False)


# --------------------------------------------------------------------------- 4 TCN

class TemporalBlock(nn.Module):
    def __init__(self, c_in, c_out, kernel, dilation, pad, chomp):
        super().__init__()
        self.conv = nn.Conv1d(c_in, c_out, kernel, dilation=dilation, padding=pad)
        self.chomp = chomp
        self.skip = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x):
        y = self.conv(x)
        if self.chomp:
            y = y[..., :-self.chomp]
        return F.relu(y) + self.skip(x)


class TCN(nn.Module):
    def __init__(self, bug, channels=24, kernel=3, levels=4):
        super().__init__()
        blocks = []
        c_in = 1
        for lvl in range(levels):
            d = 2 ** lvl
            span = (kernel - 1) * d
            if bug:
                blocks.append(TemporalBlock(c_in, channels, kernel, d, pad=span // 2, chomp=0))
            else:
                blocks.append(TemporalBlock(c_in, channels, kernel, d, pad=span, chomp=span))
            c_in = channels
        self.net = nn.Sequential(*blocks)
        self.head = nn.Conv1d(channels, 1, 1)

    def forward(self, x):                      # (B, T) -> (B, T)
        return self.head(self.net(x.unsqueeze(1))).squeeze(1)


def _tcn_nextstep(bug):
    torch.manual_seed(404)

    def simulate(n, length):
        x = torch.zeros(n, length + 20)
        x[:, :2] = torch.randn(n, 2)
        e = torch.randn(n, length + 20)
        for k in range(2, length + 20):
            x[:, k] = 1.6 * x[:, k - 1] - 0.85 * x[:, k - 2] + 0.3 * torch.tanh(x[:, k - 1]) * 0.5 + 0.4 * e[:, k]
        x = x[:, 20:]
        return x / 1.5

    train = simulate(800, 65)
    test = simulate(500, 65)
    model = TCN(bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)

    def step(i):
        idx = torch.randint(0, len(train), (32,))
        seq = train[idx]
        pred = model(seq[:, :-1])
        loss = F.mse_loss(pred, seq[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            forecast = model(test[:, :-1])[:, -1]
            return F.mse_loss(forecast, test[:, -1]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tcn_nextstep_bad():
    return _tcn_nextstep(True)


def tcn_nextstep_good():
    return _tcn_nextstep(False)


# --------------------------------------------------------------------------- 5 transformer forecaster

class PositionalEncoding(nn.Module):
    def __init__(self, d_model, bug, max_len=1000):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.bug = bug

    def forward(self, x):
        if self.bug:
            return x + self.pe[:x.size(0)]
        return x + self.pe[:x.size(1)].transpose(0, 1)


class WaveTransformer(nn.Module):
    def __init__(self, bug, d_model=32):
        super().__init__()
        self.inp = nn.Linear(1, d_model)
        self.pos = PositionalEncoding(d_model, bug)
        layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=64, dropout=0.0,
                                           batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(d_model, 1)

    def forward(self, x):                      # (B, T, 1)
        h = self.encoder(self.pos(self.inp(x)))
        return self.out(h[:, -1]).squeeze(-1)


def _wave_transformer(bug):
    torch.manual_seed(505)

    def waves(n, T=17):
        period = 6 + 10 * torch.rand(n, 1)
        phase = 2 * math.pi * torch.rand(n, 1)
        amp = 0.5 + torch.rand(n, 1)
        t = torch.arange(T).float()
        y = amp * torch.sin(2 * math.pi * t / period + phase) + 0.03 * torch.randn(n, T)
        return y[:, :-1].unsqueeze(-1), y[:, -1]

    x_test, y_test = waves(500)
    model = WaveTransformer(bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = waves(64)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            err = F.mse_loss(model(x_test), y_test).item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def wave_transformer_bad():
    return _wave_transformer(True)


def wave_transformer_good():
    return _wave_transformer(False)


# --------------------------------------------------------------------------- 6 graphs

class GraphConv(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin_self = nn.Linear(d_in, d_out)
        self.lin_nbr = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        agg = torch.zeros_like(x).index_add_(0, dst, x[src])
        deg = torch.zeros(len(x)).index_add_(0, dst, torch.ones(len(dst))).clamp(min=1)
        return self.lin_self(x) + self.lin_nbr(agg / deg.unsqueeze(1))


class GraphRegressor(nn.Module):
    def __init__(self, d_in=5, hidden=64):
        super().__init__()
        self.conv1 = GraphConv(d_in, hidden)
        self.conv2 = GraphConv(hidden, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x, edge_index, batch, num_graphs):
        h = F.relu(self.conv1(x, edge_index))
        h = F.relu(self.conv2(h, edge_index))
        pooled = torch.zeros(num_graphs, h.size(1)).index_add_(0, batch, h)
        count = torch.zeros(num_graphs).index_add_(0, batch, torch.ones(len(batch)))
        return self.head(pooled / count.unsqueeze(1)).squeeze(1)


def _graph_collate(bug):
    torch.manual_seed(606)
    w = torch.randn(5)

    def make_graph():
        n = int(torch.randint(6, 15, (1,)))
        upper = torch.triu(torch.rand(n, n) < 0.3, diagonal=1)
        adj = (upper | upper.T).float()
        x = torch.randn(n, 5)
        y = torch.tanh(1.5 * (adj @ (x @ w)) / adj.sum(1).clamp(min=1) - x[:, 0]).mean() * 4
        return x, adj.nonzero().T, y

    def collate(graphs):
        xs, edges, batch, ys = [], [], [], []
        offset = 0
        for g, (x, edge_index, y) in enumerate(graphs):
            xs.append(x)
            edges.append(edge_index if bug else edge_index + offset)
            batch.append(torch.full((len(x),), g))
            ys.append(y)
            offset += len(x)
        return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(batch), torch.stack(ys)

    train = [make_graph() for _ in range(800)]
    test = [make_graph() for _ in range(200)]
    loader = forever(DataLoader(train, batch_size=100, shuffle=True, collate_fn=collate))
    model = GraphRegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        x, edge_index, batch, y = next(loader)
        pred = model(x, edge_index, batch, len(y))
        loss = F.mse_loss(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        # served one graph at a time
        with torch.no_grad():
            errs = []
            for x, edge_index, y in test:
                batch = torch.zeros(len(x), dtype=torch.long)
                errs.append((model(x, edge_index, batch, 1)[0] - y) ** 2)
            return torch.stack(errs).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_collate_bad():
    return _graph_collate(True)


def graph_collate_good():
    return _graph_collate(False)


# --------------------------------------------------------------------------- 7 DQN on a batched cart-pole

def cartpole_step(s, a):
    x, v, th, om = s.unbind(1)
    force = torch.where(a == 1, 10.0, -10.0)
    sin, cos = torch.sin(th), torch.cos(th)
    temp = (force + 0.05 * om ** 2 * sin) / 1.1
    th_acc = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos ** 2 / 1.1))
    x_acc = temp - 0.05 * th_acc * cos / 1.1
    nxt = torch.stack([x + 0.02 * v, v + 0.02 * x_acc, th + 0.02 * om, om + 0.02 * th_acc], 1)
    done = (nxt[:, 0].abs() > 2.4) | (nxt[:, 2].abs() > 0.2095)
    return nxt, torch.ones(len(s)), done.float()


class ReplayBuffer:
    def __init__(self, capacity):
        self.capacity, self.size, self.pos = capacity, 0, 0
        self.s = torch.zeros(capacity, 4)
        self.a = torch.zeros(capacity, dtype=torch.long)
        self.r = torch.zeros(capacity)
        self.s2 = torch.zeros(capacity, 4)
        self.d = torch.zeros(capacity)

    def push(self, s, a, r, s2, d):
        idx = (self.pos + torch.arange(len(s))) % self.capacity
        self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.d[idx] = s, a, r, s2, d
        self.pos = (self.pos + len(s)) % self.capacity
        self.size = min(self.capacity, self.size + len(s))

    def sample(self, n):
        idx = torch.randint(0, self.size, (n,))
        return self.s[idx], self.a[idx], self.r[idx], self.s2[idx], self.d[idx]


def _cartpole_dqn(bug):
    torch.manual_seed(707)
    n_envs, gamma = 16, 0.95
    scale = torch.tensor([0.5, 0.5, 5.0, 0.5])

    def fresh(n):
        return (torch.rand(n, 4) - 0.5) * 0.1

    q_net = mlp(4, 128, 128, 2)
    target_net = copy.deepcopy(q_net)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=4e-3)
    buffer = ReplayBuffer(20000)
    env = {"s": fresh(n_envs)}

    def interact(eps):
        s = env["s"]
        with torch.no_grad():
            a = q_net(s * scale).argmax(1)
        explore = torch.rand(n_envs) < eps
        a = torch.where(explore, torch.randint(0, 2, (n_envs,)), a)
        s2, r, d = cartpole_step(s, a)
        buffer.push(s, a, r, s2, d)
        env["s"] = torch.where(d.bool().unsqueeze(1), fresh(n_envs), s2)

    for _ in range(200):
        interact(1.0)

    def step(i):
        interact(max(0.1, 1.0 - i / 200))
        s, a, r, s2, d = buffer.sample(1000)
        q = q_net(s * scale).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            q_next = target_net(s2 * scale).max(dim=1).values
            if bug:
                target = r + gamma * q_next
            else:
                target = r + gamma * (1 - d) * q_next
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 25 == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        g = torch.Generator().manual_seed(1)
        s = (torch.rand(64, 4, generator=g) - 0.5) * 0.1
        alive = torch.ones(64)
        length = torch.zeros(64)
        with torch.no_grad():
            for _ in range(200):
                s, _, d = cartpole_step(s, q_net(s * scale).argmax(1))
                alive = alive * (1 - d)
                length += alive
        return 1.0 - (length.mean().item() / 201)

    return {"model": {"q": q_net, "target": target_net}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def cartpole_dqn_bad():
    return _cartpole_dqn(True)


def cartpole_dqn_good():
    return _cartpole_dqn(False)


# --------------------------------------------------------------------------- 8 REINFORCE

class Thermostat:
    """Batch of rooms; the action (cool, idle, heat) acts through a slow heater."""

    def __init__(self, n):
        self.n = n

    def reset(self, gen=None):
        self.temp = 4 * (torch.rand(self.n, generator=gen) - 0.5)
        self.heater = torch.zeros(self.n)
        return self.obs()

    def obs(self):
        return torch.stack([self.temp, self.heater], 1)

    def step(self, a):
        reward = -self.temp.abs()
        self.temp = 0.98 * self.temp + 0.5 * self.heater
        self.heater = 0.6 * self.heater + 0.4 * (a.float() - 1)
        return self.obs(), reward


def _thermostat_reinforce(bug):
    torch.manual_seed(808)
    gamma, horizon = 0.95, 20
    env = Thermostat(48)
    policy = mlp(2, 32, 3, act=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def step(i):
        obs = env.reset()
        log_probs, rewards = [], []
        for _ in range(horizon):
            dist = Categorical(logits=policy(obs))
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            obs, reward = env.step(action)
            rewards.append(reward)

        returns, R = [], torch.zeros(env.n)
        if bug:
            for r in rewards:
                R = r + gamma * R
                returns.append(R)
        else:
            for r in reversed(rewards):
                R = r + gamma * R
                returns.insert(0, R)
        returns = torch.stack(returns)
        advantage = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)

        loss = -(torch.stack(log_probs) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        room = Thermostat(300)
        obs, cost = room.reset(torch.Generator().manual_seed(5)), 0.0
        with torch.no_grad():
            for _ in range(horizon):
                obs, r = room.step(policy(obs).argmax(1))
                cost -= r.mean().item()
        return cost / horizon

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def thermostat_reinforce_bad():
    return _thermostat_reinforce(True)


def thermostat_reinforce_good():
    return _thermostat_reinforce(False)


# --------------------------------------------------------------------------- 9 actor-critic

class ActorCritic(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.pi = mlp(2, 64, 3, act=nn.Tanh)
        self.v = mlp(2, 64, 1, act=nn.Tanh)
        self.bug = bug

    def act(self, obs):
        return Categorical(logits=self.pi(obs))

    def value(self, obs):
        return self.v(obs) if self.bug else self.v(obs).squeeze(-1)


def dock_dynamics(s, a):
    """A boat in a side current; the action pushes left, not at all, or right."""
    pos, current = s.unbind(-1)
    reward = -pos.abs()
    pos = (pos + 0.3 * (a.float() - 1) + 0.1 * current).clamp(-3, 3)
    return torch.stack([pos, current], -1), reward


def _dock_a2c(bug):
    torch.manual_seed(909)
    n_envs, T, gamma = 80, 8, 0.9
    ac = ActorCritic(bug)
    optimizer = torch.optim.Adam([{"params": ac.pi.parameters(), "lr": 4e-3},
                                  {"params": ac.v.parameters(), "lr": 3e-2}])

    def start(n, gen=None):
        s = torch.rand(n, 2, generator=gen) * 2 - 1
        return s * torch.tensor([2.0, 1.0])

    env = {"s": start(n_envs), "t": 0}

    def step(i):
        S, A, Rw, S2 = [], [], [], []
        with torch.no_grad():
            for _ in range(T):
                s = env["s"]
                a = ac.act(s).sample()
                s2, r = dock_dynamics(s, a)
                S.append(s), A.append(a), Rw.append(r), S2.append(s2)
                env["s"] = s2
        env["t"] += T
        if env["t"] >= 32:
            env["s"], env["t"] = start(n_envs), 0
        states, actions = torch.cat(S), torch.cat(A)
        rewards, next_states = torch.cat(Rw), torch.cat(S2)

        with torch.no_grad():
            target = 0.1 * rewards + gamma * ac.value(next_states)
        advantage = target - ac.value(states)
        dist = ac.act(states)
        policy_loss = -(dist.log_prob(actions) * advantage.detach()).mean()
        value_loss = advantage.pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        s, cost = start(300, torch.Generator().manual_seed(3)), 0.0
        with torch.no_grad():
            for _ in range(32):
                s, r = dock_dynamics(s, ac.pi(s).argmax(-1))
                cost -= r.mean().item()
        return cost / 32

    return {"model": ac, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dock_a2c_bad():
    return _dock_a2c(True)


def dock_a2c_good():
    return _dock_a2c(False)


# --------------------------------------------------------------------------- 10 offline RL (AWR)

def ridge_step(y, a, noise):
    pos = 1.08 * (y[:, 0] + 0.15 * (a.float() - 1)) + 0.12 * noise
    return torch.stack([pos, y[:, 1]], 1), pos.abs() > 1.0


def _ridge_awr(bug):
    torch.manual_seed(1010)
    gamma, beta, max_len = 0.9, 1.0, 40

    # log of a random behaviour policy, one episode after the other
    obs, act, rew, done = [], [], [], []
    for _ in range(150):
        y = torch.tensor([[0.6 * (torch.rand(1).item() - 0.5), torch.randn(1).item()]])
        for t in range(max_len):
            a = torch.randint(0, 3, (1,))
            y2, fell = ridge_step(y, a, torch.randn(1))
            obs.append(y[0]), act.append(a[0])
            rew.append(0.0 if fell else 1.0)
            end = bool(fell) or t == max_len - 1
            done.append(float(end))
            y = y2
            if end:
                break
    obs, act = torch.stack(obs), torch.stack(act)

    returns = torch.zeros(len(obs))
    running = 0.0
    for k in reversed(range(len(obs))):
        if not bug and done[k]:
            running = 0.0
        running = rew[k] + gamma * running
        returns[k] = running

    policy = mlp(2, 96, 96, 3)
    critic = mlp(2, 96, 96, 1)
    pi_opt = torch.optim.Adam(policy.parameters(), lr=2e-3)
    v_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, len(obs), (1024,))
        s, a, ret = obs[idx], act[idx], returns[idx]

        v = critic(s).squeeze(1)
        v_loss = F.mse_loss(v, ret)
        v_opt.zero_grad()
        v_loss.backward()
        v_opt.step()

        adv = ret - v.detach()
        weight = torch.exp(adv / beta).clamp(max=20.0)
        logp = F.log_softmax(policy(s), dim=1).gather(1, a[:, None]).squeeze(1)
        pi_loss = -(weight * logp).mean()
        pi_opt.zero_grad()
        pi_loss.backward()
        pi_opt.step()
        return pi_loss.item()

    def probe():
        g = torch.Generator().manual_seed(2)
        n = 400
        y = torch.stack([0.6 * (torch.rand(n, generator=g) - 0.5), torch.randn(n, generator=g)], 1)
        alive, lived = torch.ones(n), torch.zeros(n)
        with torch.no_grad():
            for _ in range(max_len):
                y, fell = ridge_step(y, policy(y).argmax(1), torch.randn(n, generator=g))
                alive = alive * (~fell).float()
                lived += alive
        return 1.0 - lived.mean().item() / (max_len + 1)

    return {"model": {"policy": policy, "critic": critic}, "optimizer": [pi_opt, v_opt], "steps": 20,
            "step": step, "probe": probe}


def ridge_awr_bad():
    return _ridge_awr(True)


def ridge_awr_good():
    return _ridge_awr(False)


# --------------------------------------------------------------------------- 11 two-tower retrieval

class TwoTower(nn.Module):
    def __init__(self, n_items, d_user, dim=24):
        super().__init__()
        self.user_tower = mlp(d_user, 192, dim)
        self.item_emb = nn.Embedding(n_items, 48)
        self.item_tower = mlp(48, 192, dim)

    def users(self, u):
        return F.normalize(self.user_tower(u), dim=-1)

    def items(self, ids):
        return F.normalize(self.item_tower(self.item_emb(ids)), dim=-1)


def _two_tower(bug):
    torch.manual_seed(1111)
    n_users, n_items, k = 1500, 300, 8
    user_lat, item_lat = torch.randn(n_users, k), torch.randn(n_items, k)
    mix = torch.randn(k, 20) / math.sqrt(k)
    user_feat = torch.tanh(user_lat @ mix) + 0.1 * torch.randn(n_users, 20)
    affinity = F.softmax(user_lat @ item_lat.T * 2.0, dim=1)
    clicks = torch.multinomial(affinity, 12, replacement=True)
    train_users = 1200
    pairs_u = torch.arange(train_users).repeat_interleave(12)
    pairs_i = clicks[:train_users].reshape(-1)

    model = TwoTower(n_items, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    temperature = 1.0 if bug else 0.1

    def step(i):
        idx = torch.randint(0, len(pairs_u), (512,))
        u = model.users(user_feat[pairs_u[idx]])
        v = model.items(pairs_i[idx])
        logits = u @ v.T / temperature
        loss = F.cross_entropy(logits, torch.arange(len(idx)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        # one minus recall@10 of new users' clicks
        with torch.no_grad():
            u = model.users(user_feat[train_users:])
            v = model.items(torch.arange(n_items))
            top = (u @ v.T).topk(10, dim=1).indices
            hit = (clicks[train_users:].unsqueeze(2) == top.unsqueeze(1)).any(2).float()
            return 1.0 - hit.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_tower_bad():
    return _two_tower(True)


def two_tower_good():
    return _two_tower(False)


# --------------------------------------------------------------------------- 12 PINN

class PINN(nn.Module):
    def __init__(self, width=40, depth=3):
        super().__init__()
        self.net = mlp(1, *([width] * depth), 1, act=nn.Tanh)

    def forward(self, x):
        return self.net(x)


def _pinn_reaction(bug):
    torch.manual_seed(1212)
    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    exact = lambda x: torch.sin(math.pi * x) + 0.3 * torch.sin(3 * math.pi * x)
    source = lambda x: ((1 + math.pi ** 2) * torch.sin(math.pi * x)
                        + 0.3 * (1 + 9 * math.pi ** 2) * torch.sin(3 * math.pi * x))
    ends = torch.tensor([[0.0], [1.0]])

    def residual(x):
        u = model(x)
        ones = torch.ones_like(u)
        u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
        if bug:
            u_xx = torch.autograd.grad(u_x, x, ones, retain_graph=True)[0]
        else:
            u_xx = torch.autograd.grad(u_x, x, ones, create_graph=True)[0]
        return -u_xx + u - source(x)

    def step(i):
        x = torch.rand(1000, 1, requires_grad=True)
        loss_pde = residual(x).pow(2).mean()
        loss_bc = model(ends).pow(2).mean()
        loss = 0.01 * loss_pde + 10.0 * loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        x = torch.linspace(0, 1, 201).unsqueeze(1)
        with torch.no_grad():
            return ((model(x) - exact(x)).norm() / exact(x).norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_reaction_bad():
    return _pinn_reaction(True)


def pinn_reaction_good():
    return _pinn_reaction(False)


# --------------------------------------------------------------------------- 13 Cox survival

class CoxPHLoss(nn.Module):
    """Negative log partial likelihood (Breslow)."""

    def __init__(self, descending):
        super().__init__()
        self.descending = descending

    def forward(self, log_risk, time, event):
        order = torch.argsort(time, descending=self.descending)
        log_risk, event = log_risk[order], event[order]
        log_risk_set = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_risk_set) * event).sum() / event.sum().clamp(min=1)


def concordance(risk, time, event):
    comparable = (time[:, None] < time[None, :]) & (event[:, None] == 1)
    diff = risk[:, None] - risk[None, :]
    score = (diff > 0).float() + 0.5 * (diff == 0).float()
    return (score * comparable).sum() / comparable.sum()


def _cox_survival(bug):
    torch.manual_seed(1313)

    def cohort(n):
        x = torch.randn(n, 10)
        log_hazard = x[:, 0] - 0.8 * x[:, 1] + 0.6 * x[:, 2] * x[:, 3] + 0.5 * x[:, 4].abs()
        t = torch.distributions.Exponential(torch.exp(log_hazard)).sample()
        c = torch.distributions.Exponential(torch.full((n,), 0.5)).sample()
        return x, torch.minimum(t, c), (t <= c).float()

    train = cohort(2000)
    x_te, t_te, e_te = cohort(800)
    model = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                          nn.Linear(128, 1, bias=False))
    criterion = CoxPHLoss(descending=not bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    loader = forever(DataLoader(TensorDataset(*train), batch_size=400, shuffle=True))

    def step(i):
        x, t, e = next(loader)
        loss = criterion(model(x).squeeze(1), t, e)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return 1.0 - concordance(model(x_te).squeeze(1), t_te, e_te).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cox_survival_bad():
    return _cox_survival(True)


def cox_survival_good():
    return _cox_survival(False)


# --------------------------------------------------------------------------- 14 prototypical networks

def _proto_episodes(bug):
    torch.manual_seed(1414)
    n_way, k_shot, n_query = 5, 4, 15
    signal, nuisance = 6, 18
    mix = torch.linalg.qr(torch.randn(24, 24)).Q
    train_means = 1.5 * torch.randn(60, signal)
    test_means = 1.5 * torch.randn(30, signal)

    def draw(means, classes, shots, gen=None):
        n = len(classes) * shots
        mu = means[classes].repeat_interleave(shots, dim=0)
        z = mu + 0.6 * torch.randn(n, signal, generator=gen)
        other = 3.0 * torch.randn(n, nuisance, generator=gen)
        return torch.cat([z, other], 1) @ mix

    def episode(means, gen=None):
        classes = torch.randperm(len(means), generator=gen)[:n_way]
        support = draw(means, classes, k_shot, gen)
        query = draw(means, classes, n_query, gen)
        return support, query, torch.arange(n_way).repeat_interleave(n_query)

    encoder = mlp(24, 128, 128, 16)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    episodes_per_batch = 4

    def step(i):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(episodes_per_batch):
            support, query, labels = episode(train_means)
            z_s, z_q = encoder(support), encoder(query)
            if bug:
                prototypes = z_s.view(k_shot, n_way, -1).mean(dim=0)
            else:
                prototypes = z_s.view(n_way, k_shot, -1).mean(dim=1)
            logits = -torch.cdist(z_q, prototypes).pow(2)
            loss = F.cross_entropy(logits, labels) / episodes_per_batch
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        g = torch.Generator().manual_seed(9)
        wrong = []
        with torch.no_grad():
            for _ in range(60):
                support, query, labels = episode(test_means, g)
                z_s, z_q = encoder(support), encoder(query)
                owner = torch.arange(n_way).repeat_interleave(k_shot)
                protos = torch.stack([z_s[owner == c].mean(0) for c in range(n_way)])
                wrong.append((torch.cdist(z_q, protos).argmin(1) != labels).float().mean())
        return torch.stack(wrong).mean().item()

    return {"model": encoder, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def proto_episodes_bad():
    return _proto_episodes(True)


def proto_episodes_good():
    return _proto_episodes(False)


# --------------------------------------------------------------------------- 15 multi-task

class MultiTaskNet(nn.Module):
    def __init__(self, d_in, tasks, hidden=160):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Linear(hidden, 1) for t in tasks})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x)).squeeze(-1)


def _multitask_heads(bug):
    torch.manual_seed(1515)
    tasks = ("viscosity", "density", "melting")

    def make(n):
        x = torch.randn(n, 10)
        base = torch.tanh(x[:, 0] + x[:, 1] * x[:, 2])
        y = {"viscosity": 2 * base + 0.5 * x[:, 3],
             "density": base * x[:, 4],
             "melting": torch.sin(2 * x[:, 5]) + base}
        return x, {k: v + 0.1 * torch.randn(n) for k, v in y.items()}

    x_train, y_train = make(3000)
    x_test, y_test = make(1000)
    model = MultiTaskNet(10, tasks)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        idx = torch.randint(0, len(x_train), (256,))
        total = 0.0
        if not bug:
            optimizer.zero_grad()
        for task in tasks:
            if bug:
                optimizer.zero_grad()
            loss = F.mse_loss(model(x_train[idx], task), y_train[task][idx])
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        with torch.no_grad():
            return sum(F.mse_loss(model(x_test, t), y_test[t]).item() / y_test[t].var().item()
                       for t in tasks) / len(tasks)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_heads_bad():
    return _multitask_heads(True)


def multitask_heads_good():
    return _multitask_heads(False)


# --------------------------------------------------------------------------- 16 VAE for anomalies

class VAE(nn.Module):
    def __init__(self, d=32, latent=6, hidden=192):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, d))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def _sensor_vae(bug):
    torch.manual_seed(1616)
    W1, W2 = torch.randn(4, 32), torch.randn(4, 32)

    def normal_data(n):
        z = torch.randn(n, 4)
        return torch.tanh(z @ W1 * 0.7) + 0.5 * torch.sin(z @ W2) + 0.05 * torch.randn(n, 32)

    train, ok = normal_data(3000), normal_data(600)
    # faults: every second sensor comes from another reading
    faulty = ok.clone()
    faulty[:, ::2] = normal_data(600)[:, ::2]

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(train), batch_size=200, shuffle=True, drop_last=True))

    def loss_function(recon, x, mu, logvar):
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        if bug:
            return F.mse_loss(recon, x) + kl
        return F.mse_loss(recon, x, reduction="sum") / (2 * 0.1) + kl

    def step(i):
        (x,) = next(loader)
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score(x):
        mu = model.mu(model.enc(x))
        return (model.dec(mu) - x).pow(2).mean(1)

    def probe():
        with torch.no_grad():
            a, b = score(ok), score(faulty)
            auroc = (b[:, None] > a[None, :]).float().mean().item()
        return 1.0 - auroc

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sensor_vae_bad():
    return _sensor_vae(True)


def sensor_vae_good():
    return _sensor_vae(False)


# --------------------------------------------------------------------------- 17 Bayes by backprop

class BayesLinear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.w_mu = nn.Parameter(torch.randn(d_out, d_in) / math.sqrt(d_in))
        self.w_rho = nn.Parameter(torch.full((d_out, d_in), -4.0))
        self.b_mu = nn.Parameter(torch.zeros(d_out))
        self.b_rho = nn.Parameter(torch.full((d_out,), -4.0))

    def forward(self, x):
        w_sigma, b_sigma = F.softplus(self.w_rho), F.softplus(self.b_rho)
        w = self.w_mu + w_sigma * torch.randn_like(w_sigma)
        b = self.b_mu + b_sigma * torch.randn_like(b_sigma)
        return F.linear(x, w, b)

    def kl(self):
        total = 0.0
        for mu, rho in ((self.w_mu, self.w_rho), (self.b_mu, self.b_rho)):
            q = Normal(mu, F.softplus(rho))
            p = Normal(torch.zeros_like(mu), torch.ones_like(mu))
            total = total + torch.distributions.kl_divergence(q, p).sum()
        return total


class BayesNet(nn.Module):
    def __init__(self, d_in, hidden=50):
        super().__init__()
        self.layers = nn.ModuleList([BayesLinear(d_in, hidden), BayesLinear(hidden, hidden),
                                     BayesLinear(hidden, 1)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x).squeeze(-1)

    def kl(self):
        return sum(layer.kl() for layer in self.layers)


def _bayes_regression(bug):
    torch.manual_seed(1717)
    n_train, noise = 4000, 0.2
    x = torch.randn(n_train + 1000, 6)
    y = torch.sin(1.5 * x[:, 0]) + 0.6 * x[:, 1] * x[:, 2] + 0.5 * x[:, 3] + noise * torch.randn(len(x))
    x_test, y_test = x[n_train:], y[n_train:]

    net = BayesNet(6)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def step(i):
        idx = torch.randint(0, n_train, (400,))
        pred = net(x[idx])
        nll = -Normal(pred, noise).log_prob(y[idx]).mean()
        kl = net.kl() if bug else net.kl() / n_train
        loss = nll + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        state = torch.get_rng_state()
        torch.manual_seed(0)
        with torch.no_grad():
            mean = torch.stack([net(x_test) for _ in range(30)]).mean(0)
        torch.set_rng_state(state)
        return F.mse_loss(mean, y_test).sqrt().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bayes_regression_bad():
    return _bayes_regression(True)


def bayes_regression_good():
    return _bayes_regression(False)


# --------------------------------------------------------------------------- 18 mixture density network

class MDN(nn.Module):
    def __init__(self, k=6, hidden=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, k)
        self.mu = nn.Linear(hidden, k)
        self.log_sigma = nn.Linear(hidden, k)

    def forward(self, x):
        h = self.body(x)
        return F.log_softmax(self.pi(h), dim=1), self.mu(h), self.log_sigma(h).clamp(-5, 3)


def _arm_mdn(bug):
    torch.manual_seed(1818)

    def sample(n):
        angle = torch.rand(n, 1)
        reach = angle + 0.3 * torch.sin(2 * math.pi * angle) + 0.02 * torch.randn(n, 1)
        return (reach - 0.5) * 4, (angle - 0.5) * 10

    x_test, y_test = sample(2000)
    model = MDN()
    nn.init.uniform_(model.mu.bias, -4.0, 4.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def component_logp(x, y):
        log_pi, mu, log_sigma = model(x)
        log_n = -0.5 * ((y - mu) / log_sigma.exp()) ** 2 - log_sigma - 0.5 * math.log(2 * math.pi)
        return log_pi, log_n

    def step(i):
        x, y = sample(768)
        log_pi, log_n = component_logp(x, y)
        if bug:
            loss = -(log_pi.exp() * log_n).sum(dim=1).mean()
        else:
            loss = -torch.logsumexp(log_pi + log_n, dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            log_pi, log_n = component_logp(x_test, y_test)
            return -torch.logsumexp(log_pi + log_n, dim=1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def arm_mdn_bad():
    return _arm_mdn(True)


def arm_mdn_good():
    return _arm_mdn(False)


# --------------------------------------------------------------------------- 19 padded sets

class AttentionPool(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.seed = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, h, key_padding_mask):
        q = self.seed.expand(h.size(0), -1, -1)
        out, _ = self.attn(q, h, h, key_padding_mask=key_padding_mask, need_weights=False)
        return out.squeeze(1)


class JetRegressor(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU())
        self.pool = AttentionPool(dim)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))

    def forward(self, x, mask):
        return self.head(self.pool(self.embed(x), mask)).squeeze(-1)


MAX_PARTICLES = 24


def _jet_sets(bug):
    torch.manual_seed(1919)

    def jets(n):
        count = torch.randint(4, 20, (n,))
        width = 0.1 + 0.5 * torch.rand(n, 1)
        pt = torch.distributions.Exponential(1.0).sample((n, MAX_PARTICLES)) + 0.1
        eta, phi = torch.randn(n, MAX_PARTICLES) * width, torch.randn(n, MAX_PARTICLES) * width
        real = torch.arange(MAX_PARTICLES).unsqueeze(0) < count.unsqueeze(1)
        w = pt * real
        w = w / w.sum(1, keepdim=True)
        ce, cp = (w * eta).sum(1, keepdim=True), (w * phi).sum(1, keepdim=True)
        girth = (w * ((eta - ce) ** 2 + (phi - cp) ** 2)).sum(1).sqrt()
        x = torch.stack([pt, eta, phi], -1) * real.unsqueeze(-1)
        return x, real, (girth - 0.45) * 4

    x_train, m_train, y_train = jets(4000)
    x_test, m_test, y_test = jets(1000)
    model = JetRegressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def predict(x, mask):
        return model(x, mask if bug else ~mask)

    def step(i):
        idx = torch.randint(0, len(x_train), (128,))
        loss = F.mse_loss(predict(x_train[idx], m_train[idx]), y_train[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(predict(x_test, m_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def jet_sets_bad():
    return _jet_sets(True)


def jet_sets_good():
    return _jet_sets(False)


# --------------------------------------------------------------------------- 20 sequence tagging

class BiLSTMTagger(nn.Module):
    def __init__(self, vocab, n_tags, emb=24, hidden=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb, padding_idx=0)
        self.lstm = nn.LSTM(emb, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, n_tags)

    def forward(self, tokens):
        out, _ = self.lstm(self.emb(tokens))
        return self.fc(out)


def _bilstm_tagger(bug):
    torch.manual_seed(2020)
    vocab, n_tags, T = 60, 7, 14
    lexical = torch.randint(0, n_tags, (vocab,))
    trigger = torch.rand(vocab) < 0.25

    def corpus(n):
        tokens = torch.randint(1, vocab, (n, T))
        tags = lexical[tokens]
        after = torch.zeros_like(trigger[tokens])
        after[:, 1:] = trigger[tokens][:, :-1]
        tags = torch.where(after, (tags + 1) % n_tags, tags)
        slip = torch.rand(n, T) < 0.05                       # annotation noise
        tags = torch.where(slip, torch.randint(0, n_tags, (n, T)), tags)
        length = torch.randint(6, T + 1, (n, 1))
        pad = torch.arange(T).unsqueeze(0) >= length
        return tokens.masked_fill(pad, 0), tags.masked_fill(pad, -100)

    train = DataLoader(TensorDataset(*corpus(3200)), batch_size=80, shuffle=True, drop_last=True)
    test_x, test_y = corpus(400)
    model = BiLSTMTagger(vocab, n_tags)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    batches = forever(train)

    def step(i):
        tokens, tags = next(batches)
        optimizer.zero_grad()
        logits = model(tokens)
        B, L, C = logits.shape
        if bug:
            loss = criterion(logits.view(B, C, L), tags)
        else:
            loss = criterion(logits.transpose(1, 2), tags)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = model(test_x).argmax(-1)
        keep = test_y != -100
        return (pred[keep] != test_y[keep]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bilstm_tagger_bad():
    return _bilstm_tagger(True)


def bilstm_tagger_good():
    return _bilstm_tagger(False)


# --------------------------------------------------------------------------- 21 control through a simulator

class Cart:
    dt = 0.1

    def step(self, x, u):
        pos, vel = x[:, :1], x[:, 1:]
        acc = 2.0 * u - 0.1 * vel * vel.abs()
        return torch.cat([pos + self.dt * vel, vel + self.dt * acc], dim=1)

    def cost(self, x, u):
        return (x[:, 0] ** 2 + 0.1 * x[:, 1] ** 2 + 0.02 * u[:, 0] ** 2).mean()


class Controller(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(2, 32, 32, 1, act=nn.Tanh)

    def forward(self, x):
        return torch.tanh(self.net(x))


def _rollout_control(bug):
    torch.manual_seed(2121)
    plant, controller = Cart(), Controller()
    optimizer = torch.optim.Adam(controller.parameters(), lr=3e-3)
    horizon = 30

    def rollout(x):
        total = 0.0
        for _ in range(horizon):
            u = controller(x)
            x = plant.step(x, u)
            total = total + plant.cost(x, u)
            if bug:
                x = x.detach()
        return total / horizon

    def step(i):
        x0 = torch.randn(64, 2)
        loss = rollout(x0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(controller.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    x_eval = torch.randn(500, 2, generator=torch.Generator().manual_seed(4))

    def probe():
        with torch.no_grad():
            return rollout(x_eval).item()

    return {"model": controller, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def rollout_control_bad():
    return _rollout_control(True)


def rollout_control_good():
    return _rollout_control(False)


# --------------------------------------------------------------------------- 22 point clouds, EMA

class PointNetLite(nn.Module):
    def __init__(self, n_classes=5):
        super().__init__()
        self.local = mlp(3, 48, 96)
        self.head = mlp(96, 64, n_classes)

    def forward(self, pts):                    # (B, N, 3)
        return self.head(F.relu(self.local(pts)).max(dim=1).values)


class EMA:
    def __init__(self, model, decay, bug):
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)
        self.decay, self.bug = decay, bug

    @torch.no_grad()
    def update(self, model):
        for ema_p, p in zip(self.module.parameters(), model.parameters()):
            if self.bug:
                ema_p = self.decay * ema_p + (1 - self.decay) * p.detach()
            else:
                ema_p.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)


def make_clouds(n, n_points=48):
    labels = torch.randint(0, 5, (n,))
    g = torch.randn(n, n_points, 3)
    sphere = F.normalize(g, dim=-1)
    u = torch.rand(n, n_points, 3) * 2 - 1
    cube = u / u.abs().max(dim=-1, keepdim=True).values
    ang = 2 * math.pi * torch.rand(n, n_points)
    h = torch.rand(n, n_points) * 2 - 1
    cyl = torch.stack([0.5 * ang.cos(), 0.5 * ang.sin(), h], -1)
    r = (h + 1) / 2
    cone = torch.stack([r * ang.cos(), r * ang.sin(), h], -1)
    ang2 = 2 * math.pi * torch.rand(n, n_points)
    ring = 0.8 + 0.25 * ang2.cos()
    torus = torch.stack([ring * ang.cos(), ring * ang.sin(), 0.25 * ang2.sin()], -1)
    pts = torch.stack([sphere, cube, cyl, cone, torus], 1)[torch.arange(n), labels]
    th = 2 * math.pi * torch.rand(n)
    rot = torch.zeros(n, 3, 3)
    rot[:, 0, 0], rot[:, 0, 1], rot[:, 1, 0], rot[:, 1, 1] = th.cos(), -th.sin(), th.sin(), th.cos()
    rot[:, 2, 2] = 1.0
    scale = 0.8 + 0.4 * torch.rand(n, 1, 1)
    return (pts @ rot.transpose(1, 2)) * scale + 0.05 * torch.randn_like(pts), labels


def _pointnet_ema(bug):
    torch.manual_seed(2222)
    x_train, y_train = make_clouds(2000)
    x_test, y_test = make_clouds(600)
    model = PointNetLite()
    ema = EMA(model, decay=0.95, bug=bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, len(x_train), (96,))
        loss = F.cross_entropy(model(x_train[idx]), y_train[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(ema.module(x_test), y_test).item()

    return {"model": {"model": model, "ema": ema.module}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def pointnet_ema_bad():
    return _pointnet_ema(True)


def pointnet_ema_good():
    return _pointnet_ema(False)
