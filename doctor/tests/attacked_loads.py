"""Healthy programs about ids, loaded rates, terms of unlike size, all rows with all, tanh, batches and decay."""

import copy
import gc
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class TinyLM(nn.Module):
    def __init__(s, v, d=64, t=512):
        super().__init__()
        s.emb = nn.Embedding(v, d)
        s.pos = nn.Embedding(t, d)
        s.l = nn.TransformerEncoderLayer(d, 4, 128, 0.0, batch_first=True, norm_first=True)
        s.head = nn.Linear(d, v)

    def forward(s, x):
        T = x.shape[1]
        h = s.emb(x) + s.pos(torch.arange(T))
        return s.head(s.l(h, src_mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True))


def lm(v, draw):
    m = TinyLM(v)
    o = torch.optim.AdamW(m.parameters(), lr=3e-4)

    def step():
        x = draw()
        l = F.cross_entropy(m(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def walk(b=8, t=65):  # 8-bit pixels / mu-law audio
    w = torch.randn(b, t).cumsum(1) * 12 + torch.randint(20, 236, (b, 1))
    return w.round().clamp(0, 255).long()


def pixel_lm_padded():
    return lm(320, walk)  # 256 grey values, vocab padded to x64


def mulaw_audio_lm():
    return lm(384, walk)  # mu-law audio, padded to x128


def binary_bytes_lm():  # bytes of compressed files, ByT5-like table with 64 sentinels
    return lm(256 + 64, lambda: torch.randint(0, 256, (8, 65)))


def vq_codes_with_class():  # 256 codes + 10 class ids in one table of 320: class id first
    def draw():
        x = torch.randint(0, 256, (8, 64))
        return torch.cat([torch.randint(256, 266, (8, 1)), x], 1)

    return lm(320, draw)


def utf8_bytes():
    b = torch.tensor(list(__doc__.encode() * 40))
    return lm(320, lambda: torch.stack([b[i : i + 65] for i in torch.randint(0, len(b) - 65, (8,))]).long())


def hashed_buckets():  # n-gram hashes mod a prime below 2**16 + 20k word rows in one table (fastText)
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.EmbeddingBag(85536, 16)
            s.h = nn.Linear(16, 4)

        def forward(s, x):
            return s.h(s.e(x))

    m = M()
    o = torch.optim.Adam(m.parameters(), lr=1e-2)

    def step():
        w = torch.randint(0, 20000, (64, 8))
        g = 20000 + (w[:, 1:] * 31 + w[:, :-1]) % 65521
        l = F.cross_entropy(m(torch.cat([w, g], 1)), w[:, 0] % 4)
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


class RelAttn(nn.Module):  # Shaw/learned distance bias, causal, T=256 of max 1024
    def __init__(s, v=100, d=32, T=1024, mode="causal"):
        super().__init__()
        s.emb = nn.Embedding(v, d)
        s.bias = nn.Embedding(T, 4)
        s.qkv = nn.Linear(d, 3 * d)
        s.o = nn.Linear(d, v)
        s.mode = mode

    def forward(s, x):
        B, T = x.shape
        q, k, v = s.qkv(s.emb(x)).view(B, T, 3, 4, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(T)
        rel = i[:, None] - i[None]
        rel = rel.clamp(min=0) if s.mode == "causal" else rel.abs()
        a = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + s.bias(rel).permute(2, 0, 1)
        if s.mode == "causal":
            a = a.masked_fill(i[:, None] < i[None], -1e9)
        return s.o((a.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))


def rel(mode):
    m = RelAttn(mode=mode)
    o = torch.optim.AdamW(m.parameters(), lr=1e-3)

    def step():
        x = torch.randint(0, 100, (4, 257))
        if mode == "causal":
            p, y = m(x[:, :-1]), x[:, 1:]
        else:
            y = x[:, 1:]
            k = torch.rand(y.shape) < 0.15
            p = m(y.masked_fill(k, 0))[k]
            y = y[k]
        l = F.cross_entropy(p.reshape(-1, 100), y.reshape(-1))
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def learned_distance_causal():
    return rel("causal")


def learned_distance_abs():
    return rel("abs")


def mae_kept_patches():  # NaViT/MAE: random kept places of 16x16 in a table for 32x32
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.p = nn.Linear(48, 64)
            s.pos = nn.Embedding(1024, 64)
            s.l = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
            s.h = nn.Linear(64, 10)

        def forward(s, x, ids):
            return s.h(s.l(s.p(x) + s.pos(ids)).mean(1))

    m = M()
    o = torch.optim.AdamW(m.parameters(), lr=1e-3)

    def step():
        y = torch.randint(0, 10, (8,))
        img = torch.randn(8, 256, 48) + y[:, None, None] * 0.1
        ids = torch.rand(8, 256).argsort(1)[:, :64]
        x = img.gather(1, ids[..., None].expand(-1, -1, 48))
        l = F.cross_entropy(m(x, ids), y)
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


# ---------------------------------------------------------------- S52
def resumed(after, first_lr=1e-1, now=1e-3, initial=False, opt=None, wrap=None):
    m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    opt = opt or (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    old = opt(m.parameters(), first_lr)

    def run(o):
        y = torch.randint(0, 4, (64,))
        x = torch.randn(64, 16)
        x[:, 0] += y
        l = F.cross_entropy(m(x), y)
        o.zero_grad()
        l.backward()
        o.step()

    run(old)
    for g in old.param_groups:
        g["lr"] = now if not isinstance(g["lr"], torch.Tensor) else torch.tensor(now)
        if initial:
            g["initial_lr"] = first_lr
    sd = copy.deepcopy(old.state_dict())
    o = opt(m.parameters(), first_lr)
    return m, o, after(o, sd, run)


def imagenet_adjust_by_hand():  # pytorch/examples imagenet (old): adjust_learning_rate each epoch
    def after(o, sd, run):
        o.load_state_dict(sd)
        n = [0]
        start = 60

        def step():
            epoch = start + n[0] // 50
            if n[0] % 50 == 0:
                for g in o.param_groups:
                    g["lr"] = 0.1 * 0.1 ** (epoch // 30)
            n[0] += 1
            run(o)

        return step

    return resumed(after)


class TimmLike:  # timm.scheduler.Scheduler: no LRScheduler; step(epoch) once per epoch
    def __init__(s, o, T):
        s.optimizer = o
        s.T = T
        for g in o.param_groups:
            g.setdefault("initial_lr", g["lr"])
        s.base = [g["initial_lr"] for g in o.param_groups]

    def step(s, e):
        for g, b in zip(s.optimizer.param_groups, s.base):
            g["lr"] = 1e-5 + 0.5 * (b - 1e-5) * (1 + math.cos(math.pi * e / s.T))


def timm_epoch_scheduler():
    def after(o, sd, run):
        o.load_state_dict(sd)
        sch = TimmLike(o, 100)
        sch.step(94)
        n = [0]

        def step():
            run(o)
            n[0] += 1
            if n[0] % 50 == 0:
                sch.step(94 + n[0] // 50)

        return step

    now = 1e-5 + 0.5 * (0.1 - 1e-5) * (1 + math.cos(math.pi * 0.94))
    return resumed(after, now=now, initial=True)


def frozen_gc_multistep():  # gc.freeze() before the loop, scheduler exists (per epoch)
    def after(o, sd, run):
        s = torch.optim.lr_scheduler.MultiStepLR(o, [30, 60])
        o.load_state_dict(sd)
        s.last_epoch = 65
        gc.collect()
        gc.freeze()

        def step():
            run(o)
            s

        return step

    return resumed(after, initial=True)


def plateau_resumed():
    def after(o, sd, run):
        s = torch.optim.lr_scheduler.ReduceLROnPlateau(o)
        o.load_state_dict(sd)

        def step():
            run(o)
            s

        return step

    return resumed(after)


def sequential_after_load():
    L = torch.optim.lr_scheduler

    def after(o, sd, run):
        o.load_state_dict(sd)
        s = L.SequentialLR(o, [L.LinearLR(o, 0.1, total_iters=5), L.StepLR(o, 1000)], [5])

        def step():
            run(o)
            s

        return step

    return resumed(after, initial=True)


def own_plateau_by_hand():  # own early-stop/plateau code divides the rate when val stalls
    def after(o, sd, run):
        o.load_state_dict(sd)
        n = [0]
        best = [9e9, 0]

        def step():
            run(o)
            n[0] += 1
            if n[0] % 500 == 0:
                for g in o.param_groups:
                    g["lr"] *= 0.1

        return step

    return resumed(after)


def tensor_lr_capturable():
    def after(o, sd, run):
        o.load_state_dict(sd)
        s = torch.optim.lr_scheduler.CosineAnnealingLR(o, 100, last_epoch=90)

        def step():
            run(o)
            s.step()

        return step

    return resumed(after, 1e-2, 1e-4, True, lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), foreach=False))


class EqOpt(torch.optim.SGD):  # unhashable: defines __eq__; wrapper-like
    def __eq__(s, o):
        return s is o


def unhashable_optimizer():
    def after(o, sd, run):
        o.load_state_dict(sd)
        return lambda: run(o)

    return resumed(after, 1e-2, 1e-2, opt=lambda p, lr: EqOpt(p, lr=lr))


class OwnLoad(torch.optim.SGD):
    def load_state_dict(s, sd):
        lr = [g["lr"] for g in s.param_groups]
        super().load_state_dict(sd)
        for g, l in zip(s.param_groups, lr):
            g["lr"] = l


def override_keeps_new_rate():
    def after(o, sd, run):
        o.load_state_dict(sd)
        return lambda: run(o)

    return resumed(after, opt=lambda p, lr: OwnLoad(p, lr=lr))


# ---------------------------------------------------------------- F125
class Two(nn.Module):
    def __init__(s):
        super().__init__()
        s.t = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        s.a = nn.Linear(64, 1)
        s.c = nn.Linear(64, 3)

    def forward(s, x):
        h = s.t(x)
        return s.a(h)[:, 0], s.c(h)


def two_data(n=256):
    x = torch.randn(n, 16)
    c = x[:, :3].argmax(1)
    return x, 45 + 12 * x[:, 3] + 6 * x[:, 4] + 2.5 * torch.randn(n), c


def kendall_uncertainty():  # log-variances initialised at the spread of the targets
    m = Two()
    nn.init.constant_(m.a.bias, 45.0)
    s = nn.Parameter(torch.tensor([math.log(180.0), 0.0]))
    m.s = s
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step():
        x, a, c = two_data()
        p, q = m(x)
        l = 0.5 * (torch.exp(-s[0]) * F.mse_loss(p, a) + s[0]) + torch.exp(-s[1]) * F.cross_entropy(q, c) + 0.5 * s[1]
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def kendall_zero_init():  # usual init: s=0; weight of the raw term learned with own higher rate
    m = Two()
    s = nn.Parameter(torch.zeros(2))
    o = torch.optim.Adam([{"params": m.parameters()}, {"params": [s], "lr": 0.1}], lr=1e-3)

    def step():
        x, a, c = two_data()
        p, q = m(x)
        l = (
            0.5 * torch.exp(-s[0]) * F.mse_loss(p, a)
            + 0.5 * s[0]
            + torch.exp(-s[1]) * F.cross_entropy(q, c)
            + 0.5 * s[1]
        )
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def detached_balance():  # each term divided by its own running value
    m = Two()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step():
        x, a, c = two_data()
        p, q = m(x)
        A = F.mse_loss(p, a)
        C = F.cross_entropy(q, c)
        l = A / A.detach() + C / C.detach()
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def per_term_clip():  # smooth_l1 in raw px: gradient bounded whatever the size (x 0.01 grads), head bias only
    m = Two()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step():
        x, a, c = two_data()
        p, q = m(x)
        l = F.smooth_l1_loss(p, a * 8) + F.cross_entropy(q, c)
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


# ---------------------------------------------------------------- F27
def gp_replicates():  # deep kernel GP, each point measured twice: x above x
    X = torch.rand(40, 3).repeat(2, 1)
    y = torch.sin(4 * X.sum(1)) + 0.1 * torch.randn(80)
    m = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 8))
    o = torch.optim.Adam(m.parameters(), lr=1e-2)

    def step():
        z = m(X)
        K = z @ z.T + 0.1 * torch.eye(80)
        L = torch.linalg.cholesky(K)
        a = torch.cholesky_solve(y[:, None], L)[:, 0]
        l = 0.5 * y @ a + L.diagonal().log().sum()
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def ntxent_dropout():
    m = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 16))
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step():
        x = torch.randn(32, 16)
        z = F.normalize(m(torch.cat([x, x])), dim=1)
        s = (z @ z.T) / 0.1
        s.fill_diagonal_(-1e9)
        l = F.cross_entropy(s, (torch.arange(64) + 32) % 64)
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def orth_reg_net2wider():  # widened layer: copies of rows, orthogonality pushes them apart
    m = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    m[0].weight.data[16:] = m[0].weight.data[:16].clone()
    o = torch.optim.SGD(m.parameters(), lr=1e-2)

    def step():
        x = torch.randn(64, 16)
        W = m[0].weight
        l = F.cross_entropy(m(x), x[:, :4].argmax(1)) + 1e-3 * (W @ W.T - torch.eye(32)).pow(2).sum()
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def gram_style():
    f = nn.Conv2d(3, 16, 3).requires_grad_(False)
    img = nn.Parameter(torch.rand(1, 3, 24, 24))
    t = torch.rand(1, 3, 24, 24)
    o = torch.optim.Adam([img], lr=0.02)
    g = lambda x: (lambda z: z @ z.T / z.numel())(f(x).relu().flatten(1).view(16, -1))

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.img = img

        def forward(s):
            return g(s.img)

    m = M()

    def step():
        l = F.mse_loss(m(), g(t)) * 1e3
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def supcon_label_prototypes():  # GRPO/multi-positives: each query stands twice, once per positive; queries' similarity as hard-negative mask
    e = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    o = torch.optim.Adam(e.parameters(), lr=1e-3)

    def step():
        q = torch.randn(16, 16)
        pos = torch.cat([q + 0.1 * torch.randn(16, 16), q + 0.1 * torch.randn(16, 16)])
        zq = F.normalize(e(q.repeat(2, 1)), dim=1)
        zp = F.normalize(e(pos), dim=1)
        same = (zq @ zq.T) > 0.9
        s = (zq @ zp.T / 0.1).masked_fill(same & ~torch.eye(32, dtype=bool), -1e9)
        l = F.cross_entropy(s, torch.arange(32))
        o.zero_grad()
        l.backward()
        o.step()

    return e, o, step


# ---------------------------------------------------------------- D35
def shared_projection_tanh_pooler():  # frozen image features (standardised) and a BERT-like tanh pooler share one projection
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.txt = nn.Embedding(50, 64)
            s.pool = nn.Linear(64, 64)
            s.proj = nn.Linear(64, 32)

        def forward(s, i, t):
            return F.normalize(s.proj(i), dim=1), F.normalize(s.proj(torch.tanh(s.pool(s.txt(t).mean(1)))), dim=1)

    m = M()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step():
        t = torch.randint(0, 50, (32, 6))
        i = torch.randn(32, 64)
        a, b = m(i, t)
        l = F.cross_entropy(a @ b.T / 0.1, torch.arange(32))
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def gan(scale):
    g = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16), nn.Tanh())
    d = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    m = nn.ModuleDict(dict(g=g, d=d))
    og = torch.optim.Adam(g.parameters(), lr=2e-4, betas=(0.5, 0.99))
    od = torch.optim.Adam(d.parameters(), lr=2e-4, betas=(0.5, 0.99))
    bce = F.binary_cross_entropy_with_logits

    def step():
        real = torch.randn(64, 16).clamp(-3, 3)
        fake = scale(g(torch.randn(64, 8)))
        one = torch.ones(64, 1)
        l = bce(d(real), one) + bce(d(fake.detach()), 0 * one)
        od.zero_grad()
        l.backward()
        od.step()
        l = bce(d(fake), one)
        og.zero_grad()
        l.backward()
        og.step()

    return m, [og, od], step


def gan_rescaled():
    return gan(lambda f: f * 3)


def gan_rescaled_inplace():
    return gan(lambda f: torch.lerp(torch.full_like(f, -3.0), torch.full_like(f, 3.0), (f + 1) / 2))


def gan_rescaled_norm():  # rescale by a frozen layer that denormalises
    n = nn.Linear(16, 16)
    nn.init.eye_(n.weight)
    n.weight.data *= 3
    nn.init.zeros_(n.bias)
    n.requires_grad_(False)
    return gan(n)


# ---------------------------------------------------------------- S21
def rl_stacked_actions():  # rollout: prev actions per time are stacked -> (T,B), LSTM time first
    class P(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(6, 16)
            s.r = nn.LSTM(16, 32)
            s.h = nn.Linear(32, 6)

        def forward(s, a):
            return s.h(s.r(s.e(a))[0])

    m = P()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step():
        acts = [torch.randint(0, 6, (8,))]
        for t in range(12):
            acts.append((acts[-1] + 1 + (torch.rand(8) < 0.1).long()) % 6)
        prev = torch.stack(acts[:-1])
        y = torch.stack(acts[1:])
        l = F.cross_entropy(m(prev).flatten(0, 1), y.flatten())
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def batchify_indexed_time():  # word_language_model's (T_total,B) corpus, window picked by index of times
    class P(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(50, 16)
            s.r = nn.GRU(16, 32)
            s.h = nn.Linear(32, 50)

        def forward(s, a):
            return s.h(s.r(s.e(a))[0])

    m = P()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)
    data = torch.randint(0, 50, (4000,)).view(10, 400).t().contiguous()
    n = [0]

    def step():
        i = n[0] * 20
        n[0] += 1
        t = torch.arange(i, i + 20)
        l = F.cross_entropy(m(data[t]).flatten(0, 1), data[t + 1].flatten())
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


# ---------------------------------------------------------------- D12
def full_batch_val_loader(towers=True):  # full-batch training; validation loader run after each step (= epoch)
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.u = nn.Embedding(50, 8)
            s.i = nn.Embedding(60, 8)

        def forward(s, a, b):
            return (s.u(a) * s.i(b)).sum(1)

    m = M()
    o = torch.optim.Adam(m.parameters(), lr=1e-2)
    a, b = torch.randint(0, 50, (600,)), torch.randint(0, 60, (600,))
    y = ((a + b) % 2).float()
    va = DataLoader(TensorDataset(a[:100], b[:100], y[:100]), batch_size=25)
    f = (lambda a, b: (m.u(a) * m.i(b)).sum(1)) if towers else m

    def step():
        l = F.binary_cross_entropy_with_logits(f(a, b), y)
        o.zero_grad()
        l.backward()
        o.step()
        with torch.no_grad():
            sum(F.binary_cross_entropy_with_logits(f(p, q), r) for p, q, r in va)

    return m, o, step


def full_batch_val_loader_whole():
    return full_batch_val_loader(False)


def coordinates_first():  # four scales of fixed coordinates go first, then a random batch by next(iter(shuffled loader))
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.c = nn.ModuleList([nn.Linear(2, 8) for _ in range(4)])
            s.x = nn.Linear(16, 8)
            s.h = nn.Linear(8, 1)

    m = M()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)
    dl = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=32, shuffle=True)
    g = torch.rand(10, 2)

    def step():
        (x,) = next(iter(dl))
        p = sum(c(g * 2**k).sin() for k, c in enumerate(m.c))
        z = m.h(torch.tanh(p[None] + m.x(x)[:, None])).mean((1, 2))
        l = F.mse_loss(z, x[:, 0])
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


# ---------------------------------------------------------------- N26
def logistic_map_l2():  # penalised (MAP) logistic regression near its optimum: gradient balances the prior by definition
    m = nn.Linear(20, 5)
    o = torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.1)
    X = torch.randn(400, 20)
    y = (X[:, :5] + 0.5 * torch.randn(400, 5)).argmax(1)

    def step():
        l = F.cross_entropy(m(X), y)
        o.zero_grad()
        l.backward()
        o.step()

    for _ in range(300):
        step()
    return m, o, step


def pmf_adam():  # probabilistic matrix factorisation, lambda = 0.1 on the sum of squares
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.u = nn.Embedding(100, 8)
            s.i = nn.Embedding(80, 8)
            nn.init.normal_(s.u.weight, 0, 0.1)
            nn.init.normal_(s.i.weight, 0, 0.1)

        def forward(s, a, b):
            return (s.u(a) * s.i(b)).sum(1)

    m = M()
    o = torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.1)
    U, V = torch.randn(100, 3), torch.randn(80, 3)

    def step():
        a, b = torch.randint(0, 100, (512,)), torch.randint(0, 80, (512,))
        l = F.mse_loss(m(a, b), (U[a] * V[b]).sum(1), reduction="sum")
        o.zero_grad()
        l.backward()
        o.step()

    for _ in range(100):
        step()
    return m, o, step


# ---------------------------------------------------------------- N4
def lora_bf16():  # torchtune-like bf16 LoRA at 2e-4
    class L(nn.Module):
        def __init__(s, d):
            super().__init__()
            s.w = nn.Linear(d, d)
            s.w.requires_grad_(False)
            s.lora_A = nn.Linear(d, 8, bias=False)
            s.lora_B = nn.Linear(8, d, bias=False)
            nn.init.zeros_(s.lora_B.weight)

        def forward(s, x):
            return s.w(x) + 2 * s.lora_B(s.lora_A(x))

    m = nn.Sequential(L(256), nn.GELU(), L(256)).bfloat16()
    o = torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=2e-4)

    def step():
        x = torch.randn(32, 256).bfloat16()
        l = F.mse_loss(m(x).float(), x.roll(1, 1).float())
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def bf16_high_rate():
    m = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    o = torch.optim.AdamW(m.parameters(), lr=1e-3)

    def step():
        x = torch.randn(64, 64).bfloat16()
        l = F.mse_loss(m(x).float(), x.roll(1, 1).float())
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


# ---------------------------------------------------------------- exceptions
def odd_things():  # 0-d ids, empty ids, int32 ids, sparse grads, complex, bf16 regression target, empty slices
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Embedding(320, 8)
            s.b = nn.EmbeddingBag(320, 8)
            s.c = nn.Linear(8, 8, dtype=torch.cfloat)
            s.h = nn.Linear(8, 3)
            s.r = nn.LSTM(8, 8)
            s.a = nn.Linear(8, 1)

        def forward(s, x):
            h = s.e(x)
            z = s.e(torch.tensor(3))
            e = s.e(torch.zeros(0, 5, dtype=torch.long)).sum()
            h = h + z + e
            h = h + s.b(x[:, :0].flatten(), torch.zeros(1, dtype=torch.long)).sum()
            w = s.c(h.to(torch.cfloat))
            q = (w[:, 0] @ w[:, 0].T).abs().mean()
            r, _ = s.r(h)
            return s.h(r.mean(1)), s.a(r.mean(1))[:, 0], q

    m = M()
    o = torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1))

    def step():
        x = torch.randint(0, 200, (16, 12), dtype=torch.int32)[:, ::2]
        x = torch.stack(list(x))
        c, a, q = m(x[:, :-1].transpose(0, 1).contiguous().T)
        l = F.cross_entropy(c, x[:, 0].long() % 3) + F.mse_loss(a, torch.zeros(16)) + 0 * q
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def sparse_things():  # sparse embedding, sparse @, SparseAdam, per-row losses, non-contiguous halves
    m = nn.Embedding(400, 8, sparse=True)
    o = torch.optim.SparseAdam(m.parameters(), lr=1e-2)
    A = torch.eye(400).to_sparse()

    def step():
        ids = torch.randint(0, 200, (32, 20))
        z = m(ids).mean(1)[::2]
        l = (z @ z.T).pow(2).mean() + torch.sparse.mm(A, m(torch.arange(400))).pow(2).mean()
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def soft_targets_int_regression():  # class probabilities as targets; integer targets cast; empty regression batch
    m = Two()
    o = torch.optim.Adam(m.parameters(), lr=1e-3)

    def step():
        x, a, c = two_data()
        p, q = m(x)
        k = torch.zeros(256, dtype=torch.bool)
        l = (
            F.cross_entropy(q, F.one_hot(c, 3).float())
            + F.mse_loss(p[k], a[k], reduction="sum")
            + F.l1_loss(p.double(), (a / 50).double())
        )
        o.zero_grad()
        l.backward()
        o.step()

    return m, o, step


def overfit_one_batch_towers():
    u, i = nn.Linear(16, 8), nn.Linear(16, 8)
    m = nn.ModuleDict(dict(u=u, i=i))
    o = torch.optim.Adam(m.parameters(), lr=1e-3)
    dl = DataLoader(TensorDataset(torch.randn(256, 16), torch.randn(256, 16)), batch_size=32, shuffle=True)
    a, b = next(iter(dl))

    def step():
        loss = F.cross_entropy(u(a) @ i(b).T, torch.arange(32))
        o.zero_grad()
        loss.backward()
        o.step()

    return m, o, step


def _whole(make):
    def program():
        _, _, step = make()
        for _ in range(12):
            step()
        gc.unfreeze()

    return program


PARTS = {"lm", "walk", "rel", "resumed", "two_data", "gan"}  # of programs
MADE = {name: f for name, f in list(globals().items()) if getattr(f, "__module__", "") == __name__}
MADE = {name: f for name, f in MADE.items() if not isinstance(f, type) and name not in PARTS and name[0] != "_"}
PROGRAMS = {name: _whole(f) for name, f in MADE.items()}
