import copy
import io
import random
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


# --------------------------------------------------------------------------
# shared helpers
# --------------------------------------------------------------------------
def seed_everything(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def forever(loader):
    while True:
        for batch in loader:
            yield batch


@contextmanager
def evaluating(*modules):
    modes = [(m, m.training) for root in modules for m in root.modules()]
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    for root in modules:
        root.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


def gaussian_spots(n, size, rng, sigma=1.5):
    yy, xx = np.mgrid[0:size, 0:size]
    out = np.zeros((size, size), dtype=np.float32)
    for _ in range(n):
        cy, cx = rng.uniform(2, size - 2, 2)
        out += np.exp(-((yy - cy) ** 2 + (xx - cx) ** 2) / (2 * sigma ** 2))
    return out


# --------------------------------------------------------------------------
# fundus_grading: 5-grade image classification, long-tailed
# --------------------------------------------------------------------------
class FundusDataset(Dataset):
    GRADES = 5

    def __init__(self, counts, seed):
        rng = np.random.RandomState(seed)
        grades = np.concatenate([[g] * c for g, c in enumerate(counts)])
        rng.shuffle(grades)
        self.labels = torch.as_tensor(grades, dtype=torch.long)
        images = []
        for g in grades:
            base = 0.4 + 0.1 * rng.randn() + 0.08 * rng.randn(3, 20, 20)
            lesions = gaussian_spots(g * 2, 20, rng, sigma=1.0)
            base[0] += 0.8 * lesions
            base[2] -= 0.4 * lesions
            images.append(base)
        self.images = torch.as_tensor(np.stack(images), dtype=torch.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i]
        if torch.rand(()) < 0.5:
            img = img.flip(-1)
        if torch.rand(()) < 0.5:
            img = img.flip(-2)
        return img, self.labels[i]


class GradingNet(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.features = nn.Sequential(conv_bn(3, 12), conv_bn(12, 24, 2), conv_bn(24, 32, 2))
        self.classifier = nn.Linear(32, n_classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def _fundus_grading(make_weights, seed):
    seed_everything(seed)
    train_set = FundusDataset([260, 90, 70, 45, 35], seed=100 + seed)
    test_set = FundusDataset([40] * 5, seed=900 + seed)
    weights = make_weights(train_set.labels)
    sampler = WeightedRandomSampler(weights, num_samples=len(train_set), replacement=True)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    model = GradingNet(FundusDataset.GRADES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    batches = forever(loader)

    def step():
        model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(test_set.images), test_set.labels).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def _grade_weights(labels):
    counts = torch.bincount(labels, minlength=FundusDataset.GRADES).float()
    weights = counts.sum() / counts
    return weights


def _image_weights(labels):
    counts = torch.bincount(labels, minlength=FundusDataset.GRADES).float()
    weights = counts.sum() / counts
    return weights[labels]


def fundus_grading_bad(seed=0):
    return _fundus_grading(_grade_weights, seed)


def fundus_grading_good(seed=0):
    return _fundus_grading(_image_weights, seed)


# --------------------------------------------------------------------------
# box_regressor: single-object localisation with a DETR-style box loss
# --------------------------------------------------------------------------
def box_cxcywh_to_xyxy(b):
    cx, cy, w, h = b.unbind(-1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], dim=-1)


def paired_giou(a, b, eps=1e-7):
    lt = torch.max(a[:, :2], b[:, :2])
    rb = torch.min(a[:, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    union = area_a + area_b - inter
    iou = inter / (union + eps)
    elt = torch.min(a[:, :2], b[:, :2])
    erb = torch.max(a[:, 2:], b[:, 2:])
    ewh = (erb - elt).clamp(min=0)
    enclose = ewh[:, 0] * ewh[:, 1]
    return iou - (enclose - union) / (enclose + eps), iou


class ParcelBoxes(Dataset):
    """Images with COCO-style annotations: bbox = [x, y, width, height] in pixels."""

    def __init__(self, n, seed, size=32, target_transform=None):
        rng = np.random.RandomState(seed)
        self.size = size
        self.images, self.annotations = torch.zeros(n, 1, size, size), []
        for i in range(n):
            w, h = rng.randint(7, 17, 2)
            x0, y0 = rng.randint(0, size - w), rng.randint(0, size - h)
            img = 0.3 * rng.randn(size, size)
            img[y0:y0 + h, x0:x0 + w] += rng.uniform(1.0, 1.6)
            self.images[i, 0] = torch.as_tensor(img)
            self.annotations.append({"image_id": i, "bbox": [int(x0), int(y0), int(w), int(h)]})
        self.target_transform = target_transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        ann = self.annotations[i]
        return {"image": self.images[i], "boxes": self.target_transform(ann, self.size)}

    def corners(self):
        b = torch.tensor([a["bbox"] for a in self.annotations], dtype=torch.float32)
        return torch.cat([b[:, :2], b[:, :2] + b[:, 2:]], 1) / self.size


def normalized_box(ann, size):
    box = torch.tensor(ann["bbox"], dtype=torch.float32)
    return box / size


def normalized_center_box(ann, size):
    box = torch.tensor(ann["bbox"], dtype=torch.float32)
    box[:2] += box[2:] / 2
    return box / size


class BoxHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(24, 24, 3, stride=2, padding=1), nn.ReLU(),
        )
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(24 * 16, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.fc(self.body(x)).sigmoid()


class BoxLoss(nn.Module):
    def forward(self, pred, target):
        giou, _ = paired_giou(box_cxcywh_to_xyxy(pred), box_cxcywh_to_xyxy(target))
        return 2.0 * (1 - giou).mean() + 5.0 * F.l1_loss(pred, target)


def _box_regressor(target_transform, seed):
    seed_everything(seed)
    train = ParcelBoxes(480, seed + 1, target_transform=target_transform)
    held_out = ParcelBoxes(160, seed + 7000)
    loader = DataLoader(train, batch_size=32, shuffle=True)
    model = BoxHead()
    criterion = BoxLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    it = forever(loader)

    def train_step():
        batch = next(it)
        model.train()
        pred = model(batch["image"])
        loss = criterion(pred, batch["boxes"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def probe():
        with evaluating(model):
            pred = box_cxcywh_to_xyxy(model(held_out.images))
            _, iou = paired_giou(pred, held_out.corners())
            return float(1 - iou.mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": train_step, "probe": probe}


def box_regressor_bad(seed=0):
    return _box_regressor(normalized_box, seed)


def box_regressor_good(seed=0):
    return _box_regressor(normalized_center_box, seed)


# --------------------------------------------------------------------------
# road_tiles: binary segmentation on random crops
# --------------------------------------------------------------------------
class RandomCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, *arrays):
        h, w = arrays[0].shape[-2:]
        top = random.randint(0, h - self.size)
        left = random.randint(0, w - self.size)
        out = tuple(a[..., top:top + self.size, left:left + self.size] for a in arrays)
        return out if len(out) > 1 else out[0]


class RoadTiles(Dataset):
    def __init__(self, n, seed, size=32, transform=None):
        rng = np.random.RandomState(seed)
        yy, xx = np.mgrid[0:size, 0:size]
        self.images, self.masks = [], []
        for _ in range(n):
            angle = rng.uniform(0, np.pi)
            offset = rng.uniform(-6, 6)
            d = (xx - size / 2) * np.cos(angle) + (yy - size / 2) * np.sin(angle) - offset
            mask = (np.abs(d) < rng.uniform(2.0, 3.5)).astype(np.float32)
            img = 0.25 * rng.randn(3, size, size) + np.array([0.2, 0.5, 0.2])[:, None, None]
            img = img * (1 - mask) + (0.25 * rng.randn(3, size, size) + 0.75) * mask
            self.images.append(torch.as_tensor(img, dtype=torch.float32))
            self.masks.append(torch.as_tensor(mask))
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image, mask = self.images[i], self.masks[i]
        if self.transform is not None:
            image, mask = self.transform(image, mask)
        return image, mask


class TileUNet(nn.Module):
    def __init__(self, cin=3, width=8, cout=1):
        super().__init__()
        self.enc1 = conv_bn(cin, width)
        self.enc2 = conv_bn(width, width * 2, 2)
        self.mid = conv_bn(width * 2, width * 2)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.dec = conv_bn(width * 3, width)
        self.out = nn.Conv2d(width, cout, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.mid(self.enc2(a))
        return self.out(self.dec(torch.cat([a, self.up(b)], 1)))


class SegTransform:
    def __init__(self, size):
        self.image_tf = RandomCrop(size)
        self.mask_tf = RandomCrop(size)

    def __call__(self, image, mask):
        return self.image_tf(image), self.mask_tf(mask)


class PairedSegTransform:
    def __init__(self, size):
        self.crop = RandomCrop(size)

    def __call__(self, image, mask):
        image, mask = self.crop(image, mask)
        return image, mask


def bce_dice(logits, target):
    p = torch.sigmoid(logits)
    dice = 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits, target) + dice


def _road_tiles(transform, seed):
    seed_everything(seed)
    loader = DataLoader(RoadTiles(160, seed, transform=transform), batch_size=16, shuffle=True)
    val = RoadTiles(60, seed + 321)
    vx, vy = torch.stack(val.images), torch.stack(val.masks)
    model = TileUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = forever(loader)

    def step():
        model.train()
        x, y = next(data)
        loss = bce_dice(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            pred = model(vx).squeeze(1) > 0
            truth = vy > 0.5
            inter = (pred & truth).sum((1, 2)).float()
            union = (pred | truth).sum((1, 2)).float().clamp(min=1)
            return float(1 - (inter / union).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def road_tiles_bad(seed=0):
    return _road_tiles(SegTransform(20), seed)


def road_tiles_good(seed=0):
    return _road_tiles(PairedSegTransform(20), seed)


# --------------------------------------------------------------------------
# cell_segments: 3-class semantic segmentation
# --------------------------------------------------------------------------
def make_cells(n, seed, size=24):
    rng = np.random.RandomState(seed)
    yy, xx = np.mgrid[0:size, 0:size]
    xs = np.zeros((n, 1, size, size), np.float32)
    ys = np.zeros((n, size, size), np.int64)
    for i in range(n):
        img = 0.1 * rng.randn(size, size)
        for _ in range(rng.randint(2, 4)):
            cy, cx = rng.uniform(4, size - 4, 2)
            r = rng.uniform(3.5, 5.5)
            d = np.hypot(yy - cy, xx - cx)
            ys[i][d < r] = 1
            img[d < r] = 0.6 + 0.1 * rng.randn((d < r).sum())
            ys[i][d < r * 0.5] = 2
            img[d < r * 0.5] = 1.2 + 0.1 * rng.randn((d < r * 0.5).sum())
        xs[i, 0] = img
    return torch.from_numpy(xs), torch.from_numpy(ys)


class CellTrainer:
    num_classes = 3

    def __init__(self, seed):
        seed_everything(seed)
        self.loader = DataLoader(TensorDataset(*make_cells(128, seed)), batch_size=8, shuffle=True)
        self.batches = iter(self.loader)
        self.val = make_cells(48, seed + 5555)
        self.net = TileUNet(1, 8, self.num_classes)
        self.optim = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def next_batch(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)

    def loss(self, logits, masks):
        logits = logits.contiguous().view(-1, self.num_classes)
        return F.cross_entropy(logits, masks.view(-1))

    def training_step(self):
        self.net.train()
        images, masks = self.next_batch()
        self.optim.zero_grad()
        loss = self.loss(self.net(images), masks)
        loss.backward()
        self.optim.step()
        return loss.item()

    def validate(self):
        with evaluating(self.net):
            pred = self.net(self.val[0]).argmax(1)
            ious = []
            for c in range(self.num_classes):
                p, t = pred == c, self.val[1] == c
                ious.append((p & t).sum() / (p | t).sum().clamp(min=1))
            return float(1 - torch.stack(ious).mean())

    def program(self):
        return {"model": self.net, "optimizer": self.optim, "steps": 20,
                "step": self.training_step, "probe": self.validate}


class CellTrainerNHWC(CellTrainer):
    def loss(self, logits, masks):
        logits = logits.permute(0, 2, 3, 1).contiguous().view(-1, self.num_classes)
        return F.cross_entropy(logits, masks.view(-1))


def cell_segments_bad(seed=0):
    return CellTrainer(seed).program()


def cell_segments_good(seed=0):
    return CellTrainerNHWC(seed).program()


# --------------------------------------------------------------------------
# pose_points: 5-keypoint regression on front-facing figures
# --------------------------------------------------------------------------
KEYPOINTS = ["head", "left_hand", "right_hand", "left_foot", "right_foot"]


def draw_figure(rng, size=24):
    cx = size / 2 + rng.uniform(-2, 2)
    head = (cx, 4 + rng.uniform(-1, 1))
    left_hand = (cx + rng.uniform(4, 8), 11 + rng.uniform(-5, 3))
    right_hand = (cx - rng.uniform(4, 8), 11 + rng.uniform(-5, 3))
    left_foot = (cx + rng.uniform(2, 5), 20 + rng.uniform(-2, 2))
    right_foot = (cx - rng.uniform(2, 5), 20 + rng.uniform(-2, 2))
    chest, hip = (cx, 8.0), (cx, 14.0)
    img = 0.1 * rng.randn(size, size)
    yy, xx = np.mgrid[0:size, 0:size]
    limbs = [(head, hip), (chest, left_hand), (chest, right_hand), (hip, left_foot), (hip, right_foot)]
    for (xa, ya), (xb, yb) in limbs:
        for t in np.linspace(0, 1, 10):
            px, py = xa + t * (xb - xa), ya + t * (yb - ya)
            img = np.maximum(img, np.exp(-((xx - px) ** 2 + (yy - py) ** 2) / 1.2))
    kps = np.array([head, left_hand, right_hand, left_foot, right_foot]) / (size - 1)
    return img.astype(np.float32)[None], kps.astype(np.float32)


class PoseDataset(Dataset):
    def __init__(self, n, seed, augment=None):
        rng = np.random.RandomState(seed)
        self.items = [draw_figure(rng) for _ in range(n)]
        self.augment = augment

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        img, kps = self.items[i]
        if self.augment:
            img, kps = self.augment(img, kps)
        return torch.from_numpy(img.copy()), torch.from_numpy(kps.copy())


class HFlip:
    def __init__(self, p=0.5, order=None):
        self.p = p
        self.order = order

    def __call__(self, img, kps):
        if random.random() < self.p:
            img = img[:, :, ::-1]
            kps = kps.copy()
            kps[:, 0] = 1.0 - kps[:, 0]
            if self.order is not None:
                kps = kps[self.order]
        return img, kps


class PoseNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.net = nn.Sequential(
            conv_bn(1, 12, 2), conv_bn(12, 24, 2), conv_bn(24, 32, 2), nn.Flatten(),
            nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, k * 2))

    def forward(self, x):
        return self.net(x).view(-1, self.k, 2)


def _pose_points(augment, seed):
    seed_everything(seed)
    loader = DataLoader(PoseDataset(256, seed + 3, augment), batch_size=32, shuffle=True)
    test = list(DataLoader(PoseDataset(128, seed + 40), batch_size=128))[0]
    net = PoseNet(len(KEYPOINTS))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    stream = forever(loader)

    def step():
        net.train()
        img, kps = next(stream)
        loss = F.smooth_l1_loss(net(img), kps, beta=0.05)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with evaluating(net):
            return (net(test[0]) - test[1]).norm(dim=-1).mean().item()

    return {"model": net, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def pose_points_bad(seed=0):
    return _pose_points(HFlip(0.5), seed)


def pose_points_good(seed=0):
    return _pose_points(HFlip(0.5, order=[0, 2, 1, 4, 3]), seed)


# --------------------------------------------------------------------------
# clip_motion: short video classification
# --------------------------------------------------------------------------
class MotionClips(Dataset):
    """Clips of a textured patch; the class is how the patch moves."""
    MOVES = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]

    def __init__(self, n, seed, transform, frames=6, size=22):
        rng = np.random.RandomState(seed)
        self.clips, self.labels = [], []
        yy, xx = np.mgrid[0:size, 0:size]
        for _ in range(n):
            k = rng.randint(len(self.MOVES))
            dx, dy = self.MOVES[k]
            speed = rng.uniform(0.6, 1.0)
            px, py = rng.uniform(8, 14, 2)
            clip = 0.25 * rng.randn(frames, 1, size, size)
            for t in range(frames):
                cx = px + speed * dx * (t - frames / 2)
                cy = py + speed * dy * (t - frames / 2)
                clip[t, 0] += np.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 5.0)
            self.clips.append(torch.as_tensor(clip, dtype=torch.float32))
            self.labels.append(k)
        self.transform = transform

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        return self.transform(self.clips[i]), self.labels[i]


def center_crop(clip, size=14):
    h = (clip.shape[-1] - size) // 2
    return clip[..., h:h + size, h:h + size]


class FrameTransform:
    def __init__(self, size=14):
        self.crop = RandomCrop(size)

    def __call__(self, clip):
        return torch.stack([self.crop(frame) for frame in clip])


class ClipTransform:
    def __init__(self, size=14):
        self.crop = RandomCrop(size)

    def __call__(self, clip):
        return self.crop(clip)


class Tiny3D(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(1, 12, (3, 3, 3), padding=1, bias=False), nn.BatchNorm3d(12), nn.ReLU(),
            nn.MaxPool3d((1, 2, 2)),
            nn.Conv3d(12, 24, (3, 3, 3), padding=1, bias=False), nn.BatchNorm3d(24), nn.ReLU(),
        )
        self.head = nn.Linear(24, n_classes)

    def forward(self, clips):
        x = clips.transpose(1, 2)
        x = self.stem(x).amax((2, 3, 4))
        return self.head(x)


def _clip_motion(transform, seed):
    seed_everything(seed)
    train = MotionClips(240, seed, transform)
    test = MotionClips(120, seed + 99, center_crop)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    tx = torch.stack([test[i][0] for i in range(len(test))])
    ty = torch.tensor(test.labels)
    model = Tiny3D(len(MotionClips.MOVES))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = forever(loader)

    def step():
        model.train()
        clips, labels = next(batches)
        logits = model(clips)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(tx), ty).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def clip_motion_bad(seed=0):
    return _clip_motion(FrameTransform(), seed)


def clip_motion_good(seed=0):
    return _clip_motion(ClipTransform(), seed)


# --------------------------------------------------------------------------
# letters_ctc: small acoustic model with CTC
# --------------------------------------------------------------------------
class TextCodec:
    def __init__(self, alphabet="abcdef"):
        self.alphabet = alphabet
        self.index = {c: i for i, c in enumerate(alphabet)}
        self.blank = len(alphabet)

    @property
    def num_symbols(self):
        return len(self.alphabet) + 1

    def encode(self, text):
        return torch.tensor([self.index[c] for c in text], dtype=torch.long)

    def greedy(self, ids):
        out, prev = [], None
        for i in ids:
            if i != prev and i != self.blank:
                out.append(self.alphabet[i])
            prev = i
        return "".join(out)


class SpokenLetters(Dataset):
    def __init__(self, n, seed, codec, mels=10):
        rng = np.random.RandomState(seed)
        voices = np.random.RandomState(17).randn(len(codec.alphabet), mels) * 1.5
        self.items = []
        for _ in range(n):
            text = "".join(rng.choice(list(codec.alphabet), rng.randint(2, 5)))
            frames = [np.zeros((rng.randint(1, 3), mels))]
            for c in text:
                frames.append(np.repeat(voices[codec.index[c]][None], rng.randint(3, 6), 0))
                frames.append(np.zeros((rng.randint(1, 3), mels)))
            feats = np.concatenate(frames)
            feats = feats + 0.3 * rng.randn(*feats.shape)
            self.items.append((torch.as_tensor(feats, dtype=torch.float32), text))
        self.codec = codec

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        feats, text = self.items[i]
        return feats, self.codec.encode(text)


def collate_utterances(batch):
    feats, targets = zip(*batch)
    feat_lens = torch.tensor([len(f) for f in feats])
    target_lens = torch.tensor([len(t) for t in targets])
    return pad_sequence(feats, batch_first=True), feat_lens, torch.cat(targets), target_lens


class AcousticModel(nn.Module):
    def __init__(self, mels, n_out, hidden=48):
        super().__init__()
        self.conv = nn.Conv1d(mels, hidden, 5, padding=2)
        self.rnn = nn.GRU(hidden, hidden // 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(hidden, n_out)

    def forward(self, x):
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.out(h).log_softmax(-1)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def _letters_ctc(make_criterion, seed):
    seed_everything(seed)
    codec = TextCodec()
    criterion = make_criterion(codec)
    loader = DataLoader(SpokenLetters(320, seed, codec), batch_size=16, shuffle=True, collate_fn=collate_utterances)
    test = SpokenLetters(60, seed + 1234, codec)
    model = AcousticModel(10, codec.num_symbols)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    it = forever(loader)

    def step():
        model.train()
        feats, feat_lens, targets, target_lens = next(it)
        log_probs = model(feats).transpose(0, 1)
        loss = criterion(log_probs, targets, feat_lens, target_lens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        errors = total = 0
        with evaluating(model):
            for feats, text in test.items:
                hyp = codec.greedy(model(feats[None])[0].argmax(-1).tolist())
                errors += edit_distance(hyp, text)
                total += len(text)
        return errors / total + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def letters_ctc_bad(seed=0):
    return _letters_ctc(lambda codec: nn.CTCLoss(zero_infinity=True), seed)


def letters_ctc_good(seed=0):
    return _letters_ctc(lambda codec: nn.CTCLoss(blank=codec.blank, zero_infinity=True), seed)


# --------------------------------------------------------------------------
# tone_commands: recurrent classifier over filterbank frames
# --------------------------------------------------------------------------
def synth_commands(n, seed, frames=16, bands=12):
    rng = np.random.RandomState(seed)
    orders = [(2, 5, 8), (2, 8, 5), (5, 2, 8), (5, 8, 2), (8, 2, 5), (8, 5, 2)]
    x = 0.4 * rng.randn(n, frames, bands)
    y = rng.randint(len(orders), size=n)
    for i in range(n):
        start = rng.randint(0, 3)
        for k, band in enumerate(orders[y[i]]):
            a = start + 4 * k
            x[i, a:a + 4, band] += 1.5
            x[i, a:a + 4, band + 1] += 0.8
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)


class CommandRNN(nn.Module):
    def __init__(self, bands, n_classes, hidden=32, **rnn_kwargs):
        super().__init__()
        self.norm = nn.LayerNorm(bands)
        self.rnn = nn.GRU(bands, hidden, num_layers=1, **rnn_kwargs)
        self.fc = nn.Linear(hidden, n_classes)

    def forward(self, x):
        out, _ = self.rnn(self.norm(x))
        return self.fc(out[:, -1])


def _tone_commands(seed, **rnn_kwargs):
    seed_everything(seed)
    train_dl = DataLoader(TensorDataset(*synth_commands(384, seed)), batch_size=32, shuffle=True)
    test_x, test_y = synth_commands(128, seed + 77)
    model = CommandRNN(12, 6, **rnn_kwargs)
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    loss_fn = nn.CrossEntropyLoss()
    stream = forever(train_dl)

    def step():
        x, y = next(stream)
        model.train()
        opt.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return loss_fn(model(test_x), test_y).item()

    return {"model": model, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def tone_commands_bad(seed=0):
    return _tone_commands(seed)


def tone_commands_good(seed=0):
    return _tone_commands(seed, batch_first=True)


# --------------------------------------------------------------------------
# keyword_specs: keyword spotting on cached log-mel spectrograms
# --------------------------------------------------------------------------
class KeywordSpecs(Dataset):
    def __init__(self, n, seed, n_keywords=6, mels=20, frames=24, augment=False):
        rng = np.random.RandomState(seed)
        proto = np.random.RandomState(5).randn(n_keywords, mels, frames)
        kernel = np.ones(5) / 5
        proto = np.apply_along_axis(lambda r: np.convolve(r, kernel, "same"), 2, proto)
        self.labels = torch.as_tensor(rng.randint(n_keywords, size=n))
        self.cache = []
        for y in self.labels.tolist():
            shift = rng.randint(-2, 3)
            spec = np.roll(proto[y], shift, axis=1) + 0.7 * rng.randn(mels, frames)
            self.cache.append(torch.as_tensor(spec, dtype=torch.float32))
        self.augment = augment

    def __len__(self):
        return len(self.cache)

    def load(self, i):
        return self.cache[i]

    def __getitem__(self, i):
        spec = self.load(i)
        if self.augment:
            spec = self.spec_augment(spec)
        return spec.unsqueeze(0), self.labels[i]

    @staticmethod
    def spec_augment(spec, max_f=5, max_t=6):
        mels, frames = spec.shape
        f = random.randint(0, max_f)
        f0 = random.randint(0, mels - f)
        t = random.randint(0, max_t)
        t0 = random.randint(0, frames - t)
        spec[f0:f0 + f, :] = 0.0
        spec[:, t0:t0 + t] = 0.0
        return spec


class KeywordSpecsCopy(KeywordSpecs):
    def load(self, i):
        return self.cache[i].clone()


class KeywordNet(nn.Module):
    def __init__(self, n_keywords):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 12, (5, 5), stride=2, padding=2), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(24 * 5 * 6, n_keywords))

    def forward(self, x):
        return self.net(x)


def _keyword_specs(dataset_cls, seed):
    seed_everything(seed)
    train = dataset_cls(96, seed, augment=True)
    test = dataset_cls(200, seed + 31)
    tx = torch.stack([test[i][0] for i in range(len(test))])
    loader = DataLoader(train, batch_size=16, shuffle=True)
    model = KeywordNet(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = forever(loader)

    def step():
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(tx), test.labels).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_specs_bad(seed=0):
    return _keyword_specs(KeywordSpecs, seed)


def keyword_specs_good(seed=0):
    return _keyword_specs(KeywordSpecsCopy, seed)


# --------------------------------------------------------------------------
# event_tagger: multi-label audio tagging with rare tags
# --------------------------------------------------------------------------
def synth_events(n, seed, tags=8, frames=20, mels=16, rate=0.08):
    rng = np.random.RandomState(seed)
    y = (rng.rand(n, tags) < rate).astype(np.float32)
    x = 0.5 * rng.randn(n, mels, frames)
    for i in range(n):
        for k in np.nonzero(y[i])[0]:
            dur = rng.randint(5, 10)
            t0 = rng.randint(0, frames - dur)
            x[i, 2 * k:2 * k + 2, t0:t0 + dur] += rng.uniform(0.5, 1.2)
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)


class TagNet(nn.Module):
    def __init__(self, mels, tags):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(mels, 48, 5, padding=2), nn.BatchNorm1d(48), nn.ReLU(),
            nn.Conv1d(48, 48, 3, padding=1), nn.BatchNorm1d(48), nn.ReLU())
        self.head = nn.Linear(96, tags)

    def forward(self, x):
        h = self.conv(x)
        return self.head(torch.cat([h.mean(-1), h.amax(-1)], 1))


def _neg_to_pos(labels):
    pos = labels.sum(0)
    return (len(labels) - pos) / pos


def _pos_to_neg(labels):
    pos = labels.sum(0)
    return pos / (len(labels) - pos)


def _event_tagger(class_balance, seed):
    seed_everything(seed)
    xs, ys = synth_events(600, seed)
    vx, vy = synth_events(300, seed + 4000)
    loader = DataLoader(TensorDataset(xs, ys), batch_size=32, shuffle=True)
    model = TagNet(16, 8)
    criterion = nn.BCEWithLogitsLoss(pos_weight=class_balance(ys))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    it = forever(loader)

    def step():
        model.train()
        x, y = next(it)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def probe():
        with evaluating(model):
            pred = (torch.sigmoid(model(vx)) > 0.5).float()
            recall = (pred * vy).sum(0) / vy.sum(0).clamp(min=1)
            specificity = ((1 - pred) * (1 - vy)).sum(0) / (1 - vy).sum(0).clamp(min=1)
            return float(1 - (0.5 * (recall + specificity)).mean())

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def event_tagger_bad(seed=0):
    return _event_tagger(_pos_to_neg, seed)


def event_tagger_good(seed=0):
    return _event_tagger(_neg_to_pos, seed)


# --------------------------------------------------------------------------
# glyph_gan: unconditional GAN on small glyphs
# --------------------------------------------------------------------------
def make_glyphs(n, seed, size=8):
    rng = np.random.RandomState(seed)
    yy, xx = np.mgrid[0:size, 0:size]
    out = []
    for _ in range(n):
        a = rng.randint(4)
        d = [yy - 3.5, xx - 3.5, (xx - yy) / 1.4, (xx + yy - 7) / 1.4][a] - rng.uniform(-1, 1)
        out.append(2 * np.exp(-d ** 2 / 1.5) - 1 + 0.05 * rng.randn(size, size))
    return torch.as_tensor(np.stack(out), dtype=torch.float32).flatten(1).clamp(-1, 1)


class Generator(nn.Module):
    def __init__(self, out_act, z_dim=8, out=64):
        super().__init__()
        self.z_dim = z_dim
        self.net = nn.Sequential(
            nn.Linear(z_dim, 64), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(),
            nn.Linear(128, out), out_act)

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d, 96), nn.LeakyReLU(0.2), nn.Dropout(0.1),
            nn.Linear(96, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


class GanTrainer:
    def __init__(self, generator, seed):
        self.loader = DataLoader(TensorDataset(make_glyphs(1024, seed)), batch_size=64, shuffle=True)
        self.held_out = make_glyphs(400, seed + 800)
        self.batches = forever(self.loader)
        self.G, self.D = generator, Discriminator()
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=1e-3, betas=(0.5, 0.999))
        self.bce = nn.BCEWithLogitsLoss()

    def sample(self, n):
        return self.G(torch.randn(n, self.G.z_dim))

    def step(self):
        self.G.train()
        self.D.train()
        (real,) = next(self.batches)
        n = len(real)
        ones, zeros = torch.ones(n), torch.zeros(n)

        self.opt_d.zero_grad()
        fake = self.sample(n).detach()
        loss_d = 0.5 * (self.bce(self.D(real), ones) + self.bce(self.D(fake), zeros))
        loss_d.backward()
        self.opt_d.step()

        self.opt_g.zero_grad()
        loss_g = self.bce(self.D(self.sample(n)), ones)
        loss_g.backward()
        self.opt_g.step()
        return loss_d.item() + loss_g.item()

    def probe(self):
        with evaluating(self.G, self.D):
            z = torch.randn(400, self.G.z_dim, generator=torch.Generator().manual_seed(1))
            return energy_distance(self.G(z), self.held_out)

    def program(self):
        return {"model": [self.G, self.D], "optimizer": [self.opt_g, self.opt_d], "steps": 20,
                "step": self.step, "probe": self.probe}


def glyph_gan_bad(seed=0):
    seed_everything(seed)
    return GanTrainer(Generator(nn.Sigmoid()), seed).program()


def glyph_gan_good(seed=0):
    seed_everything(seed)
    return GanTrainer(Generator(nn.Tanh()), seed).program()


# --------------------------------------------------------------------------
# shape_vae: variational auto-encoder on binary shapes
# --------------------------------------------------------------------------
def make_shapes(n, seed, size=12):
    rng = np.random.RandomState(seed)
    yy, xx = np.mgrid[0:size, 0:size]
    out = np.zeros((n, size, size), np.float32)
    for i in range(n):
        cy, cx = rng.uniform(3, size - 4, 2)
        r = rng.uniform(1.8, 3.8)
        if rng.rand() < 0.5:
            out[i] = np.hypot(yy - cy, xx - cx) < r
        else:
            out[i] = np.maximum(abs(yy - cy), abs(xx - cx)) < r * 0.85
    return torch.from_numpy(out).flatten(1)


class VAE(nn.Module):
    def __init__(self, d=144, h=96, z=6):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.ReLU())
        self.mu = nn.Linear(h, z)
        self.logvar = nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, d))

    def encode(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def vae_loss(logits, x, mu, logvar):
    recon = F.binary_cross_entropy_with_logits(logits, x)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
    return recon + kld


def vae_loss_per_image(logits, x, mu, logvar):
    recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
    return recon + kld


def _shape_vae(loss_function, seed):
    seed_everything(seed)
    loader = DataLoader(TensorDataset(make_shapes(1000, seed)), batch_size=50, shuffle=True)
    test = make_shapes(200, seed + 61)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = forever(loader)

    def step():
        model.train()
        (x,) = next(batches)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = loss_function(logits, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            mu, _ = model.encode(test)
            return F.binary_cross_entropy_with_logits(model.dec(mu), test).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def shape_vae_bad(seed=0):
    return _shape_vae(vae_loss, seed)


def shape_vae_good(seed=0):
    return _shape_vae(vae_loss_per_image, seed)


# --------------------------------------------------------------------------
# spot_ddpm: epsilon-prediction diffusion on small images
# --------------------------------------------------------------------------
class TimeMLP(nn.Module):
    def __init__(self, d=64, h=160, t_dim=32):
        super().__init__()
        self.t_dim = t_dim
        self.inp = nn.Linear(d, h)
        self.t_proj = nn.Sequential(nn.Linear(t_dim, h), nn.SiLU(), nn.Linear(h, h))
        self.block1 = nn.Sequential(nn.LayerNorm(h), nn.SiLU(), nn.Linear(h, h))
        self.block2 = nn.Sequential(nn.LayerNorm(h), nn.SiLU(), nn.Linear(h, h))
        self.out = nn.Linear(h, d)

    def embed(self, t):
        half = self.t_dim // 2
        freq = torch.exp(-np.log(10000.0) * torch.arange(half) / half)
        ang = t[:, None].float() * freq[None]
        return torch.cat([ang.sin(), ang.cos()], 1)

    def forward(self, x, t):
        h = self.inp(x.flatten(1)) + self.t_proj(self.embed(t))
        h = h + self.block1(h)
        h = h + self.block2(h)
        return self.out(h).view_as(x)


class GaussianDiffusion(nn.Module):
    def __init__(self, net, timesteps=100):
        super().__init__()
        self.net = net
        self.timesteps = timesteps
        betas = torch.linspace(1e-3, 0.06, timesteps)
        abar = torch.cumprod(1 - betas, 0)
        self.register_buffer("sqrt_abar", abar.sqrt())
        self.register_buffer("sqrt_one_minus_abar", (1 - abar).sqrt())

    def q_sample(self, x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        return (self.sqrt_abar[t].view(-1, 1, 1, 1) * x0
                + self.sqrt_one_minus_abar[t].view(-1, 1, 1, 1) * noise)

    def p_losses(self, x0, t):
        noise = torch.randn_like(x0)
        x_noisy = self.q_sample(x0, t)
        return F.mse_loss(self.net(x_noisy, t), noise)

    def forward(self, x0):
        t = torch.randint(0, self.timesteps, (x0.shape[0],))
        return self.p_losses(x0, t)


class GaussianDiffusionV2(GaussianDiffusion):
    def p_losses(self, x0, t):
        noise = torch.randn_like(x0)
        x_noisy = self.q_sample(x0, t, noise=noise)
        return F.mse_loss(self.net(x_noisy, t), noise)


def _spot_ddpm(diffusion_cls, seed):
    seed_everything(seed)

    def images(n, s):
        rng = np.random.RandomState(s)
        arr = np.stack([gaussian_spots(2, 8, rng, 1.2) for _ in range(n)])
        return torch.as_tensor(arr, dtype=torch.float32).clamp(0, 1).unsqueeze(1) * 2 - 1

    loader = DataLoader(TensorDataset(images(1000, seed)), batch_size=64, shuffle=True)
    held_out = images(256, seed + 500)
    diffusion = diffusion_cls(TimeMLP())
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-3)
    batches = forever(loader)

    def step():
        diffusion.train()
        (x0,) = next(batches)
        loss = diffusion(x0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(diffusion):
            g = torch.Generator().manual_seed(11)
            noise = torch.randn(held_out.shape, generator=g)
            t = torch.randint(0, diffusion.timesteps, (len(held_out),), generator=g)
            xt = diffusion.q_sample(held_out, t, noise)
            return F.mse_loss(diffusion.net(xt, t), noise).item()

    return {"model": diffusion, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def spot_ddpm_bad(seed=0):
    return _spot_ddpm(GaussianDiffusion, seed)


def spot_ddpm_good(seed=0):
    return _spot_ddpm(GaussianDiffusionV2, seed)


# --------------------------------------------------------------------------
# moons_flow: RealNVP density model
# --------------------------------------------------------------------------
def make_moons(n, seed):
    rng = np.random.RandomState(seed)
    a = rng.uniform(0, np.pi, n)
    upper = rng.rand(n) < 0.5
    x = np.where(upper, np.cos(a), 1 - np.cos(a))
    y = np.where(upper, np.sin(a), 0.5 - np.sin(a))
    pts = np.stack([x - 0.5, y - 0.25], 1) * 3 + 0.2 * rng.randn(n, 2)
    return torch.as_tensor(pts, dtype=torch.float32)


class AffineCoupling(nn.Module):
    def __init__(self, mask, hidden=48):
        super().__init__()
        self.register_buffer("mask", mask)
        d = len(mask)
        self.net = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, 2 * d))

    def forward(self, x):
        kept = x * self.mask
        s, t = self.net(kept).chunk(2, -1)
        s = torch.tanh(s) * (1 - self.mask)
        t = t * (1 - self.mask)
        return kept + (1 - self.mask) * (x * s.exp() + t), s.sum(-1)


class RealNVP(nn.Module):
    def __init__(self, masks):
        super().__init__()
        self.layers = nn.ModuleList(AffineCoupling(m) for m in masks)
        self.base = torch.distributions.Normal(0.0, 1.0)

    def log_prob(self, x):
        logdet = x.new_zeros(len(x))
        for layer in self.layers:
            x, ld = layer(x)
            logdet = logdet + ld
        return self.base.log_prob(x).sum(-1) + logdet


def _moons_flow(masks, seed):
    seed_everything(seed)
    loader = DataLoader(TensorDataset(make_moons(2000, seed)), batch_size=128, shuffle=True)
    test = make_moons(500, seed + 250)
    flow = RealNVP(masks)
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
    batches = forever(loader)

    def step():
        (x,) = next(batches)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(flow):
            return -flow.log_prob(test).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def moons_flow_bad(seed=0):
    mask = torch.tensor([1.0, 0.0])
    return _moons_flow([mask.clone() for _ in range(6)], seed)


def moons_flow_good(seed=0):
    mask = torch.tensor([1.0, 0.0])
    return _moons_flow([mask.clone() if i % 2 == 0 else 1 - mask for i in range(6)], seed)


# --------------------------------------------------------------------------
# pixel_net: autoregressive model of binary images
# --------------------------------------------------------------------------
class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type, cin, cout, k):
        super().__init__(cin, cout, k, padding=k // 2)
        mask = torch.ones(k, k)
        mask[k // 2, k // 2 + (mask_type == "B"):] = 0
        mask[k // 2 + 1:] = 0
        self.register_buffer("mask", mask[None, None])

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class PixelNet(nn.Module):
    def __init__(self, mask_types, ch=20):
        super().__init__()
        layers, cin = [], 1
        for i, kind in enumerate(mask_types):
            layers += [MaskedConv2d(kind, cin, ch, 5 if i == 0 else 3), nn.ReLU()]
            cin = ch
        layers.append(nn.Conv2d(ch, 1, 1))
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.net(x)


def make_bars(n, seed, size=8):
    rng = np.random.RandomState(seed)
    out = np.zeros((n, 1, size, size), np.float32)
    for i in range(n):
        for _ in range(2):
            k, a, b = rng.randint(size), rng.randint(0, 3), rng.randint(5, size + 1)
            if rng.rand() < 0.5:
                out[i, 0, k, a:b] = 1
            else:
                out[i, 0, a:b, k] = 1
    return torch.from_numpy(out)


def _pixel_net(mask_types, seed):
    seed_everything(seed)
    loader = DataLoader(TensorDataset(make_bars(1200, seed)), batch_size=48, shuffle=True)
    test = make_bars(40, seed + 66)
    model = PixelNet(mask_types)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches = forever(loader)

    def step():
        model.train()
        (x,) = next(batches)
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum((1, 2, 3)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        # nats per image, every pixel scored from the pixels before it only
        size = test.shape[-1]
        nll = 0.0
        with evaluating(model):
            for p in range(size * size):
                seen = test.flatten(1).clone()
                seen[:, p:] = 0
                logit = model(seen.view_as(test)).flatten(1)[:, p]
                nll += F.binary_cross_entropy_with_logits(logit, test.flatten(1)[:, p]).item()
        return nll

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pixel_net_bad(seed=0):
    return _pixel_net("BBBB", seed)


def pixel_net_good(seed=0):
    return _pixel_net("ABBB", seed)


# --------------------------------------------------------------------------
# caption_clip: image / caption contrastive training
# --------------------------------------------------------------------------
COLOURS = ["red", "green", "blue", "white"]
PLACES = ["top", "bottom", "left", "right"]
SIZES = ["small", "large"]
FILLERS = ["a", "photo", "of", "some", "very", "nice"]
VOCAB = {w: i + 1 for i, w in enumerate(COLOURS + PLACES + SIZES + FILLERS)}


class CaptionedImages(Dataset):
    def __init__(self, n, seed, size=12):
        rng = np.random.RandomState(seed)
        rgb = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "white": (1, 1, 1)}
        centre = {"top": (3, 6), "bottom": (9, 6), "left": (6, 3), "right": (6, 9)}
        yy, xx = np.mgrid[0:size, 0:size]
        self.items = []
        for _ in range(n):
            c, p, s = (rng.choice(v) for v in (COLOURS, PLACES, SIZES))
            cy, cx = np.array(centre[p]) + rng.uniform(-0.7, 0.7, 2)
            m = np.hypot(yy - cy, xx - cx) < (1.6 if s == "small" else 3.0)
            img = 0.2 * rng.randn(3, size, size) + np.array(rgb[c])[:, None, None] * m
            words = list(rng.choice(FILLERS, rng.randint(0, 6))) + [s, c, p]
            self.items.append((torch.as_tensor(img, dtype=torch.float32),
                               torch.tensor([VOCAB[w] for w in words])))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate_pairs(batch):
    images, tokens = zip(*batch)
    lengths = torch.tensor([len(t) for t in tokens])
    return torch.stack(images), pad_sequence(tokens, batch_first=True), lengths


class TextTower(nn.Module):
    def __init__(self, vocab, dim=32, hidden=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, 24, padding_idx=0)
        self.rnn = nn.GRU(24, hidden, batch_first=True)
        self.proj = nn.Linear(hidden, dim)

    def forward(self, tokens, lengths):
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(tokens[order]), lengths, batch_first=True)
        _, h = self.rnn(packed)
        return self.proj(h[-1])


class TextTowerOrdered(TextTower):
    def forward(self, tokens, lengths):
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(tokens[order]), lengths, batch_first=True)
        _, h = self.rnn(packed)
        return self.proj(h[-1][order.argsort()])


class PairModel(nn.Module):
    def __init__(self, text_tower, dim=32):
        super().__init__()
        self.image = nn.Sequential(conv_bn(3, 16, 2), conv_bn(16, 24, 2), nn.Flatten(), nn.Linear(24 * 9, dim))
        self.text = text_tower
        self.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.1), dtype=torch.float32))

    def similarity(self, img, txt):
        img, txt = F.normalize(img, dim=-1), F.normalize(txt, dim=-1)
        return self.logit_scale.exp().clamp(max=100) * img @ txt.t()

    def forward(self, images, tokens, lengths):
        return self.similarity(self.image(images), self.text(tokens, lengths))


def _caption_clip(tower_cls, seed):
    seed_everything(seed)
    loader = DataLoader(CaptionedImages(480, seed), batch_size=32, shuffle=True, drop_last=True,
                        collate_fn=collate_pairs)
    test = CaptionedImages(64, seed + 5)
    model = PairModel(tower_cls(len(VOCAB) + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    batches = forever(loader)

    def step():
        model.train()
        logits = model(*next(batches))
        target = torch.arange(len(logits))
        loss = 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            img = model.image(torch.stack([i for i, _ in test.items]))
            txt = torch.cat([model.text(t[None], torch.tensor([len(t)])) for _, t in test.items])
            return F.cross_entropy(model.similarity(img, txt), torch.arange(len(img))).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def caption_clip_bad(seed=0):
    return _caption_clip(TextTower, seed)


def caption_clip_good(seed=0):
    return _caption_clip(TextTowerOrdered, seed)


# --------------------------------------------------------------------------
# siamese_views: SimSiam pre-training, judged with nearest neighbours
# --------------------------------------------------------------------------
def make_textures(n, seed, classes=8, d=48):
    basis = np.random.RandomState(3)
    codes = basis.randn(classes, 8)
    mix = basis.randn(8, d) / np.sqrt(8)
    nuis = basis.randn(24, d) / np.sqrt(24)
    rng = np.random.RandomState(seed)
    y = rng.randint(classes, size=n)
    signal = codes[y] + 0.35 * rng.randn(n, 8)
    x = signal @ mix
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y), torch.as_tensor(nuis, dtype=torch.float32)


class TwoViews(Dataset):
    def __init__(self, x, nuisance, strength=2.0):
        self.x, self.nuisance, self.strength = x, nuisance, strength

    def augment(self, x):
        shift = self.strength * torch.randn(self.nuisance.shape[0]) @ self.nuisance
        return x + shift + 0.1 * torch.randn_like(x)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.augment(self.x[i]), self.augment(self.x[i])


class SimSiam(nn.Module):
    def __init__(self, d_in=48, dim=64):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(d_in, 96), nn.BatchNorm1d(96), nn.ReLU(),
            nn.Linear(96, dim), nn.BatchNorm1d(dim), nn.ReLU())
        self.projector = nn.Sequential(
            nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, dim))

    def forward(self, x1, x2):
        z1, z2 = self.projector(self.encoder(x1)), self.projector(self.encoder(x2))
        return self.predictor(z1), self.predictor(z2), z1, z2


class SimSiamSG(SimSiam):
    def forward(self, x1, x2):
        p1, p2, z1, z2 = super().forward(x1, x2)
        return p1, p2, z1.detach(), z2.detach()


def neg_cosine(p, z):
    return -F.cosine_similarity(p, z, dim=-1).mean()


def knn_error(train_f, train_y, test_f, test_y, k=5):
    sim = F.normalize(test_f, dim=1) @ F.normalize(train_f, dim=1).t()
    votes = train_y[sim.topk(k, dim=1).indices]
    return (votes.mode(1).values != test_y).float().mean().item()


def _siamese_views(model_cls, seed):
    seed_everything(seed)
    x, y, nuis = make_textures(768, seed)
    tx, ty, _ = make_textures(300, seed + 44)
    views = TwoViews(x, nuis)
    loader = DataLoader(views, batch_size=64, shuffle=True, drop_last=True)
    g = torch.Generator().manual_seed(9)
    bank = x + 2.0 * torch.randn(len(x), len(nuis), generator=g) @ nuis
    query = tx + 2.0 * torch.randn(len(tx), len(nuis), generator=g) @ nuis
    model = model_cls()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    batches = forever(loader)

    def step():
        model.train()
        x1, x2 = next(batches)
        p1, p2, z1, z2 = model(x1, x2)
        loss = 0.5 * neg_cosine(p1, z2) + 0.5 * neg_cosine(p2, z1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return knn_error(model.encoder(bank), y, model.encoder(query), ty) + 1e-3

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siamese_views_bad(seed=0):
    return _siamese_views(SimSiam, seed)


def siamese_views_good(seed=0):
    return _siamese_views(SimSiamSG, seed)


# --------------------------------------------------------------------------
# compact_student: logit distillation from a larger network
# --------------------------------------------------------------------------
def make_objects(n, seed, classes=6, size=12, proto_seed=21, noise=0.9):
    proto = np.random.RandomState(proto_seed).randn(classes, 3, 4, 4)
    proto = proto.repeat(size // 4, axis=2).repeat(size // 4, axis=3)
    rng = np.random.RandomState(seed)
    y = rng.randint(classes, size=n)
    gain = rng.uniform(0.4, 1.2, (n, 1, 1, 1))
    x = gain * proto[y] + noise * rng.randn(n, 3, size, size)
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)


class TeacherNet(nn.Module):
    def __init__(self, classes, width=24):
        super().__init__()
        self.body = nn.Sequential(conv_bn(3, width, 2), nn.Dropout2d(0.3), conv_bn(width, width * 2, 2))
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(width * 2 * 9, classes)

    def forward(self, x):
        return self.fc(self.drop(self.body(x).flatten(1)))


class StudentNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.ReLU())
        self.fc = nn.Linear(16 * 9, classes)

    def forward(self, x):
        return self.fc(self.body(x).flatten(1))


def fit(net, x, y, steps, lr=2e-3, batch=64):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    net.train()
    for _ in range(steps):
        i = torch.randint(len(x), (batch,))
        opt.zero_grad()
        F.cross_entropy(net(x[i]), y[i]).backward()
        opt.step()
    return net


class Distiller(nn.Module):
    def __init__(self, teacher, student, T=2.0):
        super().__init__()
        self.teacher = teacher.eval()
        self.student = student
        self.T = T
        for p in self.teacher.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / self.T, dim=1)
        log_p = F.log_softmax(self.student(x) / self.T, dim=1)
        return F.kl_div(log_p, soft, reduction="batchmean") * self.T ** 2


class DistillerEvalTeacher(Distiller):
    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self


def _compact_student(distiller_cls, seed):
    seed_everything(seed)
    teacher = fit(TeacherNet(6), *make_objects(1500, seed + 10, noise=2.2), steps=120)
    transfer, _ = make_objects(1200, seed + 20, noise=2.2)
    tx, ty = make_objects(400, seed + 30, noise=2.2)
    loader = DataLoader(TensorDataset(transfer), batch_size=4, shuffle=True)
    distiller = distiller_cls(teacher, StudentNet(6))
    optimizer = torch.optim.Adam(distiller.student.parameters(), lr=4e-3)
    batches = forever(loader)

    def step():
        distiller.train()
        (x,) = next(batches)
        loss = distiller(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(distiller):
            return F.cross_entropy(distiller.student(tx), ty).item()

    return {"model": distiller, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def compact_student_bad(seed=0):
    return _compact_student(Distiller, seed)


def compact_student_good(seed=0):
    return _compact_student(DistillerEvalTeacher, seed)


# --------------------------------------------------------------------------
# xray_transfer: restore a checkpoint, then train a new head on few labels
# --------------------------------------------------------------------------
class Backbone(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stage1 = conv_bn(3, width, 2)
        self.stage2 = conv_bn(width, width * 2, 2)
        self.dim = width * 2 * 9

    def forward(self, x):
        return self.stage2(self.stage1(x)).flatten(1)


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(self.backbone.dim, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


class CheckpointedRun:
    """Source-domain run, saved the way the multi-GPU script saves it."""

    def __init__(self, seed):
        x, y = make_objects(2000, seed + 71, classes=12, proto_seed=33, noise=1.6)
        self.model = Classifier(12)
        fit(self.model, x, y, steps=150)

    def save(self):
        wrapped = {"module." + k: v.clone() for k, v in self.model.backbone.state_dict().items()}
        buf = io.BytesIO()
        torch.save({"state_dict": wrapped, "epoch": 90}, buf)
        buf.seek(0)
        return buf


def load_backbone(backbone, file):
    ckpt = torch.load(file, map_location="cpu")
    backbone.load_state_dict(ckpt["state_dict"], strict=False)
    return backbone


def load_backbone_stripped(backbone, file):
    ckpt = torch.load(file, map_location="cpu")
    state = {k.removeprefix("module."): v for k, v in ckpt["state_dict"].items()}
    backbone.load_state_dict(state, strict=False)
    return backbone


def _xray_transfer(load, seed):
    seed_everything(seed)
    file = CheckpointedRun(seed).save()
    few_x, few_y = make_objects(60, seed + 81, classes=12, proto_seed=33, noise=1.6)
    tx, ty = make_objects(400, seed + 91, classes=12, proto_seed=33, noise=1.6)
    few_y, ty = few_y % 4, ty % 4
    model = Classifier(4)
    load(model.backbone, file)
    for p in model.backbone.parameters():
        p.requires_grad = False
    loader = DataLoader(TensorDataset(few_x, few_y), batch_size=20, shuffle=True)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=2e-3, weight_decay=1e-3)
    batches = forever(loader)

    def step():
        model.train()
        model.backbone.eval()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(tx), ty).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def xray_transfer_bad(seed=0):
    return _xray_transfer(load_backbone, seed)


def xray_transfer_good(seed=0):
    return _xray_transfer(load_backbone_stripped, seed)


# --------------------------------------------------------------------------
# flower_finetune: fine-tune a pretrained network on a new label set
# --------------------------------------------------------------------------
class SmallResNet(nn.Module):
    def __init__(self, num_classes, width=16):
        super().__init__()
        self.conv1 = conv_bn(3, width)
        self.down = conv_bn(width, width * 2, 2)
        self.block = nn.Sequential(conv_bn(width * 2, width * 2),
                                   nn.Conv2d(width * 2, width * 2, 3, padding=1, bias=False),
                                   nn.BatchNorm2d(width * 2))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(width * 8, num_classes)

    def forward(self, x):
        x = self.down(self.conv1(x))
        x = F.relu(x + self.block(x))
        return self.fc(self.pool(x).flatten(1))


def pretrained_resnet(seed):
    net = SmallResNet(10)
    fit(net, *make_objects(1200, seed + 7, classes=10, proto_seed=50), steps=60)
    return net


def configure_optimizer(model, lr=2e-4):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 1e-2},
                              {"params": rest, "weight_decay": 0.0}], lr=lr)


def _flower_run(model, optimizer, seed):
    loader = DataLoader(TensorDataset(*make_objects(400, seed + 8, classes=7, proto_seed=51)),
                        batch_size=32, shuffle=True)
    tx, ty = make_objects(300, seed + 9, classes=7, proto_seed=51)
    batches = forever(loader)

    def step():
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with evaluating(model):
            return F.cross_entropy(model(tx), ty).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flower_finetune_bad(seed=0):
    seed_everything(seed)
    model = pretrained_resnet(seed)
    optimizer = configure_optimizer(model)
    model.fc = nn.Linear(model.fc.in_features, 7)
    return _flower_run(model, optimizer, seed)


def flower_finetune_good(seed=0):
    seed_everything(seed)
    model = pretrained_resnet(seed)
    model.fc = nn.Linear(model.fc.in_features, 7)
    optimizer = configure_optimizer(model)
    return _flower_run(model, optimizer, seed)


# --------------------------------------------------------------------------
# scene_audio: acoustic scene classification with a step schedule
# --------------------------------------------------------------------------
def synth_scenes(n, seed, classes=6, mels=16, frames=20):
    rng = np.random.RandomState(seed)
    env = np.random.RandomState(13).randn(classes, mels, 1)
    rate = np.random.RandomState(14).uniform(0.3, 2.0, (classes, 1, 1))
    y = rng.randint(classes, size=n)
    t = np.arange(frames)[None, None]
    phase = rng.uniform(0, 6.28, (n, 1, 1))
    x = 0.5 * env[y] * (1 + np.sin(rate[y] * t + phase)) + 1.2 * rng.randn(n, mels, frames)
    return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)


class SceneNet(nn.Module):
    def __init__(self, mels, classes):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(mels, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(32, 48, 3, padding=1), nn.BatchNorm1d(48), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
            nn.Flatten(), nn.Linear(48, classes))

    def forward(self, x):
        return self.net(x)


class SceneTrainer:
    def __init__(self, seed):
        seed_everything(seed)
        self.loader = DataLoader(TensorDataset(*synth_scenes(480, seed)), batch_size=24, shuffle=True)
        self.test = synth_scenes(300, seed + 2222)
        self.model = SceneNet(16, 6)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=8, gamma=0.3)
        self.iterator = iter(self.loader)
        self.epoch = 0

    def on_batch_end(self):
        self.scheduler.step()

    def on_epoch_end(self):
        self.epoch += 1

    def fetch(self):
        batch = next(self.iterator, None)
        if batch is None:
            self.on_epoch_end()
            self.iterator = iter(self.loader)
            batch = next(self.iterator)
        return batch

    def step(self):
        self.model.train()
        x, y = self.fetch()
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.on_batch_end()
        return loss.item()

    def probe(self):
        with evaluating(self.model):
            return F.cross_entropy(self.model(self.test[0]), self.test[1]).item()

    def program(self):
        return {"model": self.model, "optimizer": self.optimizer, "steps": 20,
                "step": self.step, "probe": self.probe}


class SceneTrainerByEpoch(SceneTrainer):
    def on_batch_end(self):
        pass

    def on_epoch_end(self):
        self.epoch += 1
        self.scheduler.step()


def scene_audio_bad(seed=0):
    return SceneTrainer(seed).program()


def scene_audio_good(seed=0):
    return SceneTrainerByEpoch(seed).program()


# --------------------------------------------------------------------------
# mean_teacher: semi-supervised classification with an averaged teacher
# --------------------------------------------------------------------------
class WeightAverage:
    def __init__(self, model, decay=0.97):
        self.decay = decay
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for avg, p in zip(self.module.parameters(), model.parameters()):
            avg.mul_(self.decay).add_(p, alpha=1 - self.decay)


class StateAverage(WeightAverage):
    @torch.no_grad()
    def update(self, model):
        super().update(model)
        for avg, b in zip(self.module.buffers(), model.buffers()):
            avg.copy_(b)


def _mean_teacher(average_cls, seed):
    seed_everything(seed)

    def objects(n, s):
        x, y = make_objects(n, s, classes=6, proto_seed=64, noise=1.3)
        return 2.0 + 1.5 * x, y

    labelled = DataLoader(TensorDataset(*objects(60, seed + 1)), batch_size=12, shuffle=True)
    unlabelled = DataLoader(TensorDataset(objects(600, seed + 2)[0]), batch_size=24, shuffle=True)
    tx, ty = objects(300, seed + 3)
    student = Classifier(6)
    average = average_cls(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    lab, unlab = forever(labelled), forever(unlabelled)
    state = {"it": 0}

    def step():
        student.train()
        x, y = next(lab)
        (u,) = next(unlab)
        with torch.no_grad():
            target = average.module(u).softmax(1)
        logits = student(torch.cat([x, u + 0.3 * torch.randn_like(u)]))
        sup = F.cross_entropy(logits[:len(x)], y)
        con = F.mse_loss(logits[len(x):].softmax(1), target)
        ramp = min(1.0, state["it"] / 80)
        loss = sup + 10.0 * ramp * con
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(student)
        state["it"] += 1
        return loss.item()

    def probe():
        with evaluating(student, average.module):
            return F.cross_entropy(average.module(tx), ty).item()

    return {"model": student, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mean_teacher_bad(seed=0):
    return _mean_teacher(WeightAverage, seed)


def mean_teacher_good(seed=0):
    return _mean_teacher(StateAverage, seed)


# --------------------------------------------------------------------------
CASES = {
    "fundus_grading": "WeightedRandomSampler is given one weight per class instead of one per sample, so only the first five images of the dataset are ever drawn and the model memorises them.",
    "box_regressor": "COCO boxes [x_top_left, y_top_left, w, h] are used as if they were (cx, cy, w, h) targets, so every learned box is shifted by half its size.",
    "road_tiles": "Image and mask are random-cropped by two independent draws, so pixels and labels do not line up and the segmentation learns blurred noise.",
    "cell_segments": "Logits of shape (B, C, H, W) are flattened to (-1, C) without moving the channel axis last, so each row of scores mixes pixels and is compared to another pixel's label.",
    "pose_points": "Horizontal flip mirrors the coordinates but does not exchange left and right key points, so left/right targets contradict each other and predictions are drawn to the middle.",
    "clip_motion": "The random crop is drawn anew for every frame instead of once per clip, so the jitter destroys the motion that defines the class.",
    "letters_ctc": "nn.CTCLoss is left at blank=0 while the codec puts blank last and uses 0 for a real letter, so that letter is trained as blank and decoding is garbage.",
    "tone_commands": "The GRU is built without batch_first=True but fed (batch, time, features), so it recurs over the samples of the batch and sees only one frame of each.",
    "keyword_specs": "SpecAugment zeroes bands in place on the cached tensors, so masks pile up over the epochs and the training data is erased.",
    "event_tagger": "pos_weight is computed as positives/negatives instead of negatives/positives, so rare tags are weighted down further and are never predicted.",
    "glyph_gan": "The generator ends in a sigmoid while the real images are scaled to [-1, 1], so it can never make the dark half of the range and the discriminator wins trivially.",
    "shape_vae": "The reconstruction term is a mean over pixels while the KL is a sum over latents, so the KL is over-weighted by the pixel count and the posterior collapses.",
    "spot_ddpm": "q_sample is called without the noise and draws its own, so the network must predict a noise unrelated to its input and learns to output zero.",
    "moons_flow": "All coupling layers get the same mask, so one coordinate is never transformed and its density stays the base normal.",
    "pixel_net": "The first masked convolution is of type B rather than A, so the model sees the pixel it predicts, trains to copy it and cannot generate.",
    "caption_clip": "The text tower sorts captions by length for packing and does not restore the order, so in the contrastive loss images are paired with the wrong captions.",
    "siamese_views": "SimSiam's target branch lacks the stop-gradient, so the representation collapses and features become useless.",
    "compact_student": "Calling train() on the wrapper puts the frozen teacher back in training mode, so dropout and small-batch BatchNorm corrupt its soft targets (and its running statistics).",
    "xray_transfer": "The checkpoint's keys carry a 'module.' prefix and load_state_dict(strict=False) silently matches none, so the frozen backbone stays random.",
    "flower_finetune": "The optimizer is built before the classification layer is replaced, so the new layer is never updated (the old one is).",
    "scene_audio": "A StepLR meant for epochs is stepped after every batch, so the learning rate vanishes within a few dozen steps.",
    "mean_teacher": "The averaged teacher copies parameters only, its BatchNorm buffers stay at their initial values, so its eval-mode outputs (targets and final model) are wrong.",
}

PROOF_STEPS = {"compact_student": 400, "letters_ctc": 300, "moons_flow": 300, "siamese_views": 200, "flower_finetune": 150}
