"""Sixteen programs, each with one bug and a mended twin, by somebody who had not seen the checks and was told which bugs
earlier sets have, to choose others.

See step_programs.py. They are kept as they were written.
"""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

CASES = [{'name': 'cutmix_area_weight',
  'what': 'CutMix weights the original label with the area of the pasted patch instead of the area that '
          'remains, so the label of the smaller part gets the larger weight and clean pictures are mapped to '
          'wrong classes.',
  'steps': 200},
 {'name': 'chamfer_same_side',
  'what': 'Both terms of the Chamfer loss take the minimum over the same axis, so only prediction-to-target '
          'is trained; nothing forces the output to cover the target and points bunch up.',
  'steps': 300},
 {'name': 'ntxent_pair_index',
  'what': 'The two views are concatenated (all first views, then all second ones), but the positive index '
          'assumes interleaved views (i ^ 1), so different pictures are pulled together and the true pair '
          'serves as a negative.',
  'steps': 300},
 {'name': 'mask_resize_bilinear',
  'what': 'Class-id masks are shrunk with bilinear interpolation and truncated to integers, which invents '
          'wrong classes at every edge (4 next to 0 becomes 1, 2 or 3).',
  'steps': 250},
 {'name': 'centernet_xy_swap',
  'what': 'Centre cells are indexed [x, y] in maps laid out [row, column], so heat map and size targets are '
          'transposed and the convolution learns no location.',
  'steps': 250},
 {'name': 'inpaint_positions',
  'what': 'The position table is nn.Parameter(...).unsqueeze(0): a non-leaf tensor that is not registered as '
          'a parameter, so it stays at zero and masked patches do not know where they are.',
  'steps': 300},
 {'name': 'unfreeze_attribute',
  'what': 'The backbone is to be unfrozen after warm-up by module.requires_grad = True, which only sets a '
          'Python attribute on the module; its parameters stay frozen for the whole run.',
  'steps': 250},
 {'name': 'vq_straight_through',
  'what': 'The straight-through estimator lacks its detach: z + (q - z) cancels the gradient to the encoder, '
          'which never learns from the reconstruction.',
  'steps': 400},
 {'name': 'item_vectors_from_pretrained',
  'what': 'nn.Embedding.from_pretrained freezes by default; item vectors that should be fine-tuned stay at '
          'the rough content vectors.',
  'steps': 300},
 {'name': 'mil_attention_axis',
  'what': 'Attention over the instances of a bag is normalised over the batch (dim=0) instead of the '
          'instances (dim=1): bags influence each other and attention in a bag is not a distribution.',
  'steps': 300},
 {'name': 'two_stream_norm',
  'what': 'Both streams share one BatchNorm module although their scales differ; the running statistics mix '
          'both streams and fit neither in eval mode.',
  'steps': 150},
 {'name': 'gnn_edge_direction',
  'what': 'Source and target of the directed edges are swapped, so nodes gather from those they point to '
          'instead of from those that point to them.',
  'steps': 150},
 {'name': 'wavenet_padding',
  'what': 'Dilated convolutions are padded on both sides, so the next-sample predictor sees the sample it '
          'must predict and learns to copy it.',
  'steps': 250},
 {'name': 'target_encoding',
  'what': "A high-cardinality category is encoded by the mean target including the row's own target, so the "
          'label leaks into the feature and the model trusts it far too much.',
  'steps': 400},
 {'name': 'teacher_buffers',
  'what': 'The EMA of the teacher covers parameters only; its BatchNorm running statistics stay at their '
          'start, so the eval-mode teacher gives bad soft targets to the student.',
  'steps': 200},
 {'name': 'multi_site_gradients',
  'what': 'zero_grad is called inside the loop over the sites before one common optimizer step, so the '
          'gradients of all sites but the last are thrown away.',
  'steps': 300}]

PROBES = {'cutmix_area_weight': 'held-out cross entropy on clean pictures (eval mode)',
 'chamfer_same_side': 'held-out two-sided Chamfer distance',
 'ntxent_pair_index': 'held-out top-1 retrieval error between two views of the same picture',
 'mask_resize_bilinear': '1 - mean IoU on held-out pictures at full size',
 'centernet_xy_swap': "mean distance (pixels) of the heat map's peak from the true centre, held-out",
 'inpaint_positions': 'held-out mean squared error on masked patches',
 'unfreeze_attribute': 'held-out cross entropy',
 'vq_straight_through': 'held-out reconstruction mean squared error',
 'item_vectors_from_pretrained': 'held-out rating RMSE',
 'mil_attention_axis': 'held-out binary cross entropy, one slide at a time',
 'two_stream_norm': 'held-out cross entropy in eval mode',
 'gnn_edge_direction': 'error rate on held-out nodes',
 'wavenet_padding': 'squared error of forecasting the last sample of held-out clips (its future not given)',
 'target_encoding': 'held-out squared error against the noise-free target',
 'teacher_buffers': 'held-out cross entropy of the student',
 'multi_site_gradients': 'held-out binary cross entropy averaged over all sites'}


def forever(loader):
    while True:
        for batch in loader:
            yield batch


def gratings(n, classes, size=16, noise=0.5):
    y = torch.randint(classes, (n,))
    ang = y.float() * math.pi / classes
    ph = torch.rand(n) * 2 * math.pi
    g = torch.arange(size).float()
    yy, xx = torch.meshgrid(g, g, indexing="ij")
    arg = (xx[None] * torch.cos(ang)[:, None, None] + yy[None] * torch.sin(ang)[:, None, None]) * 0.9
    img = torch.sin(arg + ph[:, None, None])
    img = img[:, None].repeat(1, 3, 1, 1) + noise * torch.randn(n, 3, size, size)
    return img, y


def spectrograms(n, classes, offset=0.0, scale=1.0, noise=0.6):
    y = torch.randint(classes, (n,))
    f = torch.arange(16).float()[None, :, None]
    t = torch.arange(16).float()[None, None, :]
    slope = (y.float() - (classes - 1) / 2)[:, None, None] * 0.35
    start = 8 + 2 * torch.randn(n)[:, None, None]
    ridge = torch.exp(-0.5 * (f - start - slope * (t - 8)) ** 2)
    x = 2 * ridge + noise * torch.randn(n, 16, 16)
    return (x * scale + offset)[:, None], y


def cutmix_area_weight_bad():
    torch.manual_seed(0)
    x, y = gratings(1024, 6)
    xv, yv = gratings(512, 6)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))

    class SmallNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.fc = nn.Linear(32, 6)

        def forward(self, x):
            return self.fc(self.features(x))

    model = SmallNet()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    beta = torch.distributions.Beta(1.0, 1.0)

    def rand_bbox(h, w, lam):
        r = math.sqrt(1.0 - lam)
        ch, cw = int(h * r), int(w * r)
        cy, cx = int(torch.randint(h, (1,))), int(torch.randint(w, (1,)))
        y1, y2 = max(cy - ch // 2, 0), min(cy + ch // 2, h)
        x1, x2 = max(cx - cw // 2, 0), min(cx + cw // 2, w)
        return y1, y2, x1, x2

    def step(i):
        model.train()
        xb, yb = next(loader)
        perm = torch.randperm(len(xb))
        y1, y2, x1, x2 = rand_bbox(xb.shape[2], xb.shape[3], float(beta.sample()))
        xb = xb.clone()
        xb[:, :, y1:y2, x1:x2] = xb[perm][:, :, y1:y2, x1:x2]
        area = (y2 - y1) * (x2 - x1) / (xb.shape[2] * xb.shape[3])
        lam = area
        opt.zero_grad()
        out = model(xb)
        loss = lam * F.cross_entropy(out, yb) + (1.0 - lam) * F.cross_entropy(out, yb[perm])
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            v = F.cross_entropy(model(xv), yv).item()
        model.train()
        return v

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def cutmix_area_weight_good():
    torch.manual_seed(0)
    x, y = gratings(1024, 6)
    xv, yv = gratings(512, 6)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, drop_last=True))

    class SmallNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.fc = nn.Linear(32, 6)

        def forward(self, x):
            return self.fc(self.features(x))

    model = SmallNet()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    beta = torch.distributions.Beta(1.0, 1.0)

    def rand_bbox(h, w, lam):
        r = math.sqrt(1.0 - lam)
        ch, cw = int(h * r), int(w * r)
        cy, cx = int(torch.randint(h, (1,))), int(torch.randint(w, (1,)))
        y1, y2 = max(cy - ch // 2, 0), min(cy + ch // 2, h)
        x1, x2 = max(cx - cw // 2, 0), min(cx + cw // 2, w)
        return y1, y2, x1, x2

    def step(i):
        model.train()
        xb, yb = next(loader)
        perm = torch.randperm(len(xb))
        y1, y2, x1, x2 = rand_bbox(xb.shape[2], xb.shape[3], float(beta.sample()))
        xb = xb.clone()
        xb[:, :, y1:y2, x1:x2] = xb[perm][:, :, y1:y2, x1:x2]
        area = (y2 - y1) * (x2 - x1) / (xb.shape[2] * xb.shape[3])
        lam = 1.0 - area
        opt.zero_grad()
        out = model(xb)
        loss = lam * F.cross_entropy(out, yb) + (1.0 - lam) * F.cross_entropy(out, yb[perm])
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            v = F.cross_entropy(model(xv), yv).item()
        model.train()
        return v

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def chamfer_same_side_bad():
    torch.manual_seed(0)

    def clouds(n, pts=64):
        d = F.normalize(torch.randn(n, pts, 3), dim=-1)
        axes = 0.4 + 1.2 * torch.rand(n, 1, 3)
        return d * axes

    train, held = clouds(512), clouds(128)

    class PointAE(nn.Module):
        def __init__(self, pts=64, z=32):
            super().__init__()
            self.enc = nn.Sequential(nn.Conv1d(3, 64, 1), nn.ReLU(), nn.Conv1d(64, 96, 1))
            self.bottleneck = nn.Linear(96, z)
            self.dec = nn.Sequential(nn.Linear(z, 128), nn.ReLU(), nn.Linear(128, pts * 3))
            self.pts = pts

        def forward(self, p):
            h = self.enc(p.transpose(1, 2)).max(dim=2)[0]
            return self.dec(self.bottleneck(h)).view(-1, self.pts, 3)

    def chamfer(a, b):
        d = ((a[:, :, None] - b[:, None]) ** 2).sum(-1)
        a2b = d.min(dim=2)[0].mean()
        b2a = d.min(dim=-1)[0].mean()
        return a2b + b2a

    model = PointAE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        p = train[torch.randint(len(train), (32,))]
        opt.zero_grad(set_to_none=True)
        loss = chamfer(model(p), p)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            d = torch.cdist(model(held), held)
            return (d.min(1)[0].mean() + d.min(2)[0].mean()).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def chamfer_same_side_good():
    torch.manual_seed(0)

    def clouds(n, pts=64):
        d = F.normalize(torch.randn(n, pts, 3), dim=-1)
        axes = 0.4 + 1.2 * torch.rand(n, 1, 3)
        return d * axes

    train, held = clouds(512), clouds(128)

    class PointAE(nn.Module):
        def __init__(self, pts=64, z=32):
            super().__init__()
            self.enc = nn.Sequential(nn.Conv1d(3, 64, 1), nn.ReLU(), nn.Conv1d(64, 96, 1))
            self.bottleneck = nn.Linear(96, z)
            self.dec = nn.Sequential(nn.Linear(z, 128), nn.ReLU(), nn.Linear(128, pts * 3))
            self.pts = pts

        def forward(self, p):
            h = self.enc(p.transpose(1, 2)).max(dim=2)[0]
            return self.dec(self.bottleneck(h)).view(-1, self.pts, 3)

    def chamfer(a, b):
        d = ((a[:, :, None] - b[:, None]) ** 2).sum(-1)
        a2b = d.min(dim=2)[0].mean()
        b2a = d.min(dim=1)[0].mean()
        return a2b + b2a

    model = PointAE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        p = train[torch.randint(len(train), (32,))]
        opt.zero_grad(set_to_none=True)
        loss = chamfer(model(p), p)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            d = torch.cdist(model(held), held)
            return (d.min(1)[0].mean() + d.min(2)[0].mean()).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def ntxent_pair_index_bad():
    torch.manual_seed(0)
    yy, xx = torch.meshgrid(torch.linspace(0, 1, 12), torch.linspace(0, 1, 12), indexing="ij")

    def blobs(n):
        c = torch.rand(n, 3, 2)
        s = 0.05 + 0.1 * torch.rand(n, 3)
        d = (yy - c[..., 0, None, None]) ** 2 + (xx - c[..., 1, None, None]) ** 2
        return torch.exp(-d / (2 * s[..., None, None] ** 2)).sum(1, keepdim=True)

    def augment(x):
        gain = 0.5 + torch.rand(len(x), 1, 1, 1)
        bias = 0.5 * torch.randn(len(x), 1, 1, 1)
        return x * gain + bias + 0.3 * torch.randn_like(x)

    data, held = blobs(2048), blobs(256)
    va, vb = augment(held), augment(held)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
            self.proj = nn.Sequential(nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            return self.proj(self.conv(x))

    def nt_xent(z1, z2, tau=0.2):
        n = z1.shape[0]
        z = F.normalize(torch.cat([z1, z2], dim=0), dim=1)
        sim = z @ z.t() / tau
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        pos = torch.arange(2 * n) ^ 1
        return F.cross_entropy(sim, pos)

    net = Encoder()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        x = data[torch.randperm(len(data))[:64]]
        loss = nt_xent(net(augment(x)), net(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            a, b = F.normalize(net(va), dim=1), F.normalize(net(vb), dim=1)
            hit = (a @ b.t()).argmax(1) == torch.arange(len(a))
            return 1.0 - hit.float().mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ntxent_pair_index_good():
    torch.manual_seed(0)
    yy, xx = torch.meshgrid(torch.linspace(0, 1, 12), torch.linspace(0, 1, 12), indexing="ij")

    def blobs(n):
        c = torch.rand(n, 3, 2)
        s = 0.05 + 0.1 * torch.rand(n, 3)
        d = (yy - c[..., 0, None, None]) ** 2 + (xx - c[..., 1, None, None]) ** 2
        return torch.exp(-d / (2 * s[..., None, None] ** 2)).sum(1, keepdim=True)

    def augment(x):
        gain = 0.5 + torch.rand(len(x), 1, 1, 1)
        bias = 0.5 * torch.randn(len(x), 1, 1, 1)
        return x * gain + bias + 0.3 * torch.randn_like(x)

    data, held = blobs(2048), blobs(256)
    va, vb = augment(held), augment(held)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
            self.proj = nn.Sequential(nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            return self.proj(self.conv(x))

    def nt_xent(z1, z2, tau=0.2):
        n = z1.shape[0]
        z = F.normalize(torch.cat([z1, z2], dim=0), dim=1)
        sim = z @ z.t() / tau
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        pos = (torch.arange(2 * n) + n) % (2 * n)
        return F.cross_entropy(sim, pos)

    net = Encoder()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        x = data[torch.randperm(len(data))[:64]]
        loss = nt_xent(net(augment(x)), net(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            a, b = F.normalize(net(va), dim=1), F.normalize(net(vb), dim=1)
            hit = (a @ b.t()).argmax(1) == torch.arange(len(a))
            return 1.0 - hit.float().mean().item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mask_resize_bilinear_bad():
    torch.manual_seed(0)

    def scenes(n, size=32):
        img = 0.2 * torch.randn(n, 3, size, size)
        lab = torch.zeros(n, size, size, dtype=torch.long)
        palette = torch.tensor([[1., 0, 0], [0, 1., 0], [0, 0, 1.], [1., 1., 0]])
        for k in range(n):
            for _ in range(4):
                c = int(torch.randint(4, (1,)))
                y0, x0 = (int(v) for v in torch.randint(0, size - 6, (2,)))
                h, w = (int(v) for v in torch.randint(3, 7, (2,)))
                lab[k, y0:y0 + h, x0:x0 + w] = c + 1
                img[k, :, y0:y0 + h, x0:x0 + w] = palette[c][:, None, None] + 0.2 * torch.randn(3, h, w)
        return img, lab

    x, y = scenes(384)
    xv, yv = scenes(128)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    class SegNet(nn.Module):
        def __init__(self, classes=5):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
                nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
                nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
            self.head = nn.Conv2d(48, classes, 1)

        def forward(self, x):
            return self.head(self.body(x))

    model = SegNet()
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        img, lab = next(loader)
        out = model(img)
        lab = lab[:, None].float()
        lab = F.interpolate(lab, size=out.shape[-2:], mode="bilinear", align_corners=False)
        loss = criterion(out, lab[:, 0].long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            up = F.interpolate(model(xv), size=yv.shape[-2:], mode="bilinear", align_corners=False)
            pred = up.argmax(1)
            ious = [((pred == c) & (yv == c)).sum() / ((pred == c) | (yv == c)).sum() for c in range(5)]
        model.train()
        return 1.0 - float(torch.stack(ious).mean())

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def mask_resize_bilinear_good():
    torch.manual_seed(0)

    def scenes(n, size=32):
        img = 0.2 * torch.randn(n, 3, size, size)
        lab = torch.zeros(n, size, size, dtype=torch.long)
        palette = torch.tensor([[1., 0, 0], [0, 1., 0], [0, 0, 1.], [1., 1., 0]])
        for k in range(n):
            for _ in range(4):
                c = int(torch.randint(4, (1,)))
                y0, x0 = (int(v) for v in torch.randint(0, size - 6, (2,)))
                h, w = (int(v) for v in torch.randint(3, 7, (2,)))
                lab[k, y0:y0 + h, x0:x0 + w] = c + 1
                img[k, :, y0:y0 + h, x0:x0 + w] = palette[c][:, None, None] + 0.2 * torch.randn(3, h, w)
        return img, lab

    x, y = scenes(384)
    xv, yv = scenes(128)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    class SegNet(nn.Module):
        def __init__(self, classes=5):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
                nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
                nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
            self.head = nn.Conv2d(48, classes, 1)

        def forward(self, x):
            return self.head(self.body(x))

    model = SegNet()
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        img, lab = next(loader)
        out = model(img)
        lab = lab[:, None].float()
        lab = F.interpolate(lab, size=out.shape[-2:], mode="nearest-exact")
        loss = criterion(out, lab[:, 0].long())
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            up = F.interpolate(model(xv), size=yv.shape[-2:], mode="bilinear", align_corners=False)
            pred = up.argmax(1)
            ious = [((pred == c) & (yv == c)).sum() / ((pred == c) | (yv == c)).sum() for c in range(5)]
        model.train()
        return 1.0 - float(torch.stack(ious).mean())

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def centernet_xy_swap_bad():
    torch.manual_seed(0)
    S, STRIDE = 24, 3

    def boxes_dataset(n):
        img = 0.3 * torch.randn(n, 1, S, S)
        box = torch.zeros(n, 4)
        for k in range(n):
            w, h = (int(v) for v in torch.randint(4, 10, (2,)))
            x0, y0 = int(torch.randint(0, S - w, (1,))), int(torch.randint(0, S - h, (1,)))
            img[k, 0, y0:y0 + h, x0:x0 + w] += 1.0
            box[k] = torch.tensor([x0 + w / 2, y0 + h / 2, w, h])
        return img, box

    x, b = boxes_dataset(1024)
    xv, bv = boxes_dataset(256)

    class CenterNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(1, 24, 5, stride=3, padding=1), nn.ReLU(),
                nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
            self.heat = nn.Conv2d(32, 1, 1)
            self.size = nn.Conv2d(32, 2, 1)
            nn.init.constant_(self.heat.bias, -3.0)

        def forward(self, x):
            f = self.stem(x)
            return self.heat(f)[:, 0], self.size(f)

    net = CenterNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        idx = torch.randint(len(x), (32,))
        img, box = x[idx], b[idx]
        heat, size = net(img)
        cx, cy = (box[:, 0] / STRIDE).long(), (box[:, 1] / STRIDE).long()
        rows = torch.arange(len(img))
        target = torch.zeros_like(heat)
        target[rows, cx, cy] = 1.0
        wh = size[rows, :, cx, cy]
        loss_h = F.binary_cross_entropy_with_logits(heat, target, reduction="sum") / len(img)
        loss_s = F.l1_loss(wh, box[:, 2:] / S)
        loss = loss_h + loss_s
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            heat, _ = net(xv)
            k = heat.flatten(1).argmax(1)
            py, px = k // heat.shape[2], k % heat.shape[2]
            c = torch.stack([px, py], 1).float() * STRIDE + STRIDE / 2
            return (c - bv[:, :2]).norm(dim=1).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def centernet_xy_swap_good():
    torch.manual_seed(0)
    S, STRIDE = 24, 3

    def boxes_dataset(n):
        img = 0.3 * torch.randn(n, 1, S, S)
        box = torch.zeros(n, 4)
        for k in range(n):
            w, h = (int(v) for v in torch.randint(4, 10, (2,)))
            x0, y0 = int(torch.randint(0, S - w, (1,))), int(torch.randint(0, S - h, (1,)))
            img[k, 0, y0:y0 + h, x0:x0 + w] += 1.0
            box[k] = torch.tensor([x0 + w / 2, y0 + h / 2, w, h])
        return img, box

    x, b = boxes_dataset(1024)
    xv, bv = boxes_dataset(256)

    class CenterNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(
                nn.Conv2d(1, 24, 5, stride=3, padding=1), nn.ReLU(),
                nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
            self.heat = nn.Conv2d(32, 1, 1)
            self.size = nn.Conv2d(32, 2, 1)
            nn.init.constant_(self.heat.bias, -3.0)

        def forward(self, x):
            f = self.stem(x)
            return self.heat(f)[:, 0], self.size(f)

    net = CenterNet()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)

    def step(i):
        idx = torch.randint(len(x), (32,))
        img, box = x[idx], b[idx]
        heat, size = net(img)
        cx, cy = (box[:, 0] / STRIDE).long(), (box[:, 1] / STRIDE).long()
        rows = torch.arange(len(img))
        target = torch.zeros_like(heat)
        target[rows, cy, cx] = 1.0
        wh = size[rows, :, cy, cx]
        loss_h = F.binary_cross_entropy_with_logits(heat, target, reduction="sum") / len(img)
        loss_s = F.l1_loss(wh, box[:, 2:] / S)
        loss = loss_h + loss_s
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            heat, _ = net(xv)
            k = heat.flatten(1).argmax(1)
            py, px = k // heat.shape[2], k % heat.shape[2]
            c = torch.stack([px, py], 1).float() * STRIDE + STRIDE / 2
            return (c - bv[:, :2]).norm(dim=1).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def inpaint_positions_bad():
    torch.manual_seed(0)

    def smooth_images(n, size=16):
        g = torch.linspace(-1, 1, size)
        yy, xx = torch.meshgrid(g, g, indexing="ij")
        a = torch.randn(n, 4, 1, 1)
        img = a[:, 0] * xx + a[:, 1] * yy + 0.7 * a[:, 2] * xx * yy + 0.3 * a[:, 3]
        return img[:, None] + 0.03 * torch.randn(n, 1, size, size)

    data, held = smooth_images(1024), smooth_images(256)
    held_mask = torch.rand(256, 16).argsort(1) < 8

    def patchify(img):
        return F.unfold(img, kernel_size=4, stride=4).transpose(1, 2)

    class Inpainter(nn.Module):
        def __init__(self, tokens=16, dim=48):
            super().__init__()
            self.embed = nn.Linear(16, dim)
            self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos = nn.Parameter(torch.zeros(tokens, dim)).unsqueeze(0)
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2)
            self.to_pixels = nn.Linear(dim, 16)

        def forward(self, patches, mask):
            h = torch.where(mask[..., None], self.mask_token, self.embed(patches))
            return self.to_pixels(self.blocks(h + self.pos))

    model = Inpainter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def masked_mse(pred, target, mask):
        return ((pred - target) ** 2).mean(-1)[mask].mean()

    def step(i):
        p = patchify(data[torch.randint(len(data), (32,))])
        mask = torch.rand(p.shape[:2]).argsort(1) < 8
        optimizer.zero_grad()
        loss = masked_mse(model(p, mask), p, mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            p = patchify(held)
            return masked_mse(model(p, held_mask), p, held_mask).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def inpaint_positions_good():
    torch.manual_seed(0)

    def smooth_images(n, size=16):
        g = torch.linspace(-1, 1, size)
        yy, xx = torch.meshgrid(g, g, indexing="ij")
        a = torch.randn(n, 4, 1, 1)
        img = a[:, 0] * xx + a[:, 1] * yy + 0.7 * a[:, 2] * xx * yy + 0.3 * a[:, 3]
        return img[:, None] + 0.03 * torch.randn(n, 1, size, size)

    data, held = smooth_images(1024), smooth_images(256)
    held_mask = torch.rand(256, 16).argsort(1) < 8

    def patchify(img):
        return F.unfold(img, kernel_size=4, stride=4).transpose(1, 2)

    class Inpainter(nn.Module):
        def __init__(self, tokens=16, dim=48):
            super().__init__()
            self.embed = nn.Linear(16, dim)
            self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos = nn.Parameter(torch.zeros(tokens, dim).unsqueeze(0))
            layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2)
            self.to_pixels = nn.Linear(dim, 16)

        def forward(self, patches, mask):
            h = torch.where(mask[..., None], self.mask_token, self.embed(patches))
            return self.to_pixels(self.blocks(h + self.pos))

    model = Inpainter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def masked_mse(pred, target, mask):
        return ((pred - target) ** 2).mean(-1)[mask].mean()

    def step(i):
        p = patchify(data[torch.randint(len(data), (32,))])
        mask = torch.rand(p.shape[:2]).argsort(1) < 8
        optimizer.zero_grad()
        loss = masked_mse(model(p, mask), p, mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            p = patchify(held)
            return masked_mse(model(p, held_mask), p, held_mask).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def unfreeze_attribute_bad():
    torch.manual_seed(0)

    class AudioTagger(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
            self.head = nn.Linear(96, classes)

        def forward(self, x):
            return self.head(self.backbone(x))

    def pretrain():
        xs, ys = spectrograms(512, 2, noise=0.3)
        net = AudioTagger(2)
        o = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(40):
            k = torch.randint(512, (32,))
            o.zero_grad()
            F.cross_entropy(net(xs[k]), ys[k]).backward()
            o.step()
        return net.backbone.state_dict()

    model = AudioTagger(7)
    model.backbone.load_state_dict(pretrain())
    x, y = spectrograms(1024, 7)
    xv, yv = spectrograms(512, 7)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam([
        {"params": model.head.parameters(), "lr": 2e-3},
        {"params": model.backbone.parameters(), "lr": 2e-3},
    ])
    WARMUP = 4

    def step(i):
        if i == WARMUP:
            model.backbone.requires_grad = True
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def unfreeze_attribute_good():
    torch.manual_seed(0)

    class AudioTagger(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
            self.head = nn.Linear(96, classes)

        def forward(self, x):
            return self.head(self.backbone(x))

    def pretrain():
        xs, ys = spectrograms(512, 2, noise=0.3)
        net = AudioTagger(2)
        o = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(40):
            k = torch.randint(512, (32,))
            o.zero_grad()
            F.cross_entropy(net(xs[k]), ys[k]).backward()
            o.step()
        return net.backbone.state_dict()

    model = AudioTagger(7)
    model.backbone.load_state_dict(pretrain())
    x, y = spectrograms(1024, 7)
    xv, yv = spectrograms(512, 7)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))

    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam([
        {"params": model.head.parameters(), "lr": 2e-3},
        {"params": model.backbone.parameters(), "lr": 2e-3},
    ])
    WARMUP = 4

    def step(i):
        if i == WARMUP:
            model.backbone.requires_grad_(True)
        xb, yb = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vq_straight_through_bad():
    torch.manual_seed(0)

    def waves(n, length=32):
        t = torch.arange(length).float()
        f = 0.15 + 0.5 * torch.rand(n, 1)
        ph = 6.283 * torch.rand(n, 1)
        amp = 0.5 + torch.rand(n, 1)
        return amp * torch.sin(f * t + ph)

    data, held = waves(2048), waves(512)

    class VQVAE(nn.Module):
        def __init__(self, codes=32, dim=8, slots=6):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, slots * dim))
            self.dec = nn.Sequential(nn.Linear(slots * dim, 96), nn.ReLU(), nn.Linear(96, 32))
            self.codebook = nn.Embedding(codes, dim)
            nn.init.normal_(self.codebook.weight, std=0.3)
            self.slots, self.dim = slots, dim

        def forward(self, x):
            z = self.enc(x).view(-1, self.slots, self.dim)
            idx = torch.cdist(z.detach(), self.codebook.weight.detach()).argmin(-1)
            q = self.codebook(idx)
            vq = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
            q = z + (q - z)
            return self.dec(q.flatten(1)), vq

    model = VQVAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x = data[torch.randint(len(data), (64,))]
        rec, vq = model(x)
        loss = F.mse_loss(rec, x) + vq
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(held)[0], held).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def vq_straight_through_good():
    torch.manual_seed(0)

    def waves(n, length=32):
        t = torch.arange(length).float()
        f = 0.15 + 0.5 * torch.rand(n, 1)
        ph = 6.283 * torch.rand(n, 1)
        amp = 0.5 + torch.rand(n, 1)
        return amp * torch.sin(f * t + ph)

    data, held = waves(2048), waves(512)

    class VQVAE(nn.Module):
        def __init__(self, codes=32, dim=8, slots=6):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, slots * dim))
            self.dec = nn.Sequential(nn.Linear(slots * dim, 96), nn.ReLU(), nn.Linear(96, 32))
            self.codebook = nn.Embedding(codes, dim)
            nn.init.normal_(self.codebook.weight, std=0.3)
            self.slots, self.dim = slots, dim

        def forward(self, x):
            z = self.enc(x).view(-1, self.slots, self.dim)
            idx = torch.cdist(z.detach(), self.codebook.weight.detach()).argmin(-1)
            q = self.codebook(idx)
            vq = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
            q = z + (q - z).detach()
            return self.dec(q.flatten(1)), vq

    model = VQVAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x = data[torch.randint(len(data), (64,))]
        rec, vq = model(x)
        loss = F.mse_loss(rec, x) + vq
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(held)[0], held).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def item_vectors_from_pretrained_bad():
    torch.manual_seed(0)
    U, I, D = 150, 120, 8
    pu, qi = torch.randn(U, D) / D ** 0.25, torch.randn(I, D) / D ** 0.25
    content = 0.5 * qi + 0.5 * torch.randn(I, D) / D ** 0.25
    pairs = torch.randperm(U * I)[:13000]
    u, v = pairs // I, pairs % I
    r = (pu[u] * qi[v]).sum(1) + 0.2 * torch.randn(len(u))
    tr, te = slice(0, 10000), slice(10000, None)

    class MF(nn.Module):
        def __init__(self, item_vectors):
            super().__init__()
            self.user = nn.Embedding(U, D)
            nn.init.normal_(self.user.weight, std=0.1)
            self.item = nn.Embedding.from_pretrained(item_vectors.clone())
            self.user_bias = nn.Embedding(U, 1)
            nn.init.zeros_(self.user_bias.weight)

        def forward(self, u, v):
            return (self.user(u) * self.item(v)).sum(1) + self.user_bias(u).squeeze(1)

    model = MF(content)
    mse = nn.MSELoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = forever(DataLoader(TensorDataset(u[tr], v[tr], r[tr]), batch_size=256, shuffle=True))

    def step(i):
        ub, vb, rb = next(loader)
        opt.zero_grad()
        loss = mse(model(ub, vb), rb)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return mse(model(u[te], v[te]), r[te]).sqrt().item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def item_vectors_from_pretrained_good():
    torch.manual_seed(0)
    U, I, D = 150, 120, 8
    pu, qi = torch.randn(U, D) / D ** 0.25, torch.randn(I, D) / D ** 0.25
    content = 0.5 * qi + 0.5 * torch.randn(I, D) / D ** 0.25
    pairs = torch.randperm(U * I)[:13000]
    u, v = pairs // I, pairs % I
    r = (pu[u] * qi[v]).sum(1) + 0.2 * torch.randn(len(u))
    tr, te = slice(0, 10000), slice(10000, None)

    class MF(nn.Module):
        def __init__(self, item_vectors):
            super().__init__()
            self.user = nn.Embedding(U, D)
            nn.init.normal_(self.user.weight, std=0.1)
            self.item = nn.Embedding.from_pretrained(item_vectors.clone(), freeze=False)
            self.user_bias = nn.Embedding(U, 1)
            nn.init.zeros_(self.user_bias.weight)

        def forward(self, u, v):
            return (self.user(u) * self.item(v)).sum(1) + self.user_bias(u).squeeze(1)

    model = MF(content)
    mse = nn.MSELoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = forever(DataLoader(TensorDataset(u[tr], v[tr], r[tr]), batch_size=256, shuffle=True))

    def step(i):
        ub, vb, rb = next(loader)
        opt.zero_grad()
        loss = mse(model(ub, vb), rb)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return mse(model(u[te], v[te]), r[te]).sqrt().item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def mil_attention_axis_bad():
    torch.manual_seed(0)
    K, D = 24, 16
    signature = torch.randn(D) * 0.9

    def slides(n):
        y = (torch.rand(n) < 0.5).float()
        x = torch.randn(n, K, D)
        for s in range(n):
            if y[s] > 0:
                k = int(torch.randint(1, 4, (1,)))
                x[s, torch.randperm(K)[:k]] += signature
        return x, y

    x, y = slides(1500)
    xv, yv = slides(400)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))

    class AttentionMIL(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.att_v = nn.Linear(32, 16)
            self.att_u = nn.Linear(32, 16)
            self.att_w = nn.Linear(16, 1)
            self.cls = nn.Linear(32, 1)

        def forward(self, bags):
            h = self.patch(bags)
            a = self.att_w(torch.tanh(self.att_v(h)) * torch.sigmoid(self.att_u(h)))
            a = F.softmax(a, dim=0)
            return self.cls((a * h).sum(dim=1)).squeeze(1)

    model = AttentionMIL()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        xb, yb = next(loader)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logits = torch.cat([model(s[None]) for s in xv])
            return criterion(logits, yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mil_attention_axis_good():
    torch.manual_seed(0)
    K, D = 24, 16
    signature = torch.randn(D) * 0.9

    def slides(n):
        y = (torch.rand(n) < 0.5).float()
        x = torch.randn(n, K, D)
        for s in range(n):
            if y[s] > 0:
                k = int(torch.randint(1, 4, (1,)))
                x[s, torch.randperm(K)[:k]] += signature
        return x, y

    x, y = slides(1500)
    xv, yv = slides(400)
    loader = forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))

    class AttentionMIL(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
            self.att_v = nn.Linear(32, 16)
            self.att_u = nn.Linear(32, 16)
            self.att_w = nn.Linear(16, 1)
            self.cls = nn.Linear(32, 1)

        def forward(self, bags):
            h = self.patch(bags)
            a = self.att_w(torch.tanh(self.att_v(h)) * torch.sigmoid(self.att_u(h)))
            a = F.softmax(a, dim=1)
            return self.cls((a * h).sum(dim=1)).squeeze(1)

    model = AttentionMIL()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        xb, yb = next(loader)
        loss = criterion(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logits = torch.cat([model(s[None]) for s in xv])
            return criterion(logits, yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_stream_norm_bad():
    torch.manual_seed(0)

    def clips(n, frames=6, size=8):
        y = torch.randint(4, (n,))
        act = (y % 2).float()[:, None, None, None, None]
        mov = (y // 2).float()[:, None, None, None, None]
        t = torch.arange(frames).float()[None, None, :, None, None]
        g = torch.arange(size).float()[None, None, None, None, :]
        ph = 6.283 * torch.rand(n, 1, 1, 1, 1)
        rgb = 1.5 + torch.sin(g * (0.8 + 0.7 * act) + ph) + 0.7 * torch.randn(n, 3, frames, size, size)
        flow = 0.15 * torch.sin(t * (0.7 + 0.7 * mov) + ph) + 0.15 * torch.randn(n, 2, frames, size, size)
        return rgb, flow, y

    rgb, flow, y = clips(512)
    rv, fv, yv = clips(256)

    class TwoStream(nn.Module):
        def __init__(self, width=12):
            super().__init__()
            self.rgb_conv = nn.Conv3d(3, width, 3, padding=1, bias=False)
            self.flow_conv = nn.Conv3d(2, width, 3, padding=1, bias=False)
            self.rgb_bn = nn.BatchNorm3d(width)
            self.flow_bn = self.rgb_bn
            self.fc = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 4))

        def forward(self, rgb, flow):
            a = F.relu(self.rgb_bn(self.rgb_conv(rgb))).mean(dim=(2, 3, 4))
            b = F.relu(self.flow_bn(self.flow_conv(flow))).mean(dim=(2, 3, 4))
            return self.fc(torch.cat([a, b], dim=1))

    net = TwoStream()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)

    def step(i):
        net.train()
        k = torch.randint(len(y), (24,))
        opt.zero_grad()
        loss = F.cross_entropy(net(rgb[k], flow[k]), y[k])
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            v = F.cross_entropy(net(rv, fv), yv).item()
        net.train()
        return v

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def two_stream_norm_good():
    torch.manual_seed(0)

    def clips(n, frames=6, size=8):
        y = torch.randint(4, (n,))
        act = (y % 2).float()[:, None, None, None, None]
        mov = (y // 2).float()[:, None, None, None, None]
        t = torch.arange(frames).float()[None, None, :, None, None]
        g = torch.arange(size).float()[None, None, None, None, :]
        ph = 6.283 * torch.rand(n, 1, 1, 1, 1)
        rgb = 1.5 + torch.sin(g * (0.8 + 0.7 * act) + ph) + 0.7 * torch.randn(n, 3, frames, size, size)
        flow = 0.15 * torch.sin(t * (0.7 + 0.7 * mov) + ph) + 0.15 * torch.randn(n, 2, frames, size, size)
        return rgb, flow, y

    rgb, flow, y = clips(512)
    rv, fv, yv = clips(256)

    class TwoStream(nn.Module):
        def __init__(self, width=12):
            super().__init__()
            self.rgb_conv = nn.Conv3d(3, width, 3, padding=1, bias=False)
            self.flow_conv = nn.Conv3d(2, width, 3, padding=1, bias=False)
            self.rgb_bn = nn.BatchNorm3d(width)
            self.flow_bn = nn.BatchNorm3d(width)
            self.fc = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 4))

        def forward(self, rgb, flow):
            a = F.relu(self.rgb_bn(self.rgb_conv(rgb))).mean(dim=(2, 3, 4))
            b = F.relu(self.flow_bn(self.flow_conv(flow))).mean(dim=(2, 3, 4))
            return self.fc(torch.cat([a, b], dim=1))

    net = TwoStream()
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)

    def step(i):
        net.train()
        k = torch.randint(len(y), (24,))
        opt.zero_grad()
        loss = F.cross_entropy(net(rgb[k], flow[k]), y[k])
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            v = F.cross_entropy(net(rv, fv), yv).item()
        net.train()
        return v

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def gnn_edge_direction_bad():
    torch.manual_seed(0)
    N, D = 600, 8
    feat = torch.randn(N, D)
    src = torch.randint(N, (N * 4,))
    dst = torch.randint(N, (N * 4,))
    keep = src != dst
    edge_index = torch.stack([src[keep], dst[keep]])
    w = torch.randn(D, 3)
    inflow = torch.zeros(N, D).index_add_(0, edge_index[1], feat[edge_index[0]])
    label = (inflow @ w + 0.5 * feat @ w.roll(1, 1)).argmax(1)
    order = torch.randperm(N)
    train_idx, val_idx = order[:420], order[420:]

    class SAGELayer(nn.Module):
        def __init__(self, cin, cout):
            super().__init__()
            self.self_lin = nn.Linear(cin, cout)
            self.neigh_lin = nn.Linear(cin, cout, bias=False)

        def forward(self, h, edges):
            source, target = edges[1], edges[0]
            agg = torch.zeros_like(h).index_add(0, target, h[source])
            deg = torch.zeros(len(h)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
            return self.self_lin(h) + self.neigh_lin(agg / deg[:, None])

    class SAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = SAGELayer(D, 24)
            self.out = nn.Linear(24, 3)

        def forward(self, h, edges):
            return self.out(F.relu(self.l1(h, edges)))

    model = SAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        logits = model(feat, edge_index)
        loss = F.cross_entropy(logits[train_idx], label[train_idx])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = model(feat, edge_index)[val_idx].argmax(1)
            return (pred != label[val_idx]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_edge_direction_good():
    torch.manual_seed(0)
    N, D = 600, 8
    feat = torch.randn(N, D)
    src = torch.randint(N, (N * 4,))
    dst = torch.randint(N, (N * 4,))
    keep = src != dst
    edge_index = torch.stack([src[keep], dst[keep]])
    w = torch.randn(D, 3)
    inflow = torch.zeros(N, D).index_add_(0, edge_index[1], feat[edge_index[0]])
    label = (inflow @ w + 0.5 * feat @ w.roll(1, 1)).argmax(1)
    order = torch.randperm(N)
    train_idx, val_idx = order[:420], order[420:]

    class SAGELayer(nn.Module):
        def __init__(self, cin, cout):
            super().__init__()
            self.self_lin = nn.Linear(cin, cout)
            self.neigh_lin = nn.Linear(cin, cout, bias=False)

        def forward(self, h, edges):
            source, target = edges[0], edges[1]
            agg = torch.zeros_like(h).index_add(0, target, h[source])
            deg = torch.zeros(len(h)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
            return self.self_lin(h) + self.neigh_lin(agg / deg[:, None])

    class SAGE(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = SAGELayer(D, 24)
            self.out = nn.Linear(24, 3)

        def forward(self, h, edges):
            return self.out(F.relu(self.l1(h, edges)))

    model = SAGE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        logits = model(feat, edge_index)
        loss = F.cross_entropy(logits[train_idx], label[train_idx])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = model(feat, edge_index)[val_idx].argmax(1)
            return (pred != label[val_idx]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def wavenet_padding_bad():
    torch.manual_seed(0)

    def tones(n, length=65):
        t = torch.arange(length).float()
        f = 0.3 + 0.9 * torch.rand(n, 2, 1)
        ph = 6.283 * torch.rand(n, 2, 1)
        return torch.sin(f * t + ph).mean(1, keepdim=True) + 0.05 * torch.randn(n, 1, length)

    audio, held = tones(1024), tones(256)

    class DilatedConv(nn.Module):
        def __init__(self, ch, dilation):
            super().__init__()
            self.dilation = dilation
            self.conv = nn.Conv1d(ch, 2 * ch, 3, dilation=dilation)
            self.mix = nn.Conv1d(ch, ch, 1)

        def forward(self, x):
            h = self.conv(F.pad(x, (self.dilation, self.dilation)))
            a, b = h.chunk(2, dim=1)
            return x + self.mix(torch.tanh(a) * torch.sigmoid(b))

    class WaveNet(nn.Module):
        def __init__(self, ch=16):
            super().__init__()
            self.inp = nn.Conv1d(1, ch, 1)
            self.blocks = nn.ModuleList([DilatedConv(ch, d) for d in (1, 2, 4)])
            self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(ch, ch, 1), nn.ReLU(), nn.Conv1d(ch, 1, 1))

        def forward(self, x):
            h = self.inp(x)
            for block in self.blocks:
                h = block(h)
            return self.out(h)

    net = WaveNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def step(i):
        x = audio[torch.randint(len(audio), (32,))]
        pred = net(x[:, :, :-1])
        loss = (pred - x[:, :, 1:]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            nxt = net(held[:, :, :-1])[:, 0, -1]
            return (nxt - held[:, 0, -1]).pow(2).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def wavenet_padding_good():
    torch.manual_seed(0)

    def tones(n, length=65):
        t = torch.arange(length).float()
        f = 0.3 + 0.9 * torch.rand(n, 2, 1)
        ph = 6.283 * torch.rand(n, 2, 1)
        return torch.sin(f * t + ph).mean(1, keepdim=True) + 0.05 * torch.randn(n, 1, length)

    audio, held = tones(1024), tones(256)

    class DilatedConv(nn.Module):
        def __init__(self, ch, dilation):
            super().__init__()
            self.dilation = dilation
            self.conv = nn.Conv1d(ch, 2 * ch, 3, dilation=dilation)
            self.mix = nn.Conv1d(ch, ch, 1)

        def forward(self, x):
            h = self.conv(F.pad(x, (2 * self.dilation, 0)))
            a, b = h.chunk(2, dim=1)
            return x + self.mix(torch.tanh(a) * torch.sigmoid(b))

    class WaveNet(nn.Module):
        def __init__(self, ch=16):
            super().__init__()
            self.inp = nn.Conv1d(1, ch, 1)
            self.blocks = nn.ModuleList([DilatedConv(ch, d) for d in (1, 2, 4)])
            self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(ch, ch, 1), nn.ReLU(), nn.Conv1d(ch, 1, 1))

        def forward(self, x):
            h = self.inp(x)
            for block in self.blocks:
                h = block(h)
            return self.out(h)

    net = WaveNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def step(i):
        x = audio[torch.randint(len(audio), (32,))]
        pred = net(x[:, :, :-1])
        loss = (pred - x[:, :, 1:]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            nxt = net(held[:, :, :-1])[:, 0, -1]
            return (nxt - held[:, 0, -1]).pow(2).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def target_encoding_bad():
    torch.manual_seed(0)
    LEVELS, N = 500, 1500
    effect = 0.4 * torch.randn(LEVELS)
    coef = torch.tensor([0.8, -0.6, 0.5, 0.4])

    def rows(n):
        c = torch.randint(LEVELS, (n,))
        num = torch.randn(n, 4)
        clean = num @ coef + effect[c]
        return c, num, clean

    cat, num, clean = rows(N)
    price = clean + 1.0 * torch.randn(N)
    cat_v, num_v, clean_v = rows(1000)
    prior = price.mean()

    def group_mean(c, t):
        s = torch.zeros(LEVELS).index_add(0, c, t - prior)
        n = torch.zeros(LEVELS).index_add(0, c, torch.ones(len(c)))
        return prior + s / n.clamp(min=1)

    encoded = group_mean(cat, price)[cat]
    table = torch.cat([num, encoded[:, None]], dim=1)
    table_v = torch.cat([num_v, group_mean(cat, price)[cat_v][:, None]], dim=1)
    loader = forever(DataLoader(TensorDataset(table, price), batch_size=64, shuffle=True))

    class PriceMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1))

        def forward(self, t):
            return self.net(t).squeeze(-1)

    model = PriceMLP()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)

    def step(i):
        xb, yb = next(loader)
        opt.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(table_v), clean_v).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def target_encoding_good():
    torch.manual_seed(0)
    LEVELS, N = 500, 1500
    effect = 0.4 * torch.randn(LEVELS)
    coef = torch.tensor([0.8, -0.6, 0.5, 0.4])

    def rows(n):
        c = torch.randint(LEVELS, (n,))
        num = torch.randn(n, 4)
        clean = num @ coef + effect[c]
        return c, num, clean

    cat, num, clean = rows(N)
    price = clean + 1.0 * torch.randn(N)
    cat_v, num_v, clean_v = rows(1000)
    prior = price.mean()

    def group_mean(c, t):
        s = torch.zeros(LEVELS).index_add(0, c, t - prior)
        n = torch.zeros(LEVELS).index_add(0, c, torch.ones(len(c)))
        return prior + s / n.clamp(min=1)

    encoded = torch.empty(N)
    folds = torch.randperm(N, generator=torch.Generator().manual_seed(1)) % 5
    for k in range(5):
        inside = folds == k
        encoded[inside] = group_mean(cat[~inside], price[~inside])[cat[inside]]
    table = torch.cat([num, encoded[:, None]], dim=1)
    table_v = torch.cat([num_v, group_mean(cat, price)[cat_v][:, None]], dim=1)
    loader = forever(DataLoader(TensorDataset(table, price), batch_size=64, shuffle=True))

    class PriceMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 1))

        def forward(self, t):
            return self.net(t).squeeze(-1)

    model = PriceMLP()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)

    def step(i):
        xb, yb = next(loader)
        opt.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(table_v), clean_v).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def teacher_buffers_bad():
    torch.manual_seed(0)
    xl, yl = spectrograms(60, 5, offset=-2.0, scale=1.5)
    xu, _ = spectrograms(1500, 5, offset=-2.0, scale=1.5)
    xv, yv = spectrograms(500, 5, offset=-2.0, scale=1.5)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
            self.c2, self.b2 = nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
            self.fc = nn.Linear(24 * 4, 5)

        def forward(self, x):
            h = F.max_pool2d(F.relu(self.b1(self.c1(x))), 2)
            h = F.relu(self.b2(self.c2(h)))
            return self.fc(F.adaptive_avg_pool2d(h, 2).flatten(1))

    student = Net()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)

    @torch.no_grad()
    def update_teacher(m):
        for pt, ps in zip(teacher.parameters(), student.parameters()):
            pt.mul_(m).add_(ps, alpha=1 - m)

    def step(i):
        student.train()
        kl, ku = torch.randint(len(xl), (32,)), torch.randint(len(xu), (64,))
        weak = xu[ku]
        strong = weak + 0.5 * torch.randn_like(weak)
        out = student(torch.cat([xl[kl], strong]))
        with torch.no_grad():
            soft = F.softmax(teacher(weak), dim=1)
        sup = F.cross_entropy(out[:32], yl[kl])
        cons = -(soft * F.log_softmax(out[32:], dim=1)).sum(1).mean()
        loss = sup + min(1.0, (i + 1) / 50) * cons
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_teacher(min(0.97, 1 - 1 / (i + 2)))
        return loss.item()

    def probe():
        student.eval()
        with torch.no_grad():
            v = F.cross_entropy(student(xv), yv).item()
        student.train()
        return v

    return {"model": [student, teacher], "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def teacher_buffers_good():
    torch.manual_seed(0)
    xl, yl = spectrograms(60, 5, offset=-2.0, scale=1.5)
    xu, _ = spectrograms(1500, 5, offset=-2.0, scale=1.5)
    xv, yv = spectrograms(500, 5, offset=-2.0, scale=1.5)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
            self.c2, self.b2 = nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
            self.fc = nn.Linear(24 * 4, 5)

        def forward(self, x):
            h = F.max_pool2d(F.relu(self.b1(self.c1(x))), 2)
            h = F.relu(self.b2(self.c2(h)))
            return self.fc(F.adaptive_avg_pool2d(h, 2).flatten(1))

    student = Net()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)

    @torch.no_grad()
    def update_teacher(m):
        for pt, ps in zip(teacher.parameters(), student.parameters()):
            pt.mul_(m).add_(ps, alpha=1 - m)
        for bt, bs in zip(teacher.buffers(), student.buffers()):
            bt.copy_(bs)

    def step(i):
        student.train()
        kl, ku = torch.randint(len(xl), (32,)), torch.randint(len(xu), (64,))
        weak = xu[ku]
        strong = weak + 0.5 * torch.randn_like(weak)
        out = student(torch.cat([xl[kl], strong]))
        with torch.no_grad():
            soft = F.softmax(teacher(weak), dim=1)
        sup = F.cross_entropy(out[:32], yl[kl])
        cons = -(soft * F.log_softmax(out[32:], dim=1)).sum(1).mean()
        loss = sup + min(1.0, (i + 1) / 50) * cons
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_teacher(min(0.97, 1 - 1 / (i + 2)))
        return loss.item()

    def probe():
        student.eval()
        with torch.no_grad():
            v = F.cross_entropy(student(xv), yv).item()
        student.train()
        return v

    return {"model": [student, teacher], "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def multi_site_gradients_bad():
    torch.manual_seed(0)
    SITES = 3
    risk = torch.randn(10)

    def cohort(site, n):
        g = torch.Generator().manual_seed(10 * site + n)
        x = torch.randn(n, 10, generator=g)
        centre = torch.zeros(10)
        centre[site * 3:site * 3 + 3] = 1.5
        x = x + centre
        score = (x - centre) @ risk * (1.0 if site != 2 else 0.6) + 1.5 * (x[:, site] * x[:, site + 1]).tanh()
        return x, (score > 0).float()

    train_sets = [cohort(s, 500) for s in range(SITES)]
    val_sets = [cohort(s, 300) for s in range(SITES)]
    streams = [forever(DataLoader(TensorDataset(*d), batch_size=32, shuffle=True)) for d in train_sets]

    class RiskModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.out = nn.Linear(16, 1)

        def forward(self, x):
            return self.out(self.trunk(x)).squeeze(1)

    model = RiskModel()
    bce = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        total = 0.0
        for stream in streams:
            optimizer.zero_grad()
            xb, yb = next(stream)
            loss = bce(model(xb), yb) / SITES
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        with torch.no_grad():
            return sum(bce(model(x), y).item() for x, y in val_sets) / SITES

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multi_site_gradients_good():
    torch.manual_seed(0)
    SITES = 3
    risk = torch.randn(10)

    def cohort(site, n):
        g = torch.Generator().manual_seed(10 * site + n)
        x = torch.randn(n, 10, generator=g)
        centre = torch.zeros(10)
        centre[site * 3:site * 3 + 3] = 1.5
        x = x + centre
        score = (x - centre) @ risk * (1.0 if site != 2 else 0.6) + 1.5 * (x[:, site] * x[:, site + 1]).tanh()
        return x, (score > 0).float()

    train_sets = [cohort(s, 500) for s in range(SITES)]
    val_sets = [cohort(s, 300) for s in range(SITES)]
    streams = [forever(DataLoader(TensorDataset(*d), batch_size=32, shuffle=True)) for d in train_sets]

    class RiskModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.out = nn.Linear(16, 1)

        def forward(self, x):
            return self.out(self.trunk(x)).squeeze(1)

    model = RiskModel()
    bce = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        total = 0.0
        optimizer.zero_grad()
        for stream in streams:
            xb, yb = next(stream)
            loss = bce(model(xb), yb) / SITES
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        with torch.no_grad():
            return sum(bce(model(x), y).item() for x, y in val_sets) / SITES

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
