import contextlib
import copy
import functools
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASES = [
    {"name": "clf_softmax_then_ce",
     "what": "The network's forward ends in softmax and its output goes to CrossEntropyLoss, which applies log-softmax again: squeezed gradients, much slower and worse training."},
    {"name": "clf_hwc_view_to_chw",
     "what": "NHWC images are brought to NCHW with view instead of permute, which scrambles pixels and channels: the convolutions see no intact image."},
    {"name": "clf_scheduler_stepped_per_batch",
     "what": "StepLR(step_size=7 epochs, gamma=0.1) is stepped after every batch instead of every epoch: the learning rate is practically zero within two epochs."},
    {"name": "clf_ema_skips_bn_buffers",
     "what": "The EMA copy of the network averages parameters only; BatchNorm running statistics of the copy stay at their initial values, so the EMA model that gets evaluated is broken."},
    {"name": "audio_missing_zero_grad",
     "what": "optimizer.zero_grad() is never called in the keyword spotting loop: gradients of all past batches add up and training is unstable."},
    {"name": "seg_mask_bilinear_resize",
     "what": "Class index masks are resized with bilinear interpolation and cast to long: at object borders (and in thin objects) labels of unrelated classes arise."},
    {"name": "seg_unpaired_augmentation",
     "what": "Random flips are drawn separately for image and mask, so in most samples the mask does not belong to the image."},
    {"name": "det_flip_without_boxes",
     "what": "Random horizontal flip is applied to the image while the box stays as it was: half of the box targets are mirrored."},
    {"name": "det_box_loss_on_background",
     "what": "In the YOLO style loss the box regression is averaged over all grid cells rather than those with an object: boxes are pulled towards the zero targets of the background cells."},
    {"name": "kpt_unlabelled_joints_in_loss",
     "what": "Unlabelled key points (v=0, stored as 0,0 as in COCO) are not masked out of the coordinate loss: all predictions are pulled to the image corner."},
    {"name": "age_regression_broadcast",
     "what": "Predictions of shape (B,1) minus targets of shape (B,) broadcast to (B,B): the network only learns the mean age."},
    {"name": "audio_lstm_batch_first",
     "what": "Batches of shape (batch, time, mel) are fed to an LSTM made without batch_first=True: it recurs over the batch, and the last frame alone stands for the clip."},
    {"name": "audio_ctc_blank_is_char",
     "what": "The character map starts at index 0, which is also the CTC blank: the first character of the alphabet can't be learnt nor output."},
    {"name": "vae_mean_recon_sum_kl",
     "what": "Reconstruction loss is a mean over pixels while the KL term is a sum over batch and latents: KL dominates and the posterior collapses."},
    {"name": "gan_detached_generator_step",
     "what": "The detached fake batch of the discriminator step is used again for the generator's loss: the generator never gets a gradient."},
    {"name": "ddpm_uniform_noise",
     "what": "Noise in the DDPM training step is drawn with rand_like (uniform) instead of randn_like: the denoiser is useless for the Gaussian noise of the sampler."},
    {"name": "flow_coupling_same_mask",
     "what": "All RealNVP coupling layers use the same mask, so one half of the variables is never transformed."},
    {"name": "simclr_identical_views",
     "what": "The augmentation is drawn once and both SimCLR views are the same tensor: the contrastive task is trivial and no invariance is learnt."},
    {"name": "simsiam_no_stop_gradient",
     "what": "The SimSiam loss is taken without detaching the target branch: the representation collapses."},
    {"name": "kd_teacher_in_train_mode",
     "what": "The distillation teacher is never put in eval mode: dropout and batch statistics make its soft targets noisy, and its running statistics drift."},
    {"name": "finetune_head_after_optimizer",
     "what": "The classification head is replaced after the optimizer was built: the new head is never updated, the optimizer holds the old one."},
    {"name": "finetune_no_input_normalize",
     "what": "A pretrained network that expects mean/std normalised input is used as frozen feature extractor on images that were only scaled to [0,1]."},
]


# ----------------------------------------------------------------- helpers

@contextlib.contextmanager
def _evaluating(*models):
    state = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, flag in state:
            m.training = flag


def _forever(loader):
    while True:
        for batch in loader:
            yield batch


def _shapes(n, size, seed, classes=10, noise=0.08, rmin=0.22, rmax=0.40):
    g = torch.Generator().manual_seed(seed)

    def rand(lo, hi, *shape):
        return lo + (hi - lo) * torch.rand(*shape, generator=g)

    label = torch.randint(0, classes, (n,), generator=g)
    r = rand(rmin, rmax, n, 1, 1)
    cx = r + rand(0, 1, n, 1, 1) * (1 - 2 * r)
    cy = r + rand(0, 1, n, 1, 1) * (1 - 2 * r)
    grid = (torch.arange(size) + 0.5) / size
    dx = grid.view(1, 1, size) - cx
    dy = grid.view(1, size, 1) - cy
    ax, ay = dx.abs(), dy.abs()
    dist = (dx ** 2 + dy ** 2).sqrt()
    cheb = torch.maximum(ax, ay)
    forms = [
        cheb < r * 0.85,
        dist < r,
        ax + ay < r * 1.1,
        ((ax < r / 3) | (ay < r / 3)) & (cheb < r),
        (dist < r) & (dist > r * 0.55),
        (ay < r / 2.5) & (ax < r),
        (ax < r / 2.5) & (ay < r),
        (cheb < r * 0.9) & (cheb > r * 0.5),
        (ay < r) & (ax < (dy + r) / 2),
        ((ax - ay).abs() < r / 2.5) & (cheb < r),
    ]
    mask = torch.stack([f.expand(n, size, size) for f in forms[:classes]])[label, torch.arange(n)]
    bg = rand(0.2, 0.8, n, 3, 1, 1)
    sign = torch.where(bg > 0.5, -1.0, 1.0)
    fg = bg + sign * rand(0.2, 0.45, n, 3, 1, 1)
    m = mask.unsqueeze(1).float()
    img = bg * (1 - m) + fg * m + noise * torch.randn(n, 3, size, size, generator=g)
    box = torch.stack([cx, cy, 2 * r, 2 * r], 1).view(n, 4)
    return img.clamp(0, 1), mask, label, box


def _normalize(x):
    return (x - 0.5) / 0.25


def _error_rate(model, x, y):
    with _evaluating(model):
        return (model(x).argmax(1) != y).float().mean().item()


def _mel_bank(n_mels, n_freq):
    edges = torch.linspace(0, math.log1p(3.0), n_mels + 2).expm1() / 3.0 * (n_freq - 1)
    f = torch.arange(n_freq).float().view(-1, 1)
    lo, mid, hi = edges[:-2], edges[1:-1], edges[2:]
    up = (f - lo) / (mid - lo).clamp(min=1e-3)
    down = (hi - f) / (hi - mid).clamp(min=1e-3)
    return torch.minimum(up, down).clamp(min=0)


def _commands(n, seed, noise=0.3):
    g = torch.Generator().manual_seed(seed)
    sr, length = 4000, 1024
    u = torch.arange(length) / length
    label = torch.randint(0, 6, (n,), generator=g)
    contours = torch.stack([u, 1 - u, 1 - (2 * u - 1).abs(), (2 * u - 1).abs(),
                            (u > 0.5).float(), (u < 0.5).float()])
    base = 250 + 350 * torch.rand(n, 1, generator=g)
    span = 500 + 500 * torch.rand(n, 1, generator=g)
    freq = base + span * contours[label]
    phase = 2 * math.pi * torch.cumsum(freq / sr, 1) + 6.28 * torch.rand(n, 1, generator=g)
    amp = 0.4 + 0.6 * torch.rand(n, 1, generator=g)
    wave = amp * torch.sin(phase) + noise * torch.randn(n, length, generator=g)
    return wave, label


def _log_mel(wave, n_mels=24):
    spec = torch.stft(wave, n_fft=128, hop_length=32, window=torch.hann_window(128),
                      return_complex=True).abs() ** 2
    mel = torch.einsum("bft,fm->bmt", spec, _mel_bank(n_mels, spec.shape[1]))
    return torch.log(mel + 1e-5)


# ----------------------------------------------------------------- small CNN classifier

class _SoftmaxNet(nn.Module):
    def __init__(self, num_classes, softmax):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, num_classes)
        self.softmax = softmax

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.softmax(x, dim=1) if self.softmax else x


def _clf_softmax_then_ce(bad):
    torch.manual_seed(1)
    x, _, y, _ = _shapes(1600, 16, 11)
    xv, _, yv, _ = _shapes(600, 16, 12)
    x, xv = _normalize(x), _normalize(xv)
    batches = _forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    net = _SoftmaxNet(10, softmax=bad)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

    def step(i):
        net.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: _error_rate(net, xv, yv)}


def clf_softmax_then_ce_bad():
    return _clf_softmax_then_ce(True)


def clf_softmax_then_ce_good():
    return _clf_softmax_then_ce(False)


# ----------------------------------------------------------------- classifier on uint8 images

def _clf_hwc_view_to_chw(bad):
    torch.manual_seed(2)

    def load(n, seed):
        img, _, label, _ = _shapes(n, 16, seed)
        return (img * 255).round().byte().permute(0, 2, 3, 1).contiguous(), label

    images, labels = load(1600, 21)
    val_images, val_labels = load(600, 22)
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    batches = _forever(loader)

    def preprocess(batch):
        b, h, w, c = batch.shape
        batch = batch.float() / 255.0
        batch = batch.view(b, c, h, w) if bad else batch.permute(0, 3, 1, 2)
        return _normalize(batch)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        img, label = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(preprocess(img)), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: _error_rate(model, preprocess(val_images), val_labels)}


def clf_hwc_view_to_chw_bad():
    return _clf_hwc_view_to_chw(True)


def clf_hwc_view_to_chw_good():
    return _clf_hwc_view_to_chw(False)


# ----------------------------------------------------------------- tiny ResNet classifier

class _BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.short = nn.Sequential()
        if stride != 1 or cin != cout:
            self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.short(x))


class _TinyResNet(nn.Module):
    def __init__(self, num_classes=10, width=12):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _BasicBlock(width, width, 1)
        self.layer2 = _BasicBlock(width, 2 * width, 2)
        self.layer3 = _BasicBlock(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, num_classes)

    def features(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return x.mean((2, 3))

    def forward(self, x):
        return self.fc(self.features(x))


def _clf_scheduler_stepped_per_batch(bad):
    torch.manual_seed(3)
    x, _, y, _ = _shapes(640, 16, 31)
    xv, _, yv, _ = _shapes(600, 16, 32)
    x, xv = _normalize(x), _normalize(xv)
    train_loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    batches = _forever(train_loader)
    model = _TinyResNet(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)

    def step(i):
        model.train()
        image, target = next(batches)
        output = model(image)
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if bad or (i + 1) % len(train_loader) == 0:
            scheduler.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: _error_rate(model, xv, yv)}


def clf_scheduler_stepped_per_batch_bad():
    return _clf_scheduler_stepped_per_batch(True)


def clf_scheduler_stepped_per_batch_good():
    return _clf_scheduler_stepped_per_batch(False)


# ----------------------------------------------------------------- classifier with model EMA

class _ModelEma:
    def __init__(self, model, decay, params_only):
        self.module = copy.deepcopy(model).eval()
        for p in self.module.parameters():
            p.requires_grad_(False)
        self.decay = decay
        self.params_only = params_only

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)
        if not self.params_only:
            for e, b in zip(self.module.buffers(), model.buffers()):
                e.copy_(b)


def _clf_ema_skips_bn_buffers(bad):
    torch.manual_seed(4)
    x, _, y, _ = _shapes(1600, 16, 41)
    xv, _, yv, _ = _shapes(600, 16, 42)
    x, xv = _normalize(x), _normalize(xv)
    batches = _forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48 * 4, 10))
    ema = _ModelEma(model, decay=0.98, params_only=bad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(i):
        model.train()
        images, targets = next(batches)
        loss = F.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    return {"model": {"model": model, "ema": ema.module}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": lambda: _error_rate(ema.module, xv, yv)}


def clf_ema_skips_bn_buffers_bad():
    return _clf_ema_skips_bn_buffers(True)


def clf_ema_skips_bn_buffers_good():
    return _clf_ema_skips_bn_buffers(False)


# ----------------------------------------------------------------- keyword spotting CNN

class _KeywordCNN(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(32 * 6 * 8, n_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(self.drop(x.flatten(1)))


def _audio_missing_zero_grad(bad):
    torch.manual_seed(5)
    wave, y = _commands(1000, 51, noise=1.2)
    wave_v, yv = _commands(500, 52, noise=1.2)
    mel, mel_v = _log_mel(wave), _log_mel(wave_v)
    mean, std = mel.mean(), mel.std()
    mel = ((mel - mean) / std)[:, None, :, :32]
    mel_v = ((mel_v - mean) / std)[:, None, :, :32]
    batches = _forever(DataLoader(TensorDataset(mel, y), batch_size=32, shuffle=True))
    model = _KeywordCNN(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(i):
        model.train()
        data, target = next(batches)
        if not bad:
            optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(F.log_softmax(output, dim=1), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(mel_v), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_missing_zero_grad_bad():
    return _audio_missing_zero_grad(True)


def audio_missing_zero_grad_good():
    return _audio_missing_zero_grad(False)


# ----------------------------------------------------------------- multi-class segmentation

class _DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class _UNet(nn.Module):
    def __init__(self, n_classes, width=12):
        super().__init__()
        self.inc = _DoubleConv(3, width)
        self.down1 = _DoubleConv(width, width * 2)
        self.down2 = _DoubleConv(width * 2, width * 2)
        self.up1 = _DoubleConv(width * 4, width)
        self.up2 = _DoubleConv(width * 2, width)
        self.outc = nn.Conv2d(width, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = F.interpolate(x3, size=x2.shape[-2:], mode="nearest")
        x = self.up1(torch.cat([x2, x], 1))
        x = F.interpolate(x, size=x1.shape[-2:], mode="nearest")
        x = self.up2(torch.cat([x1, x], 1))
        return self.outc(x)


class _SegDataset(Dataset):
    def __init__(self, images, masks, size, mask_mode):
        self.images, self.masks, self.size, self.mask_mode = images, masks, size, mask_mode

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        size = (self.size, self.size)
        image = F.interpolate(self.images[idx][None], size=size, mode="bilinear", align_corners=False)[0]
        mask = self.masks[idx][None, None].float()
        if self.mask_mode == "bilinear":
            mask = F.interpolate(mask, size=size, mode="bilinear", align_corners=False)
        else:
            mask = F.interpolate(mask, size=size, mode="nearest")
        return _normalize(image), mask[0, 0].long()


def _mean_iou(pred, target, n_classes):
    ious = []
    for c in range(n_classes):
        p, t = pred == c, target == c
        union = (p | t).sum().item()
        if union:
            ious.append((p & t).sum().item() / union)
    return sum(ious) / len(ious)


def _seg_mask_bilinear_resize(bad):
    torch.manual_seed(6)

    def load(n, seed):
        img, m, label, _ = _shapes(n, 32, seed, classes=8, noise=0.04, rmin=0.18, rmax=0.34)
        return img, m.long() * (label.view(-1, 1, 1) + 1)

    images, masks = load(500, 61)
    val = _SegDataset(*load(200, 62), 20, "nearest")
    xv = torch.stack([val[k][0] for k in range(len(val))])
    mv = torch.stack([val[k][1] for k in range(len(val))])
    train = _SegDataset(images, masks, 20, "bilinear" if bad else "nearest")
    batches = _forever(DataLoader(train, batch_size=16, shuffle=True, drop_last=True))
    model = _UNet(9)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        image, mask = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(image), mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return 1 - _mean_iou(model(xv).argmax(1), mv, 9)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_mask_bilinear_resize_bad():
    return _seg_mask_bilinear_resize(True)


def seg_mask_bilinear_resize_good():
    return _seg_mask_bilinear_resize(False)


# ----------------------------------------------------------------- binary segmentation

class _RandomFlips:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, *tensors):
        if self.rng.random() < 0.5:
            tensors = [t.flip(-1) for t in tensors]
        if self.rng.random() < 0.5:
            tensors = [t.flip(-2) for t in tensors]
        return tensors


class _AugmentedSeg(Dataset):
    def __init__(self, images, masks, joint):
        self.images, self.masks, self.joint = images, masks, joint
        self.transform = _RandomFlips(random.Random(7))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image, mask = self.images[idx], self.masks[idx]
        if self.joint:
            image, mask = self.transform(image, mask)
        else:
            image, = self.transform(image)
            mask, = self.transform(mask)
        return image, mask


def _seg_unpaired_augmentation(bad):
    torch.manual_seed(7)

    def load(n, seed):
        img, m, _, _ = _shapes(n, 20, seed, noise=0.1, rmin=0.18, rmax=0.34)
        return _normalize(img), m[:, None].float()

    x, m = load(400, 71)
    xv, mv = load(200, 72)
    batches = _forever(DataLoader(_AugmentedSeg(x, m, joint=not bad), batch_size=16, shuffle=True,
                                  drop_last=True))
    model = _UNet(1, width=8)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        images, masks = next(batches)
        loss = criterion(model(images), masks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = model(xv) > 0
        gt = mv > 0.5
        inter = (pred & gt).sum((1, 2, 3)).float()
        union = (pred | gt).sum((1, 2, 3)).float()
        return 1 - (inter / union).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_unpaired_augmentation_bad():
    return _seg_unpaired_augmentation(True)


def seg_unpaired_augmentation_good():
    return _seg_unpaired_augmentation(False)


# ----------------------------------------------------------------- single object detector

class _Localizer(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten())
        self.cls_head = nn.Linear(32 * 36, n_classes)
        self.box_head = nn.Sequential(nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())

    def forward(self, x):
        f = self.backbone(x)
        return self.cls_head(f), self.box_head(f)


def _cxcywh_to_xyxy(b):
    return torch.cat([b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], -1)


def _paired_iou(a, b):
    a, b = _cxcywh_to_xyxy(a), _cxcywh_to_xyxy(b)
    wh = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    inter = wh.prod(-1)
    area = lambda t: (t[..., 2:] - t[..., :2]).clamp(min=0).prod(-1)
    return inter / (area(a) + area(b) - inter).clamp(min=1e-9)


class _BoxDataset(Dataset):
    def __init__(self, images, labels, boxes, flip_boxes):
        self.images, self.labels, self.boxes = images, labels, boxes
        self.flip_boxes = flip_boxes
        self.rng = random.Random(8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image, label, box = self.images[idx], self.labels[idx], self.boxes[idx].clone()
        if self.rng.random() < 0.5:
            image = image.flip(-1)
            if self.flip_boxes:
                box[0] = 1.0 - box[0]
        return image, label, box


def _det_flip_without_boxes(bad):
    torch.manual_seed(8)
    x, _, y, b = _shapes(1000, 24, 81, classes=4, rmin=0.12, rmax=0.28)
    xv, _, yv, bv = _shapes(300, 24, 82, classes=4, rmin=0.12, rmax=0.28)
    x, xv = _normalize(x), _normalize(xv)
    loader = DataLoader(_BoxDataset(x, y, b, flip_boxes=not bad), batch_size=32, shuffle=True,
                        drop_last=True)
    batches = _forever(loader)
    model = _Localizer(4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        images, labels, boxes = next(batches)
        logits, pred = model(images)
        loss = F.cross_entropy(logits, labels) + 5.0 * F.l1_loss(pred, boxes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return 1 - _paired_iou(model(xv)[1], bv).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_flip_without_boxes_bad():
    return _det_flip_without_boxes(True)


def det_flip_without_boxes_good():
    return _det_flip_without_boxes(False)


# ----------------------------------------------------------------- grid detector

def _scenes(n, seed, size=32, grid=4):
    g = torch.Generator().manual_seed(seed)
    images = 0.25 + 0.3 * torch.rand(n, 3, 1, 1, generator=g) + 0.06 * torch.randn(n, 3, size, size, generator=g)
    target = torch.zeros(n, grid, grid, 5)
    c = (torch.arange(size) + 0.5) / size
    for k in range(n):
        count = 1 + int(torch.randint(0, 3, (1,), generator=g))
        for cell in torch.randperm(grid * grid, generator=g)[:count].tolist():
            row, col = divmod(cell, grid)
            tx, ty, w, h = torch.rand(4, generator=g).tolist()
            tx, ty, w, h = 0.2 + 0.6 * tx, 0.2 + 0.6 * ty, 0.12 + 0.2 * w, 0.12 + 0.2 * h
            cx, cy = (col + tx) / grid, (row + ty) / grid
            inside = ((c - cx).abs().view(1, -1) < w / 2) & ((c - cy).abs().view(-1, 1) < h / 2)
            images[k, :, inside] = 0.75 + 0.2 * torch.rand(3, 1, generator=g)
            target[k, row, col] = torch.tensor([1.0, tx, ty, w, h])
    return _normalize(images.clamp(0, 1)), target


class _GridDetector(nn.Module):
    def __init__(self):
        super().__init__()

        def block(cin, cout):
            return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout),
                                 nn.LeakyReLU(0.1), nn.MaxPool2d(2))

        self.body = nn.Sequential(block(3, 16), block(16, 24), block(24, 48),
                                  nn.Conv2d(48, 48, 3, padding=1), nn.LeakyReLU(0.1))
        self.head = nn.Conv2d(48, 5, 1)

    def forward(self, x):
        out = self.head(self.body(x)).permute(0, 2, 3, 1)
        return out[..., 0], torch.sigmoid(out[..., 1:])


def _det_box_loss_on_background(bad):
    torch.manual_seed(9)
    x, t = _scenes(1000, 91)
    xv, tv = _scenes(200, 92)
    batches = _forever(DataLoader(TensorDataset(x, t), batch_size=16, shuffle=True, drop_last=True))
    model = _GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def compute_loss(obj_logit, box, target):
        obj = target[..., 0]
        loss_obj = F.binary_cross_entropy_with_logits(obj_logit, obj)
        if bad:
            loss_box = F.mse_loss(box, target[..., 1:])
        else:
            pos = obj > 0.5
            loss_box = F.mse_loss(box[pos], target[..., 1:][pos])
        return loss_obj + 5.0 * loss_box

    def step(i):
        model.train()
        images, target = next(batches)
        optimizer.zero_grad()
        obj_logit, box = model(images)
        loss = compute_loss(obj_logit, box, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            _, box = model(xv)
        pos = tv[..., 0] > 0.5

        def absolute(b):
            return torch.cat([b[:, :2] / 4, b[:, 2:]], 1)

        return 1 - _paired_iou(absolute(box[pos]), absolute(tv[..., 1:][pos])).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_box_loss_on_background_bad():
    return _det_box_loss_on_background(True)


def det_box_loss_on_background_good():
    return _det_box_loss_on_background(False)


# ----------------------------------------------------------------- key points

def _figures(n, seed, size=24, joints=4):
    g = torch.Generator().manual_seed(seed)
    center = 9 + 6 * torch.rand(n, 1, 2, generator=g)
    offset = torch.tensor([[-5.0, -5.0], [5.0, -5.0], [-5.0, 5.0], [5.0, 5.0]])
    kpts = center + offset + 2.5 * (torch.rand(n, joints, 2, generator=g) - 0.5)
    c = torch.arange(size).float() + 0.5
    d2 = (c.view(1, 1, 1, -1) - kpts[..., 0].view(n, joints, 1, 1)) ** 2 \
        + (c.view(1, 1, -1, 1) - kpts[..., 1].view(n, joints, 1, 1)) ** 2
    blobs = torch.exp(-d2 / 3.0)
    colour = torch.tensor([[1.0, 0.1, 0.1], [0.1, 1.0, 0.1], [0.1, 0.1, 1.0], [0.9, 0.9, 0.1]])
    img = torch.einsum("njhw,jc->nchw", blobs, colour) * 0.7 + 0.2
    img = (img + 0.08 * torch.randn(n, 3, size, size, generator=g)).clamp(0, 1)
    vis = (torch.rand(n, joints, generator=g) > 0.3).float()
    return _normalize(img), kpts, vis


def _kpt_unlabelled_joints_in_loss(bad):
    torch.manual_seed(10)
    size = 24
    x, kpts, vis = _figures(1000, 101)
    xv, kv, _ = _figures(300, 102)
    annotations = torch.cat([kpts * vis[..., None], vis[..., None]], -1)
    batches = _forever(DataLoader(TensorDataset(x, annotations), batch_size=32, shuffle=True))
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        images, ann = next(batches)
        coords, v = ann[..., :2] / size, ann[..., 2:]
        pred = model(images).view(-1, 4, 2)
        err = F.smooth_l1_loss(pred, coords, reduction="none", beta=0.05)
        if bad:
            loss = err.mean()
        else:
            loss = (err * v).sum() / (2 * v.sum()).clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = model(xv).view(-1, 4, 2) * size
        return (pred - kv).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def kpt_unlabelled_joints_in_loss_bad():
    return _kpt_unlabelled_joints_in_loss(True)


def kpt_unlabelled_joints_in_loss_good():
    return _kpt_unlabelled_joints_in_loss(False)


# ----------------------------------------------------------------- age estimation

class _AgeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.regressor = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.regressor(self.features(x))


def _age_regression_broadcast(bad):
    torch.manual_seed(11)
    x, _, _, b = _shapes(1200, 16, 111, classes=2, rmin=0.15, rmax=0.45)
    xv, _, _, bv = _shapes(400, 16, 112, classes=2, rmin=0.15, rmax=0.45)
    x, xv = _normalize(x), _normalize(xv)

    def to_age(box):
        return 10 + 70 * (box[:, 2] / 2 - 0.15) / 0.30

    age, age_v = to_age(b), to_age(bv)
    mean, std = age.mean(), age.std()
    batches = _forever(DataLoader(TensorDataset(x, age), batch_size=32, shuffle=True))
    model = _AgeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        images, ages = next(batches)
        targets = (ages - mean) / std
        outputs = model(images)
        if not bad:
            outputs = outputs.squeeze(1)
        loss = ((outputs - targets) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            pred = model(xv).squeeze(1) * std + mean
        return (pred - age_v).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def age_regression_broadcast_bad():
    return _age_regression_broadcast(True)


def age_regression_broadcast_good():
    return _age_regression_broadcast(False)


# ----------------------------------------------------------------- speech command LSTM

class _CommandLSTM(nn.Module):
    def __init__(self, n_mels, hidden, n_classes, batch_first):
        super().__init__()
        self.lstm = nn.LSTM(n_mels, hidden, num_layers=1, batch_first=batch_first)
        self.fc = nn.Linear(hidden, n_classes)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1, :])


def _audio_lstm_batch_first(bad):
    torch.manual_seed(12)
    wave, y = _commands(1200, 121, noise=1.2)
    wave_v, yv = _commands(400, 122, noise=1.2)
    mel, mel_v = _log_mel(wave).transpose(1, 2), _log_mel(wave_v).transpose(1, 2)
    mean, std = mel.mean((0, 1)), mel.std((0, 1))
    mel, mel_v = (mel - mean) / std, (mel_v - mean) / std
    batches = _forever(DataLoader(TensorDataset(mel, y), batch_size=32, shuffle=True))
    model = _CommandLSTM(24, 64, 6, batch_first=not bad)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        features, labels = next(batches)
        outputs = model(features)
        loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: _error_rate(model, mel_v, yv)}


def audio_lstm_batch_first_bad():
    return _audio_lstm_batch_first(True)


def audio_lstm_batch_first_good():
    return _audio_lstm_batch_first(False)


# ----------------------------------------------------------------- CTC speech recogniser

_ALPHABET = "abcdefgh"


def _utterances(n, seed, n_mels=16):
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(len(_ALPHABET), n_mels, generator=torch.Generator().manual_seed(1300))
    data = []
    for _ in range(n):
        length = 3 + int(torch.randint(0, 4, (1,), generator=g))
        chars = torch.randint(0, len(_ALPHABET), (length,), generator=g).tolist()
        frames = [torch.zeros(2, n_mels)]
        for c in chars:
            frames.append(templates[c].expand(2 + int(torch.randint(0, 3, (1,), generator=g)), -1))
            frames.append(torch.zeros(1 + int(torch.randint(0, 2, (1,), generator=g)), n_mels))
        feats = torch.cat(frames)
        feats = feats + 0.9 * torch.randn(feats.shape, generator=g)
        data.append((feats, "".join(_ALPHABET[c] for c in chars)))
    return data


class _SpeechModel(nn.Module):
    def __init__(self, n_mels, hidden, n_out):
        super().__init__()
        self.conv = nn.Conv1d(n_mels, hidden, 3, padding=1)
        self.gru = nn.GRU(hidden, hidden // 2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(hidden, n_out)

    def forward(self, x):
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x, _ = self.gru(x)
        return F.log_softmax(self.fc(x), dim=-1)


def _edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def _audio_ctc_blank_is_char(bad):
    torch.manual_seed(13)
    first = 0 if bad else 1
    char_to_idx = {c: k + first for k, c in enumerate(_ALPHABET)}
    idx_to_char = {k: c for c, k in char_to_idx.items()}

    def collate(items):
        feats = pad_sequence([f for f, _ in items], batch_first=True)
        targets = torch.tensor([char_to_idx[c] for _, s in items for c in s])
        return (feats, targets, torch.tensor([len(f) for f, _ in items]),
                torch.tensor([len(s) for _, s in items]))

    val = _utterances(100, 132)
    batches = _forever(DataLoader(_utterances(800, 131), batch_size=16, shuffle=True, collate_fn=collate))
    model = _SpeechModel(16, 48, len(_ALPHABET) + 1)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
        feats, targets, input_lengths, target_lengths = next(batches)
        log_probs = model(feats).transpose(0, 1)
        loss = criterion(log_probs, targets, input_lengths, target_lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.item()

    def probe():
        errors = total = 0
        with _evaluating(model):
            for feats, text in val:
                path = model(feats[None])[0].argmax(-1).tolist()
                out = [p for k, p in enumerate(path) if p != 0 and (k == 0 or p != path[k - 1])]
                errors += _edit_distance("".join(idx_to_char.get(p, "?") for p in out), text)
                total += len(text)
        return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def audio_ctc_blank_is_char_bad():
    return _audio_ctc_blank_is_char(True)


def audio_ctc_blank_is_char_good():
    return _audio_ctc_blank_is_char(False)


# ----------------------------------------------------------------- VAE

class _VAE(nn.Module):
    def __init__(self, dim=256, hidden=128, latent=8):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, dim)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 256))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def _vae_mean_recon_sum_kl(bad):
    torch.manual_seed(14)
    x = _shapes(1500, 16, 141, classes=6)[1][:, None].float()
    xv = _shapes(400, 16, 142, classes=6)[1][:, None].float()
    batches = _forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True))
    model = _VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_function(recon_x, x, mu, logvar):
        reduction = "mean" if bad else "sum"
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 256), reduction=reduction)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + kld

    def step(i):
        model.train()
        data, = next(batches)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item() / len(data)

    def probe():
        g = torch.Generator().manual_seed(143)
        with _evaluating(model):
            flat = xv.view(-1, 256)
            mu, logvar = model.encode(flat)
            z = mu + torch.randn(mu.shape, generator=g) * torch.exp(0.5 * logvar)
            bce = F.binary_cross_entropy(model.decode(z), flat, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return ((bce + kld) / len(xv)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_mean_recon_sum_kl_bad():
    return _vae_mean_recon_sum_kl(True)


def vae_mean_recon_sum_kl_good():
    return _vae_mean_recon_sum_kl(False)


# ----------------------------------------------------------------- DCGAN

class _Generator(nn.Module):
    def __init__(self, nz=16, ngf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1), nn.Tanh())

    def forward(self, z):
        return self.main(z)


class _Discriminator(nn.Module):
    def __init__(self, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0))

    def forward(self, x):
        return self.main(x).view(-1)


def _weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def _sliced_wasserstein(a, b, seed, n_proj=64):
    g = torch.Generator().manual_seed(seed)
    proj = F.normalize(torch.randn(a.shape[1], n_proj, generator=g), dim=0)
    return ((a @ proj).sort(0).values - (b @ proj).sort(0).values).abs().mean().item()


def _gan_detached_generator_step(bad):
    torch.manual_seed(15)
    nz = 16
    x = _shapes(1500, 16, 151, classes=3)[1][:, None].float() * 2 - 1
    xv = _shapes(400, 16, 152, classes=3)[1][:, None].float() * 2 - 1
    z_eval = torch.randn(400, nz, 1, 1, generator=torch.Generator().manual_seed(153))
    batches = _forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True, drop_last=True))
    netG, netD = _Generator(nz), _Discriminator()
    netG.apply(_weights_init)
    netD.apply(_weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step(i):
        netG.train()
        netD.train()
        real, = next(batches)
        ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
        noise = torch.randn(len(real), nz, 1, 1)
        fake = netG(noise)
        if bad:
            fake = fake.detach()

        netD.zero_grad()
        errD = criterion(netD(real), ones) + criterion(netD(fake.detach()), zeros)
        errD.backward()
        optimizerD.step()

        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        return errG.item()

    def probe():
        with _evaluating(netG):
            fake = netG(z_eval)
        return _sliced_wasserstein(fake.flatten(1), xv.flatten(1), 154)

    return {"model": {"G": netG, "D": netD}, "optimizer": [optimizerD, optimizerG], "steps": 20,
            "step": step, "probe": probe}


def gan_detached_generator_step_bad():
    return _gan_detached_generator_step(True)


def gan_detached_generator_step_good():
    return _gan_detached_generator_step(False)


# ----------------------------------------------------------------- DDPM

class _TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
        args = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat([args.sin(), args.cos()], -1))


class _Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.time = _TimeEmbedding(32)
        self.inc = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, width * 2, 3, stride=2, padding=1)
        self.to_mid = nn.Linear(32, width * 2)
        self.norm = nn.GroupNorm(4, width * 2)
        self.mid = nn.Conv2d(width * 2, width * 2, 3, padding=1)
        self.up = nn.ConvTranspose2d(width * 2, width, 4, 2, 1)
        self.out = nn.Conv2d(width * 2, 1, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(t)
        h1 = F.silu(self.inc(x))
        h2 = F.silu(self.down(h1) + self.to_mid(emb)[:, :, None, None])
        h2 = h2 + F.silu(self.mid(self.norm(h2)))
        return self.out(torch.cat([h1, F.silu(self.up(h2))], 1))


def _ddpm_uniform_noise(bad):
    torch.manual_seed(16)
    timesteps = 200
    betas = torch.linspace(5e-4, 0.1, timesteps)
    alphas_cumprod = torch.cumprod(1 - betas, 0)
    x = _shapes(1200, 16, 161, classes=4)[1][:, None].float() * 2 - 1
    xv = _shapes(200, 16, 162, classes=4)[1][:, None].float() * 2 - 1
    batches = _forever(DataLoader(TensorDataset(x), batch_size=32, shuffle=True))
    model = _Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def q_sample(x0, t, noise):
        a = alphas_cumprod[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def step(i):
        model.train()
        x0, = next(batches)
        t = torch.randint(0, timesteps, (len(x0),))
        noise = torch.rand_like(x0) if bad else torch.randn_like(x0)
        pred = model(q_sample(x0, t, noise), t)
        loss = F.mse_loss(pred, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        g = torch.Generator().manual_seed(163)
        t = torch.randint(0, timesteps, (len(xv),), generator=g)
        noise = torch.randn(xv.shape, generator=g)
        with _evaluating(model):
            return F.mse_loss(model(q_sample(xv, t, noise), t), noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_uniform_noise_bad():
    return _ddpm_uniform_noise(True)


def ddpm_uniform_noise_good():
    return _ddpm_uniform_noise(False)


# ----------------------------------------------------------------- RealNVP

class _RealNVP(nn.Module):
    def __init__(self, masks, hidden=64):
        super().__init__()
        dim = masks.shape[1]
        self.register_buffer("masks", masks)

        def net(last):
            return nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU(), nn.Linear(hidden, hidden),
                                 nn.LeakyReLU(), nn.Linear(hidden, dim), *last)

        self.s = nn.ModuleList([net([nn.Tanh()]) for _ in range(len(masks))])
        self.t = nn.ModuleList([net([]) for _ in range(len(masks))])

    def forward(self, x):
        log_det, z = x.new_zeros(len(x)), x
        for k in reversed(range(len(self.masks))):
            m = self.masks[k]
            z_ = m * z
            s = self.s[k](z_) * (1 - m)
            t = self.t[k](z_) * (1 - m)
            z = (1 - m) * (z - t) * torch.exp(-s) + z_
            log_det = log_det - s.sum(1)
        return z, log_det

    def log_prob(self, x):
        z, log_det = self.forward(x)
        return -0.5 * (z ** 2).sum(1) - math.log(2 * math.pi) + log_det


def _moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    a = math.pi * torch.rand(n, generator=g)
    up = torch.rand(n, generator=g) < 0.5
    x = torch.where(up, a.cos(), 1 - a.cos())
    y = torch.where(up, a.sin(), 0.5 - a.sin())
    pts = torch.stack([x, y], 1) + 0.05 * torch.randn(n, 2, generator=g)
    return (pts - torch.tensor([0.5, 0.25])) / torch.tensor([0.87, 0.5])


def _flow_coupling_same_mask(bad):
    torch.manual_seed(17)
    x, xv = _moons(4000, 171), _moons(1000, 172)
    batches = _forever(DataLoader(TensorDataset(x), batch_size=128, shuffle=True))
    if bad:
        masks = torch.tensor([[0.0, 1.0]] * 6)
    else:
        masks = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 3)
    flow = _RealNVP(masks)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    def step(i):
        flow.train()
        batch, = next(batches)
        loss = -flow.log_prob(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(flow):
            return -flow.log_prob(xv).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def flow_coupling_same_mask_bad():
    return _flow_coupling_same_mask(True)


def flow_coupling_same_mask_good():
    return _flow_coupling_same_mask(False)


# ----------------------------------------------------------------- SimCLR

def _augment(x):
    n = len(x)
    scale = 0.75 + 0.4 * torch.rand(n)
    flip = torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
    shift = 0.5 * (torch.rand(n, 2) - 0.5)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = scale * flip
    theta[:, 1, 1] = scale
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    gain = 0.6 + 0.8 * torch.rand(n, 3, 1, 1)
    bias = 0.5 * (torch.rand(n, 3, 1, 1) - 0.5)
    x = (x * gain + bias).clamp(0, 1)
    invert = (torch.rand(n, 1, 1, 1) < 0.5).float()
    x = invert * (1 - x) + (1 - invert) * x
    return _normalize(x)


class _Encoder(nn.Module):
    def __init__(self, width=16, dim=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width * 2, 3, padding=1, bias=False), nn.BatchNorm2d(width * 2), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width * 2, dim, 3, padding=1, bias=False), nn.BatchNorm2d(dim), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.net(x)


def _knn_error(encoder, bank_x, bank_y, xv, yv, k=5):
    with _evaluating(encoder):
        a = encoder(_normalize(bank_x))
        b = encoder(_normalize(xv))
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    idx = (b @ a.t()).topk(k, dim=1).indices
    votes = F.one_hot(bank_y[idx], int(bank_y.max()) + 1).sum(1)
    return (votes.argmax(1) != yv).float().mean().item()


def _simclr_identical_views(bad):
    torch.manual_seed(18)
    x, _, y, _ = _shapes(1500, 16, 181, classes=6, rmin=0.28, rmax=0.42, noise=0.04)
    xv, _, yv, _ = _shapes(400, 16, 182, classes=6, rmin=0.28, rmax=0.42, noise=0.04)
    batches = _forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))
    encoder = _Encoder()
    projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    params = list(encoder.parameters()) + list(projector.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-3, weight_decay=1e-6)

    def nt_xent(z1, z2, temperature=0.2):
        n = len(z1)
        z = F.normalize(torch.cat([z1, z2]), dim=1)
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        target = torch.cat([torch.arange(n) + n, torch.arange(n)])
        return F.cross_entropy(sim, target)

    def step(i):
        encoder.train()
        projector.train()
        images, = next(batches)
        x_i = _augment(images)
        x_j = x_i if bad else _augment(images)
        loss = nt_xent(projector(encoder(x_i)), projector(encoder(x_j)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": {"encoder": encoder, "projector": projector}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": lambda: _knn_error(encoder, x, y, xv, yv)}


def simclr_identical_views_bad():
    return _simclr_identical_views(True)


def simclr_identical_views_good():
    return _simclr_identical_views(False)


# ----------------------------------------------------------------- SimSiam

class _SimSiam(nn.Module):
    def __init__(self, dim=64, pred_dim=16):
        super().__init__()
        self.encoder = _Encoder(dim=dim)
        self.projector = nn.Sequential(
            nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(inplace=True),
            nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim, affine=False))
        self.predictor = nn.Sequential(
            nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(inplace=True),
            nn.Linear(pred_dim, dim))

    def forward(self, x1, x2):
        z1 = self.projector(self.encoder(x1))
        z2 = self.projector(self.encoder(x2))
        return self.predictor(z1), self.predictor(z2), z1, z2


def _simsiam_no_stop_gradient(bad):
    torch.manual_seed(19)
    x, _, y, _ = _shapes(1500, 16, 191, classes=6, rmin=0.28, rmax=0.42, noise=0.04)
    xv, _, yv, _ = _shapes(400, 16, 192, classes=6, rmin=0.28, rmax=0.42, noise=0.04)
    batches = _forever(DataLoader(TensorDataset(x), batch_size=64, shuffle=True, drop_last=True))
    model = _SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        images, = next(batches)
        p1, p2, z1, z2 = model(_augment(images), _augment(images))
        if not bad:
            z1, z2 = z1.detach(), z2.detach()
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: _knn_error(model.encoder, x, y, xv, yv)}


def simsiam_no_stop_gradient_bad():
    return _simsiam_no_stop_gradient(True)


def simsiam_no_stop_gradient_good():
    return _simsiam_no_stop_gradient(False)


# ----------------------------------------------------------------- distillation

class _Teacher(nn.Module):
    def __init__(self, n_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 24, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(24)
        self.conv2 = nn.Conv2d(24, 48, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(48)
        self.drop1 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(48 * 16, 96)
        self.drop2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(96, n_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.fc1(self.drop1(x.flatten(1))))
        return self.fc2(self.drop2(x))


class _Student(nn.Module):
    def __init__(self, n_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(24 * 16, 48), nn.ReLU(), nn.Linear(48, n_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


@functools.lru_cache(maxsize=None)
def _teacher_weights():
    torch.manual_seed(200)
    x, _, y, _ = _shapes(3000, 16, 201)
    batches = _forever(DataLoader(TensorDataset(_normalize(x), y), batch_size=64, shuffle=True))
    net = _Teacher()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(700):
        xb, yb = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        optimizer.step()
    return net.state_dict()


def _kd_teacher_in_train_mode(bad):
    weights = _teacher_weights()
    torch.manual_seed(20)
    x, _, y, _ = _shapes(3000, 16, 202)
    xv, _, yv, _ = _shapes(600, 16, 203)
    x, xv = _normalize(x), _normalize(xv)
    batches = _forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True))
    teacher = _Teacher()
    teacher.load_state_dict(weights)
    for p in teacher.parameters():
        p.requires_grad = False
    if not bad:
        teacher.eval()
    student = _Student()
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    T, alpha = 2.0, 0.9

    def step(i):
        student.train()
        inputs, labels = next(batches)
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft = F.kl_div(F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1),
                        reduction="batchmean") * T * T
        hard = F.cross_entropy(student_logits, labels)
        loss = alpha * soft + (1 - alpha) * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(student):
            return F.cross_entropy(student(xv), yv).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def kd_teacher_in_train_mode_bad():
    return _kd_teacher_in_train_mode(True)


def kd_teacher_in_train_mode_good():
    return _kd_teacher_in_train_mode(False)


# ----------------------------------------------------------------- fine-tuning

_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@functools.lru_cache(maxsize=None)
def _resnet_weights():
    torch.manual_seed(210)
    x, _, y, _ = _shapes(2000, 16, 211)
    batches = _forever(DataLoader(TensorDataset((x - _MEAN) / _STD, y), batch_size=32, shuffle=True))
    net = _TinyResNet(10)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(300):
        xb, yb = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(net(xb), yb).backward()
        optimizer.step()
    return net.state_dict()


def _tiny_resnet(pretrained=True):
    net = _TinyResNet(10)
    if pretrained:
        net.load_state_dict(_resnet_weights())
    return net


def _two_groups(n, seed):
    img, _, label, _ = _shapes(n, 16, seed, rmin=0.20, rmax=0.36, noise=0.1)
    return img, torch.tensor([0, 1, 2, 3, 1, 4, 4, 0, 2, 3])[label]


def _finetune_head_after_optimizer(bad):
    _resnet_weights()
    torch.manual_seed(21)
    x, y = _two_groups(600, 212)
    xv, yv = _two_groups(500, 213)
    x, xv = (x - _MEAN) / _STD, (xv - _MEAN) / _STD
    batches = _forever(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, drop_last=True))
    model = _tiny_resnet(pretrained=True)
    num_ftrs = model.fc.in_features
    if bad:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        model.fc = nn.Linear(num_ftrs, 5)
    else:
        model.fc = nn.Linear(num_ftrs, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with _evaluating(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def finetune_head_after_optimizer_bad():
    return _finetune_head_after_optimizer(True)


def finetune_head_after_optimizer_good():
    return _finetune_head_after_optimizer(False)


def _finetune_no_input_normalize(bad):
    _resnet_weights()
    torch.manual_seed(22)

    def transform(images):
        images = images.float() / 255.0
        return images if bad else (images - _MEAN) / _STD

    def load(n, seed):
        img, label = _two_groups(n, seed)
        return (img * 255).round().byte(), label

    x, y = load(800, 221)
    xv, yv = load(500, 222)
    batches = _forever(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    model = _tiny_resnet(pretrained=True)
    for p in model.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=3e-3)

    def step(i):
        model.eval()
        model.fc.train()
        images, labels = next(batches)
        logits = model(transform(images))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step,
            "probe": lambda: _error_rate(model, transform(xv), yv)}


def finetune_no_input_normalize_bad():
    return _finetune_no_input_normalize(True)


def finetune_no_input_normalize_good():
    return _finetune_no_input_normalize(False)
