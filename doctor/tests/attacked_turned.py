"""57 healthy programs by somebody who had read the checks F74 to F80 and D19 and looked for what they would wrongly blame.
44 were blamed at first; test_attacked.py names those that still are.

They are kept as they were written.
"""
# ruff: noqa

import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal, Independent, TransformedDistribution, TanhTransform

PROGRAMS = {}


def program(fn):
    def run():
        torch.manual_seed(0)
        np.random.seed(0)
        return fn()
    PROGRAMS[fn.__name__] = run
    return fn


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# ---------------------------------------------------------------- portion 1: F74
@program
def f74_time_contrastive_network():
    """F74: TCN (Sermanet 2018): positive = same moment, other camera; negative = same camera, a bit later."""
    T, D = 400, 24
    g = torch.Generator().manual_seed(1)
    state = torch.cumsum(torch.randn(T, 6, generator=g) * 0.3, 0)
    state = (state - state.mean(0)) / state.std(0)
    V1, V2 = torch.randn(6, D, generator=g), torch.randn(6, D, generator=g)
    b1, b2 = torch.randn(D, generator=g), torch.randn(D, generator=g)
    cam1, cam2 = torch.tanh(state @ V1 / 2.5 + b1), torch.tanh(state @ V2 / 2.5 + b2)
    net = mlp(D, 64, 64, 16)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        t = torch.randint(20, T - 20, (64,))
        off = torch.randint(6, 15, (64,)) * (torch.randint(0, 2, (64,)) * 2 - 1)
        a, p, n = (F.normalize(net(x), dim=1) for x in (cam1[t], cam2[t], cam1[t + off]))
        loss = F.triplet_margin_loss(a, p, n, margin=0.2)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f74_cross_domain_triplet():
    """F74: domain generalisation: positive = same class of another domain, negative = other class of the same domain."""
    C, D = 5, 20
    g = torch.Generator().manual_seed(2)
    proto, shift = torch.randn(C, D, generator=g), 2 * torch.randn(3, D, generator=g)
    draw = lambda c, d: proto[c] + shift[d] + 0.4 * torch.randn(len(c), D)
    net = nn.Sequential(nn.Linear(D, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    crit = nn.TripletMarginLoss(margin=1.0)
    for _ in range(8):
        c, d = torch.randint(C, (64,)), torch.randint(3, (64,))
        a = draw(c, d)
        p = draw(c, (d + torch.randint(1, 3, (64,))) % 3)
        n = draw((c + torch.randint(1, C, (64,))) % C, d)
        loss = crit(net(a), net(p), net(n))
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f74_mined_near_negatives():
    """F74: hard negatives as in dense retrieval (BM25): the nearest input of another class; positives at random."""
    N, C, D = 600, 6, 16
    g = torch.Generator().manual_seed(3)
    y = torch.randint(C, (N,), generator=g)
    x = torch.randn(C, D, generator=g)[y] * 0.7 + torch.randn(N, D, generator=g)
    dist = torch.cdist(x, x)
    dist[y[:, None] == y[None]] = 1e9
    hard = dist.topk(5, largest=False).indices
    net = mlp(D, 64, 32)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        i = torch.randint(N, (64,))
        pos = torch.tensor([int(np.random.choice(np.flatnonzero((y == y[k]).numpy()))) for k in i])
        neg = hard[i, torch.randint(5, (64,))]
        za, zp, zn = net(x[i]), net(x[pos]), net(x[neg])
        loss = F.relu(F.pairwise_distance(za, zp) - F.pairwise_distance(za, zn) + 1.0).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f74_rotated_clouds():
    """F74: rotation-invariant descriptor: positive = same cloud, rotated and scaled; negative = other cloud, canonical."""
    N, P = 300, 16
    g = torch.Generator().manual_seed(4)
    base = torch.randn(P, 3, generator=g) * torch.tensor([2.0, 1.0, 0.3])
    clouds = base + 0.35 * torch.randn(N, P, 3, generator=g)
    net = nn.Sequential(nn.Flatten(), mlp(P * 3, 128, 64, 16))
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        i = torch.randint(N, (64,))
        j = (i + torch.randint(1, N, (64,))) % N
        q, _ = torch.linalg.qr(torch.randn(64, 3, 3))
        pos = torch.einsum("bpc,bcd->bpd", clouds[i], q)
        a, p, n = net(clouds[i]), net(pos), net(clouds[j])
        loss = F.triplet_margin_loss(a, p, n, margin=0.5, swap=True)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f74_counterfactual_pairs():
    """F74: contrastive loss with counterfactually edited negatives (one decisive feature changed), positives of a class."""
    D = 24
    net = mlp(D, 64, 16)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        x = torch.randn(128, D)
        x[:, 0] = torch.sign(x[:, 0]) * 1.5
        same = (torch.rand(128) < 0.5).float()
        other = torch.randn(128, D)
        other[:, 0] = x[:, 0]
        edited = x.clone()
        edited[:, 0] = -x[:, 0]
        y = torch.where(same[:, None] == 1, other, edited)
        d = F.pairwise_distance(net(x), net(y))
        loss = (same * d ** 2 + (1 - same) * F.relu(2.0 - d) ** 2).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ---------------------------------------------------------------- portion 1: F79
@program
def f79_neus_eikonal():
    """F79: eikonal loss of a signed distance field (NeuS/IGR) at (rays, samples, 3): a length for each point is right."""
    sdf = mlp(3, 64, 64, 1, act=nn.Softplus)
    opt = torch.optim.Adam(sdf.parameters(), 1e-3)
    for _ in range(8):
        pts = torch.rand(32, 8, 3) * 2 - 1
        pts.requires_grad_(True)
        d = sdf(pts)
        grad = torch.autograd.grad(d, pts, torch.ones_like(d), create_graph=True)[0]
        eik = ((grad.norm(2, dim=-1) - 1.0) ** 2).mean()
        loss = F.l1_loss(d.squeeze(-1), pts.detach().norm(dim=-1) - 0.5) + 0.1 * eik
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f79_eikonal_pinn_grid():
    """F79: eikonal equation |grad T| = 1/v on a grid of coordinates (H, W, 2), speed 1."""
    net = mlp(2, 48, 48, 1, act=nn.Tanh)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    lin = torch.linspace(0, 1, 16)
    for _ in range(8):
        xy = torch.stack(torch.meshgrid(lin, lin, indexing="ij"), -1).requires_grad_(True)
        u = net(xy)
        du = torch.autograd.grad(u.sum(), xy, create_graph=True)[0]
        res = torch.sqrt((du ** 2).sum(-1) + 1e-8) - 1.0
        src = net(torch.zeros(1, 2)).pow(2).mean()
        loss = res.pow(2).mean() + src
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f79_gradient_norm_regularised_weights():
    """F79: GradNorm-like: the norm of the gradient of a shared weight is held at a fixed size; it is no batch of rows."""
    net, heads = mlp(10, 32, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
    w = nn.Parameter(torch.ones(2))
    opt = torch.optim.Adam([*net.parameters(), *heads.parameters()], 1e-3)
    wopt = torch.optim.Adam([w], 1e-2)
    A = torch.randn(10, 2)
    for _ in range(8):
        x = torch.randn(64, 10)
        y = x @ A * torch.tensor([1.0, 5.0])
        h = net(x)
        losses = [F.mse_loss(head(h), y[:, i:i + 1]) for i, head in enumerate(heads)]
        W = net[-1].weight
        norms = [torch.norm(torch.autograd.grad(w[i] * losses[i], W, create_graph=True)[0]) for i in range(2)]
        target = float(sum(n.detach() for n in norms) / 2)
        gn = sum((n - target).abs() for n in norms)
        w.grad = torch.autograd.grad(gn, w, retain_graph=True)[0]
        opt.zero_grad()
        (sum(w.detach()[i] * losses[i] for i in range(2))).backward()
        opt.step(); wopt.step()
        with torch.no_grad():
            w.mul_(2 / w.sum())


# ---------------------------------------------------------------- portion 2: F76
@program
def f76_cost_critics_pessimistic_max():
    """F76: safe RL (twin cost critics, SAC-Lagrangian): pessimism about a COST is the larger of the two."""
    qs = [mlp(8, 32, 1) for _ in range(2)]
    ts = [mlp(8, 32, 1) for _ in range(2)]
    for q, t in zip(qs, ts):
        t.load_state_dict(q.state_dict())
    pi = mlp(6, 32, 2)
    qopt = torch.optim.Adam([p for q in qs for p in q.parameters()], 1e-3)
    popt = torch.optim.Adam(pi.parameters(), 1e-3)
    for _ in range(8):
        s, a, s2 = torch.randn(64, 6), torch.rand(64, 2) * 2 - 1, torch.randn(64, 6)
        cost, done = (s[:, :1] > 1).float(), (torch.rand(64, 1) < 0.05).float()
        with torch.no_grad():
            x2 = torch.cat([s2, torch.tanh(pi(s2))], 1)
            target = cost + 0.99 * (1 - done) * torch.max(ts[0](x2), ts[1](x2))
        x = torch.cat([s, a], 1)
        loss = F.mse_loss(qs[0](x), target) + F.mse_loss(qs[1](x), target)
        qopt.zero_grad(); loss.backward(); qopt.step()
        x = torch.cat([s, torch.tanh(pi(s))], 1)
        ploss = torch.max(qs[0](x), qs[1](x)).mean()
        popt.zero_grad(); ploss.backward(); popt.step()
        with torch.no_grad():
            for q, t in zip(qs, ts):
                for p, tp in zip(q.parameters(), t.parameters()):
                    tp.lerp_(p, 0.005)


@program
def f76_linear_q_two_actions():
    """F76: course code: Q-learning with one linear function per action and two actions: max over the actions."""
    q0, q1 = nn.Linear(12, 1), nn.Linear(12, 1)
    opt = torch.optim.SGD([*q0.parameters(), *q1.parameters()], 0.05)
    for _ in range(8):
        s, s2 = torch.rand(64, 12), torch.rand(64, 12)
        a = torch.randint(0, 2, (64, 1))
        r = (s[:, :1] > 0.5).float() * (a * 2 - 1)
        with torch.no_grad():
            target = r + 0.9 * torch.maximum(q0(s2), q1(s2))
        q = torch.where(a == 0, q0(s), q1(s))
        loss = F.mse_loss(q, target)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f76_optimal_stopping():
    """F76: optimal stopping: value of the next state = max(value of going on, value of stopping), two learned heads."""
    body, go, stop = mlp(5, 32, 32), nn.Linear(32, 1), nn.Linear(32, 1)
    opt = torch.optim.Adam([*body.parameters(), *go.parameters(), *stop.parameters()], 1e-3)
    for _ in range(8):
        s = torch.randn(64, 5)
        s2 = s + 0.3 * torch.randn(64, 5)
        pay = F.relu(s.sum(1, keepdim=True))
        with torch.no_grad():
            h2 = torch.relu(body(s2))
            cont = 0.95 * torch.max(go(h2), stop(h2))
        h = torch.relu(body(s))
        loss = F.mse_loss(stop(h), pay) + F.mse_loss(go(h), cont)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f76_ppo_critic_warmup():
    """F76: PPO with value pre-training: the policy's coefficient is 0 in the first updates; -min(a, b) is right."""
    body, mu, v = mlp(6, 32, 32, act=nn.Tanh), nn.Linear(32, 2), nn.Linear(32, 1)
    log_std = nn.Parameter(torch.zeros(2))
    params = [*body.parameters(), *mu.parameters(), *v.parameters(), log_std]
    opt = torch.optim.Adam(params, 3e-4)
    for step in range(8):
        pg_coef = 0.0 if step < 20 else 1.0
        s = torch.randn(64, 6)
        with torch.no_grad():
            old = Normal(mu(body(s)), log_std.exp())
            a = old.sample()
            logp_old, ret = old.log_prob(a).sum(1), torch.randn(64) + s[:, 0]
            adv = ret - v(body(s)).squeeze(1)
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        h = body(s)
        new = Normal(mu(h), log_std.exp())
        ratio = (new.log_prob(a).sum(1) - logp_old).exp()
        pg = -torch.min(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv).mean()
        vf = F.mse_loss(v(h).squeeze(1), ret)
        loss = pg_coef * pg + 0.5 * vf
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f76_dual_clip_cost_lagrange():
    """F76: PPO-Lagrangian: reward objective by min, cost surrogate by max, and dual clip."""
    body, mu = mlp(6, 32, 32, act=nn.Tanh), nn.Linear(32, 2)
    lam = nn.Parameter(torch.tensor(0.5))
    opt = torch.optim.Adam([*body.parameters(), *mu.parameters()], 3e-4)
    for _ in range(8):
        s = torch.randn(64, 6)
        a = torch.randn(64, 2)
        adv, cadv = torch.randn(64), torch.randn(64)
        with torch.no_grad():
            old = Normal(mu(body(s)), 1.0).log_prob(a).sum(1)
        ratio = (Normal(mu(body(s)), 1.0).log_prob(a).sum(1) - old).exp()
        cut = ratio.clamp(0.8, 1.2)
        low = torch.min(ratio * adv, cut * adv)
        pg = -torch.where(adv < 0, torch.max(low, 3.0 * adv), low).mean()
        cost = torch.max(ratio * cadv, cut * cadv).mean()
        loss = (pg + lam.detach() * cost) / (1 + lam.detach())
        opt.zero_grad(); loss.backward(); opt.step()


# ---------------------------------------------------------------- portion 2: F77
def sac(correct):
    pi, log = mlp(6, 32, 4), None
    q = mlp(8, 32, 1)
    opt = torch.optim.Adam(pi.parameters(), 1e-3)
    qopt = torch.optim.Adam(q.parameters(), 1e-3)
    for _ in range(8):
        s = torch.randn(64, 6)
        a0 = torch.rand(64, 2) * 2 - 1
        ql = F.mse_loss(q(torch.cat([s, a0], 1)), -(a0 - s[:, :2].tanh()).pow(2).sum(1, keepdim=True))
        qopt.zero_grad(); ql.backward(); qopt.step()
        m, ls = pi(s).chunk(2, 1)
        dist = Normal(m, ls.clamp(-5, 2).exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = correct(dist, u, a)
        loss = (0.2 * logp - q(torch.cat([s, a], 1)).squeeze(1)).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f77_correction_by_cosh():
    """F77: the correction as log cosh: log(1 - tanh(u)^2) = -2 log cosh(u)."""
    sac(lambda d, u, a: (d.log_prob(u) + 2 * torch.log(torch.cosh(u))).sum(1))


@program
def f77_correction_by_logaddexp():
    """F77: the stable correction with logaddexp: log cosh(u) = logaddexp(u, -u) - log 2."""
    sac(lambda d, u, a: (d.log_prob(u) + 2 * (torch.logaddexp(u, -u) - math.log(2))).sum(-1))


@program
def f77_correction_by_inverse_slope():
    """F77: the correction as the logarithm of the slope of the inverse: + log(1 / (1 - a^2))."""
    sac(lambda d, u, a: d.log_prob(u).sum(1) + torch.log(1.0 / (1.0 - a.pow(2) + 1e-6)).sum(1))


@program
def f77_correction_by_product():
    """F77: the correction as the logarithm of the determinant: log prod(1 - a^2)."""
    sac(lambda d, u, a: d.log_prob(u).sum(1) - torch.log((1 - a ** 2).prod(1) + 1e-6))


@program
def f77_skill_prior_kl():
    """F77: SPiRL: instead of an entropy, a KL to a prior over the same u, where the corrections cancel."""
    prior = mlp(6, 16, 4)

    def kl(d, u, a):
        return (d.log_prob(u) - Normal(0.0, 1.0).log_prob(u)).sum(1)
    sac(kl)


@program
def f77_advi_correlation():
    """F77: variational inference of a correlation rho = tanh(u) with the prior on u: the ELBO needs no correction."""
    loc, ls = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((1,), -1.0))
    opt = torch.optim.Adam([loc, ls], 0.05)
    x = torch.randn(200)
    y = 0.6 * x + 0.8 * torch.randn(200)
    for _ in range(8):
        q = Normal(loc, ls.exp())
        u = q.rsample((32,))
        rho = torch.tanh(u)
        ll = Normal(rho * x, (1 - rho ** 2 + 1e-4).sqrt()).log_prob(y).sum(1)
        kl = (q.log_prob(u) - Normal(0.0, 1.0).log_prob(u)).sum(1)
        loss = (kl - ll).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f77_vae_bounded_latent():
    """F77: VAE with Monte Carlo KL on the latent before a tanh that belongs to the decoder: nothing to correct."""
    enc, dec = mlp(20, 64, 16), nn.Sequential(nn.Tanh(), mlp(8, 64, 20))
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 1e-3)
    A = torch.randn(5, 20)
    for _ in range(8):
        x = torch.randn(64, 5) @ A / 2 + 0.1 * torch.randn(64, 20)
        m, ls = enc(x).chunk(2, 1)
        q = Normal(m, F.softplus(ls) + 1e-3)
        z = q.rsample()
        kl = (q.log_prob(z) - Normal(torch.zeros_like(m), torch.ones_like(m)).log_prob(z)).sum(1)
        rec = (dec(z) - x).pow(2).sum(1)
        loss = (rec + kl).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ---------------------------------------------------------------- portion 3: F75
@program
def f75_vae_monte_carlo_kl():
    """F75: VAE, KL by Monte Carlo with log p(z) of a unit normal, annealed: z goes away from 0 to rebuild x."""
    enc, dec = mlp(20, 64, 16), mlp(8, 64, 20)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 1e-3)
    A = torch.randn(5, 20)
    for step in range(8):
        x = torch.randn(64, 5) @ A + 0.1 * torch.randn(64, 20)
        m, ls = enc(x).chunk(2, 1)
        q = Normal(m, F.softplus(ls) + 1e-3)
        z = q.rsample()
        kl = (q.log_prob(z) - Normal(torch.zeros_like(m), torch.ones_like(m)).log_prob(z)).sum(1)
        rec = (dec(z) - x).pow(2).sum(1)
        loss = (rec + min(1.0, step / 1000) * kl).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f75_reinforce_negative_rewards():
    """F75: REINFORCE with a Gaussian policy where all rewards are costs (Pendulum), no baseline: away from all actions."""
    pi, log_std = mlp(3, 64, 1, act=nn.Tanh), nn.Parameter(torch.zeros(1))
    opt = torch.optim.Adam([*pi.parameters(), log_std], 1e-3)
    for _ in range(8):
        s = torch.randn(128, 3)
        dist = Normal(pi(s), log_std.exp())
        a = dist.sample()
        reward = -(s[:, 0] ** 2 + 0.1 * s[:, 1] ** 2 + 0.01 * (a[:, 0] - s[:, 2]) ** 2)
        loss = -(dist.log_prob(a).sum(1) * reward).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f75_ppo_untrained_critic():
    """F75: PPO (no normalised advantages) on a task with negative rewards, critic still near 0."""
    pi, v, log_std = mlp(3, 64, 1, act=nn.Tanh), mlp(3, 64, 1, act=nn.Tanh), nn.Parameter(torch.zeros(1))
    opt = torch.optim.Adam([*pi.parameters(), log_std], 3e-4)
    vopt = torch.optim.Adam(v.parameters(), 1e-3)
    for it in range(2):
        s = torch.randn(256, 3)
        with torch.no_grad():
            mean = pi(s)
        a = torch.from_numpy(mean.numpy() + np.random.randn(256, 1).astype("float32"))
        ret = -(2 + s[:, 0] ** 2 + (a[:, 0] - s[:, 2]) ** 2)
        old = Normal(mean, 1.0).log_prob(a).sum(1)
        adv = ret - v(s).squeeze(1).detach()
        for mb in torch.arange(256).split(64):
            ratio = (Normal(pi(s[mb]), log_std.exp()).log_prob(a[mb]).sum(1) - old[mb]).exp()
            loss = -torch.min(ratio * adv[mb], ratio.clamp(0.8, 1.2) * adv[mb]).mean()
            opt.zero_grad(); loss.backward(); opt.step()
        vl = (v(s).squeeze(1) - ret).square().mean()
        vopt.zero_grad(); vl.backward(); vopt.step()


@program
def f75_deep_sad():
    """F75: Deep SAD (Ruff 2020): centre c fixed before training; the few labelled anomalies have 1 / distance."""
    net = nn.Sequential(nn.Linear(12, 32, bias=False), nn.LeakyReLU(), nn.Linear(32, 8, bias=False))
    def batch():
        x = torch.randn(64, 12)
        semi = torch.zeros(64)
        x[:6] += 0.5
        semi[:6] = -1
        return x, semi
    with torch.no_grad():
        c = torch.cat([net(batch()[0]) for _ in range(5)]).mean(0)
        c[(c.abs() < 0.1) & (c < 0)] = -0.1
        c[(c.abs() < 0.1) & (c > 0)] = 0.1
    opt = torch.optim.Adam(net.parameters(), 1e-4, weight_decay=1e-6)
    for _ in range(8):
        x, semi = batch()
        z = net(x)
        dist = F.mse_loss(z, c.expand_as(z), reduction="none").sum(1)
        losses = torch.where(semi == 0, dist, 1.0 / (dist + 1e-6))
        loss = losses.mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f75_fairness_decorrelation():
    """F75: a pretrained classifier is debiased: cross-entropy and the squared correlation of logit and attribute."""
    net = mlp(10, 32, 1)
    with torch.no_grad():  # as pretrained: relu(v) - relu(-v) of x0 + x1
        net[0].weight[:2, :2] = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
        net[2].weight[0, :2] = torch.tensor([1.5, -1.5])
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        x = torch.randn(128, 10)
        y = (x[:, 0] + x[:, 1] > 0).float()
        s = x[:, 0] + 0.3 * torch.randn(128)
        logit = net(x).squeeze(1)
        lc, sc = logit - logit.mean(), s - s.mean()
        corr = (lc * sc).mean() / (lc.pow(2).mean().sqrt() * sc.pow(2).mean().sqrt() + 1e-8)
        loss = F.binary_cross_entropy_with_logits(logit, y) + 1.0 * corr ** 2
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f75_universal_perturbation():
    """F75: a universal adversarial perturbation against a frozen regressor: its loss is the negated error."""
    net = mlp(10, 32, 2)
    o = torch.optim.Adam(net.parameters(), 1e-2)
    A = torch.randn(10, 2)
    X = torch.randn(512, 10)
    for p in net.parameters():
        p.requires_grad_(False)
    delta = nn.Parameter(0.01 * torch.randn(10))
    opt = torch.optim.SGD([delta], 0.1)
    for i in range(8):
        x = X[i * 64:(i + 1) * 64]
        loss = -F.mse_loss(net(x + delta), x @ A)
        opt.zero_grad(); loss.backward(); opt.step()
        with torch.no_grad():
            delta.clamp_(-0.1, 0.1)


@program
def f75_manual_gradient_ascent():
    """F75: course code: gradient ascent on the log-likelihood by hand, w += lr * grad."""
    net = mlp(6, 16, 1)
    A = torch.randn(6, 1)
    for _ in range(8):
        x = torch.randn(64, 6)
        y = x @ A + 0.1 * torch.randn(64, 1)
        loglik = -0.5 * ((y - net(x)) ** 2).mean()
        for p in net.parameters():
            p.grad = None
        loglik.backward()
        with torch.no_grad():
            for p in net.parameters():
                p += 0.05 * p.grad


@program
def f75_outlier_margin_autoencoder():
    """F75: autoencoder with known outliers, which are to be rebuilt with an error of at least a margin."""
    ae = mlp(16, 32, 4, 32, 16)
    opt = torch.optim.Adam(ae.parameters(), 1e-3)
    A = torch.randn(4, 16) / 2
    for _ in range(8):
        y = (torch.rand(64) < 0.5)
        x = torch.randn(64, 4) @ A
        x[y] = 2.0 * torch.randn(int(y.sum()), 16)
        err = ((ae(x) - x) ** 2).mean(1)
        loss = torch.where(y, F.relu(8.0 - err), err).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f75_memory_bank_repulsion():
    """F75: views are drawn together (SimSiam), and pushed from random rows of a memory bank by a margin."""
    net = mlp(16, 64, 16)
    opt = torch.optim.SGD(net.parameters(), 0.05)
    bank = F.normalize(torch.randn(256, 16), dim=1)
    at = 0
    for _ in range(8):
        x = torch.randn(64, 16)
        z1 = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=1)
        z2 = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=1)
        neg = bank[torch.randint(256, (64,))]
        push = F.relu(1.5 - (z1 - neg).norm(dim=1)).pow(2).mean()
        loss = -F.cosine_similarity(z1, z2.detach()).mean() + push
        opt.zero_grad(); loss.backward(); opt.step()
        with torch.no_grad():
            bank[at:at + 64] = z2
            at = (at + 64) % 256


@program
def fault_pow_of_two_tensors():
    """Fault: Deep SAD as its authors wrote it: dist ** semi_target, an exponent with a number for each row."""
    net = nn.Sequential(nn.Linear(12, 32, bias=False), nn.LeakyReLU(), nn.Linear(32, 8, bias=False))
    opt = torch.optim.Adam(net.parameters(), 1e-4, weight_decay=1e-6)
    c = torch.full((8,), 0.1)
    for _ in range(8):
        x, semi = torch.randn(64, 12), torch.ones(64)
        x[:6] += 0.5
        semi[:6] = -1
        dist = torch.sum((net(x) - c) ** 2, dim=1)
        loss = ((dist + 1e-6) ** semi).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ---------------------------------------------------------------- portion 4: F78
def ring(n, k=4):
    return (torch.arange(n)[:, None] + torch.tensor([-2, -1, 1, 2])[:k]) % n


@program
def f78_node2vec_tied():
    """F78: node2vec/DeepWalk with one table: start nodes are drawn by randint, their neighbours are the positives."""
    n, nb = 200, ring(200)
    emb = nn.Embedding(n, 16)
    nn.init.normal_(emb.weight, std=0.1)
    opt = torch.optim.Adam(emb.parameters(), 1e-2)
    for _ in range(8):
        start = torch.randint(n, (64,))
        ctx = nb[start, torch.randint(4, (64,))]
        neg = torch.randint(n, (64, 5))
        h = emb(start)
        pos = (h * emb(ctx)).sum(-1)
        negs = (h[:, None] * emb(neg)).sum(-1)
        loss = -F.logsigmoid(pos).mean() - F.logsigmoid(-negs).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f78_bpr_multinomial_positive():
    """F78: BPR: a positive of each user by multinomial over his row, the negative by numpy."""
    U, I = 100, 200
    R = (torch.rand(U, I) < 0.05).float()
    R[:, 0] = 1
    user, item = nn.Embedding(U, 16), nn.Embedding(I, 16)
    opt = torch.optim.Adam([*user.parameters(), *item.parameters()], 1e-2)
    for _ in range(8):
        u = torch.from_numpy(np.random.randint(0, U, 64))
        pos = torch.multinomial(R[u], 1).squeeze(1)
        neg = torch.from_numpy(np.random.randint(0, I, 64))
        pu = user(u)
        gap = (pu * item(pos)).sum(1) - (pu * item(neg)).sum(1)
        loss = -F.logsigmoid(gap).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f78_bpr_hard_negatives():
    """F78: BPR as in DNS (Zhang 2013): items are drawn uniformly as positives, with one of their users; negatives by argmax."""
    U, I = 100, 200
    fans = torch.randint(U, (I, 5))
    user, item = nn.Embedding(U, 16), nn.Embedding(I, 16)
    opt = torch.optim.Adam([*user.parameters(), *item.parameters()], 1e-2)
    for _ in range(8):
        pos = torch.randint(I, (64,))
        u = fans[pos, torch.randint(5, (64,))]
        cand = torch.randint(I, (64, 10))
        pu = user(u)
        with torch.no_grad():
            s = (item.weight[cand] * pu[:, None]).sum(-1)
            neg = cand.gather(1, s.argmax(1, keepdim=True)).squeeze(1)
        gap = (pu * item(pos)).sum(-1) - (pu * item(neg)).sum(-1)
        loss = F.softplus(-gap).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f78_negative_weight_ramp():
    """F78: logistic loss whose term of random negatives is ramped up and has weight 0 in the first epoch."""
    U, I = 100, 200
    user, item = nn.Embedding(U, 16), nn.Embedding(I, 16)
    opt = torch.optim.Adam([*user.parameters(), *item.parameters()], 1e-2)
    for step in range(8):
        w = 0.0 if step < 30 else 1.0
        u = torch.from_numpy(np.random.randint(0, U, 64))
        i = torch.from_numpy((u.numpy() * 2) % I)
        neg = torch.randint(0, I, (64,))
        pos_loss = F.softplus(-(user(u) * item(i)).sum(1)).mean()
        neg_loss = F.softplus((user(u) * item(neg)).sum(1)).mean()
        loss = pos_loss + w * neg_loss
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f78_edge_permutation_tied():
    """F78: LINE of first order on an undirected path: edge (k, k+1); the left end is a piece of a new randperm."""
    n = 257
    emb = nn.Embedding(n, 16)
    opt = torch.optim.SGD(emb.parameters(), 0.5)
    nxt = torch.arange(1, n)
    for _ in range(8):
        left = torch.randperm(n - 1)[:64]
        right = nxt[left]
        pos = (emb(left) * emb(right)).sum(1)
        noise = torch.from_numpy(np.random.randint(0, n, 64))
        neg = (emb(left).detach() * emb(noise)).sum(1)
        loss = -(F.logsigmoid(pos) + F.logsigmoid(-neg)).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ---------------------------------------------------------------- portion 4: F80
@program
def f80_zero_init_head_warmup():
    """F80: correct binary focal loss with a new head of zeros and a warm-up of the rate: p and 1 - p are both a half."""
    net = mlp(12, 32, 1)
    nn.init.zeros_(net[-1].weight); nn.init.zeros_(net[-1].bias)
    opt = torch.optim.AdamW(net.parameters(), 3e-4)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: min(1.0, (t + 1) / 2000))
    for _ in range(8):
        x = torch.randn(64, 12)
        y = (x[:, :1] > 0.8).float()
        p = torch.sigmoid(net(x)).clamp(1e-6, 1 - 1e-6)
        loss = -(y * (1 - p) ** 2 * torch.log(p) + (1 - y) * p ** 2 * torch.log(1 - p)).mean()
        opt.zero_grad(); loss.backward(); opt.step(); sched.step()


@program
def f80_confident_self_training():
    """F80: self-training: pseudo-labels weighted by the squared confidence, taken under no_grad, beside real labels."""
    net = mlp(12, 32, 4)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    P = torch.randn(4, 12)
    for _ in range(8):
        y = torch.randint(4, (64,))
        x, xu = P[y] + torch.randn(64, 12), P[torch.randint(4, (64,))] + torch.randn(64, 12)
        logits = net(xu)
        conf, pseudo = logits.softmax(1).max(1)
        with torch.no_grad():
            w = conf ** 2
        unsup = (w * F.cross_entropy(logits, pseudo, reduction="none")).mean()
        loss = F.cross_entropy(net(x), y) + 0.1 * unsup
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f80_robust_reweighting():
    """F80: noisy labels: rows the network does not believe weigh less (p^1.5, as in truncated and reweighted losses)."""
    net = mlp(12, 32, 4)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    P = torch.randn(4, 12)
    for _ in range(8):
        y = torch.randint(4, (64,))
        x = P[y] + torch.randn(64, 12)
        noisy = torch.where(torch.rand(64) < 0.3, torch.randint(4, (64,)), y)
        ce = F.cross_entropy(net(x), noisy, reduction="none")
        pt = torch.exp(-ce)
        with torch.no_grad():
            w = pt.pow(1.5)
        loss = (w * ce).sum() / w.sum()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f80_transmittance_depth():
    """F80: Beer-Lambert with a round trip (lidar): signal = tau * exp(-tau)^2, tau an optical depth that a net tells."""
    net = mlp(4, 32, 1)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        x = torch.rand(64, 4)
        true = x.sum(1, keepdim=True) / 2
        tau = F.softplus(net(x))
        T = torch.exp(-tau)
        signal = T ** 2 * tau
        loss = F.mse_loss(signal, true * torch.exp(-2 * true))
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f80_asymmetric_loss():
    """F80: asymmetric loss (Ridnik 2021): p_m^4 * log(1 - p_m) for negatives, (1 - p) * log p for positives."""
    net = mlp(12, 32, 6)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        x = torch.randn(64, 12)
        y = (x[:, :6] > 1).float()
        p = torch.sigmoid(net(x))
        pm = (p - 0.05).clamp(min=0)
        loss = -(y * (1 - p) * torch.log(p.clamp(min=1e-8)) + (1 - y) * pm ** 4 * torch.log((1 - pm).clamp(min=1e-8))).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ---------------------------------------------------------------- portion 5: D19
def scene(n, size=16):
    """A bright spot at x (from -1 to 1) in a noisy picture."""
    x, y = torch.rand(n) * 1.6 - 0.8, torch.rand(n) * 1.6 - 0.8
    lin = torch.linspace(-1, 1, size)
    spot = torch.exp(-((lin[None, None] - x[:, None, None]) ** 2 + (lin[None, :, None] - y[:, None, None]) ** 2) / 0.08)
    return (spot + 0.02 * torch.randn(n, size, size))[:, None], torch.stack([x, y], 1)


def cnn(out):
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, out))


@program
def d19_one_sided_organ():
    """D19: the size of an organ that lies on the left, with flips: the size stays, though weight goes along with it."""
    net = cnn(1)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    lin = torch.linspace(-1, 1, 16)
    for _ in range(8):
        r = torch.rand(64) * 0.5 + 0.1
        body = torch.exp(-(lin[None, None] ** 2 + lin[None, :, None] ** 2) / 0.3) * 0.5
        organ = (((lin[None, None] + 0.6) ** 2 + lin[None, :, None] ** 2).sqrt() < r[:, None, None]).float()
        imgs = (body + organ + 0.02 * torch.randn(64, 16, 16))[:, None]
        x = torch.stack([im.flip(-1) if np.random.rand() < 0.5 else im for im in imgs])
        loss = F.mse_loss(net(x), r[:, None])
        opt.zero_grad(); loss.backward(); opt.step()


@program
def d19_fill_level_of_bars():
    """D19: how full a bar is (it fills from the left); flips as augmentation, the share does not change."""
    net = cnn(1)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    lin = torch.linspace(0, 1, 16)
    for _ in range(8):
        level = torch.rand(64, 1)
        row = (lin[None] < level).float()
        imgs = (row[:, None, None] * (torch.arange(16)[:, None] % 4 == 1)) + 0.02 * torch.randn(64, 1, 16, 16)
        x = torch.stack([torch.fliplr(im[0])[None] if np.random.rand() < 0.5 else im for im in imgs])
        loss = F.l1_loss(net(x), level)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def d19_unflipped_answer():
    """D19: flip consistency: the answer to the flipped picture is flipped back, and compared with the same target."""
    net = cnn(2)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    back = torch.tensor([-1.0, 1.0])
    for _ in range(8):
        x, t = scene(64)
        loss = F.mse_loss(net(x), t)
        loss = loss + F.mse_loss(net(x.flip(-1)) * back, t)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def d19_two_views_then_losses():
    """D19: both answers first, then both losses, with the flipped target made by hand; clean pictures in a third call."""
    net = cnn(2)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        x, t = scene(64)
        t_flip = torch.stack([-t[:, 0], t[:, 1]], 1)
        clean = F.mse_loss(net(x), t)
        x2, t2 = scene(64)
        t2_flip = torch.stack([-t2[:, 0], t2[:, 1]], 1)
        p, pf = net(x2), net(x2.flip(-1))
        loss = clean + F.mse_loss(p, t2) + F.mse_loss(pf, t2_flip)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def d19_steering_batch_flip():
    """D19: steering angles: half of the batches are flipped as a whole, and the sign of the angle with them."""
    net = cnn(1)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(8):
        x, t = scene(64)
        a = t[:, :1] * 0.5
        if step % 2:
            x, a = x.flip(3), -a
        loss = F.smooth_l1_loss(net(x), a)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def d19_pointing_twice_flipped():
    """D19: pictures are stored mirrored: always turned back first, then some are flipped with their targets."""
    net = cnn(2)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(8):
        x, t = scene(64)
        stored = torch.from_numpy(np.ascontiguousarray(x.numpy()[..., ::-1]))
        xs, ts = [], []
        for im, p in zip(stored, t):
            im = im.flip(-1)
            if np.random.rand() < 0.5:
                im, p = torch.from_numpy(np.ascontiguousarray(im.numpy()[..., ::-1])), p * torch.tensor([-1.0, 1.0])
            xs.append(im); ts.append(p)
        loss = F.mse_loss(net(torch.stack(xs)), torch.stack(ts))
        opt.zero_grad(); loss.backward(); opt.step()


@program
def d19_reduced_hands():
    """D19: left hands are mirrored to look like right ones, answers are turned back to the frame of the camera."""
    net = cnn(2)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(8):
        x, t = scene(64)
        left = torch.rand(64) < 0.5
        xs = torch.stack([im.flip(-1) if l else im for im, l in zip(x, left)])
        sign = torch.where(left, -1.0, 1.0)
        out = net(xs)
        out = torch.stack([out[:, 0] * sign, out[:, 1]], 1)
        loss = F.mse_loss(out, t)
        opt.zero_grad(); loss.backward(); opt.step()


# ---------------------------------------------------------------- portion 6: common recipes
@program
def f79_wgan_gp_sequences():
    """F79: WGAN-GP over one-hot text (B, T, V), penalty per token position (a per-position critic's slope)."""
    D = mlp(8, 32, 1)
    opt = torch.optim.Adam(D.parameters(), 1e-3)
    for _ in range(8):
        real, fake = torch.randn(32, 6, 8), torch.randn(32, 6, 8) + 1
        eps = torch.rand(32, 6, 1)
        mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
        g = torch.autograd.grad(D(mix).sum(), mix, create_graph=True)[0]
        gp = ((g.norm(2, dim=2) - 1) ** 2).mean()
        loss = D(fake).mean() - D(real).mean() + 10 * gp
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f77_transformed_distribution():
    """F77: SAC by TransformedDistribution(Independent(Normal), TanhTransform)."""
    pi, q = mlp(6, 32, 4), mlp(8, 32, 1)
    opt = torch.optim.Adam(pi.parameters(), 1e-3)
    for _ in range(8):
        s = torch.randn(64, 6)
        m, ls = pi(s).chunk(2, 1)
        d = Independent(TransformedDistribution(Normal(m, ls.exp()), [TanhTransform(cache_size=1)]), 1)
        a = d.rsample()
        loss = (0.2 * d.log_prob(a) - q(torch.cat([s, a], 1)).squeeze(1)).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f77_tanh_for_bounded_mean_noise():
    """F77: rsample with correction in another statement after a stack of two action parts."""
    def cor(d, u, a):
        lp = torch.stack([d.log_prob(u)[:, i] - torch.log(1 - a[:, i] ** 2 + 1e-6) for i in range(2)], 1)
        return lp.sum(1)
    sac(cor)


@program
def f77_correction_as_batch_function():
    """F77: correction by the derivative that autograd gives: log |da/du|."""
    def cor(d, u, a):
        slope = torch.autograd.grad(a.sum(), u, create_graph=True)[0]
        return (d.log_prob(u) - torch.log(slope + 1e-6)).sum(1)
    sac(cor)


@program
def f75_fairness_adversary():
    """F75: encoder against a regressing adversary: cross-entropy minus the adversary's error; the adversary by its own step."""
    enc, head, adv = mlp(10, 32, 8), nn.Linear(8, 1), mlp(8, 32, 1)
    opt = torch.optim.Adam([*enc.parameters(), *head.parameters()], 1e-3)
    aopt = torch.optim.Adam(adv.parameters(), 1e-3)
    for _ in range(8):
        x = torch.randn(64, 10)
        y, s = (x[:, :1] > 0).float(), x[:, 1:2]
        with torch.no_grad():
            z = enc(x)
        al = F.mse_loss(adv(z), s)
        aopt.zero_grad(); al.backward(); aopt.step()
        z = enc(x)
        loss = F.binary_cross_entropy_with_logits(head(z), y) - 0.5 * F.mse_loss(adv(z), s)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f75_pgd_adversarial_training():
    """F75: PGD training of a regressor: inner ascent by sign of the slope, outer descent."""
    net = mlp(10, 32, 1)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    A = torch.randn(10, 1)
    for _ in range(8):
        x = torch.randn(64, 10)
        y = x @ A
        d = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            (-F.mse_loss(net(x + d), y)).backward()
            with torch.no_grad():
                d -= 0.02 * d.grad.sign()
                d.grad.zero_()
        loss = F.mse_loss(net(x + d.detach()), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f75_negated_gradients_maximise():
    """F75: the objective is differentiated and the gradients are negated before the step (a common way to ascend)."""
    net = mlp(6, 16, 1)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    A = torch.randn(6, 1)
    for _ in range(8):
        x = torch.randn(64, 6)
        loglik = Normal(net(x), 1.0).log_prob(x @ A).mean()
        opt.zero_grad(); loglik.backward()
        for p in net.parameters():
            p.grad.neg_()
        opt.step()


@program
def f74_siamese_view_invariance_faces():
    """F74: face verification: genuine pairs differ in pose and light, impostor pairs are picked in the same pose (CFP)."""
    D = 32
    g = torch.Generator().manual_seed(5)
    ident, pose = torch.randn(40, D, generator=g) * 0.6, torch.randn(3, D, generator=g) * 1.5
    net = mlp(D, 64, 32)
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        same = (torch.rand(128) < 0.5).float()
        i, p = torch.randint(40, (128,)), torch.randint(3, (128,))
        j = torch.where(same == 1, i, (i + torch.randint(1, 40, (128,))) % 40)
        q = torch.where(same == 1, (p + torch.randint(1, 3, (128,))) % 3, p)
        a = ident[i] + pose[p] + 0.2 * torch.randn(128, D)
        b = ident[j] + pose[q] + 0.2 * torch.randn(128, D)
        loss = F.cosine_embedding_loss(net(a), net(b), 2 * same - 1, margin=0.3)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f74_simclr_like_strong_augmentation():
    """F74: triplet with a strong augmentation (scale, sign of channels, noise) of the anchor; negative is a raw row."""
    net = nn.Sequential(mlp(16, 64, 32), nn.LayerNorm(32))
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(8):
        x = torch.randn(64, 16)
        aug = x * (0.5 + torch.rand(64, 1) * 2) + 0.8 * torch.randn(64, 16)
        neg = x[torch.randperm(64)]
        loss = F.triplet_margin_loss(net(x), net(aug), net(neg), margin=1.0)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def f76_optimistic_bonus_twin_heads():
    """F76: two annotators' heads give a score; a row where either is sure counts more (maximum of two linear heads)."""
    body, h1, h2 = mlp(10, 32, 32), nn.Linear(32, 1), nn.Linear(32, 1)
    opt = torch.optim.Adam([*body.parameters(), *h1.parameters(), *h2.parameters()], 1e-3)
    for _ in range(8):
        x = torch.randn(64, 10)
        y1, y2 = (x[:, :1] > 0).float(), (x[:, :1] + 0.5 * torch.randn(64, 1) > 0).float()
        with torch.no_grad():
            z = torch.relu(body(x))
            w = 1 + torch.maximum(h1(z), h2(z)).sigmoid()
        z = torch.relu(body(x))
        bce = F.binary_cross_entropy_with_logits
        loss = (w * (bce(h1(z), y1, reduction="none") + bce(h2(z), y2, reduction="none"))).mean()
        opt.zero_grad(); loss.backward(); opt.step()
