"""Twenty small training programs, half of them language models, each with one bug and a mended twin, by somebody who had not seen the checks.

See judge7.py. They are kept as they were written, but that the base model is trained and not read from a file.
"""
# ruff: noqa: E501, B007, B905, E731, I001, E402, E741, B006, B023, C4, F401, F841, UP, SIM, RUF

import copy
import functools
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def triplet_sqrt_at_zero_bad():
    torch.manual_seed(0)
    centres = torch.randn(12, 16)
    labels = torch.arange(12).repeat_interleave(8)
    items = centres[labels] + 0.5 * torch.randn(96, 16)
    held = centres[labels] + 0.5 * torch.randn(96, 16)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def euclid(a, b):
        return (a - b).pow(2).sum(1).sqrt()

    def sample(n):
        a = torch.randint(0, 96, (n,))
        p = labels[a] * 8 + torch.randint(0, 8, (n,))
        neg = (labels[a] + torch.randint(1, 12, (n,))) % 12 * 8 + torch.randint(0, 8, (n,))
        return a, p, neg

    def step(i):
        a, p, n = sample(4)
        ea, ep, en = net(items[a]), net(items[p]), net(items[n])
        loss = F.relu(euclid(ea, ep) - euclid(ea, en) + 1.0).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            d = torch.cdist(net(held), net(items))
        return (labels[d.argmin(1)] != labels).float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def triplet_sqrt_at_zero_good():
    torch.manual_seed(0)
    centres = torch.randn(12, 16)
    labels = torch.arange(12).repeat_interleave(8)
    items = centres[labels] + 0.5 * torch.randn(96, 16)
    held = centres[labels] + 0.5 * torch.randn(96, 16)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def euclid(a, b):
        return (a - b).pow(2).sum(1).add(1e-8).sqrt()

    def sample(n):
        a = torch.randint(0, 96, (n,))
        p = labels[a] * 8 + torch.randint(0, 8, (n,))
        neg = (labels[a] + torch.randint(1, 12, (n,))) % 12 * 8 + torch.randint(0, 8, (n,))
        return a, p, neg

    def step(i):
        a, p, n = sample(4)
        ea, ep, en = net(items[a]), net(items[p]), net(items[n])
        loss = F.relu(euclid(ea, ep) - euclid(ea, en) + 1.0).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            d = torch.cdist(net(held), net(items))
        return (labels[d.argmin(1)] != labels).float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def maml_fast_weights_bad():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    meta_opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    names = [n for n, _ in net.named_parameters()]

    def task(gen):
        amp = torch.rand(1, generator=gen) * 2 + 1
        ph = torch.rand(1, generator=gen) * 1.5
        xs, xq = torch.rand(10, 1, generator=gen) * 6 - 3, torch.rand(20, 1, generator=gen) * 6 - 3
        return xs, amp * torch.sin(xs + ph), xq, amp * torch.sin(xq + ph)

    def adapt(xs, ys, n=1):
        fast = dict(net.named_parameters())
        for _ in range(n):
            inner = F.mse_loss(torch.func.functional_call(net, fast, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: (w - 0.05 * g).detach().requires_grad_() for (k, w), g in zip(fast.items(), grads)}
        return fast

    gen = torch.Generator().manual_seed(1)

    def step(i):
        meta_opt.zero_grad()
        total = 0.0
        for _ in range(8):
            xs, ys, xq, yq = task(gen)
            fast = adapt(xs, ys)
            loss = F.mse_loss(torch.func.functional_call(net, fast, (xq,)), yq) / 8
            loss.backward()
            total += loss.item()
        meta_opt.step()
        return total

    def probe():
        g2, tot = torch.Generator().manual_seed(7), 0.0
        for _ in range(40):
            xs, ys, xq, yq = task(g2)
            tot += F.mse_loss(torch.func.functional_call(net, adapt(xs, ys), (xq,)), yq).item() / 40
        return tot

    return {"model": net, "optimizer": meta_opt, "step": step, "steps": 20, "probe": probe}


def maml_fast_weights_good():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    meta_opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    names = [n for n, _ in net.named_parameters()]

    def task(gen):
        amp = torch.rand(1, generator=gen) * 2 + 1
        ph = torch.rand(1, generator=gen) * 1.5
        xs, xq = torch.rand(10, 1, generator=gen) * 6 - 3, torch.rand(20, 1, generator=gen) * 6 - 3
        return xs, amp * torch.sin(xs + ph), xq, amp * torch.sin(xq + ph)

    def adapt(xs, ys, n=1):
        fast = dict(net.named_parameters())
        for _ in range(n):
            inner = F.mse_loss(torch.func.functional_call(net, fast, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: w - 0.05 * g for (k, w), g in zip(fast.items(), grads)}
        return fast

    gen = torch.Generator().manual_seed(1)

    def step(i):
        meta_opt.zero_grad()
        total = 0.0
        for _ in range(8):
            xs, ys, xq, yq = task(gen)
            fast = adapt(xs, ys)
            loss = F.mse_loss(torch.func.functional_call(net, fast, (xq,)), yq) / 8
            loss.backward()
            total += loss.item()
        meta_opt.step()
        return total

    def probe():
        g2, tot = torch.Generator().manual_seed(7), 0.0
        for _ in range(40):
            xs, ys, xq, yq = task(g2)
            tot += F.mse_loss(torch.func.functional_call(net, adapt(xs, ys), (xq,)), yq).item() / 40
        return tot

    return {"model": net, "optimizer": meta_opt, "step": step, "steps": 20, "probe": probe}


def mixture_density_logsum_bad():
    torch.manual_seed(0)

    class MDN(nn.Module):
        def __init__(self, k=5):
            super().__init__()
            self.h = nn.Sequential(nn.Linear(1, 32), nn.Tanh())
            self.pi, self.mu, self.ls = nn.Linear(32, k), nn.Linear(32, k), nn.Linear(32, k)

        def forward(self, x):
            h = self.h(x)
            return F.log_softmax(self.pi(h), 1), self.mu(h), self.ls(h).clamp(-4, 2)

    def comp(mu, ls, y):
        return -0.5 * ((y - mu) / ls.exp()) ** 2 - ls - 0.5 * math.log(2 * math.pi)

    def batch(n, gen):
        y = torch.rand(n, 1, generator=gen) * 2 - 1
        x = y + 0.6 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn(n, 1, generator=gen)
        return x, y

    net = MDN()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, y = batch(128, gen)
        logpi, mu, ls = net(x)
        nll = -(logpi.exp() * comp(mu, ls, y)).sum(1).mean()
        opt.zero_grad()
        nll.backward()
        opt.step()
        return nll.item()

    def probe():
        x, y = batch(1000, torch.Generator().manual_seed(2))
        with torch.no_grad():
            logpi, mu, ls = net(x)
            return -torch.logsumexp(logpi + comp(mu, ls, y), 1).mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def mixture_density_logsum_good():
    torch.manual_seed(0)

    class MDN(nn.Module):
        def __init__(self, k=5):
            super().__init__()
            self.h = nn.Sequential(nn.Linear(1, 32), nn.Tanh())
            self.pi, self.mu, self.ls = nn.Linear(32, k), nn.Linear(32, k), nn.Linear(32, k)

        def forward(self, x):
            h = self.h(x)
            return F.log_softmax(self.pi(h), 1), self.mu(h), self.ls(h).clamp(-4, 2)

    def comp(mu, ls, y):
        return -0.5 * ((y - mu) / ls.exp()) ** 2 - ls - 0.5 * math.log(2 * math.pi)

    def batch(n, gen):
        y = torch.rand(n, 1, generator=gen) * 2 - 1
        x = y + 0.6 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn(n, 1, generator=gen)
        return x, y

    net = MDN()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, y = batch(128, gen)
        logpi, mu, ls = net(x)
        nll = -torch.logsumexp(logpi + comp(mu, ls, y), 1).mean()
        opt.zero_grad()
        nll.backward()
        opt.step()
        return nll.item()

    def probe():
        x, y = batch(1000, torch.Generator().manual_seed(2))
        with torch.no_grad():
            logpi, mu, ls = net(x)
            return -torch.logsumexp(logpi + comp(mu, ls, y), 1).mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def flow_logdet_sign_bad():
    torch.manual_seed(0)

    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 2))

        def forward(self, x):
            a, b = x.chunk(2, 1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, 1)
            s = 2 * torch.tanh(s / 2)
            b = b * s.exp() + t
            return torch.cat([b, a] if self.flip else [a, b], 1), s.squeeze(1)

    class RealNVP(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Coupling(k % 2 == 1) for k in range(4))

        def log_terms(self, x):
            ld = torch.zeros(x.size(0))
            for l in self.layers:
                x, s = l(x)
                ld = ld + s
            return -0.5 * x.pow(2).sum(1) - math.log(2 * math.pi), ld

    def moons(n, gen):
        a = torch.rand(n, generator=gen) * math.pi
        k = torch.randint(0, 2, (n,), generator=gen).float()
        x = torch.stack([a.cos() + k, torch.where(k > 0, 0.4 - a.sin(), a.sin())], 1)
        return 1.5 * x + 0.1 * torch.randn(n, 2, generator=gen)

    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        logp, logdet = flow.log_terms(moons(128, gen))
        loss = -(logp - logdet).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logp, logdet = flow.log_terms(moons(1000, torch.Generator().manual_seed(2)))
        return -(logp + logdet).mean().item()

    return {"model": flow, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def flow_logdet_sign_good():
    torch.manual_seed(0)

    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 2))

        def forward(self, x):
            a, b = x.chunk(2, 1)
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, 1)
            s = 2 * torch.tanh(s / 2)
            b = b * s.exp() + t
            return torch.cat([b, a] if self.flip else [a, b], 1), s.squeeze(1)

    class RealNVP(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Coupling(k % 2 == 1) for k in range(4))

        def log_terms(self, x):
            ld = torch.zeros(x.size(0))
            for l in self.layers:
                x, s = l(x)
                ld = ld + s
            return -0.5 * x.pow(2).sum(1) - math.log(2 * math.pi), ld

    def moons(n, gen):
        a = torch.rand(n, generator=gen) * math.pi
        k = torch.randint(0, 2, (n,), generator=gen).float()
        x = torch.stack([a.cos() + k, torch.where(k > 0, 0.4 - a.sin(), a.sin())], 1)
        return 1.5 * x + 0.1 * torch.randn(n, 2, generator=gen)

    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=5e-3)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        logp, logdet = flow.log_terms(moons(128, gen))
        loss = -(logp + logdet).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logp, logdet = flow.log_terms(moons(1000, torch.Generator().manual_seed(2)))
        return -(logp + logdet).mean().item()

    return {"model": flow, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lbfgs_closure_bad():
    torch.manual_seed(0)
    X = torch.randn(200, 6)
    Y = torch.sin(X @ torch.randn(6, 2)) + 0.02 * torch.randn(200, 2)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=10)
    optimizer.zero_grad()

    def closure():
        loss = F.mse_loss(model(X[:160]), Y[:160])
        loss.backward()
        return loss

    def step(i):
        return float(optimizer.step(closure))

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(X[:160]), Y[:160]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def lbfgs_closure_good():
    torch.manual_seed(0)
    X = torch.randn(200, 6)
    Y = torch.sin(X @ torch.randn(6, 2)) + 0.02 * torch.randn(200, 2)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=10)
    optimizer.zero_grad()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[:160]), Y[:160])
        loss.backward()
        return loss

    def step(i):
        return float(optimizer.step(closure))

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(X[:160]), Y[:160]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def ema_buffers_bad():
    torch.manual_seed(0)

    class ModelEMA:
        def __init__(self, model, decay=0.9):
            self.module = copy.deepcopy(model).eval()
            self.decay = decay
            for p in self.module.parameters():
                p.requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.module.parameters(), model.parameters()):
                e.mul_(self.decay).add_(p, alpha=1 - self.decay)

    scale = torch.rand(10) * 4 + 0.2
    shift = torch.randn(10) * 8
    protos = torch.randn(6, 10)

    def batch(n, gen):
        y = torch.randint(0, 6, (n,), generator=gen)
        return (protos[y] + 0.5 * torch.randn(n, 10, generator=gen)) * scale + shift, y

    net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 6))
    ema = ModelEMA(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, y = batch(64, gen)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        return loss.item()

    def probe():
        x, y = batch(600, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return (ema.module(x).argmax(1) != y).float().mean().item()

    return {"model": {"net": net, "ema": ema.module}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def ema_buffers_good():
    torch.manual_seed(0)

    class ModelEMA:
        def __init__(self, model, decay=0.9):
            self.module = copy.deepcopy(model).eval()
            self.decay = decay
            for p in self.module.parameters():
                p.requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.module.parameters(), model.parameters()):
                e.mul_(self.decay).add_(p, alpha=1 - self.decay)
            for e, b in zip(self.module.buffers(), model.buffers()):
                e.copy_(b)

    scale = torch.rand(10) * 4 + 0.2
    shift = torch.randn(10) * 8
    protos = torch.randn(6, 10)

    def batch(n, gen):
        y = torch.randint(0, 6, (n,), generator=gen)
        return (protos[y] + 0.5 * torch.randn(n, 10, generator=gen)) * scale + shift, y

    net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 6))
    ema = ModelEMA(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, y = batch(64, gen)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        return loss.item()

    def probe():
        x, y = batch(600, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return (ema.module(x).argmax(1) != y).float().mean().item()

    return {"model": {"net": net, "ema": ema.module}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def amp_clip_before_unscale_bad():
    torch.manual_seed(0)
    protos = torch.randn(8, 20)

    def batch(n, gen):
        y = torch.randint(0, 8, (n,), generator=gen)
        return protos[y] + 0.7 * torch.randn(n, 20, generator=gen), y

    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, y = batch(64, gen)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        x, y = batch(600, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return (model(x).argmax(1) != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def amp_clip_before_unscale_good():
    torch.manual_seed(0)
    protos = torch.randn(8, 20)

    def batch(n, gen):
        y = torch.randint(0, 8, (n,), generator=gen)
        return protos[y] + 0.7 * torch.randn(n, 20, generator=gen), y

    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, y = batch(64, gen)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        x, y = batch(600, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return (model(x).argmax(1) != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def accumulation_zeroed_bad():
    torch.manual_seed(0)

    class Trainer:
        accum = 4

        def __init__(self):
            self.protos = torch.randn(8, 16)
            self.gen = torch.Generator().manual_seed(1)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
            self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def micro(self, shard, n=16):
            y = shard * 2 + torch.randint(0, 2, (n,), generator=self.gen)
            return self.protos[y] + 0.6 * torch.randn(n, 16, generator=self.gen), y

        def train_step(self, i):
            total = 0.0
            for k in range(self.accum):
                x, y = self.micro(k)
                self.opt.zero_grad()
                loss = F.cross_entropy(self.net(x), y) / self.accum
                loss.backward()
                total += loss.item()
            self.opt.step()
            return total

    tr = Trainer()

    def probe():
        g = torch.Generator().manual_seed(2)
        y = torch.randint(0, 8, (600,), generator=g)
        x = tr.protos[y] + 0.6 * torch.randn(600, 16, generator=g)
        with torch.no_grad():
            return (tr.net(x).argmax(1) != y).float().mean().item()

    return {"model": tr.net, "optimizer": tr.opt, "step": tr.train_step, "steps": 20, "probe": probe}


def accumulation_zeroed_good():
    torch.manual_seed(0)

    class Trainer:
        accum = 4

        def __init__(self):
            self.protos = torch.randn(8, 16)
            self.gen = torch.Generator().manual_seed(1)
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
            self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

        def micro(self, shard, n=16):
            y = shard * 2 + torch.randint(0, 2, (n,), generator=self.gen)
            return self.protos[y] + 0.6 * torch.randn(n, 16, generator=self.gen), y

        def train_step(self, i):
            total = 0.0
            self.opt.zero_grad()
            for k in range(self.accum):
                x, y = self.micro(k)
                loss = F.cross_entropy(self.net(x), y) / self.accum
                loss.backward()
                total += loss.item()
            self.opt.step()
            return total

    tr = Trainer()

    def probe():
        g = torch.Generator().manual_seed(2)
        y = torch.randint(0, 8, (600,), generator=g)
        x = tr.protos[y] + 0.6 * torch.randn(600, 16, generator=g)
        with torch.no_grad():
            return (tr.net(x).argmax(1) != y).float().mean().item()

    return {"model": tr.net, "optimizer": tr.opt, "step": tr.train_step, "steps": 20, "probe": probe}


def frozen_backbone_bn_bad():
    torch.manual_seed(0)
    protos = torch.randn(6, 12)

    def source(n):
        y = torch.randint(0, 6, (n,))
        return protos[y] + 0.5 * torch.randn(n, 12), y

    backbone = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()
    )
    old_head = nn.Linear(32, 6)
    pre = torch.optim.Adam([*backbone.parameters(), *old_head.parameters()], lr=5e-3)
    for _ in range(150):
        x, y = source(64)
        l = F.cross_entropy(old_head(backbone(x)), y)
        pre.zero_grad()
        l.backward()
        pre.step()
    hx, hy = source(500)
    for p in [*backbone.parameters(), *old_head.parameters()]:
        p.requires_grad_(False)
        p.grad = None
    new_head = nn.Linear(32, 2)
    opt = torch.optim.Adam(new_head.parameters(), lr=1e-2)
    model = nn.ModuleDict({"backbone": backbone, "old_head": old_head, "new_head": new_head})

    def new_task(n):
        y = torch.randint(0, 2, (n,))
        return 2.0 * protos[y] + 2.0 + 0.5 * torch.randn(n, 12), y

    def step(i):
        model.train()
        x, y = new_task(32)
        loss = F.cross_entropy(new_head(backbone(x)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            return (old_head(backbone(hx)).argmax(1) != hy).float().mean().item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def frozen_backbone_bn_good():
    torch.manual_seed(0)
    protos = torch.randn(6, 12)

    def source(n):
        y = torch.randint(0, 6, (n,))
        return protos[y] + 0.5 * torch.randn(n, 12), y

    backbone = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()
    )
    old_head = nn.Linear(32, 6)
    pre = torch.optim.Adam([*backbone.parameters(), *old_head.parameters()], lr=5e-3)
    for _ in range(150):
        x, y = source(64)
        l = F.cross_entropy(old_head(backbone(x)), y)
        pre.zero_grad()
        l.backward()
        pre.step()
    hx, hy = source(500)
    for p in [*backbone.parameters(), *old_head.parameters()]:
        p.requires_grad_(False)
        p.grad = None
    new_head = nn.Linear(32, 2)
    opt = torch.optim.Adam(new_head.parameters(), lr=1e-2)
    model = nn.ModuleDict({"backbone": backbone, "old_head": old_head, "new_head": new_head})

    def new_task(n):
        y = torch.randint(0, 2, (n,))
        return 2.0 * protos[y] + 2.0 + 0.5 * torch.randn(n, 12), y

    def step(i):
        model.train()
        backbone.eval()
        x, y = new_task(32)
        loss = F.cross_entropy(new_head(backbone(x)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            return (old_head(backbone(hx)).argmax(1) != hy).float().mean().item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def validation_graph_kept_bad():
    torch.manual_seed(0)

    class Loop:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
            self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
            self.protos = torch.randn(4, 16)
            self.gen = torch.Generator().manual_seed(1)
            self.val = self.batch(1000)
            self.history = []

        def batch(self, n):
            y = torch.randint(0, 4, (n,), generator=self.gen)
            return self.protos[y] + 1.0 * torch.randn(n, 16, generator=self.gen), y

        def validate(self):
            x, y = self.val
            return F.cross_entropy(self.model(x), y)

        def step(self, i):
            x, y = self.batch(64)
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.history.append(self.validate())
            return loss.item()

    loop = Loop()

    def rss():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096 / 2**20

    base = rss()
    return {
        "model": loop.model,
        "optimizer": loop.opt,
        "step": loop.step,
        "steps": 20,
        "probe": lambda: rss() - base,
        "state": loop,
    }


def validation_graph_kept_good():
    torch.manual_seed(0)

    class Loop:
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
            self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
            self.protos = torch.randn(4, 16)
            self.gen = torch.Generator().manual_seed(1)
            self.val = self.batch(1000)
            self.history = []

        def batch(self, n):
            y = torch.randint(0, 4, (n,), generator=self.gen)
            return self.protos[y] + 1.0 * torch.randn(n, 16, generator=self.gen), y

        def validate(self):
            x, y = self.val
            return F.cross_entropy(self.model(x), y)

        def step(self, i):
            x, y = self.batch(64)
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            with torch.no_grad():
                self.history.append(self.validate().item())
            return loss.item()

    loop = Loop()

    def rss():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096 / 2**20

    base = rss()
    return {
        "model": loop.model,
        "optimizer": loop.opt,
        "step": loop.step,
        "steps": 20,
        "probe": lambda: rss() - base,
        "state": loop,
    }


class Block(nn.Module):
    def __init__(self, d, heads=2, drop=0.0):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(drop)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.drop(self.proj(a.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class TinyLM(nn.Module):
    def __init__(self, vocab=24, d=48, layers=2, ctx=32, drop=0.0):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.blocks = nn.ModuleList(Block(d, drop=drop) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids, mask=None, pos=None):
        pos = torch.arange(ids.size(1)) if pos is None else pos
        x = self.tok(ids) + self.pos(pos)
        for blk in self.blocks:
            x = blk(x, mask)
        return self.head(self.norm(x))


def walks(n, gen, strides=(1, 2, 3), T=24, vocab=24, noise=0.05):
    s = torch.tensor(strides)[torch.randint(0, len(strides), (n, 1), generator=gen)]
    x0 = torch.randint(0, vocab, (n, 1), generator=gen)
    ids = (x0 + s * torch.arange(T)) % vocab
    flip = torch.rand(n, T, generator=gen) < noise
    return torch.where(flip, torch.randint(0, vocab, (n, T), generator=gen), ids)


def next_token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@functools.lru_cache(None)
def pretrained(d=48, layers=2, n=150):
    torch.manual_seed(123)
    m = TinyLM(d=d, layers=layers)
    o = torch.optim.AdamW(m.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(123)
    for _ in range(n):
        ids = walks(24, g)
        l = next_token_loss(m(ids), ids)
        o.zero_grad()
        l.backward()
        o.step()
    return m.state_dict()


def base_model(d=48, layers=2):
    m = TinyLM(d=d, layers=layers)
    m.load_state_dict(pretrained(d, layers))
    return m


def lm_lora_both_zero_bad():
    pretrained()
    torch.manual_seed(0)

    class LoRALinear(nn.Module):
        def __init__(self, base, r=4, alpha=8):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.A = nn.Parameter(torch.zeros(r, base.in_features))
            self.B = nn.Parameter(torch.zeros(base.out_features, r))
            self.scale = alpha / r

        def forward(self, x):
            return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)

    model = base_model().requires_grad_(False)
    for blk in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(blk, name, LoRALinear(getattr(blk, name)))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(5, 7))
        loss = next_token_loss(model(ids), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(5, 7))
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_lora_both_zero_good():
    pretrained()
    torch.manual_seed(0)

    class LoRALinear(nn.Module):
        def __init__(self, base, r=4, alpha=8):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.A = nn.Parameter(torch.zeros(r, base.in_features))
            self.B = nn.Parameter(torch.zeros(base.out_features, r))
            nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
            self.scale = alpha / r

        def forward(self, x):
            return self.base(x) + self.scale * (x @ self.A.T @ self.B.T)

    model = base_model().requires_grad_(False)
    for blk in model.blocks:
        for name in ("qkv", "proj", "up", "down"):
            setattr(blk, name, LoRALinear(getattr(blk, name)))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(5, 7))
        loss = next_token_loss(model(ids), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(5, 7))
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_peft_reentrant_checkpointing_bad():
    from peft import LoraConfig, get_peft_model

    state = pretrained()
    torch.manual_seed(0)

    class CheckpointedLM(TinyLM):
        def forward(self, ids, mask=None, pos=None):
            x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
            for blk in self.blocks:
                x = checkpoint(blk, x, mask, use_reentrant=True)
            return self.head(self.norm(x))

    base = CheckpointedLM()
    base.load_state_dict(state)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["qkv", "proj", "up", "down"]))
    for n, p in model.named_parameters():
        if ".norm." in n:
            p.requires_grad_(True)
    model.train()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(5, 7))
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(5, 7))
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_peft_reentrant_checkpointing_good():
    from peft import LoraConfig, get_peft_model

    state = pretrained()
    torch.manual_seed(0)

    class CheckpointedLM(TinyLM):
        def forward(self, ids, mask=None, pos=None):
            x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
            for blk in self.blocks:
                x = checkpoint(blk, x, mask, use_reentrant=False)
            return self.head(self.norm(x))

    base = CheckpointedLM()
    base.load_state_dict(state)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["qkv", "proj", "up", "down"]))
    for n, p in model.named_parameters():
        if ".norm." in n:
            p.requires_grad_(True)
    model.train()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(5, 7))
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(5, 7))
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_distill_kl_input_bad():
    pretrained()
    teacher = base_model().eval().requires_grad_(False)
    torch.manual_seed(0)
    student = TinyLM(d=32, layers=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    T = 2.0
    gen = torch.Generator().manual_seed(1)

    def kd_loss(s_logits, t_logits):
        s = F.softmax(s_logits / T, dim=-1).flatten(0, 1)
        t = F.softmax(t_logits / T, dim=-1).flatten(0, 1)
        return F.kl_div(s, t, reduction="batchmean") * T * T

    def step(i):
        ids = walks(24, gen)
        with torch.no_grad():
            t_logits = teacher(ids)
        loss = kd_loss(student(ids), t_logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2))
        with torch.no_grad():
            s, t = student(ids).log_softmax(-1), teacher(ids).log_softmax(-1)
        return (t.exp() * (t - s)).sum(-1).mean().item()

    return {
        "model": {"student": student, "teacher": teacher},
        "optimizer": optimizer,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def lm_distill_kl_input_good():
    pretrained()
    teacher = base_model().eval().requires_grad_(False)
    torch.manual_seed(0)
    student = TinyLM(d=32, layers=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
    T = 2.0
    gen = torch.Generator().manual_seed(1)

    def kd_loss(s_logits, t_logits):
        s = F.log_softmax(s_logits / T, dim=-1).flatten(0, 1)
        t = F.softmax(t_logits / T, dim=-1).flatten(0, 1)
        return F.kl_div(s, t, reduction="batchmean") * T * T

    def step(i):
        ids = walks(24, gen)
        with torch.no_grad():
            t_logits = teacher(ids)
        loss = kd_loss(student(ids), t_logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2))
        with torch.no_grad():
            s, t = student(ids).log_softmax(-1), teacher(ids).log_softmax(-1)
        return (t.exp() * (t - s)).sum(-1).mean().item()

    return {
        "model": {"student": student, "teacher": teacher},
        "optimizer": optimizer,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def lm_packed_documents_bad():
    torch.manual_seed(0)
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    L, K = 6, 5

    def docs(n, gen):
        body = walks(n, gen, strides=(1, 2, 3, 4, 5, 7), T=L, noise=0.0)
        return body

    def pack(n, gen):
        d = docs(n * K, gen)
        order = ((d[:, 1] - d[:, 0]) % 24).argsort()
        rows = d[order].view(n, K * L)
        seg = torch.arange(K).repeat_interleave(L).expand(n, -1)
        return rows, seg

    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids, seg = pack(16, gen)
        t = ids.size(1)
        mask = torch.ones(t, t).tril().bool()[None, None]
        pos = torch.arange(t)
        logits = model(ids, mask, pos)
        labels = ids.clone()
        labels[:, ::L] = -100
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        d = docs(300, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return next_token_loss(model(d), d).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_packed_documents_good():
    torch.manual_seed(0)
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    L, K = 6, 5

    def docs(n, gen):
        body = walks(n, gen, strides=(1, 2, 3, 4, 5, 7), T=L, noise=0.0)
        return body

    def pack(n, gen):
        d = docs(n * K, gen)
        order = ((d[:, 1] - d[:, 0]) % 24).argsort()
        rows = d[order].view(n, K * L)
        seg = torch.arange(K).repeat_interleave(L).expand(n, -1)
        return rows, seg

    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids, seg = pack(16, gen)
        t = ids.size(1)
        mask = torch.ones(t, t).tril().bool()[None, None]
        mask = mask & (seg[:, None, :, None] == seg[:, None, None, :])
        pos = torch.arange(L).repeat(K)
        logits = model(ids, mask, pos)
        labels = ids.clone()
        labels[:, ::L] = -100
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        d = docs(300, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return next_token_loss(model(d), d).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_tail_labels_on_padding_bad():
    torch.manual_seed(0)
    PAD, SEP, R = 22, 23, 6
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch(n, gen, maxp=16):
        ids = torch.full((n, 2 + maxp + R), PAD)
        labels = torch.full_like(ids, -100)
        for b in range(n):
            p = int(torch.randint(4, maxp + 1, (1,), generator=gen))
            prompt = torch.randint(0, 22, (p,), generator=gen)
            answer = (prompt[-1] + 2 * torch.arange(1, R + 1)) % 22
            row = torch.cat([prompt, torch.tensor([SEP]), answer])
            ids[b, : len(row)] = row
            labels[b, p + 1 : p + 1 + R] = answer
        return ids, labels

    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids, labels = batch(24, gen)
        labels = torch.full_like(ids, -100)
        labels[:, -R:] = ids[:, -R:]
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids, labels = batch(200, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_tail_labels_on_padding_good():
    torch.manual_seed(0)
    PAD, SEP, R = 22, 23, 6
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batch(n, gen, maxp=16):
        ids = torch.full((n, 2 + maxp + R), PAD)
        labels = torch.full_like(ids, -100)
        for b in range(n):
            p = int(torch.randint(4, maxp + 1, (1,), generator=gen))
            prompt = torch.randint(0, 22, (p,), generator=gen)
            answer = (prompt[-1] + 2 * torch.arange(1, R + 1)) % 22
            row = torch.cat([prompt, torch.tensor([SEP]), answer])
            ids[b, : len(row)] = row
            labels[b, p + 1 : p + 1 + R] = answer
        return ids, labels

    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids, labels = batch(24, gen)
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids, labels = batch(200, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_resume_prefix_bad():
    ckpt = {"model": {"module." + k: v.clone() for k, v in pretrained().items()}, "step": 150}
    torch.manual_seed(0)

    class Run:
        def __init__(self):
            self.model = TinyLM()
            self.optim = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
            self.gen = torch.Generator().manual_seed(1)
            self.resume(ckpt)

        def resume(self, ckpt):
            state = ckpt["model"]
            self.model.load_state_dict(state, strict=False)
            self.done = ckpt["step"]

        def train_step(self, i):
            ids = walks(16, self.gen)
            loss = next_token_loss(self.model(ids), ids)
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.done += 1
            return loss.item()

    run = Run()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return next_token_loss(run.model(ids), ids).item()

    return {
        "model": run.model,
        "optimizer": run.optim,
        "step": run.train_step,
        "steps": 20,
        "probe": probe,
        "checkpoint": ckpt,
    }


def lm_resume_prefix_good():
    ckpt = {"model": {"module." + k: v.clone() for k, v in pretrained().items()}, "step": 150}
    torch.manual_seed(0)

    class Run:
        def __init__(self):
            self.model = TinyLM()
            self.optim = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
            self.gen = torch.Generator().manual_seed(1)
            self.resume(ckpt)

        def resume(self, ckpt):
            state = ckpt["model"]
            state = {k.removeprefix("module."): v for k, v in state.items()}
            self.model.load_state_dict(state, strict=False)
            self.done = ckpt["step"]

        def train_step(self, i):
            ids = walks(16, self.gen)
            loss = next_token_loss(self.model(ids), ids)
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.done += 1
            return loss.item()

    run = Run()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return next_token_loss(run.model(ids), ids).item()

    return {
        "model": run.model,
        "optimizer": run.optim,
        "step": run.train_step,
        "steps": 20,
        "probe": probe,
        "checkpoint": ckpt,
    }


def lm_warmup_floor_bad():
    pretrained()
    torch.manual_seed(0)
    model = base_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warmup, total = 40, 400

    def factor(s):
        if s < warmup:
            return s // warmup
        return 0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(5, 7))
        loss = next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(5, 7))
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe, "scheduler": scheduler}


def lm_warmup_floor_good():
    pretrained()
    torch.manual_seed(0)
    model = base_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warmup, total = 40, 400

    def factor(s):
        if s < warmup:
            return (s + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(5, 7))
        loss = next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(5, 7))
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe, "scheduler": scheduler}


def lm_accum_mean_of_means_bad():
    torch.manual_seed(0)
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(1)

    def group():
        micro = []
        for k in range(4):
            ids = walks(8, gen, noise=0.0)
            labels = ids.clone()
            if k < 3:
                labels[:, 2:] = -100
            micro.append((ids, labels))
        return micro

    def loss_sum(ids, labels, reduction):
        return F.cross_entropy(
            model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction
        )

    def step(i):
        micro = group()
        n_tok = sum((l[:, 1:] != -100).sum() for _, l in micro)
        opt.zero_grad()
        total = 0.0
        for ids, labels in micro:
            loss = loss_sum(ids, labels, "mean") / len(micro)
            loss.backward()
            total += loss.item()
        opt.step()
        return total

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), noise=0.0)
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_accum_mean_of_means_good():
    torch.manual_seed(0)
    model = TinyLM()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(1)

    def group():
        micro = []
        for k in range(4):
            ids = walks(8, gen, noise=0.0)
            labels = ids.clone()
            if k < 3:
                labels[:, 2:] = -100
            micro.append((ids, labels))
        return micro

    def loss_sum(ids, labels, reduction):
        return F.cross_entropy(
            model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction=reduction
        )

    def step(i):
        micro = group()
        n_tok = sum((l[:, 1:] != -100).sum() for _, l in micro)
        opt.zero_grad()
        total = 0.0
        for ids, labels in micro:
            loss = loss_sum(ids, labels, "sum") / n_tok
            loss.backward()
            total += loss.item()
        opt.step()
        return total

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), noise=0.0)
        with torch.no_grad():
            return next_token_loss(model(ids), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_bf16_weights_bad():
    pretrained()
    torch.manual_seed(0)
    model = base_model()
    model = model.to(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(2, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss = next_token_loss(logits.float(), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(2, 4))
        with torch.no_grad():
            return next_token_loss(model(ids).float(), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_bf16_weights_good():
    pretrained()
    torch.manual_seed(0)
    model = base_model()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        ids = walks(16, gen, strides=(2, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        loss = next_token_loss(logits.float(), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2), strides=(2, 4))
        with torch.no_grad():
            return next_token_loss(model(ids).float(), ids).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def lm_dpo_reference_alias_bad():
    pretrained()
    torch.manual_seed(0)
    policy = base_model()
    reference = policy
    opt = torch.optim.AdamW(policy.parameters(), lr=2e-4)
    gen = torch.Generator().manual_seed(1)

    def seq_logp(model, ids):
        lp = model(ids).log_softmax(-1)[:, 7:-1]
        return lp.gather(2, ids[:, 8:, None]).squeeze(2).sum(1)

    def pair(n):
        head = walks(n, gen, T=8, noise=0.0)
        last, stride = head[:, -1:], (head[:, 1:2] - head[:, :1]) % 24
        k = torch.arange(1, 9)
        return torch.cat([head, (last + stride * k) % 24], 1), torch.cat([head, (last + (stride + 1) * k) % 24], 1)

    def step(i):
        chosen, rejected = pair(16)
        with torch.no_grad():
            rc, rr = seq_logp(reference, chosen), seq_logp(reference, rejected)
        margin = (seq_logp(policy, chosen) - rc) - (seq_logp(policy, rejected) - rr)
        loss = -F.logsigmoid(0.1 * margin).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return next_token_loss(policy(ids), ids).item()

    return {
        "model": {"policy": policy, "reference": reference},
        "optimizer": opt,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def lm_dpo_reference_alias_good():
    pretrained()
    torch.manual_seed(0)
    policy = base_model()
    reference = copy.deepcopy(policy).requires_grad_(False)
    opt = torch.optim.AdamW(policy.parameters(), lr=2e-4)
    gen = torch.Generator().manual_seed(1)

    def seq_logp(model, ids):
        lp = model(ids).log_softmax(-1)[:, 7:-1]
        return lp.gather(2, ids[:, 8:, None]).squeeze(2).sum(1)

    def pair(n):
        head = walks(n, gen, T=8, noise=0.0)
        last, stride = head[:, -1:], (head[:, 1:2] - head[:, :1]) % 24
        k = torch.arange(1, 9)
        return torch.cat([head, (last + stride * k) % 24], 1), torch.cat([head, (last + (stride + 1) * k) % 24], 1)

    def step(i):
        chosen, rejected = pair(16)
        with torch.no_grad():
            rc, rr = seq_logp(reference, chosen), seq_logp(reference, rejected)
        margin = (seq_logp(policy, chosen) - rc) - (seq_logp(policy, rejected) - rr)
        loss = -F.logsigmoid(0.1 * margin).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        ids = walks(100, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return next_token_loss(policy(ids), ids).item()

    return {
        "model": {"policy": policy, "reference": reference},
        "optimizer": opt,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


CASES = [
    {
        "name": "triplet_sqrt_at_zero",
        "what": "The distance takes sqrt of an exact zero when the positive is the anchor itself, so its gradient is NaN and all weights become NaN.",
        "cause": "NaN gradient of sqrt at zero",
        "where": "euclid / all parameters",
        "kind": "metric learning",
    },
    {
        "name": "maml_fast_weights",
        "what": "The adapted weights are detached from the initial ones, so the meta parameters never receive a gradient.",
        "cause": "detached inner-loop weights; grads None",
        "where": "adapt / all net parameters",
        "kind": "meta learning",
    },
    {
        "name": "mixture_density_logsum",
        "what": "The mixture NLL averages the components' log densities rather than taking logsumexp, so all components fit the mean.",
        "cause": "sum of logs instead of log of sum",
        "where": "nll in step",
        "kind": "mixture density",
    },
    {
        "name": "flow_logdet_sign",
        "what": "The log-determinant is subtracted instead of added, so the flow contracts everything to a point.",
        "cause": "log-det sign",
        "where": "loss in step / Coupling nets",
        "kind": "normalising flow",
    },
    {
        "name": "lbfgs_closure",
        "what": "The LBFGS closure never clears the gradients, so every evaluation adds to the last.",
        "cause": "missing zero_grad in closure",
        "where": "closure",
        "kind": "LBFGS regression",
    },
    {
        "name": "ema_buffers",
        "what": "The EMA copy averages parameters only; its BatchNorm statistics stay at initialisation, so the EMA model is useless in eval.",
        "cause": "EMA does not copy buffers",
        "where": "ema.1 running_mean / running_var",
        "kind": "EMA classifier",
    },
    {
        "name": "amp_clip_before_unscale",
        "what": "Gradients are clipped while still multiplied by the loss scale, so after unscaling the updates are thousands of times too small.",
        "cause": "clip_grad_norm_ without scaler.unscale_",
        "where": "step (scaler / clip)",
        "kind": "AMP classifier",
    },
    {
        "name": "accumulation_zeroed",
        "what": "zero_grad runs for every micro-batch, so only the last one counts, and it holds only some of the classes.",
        "cause": "zero_grad inside accumulation loop",
        "where": "Trainer.train_step",
        "kind": "gradient accumulation",
    },
    {
        "name": "frozen_backbone_bn",
        "what": "The frozen backbone is left in train mode, so its BatchNorm statistics drift to the new data and the old head breaks.",
        "cause": "frozen BatchNorm in train mode",
        "where": "backbone BatchNorm buffers",
        "kind": "fine-tuning",
    },
    {
        "name": "validation_graph_kept",
        "what": "Validation losses are kept as live tensors outside no_grad, so each one holds its whole graph and memory grows.",
        "cause": "memory leak through kept graphs",
        "where": "Loop.history",
        "kind": "classifier loop",
    },
    {
        "name": "lm_lora_both_zero",
        "what": "Both LoRA matrices start at zero, so each has zero gradient and the adapter never moves.",
        "cause": "LoRA A and B both zero",
        "where": "LoRALinear.A, B",
        "kind": "LM LoRA",
    },
    {
        "name": "lm_peft_reentrant_checkpointing",
        "what": "Reentrant checkpointing over frozen embeddings (no input needs a gradient) cuts the graph, so the LoRA weights get no gradient and only the final norm trains.",
        "cause": "reentrant checkpoint input has no grad",
        "where": "lora_A, lora_B in all blocks",
        "kind": "LM peft",
    },
    {
        "name": "lm_distill_kl_input",
        "what": "kl_div is given student probabilities where it needs log-probabilities.",
        "cause": "kl_div input not log",
        "where": "kd_loss",
        "kind": "LM distillation",
    },
    {
        "name": "lm_packed_documents",
        "what": "Packed documents attend to their neighbours, with running positions, so the model leans on the preceding documents and does worse on single ones (plain at 200 steps, small by 400).",
        "cause": "cross-document attention in packing",
        "where": "mask and pos in step",
        "kind": "LM packing",
    },
    {
        "name": "lm_tail_labels_on_padding",
        "what": "Labels are taken from the last R columns of right-padded rows, so most supervised tokens are padding and answers are left out.",
        "cause": "labels on padding, responses unsupervised",
        "where": "labels in step",
        "kind": "LM masking",
    },
    {
        "name": "lm_resume_prefix",
        "what": "The checkpoint's keys carry 'module.' and load_state_dict(strict=False) loads none of them, so training resumes from random weights.",
        "cause": "strict=False swallows key mismatch",
        "where": "Run.resume",
        "kind": "LM resume",
    },
    {
        "name": "lm_warmup_floor",
        "what": "The warmup factor uses integer division and is zero for the whole warmup, so nothing moves.",
        "cause": "learning rate zero",
        "where": "factor / scheduler",
        "kind": "LM scheduler",
    },
    {
        "name": "lm_accum_mean_of_means",
        "what": "Micro-batches with very unequal token counts are averaged as means of means, so short ones outweigh long ones.",
        "cause": "accumulation not normalised by tokens",
        "where": "loss in step",
        "kind": "LM accumulation",
    },
    {
        "name": "lm_bf16_weights",
        "what": "The weights themselves are bfloat16, so most small Adam updates are rounded away.",
        "cause": "updates lost in bf16 weights",
        "where": "all parameters",
        "kind": "LM precision",
    },
    {
        "name": "lm_dpo_reference_alias",
        "what": "The DPO reference is the policy object itself, so the margin is always zero, the loss stays at log 2 and nothing anchors the policy.",
        "cause": "reference model aliases policy",
        "where": "reference",
        "kind": "LM DPO",
    },
]
