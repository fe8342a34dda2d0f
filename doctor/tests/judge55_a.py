"""Small PyTorch training programs from many fields, each in two versions."""
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


def seed_all(extra=0):
    random.seed(SEED + extra)
    torch.manual_seed(SEED + extra)


def gen(k):
    return torch.Generator().manual_seed(1000 * (SEED + 1) + k)


def forever(loader):
    while True:
        for batch in loader:
            yield batch


class eval_mode:
    def __init__(self, *models):
        self.models = models

    def __enter__(self):
        self.was = [[(m, m.training) for m in model.modules()] for model in self.models]
        for m in self.models:
            m.eval()
        self.ng = torch.no_grad()
        self.ng.__enter__()

    def __exit__(self, *a):
        self.ng.__exit__(*a)
        for lst in self.was:
            for m, t in lst:
                m.training = t


def blobs(n, classes, size, noise, k):
    """grey images: one smooth template per class, shifted, scaled and noised"""
    gt = torch.Generator().manual_seed(77)
    t = torch.randn(classes, 1, 5, 5, generator=gt)
    t = F.interpolate(t, size=(size, size), mode="bicubic", align_corners=False)
    g = gen(k)
    y = torch.randint(0, classes, (n,), generator=g)
    sh = torch.randint(-2, 3, (n, 2), generator=g)
    amp = 0.7 + 0.6 * torch.rand(n, 1, 1, 1, generator=g)
    x = torch.stack([torch.roll(t[c], (int(a), int(b)), dims=(1, 2)) for c, (a, b) in zip(y, sh)])
    return x * amp + noise * torch.randn(n, 1, size, size, generator=g), y


CASES = []


def case(name, what):
    CASES.append({"name": name, "what": what})


# ---------------------------------------------------------------- digits_cnn
case("digits_cnn", "Image classifier whose forward ends in softmax while the loss is nn.CrossEntropyLoss, so softmax is "
     "applied twice: gradients are small and the loss cannot fall near zero; slow, worse training.")


def _digits_cnn(good):
    seed_all()
    xtr, ytr = blobs(2000, 10, 16, 1.6, 1)
    xte, yte = blobs(1000, 10, 16, 1.6, 2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = F.relu(self.fc1(x.flatten(1)))
            x = self.fc2(x)
            if good:
                return x
            return F.softmax(x, dim=1)

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batches = forever(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True))

    def step():
        x, y = next(batches)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            return (model(xte).argmax(1) != yte).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# -------------------------------------------------------------- house_prices
case("house_prices", "Tabular regression: the network's output is [B,1] and the target [B]; SmoothL1Loss broadcasts them to "
     "[B,B], so every prediction is pulled to the batch median and the features are not learnt.")


class PriceData(Dataset):
    def __init__(self, n, k):
        g = gen(k)
        self.x = torch.randn(n, 12, generator=g)
        x = self.x
        y = 1.5 * x[:, 0] - x[:, 1] * x[:, 2] + torch.sin(2 * x[:, 3]) + 0.5 * x[:, 4] ** 2
        y = y + 0.2 * torch.randn(n, generator=g)
        self.y = (y - 0.5) / 2.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def _house_prices(good):
    seed_all()
    train, test = PriceData(3000, 1), PriceData(1000, 2)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss_fn = nn.SmoothL1Loss()
    it = forever(DataLoader(train, batch_size=64, shuffle=True))

    def step():
        features, price = next(it)
        pred = model(features)
        if good:
            pred = pred.squeeze(-1)
        loss = loss_fn(pred, price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            return (model(test.x).squeeze(-1) - test.y).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ------------------------------------------------------------------ glyph_vae
case("glyph_vae", "VAE whose reconstruction term is the mean over batch and pixels while the KL is summed over latents: the "
     "KL weighs some 144 times too much and the posterior collapses to the prior.")


class VAE(nn.Module):
    def __init__(self, d=144, z=8, h=96):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.mu = nn.Linear(h, z)
        self.logvar = nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, d))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def _glyph_vae(good):
    seed_all()
    xtr = (blobs(2000, 10, 12, 0.1, 1)[0] > 0).float().flatten(1)
    xte = (blobs(500, 10, 12, 0.1, 2)[0] > 0).float().flatten(1)
    vae = VAE()
    opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
    loader = DataLoader(xtr, batch_size=64, shuffle=True, drop_last=True)
    it = forever(loader)

    def vae_loss(logits, x, mu, logvar):
        if good:
            bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / x.size(0)
        else:
            bce = F.binary_cross_entropy_with_logits(logits, x)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    def step():
        x = next(it)
        opt.zero_grad()
        logits, mu, logvar = vae(x)
        loss = vae_loss(logits, x, mu, logvar)
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with eval_mode(vae), torch.random.fork_rng():
            torch.manual_seed(5)
            logits, mu, logvar = vae(xte)
            rec = F.binary_cross_entropy_with_logits(logits, xte, reduction="sum") / len(xte)
            kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1).mean()
            return (rec + kl).item()

    return {"model": vae, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------- siamese_faces
case("siamese_faces", "Siamese metric learning with nn.CosineEmbeddingLoss and labels 1 / 0 in place of 1 / -1: pairs labelled "
     "0 give no loss and no gradient, everything is pulled together and the embedding collapses.")


class PairData(Dataset):
    def __init__(self, n, k, classes=12, dim=24):
        g = gen(k)
        gt = torch.Generator().manual_seed(3)
        centres = torch.randn(classes, 6, generator=gt)
        mix = torch.randn(6, dim, generator=gt)
        y = torch.randint(0, classes, (n,), generator=g)
        z = centres[y] + 0.35 * torch.randn(n, 6, generator=g)
        self.x = torch.tanh(z @ mix / 2) + 0.6 * torch.randn(n, dim, generator=g)
        self.y = y
        self.rng = random.Random(k)
        self.by = {c: (y == c).nonzero().flatten().tolist() for c in range(classes)}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        same = self.rng.random() < 0.5
        c = int(self.y[i])
        if same:
            j = self.rng.choice(self.by[c])
        else:
            j = self.rng.choice(self.by[self.rng.choice([k for k in self.by if k != c])])
        return self.x[i], self.x[j], torch.tensor(1.0 if same else 0.0)


def _siamese_faces(good):
    seed_all()
    train, test = PairData(2000, 1), PairData(800, 2)
    net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    criterion = nn.CosineEmbeddingLoss(margin=0.3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    it = forever(DataLoader(train, batch_size=64, shuffle=True))

    def step():
        a, b, same = next(it)
        ea, eb = net(a), net(b)
        target = same * 2 - 1 if good else same
        loss = criterion(ea, eb, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(net):
            e = F.normalize(net(test.x), dim=1)
            sim = e @ e.T
            iu = torch.triu_indices(len(e), len(e), 1)
            s = sim[iu[0], iu[1]]
            same = test.y[iu[0]] == test.y[iu[1]]
            r = torch.empty_like(s)
            r[s.argsort()] = torch.arange(1, len(s) + 1, dtype=s.dtype)
            r = r.double()
            npos, nneg = same.sum().double(), (~same).sum().double()
            auc = (r[same].sum() - npos * (npos + 1) / 2) / (npos * nneg)
            return (1 - auc).item()

    return {"model": net, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- event_counts
case("event_counts", "Count regression: the network returns a positive rate (softplus), the loss nn.PoissonNLLLoss() is left "
     "at log_input=True and takes it for a log rate, so the learnt rate is about the log of the true rate.")


class CountNet(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU())
        self.rate = nn.Linear(48, 1)

    def forward(self, x):
        return F.softplus(self.rate(self.body(x))).squeeze(-1)


def _event_counts(good):
    seed_all()

    def make(n, k):
        g = gen(k)
        x = torch.randn(n, 8, generator=g)
        lam = torch.exp(1.2 + 0.5 * x[:, 0] - 0.4 * x[:, 1] + 0.3 * torch.sin(2 * x[:, 2]))
        return x, torch.poisson(lam, generator=g)

    xtr, ytr = make(3000, 1)
    xte, yte = make(1000, 2)
    model = CountNet(8)
    criterion = nn.PoissonNLLLoss(log_input=False) if good else nn.PoissonNLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    it = forever(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True))

    def step():
        x, y = next(it)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            r = model(xte).clamp_min(1e-6)
            dev = 2 * (torch.xlogy(yte, yte / r) - (yte - r))
            return dev.mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ------------------------------------------------------------------- scene_seg
case("scene_seg", "Segmentation: logits [B,C,H,W] are flattened with reshape(-1, C) without moving the channels last, so the "
     "class scores of one row are scores of four neighbouring pixels and do not match the flattened labels.")


def _scene_seg(good):
    seed_all()
    C, S = 4, 16

    def make(n, k):
        g = gen(k)
        yy, xx = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
        mask = torch.zeros(n, S, S, dtype=torch.long)
        for c in range(1, C):
            cx = torch.randint(2, S - 2, (n, 1, 1), generator=g)
            cy = torch.randint(2, S - 2, (n, 1, 1), generator=g)
            r = torch.randint(2, 6, (n, 1, 1), generator=g)
            mask[((xx - cx) ** 2 + (yy - cy) ** 2) <= r ** 2] = c
        col = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.2, -0.5], [-0.6, 1.0, 0.3], [0.3, -0.7, 1.0]])
        img = col[mask].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 3, S, S, generator=g)
        return img, mask

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.d1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
            self.d2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.u1 = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.ReLU())
            self.out = nn.Conv2d(16, C, 1)

        def forward(self, x):
            a = self.d1(x)
            b = self.d2(F.max_pool2d(a, 2))
            return self.out(self.u1(torch.cat([a, self.up(b)], 1)))

    xtr, mtr = make(600, 1)
    xte, mte = make(150, 2)
    model = UNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    ce = nn.CrossEntropyLoss()
    it = forever(DataLoader(TensorDataset(xtr, mtr), batch_size=16, shuffle=True))

    def step():
        img, mask = next(it)
        logits = model(img)
        if good:
            logits = logits.permute(0, 2, 3, 1)
        loss = ce(logits.reshape(-1, C), mask.reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            p = model(xte).argmax(1)
            iou = [((p == c) & (mte == c)).sum() / ((p == c) | (mte == c)).sum() for c in range(C)]
            return 1 - torch.stack(iou).mean().item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------- transfer_head
case("transfer_head", "Transfer learning: the optimizer is built before the classification head is replaced, so it holds the "
     "old head; the new head gets gradients but is never updated.")


class TinyResNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.block1 = nn.Conv2d(16, 16, 3, padding=1)
        self.block2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc = nn.Linear(32 * 16, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = x + F.relu(self.block1(x))
        x = F.relu(self.block2(x))
        return self.fc(x.flatten(1))


def _transfer_head(good):
    seed_all()
    xs, ys = blobs(1000, 10, 16, 0.7, 11)
    model = TinyResNet(10)
    pre = torch.optim.Adam(model.parameters(), lr=3e-3)
    for k in range(40):
        idx = torch.randint(0, 1000, (50,))
        pre.zero_grad()
        F.cross_entropy(model(xs[idx]), ys[idx]).backward()
        pre.step()
    model.zero_grad()

    xtr, ytr = blobs(800, 20, 16, 1.0, 1)
    xte, yte = blobs(800, 20, 16, 1.0, 2)
    keep, keep2 = ytr >= 10, yte >= 10
    xtr, ytr, xte, yte = xtr[keep], ytr[keep] - 10, xte[keep2], yte[keep2] - 10

    for name, p in model.named_parameters():
        if not name.startswith("fc."):
            p.requires_grad = False

    def make_optimizer():
        return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    if good:
        model.fc = nn.Linear(model.fc.in_features, 10)
        optimizer = make_optimizer()
    else:
        optimizer = make_optimizer()
        model.fc = nn.Linear(model.fc.in_features, 10)
    criterion = nn.CrossEntropyLoss()
    it = forever(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True))

    def step():
        inputs, labels = next(it)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            return (model(xte).argmax(1) != yte).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------- multitask_lab
case("multitask_lab", "Multi-task regression: the task heads sit in a plain Python list, not in an nn.ModuleList, so they are "
     "not among model.parameters() and are never trained.")


class MultiTask(nn.Module):
    def __init__(self, d, tasks, registered):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        heads = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(tasks)]
        self.heads = nn.ModuleList(heads) if registered else heads

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def _multitask_lab(good):
    seed_all()

    def make(n, k):
        g = gen(k)
        x = torch.randn(n, 10, generator=g)
        a, b, c = x[:, 0] + x[:, 1], x[:, 2] - x[:, 3], torch.sin(x[:, 4] * 2)
        y = torch.stack([1.2 * a, b + c, 0.7 * a * torch.sign(b), c - 0.8 * a, 0.6 * b + 0.5 * c * a], 1)
        return x, y + 0.1 * torch.randn(n, 5, generator=g)

    xtr, ytr = make(3000, 1)
    xte, yte = make(1000, 2)
    model = MultiTask(10, 5, registered=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    it = forever(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True))

    def step():
        x, y = next(it)
        preds = model(x)
        losses = [F.mse_loss(p, y[:, t]) for t, p in enumerate(preds)]
        loss = sum(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            p = torch.stack(model(xte), 1)
            return (((p - yte) ** 2).mean(0) / yte.var(0)).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ------------------------------------------------------------------- sac_reach
case("sac_reach", "Soft actor-critic: the actor draws its action with dist.sample() rather than rsample(), so no gradient of "
     "the critic reaches the policy, which gets nothing but noise and never improves.")


class Actor(nn.Module):
    def __init__(self, s, a, reparam):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(s, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mean = nn.Linear(64, a)
        self.log_std = nn.Linear(64, a)
        self.reparam = reparam

    def dist(self, s):
        h = self.net(s)
        return torch.distributions.Normal(self.mean(h), self.log_std(h).clamp(-5, 1).exp())

    def forward(self, s):
        d = self.dist(s)
        u = d.rsample() if self.reparam else d.sample()
        a = torch.tanh(u)
        logp = d.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return a, logp.sum(-1)


class Critic(nn.Module):
    def __init__(self, s, a):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(s + a, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, s, a):
        return self.net(torch.cat([s, a], -1)).squeeze(-1)


def _sac_reach(good):
    seed_all()

    def env_step(s, a):
        s2 = (s + 0.4 * a).clamp(-3, 3)
        return s2, -(s2 ** 2).sum(-1) - 0.05 * (a ** 2).sum(-1)

    actor = Actor(2, 2, reparam=good)
    q1, q2 = Critic(2, 2), Critic(2, 2)
    t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    for p in itertools.chain(t1.parameters(), t2.parameters()):
        p.requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(itertools.chain(q1.parameters(), q2.parameters()), lr=1e-3)
    alpha, gamma, tau = 0.1, 0.9, 0.02

    s = torch.rand(1000, 2) * 4 - 2
    a = torch.rand(1000, 2) * 2 - 1
    s2, r = env_step(s, a)
    buf = [s, a, r, s2]
    state = {"s": torch.rand(8, 2) * 4 - 2}

    def collect(i):
        if i % 20 == 0:
            state["s"] = torch.rand(8, 2) * 4 - 2
        with torch.no_grad():
            act, _ = actor(state["s"])
        nxt, rew = env_step(state["s"], act)
        for k, v in enumerate((state["s"], act, rew, nxt)):
            buf[k] = torch.cat([buf[k], v])[-5000:]
        state["s"] = nxt

    def step(i):
        collect(i)
        idx = torch.randint(0, len(buf[0]), (128,))
        s, a, r, s2 = (b[idx] for b in buf)
        with torch.no_grad():
            a2, logp2 = actor(s2)
            y = r + gamma * (torch.min(t1(s2, a2), t2(s2, a2)) - alpha * logp2)
        critic_loss = F.mse_loss(q1(s, a), y) + F.mse_loss(q2(s, a), y)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        new_a, logp = actor(s)
        actor_loss = (alpha * logp - torch.min(q1(s, new_a), q2(s, new_a))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        with torch.no_grad():
            for net, tgt in ((q1, t1), (q2, t2)):
                for p, tp in zip(net.parameters(), tgt.parameters()):
                    tp.lerp_(p, tau)
        return critic_loss.item()

    def evaluate():
        with eval_mode(actor):
            s = torch.rand(200, 2, generator=gen(9)) * 4 - 2
            cost = 0
            for _ in range(20):
                s, r = env_step(s, torch.tanh(actor.dist(s).mean))
                cost = cost - r.mean()
            return float(cost)

    return {"model": (actor, q1, q2), "optimizer": (actor_opt, critic_opt), "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- pinn_poisson
case("pinn_poisson", "Physics-informed network: the second derivative is taken with autograd.grad without create_graph, so the "
     "PDE residual is a constant for backward and only the boundary loss trains the network.")


class PINN(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


def _pinn_poisson(good):
    seed_all()
    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    xb = torch.tensor([[-1.0], [1.0]])
    ub = torch.zeros(2, 1)

    def gradient(out, x, create_graph=True):
        return torch.autograd.grad(out, x, grad_outputs=torch.ones_like(out), create_graph=create_graph)[0]

    def residual(x):
        u = model(x)
        u_x = gradient(u, x)
        u_xx = gradient(u_x, x, create_graph=good)
        f = -(math.pi ** 2) * torch.sin(math.pi * x)
        return u_xx - f

    def step():
        x = (torch.rand(64, 1) * 2 - 1).requires_grad_(True)
        loss_pde = residual(x).pow(2).mean()
        loss_bc = F.mse_loss(model(xb), ub)
        loss = loss_pde + 20.0 * loss_bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            x = torch.linspace(-1, 1, 201)[:, None]
            u = torch.sin(math.pi * x)
            return ((model(x) - u).norm() / u.norm()).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ------------------------------------------------------------------- ring_gan
case("ring_gan", "GAN in the Keras manner: the generator's optimizer is built over nn.Sequential(G, D).parameters(), so the "
     "generator step also moves the discriminator, to call the fakes real.")


def _ring_gan(good):
    seed_all()

    def real_batch(n, g=None):
        th = torch.randint(0, 6, (n,), generator=g) * (2 * math.pi / 6)
        return torch.stack([th.cos(), th.sin()], 1) * 1.5 + 0.1 * torch.randn(n, 2, generator=g)

    G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    gan = nn.Sequential(G, D)
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(G.parameters() if good else gan.parameters(), lr=5e-4, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    B = 128

    def step():
        real = real_batch(B)
        fake = G(torch.randn(B, 8)).detach()
        opt_d.zero_grad()
        d_loss = bce(D(real), torch.ones(B, 1)) + bce(D(fake), torch.zeros(B, 1))
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = bce(gan(torch.randn(B, 8)), torch.ones(B, 1))
        g_loss.backward()
        opt_g.step()
        return d_loss.item()

    def evaluate():
        with eval_mode(G, D):
            g = gen(4)
            x = real_batch(2000, g)
            y = G(torch.randn(2000, 8, generator=g))
            dirs = F.normalize(torch.randn(2, 32, generator=g), dim=0)
            a, b = (x @ dirs).sort(0)[0], (y @ dirs).sort(0)[0]
            return (a - b).abs().mean().item()

    return {"model": (G, D), "optimizer": (opt_g, opt_d), "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------- simsiam_img
case("simsiam_img", "SimSiam without the stop-gradient: the target projection z is not detached, so both branches move to one "
     "another and the representation collapses.")


class SimSiam(nn.Module):
    def __init__(self, d=100, h=128, z=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(d, h, bias=False), nn.BatchNorm1d(h), nn.ReLU(),
            nn.Linear(h, h, bias=False), nn.BatchNorm1d(h), nn.ReLU(),
            nn.Linear(h, z, bias=False), nn.BatchNorm1d(z, affine=False))
        self.predictor = nn.Sequential(nn.Linear(z, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, z))

    def forward(self, x):
        z = self.encoder(x)
        return z, self.predictor(z)


def _simsiam_img(good):
    seed_all()
    ramp = torch.linspace(-1, 1, 10)
    light = torch.stack([ramp[:, None].expand(10, 10), ramp[None, :].expand(10, 10), torch.ones(10, 10),
                         ramp[:, None] * ramp[None, :]])

    def relight(x, g=None):
        w = 2.0 * torch.randn(len(x), 4, generator=g)
        return x + torch.einsum("bk,khw->bhw", w, light)[:, None]

    def make(n, k):
        templates = F.interpolate(torch.randn(10, 1, 5, 5, generator=torch.Generator().manual_seed(5)), scale_factor=2)
        g = gen(k)
        y = torch.randint(0, 10, (n,), generator=g)
        x = templates[y] * (0.8 + 0.4 * torch.rand(n, 1, 1, 1, generator=g))
        return relight(x + 0.8 * torch.randn(n, 1, 10, 10, generator=g), g), y

    xtr, ytr = make(2000, 1)
    xte, yte = make(600, 2)
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    it = forever(DataLoader(TensorDataset(xtr), batch_size=128, shuffle=True, drop_last=True))

    def augment(x):
        x = relight(x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)))
        return (x + 0.3 * torch.randn_like(x)).flatten(1)

    def D(p, z):
        if good:
            z = z.detach()
        return -F.cosine_similarity(p, z, dim=-1).mean()

    def step():
        (x,) = next(it)
        z1, p1 = model(augment(x))
        z2, p2 = model(augment(x))
        loss = D(p1, z2) / 2 + D(p2, z1) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            a, b = (F.normalize(model.encoder(v.flatten(1)), dim=1) for v in (xtr, xte))
            nn_idx = (b @ a.T).topk(5, dim=1)[1]
            pred = ytr[nn_idx].mode(1)[0]
            return (pred != yte).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- checker_flow
case("checker_flow", "RealNVP whose coupling layers are built as nn.ModuleList([Coupling()] * n): all layers are one object with "
     "one set of weights, so the flow has far less capacity than written.")


class Coupling(nn.Module):
    def __init__(self, h=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 2))

    def forward(self, x, flip):
        a, b = (x[:, 1:], x[:, :1]) if flip else (x[:, :1], x[:, 1:])
        s, t = self.net(a).chunk(2, dim=1)
        s = 1.5 * torch.tanh(s)
        b = b * s.exp() + t
        x = torch.cat([b, a], 1) if flip else torch.cat([a, b], 1)
        return x, s.squeeze(1)


class RealNVP(nn.Module):
    def __init__(self, n_layers, shared):
        super().__init__()
        if shared:
            self.layers = nn.ModuleList([Coupling()] * n_layers)
        else:
            self.layers = nn.ModuleList([Coupling() for _ in range(n_layers)])

    def log_prob(self, x):
        x = x / 2.3
        logdet = -2 * math.log(2.3) * torch.ones(len(x))
        for k, layer in enumerate(self.layers):
            x, ld = layer(x, flip=k % 2 == 1)
            logdet = logdet + ld
        return logdet - 0.5 * (x ** 2).sum(1) - math.log(2 * math.pi)


def _checker_flow(good):
    seed_all()

    def sample(n, g=None):
        x1 = torch.rand(n, generator=g) * 8 - 4
        x2 = torch.rand(n, generator=g) - torch.randint(0, 2, (n,), generator=g) * 2.0
        x2 = (x2 + x1.floor() % 2) * 2
        return torch.stack([x1, x2], 1)

    flow = RealNVP(8, shared=not good)
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
    xte = sample(3000, gen(2))

    def step():
        x = sample(256)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(flow):
            return (-flow.log_prob(xte).mean() - math.log(32)).item()

    return {"model": flow, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- phoneme_gru
case("phoneme_gru", "Speech frames [B,T,F] go into an nn.GRU built without batch_first=True: it runs along the batch, so each row "
     "sees the other rows and the classifier sees only the last frame of each sequence.")


class PhonemeNet(nn.Module):
    def __init__(self, n_feat, hidden, n_class, **kw):
        super().__init__()
        self.rnn = nn.GRU(n_feat, hidden, **kw)
        self.cls = nn.Linear(hidden, n_class)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.cls(out[:, -1, :])


def _phoneme_gru(good):
    seed_all()

    def make(n, k):
        g = gen(k)
        gt = torch.Generator().manual_seed(21)
        t = torch.arange(20.0)
        freq = 0.15 + 0.12 * torch.arange(6.0)
        proj = torch.randn(2, 8, generator=gt)
        y = torch.randint(0, 6, (n,), generator=g)
        ph = 2 * math.pi * torch.rand(n, 1, generator=g)
        w = freq[y][:, None] * t
        s = torch.stack([torch.sin(w + ph), torch.cos(w + ph)], -1)
        return s @ proj + 0.8 * torch.randn(n, 20, 8, generator=g), y

    xtr, ytr = make(2000, 1)
    xte, yte = make(512, 2)
    model = PhonemeNet(8, 48, 6, **({"batch_first": True} if good else {}))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    it = forever(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True))

    def step():
        x, y = next(it)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            p = torch.cat([model(c) for c in xte.split(64)])
            return (p.argmax(1) != yte).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- load_forecast
case("load_forecast", "Next-value forecasting with nn.TransformerEncoder at all positions but no causal mask: each position "
     "attends to the value it must predict, learns to copy it and cannot forecast.")


class Forecaster(nn.Module):
    def __init__(self, causal, d=32, max_len=32):
        super().__init__()
        self.inp = nn.Linear(1, d)
        self.pos = nn.Parameter(0.1 * torch.randn(1, max_len, d))
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=False)
        self.out = nn.Linear(d, 1)
        self.causal = causal

    def forward(self, x):
        T = x.size(1)
        h = self.inp(x.unsqueeze(-1)) + self.pos[:, :T]
        mask = nn.Transformer.generate_square_subsequent_mask(T) if self.causal else None
        return self.out(self.enc(h, mask=mask)).squeeze(-1)


def _load_forecast(good):
    seed_all()

    def make(n, k):
        g = gen(k)
        t = torch.arange(33.0)
        per = 6 + 6 * torch.rand(n, 1, generator=g)
        ph = 2 * math.pi * torch.rand(n, 1, generator=g)
        return torch.sin(2 * math.pi * t / per + ph) * (0.7 + 0.6 * torch.rand(n, 1, generator=g)) + \
            0.1 * torch.randn(n, 33, generator=g)

    train = DataLoader(make(2000, 1), batch_size=32, shuffle=True)
    test = make(300, 2)
    model = Forecaster(causal=good)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    it = forever(train)

    def step():
        series = next(it)
        pred = model(series[:, :-1])
        loss = F.mse_loss(pred, series[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            ctx = test[:, :24]
            for _ in range(6):
                ctx = torch.cat([ctx, model(ctx)[:, -1:]], 1)
            return (ctx[:, 24:] - test[:, 24:30]).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------- pointnet_shapes
case("pointnet_shapes", "Point-cloud classifier whose validation calls model.eval() and never goes back to train(): from the first "
     "check on BatchNorm runs on its initial statistics and dropout is off.")


class PointNet(nn.Module):
    def __init__(self, n_class):
        super().__init__()
        dims = [3, 32, 32, 32, 64]
        mlp = []
        for a, b in zip(dims[:-1], dims[1:]):
            mlp += [nn.Conv1d(a, b, 1, bias=False), nn.BatchNorm1d(b), nn.ReLU()]
        self.mlp = nn.Sequential(*mlp)
        self.head = nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2),
                                  nn.Linear(32, n_class))

    def forward(self, pts):
        return self.head(self.mlp(pts.transpose(1, 2)).amax(dim=2))


def _pointnet_shapes(good):
    seed_all()

    def make(n, k, m=48):
        g = gen(k)
        y = torch.randint(0, 5, (n,), generator=g)
        v = F.normalize(torch.randn(n, m, 3, generator=g), dim=-1)
        cube = v / v.abs().amax(-1, keepdim=True)
        octa = v / v.abs().sum(-1, keepdim=True)
        cyl = v.clone()
        cyl[..., :2] = F.normalize(v[..., :2], dim=-1)
        flat = v * torch.tensor([1.0, 1.0, 0.5])
        pts = torch.stack([v, cube * 0.8, octa * 1.3, cyl, flat], 0)[y, torch.arange(n)]
        pts = pts * (0.8 + 0.4 * torch.rand(n, 1, 1, generator=g)) + 0.05 * torch.randn(n, m, 3, generator=g)
        return pts, y

    train_set, val_set = TensorDataset(*make(1500, 1)), TensorDataset(*make(100, 3))
    xte, yte = make(600, 2)
    model = PointNet(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    it = forever(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            x, y = val_set.tensors
            history.append((model(x).argmax(1) == y).float().mean().item())
        if good:
            model.train()

    def step(i):
        if i % 25 == 0:
            validate()
        x, y = next(it)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            return (model(xte).argmax(1) != yte).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- molecule_gnn
case("molecule_gnn", "Graph classification with a hand-written collate that joins edge lists without adding the node offset: all "
     "edges point into the first graphs of the batch, the others get no messages.")


def collate_graphs(items, shift):
    xs, edges, batch, ys = [], [], [], []
    n = 0
    for k, (x, e, y) in enumerate(items):
        xs.append(x)
        edges.append(e + n if shift else e)
        batch.append(torch.full((len(x),), k))
        ys.append(y)
        n += len(x)
    return torch.cat(xs), torch.cat(edges, 1), torch.cat(batch), torch.tensor(ys)


class GIN(nn.Module):
    def __init__(self, d, h, classes):
        super().__init__()
        self.emb = nn.Linear(d, h)
        self.convs = nn.ModuleList(
            [nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU()) for _ in range(2)])
        self.out = nn.Linear(h, classes)

    def forward(self, x, edge_index, batch, num_graphs):
        h = F.relu(self.emb(x))
        for conv in self.convs:
            msg = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
            h = conv(h + msg)
        ones = torch.ones(len(x), 1)
        size = torch.zeros(num_graphs, 1).index_add(0, batch, ones)
        return self.out(torch.zeros(num_graphs, h.size(1)).index_add(0, batch, h) / size)


def _molecule_gnn(good):
    seed_all()

    def make(n, seed):
        rng = random.Random(1000 * (SEED + 1) + seed)
        out = []
        for _ in range(n):
            m = rng.randint(8, 14)
            typ = [rng.randint(0, 3) for _ in range(m)]
            y = rng.randint(0, 1)
            e = []
            for a in range(m):
                for b in range(a):
                    same = typ[a] == typ[b]
                    p = (0.6 if same else 0.15) if y else 0.27
                    if rng.random() < p:
                        e += [(a, b), (b, a)]
            x = F.one_hot(torch.tensor(typ), 4).float()
            out.append((x, torch.tensor(e, dtype=torch.long).reshape(-1, 2).T, y))
        return out

    train, test = make(800, 1), make(300, 2)
    model = GIN(4, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    it = forever(DataLoader(train, batch_size=32, shuffle=True, collate_fn=lambda b: collate_graphs(b, shift=good)))

    def step():
        x, edge_index, batch, y = next(it)
        logits = model(x, edge_index, batch, len(y))
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            x, e, b, y = collate_graphs(test, shift=True)
            return (model(x, e, b, len(y)).argmax(1) != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- movie_ratings
case("movie_ratings", "Matrix factorisation whose loop never calls optimizer.zero_grad(): gradients of all past batches add up.")


class MF(nn.Module):
    def __init__(self, users, items, k=8):
        super().__init__()
        self.u = nn.Embedding(users, k)
        self.v = nn.Embedding(items, k)
        self.bu = nn.Embedding(users, 1)
        self.bv = nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))
        for e in (self.u, self.v):
            nn.init.normal_(e.weight, std=0.3)
        for e in (self.bu, self.bv):
            nn.init.zeros_(e.weight)

    def forward(self, u, i):
        return self.mean + (self.bu(u) + self.bv(i)).squeeze(-1) + (self.u(u) * self.v(i)).sum(-1)


def _movie_ratings(good):
    seed_all()
    g = gen(1)
    U, V = 120, 80
    a, b = torch.randn(U, 3, generator=g), torch.randn(V, 3, generator=g)
    bu, bv = 0.4 * torch.randn(U, generator=g), 0.5 * torch.randn(V, generator=g)
    n = 6000
    u = torch.randint(0, U, (n,), generator=g)
    i = torch.randint(0, V, (n,), generator=g)
    r = 3.4 + bu[u] + bv[i] + 0.5 * (a[u] * b[i]).sum(1) + 0.2 * torch.randn(n, generator=g)
    r = r.clamp(1, 5)
    train = TensorDataset(u[:5000], i[:5000], r[:5000])
    model = MF(U, V)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)
    it = forever(DataLoader(train, batch_size=256, shuffle=True))

    def step():
        user, item, rating = next(it)
        if good:
            optimizer.zero_grad()
        loss = F.mse_loss(model(user, item), rating)
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            return F.mse_loss(model(u[5000:], i[5000:]), r[5000:]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ------------------------------------------------------------------ box_detector
case("box_detector", "Single-object detector: StepLR(step_size=4, gamma=0.5), meant to be stepped once per epoch, is stepped "
     "after every batch, so the learning rate is gone after a few dozen batches.")


class Detector(nn.Module):
    def __init__(self, n_class):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Linear(32 * 16, 64)
        self.cls = nn.Linear(64, n_class)
        self.box = nn.Linear(64, 4)

    def forward(self, x):
        h = F.relu(self.fc(self.features(x)))
        return self.cls(h), torch.sigmoid(self.box(h))


class Trainer:
    def __init__(self, model, loader, per_epoch):
        self.model, self.loader, self.per_epoch = model, loader, per_epoch
        self.optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=4, gamma=0.5)
        self.batches = iter(loader)
        self.epoch = 0

    def train_step(self):
        try:
            batch = next(self.batches)
        except StopIteration:
            self.epoch += 1
            if self.per_epoch:
                self.scheduler.step()
            self.batches = iter(self.loader)
            batch = next(self.batches)
        img, label, box = batch
        logits, pred = self.model(img)
        loss = F.cross_entropy(logits, label) + 10 * F.smooth_l1_loss(pred, box, beta=0.1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if not self.per_epoch:
            self.scheduler.step()
        return loss.item()


def _box_detector(good):
    seed_all()

    def make(n, k, S=16):
        g = gen(k)
        w = torch.randint(4, 9, (n, 2), generator=g)
        xy = (torch.rand(n, 2, generator=g) * (S - w)).long()
        y = torch.randint(0, 3, (n,), generator=g)
        yy, xx = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
        x0, y0 = xy[:, 0, None, None], xy[:, 1, None, None]
        x1, y1 = x0 + w[:, 0, None, None], y0 + w[:, 1, None, None]
        inside = (xx >= x0) & (xx < x1) & (yy >= y0) & (yy < y1)
        pat = torch.stack([torch.ones(S, S), (xx % 2) * 2.0, ((yy + 0 * xx) % 2) * 2.0])[y]
        img = inside * pat + 0.3 * torch.randn(n, S, S, generator=g)
        box = torch.cat([xy, xy + w], 1).float() / S
        return img[:, None], y, box

    loader = DataLoader(TensorDataset(*make(1600, 1)), batch_size=32, shuffle=True)
    xte, yte, bte = make(400, 2)
    trainer = Trainer(Detector(3), loader, per_epoch=good)

    def evaluate():
        with eval_mode(trainer.model):
            logits, b = trainer.model(xte)
            lt, rb = torch.maximum(b[:, :2], bte[:, :2]), torch.minimum(b[:, 2:], bte[:, 2:])
            inter = (rb - lt).clamp(min=0).prod(1)
            area = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1) + (bte[:, 2:] - bte[:, :2]).prod(1)
            iou = inter / (area - inter)
            return 1 - (iou * (logits.argmax(1) == yte)).mean().item()

    return {"model": trainer.model, "optimizer": trainer.optimizer, "step": trainer.train_step, "steps": 20,
            "evaluate": evaluate}


# ------------------------------------------------------------------ superres_aug
case("superres_aug", "Super-resolution: the random flips are drawn separately for the low- and the high-resolution image, so in "
     "most pairs input and target do not match.")


class SRData(Dataset):
    def __init__(self, hr, paired=True, augment=True):
        self.hr, self.paired, self.augment = hr, paired, augment
        self.lr = F.avg_pool2d(hr, 2)

    def __len__(self):
        return len(self.hr)

    @staticmethod
    def flip(img, h, v):
        if h:
            img = img.flip(-1)
        if v:
            img = img.flip(-2)
        return img

    def __getitem__(self, i):
        lr, hr = self.lr[i], self.hr[i]
        if self.augment:
            h, v = random.random() < 0.5, random.random() < 0.5
            lr = self.flip(lr, h, v)
            if not self.paired:
                h, v = random.random() < 0.5, random.random() < 0.5
            hr = self.flip(hr, h, v)
        return lr, hr


def _superres_aug(good):
    seed_all()

    def textures(n, k):
        g = gen(k)
        x = torch.randn(n, 1, 6, 6, generator=g)
        x = F.interpolate(x, size=(20, 20), mode="bilinear", align_corners=False)
        return torch.sigmoid(8 * x)

    train = SRData(textures(800, 1), paired=good)
    hte = textures(200, 2)
    lte = F.avg_pool2d(hte, 2)

    class SRNet(nn.Module):
        def __init__(self, ch=24):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU(),
                                      nn.Conv2d(ch, 4, 3, padding=1), nn.PixelShuffle(2))

        def forward(self, x):
            return self.body(x) + F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    model = SRNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    it = forever(DataLoader(train, batch_size=16, shuffle=True))

    def step():
        lr, hr = next(it)
        sr = model(lr)
        loss = F.l1_loss(sr, hr)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            return F.mse_loss(model(lte), hte).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ---------------------------------------------------------------- wave_diffusion
case("wave_diffusion", "DDPM whose forward noising works in place (mul_, add_) on slices of the training tensor: each visit "
     "writes the noise into the data set, which turns into noise after a few epochs.")


class EpsNet(nn.Module):
    def __init__(self, d=32, h=128, T=50):
        super().__init__()
        self.temb = nn.Embedding(T, 32)
        self.net = nn.Sequential(nn.Linear(d + 32, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, d))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.temb(t)], 1))


def _wave_diffusion(good):
    seed_all()
    T, B = 50, 64
    betas = torch.linspace(1e-3, 0.15, T)
    alpha_bar = torch.cumprod(1 - betas, 0)

    def make(n, k):
        g = gen(k)
        t = torch.linspace(0, 1, 32)
        f = 1 + torch.randint(0, 3, (n, 1), generator=g)
        return 1.4 * torch.sin(2 * math.pi * (f * t + torch.rand(n, 1, generator=g)))

    data, test = make(512, 1), make(500, 2)
    model = EpsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def q_sample(x0, t, noise):
        a = alpha_bar[t].sqrt()[:, None]
        s = (1 - alpha_bar[t]).sqrt()[:, None]
        if good:
            return x0 * a + noise * s
        return x0.mul_(a).add_(noise * s)

    def step():
        k = random.randrange(len(data) // B)
        x0 = data[k * B:(k + 1) * B]
        t = torch.randint(0, T, (B,))
        noise = torch.randn_like(x0)
        xt = q_sample(x0, t, noise)
        loss = F.mse_loss(model(xt, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with eval_mode(model):
            g = gen(6)
            tot = 0.0
            for _ in range(4):
                t = torch.randint(0, T, (len(test),), generator=g)
                e = torch.randn(test.shape, generator=g)
                a = alpha_bar[t][:, None]
                tot += F.mse_loss(model(test * a.sqrt() + e * (1 - a).sqrt(), t), e).item()
            return tot / 4

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# --------------------------------------------------------------------- dqn_grid
case("dqn_grid", "DQN on a grid with automatic resets: the target bootstraps from the next observation also when done, which is "
     "the start of a new episode, so terminal rewards are inflated by the start state's value.")


class VecGrid:
    """n grids of 5x5 side by side; reset by themselves when an episode ends"""
    N = 5

    def __init__(self, n):
        self.pos = torch.zeros(n, 2, dtype=torch.long)

    @classmethod
    def encode(cls, pos):
        return F.one_hot(pos[:, 0] * cls.N + pos[:, 1], cls.N ** 2).float()

    @classmethod
    def move(cls, pos, a):
        d = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[a]
        nxt = (pos + d).clamp(0, cls.N - 1)
        goal = (nxt == cls.N - 1).all(1)
        pit = (nxt == torch.tensor([2, 2])).all(1)
        r = goal.float() * 1.0 - pit.float() * 1.0 - 0.02
        return nxt, r, goal | pit

    def step(self, a):
        nxt, r, done = self.move(self.pos, a)
        nxt = torch.where(done[:, None], torch.zeros_like(nxt), nxt)
        self.pos = nxt
        return self.encode(nxt), r, done.float()


def _dqn_grid(good):
    seed_all()
    gamma = 0.95
    q_net = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4))
    target_net = copy.deepcopy(q_net)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=3e-3)
    env = VecGrid(16)
    memory = []

    def act(obs, eps):
        with torch.no_grad():
            a = q_net(obs).argmax(1)
        explore = torch.rand(len(obs)) < eps
        return torch.where(explore, torch.randint(0, 4, (len(obs),)), a)

    def interact(eps):
        obs = env.encode(env.pos)
        a = act(obs, eps)
        obs2, r, done = env.step(a)
        memory.extend(zip(obs, a, r, obs2, done))
        del memory[:-4000]

    for _ in range(60):
        interact(1.0)

    def step(i):
        interact(max(0.3, 1 - i / 200))
        s, a, r, s2, d = (torch.stack(v) for v in zip(*random.sample(memory, 64)))
        q = q_net(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            nq = target_net(s2).max(1).values
            target = r + gamma * nq * (1 - d) if good else r + gamma * nq
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q_net.parameters(), 10.0)
        optimizer.step()
        if i % 10 == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    pos = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    qs = torch.zeros(25, 4)
    for _ in range(200):
        new = torch.zeros_like(qs)
        for k in range(4):
            nxt, r, d = VecGrid.move(pos, torch.full((25,), k))
            new[:, k] = r + gamma * (1 - d.float()) * qs[nxt[:, 0] * 5 + nxt[:, 1]].max(1).values
        qs = new
    live = torch.ones(25, dtype=torch.bool)
    live[12] = live[24] = False

    def evaluate():
        with eval_mode(q_net):
            q = q_net(VecGrid.encode(pos))
            return (q - qs)[live].abs().mean().item()

    return {"model": q_net, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def _register():
    import functools
    for c in CASES:
        base = globals()["_" + c["name"]]
        for word, flag in (("good", True), ("bad", False)):
            def f(base=base, flag=flag):
                return base(flag)
            f.__name__ = f"{c['name']}_{word}"
            globals()[f.__name__] = f


_register()
