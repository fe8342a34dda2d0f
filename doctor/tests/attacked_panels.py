"""Healthy programs that seek something through a resting model, of panels, and of scales that several numbers share."""

import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from .attacked_pairs import blobs
from .attacked_parts import net, texts, update

PROGRAMS = {}
STEPS = 10


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def cnn(drop):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(drop),
        nn.Linear(64, 3),
    )


def spots(n=16):
    y = torch.randint(0, 3, (n,))
    x = 0.3 * torch.randn(n, 1, 12, 12)
    for i in range(n):
        c = 2 + 3 * int(y[i])
        x[i, 0, c : c + 2, c : c + 2] += 2
    return x, y


class Block(nn.Module):
    def __init__(self, w, drop):
        super().__init__()
        self.a, self.b = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.out = nn.Linear(w, 3 * w), nn.Linear(w, w)
        self.mlp = nn.Sequential(nn.Linear(w, 4 * w), nn.GELU(), nn.Linear(4 * w, w), nn.Dropout(drop))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.a(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.b(x))


class GPT(nn.Module):
    def __init__(self, layers=2, drop=0.0, v=64, w=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(v, w), nn.Embedding(64, w)
        self.blocks = nn.ModuleList(Block(w, drop) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(w), nn.Linear(w, v, bias=False)
        self.head.weight = self.wte.weight
        for m in self.modules():
            if isinstance(m, nn.Linear | nn.Embedding):
                nn.init.normal_(m.weight, 0, 0.02)

    def body(self, x):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for b in self.blocks:
            h = b(h)
        return self.norm(h)

    def forward(self, x):
        return self.head(self.body(x))


@program
def patch_against_an_eval_model():
    """S11: an adversarial patch; model.eval(), nobody froze its parameters, and its accuracy is measured first."""
    model = cnn(drop=0.5).eval()
    patch = torch.zeros(1, 1, 3, 3, requires_grad=True)
    opt = torch.optim.Adam([patch], 0.05)
    with torch.no_grad():
        model(spots()[0]).argmax(1)
    for _ in range(STEPS):
        with torch.no_grad():
            x, y = spots()
            (model(x).argmax(1) == y).float().mean()
        x = x + F.pad(patch, (0, 9, 0, 9))
        update(opt, F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)))


@program
def deep_dream_of_an_unfrozen_net():
    """S11: activation maximisation, Adam over the picture, net.eval() and not frozen."""
    model = cnn(drop=0.3).eval()
    picture = nn.Parameter(0.1 * torch.randn(1, 1, 12, 12))
    opt = torch.optim.Adam([picture], 0.05)
    for _ in range(STEPS):
        jit = torch.roll(picture, (random.randint(-1, 1), random.randint(-1, 1)), (2, 3))
        update(opt, -model(jit)[:, 1].mean() + 1e-3 * (picture[..., 1:] - picture[..., :-1]).abs().mean())


@program
def gan_inversion():
    """S11: a latent is sought through a generator in eval mode (StyleGAN's projector), which nobody froze."""
    G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)).eval()
    target = G(torch.randn(4, 8)).detach()
    w = torch.zeros(4, 8, requires_grad=True)
    opt = torch.optim.Adam([w], 0.05)
    for _ in range(STEPS):
        noise = 0.05 * torch.randn_like(w)
        update(opt, F.mse_loss(G(w + noise), target))


@program
def deepsdf_reconstruct():
    """S11: DeepSDF's reconstruct.py: decoder.eval() with dropout, its weights not frozen, the latent alone in Adam."""
    layers = [nn.Linear(11, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2)]
    dec = nn.Sequential(*layers, nn.Linear(32, 1), nn.Tanh()).eval()
    latent = torch.ones(1, 8).normal_(0, 0.01)
    latent.requires_grad = True
    opt = torch.optim.Adam([latent], lr=5e-3)
    for _ in range(STEPS):
        p = torch.randn(64, 3)
        y = (p.norm(dim=1) - 1.2).clamp(-0.5, 0.5)
        out = dec(torch.cat([latent.expand(64, -1), p], 1))[:, 0].clamp(-0.5, 0.5)
        update(opt, F.l1_loss(out, y) + 1e-4 * latent.pow(2).mean())


@program
def soft_prompt_of_an_unfrozen_model():
    """S11: prompt tuning by hand: model.eval(), optimizer = [prompt], nobody froze the rest."""
    model = GPT(drop=0.1).eval()
    prompt = nn.Parameter(0.02 * torch.randn(4, 32))
    opt = torch.optim.AdamW([prompt], 0.3)
    for _ in range(STEPS):
        ids = texts(8, 17)
        h = torch.cat([prompt.expand(8, -1, -1), model.wte(ids[:, :-1])], 1) + model.wpe(torch.arange(20))
        for b in model.blocks:
            h = b(h)
        out = model.head(model.norm(h))[:, 4:]
        update(opt, F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()))


@program
def policy_that_rests_while_it_learns():
    """S11: PPO of a policy with dropout: eval mode in rollouts and in updates, so that the ratio begins at 1."""
    pi = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    pi.eval()
    opt = torch.optim.Adam(pi.parameters(), 1e-3)
    for _ in range(STEPS):
        s = torch.randn(32, 4)
        with torch.no_grad():
            d = torch.distributions.Categorical(logits=pi(s))
            a = d.sample()
            old = d.log_prob(a)
        r = (a == (s[:, 0] > 0)).float()
        adv = (r - r.mean()) / (r.std() + 1e-6)
        ratio = (torch.distributions.Categorical(logits=pi(s)).log_prob(a) - old).exp()
        update(opt, -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean())


@program
def grpo_in_eval_mode():
    """S11: GRPO of a model with dropout that stays in eval mode, so that old and new log-probabilities agree."""
    pi = GPT(layers=1, drop=0.1)
    pi.eval()
    opt = torch.optim.AdamW(pi.parameters(), 1e-3)
    G, P = 4, 4

    def lp(ids):
        return pi(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, 3:]

    for _ in range(STEPS):
        ids = texts(P, 4).repeat_interleave(G, 0)
        with torch.no_grad():
            for _ in range(5):
                ids = torch.cat([ids, torch.multinomial(pi(ids)[:, -1].softmax(-1), 1)], 1)
            old = lp(ids)
        r = (ids[:, 4:] % 2 == 0).float().mean(1)
        r = r.view(P, G)
        adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        ratio = (lp(ids) - old).exp()
        update(opt, -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean())


@program
def teacher_distils_per_token():
    """F3: distillation, kl_div(batchmean) on (B, T, V), divided by T afterwards: right."""
    teacher, student = GPT(layers=2), GPT(layers=1)
    teacher.eval().requires_grad_(False)
    opt = torch.optim.AdamW(student.parameters(), 1e-3)
    for _ in range(STEPS):
        ids = texts(8, 17)
        x, y = ids[:, :-1], ids[:, 1:]
        with torch.no_grad():
            t = teacher(x)
        s = student(x)
        kl = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean") / x.size(1)
        update(opt, 0.5 * 4 * kl + 0.5 * F.cross_entropy(s.flatten(0, 1), y.flatten()))


@program
def distil_with_temperature_and_hidden():
    """F3: as DistilBERT: soft targets with T^2 and divided by the tokens, hard loss, cosine of hidden states."""
    teacher, student = GPT(layers=2), GPT(layers=1)
    student.wte.weight.data.copy_(teacher.wte.weight.data)
    teacher.eval().requires_grad_(False)
    opt = torch.optim.AdamW(student.parameters(), 1e-3)
    for _ in range(STEPS):
        ids = texts(8, 17)
        x, y = ids[:, :-1], ids[:, 1:]
        with torch.no_grad():
            ht = teacher.body(x)
            t = teacher.head(ht)
        hs = student.body(x)
        s = student.head(hs)
        soft = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean") * 4 / x.shape[1]
        hard = F.cross_entropy(s.flatten(0, 1), y.flatten())
        cos = F.cosine_embedding_loss(hs.flatten(0, 1), ht.flatten(0, 1), torch.ones(hs.shape[0] * hs.shape[1]))
        update(opt, 5 * soft + 2 * hard + cos)


@program
def one_scale_for_each_row():
    """F82: one log-scale a row (NeRF-W's beta): mean of z^2 over the 3 colours + log scale, which is NLL / 3."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.rgb, self.log_scale = net(6, 32), nn.Linear(32, 3), nn.Linear(32, 1)

        def forward(self, x):
            h = F.relu(self.body(x))
            return self.rgb(h), self.log_scale(h)

    model = M()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    w = torch.randn(6, 3)
    for _ in range(STEPS):
        x = torch.randn(32, 6)
        y = x @ w + 0.3 * torch.randn(32, 3)
        mu, s = model(x)
        z = (y - mu) * torch.exp(-s)
        update(opt, (0.5 * z.pow(2).mean(1) + s[:, 0]).mean())


@program
def isotropic_gaussian_of_each_frame():
    """F82: forecasting with one scale a row (RevIN-like head), z**2 averaged over the horizon + log scale."""
    model = net(12, 7)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        t = torch.arange(18) * 0.4 + 6 * torch.rand(32, 1)
        x = t.sin() + 0.1 * torch.randn(32, 18)
        out = model(x[:, :12])
        mu, ls = out[:, :6], out[:, 6:]
        z = (x[:, 12:] - mu) / ls.exp()
        update(opt, (ls.squeeze(1) + 0.5 * z.square().mean(1)).mean())


@program
def heteroscedastic_rows_by_log_prob():
    """F82: an isotropic Normal per row by hand: 0.5 * (log 2pi + z**2).mean(1) + log_scale."""
    model = net(5, 9)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        x = torch.randn(64, 5)
        y = torch.randn(64, 8) * torch.exp(x[:, :1])
        out = model(x)
        mu, s = out[:, :8], out[:, 8:]
        z = (y - mu) * (-s).exp()
        nll = 0.5 * (math.log(2 * math.pi) + z**2).mean(dim=1) + s.squeeze(-1)
        update(opt, nll.mean())


@program
def cloning_with_a_free_spread_batch_as_large():
    """F82: cloning, a Gaussian policy with a free log_std of (D,), mean over everything; as many rows as D."""

    class Pi(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.log_std = net(16, 16), nn.Parameter(torch.zeros(16))

        def forward(self, s):
            return self.mean(s), self.log_std

    model = Pi()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    w = torch.randn(16, 16) / 4
    for _ in range(STEPS):
        s = torch.randn(16, 16)
        a = s @ w + 0.2 * torch.randn(16, 16)
        mu, log_std = model(s)
        z = (a - mu) * torch.exp(-log_std)
        update(opt, (0.5 * z**2 + log_std).mean())


@program
def affine_flow_with_free_scales():
    """F82: flow of linear mixing and elementwise scales (actnorm), 32 features and rows of 32."""

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.s, self.t = nn.Parameter(torch.zeros(32)), nn.Parameter(torch.zeros(32))

        def forward(self, x):
            return x * torch.exp(self.s) + self.t, self.s.sum()

    model = Flow()
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        z, det = model(torch.randn(32, 32) * 3 + 1)
        update(opt, -(torch.distributions.Normal(0, 1).log_prob(z).sum(1) + det).mean())


@program
def returns_less_the_mean_of_their_day():
    """S61: rows stock by stock, static features first; each day's mean over stocks is taken away."""
    N, T = 8, 16
    model = net(7, 1)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        static = torch.randn(N, 1, 3).expand(N, T, 3)
        daily = torch.randn(N, T, 4)
        x = torch.cat([static, daily], -1).reshape(N * T, 7)
        r = x[:, 0] + x[:, 3] + torch.randn(1, T).expand(N, T).reshape(-1) + 0.1 * torch.randn(N * T)
        g = r.view(N, T)
        y = (g - g.mean(0, keepdim=True)).reshape(-1)
        update(opt, F.mse_loss(model(x).squeeze(1), y))


@program
def cross_sectional_mean_by_feature_of_stock_ids():
    """S61: alpha model: rows stock by stock, ids of stocks and sectors; target less the day's mean over stocks."""
    N, T = 6, 12

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.f = nn.Embedding(40, 4), net(12, 1)

        def forward(self, ids, x):
            return self.f(torch.cat([self.e(ids).flatten(1), x], 1)).squeeze(1)

    model = M()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        ids = torch.stack([torch.randperm(30)[:N], torch.randint(30, 40, (N,))], 1).repeat_interleave(T, 0)
        x = torch.randn(N * T, 4)
        r = x[:, 0] + torch.randn(T).repeat(N)
        panel = r.view(N, T)
        update(opt, F.mse_loss(model(ids, x), (panel - panel.mean(0)).reshape(-1)))


@program
def fixed_effects_of_time():
    """S61: panel regression without fixed effects of time: y.view(entities, times) less its mean over entities."""
    N, T = 5, 20
    model = net(5, 1)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        z = torch.randn(N, 2).repeat_interleave(T, 0)
        x = torch.cat([z, torch.randn(N * T, 3)], 1)
        y = (x @ torch.tensor([1.0, 2, 3, 0, 0]) + torch.randn(T).repeat(N)).reshape(-1)
        panel = y.view(-1, T)
        update(opt, F.mse_loss(model(x).view(-1), (panel - panel.mean(dim=0)).view(-1)))


@program
def items_less_their_mean_over_users():
    """S61: a dense block of users x items, ratings centred by item; user and item features in one vector."""
    U, I = 5, 10
    model = net(7, 1)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        u, i = torch.randn(U, 4), torch.randn(I, 3)
        x = torch.cat([u.repeat_interleave(I, 0), i.repeat(U, 1)], 1)
        r = (x[:, 0] * x[:, 4] + x[:, 5]).contiguous()
        m = r.view(U, I)
        y = (m - m.mean(0, keepdim=True)).reshape(-1)
        update(opt, F.mse_loss(model(x)[:, 0], y))


@program
def contextual_bandit_scores_less_arm_means():
    """S61: uplift: rows context by context, outcomes centred per treatment (view(contexts, arms) less mean(0))."""
    C, K = 4, 8
    model = net(6 + K, 1)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        c = torch.randn(C, 6)
        x = torch.cat([c.repeat_interleave(K, 0), torch.eye(K).repeat(C, 1)], 1)
        y = (x[:, 0] * x[:, 6] + x[:, 7] + 0.1 * torch.randn(C * K)).contiguous()
        t = y.view(C, K)
        update(opt, F.mse_loss(model(x).squeeze(1), (t - t.mean(0)).reshape(-1)))


@program
def pomo_baseline_starts_first():
    """S61: POMO, starts laid first, reward.view(pomo, batch).mean(0), as many instances as starts."""
    model = net(2 + 16, 1, 32)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    n = 8
    for _ in range(STEPS):
        inst = torch.randn(n, 16)
        first = torch.randn(n, 2)
        x = torch.cat([first.repeat_interleave(n, 0), inst.repeat(n, 1)], 1)
        d = torch.distributions.Normal(model(x)[:, 0], 1.0)
        a = d.sample()
        r = -(a - x[:, 2]).abs()
        g = r.view(n, n)
        adv = (g - g.mean(0, keepdim=True)).view(-1)
        update(opt, -(d.log_prob(a) * adv).mean())


@program
def time_baseline_of_as_many_envs_as_steps():
    """S61: REINFORCE standardised over envs at each time; 8 envs of 8 steps, each env's goal stands first."""
    pi = net(5, 3)
    opt = torch.optim.Adam(pi.parameters(), 1e-3)
    T = N = 8
    for _ in range(STEPS):
        goal = torch.randn(N, 2)
        obs = torch.cat([goal.repeat(T, 1), torch.randn(T * N, 3)], 1)
        d = torch.distributions.Categorical(logits=pi(obs))
        a = d.sample()
        r = -(a.float() - 1 - obs[:, 0].sign()).abs()
        ret = r.view(T, N).flip(0).cumsum(0).flip(0).reshape(-1)
        g = ret.view(T, N)
        adv = ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-6)).view(-1)
        update(opt, -(d.log_prob(a) * adv).mean())


@program
def kahan_average_in_bf16():
    """N4: EMA in bf16 with Kahan compensation (optimi's kahan_sum, torchao's stochastic/Kahan recipes)."""
    model = net(8, 3)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    shadow = [p.detach().bfloat16() for p in model.parameters()]
    comp = [torch.zeros_like(s) for s in shadow]
    for _ in range(STEPS):
        x, y = blobs()
        update(opt, F.cross_entropy(model(x), y))
        with torch.no_grad():
            for s, c, p in zip(shadow, comp, model.parameters()):
                c.add_((p.bfloat16() - s) * 0.005)
                before = s.clone()
                s.add_(c)
                c.sub_(s - before)
