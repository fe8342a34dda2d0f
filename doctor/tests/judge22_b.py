import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, TensorDataset

CASES = []


def _case(name, group, what):
    CASES.append({"name": name, "what": what, "group": group})


# ---------------------------------------------------------------------------------------------
_case("house_price", "tabular regression",
      "Predictions are (B, 1) and targets (B,), so the squared error broadcasts to (B, B); the net learns the mean.")


class HousePriceNet(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)


def _house_price(bug):
    torch.manual_seed(1)
    x = torch.randn(2400, 8)
    y = 1.5 * x[:, 0] - x[:, 1] + 0.8 * x[:, 2] * x[:, 3] + 0.1 * torch.randn(2400)
    y = (y - y[:2000].mean()) / y[:2000].std()
    loader = DataLoader(TensorDataset(x[:2000], y[:2000]), batch_size=64, shuffle=True, drop_last=True)
    x_val, y_val = x[2000:], y[2000:]
    model = HousePriceNet(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    it = {"it": iter(loader)}

    def next_batch():
        try:
            return next(it["it"])
        except StopIteration:
            it["it"] = iter(loader)
            return next(it["it"])

    def step(i):
        model.train()
        xb, yb = next_batch()
        optimizer.zero_grad()
        if bug:
            pred = model(xb)
        else:
            pred = model(xb).squeeze(-1)
        loss = ((pred - yb) ** 2).mean()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(x_val).reshape(-1) - y_val).pow(2).mean().sqrt().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("credit_default", "tabular classification",
      "Class weights are set to the class frequencies instead of their inverse, so the rare class is ignored.")


class CreditNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 32)
        self.bn1 = nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x)))
        return self.out(F.relu(self.fc2(x)))


def _credit_default(bug):
    torch.manual_seed(2)
    n = 4000
    x = torch.randn(n, 10)
    score = x[:, 0] + 0.7 * x[:, 1] - 0.5 * x[:, 2] + 0.6 * torch.randn(n)
    y = (score > 1.9).long()
    x_tr, y_tr, x_va, y_va = x[:3000], y[:3000], x[3000:], y[3000:]
    counts = torch.bincount(y_tr, minlength=2).float()
    if bug:
        weights = counts / counts.sum()
    else:
        weights = counts.sum() / (2 * counts)
    model = CreditNet()
    criterion = nn.CrossEntropyLoss(weight=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)

    def step(i):
        model.train()
        idx = torch.randint(0, len(x_tr), (128,))
        loss = criterion(model(x_tr[idx]), y_tr[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(x_va).argmax(1)
        model.train()
        recalls = [(pred[y_va == c] == c).float().mean().item() for c in (0, 1)]
        return 1.0 - sum(recalls) / 2 + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("claims_frequency", "count regression",
      "The net outputs a positive rate (softplus) but PoissonNLLLoss keeps its default log_input=True, so the "
      "rate is fitted to the log of the counts.")


class ClaimsFrequency(nn.Module):
    def __init__(self, n_features):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_features, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return F.softplus(self.body(x)).squeeze(-1)


def _claims_frequency(bug):
    torch.manual_seed(3)
    x = torch.randn(3000, 6)
    rate = torch.exp(0.6 + 0.5 * x[:, 0] - 0.4 * x[:, 1] + 0.3 * torch.sin(2 * x[:, 2]))
    claims = torch.poisson(rate)
    train = TensorDataset(x[:2500], claims[:2500])
    loader = DataLoader(train, batch_size=100, shuffle=True)
    model = ClaimsFrequency(6)
    criterion = nn.PoissonNLLLoss() if bug else nn.PoissonNLLLoss(log_input=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = []

    def step(i):
        if not batches:
            batches.extend(loader)
        xb, yb = batches.pop()
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with torch.no_grad():
            return (model(x[2500:]) - rate[2500:]).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("sensor_lstm", "time series",
      "nn.LSTM is given (batch, time, features) without batch_first=True, so it recurs over the batch and the "
      "'last step' output has only seen the last time step plus other samples.")


class SensorLSTM(nn.Module):
    def __init__(self, n_features=3, hidden=32, bug=False):
        super().__init__()
        if bug:
            self.lstm = nn.LSTM(n_features, hidden, num_layers=1)
        else:
            self.lstm = nn.LSTM(n_features, hidden, num_layers=1, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1]).squeeze(-1)


def _sensor_lstm(bug):
    torch.manual_seed(4)
    n, t = 1200, 16
    x = torch.randn(n, t, 3)
    decay = 0.85 ** torch.arange(t - 1, -1, -1).float()
    y = (x[:, :, 0] * decay).sum(1) - 0.5 * (x[:, :, 1] * decay).sum(1)
    x_tr, y_tr, x_te, y_te = x[:1000], y[:1000], x[1000:], y[1000:]
    model = SensorLSTM(bug=bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loss_fn = nn.MSELoss()

    def step(i):
        model.train()
        idx = torch.randperm(len(x_tr))[:64]
        optimizer.zero_grad()
        loss = loss_fn(model(x_tr[idx]), y_tr[idx])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(x_te), y_te).item()
        model.train()
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("eeg_conv", "time series classification",
      "Recordings come as (batch, time, channels); view instead of permute is used to get (batch, channels, time) "
      "for Conv1d, which scrambles time and channels.")


class EEGConvNet(nn.Module):
    def __init__(self, n_channels=4, n_classes=4, bug=False):
        super().__init__()
        self.bug = bug
        self.conv1 = nn.Conv1d(n_channels, 16, 7, padding=3)
        self.conv2 = nn.Conv1d(16, 16, 5, padding=2)
        self.head = nn.Linear(16, n_classes)

    def forward(self, x):
        b, t, c = x.shape
        if self.bug:
            x = x.view(b, c, t)
        else:
            x = x.permute(0, 2, 1)
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.head(x.mean(-1))


def _eeg_conv(bug):
    torch.manual_seed(5)
    n, t, c = 1000, 48, 4
    label = torch.randint(0, 4, (n,))
    time = torch.arange(t).float()
    phase = 6.28 * torch.rand(n, 1)
    x = 1.0 * torch.randn(n, t, c)
    x[torch.arange(n), :, label] += 1.0 * torch.sin(0.6 * time + phase)
    ds = TensorDataset(x[:800], label[:800])
    loader = DataLoader(ds, batch_size=40, shuffle=True)
    model = EEGConvNet(bug=bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    state = {"iter": iter(loader)}

    def step(i):
        batch = next(state["iter"], None)
        if batch is None:
            state["iter"] = iter(loader)
            batch = next(state["iter"])
        signal, target = batch
        optimizer.zero_grad()
        F.cross_entropy(model(signal), target).backward()
        optimizer.step()

    def probe():
        with torch.no_grad():
            return (model(x[800:]).argmax(1) != label[800:]).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("demand_forecast", "probabilistic forecasting",
      "The pinball loss takes the error as prediction minus target, so the 0.1 and 0.9 quantiles are swapped.")


class QuantileGRU(nn.Module):
    def __init__(self, n_quantiles):
        super().__init__()
        self.gru = nn.GRU(1, 24, batch_first=True)
        self.head = nn.Linear(24, n_quantiles)

    def forward(self, history):
        _, h = self.gru(history)
        return self.head(h[-1])


def _demand_forecast(bug):
    torch.manual_seed(6)
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    t = torch.arange(1500).float()
    series = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.randn(1500)
    windows = series.unfold(0, 25, 1)
    hist, target = windows[:, :-1].unsqueeze(-1), windows[:, -1]
    n_train = 1200
    model = QuantileGRU(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def pinball(pred, y):
        if bug:
            err = pred - y.unsqueeze(-1)
        else:
            err = y.unsqueeze(-1) - pred
        return torch.maximum(quantiles * err, (quantiles - 1) * err).mean()

    def step(i):
        idx = torch.randint(0, n_train, (64,))
        loss = pinball(model(hist[idx]), target[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with torch.no_grad():
            diff = target[n_train:].unsqueeze(-1) - model(hist[n_train:])
            return torch.where(diff >= 0, quantiles * diff, (quantiles - 1) * diff).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("load_forecast", "time series forecasting",
      "An epoch-wise ExponentialLR(0.8) is stepped after every batch, so the learning rate is gone in some 30 steps.")


class LoadForecaster(nn.Module):
    def __init__(self, lookback, horizon):
        super().__init__()
        self.trend = nn.Linear(lookback, horizon)
        self.res = nn.Sequential(nn.Linear(lookback, 64), nn.GELU(), nn.Linear(64, horizon))

    def forward(self, x):
        return self.trend(x) + self.res(x)


def _load_forecast(bug):
    torch.manual_seed(7)
    t = torch.arange(2200).float()
    load = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 60) + 0.1 * torch.randn(2200)
    win = load.unfold(0, 36, 1)
    x, y = win[:, :30], win[:, 30:]
    loader = DataLoader(TensorDataset(x[:1600], y[:1600]), batch_size=32, shuffle=True)
    steps_per_epoch = len(loader)
    model = LoadForecaster(30, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    it = [iter(loader)]

    def step(i):
        try:
            xb, yb = next(it[0])
        except StopIteration:
            it[0] = iter(loader)
            xb, yb = next(it[0])
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if bug:
            scheduler.step()
        elif (i + 1) % steps_per_epoch == 0:
            scheduler.step()

    def probe():
        with torch.no_grad():
            return F.l1_loss(model(x[1700:]), y[1700:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("gcn_nodes", "graph node classification",
      "F.dropout is called without training=self.training, so dropout stays on in eval mode and predictions are "
      "noisy.")


class GCN(nn.Module):
    def __init__(self, n_in, n_hid, n_cls, bug=False):
        super().__init__()
        self.w1 = nn.Linear(n_in, n_hid)
        self.w2 = nn.Linear(n_hid, n_cls)
        self.bug = bug

    def forward(self, x, adj):
        h = F.relu(adj @ self.w1(x))
        if self.bug:
            h = F.dropout(h, p=0.6)
        else:
            h = F.dropout(h, p=0.6, training=self.training)
        return adj @ self.w2(h)


def _gcn_nodes(bug):
    torch.manual_seed(8)
    n, k = 300, 3
    label = torch.randint(0, k, (n,))
    same = (label[:, None] == label[None, :]).float()
    a = torch.bernoulli(0.02 * same + 0.008 * (1 - same)).triu(1)
    a = a + a.t() + torch.eye(n)
    d = a.sum(1).rsqrt()
    adj = d[:, None] * a * d[None, :]
    x = 0.7 * F.one_hot(label, k).float() @ torch.randn(k, 16) * 0.6 + torch.randn(n, 16)
    perm = torch.randperm(n)
    train, test = perm[:120], perm[120:]
    model = GCN(16, 16, k, bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        logits = model(x, adj)
        loss = F.cross_entropy(logits[train], label[train])
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            nll = sum(F.cross_entropy(model(x, adj)[test], label[test]).item() for _ in range(5)) / 5
        model.train()
        return nll

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("particle_graph", "graph regression",
      "Messages are summed at the source nodes instead of the destination nodes, so each node gets the messages "
      "it sent, never the ones addressed to it.")


class InteractionLayer(nn.Module):
    def __init__(self, dim, bug=False):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 16))
        self.update = nn.Sequential(nn.Linear(dim + 16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.bug = bug

    def forward(self, x, edge_index):
        src, dst = edge_index
        msg = self.message(x[src])
        agg = torch.zeros(x.size(0), msg.size(1))
        if self.bug:
            agg = agg.index_add(0, src, msg)
        else:
            agg = agg.index_add(0, dst, msg)
        return self.update(torch.cat([x, agg], dim=-1)).squeeze(-1)


def _particle_graph(bug):
    torch.manual_seed(9)
    n_nodes = 40

    def sample_graph():
        x = torch.randn(n_nodes, 4)
        edge_index = torch.randint(0, n_nodes, (2, 120))
        force = torch.zeros(n_nodes).index_add(0, edge_index[1], x[edge_index[0], 0] * x[edge_index[0], 1].sign())
        return x, edge_index, force + 0.5 * x[:, 2]

    train_graphs = [sample_graph() for _ in range(100)]
    test_graphs = [sample_graph() for _ in range(20)]
    model = InteractionLayer(4, bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        optimizer.zero_grad()
        loss = 0.0
        for g in torch.randint(0, len(train_graphs), (4,)).tolist():
            x, edge_index, y = train_graphs[g]
            loss = loss + F.mse_loss(model(x, edge_index), y) / 4
        loss.backward()
        optimizer.step()

    def probe():
        with torch.no_grad():
            return sum(F.mse_loss(model(x, e), y).item() for x, e, y in test_graphs) / len(test_graphs)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("dqn_corridor", "reinforcement learning (DQN)",
      "The TD target bootstraps from the next state even when the episode ended, so Q-values are inflated.")


class QNetwork(nn.Module):
    def __init__(self, n_obs, n_actions):
        super().__init__()
        self.fc1 = nn.Linear(n_obs, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, n_actions)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Corridor:
    length = 7

    @classmethod
    def move(cls, pos, action):
        pos = pos + (1 if action == 1 else -1)
        if pos >= cls.length:
            return pos, 1.0, True
        if pos <= 0:
            return pos, 0.2, True
        return pos, -0.02, False


def _dqn_corridor(bug):
    torch.manual_seed(10)
    gamma, n = 0.95, Corridor.length
    q_net = QNetwork(2, 2)
    target_net = copy.deepcopy(q_net)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=2e-3)
    memory = []
    rng = random.Random(10)
    env = {"pos": 3}

    def obs(pos):
        p = torch.as_tensor(pos).float() / n
        return torch.stack([p, 1 - p], -1)

    def collect(k):
        for _ in range(k):
            s = env["pos"]
            if rng.random() < 0.3:
                a = rng.randrange(2)
            else:
                with torch.no_grad():
                    a = q_net(obs(s)).argmax().item()
            s2, r, done = Corridor.move(s, a)
            memory.append((s, a, r, s2, float(done)))
            env["pos"] = rng.randint(1, n - 1) if done else s2

    def step(i):
        collect(8 if memory else 128)
        s, a, r, s2, done = map(torch.tensor, zip(*rng.sample(memory, 64)))
        q = q_net(obs(s)).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            next_q = target_net(obs(s2)).max(1).values
            if bug:
                target = r + gamma * next_q
            else:
                target = r + gamma * next_q * (1 - done)
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            target_net.load_state_dict(q_net.state_dict())

    true_q = torch.zeros(n + 1, 2)
    for _ in range(200):
        new_q = torch.zeros_like(true_q)
        for s in range(1, n):
            for a in range(2):
                s2, r, done = Corridor.move(s, a)
                new_q[s, a] = r if done else r + gamma * true_q[s2].max().item()
        true_q = new_q

    def probe():
        with torch.no_grad():
            return (q_net(obs(torch.arange(1, n))) - true_q[1:n]).pow(2).mean().sqrt().item()

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("ddpg_point_mass", "reinforcement learning (DDPG)",
      "The Polyak update assigns to the loop variable instead of writing into the target's parameters, so the "
      "target networks keep their random initial weights for ever.")


class DDPGActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())

    def forward(self, s):
        return self.net(s)


class DDPGCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, s, a):
        return self.net(torch.cat([s, a], dim=-1))


def _ddpg_point_mass(bug):
    torch.manual_seed(11)
    gamma, tau = 0.9, 0.1

    def dynamics(s, a):
        v = 0.9 * s[:, 1:2] + 0.5 * a
        p = s[:, 0:1] + 0.5 * v
        reward = -(s[:, 0:1] ** 2) - 0.1 * s[:, 1:2] ** 2
        return torch.cat([p, v], -1).clamp(-3, 3), reward

    states = 2 * torch.rand(4000, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([2.0, 1.0])
    actions = 2 * torch.rand(4000, 1) - 1
    next_states, rewards = dynamics(states, actions)
    actor, critic = DDPGActor(), DDPGCritic()
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=2e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=5e-3)

    @torch.no_grad()
    def soft_update(target, source):
        for tp, sp in zip(target.parameters(), source.parameters()):
            if bug:
                tp = tau * sp + (1 - tau) * tp
            else:
                tp.copy_(tau * sp + (1 - tau) * tp)

    def step(i):
        idx = torch.randint(0, 4000, (128,))
        s, a, r, s2 = states[idx], actions[idx], rewards[idx], next_states[idx]
        with torch.no_grad():
            y = r + gamma * critic_target(s2, actor_target(s2))
        critic_loss = F.mse_loss(critic(s, a), y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        actor_loss = -critic(s, actor(s)).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        soft_update(critic_target, critic)
        soft_update(actor_target, actor)

    start = torch.tensor([[p, v] for p in (-1.5, -0.5, 0.5, 1.5) for v in (-0.5, 0.0, 0.5)])

    def probe():
        s, cost = start, 0.0
        with torch.no_grad():
            for _ in range(30):
                s, r = dynamics(s, actor(s))
                cost -= r.mean().item()
        return cost

    return {"model": [actor, critic], "optimizer": [actor_opt, critic_opt], "steps": 20, "step": step,
            "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("ppo_navigation", "reinforcement learning (PPO)",
      "The 'old' log-probabilities are recomputed with the current policy in each epoch with the graph attached, "
      "so the ratio is identically one and the surrogate has no gradient.")


class PPOAgent(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(n_obs, 32), nn.Tanh(), nn.Linear(32, n_act))
        self.critic = nn.Sequential(nn.Linear(n_obs, 32), nn.Tanh(), nn.Linear(32, 1))

    def dist(self, obs):
        return Categorical(logits=self.actor(obs))

    def value(self, obs):
        return self.critic(obs).squeeze(-1)


def _ppo_navigation(bug):
    torch.manual_seed(12)
    moves = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) * 0.3
    n_envs, horizon, gamma, lam, clip = 32, 8, 0.9, 0.95, 0.2
    agent = PPOAgent(2, 4)
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3)

    def rollout():
        pos = 2 * torch.rand(n_envs, 2) - 1
        obs, acts, logps, rews, vals = [], [], [], [], []
        with torch.no_grad():
            for _ in range(horizon):
                dist = agent.dist(pos)
                act = dist.sample()
                obs.append(pos)
                acts.append(act)
                logps.append(dist.log_prob(act))
                vals.append(agent.value(pos))
                pos = (pos + moves[act]).clamp(-2, 2)
                rews.append(-pos.norm(dim=-1))
            vals.append(agent.value(pos))
        adv, gae = [], torch.zeros(n_envs)
        for t in reversed(range(horizon)):
            delta = rews[t] + gamma * vals[t + 1] - vals[t]
            gae = delta + gamma * lam * gae
            adv.insert(0, gae)
        adv = torch.stack(adv)
        ret = adv + torch.stack(vals[:-1])
        return [v.flatten(0, 1) for v in (torch.stack(obs), torch.stack(acts), torch.stack(logps), adv, ret)]

    def step(i):
        obs, act, logp_old, adv, ret = rollout()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(4):
            if bug:
                logp_old = agent.dist(obs).log_prob(act)
            dist = agent.dist(obs)
            ratio = torch.exp(dist.log_prob(act) - logp_old)
            surr = torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
            value_loss = F.mse_loss(agent.value(obs), ret)
            loss = -surr.mean() + 0.5 * value_loss - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()

    grid = torch.cartesian_prod(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9))

    def probe():
        pos, cost = grid, 0.0
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for _ in range(horizon):
                pos = (pos + moves[agent.dist(pos).sample()]).clamp(-2, 2)
                cost += pos.norm(dim=-1).mean().item()
        return cost / horizon

    return {"model": agent, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("sac_control", "reinforcement learning (SAC)",
      "The actor draws its action with sample() instead of rsample(), so no gradient of Q reaches the actor.")


class SquashedGaussianActor(nn.Module):
    def __init__(self, n_obs, n_act, bug=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_obs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mu = nn.Linear(64, n_act)
        self.log_std = nn.Linear(64, n_act)
        self.bug = bug

    def forward(self, s):
        h = self.body(s)
        dist = Normal(self.mu(h), self.log_std(h).clamp(-5, 1).exp())
        if self.bug:
            u = dist.sample()
        else:
            u = dist.rsample()
        a = torch.tanh(u)
        logp = (dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(-1, keepdim=True)
        return a, logp


class TwinQ(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.q1 = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.q2 = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, s, a):
        x = torch.cat([s, a], -1)
        return self.q1(x), self.q2(x)


def _sac_control(bug):
    torch.manual_seed(13)
    gamma, tau, alpha = 0.8, 0.05, 0.05

    def env_step(s, a):
        reward = -((s + 0.8 * a) ** 2).sum(-1, keepdim=True)
        nxt = 0.5 * s + 0.5 * a + 0.4 * torch.randn_like(s)
        return nxt.clamp(-2, 2), reward

    actor, critic = SquashedGaussianActor(2, 2, bug), TwinQ(4)
    critic_target = copy.deepcopy(critic)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
    buffer = []
    world = {"s": torch.randn(16, 2)}

    def interact():
        with torch.no_grad():
            a, _ = actor(world["s"])
        s2, r = env_step(world["s"], a)
        buffer.append((world["s"], a, r, s2))
        world["s"] = s2

    def step(i):
        interact()
        picks = torch.randint(0, len(buffer), (8,)).tolist()
        s, a, r, s2 = (torch.cat(v) for v in zip(*[buffer[j] for j in picks]))
        with torch.no_grad():
            a2, logp2 = actor(s2)
            y = r + gamma * (torch.min(*critic_target(s2, a2)) - alpha * logp2)
        q1, q2 = critic(s, a)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        a_pi, logp = actor(s)
        actor_loss = (alpha * logp - torch.min(*critic(s, a_pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        with torch.no_grad():
            for tp, p in zip(critic_target.parameters(), critic.parameters()):
                tp.lerp_(p, tau)

    def probe():
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            s, cost = torch.randn(128, 2), 0.0
            for _ in range(15):
                a = torch.tanh(actor.mu(actor.body(s)))
                s, r = env_step(s, a)
                cost -= r.mean().item()
        return cost / 15

    return {"model": [actor, critic], "optimizer": [actor_opt, critic_opt], "steps": 20, "step": step,
            "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("actor_critic_cues", "reinforcement learning (actor-critic)",
      "Discounted returns are accumulated backwards but appended and never reversed, so each action is credited "
      "with the return of the wrong time step.")


class ActorCritic(nn.Module):
    def __init__(self, n_obs, n_actions):
        super().__init__()
        self.shared = nn.Linear(n_obs, 48)
        self.policy = nn.Linear(48, n_actions)
        self.value = nn.Linear(48, 1)

    def forward(self, s):
        h = torch.relu(self.shared(s))
        return Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


def _actor_critic_cues(bug):
    torch.manual_seed(14)
    gamma, n_steps, n_envs = 0.6, 10, 16
    target_map = torch.randn(4, 3)
    model = ActorCritic(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def env_step(s, a):
        reward = (a == (s @ target_map).argmax(-1)).float()
        return 0.3 * s + torch.randn_like(s), reward

    def step(i):
        s = torch.randn(n_envs, 4)
        log_probs, values, rewards = [], [], []
        for _ in range(n_steps):
            dist, v = model(s)
            a = dist.sample()
            log_probs.append(dist.log_prob(a))
            values.append(v)
            s, r = env_step(s, a)
            rewards.append(r)
        returns, running = [], torch.zeros(n_envs)
        for r in reversed(rewards):
            running = r + gamma * running
            if bug:
                returns.append(running)
            else:
                returns.insert(0, running)
        returns = torch.stack(returns)
        advantage = returns - torch.stack(values)
        actor_loss = -(torch.stack(log_probs) * advantage.detach()).mean()
        loss = actor_loss + 0.5 * advantage.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            s = torch.randn(1000, 4)
            dist, _ = model(s)
            best = (s @ target_map).argmax(-1)
            return 1.0 - dist.probs.gather(1, best[:, None]).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("implicit_mf", "recommender systems",
      "The implicit-feedback model is trained with BCE on observed interactions only, without negative sampling, "
      "so every score is pushed up and the ranking suffers.")


class ImplicitMF(nn.Module):
    def __init__(self, n_users, n_items, dim=16):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        self.item_bias = nn.Embedding(n_items, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.item_bias(i).squeeze(-1)


def _implicit_mf(bug):
    torch.manual_seed(15)
    n_users, n_items = 120, 80
    affinity = torch.randn(n_users, 4) @ torch.randn(4, n_items)
    liked = affinity > 1.5
    pairs = liked.nonzero()
    pairs = pairs[torch.randperm(len(pairs))]
    n_train = int(0.8 * len(pairs))
    train_pairs, test_pairs = pairs[:n_train], pairs[n_train:]
    not_liked = (~liked).nonzero()
    test_neg = not_liked[torch.randperm(len(not_liked))[:2000]]
    model = ImplicitMF(n_users, n_items)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def step(i):
        batch = train_pairs[torch.randint(0, n_train, (256,))]
        users, items, labels = batch[:, 0], batch[:, 1], torch.ones(256)
        if not bug:
            users = torch.cat([users, users])
            items = torch.cat([items, torch.randint(0, n_items, (256,))])
            labels = torch.cat([labels, torch.zeros(256)])
        loss = criterion(model(users, items), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with torch.no_grad():
            pos = model(test_pairs[:, 0], test_pairs[:, 1])
            neg = model(test_neg[:, 0], test_neg[:, 1])
            auc = (pos[:, None] > neg[None, :]).float().mean().item()
        return 1.0 - auc

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("pinn_growth", "physics-informed networks",
      "du/dt is taken with retain_graph=True instead of create_graph=True, so the derivative term of the residual "
      "is a constant for the optimizer.")


class PINN(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 1))

    def forward(self, t):
        return self.net(t)


def _pinn_growth(bug):
    torch.manual_seed(16)
    rate, u0 = 1.0, 1.0
    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def residual(t):
        t = t.requires_grad_(True)
        u = model(t)
        if bug:
            u_t = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True)[0]
        else:
            u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        return u_t - rate * u

    def step(i):
        t = 1.5 * torch.rand(64, 1)
        loss_ode = residual(t).pow(2).mean()
        loss_ic = (model(torch.zeros(1, 1)) - u0).pow(2).mean()
        loss = loss_ode + 10 * loss_ic
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    t_test = torch.linspace(0, 1.5, 101).unsqueeze(1)
    exact = u0 * torch.exp(rate * t_test)

    def probe():
        with torch.no_grad():
            return ((model(t_test) - exact).norm() / exact.norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("cox_deepsurv", "survival analysis",
      "The batch is sorted by ascending time before the cumulative log-sum-exp, so the risk set holds the patients "
      "who already left instead of those still at risk.")


class DeepSurv(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, 32), nn.ELU(), nn.Linear(32, 1, bias=False))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def _cox_deepsurv(bug):
    torch.manual_seed(17)
    n = 1500
    x = torch.randn(n, 6)
    log_hazard = 1.0 * x[:, 0] - 0.8 * x[:, 1] + 0.5 * x[:, 2] ** 2
    event_time = -torch.log(torch.rand(n)) / torch.exp(log_hazard)
    censor_time = -torch.log(torch.rand(n)) / 0.3
    time = torch.minimum(event_time, censor_time)
    event = (event_time <= censor_time).float()
    model = DeepSurv(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)

    def neg_partial_log_likelihood(risk, t, e):
        if bug:
            order = torch.argsort(t)
        else:
            order = torch.argsort(t, descending=True)
        risk, e = risk[order], e[order]
        log_cum = torch.logcumsumexp(risk, dim=0)
        return -((risk - log_cum) * e).sum() / e.sum().clamp(min=1)

    def step(i):
        idx = torch.randperm(1200)[:128]
        loss = neg_partial_log_likelihood(model(x[idx]), time[idx], event[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with torch.no_grad():
            r = model(x[1200:])
        t, e = time[1200:], event[1200:]
        comparable = (t[:, None] < t[None, :]) & (e[:, None] > 0)
        concordant = (r[:, None] > r[None, :]) & comparable
        return 1.0 - (concordant.sum() / comparable.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("hetero_gaussian", "probabilistic regression",
      "gaussian_nll_loss expects the variance but gets the standard deviation, so the predicted std is fitted to the "
      "variance and the intervals are miscalibrated.")


class HeteroscedasticNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU())
        self.mean = nn.Linear(32, 1)
        self.log_std = nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.mean(h), self.log_std(h).exp()


def _hetero_gaussian(bug):
    torch.manual_seed(18)
    x = 4 * torch.rand(2000, 1) - 2
    sigma = 0.04 + 0.05 * (x + 2)
    y = torch.sin(2 * x) + sigma * torch.randn_like(x)
    x_tr, y_tr, x_te, _ = x[:1600], y[:1600], x[1600:], y[1600:]
    model = HeteroscedasticNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(i):
        idx = torch.randint(0, 1600, (128,))
        mu, std = model(x_tr[idx])
        if bug:
            loss = F.gaussian_nll_loss(mu, y_tr[idx], std)
        else:
            loss = F.gaussian_nll_loss(mu, y_tr[idx], std ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    true_std = sigma[1600:]

    def probe():
        with torch.no_grad():
            mu, std = model(x_te)
            return (std.log() - true_std.log()).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("maml_sine", "meta-learning",
      "The outer (query) loss is computed with the original weights instead of the adapted fast weights, so the "
      "inner loop has no part in the meta-gradient.")


class SineRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(1, 40)
        self.l2 = nn.Linear(40, 40)
        self.l3 = nn.Linear(40, 1)

    def weights(self):
        return list(self.parameters())

    @staticmethod
    def functional(x, w):
        x = F.relu(F.linear(x, w[0], w[1]))
        x = F.relu(F.linear(x, w[2], w[3]))
        return F.linear(x, w[4], w[5])


def _maml_sine(bug):
    torch.manual_seed(19)
    inner_lr, n_tasks, shots = 0.05, 4, 10

    def sample_task():
        amp, phase = 0.5 + 2.0 * torch.rand(1), 3.14 * torch.rand(1)

        def draw(n):
            x = 10 * torch.rand(n, 1) - 5
            return x, amp * torch.sin(x + phase)

        return draw(shots), draw(20)

    def adapt(w, x, y, n_inner=2, create_graph=True):
        for _ in range(n_inner):
            loss = F.mse_loss(SineRegressor.functional(x, w), y)
            grads = torch.autograd.grad(loss, w, create_graph=create_graph)
            w = [p - inner_lr * g for p, g in zip(w, grads)]
        return w

    model = SineRegressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        meta_loss = 0.0
        for _ in range(n_tasks):
            (xs, ys), (xq, yq) = sample_task()
            fast = adapt(model.weights(), xs, ys)
            if bug:
                pred = model.functional(xq, model.weights())
            else:
                pred = model.functional(xq, fast)
            meta_loss = meta_loss + F.mse_loss(pred, yq) / n_tasks
        optimizer.zero_grad()
        meta_loss.backward()
        optimizer.step()

    with torch.random.fork_rng():
        torch.manual_seed(190)
        test_tasks = [sample_task() for _ in range(40)]

    def probe():
        total = 0.0
        for (xs, ys), (xq, yq) in test_tasks:
            w = [p.detach().clone().requires_grad_(True) for p in model.weights()]
            w = adapt(w, xs, ys, create_graph=False)
            total += F.mse_loss(SineRegressor.functional(xq, w), yq).item()
        return total / len(test_tasks)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("multitask_net", "multi-task learning",
      "Task heads are held in a plain Python list, so they are not registered and the optimizer never trains them.")


class MultiTaskNet(nn.Module):
    def __init__(self, n_in, n_tasks, bug=False):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, 24), nn.ReLU(), nn.Linear(24, 4), nn.ReLU())
        heads = [nn.Linear(4, 1) for _ in range(n_tasks)]
        if bug:
            self.heads = heads
        else:
            self.heads = nn.ModuleList(heads)

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def _multitask_net(bug):
    torch.manual_seed(20)
    n_tasks = 5
    x = torch.randn(2000, 6)
    basis = torch.stack([x[:, 0], x[:, 1] * x[:, 2].sign()], dim=1)
    y = basis @ torch.randn(2, n_tasks) + torch.linspace(-2, 2, n_tasks) + 0.05 * torch.randn(2000, n_tasks)
    model = MultiTaskNet(6, n_tasks, bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        idx = torch.randint(0, 1600, (64,))
        outputs = model(x[idx])
        losses = [F.mse_loss(out, y[idx, t]) for t, out in enumerate(outputs)]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()

    def probe():
        with torch.no_grad():
            return F.mse_loss(torch.stack(model(x[1600:]), 1), y[1600:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("trajectory_transformer", "transformers on sensor sequences",
      "src_key_padding_mask is True at the valid steps instead of at the padding, so attention only sees padding.")


class TrajectoryTransformer(nn.Module):
    def __init__(self, n_features=3, d_model=24, max_len=20, bug=False):
        super().__init__()
        self.embed = nn.Linear(n_features, d_model)
        self.pos = nn.Parameter(0.02 * torch.randn(1, max_len, d_model))
        layer = nn.TransformerEncoderLayer(d_model, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, 1)
        self.bug = bug

    def forward(self, x, lengths):
        steps = torch.arange(x.size(1))[None, :]
        if self.bug:
            mask = steps < lengths[:, None]
        else:
            mask = steps >= lengths[:, None]
        h = self.encoder(self.embed(x) + self.pos, src_key_padding_mask=mask)
        return self.head(h[:, 0]).squeeze(-1)


def _trajectory_transformer(bug):
    torch.manual_seed(21)
    n, t = 1000, 20
    lengths = torch.randint(6, t, (n,))
    valid = (torch.arange(t)[None, :] < lengths[:, None]).float()
    x = (torch.randn(n, t, 3) + torch.randn(n, 1, 3)) * valid[..., None]
    y = (x[..., 0] * valid).sum(1) / lengths + 0.5 * (x[..., 1] * valid).sum(1) / lengths
    loader = DataLoader(TensorDataset(x[:800], lengths[:800], y[:800]), batch_size=32, shuffle=True)
    model = TrajectoryTransformer(bug=bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    stream = {"it": iter(loader)}

    def step(i):
        model.train()
        try:
            xb, lb, yb = next(stream["it"])
        except StopIteration:
            stream["it"] = iter(loader)
            xb, lb, yb = next(stream["it"])
        loss = F.mse_loss(model(xb, lb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(x[800:], lengths[800:]), y[800:]).item()
        model.train()
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------------------------------------
_case("series_decoder", "transformers on time series",
      "The autoregressive forecaster is trained without a causal mask, so each position sees the value it has to "
      "predict, and real forecasts from a prefix are poor.")


class SeriesTransformer(nn.Module):
    def __init__(self, d_model=24, max_len=24, bug=False):
        super().__init__()
        self.inp = nn.Linear(1, d_model)
        self.pos = nn.Parameter(0.1 * torch.randn(1, max_len, d_model))
        layer = nn.TransformerEncoderLayer(d_model, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d_model, 1)
        self.bug = bug

    def forward(self, x):
        t = x.size(1)
        h = self.inp(x.unsqueeze(-1)) + self.pos[:, :t]
        if self.bug:
            h = self.blocks(h)
        else:
            h = self.blocks(h, mask=nn.Transformer.generate_square_subsequent_mask(t))
        return self.out(h).squeeze(-1)


def _series_decoder(bug):
    torch.manual_seed(22)
    n, t = 800, 24
    freq = 0.3 + 0.5 * torch.rand(n, 1)
    phase = 2 * math.pi * torch.rand(n, 1)
    series = torch.sin(freq * torch.arange(t + 1).float() + phase) + 0.05 * torch.randn(n, t + 1)
    train, test = series[:600], series[600:]
    model = SeriesTransformer(bug=bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        batch = train[torch.randint(0, 600, (32,))]
        pred = model(batch[:, :-1])
        loss = F.mse_loss(pred, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            errs = [F.mse_loss(model(test[:, :k])[:, -1], test[:, k]).item() for k in (10, 14, 18, 22)]
        model.train()
        return sum(errs) / len(errs)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_price_bad():
    return _house_price(True)


def house_price_good():
    return _house_price(False)


def credit_default_bad():
    return _credit_default(True)


def credit_default_good():
    return _credit_default(False)


def claims_frequency_bad():
    return _claims_frequency(True)


def claims_frequency_good():
    return _claims_frequency(False)


def sensor_lstm_bad():
    return _sensor_lstm(True)


def sensor_lstm_good():
    return _sensor_lstm(False)


def eeg_conv_bad():
    return _eeg_conv(True)


def eeg_conv_good():
    return _eeg_conv(False)


def demand_forecast_bad():
    return _demand_forecast(True)


def demand_forecast_good():
    return _demand_forecast(False)


def load_forecast_bad():
    return _load_forecast(True)


def load_forecast_good():
    return _load_forecast(False)


def gcn_nodes_bad():
    return _gcn_nodes(True)


def gcn_nodes_good():
    return _gcn_nodes(False)


def particle_graph_bad():
    return _particle_graph(True)


def particle_graph_good():
    return _particle_graph(False)


def dqn_corridor_bad():
    return _dqn_corridor(True)


def dqn_corridor_good():
    return _dqn_corridor(False)


def ddpg_point_mass_bad():
    return _ddpg_point_mass(True)


def ddpg_point_mass_good():
    return _ddpg_point_mass(False)


def ppo_navigation_bad():
    return _ppo_navigation(True)


def ppo_navigation_good():
    return _ppo_navigation(False)


def sac_control_bad():
    return _sac_control(True)


def sac_control_good():
    return _sac_control(False)


def actor_critic_cues_bad():
    return _actor_critic_cues(True)


def actor_critic_cues_good():
    return _actor_critic_cues(False)


def implicit_mf_bad():
    return _implicit_mf(True)


def implicit_mf_good():
    return _implicit_mf(False)


def pinn_growth_bad():
    return _pinn_growth(True)


def pinn_growth_good():
    return _pinn_growth(False)


def cox_deepsurv_bad():
    return _cox_deepsurv(True)


def cox_deepsurv_good():
    return _cox_deepsurv(False)


def hetero_gaussian_bad():
    return _hetero_gaussian(True)


def hetero_gaussian_good():
    return _hetero_gaussian(False)


def maml_sine_bad():
    return _maml_sine(True)


def maml_sine_good():
    return _maml_sine(False)


def multitask_net_bad():
    return _multitask_net(True)


def multitask_net_good():
    return _multitask_net(False)


def trajectory_transformer_bad():
    return _trajectory_transformer(True)


def trajectory_transformer_good():
    return _trajectory_transformer(False)


def series_decoder_bad():
    return _series_decoder(True)


def series_decoder_good():
    return _series_decoder(False)
