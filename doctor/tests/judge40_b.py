import copy
import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


CASES = [
    # structure
    {"name": "shape_segmenter", "what": "The (B, C, H, W) logits are brought to (N, C) with reshape instead of permute+reshape, so each pixel's loss is computed from scores of other pixels and classes; the segmentation hardly learns."},
    {"name": "wave_lstm", "what": "The LSTM is built without batch_first while the batches are (B, T, F): the recurrence runs over the rows of the batch instead of over time, so a row's prediction depends on the rows before it and never sees its own history."},
    {"name": "bag_attention", "what": "The attention pooling over the instances of a bag takes its softmax over the batch axis (dim 0): bags compete with each other for weight and the pooled scale depends on the batch size."},
    {"name": "td_value", "what": "The bootstrapped TD target r + gamma V(s') carries gradient (no detach): residual-gradient learning, which converges to biased values in a stochastic chain."},
    {"name": "ema_image_net", "what": "The averaged copy of the classifier follows only the parameters, its BatchNorm running statistics stay at their initial values; the EMA model that is deployed is far off."},
    {"name": "vq_autoencoder", "what": "The straight-through estimator is the wrong way round (z_q + (z_e - z_q).detach()): the decoder is trained on the unquantised latents and the reconstruction gradient goes to the codebook, not to the encoder; decoding from codes is poor."},
    {"name": "teacher_student", "what": "Distiller.train() at each step also puts the frozen teacher in training mode: its soft targets come from dropout and batch statistics, and its running statistics move."},
    {"name": "graph_regressor", "what": "The collate function concatenates the edge lists of the graphs without adding the node offsets: all messages run inside the first graphs' nodes, the other graphs get none."},
    {"name": "fourier_field", "what": "The residual blocks of the neural field are made by [block] * depth: all are one module with shared weights, so the network has a fraction of the intended capacity."},
    {"name": "series_transformer", "what": "The autoregressive forecaster is trained on next values at all positions without the causal mask: each position sees its target in the input and learns to copy; forecasts from a prefix are poor."},
    {"name": "ring_gan", "what": "The running average of the critic's score on a monitoring batch is kept with its graph: every step's graph and activations stay alive and the memory grows with every step."},
    # loop and optimizer
    {"name": "spiky_gru", "what": "clip_grad_norm_ is called after zero_grad and before backward, so it clips nothing; the heavy-tailed targets give huge updates with SGD."},
    {"name": "multi_source_tabular", "what": "zero_grad stands inside the loop over the accumulated micro-batches (one per source), so only the last source's gradient reaches the optimizer step."},
    {"name": "rating_factors", "what": "torch.optim.Adam is given the weight_decay meant for AdamW (0.1): as an L2 term in the gradient it overwhelms the loss gradient and the embeddings are shrunk to nearly nothing."},
    {"name": "head_swap", "what": "The optimizer is made before the pretrained model's head is replaced: it holds the old head's parameters and the new head is never updated."},
    {"name": "tone_amp", "what": "With a GradScaler the gradients are clipped to norm 2 without unscale_ before: the scaled gradients are clipped, after unscaling hardly anything is left and SGD does not move."},
    {"name": "spectrum_autoencoder", "what": "The model's weights themselves are bfloat16 (model.to(bfloat16)) with a small learning rate: most updates are smaller than half the spacing and are rounded away."},
    {"name": "grid_field", "what": "The weight-decay parameter groups are made by name endings 'weight' and 'bias': the feature grid (a bare Parameter) falls in neither and is never optimized."},
    {"name": "ddpg_point", "what": "The critic's optimizer steps after the actor's backward: the gradient of the actor loss (-Q) is added to the critic's gradient and the critic is trained to raise Q at the policy's own actions."},
    {"name": "point_diffusion", "what": "The generator for time steps and noise is seeded anew in each step: every batch gets the same noise and the same time steps, the denoiser learns this one draw."},
    {"name": "box_regressor", "what": "The random horizontal flip is applied to the image only, the box target keeps its old x position; half of the targets contradict the image."},
    {"name": "view_contrast", "what": "The LambdaLR function returns the absolute learning rate instead of a factor: the rate is lr squared and the encoder hardly trains."},
]


@contextmanager
def _evaluating(*models):
    modes = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode


def _gen(seed):
    return torch.Generator().manual_seed(seed)


def _stream(tensors, batch_size, seed):
    loader = DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=True,
                        drop_last=True, generator=_gen(seed))
    while True:
        yield from loader


# ---------------------------------------------------------------- segmentation

class _SegNet(nn.Module):
    def __init__(self, classes=3, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=2, dilation=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=4, dilation=4, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, classes, 1))

    def forward(self, x):
        return self.net(x)


def _shapes(n, seed, size=20):
    g = _gen(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks = torch.zeros(n, size, size, dtype=torch.long)
    c = torch.randint(4, size - 4, (n, 2, 2), generator=g)
    r = torch.randint(3, 6, (n, 2), generator=g)
    for k in range(n):
        disc = (xx - c[k, 0, 0]) ** 2 + (yy - c[k, 0, 1]) ** 2 <= r[k, 0] ** 2
        square = ((xx - c[k, 1, 0]).abs() < r[k, 1]) & ((yy - c[k, 1, 1]).abs() < r[k, 1])
        masks[k][disc] = 1
        masks[k][square] = 2
    level = torch.tensor([-0.8, 0.4, 1.2])[masks]
    images = level + 0.5 * torch.randn(masks.shape, generator=g)
    return images.unsqueeze(1), masks


def _shape_segmenter(ok):
    torch.manual_seed(0)
    model = _SegNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    batches = _stream(_shapes(512, 1), 16, 2)
    val_x, val_y = _shapes(128, 3)

    def step(i):
        model.train()
        images, masks = next(batches)
        logits = model(images)
        classes = logits.shape[1]
        if ok:
            flat = logits.permute(0, 2, 3, 1).reshape(-1, classes)
        else:
            flat = logits.reshape(-1, classes)
        loss = F.cross_entropy(flat, masks.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = model(val_x).argmax(1)
        ious = []
        for c in range(3):
            inter = ((pred == c) & (val_y == c)).sum().item()
            union = ((pred == c) | (val_y == c)).sum().item()
            ious.append(inter / max(union, 1))
        return 1.0 - sum(ious) / 3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------ time series classifier

class _WaveLSTM(nn.Module):
    def __init__(self, features, hidden, classes, batch_first):
        super().__init__()
        self.rnn = nn.LSTM(features, hidden, batch_first=batch_first)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def _waves(n, seed, length=30):
    g = _gen(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    freq = torch.tensor([0.25, 0.45, 0.7, 1.0])[y]
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    t = torch.arange(length).float()
    base = freq[:, None] * t + phase
    x = torch.stack([base.sin(), base.cos()], -1) + 0.3 * torch.randn(n, length, 2, generator=g)
    return x, y


def _wave_lstm(ok):
    torch.manual_seed(10)
    model = _WaveLSTM(2, 32, 4, batch_first=ok)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    batches = _stream(_waves(1024, 11), 32, 12)
    val_x, val_y = _waves(256, 13)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------- multiple-instance learning

class _BagNet(nn.Module):
    def __init__(self, features, hidden, dim):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.score = nn.Sequential(nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, 1))
        self.head = nn.Linear(hidden, 1)
        self.dim = dim

    def forward(self, bags):
        h = self.encoder(bags)
        weights = torch.softmax(self.score(h), dim=self.dim)
        return self.head((weights * h).sum(1)).squeeze(-1)


def _bags(n, seed, size=12, features=8):
    g = _gen(seed)
    x = torch.randn(n, size, features, generator=g)
    y = (torch.rand(n, generator=g) < 0.5).float()
    key = torch.randint(0, size, (n,), generator=g)
    shift = torch.tensor([1.8, -1.8, 1.8, 0, 0, 0, 0, 0])
    x[torch.arange(n), key] += y[:, None] * shift
    return x, y


def _bag_attention(ok):
    torch.manual_seed(20)
    model = _BagNet(8, 32, dim=1 if ok else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    batches = _stream(_bags(4096, 21), 32, 22)
    val_x, val_y = _bags(512, 23)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.binary_cross_entropy_with_logits(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------- temporal differences

def _td_value(ok):
    torch.manual_seed(30)
    g = _gen(31)
    states, gamma = 24, 0.9
    angles = 2 * math.pi * torch.arange(states).float() / states
    feats = torch.cat([torch.stack([(k * angles).sin(), (k * angles).cos()], -1) for k in range(1, 5)], -1)
    trans = torch.softmax(1.5 * torch.randn(states, states, generator=g), -1)
    reward = torch.randn(states, generator=g)
    truth = torch.linalg.solve(torch.eye(states) - gamma * trans, reward)

    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        s = torch.randint(0, states, (64,), generator=g)
        s2 = torch.multinomial(trans[s], 1, generator=g).squeeze(1)
        value = model(feats[s]).squeeze(-1)
        target = reward[s] + gamma * model(feats[s2]).squeeze(-1)
        if ok:
            target = target.detach()
        loss = F.mse_loss(value, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(feats).squeeze(-1) - truth).pow(2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------- image classifier with EMA

class _SmallConvNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.features(x))


def _textures(n, seed, classes=6, size=14, noise=0.7):
    g = _gen(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    angle = math.pi * y.float() / classes + 0.1 * torch.randn(n, generator=g)
    phase = 2 * math.pi * torch.rand(n, generator=g)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    wave = torch.sin(1.3 * (angle.cos()[:, None, None] * xx + angle.sin()[:, None, None] * yy) + phase[:, None, None])
    x = wave + noise * torch.randn(n, size, size, generator=g)
    return (x / x.std()).unsqueeze(1), y


def _ema_image_net(ok):
    torch.manual_seed(40)
    model = _SmallConvNet(6)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    decay = 0.98
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    batches = _stream(_textures(1024, 41), 32, 42)
    val_x, val_y = _textures(256, 43)

    @torch.no_grad()
    def update_ema():
        for p_ema, p in zip(ema.parameters(), model.parameters()):
            p_ema.lerp_(p, 1 - decay)
        if ok:
            for b_ema, b in zip(ema.buffers(), model.buffers()):
                b_ema.copy_(b)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema()
        return loss.item()

    def probe():
        with _evaluating(ema):
            return F.cross_entropy(ema(val_x), val_y).item()

    return {"model": {"model": model, "ema": ema}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------- VQ-VAE

class _VQAutoencoder(nn.Module):
    def __init__(self, features=16, slots=4, dim=4, codes=16, swap=False):
        super().__init__()
        self.slots, self.dim, self.swap = slots, dim, swap
        self.encoder = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, slots * dim))
        self.decoder = nn.Sequential(nn.Linear(slots * dim, 64), nn.ReLU(), nn.Linear(64, features))
        self.codebook = nn.Embedding(codes, dim)
        nn.init.normal_(self.codebook.weight, std=0.5)

    def assign(self, z):
        with torch.no_grad():
            return torch.cdist(z.reshape(-1, self.dim), self.codebook.weight).argmin(-1).view(z.shape[:2])

    def decode(self, idx):
        return self.decoder(self.codebook(idx).flatten(1))

    def forward(self, x):
        z_e = self.encoder(x).view(-1, self.slots, self.dim)
        z_q = self.codebook(self.assign(z_e))
        codebook_loss = F.mse_loss(z_q, z_e.detach())
        commit_loss = F.mse_loss(z_e, z_q.detach())
        if self.swap:
            z = z_q + (z_e - z_q).detach()
        else:
            z = z_e + (z_q - z_e).detach()
        return self.decoder(z.flatten(1)), codebook_loss + 0.25 * commit_loss


def _curves(n, seed, features=16):
    g = _gen(seed)
    t = torch.linspace(0, 1, features)
    a = torch.rand(n, 1, generator=g) + 0.5
    f = torch.randint(1, 4, (n, 1), generator=g).float()
    p = 2 * math.pi * torch.rand(n, 1, generator=g)
    trend = torch.randn(n, 1, generator=g)
    x = a * torch.sin(2 * math.pi * f * t + p) + trend * (t - 0.5) + 0.05 * torch.randn(n, features, generator=g)
    return x / x.std()


def _vq_autoencoder(ok):
    torch.manual_seed(50)
    model = _VQAutoencoder(swap=not ok)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _stream((_curves(2048, 51),), 64, 52)
    val_x = _curves(256, 53)

    def step(i):
        model.train()
        (x,) = next(batches)
        recon, vq_loss = model(x)
        loss = F.mse_loss(recon, x) + vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            codes = model.assign(model.encoder(val_x).view(-1, model.slots, model.dim))
            return F.mse_loss(model.decode(codes), val_x).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# -------------------------------------------------------------- distillation

class _Distiller(nn.Module):
    def __init__(self, teacher, student, temperature):
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.temperature = temperature

    def forward(self, x):
        with torch.no_grad():
            soft = F.log_softmax(self.teacher(x) / self.temperature, -1)
        logits = F.log_softmax(self.student(x) / self.temperature, -1)
        return self.temperature ** 2 * F.kl_div(logits, soft, log_target=True, reduction="batchmean")


def _clusters(n, seed, features=12, classes=6):
    centers = torch.randn(classes * 3, features, generator=_gen(999))
    g = _gen(seed)
    k = torch.randint(0, classes * 3, (n,), generator=g)
    x = centers[k] + 0.6 * torch.randn(n, features, generator=g)
    return x / 1.15, k % classes


def _teacher_student(ok):
    torch.manual_seed(60)
    teacher = nn.Sequential(
        nn.Linear(12, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.4),
        nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.4), nn.Linear(128, 6))
    pretrain = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    labelled = _stream(_clusters(4096, 61), 64, 62)
    for _ in range(300):
        x, y = next(labelled)
        pretrain.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        pretrain.step()
    teacher.zero_grad()
    teacher.requires_grad_(False)

    student = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 6))
    model = _Distiller(teacher, student, temperature=2.0)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    batches = _stream((_clusters(4096, 63)[0],), 16, 64)
    val_x, val_y = _clusters(512, 65)

    def step(i):
        model.train()
        if ok:
            model.teacher.eval()
        (x,) = next(batches)
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model.student(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------- graphs

class _GraphNet(nn.Module):
    def __init__(self, features=4, hidden=32):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * features, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.update = nn.Sequential(nn.Linear(features + hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.readout = nn.Sequential(nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x, edges, graph, count):
        src, dst = edges
        m = self.message(torch.cat([x[src], x[dst]], -1))
        agg = torch.zeros(x.shape[0], m.shape[1]).index_add(0, dst, m)
        deg = torch.zeros(x.shape[0]).index_add(0, dst, torch.ones(dst.shape[0])).clamp(min=1)
        h = self.update(torch.cat([x, agg / deg[:, None]], -1))
        size = torch.zeros(count).index_add(0, graph, torch.ones(graph.shape[0]))
        pooled = torch.zeros(count, h.shape[1]).index_add(0, graph, h) / size[:, None]
        return self.readout(pooled).squeeze(-1)


def _graphs(n, seed):
    g = _gen(seed)
    items = []
    for _ in range(n):
        nodes = int(torch.randint(8, 13, (1,), generator=g))
        x = torch.randn(nodes, 4, generator=g)
        pairs = torch.combinations(torch.arange(nodes), 2)
        pairs = pairs[torch.randperm(len(pairs), generator=g)[:nodes * 3 // 2]].t()
        edges = torch.cat([pairs, pairs.flip(0)], 1)
        y = (x[edges[0], 0] * x[edges[1], 0]).mean() * 2.5 + 0.5 * x[:, 1].mean()
        items.append((x, edges, y))
    return items


def _graph_regressor(ok):
    torch.manual_seed(70)

    def collate(items):
        xs, edges, graph, ys = [], [], [], []
        offset = 0
        for k, (x, e, y) in enumerate(items):
            xs.append(x)
            edges.append(e + offset if ok else e)
            graph.append(torch.full((x.shape[0],), k))
            ys.append(y)
            offset += x.shape[0]
        return torch.cat(xs), torch.cat(edges, 1), torch.cat(graph), torch.stack(ys)

    model = _GraphNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(_graphs(1024, 71), batch_size=32, shuffle=True, drop_last=True,
                        collate_fn=collate, generator=_gen(72))
    val = list(DataLoader(_graphs(256, 73), batch_size=32, collate_fn=collate))

    def stream():
        while True:
            yield from loader

    batches = stream()

    def step(i):
        model.train()
        x, edges, graph, y = next(batches)
        loss = F.mse_loss(model(x, edges, graph, y.shape[0]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            errs = [F.mse_loss(model(x, e, gr, y.shape[0]), y).item() for x, e, gr, y in val]
        return sum(errs) / len(errs)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# -------------------------------------------------------------- neural fields

class _FieldBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, h):
        return h + F.gelu(self.fc(self.norm(h)))


class _FourierField(nn.Module):
    def __init__(self, bands=16, width=48, depth=5, shared=False):
        super().__init__()
        self.register_buffer("freqs", 4.0 * torch.randn(2, bands))
        self.inp = nn.Linear(2 * bands, width)
        if shared:
            self.blocks = nn.ModuleList([_FieldBlock(width)] * depth)
        else:
            self.blocks = nn.ModuleList([_FieldBlock(width) for _ in range(depth)])
        self.out = nn.Linear(width, 1)

    def forward(self, xy):
        p = xy @ self.freqs
        h = self.inp(torch.cat([p.sin(), p.cos()], -1))
        for block in self.blocks:
            h = block(h)
        return self.out(h).squeeze(-1)


def _scene(xy):
    x, y = xy[:, 0], xy[:, 1]
    v = torch.sin(9 * x * y + 4 * x) * torch.cos(7 * y - 5 * x * x)
    v = v + 0.7 * torch.tanh(12 * ((x - 0.2) ** 2 + (y + 0.1) ** 2 - 0.25)) + 0.5 * torch.sin(14 * (x + y))
    return v


def _fourier_field(ok):
    torch.manual_seed(80)
    g = _gen(81)
    model = _FourierField(shared=not ok)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    val_xy = 2 * torch.rand(2048, 2, generator=_gen(83)) - 1
    val_v = _scene(val_xy)

    def step(i):
        model.train()
        xy = 2 * torch.rand(512, 2, generator=g) - 1
        loss = F.mse_loss(model(xy), _scene(xy))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(val_xy), val_v).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- forecasting

class _Forecaster(nn.Module):
    def __init__(self, length, width=32, causal=True):
        super().__init__()
        self.inp = nn.Linear(1, width)
        self.pos = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, 1)
        self.causal = causal

    def forward(self, x):
        length = x.shape[1]
        h = self.inp(x.unsqueeze(-1)) + self.pos[:length]
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            h = self.encoder(h, mask=mask, is_causal=True)
        else:
            h = self.encoder(h)
        return self.out(h).squeeze(-1)


def _series(n, seed, length=25):
    g = _gen(seed)
    f = 0.3 + 0.7 * torch.rand(n, 1, generator=g)
    p = 2 * math.pi * torch.rand(n, 1, generator=g)
    t = torch.arange(length).float()
    return 1.4 * torch.sin(f * t + p) + 0.1 * torch.randn(n, length, generator=g)


def _series_transformer(ok):
    torch.manual_seed(90)
    model = _Forecaster(24, causal=ok)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    batches = _stream((_series(2048, 91),), 32, 92)
    val = _series(256, 93)

    def step(i):
        model.train()
        (x,) = next(batches)
        loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            errs = [F.mse_loss(model(val[:, :k])[:, -1], val[:, k]).item() for k in (8, 12, 16, 20)]
        return sum(errs) / len(errs)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------------ GAN

def _ring(n, g):
    a = 2 * math.pi * torch.randint(0, 8, (n,), generator=g).float() / 8
    return torch.stack([a.cos(), a.sin()], -1) + 0.05 * torch.randn(n, 2, generator=g)


def _live_nodes(values):
    seen, todo = set(), [v.grad_fn for v in values if torch.is_tensor(v) and v.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo.extend(f for f, _ in node.next_functions if f is not None)
    return len(seen)


def _ring_gan(ok):
    torch.manual_seed(100)
    g = _gen(101)
    gen = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    disc = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    monitor_x = _ring(128, _gen(102))
    stats = {"real_score": torch.zeros(())}

    def step(i):
        real = _ring(128, g)
        fake = gen(torch.randn(128, 8, generator=g))
        d_real, d_fake = disc(real), disc(fake.detach())
        d_loss = (F.binary_cross_entropy_with_logits(d_real, torch.ones_like(d_real))
                  + F.binary_cross_entropy_with_logits(d_fake, torch.zeros_like(d_fake)))
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()

        score = disc(fake)
        g_loss = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()

        real_score = disc(monitor_x).sigmoid().mean()
        if ok:
            real_score = real_score.detach()
        stats["real_score"] = 0.99 * stats["real_score"] + 0.01 * real_score
        return d_loss.item(), g_loss.item()

    def probe():
        return 1.0 + _live_nodes(stats.values())

    return {"model": {"generator": gen, "discriminator": disc}, "optimizer": [opt_g, opt_d],
            "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------- RNN regression

class _GRURegressor(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.head(h[-1]).squeeze(-1)


def _spiky(n, seed, spikes, length=12):
    g = _gen(seed)
    x = torch.randn(n, length, 3, generator=g)
    decay = 0.75 ** torch.arange(length - 1, -1, -1).float()
    y = (x[..., 0] * decay).sum(1) * 0.5 + 0.5 * torch.tanh(x[:, -1, 1] * x[:, -1, 2])
    if spikes:
        hit = torch.rand(n, generator=g) < 0.02
        y = y + hit * 10.0 * torch.randn(n, generator=g)
    return x, y


def _spiky_gru(ok):
    torch.manual_seed(110)
    model = _GRURegressor(3, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = _stream(_spiky(2048, 111, spikes=True), 32, 112)
    val_x, val_y = _spiky(512, 113, spikes=False)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        if not ok:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss.backward()
        if ok:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------- tabular

def _sources(n, seed):
    g = _gen(seed)
    out = []
    for k in range(4):
        x = torch.randn(n, 10, generator=g)
        x[:, 8] = math.cos(k * math.pi / 2)
        x[:, 9] = math.sin(k * math.pi / 2)
        y = x[:, k] * 0.8 + torch.sin(2 * x[:, (k + 1) % 4]) - 0.4 * x[:, 5] + 0.1 * torch.randn(n, generator=g)
        out.append((x, y))
    return out


def _multi_source_tabular(ok):
    torch.manual_seed(120)
    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    streams = [_stream(s, 16, 121 + k) for k, s in enumerate(_sources(1024, 125))]
    val = _sources(256, 126)

    def step(i):
        model.train()
        if ok:
            optimizer.zero_grad()
        total = 0.0
        for batches in streams:
            if not ok:
                optimizer.zero_grad()
            x, y = next(batches)
            loss = F.mse_loss(model(x).squeeze(-1), y) / len(streams)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        with _evaluating(model):
            errs = [F.mse_loss(model(x).squeeze(-1), y).item() for x, y in val]
        return sum(errs) / len(errs)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------- recommendation

class _Factors(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.1)
        for e in (self.user_bias, self.item_bias):
            nn.init.zeros_(e.weight)

    def forward(self, u, v):
        dot = (self.user(u) * self.item(v)).sum(-1)
        return dot + self.user_bias(u).squeeze(-1) + self.item_bias(v).squeeze(-1)


def _ratings(seed, users=80, items=60, dim=3):
    g = _gen(seed)
    pu, qi = torch.randn(users, dim, generator=g), torch.randn(items, dim, generator=g)
    bu, bi = 0.5 * torch.randn(users, generator=g), 0.5 * torch.randn(items, generator=g)
    r = pu @ qi.t() / math.sqrt(dim) + bu[:, None] + bi + 0.2 * torch.randn(users, items, generator=g)
    u, v = torch.meshgrid(torch.arange(users), torch.arange(items), indexing="ij")
    u, v, r = u.reshape(-1), v.reshape(-1), r.reshape(-1)
    order = torch.randperm(len(r), generator=g)
    train, val = order[:3600], order[3600:]
    r = r - r[train].mean()
    return (u[train], v[train], r[train]), (u[val], v[val], r[val])


def _rating_factors(ok):
    torch.manual_seed(130)
    train, (val_u, val_v, val_r) = _ratings(131)
    model = _Factors(80, 60, 4)
    if ok:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=0.1)
    batches = _stream(train, 128, 132)

    def step(i):
        model.train()
        u, v, r = next(batches)
        loss = F.mse_loss(model(u, v), r)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(val_u, val_v), val_r).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------ transfer learning

def _head_swap(ok):
    torch.manual_seed(140)
    model = _SmallConvNet(6)
    pretrain = torch.optim.Adam(model.parameters(), lr=3e-3)
    source = _stream(_textures(1024, 141), 32, 142)
    for _ in range(120):
        x, y = next(source)
        pretrain.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pretrain.step()
    model.zero_grad()

    def make_optimizer():
        return torch.optim.AdamW([
            {"params": model.features.parameters(), "lr": 1e-4},
            {"params": model.head.parameters(), "lr": 3e-3},
        ], weight_decay=1e-2)

    if ok:
        model.head = nn.Linear(32, 10)
        optimizer = make_optimizer()
    else:
        optimizer = make_optimizer()
        model.head = nn.Linear(32, 10)

    batches = _stream(_textures(1024, 143, classes=10, noise=0.5), 32, 144)
    val_x, val_y = _textures(256, 145, classes=10, noise=0.5)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------- audio

class _ToneNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.register_buffer("window", torch.hann_window(64), persistent=False)
        self.conv = nn.Sequential(
            nn.Conv1d(33, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv1d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def spectrogram(self, wave):
        spec = torch.stft(wave, 64, hop_length=32, window=self.window, return_complex=True).abs()
        return torch.log(spec + 1e-2)

    def forward(self, wave):
        with torch.autocast("cpu", enabled=False):
            spec = self.spectrogram(wave.float())
            spec = (spec - spec.mean((1, 2), keepdim=True)) / (spec.std((1, 2), keepdim=True) + 1e-5)
        return self.head(self.conv(spec).mean(-1))


def _tones(n, seed, classes=5, length=512):
    g = _gen(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    f = 0.3 + 0.25 * y.float() + 0.04 * torch.randn(n, generator=g)
    t = torch.arange(length).float()
    p = 2 * math.pi * torch.rand(n, 1, generator=g)
    f2 = 0.3 + 2.2 * torch.rand(n, 1, generator=g)
    x = torch.sin(f[:, None] * t + p) + 0.6 * torch.sin(f2 * t) + 0.8 * torch.randn(n, length, generator=g)
    return x, y


def _tone_amp(ok):
    torch.manual_seed(150)
    model = _ToneNet(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
    batches = _stream(_tones(1024, 151), 16, 152)
    val_x, val_y = _tones(256, 153)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        if ok:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _spectra(n, seed, features=32):
    g = _gen(seed)
    t = torch.arange(features).float()
    x = torch.zeros(n, features)
    for _ in range(2):
        c = 4 + 24 * torch.rand(n, 1, generator=g)
        w = 1.5 + 2 * torch.rand(n, 1, generator=g)
        a = 0.5 + torch.rand(n, 1, generator=g)
        x = x + a * torch.exp(-0.5 * ((t - c) / w) ** 2)
    x = x + 0.02 * torch.randn(n, features, generator=g)
    return (x - 0.37) / 0.43


def _spectrum_autoencoder(ok):
    torch.manual_seed(160)
    model = nn.Sequential(
        nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 6), nn.Linear(6, 96), nn.GELU(), nn.Linear(96, 32))
    if not ok:
        model = model.to(torch.bfloat16)
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    batches = _stream((_spectra(4096, 161),), 64, 162)
    val_x = _spectra(512, 163)

    def step(i):
        model.train()
        (x,) = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            recon = model(x.to(dtype))
        loss = F.mse_loss(recon.float(), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model), torch.autocast("cpu", dtype=torch.bfloat16):
            recon = model(val_x.to(dtype))
        return F.mse_loss(recon.float(), val_x).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _GridField(nn.Module):
    def __init__(self, size=24, channels=8, hidden=24):
        super().__init__()
        self.grid = nn.Parameter(0.1 * torch.randn(1, channels, size, size))
        self.mlp = nn.Sequential(nn.Linear(channels + 2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, 1))

    def forward(self, xy):
        f = F.grid_sample(self.grid, xy.view(1, -1, 1, 2), align_corners=True)
        f = f[0, :, :, 0].t()
        return self.mlp(torch.cat([f, xy], -1)).squeeze(-1)


def _grid_field(ok):
    torch.manual_seed(170)
    g = _gen(171)
    model = _GridField()
    named = list(model.named_parameters())
    decay = [p for n, p in named if n.endswith("weight")]
    if ok:
        no_decay = [p for n, p in named if not n.endswith("weight")]
    else:
        no_decay = [p for n, p in named if n.endswith("bias")]
    optimizer = torch.optim.AdamW([
        {"params": decay, "weight_decay": 1e-3},
        {"params": no_decay, "weight_decay": 0.0},
    ], lr=5e-3)
    val_xy = 2 * torch.rand(2048, 2, generator=_gen(173)) - 1
    val_v = _scene(val_xy)

    def step(i):
        model.train()
        xy = 2 * torch.rand(512, 2, generator=g) - 1
        loss = F.mse_loss(model(xy), _scene(xy))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(val_xy), val_v).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- actor critic

class _Critic(nn.Module):
    def __init__(self, states, actions, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(states + actions, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, 1))

    def forward(self, s, a):
        return self.net(torch.cat([s, a], -1)).squeeze(-1)


def _move(s, a):
    pos, vel = s[:, :1], s[:, 1:]
    vel = 0.8 * vel + 0.3 * a
    pos = (pos + 0.5 * vel).clamp(-2, 2)
    reward = -0.25 * pos.squeeze(1) ** 2 - 0.02 * a.squeeze(1) ** 2
    return torch.cat([pos, vel], -1), reward


def _ddpg_point(ok):
    torch.manual_seed(180)
    g = _gen(181)
    gamma, tau = 0.9, 0.01
    actor = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Tanh())
    critic = _Critic(2, 1)
    actor_target = copy.deepcopy(actor).requires_grad_(False)
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=5e-4)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
    env_s = torch.rand(4000, 2, generator=g) * torch.tensor([4.0, 2.0]) - torch.tensor([2.0, 1.0])
    env_a = 2 * torch.rand(4000, 1, generator=g) - 1
    env_s2, env_r = _move(env_s, env_a)
    starts = torch.rand(128, 2, generator=_gen(182)) * torch.tensor([4.0, 2.0]) - torch.tensor([2.0, 1.0])

    @torch.no_grad()
    def soft_update(target, source):
        for t, p in zip(target.parameters(), source.parameters()):
            t.lerp_(p, tau)

    def step(i):
        k = torch.randint(0, 4000, (64,), generator=g)
        s, a, r, s2 = env_s[k], env_a[k], env_r[k], env_s2[k]
        with torch.no_grad():
            target = r + gamma * critic_target(s2, actor_target(s2))
        critic_loss = F.mse_loss(critic(s, a), target)
        critic_opt.zero_grad()
        critic_loss.backward()
        if ok:
            critic_opt.step()

        actor_loss = -critic(s, actor(s)).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()
        if not ok:
            critic_opt.step()

        soft_update(critic_target, critic)
        soft_update(actor_target, actor)
        return critic_loss.item(), actor_loss.item()

    def probe():
        with _evaluating(actor, critic):
            s, total, first = starts, torch.zeros(128), critic(starts, actor(starts))
            for t in range(60):
                s, r = _move(s, actor(s))
                total = total + gamma ** t * r
            return (first - total).abs().mean().item()

    return {"model": {"actor": actor, "critic": critic, "actor_target": actor_target, "critic_target": critic_target},
            "optimizer": [actor_opt, critic_opt], "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------- diffusion

class _Denoiser(nn.Module):
    def __init__(self, hidden=96, bands=8):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.linspace(0, 6, bands))
        self.net = nn.Sequential(nn.Linear(2 + 2 * bands, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
                                 nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2))

    def forward(self, x, t):
        e = t[:, None] * self.freqs
        return self.net(torch.cat([x, e.sin(), e.cos()], -1))


def _point_diffusion(ok):
    torch.manual_seed(190)
    model = _Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
    levels = 100
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.1, levels), 0)
    data = _ring(4096, _gen(191))
    data = data / data.std()
    batches = _stream((data,), 64, 192)
    val_x = _ring(1024, _gen(193))
    val_x = val_x / val_x.std()
    noise_gen = _gen(194)

    def denoising_loss(x, g):
        t = torch.randint(0, levels, (x.shape[0],), generator=g)
        noise = torch.randn(x.shape, generator=g)
        ab = alpha_bar[t][:, None]
        pred = model(ab.sqrt() * x + (1 - ab).sqrt() * noise, t.float() / levels)
        return F.mse_loss(pred, noise)

    def step(i):
        model.train()
        (x,) = next(batches)
        loss = denoising_loss(x, noise_gen if ok else _gen(194))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return denoising_loss(val_x, _gen(195)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------------- detection

class _BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.box = nn.Sequential(nn.Linear(24 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.box(self.backbone(x)).sigmoid()


def _boxes(n, seed, size=24):
    g = _gen(seed)
    wh = torch.randint(5, 11, (n, 2), generator=g)
    x0 = (torch.rand(n, 2, generator=g) * (size - wh + 1)).long()
    pix = torch.arange(size)
    inx = (pix >= x0[:, :1]) & (pix < x0[:, :1] + wh[:, :1])
    iny = (pix >= x0[:, 1:]) & (pix < x0[:, 1:] + wh[:, 1:])
    inside = (iny[:, :, None] & inx[:, None, :]).float()
    images = (inside - 0.1) / 0.3 + 0.5 * torch.randn(n, size, size, generator=g)
    boxes = torch.cat([x0 + wh / 2, wh.float()], -1) / size
    return images.unsqueeze(1), boxes


def _iou(a, b):
    al, ah = a[:, :2] - a[:, 2:] / 2, a[:, :2] + a[:, 2:] / 2
    bl, bh = b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2
    inter = (torch.minimum(ah, bh) - torch.maximum(al, bl)).clamp(min=0).prod(-1)
    return inter / (a[:, 2:].prod(-1) + b[:, 2:].prod(-1) - inter)


def _box_regressor(ok):
    torch.manual_seed(200)
    g = _gen(204)
    model = _BoxNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    batches = _stream(_boxes(1024, 201), 32, 202)
    val_x, val_y = _boxes(256, 203)

    def augment(images, boxes):
        flip = torch.rand(images.shape[0], generator=g) < 0.5
        images = torch.where(flip[:, None, None, None], images.flip(-1), images)
        if ok:
            cx = torch.where(flip, 1 - boxes[:, 0], boxes[:, 0])
            boxes = torch.cat([cx[:, None], boxes[:, 1:]], -1)
        return images, boxes

    def step(i):
        model.train()
        images, boxes = augment(*next(batches))
        loss = F.smooth_l1_loss(model(images), boxes, beta=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return 1.0 - _iou(model(val_x), val_y).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------- contrastive

class _ContrastNet(nn.Module):
    def __init__(self, features, hidden=64, dim=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
                                     nn.Linear(hidden, hidden))
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=-1)


def _nt_xent(a, b, temperature=0.2):
    z = torch.cat([a, b])
    n = a.shape[0]
    sim = z @ z.t() / temperature
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


def _view_contrast(ok):
    torch.manual_seed(210)
    g = _gen(211)
    features, base_lr, warmup, total = 24, 2e-3, 50, 1000
    mix = torch.randn(6, features, generator=_gen(212)) / math.sqrt(6)

    def samples(n, gen):
        return torch.tanh(torch.randn(n, 6, generator=gen) @ mix) / 0.6

    def view(x, gen):
        keep = (torch.rand(x.shape, generator=gen) > 0.25).float()
        return (x + 0.3 * torch.randn(x.shape, generator=gen)) * keep

    batches = _stream((samples(4096, _gen(213)),), 64, 214)
    val = samples(256, _gen(215))
    val_gen = _gen(216)
    val_a, val_b = view(val, val_gen), view(val, val_gen)

    model = _ContrastNet(features)
    optimizer = torch.optim.AdamW(model.parameters(), lr=base_lr, weight_decay=1e-2)

    def rate(k):
        warm = min(1.0, (k + 1) / warmup)
        factor = warm * (0.1 + 0.45 * (1 + math.cos(math.pi * min(k / total, 1.0))))
        return factor if ok else base_lr * factor

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(i):
        model.train()
        (x,) = next(batches)
        loss = _nt_xent(model(view(x, g)), model(view(x, g)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return _nt_xent(model(val_a), model(val_b)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def shape_segmenter_bad():
    return _shape_segmenter(False)


def shape_segmenter_good():
    return _shape_segmenter(True)


def wave_lstm_bad():
    return _wave_lstm(False)


def wave_lstm_good():
    return _wave_lstm(True)


def bag_attention_bad():
    return _bag_attention(False)


def bag_attention_good():
    return _bag_attention(True)


def td_value_bad():
    return _td_value(False)


def td_value_good():
    return _td_value(True)


def ema_image_net_bad():
    return _ema_image_net(False)


def ema_image_net_good():
    return _ema_image_net(True)


def vq_autoencoder_bad():
    return _vq_autoencoder(False)


def vq_autoencoder_good():
    return _vq_autoencoder(True)


def teacher_student_bad():
    return _teacher_student(False)


def teacher_student_good():
    return _teacher_student(True)


def graph_regressor_bad():
    return _graph_regressor(False)


def graph_regressor_good():
    return _graph_regressor(True)


def fourier_field_bad():
    return _fourier_field(False)


def fourier_field_good():
    return _fourier_field(True)


def series_transformer_bad():
    return _series_transformer(False)


def series_transformer_good():
    return _series_transformer(True)


def ring_gan_bad():
    return _ring_gan(False)


def ring_gan_good():
    return _ring_gan(True)


def spiky_gru_bad():
    return _spiky_gru(False)


def spiky_gru_good():
    return _spiky_gru(True)


def multi_source_tabular_bad():
    return _multi_source_tabular(False)


def multi_source_tabular_good():
    return _multi_source_tabular(True)


def rating_factors_bad():
    return _rating_factors(False)


def rating_factors_good():
    return _rating_factors(True)


def head_swap_bad():
    return _head_swap(False)


def head_swap_good():
    return _head_swap(True)


def tone_amp_bad():
    return _tone_amp(False)


def tone_amp_good():
    return _tone_amp(True)


def spectrum_autoencoder_bad():
    return _spectrum_autoencoder(False)


def spectrum_autoencoder_good():
    return _spectrum_autoencoder(True)


def grid_field_bad():
    return _grid_field(False)


def grid_field_good():
    return _grid_field(True)


def ddpg_point_bad():
    return _ddpg_point(False)


def ddpg_point_good():
    return _ddpg_point(True)


def point_diffusion_bad():
    return _point_diffusion(False)


def point_diffusion_good():
    return _point_diffusion(True)


def box_regressor_bad():
    return _box_regressor(False)


def box_regressor_good():
    return _box_regressor(True)


def view_contrast_bad():
    return _view_contrast(False)


def view_contrast_good():
    return _view_contrast(True)
