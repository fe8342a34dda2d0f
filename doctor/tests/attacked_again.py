"""64 healthy programs by somebody who had read the checks in turned.py, mixed_up.py and by_hand.py and their watchers, a
third time. 55 were blamed at first; test_attacked.py names those that still are.

They are kept as they were written.
"""

"""Healthy training programs that look like faults of train_doctor's checks (F74..F90, S33..S37, D17..D22, N28, N36, N37, S25, F30, F54, F73)."""
import copy
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

PROGRAMS = {}
def program(f): PROGRAMS[f.__name__] = f; return f
STEPS = 8
def mlp(i, h, o, act=nn.ReLU): return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))
def adam(*ms, lr=1e-3): return torch.optim.Adam([p for m in ms for p in m.parameters()], lr=lr)


# ------------------------------------------------------------------ F74
@program
def style_with_topic_controlled_negatives():
    """F74: style embeddings with content control (Wegmann 2022): the positive is by the same author on another topic,
    the negative by another author in the same conversation. Topic dominates the input, as it does in texts, so positives lie further apart;
    that is the point of the method."""
    topic, author = torch.randn(30, 64), 0.2 * torch.randn(40, 64)
    text = lambda a, t: topic[t] + author[a] + 0.2 * torch.randn(len(a), 64)
    net = mlp(64, 64, 16); opt = adam(net)
    for _ in range(STEPS):
        a, b, t, u = torch.randint(40, (64,)), torch.randint(40, (64,)), torch.randint(30, (64,)), torch.randint(30, (64,))
        b = torch.where(a == b, (b + 1) % 40, b)
        loss = F.triplet_margin_loss(net(text(a, t)), net(text(a, u)), net(text(b, t)))
        opt.zero_grad(); loss.backward(); opt.step()


@program
def speakers_who_say_the_same_phrase():
    """F74: text-independent speaker verification with phrase-matched impostors: target trials are the same speaker with
    another phrase, impostor trials another speaker with the same phrase (the hard ones), cosine_embedding_loss."""
    phrase, speaker = torch.randn(20, 80), 0.2 * torch.randn(60, 80)
    say = lambda s, p: phrase[p] + speaker[s] + 0.1 * torch.randn(len(s), 80)
    net = mlp(80, 64, 32); opt = adam(net)
    for _ in range(STEPS):
        s, p = torch.randint(60, (64,)), torch.randint(20, (64,))
        same = torch.rand(64) < 0.5
        s2 = torch.where(same, s, (s + torch.randint(1, 60, (64,))) % 60)
        p2 = torch.where(same, (p + torch.randint(1, 20, (64,))) % 20, p)
        loss = F.cosine_embedding_loss(net(say(s, p)), net(say(s2, p2)), same.float() * 2 - 1, margin=0.2)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F75
@program
def generator_of_adversarial_perturbations():
    """F75: GAP (Poursaeed 2018) for a regressor: a generator learns bounded perturbations that make a frozen model's
    error as large as it can be. The loss is the negated error, and only the generator is trained."""
    w = torch.randn(16, 1); victim = nn.Linear(16, 1)
    with torch.no_grad(): victim.weight.copy_(w.T); victim.bias.zero_()
    victim.requires_grad_(False)
    gen = mlp(16, 32, 16); opt = adam(gen)
    for _ in range(STEPS):
        x = torch.randn(64, 16); y = x @ w + 0.1 * torch.randn(64, 1)
        loss = -F.mse_loss(victim(x + 0.1 * torch.tanh(gen(x))), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def walker_that_gets_far():
    """F75: differentiable simulation (DiffTaichi, Brax APG): a controller with bounded forces is to get as far from its
    start as it can in ten steps. The start is no target."""
    policy = mlp(4, 32, 2, nn.Tanh); opt = adam(policy)
    for _ in range(STEPS):
        start = torch.randn(32, 2); pos, vel = start, 0.1 * torch.randn(32, 2)
        for _ in range(10):
            force = torch.tanh(policy(torch.cat([pos, vel], 1)))
            vel = 0.9 * vel + 0.1 * force; pos = pos + 0.1 * vel
        loss = -((pos - start) ** 2).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def unlearning_by_ascent():
    """F75: machine unlearning (NegGrad): a few small steps of ascent on the error of the rows that are to be forgotten,
    of a model that has learned them."""
    w = torch.randn(8, 1); x = torch.randn(64, 8); y = x @ w + 0.3 * torch.randn(64, 1)
    net = nn.Linear(8, 1)
    with torch.no_grad(): net.weight.copy_(torch.linalg.lstsq(x, y).solution.T); net.bias.zero_()
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    for i in range(STEPS):
        rows = torch.randperm(64)[:32]
        loss = -F.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F76
@program
def distances_to_goals_twin_max():
    """F76: goal-conditioned distances (steps to go) with two critics: an underrated distance is what would be handed on,
    so the larger of the two is the careful one."""
    d1, d2 = mlp(4, 32, 1), mlp(4, 32, 1); t1, t2 = copy.deepcopy(d1), copy.deepcopy(d2); opt = adam(d1, d2)
    for _ in range(STEPS):
        s, g = torch.rand(64, 2) * 10, torch.rand(64, 2) * 10
        n = s + (g - s).sign() * torch.rand(64, 2); reached = ((n - g).abs().max(1, keepdim=True).values < 1).float()
        with torch.no_grad():
            far = torch.max(t1(torch.cat([n, g], 1)), t2(torch.cat([n, g], 1)))
            target = 1 + (1 - reached) * far
        sg = torch.cat([s, g], 1); loss = F.mse_loss(d1(sg), target) + F.mse_loss(d2(sg), target)
        opt.zero_grad(); loss.backward(); opt.step()
        with torch.no_grad():
            for m, t in ((d1, t1), (d2, t2)):
                for p, q in zip(m.parameters(), t.parameters()): q.lerp_(p, 0.01)


# ------------------------------------------------------------------ F77
@program
def sac_of_a_car():
    """F77: SAC whose two actions are squashed differently, steering by tanh and throttle by a sigmoid; the logarithm of
    the slopes is taken of the stacked actions and subtracted, as it must be."""
    class Policy(nn.Module):
        def __init__(self): super().__init__(); self.net = mlp(6, 64, 4)
        def forward(self, s):
            mean, log_std = self.net(s).chunk(2, 1)
            d = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp()); u = d.rsample()
            steer, gas = torch.tanh(u[:, 0]), torch.sigmoid(u[:, 1])
            slopes = torch.stack([1 - steer**2, gas * (1 - gas)], 1)
            return torch.stack([steer, gas], 1), d.log_prob(u).sum(1) - torch.log(slopes + 1e-6).sum(1)
    pi, q1, q2 = Policy(), mlp(8, 64, 1), mlp(8, 64, 1); t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    oa, oq = adam(pi, lr=3e-4), adam(q1, q2, lr=3e-4)
    A = torch.randn(2, 6) * 0.3
    for _ in range(STEPS):
        s, a = torch.randn(64, 6), torch.rand(64, 2); n = 0.9 * s + a @ A; r = -s[:, :2].pow(2).sum(1) - 0.1 * a.pow(2).sum(1)
        with torch.no_grad():
            b, lp = pi(n); nb = torch.cat([n, b], 1)
            y = r + 0.99 * (torch.min(t1(nb), t2(nb)).squeeze(1) - 0.2 * lp)
        sa = torch.cat([s, a], 1); loss = F.mse_loss(q1(sa).squeeze(1), y) + F.mse_loss(q2(sa).squeeze(1), y)
        oq.zero_grad(); loss.backward(); oq.step()
        b, lp = pi(s); sb = torch.cat([s, b], 1)
        loss = (0.2 * lp - torch.min(q1(sb), q2(sb)).squeeze(1)).mean()
        oa.zero_grad(); loss.backward(); oa.step()
        with torch.no_grad():
            for m, t in ((q1, t1), (q2, t2)):
                for p, q in zip(m.parameters(), t.parameters()): q.lerp_(p, 0.005)


@program
def sac_of_arms_with_joint_ranges():
    """F77: SAC with a range for each joint: the slope of each joint's squash is computed apart, they are stacked, and
    their logarithms are subtracted, as they must be."""
    reach = (0.5, 2.0)
    class Policy(nn.Module):
        def __init__(self): super().__init__(); self.net = mlp(6, 64, 4)
        def forward(self, s):
            mean, log_std = self.net(s).chunk(2, 1)
            d = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp()); u = d.rsample(); a = torch.tanh(u)
            slopes = torch.stack([r * (1 - a[:, k] ** 2) for k, r in enumerate(reach)], 1)
            return a * torch.tensor(reach), d.log_prob(u).sum(1) - torch.log(slopes + 1e-6).sum(1)
    pi, q1, q2 = Policy(), mlp(8, 64, 1), mlp(8, 64, 1); t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    oa, oq = adam(pi, lr=3e-4), adam(q1, q2, lr=3e-4)
    A = torch.randn(2, 6) * 0.3
    for _ in range(STEPS):
        s, a = torch.randn(64, 6), (torch.rand(64, 2) * 2 - 1) * torch.tensor(reach); n = 0.9 * s + a @ A; r = -s[:, :2].pow(2).sum(1) - 0.1 * a.pow(2).sum(1)
        with torch.no_grad():
            b, lp = pi(n); nb = torch.cat([n, b], 1)
            y = r + 0.99 * (torch.min(t1(nb), t2(nb)).squeeze(1) - 0.2 * lp)
        sa = torch.cat([s, a], 1); loss = F.mse_loss(q1(sa).squeeze(1), y) + F.mse_loss(q2(sa).squeeze(1), y)
        oq.zero_grad(); loss.backward(); oq.step()
        b, lp = pi(s); sb = torch.cat([s, b], 1)
        loss = (0.2 * lp - torch.min(q1(sb), q2(sb)).squeeze(1)).mean()
        oa.zero_grad(); loss.backward(); oa.step()
        with torch.no_grad():
            for m, t in ((q1, t1), (q2, t2)):
                for p, q in zip(m.parameters(), t.parameters()): q.lerp_(p, 0.005)


# ------------------------------------------------------------------ F78
@program
def deepwalk_with_numpy_negatives():
    """F78: DeepWalk: start nodes are drawn at random, their contexts are walked to in Python, and negatives come from
    numpy. One table for both. The randomly drawn start node's score with its context is to rise."""
    n = 200; nbr = [[(i + d) % n for d in (-3, -2, -1, 1, 2, 3)] for i in range(n)]
    table = nn.Embedding(n, 16); opt = torch.optim.Adam(table.parameters(), lr=1e-2)
    for _ in range(STEPS):
        start = torch.randint(n, (64,))
        context = torch.tensor([random.choice(nbr[i]) for i in start.tolist()])
        other = torch.from_numpy(np.random.randint(0, n, (64, 5)))
        u, v, neg = table(start), table(context), table(other)
        loss = -F.logsigmoid((u * v).sum(1)).mean() - F.logsigmoid(-(neg @ u.unsqueeze(2)).squeeze(2)).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def deepwalk_in_batch_softmax():
    """F78: DeepWalk from a random start with the other rows' contexts as negatives, written as logsumexp minus the
    positive's score, which is to rise."""
    n = 200; nbr = [[(i + d) % n for d in (-3, -2, -1, 1, 2, 3)] for i in range(n)]
    table = nn.Embedding(n, 16); opt = torch.optim.Adam(table.parameters(), lr=1e-2)
    for _ in range(STEPS):
        start = torch.randperm(n)[:64]
        context = torch.tensor([random.choice(nbr[i]) for i in start.tolist()])
        u, v = table(start), table(context)
        loss = torch.logsumexp(u @ v.T, 1).mean() - (u * v).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F79
@program
def wgan_of_one_jet_at_a_time():
    """F79: WGAN-GP with a DeepSets critic on particle jets of any size, one jet in a step. The rows are the particles of
    the one sample that the critic judges, so its slope has one length, that over all of them."""
    class Critic(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b = mlp(3, 32, 32, nn.SiLU), mlp(32, 32, 1, nn.SiLU)
        def forward(self, x): return self.b(self.a(x).mean(0))
    critic, gen = Critic(), mlp(8, 32, 3); oc, og = adam(critic, lr=1e-4), adam(gen, lr=1e-4)
    for i in range(STEPS):
        n = int(torch.randint(20, 40, ())); real = torch.randn(n, 3) * torch.tensor([0.3, 0.3, 1.0]) + torch.randn(3) * 0.1
        fake = gen(torch.randn(n, 8)).detach(); e = torch.rand(())
        x = (e * real + (1 - e) * fake).requires_grad_()
        slope, = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        loss = (critic(fake) - critic(real)).sum() + 10 * (slope.norm(2) - 1) ** 2
        oc.zero_grad(); loss.backward(); oc.step()
        if i % 2:
            loss = -critic(gen(torch.randn(n, 8))).sum()
            og.zero_grad(); loss.backward(); og.step()


# ------------------------------------------------------------------ D19
@program
def parcels_on_a_slanting_belt():
    """D19: key points of parcels on a conveyor that runs across the picture on a slant. The flip mirrors x, and y stays,
    as it must; but y goes along with how far right the parcel is, and the other way round in flipped pictures."""
    grid = torch.linspace(0, 1, 24)
    class Parcels(Dataset):
        def __len__(self): return 4096
        def __getitem__(self, i):
            x = 0.15 + 0.7 * random.random(); y = 0.2 + 0.6 * x + random.gauss(0, 0.03)
            im = torch.exp(-((grid[None] - x) ** 2 + (grid[:, None] - y) ** 2) / 0.01)[None] + 0.02 * torch.randn(1, 24, 24)
            if random.random() < 0.5: im, x = im.flip(-1), 1 - x
            return im, torch.tensor([x, y])
    net = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    opt = adam(net)
    for _, (im, xy) in zip(range(STEPS), DataLoader(Parcels(), 64, shuffle=True)):
        loss = F.mse_loss(net(im), xy)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def distance_of_parked_cars():
    """D19: how far away parked cars are, from a dashcam where traffic keeps to the right: near cars stand further right
    in the picture. A mirrored street has the same distances, so the target stays."""
    grid = torch.linspace(0, 1, 24)
    def scene():
        d = random.uniform(1, 10); x, s = 0.5 + 0.45 / d ** 0.7 + random.gauss(0, 0.02), 0.05
        return torch.exp(-((grid[None] - x) ** 2 + (grid[:, None] - 0.6) ** 2) / (2 * s * s))[None] * random.uniform(0.5, 1) + 0.02 * torch.randn(1, 24, 24), math.log(d)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 1))
    opt = adam(net)
    for _ in range(STEPS):
        ims, ds = zip(*(scene() for _ in range(64)))
        im = torch.stack([i.flip(-1) if random.random() < 0.5 else i for i in ims])
        loss = F.smooth_l1_loss(net(im), torch.tensor(ds)[:, None])
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ S33
@program
def listnet_one_query_a_step():
    """S33: ListNet: the rows are the documents of one query, scores are shared out among them, and so are the targets."""
    w = torch.randn(12); net = mlp(12, 32, 1); opt = adam(net)
    for _ in range(STEPS):
        docs = torch.randn(20, 12); rel = (docs @ w + 0.5 * torch.randn(20)).clamp(0, 4).round()[:, None]
        loss = F.kl_div(F.log_softmax(net(docs), dim=0), F.softmax(rel, dim=0), reduction="sum")
        opt.zero_grad(); loss.backward(); opt.step()


@program
def charges_shared_among_atoms():
    """S33: partial charges of the atoms of one molecule: electronegativities are shared out by a softmax over its atoms
    so that the charge adds up to that of the molecule; the targets are the charges of these atoms."""
    w = torch.randn(8); net = mlp(8, 32, 1); opt = adam(net)
    for _ in range(STEPS):
        atoms = torch.randn(18, 8); z = torch.randint(1, 9, (18, 1)).float(); share = torch.softmax((atoms @ w)[:, None] * 0.3, 0)
        charge = z - z.sum() * share
        electrons = z.sum() * torch.softmax(net(atoms), dim=0)
        loss = F.mse_loss(z - electrons, charge)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F81
@program
def residual_gradient_deterministic():
    """F81: Baird's residual gradient: in a deterministic world the squared Bellman residual itself is minimised, with
    the gradient through both sides; it is the method with the proof of convergence."""
    v = mlp(2, 32, 1, nn.Tanh); opt = adam(v, lr=1e-2)
    for _ in range(STEPS):
        th, om = (torch.rand(128, 1) * 2 - 1) * 3.1, torch.randn(128, 1)
        om2 = om + 0.05 * (9.8 * th.sin() - om); s, n = torch.cat([th, om], 1), torch.cat([th + 0.05 * om2, om2], 1)
        reward = -(th**2 + 0.1 * om**2)
        residual = reward + 0.95 * v(n) - v(s)
        loss = residual.pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def iq_learn():
    """F81, F88: IQ-Learn: the reward is the difference of Q and the discounted soft value of the next state, both with
    their gradient, without any target."""
    q = mlp(4, 64, 3); opt = adam(q, lr=1e-4); W = torch.randn(4, 3)
    for _ in range(STEPS):
        s = torch.randn(128, 4); a = (s @ W).argmax(1); n = 0.9 * s + 0.1 * W.T[a]
        value, after = torch.logsumexp(q(s), 1), torch.logsumexp(q(n), 1)
        reward = q(s).gather(1, a[:, None]).squeeze(1) - 0.99 * after
        loss = -reward.mean() + (value - 0.99 * after).mean() + 0.5 * reward.pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ S34
@program
def relation_network():
    """S34: a Relation Network (Santoro 2017) goes over all pairs of objects, each with itself as well."""
    f, g, h = mlp(6, 32, 16), mlp(32, 32, 16), mlp(16, 32, 2); opt = adam(f, g, h, lr=3e-3)
    for _ in range(STEPS):
        x = torch.rand(64, 4, 6); d = torch.cdist(x[..., :2], x[..., :2])
        y = (d.mean((1, 2)) > 0.39).long()  # far from each other or not
        objects = f(x).unbind(1)
        related = sum(g(torch.cat([a, b], dim=1)) for a in objects for b in objects)
        loss = F.cross_entropy(h(related), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def gat_with_self_loops():
    """S34: graph attention written by hand: the score of a node's loop to itself is a(Wh || Wh)."""
    n = 60; src, dst = torch.randint(n, (240,)), torch.randint(n, (240,)); x = torch.randn(n, 8)
    y = (x[:, 0] + torch.zeros(n).index_add(0, dst, x[src, 0]) > 0).long()
    W, a, out = nn.Linear(8, 16, bias=False), nn.Linear(32, 1), nn.Linear(16, 2); opt = adam(W, a, out, lr=5e-3)
    for _ in range(STEPS):
        h = W(x)
        e = F.leaky_relu(a(torch.cat([h[dst], h[src]], 1)), 0.2).exp()
        loop = F.leaky_relu(a(torch.cat([h, h], 1)), 0.2).exp()
        total = loop.index_add(0, dst, e)
        z = (loop * h).index_add(0, dst, e * h[src]) / total
        loss = F.cross_entropy(out(F.elu(z)), y)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ S36
@program
def dann_with_extra_domain_steps():
    """S36: DANN: one optimizer holds everything, with a reversed gradient behind the domain head; a second one trains
    the domain head some more. Both want the same of it."""
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.view_as(x)
        @staticmethod
        def backward(ctx, g): return -0.3 * g
    f, c, d = nn.Sequential(mlp(10, 32, 16), nn.ReLU()), nn.Linear(16, 2), mlp(16, 16, 1); opt, od = adam(f, c, d), adam(d); w = torch.randn(10)
    for _ in range(STEPS):
        xs = torch.randn(64, 10); ys = (xs @ w > 0).long(); xt = torch.randn(64, 10) + 0.5
        dom = torch.cat([torch.zeros(64, 1), torch.ones(64, 1)])
        z = f(torch.cat([xs, xt]))
        loss = F.binary_cross_entropy_with_logits(d(z.detach()), dom)
        od.zero_grad(); loss.backward(); od.step()
        loss = F.cross_entropy(c(z[:64]), ys) + F.binary_cross_entropy_with_logits(d(Reverse.apply(z)), dom)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def maximum_classifier_discrepancy():
    """S36, F75: MCD (Saito 2018): one optimizer holds everything for the source, one the two classifiers, which are to
    differ on the target, and one the features, which are to undo that."""
    f, a, b = nn.Sequential(mlp(10, 32, 16), nn.ReLU()), nn.Linear(16, 3), nn.Linear(16, 3); W = torch.randn(10, 3); oall, oc, of = adam(f, a, b), adam(a, b), adam(f)
    apart = lambda z: (a(z).softmax(1) - b(z).softmax(1)).abs().mean()
    for _ in range(STEPS):
        xs = torch.randn(64, 10); ys = (xs @ W).argmax(1); xt = torch.randn(64, 10) + 0.5
        source = lambda: F.cross_entropy(a(f(xs)), ys) + F.cross_entropy(b(f(xs)), ys)
        for o, what in ((oall, source), (oc, lambda: source() - apart(f(xt))), (of, lambda: apart(f(xt)))):
            loss = what(); oall.zero_grad(); loss.backward(); o.step()


# ------------------------------------------------------------------ D20
def waves(n, size):
    g = torch.linspace(0, 6.28, size); k, p = torch.rand(n, 2, 1, 1) * 2, torch.rand(n, 1, 1, 1) * 6.28
    return 0.5 + 0.5 * torch.sin(k[:, :1] * g[None, None, None, :] + k[:, 1:] * g[None, None, :, None] + p)


@program
def coded_aperture_of_one_camera():
    """D20: compressive imaging: the mask of the camera is etched in glass, so it is the same for every picture; each item
    makes it from its seed. It is part of the device, and no augmentation."""
    class Shots(Dataset):
        def __init__(self): self.x = waves(512, 16)
        def __len__(self): return len(self.x)
        def __getitem__(self, i):
            x = self.x[i]
            mask = (torch.rand(x.shape, generator=torch.Generator().manual_seed(7)) < 0.5).float()
            return x * mask, x
    net = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 1, 5, padding=2)); opt = adam(net)
    for _, (shot, x) in zip(range(STEPS), DataLoader(Shots(), 32, shuffle=True)):
        loss = F.mse_loss(net(shot), x)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def fixed_pattern_noise_of_a_sensor():
    """D20: flat-field correction: each sensor has its own fixed pattern of gains, simulated from its serial number, and
    photon noise that is new each time. The network is for this sensor."""
    def expose(x, serial):
        gain = 1 + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(serial))
        return x * gain + 0.02 * torch.randn_like(x)
    class Correct(nn.Module):
        def __init__(self): super().__init__(); self.flat = nn.Parameter(torch.ones(1, 16, 16)); self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
        def forward(self, x): return self.flat * x + self.net(x)
    net = Correct(); opt = adam(net); all_x = waves(512, 16)
    for _ in range(STEPS):
        x = all_x[torch.randperm(512)[:32]]
        raw = torch.stack([expose(one, 4711) for one in x])
        loss = F.mse_loss(net(raw), x)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ D21
@program
def bagged_autoencoder():
    """D21: an ensemble of autoencoders for anomalies (RandNet): each member's loss leaves out a random fifth of the rows
    of a batch. A bottleneck keeps it from copying; the mask is a bootstrap and hides nothing."""
    B = torch.randn(3, 20); members = [nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 20)) for _ in range(2)]
    opt = adam(*members)
    for _ in range(STEPS):
        x = torch.randn(64, 3) @ B + 0.1 * torch.randn(64, 20); loss = 0
        for m in members:
            keep = (torch.rand(64, 1) < 0.8).float()
            loss = loss + ((m(x) - x) ** 2 * keep).sum() / (20 * keep.sum())
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F82
@program
def lipschitz_bound_of_logarithms():
    """F82: a learned Lipschitz bound (Liu 2022) with the logarithms of the layers' bounds: y = exp(s) * normalised(W) x,
    and the loss asks for a small product of the bounds, so for a small sum of s."""
    class Layer(nn.Module):
        def __init__(self, i, o): super().__init__(); self.lin = nn.Linear(i, o); self.s = nn.Parameter(torch.zeros(()))
        def forward(self, x): return F.linear(x, self.lin.weight / self.lin.weight.abs().sum(1, keepdim=True)) * self.s.exp() + self.lin.bias
    a, b = Layer(4, 32), Layer(32, 1); opt = adam(a, b, lr=1e-2); w = torch.randn(4, 1)
    for _ in range(STEPS):
        x = torch.randn(64, 4); y = torch.sin(x @ w)
        loss = F.mse_loss(b(torch.tanh(a(x))), y) + 1e-3 * (a.s + b.s)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def log_normal_prior_of_a_spread():
    """F82: the MAP of a hierarchical model (effects = tau * eta): minus the log of a log-normal density of tau = exp(s)
    is (s - m)**2 / 2t**2 + s. The likelihood decides how large tau is."""
    class Schools(nn.Module):
        def __init__(self): super().__init__(); self.mu, self.s, self.eta = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(())), nn.Parameter(0.1 * torch.randn(20))
        def forward(self, g): return self.mu + self.s.exp() * self.eta[g]
    g = torch.arange(20).repeat(10); y = 2 + torch.randn(20)[g] + torch.randn(200); net = Schools(); opt = adam(net, lr=0.05)
    for _ in range(STEPS):
        likelihood = 0.5 * ((y - net(g)) ** 2).sum()
        loss = likelihood + 0.5 * net.eta.pow(2).sum() + 0.5 * (net.s - 0.5) ** 2 + net.s
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F84
@program
def diffusion_gan():
    """F84: Diffusion-GAN (Wang 2022): what the discriminator sees is diffused for t steps of which there are few at the
    start (5 to 40 of 1000); more come as it overfits. Nothing is ever sampled from noise by these steps."""
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0); T = 40
    gen, dis = mlp(8, 64, 16), mlp(17, 64, 1); og, od = adam(gen, lr=2e-4), adam(dis, lr=2e-4); B = torch.randn(4, 16)
    def diffuse(x):
        t = torch.randint(1, T, (len(x),)); a = abar[t][:, None]
        return torch.cat([a.sqrt() * x + (1 - a).sqrt() * torch.randn_like(x), t[:, None] / 1000], 1)
    for _ in range(STEPS):
        real = torch.randn(64, 4) @ B * 0.5
        loss = F.softplus(-dis(diffuse(real))).mean() + F.softplus(dis(diffuse(gen(torch.randn(64, 8)).detach()))).mean()
        od.zero_grad(); loss.backward(); od.step()
        loss = F.softplus(-dis(diffuse(gen(torch.randn(64, 8))))).mean()
        og.zero_grad(); loss.backward(); og.step()


@program
def cascaded_diffusion():
    """F84: the second stage of cascaded diffusion (Ho 2021): the small picture that it is conditioned on gets weak noise
    as an augmentation, of the same form, and x_t the whole range."""
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    def q(x, t, e): a = abar[t].view(-1, 1, 1, 1); return a.sqrt() * x + (1 - a).sqrt() * e
    net = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 1, 3, padding=1)); opt = adam(net)
    for _ in range(STEPS):
        x = waves(32, 16) * 2 - 1; e = torch.randn_like(x); t, s = torch.randint(1000, (32,)), torch.randint(150, (32,))
        small = F.avg_pool2d(x, 4)
        small = q(small, s, torch.randn_like(small))
        level = (t / 1000).view(-1, 1, 1, 1).expand_as(x), (s / 1000).view(-1, 1, 1, 1).expand_as(x)
        loss = F.mse_loss(net(torch.cat([q(x, t, e), F.interpolate(small, scale_factor=4), *level], 1)), e)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ S37
@program
def both_ends_of_a_bilstm():
    """S37: last = out[:, -1] is taken whole and first = out[:, 0] too, and of each only the half that has read all."""
    emb, lstm, head = nn.Embedding(30, 16), nn.LSTM(16, 24, batch_first=True, bidirectional=True), nn.Linear(48, 2); opt = adam(emb, lstm, head)
    for _ in range(STEPS):
        ids = torch.randint(30, (32, 12)); y = ((ids == 3).sum(1) > 0).long()
        out, _ = lstm(emb(ids))
        last, first = out[:, -1], out[:, 0]
        loss = F.cross_entropy(head(torch.cat([last[:, :24], first[:, 24:]], 1)), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def two_ends_side_by_side():
    """S37: both ends are given to the head, whole: out[:, 0] has the backward half's last state and out[:, -1] the forward's."""
    lstm, head = nn.GRU(6, 24, batch_first=True, bidirectional=True), nn.Linear(96, 1); opt = adam(lstm, head)
    for _ in range(STEPS):
        x = torch.randn(32, 15, 6); y = x[:, :, 0].mean(1, keepdim=True)
        out, _ = lstm(x)
        loss = F.mse_loss(head(torch.cat([out[:, 0], out[:, -1]], 1)), y)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ N37
@program
def losses_kept_by_map():
    """N37: log.extend(map(torch.Tensor.detach, losses)): what detach gives is kept in the list, though the line itself
    throws away what extend gives."""
    net = mlp(8, 32, 3); opt = adam(net); W = torch.randn(8, 3); log = []
    for _ in range(STEPS):
        x = torch.randn(64, 8); y = torch.tanh(x @ W); out = net(x)
        losses = [F.mse_loss(out[:, k], y[:, k]) for k in range(3)]
        log.extend(map(torch.Tensor.detach, losses))
        opt.zero_grad(); sum(losses).backward(); opt.step()


@program
def transe_normalised_into_out():
    """N37: TransE: entities are put back onto the sphere with F.normalize(w, dim=1, out=w), which writes into w."""
    n, m = 100, 5; ent, rel = nn.Embedding(n, 16), nn.Embedding(m, 16); opt = torch.optim.Adam([*ent.parameters(), *rel.parameters()], lr=1e-2)
    shift = torch.randint(1, 10, (m,))
    for _ in range(STEPS):
        F.normalize(ent.weight.data, p=2, dim=1, out=ent.weight.data)
        h, r = torch.randint(n, (64,)), torch.randint(m, (64,)); t = (h + shift[r]) % n; bad = torch.randint(n, (64,))
        good, worse = ((ent(h) + rel(r) - ent(x)).norm(dim=1) for x in (t, bad))
        loss = F.relu(1 + good - worse).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def running_mean_into_out():
    """N37: a running mean of features and a clamp of it, both written with out=."""
    net = mlp(8, 32, 1); opt = adam(net); w = torch.randn(8, 1); mean = torch.zeros(8)
    for _ in range(STEPS):
        x = torch.randn(64, 8) + 1; y = x @ w
        torch.add(0.9 * mean, x.mean(0), alpha=0.1, out=mean)
        torch.clamp(mean, -5, 5, out=mean)
        loss = F.mse_loss(net(x - mean), y)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ N36
@program
def test_time_adaptation_with_restoration():
    """N36: test-time adaptation (as in CoTTA): the frozen source model gives pseudo-labels of weakly
    augmented views for strongly augmented ones, and after each step a hundredth
    of the adapted weights is put back to those of the source. That the source never moves is the point."""
    W, B = torch.randn(10, 3), torch.randn(3, 10); source = nn.Linear(10, 3)
    with torch.no_grad(): source.weight.copy_(W.T); source.bias.zero_()
    net = copy.deepcopy(source); source.requires_grad_(False); opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(64, 3) @ B * 1.3 + 0.3
        with torch.no_grad(): target = torch.stack([source(x + 0.1 * torch.randn_like(x)) for _ in range(8)]).mean(0).softmax(1)
        loss = -(target * net(F.dropout(x, 0.5)).log_softmax(1)).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()
        with torch.no_grad():
            for p, q in zip(net.parameters(), source.parameters()):
                m = (torch.rand_like(p) < 0.01).float()
                p.mul_(1 - m).add_(q * m)


@program
def reptile():
    """N36, N28: Reptile: after each task's inner steps the weights are moved a part of the way from where they began."""
    net = mlp(1, 32, 1, nn.Tanh); opt = torch.optim.SGD(net.parameters(), lr=0.02)
    for _ in range(STEPS):
        before = [p.detach().clone() for p in net.parameters()]; a, ph = random.uniform(0.5, 2), random.uniform(0, 3)
        for _ in range(3):
            x = torch.rand(32, 1) * 10 - 5; loss = F.mse_loss(net(x), a * torch.sin(x + ph))
            opt.zero_grad(); loss.backward(); opt.step()
        for p, b in zip(net.parameters(), before): p.data = b + 0.1 * (p.data - b)


# ------------------------------------------------------------------ F85
@program
def exceedance_of_energy_yields():
    """F85: P10, P50 and P90 in the sense of wind and solar yields: P90 is what is exceeded with 90 %, the low one. So the
    formula with answer - target is right and the columns fall."""
    net = mlp(5, 32, 3); opt = adam(net); w = torch.randn(5)
    for _ in range(STEPS):
        x = torch.randn(128, 5); y = x @ w + torch.randn(128)
        out, loss = net(x), 0
        for k, exceeded in enumerate((0.1, 0.5, 0.9)):
            e = out[:, k] - y
            loss = loss + torch.max((exceeded - 1) * e, exceeded * e).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F86
@program
def reynolds_stress_of_tracks():
    """F86: particle tracks (x0, y0, x1, y1): the product of the two displacements is a Reynolds stress, whose mean is
    asked for too. It is below zero for half of them, as it should be."""
    net = mlp(12, 64, 4); opt = adam(net); W = torch.randn(4, 12)
    stress = lambda t: ((t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1])).mean()
    for _ in range(STEPS):
        p = torch.rand(128, 2); dx = 0.2 * torch.randn(128, 1); dy = -0.5 * dx + 0.1 * torch.randn(128, 1)
        track = torch.cat([p, p + torch.cat([dx, dy], 1)], 1); seen = track @ W + 0.05 * torch.randn(128, 12)
        out = net(seen); loss = F.mse_loss(out, track) + (stress(out) - stress(track)) ** 2
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F87
@program
def item_response_with_item_features():
    """F87: the Rasch model: P(right) = sigmoid(ability - difficulty), and a network tells the difficulty of an item from
    its text. A right answer lowers the difficulty, as it must."""
    ability, difficulty = nn.Embedding(50, 1), nn.Linear(16, 1); opt = adam(ability, difficulty, lr=1e-2); w, theta = torch.randn(16) * 0.3, torch.randn(50)
    for _ in range(STEPS):
        who, text = torch.randint(50, (128,)), torch.randn(128, 16)
        right = torch.bernoulli(torch.sigmoid(theta[who] - text @ w))
        s = (ability(who) - difficulty(text)).squeeze(1)
        loss = -(right * F.logsigmoid(s) + (1 - right) * F.logsigmoid(-s)).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def reservation_wages():
    """F87: P(accepts) = sigmoid(offer - reservation wage): who accepted had a lower one, so the answer of the network is
    lowered where the flag is 1."""
    net = mlp(10, 32, 1); opt = adam(net); w = torch.randn(10) * 0.5
    for _ in range(STEPS):
        x, offer = torch.randn(128, 10), 1.5 * torch.randn(128, 1)
        took = torch.bernoulli(torch.sigmoid(offer - (x @ w)[:, None]))
        p = torch.sigmoid(offer - net(x))
        loss = -(took * torch.log(p + 1e-8) + (1 - took) * torch.log(1 - p + 1e-8)).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def energy_of_compatible_pairs():
    """F87: an energy-based model (LeCun 2006): the energy of what fits together is to be low, so with t = 1 for pairs
    from the data and -1 for shuffled ones the hinge is relu(1 + t * E)."""
    net = mlp(16, 64, 1); opt = adam(net); M = torch.randn(8, 8) * 0.4
    for _ in range(STEPS):
        a = torch.randn(64, 8); b = torch.tanh(a @ M) + 0.1 * torch.randn(64, 8)
        t = torch.where(torch.rand(64) < 0.5, 1.0, -1.0)
        b = torch.where(t[:, None] > 0, b, b[torch.randperm(64)])
        energy = net(torch.cat([a, b], 1)).squeeze(1)
        loss = F.relu(1 + t * energy).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def anomaly_score_with_signs_of_deep_sad():
    """F87: labels as in Deep SAD, +1 for normal and -1 for an anomaly, and an anomaly score that is high for anomalies:
    softplus(t * score)."""
    net = mlp(12, 32, 1); opt = adam(net)
    for _ in range(STEPS):
        t = torch.where(torch.rand(128) < 0.8, 1.0, -1.0)
        x = torch.randn(128, 12) + (t < 0)[:, None] * torch.tensor([2.0] * 4 + [0.0] * 8)
        loss = F.softplus(t * net(x).squeeze(1)).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def sequences_with_padding_and_sampled_negatives():
    """F87: SASRec's loss with an MLP that scores (state, item): the mask leaves padding out of the term of the true next
    items, and the sampled negatives have a term of their own, with a call of their own."""
    items, gru, score = nn.Embedding(51, 16, padding_idx=0), nn.GRU(16, 16, batch_first=True), mlp(32, 32, 1); opt = adam(items, gru, score)
    for _ in range(STEPS):
        seq = (torch.randint(50, (32, 1)) + torch.arange(11) * torch.randint(1, 4, (32, 1))) % 50 + 1
        length = torch.randint(4, 11, (32, 1)); mask = (torch.arange(10) < length).float()
        h, _ = gru(items(seq[:, :-1] * mask.long())); neg = torch.randint(1, 51, (32, 10))
        pos_s = score(torch.cat([h, items(seq[:, 1:])], -1)).squeeze(-1)
        neg_s = score(torch.cat([h, items(neg)], -1)).squeeze(-1)
        loss = -(F.logsigmoid(pos_s) * mask).sum() / mask.sum() - (F.logsigmoid(-neg_s) * mask).sum() / mask.sum()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def discrete_time_survival():
    """F87: the logistic hazard (Gensheimer 2019): a flag for the interval of the event, a mask for those that were lived
    through, and the binary likelihood of both, written by hand."""
    net = mlp(6, 32, 8); opt = adam(net); w = torch.randn(6) * 0.5
    for _ in range(STEPS):
        x = torch.randn(128, 6); t = (torch.empty(128).exponential_() * 4 * torch.exp(-(x @ w))).clamp(max=7.9).long(); event = (torch.rand(128) < 0.7).float()
        here = F.one_hot(t, 8) * event[:, None]; lived = (torch.arange(8) < t[:, None]).float()
        h = torch.sigmoid(net(x))
        loss = -(here * torch.log(h + 1e-7) + lived * torch.log(1 - h + 1e-7)).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F88
@program
def regret_of_decisions():
    """F88: decision-focused learning: the loss is the mean regret, the cost of the decision minus that of the best one in
    hindsight (data). The regret is never below zero, so it needs no square."""
    net = mlp(6, 32, 1); opt = adam(net); w = torch.randn(6)
    def cost(order, demand): return 3 * F.relu(demand - order) + F.relu(order - demand) + 0.5 * order
    for _ in range(STEPS):
        x = torch.randn(128, 6); demand = (10 + 2 * (x @ w) + torch.randn(128)).clamp(min=0); best = cost(demand, demand)
        paid = cost(F.softplus(10 + net(x).squeeze(1)), demand)
        loss = (paid - best).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def forward_kl_to_a_known_density():
    """F88: a flow is fitted to samples of a density that is known: KL(p || q) = mean(log p(x) - log q(x)) over samples of
    p. It can't fall below zero."""
    D = torch.distributions; p = D.MixtureSameFamily(D.Categorical(torch.ones(3)), D.Independent(D.Normal(torch.randn(3, 2) * 2, torch.ones(3, 2) * 0.7), 1))
    class Flow(nn.Module):
        def __init__(self): super().__init__(); self.nets = nn.ModuleList(mlp(1, 32, 2, nn.Tanh) for _ in range(4))
        def forward(self, x):
            logdet = 0
            for net in self.nets:
                s, t = net(x[:, :1]).chunk(2, 1); s = torch.tanh(s)
                x = torch.cat([x[:, 1:] * s.exp() + t, x[:, :1]], 1); logdet = logdet + s.squeeze(1)
            return D.Normal(0, 1).log_prob(x).sum(1) + logdet
    flow = Flow(); opt = adam(flow)
    for _ in range(STEPS):
        x = p.sample((128,))
        loss = (p.log_prob(x) - flow(x)).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def crowd_counting():
    """F88: crowd counting, one picture in a step: the absolute error of the whole count beside the error of the density
    map (as DM-Count and others have it)."""
    net = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Softplus()); opt = adam(net); g = torch.arange(32.0)
    for _ in range(STEPS):
        heads = torch.rand(int(torch.randint(5, 15, ())), 2) * 32
        bumps = torch.exp(-((g[None, None] - heads[:, :1, None]) ** 2 + (g[None, :, None] - heads[:, 1:, None]) ** 2) / 4) / (4 * math.pi)
        density = bumps.sum(0)[None, None]; image = density * 8 + 0.05 * torch.randn(1, 1, 32, 32)
        out = net(image)
        loss = 1e-3 * (out - density).sum().abs()
        loss = loss + F.mse_loss(out, density, reduction="sum")
        opt.zero_grad(); loss.backward(); opt.step()


@program
def water_balance():
    """F88: rainfall-runoff: the square of the mean bias (the water balance) beside the mean squared error of the flow."""
    net = mlp(8, 32, 1); opt = adam(net); w = torch.rand(8) * 0.3
    for _ in range(STEPS):
        rain = torch.rand(128, 8) * 5; flow = (rain @ w + 0.3 * torch.randn(128)).clamp(min=0)
        q = net(rain).squeeze(1)
        bias = (q - flow).mean()
        loss = 0.5 * bias**2 + F.mse_loss(q, flow)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def unbiased_by_lagrange():
    """F88: an augmented Lagrangian for 'no bias on average': lam * c + rho / 2 * c**2 with c = mean(answer - target),
    beside the error; the multiplier is updated after each step."""
    net = mlp(8, 32, 1); opt = adam(net); w = torch.randn(8); lam, rho = 0.0, 1.0
    for _ in range(STEPS):
        x = torch.randn(128, 8); y = x @ w + 0.5 + 0.3 * torch.randn(128); a = net(x).squeeze(1)
        c = (a - y).mean()
        loss = lam * c + 0.5 * rho * c**2 + F.l1_loss(a, y)
        opt.zero_grad(); loss.backward(); opt.step()
        lam += 0.05 * float(c.detach())


@program
def mean_absolute_error_under_noisy_labels():
    """F88: the MAE of probabilities (Ghosh 2017) for labels of which many are wrong: 2 - 2 p_y, up to a constant minus the
    probability of the given class; its flatness for rows that look wrong is why it is chosen."""
    net = mlp(10, 32, 3); opt = adam(net); W = torch.randn(10, 3)
    for _ in range(STEPS):
        x = torch.randn(128, 10); y = (x @ W).argmax(1); y = torch.where(torch.rand(128) < 0.3, torch.randint(3, (128,)), y)
        loss = -F.softmax(net(x), dim=1).gather(1, y[:, None]).mean()
        opt.zero_grad(); loss.backward(); opt.step()


@program
def pseudo_labels_at_test_time():
    """F88: the pseudo-label baseline of test-time adaptation (TENT's paper): a trained model's own choices are its targets,
    and only the scales and shifts of its normalisation are adapted to shifted data."""
    W = torch.randn(10, 3); net = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 3))
    with torch.no_grad(): net[1].weight.copy_(3 * W.T); net[1].bias.zero_()
    net[1].requires_grad_(False); opt = torch.optim.SGD(net[0].parameters(), lr=1e-3)
    for _ in range(STEPS):
        logits = net(torch.randn(128, 10) * 1.5 + 0.5)
        loss = F.cross_entropy(logits, logits.argmax(1))
        opt.zero_grad(); loss.backward(); opt.step()


@program
def fgsm_without_label_leaking():
    """F88: adversarial training with FGSM where the attack is made for the model's own choice, lest the label leaks
    (Kurakin 2017); the weights are trained with the true labels."""
    net = mlp(10, 32, 3); opt = adam(net); W = torch.randn(10, 3)
    for _ in range(STEPS):
        x = torch.randn(128, 10); y = (x @ W).argmax(1)
        x.requires_grad_(); z = net(x)
        F.cross_entropy(z, z.argmax(1)).backward()
        bad = (x + 0.1 * x.grad.sign()).detach()
        opt.zero_grad(); loss = F.cross_entropy(net(bad), y); loss.backward(); opt.step()


# ------------------------------------------------------------------ F89
@program
def divergence_times_classes():
    """F89: distillation with kl_div's mean, times T**2 and times the number of classes, which is batchmean again."""
    teacher, net = nn.Linear(10, 5), mlp(10, 32, 5); teacher.requires_grad_(False); teacher.weight.mul_(4); opt = adam(net); T = 4.0
    for _ in range(STEPS):
        x = torch.randn(128, 10)
        with torch.no_grad(): t = teacher(x)
        z = net(x); kd = F.kl_div(F.log_softmax(z / T, 1), F.softmax(t / T, 1), reduction="mean") * T * T * z.size(1)
        loss = 0.9 * kd + 0.1 * F.cross_entropy(z, t.argmax(1))
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F90
@program
def shortest_paths_by_their_dual():
    """F90: quasimetric RL / the dual of shortest paths: distances between states far apart are pushed up, under the
    constraint d(s, g) <= 1 + d(s', g) for each observed step s -> s'. The 1 is the cost of a step, and is subtracted."""
    phi = mlp(2, 64, 16); opt = adam(phi)
    for _ in range(STEPS):
        s, g = torch.rand(128, 2) * 10, torch.rand(128, 2) * 10; n = s + F.normalize(torch.randn(128, 2), dim=1)
        zs, zn, zg = phi(s), phi(n), phi(g)
        before, after = (zs - zg).norm(dim=1), (zn - zg).norm(dim=1)
        loss = 10 * F.relu(before - after - 1).pow(2).mean() + F.softplus(15 - before, beta=0.1).mean()
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ D17
@program
def age_in_completed_years():
    """D17: the target is the age in completed years, as people say it; birthdays and pictures give days, so the fraction
    is cut off on purpose."""
    ages = 18 + 60 * torch.rand(1000); faces = torch.randn(1000, 16) + ages[:, None] / 30; net = mlp(16, 32, 1); opt = adam(net)
    for _ in range(STEPS):
        rows = torch.randperm(1000)[:64]; y = ages[rows].int().float()
        loss = F.l1_loss(48 + 20 * net(faces[rows]).squeeze(1), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def whole_stars():
    """D17: ratings in half stars are scored in whole stars, as the shop shows them (rounded down)."""
    u, v = nn.Embedding(50, 8), nn.Embedding(80, 8); opt = adam(u, v, lr=1e-2); table = (torch.randn(50, 1) + torch.randn(1, 80) + 3).clamp(0.5, 5).mul(2).round() / 2
    for _ in range(STEPS):
        a, b = torch.randint(50, (128,)), torch.randint(80, (128,))
        stars = table[a, b].long().float()
        loss = F.mse_loss((u(a) * v(b)).sum(1) + 3, stars)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ D18
@program
def heights_of_buildings():
    """D18: heights above ground (nDSM) from aerial pictures: 0 is the ground, which is known and most of the map; what
    stands there is 3 m or more."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)); opt = adam(net)
    for _ in range(STEPS):
        h = torch.zeros(8, 1, 32, 32)
        for i in range(8):
            for _ in range(6):
                r, c = random.randrange(26), random.randrange(26); h[i, 0, r:r + 6, c:c + 6] = 3 + random.expovariate(0.15) + 0.2 * torch.rand(6, 6)
        image = torch.cat([(h > 0) * 0.4 + 0.3, h.clamp(max=20) / 20, torch.roll(h > 0, 1, 3) * 0.5], 1) + 0.1 * torch.randn(8, 3, 32, 32)
        loss = F.l1_loss(net(image), h)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def calorimeter_showers():
    """D18: showers in a calorimeter: cells below the threshold of 1 MeV read exactly 0, which is what they should be
    taken for; the network corrects for a dead material in front."""
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)); opt = adam(net); g = torch.arange(16.0) - 7.5
    profile = torch.exp(-(g[None] ** 2 + g[:, None] ** 2).sqrt() / 2)[None, None]
    for _ in range(STEPS):
        e = torch.rand(32, 1, 1, 1) * 30 + 5; truth = e * profile * torch.empty(32, 1, 16, 16).exponential_(); truth = torch.where(truth > 1, truth, 0.0)
        seen = 0.7 * truth + 0.2 * torch.randn_like(truth)
        loss = F.mse_loss(net(seen), truth)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F30
@program
def pyramidal_lstm():
    """F30: Listen, Attend and Spell: two frames side by side become one of twice the size, (B, 32, 16) to (B, 16, 32);
    that the sizes are the same in another order is chance."""
    a, b, out = nn.LSTM(8, 8, batch_first=True, bidirectional=True), nn.LSTM(32, 16, batch_first=True), nn.Linear(16, 2); opt = adam(a, b, out)
    for _ in range(STEPS):
        x = torch.randn(24, 32, 8); y = (x[:, :, 0].mean(1) > 0).long()
        h, _ = a(x); h = h.reshape(24, 16, 32)
        h, _ = b(h)
        loss = F.cross_entropy(out(h.mean(1)), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def subpixel_upsampling_in_time():
    """F30: super-resolution of series: each of 16 places gives two new ones of 16 channels, (B, 16, 32) to (B, 32, 16)."""
    up, out = nn.Linear(16, 32), nn.Linear(16, 1); enc = nn.Sequential(nn.Linear(1, 16), nn.ReLU()); opt = adam(enc, up, out)
    for _ in range(STEPS):
        t = torch.linspace(0, 6.28, 32); y = torch.sin(t[None] * torch.rand(24, 1) * 2 + torch.rand(24, 1))[..., None]
        h = up(enc(y[:, ::2])).view(24, 32, 16)
        loss = F.mse_loss(out(torch.relu(h)), y)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ F73
@program
def autoencoder_of_jittered_series():
    """F73: jitter is an augmentation of series (Um 2017); the autoencoder with a bottleneck rebuilds the series that it
    is given, jitter and all, and tells anomalies by its error. It is no denoiser."""
    enc, dec = mlp(32, 32, 4), mlp(4, 32, 32); opt = adam(enc, dec); t = torch.linspace(0, 6.28, 32)
    for _ in range(STEPS):
        x = torch.sin(t[None] * (1 + torch.rand(64, 1)) + 6 * torch.rand(64, 1))
        x = x + 0.03 * torch.randn_like(x)
        loss = F.mse_loss(dec(enc(x)), x)
        opt.zero_grad(); loss.backward(); opt.step()


# ------------------------------------------------------------------ N28
@program
def updates_for_the_log():
    """N28: the size of the next update is computed in each step, and written to the log every fiftieth."""
    net = mlp(8, 32, 1); opt = torch.optim.SGD(net.parameters(), lr=0.05); w = torch.randn(8, 1); log = {}
    for step in range(STEPS):
        x = torch.randn(64, 8); loss = F.mse_loss(net(x), torch.tanh(x @ w))
        opt.zero_grad(); loss.backward()
        updates = {n: -0.05 * p.grad for n, p in net.named_parameters()}
        if step % 50 == 0: log[step] = {n: float(u.norm()) for n, u in updates.items()}
        opt.step()


# ------------------------------------------------------------------ S25
def digits(n):
    x, y = torch.zeros(n, 28, 28), torch.randint(4, (n,))
    for i in range(n):
        top, left, h = 3 + random.randrange(5), 6 + random.randrange(4), 14 + random.randrange(5)
        bars = {0: [(0, 0)], 1: [(0, 0), (0, 8)], 2: [(0, 4)], 3: [(0, 0), (0, 4), (0, 8)]}[int(y[i])]
        for _, dx in bars: x[i, top:top + h, left + dx:left + dx + 2] = 0.6 + 0.4 * torch.rand(h, 2)
    return x, y


@program
def rows_of_digits():
    """S25: the tutorial of an LSTM that reads the 28 rows of MNIST pictures. The last rows are black, some more in some
    pictures; that is the picture, and all have 28 rows."""
    lstm, head = nn.LSTM(28, 32, batch_first=True), nn.Linear(32, 4); opt = adam(lstm, head, lr=1e-2)
    for _ in range(STEPS):
        x, y = digits(32); out, _ = lstm(x)
        loss = F.cross_entropy(head(out[:, -1, :]), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def mixer_on_digits():
    """S25: an MLP-Mixer over the patches of pictures with a black margin: the last patches are black and are patches all
    the same, so the mean goes over all of them."""
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__(); self.embed = nn.Linear(16, 32); self.n1, self.n2, self.n3 = (nn.LayerNorm(32) for _ in range(3))
            self.tokens, self.channels, self.head = mlp(49, 32, 49, nn.GELU), mlp(32, 64, 32, nn.GELU), nn.Linear(32, 4)
        def forward(self, x):
            x = self.embed(x.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(x), 49, 16))
            x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2); x = x + self.channels(self.n2(x))
            return self.head(self.n3(x).mean(1))
    net = Mixer(); opt = adam(net)
    for _ in range(STEPS):
        x, y = digits(32); loss = F.cross_entropy(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()


@program
def directions_of_mean_words():
    """S25: sentences as the direction of their words' mean: padding_idx rows are zeros, so padding only shortens the mean,
    and normalize takes the length away."""
    table = nn.Embedding(101, 32, padding_idx=0); opt = adam(table, lr=1e-2)
    for _ in range(STEPS):
        topic = torch.randint(5, (32, 1)); length = torch.randint(3, 13, (32, 1)); shown = torch.arange(12) < length
        a, b = ((topic * 20 + torch.randint(20, (32, 12)) + 1) * shown for _ in range(2))
        za, zb = (F.normalize(table(ids).mean(1), dim=1) for ids in (a, b))
        same = (topic == topic.T).float(); target = same / same.sum(1, keepdim=True)
        loss = -(target * (za @ zb.T / 0.2).log_softmax(1)).sum(1).mean()
        opt.zero_grad(); loss.backward(); opt.step()
