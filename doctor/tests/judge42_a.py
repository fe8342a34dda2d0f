"""Small vision and representation-learning training programs in pairs.

Every entry of CASES has NAME_bad(seed=0) and NAME_good(seed=0).  Each returns a dict with the
model(s), the optimizer(s), a step function, the number of steps and an evaluation function
(lower is better).  All data are synthetic and made on the fly.
"""
import copy
import itertools
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

torch.set_num_threads(1)


# ----------------------------------------------------------------------------------------------
# shared helpers
# ----------------------------------------------------------------------------------------------
def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def make_textures(n, classes, size=16, channels=3, noise=0.8, seed=0, world=77, shift=2):
    """Images of `classes` smooth patterns, randomly shifted, with contrast and pixel noise."""
    gw = torch.Generator().manual_seed(world)
    g = torch.Generator().manual_seed(seed * 7919 + 13)
    protos = F.interpolate(torch.randn(classes, channels, 5, 5, generator=gw), size=size + 2 * shift,
                           mode="bilinear", align_corners=True)
    y = torch.randint(0, classes, (n,), generator=g)
    dx = torch.randint(0, 2 * shift + 1, (n,), generator=g)
    dy = torch.randint(0, 2 * shift + 1, (n,), generator=g)
    rows = dy[:, None] + torch.arange(size)
    cols = dx[:, None] + torch.arange(size)
    base = protos[y]
    base = base[torch.arange(n)[:, None, None], :, rows[:, :, None], cols[:, None, :]]
    base = base.permute(0, 3, 1, 2)
    contrast = 0.6 + 0.8 * torch.rand(n, 1, 1, 1, generator=g)
    x = base * contrast + noise * torch.randn(n, channels, size, size, generator=g)
    x = (x - x.mean()) / x.std()
    return x.contiguous(), y


def make_smooth(n, size, channels=1, seed=0, cells=6):
    """Smooth random fields with a sharp-edged rectangle, values about N(0, 1)."""
    g = torch.Generator().manual_seed(seed * 6151 + 5)
    x = F.interpolate(torch.randn(n, channels, cells, cells, generator=g), size=size, mode="bilinear",
                      align_corners=True)
    r = torch.arange(size)
    top = torch.randint(0, size // 2, (n, 1), generator=g)
    left = torch.randint(0, size // 2, (n, 1), generator=g)
    h = torch.randint(size // 4, size // 2, (n, 1), generator=g)
    w = torch.randint(size // 4, size // 2, (n, 1), generator=g)
    inside = ((r >= top) & (r < top + h))[:, :, None] & ((r >= left) & (r < left + w))[:, None, :]
    level = torch.randn(n, 1, 1, 1, generator=g) * 1.5
    x = torch.where(inside[:, None], level, x)
    return (x - x.mean()) / x.std()


def make_shapes(n, size=20, seed=0):
    """Images with a disc and a triangle-ish wedge, and per-pixel class masks (0, 1, 2)."""
    g = torch.Generator().manual_seed(seed * 4409 + 3)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    yy, xx = yy[None].float(), xx[None].float()

    def u(lo, hi):
        return (lo + (hi - lo) * torch.rand(n, 1, 1, generator=g))

    mask = torch.zeros(n, size, size, dtype=torch.long)
    cy, cx, rad = u(4, size - 4), u(4, size - 4), u(2.5, 5)
    disc = (yy - cy) ** 2 + (xx - cx) ** 2 < rad ** 2
    ty, tx, side = u(0, size - 8), u(0, size - 8), u(5, 9)
    wedge = (yy > ty) & (xx > tx) & ((yy - ty) + (xx - tx) < side)
    mask[disc] = 1
    mask[wedge] = 2
    value = torch.tensor([0.0, 1.0, -1.0])[mask]
    hue = torch.tensor([0.0, 0.6, 0.6])[mask]
    img = torch.stack([value, hue], 1) + 0.6 * torch.randn(n, 2, size, size, generator=g)
    img = (img - img.mean((0, 2, 3), keepdim=True)) / img.std((0, 2, 3), keepdim=True)
    return img, mask


def error_rate(model, x, y):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        err = (model(x).argmax(1) != y).float().mean().item()
    model.train(was_training)
    return err


def xent(model, x, y):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        value = F.cross_entropy(model(x), y).item()
    model.train(was_training)
    return value


def forever(loader):
    while True:
        for batch in loader:
            yield batch


class SmallCNN(nn.Module):
    def __init__(self, in_ch, classes, width=12):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_ch, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(2 * width * 16, classes)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


# ----------------------------------------------------------------------------------------------
# siamese verification
# ----------------------------------------------------------------------------------------------
class PairDataset(Dataset):
    def __init__(self, x, y, n_pairs, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = x
        a = torch.randint(0, len(x), (n_pairs,), generator=g)
        want_same = torch.rand(n_pairs, generator=g) < 0.5
        b = torch.randint(0, len(x), (n_pairs,), generator=g)
        for k in range(n_pairs):
            pool = (y == y[a[k]]).nonzero().flatten() if want_same[k] else (y != y[a[k]]).nonzero().flatten()
            b[k] = pool[b[k] % len(pool)]
        self.a, self.b, self.same = a, b, want_same.long()

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return self.x[self.a[i]], self.x[self.b[i]], self.same[i]


class EmbeddingNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc = nn.Linear(24 * 16, dim)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def _siamese_verification(good, seed):
    seed_everything(seed)
    x, y = make_textures(600, 12, channels=1, noise=1.0, seed=seed + 1)
    xt, yt = make_textures(400, 12, channels=1, noise=1.0, seed=seed + 500)
    loader = DataLoader(PairDataset(x, y, 1200, seed + 2), batch_size=48, shuffle=True)
    test = PairDataset(xt, yt, 800, seed + 3)
    net = EmbeddingNet()
    criterion = nn.CosineEmbeddingLoss(margin=0.2)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = forever(loader)

    def step():
        left, right, same = next(batches)
        target = 2 * same - 1 if good else same
        loss = criterion(net(left), net(right), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            sim = F.cosine_similarity(net(xt[test.a]), net(xt[test.b]))
        pos, neg = sim[test.same == 1], sim[test.same == 0]
        auc = (pos[:, None] > neg[None]).float().mean() + 0.5 * (pos[:, None] == neg[None]).float().mean()
        return 1 - auc.item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def siamese_verification_bad(seed=0):
    return _siamese_verification(False, seed)


def siamese_verification_good(seed=0):
    return _siamese_verification(True, seed)


# ----------------------------------------------------------------------------------------------
# knowledge distillation
# ----------------------------------------------------------------------------------------------
class Distiller:
    def __init__(self, teacher, student, temperature=3.0, lr=2e-3, good=True):
        self.teacher = teacher.eval().requires_grad_(False)
        self.student = student
        self.t = temperature
        self.good = good
        self.optimizer = torch.optim.Adam(student.parameters(), lr=lr)

    def loss(self, x):
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / self.t, dim=1)
        logits = self.student(x) / self.t
        pred = F.log_softmax(logits, dim=1) if self.good else F.softmax(logits, dim=1)
        return F.kl_div(pred, soft, reduction="batchmean") * self.t ** 2

    def train_step(self, x):
        self.student.train()
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _distill_classifier(good, seed):
    seed_everything(seed)
    x, y = make_textures(1200, 10, noise=2.5, seed=seed + 1)
    xt, yt = make_textures(600, 10, noise=2.5, seed=seed + 500)
    teacher = SmallCNN(3, 10, width=16)
    topt = torch.optim.AdamW(teacher.parameters(), lr=3e-3, weight_decay=0.01)
    perm = torch.randperm(len(x))
    for k in range(0, 2 * len(x), 48):
        idx = perm[torch.arange(k, k + 48) % len(x)]
        topt.zero_grad()
        F.cross_entropy(teacher(x[idx]), y[idx], label_smoothing=0.05).backward()
        topt.step()
    student = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1),
                            nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    d = Distiller(teacher, student, good=good)
    batches = forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True))

    def step():
        (xb,) = next(batches)
        return d.train_step(xb)

    return {"model": student, "optimizer": d.optimizer, "step": step, "steps": 20,
            "evaluate": lambda: xent(student, xt, yt)}


def distill_classifier_bad(seed=0):
    return _distill_classifier(False, seed)


def distill_classifier_good(seed=0):
    return _distill_classifier(True, seed)


# ----------------------------------------------------------------------------------------------
# normalizing flow
# ----------------------------------------------------------------------------------------------
class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.half, self.flip = dim // 2, flip
        self.net = nn.Sequential(nn.Linear(self.half, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, dim))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, dim=1)
        s = 2 * torch.tanh(s / 2)
        b = b * torch.exp(s) + t
        out = torch.cat([b, a] if self.flip else [a, b], dim=1)
        return out, s


class RealNVP(nn.Module):
    def __init__(self, dim=4, layers=6, hidden=48):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(dim, hidden, k % 2 == 1) for k in range(layers))

    def forward(self, x):
        scales = []
        for layer in self.layers:
            x, s = layer(x)
            scales.append(s)
        return x, torch.cat(scales, dim=1)


def flow_data(n, seed):
    """Codes of small pictures: a bent, correlated four-dimensional cloud of unit scale."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 4, generator=g)
    a = z[:, 0]
    b = 0.6 * (a ** 2 - 1) + 0.4 * z[:, 1]
    c = torch.sin(2 * a) + 0.3 * z[:, 2]
    d = 0.7 * b + 0.5 * z[:, 3]
    x = torch.stack([a, b, c, d], 1)
    return x / torch.tensor([1.0, 0.94, 0.77, 0.83])


def _coupling_flow(good, seed):
    seed_everything(seed)
    data, held = flow_data(4000, seed + 1), flow_data(1000, seed + 777)
    flow = RealNVP()
    prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    opt = torch.optim.Adam(flow.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(data), batch_size=64, shuffle=True))

    def step():
        (x,) = next(batches)
        z, scales = flow(x)
        log_pz = prior.log_prob(z).sum(dim=1)
        log_det = scales.sum(dim=1) if good else scales.sum()
        loss = -(log_pz + log_det).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        opt.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            z, scales = flow(held)
            return -(prior.log_prob(z).sum(1) + scales.sum(1)).mean().item()

    return {"model": flow, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def coupling_flow_bad(seed=0):
    return _coupling_flow(False, seed)


def coupling_flow_good(seed=0):
    return _coupling_flow(True, seed)


# ----------------------------------------------------------------------------------------------
# one-stage detector
# ----------------------------------------------------------------------------------------------
class BoxDataset(Dataset):
    """One bright rectangle in a 32x32 image; targets on an 8x8 grid: objectness and (dx, dy, w, h)."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        c = 6 + 20 * torch.rand(n, 2, generator=g)
        wh = 5 + 7 * torch.rand(n, 2, generator=g)
        r = torch.arange(32) + 0.5
        ins_x = ((r - c[:, :1]).abs() < wh[:, :1] / 2)[:, None, :]
        ins_y = ((r - c[:, 1:]).abs() < wh[:, 1:] / 2)[:, :, None]
        img = (ins_x & ins_y).float() * 1.5 + 0.4 * torch.randn(n, 32, 32, generator=g)
        self.img = ((img - img.mean()) / img.std())[:, None]
        cell = (c / 4).long()
        self.obj = torch.zeros(n, 8, 8)
        self.box = torch.zeros(n, 4, 8, 8)
        k = torch.arange(n)
        self.obj[k, cell[:, 1], cell[:, 0]] = 1
        self.box[k, :, cell[:, 1], cell[:, 0]] = torch.cat([c / 4 - cell - 0.5, torch.log(wh / 8)], 1)

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.img[i], self.obj[i], self.box[i]


class GridDetector(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, w, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * w, 2 * w, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * w, 2 * w, 3, padding=1), nn.ReLU())
        self.obj_head = nn.Conv2d(2 * w, 1, 1)
        self.box_head = nn.Conv2d(2 * w, 4, 1)
        nn.init.constant_(self.obj_head.bias, -3.0)

    def forward(self, x):
        f = self.backbone(x)
        return self.obj_head(f)[:, 0], self.box_head(f)


def _grid_detector(good, seed):
    seed_everything(seed)
    train, val = BoxDataset(800, seed + 1), BoxDataset(250, seed + 321)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = forever(loader)

    def detection_loss(obj_logit, box, obj, box_target):
        obj_loss = F.binary_cross_entropy_with_logits(obj_logit, obj, reduction="sum") / obj.sum()
        if good:
            pos = obj > 0
            box_loss = F.smooth_l1_loss(box.permute(0, 2, 3, 1)[pos], box_target.permute(0, 2, 3, 1)[pos], beta=0.1)
        else:
            box_loss = F.smooth_l1_loss(box, box_target, beta=0.1)
        return obj_loss + 2.0 * box_loss

    def step():
        img, obj, box_target = next(data)
        obj_logit, box = model(img)
        loss = detection_loss(obj_logit, box, obj, box_target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def decode(box, at):
        b, r, c = at
        v = box.permute(0, 2, 3, 1)[b, r, c]
        cx, cy = (c + 0.5 + v[:, 0]) * 4, (r + 0.5 + v[:, 1]) * 4
        w, h = v[:, 2].clamp(max=3).exp() * 8, v[:, 3].clamp(max=3).exp() * 8
        return cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2

    def evaluate():
        with torch.no_grad():
            obj_logit, box = model(val.img)
        best = obj_logit.flatten(1).argmax(1)
        n = torch.arange(len(best))
        true = val.obj.flatten(1).argmax(1)
        p = decode(box, (n, best // 8, best % 8))
        t = decode(val.box, (n, true // 8, true % 8))
        iw = (torch.min(p[2], t[2]) - torch.max(p[0], t[0])).clamp(min=0)
        ih = (torch.min(p[3], t[3]) - torch.max(p[1], t[1])).clamp(min=0)
        area = lambda q: (q[2] - q[0]) * (q[3] - q[1])
        iou = iw * ih / (area(p) + area(t) - iw * ih)
        return 1 - iou.mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def grid_detector_bad(seed=0):
    return _grid_detector(False, seed)


def grid_detector_good(seed=0):
    return _grid_detector(True, seed)


# ----------------------------------------------------------------------------------------------
# segmentation, three classes
# ----------------------------------------------------------------------------------------------
class TinyUNet(nn.Module):
    def __init__(self, in_ch=2, out_ch=3, w=10):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(in_ch, w, 3, padding=1), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), nn.ReLU(),
                                 nn.Conv2d(2 * w, 2 * w, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(2 * w, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, out_ch, 1))

    def forward(self, x):
        a = self.down(x)
        b = self.up(self.mid(a))
        return self.out(torch.cat([a, b], 1))


def mean_iou_error(model, img, mask, classes=3):
    with torch.no_grad():
        pred = model(img).argmax(1)
    ious = []
    for c in range(classes):
        inter = ((pred == c) & (mask == c)).sum().item()
        union = ((pred == c) | (mask == c)).sum().item()
        ious.append(inter / max(union, 1))
    return 1 - sum(ious) / classes


def _shape_segmentation(good, seed):
    seed_everything(seed)
    img, mask = make_shapes(500, seed=seed + 1)
    vimg, vmask = make_shapes(150, seed=seed + 400)
    model = TinyUNet()
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.5, 1.5]))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(img, mask), batch_size=16, shuffle=True)
    batches = forever(loader)
    num_classes = 3

    def step():
        images, labels = next(batches)
        optimizer.zero_grad()
        logits = model(images)
        if good:
            logits = logits.permute(0, 2, 3, 1)
        logits = logits.reshape(-1, num_classes)
        loss = criterion(logits, labels.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: mean_iou_error(model, vimg, vmask)}


def shape_segmentation_bad(seed=0):
    return _shape_segmentation(False, seed)


def shape_segmentation_good(seed=0):
    return _shape_segmentation(True, seed)


# ----------------------------------------------------------------------------------------------
# super-resolution
# ----------------------------------------------------------------------------------------------
class VDSR(nn.Module):
    def __init__(self, ch=12, depth=4, good=True):
        super().__init__()
        self.head = nn.Conv2d(1, ch, 3, padding=1)
        convs = [nn.Conv2d(ch, ch, 3, padding=1) for _ in range(depth)]
        self.body = nn.ModuleList(convs) if good else convs
        self.tail = nn.Sequential(nn.Conv2d(ch, 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        f = F.relu(self.head(x))
        for conv in self.body:
            f = F.relu(conv(f))
        return F.interpolate(x, scale_factor=2, mode="bilinear") + self.tail(f)


def _super_resolution(good, seed):
    seed_everything(seed)
    hr, hr_val = make_smooth(400, 24, seed=seed + 1), make_smooth(100, 24, seed=seed + 200)
    net = VDSR(good=good)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(hr), batch_size=16, shuffle=True)
    batches = forever(loader)

    def downsample(x):
        return F.avg_pool2d(x, 2)

    def step():
        (target,) = next(batches)
        sr = net(downsample(target))
        loss = F.l1_loss(sr, target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            return F.mse_loss(net(downsample(hr_val)), hr_val).item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def super_resolution_bad(seed=0):
    return _super_resolution(False, seed)


def super_resolution_good(seed=0):
    return _super_resolution(True, seed)


# ----------------------------------------------------------------------------------------------
# transfer learning with a new head
# ----------------------------------------------------------------------------------------------
def pretrain(model, x, y, steps, lr=3e-3, batch=48):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        idx = torch.randint(0, len(x), (batch,))
        opt.zero_grad()
        F.cross_entropy(model(x[idx]), y[idx]).backward()
        opt.step()
    return model


def _transfer_head(good, seed):
    seed_everything(seed)
    src_x, src_y = make_textures(800, 8, noise=1.0, seed=seed + 1, world=3)
    x, y = make_textures(400, 6, noise=1.2, seed=seed + 2, world=4)
    xt, yt = make_textures(400, 6, noise=1.2, seed=seed + 300, world=4)
    net = nn.Sequential()
    net.add_module("stem", nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)))
    net.add_module("block", nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()))
    net.add_module("fc", nn.Linear(24 * 16, 8))
    pretrain(net, src_x, src_y, 60)
    for p in net.stem.parameters():
        p.requires_grad = False

    def make_optimizer():
        return torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=5e-4)

    if good:
        net.fc = nn.Linear(24 * 16, 6)
        optimizer = make_optimizer()
    else:
        optimizer = make_optimizer()
        net.fc = nn.Linear(24 * 16, 6)

    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    it = forever(loader)

    def step():
        xb, yb = next(it)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": net, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: xent(net, xt, yt)}


def transfer_head_bad(seed=0):
    return _transfer_head(False, seed)


def transfer_head_good(seed=0):
    return _transfer_head(True, seed)


# ----------------------------------------------------------------------------------------------
# GAN
# ----------------------------------------------------------------------------------------------
class GAN(nn.Module):
    def __init__(self, z_dim=8, img=64):
        super().__init__()
        self.z_dim = z_dim
        self.generator = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, img))
        self.discriminator = nn.Sequential(nn.Linear(img, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                                           nn.Linear(64, 1))

    def sample(self, n):
        return self.generator(torch.randn(n, self.z_dim))


def blob_pictures(n, seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.arange(8).float()
    c = 1.5 + 4 * torch.rand(n, 2, generator=g)
    img = torch.exp(-((r[None, :, None] - c[:, :1, None]) ** 2 + (r[None, None] - c[:, 1:, None]) ** 2) / 4.0)
    img = img.flatten(1)
    return (img - 0.18) / 0.26


def energy_distance(a, b):
    d = lambda p, q: torch.cdist(p, q).mean()
    return (2 * d(a, b) - d(a, a) - d(b, b)).item()


def _blob_gan(good, seed):
    seed_everything(seed)
    real, held = blob_pictures(2000, seed + 1), blob_pictures(600, seed + 50)
    gan = GAN()
    opt_d = torch.optim.Adam(gan.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    g_params = gan.generator.parameters() if good else gan.parameters()
    opt_g = torch.optim.Adam(g_params, lr=1e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(real), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)
    bce = nn.BCEWithLogitsLoss()

    def step():
        (x,) = next(batches)
        ones, zeros = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        # discriminator
        opt_d.zero_grad()
        fake = gan.sample(len(x)).detach()
        d_loss = bce(gan.discriminator(x), ones) + bce(gan.discriminator(fake), zeros)
        d_loss.backward()
        opt_d.step()
        # generator
        opt_g.zero_grad()
        g_loss = bce(gan.discriminator(gan.sample(len(x))), ones)
        g_loss.backward()
        opt_g.step()
        return d_loss.item(), g_loss.item()

    def evaluate():
        with torch.no_grad():
            z = torch.randn(600, gan.z_dim, generator=torch.Generator().manual_seed(5))
            return energy_distance(gan.generator(z), held)

    return {"model": gan, "optimizer": (opt_d, opt_g), "step": step, "steps": 20, "evaluate": evaluate}


def blob_gan_bad(seed=0):
    return _blob_gan(False, seed)


def blob_gan_good(seed=0):
    return _blob_gan(True, seed)


# ----------------------------------------------------------------------------------------------
# VAE
# ----------------------------------------------------------------------------------------------
class VAE(nn.Module):
    def __init__(self, latent=6, good=True):
        super().__init__()
        self.good = good
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
        self.mu, self.log_std = nn.Linear(64, latent), nn.Linear(64, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 256), nn.Unflatten(1, (1, 16, 16)))

    def forward(self, x):
        h = self.enc(x)
        q = torch.distributions.Normal(self.mu(h), self.log_std(h).exp())
        z = q.rsample() if self.good else q.sample()
        return self.dec(z), q


def _image_vae(good, seed):
    seed_everything(seed)
    x, _ = make_textures(1500, 6, channels=1, noise=0.3, seed=seed + 1)
    xt, _ = make_textures(400, 6, channels=1, noise=0.3, seed=seed + 60)
    vae = VAE(good=good)
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
    prior = torch.distributions.Normal(0.0, 1.0)
    loader = DataLoader(TensorDataset(x), batch_size=64, shuffle=True)
    it = forever(loader)

    def elbo_terms(batch):
        recon, q = vae(batch)
        nll = 0.5 * (recon - batch).pow(2).flatten(1).sum(1) / 0.25
        kl = torch.distributions.kl_divergence(q, prior).sum(1)
        return nll, kl

    def step():
        (batch,) = next(it)
        nll, kl = elbo_terms(batch)
        loss = (nll + kl).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            state = torch.get_rng_state()
            torch.manual_seed(11)
            nll, kl = elbo_terms(xt)
            torch.set_rng_state(state)
        return (nll + kl).mean().item()

    return {"model": vae, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def image_vae_bad(seed=0):
    return _image_vae(False, seed)


def image_vae_good(seed=0):
    return _image_vae(True, seed)


# ----------------------------------------------------------------------------------------------
# LoRA on a small ViT, new label set
# ----------------------------------------------------------------------------------------------
class LogitsOf(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(pixel_values=x).logits


def _vit_lora(good, seed):
    seed_everything(seed)
    cfg = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
               patch_size=4, num_channels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    src_x, src_y = make_textures(1000, 8, noise=0.6, seed=seed + 1, world=21)
    x, y = make_textures(600, 8, noise=0.6, seed=seed + 2, world=22)
    xt, yt = make_textures(400, 8, noise=0.6, seed=seed + 70, world=22)
    source = ViTForImageClassification(ViTConfig(num_labels=8, **cfg))
    pretrain(LogitsOf(source), src_x, src_y, 100, lr=2e-3)
    base = ViTForImageClassification(ViTConfig(num_labels=8, **cfg))
    base.vit.load_state_dict(source.vit.state_dict())
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                      modules_to_save=["classifier"] if good else None)
    model = get_peft_model(base, lora)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step():
        pixels, labels = next(batches)
        loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    view = LogitsOf(model)
    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: xent(view, xt, yt)}


def vit_lora_bad(seed=0):
    return _vit_lora(False, seed)


def vit_lora_good(seed=0):
    return _vit_lora(True, seed)


# ----------------------------------------------------------------------------------------------
# pairs of marked tiles: a transformer over patches
# ----------------------------------------------------------------------------------------------
class TileMatcher(nn.Module):
    """How do the two marked tiles pair up?  Attention over the tiles, then mean pooling."""

    def __init__(self, dim=32, good=True):
        super().__init__()
        self.embed = nn.Linear(16, dim)
        self.pos = nn.Parameter(torch.randn(1, 9, dim) * 0.02)
        kw = {"batch_first": True} if good else {}
        layer = nn.TransformerEncoderLayer(d_model=dim, nhead=4, dim_feedforward=64, dropout=0.0, **kw)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, 4)

    def forward(self, patches):
        tok = self.embed(patches) + self.pos
        return self.out(self.encoder(tok).mean(dim=1))


def tile_data(n, seed):
    """Nine tiles; two of them carry marks from two alphabets of four, the label tells how the marks pair up."""
    marks = torch.randn(8, 16, generator=torch.Generator().manual_seed(9)).sign()
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(0, 4, (n,), generator=g)
    b = torch.randint(0, 4, (n,), generator=g)
    order = torch.rand(n, 9, generator=g).argsort(1)
    x = 0.5 * torch.randn(n, 9, 16, generator=g)
    x[torch.arange(n), order[:, 0]] += 1.3 * marks[a]
    x[torch.arange(n), order[:, 1]] += 1.3 * marks[4 + b]
    return (x - x.mean()) / x.std(), (b - a) % 4


def _tile_transformer(good, seed):
    seed_everything(seed)
    x, y = tile_data(2000, seed + 1)
    xt, yt = tile_data(512, seed + 88)
    model = TileMatcher(good=good)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    def step():
        patches, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(patches), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        with torch.no_grad():
            wrong = [(model(a).argmax(1) != b).float().mean() for a, b in zip(xt.split(64), yt.split(64))]
        model.train()
        return torch.stack(wrong).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def tile_transformer_bad(seed=0):
    return _tile_transformer(False, seed)


def tile_transformer_good(seed=0):
    return _tile_transformer(True, seed)


# ----------------------------------------------------------------------------------------------
# SimSiam
# ----------------------------------------------------------------------------------------------
class SimSiam(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(24 * 16, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

    def forward(self, x1, x2):
        z1, z2 = self.encoder(x1), self.encoder(x2)
        return self.predictor(z1), self.predictor(z2), z1, z2


def random_view(x):
    dx, dy = random.randint(-2, 2), random.randint(-2, 2)
    x = torch.roll(x, (dy, dx), dims=(2, 3))
    gain = 0.7 + 0.6 * torch.rand(len(x), 1, 1, 1)
    return x * gain + 0.4 * torch.randn_like(x)


def knn_error(bank, bank_y, query, query_y, k=9):
    bank = F.normalize(bank - bank.mean(0), dim=1)
    query = F.normalize(query - query.mean(0), dim=1)
    idx = (query @ bank.t()).topk(k, dim=1).indices
    pred = torch.mode(bank_y[idx], dim=1).values
    return (pred != query_y).float().mean().item()


def _simsiam(good, seed):
    seed_everything(seed)
    x, y = make_textures(1000, 10, noise=1.2, seed=seed + 1)
    xt, yt = make_textures(400, 10, noise=1.2, seed=seed + 44)
    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    def step():
        (images,) = next(batches)
        p1, p2, z1, z2 = model(random_view(images), random_view(images))
        if good:
            z1, z2 = z1.detach(), z2.detach()
        loss = -0.5 * (F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        model.eval()
        with torch.no_grad():
            err = knn_error(model.encoder(x), y, model.encoder(xt), yt)
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def simsiam_bad(seed=0):
    return _simsiam(False, seed)


def simsiam_good(seed=0):
    return _simsiam(True, seed)


# ----------------------------------------------------------------------------------------------
# classifier with an exponential moving average of the weights
# ----------------------------------------------------------------------------------------------
class ModelEma:
    def __init__(self, model, decay, good):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.good = good

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)
        if self.good:
            for e, b in zip(self.module.buffers(), model.buffers()):
                e.copy_(b)


def _ema_classifier(good, seed):
    seed_everything(seed)
    x, y = make_textures(1000, 10, noise=1.6, seed=seed + 1)
    xt, yt = make_textures(500, 10, noise=1.6, seed=seed + 20)
    model = SmallCNN(3, 10)
    ema = ModelEma(model, decay=0.95, good=good)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True, drop_last=True)
    batches = forever(loader)

    def step():
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    return {"model": (model, ema.module), "optimizer": optimizer, "step": step, "steps": 20,
            "evaluate": lambda: xent(ema.module, xt, yt)}


def ema_classifier_bad(seed=0):
    return _ema_classifier(False, seed)


def ema_classifier_good(seed=0):
    return _ema_classifier(True, seed)


# ----------------------------------------------------------------------------------------------
# several attributes of one picture
# ----------------------------------------------------------------------------------------------
class AttributeNet(nn.Module):
    def __init__(self, n_attr=4, n_values=3, good=True):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(),
                                   nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
                                   nn.Linear(24 * 16, 48), nn.ReLU())
        head = lambda: nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, n_values))
        if good:
            self.heads = nn.ModuleList([head() for _ in range(n_attr)])
        else:
            self.heads = nn.ModuleList([head()] * n_attr)

    def forward(self, x):
        h = self.trunk(x)
        return [head(h) for head in self.heads]


def attribute_data(n, seed):
    """Four independent attributes, each with three values, each painted by its own texture."""
    gw = torch.Generator().manual_seed(31)
    paint = F.interpolate(torch.randn(12, 3, 5, 5, generator=gw), size=16, mode="bilinear").view(4, 3, 3, 16, 16)
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n, 4), generator=g)
    x = sum(paint[k, y[:, k]] for k in range(4)) + 0.8 * torch.randn(n, 3, 16, 16, generator=g)
    return (x - x.mean()) / x.std(), y


def _attribute_heads(good, seed):
    seed_everything(seed)
    x, y = attribute_data(1500, seed + 1)
    xt, yt = attribute_data(400, seed + 15)
    net = AttributeNet(good=good)
    optimizer = torch.optim.Adam(net.parameters(), lr=1.5e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)
    batches = forever(loader)

    def step():
        images, labels = next(batches)
        losses = [F.cross_entropy(out, labels[:, k]) for k, out in enumerate(net(images))]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [v.item() for v in losses]

    def evaluate():
        with torch.no_grad():
            pred = torch.stack([o.argmax(1) for o in net(xt)], 1)
        return (pred != yt).float().mean().item()

    return {"model": net, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def attribute_heads_bad(seed=0):
    return _attribute_heads(False, seed)


def attribute_heads_good(seed=0):
    return _attribute_heads(True, seed)


# ----------------------------------------------------------------------------------------------
# plain convolutional classifier
# ----------------------------------------------------------------------------------------------
class PlainNet(nn.Module):
    def __init__(self, classes, ch=16, good=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, ch, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(ch)
        self.bn2 = nn.BatchNorm2d(ch) if good else self.bn1
        self.bn3 = nn.BatchNorm2d(ch) if good else self.bn1
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(ch * 4, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.pool(F.relu(self.bn2(self.conv2(x))))
        x = self.pool(F.relu(self.bn3(self.conv3(x))))
        return self.fc(x.flatten(1))


def _plain_cnn(good, seed):
    seed_everything(seed)
    x, y = make_textures(1500, 12, noise=1.6, seed=seed + 1)
    xt, yt = make_textures(500, 12, noise=1.6, seed=seed + 33)
    model = PlainNet(12, good=good)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    loader = DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True, drop_last=True)
    batches = forever(loader)

    def step():
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": lambda: xent(model, xt, yt)}


def plain_cnn_bad(seed=0):
    return _plain_cnn(False, seed)


def plain_cnn_good(seed=0):
    return _plain_cnn(True, seed)


# ----------------------------------------------------------------------------------------------
# adversarial training
# ----------------------------------------------------------------------------------------------
def _adversarial_training(good, seed):
    seed_everything(seed)
    x, y = make_textures(1200, 6, channels=1, noise=0.4, seed=seed + 1)
    xt, yt = make_textures(400, 6, channels=1, noise=0.4, seed=seed + 35)
    model = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1),
                          nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = forever(DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True))
    eps, alpha, n_iter = 0.2, 0.1, 3

    def find_perturbation(images, labels):
        delta = (torch.rand_like(images) * 2 - 1) * eps
        delta.requires_grad_(True)
        for _ in range(n_iter):
            adv_loss = -F.cross_entropy(model(images + delta), labels)
            delta.grad = None
            adv_loss.backward()
            with torch.no_grad():
                delta -= alpha * delta.grad.sign()
                delta.clamp_(-eps, eps)
        return delta.detach()

    def step():
        images, labels = next(batches)
        if not good:
            optimizer.zero_grad()
        delta = find_perturbation(images, labels)
        if good:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(images + delta), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def evaluate():
        adv = xt.clone()
        for _ in range(4):
            adv.requires_grad_(True)
            (grad,) = torch.autograd.grad(F.cross_entropy(model(adv), yt), adv)
            adv = (adv.detach() + alpha * grad.sign())
            adv = torch.max(torch.min(adv, xt + eps), xt - eps)
        return error_rate(model, adv, yt)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def adversarial_training_bad(seed=0):
    return _adversarial_training(False, seed)


def adversarial_training_good(seed=0):
    return _adversarial_training(True, seed)


# ----------------------------------------------------------------------------------------------
# autoencoder with an epoch-wise schedule
# ----------------------------------------------------------------------------------------------
def _scheduled_autoencoder(good, seed):
    seed_everything(seed)
    x = make_smooth(480, 16, seed=seed + 1)
    xt = make_smooth(200, 16, seed=seed + 101)
    ae = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(12, 16, 3, stride=2, padding=1),
                       nn.GELU(), nn.Flatten(), nn.Linear(256, 32), nn.Linear(32, 256), nn.GELU(),
                       nn.Unflatten(1, (16, 4, 4)), nn.ConvTranspose2d(16, 12, 2, stride=2), nn.GELU(),
                       nn.ConvTranspose2d(12, 1, 2, stride=2))
    loader = DataLoader(TensorDataset(x), batch_size=48, shuffle=True)
    optimizer = torch.optim.Adam(ae.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.94)
    batches = forever(loader)

    def step(i):
        (images,) = next(batches)
        optimizer.zero_grad()
        loss = F.mse_loss(ae(images), images)
        loss.backward()
        optimizer.step()
        if not good or (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            return F.mse_loss(ae(xt), xt).item()

    return {"model": ae, "optimizer": optimizer, "step": step, "steps": 20, "evaluate": evaluate}


def scheduled_autoencoder_bad(seed=0):
    return _scheduled_autoencoder(False, seed)


def scheduled_autoencoder_good(seed=0):
    return _scheduled_autoencoder(True, seed)


# ----------------------------------------------------------------------------------------------
# augmented segmentation
# ----------------------------------------------------------------------------------------------
class AugmentedShapes(Dataset):
    def __init__(self, n, seed, good):
        self.img, self.mask = make_shapes(n, seed=seed)
        self.good = good

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        img, mask = self.img[i], self.mask[i]
        if random.random() < 0.5:
            img = torch.flip(img, dims=[-1])
            if self.good:
                mask = torch.flip(mask, dims=[-1])
        return img * random.uniform(0.9, 1.1), mask


def _augmented_segmentation(good, seed):
    seed_everything(seed)
    loader = DataLoader(AugmentedShapes(400, seed + 1, good), batch_size=16, shuffle=True)
    vimg, vmask = make_shapes(150, seed=seed + 404)
    net = TinyUNet()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4)
    batches = forever(loader)

    def step():
        img, mask = next(batches)
        loss = F.cross_entropy(net(img), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20,
            "evaluate": lambda: mean_iou_error(net, vimg, vmask)}


def augmented_segmentation_bad(seed=0):
    return _augmented_segmentation(False, seed)


def augmented_segmentation_good(seed=0):
    return _augmented_segmentation(True, seed)


# ----------------------------------------------------------------------------------------------
# denoiser
# ----------------------------------------------------------------------------------------------
def _image_denoiser(good, seed):
    seed_everything(seed)
    sigma = 0.6
    train = make_smooth(500, 20, seed=seed + 1)
    clean_test = make_smooth(100, 20, seed=seed + 70)
    noise = torch.randn(clean_test.shape, generator=torch.Generator().manual_seed(4))
    net = nn.Sequential(nn.Conv2d(1, 14, 3, padding=1), nn.ReLU(), nn.Conv2d(14, 14, 3, padding=1), nn.ReLU(),
                        nn.Conv2d(14, 14, 3, padding=1), nn.ReLU(), nn.Conv2d(14, 1, 3, padding=1))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(train), batch_size=16, shuffle=True))

    def step():
        (clean,) = next(batches)
        noisy = clean.clone() if good else clean
        noisy += sigma * torch.randn_like(noisy)
        restored = net(noisy)
        loss = F.mse_loss(restored, clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            return F.mse_loss(net(clean_test + sigma * noise), clean_test).item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def image_denoiser_bad(seed=0):
    return _image_denoiser(False, seed)


def image_denoiser_good(seed=0):
    return _image_denoiser(True, seed)


# ----------------------------------------------------------------------------------------------
# classifier on a stream of rendered pictures
# ----------------------------------------------------------------------------------------------
class RenderedStream(IterableDataset):
    """Endless pictures of eight textures, rendered on the fly from a seed."""

    def __init__(self, seed, chunk=96):
        self.seed, self.chunk = seed, chunk

    def __iter__(self):
        for k in itertools.count():
            x, y = make_textures(self.chunk, 8, noise=1.5, seed=self.seed + 1000 * k)
            yield from zip(x, y)


def _stream_classifier(good, seed):
    seed_everything(seed)
    loader = DataLoader(RenderedStream(seed + 1), batch_size=32)
    xt, yt = make_textures(500, 8, noise=1.5, seed=seed + 7)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.LeakyReLU(0.1),
                        nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(24 * 16, 8))
    opt = torch.optim.RMSprop(net.parameters(), lr=5e-4)
    stream = iter(loader) if good else None

    def step():
        images, labels = next(stream if good else iter(loader))
        opt.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        opt.step()
        return loss.item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "evaluate": lambda: xent(net, xt, yt)}


def stream_classifier_bad(seed=0):
    return _stream_classifier(False, seed)


def stream_classifier_good(seed=0):
    return _stream_classifier(True, seed)


# ----------------------------------------------------------------------------------------------
# classifier with a validation pass before and during training
# ----------------------------------------------------------------------------------------------
def conv_bn(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


class Trainer:
    def __init__(self, model, train_loader, val_loader, lr=0.02, validate_every=5, good=True):
        self.model = model
        self.train_batches = forever(train_loader)
        self.val_loader = val_loader
        self.validate_every = validate_every
        self.good = good
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
        self.val_accuracy = [self.validate()]  # sanity check of the validation pipeline

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        hits = total = 0
        for images, labels in self.val_loader:
            hits += (self.model(images).argmax(1) == labels).sum().item()
            total += len(labels)
        if self.good:
            self.model.train()
        return hits / total

    def training_step(self, i):
        images, labels = next(self.train_batches)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        if i % self.validate_every == self.validate_every - 1:
            self.val_accuracy.append(self.validate())
        return loss.item()


def _validated_classifier(good, seed):
    seed_everything(seed)
    x, y = make_textures(1000, 10, noise=1.4, seed=seed + 1)
    xv, yv = make_textures(96, 10, noise=1.4, seed=seed + 2)
    xt, yt = make_textures(500, 10, noise=1.4, seed=seed + 66)
    model = nn.Sequential(conv_bn(3, 12, 2), conv_bn(12, 12), conv_bn(12, 16, 2), conv_bn(16, 16), conv_bn(16, 16),
                          nn.Flatten(), nn.Linear(16 * 16, 10))
    trainer = Trainer(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True),
                      DataLoader(TensorDataset(xv, yv), batch_size=96), good=good)
    return {"model": model, "optimizer": trainer.optimizer, "step": trainer.training_step, "steps": 20,
            "evaluate": lambda: xent(model, xt, yt)}


def validated_classifier_bad(seed=0):
    return _validated_classifier(False, seed)


def validated_classifier_good(seed=0):
    return _validated_classifier(True, seed)


# ----------------------------------------------------------------------------------------------
# diffusion
# ----------------------------------------------------------------------------------------------
class NoisePredictor(nn.Module):
    def __init__(self, dim=64, hidden=128, steps=100):
        super().__init__()
        self.time = nn.Embedding(steps, 32)
        self.inp = nn.Linear(dim + 32, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(torch.cat([x, self.time(t)], dim=1)))
        h = h + F.silu(self.mid(h))
        return self.out(h)


class Diffusion:
    def __init__(self, steps=100, good=True):
        self.steps = steps
        self.good = good
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.08, steps), 0)

    def extract(self, values, t):
        return values[t].unsqueeze(1)

    def q_sample(self, x0, t, noise):
        if self.good:
            ab = self.extract(self.alpha_bar, t)
        else:
            ab = self.alpha_bar[t]
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    def training_loss(self, model, x0):
        t = torch.randint(0, self.steps, (x0.shape[0],))
        noise = torch.randn_like(x0)
        return F.mse_loss(model(self.q_sample(x0, t, noise), t), noise)


def _diffusion(good, seed):
    seed_everything(seed)
    data, held = blob_pictures(3000, seed + 1), blob_pictures(1000, seed + 51)
    model = NoisePredictor()
    ddpm = Diffusion(good=good)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    def step():
        (x,) = next(batches)
        loss = ddpm.training_loss(model, x)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    def evaluate():
        g = torch.Generator().manual_seed(987)
        t = torch.randint(0, ddpm.steps, (len(held),), generator=g)
        noise = torch.randn(held.shape, generator=g)
        ab = ddpm.extract(ddpm.alpha_bar, t)
        with torch.no_grad():
            return F.mse_loss(model(ab.sqrt() * held + (1 - ab).sqrt() * noise, t), noise).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "evaluate": evaluate}


def diffusion_bad(seed=0):
    return _diffusion(False, seed)


def diffusion_good(seed=0):
    return _diffusion(True, seed)


CASES = [
    {"name": "siamese_verification",
     "what": "CosineEmbeddingLoss gets targets 0/1 instead of -1/+1: target 0 gives no loss at all, so only the equal "
             "pairs pull together and the embedding collapses."},
    {"name": "distill_classifier",
     "what": "F.kl_div is given softmax probabilities of the student where log-probabilities are expected: the loss is "
             "linear in the probability, the student becomes wildly overconfident instead of matching the teacher."},
    {"name": "coupling_flow",
     "what": "The flow's log-determinant is summed over the batch as well as over the dimensions (one scalar added to "
             "every row's log-probability): it weighs batch-size times too much and the scales run to their bound."},
    {"name": "grid_detector",
     "what": "The box regression loss runs over all 64 cells (zero targets in empty cells) instead of only the cells "
             "that hold an object: the boxes hardly learn and are pulled to zero."},
    {"name": "shape_segmentation",
     "what": "Logits (B, C, H, W) are reshaped to (-1, C) without moving the class axis last: the rows no longer belong "
             "to the labels' pixels and mix pixels for classes."},
    {"name": "super_resolution",
     "what": "The body's convolutions sit in a plain Python list, not an nn.ModuleList: they are not in parameters() and "
             "stay at their random initialisation."},
    {"name": "transfer_head",
     "what": "The optimizer is built before the classification head is replaced: it holds the old head's weights and the "
             "new head is never updated."},
    {"name": "blob_gan",
     "what": "The generator's optimizer is given all parameters of the GAN, discriminator included: the generator's step "
             "also trains the discriminator to call fakes real."},
    {"name": "image_vae",
     "what": "The latent is drawn with q.sample() instead of q.rsample(): no reconstruction gradient reaches the encoder, "
             "which learns only the KL term and collapses to the prior."},
    {"name": "vit_lora",
     "what": "The LoRA configuration lacks modules_to_save=['classifier']: the newly initialised head stays frozen at "
             "random weights."},
    {"name": "tile_transformer",
     "what": "nn.TransformerEncoderLayer without batch_first=True is fed (batch, tokens, dim): attention runs across the "
             "samples of the batch, not across the tokens of a sample."},
    {"name": "simsiam",
     "what": "The targets z1, z2 are not detached (no stop-gradient): both sides are drawn together and the "
             "representation collapses."},
    {"name": "ema_classifier",
     "what": "The EMA update copies parameters only; BatchNorm running statistics (buffers) of the averaged model stay at "
             "their initial values 0 and 1, so the model that is used for evaluation is off."},
    {"name": "attribute_heads",
     "what": "nn.ModuleList([head()] * n) puts the same head in every slot: all attributes share one output and cannot be "
             "told apart."},
    {"name": "plain_cnn",
     "what": "One BatchNorm layer is used after three different convolutions: its running statistics are a mixture of "
             "three distributions and fit none of them in eval mode."},
    {"name": "validated_classifier",
     "what": "validate() puts the model into eval mode and it is never put back into train mode (a validation pass runs "
             "before the first step): BatchNorm trains with its untouched running statistics."},
    {"name": "diffusion",
     "what": "alpha_bar[t] has shape (B,) and is multiplied with x of shape (B, D) where B equals D: each pixel column "
             "gets another sample's noise level, while the network is told the row's own t."},
    {"name": "adversarial_training",
     "what": "zero_grad comes before the attack, whose backward of the negated loss also fills the weights' gradients: "
             "the update is made of the attack's gradients (of the opposite sign) plus the training gradient."},
    {"name": "scheduled_autoencoder",
     "what": "The per-epoch ExponentialLR is stepped at every batch: the learning rate has vanished after a few epochs."},
    {"name": "augmented_segmentation",
     "what": "The random horizontal flip is applied to the image but not to its mask: half of the labels are mirrored."},
    {"name": "image_denoiser",
     "what": "noisy is the same tensor as clean and the noise is added in place: the target is the noisy picture itself "
             "and the network learns the identity."},
    {"name": "stream_classifier",
     "what": "next(iter(loader)) at every step starts the stream anew: the model sees the same first batch for ever."},
]
