"""Healthy programs that write into copies and buffers, two networks of one equation, and experts of a task."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from .attacked_panels import GPT
from .attacked_parts import net, texts, update

PROGRAMS = {}
STEPS = 10


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def adam(model, rate=1e-3):
    return torch.optim.Adam(model.parameters(), rate)


def smooth(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.Tanh(), nn.Linear(32, o))


def derivative(y, t):
    return torch.autograd.grad(y.sum(), t, create_graph=True)[0]


# --------------------------------------------------------------------------------------- copies and buffers (D13)
@program
def masks_in_the_copy_of_an_epoch():
    """A masked model: epoch = corpus[torch.randperm(n)] is a copy, and each of its slices is masked once."""
    model = GPT()
    opt, corpus = torch.optim.AdamW(model.parameters(), 1e-3), texts(160, 24)
    epoch = corpus[torch.randperm(160)]
    for k in range(STEPS):
        batch = epoch[k * 16 : (k + 1) * 16]
        labels, hide = batch.clone(), torch.rand(batch.shape) < 0.15
        batch[hide] = 3
        update(opt, F.cross_entropy(model(batch).transpose(1, 2), labels.masked_fill(~hide, -100)))


@program
def noise_in_the_parts_of_a_shuffled_copy():
    """data[torch.randperm(n)].split(32), taken from its end: a denoising autoencoder."""
    model, data = net(8, 8), torch.randn(320, 8)
    opt, parts = adam(model), []
    for _ in range(STEPS):
        if not parts:
            parts.extend(data[torch.randperm(320)].split(32))
        x = parts.pop()
        y = x.clone()
        x += 0.3 * torch.randn_like(x)
        update(opt, F.mse_loss(model(x), y))


@program
def noise_in_the_observations_of_a_rollout():
    """Minibatches of observations that were made for this iteration, each with its noise, once."""
    model, parts = net(6, 2), []
    opt = adam(model)
    for _ in range(STEPS):
        if not parts:
            obs = torch.randn(256, 6)
            with torch.no_grad():
                a = torch.distributions.Categorical(logits=model(obs)).sample()
            r = (a == (obs[:, 0] > 0)).float()
            parts.extend(zip(obs.split(32), a.split(32), (r - r.mean()).split(32), strict=True))
        o, a, gain = parts.pop()
        o.add_(0.05 * torch.randn(32, 6))
        update(opt, -(torch.distributions.Categorical(logits=model(o)).log_prob(a) * gain).mean())


@program
def jitter_in_a_shard():
    """Rows that were copied out of an array, in slices, as with WebDataset's shards."""
    model, rows = net(8, 1), np.random.default_rng(0).standard_normal((512, 8)).astype(np.float32)
    opt, shard = adam(model), torch.from_numpy(np.array(rows))
    for k in range(STEPS):
        x = shard[k * 32 : (k + 1) * 32]
        y = x[:, :1] * x[:, 1:2]
        x += 0.05 * torch.randn_like(x)
        update(opt, F.mse_loss(model(x), y))


@program
def noise_drawn_into_a_part_of_a_buffer():
    """A generator that is taught by a kernel's distance (GMMN, Li 2015): noise[:n].uniform_(-1, 1)."""
    model, noise = net(8, 2), torch.empty(64, 8)
    opt = adam(model)

    def kernel(a, b):
        return torch.exp(-torch.cdist(a, b).square() / 0.5).mean()

    for n in (48, 40, 48, 32, 48, 40, 48, 32, 48, 40):
        x = torch.randn(n, 2) * 0.3 + 1
        y = model(noise[:n].uniform_(-1, 1))
        update(opt, kernel(y, y) + kernel(x, x) - 2 * kernel(x, y))


@program
def points_drawn_anew_in_a_table():
    """Points at which a field is asked for: the inner ones and those of the edge, in one table."""
    model, points = smooth(2, 1), torch.zeros(64, 2)
    opt = adam(model)

    def field(p):
        return torch.sin(3.14159 * p[:, :1]) * p[:, 1:]

    for _ in range(STEPS):
        inner, edge = points[:48], points[48:]
        inner.uniform_(0, 1)
        edge[:, 1].uniform_(0, 1)
        update(opt, F.mse_loss(model(inner), field(inner)) + F.mse_loss(model(edge), field(edge)))


@program
def chains_of_which_some_begin_anew():
    """An energy model (Du & Mordatch 2019): a slice of the chains, of which 5 % begin anew, and Langevin in place."""
    model, chains = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1)), torch.rand(128, 2) * 2 - 1
    opt = adam(model)
    for k in range(STEPS):
        x = chains[k % 4 * 32 : (k % 4 + 1) * 32]
        x[torch.rand(32) < 0.05] = torch.rand(2) * 2 - 1
        for _ in range(5):
            y = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(model(y).sum(), y)
            x.sub_(0.1 * g).add_(0.05 * torch.randn(32, 2))
        real, made = model(torch.randn(32, 2) * 0.2 + 0.5), model(x)
        update(opt, real.mean() - made.mean() + 0.1 * (real**2 + made**2).mean())


# -------------------------------------------------------------------------------------------- two networks (F57)
@program
def oscillator_of_two_networks():
    """NeuroDiffEq, Lagaris 1998: x' = y and y' = -x, whose starts are built in."""
    model = nn.ModuleList([smooth(1, 1), smooth(1, 1)])
    opt = adam(model)
    for _ in range(STEPS):
        t = (2 * torch.rand(64, 1)).requires_grad_()
        x, y = t * model[0](t), 1 + t * model[1](t)
        update(opt, F.mse_loss(derivative(x, t), y) + F.mse_loss(derivative(y, t), -x))


@program
def two_kinds_of_data_whitened():
    """W-MSE (Ermolov 2021) for two modalities: what is whitened over the batch can't be one answer for all."""
    model, mixes = nn.ModuleList([net(8, 4), net(6, 4)]), (torch.randn(3, 8), torch.randn(3, 6))
    opt = adam(model)

    def whiten(z):
        z = z - z.mean(0)
        factor = torch.linalg.cholesky(z.T @ z / (len(z) - 1) + 1e-3 * torch.eye(4))
        return torch.linalg.solve_triangular(factor, z.T, upper=False).T

    for _ in range(STEPS):
        s = torch.randn(64, 3)
        one, two = (m(s @ mix + 0.1 * torch.randn(64, mix.shape[1])) for m, mix in zip(model, mixes, strict=True))
        update(opt, F.mse_loss(whiten(one), whiten(two)))


@program
def two_towers_that_end_in_a_batch_norm():
    """Maximal correlation: both towers end in BatchNorm1d(affine=False)."""
    towers = [nn.Sequential(net(n, 1), nn.BatchNorm1d(1, affine=False)) for n in (8, 6)]
    model, mixes = nn.ModuleList(towers), (torch.randn(3, 8), torch.randn(3, 6))
    opt = adam(model)
    for _ in range(STEPS):
        s = torch.randn(64, 3)
        one, two = (m(s @ mix + 0.1 * torch.randn(64, mix.shape[1])) for m, mix in zip(model, mixes, strict=True))
        update(opt, F.mse_loss(one, two))


# ------------------------------------------------------------------------------------------------- experts (F62)
class Experts(nn.Module):
    def __init__(self, k=4, w=16, o=3):
        super().__init__()
        self.gate = nn.Linear(8, k)
        self.w1, self.w2 = nn.Parameter(torch.randn(k, 8, w) * 0.3), nn.Parameter(torch.randn(k, w, o) * 0.2)

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        h = torch.einsum("bd,kdh->bkh", x, self.w1).relu()
        return torch.einsum("bk,bko->bo", p, torch.einsum("bkh,kho->bko", h, self.w2)), p


@program
def experts_of_one_task_at_a_time():
    """Mod-Squad (Chen 2023): information of tasks and experts, H(e) - H(e | task), one task in a batch."""
    model, running = Experts(), torch.full((2, 4), 0.25)
    opt = adam(model)
    for n in range(STEPS):
        t, y = n % 2, torch.randint(0, 3, (32,))
        z, p = model(torch.randn(32, 8) + 2 * F.one_hot(y, 8) + t)
        u = p.mean(0)
        both, within = (running[1 - t] + u) / 2, -(u * u.log()).sum() / 2
        update(opt, F.cross_entropy(z, y) + 0.05 * (within + (both * both.log()).sum()))
        running[t] = u.detach()


# ---------------------------------------------------------------------------------------------------- the others
@program
def growth_with_its_speed():
    """F50: (t, x, v) to (v, a) of an unstable system, where speeds go along with places."""
    model = smooth(3, 2)
    opt = adam(model)
    for _ in range(STEPS):
        t, c = torch.rand(64, 1), torch.randn(64, 1)
        x, v = c * torch.exp(t) + 0.1 * torch.randn(64, 1), c * torch.exp(t)
        update(opt, F.mse_loss(model(torch.cat([t, x, v], 1)), torch.cat([v, torch.sin(x)], 1)))


@program
def latents_ask_keys_that_are_turned():
    """F120: latents of a Perceiver stand at no place, and as many keys are turned by theirs."""

    class Perceiver(nn.Module):
        def __init__(self, w=32):
            super().__init__()
            self.words, self.latents = nn.Embedding(64, w), nn.Parameter(0.5 * torch.randn(16, w))
            self.q, self.kv, self.head = nn.Linear(w, w), nn.Linear(w, 2 * w), nn.Linear(w, 3)

        def forward(self, ids):
            b, t = ids.shape
            angles = torch.outer(torch.arange(t), 1 / 10000 ** (torch.arange(0, 8, 2) / 8)).repeat(1, 2)[:, None]
            q = self.q(self.latents).view(1, 16, 4, 8).expand(b, -1, -1, -1)
            k, v = (x.view(b, t, 4, 8) for x in self.kv(self.words(ids)).chunk(2, -1))
            one, two = k.chunk(2, -1)
            k = k * angles.cos() + torch.cat([-two, one], -1) * angles.sin()
            p = (torch.einsum("blhd,bthd->bhlt", q, k) / 8**0.5).softmax(-1)
            return self.head(torch.einsum("bhlt,bthd->blhd", p, v).flatten(2).mean(1))

    model = Perceiver()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        ids = texts(16, 16)
        update(opt, F.cross_entropy(model(ids), ids[:, 0] % 3))
