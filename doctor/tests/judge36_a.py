import contextlib
import copy
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


# ---------------------------------------------------------------- helpers

def _forever(loader):
    while True:
        yield from loader


def _batches(*tensors, batch_size=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    loader = DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=True,
                        drop_last=True, generator=g)
    return _forever(loader)


@contextlib.contextmanager
def _evaluating(*modules):
    flags = [(m, m.training) for top in modules for m in top.modules()]
    for top in modules:
        top.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag


def _glyphs(n, classes, size=12, noise=0.5, max_shift=2, seed=0, template_seed=100):
    gt = torch.Generator().manual_seed(template_seed)
    coarse = torch.randn(classes, 1, size // 2, size // 2, generator=gt)
    templates = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)[:, 0]
    templates = (templates - templates.mean((1, 2), keepdim=True)) / templates.std((1, 2), keepdim=True)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    shift = torch.randint(-max_shift, max_shift + 1, (n, 2), generator=g)
    gain = 0.7 + 0.6 * torch.rand(n, 1, 1, generator=g)
    x = torch.stack([torch.roll(templates[c], (int(a), int(b)), (0, 1)) for c, (a, b) in zip(y.tolist(), shift)])
    x = gain * x + noise * torch.randn(n, size, size, generator=g)
    return (x / math.sqrt(1.03 + noise ** 2)).unsqueeze(1), y


# ---- image classification with mixup

class _MixupNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        )
        self.head = nn.Linear(32 * 6 * 6, classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def _image_mixup(bad):
    torch.manual_seed(0)
    x, y = _glyphs(1500, 10, noise=0.8, seed=1)
    xt, yt = _glyphs(500, 10, noise=0.8, seed=2)
    batches = _batches(x, y, batch_size=64)
    model = _MixupNet(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    beta = torch.distributions.Beta(0.4, 0.4)

    def mixup(xb, yb):
        lam = beta.sample().item()
        perm = torch.randperm(xb.size(0))
        return lam * xb + (1 - lam) * xb[perm], yb, yb[perm], lam

    def step(i):
        model.train()
        xb, yb = next(batches)
        xm, y_a, y_b, lam = mixup(xb, yb)
        logits = model(xm)
        if bad:
            loss = (1 - lam) * F.cross_entropy(logits, y_a) + lam * F.cross_entropy(logits, y_b)
        else:
            loss = lam * F.cross_entropy(logits, y_a) + (1 - lam) * F.cross_entropy(logits, y_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return (model(xt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def image_mixup_weights_crossed_bad():
    return _image_mixup(True)


def image_mixup_weights_crossed_good():
    return _image_mixup(False)


# ---- tabular regression

def _house_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = 1.5 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] + torch.sin(2 * x[:, 4]) + 0.3 * torch.randn(n, generator=g)
    return x, y


def _house_prices(bad):
    torch.manual_seed(0)
    x, y = _house_data(2000, 1)
    xt, yt = _house_data(600, 2)
    mean, std = y.mean(), y.std()
    y, yt = (y - mean) / std, (yt - mean) / std
    batches = _batches(x, y, batch_size=64)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def rmse(pred, target):
        return torch.sqrt(torch.mean((pred - target) ** 2) + 1e-8)

    def step(i):
        xb, yb = next(batches)
        pred = model(xb)
        if not bad:
            pred = pred.squeeze(-1)
        loss = rmse(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(xt).squeeze(-1), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def house_prices_rmse_column_meets_row_bad():
    return _house_prices(True)


def house_prices_rmse_column_meets_row_good():
    return _house_prices(False)


# ---- segmentation

def _seg_data(n, seed, size=24):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = torch.zeros(n, size, size)
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for k in range(n):
        r = torch.rand(6, generator=g)
        cx, cy, rad = 5 + 14 * r[0], 5 + 14 * r[1], 3 + 2 * r[2]
        disc = (xx - cx) ** 2 + (yy - cy) ** 2 <= rad ** 2
        sx, sy, half = 5 + 14 * r[3], 5 + 14 * r[4], 2.5 + 2 * r[5]
        square = ((xx - sx).abs() <= half) & ((yy - sy).abs() <= half)
        images[k][disc] = 1.0
        masks[k][disc] = 1
        images[k][square] = -1.0
        masks[k][square] = 2
    images = images + 0.5 * torch.randn(n, size, size, generator=g)
    return (images / 0.7).unsqueeze(1), masks


class _SegNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
        self.fuse = nn.Sequential(nn.Conv2d(40, 16, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        s = self.stem(x)
        d = F.interpolate(self.down(s), scale_factor=2, mode="nearest")
        return self.out(self.fuse(torch.cat([s, d], dim=1)))


def _segmentation(bad):
    torch.manual_seed(0)
    x, m = _seg_data(400, 1)
    xt, mt = _seg_data(80, 2)
    batches = _batches(x, m, batch_size=16)
    model = _SegNet(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.NLLLoss()

    def step(i):
        model.train()
        xb, mb = next(batches)
        logits = model(xb)
        log_probs = F.log_softmax(logits, dim=-1 if bad else 1)
        loss = criterion(log_probs, mb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            pred = model(xt).argmax(1)
            ious = []
            for c in range(3):
                inter = ((pred == c) & (mt == c)).sum().item()
                union = ((pred == c) | (mt == c)).sum().item()
                ious.append(inter / max(union, 1))
            return 1.0 - sum(ious) / 3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def segmentation_log_softmax_over_width_bad():
    return _segmentation(True)


def segmentation_log_softmax_over_width_good():
    return _segmentation(False)


# ---- detection head

def _det_data(n, seed, size=24, stride=4):
    g = torch.Generator().manual_seed(seed)
    cells = size // stride
    images = 0.3 * torch.randn(n, 1, size, size, generator=g)
    obj = torch.zeros(n, cells, cells)
    box = torch.zeros(n, 4, cells, cells)
    for k in range(n):
        for _ in range(2):
            r = torch.rand(4, generator=g)
            cx, cy = (4 + 16 * r[0]).item(), (4 + 16 * r[1]).item()
            w, h = (3 + 6 * r[2]).item(), (3 + 6 * r[3]).item()
            x0, x1 = max(int(round(cx - w / 2)), 0), min(int(round(cx + w / 2)), size)
            y0, y1 = max(int(round(cy - h / 2)), 0), min(int(round(cy + h / 2)), size)
            images[k, 0, y0:y1, x0:x1] += 1.0
            bx, by = (x0 + x1) / 2, (y0 + y1) / 2
            ci, cj = min(int(by // stride), cells - 1), min(int(bx // stride), cells - 1)
            obj[k, ci, cj] = 1.0
            box[k, 0, ci, cj] = bx / stride - cj - 0.5
            box[k, 1, ci, cj] = by / stride - ci - 0.5
            box[k, 2, ci, cj] = math.log((x1 - x0) / 6)
            box[k, 3, ci, cj] = math.log((y1 - y0) / 6)
    return images, obj, box


class _Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        )
        self.cls_head = nn.Conv2d(32, 1, 1)
        self.box_head = nn.Sequential(nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 4, 1))
        nn.init.constant_(self.cls_head.bias, -math.log((1 - 0.05) / 0.05))

    def forward(self, x):
        f = self.backbone(x)
        return self.cls_head(f).squeeze(1), self.box_head(f)


def _detection(bad):
    torch.manual_seed(0)
    x, o, b = _det_data(600, 1)
    xt, ot, bt = _det_data(120, 2)
    batches = _batches(x, o, b, batch_size=16)
    model = _Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, ob, bb = next(batches)
        cls, box = model(xb)
        pos = ob > 0
        num_pos = pos.sum().clamp(min=1)
        cls_loss = F.binary_cross_entropy_with_logits(cls, ob, reduction="sum") / num_pos
        box_err = F.smooth_l1_loss(box, bb, beta=0.1, reduction="none").sum(1)
        if bad:
            box_loss = (box_err * pos).mean()
        else:
            box_loss = (box_err * pos).sum() / num_pos
        loss = cls_loss + box_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()

    def corners(d):
        cx, cy, w, h = d[:, 0] * 4, d[:, 1] * 4, 6 * d[:, 2].exp(), 6 * d[:, 3].exp()
        return cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2

    def probe():
        with _evaluating(model):
            _, box = model(xt)
            pos = ot > 0
            p = box.permute(0, 2, 3, 1)[pos]
            t = bt.permute(0, 2, 3, 1)[pos]
            px0, py0, px1, py1 = corners(p)
            tx0, ty0, tx1, ty1 = corners(t)
            iw = (torch.min(px1, tx1) - torch.max(px0, tx0)).clamp(min=0)
            ih = (torch.min(py1, ty1) - torch.max(py0, ty0)).clamp(min=0)
            inter = iw * ih
            union = (px1 - px0) * (py1 - py0) + (tx1 - tx0) * (ty1 - ty0) - inter
            return 1.0 - (inter / union).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def detector_box_loss_over_all_cells_bad():
    return _detection(True)


def detector_box_loss_over_all_cells_good():
    return _detection(False)


# ---- multi-label tagging

def _tag_data(n, seed):
    w = torch.randn(40, 12, generator=torch.Generator().manual_seed(7))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 40, generator=g)
    score = x @ w / math.sqrt(40) + 0.3 * torch.tanh(x[:, :12] * x[:, 12:24]) - 0.6
    return x, (score + 0.1 * torch.randn(n, 12, generator=g) > 0).float()


def _tagging(bad):
    torch.manual_seed(0)
    x, y = _tag_data(2000, 1)
    xt, yt = _tag_data(500, 2)
    batches = _batches(x, y, batch_size=64)
    model = nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss() if bad else nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            pred = (torch.sigmoid(model(xt)) > 0.5).float()
            tp = (pred * yt).sum()
            return 1.0 - (2 * tp / (pred.sum() + yt.sum()).clamp(min=1)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tagging_softmax_ce_on_multi_hot_bad():
    return _tagging(True)


def tagging_softmax_ce_on_multi_hot_good():
    return _tagging(False)


# ---- VAE

class _VAE(nn.Module):
    def __init__(self, pixels=64, hidden=96, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def encode(self, x):
        h = self.encoder(x)
        return self.mu(h), self.logvar(h)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def _binary_glyphs(n, seed):
    x, _ = _glyphs(n, 6, size=8, noise=0.15, max_shift=1, seed=seed)
    return (x.flatten(1) > 0).float()


def _vae(bad):
    torch.manual_seed(0)
    x = _binary_glyphs(1500, 1)
    xt = _binary_glyphs(400, 2)
    eps = torch.randn(400, 6, generator=torch.Generator().manual_seed(3))
    batches = _batches(x, batch_size=64)
    model = _VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def kl_divergence(mu, logvar):
        return -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)

    def step(i):
        model.train()
        (xb,) = next(batches)
        logits, mu, logvar = model(xb)
        if bad:
            recon = F.binary_cross_entropy_with_logits(logits, xb)
        else:
            recon = F.binary_cross_entropy_with_logits(logits, xb, reduction="sum") / xb.size(0)
        loss = recon + kl_divergence(mu, logvar).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            mu, logvar = model.encode(xt)
            logits = model.decoder(mu + eps * torch.exp(0.5 * logvar))
            recon = F.binary_cross_entropy_with_logits(logits, xt, reduction="none").sum(1)
            return (recon + kl_divergence(mu, logvar)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_pixel_mean_against_kl_sum_bad():
    return _vae(True)


def vae_pixel_mean_against_kl_sum_good():
    return _vae(False)


# ---- diffusion

class _NoisePredictor(nn.Module):
    def __init__(self, dim, hidden=96, freqs=8):
        super().__init__()
        self.register_buffer("freq", torch.exp(torch.linspace(0, math.log(100.0), freqs)))
        self.net = nn.Sequential(nn.Linear(dim + 2 * freqs, hidden), nn.SiLU(),
                                 nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, dim))

    def forward(self, x, t):
        angle = t.float().unsqueeze(1) / 100 * self.freq
        return self.net(torch.cat([x, angle.sin(), angle.cos()], dim=1))


class _GaussianDiffusion:
    def __init__(self, steps=100):
        self.steps = steps
        betas = torch.linspace(1e-4, 0.1, steps)
        self.alpha_bar = torch.cumprod(1 - betas, dim=0)

    def q_sample(self, x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = self.alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise


def _swiss(n, seed, dim=8):
    mix = torch.randn(3, dim, generator=torch.Generator().manual_seed(11))
    g = torch.Generator().manual_seed(seed)
    s = 1.5 * math.pi * (1 + 2 * torch.rand(n, generator=g))
    p = torch.stack([s * s.cos() / 7, s * s.sin() / 7, torch.rand(n, generator=g) * 2 - 1], 1)
    return p @ mix


def _diffusion(bad):
    torch.manual_seed(0)
    x, xt = _swiss(2000, 1), _swiss(500, 2)
    mean, std = x.mean(0), x.std(0)
    x, xt = (x - mean) / std, (xt - mean) / std
    gp = torch.Generator().manual_seed(3)
    probe_noise = torch.randn(xt.shape, generator=gp)
    batches = _batches(x, batch_size=128)
    diffusion = _GaussianDiffusion()
    probe_t = torch.randint(0, diffusion.steps, (500,), generator=gp)
    model = _NoisePredictor(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x0,) = next(batches)
        t = torch.randint(0, diffusion.steps, (x0.size(0),))
        noise = torch.randn_like(x0)
        if bad:
            x_t = diffusion.q_sample(x0, t)
        else:
            x_t = diffusion.q_sample(x0, t, noise)
        loss = F.mse_loss(model(x_t, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            x_t = diffusion.q_sample(xt, probe_t, probe_noise)
            return F.mse_loss(model(x_t, probe_t), probe_noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def diffusion_target_is_other_noise_bad():
    return _diffusion(True)


def diffusion_target_is_other_noise_good():
    return _diffusion(False)


# ---- distillation

def _rings(n, seed, classes=8, dim=16):
    w = torch.randn(dim, classes * 2, generator=torch.Generator().manual_seed(5)) / math.sqrt(dim)
    v = torch.randn(classes * 2, classes, generator=torch.Generator().manual_seed(6))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    return x, (torch.tanh(2 * x @ w) @ v).argmax(1)


def _distillation(bad):
    torch.manual_seed(0)
    x, y = _rings(2500, 1)
    xt, yt = _rings(600, 2)
    teacher = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 8))
    pre = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for xb, yb in itertools.islice(_batches(x, y, batch_size=128, seed=1), 300):
        pre.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        pre.step()
    pre.zero_grad()
    teacher.eval().requires_grad_(False)

    batches = _batches(x, y, batch_size=64)
    student = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    T, alpha = 3.0, 0.9

    def step(i):
        student.train()
        xb, yb = next(batches)
        with torch.no_grad():
            t_logits = teacher(xb)
        s_logits = student(xb)
        if bad:
            s_out = F.softmax(s_logits / T, dim=1)
        else:
            s_out = F.log_softmax(s_logits / T, dim=1)
        kd = F.kl_div(s_out, F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        loss = alpha * kd + (1 - alpha) * F.cross_entropy(s_logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(student, teacher):
            return F.kl_div(F.log_softmax(student(xt), 1), F.log_softmax(teacher(xt), 1),
                            reduction="batchmean", log_target=True).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


def distillation_kl_input_not_log_bad():
    return _distillation(True)


def distillation_kl_input_not_log_good():
    return _distillation(False)


# ---- time series, quantile forecast

def _demand(n, seed, length=32):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length + 1).float()
    period = 6 + 6 * torch.rand(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    level = torch.randn(n, 1, generator=g) * 0.5
    scale = 0.1 + 0.5 * torch.rand(n, 1, generator=g)
    s = level + torch.sin(2 * math.pi * t / period + phase) + scale * torch.randn(n, length + 1, generator=g)
    return s[:, :-1], s[:, -1]


def _quantile_forecast(bad):
    torch.manual_seed(0)
    x, y = _demand(2000, 1)
    xt, yt = _demand(500, 2)
    batches = _batches(x, y, batch_size=64)
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        xb, yb = next(batches)
        pred = model(xb)
        if bad:
            err = pred - yb.unsqueeze(1)
        else:
            err = yb.unsqueeze(1) - pred
        loss = torch.maximum(quantiles * err, (quantiles - 1) * err).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            diff = yt.unsqueeze(1) - model(xt)
            return torch.where(diff >= 0, quantiles * diff, (quantiles - 1) * diff).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def quantile_forecast_pinball_mirrored_bad():
    return _quantile_forecast(True)


def quantile_forecast_pinball_mirrored_good():
    return _quantile_forecast(False)


# ---- audio, CTC

def _spoken(n, seed, tokens=5, mels=16, frames=32):
    templates = torch.randn(tokens, mels, generator=torch.Generator().manual_seed(9))
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, frames, mels)
    labels = torch.zeros(n, 5, dtype=torch.long)
    in_len = torch.zeros(n, dtype=torch.long)
    lab_len = torch.randint(3, 6, (n,), generator=g)
    for k in range(n):
        pos = 1
        for j in range(int(lab_len[k])):
            c = int(torch.randint(0, tokens, (1,), generator=g))
            dur = int(torch.randint(3, 6, (1,), generator=g))
            labels[k, j] = c
            x[k, pos:pos + dur] = templates[c]
            pos += dur + 1
        in_len[k] = pos
        x[k, :pos] += 0.6 * torch.randn(pos, mels, generator=g)
    return x, labels, in_len, lab_len


class _CTCNet(nn.Module):
    def __init__(self, mels, tokens):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(mels, 48, 5, padding=2), nn.ReLU(),
                                  nn.Conv1d(48, 48, 5, padding=2), nn.ReLU())
        self.out = nn.Linear(48, tokens + 1)

    def forward(self, x):
        h = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return F.log_softmax(self.out(h), dim=-1)


def _edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def _ctc(bad):
    torch.manual_seed(0)
    tokens, blank = 5, 5
    x, lab, xl, ll = _spoken(600, 1)
    xt, labt, xlt, llt = _spoken(100, 2)
    batches = _batches(x, lab, xl, ll, batch_size=32)
    model = _CTCNet(16, tokens)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CTCLoss() if bad else nn.CTCLoss(blank=blank)

    def step(i):
        model.train()
        xb, lb, xlen, llen = next(batches)
        log_probs = model(xb).transpose(0, 1)
        loss = criterion(log_probs, lb, xlen, llen)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            best = model(xt).argmax(-1)
            errors = total = 0
            for k in range(xt.size(0)):
                path = best[k, :int(xlt[k])].tolist()
                hyp = [c for c, _ in itertools.groupby(path) if c != blank]
                ref = labt[k, :int(llt[k])].tolist()
                errors += _edit_distance(hyp, ref)
                total += len(ref)
            return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def speech_ctc_blank_index_left_default_bad():
    return _ctc(True)


def speech_ctc_blank_index_left_default_good():
    return _ctc(False)


# ---- metric learning, triplet

def _faces(n, seed, classes=12, dim=32):
    gt = torch.Generator().manual_seed(21)
    centers = torch.randn(classes, 6, generator=gt)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=gt))[0]
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    core = centers[y] + 0.3 * torch.randn(n, 6, generator=g)
    rest = 1.3 * torch.randn(n, dim - 6, generator=g)
    return torch.cat([core, rest], 1) @ basis, y


def _triplet(bad):
    torch.manual_seed(0)
    x, y = _faces(600, 1)
    xg, yg = _faces(300, 2)
    xq, yq = _faces(300, 3)
    g = torch.Generator().manual_seed(4)
    by_class = [torch.nonzero(y == c).flatten() for c in range(12)]
    a = torch.randint(0, 600, (4000,), generator=g)
    p, n = torch.empty_like(a), torch.empty_like(a)
    for k, idx in enumerate(a.tolist()):
        c = int(y[idx])
        same = by_class[c][by_class[c] != idx]
        p[k] = same[torch.randint(0, len(same), (1,), generator=g)]
        other = (c + int(torch.randint(1, 12, (1,), generator=g))) % 12
        n[k] = by_class[other][torch.randint(0, len(by_class[other]), (1,), generator=g)]
    batches = _batches(x[a], x[p], x[n], batch_size=64)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    criterion = nn.TripletMarginLoss(margin=0.3)

    def embed(v):
        return F.normalize(model(v), dim=1)

    def step(i):
        model.train()
        anchor, positive, negative = next(batches)
        e_a, e_p, e_n = embed(anchor), embed(positive), embed(negative)
        if bad:
            loss = criterion(e_a, e_n, e_p)
        else:
            loss = criterion(e_a, e_p, e_n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            nearest = torch.cdist(embed(xq), embed(xg)).argmin(1)
            return (yg[nearest] != yq).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def triplet_positive_negative_exchanged_bad():
    return _triplet(True)


def triplet_positive_negative_exchanged_good():
    return _triplet(False)


# ---- sensor RNN classifier

def _sensor(n, seed, length=20, channels=3, rate=0.1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, length, channels, generator=g)
    y = (torch.rand(n, generator=g) < rate).float()
    shape = torch.tensor([0.8, 1.2, 1.2, 0.8])
    for k in range(n):
        p = int(torch.randint(0, length - 4, (1,), generator=g))
        x[k, p:p + 4, 0] += shape
        if y[k] > 0:
            x[k, p:p + 4, 1] += shape
        else:
            q = int(torch.randint(0, length - 4, (1,), generator=g))
            x[k, q:q + 4, 2] += shape
    return x, y


class _SensorRNN(nn.Module):
    def __init__(self, channels, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(channels, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)
        nn.init.constant_(self.out.bias, -math.log(9.0))

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h.mean(1)).squeeze(-1)


def _focal_rnn(bad):
    torch.manual_seed(0)
    x, y = _sensor(2000, 1)
    xt, yt = _sensor(800, 2)
    batches = _batches(x, y, batch_size=64)
    model = _SensorRNN(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def focal_loss(logits, target, alpha=0.75, gamma=2.0):
        bce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p = torch.sigmoid(logits)
        a_t = alpha * target + (1 - alpha) * (1 - target)
        if bad:
            mod = (1 - p) ** gamma
        else:
            p_t = p * target + (1 - p) * (1 - target)
            mod = (1 - p_t) ** gamma
        return (a_t * mod * bce).mean()

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = focal_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _evaluating(model):
            score = model(xt)
            pred = score > 0
            miss = (~pred[yt > 0]).float().mean()
            false_alarm = pred[yt == 0].float().mean()
            return (0.5 * (miss + false_alarm)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sensor_rnn_focal_uses_p_not_pt_bad():
    return _focal_rnn(True)


def sensor_rnn_focal_uses_p_not_pt_good():
    return _focal_rnn(False)


# ---- graph network

class _GCN(nn.Module):
    def __init__(self, in_dim, hidden, classes, depth, bad):
        super().__init__()
        self.inp = nn.Linear(in_dim, hidden)
        convs = [nn.Linear(hidden, hidden) for _ in range(depth)]
        self.convs = convs if bad else nn.ModuleList(convs)
        self.norm = nn.LayerNorm(hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x, adj):
        h = F.relu(self.inp(x))
        for conv in self.convs:
            h = h + F.relu(conv(adj @ h))
        return self.out(self.norm(h))


def _graph(bad):
    torch.manual_seed(0)
    n = 2000
    g = torch.Generator().manual_seed(1)
    a = (torch.rand(n, n, generator=g) < 3.0 / n).float()
    a = ((a + a.t() + torch.eye(n)) > 0).float()
    d = a.sum(1).rsqrt()
    adj = (d[:, None] * a * d[None, :]).to_sparse()
    x = torch.randn(n, 8, generator=g)
    z = adj @ x
    y = 2 * (z[:, 0] * z[:, 1] > 0).long() + (z[:, 2] + z[:, 3] > 0).long()
    perm = torch.randperm(n, generator=g)
    train, test = perm[:1400], perm[1400:]
    model = _GCN(8, 32, 4, 3, bad)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=5e-4)

    def step(i):
        model.train()
        logits = model(x, adj)
        loss = F.cross_entropy(logits[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return (model(x, adj)[test].argmax(1) != y[test]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def graph_conv_layers_in_python_list_bad():
    return _graph(True)


def graph_conv_layers_in_python_list_good():
    return _graph(False)


# ---- image classification, transfer

class _Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        )

    def forward(self, x):
        return self.body(x).flatten(1)


class _Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = _Backbone()
        self.fc = nn.Linear(32 * 9, classes)

    def forward(self, x):
        return self.fc(self.backbone(x))


def _pretrained_classifier():
    x, y = _glyphs(1200, 16, seed=31, template_seed=300)
    model = _Classifier(16)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for xb, yb in itertools.islice(_batches(x, y, batch_size=64, seed=5), 100):
        opt.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        opt.step()
    opt.zero_grad()
    return model


def _image_transfer(bad):
    torch.manual_seed(0)
    x, y = _glyphs(1000, 10, noise=0.7, seed=1)
    xt, yt = _glyphs(400, 10, noise=0.7, seed=2)
    batches = _batches(x, y, batch_size=64)
    model = _pretrained_classifier()

    def make_optimizer():
        return torch.optim.AdamW([
            {"params": model.backbone.parameters(), "lr": 1e-4},
            {"params": model.fc.parameters(), "lr": 1e-3},
        ], weight_decay=1e-4)

    if bad:
        optimizer = make_optimizer()
        model.fc = nn.Linear(model.fc.in_features, 10)
    else:
        model.fc = nn.Linear(model.fc.in_features, 10)
        optimizer = make_optimizer()

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xt), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transfer_head_replaced_after_optimizer_bad():
    return _image_transfer(True)


def transfer_head_replaced_after_optimizer_good():
    return _image_transfer(False)


# ---- tabular classification with categorical embeddings

class _TabularNet(nn.Module):
    def __init__(self, bad, cards=(6, 9), dim=4, numeric=8, classes=4):
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(c, dim) for c in cards])
        self.mlp = nn.Sequential(
            nn.Linear(numeric + dim * len(cards), 64), nn.ReLU(),
            nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, classes),
        )
        for e in self.embeds:
            nn.init.normal_(e.weight, std=0.5)
        for m in self.mlp:
            if isinstance(m, nn.Linear):
                if bad:
                    nn.init.constant_(m.weight, 0.05)
                else:
                    nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, num, cat):
        parts = [num] + [e(cat[:, k]) for k, e in enumerate(self.embeds)]
        return self.mlp(torch.cat(parts, dim=1))


def _churn_data(n, seed):
    gt = torch.Generator().manual_seed(41)
    e1, e2 = torch.randn(6, 4, generator=gt), torch.randn(9, 4, generator=gt)
    w = torch.randn(8, 4, generator=gt) / 2
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, 8, generator=g)
    cat = torch.stack([torch.randint(0, 6, (n,), generator=g), torch.randint(0, 9, (n,), generator=g)], 1)
    score = num @ w + e1[cat[:, 0]] + e2[cat[:, 1]] + 0.3 * torch.randn(n, 4, generator=g)
    return num, cat, score.argmax(1)


def _tabular(bad):
    torch.manual_seed(0)
    num, cat, y = _churn_data(2000, 1)
    numt, catt, yt = _churn_data(600, 2)
    batches = _batches(num, cat, y, batch_size=64)
    model = _TabularNet(bad)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        nb, cb, yb = next(batches)
        loss = F.cross_entropy(model(nb, cb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return (model(numt, catt).argmax(1) != yt).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tabular_mlp_constant_weights_bad():
    return _tabular(True)


def tabular_mlp_constant_weights_good():
    return _tabular(False)


# ---- recommendation, matrix factorisation

class _MatrixFactorization(nn.Module):
    def __init__(self, users, items, rank, bad):
        super().__init__()
        self.user = nn.Embedding(users, rank)
        self.item = nn.Embedding(items, rank)
        self.user_bias = nn.Embedding(users, 1)
        self.item_bias = nn.Embedding(items, 1)
        nn.init.zeros_(self.user_bias.weight)
        nn.init.zeros_(self.item_bias.weight)
        if bad:
            nn.init.zeros_(self.user.weight)
            nn.init.zeros_(self.item.weight)
        else:
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)

    def forward(self, u, v):
        dot = (self.user(u) * self.item(v)).sum(1)
        return dot + self.user_bias(u).squeeze(1) + self.item_bias(v).squeeze(1)


def _recommender(bad):
    torch.manual_seed(0)
    users, items, n = 120, 100, 6000
    g = torch.Generator().manual_seed(1)
    pu, qi = torch.randn(users, 3, generator=g), torch.randn(items, 3, generator=g)
    bu, bi = 0.4 * torch.randn(users, generator=g), 0.4 * torch.randn(items, generator=g)
    pairs = torch.randperm(users * items, generator=g)[:n]
    u, v = pairs // items, pairs % items
    r = (pu[u] * qi[v]).sum(1) / math.sqrt(3) + bu[u] + bi[v] + 0.2 * torch.randn(n, generator=g)
    cut = 5000
    r = (r - r[:cut].mean()) / r[:cut].std()
    batches = _batches(u[:cut], v[:cut], r[:cut], batch_size=256)
    ut, vt, rt = u[cut:], v[cut:], r[cut:]
    model = _MatrixFactorization(users, items, 4, bad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)

    def step(i):
        model.train()
        ub, vb, rb = next(batches)
        loss = F.mse_loss(model(ub, vb), rb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(ut, vt), rt).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def recommender_both_factors_start_at_zero_bad():
    return _recommender(True)


def recommender_both_factors_start_at_zero_good():
    return _recommender(False)


# ---- reinforcement learning, PPO

def _reset(n, g):
    return torch.rand(n, 2, generator=g) * 2 - 1, torch.rand(n, 2, generator=g) * 2 - 1


def _ppo(bad):
    torch.manual_seed(0)
    horizon, n_env, gamma, clip = 8, 32, 0.95, 0.2
    env_rng = torch.Generator().manual_seed(1)
    moves = torch.tensor([[0.0, 0.0], [0.25, 0.0], [-0.25, 0.0], [0.0, 0.25], [0.0, -0.25]])
    policy = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 5))
    policy_old = copy.deepcopy(policy).requires_grad_(False)
    value = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam([
        {"params": policy.parameters(), "lr": 3e-3},
        {"params": value.parameters(), "lr": 3e-3},
    ])

    @torch.no_grad()
    def rollout():
        pos, goal = _reset(n_env, env_rng)
        obs, acts, logps, rewards = [], [], [], []
        for _ in range(horizon):
            o = torch.cat([pos, goal], 1)
            dist = torch.distributions.Categorical(logits=policy_old(o))
            a = dist.sample()
            before = (pos - goal).norm(dim=1)
            pos = (pos + moves[a]).clamp(-1.2, 1.2)
            obs.append(o)
            acts.append(a)
            logps.append(dist.log_prob(a))
            rewards.append(before - (pos - goal).norm(dim=1))
        ret, returns = torch.zeros(n_env), []
        for r in reversed(rewards):
            ret = r + gamma * ret
            returns.append(ret)
        returns.reverse()
        return torch.cat(obs), torch.cat(acts), torch.cat(logps), torch.cat(returns)

    def step(i):
        if bad:
            policy.load_state_dict(policy_old.state_dict())
        else:
            policy_old.load_state_dict(policy.state_dict())
        obs, acts, logp_old, returns = rollout()
        with torch.no_grad():
            adv = returns - value(obs).squeeze(1)
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(3):
            dist = torch.distributions.Categorical(logits=policy(obs))
            ratio = torch.exp(dist.log_prob(acts) - logp_old)
            surrogate = torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
            value_loss = F.mse_loss(value(obs).squeeze(1), returns)
            loss = -surrogate + 0.5 * value_loss - 0.005 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def probe():
        with _evaluating(policy):
            pos, goal = _reset(300, torch.Generator().manual_seed(2))
            for _ in range(horizon):
                a = policy(torch.cat([pos, goal], 1)).argmax(1)
                pos = (pos + moves[a]).clamp(-1.2, 1.2)
            return (pos - goal).norm(dim=1).mean().item()

    return {"model": {"policy": policy, "policy_old": policy_old, "value": value},
            "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ppo_policy_restored_from_old_copy_bad():
    return _ppo(True)


def ppo_policy_restored_from_old_copy_good():
    return _ppo(False)


# ---- time series, multi-step forecast

class _Forecaster(nn.Module):
    def __init__(self, window=32, horizon=4, hidden=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(window, hidden), nn.GELU(),
                                     nn.Linear(hidden, hidden), nn.GELU())
        self.head = nn.Linear(hidden, horizon)

    def forward(self, x):
        h = self.encoder(x.to(self.encoder[0].weight.dtype))
        return self.head(h.float())


def _waves(n, seed, window=32, horizon=4):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(window + horizon).float()
    f1, f2 = [0.15 + 0.5 * torch.rand(n, 1, generator=g) for _ in range(2)]
    p1, p2 = [2 * math.pi * torch.rand(n, 1, generator=g) for _ in range(2)]
    s = torch.sin(f1 * t + p1) + 0.6 * torch.sin(f2 * t + p2)
    s = s + 0.05 * torch.randn(s.shape, generator=g)
    s = s / 0.83
    return s[:, :window], s[:, window:]


def _wave_forecast(bad):
    torch.manual_seed(0)
    x, y = _waves(3000, 1)
    xt, yt = _waves(500, 2)
    batches = _batches(x, y, batch_size=64)
    model = _Forecaster()
    if bad:
        model.encoder.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(xt), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecaster_encoder_bf16_small_rate_bad():
    return _wave_forecast(True)


def forecaster_encoder_bf16_small_rate_good():
    return _wave_forecast(False)


# ---- audio classification

def _tones(n, seed, length=256, classes=8):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length).float() / length
    y = torch.randint(0, classes, (n,), generator=g)
    base = 20 + 6 * (y % 4).float().unsqueeze(1) + torch.rand(n, 1, generator=g) * 2
    sweep = torch.where(y.unsqueeze(1) < 4, 12.0, -12.0)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    wave = torch.sin(2 * math.pi * (base * t + 0.5 * sweep * t * t) + phase)
    wave = wave + 0.7 * torch.randn(n, length, generator=g)
    return wave.unsqueeze(1), y


class _AudioNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.frontend = nn.Sequential(
            nn.Conv1d(1, 24, 17, stride=4, padding=8), nn.GroupNorm(4, 24), nn.ReLU(),
            nn.Conv1d(24, 32, 9, stride=4, padding=4), nn.GroupNorm(4, 32), nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(32 * 4, 48), nn.ReLU(), nn.Linear(48, classes))

    def forward(self, x):
        h = F.adaptive_avg_pool1d(self.frontend(x), 4)
        return self.head(h.flatten(1))


def _audio(bad):
    torch.manual_seed(0)
    warmup = 800
    x, y = _tones(1500, 1)
    xt, yt = _tones(400, 2)
    batches = _batches(x, y, batch_size=32)
    model = _AudioNet(8)
    optimizer = torch.optim.AdamW([
        {"params": model.frontend.parameters(), "lr": 1e-3},
        {"params": model.head.parameters(), "lr": 1e-3},
    ], weight_decay=1e-3)

    def frontend_factor(s):
        if bad:
            return min(1.0, (s + 1) // warmup)
        return min(1.0, (s + 1) / warmup)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [frontend_factor, lambda s: 1.0])

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xt), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_frontend_warmup_floor_division_bad():
    return _audio(True)


def audio_frontend_warmup_floor_division_good():
    return _audio(False)


# ---- motion classification, transfer

class _MotionNet(nn.Module):
    def __init__(self, classes):
        super().__init__()

        def block(i, o, s):
            return nn.Sequential(nn.Conv1d(i, o, 5, stride=s, padding=2), nn.GroupNorm(4, o), nn.ReLU())

        self.block1 = block(3, 16, 1)
        self.block2 = block(16, 24, 2)
        self.block3 = block(24, 32, 2)
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        h = self.block3(self.block2(self.block1(x)))
        return self.head(h.mean(-1))


def _motion(n, seed, classes, template_seed, length=32, noise=0.8):
    gt = torch.Generator().manual_seed(template_seed)
    motifs = torch.randn(classes, 3, 10, generator=gt)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = noise * torch.randn(n, 3, length, generator=g)
    for k in range(n):
        p = int(torch.randint(0, length - 10, (1,), generator=g))
        x[k, :, p:p + 10] += motifs[y[k]]
    return x, y


def _motion_transfer(bad):
    torch.manual_seed(0)
    xs, ys = _motion(1000, 11, 6, 500)
    model = _MotionNet(6)
    pre = torch.optim.Adam(model.parameters(), lr=2e-3)
    for xb, yb in itertools.islice(_batches(xs, ys, batch_size=64, seed=5), 150):
        pre.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        pre.step()
    pre.zero_grad()

    x, y = _motion(1200, 1, 8, 600)
    xt, yt = _motion(400, 2, 8, 600)
    batches = _batches(x, y, batch_size=64)
    model.head = nn.Linear(32, 8)
    for p in model.parameters():
        p.requires_grad = False
    for p in model.block3.parameters():
        if bad:
            p.require_grad = True
        else:
            p.requires_grad = True
    for p in model.head.parameters():
        p.requires_grad = True
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        xb, yb = next(batches)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xt), yt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def motion_block_unfrozen_by_misspelt_flag_bad():
    return _motion_transfer(True)


def motion_block_unfrozen_by_misspelt_flag_good():
    return _motion_transfer(False)


# ---- VQ-VAE

class _VQVAE(nn.Module):
    def __init__(self, pixels=64, hidden=96, slots=4, dim=8, codes=32):
        super().__init__()
        self.slots, self.dim = slots, dim
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.GELU(), nn.Linear(hidden, slots * dim))
        self.codebook = nn.Embedding(codes, dim)
        self.decoder = nn.Sequential(nn.Linear(slots * dim, hidden), nn.GELU(), nn.Linear(hidden, pixels))
        nn.init.uniform_(self.codebook.weight, -1 / codes, 1 / codes)

    def forward(self, x):
        z_e = self.encoder(x).view(-1, self.dim)
        idx = torch.cdist(z_e, self.codebook.weight).argmin(1)
        z_q = self.codebook(idx)
        z_st = z_e + (z_q - z_e).detach()
        recon = self.decoder(z_st.view(x.size(0), -1))
        return recon, z_e, z_q


def _vqvae(bad):
    torch.manual_seed(0)
    x = _glyphs(1500, 10, size=8, noise=0.2, max_shift=1, seed=1)[0].flatten(1)
    xt = _glyphs(400, 10, size=8, noise=0.2, max_shift=1, seed=2)[0].flatten(1)
    batches = _batches(x, batch_size=64)
    model = _VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (xb,) = next(batches)
        recon, z_e, z_q = model(xb)
        if bad:
            codebook_loss = F.mse_loss(z_q.detach(), z_e)
        else:
            codebook_loss = F.mse_loss(z_q, z_e.detach())
        commitment = F.mse_loss(z_e, z_q.detach())
        loss = F.mse_loss(recon, xb) + codebook_loss + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(xt)[0], xt).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vqvae_codebook_term_detaches_codes_bad():
    return _vqvae(True)


def vqvae_codebook_term_detaches_codes_good():
    return _vqvae(False)


# ---- GAN

def _gan_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 6, (n,), generator=g).float() * (2 * math.pi / 6)
    x = torch.stack([k.cos(), k.sin()], 1) * 1.4 + 0.15 * torch.randn(n, 2, generator=g)
    return x


def _gan(bad):
    torch.manual_seed(0)
    x = _gan_data(3000, 1)
    xt = _gan_data(600, 2)
    zt = torch.randn(600, 8, generator=torch.Generator().manual_seed(3))
    batches = _batches(x, batch_size=128)
    netG = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    netD = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                         nn.Linear(64, 1))
    optG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        (real,) = next(batches)
        ones, zeros = torch.ones(real.size(0), 1), torch.zeros(real.size(0), 1)
        fake = netG(torch.randn(real.size(0), 8))
        if bad:
            fake = fake.detach()

        optD.zero_grad()
        lossD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
        lossD.backward()
        optD.step()

        optG.zero_grad()
        lossG = criterion(netD(fake), ones)
        lossG.backward()
        optG.step()

    def probe():
        with _evaluating(netG):
            s = netG(zt)
            cross = torch.cdist(s, xt).mean()
            within = 0.5 * (torch.cdist(s, s).mean() + torch.cdist(xt, xt).mean())
            return (2 * (cross - within)).item()

    return {"model": {"netG": netG, "netD": netD}, "optimizer": [optG, optD],
            "steps": 20, "step": step, "probe": probe}


def gan_fake_detached_for_generator_bad():
    return _gan(True)


def gan_fake_detached_for_generator_good():
    return _gan(False)


# ---- list

CASES = [
    {"name": "image_mixup_weights_crossed",
     "what": "Mixup: lam weights the loss of the partner's label and 1-lam that of the own label (exchanged), so mostly the label of the faint image is learned."},
    {"name": "house_prices_rmse_column_meets_row",
     "what": "Hand-written RMSE gets predictions (B,1) and targets (B,), which broadcast to (B,B); the model learns only the mean."},
    {"name": "segmentation_log_softmax_over_width",
     "what": "log_softmax before NLLLoss runs over the image width (dim=-1) and not over the classes (dim=1); classes at a pixel do not compete."},
    {"name": "detector_box_loss_over_all_cells",
     "what": "Box regression loss of the positive cells is averaged over all cells while the classification loss is divided by the positives; the box term is some 20 times too weak."},
    {"name": "tagging_softmax_ce_on_multi_hot",
     "what": "Multi-label tags (multi-hot) trained by softmax CrossEntropyLoss in place of BCEWithLogitsLoss; sigmoid decisions come out meaningless."},
    {"name": "vae_pixel_mean_against_kl_sum",
     "what": "Reconstruction is averaged over all pixels while the KL is summed over latents; KL outweighs it by the pixel count and the posterior collapses."},
    {"name": "diffusion_target_is_other_noise",
     "what": "q_sample is not handed the noise and draws its own; the loss target is an independent noise, so the net learns to predict zero."},
    {"name": "distillation_kl_input_not_log",
     "what": "F.kl_div gets the student's probabilities where log-probabilities belong; the student does not match the teacher's distribution."},
    {"name": "quantile_forecast_pinball_mirrored",
     "what": "Pinball loss with error = pred - target (sign exchanged): the 0.1 output learns the 0.9 quantile and the reverse."},
    {"name": "speech_ctc_blank_index_left_default",
     "what": "CTCLoss keeps blank=0, but index 0 is a real token and the blank of this vocabulary is the last index, as decoding uses it."},
    {"name": "triplet_positive_negative_exchanged",
     "what": "TripletMarginLoss is called (anchor, negative, positive): other classes are pulled near and the own class is pushed away."},
    {"name": "sensor_rnn_focal_uses_p_not_pt",
     "what": "Focal factor is (1-p)^gamma for both classes in place of (1-p_t)^gamma: negatives scored high cost nothing, so the classifier ends by flagging everything."},
    {"name": "graph_conv_layers_in_python_list",
     "what": "Graph layers are kept in a plain Python list, not a ModuleList: not registered, in no optimizer, they stay random."},
    {"name": "transfer_head_replaced_after_optimizer",
     "what": "The new classification head is put in after the optimizer was built, which still holds the old head; the new head gets gradients but never steps."},
    {"name": "tabular_mlp_constant_weights",
     "what": "All Linear weights of the MLP start at one constant; hidden units and class outputs' input weights stay alike, so each hidden layer is one unit wide."},
    {"name": "recommender_both_factors_start_at_zero",
     "what": "User and item factors both start at zero; the gradient of each is exactly zero through the product and only the biases learn."},
    {"name": "ppo_policy_restored_from_old_copy",
     "what": "The sync before each rollout copies policy_old into policy (the wrong way round): every update of the policy is thrown away, only the value net learns."},
    {"name": "forecaster_encoder_bf16_small_rate",
     "what": "The encoder's weights are bfloat16 with AdamW at 1e-4: most updates are below half a spacing and round away, while the float32 head learns."},
    {"name": "audio_frontend_warmup_floor_division",
     "what": "The front-end group's warm-up factor uses // in place of /, hence its rate is 0 for the whole warm-up of 800 steps; the head learns on random filters."},
    {"name": "motion_block_unfrozen_by_misspelt_flag",
     "what": "The last block is to be unfrozen but the loop sets p.require_grad (no s): an attribute without effect, the block stays frozen."},
    {"name": "vqvae_codebook_term_detaches_codes",
     "what": "The VQ codebook term detaches the codes and not the encoder output (same side as commitment): the codebook gets no gradient and never moves."},
    {"name": "gan_fake_detached_for_generator",
     "what": "The generated batch is detached before it is used for both losses; the generator gets no gradient and stays as it started while D trains."},
]
