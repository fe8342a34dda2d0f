import math
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


@contextmanager
def evaluating(*nets):
    modes = [(m, m.training) for net in nets for m in net.modules()]
    for net in nets:
        net.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride, 1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


def gratings(n, classes, size, seed, noise=0.5, jitter=0.05):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    theta = y * math.pi / classes + jitter * torch.randn(n, generator=g)
    phase = 2 * math.pi * torch.rand(n, generator=g)
    freq = 0.9 + 0.3 * torch.rand(n, generator=g)
    r = torch.arange(size).float()
    yy, xx = torch.meshgrid(r, r, indexing="ij")
    wave = torch.cos(theta)[:, None, None] * xx + torch.sin(theta)[:, None, None] * yy
    wave = torch.sin(freq[:, None, None] * wave + phase[:, None, None])
    colour = 0.4 + 0.6 * torch.rand(n, 3, 1, 1, generator=g)
    x = wave[:, None] * colour + noise * torch.randn(n, 3, size, size, generator=g)
    return x, y


def stamps(n, classes, size, seed, noise=0.3, side=5):
    proto = (torch.rand(classes, side, side, generator=torch.Generator().manual_seed(77)) > 0.5).float()
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    x = noise * torch.randn(n, 1, size, size, generator=g)
    top = torch.randint(size - side + 1, (n, 2), generator=g)
    for i in range(n):
        a, b = top[i].tolist()
        x[i, 0, a:a + side, b:b + side] += proto[y[i]]
    return x, y


def rectangles(n, size, seed, lo=6, hi=14, noise=0.15):
    g = torch.Generator().manual_seed(seed)
    wh = torch.randint(lo, hi + 1, (n, 2), generator=g)
    pos = (torch.rand(n, 2, generator=g) * (size - wh + 1)).long()
    label = torch.randint(3, (n,), generator=g)
    x = noise * torch.randn(n, 3, size, size, generator=g)
    for i in range(n):
        (w, h), (x0, y0) = wh[i].tolist(), pos[i].tolist()
        x[i, label[i], y0:y0 + h, x0:x0 + w] += 1.0
    boxes = torch.cat([pos + wh / 2, wh.float()], 1) / size
    return x, boxes, label


def box_iou_cxcywh(a, b):
    a0, a1 = a[:, :2] - a[:, 2:] / 2, a[:, :2] + a[:, 2:] / 2
    b0, b1 = b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2
    inter = (torch.min(a1, b1) - torch.max(a0, b0)).clamp(min=0).prod(1)
    union = a[:, 2:].prod(1) + b[:, 2:].prod(1) - inter
    return inter / union.clamp(min=1e-6)


class SmallCNN(nn.Module):
    def __init__(self, cin, classes, width=16):
        super().__init__()
        self.features = nn.Sequential(
            conv_bn(cin, width), conv_bn(width, 2 * width, 2), conv_bn(2 * width, 2 * width, 2)
        )
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


def mixup_gratings_bad():
    torch.manual_seed(0)
    train = TensorDataset(*gratings(1024, 8, 16, seed=1))
    x_test, y_test = gratings(400, 8, 16, seed=2)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = SmallCNN(3, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    beta = torch.distributions.Beta(0.4, 0.4)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        lam = beta.sample()
        index = torch.randperm(x.size(0))
        mixed = lam * x + (1 - lam) * x[index]
        optimizer.zero_grad()
        out = model(mixed)
        loss = (1 - lam) * F.cross_entropy(out, y) + lam * F.cross_entropy(out, y[index])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mixup_gratings_good():
    torch.manual_seed(0)
    train = TensorDataset(*gratings(1024, 8, 16, seed=1))
    x_test, y_test = gratings(400, 8, 16, seed=2)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = SmallCNN(3, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    beta = torch.distributions.Beta(0.4, 0.4)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        lam = beta.sample()
        index = torch.randperm(x.size(0))
        mixed = lam * x + (1 - lam) * x[index]
        optimizer.zero_grad()
        out = model(mixed)
        loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def stamp_classifier_bad():
    torch.manual_seed(0)
    train = TensorDataset(*stamps(1024, 10, 14, seed=3))
    x_test, y_test = stamps(400, 10, 14, seed=4)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = SmallCNN(1, 10, width=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[8, 16], gamma=0.1)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def stamp_classifier_good():
    torch.manual_seed(0)
    train = TensorDataset(*stamps(1024, 10, 14, seed=3))
    x_test, y_test = stamps(400, 10, 14, seed=4)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = SmallCNN(1, 10, width=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[8, 16], gamma=0.1)
    batches = cycle(loader)

    def step(i):
        model.train()
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
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class GridDetector(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(3, 16, 2), conv_bn(16, 32, 2), conv_bn(32, 32), conv_bn(32, 32)
        )
        self.head = nn.Conv2d(32, 5 + classes, 1)

    def forward(self, x):
        return self.head(self.body(x)).permute(0, 2, 3, 1)


def decode_grid(out):
    b, s = out.size(0), out.size(1)
    best = out[..., 4].reshape(b, -1).argmax(1)
    gj, gi = torch.div(best, s, rounding_mode="floor"), best % s
    cell = out[torch.arange(b), gj, gi]
    xy = (cell[:, :2].sigmoid() + torch.stack([gi, gj], 1)) / s
    return torch.cat([xy, cell[:, 2:4].exp() / s], 1), cell[:, 5:]


def grid_detector_bad():
    torch.manual_seed(0)
    train = TensorDataset(*rectangles(768, 32, seed=5))
    x_test, box_test, _ = rectangles(200, 32, seed=6)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def build_targets(boxes, s):
        n = boxes.size(0)
        gxy = boxes[:, :2] * s
        gi, gj = gxy.long().clamp(max=s - 1).unbind(1)
        index = (torch.arange(n), gi, gj)
        obj = torch.zeros(n, s, s)
        obj[index] = 1.0
        txy = gxy - gxy.floor()
        twh = (boxes[:, 2:] * s).log()
        return obj, index, txy, twh

    def step(i):
        model.train()
        x, boxes, labels = next(batches)
        optimizer.zero_grad()
        out = model(x)
        obj, index, txy, twh = build_targets(boxes, out.size(1))
        hit = out[index]
        loss_obj = F.binary_cross_entropy_with_logits(out[..., 4], obj, pos_weight=torch.tensor(10.0))
        loss_xy = F.mse_loss(hit[:, :2].sigmoid(), txy)
        loss_wh = F.smooth_l1_loss(hit[:, 2:4], twh)
        loss_cls = F.cross_entropy(hit[:, 5:], labels)
        loss = loss_obj + 2 * loss_xy + 2 * loss_wh + loss_cls
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            boxes, _ = decode_grid(model(x_test))
            return 1.0 - box_iou_cxcywh(boxes, box_test).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def grid_detector_good():
    torch.manual_seed(0)
    train = TensorDataset(*rectangles(768, 32, seed=5))
    x_test, box_test, _ = rectangles(200, 32, seed=6)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def build_targets(boxes, s):
        n = boxes.size(0)
        gxy = boxes[:, :2] * s
        gi, gj = gxy.long().clamp(max=s - 1).unbind(1)
        index = (torch.arange(n), gj, gi)
        obj = torch.zeros(n, s, s)
        obj[index] = 1.0
        txy = gxy - gxy.floor()
        twh = (boxes[:, 2:] * s).log()
        return obj, index, txy, twh

    def step(i):
        model.train()
        x, boxes, labels = next(batches)
        optimizer.zero_grad()
        out = model(x)
        obj, index, txy, twh = build_targets(boxes, out.size(1))
        hit = out[index]
        loss_obj = F.binary_cross_entropy_with_logits(out[..., 4], obj, pos_weight=torch.tensor(10.0))
        loss_xy = F.mse_loss(hit[:, :2].sigmoid(), txy)
        loss_wh = F.smooth_l1_loss(hit[:, 2:4], twh)
        loss_cls = F.cross_entropy(hit[:, 5:], labels)
        loss = loss_obj + 2 * loss_xy + 2 * loss_wh + loss_cls
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            boxes, _ = decode_grid(model(x_test))
            return 1.0 - box_iou_cxcywh(boxes, box_test).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class CenterDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 16, 2), conv_bn(16, 32, 2), conv_bn(32, 32), conv_bn(32, 32))
        self.heat = nn.Conv2d(32, 1, 1)
        self.size = nn.Conv2d(32, 2, 1)
        nn.init.constant_(self.heat.bias, -2.19)

    def forward(self, x):
        f = self.body(x)
        return self.heat(f), self.size(f)


class CenterDataset(Dataset):
    def __init__(self, n, seed, stride=4):
        self.x, self.boxes, _ = rectangles(n, 32, seed=seed)
        self.grid = 32 // stride

    def __len__(self):
        return len(self.x)

    def __getitem__(self, idx):
        s = self.grid
        cx, cy, w, h = self.boxes[idx].tolist()
        ix, iy = min(int(cx * s), s - 1), min(int(cy * s), s - 1)
        r = torch.arange(s).float()
        heat = torch.exp(-((r[None, :] - ix) ** 2 + (r[:, None] - iy) ** 2) / 2.0)
        size = torch.zeros(2, s, s)
        size[:, iy, ix] = torch.tensor([w * s, h * s])
        mask = torch.zeros(1, s, s)
        mask[0, iy, ix] = 1.0
        return self.x[idx], heat[None], size, mask


def centernet_focal(logits, heat):
    p = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
    pos = heat.eq(1).float()
    pos_loss = -(p.log() * (1 - p) ** 2 * pos).sum()
    neg_loss = -((1 - p).log() * p ** 2 * (1 - heat) ** 4 * (1 - pos)).sum()
    return (pos_loss + neg_loss) / pos.sum().clamp(min=1)


def center_detector_bad():
    torch.manual_seed(0)
    train = CenterDataset(512, seed=7)
    x_test, box_test, _ = rectangles(200, 32, seed=8)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = CenterDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, heat, size, mask = next(batches)
        optimizer.zero_grad()
        heat_out, size_out = model(x)
        loss_heat = centernet_focal(heat_out, heat)
        loss_size = F.l1_loss(size_out, size)
        loss = loss_heat + loss_size
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            heat, size = model(x_test)
            n, s = heat.size(0), heat.size(-1)
            best = heat.reshape(n, -1).argmax(1)
            wh = size.reshape(n, 2, -1)[torch.arange(n), :, best].clamp(min=0.05) / s
            cy = (torch.div(best, s, rounding_mode="floor") + 0.5) / s
            cx = (best % s + 0.5) / s
            boxes = torch.cat([torch.stack([cx, cy], 1), wh], 1)
            return 1.0 - box_iou_cxcywh(boxes, box_test).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def center_detector_good():
    torch.manual_seed(0)
    train = CenterDataset(512, seed=7)
    x_test, box_test, _ = rectangles(200, 32, seed=8)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = CenterDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, heat, size, mask = next(batches)
        optimizer.zero_grad()
        heat_out, size_out = model(x)
        loss_heat = centernet_focal(heat_out, heat)
        loss_size = (F.l1_loss(size_out, size, reduction="none") * mask).sum() / (2 * mask.sum())
        loss = loss_heat + loss_size
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            heat, size = model(x_test)
            n, s = heat.size(0), heat.size(-1)
            best = heat.reshape(n, -1).argmax(1)
            wh = size.reshape(n, 2, -1)[torch.arange(n), :, best].clamp(min=0.05) / s
            cy = (torch.div(best, s, rounding_mode="floor") + 0.5) / s
            cx = (best % s + 0.5) / s
            boxes = torch.cat([torch.stack([cx, cy], 1), wh], 1)
            return 1.0 - box_iou_cxcywh(boxes, box_test).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class TinyUNet(nn.Module):
    def __init__(self, cin, classes, width=12):
        super().__init__()
        self.enc1 = conv_bn(cin, width)
        self.enc2 = conv_bn(width, 2 * width, 2)
        self.mid = conv_bn(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.dec = conv_bn(2 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.up(self.mid(self.enc2(a)))
        return self.out(self.dec(torch.cat([a, b], 1)))


PALETTE = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.2, 0.0], [0.0, 1.0, 0.3], [0.2, 0.0, 1.0], [0.9, 0.9, 0.1]])


def scenes(n, size, seed, noise=0.2):
    g = torch.Generator().manual_seed(seed)
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        for _ in range(5):
            w, h = torch.randint(3, 8, (2,), generator=g).tolist()
            x0, y0 = torch.randint(0, size - 8, (2,), generator=g).tolist()
            masks[i, y0:y0 + h, x0:x0 + w] = torch.randint(1, 5, (1,), generator=g).item()
    x = PALETTE[masks].permute(0, 3, 1, 2) + noise * torch.randn(n, 3, size, size, generator=g)
    return x.contiguous(), masks


def miou_error(pred, target, classes=5):
    ious = []
    for c in range(classes):
        inter = ((pred == c) & (target == c)).sum().float()
        union = ((pred == c) | (target == c)).sum().float()
        ious.append(inter / union.clamp(min=1))
    return 1.0 - torch.stack(ious).mean().item()


class SceneDataset(Dataset):
    def __init__(self, images, masks, transform=None):
        self.images, self.masks, self.transform = images, masks, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image, mask = self.images[idx], self.masks[idx]
        if self.transform is not None:
            image, mask = self.transform(image, mask)
        return image, mask


def scene_unet_scale_bad():
    torch.manual_seed(0)
    x_test, m_test = scenes(100, 24, seed=10)

    def random_scale_crop(image, mask, out=24):
        size = int(torch.randint(26, 37, (1,)))
        image = F.interpolate(image[None], size=(size, size), mode="bilinear", align_corners=False)[0]
        mask = F.interpolate(mask[None, None].float(), size=(size, size), mode="bilinear", align_corners=False)[0, 0].long()
        y0, x0 = torch.randint(0, size - out + 1, (2,)).tolist()
        return image[:, y0:y0 + out, x0:x0 + out], mask[y0:y0 + out, x0:x0 + out]

    train = SceneDataset(*scenes(300, 24, seed=9), transform=random_scale_crop)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = TinyUNet(3, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, m = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), m)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return miou_error(model(x_test).argmax(1), m_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def scene_unet_scale_good():
    torch.manual_seed(0)
    x_test, m_test = scenes(100, 24, seed=10)

    def random_scale_crop(image, mask, out=24):
        size = int(torch.randint(26, 37, (1,)))
        image = F.interpolate(image[None], size=(size, size), mode="bilinear", align_corners=False)[0]
        mask = F.interpolate(mask[None, None].float(), size=(size, size), mode="nearest")[0, 0].long()
        y0, x0 = torch.randint(0, size - out + 1, (2,)).tolist()
        return image[:, y0:y0 + out, x0:x0 + out], mask[y0:y0 + out, x0:x0 + out]

    train = SceneDataset(*scenes(300, 24, seed=9), transform=random_scale_crop)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = TinyUNet(3, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, m = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), m)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return miou_error(model(x_test).argmax(1), m_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def scene_unet_flat_bad():
    torch.manual_seed(0)
    num_classes = 5
    train = SceneDataset(*scenes(300, 24, seed=11))
    x_test, m_test = scenes(100, 24, seed=12)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = TinyUNet(3, num_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, m = next(batches)
        optimizer.zero_grad()
        logits = model(x)
        flat = logits.reshape(-1, num_classes)
        loss = criterion(flat, m.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return miou_error(model(x_test).argmax(1), m_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def scene_unet_flat_good():
    torch.manual_seed(0)
    num_classes = 5
    train = SceneDataset(*scenes(300, 24, seed=11))
    x_test, m_test = scenes(100, 24, seed=12)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = TinyUNet(3, num_classes)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, m = next(batches)
        optimizer.zero_grad()
        logits = model(x)
        flat = logits.permute(0, 2, 3, 1).reshape(-1, num_classes)
        loss = criterion(flat, m.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return miou_error(model(x_test).argmax(1), m_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def skeletons(n, size, seed, noise=0.15):
    g = torch.Generator().manual_seed(seed)
    centre = 0.35 + 0.3 * torch.rand(n, 2, generator=g)
    angle = 0.6 * torch.randn(n, 4, generator=g) + torch.tensor([0.8, 2.3, 3.9, 5.5])
    length = 0.15 + 0.15 * torch.rand(n, 4, generator=g)
    joints = centre[:, None] + length[..., None] * torch.stack([angle.cos(), angle.sin()], -1)
    joints = joints.clamp(0.05, 0.95)
    visible = (torch.rand(n, 4, generator=g) < 0.65).float()
    r = (torch.arange(size).float() + 0.5) / size
    dy = (r[None, None, :, None] - joints[:, :, 1, None, None]) ** 2
    dx = (r[None, None, None, :] - joints[:, :, 0, None, None]) ** 2
    blobs = torch.exp(-(dx + dy) / (2 * 0.05 ** 2))
    mix = torch.tensor([[1.0, 0.0, 0.0, 0.7], [0.0, 1.0, 0.0, 0.7], [0.0, 0.0, 1.0, 0.3]])
    x = torch.einsum("ck,nkhw->nchw", mix, blobs) + noise * torch.randn(n, 3, size, size, generator=g)
    return x, joints, visible


class PoseDataset(Dataset):
    def __init__(self, n, seed):
        self.x, joints, self.visible = skeletons(n, 24, seed)
        self.joints = joints * self.visible[..., None]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, idx):
        return self.x[idx], self.joints[idx], self.visible[idx]


class PoseNet(nn.Module):
    def __init__(self, joints=4):
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, 16, 2), conv_bn(16, 32, 2), conv_bn(32, 32))
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 2 * joints))

    def forward(self, x):
        return self.fc(self.body(x)).view(x.size(0), -1, 2)


def pose_regression_bad():
    torch.manual_seed(0)
    train = PoseDataset(768, seed=13)
    x_test, j_test, _ = skeletons(200, 24, seed=14)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = PoseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, joints, visible = next(batches)
        optimizer.zero_grad()
        pred = model(x)
        loss = F.smooth_l1_loss(pred, joints, beta=0.1)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - j_test).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pose_regression_good():
    torch.manual_seed(0)
    train = PoseDataset(768, seed=13)
    x_test, j_test, _ = skeletons(200, 24, seed=14)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = PoseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, joints, visible = next(batches)
        optimizer.zero_grad()
        pred = model(x)
        loss = F.smooth_l1_loss(pred, joints, beta=0.1, reduction="none")
        loss = (loss * visible[..., None]).sum() / (2 * visible.sum()).clamp(min=1)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test) - j_test).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def tones(n, seed, length=400, noise=0.3):
    g = torch.Generator().manual_seed(seed)
    f0 = 0.02 + 0.08 * torch.rand(n, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    t = torch.arange(length).float()
    arg = 2 * math.pi * f0[:, None] * t + phase
    wave = torch.sin(arg) + 0.4 * torch.sin(2 * arg) + noise * torch.randn(n, length, generator=g)
    return wave[:, None], (f0 - 0.06) / 0.023


class PitchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 32, 4, bias=False), nn.BatchNorm1d(16), nn.ReLU(),
            nn.Conv1d(16, 32, 5, 2, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 32, 5, 2, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 1),
        )

    def forward(self, wave):
        return self.net(wave)


def pitch_estimator_bad():
    torch.manual_seed(0)
    train = TensorDataset(*tones(1024, seed=15))
    x_test, y_test = tones(300, seed=16)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = PitchNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        wave, f0 = next(batches)
        optimizer.zero_grad()
        pred = model(wave)
        loss = torch.mean((pred - f0) ** 2)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test)[:, 0] - y_test).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pitch_estimator_good():
    torch.manual_seed(0)
    train = TensorDataset(*tones(1024, seed=15))
    x_test, y_test = tones(300, seed=16)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = PitchNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        wave, f0 = next(batches)
        optimizer.zero_grad()
        pred = model(wave).squeeze(1)
        loss = torch.mean((pred - f0) ** 2)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return (model(x_test)[:, 0] - y_test).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def spectrograms(n, classes, seed, bins=20, frames=32, noise=0.7):
    proto = torch.randn(classes, 3, 2, generator=torch.Generator().manual_seed(55))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    t = torch.linspace(-1, 1, frames)
    f = torch.linspace(-1, 1, bins)
    shift = 0.3 * torch.randn(n, 1, generator=g)
    spec = noise * torch.randn(n, bins, frames, generator=g)
    for k in range(3):
        track = 0.6 * torch.tanh(proto[y, k, 0])[:, None] + 0.5 * torch.sin(2.5 * proto[y, k, 1][:, None] * (t + shift))
        spec = spec + torch.exp(-((f[None, :, None] - track[:, None, :]) ** 2) / 0.02)
    return spec, y


class KeywordNet(nn.Module):
    def __init__(self, classes, bins=20):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(bins, 32, 5, padding=2, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 48, 5, 2, padding=2, bias=False), nn.BatchNorm1d(48), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(48, classes),
        )

    def forward(self, spec):
        return self.net(spec)


def keyword_spotter_bad():
    class SpeechCommands(Dataset):
        def __init__(self, features, labels, max_freq=5, max_time=8):
            self.features, self.labels = features, labels
            self.max_freq, self.max_time = max_freq, max_time

        def __len__(self):
            return len(self.features)

        def __getitem__(self, idx):
            spec = self.features[idx]
            f = int(torch.randint(1, self.max_freq + 1, (1,)))
            f0 = int(torch.randint(0, spec.size(0) - f + 1, (1,)))
            spec[f0:f0 + f] = 0.0
            t = int(torch.randint(1, self.max_time + 1, (1,)))
            t0 = int(torch.randint(0, spec.size(1) - t + 1, (1,)))
            spec[:, t0:t0 + t] = 0.0
            return spec, self.labels[idx]

    torch.manual_seed(0)
    train = SpeechCommands(*spectrograms(192, 8, seed=17))
    x_test, y_test = spectrograms(400, 8, seed=18)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model = KeywordNet(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        spec, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(spec), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_spotter_good():
    class SpeechCommands(Dataset):
        def __init__(self, features, labels, max_freq=5, max_time=8):
            self.features, self.labels = features, labels
            self.max_freq, self.max_time = max_freq, max_time

        def __len__(self):
            return len(self.features)

        def __getitem__(self, idx):
            spec = self.features[idx].clone()
            f = int(torch.randint(1, self.max_freq + 1, (1,)))
            f0 = int(torch.randint(0, spec.size(0) - f + 1, (1,)))
            spec[f0:f0 + f] = 0.0
            t = int(torch.randint(1, self.max_time + 1, (1,)))
            t0 = int(torch.randint(0, spec.size(1) - t + 1, (1,)))
            spec[:, t0:t0 + t] = 0.0
            return spec, self.labels[idx]

    torch.manual_seed(0)
    train = SpeechCommands(*spectrograms(192, 8, seed=17))
    x_test, y_test = spectrograms(400, 8, seed=18)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model = KeywordNet(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        spec, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(spec), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moving_dots(n, seed, frames=6, size=14, speed=1.0, noise=0.15):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    direction = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])[y] * speed
    middle = size / 2 + (size / 6) * (2 * torch.rand(n, 2, generator=g) - 1)
    t = torch.arange(frames).float() - (frames - 1) / 2
    pos = middle[:, None] + t[None, :, None] * direction[:, None]
    r = torch.arange(size).float()
    d2 = (r[None, None, :, None] - pos[:, :, 1, None, None]) ** 2 + (r[None, None, None, :] - pos[:, :, 0, None, None]) ** 2
    clips = torch.exp(-d2 / 3.0)[:, :, None] + noise * torch.randn(n, frames, 1, size, size, generator=g)
    return clips, y


class FrameGRU(nn.Module):
    def __init__(self, gru, classes=4):
        super().__init__()
        self.cnn = nn.Sequential(conv_bn(1, 12, 2), conv_bn(12, 16, 2), nn.Flatten(), nn.Linear(16 * 16, 32))
        self.gru = gru
        self.fc = nn.Linear(32, classes)

    def forward(self, clips):
        b, t = clips.shape[:2]
        feats = self.cnn(clips.flatten(0, 1)).view(b, t, -1)
        out, _ = self.gru(feats)
        return self.fc(out[:, -1])


def motion_gru_bad():
    torch.manual_seed(0)
    train = TensorDataset(*moving_dots(640, seed=19))
    x_test, y_test = moving_dots(200, seed=20)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = FrameGRU(nn.GRU(32, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        clips, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def motion_gru_good():
    torch.manual_seed(0)
    train = TensorDataset(*moving_dots(640, seed=19))
    x_test, y_test = moving_dots(200, seed=20)
    loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = FrameGRU(nn.GRU(32, 32, batch_first=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        clips, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class C3D(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv3d(1, 8, 3, (1, 2, 2), 1, bias=False), nn.BatchNorm3d(8), nn.ReLU(),
            nn.Conv3d(8, 16, 3, (2, 1, 1), 1, bias=False), nn.BatchNorm3d(16), nn.ReLU(),
            nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, classes),
        )

    def forward(self, clips):
        return self.net(clips.transpose(1, 2))


def motion_c3d_bad():
    def random_crop(clip, out=14):
        size = clip.size(-1)
        frames = []
        for frame in clip:
            y0, x0 = torch.randint(0, size - out + 1, (2,)).tolist()
            frames.append(frame[:, y0:y0 + out, x0:x0 + out])
        return torch.stack(frames)

    class ClipDataset(Dataset):
        def __init__(self, clips, labels):
            self.clips, self.labels = clips, labels

        def __len__(self):
            return len(self.clips)

        def __getitem__(self, idx):
            return random_crop(self.clips[idx]), self.labels[idx]

    torch.manual_seed(0)
    train = ClipDataset(*moving_dots(512, seed=21, size=20))
    x_test, y_test = moving_dots(200, seed=22, size=20)
    x_test = x_test[..., 3:17, 3:17]
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = C3D()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        clips, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def motion_c3d_good():
    def random_crop(clip, out=14):
        size = clip.size(-1)
        y0, x0 = torch.randint(0, size - out + 1, (2,)).tolist()
        frames = []
        for frame in clip:
            frames.append(frame[:, y0:y0 + out, x0:x0 + out])
        return torch.stack(frames)

    class ClipDataset(Dataset):
        def __init__(self, clips, labels):
            self.clips, self.labels = clips, labels

        def __len__(self):
            return len(self.clips)

        def __getitem__(self, idx):
            return random_crop(self.clips[idx]), self.labels[idx]

    torch.manual_seed(0)
    train = ClipDataset(*moving_dots(512, seed=21, size=20))
    x_test, y_test = moving_dots(200, seed=22, size=20)
    x_test = x_test[..., 3:17, 3:17]
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = C3D()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        clips, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sliced_distance(a, b, directions=64):
    g = torch.Generator().manual_seed(123)
    w = F.normalize(torch.randn(a.size(1), directions, generator=g), dim=0)
    return ((a @ w).sort(0)[0] - (b @ w).sort(0)[0]).abs().mean().item()


def blobs(n, size, seed):
    g = torch.Generator().manual_seed(seed)
    pos = 0.25 + 0.5 * torch.rand(n, 2, generator=g)
    width = 0.08 + 0.1 * torch.rand(n, 1, 1, generator=g)
    r = (torch.arange(size).float() + 0.5) / size
    d2 = (r[None, :, None] - pos[:, 1, None, None]) ** 2 + (r[None, None, :] - pos[:, 0, None, None]) ** 2
    return torch.exp(-d2 / (2 * width ** 2))[:, None]


class Generator(nn.Module):
    def __init__(self, z=16):
        super().__init__()
        self.fc = nn.Linear(z, 32 * 9, bias=False)
        self.net = nn.Sequential(
            nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 32, 3, 3))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(32 * 9, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


def blob_gan_bad():
    torch.manual_seed(0)
    nz = 16
    train = TensorDataset(2 * blobs(1024, 12, seed=23) - 1)
    real_test = 2 * blobs(512, 12, seed=24) - 1
    z_test = torch.randn(512, nz, generator=torch.Generator().manual_seed(25))
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    net_g, net_d = Generator(nz), Discriminator()
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    batches = cycle(loader)

    def step(i):
        net_g.train()
        net_d.train()
        (real,) = next(batches)
        ones, zeros = torch.ones(real.size(0)), torch.zeros(real.size(0))
        fake = net_g(torch.randn(real.size(0), nz))

        opt_g.zero_grad()
        loss_d = criterion(net_d(real), ones) + criterion(net_d(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        loss_g = criterion(net_d(fake), ones)
        loss_g.backward()
        opt_g.step()
        return loss_d.item() + loss_g.item()

    def probe():
        with evaluating(net_g):
            return sliced_distance(net_g(z_test).flatten(1), real_test.flatten(1))

    return {"model": {"generator": net_g, "discriminator": net_d}, "optimizer": [opt_g, opt_d],
            "steps": 20, "step": step, "probe": probe}


def blob_gan_good():
    torch.manual_seed(0)
    nz = 16
    train = TensorDataset(2 * blobs(1024, 12, seed=23) - 1)
    real_test = 2 * blobs(512, 12, seed=24) - 1
    z_test = torch.randn(512, nz, generator=torch.Generator().manual_seed(25))
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    net_g, net_d = Generator(nz), Discriminator()
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    batches = cycle(loader)

    def step(i):
        net_g.train()
        net_d.train()
        (real,) = next(batches)
        ones, zeros = torch.ones(real.size(0)), torch.zeros(real.size(0))
        fake = net_g(torch.randn(real.size(0), nz))

        opt_d.zero_grad()
        loss_d = criterion(net_d(real), ones) + criterion(net_d(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()

        opt_g.zero_grad()
        loss_g = criterion(net_d(fake), ones)
        loss_g.backward()
        opt_g.step()
        return loss_d.item() + loss_g.item()

    def probe():
        with evaluating(net_g):
            return sliced_distance(net_g(z_test).flatten(1), real_test.flatten(1))

    return {"model": {"generator": net_g, "discriminator": net_d}, "optimizer": [opt_g, opt_d],
            "steps": 20, "step": step, "probe": probe}


class VAE(nn.Module):
    def __init__(self, pixels=144, hidden=128, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def encode(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def blob_vae_bad():
    torch.manual_seed(0)
    train = TensorDataset(blobs(1024, 12, seed=26))
    x_test = blobs(300, 12, seed=27)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def elbo_loss(logits, x, mu, logvar):
        recon = F.binary_cross_entropy_with_logits(logits, x.flatten(1))
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        return recon + kl

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = elbo_loss(logits, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mu, _ = model.encode(x_test)
            return F.mse_loss(model.dec(mu).sigmoid(), x_test.flatten(1)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def blob_vae_good():
    torch.manual_seed(0)
    train = TensorDataset(blobs(1024, 12, seed=26))
    x_test = blobs(300, 12, seed=27)
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def elbo_loss(logits, x, mu, logvar):
        recon = F.binary_cross_entropy_with_logits(logits, x.flatten(1), reduction="sum") / x.size(0)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        return recon + kl

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = elbo_loss(logits, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mu, _ = model.encode(x_test)
            return F.mse_loss(model.dec(mu).sigmoid(), x_test.flatten(1)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class Denoiser(nn.Module):
    def __init__(self, pixels=64, hidden=192, emb=32):
        super().__init__()
        self.emb = emb
        self.time = nn.Sequential(nn.Linear(emb, hidden), nn.SiLU())
        self.inp = nn.Linear(pixels, hidden)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.out = nn.Linear(hidden, pixels)

    def forward(self, x, t):
        freq = torch.exp(-math.log(1000.0) * torch.arange(self.emb // 2) / (self.emb // 2))
        arg = t.float()[:, None] * freq
        h = self.inp(x) + self.time(torch.cat([arg.sin(), arg.cos()], 1))
        return self.out(h + self.mid(h))


def blob_ddpm_bad():
    torch.manual_seed(0)
    T = 50
    betas = torch.linspace(1e-3, 0.2, T)
    abar = torch.cumprod(1 - betas, 0)
    train = TensorDataset(2 * blobs(1024, 8, seed=28).flatten(1) - 1)
    real_test = 2 * blobs(400, 8, seed=29).flatten(1) - 1
    start = torch.randn(400, 64, generator=torch.Generator().manual_seed(30))
    loader = DataLoader(train, batch_size=128, shuffle=True, drop_last=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = abar[t][:, None]
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
                x0 = ((x - (1 - abar[k]).sqrt() * eps) / abar[k].sqrt()).clamp(-1, 1)
                eps = (x - abar[k].sqrt() * x0) / (1 - abar[k]).sqrt()
                prev = abar[k - 1] if k > 0 else torch.tensor(1.0)
                x = prev.sqrt() * x0 + (1 - prev).sqrt() * eps
            return sliced_distance(x, real_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def blob_ddpm_good():
    torch.manual_seed(0)
    T = 50
    betas = torch.linspace(1e-3, 0.2, T)
    abar = torch.cumprod(1 - betas, 0)
    train = TensorDataset(2 * blobs(1024, 8, seed=28).flatten(1) - 1)
    real_test = 2 * blobs(400, 8, seed=29).flatten(1) - 1
    start = torch.randn(400, 64, generator=torch.Generator().manual_seed(30))
    loader = DataLoader(train, batch_size=128, shuffle=True, drop_last=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = abar[t][:, None]
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
                x0 = ((x - (1 - abar[k]).sqrt() * eps) / abar[k].sqrt()).clamp(-1, 1)
                eps = (x - abar[k].sqrt() * x0) / (1 - abar[k]).sqrt()
                prev = abar[k - 1] if k > 0 else torch.tensor(1.0)
                x = prev.sqrt() * x0 + (1 - prev).sqrt() * eps
            return sliced_distance(x, real_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class SimSiam(nn.Module):
    def __init__(self, dim=32, proj=32):
        super().__init__()
        self.encoder = nn.Sequential(conv_bn(3, 16, 2), conv_bn(16, 32, 2), conv_bn(32, dim), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = nn.Sequential(
            nn.Linear(dim, proj, bias=False), nn.BatchNorm1d(proj), nn.ReLU(inplace=True),
            nn.Linear(proj, proj, bias=False), nn.BatchNorm1d(proj, affine=False),
        )
        self.predictor = nn.Sequential(
            nn.Linear(proj, proj // 2, bias=False), nn.BatchNorm1d(proj // 2), nn.ReLU(inplace=True), nn.Linear(proj // 2, proj)
        )

    def forward(self, x1, x2):
        z1, z2 = self.projector(self.encoder(x1)), self.projector(self.encoder(x2))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        return p1, p2, z1, z2


def two_crop(x, out=12):
    n = x.size(0)
    y0, x0 = torch.randint(0, x.size(-1) - out + 1, (2,)).tolist()
    v = x[:, :, y0:y0 + out, x0:x0 + out]
    v = v * (0.5 + torch.rand(n, 3, 1, 1)) + 0.5 * torch.randn(n, 3, 1, 1)
    return v + 0.3 * torch.randn_like(v)


def knn_error(train, y_train, test, y_test, k=5):
    sim = F.normalize(test, dim=1) @ F.normalize(train, dim=1).t()
    votes = F.one_hot(y_train[sim.topk(k, 1)[1]]).sum(1)
    return (votes.argmax(1) != y_test).float().mean().item() + 1e-3


def texture_simsiam_bad():
    torch.manual_seed(0)
    x_train, y_train = gratings(1024, 8, 16, seed=31, noise=0.5)
    x_test, y_test = gratings(400, 8, 16, seed=32, noise=0.5)
    loader = DataLoader(TensorDataset(x_train), batch_size=128, shuffle=True, drop_last=True)
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    batches = cycle(loader)

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        p1, p2, z1, z2 = model(two_crop(x), two_crop(x))
        loss = -0.5 * (F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return knn_error(model.encoder(x_train), y_train, model.encoder(x_test), y_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def texture_simsiam_good():
    torch.manual_seed(0)
    x_train, y_train = gratings(1024, 8, 16, seed=31, noise=0.5)
    x_test, y_test = gratings(400, 8, 16, seed=32, noise=0.5)
    loader = DataLoader(TensorDataset(x_train), batch_size=128, shuffle=True, drop_last=True)
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    batches = cycle(loader)

    def step(i):
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        p1, p2, z1, z2 = model(two_crop(x), two_crop(x))
        loss = -0.5 * (F.cosine_similarity(p1, z2.detach()).mean() + F.cosine_similarity(p2, z1.detach()).mean())
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return knn_error(model.encoder(x_train), y_train, model.encoder(x_test), y_test)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class PatchMAE(nn.Module):
    def __init__(self, patches=16, pdim=48, dim=48):
        super().__init__()
        self.embed = nn.Linear(pdim, dim)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.pos = nn.Parameter(0.02 * torch.randn(1, patches, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, pdim)

    def forward(self, patches, mask):
        h = self.embed(patches)
        h = torch.where(mask[..., None].bool(), self.mask_token.expand_as(h), h) + self.pos
        return self.head(self.norm(self.blocks(h)))


def patchify(x, p=4):
    return F.unfold(x, p, stride=p).transpose(1, 2)


def texture_mae_bad():
    torch.manual_seed(0)
    x_train, _ = gratings(1024, 8, 16, seed=33, noise=0.05)
    x_test, _ = gratings(200, 8, 16, seed=34, noise=0.05)
    loader = DataLoader(TensorDataset(x_train), batch_size=32, shuffle=True, drop_last=True)
    model = PatchMAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    batches = cycle(loader)

    def random_mask(n, length, ratio=0.5, generator=None):
        order = torch.rand(n, length, generator=generator).argsort(1)
        return (order.argsort(1) < int(length * ratio)).float()

    p_test = patchify(x_test)
    m_test = random_mask(200, 16, generator=torch.Generator().manual_seed(35))

    def step(i):
        model.train()
        (x,) = next(batches)
        target = patchify(x)
        mask = random_mask(target.size(0), target.size(1))
        optimizer.zero_grad()
        pred = model(target, mask)
        loss = ((pred - target) ** 2).mean(-1)
        loss = (loss * (1 - mask)).sum() / (1 - mask).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            err = ((model(p_test, m_test) - p_test) ** 2).mean(-1)
            return ((err * m_test).sum() / m_test.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def texture_mae_good():
    torch.manual_seed(0)
    x_train, _ = gratings(1024, 8, 16, seed=33, noise=0.05)
    x_test, _ = gratings(200, 8, 16, seed=34, noise=0.05)
    loader = DataLoader(TensorDataset(x_train), batch_size=32, shuffle=True, drop_last=True)
    model = PatchMAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    batches = cycle(loader)

    def random_mask(n, length, ratio=0.5, generator=None):
        order = torch.rand(n, length, generator=generator).argsort(1)
        return (order.argsort(1) < int(length * ratio)).float()

    p_test = patchify(x_test)
    m_test = random_mask(200, 16, generator=torch.Generator().manual_seed(35))

    def step(i):
        model.train()
        (x,) = next(batches)
        target = patchify(x)
        mask = random_mask(target.size(0), target.size(1))
        optimizer.zero_grad()
        pred = model(target, mask)
        loss = ((pred - target) ** 2).mean(-1)
        loss = (loss * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            err = ((model(p_test, m_test) - p_test) ** 2).mean(-1)
            return ((err * m_test).sum() / m_test.sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fit_classifier(model, x, y, steps, lr=3e-3, batch=64):
    g = torch.Generator().manual_seed(99)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for _ in range(steps):
        idx = torch.randint(len(x), (batch,), generator=g)
        opt.zero_grad()
        F.cross_entropy(model(x[idx]), y[idx]).backward()
        opt.step()
    opt.zero_grad(set_to_none=True)
    return model


def freeze(model):
    model.eval()
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def grating_distill_bad():
    torch.manual_seed(0)
    x_train, y_train = gratings(1024, 8, 16, seed=36, noise=0.5, jitter=0.18)
    x_test, y_test = gratings(600, 8, 16, seed=37, noise=0.5, jitter=0.18)
    teacher = freeze(fit_classifier(SmallCNN(3, 8, width=12), x_train, y_train, steps=100))
    student = SmallCNN(3, 8, width=8)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T, alpha = 4.0, 0.9
    batches = cycle(loader)

    def step(i):
        student.train()
        x, y = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / T, dim=1)
        optimizer.zero_grad()
        logits = student(x)
        pred = F.softmax(logits / T, dim=1)
        kd = F.kl_div(pred, soft, reduction="batchmean") * T * T
        loss = alpha * kd + (1 - alpha) * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


def grating_distill_good():
    torch.manual_seed(0)
    x_train, y_train = gratings(1024, 8, 16, seed=36, noise=0.5, jitter=0.18)
    x_test, y_test = gratings(600, 8, 16, seed=37, noise=0.5, jitter=0.18)
    teacher = freeze(fit_classifier(SmallCNN(3, 8, width=12), x_train, y_train, steps=100))
    student = SmallCNN(3, 8, width=8)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T, alpha = 4.0, 0.9
    batches = cycle(loader)

    def step(i):
        student.train()
        x, y = next(batches)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / T, dim=1)
        optimizer.zero_grad()
        logits = student(x)
        pred = F.log_softmax(logits / T, dim=1)
        kd = F.kl_div(pred, soft, reduction="batchmean") * T * T
        loss = alpha * kd + (1 - alpha) * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer,
            "steps": 20, "step": step, "probe": probe}


def cached_distill_bad():
    torch.manual_seed(0)
    x_train, y_train = gratings(768, 8, 16, seed=38)
    x_test, y_test = gratings(400, 8, 16, seed=39)
    teacher = freeze(fit_classifier(SmallCNN(3, 8, width=16), x_train, y_train, steps=90))
    train = TensorDataset(x_train, y_train)
    cache_loader = DataLoader(train, batch_size=128, shuffle=True)
    with torch.no_grad():
        teacher_logits = torch.cat([teacher(x) for x, _ in cache_loader])
    torch.manual_seed(1)
    student = SmallCNN(3, 8, width=8)
    loader = DataLoader(TensorDataset(x_train, y_train, teacher_logits), batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T, alpha = 2.0, 0.7
    batches = cycle(loader)

    def step(i):
        student.train()
        x, y, t_logits = next(batches)
        optimizer.zero_grad()
        logits = student(x)
        kd = F.kl_div(F.log_softmax(logits / T, 1), F.softmax(t_logits / T, 1), reduction="batchmean") * T * T
        loss = alpha * kd + (1 - alpha) * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cached_distill_good():
    torch.manual_seed(0)
    x_train, y_train = gratings(768, 8, 16, seed=38)
    x_test, y_test = gratings(400, 8, 16, seed=39)
    teacher = freeze(fit_classifier(SmallCNN(3, 8, width=16), x_train, y_train, steps=90))
    train = TensorDataset(x_train, y_train)
    cache_loader = DataLoader(train, batch_size=128, shuffle=False)
    with torch.no_grad():
        teacher_logits = torch.cat([teacher(x) for x, _ in cache_loader])
    torch.manual_seed(1)
    student = SmallCNN(3, 8, width=8)
    loader = DataLoader(TensorDataset(x_train, y_train, teacher_logits), batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    T, alpha = 2.0, 0.7
    batches = cycle(loader)

    def step(i):
        student.train()
        x, y, t_logits = next(batches)
        optimizer.zero_grad()
        logits = student(x)
        kd = F.kl_div(F.log_softmax(logits / T, 1), F.softmax(t_logits / T, 1), reduction="batchmean") * T * T
        loss = alpha * kd + (1 - alpha) * F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(student):
            return F.cross_entropy(student(x_test), y_test).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class TransferNet(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            conv_bn(3, width), conv_bn(width, 2 * width, 2), conv_bn(2 * width, 2 * width, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def linear_transfer_bad():
    torch.manual_seed(0)
    source = fit_classifier(TransferNet(12), *gratings(1024, 12, 16, seed=40, noise=0.4, jitter=0.02), steps=90)
    checkpoint = {"module." + k: v.clone() for k, v in source.state_dict().items() if not k.startswith("head")}

    torch.manual_seed(1)
    model = TransferNet(6)
    model.load_state_dict(checkpoint, strict=False)
    freeze(model.backbone)
    train = TensorDataset(*gratings(192, 6, 16, seed=41, noise=0.4))
    x_test, y_test = gratings(400, 6, 16, seed=42, noise=0.4)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    batches = cycle(loader)

    def step(i):
        model.train()
        model.backbone.eval()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def linear_transfer_good():
    torch.manual_seed(0)
    source = fit_classifier(TransferNet(12), *gratings(1024, 12, 16, seed=40, noise=0.4, jitter=0.02), steps=90)
    checkpoint = {"module." + k: v.clone() for k, v in source.state_dict().items() if not k.startswith("head")}

    torch.manual_seed(1)
    model = TransferNet(6)
    model.load_state_dict({k.removeprefix("module."): v for k, v in checkpoint.items()}, strict=False)
    freeze(model.backbone)
    train = TensorDataset(*gratings(192, 6, 16, seed=41, noise=0.4))
    x_test, y_test = gratings(400, 6, 16, seed=42, noise=0.4)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    batches = cycle(loader)

    def step(i):
        model.train()
        model.backbone.eval()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class GNTransferNet(nn.Module):
    def __init__(self, classes, width=16):
        super().__init__()
        layers, cin = [], 3
        for cout, stride in ((width, 1), (2 * width, 2), (2 * width, 2)):
            layers += [nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.GroupNorm(4, cout), nn.ReLU()]
            cin = cout
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(cin, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def gradual_unfreeze_bad():
    torch.manual_seed(0)
    source = fit_classifier(GNTransferNet(4), *gratings(512, 4, 16, seed=43, noise=0.3), steps=60)
    model = GNTransferNet(10)
    model.backbone.load_state_dict(source.backbone.state_dict())
    for p in model.backbone.parameters():
        p.requires_grad = False
    x_train, y_train = stamps(768, 10, 14, seed=44, noise=0.2)
    x_test, y_test = stamps(300, 10, 14, seed=45, noise=0.2)
    x_train, x_test = x_train.repeat(1, 3, 1, 1), x_test.repeat(1, 3, 1, 1)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=1e-3)
    unfreeze_at = 4
    batches = cycle(loader)

    def step(i):
        model.train()
        if i == unfreeze_at:
            for p in model.backbone.parameters():
                p.requires_grad = True
        x, y = next(batches)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gradual_unfreeze_good():
    torch.manual_seed(0)
    source = fit_classifier(GNTransferNet(4), *gratings(512, 4, 16, seed=43, noise=0.3), steps=60)
    model = GNTransferNet(10)
    model.backbone.load_state_dict(source.backbone.state_dict())
    for p in model.backbone.parameters():
        p.requires_grad = False
    x_train, y_train = stamps(768, 10, 14, seed=44, noise=0.2)
    x_test, y_test = stamps(300, 10, 14, seed=45, noise=0.2)
    x_train, x_test = x_train.repeat(1, 3, 1, 1), x_test.repeat(1, 3, 1, 1)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=1e-3)
    unfreeze_at = 4
    batches = cycle(loader)

    def step(i):
        model.train()
        if i == unfreeze_at:
            for p in model.backbone.parameters():
                p.requires_grad = True
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 2e-3})
        x, y = next(batches)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(x_test), y_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def paintings(n, size, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, 1, size, size)
    for i in range(n):
        for _ in range(6):
            w, h = torch.randint(3, size // 2, (2,), generator=g).tolist()
            x0, y0 = torch.randint(0, size - 3, (2,), generator=g).tolist()
            x[i, 0, y0:y0 + h, x0:x0 + w] = torch.rand(1, generator=g).item()
    return x


class DnCNN(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(width, 1, 3, padding=1)]
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return x - self.net(x)


def dncnn_denoise_bad():
    torch.manual_seed(0)
    sigma = 0.2
    train = TensorDataset(paintings(256, 20, seed=46))
    clean_test = paintings(100, 20, seed=47)
    noisy_test = clean_test + sigma * torch.randn(clean_test.shape, generator=torch.Generator().manual_seed(48))
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = DnCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def add_noise(img):
        noise = sigma * torch.randn_like(img)
        img += noise
        return img

    def step(i):
        model.train()
        (clean,) = next(batches)
        noisy = add_noise(clean)
        optimizer.zero_grad()
        loss = F.mse_loss(model(noisy), clean)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(noisy_test), clean_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dncnn_denoise_good():
    torch.manual_seed(0)
    sigma = 0.2
    train = TensorDataset(paintings(256, 20, seed=46))
    clean_test = paintings(100, 20, seed=47)
    noisy_test = clean_test + sigma * torch.randn(clean_test.shape, generator=torch.Generator().manual_seed(48))
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = DnCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def add_noise(img):
        noise = sigma * torch.randn_like(img)
        return img + noise

    def step(i):
        model.train()
        (clean,) = next(batches)
        noisy = add_noise(clean)
        optimizer.zero_grad()
        loss = F.mse_loss(model(noisy), clean)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(noisy_test), clean_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


class ESPCN(nn.Module):
    def __init__(self, scale=2, width=24):
        super().__init__()
        self.scale = scale
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(width, scale ** 2, 3, padding=1), nn.PixelShuffle(scale),
        )

    def forward(self, lr):
        base = F.interpolate(lr, scale_factor=self.scale, mode="bilinear", align_corners=False)
        return base + self.body(lr)


def espcn_sr_bad():
    class PatchPairs(Dataset):
        def __init__(self, hr, scale=2, patch=10):
            self.hr, self.scale, self.patch = hr, scale, patch
            self.lr = F.avg_pool2d(hr, scale)

        def __len__(self):
            return len(self.hr)

        def __getitem__(self, idx):
            lr, hr, s, p = self.lr[idx], self.hr[idx], self.scale, self.patch
            y, x = torch.randint(0, lr.size(-1) - p + 1, (2,)).tolist()
            hy, hx = y, x
            return lr[:, y:y + p, x:x + p], hr[:, hy:hy + p * s, hx:hx + p * s]

    torch.manual_seed(0)
    train = PatchPairs(paintings(256, 28, seed=49))
    hr_test = paintings(80, 28, seed=50)
    lr_test = F.avg_pool2d(hr_test, 2)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = ESPCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        lr, hr = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(lr), hr)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(lr_test), hr_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def espcn_sr_good():
    class PatchPairs(Dataset):
        def __init__(self, hr, scale=2, patch=10):
            self.hr, self.scale, self.patch = hr, scale, patch
            self.lr = F.avg_pool2d(hr, scale)

        def __len__(self):
            return len(self.hr)

        def __getitem__(self, idx):
            lr, hr, s, p = self.lr[idx], self.hr[idx], self.scale, self.patch
            y, x = torch.randint(0, lr.size(-1) - p + 1, (2,)).tolist()
            hy, hx = y * s, x * s
            return lr[:, y:y + p, x:x + p], hr[:, hy:hy + p * s, hx:hx + p * s]

    torch.manual_seed(0)
    train = PatchPairs(paintings(256, 28, seed=49))
    hr_test = paintings(80, 28, seed=50)
    lr_test = F.avg_pool2d(hr_test, 2)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model = ESPCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(loader)

    def step(i):
        model.train()
        lr, hr = next(batches)
        optimizer.zero_grad()
        loss = F.l1_loss(model(lr), hr)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.mse_loss(model(lr_test), hr_test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES = [
    {"name": "mixup_gratings", "field": "image classification",
     "what": "Mixup's loss weights are swapped (1-lam on the label of the image that was mixed in with lam), so the net is taught the class of the fainter image."},
    {"name": "stamp_classifier", "field": "image classification",
     "what": "The epoch-wise MultiStepLR (milestones in epochs) is stepped once per batch, so the learning rate has decayed to 1% after 16 batches and training stalls."},
    {"name": "grid_detector", "field": "detection",
     "what": "Target assignment indexes the (row, column) grid with (gi, gj), column first, so each object is assigned to the transposed cell and the detector looks in wrong places."},
    {"name": "center_detector", "field": "detection",
     "what": "The box-size loss is averaged over all grid cells rather than only those with an object, so the zero targets of the empty cells swamp it and sizes shrink to zero."},
    {"name": "scene_unet_scale", "field": "segmentation",
     "what": "The class-id mask is resized with bilinear interpolation in the random-scale augmentation, so object borders get labels of unrelated classes."},
    {"name": "scene_unet_flat", "field": "segmentation",
     "what": "The (N,C,H,W) logits are flattened to (-1,C) without moving the channel axis last, so the logits and the labels of the pixels do not belong together."},
    {"name": "pose_regression", "field": "key points",
     "what": "The visibility flag is not used in the loss, so key points that are not annotated (stored as 0,0) drag the predictions to the corner."},
    {"name": "pitch_estimator", "field": "audio/speech",
     "what": "The (B,1) output minus the (B,) target broadcasts to (B,B), so every prediction is pulled to the batch mean of the targets."},
    {"name": "keyword_spotter", "field": "audio/speech",
     "what": "SpecAugment masks the stored spectrogram in place (no clone), so masks pile up over the epochs until the training data are erased."},
    {"name": "motion_gru", "field": "video",
     "what": "The GRU is built without batch_first=True but fed (B,T,F), so it runs over the clips of the batch instead of over time."},
    {"name": "motion_c3d", "field": "video",
     "what": "The random crop is drawn anew for each frame rather than once per clip, so the augmentation's jitter drowns the motion that the labels depend on."},
    {"name": "blob_gan", "field": "generative models",
     "what": "The discriminator step clears the generator's gradients (copy-paste) and never the discriminator's, which pile up over all steps, the generator-loss gradients included."},
    {"name": "blob_vae", "field": "generative models",
     "what": "The reconstruction term is averaged over pixels while the KL is summed over latents, so the KL outweighs it by the number of pixels and the posterior collapses."},
    {"name": "blob_ddpm", "field": "generative models",
     "what": "x_t is made with a noise drawn inside q_sample, not with the noise that is the regression target, so the target cannot be predicted and the net learns zero."},
    {"name": "texture_simsiam", "field": "contrastive and self-supervised learning",
     "what": "The stop-gradient on SimSiam's targets is missing, so both branches agree on a trivial solution and the representation collapses."},
    {"name": "texture_mae", "field": "contrastive and self-supervised learning",
     "what": "The masked-autoencoder loss is taken with the inverted mask, on the visible patches instead of the hidden ones, so the net learns to copy its input."},
    {"name": "grating_distill", "field": "knowledge distillation",
     "what": "F.kl_div is given the student's probabilities rather than its log-probabilities, so the loss is no KL divergence (it goes negative) and pushes the student to saturated outputs."},
    {"name": "cached_distill", "field": "knowledge distillation",
     "what": "The teacher's logits are cached through a shuffling loader and then paired with the images in storage order, so each image gets another image's soft labels."},
    {"name": "linear_transfer", "field": "fine-tuning of vision models",
     "what": "The checkpoint's keys carry the DataParallel prefix 'module.' and strict=False hides it, so no pretrained weight is loaded and the frozen backbone is random."},
    {"name": "gradual_unfreeze", "field": "fine-tuning of vision models",
     "what": "The backbone is unfrozen during training but its parameters were filtered out when the optimizer was built and are never added, so they get gradients and no updates."},
    {"name": "dncnn_denoise", "field": "super-resolution and denoising",
     "what": "The noise is added in place to the clean batch, so the target is the noisy image itself and the net learns the identity."},
    {"name": "espcn_sr", "field": "super-resolution and denoising",
     "what": "The HR crop offset is not multiplied by the scale, so the low- and high-resolution patches show different places and the net learns blur and shift."},
]
