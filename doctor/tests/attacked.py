"""182 healthy programs by somebody who had read the checks F22, F30, F40, F53, F63 to F70, D16 to D18, S32 and N34 and
looked for what they would wrongly blame. 78 had a finding at first; test_attacked.py names those that still have one.

They are kept as they were written.
"""
# ruff: noqa

import copy, math, random
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributions as D
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

ALL = []
def prog(f):
    ALL.append(f); return f
def mlp(i, o, h=64, act=nn.Tanh):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, h), act(), nn.Linear(h, o))
N = 12
DATA = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
YC = (DATA[:, :4].argmax(1))
def batch(b=32):
    i = torch.randint(0, 512, (b,)); return DATA[i], YC[i]

# ============================================================ policy gradients
class Envs:
    """Vectorised toy environments with episodes of chance length."""
    def __init__(self, n=32, d=6, end=.05, cut=0.0):
        self.n, self.d, self.end, self.cut = n, d, end, cut
        self.rng = np.random.default_rng(0); self.s = self.rng.normal(size=(n, d)).astype(np.float32)
    def reset(self): return torch.from_numpy(self.s.copy())
    def step(self, a):
        a = a.detach().numpy().reshape(self.n, -1)[:, 0]
        r = (self.s[:, 0] * np.sign(a) + .1 * self.rng.normal(size=self.n)).astype(np.float32)
        self.s = self.rng.normal(size=(self.n, self.d)).astype(np.float32)
        done = self.rng.random(self.n) < self.end
        cut = (self.rng.random(self.n) < self.cut) & ~done
        return torch.from_numpy(self.s.copy()), torch.from_numpy(r), torch.from_numpy(done), torch.from_numpy(cut)

@prog
def cleanrl_ppo():
    env = Envs(); actor, critic = mlp(6, 2), mlp(6, 1)
    opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-4, eps=1e-5)
    obs, done = env.reset(), torch.zeros(32)
    for it in range(3):
        O, A, LP, R, DN, V = [], [], [], [], [], []
        for t in range(8):
            with torch.no_grad():
                p = D.Categorical(logits=actor(obs)); a = p.sample()
                O.append(obs); A.append(a); LP.append(p.log_prob(a)); V.append(critic(obs).flatten()); DN.append(done)
            obs, r, d, _ = env.step(a); done = d.float(); R.append(r)
        with torch.no_grad():
            nv = critic(obs).reshape(1, -1)[0]; adv = torch.zeros(8, 32); last = 0
            for t in reversed(range(8)):
                nn_, nxt = (1.0 - done, nv) if t == 7 else (1.0 - DN[t + 1], V[t + 1])
                delta = R[t] + .99 * nxt * nn_ - V[t]
                adv[t] = last = delta + .99 * .95 * nn_ * last
            ret = adv + torch.stack(V)
        b_o, b_a, b_lp, b_adv, b_r, b_v = (torch.cat(list(x)) for x in (O, A, LP, adv, ret, V))
        for ep in range(4):
            mb = torch.randperm(256)[:64]
            p = D.Categorical(logits=actor(b_o[mb])); logratio = p.log_prob(b_a[mb]) - b_lp[mb]; ratio = logratio.exp()
            ma = b_adv[mb]; ma = (ma - ma.mean()) / (ma.std() + 1e-8)
            pg = torch.max(-ma * ratio, -ma * torch.clamp(ratio, .8, 1.2)).mean()
            vl = .5 * ((critic(b_o[mb]).view(-1) - b_r[mb]) ** 2).mean()
            loss = pg - .01 * p.entropy().mean() + .5 * vl
            opt.zero_grad(); loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], .5); opt.step()

@prog
def reinforce_weights_negated_then_scaled():
    """-(R - mean) / std as weights, so that the loss is a plain mean of products."""
    pi = mlp(6, 2); opt = torch.optim.Adam(pi.parameters(), 1e-3); env = Envs(); s = env.reset()
    for _ in range(N):
        d = D.Categorical(logits=pi(s)); a = d.sample(); s, r, *_ = env.step(a)
        w = -(r - r.mean()) / (r.std() + 1e-6)
        loss = (w * d.log_prob(a)).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def reinforce_neg_unsqueezed():
    mu = mlp(6, 2); ls = nn.Parameter(torch.zeros(2)); opt = torch.optim.Adam([*mu.parameters(), ls], 1e-3); env = Envs(); s = env.reset()
    for _ in range(N):
        d = D.Normal(mu(s), ls.exp()); a = d.sample(); s, r, *_ = env.step(a)
        adv = (-(r - r.mean())).unsqueeze(-1)
        loss = (d.log_prob(a) * adv).sum(-1).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def reinforce_baseline_minus_return():
    pi, v = mlp(6, 2), mlp(6, 1); opt = torch.optim.Adam([*pi.parameters(), *v.parameters()], 1e-3); env = Envs(); s = env.reset()
    for _ in range(N):
        d = D.Categorical(logits=pi(s)); a = d.sample(); b = v(s).squeeze(-1); s, r, *_ = env.step(a)
        delta = b - r                        # regret against the baseline
        loss = (d.log_prob(a) * delta.detach()).mean() + .5 * delta.pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def reinforce_maximize_true():
    pi = mlp(6, 2); opt = torch.optim.Adam(pi.parameters(), 1e-3, maximize=True); env = Envs(); s = env.reset()
    for _ in range(N):
        d = D.Categorical(logits=pi(s)); a = d.sample(); s, r, *_ = env.step(a)
        objective = (d.log_prob(a) * (r - r.mean())).mean()
        opt.zero_grad(); objective.backward(); opt.step()

@prog
def hard_attention_reinforce_with_losses():
    """Recurrent attention: where to look is drawn, the reward is minus the cross-entropy."""
    look, cls = mlp(16, 4), mlp(4, 4); opt = torch.optim.Adam([*look.parameters(), *cls.parameters()], 1e-3); base = 0.
    for _ in range(N):
        x, y = batch(); d = D.Categorical(logits=look(x)); g = d.sample()
        glimpse = x.view(-1, 4, 4)[torch.arange(len(x)), g]
        ce = F.cross_entropy(cls(glimpse), y, reduction="none")
        score = ce.detach() - base; base = .9 * base + .1 * ce.mean().item()
        loss = ce.mean() + (score * d.log_prob(g)).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def tsp_reinforce_costs():
    """Attention-model routing: tour length is a cost, so it is (cost - baseline) * log-likelihood."""
    enc = mlp(2, 16); opt = torch.optim.Adam(enc.parameters(), 1e-3)
    for _ in range(N):
        pts = torch.rand(16, 6, 2); h = enc(pts); q = h.mean(1); seen = torch.zeros(16, 6, dtype=torch.bool); lp = 0; tour = []
        for t in range(6):
            s = (h @ q.unsqueeze(-1)).squeeze(-1).masked_fill(seen, -1e9); d = D.Categorical(logits=s); a = d.sample()
            lp = lp + d.log_prob(a); tour.append(a); seen = seen.scatter(1, a[:, None], True); q = h[torch.arange(16), a]
        o = torch.stack(tour, 1); p = pts.gather(1, o[..., None].expand(-1, -1, 2)); cost = (p - p.roll(1, 1)).norm(dim=-1).sum(1)
        loss = ((cost - cost.mean()) * lp).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def reinforce_frozen_reward_model():
    """Score-function gradient of a frozen reward network: sample() and log_prob, no reparametrisation."""
    rm = mlp(8, 1).requires_grad_(False); mu = mlp(6, 2); ls = nn.Parameter(torch.zeros(2)); opt = torch.optim.Adam([*mu.parameters(), ls], 1e-3)
    for _ in range(N):
        s = torch.randn(32, 6); d = D.Normal(mu(s), ls.exp()); a = d.sample()
        r = rm(torch.cat([s, a], -1)).squeeze(-1)
        loss = -(d.log_prob(a).sum(-1) * (r - r.mean())).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def a2c_with_time_outs():
    """rsl_rl / rl_games: rewards += gamma * values * time_outs, beside the usual (1 - done)."""
    env = Envs(end=.05, cut=.1); pi, v = mlp(6, 2), mlp(6, 1); opt = torch.optim.Adam([*pi.parameters(), *v.parameters()], 7e-4); s = env.reset()
    for _ in range(N):
        S, A, R, DN, V = [], [], [], [], []
        for t in range(3):
            with torch.no_grad():
                a = D.Categorical(logits=pi(s)).sample(); val = v(s)
            S.append(s); A.append(a); s, r, end, cut = env.step(a)
            time_outs = cut.to(torch.float32)
            r = r + .99 * torch.squeeze(val * time_outs.unsqueeze(1), 1)
            R.append(r); DN.append((end | cut).float())
        with torch.no_grad(): G = v(s).squeeze(-1)
        rets = []
        for r, dn in zip(reversed(R), reversed(DN)): G = r + .99 * G * (1 - dn); rets.insert(0, G)
        S, A, G_ = torch.cat(S), torch.cat(A), torch.cat(rets)
        d = D.Categorical(logits=pi(S)); val = v(S).squeeze(-1); adv = (G_ - val).detach()
        loss = -(d.log_prob(A) * adv).mean() + .5 * F.mse_loss(val, G_) - .01 * d.entropy().mean()
        opt.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], .5); opt.step()

@prog
def nstep_dqn_short_episodes():
    """20-step returns of short episodes: most windows end inside, so the mask of the bootstrap is mostly 0."""
    q, tgt = mlp(6, 3), mlp(6, 3); tgt.load_state_dict(q.state_dict()); opt = torch.optim.Adam(q.parameters(), 1e-3)
    S, S2, A, Rn = torch.randn(512, 6), torch.randn(512, 6), torch.randint(0, 3, (512, 1)), torch.randn(512, 1)
    alive_n = (torch.rand(512, 1) < .3).float()
    for _ in range(N):
        i = torch.randint(0, 512, (64,))
        with torch.no_grad():
            nxt = tgt(S2[i]).max(1, keepdim=True).values
            y = Rn[i] + .99 ** 20 * alive_n[i] * nxt
        loss = F.smooth_l1_loss(q(S[i]).gather(1, A[i]), y)
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def double_dqn_not_done():
    q, tgt = mlp(6, 3), mlp(6, 3); tgt.load_state_dict(q.state_dict()); opt = torch.optim.Adam(q.parameters(), 1e-3)
    S, S2, A, R = torch.randn(512, 6), torch.randn(512, 6), torch.randint(0, 3, (512,)), torch.randn(512); nd = (torch.rand(512) > .05).float()
    for _ in range(N):
        i = torch.randint(0, 512, (64,))
        with torch.no_grad():
            best = q(S2[i]).argmax(1, keepdim=True); y = R[i] + .99 * nd[i] * tgt(S2[i]).gather(1, best).squeeze(1)
        loss = F.mse_loss(q(S[i]).gather(1, A[i, None]).squeeze(1), y)
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def dr_learner_treatment():
    """Doubly robust pseudo-outcomes: nuisance nets answer without a gradient, residuals are multiplied by the treatment."""
    m1, m0, tau = mlp(16, 1), mlp(16, 1), mlp(16, 1); opt = torch.optim.Adam(tau.parameters(), 1e-3)
    T = (torch.rand(512, 1) < .3).float(); Y = DATA[:, :1] + T * DATA[:, 1:2]
    for _ in range(N):
        i = torch.randint(0, 512, (64,)); x, t, y = DATA[i], T[i], Y[i]
        with torch.no_grad():
            a, b = m1(x), m0(x); e = .3
            psi = a - b + t * (y - a) / e - (1 - t) * (y - b) / (1 - e)
        loss = F.mse_loss(tau(x), psi)
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def pseudo_targets_where_missing():
    net, teacher = mlp(16, 1), mlp(16, 1).requires_grad_(False); opt = torch.optim.SGD(net.parameters(), 1e-2)
    Y = DATA[:, :1].clone(); miss = (torch.rand(512, 1) < .2).float()
    for _ in range(N):
        i = torch.randint(0, 512, (64,)); m = miss[i]
        with torch.no_grad(): y = Y[i] * (1 - m) + teacher(DATA[i]) * m
        loss = F.mse_loss(net(DATA[i]), y)
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def sac():
    actor, q1, q2 = mlp(6, 4), mlp(8, 1), mlp(8, 1); t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    qo = torch.optim.Adam([*q1.parameters(), *q2.parameters()], 1e-3); ao = torch.optim.Adam(actor.parameters(), 1e-3)
    la = torch.zeros(1, requires_grad=True); lo = torch.optim.Adam([la], 1e-3); M = [torch.randn(256, k) for k in (6, 2, 1, 6)]; dn = (torch.rand(256, 1) < .05).float()
    def act(s):
        m, l = actor(s).chunk(2, -1); d = D.Normal(m, l.clamp(-5, 2).exp()); x = d.rsample(); y = torch.tanh(x)
        return y, (d.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)).sum(1, keepdim=True)
    for _ in range(N):
        i = torch.randint(0, 256, (32,)); s, a, r, s2 = (m[i] for m in M); d = dn[i]
        with torch.no_grad():
            a2, lp2 = act(s2); z = torch.cat([s2, a2], 1); y = r + (1 - d) * .99 * (torch.min(t1(z), t2(z)) - la.exp() * lp2)
        z = torch.cat([s, a], 1); ql = F.mse_loss(q1(z), y) + F.mse_loss(q2(z), y); qo.zero_grad(); ql.backward(); qo.step()
        for p in [*q1.parameters(), *q2.parameters()]: p.requires_grad_(False)
        pa, lp = act(s); z = torch.cat([s, pa], 1); al = (la.exp().detach() * lp - torch.min(q1(z), q2(z))).mean(); ao.zero_grad(); al.backward(); ao.step()
        for p in [*q1.parameters(), *q2.parameters()]: p.requires_grad_(True)
        ll = (-la.exp() * (lp + 2).detach()).mean(); lo.zero_grad(); ll.backward(); lo.step()
        with torch.no_grad():
            for p, t in zip([*q1.parameters(), *q2.parameters()], [*t1.parameters(), *t2.parameters()]): t.lerp_(p, .005)

@prog
def td3():
    actor, q1, q2 = nn.Sequential(mlp(6, 2), nn.Tanh()), mlp(8, 1), mlp(8, 1); ta, t1, t2 = map(copy.deepcopy, (actor, q1, q2))
    ao, qo = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam([*q1.parameters(), *q2.parameters()], 1e-3)
    M = [torch.randn(256, k) for k in (6, 2, 1, 6)]; not_done = (torch.rand(256, 1) > .05).float()
    for it in range(N):
        i = torch.randint(0, 256, (32,)); s, a, r, s2 = (m[i] for m in M)
        with torch.no_grad():
            a2 = (ta(s2) + (torch.randn_like(a) * .2).clamp(-.5, .5)).clamp(-1, 1); z = torch.cat([s2, a2], 1)
            y = r + not_done[i] * .99 * torch.min(t1(z), t2(z))
        z = torch.cat([s, a], 1); ql = F.mse_loss(q1(z), y) + F.mse_loss(q2(z), y); qo.zero_grad(); ql.backward(); qo.step()
        if it % 2:
            al = -q1(torch.cat([s, actor(s)], 1)).mean(); ao.zero_grad(); al.backward(); ao.step()
            with torch.no_grad():
                for m, t in ((actor, ta), (q1, t1), (q2, t2)):
                    for p, u in zip(m.parameters(), t.parameters()): u.lerp_(p, .005)

@prog
def score_function_elbo():
    enc, dec = mlp(16, 8), mlp(8, 16); opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 1e-3); prior = D.Bernoulli(logits=torch.zeros(8))
    for _ in range(N):
        x = (batch()[0] > 0).float(); q = D.Bernoulli(logits=enc(x)); z = q.sample()
        lq = q.log_prob(z).sum(1); lp = D.Bernoulli(logits=dec(z)).log_prob(x).sum(1) + prior.log_prob(z).sum(1)
        elbo = lp - lq; signal = (elbo - elbo.mean()).detach()
        loss = -(lp + signal * lq).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def nvil_reconstruction_as_cost():
    """Discrete code; log p through bce, so the learning signal is a cost of which the loss is the expectation."""
    enc, dec = mlp(16, 8), mlp(8, 16); opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 1e-3)
    for _ in range(N):
        x = (batch()[0] > 0).float(); q = D.Bernoulli(logits=enc(x)); z = q.sample()
        rec = F.binary_cross_entropy_with_logits(dec(z), x, reduction="none").sum(1)
        kl = D.kl_divergence(q, D.Bernoulli(torch.full_like(z, .5))).sum(1)
        cost = rec.detach()
        loss = (rec + kl + (cost - cost.mean()) * q.log_prob(z).sum(1)).mean()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def grpo_tokens():
    net = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 40)); ref = copy.deepcopy(net).requires_grad_(False); opt = torch.optim.AdamW(net.parameters(), 1e-3)
    for _ in range(4):
        ids = torch.randint(0, 40, (16, 12)); rw = (ids == 3).float().sum(1); g = rw.view(4, 4); adv = ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)).flatten()[:, None]
        with torch.no_grad():
            old = net(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1); rl = ref(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        for _ in range(3):
            lp = net(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1); ratio = (lp - old).exp()
            kl = (rl - lp).exp() - (rl - lp) - 1
            loss = (-torch.min(ratio * adv, ratio.clamp(.8, 1.2) * adv) + .04 * kl).mean()
            opt.zero_grad(); loss.backward(); opt.step()

@prog
def weighted_nll_distribution():
    net = mlp(16, 2); opt = torch.optim.Adam(net.parameters(), 1e-3); w = torch.rand(512) + .5
    for _ in range(N):
        i = torch.randint(0, 512, (64,)); m, s = net(DATA[i]).unbind(-1); d = D.Normal(m, F.softplus(s) + 1e-3)
        loss = -(w[i] * d.log_prob(DATA[i, 0])).sum() / w[i].sum()
        opt.zero_grad(); loss.backward(); opt.step()

@prog
def scheduled_sampling_deepar():
    """DeepAR-like: a normal for the next number, and now and then its own sample is fed back."""
    cell, head = nn.GRUCell(1, 32), nn.Linear(32, 2); opt = torch.optim.Adam([*cell.parameters(), *head.parameters()], 1e-3)
    for _ in range(N):
        y = torch.sin(torch.rand(16, 1) * 6 + torch.arange(10) * .5); h = torch.zeros(16, 32); x = y[:, :1]; loss = 0
        for t in range(1, 10):
            h = cell(x, h); m, s = head(h).chunk(2, -1); d = D.Normal(m, F.softplus(s) + 1e-2)
            loss = loss - d.log_prob(y[:, t:t + 1]).mean()
            x = d.sample() if random.random() < .5 else y[:, t:t + 1]
        opt.zero_grad(); (loss / 9).backward(); opt.step()

# ============================================================ adversaries
def gan_parts(): return mlp(8, 16, act=nn.ReLU), mlp(16, 1, act=nn.LeakyReLU)

@prog
def wgan_gp_backward_mone():
    """The classic wgan-gp code: D_real.backward(mone), D_fake.backward(one), G.backward(mone)."""
    g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 1e-4, betas=(.5, .9)), torch.optim.Adam(d.parameters(), 1e-4, betas=(.5, .9))
    one = torch.tensor(1.); mone = one * -1
    for _ in range(N // 2):
        for p in d.parameters(): p.requires_grad = True
        for _ in range(2):
            d.zero_grad(); x = batch()[0]
            D_real = d(x).mean(); D_real.backward(mone)
            fake = g(torch.randn(32, 8)).detach(); D_fake = d(fake).mean(); D_fake.backward(one)
            e = torch.rand(32, 1); mix = (e * x + (1 - e) * fake).requires_grad_(); gr, = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)
            gp = 10 * ((gr.norm(2, 1) - 1) ** 2).mean(); gp.backward(); od.step()
        for p in d.parameters(): p.requires_grad = False
        g.zero_grad(); G = d(g(torch.randn(32, 8))).mean(); G.backward(mone); og.step()

@prog
def gan_maximize_discriminator():
    """Goodfellow's algorithm to the letter: D ascends log D(x) + log(1 - D(G(z))), G descends log(1 - D(G(z)))."""
    g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 1e-4), torch.optim.Adam(d.parameters(), 1e-4, maximize=True)
    for _ in range(N):
        x, z = batch()[0], torch.randn(32, 8)
        v = (torch.log(torch.sigmoid(d(x)) + 1e-8) + torch.log(1 - torch.sigmoid(d(g(z).detach())) + 1e-8)).mean(); od.zero_grad(); v.backward(); od.step()
        gl = torch.log(1 - torch.sigmoid(d(g(z))) + 1e-8).mean(); og.zero_grad(); gl.backward(); og.step()

@prog
def wgan_clip_maximize():
    g, d = gan_parts(); og, od = torch.optim.RMSprop(g.parameters(), 5e-5, maximize=True), torch.optim.RMSprop(d.parameters(), 5e-5)
    for _ in range(N):
        x, z = batch()[0], torch.randn(32, 8); l = d(g(z).detach()).mean() - d(x).mean(); od.zero_grad(); l.backward(); od.step()
        with torch.no_grad():
            for p in d.parameters(): p.clamp_(-.01, .01)
        s = d(g(z)).mean(); og.zero_grad(); s.backward(); og.step()

def _gan(dl, gl):
    def run():
        g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 2e-4, betas=(.5, .999)), torch.optim.Adam(d.parameters(), 2e-4, betas=(.5, .999))
        for _ in range(N):
            x, z = batch()[0], torch.randn(32, 8); fake = g(z)
            od.zero_grad(); dl(d(x), d(fake.detach())).backward(); od.step()
            og.zero_grad(); gl(d(fake)).backward(); og.step()
    return run
bce = F.binary_cross_entropy_with_logits
for name, dl, gl in [
    ("gan_nonsaturating", lambda r, f: bce(r, torch.ones_like(r)) + bce(f, torch.zeros_like(f)), lambda f: bce(f, torch.ones_like(f))),
    ("gan_one_sided_smooth", lambda r, f: bce(r, torch.full_like(r, .9)) + bce(f, torch.zeros_like(f)), lambda f: bce(f, torch.ones_like(f))),
    ("gan_two_sided_smooth", lambda r, f: .5 * (bce(r, torch.full_like(r, .9)) + bce(f, torch.full_like(f, .1))), lambda f: bce(f, torch.full_like(f, .9))),
    ("gan_saturating_minus_bce", lambda r, f: bce(r, torch.ones_like(r)) + bce(f, torch.zeros_like(f)), lambda f: -bce(f, torch.zeros_like(f))),
    ("gan_flipped_labels", lambda r, f: bce(r, torch.zeros_like(r)) + bce(f, torch.ones_like(f)), lambda f: bce(f, torch.zeros_like(f))),
    ("lsgan_01", lambda r, f: .5 * F.mse_loss(r, torch.ones_like(r)) + .5 * F.mse_loss(f, torch.zeros_like(f)), lambda f: .5 * F.mse_loss(f, torch.ones_like(f))),
    ("lsgan_m101", lambda r, f: F.mse_loss(r, torch.ones_like(r)) + F.mse_loss(f, -torch.ones_like(f)), lambda f: F.mse_loss(f, torch.zeros_like(f))),
    ("lsgan_pow", lambda r, f: ((r - 1) ** 2).mean() + (f ** 2).mean(), lambda f: ((f - 1) ** 2).mean()),
    ("hinge_gan", lambda r, f: F.relu(1 - r).mean() + F.relu(1 + f).mean(), lambda f: -f.mean()),
    ("softplus_gan", lambda r, f: F.softplus(-r).mean() + F.softplus(f).mean(), lambda f: F.softplus(-f).mean()),
    ("ebgan_like_energy", lambda r, f: r.mean() + F.relu(10 - f).mean(), lambda f: f.mean()),
    ("wgan_logits_lsq_target_half", lambda r, f: ((r - 1).square() + (f + 1).square()).mean() / 2, lambda f: f.square().mean() / 2),
]:
    fn = _gan(dl, gl); fn.__name__ = name; ALL.append(fn)

@prog
def lsgan_shifted_labels():
    """LSGAN with a = -1, b = 1, c = 1 ... the labels of scores in -1..1."""
    _gan(lambda r, f: F.mse_loss(r, torch.full_like(r, 2.)) + F.mse_loss(f, torch.full_like(f, 1.)), lambda f: F.mse_loss(f, torch.full_like(f, 2.)))()

@prog
def cyclegan():
    A, B, da, db = mlp(16, 16), mlp(16, 16), mlp(16, 1), mlp(16, 1)
    og = torch.optim.Adam([*A.parameters(), *B.parameters()], 2e-4); oda, odb = (torch.optim.Adam(m.parameters(), 2e-4) for m in (da, db))
    gan = nn.MSELoss(); l1 = nn.L1Loss()
    for _ in range(N):
        a, b = batch()[0], batch()[0] + 1; fb, fa = A(a), B(b); one, zero = torch.ones(32, 1), torch.zeros(32, 1)
        loss = gan(db(fb), one) + gan(da(fa), one) + 10 * (l1(B(fb), a) + l1(A(fa), b)) + 5 * (l1(A(b), b) + l1(B(a), a))
        og.zero_grad(); loss.backward(); og.step()
        for d, o, r, f in ((da, oda, a, fa), (db, odb, b, fb)):
            l = .5 * (gan(d(r), one) + gan(d(f.detach()), zero)); o.zero_grad(); l.backward(); o.step()

@prog
def two_generators_two_optimizers_chain():
    """Enc and dec of a translator have an optimizer each and step in turn; the discriminator works against both."""
    e, g, d = mlp(16, 8), mlp(8, 16), mlp(16, 1); oe, og, od = (torch.optim.Adam(m.parameters(), 2e-4) for m in (e, g, d))
    for _ in range(N):
        a, b = batch()[0], batch()[0] + 1
        l = bce(d(b), torch.ones(32, 1)) + bce(d(g(e(a)).detach()), torch.zeros(32, 1)); od.zero_grad(); l.backward(); od.step()
        for o in (oe, og):
            l = bce(d(g(e(a))), torch.ones(32, 1)); o.zero_grad(); l.backward(); o.step()

@prog
def sender_receiver_in_turn():
    """A referential game with pairs that match: both agents want a high score, each learns in its turn. Negatives are rolled."""
    s, r = mlp(16, 8), mlp(8, 16); os_, or_ = torch.optim.Adam(s.parameters(), 1e-3), torch.optim.Adam(r.parameters(), 1e-3)
    for k in range(N):
        x = batch()[0]; o = os_ if k % 2 else or_
        guess = F.normalize(r(s(x)), dim=1); score = (guess * F.normalize(x, dim=1)).sum(1)
        loss = -score.mean(); os_.zero_grad(); or_.zero_grad(); loss.backward(); o.step()

@prog
def domain_adversarial_two_optimizers():
    f, c, d = mlp(16, 16), mlp(16, 4), mlp(16, 1); of, od = torch.optim.Adam([*f.parameters(), *c.parameters()], 1e-3), torch.optim.Adam(d.parameters(), 1e-3)
    for _ in range(N):
        (xs, ys), (xt, _) = batch(), batch(); xt = xt + .5; dom = torch.cat([torch.ones(32, 1), torch.zeros(32, 1)])
        h = f(torch.cat([xs, xt])); l = bce(d(h.detach()), dom); od.zero_grad(); l.backward(); od.step()
        loss = F.cross_entropy(c(h[:32]), ys) + .1 * bce(d(h), 1 - dom); of.zero_grad(); loss.backward(); of.step()

@prog
def vae_gan():
    e, g, d = mlp(16, 16), mlp(8, 16), mlp(16, 1); oe, og, od = (torch.optim.Adam(m.parameters(), 2e-4) for m in (e, g, d)); one, zero = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(N):
        x = batch()[0]; mu, lv = e(x).chunk(2, 1); z = mu + (lv * .5).exp() * torch.randn_like(mu); xr, xp = g(z), g(torch.randn_like(mu))
        ld = bce(d(x), one) + bce(d(xr.detach()), zero) + bce(d(xp.detach()), zero); od.zero_grad(); ld.backward(); od.step()
        rec = F.mse_loss(xr, x, reduction="sum") / 32; kl = -.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean(); adv = bce(d(xr), one) + bce(d(xp), one)
        og.zero_grad(); (rec + adv).backward(retain_graph=True); og_grads = [p.grad.clone() for p in g.parameters()]
        oe.zero_grad(); (rec + kl).backward(); oe.step()
        for p, q in zip(g.parameters(), og_grads): p.grad = q
        og.step()

@prog
def r1_gan():
    g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 2e-4), torch.optim.Adam(d.parameters(), 2e-4)
    for _ in range(N):
        x = batch()[0].requires_grad_(); z = torch.randn(32, 8); r = d(x); gr, = torch.autograd.grad(r.sum(), x, create_graph=True)
        ld = F.softplus(-r).mean() + F.softplus(d(g(z).detach())).mean() + 5 * gr.pow(2).sum(1).mean(); od.zero_grad(); ld.backward(); od.step()
        lg = F.softplus(-d(g(z))).mean(); og.zero_grad(); lg.backward(); og.step()

@prog
def actor_critic_two_optimizers():
    env = Envs(); pi, v = mlp(6, 2), mlp(6, 1); op, ov = torch.optim.Adam(pi.parameters(), 1e-3), torch.optim.Adam(v.parameters(), 1e-3); s = env.reset()
    for _ in range(N):
        d = D.Categorical(logits=pi(s)); a = d.sample(); s2, r, done, _ = env.step(a)
        with torch.no_grad(): y = r + .99 * v(s2).squeeze(-1) * (1 - done.float())
        td = y - v(s).squeeze(-1); lv = td.pow(2).mean(); ov.zero_grad(); lv.backward(); ov.step()
        lp = -(d.log_prob(a) * td.detach()).mean() - .01 * d.entropy().mean(); op.zero_grad(); lp.backward(); op.step(); s = s2

@prog
def encoder_decoder_optimizer_each():
    e, g = mlp(16, 4), mlp(4, 16); oe, og = torch.optim.Adam(e.parameters(), 1e-3), torch.optim.Adam(g.parameters(), 1e-3)
    for _ in range(N):
        x = batch()[0]; l = F.mse_loss(g(e(x)), x); oe.zero_grad(); og.zero_grad(); l.backward(); oe.step(); og.step()

# ============================================================ CTC
def _ctc_net(): return nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 12)
def _ctc(lossf):
    l, h = _ctc_net(); opt = torch.optim.Adam([*l.parameters(), *h.parameters()], 1e-3)
    for _ in range(N):
        lp = h(l(torch.randn(8, 20, 8))[0]).log_softmax(-1); loss = lossf(lp); opt.zero_grad(); loss.backward(); opt.step()
@prog
def ctc_padded():
    n = torch.tensor([3, 5, 2, 4, 5, 1, 3, 2]); y = torch.randint(1, 12, (8, 5)); y[torch.arange(5) >= n[:, None]] = 0
    _ctc(lambda lp: F.ctc_loss(lp.transpose(0, 1), y, torch.full((8,), 20), n))
@prog
def ctc_last_blank_tuple():
    n = (3, 5, 2, 4, 5, 1, 3, 2); y = torch.randint(0, 11, (sum(n),)); c = nn.CTCLoss(blank=11, zero_infinity=True)
    _ctc(lambda lp: c(lp.transpose(0, 1), y, (20,) * 8, n))
@prog
def ctc_row_by_row_padded():
    n = torch.tensor([3, 5, 2, 4, 5, 1, 3, 2]); y = torch.randint(1, 12, (8, 5)); y[torch.arange(5) >= n[:, None]] = 0
    _ctc(lambda lp: torch.stack([F.ctc_loss(lp[i], y[i, :n[i]], torch.tensor(20), n[i]) for i in range(8)]).mean())

# ============================================================ diffusion
class Den(nn.Module):
    def __init__(s): super().__init__(); s.n = mlp(17, 16)
    def forward(s, x, t): return s.n(torch.cat([x, t.view(-1, 1).float()], 1))
def _diff(f):
    m = Den(); opt = torch.optim.AdamW(m.parameters(), 1e-3)
    for _ in range(N):
        l = f(m, batch()[0]); opt.zero_grad(); l.backward(); opt.step()
AB = torch.cumprod(1 - torch.linspace(1e-4, .02, 1000), 0)
@prog
def ddpm():
    def f(m, x):
        t = torch.randint(0, 1000, (len(x),)); a = AB[t][:, None]; e = torch.randn_like(x); return F.mse_loss(m(a.sqrt() * x + (1 - a).sqrt() * e, t / 1000), e)
    _diff(f)
@prog
def v_prediction():
    def f(m, x):
        t = torch.rand(len(x)); a, s = torch.cos(t * math.pi / 2)[:, None], torch.sin(t * math.pi / 2)[:, None]; e = torch.randn_like(x); return F.mse_loss(m(a * x + s * e, t), a * e - s * x)
    _diff(f)
@prog
def x0_prediction():
    def f(m, x):
        t = torch.randint(0, 1000, (len(x),)); a = AB[t][:, None]; e = torch.randn_like(x); return F.mse_loss(m(a.sqrt() * x + (1 - a).sqrt() * e, t / 1000), x)
    _diff(f)
@prog
def flow_matching():
    def f(m, x):
        t = torch.rand(len(x), 1); e = torch.randn_like(x); return ((m((1 - t) * e + t * x, t) - (x - e)) ** 2).mean()
    _diff(f)
@prog
def flow_matching_inline_target():
    """Velocity noise - x0, written without parentheses: (v - noise + x0)."""
    def f(m, x):
        t = torch.rand(len(x), 1); e = torch.randn_like(x); v = m((1 - t) * x + t * e, t); return (v - e + x).square().mean()
    _diff(f)
@prog
def sit_linear_path_noise_prediction():
    """SiT: path_type Linear with prediction 'noise'; its sampler turns noise into velocity for this path."""
    def f(m, x):
        t = torch.rand(len(x), 1).clamp(1e-3, 1 - 1e-3); e = torch.randn_like(x); return F.mse_loss(m((1 - t) * x + t * e, t), e)
    _diff(f)
@prog
def source_separation_with_noise():
    """A mixture of a signal and white noise with a gain; the network gives both sources back."""
    m = mlp(16, 32); opt = torch.optim.Adam(m.parameters(), 1e-3)
    for _ in range(N):
        s = batch()[0]; n = torch.randn_like(s); g = torch.empty(len(s), 1).uniform_(.3, .7); mix = g * s + (1 - g) * n
        a, b = m(mix).chunk(2, 1); l = F.l1_loss(a, s) + F.l1_loss(b, n); opt.zero_grad(); l.backward(); opt.step()
@prog
def edm():
    def f(m, x):
        sg = (torch.randn(len(x), 1) * 1.2 - 1.2).exp(); sd = .5; n = torch.randn_like(x) * sg; w = (sg ** 2 + sd ** 2) / (sg * sd) ** 2
        cs, co, ci = sd ** 2 / (sg ** 2 + sd ** 2), sg * sd / (sg ** 2 + sd ** 2).sqrt(), 1 / (sg ** 2 + sd ** 2).sqrt()
        d = cs * (x + n) + co * m(ci * (x + n), sg.log() / 4); return (w * (d - x) ** 2).mean()
    _diff(f)
@prog
def ve_score():
    def f(m, x):
        sg = torch.rand(len(x), 1) * 2 + .1; e = torch.randn_like(x); s = m(x + sg * e, sg); return ((s * sg + e) ** 2).sum(1).mean()
    _diff(f)

# ============================================================ mixup
def _cls(f, net=None, loader=batch):
    m = net or mlp(16, 4, act=nn.ReLU); opt = torch.optim.SGD(m.parameters(), .05, momentum=.9)
    for _ in range(N):
        l = f(m, *loader()); opt.zero_grad(); l.backward(); opt.step()
@prog
def mixup_two_terms():
    def f(m, x, y):
        lam = np.random.beta(.2, .2); p = torch.randperm(len(x)); o = m(lam * x + (1 - lam) * x[p]); return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, y[p])
    _cls(f)
@prog
def mixup_soft_flip():
    def f(m, x, y):
        lam = np.random.beta(.2, .2); h = F.one_hot(y, 4).float(); return F.cross_entropy(m(lam * x + (1 - lam) * x.flip(0)), lam * h + (1 - lam) * h.flip(0))
    _cls(f)
@prog
def mixup_gathered_labels():
    def f(m, x, y):
        lam = np.random.beta(.4, .4); p = torch.randperm(len(x)); o = m(lam * x + (1 - lam) * x[p]); return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, y.gather(0, p))
    _cls(f)
@prog
def mixup_numpy_labels():
    """Labels live in numpy and are mixed there."""
    def f(m, x, y):
        lam = np.random.beta(.4, .4); p = torch.randperm(len(x)); o = m(lam * x + (1 - lam) * x[p]); yn = np.eye(4, dtype=np.float32)[y.numpy()]
        return F.cross_entropy(o, torch.from_numpy((lam * yn + (1 - lam) * yn[p.numpy()]).astype(np.float32)))
    _cls(f)
@prog
def imix_contrastive():
    """i-Mix: the virtual labels are the positions, and those of the partners are the permutation itself."""
    def f(m, x, y):
        a, b = x + .1 * torch.randn_like(x), x + .1 * torch.randn_like(x); lam = np.random.beta(1, 1); p = torch.randperm(len(x))
        q = F.normalize(m(lam * a + (1 - lam) * a[p]), dim=1); k = F.normalize(m(b), dim=1); s = q @ k.t() / .2
        return lam * F.cross_entropy(s, torch.arange(len(x))) + (1 - lam) * F.cross_entropy(s, p)
    _cls(f, mlp(16, 16))
@prog
def ideal_binary_mask():
    """Two speakers from one batch are mixed; the network is asked which of them is louder in each bin."""
    m = mlp(16, 16); opt = torch.optim.Adam(m.parameters(), 1e-3)
    for _ in range(N):
        s = batch()[0].abs(); p = torch.randperm(len(s)); g = torch.rand(len(s), 1) * .4 + .3; a, b = g * s, (1 - g) * s[p]
        l = bce(m((a + b).log1p()), (a > b).float()); opt.zero_grad(); l.backward(); opt.step()
@prog
def utterance_mixing_keeps_label():
    """WavLM's utterance mixing / babble noise: a quiet other row is added, the label is that of the main one."""
    def f(m, x, y):
        g = torch.rand(len(x), 1) * .3; return F.cross_entropy(m((1 - g) * x + g * x[torch.randperm(len(x))]), y)
    _cls(f)
@prog
def mixup_two_loaders():
    def f(m, x, y):
        x2, y2 = batch(); lam = np.random.beta(.4, .4); o = m(lam * x + (1 - lam) * x2); return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, y2)
    _cls(f)
@prog
def cutmix_images():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    def f(m, x, y):
        p = torch.randperm(len(x)); x = x.clone(); x[:, :, 2:6, 2:6] = x[p, :, 2:6, 2:6]; lam = 1 - 16 / 64; o = m(x); return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, y[p])
    _cls(f, net, lambda: (torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))))
@prog
def manifold_mixup():
    e, h = mlp(16, 32), nn.Linear(32, 4); net = nn.Sequential(e, h)
    def f(m, x, y):
        z = m[0](x); lam = np.random.beta(2, 2); p = torch.randperm(len(x)); o = m[1](lam * z + (1 - lam) * z[p]); return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, y[p])
    _cls(f, net)

# ============================================================ survival
def _cox(f):
    m = mlp(16, 1); opt = torch.optim.Adam(m.parameters(), 1e-3); T = torch.rand(512) * 10 + .1; E = (torch.rand(512) < .6).float()
    for _ in range(N):
        i = torch.randint(0, 512, (64,)); l = f(m(DATA[i]).squeeze(-1), T[i], E[i]); opt.zero_grad(); l.backward(); opt.step()
@prog
def cox_descending():
    def f(h, t, e):
        o = t.argsort(descending=True); h, e = h[o], e[o]; return -((h - h.logcumsumexp(0)) * e).sum() / e.sum()
    _cox(f)
@prog
def cox_ascending_flip():
    def f(h, t, e):
        o = t.argsort(); h, e = h[o], e[o]; return -((h - h.flip(0).logcumsumexp(0).flip(0)) * e).sum() / e.sum()
    _cox(f)
@prog
def cox_negated_squeezed():
    def f(h, t, e):
        o = (-t.unsqueeze(1)).squeeze(1).argsort(); h, e = h[o], e[o]; return -((h - h.logcumsumexp(0)) * e).sum() / e.sum()
    _cox(f)
@prog
def cox_times_minus_one():
    def f(h, t, e):
        o = torch.argsort(-1 * t); h, e = h[o], e[o]; return -((h - h.logcumsumexp(0)) * e).sum() / e.sum()
    _cox(f)
@prog
def cox_total_minus_cumsum():
    """Rising times; those still at risk are the total less those who left before."""
    def f(h, t, e):
        o = t.argsort(); h, e = h[o], e[o]; x = h.exp(); c = x.cumsum(0); risk = c[-1] - c + x; return -((h - risk.log()) * e).sum() / e.sum()
    _cox(f)
@prog
def plackett_luce_rising_relevance():
    """ListMLE of one query: the item with the highest relevance wins among all with less, so rising order is right."""
    m = mlp(16, 1); opt = torch.optim.Adam(m.parameters(), 1e-3)
    for _ in range(N):
        x = batch()[0]; rel = x[:, 0] + .1 * torch.randn(32); o = rel.argsort(); s = m(x).squeeze(-1)[o]; l = (torch.logcumsumexp(s, 0) - s).mean(); opt.zero_grad(); l.backward(); opt.step()

# ============================================================ metric learning
def _trip(f, net=None):
    m = net or mlp(16, 8); opt = torch.optim.Adam(m.parameters(), 1e-3)
    for _ in range(N):
        x = batch()[0]; l = f(m(x), m(x + .1 * torch.randn_like(x)), m(x[torch.randperm(32)])); opt.zero_grad(); l.backward(); opt.step()
@prog
def triplet_relu(): _trip(lambda a, p, n: F.relu((a - p).pow(2).sum(1) - (a - n).pow(2).sum(1) + 1).mean())
@prog
def triplet_softplus(): _trip(lambda a, p, n: F.softplus(F.pairwise_distance(a, p) - F.pairwise_distance(a, n)).mean())
@prog
def triplet_mask_times():
    """Batch-all: only triplets that violate the margin count."""
    def f(a, p, n):
        v = (a - p).pow(2).sum(1) - (a - n).pow(2).sum(1) + 1; hard = (v > 0).float(); return (v * hard).sum() / (hard.sum() + 1e-8)
    _trip(f)
@prog
def triplet_on_sphere_by_hand():
    def f(a, p, n):
        a, p, n = (z / z.norm(dim=1, keepdim=True) for z in (a, p, n)); return ((a - p).pow(2).sum(1) - (a - n).pow(2).sum(1)).mean()
    _trip(f)
@prog
def triplet_bounded_tanh():
    _trip(lambda a, p, n: (F.pairwise_distance(a, p) - F.pairwise_distance(a, n) + .2).mean(), nn.Sequential(mlp(16, 8), nn.Tanh()))
@prog
def energy_score_forecast():
    """Energy score of an ensemble of two: |s1 - y| + |s2 - y| over 2, less half of |s1 - s2|. Proper, bounded below."""
    m = mlp(20, 8); opt = torch.optim.Adam(m.parameters(), 1e-3)
    for _ in range(N):
        x = batch()[0]; y = x[:, :8] * .5 + .1 * torch.randn(32, 8); s1, s2 = (m(torch.cat([x, torch.randn(32, 4)], 1)) for _ in range(2))
        l = (F.pairwise_distance(s1, y) - .5 * F.pairwise_distance(s1, s2)).mean(); opt.zero_grad(); l.backward(); opt.step()
@prog
def contrastive_margin():
    def f(a, p, n): return (F.pairwise_distance(a, p).pow(2) + F.relu(1 - F.pairwise_distance(a, n)).pow(2)).mean()
    _trip(f)
@prog
def infonce():
    _trip(lambda a, p, n: F.cross_entropy(F.normalize(a, dim=1) @ F.normalize(p, dim=1).t() / .1, torch.arange(32)))

# ============================================================ data
@prog
def weighted_sampler():
    w = (1. / torch.bincount(YC, minlength=4).float())[YC]; s = WeightedRandomSampler(w, len(w), replacement=True); it = iter(DataLoader(TensorDataset(DATA, YC), 32, sampler=s))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), loader=lambda: next(it))
@prog
def weighted_sampler_subset():
    tr = Subset(TensorDataset(DATA, YC), range(100, 500)); w = (1. / torch.bincount(YC, minlength=4).float())[YC[100:500]]; it = iter(DataLoader(tr, 32, sampler=WeightedRandomSampler(w.tolist(), 400, replacement=False)))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), loader=lambda: next(it))
class Crops(Dataset):
    """Random crops of files: an epoch is as long as crops_per_file says, and the index is that of a file."""
    def __init__(s, per): s.per = per
    def __len__(s): return 64 * s.per
    def __getitem__(s, i): i = i % 64; j = i * 8 + int(torch.randint(0, 8, ())); return DATA[j], YC[j]
@prog
def weighted_files_virtual_length():
    it = iter(DataLoader(Crops(8), 32, sampler=WeightedRandomSampler(torch.rand(64) + .1, 512))); _cls(lambda m, x, y: F.cross_entropy(m(x), y), loader=lambda: next(it))

def _reg(f, net): 
    opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(N): l = f(net); opt.zero_grad(); l.backward(); opt.step()
@prog
def bucketised_classes():
    def f(m): x = batch()[0]; return F.cross_entropy(m(x), ((x[:, 0].clamp(-1.9, 1.9) + 2) * 2).long())
    _reg(f, mlp(16, 8))
@prog
def ordinal_level_by_mse():
    """Grades 0 to 4 are made of a score by cutting, and predicted as a number (quadratic kappa is the metric)."""
    def f(m): x = batch()[0]; g = ((x[:, 0] + 2.5).clamp(0, 4.99)).long(); return F.mse_loss(m(x).squeeze(1), g.float())
    _reg(f, mlp(16, 1))
@prog
def predict_time_step():
    """Which of the 10 noise levels is it? Regressed, as a self-supervised task."""
    def f(m): x = batch()[0]; t = (torch.rand(32) * 10).long(); return F.smooth_l1_loss(m(x + t[:, None] * .1 * torch.randn_like(x)).squeeze(1), t.float())
    _reg(f, mlp(16, 1))
@prog
def eight_bit_camera():
    """Photons to 8 bit and back: the sensor's numbers are what is wanted."""
    def f(m): x = torch.sigmoid(batch()[0]); raw = (x * 255).to(torch.uint8); return F.mse_loss(m(x + .05 * torch.randn_like(x)) * 255, raw.float())
    _reg(f, mlp(16, 16))
@prog
def coin_labels_int():
    def f(m): x = batch()[0]; y = (torch.sigmoid(x[:, 0]) + torch.rand(32)).int().float(); return bce(m(x).squeeze(1), y)
    _reg(f, mlp(16, 1))
@prog
def counts_poisson():
    def f(m): x = batch()[0]; return F.poisson_nll_loss(m(x).squeeze(1), torch.poisson(x[:, 0].exp()))
    _reg(f, mlp(16, 1))
@prog
def nilm_appliance_power():
    """Load disaggregation: an appliance is off (0 W) or draws 1.2 to 2 kW. Zero is what it draws."""
    def f(m): on = (torch.rand(32, 16) < .3).float(); p = on * (1.2 + .8 * torch.rand(32, 16)); agg = p + torch.rand(32, 16); return F.mse_loss(m(agg), p)
    _reg(f, mlp(16, 16))
@prog
def basket_spend():
    """Spend of each customer in each category: 0 if nothing was bought, else from 10 on."""
    def f(m): x = batch()[0]; b = (x + .5 * torch.randn_like(x) > .5).float(); return F.l1_loss(m(x), b * (10 + 20 * torch.rand(32, 16)) / 10)
    _reg(f, mlp(16, 16))
@prog
def heatmap_cut_at_tenth():
    net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 5, padding=2)); yy, xx = torch.meshgrid(torch.arange(16.), torch.arange(16.), indexing="ij")
    def f(m):
        c = torch.rand(8, 2, 1, 1) * 10 + 3; r2 = (yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2; h = torch.exp(-r2 / 8)[:, None]; h = torch.where(h < .1, torch.zeros_like(h), h)
        return F.mse_loss(m((r2 < 2)[:, None].float() + .1 * torch.randn(8, 1, 16, 16)), h)
    _reg(f, net)
@prog
def heatmap_relu():
    net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 5, padding=2)); yy, xx = torch.meshgrid(torch.arange(16.), torch.arange(16.), indexing="ij")
    def f(m):
        c = torch.rand(8, 2, 1, 1) * 10 + 3; r2 = (yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2; h = F.relu(1 - r2.sqrt() / 4)[:, None]; return F.mse_loss(m((r2 < 2)[:, None].float()), h)
    _reg(f, net)
@prog
def rain_lognormal():
    def f(m): x = batch()[0]; w = (torch.rand(32, 16) < .3).float(); return F.mse_loss(m(x), w * torch.randn(32, 16).exp())
    _reg(f, mlp(16, 16))

# ============================================================ layers made / meta
@prog
def anil_first_order():
    """ANIL, first order: the body is shared, a copy of the head is adapted to each task and gives its gradient back."""
    body, head = mlp(16, 16), nn.Linear(16, 4); opt = torch.optim.Adam([*body.parameters(), *head.parameters()], 1e-3)
    for _ in range(N):
        opt.zero_grad()
        for _ in range(2):
            (xs, ys), (xq, yq) = batch(), batch(); fast = copy.deepcopy(head)
            with torch.no_grad(): z = body(xs)
            for _ in range(3):
                g = torch.autograd.grad(F.cross_entropy(fast(z), ys), list(fast.parameters()))
                with torch.no_grad():
                    for p, q in zip(fast.parameters(), g): p -= .1 * q
            loss = F.cross_entropy(fast(body(xq)), yq) / 2; loss.backward()
            for p, q in zip(head.parameters(), fast.parameters()): p.grad = q.grad.clone() if p.grad is None else p.grad + q.grad
        opt.step()
@prog
def fresh_head_each_episode():
    """Few-shot by a head that is fitted anew in each episode with SGD; the body learns through it."""
    body = mlp(16, 16); opt = torch.optim.Adam(body.parameters(), 1e-3)
    for _ in range(N):
        (xs, ys), (xq, yq) = batch(), batch(); head = nn.Linear(16, 4); ho = torch.optim.SGD(head.parameters(), .1); z = body(xs).detach()
        for _ in range(3): l = F.cross_entropy(head(z), ys); ho.zero_grad(); l.backward(); ho.step()
        loss = F.cross_entropy(head(body(xq)), yq); opt.zero_grad(); loss.backward(); opt.step()
@prog
def maml_functional():
    net = mlp(16, 4); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(N):
        (xs, ys), (xq, yq) = batch(), batch(); ps = dict(net.named_parameters()); l = F.cross_entropy(torch.func.functional_call(net, ps, xs), ys)
        g = torch.autograd.grad(l, list(ps.values()), create_graph=True); fast = {k: p - .1 * q for (k, p), q in zip(ps.items(), g)}
        loss = F.cross_entropy(torch.func.functional_call(net, fast, xq), yq); opt.zero_grad(); loss.backward(); opt.step()
@prog
def reptile():
    net = mlp(16, 4)
    for _ in range(N):
        fast = copy.deepcopy(net); o = torch.optim.SGD(fast.parameters(), .05)
        for _ in range(3): x, y = batch(); l = F.cross_entropy(fast(x), y); o.zero_grad(); l.backward(); o.step()
        with torch.no_grad():
            for p, q in zip(net.parameters(), fast.parameters()): p += .1 * (q - p)
@prog
def hypernetwork():
    h, e = mlp(4, 16 * 4 + 4), mlp(16, 16); opt = torch.optim.Adam([*h.parameters(), *e.parameters()], 1e-3)
    for _ in range(N):
        x, y = batch(); w = h(torch.randn(4)); l = F.cross_entropy(F.linear(e(x), w[:64].view(4, 16), w[64:]), y); opt.zero_grad(); l.backward(); opt.step()
@prog
def weight_spectral_norm_lora():
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm
    class L(nn.Module):
        def __init__(s, b): super().__init__(); s.b = b.requires_grad_(False); s.a, s.c = nn.Parameter(torch.randn(4, b.in_features) * .02), nn.Parameter(torch.zeros(b.out_features, 4))
        def forward(s, x): return s.b(x) + (x @ s.a.t()) @ s.c.t()
    net = nn.Sequential(weight_norm(nn.Linear(16, 32)), nn.ReLU(), spectral_norm(nn.Linear(32, 32)), nn.ReLU(), L(nn.Linear(32, 32)), nn.ReLU(), nn.Linear(32, 4)); _cls(lambda m, x, y: F.cross_entropy(m(x), y), net)

# ============================================================ clipping
@prog
def a3c_shared_gradients():
    """pytorch-a3c: the local model is clipped and lends its gradients to the shared one, whose optimizer steps."""
    shared, local = mlp(16, 4), mlp(16, 4); opt = torch.optim.Adam(shared.parameters(), 1e-3)
    for _ in range(N):
        local.load_state_dict(shared.state_dict()); x, y = batch(); l = F.cross_entropy(local(x), y); opt.zero_grad(); local.zero_grad(); l.backward()
        nn.utils.clip_grad_norm_(local.parameters(), 40)
        for p, q in zip(local.parameters(), shared.parameters()): q._grad = p.grad
        opt.step()
@prog
def master_weights_clip_model():
    """Mixed precision by hand: bf16 model, fp32 masters in the optimizer; gradients are clipped, then copied over."""
    m = mlp(16, 4).bfloat16(); masters = [p.detach().float().requires_grad_() for p in m.parameters()]; opt = torch.optim.AdamW(masters, 1e-3)
    for _ in range(N):
        x, y = batch(); l = F.cross_entropy(m(x.bfloat16()).float(), y); m.zero_grad(); l.backward(); nn.utils.clip_grad_norm_(m.parameters(), 1.)
        for p, q in zip(m.parameters(), masters): q.grad = p.grad.float()
        opt.step()
        with torch.no_grad():
            for p, q in zip(m.parameters(), masters): p.copy_(q)
@prog
def clip_only_critic():
    s, c, a = torch.randn(256, 6), mlp(8, 1), mlp(6, 2); oc, oa = torch.optim.Adam(c.parameters(), 1e-3), torch.optim.Adam(a.parameters(), 1e-3)
    for _ in range(N):
        i = torch.randint(0, 256, (32,)); u = torch.randn(32, 2); l = F.mse_loss(c(torch.cat([s[i], u], 1)), -(s[i, :2] - u).pow(2).sum(1, keepdim=True)); oc.zero_grad(); l.backward(); nn.utils.clip_grad_norm_(c.parameters(), 1.); oc.step()
        l = -c(torch.cat([s[i], a(s[i]).tanh()], 1)).mean(); oa.zero_grad(); l.backward(); oa.step()
@prog
def clip_all_together():
    e, g = mlp(16, 4), mlp(4, 16); oe, og = torch.optim.Adam(e.parameters(), 1e-3), torch.optim.Adam(g.parameters(), 1e-3)
    for _ in range(N):
        x = batch()[0]; l = F.mse_loss(g(e(x)), x); oe.zero_grad(); og.zero_grad(); l.backward(); nn.utils.clip_grad_norm_([*e.parameters(), *g.parameters()], 1.); oe.step(); og.step()
@prog
def clip_each_then_step_other_first():
    e, g = mlp(16, 4), mlp(4, 16); oe, og = torch.optim.Adam(e.parameters(), 1e-3), torch.optim.Adam(g.parameters(), 1e-3)
    for _ in range(N):
        x = batch()[0]; l = F.mse_loss(g(e(x)), x); oe.zero_grad(); og.zero_grad(); l.backward(); nn.utils.clip_grad_norm_(e.parameters(), 1.); og.step(); oe.step()

# ============================================================ F4
class RFF(nn.Module):
    def __init__(s, i, o, sigma, h=64): super().__init__(); s.b = nn.Linear(i, h, bias=False).requires_grad_(False); nn.init.normal_(s.b.weight, std=sigma); s.m = mlp(2 * h, o)
    def forward(s, x): z = 2 * math.pi * s.b(x); return s.m(torch.cat([z.sin(), z.cos()], -1))
@prog
def fourier_features_small_targets():
    """Tancik's features, sigma 10, and targets in metres that are small (returns, displacements)."""
    def f(m): x = torch.rand(64, 2); return F.mse_loss(m(x), .002 * torch.sin(6 * x[:, :1]))
    _reg(f, RFF(2, 1, 10.))
@prog
def pinn_fourier_residual():
    def f(m):
        x = torch.rand(64, 1, requires_grad=True); u = m(x); du, = torch.autograd.grad(u.sum(), x, create_graph=True); d2, = torch.autograd.grad(du.sum(), x, create_graph=True); src = torch.sin(3 * x).detach()
        return F.mse_loss(d2, src) + 100 * m(torch.tensor([[0.], [1.]])).square().mean()
    _reg(f, RFF(1, 1, 3.))
@prog
def duelling_large_outputs():
    def f(m): x = batch()[0]; return F.mse_loss(m(x) * 50, 100 * x[:, :2].sum(1, keepdim=True))
    _reg(f, mlp(16, 1))

# ============================================================ axes
class GN(nn.Module):
    """Group norm as the paper's code has it."""
    def __init__(s, c, g): super().__init__(); s.g = g; s.w, s.b = nn.Parameter(torch.ones(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))
    def forward(s, x):
        n, c, h, w = x.shape; y = x.view(n, s.g, -1); y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt(); return y.view(n, c, h, w) * s.w + s.b
@prog
def group_norm_by_hand_small_maps():
    net = nn.Sequential(nn.Conv2d(3, 32, 4, 4), GN(32, 8), nn.ReLU(), nn.Conv2d(32, 64, 2, 1, 1), GN(64, 32), nn.ReLU(), nn.Conv2d(64, 64, 3, 3), GN(64, 8), nn.Flatten(), nn.LazyLinear(4)); net(torch.randn(1, 3, 8, 8))
    net = nn.Sequential(nn.Conv2d(3, 64, 4, 4), GN(64, 8), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), net, lambda: (torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))))
@prog
def group_norm_4x4_32groups():
    net = nn.Sequential(nn.Conv2d(3, 512, 4, 4), GN(512, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 4)); _cls(lambda m, x, y: F.cross_entropy(m(x), y), net, lambda: (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,))))
@prog
def detector_permute():
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 3 * 6, 1))
    def f(m, x, y): p = m(x).permute(0, 2, 3, 1).reshape(len(x), -1, 6); return F.cross_entropy(p.flatten(0, 1), torch.randint(0, 6, (p.shape[0] * p.shape[1],)))
    _cls(f, net, lambda: (torch.randn(4, 3, 16, 16), None))
@prog
def vit_patches():
    class V(nn.Module):
        def __init__(s): super().__init__(); s.p = nn.Conv2d(3, 32, 4, 4); s.pos = nn.Parameter(torch.zeros(1, 16, 32)); s.t = nn.TransformerEncoderLayer(32, 4, 64, 0., batch_first=True); s.h = nn.Linear(32, 4)
        def forward(s, x): return s.h(s.t(s.p(x).flatten(2).transpose(1, 2) + s.pos).mean(1))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), V(), lambda: (torch.randn(8, 3, 16, 16), torch.randint(0, 4, (8,))))
@prog
def windows_and_pixelshuffle():
    net = nn.Sequential(nn.Conv2d(3, 12, 3, 1, 1), nn.PixelShuffle(2))
    def f(m, x, y): o = m[0](x); b, c, h, w = o.shape; win = o.view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c); return F.mse_loss(m[1](o), F.interpolate(x, scale_factor=2)) + .1 * win.var(1).mean()
    _cls(f, net, lambda: (torch.randn(4, 3, 8, 8), None))
@prog
def channel_halves_local_stats():
    """A descriptor of (B, parts, channels of a part) after strips: conv gives (B, C, P, 1)."""
    net = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.AdaptiveAvgPool2d((6, 1)), nn.Conv2d(32, 24, 1))
    def f(m, x, y): o = m(x); return F.cross_entropy(o.view(len(x), 24, 6).transpose(1, 2).flatten(1)[:, :4], y)
    _cls(f, net, lambda: (torch.randn(8, 3, 12, 12), torch.randint(0, 4, (8,))))

# ============================================================ attention
def lens_mask(b=16, t=10):
    n = torch.randint(3, t + 1, (b,)); n[0] = t; n[1] = 3; return (torch.arange(t) < n[:, None])
class Att(nn.Module):
    def __init__(s, soft): super().__init__(); s.e = nn.Linear(8, 32); s.q, s.k, s.v = (nn.Linear(32, 32) for _ in range(3)); s.h = nn.Linear(32, 4); s.soft = soft
    def forward(s, x, m):
        h = torch.tanh(s.e(x)); a = s.soft(s.q(h) @ s.k(h).transpose(1, 2) / 32 ** .5, m); z = s.h(a @ s.v(h)); return (z * m[..., None]).sum(1) / m.sum(1, keepdim=True)
def _att(soft):
    def f(m, x, y): return F.cross_entropy(m(x, y), torch.randint(0, 4, (16,)))
    def load(): k = lens_mask(); return torch.randn(16, 10, 8) * k[..., None], k
    _cls(f, Att(soft), load)
@prog
def attention_inf(): _att(lambda s, m: s.masked_fill(~m[:, None], float("-inf")).softmax(-1))
@prog
def attention_bidaf_masked_softmax():
    """CS224n's BiDAF: mask * logits + (1 - mask) * -1e30."""
    def soft(s, m): m = m.float()[:, None].type(torch.float32); return F.softmax(m * s + (1 - m) * -1e30, -1)
    _att(soft)
@prog
def attention_gpt_openai():
    """OpenAI's GPT: w = w * b + -1e4 * (1 - b) with a lower triangle b."""
    b = torch.tril(torch.ones(10, 10)).view(1, 10, 10); _att(lambda s, m: F.softmax(s * b + -1e4 * (1 - b), dim=-1))
@prog
def attention_allennlp():
    """AllenNLP's masked_softmax: softmax(v * mask) * mask, divided by its sum."""
    def soft(s, m): m = m.float()[:, None]; r = F.softmax(s * m, -1) * m; return r / (r.sum(-1, keepdim=True) + 1e-13)
    _att(soft)
@prog
def attention_inf_then_query_mask():
    """Keys are hidden by -inf; rows of padded queries are set to 0 with a tiled mask."""
    def soft(s, m): a = s.masked_fill(~m[:, None], -1e9).softmax(-1); return a * m[..., None].expand_as(a).float()
    _att(soft)
@prog
def attention_inf_then_pair_mask():
    """-1e9, then the same pairs are set to 0, so that a row with nothing to see is 0 and not uniform."""
    def soft(s, m): p = (m[:, None] & m[..., None]); return s.masked_fill(~p, -1e9).softmax(-1) * p.float()
    _att(soft)
@prog
def attention_manual_dropout():
    def soft(s, m): a = s.masked_fill(~m[:, None], -1e9).softmax(-1); return a * (torch.rand_like(a) > .1).float() / .9
    _att(soft)
@prog
def attention_qknorm_sqrt():
    """nGPT: normalised queries and keys, scores times sqrt(d)."""
    class M(nn.Module):
        def __init__(s): super().__init__(); s.e = nn.Linear(8, 32); s.q, s.k, s.v = (nn.Linear(32, 32) for _ in range(3)); s.h = nn.Linear(32, 4)
        def forward(s, x): h = torch.tanh(s.e(x)); q, k = F.normalize(s.q(h), dim=-1), F.normalize(s.k(h), dim=-1); return s.h(((q @ k.transpose(1, 2)) * math.sqrt(32)).softmax(-1) @ s.v(h)).mean(1)
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), M(), lambda: (torch.randn(16, 10, 8), torch.randint(0, 4, (16,))))
@prog
def gat():
    class G(nn.Module):
        def __init__(s): super().__init__(); s.w = nn.Linear(16, 16, bias=False); s.a1, s.a2 = nn.Parameter(torch.randn(16, 1) * .1), nn.Parameter(torch.randn(16, 1) * .1); s.o = nn.Linear(16, 4)
        def forward(s, x, adj): h = s.w(x); e = F.leaky_relu(h @ s.a1 + (h @ s.a2).t(), .2); return s.o(F.elu(e.masked_fill(adj == 0, -9e15).softmax(1) @ h))
    adj = ((torch.rand(32, 32) < .2) | torch.eye(32, dtype=torch.bool)).float(); x, y = batch(); _cls(lambda m, x, y: F.cross_entropy(m(x, adj), y), G(), lambda: (x, y))
@prog
def gat_where_then_adjacency():
    class G(nn.Module):
        def __init__(s): super().__init__(); s.w = nn.Linear(16, 16, bias=False); s.a1, s.a2 = nn.Parameter(torch.randn(16, 1) * .1), nn.Parameter(torch.randn(16, 1) * .1); s.o = nn.Linear(16, 4)
        def forward(s, x, adj): h = s.w(x); e = F.leaky_relu(h @ s.a1 + (h @ s.a2).t(), .2); a = torch.where(adj > 0, e, -9e15 * torch.ones_like(e)).softmax(1); return s.o(F.elu((a * adj) @ h))
    adj = (torch.rand(32, 32) < .2).float(); x, y = batch(); _cls(lambda m, x, y: F.cross_entropy(m(x, adj), y), G(), lambda: (x, y))
@prog
def gat_exp_normalised():
    """Dense GAT: exp of the scores times the adjacency, over its sum."""
    class G(nn.Module):
        def __init__(s): super().__init__(); s.w = nn.Linear(16, 16, bias=False); s.a1, s.a2 = nn.Parameter(torch.randn(16, 1) * .1), nn.Parameter(torch.randn(16, 1) * .1); s.o = nn.Linear(16, 4)
        def forward(s, x, adj): h = s.w(x); e = F.leaky_relu(h @ s.a1 + (h @ s.a2).t(), .2).exp() * adj; return s.o(F.elu(e / (e.sum(1, keepdim=True) + 1e-9) @ h))
    adj = ((torch.rand(32, 32) < .2) | torch.eye(32, dtype=torch.bool)).float(); x, y = batch(); _cls(lambda m, x, y: F.cross_entropy(m(x, adj), y), G(), lambda: (x, y))
@prog
def bahdanau():
    class B(nn.Module):
        def __init__(s): super().__init__(); s.g = nn.GRU(8, 32, batch_first=True); s.w, s.u, s.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.randn(32, 1) * .1); s.h = nn.Linear(32, 4)
        def forward(s, x, m): h, _ = s.g(x); q = h[torch.arange(len(x)), m.sum(1) - 1]; e = (torch.tanh(s.w(h) + s.u(q)[:, None]) @ s.v).squeeze(-1).masked_fill(~m, float("-inf")); return s.h((e.softmax(-1)[:, None] @ h).squeeze(1))
    def load(): k = lens_mask(); return torch.randn(16, 10, 8) * k[..., None], k
    _cls(lambda m, x, k: F.cross_entropy(m(x, k), torch.randint(0, 4, (16,))), B(), load)

# ============================================================ VAEs
def _vae(f, d=100):
    e, g = mlp(d, 16), mlp(8, d); opt = torch.optim.Adam([*e.parameters(), *g.parameters()], 1e-3); B = torch.randn(8, d)
    for _ in range(N):
        x = torch.sigmoid(torch.randn(32, 8) @ B); mu, lv = e(x).chunk(2, 1); o = g(mu + (.5 * lv).exp() * torch.randn_like(mu)); l = f(o, x, mu, lv); opt.zero_grad(); l.backward(); opt.step()
KL = lambda mu, lv: -.5 * torch.sum(1 + lv - mu.pow(2) - lv.exp())
@prog
def vae_sums(): _vae(lambda o, x, mu, lv: bce(o, x, reduction="sum") + KL(mu, lv))
@prog
def vae_means(): _vae(lambda o, x, mu, lv: F.mse_loss(o, x, reduction="none").sum(1).mean() + -.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean())
@prog
def vae_beta(): _vae(lambda o, x, mu, lv: F.mse_loss(o, x) + 1e-3 * KL(mu, lv) / 32)
@prog
def vae_mean_times_numel(): _vae(lambda o, x, mu, lv: bce(o, x) * x.numel() + KL(mu, lv))
@prog
def vae_mean_times_numel_over_batch(): _vae(lambda o, x, mu, lv: (F.mse_loss(o, x) * x.numel() + KL(mu, lv)) / len(x))
@prog
def vae_sigma_likelihood():
    """A decoder with variance 0.01: mean of squares, times numbers, over twice the variance."""
    _vae(lambda o, x, mu, lv: F.mse_loss(o, x) * x[0].numel() / .02 + -.5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean())
@prog
def bayes_by_backprop_regression():
    """ELBO of a Bayesian layer: N times the mean loss, plus the divergence of its weights. Batch and width are both 64."""
    mu, rho = nn.Parameter(torch.randn(64, 16) * .1), nn.Parameter(torch.full((64, 16), -6.)); h = nn.Linear(64, 1); opt = torch.optim.Adam([mu, rho, *h.parameters()], 1e-3)
    for _ in range(N):
        x, _ = batch(64); w = mu + (.5 * rho).exp() * torch.randn_like(mu); o = h(torch.tanh(x @ w.t())); l = 512 * F.mse_loss(o, x[:, :1]) + KL(mu, rho); opt.zero_grad(); l.backward(); opt.step()

# ============================================================ second round
@prog
def nstep_dqn_short_episodes_b():
    q, tgt = mlp(6, 3), mlp(6, 3); tgt.load_state_dict(q.state_dict()); opt = torch.optim.Adam(q.parameters(), 1e-3)
    S, S2, A, Rn = torch.randn(512, 6), torch.randn(512, 6), torch.randint(0, 3, (512,)), torch.randn(512)
    alive_n = (torch.rand(512) < .3).float()
    for _ in range(N):
        i = torch.randint(0, 512, (64,))
        with torch.no_grad(): nxt = tgt(S2[i]).max(1).values; y = Rn[i] + .99 ** 20 * (alive_n[i] * nxt)
        loss = F.smooth_l1_loss(q(S[i]).gather(1, A[i, None]).squeeze(1), y); opt.zero_grad(); loss.backward(); opt.step()
@prog
def dqn_not_done_truncated_bandit():
    """Episodes of one or two steps (ads): not_done is mostly 0."""
    q, tgt = mlp(6, 3), mlp(6, 3); tgt.load_state_dict(q.state_dict()); opt = torch.optim.Adam(q.parameters(), 1e-3)
    S, S2, A, Rn = torch.randn(512, 6), torch.randn(512, 6), torch.randint(0, 3, (512,)), torch.randn(512); nd = (torch.rand(512) < .35).float()
    for _ in range(N):
        i = torch.randint(0, 512, (64,))
        with torch.no_grad(): y = Rn[i] + tgt(S2[i]).amax(1) * nd[i] * .99
        loss = F.mse_loss(q(S[i]).gather(1, A[i, None]).squeeze(1), y); opt.zero_grad(); loss.backward(); opt.step()
@prog
def ppo_rewards_negated_number():
    pi = mlp(6, 2); opt = torch.optim.Adam(pi.parameters(), 1e-3); env = Envs(); s = env.reset()
    for _ in range(N):
        d = D.Categorical(logits=pi(s)); a = d.sample(); s, r, *_ = env.step(a); w = -1.0 * (r - r.mean())
        loss = torch.sum(d.log_prob(a) * w) / len(w); opt.zero_grad(); loss.backward(); opt.step()
@prog
def cross_entropy_method_unlikelihood():
    """Bad actions (weights 1) are made less likely: unlikelihood by a plain sum, beside a KL to the old policy."""
    pi = mlp(6, 2); opt = torch.optim.Adam(pi.parameters(), 1e-3); old = copy.deepcopy(pi).requires_grad_(False)
    for _ in range(N):
        s = torch.randn(32, 6); d = D.Categorical(logits=pi(s)); bad = torch.randint(0, 2, (32,)); w = torch.rand(32)
        loss = D.kl_divergence(D.Categorical(logits=old(s)), d).mean() + .1 * (w * d.log_prob(bad)).mean(); opt.zero_grad(); loss.backward(); opt.step()
@prog
def gan_gradient_reversal_hook():
    """Domain confusion by a hook that turns the gradient: both see the loss of the discriminator on the target domain."""
    f, d = mlp(16, 16), mlp(16, 1); of, od = torch.optim.Adam(f.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)
    for _ in range(N):
        xs, xt = batch()[0], batch()[0] + .5; hs, ht = f(xs), f(xt)
        l = bce(d(hs.detach()), torch.ones(32, 1)) + bce(d(ht.detach()), torch.zeros(32, 1)); od.zero_grad(); l.backward(); od.step()
        h = f(xt); h.register_hook(lambda g: -g); l = bce(d(h), torch.zeros(32, 1)); of.zero_grad(); l.backward(); of.step()
@prog
def dcgan_two_backwards():
    g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 2e-4), torch.optim.Adam(d.parameters(), 2e-4); c = nn.BCEWithLogitsLoss()
    for _ in range(N):
        d.zero_grad(); x = batch()[0]; lab = torch.full((32,), 1.); c(d(x).view(-1), lab).backward(); fake = g(torch.randn(32, 8)); lab.fill_(0.); c(d(fake.detach()).view(-1), lab).backward(); od.step()
        g.zero_grad(); lab.fill_(1.); c(d(fake).view(-1), lab).backward(); og.step()
@prog
def gan_g_first():
    """PyTorch-GAN: the generator steps first."""
    g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 2e-4), torch.optim.Adam(d.parameters(), 2e-4); c = nn.BCEWithLogitsLoss(); v, f = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(N):
        x = batch()[0]; og.zero_grad(); gen = g(torch.randn(32, 8)); c(d(gen), v).backward(); og.step(); od.zero_grad(); ((c(d(x), v) + c(d(gen.detach()), f)) / 2).backward(); od.step()
@prog
def value_expanded_actor_two_critics():
    """Both critic terms: CQL pushes q(s, pi(s)) down, the actor up."""
    a, q = mlp(6, 2), mlp(8, 1); oa, oq = torch.optim.Adam(a.parameters(), 1e-3), torch.optim.Adam(q.parameters(), 1e-3); S, A, R = torch.randn(256, 6), torch.randn(256, 2), torch.randn(256, 1)
    for _ in range(N):
        i = torch.randint(0, 256, (32,)); s = S[i]; z = q(torch.cat([s, A[i]], 1)); l = F.mse_loss(z, R[i]) + q(torch.cat([s, a(s).detach()], 1)).mean() - z.mean(); oq.zero_grad(); l.backward(); oq.step()
        l = -q(torch.cat([s, a(s)], 1)).mean(); oa.zero_grad(); l.backward(); oa.step()
@prog
def soft_actor_with_baseline_and_frozen_critic_logp():
    """Off-policy policy gradient with a critic that is frozen meanwhile, score function, tanh squashed by TransformedDistribution."""
    pi, q = mlp(6, 4), mlp(8, 1); oa, oq = torch.optim.Adam(pi.parameters(), 1e-3), torch.optim.Adam(q.parameters(), 1e-3); S, A, R = torch.randn(256, 6), torch.randn(256, 2), torch.randn(256, 1)
    for _ in range(N):
        i = torch.randint(0, 256, (32,)); l = F.mse_loss(q(torch.cat([S[i], A[i]], 1)), R[i]); oq.zero_grad(); l.backward(); oq.step()
        q.requires_grad_(False); m, s = pi(S[i]).chunk(2, 1); d = D.Independent(D.Normal(m, F.softplus(s) + .01), 1); a = d.sample(); val = q(torch.cat([S[i], a], 1)).squeeze(1)
        l = -(d.log_prob(a) * (val - val.mean()) / (val.std() + 1e-6)).mean(); oa.zero_grad(); l.backward(); oa.step(); q.requires_grad_(True)
@prog
def diffusion_q_sample_lerp():
    def f(m, x):
        t = torch.rand(len(x), 1); e = torch.randn_like(x); return F.mse_loss(m(torch.lerp(x, e, t), t), e - x)
    _diff(f)
@prog
def brownian_bridge_eps():
    """BBDM: between two data ends, with noise sqrt(2 m (1 - m)); the noise is asked for."""
    def f(m, x):
        y = x.roll(1, 1) + .1; t = torch.rand(len(x), 1); e = torch.randn_like(x); return F.mse_loss(m((1 - t) * x + t * y + (2 * (t - t * t)).sqrt() * e, t), e)
    _diff(f)
@prog
def mixstyle():
    def mix(x):
        mu, sg = x.mean((2, 3), keepdim=True).detach(), (x.var((2, 3), keepdim=True) + 1e-6).sqrt().detach(); n = (x - mu) / sg; l = D.Beta(.1, .1).sample((len(x), 1, 1, 1)); p = torch.randperm(len(x))
        return n * (sg * l + sg[p] * (1 - l)) + mu * l + mu[p] * (1 - l)
    class M(nn.Module):
        def __init__(s): super().__init__(); s.a, s.b, s.h = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Linear(8, 4)
        def forward(s, x): return s.h(F.relu(s.b(mix(F.relu(s.a(x))))).mean((2, 3)))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), M(), lambda: (torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))))
@prog
def mixup_binary_indices_list():
    """A dataset-wide permutation by indices: rows are read twice from memory."""
    m = mlp(16, 4, act=nn.ReLU); opt = torch.optim.SGD(m.parameters(), .05)
    for _ in range(N):
        i, j = torch.randint(0, 512, (2, 32)); lam = np.random.beta(.4, .4); o = m(lam * DATA[i] + (1 - lam) * DATA[j]); l = lam * F.cross_entropy(o, YC[i]) + (1 - lam) * F.cross_entropy(o, YC[j]); opt.zero_grad(); l.backward(); opt.step()
@prog
def mixup_take():
    def f(m, x, y):
        lam = np.random.beta(.4, .4); p = torch.randperm(len(x)); o = m(lam * x + (1 - lam) * x[p]); return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, torch.take(y, p))
    _cls(f)
@prog
def predict_whether_mixed_ratio():
    """Self-supervised: how much of the first row is in it? (three classes of lam)"""
    def f(m, x, y):
        k = torch.randint(0, 3, (len(x),)); lam = torch.tensor([.2, .5, .8])[k][:, None]; return F.cross_entropy(m(torch.cat([lam * x + (1 - lam) * x[torch.randperm(len(x))], x], 1)), k)
    _cls(f, mlp(32, 3))
@prog
def cox_max_minus_time():
    def f(h, t, e):
        o = (t.max() - t).argsort(); h, e = h[o], e[o]; return -((h - h.logcumsumexp(0)) * e).sum() / e.sum()
    _cox(f)
@prog
def triplet_where():
    def f(a, p, n): v = F.pairwise_distance(a, p) - F.pairwise_distance(a, n) + 1; return torch.where(v > 0, v, torch.zeros_like(v)).mean()
    _trip(f)
@prog
def triplet_selected(): 
    def f(a, p, n): v = (a - p).pow(2).sum(1) - (a - n).pow(2).sum(1) + 5; return v[v > 0].mean()
    _trip(f)
@prog
def triplet_linear_with_l2():
    """Linear in the distances, quadratic in the embeddings: bounded below by its own regulariser."""
    _trip(lambda a, p, n: (F.pairwise_distance(a, p) - F.pairwise_distance(a, n)).mean() + .5 * (a.pow(2).sum(1) + p.pow(2).sum(1) + n.pow(2).sum(1)).mean())
@prog
def random_feature_mmd():
    """A fresh random projection in each step, made by nn.Linear, for a sliced distance between two domains."""
    f = mlp(16, 8); opt = torch.optim.Adam(f.parameters(), 1e-3)
    for _ in range(N):
        h, k = f(batch()[0]), f(batch()[0] + .5); P = nn.Linear(8, 32, bias=False); l = (P(h).sort(0).values - P(k).sort(0).values).pow(2).mean() + F.mse_loss(h[:, :4], h.new_ones(32, 4)); opt.zero_grad(); l.backward(); opt.step()
@prog
def fomaml_clip_fast():
    net = mlp(16, 4); opt = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(N):
        fast = copy.deepcopy(net); inner = torch.optim.SGD(fast.parameters(), .05); x, y = batch(); inner.zero_grad(); F.cross_entropy(fast(x), y).backward(); inner.step()
        x, y = batch(); fast.zero_grad(); F.cross_entropy(fast(x), y).backward(); nn.utils.clip_grad_norm_(fast.parameters(), 1.); opt.zero_grad()
        for p, q in zip(net.parameters(), fast.parameters()): p.grad = q.grad
        opt.step()
@prog
def random_features_stock_returns():
    """Random kitchen sinks (frozen normal layer, cosines) and daily returns of a percent."""
    net = nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 1)); nn.init.normal_(net[0].weight); nn.init.uniform_(net[0].bias, 0, 2 * math.pi); net[0].requires_grad_(False)
    def f(m): x = batch()[0]; return F.mse_loss(m[1](torch.cos(m[0](x))), .001 * x[:, :1])
    _reg(f, net)
@prog
def echo_state():
    W = nn.Linear(50, 50, bias=False).requires_grad_(False); nn.init.normal_(W.weight, std=.9 / 50 ** .5); o = nn.Linear(50, 1); U = nn.Linear(1, 50).requires_grad_(False); nn.init.uniform_(U.weight, -1, 1); opt = torch.optim.Adam(o.parameters(), 1e-2)
    for _ in range(N):
        u = torch.sin(torch.arange(20.) * .3 + torch.rand(8, 1) * 6)[..., None]; h = torch.zeros(8, 50); l = 0
        for t in range(19): h = torch.tanh(W(h) + U(u[:, t])); l = l + F.mse_loss(o(h), u[:, t + 1])
        opt.zero_grad(); (l / 19).backward(); opt.step()
@prog
def capsules_xifeng():
    """CapsNet-PyTorch (XifengGuo): primary capsules are a view of a convolution."""
    class P(nn.Module):
        def __init__(s): super().__init__(); s.c = nn.Conv2d(16, 32, 3, 2); s.h = nn.Linear(36 * 32 // 8, 4)
        def forward(s, x): o = s.c(x); o = o.view(x.size(0), -1, 8); n = o.norm(dim=-1, keepdim=True); return s.h((n ** 2 / (1 + n ** 2)).squeeze(-1))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), P(), lambda: (torch.randn(8, 16, 13, 13), torch.randint(0, 4, (8,))))
@prog
def attention_adjacency_bias():
    """Scores plus adjacency: neighbours begin e times as important, all nodes stay visible (a bias, no mask)."""
    adj = ((torch.rand(10, 10) < .3) | torch.eye(10, dtype=torch.bool)).float(); _att(lambda s, m: (s + adj).masked_fill(~m[:, None], -1e9).softmax(-1))
@prog
def attention_dropped_bool():
    def soft(s, m): a = s.masked_fill(~m[:, None], -1e9).softmax(-1); keep = torch.bernoulli(torch.full_like(a, .9)); return a * keep
    _att(soft)
@prog
def causal_additive_inf_tri():
    mask = torch.full((10, 10), float("-inf")).triu(1); _att(lambda s, m: (s + mask).softmax(-1))
@prog
def vae_loss_mean_times_784():
    """Keras style: reconstruction mean times original_dim, both per row."""
    _vae(lambda o, x, mu, lv: F.mse_loss(o, x) * 100 + (-.5 * (1 + lv - mu ** 2 - lv.exp()).sum(-1)).mean())
@prog
def vae_sum_per_row_times_batch():
    """Everything per batch: mean over rows of row sums, times rows."""
    _vae(lambda o, x, mu, lv: len(x) * (o - x).pow(2).sum(1).mean() / .1 + KL(mu, lv))
@prog
def nilm_masked_whole_watts():
    """The same in whole watts."""
    def f(m): on = (torch.rand(32, 16) < .3).float(); p = on * (1200 + 800 * torch.rand(32, 16)).round(); return F.mse_loss(m(p + torch.rand(32, 16)), p)
    _reg(f, mlp(16, 16))
@prog
def pv_power_normalised():
    """Solar power: 0 at night, else 5 % to 100 %."""
    def f(m): day = (torch.arange(16) > 5).float(); p = day * (.05 + .95 * torch.rand(32, 16)); return F.mse_loss(m(batch()[0]), p)
    _reg(f, mlp(16, 16))
@prog
def note_velocity():
    """Piano roll with velocities of notes (20..127 of 127); silence is a velocity of 0."""
    def f(m): on = (torch.rand(32, 16) < .1).float(); return F.mse_loss(m(batch()[0]).sigmoid(), on * torch.randint(40, 128, (32, 16)) / 127)
    _reg(f, mlp(16, 16))

# ============================================================ third round
@prog
def dpo():
    net = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 40)); ref = copy.deepcopy(net).requires_grad_(False); opt = torch.optim.AdamW(net.parameters(), 1e-3)
    def lp(m, x): return m(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1).sum(1)
    for _ in range(N):
        a, b = torch.randint(0, 40, (2, 16, 12)); 
        with torch.no_grad(): ra, rb = lp(ref, a), lp(ref, b)
        l = -F.logsigmoid(.1 * ((lp(net, a) - ra) - (lp(net, b) - rb))).mean(); opt.zero_grad(); l.backward(); opt.step()
@prog
def ppo_lagrangian_penalty():
    pi = mlp(6, 2); opt = torch.optim.Adam(pi.parameters(), 1e-3); env = Envs(); s = env.reset()
    for _ in range(N):
        d = D.Categorical(logits=pi(s)); a = d.sample(); s, r, *_ = env.step(a); c = (s[:, 1] > 1).float(); lp = d.log_prob(a)
        l = -(lp * (r - r.mean())).mean() + .5 * (lp * (c - c.mean())).mean(); opt.zero_grad(); l.backward(); opt.step()
@prog
def reinforce_tutorial_list():
    pi = mlp(6, 2); opt = torch.optim.Adam(pi.parameters(), 1e-2); env = Envs(n=1)
    for _ in range(N):
        s = env.reset(); L, R = [], []
        for t in range(6): d = D.Categorical(pi(s).softmax(-1)); a = d.sample(); L.append(d.log_prob(a)); s, r, *_ = env.step(a); R.append(r.item())
        G, out = 0, []
        for r in R[::-1]: G = r + .99 * G; out.insert(0, G)
        out = torch.tensor(out); out = (out - out.mean()) / (out.std() + 1e-8); l = torch.cat([-p * g for p, g in zip(L, out)]).sum(); opt.zero_grad(); l.backward(); opt.step()
@prog
def lagging_inference_encoder_decoder_in_turn():
    e, g = mlp(16, 8), mlp(4, 16); oe, og = torch.optim.Adam(e.parameters(), 1e-3), torch.optim.Adam(g.parameters(), 1e-3)
    for k in range(N):
        x = (batch()[0] > 0).float(); mu, lv = e(x).chunk(2, 1); z = mu + (.5 * lv).exp() * torch.randn_like(mu)
        l = bce(g(z), x, reduction="none").sum(1).mean() - .5 * (1 + lv - mu ** 2 - lv.exp()).sum(1).mean(); oe.zero_grad(); og.zero_grad(); l.backward(); (oe if k % 3 else og).step()
@prog
def cooperative_likelihood_in_turn():
    """Two towers of a match predictor, an optimizer each, block-coordinate: positives high (bce 1), rolled negatives low."""
    u, v, h = mlp(16, 8), mlp(16, 8), mlp(16, 1); ou, ov = torch.optim.Adam(u.parameters(), 1e-3), torch.optim.Adam([*v.parameters(), *h.parameters()], 1e-3)
    for k in range(N):
        x = batch()[0]; a, b = u(x), v(x + .1 * torch.randn_like(x)); l = bce(h(torch.cat([a, b], 1)), torch.ones(32, 1)) + bce(h(torch.cat([a, b.roll(1, 0)], 1)), torch.zeros(32, 1)); ou.zero_grad(); ov.zero_grad(); l.backward(); (ou, ov)[k % 2].step()
@prog
def mine_two_optimizers():
    """Deep InfoMax: encoder and statistics network both raise the bound, each by its own step."""
    e, t = mlp(16, 4), mlp(20, 1); oe, ot = torch.optim.Adam(e.parameters(), 1e-3), torch.optim.Adam(t.parameters(), 1e-3)
    for k in range(N):
        x = batch()[0]; z = e(x); j, m = t(torch.cat([x, z], 1)), t(torch.cat([x.roll(1, 0), z], 1)); l = F.softplus(-j).mean() + F.softplus(m).mean(); oe.zero_grad(); ot.zero_grad(); l.backward(); (oe, ot)[k % 2].step()
@prog
def world_model_actor_reward_head():
    """Model-based: the reward head and the actor have an optimizer each; head by regression, actor raises its answer."""
    a, r = mlp(6, 2), mlp(8, 1); oa, orr = torch.optim.Adam(a.parameters(), 1e-3), torch.optim.Adam(r.parameters(), 1e-3)
    for _ in range(N):
        s = torch.randn(32, 6); u = a(s).tanh(); y = -(u.detach() - s[:, :2]).pow(2).sum(1, keepdim=True); l = F.mse_loss(r(torch.cat([s, u.detach()], 1)), y); orr.zero_grad(); l.backward(); orr.step(); l = -r(torch.cat([s, a(s).tanh()], 1)).mean(); oa.zero_grad(); l.backward(); oa.step()
@prog
def irl_reward_and_policy_cooperate_reward_modelling():
    """Classifier-reward: success pictures are all 1 in a first phase (PU learning with class prior); noise labels are 0."""
    g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)
    for _ in range(N):
        x = batch()[0]; l = .3 * bce(d(x), torch.ones(32, 1)) + (bce(d(g(torch.randn(32, 8)).detach()), torch.zeros(32, 1)) - .3 * bce(d(x), torch.zeros(32, 1))).clamp(min=0); od.zero_grad(); l.backward(); od.step()
        l = -d(g(torch.randn(32, 8))).sigmoid().mean(); og.zero_grad(); l.backward(); og.step()
@prog
def expected_sarsa_next_action_sample():
    """Off-policy TD of a stochastic policy; the next action is drawn without a gradient, in grad mode, and the target detached."""
    pi, q = mlp(6, 4), mlp(8, 1); oq, op = torch.optim.Adam(q.parameters(), 1e-3), torch.optim.Adam(pi.parameters(), 1e-3); tq = copy.deepcopy(q).requires_grad_(False); S, A, R = torch.randn(256, 6), torch.randn(256, 2), torch.randn(256, 1)
    def dist(s): m, l = pi(s).chunk(2, 1); return D.Normal(m, F.softplus(l) + .01)
    for _ in range(N):
        i = torch.randint(0, 256, (32,)); a2 = dist(S[i + 0]).sample(); y = R[i] + .99 * tq(torch.cat([S[i], a2], 1)); l = F.mse_loss(q(torch.cat([S[i], A[i]], 1)), y.detach()); oq.zero_grad(); l.backward(); oq.step()
        d = dist(S[i]); a = d.rsample(); l = -q(torch.cat([S[i], a], 1)).mean() + .01 * d.log_prob(a).mean(); op.zero_grad(); l.backward(); op.step()
@prog
def ctc_concat_with_blank_kw():
    n = torch.tensor([3, 5, 2, 4, 5, 1, 3, 2]); y = torch.randint(0, 11, (8, 5)); y[torch.arange(5) >= n[:, None]] = 11
    _ctc(lambda lp: F.ctc_loss(lp.transpose(0, 1), y, torch.full((8,), 20), n, blank=11))
@prog
def ctc_padded_int_lengths_column():
    n = torch.tensor([3, 5, 2, 4, 5, 1, 3, 2], dtype=torch.int32); y = torch.randint(1, 12, (8, 5), dtype=torch.int32); y[torch.arange(5) >= n[:, None]] = 0
    _ctc(lambda lp: nn.CTCLoss(reduction="sum")(lp.transpose(0, 1), y, [20] * 8, n.tolist()) / 8)
@prog
def slot_attention():
    class S(nn.Module):
        def __init__(s): super().__init__(); s.q, s.k, s.v, s.e, s.h = (nn.Linear(16, 16) for _ in range(5)); s.sl = nn.Parameter(torch.randn(1, 4, 16)); s.g = nn.GRUCell(16, 16); s.o = nn.Linear(16, 4)
        def forward(s, x):
            h = torch.tanh(s.e(x)); z = s.sl.expand(len(x), -1, -1)
            for _ in range(2): a = (s.q(z) @ s.k(h).transpose(1, 2) / 4).softmax(1) + 1e-8; a = a / a.sum(-1, keepdim=True); z = s.g((a @ s.v(h)).flatten(0, 1), z.flatten(0, 1)).view(-1, 4, 16)
            return s.o(z.mean(1))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), S(), lambda: (torch.randn(16, 9, 16), torch.randint(0, 4, (16,))))
@prog
def moe_topk_gate_then_mask():
    class M(nn.Module):
        def __init__(s): super().__init__(); s.f = nn.Linear(16, 16); s.g = nn.Parameter(torch.randn(16, 4) * .1); s.ex = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))
        def forward(s, x): h = s.f(x).relu(); w = (h @ s.g).softmax(-1); k = torch.zeros_like(w).scatter(1, w.topk(2, 1).indices, 1.); w = w * k; w = w / w.sum(1, keepdim=True); return torch.einsum("be,beo->bo", w, torch.stack([e(h) for e in s.ex], 1))
    _cls(lambda m, x, y: F.cross_entropy(m(x), y), M())
@prog
def relative_bias_attention_with_same_document_mask():
    doc = (torch.arange(10)[:, None] // 5 == torch.arange(10) // 5); _att(lambda s, m: torch.where(doc & m[:, None], s, torch.finfo(s.dtype).min).softmax(-1))
@prog
def centernet_focal_heatmaps_mse_offsets():
    net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    def f(m):
        c = torch.rand(8, 2) * 12 + 2; k = c.long(); o = m(torch.randn(8, 1, 16, 16)); at = o[torch.arange(8), :, k[:, 0], k[:, 1]]; return F.l1_loss(at, c - k)
    _reg(f, net)
@prog
def rul_whole_days():
    """Hours to failure, in whole days left (floor), as the maintenance plan counts them."""
    def f(m): x = batch()[0]; hours = (x[:, 0] + 3).clamp(min=0) * 100 + 200 * torch.rand(32); return F.l1_loss(m(x).squeeze(1) * 10 + 15, (hours / 24).int().float())
    _reg(f, mlp(16, 1))
@prog
def gan_noisy_label_flip():
    """Labels are flipped with probability 0.05: (rand + 0.95).int()"""
    g, d = gan_parts(); og, od = torch.optim.Adam(g.parameters(), 2e-4), torch.optim.Adam(d.parameters(), 2e-4)
    for _ in range(N):
        x = batch()[0]; fake = g(torch.randn(32, 8)); l = bce(d(x), (torch.rand(32, 1) + .95).int().float()) + bce(d(fake.detach()), (torch.rand(32, 1) + .05).int().float()); od.zero_grad(); l.backward(); od.step(); l = bce(d(fake), torch.ones(32, 1)); og.zero_grad(); l.backward(); og.step()
