"""Small training programs from many areas, each with a training step and a held-out score."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset


def _stream(loader):
    while True:
        yield from loader


def _measure(model, score):
    def probe():
        modes = [(m, m.training) for m in model.modules()]
        rng = torch.get_rng_state()
        torch.manual_seed(2024)
        model.eval()
        try:
            with torch.no_grad():
                return float(score())
        finally:
            for m, flag in modes:
                m.training = flag
            torch.set_rng_state(rng)

    return probe


def _energy(a, b):
    return 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()


# --------------------------------------------------------------------------
# shape_cnn: four kinds of strokes in 16x16 images
# --------------------------------------------------------------------------


def _stroke_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=g)
    images = 0.4 * torch.randn(n, 1, 16, 16, generator=g)
    centres = torch.randint(4, 12, (n, 2), generator=g).tolist()
    for k, (r, c) in enumerate(centres):
        kind, canvas = int(labels[k]), images[k, 0]
        if kind in (0, 2):
            canvas[r, c - 3 : c + 4] += 1.0
        if kind in (1, 2):
            canvas[r - 3 : r + 4, c] += 1.0
        if kind == 3:
            canvas[r - 3 : r + 4, c - 3] += 1.0
            canvas[r - 3 : r + 4, c + 3] += 1.0
    return images, labels


def _stroke_net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def shape_cnn_bad():
    torch.manual_seed(11)
    loader = DataLoader(TensorDataset(*_stroke_images(640, 1)), batch_size=32, shuffle=True)
    test_x, test_y = _stroke_images(400, 2)
    model = _stroke_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)

    def fit():
        while True:
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                yield loss.item()

    run = fit()
    probe = _measure(model, lambda: F.cross_entropy(model(test_x), test_y))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": lambda: next(run), "probe": probe}


def shape_cnn_good():
    torch.manual_seed(11)
    loader = DataLoader(TensorDataset(*_stroke_images(640, 1)), batch_size=32, shuffle=True)
    test_x, test_y = _stroke_images(400, 2)
    model = _stroke_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.85)

    def fit():
        while True:
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.item()
            scheduler.step()

    run = fit()
    probe = _measure(model, lambda: F.cross_entropy(model(test_x), test_y))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": lambda: next(run), "probe": probe}


# --------------------------------------------------------------------------
# cell_segmentation: bright discs on a noisy background
# --------------------------------------------------------------------------


def _cells(n, seed, size=24):
    g = torch.Generator().manual_seed(seed)
    rows = torch.arange(size).view(1, size, 1)
    cols = torch.arange(size).view(1, 1, size)
    mask = torch.zeros(n, size, size)
    for _ in range(3):
        r = torch.randint(2, size - 2, (n, 1, 1), generator=g)
        c = torch.randint(2, size - 2, (n, 1, 1), generator=g)
        rad = 2.0 + 2.5 * torch.rand(n, 1, 1, generator=g)
        mask = torch.maximum(mask, (((rows - r) ** 2 + (cols - c) ** 2) <= rad**2).float())
    image = mask * (0.6 + 0.6 * torch.rand(n, 1, 1, generator=g)) + 0.35 * torch.randn(n, size, size, generator=g)
    return image.unsqueeze(1), mask.unsqueeze(1)


def _seg_net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 1, 1),
    )


def _dice_gap(logits, mask):
    pred = (logits > 0).float()
    inter = (pred * mask).sum((1, 2, 3))
    return 1 - ((2 * inter + 1) / (pred.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


def cell_segmentation_bad():
    class CellPatches(Dataset):
        def __init__(self, images, masks):
            self.images, self.masks = images, masks

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            image, mask = self.images[i], self.masks[i]
            turns = int(torch.randint(0, 4, (1,)))
            image = torch.rot90(image, turns, (-2, -1))
            return image, mask

    torch.manual_seed(12)
    batches = _stream(DataLoader(CellPatches(*_cells(320, 3)), batch_size=16, shuffle=True))
    test_x, test_m = _cells(100, 4)
    net = _seg_net()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step():
        x, m = next(batches)
        opt.zero_grad()
        loss = criterion(net(x), m)
        loss.backward()
        opt.step()
        return loss.detach()

    return {
        "model": net,
        "optimizer": opt,
        "steps": 20,
        "step": step,
        "probe": _measure(net, lambda: _dice_gap(net(test_x), test_m)),
    }


def cell_segmentation_good():
    class CellPatches(Dataset):
        def __init__(self, images, masks):
            self.images, self.masks = images, masks

        def __len__(self):
            return len(self.images)

        def __getitem__(self, i):
            image, mask = self.images[i], self.masks[i]
            turns = int(torch.randint(0, 4, (1,)))
            image, mask = torch.rot90(image, turns, (-2, -1)), torch.rot90(mask, turns, (-2, -1))
            return image, mask

    torch.manual_seed(12)
    batches = _stream(DataLoader(CellPatches(*_cells(320, 3)), batch_size=16, shuffle=True))
    test_x, test_m = _cells(100, 4)
    net = _seg_net()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step():
        x, m = next(batches)
        opt.zero_grad()
        loss = criterion(net(x), m)
        loss.backward()
        opt.step()
        return loss.detach()

    return {
        "model": net,
        "optimizer": opt,
        "steps": 20,
        "step": step,
        "probe": _measure(net, lambda: _dice_gap(net(test_x), test_m)),
    }


# --------------------------------------------------------------------------
# box_detector: one rectangle per image, its box and its kind
# --------------------------------------------------------------------------


def _rectangles(n, seed, size=32):
    g = torch.Generator().manual_seed(seed)
    images = 0.2 * torch.randn(n, 1, size, size, generator=g)
    kinds = torch.randint(0, 3, (n,), generator=g)
    boxes = torch.zeros(n, 4)
    for k in range(n):
        h, w = torch.randint(7, 18, (2,), generator=g).tolist()
        top = int(torch.randint(0, size - h, (1,), generator=g))
        left = int(torch.randint(0, size - w, (1,), generator=g))
        area = images[k, 0, top : top + h, left : left + w]
        kind = int(kinds[k])
        if kind == 0:
            area += 1.0
        elif kind == 1:
            area[0] += 1.0
            area[-1] += 1.0
            area[:, 0] += 1.0
            area[:, -1] += 1.0
        else:
            area[::2] += 1.0
        boxes[k] = torch.tensor([left, top, left + w, top + h], dtype=torch.float) / size
    return images, boxes, kinds


class _DetHead(nn.Module):
    def __init__(self, channels, n_classes):
        super().__init__()
        self.hidden = nn.Linear(channels, 64)
        self.box = nn.Linear(64, 4)
        self.kind = nn.Linear(64, n_classes)

    def forward(self, feats):
        h = F.relu(self.hidden(feats.flatten(1)))
        return torch.sigmoid(self.box(h)), self.kind(h)


class _Detector(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.head = _DetHead(32 * 16, n_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def _iou_gap(pred, true):
    lt = torch.maximum(pred[:, :2], true[:, :2])
    rb = torch.minimum(pred[:, 2:], true[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area = lambda b: (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
    return 1 - (inter / (area(pred) + area(true) - inter).clamp(min=1e-6)).mean()


def box_detector_bad():
    torch.manual_seed(13)
    loader = DataLoader(TensorDataset(*_rectangles(512, 5)), batch_size=32, shuffle=True)
    batches = _stream(loader)
    test_x, test_box, _ = _rectangles(200, 6)

    model = _Detector(n_classes=20)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": 3e-4},
            {"params": model.head.parameters()},
        ],
        lr=3e-3,
        weight_decay=1e-4,
    )
    model.head = _DetHead(32 * 16, n_classes=3)

    def step():
        images, boxes, kinds = next(batches)
        pred_box, pred_kind = model(images)
        loss = 10 * F.smooth_l1_loss(pred_box, boxes, beta=0.1) + F.cross_entropy(pred_kind, kinds)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _iou_gap(model(test_x)[0], test_box))
    return dict(model=model, optimizer=optimizer, steps=20, step=step, probe=probe)


def box_detector_good():
    torch.manual_seed(13)
    loader = DataLoader(TensorDataset(*_rectangles(512, 5)), batch_size=32, shuffle=True)
    batches = _stream(loader)
    test_x, test_box, _ = _rectangles(200, 6)

    model = _Detector(n_classes=20)
    model.head = _DetHead(32 * 16, n_classes=3)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": 3e-4},
            {"params": model.head.parameters()},
        ],
        lr=3e-3,
        weight_decay=1e-4,
    )

    def step():
        images, boxes, kinds = next(batches)
        pred_box, pred_kind = model(images)
        loss = 10 * F.smooth_l1_loss(pred_box, boxes, beta=0.1) + F.cross_entropy(pred_kind, kinds)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _iou_gap(model(test_x)[0], test_box))
    return dict(model=model, optimizer=optimizer, steps=20, step=step, probe=probe)


# --------------------------------------------------------------------------
# spoken_ctc: short utterances of six symbols, recognised with CTC
# --------------------------------------------------------------------------

_SYMBOLS = 6
_FRAMES = 48


def _utterances(n, seed):
    bank = torch.randn(_SYMBOLS, 10, generator=torch.Generator().manual_seed(77))
    g = torch.Generator().manual_seed(seed)
    feats = 0.5 * torch.randn(n, _FRAMES, 10, generator=g)
    text = torch.randint(0, _SYMBOLS, (n, 4), generator=g)
    gaps = torch.randint(1, 4, (n, 4), generator=g).tolist()
    spans = torch.randint(4, 8, (n, 4), generator=g).tolist()
    for k in range(n):
        t = 0
        for j in range(4):
            t += gaps[k][j]
            feats[k, t : t + spans[k][j]] += bank[text[k, j]]
            t += spans[k][j]
    return feats, text


class _Recogniser(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.front = nn.Conv1d(10, 32, 5, padding=2)
        self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, n_out)

    def forward(self, feats):
        h = F.relu(self.front(feats.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.out(h).log_softmax(-1)


def _edits(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
    return row[-1]


def _token_error(log_probs, text):
    wrong = total = 0
    for path, ref in zip(log_probs.argmax(-1).tolist(), text.tolist()):
        hyp, last = [], None
        for s in path:
            if s != last and s != _SYMBOLS:
                hyp.append(s)
            last = s
        wrong += _edits(hyp, ref)
        total += len(ref)
    return (wrong + 1) / (total + 1)


def spoken_ctc_bad():
    torch.manual_seed(14)
    batches = _stream(DataLoader(TensorDataset(*_utterances(512, 7)), batch_size=32, shuffle=True))
    test_x, test_t = _utterances(64, 8)
    model = _Recogniser(_SYMBOLS + 1)
    criterion = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        feats, text = next(batches)
        log_probs = model(feats).transpose(0, 1)
        in_len = torch.full((len(feats),), _FRAMES)
        out_len = torch.full((len(feats),), text.shape[1])
        loss = criterion(log_probs, text, in_len, out_len)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _token_error(model(test_x), test_t))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def spoken_ctc_good():
    torch.manual_seed(14)
    batches = _stream(DataLoader(TensorDataset(*_utterances(512, 7)), batch_size=32, shuffle=True))
    test_x, test_t = _utterances(64, 8)
    model = _Recogniser(_SYMBOLS + 1)
    criterion = nn.CTCLoss(blank=_SYMBOLS, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        feats, text = next(batches)
        log_probs = model(feats).transpose(0, 1)
        in_len = torch.full((len(feats),), _FRAMES)
        out_len = torch.full((len(feats),), text.shape[1])
        loss = criterion(log_probs, text, in_len, out_len)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _token_error(model(test_x), test_t))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# gait_sequences: recordings of different durations, four walking styles
# --------------------------------------------------------------------------


def _walks(n, seed):
    g = torch.Generator().manual_seed(seed)
    tempo = (0.3, 0.55, 0.9, 1.4)
    items = []
    for _ in range(n):
        label = int(torch.randint(0, 4, (1,), generator=g))
        if float(torch.rand((), generator=g)) < 0.12:
            length = int(torch.randint(70, 90, (1,), generator=g))
        else:
            length = int(torch.randint(10, 26, (1,), generator=g))
        phase = 6.28 * torch.rand((), generator=g)
        angle = tempo[label] * torch.arange(length) + phase
        clean = torch.stack([angle.sin(), angle.cos(), torch.zeros(length)], dim=1)
        items.append((clean + 0.4 * torch.randn(length, 3, generator=g), label))
    return items


def gait_sequences_bad():
    class GaitNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 32, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            out, _ = self.rnn(x)
            return self.head(out[:, -1])

    def collate(items):
        seqs, labels = zip(*items)
        return pad_sequence(seqs, batch_first=True), torch.tensor(labels)

    torch.manual_seed(15)
    batches = _stream(DataLoader(_walks(480, 9), batch_size=32, shuffle=True, collate_fn=collate))
    test = collate(_walks(200, 10))
    model = GaitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        x, y = test
        return F.cross_entropy(model(x), y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


def gait_sequences_good():
    class GaitNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 32, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, last = self.rnn(packed)
            return self.head(last[-1])

    def collate(items):
        seqs, labels = zip(*items)
        lengths = torch.tensor([len(s) for s in seqs])
        return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)

    torch.manual_seed(15)
    batches = _stream(DataLoader(_walks(480, 9), batch_size=32, shuffle=True, collate_fn=collate))
    test = collate(_walks(200, 10))
    model = GaitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step():
        x, lengths, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x, lengths), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        x, lengths, y = test
        return F.cross_entropy(model(x, lengths), y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


# --------------------------------------------------------------------------
# load_forecast: 48 hours of electricity load in, 12 hours out
# --------------------------------------------------------------------------


def _load_windows(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.randint(0, 5000, (n, 1), generator=g) + torch.arange(60).view(1, -1)
    level = 0.5 * torch.randn(n, 1, generator=g)
    gain = 0.7 + 0.6 * torch.rand(n, 1, generator=g)
    series = level + gain * (2 * math.pi * t / 24).sin() + 0.5 * (2 * math.pi * t / 12 + 1).cos()
    series = series + 0.1 * torch.randn(n, 60, generator=g)
    return series[:, :48], series[:, 48:]


class _LoadNet(nn.Module):
    def __init__(self, past=48, ahead=12, width=64):
        super().__init__()
        self.inp = nn.Linear(past, width)
        self.mid = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, ahead)

    def forward(self, x):
        h = F.gelu(self.inp(x))
        h = self.norm(h + F.gelu(self.mid(h)))
        return self.out(h)


def load_forecast_bad():
    torch.manual_seed(16)
    past, ahead = _load_windows(1500, 11)
    test_past, test_ahead = _load_windows(300, 12)
    loader = iter(_stream(DataLoader(TensorDataset(past, ahead), batch_size=64, shuffle=True, drop_last=True)))
    net = _LoadNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)

    def step():
        x, y = next(loader)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    probe = _measure(net, lambda: F.mse_loss(net(test_past), test_ahead))
    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def load_forecast_good():
    torch.manual_seed(16)
    past, ahead = _load_windows(1500, 11)
    test_past, test_ahead = _load_windows(300, 12)
    loader = iter(_stream(DataLoader(TensorDataset(past, ahead), batch_size=64, shuffle=True, drop_last=True)))
    net = _LoadNet()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)

    def step():
        x, y = next(loader)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    probe = _measure(net, lambda: F.mse_loss(net(test_past), test_ahead))
    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# sensor_tabular: machine wear from eight sensor readings
# --------------------------------------------------------------------------


def _sensors(n, seed):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 8, generator=g)
    y = z[:, 0] + 0.8 * z[:, 1] * z[:, 2] - 0.6 * torch.sin(2 * z[:, 3]) + 0.1 * torch.randn(n, generator=g)
    centre = torch.tensor([4.0, 20.0, 7.0, 1.0, -3.0, 12.0, 5.0, 30.0])
    spread = torch.tensor([2.0, 5.0, 1.6, 3.0, 2.5, 4.0, 1.8, 6.0])
    return centre + spread * z, y


def sensor_tabular_bad():
    class SensorTable(Dataset):
        def __init__(self, readings, wear, mean, std):
            self.readings, self.wear = readings, wear
            self.mean, self.std = mean, std

        def __len__(self):
            return len(self.wear)

        def __getitem__(self, i):
            row = self.readings[i]
            row -= self.mean
            row /= self.std
            return row, self.wear[i]

    torch.manual_seed(17)
    x, y = _sensors(256, 13)
    mean, std = x.mean(0), x.std(0)
    loader = DataLoader(SensorTable(x, y, mean, std), batch_size=64, shuffle=True)
    batches = _stream(loader)
    test_x, test_y = _sensors(400, 14)
    test_x = (test_x - mean) / std
    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb).squeeze(-1), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: F.mse_loss(model(test_x).squeeze(-1), test_y))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sensor_tabular_good():
    class SensorTable(Dataset):
        def __init__(self, readings, wear, mean, std):
            self.readings, self.wear = readings, wear
            self.mean, self.std = mean, std

        def __len__(self):
            return len(self.wear)

        def __getitem__(self, i):
            row = self.readings[i]
            row = row - self.mean
            row = row / self.std
            return row, self.wear[i]

    torch.manual_seed(17)
    x, y = _sensors(256, 13)
    mean, std = x.mean(0), x.std(0)
    loader = DataLoader(SensorTable(x, y, mean, std), batch_size=64, shuffle=True)
    batches = _stream(loader)
    test_x, test_y = _sensors(400, 14)
    test_x = (test_x - mean) / std
    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        xb, yb = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb).squeeze(-1), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: F.mse_loss(model(test_x).squeeze(-1), test_y))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# fraud_tabular: card transactions, few of them fraudulent
# --------------------------------------------------------------------------


def _transactions(n, seed):
    fixed = torch.Generator().manual_seed(99)
    risk = torch.randn(20, generator=fixed)
    g = torch.Generator().manual_seed(seed)
    shop = torch.randint(0, 20, (n,), generator=g)
    num = torch.randn(n, 8, generator=g)
    score = risk[shop] + 1.5 * num[:, 0] - num[:, 1] + 0.7 * num[:, 2] * num[:, 3]
    score = score + 0.5 * torch.randn(n, generator=g)
    return shop, num, (score > 2.8).float()


class _FraudNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.shop = nn.Embedding(20, 6)
        self.body = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 1))

    def forward(self, shop, num):
        return self.body(torch.cat([self.shop(shop), num], dim=1)).squeeze(1)


def _balanced_error(logits, y):
    flag = logits > 0
    tpr = flag[y == 1].float().mean()
    fpr = flag[y == 0].float().mean()
    return (1 - tpr + fpr) / 2


def fraud_tabular_bad():
    torch.manual_seed(18)
    shop, num, y = _transactions(3000, 15)
    test = _transactions(3000, 16)
    batches = _stream(DataLoader(TensorDataset(shop, num, y), batch_size=128, shuffle=True))
    model = _FraudNet()
    n_fraud = y.sum()
    n_clean = len(y) - n_fraud
    criterion = nn.BCEWithLogitsLoss(pos_weight=n_fraud / n_clean)
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)

    def step():
        s, x, t = next(batches)
        loss = criterion(model(s, x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    probe = _measure(model, lambda: _balanced_error(model(test[0], test[1]), test[2]))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fraud_tabular_good():
    torch.manual_seed(18)
    shop, num, y = _transactions(3000, 15)
    test = _transactions(3000, 16)
    batches = _stream(DataLoader(TensorDataset(shop, num, y), batch_size=128, shuffle=True))
    model = _FraudNet()
    n_fraud = y.sum()
    n_clean = len(y) - n_fraud
    criterion = nn.BCEWithLogitsLoss(pos_weight=n_clean / n_fraud)
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)

    def step():
        s, x, t = next(batches)
        loss = criterion(model(s, x), t)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    probe = _measure(model, lambda: _balanced_error(model(test[0], test[1]), test[2]))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# two_tower: retrieval with in-batch negatives
# --------------------------------------------------------------------------

_USERS, _ITEMS, _TASTES = 300, 240, 40


def _clicks(n, seed):
    g = torch.Generator().manual_seed(seed)
    user = torch.randint(0, _USERS, (n,), generator=g)
    per = _ITEMS // _TASTES
    item = (user % _TASTES) * per + torch.randint(0, per, (n,), generator=g)
    stray = torch.rand(n, generator=g) < 0.1
    item = torch.where(stray, torch.randint(0, _ITEMS, (n,), generator=g), item)
    return user, item


class _TwoTower(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.users = nn.Embedding(_USERS, 32)
        self.items = nn.Embedding(_ITEMS, 32)
        self.user_mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, dim))
        self.item_mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, dim))

    def user(self, u):
        return F.normalize(self.user_mlp(self.users(u)), dim=-1)

    def item(self, i):
        return F.normalize(self.item_mlp(self.items(i)), dim=-1)


def _mrr_gap(model, user, item):
    scores = model.user(user) @ model.item(torch.arange(_ITEMS)).T
    own = scores.gather(1, item.view(-1, 1))
    rank = (scores > own).sum(1) + 1
    return 1 - (1 / rank.float()).mean()


def two_tower_bad():
    torch.manual_seed(19)
    loader = DataLoader(TensorDataset(*_clicks(9000, 17)), batch_size=128, shuffle=False)
    test_u, test_i = _clicks(800, 18)
    model = _TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step():
        u, i = next(iter(loader))
        logits = model.user(u) @ model.item(i).T / 0.1
        loss = F.cross_entropy(logits, torch.arange(len(u)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _mrr_gap(model, test_u, test_i))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_tower_good():
    torch.manual_seed(19)
    loader = DataLoader(TensorDataset(*_clicks(9000, 17)), batch_size=128, shuffle=True)
    test_u, test_i = _clicks(800, 18)
    model = _TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step():
        u, i = next(iter(loader))
        logits = model.user(u) @ model.item(i).T / 0.1
        loss = F.cross_entropy(logits, torch.arange(len(u)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _mrr_gap(model, test_u, test_i))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# citation_gcn: node classification on one graph
# --------------------------------------------------------------------------


def _citations(seed, n=240, k=4):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % k
    same = y.view(-1, 1) == y.view(1, -1)
    prob = torch.where(same, torch.tensor(0.06), torch.tensor(0.012))
    upper = torch.triu(torch.rand(n, n, generator=g) < prob, diagonal=1).float()
    adj = upper + upper.T + torch.eye(n)
    scale = adj.sum(1).rsqrt()
    adj = scale.view(-1, 1) * adj * scale.view(1, -1)
    words = torch.randn(k, 24, generator=g)
    x = 0.5 * words[y] + torch.randn(n, 24, generator=g)
    order = torch.randperm(n, generator=g)
    return x, adj, y, order[:80], order[80:]


def citation_gcn_bad():
    class Gcn(nn.Module):
        def __init__(self, inp, hidden, classes):
            super().__init__()
            self.first = nn.Linear(inp, hidden)
            self.second = nn.Linear(hidden, classes)

        def forward(self, x, adj):
            x = F.dropout(x, 0.5)
            x = F.relu(adj @ self.first(x))
            x = F.dropout(x, 0.5)
            return adj @ self.second(x)

    torch.manual_seed(20)
    x, adj, y, train, test = _citations(19)
    model = Gcn(24, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step():
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, adj)[train], y[train])
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: F.cross_entropy(model(x, adj)[test], y[test]))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def citation_gcn_good():
    class Gcn(nn.Module):
        def __init__(self, inp, hidden, classes):
            super().__init__()
            self.first = nn.Linear(inp, hidden)
            self.second = nn.Linear(hidden, classes)

        def forward(self, x, adj):
            x = F.dropout(x, 0.5, self.training)
            x = F.relu(adj @ self.first(x))
            x = F.dropout(x, 0.5, self.training)
            return adj @ self.second(x)

    torch.manual_seed(20)
    x, adj, y, train, test = _citations(19)
    model = Gcn(24, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step():
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, adj)[train], y[train])
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: F.cross_entropy(model(x, adj)[test], y[test]))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# molecule_graphs: a property summed over the bonds of small graphs
# --------------------------------------------------------------------------


def _molecules(n, seed):
    bond = torch.randn(4, 4, generator=torch.Generator().manual_seed(55))
    bond = bond + bond.T
    g = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(n):
        size = int(torch.randint(6, 14, (1,), generator=g))
        kind = torch.randint(0, 4, (size,), generator=g)
        density = 0.15 + 0.35 * float(torch.rand((), generator=g))
        pairs = torch.triu(torch.rand(size, size, generator=g) < density, diagonal=1).nonzero().T
        value = bond[kind[pairs[0]], kind[pairs[1]]].sum() / 4
        edges = torch.cat([pairs, pairs.flip(0)], dim=1)
        items.append((F.one_hot(kind, 4).float(), edges, value.reshape(1)))
    return items


class _MolNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.own = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.nbr = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x, edges, graph, n_graphs):
        h = self.embed(x)
        for own, nbr in zip(self.own, self.nbr):
            msg = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            h = F.relu(own(h) + nbr(msg) / 3)
        pooled = torch.zeros(n_graphs, h.shape[1]).index_add(0, graph, h)
        return self.out(pooled / 4).squeeze(1)


def molecule_graphs_bad():
    def collate(items):
        xs, edges, graph, values = [], [], [], []
        for k, (x, e, v) in enumerate(items):
            xs.append(x)
            edges.append(e)
            graph.append(torch.full((len(x),), k))
            values.append(v)
        return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(graph), torch.cat(values)

    torch.manual_seed(21)
    batches = _stream(DataLoader(_molecules(600, 20), batch_size=32, shuffle=True, collate_fn=collate))
    test = _molecules(120, 21)
    model = _MolNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        x, edges, graph, value = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(x, edges, graph, len(value)), value)
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        gaps = [(model(x, e, torch.zeros(len(x), dtype=torch.long), 1) - v).abs() for x, e, v in test]
        return torch.cat(gaps).mean()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


def molecule_graphs_good():
    def collate(items):
        xs, edges, graph, values, start = [], [], [], [], 0
        for k, (x, e, v) in enumerate(items):
            xs.append(x)
            edges.append(e + start)
            graph.append(torch.full((len(x),), k))
            values.append(v)
            start += len(x)
        return torch.cat(xs), torch.cat(edges, dim=1), torch.cat(graph), torch.cat(values)

    torch.manual_seed(21)
    batches = _stream(DataLoader(_molecules(600, 20), batch_size=32, shuffle=True, collate_fn=collate))
    test = _molecules(120, 21)
    model = _MolNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        x, edges, graph, value = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(x, edges, graph, len(value)), value)
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        gaps = [(model(x, e, torch.zeros(len(x), dtype=torch.long), 1) - v).abs() for x, e, v in test]
        return torch.cat(gaps).mean()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


# --------------------------------------------------------------------------
# glyph_vae: binary 8x8 glyphs
# --------------------------------------------------------------------------


def _glyphs(n, seed):
    shapes = (torch.rand(8, 64, generator=torch.Generator().manual_seed(31)) < 0.4).float()
    g = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 8, (n,), generator=g)
    flip = (torch.rand(n, 64, generator=g) < 0.05).float()
    return (shapes[pick] - flip).abs()


class _GlyphNet(nn.Module):
    def __init__(self, latent=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 64))

    def posterior(self, x):
        mu, log_std = self.enc(x).chunk(2, dim=1)
        return Normal(mu, log_std.clamp(-5, 3).exp())


def glyph_vae_bad():
    torch.manual_seed(22)
    batches = _stream(DataLoader(_glyphs(1200, 22), batch_size=64, shuffle=True))
    test = _glyphs(300, 23)
    vae = _GlyphNet()
    opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
    prior = Normal(0.0, 1.0)

    def step():
        x = next(batches)
        q = vae.posterior(x)
        logits = vae.dec(q.sample())
        rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        loss = rec + kl_divergence(q, prior).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def score():
        logits = vae.dec(vae.posterior(test).mean)
        return F.binary_cross_entropy_with_logits(logits, test)

    return {"model": vae, "optimizer": opt, "steps": 20, "step": step, "probe": _measure(vae, score)}


def glyph_vae_good():
    torch.manual_seed(22)
    batches = _stream(DataLoader(_glyphs(1200, 22), batch_size=64, shuffle=True))
    test = _glyphs(300, 23)
    vae = _GlyphNet()
    opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
    prior = Normal(0.0, 1.0)

    def step():
        x = next(batches)
        q = vae.posterior(x)
        logits = vae.dec(q.rsample())
        rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        loss = rec + kl_divergence(q, prior).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def score():
        logits = vae.dec(vae.posterior(test).mean)
        return F.binary_cross_entropy_with_logits(logits, test)

    return {"model": vae, "optimizer": opt, "steps": 20, "step": step, "probe": _measure(vae, score)}


# --------------------------------------------------------------------------
# ring_gan: points on a ring
# --------------------------------------------------------------------------


def _ring(n, seed):
    g = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(n, generator=g)
    radius = 2 + 0.1 * torch.randn(n, generator=g)
    return torch.stack([radius * angle.cos() + 1.0, radius * angle.sin()], dim=1)


def _ring_critic():
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def ring_gan_bad():
    torch.manual_seed(23)
    batches = _stream(DataLoader(_ring(2048, 24), batch_size=128, shuffle=True))
    test = _ring(500, 25)
    gen = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2), nn.Tanh())
    disc = _ring_critic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=3e-3, betas=(0.0, 0.9))

    def step():
        real = next(batches)
        fake = gen(torch.randn(len(real), 4))

        opt_g.zero_grad()
        g_loss = F.softplus(-disc(fake)).mean()
        g_loss.backward()
        opt_g.step()

        opt_d.zero_grad()
        d_loss = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
        d_loss.backward()
        opt_d.step()
        return d_loss.item()

    both = nn.ModuleDict({"gen": gen, "disc": disc})
    probe = _measure(both, lambda: _energy(gen(torch.randn(500, 4)), test))
    return {"model": both, "optimizer": opt_d, "steps": 20, "step": step, "probe": probe}


def ring_gan_good():
    torch.manual_seed(23)
    batches = _stream(DataLoader(_ring(2048, 24), batch_size=128, shuffle=True))
    test = _ring(500, 25)
    gen = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    disc = _ring_critic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=3e-3, betas=(0.0, 0.9))

    def step():
        real = next(batches)
        fake = gen(torch.randn(len(real), 4))

        opt_g.zero_grad()
        g_loss = F.softplus(-disc(fake)).mean()
        g_loss.backward()
        opt_g.step()

        opt_d.zero_grad()
        d_loss = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
        d_loss.backward()
        opt_d.step()
        return d_loss.item()

    both = nn.ModuleDict({"gen": gen, "disc": disc})
    probe = _measure(both, lambda: _energy(gen(torch.randn(500, 4)), test))
    return {"model": both, "optimizer": opt_d, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# spiral_diffusion: DDPM on a planar spiral
# --------------------------------------------------------------------------


def _spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    s = torch.rand(n, generator=g).sqrt()
    angle = 3 * math.pi * s
    pts = torch.stack([s * angle.cos(), s * angle.sin()], dim=1) * 2
    return pts + 0.05 * torch.randn(n, 2, generator=g)


class _Ddpm(nn.Module):
    def __init__(self, steps=40):
        super().__init__()
        self.steps = steps
        betas = torch.linspace(1e-3, 0.2, steps)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas", 1 - betas)
        self.register_buffer("alpha_bar", (1 - betas).cumprod(0))
        self.time = nn.Embedding(steps, 32)
        self.net = nn.Sequential(nn.Linear(34, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], dim=1))

    def sample(self, n):
        x = torch.randn(n, 2)
        for i in reversed(range(self.steps)):
            eps = self(x, torch.full((n,), i))
            x = (x - self.betas[i] / (1 - self.alpha_bar[i]).sqrt() * eps) / self.alphas[i].sqrt()
            if i:
                x = x + self.betas[i].sqrt() * torch.randn_like(x)
        return x


def spiral_diffusion_bad():
    torch.manual_seed(24)
    batches = _stream(DataLoader(_spiral(2048, 26), batch_size=128, shuffle=True))
    test = _spiral(500, 27)
    model = _Ddpm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)

    def step():
        x0 = next(batches)
        t = torch.randint(0, model.steps, (len(x0),))
        noise = torch.randn_like(x0)
        keep = model.alphas[t].view(-1, 1)
        xt = keep.sqrt() * x0 + (1 - keep).sqrt() * noise
        loss = F.mse_loss(model(xt, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _energy(model.sample(500), test))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def spiral_diffusion_good():
    torch.manual_seed(24)
    batches = _stream(DataLoader(_spiral(2048, 26), batch_size=128, shuffle=True))
    test = _spiral(500, 27)
    model = _Ddpm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)

    def step():
        x0 = next(batches)
        t = torch.randint(0, model.steps, (len(x0),))
        noise = torch.randn_like(x0)
        keep = model.alpha_bar[t].view(-1, 1)
        xt = keep.sqrt() * x0 + (1 - keep).sqrt() * noise
        loss = F.mse_loss(model(xt, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _energy(model.sample(500), test))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# moons_flow: affine coupling flow on two moons
# --------------------------------------------------------------------------


def _moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    side = (torch.arange(n) % 2).float()
    angle = math.pi * torch.rand(n, generator=g)
    x = torch.where(side == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(side == 0, angle.sin(), 0.5 - angle.sin())
    return 2 * torch.stack([x, y], dim=1) + 0.1 * torch.randn(n, 2, generator=g)


class _Coupling(nn.Module):
    def __init__(self, mask, width=48):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))

    def forward(self, x):
        held = x * self.mask
        log_s, shift = self.net(held).chunk(2, dim=1)
        log_s = torch.tanh(log_s) * (1 - self.mask)
        shift = shift * (1 - self.mask)
        return x * log_s.exp() + shift, log_s.sum(1)


def moons_flow_bad():
    class Flow(nn.Module):
        def __init__(self, depth=6):
            super().__init__()
            axes = torch.arange(2)
            self.layers = nn.ModuleList([_Coupling((axes % 2).float()) for _ in range(depth)])

        def log_prob(self, x):
            total = torch.zeros(len(x))
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            return Normal(0.0, 1.0).log_prob(x).sum(1) + total

    torch.manual_seed(25)
    batches = _stream(DataLoader(_moons(2048, 28), batch_size=128, shuffle=True))
    test = _moons(600, 29)
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)

    def step():
        x = next(batches)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(flow, lambda: -flow.log_prob(test).mean())
    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moons_flow_good():
    class Flow(nn.Module):
        def __init__(self, depth=6):
            super().__init__()
            axes = torch.arange(2)
            self.layers = nn.ModuleList([_Coupling(((axes + k) % 2).float()) for k in range(depth)])

        def log_prob(self, x):
            total = torch.zeros(len(x))
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            return Normal(0.0, 1.0).log_prob(x).sum(1) + total

    torch.manual_seed(25)
    batches = _stream(DataLoader(_moons(2048, 28), batch_size=128, shuffle=True))
    test = _moons(600, 29)
    flow = Flow()
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)

    def step():
        x = next(batches)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(flow, lambda: -flow.log_prob(test).mean())
    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# corridor_dqn: small prize near the start, large prize at the far end
# --------------------------------------------------------------------------


class _Corridors:
    """A batch of corridors that start over by themselves."""

    size, start, gamma = 7, 1, 0.9

    def __init__(self, n):
        self.pos = torch.randint(1, self.size - 1, (n,))

    def step(self, action):
        nxt = self.pos + 2 * action - 1
        near, far = nxt == 0, nxt == self.size - 1
        reward = 0.3 * near.float() + 1.0 * far.float()
        done = near | far
        self.pos = torch.where(done, torch.full_like(nxt, self.start), nxt)
        return self.pos, reward, done.float()


def _see(pos):
    return F.one_hot(pos, _Corridors.size).float()


def _return_gap(q):
    pos, value, discount = _Corridors.start, 0.0, 1.0
    for _ in range(40):
        pos += 2 * int(q(_see(torch.tensor([pos]))).argmax()) - 1
        if pos == 0:
            return 1 - discount * 0.3
        if pos == _Corridors.size - 1:
            return 1 - discount
        discount *= _Corridors.gamma
    return 1.0


def corridor_dqn_bad():
    torch.manual_seed(26)
    env = _Corridors(16)
    q = nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Linear(48, 2))
    q_target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
    memory, clock = [], [0]

    def act(pos):
        eps = max(0.4, 1 - clock[0] / 200)
        with torch.no_grad():
            greedy = q(_see(pos)).argmax(1)
        return torch.where(torch.rand(len(pos)) < eps, torch.randint(0, 2, (len(pos),)), greedy)

    def step():
        pos = env.pos
        action = act(pos)
        nxt, reward, _ = env.step(action)
        memory.append((pos, action, reward, nxt))
        s, a, r, s2 = (torch.cat(c) for c in zip(*memory[-300:]))
        pick = torch.randint(0, len(s), (64,))
        s, a, r, s2 = s[pick], a[pick], r[pick], s2[pick]
        with torch.no_grad():
            target = r + env.gamma * q_target(_see(s2)).max(1).values
        value = q(_see(s)).gather(1, a.view(-1, 1)).squeeze(1)
        loss = F.smooth_l1_loss(value, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock[0] += 1
        if clock[0] % 5 == 0:
            q_target.load_state_dict(q.state_dict())
        return loss.item()

    return {"model": q, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(q, lambda: _return_gap(q))}


def corridor_dqn_good():
    torch.manual_seed(26)
    env = _Corridors(16)
    q = nn.Sequential(nn.Linear(7, 48), nn.ReLU(), nn.Linear(48, 2))
    q_target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
    memory, clock = [], [0]

    def act(pos):
        eps = max(0.4, 1 - clock[0] / 200)
        with torch.no_grad():
            greedy = q(_see(pos)).argmax(1)
        return torch.where(torch.rand(len(pos)) < eps, torch.randint(0, 2, (len(pos),)), greedy)

    def step():
        pos = env.pos
        action = act(pos)
        nxt, reward, done = env.step(action)
        memory.append((pos, action, reward, nxt, done))
        s, a, r, s2, d = (torch.cat(c) for c in zip(*memory[-300:]))
        pick = torch.randint(0, len(s), (64,))
        s, a, r, s2, d = s[pick], a[pick], r[pick], s2[pick], d[pick]
        with torch.no_grad():
            target = r + env.gamma * (1 - d) * q_target(_see(s2)).max(1).values
        value = q(_see(s)).gather(1, a.view(-1, 1)).squeeze(1)
        loss = F.smooth_l1_loss(value, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock[0] += 1
        if clock[0] % 5 == 0:
            q_target.load_state_dict(q.state_dict())
        return loss.item()

    return {"model": q, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(q, lambda: _return_gap(q))}


# --------------------------------------------------------------------------
# colour_contrast: SimCLR on small colour images
# --------------------------------------------------------------------------


def _tinted(n, seed):
    motifs = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(41))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    tint = 1.5 * torch.randn(n, 3, 1, 1, generator=g)
    x = 0.5 * motifs[y] + tint + 0.5 * torch.randn(n, 3, 8, 8, generator=g)
    return x, y


def _jitter(x):
    tint = 1.5 * torch.randn(len(x), 3, 1, 1)
    return x + tint + 0.2 * torch.randn_like(x)


class _SimNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 128), nn.ReLU(), nn.Linear(128, 32))
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=1)


def _nt_xent(z, temperature=0.2):
    n = len(z) // 2
    sim = (z @ z.T / temperature).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    partner = torch.arange(2 * n).roll(n)
    return F.cross_entropy(sim, partner)


def _neighbour_error(encoder, x, y, k=5):
    z = F.normalize(encoder(x), dim=1)
    sim = (z @ z.T).fill_diagonal_(-2)
    votes = F.one_hot(y[sim.topk(k, dim=1).indices], int(y.max()) + 1).sum(1)
    wrong = (votes.argmax(1) != y).sum()
    return (wrong + 1) / (len(y) + 1)


def colour_contrast_bad():
    torch.manual_seed(27)
    batches = _stream(DataLoader(_tinted(1024, 30)[0], batch_size=128, shuffle=True, drop_last=True))
    test_x, test_y = _tinted(300, 31)
    model = _SimNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        x = next(batches)
        views = _jitter(x).repeat(2, 1, 1, 1)
        loss = _nt_xent(model(views))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _neighbour_error(model.encoder, test_x, test_y))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def colour_contrast_good():
    torch.manual_seed(27)
    batches = _stream(DataLoader(_tinted(1024, 30)[0], batch_size=128, shuffle=True, drop_last=True))
    test_x, test_y = _tinted(300, 31)
    model = _SimNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step():
        x = next(batches)
        views = _jitter(x.repeat(2, 1, 1, 1))
        loss = _nt_xent(model(views))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(model, lambda: _neighbour_error(model.encoder, test_x, test_y))
    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# patch_mae: masked autoencoder on patch sequences
# --------------------------------------------------------------------------


def _patches(n, seed):
    basis = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(43))
    g = torch.Generator().manual_seed(seed)
    code = torch.randn(n, 3, generator=g)
    return torch.tanh(torch.einsum("nk,kpd->npd", code, basis)) + 0.05 * torch.randn(n, 12, 6, generator=g)


class _PatchNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.token = nn.Parameter(0.02 * torch.randn(dim))
        self.place = nn.Parameter(0.1 * torch.randn(12, dim))
        block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 6)

    def forward(self, x, mask):
        h = torch.where(mask.unsqueeze(-1), self.token, self.embed(x))
        return self.out(self.body(h + self.place))


def patch_mae_bad():
    torch.manual_seed(28)
    batches = _stream(DataLoader(_patches(1500, 32), batch_size=64, shuffle=True))
    test = _patches(300, 33)
    test_mask = torch.rand(300, 12, generator=torch.Generator().manual_seed(5)) < 0.5
    model = _PatchNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        x = next(batches)
        mask = torch.rand(x.shape[:2]) < 0.5
        error = (model(x, mask) - x).pow(2).mean(-1)
        loss = error[~mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        return (model(test, test_mask) - test).pow(2).mean(-1)[test_mask].mean()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


def patch_mae_good():
    torch.manual_seed(28)
    batches = _stream(DataLoader(_patches(1500, 32), batch_size=64, shuffle=True))
    test = _patches(300, 33)
    test_mask = torch.rand(300, 12, generator=torch.Generator().manual_seed(5)) < 0.5
    model = _PatchNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def step():
        x = next(batches)
        mask = torch.rand(x.shape[:2]) < 0.5
        error = (model(x, mask) - x).pow(2).mean(-1)
        loss = error[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        return (model(test, test_mask) - test).pow(2).mean(-1)[test_mask].mean()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


# --------------------------------------------------------------------------
# fewshot_proto: prototypical network, five-way five-shot
# --------------------------------------------------------------------------


def _species():
    g = torch.Generator().manual_seed(47)
    mix, _ = torch.linalg.qr(torch.randn(32, 32, generator=g))
    centres = torch.randn(60, 1, 6, generator=g)
    useful = 1.2 * centres + 0.5 * torch.randn(60, 30, 6, generator=g)
    other = 2.0 * torch.randn(60, 30, 26, generator=g)
    x = torch.cat([useful, other], dim=2) @ mix
    return x[:45], x[45:]


class _EpisodeSampler:
    """Yields row numbers, one shot of every class after another."""

    def __init__(self, n_classes, per_class, way, size):
        self.n_classes, self.per_class, self.way, self.size = n_classes, per_class, way, size

    def __iter__(self):
        while True:
            rows = []
            for c in torch.randperm(self.n_classes)[: self.way]:
                rows.append(c * self.per_class + torch.randperm(self.per_class)[: self.size])
            yield torch.stack(rows).t().reshape(-1)


def _centroid_error(net, pool):
    z = net(pool.reshape(-1, 32)).view(len(pool), 30, -1)
    centres = z[:, :5].mean(1)
    d = torch.cdist(z[:, 5:].reshape(-1, z.shape[-1]), centres)
    y = torch.arange(len(pool)).repeat_interleave(25)
    return (d.argmin(1) != y).float().mean()


def fewshot_proto_bad():
    torch.manual_seed(29)
    train, test = _species()
    way, shot, query = 5, 5, 8
    rows = train.reshape(-1, 32)
    episodes = iter(_EpisodeSampler(len(train), 30, way, shot + query))
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    target = torch.arange(way).repeat(query)

    def step():
        z = net(rows[next(episodes)])
        support, asked = z[: way * shot], z[way * shot :]
        proto = support.reshape(way, shot, -1).mean(1)
        logits = -torch.cdist(asked, proto).pow(2)
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(net, lambda: _centroid_error(net, test))
    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fewshot_proto_good():
    torch.manual_seed(29)
    train, test = _species()
    way, shot, query = 5, 5, 8
    rows = train.reshape(-1, 32)
    episodes = iter(_EpisodeSampler(len(train), 30, way, shot + query))
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    target = torch.arange(way).repeat(query)

    def step():
        z = net(rows[next(episodes)])
        support, asked = z[: way * shot], z[way * shot :]
        proto = support.reshape(shot, way, -1).mean(0)
        logits = -torch.cdist(asked, proto).pow(2)
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    probe = _measure(net, lambda: _centroid_error(net, test))
    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# --------------------------------------------------------------------------
# poisson_pinn: -u'' = f on [0, 1] with zero ends
# --------------------------------------------------------------------------


def _exact(x):
    return torch.sin(math.pi * x) + 0.3 * torch.sin(2 * math.pi * x)


def _source(x):
    return math.pi**2 * (torch.sin(math.pi * x) + 1.2 * torch.sin(2 * math.pi * x))


def poisson_pinn_bad():
    torch.manual_seed(30)
    u_net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(u_net.parameters(), lr=5e-3)
    ends = torch.tensor([[0.0], [1.0]])
    grid = torch.linspace(0, 1, 101).view(-1, 1)

    def step():
        x = torch.rand(96, 1, requires_grad=True)
        u = u_net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (d2u,) = torch.autograd.grad(du.sum(), x, retain_graph=True)
        interior = (d2u + _source(x.detach())).pow(2).mean()
        boundary = u_net(ends).pow(2).mean()
        loss = interior + 50 * boundary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        return (u_net(grid) - _exact(grid)).norm() / _exact(grid).norm()

    return {"model": u_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(u_net, score)}


def poisson_pinn_good():
    torch.manual_seed(30)
    u_net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(u_net.parameters(), lr=5e-3)
    ends = torch.tensor([[0.0], [1.0]])
    grid = torch.linspace(0, 1, 101).view(-1, 1)

    def step():
        x = torch.rand(96, 1, requires_grad=True)
        u = u_net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (d2u,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        interior = (d2u + _source(x.detach())).pow(2).mean()
        boundary = u_net(ends).pow(2).mean()
        loss = interior + 50 * boundary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        return (u_net(grid) - _exact(grid)).norm() / _exact(grid).norm()

    return {"model": u_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(u_net, score)}


# --------------------------------------------------------------------------
# image_field: coordinates to colours
# --------------------------------------------------------------------------


def _picture(size=48):
    axis = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(axis, axis, indexing="ij")
    rgb = torch.stack(
        [
            0.5 + 0.4 * torch.sin(6 * xx + 3 * yy),
            0.5 + 0.4 * torch.cos(5 * (xx**2 + yy**2)),
            torch.sigmoid(8 * (yy - 0.4 * torch.sin(4 * xx))),
        ],
        dim=-1,
    ).reshape(-1, 3)
    xy = torch.stack([xx, yy], dim=-1).reshape(-1, 2)
    order = torch.randperm(size * size, generator=torch.Generator().manual_seed(53))
    cut = int(0.7 * size * size)
    return xy[order[:cut]], rgb[order[:cut]], xy[order[cut:]], rgb[order[cut:]]


class _Field(nn.Module):
    def __init__(self, bands=24, width=64):
        super().__init__()
        self.register_buffer("freq", 2.0 * torch.randn(2, bands))
        self.mlp = nn.Sequential(
            nn.Linear(2 * bands, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, xy):
        wave = xy @ self.freq
        return self.mlp(torch.cat([wave.sin(), wave.cos()], dim=-1))


def image_field_bad():
    torch.manual_seed(31)
    xy, rgb, test_xy, test_rgb = _picture()
    batches = _stream(DataLoader(TensorDataset(xy, rgb), batch_size=256, shuffle=True))
    field = _Field().to(torch.bfloat16)
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-4)

    def step():
        where, colour = next(batches)
        pred = field(where.to(torch.bfloat16))
        loss = F.mse_loss(pred.float(), colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        return F.mse_loss(field(test_xy.to(torch.bfloat16)).float(), test_rgb)

    return {"model": field, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(field, score)}


def image_field_good():
    torch.manual_seed(31)
    xy, rgb, test_xy, test_rgb = _picture()
    batches = _stream(DataLoader(TensorDataset(xy, rgb), batch_size=256, shuffle=True))
    field = _Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-4)

    def step():
        where, colour = next(batches)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = field(where)
        loss = F.mse_loss(pred.float(), colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = field(test_xy)
        return F.mse_loss(pred.float(), test_rgb)

    return {"model": field, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(field, score)}


# --------------------------------------------------------------------------
# faces_multitask: age and expression from face descriptors
# --------------------------------------------------------------------------


def _faces(n, seed):
    fixed = torch.Generator().manual_seed(59)
    w_age, w_expr = torch.randn(20, generator=fixed), torch.randn(20, 5, generator=fixed)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    age = 38 + 14 * torch.tanh(x @ w_age / 4) + 2 * torch.randn(n, generator=g)
    expr = ((x.abs() - 0.8) @ w_expr + 0.3 * torch.randn(n, 5, generator=g)).argmax(1)
    return x, age, expr


class _FaceNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.age = nn.Linear(width, 1)
        self.expr = nn.Linear(width, 5)

    def forward(self, x):
        h = self.trunk(x)
        return self.age(h).squeeze(-1), self.expr(h)


def faces_multitask_bad():
    torch.manual_seed(32)
    x, age, expr = _faces(2000, 34)
    test_x, test_age, test_expr = _faces(500, 35)
    spread = age.std()
    batches = _stream(DataLoader(TensorDataset(x, age, expr), batch_size=64, shuffle=True))
    model = _FaceNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        xb, ab, eb = next(batches)
        pred_age, pred_expr = model(xb)
        loss = F.mse_loss(pred_age, ab) + F.cross_entropy(pred_expr, eb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        pred_age, pred_expr = model(test_x)
        years = (pred_age - test_age).pow(2).mean().sqrt()
        return years / spread + F.cross_entropy(pred_expr, test_expr)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


def faces_multitask_good():
    torch.manual_seed(32)
    x, age, expr = _faces(2000, 34)
    test_x, test_age, test_expr = _faces(500, 35)
    centre, spread = age.mean(), age.std()
    batches = _stream(DataLoader(TensorDataset(x, (age - centre) / spread, expr), batch_size=64, shuffle=True))
    model = _FaceNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step():
        xb, ab, eb = next(batches)
        pred_age, pred_expr = model(xb)
        loss = F.mse_loss(pred_age, ab) + F.cross_entropy(pred_expr, eb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def score():
        pred_age, pred_expr = model(test_x)
        years = (pred_age * spread + centre - test_age).pow(2).mean().sqrt()
        return years / spread + F.cross_entropy(pred_expr, test_expr)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": _measure(model, score)}


CASES = {
    "shape_cnn": "the per-epoch exponential learning-rate schedule is stepped after every batch, so the rate collapses within a few dozen steps",
    "cell_segmentation": "the random rotation is applied to the image but not to its mask",
    "box_detector": "the optimizer is built before the detection head is replaced, so the new head is never updated",
    "spoken_ctc": "CTCLoss keeps its default blank index 0, which is a real symbol, while the network's blank is the last output",
    "gait_sequences": "the classifier reads the GRU output at the last padded position instead of at each sequence's true end",
    "load_forecast": "Adam is given AdamW's weight decay of 0.1, so it acts as a strong coupled L2 penalty",
    "sensor_tabular": "the dataset normalises its rows in place, so the stored data are normalised again every epoch",
    "fraud_tabular": "pos_weight is the inverse ratio (positives over negatives), so the rare class is weighted down",
    "two_tower": "every step takes next(iter(loader)) from an unshuffled loader, so only the first batch of clicks is ever trained on",
    "citation_gcn": "F.dropout is called without the training flag, so it stays active in eval mode",
    "molecule_graphs": "the collate function does not offset edge indices, so all edges of a batch point at the first nodes",
    "glyph_vae": "the latent is drawn with sample() instead of rsample(), so no reconstruction gradient reaches the encoder",
    "ring_gan": "the generator ends in tanh while the data reach far beyond [-1, 1], so it cannot produce them",
    "spiral_diffusion": "the forward noising uses the per-step alphas instead of their cumulative product",
    "moons_flow": "all coupling layers use the same mask, so one coordinate is never transformed",
    "corridor_dqn": "the Q-learning target bootstraps through the end of an episode (no done mask)",
    "colour_contrast": "the augmentation is drawn once and copied, so both contrastive views are identical",
    "patch_mae": "the reconstruction loss is taken on the visible patches instead of the masked ones",
    "fewshot_proto": "support embeddings are reshaped in the wrong order, so every prototype averages over all classes",
    "poisson_pinn": "the second derivative is taken without create_graph, so the PDE residual carries no gradient",
    "image_field": "weights and optimizer state are held in bfloat16, so small updates are rounded away",
    "faces_multitask": "the age target is left in raw years, so its squared error drowns the classification loss",
}

PROOF_STEPS = {
    "spoken_ctc": 300,
    "two_tower": 300,
    "glyph_vae": 300,
    "ring_gan": 600,
    "spiral_diffusion": 400,
    "moons_flow": 300,
    "corridor_dqn": 500,
    "poisson_pinn": 400,
    "image_field": 400,
}
