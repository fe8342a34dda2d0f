import copy
import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


@contextmanager
def _eval_mode(*modules):
    flags = [(m, m.training) for root in modules for m in root.modules()]
    for root in modules:
        root.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag


def _gen(seed):
    return torch.Generator().manual_seed(seed)


def _loader(*tensors, batch_size, seed):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=True,
                      drop_last=True, generator=_gen(seed))


def _forever(loader):
    while True:
        yield from loader


def _pattern_images(n, classes, size, seed, noise=0.6):
    g = _gen(seed)
    coarse = torch.randn(classes, 1, 4, 4, generator=g)
    templates = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    y = torch.randint(0, classes, (n,), generator=g)
    x = templates[y].clone()
    shifts = torch.randint(-1, 2, (n, 2), generator=g)
    for k in range(n):
        x[k] = torch.roll(x[k], shifts=(int(shifts[k, 0]), int(shifts[k, 1])), dims=(1, 2))
    gain = 0.8 + 0.4 * torch.rand(n, 1, 1, 1, generator=g)
    x = x * gain + noise * torch.randn(x.shape, generator=g)
    return x, y


# --------------------------------------------------------------------------
# contrastive learning
# --------------------------------------------------------------------------

class _ContrastiveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(),
        )
        self.projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=1)


def _augment_pair_view(x, g):
    gain = 0.8 + 0.4 * torch.rand(x.size(0), 1, 1, 1, generator=g)
    keep = (torch.rand(x.size(0), 1, 3, 3, generator=g) > 0.15).float()
    keep = F.interpolate(keep, size=x.shape[-2:], mode="nearest")
    return x * gain * keep + 0.15 * torch.randn(x.shape, generator=g)


def _simclr(mended):
    torch.manual_seed(11)
    g = _gen(12)
    images = F.interpolate(torch.randn(1280, 1, 4, 4, generator=g), size=(12, 12), mode="bilinear",
                           align_corners=False)
    images = (images - images.mean()) / images.std()
    train, held = images[:1024], images[1024:]
    model = _ContrastiveNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = _forever(_loader(train, batch_size=48, seed=13))
    aug_gen = _gen(14)
    temperature = 0.2

    def step(i):
        model.train()
        (x,) = next(batches)
        n = x.size(0)
        z1 = model(_augment_pair_view(x, aug_gen))
        z2 = model(_augment_pair_view(x, aug_gen))
        if mended:
            z = torch.cat([z1, z2], dim=0)
        else:
            z = torch.stack([z1, z2], dim=1).view(2 * n, -1)
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        target = (torch.arange(2 * n) + n) % (2 * n)
        loss = F.cross_entropy(sim, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        pg = _gen(999)
        with _eval_mode(model):
            z1 = model(_augment_pair_view(held, pg))
            z2 = model(_augment_pair_view(held, pg))
            logits = z1 @ z2.t() / temperature
            return F.cross_entropy(logits, torch.arange(held.size(0))).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# image classification with an averaged copy of the weights
# --------------------------------------------------------------------------

class _BnConvNet(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width),
            nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.classifier = nn.Linear(8 * width, classes)

    def forward(self, x):
        return self.classifier(self.features(x))


class _WeightAverage:
    def __init__(self, model, decay, with_buffers):
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay
        self.with_buffers = with_buffers

    @torch.no_grad()
    def update(self, model):
        for avg, p in zip(self.module.parameters(), model.parameters()):
            avg.lerp_(p, 1.0 - self.decay)
        if self.with_buffers:
            for avg, b in zip(self.module.buffers(), model.buffers()):
                avg.copy_(b)


def _ema_classifier(mended):
    torch.manual_seed(21)
    x, y = _pattern_images(1536, 8, 12, seed=22, noise=0.9)
    x = (x - x[:1024].mean()) / x[:1024].std()
    x_val, y_val = x[1024:], y[1024:]
    model = _BnConvNet(8)
    ema = _WeightAverage(model, decay=0.98, with_buffers=mended)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    batches = _forever(_loader(x[:1024], y[:1024], batch_size=32, seed=23))

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    def probe():
        with _eval_mode(ema.module):
            return F.cross_entropy(ema.module(x_val), y_val).item()

    return {"model": {"model": model, "ema": ema.module}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


# --------------------------------------------------------------------------
# reinforcement learning: value prediction from replayed transitions
# --------------------------------------------------------------------------

def _td_value(mended):
    torch.manual_seed(31)
    g = _gen(32)
    n_states, gamma = 20, 0.9
    trans = torch.zeros(n_states, n_states)
    for s in range(n_states):
        nxt = torch.randperm(n_states, generator=g)[:3]
        trans[s, nxt] = 1.0 / 3.0
    reward = torch.randn(n_states, generator=g)
    reward = (reward - reward.mean()) / reward.std()
    true_value = torch.linalg.solve(torch.eye(n_states) - gamma * trans, reward)
    observations = torch.randn(n_states, 16, generator=g)
    s_all = torch.randint(0, n_states, (12000,), generator=g)
    s_next_all = torch.multinomial(trans[s_all], 1, generator=g).squeeze(1)
    replay = _loader(observations[s_all], reward[s_all], observations[s_next_all],
                     batch_size=64, seed=33)
    batches = _forever(replay)
    value = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                          nn.Linear(64, 1))
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-3)

    def step(i):
        value.train()
        obs, rew, next_obs = next(batches)
        v = value(obs).squeeze(-1)
        v_next = value(next_obs).squeeze(-1)
        target = rew + gamma * (v_next.detach() if mended else v_next)
        loss = F.mse_loss(v, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(value):
            v = value(observations).squeeze(-1)
            return (v - true_value).pow(2).mean().sqrt().item()

    return {"model": value, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# time series classification with a transformer encoder
# --------------------------------------------------------------------------

class _SensorTransformer(nn.Module):
    def __init__(self, channels, length, classes, batch_first):
        super().__init__()
        d = 32
        self.embed = nn.Linear(channels, d)
        rate = torch.exp(-math.log(100.0) * torch.arange(0, d, 2).float() / d)
        angle = torch.arange(length).float()[:, None] * rate
        self.register_buffer("position", torch.cat([angle.sin(), angle.cos()], dim=1)[None])
        layer = nn.TransformerEncoderLayer(d_model=d, nhead=4, dim_feedforward=64, dropout=0.1,
                                           batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        h = self.embed(x) + self.position
        h = self.encoder(h)
        return self.head(h.mean(dim=1))


def _sensor_series(n, length, g):
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(length).float()
    cycles = torch.tensor([1.0, 2.0, 3.0, 4.0])[y]
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    arg = 2 * math.pi * cycles[:, None] * t[None] / length + phase
    x = torch.stack([torch.sin(arg), torch.cos(arg)], dim=-1)
    x = x + 0.3 * torch.randn(x.shape, generator=g)
    return x / x.std(), y


def _sensor_transformer(mended):
    torch.manual_seed(41)
    g = _gen(42)
    x, y = _sensor_series(2560, 20, g)
    x_val, y_val = x[2048:], y[2048:]
    model = _SensorTransformer(2, 20, 4, batch_first=mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    batches = _forever(_loader(x[:2048], y[:2048], batch_size=32, seed=43))

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            total = 0.0
            for xb, yb in zip(x_val.split(32), y_val.split(32)):
                total += F.cross_entropy(model(xb), yb, reduction="sum").item()
            return total / len(y_val)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# GAN on a ring of points
# --------------------------------------------------------------------------

def _ring(n, g):
    angle = 2 * math.pi * torch.rand(n, generator=g)
    radius = 1.0 + 0.05 * torch.randn(n, generator=g)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def _sliced_distance(a, b, g, directions=64):
    theta = math.pi * torch.rand(directions, generator=g)
    proj = torch.stack([theta.cos(), theta.sin()])
    pa = (a @ proj).sort(dim=0).values
    pb = (b @ proj).sort(dim=0).values
    return (pa - pb).abs().mean().item()


def _ring_wgan(mended):
    torch.manual_seed(51)
    data = _ring(4096, _gen(52))
    batches = _forever(_loader(data, batch_size=64, seed=53))
    latent, n_critic, gp_weight = 4, 3, 1.0
    generator = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                              nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64),
                           nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    noise_gen = _gen(54)

    def gradient_penalty(real, fake):
        mix = torch.rand(real.size(0), 1, generator=noise_gen)
        point = (mix * real + (1 - mix) * fake).requires_grad_(True)
        grad, = torch.autograd.grad(critic(point).sum(), point, create_graph=mended)
        return (grad.norm(dim=1) - 1.0).pow(2).mean()

    def step(i):
        generator.train()
        critic.train()
        for _ in range(n_critic):
            (real,) = next(batches)
            with torch.no_grad():
                fake = generator(torch.randn(real.size(0), latent, generator=noise_gen))
            loss_c = critic(fake).mean() - critic(real).mean()
            loss_c = loss_c + gp_weight * gradient_penalty(real, fake)
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
        loss_g = -critic(generator(torch.randn(64, latent, generator=noise_gen))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_c.item()

    def probe():
        pg = _gen(999)
        with _eval_mode(generator):
            samples = generator(torch.randn(2048, latent, generator=pg))
            return _sliced_distance(samples, _ring(2048, pg), pg)

    return {"model": {"generator": generator, "critic": critic},
            "optimizer": [opt_g, opt_c], "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# tabular multi-task regression
# --------------------------------------------------------------------------

class _MultiTaskNet(nn.Module):
    def __init__(self, n_features, n_tasks, separate):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_features, 64), nn.ReLU(), nn.Linear(64, 64),
                                   nn.ReLU())
        if separate:
            self.heads = nn.ModuleList([self._head() for _ in range(n_tasks)])
        else:
            self.heads = nn.ModuleList([self._head()] * n_tasks)

    @staticmethod
    def _head():
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


def _multitask_tabular(mended):
    torch.manual_seed(61)
    g = _gen(62)
    x = torch.randn(2560, 12, generator=g)
    w = torch.randn(12, 6, generator=g) / math.sqrt(12)
    mix = torch.randn(6, 4, generator=g) / math.sqrt(6)
    y = torch.tanh(1.5 * x @ w) @ mix
    y = (y - y.mean(0)) / y.std(0) + 0.2 * torch.randn(y.shape, generator=g)
    x_val, y_val = x[2048:], y[2048:]
    model = _MultiTaskNet(12, 4, separate=mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
    batches = _forever(_loader(x[:2048], y[:2048], batch_size=64, seed=63))

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            return F.mse_loss(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# transfer: a second head on a frozen backbone that keeps serving the first
# --------------------------------------------------------------------------

class _TwoHeadNet(nn.Module):
    def __init__(self, base_classes, new_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        )
        self.base_head = nn.Linear(288, base_classes)
        self.new_head = nn.Linear(288, new_classes)

    def forward(self, x):
        return self.new_head(self.backbone(x))

    def forward_base(self, x):
        return self.base_head(self.backbone(x))


def _frozen_backbone(mended):
    torch.manual_seed(71)
    xa, ya = _pattern_images(1280, 6, 12, seed=72, noise=0.7)
    xb_all, yb_all = _pattern_images(1280, 4, 12, seed=73, noise=0.7)
    xb_all = 1.3 * xb_all + 0.4
    model = _TwoHeadNet(6, 4)
    pre_params = list(model.backbone.parameters()) + list(model.base_head.parameters())
    pretrain = torch.optim.Adam(pre_params, lr=2e-3)
    model.train()
    pre_batches = _forever(_loader(xa[:1024], ya[:1024], batch_size=64, seed=74))
    for _ in range(200):
        x, y = next(pre_batches)
        pretrain.zero_grad()
        F.cross_entropy(model.forward_base(x), y).backward()
        pretrain.step()
    model.zero_grad(set_to_none=True)
    model.backbone.requires_grad_(False)
    model.base_head.requires_grad_(False)
    optimizer = torch.optim.Adam(model.new_head.parameters(), lr=2e-3)
    batches = _forever(_loader(xb_all[:1024], yb_all[:1024], batch_size=32, seed=75))

    def step(i):
        model.train()
        if mended:
            model.backbone.eval()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            base = F.cross_entropy(model.forward_base(xa[1024:]), ya[1024:])
            new = F.cross_entropy(model(xb_all[1024:]), yb_all[1024:])
            return (0.5 * (base + new)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# audio clips of varying length, attention pooling
# --------------------------------------------------------------------------

class _ClipClassifier(nn.Module):
    def __init__(self, bands, classes, mended):
        super().__init__()
        d = 32
        self.mended = mended
        self.conv1 = nn.Conv1d(bands, d, 5, padding=2)
        self.conv2 = nn.Conv1d(d, d, 5, padding=2)
        self.query = nn.Parameter(0.1 * torch.randn(1, 1, d))
        self.pool = nn.MultiheadAttention(d, 4, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)

    def forward(self, mel, lengths):
        h = F.relu(self.conv1(mel.transpose(1, 2)))
        h = F.relu(self.conv2(h)).transpose(1, 2)
        valid = torch.arange(mel.size(1))[None, :] < lengths[:, None]
        padding_mask = ~valid if self.mended else valid
        query = self.query.expand(mel.size(0), -1, -1)
        pooled, _ = self.pool(query, h, h, key_padding_mask=padding_mask, need_weights=False)
        return self.head(self.norm(pooled.squeeze(1)))


def _clips(n, classes, bands, max_len, g):
    profile = torch.randn(classes, bands, generator=_gen(80))
    y = torch.randint(0, classes, (n,), generator=g)
    lengths = torch.randint(12, max_len - 8, (n,), generator=g)
    env = torch.rand(n, max_len, 1, generator=g)
    mel = profile[y][:, None, :] * env + 1.2 * torch.randn(n, max_len, bands, generator=g)
    mel = mel / 1.3
    valid = torch.arange(max_len)[None, :] < lengths[:, None]
    return mel * valid[..., None], lengths, y


def _audio_pooling(mended):
    torch.manual_seed(81)
    mel, lengths, y = _clips(2048, 6, 12, 36, _gen(82))
    model = _ClipClassifier(12, 6, mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    n = 1536
    batches = _forever(_loader(mel[:n], lengths[:n], y[:n], batch_size=32, seed=83))

    def step(i):
        model.train()
        xb, lb, yb = next(batches)
        loss = F.cross_entropy(model(xb, lb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            return F.cross_entropy(model(mel[n:], lengths[n:]), y[n:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# graph regression with a hand-written collate
# --------------------------------------------------------------------------

class _GraphSet(Dataset):
    def __init__(self, n, seed):
        g = _gen(seed)
        self.items = []
        for _ in range(n):
            k = int(torch.randint(7, 14, (1,), generator=g))
            adj = torch.triu((torch.rand(k, k, generator=g) < 0.3).float(), diagonal=1)
            adj = adj + adj.t()
            x = torch.randn(k, 4, generator=g)
            neigh = adj @ x / adj.sum(1, keepdim=True).clamp(min=1)
            y = (x[:, :2] * neigh[:, 2:]).sum(1).mean() * 2.0 + neigh[:, 0].abs().mean() * 2.0 - 0.8
            self.items.append((x, adj.nonzero().t(), y))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        return self.items[k]


class _GraphNet(nn.Module):
    def __init__(self, n_features, width=32):
        super().__init__()
        self.self1, self.neigh1 = nn.Linear(n_features, width), nn.Linear(n_features, width)
        self.self2, self.neigh2 = nn.Linear(width, width), nn.Linear(width, width)
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    @staticmethod
    def _mean_neighbours(h, edges):
        src, dst = edges
        total = torch.zeros_like(h).index_add(0, dst, h[src])
        degree = torch.zeros(h.size(0)).index_add(0, dst, torch.ones(dst.size(0)))
        return total / degree.clamp(min=1).unsqueeze(1)

    def forward(self, x, edges, graph_id, n_graphs):
        h = F.relu(self.self1(x) + self.neigh1(self._mean_neighbours(x, edges)))
        h = F.relu(self.self2(h) + self.neigh2(self._mean_neighbours(h, edges)))
        count = torch.bincount(graph_id, minlength=n_graphs).unsqueeze(1)
        pooled = torch.zeros(n_graphs, h.size(1)).index_add(0, graph_id, h) / count
        return self.readout(pooled).squeeze(-1)


def _graph_regression(mended):
    torch.manual_seed(91)
    train, held = _GraphSet(1024, 92), _GraphSet(192, 93)

    def collate(items):
        xs, edges, ids, ys = [], [], [], []
        offset = 0
        for k, (x, e, y) in enumerate(items):
            xs.append(x)
            edges.append(e + offset if mended else e)
            ids.append(torch.full((x.size(0),), k))
            ys.append(y)
            offset += x.size(0)
        return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(ids), torch.stack(ys)

    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate,
                        generator=_gen(94))
    batches = _forever(loader)
    model = _GraphNet(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x, edges, graph_id, y = next(batches)
        loss = F.mse_loss(model(x, edges, graph_id, y.size(0)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            total = 0.0
            for x, e, y in held.items:
                out = model(x, e, torch.zeros(x.size(0), dtype=torch.long), 1)
                total += (out[0] - y).pow(2).item()
            return total / len(held)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# semantic segmentation
# --------------------------------------------------------------------------

class _TinyUNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU())
        self.dec = nn.Sequential(nn.Conv2d(36, 16, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        up = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.out(self.dec(torch.cat([a, up], dim=1)))


def _scenes(n, size, seed):
    g = _gen(seed)
    ys = torch.arange(size).view(1, size, 1).float()
    xs = torch.arange(size).view(1, 1, size).float()
    mask = torch.zeros(n, size, size, dtype=torch.long)
    for label in (1, 2):
        cy = 3 + (size - 6) * torch.rand(n, 1, 1, generator=g)
        cx = 3 + (size - 6) * torch.rand(n, 1, 1, generator=g)
        r = 2.5 + 1.5 * torch.rand(n, 1, 1, generator=g)
        if label == 1:
            inside = (ys - cy) ** 2 + (xs - cx) ** 2 < r ** 2
        else:
            inside = ((ys - cy).abs() < r) & ((xs - cx).abs() < r)
        mask[inside] = label
    level = torch.tensor([-0.6, 0.4, 1.4])[mask]
    x = level + 0.5 * torch.randn(level.shape, generator=g)
    return x.unsqueeze(1), mask


def _segmentation(mended):
    torch.manual_seed(101)
    x, m = _scenes(640, 16, 102)
    x = (x - x[:512].mean()) / x[:512].std()
    x_val, m_val = x[512:], m[512:]
    model = _TinyUNet(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _forever(_loader(x[:512], m[:512], batch_size=16, seed=103))

    def step(i):
        model.train()
        xb, mb = next(batches)
        logits = model(xb)
        n_classes = logits.size(1)
        if mended:
            flat = logits.permute(0, 2, 3, 1).reshape(-1, n_classes)
        else:
            flat = logits.reshape(-1, n_classes)
        loss = F.cross_entropy(flat, mb.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            pred = model(x_val).argmax(dim=1)
            ious = []
            for c in range(3):
                inter = ((pred == c) & (m_val == c)).sum().float()
                union = ((pred == c) | (m_val == c)).sum().float()
                ious.append(inter / union.clamp(min=1))
            return 1.0 - torch.stack(ious).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# vector-quantised autoencoder
# --------------------------------------------------------------------------

class _VQAutoencoder(nn.Module):
    def __init__(self, n_in, n_codes=32, dim=8, slots=4, mended=True):
        super().__init__()
        self.dim, self.slots, self.mended = dim, slots, mended
        self.encoder = nn.Sequential(nn.Linear(n_in, 96), nn.ReLU(), nn.Linear(96, dim * slots))
        self.decoder = nn.Sequential(nn.Linear(dim * slots, 96), nn.ReLU(), nn.Linear(96, n_in))
        self.codebook = nn.Embedding(n_codes, dim)
        nn.init.normal_(self.codebook.weight, std=0.3)

    def encode(self, x):
        return self.encoder(x).view(x.size(0), self.slots, self.dim)

    def codes(self, z):
        flat = z.reshape(-1, self.dim)
        return torch.cdist(flat, self.codebook.weight).argmin(dim=1).view(z.shape[:2])

    def decode_codes(self, idx):
        return self.decoder(self.codebook(idx).flatten(1))

    def forward(self, x):
        z = self.encode(x)
        q = self.codebook(self.codes(z))
        codebook_loss = F.mse_loss(q, z.detach())
        commit_loss = F.mse_loss(z, q.detach())
        if self.mended:
            passed = z + (q - z).detach()
        else:
            passed = q + (z - q).detach()
        recon = self.decoder(passed.flatten(1))
        return recon, codebook_loss, commit_loss


def _vq_autoencoder(mended):
    torch.manual_seed(111)
    x, _ = _pattern_images(2048, 12, 8, seed=112, noise=0.2)
    x = x.flatten(1)
    x = (x - x[:1536].mean()) / x[:1536].std()
    held = x[1536:]
    model = _VQAutoencoder(64, mended=mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _forever(_loader(x[:1536], batch_size=64, seed=113))

    def step(i):
        model.train()
        (xb,) = next(batches)
        recon, codebook_loss, commit_loss = model(xb)
        loss = F.mse_loss(recon, xb) + codebook_loss + 0.25 * commit_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            recon = model.decode_codes(model.codes(model.encode(held)))
            return F.mse_loss(recon, held).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# RNN classifier with accumulated gradients
# --------------------------------------------------------------------------

class _GruClassifier(nn.Module):
    def __init__(self, n_in, width, classes):
        super().__init__()
        self.gru = nn.GRU(n_in, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        out, _ = self.gru(x)
        return self.head(out.mean(dim=1))


def _gru_accumulation(mended):
    torch.manual_seed(121)
    g = _gen(122)
    n, length, classes = 2048, 16, 5
    y = torch.randint(0, classes, (n,), generator=g)
    t = torch.arange(length).float()
    freq = (1.0 + 0.8 * y.float()) / length
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    arg = 2 * math.pi * freq[:, None] * t + phase
    x = torch.stack([arg.sin(), arg.cos()], dim=-1) + 0.5 * torch.randn(n, length, 2, generator=g)
    x = x / x.std()
    x_val, y_val = x[1536:], y[1536:]
    model = _GruClassifier(2, 32, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = _forever(_loader(x[:1536], y[:1536], batch_size=16, seed=123))
    accumulate = 4

    def step(i):
        model.train()
        total = 0.0
        if mended:
            optimizer.zero_grad()
        for _ in range(accumulate):
            if not mended:
                optimizer.zero_grad()
            xb, yb = next(batches)
            loss = F.cross_entropy(model(xb), yb) / accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        with _eval_mode(model):
            return F.cross_entropy(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# keyword spotting in mixed precision
# --------------------------------------------------------------------------

class _KeywordNet(nn.Module):
    def __init__(self, bands, classes):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(bands, 24, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(24, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(),
            nn.Linear(64, classes),
        )

    def forward(self, x):
        return self.net(x)


def _amp_keywords(mended):
    torch.manual_seed(131)
    g = _gen(132)
    n, bands, length, classes = 2048, 12, 20, 8
    coarse = torch.randn(classes, bands, 6, generator=g)
    templates = F.interpolate(coarse, size=length, mode="linear", align_corners=False)
    y = torch.randint(0, classes, (n,), generator=g)
    x = templates[y] + 2.0 * torch.randn(n, bands, length, generator=g)
    x = (x - x[:1536].mean()) / x[:1536].std()
    x_val, y_val = x[1536:], y[1536:]
    model = _KeywordNet(bands, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    batches = _forever(_loader(x[:1536], y[:1536], batch_size=32, seed=133))

    def step(i):
        model.train()
        xb, yb = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(xb)
            loss = F.cross_entropy(logits.float(), yb)
        scaler.scale(loss).backward()
        if mended:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with _eval_mode(model):
            return F.cross_entropy(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# image classification with a step schedule
# --------------------------------------------------------------------------

def _step_schedule(mended):
    torch.manual_seed(141)
    x, y = _pattern_images(1280, 10, 12, seed=142, noise=1.0)
    x = (x - x[:1024].mean()) / x[:1024].std()
    x_val, y_val = x[1024:], y[1024:]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.1)
    loader = _loader(x[:1024], y[:1024], batch_size=64, seed=143)
    steps_per_epoch = len(loader)
    batches = _forever(loader)

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if mended:
            if (i + 1) % steps_per_epoch == 0:
                scheduler.step()
        else:
            scheduler.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            return F.cross_entropy(model(x_val), y_val).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# fine-tuning on new classes
# --------------------------------------------------------------------------

class _PretrainedNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(288, 64), nn.LayerNorm(64), nn.ReLU(),
        )
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        return self.fc(self.backbone(x))


def _finetune_new_classes(mended):
    torch.manual_seed(151)
    xa, ya = _pattern_images(1024, 10, 12, seed=152, noise=0.7)
    xb_all, yb_all = _pattern_images(1280, 6, 12, seed=153, noise=1.0)
    mean, std = xa.mean(), xa.std()
    xa = (xa - mean) / std
    xb_all = (xb_all - mean) / std
    model = _PretrainedNet(10)
    pretrain = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    pre_batches = _forever(_loader(xa, ya, batch_size=64, seed=154))
    for _ in range(150):
        x, y = next(pre_batches)
        pretrain.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pretrain.step()
    model.zero_grad(set_to_none=True)

    def make_optimizer():
        return torch.optim.SGD([
            {"params": model.backbone.parameters(), "lr": 1e-4},
            {"params": model.fc.parameters(), "lr": 1e-2},
        ], lr=1e-2, momentum=0.9)

    if mended:
        model.fc = nn.Linear(64, 6)
        optimizer = make_optimizer()
    else:
        optimizer = make_optimizer()
        model.fc = nn.Linear(64, 6)
    batches = _forever(_loader(xb_all[:1024], yb_all[:1024], batch_size=32, seed=155))

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            return F.cross_entropy(model(xb_all[1024:]), yb_all[1024:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# diffusion on points of the plane
# --------------------------------------------------------------------------

class _NoisePredictor(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(5).float())
        self.net = nn.Sequential(nn.Linear(2 + 10, width), nn.SiLU(), nn.Linear(width, width),
                                 nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        arg = t[:, None] * self.freqs
        return self.net(torch.cat([x, arg.sin(), arg.cos()], dim=1))


def _two_moons(n, g):
    angle = math.pi * torch.rand(n, generator=g)
    upper = torch.rand(n, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1.0 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    pts = torch.stack([x - 0.5, y - 0.25], dim=1) + 0.05 * torch.randn(n, 2, generator=g)
    return pts / torch.tensor([0.87, 0.50])


def _diffusion_points(mended):
    torch.manual_seed(161)
    data = _two_moons(4096, _gen(162))
    held = _two_moons(2048, _gen(163))
    horizon = 100
    betas = torch.linspace(1e-3, 0.08, horizon)
    alpha_bar = torch.cumprod(1.0 - betas, dim=0)
    model = _NoisePredictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _forever(_loader(data, batch_size=32, seed=164))
    seed = 165
    noise_gen = _gen(seed)

    def corrupt(x, g):
        t = torch.randint(0, horizon, (x.size(0),), generator=g)
        eps = torch.randn(x.shape, generator=g)
        a = alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * eps, t, eps

    def step(i):
        model.train()
        (x,) = next(batches)
        g = noise_gen if mended else torch.Generator().manual_seed(seed)
        noisy, t, eps = corrupt(x, g)
        loss = F.mse_loss(model(noisy, t.float() / horizon), eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        noisy, t, eps = corrupt(held, _gen(999))
        with _eval_mode(model):
            return F.mse_loss(model(noisy, t.float() / horizon), eps).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# rating prediction by factorisation
# --------------------------------------------------------------------------

class _Factorisation(nn.Module):
    def __init__(self, users, items, dim, mean):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, u, v):
        dot = (self.user(u) * self.item(v)).sum(dim=1)
        return self.mean + dot + self.user_bias(u).squeeze(1) + self.item_bias(v).squeeze(1)


def _ratings(mended):
    torch.manual_seed(171)
    g = _gen(172)
    users, items, dim, n = 300, 200, 4, 18000
    pu = torch.randn(users, dim, generator=g) / math.sqrt(2)
    pv = torch.randn(items, dim, generator=g) / math.sqrt(2)
    bu, bv = 0.4 * torch.randn(users, generator=g), 0.4 * torch.randn(items, generator=g)
    u = torch.randint(0, users, (n,), generator=g)
    v = torch.randint(0, items, (n,), generator=g)
    r = 3.5 + (pu[u] * pv[v]).sum(1) + bu[u] + bv[v] + 0.3 * torch.randn(n, generator=g)
    k = 15000
    model = _Factorisation(users, items, dim, r[:k].mean().item())
    if mended:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2)
    batches = _forever(DataLoader(torch.arange(k), batch_size=256, shuffle=True, drop_last=True,
                                  generator=_gen(173)))

    def step(i):
        model.train()
        idx = next(batches)
        loss = F.mse_loss(model(u[idx], v[idx]), r[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            return F.mse_loss(model(u[k:], v[k:]), r[k:]).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# VAE with one optimizer for each half
# --------------------------------------------------------------------------

class _VaeEncoder(nn.Module):
    def __init__(self, n_in, latent):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, 96), nn.ReLU())
        self.mu = nn.Linear(96, latent)
        self.logvar = nn.Linear(96, latent)

    def forward(self, x):
        h = self.body(x)
        return self.mu(h), self.logvar(h).clamp(-8.0, 8.0)


def _vae_two_optimizers(mended):
    torch.manual_seed(181)
    x, _ = _pattern_images(2048, 10, 8, seed=182, noise=0.3)
    x = x.flatten(1)
    x = (x - x[:1536].mean()) / x[:1536].std()
    held = x[1536:]
    latent = 6
    encoder = _VaeEncoder(64, latent)
    decoder = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 64))
    opt_enc = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    opt_dec = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    batches = _forever(_loader(x[:1536], batch_size=64, seed=183))
    noise_gen = _gen(184)

    def negative_elbo(xb, g):
        mu, logvar = encoder(xb)
        z = mu + (0.5 * logvar).exp() * torch.randn(mu.shape, generator=g)
        recon = 0.5 * (decoder(z) - xb).pow(2).sum(dim=1) / 0.25
        kl = 0.5 * (mu.pow(2) + logvar.exp() - 1.0 - logvar).sum(dim=1)
        return (recon + kl).mean()

    def step(i):
        encoder.train()
        decoder.train()
        (xb,) = next(batches)
        loss = negative_elbo(xb, noise_gen)
        opt_enc.zero_grad()
        if mended:
            opt_dec.zero_grad()
        loss.backward()
        opt_enc.step()
        opt_dec.step()
        return loss.item()

    def probe():
        with _eval_mode(encoder, decoder):
            return negative_elbo(held, _gen(999)).item()

    return {"model": {"encoder": encoder, "decoder": decoder}, "optimizer": [opt_enc, opt_dec],
            "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# single-object detection with flips
# --------------------------------------------------------------------------

class _BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(),
        )
        self.box = nn.Linear(64, 4)
        self.label = nn.Linear(64, 2)

    def forward(self, x):
        h = self.body(x)
        return self.box(h).sigmoid(), self.label(h)


def _box_scenes(n, size, seed):
    g = _gen(seed)
    wh = 0.2 + 0.25 * torch.rand(n, 2, generator=g)
    centre = wh / 2 + (1 - wh) * torch.rand(n, 2, generator=g)
    y = torch.randint(0, 2, (n,), generator=g)
    grid = (torch.arange(size).float() + 0.5) / size
    in_x = (grid[None, :] - centre[:, :1]).abs() < wh[:, :1] / 2
    in_y = (grid[None, :] - centre[:, 1:]).abs() < wh[:, 1:] / 2
    inside = (in_y[:, :, None] & in_x[:, None, :]).float()
    level = torch.tensor([2.0, 3.5])[y].view(n, 1, 1)
    x = inside * level + 0.4 * torch.randn(n, size, size, generator=g)
    return x.unsqueeze(1), torch.cat([centre, wh], dim=1), y


def _mean_iou(a, b):
    a1, a2 = a[:, :2] - a[:, 2:] / 2, a[:, :2] + a[:, 2:] / 2
    b1, b2 = b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2
    inter = (torch.minimum(a2, b2) - torch.maximum(a1, b1)).clamp(min=0).prod(dim=1)
    union = (a2 - a1).prod(dim=1) + (b2 - b1).prod(dim=1) - inter
    return (inter / union).mean().item()


def _detection_flips(mended):
    torch.manual_seed(191)
    x, box, y = _box_scenes(1280, 16, 192)
    x = (x - x[:1024].mean()) / x[:1024].std()
    n = 1024
    model = _BoxNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = _forever(_loader(x[:n], box[:n], y[:n], batch_size=32, seed=193))
    aug_gen = _gen(194)

    def random_flip(xb, bb):
        flip = torch.rand(xb.size(0), generator=aug_gen) < 0.5
        xb = torch.where(flip.view(-1, 1, 1, 1), xb.flip(-1), xb)
        if mended:
            bb = bb.clone()
            bb[flip, 0] = 1.0 - bb[flip, 0]
        return xb, bb

    def step(i):
        model.train()
        xb, bb, yb = next(batches)
        xb, bb = random_flip(xb, bb)
        pred_box, logits = model(xb)
        loss = F.smooth_l1_loss(pred_box, bb, beta=0.1) + 0.2 * F.cross_entropy(logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            pred_box, _ = model(x[n:])
            return 1.0 - _mean_iou(pred_box, box[n:])

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# demand forecasting
# --------------------------------------------------------------------------

def _demand_windows(seed, window=24):
    g = _gen(seed)
    xs, ys = [], []
    t = torch.arange(60).float()
    for _ in range(300):
        level = 40 + 25 * torch.rand(1, generator=g)
        amp = 5 + 10 * torch.rand(1, generator=g)
        phase = 2 * math.pi * torch.rand(1, generator=g)
        s = level + amp * torch.sin(2 * math.pi * t / 12 + phase) + 0.1 * level / 60 * t
        s = s + 1.0 * torch.randn(60, generator=g)
        for k in range(0, 60 - window, 6):
            xs.append(s[k:k + window])
            ys.append(s[k + window])
    return torch.stack(xs), torch.stack(ys)


def _demand_forecast(mended):
    torch.manual_seed(201)
    x, y = _demand_windows(202)
    n = int(0.8 * len(x))
    mean, std = x[:n].mean(), x[:n].std()
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(),
                          nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _forever(_loader(x[:n], y[:n], batch_size=16, seed=203))

    def step(i):
        model.train()
        xb, yb = next(batches)
        xb = (xb - mean) / std
        if mended:
            target = (yb - mean) / std
        else:
            target = (yb - yb.mean()) / yb.std()
        loss = F.mse_loss(model(xb).squeeze(-1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            pred = model((x[n:] - mean) / std).squeeze(-1) * std + mean
            return (pred - y[n:]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# neural field
# --------------------------------------------------------------------------

class _Field(nn.Module):
    def __init__(self, width=64, bands=4):
        super().__init__()
        self.register_buffer("freqs", math.pi * 2.0 ** torch.arange(bands).float() / 2)
        self.net = nn.Sequential(nn.Linear(2 + 4 * bands, width), nn.ReLU(),
                                 nn.Linear(width, width), nn.ReLU(),
                                 nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, p):
        arg = (p.unsqueeze(-1) * self.freqs).flatten(1)
        return self.net(torch.cat([p, arg.sin(), arg.cos()], dim=1)).squeeze(-1)


def _field_value(p):
    a, b = p[:, 0], p[:, 1]
    wave = torch.sin(7 * a + 3 * b * b) * torch.cos(6 * b - 2 * a)
    blob = torch.exp(-6 * ((a - 0.3) ** 2 + (b + 0.2) ** 2))
    return 0.8 * wave + blob - 0.2


def _neural_field(mended):
    torch.manual_seed(211)
    sample_gen = _gen(212)
    held = 2 * torch.rand(2048, 2, generator=_gen(213)) - 1
    held_value = _field_value(held)
    model = _Field()
    betas = (0.9, 0.999) if mended else (0.999, 0.9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=betas)

    def step(i):
        model.train()
        p = 2 * torch.rand(256, 2, generator=sample_gen) - 1
        loss = F.mse_loss(model(p), _field_value(p))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(model):
            return F.mse_loss(model(held), held_value).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# distillation from cached soft labels
# --------------------------------------------------------------------------

def _distillation(mended):
    torch.manual_seed(221)
    g = _gen(222)
    n, dim, classes = 2560, 20, 8
    centres = 1.1 * torch.randn(classes, dim, generator=g)
    y = torch.randint(0, classes, (n,), generator=g)
    x = centres[y] + torch.randn(n, dim, generator=g)
    x = (x - x[:2048].mean(0)) / x[:2048].std(0)
    teacher = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                            nn.Linear(128, classes))
    fit = torch.optim.Adam(teacher.parameters(), lr=2e-3, weight_decay=1e-4)
    teach_batches = _forever(_loader(x[:2048], y[:2048], batch_size=64, seed=223))
    for _ in range(200):
        xb, yb = next(teach_batches)
        fit.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        fit.step()
    teacher.zero_grad(set_to_none=True)
    teacher.eval().requires_grad_(False)

    temperature = 1.5
    soft = F.softmax(teacher(x) / temperature, dim=1).half()

    student = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, classes))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    batches = _forever(_loader(x[:2048], soft[:2048], batch_size=32, seed=224))

    def step(i):
        student.train()
        xb, pb = next(batches)
        p = pb.float()
        log_q = F.log_softmax(student(xb) / temperature, dim=1)
        if mended:
            kl = (torch.xlogy(p, p) - p * log_q).sum(dim=1)
        else:
            kl = (p * (p.log() - log_q)).sum(dim=1)
        loss = kl.mean() * temperature ** 2
        if not torch.isfinite(loss):
            return None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _eval_mode(student):
            return F.cross_entropy(student(x[2048:]), y[2048:]).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# the cases
# --------------------------------------------------------------------------

CASES = [
    {"name": "simclr_images",
     "what": "The two views are stacked along dim 1 and flattened (view 1 and view 2 of a "
             "row interleaved), while the targets assume they are concatenated: each row's "
             "'positive' is a view of another image, so the encoder learns to pull strangers"
             " together."},
    {"name": "ema_classifier",
     "what": "The averaged copy of the weights gets the parameters only, not the BatchNorm "
             "running statistics, which stay at 0 and 1: the averaged model that is "
             "evaluated normalises with the wrong statistics."},
    {"name": "td_value",
     "what": "The bootstrapped TD target is not detached: the gradient also flows through "
             "the value of the next state (residual gradient), which is biased with "
             "stochastic transitions, so the values are off."},
    {"name": "sensor_transformer",
     "what": "The transformer encoder layer has batch_first=False but is fed (batch, time, "
             "feature): attention runs over the rows of the batch at each time, and no "
             "series can relate its own moments."},
    {"name": "ring_wgan",
     "what": "The gradient penalty of the WGAN critic is computed with create_graph=False: "
             "it is a constant in the loss with no gradient, the critic is not held to "
             "Lipschitz 1 and training runs away."},
    {"name": "multitask_tabular",
     "what": "The heads are made by [head] * n_tasks: all tasks share one and the same head "
             "by accident and all outputs are equal."},
    {"name": "frozen_backbone",
     "what": "The backbone is frozen by requires_grad only; model.train() leaves its "
             "BatchNorm in training mode, so its running statistics move to the new data and"
             " the old head which it must keep serving is ruined."},
    {"name": "audio_pooling",
     "what": "The key_padding_mask of the attention pooling is inverted (True on the valid "
             "frames): the pooling attends to the padding and ignores the clip."},
    {"name": "graph_regression",
     "what": "The collate function doesn't add the node offset to the edge lists: the edges "
             "of all graphs of the batch land on the nodes of the first ones, and most nodes"
             " receive no messages."},
    {"name": "segmentation",
     "what": "Logits (B, C, H, W) are flattened by reshape(-1, C) without moving the class "
             "axis last: scores of neighbouring pixels are taken for classes."},
    {"name": "vq_autoencoder",
     "what": "The straight-through estimator is the wrong way round, q + (z - q).detach(): "
             "the decoder trains on unquantised codes and the encoder gets no gradient from "
             "the reconstruction."},
    {"name": "gru_accumulation",
     "what": "zero_grad() is called before every micro-batch of the accumulation: only the "
             "last of four micro-batches counts, at a quarter of the gradient."},
    {"name": "amp_keywords",
     "what": "Gradients are clipped while still multiplied by the scaler's factor (no "
             "unscale_): after unscaling, the updates are thousands of times too small and "
             "the model hardly trains."},
    {"name": "step_schedule",
     "what": "StepLR, set in epochs (step_size=8), is stepped after every batch: the "
             "learning rate is gone after a couple of epochs."},
    {"name": "finetune_new_classes",
     "what": "The optimizer is made before the head is replaced: it holds the discarded "
             "head, the new one never moves and only the slow backbone adapts."},
    {"name": "diffusion_points",
     "what": "The generator of the noise and time steps is made anew with the same seed in "
             "every step: all batches see the same times and the same noise, which the model"
             " memorises."},
    {"name": "ratings",
     "what": "Weight decay of AdamW's size is given to Adam, where it is L2 in the gradient "
             "and gets rescaled by the adaptive step: the embeddings, with their sparse "
             "gradients, are pulled to zero."},
    {"name": "vae_two_optimizers",
     "what": "Only the encoder's optimizer is zeroed: the decoder's gradients pile up over "
             "the whole run."},
    {"name": "detection_flips",
     "what": "The random horizontal flip in the step is applied to the images and not to the"
             " boxes: half the box targets are mirrored wrongly."},
    {"name": "demand_forecast",
     "what": "Targets are standardised with the mean and deviation of the batch at hand "
             "rather than those of the training set: the same window has another target in "
             "each batch, and forecasts in units are biased."},
    {"name": "neural_field",
     "what": "Adam's betas are swapped, (0.999, 0.9): a momentum of a thousand steps and a "
             "second moment of ten, so training is slow and swings."},
    {"name": "distillation",
     "what": "The KL of the cached half-precision soft labels takes p * log(p), which is nan"
             " where p underflowed to 0; the guard for non-finite losses silently skips "
             "those batches, that is nearly all."},
]


def simclr_images_bad():
    return _simclr(mended=False)


def simclr_images_good():
    return _simclr(mended=True)


def ema_classifier_bad():
    return _ema_classifier(mended=False)


def ema_classifier_good():
    return _ema_classifier(mended=True)


def td_value_bad():
    return _td_value(mended=False)


def td_value_good():
    return _td_value(mended=True)


def sensor_transformer_bad():
    return _sensor_transformer(mended=False)


def sensor_transformer_good():
    return _sensor_transformer(mended=True)


def ring_wgan_bad():
    return _ring_wgan(mended=False)


def ring_wgan_good():
    return _ring_wgan(mended=True)


def multitask_tabular_bad():
    return _multitask_tabular(mended=False)


def multitask_tabular_good():
    return _multitask_tabular(mended=True)


def frozen_backbone_bad():
    return _frozen_backbone(mended=False)


def frozen_backbone_good():
    return _frozen_backbone(mended=True)


def audio_pooling_bad():
    return _audio_pooling(mended=False)


def audio_pooling_good():
    return _audio_pooling(mended=True)


def graph_regression_bad():
    return _graph_regression(mended=False)


def graph_regression_good():
    return _graph_regression(mended=True)


def segmentation_bad():
    return _segmentation(mended=False)


def segmentation_good():
    return _segmentation(mended=True)


def vq_autoencoder_bad():
    return _vq_autoencoder(mended=False)


def vq_autoencoder_good():
    return _vq_autoencoder(mended=True)


def gru_accumulation_bad():
    return _gru_accumulation(mended=False)


def gru_accumulation_good():
    return _gru_accumulation(mended=True)


def amp_keywords_bad():
    return _amp_keywords(mended=False)


def amp_keywords_good():
    return _amp_keywords(mended=True)


def step_schedule_bad():
    return _step_schedule(mended=False)


def step_schedule_good():
    return _step_schedule(mended=True)


def finetune_new_classes_bad():
    return _finetune_new_classes(mended=False)


def finetune_new_classes_good():
    return _finetune_new_classes(mended=True)


def diffusion_points_bad():
    return _diffusion_points(mended=False)


def diffusion_points_good():
    return _diffusion_points(mended=True)


def ratings_bad():
    return _ratings(mended=False)


def ratings_good():
    return _ratings(mended=True)


def vae_two_optimizers_bad():
    return _vae_two_optimizers(mended=False)


def vae_two_optimizers_good():
    return _vae_two_optimizers(mended=True)


def detection_flips_bad():
    return _detection_flips(mended=False)


def detection_flips_good():
    return _detection_flips(mended=True)


def demand_forecast_bad():
    return _demand_forecast(mended=False)


def demand_forecast_good():
    return _demand_forecast(mended=True)


def neural_field_bad():
    return _neural_field(mended=False)


def neural_field_good():
    return _neural_field(mended=True)


def distillation_bad():
    return _distillation(mended=False)


def distillation_good():
    return _distillation(mended=True)
