"""Small training programs from many fields (images, tables, series, graphs, control).

Every program comes as NAME_bad() and NAME_good(); each call builds the data, the model
and the optimizer, and returns a dict with model, optimizer, step, steps and evaluate.
"""
import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


def seed_everything(s):
    random.seed(s)
    torch.manual_seed(s)


def endless(loader):
    while True:
        for batch in loader:
            yield batch


class evaluating:
    """Puts modules in eval mode without gradients, and puts their mode back afterwards."""

    def __init__(self, *mods):
        self.mods = mods

    def __enter__(self):
        self.was = [m.training for m in self.mods]
        for m in self.mods:
            m.eval()
        self.ng = torch.no_grad()
        self.ng.__enter__()

    def __exit__(self, *exc):
        self.ng.__exit__(*exc)
        for m, w in zip(self.mods, self.was):
            m.train(w)


SEED = 0


# ----------------------------------------------------------------------------- DQN
class PointWorld:
    """Vectorised: walk on a plane to a goal (stay, N, S, E, W); an episode ends at the goal."""
    MOVES = torch.tensor([[0.0, 0.0], [0, 0.3], [0, -0.3], [0.3, 0], [-0.3, 0]])

    @staticmethod
    def reset(n):
        return torch.rand(n, 4) * 2 - 1

    @classmethod
    def step(cls, s, a):
        pos = (s[:, :2] + cls.MOVES[a]).clamp(-1.5, 1.5)
        dist = (pos - s[:, 2:]).norm(dim=1)
        return torch.cat([pos, s[:, 2:]], 1), -dist, (dist < 0.25).float()


class DQNAgent:
    def __init__(self, good, gamma=0.9, n_envs=32):
        self.good, self.gamma, self.n_envs = good, gamma, n_envs
        self.q = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
        self.q_target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=1e-3)
        self.memory = []
        self.state = PointWorld.reset(n_envs)
        self.age = torch.randint(0, 10, (n_envs,))
        self.t = 0

    def collect(self, eps=0.3):
        with torch.no_grad():
            a = self.q(self.state).argmax(1)
        explore = torch.rand(self.n_envs) < eps
        a = torch.where(explore, torch.randint(0, 5, (self.n_envs,)), a)
        nxt, r, done = PointWorld.step(self.state, a)
        self.memory.append((self.state, a, r, nxt, done))
        self.memory = self.memory[-300:]
        self.age += 1
        restart = (done > 0) | (self.age >= 10)
        self.state = torch.where(restart.unsqueeze(1), PointWorld.reset(self.n_envs), nxt)
        self.age = torch.where(restart, torch.zeros_like(self.age), self.age)

    def learn(self):
        s, a, r, s2, done = (torch.cat(c) for c in zip(*random.choices(self.memory, k=4)))
        q_sa = self.q(s).gather(1, a.unsqueeze(1))
        if self.good:
            q_sa = q_sa.squeeze(1)
        with torch.no_grad():
            q_next = self.q_target(s2).max(dim=1).values
            target = r + self.gamma * (1 - done) * q_next
        loss = F.smooth_l1_loss(q_sa, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self):
        self.collect()
        self.learn()
        self.t += 1
        if self.t % 20 == 0:
            self.q_target.load_state_dict(self.q.state_dict())


def _dqn_walk(good):
    seed_everything(11 + SEED)
    agent = DQNAgent(good)
    starts = PointWorld.reset(400)

    def evaluate():
        with evaluating(agent.q):
            s, alive, cost = starts, torch.ones(400), torch.zeros(400)
            for _ in range(10):
                s, r, done = PointWorld.step(s, agent.q(s).argmax(1))
                cost -= alive * r
                alive = alive * (1 - done)
            return cost.mean().item()

    return {"model": agent.q, "optimizer": agent.optimizer, "step": agent.step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- image classes
def _smooth_images(n, c, size):
    z = torch.randn(n, c, size // 4, size // 4)
    z = F.interpolate(z, size=(size, size), mode="bilinear", align_corners=False)
    return z / z.std()


class SmallCNN(nn.Module):
    def __init__(self, num_classes, final=None):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, num_classes)
        self.final = final

    def forward(self, x):
        x = self.features(x).flatten(1)
        x = self.fc2(F.relu(self.fc1(x)))
        if self.final is not None:
            x = self.final(x)
        return x


def _img_classes(good):
    seed_everything(21 + SEED)
    k = 40
    protos = _smooth_images(k, 3, 16)
    y = torch.randint(0, k, (4400,))
    x = protos[y] + 3.0 * torch.randn(4400, 3, 16, 16)
    x = x / x.std()
    loader = DataLoader(TensorDataset(x[:4000], y[:4000]), batch_size=32, shuffle=True)
    xv, yv = x[4000:], y[4000:]

    model = SmallCNN(k, final=None if good else nn.Softmax(dim=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    it = endless(loader)

    def step(i):
        model.train()
        images, labels = next(it)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- VAE
class VAE(nn.Module):
    def __init__(self, d=144, h=128, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.fc_mu = nn.Linear(h, z)
        self.fc_logvar = nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d))

    def encode(self, x):
        h = self.enc(x)
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.dec(self.reparameterize(mu, logvar)), mu, logvar


def _blob_images(n, size=12):
    g = torch.arange(size).float()
    cx, cy = torch.rand(n, 1, 1) * 8 + 2, torch.rand(n, 1, 1) * 8 + 2
    r = torch.rand(n, 1, 1) * 1.5 + 1.5
    d2 = (g.view(1, 1, -1) - cx) ** 2 + (g.view(1, -1, 1) - cy) ** 2
    return (d2 < r ** 2).float().view(n, -1)


def _vae_blobs(good):
    seed_everything(31 + SEED)
    data, held = _blob_images(3000), _blob_images(400)
    eps = torch.randn(400, 6)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = endless(DataLoader(TensorDataset(data), batch_size=64, shuffle=True))

    def loss_function(logits, x, mu, logvar):
        if good:
            bce = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(dim=1).mean()
        else:
            bce = F.binary_cross_entropy_with_logits(logits, x)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    def step():
        (x,) = next(loader)
        logits, mu, logvar = model(x)
        loss = loss_function(logits, x, mu, logvar)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            mu, logvar = model.encode(held)
            logits = model.dec(mu + eps * torch.exp(0.5 * logvar))
            rec = F.binary_cross_entropy_with_logits(logits, held, reduction="none").sum(1)
            kl = 0.5 * (mu ** 2 + logvar.exp() - 1 - logvar).sum(1)
            return (rec + kl).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- count model
class VisitRate(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.rate = nn.Linear(32, 1)

    def forward(self, x):
        return F.softplus(self.rate(self.body(x))).squeeze(-1)


def _count_visits(good):
    seed_everything(41 + SEED)
    x = torch.randn(4000, 8)
    lam = torch.exp(1.0 + 0.5 * x[:, 0] - 0.4 * x[:, 1] + 0.3 * x[:, 2] * x[:, 3].sign()).clamp(max=30)
    y = torch.poisson(lam)
    xv, yv = x[3200:], y[3200:]
    ds = TensorDataset(x[:3200], y[:3200])
    it = endless(DataLoader(ds, batch_size=128, shuffle=True, drop_last=True))
    model = VisitRate(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.PoissonNLLLoss(log_input=False) if good else nn.PoissonNLLLoss()

    def step():
        feats, visits = next(it)
        rate = model(feats)
        loss = criterion(rate, visits)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            mu = model(xv).clamp(min=1e-6)
            dev = 2 * (torch.xlogy(yv, yv) - torch.xlogy(yv, mu) - yv + mu)
            return dev.mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- pairs
class PairDataset(Dataset):
    def __init__(self, x, y, good):
        self.x, self.y = x, y
        self.by_class = [torch.nonzero(y == c).flatten().tolist() for c in range(int(y.max()) + 1)]
        self.negative = -1.0 if good else 0.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        c = int(self.y[i])
        if random.random() < 0.5:
            j = random.choice(self.by_class[c])
            target = 1.0
        else:
            other = random.choice([k for k in range(len(self.by_class)) if k != c])
            j = random.choice(self.by_class[other])
            target = self.negative
        return self.x[i], self.x[j], torch.tensor(target)


class Encoder(nn.Module):
    def __init__(self, d_in, d_out=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 64), nn.ReLU(), nn.Linear(64, d_out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def _pair_metric(good):
    seed_everything(51 + SEED)
    k = 8
    centres = torch.randn(k, 24)
    y = torch.randint(0, k, (1600,))
    mix = torch.randn(12, 24)
    x = centres[y] + torch.randn(1600, 12) @ mix * 0.5 + 0.8 * torch.randn(1600, 24)
    x = (x - x[:1200].mean(0)) / x[:1200].std(0)
    ds = PairDataset(x[:1200], y[:1200], good)
    loader = endless(DataLoader(ds, batch_size=64, shuffle=True))
    xv, yv = x[1200:], y[1200:]
    model = Encoder(24)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CosineEmbeddingLoss(margin=0.2)

    def step():
        a, b, target = next(loader)
        loss = criterion(model(a), model(b), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            e = model(xv)
            s = (e @ e.T)
            iu = torch.triu_indices(len(e), len(e), 1)
            s, same = s[iu[0], iu[1]], (yv[iu[0]] == yv[iu[1]])
            rank = torch.empty(len(s))
            rank[s.argsort()] = torch.arange(1, len(s) + 1).float()
            rank = rank.double()
            npos, nneg = same.sum().item(), (~same).sum().item()
            auc = (rank[same].sum().item() - npos * (npos + 1) / 2) / (npos * nneg)
            return 1 - auc

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- detection
class GridDetector(nn.Module):
    """32x32 grey images, a 4x4 grid of cells; per cell: objectness and (dx, dy, log w, log h)."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
        )
        self.obj = nn.Conv2d(48, 1, 1)
        self.box = nn.Conv2d(48, 4, 1)

    def forward(self, x):
        h = self.backbone(x)
        return self.obj(h).squeeze(1), self.box(h).permute(0, 2, 3, 1)


def _boxes_to_xyxy(b, gy, gx):
    cx, cy = (gx + 0.5) * 8 + b[:, 0] * 4, (gy + 0.5) * 8 + b[:, 1] * 4
    w, h = 8 * torch.exp(b[:, 2].clamp(-4, 4)), 8 * torch.exp(b[:, 3].clamp(-4, 4))
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1)


def _detection_data(n):
    img = 0.3 * torch.randn(n, 1, 32, 32)
    obj = torch.zeros(n, 4, 4)
    box = torch.zeros(n, 4, 4, 4)
    yy, xx = torch.meshgrid(torch.arange(32) + 0.5, torch.arange(32) + 0.5, indexing="ij")
    gy, gx = torch.randint(0, 4, (n,)), torch.randint(0, 4, (n,))
    t = torch.rand(n, 4) * 2 - 1
    t[:, 2:] = t[:, 2:] * 0.5 + 0.3
    xyxy = _boxes_to_xyxy(t, gy, gx)
    inside = ((xx >= xyxy[:, 0, None, None]) & (xx <= xyxy[:, 2, None, None])
              & (yy >= xyxy[:, 1, None, None]) & (yy <= xyxy[:, 3, None, None]))
    img[:, 0] += inside.float() * 1.5
    ar = torch.arange(n)
    obj[ar, gy, gx] = 1.0
    box[ar, gy, gx] = t
    return (img - img.mean()) / img.std(), obj, box


def _grid_detect(good):
    seed_everything(61 + SEED)
    img, obj, box = _detection_data(1500)
    vi, vo, vb = _detection_data(300)
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = endless(DataLoader(TensorDataset(img, obj, box), batch_size=32, shuffle=True))

    def compute_loss(pred_obj, pred_box, obj_t, box_t):
        obj_loss = F.binary_cross_entropy_with_logits(pred_obj, obj_t)
        if good:
            pos = obj_t > 0
            box_loss = F.smooth_l1_loss(pred_box[pos], box_t[pos])
        else:
            box_loss = F.smooth_l1_loss(pred_box, box_t)
        return obj_loss + box_loss

    def step():
        images, obj_t, box_t = next(batches)
        pred_obj, pred_box = model(images)
        loss = compute_loss(pred_obj, pred_box, obj_t, box_t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            _, pb = model(vi)
            idx = torch.nonzero(vo > 0)
            p = _boxes_to_xyxy(pb[vo > 0], idx[:, 1], idx[:, 2])
            t = _boxes_to_xyxy(vb[vo > 0], idx[:, 1], idx[:, 2])
            lt, rb = torch.max(p[:, :2], t[:, :2]), torch.min(p[:, 2:], t[:, 2:])
            inter = (rb - lt).clamp(min=0).prod(1)
            union = (p[:, 2:] - p[:, :2]).prod(1) + (t[:, 2:] - t[:, :2]).prod(1) - inter
            return (1 - inter / union).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- point clouds
class PointNet(nn.Module):
    def __init__(self, num_classes, widths=(32, 64, 128), good=True):
        super().__init__()
        self.stem = nn.Linear(3, widths[0])
        layers = [nn.Linear(a, b) for a, b in zip(widths[:-1], widths[1:])]
        self.mlp = nn.ModuleList(layers) if good else layers
        self.head = nn.Sequential(nn.Linear(widths[-1], 32), nn.ReLU(), nn.Linear(32, num_classes))

    def forward(self, pts):
        h = F.relu(self.stem(pts))
        for lin in self.mlp:
            h = F.relu(lin(h))
        return self.head(h.max(dim=1).values)


def _cloud(kind, n):
    u = torch.randn(n, 3)
    if kind == 0:
        p = u / u.norm(dim=1, keepdim=True)
    elif kind == 1:
        p = torch.rand(n, 3) * 2 - 1
        ax = torch.randint(0, 3, (n,))
        p[torch.arange(n), ax] = p[torch.arange(n), ax].sign()
        p = p * 0.8
    elif kind == 2:
        th = torch.rand(n) * 2 * math.pi
        p = torch.stack([th.cos(), th.sin(), torch.rand(n) * 2 - 1], 1) * 0.85
    elif kind == 3:
        a, b = torch.rand(n) * 2 * math.pi, torch.rand(n) * 2 * math.pi
        p = torch.stack([(0.8 + 0.3 * b.cos()) * a.cos(), (0.8 + 0.3 * b.cos()) * a.sin(), 0.3 * b.sin()], 1)
    else:
        r = torch.rand(n)
        th = torch.rand(n) * 2 * math.pi
        p = torch.stack([r * th.cos(), r * th.sin(), 1 - 2 * r], 1)
    q, _ = torch.linalg.qr(torch.randn(3, 3))
    p = p @ q + 0.05 * torch.randn(n, 3)
    p = p - p.mean(0)
    return p / p.norm(dim=1).max()


def _point_shapes(good):
    seed_everything(71 + SEED)
    y = torch.arange(900) % 5
    x = torch.stack([_cloud(int(c), 48) for c in y])
    loader = endless(DataLoader(TensorDataset(x[:700], y[:700]), batch_size=32, shuffle=True))
    xv, yv = x[700:], y[700:]
    net = PointNet(5, good=good)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step():
        pts, label = next(loader)
        opt.zero_grad()
        F.cross_entropy(net(pts), label).backward()
        opt.step()

    def evaluate():
        with evaluating(net):
            return F.cross_entropy(net(xv), yv).item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- transfer
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.embed = nn.Linear(32 * 3 * 3, 64)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.embed(x.flatten(1)))
        return self.fc(x)


def _pretrained_net(num_classes=12):
    protos = _smooth_images(num_classes, 3, 12)
    net = Net(num_classes)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(120):
        y = torch.randint(0, num_classes, (32,))
        x = protos[y] + 0.7 * torch.randn(32, 3, 12, 12)
        x = x / x.std()
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    opt.zero_grad()
    return net


def _transfer_head(good):
    seed_everything(81 + SEED)
    model = _pretrained_net()
    protos = _smooth_images(5, 3, 12)
    y = torch.randint(0, 5, (700,))
    x = protos[y] + 2.5 * torch.randn(700, 3, 12, 12)
    x = x / x.std()
    train_loader = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=32, shuffle=True)
    xv, yv = x[400:], y[400:]

    for name, p in model.named_parameters():
        if not name.startswith("fc."):
            p.requires_grad = False
    if good:
        model.fc = nn.Linear(model.fc.in_features, 5)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    else:
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        model.fc = nn.Linear(model.fc.in_features, 5)
    criterion = nn.CrossEntropyLoss()
    it = endless(train_loader)

    def step():
        images, labels = next(it)
        model.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- GAN
def _ring(n):
    th = torch.randint(0, 8, (n,)) * (2 * math.pi / 8)
    return torch.stack([th.cos(), th.sin()], 1) * 1.4 + 0.1 * torch.randn(n, 2)


class GANTrainer:
    def __init__(self, good):
        self.good = good
        self.G = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))
        self.D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.bce = nn.BCEWithLogitsLoss()

    def train_step(self):
        real = _ring(128)
        fake = self.G(torch.randn(128, 8))
        if not self.good:
            fake = fake.detach()
        ones, zeros = torch.ones(128, 1), torch.zeros(128, 1)

        self.opt_d.zero_grad()
        d_loss = 0.5 * (self.bce(self.D(real), ones) + self.bce(self.D(fake.detach()), zeros))
        d_loss.backward()
        self.opt_d.step()

        self.opt_g.zero_grad()
        g_loss = self.bce(self.D(fake), ones)
        g_loss.backward()
        self.opt_g.step()
        return d_loss.item(), g_loss.item()


def _gan_ring(good):
    seed_everything(91 + SEED)
    tr = GANTrainer(good)
    held, z = _ring(500), torch.randn(500, 8)

    def evaluate():
        with evaluating(tr.G):
            f = tr.G(z)
            e = 2 * torch.cdist(f, held).mean() - torch.cdist(f, f).mean() - torch.cdist(held, held).mean()
            return e.item()

    return {"model": (tr.G, tr.D), "optimizer": (tr.opt_g, tr.opt_d), "step": tr.train_step,
            "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- SAC
class Actor(nn.Module):
    def __init__(self, obs, act, h=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.mu = nn.Linear(h, act)
        self.log_std = nn.Linear(h, act)

    def forward(self, s):
        h = self.net(s)
        return self.mu(h), self.log_std(h).clamp(-5, 1)


def _q_net(obs, act, h=64):
    return nn.Sequential(nn.Linear(obs + act, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))


class SAC:
    def __init__(self, good, gamma=0.9, tau=0.02, alpha=0.02):
        self.good, self.gamma, self.tau, self.alpha = good, gamma, tau, alpha
        self.actor = Actor(4, 2)
        self.q1, self.q2 = _q_net(4, 2), _q_net(4, 2)
        self.q1_t, self.q2_t = copy.deepcopy(self.q1), copy.deepcopy(self.q2)
        for p in list(self.q1_t.parameters()) + list(self.q2_t.parameters()):
            p.requires_grad_(False)
        self.pi_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.q_opt = torch.optim.Adam(list(self.q1.parameters()) + list(self.q2.parameters()), lr=2e-3)
        self.buffer = []
        self.state = self.reset(32)
        self.t = 0

    @staticmethod
    def reset(n):
        return torch.rand(n, 4) * 2 - 1

    @staticmethod
    def env_step(s, a):
        pos, goal = s[:, :2], s[:, 2:]
        pos = (pos + 0.25 * a).clamp(-1.5, 1.5)
        return torch.cat([pos, goal], 1), -(pos - goal).norm(dim=1)

    def act(self, s):
        mu, log_std = self.actor(s)
        dist = torch.distributions.Normal(mu, log_std.exp())
        u = dist.rsample() if self.good else dist.sample()
        a = torch.tanh(u)
        logp = (dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(1)
        return a, logp

    def step(self):
        with torch.no_grad():
            a, _ = self.act(self.state)
        nxt, r = self.env_step(self.state, a)
        self.buffer.append((self.state, a, r, nxt))
        self.buffer = self.buffer[-300:]
        self.t += 1
        self.state = self.reset(32) if self.t % 10 == 0 else nxt

        picks = [self.buffer[random.randrange(len(self.buffer))] for _ in range(4)]
        s, a, r, s2 = (torch.cat(c) for c in zip(*picks))
        with torch.no_grad():
            a2, logp2 = self.act(s2)
            sa2 = torch.cat([s2, a2], 1)
            q_next = torch.min(self.q1_t(sa2), self.q2_t(sa2)).squeeze(1) - self.alpha * logp2
            target = r + self.gamma * q_next
        sa = torch.cat([s, a], 1)
        q_loss = F.mse_loss(self.q1(sa).squeeze(1), target) + F.mse_loss(self.q2(sa).squeeze(1), target)
        self.q_opt.zero_grad()
        q_loss.backward()
        self.q_opt.step()

        a_pi, logp = self.act(s)
        sa_pi = torch.cat([s, a_pi], 1)
        pi_loss = (self.alpha * logp - torch.min(self.q1(sa_pi), self.q2(sa_pi)).squeeze(1)).mean()
        self.pi_opt.zero_grad()
        pi_loss.backward()
        self.pi_opt.step()

        with torch.no_grad():
            for src, dst in ((self.q1, self.q1_t), (self.q2, self.q2_t)):
                for p, q in zip(src.parameters(), dst.parameters()):
                    q.mul_(1 - self.tau).add_(self.tau * p)


def _sac_reach(good):
    seed_everything(101 + SEED)
    agent = SAC(good)
    starts = SAC.reset(300)

    def evaluate():
        with evaluating(agent.actor):
            s, cost = starts, 0.0
            for _ in range(10):
                a = torch.tanh(agent.actor(s)[0])
                s, r = SAC.env_step(s, a)
                cost -= r.mean().item()
            return cost

    return {"model": (agent.actor, agent.q1, agent.q2), "optimizer": (agent.pi_opt, agent.q_opt),
            "step": agent.step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- MAML
def _maml_sine(good):
    seed_everything(111 + SEED)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    meta_opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    inner_lr = 0.05

    def sample_task(k=10):
        amp, phase = random.uniform(0.5, 2.0), random.uniform(0, math.pi)
        x = torch.rand(2 * k, 1) * 6 - 3
        y = amp * torch.sin(x + phase)
        return x[:k], y[:k], x[k:], y[k:]

    def adapt(xs, ys, n_steps=3, create_graph=True):
        if good:
            fast = {n: p.clone() for n, p in model.named_parameters()}
        else:
            fast = {n: p.clone().detach().requires_grad_(True) for n, p in model.named_parameters()}
        for _ in range(n_steps):
            loss = F.mse_loss(functional_call(model, fast, (xs,)), ys)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=create_graph)
            fast = {n: w - inner_lr * g for (n, w), g in zip(fast.items(), grads)}
        return fast

    held = [sample_task() for _ in range(40)]

    def step():
        meta_opt.zero_grad()
        meta_loss = 0.0
        for _ in range(4):
            xs, ys, xq, yq = sample_task()
            fast = adapt(xs, ys)
            meta_loss = meta_loss + F.mse_loss(functional_call(model, fast, (xq,)), yq)
        (meta_loss / 4).backward()
        meta_opt.step()

    def evaluate():
        total = 0.0
        for xs, ys, xq, yq in held:
            fast = adapt(xs, ys, create_graph=False)
            with torch.no_grad():
                total += F.mse_loss(functional_call(model, fast, (xq,)), yq).item()
        return total / len(held)

    return {"model": model, "optimizer": meta_opt, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- PINN
class PINN(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, t):
        return self.net(t)


def _pinn_cooling(good):
    # T' = -k (T - A(t)),  A(t) = sin(3 t),  T(0) = 1
    seed_everything(121 + SEED)
    k = 2.0
    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    t0, T0 = torch.zeros(1, 1), torch.ones(1, 1)
    graph_kw = {"create_graph": True} if good else {"retain_graph": True}

    def residual(t):
        T = model(t)
        dT = torch.autograd.grad(T, t, grad_outputs=torch.ones_like(T), **graph_kw)[0]
        return dT + k * (T - torch.sin(3 * t))

    def step():
        t = (2 * torch.rand(64, 1)).requires_grad_(True)
        loss = residual(t).pow(2).mean() + 10 * F.mse_loss(model(t0), T0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        t = torch.linspace(0, 2, 200).unsqueeze(1)
        a = k * k / (k * k + 9)
        b = 3 * k / (k * k + 9)
        exact = a * torch.sin(3 * t) - b * torch.cos(3 * t) + (1 + b) * torch.exp(-k * t)
        with evaluating(model):
            return F.mse_loss(model(t), exact).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- transformer forecaster
class SeriesTransformer(nn.Module):
    def __init__(self, length, d=32, **layer_kw):
        super().__init__()
        self.inp = nn.Linear(1, d)
        self.pos = nn.Parameter(0.1 * torch.randn(length, d))
        layer = nn.TransformerEncoderLayer(d, nhead=4, dim_feedforward=64, dropout=0.0, **layer_kw)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        h = self.inp(x) + self.pos
        h = self.encoder(h)
        return self.out(h[:, -1])


def _waves(n, length):
    t = torch.arange(length + 1).float()
    f = torch.rand(n, 1) * 0.6 + 0.3
    ph = torch.rand(n, 1) * 2 * math.pi
    a = torch.rand(n, 1) * 0.8 + 0.8
    return (a * torch.sin(f * t + ph) + 0.05 * torch.randn(n, length + 1)).unsqueeze(-1)


def _wave_forecast(good):
    seed_everything(131 + SEED)
    L = 16
    data = _waves(2400, L)
    train, val = data[:2000], data[2000:]
    kw = {"batch_first": True} if good else {}
    model = SeriesTransformer(L, **kw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    loader = endless(DataLoader(TensorDataset(train[:, :L], train[:, L]), batch_size=32, shuffle=True, drop_last=True))

    def step():
        window, nxt = next(loader)
        loss = F.mse_loss(model(window), nxt)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def evaluate():
        with evaluating(model):
            preds = torch.cat([model(b) for b in val[:, :L].split(32)])
            return F.mse_loss(preds, val[:, L]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- SimSiam
class SimSiam(nn.Module):
    def __init__(self, d_in, h=96, z=32, good=True):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(d_in, h, bias=False), nn.BatchNorm1d(h), nn.ReLU(),
            nn.Linear(h, h, bias=False), nn.BatchNorm1d(h), nn.ReLU(),
            nn.Linear(h, z, bias=False), nn.BatchNorm1d(z, affine=False),
        )
        self.predictor = nn.Sequential(nn.Linear(z, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, z))
        self.good = good

    def forward(self, a, b):
        za, zb = self.encoder(a), self.encoder(b)
        pa, pb = self.predictor(za), self.predictor(zb)
        if self.good:
            za, zb = za.detach(), zb.detach()
        return -0.5 * (F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean())


def _simsiam(good):
    seed_everything(141 + SEED)
    k, d = 10, 40
    centres = torch.randn(k, d)
    y = torch.randint(0, k, (2000,))
    x = centres[y] + 1.5 * torch.randn(2000, d)
    x = (x - x.mean(0)) / x.std(0)
    model = SimSiam(d, good=good)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = endless(DataLoader(TensorDataset(x[:1500]), batch_size=128, shuffle=True, drop_last=True))

    def augment(v):
        v = v + 0.4 * torch.randn_like(v)
        return v * (torch.rand_like(v) > 0.2)

    def step():
        (v,) = next(loader)
        loss = model(augment(v), augment(v))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            bank, query = (F.normalize(model.encoder(v), dim=1) for v in (x[:1500], x[1500:]))
            nn_idx = (query @ bank.T).topk(5, dim=1).indices
            votes = F.one_hot(y[:1500][nn_idx], k).sum(1)
            return (votes.argmax(1) != y[1500:]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- graphs
class GraphNet(nn.Module):
    def __init__(self, d_in, h=48):
        super().__init__()
        self.inp = nn.Linear(d_in, h)
        self.self1, self.nb1 = nn.Linear(h, h), nn.Linear(h, h, bias=False)
        self.self2, self.nb2 = nn.Linear(h, h), nn.Linear(h, h, bias=False)
        self.out = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))

    @staticmethod
    def aggregate(h, edge_index):
        src, dst = edge_index
        msg = torch.zeros_like(h).index_add(0, dst, h[src])
        deg = torch.zeros(len(h)).index_add(0, dst, torch.ones(len(dst))).clamp(min=1)
        return msg / deg.unsqueeze(1)

    def forward(self, x, edge_index, batch, n_graphs):
        h = F.relu(self.inp(x))
        h = F.relu(self.self1(h) + self.nb1(self.aggregate(h, edge_index)))
        h = F.relu(self.self2(h) + self.nb2(self.aggregate(h, edge_index)))
        pooled = torch.zeros(n_graphs, h.shape[1]).index_add(0, batch, h)
        count = torch.bincount(batch, minlength=n_graphs).clamp(min=1).unsqueeze(1)
        return self.out(pooled / count).squeeze(1)


def _random_graph():
    n = random.randint(8, 14)
    kind = torch.randint(0, 3, (n,))
    homophily = random.random()
    edges = []
    for i in range(n):
        same = [j for j in range(n) if j != i and kind[j] == kind[i]]
        diff = [j for j in range(n) if kind[j] != kind[i]]
        for _ in range(2):
            pool = same if (random.random() < homophily and same) or not diff else diff
            j = random.choice(pool)
            edges += [(i, j), (j, i)]
    e = torch.tensor(edges).T
    y = (kind[e[0]] == kind[e[1]]).float().mean()
    return F.one_hot(kind, 3).float(), e, (y - 0.5) / 0.25


def _collate(graphs, shift=True):
    xs, es, bs, ys = [], [], [], []
    offset = 0
    for g, (x, e, y) in enumerate(graphs):
        xs.append(x)
        es.append(e + offset)
        bs.append(torch.full((len(x),), g))
        ys.append(y)
        if shift:
            offset += len(x)
    return torch.cat(xs), torch.cat(es, 1), torch.cat(bs), torch.stack(ys)


def _graph_batches(good):
    seed_everything(161 + SEED)
    graphs = [_random_graph() for _ in range(1000)]
    train, held = graphs[:800], graphs[800:]
    model = GraphNet(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = endless(DataLoader(train, batch_size=32, shuffle=True, collate_fn=lambda g: _collate(g, shift=good)))

    def step():
        x, edge_index, batch, y = next(loader)
        pred = model(x, edge_index, batch, len(y))
        loss = F.mse_loss(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            x, e, b, y = _collate(held)
            return F.mse_loss(model(x, e, b, len(y)), y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- deep conv net
class ConvBNNet(nn.Module):
    def __init__(self, num_classes, depth=8, width=16):
        super().__init__()
        blocks, c = [], 3
        for i in range(depth):
            blocks += [nn.Conv2d(c, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            c = width
            if i in (1, 4):
                blocks.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width * 9, num_classes)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class Trainer:
    def __init__(self, model, train, val, good):
        self.model, self.good = model, good
        self.loader = endless(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))
        self.val = val
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        self.criterion = nn.CrossEntropyLoss()
        self.history = []
        self.model.train()

    def validate(self):
        self.model.eval()
        x, y = self.val
        with torch.no_grad():
            self.history.append(self.criterion(self.model(x), y).item())
        if self.good:
            self.model.train()

    def train_step(self, i):
        if i % 25 == 0:
            self.validate()
        x, y = next(self.loader)
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _deep_conv(good):
    seed_everything(171 + SEED)
    k = 10
    protos = _smooth_images(k, 3, 12)
    y = torch.randint(0, k, (2000,))
    x = protos[y] + 1.5 * torch.randn(2000, 3, 12, 12)
    x = x / x.std()
    model = ConvBNNet(k)
    tr = Trainer(model, TensorDataset(x[:1500], y[:1500]), (x[1500:1600], y[1500:1600]), good)
    xv, yv = x[1600:], y[1600:]

    def evaluate():
        with evaluating(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": tr.optimizer, "step": tr.train_step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- segmentation
class TinyUNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.d1 = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU())
        self.d2 = nn.Sequential(nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.u1 = nn.Sequential(nn.Conv2d(2 * c, c, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        return self.head(self.u1(torch.cat([a, self.up(b)], 1)))


def _lesions(n, size=24):
    g = torch.arange(size).float()
    cx, cy = torch.rand(n, 1, 1) * 16 + 4, torch.rand(n, 1, 1) * 16 + 4
    rx, ry = torch.rand(n, 1, 1) * 3 + 3, torch.rand(n, 1, 1) * 3 + 3
    mask = ((((g.view(1, 1, -1) - cx) / rx) ** 2 + ((g.view(1, -1, 1) - cy) / ry) ** 2) < 1).float()
    img = mask + 0.8 * torch.randn(n, size, size)
    img = (img - img.mean()) / img.std()
    return img.unsqueeze(1), mask.unsqueeze(1)


class LesionDataset(Dataset):
    def __init__(self, images, masks, good):
        self.images, self.masks, self.good = images, masks, good

    def __len__(self):
        return len(self.images)

    @staticmethod
    def random_flip(*tensors):
        if random.random() < 0.5:
            tensors = tuple(t.flip(-1) for t in tensors)
        if random.random() < 0.5:
            tensors = tuple(t.flip(-2) for t in tensors)
        return tensors

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.good:
            image, mask = self.random_flip(image, mask)
        else:
            (image,) = self.random_flip(image)
            (mask,) = self.random_flip(mask)
        return image, mask


def _seg_lesions(good):
    seed_everything(191 + SEED)
    img, msk = _lesions(900)
    loader = endless(DataLoader(LesionDataset(img[:700], msk[:700], good), batch_size=16, shuffle=True))
    xv, mv = img[700:], msk[700:]
    model = TinyUNet(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def dice_loss(logits, target, eps=1.0):
        p = torch.sigmoid(logits)
        inter = (p * target).sum(dim=(1, 2, 3))
        return (1 - (2 * inter + eps) / (p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3)) + eps)).mean()

    def step():
        x, m = next(loader)
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, m) + dice_loss(logits, m)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            p = (model(xv) > 0).float()
            inter, union = (p * mv).sum(), ((p + mv) > 0).float().sum()
            return 1 - (inter / union).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- recommendation
class MatrixFactorization(nn.Module):
    def __init__(self, n_users, n_items, dim=8):
        super().__init__()
        self.user, self.item = nn.Embedding(n_users, dim), nn.Embedding(n_items, dim)
        self.user_bias, self.item_bias = nn.Embedding(n_users, 1), nn.Embedding(n_items, 1)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.1)
        for e in (self.user_bias, self.item_bias):
            nn.init.zeros_(e.weight)
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(-1)
        return dot + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1) + self.mean


def _movie_ratings(good):
    seed_everything(201 + SEED)
    nu, ni, n = 80, 60, 3600
    U, V = torch.randn(nu, 3), torch.randn(ni, 3)
    bu, bi = 0.5 * torch.randn(nu), 0.7 * torch.randn(ni)
    cells = torch.randperm(nu * ni)[:n]
    u, i = cells // ni, cells % ni
    r = 3.5 + bu[u] + bi[i] + 0.4 * (U[u] * V[i]).sum(1) + 0.2 * torch.randn(n)
    train = TensorDataset(u[:3000], i[:3000], r[:3000])
    uv, iv, rv = u[3000:], i[3000:], r[3000:]
    loader = DataLoader(train, batch_size=128)
    batches = endless(loader)

    model = MatrixFactorization(nu, ni)
    with torch.no_grad():
        model.mean.fill_(r[:3000].mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step():
        users, items, ratings = next(batches) if good else next(iter(loader))
        loss = F.mse_loss(model(users, items), ratings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return F.mse_loss(model(uv, iv), rv).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- keyword spotting
class KeywordGRU(nn.Module):
    def __init__(self, n_mels, n_words, h=48):
        super().__init__()
        self.gru = nn.GRU(n_mels, h, batch_first=True)
        self.fc = nn.Linear(h, n_words)

    def forward(self, mels):
        out, _ = self.gru(mels)
        return self.fc(out.mean(dim=1))


def _utterances(n, k=8, T=24, M=12):
    shapes = torch.Generator().manual_seed(5)
    f0 = torch.rand(k, 2, generator=shapes) * (M - 1)
    f1 = torch.rand(k, 2, generator=shapes) * (M - 1)
    y = torch.randint(0, k, (n,))
    t = torch.linspace(0, 1, T).view(1, T, 1)
    m = torch.arange(M).view(1, 1, M).float()
    warp = (t + 0.15 * torch.randn(n, 1, 1)).clamp(0, 1)
    x = torch.zeros(n, T, M)
    for j in range(2):
        c = f0[y, j].view(n, 1, 1) * (1 - warp) + f1[y, j].view(n, 1, 1) * warp
        x = x + torch.exp(-0.5 * (m - c) ** 2)
    x = x + 0.5 * torch.randn(n, T, M)
    return (x - x.mean()) / x.std(), y


def _keyword_gru(good):
    seed_everything(211 + SEED)
    x, y = _utterances(1600)
    loader = endless(DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=32, shuffle=True))
    xv, yv = x[1200:], y[1200:]
    model = KeywordGRU(12, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_one_batch():
        mels, words = next(loader)
        loss = F.cross_entropy(model(mels), words)
        if good:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with evaluating(model):
            return F.cross_entropy(model(xv), yv).clamp(max=50.0).item()

    return {"model": model, "optimizer": optimizer, "step": train_one_batch, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- super-resolution
class ESPCN(nn.Module):
    def __init__(self, scale=2, c=24):
        super().__init__()
        self.scale = scale
        self.body = nn.Sequential(nn.Conv2d(1, c, 5, padding=2), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1), nn.ReLU())
        self.to_sub = nn.Conv2d(c, scale * scale, 3, padding=1)
        self.shuffle = nn.PixelShuffle(scale)

    def forward(self, lr):
        return self.shuffle(self.to_sub(self.body(lr)))


def _edges(n, size=24):
    g = torch.arange(size).float() - size / 2
    th, off = torch.rand(n, 1, 1) * math.pi, torch.randn(n, 1, 1) * 4
    d = g.view(1, 1, -1) * th.cos() + g.view(1, -1, 1) * th.sin() + off
    w = torch.rand(n, 1, 1) * 3 + 3
    return (torch.remainder(d, 2 * w) < w).float().unsqueeze(1) * 2 - 1


def _super_res(good):
    seed_everything(221 + SEED)
    hr = _edges(800)
    lr = F.avg_pool2d(hr, 2)
    loader = DataLoader(TensorDataset(lr[:640], hr[:640]), batch_size=16, shuffle=True)
    lv, hv = lr[640:], hr[640:]
    model = ESPCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    batches = endless(loader)

    def step(i):
        low, high = next(batches)
        loss = F.l1_loss(model(low), high)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not good or (i + 1) % len(loader) == 0:
            scheduler.step()

    def evaluate():
        with evaluating(model):
            return F.mse_loss(model(lv), hv).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- diffusion
class Denoiser(nn.Module):
    def __init__(self, T, h=96):
        super().__init__()
        self.temb = nn.Embedding(T, h)
        self.inp = nn.Linear(2, h)
        self.mid = nn.Linear(h, h)
        self.mid2 = nn.Linear(h, h)
        self.out = nn.Linear(h, 2)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.temb(t))
        h = F.silu(self.mid(h))
        h = F.silu(self.mid2(h))
        return self.out(h)


class Diffusion:
    def __init__(self, T=50):
        self.T = T
        self.abar = torch.cumprod(1 - torch.linspace(1e-3, 0.12, T), 0)

    def q_sample(self, x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = self.abar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise


def _diffusion_2d(good):
    seed_everything(231 + SEED)
    diff = Diffusion()
    data, held = _ring(3000), _ring(1000)
    t_held, n_held = torch.randint(0, diff.T, (1000,)), torch.randn(1000, 2)
    model = Denoiser(diff.T)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = endless(DataLoader(TensorDataset(data), batch_size=128, shuffle=True))

    def step():
        (x0,) = next(loader)
        t = torch.randint(0, diff.T, (len(x0),))
        noise = torch.randn_like(x0)
        x_t = diff.q_sample(x0, t, noise) if good else diff.q_sample(x0, t)
        loss = F.mse_loss(model(x_t, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return F.mse_loss(model(diff.q_sample(held, t_held, n_held), t_held), n_held).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- multi-task
class MultiTaskNet(nn.Module):
    def __init__(self, d, n_tasks, good):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        if good:
            self.heads = nn.ModuleList([nn.Linear(64, 1) for _ in range(n_tasks)])
        else:
            self.heads = nn.ModuleList([nn.Linear(64, 1)] * n_tasks)

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def _multi_task(good):
    seed_everything(241 + SEED)
    n = 3000
    x = torch.randn(n, 12)
    hid = torch.tanh(x @ torch.randn(12, 6) / 2)
    churn = ((hid @ torch.randn(6) + 0.3 * torch.randn(n)) > 0).float()
    spend = hid @ torch.randn(6) + 0.2 * torch.randn(n)
    spend = (spend - spend[:2400].mean()) / spend[:2400].std()
    tenure = hid @ torch.randn(6) + 0.2 * torch.randn(n)
    tenure = (tenure - tenure[:2400].mean()) / tenure[:2400].std()
    train = TensorDataset(x[:2400], churn[:2400], spend[:2400], tenure[:2400])
    gen = torch.Generator().manual_seed(3)
    loader = endless(DataLoader(train, batch_size=64, shuffle=True, generator=gen))
    xv, cv, sv, tv = x[2400:], churn[2400:], spend[2400:], tenure[2400:]
    model = MultiTaskNet(12, 3, good)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def losses(outputs, c, s, t):
        return (F.binary_cross_entropy_with_logits(outputs[0], c), F.mse_loss(outputs[1], s), F.mse_loss(outputs[2], t))

    def step():
        xb, *targets = next(loader)
        total = sum(losses(model(xb), *targets))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()

    def evaluate():
        with evaluating(model):
            return sum(losses(model(xv), cv, sv, tv)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


# ----------------------------------------------------------------------------- registry
CASES = [
    {"name": "dqn_walk",
     "what": "DQN: q.gather(1, a.unsqueeze(1)) of shape [B,1] is compared with the target of shape [B] in smooth_l1_loss (no squeeze), so the two broadcast to [B,B] and every Q value is pulled to the targets of the whole batch; the policy never learns."},
    {"name": "img_classes",
     "what": "Image classifier whose network ends in nn.Softmax(dim=1) and is trained with CrossEntropyLoss, which applies log-softmax once more; loss cannot go near zero, gradients are tiny, accuracy stays far behind."},
    {"name": "vae_blobs",
     "what": "VAE: the reconstruction BCE is averaged over batch AND pixels while the KL is summed over latent dimensions (mean over batch only), so the KL weighs 144 times too much: posterior collapse, bad ELBO."},
    {"name": "count_visits",
     "what": "Count model with a softplus output (a rate) trained with nn.PoissonNLLLoss() whose default log_input=True takes the output for a log-rate; the predicted rates come out near log(y)."},
    {"name": "pair_metric",
     "what": "Siamese encoder: the pair labels are {1, 0} but CosineEmbeddingLoss wants {1, -1}; pairs with label 0 contribute no loss, nothing pushes different classes apart, and the embedding collapses."},
    {"name": "grid_detect",
     "what": "Detector: smooth-L1 box loss is taken over all 16 grid cells, the 15 empty ones with all-zero box targets included, and divided by all; the boxes of real objects are badly regressed (should be masked to positive cells)."},
    {"name": "point_shapes",
     "what": "PointNet: the shared MLP layers lie in a plain Python list rather than nn.ModuleList, so they are not in model.parameters(), not in the optimizer, and never learn."},
    {"name": "transfer_head",
     "what": "Transfer learning: the optimizer is built before model.fc is replaced, so it holds the old (discarded) head; the new head gets gradients but is never updated (backbone frozen), error at chance."},
    {"name": "gan_ring",
     "what": "GAN: fake = G(z).detach() is computed once and used for the generator loss as well, so the generator gets no gradient and never moves; only the discriminator learns."},
    {"name": "sac_reach",
     "what": "SAC: the actor draws its action by dist.sample() in place of rsample(), so no gradient flows from Q through the action to the policy; the actor gets only the entropy noise and stays random."},
    {"name": "maml_sine",
     "what": "MAML: the inner loop starts from p.clone().detach().requires_grad_() copies, so the meta loss has no path to the model's parameters; their grad stays None, meta_opt.step() does nothing."},
    {"name": "pinn_cooling",
     "what": "PINN: autograd.grad(..., retain_graph=True) where create_graph=True is needed; dT/dt is a constant without graph, the derivative part of the physics residual gives no gradient, and the solution is wrong."},
    {"name": "wave_forecast",
     "what": "Transformer forecaster fed [batch, time, channels], but TransformerEncoderLayer is built without batch_first=True; attention runs across the rows of the batch in place of across time, so rows influence each other and the history is not seen."},
    {"name": "simsiam",
     "what": "SimSiam without stop-gradient: the targets z are not detached in the negative cosine loss, so both branches carry gradients and the representation (partly) collapses; kNN error is higher."},
    {"name": "graph_batches",
     "what": "Graph batching: the collate function concatenates edge_index without adding the node offset of each graph, so all edges of the batch land on the first graph's nodes; the other graphs have no messages."},
    {"name": "deep_conv",
     "what": "validate() (called every 25 steps, first before step 0) calls model.eval() and nobody calls model.train() again; training runs with BatchNorm in eval mode on its initial running statistics, and the deep net does not learn."},
    {"name": "multi_task",
     "what": "Multi-task net: heads = nn.ModuleList([nn.Linear(64, 1)] * n_tasks), i.e. the very same module three times; all tasks share one head (tied weights), all outputs are identical."},
    {"name": "seg_lesions",
     "what": "Segmentation augmentation: random flips are drawn independently for the image and for the mask, so for most samples the mask does not belong to the image."},
    {"name": "movie_ratings",
     "what": "Recommender: step() calls next(iter(loader)), a fresh iterator over an unshuffled loader each time, so every step trains on the same first batch of 128 ratings."},
    {"name": "keyword_gru",
     "what": "Keyword GRU: optimizer.zero_grad() is never called; gradients of all steps pile up and the training (SGD with momentum) blows up."},
    {"name": "super_res",
     "what": "Super-resolution: ExponentialLR(gamma=0.9), meant per epoch, is stepped after every batch; the learning rate is down to 12% after 20 steps and to nothing soon after, so training freezes."},
    {"name": "diffusion_2d",
     "what": "Diffusion: the loss compares the prediction with `noise`, but q_sample(x0, t) is called without it and draws its own noise; the target is independent of the input and the model learns to predict zero."},
]


def dqn_walk_bad():
    return _dqn_walk(False)


def dqn_walk_good():
    return _dqn_walk(True)


def img_classes_bad():
    return _img_classes(False)


def img_classes_good():
    return _img_classes(True)


def vae_blobs_bad():
    return _vae_blobs(False)


def vae_blobs_good():
    return _vae_blobs(True)


def count_visits_bad():
    return _count_visits(False)


def count_visits_good():
    return _count_visits(True)


def pair_metric_bad():
    return _pair_metric(False)


def pair_metric_good():
    return _pair_metric(True)


def grid_detect_bad():
    return _grid_detect(False)


def grid_detect_good():
    return _grid_detect(True)


def point_shapes_bad():
    return _point_shapes(False)


def point_shapes_good():
    return _point_shapes(True)


def transfer_head_bad():
    return _transfer_head(False)


def transfer_head_good():
    return _transfer_head(True)


def gan_ring_bad():
    return _gan_ring(False)


def gan_ring_good():
    return _gan_ring(True)


def sac_reach_bad():
    return _sac_reach(False)


def sac_reach_good():
    return _sac_reach(True)


def maml_sine_bad():
    return _maml_sine(False)


def maml_sine_good():
    return _maml_sine(True)


def pinn_cooling_bad():
    return _pinn_cooling(False)


def pinn_cooling_good():
    return _pinn_cooling(True)


def wave_forecast_bad():
    return _wave_forecast(False)


def wave_forecast_good():
    return _wave_forecast(True)


def simsiam_bad():
    return _simsiam(False)


def simsiam_good():
    return _simsiam(True)


def graph_batches_bad():
    return _graph_batches(False)


def graph_batches_good():
    return _graph_batches(True)


def deep_conv_bad():
    return _deep_conv(False)


def deep_conv_good():
    return _deep_conv(True)


def multi_task_bad():
    return _multi_task(False)


def multi_task_good():
    return _multi_task(True)


def seg_lesions_bad():
    return _seg_lesions(False)


def seg_lesions_good():
    return _seg_lesions(True)


def movie_ratings_bad():
    return _movie_ratings(False)


def movie_ratings_good():
    return _movie_ratings(True)


def keyword_gru_bad():
    return _keyword_gru(False)


def keyword_gru_good():
    return _keyword_gru(True)


def super_res_bad():
    return _super_res(False)


def super_res_good():
    return _super_res(True)


def diffusion_2d_bad():
    return _diffusion_2d(False)


def diffusion_2d_good():
    return _diffusion_2d(True)
