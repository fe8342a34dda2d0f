"""Healthy programs of pairs, rivals, multipliers and heads, whose lines meet those of a fault."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from .attacked_parts import net, texts, update

PROGRAMS = {}
STEPS = 10


def program(f):
    PROGRAMS[f.__name__] = f
    return f


def blobs(n=32):
    y = torch.randint(0, 3, (n,))
    return torch.randn(n, 8) + 2 * F.one_hot(y, 8).float(), y


class Attn(nn.Module):
    def __init__(self, w=32, dropout=0.1):
        super().__init__()
        self.dropout = dropout
        self.qkv, self.out = nn.Linear(w, 3 * w), nn.Linear(w, w)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class DropNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(64, 24), nn.GRU(24, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, e):
        h = F.dropout(self.rnn(F.dropout(e, 0.1, self.training))[0], 0.1, self.training)
        return self.head(h)


# --------------------------------------------------------------------------------------------------------- eval mode
@program
def soft_prompt_of_a_resting_model():
    """S11: prompt tuning (Lester 2021): the language model is frozen and in eval mode; only the prompt learns."""
    model = DropNet().eval().requires_grad_(False)
    prompt = nn.Parameter(0.1 * torch.randn(4, 24))
    opt = torch.optim.Adam([prompt], 1e-2)

    def step():
        ids = texts(8, 12)
        e = torch.cat([prompt.expand(8, -1, -1), model.table(ids[:, :-1])], 1)
        update(opt, F.cross_entropy(model(e)[:, 4:].transpose(1, 2), ids[:, 1:]))

    for _ in range(STEPS):
        step()


@program
def feature_visualisation():
    """S11: activation maximisation (Olah 2017) through a resting network with F.dropout."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 4)

        def forward(self, x):
            return self.b(F.dropout(F.relu(self.a(x)).flatten(1), 0.5, training=self.training))

    model = Net().eval().requires_grad_(False)
    x = torch.randn(1, 1, 8, 8).mul_(0.1).requires_grad_()
    opt = torch.optim.Adam([x], 0.05)

    def step():
        moved = torch.roll(x, tuple(torch.randint(-1, 2, (2,)).tolist()), (2, 3))
        update(opt, -model(moved)[:, 2].mean() + 1e-2 * x.square().mean())

    for _ in range(STEPS):
        step()


@program
def universal_perturbation():
    """S11: a universal adversarial perturbation (Moosavi-Dezfooli; SGD-UAP) of a resting classifier with F.dropout."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 4)

        def forward(self, x):
            return self.b(F.dropout(F.relu(self.a(x)).flatten(1), 0.5, self.training))

    model = Net().eval().requires_grad_(False)
    delta = nn.Parameter(torch.zeros(1, 1, 8, 8))
    opt = torch.optim.Adam([delta], 1e-2)

    def step():
        x, y = torch.rand(16, 1, 8, 8), torch.randint(0, 4, (16,))
        update(opt, -F.cross_entropy(model(x + delta), y))
        delta.data.clamp_(-0.1, 0.1)

    for _ in range(STEPS):
        step()


# -------------------------------------------------------------------------------------------------- one-sided judges
@program
def ranknet_with_sparse_tables():
    """F20/one-sided: RankNet / BPR as bce(positive - negative, 1), two negatives; SparseAdam for tables, Adam for the
    tower."""

    class Rec(nn.Module):
        def __init__(self):
            super().__init__()
            self.u, self.i = nn.Embedding(100, 16, sparse=True), nn.Embedding(200, 16, sparse=True)
            self.tower = net(32, 1)

        def forward(self, u, i):
            return self.tower(torch.cat([self.u(u), self.i(i)], 1)).squeeze(1)

    model = Rec()
    sparse = torch.optim.SparseAdam([model.u.weight, model.i.weight], 1e-2)
    dense = torch.optim.Adam(model.tower.parameters(), 1e-3)

    def step():
        u, p = torch.randint(0, 100, (32,)), torch.randint(0, 200, (32,))
        pos, loss = model(u, p), 0
        for _ in range(2):
            x = pos - model(u, torch.randint(0, 200, (32,)))
            loss = loss + F.binary_cross_entropy_with_logits(x, torch.ones_like(x))
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()

    for _ in range(STEPS):
        step()


@program
def relativistic_gan_two_scales():
    """F20/one-sided: RSGAN (Jolicoeur-Martineau 2018), bce(D(real) - D(fake), 1), a critic per scale as in
    pix2pixHD."""
    g = nn.Sequential(nn.Linear(8, 64), nn.Unflatten(1, (1, 8, 8)))
    d = nn.ModuleList(
        nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * n, 1)) for n in (9, 1)
    )
    og, od = torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)

    def scores(x):
        return [d[0](x), d[1](F.avg_pool2d(x, 2))]

    def bce(x):
        return F.binary_cross_entropy_with_logits(x, torch.ones_like(x))

    def step():
        real = torch.rand(16, 1, 8, 8) ** 2
        fake = g(torch.randn(16, 8))
        update(od, sum(bce(r - f) for r, f in zip(scores(real), scores(fake.detach()))))
        update(og, sum(bce(f - r.detach()) for r, f in zip(scores(real), scores(fake))))

    for _ in range(STEPS):
        step()


@program
def rsgan_accumulated():
    """F20/one-sided: RSGAN with one critic and two micro-batches accumulated for each of its steps."""
    g, d = net(8, 4), net(4, 1)
    og, od = torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)
    one, crit = torch.ones(16, 1), nn.BCEWithLogitsLoss()

    def step():
        od.zero_grad()
        for _ in range(2):
            real, fake = torch.randn(16, 4) + 1, g(torch.randn(16, 8)).detach()
            (crit(d(real) - d(fake), one) / 2).backward()
        od.step()
        og.zero_grad()
        for _ in range(2):
            real, fake = torch.randn(16, 4) + 1, g(torch.randn(16, 8))
            (crit(d(fake) - d(real), one) / 2).backward()
        og.step()

    for _ in range(STEPS):
        step()


@program
def freeze_d_gan_cls():
    """F20/one-sided: FreezeD (Mo 2020), the first layers of D frozen; real and two kinds of made pairs, a backward
    each."""
    g = net(12, 10)
    d = nn.Sequential(nn.Linear(14, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    d[0].requires_grad_(False)
    og, od = torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)
    bce = nn.BCEWithLogitsLoss()

    def step():
        c = F.one_hot(torch.randint(0, 4, (16,)), 4).float()
        real = torch.randn(16, 10) + c.repeat(1, 3)[:, :10]
        fake = g(torch.cat([torch.randn(16, 8), c], 1))
        od.zero_grad()
        bce(d(torch.cat([real, c], 1)), torch.ones(16, 1)).backward()
        wrong = bce(d(torch.cat([real, c.roll(1, 0)], 1)), torch.zeros(16, 1))
        (0.5 * wrong + 0.5 * bce(d(torch.cat([fake.detach(), c], 1)), torch.zeros(16, 1))).backward()
        od.step()
        update(og, bce(d(torch.cat([fake, c], 1)), torch.ones(16, 1)))

    for _ in range(STEPS):
        step()


# --------------------------------------------------------------------------------------- parameters beside the model
@program
def multiplier_of_each_epoch():
    """S3 lone-parameter: a constrained loss; the multiplier is an nn.Parameter whose optimizer steps once an epoch."""
    model = net(8, 3)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    lam = nn.Parameter(torch.tensor(0.5))
    dual = torch.optim.SGD([lam], 0.1, maximize=True)
    n = [0]

    def step():
        x, y = blobs()
        z = model(x)
        gap = z.softmax(1)[:, 0].mean() - 0.4
        opt.zero_grad()
        (F.cross_entropy(z, y) + lam * gap).backward()
        opt.step()
        n[0] += 1
        if n[0] % 50 == 0:
            dual.step()
            dual.zero_grad()
            lam.data.clamp_(min=0)

    for _ in range(STEPS):
        step()


@program
def multiplier_moved_by_hand():
    """S3 lone-parameter: augmented Lagrangian (NOTEARS): the multiplier is moved by hand after each inner problem."""
    model = net(8, 3)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    lam, n = nn.Parameter(torch.zeros(3)), [0]

    def step():
        x, y = blobs()
        z = model(x)
        gap = z.softmax(1).mean(0) - 1 / 3
        update(opt, F.cross_entropy(z, y) + (lam * gap).sum() + 0.5 * gap.square().sum())
        n[0] += 1
        if n[0] % 100 == 0:
            lam.data += gap.detach()

    for _ in range(STEPS):
        step()


@program
def pinn_with_points_as_parameters():
    """S3 lone-parameter: a PINN of u' = -u whose collocation points are nn.Parameter, so that grad can be taken."""
    model = net(1, 1, act=nn.Tanh)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    t = nn.Parameter(torch.linspace(0, 2, 50)[:, None])

    def step():
        u = model(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        update(opt, (du + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean())

    for _ in range(STEPS):
        step()


@program
def loss_weights_that_join_later():
    """S3 lone-parameter: Kendall's log variances join the optimizer (add_param_group) after a warm-up of some
    epochs."""
    model = net(8, 4)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    s, n = nn.Parameter(torch.zeros(2)), [0]

    def step():
        x, y = blobs()
        out = model(x)
        losses = torch.stack([F.cross_entropy(out[:, :3], y), F.mse_loss(out[:, 3], x[:, 5])])
        n[0] += 1
        if n[0] == 200:
            opt.add_param_group({"params": [s]})
        update(opt, (torch.exp(-s) * losses + s).sum())

    for _ in range(STEPS):
        step()


# ---------------------------------------------------------------------------------------------- dropout of attention
@program
def dropout_set_by_the_loop():
    """S24 attention: nanoGPT-like loop that sets the dropout of all attentions: 0.1 to train, 0 before each evaluation
    ."""

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.places = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(32, 32))
            self.norm, self.attn, self.head = nn.LayerNorm(32), Attn(), nn.Linear(32, 64)

        def forward(self, x):
            h = self.table(x) + self.places[: x.shape[1]]
            return self.head(h + self.attn(self.norm(h)))

        def set_dropout(self, p):
            self.attn.dropout = p

    model = GPT()
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    n = [0]

    def step():
        if n[0] % 500 == 499:
            model.eval()
            model.set_dropout(0.0)
            with torch.no_grad():
                model(texts(8, 17))
            model.train()
            model.set_dropout(0.1)
        n[0] += 1
        ids = texts(8, 17)
        update(opt, F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:]))

    for _ in range(STEPS):
        step()


@program
def evaluated_by_a_copy_without_dropout():
    """S24 attention: two configurations: GPT(dropout=0.1) trains, GPT(dropout=0) is loaded with its weights for each
    evaluation."""

    class GPT(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.table, self.places = nn.Embedding(64, 32), nn.Parameter(0.02 * torch.randn(32, 32))
            self.norm, self.attn, self.head = nn.LayerNorm(32), Attn(dropout=p), nn.Linear(32, 64)

        def forward(self, x):
            h = self.table(x) + self.places[: x.shape[1]]
            return self.head(h + self.attn(self.norm(h)))

    model, tester = GPT(0.1), GPT(0.0)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    n = [0]

    def step():
        ids = texts(8, 17)
        update(opt, F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:]))
        n[0] += 1
        if n[0] % 200 == 0:
            tester.load_state_dict(model.state_dict())
            with torch.no_grad():
                tester.eval()(ids[:, :-1])

    for _ in range(STEPS):
        step()


# ------------------------------------------------------------------------------------------------------- asked twice
@program
def heads_of_tasks_to_come():
    """S67: task-incremental learning: a head per task, of which those to come rest; cross-entropy and an entropy
    bonus."""

    class Multi(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
            self.heads = nn.ModuleList(nn.Linear(32, 2) for _ in range(5))

    model = Multi()
    opt = torch.optim.Adam(model.parameters(), 2e-3)

    def step():
        x = torch.randn(32, 8)
        y = (x[:, 0] > 0).long()
        h = model.body(x)
        p = model.heads[0](h).softmax(1)
        update(opt, F.cross_entropy(model.heads[0](h), y) + 0.05 * (p * (p + 1e-8).log()).sum(1).mean())

    for _ in range(STEPS):
        step()


@program
def dark_experience_replay():
    """S67: DER (Buzzega 2020), task-incremental: cross-entropy and the squared distance to stored logits, the head
    asked for each."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
            self.heads = nn.ModuleList(nn.Linear(32, 3) for _ in range(5))

        def logits(self, h, task):
            return self.heads[task](h)

    model = Net()
    opt = torch.optim.SGD(model.parameters(), 0.05)
    xs, ys = blobs(64)
    zs = model.logits(model.body(xs), 0).detach()

    def step():
        i = torch.randperm(64)[:32]
        h = model.body(xs[i])
        update(opt, F.cross_entropy(model.logits(h, 0), ys[i]) + 0.1 * F.mse_loss(model.logits(h, 0), zs[i]))

    for _ in range(STEPS):
        step()


@program
def linear_cql_with_a_target():
    """S67: discrete CQL with linear values on features; the target layer stands beside, without gradients."""

    class Q(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.target = nn.Linear(12, 4), nn.Linear(12, 4)
            self.target.load_state_dict(self.q.state_dict())

        def forward(self, s):
            return self.q(s)

    model = Q()
    opt = torch.optim.Adam(model.q.parameters(), 2e-3)

    def step():
        s, n, a, r = torch.rand(32, 12), torch.rand(32, 12), torch.randint(0, 4, (32, 1)), torch.rand(32)
        done = (torch.rand(32) < 0.1).float()
        with torch.no_grad():
            y = r + 0.9 * (1 - done) * model.target(n).max(1).values
        taken = model(s).gather(1, a).squeeze(1)
        gap = model(s).logsumexp(1) - taken
        update(opt, F.mse_loss(taken, y) + 0.5 * gap.mean())
        with torch.no_grad():
            for p, t in zip(model.q.parameters(), model.target.parameters()):
                t.lerp_(p, 0.01)

    for _ in range(STEPS):
        step()


# ------------------------------------------------------------------------------------------------------- two loaders
@program
def monge_map_by_matched_batches():
    """D54: unpaired clouds of cells: each batch of sources is matched to a batch of targets by optimal transport
    (Sinkhorn)."""

    def assign(cost):  # Sinkhorn's plan, and its largest shares
        k = torch.exp(-cost / cost.mean() * 10)
        for _ in range(20):
            k = k / k.sum(1, keepdim=True)
            k = k / k.sum(0, keepdim=True)
        return k.argmax(1)

    a, b = torch.randn(400, 8), torch.randn(400, 8) * 0.5 + 2
    one, two = (DataLoader(TensorDataset(x), 32, shuffle=True) for x in (a, b))
    model = net(8, 8)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    state = [iter(zip(one, two))]

    def step():
        (x,), (y,) = next(state[0])
        out = model(x)
        cost = torch.cdist(out.detach(), y) ** 2
        update(opt, F.mse_loss(out, y[assign(cost)]))

    for _ in range(STEPS):
        step()


@program
def imle_between_two_clouds():
    """D54: IMLE / Chamfer matching between two unpaired clouds: for each real row the nearest of what was made."""
    a, b = torch.randn(320, 8), torch.randn(320, 8) + 0.3
    one, two = (DataLoader(TensorDataset(x), 32, shuffle=True) for x in (a, b))
    model = net(8, 8)
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    it = iter(zip(one, two))

    def step():
        (x,), (y,) = next(it)
        out = model(x)
        near = torch.cdist(out.detach(), y).argmin(0)
        update(opt, F.mse_loss(out[near], y))

    for _ in range(STEPS):
        step()


@program
def deep_steganography():
    """D54: Baluja 2017: covers and secrets from two loaders of one data set; MSE to the cover, by hand for the
    secret."""

    class Steg(nn.Module):
        def __init__(self):
            super().__init__()
            self.prepare = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
            self.hide, self.reveal = nn.Conv2d(11, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, cover, secret):
            out = self.hide(torch.cat([cover, self.prepare(secret)], 1))
            return out, self.reveal(out)

    model = Steg()
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    data = TensorDataset(F.avg_pool2d(torch.rand(200, 3, 12, 12), 3, 1, 1))
    it = iter(zip(DataLoader(data, 8, shuffle=True), DataLoader(data, 8, shuffle=True)))

    def step():
        (c,), (s,) = next(it)
        stego, found = model(c, s)
        update(opt, F.mse_loss(stego, c) + 0.75 * ((found - s) ** 2).mean())

    for _ in range(STEPS):
        step()


@program
def text_to_picture_and_back_losses_by_task():
    """D54: two tasks, two loaders: EmbeddingBag classifier of texts, SimCLR (loss by hand) of pictures, one trunk."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bag = nn.Conv2d(1, 16, 3, 2), nn.EmbeddingBag(64, 16)
            self.trunk, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def see(self, x):
            return self.trunk(self.conv(x).relu().mean((2, 3)))

        def read(self, t):
            return self.head(self.trunk(self.bag(t)).relu())

    model = Two()
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    pics = TensorDataset(torch.rand(320, 1, 12, 12))
    t = torch.randint(0, 64, (320, 6))
    words = TensorDataset(t, t[:, 0] % 4)
    it = iter(zip(DataLoader(pics, 16, shuffle=True), DataLoader(words, 16, shuffle=True)))

    def step():
        (x,), (t, y) = next(it)
        a, b = (F.normalize(model.see(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        z = a @ b.t() / 0.2
        contrast = -(z.diag() - z.logsumexp(1)).mean()
        update(opt, contrast + F.cross_entropy(model.read(t), y))

    for _ in range(STEPS):
        step()


# -------------------------------------------------------------------------------- frozen heads, terms that are shown
@program
def federated_body_update_ten_classes():
    """S22 scores: FedBABU (Oh 2022), the head stays random on purpose: ten classes and a wider body."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU())
            self.head = nn.Linear(128, 10)

        def forward(self, x):
            return self.head(self.body(x))

    model = Net()
    model.head.requires_grad_(False)
    opt = torch.optim.SGD(model.body.parameters(), 0.1, momentum=0.9)

    def step():
        y = torch.randint(0, 10, (32,))
        update(opt, F.cross_entropy(model(torch.randn(32, 16) + 3 * F.one_hot(y, 16)), y))

    for _ in range(STEPS):
        step()


@program
def surrogate_that_shows_the_bound():
    """F2/cut-off: score-function ELBO (Ranganath 2014): the surrogate, and the difference to the true bound,
    detached."""
    enc, dec = net(12, 6), net(6, 12)
    opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 2e-3)

    def step():
        x = (torch.rand(32, 12) < 0.3).float()
        q = torch.distributions.Bernoulli(logits=enc(x))
        z = q.sample()
        logq = q.log_prob(z).sum(1)
        logp = -F.binary_cross_entropy_with_logits(dec(z), x, reduction="none").sum(1) - 6 * math.log(2)
        bound = logp - logq
        signal = bound.detach() - bound.detach().mean()
        surrogate = logp + signal * logq
        loss = -surrogate.mean() + (surrogate.detach() - bound.detach()).mean()
        update(opt, loss)

    for _ in range(STEPS):
        step()
