"""Twenty-two small programs as engineers write who adapt a published method, each with one bug that people often make, and a mended
twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal
from torch.utils.data import DataLoader, Dataset, TensorDataset


# --------------------------------------------------------------------------
# shared helpers: synthetic data, endless loader, state-preserving evaluation
# --------------------------------------------------------------------------


def _cycle(loader):
    while True:
        for batch in loader:
            yield batch


class _Quiet:
    """eval mode + no_grad, then modes and RNG exactly as they were."""

    def __init__(self, *mods):
        self.mods = [s for m in mods for s in m.modules()]

    def __enter__(self):
        self.modes = [m.training for m in self.mods]
        self.rng = torch.get_rng_state()
        self.py = random.getstate()
        self.grad = torch.is_grad_enabled()
        for m in self.mods:
            m.training = False
        torch.set_grad_enabled(False)
        torch.manual_seed(1234)
        return self

    def __exit__(self, *exc):
        for m, t in zip(self.mods, self.modes):
            m.training = t
        torch.set_grad_enabled(self.grad)
        torch.set_rng_state(self.rng)
        random.setstate(self.py)
        return False


def _standardise(train, *others):
    """per channel (dim 1), with the statistics of the training set alone"""
    dims = [d for d in range(train.dim()) if d != 1]
    mean, std = train.mean(dims, keepdim=True), train.std(dims, keepdim=True)
    return [(t - mean) / std for t in (train, *others)]


def _energy_distance(a, b):
    a, b = a.flatten(1), b.flatten(1)

    def off(x):
        n = len(x)
        return torch.cdist(x, x).sum() / (n * (n - 1))

    return float((2 * torch.cdist(a, b).mean() - off(a) - off(b)).clamp(min=0))


def _shape_scenes(n, size, seed, max_objects=2, noise=0.3):
    """pictures (n,3,size,size) with boxes/discs/crosses, class map (n,size,size)."""
    g = torch.Generator().manual_seed(seed)
    img = torch.randn(n, 3, size, size, generator=g) * noise
    seg = torch.zeros(n, size, size, dtype=torch.long)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    col = torch.tensor([[1.6, 0.2, -0.4], [-0.4, 1.6, 0.2], [0.2, -0.4, 1.6]])
    for k in range(n):
        for _ in range(int(torch.randint(1, max_objects + 1, (1,), generator=g))):
            c = int(torch.randint(0, 3, (1,), generator=g))
            r = int(torch.randint(3, 6, (1,), generator=g))
            cy, cx = torch.randint(r, size - r, (2,), generator=g).tolist()
            if c == 0:
                m = ((yy - cy).abs() <= r) & ((xx - cx).abs() <= r)
            elif c == 1:
                m = (yy - cy) ** 2 + (xx - cx) ** 2 <= r * r
            else:
                m = (((yy - cy).abs() <= 1) & ((xx - cx).abs() <= r)) | (
                    ((xx - cx).abs() <= 1) & ((yy - cy).abs() <= r)
                )
            tint = col[c] + 0.4 * torch.randn(3, generator=g)
            img[k] = torch.where(m, tint[:, None, None] + 0.3 * torch.randn(3, size, size, generator=g), img[k])
            seg[k][m] = c + 1
    return img, seg


def _box_scenes(n, size, seed):
    """one rectangle or ellipse in each picture: img, label, box xyxy in [0,1]."""
    g = torch.Generator().manual_seed(seed)
    img = torch.randn(n, 1, size, size, generator=g) * 0.3
    wh = torch.randint(6, 15, (n, 2), generator=g)
    xy = (torch.rand(n, 2, generator=g) * (size - wh)).long()
    lab = torch.randint(0, 2, (n,), generator=g)
    yy, xx = torch.meshgrid(torch.arange(size) + 0.5, torch.arange(size) + 0.5, indexing="ij")
    for k in range(n):
        (x0, y0), (w, h) = xy[k].tolist(), wh[k].tolist()
        if lab[k] == 0:
            m = (xx > x0) & (xx < x0 + w) & (yy > y0) & (yy < y0 + h)
        else:
            m = ((xx - x0 - w / 2) / (w / 2)) ** 2 + ((yy - y0 - h / 2) / (h / 2)) ** 2 <= 1
        img[k, 0][m] += 1.5 + 0.5 * float(torch.rand(1, generator=g))
    box = torch.cat([xy, xy + wh], 1).float() / size
    return img, lab, box


def _glyph_images(n, size, seed, n_classes=6, noise=0.35, shift=3):
    """(n,1,size,size) smooth class templates, shifted, scaled, noised."""
    gt = torch.Generator().manual_seed(77)
    t = torch.randn(n_classes, 1, 5, 5, generator=gt)
    t = F.interpolate(t, size=(size, size), mode="bicubic", align_corners=False)
    t = (t - t.mean((2, 3), keepdim=True)) / t.std((2, 3), keepdim=True)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, n_classes, (n,), generator=g)
    x = t[y] * (0.6 + 0.8 * torch.rand(n, 1, 1, 1, generator=g))
    sh = torch.randint(-shift, shift + 1, (n, 2), generator=g).tolist()
    x = torch.stack([torch.roll(a, s, (1, 2)) for a, s in zip(x, sh)])
    x = x + noise * torch.randn(x.shape, generator=g)
    return x, y


def _instrument_images(n, size, seed):
    """a thin instrument with a bright tip and a dim, thick base; (tip, base) in [0,1], xy."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size) + 0.5, torch.arange(size) + 0.5, indexing="ij")
    tip = 3 + torch.rand(n, 2, generator=g) * (size - 6)
    ang = torch.rand(n, generator=g) * 2 * math.pi
    length = 7 + 4 * torch.rand(n, generator=g)
    base = tip + length[:, None] * torch.stack([ang.cos(), ang.sin()], 1)
    inside = ((base > 2) & (base < size - 2)).all(1)
    base = torch.where(inside[:, None], base, tip - (base - tip))
    base = base.clamp(2, size - 2)

    def blob(p, s):
        return torch.exp(-((xx - p[:, 0, None, None]) ** 2 + (yy - p[:, 1, None, None]) ** 2) / (2 * s * s))

    img = 2.0 * blob(tip, 1.2) + 1.0 * blob(base, 2.4)
    for a in (0.25, 0.5, 0.75):
        img = img + 0.6 * blob(tip * (1 - a) + base * a, 1.0)
    img = img + 0.15 * torch.randn(img.shape, generator=g)
    return img[:, None], torch.stack([tip, base], 1) / size


def _load_series(n, seed):
    """an hourly-load-like series: two seasonalities, AR noise."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(n).float()
    e = torch.randn(n, generator=g)
    ar = torch.zeros(n)
    for k in range(1, n):
        ar[k] = 0.7 * ar[k - 1] + 0.15 * e[k]
    s = torch.sin(2 * math.pi * t / 12) + 0.5 * torch.sin(2 * math.pi * t / 5 + 1) + ar
    return 3.0 + 1.7 * s


def _ratings(seed=3, n_users=600, n_items=80, rank=3):
    """ratings scaled to about [-1,1]; masks of observed (train) and held-out entries."""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(n_users, rank, generator=g)
    v = torch.randn(n_items, rank, generator=g)
    r = torch.tanh(
        0.6 * u @ v.T + 0.5 * torch.randn(n_items, generator=g) + 0.15 * torch.randn(n_users, n_items, generator=g)
    )
    pick = torch.rand(n_users, n_items, generator=g)
    return r, pick < 0.25, (pick >= 0.25) & (pick < 0.35)


def _trajectories(n, seed):
    """(n,2,16): smooth two-mode planar paths, unit variance."""
    g = torch.Generator().manual_seed(seed)
    s = torch.linspace(0, 1, 16)
    side = (torch.rand(n, 1, generator=g) < 0.5).float() * 2 - 1
    h = side * (1.0 + 0.25 * torch.randn(n, 1, generator=g))
    y = h * torch.sin(math.pi * s) + 0.5 * torch.randn(n, 1, generator=g) * (s - 0.5)
    x = 2 * s - 1 + 0.2 * torch.randn(n, 1, generator=g)
    p = torch.stack([x.expand(n, 16), y], 1)
    return p / torch.tensor([0.65, 0.75])[:, None]


def _grey_boxes(n, seed):
    """(n,1,16,16) in [0,1]: one soft rectangle in each."""
    g = torch.Generator().manual_seed(seed)
    c = 4 + 8 * torch.rand(n, 2, generator=g)
    r = 2 + 2.5 * torch.rand(n, 2, generator=g)
    k = torch.arange(16) + 0.5
    gy = torch.sigmoid(3 * (r[:, :1] - (k - c[:, :1]).abs()))
    gx = torch.sigmoid(3 * (r[:, 1:] - (k - c[:, 1:]).abs()))
    return (gy[:, :, None] * gx[:, None, :])[:, None]


def _mixture_table(n, seed):
    """(n,2): eight gaussians on a ring, unit variance."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 8, (n,), generator=g).float() * math.pi / 4
    return 1.4 * torch.stack([k.cos(), k.sin()], 1) + 0.1 * torch.randn(n, 2, generator=g)


def _citation_graph(seed=5, n=400, k=4, d=50):
    """stochastic block model, bag-of-words features; x, y, normalised adjacency, masks."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n,), generator=g)
    same = y[:, None] == y[None]
    p = torch.where(same, torch.tensor(0.03), torch.tensor(0.005))
    a = (torch.rand(n, n, generator=g) < p).float().triu(1)
    a = a + a.T + torch.eye(n)
    dinv = a.sum(1).rsqrt()
    adj = dinv[:, None] * a * dinv[None]
    proto = 0.06 + 0.18 * (torch.rand(k, d, generator=g) < 0.15).float()
    x = (torch.rand(n, d, generator=g) < proto[y]).float()
    x = (x - x.mean(0)) / x.std(0)
    perm = torch.randperm(n, generator=g)
    train, test = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    train[perm[:80]] = True
    test[perm[100:]] = True
    return x, y, adj, train, test


def _spectra(n, seed, shift=False):
    """(n,32) sensor spectra from 6 latent factors; label from the latents (4 classes)."""
    gm = torch.Generator().manual_seed(11)
    mix = torch.randn(6, 32, generator=gm) / 6**0.5
    twist = torch.randn(32, 3, generator=gm) / 32**0.5 @ torch.randn(3, 32, generator=gm)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 6, generator=g)
    x = z @ mix + 0.1 * torch.randn(n, 32, generator=g)
    if shift:
        x = x + 1.6 * (x @ twist)
    y = 2 * (z[:, 0] * z[:, 1] > 0).long() + (z[:, 2].abs() > 0.67).long()
    return x, y


def _regimes(n, seed):
    """(n,6) -> (n,1): four regimes, each with its own response."""
    gm = torch.Generator().manual_seed(21)
    centre = torch.randn(4, 6, generator=gm) * 1.5
    w = torch.randn(4, 6, generator=gm)
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 4, (n,), generator=g)
    e = torch.randn(n, 6, generator=g)
    x = centre[k] + e
    y = (w[k] * e).sum(1) + torch.sin(2 * (w[k].roll(1, 1) * e).sum(1) / 2) + 0.1 * torch.randn(n, generator=g)
    return x / 1.8, (y / 2.5)[:, None]


def _clicks(n, seed):
    """CTR log: 6 numeric columns, 4 categorical columns (10 values each), click 0/1."""
    gm = torch.Generator().manual_seed(31)
    eff = torch.randn(4, 10, generator=gm)
    vec = torch.randn(4, 10, 3, generator=gm)
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, 6, generator=g)
    cat = torch.randint(0, 10, (n, 4), generator=g)
    col = torch.arange(4)
    v = vec[col, cat]
    logit = eff[col, cat].sum(1) + (v[:, 0] * v[:, 1]).sum(1) + num[:, 0] * eff[0, cat[:, 0]] + num[:, 1] * num[:, 2]
    y = (torch.rand(n, generator=g) < torch.sigmoid(1.2 * logit - 0.5)).float()
    return num, cat, y


def _point_sets(n, seed, max_len=20):
    """padded sets of 2-D hits: (n,max_len,2), lengths, class (line / ring / cross / blob)."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    length = torch.randint(8, max_len - 1, (n,), generator=g)
    a = 2 * torch.rand(n, max_len, generator=g) - 1
    th = torch.rand(n, 1, generator=g) * math.pi
    z = torch.zeros_like(a)
    flip = torch.rand(n, max_len, generator=g) < 0.5
    line = torch.stack([1.4 * a, z], -1)
    ring = torch.stack([(math.pi * a).cos(), (math.pi * a).sin()], -1)
    cross = torch.where(flip[..., None], torch.stack([1.4 * a, z], -1), torch.stack([z, 1.4 * a], -1))
    blob = 0.75 * torch.randn(n, max_len, 2, generator=g)
    p = torch.stack([line, ring, cross, blob], 1)[torch.arange(n), y]
    c, s = th.cos(), th.sin()
    p = torch.stack([p[..., 0] * c - p[..., 1] * s, p[..., 0] * s + p[..., 1] * c], -1)
    p = (p + 0.08 * torch.randn(p.shape, generator=g)) * 1.3
    valid = torch.arange(max_len)[None] < length[:, None]
    return p * valid[..., None], length, y


CASES = [
    {
        "name": "seg_logits_viewed_without_permute",
        "what": "The (N,C,H,W) logits are flattened with view(-1, C) without first moving the class axis to the end, so each row of scores handed to cross entropy mixes neighbouring pixels of one class map and is paired with another pixel's label.",
        "steps": 300,
    },
    {
        "name": "det_cxcywh_boxes_into_xyxy_giou",
        "what": "The detector predicts boxes as (cx, cy, w, h), but the GIoU loss, which expects corner boxes (x1, y1, x2, y2), is given them unconverted; it pulls against the L1 term and the boxes come out wrong.",
        "steps": 500,
    },
    {
        "name": "keypoint_flip_leaves_coordinates",
        "what": "The random horizontal flip of the augmentation mirrors the picture but leaves the x coordinates of the landmarks as they were, so half of the training targets point to the wrong side.",
        "steps": 500,
    },
    {
        "name": "forecast_target_window_starts_in_input",
        "what": "The target window starts one step too early (at i + L - 1 instead of i + L), so the first value to be forecast is the last value of the input window: leakage in training and every horizon off by one in use.",
        "steps": 400,
    },
    {
        "name": "autorec_loss_counts_unrated_items",
        "what": "The reconstruction loss runs over the whole rating row; the entries that were never rated (stored as 0) are not masked out and so are learnt as real ratings of 0.",
        "steps": 500,
    },
    {
        "name": "wgan_gp_without_create_graph",
        "what": "The gradient penalty is computed with autograd.grad without create_graph=True, so it is a constant in the critic's loss and penalises nothing: the critic is not held near Lipschitz one.",
        "steps": 600,
    },
    {
        "name": "vae_recon_mean_kl_sum",
        "what": "The reconstruction term is averaged over pixels and batch while the KL is summed over the latent dimensions, so the KL weighs some 256 times too much and the posterior collapses to the prior.",
        "steps": 600,
    },
    {
        "name": "ddpm_noise_drawn_uniform",
        "what": "The forward process draws its noise with rand_like (uniform on [0,1], mean 0.5) instead of randn_like, so the network learns to remove another noise than the Gaussian one that sampling starts from.",
        "steps": 600,
    },
    {
        "name": "dqn_bootstraps_through_terminal",
        "what": "The TD target is r + gamma * max Q(s') for every transition; it lacks the factor (1 - done), so values are bootstrapped beyond the end of the episode.",
        "steps": 1200,
    },
    {
        "name": "sac_actor_sample_not_rsample",
        "what": "The policy draws the action of the actor loss with dist.sample() instead of rsample(), which cuts the reparameterised path: the critic's gradient never reaches the actor.",
        "steps": 500,
    },
    {
        "name": "simsiam_without_stop_gradient",
        "what": "The target projections are not detached in the negative cosine loss (no stop-gradient), so both branches are pulled together and the representation collapses to a constant.",
        "steps": 400,
    },
    {
        "name": "distill_kldiv_given_probabilities",
        "what": "nn.KLDivLoss expects log-probabilities of the student as input but is given softmax probabilities, so the distillation loss is no KL divergence and has a wrong gradient.",
        "steps": 500,
    },
    {
        "name": "gcn_functional_dropout_always_on",
        "what": "F.dropout is called without training=self.training; its default is training=True, so dropout stays on at evaluation and the predictions are made from randomly thinned features.",
        "steps": 200,
    },
    {
        "name": "pinn_unknown_coefficient_not_optimised",
        "what": "In the inverse problem the unknown diffusivity is a Parameter of the model, but the optimizer was built from the network's parameters only, so the coefficient never moves from its first guess.",
        "steps": 1200,
    },
    {
        "name": "triplet_sqrt_of_zero_distance",
        "what": "The pairwise distances are the plain square root of squared distances; on the diagonal that is sqrt(0), whose gradient is infinite, and after the masking (0 * inf) every gradient and then every weight is NaN.",
        "steps": 400,
    },
    {
        "name": "moe_experts_in_plain_list",
        "what": "The experts of the mixture are kept in a plain Python list, so they are not registered: model.parameters() does not contain them and the optimizer trains the gate alone.",
        "steps": 600,
    },
    {
        "name": "lora_frozen_after_injection",
        "what": "The backbone is frozen by a loop over all its parameters after the LoRA layers were put in, so the low-rank matrices are frozen too and only the new head is trained.",
        "steps": 500,
    },
    {
        "name": "amp_clip_without_unscale",
        "what": "Under the GradScaler the gradients are clipped without scaler.unscale_(optimizer) first: the norm is that of the scaled gradients, so clipping to 1.0 shrinks the true gradients by the scale factor and the network hardly moves.",
        "steps": 400,
    },
    {
        "name": "ema_without_batchnorm_buffers",
        "what": "The EMA copy, which is the model that is evaluated and shipped, averages parameters() only; the BatchNorm running mean and variance are buffers and stay at their initial 0 and 1.",
        "steps": 400,
    },
    {
        "name": "warmup_lambda_returns_lr_not_factor",
        "what": "The function given to LambdaLR returns the learning rate itself; LambdaLR multiplies it with the base rate, so the effective rate is base_lr squared and the network hardly learns.",
        "steps": 300,
    },
    {
        "name": "set_attention_padding_mask_inverted",
        "what": "src_key_padding_mask must be True where a position is padding, but it is given the mask of the valid hits: attention looks at the padding only and ignores the data.",
        "steps": 400,
    },
    {
        "name": "cross_network_unscaled_randn_weights",
        "what": "The weights of the hand-written cross layers are drawn with torch.randn (std 1 whatever the fan-in), so the products blow up through the layers and the first click logits are in the tens where they should be near zero.",
        "steps": 500,
    },
]


def seg_logits_viewed_without_permute_bad():
    torch.manual_seed(0)
    num_classes, size = 4, 24
    train_x, train_y = _shape_scenes(400, size, seed=1)
    test_x, test_y = _shape_scenes(150, size, seed=2)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=12, shuffle=True, drop_last=True))

    class DoubleConv(nn.Sequential):
        def __init__(self, cin, cout):
            super().__init__(
                nn.Conv2d(cin, cout, 3, padding=1, bias=False),
                nn.BatchNorm2d(cout),
                nn.ReLU(inplace=True),
                nn.Conv2d(cout, cout, 3, padding=1, bias=False),
                nn.BatchNorm2d(cout),
                nn.ReLU(inplace=True),
            )

    class UNet(nn.Module):
        def __init__(self, n_channels, n_classes):
            super().__init__()
            self.inc = DoubleConv(n_channels, 8)
            self.down = DoubleConv(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec = DoubleConv(16, 8)
            self.outc = nn.Conv2d(8, n_classes, 1)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = self.down(F.max_pool2d(x1, 2))
            return self.outc(self.dec(torch.cat([x1, self.up(x2)], dim=1)))

    model = UNet(3, num_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        images, masks = next(loader)
        logits = model(images)
        loss = criterion(logits.view(-1, num_classes), masks.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            pred = model(test_x).argmax(1)
            ious = []
            for c in range(num_classes):
                inter = ((pred == c) & (test_y == c)).sum().item()
                union = ((pred == c) | (test_y == c)).sum().item()
                ious.append(inter / max(union, 1))
        return 1 - sum(ious) / num_classes

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_logits_viewed_without_permute_good():
    torch.manual_seed(0)
    num_classes, size = 4, 24
    train_x, train_y = _shape_scenes(400, size, seed=1)
    test_x, test_y = _shape_scenes(150, size, seed=2)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=12, shuffle=True, drop_last=True))

    class DoubleConv(nn.Sequential):
        def __init__(self, cin, cout):
            super().__init__(
                nn.Conv2d(cin, cout, 3, padding=1, bias=False),
                nn.BatchNorm2d(cout),
                nn.ReLU(inplace=True),
                nn.Conv2d(cout, cout, 3, padding=1, bias=False),
                nn.BatchNorm2d(cout),
                nn.ReLU(inplace=True),
            )

    class UNet(nn.Module):
        def __init__(self, n_channels, n_classes):
            super().__init__()
            self.inc = DoubleConv(n_channels, 8)
            self.down = DoubleConv(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec = DoubleConv(16, 8)
            self.outc = nn.Conv2d(8, n_classes, 1)

        def forward(self, x):
            x1 = self.inc(x)
            x2 = self.down(F.max_pool2d(x1, 2))
            return self.outc(self.dec(torch.cat([x1, self.up(x2)], dim=1)))

    model = UNet(3, num_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        images, masks = next(loader)
        logits = model(images)
        loss = criterion(logits.permute(0, 2, 3, 1).reshape(-1, num_classes), masks.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            pred = model(test_x).argmax(1)
            ious = []
            for c in range(num_classes):
                inter = ((pred == c) & (test_y == c)).sum().item()
                union = ((pred == c) | (test_y == c)).sum().item()
                ious.append(inter / max(union, 1))
        return 1 - sum(ious) / num_classes

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_cxcywh_boxes_into_xyxy_giou_bad():
    torch.manual_seed(0)
    train_x, train_c, train_b = _box_scenes(800, 24, seed=1)
    test_x, test_c, test_b = _box_scenes(200, 24, seed=2)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_c, train_b), batch_size=32, shuffle=True, drop_last=True))

    def box_cxcywh_to_xyxy(b):
        cx, cy, w, h = b.unbind(-1)
        return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], dim=-1)

    def box_xyxy_to_cxcywh(b):
        x0, y0, x1, y1 = b.unbind(-1)
        return torch.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], dim=-1)

    def generalized_iou(a, b, eps=1e-6):
        area_a = (a[:, 2] - a[:, 0]).clamp(min=0) * (a[:, 3] - a[:, 1]).clamp(min=0)
        area_b = (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)
        wh = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = area_a + area_b - inter
        whc = torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])
        hull = whc[:, 0] * whc[:, 1]
        iou = inter / (union + eps)
        return iou - (hull - union) / (hull + eps), iou

    class TinyDetector(nn.Module):
        def __init__(self, num_classes=2):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(24 * 6 * 6, 64),
                nn.ReLU(),
            )
            self.class_embed = nn.Linear(64, num_classes)
            self.bbox_embed = nn.Linear(64, 4)

        def forward(self, x):
            h = self.backbone(x)
            return {"pred_logits": self.class_embed(h), "pred_boxes": self.bbox_embed(h).sigmoid()}

    model = TinyDetector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        images, labels, boxes = next(loader)
        out = model(images)
        loss_ce = F.cross_entropy(out["pred_logits"], labels)
        loss_bbox = F.l1_loss(out["pred_boxes"], box_xyxy_to_cxcywh(boxes), reduction="none").sum(-1).mean()
        giou, _ = generalized_iou(out["pred_boxes"], boxes)
        loss_giou = (1 - giou).mean()
        loss = loss_ce + loss_bbox + 2 * loss_giou
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            out = model(test_x)
            _, iou = generalized_iou(box_cxcywh_to_xyxy(out["pred_boxes"]), test_b)
        return 1 - iou.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_cxcywh_boxes_into_xyxy_giou_good():
    torch.manual_seed(0)
    train_x, train_c, train_b = _box_scenes(800, 24, seed=1)
    test_x, test_c, test_b = _box_scenes(200, 24, seed=2)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_c, train_b), batch_size=32, shuffle=True, drop_last=True))

    def box_cxcywh_to_xyxy(b):
        cx, cy, w, h = b.unbind(-1)
        return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], dim=-1)

    def box_xyxy_to_cxcywh(b):
        x0, y0, x1, y1 = b.unbind(-1)
        return torch.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], dim=-1)

    def generalized_iou(a, b, eps=1e-6):
        area_a = (a[:, 2] - a[:, 0]).clamp(min=0) * (a[:, 3] - a[:, 1]).clamp(min=0)
        area_b = (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)
        wh = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0)
        inter = wh[:, 0] * wh[:, 1]
        union = area_a + area_b - inter
        whc = torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])
        hull = whc[:, 0] * whc[:, 1]
        iou = inter / (union + eps)
        return iou - (hull - union) / (hull + eps), iou

    class TinyDetector(nn.Module):
        def __init__(self, num_classes=2):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(24 * 6 * 6, 64),
                nn.ReLU(),
            )
            self.class_embed = nn.Linear(64, num_classes)
            self.bbox_embed = nn.Linear(64, 4)

        def forward(self, x):
            h = self.backbone(x)
            return {"pred_logits": self.class_embed(h), "pred_boxes": self.bbox_embed(h).sigmoid()}

    model = TinyDetector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        images, labels, boxes = next(loader)
        out = model(images)
        loss_ce = F.cross_entropy(out["pred_logits"], labels)
        loss_bbox = F.l1_loss(out["pred_boxes"], box_xyxy_to_cxcywh(boxes), reduction="none").sum(-1).mean()
        giou, _ = generalized_iou(box_cxcywh_to_xyxy(out["pred_boxes"]), boxes)
        loss_giou = (1 - giou).mean()
        loss = loss_ce + loss_bbox + 2 * loss_giou
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            out = model(test_x)
            _, iou = generalized_iou(box_cxcywh_to_xyxy(out["pred_boxes"]), test_b)
        return 1 - iou.mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keypoint_flip_leaves_coordinates_bad():
    torch.manual_seed(0)

    class InstrumentDataset(Dataset):
        """tip and base of a surgical instrument; landmarks as (x, y) in [0, 1]"""

        def __init__(self, images, landmarks, train=True):
            self.images, self.landmarks, self.train = images, landmarks, train

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image, pts = self.images[idx], self.landmarks[idx].clone()
            if self.train and torch.rand(1).item() < 0.5:
                image = torch.flip(image, dims=[-1])
            return image, pts

    train_x, train_pts = _instrument_images(800, 24, seed=1)
    test_x, test_pts = _instrument_images(200, 24, seed=2)
    train_x, test_x = _standardise(train_x, test_x)
    train_set = InstrumentDataset(train_x, train_pts, train=True)
    loader = _cycle(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))

    class LandmarkNet(nn.Module):
        def __init__(self, n_points=2):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 12, 5, stride=2, padding=2, bias=False),
                nn.BatchNorm2d(12),
                nn.ReLU(),
                nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
            )
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(24 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, 2 * n_points))

        def forward(self, x):
            return torch.sigmoid(self.head(self.features(x))).view(-1, 2, 2)

    model = LandmarkNet()
    criterion = nn.SmoothL1Loss(beta=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        images, pts = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(images), pts)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            err = (model(test_x) - test_pts).norm(dim=-1).mean().item()
        return 24 * err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keypoint_flip_leaves_coordinates_good():
    torch.manual_seed(0)

    class InstrumentDataset(Dataset):
        """tip and base of a surgical instrument; landmarks as (x, y) in [0, 1]"""

        def __init__(self, images, landmarks, train=True):
            self.images, self.landmarks, self.train = images, landmarks, train

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image, pts = self.images[idx], self.landmarks[idx].clone()
            if self.train and torch.rand(1).item() < 0.5:
                image = torch.flip(image, dims=[-1])
                pts[:, 0] = 1.0 - pts[:, 0]
            return image, pts

    train_x, train_pts = _instrument_images(800, 24, seed=1)
    test_x, test_pts = _instrument_images(200, 24, seed=2)
    train_x, test_x = _standardise(train_x, test_x)
    train_set = InstrumentDataset(train_x, train_pts, train=True)
    loader = _cycle(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))

    class LandmarkNet(nn.Module):
        def __init__(self, n_points=2):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 12, 5, stride=2, padding=2, bias=False),
                nn.BatchNorm2d(12),
                nn.ReLU(),
                nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
            )
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(24 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, 2 * n_points))

        def forward(self, x):
            return torch.sigmoid(self.head(self.features(x))).view(-1, 2, 2)

    model = LandmarkNet()
    criterion = nn.SmoothL1Loss(beta=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        images, pts = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(images), pts)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            err = (model(test_x) - test_pts).norm(dim=-1).mean().item()
        return 24 * err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_target_window_starts_in_input_bad():
    torch.manual_seed(0)
    L, H = 24, 4
    series = _load_series(1600, seed=4)
    train, test = series[:1200], series[1200:]
    mean, std = train.mean(), train.std()
    train, test = (train - mean) / std, (test - mean) / std

    class WindowDataset(Dataset):
        def __init__(self, data, seq_len, pred_len):
            self.data, self.seq_len, self.pred_len = data, seq_len, pred_len

        def __len__(self):
            return len(self.data) - self.seq_len - self.pred_len + 1

        def __getitem__(self, index):
            s_end = index + self.seq_len
            r_begin = s_end - 1
            seq_x = self.data[index:s_end]
            seq_y = self.data[r_begin : r_begin + self.pred_len]
            return seq_x.unsqueeze(-1), seq_y

    loader = _cycle(DataLoader(WindowDataset(train, L, H), batch_size=32, shuffle=True, drop_last=True))
    test_x = torch.stack([test[k : k + L] for k in range(len(test) - L - H + 1)]).unsqueeze(-1)
    test_y = torch.stack([test[k + L : k + L + H] for k in range(len(test) - L - H + 1)])

    class GRUForecaster(nn.Module):
        def __init__(self, hidden=32, horizon=H):
            super().__init__()
            self.rnn = nn.GRU(1, hidden, batch_first=True)
            self.proj = nn.Linear(hidden, horizon)

        def forward(self, x):
            out, _ = self.rnn(x)
            return self.proj(out[:, -1])

    model = GRUForecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        bx, by = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(bx), by)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return F.mse_loss(model(test_x), test_y).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def forecast_target_window_starts_in_input_good():
    torch.manual_seed(0)
    L, H = 24, 4
    series = _load_series(1600, seed=4)
    train, test = series[:1200], series[1200:]
    mean, std = train.mean(), train.std()
    train, test = (train - mean) / std, (test - mean) / std

    class WindowDataset(Dataset):
        def __init__(self, data, seq_len, pred_len):
            self.data, self.seq_len, self.pred_len = data, seq_len, pred_len

        def __len__(self):
            return len(self.data) - self.seq_len - self.pred_len + 1

        def __getitem__(self, index):
            s_end = index + self.seq_len
            r_begin = s_end
            seq_x = self.data[index:s_end]
            seq_y = self.data[r_begin : r_begin + self.pred_len]
            return seq_x.unsqueeze(-1), seq_y

    loader = _cycle(DataLoader(WindowDataset(train, L, H), batch_size=32, shuffle=True, drop_last=True))
    test_x = torch.stack([test[k : k + L] for k in range(len(test) - L - H + 1)]).unsqueeze(-1)
    test_y = torch.stack([test[k + L : k + L + H] for k in range(len(test) - L - H + 1)])

    class GRUForecaster(nn.Module):
        def __init__(self, hidden=32, horizon=H):
            super().__init__()
            self.rnn = nn.GRU(1, hidden, batch_first=True)
            self.proj = nn.Linear(hidden, horizon)

        def forward(self, x):
            out, _ = self.rnn(x)
            return self.proj(out[:, -1])

    model = GRUForecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        bx, by = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(bx), by)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return F.mse_loss(model(test_x), test_y).sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def autorec_loss_counts_unrated_items_bad():
    torch.manual_seed(0)
    ratings, seen, held = _ratings()
    matrix = ratings * seen
    loader = _cycle(DataLoader(TensorDataset(matrix, seen.float()), batch_size=64, shuffle=True, drop_last=True))

    class AutoRec(nn.Module):
        def __init__(self, num_items, hidden=32):
            super().__init__()
            self.encoder = nn.Linear(num_items, hidden)
            self.drop = nn.Dropout(0.1)
            self.decoder = nn.Linear(hidden, num_items)

        def forward(self, r):
            return self.decoder(self.drop(torch.tanh(self.encoder(r))))

    model = AutoRec(matrix.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)

    def step(i):
        model.train()
        r, mask = next(loader)
        pred = model(r)
        loss = ((pred - r) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            pred = model(matrix)
            return ((pred - ratings)[held] ** 2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def autorec_loss_counts_unrated_items_good():
    torch.manual_seed(0)
    ratings, seen, held = _ratings()
    matrix = ratings * seen
    loader = _cycle(DataLoader(TensorDataset(matrix, seen.float()), batch_size=64, shuffle=True, drop_last=True))

    class AutoRec(nn.Module):
        def __init__(self, num_items, hidden=32):
            super().__init__()
            self.encoder = nn.Linear(num_items, hidden)
            self.drop = nn.Dropout(0.1)
            self.decoder = nn.Linear(hidden, num_items)

        def forward(self, r):
            return self.decoder(self.drop(torch.tanh(self.encoder(r))))

    model = AutoRec(matrix.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)

    def step(i):
        model.train()
        r, mask = next(loader)
        pred = model(r)
        loss = (((pred - r) ** 2) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            pred = model(matrix)
            return ((pred - ratings)[held] ** 2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def wgan_gp_without_create_graph_bad():
    torch.manual_seed(0)
    z_dim, n_critic, lambda_gp = 8, 5, 1.0
    real_data = _mixture_table(2000, seed=1)
    test_data = _mixture_table(500, seed=2)
    loader = _cycle(DataLoader(TensorDataset(real_data), batch_size=64, shuffle=True, drop_last=True))

    generator = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def gradient_penalty(real, fake):
        alpha = torch.rand(real.size(0), 1)
        inter = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = critic(inter)
        grads = torch.autograd.grad(
            outputs=score, inputs=inter, grad_outputs=torch.ones_like(score), retain_graph=True
        )[0]
        return ((grads.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(n_critic):
            (real,) = next(loader)
            fake = generator(torch.randn(real.size(0), z_dim)).detach()
            loss_c = critic(fake).mean() - critic(real).mean() + lambda_gp * gradient_penalty(real, fake)
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
        loss_g = -critic(generator(torch.randn(64, z_dim))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_c.item()

    def probe():
        with _Quiet(generator, critic):
            return _energy_distance(generator(torch.randn(500, z_dim)), test_data)

    return {
        "model": {"generator": generator, "critic": critic},
        "optimizer": (opt_g, opt_c),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def wgan_gp_without_create_graph_good():
    torch.manual_seed(0)
    z_dim, n_critic, lambda_gp = 8, 5, 1.0
    real_data = _mixture_table(2000, seed=1)
    test_data = _mixture_table(500, seed=2)
    loader = _cycle(DataLoader(TensorDataset(real_data), batch_size=64, shuffle=True, drop_last=True))

    generator = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def gradient_penalty(real, fake):
        alpha = torch.rand(real.size(0), 1)
        inter = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = critic(inter)
        grads = torch.autograd.grad(
            outputs=score, inputs=inter, grad_outputs=torch.ones_like(score), create_graph=True
        )[0]
        return ((grads.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(n_critic):
            (real,) = next(loader)
            fake = generator(torch.randn(real.size(0), z_dim)).detach()
            loss_c = critic(fake).mean() - critic(real).mean() + lambda_gp * gradient_penalty(real, fake)
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
        loss_g = -critic(generator(torch.randn(64, z_dim))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        return loss_c.item()

    def probe():
        with _Quiet(generator, critic):
            return _energy_distance(generator(torch.randn(500, z_dim)), test_data)

    return {
        "model": {"generator": generator, "critic": critic},
        "optimizer": (opt_g, opt_c),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def vae_recon_mean_kl_sum_bad():
    torch.manual_seed(0)
    train_x, test_x = _grey_boxes(1500, seed=1), _grey_boxes(300, seed=2)
    loader = _cycle(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))

    class VAE(nn.Module):
        def __init__(self, latent=8):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc_mu = nn.Linear(128, latent)
            self.fc_logvar = nn.Linear(128, latent)
            self.fc3 = nn.Linear(latent, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h = F.relu(self.fc1(x.flatten(1)))
            return self.fc_mu(h), self.fc_logvar(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x)
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        bce = F.binary_cross_entropy(recon_x, x.flatten(1))
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x,) = next(loader)
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            mu, _ = model.encode(test_x)
            return F.mse_loss(model.decode(mu), test_x.flatten(1)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_recon_mean_kl_sum_good():
    torch.manual_seed(0)
    train_x, test_x = _grey_boxes(1500, seed=1), _grey_boxes(300, seed=2)
    loader = _cycle(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))

    class VAE(nn.Module):
        def __init__(self, latent=8):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc_mu = nn.Linear(128, latent)
            self.fc_logvar = nn.Linear(128, latent)
            self.fc3 = nn.Linear(latent, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h = F.relu(self.fc1(x.flatten(1)))
            return self.fc_mu(h), self.fc_logvar(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x)
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        bce = F.binary_cross_entropy(recon_x, x.flatten(1), reduction="sum") / x.size(0)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x,) = next(loader)
        optimizer.zero_grad()
        recon, mu, logvar = model(x)
        loss = loss_function(recon, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            mu, _ = model.encode(test_x)
            return F.mse_loss(model.decode(mu), test_x.flatten(1)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_noise_drawn_uniform_bad():
    torch.manual_seed(0)
    T = 100
    data, test = _trajectories(1500, seed=1), _trajectories(300, seed=2)
    loader = _cycle(DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True))
    betas = torch.linspace(1e-3, 0.12, T)
    alphas = 1.0 - betas
    alphas_cumprod = torch.cumprod(alphas, dim=0)

    class SinusoidalPosEmb(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, t):
            half = self.dim // 2
            freq = torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
            e = t[:, None].float() * freq[None]
            return torch.cat([e.sin(), e.cos()], dim=-1)

    class ResBlock(nn.Module):
        def __init__(self, dim, t_dim):
            super().__init__()
            self.conv1 = nn.Conv1d(dim, dim, 5, padding=2)
            self.conv2 = nn.Conv1d(dim, dim, 5, padding=2)
            self.norm1, self.norm2 = nn.GroupNorm(4, dim), nn.GroupNorm(4, dim)
            self.time = nn.Linear(t_dim, dim)

        def forward(self, x, t):
            h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None]
            return x + self.conv2(F.silu(self.norm2(h)))

    class Denoiser(nn.Module):
        def __init__(self, dim=32, t_dim=32):
            super().__init__()
            self.time_mlp = nn.Sequential(SinusoidalPosEmb(t_dim), nn.Linear(t_dim, t_dim), nn.SiLU())
            self.inp = nn.Conv1d(2, dim, 5, padding=2)
            self.blocks = nn.ModuleList([ResBlock(dim, t_dim) for _ in range(3)])
            self.out = nn.Sequential(nn.GroupNorm(4, dim), nn.SiLU(), nn.Conv1d(dim, 2, 1))

        def forward(self, x, t):
            emb, h = self.time_mlp(t), self.inp(x)
            for block in self.blocks:
                h = block(h, emb)
            return self.out(h)

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def q_sample(x0, t, noise):
        a = alphas_cumprod[t][:, None, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def step(i):
        model.train()
        (x0,) = next(loader)
        t = torch.randint(0, T, (x0.shape[0],))
        noise = torch.rand_like(x0)
        loss = F.mse_loss(model(q_sample(x0, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            x = torch.randn(300, 2, 16)
            for k in reversed(range(T)):
                eps = model(x, torch.full((300,), k))
                x = (x - betas[k] / (1 - alphas_cumprod[k]).sqrt() * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * torch.randn_like(x)
            return _energy_distance(x, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_noise_drawn_uniform_good():
    torch.manual_seed(0)
    T = 100
    data, test = _trajectories(1500, seed=1), _trajectories(300, seed=2)
    loader = _cycle(DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True))
    betas = torch.linspace(1e-3, 0.12, T)
    alphas = 1.0 - betas
    alphas_cumprod = torch.cumprod(alphas, dim=0)

    class SinusoidalPosEmb(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, t):
            half = self.dim // 2
            freq = torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
            e = t[:, None].float() * freq[None]
            return torch.cat([e.sin(), e.cos()], dim=-1)

    class ResBlock(nn.Module):
        def __init__(self, dim, t_dim):
            super().__init__()
            self.conv1 = nn.Conv1d(dim, dim, 5, padding=2)
            self.conv2 = nn.Conv1d(dim, dim, 5, padding=2)
            self.norm1, self.norm2 = nn.GroupNorm(4, dim), nn.GroupNorm(4, dim)
            self.time = nn.Linear(t_dim, dim)

        def forward(self, x, t):
            h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None]
            return x + self.conv2(F.silu(self.norm2(h)))

    class Denoiser(nn.Module):
        def __init__(self, dim=32, t_dim=32):
            super().__init__()
            self.time_mlp = nn.Sequential(SinusoidalPosEmb(t_dim), nn.Linear(t_dim, t_dim), nn.SiLU())
            self.inp = nn.Conv1d(2, dim, 5, padding=2)
            self.blocks = nn.ModuleList([ResBlock(dim, t_dim) for _ in range(3)])
            self.out = nn.Sequential(nn.GroupNorm(4, dim), nn.SiLU(), nn.Conv1d(dim, 2, 1))

        def forward(self, x, t):
            emb, h = self.time_mlp(t), self.inp(x)
            for block in self.blocks:
                h = block(h, emb)
            return self.out(h)

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def q_sample(x0, t, noise):
        a = alphas_cumprod[t][:, None, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def step(i):
        model.train()
        (x0,) = next(loader)
        t = torch.randint(0, T, (x0.shape[0],))
        noise = torch.randn_like(x0)
        loss = F.mse_loss(model(q_sample(x0, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            x = torch.randn(300, 2, 16)
            for k in reversed(range(T)):
                eps = model(x, torch.full((300,), k))
                x = (x - betas[k] / (1 - alphas_cumprod[k]).sqrt() * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * torch.randn_like(x)
            return _energy_distance(x, test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_bootstraps_through_terminal_bad():
    torch.manual_seed(0)
    N, gamma, n_env, batch_size, sync_every = 6, 0.9, 8, 64, 25
    goal, pit = (5, 5), (2, 3)
    moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
    rng = random.Random(0)

    def observe(pos):
        return pos.float() / (N - 1) * 2 - 1

    def env_step(pos, action):
        nxt = (pos + moves[action]).clamp(0, N - 1)
        at_goal = (nxt == torch.tensor(goal)).all(-1)
        at_pit = (nxt == torch.tensor(pit)).all(-1)
        return nxt, at_goal.float() - at_pit.float(), (at_goal | at_pit).float()

    def random_start(n):
        p = torch.randint(0, N, (n, 2))
        bad = (p == torch.tensor(goal)).all(-1) | (p == torch.tensor(pit)).all(-1)
        p[bad] = 0
        return p

    class QNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, s):
            return self.net(s)

    q_net = QNetwork()
    target_net = copy.deepcopy(q_net)
    target_net.eval()
    for p in target_net.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    memory, state = [], {"pos": random_start(n_env)}

    def collect(eps):
        pos = state["pos"]
        with torch.no_grad():
            greedy = q_net(observe(pos)).argmax(1)
        action = torch.where(torch.rand(n_env) < eps, torch.randint(0, 4, (n_env,)), greedy)
        nxt, r, d = env_step(pos, action)
        memory.extend(zip(observe(pos), action, r, observe(nxt), d))
        del memory[:-5000]
        state["pos"] = torch.where(d[:, None] > 0, random_start(n_env), nxt)

    for _ in range(60):
        collect(eps=1.0)

    def step(i):
        collect(eps=max(0.2, 1.0 - i / 300))
        s, a, r, s2, d = (torch.stack(c) for c in zip(*rng.sample(memory, batch_size)))
        q = q_net(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            next_q = target_net(s2).max(1).values
            target = r + gamma * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % sync_every == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        with _Quiet(q_net):
            grid = torch.stack(torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij"), -1).view(-1, 2)
            live = ~((grid == torch.tensor(goal)).all(-1) | (grid == torch.tensor(pit)).all(-1))
            q_star = torch.zeros(N * N, 4)
            for _ in range(100):
                for a in range(4):
                    nxt, r, d = env_step(grid, torch.full((N * N,), a))
                    q_star[:, a] = r + gamma * (1 - d) * q_star[nxt[:, 0] * N + nxt[:, 1]].max(1).values
            return (q_net(observe(grid)) - q_star)[live].pow(2).mean().sqrt().item()

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_bootstraps_through_terminal_good():
    torch.manual_seed(0)
    N, gamma, n_env, batch_size, sync_every = 6, 0.9, 8, 64, 25
    goal, pit = (5, 5), (2, 3)
    moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
    rng = random.Random(0)

    def observe(pos):
        return pos.float() / (N - 1) * 2 - 1

    def env_step(pos, action):
        nxt = (pos + moves[action]).clamp(0, N - 1)
        at_goal = (nxt == torch.tensor(goal)).all(-1)
        at_pit = (nxt == torch.tensor(pit)).all(-1)
        return nxt, at_goal.float() - at_pit.float(), (at_goal | at_pit).float()

    def random_start(n):
        p = torch.randint(0, N, (n, 2))
        bad = (p == torch.tensor(goal)).all(-1) | (p == torch.tensor(pit)).all(-1)
        p[bad] = 0
        return p

    class QNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, s):
            return self.net(s)

    q_net = QNetwork()
    target_net = copy.deepcopy(q_net)
    target_net.eval()
    for p in target_net.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    memory, state = [], {"pos": random_start(n_env)}

    def collect(eps):
        pos = state["pos"]
        with torch.no_grad():
            greedy = q_net(observe(pos)).argmax(1)
        action = torch.where(torch.rand(n_env) < eps, torch.randint(0, 4, (n_env,)), greedy)
        nxt, r, d = env_step(pos, action)
        memory.extend(zip(observe(pos), action, r, observe(nxt), d))
        del memory[:-5000]
        state["pos"] = torch.where(d[:, None] > 0, random_start(n_env), nxt)

    for _ in range(60):
        collect(eps=1.0)

    def step(i):
        collect(eps=max(0.2, 1.0 - i / 300))
        s, a, r, s2, d = (torch.stack(c) for c in zip(*rng.sample(memory, batch_size)))
        q = q_net(s).gather(1, a[:, None]).squeeze(1)
        with torch.no_grad():
            next_q = target_net(s2).max(1).values
            target = r + gamma * (1 - d) * next_q
        loss = F.smooth_l1_loss(q, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i + 1) % sync_every == 0:
            target_net.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        with _Quiet(q_net):
            grid = torch.stack(torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij"), -1).view(-1, 2)
            live = ~((grid == torch.tensor(goal)).all(-1) | (grid == torch.tensor(pit)).all(-1))
            q_star = torch.zeros(N * N, 4)
            for _ in range(100):
                for a in range(4):
                    nxt, r, d = env_step(grid, torch.full((N * N,), a))
                    q_star[:, a] = r + gamma * (1 - d) * q_star[nxt[:, 0] * N + nxt[:, 1]].max(1).values
            return (q_net(observe(grid)) - q_star)[live].pow(2).mean().sqrt().item()

    return {"model": q_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sac_actor_sample_not_rsample_bad():
    torch.manual_seed(0)
    obs_dim, act_dim, n_env, gamma, tau, batch_size, horizon = 4, 2, 16, 0.95, 0.01, 64, 15
    target_entropy = -float(act_dim)

    def reset(n, gen=None):
        return torch.rand(n, 4, generator=gen) * 2 - 1  # position and goal in the plane

    def env_step(obs, act):
        pos = (obs[:, :2] + 0.25 * act).clamp(-1, 1)
        return torch.cat([pos, obs[:, 2:]], 1), -(pos - obs[:, 2:]).norm(dim=1)

    def mlp(i, o):
        return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(obs_dim, 2 * act_dim)

        def forward(self, obs):
            mean, log_std = self.net(obs).chunk(2, dim=-1)
            return mean, log_std.clamp(-5, 2)

        def get_action(self, obs):
            mean, log_std = self(obs)
            dist = Normal(mean, log_std.exp())
            u = dist.sample()
            logp = dist.log_prob(u).sum(-1, keepdim=True)
            logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1, keepdim=True)
            return torch.tanh(u), logp, torch.tanh(mean)

    class TwinQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.q1, self.q2 = mlp(obs_dim + act_dim, 1), mlp(obs_dim + act_dim, 1)

        def forward(self, o, a):
            x = torch.cat([o, a], 1)
            return self.q1(x), self.q2(x)

    actor, critic = Actor(), TwinQ()
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = torch.tensor(math.log(0.1), requires_grad=True)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
    alpha_opt = torch.optim.Adam([log_alpha], lr=1e-3)

    buf = {"o": [], "a": [], "r": [], "o2": []}
    env = {"obs": reset(n_env), "t": 0}

    def collect(random_action):
        with torch.no_grad():
            act = torch.rand(n_env, act_dim) * 2 - 1 if random_action else actor.get_action(env["obs"])[0]
        nxt, rew = env_step(env["obs"], act)
        for k, v in zip(("o", "a", "r", "o2"), (env["obs"], act, rew[:, None], nxt)):
            buf[k].append(v)
        env["t"] += 1
        # time limit only: episodes are truncated, never terminal
        env["obs"] = reset(n_env) if env["t"] % horizon == 0 else nxt

    for _ in range(60):
        collect(random_action=True)

    def step(i):
        collect(random_action=False)
        rows = torch.randint(0, len(buf["o"]), (batch_size,))
        cols = torch.randint(0, n_env, (batch_size,))
        o, a, r, o2 = (
            torch.stack([buf[k][p][q] for p, q in zip(rows.tolist(), cols.tolist())]) for k in ("o", "a", "r", "o2")
        )
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            a2, logp2, _ = actor.get_action(o2)
            target = r + gamma * (torch.min(*critic_target(o2, a2)) - alpha * logp2)
        q1, q2 = critic(o, a)
        critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        pi, logp, _ = actor.get_action(o)
        actor_loss = (alpha * logp - torch.min(*critic(o, pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        alpha_loss = -(log_alpha * (logp.detach() + target_entropy)).mean()
        alpha_opt.zero_grad()
        alpha_loss.backward()
        alpha_opt.step()

        with torch.no_grad():
            for p, tp in zip(critic.parameters(), critic_target.parameters()):
                tp.lerp_(p, tau)
        return critic_loss.item()

    def probe():
        with _Quiet(actor, critic):
            obs, total = reset(200, torch.Generator().manual_seed(9)), 0.0
            for _ in range(horizon):
                obs, rew = env_step(obs, actor.get_action(obs)[2])
                total -= rew.mean().item()
            return total

    return {
        "model": {"actor": actor, "critic": critic},
        "optimizer": (actor_opt, critic_opt, alpha_opt),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def sac_actor_sample_not_rsample_good():
    torch.manual_seed(0)
    obs_dim, act_dim, n_env, gamma, tau, batch_size, horizon = 4, 2, 16, 0.95, 0.01, 64, 15
    target_entropy = -float(act_dim)

    def reset(n, gen=None):
        return torch.rand(n, 4, generator=gen) * 2 - 1  # position and goal in the plane

    def env_step(obs, act):
        pos = (obs[:, :2] + 0.25 * act).clamp(-1, 1)
        return torch.cat([pos, obs[:, 2:]], 1), -(pos - obs[:, 2:]).norm(dim=1)

    def mlp(i, o):
        return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(obs_dim, 2 * act_dim)

        def forward(self, obs):
            mean, log_std = self.net(obs).chunk(2, dim=-1)
            return mean, log_std.clamp(-5, 2)

        def get_action(self, obs):
            mean, log_std = self(obs)
            dist = Normal(mean, log_std.exp())
            u = dist.rsample()
            logp = dist.log_prob(u).sum(-1, keepdim=True)
            logp = logp - (2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1, keepdim=True)
            return torch.tanh(u), logp, torch.tanh(mean)

    class TwinQ(nn.Module):
        def __init__(self):
            super().__init__()
            self.q1, self.q2 = mlp(obs_dim + act_dim, 1), mlp(obs_dim + act_dim, 1)

        def forward(self, o, a):
            x = torch.cat([o, a], 1)
            return self.q1(x), self.q2(x)

    actor, critic = Actor(), TwinQ()
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = torch.tensor(math.log(0.1), requires_grad=True)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
    alpha_opt = torch.optim.Adam([log_alpha], lr=1e-3)

    buf = {"o": [], "a": [], "r": [], "o2": []}
    env = {"obs": reset(n_env), "t": 0}

    def collect(random_action):
        with torch.no_grad():
            act = torch.rand(n_env, act_dim) * 2 - 1 if random_action else actor.get_action(env["obs"])[0]
        nxt, rew = env_step(env["obs"], act)
        for k, v in zip(("o", "a", "r", "o2"), (env["obs"], act, rew[:, None], nxt)):
            buf[k].append(v)
        env["t"] += 1
        # time limit only: episodes are truncated, never terminal
        env["obs"] = reset(n_env) if env["t"] % horizon == 0 else nxt

    for _ in range(60):
        collect(random_action=True)

    def step(i):
        collect(random_action=False)
        rows = torch.randint(0, len(buf["o"]), (batch_size,))
        cols = torch.randint(0, n_env, (batch_size,))
        o, a, r, o2 = (
            torch.stack([buf[k][p][q] for p, q in zip(rows.tolist(), cols.tolist())]) for k in ("o", "a", "r", "o2")
        )
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            a2, logp2, _ = actor.get_action(o2)
            target = r + gamma * (torch.min(*critic_target(o2, a2)) - alpha * logp2)
        q1, q2 = critic(o, a)
        critic_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        pi, logp, _ = actor.get_action(o)
        actor_loss = (alpha * logp - torch.min(*critic(o, pi))).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        alpha_loss = -(log_alpha * (logp.detach() + target_entropy)).mean()
        alpha_opt.zero_grad()
        alpha_loss.backward()
        alpha_opt.step()

        with torch.no_grad():
            for p, tp in zip(critic.parameters(), critic_target.parameters()):
                tp.lerp_(p, tau)
        return critic_loss.item()

    def probe():
        with _Quiet(actor, critic):
            obs, total = reset(200, torch.Generator().manual_seed(9)), 0.0
            for _ in range(horizon):
                obs, rew = env_step(obs, actor.get_action(obs)[2])
                total -= rew.mean().item()
            return total

    return {
        "model": {"actor": actor, "critic": critic},
        "optimizer": (actor_opt, critic_opt, alpha_opt),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def simsiam_without_stop_gradient_bad():
    torch.manual_seed(0)
    train_x, train_y = _glyph_images(800, 16, seed=1, noise=0.8)
    test_x, test_y = _glyph_images(300, 16, seed=2, noise=0.8)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))

    def augment(x):
        shifts = torch.randint(-3, 4, (x.size(0), 2)).tolist()
        x = torch.stack([torch.roll(img, s, dims=(1, 2)) for img, s in zip(x, shifts)])
        x = x * (0.7 + 0.6 * torch.rand(x.size(0), 1, 1, 1))
        return x + 0.3 * torch.randn_like(x)

    class SimSiam(nn.Module):
        def __init__(self, dim=32, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(512, 64, bias=False),
                nn.BatchNorm1d(64),
                nn.ReLU(),
                nn.Linear(64, dim, bias=False),
                nn.BatchNorm1d(dim, affine=False),
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim)
            )

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1, z2

    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        (x,) = next(loader)
        p1, p2, z1, z2 = model(augment(x), augment(x))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            ref = F.normalize(model.encoder(train_x), dim=1)
            qry = F.normalize(model.encoder(test_x), dim=1)
            idx = (qry @ ref.T).topk(5, dim=1).indices
            vote = F.one_hot(train_y[idx], 6).sum(1).argmax(1)
            return (vote != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_without_stop_gradient_good():
    torch.manual_seed(0)
    train_x, train_y = _glyph_images(800, 16, seed=1, noise=0.8)
    test_x, test_y = _glyph_images(300, 16, seed=2, noise=0.8)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))

    def augment(x):
        shifts = torch.randint(-3, 4, (x.size(0), 2)).tolist()
        x = torch.stack([torch.roll(img, s, dims=(1, 2)) for img, s in zip(x, shifts)])
        x = x * (0.7 + 0.6 * torch.rand(x.size(0), 1, 1, 1))
        return x + 0.3 * torch.randn_like(x)

    class SimSiam(nn.Module):
        def __init__(self, dim=32, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(512, 64, bias=False),
                nn.BatchNorm1d(64),
                nn.ReLU(),
                nn.Linear(64, dim, bias=False),
                nn.BatchNorm1d(dim, affine=False),
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim)
            )

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1.detach(), z2.detach()

    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        (x,) = next(loader)
        p1, p2, z1, z2 = model(augment(x), augment(x))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            ref = F.normalize(model.encoder(train_x), dim=1)
            qry = F.normalize(model.encoder(test_x), dim=1)
            idx = (qry @ ref.T).topk(5, dim=1).indices
            vote = F.one_hot(train_y[idx], 6).sum(1).argmax(1)
            return (vote != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kldiv_given_probabilities_bad():
    torch.manual_seed(0)
    temperature, n_cls = 4.0, 6
    pool_x, pool_y = _glyph_images(1200, 16, seed=1, noise=0.9)
    test_x, test_y = _glyph_images(500, 16, seed=2, noise=0.9)
    pool_x, test_x = _standardise(pool_x, test_x)
    transfer = _cycle(DataLoader(TensorDataset(pool_x), batch_size=64, shuffle=True, drop_last=True))
    labelled = _cycle(DataLoader(TensorDataset(pool_x, pool_y), batch_size=64, shuffle=True, drop_last=True))

    teacher = nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, n_cls),
    )
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3, weight_decay=1e-4)
    for _ in range(150):
        x, y = next(labelled)
        t_opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, n_cls))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, weight_decay=1e-4)
    kl = nn.KLDivLoss(reduction="batchmean")

    def step(i):
        student.train()
        (x,) = next(transfer)
        with torch.no_grad():
            t_logits = teacher(x)
        s_logits = student(x)
        loss = kl(F.softmax(s_logits / temperature, dim=1), F.softmax(t_logits / temperature, dim=1)) * temperature**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(student, teacher):
            return F.cross_entropy(student(test_x), test_y).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kldiv_given_probabilities_good():
    torch.manual_seed(0)
    temperature, n_cls = 4.0, 6
    pool_x, pool_y = _glyph_images(1200, 16, seed=1, noise=0.9)
    test_x, test_y = _glyph_images(500, 16, seed=2, noise=0.9)
    pool_x, test_x = _standardise(pool_x, test_x)
    transfer = _cycle(DataLoader(TensorDataset(pool_x), batch_size=64, shuffle=True, drop_last=True))
    labelled = _cycle(DataLoader(TensorDataset(pool_x, pool_y), batch_size=64, shuffle=True, drop_last=True))

    teacher = nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, n_cls),
    )
    t_opt = torch.optim.Adam(teacher.parameters(), lr=2e-3, weight_decay=1e-4)
    for _ in range(150):
        x, y = next(labelled)
        t_opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, n_cls))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, weight_decay=1e-4)
    kl = nn.KLDivLoss(reduction="batchmean")

    def step(i):
        student.train()
        (x,) = next(transfer)
        with torch.no_grad():
            t_logits = teacher(x)
        s_logits = student(x)
        loss = (
            kl(F.log_softmax(s_logits / temperature, dim=1), F.softmax(t_logits / temperature, dim=1)) * temperature**2
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(student, teacher):
            return F.cross_entropy(student(test_x), test_y).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_functional_dropout_always_on_bad():
    torch.manual_seed(0)
    x, y, adj, train_mask, test_mask = _citation_graph()

    class GraphConvolution(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(in_features, out_features))
            self.bias = nn.Parameter(torch.zeros(out_features))
            nn.init.xavier_uniform_(self.weight)

        def forward(self, inputs, adj):
            return adj @ (inputs @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self, nfeat, nhid, nclass, dropout):
            super().__init__()
            self.gc1 = GraphConvolution(nfeat, nhid)
            self.gc2 = GraphConvolution(nhid, nclass)
            self.dropout = dropout

        def forward(self, x, adj):
            x = F.dropout(x, self.dropout)
            x = F.relu(self.gc1(x, adj))
            x = F.dropout(x, self.dropout)
            x = self.gc2(x, adj)
            return F.log_softmax(x, dim=1)

    model = GCN(x.shape[1], 16, 4, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss = F.nll_loss(output[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            err = [(model(x, adj)[test_mask].argmax(1) != y[test_mask]).float().mean().item() for _ in range(10)]
        return sum(err) / len(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gcn_functional_dropout_always_on_good():
    torch.manual_seed(0)
    x, y, adj, train_mask, test_mask = _citation_graph()

    class GraphConvolution(nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(in_features, out_features))
            self.bias = nn.Parameter(torch.zeros(out_features))
            nn.init.xavier_uniform_(self.weight)

        def forward(self, inputs, adj):
            return adj @ (inputs @ self.weight) + self.bias

    class GCN(nn.Module):
        def __init__(self, nfeat, nhid, nclass, dropout):
            super().__init__()
            self.gc1 = GraphConvolution(nfeat, nhid)
            self.gc2 = GraphConvolution(nhid, nclass)
            self.dropout = dropout

        def forward(self, x, adj):
            x = F.dropout(x, self.dropout, training=self.training)
            x = F.relu(self.gc1(x, adj))
            x = F.dropout(x, self.dropout, training=self.training)
            x = self.gc2(x, adj)
            return F.log_softmax(x, dim=1)

    model = GCN(x.shape[1], 16, 4, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        output = model(x, adj)
        loss = F.nll_loss(output[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            err = [(model(x, adj)[test_mask].argmax(1) != y[test_mask]).float().mean().item() for _ in range(10)]
        return sum(err) / len(err)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_unknown_coefficient_not_optimised_bad():
    torch.manual_seed(0)
    true_nu = 0.2
    g = torch.Generator().manual_seed(2)

    def solution(x, t):
        return torch.exp(-true_nu * math.pi**2 * t) * torch.sin(math.pi * x)

    x_obs, t_obs = torch.rand(300, 1, generator=g) * 2 - 1, torch.rand(300, 1, generator=g)
    u_obs = solution(x_obs, t_obs) + 0.01 * torch.randn(300, 1, generator=g)

    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, 1),
            )
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)
            self.nu = nn.Parameter(torch.tensor(0.5))

        def forward(self, x, t):
            return self.net(torch.cat([x, 2 * t - 1], dim=1))

        def residual(self, x, t):
            x, t = x.requires_grad_(True), t.requires_grad_(True)
            u = self(x, t)
            u_x, u_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
            u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
            return u_t - self.nu * u_xx

    model = PINN()
    optimizer = torch.optim.Adam(model.net.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x_f, t_f = torch.rand(128, 1) * 2 - 1, torch.rand(128, 1)
        loss_data = F.mse_loss(model(x_obs, t_obs), u_obs)
        loss_pde = model.residual(x_f, t_f).pow(2).mean()
        loss = loss_data + loss_pde
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return abs(model.nu.item() - true_nu) / true_nu

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_unknown_coefficient_not_optimised_good():
    torch.manual_seed(0)
    true_nu = 0.2
    g = torch.Generator().manual_seed(2)

    def solution(x, t):
        return torch.exp(-true_nu * math.pi**2 * t) * torch.sin(math.pi * x)

    x_obs, t_obs = torch.rand(300, 1, generator=g) * 2 - 1, torch.rand(300, 1, generator=g)
    u_obs = solution(x_obs, t_obs) + 0.01 * torch.randn(300, 1, generator=g)

    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, 1),
            )
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)
            self.nu = nn.Parameter(torch.tensor(0.5))

        def forward(self, x, t):
            return self.net(torch.cat([x, 2 * t - 1], dim=1))

        def residual(self, x, t):
            x, t = x.requires_grad_(True), t.requires_grad_(True)
            u = self(x, t)
            u_x, u_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
            u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
            return u_t - self.nu * u_xx

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x_f, t_f = torch.rand(128, 1) * 2 - 1, torch.rand(128, 1)
        loss_data = F.mse_loss(model(x_obs, t_obs), u_obs)
        loss_pde = model.residual(x_f, t_f).pow(2).mean()
        loss = loss_data + loss_pde
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return abs(model.nu.item() - true_nu) / true_nu

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def triplet_sqrt_of_zero_distance_bad():
    torch.manual_seed(0)
    train_x, train_y = _glyph_images(1200, 16, seed=1, n_classes=12, noise=0.5)
    test_x, test_y = _glyph_images(400, 16, seed=2, n_classes=12, noise=0.5)
    train_x, test_x = _standardise(train_x, test_x)
    ref_x, ref_y, qry_x, qry_y = train_x[:400], train_y[:400], test_x, test_y

    class PKSampler(torch.utils.data.Sampler):
        """P classes with K pictures each"""

        def __init__(self, labels, p=6, k=6):
            self.by_class = [torch.nonzero(labels == c).squeeze(1) for c in range(int(labels.max()) + 1)]
            self.p, self.k = p, k

        def __len__(self):
            return 50

        def __iter__(self):
            for _ in range(len(self)):
                batch = []
                for c in torch.randperm(len(self.by_class))[: self.p].tolist():
                    ids = self.by_class[c]
                    batch += ids[torch.randperm(len(ids))[: self.k]].tolist()
                yield batch

    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_sampler=PKSampler(train_y)))

    class EmbeddingNet(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
            )
            self.fc = nn.Linear(512, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x).flatten(1)), dim=1)

    def pairwise_distances(e):
        sq = (e.unsqueeze(1) - e.unsqueeze(0)).pow(2).sum(dim=2)
        return sq.sqrt()

    def batch_hard_triplet_loss(e, labels, margin=0.3):
        d = pairwise_distances(e)
        same = labels[:, None] == labels[None]
        eye = torch.eye(len(labels), dtype=torch.bool)
        hardest_pos = (d * (same & ~eye).float()).max(dim=1).values
        hardest_neg = (d + 10.0 * same.float()).min(dim=1).values
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = batch_hard_triplet_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            ref, qry = model(ref_x), model(qry_x)
            nearest = torch.nan_to_num(torch.cdist(qry, ref), nan=9.0).argmin(1)
            return (ref_y[nearest] != qry_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def triplet_sqrt_of_zero_distance_good():
    torch.manual_seed(0)
    train_x, train_y = _glyph_images(1200, 16, seed=1, n_classes=12, noise=0.5)
    test_x, test_y = _glyph_images(400, 16, seed=2, n_classes=12, noise=0.5)
    train_x, test_x = _standardise(train_x, test_x)
    ref_x, ref_y, qry_x, qry_y = train_x[:400], train_y[:400], test_x, test_y

    class PKSampler(torch.utils.data.Sampler):
        """P classes with K pictures each"""

        def __init__(self, labels, p=6, k=6):
            self.by_class = [torch.nonzero(labels == c).squeeze(1) for c in range(int(labels.max()) + 1)]
            self.p, self.k = p, k

        def __len__(self):
            return 50

        def __iter__(self):
            for _ in range(len(self)):
                batch = []
                for c in torch.randperm(len(self.by_class))[: self.p].tolist():
                    ids = self.by_class[c]
                    batch += ids[torch.randperm(len(ids))[: self.k]].tolist()
                yield batch

    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_sampler=PKSampler(train_y)))

    class EmbeddingNet(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
            )
            self.fc = nn.Linear(512, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x).flatten(1)), dim=1)

    def pairwise_distances(e):
        sq = (e.unsqueeze(1) - e.unsqueeze(0)).pow(2).sum(dim=2)
        return (sq + 1e-8).sqrt()

    def batch_hard_triplet_loss(e, labels, margin=0.3):
        d = pairwise_distances(e)
        same = labels[:, None] == labels[None]
        eye = torch.eye(len(labels), dtype=torch.bool)
        hardest_pos = (d * (same & ~eye).float()).max(dim=1).values
        hardest_neg = (d + 10.0 * same.float()).min(dim=1).values
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = batch_hard_triplet_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            ref, qry = model(ref_x), model(qry_x)
            nearest = torch.nan_to_num(torch.cdist(qry, ref), nan=9.0).argmin(1)
            return (ref_y[nearest] != qry_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moe_experts_in_plain_list_bad():
    torch.manual_seed(0)
    train_x, train_y = _regimes(3000, seed=1)
    test_x, test_y = _regimes(600, seed=2)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, drop_last=True))

    class Expert(nn.Module):
        def __init__(self, d_in, d_hidden, d_out):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(d_in, d_hidden), nn.Linear(d_hidden, d_out)

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))

    class MixtureOfExperts(nn.Module):
        def __init__(self, d_in, d_out, num_experts=4, d_hidden=24):
            super().__init__()
            self.gate = nn.Linear(d_in, num_experts)
            self.experts = [Expert(d_in, d_hidden, d_out) for _ in range(num_experts)]

        def forward(self, x):
            w = F.softmax(self.gate(x), dim=-1)
            out = torch.stack([expert(x) for expert in self.experts], dim=1)
            return (w.unsqueeze(-1) * out).sum(dim=1), w

    model = MixtureOfExperts(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        pred, w = model(x)
        importance = w.mean(0)
        balance = importance.numel() * importance.pow(2).sum() - 1
        loss = F.mse_loss(pred, y) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return F.mse_loss(model(test_x)[0], test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moe_experts_in_plain_list_good():
    torch.manual_seed(0)
    train_x, train_y = _regimes(3000, seed=1)
    test_x, test_y = _regimes(600, seed=2)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, drop_last=True))

    class Expert(nn.Module):
        def __init__(self, d_in, d_hidden, d_out):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(d_in, d_hidden), nn.Linear(d_hidden, d_out)

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))

    class MixtureOfExperts(nn.Module):
        def __init__(self, d_in, d_out, num_experts=4, d_hidden=24):
            super().__init__()
            self.gate = nn.Linear(d_in, num_experts)
            self.experts = nn.ModuleList([Expert(d_in, d_hidden, d_out) for _ in range(num_experts)])

        def forward(self, x):
            w = F.softmax(self.gate(x), dim=-1)
            out = torch.stack([expert(x) for expert in self.experts], dim=1)
            return (w.unsqueeze(-1) * out).sum(dim=1), w

    model = MixtureOfExperts(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        pred, w = model(x)
        importance = w.mean(0)
        balance = importance.numel() * importance.pow(2).sum() - 1
        loss = F.mse_loss(pred, y) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return F.mse_loss(model(test_x)[0], test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lora_frozen_after_injection_bad():
    torch.manual_seed(0)

    class LoRALinear(nn.Module):
        def __init__(self, base, r=4, alpha=8):
            super().__init__()
            self.base, self.scaling = base, alpha / r
            self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

        def forward(self, x):
            return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling

    def inject_lora(module):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child))

    class SpectraNet(nn.Module):
        def __init__(self, n_out=4):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.head = nn.Linear(64, n_out)

        def forward(self, x):
            return self.head(self.backbone(x))

    # "pretrained" on the first instrument
    src_x, src_y = _spectra(3000, seed=1)
    (src_x,) = _standardise(src_x)
    src = _cycle(DataLoader(TensorDataset(src_x, src_y), batch_size=128, shuffle=True))
    model = SpectraNet()
    pre = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(500):
        x, y = next(src)
        pre.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pre.step()
    model.zero_grad(set_to_none=True)

    # adapted to the second instrument
    tgt_x, tgt_y = _spectra(1500, seed=3, shift=True)
    test_x, test_y = _spectra(600, seed=4, shift=True)
    tgt_x, test_x = _standardise(tgt_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(tgt_x, tgt_y), batch_size=64, shuffle=True, drop_last=True))
    inject_lora(model.backbone)
    for p in model.backbone.parameters():
        p.requires_grad = False
    model.head = nn.Linear(64, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lora_frozen_after_injection_good():
    torch.manual_seed(0)

    class LoRALinear(nn.Module):
        def __init__(self, base, r=4, alpha=8):
            super().__init__()
            self.base, self.scaling = base, alpha / r
            self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

        def forward(self, x):
            return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling

    def inject_lora(module):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child))

    class SpectraNet(nn.Module):
        def __init__(self, n_out=4):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.head = nn.Linear(64, n_out)

        def forward(self, x):
            return self.head(self.backbone(x))

    # "pretrained" on the first instrument
    src_x, src_y = _spectra(3000, seed=1)
    (src_x,) = _standardise(src_x)
    src = _cycle(DataLoader(TensorDataset(src_x, src_y), batch_size=128, shuffle=True))
    model = SpectraNet()
    pre = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(500):
        x, y = next(src)
        pre.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pre.step()
    model.zero_grad(set_to_none=True)

    # adapted to the second instrument
    tgt_x, tgt_y = _spectra(1500, seed=3, shift=True)
    test_x, test_y = _spectra(600, seed=4, shift=True)
    tgt_x, test_x = _standardise(tgt_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(tgt_x, tgt_y), batch_size=64, shuffle=True, drop_last=True))
    for p in model.backbone.parameters():
        p.requires_grad = False
    inject_lora(model.backbone)
    model.head = nn.Linear(64, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_without_unscale_bad():
    torch.manual_seed(0)
    train_x, train_y = _regimes(3000, seed=1)
    test_x, test_y = _regimes(600, seed=2)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, drop_last=True))

    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(i):
        model.train()
        x, y = next(loader)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
        loss = F.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with _Quiet(model):
            return F.mse_loss(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_without_unscale_good():
    torch.manual_seed(0)
    train_x, train_y = _regimes(3000, seed=1)
    test_x, test_y = _regimes(600, seed=2)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, drop_last=True))

    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(i):
        model.train()
        x, y = next(loader)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
        loss = F.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with _Quiet(model):
            return F.mse_loss(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ema_without_batchnorm_buffers_bad():
    torch.manual_seed(0)
    train_x, train_y = _shape_scenes(700, 16, seed=1, max_objects=1, noise=0.5)
    test_x, test_y = _shape_scenes(300, 16, seed=2, max_objects=1, noise=0.5)
    train_x, test_x = _standardise(train_x, test_x)
    train_y, test_y = train_y.flatten(1).max(1).values - 1, test_y.flatten(1).max(1).values - 1
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    class ModelEMA:
        def __init__(self, model, decay=0.98):
            self.module = copy.deepcopy(model).eval()
            self.decay = decay
            for p in self.module.parameters():
                p.requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.module.parameters(), model.parameters()):
                e.mul_(self.decay).add_(p, alpha=1 - self.decay)

    ema = ModelEMA(model)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    def probe():
        with _Quiet(ema.module):
            return F.cross_entropy(ema.module(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ema_without_batchnorm_buffers_good():
    torch.manual_seed(0)
    train_x, train_y = _shape_scenes(700, 16, seed=1, max_objects=1, noise=0.5)
    test_x, test_y = _shape_scenes(300, 16, seed=2, max_objects=1, noise=0.5)
    train_x, test_x = _standardise(train_x, test_x)
    train_y, test_y = train_y.flatten(1).max(1).values - 1, test_y.flatten(1).max(1).values - 1
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    class ModelEMA:
        def __init__(self, model, decay=0.98):
            self.module = copy.deepcopy(model).eval()
            self.decay = decay
            for p in self.module.parameters():
                p.requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for e, p in zip(self.module.parameters(), model.parameters()):
                e.mul_(self.decay).add_(p, alpha=1 - self.decay)
            for e, b in zip(self.module.buffers(), model.buffers()):
                e.copy_(b)

    ema = ModelEMA(model)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    def probe():
        with _Quiet(ema.module):
            return F.cross_entropy(ema.module(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def warmup_lambda_returns_lr_not_factor_bad():
    torch.manual_seed(0)
    train_x, train_y = _glyph_images(1200, 16, seed=1, noise=0.6, shift=2)
    test_x, test_y = _glyph_images(400, 16, seed=2, noise=0.6, shift=2)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    class TinyViT(nn.Module):
        def __init__(self, patch=4, dim=32, depth=2, n_cls=6):
            super().__init__()
            self.patch_embed = nn.Conv2d(1, dim, patch, stride=patch)
            self.pos_embed = nn.Parameter(torch.zeros(1, 16, dim))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
            layer = nn.TransformerEncoderLayer(
                dim, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, n_cls)

        def forward(self, x):
            x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
            return self.head(self.norm(self.blocks(x)).mean(1))

    base_lr, warmup, total = 2e-3, 10, 300
    model = TinyViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=base_lr, weight_decay=0.01)

    def lr_lambda(it):
        if it < warmup:
            return base_lr * (it + 1) / warmup
        return base_lr * 0.5 * (1 + math.cos(math.pi * (it - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def warmup_lambda_returns_lr_not_factor_good():
    torch.manual_seed(0)
    train_x, train_y = _glyph_images(1200, 16, seed=1, noise=0.6, shift=2)
    test_x, test_y = _glyph_images(400, 16, seed=2, noise=0.6, shift=2)
    train_x, test_x = _standardise(train_x, test_x)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    class TinyViT(nn.Module):
        def __init__(self, patch=4, dim=32, depth=2, n_cls=6):
            super().__init__()
            self.patch_embed = nn.Conv2d(1, dim, patch, stride=patch)
            self.pos_embed = nn.Parameter(torch.zeros(1, 16, dim))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
            layer = nn.TransformerEncoderLayer(
                dim, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, n_cls)

        def forward(self, x):
            x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
            return self.head(self.norm(self.blocks(x)).mean(1))

    base_lr, warmup, total = 2e-3, 10, 300
    model = TinyViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=base_lr, weight_decay=0.01)

    def lr_lambda(it):
        if it < warmup:
            return (it + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (it - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def set_attention_padding_mask_inverted_bad():
    torch.manual_seed(0)
    max_len = 20
    train_x, train_len, train_y = _point_sets(2000, seed=1, max_len=max_len)
    test_x, test_len, test_y = _point_sets(400, seed=2, max_len=max_len)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_len, train_y), batch_size=32, shuffle=True, drop_last=True))

    class HitClassifier(nn.Module):
        def __init__(self, dim=32, n_cls=4):
            super().__init__()
            self.embed = nn.Linear(2, dim)
            self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
            layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, n_cls)

        def forward(self, hits, lengths):
            n = hits.size(0)
            tokens = torch.cat([self.cls.expand(n, -1, -1), self.embed(hits)], dim=1)
            mask = torch.arange(tokens.size(1))[None] <= lengths[:, None]
            out = self.encoder(tokens, src_key_padding_mask=mask)
            return self.head(self.norm(out[:, 0]))

    model = HitClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step(i):
        model.train()
        hits, lengths, labels = next(loader)
        loss = F.cross_entropy(model(hits, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return (model(test_x, test_len).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def set_attention_padding_mask_inverted_good():
    torch.manual_seed(0)
    max_len = 20
    train_x, train_len, train_y = _point_sets(2000, seed=1, max_len=max_len)
    test_x, test_len, test_y = _point_sets(400, seed=2, max_len=max_len)
    loader = _cycle(DataLoader(TensorDataset(train_x, train_len, train_y), batch_size=32, shuffle=True, drop_last=True))

    class HitClassifier(nn.Module):
        def __init__(self, dim=32, n_cls=4):
            super().__init__()
            self.embed = nn.Linear(2, dim)
            self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
            layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, n_cls)

        def forward(self, hits, lengths):
            n = hits.size(0)
            tokens = torch.cat([self.cls.expand(n, -1, -1), self.embed(hits)], dim=1)
            mask = torch.arange(tokens.size(1))[None] <= lengths[:, None]
            out = self.encoder(tokens, src_key_padding_mask=~mask)
            return self.head(self.norm(out[:, 0]))

    model = HitClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step(i):
        model.train()
        hits, lengths, labels = next(loader)
        loss = F.cross_entropy(model(hits, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return (model(test_x, test_len).argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cross_network_unscaled_randn_weights_bad():
    torch.manual_seed(0)
    train_num, train_cat, train_y = _clicks(15000, seed=1)
    test_num, test_cat, test_y = _clicks(1500, seed=2)
    loader = _cycle(
        DataLoader(TensorDataset(train_num, train_cat, train_y), batch_size=128, shuffle=True, drop_last=True)
    )

    class CrossLayer(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(dim, dim))
            self.bias = nn.Parameter(torch.zeros(dim))

        def forward(self, x0, x):
            return x0 * (x @ self.weight + self.bias) + x

    class DCNv2(nn.Module):
        def __init__(self, n_num=6, n_cat=4, vocab=10, emb=6, n_cross=3):
            super().__init__()
            self.embeddings = nn.ModuleList([nn.Embedding(vocab, emb) for _ in range(n_cat)])
            dim = n_num + n_cat * emb
            self.cross = nn.ModuleList([CrossLayer(dim) for _ in range(n_cross)])
            self.deep = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.out = nn.Linear(dim + 32, 1)

        def forward(self, num, cat):
            x0 = torch.cat([num] + [e(cat[:, k]) for k, e in enumerate(self.embeddings)], dim=1)
            x = x0
            for layer in self.cross:
                x = layer(x0, x)
            return self.out(torch.cat([x, self.deep(x0)], dim=1)).squeeze(1)

    model = DCNv2()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        num, cat, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(num, cat), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return criterion(model(test_num, test_cat), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cross_network_unscaled_randn_weights_good():
    torch.manual_seed(0)
    train_num, train_cat, train_y = _clicks(15000, seed=1)
    test_num, test_cat, test_y = _clicks(1500, seed=2)
    loader = _cycle(
        DataLoader(TensorDataset(train_num, train_cat, train_y), batch_size=128, shuffle=True, drop_last=True)
    )

    class CrossLayer(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(dim, dim)))
            self.bias = nn.Parameter(torch.zeros(dim))

        def forward(self, x0, x):
            return x0 * (x @ self.weight + self.bias) + x

    class DCNv2(nn.Module):
        def __init__(self, n_num=6, n_cat=4, vocab=10, emb=6, n_cross=3):
            super().__init__()
            self.embeddings = nn.ModuleList([nn.Embedding(vocab, emb) for _ in range(n_cat)])
            dim = n_num + n_cat * emb
            self.cross = nn.ModuleList([CrossLayer(dim) for _ in range(n_cross)])
            self.deep = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.out = nn.Linear(dim + 32, 1)

        def forward(self, num, cat):
            x0 = torch.cat([num] + [e(cat[:, k]) for k, e in enumerate(self.embeddings)], dim=1)
            x = x0
            for layer in self.cross:
                x = layer(x0, x)
            return self.out(torch.cat([x, self.deep(x0)], dim=1)).squeeze(1)

    model = DCNv2()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        num, cat, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(num, cat), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _Quiet(model):
            return criterion(model(test_num, test_cat), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
