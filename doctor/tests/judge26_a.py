import copy
import math
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASES = [
    {"name": "digits_softmax_cross_entropy",
     "what": "The classifier's forward ends in softmax and the loss is cross_entropy, which applies log_softmax again; gradients shrink and the loss cannot fall below a floor, so learning is slow and the net stays under-trained."},
    {"name": "finetune_no_zero_grad",
     "what": "Fine-tuning loop never calls optimizer.zero_grad(), so the gradients of all past batches pile up; the updates oscillate and grow and the pretrained network is damaged."},
    {"name": "finetune_head_after_optimizer",
     "what": "The pretrained network's fc is replaced by a new head after the optimizer was built, so the optimizer holds the old fc and the new head is never updated; only the backbone bends to a random head."},
    {"name": "resnet_steplr_every_batch",
     "what": "StepLR whose step_size is meant in epochs is stepped after every batch, so the learning rate has fallen to almost nothing within the first two epochs."},
    {"name": "imagefolder_no_shuffle",
     "what": "The training loader reads a folder dataset sorted by class without shuffling, so each batch holds one class and the net keeps forgetting all others."},
    {"name": "unet_flip_image_only",
     "what": "Random horizontal flip augmentation is applied to the image and not to its mask, so half the training masks do not match their images."},
    {"name": "fcn_mask_bilinear_resize",
     "what": "The class-id masks are resized with bilinear interpolation and cast to long, which makes pixels at object borders carry ids of unrelated classes in between."},
    {"name": "bbox_pixels_vs_sigmoid",
     "what": "The box head ends in a sigmoid but the target boxes are left in pixels and not divided by the image size, so the outputs saturate at 1 and the boxes are never learnt."},
    {"name": "keypoints_no_visibility",
     "what": "Unlabelled key points (v=0, stored as 0,0) enter the regression loss because it is not masked with the visibility flag, which pulls all predictions to the image corner."},
    {"name": "age_regression_broadcast",
     "what": "Output of shape (N,1) and target of shape (N,) are handed to the MSE loss, which broadcasts them to (N,N); the net learns to predict the mean."},
    {"name": "ctc_blank_is_a_letter",
     "what": "Characters are numbered from 0 while CTCLoss uses blank=0, so the first letter shares its id with the blank and is never recognised."},
    {"name": "keyword_view_for_transpose",
     "what": "The (batch, time, mel) features are brought to (batch, mel, time) for Conv1d by view and not by transpose, which scrambles time and frequency."},
    {"name": "vae_mean_recon_sum_kl",
     "what": "The VAE's reconstruction term is averaged over all pixels and the batch while the KL term is summed, so the KL dominates and the posterior collapses to the prior."},
    {"name": "gan_detach_for_generator",
     "what": "In the generator's step the fake images are detached before they go through the discriminator, so the generator gets no gradient and never learns."},
    {"name": "wgan_gp_without_create_graph",
     "what": "The gradient penalty's autograd.grad call lacks create_graph=True, so the penalty is a constant for backward and the critic is not held to be Lipschitz."},
    {"name": "ddpm_uniform_noise",
     "what": "The forward diffusion draws its noise with rand_like (uniform in [0,1)) and not randn_like, so the denoiser is trained for other noise than the sampler starts from."},
    {"name": "realnvp_same_mask",
     "what": "All coupling layers use the same mask instead of alternating ones, so one half of the dimensions is never transformed by the flow."},
    {"name": "simclr_same_view_twice",
     "what": "The SimCLR pair dataset augments the image once and returns that one view twice, so the positives are identical and no invariance to the augmentations is learnt."},
    {"name": "simsiam_no_stop_gradient",
     "what": "The target branch of SimSiam is not detached, so both branches chase each other and the representation collapses."},
    {"name": "distill_kl_without_log",
     "what": "F.kl_div of the distillation loss gets the student's softmax and not its log_softmax, so the soft-target term is no KL divergence and does not transfer the teacher's distribution."},
    {"name": "eval_mode_after_validation",
     "what": "The validation function puts the model in eval mode and the training loop calls model.train() only once before the first epoch, so from the second epoch on dropout and batch statistics are off in training."},
    {"name": "vdsr_layers_in_list",
     "what": "The middle layers of the super-resolution net are kept in a plain Python list and not nn.ModuleList, so they are not in model.parameters() and are never trained."},
]


def _cycle(loader):
    while True:
        for batch in loader:
            yield batch


@contextmanager
def _measuring(*models):
    modes = [(m, m.training) for model in models for m in model.modules()]
    for model in models:
        model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1234)
        yield
    for m, mode in modes:
        m.training = mode


def _textures(n_train, n_val, classes, size, noise, seed, channels=1, shift=2):
    g = torch.Generator().manual_seed(seed)
    n = n_train + n_val
    proto = F.interpolate(torch.randn(classes, channels, 4, 4, generator=g), size=(size, size),
                          mode="bicubic", align_corners=False)
    y = torch.randint(classes, (n,), generator=g)
    shifts = torch.randint(-shift, shift + 1, (n, 2), generator=g).tolist()
    x = torch.stack([torch.roll(proto[c], s, dims=(1, 2)) for c, s in zip(y.tolist(), shifts)])
    x = x + noise * torch.randn(x.shape, generator=g)
    x = (x - x[:n_train].mean()) / x[:n_train].std()
    return (x[:n_train], y[:n_train]), (x[n_train:], y[n_train:])


def _sliced_wasserstein(a, b, projections=64):
    a, b = a.flatten(1), b.flatten(1)
    n = min(len(a), len(b))
    directions = F.normalize(torch.randn(a.shape[1], projections), dim=0)
    pa = (a[:n] @ directions).sort(dim=0).values
    pb = (b[:n] @ directions).sort(dim=0).values
    return (pa - pb).abs().mean().item()


def _knn_error(bank, bank_y, query, query_y, k=10):
    bank, query = F.normalize(bank, dim=1), F.normalize(query, dim=1)
    idx = (query @ bank.t()).topk(k, dim=1).indices
    pred = bank_y[idx].mode(dim=1).values
    return (pred != query_y).float().mean().item()


# ---------------------------------------------------------------- digits, pytorch/examples style

class DigitNet(nn.Module):
    def __init__(self, probabilities):
        super().__init__()
        self.probabilities = probabilities
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 6 * 6, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout(x), 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(self.dropout(x))
        if self.probabilities:
            return F.softmax(x, dim=1)
        return x


def _digits(bad):
    torch.manual_seed(0)
    train, (xv, yv) = _textures(2048, 512, 10, 16, 1.8, seed=11)
    loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
    model = DigitNet(probabilities=bad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = _cycle(loader)
    model.train()

    def step(i):
        data, target = next(batches)
        optimizer.zero_grad()
        output = model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            return (model(xv).argmax(1) != yv).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def digits_softmax_cross_entropy_bad():
    return _digits(True)


def digits_softmax_cross_entropy_good():
    return _digits(False)


# ---------------------------------------------------------------- fine-tuning of a pretrained net

class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.downsample = None
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + identity)


class ResNetSmall(nn.Module):
    def __init__(self, num_classes=10, in_channels=3, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = BasicBlock(width, width, 2)
        self.layer2 = BasicBlock(width, 2 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


@lru_cache(maxsize=None)
def _pretrained_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        train, _ = _textures(2048, 1, 10, 16, 1.0, seed=101, channels=3)
        loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
        net = ResNetSmall(10)
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        net.train()
        for _ in range(3):
            for x, y in loader:
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
        return net.state_dict()


def _finetune_zero_grad(bad):
    weights = copy.deepcopy(_pretrained_weights())
    torch.manual_seed(0)
    train, (xv, yv) = _textures(512, 512, 6, 16, 1.5, seed=21, channels=3)
    dataloader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
    model_ft = ResNetSmall(10)
    model_ft.load_state_dict(weights)
    num_ftrs = model_ft.fc.in_features
    model_ft.fc = nn.Linear(num_ftrs, 6)
    criterion = nn.CrossEntropyLoss()
    backbone = [p for n, p in model_ft.named_parameters() if not n.startswith("fc.")]
    optimizer_ft = torch.optim.SGD([{"params": backbone, "lr": 1e-3},
                                    {"params": model_ft.fc.parameters(), "lr": 1e-2}], lr=1e-3, momentum=0.9)
    batches = _cycle(dataloader)
    model_ft.train()

    def step(i):
        inputs, labels = next(batches)
        if not bad:
            optimizer_ft.zero_grad()
        outputs = model_ft(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer_ft.step()

    def probe():
        with _measuring(model_ft):
            return F.cross_entropy(model_ft(xv), yv).item()

    return {"model": model_ft, "optimizer": optimizer_ft, "steps": 20, "step": step, "probe": probe}


def finetune_no_zero_grad_bad():
    return _finetune_zero_grad(True)


def finetune_no_zero_grad_good():
    return _finetune_zero_grad(False)


def _finetune_head(bad):
    weights = copy.deepcopy(_pretrained_weights())
    torch.manual_seed(0)
    train, (xv, yv) = _textures(768, 512, 8, 16, 1.5, seed=31, channels=3)
    loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
    net = ResNetSmall(10)
    net.load_state_dict(weights)
    if bad:
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=1e-2)
        net.fc = nn.Linear(net.fc.in_features, 8)
    else:
        net.fc = nn.Linear(net.fc.in_features, 8)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=1e-2)
    batches = _cycle(loader)
    net.train()

    def step(i):
        images, labels = next(batches)
        logits = net(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.05)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(net):
            return F.cross_entropy(net(xv), yv).item()

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def finetune_head_after_optimizer_bad():
    return _finetune_head(True)


def finetune_head_after_optimizer_good():
    return _finetune_head(False)


# ---------------------------------------------------------------- torchvision references style

def _resnet_steplr(bad):
    torch.manual_seed(0)
    train, (xv, yv) = _textures(320, 512, 10, 16, 1.0, seed=41, channels=3)
    data_loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True, drop_last=True)
    model = ResNetSmall(10)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.1)
    batches = _cycle(data_loader)
    model.train()

    def step(i):
        image, target = next(batches)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if bad:
            lr_scheduler.step()
        elif (i + 1) % len(data_loader) == 0:
            lr_scheduler.step()

    def probe():
        with _measuring(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def resnet_steplr_every_batch_bad():
    return _resnet_steplr(True)


def resnet_steplr_every_batch_good():
    return _resnet_steplr(False)


class FolderDataset(Dataset):
    def __init__(self, images, labels):
        order = torch.argsort(labels, stable=True)
        self.samples = [(images[j], int(labels[j])) for j in order.tolist()]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, idx):
        return self.samples[idx]


def _imagefolder(bad):
    torch.manual_seed(0)
    train, (xv, yv) = _textures(768, 512, 8, 16, 2.2, seed=51, channels=3)
    train_set = FolderDataset(*train)
    if bad:
        train_loader = DataLoader(train_set, batch_size=32)
    else:
        train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 8))
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = _cycle(train_loader)
    model.train()

    def step(i):
        X, y = next(batches)
        pred = model(X)
        loss = loss_fn(pred, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def probe():
        with _measuring(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def imagefolder_no_shuffle_bad():
    return _imagefolder(True)


def imagefolder_no_shuffle_good():
    return _imagefolder(False)


# ---------------------------------------------------------------- segmentation

def _ellipses(n, n_train, size, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    c = size * (0.2 + 0.6 * torch.rand(n, 2, generator=g))
    r = size * (0.12 + 0.12 * torch.rand(n, 2, generator=g))
    d = ((yy - c[:, 0, None, None]) / r[:, 0, None, None]) ** 2 + ((xx - c[:, 1, None, None]) / r[:, 1, None, None]) ** 2
    mask = (d < 1).float()
    img = 1.5 * mask + 0.6 * torch.randn(n, size, size, generator=g)
    img = (img - img[:n_train].mean()) / img[:n_train].std()
    return img.unsqueeze(1), mask.unsqueeze(1)


class CarvanaDataset(Dataset):
    def __init__(self, images, masks, flip_masks, augment=True):
        self.images, self.masks = images, masks
        self.flip_masks = flip_masks
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image, mask = self.images[idx], self.masks[idx]
        if self.augment and torch.rand(1).item() < 0.5:
            image = torch.flip(image, dims=[-1])
            if self.flip_masks:
                mask = torch.flip(mask, dims=[-1])
        return image, mask


def _double_conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
                         nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, n_channels=1, n_classes=1, base=8):
        super().__init__()
        self.inc = _double_conv(n_channels, base)
        self.down1 = _double_conv(base, base * 2)
        self.down2 = _double_conv(base * 2, base * 4)
        self.up1 = nn.ConvTranspose2d(base * 4, base * 2, 2, 2)
        self.conv1 = _double_conv(base * 4, base * 2)
        self.up2 = nn.ConvTranspose2d(base * 2, base, 2, 2)
        self.conv2 = _double_conv(base * 2, base)
        self.outc = nn.Conv2d(base, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def _unet_flip(bad):
    torch.manual_seed(0)
    images, masks = _ellipses(400, 272, 24, seed=61)
    train_set = CarvanaDataset(images[:272], masks[:272], flip_masks=not bad)
    xv, mv = images[272:], masks[272:]
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    model = UNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _cycle(train_loader)
    model.train()

    def step(i):
        image, true_mask = next(batches)
        pred = model(image)
        loss = criterion(pred, true_mask)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def probe():
        with _measuring(model):
            pred = (torch.sigmoid(model(xv)) > 0.5).float()
            inter = (pred * mv).sum((1, 2, 3))
            union = ((pred + mv) > 0).float().sum((1, 2, 3))
            return 1.0 - (inter / union.clamp(min=1)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def unet_flip_image_only_bad():
    return _unet_flip(True)


def unet_flip_image_only_good():
    return _unet_flip(False)


def _scenes(n, size, num_classes, seed):
    g = torch.Generator().manual_seed(seed)
    colors = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.2, 0.1], [0.1, 1.0, 0.2], [0.2, 0.1, 1.0],
                           [1.0, 1.0, 0.1], [0.1, 1.0, 1.0]])
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks = torch.zeros(n, size, size, dtype=torch.long)
    for j in range(n):
        for _ in range(5):
            c = int(torch.randint(1, num_classes, (1,), generator=g))
            cy, cx = torch.randint(5, size - 5, (2,), generator=g).tolist()
            ry, rx = torch.randint(3, 9, (2,), generator=g).tolist()
            masks[j][((yy - cy).abs() <= ry) & ((xx - cx).abs() <= rx)] = c
    images = colors[masks].permute(0, 3, 1, 2) + 0.25 * torch.randn(n, 3, size, size, generator=g)
    return images.contiguous(), masks


class SegDataset(Dataset):
    def __init__(self, images, masks, size, mask_mode):
        self.images, self.masks = images, masks
        self.size = size
        self.mask_mode = mask_mode

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image = F.interpolate(self.images[idx][None], size=self.size, mode="bilinear", align_corners=False)[0]
        mask = F.interpolate(self.masks[idx][None, None].float(), size=self.size, mode=self.mask_mode)[0, 0]
        return (image - 0.2) / 0.4, mask.long()


def _fcn_resize(bad):
    torch.manual_seed(0)
    images, masks = _scenes(320, 48, 6, seed=71)
    train_set = SegDataset(images[:256], masks[:256], (24, 24), "bilinear" if bad else "nearest")
    val_set = SegDataset(images[256:], masks[256:], (24, 24), "nearest")
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=32)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 24, 3, padding=2, dilation=2, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 6, 1))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = _cycle(train_loader)
    model.train()

    def step(i):
        image, target = next(batches)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            inter, union = torch.zeros(6), torch.zeros(6)
            for image, target in val_loader:
                pred = model(image).argmax(1)
                for c in range(6):
                    inter[c] += ((pred == c) & (target == c)).sum()
                    union[c] += ((pred == c) | (target == c)).sum()
            return 1.0 - (inter / union.clamp(min=1)).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def fcn_mask_bilinear_resize_bad():
    return _fcn_resize(True)


def fcn_mask_bilinear_resize_good():
    return _fcn_resize(False)


# ---------------------------------------------------------------- detection and key points

def _box_scenes(n, n_train, size, seed):
    g = torch.Generator().manual_seed(seed)
    images = 0.2 * torch.randn(n, 3, size, size, generator=g)
    labels = torch.randint(3, (n,), generator=g)
    wh = torch.randint(8, 17, (n, 2), generator=g)
    boxes = torch.zeros(n, 4)
    for j in range(n):
        w, h = wh[j].tolist()
        x0 = int(torch.randint(0, size - w, (1,), generator=g))
        y0 = int(torch.randint(0, size - h, (1,), generator=g))
        images[j, labels[j], y0:y0 + h, x0:x0 + w] += 1.0
        boxes[j] = torch.tensor([x0, y0, x0 + w, y0 + h], dtype=torch.float)
    images = (images - images[:n_train].mean()) / images[:n_train].std()
    return images, boxes, labels


class ObjectDetector(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.regressor = nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 4), nn.Sigmoid())
        self.classifier = nn.Sequential(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, num_classes))

    def forward(self, x):
        feats = self.features(x)
        return self.regressor(feats), self.classifier(feats)


def _box_iou(a, b):
    lt = torch.max(a[:, :2], b[:, :2])
    rb = torch.min(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area_a = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1)
    area_b = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
    return inter / (area_a + area_b - inter).clamp(min=1e-6)


def _bbox(bad):
    torch.manual_seed(0)
    size = 32
    images, boxes, labels = _box_scenes(896, 768, size, seed=81)
    xv, bv = images[768:], boxes[768:]
    targets = boxes[:768]
    if not bad:
        targets = targets / size
    loader = DataLoader(TensorDataset(images[:768], labels[:768], targets), batch_size=32, shuffle=True)
    detector = ObjectDetector()
    class_loss_func = nn.CrossEntropyLoss()
    bbox_loss_func = nn.MSELoss()
    opt = torch.optim.Adam(detector.parameters(), lr=1e-3)
    batches = _cycle(loader)
    detector.train()

    def step(i):
        imgs, lbls, bbs = next(batches)
        pred_boxes, pred_logits = detector(imgs)
        total_loss = bbox_loss_func(pred_boxes, bbs) + class_loss_func(pred_logits, lbls)
        opt.zero_grad()
        total_loss.backward()
        opt.step()

    def probe():
        with _measuring(detector):
            pred, _ = detector(xv)
            return 1.0 - _box_iou(pred * size, bv).mean().item()

    return {"model": detector, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def bbox_pixels_vs_sigmoid_bad():
    return _bbox(True)


def bbox_pixels_vs_sigmoid_good():
    return _bbox(False)


def _keypoint_scenes(n, n_train, size, seed):
    g = torch.Generator().manual_seed(seed)
    colors = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 1.0, 0]])
    xy = 0.15 + 0.7 * torch.rand(n, 4, 2, generator=g)
    grid = (torch.arange(size) + 0.5) / size
    gx = torch.exp(-((grid - xy[..., 0:1]) ** 2) / (2 * 0.06 ** 2))
    gy = torch.exp(-((grid - xy[..., 1:2]) ** 2) / (2 * 0.06 ** 2))
    blobs = gy.unsqueeze(-1) * gx.unsqueeze(-2)
    images = torch.einsum("nkhw,kc->nchw", blobs, colors) + 0.1 * torch.randn(n, 3, size, size, generator=g)
    images = (images - images[:n_train].mean()) / images[:n_train].std()
    return images, xy


class KeypointNet(nn.Module):
    def __init__(self, num_keypoints=4):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 6 * 6, 96), nn.ReLU(), nn.Linear(96, num_keypoints * 2))

    def forward(self, x):
        return self.head(self.backbone(x)).view(x.size(0), -1, 2)


def _keypoints(bad):
    torch.manual_seed(0)
    images, xy = _keypoint_scenes(1152, 1024, 24, seed=91)
    xv, kv = images[1024:], xy[1024:]
    visible = (torch.rand(1024, 4) < 0.65).float()
    annotations = torch.cat([xy[:1024] * visible.unsqueeze(-1), visible.unsqueeze(-1) * 2], dim=-1)
    loader = DataLoader(TensorDataset(images[:1024], annotations), batch_size=32, shuffle=True)
    model = KeypointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _cycle(loader)
    model.train()

    def step(i):
        imgs, kpts = next(batches)
        coords, vis = kpts[..., :2], kpts[..., 2]
        pred = model(imgs)
        per_point = F.smooth_l1_loss(pred, coords, reduction="none", beta=0.1).sum(-1)
        if bad:
            loss = per_point.mean()
        else:
            mask = (vis > 0).float()
            loss = (per_point * mask).sum() / mask.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            return (model(xv) - kv).norm(dim=-1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keypoints_no_visibility_bad():
    return _keypoints(True)


def keypoints_no_visibility_good():
    return _keypoints(False)


# ---------------------------------------------------------------- age regression

def _faces(n, n_train, size, seed):
    g = torch.Generator().manual_seed(seed)
    age = 18 + 62 * torch.rand(n, generator=g)
    yy, xx = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    angle = math.pi * torch.rand(n, 1, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, 1, generator=g)
    depth = ((age - 18) / 62).view(-1, 1, 1)
    lines = torch.sin(18 * (torch.cos(angle) * xx + torch.sin(angle) * yy) + phase)
    img = 0.3 + depth * lines + 0.3 * torch.randn(n, size, size, generator=g)
    img = (img - img[:n_train].mean()) / img[:n_train].std()
    return img.unsqueeze(1), age


def _age(bad):
    torch.manual_seed(0)
    images, age = _faces(1280, 1024, 16, seed=111)
    mean, std = age[:1024].mean(), age[:1024].std()
    xv, av = images[1024:], age[1024:]
    loader = DataLoader(TensorDataset(images[:1024], (age[:1024] - mean) / std), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _cycle(loader)
    model.train()

    def step(i):
        image, target = next(batches)
        optimizer.zero_grad()
        output = model(image)
        if not bad:
            output = output.squeeze(1)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            years = model(xv).squeeze(1) * std + mean
            return (years - av).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def age_regression_broadcast_bad():
    return _age(True)


def age_regression_broadcast_good():
    return _age(False)


# ---------------------------------------------------------------- audio

def _utterances(n, n_mels, alphabet, seed):
    g = torch.Generator().manual_seed(seed)
    sounds = 1.5 * torch.randn(len(alphabet), n_mels, generator=torch.Generator().manual_seed(5))
    data = []
    for _ in range(n):
        length = int(torch.randint(3, 7, (1,), generator=g))
        ids = torch.randint(len(alphabet), (length,), generator=g).tolist()
        frames = []
        for c in ids:
            frames += [torch.zeros(n_mels)] * int(torch.randint(1, 3, (1,), generator=g))
            frames += [sounds[c]] * int(torch.randint(2, 5, (1,), generator=g))
        frames.append(torch.zeros(n_mels))
        spec = torch.stack(frames)
        spec = spec + 0.6 * torch.randn(spec.shape, generator=g)
        data.append((spec, "".join(alphabet[c] for c in ids)))
    return data


class AcousticModel(nn.Module):
    def __init__(self, n_mels, n_tokens, hidden=48):
        super().__init__()
        self.conv1 = nn.Conv1d(n_mels, hidden, 5, padding=2)
        self.conv2 = nn.Conv1d(hidden, hidden, 5, padding=2)
        self.fc = nn.Linear(hidden, n_tokens)

    def forward(self, x):
        x = F.relu(self.conv1(x.transpose(1, 2)))
        x = F.relu(self.conv2(x))
        return self.fc(x.transpose(1, 2))


def _edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, ca in enumerate(a, 1):
        prev, row[0] = row[0], i
        for j, cb in enumerate(b, 1):
            prev, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, prev + (ca != cb))
    return row[-1]


def _ctc(bad):
    torch.manual_seed(0)
    alphabet = "abcdefgh"
    blank = 0
    offset = 0 if bad else 1
    char2idx = {c: k + offset for k, c in enumerate(alphabet)}
    idx2char = {k: c for c, k in char2idx.items()}
    data = _utterances(640, 12, alphabet, seed=121)
    train_set, val_set = data[:512], data[512:]

    def collate(batch):
        specs = [s for s, _ in batch]
        labels = [torch.tensor([char2idx[c] for c in t]) for _, t in batch]
        input_lengths = torch.tensor([len(s) for s in specs])
        label_lengths = torch.tensor([len(t) for t in labels])
        return (nn.utils.rnn.pad_sequence(specs, batch_first=True), torch.cat(labels), input_lengths, label_lengths)

    loader = DataLoader(train_set, batch_size=16, shuffle=True, collate_fn=collate)
    model = AcousticModel(12, len(alphabet) + 1)
    criterion = nn.CTCLoss(blank=blank)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _cycle(loader)
    model.train()

    def step(i):
        spectrograms, labels, input_lengths, label_lengths = next(batches)
        optimizer.zero_grad()
        output = F.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()

    def probe():
        with _measuring(model):
            errors = total = 0
            for spec, text in val_set:
                best = torch.unique_consecutive(model(spec[None])[0].argmax(-1)).tolist()
                hyp = "".join(idx2char[k] for k in best if k != blank and k in idx2char)
                errors += _edit_distance(hyp, text)
                total += len(text)
            return errors / total

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ctc_blank_is_a_letter_bad():
    return _ctc(True)


def ctc_blank_is_a_letter_good():
    return _ctc(False)


def _keywords(n, n_train, n_frames, n_mels, classes, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 24)
    start = torch.randint(3, n_mels - 3, (classes,), generator=g).float()
    end = torch.randint(3, n_mels - 3, (classes,), generator=g).float()
    bend = 4 * torch.randn(classes, generator=g)
    mel = torch.arange(n_mels).float()
    words = []
    for c in range(classes):
        pitch = start[c] + (end[c] - start[c]) * t + bend[c] * torch.sin(math.pi * t)
        words.append(2.5 * torch.exp(-((mel[None] - pitch[:, None]) ** 2) / 3.0))
    y = torch.randint(classes, (n,), generator=g)
    x = 1.0 * torch.randn(n, n_frames, n_mels, generator=g)
    onset = torch.randint(0, n_frames - 24 + 1, (n,), generator=g).tolist()
    for j, c in enumerate(y.tolist()):
        x[j, onset[j]:onset[j] + 24] += words[c]
    x = (x - x[:n_train].mean()) / x[:n_train].std()
    return x, y


class KeywordNet(nn.Module):
    def __init__(self, n_mels, n_classes, reshape):
        super().__init__()
        self.reshape = reshape
        self.conv1 = nn.Conv1d(n_mels, 32, 5, padding=2)
        self.bn1 = nn.BatchNorm1d(32)
        self.conv2 = nn.Conv1d(32, 48, 5, padding=2)
        self.bn2 = nn.BatchNorm1d(48)
        self.pool = nn.AdaptiveMaxPool1d(1)
        self.fc = nn.Linear(48, n_classes)

    def forward(self, x):
        b, t, f = x.shape
        if self.reshape:
            x = x.view(b, f, t)
        else:
            x = x.transpose(1, 2)
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.pool(x).squeeze(-1))


def _keyword_spotting(bad):
    torch.manual_seed(0)
    x, y = _keywords(1536, 1024, 40, 20, 8, seed=131)
    xv, yv = x[1024:], y[1024:]
    train_loader = DataLoader(TensorDataset(x[:1024], y[:1024]), batch_size=32, shuffle=True)
    model = KeywordNet(20, 8, reshape=bad)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = _cycle(train_loader)
    model.train()

    def step(i):
        data, target = next(batches)
        output = model(data)
        loss = F.nll_loss(F.log_softmax(output, dim=-1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def keyword_view_for_transpose_bad():
    return _keyword_spotting(True)


def keyword_view_for_transpose_good():
    return _keyword_spotting(False)


# ---------------------------------------------------------------- VAE

class VAE(nn.Module):
    def __init__(self, dim=196, hidden=128, latent=12):
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
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(x.size(0), -1))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def _vae(bad):
    torch.manual_seed(0)
    (xt, _), (xv, _) = _textures(2048, 512, 10, 14, 0.0, seed=141, shift=3)
    xt, xv = torch.sigmoid(6 * xt), torch.sigmoid(6 * xv)
    train_loader = DataLoader(xt, batch_size=64, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _cycle(train_loader)
    model.train()

    def loss_function(recon_x, x, mu, logvar):
        if bad:
            BCE = F.binary_cross_entropy(recon_x, x.view(x.size(0), -1))
        else:
            BCE = F.binary_cross_entropy(recon_x, x.view(x.size(0), -1), reduction="sum")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return BCE + KLD

    def step(i):
        data = next(batches)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            recon, mu, logvar = model(xv)
            bce = F.binary_cross_entropy(recon, xv.view(xv.size(0), -1), reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            return ((bce + kld) / len(xv)).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_mean_recon_sum_kl_bad():
    return _vae(True)


def vae_mean_recon_sum_kl_good():
    return _vae(False)


# ---------------------------------------------------------------- GANs

class Generator(nn.Module):
    def __init__(self, latent_dim=16, img_dim=64):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(latent_dim, 64), nn.LeakyReLU(0.2), nn.Linear(64, 128), nn.LeakyReLU(0.2),
            nn.Linear(128, img_dim), nn.Tanh())

    def forward(self, z):
        return self.model(z).view(-1, 1, 8, 8)


class Discriminator(nn.Module):
    def __init__(self, img_dim=64):
        super().__init__()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(img_dim, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2),
            nn.Linear(64, 1))

    def forward(self, img):
        return self.model(img)


def _blobs(n, size, g):
    xy = 0.2 + 0.6 * torch.rand(n, 2, 1, generator=g)
    grid = (torch.arange(size) + 0.5) / size
    profile = torch.exp(-((grid - xy) ** 2) / (2 * 0.15 ** 2))
    return 2 * (profile[:, 1, :, None] * profile[:, 0, None, :]).unsqueeze(1) - 1


def _gan(bad):
    torch.manual_seed(0)
    imgs = _blobs(2560, 8, torch.Generator().manual_seed(151))
    xt, xv = imgs[:2048], imgs[2048:]
    dataloader = DataLoader(xt, batch_size=64, shuffle=True)
    generator, discriminator = Generator(), Discriminator()
    adversarial_loss = nn.BCEWithLogitsLoss()
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    batches = _cycle(dataloader)
    generator.train()
    discriminator.train()

    def step(i):
        real_imgs = next(batches)
        valid = torch.ones(real_imgs.size(0), 1)
        fake = torch.zeros(real_imgs.size(0), 1)

        optimizer_D.zero_grad()
        z = torch.randn(real_imgs.size(0), 16)
        gen_imgs = generator(z)
        real_loss = adversarial_loss(discriminator(real_imgs), valid)
        fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d_loss.backward()
        optimizer_D.step()

        optimizer_G.zero_grad()
        if bad:
            g_loss = adversarial_loss(discriminator(gen_imgs.detach()), valid)
        else:
            g_loss = adversarial_loss(discriminator(gen_imgs), valid)
        g_loss.backward()
        optimizer_G.step()

    def probe():
        with _measuring(generator, discriminator):
            return _sliced_wasserstein(generator(torch.randn(512, 16)), xv)

    return {"model": {"generator": generator, "discriminator": discriminator},
            "optimizer": [optimizer_G, optimizer_D], "steps": 20, "step": step, "probe": probe}


def gan_detach_for_generator_bad():
    return _gan(True)


def gan_detach_for_generator_good():
    return _gan(False)


def _ring(n, g):
    k = torch.randint(8, (n,), generator=g).float() * (2 * math.pi / 8)
    return torch.stack([torch.cos(k), torch.sin(k)], dim=1) * 1.4 + 0.05 * torch.randn(n, 2, generator=g)


def _mlp(din, hidden, dout):
    return nn.Sequential(nn.Linear(din, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                         nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, dout))


def _wgan(bad):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(161)
    xt, xv = _ring(4096, g), _ring(1024, g)
    netG, netD = _mlp(2, 64, 2), _mlp(2, 64, 1)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.9))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.9))
    batches = _cycle(DataLoader(xt, batch_size=128, shuffle=True, drop_last=True))
    critic_iters, lambda_gp = 5, 1.0
    netG.train()
    netD.train()

    def calc_gradient_penalty(real, fake):
        alpha = torch.rand(real.size(0), 1)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        disc_interpolates = netD(interpolates)
        if bad:
            gradients = torch.autograd.grad(outputs=disc_interpolates, inputs=interpolates,
                                            grad_outputs=torch.ones_like(disc_interpolates))[0]
        else:
            gradients = torch.autograd.grad(outputs=disc_interpolates, inputs=interpolates,
                                            grad_outputs=torch.ones_like(disc_interpolates),
                                            create_graph=True)[0]
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * lambda_gp

    def step(i):
        for _ in range(critic_iters):
            real = next(batches)
            with torch.no_grad():
                fake = netG(torch.randn(real.size(0), 2))
            optimizerD.zero_grad()
            d_loss = netD(fake).mean() - netD(real).mean() + calc_gradient_penalty(real, fake)
            d_loss.backward()
            optimizerD.step()

        optimizerG.zero_grad()
        g_loss = -netD(netG(torch.randn(128, 2))).mean()
        g_loss.backward()
        optimizerG.step()

    def probe():
        with _measuring(netG, netD):
            return _sliced_wasserstein(netG(torch.randn(1024, 2)), xv)

    return {"model": {"generator": netG, "critic": netD}, "optimizer": [optimizerG, optimizerD],
            "steps": 20, "step": step, "probe": probe}


def wgan_gp_without_create_graph_bad():
    return _wgan(True)


def wgan_gp_without_create_graph_good():
    return _wgan(False)


# ---------------------------------------------------------------- two moons

def _moons(n, g):
    t = math.pi * torch.rand(n, generator=g)
    upper = torch.rand(n, generator=g) < 0.5
    x = torch.where(upper, torch.cos(t), 1 - torch.cos(t))
    y = torch.where(upper, torch.sin(t), 0.5 - torch.sin(t))
    return torch.stack([x, y], 1) + 0.08 * torch.randn(n, 2, generator=g)


# ---------------------------------------------------------------- diffusion

class Denoiser(nn.Module):
    def __init__(self, dim=2, hidden=128, time_dim=32):
        super().__init__()
        self.time_dim = time_dim
        self.time_mlp = nn.Sequential(nn.Linear(time_dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.inp = nn.Linear(dim, hidden)
        self.mid1 = nn.Linear(hidden, hidden)
        self.mid2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, dim)

    def time_embedding(self, t):
        half = self.time_dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half).float() / (half - 1))
        args = t.float()[:, None] * freqs[None]
        return torch.cat([args.sin(), args.cos()], dim=-1)

    def forward(self, x, t):
        emb = self.time_mlp(self.time_embedding(t))
        h = F.silu(self.inp(x) + emb)
        h = h + F.silu(self.mid1(h) + emb)
        h = h + F.silu(self.mid2(h) + emb)
        return self.out(h)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, uniform, timesteps=50):
        super().__init__()
        self.model = model
        self.uniform = uniform
        self.num_timesteps = timesteps
        betas = torch.linspace(1e-3, 0.15, timesteps)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_cumprod", alphas_cumprod)

    def forward(self, x_start):
        t = torch.randint(0, self.num_timesteps, (x_start.size(0),))
        noise = torch.rand_like(x_start) if self.uniform else torch.randn_like(x_start)
        a = self.alphas_cumprod[t].unsqueeze(1)
        x = a.sqrt() * x_start + (1 - a).sqrt() * noise
        return F.mse_loss(self.model(x, t), noise)

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 2)
        for k in reversed(range(self.num_timesteps)):
            t = torch.full((n,), k, dtype=torch.long)
            beta, abar = self.betas[k], self.alphas_cumprod[k]
            mean = (x - beta / (1 - abar).sqrt() * self.model(x, t)) / (1 - beta).sqrt()
            x = mean + beta.sqrt() * torch.randn_like(x) if k > 0 else mean
        return x


def _ddpm(bad):
    torch.manual_seed(0)
    data = _moons(5120, torch.Generator().manual_seed(171))
    data = (data - data[:4096].mean(0)) / data[:4096].std(0)
    xt, xv = data[:4096], data[4096:]
    diffusion = GaussianDiffusion(Denoiser(), uniform=bad)
    dl = _cycle(DataLoader(xt, batch_size=128, shuffle=True))
    opt = torch.optim.Adam(diffusion.parameters(), lr=1e-3, betas=(0.9, 0.99))
    diffusion.train()

    def step(i):
        loss = diffusion(next(dl))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

    def probe():
        with _measuring(diffusion):
            return _sliced_wasserstein(diffusion.sample(1024), xv)

    return {"model": diffusion, "optimizer": opt, "steps": 20, "step": step, "probe": probe}


def ddpm_uniform_noise_bad():
    return _ddpm(True)


def ddpm_uniform_noise_good():
    return _ddpm(False)


# ---------------------------------------------------------------- normalizing flow

class AffineCoupling(nn.Module):
    def __init__(self, mask, hidden=48):
        super().__init__()
        self.register_buffer("mask", mask)
        self.s = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                               nn.Linear(hidden, 2), nn.Tanh())
        self.t = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                               nn.Linear(hidden, 2))

    def forward(self, x):
        x_ = x * self.mask
        s = self.s(x_) * (1 - self.mask)
        t = self.t(x_) * (1 - self.mask)
        return x_ + (1 - self.mask) * ((x - t) * torch.exp(-s)), -s.sum(1)

    def inverse(self, z):
        z_ = z * self.mask
        s = self.s(z_) * (1 - self.mask)
        t = self.t(z_) * (1 - self.mask)
        return z_ + (1 - self.mask) * (z * torch.exp(s) + t)


class RealNVP(nn.Module):
    def __init__(self, masks):
        super().__init__()
        self.layers = nn.ModuleList([AffineCoupling(m) for m in masks])

    def log_prob(self, x):
        log_det = x.new_zeros(x.size(0))
        for layer in self.layers:
            x, ld = layer(x)
            log_det = log_det + ld
        return -0.5 * (x ** 2).sum(1) - math.log(2 * math.pi) + log_det

    def sample(self, n):
        x = torch.randn(n, 2)
        for layer in reversed(self.layers):
            x = layer.inverse(x)
        return x


def _realnvp(bad):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(181)
    data = _moons(5120, g)
    mean, std = data[:4096].mean(0), data[:4096].std(0)
    data = (data - mean) / std
    xt, xv = data[:4096], data[4096:]
    if bad:
        masks = torch.tensor([[0.0, 1.0]] * 6)
    else:
        masks = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 3)
    flow = RealNVP(masks)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)
    batches = _cycle(DataLoader(xt, batch_size=128, shuffle=True))
    flow.train()

    def step(i):
        x = next(batches)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(flow):
            return -flow.log_prob(xv).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_same_mask_bad():
    return _realnvp(True)


def realnvp_same_mask_good():
    return _realnvp(False)


# ---------------------------------------------------------------- contrastive, self-supervised

def _augment(x):
    out = []
    for img, (dy, dx) in zip(x, torch.randint(-2, 3, (x.size(0), 2)).tolist()):
        out.append(torch.roll(img, (dy, dx), dims=(1, 2)))
    x = torch.stack(out)
    gain = 0.7 + 0.6 * torch.rand(x.size(0), 1, 1, 1)
    bias = 0.4 * torch.randn(x.size(0), x.size(1), 1, 1)
    return gain * x + bias + 0.3 * torch.randn_like(x)


class PairDataset(Dataset):
    def __init__(self, images, same_view):
        self.images = images
        self.same_view = same_view

    def transform(self, img):
        dy, dx = torch.randint(-2, 3, (2,)).tolist()
        img = torch.roll(img, (dy, dx), dims=(1, 2))
        gain = 0.7 + 0.6 * torch.rand(1)
        bias = 0.4 * torch.randn(1)
        return gain * img + bias + 0.3 * torch.randn_like(img)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        img = self.images[idx]
        if self.same_view:
            pos_1 = self.transform(img)
            pos_2 = pos_1
        else:
            pos_1 = self.transform(img)
            pos_2 = self.transform(img)
        return pos_1, pos_2


class SimCLR(nn.Module):
    def __init__(self, feature_dim=32):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 3 * 3, 64))
        self.g = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, feature_dim))

    def forward(self, x):
        h = self.f(x)
        return h, F.normalize(self.g(F.relu(h)), dim=-1)


def _simclr(bad):
    torch.manual_seed(0)
    (xt, yt), (xv, yv) = _textures(1536, 512, 12, 12, 1.2, seed=191)
    loader = DataLoader(PairDataset(xt, same_view=bad), batch_size=64, shuffle=True, drop_last=True)
    model = SimCLR()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    temperature = 0.1
    batches = _cycle(loader)
    model.train()

    def nt_xent(z1, z2):
        n = z1.size(0)
        z = torch.cat([z1, z2], dim=0)
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        targets = torch.cat([torch.arange(n, 2 * n), torch.arange(0, n)])
        return F.cross_entropy(sim, targets)

    def step(i):
        pos_1, pos_2 = next(batches)
        _, z1 = model(pos_1)
        _, z2 = model(pos_2)
        loss = nt_xent(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            return _knn_error(model(xt)[0], yt, model(xv)[0], yv)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simclr_same_view_twice_bad():
    return _simclr(True)


def simclr_same_view_twice_good():
    return _simclr(False)


class SimSiam(nn.Module):
    def __init__(self, stop_gradient, dim=64, pred_dim=16):
        super().__init__()
        self.stop_gradient = stop_gradient
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 3 * 3, dim))
        self.projector = nn.Sequential(
            nn.BatchNorm1d(dim), nn.ReLU(inplace=True),
            nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim, affine=False))
        self.predictor = nn.Sequential(
            nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(inplace=True),
            nn.Linear(pred_dim, dim))

    def forward(self, x1, x2):
        z1 = self.projector(self.encoder(x1))
        z2 = self.projector(self.encoder(x2))
        p1 = self.predictor(z1)
        p2 = self.predictor(z2)
        if self.stop_gradient:
            return p1, p2, z1.detach(), z2.detach()
        return p1, p2, z1, z2


def _simsiam(bad):
    torch.manual_seed(0)
    (xt, yt), (xv, yv) = _textures(1536, 512, 12, 12, 1.2, seed=201, channels=3)
    loader = DataLoader(TensorDataset(xt, yt), batch_size=64, shuffle=True, drop_last=True)
    model = SimSiam(stop_gradient=not bad)
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = _cycle(loader)
    model.train()

    def step(i):
        images, _ = next(batches)
        p1, p2, z1, z2 = model(_augment(images), _augment(images))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            return _knn_error(model.encoder(xt), yt, model.encoder(xv), yv)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_no_stop_gradient_bad():
    return _simsiam(True)


def simsiam_no_stop_gradient_good():
    return _simsiam(False)


# ---------------------------------------------------------------- distillation

@lru_cache(maxsize=None)
def _teacher_weights():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        (xt, yt), _ = _textures(3072, 512, 10, 16, 1.8, seed=211)
        net = ResNetSmall(10, in_channels=1, width=24)
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        net.train()
        for _ in range(4):
            for x, y in DataLoader(TensorDataset(xt, yt), batch_size=64, shuffle=True):
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
            for group in opt.param_groups:
                group["lr"] *= 0.4
        return net.state_dict()


def _distill(bad):
    weights = copy.deepcopy(_teacher_weights())
    torch.manual_seed(0)
    (xt, yt), (xv, yv) = _textures(3072, 512, 10, 16, 1.8, seed=211)
    loader = DataLoader(TensorDataset(xt[:768], yt[:768]), batch_size=32, shuffle=True)
    teacher = ResNetSmall(10, in_channels=1, width=24)
    teacher.load_state_dict(weights)
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
    student = nn.Sequential(
        nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 4 * 4, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    T, alpha = 4.0, 0.9
    batches = _cycle(loader)
    student.train()

    def step(i):
        inputs, labels = next(batches)
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft_targets = F.softmax(teacher_logits / T, dim=-1)
        if bad:
            soft_prob = F.softmax(student_logits / T, dim=-1)
        else:
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
        soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * (T * T)
        loss = alpha * soft_loss + (1 - alpha) * F.cross_entropy(student_logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(student):
            return F.cross_entropy(student(xv), yv).item()

    return {"model": {"student": student, "teacher": teacher}, "optimizer": optimizer, "steps": 20,
            "step": step, "probe": probe}


def distill_kl_without_log_bad():
    return _distill(True)


def distill_kl_without_log_good():
    return _distill(False)


# ---------------------------------------------------------------- train and validate

class VGGSmall(nn.Module):
    def __init__(self, num_classes=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(32 * 4 * 4, 64), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.Linear(64, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def validate(model, loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
            total += labels.size(0)
    return correct / total


def _train_val(bad):
    torch.manual_seed(0)
    train, (x, y) = _textures(320, 640, 8, 16, 3.0, seed=221, channels=3)
    train_loader = DataLoader(TensorDataset(*train), batch_size=32, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[:128], y[:128]), batch_size=64)
    xv, yv = x[128:], y[128:]
    model = VGGSmall()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    batches = _cycle(train_loader)
    history = []
    model.train()

    def step(i):
        batch_idx = i % len(train_loader)
        if batch_idx == 0 and not bad:
            model.train()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if batch_idx == len(train_loader) - 1:
            history.append(validate(model, val_loader))

    def probe():
        with _measuring(model):
            return F.cross_entropy(model(xv), yv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def eval_mode_after_validation_bad():
    return _train_val(True)


def eval_mode_after_validation_good():
    return _train_val(False)


# ---------------------------------------------------------------- super-resolution

class VDSR(nn.Module):
    def __init__(self, as_list, depth=4, width=20):
        super().__init__()
        self.input = nn.Conv2d(1, width, 3, padding=1)
        layers = [nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)]
        self.residual_layers = layers if as_list else nn.ModuleList(layers)
        self.output = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x):
        out = F.relu(self.input(x))
        for layer in self.residual_layers:
            out = F.relu(layer(out))
        return x + self.output(out)


def _sharp_images(n, size, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    img = torch.zeros(n, size, size)
    for j in range(n):
        for _ in range(3):
            cy, cx = torch.randint(2, size - 2, (2,), generator=g).tolist()
            ry, rx = torch.randint(2, 6, (2,), generator=g).tolist()
            value = float(torch.rand(1, generator=g))
            img[j][((yy - cy).abs() <= ry) & ((xx - cx).abs() <= rx)] = value
    return img.unsqueeze(1)


def _vdsr(bad):
    torch.manual_seed(0)
    hr = _sharp_images(640, 20, seed=231)
    lr_img = F.interpolate(hr, scale_factor=0.5, mode="area")
    lr_up = F.interpolate(lr_img, scale_factor=2, mode="bicubic", align_corners=False)
    loader = DataLoader(TensorDataset(lr_up[:512], hr[:512]), batch_size=16, shuffle=True)
    xv, hv = lr_up[512:], hr[512:]
    model = VDSR(as_list=bad)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = _cycle(loader)
    model.train()

    def step(i):
        inp, target = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(inp), target)
        loss.backward()
        optimizer.step()

    def probe():
        with _measuring(model):
            return F.mse_loss(model(xv), hv).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vdsr_layers_in_list_bad():
    return _vdsr(True)


def vdsr_layers_in_list_good():
    return _vdsr(False)
