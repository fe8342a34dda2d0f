"""Twenty-two small programs of pictures, sounds and clouds of points, each with one bug that people often make, and a
mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""

import contextlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


# ----------------------------------------------------------------------------
# shared helpers: synthetic data and evaluation plumbing
# ----------------------------------------------------------------------------
@contextlib.contextmanager
def evaluating(*models):
    """eval mode, no gradients, RNG untouched; every module's own mode is restored."""
    modes = [(m, m.training) for net in models for m in net.modules()]
    try:
        for net in models:
            net.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(1234)
            yield
    finally:
        for m, flag in modes:
            m.training = flag


def forever(loader):
    while True:
        yield from loader


def grid(size):
    c = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(c, c, indexing="ij")
    return xx, yy


def gratings(n, classes, size=16, noise=0.5, seed=0, labels=None, channels=1, jitter=0.06, freq=(2.0, 3.5)):
    """Oriented textures, roughly zero mean and unit variance. The class is the orientation."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g) if labels is None else labels
    theta = math.pi * y.float() / classes + jitter * torch.randn(n, generator=g)
    f = freq[0] + (freq[1] - freq[0]) * torch.rand(n, generator=g)
    phase = 2 * math.pi * torch.rand(n, generator=g)
    xx, yy = grid(size)
    u = xx[None] * theta.cos()[:, None, None] + yy[None] * theta.sin()[:, None, None]
    img = torch.sin(math.pi * f[:, None, None] * u + phase[:, None, None])[:, None]
    if channels > 1:
        img = img * (0.7 + 0.6 * torch.rand(n, channels, 1, 1, generator=g))
    img = img + noise * torch.randn(n, channels, size, size, generator=g)
    return img / math.sqrt(0.5 + noise ** 2), y


def audio_tags(n, tags=6, mels=32, frames=32, seed=0):
    """Log-mel-like patches 1 x mels x frames with several simultaneous sound events."""
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, tags, generator=g) < 0.3).float()
    x = 0.7 * torch.randn(n, 1, mels, frames, generator=g)
    for i in range(n):
        for t in y[i].nonzero().flatten().tolist():
            a = int(torch.randint(0, frames - 14, (1,), generator=g))
            f0 = int(torch.randint(2, mels - 10, (1,), generator=g))
            amp = 0.9 + 0.5 * float(torch.rand(1, generator=g))
            for k in range(14):
                if t == 0:
                    x[i, 0, f0, a + k] += 2 * amp                      # steady tone
                elif t == 1:
                    x[i, 0, f0 + k // 2, a + k] += 2 * amp              # rising chirp
                elif t == 2:
                    x[i, 0, f0 + 7 - k // 2, a + k] += 2 * amp          # falling chirp
                elif t == 3 and k % 4 == 0:
                    x[i, 0, f0:f0 + 8, a + k] += 1.5 * amp              # clicks
                elif t == 4 and k < 2:
                    x[i, 0, :, a + k] += amp                            # bang
                elif t == 5:
                    x[i, 0, f0:f0 + 9:4, a + k] += 1.5 * amp            # harmonic
    return (x - 0.1) / 0.85, y


def faces(n, size=24, seed=0):
    """Grey 'faces'; age (18..80) sets the wrinkle contrast and the size of the head outline."""
    g = torch.Generator().manual_seed(seed)
    age = 18 + 62 * torch.rand(n, generator=g)
    a = (age - 18) / 62
    xx, yy = grid(size)
    cx, cy = 0.2 * torch.randn(2, n, 1, 1, generator=g)
    r2 = (xx - cx) ** 2 / (0.4 + 0.25 * a)[:, None, None] + (yy - cy) ** 2 / 0.6
    face = torch.sigmoid(6 * (1 - r2))
    ph = 6.28 * torch.rand(n, 1, 1, generator=g)
    lines = torch.sin(12 * (yy - cy) + ph) * a[:, None, None] * 0.6
    img = face * (0.8 + lines) + 0.15 * torch.randn(n, size, size, generator=g)
    return ((img - 0.4) / 0.45)[:, None], age


def lesions(n, size=24, seed=0):
    """Grey scans with bright elliptic lesions on clutter, and their masks."""
    g = torch.Generator().manual_seed(seed)
    xx, yy = grid(size)
    img = 0.5 * torch.randn(n, 1, size, size, generator=g)
    mask = torch.zeros(n, 1, size, size)
    for i in range(n):
        for _ in range(int(torch.randint(1, 3, (1,), generator=g))):
            cx, cy = (torch.rand(2, generator=g) * 1.4 - 0.7).tolist()
            rx, ry = (0.2 + 0.2 * torch.rand(2, generator=g)).tolist()
            m = ((xx - cx) / rx) ** 2 + ((yy - cy) / ry) ** 2 < 1
            mask[i, 0][m] = 1.0
    img = img + 1.3 * mask
    return (img - 0.15) / 0.75, mask


def scenes(n, size=24, classes=4, seed=0):
    """Colour pictures with class 0 background and disc / square / stripe regions of classes 1..3."""
    g = torch.Generator().manual_seed(seed)
    xx, yy = grid(size)
    colour = torch.tensor([[0.1, 0.1, 0.1], [0.8, 0.2, 0.2], [0.2, 0.7, 0.3], [0.3, 0.3, 0.8]])
    y = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        for c in range(1, classes):
            if float(torch.rand(1, generator=g)) < 0.75:
                cx, cy = (torch.rand(2, generator=g) * 1.4 - 0.7).tolist()
                r = 0.25 + 0.2 * float(torch.rand(1, generator=g))
                if c == 1:
                    m = (xx - cx) ** 2 + (yy - cy) ** 2 < r * r
                elif c == 2:
                    m = ((xx - cx).abs() < r) & ((yy - cy).abs() < r)
                else:
                    m = (xx - cx).abs() < 0.5 * r
                y[i][m] = c
    x = colour[y].permute(0, 3, 1, 2) + 0.25 * torch.randn(n, 3, size, size, generator=g)
    return (x - 0.25) / 0.35, y


def blobs(n, size=16, seed=0):
    """Smooth pictures in [0, 1]: two soft blobs of different brightness on a dark ground."""
    g = torch.Generator().manual_seed(seed)
    xx, yy = grid(size)
    img = torch.zeros(n, size, size)
    for _ in range(2):
        cx, cy = 1.2 * torch.rand(2, n, 1, 1, generator=g) - 0.6
        s = 0.2 + 0.15 * torch.rand(n, 1, 1, generator=g)
        a = 0.6 + 0.4 * torch.rand(n, 1, 1, generator=g)
        img = torch.maximum(img, a * torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / (2 * s * s)))
    return img[:, None].clamp(0, 1)


def pictures(n, size, seed=0, freq=(1.5, 3.0)):
    """Pictures in [0, 1], mid-grey on average: soft blobs over a smooth oriented texture."""
    a, _ = gratings(n, 12, size=size, noise=0.0, seed=seed, freq=freq)
    return (0.5 * blobs(n, size=size, seed=seed + 50) + 0.17 * a + 0.35).clamp(0, 1)


def objects(n, cells=6, size=24, classes=3, seed=0):
    """3 x 24 x 24 pictures with 1-3 coloured boxes, YOLO-style targets on a 6 x 6 grid.
    target channels: 0 objectness, 1..4 (tx, ty, log w, log h in cells), 5 class."""
    g = torch.Generator().manual_seed(seed)
    colour = torch.tensor([[1.5, 0.2, 0.1], [0.1, 1.5, 0.2], [0.2, 0.1, 1.5]])
    x = 0.35 * torch.randn(n, 3, size, size, generator=g)
    t = torch.zeros(n, 6, cells, cells)
    s = size // cells
    for i in range(n):
        for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
            w, h = torch.randint(3, 10, (2,), generator=g).tolist()
            x0 = int(torch.randint(0, size - w + 1, (1,), generator=g))
            y0 = int(torch.randint(0, size - h + 1, (1,), generator=g))
            c = int(torch.randint(classes, (1,), generator=g))
            cx, cy = (x0 + w / 2) / s, (y0 + h / 2) / s
            gx, gy = min(int(cx), cells - 1), min(int(cy), cells - 1)
            if t[i, 0, gy, gx] > 0:
                continue
            x[i, :, y0:y0 + h, x0:x0 + w] += colour[c][:, None, None]
            t[i, :, gy, gx] = torch.tensor([1.0, cx - gx, cy - gy, math.log(w / s), math.log(h / s), float(c)])
    return x / 0.6, t


def box_iou(a, b):
    """a, b: (M, 4) as tx, ty, log w, log h inside the same cell."""
    aw, ah, bw, bh = a[:, 2].exp(), a[:, 3].exp(), b[:, 2].exp(), b[:, 3].exp()
    ix = (torch.min(a[:, 0] + aw / 2, b[:, 0] + bw / 2) - torch.max(a[:, 0] - aw / 2, b[:, 0] - bw / 2)).clamp(min=0)
    iy = (torch.min(a[:, 1] + ah / 2, b[:, 1] + bh / 2) - torch.max(a[:, 1] - ah / 2, b[:, 1] - bh / 2)).clamp(min=0)
    inter = ix * iy
    return inter / (aw * ah + bw * bh - inter)


def rooms(n, size=24, seed=0):
    """RGB picture, dense depth in metres (1..6), and a sensor depth map with holes stored as 0."""
    g = torch.Generator().manual_seed(seed)
    xx, yy = grid(size)
    depth = (3.5 - 2.0 * yy + 0.5 * torch.randn(n, 1, 1, generator=g)).clamp(1.0, 6.0).clone()
    tint = 0.1 * torch.randn(n, 3, 1, 1, generator=g)
    for _ in range(3):
        cx, cy = 1.4 * torch.rand(2, n, 1, 1, generator=g) - 0.7
        r = 0.2 + 0.25 * torch.rand(n, 1, 1, generator=g)
        d = 1.0 + 4.0 * torch.rand(n, 1, 1, generator=g)
        m = ((xx - cx).abs() < r) & ((yy - cy).abs() < r) & (d < depth)
        depth = torch.where(m, d.expand_as(depth), depth)
    bright = torch.exp(-depth / 3.0)
    rgb = torch.stack([bright, 0.8 * bright + 0.1, 1 - bright], 1) + tint + 0.06 * torch.randn(n, 3, size, size, generator=g)
    hole = torch.rand(n, size, size, generator=g) < 0.15 + 0.1 * depth
    sensor = torch.where(hole, torch.zeros_like(depth), depth)
    return (rgb - 0.4) / 0.25, depth[:, None], sensor[:, None]


def clouds(n, points=64, seed=0):
    """Point clouds (N, 3, points): sphere, cube, cylinder, cone, torus; rotated about z, jittered."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (n,), generator=g)
    out = torch.zeros(n, points, 3)
    for i in range(n):
        u = torch.rand(points, generator=g) * 2 * math.pi
        v = torch.rand(points, generator=g) * 2 - 1
        c = int(y[i])
        if c == 0:
            r = (1 - v ** 2).sqrt()
            p = torch.stack([r * u.cos(), r * u.sin(), v], 1)
        elif c == 1:
            p = torch.rand(points, 3, generator=g) * 2 - 1
            k = torch.randint(3, (points,), generator=g)
            p[torch.arange(points), k] = torch.sign(v)
        elif c == 2:
            p = torch.stack([u.cos(), u.sin(), v], 1)
        elif c == 3:
            r = (1 - v) / 2
            p = torch.stack([r * u.cos(), r * u.sin(), v], 1)
        else:
            w = v * math.pi
            r = 0.7 + 0.3 * w.cos()
            p = torch.stack([r * u.cos(), r * u.sin(), 0.3 * w.sin()], 1)
        a = float(torch.rand(1, generator=g)) * 6.28
        R = torch.tensor([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0], [0, 0, 1.0]])
        p = (p @ R) * (0.9 + 0.3 * torch.rand(3, generator=g)) + 0.08 * torch.randn(points, 3, generator=g)
        p = p - p.mean(0)
        out[i] = p / p.norm(dim=1).max()
    return out.transpose(1, 2).contiguous() * 1.6, y


def beats(n, length=128, seed=0):
    """Single-lead ECG beats 1 x 128, four classes (normal, early, wide, inverted T)."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    t = torch.linspace(0, 1, length)[None]

    def bump(c, w, a):
        return a * torch.exp(-((t - c) / w) ** 2)
    z = torch.zeros(n, 1)
    shift = 0.12 * torch.randn(n, 1, generator=g)
    amp = 1 + 0.2 * torch.randn(n, 1, generator=g)
    early = (y == 1).float()[:, None]
    wide = (y == 2).float()[:, None]
    inv = (y == 3).float()[:, None]
    qrs = 0.45 + shift
    x = bump(qrs, 0.02 + 0.025 * wide, 2.2 * amp)
    x = x + bump(qrs - 0.17 + 0.09 * early, 0.03 + z, 0.5 * amp)
    x = x + bump(qrs + 0.25, 0.06 + z, 0.7 * amp * (1 - 2 * inv))
    x = x + 0.3 * torch.randn(n, length, generator=g) + 0.2 * torch.sin(6.28 * (t + torch.rand(n, 1, generator=g)))
    return ((x - 0.15) / 0.6)[:, None], y


def energy_distance(a, b):
    a, b = a.flatten(1), b.flatten(1)
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


CASES = [
    {"name": "audio_tags_sigmoid_before_bcelogits",
     "what": "The sigmoid probabilities, not the logits, are passed to BCEWithLogitsLoss, so the sigmoid is applied twice.",
     "steps": 150},
    {"name": "age_regression_mse_broadcast",
     "what": "The model returns (N, 1) and the ages are (N,), so MSELoss broadcasts to an N x N matrix and the model is pulled to the mean age.",
     "steps": 300},
    {"name": "lesion_flip_only_image",
     "what": "The random horizontal flip of the augmentation is applied to the image and not to its mask, so half of the targets are mirrored against their pictures.",
     "steps": 250},
    {"name": "scene_seg_view_without_permute",
     "what": "The (N, C, H, W) logits are flattened with view(-1, C) without moving the channel axis last, so the class scores of one row come from different pixels.",
     "steps": 200},
    {"name": "inpaint_sigmoid_output_for_tanh_range",
     "what": "The pictures are normalised to [-1, 1] but the generator ends in a Sigmoid, which cannot produce the negative half of the targets.",
     "steps": 400},
    {"name": "dcgan_generator_fed_detached_fake",
     "what": "The generator's step scores the already detached fake batch, so no gradient ever reaches the generator and only the discriminator trains.",
     "steps": 400},
    {"name": "vae_mean_recon_summed_kl",
     "what": "The reconstruction term is averaged over all pixels while the KL term is summed over the latent dimensions, so the KL outweighs it hundreds of times and the posterior collapses.",
     "steps": 300},
    {"name": "ddpm_alpha_instead_of_alpha_bar",
     "what": "The forward noising uses alpha_t of the single step instead of the cumulative product alpha_bar_t, so the net never sees the strongly noised inputs that sampling starts from.",
     "steps": 500},
    {"name": "denoiser_never_zeroes_gradients",
     "what": "optimizer.zero_grad() is never called, so the gradients of all earlier batches add up in every step.",
     "steps": 300},
    {"name": "yolo_box_loss_on_empty_cells",
     "what": "The box regression loss is averaged over all grid cells instead of the cells that hold an object, so it is dominated by the zero targets of empty cells.",
     "steps": 300},
    {"name": "simsiam_without_stop_gradient",
     "what": "The target projections are not detached, so SimSiam has no stop-gradient and all embeddings collapse to one vector.",
     "steps": 300},
    {"name": "batch_hard_triplet_sqrt_of_zero",
     "what": "The hand-written pairwise distance takes sqrt of the exactly zero diagonal, whose infinite derivative turns every gradient into NaN.",
     "steps": 200},
    {"name": "distill_kldiv_gets_probabilities",
     "what": "KLDivLoss is given the student's softmax probabilities where it expects log-probabilities, so the distillation term is not a KL divergence.",
     "steps": 250},
    {"name": "protonet_support_axes_swapped",
     "what": "The support set is stacked shot by shot, but the embeddings are viewed as (way, shot), so every prototype averages pictures of different classes.",
     "steps": 200},
    {"name": "longtail_sampler_given_class_weights",
     "what": "WeightedRandomSampler gets one weight per class instead of one per sample, so it only ever draws the first few pictures of the data set.",
     "steps": 200},
    {"name": "transfer_head_replaced_after_optimizer",
     "what": "The optimizer is built from the old classifier's parameters before the head is replaced, so the new head is never updated.",
     "steps": 200},
    {"name": "depth_holes_counted_in_loss",
     "what": "Missing sensor readings are stored as depth 0 and are not masked out of the loss, so the network learns to predict depths pulled toward zero.",
     "steps": 250},
    {"name": "pointnet_layers_in_python_list",
     "what": "The shared point layers sit in a plain Python list instead of nn.ModuleList, so they are not registered, never reach the optimizer and stay random.",
     "steps": 300},
    {"name": "sr_scheduler_stepped_every_batch",
     "what": "StepLR was set up in epochs but scheduler.step() is called after every batch, so the learning rate has decayed to nothing within a few dozen iterations.",
     "steps": 350},
    {"name": "ecg_amp_clip_without_unscale",
     "what": "Gradients are clipped while they still carry the GradScaler's factor (no scaler.unscale_ first), so every step is shrunk to almost nothing.",
     "steps": 200},
    {"name": "spectrogram_net_left_in_eval_mode",
     "what": "model.train() is missing after the first evaluation, so all training runs in eval mode: batch norm uses its initial running statistics and dropout is off.",
     "steps": 250},
    {"name": "dann_reversal_layer_keeps_the_sign",
     "what": "The gradient reversal layer's backward returns +lambda * grad instead of -lambda * grad, so the features are trained to tell the domains apart.",
     "steps": 350},
]

PROBES = {  # what each probe measures
    "audio_tags_sigmoid_before_bcelogits": "held-out log loss of the tag probabilities",
    "age_regression_mse_broadcast": "held-out mean absolute error in years",
    "lesion_flip_only_image": "held-out 1 - Dice",
    "scene_seg_view_without_permute": "held-out pixel error rate",
    "inpaint_sigmoid_output_for_tanh_range": "held-out L1 error inside the hole",
    "dcgan_generator_fed_detached_fake": "energy distance between generated and held-out pictures",
    "vae_mean_recon_summed_kl": "held-out squared reconstruction error per picture",
    "ddpm_alpha_instead_of_alpha_bar": "energy distance between samples and held-out pictures",
    "denoiser_never_zeroes_gradients": "held-out mean squared error of the denoised picture",
    "yolo_box_loss_on_empty_cells": "held-out 1 - mean IoU at the object cells",
    "simsiam_without_stop_gradient": "held-out 5-nearest-neighbour error on the embeddings",
    "batch_hard_triplet_sqrt_of_zero": "held-out 1-nearest-neighbour retrieval error",
    "distill_kldiv_gets_probabilities": "held-out KL divergence from teacher to student",
    "protonet_support_axes_swapped": "few-shot error on new classes",
    "longtail_sampler_given_class_weights": "held-out balanced error rate",
    "transfer_head_replaced_after_optimizer": "held-out error rate on the new classes",
    "depth_holes_counted_in_loss": "held-out mean absolute relative error against true depth",
    "pointnet_layers_in_python_list": "held-out error rate",
    "sr_scheduler_stepped_every_batch": "held-out mean squared error of the upscaled picture",
    "ecg_amp_clip_without_unscale": "held-out error rate",
    "spectrogram_net_left_in_eval_mode": "held-out error rate",
    "dann_reversal_layer_keeps_the_sign": "target-domain held-out error rate",
}


def audio_tags_sigmoid_before_bcelogits_bad():
    torch.manual_seed(0)
    class Tagger(nn.Module):
        def __init__(self, tags=6):
            super().__init__()
            def block(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
            self.features = nn.Sequential(block(1, 12), block(12, 24), block(24, 32))
            self.head = nn.Linear(32, tags)

        def forward(self, x):
            h = self.features(x)
            return self.head(h.amax(dim=(2, 3)))

    train_x, train_y = audio_tags(800, seed=1)
    test_x, test_y = audio_tags(200, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        x, y = next(loader)
        logits = model(x)
        probs = torch.sigmoid(logits)
        loss = criterion(probs, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            probs = torch.sigmoid(model(test_x)).clamp(1e-6, 1 - 1e-6)
            return float(F.binary_cross_entropy(probs, test_y))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_tags_sigmoid_before_bcelogits_good():
    torch.manual_seed(0)
    class Tagger(nn.Module):
        def __init__(self, tags=6):
            super().__init__()
            def block(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
            self.features = nn.Sequential(block(1, 12), block(12, 24), block(24, 32))
            self.head = nn.Linear(32, tags)

        def forward(self, x):
            h = self.features(x)
            return self.head(h.amax(dim=(2, 3)))

    train_x, train_y = audio_tags(800, seed=1)
    test_x, test_y = audio_tags(200, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        x, y = next(loader)
        logits = model(x)
        probs = torch.sigmoid(logits)
        loss = criterion(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            probs = torch.sigmoid(model(test_x)).clamp(1e-6, 1 - 1e-6)
            return float(F.binary_cross_entropy(probs, test_y))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def age_regression_mse_broadcast_bad():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, 1))
    images, age = faces(800, seed=1)
    test_images, test_age = faces(200, seed=2)
    mean, std = age.mean(), age.std()
    train_set = TensorDataset(images, (age - mean) / std)
    loader = forever(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        img, target = next(loader)
        optimizer.zero_grad()
        output = net(img)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(net):
            pred = net(test_images).squeeze(1) * std + mean
            return float((pred - test_age).abs().mean())

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def age_regression_mse_broadcast_good():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 6 * 6, 64), nn.ReLU(), nn.Linear(64, 1))
    images, age = faces(800, seed=1)
    test_images, test_age = faces(200, seed=2)
    mean, std = age.mean(), age.std()
    train_set = TensorDataset(images, (age - mean) / std)
    loader = forever(DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        img, target = next(loader)
        optimizer.zero_grad()
        output = net(img)
        loss = criterion(output.squeeze(1), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(net):
            pred = net(test_images).squeeze(1) * std + mean
            return float((pred - test_age).abs().mean())

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lesion_flip_only_image_bad():
    torch.manual_seed(0)
    class LesionSet(Dataset):
        def __init__(self, images, masks):
            self.images, self.masks = images, masks

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            img, mask = self.images[idx], self.masks[idx]
            if torch.rand(1).item() < 0.5:
                img = torch.flip(img, dims=[-1])
            return img, mask

    def double_conv(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                             nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = double_conv(1, 12), double_conv(12, 24)
            self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
            self.u1 = double_conv(24, 12)
            self.out = nn.Conv2d(12, 1, 1)

        def forward(self, x):
            a = self.d1(x)
            b = self.d2(F.max_pool2d(a, 2))
            return self.out(self.u1(torch.cat([a, self.up(b)], dim=1)))

    def dice_loss(logits, target, eps=1.0):
        p = torch.sigmoid(logits)
        inter = (p * target).sum(dim=(1, 2, 3))
        total = p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
        return (1 - (2 * inter + eps) / (total + eps)).mean()

    train_x, train_m = lesions(400, seed=1)
    test_x, test_m = lesions(100, seed=2)
    loader = forever(DataLoader(LesionSet(train_x, train_m), batch_size=16, shuffle=True, drop_last=True))
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    bce = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        img, mask = next(loader)
        logits = model(img)
        loss = bce(logits, mask) + dice_loss(logits, mask)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (model(test_x) > 0).float()
            return 1 - float(2 * (pred * test_m).sum() / (pred.sum() + test_m.sum()))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lesion_flip_only_image_good():
    torch.manual_seed(0)
    class LesionSet(Dataset):
        def __init__(self, images, masks):
            self.images, self.masks = images, masks

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            img, mask = self.images[idx], self.masks[idx]
            if torch.rand(1).item() < 0.5:
                img = torch.flip(img, dims=[-1])
                mask = torch.flip(mask, dims=[-1])
            return img, mask

    def double_conv(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                             nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.d1, self.d2 = double_conv(1, 12), double_conv(12, 24)
            self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
            self.u1 = double_conv(24, 12)
            self.out = nn.Conv2d(12, 1, 1)

        def forward(self, x):
            a = self.d1(x)
            b = self.d2(F.max_pool2d(a, 2))
            return self.out(self.u1(torch.cat([a, self.up(b)], dim=1)))

    def dice_loss(logits, target, eps=1.0):
        p = torch.sigmoid(logits)
        inter = (p * target).sum(dim=(1, 2, 3))
        total = p.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
        return (1 - (2 * inter + eps) / (total + eps)).mean()

    train_x, train_m = lesions(400, seed=1)
    test_x, test_m = lesions(100, seed=2)
    loader = forever(DataLoader(LesionSet(train_x, train_m), batch_size=16, shuffle=True, drop_last=True))
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    bce = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        img, mask = next(loader)
        logits = model(img)
        loss = bce(logits, mask) + dice_loss(logits, mask)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = (model(test_x) > 0).float()
            return 1 - float(2 * (pred * test_m).sum() / (pred.sum() + test_m.sum()))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def scene_seg_view_without_permute_bad():
    torch.manual_seed(0)
    n_classes = 4

    class FCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            self.head = nn.Conv2d(32 + 3, n_classes, 3, padding=1)

        def forward(self, x):
            return self.head(torch.cat([self.up(self.enc(x)), x], dim=1))

    train_x, train_y = scenes(320, seed=1)
    test_x, test_y = scenes(80, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=16, shuffle=True, drop_last=True))
    model = FCN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        inputs, labels = next(loader)
        optimizer.zero_grad()
        outputs = model(inputs)
        outputs = outputs.contiguous().view(-1, n_classes)
        labels = labels.view(-1)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def scene_seg_view_without_permute_good():
    torch.manual_seed(0)
    n_classes = 4

    class FCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            self.head = nn.Conv2d(32 + 3, n_classes, 3, padding=1)

        def forward(self, x):
            return self.head(torch.cat([self.up(self.enc(x)), x], dim=1))

    train_x, train_y = scenes(320, seed=1)
    test_x, test_y = scenes(80, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=16, shuffle=True, drop_last=True))
    model = FCN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        inputs, labels = next(loader)
        optimizer.zero_grad()
        outputs = model(inputs)
        outputs = outputs.permute(0, 2, 3, 1).contiguous().view(-1, n_classes)
        labels = labels.view(-1)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def inpaint_sigmoid_output_for_tanh_range_bad():
    torch.manual_seed(0)
    class Inpainter(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(2, 24, 3, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(48, 48, 3, padding=1), nn.LeakyReLU(0.2))
            self.decoder = nn.Sequential(
                nn.ConvTranspose2d(48, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.ConvTranspose2d(32, 24, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(24, 1, 3, padding=1),
                nn.Sigmoid())

        def forward(self, x):
            return self.decoder(self.encoder(x))

    def make_hole(n, size, generator=None):
        mask = torch.zeros(n, 1, size, size)
        pos = torch.randint(2, size - 8, (n, 2), generator=generator)
        for k, (r, c) in enumerate(pos.tolist()):
            mask[k, :, r:r + 6, c:c + 6] = 1
        return mask

    normalize = lambda t: (t - 0.5) / 0.5
    train_x = normalize(pictures(600, 16, seed=1))
    test_x = normalize(pictures(150, 16, seed=2))
    test_mask = make_hole(150, 16, torch.Generator().manual_seed(3))
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True))
    model = Inpainter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        real, = next(loader)
        mask = make_hole(real.size(0), real.size(-1))
        corrupted = real * (1 - mask)
        output = model(torch.cat([corrupted, mask], dim=1))
        loss = F.l1_loss(output, real)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(torch.cat([test_x * (1 - test_mask), test_mask], dim=1))
            return float(((out - test_x).abs() * test_mask).sum() / test_mask.sum())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def inpaint_sigmoid_output_for_tanh_range_good():
    torch.manual_seed(0)
    class Inpainter(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(2, 24, 3, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(48, 48, 3, padding=1), nn.LeakyReLU(0.2))
            self.decoder = nn.Sequential(
                nn.ConvTranspose2d(48, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.ConvTranspose2d(32, 24, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
                nn.Conv2d(24, 1, 3, padding=1),
                nn.Tanh())

        def forward(self, x):
            return self.decoder(self.encoder(x))

    def make_hole(n, size, generator=None):
        mask = torch.zeros(n, 1, size, size)
        pos = torch.randint(2, size - 8, (n, 2), generator=generator)
        for k, (r, c) in enumerate(pos.tolist()):
            mask[k, :, r:r + 6, c:c + 6] = 1
        return mask

    normalize = lambda t: (t - 0.5) / 0.5
    train_x = normalize(pictures(600, 16, seed=1))
    test_x = normalize(pictures(150, 16, seed=2))
    test_mask = make_hole(150, 16, torch.Generator().manual_seed(3))
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True))
    model = Inpainter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        real, = next(loader)
        mask = make_hole(real.size(0), real.size(-1))
        corrupted = real * (1 - mask)
        output = model(torch.cat([corrupted, mask], dim=1))
        loss = F.l1_loss(output, real)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(torch.cat([test_x * (1 - test_mask), test_mask], dim=1))
            return float(((out - test_x).abs() * test_mask).sum() / test_mask.sum())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dcgan_generator_fed_detached_fake_bad():
    torch.manual_seed(0)
    nz = 16

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(nz, 48, 4, 1, 0, bias=False), nn.BatchNorm2d(48), nn.ReLU(True),
                nn.ConvTranspose2d(48, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(True),
                nn.ConvTranspose2d(24, 1, 4, 2, 1, bias=False), nn.Tanh())

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, 24, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(24, 48, 4, 2, 1, bias=False), nn.BatchNorm2d(48), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(48, 1, 4, 1, 0, bias=False))

        def forward(self, x):
            return self.main(x).view(-1)

    def weights_init(m):
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(m.weight, 0.0, 0.02)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    train_x = blobs(1000, seed=1) * 2 - 1
    test_x = blobs(300, seed=2) * 2 - 1
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))
    netG, netD = Generator().apply(weights_init), Discriminator().apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(i):
        real, = next(loader)
        b = real.size(0)
        ones, zeros = torch.ones(b), torch.zeros(b)
        # (1) discriminator
        netD.zero_grad()
        noise = torch.randn(b, nz, 1, 1)
        fake = netG(noise).detach()
        errD_real = criterion(netD(real), ones)
        errD_fake = criterion(netD(fake), zeros)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) generator
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        with evaluating(netG):
            return energy_distance(netG(torch.randn(300, nz, 1, 1)), test_x)

    return {"model": {"G": netG, "D": netD}, "optimizer": (optimizerD, optimizerG), "steps": 20, "step": step, "probe": probe}


def dcgan_generator_fed_detached_fake_good():
    torch.manual_seed(0)
    nz = 16

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(nz, 48, 4, 1, 0, bias=False), nn.BatchNorm2d(48), nn.ReLU(True),
                nn.ConvTranspose2d(48, 24, 4, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(True),
                nn.ConvTranspose2d(24, 1, 4, 2, 1, bias=False), nn.Tanh())

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, 24, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(24, 48, 4, 2, 1, bias=False), nn.BatchNorm2d(48), nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(48, 1, 4, 1, 0, bias=False))

        def forward(self, x):
            return self.main(x).view(-1)

    def weights_init(m):
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(m.weight, 0.0, 0.02)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight, 1.0, 0.02)
            nn.init.zeros_(m.bias)

    train_x = blobs(1000, seed=1) * 2 - 1
    test_x = blobs(300, seed=2) * 2 - 1
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))
    netG, netD = Generator().apply(weights_init), Discriminator().apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(i):
        real, = next(loader)
        b = real.size(0)
        ones, zeros = torch.ones(b), torch.zeros(b)
        # (1) discriminator
        netD.zero_grad()
        noise = torch.randn(b, nz, 1, 1)
        fake = netG(noise)
        errD_real = criterion(netD(real), ones)
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()
        # (2) generator
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        with evaluating(netG):
            return energy_distance(netG(torch.randn(300, nz, 1, 1)), test_x)

    return {"model": {"G": netG, "D": netD}, "optimizer": (optimizerD, optimizerG), "steps": 20, "step": step, "probe": probe}


def vae_mean_recon_summed_kl_bad():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, d=256, h=128, z=8):
            super().__init__()
            self.fc1 = nn.Linear(d, h)
            self.fc21, self.fc22 = nn.Linear(h, z), nn.Linear(h, z)
            self.fc3, self.fc4 = nn.Linear(z, h), nn.Linear(h, d)

        def encode(self, x):
            h = F.relu(self.fc1(x))
            return self.fc21(h), self.fc22(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 256), reduction="mean")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        return bce + kld

    train_x, test_x = blobs(1000, seed=1), blobs(200, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        data, = next(loader)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mu, _ = model.encode(test_x.view(-1, 256))
            return float(((model.decode(mu) - test_x.view(-1, 256)) ** 2).sum(1).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_mean_recon_summed_kl_good():
    torch.manual_seed(0)
    class VAE(nn.Module):
        def __init__(self, d=256, h=128, z=8):
            super().__init__()
            self.fc1 = nn.Linear(d, h)
            self.fc21, self.fc22 = nn.Linear(h, z), nn.Linear(h, z)
            self.fc3, self.fc4 = nn.Linear(z, h), nn.Linear(h, d)

        def encode(self, x):
            h = F.relu(self.fc1(x))
            return self.fc21(h), self.fc22(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            return self.decode(self.reparameterize(mu, logvar)), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 256), reduction="sum") / x.size(0)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        return bce + kld

    train_x, test_x = blobs(1000, seed=1), blobs(200, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        data, = next(loader)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mu, _ = model.encode(test_x.view(-1, 256))
            return float(((model.decode(mu) - test_x.view(-1, 256)) ** 2).sum(1).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_alpha_instead_of_alpha_bar_bad():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-3, 0.12, T)
    alphas = 1.0 - betas
    alphas_cumprod = torch.cumprod(alphas, dim=0)

    def timestep_embedding(t, dim=32):
        freqs = torch.exp(-math.log(1000.0) * torch.arange(dim // 2) / (dim // 2))
        a = t.float()[:, None] * freqs[None]
        return torch.cat([a.sin(), a.cos()], dim=1)

    class ResBlock(nn.Module):
        def __init__(self, i, o, emb=64):
            super().__init__()
            self.c1, self.c2 = nn.Conv2d(i, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1)
            self.n1, self.n2 = nn.GroupNorm(4, o), nn.GroupNorm(4, o)
            self.emb = nn.Linear(emb, o)
            self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x, e):
            h = F.silu(self.n1(self.c1(x))) + self.emb(e)[:, :, None, None]
            return self.skip(x) + F.silu(self.n2(self.c2(h)))

    class TinyUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
            self.inp = nn.Conv2d(1, 16, 3, padding=1)
            self.d = ResBlock(16, 16)
            self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
            self.m = ResBlock(32, 32)
            self.m2 = ResBlock(32, 32)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.u = ResBlock(32, 16)
            self.out = nn.Conv2d(16, 1, 3, padding=1)

        def forward(self, x, t):
            e = self.time(timestep_embedding(t))
            h = self.d(self.inp(x), e)
            m = self.m2(self.m(self.down(h), e), e)
            return self.out(self.u(torch.cat([self.up(m), h], dim=1), e))

    def q_sample(x0, t, noise):
        a = alphas[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    @torch.no_grad()
    def p_sample_loop(n):
        x = torch.randn(n, 1, 12, 12)
        for k in reversed(range(T)):
            t = torch.full((n,), k)
            eps = model(x, t)
            x = (x - betas[k] / (1 - alphas_cumprod[k]).sqrt() * eps) / alphas[k].sqrt()
            if k > 0:
                x = x + betas[k].sqrt() * torch.randn_like(x)
        return x.clamp(-1, 1)

    train_x = blobs(1000, size=12, seed=1) * 2 - 1
    test_x = blobs(300, size=12, seed=2) * 2 - 1
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True))
    model = TinyUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x0, = next(loader)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        pred = model(q_sample(x0, t, noise), t)
        loss = F.mse_loss(pred, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return energy_distance(p_sample_loop(200), test_x)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_alpha_instead_of_alpha_bar_good():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-3, 0.12, T)
    alphas = 1.0 - betas
    alphas_cumprod = torch.cumprod(alphas, dim=0)

    def timestep_embedding(t, dim=32):
        freqs = torch.exp(-math.log(1000.0) * torch.arange(dim // 2) / (dim // 2))
        a = t.float()[:, None] * freqs[None]
        return torch.cat([a.sin(), a.cos()], dim=1)

    class ResBlock(nn.Module):
        def __init__(self, i, o, emb=64):
            super().__init__()
            self.c1, self.c2 = nn.Conv2d(i, o, 3, padding=1), nn.Conv2d(o, o, 3, padding=1)
            self.n1, self.n2 = nn.GroupNorm(4, o), nn.GroupNorm(4, o)
            self.emb = nn.Linear(emb, o)
            self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x, e):
            h = F.silu(self.n1(self.c1(x))) + self.emb(e)[:, :, None, None]
            return self.skip(x) + F.silu(self.n2(self.c2(h)))

    class TinyUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
            self.inp = nn.Conv2d(1, 16, 3, padding=1)
            self.d = ResBlock(16, 16)
            self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
            self.m = ResBlock(32, 32)
            self.m2 = ResBlock(32, 32)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.u = ResBlock(32, 16)
            self.out = nn.Conv2d(16, 1, 3, padding=1)

        def forward(self, x, t):
            e = self.time(timestep_embedding(t))
            h = self.d(self.inp(x), e)
            m = self.m2(self.m(self.down(h), e), e)
            return self.out(self.u(torch.cat([self.up(m), h], dim=1), e))

    def q_sample(x0, t, noise):
        a = alphas_cumprod[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    @torch.no_grad()
    def p_sample_loop(n):
        x = torch.randn(n, 1, 12, 12)
        for k in reversed(range(T)):
            t = torch.full((n,), k)
            eps = model(x, t)
            x = (x - betas[k] / (1 - alphas_cumprod[k]).sqrt() * eps) / alphas[k].sqrt()
            if k > 0:
                x = x + betas[k].sqrt() * torch.randn_like(x)
        return x.clamp(-1, 1)

    train_x = blobs(1000, size=12, seed=1) * 2 - 1
    test_x = blobs(300, size=12, seed=2) * 2 - 1
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=32, shuffle=True, drop_last=True))
    model = TinyUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x0, = next(loader)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        pred = model(q_sample(x0, t, noise), t)
        loss = F.mse_loss(pred, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return energy_distance(p_sample_loop(200), test_x)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def denoiser_never_zeroes_gradients_bad():
    torch.manual_seed(0)
    class DnCNN(nn.Module):
        def __init__(self, depth=4, ch=24):
            super().__init__()
            layers = [nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(inplace=True)]
            for _ in range(depth - 2):
                layers += [nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU(inplace=True)]
            layers.append(nn.Conv2d(ch, 1, 3, padding=1))
            self.dncnn = nn.Sequential(*layers)

        def forward(self, x):
            return x - self.dncnn(x)

    sigma = 0.25
    train_x, test_x = blobs(600, seed=1), blobs(150, seed=2)
    test_noisy = test_x + sigma * torch.randn(test_x.shape, generator=torch.Generator().manual_seed(3))
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=16, shuffle=True, drop_last=True))
    model = DnCNN()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        clean, = next(loader)
        noisy = clean + sigma * torch.randn_like(clean)
        restored = model(noisy)
        loss = criterion(restored, clean)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float(F.mse_loss(model(test_noisy), test_x))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def denoiser_never_zeroes_gradients_good():
    torch.manual_seed(0)
    class DnCNN(nn.Module):
        def __init__(self, depth=4, ch=24):
            super().__init__()
            layers = [nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(inplace=True)]
            for _ in range(depth - 2):
                layers += [nn.Conv2d(ch, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU(inplace=True)]
            layers.append(nn.Conv2d(ch, 1, 3, padding=1))
            self.dncnn = nn.Sequential(*layers)

        def forward(self, x):
            return x - self.dncnn(x)

    sigma = 0.25
    train_x, test_x = blobs(600, seed=1), blobs(150, seed=2)
    test_noisy = test_x + sigma * torch.randn(test_x.shape, generator=torch.Generator().manual_seed(3))
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=16, shuffle=True, drop_last=True))
    model = DnCNN()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        clean, = next(loader)
        noisy = clean + sigma * torch.randn_like(clean)
        restored = model(noisy)
        loss = criterion(restored, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float(F.mse_loss(model(test_noisy), test_x))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def yolo_box_loss_on_empty_cells_bad():
    torch.manual_seed(0)
    class Detector(nn.Module):
        def __init__(self, classes=3):
            super().__init__()
            def cbl(i, o, s):
                return nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.1))
            self.backbone = nn.Sequential(cbl(3, 16, 1), cbl(16, 24, 2), cbl(24, 32, 2), cbl(32, 32, 1))
            self.pred = nn.Conv2d(32, 5 + classes, 1)

        def forward(self, x):
            return self.pred(self.backbone(x))

    def yolo_loss(pred, target):
        obj = target[:, 0] > 0.5
        loss_obj = F.binary_cross_entropy_with_logits(pred[:, 0], target[:, 0])
        p = pred.permute(0, 2, 3, 1)
        t = target.permute(0, 2, 3, 1)
        loss_box = F.smooth_l1_loss(p[..., 1:5], t[..., 1:5])
        loss_cls = F.cross_entropy(p[obj][:, 5:], t[obj][:, 5].long())
        return loss_obj + loss_box + loss_cls

    train_x, train_t = objects(600, seed=1)
    test_x, test_t = objects(150, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_t), batch_size=16, shuffle=True, drop_last=True))
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        images, targets = next(loader)
        loss = yolo_loss(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            obj = test_t[:, 0] > 0.5
            p = model(test_x).permute(0, 2, 3, 1)[obj][:, 1:5]
            return 1 - float(box_iou(p, test_t.permute(0, 2, 3, 1)[obj][:, 1:5]).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def yolo_box_loss_on_empty_cells_good():
    torch.manual_seed(0)
    class Detector(nn.Module):
        def __init__(self, classes=3):
            super().__init__()
            def cbl(i, o, s):
                return nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.1))
            self.backbone = nn.Sequential(cbl(3, 16, 1), cbl(16, 24, 2), cbl(24, 32, 2), cbl(32, 32, 1))
            self.pred = nn.Conv2d(32, 5 + classes, 1)

        def forward(self, x):
            return self.pred(self.backbone(x))

    def yolo_loss(pred, target):
        obj = target[:, 0] > 0.5
        loss_obj = F.binary_cross_entropy_with_logits(pred[:, 0], target[:, 0])
        p = pred.permute(0, 2, 3, 1)
        t = target.permute(0, 2, 3, 1)
        loss_box = F.smooth_l1_loss(p[obj][:, 1:5], t[obj][:, 1:5])
        loss_cls = F.cross_entropy(p[obj][:, 5:], t[obj][:, 5].long())
        return loss_obj + loss_box + loss_cls

    train_x, train_t = objects(600, seed=1)
    test_x, test_t = objects(150, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_t), batch_size=16, shuffle=True, drop_last=True))
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        images, targets = next(loader)
        loss = yolo_loss(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            obj = test_t[:, 0] > 0.5
            p = model(test_x).permute(0, 2, 3, 1)[obj][:, 1:5]
            return 1 - float(box_iou(p, test_t.permute(0, 2, 3, 1)[obj][:, 1:5]).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_without_stop_gradient_bad():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 5, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(32, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(),
                nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim, affine=False))
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1, z2

    def augment(x):
        n = x.size(0)
        sy, sx = torch.randint(0, 5, (2,)).tolist()
        x = F.pad(x, (2, 2, 2, 2), mode="reflect")[:, :, sy:sy + 16, sx:sx + 16]
        x = x * (0.6 + 0.8 * torch.rand(n, 1, 1, 1)) + 0.5 * torch.randn(n, 1, 1, 1)
        return x + 0.6 * torch.randn_like(x)

    train_x, train_y = gratings(1000, 6, noise=1.8, seed=1)
    test_x, test_y = gratings(300, 6, noise=1.8, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        images, = next(loader)
        p1, p2, z1, z2 = model(augment(images), augment(images))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            a = F.normalize(model.encoder(train_x), dim=1)
            b = F.normalize(model.encoder(test_x), dim=1)
            idx = (b @ a.t()).topk(5, dim=1).indices
            votes = F.one_hot(train_y[idx], 6).sum(1)
            return float((votes.argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_without_stop_gradient_good():
    torch.manual_seed(0)
    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 5, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(32, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(),
                nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim, affine=False))
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1.detach(), z2.detach()

    def augment(x):
        n = x.size(0)
        sy, sx = torch.randint(0, 5, (2,)).tolist()
        x = F.pad(x, (2, 2, 2, 2), mode="reflect")[:, :, sy:sy + 16, sx:sx + 16]
        x = x * (0.6 + 0.8 * torch.rand(n, 1, 1, 1)) + 0.5 * torch.randn(n, 1, 1, 1)
        return x + 0.6 * torch.randn_like(x)

    train_x, train_y = gratings(1000, 6, noise=1.8, seed=1)
    test_x, test_y = gratings(300, 6, noise=1.8, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        images, = next(loader)
        p1, p2, z1, z2 = model(augment(images), augment(images))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            a = F.normalize(model.encoder(train_x), dim=1)
            b = F.normalize(model.encoder(test_x), dim=1)
            idx = (b @ a.t()).topk(5, dim=1).indices
            votes = F.one_hot(train_y[idx], 6).sum(1)
            return float((votes.argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def batch_hard_triplet_sqrt_of_zero_bad():
    torch.manual_seed(0)
    class EmbeddingNet(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.PReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.PReLU(), nn.AdaptiveAvgPool2d(2))
            self.fc = nn.Linear(128, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x).flatten(1)), dim=1)

    def pairwise_distances(e):
        diff = e.unsqueeze(1) - e.unsqueeze(0)
        sq = diff.pow(2).sum(dim=2)
        return torch.sqrt(sq)

    def batch_hard_triplet_loss(e, labels, margin=0.3):
        dist = pairwise_distances(e)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        pos_mask = same & ~torch.eye(len(labels), dtype=torch.bool)
        hardest_pos = dist.masked_fill(~pos_mask, 0.0).max(dim=1).values
        hardest_neg = dist.masked_fill(same, 10.0).min(dim=1).values
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    classes = 8
    train_x, train_y = gratings(800, classes, noise=1.0, seed=1)
    test_x, test_y = gratings(240, classes, noise=1.0, seed=2)
    by_class = [(train_y == c).nonzero().flatten() for c in range(classes)]

    def pk_batch(p=8, k=4):
        idx = torch.cat([ix[torch.randperm(len(ix))[:k]] for ix in by_class[:p]])
        return train_x[idx], train_y[idx]

    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = pk_batch()
        loss = batch_hard_triplet_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            sim = torch.nan_to_num(model(test_x) @ model(train_x).t())
            return float((train_y[sim.argmax(1)] != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def batch_hard_triplet_sqrt_of_zero_good():
    torch.manual_seed(0)
    class EmbeddingNet(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.PReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.PReLU(), nn.AdaptiveAvgPool2d(2))
            self.fc = nn.Linear(128, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x).flatten(1)), dim=1)

    def pairwise_distances(e):
        diff = e.unsqueeze(1) - e.unsqueeze(0)
        sq = diff.pow(2).sum(dim=2)
        return torch.sqrt(sq + 1e-12)

    def batch_hard_triplet_loss(e, labels, margin=0.3):
        dist = pairwise_distances(e)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        pos_mask = same & ~torch.eye(len(labels), dtype=torch.bool)
        hardest_pos = dist.masked_fill(~pos_mask, 0.0).max(dim=1).values
        hardest_neg = dist.masked_fill(same, 10.0).min(dim=1).values
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    classes = 8
    train_x, train_y = gratings(800, classes, noise=1.0, seed=1)
    test_x, test_y = gratings(240, classes, noise=1.0, seed=2)
    by_class = [(train_y == c).nonzero().flatten() for c in range(classes)]

    def pk_batch(p=8, k=4):
        idx = torch.cat([ix[torch.randperm(len(ix))[:k]] for ix in by_class[:p]])
        return train_x[idx], train_y[idx]

    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = pk_batch()
        loss = batch_hard_triplet_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            sim = torch.nan_to_num(model(test_x) @ model(train_x).t())
            return float((train_y[sim.argmax(1)] != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kldiv_gets_probabilities_bad():
    torch.manual_seed(0)
    def conv_net(width):
        return nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * 16, 8))

    train_x, train_y = gratings(1000, 8, noise=0.8, jitter=0.12, seed=1)
    test_x, test_y = gratings(300, 8, noise=0.8, jitter=0.12, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    teacher = conv_net(16)
    opt_t = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for _ in range(150):
        x, y = next(loader)
        opt_t.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt_t.step()
    opt_t.zero_grad()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad = False

    student = conv_net(6)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    temperature, alpha = 3.0, 0.9
    kl = nn.KLDivLoss(reduction="batchmean")

    def step(i):
        student.train()
        x, y = next(loader)
        with torch.no_grad():
            teacher_logits = teacher(x)
        student_logits = student(x)
        soft_targets = F.softmax(teacher_logits / temperature, dim=1)
        soft_prob = F.softmax(student_logits / temperature, dim=1)
        soft_loss = kl(soft_prob, soft_targets) * temperature ** 2
        hard_loss = F.cross_entropy(student_logits, y)
        loss = alpha * soft_loss + (1 - alpha) * hard_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student, teacher):
            return float(F.kl_div(F.log_softmax(student(test_x), 1), F.softmax(teacher(test_x), 1), reduction="batchmean"))

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distill_kldiv_gets_probabilities_good():
    torch.manual_seed(0)
    def conv_net(width):
        return nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * 16, 8))

    train_x, train_y = gratings(1000, 8, noise=0.8, jitter=0.12, seed=1)
    test_x, test_y = gratings(300, 8, noise=0.8, jitter=0.12, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    teacher = conv_net(16)
    opt_t = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    for _ in range(150):
        x, y = next(loader)
        opt_t.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt_t.step()
    opt_t.zero_grad()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad = False

    student = conv_net(6)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    temperature, alpha = 3.0, 0.9
    kl = nn.KLDivLoss(reduction="batchmean")

    def step(i):
        student.train()
        x, y = next(loader)
        with torch.no_grad():
            teacher_logits = teacher(x)
        student_logits = student(x)
        soft_targets = F.softmax(teacher_logits / temperature, dim=1)
        soft_prob = F.log_softmax(student_logits / temperature, dim=1)
        soft_loss = kl(soft_prob, soft_targets) * temperature ** 2
        hard_loss = F.cross_entropy(student_logits, y)
        loss = alpha * soft_loss + (1 - alpha) * hard_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student, teacher):
            return float(F.kl_div(F.log_softmax(student(test_x), 1), F.softmax(teacher(test_x), 1), reduction="batchmean"))

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def protonet_support_axes_swapped_bad():
    torch.manual_seed(0)
    n_way, k_shot, n_query = 5, 4, 6

    def conv_block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))

    encoder = nn.Sequential(conv_block(1, 16), conv_block(16, 24), conv_block(24, 32), nn.Flatten())
    new_classes, all_classes = list(range(0, 24, 3)), 24
    x_all, y_all = gratings(2400, all_classes, noise=1.2, jitter=0.02, seed=1)
    pool = {c: x_all[y_all == c] for c in range(all_classes)}
    base_classes = [c for c in range(all_classes) if c not in new_classes]

    def sample_episode(classes):
        ways = [classes[j] for j in torch.randperm(len(classes))[:n_way].tolist()]
        picks = [pool[c][torch.randperm(len(pool[c]))[:k_shot + n_query]] for c in ways]
        block = torch.stack(picks, dim=1)                       # (shot + query, way, 1, 16, 16)
        support, query = block[:k_shot], block[k_shot:]
        labels = torch.arange(n_way).repeat(n_query)
        return support.flatten(0, 1), query.flatten(0, 1), labels

    def episode_logits(classes):
        support, query, labels = sample_episode(classes)
        z = encoder(torch.cat([support, query]))
        zs, zq = z[:n_way * k_shot], z[n_way * k_shot:]
        prototypes = zs.view(n_way, k_shot, -1).mean(dim=1)
        return -torch.cdist(zq, prototypes).pow(2) / zs.size(1), labels

    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)

    def step(i):
        encoder.train()
        logits, labels = episode_logits(base_classes)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(encoder):
            err = 0.0
            for _ in range(40):
                logits, labels = episode_logits(new_classes)
                err += float((logits.argmax(1) != labels).float().mean())
            return err / 40

    return {"model": encoder, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def protonet_support_axes_swapped_good():
    torch.manual_seed(0)
    n_way, k_shot, n_query = 5, 4, 6

    def conv_block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))

    encoder = nn.Sequential(conv_block(1, 16), conv_block(16, 24), conv_block(24, 32), nn.Flatten())
    new_classes, all_classes = list(range(0, 24, 3)), 24
    x_all, y_all = gratings(2400, all_classes, noise=1.2, jitter=0.02, seed=1)
    pool = {c: x_all[y_all == c] for c in range(all_classes)}
    base_classes = [c for c in range(all_classes) if c not in new_classes]

    def sample_episode(classes):
        ways = [classes[j] for j in torch.randperm(len(classes))[:n_way].tolist()]
        picks = [pool[c][torch.randperm(len(pool[c]))[:k_shot + n_query]] for c in ways]
        block = torch.stack(picks, dim=1)                       # (shot + query, way, 1, 16, 16)
        support, query = block[:k_shot], block[k_shot:]
        labels = torch.arange(n_way).repeat(n_query)
        return support.flatten(0, 1), query.flatten(0, 1), labels

    def episode_logits(classes):
        support, query, labels = sample_episode(classes)
        z = encoder(torch.cat([support, query]))
        zs, zq = z[:n_way * k_shot], z[n_way * k_shot:]
        prototypes = zs.view(k_shot, n_way, -1).mean(dim=0)
        return -torch.cdist(zq, prototypes).pow(2) / zs.size(1), labels

    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)

    def step(i):
        encoder.train()
        logits, labels = episode_logits(base_classes)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(encoder):
            err = 0.0
            for _ in range(40):
                logits, labels = episode_logits(new_classes)
                err += float((logits.argmax(1) != labels).float().mean())
            return err / 40

    return {"model": encoder, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def longtail_sampler_given_class_weights_bad():
    torch.manual_seed(0)
    counts = [500, 200, 80, 40]
    labels = torch.cat([torch.full((c,), k) for k, c in enumerate(counts)])
    images, labels = gratings(len(labels), 4, noise=2.2, seed=1, labels=labels, channels=3)
    test_x, test_y = gratings(400, 4, noise=2.2, seed=2, channels=3)
    train_set = TensorDataset(images, labels)
    class_counts = torch.bincount(labels)
    class_weights = 1.0 / class_counts.float()
    sample_weights = class_weights
    sampler = WeightedRandomSampler(sample_weights, num_samples=len(train_set), replacement=True)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            wrong = (model(test_x).argmax(1) != test_y).float()
            return float(sum(wrong[test_y == c].mean() for c in range(4)) / 4)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def longtail_sampler_given_class_weights_good():
    torch.manual_seed(0)
    counts = [500, 200, 80, 40]
    labels = torch.cat([torch.full((c,), k) for k, c in enumerate(counts)])
    images, labels = gratings(len(labels), 4, noise=2.2, seed=1, labels=labels, channels=3)
    test_x, test_y = gratings(400, 4, noise=2.2, seed=2, channels=3)
    train_set = TensorDataset(images, labels)
    class_counts = torch.bincount(labels)
    class_weights = 1.0 / class_counts.float()
    sample_weights = class_weights[labels]
    sampler = WeightedRandomSampler(sample_weights, num_samples=len(train_set), replacement=True)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            wrong = (model(test_x).argmax(1) != test_y).float()
            return float(sum(wrong[test_y == c].mean() for c in range(4)) / 4)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transfer_head_replaced_after_optimizer_bad():
    torch.manual_seed(0)
    class PretrainedNet(nn.Module):
        def __init__(self, classes=12):
            super().__init__()
            self.layer1 = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2))
            self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2))
            self.fc = nn.Linear(32 * 16, classes)

        def forward(self, x):
            return self.fc(self.layer2(self.layer1(x)).flatten(1))

    # stand-in for downloaded weights: a short pretraining on another label set
    model = PretrainedNet(12)
    px, py = gratings(1000, 12, noise=0.4, seed=5, channels=3)
    pre_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(100):
        j = torch.randint(len(px), (32,))
        pre_opt.zero_grad()
        F.cross_entropy(model(px[j]), py[j]).backward()
        pre_opt.step()
    pre_opt.zero_grad()

    train_x, train_y = gratings(400, 5, noise=1.5, jitter=0.12, seed=1, channels=3)
    test_x, test_y = gratings(300, 5, noise=1.5, jitter=0.12, seed=2, channels=3)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    for param in model.parameters():
        param.requires_grad = False
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)
    model.fc = nn.Linear(model.fc.in_features, 5)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        inputs, labels = next(loader)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def transfer_head_replaced_after_optimizer_good():
    torch.manual_seed(0)
    class PretrainedNet(nn.Module):
        def __init__(self, classes=12):
            super().__init__()
            self.layer1 = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2))
            self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2))
            self.fc = nn.Linear(32 * 16, classes)

        def forward(self, x):
            return self.fc(self.layer2(self.layer1(x)).flatten(1))

    # stand-in for downloaded weights: a short pretraining on another label set
    model = PretrainedNet(12)
    px, py = gratings(1000, 12, noise=0.4, seed=5, channels=3)
    pre_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(100):
        j = torch.randint(len(px), (32,))
        pre_opt.zero_grad()
        F.cross_entropy(model(px[j]), py[j]).backward()
        pre_opt.step()
    pre_opt.zero_grad()

    train_x, train_y = gratings(400, 5, noise=1.5, jitter=0.12, seed=1, channels=3)
    test_x, test_y = gratings(300, 5, noise=1.5, jitter=0.12, seed=2, channels=3)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    for param in model.parameters():
        param.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        inputs, labels = next(loader)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def depth_holes_counted_in_loss_bad():
    torch.manual_seed(0)
    class DepthNet(nn.Module):
        def __init__(self):
            super().__init__()
            def conv(i, o, s=1):
                return nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
            self.e1, self.e2, self.e3 = conv(3, 16), conv(16, 24, 2), conv(24, 24)
            self.d1 = conv(24 + 16, 16)
            self.out = nn.Conv2d(16, 1, 3, padding=1)
            nn.init.constant_(self.out.bias, 3.0)

        def forward(self, x):
            a = self.e1(x)
            b = self.e3(self.e2(a))
            b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
            return self.out(self.d1(torch.cat([b, a], 1)))

    train_rgb, _, train_depth = rooms(400, seed=1)
    test_rgb, test_true, _ = rooms(100, seed=2)
    loader = forever(DataLoader(TensorDataset(train_rgb, train_depth), batch_size=16, shuffle=True, drop_last=True))
    model = DepthNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        rgb, depth = next(loader)
        pred = model(rgb)
        loss = F.smooth_l1_loss(pred, depth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float(((model(test_rgb) - test_true).abs() / test_true).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def depth_holes_counted_in_loss_good():
    torch.manual_seed(0)
    class DepthNet(nn.Module):
        def __init__(self):
            super().__init__()
            def conv(i, o, s=1):
                return nn.Sequential(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
            self.e1, self.e2, self.e3 = conv(3, 16), conv(16, 24, 2), conv(24, 24)
            self.d1 = conv(24 + 16, 16)
            self.out = nn.Conv2d(16, 1, 3, padding=1)
            nn.init.constant_(self.out.bias, 3.0)

        def forward(self, x):
            a = self.e1(x)
            b = self.e3(self.e2(a))
            b = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
            return self.out(self.d1(torch.cat([b, a], 1)))

    train_rgb, _, train_depth = rooms(400, seed=1)
    test_rgb, test_true, _ = rooms(100, seed=2)
    loader = forever(DataLoader(TensorDataset(train_rgb, train_depth), batch_size=16, shuffle=True, drop_last=True))
    model = DepthNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        rgb, depth = next(loader)
        pred = model(rgb)
        valid = depth > 0
        loss = F.smooth_l1_loss(pred[valid], depth[valid])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float(((model(test_rgb) - test_true).abs() / test_true).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_layers_in_python_list_bad():
    torch.manual_seed(0)
    class PointNet(nn.Module):
        def __init__(self, widths=(3, 32, 48, 96), classes=5):
            super().__init__()
            self.mlps = [nn.Conv1d(i, o, 1) for i, o in zip(widths[:-1], widths[1:])]
            self.head = nn.Sequential(nn.Linear(widths[-1], 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, classes))

        def forward(self, pts):
            for mlp in self.mlps:
                pts = F.relu(mlp(pts))
            return self.head(pts.max(dim=2).values)

    train_x, train_y = clouds(800, seed=1)
    test_x, test_y = clouds(300, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        pts, label = next(loader)
        pts = pts + 0.02 * torch.randn_like(pts)
        loss = F.cross_entropy(model(pts), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_layers_in_python_list_good():
    torch.manual_seed(0)
    class PointNet(nn.Module):
        def __init__(self, widths=(3, 32, 48, 96), classes=5):
            super().__init__()
            self.mlps = nn.ModuleList([nn.Conv1d(i, o, 1) for i, o in zip(widths[:-1], widths[1:])])
            self.head = nn.Sequential(nn.Linear(widths[-1], 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, classes))

        def forward(self, pts):
            for mlp in self.mlps:
                pts = F.relu(mlp(pts))
            return self.head(pts.max(dim=2).values)

    train_x, train_y = clouds(800, seed=1)
    test_x, test_y = clouds(300, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        pts, label = next(loader)
        pts = pts + 0.02 * torch.randn_like(pts)
        loss = F.cross_entropy(model(pts), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sr_scheduler_stepped_every_batch_bad():
    torch.manual_seed(0)
    class ESPCN(nn.Module):
        def __init__(self, r=2):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(),
                nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(),
                nn.Conv2d(24, r * r, 3, padding=1))
            self.shuffle = nn.PixelShuffle(r)

        def forward(self, x):
            return self.shuffle(self.body(x))

    hr, test_hr = pictures(400, 24, seed=1, freq=(3.0, 8.0)), pictures(100, 24, seed=2, freq=(3.0, 8.0))
    lr_pics, test_lr = F.avg_pool2d(hr, 2), F.avg_pool2d(test_hr, 2)
    loader = DataLoader(TensorDataset(lr_pics, hr), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = ESPCN()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)  # halve every 5 epochs

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float(F.mse_loss(model(test_lr), test_hr))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sr_scheduler_stepped_every_batch_good():
    torch.manual_seed(0)
    class ESPCN(nn.Module):
        def __init__(self, r=2):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(),
                nn.Conv2d(32, 24, 3, padding=1), nn.ReLU(),
                nn.Conv2d(24, r * r, 3, padding=1))
            self.shuffle = nn.PixelShuffle(r)

        def forward(self, x):
            return self.shuffle(self.body(x))

    hr, test_hr = pictures(400, 24, seed=1, freq=(3.0, 8.0)), pictures(100, 24, seed=2, freq=(3.0, 8.0))
    lr_pics, test_lr = F.avg_pool2d(hr, 2), F.avg_pool2d(test_hr, 2)
    loader = DataLoader(TensorDataset(lr_pics, hr), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = ESPCN()
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)  # halve every 5 epochs

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float(F.mse_loss(model(test_lr), test_hr))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ecg_amp_clip_without_unscale_bad():
    torch.manual_seed(0)
    class ECGNet(nn.Module):
        def __init__(self, classes=4):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv1d(1, 16, 7, padding=3, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(4),
                nn.Conv1d(16, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(4),
                nn.Conv1d(32, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
            self.fc = nn.Linear(32, classes)

        def forward(self, x):
            return self.fc(self.features(x).squeeze(-1))

    train_x, train_y = beats(1000, seed=1)
    test_x, test_y = beats(300, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))
    model = ECGNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu")

    def step(i):
        model.train()
        x, y = next(loader)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = criterion(logits, y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ecg_amp_clip_without_unscale_good():
    torch.manual_seed(0)
    class ECGNet(nn.Module):
        def __init__(self, classes=4):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv1d(1, 16, 7, padding=3, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(4),
                nn.Conv1d(16, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(4),
                nn.Conv1d(32, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
            self.fc = nn.Linear(32, classes)

        def forward(self, x):
            return self.fc(self.features(x).squeeze(-1))

    train_x, train_y = beats(1000, seed=1)
    test_x, test_y = beats(300, seed=2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))
    model = ECGNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu")

    def step(i):
        model.train()
        x, y = next(loader)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = criterion(logits, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def spectrogram_net_left_in_eval_mode_bad():
    torch.manual_seed(0)
    class SpecNet(nn.Module):
        def __init__(self, classes=8, ch=16, depth=6):
            super().__init__()
            layers, i = [], 1
            for d in range(depth):
                layers += [nn.Conv2d(i, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU(inplace=True)]
                if d in (1, 3):
                    layers.append(nn.MaxPool2d(2))
                i = ch
            self.features = nn.Sequential(*layers)
            self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(ch * 16, classes))

        def forward(self, x):
            return self.classifier(self.features(x))

    train_x, train_y = gratings(640, 8, noise=0.9, seed=1)
    val_x, val_y = gratings(100, 8, noise=0.9, seed=3)
    test_x, test_y = gratings(400, 8, noise=0.9, seed=2)
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(train_loader)
    model = SpecNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            history.append(float(F.cross_entropy(model(val_x), val_y)))

    def step(i):
        if i % len(train_loader) == 0:
            validate()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def spectrogram_net_left_in_eval_mode_good():
    torch.manual_seed(0)
    class SpecNet(nn.Module):
        def __init__(self, classes=8, ch=16, depth=6):
            super().__init__()
            layers, i = [], 1
            for d in range(depth):
                layers += [nn.Conv2d(i, ch, 3, padding=1, bias=False), nn.BatchNorm2d(ch), nn.ReLU(inplace=True)]
                if d in (1, 3):
                    layers.append(nn.MaxPool2d(2))
                i = ch
            self.features = nn.Sequential(*layers)
            self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(ch * 16, classes))

        def forward(self, x):
            return self.classifier(self.features(x))

    train_x, train_y = gratings(640, 8, noise=0.9, seed=1)
    val_x, val_y = gratings(100, 8, noise=0.9, seed=3)
    test_x, test_y = gratings(400, 8, noise=0.9, seed=2)
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(train_loader)
    model = SpecNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            history.append(float(F.cross_entropy(model(val_x), val_y)))

    def step(i):
        if i % len(train_loader) == 0:
            validate()
            model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dann_reversal_layer_keeps_the_sign_bad():
    torch.manual_seed(0)
    class GradReverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lambd):
            ctx.lambd = lambd
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * ctx.lambd, None

    class DANN(nn.Module):
        def __init__(self, classes=5, dim=48):
            super().__init__()
            self.feature = nn.Sequential(
                nn.Conv2d(3, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(24 * 16, dim), nn.ReLU())
            self.label = nn.Linear(dim, classes)
            self.domain = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, 1))

        def forward(self, x, lambd=1.0):
            f = self.feature(x)
            return self.label(f), self.domain(GradReverse.apply(f, lambd)).squeeze(1)

    def to_target(x, seed):
        g = torch.Generator().manual_seed(seed)
        n = x.size(0)
        x = x * torch.tensor([0.4, 1.0, 0.2]).view(1, 3, 1, 1) + torch.tensor([0.9, -0.5, 0.5]).view(1, 3, 1, 1)
        return x + 0.3 * torch.randn(n, 3, 1, 16, generator=g)

    src_x, src_y = gratings(800, 5, noise=0.5, seed=1, channels=3)
    tgt_x, _ = gratings(800, 5, noise=0.5, seed=3, channels=3)
    test_x, test_y = gratings(400, 5, noise=0.5, seed=2, channels=3)
    tgt_x, test_x = to_target(tgt_x, 11), to_target(test_x, 12)
    src = forever(DataLoader(TensorDataset(src_x, src_y), batch_size=32, shuffle=True, drop_last=True))
    tgt = forever(DataLoader(TensorDataset(tgt_x), batch_size=32, shuffle=True, drop_last=True))
    model = DANN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        lambd = 2.0 / (1.0 + math.exp(-10 * min(1.0, i / 350))) - 1
        xs, ys = next(src)
        xt, = next(tgt)
        y, d = model(torch.cat([xs, xt]), lambd)
        domain = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))])
        loss = F.cross_entropy(y[:len(xs)], ys) + bce(d, domain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x)[0].argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dann_reversal_layer_keeps_the_sign_good():
    torch.manual_seed(0)
    class GradReverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lambd):
            ctx.lambd = lambd
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad_output):
            return -grad_output * ctx.lambd, None

    class DANN(nn.Module):
        def __init__(self, classes=5, dim=48):
            super().__init__()
            self.feature = nn.Sequential(
                nn.Conv2d(3, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(24 * 16, dim), nn.ReLU())
            self.label = nn.Linear(dim, classes)
            self.domain = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, 1))

        def forward(self, x, lambd=1.0):
            f = self.feature(x)
            return self.label(f), self.domain(GradReverse.apply(f, lambd)).squeeze(1)

    def to_target(x, seed):
        g = torch.Generator().manual_seed(seed)
        n = x.size(0)
        x = x * torch.tensor([0.4, 1.0, 0.2]).view(1, 3, 1, 1) + torch.tensor([0.9, -0.5, 0.5]).view(1, 3, 1, 1)
        return x + 0.3 * torch.randn(n, 3, 1, 16, generator=g)

    src_x, src_y = gratings(800, 5, noise=0.5, seed=1, channels=3)
    tgt_x, _ = gratings(800, 5, noise=0.5, seed=3, channels=3)
    test_x, test_y = gratings(400, 5, noise=0.5, seed=2, channels=3)
    tgt_x, test_x = to_target(tgt_x, 11), to_target(test_x, 12)
    src = forever(DataLoader(TensorDataset(src_x, src_y), batch_size=32, shuffle=True, drop_last=True))
    tgt = forever(DataLoader(TensorDataset(tgt_x), batch_size=32, shuffle=True, drop_last=True))
    model = DANN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        lambd = 2.0 / (1.0 + math.exp(-10 * min(1.0, i / 350))) - 1
        xs, ys = next(src)
        xt, = next(tgt)
        y, d = model(torch.cat([xs, xt]), lambd)
        domain = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))])
        loss = F.cross_entropy(y[:len(xs)], ys) + bce(d, domain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return float((model(test_x)[0].argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
