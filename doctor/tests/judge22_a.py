"""Small PyTorch training programs outside language modelling; each has a faulty and a mended version."""
import copy
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


# ---------------------------------------------------------------- image classification
def _cls_double_softmax(bug):
    torch.manual_seed(0)

    class SmallCNN(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
            self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
            self.pool = nn.MaxPool2d(2)
            self.fc1 = nn.Linear(24 * 4 * 4, 48)
            self.fc2 = nn.Linear(48, num_classes)

        def forward(self, x):
            x = self.pool(F.relu(self.conv1(x)))
            x = self.pool(F.relu(self.conv2(x)))
            x = F.relu(self.fc1(x.flatten(1)))
            x = self.fc2(x)
            if bug:
                x = F.softmax(x, dim=1)
            return x

    protos = F.interpolate(torch.randn(10, 1, 6, 6), size=16, mode="bilinear")

    def draw(n):
        y = torch.randint(0, 10, (n,))
        return protos[y] + 1.3 * torch.randn(n, 1, 16, 16), y

    train_x, train_y = draw(1500)
    val_x, val_y = draw(400)
    model = SmallCNN(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        idx = torch.randint(0, len(train_x), (32,))
        optimizer.zero_grad()
        loss = criterion(model(train_x[idx]), train_y[idx])
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(val_x).argmax(1) != val_y).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- image folders
def _cls_sorted_loader(bug):
    torch.manual_seed(0)

    class FolderLike(Dataset):
        """Reads class folders one after the other, as ImageFolder does."""

        def __init__(self, protos, per_class, noise):
            self.samples = []
            for c in range(len(protos)):
                for _ in range(per_class):
                    self.samples.append((protos[c] + noise * torch.randn_like(protos[c]), c))

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, k):
            return self.samples[k]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.classifier = nn.Linear(16 * 9, 8)

        def forward(self, x):
            return self.classifier(self.features(x).flatten(1))

    protos = 0.8 * torch.randn(8, 3, 12, 12)
    train_set = FolderLike(protos, 64, 1.2)
    val_set = FolderLike(protos, 40, 1.2)
    if bug:
        loader = DataLoader(train_set, batch_size=32)
    else:
        loader = DataLoader(train_set, batch_size=32, shuffle=True)
    val_x = torch.stack([s[0] for s in val_set.samples])
    val_y = torch.tensor([s[1] for s in val_set.samples])
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def batches():
        while True:
            yield from loader

    stream = batches()

    def step(i):
        x, y = next(stream)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(val_x).argmax(1) != val_y).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- vision transformer
def _vit_batch_first(bug):
    torch.manual_seed(0)

    class TinyViT(nn.Module):
        def __init__(self, image=16, patch=4, dim=32, depth=2, heads=4, classes=6):
            super().__init__()
            n = (image // patch) ** 2
            self.patch_embed = nn.Conv2d(1, dim, patch, stride=patch)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
            self.pos_embed = nn.Parameter(0.02 * torch.randn(1, n + 1, dim))
            if bug:
                block = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0)
            else:
                block = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, classes)

        def forward(self, x):
            x = self.patch_embed(x).flatten(2).transpose(1, 2)
            cls = self.cls_token.expand(x.size(0), -1, -1)
            x = torch.cat([cls, x], dim=1) + self.pos_embed
            x = self.encoder(x)
            return self.head(self.norm(x[:, 0]))

    protos = torch.randn(6, 1, 16, 16)

    def draw(n):
        y = torch.randint(0, 6, (n,))
        return protos[y] + 1.5 * torch.randn(n, 1, 16, 16), y

    train_x, train_y = draw(1200)
    val_x, val_y = draw(300)
    model = TinyViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def step(i):
        model.train()
        idx = torch.randint(0, len(train_x), (32,))
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            nll = F.cross_entropy(model(val_x), val_y).item()
        model.train()
        return nll

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- age estimation
def _age_broadcast(bug):
    torch.manual_seed(0)

    class AgeNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            )
            self.out = nn.Linear(64, 1)

        def forward(self, x):
            return self.out(self.body(x))

    def faces(n):
        age = 15 + 60 * torch.rand(n)
        wrinkle = torch.sin(torch.arange(16.0) * 2.2).view(1, 1, 16, 1) * ((age - 15) / 60).view(-1, 1, 1, 1)
        return wrinkle + 0.3 * torch.randn(n, 1, 16, 16), age

    train_x, train_age = faces(800)
    val_x, val_age = faces(300)
    mean, std = train_age.mean(), train_age.std()
    model = AgeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        idx = torch.randint(0, len(train_x), (32,))
        target = (train_age[idx] - mean) / std
        if bug:
            pred = model(train_x[idx])
        else:
            pred = model(train_x[idx]).squeeze(1)
        loss = ((pred - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            years = model(val_x).flatten() * std + mean
        model.train()
        return (years - val_age).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- cutout
def _aug_cutout_inplace(bug):
    torch.manual_seed(0)

    class CutoutSet(Dataset):
        def __init__(self, images, labels, size=6):
            self.images, self.labels, self.size = images, labels, size

        def __len__(self):
            return len(self.images)

        def __getitem__(self, k):
            if bug:
                img = self.images[k]
            else:
                img = self.images[k].clone()
            top = int(torch.randint(0, img.size(1) - self.size + 1, ()))
            left = int(torch.randint(0, img.size(2) - self.size + 1, ()))
            img[:, top:top + self.size, left:left + self.size] = 0.0
            return img, self.labels[k]

    protos = torch.randn(6, 3, 12, 12)

    def draw(n):
        y = torch.randint(0, 6, (n,))
        return 0.8 * protos[y] + 1.3 * torch.randn(n, 3, 12, 12), y

    train_x, train_y = draw(120)
    val_x, val_y = draw(300)
    loader = DataLoader(CutoutSet(train_x, train_y), batch_size=24, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(144, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    state = {"it": iter(loader)}

    def step(i):
        try:
            x, y = next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            x, y = next(state["it"])
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(val_x).argmax(1) != val_y).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- lesion segmentation
def _seg_flip_mask(bug):
    torch.manual_seed(0)

    class MiniUNet(nn.Module):
        def __init__(self, ch=10):
            super().__init__()
            self.down1 = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU())
            self.down2 = nn.Sequential(nn.Conv2d(ch, 2 * ch, 3, padding=1), nn.ReLU())
            self.up = nn.ConvTranspose2d(2 * ch, ch, 2, stride=2)
            self.fuse = nn.Sequential(nn.Conv2d(2 * ch, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, 1, 1))

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            return self.fuse(torch.cat([a, self.up(b)], dim=1))

    yy, xx = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")

    def draw(n):
        cy, cx = 3 + 14 * torch.rand(n, 1, 1), 3 + 14 * torch.rand(n, 1, 1)
        r = 2.5 + 2 * torch.rand(n, 1, 1)
        mask = ((yy - cy) ** 2 + (xx - cx) ** 2 < r ** 2).float().unsqueeze(1)
        return mask + 0.6 * torch.randn(n, 1, 20, 20), mask

    train_x, train_m = draw(400)
    val_x, val_m = draw(100)
    model = MiniUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def augment(img, mask):
        if torch.rand(()) < 0.5:
            img = torch.flip(img, dims=[-1])
            if not bug:
                mask = torch.flip(mask, dims=[-1])
        return img, mask

    def step(i):
        idx = torch.randint(0, len(train_x), (16,))
        pairs = [augment(train_x[k], train_m[k]) for k in idx]
        img, mask = torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
        loss = F.binary_cross_entropy_with_logits(model(img), mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            pred = (model(val_x) > 0).float()
        model.train()
        inter = (pred * val_m).sum()
        return (1 - inter / (pred + val_m - pred * val_m).sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- semantic segmentation
def _seg_view_logits(bug):
    torch.manual_seed(0)
    num_classes = 4

    class FCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
            )
            self.cls = nn.Conv2d(16, num_classes, 1)

        def forward(self, x):
            return self.cls(self.enc(x))

    palette = torch.randn(num_classes, 3)

    def scenes(n):
        coarse = torch.randint(0, num_classes, (n, 4, 4))
        label = coarse.repeat_interleave(4, 1).repeat_interleave(4, 2)
        image = palette[label].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 3, 16, 16)
        return image, label

    train_x, train_y = scenes(300)
    val_x, val_y = scenes(60)
    model = FCN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, len(train_x), (16,))
        out = model(train_x[idx])
        if bug:
            logits = out.reshape(-1, num_classes)
        else:
            logits = out.permute(0, 2, 3, 1).reshape(-1, num_classes)
        loss = criterion(logits, train_y[idx].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            wrong = (model(val_x).argmax(1) != val_y).float().mean().item()
        model.train()
        return wrong

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- single-object localisation
def _det_hflip_boxes(bug):
    torch.manual_seed(0)

    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            )
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, x):
            return self.head(self.conv(x)).sigmoid()

    size = 24

    def draw(n):
        wh = torch.randint(6, 14, (n, 2))
        xy = (torch.rand(n, 2) * (size - wh)).long()
        boxes = torch.cat([xy, xy + wh], dim=1)
        imgs = 0.2 * torch.randn(n, 1, size, size)
        for k, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
            imgs[k, 0, y1:y2, x1:x2] += 1.0
        return imgs, boxes.float() / size

    train_x, train_b = draw(500)
    val_x, val_b = draw(150)

    def random_hflip(img, box, p=0.5):
        flip = torch.rand(len(img)) < p
        img, box = img.clone(), box.clone()
        img[flip] = img[flip].flip(-1)
        if bug:
            box[flip, 0], box[flip, 2] = 1 - box[flip, 0], 1 - box[flip, 2]
        else:
            box[flip, 0], box[flip, 2] = 1 - box[flip, 2], 1 - box[flip, 0]
        return img, box

    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        idx = torch.randint(0, len(train_x), (24,))
        img, box = random_hflip(train_x[idx], train_b[idx])
        loss = F.smooth_l1_loss(model(img), box, beta=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            p = model(val_x)
        model.train()
        lt, rb = torch.maximum(p[:, :2], val_b[:, :2]), torch.minimum(p[:, 2:], val_b[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        area = (p[:, 2:] - p[:, :2]).clamp(min=0).prod(1) + (val_b[:, 2:] - val_b[:, :2]).prod(1)
        return (1 - inter / (area - inter)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- centre heatmap detection
def _det_heatmap_xy(bug):
    torch.manual_seed(0)

    class CenterHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(),
                nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
                nn.Conv2d(12, 1, 1),
            )
            nn.init.constant_(self.net[-1].bias, -2.2)

        def forward(self, x):
            return self.net(x).squeeze(1)

    S = 20
    grid = torch.arange(float(S))

    def draw(n):
        cx, cy = torch.randint(2, S - 2, (n,)), torch.randint(2, S - 2, (n,))
        dx2, dy2 = (grid[None] - cx[:, None]) ** 2, (grid[None] - cy[:, None]) ** 2
        blob = torch.exp(-(dy2[:, :, None] / 8 + dx2[:, None, :] / 3))
        return (1.5 * blob + 0.4 * torch.randn(n, S, S)).unsqueeze(1), torch.stack([cx, cy], dim=1)

    train_x, train_c = draw(400)
    val_x, val_c = draw(150)

    def gaussian_target(centers):
        hm = torch.zeros(len(centers), S, S)
        dx2 = (grid[None] - centers[:, 0:1]) ** 2
        dy2 = (grid[None] - centers[:, 1:2]) ** 2
        if bug:
            hm += torch.exp(-(dx2[:, :, None] + dy2[:, None, :]) / 2)
        else:
            hm += torch.exp(-(dy2[:, :, None] + dx2[:, None, :]) / 2)
        return hm

    model = CenterHead()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, len(train_x), (16,))
        loss = F.binary_cross_entropy_with_logits(model(train_x[idx]), gaussian_target(train_c[idx]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            peak = model(val_x).flatten(1).argmax(1)
        model.train()
        found = torch.stack([peak % S, peak // S], dim=1).float()
        return (found - val_c).norm(dim=1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- speech recognition with CTC
def _audio_ctc_blank(bug):
    torch.manual_seed(0)
    phones, blank, feat, T = 6, 6, 12, 32

    class AcousticModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(feat, 32, 5, padding=2)
            self.conv2 = nn.Conv1d(32, 32, 3, padding=1)
            self.proj = nn.Linear(32, phones + 1)

        def forward(self, x):
            h = F.relu(self.conv2(F.relu(self.conv(x))))
            return self.proj(h.permute(2, 0, 1)).log_softmax(-1)

    sound = 1.5 * torch.randn(phones, feat)

    def utterances(n):
        xs, ys, lens = torch.zeros(n, feat, T), torch.zeros(n, 5, dtype=torch.long), torch.zeros(n, dtype=torch.long)
        for k in range(n):
            lens[k] = int(torch.randint(3, 6, ()))
            t = 1
            for j in range(int(lens[k])):
                ys[k, j] = int(torch.randint(0, phones, ()))
                dur = int(torch.randint(2, 5, ()))
                xs[k, :, t:t + dur] = sound[ys[k, j]].unsqueeze(1)
                t += dur + int(torch.randint(1, 3, ()))
        return xs + 0.8 * torch.randn_like(xs), ys, lens

    train_x, train_y, train_l = utterances(400)
    val_x, val_y, val_l = utterances(80)
    model = AcousticModel()
    if bug:
        ctc = nn.CTCLoss(zero_infinity=True)
    else:
        ctc = nn.CTCLoss(blank=blank, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, len(train_x), (16,))
        log_probs = model(train_x[idx])
        loss = ctc(log_probs, train_y[idx], torch.full((16,), T, dtype=torch.long), train_l[idx])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    def edit_distance(a, b):
        row = list(range(len(b) + 1))
        for i, ca in enumerate(a, 1):
            prev, row[0] = row[0], i
            for j, cb in enumerate(b, 1):
                prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
        return row[-1]

    def probe():
        model.eval()
        with torch.no_grad():
            best = model(val_x).argmax(-1).T.tolist()
        model.train()
        errors = total = 0
        for path, y, n in zip(best, val_y.tolist(), val_l.tolist()):
            hyp = [p for p, _ in itertools.groupby(path) if p != blank]
            errors += edit_distance(hyp, y[:n])
            total += n
        return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- audio clip classification
def _audio_last_frame(bug):
    torch.manual_seed(0)
    T, bands, classes = 50, 8, 5

    class ClipGRU(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(bands, 24, batch_first=True)
            self.fc = nn.Linear(24, classes)

        def forward(self, x, lengths):
            out, _ = self.gru(x)
            if bug:
                last = out[:, -1]
            else:
                last = out[torch.arange(len(x)), lengths - 1]
            return self.fc(last)

    spectra = torch.randn(classes, bands)

    def clips(n):
        y = torch.randint(0, classes, (n,))
        lengths = torch.randint(6, T + 1, (n,))
        x = 0.5 * spectra[y].unsqueeze(1) + torch.randn(n, T, bands)
        x = x * (torch.arange(T)[None, :, None] < lengths[:, None, None])
        return x, lengths, y

    train = clips(600)
    val = clips(300)
    model = ClipGRU()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def step(i):
        idx = torch.randint(0, 600, (24,))
        x, lengths, y = (t[idx] for t in train)
        loss = F.cross_entropy(model(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(val[0], val[1]).argmax(1) != val[2]).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- keyword spotting
def _audio_lambda_lr(bug):
    torch.manual_seed(0)
    base_lr, warmup, total = 0.05, 5, 400

    class KeywordNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(10, 24, 5, padding=2), nn.BatchNorm1d(24), nn.ReLU(), nn.MaxPool1d(2),
                nn.Conv1d(24, 24, 5, padding=2), nn.BatchNorm1d(24), nn.ReLU(),
            )
            self.fc = nn.Linear(24, 8)

        def forward(self, mfcc):
            return self.fc(self.conv(mfcc).mean(-1))

    words = F.interpolate(torch.randn(8, 10, 7), size=28, mode="linear")

    def draw(n):
        y = torch.randint(0, 8, (n,))
        return words[y] + 2.2 * torch.randn(n, 10, 28), y

    train_x, train_y = draw(1000)
    val_x, val_y = draw(300)

    def schedule(s):
        factor = (s + 1) / warmup if s < warmup else 0.5 * (1 + math.cos(math.pi * min(s / total, 1.0)))
        if bug:
            return base_lr * factor
        return factor

    model = KeywordNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=base_lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def step(i):
        model.train()
        idx = torch.randint(0, len(train_x), (32,))
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(val_x).argmax(1) != val_y).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- SimCLR
def _simclr_batch_aug(bug):
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 32))
            self.projector = nn.Sequential(nn.ReLU(), nn.Linear(32, 16))

        def forward(self, x):
            return F.normalize(self.projector(self.backbone(x)), dim=1)

    mix = torch.randn(12, 40) / 3

    def instances(n):
        return torch.randn(n, 12) @ mix

    nuisance = torch.randn(6, 40)

    def augment(x):
        if bug:
            strength = torch.randn(6)
        else:
            strength = torch.randn(len(x), 6)
        return x + 0.8 * strength @ nuisance + 0.3 * torch.randn_like(x)

    train_x = instances(1000)
    val = instances(200)
    view_a, view_b = (val + 0.8 * torch.randn(200, 6) @ nuisance + 0.3 * torch.randn(200, 40) for _ in range(2))

    def nt_xent(z1, z2, tau=0.1):
        n = len(z1)
        z = torch.cat([z1, z2])
        sim = z @ z.T / tau
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        targets = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(sim, targets)

    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x = train_x[torch.randint(0, len(train_x), (32,))]
        loss = nt_xent(model(augment(x)), model(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            hit = (model(view_a) @ model(view_b).T).argmax(1) == torch.arange(200)
        model.train()
        return 1 - hit.float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- SimSiam
def _simsiam_stopgrad(bug):
    torch.manual_seed(0)

    class SimSiam(nn.Module):
        def __init__(self, d_in=48, dim=32):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d_in, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, dim))
            self.predictor = nn.Sequential(nn.Linear(dim, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            if bug:
                return p1, p2, z1, z2
            return p1, p2, z1.detach(), z2.detach()

    centers = 0.5 * torch.randn(8, 48)

    def draw(n):
        y = torch.randint(0, 8, (n,))
        return centers[y] + 0.9 * torch.randn(n, 48), y

    train_x, _ = draw(1000)
    bank_x, bank_y = draw(300)
    val_x, val_y = draw(300)

    def augment(x):
        return x * (torch.rand_like(x) > 0.3) + 0.4 * torch.randn_like(x)

    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        x = train_x[torch.randint(0, len(train_x), (64,))]
        p1, p2, z1, z2 = model(augment(x), augment(x))
        loss = -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            bank, query = (F.normalize(model.encoder(t), dim=1) for t in (bank_x, val_x))
            near = (query @ bank.T).topk(5).indices
        model.train()
        votes = F.one_hot(bank_y[near], 8).sum(1).argmax(1)
        return (votes != val_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- GAN
def _energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def _gan_detached_fake(bug):
    torch.manual_seed(0)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))

        def forward(self, z):
            return self.net(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2),
                                     nn.Linear(48, 1))

        def forward(self, x):
            return self.net(x)

    def sample_real(n):
        t = 2 * math.pi * torch.rand(n)
        return torch.stack([2 + t.cos(), 1 + 0.5 * t.sin()], 1) + 0.05 * torch.randn(n, 2)

    G, D = Generator(), Discriminator()
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    val_real, val_z = sample_real(500), torch.randn(500, 6)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

    def step(i):
        z = torch.randn(64, 6)
        if bug:
            fake = G(z).detach()
        else:
            fake = G(z)
        opt_d.zero_grad()
        d_loss = bce(D(sample_real(64)), ones) + bce(D(fake.detach()), zeros)
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = bce(D(fake), ones)
        g_loss.backward()
        opt_g.step()

    def probe():
        with torch.no_grad():
            return _energy_distance(G(val_z), val_real)

    return {"model": [G, D], "optimizer": [opt_g, opt_d], "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- VAE
def _vae_kl_scale(bug):
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, d=64, h=64, z=6):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU())
            self.mu, self.logvar = nn.Linear(h, z), nn.Linear(h, z)
            self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
            return self.dec(z), mu, logvar

    basis = torch.randn(4, 64) * 0.6

    def images(n):
        return torch.tanh(torch.randn(n, 4) @ basis) + 0.1 * torch.randn(n, 64)

    train_x, val_x = images(1000), images(200)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x = train_x[torch.randint(0, len(train_x), (32,))]
        recon, mu, logvar = model(x)
        if bug:
            rec = F.mse_loss(recon, x)
        else:
            rec = F.mse_loss(recon, x, reduction="sum") / len(x)
        kl = -0.5 * torch.sum(1 + logvar - mu ** 2 - logvar.exp()) / len(x)
        loss = rec + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model.dec(model.mu(model.enc(val_x))), val_x).item()
        model.train()
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- DDPM
def _ddpm_broadcast(bug):
    torch.manual_seed(0)
    steps_T, side = 100, 16
    betas = torch.linspace(1e-4, 0.06, steps_T)
    alpha_bar = torch.cumprod(1 - betas, dim=0)

    class EpsNet(nn.Module):
        def __init__(self, ch=16):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, ch))
            self.inp = nn.Conv2d(1, ch, 3, padding=1)
            self.mid = nn.Conv2d(ch, ch, 3, padding=1)
            self.mid2 = nn.Conv2d(ch, ch, 3, padding=2, dilation=2)
            self.out = nn.Conv2d(ch, 1, 3, padding=1)

        def forward(self, x, t):
            freq = torch.exp(-torch.arange(8) * math.log(1000.0) / 8)
            arg = t[:, None].float() * freq
            emb = self.time(torch.cat([arg.sin(), arg.cos()], 1))
            h = F.silu(self.inp(x) + emb[:, :, None, None])
            h = h + F.silu(self.mid(h))
            h = h + F.silu(self.mid2(h))
            return self.out(h)

    def images(n):
        low = torch.randn(n, 1, 4, 4).sign()
        return low.repeat_interleave(4, 2).repeat_interleave(4, 3) * 0.9

    train_x = images(500)
    val_x, val_t, val_eps = images(128), torch.randint(0, steps_T, (128,)), torch.randn(128, 1, side, side)
    val_ab = alpha_bar[val_t].view(-1, 1, 1, 1)
    val_noisy = val_ab.sqrt() * val_x + (1 - val_ab).sqrt() * val_eps
    model = EpsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def q_sample(x0, t, eps):
        ab = alpha_bar[t]
        if not bug:
            ab = ab.view(-1, 1, 1, 1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * eps

    def step(i):
        x0 = train_x[torch.randint(0, len(train_x), (16,))]
        t = torch.randint(0, steps_T, (16,))
        eps = torch.randn_like(x0)
        loss = F.mse_loss(model(q_sample(x0, t, eps), t), eps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(val_noisy, val_t), val_eps).item()
        model.train()
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- siamese verification
def _siamese_label(bug):
    torch.manual_seed(0)

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(144, 16),
            )

        def forward(self, a, b):
            return self.trunk(a), self.trunk(b)

    class ContrastiveLoss(nn.Module):
        """y = 1 for a pair of the same signer, 0 otherwise."""

        def __init__(self, margin=1.5):
            super().__init__()
            self.margin = margin

        def forward(self, a, b, y):
            d = F.pairwise_distance(a, b)
            if bug:
                return ((1 - y) * d ** 2 + y * F.relu(self.margin - d) ** 2).mean()
            return (y * d ** 2 + (1 - y) * F.relu(self.margin - d) ** 2).mean()

    signers = torch.randn(20, 1, 12, 12)

    def pairs(n):
        a = torch.randint(0, 20, (n,))
        same = torch.rand(n) < 0.5
        b = torch.where(same, a, (a + torch.randint(1, 20, (n,))) % 20)
        return (signers[a] + torch.randn(n, 1, 12, 12), signers[b] + torch.randn(n, 1, 12, 12), same.float())

    val_a, val_b, val_same = pairs(400)
    model, criterion = Siamese(), ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        a, b, y = pairs(32)
        loss = criterion(*model(a, b), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            d = F.pairwise_distance(*model(val_a, val_b))
        model.train()
        same, diff = d[val_same == 1], d[val_same == 0]
        return (same[:, None] >= diff[None]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- distillation
def _distill_kldiv(bug):
    torch.manual_seed(0)

    class ConvNet(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.f = nn.Sequential(
                nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            )
            self.fc = nn.Linear(2 * width * 9, 8)

        def forward(self, x):
            return self.fc(self.f(x).flatten(1))

    protos = torch.randn(8, 1, 12, 12)

    def draw(n):
        y = torch.randint(0, 8, (n,))
        return protos[y] + 1.6 * torch.randn(n, 1, 12, 12), y

    train_x, train_y = draw(800)
    val_x, val_y = draw(300)

    teacher = ConvNet(16)
    opt_t = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(80):
        x, y = draw(64)
        loss = F.cross_entropy(teacher(x), y)
        opt_t.zero_grad()
        loss.backward()
        opt_t.step()
    teacher.eval().requires_grad_(False)

    student = ConvNet(6)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    kl_div = nn.KLDivLoss(reduction="batchmean")
    temp = 2.0

    def step(i):
        student.train()
        x = train_x[torch.randint(0, len(train_x), (32,))]
        with torch.no_grad():
            soft = F.softmax(teacher(x) / temp, dim=1)
        if bug:
            pred = F.softmax(student(x) / temp, dim=1)
        else:
            pred = F.log_softmax(student(x) / temp, dim=1)
        loss = kl_div(pred, soft) * temp ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        student.eval()
        with torch.no_grad():
            nll = F.cross_entropy(student(val_x), val_y).item()
        student.train()
        return nll

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- transfer learning from a checkpoint
def _transfer_prefix(bug):
    torch.manual_seed(0)

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1 = nn.Linear(80, 48)
            self.layer2 = nn.Linear(48, 16)

        def forward(self, x):
            return F.relu(self.layer2(F.relu(self.layer1(x))))

    class Classifier(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.backbone = Backbone()
            self.fc = nn.Linear(16, classes)

        def forward(self, x):
            return self.fc(self.backbone(x))

    lift = torch.randn(6, 80)
    clutter = torch.randn(30, 80)

    def domain(codes, n):
        y = torch.randint(0, len(codes), (n,))
        h = codes[y] + 0.5 * torch.randn(n, 6)
        return h @ lift / 3 + torch.randn(n, 30) @ clutter / 6, y

    source_codes, target_codes = torch.randn(20, 6), torch.randn(6, 6)

    pre = Classifier(20)
    opt = torch.optim.Adam(pre.parameters(), lr=3e-3)
    for _ in range(400):
        x, y = domain(source_codes, 64)
        opt.zero_grad()
        F.cross_entropy(pre(x), y).backward()
        opt.step()
    checkpoint = {"state_dict": {"module." + k: v.clone() for k, v in pre.backbone.state_dict().items()}}

    train_x, train_y = domain(target_codes, 60)
    val_x, val_y = domain(target_codes, 400)
    model = Classifier(6)
    state = checkpoint["state_dict"]
    if not bug:
        state = {k.removeprefix("module."): v for k, v in state.items()}
    model.backbone.load_state_dict(state, strict=False)
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-2)

    def step(i):
        idx = torch.randint(0, len(train_x), (20,))
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            err = (model(val_x).argmax(1) != val_y).float().mean().item()
        model.train()
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- transfer learning, fine-tuning
def _transfer_head_optim(bug):
    torch.manual_seed(0)

    class ResBlock(nn.Module):
        def __init__(self, ch):
            super().__init__()
            self.c1, self.c2 = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 3, padding=1)

        def forward(self, x):
            return F.relu(x + self.c2(F.relu(self.c1(x))))

    class TinyResNet(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.stem = nn.Conv2d(1, 12, 3, stride=2, padding=1)
            self.block = ResBlock(12)
            self.pool = nn.AdaptiveAvgPool2d(3)
            self.fc = nn.Linear(108, classes)

        def forward(self, x):
            return self.fc(self.pool(self.block(F.relu(self.stem(x)))).flatten(1))

    def make_domain(k):
        protos = torch.randn(k, 1, 12, 12)

        def draw(n):
            y = torch.randint(0, k, (n,))
            return protos[y] + 0.8 * torch.randn(n, 1, 12, 12), y
        return draw

    source, target = make_domain(12), make_domain(5)
    model = TinyResNet(12)
    pre_opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        x, y = source(32)
        pre_opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        pre_opt.step()

    train_x, train_y = target(200)
    val_x, val_y = target(300)
    if bug:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        model.fc = nn.Linear(108, 5)
    else:
        model.fc = nn.Linear(108, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(i):
        idx = torch.randint(0, len(train_x), (20,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
        loss.backward()
        optimizer.step()

    def probe():
        model.eval()
        with torch.no_grad():
            nll = F.cross_entropy(model(val_x), val_y).item()
        model.train()
        return nll

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ---------------------------------------------------------------- mean teacher
def _mean_teacher_ema(bug):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(30, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32), nn.BatchNorm1d(32), nn.ReLU(),
                nn.Linear(32, 5),
            )

        def forward(self, x):
            return self.net(x)

    centers = 0.9 * torch.randn(5, 30)

    def draw(n):
        y = torch.randint(0, 5, (n,))
        return 2.0 + 3.0 * (centers[y] + torch.randn(n, 30)), y

    lab_x, lab_y = draw(40)
    unl_x, _ = draw(1500)
    val_x, val_y = draw(400)
    student = Net()
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

    @torch.no_grad()
    def update_teacher(decay=0.95):
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.mul_(decay).add_(s, alpha=1 - decay)
        if not bug:
            for t, s in zip(teacher.buffers(), student.buffers()):
                t.copy_(s)

    def step(i):
        student.train()
        a, b = torch.randint(0, len(lab_x), (20,)), torch.randint(0, len(unl_x), (40,))
        out = student(torch.cat([lab_x[a], unl_x[b] + 1.0 * torch.randn(40, 30)]))
        sup = F.cross_entropy(out[:20], lab_y[a])
        with torch.no_grad():
            target = F.softmax(teacher(unl_x[b]), dim=1)
        cons = F.mse_loss(F.softmax(out[20:], dim=1), target)
        loss = sup + 10.0 * cons
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_teacher()

    def probe():
        student.eval()
        with torch.no_grad():
            err = (student(val_x).argmax(1) != val_y).float().mean().item()
        student.train()
        return err

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


CASES = [
    {"name": "cls_double_softmax", "group": "image classification",
     "what": "The model ends in a softmax and is trained with CrossEntropyLoss, which applies log-softmax "
             "again: the gradients are flat and learning is slow."},
    {"name": "cls_sorted_loader", "group": "image classification",
     "what": "The DataLoader does not shuffle a dataset that lies sorted by class, so every batch holds one "
             "class only and the network forgets the others."},
    {"name": "vit_batch_first", "group": "image classification",
     "what": "nn.TransformerEncoderLayer is built without batch_first=True but gets (batch, tokens, dim): "
             "attention runs over the images of the batch, and the class token never sees its patches."},
    {"name": "age_broadcast", "group": "image regression",
     "what": "Predictions of shape (B, 1) minus targets of shape (B,) broadcast to (B, B): the loss compares "
             "every prediction with every age and the model learns the mean age."},
    {"name": "aug_cutout_inplace", "group": "augmentation",
     "what": "Cutout writes into the stored image (no clone), so the holes pile up over the epochs and the "
             "training set is erased."},
    {"name": "seg_flip_mask", "group": "segmentation",
     "what": "The random horizontal flip is applied to the image but not to its mask, so half of the labels "
             "are mirrored wrongly."},
    {"name": "seg_view_logits", "group": "segmentation",
     "what": "NCHW logits are reshaped to (-1, C) without a permute to NHWC, so logits and pixel labels do "
             "not belong together."},
    {"name": "det_hflip_boxes", "group": "detection",
     "what": "The flip of the boxes mirrors x1 and x2 without swapping them, so flipped boxes have x1 > x2 "
             "and the predicted boxes lose their width."},
    {"name": "det_heatmap_xy", "group": "detection",
     "what": "The centre heatmap target is drawn with x as row and y as column (transposed), so peaks are "
             "trained at the wrong places."},
    {"name": "audio_ctc_blank", "group": "audio",
     "what": "CTCLoss keeps the default blank=0 although 0 is a real phone and the blank is the last class; "
             "the model learns phone 0 as blank and decoding is full of errors."},
    {"name": "audio_last_frame", "group": "audio",
     "what": "The GRU classifier takes out[:, -1], the last padded frame, instead of the last real frame of "
             "every clip."},
    {"name": "audio_lambda_lr", "group": "schedule",
     "what": "The function given to LambdaLR returns the learning rate and not a factor, so the rate is lr * "
             "lr and the training crawls."},
    {"name": "simclr_batch_aug", "group": "contrastive",
     "what": "The random augmentation is drawn once for the whole batch and not per image: within a view all "
             "images share it, so the encoder need not become invariant to it."},
    {"name": "simsiam_stopgrad", "group": "self-supervised",
     "what": "SimSiam without the stop-gradient on the targets: the embeddings collapse."},
    {"name": "gan_detached_fake", "group": "GAN",
     "what": "The fake batch is detached when it is made and then used again for the generator loss, so the "
             "generator gets no gradient and never learns."},
    {"name": "vae_kl_scale", "group": "VAE",
     "what": "The reconstruction loss is a mean over pixels while the KL is a sum per image, so the KL "
             "dominates and the posterior collapses."},
    {"name": "ddpm_broadcast", "group": "diffusion",
     "what": "alpha_bar[t] of shape (B,) is not reshaped to (B, 1, 1, 1); as B equals the image width it "
             "broadcasts over columns, so every column gets another image's noise level."},
    {"name": "siamese_label", "group": "metric learning",
     "what": "The contrastive loss takes the label the other way round (1 = same in the data, 1 = different "
             "in the formula): same pairs are pushed apart."},
    {"name": "distill_kldiv", "group": "distillation",
     "what": "KLDivLoss gets the student's softmax in place of its log_softmax, so the loss is no KL "
             "divergence and pushes to overconfident one-hot outputs."},
    {"name": "transfer_prefix", "group": "transfer learning",
     "what": "The checkpoint's keys carry DataParallel's 'module.' prefix and are loaded with strict=False, "
             "so nothing is loaded and the frozen backbone is random."},
    {"name": "transfer_head_optim", "group": "transfer learning",
     "what": "The optimizer is made before the head is replaced, so the new head is not among its parameters "
             "and stays at its random start."},
    {"name": "mean_teacher_ema", "group": "semi-supervised",
     "what": "The teacher's EMA copies only the parameters and not the BatchNorm buffers, so the teacher in "
             "eval mode uses initial statistics and gives wrong targets."},
]


def cls_double_softmax_bad():
    return _cls_double_softmax(True)


def cls_double_softmax_good():
    return _cls_double_softmax(False)


def cls_sorted_loader_bad():
    return _cls_sorted_loader(True)


def cls_sorted_loader_good():
    return _cls_sorted_loader(False)


def vit_batch_first_bad():
    return _vit_batch_first(True)


def vit_batch_first_good():
    return _vit_batch_first(False)


def age_broadcast_bad():
    return _age_broadcast(True)


def age_broadcast_good():
    return _age_broadcast(False)


def aug_cutout_inplace_bad():
    return _aug_cutout_inplace(True)


def aug_cutout_inplace_good():
    return _aug_cutout_inplace(False)


def seg_flip_mask_bad():
    return _seg_flip_mask(True)


def seg_flip_mask_good():
    return _seg_flip_mask(False)


def seg_view_logits_bad():
    return _seg_view_logits(True)


def seg_view_logits_good():
    return _seg_view_logits(False)


def det_hflip_boxes_bad():
    return _det_hflip_boxes(True)


def det_hflip_boxes_good():
    return _det_hflip_boxes(False)


def det_heatmap_xy_bad():
    return _det_heatmap_xy(True)


def det_heatmap_xy_good():
    return _det_heatmap_xy(False)


def audio_ctc_blank_bad():
    return _audio_ctc_blank(True)


def audio_ctc_blank_good():
    return _audio_ctc_blank(False)


def audio_last_frame_bad():
    return _audio_last_frame(True)


def audio_last_frame_good():
    return _audio_last_frame(False)


def audio_lambda_lr_bad():
    return _audio_lambda_lr(True)


def audio_lambda_lr_good():
    return _audio_lambda_lr(False)


def simclr_batch_aug_bad():
    return _simclr_batch_aug(True)


def simclr_batch_aug_good():
    return _simclr_batch_aug(False)


def simsiam_stopgrad_bad():
    return _simsiam_stopgrad(True)


def simsiam_stopgrad_good():
    return _simsiam_stopgrad(False)


def gan_detached_fake_bad():
    return _gan_detached_fake(True)


def gan_detached_fake_good():
    return _gan_detached_fake(False)


def vae_kl_scale_bad():
    return _vae_kl_scale(True)


def vae_kl_scale_good():
    return _vae_kl_scale(False)


def ddpm_broadcast_bad():
    return _ddpm_broadcast(True)


def ddpm_broadcast_good():
    return _ddpm_broadcast(False)


def siamese_label_bad():
    return _siamese_label(True)


def siamese_label_good():
    return _siamese_label(False)


def distill_kldiv_bad():
    return _distill_kldiv(True)


def distill_kldiv_good():
    return _distill_kldiv(False)


def transfer_prefix_bad():
    return _transfer_prefix(True)


def transfer_prefix_good():
    return _transfer_prefix(False)


def transfer_head_optim_bad():
    return _transfer_head_optim(True)


def transfer_head_optim_good():
    return _transfer_head_optim(False)


def mean_teacher_ema_bad():
    return _mean_teacher_ema(True)


def mean_teacher_ema_good():
    return _mean_teacher_ema(False)
