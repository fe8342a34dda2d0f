"""Small vision / audio / generative training programs on synthetic data.

Every program is a builder that returns the model(s), the optimizer(s), a
`step(i)` that makes one training step and a `probe()` that measures the
program's held-out quality (lower is better).
"""
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASES = []


def case(name, what, build):
    CASES.append({"name": name, "what": what})

    def bad():
        return build(True)

    def good():
        return build(False)

    for kind, fn in (("bad", bad), ("good", good)):
        fn.__name__ = fn.__qualname__ = f"{name}_{kind}"
        globals()[fn.__name__] = fn


# --------------------------------------------------------------------------
# helpers
# --------------------------------------------------------------------------

def forever(loader):
    while True:
        for batch in loader:
            yield batch


def pixel_grid(h, w):
    return torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")


def conv_bn_relu(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


def oriented_textures(n, gen, size=16, classes=6, noise=0.8, freq=(0.8, 1.3)):
    yy, xx = pixel_grid(size, size)
    y = torch.randint(classes, (n,), generator=gen)
    theta = math.pi * y / classes + 0.1 * torch.randn(n, generator=gen)
    freq = freq[0] + (freq[1] - freq[0]) * torch.rand(n, generator=gen)
    phase = 2 * math.pi * torch.rand(n, generator=gen)
    v = lambda t: t.view(-1, 1, 1)
    wave = torch.sin(v(freq) * (xx * v(theta.cos()) + yy * v(theta.sin())) + v(phase))
    x = wave + noise * torch.randn(n, size, size, generator=gen)
    return x.unsqueeze(1), y


def glyph_bank(k, size, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(k, 1, size, size, generator=g)
    t = F.avg_pool2d(F.pad(t, (2, 2, 2, 2), mode="circular"), 5, stride=1)
    return t / t.flatten(1).std(1).view(-1, 1, 1, 1)


def shift_images(x, dy, dx):
    n, size = len(x), x.shape[-1]
    ar = torch.arange(size)
    rows = (ar[None] + dy[:, None]) % size
    cols = (ar[None] + dx[:, None]) % size
    return x[torch.arange(n)[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2).contiguous()


def glyph_images(n, bank, gen, noise=1.0, shift=2):
    y = torch.randint(len(bank), (n,), generator=gen)
    dy = torch.randint(-shift, shift + 1, (n,), generator=gen)
    dx = torch.randint(-shift, shift + 1, (n,), generator=gen)
    x = shift_images(bank[y], dy, dx)
    return x + noise * torch.randn(x.shape, generator=gen), y


def sliced_wasserstein(a, b, n_proj=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    a, b = a.flatten(1), b.flatten(1)
    p = torch.randn(a.shape[1], n_proj, generator=g)
    p = p / p.norm(dim=0, keepdim=True)
    return float(((a @ p).sort(0).values - (b @ p).sort(0).values).abs().mean())


def knn_error(train_f, train_y, test_f, test_y, k=5):
    train_f, test_f = F.normalize(train_f, dim=1), F.normalize(test_f, dim=1)
    idx = (test_f @ train_f.t()).topk(k, dim=1).indices
    votes = F.one_hot(train_y[idx], int(train_y.max()) + 1).sum(1)
    return float((votes.argmax(1) != test_y).float().mean())


class TinyResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class SmallConvNet(nn.Module):
    def __init__(self, num_classes, cin=1, width=16):
        super().__init__()
        self.features = nn.Sequential(
            conv_bn_relu(cin, width),
            conv_bn_relu(width, 2 * width, stride=2),
            conv_bn_relu(2 * width, 2 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        return self.fc(self.features(x))


# --------------------------------------------------------------------------
# 1. image classification with CutMix
# --------------------------------------------------------------------------

def _cutmix_lambda(bug):
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(11)
    train_x, train_y = oriented_textures(1500, gen, noise=1.0)
    test_x, test_y = oriented_textures(1000, gen, noise=1.0)
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    net = SmallConvNet(6)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def rand_bbox(h, w, lam):
        cut = math.sqrt(1.0 - lam)
        ch, cw = int(h * cut), int(w * cut)
        cy, cx = int(torch.randint(h, (1,))), int(torch.randint(w, (1,)))
        return max(cy - ch // 2, 0), min(cy + ch // 2, h), max(cx - cw // 2, 0), min(cx + cw // 2, w)

    def cutmix(x, y, alpha=1.0):
        h, w = x.shape[-2:]
        lam = float(torch.distributions.Beta(alpha, alpha).sample())
        perm = torch.randperm(len(x))
        y1, y2, x1, x2 = rand_bbox(h, w, lam)
        x = x.clone()
        x[:, :, y1:y2, x1:x2] = x[perm, :, y1:y2, x1:x2]
        # use the exact area, the box may have been clipped at the border
        area = (y2 - y1) * (x2 - x1) / (h * w)
        lam = area if bug else 1.0 - area
        return x, y, y[perm], lam

    def step(i):
        x, y = next(batches)
        x, ya, yb, lam = cutmix(x, y)
        opt.zero_grad()
        out = net(x)
        loss = lam * F.cross_entropy(out, ya) + (1 - lam) * F.cross_entropy(out, yb)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        net.eval()
        nll = F.cross_entropy(net(test_x), test_y)
        net.train()
        return float(nll)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("cutmix_lambda",
     "After CutMix, lambda is recomputed as the area of the pasted box instead of one minus it, so each "
     "image's labels get each other's weights; the classifier learns to favour the lesser image and its test log loss is far worse.",
     _cutmix_lambda)


# --------------------------------------------------------------------------
# 2. semantic segmentation
# --------------------------------------------------------------------------

def shape_scenes(n, gen, size=24):
    yy, xx = pixel_grid(size, size)
    base = torch.tensor([[0.8, -0.2, -0.2], [-0.2, 0.8, -0.2], [0.6, 0.5, -0.3]])
    img = torch.zeros(n, 3, size, size)
    mask = torch.zeros(n, size, size, dtype=torch.long)
    for c in range(3):
        cx = (3 + (size - 6) * torch.rand(n, generator=gen)).view(-1, 1, 1)
        cy = (3 + (size - 6) * torch.rand(n, generator=gen)).view(-1, 1, 1)
        r = (3 + 3 * torch.rand(n, generator=gen)).view(-1, 1, 1)
        dx, dy = (xx - cx).abs(), (yy - cy).abs()
        inside = [dx ** 2 + dy ** 2 < r ** 2, torch.maximum(dx, dy) < 0.85 * r, dx + dy < 1.2 * r][c]
        colour = base[c] + 0.2 * torch.randn(n, 3, generator=gen)
        img = torch.where(inside.unsqueeze(1), colour.view(n, 3, 1, 1), img)
        mask[inside] = c + 1
    return img + 0.35 * torch.randn(img.shape, generator=gen), mask


class FCN(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = conv_bn_relu(3, 16)
        self.down = conv_bn_relu(16, 32, stride=2)
        self.mid = conv_bn_relu(32, 32)
        self.head = nn.Sequential(conv_bn_relu(48, 24), nn.Conv2d(24, num_classes, 1))

    def forward(self, x):
        s = self.stem(x)
        m = self.mid(self.down(s))
        m = F.interpolate(m, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(torch.cat([s, m], dim=1))


def mean_iou(pred, target, k):
    ious = []
    for c in range(k):
        p, t = pred == c, target == c
        ious.append((p & t).sum() / (p | t).sum().clamp(min=1))
    return float(torch.stack(ious).mean())


def _seg_flatten_logits(bug):
    torch.manual_seed(1)
    gen = torch.Generator().manual_seed(21)
    images, masks = shape_scenes(600, gen)
    val_images, val_masks = shape_scenes(150, gen)
    num_classes = 4
    model = FCN(num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(images, masks), batch_size=12, shuffle=True)
    it = forever(loader)

    def step(i):
        model.train()
        x, y = next(it)
        optimizer.zero_grad()
        logits = model(x)
        # one row of class scores per pixel
        if bug:
            flat = logits.view(-1, num_classes)
        else:
            flat = logits.permute(0, 2, 3, 1).reshape(-1, num_classes)
        loss = criterion(flat, y.view(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = model(val_images).argmax(1)
        return 1.0 - mean_iou(pred, val_masks, num_classes)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


case("seg_flatten_logits",
     "Segmentation logits (N,C,H,W) are flattened with view(-1, C) without moving the channel axis last, so the "
     "loss pairs scrambled scores with pixels and the masks are not learnt.",
     _seg_flatten_logits)


# --------------------------------------------------------------------------
# 3. lesion segmentation with augmentation
# --------------------------------------------------------------------------

class RandomFlip:
    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, *tensors):
        if torch.rand(1) < self.p:
            tensors = [t.flip(-1) for t in tensors]
        if torch.rand(1) < self.p:
            tensors = [t.flip(-2) for t in tensors]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)


def make_lesions(n, gen, size=24):
    yy, xx = pixel_grid(size, size)
    u = lambda lo, hi: (lo + (hi - lo) * torch.rand(n, generator=gen)).view(-1, 1, 1)
    cx, cy, a, b, th = u(5, 19), u(5, 19), u(3, 6), u(2, 4), u(0, math.pi)
    xr = (xx - cx) * th.cos() + (yy - cy) * th.sin()
    yr = -(xx - cx) * th.sin() + (yy - cy) * th.cos()
    mask = ((xr / a) ** 2 + (yr / b) ** 2 < 1).float()
    shade = 0.05 * (xx - size / 2) * u(-1, 1) + 0.05 * (yy - size / 2) * u(-1, 1)
    img = shade + u(0.6, 1.2) * mask + 0.5 * torch.randn(n, size, size, generator=gen)
    return img.unsqueeze(1), mask.unsqueeze(1)


def _seg_joint_augment(bug):
    torch.manual_seed(2)
    gen = torch.Generator().manual_seed(31)

    class LesionDataset(Dataset):
        def __init__(self, n, train):
            self.images, self.masks = make_lesions(n, gen)
            self.flip = RandomFlip() if train else None

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image, mask = self.images[idx], self.masks[idx]
            if self.flip is not None:
                if bug:
                    image = self.flip(image)
                    mask = self.flip(mask)
                else:
                    image, mask = self.flip(image, mask)
            return image, mask

    class MiniUNet(nn.Module):
        def __init__(self, c=12):
            super().__init__()
            self.enc1 = conv_bn_relu(1, c)
            self.enc2 = conv_bn_relu(c, 2 * c)
            self.bottom = conv_bn_relu(2 * c, 4 * c)
            self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2)
            self.dec2 = conv_bn_relu(4 * c, 2 * c)
            self.up1 = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
            self.dec1 = conv_bn_relu(2 * c, c)
            self.out = nn.Conv2d(c, 1, 1)

        def forward(self, x):
            e1 = self.enc1(x)
            e2 = self.enc2(F.max_pool2d(e1, 2))
            b = self.bottom(F.max_pool2d(e2, 2))
            d2 = self.dec2(torch.cat([self.up2(b), e2], 1))
            d1 = self.dec1(torch.cat([self.up1(d2), e1], 1))
            return self.out(d1)

    def dice(p, t, eps=1.0):
        inter = (p * t).sum((1, 2, 3))
        return ((2 * inter + eps) / (p.sum((1, 2, 3)) + t.sum((1, 2, 3)) + eps)).mean()

    train_set, val_set = LesionDataset(400, True), LesionDataset(150, False)
    loader = forever(DataLoader(train_set, batch_size=12, shuffle=True, drop_last=True))
    unet = MiniUNet()
    opt = torch.optim.AdamW(unet.parameters(), lr=2e-3)

    def step(i):
        unet.train()
        img, msk = next(loader)
        logits = unet(img)
        loss = F.binary_cross_entropy_with_logits(logits, msk) + 1 - dice(logits.sigmoid(), msk)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        unet.eval()
        pred = (unet(val_set.images) > 0).float()
        return 1.0 - float(dice(pred, val_set.masks))

    return {"model": unet, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("seg_joint_augment",
     "Image and mask go through the random flip in two separate calls with separate draws, so three quarters of "
     "the training pairs are misaligned.",
     _seg_joint_augment)


# --------------------------------------------------------------------------
# 4. one-stage detector
# --------------------------------------------------------------------------

def box_images(n, gen, size=32):
    yy, xx = pixel_grid(size, size)
    w = 6 + 8 * torch.rand(n, generator=gen)
    h = 6 + 8 * torch.rand(n, generator=gen)
    cx = w / 2 + (size - w) * torch.rand(n, generator=gen)
    cy = h / 2 + (size - h) * torch.rand(n, generator=gen)
    v = lambda t: t.view(-1, 1, 1)
    inside = ((xx + 0.5 - v(cx)).abs() < v(w) / 2) & ((yy + 0.5 - v(cy)).abs() < v(h) / 2)
    img = inside.float() * (0.8 + 0.6 * torch.rand(n, 1, 1, generator=gen))
    img = img + 0.3 * torch.randn(n, size, size, generator=gen)
    return img.unsqueeze(1), torch.stack([cx, cy, w, h], 1)


def box_iou_cxcywh(a, b):
    lt = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
    rb = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
    inter = (rb - lt).clamp(min=0).prod(1)
    return inter / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - inter)


def _det_grid_assign(bug):
    torch.manual_seed(3)
    gen = torch.Generator().manual_seed(41)
    stride, S, anchor = 4, 8, 10.0

    class GridDetector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                conv_bn_relu(1, 16, stride=2), conv_bn_relu(16, 32, stride=2),
                conv_bn_relu(32, 32), conv_bn_relu(32, 32))
            self.pred = nn.Conv2d(32, 5, 1)
            nn.init.constant_(self.pred.bias[:1], -3.0)

        def forward(self, x):
            return self.pred(self.backbone(x)).permute(0, 2, 3, 1)   # B, S, S, 5

    def build_targets(boxes):
        obj = torch.zeros(len(boxes), S, S)
        reg = torch.zeros(len(boxes), S, S, 4)
        for b, (cx, cy, w, h) in enumerate(boxes.tolist()):
            gx, gy = min(int(cx / stride), S - 1), min(int(cy / stride), S - 1)
            t = torch.tensor([cx / stride - gx, cy / stride - gy, math.log(w / anchor), math.log(h / anchor)])
            if bug:
                obj[b, gx, gy] = 1.0
                reg[b, gx, gy] = t
            else:
                obj[b, gy, gx] = 1.0
                reg[b, gy, gx] = t
        return obj, reg

    def decode(out):
        score, idx = out[..., 0].flatten(1).max(1)
        r = out.flatten(1, 2)[torch.arange(len(out)), idx, 1:]
        gy, gx = idx // S, idx % S
        return torch.stack([(gx + r[:, 0]) * stride, (gy + r[:, 1]) * stride,
                            r[:, 2].exp() * anchor, r[:, 3].exp() * anchor], 1)

    imgs, boxes = box_images(800, gen)
    v_imgs, v_boxes = box_images(200, gen)
    det = GridDetector()
    opt = torch.optim.Adam(det.parameters(), lr=2e-3)
    batches = forever(DataLoader(TensorDataset(imgs, boxes), batch_size=16, shuffle=True))

    def step(i):
        det.train()
        x, bx = next(batches)
        obj, reg = build_targets(bx)
        out = det(x)
        pos = obj > 0
        loss_obj = F.binary_cross_entropy_with_logits(out[..., 0], obj, reduction="sum") / len(x)
        loss_box = F.smooth_l1_loss(out[..., 1:][pos], reg[pos])
        loss = loss_obj + 2.0 * loss_box
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        det.eval()
        return 1.0 - float(box_iou_cxcywh(decode(det(v_imgs)), v_boxes).mean())

    return {"model": det, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("det_grid_assign",
     "Target assignment of a grid detector indexes the (row, column) target maps with (gx, gy), so the "
     "responsible cell is the transposed one; boxes are found only near the diagonal.",
     _det_grid_assign)


# --------------------------------------------------------------------------
# 5. facial key points
# --------------------------------------------------------------------------

LEFT_RIGHT_PAIRS = [1, 0, 3, 2]   # left eye, right eye, left mouth corner, right mouth corner


def make_faces(n, gen, size=24):
    yy, xx = pixel_grid(size, size)
    u = lambda lo, hi: lo + (hi - lo) * torch.rand(n, generator=gen)
    cx, cy, e, tilt = u(9, 14), u(9, 14), u(7, 10), u(-0.25, 0.25)
    rel = torch.stack([
        torch.stack([-e / 2, torch.full_like(e, -3.5)], 1),
        torch.stack([e / 2, torch.full_like(e, -3.5)], 1),
        torch.stack([-e / 3, torch.full_like(e, 4.0)], 1),
        torch.stack([e / 3, torch.full_like(e, 4.0)], 1)], 1)
    c, s = tilt.cos().view(-1, 1), tilt.sin().view(-1, 1)
    px = cx.view(-1, 1) + rel[..., 0] * c - rel[..., 1] * s
    py = cy.view(-1, 1) + rel[..., 0] * s + rel[..., 1] * c
    img = torch.zeros(n, size, size)
    for k, (amp, sig) in enumerate([(1.2, 1.3), (1.2, 1.3), (0.9, 1.0), (0.9, 1.0)]):
        d2 = (xx - px[:, k].view(-1, 1, 1)) ** 2 + (yy - py[:, k].view(-1, 1, 1)) ** 2
        img = img + amp * torch.exp(-d2 / (2 * sig ** 2))
    img = img + 0.1 * torch.randn(n, size, size, generator=gen)
    return img.unsqueeze(1), torch.stack([px, py], -1) / (size - 1)


def _kpt_flip(bug):
    torch.manual_seed(4)
    gen = torch.Generator().manual_seed(51)

    class FaceKeypoints(Dataset):
        def __init__(self, n, augment):
            self.x, self.k = make_faces(n, gen)
            self.augment = augment

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            img, kpts = self.x[i], self.k[i].clone()
            if self.augment and torch.rand(()) < 0.5:
                img = torch.flip(img, dims=[-1])
                kpts[:, 0] = 1.0 - kpts[:, 0]
                if not bug:
                    kpts = kpts[LEFT_RIGHT_PAIRS]
            return img, kpts

    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(24, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 36, 96), nn.ReLU(), nn.Linear(96, 8), nn.Unflatten(1, (4, 2)))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    train, val = FaceKeypoints(600, True), FaceKeypoints(200, False)
    loader = forever(DataLoader(train, batch_size=24, shuffle=True))

    def step(i):
        img, kpts = next(loader)
        opt.zero_grad()
        loss = F.smooth_l1_loss(net(img), kpts, beta=0.02)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            err = (net(val.x) - val.k).norm(dim=-1) * 23
        return float(err.mean())          # pixels

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("kpt_flip",
     "Horizontal flip mirrors the x coordinates but does not exchange the left and right key points, so half of "
     "the training targets contradict the others and left/right predictions drift to the middle.",
     _kpt_flip)


# --------------------------------------------------------------------------
# 6. audio event classification with SpecAugment
# --------------------------------------------------------------------------

def make_tones(n, gen, sr=4000, dur=0.5):
    t = torch.arange(int(sr * dur)).float() / sr
    y = torch.randint(6, (n,), generator=gen)
    f0 = 350 + 250 * torch.rand(n, generator=gen)
    sweep = 500 + 300 * torch.rand(n, generator=gen)
    waves = []
    for k, f, s in zip(y.tolist(), f0.tolist(), sweep.tolist()):
        if k == 0:
            w = torch.sin(2 * math.pi * (f * t + s * t ** 2))                    # rising
        elif k == 1:
            w = torch.sin(2 * math.pi * ((f + s) * t - s * t ** 2))              # falling
        elif k == 2:
            w = torch.sin(2 * math.pi * (f + s / 2) * t)                         # steady
        elif k == 3:
            w = torch.sin(2 * math.pi * f * t) + torch.sin(2 * math.pi * 2.0 * f * t)
        elif k == 4:
            w = torch.sin(2 * math.pi * (f + s / 2) * t) * (torch.sin(2 * math.pi * 9 * t) > 0)
        else:
            w = torch.sin(2 * math.pi * ((f + s / 2) * t) + 12 * torch.sin(2 * math.pi * 5 * t))
        waves.append(w)
    wav = torch.stack(waves) + 0.7 * torch.randn(n, len(t), generator=gen)
    spec = torch.stft(wav, n_fft=64, hop_length=50, window=torch.hann_window(64), return_complex=True).abs()
    feat = torch.log(spec + 1e-2)
    return (feat - 1.0) / 0.9, y


def spec_augment(x, freq_mask=6, time_mask=8, num=2):
    n_freq, n_time = x.shape
    for _ in range(num):
        f = int(torch.randint(freq_mask + 1, (1,)))
        f0 = int(torch.randint(n_freq - f, (1,)))
        x[f0:f0 + f, :] = 0
        t = int(torch.randint(time_mask + 1, (1,)))
        t0 = int(torch.randint(n_time - t, (1,)))
        x[:, t0:t0 + t] = 0
    return x


def _audio_specaug(bug):
    torch.manual_seed(5)
    gen = torch.Generator().manual_seed(61)

    class ToneDataset(Dataset):
        """Features are computed once and kept in memory."""

        def __init__(self, n, train):
            self.feats, self.labels = make_tones(n, gen)
            self.train = train

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, i):
            x = self.feats[i] if bug else self.feats[i].clone()
            if self.train:
                x = spec_augment(x)
            return x.unsqueeze(0), self.labels[i]

    train_ds, test_ds = ToneDataset(192, True), ToneDataset(400, False)
    dl = forever(DataLoader(train_ds, batch_size=32, shuffle=True))
    model = SmallConvNet(6)
    optim = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x, y = next(dl)
        optim.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optim.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float((model(test_ds.feats.unsqueeze(1)).argmax(1) != test_ds.labels).float().mean())

    return {"model": model, "optimizer": optim, "steps": 20, "step": step, "probe": probe}


case("audio_specaug",
     "SpecAugment writes its masks in place into the feature tensor cached by the dataset (a view is returned, no "
     "clone), so the masks pile up epoch after epoch until the training data is blank.",
     _audio_specaug)


# --------------------------------------------------------------------------
# 7. speech recognition with CTC
# --------------------------------------------------------------------------

def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def _ctc_charset(bug):
    torch.manual_seed(6)
    gen = torch.Generator().manual_seed(71)
    charset = "aeiou"
    protos = torch.randn(len(charset), 12, generator=gen)
    T = 40

    if bug:
        stoi = {c: i for i, c in enumerate(charset)}
    else:
        stoi = {c: i + 1 for i, c in enumerate(charset)}
    itos = {i: c for c, i in stoi.items()}

    def rint(lo, hi):
        return int(torch.randint(lo, hi, (1,), generator=gen))

    def utterance():
        word = "".join(charset[rint(0, len(charset))] for _ in range(rint(3, 7)))
        frames = 0.7 * torch.randn(T, 12, generator=gen)
        t = rint(0, 3)
        for c in word:
            d = rint(3, 5)
            frames[t:t + d] += protos[charset.index(c)]
            t += d + rint(1, 3)
        return word, frames

    train = [utterance() for _ in range(500)]
    dev = [utterance() for _ in range(120)]

    def collate(items):
        x = torch.stack([f for _, f in items])
        targets = torch.tensor([stoi[c] for w, _ in items for c in w])
        lens = torch.tensor([len(w) for w, _ in items])
        return x, targets, lens

    class AcousticModel(nn.Module):
        def __init__(self, hidden=96):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(12, hidden, 5, padding=2), nn.ReLU(), nn.Conv1d(hidden, hidden, 3, padding=1), nn.ReLU())
            self.out = nn.Linear(hidden, len(charset) + 1)

        def forward(self, x):
            h = self.conv(x.transpose(1, 2)).transpose(1, 2)
            return self.out(h).log_softmax(-1)

    am = AcousticModel()
    ctc = nn.CTCLoss(zero_infinity=True)
    opt = torch.optim.Adam(am.parameters(), lr=3e-3)
    loader = forever(DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate))

    def step(i):
        x, targets, target_lens = next(loader)
        opt.zero_grad()
        log_probs = am(x).transpose(0, 1)
        input_lens = torch.full((x.size(0),), T, dtype=torch.long)
        loss = ctc(log_probs, targets, input_lens, target_lens)
        loss.backward()
        nn.utils.clip_grad_norm_(am.parameters(), 5.0)
        opt.step()
        return loss.item()

    def greedy(log_probs):
        ids = torch.unique_consecutive(log_probs.argmax(-1)).tolist()
        return "".join(itos.get(k, "") for k in ids if k != ctc.blank)

    @torch.no_grad()
    def probe():
        lp = am(torch.stack([f for _, f in dev]))
        edits = sum(edit_distance(greedy(lp[n]), w) for n, (w, _) in enumerate(dev))
        return edits / sum(len(w) for w, _ in dev)      # character error rate

    return {"model": am, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("ctc_charset",
     "Characters are numbered from 0 while nn.CTCLoss reserves index 0 for the blank, so the first letter of the "
     "alphabet is trained as blank and never recognised.",
     _ctc_charset)


# --------------------------------------------------------------------------
# 8. DCGAN
# --------------------------------------------------------------------------

def blob_images(n, gen, size=12):
    yy, xx = pixel_grid(size, size)
    left = torch.rand(n, generator=gen) < 0.5
    cx = torch.where(left, 3.5, 7.5) + 0.7 * torch.randn(n, generator=gen)
    cy = 5.5 + 1.5 * torch.randn(n, generator=gen)
    sig = 1.2 + 0.8 * torch.rand(n, generator=gen)
    v = lambda t: t.view(-1, 1, 1)
    img = torch.exp(-((xx - v(cx)) ** 2 + (yy - v(cy)) ** 2) / (2 * v(sig) ** 2))
    return (2 * img - 1).unsqueeze(1)


def _dcgan_fake(bug):
    torch.manual_seed(7)
    gen = torch.Generator().manual_seed(81)
    real_train, real_test = blob_images(1000, gen), blob_images(400, gen)
    nz = 16
    netG = nn.Sequential(
        nn.Linear(nz, 48 * 9), nn.ReLU(), nn.Unflatten(1, (48, 3, 3)),
        nn.ConvTranspose2d(48, 24, 4, 2, 1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.ConvTranspose2d(24, 1, 4, 2, 1), nn.Tanh())
    netD = nn.Sequential(
        nn.Conv2d(1, 24, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(24, 48, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(48 * 9, 1))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    data = forever(DataLoader(TensorDataset(real_train), batch_size=32, shuffle=True, drop_last=True))

    def step(i):
        (real,) = next(data)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        # discriminator
        noise = torch.randn(len(real), nz)
        fake = netG(noise).detach() if bug else netG(noise)
        optD.zero_grad()
        errD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
        errD.backward()
        optD.step()

        # generator
        optG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optG.step()
        return errD.item(), errG.item()

    fixed = torch.randn(400, nz, generator=gen)

    @torch.no_grad()
    def probe():
        netG.eval()
        d = sliced_wasserstein(netG(fixed), real_test)
        netG.train()
        return d

    return {"model": {"G": netG, "D": netD}, "optimizer": [optD, optG], "steps": 20, "step": step, "probe": probe}


case("dcgan_fake",
     "The fake batch is detached where it is made and reused in the generator step, so no gradient ever reaches "
     "the generator and it stays at its initialisation.",
     _dcgan_fake)


# --------------------------------------------------------------------------
# 9. WGAN-GP
# --------------------------------------------------------------------------

def ring_of_gaussians(n, gen=None):
    k = torch.randint(8, (n,), generator=gen)
    a = 2 * math.pi * k / 8
    return 2 * torch.stack([a.cos(), a.sin()], 1) + 0.1 * torch.randn(n, 2, generator=gen)


def _wgan_penalty(bug):
    torch.manual_seed(8)

    def mlp(i, o, h=128):
        return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))

    class WGANTrainer:
        def __init__(self, z_dim=4, lam=10.0, n_critic=5):
            self.z_dim, self.lam, self.n_critic = z_dim, lam, n_critic
            self.G, self.C = mlp(z_dim, 2), mlp(2, 1)
            self.opt_g = torch.optim.Adam(self.G.parameters(), lr=5e-4, betas=(0.5, 0.9))
            self.opt_c = torch.optim.Adam(self.C.parameters(), lr=2e-3, betas=(0.5, 0.9))

        def gradient_penalty(self, real, fake):
            eps = torch.rand(len(real), 1)
            x = (eps * real + (1 - eps) * fake).requires_grad_(True)
            score = self.C(x)
            grad, = torch.autograd.grad(score, x, grad_outputs=torch.ones_like(score), create_graph=not bug)
            return ((grad.norm(2, dim=1) - 1) ** 2).mean()

        def step(self, i, batch=128):
            for _ in range(self.n_critic):
                real = ring_of_gaussians(batch)
                fake = self.G(torch.randn(batch, self.z_dim)).detach()
                loss_c = self.C(fake).mean() - self.C(real).mean() + self.lam * self.gradient_penalty(real, fake)
                self.opt_c.zero_grad()
                loss_c.backward()
                self.opt_c.step()
            loss_g = -self.C(self.G(torch.randn(batch, self.z_dim))).mean()
            self.opt_g.zero_grad()
            loss_g.backward()
            self.opt_g.step()
            return loss_c.item()

    tr = WGANTrainer()
    gen = torch.Generator().manual_seed(91)
    test, z = ring_of_gaussians(1000, gen), torch.randn(1000, tr.z_dim, generator=gen)

    @torch.no_grad()
    def probe():
        return sliced_wasserstein(tr.G(z), test)

    return {"model": [tr.G, tr.C], "optimizer": [tr.opt_c, tr.opt_g], "steps": 20, "step": tr.step, "probe": probe}


case("wgan_penalty",
     "The WGAN-GP gradient penalty is computed without create_graph=True, so it is a constant for the critic's "
     "backward; the critic is unconstrained and its slope blows up.",
     _wgan_penalty)


# --------------------------------------------------------------------------
# 10. VAE
# --------------------------------------------------------------------------

def bar_images(n, gen, size=12):
    r = torch.randint(size, (n,), generator=gen)
    c = torch.randint(size, (n,), generator=gen)
    ar = torch.arange(size)
    on = ((ar[None] - r[:, None]).abs() <= 1)[:, :, None] | ((ar[None] - c[:, None]).abs() <= 1)[:, None, :]
    flip = torch.rand(n, size, size, generator=gen) < 0.02
    return (on ^ flip).float().flatten(1)


class BernoulliVAE(nn.Module):
    def __init__(self, d=144, h=256, z=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.mu, self.logvar = nn.Linear(h, z), nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, d))

    def forward(self, x, gen=None):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn(mu.shape, generator=gen)
        return self.dec(z), mu, logvar


def _vae_elbo(bug):
    torch.manual_seed(9)
    gen = torch.Generator().manual_seed(101)
    train, test = bar_images(2000, gen), bar_images(500, gen)
    vae = BernoulliVAE()
    opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(train), batch_size=128, shuffle=True))

    def loss_fn(x, logits, mu, logvar):
        if bug:
            recon = F.binary_cross_entropy_with_logits(logits, x)
        else:
            recon = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / x.size(0)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        return recon + kl

    def step(i):
        (x,) = next(loader)
        logits, mu, logvar = vae(x)
        loss = loss_fn(x, logits, mu, logvar)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        # negative ELBO per image, nats
        g = torch.Generator().manual_seed(5)
        logits, mu, logvar = vae(test, gen=g)
        nll = F.binary_cross_entropy_with_logits(logits, test, reduction="none").sum(1)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
        return float((nll + kl).mean())

    return {"model": vae, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("vae_elbo",
     "The reconstruction term is averaged over pixels while the KL is summed over latents, so the KL weighs 144 "
     "times too much and the posterior collapses to the prior.",
     _vae_elbo)


# --------------------------------------------------------------------------
# 11. DDPM
# --------------------------------------------------------------------------

def two_moons(n, gen=None, noise=0.05):
    a = math.pi * torch.rand(n, generator=gen)
    top = torch.rand(n, generator=gen) < 0.5
    x = torch.where(top, a.cos(), 1 - a.cos())
    y = torch.where(top, a.sin(), 0.5 - a.sin())
    pts = torch.stack([x, y], 1) + noise * torch.randn(n, 2, generator=gen)
    return (pts - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.50])


def _ddpm_loss(bug):
    torch.manual_seed(10)

    class EpsMLP(nn.Module):
        def __init__(self, h=192, emb=16):
            super().__init__()
            self.register_buffer("freqs", torch.exp(torch.linspace(0, math.log(60.0), emb // 2)))
            self.net = nn.Sequential(nn.Linear(2 + emb, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(),
                                     nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2))

        def forward(self, x, t):
            a = t.float().unsqueeze(1) / 60 * self.freqs
            return self.net(torch.cat([x, a.sin(), a.cos()], 1))

    class GaussianDiffusion(nn.Module):
        def __init__(self, model, timesteps=60):
            super().__init__()
            self.model, self.T = model, timesteps
            betas = torch.linspace(1e-3, 0.15, timesteps)
            self.register_buffer("betas", betas)
            self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, 0))

        def q_sample(self, x0, t, noise=None):
            if noise is None:
                noise = torch.randn_like(x0)
            ab = self.alphas_cumprod[t].unsqueeze(1)
            return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

        def p_losses(self, x0):
            t = torch.randint(self.T, (len(x0),))
            noise = torch.randn_like(x0)
            x_t = self.q_sample(x0, t) if bug else self.q_sample(x0, t, noise)
            return F.mse_loss(self.model(x_t, t), noise)

        @torch.no_grad()
        def sample(self, n, gen):
            x = torch.randn(n, 2, generator=gen)
            for s in reversed(range(self.T)):
                beta, ab = self.betas[s], self.alphas_cumprod[s]
                eps = self.model(x, torch.full((n,), s))
                x = (x - beta / (1 - ab).sqrt() * eps) / (1 - beta).sqrt()
                if s > 0:
                    x = x + beta.sqrt() * torch.randn(n, 2, generator=gen)
            return x

    diffusion = GaussianDiffusion(EpsMLP())
    opt = torch.optim.Adam(diffusion.parameters(), lr=2e-3)
    test = two_moons(800, torch.Generator().manual_seed(111))

    def step(i):
        loss = diffusion.p_losses(two_moons(512))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        return sliced_wasserstein(diffusion.sample(800, torch.Generator().manual_seed(3)), test)

    return {"model": diffusion, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("ddpm_loss",
     "q_sample is called without the noise argument and draws its own noise, while the loss compares the "
     "prediction with the other draw; the model can only learn to predict zero.",
     _ddpm_loss)


# --------------------------------------------------------------------------
# 12. RealNVP
# --------------------------------------------------------------------------

def _realnvp_masks(bug):
    torch.manual_seed(11)

    class Coupling(nn.Module):
        def __init__(self, mask, h=48):
            super().__init__()
            self.register_buffer("mask", mask)
            self.net = nn.Sequential(nn.Linear(2, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 4))

        def forward(self, x):
            xm = x * self.mask
            s, t = self.net(xm).chunk(2, dim=1)
            s = torch.tanh(s) * (1 - self.mask)
            z = xm + (1 - self.mask) * (x * s.exp() + t)
            return z, s.sum(1)

    class RealNVP(nn.Module):
        def __init__(self, n_layers=6):
            super().__init__()
            mask = torch.tensor([1.0, 0.0])
            layers = []
            for _ in range(n_layers):
                layers.append(Coupling(mask.clone()))
                if not bug:
                    mask = 1 - mask
            self.layers = nn.ModuleList(layers)

        def log_prob(self, x):
            total = torch.zeros(len(x))
            for layer in self.layers:
                x, logdet = layer(x)
                total = total + logdet
            return total - 0.5 * (x ** 2).sum(1) - math.log(2 * math.pi)

    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=3e-3)
    test = two_moons(1500, torch.Generator().manual_seed(121))

    def step(i):
        loss = -flow.log_prob(two_moons(128)).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return float(-flow.log_prob(test).mean())

    return {"model": flow, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("realnvp_masks",
     "Every coupling layer gets the same mask instead of alternating ones, so one coordinate is never transformed "
     "and the flow cannot fit the density.",
     _realnvp_masks)


# --------------------------------------------------------------------------
# 13. SimCLR
# --------------------------------------------------------------------------

def nuisance(x, gen=None):
    n = len(x)
    dy = torch.randint(-3, 4, (n,), generator=gen)
    dx = torch.randint(-3, 4, (n,), generator=gen)
    gain = 0.4 + 1.2 * torch.rand(n, 1, 1, 1, generator=gen)
    offset = 1.5 * torch.randn(n, 1, 1, 1, generator=gen)
    return gain * shift_images(x, dy, dx) + offset + 0.4 * torch.randn(x.shape, generator=gen)


def _simclr_views(bug):
    torch.manual_seed(12)
    gen = torch.Generator().manual_seed(131)
    bank = glyph_bank(10, 16, seed=5)

    def draw(n):
        x, y = glyph_images(n, bank, gen, noise=0.3, shift=3)
        return nuisance(x, gen), y

    train_x, train_y = draw(800)
    test_x, test_y = draw(400)

    class TwoViews:
        def __init__(self, transform):
            self.transform = transform

        def __call__(self, x):
            if bug:
                v = self.transform(x)
                return v, v
            return self.transform(x), self.transform(x)

    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU())
    projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    opt = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=1e-3)
    two_views = TwoViews(nuisance)

    def nt_xent(z1, z2, tau=0.2):
        n = len(z1)
        z = F.normalize(torch.cat([z1, z2]), dim=1)
        sim = z @ z.t() / tau
        sim.fill_diagonal_(float("-inf"))
        target = torch.cat([torch.arange(n) + n, torch.arange(n)])
        return F.cross_entropy(sim, target)

    def step(i):
        idx = torch.randint(len(train_x), (64,))
        v1, v2 = two_views(train_x[idx])
        loss = nt_xent(projector(encoder(v1)), projector(encoder(v2)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return knn_error(encoder(train_x), train_y, encoder(test_x), test_y)

    return {"model": [encoder, projector], "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("simclr_views",
     "The two-view transform augments once and returns the same tensor twice, so positives are identical and no "
     "invariance is learnt; nearest-neighbour accuracy of the features stays poor.",
     _simclr_views)


# --------------------------------------------------------------------------
# 14. masked image modelling
# --------------------------------------------------------------------------

def patchify(x, p=4):
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
    return x.reshape(b, (h // p) * (w // p), p * p * c)


def _masked_patches(bug):
    torch.manual_seed(13)
    gen = torch.Generator().manual_seed(141)
    train_x, _ = oriented_textures(2000, gen, noise=0.05, freq=(0.2, 0.5))
    test_x, _ = oriented_textures(300, gen, noise=0.05, freq=(0.2, 0.5))

    class SimMIM(nn.Module):
        def __init__(self, dim=48, n=16):
            super().__init__()
            self.embed = nn.Linear(16, dim)
            self.mask_token = nn.Parameter(torch.zeros(dim))
            self.pos = nn.Parameter(0.02 * torch.randn(1, n, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(dim, 16)

        def forward(self, patches, mask):
            tok = torch.where(mask.unsqueeze(-1).bool(), self.embed(patches), self.mask_token)
            return self.head(self.encoder(tok + self.pos))

    def random_masking(b, n, ratio=0.5, gen=None):
        order = torch.rand(b, n, generator=gen).argsort(1)
        return (order >= int(n * ratio)).float()

    model = SimMIM()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)

    def step(i):
        patches = patchify(train_x[torch.randint(len(train_x), (32,))])
        mask = random_masking(*patches.shape[:2])
        pred = model(patches, mask)
        per_patch = (pred - patches).pow(2).mean(-1)
        if bug:
            loss = (per_patch * mask).sum() / mask.sum()
        else:
            loss = (per_patch * (1 - mask)).sum() / (1 - mask).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    test_p = patchify(test_x)
    test_mask = random_masking(*test_p.shape[:2], gen=gen)

    @torch.no_grad()
    def probe():
        model.eval()
        err = (model(test_p, test_mask) - test_p).pow(2).mean(-1)
        model.train()
        return float(err[test_mask == 0].mean())

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("masked_patches",
     "The mask is 1 for kept patches but the loss takes it as 1 for removed ones, so only visible patches are "
     "reconstructed and in-painting of hidden ones is never trained.",
     _masked_patches)


# --------------------------------------------------------------------------
# 15. metric learning
# --------------------------------------------------------------------------

def _triplet_mining(bug):
    torch.manual_seed(14)
    gen = torch.Generator().manual_seed(151)
    train_bank, test_bank = glyph_bank(24, 16, seed=6), glyph_bank(12, 16, seed=7)
    train_x, train_y = glyph_images(1500, train_bank, gen, noise=1.0, shift=2)
    test_x, test_y = glyph_images(500, test_bank, gen, noise=1.0, shift=2)
    by_class = [torch.where(train_y == c)[0] for c in range(24)]

    class PKSampler:
        def __init__(self, p=8, k=4):
            self.p, self.k = p, k

        def batch(self):
            idx = [by_class[c][torch.randint(len(by_class[c]), (self.k,))] for c in torch.randperm(24)[:self.p].tolist()]
            return torch.cat(idx)

    class BatchHardTripletLoss(nn.Module):
        def __init__(self, margin=0.3):
            super().__init__()
            self.margin = margin

        def forward(self, emb, labels):
            dist = torch.cdist(emb, emb)
            same = (labels[:, None] == labels[None, :]).float()
            eye = torch.eye(len(labels))
            hardest_pos = (dist * same).max(dim=1).values
            exclude = eye if bug else same
            hardest_neg = (dist + 1e6 * exclude).min(dim=1).values
            return F.relu(hardest_pos - hardest_neg + self.margin).mean()

    class EmbeddingNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(conv_bn_relu(1, 16), conv_bn_relu(16, 32, stride=2), conv_bn_relu(32, 32, stride=2))
            self.fc = nn.Linear(32 * 16, 32)

        def forward(self, x):
            return F.normalize(self.fc(self.body(x).flatten(1)), dim=1)

    net, sampler, triplet = EmbeddingNet(), PKSampler(), BatchHardTripletLoss()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        idx = sampler.batch()
        loss = triplet(net(train_x[idx]), train_y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        net.eval()
        d = torch.cdist(net(test_x), net(test_x)) + 1e6 * torch.eye(len(test_x))
        return float((test_y[d.argmin(1)] != test_y).float().mean())    # 1 - recall@1

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("triplet_mining",
     "Batch-hard mining excludes only the sample itself, not its class, when it looks for the hardest negative, "
     "so the nearest same-class sample is often pushed away and classes do not cluster.",
     _triplet_mining)


# --------------------------------------------------------------------------
# 16. knowledge distillation
# --------------------------------------------------------------------------

def _distill_kl(bug):
    torch.manual_seed(15)
    gen = torch.Generator().manual_seed(161)
    bank = glyph_bank(10, 12, seed=8)
    train_x, train_y = glyph_images(2000, bank, gen, noise=1.8, shift=2)
    test_x, test_y = glyph_images(800, bank, gen, noise=1.8, shift=2)

    teacher = SmallConvNet(10, width=24)
    t_opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(200):
        idx = torch.randint(len(train_x), (64,))
        t_opt.zero_grad()
        F.cross_entropy(teacher(train_x[idx]), train_y[idx]).backward()
        t_opt.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = SmallConvNet(10, width=12)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    temperature, alpha = 4.0, 0.9

    def distillation_loss(s_logits, t_logits, labels):
        t_prob = F.softmax(t_logits / temperature, dim=1)
        if bug:
            s_out = F.softmax(s_logits / temperature, dim=1)
        else:
            s_out = F.log_softmax(s_logits / temperature, dim=1)
        soft = F.kl_div(s_out, t_prob, reduction="batchmean") * temperature ** 2
        hard = F.cross_entropy(s_logits, labels)
        return alpha * soft + (1 - alpha) * hard

    def step(i):
        student.train()
        idx = torch.randint(len(train_x), (32,))
        x, y = train_x[idx], train_y[idx]
        with torch.no_grad():
            t_logits = teacher(x)
        loss = distillation_loss(student(x), t_logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        student.eval()
        return float(F.cross_entropy(student(test_x), test_y))

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


case("distill_kl",
     "F.kl_div gets the student's probabilities (softmax) instead of log-probabilities, so the distillation term "
     "is not a KL and drives the student to over-confident, badly calibrated outputs.",
     _distill_kl)


# --------------------------------------------------------------------------
# 17. super-resolution
# --------------------------------------------------------------------------

def sharp_images(n, gen, size=24):
    yy, xx = pixel_grid(size, size)
    u = lambda lo, hi: (lo + (hi - lo) * torch.rand(n, generator=gen)).view(-1, 1, 1)
    img = 0.2 * torch.sin(u(0.2, 0.5) * (xx * u(-1, 1) + yy * u(-1, 1)) + u(0, 6))
    for k in range(4):
        cx, cy, r, amp = u(0, size), u(0, size), u(3, 7), u(-0.8, 0.8)
        dx, dy = (xx - cx).abs(), (yy - cy).abs()
        inside = dx ** 2 + dy ** 2 < r ** 2 if k % 2 else torch.maximum(dx, dy) < r
        img = torch.where(inside, amp.expand_as(img), img)
    return img.unsqueeze(1)


def _espcn_upscale(bug):
    torch.manual_seed(16)
    gen = torch.Generator().manual_seed(171)
    scale = 2

    class ESPCN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.conv1 = nn.Conv2d(1, width, 5, padding=2)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.conv3 = nn.Conv2d(width, scale ** 2, 3, padding=1)

        def forward(self, x):
            b, c, h, w = x.shape
            out = torch.tanh(self.conv1(x))
            out = torch.relu(self.conv2(out))
            out = self.conv3(out)
            if bug:
                return out.view(b, c, h * scale, w * scale)
            return F.pixel_shuffle(out, scale)

    hr_train, hr_test = sharp_images(800, gen), sharp_images(150, gen)
    net = ESPCN()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    batches = forever(DataLoader(hr_train, batch_size=24, shuffle=True))

    def step(i):
        hr = next(batches)
        lr = F.avg_pool2d(hr, scale)
        sr = net(lr)
        loss = F.l1_loss(sr, hr)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return float(F.mse_loss(net(F.avg_pool2d(hr_test, scale)), hr_test).sqrt())

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("espcn_upscale",
     "The r*r channels are turned into the large image with a plain view instead of pixel_shuffle, so every output "
     "pixel comes from an unrelated place of the input.",
     _espcn_upscale)


# --------------------------------------------------------------------------
# 18. video, frame classifier with averaging
# --------------------------------------------------------------------------

def moving_shapes(n, gen, T=6, size=16):
    yy, xx = pixel_grid(size, size)
    y = torch.randint(4, (n,), generator=gen)
    pos = 5 + 6 * torch.rand(n, 2, generator=gen)
    vel = 1.2 * torch.randn(n, 2, generator=gen)
    t = torch.arange(T).view(1, T, 1)
    p = (pos[:, None] + vel[:, None] * t).clamp(3, size - 4)
    dx = (xx - p[..., 0].view(n, T, 1, 1)).abs()
    dy = (yy - p[..., 1].view(n, T, 1, 1)).abs()
    shapes = torch.stack([
        dx ** 2 + dy ** 2 < 9, torch.maximum(dx, dy) < 2.6,
        (torch.minimum(dx, dy) < 0.9) & (torch.maximum(dx, dy) < 3.6),
        (dx - dy).abs() * (torch.maximum(dx, dy) < 3.6) + 9 * (torch.maximum(dx, dy) >= 3.6) < 1.0]).float()
    clip = shapes[y, torch.arange(n)]
    clip = clip + 0.45 * torch.randn(clip.shape, generator=gen)
    return clip.unsqueeze(2), y          # N, T, 1, H, W


def _video_frame_labels(bug):
    torch.manual_seed(17)
    gen = torch.Generator().manual_seed(181)
    clips, labels = moving_shapes(400, gen)
    test_clips, test_labels = moving_shapes(300, gen)
    cnn = SmallConvNet(4, width=12)
    opt = torch.optim.Adam(cnn.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(clips, labels), batch_size=10, shuffle=True))

    def step(i):
        cnn.train()
        clip, y = next(loader)
        T = clip.shape[1]
        frame_logits = cnn(clip.flatten(0, 1))          # (B*T, classes)
        frame_labels = y.repeat(T) if bug else y.repeat_interleave(T)
        loss = F.cross_entropy(frame_logits, frame_labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        cnn.eval()
        n, T = test_clips.shape[:2]
        probs = cnn(test_clips.flatten(0, 1)).softmax(1).view(n, T, -1).mean(1)
        return float((probs.argmax(1) != test_labels).float().mean())

    return {"model": cnn, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("video_frame_labels",
     "Clips are flattened to (B*T) frames in batch-major order but the clip labels are expanded with repeat(T) "
     "instead of repeat_interleave(T), so most frames carry another clip's label.",
     _video_frame_labels)


# --------------------------------------------------------------------------
# 19. vision transformer
# --------------------------------------------------------------------------

def _vit_encoder(bug):
    torch.manual_seed(18)
    gen = torch.Generator().manual_seed(191)
    train_x, train_y = oriented_textures(2000, gen, classes=4, noise=1.2)
    test_x, test_y = oriented_textures(600, gen, classes=4, noise=1.2)

    class PatchEmbed(nn.Module):
        def __init__(self, patch, dim):
            super().__init__()
            self.proj = nn.Conv2d(1, dim, patch, stride=patch)

        def forward(self, x):
            return self.proj(x).flatten(2).transpose(1, 2)

    class ViT(nn.Module):
        def __init__(self, image=16, patch=4, dim=48, depth=2, heads=4, classes=4):
            super().__init__()
            self.patch_embed = PatchEmbed(patch, dim)
            self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, dim))
            kw = dict(dim_feedforward=2 * dim, dropout=0.0, activation="gelu", norm_first=True)
            if not bug:
                kw["batch_first"] = True
            self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(dim, heads, **kw) for _ in range(depth)])
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, classes)

        def forward(self, x):
            x = self.patch_embed(x)
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
            for blk in self.blocks:
                x = blk(x)
            return self.head(self.norm(x)[:, 0])

    vit = ViT()
    opt = torch.optim.AdamW(vit.parameters(), lr=2e-3, weight_decay=0.05)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True))

    def step(i):
        vit.train()
        x, y = next(loader)
        loss = F.cross_entropy(vit(x), y, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        vit.eval()
        return float((vit(test_x).argmax(1) != test_y).float().mean())

    return {"model": vit, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("vit_encoder",
     "nn.TransformerEncoderLayer is built without batch_first=True but fed (batch, tokens, dim), so attention runs "
     "across the images of the batch and the class token never sees its own patches.",
     _vit_encoder)


# --------------------------------------------------------------------------
# 20. fine-tuning with discriminative learning rates
# --------------------------------------------------------------------------

def pretrain_on_source(width=16, steps=150):
    gen = torch.Generator().manual_seed(999)
    x, y = glyph_images(2500, glyph_bank(20, 16, seed=9), gen, noise=1.2, shift=3)
    net = SmallConvNet(20, width=width)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(steps):
        idx = torch.randint(len(x), (64,))
        opt.zero_grad()
        F.cross_entropy(net(x[idx]), y[idx]).backward()
        opt.step()
    return net


def _finetune_head(bug):
    torch.manual_seed(19)
    gen = torch.Generator().manual_seed(201)
    model = pretrain_on_source()
    bank = glyph_bank(6, 16, seed=10)
    train_x, train_y = glyph_images(400, bank, gen, noise=1.2, shift=3)
    test_x, test_y = glyph_images(500, bank, gen, noise=1.2, shift=3)

    def replace_head():
        model.fc = nn.Linear(model.fc.in_features, 6)

    def make_optimizer():
        return torch.optim.SGD([
            {"params": model.features.parameters(), "lr": 1e-3},
            {"params": model.fc.parameters(), "lr": 2e-2},
        ], momentum=0.9, weight_decay=1e-4)

    if bug:
        optimizer = make_optimizer()
        replace_head()
    else:
        replace_head()
        optimizer = make_optimizer()

    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True))
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float((model(test_x).argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


case("finetune_head",
     "The classifier head is replaced after the optimizer was built, so the optimizer holds the old head's "
     "parameters and the new head stays random.",
     _finetune_head)


# --------------------------------------------------------------------------
# 21. linear probe on a pretrained checkpoint
# --------------------------------------------------------------------------

def _checkpoint_prefix(bug):
    torch.manual_seed(20)
    gen = torch.Generator().manual_seed(211)
    # what torch.save(ddp_model.state_dict()) left on disk
    checkpoint = {"module." + k: v.clone() for k, v in pretrain_on_source().state_dict().items()}

    bank = glyph_bank(6, 16, seed=12)
    train_x, train_y = glyph_images(600, bank, gen, noise=1.2, shift=3)
    test_x, test_y = glyph_images(500, bank, gen, noise=1.2, shift=3)

    net = SmallConvNet(6)
    state = {k: v for k, v in checkpoint.items() if ".fc." not in k}
    if not bug:
        state = {k.removeprefix("module."): v for k, v in state.items()}
    net.load_state_dict(state, strict=False)
    for p in net.features.parameters():
        p.requires_grad = False

    opt = torch.optim.Adam(net.fc.parameters(), lr=1e-2)
    loader = forever(DataLoader(TensorDataset(train_x, train_y), batch_size=160, shuffle=True))

    def step(i):
        net.features.eval()
        x, y = next(loader)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        net.eval()
        return float((net(test_x).argmax(1) != test_y).float().mean())

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("checkpoint_prefix",
     "The checkpoint's keys carry DataParallel's 'module.' prefix and are loaded with strict=False, so nothing is "
     "loaded and the frozen backbone is random.",
     _checkpoint_prefix)


# --------------------------------------------------------------------------
# 22. multi-label tagging
# --------------------------------------------------------------------------

def tagged_images(n, gen, bank, size=20, p=0.3):
    k, g = len(bank), bank.shape[-1]
    tags = (torch.rand(n, k, generator=gen) < p).float()
    img = 0.7 * torch.randn(n, 1, size, size, generator=gen)
    for c in range(k):
        r = torch.randint(size - g + 1, (n, 2), generator=gen)
        for i in torch.where(tags[:, c] > 0)[0].tolist():
            y0, x0 = r[i].tolist()
            img[i, :, y0:y0 + g, x0:x0 + g] += 1.5 * bank[c]
    return img, tags


def _multilabel_loss(bug):
    torch.manual_seed(21)
    gen = torch.Generator().manual_seed(221)
    bank = glyph_bank(6, 8, seed=13)
    train_x, train_t = tagged_images(1500, gen, bank)
    test_x, test_t = tagged_images(400, gen, bank)

    class Tagger(nn.Module):
        def __init__(self, n_tags):
            super().__init__()
            self.body = nn.Sequential(conv_bn_relu(1, 24), conv_bn_relu(24, 32, stride=2), conv_bn_relu(32, 32))
            self.cls = nn.Linear(32, n_tags)

        def forward(self, x):
            h = self.body(x).amax((2, 3))
            return torch.sigmoid(self.cls(h))

    model = Tagger(6)
    criterion = nn.BCEWithLogitsLoss() if bug else nn.BCELoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = forever(DataLoader(TensorDataset(train_x, train_t), batch_size=24, shuffle=True))

    def step(i):
        model.train()
        x, t = next(loader)
        opt.zero_grad()
        loss = criterion(model(x), t)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        pred = (model(test_x) > 0.5).float()
        tp = (pred * test_t).sum(0)
        f1 = 2 * tp / (pred.sum(0) + test_t.sum(0)).clamp(min=1)
        return 1.0 - float(f1.mean())

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


case("multilabel_loss",
     "The model ends in a sigmoid and BCEWithLogitsLoss applies another, so negatives can never fall below "
     "one half in the loss; tags are learnt late and missed.",
     _multilabel_loss)
