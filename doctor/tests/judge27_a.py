import contextlib
import copy
import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


# ----------------------------------------------------------------------------
# shared data and utilities
# ----------------------------------------------------------------------------

@contextlib.contextmanager
def _evaluating(*nets):
    modes = [(m, m.training) for net in nets for m in net.modules()]
    rng = torch.get_rng_state()
    for net in nets:
        net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode
        torch.set_rng_state(rng)


def _cycle(loader):
    while True:
        for batch in loader:
            yield batch


def _draw(kind, size, cx, cy, r):
    ys, xs = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    dx, dy = xs - cx, ys - cy
    d = (dx ** 2 + dy ** 2).sqrt()
    box = torch.maximum(dx.abs(), dy.abs())
    dia = dx.abs() + dy.abs()
    t = max(1.0, r * 0.35)
    if kind == 0:
        m = d <= r
    elif kind == 1:
        m = box <= r * 0.85
    elif kind == 2:
        m = dia <= r * 1.2
    elif kind == 3:
        m = (box <= r) & ((dx.abs() <= t * 0.8) | (dy.abs() <= t * 0.8))
    elif kind == 4:
        m = (d <= r) & (d >= r - t)
    elif kind == 5:
        m = (dx.abs() <= r) & (dy.abs() <= t)
    elif kind == 6:
        m = (dy.abs() <= r) & (dx.abs() <= t)
    elif kind == 7:
        m = (box <= r * 0.9) & (box >= r * 0.9 - t)
    elif kind == 8:
        m = (box <= r) & (((dx - dy).abs() <= t * 1.2) | ((dx + dy).abs() <= t * 1.2))
    else:
        m = (d <= r) & (dy <= 0)
    return m.float()


@functools.lru_cache(maxsize=None)
def _shapes(n, seed, size=16, classes=10, noise=0.25):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    u = torch.rand(n, 4, generator=g)
    x = torch.empty(n, 1, size, size)
    for k in range(n):
        r = size * (0.22 + 0.12 * u[k, 0].item())
        cx = r + (size - 1 - 2 * r) * u[k, 1].item()
        cy = r + (size - 1 - 2 * r) * u[k, 2].item()
        x[k, 0] = (0.5 + 0.5 * u[k, 3]) * _draw(int(y[k]), size, cx, cy, r)
    x = x + noise * torch.randn(x.shape, generator=g)
    return (x - 0.2) / 0.4, y


def _conv_bn(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class _SmallCNN(nn.Module):
    def __init__(self, num_classes=10, width=16, in_chans=1):
        super().__init__()
        self.features = nn.Sequential(
            _conv_bn(in_chans, width), _conv_bn(width, width * 2, 2),
            _conv_bn(width * 2, width * 2), _conv_bn(width * 2, width * 4, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width * 4, num_classes)

    def forward(self, x):
        return self.fc(self.pool(self.features(x)).flatten(1))


def _held_out_ce(model, x, y):
    with _evaluating(model):
        return F.cross_entropy(model(x), y).item()


def _knn_error(f_ref, y_ref, f, y, k=5):
    f_ref, f = F.normalize(f_ref, dim=1), F.normalize(f, dim=1)
    idx = (f @ f_ref.t()).topk(k, dim=1).indices
    votes = F.one_hot(y_ref[idx], int(y_ref.max()) + 1).sum(1)
    return (votes.argmax(1) != y).float().mean().item()


def _energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


# ----------------------------------------------------------------------------
# audio: sound classification on mel spectrograms
# ----------------------------------------------------------------------------

_SR = 4000


@functools.lru_cache(maxsize=None)
def _mel_bank(n_mels, n_fft):
    mel = lambda f: 2595 * math.log10(1 + f / 700)
    pts = torch.linspace(mel(60.0), mel(_SR / 2), n_mels + 2)
    hz = 700 * (10 ** (pts / 2595) - 1)
    freqs = torch.linspace(0, _SR / 2, n_fft // 2 + 1)
    up = (freqs[None] - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    down = (hz[2:, None] - freqs[None]) / (hz[2:] - hz[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0)


class _MelSpectrogram(nn.Module):
    def __init__(self, n_mels=24, n_fft=256, hop=100):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("fb", _mel_bank(n_mels, n_fft))

    def forward(self, wav):
        spec = torch.stft(wav, self.n_fft, self.hop, window=self.window, return_complex=True)
        return self.fb @ spec.abs().pow(2)


@functools.lru_cache(maxsize=None)
def _tones(n, seed):
    g = torch.Generator().manual_seed(seed)
    length = 2000
    t = torch.arange(length) / _SR
    y = torch.randint(0, 8, (n,), generator=g)
    u = torch.rand(n, 4, generator=g)
    f0 = 250 + 250 * u[:, :1]
    f1 = f0 * 2.2
    s = (t / t[-1])[None]
    freq = torch.stack([
        f0.expand(n, length), f1.expand(n, length), f0 + (f1 - f0) * s, f1 + (f0 - f1) * s,
        f0 + (f1 - f0) * (0.5 + 0.5 * torch.sin(2 * math.pi * 6 * t))[None],
        torch.where(s < 0.5, f0, f1), torch.where(s < 0.5, f1, f0),
        torch.where((s * 8).long() % 2 == 0, f0, f1)], 1)[torch.arange(n), y]
    phase = 2 * math.pi * torch.cumsum(freq, 1) / _SR
    wav = torch.sin(phase) + 0.3 * torch.sin(2 * phase)
    gain = 10 ** (-1.5 * u[:, 1:2])
    return gain * (wav + 0.4 * torch.randn(n, length, generator=g)), y


class _AudioCNN(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.bn0 = nn.BatchNorm2d(1)
        self.block1 = _conv_bn(1, 12)
        self.block2 = _conv_bn(12, 24, 2)
        self.block3 = _conv_bn(24, 32, 2)
        self.fc = nn.Linear(32 * 6, num_classes)

    def forward(self, x):
        x = self.bn0(x.unsqueeze(1))
        x = self.block3(self.block2(self.block1(x)))
        x = F.adaptive_avg_pool2d(x, (3, 2))
        return self.fc(x.flatten(1))


def _audio_power_spectrogram(bad):
    torch.manual_seed(0)
    wav, y = _tones(800, 1)
    wav_val, y_val = _tones(300, 2)
    loader = _cycle(DataLoader(TensorDataset(wav, y), batch_size=32, shuffle=True, drop_last=True))
    melspec = _MelSpectrogram()
    model = _AudioCNN(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def extract(w):
        mel = melspec(w)
        if bad:
            return mel
        return torch.log(mel + 1e-6)

    model.train()

    def step(i):
        w, target = next(loader)
        logits = model(extract(w))
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return _held_out_ce(model, extract(wav_val), y_val)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# audio: event classification, per-utterance CMVN
# ----------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _events(n, seed):
    g = torch.Generator().manual_seed(seed)
    length = 2400
    t = torch.arange(length) / length
    y = torch.randint(0, 6, (n,), generator=g)
    u = torch.rand(n, 4, generator=g)
    p = u[:, :1]
    pulse = lambda c: torch.exp(-((t[None] - c) / 0.06) ** 2)
    env = torch.stack([
        pulse(0.2 + 0.6 * p),
        pulse(0.15 + 0.3 * p) + pulse(0.45 + 0.35 * p),
        (t[None] * torch.ones_like(p)) ** 2,
        (1 - t[None] * torch.ones_like(p)) ** 2,
        (0.5 + 0.5 * torch.sin(2 * math.pi * (4 * t[None] + p))) ** 2,
        (0.5 + 0.5 * torch.sin(2 * math.pi * (8 * t[None] + p))) ** 2], 1)[torch.arange(n), y]
    white = torch.randn(n, length, generator=g)
    tint = 1.6 * u[:, 1:2] - 0.8
    colored = white + tint * torch.roll(white, 1, dims=1)
    wav = colored * (0.12 + env)
    return wav * (0.3 + 0.7 * u[:, 2:3]), y


class _EventCRNN(nn.Module):
    def __init__(self, n_mels, num_classes):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(n_mels, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32), nn.ReLU())
        self.rnn = nn.GRU(32, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, num_classes)

    def forward(self, x):
        h, _ = self.rnn(self.conv(x).transpose(1, 2))
        return self.head(h.mean(dim=1))


def _audio_cmvn_axis(bad):
    torch.manual_seed(0)
    wav, y = _events(800, 3)
    wav_val, y_val = _events(300, 4)
    loader = _cycle(DataLoader(TensorDataset(wav, y), batch_size=32, shuffle=True, drop_last=True))
    melspec = _MelSpectrogram(n_mels=20)
    model = _EventCRNN(20, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    axis = 1 if bad else 2

    def fbank(w):
        feats = torch.log(melspec(w) + 1e-6)
        mean = feats.mean(dim=axis, keepdim=True)
        std = feats.std(dim=axis, keepdim=True)
        return (feats - mean) / (std + 1e-5)

    model.train()

    def step(i):
        w, target = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(fbank(w)), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        return _held_out_ce(model, fbank(wav_val), y_val)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# audio: CTC recognizer
# ----------------------------------------------------------------------------

class _Utterances(Dataset):
    def __init__(self, n, seed, n_chars=8, dim=12):
        pat = torch.randn(n_chars, dim, generator=torch.Generator().manual_seed(77))
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(2, 9, (1,), generator=g))
            chars = torch.randint(1, n_chars + 1, (length,), generator=g)
            frames = []
            for c in chars.tolist():
                dur = int(torch.randint(2, 6, (1,), generator=g))
                frames.append(pat[c - 1].expand(dur, dim))
            feats = torch.cat(frames)
            feats = feats + 0.8 * torch.randn(feats.shape, generator=g)
            self.items.append((feats, chars))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def _collate_speech(batch):
    feats, chars = zip(*batch)
    feat_lens = torch.tensor([len(f) for f in feats])
    char_lens = torch.tensor([len(c) for c in chars])
    return (nn.utils.rnn.pad_sequence(feats, batch_first=True), torch.cat(chars), feat_lens, char_lens)


class _StreamingASR(nn.Module):
    def __init__(self, dim=12, hidden=64, vocab=9):
        super().__init__()
        self.proj = nn.Linear(dim, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x):
        h, _ = self.rnn(F.relu(self.proj(x)))
        return self.out(h).log_softmax(-1)


def _ctc_input_lengths(bad):
    torch.manual_seed(0)
    loader = _cycle(DataLoader(_Utterances(1000, 5), batch_size=16, shuffle=True, drop_last=True,
                               collate_fn=_collate_speech))
    val = _collate_speech(_Utterances(200, 6).items)
    model = _StreamingASR()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    model.train()

    def step(i):
        feats, targets, feat_lens, target_lens = next(loader)
        log_probs = model(feats).transpose(0, 1)
        if bad:
            input_lens = torch.full((feats.size(0),), log_probs.size(0), dtype=torch.long)
        else:
            input_lens = feat_lens
        loss = ctc(log_probs, targets, input_lens, target_lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        feats, targets, feat_lens, target_lens = val
        with _evaluating(model):
            return ctc(model(feats).transpose(0, 1), targets, feat_lens, target_lens).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# segmentation
# ----------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _scenes(n, seed, size, kinds, max_objects=3, rmin=0.12, rmax=0.2, noise=0.25):
    g = torch.Generator().manual_seed(seed)
    images = torch.zeros(n, 1, size, size)
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for k in range(n):
        for _ in range(int(torch.randint(1, max_objects + 1, (1,), generator=g))):
            c = int(torch.randint(0, len(kinds), (1,), generator=g))
            u = torch.rand(4, generator=g).tolist()
            r = size * (rmin + (rmax - rmin) * u[0])
            cx, cy = r + (size - 1 - 2 * r) * u[1], r + (size - 1 - 2 * r) * u[2]
            m = _draw(kinds[c], size, cx, cy, r) > 0
            images[k, 0][m] = 0.5 + 0.5 * u[3]
            masks[k][m] = c + 1
    images = images + noise * torch.randn(images.shape, generator=g)
    return (images - 0.15) / 0.35, masks


class _UNet(nn.Module):
    def __init__(self, num_classes, width=12, norm="bn"):
        super().__init__()

        def block(cin, cout):
            layers = []
            for a, b in ((cin, cout), (cout, cout)):
                layers += [nn.Conv2d(a, b, 3, padding=1, bias=False),
                           nn.BatchNorm2d(b) if norm == "bn" else nn.GroupNorm(4, b), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        self.down1 = block(1, width)
        self.down2 = block(width, width * 2)
        self.bottom = block(width * 2, width * 2)
        self.up2 = block(width * 4, width * 2)
        self.up1 = block(width * 3, width)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool2d(d1, 2))
        b = self.bottom(F.max_pool2d(d2, 2))
        u2 = self.up2(torch.cat([F.interpolate(b, scale_factor=2, mode="nearest"), d2], 1))
        u1 = self.up1(torch.cat([F.interpolate(u2, scale_factor=2, mode="nearest"), d1], 1))
        return self.head(u1)


def _miou(pred, mask, num_classes):
    ious = []
    for c in range(num_classes):
        inter = ((pred == c) & (mask == c)).sum().item()
        union = ((pred == c) | (mask == c)).sum().item()
        ious.append(inter / max(union, 1))
    return sum(ious) / num_classes


class _SegDataset(Dataset):
    def __init__(self, images, masks, size, mask_mode):
        self.images, self.masks, self.size, self.mask_mode = images, masks, size, mask_mode

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = F.interpolate(self.images[i][None], size=self.size, mode="bilinear", align_corners=False)[0]
        mask = self.masks[i][None, None].float()
        if self.mask_mode == "bilinear":
            mask = F.interpolate(mask, size=self.size, mode="bilinear", align_corners=False)
        else:
            mask = F.interpolate(mask, size=self.size, mode="nearest-exact")
        return image, mask[0, 0].long()


def _seg_mask_resize(bad):
    torch.manual_seed(0)
    kinds = (0, 2, 5, 4)
    images, masks = _scenes(400, 7, 44, kinds, noise=0.1)
    val_images, val_masks = _scenes(80, 8, 44, kinds, noise=0.1)
    size = (28, 28)
    train_set = _SegDataset(images, masks, size, "bilinear" if bad else "nearest")
    loader = _cycle(DataLoader(train_set, batch_size=8, shuffle=True, drop_last=True))
    val_set = _SegDataset(val_images, val_masks, size, "nearest")
    val_x = torch.stack([val_set[k][0] for k in range(len(val_set))])
    val_y = torch.stack([val_set[k][1] for k in range(len(val_set))])
    model = _UNet(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    model.train()

    def step(i):
        image, target = next(loader)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return 1 - _miou(model(val_x).argmax(1), val_y, 5)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _dice_loss(probs, target, eps=1.0):
    inter = (probs * target).sum(dim=(1, 2, 3))
    total = probs.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return (1 - (2 * inter + eps) / (total + eps)).mean()


def _seg_hard_dice(bad):
    torch.manual_seed(0)
    cfg = dict(size=32, kinds=(0, 2), max_objects=1, rmin=0.06, rmax=0.1, noise=1.0)
    images, masks = _scenes(1500, 9, **cfg)
    val_x, val_m = _scenes(100, 10, **cfg)
    lesion = (masks > 0).float().unsqueeze(1)
    val_lesion = (val_m > 0).float().unsqueeze(1)
    loader = _cycle(DataLoader(TensorDataset(images, lesion), batch_size=8, shuffle=True, drop_last=True))
    model = _UNet(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    model.train()

    def step(i):
        image, target = next(loader)
        logits = model(image)
        probs = torch.sigmoid(logits)
        if bad:
            pred = (probs > 0.5).float()
        else:
            pred = probs
        loss = F.binary_cross_entropy_with_logits(logits, target) + _dice_loss(pred, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = (torch.sigmoid(model(val_x)) > 0.5).float()
            return _dice_loss(pred, val_lesion).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _accumulation_zero_grad(bad):
    torch.manual_seed(0)
    kinds = (1, 3, 4)
    images, masks = _scenes(300, 11, 20, kinds, max_objects=2, rmin=0.15, rmax=0.25)
    val_x, val_y = _scenes(100, 12, 20, kinds, max_objects=2, rmin=0.15, rmax=0.25)
    loader = _cycle(DataLoader(TensorDataset(images, masks), batch_size=2, shuffle=True, drop_last=True))
    model = _UNet(4, width=8, norm="gn")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    accum_steps = 4

    model.train()

    def step(i):
        total = 0.0
        if not bad:
            optimizer.zero_grad()
        for _ in range(accum_steps):
            image, target = next(loader)
            if bad:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(image), target) / accum_steps
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        return _held_out_ce(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# detection
# ----------------------------------------------------------------------------

class _DetDataset(Dataset):
    """Annotations as in a COCO-like json: category ids 0..2, boxes as cx, cy, w, h in pixels."""

    def __init__(self, n, seed, size=32, kinds=(0, 3, 7)):
        g = torch.Generator().manual_seed(seed)
        self.samples = []
        for _ in range(n):
            image = torch.zeros(1, size, size)
            cats, boxes, taken = [], [], []
            for _ in range(int(torch.randint(1, 4, (1,), generator=g))):
                c = int(torch.randint(0, len(kinds), (1,), generator=g))
                u = torch.rand(4, generator=g).tolist()
                r = 3.5 + 1.5 * u[0]
                cx, cy = r + (size - 1 - 2 * r) * u[1], r + (size - 1 - 2 * r) * u[2]
                if any(abs(cx - a) < 9 and abs(cy - b) < 9 for a, b in taken):
                    continue
                taken.append((cx, cy))
                image[0] = torch.maximum(image[0], (0.6 + 0.4 * u[3]) * _draw(kinds[c], size, cx, cy, r))
                cats.append(c)
                boxes.append([cx, cy, 2 * r, 2 * r])
            image = image + 0.15 * torch.randn(image.shape, generator=g)
            self.samples.append(((image - 0.15) / 0.3, torch.tensor(cats), torch.tensor(boxes)))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def _collate_det(batch):
    images, cats, boxes = zip(*batch)
    return torch.stack(images), list(cats), list(boxes)


class _MiniSSD(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            _conv_bn(1, 16), _conv_bn(16, 24, 2), _conv_bn(24, 32, 2), _conv_bn(32, 32))
        self.cls_head = nn.Conv2d(32, num_classes, 3, padding=1)
        self.box_head = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x):
        f = self.backbone(x)
        cls = self.cls_head(f).flatten(2).transpose(1, 2)
        box = self.box_head(f).flatten(2).transpose(1, 2)
        return cls, box


def _assign_targets(labels, boxes, stride=4, grid=8, anchor=8.0):
    cls_t = torch.zeros(len(labels), grid * grid, dtype=torch.long)
    box_t = torch.zeros(len(labels), grid * grid, 4)
    pos = torch.zeros(len(labels), grid * grid, dtype=torch.bool)
    for b, (lab, bx) in enumerate(zip(labels, boxes)):
        gx = (bx[:, 0] / stride).long().clamp(0, grid - 1)
        gy = (bx[:, 1] / stride).long().clamp(0, grid - 1)
        cell = gy * grid + gx
        cls_t[b, cell] = lab
        pos[b, cell] = True
        ax, ay = (gx.float() + 0.5) * stride, (gy.float() + 0.5) * stride
        box_t[b, cell] = torch.stack([
            (bx[:, 0] - ax) / anchor, (bx[:, 1] - ay) / anchor,
            torch.log(bx[:, 2] / anchor), torch.log(bx[:, 3] / anchor)], 1)
    return cls_t, box_t, pos


def _ssd_loss(cls_pred, box_pred, cls_t, box_t, pos, neg_ratio=3):
    n_pos = pos.sum().clamp(min=1)
    ce = F.cross_entropy(cls_pred.transpose(1, 2), cls_t, reduction="none")
    neg_ce = ce.detach().masked_fill(pos, -1.0)
    rank = neg_ce.argsort(dim=1, descending=True).argsort(dim=1)
    hard_neg = (rank < neg_ratio * pos.sum(1, keepdim=True)) & ~pos
    cls_loss = ce[pos | hard_neg].sum() / n_pos
    box_loss = F.smooth_l1_loss(box_pred[pos], box_t[pos], reduction="sum") / n_pos
    return cls_loss + box_loss


def _detection_background_index(bad):
    torch.manual_seed(0)
    loader = _cycle(DataLoader(_DetDataset(400, 13), batch_size=8, shuffle=True, drop_last=True,
                               collate_fn=_collate_det))
    val_x, val_cats, val_boxes = _collate_det(_DetDataset(120, 14).samples)
    model = _MiniSSD(num_classes=3 + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def to_labels(cats):
        if bad:
            return cats
        return [c + 1 for c in cats]

    model.train()

    def step(i):
        images, cats, boxes = next(loader)
        cls_t, box_t, pos = _assign_targets(to_labels(cats), boxes)
        cls_pred, box_pred = model(images)
        loss = _ssd_loss(cls_pred, box_pred, cls_t, box_t, pos)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        _, _, pos = _assign_targets(val_cats, val_boxes)
        with _evaluating(model):
            cls_pred, _ = model(val_x)
            found = cls_pred.argmax(-1) > 0
            tp = (found & pos).sum().item()
            f1 = 2 * tp / max(found.sum().item() + pos.sum().item(), 1)
            return 1 - f1

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# key points
# ----------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _faces(n, seed, size=24):
    g = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    base = torch.tensor([[-0.45, -0.35], [0.45, -0.35], [0.0, 0.05], [-0.35, 0.5], [0.35, 0.5]])
    images = torch.zeros(n, 1, size, size)
    points = torch.zeros(n, 5, 2)
    for k in range(n):
        u = torch.rand(5, generator=g).tolist()
        r = 7 + 2.5 * u[0]
        cx, cy = r + (size - 1 - 2 * r) * u[1], r + (size - 1 - 2 * r) * u[2]
        a = (u[3] - 0.5) * 0.7
        rot = torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
        p = (base + 0.06 * torch.randn(5, 2, generator=g)) @ rot.t() * r + torch.tensor([cx, cy])
        img = 0.5 * (((xs - cx) ** 2 + (ys - cy) ** 2).sqrt() <= r).float()
        for j, (px, py) in enumerate(p.tolist()):
            blob = torch.exp(-((xs - px) ** 2 + (ys - py) ** 2) / 1.5)
            img = img + (0.8 if j == 2 else -0.5) * blob
        images[k, 0] = img
        points[k] = p / (size - 1)
    images = images + 0.08 * torch.randn(images.shape, generator=g)
    return (images - 0.25) / 0.3, points


class _LandmarkDataset(Dataset):
    FLIP_PAIRS = ((0, 1), (3, 4))

    def __init__(self, images, points, swap_pairs):
        self.images, self.points, self.swap_pairs = images, points, swap_pairs

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, pts = self.images[i], self.points[i].clone()
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
            pts[:, 0] = 1.0 - pts[:, 0]
            if self.swap_pairs:
                for a, b in self.FLIP_PAIRS:
                    pts[[a, b]] = pts[[b, a]]
        return image, pts


class _LandmarkNet(nn.Module):
    def __init__(self, n_points=5):
        super().__init__()
        self.features = nn.Sequential(_conv_bn(1, 16), _conv_bn(16, 24, 2), _conv_bn(24, 32, 2))
        self.fc1 = nn.Linear(32 * 36, 64)
        self.fc2 = nn.Linear(64, n_points * 2)

    def forward(self, x):
        h = F.relu(self.fc1(self.features(x).flatten(1)))
        return self.fc2(h).view(x.size(0), -1, 2)


def _keypoint_flip(bad):
    torch.manual_seed(0)
    images, points = _faces(500, 15)
    val_x, val_p = _faces(150, 16)
    train_set = _LandmarkDataset(images, points, swap_pairs=not bad)
    loader = _cycle(DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True))
    model = _LandmarkNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.SmoothL1Loss(beta=0.05)

    model.train()

    def step(i):
        image, target = next(loader)
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return (model(val_x) - val_p).norm(dim=-1).mean().item() * 23

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# classification with mixed samples and soft labels
# ----------------------------------------------------------------------------

def _rand_bbox(h, w, lam):
    cut = math.sqrt(1.0 - lam)
    ch, cw = int(h * cut), int(w * cut)
    cy, cx = int(torch.randint(h, (1,))), int(torch.randint(w, (1,)))
    y1, y2 = max(cy - ch // 2, 0), min(cy + ch // 2, h)
    x1, x2 = max(cx - cw // 2, 0), min(cx + cw // 2, w)
    return y1, y2, x1, x2


def _cutmix_lam(bad):
    torch.manual_seed(0)
    x, y = _shapes(1200, 17)
    val_x, val_y = _shapes(400, 18)
    loader = _cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = _SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=800)
    criterion = nn.CrossEntropyLoss()
    beta = torch.distributions.Beta(1.0, 1.0)
    cutmix_prob = 0.5

    model.train()

    def step(i):
        images, target = next(loader)
        if torch.rand(()) < cutmix_prob:
            lam = beta.sample().item()
            rand_index = torch.randperm(images.size(0))
            target_a, target_b = target, target[rand_index]
            y1, y2, x1, x2 = _rand_bbox(images.size(2), images.size(3), lam)
            images = images.clone()
            images[:, :, y1:y2, x1:x2] = images[rand_index, :, y1:y2, x1:x2]
            lam = 1 - (y2 - y1) * (x2 - x1) / (images.size(2) * images.size(3))
            output = model(images)
            if bad:
                loss = criterion(output, target_a) * (1 - lam) + criterion(output, target_b) * lam
            else:
                loss = criterion(output, target_a) * lam + criterion(output, target_b) * (1 - lam)
        else:
            loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        return _held_out_ce(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _ResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(ch)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(ch)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class _TinyResNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.stem = _conv_bn(1, 24, 2)
        self.layer1 = _ResBlock(24)
        self.down = _conv_bn(24, 48, 2)
        self.layer2 = _ResBlock(48)
        self.fc = nn.Linear(48, num_classes)

    def forward(self, x):
        x = self.layer2(self.down(self.layer1(self.stem(x))))
        return self.fc(x.mean(dim=(2, 3)))


def _mixup_permutation(bad):
    torch.manual_seed(0)
    x, y = _shapes(1200, 19)
    val_x, val_y = _shapes(400, 20)
    loader = _cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = _TinyResNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    beta = torch.distributions.Beta(0.4, 0.4)

    def mixup(images, targets):
        lam = beta.sample().item()
        perm = torch.randperm(images.size(0))
        mixed = lam * images + (1 - lam) * images[perm]
        onehot = F.one_hot(targets, 10).float()
        if bad:
            perm = torch.randperm(images.size(0))
        return mixed, lam * onehot + (1 - lam) * onehot[perm]

    model.train()

    def step(i):
        images, targets = next(loader)
        images, soft = mixup(images, targets)
        loss = F.cross_entropy(model(images), soft)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return _held_out_ce(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _LabelSmoothingLoss(nn.Module):
    def __init__(self, num_classes, smoothing, off_value):
        super().__init__()
        self.num_classes = num_classes
        self.smoothing = smoothing
        self.off_value = off_value

    def forward(self, logits, target):
        logp = F.log_softmax(logits, dim=-1)
        onehot = F.one_hot(target, self.num_classes).float()
        soft = onehot * (1 - self.smoothing) + self.off_value
        return -(soft * logp).sum(dim=-1).mean()


def _manual_label_smoothing(bad):
    torch.manual_seed(0)
    x, y = _shapes(1200, 21)
    val_x, val_y = _shapes(400, 22)
    loader = _cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = _SmallCNN(width=12)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    smoothing = 0.1
    criterion = _LabelSmoothingLoss(10, smoothing, off_value=smoothing if bad else smoothing / 10)

    model.train()

    def step(i):
        images, target = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return _held_out_ce(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# transfer learning and distillation
# ----------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _pretrained(arch):
    rng = torch.get_rng_state()
    torch.manual_seed(123)
    net = {"backbone": lambda: _SmallCNN(6, 16), "teacher": lambda: _SmallCNN(10, 20)}[arch]()
    x, y = _shapes(1200, 23, classes=6) if arch == "backbone" else _shapes(1200, 24)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    loader = _cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    net.train()
    with torch.enable_grad():
        for _ in range(400):
            bx, by = next(loader)
            opt.zero_grad()
            F.cross_entropy(net(bx), by).backward()
            opt.step()
    torch.set_rng_state(rng)
    return copy.deepcopy(net.state_dict())


def _frozen_backbone_bn(bad):
    torch.manual_seed(0)
    x, y = _shapes(600, 25, classes=10)
    val_x, val_y = _shapes(400, 26, classes=10)
    loader = _cycle(DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True, drop_last=True))
    model = _SmallCNN(6, 16)
    model.load_state_dict(_pretrained("backbone"))
    for p in model.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 10)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-3)

    def step(i):
        model.train()
        if not bad:
            model.features.eval()
        images, target = next(loader)
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return _held_out_ce(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _distill_kl_input(bad):
    torch.manual_seed(0)
    x, y = _shapes(1200, 24)
    val_x, val_y = _shapes(400, 27)
    loader = _cycle(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    teacher = _SmallCNN(10, 20)
    teacher.load_state_dict(_pretrained("teacher"))
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
    student = _SmallCNN(10, 6)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    T, alpha = 4.0, 0.7
    kd = nn.KLDivLoss(reduction="batchmean")

    student.train()

    def step(i):
        images, target = next(loader)
        with torch.no_grad():
            teacher_logits = teacher(images)
        logits = student(images)
        if bad:
            student_soft = F.softmax(logits / T, dim=1)
        else:
            student_soft = F.log_softmax(logits / T, dim=1)
        soft_loss = kd(student_soft, F.softmax(teacher_logits / T, dim=1)) * T * T
        loss = alpha * soft_loss + (1 - alpha) * F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return _held_out_ce(student, val_x, val_y)

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# contrastive and self-supervised
# ----------------------------------------------------------------------------

def _augment(x):
    n, _, h, w = x.shape
    pad = F.pad(x, (2, 2, 2, 2), value=-0.5)
    oy, ox = torch.randint(0, 5, (n,)), torch.randint(0, 5, (n,))
    rows = (oy[:, None] + torch.arange(h))[:, :, None]
    cols = (ox[:, None] + torch.arange(w))[:, None, :]
    out = pad[torch.arange(n)[:, None, None], 0, rows, cols].unsqueeze(1)
    gain = 0.7 + 0.6 * torch.rand(n, 1, 1, 1)
    shift = 0.3 * torch.randn(n, 1, 1, 1)
    return gain * out + shift + 0.3 * torch.randn_like(out)


class _Encoder(nn.Module):
    def __init__(self, width=16, in_chans=1):
        super().__init__()
        self.net = nn.Sequential(
            _conv_bn(in_chans, width), _conv_bn(width, width * 2, 2), _conv_bn(width * 2, width * 4, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.out_dim = width * 4

    def forward(self, x):
        return self.net(x)


class _SimCLR(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.encoder = _Encoder()
        d = self.encoder.out_dim
        self.projector = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, dim))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=1)


def _nt_xent(z1, z2, temperature, mask_self=True):
    n = z1.size(0)
    z = torch.cat([z1, z2])
    sim = z @ z.t() / temperature
    if mask_self:
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    labels = torch.cat([torch.arange(n) + n, torch.arange(n)])
    return F.cross_entropy(sim, labels)


def _simclr_self_similarity(bad):
    torch.manual_seed(0)
    x, _ = _shapes(1000, 28)
    val_x, _ = _shapes(400, 29)
    loader = _cycle(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))
    model = _SimCLR()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    model.train()

    def step(i):
        (images,) = next(loader)
        z1, z2 = model(_augment(images)), model(_augment(images))
        loss = _nt_xent(z1, z2, temperature=0.07, mask_self=not bad)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            torch.manual_seed(50)
            q, k = model(_augment(val_x)), model(_augment(val_x))
            return ((q @ k.t()).argmax(1) != torch.arange(len(val_x))).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


@functools.lru_cache(maxsize=None)
def _captioned(n, seed, size=16):
    g = torch.Generator().manual_seed(seed)
    colors = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1.0]])
    attrs = torch.stack([torch.randint(0, k, (n,), generator=g) for k in (6, 8, 4, 6)], 1)
    images = torch.zeros(n, 3, size, size)
    for k in range(n):
        color, shape, quad, back = attrs[k].tolist()
        u = torch.rand(3, generator=g).tolist()
        r = 3.0 + 0.8 * u[0]
        cx, cy = 4 + 7 * (quad % 2) + u[1] - 0.5, 4 + 7 * (quad // 2) + u[2] - 0.5
        m = _draw(shape, size, cx, cy, r)
        images[k] = 0.25 * colors[back][:, None, None] * (1 - m) + colors[color][:, None, None] * m
    images = images + 0.1 * torch.randn(images.shape, generator=g)
    tokens = attrs + torch.tensor([0, 6, 14, 18])
    return (images - 0.2) / 0.3, tokens


class _MiniCLIP(nn.Module):
    def __init__(self, normalize, dim=32, vocab=24):
        super().__init__()
        self.normalize = normalize
        self.visual = nn.Sequential(
            _conv_bn(3, 16), _conv_bn(16, 32, 2), _conv_bn(32, 32, 2), nn.Flatten(), nn.Linear(32 * 16, dim))
        self.token = nn.Embedding(vocab, 32)
        self.text = nn.Sequential(nn.Linear(4 * 32, 64), nn.ReLU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, images):
        return self.visual(images)

    def encode_text(self, tokens):
        return self.text(self.token(tokens).flatten(1))

    def forward(self, images, tokens):
        img, txt = self.encode_image(images), self.encode_text(tokens)
        if self.normalize:
            img = img / img.norm(dim=-1, keepdim=True)
            txt = txt / txt.norm(dim=-1, keepdim=True)
        return self.logit_scale.exp() * img @ txt.t()


def _clip_unnormalized(bad):
    torch.manual_seed(0)
    images, tokens = _captioned(1500, 30)
    val_images, val_tokens = _captioned(200, 31)
    loader = _cycle(DataLoader(TensorDataset(images, tokens), batch_size=32, shuffle=True, drop_last=True))
    model = _MiniCLIP(normalize=not bad)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    model.train()

    def step(i):
        img, tok = next(loader)
        logits = model(img, tok)
        labels = torch.arange(img.size(0))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        return loss.item()

    def probe():
        captions = torch.unique(val_tokens, dim=0)
        truth = (val_tokens[:, None] == captions[None]).all(-1).float().argmax(1)
        with _evaluating(model):
            img = F.normalize(model.encode_image(val_images), dim=-1)
            txt = F.normalize(model.encode_text(captions), dim=-1)
            return ((img @ txt.t()).argmax(1) != truth).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _SimSiam(nn.Module):
    def __init__(self, dim=64, pred_dim=16, stop_grad=True):
        super().__init__()
        self.stop_grad = stop_grad
        self.encoder = _Encoder()
        d = self.encoder.out_dim
        self.projector = nn.Sequential(
            nn.Linear(d, d, bias=False), nn.BatchNorm1d(d), nn.ReLU(inplace=True),
            nn.Linear(d, dim, bias=False), nn.BatchNorm1d(dim, affine=False))
        self.predictor = nn.Sequential(
            nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(inplace=True),
            nn.Linear(pred_dim, dim))

    def forward(self, x1, x2):
        z1, z2 = self.projector(self.encoder(x1)), self.projector(self.encoder(x2))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        if self.stop_grad:
            return p1, p2, z1.detach(), z2.detach()
        return p1, p2, z1, z2


def _simsiam_stop_gradient(bad):
    torch.manual_seed(0)
    x, y = _shapes(1000, 32)
    val_x, val_y = _shapes(400, 33)
    loader = _cycle(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))
    model = _SimSiam(stop_grad=not bad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CosineSimilarity(dim=1)

    model.train()

    def step(i):
        (images,) = next(loader)
        p1, p2, z1, z2 = model(_augment(images), _augment(images))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return _knn_error(model.encoder(x), y, model.encoder(val_x), val_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _TripletDataset(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
        self.by_class = [torch.nonzero(y == c).flatten() for c in range(int(y.max()) + 1)]

    def __len__(self):
        return len(self.x)

    def _pick(self, c):
        pool = self.by_class[c]
        return self.x[pool[torch.randint(len(pool), (1,)).item()]]

    def __getitem__(self, i):
        c = int(self.y[i])
        other = (c + int(torch.randint(1, len(self.by_class), (1,)))) % len(self.by_class)
        return self.x[i], self._pick(c), self._pick(other)


class _EmbeddingNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.encoder = _Encoder(12)
        self.fc = nn.Linear(self.encoder.out_dim, dim)

    def forward(self, x):
        return F.normalize(self.fc(self.encoder(x)), dim=1)


def _triplet_order(bad):
    torch.manual_seed(0)
    x, y = _shapes(1000, 34)
    val_x, val_y = _shapes(400, 35)
    loader = _cycle(DataLoader(_TripletDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = _EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss(margin=0.5)

    model.train()

    def step(i):
        if bad:
            anchor, negative, positive = next(loader)
        else:
            anchor, positive, negative = next(loader)
        emb = model(torch.cat([anchor, positive, negative]))
        emb_a, emb_p, emb_n = emb.chunk(3)
        loss = criterion(emb_a, emb_p, emb_n)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return _knn_error(model(x), y, model(val_x), val_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------
# generative models
# ----------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def _blobs(n, seed, size=8):
    g = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    u = torch.rand(n, 3, generator=g)[:, :, None, None]
    cx, cy = 1.5 + (size - 4) * u[:, 0], 1.5 + (size - 4) * u[:, 1]
    s = 1.0 + 0.6 * u[:, 2]
    img = torch.exp(-((xs - cx) ** 2 + (ys - cy) ** 2) / (2 * s ** 2))
    return (2 * img - 1).unsqueeze(1)


@functools.lru_cache(maxsize=None)
def _moons(n, seed, noise=0.06):
    g = torch.Generator().manual_seed(seed)
    a = math.pi * torch.rand(n, generator=g)
    side = (torch.rand(n, generator=g) < 0.5).float()
    px = torch.where(side > 0, 1 - a.cos(), a.cos())
    py = torch.where(side > 0, 0.5 - a.sin(), a.sin())
    pts = torch.stack([px, py], 1) + noise * torch.randn(n, 2, generator=g)
    return (pts - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


class _TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000.0) * torch.arange(half) / half)
        args = t.float()[:, None] * freqs[None]
        return self.mlp(torch.cat([args.sin(), args.cos()], 1))


class _Denoiser2d(nn.Module):
    def __init__(self, width=24, emb=32):
        super().__init__()
        self.time = _TimeEmbedding(emb)
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.norms = nn.ModuleList([nn.GroupNorm(4, width) for _ in range(4)])
        self.t_proj = nn.ModuleList([nn.Linear(emb, width) for _ in range(4)])
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        e = F.silu(self.time(t))
        h = self.inp(x)
        for conv, norm, proj in zip(self.convs, self.norms, self.t_proj):
            h = h + conv(F.silu(norm(h) + proj(e)[:, :, None, None]))
        return self.out(F.silu(h))


def _ddpm_single_timestep(bad):
    torch.manual_seed(0)
    data = _blobs(1500, 36)
    val = _blobs(300, 37)
    loader = _cycle(DataLoader(TensorDataset(data), batch_size=32, shuffle=True, drop_last=True))
    timesteps = 200
    betas = torch.linspace(5e-4, 0.05, timesteps)
    alphas_bar = torch.cumprod(1 - betas, 0)
    model = _Denoiser2d()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def q_sample(x0, t, noise):
        a = alphas_bar[t][:, None, None, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    g = torch.Generator().manual_seed(38)
    val_t = torch.randint(0, timesteps, (300,), generator=g)
    val_noise = torch.randn(val.shape, generator=g)

    model.train()

    def step(i):
        (x0,) = next(loader)
        if bad:
            t = torch.randint(0, timesteps, (1,)).repeat(x0.size(0))
        else:
            t = torch.randint(0, timesteps, (x0.size(0),))
        noise = torch.randn_like(x0)
        loss = F.mse_loss(model(q_sample(x0, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.mse_loss(model(q_sample(val, val_t, val_noise), val_t), val_noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _NoiseMLP(nn.Module):
    def __init__(self, hidden=96, emb=32):
        super().__init__()
        self.time = _TimeEmbedding(emb)
        self.net = nn.Sequential(
            nn.Linear(2 + emb, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


class _GaussianDiffusion(nn.Module):
    def __init__(self, denoise_fn, timesteps=60, regress="noise"):
        super().__init__()
        self.denoise_fn = denoise_fn
        self.timesteps = timesteps
        self.regress = regress
        betas = torch.linspace(1e-3, 0.15, timesteps)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, 0))

    def q_sample(self, x_start, t, noise):
        a = self.alphas_cumprod[t][:, None]
        return a.sqrt() * x_start + (1 - a).sqrt() * noise

    def forward(self, x_start):
        t = torch.randint(0, self.timesteps, (x_start.size(0),), device=x_start.device)
        noise = torch.randn_like(x_start)
        pred = self.denoise_fn(self.q_sample(x_start, t, noise), t)
        target = noise if self.regress == "noise" else x_start
        return F.mse_loss(pred, target)

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 2, device=self.betas.device)
        for k in reversed(range(self.timesteps)):
            t = torch.full((n,), k, dtype=torch.long, device=x.device)
            eps = self.denoise_fn(x, t)
            beta, abar = self.betas[k], self.alphas_cumprod[k]
            x = (x - beta / (1 - abar).sqrt() * eps) / (1 - beta).sqrt()
            if k > 0:
                x = x + beta.sqrt() * torch.randn_like(x)
        return x


def _ddpm_target(bad):
    torch.manual_seed(0)
    data = _moons(3000, 39)
    val = _moons(1000, 40)
    loader = _cycle(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))
    diffusion = _GaussianDiffusion(_NoiseMLP(), regress="start" if bad else "noise")
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-3)

    diffusion.train()

    def step(i):
        (x,) = next(loader)
        loss = diffusion(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(diffusion):
            torch.manual_seed(41)
            return _energy_distance(diffusion.sample(1000), val)

    return {"model": diffusion, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _Coupling(nn.Module):
    def __init__(self, mask, hidden):
        super().__init__()
        d = mask.numel()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(
            nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2 * d))

    def forward(self, x):
        s, t = self.net(x * self.mask).chunk(2, dim=1)
        s = 1.5 * torch.tanh(s / 1.5) * (1 - self.mask)
        t = t * (1 - self.mask)
        return x * torch.exp(s) + t, s.sum(dim=1)


class _RealNVP(nn.Module):
    def __init__(self, masks, hidden):
        super().__init__()
        self.layers = nn.ModuleList([_Coupling(m, hidden) for m in masks])

    def forward(self, x):
        logdet = x.new_zeros(x.size(0))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        return x, logdet


def _std_normal_logp(z):
    return -0.5 * (z ** 2 + math.log(2 * math.pi)).sum(dim=1)


def _realnvp_masks(bad):
    torch.manual_seed(0)
    data = _moons(3000, 42)
    val = _moons(1000, 43)
    loader = _cycle(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))
    masks = []
    for k in range(6):
        mask = torch.tensor([1.0, 0.0])
        if not bad and k % 2 == 1:
            mask = 1 - mask
        masks.append(mask)
    flow = _RealNVP(masks, hidden=48)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    flow.train()

    def step(i):
        (x,) = next(loader)
        z, logdet = flow(x)
        loss = -(_std_normal_logp(z) + logdet).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(flow):
            z, logdet = flow(val)
            return -(_std_normal_logp(z) + logdet).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _image_flow_logdet(bad):
    torch.manual_seed(0)
    levels, size = 16, 6
    quant = lambda b: ((b + 1) / 2 * (levels - 1)).round().flatten(1)
    data = quant(_blobs(2000, 44, size))
    val = quant(_blobs(500, 45, size))
    loader = _cycle(DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True))
    d = size * size
    checker = ((torch.arange(size)[:, None] + torch.arange(size)[None]) % 2).float().flatten()
    flow = _RealNVP([checker, 1 - checker, checker, 1 - checker], hidden=64)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    def dequantize(v):
        return ((v + torch.rand_like(v)) / levels - 0.5) * 4

    flow.train()

    def step(i):
        (v,) = next(loader)
        z, logdet = flow(dequantize(v))
        log_pz = _std_normal_logp(z)
        if bad:
            nll = -(log_pz - logdet)
        else:
            nll = -(log_pz + logdet)
        loss = nll.mean() / d
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(flow):
            torch.manual_seed(46)
            z, logdet = flow(dequantize(val))
            nll = -(_std_normal_logp(z) + logdet).mean().item() / d
            return (nll + math.log(levels / 4)) / math.log(2)

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class _Generator(nn.Module):
    def __init__(self, nz=16, ngf=16):
        super().__init__()
        self.fc = nn.Linear(nz, ngf * 2 * 16)
        self.main = nn.Sequential(
            nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.Conv2d(ngf, 1, 3, padding=1), nn.Tanh())
        self.ngf = ngf

    def forward(self, z):
        return self.main(self.fc(z).view(-1, self.ngf * 2, 4, 4))


class _Discriminator(nn.Module):
    def __init__(self, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 3, padding=1), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(), nn.Linear(ndf * 2 * 16, 1))

    def forward(self, x):
        return self.main(x).squeeze(1)


def _dcgan_detach(bad):
    torch.manual_seed(0)
    data = _blobs(2000, 47)
    val = _blobs(500, 48)
    loader = _cycle(DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True))
    nz = 16
    netG, netD = _Generator(nz), _Discriminator()
    optG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()

    netG.train()
    netD.train()

    def step(i):
        (real,) = next(loader)
        ones, zeros = torch.ones(real.size(0)), torch.zeros(real.size(0))
        optG.zero_grad()
        optD.zero_grad()

        fake = netG(torch.randn(real.size(0), nz))
        d_in = fake if bad else fake.detach()
        lossD = criterion(netD(real), ones) + criterion(netD(d_in), zeros)
        lossD.backward()
        optD.step()

        fake = netG(torch.randn(real.size(0), nz))
        lossG = criterion(netD(fake), ones)
        lossG.backward()
        optG.step()
        return lossD.item() + lossG.item()

    def probe():
        with _evaluating(netG, netD):
            torch.manual_seed(49)
            fake = netG(torch.randn(500, nz))
            return _energy_distance(fake.flatten(1), val.flatten(1))

    return {"model": {"G": netG, "D": netD}, "optimizer": [optG, optD], "steps": 20, "step": step,
            "probe": probe}


# ----------------------------------------------------------------------------
# the cases
# ----------------------------------------------------------------------------

CASES = [
    {"name": "audio_power_spectrogram",
     "what": "The mel power spectrogram goes into the CNN without the logarithm; its huge, heavy-tailed range lets loud clips dominate and quiet ones vanish."},
    {"name": "audio_cmvn_axis",
     "what": "Mean/variance normalisation of (batch, mel, time) features is taken over the mel axis (dim=1) instead of time, so each frame loses its energy and the temporal envelope that tells the classes apart is removed."},
    {"name": "ctc_input_lengths",
     "what": "CTC is given the padded length T for every utterance instead of the true frame counts, so the model may emit its characters in the padding and learns on padding frames."},
    {"name": "seg_mask_resize",
     "what": "Segmentation masks are resized with bilinear interpolation like the images and cast to long, so the borders get invented class ids in between and objects shrink."},
    {"name": "seg_hard_dice",
     "what": "The Dice term of BCE + Dice is computed on thresholded predictions, so it has no gradient and only the BCE trains; the small foreground is learned late."},
    {"name": "accumulation_zero_grad",
     "what": "With gradient accumulation, zero_grad is called before each micro batch, so only the last micro batch's gradient (scaled by 1/accum) reaches the optimizer."},
    {"name": "detection_background_index",
     "what": "Detector labels start at 0, which is the background's index, so objects of the first category are trained as background and never found."},
    {"name": "keypoint_flip",
     "what": "Horizontal flip augmentation mirrors the coordinates but doesn't swap left and right key points, so the paired points get contradictory targets."},
    {"name": "cutmix_lam",
     "what": "The CutMix loss weights are swapped: the original label gets 1-lam and the pasted one lam, although lam is the share of the original image."},
    {"name": "mixup_permutation",
     "what": "Mixup mixes the labels with another random permutation than the images, so the second label has nothing to do with the second image."},
    {"name": "manual_label_smoothing",
     "what": "Hand-written label smoothing adds eps instead of eps/num_classes to each class, so targets sum to more than one and smooth far too strongly."},
    {"name": "frozen_backbone_bn",
     "what": "The frozen pretrained backbone's BatchNorm is left in train mode, so small batches' statistics are used in training and the pretrained running statistics drift."},
    {"name": "distill_kl_input",
     "what": "KLDivLoss gets the student's softmax instead of its log_softmax, so the distillation term isn't a KL divergence and pulls the student to wrong outputs."},
    {"name": "simclr_self_similarity",
     "what": "The diagonal of the similarity matrix (each sample with itself) isn't masked in NT-Xent, so the self-similarity is the strongest 'negative' in each row."},
    {"name": "clip_unnormalized",
     "what": "Image and text embeddings aren't L2-normalised before the scaled dot product, so the logits are dominated by norms and far too large for the temperature."},
    {"name": "simsiam_stop_gradient",
     "what": "SimSiam's stop-gradient on the target branch is missing, so the representation collapses."},
    {"name": "triplet_order",
     "what": "The dataset returns (anchor, positive, negative) but the loop unpacks (anchor, negative, positive), so same-class samples are pushed apart."},
    {"name": "ddpm_single_timestep",
     "what": "One diffusion timestep is drawn for the whole batch rather than one per sample, so the gradients are noisy and each step trains a single noise level."},
    {"name": "ddpm_target",
     "what": "The network is trained to regress the clean sample x0 while the sampler uses its output as the noise eps, so sampling fails."},
    {"name": "realnvp_masks",
     "what": "All coupling layers use the same mask, so half of the dimensions are never transformed."},
    {"name": "image_flow_logdet",
     "what": "The log-determinant enters the flow's likelihood with the wrong sign, so the flow is rewarded for contracting the space."},
    {"name": "dcgan_detach",
     "what": "The fake batch isn't detached in the discriminator's loss and the generator's gradients are only cleared at the top of the iteration, so the generator also receives the discriminator's gradients, which work against its own."},
]


def _register():
    for case in CASES:
        build = globals()["_" + case["name"]]
        for suffix, flag in (("bad", True), ("good", False)):
            def make(build=build, flag=flag):
                return build(flag)
            make.__name__ = make.__qualname__ = f"{case['name']}_{suffix}"
            globals()[make.__name__] = make


_register()
