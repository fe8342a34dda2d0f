import contextlib

import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


@contextlib.contextmanager
def evaluating(*models):
    flags = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag


def forever(loader):
    while True:
        yield from loader


def rng(seed):
    return torch.Generator().manual_seed(seed)


def pattern_images(n, classes, seed, size=16, noise=0.6, shift=2, proto_seed=100):
    g = rng(seed)
    protos = torch.randn(classes, 3, 4, 4, generator=rng(proto_seed))
    protos = F.interpolate(protos, size=(size, size), mode="bilinear", align_corners=False)
    y = torch.randint(0, classes, (n,), generator=g)
    moves = torch.randint(-shift, shift + 1, (n, 2), generator=g).tolist()
    x = torch.stack([torch.roll(protos[c], mv, dims=(1, 2)) for c, mv in zip(y.tolist(), moves)])
    return x + noise * torch.randn(x.shape, generator=g), y


def smooth_images(n, seed, size=16, channels=1, freq=4):
    g = rng(seed)
    low = torch.rand(n, channels, freq, freq, generator=g)
    return F.interpolate(low, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


class SmallNet(nn.Module):
    def __init__(self, num_classes, width=16, drop=0.0):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.drop = nn.Dropout(drop)
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, x):
        return self.fc(self.drop(self.features(x)))


_CHECKPOINTS = {}


def pretrained_state(classes, width, proto_seed, noise=0.8, steps=80, source=pattern_images):
    key = (classes, width, proto_seed, noise, steps, source.__name__)
    if key not in _CHECKPOINTS:
        torch.manual_seed(77)
        net = SmallNet(classes, width)
        x, y = source(640, classes, seed=501, noise=noise, proto_seed=proto_seed)
        opt = torch.optim.Adam(net.parameters(), lr=4e-3)
        for k in range(steps):
            idx = torch.randint(0, len(x), (32,))
            opt.zero_grad()
            F.cross_entropy(net(x[idx]), y[idx]).backward()
            opt.step()
        _CHECKPOINTS[key] = net.state_dict()
    return {k: v.clone() for k, v in _CHECKPOINTS[key].items()}


class TinyUNet(nn.Module):
    def __init__(self, classes, width=12):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.up = nn.Sequential(nn.Conv2d(3 * width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.head(self.up(torch.cat([a, b], dim=1)))


def shape_scenes(n, seed, size=24):
    g = rng(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = 0.4 * torch.randn(n, 3, size, size, generator=g)
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for k in range(n):
        for label in (1, 2):
            cx, cy = torch.randint(4, size - 4, (2,), generator=g).tolist()
            r = int(torch.randint(3, 6, (1,), generator=g))
            if label == 1:
                where = (xx - cx) ** 2 + (yy - cy) ** 2 <= r * r
            else:
                where = ((xx - cx).abs() <= r - 1) & ((yy - cy).abs() <= r - 1)
            masks[k][where] = label
            images[k, :, where] += torch.tensor([[1.0], [0.3], [0.0]] if label == 1 else [[0.2], [0.4], [1.0]])
    return images, masks


def mean_iou_error(logits, masks, classes):
    pred = logits.argmax(1)
    ious = [((pred == c) & (masks == c)).sum() / ((pred == c) | (masks == c)).sum().clamp(min=1) for c in range(classes)]
    return 1.0 - torch.stack(ious).mean().item() + 1e-4


def moving_blobs(n, seed, frames=8, size=16):
    g = rng(seed)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    y = torch.randint(0, 4, (n,), generator=g)
    velocity = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])[y]
    centre = size / 2 + 4 * (torch.rand(n, 2, generator=g) - 0.5)
    t = torch.arange(frames).float() - (frames - 1) / 2
    offset = torch.randint(-3, 4, (n, 1, 1), generator=g)
    pos = centre[:, None] + velocity[:, None] * (t[None, :, None] + offset)
    d2 = (xx - pos[..., 0, None, None]) ** 2 + (yy - pos[..., 1, None, None]) ** 2
    clips = torch.exp(-d2 / 4.0)
    return (clips + 0.1 * torch.randn(clips.shape, generator=g)).unsqueeze(2), y


CASES = []


def mixup_classifier_bad():
    torch.manual_seed(0)
    classes = 8
    x, y = pattern_images(512, classes, seed=1, noise=1.0)
    x_test, y_test = pattern_images(256, classes, seed=2, noise=1.0)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = SmallNet(classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    beta = torch.distributions.Beta(0.8, 0.8)

    def mix(t, lam):
        order = torch.randperm(t.size(0))
        return lam * t + (1 - lam) * t[order]

    def step(i):
        model.train()
        images, labels = next(batches)
        lam = beta.sample()
        targets = F.one_hot(labels, classes).float()
        images = mix(images, lam)
        targets = mix(targets, lam)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mixup_classifier_good():
    torch.manual_seed(0)
    classes = 8
    x, y = pattern_images(512, classes, seed=1, noise=1.0)
    x_test, y_test = pattern_images(256, classes, seed=2, noise=1.0)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = SmallNet(classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    beta = torch.distributions.Beta(0.8, 0.8)

    def mix(t, lam, order):
        return lam * t + (1 - lam) * t[order]

    def step(i):
        model.train()
        images, labels = next(batches)
        lam = beta.sample()
        targets = F.one_hot(labels, classes).float()
        order = torch.randperm(images.size(0))
        images = mix(images, lam, order)
        targets = mix(targets, lam, order)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'mixup_classifier',
    "field": 'image classification',
    "what": 'Mixup draws a separate permutation for the labels, so the mixed label does not belong to the mixed-in image and half of the supervision is noise.',
})


def decay_classifier_bad():
    torch.manual_seed(0)
    classes = 10
    x, y = pattern_images(512, classes, seed=3, noise=0.8, proto_seed=101)
    x_test, y_test = pattern_images(256, classes, seed=4, noise=0.8, proto_seed=101)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = SmallNet(classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def decay_classifier_good():
    torch.manual_seed(0)
    classes = 10
    x, y = pattern_images(512, classes, seed=3, noise=0.8, proto_seed=101)
    x_test, y_test = pattern_images(256, classes, seed=4, noise=0.8, proto_seed=101)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)
    model = SmallNet(classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'decay_classifier',
    "field": 'image classification',
    "what": 'An exponential learning-rate decay meant per epoch is stepped after every batch, so the learning rate dies within the first epochs and training freezes.',
})


def rectangle_scenes(n, seed, size=24):
    g = rng(seed)
    images = 0.25 * torch.randn(n, 1, size, size, generator=g)
    boxes = torch.zeros(n, 4)
    for k in range(n):
        w, h = torch.randint(6, 13, (2,), generator=g).tolist()
        x0 = int(torch.randint(0, size - w + 1, (1,), generator=g))
        y0 = int(torch.randint(0, size - h + 1, (1,), generator=g))
        images[k, 0, y0:y0 + h, x0:x0 + w] += 1.0
        boxes[k] = torch.tensor([x0, y0, w, h]) / size
    return images, boxes


def box_convert(boxes, fmt):
    a, b, w, h = boxes.unbind(-1)
    if fmt == "cxcywh":
        return torch.stack([a - w / 2, b - h / 2, a + w / 2, b + h / 2], dim=-1)
    if fmt == "xywh":
        return torch.stack([a, b, a + w, b + h], dim=-1)
    raise ValueError(fmt)


def _areas(a, b):
    inter = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0).prod(-1)
    union = (a[:, 2:] - a[:, :2]).prod(-1) + (b[:, 2:] - b[:, :2]).prod(-1) - inter
    hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).prod(-1)
    return inter, union, hull


def plain_iou(a, b):
    inter, union, _ = _areas(a, b)
    return inter / union.clamp(min=1e-6)


def generalized_iou(a, b):
    inter, union, hull = _areas(a, b)
    return inter / union.clamp(min=1e-6) - (hull - union) / hull.clamp(min=1e-6)


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(), nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(24 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.head(self.body(x)).sigmoid()


def box_regressor_bad():
    torch.manual_seed(0)
    x, boxes = rectangle_scenes(512, seed=11)
    x_test, boxes_test = rectangle_scenes(128, seed=12)
    batches = forever(DataLoader(TensorDataset(x, boxes), batch_size=32, shuffle=True, drop_last=True))
    model = BoxNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        images, annotations = next(batches)
        target = box_convert(annotations, "cxcywh")
        optimizer.zero_grad()
        pred = box_convert(model(images), "cxcywh")
        giou = generalized_iou(pred, target)
        loss = (1 - giou).mean() + 5 * F.l1_loss(pred, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = box_convert(model(x_test), "cxcywh")
            return 1.0 - plain_iou(pred, box_convert(boxes_test, "xywh")).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def box_regressor_good():
    torch.manual_seed(0)
    x, boxes = rectangle_scenes(512, seed=11)
    x_test, boxes_test = rectangle_scenes(128, seed=12)
    batches = forever(DataLoader(TensorDataset(x, boxes), batch_size=32, shuffle=True, drop_last=True))
    model = BoxNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)

    def step(i):
        model.train()
        images, annotations = next(batches)
        target = box_convert(annotations, "xywh")
        optimizer.zero_grad()
        pred = box_convert(model(images), "cxcywh")
        giou = generalized_iou(pred, target)
        loss = (1 - giou).mean() + 5 * F.l1_loss(pred, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = box_convert(model(x_test), "cxcywh")
            return 1.0 - plain_iou(pred, box_convert(boxes_test, "xywh")).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'box_regressor',
    "field": 'detection',
    "what": 'Annotations are [x, y, w, h] with the top-left corner, but the training targets are converted as if they were [cx, cy, w, h], so every box is learnt shifted by half its size.',
})


def grid_scenes(n, seed, size=32, cells=4):
    g = rng(seed)
    images = 0.5 * torch.randn(n, 3, size, size, generator=g)
    target = torch.zeros(n, 5, cells, cells)
    stride = size // cells
    for k in range(n):
        for _ in range(int(torch.randint(1, 3, (1,), generator=g))):
            cx, cy = torch.randint(3, size - 3, (2,), generator=g).tolist()
            w, h = torch.randint(2, 6, (2,), generator=g).tolist()
            row, col = cy // stride, cx // stride
            if target[k, 0, row, col] > 0:
                continue
            images[k, :, max(cy - h, 0):cy + h + 1, max(cx - w, 0):cx + w + 1] += 0.8
            target[k, :, row, col] = torch.tensor([1.0, (cx % stride) / stride, (cy % stride) / stride, w / 4, h / 4])
    return images, target


class GridNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        layers, cin = [], 3
        for cout in (width, 2 * width, 2 * width):
            layers += [nn.Conv2d(cin, cout, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU()]
            cin = cout
        layers += [nn.Conv2d(cin, cin, 3, padding=1, bias=False), nn.BatchNorm2d(cin), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(cin, 5, 1)

    def forward(self, x):
        return self.head(self.body(x))


def grid_detector_bad():
    torch.manual_seed(0)
    x, target = grid_scenes(384, seed=21)
    x_test, target_test = grid_scenes(128, seed=22)
    batches = forever(DataLoader(TensorDataset(x, target), batch_size=32, shuffle=True, drop_last=True))
    model = GridNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        out = model(images)
        objectness = labels[:, 0]
        loss_obj = F.binary_cross_entropy_with_logits(out[:, 0], objectness)
        box_error = F.smooth_l1_loss(out[:, 1:], labels[:, 1:], beta=0.1, reduction="none").sum(1)
        loss_box = box_error.mean()
        loss = loss_obj + loss_box
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(x_test)
            held = target_test[:, 0] > 0
            return (out[:, 1:] - target_test[:, 1:]).abs().mean(1)[held].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def grid_detector_good():
    torch.manual_seed(0)
    x, target = grid_scenes(384, seed=21)
    x_test, target_test = grid_scenes(128, seed=22)
    batches = forever(DataLoader(TensorDataset(x, target), batch_size=32, shuffle=True, drop_last=True))
    model = GridNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        out = model(images)
        objectness = labels[:, 0]
        loss_obj = F.binary_cross_entropy_with_logits(out[:, 0], objectness)
        box_error = F.smooth_l1_loss(out[:, 1:], labels[:, 1:], beta=0.1, reduction="none").sum(1)
        loss_box = (box_error * objectness).sum() / objectness.sum().clamp(min=1)
        loss = loss_obj + loss_box
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(x_test)
            held = target_test[:, 0] > 0
            return (out[:, 1:] - target_test[:, 1:]).abs().mean(1)[held].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'grid_detector',
    "field": 'detection',
    "what": 'The box loss is averaged over all grid cells, the empty ones (target zeros) included, instead of the cells that hold an object, so box sizes and offsets are pulled to zero.',
})


def flip_segmenter_bad():
    torch.manual_seed(0)

    class Scenes(Dataset):
        def __init__(self, images, masks):
            self.images, self.masks = images, masks

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = self.images[k], self.masks[k]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            return image, mask

    x, m = shape_scenes(192, seed=31)
    x_test, m_test = shape_scenes(64, seed=32)
    batches = forever(DataLoader(Scenes(x, m), batch_size=16, shuffle=True, drop_last=True))
    model = TinyUNet(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), masks)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(x_test), m_test, 3)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flip_segmenter_good():
    torch.manual_seed(0)

    class Scenes(Dataset):
        def __init__(self, images, masks):
            self.images, self.masks = images, masks

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, mask = self.images[k], self.masks[k]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
                mask = mask.flip(-1)
            return image, mask

    x, m = shape_scenes(192, seed=31)
    x_test, m_test = shape_scenes(64, seed=32)
    batches = forever(DataLoader(Scenes(x, m), batch_size=16, shuffle=True, drop_last=True))
    model = TinyUNet(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), masks)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(x_test), m_test, 3)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'flip_segmenter',
    "field": 'segmentation',
    "what": "The random horizontal flip is applied to the image but not to its mask, so half of the pixels' labels are at the wrong place.",
})


def pixel_segmenter_bad():
    torch.manual_seed(0)
    classes = 3
    x, m = shape_scenes(192, seed=33)
    x_test, m_test = shape_scenes(64, seed=34)
    batches = forever(DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True, drop_last=True))
    model = TinyUNet(classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.0]))

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        logits = model(images)
        logits = logits.reshape(-1, classes)
        loss = criterion(logits, masks.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(x_test), m_test, classes)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pixel_segmenter_good():
    torch.manual_seed(0)
    classes = 3
    x, m = shape_scenes(192, seed=33)
    x_test, m_test = shape_scenes(64, seed=34)
    batches = forever(DataLoader(TensorDataset(x, m), batch_size=16, shuffle=True, drop_last=True))
    model = TinyUNet(classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.0]))

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        logits = model(images)
        logits = logits.permute(0, 2, 3, 1).reshape(-1, classes)
        loss = criterion(logits, masks.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(x_test), m_test, classes)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'pixel_segmenter',
    "field": 'segmentation',
    "what": 'The (B, C, H, W) logits are flattened with reshape(-1, C) without moving the channel axis to the end, so logits and pixel labels are scrambled against each other.',
})


def draw_points(points, size):
    grid = (torch.arange(size) + 0.5) / size
    d2 = (grid[None, None, None, :] - points[..., 0, None, None]) ** 2 + (grid[None, None, :, None] - points[..., 1, None, None]) ** 2
    return torch.exp(-d2 / (2 * 0.05 ** 2))


def face_images(n, seed, size=24):
    g = rng(seed)
    nose = 0.35 + 0.3 * torch.rand(n, 2, generator=g)
    reach = 0.12 + 0.18 * torch.rand(n, 2, generator=g)
    lift = 0.1 + 0.2 * torch.rand(n, 2, generator=g)
    left = torch.stack([nose[:, 0] - reach[:, 0], nose[:, 1] - lift[:, 0]], -1)
    right = torch.stack([nose[:, 0] + reach[:, 1], nose[:, 1] - lift[:, 1]], -1)
    points = torch.stack([nose, left, right], 1)
    maps = draw_points(points, size)
    images = torch.stack([maps[:, 0], maps[:, 1] + maps[:, 2]], 1)
    return images + 0.1 * torch.randn(images.shape, generator=g), points


class PointNet(nn.Module):
    def __init__(self, channels, points, width=16):
        super().__init__()
        self.points = points
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(width * 36, 64), nn.ReLU(), nn.Linear(64, 2 * points))

    def forward(self, x):
        return self.head(self.body(x)).view(-1, self.points, 2)


def face_landmarks_bad():
    torch.manual_seed(0)
    pairs = [0, 2, 1]

    class Faces(Dataset):
        def __init__(self, images, points):
            self.images, self.points = images, points

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, points = self.images[k], self.points[k].clone()
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
                points[:, 0] = 1.0 - points[:, 0]
            return image, points

    x, p = face_images(384, seed=41)
    x_test, p_test = face_images(128, seed=42)
    batches = forever(DataLoader(Faces(x, p), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet(2, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)

    def step(i):
        model.train()
        images, points = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(images), points)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - p_test).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def face_landmarks_good():
    torch.manual_seed(0)
    pairs = [0, 2, 1]

    class Faces(Dataset):
        def __init__(self, images, points):
            self.images, self.points = images, points

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            image, points = self.images[k], self.points[k].clone()
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
                points[:, 0] = 1.0 - points[:, 0]
                points = points[pairs]
            return image, points

    x, p = face_images(384, seed=41)
    x_test, p_test = face_images(128, seed=42)
    batches = forever(DataLoader(Faces(x, p), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet(2, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)

    def step(i):
        model.train()
        images, points = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(images), points)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - p_test).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'face_landmarks',
    "field": 'key points',
    "what": 'The horizontal flip mirrors the coordinates but does not exchange the left and right key points, so the two eyes get contradictory labels and are predicted between them.',
})


def body_images(n, seed, labelled, size=24):
    g = rng(seed)
    points = 0.1 + 0.8 * torch.rand(n, 4, 2, generator=g)
    images = draw_points(points, size)
    images = images + 0.1 * torch.randn(images.shape, generator=g)
    visible = (torch.rand(n, 4, generator=g) < labelled).float()
    return images, points * visible[..., None], visible


def pose_regressor_bad():
    torch.manual_seed(0)
    x, p, v = body_images(384, seed=43, labelled=0.65)
    x_test, p_test, _ = body_images(128, seed=44, labelled=1.0)
    batches = forever(DataLoader(TensorDataset(x, p, v), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)

    def step(i):
        model.train()
        images, points, visible = next(batches)
        optimizer.zero_grad()
        error = ((model(images) - points) ** 2).sum(-1)
        loss = error.mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - p_test).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pose_regressor_good():
    torch.manual_seed(0)
    x, p, v = body_images(384, seed=43, labelled=0.65)
    x_test, p_test, _ = body_images(128, seed=44, labelled=1.0)
    batches = forever(DataLoader(TensorDataset(x, p, v), batch_size=32, shuffle=True, drop_last=True))
    model = PointNet(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)

    def step(i):
        model.train()
        images, points, visible = next(batches)
        optimizer.zero_grad()
        error = ((model(images) - points) ** 2).sum(-1)
        loss = (error * visible).sum() / visible.sum().clamp(min=1)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - p_test).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'pose_regressor',
    "field": 'key points',
    "what": 'Key points without annotation (visibility 0, coordinates 0, 0) are not masked out of the loss, so all predictions are dragged towards the image corner.',
})


def utterances(n, symbols, seed, dim=16):
    g = rng(seed)
    voices = torch.randn(symbols, dim, generator=rng(500))
    out = []
    for _ in range(n):
        text = torch.randint(0, symbols, (int(torch.randint(3, 7, (1,), generator=g)),), generator=g)
        pieces = []
        for s in text:
            pieces.append(voices[s].expand(int(torch.randint(2, 5, (1,), generator=g)), dim))
            pieces.append(torch.zeros(int(torch.randint(1, 3, (1,), generator=g)), dim))
        frames = torch.cat(pieces)
        out.append((frames + 0.5 * torch.randn(frames.shape, generator=g), text))
    return out


def collate_utterances(batch):
    frames = nn.utils.rnn.pad_sequence([f for f, _ in batch], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([t for _, t in batch], batch_first=True)
    return frames, torch.tensor([len(f) for f, _ in batch]), targets, torch.tensor([len(t) for _, t in batch])


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


class SpeechNet(nn.Module):
    def __init__(self, dim, outputs, width=48):
        super().__init__()
        self.conv1 = nn.Conv1d(dim, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, outputs)

    def forward(self, frames):
        h = F.relu(self.conv1(frames.transpose(1, 2)))
        h = F.relu(self.conv2(h))
        return self.out(h.transpose(1, 2))


def speech_ctc_bad():
    torch.manual_seed(0)
    symbols = 6
    blank = symbols
    data = utterances(256, symbols, seed=51)
    test = collate_utterances(utterances(48, symbols, seed=52))
    batches = forever(DataLoader(data, batch_size=16, shuffle=True, drop_last=True, collate_fn=collate_utterances))
    model = SpeechNet(16, symbols + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CTCLoss(zero_infinity=True)

    def step(i):
        model.train()
        frames, frame_lens, targets, target_lens = next(batches)
        optimizer.zero_grad()
        log_probs = model(frames).log_softmax(-1).transpose(0, 1)
        loss = criterion(log_probs, targets, frame_lens, target_lens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        frames, frame_lens, targets, target_lens = test
        with evaluating(model):
            best = model(frames).argmax(-1)
        edits = 1
        for row, n, ref, m in zip(best, frame_lens, targets, target_lens):
            hyp = [s for s in torch.unique_consecutive(row[:n]).tolist() if s != blank]
            edits += edit_distance(hyp, ref[:m].tolist())
        return edits / int(target_lens.sum())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def speech_ctc_good():
    torch.manual_seed(0)
    symbols = 6
    blank = symbols
    data = utterances(256, symbols, seed=51)
    test = collate_utterances(utterances(48, symbols, seed=52))
    batches = forever(DataLoader(data, batch_size=16, shuffle=True, drop_last=True, collate_fn=collate_utterances))
    model = SpeechNet(16, symbols + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.CTCLoss(blank=blank, zero_infinity=True)

    def step(i):
        model.train()
        frames, frame_lens, targets, target_lens = next(batches)
        optimizer.zero_grad()
        log_probs = model(frames).log_softmax(-1).transpose(0, 1)
        loss = criterion(log_probs, targets, frame_lens, target_lens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        frames, frame_lens, targets, target_lens = test
        with evaluating(model):
            best = model(frames).argmax(-1)
        edits = 1
        for row, n, ref, m in zip(best, frame_lens, targets, target_lens):
            hyp = [s for s in torch.unique_consecutive(row[:n]).tolist() if s != blank]
            edits += edit_distance(hyp, ref[:m].tolist())
        return edits / int(target_lens.sum())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'speech_ctc',
    "field": 'audio/speech',
    "what": 'The network reserves its last output for the CTC blank, but CTCLoss is left at its default blank=0, so symbol 0 is trained as the blank and comes out between all others.',
})


def keyword_specs(n, seed, classes=8, mels=20, frames=32):
    g = rng(seed)
    low = torch.randn(classes, 1, 5, 8, generator=rng(530))
    words = F.interpolate(low, size=(mels, frames), mode="bilinear", align_corners=False)[:, 0]
    y = torch.randint(0, classes, (n,), generator=g)
    delay = torch.randint(-3, 4, (n,), generator=g).tolist()
    x = torch.stack([torch.roll(words[c], d, dims=1) for c, d in zip(y.tolist(), delay)])
    return x + 1.0 * torch.randn(x.shape, generator=g), y


def keyword_spotter_bad():
    torch.manual_seed(0)

    class Keywords(Dataset):
        def __init__(self, specs, labels):
            self.specs, self.labels = list(specs), labels

        def __len__(self):
            return len(self.specs)

        def __getitem__(self, k):
            spec = self.specs[k]
            f0 = int(torch.randint(0, 20 - 4, ()))
            t0 = int(torch.randint(0, 32 - 6, ()))
            spec[f0:f0 + 4] = 0.0
            spec[:, t0:t0 + 6] = 0.0
            return spec, self.labels[k]

    x, y = keyword_specs(128, seed=53)
    x_test, y_test = keyword_specs(128, seed=54)
    batches = forever(DataLoader(Keywords(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = nn.Sequential(
        nn.Conv1d(20, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(32, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 8),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step(i):
        model.train()
        specs, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(specs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_spotter_good():
    torch.manual_seed(0)

    class Keywords(Dataset):
        def __init__(self, specs, labels):
            self.specs, self.labels = list(specs), labels

        def __len__(self):
            return len(self.specs)

        def __getitem__(self, k):
            spec = self.specs[k].clone()
            f0 = int(torch.randint(0, 20 - 4, ()))
            t0 = int(torch.randint(0, 32 - 6, ()))
            spec[f0:f0 + 4] = 0.0
            spec[:, t0:t0 + 6] = 0.0
            return spec, self.labels[k]

    x, y = keyword_specs(128, seed=53)
    x_test, y_test = keyword_specs(128, seed=54)
    batches = forever(DataLoader(Keywords(x, y), batch_size=32, shuffle=True, drop_last=True))
    model = nn.Sequential(
        nn.Conv1d(20, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(32, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 8),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)

    def step(i):
        model.train()
        specs, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(specs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'keyword_spotter',
    "field": 'audio/speech',
    "what": 'SpecAugment writes its time and frequency masks into the cached spectrogram itself, so the masks pile up over the epochs and the training set is blanked out.',
})


def clip_lstm_bad():
    torch.manual_seed(0)

    class ClipNet(nn.Module):
        def __init__(self, classes, dim=32):
            super().__init__()
            self.frame = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(256, dim), nn.ReLU(),
            )
            self.rnn = nn.LSTM(dim, dim)
            self.fc = nn.Linear(dim, classes)

        def forward(self, clips):
            b, t = clips.shape[:2]
            feats = self.frame(clips.flatten(0, 1)).view(b, t, -1)
            out, _ = self.rnn(feats)
            return self.fc(out[:, -1])

    x, y = moving_blobs(256, seed=61)
    x_test, y_test = moving_blobs(96, seed=62)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = ClipNet(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        clips, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def clip_lstm_good():
    torch.manual_seed(0)

    class ClipNet(nn.Module):
        def __init__(self, classes, dim=32):
            super().__init__()
            self.frame = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(256, dim), nn.ReLU(),
            )
            self.rnn = nn.LSTM(dim, dim, batch_first=True)
            self.fc = nn.Linear(dim, classes)

        def forward(self, clips):
            b, t = clips.shape[:2]
            feats = self.frame(clips.flatten(0, 1)).view(b, t, -1)
            out, _ = self.rnn(feats)
            return self.fc(out[:, -1])

    x, y = moving_blobs(256, seed=61)
    x_test, y_test = moving_blobs(96, seed=62)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = ClipNet(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        clips, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'clip_lstm',
    "field": 'video',
    "what": 'The LSTM gets (batch, time, feature) input but was built without batch_first=True, so it recurs over the clips of the batch instead of over the frames.',
})


def motion_conv3d_bad():
    torch.manual_seed(0)

    def random_crop(frames, size=16):
        top, left = torch.randint(0, frames.shape[-1] - size + 1, (2,)).tolist()
        return frames[..., top:top + size, left:left + size]

    class Clips(Dataset):
        def __init__(self, clips, labels):
            self.clips, self.labels = clips, labels

        def __len__(self):
            return len(self.clips)

        def __getitem__(self, k):
            clip = self.clips[k]
            clip = torch.stack([random_crop(frame) for frame in clip])
            return clip.transpose(0, 1), self.labels[k]

    x, y = moving_blobs(256, seed=63, size=22)
    x_test, y_test = moving_blobs(96, seed=64, size=22)
    x_test = x_test[..., 3:19, 3:19].transpose(1, 2)
    batches = forever(DataLoader(Clips(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, stride=(1, 2, 2), padding=1, bias=False), nn.BatchNorm3d(8), nn.ReLU(),
        nn.Conv3d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm3d(16), nn.ReLU(),
        nn.AdaptiveAvgPool3d((2, 2, 2)), nn.Flatten(), nn.Linear(128, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        clips, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def motion_conv3d_good():
    torch.manual_seed(0)

    def random_crop(frames, size=16):
        top, left = torch.randint(0, frames.shape[-1] - size + 1, (2,)).tolist()
        return frames[..., top:top + size, left:left + size]

    class Clips(Dataset):
        def __init__(self, clips, labels):
            self.clips, self.labels = clips, labels

        def __len__(self):
            return len(self.clips)

        def __getitem__(self, k):
            clip = self.clips[k]
            clip = random_crop(clip)
            return clip.transpose(0, 1), self.labels[k]

    x, y = moving_blobs(256, seed=63, size=22)
    x_test, y_test = moving_blobs(96, seed=64, size=22)
    x_test = x_test[..., 3:19, 3:19].transpose(1, 2)
    batches = forever(DataLoader(Clips(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, stride=(1, 2, 2), padding=1, bias=False), nn.BatchNorm3d(8), nn.ReLU(),
        nn.Conv3d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm3d(16), nn.ReLU(),
        nn.AdaptiveAvgPool3d((2, 2, 2)), nn.Flatten(), nn.Linear(128, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        clips, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'motion_conv3d',
    "field": 'video',
    "what": 'The random crop is drawn anew for every frame of a clip instead of once per clip, so the jitter between frames drowns the motion that the label depends on.',
})


def two_moons(n, seed):
    g = rng(seed)
    t = torch.rand(n, generator=g) * torch.pi
    side = torch.randint(0, 2, (n,), generator=g).float()
    x = torch.where(side > 0, t.cos(), 1 - t.cos())
    y = torch.where(side > 0, t.sin(), 0.5 - t.sin())
    pts = torch.stack([x - 0.5, y - 0.25], 1) * torch.tensor([1.15, 2.0])
    return pts + 0.05 * torch.randn(n, 2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, steps, width=96):
        super().__init__()
        self.time = nn.Embedding(steps, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        h = F.silu(self.mid(h))
        return self.out(h)


def point_diffusion_bad():
    torch.manual_seed(0)
    T = 40
    betas = torch.linspace(1e-3, 0.2, T)
    alphas = 1 - betas
    abar = alphas.cumprod(0)
    data = two_moons(1024, seed=71)
    data_test = two_moons(400, seed=72)
    start = torch.randn(400, 2, generator=rng(73))
    walk = torch.randn(T, 400, 2, generator=rng(74))
    batches = forever(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))
    model = Denoiser(T)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def q_sample(x0, t):
        noise = torch.randn_like(x0)
        a = abar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def step(i):
        model.train()
        (x0,) = next(batches)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        x_t = q_sample(x0, t)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x_t, t), noise)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            x = start
            for k in reversed(range(T)):
                eps = model(x, torch.full((x.size(0),), k))
                x = (x - betas[k] / (1 - abar[k]).sqrt() * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * walk[k]
            return energy_distance(x, data_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def point_diffusion_good():
    torch.manual_seed(0)
    T = 40
    betas = torch.linspace(1e-3, 0.2, T)
    alphas = 1 - betas
    abar = alphas.cumprod(0)
    data = two_moons(1024, seed=71)
    data_test = two_moons(400, seed=72)
    start = torch.randn(400, 2, generator=rng(73))
    walk = torch.randn(T, 400, 2, generator=rng(74))
    batches = forever(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))
    model = Denoiser(T)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def q_sample(x0, t, noise):
        a = abar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def step(i):
        model.train()
        (x0,) = next(batches)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        x_t = q_sample(x0, t, noise)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x_t, t), noise)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            x = start
            for k in reversed(range(T)):
                eps = model(x, torch.full((x.size(0),), k))
                x = (x - betas[k] / (1 - abar[k]).sqrt() * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * walk[k]
            return energy_distance(x, data_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'point_diffusion',
    "field": 'generative models',
    "what": 'The forward process draws its own noise while the loss compares the prediction with another, freshly drawn noise, so the network can only learn to predict zero.',
})


def ring_gan_bad():
    torch.manual_seed(0)
    angle = torch.rand(1024, generator=rng(81)) * 2 * torch.pi
    real_data = torch.stack([angle.cos() + 1.0, angle.sin() - 0.5], 1) + 0.05 * torch.randn(1024, 2, generator=rng(82))
    z_test = torch.randn(400, 4, generator=rng(83))
    batches = forever(DataLoader(TensorDataset(real_data[:600]), batch_size=64, shuffle=True, drop_last=True))
    G = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    D = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def step(i):
        G.train()
        D.train()
        (real,) = next(batches)
        fake = G(torch.randn(real.size(0), 4))
        opt_g.zero_grad()
        opt_d.zero_grad()

        loss_d = F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean()
        loss_d.backward(retain_graph=True)
        opt_d.step()

        loss_g = F.softplus(-D(fake)).mean()
        loss_g.backward()
        opt_g.step()
        return loss_d.item() + loss_g.item()

    def probe():
        with evaluating(G):
            return energy_distance(G(z_test), real_data[600:])

    return {"model": {"G": G, "D": D}, "optimizer": [opt_g, opt_d], "steps": 20, "step": step, "probe": probe}


def ring_gan_good():
    torch.manual_seed(0)
    angle = torch.rand(1024, generator=rng(81)) * 2 * torch.pi
    real_data = torch.stack([angle.cos() + 1.0, angle.sin() - 0.5], 1) + 0.05 * torch.randn(1024, 2, generator=rng(82))
    z_test = torch.randn(400, 4, generator=rng(83))
    batches = forever(DataLoader(TensorDataset(real_data[:600]), batch_size=64, shuffle=True, drop_last=True))
    G = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    D = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def step(i):
        G.train()
        D.train()
        (real,) = next(batches)
        fake = G(torch.randn(real.size(0), 4))
        opt_g.zero_grad()
        opt_d.zero_grad()

        loss_d = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
        loss_d.backward()
        opt_d.step()

        loss_g = F.softplus(-D(fake)).mean()
        loss_g.backward()
        opt_g.step()
        return loss_d.item() + loss_g.item()

    def probe():
        with evaluating(G):
            return energy_distance(G(z_test), real_data[600:])

    return {"model": {"G": G, "D": D}, "optimizer": [opt_g, opt_d], "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'ring_gan',
    "field": 'generative models',
    "what": "The fake batch is not detached in the discriminator's loss (retain_graph silences the error), so the discriminator's gradient is added to the generator's and works against it.",
})


def tint(x, generator=None):
    n = x.size(0)
    gain = 0.6 + 0.8 * torch.rand(n, 3, 1, 1, generator=generator)
    bias = 1.5 * torch.randn(n, 3, 1, 1, generator=generator)
    return x * gain + bias + 0.5 * torch.randn(x.shape, generator=generator)


def tinted_patterns(n, seed):
    x, y = pattern_images(n, 6, seed=seed, noise=0.2, proto_seed=105, shift=1)
    return tint(x, rng(seed + 1000)), y


def linear_readout_error(a, ya, b, yb, ridge=1e-2):
    mean = a.mean(0)
    targets = F.one_hot(ya).double()
    a, b = (a - mean).double(), (b - mean).double()
    gram = a.T @ a + ridge * torch.eye(a.size(1), dtype=torch.double)
    w = torch.linalg.solve(gram, a.T @ (targets - targets.mean(0)))
    pred = b @ w + targets.mean(0)
    return (pred - F.one_hot(yb, targets.size(1))).pow(2).sum(1).mean().item()


class SimSiam(nn.Module):
    def __init__(self, width=16, dim=64):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(8 * width, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(),
            nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim, affine=False),
        )
        self.predictor = nn.Sequential(nn.Linear(dim, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

    def encode(self, x):
        return self.projector(self.backbone(x))

    def forward(self, x):
        return self.predictor(self.encode(x))


def siamese_pretraining_bad():
    torch.manual_seed(0)
    x, _ = tinted_patterns(512, seed=91)
    x_fit, y_fit = tinted_patterns(320, seed=92)
    x_test, y_test = tinted_patterns(160, seed=93)
    batches = forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def distance(p, z):
        return -F.cosine_similarity(p, z, dim=1).mean()

    def step(i):
        model.train()
        (images,) = next(batches)
        optimizer.zero_grad()
        z1, z2 = model.encode(tint(images)), model.encode(tint(images))
        p1, p2 = model.predictor(z1), model.predictor(z2)
        loss = 0.5 * distance(p1, z2) + 0.5 * distance(p2, z1)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            a = F.normalize(model.encode(x_fit), dim=1)
            b = F.normalize(model.encode(x_test), dim=1)
            return linear_readout_error(a, y_fit, b, y_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_pretraining_good():
    torch.manual_seed(0)
    x, _ = tinted_patterns(512, seed=91)
    x_fit, y_fit = tinted_patterns(320, seed=92)
    x_test, y_test = tinted_patterns(160, seed=93)
    batches = forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def distance(p, z):
        return -F.cosine_similarity(p, z.detach(), dim=1).mean()

    def step(i):
        model.train()
        (images,) = next(batches)
        optimizer.zero_grad()
        z1, z2 = model.encode(tint(images)), model.encode(tint(images))
        p1, p2 = model.predictor(z1), model.predictor(z2)
        loss = 0.5 * distance(p1, z2) + 0.5 * distance(p2, z1)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            a = F.normalize(model.encode(x_fit), dim=1)
            b = F.normalize(model.encode(x_test), dim=1)
            return linear_readout_error(a, y_fit, b, y_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'siamese_pretraining',
    "field": 'contrastive and self-supervised learning',
    "what": 'The stop-gradient on the target branch of SimSiam is missing, so both branches move towards each other and the representation collapses.',
})


def patchify(x, p=4):
    n, c, h, w = x.shape
    x = x.view(n, c, h // p, p, w // p, p)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(n, (h // p) * (w // p), c * p * p)


class MaskedImageModel(nn.Module):
    def __init__(self, patch_dim=16, patches=16, dim=48):
        super().__init__()
        self.embed = nn.Linear(patch_dim, dim)
        self.mask_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(patches, dim) * 0.1)
        layer = nn.TransformerEncoderLayer(dim, 4, dim_feedforward=96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, patch_dim)

    def forward(self, x, mask):
        tokens = self.embed(patchify(x))
        tokens = torch.where(mask.unsqueeze(-1), self.mask_token, tokens) + self.pos
        return self.head(self.encoder(tokens))


def masked_autoencoder_bad():
    torch.manual_seed(0)
    images = smooth_images(512, seed=94)
    images_test = smooth_images(128, seed=95)
    mask_test = torch.rand(128, 16, generator=rng(96)).argsort(1) < 10
    batches = forever(DataLoader(TensorDataset(images), batch_size=32, shuffle=True, drop_last=True))
    model = MaskedImageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def random_mask(n, patches=16, masked=10):
        return torch.rand(n, patches).argsort(1) < masked

    def step(i):
        model.train()
        (x,) = next(batches)
        mask = random_mask(x.size(0))
        optimizer.zero_grad()
        error = (model(x, mask) - patchify(x)).pow(2).mean(-1)
        loss = error[~mask].mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            error = (model(images_test, mask_test) - patchify(images_test)).pow(2).mean(-1)
            return error[mask_test].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def masked_autoencoder_good():
    torch.manual_seed(0)
    images = smooth_images(512, seed=94)
    images_test = smooth_images(128, seed=95)
    mask_test = torch.rand(128, 16, generator=rng(96)).argsort(1) < 10
    batches = forever(DataLoader(TensorDataset(images), batch_size=32, shuffle=True, drop_last=True))
    model = MaskedImageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def random_mask(n, patches=16, masked=10):
        return torch.rand(n, patches).argsort(1) < masked

    def step(i):
        model.train()
        (x,) = next(batches)
        mask = random_mask(x.size(0))
        optimizer.zero_grad()
        error = (model(x, mask) - patchify(x)).pow(2).mean(-1)
        loss = error[mask].mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            error = (model(images_test, mask_test) - patchify(images_test)).pow(2).mean(-1)
            return error[mask_test].mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'masked_autoencoder',
    "field": 'contrastive and self-supervised learning',
    "what": 'The reconstruction loss is taken over the visible patches instead of the masked ones (mask convention inverted), so the network learns to copy and never to fill in.',
})


def double_exposures(n, classes, seed, noise, proto_seed):
    g = rng(seed + 7000)
    xa, ya = pattern_images(n, classes, seed=seed, noise=noise, shift=1, proto_seed=proto_seed)
    xb, yb = pattern_images(n, classes, seed=seed + 1, noise=noise, shift=1, proto_seed=proto_seed)
    share = torch.rand(n, generator=g)
    y = torch.where(torch.rand(n, generator=g) < share, ya, yb)
    s = share.view(-1, 1, 1, 1)
    return s * xa + (1 - s) * xb, y


def soft_label_student_bad():
    state = pretrained_state(8, 24, proto_seed=115, noise=0.4, steps=60, source=double_exposures)
    torch.manual_seed(0)
    x, y = double_exposures(512, 8, seed=111, noise=0.4, proto_seed=115)
    x_test, y_test = double_exposures(256, 8, seed=112, noise=0.4, proto_seed=115)
    batches = forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True, drop_last=True))
    teacher = SmallNet(8, 24)
    teacher.load_state_dict(state)
    teacher.eval().requires_grad_(False)
    student = SmallNet(8, 8)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T = 2.0

    def step(i):
        student.train()
        (images,) = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(images) / T, dim=1)
        optimizer.zero_grad()
        pred = F.softmax(student(images) / T, dim=1)
        loss = F.kl_div(pred, soft, reduction="batchmean") * T * T
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def soft_label_student_good():
    state = pretrained_state(8, 24, proto_seed=115, noise=0.4, steps=60, source=double_exposures)
    torch.manual_seed(0)
    x, y = double_exposures(512, 8, seed=111, noise=0.4, proto_seed=115)
    x_test, y_test = double_exposures(256, 8, seed=112, noise=0.4, proto_seed=115)
    batches = forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True, drop_last=True))
    teacher = SmallNet(8, 24)
    teacher.load_state_dict(state)
    teacher.eval().requires_grad_(False)
    student = SmallNet(8, 8)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T = 2.0

    def step(i):
        student.train()
        (images,) = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(images) / T, dim=1)
        optimizer.zero_grad()
        pred = F.log_softmax(student(images) / T, dim=1)
        loss = F.kl_div(pred, soft, reduction="batchmean") * T * T
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'soft_label_student',
    "field": 'knowledge distillation',
    "what": "F.kl_div receives the student's probabilities instead of its log-probabilities, so the loss is no divergence and drives the student to over-confident one-hot answers.",
})


def distiller_module_bad():
    state = pretrained_state(8, 24, proto_seed=110, noise=1.2, steps=60)
    torch.manual_seed(0)

    class Distiller(nn.Module):
        def __init__(self, teacher, student):
            super().__init__()
            self.teacher, self.student = teacher, student

        def forward(self, x):
            target = self.teacher(x)
            return F.mse_loss(self.student(x), target)

    x, y = pattern_images(512, 8, seed=113, noise=1.0, proto_seed=110)
    x_test, y_test = pattern_images(256, 8, seed=114, noise=1.0, proto_seed=110)
    batches = forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True, drop_last=True))
    teacher = SmallNet(8, 24)
    teacher.load_state_dict(state)
    model = Distiller(teacher, SmallNet(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        model.teacher.eval()
        (images,) = next(batches)
        optimizer.zero_grad()
        loss = model(images)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model.student(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def distiller_module_good():
    state = pretrained_state(8, 24, proto_seed=110, noise=1.2, steps=60)
    torch.manual_seed(0)

    class Distiller(nn.Module):
        def __init__(self, teacher, student):
            super().__init__()
            self.teacher, self.student = teacher, student

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return F.mse_loss(self.student(x), target)

    x, y = pattern_images(512, 8, seed=113, noise=1.0, proto_seed=110)
    x_test, y_test = pattern_images(256, 8, seed=114, noise=1.0, proto_seed=110)
    batches = forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True, drop_last=True))
    teacher = SmallNet(8, 24)
    teacher.load_state_dict(state)
    teacher.requires_grad_(False)
    model = Distiller(teacher, SmallNet(8, 8))
    optimizer = torch.optim.Adam(model.student.parameters(), lr=3e-3)

    def step(i):
        model.train()
        model.teacher.eval()
        (images,) = next(batches)
        optimizer.zero_grad()
        loss = model(images)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model.student(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'distiller_module',
    "field": 'knowledge distillation',
    "what": 'The teacher is not frozen: the optimizer takes all parameters of the distiller and the loss flows into the teacher too, which is pulled to the untrained student and forgets.',
})


def new_head_finetune_bad():
    state = pretrained_state(10, 20, proto_seed=120)
    torch.manual_seed(0)
    x, y = pattern_images(256, 4, seed=121, noise=0.6, proto_seed=121)
    x_test, y_test = pattern_images(192, 4, seed=122, noise=0.6, proto_seed=121)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = SmallNet(10, 20)
    model.load_state_dict(state)
    for p in model.features.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    model.fc = nn.Linear(model.fc.in_features, 4)

    def step(i):
        model.train()
        model.features.eval()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def new_head_finetune_good():
    state = pretrained_state(10, 20, proto_seed=120)
    torch.manual_seed(0)
    x, y = pattern_images(256, 4, seed=121, noise=0.6, proto_seed=121)
    x_test, y_test = pattern_images(192, 4, seed=122, noise=0.6, proto_seed=121)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = SmallNet(10, 20)
    model.load_state_dict(state)
    for p in model.features.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 4)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def step(i):
        model.train()
        model.features.eval()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'new_head_finetune',
    "field": 'fine-tuning of vision models',
    "what": "The optimizer is built before the classification head is exchanged, so it holds the old head's parameters and the new head is never updated.",
})


def checkpoint_finetune_bad():
    state = pretrained_state(12, 20, proto_seed=130)
    torch.manual_seed(0)
    checkpoint = {"epoch": 90, "state_dict": {"module." + k: v for k, v in state.items()}}
    x, y = pattern_images(96, 12, seed=131, noise=1.1, proto_seed=130)
    y = y % 6
    x_test, y_test = pattern_images(256, 12, seed=132, noise=1.1, proto_seed=130)
    y_test = y_test % 6
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = SmallNet(6, 20)
    weights = {k: v for k, v in checkpoint["state_dict"].items() if "fc" not in k}
    model.load_state_dict(weights, strict=False)
    optimizer = torch.optim.SGD([
        {"params": model.features.parameters(), "lr": 2e-3},
        {"params": model.fc.parameters(), "lr": 2e-2},
    ], momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def checkpoint_finetune_good():
    state = pretrained_state(12, 20, proto_seed=130)
    torch.manual_seed(0)
    checkpoint = {"epoch": 90, "state_dict": {"module." + k: v for k, v in state.items()}}
    x, y = pattern_images(96, 12, seed=131, noise=1.1, proto_seed=130)
    y = y % 6
    x_test, y_test = pattern_images(256, 12, seed=132, noise=1.1, proto_seed=130)
    y_test = y_test % 6
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = SmallNet(6, 20)
    weights = {k.removeprefix("module."): v for k, v in checkpoint["state_dict"].items() if "fc" not in k}
    model.load_state_dict(weights, strict=False)
    optimizer = torch.optim.SGD([
        {"params": model.features.parameters(), "lr": 2e-3},
        {"params": model.fc.parameters(), "lr": 2e-2},
    ], momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'checkpoint_finetune',
    "field": 'fine-tuning of vision models',
    "what": "The checkpoint's keys carry a 'module.' prefix and are loaded with strict=False, so no weight is loaded and the fine-tuning starts from random weights.",
})


class ResidualDenoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )

    def forward(self, x):
        return x - self.net(x)


def image_denoiser_bad():
    torch.manual_seed(0)

    class NoisyPairs(Dataset):
        def __init__(self, clean, sigma):
            self.clean, self.sigma = clean, sigma

        def __len__(self):
            return len(self.clean)

        def __getitem__(self, k):
            clean = self.clean[k]
            noisy = clean + self.sigma * torch.randn(clean.shape)
            return noisy.unsqueeze(0), clean

    clean = smooth_images(384, seed=141).squeeze(1)
    clean_test = smooth_images(96, seed=142).squeeze(1)
    noisy_test = clean_test + 0.25 * torch.randn(clean_test.shape, generator=rng(143))
    batches = forever(DataLoader(NoisyPairs(clean, 0.25), batch_size=16, shuffle=True, drop_last=True))
    model = ResidualDenoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def charbonnier(a, b, eps=1e-3):
        return torch.sqrt((a - b) ** 2 + eps ** 2).mean()

    def step(i):
        model.train()
        noisy, target = next(batches)
        optimizer.zero_grad()
        out = model(noisy)
        loss = charbonnier(out, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(noisy_test.unsqueeze(1)).squeeze(1)
            return (out - clean_test).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def image_denoiser_good():
    torch.manual_seed(0)

    class NoisyPairs(Dataset):
        def __init__(self, clean, sigma):
            self.clean, self.sigma = clean, sigma

        def __len__(self):
            return len(self.clean)

        def __getitem__(self, k):
            clean = self.clean[k]
            noisy = clean + self.sigma * torch.randn(clean.shape)
            return noisy.unsqueeze(0), clean

    clean = smooth_images(384, seed=141).squeeze(1)
    clean_test = smooth_images(96, seed=142).squeeze(1)
    noisy_test = clean_test + 0.25 * torch.randn(clean_test.shape, generator=rng(143))
    batches = forever(DataLoader(NoisyPairs(clean, 0.25), batch_size=16, shuffle=True, drop_last=True))
    model = ResidualDenoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def charbonnier(a, b, eps=1e-3):
        return torch.sqrt((a - b) ** 2 + eps ** 2).mean()

    def step(i):
        model.train()
        noisy, target = next(batches)
        optimizer.zero_grad()
        out = model(noisy)
        loss = charbonnier(out.squeeze(1), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            out = model(noisy_test.unsqueeze(1)).squeeze(1)
            return (out - clean_test).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'image_denoiser',
    "field": 'super-resolution and denoising',
    "what": 'The output is (B, 1, H, W) and the clean target (B, H, W): the hand-written loss broadcasts them to (B, B, H, W) and compares each output with all targets of the batch.',
})


def upscaler_bad():
    torch.manual_seed(0)
    scale, patch = 2, 12

    class Patches(Dataset):
        def __init__(self, low, high):
            self.low, self.high = low, high

        def __len__(self):
            return len(self.low)

        def __getitem__(self, k):
            low, high = self.low[k], self.high[k]
            top, left = torch.randint(0, low.size(-1) - patch + 1, (2,)).tolist()
            low = low[:, top:top + patch, left:left + patch]
            size = patch * scale
            high = high[:, top:top + size, left:left + size]
            return low, high

    high = smooth_images(192, seed=151, size=40, channels=3, freq=16)
    high_test = smooth_images(32, seed=152, size=40, channels=3, freq=16)
    low, low_test = F.avg_pool2d(high, scale), F.avg_pool2d(high_test, scale)
    batches = forever(DataLoader(Patches(low, high), batch_size=16, shuffle=True, drop_last=True))
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 3 * scale ** 2, 3, padding=1), nn.PixelShuffle(scale),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        lr_patch, hr_patch = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(lr_patch), hr_patch)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(low_test) - high_test).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def upscaler_good():
    torch.manual_seed(0)
    scale, patch = 2, 12

    class Patches(Dataset):
        def __init__(self, low, high):
            self.low, self.high = low, high

        def __len__(self):
            return len(self.low)

        def __getitem__(self, k):
            low, high = self.low[k], self.high[k]
            top, left = torch.randint(0, low.size(-1) - patch + 1, (2,)).tolist()
            low = low[:, top:top + patch, left:left + patch]
            size = patch * scale
            high = high[:, top * scale:top * scale + size, left * scale:left * scale + size]
            return low, high

    high = smooth_images(192, seed=151, size=40, channels=3, freq=16)
    high_test = smooth_images(32, seed=152, size=40, channels=3, freq=16)
    low, low_test = F.avg_pool2d(high, scale), F.avg_pool2d(high_test, scale)
    batches = forever(DataLoader(Patches(low, high), batch_size=16, shuffle=True, drop_last=True))
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 3 * scale ** 2, 3, padding=1), nn.PixelShuffle(scale),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        lr_patch, hr_patch = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(lr_patch), hr_patch)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(low_test) - high_test).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": 'upscaler',
    "field": 'super-resolution and denoising',
    "what": 'The high-resolution crop uses the low-resolution offsets without multiplying them by the scale, so the two patches of a pair show different parts of the image.',
})
