"""Small training programs from several fields."""
import copy
import itertools
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)
SEED = 0
CASES = []


def seed_everything(offset=0):
    random.seed(SEED + offset)
    torch.manual_seed(SEED + offset)


def case(name, what):
    CASES.append({"name": name, "what": what})


# ---------------------------------------------------------------- point clouds
case("cloud_volume", "The PointNet regressor returns [B, 1] and the target is [B]; F.mse_loss broadcasts them to "
     "[B, B], so every prediction is compared with every target and the net learns only the mean.")


class PointNetRegressor(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, width, 1), nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, pts):
        h = self.local(pts.transpose(1, 2))
        return self.head(h.max(dim=2).values)


def make_ellipsoids(n, n_points=64):
    axes = torch.rand(n, 3) * 1.2 + 0.4
    d = F.normalize(torch.randn(n, n_points, 3), dim=-1)
    pts = d * axes[:, None, :]
    logvol = axes.log().sum(1)
    return pts, logvol


def _cloud_volume(good):
    seed_everything()
    pts, vol = make_ellipsoids(1024)
    mu, sd = vol[:768].mean(), vol[:768].std()
    vol = (vol - mu) / sd
    loader = DataLoader(TensorDataset(pts[:768], vol[:768]), batch_size=32, shuffle=True, drop_last=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    model = PointNetRegressor()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i=0):
        p, v = next(batches)
        pred = model(p)
        if good:
            pred = pred.squeeze(-1)
        loss = F.mse_loss(pred, v)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            return (model(pts[768:]).squeeze(-1) - vol[768:]).pow(2).mean().item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- imitation
case("clone_policy", "Behaviour cloning: the policy ends with nn.Softmax and its probabilities go into "
     "nn.CrossEntropyLoss, which applies log_softmax again; gradients are flat and the policy badly calibrated.")


def _clone_policy(good):
    seed_everything()
    n_actions = 6
    w1, w2 = torch.randn(8, 16) / math.sqrt(8), torch.randn(16, n_actions)
    obs = torch.randn(3000, 8)
    acts = torch.distributions.Categorical(logits=1.2 * torch.tanh(obs @ w1) @ w2).sample()
    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_actions)]
    if not good:
        layers.append(nn.Softmax(dim=-1))
    policy = nn.Sequential(*layers)
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(policy.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(obs[:2400], acts[:2400]), batch_size=64, shuffle=True)
    stream = itertools.chain.from_iterable(itertools.repeat(loader))

    def action_probs(o):
        out = policy(o)
        return F.softmax(out, dim=-1) if good else out

    def step(i=0):
        o, a = next(stream)
        opt.zero_grad()
        loss = criterion(policy(o), a)
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        p = action_probs(obs[2400:]).clamp_min(1e-8)
        return F.nll_loss(p.log(), acts[2400:]).item()

    return dict(model=policy, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- flows
case("flow_density", "RealNVP: base.log_prob(z) is [B, D] and is averaged over B and D, whereas the log-determinant is "
     "summed over D; the base term weighs D times too little, so the flow expands and the likelihood is poor.")


class Coupling(nn.Module):
    def __init__(self, dim, hidden=48):
        super().__init__()
        self.half = dim // 2
        self.net = nn.Sequential(nn.Linear(self.half, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, 2 * (dim - self.half)))

    def forward(self, x):
        a, b = x[:, :self.half], x[:, self.half:]
        s, t = self.net(a).chunk(2, dim=1)
        s = 2 * torch.tanh(s / 2)
        b = b * s.exp() + t
        return torch.cat([b, a], dim=1), s.sum(1)


class RealNVP(nn.Module):
    def __init__(self, dim=6, n=6):
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(dim) for _ in range(n)])

    def forward(self, x):
        logdet = torch.zeros(x.shape[0])
        for c in self.couplings:
            x, ld = c(x)
            logdet = logdet + ld
        return x, logdet


def _flow_density(good):
    seed_everything()
    centers = torch.randn(4, 6) * 1.5
    mix = torch.randn(6, 6) / 2
    x = centers[torch.randint(0, 4, (3000,))] + torch.randn(3000, 6) @ mix
    x = (x - x[:2400].mean(0)) / x[:2400].std(0)
    train, test = x[:2400], x[2400:]
    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
    base = torch.distributions.Normal(0.0, 1.0)

    def step(i=0):
        xb = train[torch.randint(0, len(train), (128,))]
        z, logdet = flow(xb)
        logp = base.log_prob(z)
        if good:
            logp = logp.sum(dim=1)
        loss = -(logp.mean() + logdet.mean())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        z, logdet = flow(test)
        return -(base.log_prob(z).sum(1) + logdet).mean().item()

    return dict(model=flow, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- survival
case("cox_risk", "Cox partial likelihood: the batch is sorted by ascending time before logcumsumexp, so the 'risk set' "
     "holds those who failed earlier instead of those still alive; the ranking of risks comes out wrong.")


class CoxLoss(nn.Module):
    def __init__(self, descending):
        super().__init__()
        self.descending = descending

    def forward(self, log_risk, time, event):
        order = torch.argsort(time, descending=self.descending)
        log_risk, event = log_risk[order], event[order]
        log_cum = torch.logcumsumexp(log_risk, dim=0)
        return -((log_risk - log_cum) * event).sum() / event.sum().clamp_min(1)


def concordance(risk, time, event):
    earlier = (time[:, None] < time[None, :]) & (event[:, None] > 0)
    conc = (risk[:, None] > risk[None, :]).float() + 0.5 * (risk[:, None] == risk[None, :]).float()
    return (conc * earlier).sum() / earlier.sum()


def _cox_risk(good):
    seed_everything()
    x = torch.randn(1400, 10)
    lin = x[:, 0] - 0.8 * x[:, 1] + 0.7 * x[:, 2] * x[:, 3]
    t_event = -torch.log(torch.rand(1400)) * torch.exp(-lin)
    t_cens = torch.rand(1400) * 4
    time = torch.minimum(t_event, t_cens)
    event = (t_event <= t_cens).float()
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
    criterion = CoxLoss(descending=good)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-3)
    loader = DataLoader(TensorDataset(x[:1000], time[:1000], event[:1000]), batch_size=128, shuffle=True,
                        drop_last=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        xb, tb, eb = next(it)
        opt.zero_grad()
        loss = criterion(net(xb).squeeze(1), tb, eb)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return 1.0 - concordance(net(x[1000:]).squeeze(1), time[1000:], event[1000:]).item()

    return dict(model=net, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- metric learning
case("pair_verify", "nn.CosineEmbeddingLoss is fed labels 1 / 0 instead of 1 / -1; pairs with label 0 add nothing, only "
     "the attraction is left and all embeddings collapse to one direction.")


class PairDataset(Dataset):
    def __init__(self, x, y, n_pairs, signed):
        self.x, self.signed = x, signed
        g = torch.Generator().manual_seed(7)
        by_class = [torch.nonzero(y == c).flatten() for c in range(int(y.max()) + 1)]
        self.pairs = []
        for k in range(n_pairs):
            c = int(torch.randint(0, len(by_class), (1,), generator=g))
            d = c if k % 2 == 0 else (c + 1 + int(torch.randint(0, len(by_class) - 1, (1,), generator=g))) % len(by_class)
            i = by_class[c][torch.randint(0, len(by_class[c]), (1,), generator=g)].item()
            j = by_class[d][torch.randint(0, len(by_class[d]), (1,), generator=g)].item()
            self.pairs.append((i, j, int(c == d)))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, k):
        i, j, same = self.pairs[k]
        label = 2 * same - 1 if self.signed else same
        return self.x[i], self.x[j], torch.tensor(float(label))


def _pair_verify(good):
    seed_everything()
    protos = torch.randn(6, 20)
    y = torch.randint(0, 6, (1200,))
    x = protos[y] + 0.9 * torch.randn(1200, 20)
    train = PairDataset(x[:800], y[:800], 1500, signed=good)
    test = PairDataset(x[800:], y[800:], 600, signed=True)
    encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    opt = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))
    xa, xb, same = (torch.stack(t) for t in zip(*[test[k] for k in range(len(test))]))

    def step(i=0):
        a, b, label = next(it)
        loss = criterion(encoder(a), encoder(b), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        sim = F.cosine_similarity(encoder(xa), encoder(xb))
        return ((sim > 0.6).float() != (same > 0).float()).float().mean().item()

    return dict(model=encoder, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- counts
case("visit_counts", "The net outputs a rate (softplus), but nn.PoissonNLLLoss is left at log_input=True and takes it "
     "for a log-rate; the output is driven towards log(rate), so the predicted counts are far too low.")


class RateNet(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU())
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        return F.softplus(self.out(self.body(x))).squeeze(-1)


def _visit_counts(good):
    seed_everything()
    x = torch.randn(3000, 6)
    rate = torch.exp(0.6 * x[:, 0] - 0.4 * x[:, 1] + 0.3 * x[:, 2].abs() + 0.7)
    y = torch.poisson(rate)
    model = RateNet(6)
    criterion = nn.PoissonNLLLoss(log_input=False) if good else nn.PoissonNLLLoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(x[:2400], y[:2400]), batch_size=64, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        xb, yb = next(it)
        opt.zero_grad(set_to_none=True)
        loss = criterion(model(xb), yb)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        r, t = model(x[2400:]).clamp_min(1e-6), y[2400:]
        return (2 * (torch.xlogy(t, t) - t * r.log() - t + r)).mean().item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- ordinal regression
case("ordinal_grades", "The cut points of the cumulative-logit model are torch.zeros(..., requires_grad=True), not an "
     "nn.Parameter, hence absent from model.parameters(); they get gradients but are never updated or cleared.")


class CumulativeLink(nn.Module):
    def __init__(self, d, n_levels, registered):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 1, bias=False))
        cuts = torch.zeros(n_levels - 1, requires_grad=True)
        self.cuts = nn.Parameter(cuts) if registered else cuts

    def forward(self, x):
        return self.score(x) - self.cuts

    def predict(self, x):
        return (self.forward(x) > 0).sum(1)


def _ordinal_grades(good):
    seed_everything()
    n_levels = 6
    x = torch.randn(2400, 8)
    latent = x[:, 0] + torch.sin(2 * x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + 0.3 * torch.randn(2400)
    y = torch.bucketize(latent, torch.tensor([-1.6, -0.8, 0.0, 0.6, 1.4]))
    levels = (y[:, None] > torch.arange(n_levels - 1)).float()
    model = CumulativeLink(8, n_levels, registered=good)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x[:1800], levels[:1800]), batch_size=64, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        xb, lb = next(it)
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(xb), lb)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return (model.predict(x[1800:]) - y[1800:]).abs().float().mean().item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- forecasting
case("block_forecast", "The residual blocks of the forecaster sit in a plain Python list, so model.parameters() lacks "
     "them; they stay at their random start and only the input and output layers learn.")


class ForecastBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, h):
        return h + self.fc2(F.gelu(self.fc1(self.norm(h))))


class BlockForecaster(nn.Module):
    def __init__(self, lookback, horizon, width=24, depth=3, as_modules=True):
        super().__init__()
        self.embed = nn.Linear(lookback, width)
        blocks = [ForecastBlock(width) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks) if as_modules else blocks
        self.out = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def logistic_family(n, length):
    a = 3.6 + 0.3 * torch.rand(n)
    v = torch.rand(n) * 0.6 + 0.2
    out = []
    for _ in range(length):
        v = a * v * (1 - v)
        out.append(v)
    return (torch.stack(out, 1) - 0.65) / 0.24


def _block_forecast(good):
    seed_everything()
    series = logistic_family(4000, 11)
    x, y = series[:, :8], series[:, 8:10]
    model = BlockForecaster(8, 2, as_modules=good)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(x[:3200], y[:3200]), batch_size=64, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        xb, yb = next(it)
        opt.zero_grad()
        loss = F.huber_loss(model(xb), yb)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.l1_loss(model(x[3200:]), y[3200:]).item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- audio transfer
case("sound_transfer", "The optimizer is built before the classifier head is replaced for the new classes; it holds the "
     "old head, and the new head keeps its random weights while only the norm layer learns.")


class SoundNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 16, 17, stride=4), nn.ReLU(), nn.Conv1d(16, 32, 9, stride=2),
                                      nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten())
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, n_classes)

    def forward(self, wav):
        return self.head(self.norm(self.features(wav)))


def tones(n, freqs, length=256):
    y = torch.randint(0, len(freqs), (n,))
    t = torch.arange(length) / length
    f = torch.tensor(freqs)[y][:, None]
    phase = torch.rand(n, 1) * 2 * math.pi
    wav = torch.sin(2 * math.pi * f * t + phase) * (0.5 + torch.rand(n, 1)) + 0.8 * torch.randn(n, length)
    return wav[:, None, :], y


def _sound_transfer(good):
    seed_everything()
    model = SoundNet(8)
    wav, y = tones(512, [6., 10., 15., 21., 28., 36., 45., 55.])
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(80):
        idx = torch.randint(0, 512, (32,))
        pre.zero_grad()
        F.cross_entropy(model(wav[idx]), y[idx]).backward()
        pre.step()
    model.zero_grad(set_to_none=True)

    for p in model.features.parameters():
        p.requires_grad_(False)
    new_wav, new_y = tones(1000, [8., 13., 18., 25., 32., 41.])
    if good:
        model.head = nn.Linear(128, 6)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    else:
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        model.head = nn.Linear(128, 6)
    loader = DataLoader(TensorDataset(new_wav[:700], new_y[:700]), batch_size=32, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        w, t = next(it)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(w), t)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return (model(new_wav[700:]).argmax(1) != new_y[700:]).float().mean().item()

    return dict(model=model, optimizer=optimizer, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- soft actor-critic
case("sac_pointmass", "SAC's actor draws its action with dist.sample() instead of dist.rsample(); min Q carries no "
     "gradient to the actor, which is driven by the entropy term alone and never learns to control.")


class Actor(nn.Module):
    def __init__(self, reparam):
        super().__init__()
        self.reparam = reparam
        self.trunk = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mu = nn.Linear(64, 1)
        self.log_std = nn.Linear(64, 1)

    def dist(self, s):
        h = self.trunk(s)
        return torch.distributions.Normal(self.mu(h), self.log_std(h).clamp(-4, 1).exp())

    def forward(self, s):
        dist = self.dist(s)
        u = dist.rsample() if self.reparam else dist.sample()
        a = torch.tanh(u)
        logp = dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)
        return a, logp


def mlp(sizes):
    layers = []
    for i in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[i], sizes[i + 1]))
        if i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def pointmass(s, a):
    pos, vel = s[:, :1], s[:, 1:]
    vel = 0.9 * vel + 0.4 * a
    pos = pos + 0.3 * vel
    return torch.cat([pos, vel], 1).clamp(-3, 3), -(pos.pow(2) + 0.05 * a.pow(2))


def _sac_pointmass(good):
    seed_everything()
    actor = Actor(reparam=good)
    q1, q2 = mlp([3, 64, 64, 1]), mlp([3, 64, 64, 1])
    t1, t2 = copy.deepcopy(q1).requires_grad_(False), copy.deepcopy(q2).requires_grad_(False)
    opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
    opt_q = torch.optim.Adam(itertools.chain(q1.parameters(), q2.parameters()), lr=2e-3)
    alpha, gamma, tau = 0.05, 0.9, 0.02
    s = torch.rand(5000, 2) * 4 - 2
    a = torch.rand(5000, 1) * 2 - 1
    s_next, r = pointmass(s, a)

    def step(i=0):
        idx = torch.randint(0, 5000, (128,))
        sb, ab, rb, nb = s[idx], a[idx], r[idx], s_next[idx]
        with torch.no_grad():
            na, nlogp = actor(nb)
            x = torch.cat([nb, na], 1)
            target = rb + gamma * (torch.min(t1(x), t2(x)) - alpha * nlogp)
        x = torch.cat([sb, ab], 1)
        loss_q = F.mse_loss(q1(x), target) + F.mse_loss(q2(x), target)
        opt_q.zero_grad()
        loss_q.backward()
        opt_q.step()

        for p in itertools.chain(q1.parameters(), q2.parameters()):
            p.requires_grad_(False)
        pa, logp = actor(sb)
        x = torch.cat([sb, pa], 1)
        loss_a = (alpha * logp - torch.min(q1(x), q2(x))).mean()
        opt_a.zero_grad()
        loss_a.backward()
        opt_a.step()
        for p in itertools.chain(q1.parameters(), q2.parameters()):
            p.requires_grad_(True)
        with torch.no_grad():
            for net, tgt in ((q1, t1), (q2, t2)):
                for p, tp in zip(net.parameters(), tgt.parameters()):
                    tp.lerp_(p, tau)
        return loss_a.item()

    @torch.no_grad()
    def evaluate():
        g = torch.Generator().manual_seed(3)
        st = torch.rand(200, 2, generator=g) * 3 - 1.5
        cost = 0.0
        for _ in range(30):
            st, rew = pointmass(st, torch.tanh(actor.dist(st).mean))
            cost -= rew.mean().item()
        return cost

    return dict(model=(actor, q1, q2), optimizer=(opt_a, opt_q), step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- physics-informed
case("pinn_growth", "du/dt comes from torch.autograd.grad with retain_graph=True instead of create_graph=True; it is a "
     "constant for the residual's gradient, so the net is not trained to obey the equation's derivative term.")


def _pinn_growth(good):
    seed_everything()
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    rate, u0 = 1.0, 1.0
    grid = torch.linspace(0, 1, 201)[:, None]
    exact = u0 * torch.exp(rate * grid)

    def residual(t):
        t.requires_grad_(True)
        u = net(t)
        if good:
            du = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
        else:
            du = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True)[0]
        return du - rate * u

    t0 = torch.zeros(1, 1)

    def step(i=0):
        t = torch.rand(64, 1)
        loss = residual(t).pow(2).mean() + 10 * (net(t0) - u0).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return (net(grid) - exact).pow(2).mean().sqrt().item()

    return dict(model=net, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- super-resolution
case("sr_perceptual", "The feature network of the perceptual loss is a submodule of the system, is not frozen and is in "
     "the optimizer; it learns to output constant features, so the loss falls without better images.")


class SRNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.head = nn.Conv2d(1, ch, 3, padding=1)
        self.body = nn.Conv2d(ch, ch, 3, padding=1)
        self.up = nn.Conv2d(ch, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, lr):
        h = F.relu(self.head(lr))
        h = h + F.relu(self.body(h))
        return self.shuffle(self.up(h))


class SRSystem(nn.Module):
    def __init__(self, features, freeze):
        super().__init__()
        self.net = SRNet()
        self.features = features
        if freeze:
            for p in self.features.parameters():
                p.requires_grad = False

    def forward(self, lr):
        return self.net(lr)

    def loss(self, lr, hr):
        return F.l1_loss(self.features(self.net(lr)), self.features(hr))


def blobs(n, size=16):
    ax = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(ax, ax, indexing="ij")
    img = torch.zeros(n, 1, size, size)
    for _ in range(3):
        c = torch.rand(n, 2, 1, 1) * 2 - 1
        w = torch.rand(n, 1, 1) * 0.3 + 0.15
        s = torch.randn(n, 1, 1)
        img[:, 0] += s * torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / w ** 2)
    return img


def pretrained_features(n_steps=40):
    enc = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(12, 12, 3, padding=1))
    dec = nn.Conv2d(12, 1, 3, padding=1)
    opt = torch.optim.Adam(list(enc.parameters()) + list(dec.parameters()), lr=3e-3)
    for _ in range(n_steps):
        x = blobs(32)
        opt.zero_grad()
        F.mse_loss(dec(enc(x)), x).backward()
        opt.step()
    enc.zero_grad(set_to_none=True)
    return enc


def _sr_perceptual(good):
    seed_everything()
    system = SRSystem(pretrained_features(), freeze=good)
    hr = blobs(600)
    lr = F.avg_pool2d(hr, 2)
    optimizer = torch.optim.Adam([p for p in system.parameters() if p.requires_grad], lr=2e-3)
    loader = DataLoader(TensorDataset(lr[:480], hr[:480]), batch_size=16, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        l, h = next(it)
        optimizer.zero_grad()
        loss = system.loss(l, h)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(system(lr[480:]), hr[480:]).item()

    return dict(model=system, optimizer=optimizer, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- speech
case("keyword_pool", "Attention pooling over time takes the softmax over dim 0, the batch, instead of dim 1, time; the "
     "utterances of a batch compete for weight, and the pooled vector depends on who else is in the batch.")


class KeywordSpotter(nn.Module):
    def __init__(self, n_mels, n_classes, pool_dim):
        super().__init__()
        self.pool_dim = pool_dim
        self.rnn = nn.GRU(n_mels, 32, batch_first=True)
        self.score = nn.Linear(32, 1, bias=False)
        self.out = nn.Linear(32, n_classes)

    def forward(self, mel):
        h, _ = self.rnn(mel)
        w = torch.softmax(self.score(torch.tanh(h)), dim=self.pool_dim)
        return self.out((w * h).sum(dim=1))


def utterances(n, words, length=30):
    y = torch.randint(0, len(words), (n,))
    mel = torch.randn(n, length, words.shape[-1])
    start = torch.randint(0, length - 4, (n,))
    for k in range(4):
        mel[torch.arange(n), start + k] += words[y, k]
    return mel, y


def _keyword_pool(good):
    seed_everything()
    words = torch.randn(6, 4, 12) * 1.2
    mel, y = utterances(1500, words)
    model = KeywordSpotter(12, 6, pool_dim=1 if good else 0)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader = DataLoader(TensorDataset(mel[:1200], y[:1200]), batch_size=32, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        m, t = next(it)
        model.train()
        loss = F.cross_entropy(model(m), t)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        errors = 0
        for j in range(1200, 1500):
            errors += int(model(mel[j:j + 1]).argmax(1).item() != y[j].item())
        model.train()
        return errors / 300

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- multi-task
case("sensor_tasks", "nn.ModuleList([nn.Linear(...)] * n) puts the very same head n times in the list; all four tasks "
     "share one output layer and give the same prediction.")


class SharedTrunk(nn.Module):
    def __init__(self, d, hidden, n_tasks, replicate):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        if replicate:
            self.heads = nn.ModuleList([nn.Linear(hidden, 1)] * n_tasks)
        else:
            self.heads = nn.ModuleList([nn.Linear(hidden, 1) for _ in range(n_tasks)])

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def _sensor_tasks(good):
    seed_everything()
    x = torch.randn(2000, 10)
    z = torch.tanh(x @ torch.randn(10, 5) / 3)
    y = z @ torch.randn(5, 4) + 0.1 * torch.randn(2000, 4)
    y = (y - y[:1600].mean(0)) / y[:1600].std(0)
    model = SharedTrunk(10, 32, 4, replicate=not good)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(x[:1600], y[:1600]), batch_size=64, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        xb, yb = next(it)
        outs = model(xb)
        loss = sum(F.mse_loss(o, yb[:, k]) for k, o in enumerate(outs)) / len(outs)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(torch.stack(model(x[1600:]), 1), y[1600:]).item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- Q-learning
case("slippery_q", "The bootstrapped target r + gamma * max Q(s') is not computed under no_grad / detached; the loss also "
     "pulls the next state's values towards the current ones, biased in this stochastic world.")


class SlipperyLine:
    """Walk on a line of cells; moves slip at random; reward at the right end."""

    def __init__(self, n=10, slip=0.3):
        self.n, self.slip = n, slip

    def step(self, s, a):
        move = torch.where(torch.rand(len(s)) < self.slip, 1 - a, a) * 2 - 1
        s2 = (s + move).clamp(0, self.n - 1)
        r = (s2 == self.n - 1).float() - 0.3 * (s2 == 3).float()
        restart = s2 == self.n - 1
        return s2, r, restart

    def solve(self, gamma):
        q = torch.zeros(self.n, 2)
        for _ in range(400):
            new = torch.zeros_like(q)
            for s in range(self.n):
                for a in (0, 1):
                    for move, p in ((2 * a - 1, 1 - self.slip), (1 - 2 * a, self.slip)):
                        s2 = min(max(s + move, 0), self.n - 1)
                        end = s2 == self.n - 1
                        r = float(end) - 0.3 * float(s2 == 3)
                        new[s, a] += p * (r + (0.0 if end else gamma * q[s2].max().item()))
            if (new - q).abs().max() < 1e-5:
                break
            q = new
        return q


def _slippery_q(good):
    seed_everything()
    env, gamma = SlipperyLine(), 0.9
    true_q = env.solve(gamma)
    s = torch.randint(0, env.n - 1, (4000,))
    a = torch.randint(0, 2, (4000,))
    s2, r, done = env.step(s, a)
    qnet = nn.Sequential(nn.Linear(env.n - 1, 64), nn.ReLU(), nn.Linear(64, 2))
    opt = torch.optim.Adam(qnet.parameters(), lr=3e-3)
    eye = torch.eye(env.n)[:, :env.n - 1]

    def step(i=0):
        idx = torch.randint(0, len(s), (128,))
        q = qnet(eye[s[idx]]).gather(1, a[idx, None]).squeeze(1)
        with torch.set_grad_enabled(not good):
            next_q = qnet(eye[s2[idx]]).max(1).values
            target = r[idx] + gamma * next_q * (~done[idx]).float()
        loss = F.smooth_l1_loss(q, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return (qnet(eye[:env.n - 1]) - true_q[:env.n - 1]).pow(2).mean().sqrt().item()

    return dict(model=qnet, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- PPO
case("ppo_tracker", "The rollout's log-probabilities are stored with their graph instead of under no_grad; in the ratio "
     "exp(logp - old_logp) the gradients cancel, and the policy receives only the entropy bonus.")


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, n_actions):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, n_actions))
        self.v = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, 1))

    def dist(self, obs):
        return torch.distributions.Categorical(logits=self.pi(obs))

    def value(self, obs):
        return self.v(obs).squeeze(-1)


class TargetTracker:
    """Batch of agents that follow a drifting target on a line."""

    def __init__(self, n):
        self.n = n
        self.gap = torch.randn(n)
        self.drift = torch.randn(n) * 0.2

    def obs(self):
        return torch.stack([self.gap, self.drift], 1)

    def act(self, a):
        self.gap = (self.gap + self.drift - 0.4 * (a.float() - 1)).clamp(-3, 3)
        self.drift = 0.95 * self.drift + 0.05 * torch.randn(self.n)
        return -self.gap.abs()


class PPO:
    def __init__(self, keep_graph, n_envs=32, horizon=12, gamma=0.9, lam=0.9, clip=0.2):
        self.net = ActorCritic(2, 3)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        self.env = TargetTracker(n_envs)
        self.keep_graph = keep_graph
        self.horizon, self.gamma, self.lam, self.clip = horizon, gamma, lam, clip

    def rollout(self):
        buf = {k: [] for k in ("obs", "act", "logp", "rew")}
        with torch.set_grad_enabled(self.keep_graph):
            for _ in range(self.horizon):
                obs = self.env.obs()
                d = self.net.dist(obs)
                act = d.sample()
                buf["obs"].append(obs)
                buf["act"].append(act)
                buf["logp"].append(d.log_prob(act))
                buf["rew"].append(self.env.act(act))
        last = self.env.obs()
        return {k: torch.stack(v) for k, v in buf.items()}, last

    @torch.no_grad()
    def gae(self, obs, rew, last):
        values = torch.cat([self.net.value(obs), self.net.value(last)[None]])
        adv, run = torch.zeros_like(rew), 0.0
        for t in reversed(range(self.horizon)):
            delta = rew[t] + self.gamma * values[t + 1] - values[t]
            run = delta + self.gamma * self.lam * run
            adv[t] = run
        return adv, adv + values[:-1]

    def train_step(self, i=0):
        b, last = self.rollout()
        adv, ret = self.gae(b["obs"], b["rew"], last)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        d = self.net.dist(b["obs"])
        ratio = torch.exp(d.log_prob(b["act"]) - b["logp"])
        surr = torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv)
        v_loss = F.mse_loss(self.net.value(b["obs"]), ret)
        loss = -surr.mean() + 0.5 * v_loss - 0.005 * d.entropy().mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        return loss.item()

    @torch.no_grad()
    def cost(self):
        state = torch.get_rng_state()
        torch.manual_seed(99)
        env, total = TargetTracker(200), 0.0
        for _ in range(30):
            total -= env.act(self.net.dist(env.obs()).sample()).mean().item()
        torch.set_rng_state(state)
        return total / 30


def _ppo_tracker(good):
    seed_everything()
    agent = PPO(keep_graph=not good)
    return dict(model=agent.net, optimizer=agent.opt, step=agent.train_step, steps=20, evaluate=agent.cost)


# ---------------------------------------------------------------- tabular
case("clinic_dropout", "The validation inside the loop calls model.eval() and nothing calls model.train() afterwards; "
     "from the second step on dropout is off, and the net overfits its small noisy table.")


class ClinicTrainer:
    def __init__(self, model, opt, train, val, back_to_train):
        self.model, self.opt, self.back_to_train = model, opt, back_to_train
        self.loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
        self.it = itertools.chain.from_iterable(itertools.repeat(self.loader))
        self.val = val
        self.history = []

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = self.val
        self.history.append(F.cross_entropy(self.model(x), y).item())
        if self.back_to_train:
            self.model.train()

    def step(self, i=0):
        x, y = next(self.it)
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.opt.step()
        if i % 5 == 0:
            self.validate()
        return loss.item()


def _clinic_dropout(good):
    seed_everything()
    x = torch.randn(1200, 20)
    p = torch.sigmoid(1.6 * x[:, 0] - 1.4 * x[:, 1] + 1.0 * x[:, 2])
    y = torch.bernoulli(p).long()
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(),
                          nn.Dropout(0.5), nn.Linear(128, 2))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = ClinicTrainer(model, opt, (x[:300], y[:300]), (x[300:400], y[300:400]), back_to_train=good)

    @torch.no_grad()
    def evaluate():
        was = model.training
        model.eval()
        err = F.cross_entropy(model(x[400:]), y[400:]).item()
        model.train(was)
        return err

    return dict(model=model, optimizer=opt, step=trainer.step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- key points
case("keypoint_flip", "The random horizontal flip mirrors the image but not the key point's x coordinate; half of the "
     "targets belong to another image, and x is learned only as an average.")


class KeypointSet(Dataset):
    def __init__(self, img, kp, mirror_kp, train):
        self.img, self.kp, self.mirror_kp, self.train = img, kp, mirror_kp, train

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        img, kp = self.img[i], self.kp[i].clone()
        if self.train and random.random() < 0.5:
            img = torch.flip(img, dims=[-1])
            if self.mirror_kp:
                kp[0] = -kp[0]
        return img, kp


class KeypointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        return self.fc(self.conv(x))


def _keypoint_flip(good):
    seed_everything()
    n, size = 1000, 16
    ax = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(ax, ax, indexing="ij")
    kp = torch.rand(n, 2) * 1.6 - 0.8
    img = torch.exp(-((xx - kp[:, 0, None, None]) ** 2 + (yy - kp[:, 1, None, None]) ** 2) / 0.05)
    img = (img + 0.15 * torch.randn(n, size, size))[:, None]
    model = KeypointNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(KeypointSet(img[:800], kp[:800], good, train=True), batch_size=32, shuffle=True)
    it = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(i=0):
        x, t = next(it)
        opt.zero_grad()
        loss = F.smooth_l1_loss(model(x), t)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return (model(img[800:]) - kp[800:]).norm(dim=1).mean().item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- time series
case("load_windows", "The window data set is off by one: y = series[i + L - 1] is the last value of the input window "
     "itself, so the net learns to copy it instead of forecasting the next value.")


class WindowDataset(Dataset):
    def __init__(self, series, lookback, lead):
        self.series, self.lookback, self.lead = series, lookback, lead

    def __len__(self):
        return len(self.series) - self.lookback

    def __getitem__(self, i):
        j = i + self.lookback
        return self.series[i:j].unsqueeze(-1), self.series[j + self.lead]


class LoadForecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.fc(h[:, -1]).squeeze(-1)


def _load_windows(good):
    seed_everything()
    t = torch.arange(1600).float()
    s = torch.sin(2 * math.pi * t / 7) + 0.6 * torch.sin(2 * math.pi * t / 24) + 0.1 * torch.randn(1600)
    s = (s - s[:1200].mean()) / s[:1200].std()
    train = WindowDataset(s[:1200], 24, lead=0 if good else -1)
    test_s, L = s[1200:], 24
    xt = torch.stack([test_s[i:i + L] for i in range(len(test_s) - L)]).unsqueeze(-1)
    yt = test_s[L:]
    model = LoadForecaster()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    it = itertools.chain.from_iterable(itertools.repeat(DataLoader(train, batch_size=32, shuffle=True)))

    def step(i=0):
        x, y = next(it)
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(model(xt), yt).item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- few-shot
case("proto_schedule", "ExponentialLR(gamma=0.8), meant for once per epoch of 50 episodes, is stepped after every "
     "episode; the learning rate is down to a tenth after ten steps and training stops.")


def _proto_schedule(good):
    seed_everything()
    n_way, n_shot, n_query = 5, 3, 8
    mix = torch.randn(8, 32) / 3
    train_c, test_c = torch.randn(60, 8), torch.randn(20, 8)

    def episode(classes, gen=None):
        pick = torch.randperm(len(classes), generator=gen)[:n_way]
        nuisance = torch.randn(n_way, n_shot + n_query, 32, generator=gen)
        nuisance[..., :12] *= 3
        x = torch.tanh(classes[pick] @ mix)[:, None] * 1.5 + nuisance
        return x[:, :n_shot] / 2, x[:, n_shot:] / 2

    embed = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16, bias=False))
    opt = torch.optim.Adam(embed.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.8)
    labels = torch.arange(n_way).repeat_interleave(n_query)

    def logits(support, query):
        protos = embed(support).mean(1)
        return -torch.cdist(embed(query).flatten(0, 1), protos).pow(2)

    def step(i=0):
        support, query = episode(train_c)
        loss = F.cross_entropy(logits(support, query), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if not good or (i + 1) % 50 == 0:
            sched.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        g = torch.Generator().manual_seed(5)
        errs = [(logits(*episode(test_c, g)).argmax(1) != labels).float().mean().item() for _ in range(80)]
        return sum(errs) / len(errs)

    return dict(model=embed, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- recommendation
case("ratings_mf", "Each step takes next(iter(loader)) from a loader with shuffle=False, which starts it anew; the model "
     "sees only the first 64 ratings for ever.")


class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, k=8):
        super().__init__()
        self.user = nn.Embedding(n_users, k)
        self.item = nn.Embedding(n_items, k)
        self.user_bias = nn.Embedding(n_users, 1)
        self.item_bias = nn.Embedding(n_items, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(-1)
        return dot + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)


def _ratings_mf(good):
    seed_everything()
    n_users, n_items = 60, 50
    U, V = torch.randn(n_users, 2), torch.randn(n_items, 2)
    bu, bi = torch.randn(n_users) * 0.7, torch.randn(n_items) * 0.7
    pairs = torch.randperm(n_users * n_items)
    u, i_ = pairs // n_items, pairs % n_items
    r = (U[u] * V[i_]).sum(1) * 0.7 + bu[u] + bi[i_] + 0.2 * torch.randn(len(u))
    r = r - r[:2400].mean()
    model = MatrixFactorization(n_users, n_items)
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    loader = DataLoader(TensorDataset(u[:2400], i_[:2400], r[:2400]), batch_size=64, shuffle=False)
    state = {"it": iter(loader)}

    def get_batch():
        if not good:
            return next(iter(loader))
        try:
            return next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            return next(state["it"])

    def step(i=0):
        ub, ib, rb = get_batch()
        opt.zero_grad()
        loss = F.mse_loss(model(ub, ib), rb)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        return F.mse_loss(model(u[2400:], i_[2400:]), r[2400:]).sqrt().item()

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


# ---------------------------------------------------------------- graphs
case("gcn_nodes", "optimizer.zero_grad() is never called; the gradients of all steps pile up and the updates overshoot.")


class GCN(nn.Module):
    def __init__(self, d, hidden, n_classes):
        super().__init__()
        self.lin1 = nn.Linear(d, hidden)
        self.lin2 = nn.Linear(hidden, n_classes)

    def forward(self, x, adj):
        h = F.relu(adj @ self.lin1(x))
        h = F.dropout(h, 0.3, self.training)
        return adj @ self.lin2(h)


def _gcn_nodes(good):
    seed_everything()
    n, k = 240, 4
    y = torch.randint(0, k, (n,))
    prob = torch.where(y[:, None] == y[None, :], 0.06, 0.02)
    a = torch.triu((torch.rand(n, n) < prob).float(), 1)
    a = a + a.t() + torch.eye(n)
    deg = a.sum(1)
    adj = a / (deg[:, None] * deg[None, :]).sqrt()
    x = torch.randn(k, 16)[y] * 0.6 + torch.randn(n, 16)
    order = torch.randperm(n)
    train, test = order[:80], order[80:]
    model = GCN(16, 32, k)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=5e-3)

    def step(i=0):
        model.train()
        if good:
            opt.zero_grad()
        out = model(x, adj)
        loss = F.cross_entropy(out[train], y[train])
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate():
        model.eval()
        err = F.cross_entropy(model(x, adj)[test], y[test]).item()
        model.train()
        return err

    return dict(model=model, optimizer=opt, step=step, steps=20, evaluate=evaluate)


def _bind(name):
    run = globals()["_" + name]
    globals()[name + "_bad"] = lambda: run(False)
    globals()[name + "_good"] = lambda: run(True)


for _c in CASES:
    _bind(_c["name"])
