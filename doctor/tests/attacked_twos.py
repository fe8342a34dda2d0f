"""Healthy programs whose halves are two conditions, whose batch is there twice, and others with two of something."""

import math
import random

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


def led(number, x):
    """Rows with one number in front of each."""
    return torch.cat([torch.full((len(x), 1), float(number)), x], 1)


def smooth(i):
    return nn.Sequential(nn.Linear(i, 32), nn.Tanh(), nn.Linear(32, 1))


# ------------------------------------------------------------------------------------------ a condition for each half
@program
def effect_of_a_treatment_in_the_first_column():
    """An S-learner (Kuenzel 2019): both potential outcomes in one forward, and the effect is shrunk."""
    model, w = net(7, 1), torch.randn(6)
    opt = adam(model, 1e-2)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        t = (torch.rand(32) < torch.sigmoid(x[:, 0])).float()
        y = x @ w + t * (1 + x[:, 1]) + 0.1 * torch.randn(32)
        treated, left = model(torch.cat([led(1, x), led(0, x)])).squeeze(1).chunk(2)
        update(opt, F.mse_loss(torch.where(t > 0, treated, left), y) + 0.01 * (treated - left).var())


@program
def both_sides_of_a_periodic_field():
    """Advection with periodic boundaries (Raissi 2019): u(-1, t) = u(1, t), both sides in one call."""
    model = smooth(2)
    opt = adam(model)
    for _ in range(STEPS):
        xt = (torch.rand(64, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])).requires_grad_(True)
        g = torch.autograd.grad(model(xt).sum(), xt, create_graph=True)[0]
        x0 = torch.rand(32, 1) * 2 - 1
        u0 = model(torch.cat([x0, torch.zeros(32, 1)], 1))
        t = torch.rand(16, 1)
        left, right = model(torch.cat([led(-1, t), led(1, t)])).chunk(2)
        loss = (g[:, 1] + g[:, 0]).pow(2).mean() + F.mse_loss(u0, torch.sin(math.pi * x0))
        update(opt, loss + (left - right).pow(2).mean())


@program
def sensitive_column_is_set_to_both():
    """Counterfactual logit pairing (Garg 2019)."""
    model, w = net(6, 1), torch.randn(5)
    opt = adam(model, 1e-2)
    for _ in range(STEPS):
        a = torch.randint(0, 2, (32, 1)).float()
        x = torch.cat([a, torch.randn(32, 5) + 0.5 * a], 1)
        y = (x[:, 1:] @ w + 0.3 * torch.randn(32) > 0).float()
        one, zero = model(torch.cat([led(1, x[:, 1:]), led(0, x[:, 1:])])).view(-1).chunk(2)
        update(opt, F.binary_cross_entropy_with_logits(model(x)[:, 0], y) + 0.5 * (one - zero).abs().mean())


@program
def quantiles_that_must_not_cross():
    """The level is an input (Tagasovska 2019)."""
    model, w = net(5, 1), torch.randn(4)
    opt = adam(model, 1e-2)
    for _ in range(STEPS):
        x = torch.randn(32, 4)
        y = x @ w + (1 + x[:, 0].abs()) * torch.randn(32)
        out = model(torch.cat([led(0.1, x), led(0.9, x)]))[:, 0]
        low, high = out[:32], out[32:]
        pinned = [torch.maximum(t * (y - q), (t - 1) * (y - q)).mean() for q, t in ((low, 0.1), (high, 0.9))]
        update(opt, sum(pinned) + F.relu(low - high).mean())


@program
def response_that_never_falls_with_the_dose():
    """Three fixed doses of a trial, in one call."""
    model = net(5, 1)
    opt = adam(model, 1e-2)
    for _ in range(STEPS):
        x, d = torch.randn(24, 4), torch.randint(0, 3, (24, 1)) / 2
        y = d[:, 0] * (1 + x[:, 0].abs()) + x[:, 1]
        low, mid, high = model(torch.cat([led(v, x) for v in (0.0, 0.5, 1.0)]))[:, 0].view(3, 24)
        loss = F.mse_loss(model(torch.cat([d, x], 1))[:, 0], y)
        update(opt, loss + F.relu(low - mid).mean() + F.relu(mid - high).mean())


@program
def values_at_two_times():
    """All paths stand at one time, then at the next (deep BSDE)."""
    model = smooth(4)
    opt = adam(model)
    for _ in range(STEPS):
        t, dt = random.randint(0, 8) / 10, 0.1
        x = torch.randn(32, 3)
        later = x + math.sqrt(2 * dt) * torch.randn(32, 3)
        now, then = model(torch.cat([led(t, x), led(t + dt, later)])).squeeze(-1).split(32)
        end = model(led(1, x))[:, 0]
        update(opt, (then - now).pow(2).mean() + F.mse_loss(end, x.pow(2).sum(1)))


@program
def ends_of_a_transport():
    """Action matching (Neklyudov 2023): samples at time 0 and at time 1, which are no pairs."""
    model = nn.Sequential(nn.Linear(3, 32), nn.Softplus(), nn.Linear(32, 1))
    opt = adam(model)
    for _ in range(STEPS):
        x, y = torch.randn(32, 2), torch.randn(32, 2) + 1
        start, end = model(torch.cat([led(0, x), led(1, y)]))[:, 0].chunk(2)
        t = torch.rand(32, 1)
        z = torch.cat([t, (1 - t) * x + t * y], 1).requires_grad_(True)
        g = torch.autograd.grad(model(z).sum(), z, create_graph=True)[0]
        update(opt, (start - end).mean() + (g[:, 0] + 0.5 * g[:, 1:].pow(2).sum(1)).mean())


@program
def patients_in_two_clinics():
    """The clinic is the first column, and patients are matched."""
    model, w = net(6, 1), torch.randn(5)
    opt = adam(model, 1e-2)
    for _ in range(STEPS):
        x = torch.randn(16, 5)
        p = model(torch.cat([led(0, x), led(1, x + 0.1 * torch.randn(16, 5))]))[:, 0]
        update(opt, F.mse_loss(p, (x @ w).repeat(2)) + 0.1 * (p[:16] - p[16:]).pow(2).mean())


@program
def two_levels_of_a_first_factor():
    """Elementary effects (Morris) of a surrogate that must not fall."""
    model = smooth(4)
    opt = adam(model)
    for _ in range(STEPS):
        x = torch.rand(32, 4)
        high, low = model(torch.cat([led(0.75, x[:, 1:]), led(0.25, x[:, 1:])]))[:, 0].chunk(2)
        y = x[:, 0] ** 2 + x[:, 1:].sum(1)
        update(opt, F.mse_loss(model(x)[:, 0], y) + F.relu(low - high).mean())


@program
def central_differences_in_time():
    """u(t + h, x) and u(t - h, x) at a common time, in one call (Chiu's CAN-PINN)."""
    model = smooth(2)
    opt = adam(model)
    for _ in range(STEPS):
        x, t, h = torch.rand(32, 1), random.random(), 0.01
        later, before = model(torch.cat([led(t + h, x), led(t - h, x)])).chunk(2)
        slope = (later - before) / (2 * h)
        update(opt, (slope + model(led(t, x))).pow(2).mean() + F.mse_loss(model(led(0, x)), torch.sin(3 * x)))


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm, self.v = GPT(), nn.Linear(32, 1)

    def forward(self, ids):
        return self.v(self.lm.body(ids)[:, -1])[:, 0]


@program
def padded_on_the_left_and_the_chosen_are_long():
    """All chosen answers are cut at the maximum and begin with the first token, all rejected ones with padding."""
    model = Scorer()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        prompt = texts(8, 6)
        chosen = torch.cat([torch.full((8, 1), 1), prompt, texts(8, 13)], 1)
        rejected = torch.zeros(8, 20, dtype=torch.long)
        for i in range(8):
            n = random.randint(3, 9)
            rejected[i, -7 - n :] = torch.cat([torch.tensor([1]), prompt[i], texts(1, n)[0]])
        good, bad = model(torch.cat([chosen, rejected])).chunk(2)
        update(opt, -F.logsigmoid(good - bad).mean())


@program
def one_source_under_two_tasks():
    """A token of the task in front, then the source; the scores of both are tied."""
    model = Scorer()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        q = texts(8, 10)
        a, b = model(torch.cat([torch.cat([torch.full((8, 1), task), q], 1) for task in (1, 2)])).chunk(2)
        y = (q.float().mean(1) - 32) / 10
        update(opt, F.mse_loss(a, y) + F.mse_loss(b, y) + (a - b).pow(2).mean())


# ------------------------------------------------------------------------------------------ a batch that is there twice
@program
def pairs_that_are_seen_twice_with_dropout():
    """Winner beside loser, and the batch twice in one forward (R-Drop)."""
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    opt, w = adam(model, 1e-2), torch.randn(6)
    for _ in range(STEPS):
        x = torch.randn(16, 2, 6)
        x = torch.gather(x, 1, (x @ w).argsort(1, descending=True)[..., None].expand(-1, -1, 6)).flatten(0, 1)
        s = model(torch.cat([x, x]))[:, 0]
        d = s[0::2] - s[1::2]
        one, two = d.sigmoid().chunk(2)
        update(opt, F.softplus(-d).mean() + (one - two).pow(2).mean())


@program
def ensemble_of_pairs():
    """Each member has a mask of its own, and rows of the batch that is repeated for it."""
    model = net(6, 1)
    opt, w = adam(model, 1e-2), torch.randn(6)
    for _ in range(STEPS):
        x = torch.randn(16, 2, 6)
        x = torch.gather(x, 1, (x @ w).argsort(1, descending=True)[..., None].expand(-1, -1, 6)).flatten(0, 1)
        hidden = F.relu(model[0](x.repeat(2, 1)))
        won, lost = model[2](hidden * (torch.rand(hidden.shape) > 0.1).float()).view(-1, 2).unbind(1)
        update(opt, F.softplus(lost - won).mean())


@program
def demand_of_two_days_is_smooth():
    """The hour of the day is the first column, so what is there comes again after half of the rows."""
    model = net(4, 1)
    opt, hour = adam(model, 1e-2), torch.arange(48)
    for _ in range(STEPS):
        x = torch.stack([(hour % 24) / 24.0, *torch.randn(3, 48)], 1)
        out = model(x)[:, 0]
        y = torch.sin(2 * math.pi * x[:, 0]) + 0.1 * x[:, 1]
        update(opt, F.mse_loss(out, y) + 0.01 * (out[1:] - out[:-1]).pow(2).mean())


# ------------------------------------------------------------------------------------------ two rows that are one
class Rotary(nn.Module):
    def __init__(self, places):
        super().__init__()
        angles = places[:, None].float() * 10000 ** (-torch.arange(16) / 16)
        self.lm = GPT(layers=1)
        self.register_buffer("cos_cached", angles.cos())
        self.register_buffer("sin_cached", angles.sin())

    def forward(self, ids):
        c, s = self.cos_cached[: ids.shape[1]], self.sin_cached[: ids.shape[1]]
        a, b = self.lm.wte(ids).chunk(2, -1)
        return self.lm.head(self.lm.blocks[0](torch.cat([a * c - b * s, a * s + b * c], -1)))


def rotary(places):
    model = Rotary(places)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        ids = texts(2, len(places))
        update(opt, F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@program
def far_places_are_grouped_by_two():
    """SelfExtend: near places are exact, and those behind are divided by two."""
    p = torch.arange(224)
    rotary(torch.where(p < 160, p, 160 + (p - 160) // 2))


@program
def text_and_then_a_picture_that_shares_places():
    """A fixed layout; the pieces of a picture share their place in time (M-RoPE)."""
    rotary(torch.cat([torch.arange(20), 20 + torch.arange(36) // 2]))


class Sessions(nn.Module):
    def __init__(self, name, table):
        super().__init__()
        self.e, self.g = nn.Embedding(len(table), 32), nn.GRU(32, 32, batch_first=True)
        self.f, self.name = nn.Linear(table.shape[1], 32), name
        self.register_buffer(name, table)

    def forward(self, ids):
        return self.g(self.e(ids) + self.f(getattr(self, self.name)[ids]))[0] @ self.e.weight.T


def sessions(name, table):
    model = Sessions(name, table)
    opt = adam(model)
    for _ in range(STEPS):
        ids = texts(2, 193) % len(table)
        update(opt, F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


@program
def sizes_of_one_article_cost_the_same():
    """A recommender with a buffer `item_costs`: the price and the weight."""
    table = (torch.arange(200)[:, None] % 61 + 3 * torch.rand(200, 2)).round() / 20
    table[151:200:3] = table[150:199:3]
    sessions("item_costs", table)


@program
def likeness_of_items_in_a_buffer():
    """A buffer `cos_sim`; variants of one article have the same text."""
    text = torch.randn(200, 12)
    text[151:200:3] = text[150:199:3]
    sessions("cos_sim", F.normalize(text, dim=1) @ F.normalize(text, dim=1).T)


# ------------------------------------------------------------------------------------------ states and shares
@program
def oscillator_that_is_driven():
    """A neural ODE's right-hand side, (t, q, p) to (p, dp): the target begins with the last column."""
    model = net(3, 2)
    opt = adam(model)
    for _ in range(STEPS):
        t, q, p = torch.rand(64, 1) * 6, torch.randn(64, 1), torch.randn(64, 1)
        target = torch.cat([p, -torch.sin(q) - 0.1 * p + torch.cos(t)], 1)
        update(opt, F.mse_loss(model(torch.cat([t, q, p], 1)), target))


@program
def spring_with_its_stiffness():
    model = net(3, 2)
    opt = adam(model)
    for _ in range(STEPS):
        k, q, p = 0.5 + torch.rand(64, 1), torch.randn(64, 1), torch.randn(64, 1)
        update(opt, F.mse_loss(model(torch.cat([k, q, p], 1)), torch.cat([p, -k * q], 1)))


@program
def detection_without_boxes():
    """WSDDN (Bilen 2016): shares of proposals times shares of classes, and the best class of each is its next label."""
    body, cls, det, ref = net(8, 32), nn.Linear(32, 5), nn.Linear(32, 5), nn.Linear(32, 6)
    opt = adam(nn.ModuleList([body, cls, det, ref]))
    for _ in range(STEPS):
        y = F.one_hot(torch.randint(0, 5, (8,)), 5).float()
        x = 0.5 * torch.randn(8, 12, 8)
        x[:, 3, :5] += 3 * y
        h = F.relu(body(x))
        s = det(h).softmax(1) * cls(h).softmax(2)
        best, which = s.topk(1, -1)
        refined = F.cross_entropy(ref(h).transpose(1, 2), which.squeeze(-1), reduction="none")
        image = F.binary_cross_entropy(s.sum(1).clamp(1e-6, 1 - 1e-6), y)
        update(opt, image + (best.squeeze(-1).detach() * refined).sum(1).mean())


@program
def best_frames_behind_a_mixer_of_times():
    """The last layer mixes times, so classes lie in dim 1 (TSMixer); the best frames of each class are averaged."""
    channels, times = nn.Linear(6, 4), nn.Linear(24, 24)
    opt = adam(nn.ModuleList([channels, times]))
    for _ in range(STEPS):
        y = torch.randint(0, 4, (16,))
        x = torch.randn(16, 24, 6)
        x[:, 5:9, :4] += 2 * F.one_hot(y, 4)[:, None]
        p = times(F.relu(channels(x)).transpose(1, 2)).softmax(1).topk(4, -1).values.mean(-1)
        update(opt, F.nll_loss(torch.log(p + 1e-6), y))


@program
def attention_in_windows_and_then_stacked_frames():
    """Four windows of sixteen frames, and then four neighbours each are stacked: (8, 4, 16, D) to (8, 16, 4 D)."""
    into, qkv, stacked, head = nn.Linear(8, 16), nn.Linear(16, 48), nn.Linear(64, 32), nn.Linear(32, 3)
    opt = adam(nn.ModuleList([into, qkv, stacked, head]))
    for _ in range(STEPS):
        y = torch.randint(0, 3, (8,))
        x = torch.randn(8, 64, 8)
        x[:, :, :3] += F.one_hot(y, 3)[:, None]
        q, k, v = qkv(into(x).view(8, 4, 16, 16)).chunk(3, -1)
        frames = F.scaled_dot_product_attention(q, k, v).reshape(8, 16, 64)
        update(opt, F.cross_entropy(head(F.relu(stacked(frames)).mean(1)), y))


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.prior, self.post = nn.GRUCell(6, 16), net(16, 8), net(22, 8)
        self.decoder, self.reward = net(20, 6), net(20, 1)

    def forward(self, o, a):
        h, z, out = torch.zeros(len(o), 16), torch.zeros(len(o), 4), []
        for t in range(o.shape[1]):
            h = self.g(torch.cat([z, a[:, t]], 1), h)
            p, q = self.prior(h).chunk(2, 1), self.post(torch.cat([h, o[:, t]], 1)).chunk(2, 1)
            p, q = ((mean, F.softplus(spread) + 0.1) for mean, spread in (p, q))
            z = q[0] + q[1] * torch.randn_like(q[1])
            s = torch.cat([h, z], 1)
            kl = 0.8 * apart(map(torch.detach, q), p) + 0.2 * apart(q, map(torch.detach, p))
            out.append((self.decoder(s), self.reward(s)[:, 0], kl))
        return [torch.stack(x, 1) for x in zip(*out)]


def apart(q, p):
    q, p = (torch.distributions.Normal(*d) for d in (q, p))
    return torch.distributions.kl_divergence(q, p).sum(1)


@program
def prior_below_its_free_nats():
    """Dreamer's world model: below the floor of the divergence the prior rests."""
    model = WorldModel()
    opt, w = adam(model), torch.randn(2, 6)
    for _ in range(STEPS):
        a = torch.randn(8, 6, 2)
        o = a.cumsum(1) @ w + 0.1 * torch.randn(8, 6, 6)
        seen, r, kl = model(o, a)
        loss = (seen - o).pow(2).sum(2).mean() + F.mse_loss(r, o[..., 0])
        update(opt, loss + kl.mean().clamp(min=1.0))
