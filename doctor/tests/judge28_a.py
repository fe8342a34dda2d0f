"""Small synthetic training programs for vision, audio and generative models."""
import copy
import functools
import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


# ----------------------------------------------------------------- helpers

@contextmanager
def evaluating(*models):
    flags = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            yield
    finally:
        for m, flag in flags:
            m.training = flag


def endless(loader):
    while True:
        yield from loader


def rng(seed):
    return torch.Generator().manual_seed(seed)


def draw_shapes(n, h, w, seed, rmin=3.5, rmax=6.5, noise=0.1):
    g = rng(seed)

    def u():
        return torch.rand(n, 1, 1, generator=g)

    ys = torch.arange(h, dtype=torch.float32).view(1, h, 1)
    xs = torch.arange(w, dtype=torch.float32).view(1, 1, w)
    r = rmin + (rmax - rmin) * u()
    cx = r + (w - 1 - 2 * r) * u()
    cy = r + (h - 1 - 2 * r) * u()
    dx, dy = (xs - cx).abs(), (ys - cy).abs()
    big, d2 = torch.maximum(dx, dy), dx ** 2 + dy ** 2
    kinds = torch.stack([
        big <= r,
        d2 <= r ** 2,
        dx + dy <= r,
        (big <= r) & (torch.minimum(dx, dy) <= r / 4),
        (d2 <= r ** 2) & (d2 >= 0.4 * r ** 2),
    ], 1)
    label = torch.randint(0, 5, (n,), generator=g)
    mask = kinds[torch.arange(n), label].float()
    fg = 0.5 + 0.5 * torch.rand(n, 3, 1, 1, generator=g)
    bg = 0.5 * torch.rand(n, 3, 1, 1, generator=g)
    image = bg + mask.unsqueeze(1) * (fg - bg)
    image = (image + noise * torch.randn(n, 3, h, w, generator=g)).clamp(0, 1)
    box = torch.cat([cx - r, cy - r, cx + r, cy + r], 1).view(n, 4)
    return image, label, mask, box


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True))


class SmallNet(nn.Module):
    def __init__(self, num_classes=5, width=16, cin=3):
        super().__init__()
        self.features = nn.Sequential(
            conv_bn(cin, width), conv_bn(width, 2 * width, 2),
            conv_bn(2 * width, 4 * width, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, num_classes)

    def embed(self, x):
        return self.pool(self.features(x)).flatten(1)

    def forward(self, x):
        return self.fc(self.embed(x))


def box_iou_pairs(a, b):
    lt = torch.maximum(a[:, :2], b[:, :2])
    rb = torch.minimum(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area = lambda t: (t[:, 2:] - t[:, :2]).clamp(min=0).prod(1)
    return inter / (area(a) + area(b) - inter).clamp(min=1e-6)


def sliced_distance(a, b, seed=99, count=64):
    a, b = a.flatten(1), b.flatten(1)
    d = torch.randn(a.shape[1], count, generator=rng(seed))
    d = d / d.norm(dim=0)
    return ((a @ d).sort(0)[0] - (b @ d).sort(0)[0]).abs().mean().item()


CASES = []


# --------------------------------------------------- image classification
CASES.append({
    "name": "img_thumbs",
    "field": "image classification",
    "what": "HWC image batches are brought to NCHW with view() instead of permute(), so pixels and colours are scrambled over channels and the convolutions see torn images.",
})


class ThumbSet(Dataset):
    def __init__(self, n, seed):
        image, self.labels, _, _ = draw_shapes(n, 24, 24, seed, noise=0.12)
        self.images = (image.permute(0, 2, 3, 1) * 255).to(torch.uint8).contiguous()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def img_thumbs_bad():
    torch.manual_seed(0)
    train, test = ThumbSet(1200, 1), ThumbSet(500, 2)
    model = SmallNet(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))

    def to_input(images):
        n, h, w, c = images.shape
        x = images.view(n, c, h, w)
        return (x.float() / 255 - 0.4) / 0.3

    def step(i):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(to_input(images)), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(to_input(test.images)).argmax(1)
            return (pred != test.labels).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def img_thumbs_good():
    torch.manual_seed(0)
    train, test = ThumbSet(1200, 1), ThumbSet(500, 2)
    model = SmallNet(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = endless(DataLoader(train, batch_size=32, shuffle=True, drop_last=True))

    def to_input(images):
        n, h, w, c = images.shape
        x = images.permute(0, 3, 1, 2).contiguous()
        return (x.float() / 255 - 0.4) / 0.3

    def step(i):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(to_input(images)), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(to_input(test.images)).argmax(1)
            return (pred != test.labels).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "img_recipe",
    "field": "image classification",
    "what": "A scheduler meant to be stepped once per epoch is stepped after every batch, so the learning rate decays to nothing within the first epochs and training stalls.",
})


def img_recipe_bad():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(1024, 20, 20, 3, noise=0.1)
    test_x, test_y, _, _ = draw_shapes(500, 20, 20, 4, noise=0.1)
    loader = DataLoader(TensorDataset(image - 0.4, label), batch_size=32, shuffle=True)
    batches = endless(loader)
    model = SmallNet(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(test_x - 0.4).argmax(1)
            return (pred != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def img_recipe_good():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(1024, 20, 20, 3, noise=0.1)
    test_x, test_y, _, _ = draw_shapes(500, 20, 20, 4, noise=0.1)
    loader = DataLoader(TensorDataset(image - 0.4, label), batch_size=32, shuffle=True)
    batches = endless(loader)
    model = SmallNet(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(test_x - 0.4).argmax(1)
            return (pred != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "img_holdout",
    "field": "image classification",
    "what": "The validation pass inside the loop puts the model in eval mode and nobody calls train() again, so dropout is off and BatchNorm normalises with stale running statistics during training.",
})


class DropNet(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.features = nn.Sequential(
            conv_bn(3, 16), conv_bn(16, 24, 2), conv_bn(24, 32),
            conv_bn(32, 32, 2), conv_bn(32, 32))
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, num_classes))

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def img_holdout_bad():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(800, 20, 20, 5)
    val_x, val_y, _, _ = draw_shapes(64, 20, 20, 6)
    test_x, test_y, _, _ = draw_shapes(500, 20, 20, 7)
    batches = endless(DataLoader(TensorDataset(image - 0.4, label), batch_size=32, shuffle=True))
    model = DropNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            acc = (model(val_x - 0.4).argmax(1) == val_y).float().mean().item()
        history.append(acc)

    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 25 == 0:
            validate()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(test_x - 0.4).argmax(1)
            return (pred != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def img_holdout_good():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(800, 20, 20, 5)
    val_x, val_y, _, _ = draw_shapes(64, 20, 20, 6)
    test_x, test_y, _, _ = draw_shapes(500, 20, 20, 7)
    batches = endless(DataLoader(TensorDataset(image - 0.4, label), batch_size=32, shuffle=True))
    model = DropNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            acc = (model(val_x - 0.4).argmax(1) == val_y).float().mean().item()
        history.append(acc)
        model.train()

    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 25 == 0:
            validate()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(test_x - 0.4).argmax(1)
            return (pred != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# -------------------------------------------------------------- detection
CASES.append({
    "name": "det_grid",
    "field": "detection",
    "what": "The box regression loss is averaged over all grid cells instead of only the cells that hold an object, so zero targets of empty cells dominate and the boxes come out poor.",
})


class GridDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 16, 2), conv_bn(16, 32, 2), conv_bn(32, 48, 2), conv_bn(48, 48))
        self.obj = nn.Conv2d(48, 1, 1)
        self.box = nn.Conv2d(48, 4, 1)

    def forward(self, x):
        f = self.body(x)
        return self.obj(f).squeeze(1), self.box(f)


def encode_grid(box, grid, stride):
    n = len(box)
    cx, cy = (box[:, 0] + box[:, 2]) / 2, (box[:, 1] + box[:, 3]) / 2
    bw, bh = box[:, 2] - box[:, 0], box[:, 3] - box[:, 1]
    gx = (cx / stride).long().clamp(0, grid - 1)
    gy = (cy / stride).long().clamp(0, grid - 1)
    obj = torch.zeros(n, grid, grid)
    reg = torch.zeros(n, 4, grid, grid)
    k = torch.arange(n)
    obj[k, gy, gx] = 1
    reg[k, :, gy, gx] = torch.stack(
        [cx / stride - gx, cy / stride - gy, (bw / stride).log(), (bh / stride).log()], 1)
    return obj, reg


def decode_grid(obj, reg, stride):
    n, grid, _ = obj.shape
    best = obj.flatten(1).argmax(1)
    gy, gx = best // grid, best % grid
    t = reg[torch.arange(n), :, gy, gx]
    cx, cy = (gx + t[:, 0]) * stride, (gy + t[:, 1]) * stride
    bw, bh = t[:, 2].exp() * stride, t[:, 3].exp() * stride
    return torch.stack([cx - bw / 2, cy - bh / 2, cx + bw / 2, cy + bh / 2], 1)


def det_grid_bad():
    torch.manual_seed(0)
    image, _, _, box = draw_shapes(1000, 40, 40, 11, rmin=3, rmax=12)
    test_x, _, _, test_box = draw_shapes(300, 40, 40, 12, rmin=3, rmax=12)
    obj_t, reg_t = encode_grid(box, 5, 8)
    batches = endless(DataLoader(TensorDataset(image - 0.4, obj_t, reg_t), batch_size=24, shuffle=True))
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, obj, reg = next(batches)
        optimizer.zero_grad()
        obj_p, reg_p = model(x)
        obj_loss = F.binary_cross_entropy_with_logits(obj_p, obj)
        reg_loss = F.smooth_l1_loss(reg_p, reg, reduction="none").sum(1)
        reg_loss = reg_loss.mean()
        loss = obj_loss + reg_loss
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            obj_p, reg_p = model(test_x - 0.4)
            return 1 - box_iou_pairs(decode_grid(obj_p, reg_p, 8), test_box).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_grid_good():
    torch.manual_seed(0)
    image, _, _, box = draw_shapes(1000, 40, 40, 11, rmin=3, rmax=12)
    test_x, _, _, test_box = draw_shapes(300, 40, 40, 12, rmin=3, rmax=12)
    obj_t, reg_t = encode_grid(box, 5, 8)
    batches = endless(DataLoader(TensorDataset(image - 0.4, obj_t, reg_t), batch_size=24, shuffle=True))
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, obj, reg = next(batches)
        optimizer.zero_grad()
        obj_p, reg_p = model(x)
        obj_loss = F.binary_cross_entropy_with_logits(obj_p, obj)
        reg_loss = F.smooth_l1_loss(reg_p, reg, reduction="none").sum(1)
        reg_loss = reg_loss[obj > 0].mean()
        loss = obj_loss + reg_loss
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            obj_p, reg_p = model(test_x - 0.4)
            return 1 - box_iou_pairs(decode_grid(obj_p, reg_p, 8), test_box).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "det_wide",
    "field": "detection",
    "what": "Boxes of wide images are normalised with (h, w, h, w) instead of (w, h, w, h), so x and y targets are scaled by the wrong side and predicted boxes are off.",
})


class BoxSet(Dataset):
    def __init__(self, image, box, normalise):
        self.image, self.box, self.normalise = image, box, normalise

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i] - 0.4, self.normalise(self.box[i], self.image[i].shape)


class BoxNet(nn.Module):
    def __init__(self, h, w):
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 16, 2), conv_bn(16, 24, 2), conv_bn(24, 32, 2))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * (h // 8) * (w // 8), 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.head(self.body(x))


def det_wide_bad():
    torch.manual_seed(0)
    h, w = 24, 48
    image, _, _, box = draw_shapes(1000, h, w, 13, rmin=4, rmax=9)
    test_x, _, _, test_box = draw_shapes(300, h, w, 14, rmin=4, rmax=9)

    def normalise(box, shape):
        _, height, width = shape
        return box / torch.tensor([height, width, height, width], dtype=torch.float32)

    loader = DataLoader(BoxSet(image, box, normalise), batch_size=32, shuffle=True, drop_last=True)
    batches = endless(loader)
    model = BoxNet(h, w)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, target = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(test_x - 0.4) * torch.tensor([w, h, w, h], dtype=torch.float32)
            return 1 - box_iou_pairs(pred, test_box).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_wide_good():
    torch.manual_seed(0)
    h, w = 24, 48
    image, _, _, box = draw_shapes(1000, h, w, 13, rmin=4, rmax=9)
    test_x, _, _, test_box = draw_shapes(300, h, w, 14, rmin=4, rmax=9)

    def normalise(box, shape):
        _, height, width = shape
        return box / torch.tensor([width, height, width, height], dtype=torch.float32)

    loader = DataLoader(BoxSet(image, box, normalise), batch_size=32, shuffle=True, drop_last=True)
    batches = endless(loader)
    model = BoxNet(h, w)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, target = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(test_x - 0.4) * torch.tensor([w, h, w, h], dtype=torch.float32)
            return 1 - box_iou_pairs(pred, test_box).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------- segmentation
CASES.append({
    "name": "seg_resize",
    "field": "segmentation",
    "what": "Label maps are resized with bilinear interpolation instead of nearest, so class ids are averaged into ids of other classes along every border and in thin parts.",
})


class UNetSmall(nn.Module):
    def __init__(self, classes, width=12):
        super().__init__()
        self.enc1 = conv_bn(3, width)
        self.enc2 = conv_bn(width, 2 * width, 2)
        self.mid = conv_bn(2 * width, 2 * width)
        self.dec = conv_bn(3 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.mid(self.enc2(a))
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.out(self.dec(torch.cat([a, b], 1)))


def mean_iou_error(pred, target, classes):
    scores = []
    for c in range(classes):
        p, t = pred == c, target == c
        scores.append((p & t).sum().item() / max((p | t).sum().item(), 1))
    return 1 - sum(scores) / len(scores)


def crowded_scene(n, size, seed):
    palette = torch.tensor([[.1, .1, .1], [.9, .2, .2], [.2, .9, .2], [.2, .3, .9], [.9, .8, .2]])
    g = rng(seed)
    ys = torch.arange(size).view(1, size, 1).float()
    xs = torch.arange(size).view(1, 1, size).float()
    label = torch.zeros(n, size, size, dtype=torch.long)
    for _ in range(4):
        cx, cy = (torch.rand(2, n, 1, 1, generator=g) * size).unbind(0)
        r = 3 + 4 * torch.rand(n, 1, 1, generator=g)
        hit = (xs - cx) ** 2 + (ys - cy) ** 2 <= r ** 2
        kind = torch.randint(1, 5, (n, 1, 1), generator=g)
        label = torch.where(hit, kind, label)
    image = palette[label].permute(0, 3, 1, 2)
    image = image + 0.15 * torch.randn(image.shape, generator=g)
    return image, label


class ResizedScenes(Dataset):
    def __init__(self, n, seed, size, resize_label):
        self.image, self.label = crowded_scene(n, 40, seed)
        self.size, self.resize_label = size, resize_label

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        image = F.interpolate(self.image[i][None], size=self.size, mode="bilinear", align_corners=False)[0]
        label = self.label[i][None, None].float()
        return image - 0.3, self.resize_label(label, self.size)[0, 0].long()


def seg_resize_bad():
    torch.manual_seed(0)
    size = (24, 24)

    def resize_label(label, size):
        return F.interpolate(label, size=size, mode="bilinear", align_corners=False)

    train = ResizedScenes(400, 21, size, resize_label)
    batches = endless(DataLoader(train, batch_size=16, shuffle=True))
    image, label = crowded_scene(120, 40, 22)
    test_x = F.interpolate(image, size=size, mode="bilinear", align_corners=False) - 0.3
    test_y = F.interpolate(label[:, None].float(), size=size, mode="nearest")[:, 0].long()
    model = UNetSmall(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(test_x).argmax(1), test_y, 5)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_resize_good():
    torch.manual_seed(0)
    size = (24, 24)

    def resize_label(label, size):
        return F.interpolate(label, size=size, mode="nearest")

    train = ResizedScenes(400, 21, size, resize_label)
    batches = endless(DataLoader(train, batch_size=16, shuffle=True))
    image, label = crowded_scene(120, 40, 22)
    test_x = F.interpolate(image, size=size, mode="bilinear", align_corners=False) - 0.3
    test_y = F.interpolate(label[:, None].float(), size=size, mode="nearest")[:, 0].long()
    model = UNetSmall(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(test_x).argmax(1), test_y, 5)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "seg_void",
    "field": "segmentation",
    "what": "Pixels marked void (255) are clamped into the class range to silence an index error instead of being ignored, so a real class is trained on unlabelled pixels.",
})


def void_scenes(n, seed):
    image, label = crowded_scene(n, 24, seed)
    g = rng(seed + 1000)
    coarse = (torch.rand(n, 1, 6, 6, generator=g) < 0.45).float()
    void = F.interpolate(coarse, size=(24, 24), mode="nearest")[:, 0] > 0
    return image - 0.3, label, torch.where(void, torch.full_like(label, 255), label)


def seg_void_bad():
    torch.manual_seed(0)
    image, _, label = void_scenes(400, 25)
    test_x, test_y, _ = void_scenes(120, 26)
    batches = endless(DataLoader(TensorDataset(image, label), batch_size=16, shuffle=True))
    model = UNetSmall(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y.clamp(max=4))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(test_x).argmax(1), test_y, 5)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_void_good():
    torch.manual_seed(0)
    image, _, label = void_scenes(400, 25)
    test_x, test_y, _ = void_scenes(120, 26)
    batches = endless(DataLoader(TensorDataset(image, label), batch_size=16, shuffle=True))
    model = UNetSmall(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, ignore_index=255)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return mean_iou_error(model(test_x).argmax(1), test_y, 5)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------------- key points
CASES.append({
    "name": "kp_flip",
    "field": "key points",
    "what": "The horizontal flip mirrors image and x coordinates but does not swap the left/right key points, so left and right are contradicted in half of the samples.",
})


def draw_faces(n, size, seed):
    g = rng(seed)
    base = torch.tensor([[-.45, -.4], [.45, -.4], [0., .05], [-.35, .5], [.35, .5]])
    scale = size * (0.22 + 0.1 * torch.rand(n, 1, 1, generator=g))
    angle = 0.5 * (torch.rand(n, generator=g) - 0.5)
    rot = torch.stack([torch.stack([angle.cos(), -angle.sin()], 1),
                       torch.stack([angle.sin(), angle.cos()], 1)], 1)
    centre = size * (0.35 + 0.3 * torch.rand(n, 1, 2, generator=g))
    pts = base @ rot.transpose(1, 2) * scale + centre
    ys = torch.arange(size).view(1, size, 1).float()
    xs = torch.arange(size).view(1, 1, size).float()
    d2 = (xs - centre[..., :1]) ** 2 + (ys - centre[..., 1:]) ** 2
    image = 0.6 * (d2 <= scale ** 2).float()
    for k in range(5):
        p = pts[:, k].view(n, 2, 1, 1)
        depth = 0.5 if k < 2 else 0.3
        image = image - depth * torch.exp(-((xs - p[:, 0]) ** 2 + (ys - p[:, 1]) ** 2) / 2)
    image = image + 0.05 * torch.randn(n, size, size, generator=g)
    return image[:, None], pts / size


FLIP_PAIRS = [1, 0, 2, 4, 3]


class PointNet(nn.Module):
    def __init__(self, points=5):
        super().__init__()
        self.body = nn.Sequential(conv_bn(1, 12, 2), conv_bn(12, 24, 2), conv_bn(24, 32, 2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 2 * points))

    def forward(self, x):
        return self.head(self.body(x)).view(len(x), -1, 2)


class FlippedFaces(Dataset):
    def __init__(self, image, points, flip):
        self.image, self.points, self.flip = image, points, flip

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        image, points = self.image[i], self.points[i]
        if torch.rand(()) < 0.5:
            image, points = self.flip(image, points)
        return image, points


def kp_flip_bad():
    torch.manual_seed(0)
    image, points = draw_faces(800, 32, 31)
    test_x, test_p = draw_faces(300, 32, 32)

    def flip(image, points):
        image = image.flip(-1)
        points = torch.stack([31 / 32 - points[:, 0], points[:, 1]], 1)
        return image, points

    batches = endless(DataLoader(FlippedFaces(image, points, flip), batch_size=32, shuffle=True))
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, p = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), p)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return ((model(test_x) - test_p) * 32).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def kp_flip_good():
    torch.manual_seed(0)
    image, points = draw_faces(800, 32, 31)
    test_x, test_p = draw_faces(300, 32, 32)

    def flip(image, points):
        image = image.flip(-1)
        points = torch.stack([31 / 32 - points[:, 0], points[:, 1]], 1)
        points = points[FLIP_PAIRS]
        return image, points

    batches = endless(DataLoader(FlippedFaces(image, points, flip), batch_size=32, shuffle=True))
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, p = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), p)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return ((model(test_x) - test_p) * 32).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "kp_heat",
    "field": "key points",
    "what": "Target heatmaps are drawn at half resolution with full-resolution coordinates, so most Gaussians fall outside the map or on the wrong place.",
})


class HeatNet(nn.Module):
    def __init__(self, points=5):
        super().__init__()
        self.net = nn.Sequential(
            conv_bn(1, 16, 2), conv_bn(16, 24), conv_bn(24, 24, 2), conv_bn(24, 24),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), conv_bn(24, 24))
        self.out = nn.Conv2d(24, points, 1)

    def forward(self, x):
        return self.out(self.net(x))


def gaussian_maps(centres, size, sigma=1.0):
    axis = torch.arange(size, dtype=torch.float32)
    gx = torch.exp(-(axis - centres[..., :1]) ** 2 / (2 * sigma ** 2))
    gy = torch.exp(-(axis - centres[..., 1:]) ** 2 / (2 * sigma ** 2))
    return gy.unsqueeze(-1) * gx.unsqueeze(-2)


def kp_heat_bad():
    torch.manual_seed(0)
    image, points = draw_faces(600, 32, 33)
    test_x, test_p = draw_faces(200, 32, 34)
    batches = endless(DataLoader(TensorDataset(image, points * 32), batch_size=24, shuffle=True))
    model = HeatNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    stride = 2

    def step(i):
        x, pixels = next(batches)
        target = gaussian_maps(pixels, 32 // stride)
        optimizer.zero_grad()
        loss = 10 * F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            heat = model(test_x)
            best = heat.flatten(2).argmax(-1)
            pred = torch.stack([best % heat.shape[-1], best // heat.shape[-1]], -1).float() * stride
            return (pred - test_p * 32).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def kp_heat_good():
    torch.manual_seed(0)
    image, points = draw_faces(600, 32, 33)
    test_x, test_p = draw_faces(200, 32, 34)
    batches = endless(DataLoader(TensorDataset(image, points * 32), batch_size=24, shuffle=True))
    model = HeatNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    stride = 2

    def step(i):
        x, pixels = next(batches)
        target = gaussian_maps(pixels / stride, 32 // stride)
        optimizer.zero_grad()
        loss = 10 * F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            heat = model(test_x)
            best = heat.flatten(2).argmax(-1)
            pred = torch.stack([best % heat.shape[-1], best // heat.shape[-1]], -1).float() * stride
            return (pred - test_p * 32).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------- audio/speech
CASES.append({
    "name": "aud_ctc",
    "field": "audio/speech",
    "what": "CTCLoss keeps its default blank=0 although the vocabulary has the blank as last class, so token 0 serves as blank in training and the decoder prints it everywhere.",
})


VOCAB = 6


def tone_sequences(n, frames, bins, seed):
    g = rng(seed)
    length = torch.randint(3, 6, (n,), generator=g)
    tokens = torch.zeros(n, 5, dtype=torch.long)
    spec = 0.3 * torch.randn(n, frames, bins, generator=g)
    for k in range(n):
        t = 1
        for j in range(int(length[k])):
            tok = int(torch.randint(0, VOCAB, (1,), generator=g))
            dur = int(torch.randint(3, 6, (1,), generator=g))
            spec[k, t:t + dur, 2 * tok:2 * tok + 3] += 1
            tokens[k, j] = tok
            t += dur + int(torch.randint(1, 4, (1,), generator=g))
    return spec, tokens, length


class SpeechNet(nn.Module):
    def __init__(self, bins, classes):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(bins, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU())
        self.gru = nn.GRU(32, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, classes)

    def forward(self, x):
        h = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.out(self.gru(h)[0])


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (x != y))
    return row[-1]


def greedy_decode(ids, blank):
    out, last = [], None
    for t in ids:
        if t != last and t != blank:
            out.append(t)
        last = t
    return out


def aud_ctc_bad():
    torch.manual_seed(0)
    frames, bins = 42, 14
    spec, tokens, length = tone_sequences(320, frames, bins, 41)
    test_spec, test_tok, test_len = tone_sequences(80, frames, bins, 42)
    batches = endless(DataLoader(TensorDataset(spec, tokens, length), batch_size=16, shuffle=True))
    model = SpeechNet(bins, VOCAB + 1)
    criterion = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        x, y, y_len = next(batches)
        optimizer.zero_grad()
        log_probs = model(x).log_softmax(-1).transpose(0, 1)
        x_len = torch.full((len(x),), log_probs.shape[0], dtype=torch.long)
        loss = criterion(log_probs, y, x_len, y_len)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            ids = model(test_spec).argmax(-1).tolist()
        errors = sum(edit_distance(greedy_decode(ids[k], VOCAB), test_tok[k, :test_len[k]].tolist())
                     for k in range(len(ids)))
        return errors / test_len.sum().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def aud_ctc_good():
    torch.manual_seed(0)
    frames, bins = 42, 14
    spec, tokens, length = tone_sequences(320, frames, bins, 41)
    test_spec, test_tok, test_len = tone_sequences(80, frames, bins, 42)
    batches = endless(DataLoader(TensorDataset(spec, tokens, length), batch_size=16, shuffle=True))
    model = SpeechNet(bins, VOCAB + 1)
    criterion = nn.CTCLoss(blank=VOCAB, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        x, y, y_len = next(batches)
        optimizer.zero_grad()
        log_probs = model(x).log_softmax(-1).transpose(0, 1)
        x_len = torch.full((len(x),), log_probs.shape[0], dtype=torch.long)
        loss = criterion(log_probs, y, x_len, y_len)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            ids = model(test_spec).argmax(-1).tolist()
        errors = sum(edit_distance(greedy_decode(ids[k], VOCAB), test_tok[k, :test_len[k]].tolist())
                     for k in range(len(ids)))
        return errors / test_len.sum().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "aud_rate",
    "field": "audio/speech",
    "what": "The mean over time of padded clips runs over the padding too, so the pooled features depend on how much the batch was padded and single clips at test time are misjudged.",
})


class ClipSet(Dataset):
    def __init__(self, n, seed):
        g = rng(seed)
        self.items = []
        for _ in range(n):
            t = int(torch.randint(20, 100, (1,), generator=g))
            rate = 0.05 + 0.4 * torch.rand((), generator=g)
            onset = (torch.rand(t, generator=g) < rate).float()
            spec = 0.3 * torch.randn(t, 12, generator=g)
            spec[:, 3:9] += onset[:, None]
            self.items.append((spec, onset.mean()))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def pad_clips(items):
    length = torch.tensor([len(s) for s, _ in items])
    spec = nn.utils.rnn.pad_sequence([s for s, _ in items], batch_first=True)
    return spec, length, torch.stack([r for _, r in items])


def aud_rate_bad():
    torch.manual_seed(0)
    train, test = ClipSet(500, 43), ClipSet(80, 44)
    batches = endless(DataLoader(train, batch_size=16, shuffle=True, collate_fn=pad_clips))

    class RateNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(12, 24, 3, padding=1), nn.ReLU(),
                nn.Conv1d(24, 24, 1), nn.ReLU())
            self.out = nn.Linear(24, 1)

        def forward(self, spec, length):
            h = self.conv(spec.transpose(1, 2))
            pooled = h.mean(-1)
            return self.out(pooled).squeeze(-1)

    model = RateNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        spec, length, rate = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(spec, length), rate)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            errors = [(model(s[None], torch.tensor([len(s)]))[0] - r).abs() for s, r in test.items]
            return torch.stack(errors).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def aud_rate_good():
    torch.manual_seed(0)
    train, test = ClipSet(500, 43), ClipSet(80, 44)
    batches = endless(DataLoader(train, batch_size=16, shuffle=True, collate_fn=pad_clips))

    class RateNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(12, 24, 3, padding=1), nn.ReLU(),
                nn.Conv1d(24, 24, 1), nn.ReLU())
            self.out = nn.Linear(24, 1)

        def forward(self, spec, length):
            h = self.conv(spec.transpose(1, 2))
            valid = (torch.arange(h.shape[-1]) < length[:, None]).float().unsqueeze(1)
            pooled = (h * valid).sum(-1) / valid.sum(-1)
            return self.out(pooled).squeeze(-1)

    model = RateNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        spec, length, rate = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(model(spec, length), rate)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            errors = [(model(s[None], torch.tensor([len(s)]))[0] - r).abs() for s, r in test.items]
            return torch.stack(errors).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "aud_pitch",
    "field": "audio/speech",
    "what": "Predictions of shape (B, 1) are subtracted from targets of shape (B,), so the squared error is broadcast to (B, B) and the net learns only the mean pitch.",
})


def pitch_clips(n, seed):
    g = rng(seed)
    octave = 2 * torch.rand(n, generator=g)
    f0 = 100 * 2 ** octave
    t = torch.arange(256) / 2000.0
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    wave = torch.sin(2 * math.pi * f0[:, None] * t + phase)
    wave = wave + 0.4 * torch.sin(4 * math.pi * f0[:, None] * t + 2 * phase)
    wave = wave + 0.2 * torch.randn(n, 256, generator=g)
    return wave[:, None], octave - 1


class PitchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 24, 33, 4, padding=16, bias=False), nn.BatchNorm1d(24), nn.ReLU(),
            nn.Conv1d(24, 32, 5, 2, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(self.conv(x))


def aud_pitch_bad():
    torch.manual_seed(0)
    wave, pitch = pitch_clips(1000, 45)
    test_wave, test_pitch = pitch_clips(300, 46)
    batches = endless(DataLoader(TensorDataset(wave, pitch), batch_size=32, shuffle=True))
    model = PitchNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        pred = model(x)
        loss = ((pred - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(test_wave).squeeze(1) - test_pitch).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def aud_pitch_good():
    torch.manual_seed(0)
    wave, pitch = pitch_clips(1000, 45)
    test_wave, test_pitch = pitch_clips(300, 46)
    batches = endless(DataLoader(TensorDataset(wave, pitch), batch_size=32, shuffle=True))
    model = PitchNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        pred = model(x)
        loss = ((pred.squeeze(1) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(test_wave).squeeze(1) - test_pitch).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------------ generative models
CASES.append({
    "name": "gen_wgan",
    "field": "generative models",
    "what": "The gradient of the WGAN gradient penalty is taken without create_graph=True, so the penalty is a constant, the critic is unconstrained and the generator gets useless gradients.",
})


def blob_images(n, seed, size=10):
    g = rng(seed)
    angle = 2 * math.pi * torch.rand(n, 1, 1, generator=g)
    radius = 2.2 + 0.3 * torch.randn(n, 1, 1, generator=g)
    cx = (size - 1) / 2 + radius * angle.cos()
    cy = (size - 1) / 2 + radius * angle.sin()
    ys = torch.arange(size).view(1, size, 1).float()
    xs = torch.arange(size).view(1, 1, size).float()
    return torch.exp(-((xs - cx) ** 2 + (ys - cy) ** 2) / 4).flatten(1)


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def gen_wgan_bad():
    torch.manual_seed(0)
    real_data = blob_images(2000, 51)
    test = blob_images(500, 52)
    batches = endless(DataLoader(TensorDataset(real_data), batch_size=64, shuffle=True, drop_last=True))
    netG = mlp(8, 64, 64, 100)
    netD = mlp(100, 64, 64, 1, act=lambda: nn.LeakyReLU(0.2))
    opt_g = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def gradient_penalty(real, fake):
        alpha = torch.rand(len(real), 1)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = netD(mixed)
        grad = torch.autograd.grad(
            outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score),
            retain_graph=True)[0]
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(3):
            real, = next(batches)
            fake = netG(torch.randn(len(real), 8)).detach()
            opt_d.zero_grad()
            d_loss = netD(fake).mean() - netD(real).mean() + 10 * gradient_penalty(real, fake)
            d_loss.backward()
            opt_d.step()
        opt_g.zero_grad()
        g_loss = -netD(netG(torch.randn(64, 8))).mean()
        g_loss.backward()
        opt_g.step()
        return d_loss.item()

    def probe():
        with evaluating(netG, netD):
            return sliced_distance(netG(torch.randn(500, 8, generator=rng(5))), test)

    return {"model": {"generator": netG, "critic": netD}, "optimizer": [opt_g, opt_d],
            "steps": 20, "step": step, "probe": probe}


def gen_wgan_good():
    torch.manual_seed(0)
    real_data = blob_images(2000, 51)
    test = blob_images(500, 52)
    batches = endless(DataLoader(TensorDataset(real_data), batch_size=64, shuffle=True, drop_last=True))
    netG = mlp(8, 64, 64, 100)
    netD = mlp(100, 64, 64, 1, act=lambda: nn.LeakyReLU(0.2))
    opt_g = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def gradient_penalty(real, fake):
        alpha = torch.rand(len(real), 1)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = netD(mixed)
        grad = torch.autograd.grad(
            outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score),
            create_graph=True, retain_graph=True)[0]
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(3):
            real, = next(batches)
            fake = netG(torch.randn(len(real), 8)).detach()
            opt_d.zero_grad()
            d_loss = netD(fake).mean() - netD(real).mean() + 10 * gradient_penalty(real, fake)
            d_loss.backward()
            opt_d.step()
        opt_g.zero_grad()
        g_loss = -netD(netG(torch.randn(64, 8))).mean()
        g_loss.backward()
        opt_g.step()
        return d_loss.item()

    def probe():
        with evaluating(netG, netD):
            return sliced_distance(netG(torch.randn(500, 8, generator=rng(5))), test)

    return {"model": {"generator": netG, "critic": netD}, "optimizer": [opt_g, opt_d],
            "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "gen_vae",
    "field": "generative models",
    "what": "The latent is drawn with Normal.sample() instead of rsample(), so no reconstruction gradient reaches the encoder, the posterior collapses to the prior and the decoder paints the mean image.",
})


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = mlp(100, 64, 2 * latent)
        self.decoder = mlp(latent, 64, 64, 100)
        self.latent = latent


def gen_vae_bad():
    torch.manual_seed(0)
    data, test = blob_images(2000, 53), blob_images(500, 54)
    batches = endless(DataLoader(TensorDataset(data), batch_size=64, shuffle=True))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def draw_latent(mu, logvar):
        posterior = torch.distributions.Normal(mu, torch.exp(0.5 * logvar))
        return posterior.sample()

    def step(i):
        x, = next(batches)
        optimizer.zero_grad()
        mu, logvar = model.encoder(x).chunk(2, dim=1)
        recon = model.decoder(draw_latent(mu, logvar))
        recon_loss = 10 * F.mse_loss(recon, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1).mean()
        loss = recon_loss + kl
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return sliced_distance(model.decoder(torch.randn(500, 4, generator=rng(6))), test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gen_vae_good():
    torch.manual_seed(0)
    data, test = blob_images(2000, 53), blob_images(500, 54)
    batches = endless(DataLoader(TensorDataset(data), batch_size=64, shuffle=True))
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def draw_latent(mu, logvar):
        posterior = torch.distributions.Normal(mu, torch.exp(0.5 * logvar))
        return posterior.rsample()

    def step(i):
        x, = next(batches)
        optimizer.zero_grad()
        mu, logvar = model.encoder(x).chunk(2, dim=1)
        recon = model.decoder(draw_latent(mu, logvar))
        recon_loss = 10 * F.mse_loss(recon, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1).mean()
        loss = recon_loss + kl
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return sliced_distance(model.decoder(torch.randn(500, 4, generator=rng(6))), test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "gen_ddpm",
    "field": "generative models",
    "what": "The loss compares the prediction with freshly drawn noise because q_sample draws its own noise when none is passed, so the target is unpredictable and the net learns to output zero.",
})


class Denoiser(nn.Module):
    def __init__(self, dim=100, steps=50):
        super().__init__()
        self.time = nn.Embedding(steps, 32)
        self.inp = nn.Linear(dim, 128)
        self.emb = nn.Linear(32, 128)
        self.mid = nn.Linear(128, 128)
        self.out = nn.Linear(128, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.emb(self.time(t)))
        return self.out(F.silu(self.mid(h)))


def gen_ddpm_bad():
    torch.manual_seed(0)
    data, test = blob_images(2000, 55) * 2 - 1, blob_images(500, 56) * 2 - 1
    batches = endless(DataLoader(TensorDataset(data), batch_size=64, shuffle=True))
    T = 50
    betas = torch.linspace(2e-3, 0.2, T)
    alphas = 1 - betas
    alpha_bar = alphas.cumprod(0)
    model = Denoiser(100, T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def step(i):
        x0, = next(batches)
        t = torch.randint(0, T, (len(x0),))
        noise = torch.randn_like(x0)
        x_t = q_sample(x0, t)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x_t, t), noise)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        g = rng(7)
        with evaluating(model):
            x = torch.randn(400, 100, generator=g)
            for k in reversed(range(T)):
                eps = model(x, torch.full((400,), k))
                x = (x - betas[k] / (1 - alpha_bar[k]).sqrt() * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * torch.randn(400, 100, generator=g)
            return sliced_distance(x, test[:400])

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gen_ddpm_good():
    torch.manual_seed(0)
    data, test = blob_images(2000, 55) * 2 - 1, blob_images(500, 56) * 2 - 1
    batches = endless(DataLoader(TensorDataset(data), batch_size=64, shuffle=True))
    T = 50
    betas = torch.linspace(2e-3, 0.2, T)
    alphas = 1 - betas
    alpha_bar = alphas.cumprod(0)
    model = Denoiser(100, T)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def step(i):
        x0, = next(batches)
        t = torch.randint(0, T, (len(x0),))
        noise = torch.randn_like(x0)
        x_t = q_sample(x0, t, noise)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x_t, t), noise)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        g = rng(7)
        with evaluating(model):
            x = torch.randn(400, 100, generator=g)
            for k in reversed(range(T)):
                eps = model(x, torch.full((400,), k))
                x = (x - betas[k] / (1 - alpha_bar[k]).sqrt() * eps) / alphas[k].sqrt()
                if k > 0:
                    x = x + betas[k].sqrt() * torch.randn(400, 100, generator=g)
            return sliced_distance(x, test[:400])

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------- contrastive and self-supervised
CASES.append({
    "name": "ssl_views",
    "field": "contrastive and self-supervised",
    "what": "The augmentation is drawn once and used for both views, so positives are identical, the invariance to the augmentation is never learned and features encode colour instead of shape.",
})


def augment(x):
    n, c, h, w = x.shape
    gain = 0.3 + 1.2 * torch.rand(n, c, 1, 1)
    shift = 0.8 * (torch.rand(n, c, 1, 1) - 0.5)
    flip = torch.rand(n, 1, 1, 1) < 0.5
    sign = torch.where(torch.rand(n, 1, 1, 1) < 0.5, 1.0, -1.0)
    x = torch.where(flip, x.flip(-1), x)
    mean = x.mean((2, 3), keepdim=True)
    roll = torch.randint(-4, 5, (2,)).tolist()
    x = torch.roll(x, roll, (2, 3))
    return sign * (x - mean) * gain + mean + shift + 0.05 * torch.randn_like(x)


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            conv_bn(3, 16), conv_bn(16, 32, 2), conv_bn(32, 48, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = mlp(48, 48, 32)

    def forward(self, x):
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def nt_xent(z1, z2, temperature=0.2):
    n = len(z1)
    z = torch.cat([z1, z2])
    sim = z @ z.t() / temperature
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


def knn_error(train_f, train_y, test_f, test_y, k=5):
    train_f, test_f = F.normalize(train_f, dim=1), F.normalize(test_f, dim=1)
    near = (test_f @ train_f.t()).topk(k, dim=1)[1]
    votes = F.one_hot(train_y[near], int(train_y.max()) + 1).sum(1)
    return (votes.argmax(1) != test_y).float().mean().item() + 1e-3


def ssl_views_bad():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(1500, 16, 16, 61, noise=0.05)
    test_x, test_y, _, _ = draw_shapes(400, 16, 16, 62, noise=0.05)
    batches = endless(DataLoader(TensorDataset(image), batch_size=48, shuffle=True, drop_last=True))
    model = SimCLR()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, = next(batches)
        view = augment(x)
        v1, v2 = view, view
        optimizer.zero_grad()
        loss = nt_xent(model(v1), model(v2))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return knn_error(model.backbone(image[:800]), label[:800], model.backbone(test_x), test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ssl_views_good():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(1500, 16, 16, 61, noise=0.05)
    test_x, test_y, _, _ = draw_shapes(400, 16, 16, 62, noise=0.05)
    batches = endless(DataLoader(TensorDataset(image), batch_size=48, shuffle=True, drop_last=True))
    model = SimCLR()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, = next(batches)
        v1, v2 = augment(x), augment(x)
        optimizer.zero_grad()
        loss = nt_xent(model(v1), model(v2))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return knn_error(model.backbone(image[:800]), label[:800], model.backbone(test_x), test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "ssl_patches",
    "field": "contrastive and self-supervised",
    "what": "The reconstruction loss of a masked autoencoder is taken on the visible patches instead of the masked ones, so filling in hidden content is never trained.",
})


def grating_images(n, seed, size=16):
    g = rng(seed)
    angle = math.pi * torch.rand(n, 1, 1, generator=g)
    freq = 0.4 + 0.5 * torch.rand(n, 1, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, 1, generator=g)
    ys = torch.arange(size).view(1, size, 1).float()
    xs = torch.arange(size).view(1, 1, size).float()
    image = torch.sin(freq * (angle.cos() * xs + angle.sin() * ys) + phase)
    return image[:, None] + 0.05 * torch.randn(n, 1, size, size, generator=g)


class TinyMAE(nn.Module):
    def __init__(self, dim=48, patch=4, tokens=16):
        super().__init__()
        self.embed = nn.Linear(patch * patch, dim)
        self.mask_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(tokens, dim) * 0.2)
        self.blocks = nn.Sequential(*[
            nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, patch * patch)

    def forward(self, patches, mask):
        x = self.embed(patches)
        x = torch.where(mask.unsqueeze(-1).bool(), self.mask_token, x) + self.pos
        return self.head(self.norm(self.blocks(x)))


def to_patches(x, p=4):
    return F.unfold(x, p, stride=p).transpose(1, 2)


def random_mask(n, tokens, hidden, generator=None):
    order = torch.rand(n, tokens, generator=generator).argsort(1)
    return (order < hidden).float()


def ssl_patches_bad():
    torch.manual_seed(0)
    data = to_patches(grating_images(1500, 63))
    test = to_patches(grating_images(300, 64))
    batches = endless(DataLoader(TensorDataset(data), batch_size=32, shuffle=True))
    model = TinyMAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        patches, = next(batches)
        mask = random_mask(len(patches), 16, 7)
        optimizer.zero_grad()
        error = ((model(patches, mask) - patches) ** 2).mean(-1)
        loss = (error * (1 - mask)).sum() / (1 - mask).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        mask = random_mask(300, 16, 7, rng(8))
        with evaluating(model):
            error = ((model(test, mask) - test) ** 2).mean(-1)
            return ((error * mask).sum() / mask.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ssl_patches_good():
    torch.manual_seed(0)
    data = to_patches(grating_images(1500, 63))
    test = to_patches(grating_images(300, 64))
    batches = endless(DataLoader(TensorDataset(data), batch_size=32, shuffle=True))
    model = TinyMAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        patches, = next(batches)
        mask = random_mask(len(patches), 16, 7)
        optimizer.zero_grad()
        error = ((model(patches, mask) - patches) ** 2).mean(-1)
        loss = (error * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        mask = random_mask(300, 16, 7, rng(8))
        with evaluating(model):
            error = ((model(test, mask) - test) ** 2).mean(-1)
            return ((error * mask).sum() / mask.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ------------------------------------------------- knowledge distillation
CASES.append({
    "name": "kd_cache",
    "field": "knowledge distillation",
    "what": "Cached teacher logits are read by batch position while the loader shuffles, so every sample is taught with the soft labels of another sample.",
})


@functools.lru_cache(maxsize=None)
def _pretrain(seed, steps, width, size):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        image, label, _, _ = draw_shapes(2000, size, size, seed, noise=0.08)
        net = SmallNet(5, width)
        opt = torch.optim.Adam(net.parameters(), lr=4e-3)
        for k in range(steps):
            pick = torch.randint(0, 2000, (48,))
            opt.zero_grad()
            F.cross_entropy(net(image[pick] - 0.4), label[pick]).backward()
            opt.step()
    return net.state_dict()


def pretrained(seed=71, steps=90, width=14, size=16):
    net = SmallNet(5, width)
    net.load_state_dict(copy.deepcopy(_pretrain(seed, steps, width, size)))
    return net


class IndexedSet(Dataset):
    def __init__(self, image, label):
        self.image, self.label = image, label

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.image[i], self.label[i], i


def kd_cache_bad():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(960, 16, 16, 72, noise=0.08)
    test_x, test_y, _, _ = draw_shapes(500, 16, 16, 73, noise=0.08)
    image, test_x = image - 0.4, test_x - 0.4
    teacher = pretrained().eval().requires_grad_(False)
    with torch.no_grad():
        cache = teacher(image)
    size = 32
    loader = DataLoader(IndexedSet(image, label), batch_size=size, shuffle=True)
    batches = endless(loader)
    student = SmallNet(5, 8)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    tau = 2.0

    def step(i):
        x, y, index = next(batches)
        j = i % len(loader)
        soft = cache[j * size:(j + 1) * size]
        optimizer.zero_grad()
        logits = student(x)
        kd = F.kl_div(F.log_softmax(logits / tau, 1), F.softmax(soft / tau, 1), reduction="batchmean") * tau ** 2
        loss = 0.8 * kd + 0.2 * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(test_x), test_y).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def kd_cache_good():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(960, 16, 16, 72, noise=0.08)
    test_x, test_y, _, _ = draw_shapes(500, 16, 16, 73, noise=0.08)
    image, test_x = image - 0.4, test_x - 0.4
    teacher = pretrained().eval().requires_grad_(False)
    with torch.no_grad():
        cache = teacher(image)
    size = 32
    loader = DataLoader(IndexedSet(image, label), batch_size=size, shuffle=True)
    batches = endless(loader)
    student = SmallNet(5, 8)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    tau = 2.0

    def step(i):
        x, y, index = next(batches)
        soft = cache[index]
        optimizer.zero_grad()
        logits = student(x)
        kd = F.kl_div(F.log_softmax(logits / tau, 1), F.softmax(soft / tau, 1), reduction="batchmean") * tau ** 2
        loss = 0.8 * kd + 0.2 * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(test_x), test_y).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "kd_prob",
    "field": "knowledge distillation",
    "what": "F.kl_div gets the student's probabilities instead of its log-probabilities, so the term is not a divergence and pushes the student to one-hot outputs instead of the teacher's distribution.",
})


def kd_prob_bad():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(960, 16, 16, 74, noise=0.08)
    test_x, test_y, _, _ = draw_shapes(500, 16, 16, 75, noise=0.08)
    batches = endless(DataLoader(TensorDataset(image - 0.4, label), batch_size=32, shuffle=True))
    teacher = pretrained().eval().requires_grad_(False)
    student = SmallNet(5, 8)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    tau = 3.0

    def step(i):
        x, y = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / tau, dim=1)
        optimizer.zero_grad()
        logits = student(x)
        kd = F.kl_div(F.softmax(logits / tau, dim=1), soft, reduction="batchmean") * tau ** 2
        loss = 0.9 * kd + 0.1 * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(teacher, student):
            p = F.log_softmax(teacher(test_x - 0.4), 1)
            q = F.log_softmax(student(test_x - 0.4), 1)
            return F.kl_div(q, p, reduction="batchmean", log_target=True).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


def kd_prob_good():
    torch.manual_seed(0)
    image, label, _, _ = draw_shapes(960, 16, 16, 74, noise=0.08)
    test_x, test_y, _, _ = draw_shapes(500, 16, 16, 75, noise=0.08)
    batches = endless(DataLoader(TensorDataset(image - 0.4, label), batch_size=32, shuffle=True))
    teacher = pretrained().eval().requires_grad_(False)
    student = SmallNet(5, 8)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    tau = 3.0

    def step(i):
        x, y = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / tau, dim=1)
        optimizer.zero_grad()
        logits = student(x)
        kd = F.kl_div(F.log_softmax(logits / tau, dim=1), soft, reduction="batchmean") * tau ** 2
        loss = 0.9 * kd + 0.1 * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(teacher, student):
            p = F.log_softmax(teacher(test_x - 0.4), 1)
            q = F.log_softmax(student(test_x - 0.4), 1)
            return F.kl_div(q, p, reduction="batchmean", log_target=True).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


# ------------------------------------------- fine-tuning of vision models
CASES.append({
    "name": "ft_prefix",
    "field": "fine-tuning of vision models",
    "what": "A checkpoint saved from DataParallel is loaded with strict=False without stripping the module. prefix, so no weight matches and fine-tuning starts from scratch.",
})


def few_shot(n, seed, size=16):
    image, label, _, _ = draw_shapes(n, size, size, seed, noise=0.08)
    stripes = 0.15 * torch.sin(torch.arange(size) * 1.3).view(1, 1, 1, size)
    return image + stripes - 0.4, (label + 2) % 5


def ft_prefix_bad():
    torch.manual_seed(0)
    checkpoint = {"state_dict": {"module." + k: v for k, v in pretrained().state_dict().items()}}
    train_x, train_y = few_shot(100, 81)
    test_x, test_y = few_shot(500, 82)
    batches = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=20, shuffle=True))
    model = SmallNet(5, 14)
    state = checkpoint["state_dict"]
    state = {k: v for k, v in state.items() if "fc." not in k}
    model.load_state_dict(state, strict=False)
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.Adam([
        {"params": model.features.parameters(), "lr": 3e-4},
        {"params": model.fc.parameters(), "lr": 5e-3}])

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ft_prefix_good():
    torch.manual_seed(0)
    checkpoint = {"state_dict": {"module." + k: v for k, v in pretrained().state_dict().items()}}
    train_x, train_y = few_shot(100, 81)
    test_x, test_y = few_shot(500, 82)
    batches = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=20, shuffle=True))
    model = SmallNet(5, 14)
    state = checkpoint["state_dict"]
    state = {k.removeprefix("module."): v for k, v in state.items()}
    state = {k: v for k, v in state.items() if "fc." not in k}
    model.load_state_dict(state, strict=False)
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.Adam([
        {"params": model.features.parameters(), "lr": 3e-4},
        {"params": model.fc.parameters(), "lr": 5e-3}])

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "ft_head",
    "field": "fine-tuning of vision models",
    "what": "The classifier is replaced after the optimizer was built, so the optimizer holds the old layer and the new head stays at its random initialisation.",
})


def ft_head_bad():
    torch.manual_seed(0)
    train_x, train_y = few_shot(150, 83)
    test_x, test_y = few_shot(500, 84)
    batches = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=25, shuffle=True))
    model = pretrained()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
    model.fc = nn.Linear(model.fc.in_features, 5)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ft_head_good():
    torch.manual_seed(0)
    train_x, train_y = few_shot(150, 83)
    test_x, test_y = few_shot(500, 84)
    batches = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=25, shuffle=True))
    model = pretrained()
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(test_x), test_y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES.append({
    "name": "ft_freeze",
    "field": "fine-tuning of vision models",
    "what": "The backbone is meant to be frozen but the loop sets a misspelt attribute (require_grad), so it stays trainable and the large learning rate of the head destroys the pretrained features.",
})


def ft_freeze_bad():
    torch.manual_seed(0)
    train_x, train_y = few_shot(60, 85)
    test_x, test_y = few_shot(500, 86)
    batches = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=20, shuffle=True))
    model = pretrained()
    for p in model.features.parameters():
        p.require_grad = False
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)

    def step(i):
        x, y = next(batches)
        model.train()
        model.features.eval()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ft_freeze_good():
    torch.manual_seed(0)
    train_x, train_y = few_shot(60, 85)
    test_x, test_y = few_shot(500, 86)
    batches = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=20, shuffle=True))
    model = pretrained()
    for p in model.features.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)

    def step(i):
        x, y = next(batches)
        model.train()
        model.features.eval()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(test_x).argmax(1) != test_y).float().mean().item() + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
