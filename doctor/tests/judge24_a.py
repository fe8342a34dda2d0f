import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)

CASES = []


def _forever(loader):
    while True:
        for batch in loader:
            yield batch


def _energy_distance(a, b):
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


def _pair(name, what, fn):
    CASES.append({"name": name, "what": what})

    def bad():
        return fn(True)

    def good():
        return fn(False)

    bad.__name__, good.__name__ = name + "_bad", name + "_good"
    globals()[bad.__name__] = bad
    globals()[good.__name__] = good


# ----------------------------------------------------------------------------
# image classification
# ----------------------------------------------------------------------------
class ShapeSet(Dataset):
    """16x16 images: horizontal bar, vertical bar, cross, square, diagonal."""

    def __init__(self, n, noise=0.35):
        self.x = torch.randn(n, 1, 16, 16) * noise
        self.y = torch.randint(0, 5, (n,))
        for i in range(n):
            r, c = torch.randint(1, 9, (2,)).tolist()
            im, k = self.x[i, 0], int(self.y[i])
            if k in (0, 2):
                im[r + 3, c:c + 7] += 1
            if k in (1, 2):
                im[r:r + 7, c + 3] += 1
            if k == 3:
                im[r, c:c + 6] += 1
                im[r + 5, c:c + 6] += 1
                im[r:r + 6, c] += 1
                im[r:r + 6, c + 5] += 1
            if k == 4:
                for d in range(7):
                    im[r + d, c + d] += 1

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class SmallCNN(nn.Module):
    def __init__(self, num_classes, probs=False):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
        head = [nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, num_classes)]
        if probs:
            head.append(nn.Softmax(dim=1))
        self.classifier = nn.Sequential(*head)

    def forward(self, x):
        return self.classifier(self.features(x))


def _cls_shapes(bug):
    torch.manual_seed(0)
    train, test = ShapeSet(1500), ShapeSet(500)
    model = SmallCNN(5, probs=bug)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    batches = _forever(DataLoader(train, batch_size=64, shuffle=True))

    def step(i):
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float((model(test.x).argmax(1) != test.y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("cls_shapes", "The classifier ends in nn.Softmax and its output goes into nn.CrossEntropyLoss (softmax twice): "
      "gradients are squashed, learning is slow and the loss has a high floor.", _cls_shapes)


# ----------------------------------------------------------------------------
# semantic segmentation
# ----------------------------------------------------------------------------
def _seg_scene(n, size=24):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    palette = torch.tensor([[0.2, 0.2, 0.2], [0.8, 0.3, 0.2], [0.3, 0.7, 0.3], [0.3, 0.3, 0.8]])
    mask = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        for c in (1, 2, 3):
            cy, cx = torch.randint(3, size - 3, (2,)).tolist()
            r = int(torch.randint(3, 7, (1,)))
            mask[i][(yy - cy) ** 2 + (xx - cx) ** 2 < r * r] = c
    img = palette[mask].permute(0, 3, 1, 2) + 0.25 * torch.randn(n, 3, size, size)
    return img, mask


class TinyUNet(nn.Module):
    def __init__(self, n_classes, w=16):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(3, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1), nn.ReLU())
        self.enc2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(w, 2 * w, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.dec = nn.Sequential(nn.Conv2d(2 * w, w, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(w, n_classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.up(self.enc2(a))
        return self.head(self.dec(torch.cat([a, b], 1)))


def _seg_circles(bug):
    torch.manual_seed(1)
    n_classes = 4
    images, masks = _seg_scene(300)
    val_images, val_masks = _seg_scene(60)
    net = TinyUNet(n_classes)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def seg_loss(logits, target):
        if bug:
            flat = logits.reshape(-1, n_classes)
        else:
            flat = logits.permute(0, 2, 3, 1).reshape(-1, n_classes)
        return F.cross_entropy(flat, target.view(-1))

    def step(i):
        net.train()
        idx = torch.randint(0, len(images), (8,))
        opt.zero_grad()
        loss = seg_loss(net(images[idx]), masks[idx])
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            pred = net(val_images).argmax(1)
        ious = []
        for c in range(n_classes):
            inter = ((pred == c) & (val_masks == c)).sum()
            union = ((pred == c) | (val_masks == c)).sum()
            ious.append(float(inter / union.clamp(min=1)))
        return 1 - sum(ious) / len(ious)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


_pair("seg_circles", "NCHW logits are flattened with reshape(-1, C) without permuting channels last, so logits and pixel "
      "labels do not correspond; the mIoU stays poor.", _seg_circles)


# ----------------------------------------------------------------------------
# object detection on a grid (one box per image cell)
# ----------------------------------------------------------------------------
class BoxWorld(Dataset):
    S, SIZE = 6, 24

    def __init__(self, n):
        S, size = self.S, self.SIZE
        cell = size // S
        self.img = 0.3 * torch.randn(n, 1, size, size)
        self.obj = torch.zeros(n, S, S)
        self.box = torch.zeros(n, S, S, 4)
        for i in range(n):
            w, h = torch.randint(5, 13, (2,)).tolist()
            x0 = int(torch.randint(0, size - w, (1,)))
            y0 = int(torch.randint(0, size - h, (1,)))
            self.img[i, 0, y0:y0 + h, x0:x0 + w] += 1.0
            cx, cy = (x0 + w / 2), (y0 + h / 2)
            gx, gy = int(cx // cell), int(cy // cell)
            self.obj[i, gy, gx] = 1
            self.box[i, gy, gx] = torch.tensor([cx / cell - gx, cy / cell - gy, w / size, h / size])

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.img[i], self.obj[i], self.box[i]


class GridDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        )
        self.obj_head = nn.Conv2d(32, 1, 1)
        self.box_head = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        f = self.backbone(x)
        return self.obj_head(f).squeeze(1), self.box_head(f).permute(0, 2, 3, 1)


def _det_grid(bug):
    torch.manual_seed(2)
    train, val = BoxWorld(800), BoxWorld(200)
    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    it = _forever(DataLoader(train, batch_size=16, shuffle=True))

    def compute_loss(obj_logit, box_pred, obj, box):
        l_obj = F.binary_cross_entropy_with_logits(obj_logit, obj)
        if bug:
            l_box = F.smooth_l1_loss(box_pred, box)
        else:
            pos = obj > 0
            l_box = F.smooth_l1_loss(box_pred[pos], box[pos])
        return l_obj + 5.0 * l_box

    def step(i):
        model.train()
        img, obj, box = next(it)
        optimizer.zero_grad()
        loss = compute_loss(*model(img), obj, box)
        loss.backward()
        optimizer.step()
        return loss.item()

    def decode(box, idx):
        cell = BoxWorld.SIZE / BoxWorld.S
        gy, gx = idx // BoxWorld.S, idx % BoxWorld.S
        b = box.reshape(len(box), -1, 4)[torch.arange(len(box)), idx]
        cx, cy = (b[:, 0] + gx) * cell, (b[:, 1] + gy) * cell
        w, h = b[:, 2].clamp(min=0) * BoxWorld.SIZE, b[:, 3].clamp(min=0) * BoxWorld.SIZE
        return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1)

    @torch.no_grad()
    def probe():
        model.eval()
        obj, box = model(val.img)
        p = decode(box, obj.flatten(1).argmax(1))
        t = decode(val.box, val.obj.flatten(1).argmax(1))
        lt, rb = torch.maximum(p[:, :2], t[:, :2]), torch.minimum(p[:, 2:], t[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        area = lambda q: (q[:, 2:] - q[:, :2]).prod(1)
        return float(1 - (inter / (area(p) + area(t) - inter)).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("det_grid", "The box regression loss is averaged over all grid cells, background cells (with all-zero targets) "
      "included, so boxes are pulled to zero and the positive cells' signal is diluted.", _det_grid)


# ----------------------------------------------------------------------------
# pose
# ----------------------------------------------------------------------------
def _render_people(n, size=24):
    """head, left hand, right hand of a person who faces the camera"""
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    head = torch.stack([torch.rand(n) * 0.3 + 0.35, torch.rand(n) * 0.2 + 0.15], 1)
    left = head + torch.stack([0.12 + 0.18 * torch.rand(n), 0.1 + 0.4 * torch.rand(n)], 1)
    right = head + torch.stack([-0.12 - 0.18 * torch.rand(n), 0.1 + 0.4 * torch.rand(n)], 1)
    kps = torch.stack([head, left, right], 1)
    img = 0.05 * torch.randn(n, 1, size, size)
    for k, (amp, sig) in enumerate([(1.0, 2.2), (0.8, 1.2), (0.8, 1.2)]):
        p = kps[:, k] * (size - 1)
        d = (xx - p[:, 0, None, None]) ** 2 + (yy - p[:, 1, None, None]) ** 2
        img[:, 0] += amp * torch.exp(-d / (2 * sig ** 2))
    return img, kps


class RandomHFlip:
    FLIP_PAIRS = [(1, 2)]

    def __init__(self, p=0.5, swap=True):
        self.p, self.swap = p, swap

    def __call__(self, img, kps):
        if torch.rand(()) < self.p:
            img = img.flip(-1)
            kps = kps.clone()
            kps[..., 0] = 1.0 - kps[..., 0]
            if self.swap:
                for a, b in self.FLIP_PAIRS:
                    kps[[a, b]] = kps[[b, a]]
        return img, kps


class PoseData(Dataset):
    def __init__(self, img, kps, transform):
        self.img, self.kps, self.transform = img, kps, transform

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.transform(self.img[i], self.kps[i])


def _pose_flip(bug):
    torch.manual_seed(3)
    data = PoseData(*_render_people(600), transform=RandomHFlip(0.5, swap=not bug))
    val_img, val_kps = _render_people(200)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 6), nn.Unflatten(1, (3, 2)),
    )
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    stream = _forever(DataLoader(data, batch_size=64, shuffle=True))

    def step(i):
        net.train()
        img, kps = next(stream)
        loss = F.mse_loss(net(img), kps)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        net.eval()
        return float((net(val_img) - val_kps).norm(dim=-1).mean())

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


_pair("pose_flip", "The horizontal flip augmentation mirrors the x coordinates but does not swap the left/right key "
      "points, so in half of the samples left and right are exchanged and both regress to the middle.", _pose_flip)


# ----------------------------------------------------------------------------
# monocular depth
# ----------------------------------------------------------------------------
def _make_depth(n, size=24):
    depth = 1.5 + 3.0 * F.interpolate(torch.rand(n, 1, 5, 5), size=(size, size), mode="bilinear", align_corners=True)
    albedo = 0.8 + 0.2 * F.interpolate(torch.rand(n, 1, 8, 8), size=(size, size))
    rgb = torch.cat([albedo / depth, albedo, torch.exp(-depth / 3)], 1) + 0.05 * torch.randn(n, 3, size, size)
    holes = F.interpolate((torch.rand(n, 1, 8, 8) < 0.3).float(), size=(size, size))
    return rgb, depth, depth * (1 - holes)


class DepthNet(nn.Module):
    def __init__(self, w=24):
        super().__init__()
        self.c1 = nn.Conv2d(3, w, 3, padding=1)
        self.c2 = nn.Conv2d(w, w, 3, padding=2, dilation=2)
        self.c3 = nn.Conv2d(w, w, 3, padding=1)
        self.out = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        x = F.relu(self.c1(x))
        x = F.relu(self.c2(x)) + x
        x = F.relu(self.c3(x)) + x
        return F.softplus(self.out(x))


def _depth_kinect(bug):
    torch.manual_seed(4)
    rgb, _, sensor = _make_depth(200)
    v_rgb, v_depth, _ = _make_depth(60)
    model = DepthNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = _forever(DataLoader(TensorDataset(rgb, sensor), batch_size=8, shuffle=True))

    def criterion(pred, gt):
        err = (pred - gt) ** 2
        if bug:
            return err.mean()
        valid = gt > 0
        return err[valid].mean()

    def step(i):
        model.train()
        x, gt = next(loader)
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(x), gt)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float(((model(v_rgb) - v_depth).abs() / v_depth).mean())  # AbsRel

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("depth_kinect", "Pixels where the depth sensor has no reading (depth 0) are not masked out of the loss, so "
      "predictions are biased towards zero.", _depth_kinect)


# ----------------------------------------------------------------------------
# unsupervised optical flow
# ----------------------------------------------------------------------------
def _texture_pairs(n, size=20, max_shift=2.5):
    pad = 6
    big = torch.randn(n, 1, size + 2 * pad, size + 2 * pad)
    k = torch.exp(-torch.linspace(-2, 2, 5) ** 2 / 2)
    k = (k[:, None] * k[None]) / (k.sum() ** 2)
    big = F.conv2d(F.pad(big, (2, 2, 2, 2), mode="reflect"), k[None, None]) * 3
    flow = (torch.rand(n, 2) * 2 - 1) * max_shift
    S = big.shape[-1]
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1
    theta[:, :, 2] = -flow * 2 / (S - 1)
    moved = F.grid_sample(big, F.affine_grid(theta, big.shape, align_corners=True), align_corners=True)
    crop = lambda t: t[:, :, pad:-pad, pad:-pad].contiguous()
    return crop(big), crop(moved), flow  # moved(x) = big(x - flow)


class FlowNetC(nn.Module):
    def __init__(self, r=3):
        super().__init__()
        self.r = r
        self.head = nn.Sequential(nn.Conv2d((2 * r + 1) ** 2, 32, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 3, padding=1))

    def forward(self, a, b):
        B, _, H, W = a.shape
        win = F.unfold(b, 2 * self.r + 1, padding=self.r).view(B, -1, H, W)
        cost = F.avg_pool2d((win - a).abs(), 5, 1, 2)
        return self.head(-cost)


def backwarp(img, flow, xy_order=True):
    B, _, H, W = img.shape
    ys, xs = torch.meshgrid(torch.arange(H, dtype=img.dtype), torch.arange(W, dtype=img.dtype), indexing="ij")
    base = torch.stack((xs, ys) if xy_order else (ys, xs), dim=-1)
    pos = base + flow.permute(0, 2, 3, 1)
    grid = 2 * pos / (W - 1) - 1
    return F.grid_sample(img, grid, align_corners=True, padding_mode="border")


def _flow_warp(bug):
    torch.manual_seed(5)
    f1, f2, _ = _texture_pairs(400)
    v1, v2, vflow = _texture_pairs(60)
    net = FlowNetC()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        idx = torch.randint(0, len(f1), (8,))
        a, b = f1[idx], f2[idx]
        flow = net(a, b)
        photo = ((backwarp(b, flow, xy_order=not bug) - a) ** 2 + 1e-6).sqrt().mean()
        smooth = (flow[..., 1:] - flow[..., :-1]).abs().mean() + (flow[..., 1:, :] - flow[..., :-1, :]).abs().mean()
        loss = photo + 0.05 * smooth
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        net.eval()
        return float((net(v1, v2) - vflow[:, :, None, None]).norm(dim=1).mean())  # end point error

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


_pair("flow_warp", "The sampling grid of the warp is stacked as (y, x) while grid_sample wants (x, y): the second frame "
      "is warped transposed, and the photometric loss gives no useful flow.", _flow_warp)


# ----------------------------------------------------------------------------
# keyword spotting
# ----------------------------------------------------------------------------
_MEL_WORDS = torch.randn(6, 8, 20, generator=torch.Generator().manual_seed(77))


def _clips(n, T=40):
    mel = 1.5 * torch.randn(n, T, 20)
    y = torch.randint(0, 6, (n,))
    onset = torch.randint(0, T - 8, (n,))
    for i in range(n):
        mel[i, onset[i]:onset[i] + 8] += _MEL_WORDS[y[i]]
    return mel, y


class AttentivePooling(nn.Module):
    def __init__(self, dim, axis):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, 1))
        self.axis = axis

    def forward(self, h):
        e = self.score(h).squeeze(-1)
        a = torch.softmax(e, dim=self.axis)
        return (a.unsqueeze(-1) * h).sum(1)


class KeywordSpotter(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(20, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 5, padding=2), nn.ReLU())
        self.pool = AttentivePooling(32, axis)
        self.fc = nn.Linear(32, 6)

    def forward(self, mel):
        h = self.conv(mel.transpose(1, 2)).transpose(1, 2)
        return self.fc(self.pool(h))


def _speech_keyword(bug):
    torch.manual_seed(6)
    mel, y = _clips(800)
    test_mel, test_y = _clips(200)
    model = KeywordSpotter(axis=0 if bug else 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    it = _forever(DataLoader(TensorDataset(mel, y), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        x, t = next(it)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), t)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        # clips arrive one at a time in use
        model.eval()
        logits = torch.cat([model(m[None]) for m in test_mel])
        return float((logits.argmax(1) != test_y).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("speech_keyword", "Attention pooling takes the softmax over the batch axis instead of time, so the weights of a clip "
      "depend on the other clips in the batch and do not sum to one over time.", _speech_keyword)


# ----------------------------------------------------------------------------
# GAN
# ----------------------------------------------------------------------------
def _ring(n):
    a = torch.randint(0, 8, (n,)) * (2 * math.pi / 8)
    return torch.stack([a.cos(), a.sin()], 1) * 2 + 0.1 * torch.randn(n, 2)


def _gan_ring(bug):
    torch.manual_seed(7)
    nz = 8
    G = nn.Sequential(nn.Linear(nz, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 2))
    D = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    held_out = _ring(1000)
    ones, zeros = torch.ones(512, 1), torch.zeros(512, 1)

    def step(i):
        real = _ring(512)
        fake = G(torch.randn(512, nz))
        if bug:
            fake = fake.detach()

        # discriminator
        opt_d.zero_grad()
        loss_d = bce(D(real), ones) + bce(D(fake.detach()), zeros)
        loss_d.backward()
        opt_d.step()

        # generator
        opt_g.zero_grad()
        loss_g = bce(D(fake), ones)
        loss_g.backward()
        opt_g.step()
        return loss_d.item(), loss_g.item()

    def probe():
        g = torch.Generator().manual_seed(123)
        with torch.no_grad():
            s = G(torch.randn(1000, nz, generator=g))
        return _energy_distance(s, held_out)

    return {"model": {"G": G, "D": D}, "optimizer": [opt_g, opt_d], "steps": 20, "step": step, "probe": probe}


_pair("gan_ring", "The fake batch is detached where it is made and the same detached tensor is used in the generator's "
      "step, so the generator gets no gradient and never learns.", _gan_ring)


# ----------------------------------------------------------------------------
# VAE
# ----------------------------------------------------------------------------
def _bumps(n, size=10):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = torch.rand(n, 2) * (size - 3) + 1
    s = 0.9 + torch.rand(n, 1, 1)
    amp = 0.6 + 0.4 * torch.rand(n, 1, 1)
    d = (xx - c[:, 0, None, None]) ** 2 + (yy - c[:, 1, None, None]) ** 2
    return (amp * torch.exp(-d / (2 * s ** 2))).flatten(1)


class VAE(nn.Module):
    def __init__(self, d=100, h=200, z=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.mu, self.logvar = nn.Linear(h, z), nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d), nn.Sigmoid())

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def _vae_bumps(bug):
    torch.manual_seed(8)
    vae = VAE()
    opt = torch.optim.Adam(vae.parameters(), lr=2e-3)
    data, test = _bumps(2000), _bumps(400)
    it = _forever(DataLoader(TensorDataset(data), batch_size=256, shuffle=True))
    sigma2 = 0.02

    def loss_function(recon, x, mu, logvar):
        mse = (recon - x) ** 2 / (2 * sigma2)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        rec = mse.mean() if bug else mse.sum(1).mean()
        return rec + kld

    def step(i):
        vae.train()
        (x,) = next(it)
        recon, mu, logvar = vae(x)
        loss = loss_function(recon, x, mu, logvar)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        vae.eval()
        return float(F.mse_loss(vae.dec(vae.mu(vae.enc(test))), test))

    return {"model": vae, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


_pair("vae_bumps", "The reconstruction term is averaged over pixels while the KL is summed over latents, so the KL "
      "outweighs it a hundred times and the posterior collapses.", _vae_bumps)


# ----------------------------------------------------------------------------
# VQ-VAE
# ----------------------------------------------------------------------------
class VectorQuantizer(nn.Module):
    def __init__(self, n_codes, dim, beta=0.25, straight_through=True):
        super().__init__()
        self.codebook = nn.Embedding(n_codes, dim)
        nn.init.normal_(self.codebook.weight, std=0.3)
        self.beta, self.straight_through = beta, straight_through

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1)
        dist = torch.cdist(flat.reshape(-1, flat.shape[-1]), self.codebook.weight)
        idx = dist.argmin(1).view(flat.shape[:-1])
        q = self.codebook(idx).permute(0, 3, 1, 2)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        if self.straight_through:
            q = z + (q - z).detach()
        return q, loss, idx


class VQVAE(nn.Module):
    def __init__(self, straight_through=True):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 8, 1))
        self.vq = VectorQuantizer(64, 8, straight_through=straight_through)
        self.decoder = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(24, 24, 4, 2, 1), nn.ReLU(),
                                     nn.ConvTranspose2d(24, 1, 4, 2, 1))

    def forward(self, x):
        q, vq_loss, idx = self.vq(self.encoder(x))
        return self.decoder(q), vq_loss


def _gratings(n, size=16):
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    th = torch.randint(0, 4, (n, 1, 1)) * (math.pi / 4)
    ph = torch.rand(n, 1, 1) * 2 * math.pi
    w = torch.sin((xx * th.cos() + yy * th.sin()) * (2 * math.pi / 8) + ph)
    split = torch.where(xx > torch.randint(4, 12, (n, 1, 1)), w, w.transpose(1, 2) * 0.5)
    return split.unsqueeze(1)


def _vqvae_gratings(bug):
    torch.manual_seed(9)
    model = VQVAE(straight_through=not bug)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    train, test = _gratings(1000), _gratings(200)

    def step(i):
        model.train()
        x = train[torch.randint(0, 1000, (16,))]
        recon, vq_loss = model(x)
        loss = F.mse_loss(recon, x) + vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float(F.mse_loss(model(test)[0], test))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("vqvae_gratings", "The quantised code goes to the decoder without the straight-through estimator, so the encoder gets "
      "no gradient from the reconstruction (only the commitment loss).", _vqvae_gratings)


# ----------------------------------------------------------------------------
# diffusion
# ----------------------------------------------------------------------------
class NoisePredictor(nn.Module):
    def __init__(self, T, h=128):
        super().__init__()
        self.temb = nn.Embedding(T, 32)
        self.net = nn.Sequential(nn.Linear(2 + 32, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, 2))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.temb(t)], 1))


class DDPM:
    def __init__(self, model, T=50, uniform=False):
        self.model, self.T = model, T
        self.betas = torch.linspace(1e-3, 0.2, T)
        self.alphas = 1 - self.betas
        self.abar = torch.cumprod(self.alphas, 0)
        self.draw = torch.rand_like if uniform else torch.randn_like

    def loss(self, x0):
        t = torch.randint(0, self.T, (x0.shape[0],))
        noise = self.draw(x0)
        ab = self.abar[t][:, None]
        xt = ab.sqrt() * x0 + (1 - ab).sqrt() * noise
        return F.mse_loss(self.model(xt, t), noise)

    @torch.no_grad()
    def sample(self, n, generator):
        x = torch.randn(n, 2, generator=generator)
        for t in reversed(range(self.T)):
            eps = self.model(x, torch.full((n,), t))
            x = (x - self.betas[t] / (1 - self.abar[t]).sqrt() * eps) / self.alphas[t].sqrt()
            if t > 0:
                x = x + self.betas[t].sqrt() * torch.randn(n, 2, generator=generator)
        return x


def _moons(n):
    a = torch.rand(n) * math.pi
    k = torch.randint(0, 2, (n,)).float()
    x = torch.stack([torch.where(k > 0, 1 - a.cos(), a.cos()), torch.where(k > 0, 0.5 - a.sin(), a.sin())], 1)
    return (x - torch.tensor([0.5, 0.25])) * 1.3 + 0.06 * torch.randn(n, 2)


def _ddpm_moons(bug):
    torch.manual_seed(10)
    net = NoisePredictor(50)
    ddpm = DDPM(net, uniform=bug)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    held_out = _moons(1000)

    def step(i):
        net.train()
        opt.zero_grad()
        loss = ddpm.loss(_moons(1024))
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        return _energy_distance(ddpm.sample(1000, torch.Generator().manual_seed(5)), held_out)

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


_pair("ddpm_moons", "The forward process draws its noise with torch.rand_like (uniform, all positive) rather than "
      "randn_like, while sampling starts from a Gaussian; the samples are shifted and wrong.", _ddpm_moons)


# ----------------------------------------------------------------------------
# normalising flow
# ----------------------------------------------------------------------------
class AffineCoupling(nn.Module):
    def __init__(self, flip, h=64):
        super().__init__()
        self.flip = flip
        self.st = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, 2))

    def _split(self, x):
        a, b = x[:, :1], x[:, 1:]
        return (b, a) if self.flip else (a, b)

    def _join(self, a, b):
        return torch.cat([b, a] if self.flip else [a, b], 1)

    def forward(self, x):
        a, b = self._split(x)
        s, t = self.st(a).chunk(2, 1)
        s = 2 * torch.tanh(s / 2)
        return self._join(a, b * s.exp() + t), s.sum(1)

    def inverse(self, z):
        a, b = self._split(z)
        s, t = self.st(a).chunk(2, 1)
        s = 2 * torch.tanh(s / 2)
        return self._join(a, (b - t) * (-s).exp())


class RealNVP(nn.Module):
    def __init__(self, n_layers=6, accumulate=True):
        super().__init__()
        self.layers = nn.ModuleList(AffineCoupling(flip=bool(k % 2)) for k in range(n_layers))
        self.accumulate = accumulate

    def forward(self, x):
        log_det = torch.zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            log_det = log_det + ld if self.accumulate else ld
        return x, log_det

    def nll(self, x):
        z, log_det = self(x)
        log_pz = -0.5 * (z ** 2).sum(1) - math.log(2 * math.pi)
        return -(log_pz + log_det).mean()

    @torch.no_grad()
    def sample(self, n, generator=None):
        z = torch.randn(n, 2, generator=generator)
        for layer in reversed(self.layers):
            z = layer.inverse(z)
        return z


def _realnvp_moons(bug):
    torch.manual_seed(11)
    flow = RealNVP(accumulate=not bug)
    opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
    held_out = _moons(1000)

    def step(i):
        loss = flow.nll(_moons(256))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
        opt.step()
        return loss.item()

    def probe():
        s = flow.sample(1000, torch.Generator().manual_seed(3))
        return _energy_distance(s, held_out)

    return {"model": flow, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


_pair("realnvp_moons", "The log-determinant is overwritten in the loop over the coupling layers instead of added up, so only "
      "the last layer's counts; the others contract the data and samples blow up.", _realnvp_moons)


# ----------------------------------------------------------------------------
# contrastive learning
# ----------------------------------------------------------------------------
class AugmentedClusters:
    """12 classes; an 'image' is 6 content features spread over 32 inputs plus nuisance that augmentation changes"""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(12, 6, generator=g)
        self.mix = torch.randn(6, 32, generator=g) / 6 ** 0.5
        self.nuis = torch.randn(6, 32, generator=g) / 6 ** 0.5

    def content(self, n):
        y = torch.randint(0, 12, (n,))
        return self.centres[y] + 0.25 * torch.randn(n, 6), y

    def view(self, c):
        return c @ self.mix + 2.0 * torch.randn(len(c), 6) @ self.nuis + 0.1 * torch.randn(len(c), 32)


class SimSiam(nn.Module):
    def __init__(self, d=32, h=128, out=32, stop_grad=True):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU(),
                                     nn.Linear(h, out))
        self.predictor = nn.Sequential(nn.Linear(out, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, out))
        self.stop_grad = stop_grad

    def forward(self, x1, x2):
        z1, z2 = self.encoder(x1), self.encoder(x2)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        if self.stop_grad:
            z1, z2 = z1.detach(), z2.detach()
        return -0.5 * (F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())


def _simsiam_views(bug):
    torch.manual_seed(13)
    world = AugmentedClusters(5)
    model = SimSiam(stop_grad=not bug)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    c_bank, y_bank = world.content(600)
    x_bank = world.view(c_bank)
    c_test, y_test = world.content(300)
    x_test = world.view(c_test)

    def step(i):
        model.train()
        c, _ = world.content(256)
        loss = model(world.view(c), world.view(c))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        a, b = F.normalize(model.encoder(x_bank), dim=1), F.normalize(model.encoder(x_test), dim=1)
        votes = F.one_hot(y_bank[(b @ a.t()).topk(5).indices], 12).sum(1)
        return float((votes.argmax(1) != y_test).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("simsiam_views", "The target branch is not detached (no stop-gradient), so the two views collapse towards a constant.",
      _simsiam_views)


# ----------------------------------------------------------------------------
# metric learning
# ----------------------------------------------------------------------------
class ArcFaceLoss(nn.Module):
    def __init__(self, n_classes, dim, s=16.0, m=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_classes, dim))
        self.s, self.m = s, m

    def forward(self, emb, y):
        cos = F.linear(F.normalize(emb), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        theta = torch.acos(cos)
        target = torch.cos(theta + self.m)
        onehot = F.one_hot(y, len(self.weight)).bool()
        return F.cross_entropy(self.s * torch.where(onehot, target, cos), y)


class Faces:
    def __init__(self, n_ids):
        self.ident = torch.randn(n_ids, 5)
        self.W1 = torch.randn(5 + 5, 40) / 10 ** 0.5
        self.W2 = torch.randn(40, 40) / 40 ** 0.5

    def sample(self, n, ids):
        y = ids[torch.randint(0, len(ids), (n,))]
        z = torch.cat([self.ident[y] + 0.1 * torch.randn(n, 5), 0.6 * torch.randn(n, 5)], 1)
        return torch.tanh(z @ self.W1) @ self.W2 + 0.05 * torch.randn(n, 40), y


def _arcface_ids(bug):
    torch.manual_seed(214)
    world = Faces(40)
    ids = torch.arange(40)
    embedder = nn.Sequential(nn.Linear(40, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 3))
    criterion = ArcFaceLoss(40, 3)
    params = list(embedder.parameters())
    if not bug:
        params += list(criterion.parameters())
    optimizer = torch.optim.Adam(params, lr=3e-3)
    gal_x, gal_y = world.sample(600, ids)
    qry_x, qry_y = world.sample(600, ids)

    def step(i):
        embedder.train()
        x, y = world.sample(512, ids)
        optimizer.zero_grad()
        loss = criterion(embedder(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        embedder.eval()
        g, q = F.normalize(embedder(gal_x)), F.normalize(embedder(qry_x))
        return float((gal_y[(q @ g.t()).argmax(1)] != qry_y).float().mean())  # 1 - R@1 on new pictures

    return {"model": {"embedder": embedder, "criterion": criterion}, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": probe}


_pair("arcface_ids", "The ArcFace class weights live in the loss module and are not given to the optimizer, so the class centres "
      "stay at their random places, some too near to each other, and retrieval is worse.", _arcface_ids)


# ----------------------------------------------------------------------------
# knowledge distillation
# ----------------------------------------------------------------------------
class _SpiralData:
    def __init__(self, k=5):
        self.k = k

    def sample(self, n):
        y = torch.randint(0, self.k, (n,))
        r = torch.rand(n) * 0.9 + 0.1
        a = r * 3.5 + y * (2 * math.pi / self.k) + 0.4 * torch.randn(n)
        return torch.stack([r * a.cos(), r * a.sin()], 1) * 2, y


def _mlp(*dims):
    layers = []
    for a, b in zip(dims[:-1], dims[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _kd_spirals(bug):
    torch.manual_seed(15)
    data = _SpiralData()
    teacher = _mlp(2, 128, 128, 5)
    opt_t = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(400):
        x, y = data.sample(256)
        opt_t.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt_t.step()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = _mlp(2, 96, 96, 5)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    T, alpha = 4.0, 0.9
    x_test, y_test = data.sample(2000)

    def distillation_loss(s_logits, t_logits, y):
        t_prob = F.softmax(t_logits / T, dim=1)
        if bug:
            soft = F.kl_div(F.softmax(s_logits / T, dim=1), t_prob, reduction="batchmean")
        else:
            soft = F.kl_div(F.log_softmax(s_logits / T, dim=1), t_prob, reduction="batchmean")
        return alpha * T * T * soft + (1 - alpha) * F.cross_entropy(s_logits, y)

    def step(i):
        student.train()
        x, y = data.sample(1024)
        with torch.no_grad():
            t_logits = teacher(x)
        optimizer.zero_grad()
        loss = distillation_loss(student(x), t_logits, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        student.eval()
        return float(F.cross_entropy(student(x_test), y_test))

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("kd_spirals", "F.kl_div is given the student's probabilities where it wants log-probabilities, so the distillation term is "
      "not a divergence and pushes the student to over-confident outputs.", _kd_spirals)


# ----------------------------------------------------------------------------
# denoising
# ----------------------------------------------------------------------------
def _photos(n, size=20):
    base = F.interpolate(torch.rand(n, 1, 4, 4), size=(size, size), mode="bilinear", align_corners=True)
    edges = F.interpolate((torch.rand(n, 1, 5, 5) > 0.5).float(), size=(size, size))
    return ((0.5 * base + 0.5 * edges) * 255).to(torch.uint8)


class NoisyImages(Dataset):
    def __init__(self, images, sigma=30, clip=True):
        self.images, self.sigma, self.clip = images, sigma, clip

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        img = self.images[i]
        noise = torch.randn(img.shape) * self.sigma
        if self.clip:
            noisy = (img.float() + noise).clamp(0, 255).to(torch.uint8)
        else:
            noisy = img + noise.round().to(torch.int64).to(torch.uint8)
        return noisy.float() / 255, img.float() / 255


class DnCNN(nn.Module):
    def __init__(self, w=24, depth=4):
        super().__init__()
        layers = [nn.Conv2d(1, w, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(w, w, 3, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(w, 1, 3, padding=1))

    def forward(self, x):
        return x - self.body(x)


def _denoise_photos(bug):
    torch.manual_seed(16)
    model = DnCNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    it = _forever(DataLoader(NoisyImages(_photos(400), clip=not bug), batch_size=8, shuffle=True))
    clean = _photos(60).float()
    camera = (clean + 30 * torch.randn(clean.shape)).clamp(0, 255).round() / 255

    def step(i):
        model.train()
        noisy, target = next(it)
        loss = F.mse_loss(model(noisy), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float(F.mse_loss(model(camera), clean / 255))

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("denoise_photos", "Noise is added in uint8 arithmetic, so dark pixels wrap to white and bright ones to black; the denoiser "
      "trains on pictures that the camera never gives.", _denoise_photos)


# ----------------------------------------------------------------------------
# video
# ----------------------------------------------------------------------------
def _moving_dots(n, T=8, size=12):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    y = torch.randint(0, 4, (n,))
    v = torch.tensor([[1., 0.], [-1., 0.], [0., 1.], [0., -1.]])[y] * (0.5 + 0.3 * torch.rand(n, 1))
    mid = torch.rand(n, 2) * 4 + 4
    t = torch.arange(T) - (T - 1) / 2
    pos = mid[:, None] + v[:, None] * t[None, :, None]
    d = (xx - pos[..., 0, None, None]) ** 2 + (yy - pos[..., 1, None, None]) ** 2
    clip = torch.exp(-d / 2.5) + 0.1 * torch.randn(n, T, size, size)
    return clip.unsqueeze(2), y


class CNNLSTM(nn.Module):
    def __init__(self, n_classes, **rnn_kwargs):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
                                 nn.Flatten(), nn.Linear(144, 32), nn.ReLU())
        self.rnn = nn.LSTM(32, 48, **rnn_kwargs)
        self.fc = nn.Linear(48, n_classes)

    def forward(self, clip):
        B, T = clip.shape[:2]
        feats = self.cnn(clip.flatten(0, 1)).view(B, T, -1)
        out, _ = self.rnn(feats)
        return self.fc(out[:, -1])


def _video_dots(bug):
    torch.manual_seed(17)
    clips, labels = _moving_dots(600)
    test_clips, test_labels = _moving_dots(256)
    model = CNNLSTM(4) if bug else CNNLSTM(4, batch_first=True)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = _forever(DataLoader(TensorDataset(clips, labels), batch_size=32, shuffle=True, drop_last=True))

    def step(i):
        model.train()
        x, y = next(loader)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        pred = torch.cat([model(c) for c in test_clips.split(32)]).argmax(1)
        return float((pred != test_labels).float().mean())

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


_pair("video_dots", "Frame features are (batch, time, feature) but the LSTM is built without batch_first=True: it recurs over "
      "the batch and sees no time, so the direction of motion can not be learned.", _video_dots)


# ----------------------------------------------------------------------------
# vision transformer
# ----------------------------------------------------------------------------
class TinyViT(nn.Module):
    def __init__(self, img=16, patch=4, dim=48, depth=2, heads=4, n_classes=4, learn_pos=True):
        super().__init__()
        n = (img // patch) ** 2
        self.patch_embed = nn.Conv2d(1, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        pos = torch.zeros(1, n + 1, dim)
        self.pos_embed = nn.Parameter(pos) if learn_pos else pos
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, n_classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x)[:, 0]))


def _corner_marks(n):
    """which quadrant holds the ring (dots are distractors)"""
    x = 0.2 * torch.randn(n, 1, 16, 16)
    y = torch.randint(0, 4, (n,))
    for i in range(n):
        for q in range(4):
            r, c = 8 * (q // 2) + int(torch.randint(0, 4, (1,))), 8 * (q % 2) + int(torch.randint(0, 4, (1,)))
            if q == int(y[i]):
                x[i, 0, r:r + 4, c:c + 4] += 1
                x[i, 0, r + 1:r + 3, c + 1:c + 3] -= 1
            elif torch.rand(()) < 0.6:
                x[i, 0, r + 1:r + 3, c + 1:c + 3] += 1
    return x, y


def _vit_corners(bug):
    torch.manual_seed(18)
    x, y = _corner_marks(1200)
    xt, yt = _corner_marks(300)
    model = TinyViT(learn_pos=not bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    it = _forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        xb, yb = next(it)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float((model(xt).argmax(1) != yt).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("vit_corners", "The position embedding is a plain zero tensor, not an nn.Parameter, so it never trains and the ViT can "
      "not tell patch positions apart.", _vit_corners)


# ----------------------------------------------------------------------------
# fine-tuning
# ----------------------------------------------------------------------------
class BackboneNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 4, n_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


def _finetune_shapes(bug):
    torch.manual_seed(19)
    source = ShapeSet(800, noise=0.25)
    model = BackboneNet(5)
    pre = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = _forever(DataLoader(source, batch_size=64, shuffle=True))
    for _ in range(80):
        xb, yb = next(batches)
        pre.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        pre.step()

    # new task: same shapes, grouped in 3 and drawn dark on light
    def convert(ds):
        return 1 - ds.x, torch.tensor([0, 0, 1, 2, 1])[ds.y]

    x, y = convert(ShapeSet(300, noise=0.25))
    xt, yt = convert(ShapeSet(300, noise=0.25))

    if bug:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model.fc = nn.Linear(model.fc.in_features, 3)
    else:
        model.fc = nn.Linear(model.fc.in_features, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    it = _forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        xb, yb = next(it)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float((model(xt).argmax(1) != yt).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("finetune_shapes", "The classification head is replaced after the optimizer was built, so the new head is not among its "
      "parameters and stays random (the optimizer still holds the old head).", _finetune_shapes)


# ----------------------------------------------------------------------------
# multi-label
# ----------------------------------------------------------------------------
class TagNet(nn.Module):
    def __init__(self, n_tags):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                  nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten())
        self.tags = nn.Linear(32, n_tags)

    def forward(self, x):
        return self.tags(self.body(x))


_TAG_STAMPS = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(21))


def _tagged_images(n):
    x = 0.5 * torch.randn(n, 3, 16, 16)
    y = (torch.rand(n, 8) < torch.linspace(0.1, 0.4, 8)).float()
    for i in range(n):
        for k in y[i].nonzero().flatten().tolist():
            r, c = torch.randint(0, 13, (2,)).tolist()
            x[i, :, r:r + 4, c:c + 4] += _TAG_STAMPS[k]
    return x, y


def _multilabel_tags(bug):
    torch.manual_seed(20)
    x, y = _tagged_images(800)
    xt, yt = _tagged_images(300)
    model = TagNet(8)
    criterion = nn.CrossEntropyLoss() if bug else nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    it = _forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    def step(i):
        model.train()
        xb, yb = next(it)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        p = (torch.sigmoid(model(xt)) > 0.5).float()
        tp = (p * yt).sum()
        return float(1 - 2 * tp / (p.sum() + yt.sum()).clamp(min=1))  # 1 - micro F1

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("multilabel_tags", "nn.CrossEntropyLoss is used with multi-hot float targets (they are taken for class probabilities), while "
      "the tags are read with sigmoid > 0.5: tags compete in a softmax and their logits have no absolute meaning.", _multilabel_tags)


# ----------------------------------------------------------------------------
# OCR
# ----------------------------------------------------------------------------
CHARSET = "abcdefgh"
_GLYPHS = (torch.rand(8, 8, 4, generator=torch.Generator().manual_seed(31)) > 0.5).float()


class LabelCodec:
    def __init__(self, charset, offset):
        self.charset, self.offset = charset, offset

    def encode(self, text):
        return [self.charset.index(ch) + self.offset for ch in text]

    def decode(self, ids):
        out, prev = [], None
        for k in ids:
            if k != prev and k != 0 and 0 <= k - self.offset < len(self.charset):
                out.append(self.charset[k - self.offset])
            prev = k
        return "".join(out)


def _draw_line(text, width=48):
    img = 0.25 * torch.randn(1, 8, width)
    x = int(torch.randint(1, 5, (1,)))
    for ch in text:
        img[0, :, x:x + 4] += _GLYPHS[CHARSET.index(ch)]
        x += 4 + int(torch.randint(2, 4, (1,)))
    return img


def _random_text():
    n = int(torch.randint(3, 7, (1,)))
    return "".join(CHARSET[k] for k in torch.randint(0, 8, (n,)).tolist())


def _edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


class CRNN(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 32, (8, 3), padding=(0, 1), stride=(1, 2)), nn.ReLU())
        self.rnn = nn.GRU(32, 32, bidirectional=True)
        self.out = nn.Linear(64, n_out)

    def forward(self, x):
        f = self.conv(x).squeeze(2).permute(2, 0, 1)  # T, B, C
        return self.out(self.rnn(f)[0]).log_softmax(-1)


def _ocr_lines(bug):
    torch.manual_seed(22)
    codec = LabelCodec(CHARSET, offset=0 if bug else 1)
    texts = [_random_text() for _ in range(600)]
    lines = torch.stack([_draw_line(t) for t in texts])
    test_texts = [_random_text() for _ in range(100)]
    test_lines = torch.stack([_draw_line(t) for t in test_texts])
    model = CRNN(len(CHARSET) + 1)
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(i):
        model.train()
        idx = torch.randint(0, len(texts), (16,)).tolist()
        labels = [codec.encode(texts[k]) for k in idx]
        targets = torch.tensor([c for l in labels for c in l])
        target_lengths = torch.tensor([len(l) for l in labels])
        logp = model(lines[idx])
        loss = ctc(logp, targets, torch.full((16,), logp.shape[0]), target_lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        best = model(test_lines).argmax(-1).t().tolist()
        err = sum(_edit_distance(codec.decode(b), t) for b, t in zip(best, test_texts))
        return err / sum(len(t) for t in test_texts)  # character error rate

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("ocr_lines", "Characters are encoded from index 0, which is also the CTC blank, so the first letter of the charset "
      "collides with the blank and can not be read.", _ocr_lines)


# ----------------------------------------------------------------------------
# semi-supervised learning
# ----------------------------------------------------------------------------
class Unlabelled(Dataset):
    def __init__(self, x, *strengths):
        self.x, self.strengths = x, strengths

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return tuple(self.x[i] + s * torch.randn_like(self.x[i]) for s in self.strengths)


def _ssl_moons(n, k=4):
    y = torch.randint(0, k, (n,))
    t = torch.rand(n) * math.pi
    arc = torch.stack([t.cos(), t.sin()], 1)
    ang = y * (2 * math.pi / k)
    rot = torch.stack([torch.stack([ang.cos(), -ang.sin()], 1), torch.stack([ang.sin(), ang.cos()], 1)], 1)
    centre = torch.stack([ang.cos(), ang.sin()], 1) * 1.3
    return (rot @ arc.unsqueeze(-1)).squeeze(-1) + centre + 0.06 * torch.randn(n, 2), y


def _fixmatch_arcs(bug):
    torch.manual_seed(23)
    x_all, _ = _ssl_moons(2000)
    x_lab, y_lab = _ssl_moons(16)
    xt, yt = _ssl_moons(1000)
    model = _mlp(2, 96, 96, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(40):  # supervised warm-up
        optimizer.zero_grad()
        F.cross_entropy(model(x_lab + 0.05 * torch.randn_like(x_lab)), y_lab).backward()
        optimizer.step()

    if bug:
        weak = DataLoader(Unlabelled(x_all, 0.05), batch_size=128, shuffle=True)
        strong = DataLoader(Unlabelled(x_all, 0.25), batch_size=128, shuffle=True)
        pairs = ((w, s) for (w,), (s,) in zip(_forever(weak), _forever(strong)))
    else:
        pairs = _forever(DataLoader(Unlabelled(x_all, 0.05, 0.25), batch_size=128, shuffle=True))

    def step(i):
        model.train()
        uw, us = next(pairs)
        lx = x_lab + 0.05 * torch.randn_like(x_lab)
        with torch.no_grad():
            conf, pseudo = model(uw).softmax(1).max(1)
        mask = (conf > 0.8).float()
        loss_l = F.cross_entropy(model(lx), y_lab)
        loss_u = (F.cross_entropy(model(us), pseudo, reduction="none") * mask).mean()
        loss = loss_l + loss_u
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        return float((model(xt).argmax(1) != yt).float().mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


_pair("fixmatch_arcs", "The weakly and the strongly augmented batches come from two loaders that are shuffled independently, so the "
      "pseudo-labels of one image train another image.", _fixmatch_arcs)
