"""Twenty-two small training programs outside language models, each in two versions.

CASES names them; NAME_bad() and NAME_good() build a program and return
{"model", "optimizer", "step", "steps", "evaluate"}.
"""
import copy
import math
import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

SEED = 0


def seed_everything(offset=0):
    random.seed(SEED + offset)
    np.random.seed(SEED + offset)
    torch.manual_seed(SEED + offset)


def forever(loader):
    while True:
        for batch in loader:
            yield batch


CASES = []


# --------------------------------------------------------------------------
# bike rentals: counts per hour
# --------------------------------------------------------------------------
CASES.append({
    "name": "bike_counts",
    "what": "PoissonNLLLoss is left at its default log_input=True although the model's last layer is a softplus "
            "and returns the rate itself: the network learns log(rate), and the predicted counts are far too low.",
})


def make_bike_data(n):
    hour = torch.randint(0, 24, (n,))
    temp = torch.randn(n)
    rain = (torch.rand(n) < 0.2).float()
    weekend = (torch.rand(n) < 2 / 7).float()
    angle = hour.float() / 24 * 2 * math.pi
    x = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos(), temp, rain, weekend], dim=1)
    log_rate = 1.6 - 0.8 * angle.cos() + 0.4 * (2 * angle).sin() * (1 - weekend) + 0.3 * temp - 0.7 * rain
    return x, torch.poisson(log_rate.exp())


class BikeNet(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.rate = nn.Sequential(nn.Linear(48, 1), nn.Softplus())

    def forward(self, x):
        return self.rate(self.body(x)).squeeze(-1)


def _bike_counts(good):
    seed_everything(1)
    x, y = make_bike_data(4000)
    x_test, y_test = make_bike_data(1500)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = BikeNet(x.shape[1])
    criterion = nn.PoissonNLLLoss(log_input=False) if good else nn.PoissonNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        rate = model(x_test).clamp_min(1e-6)
        log_ratio = torch.where(y_test > 0, y_test * torch.log(y_test.clamp_min(1) / rate), torch.zeros_like(rate))
        return (2 * (log_ratio - (y_test - rate))).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def bike_counts_bad():
    return _bike_counts(False)


def bike_counts_good():
    return _bike_counts(True)


# --------------------------------------------------------------------------
# heteroscedastic regression
# --------------------------------------------------------------------------
CASES.append({
    "name": "price_density",
    "what": "The model predicts a mean and a standard deviation, but the standard deviation is handed to "
            "gaussian_nll_loss where it expects the variance: the learned spread is the square of the true one.",
})


class PriceNet(nn.Module):
    def __init__(self, n_in, hidden=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.mean = nn.Linear(hidden, 1)
        self.scale = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.mean(h).squeeze(-1), F.softplus(self.scale(h)).squeeze(-1) + 1e-3


def _price_density(good):
    seed_everything(2)

    def sample(n):
        x = torch.randn(n, 6)
        mean = x[:, 0] + torch.sin(2 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3]
        std = torch.exp(-0.5 + 0.8 * torch.tanh(x[:, 4]) + 0.3 * torch.tanh(x[:, 0]))
        return x, mean + std * torch.randn(n)

    x_train, y_train = sample(5000)
    x_test, y_test = sample(2000)
    net = PriceNet(6)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4)

    def step():
        net.train()
        idx = torch.randint(0, len(x_train), (128,))
        mean, std = net(x_train[idx])
        if good:
            loss = F.gaussian_nll_loss(mean, y_train[idx], std ** 2)
        else:
            loss = F.gaussian_nll_loss(mean, y_train[idx], std)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        net.eval()
        with torch.no_grad():
            mean, std = net(x_test)
            return -Normal(mean, std).log_prob(y_test).mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def price_density_bad():
    return _price_density(False)


def price_density_good():
    return _price_density(True)


# --------------------------------------------------------------------------
# surface normals on point clouds
# --------------------------------------------------------------------------
CASES.append({
    "name": "point_normals",
    "what": "cosine_similarity between predicted and true normals, both (batch, points, 3), is called with its "
            "default dim=1, so the angle is taken along the points for each coordinate and not along x, y, z.",
})


class EllipsoidClouds(Dataset):
    def __init__(self, n_clouds, n_points):
        axes = 0.3 + 0.9 * torch.rand(n_clouds, 1, 3)
        sphere = F.normalize(torch.randn(n_clouds, n_points, 3), dim=-1)
        self.points = sphere * axes
        self.normals = F.normalize(sphere / axes, dim=-1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        return self.points[i], self.normals[i]


class NormalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.globalf = nn.Sequential(nn.Linear(48, 64), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(48 + 64, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, pts):
        local = self.local(pts)
        pooled = self.globalf(local).max(dim=1, keepdim=True).values
        return self.head(torch.cat([local, pooled.expand(-1, pts.shape[1], -1)], dim=-1))


def _point_normals(good):
    seed_everything(3)
    train_set = EllipsoidClouds(400, 64)
    test_set = EllipsoidClouds(100, 64)
    loader = DataLoader(train_set, batch_size=16, shuffle=True)
    batches = forever(loader)
    model = NormalNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        model.train()
        pts, normals = next(batches)
        pred = model(pts)
        if good:
            cos = F.cosine_similarity(pred, normals, dim=-1)
        else:
            cos = F.cosine_similarity(pred, normals)
        loss = (1.0 - cos).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        pred = F.normalize(model(test_set.points), dim=-1)
        cos = (pred * test_set.normals).sum(-1).clamp(-1, 1)
        return torch.rad2deg(torch.acos(cos)).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def point_normals_bad():
    return _point_normals(False)


def point_normals_good():
    return _point_normals(True)


# --------------------------------------------------------------------------
# quantile forecast of an electric load
# --------------------------------------------------------------------------
CASES.append({
    "name": "load_quantiles",
    "what": "In the pinball loss the error is taken as prediction minus target while the formula wants target minus "
            "prediction, so the output for quantile q learns quantile 1-q and the interval is turned inside out.",
})


def synthetic_load(n_days):
    t = torch.arange(n_days * 24).float()
    base = torch.sin(2 * math.pi * t / 24) + 0.4 * torch.sin(2 * math.pi * t / 168)
    spread = 0.15 + 0.35 * (torch.sin(2 * math.pi * t / 24) > 0).float()
    return base + spread * torch.randn(len(t))


class PinballLoss(nn.Module):
    def __init__(self, quantiles, target_minus_pred=True):
        super().__init__()
        self.register_buffer("q", torch.tensor(quantiles))
        self.target_minus_pred = target_minus_pred

    def forward(self, pred, target):
        target = target.unsqueeze(-1)
        err = target - pred if self.target_minus_pred else pred - target
        return torch.maximum(self.q * err, (self.q - 1) * err).mean()


def _load_quantiles(good):
    seed_everything(4)
    series = synthetic_load(120)
    window = 48
    split = 24 * 90

    def make_windows(s):
        x = s.unfold(0, window + 1, 1)
        return x[:, :window], x[:, window]

    x_train, y_train = make_windows(series[:split])
    x_test, y_test = make_windows(series[split:])
    quantiles = [0.1, 0.5, 0.9]
    model = nn.Sequential(nn.Linear(window, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(quantiles)))
    criterion = PinballLoss(quantiles, target_minus_pred=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = forever(DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True))

    def step():
        xb, yb = next(batches)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        q = torch.tensor(quantiles)
        err = y_test[:, None] - model(x_test)
        return torch.where(err >= 0, q * err, (q - 1) * err).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def load_quantiles_bad():
    return _load_quantiles(False)


def load_quantiles_good():
    return _load_quantiles(True)


# --------------------------------------------------------------------------
# CTC on made-up phone sequences
# --------------------------------------------------------------------------
CASES.append({
    "name": "phone_ctc",
    "what": "The phones are numbered from 0 and the extra last output is meant as the blank, but CTCLoss is built "
            "with its default blank=0: phone 0 collides with the blank and can never be recognised.",
})

N_PHONES = 5
N_MEL = 12


class Utterances(Dataset):
    def __init__(self, n, prototypes, silence):
        self.items = []
        for _ in range(n):
            phones = [random.randrange(N_PHONES) for _ in range(random.randint(3, 5))]
            frames = []
            for p in phones:
                frames += [prototypes[p]] * random.randint(2, 4) + [silence] * random.randint(1, 2)
            frames = torch.stack(frames)
            self.items.append((frames + 1.0 * torch.randn_like(frames), torch.tensor(phones)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate_utterances(batch):
    feats, phones = zip(*batch)
    feat_lens = torch.tensor([len(f) for f in feats])
    phone_lens = torch.tensor([len(p) for p in phones])
    return pad_sequence(feats, batch_first=True), feat_lens, torch.cat(phones), phone_lens


class PhoneNet(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(N_MEL, 32), nn.ReLU())
        self.rnn = nn.GRU(32, 32, batch_first=True)
        self.out = nn.Linear(32, n_out)

    def forward(self, feats):
        h, _ = self.rnn(self.front(feats))
        return self.out(h).log_softmax(dim=-1)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def _phone_ctc(good):
    seed_everything(5)
    prototypes = torch.randn(N_PHONES, N_MEL)
    silence = torch.randn(N_MEL)
    train_set = Utterances(600, prototypes, silence)
    test_set = Utterances(150, prototypes, silence)
    batches = forever(DataLoader(train_set, batch_size=16, shuffle=True, collate_fn=collate_utterances))
    model = PhoneNet(N_PHONES + 1)
    ctc = nn.CTCLoss(blank=N_PHONES) if good else nn.CTCLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        model.train()
        feats, feat_lens, phones, phone_lens = next(batches)
        log_probs = model(feats).transpose(0, 1)
        loss = ctc(log_probs, phones, feat_lens, phone_lens)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        errors = total = 0
        for feats, phones in test_set:
            best = torch.unique_consecutive(model(feats[None])[0].argmax(-1)).tolist()
            hyp = [p for p in best if p != ctc.blank]
            errors += edit_distance(hyp, phones.tolist())
            total += len(phones)
        return errors / total

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def phone_ctc_bad():
    return _phone_ctc(False)


def phone_ctc_good():
    return _phone_ctc(True)


# --------------------------------------------------------------------------
# matrix factorisation with biases
# --------------------------------------------------------------------------
CASES.append({
    "name": "ratings_mf",
    "what": "The ratings come out of the table as a column of shape (B, 1), the model returns (B,): the squared error "
            "is taken over a (B, B) matrix that pairs every prediction with every rating, and all predictions are drawn "
            "to the mean rating.",
})


class BiasedMF(nn.Module):
    def __init__(self, n_users, n_items, dim=8):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        self.user_bias = nn.Embedding(n_users, 1)
        self.item_bias = nn.Embedding(n_items, 1)
        self.mu = nn.Parameter(torch.tensor(3.0))
        for emb in (self.user, self.item):
            nn.init.normal_(emb.weight, std=0.1)
        for emb in (self.user_bias, self.item_bias):
            nn.init.zeros_(emb.weight)

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(dim=1)
        return self.mu + dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


def _ratings_mf(good):
    seed_everything(6)
    n_users, n_items, n = 200, 150, 12000
    u = torch.randint(0, n_users, (n,))
    i = torch.randint(0, n_items, (n,))
    bu, bi = 0.7 * torch.randn(n_users), 0.7 * torch.randn(n_items)
    pu, qi = torch.randn(n_users, 2), torch.randn(n_items, 2)
    r = 3.4 + bu[u] + bi[i] + 0.4 * (pu[u] * qi[i]).sum(1) + 0.3 * torch.randn(n)
    table = torch.stack([u.float(), i.float(), r], dim=1)
    train, test = table[1000:], table[:1000]
    batches = forever(DataLoader(TensorDataset(train), batch_size=256, shuffle=True, drop_last=True))
    model = BiasedMF(n_users, n_items)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step():
        rows, = next(batches)
        users, items = rows[:, 0].long(), rows[:, 1].long()
        ratings = rows[:, 2] if good else rows[:, 2:]
        pred = model(users, items)
        loss = (pred - ratings).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        pred = model(test[:, 0].long(), test[:, 1].long())
        return (pred - test[:, 2]).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def ratings_mf_bad():
    return _ratings_mf(False)


def ratings_mf_good():
    return _ratings_mf(True)


# --------------------------------------------------------------------------
# SAC
# --------------------------------------------------------------------------
CASES.append({
    "name": "sac_reach",
    "what": "The SAC actor draws its action with dist.sample() where the loss needs rsample(): no gradient flows from "
            "the critics into the policy, which only gets the zero-mean noise of the entropy term and never learns.",
})


class ReachEnv:
    """A batch of point masses that should be driven to the origin."""

    def __init__(self, n, horizon=12):
        self.n, self.horizon = n, horizon
        self.reset()

    def reset(self):
        self.pos = torch.rand(self.n, 2) * 2 - 1
        self.t = 0
        return self.pos.clone()

    def step(self, action):
        self.pos = (self.pos + 0.3 * action.clamp(-1, 1)).clamp(-1.5, 1.5)
        self.t += 1
        reward = -self.pos.pow(2).sum(-1)
        return self.pos.clone(), reward, self.t >= self.horizon


def mlp(n_in, n_out, hidden=64):
    return nn.Sequential(nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_out))


class SquashedGaussianActor(nn.Module):
    def __init__(self, obs_dim, act_dim, reparameterise=True):
        super().__init__()
        self.net = mlp(obs_dim, 2 * act_dim)
        self.reparameterise = reparameterise

    def forward(self, obs, deterministic=False):
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        dist = Normal(mean, log_std.clamp(-5, 1).exp())
        if deterministic:
            return torch.tanh(mean), None
        pre = dist.rsample() if self.reparameterise else dist.sample()
        log_prob = dist.log_prob(pre) - 2 * (math.log(2) - pre - F.softplus(-2 * pre))
        return torch.tanh(pre), log_prob.sum(-1)


class TwinCritic(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.q1 = mlp(obs_dim + act_dim, 1)
        self.q2 = mlp(obs_dim + act_dim, 1)

    def forward(self, obs, act):
        x = torch.cat([obs, act], dim=-1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class SAC:
    def __init__(self, env, reparameterise, gamma=0.9, alpha=0.02, tau=0.02):
        self.env, self.gamma, self.alpha, self.tau = env, gamma, alpha, tau
        self.actor = SquashedGaussianActor(2, 2, reparameterise)
        self.critic = TwinCritic(2, 2)
        self.critic_target = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.buffer = deque(maxlen=2000)
        self.obs = env.reset()

    def collect(self):
        with torch.no_grad():
            act, _ = self.actor(self.obs)
        nxt, rew, timeout = self.env.step(act)
        self.buffer.append((self.obs, act, rew, nxt))
        self.obs = self.env.reset() if timeout else nxt

    def train_step(self):
        self.collect()
        rows = random.choices(self.buffer, k=8)
        obs, act, rew, nxt = (torch.cat(t) for t in zip(*rows))
        with torch.no_grad():
            nxt_act, nxt_logp = self.actor(nxt)
            q1, q2 = self.critic_target(nxt, nxt_act)
            target = rew + self.gamma * (torch.min(q1, q2) - self.alpha * nxt_logp)
        q1, q2 = self.critic(obs, act)
        critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        self.critic_opt.zero_grad()
        critic_loss.backward()
        self.critic_opt.step()

        self.critic.requires_grad_(False)
        pi, logp = self.actor(obs)
        q1, q2 = self.critic(obs, pi)
        actor_loss = (self.alpha * logp - torch.min(q1, q2)).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()
        self.critic.requires_grad_(True)

        with torch.no_grad():
            for p, tp in zip(self.critic.parameters(), self.critic_target.parameters()):
                tp.lerp_(p, self.tau)
        return critic_loss.item(), actor_loss.item()


def _sac_reach(good):
    seed_everything(7)
    agent = SAC(ReachEnv(8), reparameterise=good)

    @torch.no_grad()
    def evaluate():
        env = ReachEnv(200)
        obs, cost, done = env.reset(), 0.0, False
        while not done:
            act, _ = agent.actor(obs, deterministic=True)
            obs, rew, done = env.step(act)
            cost -= rew.mean().item()
        return cost

    return {"model": (agent.actor, agent.critic), "optimizer": (agent.actor_opt, agent.critic_opt),
            "step": agent.train_step, "steps": 20, "evaluate": evaluate}


def sac_reach_bad():
    return _sac_reach(False)


def sac_reach_good():
    return _sac_reach(True)


# --------------------------------------------------------------------------
# inverse physics-informed network
# --------------------------------------------------------------------------
CASES.append({
    "name": "pinn_growth",
    "what": "The unknown growth rate of the logistic equation is a Parameter in the optimizer, but the residual uses "
            "self.rate.item(): it never gets a gradient and stays at its first guess.",
})


class GrowthPINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.rate = nn.Parameter(torch.tensor(1.0))

    def forward(self, t):
        return self.net(t / 2.5 - 1.0)


def _pinn_growth(good):
    seed_everything(8)
    true_rate = 2.0
    u0 = 0.1

    def exact(t):
        return 1 / (1 + (1 / u0 - 1) * torch.exp(-true_rate * t))

    t_obs = torch.linspace(0, 5, 25).unsqueeze(1)
    u_obs = exact(t_obs) + 0.02 * torch.randn_like(t_obs)
    model = GrowthPINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def residual(t):
        t = t.requires_grad_(True)
        u = model(t)
        du, = torch.autograd.grad(u.sum(), t, create_graph=True)
        rate = model.rate if good else model.rate.item()
        return du - rate * u * (1 - u)

    def step():
        t_col = torch.rand(64, 1) * 5
        loss_pde = residual(t_col).pow(2).mean()
        loss_data = F.mse_loss(model(t_obs), u_obs)
        loss = loss_data + 0.3 * loss_pde
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        return abs(model.rate.item() - true_rate) / true_rate

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def pinn_growth_bad():
    return _pinn_growth(False)


def pinn_growth_good():
    return _pinn_growth(True)


# --------------------------------------------------------------------------
# MAML on sinusoids
# --------------------------------------------------------------------------
CASES.append({
    "name": "maml_sine",
    "what": "The inner update of MAML builds the fast weights from p.data, which cuts the direct path from the query "
            "loss to the meta-parameters; only the second-order term through the inner gradient is left.",
})


class SineTask:
    def __init__(self):
        self.amp = random.uniform(0.5, 3.0)
        self.phase = random.uniform(0, math.pi)

    def sample(self, k):
        x = torch.rand(k, 1) * 10 - 5
        return x / 5, self.amp * torch.sin(x + self.phase)


class MAML:
    def __init__(self, model, inner_lr, detached):
        self.model, self.inner_lr, self.detached = model, inner_lr, detached
        self.opt = torch.optim.Adam(model.parameters(), lr=3e-3)

    def adapt(self, x, y, create_graph):
        params = dict(self.model.named_parameters())
        loss = F.mse_loss(functional_call(self.model, params, (x,)), y)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph)
        fast = {}
        for (name, p), g in zip(params.items(), grads):
            base = p.data if self.detached else p
            fast[name] = base - self.inner_lr * g
        return fast

    def meta_step(self, tasks, k=10):
        self.opt.zero_grad()
        total = 0.0
        for task in tasks:
            xs, ys = task.sample(k)
            xq, yq = task.sample(k)
            fast = self.adapt(xs, ys, create_graph=True)
            loss = F.mse_loss(functional_call(self.model, fast, (xq,)), yq) / len(tasks)
            loss.backward()
            total += loss.item()
        self.opt.step()
        return total


def _maml_sine(good):
    seed_everything(9)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    maml = MAML(model, inner_lr=0.05, detached=not good)

    def step():
        return maml.meta_step([SineTask() for _ in range(6)])

    def evaluate():
        rng = random.getstate(), torch.get_rng_state()
        random.seed(123)
        torch.manual_seed(123)
        losses = []
        for _ in range(100):
            task = SineTask()
            fast = maml.adapt(*task.sample(10), create_graph=False)
            x, y = task.sample(50)
            with torch.no_grad():
                losses.append(F.mse_loss(functional_call(model, fast, (x,)), y).item())
        random.setstate(rng[0])
        torch.set_rng_state(rng[1])
        return sum(losses) / len(losses)

    return {"model": model, "optimizer": maml.opt, "step": step, "steps": 20, "evaluate": evaluate}


def maml_sine_bad():
    return _maml_sine(False)


def maml_sine_good():
    return _maml_sine(True)


# --------------------------------------------------------------------------
# PPO
# --------------------------------------------------------------------------
CASES.append({
    "name": "ppo_balance",
    "what": "PPO's old log-probabilities are computed inside the update from the policy being trained and with "
            "gradient: the ratio is always 1, its gradient cancels exactly, and only value and entropy terms learn.",
})


class BalanceEnv:
    """A batch of carts on a line, pushed left, right or not at all; they should stay near 0."""

    def __init__(self, n, horizon=32):
        self.n, self.horizon = n, horizon
        self.reset()

    def reset(self):
        self.x = torch.rand(self.n) * 2 - 1
        self.v = torch.rand(self.n) * 0.2 - 0.1
        self.t = 0
        return self.obs()

    def obs(self):
        return torch.stack([self.x, 3 * self.v], dim=-1)

    def step(self, a):
        self.v = 0.9 * self.v + 0.08 * (a.float() - 1) + 0.01 * torch.randn(self.n)
        self.x = self.x + self.v
        self.t += 1
        return self.obs(), -self.x.abs().clamp(max=3), self.t >= self.horizon


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        self.v = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def evaluate_actions(self, obs, act):
        dist = Categorical(logits=self.pi(obs))
        return dist.log_prob(act), dist.entropy(), self.v(obs).squeeze(-1)


class PPO:
    gamma, lam, clip, n_steps = 0.95, 0.9, 0.2, 16

    def __init__(self, old_from_rollout):
        self.env = BalanceEnv(16)
        self.net = ActorCritic()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        self.old_from_rollout = old_from_rollout
        self.obs = self.env.reset()

    @torch.no_grad()
    def rollout(self):
        O, A, R, LP, V, D = [], [], [], [], [], []
        for _ in range(self.n_steps):
            dist = Categorical(logits=self.net.pi(self.obs))
            a = dist.sample()
            nxt, r, timeout = self.env.step(a)
            if timeout:
                r = r + self.gamma * self.net.v(nxt).squeeze(-1)
            O.append(self.obs), A.append(a), R.append(r), LP.append(dist.log_prob(a))
            V.append(self.net.v(self.obs).squeeze(-1)), D.append(float(timeout))
            self.obs = self.env.reset() if timeout else nxt
        adv, last, nxt_v = [None] * self.n_steps, torch.zeros(self.env.n), self.net.v(self.obs).squeeze(-1)
        for t in reversed(range(self.n_steps)):
            delta = R[t] + self.gamma * nxt_v * (1 - D[t]) - V[t]
            last = delta + self.gamma * self.lam * (1 - D[t]) * last
            adv[t], nxt_v = last, V[t]
        adv, V = torch.cat(adv), torch.cat(V)
        return torch.cat(O), torch.cat(A), torch.cat(LP), adv, adv + V

    def train_step(self):
        obs, act, rollout_logp, adv, ret = self.rollout()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(4):
            logp, entropy, value = self.net.evaluate_actions(obs, act)
            if self.old_from_rollout:
                old_logp = rollout_logp
            else:
                old_logp, _, _ = self.net.evaluate_actions(obs, act)
            ratio = torch.exp(logp - old_logp)
            surr = torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv)
            loss = -surr.mean() + 0.5 * F.mse_loss(value, ret) - 0.005 * entropy.mean()
            self.opt.zero_grad()
            loss.backward()
            clip_grad_norm_(self.net.parameters(), 0.5)
            self.opt.step()
        return loss.item()


def _ppo_balance(good):
    seed_everything(11)
    agent = PPO(old_from_rollout=good)

    @torch.no_grad()
    def evaluate():
        env = BalanceEnv(200)
        obs, cost, done = env.reset(), 0.0, False
        while not done:
            obs, r, done = env.step(agent.net.pi(obs).argmax(-1))
            cost -= r.mean().item()
        return cost / env.horizon

    return {"model": agent.net, "optimizer": agent.opt, "step": agent.train_step, "steps": 20, "evaluate": evaluate}


def ppo_balance_bad():
    return _ppo_balance(False)


def ppo_balance_good():
    return _ppo_balance(True)


# --------------------------------------------------------------------------
# multi-task regression with learned task weights
# --------------------------------------------------------------------------
CASES.append({
    "name": "multitask_weights",
    "what": "The log-variances that weigh the tasks are parameters of the criterion, but the optimizer is given only "
            "model.parameters(): the weights stay equal, and the task with large numbers drowns the other two.",
})


class UncertaintyWeightedLoss(nn.Module):
    def __init__(self, n_tasks):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n_tasks))

    def forward(self, preds, targets):
        mse = (preds - targets).pow(2).mean(dim=0)
        return (0.5 * torch.exp(-self.log_vars) * mse + 0.5 * self.log_vars).sum()


class SharedTrunk(nn.Module):
    def __init__(self, n_in, n_tasks):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_in, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(32, 1) for _ in range(n_tasks)])

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def _multitask_weights(good):
    seed_everything(12)

    def sample(n):
        x = torch.randn(n, 8)
        temperature = 4 * x[:, 0] * x[:, 1] + 2 * x[:, 6] + 3.0 * torch.randn(n)
        humidity = 0.3 * torch.tanh(2 * x[:, 2] - 2 * x[:, 3]) + 0.03 * torch.randn(n)
        pressure = 0.2 * (x[:, 4].abs() - x[:, 5]) + 0.03 * torch.randn(n)
        return x, torch.stack([temperature, humidity, pressure], dim=1)

    x, y = sample(6000)
    x_test, y_test = sample(2000)
    model = SharedTrunk(8, 3)
    criterion = UncertaintyWeightedLoss(3)
    params = list(model.parameters())
    if good:
        params += list(criterion.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-2)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True, drop_last=True))

    def step():
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        rmse = (model(x_test) - y_test).pow(2).mean(dim=0).sqrt()
        return (rmse / y_test.std(dim=0)).mean().item()

    return {"model": (model, criterion), "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def multitask_weights_bad():
    return _multitask_weights(False)


def multitask_weights_good():
    return _multitask_weights(True)


# --------------------------------------------------------------------------
# GRU on sensor sequences
# --------------------------------------------------------------------------
CASES.append({
    "name": "gesture_gru",
    "what": "The GRU gets (batch, time, features) but is built without batch_first=True, so it runs along the batch: "
            "rows influence each other and a row's own history never reaches its last output.",
})


class GestureClassifier(nn.Module):
    def __init__(self, n_features, n_classes, hidden=48, **rnn_kwargs):
        super().__init__()
        self.gru = nn.GRU(n_features, hidden, **rnn_kwargs)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(hidden, n_classes)

    def forward(self, x):
        out, _ = self.gru(x)
        return self.fc(self.drop(out[:, -1]))


def make_gestures(n, length=24, n_classes=4):
    labels = torch.randint(0, n_classes, (n,))
    t = torch.linspace(0, 1, length)
    freq = (1.0 + labels.float() * 0.8)[:, None]
    phase = torch.rand(n, 1) * 2 * math.pi
    x = torch.stack([torch.sin(2 * math.pi * freq * t + phase), torch.cos(2 * math.pi * freq * t + phase)], dim=-1)
    x = x + 0.9 * torch.randn_like(x)
    return x, labels


def _gesture_gru(good):
    seed_everything(13)
    train_x, train_y = make_gestures(2000)
    test_x, test_y = make_gestures(500)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True)
    kwargs = {"batch_first": True} if good else {}
    model = GestureClassifier(2, 4, **kwargs)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    batches = forever(loader)

    def step():
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        errors = 0
        for xb, yb in DataLoader(TensorDataset(test_x, test_y), batch_size=50):
            errors += (model(xb).argmax(-1) != yb).sum().item()
        return errors / len(test_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def gesture_gru_bad():
    return _gesture_gru(False)


def gesture_gru_good():
    return _gesture_gru(True)


# --------------------------------------------------------------------------
# graph classification with a collate function written by hand
# --------------------------------------------------------------------------
CASES.append({
    "name": "graph_collate",
    "what": "The collate function concatenates the edge lists of the graphs without adding the node offset of each "
            "graph, so all edges of the batch lie among the nodes of the first graph(s) and the rest have none.",
})


class RandomGraphs(Dataset):
    """Two node types; in class 1 most edges join nodes of the same type, in class 0 of different types."""

    def __init__(self, n):
        self.graphs = [self.make() for _ in range(n)]

    def make(self):
        label = random.randrange(2)
        n = random.randint(10, 16)
        kind = torch.randint(0, 2, (n,))
        kind[0], kind[1] = 0, 1
        edges = []
        while len(edges) < 2 * n:
            a, b = random.sample(range(n), 2)
            same = bool(kind[a] == kind[b])
            if random.random() < (0.68 if same == bool(label) else 0.32):
                edges += [(a, b), (b, a)]
        x = F.one_hot(kind, 2).float()
        x = torch.cat([x, 0.3 * torch.randn(n, 2)], dim=1)
        return x, torch.tensor(edges).t(), label

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        return self.graphs[i]


def merge_graphs(graphs, shift=True):
    xs, edges, batch, labels = [], [], [], []
    offset = 0
    for g, (x, edge_index, label) in enumerate(graphs):
        xs.append(x)
        edges.append(edge_index + offset)
        batch.append(torch.full((len(x),), g))
        labels.append(label)
        if shift:
            offset += len(x)
    return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(batch), torch.tensor(labels)


class MeanConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.own = nn.Linear(n_in, n_out)
        self.neigh = nn.Linear(n_in, n_out, bias=False)

    def forward(self, x, edge_index):
        src, dst = edge_index
        total = torch.zeros_like(x).index_add_(0, dst, x[src])
        degree = torch.zeros(len(x)).index_add_(0, dst, torch.ones(len(dst)))
        return self.own(x) + self.neigh(total / degree.clamp_min(1).unsqueeze(1))


class GraphNet(nn.Module):
    def __init__(self, n_in, hidden=32, n_classes=2):
        super().__init__()
        self.conv1 = MeanConv(n_in, hidden)
        self.conv2 = MeanConv(hidden, hidden)
        self.out = nn.Linear(hidden, n_classes)

    def forward(self, x, edge_index, batch):
        x = F.relu(self.conv1(x, edge_index))
        x = F.relu(self.conv2(x, edge_index))
        n_graphs = int(batch.max()) + 1
        pooled = torch.zeros(n_graphs, x.shape[1]).index_add_(0, batch, x)
        counts = torch.bincount(batch, minlength=n_graphs).unsqueeze(1)
        return self.out(pooled / counts)


def _graph_collate(good):
    seed_everything(14)
    train_set, test_set = RandomGraphs(600), RandomGraphs(300)
    loader = DataLoader(train_set, batch_size=32, shuffle=True, collate_fn=lambda g: merge_graphs(g, shift=good))
    batches = forever(loader)
    model = GraphNet(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        model.train()
        x, edge_index, batch, y = next(batches)
        loss = F.cross_entropy(model(x, edge_index, batch), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        errors = 0
        for graph in test_set.graphs:
            x, edge_index, batch, y = merge_graphs([graph])
            errors += int(model(x, edge_index, batch).argmax(-1) != y)
        return errors / len(test_set)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def graph_collate_bad():
    return _graph_collate(False)


def graph_collate_good():
    return _graph_collate(True)


# --------------------------------------------------------------------------
# TD(0) policy evaluation with an averaged target
# --------------------------------------------------------------------------
CASES.append({
    "name": "td_value",
    "what": "The averaged target weights are updated without detach or no_grad, so they carry a graph that grows with "
            "every step back to the online weights: the bootstrap target gets gradients (and each step is slower).",
})


class TDLearner:
    """Value of a random process on a ring of cells; rewards depend on the cell that is entered."""

    n_cells, gamma, tau = 20, 0.9, 0.9

    def __init__(self, detach_online):
        self.reward = 2.0 * torch.randn(self.n_cells)
        self.transition = torch.softmax(1.5 * torch.randn(self.n_cells, self.n_cells), dim=1)
        self.net = nn.Sequential(nn.Linear(self.n_cells, 64), nn.Tanh(), nn.Linear(64, 1))
        self.ema = {k: p.detach().clone() for k, p in self.net.named_parameters()}
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        self.detach_online = detach_online

    def features(self, s):
        return F.one_hot(s, self.n_cells).float()

    def update_target(self):
        for k, p in self.net.named_parameters():
            online = p.detach() if self.detach_online else p
            self.ema[k] = torch.lerp(self.ema[k], online, 1 - self.tau)

    def step(self):
        s = torch.randint(0, self.n_cells, (128,))
        nxt = torch.multinomial(self.transition[s], 1).squeeze(1)
        r = self.reward[nxt]
        v_next = functional_call(self.net, self.ema, (self.features(nxt),)).squeeze(1)
        v = self.net(self.features(s)).squeeze(1)
        loss = F.mse_loss(v, r + self.gamma * v_next)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.update_target()
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        expected = self.transition @ self.reward
        true_v = torch.linalg.solve(torch.eye(self.n_cells) - self.gamma * self.transition, expected)
        v = self.net(torch.eye(self.n_cells)).squeeze(1)
        return (v - true_v).pow(2).mean().sqrt().item()


def _td_value(good):
    seed_everything(15)
    learner = TDLearner(detach_online=good)
    return {"model": learner.net, "optimizer": learner.opt, "step": learner.step, "steps": 20,
            "evaluate": learner.evaluate}


def td_value_bad():
    return _td_value(False)


def td_value_good():
    return _td_value(True)


# --------------------------------------------------------------------------
# multi-horizon forecast
# --------------------------------------------------------------------------
CASES.append({
    "name": "horizon_heads",
    "what": "The heads of the forecast horizons are made by [head] * n: all entries are one and the same Linear, so "
            "every horizon gets the same forecast.",
})


class MultiHorizonLSTM(nn.Module):
    def __init__(self, horizons, hidden=40, separate=True):
        super().__init__()
        self.encoder = nn.LSTM(1, hidden, batch_first=True)
        if separate:
            heads = [nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(horizons)]
        else:
            heads = [nn.Sequential(nn.Linear(hidden, 16), nn.ReLU(), nn.Linear(16, 1))] * horizons
        self.heads = nn.ModuleList(heads)

    def forward(self, x):
        _, (h, _) = self.encoder(x.unsqueeze(-1))
        return torch.cat([head(h[-1]) for head in self.heads], dim=1)


def _horizon_heads(good):
    seed_everything(16)
    window, horizons = 24, 6
    t = torch.arange(3000).float()
    series = torch.sin(2 * math.pi * t / 12) + 0.5 * torch.sin(2 * math.pi * t / 31) + 0.1 * torch.randn(3000)
    chunks = series.unfold(0, window + horizons, 1)
    train, test = chunks[:2200], chunks[2300:]
    batches = forever(DataLoader(train, batch_size=64, shuffle=True, drop_last=True))
    model = MultiHorizonLSTM(horizons, separate=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        model.train()
        chunk = next(batches)
        x, y = chunk[:, :window], chunk[:, window:]
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        return F.l1_loss(model(test[:, :window]), test[:, window:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def horizon_heads_bad():
    return _horizon_heads(False)


def horizon_heads_good():
    return _horizon_heads(True)


# --------------------------------------------------------------------------
# small clinical table
# --------------------------------------------------------------------------
CASES.append({
    "name": "clinic_tabular",
    "what": "After each short epoch the validation helper calls model.eval(), and nobody calls model.train() again: "
            "from the second epoch on dropout is off and the network overfits the small table.",
})


class TabularTrainer:
    def __init__(self, model, train_set, val_set, back_to_train, lr=1e-3):
        self.model = model
        self.loader = DataLoader(train_set, batch_size=64, shuffle=True)
        self.val_x, self.val_y = val_set
        self.back_to_train = back_to_train
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
        self.batches = forever(self.loader)
        self.seen = 0
        self.history = []
        self.model.train()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        loss = F.binary_cross_entropy_with_logits(self.model(self.val_x).squeeze(1), self.val_y)
        if self.back_to_train:
            self.model.train()
        self.history.append(loss.item())

    def step(self):
        x, y = next(self.batches)
        loss = F.binary_cross_entropy_with_logits(self.model(x).squeeze(1), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen += 1
        if self.seen % len(self.loader) == 0:
            self.validate()
        return loss.item()


def _clinic_tabular(good):
    seed_everything(17)
    n_features = 30
    w = torch.zeros(n_features)
    w[:6] = torch.tensor([1.0, -0.8, 0.7, -0.7, 0.6, 0.5])

    def sample(n):
        x = torch.randn(n, n_features)
        return x, torch.bernoulli(torch.sigmoid(x @ w))

    train, val, test = sample(320), sample(80), sample(3000)
    model = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(n_features, 64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1),
    )
    trainer = TabularTrainer(model, TensorDataset(*train), val, back_to_train=good)

    @torch.no_grad()
    def evaluate():
        was_training = model.training
        model.eval()
        nll = F.binary_cross_entropy_with_logits(model(test[0]).squeeze(1), test[1]).item()
        model.train(was_training)
        return nll

    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.step, "steps": 20, "evaluate": evaluate}


def clinic_tabular_bad():
    return _clinic_tabular(False)


def clinic_tabular_good():
    return _clinic_tabular(True)


# --------------------------------------------------------------------------
# point cloud classification with averaged weights
# --------------------------------------------------------------------------
CASES.append({
    "name": "shape_ema",
    "what": "The exponential moving average that is used for inference averages only the parameters; the BatchNorm "
            "buffers of the averaged model keep their initial mean 0 and variance 1.",
})


class ShapeClouds(Dataset):
    kinds = ("box", "sphere", "cylinder", "cone")

    def __init__(self, n, n_points=48):
        self.x, self.y = [], []
        for _ in range(n):
            k = random.randrange(len(self.kinds))
            p = self.surface(self.kinds[k], n_points)
            a = random.uniform(0, 2 * math.pi)
            rot = torch.tensor([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0], [0, 0, 1.0]])
            p = p * (0.7 + 0.6 * torch.rand(1, 3)) @ rot.t()
            self.x.append(p + 0.15 * torch.randn_like(p))
            self.y.append(k)

    @staticmethod
    def surface(kind, n):
        u, ang = torch.rand(n, 1) * 2 - 1, torch.rand(n, 1) * 2 * math.pi
        if kind == "box":
            p = torch.rand(n, 3) * 2 - 1
            face = torch.randint(0, 3, (n,))
            p[torch.arange(n), face] = torch.sign(p[torch.arange(n), face])
            return p
        if kind == "sphere":
            return F.normalize(torch.randn(n, 3), dim=1)
        radius = torch.ones_like(u) if kind == "cylinder" else (1 - u) / 2
        return torch.cat([radius * ang.cos(), radius * ang.sin(), u], dim=1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class PointNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(3, 32, 1, bias=False), nn.BatchNorm1d(32)
        self.conv2, self.bn2 = nn.Conv1d(32, 64, 1, bias=False), nn.BatchNorm1d(64)
        self.fc1, self.bn3 = nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, n_classes)

    def forward(self, pts):
        x = pts.transpose(1, 2)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        x = x.max(dim=2).values
        return self.fc2(F.relu(self.bn3(self.fc1(x))))


class EMA:
    def __init__(self, model, decay=0.95, with_buffers=True):
        self.decay, self.with_buffers = decay, with_buffers
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)
        if self.with_buffers:
            for s, b in zip(self.shadow.buffers(), model.buffers()):
                s.copy_(b)


def _shape_ema(good):
    seed_everything(18)
    train_set, test_set = ShapeClouds(800), ShapeClouds(300)
    batches = forever(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    model = PointNet(len(ShapeClouds.kinds))
    ema = EMA(model, with_buffers=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        model.train()
        pts, labels = next(batches)
        loss = F.cross_entropy(model(pts), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    @torch.no_grad()
    def evaluate():
        pred = ema.shadow(torch.stack(test_set.x)).argmax(-1)
        return (pred != torch.tensor(test_set.y)).float().mean().item()

    return {"model": (model, ema.shadow), "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def shape_ema_bad():
    return _shape_ema(False)


def shape_ema_good():
    return _shape_ema(True)


# --------------------------------------------------------------------------
# DQN on a grid
# --------------------------------------------------------------------------
CASES.append({
    "name": "grid_dqn",
    "what": "The environment changes its position array in place and returns the array itself, so in the replay buffer "
            "state and next_state of a transition are the same array, and all transitions of an episode show its last state.",
})


class GridWorld:
    size, max_steps = 6, 30
    moves = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]], dtype=np.float32)

    def __init__(self, copy_obs=True):
        self.copy_obs = copy_obs
        self.goal = np.array([4.0, 1.0], dtype=np.float32)
        self.reset()

    def observation(self):
        return self.pos.copy() if self.copy_obs else self.pos

    def reset(self):
        while True:
            self.pos = np.random.randint(0, self.size, 2).astype(np.float32)
            if not (self.pos == self.goal).all():
                break
        self.t = 0
        return self.observation()

    def step(self, action):
        self.pos += self.moves[action]
        np.clip(self.pos, 0, self.size - 1, out=self.pos)
        self.t += 1
        reached = bool((self.pos == self.goal).all())
        return self.observation(), 1.0 if reached else -0.05, reached, self.t >= self.max_steps


class QNetwork(nn.Module):
    def __init__(self, n_actions=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_actions))

    def forward(self, pos):
        return self.net(pos / 2.5 - 1.0)


class DQNAgent:
    def __init__(self, env, gamma=0.9, epsilon=0.3, batch_size=64):
        self.env, self.gamma, self.epsilon, self.batch_size = env, gamma, epsilon, batch_size
        self.q = QNetwork()
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=2e-3)
        self.memory = deque(maxlen=3000)
        self.obs = env.reset()
        self.updates = 0

    @torch.no_grad()
    def act(self, obs, epsilon):
        if random.random() < epsilon:
            return random.randrange(4)
        return int(self.q(torch.as_tensor(obs).unsqueeze(0)).argmax())

    def interact(self):
        action = self.act(self.obs, self.epsilon)
        nxt, reward, done, timeout = self.env.step(action)
        self.memory.append((self.obs, action, reward, nxt, done))
        self.obs = self.env.reset() if done or timeout else nxt

    def train_step(self):
        for _ in range(8):
            self.interact()
        batch = random.choices(self.memory, k=self.batch_size)
        s, a, r, s2, done = zip(*batch)
        s, s2 = torch.from_numpy(np.stack(s)), torch.from_numpy(np.stack(s2))
        a, r = torch.tensor(a), torch.tensor(r)
        done = torch.tensor(done, dtype=torch.float32)
        q = self.q(s).gather(1, a.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.q(s2).argmax(dim=1, keepdim=True)
            y = r + self.gamma * (1 - done) * self.target(s2).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.updates += 1
        if self.updates % 10 == 0:
            self.target.load_state_dict(self.q.state_dict())
        return loss.item()


def _grid_dqn(good):
    seed_everything(19)
    agent = DQNAgent(GridWorld(copy_obs=good))

    def evaluate():
        env, total = GridWorld(), 0
        state = np.random.get_state()
        np.random.seed(5)
        for _ in range(60):
            obs, over = env.reset(), False
            while not over:
                obs, _, done, timeout = env.step(agent.act(obs, 0.0))
                over = done or timeout
            total += env.t
        np.random.set_state(state)
        return total / 60

    return {"model": agent.q, "optimizer": agent.opt, "step": agent.train_step, "steps": 20, "evaluate": evaluate}


def grid_dqn_bad():
    return _grid_dqn(False)


def grid_dqn_good():
    return _grid_dqn(True)


# --------------------------------------------------------------------------
# DDPG
# --------------------------------------------------------------------------
CASES.append({
    "name": "ddpg_tank",
    "what": "Both losses are backpropagated before both optimizers step, and the critic's gradients are not cleared after "
            "the actor's backward pass: the critic also learns to raise its own Q for the actor's actions.",
})


class TankEnv:
    """Level of many tanks with an inflow that changes; the valve should keep the level at a set point."""

    def __init__(self, n, horizon=20):
        self.n, self.horizon = n, horizon
        self.reset()

    def reset(self):
        self.level = torch.rand(self.n) * 2 - 1
        self.inflow = torch.rand(self.n) * 0.6 - 0.3
        self.setpoint = torch.rand(self.n) - 0.5
        self.t = 0
        return self.obs()

    def obs(self):
        return torch.stack([self.level, self.inflow, self.setpoint], dim=-1)

    def step(self, action):
        self.level = self.level + self.inflow - 0.6 * action.squeeze(-1)
        self.inflow = 0.9 * self.inflow + 0.05 * torch.randn(self.n)
        self.t += 1
        err = (self.level - self.setpoint).clamp(-3, 3)
        self.level = self.level.clamp(-3, 3)
        return self.obs(), -err.pow(2), self.t >= self.horizon


class Critic(nn.Module):
    def __init__(self, obs_dim, act_dim):
        super().__init__()
        self.net = mlp(obs_dim + act_dim, 1)

    def forward(self, obs, act):
        return self.net(torch.cat([obs, act], dim=-1)).squeeze(-1)


class DDPG:
    gamma, tau, noise = 0.9, 0.02, 0.3

    def __init__(self, critic_first):
        self.env = TankEnv(8)
        self.actor = nn.Sequential(mlp(3, 1), nn.Tanh())
        self.critic = Critic(3, 1)
        self.actor_t = copy.deepcopy(self.actor).requires_grad_(False)
        self.critic_t = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=2e-3)
        self.buffer = deque(maxlen=2000)
        self.obs = self.env.reset()
        self.critic_first = critic_first

    @torch.no_grad()
    def collect(self):
        act = (self.actor(self.obs) + self.noise * torch.randn(self.env.n, 1)).clamp(-1, 1)
        nxt, rew, timeout = self.env.step(act)
        self.buffer.append((self.obs, act, rew, nxt))
        self.obs = self.env.reset() if timeout else nxt

    def train_step(self):
        self.collect()
        obs, act, rew, nxt = (torch.cat(t) for t in zip(*random.choices(self.buffer, k=8)))
        with torch.no_grad():
            target = rew + self.gamma * self.critic_t(nxt, self.actor_t(nxt))
        critic_loss = F.mse_loss(self.critic(obs, act), target)
        self.critic_opt.zero_grad()
        critic_loss.backward()
        if self.critic_first:
            self.critic_opt.step()
        actor_loss = -self.critic(obs, self.actor(obs)).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        if not self.critic_first:
            self.critic_opt.step()
        self.actor_opt.step()
        with torch.no_grad():
            for net, net_t in ((self.actor, self.actor_t), (self.critic, self.critic_t)):
                for p, pt in zip(net.parameters(), net_t.parameters()):
                    pt.lerp_(p, self.tau)
        return critic_loss.item(), actor_loss.item()


def _ddpg_tank(good):
    seed_everything(20)
    agent = DDPG(critic_first=good)

    @torch.no_grad()
    def evaluate():
        env = TankEnv(300)
        obs, cost, done = env.reset(), 0.0, False
        while not done:
            obs, rew, done = env.step(agent.actor(obs))
            cost -= rew.mean().item()
        return cost

    return {"model": (agent.actor, agent.critic), "optimizer": (agent.actor_opt, agent.critic_opt),
            "step": agent.train_step, "steps": 20, "evaluate": evaluate}


def ddpg_tank_bad():
    return _ddpg_tank(False)


def ddpg_tank_good():
    return _ddpg_tank(True)


# --------------------------------------------------------------------------
# LBFGS curve fit
# --------------------------------------------------------------------------
CASES.append({
    "name": "lbfgs_calibration",
    "what": "zero_grad() is called once before optimizer.step(closure) and not inside the closure: the gradients of all "
            "evaluations of the closure within one LBFGS step add up, and the curvature and line search are fed with sums.",
})


def _lbfgs_calibration(good):
    seed_everything(21)

    def response(x):
        return torch.tanh(2 * x[:, :1]) + 0.5 * torch.sin(3 * x[:, 1:2]) * x[:, 2:3]

    x = torch.rand(400, 3) * 2 - 1
    y = response(x) + 0.03 * torch.randn(400, 1)
    x_test = torch.rand(1000, 3) * 2 - 1
    y_test = response(x_test)
    model = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, history_size=10,
                                  line_search_fn="strong_wolfe")

    def closure():
        if good:
            optimizer.zero_grad()
        ridge = sum(p.pow(2).sum() for p in model.parameters())
        loss = F.mse_loss(model(x), y) + 1e-5 * ridge
        loss.backward()
        return loss

    def step():
        if not good:
            optimizer.zero_grad()
        return optimizer.step(closure).item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def lbfgs_calibration_bad():
    return _lbfgs_calibration(False)


def lbfgs_calibration_good():
    return _lbfgs_calibration(True)


# --------------------------------------------------------------------------
# Weibull survival model
# --------------------------------------------------------------------------
CASES.append({
    "name": "weibull_survival",
    "what": "The exponential schedule, meant to decay by 0.9 per epoch of 25 batches, is stepped after every batch: after "
            "two epochs the learning rate is almost 0 and the model stops far from the optimum.",
})


class WeibullAFT(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.log_scale = nn.Sequential(nn.Linear(n_in, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.log_shape = nn.Parameter(torch.zeros(()))

    def nll(self, x, time, event):
        log_scale = self.log_scale(x).squeeze(-1)
        shape = self.log_shape.exp()
        z = torch.log(time) - log_scale
        log_hazard = self.log_shape + shape * z - torch.log(time)
        return -(event * log_hazard - torch.exp(shape * z))


def _weibull_survival(good):
    seed_everything(22)

    def cohort(n):
        x = torch.randn(n, 8)
        risk = 0.8 * x[:, 0] - 0.6 * x[:, 1] + 0.7 * torch.relu(x[:, 2]) + 0.5 * x[:, 3] * x[:, 4]
        t = torch.exp(1.0 - risk) * (-torch.log(torch.rand(n).clamp_min(1e-6))) ** (1 / 2.0)
        censor = torch.distributions.Exponential(torch.tensor(0.15)).sample((n,))
        return x, torch.minimum(t, censor).clamp_min(1e-3), (t <= censor).float()

    train_set = TensorDataset(*cohort(3200))
    x_test, t_test, e_test = cohort(2000)
    loader = DataLoader(train_set, batch_size=128, shuffle=True)
    model = WeibullAFT(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batches = forever(loader)
    done = 0

    def step():
        nonlocal done
        x, t, e = next(batches)
        loss = model.nll(x, t, e).mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        done += 1
        if not good or done % len(loader) == 0:
            scheduler.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return model.nll(x_test, t_test, e_test).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def weibull_survival_bad():
    return _weibull_survival(False)


def weibull_survival_good():
    return _weibull_survival(True)


# --------------------------------------------------------------------------
# one-step forecast from windows
# --------------------------------------------------------------------------
CASES.append({
    "name": "window_forecast",
    "what": "The target of a window is series[end - 1], which is the window's own last value, and not series[end]: the "
            "model learns to copy its last input in place of forecasting the next one.",
})


class WindowDataset(Dataset):
    def __init__(self, series, window, ahead=0):
        self.series, self.window, self.ahead = series, window, ahead

    def __len__(self):
        return len(self.series) - self.window

    def __getitem__(self, start):
        end = start + self.window
        return self.series[start:end].unsqueeze(0), self.series[end + self.ahead]


class ConvForecaster(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 5, padding=2), nn.ReLU())
        self.fc = nn.Linear(16 * window, 1)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1)).squeeze(-1)


def _window_forecast(good):
    seed_everything(23)
    n = 2500
    s = torch.zeros(n)
    noise = 0.3 * torch.randn(n)
    for t in range(2, n):
        s[t] = 1.6 * s[t - 1] - 0.9 * s[t - 2] + noise[t]
    train, test = s[100:1800], s[1800:]
    mean, std = train.mean(), train.std()
    window = 16
    train_set = WindowDataset((train - mean) / std, window, ahead=0 if good else -1)
    test_set = WindowDataset((test - mean) / std, window)
    x_test = torch.stack([test_set[i][0] for i in range(len(test_set))])
    y_test = torch.stack([test_set[i][1] for i in range(len(test_set))])
    batches = forever(DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True))
    model = ConvForecaster(window)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step():
        x, y = next(batches)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(model(x_test), y_test).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def window_forecast_bad():
    return _window_forecast(False)


def window_forecast_good():
    return _window_forecast(True)
