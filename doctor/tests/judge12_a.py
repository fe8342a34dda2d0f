"""Twenty-two small programs of vision and the mechanics of training, each with one bug that people often make, and a
mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler


CASES = [
    {
        "name": "cls_blocks_in_python_list",
        "what": "The conv blocks are kept in a plain Python list, not an nn.ModuleList, so their parameters are not registered: model.parameters() lacks them, the optimizer never updates them (and train/eval does not reach them).",
        "steps": 300,
    },
    {
        "name": "finetune_unfreeze_not_in_optimizer",
        "what": "The optimizer is built from the head only while the backbone is frozen; when the backbone is unfrozen later (requires_grad set to True) its parameters are never added to the optimizer, so it gets gradients but is never fine-tuned.",
        "steps": 300,
    },
    {
        "name": "det_head_view_without_permute",
        "what": "The detection head's output (B, 5, H, W) is reshaped with view(B, H*W, 5) without moving the channel axis last, so objectness and box numbers of different cells are scrambled together.",
        "steps": 300,
    },
    {
        "name": "seg_flip_image_not_mask",
        "what": "The random horizontal flip of the training augmentation is applied to the picture only and not to its mask, so half of the training pairs are misaligned.",
        "steps": 300,
    },
    {
        "name": "depth_invalid_not_masked",
        "what": "Pixels without a depth reading are stored as 0; the L1 loss is taken over all pixels without the valid mask (depth > 0), so the net is trained to predict 0 m there and its depths are pulled down.",
        "steps": 300,
    },
    {
        "name": "sr_conv_init_std_one",
        "what": "The weight initialisation calls nn.init.normal_(weight) with its default std of 1 and no fan-in scaling, so activations and outputs of the super-resolution net start orders of magnitude too large.",
        "steps": 600,
    },
    {
        "name": "simsiam_no_stop_gradient",
        "what": "The SimSiam loss compares the predictor's output with the other view's projection without detach() (no stop-gradient on the target branch), so the representation collapses.",
        "steps": 300,
    },
    {
        "name": "triplet_similarity_as_distance",
        "what": "The triplet loss is given cosine similarities where it needs distances (no 1 - similarity), so its sign is turned: anchors are pushed from their positives and pulled to the negatives.",
        "steps": 300,
    },
    {
        "name": "gan_generator_step_on_detached_fake",
        "what": "The generator's pictures are detached once for both updates, so the generator's loss has no path back to the generator: its gradients are None and only the discriminator ever learns.",
        "steps": 500,
    },
    {
        "name": "vae_recon_mean_kl_sum",
        "what": "The VAE's reconstruction term is averaged over pixels while the KL term is summed over latent dimensions, so the KL weighs 256 times too much and the posterior collapses: reconstructions ignore the input.",
        "steps": 400,
    },
    {
        "name": "ddpm_uniform_noise",
        "what": "The diffusion training noise is drawn with torch.rand_like (uniform on [0, 1], mean 0.5) in place of torch.randn_like, so the net never sees the Gaussian noise that sampling uses.",
        "steps": 400,
    },
    {
        "name": "accum_zero_grad_every_micro_batch",
        "what": "Gradient accumulation over 4 micro-batches, but zero_grad() is called before every micro-batch's backward, so only the last micro-batch's (already divided) gradient reaches optimizer.step().",
        "steps": 400,
    },
    {
        "name": "two_optimizers_one_zero_grad",
        "what": "Encoder and decoder have an optimizer each, but only the decoder's zero_grad() is called; the encoder's gradients pile up over all past batches.",
        "steps": 300,
    },
    {
        "name": "amp_clip_without_unscale",
        "what": "With a GradScaler the gradients are clipped while still multiplied by the loss scale (scaler.unscale_(optimizer) is missing before clip_grad_norm_), so after the division by the scale the steps are tens of thousands of times too small.",
        "steps": 300,
    },
    {
        "name": "bf16_weights_instead_of_autocast",
        "what": "The whole model is cast to bfloat16 and the optimizer updates bfloat16 weights directly; updates smaller than half a bfloat16 step are rounded away, where fp32 weights with autocast were meant.",
        "steps": 1500,
    },
    {
        "name": "ema_without_bn_buffers",
        "what": "The EMA copy averages the parameters only and never copies the BatchNorm buffers, so the EMA net that is evaluated keeps the running mean and variance of the start.",
        "steps": 300,
    },
    {
        "name": "steplr_stepped_every_batch",
        "what": "StepLR(step_size=10) is meant in epochs, but scheduler.step() is called after every batch, so the learning rate has fallen to almost nothing within a few epochs.",
        "steps": 300,
    },
    {
        "name": "param_groups_miss_factors",
        "what": "The weight-decay and no-decay groups are picked by name suffix ('weight', 'bias'), and the factorisation matrix, an nn.Parameter named 'factors', falls into neither, so the optimizer never updates it.",
        "steps": 400,
    },
    {
        "name": "eval_mode_never_switched_back",
        "what": "The validation pass calls model.eval() and nothing calls model.train() again, so all training after the first (sanity) validation runs in eval mode: BatchNorm uses its initial running statistics and dropout is off.",
        "steps": 300,
    },
    {
        "name": "sampler_given_class_weights",
        "what": "WeightedRandomSampler gets one weight per class instead of one per sample, so it only ever draws the first few indices (as many as there are classes) of the training set.",
        "steps": 300,
    },
    {
        "name": "multitask_age_broadcast",
        "what": "In the two-headed net the age head returns (B, 1) and the age target is (B,), so the hand-written L1 term broadcasts to (B, B) and the age head learns only the average age.",
        "steps": 300,
    },
    {
        "name": "lstm_reads_padded_last_step",
        "what": "Sequences of different length are zero-padded on the right by the collate function, and the classifier reads output[:, -1], the state after all the padding, instead of the state at each sequence's own last step.",
        "steps": 300,
    },
]


# ----------------------------------------------------------------------------
# synthetic data
# ----------------------------------------------------------------------------


def forever(loader):
    while True:
        for batch in loader:
            yield batch


def shape_pictures(n, seed, size=16, classes=6, noise=0.1, channels=1, contrast=(0.4, 0.8)):
    """Pictures in [0, 1] of one figure each; returns (images, labels, masks, boxes cxcywh in [0, 1])."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    r = size * (0.17 + 0.10 * torch.rand(n, generator=g))
    cx = r + 0.5 + torch.rand(n, generator=g) * (size - 2 * r - 2)
    cy = r + 0.5 + torch.rand(n, generator=g) * (size - 2 * r - 2)
    ax = torch.arange(size).float()
    dx = ax.view(1, 1, size) - cx.view(n, 1, 1)
    dy = ax.view(1, size, 1) - cy.view(n, 1, 1)
    rr = r.view(n, 1, 1)
    adx, ady = dx.abs().expand(n, size, size), dy.abs().expand(n, size, size)
    box = torch.maximum(adx, ady) <= rr
    rad = (dx**2 + dy**2).sqrt()
    thin = (rr / 3).clamp(min=0.8)
    figures = torch.stack(
        [
            rad <= rr,
            box & (torch.maximum(adx, ady) >= rr - 1.2),
            box & (torch.minimum(adx, ady) <= thin),
            box & ((dx - dy).abs().minimum((dx + dy).abs()) <= 1.1),
            box & (ady <= thin),
            box & (adx <= thin),
            box & (dy >= dx),
            (rad <= rr) & (rad >= rr - 1.3),
        ]
    )
    mask = figures[y, torch.arange(n)].float()
    bg = 0.1 + 0.2 * torch.rand(n, channels, 1, 1, generator=g)
    lo, hi = contrast
    fg = lo + (hi - lo) * torch.rand(n, channels, 1, 1, generator=g)
    img = bg + fg * mask.unsqueeze(1)
    img = img + noise * torch.randn(n, channels, size, size, generator=g)
    boxes = torch.stack([(cx + 0.5) / size, (cy + 0.5) / size, 2 * r / size, 2 * r / size], 1)
    return img.clamp(0, 1), y, mask, boxes


def depth_rooms(n, seed, size=24, missing=0.4):
    """RGB pictures with a depth map in metres; the sensor writes 0 where it got no reading."""
    g = torch.Generator().manual_seed(seed)
    ax = torch.linspace(0, 1, size)
    far = 4 + 3 * torch.rand(n, 1, 1, generator=g)
    depth = far - (far - 1.5) * ax.view(1, size, 1).expand(n, size, size)
    _, _, mask, _ = shape_pictures(n, seed + 1, size=size)
    near = 1 + 2 * torch.rand(n, 1, 1, generator=g)
    depth = torch.where(mask > 0, torch.minimum(depth, near), depth)
    albedo = 0.8 + 0.2 * torch.rand(n, 3, 1, 1, generator=g)
    rgb = albedo * (1.3 / (depth.unsqueeze(1) + 0.5)) + 0.03 * torch.randn(n, 3, size, size, generator=g)
    full = depth.unsqueeze(1)
    holes = torch.rand(n, 1, size, size, generator=g) < missing
    return rgb.clamp(0, 1), full.masked_fill(holes, 0.0), full


def texture_pictures(n, seed, size=24):
    """Random gratings, two to a picture, in [0, 1]."""
    g = torch.Generator().manual_seed(seed)
    ax = torch.linspace(-1, 1, size)
    th = math.pi * torch.rand(n, 2, 1, 1, generator=g)
    fr = 4 + 8 * torch.rand(n, 2, 1, 1, generator=g)
    ph = 6.28 * torch.rand(n, 2, 1, 1, generator=g)
    u = torch.cos(th) * ax.view(1, 1, 1, size) + torch.sin(th) * ax.view(1, 1, size, 1)
    waves = torch.tanh(2 * torch.sin(fr * u + ph)).mean(1, keepdim=True)
    img = 0.5 + 0.45 * waves + 0.01 * torch.randn(n, 1, size, size, generator=g)
    return img.clamp(0, 1)


def table(n, seed, features=20, classes=5, hidden=16, world=7):
    """Standardised table whose label comes from a fixed random two-layer rule."""
    gw = torch.Generator().manual_seed(world)
    w1 = torch.randn(features, hidden, generator=gw) / math.sqrt(features)
    w2 = torch.randn(hidden, classes, generator=gw)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=g)
    score = torch.tanh(1.5 * x @ w1) @ w2
    score = score - score.mean(0)
    return x, score.argmax(1)


# ----------------------------------------------------------------------------
# the cases
# ----------------------------------------------------------------------------


def cls_blocks_in_python_list_bad():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, cin, cout):
            super().__init__()
            self.conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
            self.bn = nn.BatchNorm2d(cout)
            self.pool = nn.MaxPool2d(2)

        def forward(self, x):
            return self.pool(F.relu(self.bn(self.conv(x))))

    class ShapeNet(nn.Module):
        def __init__(self, num_classes, widths=(16, 24, 32)):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            blocks, cin = [], 8
            for w in widths:
                blocks.append(Block(cin, w))
                cin = w
            self.blocks = blocks
            self.fc = nn.Linear(cin, num_classes)

        def forward(self, x):
            x = F.relu(self.stem(x))
            for block in self.blocks:
                x = block(x)
            return self.fc(x.mean(dim=(2, 3)))

    xtr, ytr, _, _ = shape_pictures(2000, 1, size=24, classes=8, channels=3)
    xte, yte, _, _ = shape_pictures(500, 2, size=24, classes=8, channels=3)
    mean, std = xtr.mean(dim=(0, 2, 3), keepdim=True), xtr.std(dim=(0, 2, 3), keepdim=True)
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = ShapeNet(num_classes=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def cls_blocks_in_python_list_good():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, cin, cout):
            super().__init__()
            self.conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
            self.bn = nn.BatchNorm2d(cout)
            self.pool = nn.MaxPool2d(2)

        def forward(self, x):
            return self.pool(F.relu(self.bn(self.conv(x))))

    class ShapeNet(nn.Module):
        def __init__(self, num_classes, widths=(16, 24, 32)):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            blocks, cin = [], 8
            for w in widths:
                blocks.append(Block(cin, w))
                cin = w
            self.blocks = nn.ModuleList(blocks)
            self.fc = nn.Linear(cin, num_classes)

        def forward(self, x):
            x = F.relu(self.stem(x))
            for block in self.blocks:
                x = block(x)
            return self.fc(x.mean(dim=(2, 3)))

    xtr, ytr, _, _ = shape_pictures(2000, 1, size=24, classes=8, channels=3)
    xte, yte, _, _ = shape_pictures(500, 2, size=24, classes=8, channels=3)
    mean, std = xtr.mean(dim=(0, 2, 3), keepdim=True), xtr.std(dim=(0, 2, 3), keepdim=True)
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = ShapeNet(num_classes=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def finetune_unfreeze_not_in_optimizer_bad():
    torch.manual_seed(0)

    def make_backbone():
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    # source task: two coarse classes
    backbone = make_backbone()
    xs, ys, _, _ = shape_pictures(1000, 11, classes=2)
    xs = (xs - xs.mean()) / xs.std()
    source = nn.Sequential(backbone, nn.Linear(32, 2))
    opt_src = torch.optim.Adam(source.parameters(), lr=1e-3)
    for xb, yb in DataLoader(TensorDataset(xs, ys), batch_size=32, shuffle=True):
        opt_src.zero_grad()
        F.cross_entropy(source(xb), yb).backward()
        opt_src.step()
    opt_src.zero_grad()

    # target task: eight classes
    xtr, ytr, _, _ = shape_pictures(2000, 12, classes=8)
    xte, yte, _, _ = shape_pictures(500, 13, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    class FineTuner(nn.Module):
        def __init__(self, backbone, num_classes):
            super().__init__()
            self.backbone = backbone
            self.head = nn.Linear(32, num_classes)

        def forward(self, x):
            return self.head(self.backbone(x))

    model = FineTuner(backbone, 8)
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    unfreeze_at = 5
    model.train()

    def step(i):
        if i == unfreeze_at:
            for p in model.backbone.parameters():
                p.requires_grad = True
        images, labels = next(batches)
        logits = model(images)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def finetune_unfreeze_not_in_optimizer_good():
    torch.manual_seed(0)

    def make_backbone():
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    # source task: two coarse classes
    backbone = make_backbone()
    xs, ys, _, _ = shape_pictures(1000, 11, classes=2)
    xs = (xs - xs.mean()) / xs.std()
    source = nn.Sequential(backbone, nn.Linear(32, 2))
    opt_src = torch.optim.Adam(source.parameters(), lr=1e-3)
    for xb, yb in DataLoader(TensorDataset(xs, ys), batch_size=32, shuffle=True):
        opt_src.zero_grad()
        F.cross_entropy(source(xb), yb).backward()
        opt_src.step()
    opt_src.zero_grad()

    # target task: eight classes
    xtr, ytr, _, _ = shape_pictures(2000, 12, classes=8)
    xte, yte, _, _ = shape_pictures(500, 13, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    class FineTuner(nn.Module):
        def __init__(self, backbone, num_classes):
            super().__init__()
            self.backbone = backbone
            self.head = nn.Linear(32, num_classes)

        def forward(self, x):
            return self.head(self.backbone(x))

    model = FineTuner(backbone, 8)
    for p in model.backbone.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    unfreeze_at = 5
    model.train()

    def step(i):
        if i == unfreeze_at:
            for p in model.backbone.parameters():
                p.requires_grad = True
            optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 1e-3})
        images, labels = next(batches)
        logits = model(images)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_head_view_without_permute_bad():
    torch.manual_seed(0)
    S = 6

    class GridDetector(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
            )
            self.head = nn.Conv2d(32, 5, 1)

        def forward(self, x):
            out = self.head(self.features(x))
            B = out.size(0)
            out = out.view(B, S * S, 5)
            return out[..., 0], torch.sigmoid(out[..., 1:])

    def encode(boxes):
        """boxes cxcywh in [0, 1] -> index of the responsible cell and box relative to it"""
        col = (boxes[:, 0] * S).long().clamp(0, S - 1)
        row = (boxes[:, 1] * S).long().clamp(0, S - 1)
        rel = torch.stack([boxes[:, 0] * S - col, boxes[:, 1] * S - row, boxes[:, 2], boxes[:, 3]], 1)
        return row * S + col, rel

    def decode(cell, rel):
        row, col = torch.div(cell, S, rounding_mode="floor"), cell % S
        return torch.stack([(rel[:, 0] + col) / S, (rel[:, 1] + row) / S, rel[:, 2], rel[:, 3]], 1)

    def iou(a, b):
        lo = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
        hi = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
        inter = (hi - lo).clamp(min=0).prod(1)
        return inter / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - inter)

    xtr, _, _, btr = shape_pictures(2000, 21, size=24, classes=3)
    xte, _, _, bte = shape_pictures(400, 22, size=24, classes=3)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, btr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()

    def step(i):
        images, boxes = next(batches)
        cell, rel = encode(boxes)
        rows = torch.arange(images.size(0))
        obj, box = model(images)
        obj_target = torch.zeros_like(obj)
        obj_target[rows, cell] = 1.0
        loss_obj = F.binary_cross_entropy_with_logits(obj, obj_target, reduction="sum") / images.size(0)
        loss_box = F.smooth_l1_loss(box[rows, cell], rel, beta=0.1)
        loss = loss_obj + 5.0 * loss_box
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            obj, box = model(xte)
            cell = obj.argmax(1)
            pred = decode(cell, box[torch.arange(len(xte)), cell])
            miss = (iou(pred, bte) < 0.5).float().mean().item()
        model.train(was)
        return miss

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def det_head_view_without_permute_good():
    torch.manual_seed(0)
    S = 6

    class GridDetector(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
            )
            self.head = nn.Conv2d(32, 5, 1)

        def forward(self, x):
            out = self.head(self.features(x))
            B = out.size(0)
            out = out.permute(0, 2, 3, 1).reshape(B, S * S, 5)
            return out[..., 0], torch.sigmoid(out[..., 1:])

    def encode(boxes):
        """boxes cxcywh in [0, 1] -> index of the responsible cell and box relative to it"""
        col = (boxes[:, 0] * S).long().clamp(0, S - 1)
        row = (boxes[:, 1] * S).long().clamp(0, S - 1)
        rel = torch.stack([boxes[:, 0] * S - col, boxes[:, 1] * S - row, boxes[:, 2], boxes[:, 3]], 1)
        return row * S + col, rel

    def decode(cell, rel):
        row, col = torch.div(cell, S, rounding_mode="floor"), cell % S
        return torch.stack([(rel[:, 0] + col) / S, (rel[:, 1] + row) / S, rel[:, 2], rel[:, 3]], 1)

    def iou(a, b):
        lo = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
        hi = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
        inter = (hi - lo).clamp(min=0).prod(1)
        return inter / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - inter)

    xtr, _, _, btr = shape_pictures(2000, 21, size=24, classes=3)
    xte, _, _, bte = shape_pictures(400, 22, size=24, classes=3)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, btr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = GridDetector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()

    def step(i):
        images, boxes = next(batches)
        cell, rel = encode(boxes)
        rows = torch.arange(images.size(0))
        obj, box = model(images)
        obj_target = torch.zeros_like(obj)
        obj_target[rows, cell] = 1.0
        loss_obj = F.binary_cross_entropy_with_logits(obj, obj_target, reduction="sum") / images.size(0)
        loss_box = F.smooth_l1_loss(box[rows, cell], rel, beta=0.1)
        loss = loss_obj + 5.0 * loss_box
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            obj, box = model(xte)
            cell = obj.argmax(1)
            pred = decode(cell, box[torch.arange(len(xte)), cell])
            miss = (iou(pred, bte) < 0.5).float().mean().item()
        model.train(was)
        return miss

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_flip_image_not_mask_bad():
    torch.manual_seed(0)

    class SegDataset(Dataset):
        def __init__(self, images, masks, augment):
            self.images, self.masks, self.augment = images, masks, augment

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image, mask = self.images[idx], self.masks[idx]
            if self.augment:
                if torch.rand(1).item() < 0.5:
                    image = torch.flip(image, dims=[-1])
            image = (image - 0.26) / 0.21
            return image, mask

    def double_conv(cin, cout):
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )

    class TinyUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1 = double_conv(3, 8)
            self.down2 = double_conv(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec = double_conv(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            d1 = self.down1(x)
            d2 = self.down2(F.max_pool2d(d1, 2))
            return self.out(self.dec(torch.cat([self.up(d2), d1], dim=1)))

    imgs, _, masks, _ = shape_pictures(1200, 31, size=24, channels=3)
    imgs_te, _, masks_te, _ = shape_pictures(200, 32, size=24, channels=3)
    train_set = SegDataset(imgs, masks.unsqueeze(1), augment=True)
    val_loader = DataLoader(SegDataset(imgs_te, masks_te.unsqueeze(1), augment=False), batch_size=200)
    xte, mte = next(iter(val_loader))
    loader = DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = TinyUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    model.train()

    def step(i):
        images, masks_b = next(batches)
        logits = model(images)
        loss = F.binary_cross_entropy_with_logits(logits, masks_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            pred = model(xte) > 0
            truth = mte > 0.5
            inter = (pred & truth).sum().item()
            union = (pred | truth).sum().item()
        model.train(was)
        return 1.0 - inter / max(union, 1)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def seg_flip_image_not_mask_good():
    torch.manual_seed(0)

    class SegDataset(Dataset):
        def __init__(self, images, masks, augment):
            self.images, self.masks, self.augment = images, masks, augment

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            image, mask = self.images[idx], self.masks[idx]
            if self.augment:
                if torch.rand(1).item() < 0.5:
                    image = torch.flip(image, dims=[-1])
                    mask = torch.flip(mask, dims=[-1])
            image = (image - 0.26) / 0.21
            return image, mask

    def double_conv(cin, cout):
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )

    class TinyUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1 = double_conv(3, 8)
            self.down2 = double_conv(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec = double_conv(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            d1 = self.down1(x)
            d2 = self.down2(F.max_pool2d(d1, 2))
            return self.out(self.dec(torch.cat([self.up(d2), d1], dim=1)))

    imgs, _, masks, _ = shape_pictures(1200, 31, size=24, channels=3)
    imgs_te, _, masks_te, _ = shape_pictures(200, 32, size=24, channels=3)
    train_set = SegDataset(imgs, masks.unsqueeze(1), augment=True)
    val_loader = DataLoader(SegDataset(imgs_te, masks_te.unsqueeze(1), augment=False), batch_size=200)
    xte, mte = next(iter(val_loader))
    loader = DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = TinyUNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    model.train()

    def step(i):
        images, masks_b = next(batches)
        logits = model(images)
        loss = F.binary_cross_entropy_with_logits(logits, masks_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            pred = model(xte) > 0
            truth = mte > 0.5
            inter = (pred & truth).sum().item()
            union = (pred | truth).sum().item()
        model.train(was)
        return 1.0 - inter / max(union, 1)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def depth_invalid_not_masked_bad():
    torch.manual_seed(0)

    class DepthNet(nn.Module):
        def __init__(self, max_depth=8.0):
            super().__init__()
            self.max_depth = max_depth
            self.enc1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.enc2 = nn.Sequential(
                nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()
            )
            self.enc3 = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
            self.dec = nn.Sequential(nn.Conv2d(40, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.head = nn.Conv2d(16, 1, 1)

        def forward(self, x):
            e1 = self.enc1(x)
            e3 = self.enc3(self.enc2(e1))
            up = F.interpolate(e3, scale_factor=2, mode="bilinear", align_corners=False)
            return self.max_depth * torch.sigmoid(self.head(self.dec(torch.cat([e1, up], 1))))

    def depth_loss(pred, depth):
        return (pred - depth).abs().mean()

    rgb, depth, _ = depth_rooms(1200, 41)
    rgb_te, _, full_te = depth_rooms(200, 42)
    mean, std = rgb.mean(dim=(0, 2, 3), keepdim=True), rgb.std(dim=(0, 2, 3), keepdim=True)
    loader = DataLoader(TensorDataset((rgb - mean) / std, depth), batch_size=16, shuffle=True, drop_last=True)
    xte = (rgb_te - mean) / std
    batches = forever(loader)

    model = DepthNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()

    def step(i):
        image, target = next(batches)
        optimizer.zero_grad()
        loss = depth_loss(model(image), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            rel = ((model(xte) - full_te).abs() / full_te).mean().item()
        model.train(was)
        return rel

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def depth_invalid_not_masked_good():
    torch.manual_seed(0)

    class DepthNet(nn.Module):
        def __init__(self, max_depth=8.0):
            super().__init__()
            self.max_depth = max_depth
            self.enc1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.enc2 = nn.Sequential(
                nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()
            )
            self.enc3 = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
            self.dec = nn.Sequential(nn.Conv2d(40, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
            self.head = nn.Conv2d(16, 1, 1)

        def forward(self, x):
            e1 = self.enc1(x)
            e3 = self.enc3(self.enc2(e1))
            up = F.interpolate(e3, scale_factor=2, mode="bilinear", align_corners=False)
            return self.max_depth * torch.sigmoid(self.head(self.dec(torch.cat([e1, up], 1))))

    def depth_loss(pred, depth):
        valid = depth > 0
        return (pred[valid] - depth[valid]).abs().mean()

    rgb, depth, _ = depth_rooms(1200, 41)
    rgb_te, _, full_te = depth_rooms(200, 42)
    mean, std = rgb.mean(dim=(0, 2, 3), keepdim=True), rgb.std(dim=(0, 2, 3), keepdim=True)
    loader = DataLoader(TensorDataset((rgb - mean) / std, depth), batch_size=16, shuffle=True, drop_last=True)
    xte = (rgb_te - mean) / std
    batches = forever(loader)

    model = DepthNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()

    def step(i):
        image, target = next(batches)
        optimizer.zero_grad()
        loss = depth_loss(model(image), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            rel = ((model(xte) - full_te).abs() / full_te).mean().item()
        model.train(was)
        return rel

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sr_conv_init_std_one_bad():
    torch.manual_seed(0)

    class SRNet(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.conv1 = nn.Conv2d(1, width, 5, padding=2)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.conv3 = nn.Conv2d(width, width, 3, padding=1)
            self.conv4 = nn.Conv2d(width, 4, 3, padding=1)
            self.shuffle = nn.PixelShuffle(2)
            self._initialize_weights()

        def _initialize_weights(self):
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = F.relu(self.conv3(x))
            return self.shuffle(self.conv4(x))

    def degrade(hr):
        return F.avg_pool2d(hr, 2)

    hr_tr = (texture_pictures(1500, 51) - 0.5) / 0.25
    hr_te = (texture_pictures(200, 52) - 0.5) / 0.25
    lr_te = degrade(hr_te)
    loader = DataLoader(TensorDataset(hr_tr), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = SRNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()
    model.train()

    def step(i):
        (hr,) = next(batches)
        sr = model(degrade(hr))
        loss = criterion(sr, hr)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(lr_te), hr_te).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sr_conv_init_std_one_good():
    torch.manual_seed(0)

    class SRNet(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.conv1 = nn.Conv2d(1, width, 5, padding=2)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.conv3 = nn.Conv2d(width, width, 3, padding=1)
            self.conv4 = nn.Conv2d(width, 4, 3, padding=1)
            self.shuffle = nn.PixelShuffle(2)
            self._initialize_weights()

        def _initialize_weights(self):
            for m in self.modules():
                if isinstance(m, nn.Conv2d):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = F.relu(self.conv3(x))
            return self.shuffle(self.conv4(x))

    def degrade(hr):
        return F.avg_pool2d(hr, 2)

    hr_tr = (texture_pictures(1500, 51) - 0.5) / 0.25
    hr_te = (texture_pictures(200, 52) - 0.5) / 0.25
    lr_te = degrade(hr_te)
    loader = DataLoader(TensorDataset(hr_tr), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = SRNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()
    model.train()

    def step(i):
        (hr,) = next(batches)
        sr = model(degrade(hr))
        loss = criterion(sr, hr)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(lr_te), hr_te).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_no_stop_gradient_bad():
    torch.manual_seed(0)

    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1, bias=False),
                nn.BatchNorm2d(64),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            self.projector = nn.Sequential(
                nn.Linear(64, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim, bias=False)
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim)
            )

        def forward(self, x1, x2):
            z1 = self.projector(self.encoder(x1))
            z2 = self.projector(self.encoder(x2))
            p1 = self.predictor(z1)
            p2 = self.predictor(z2)
            return p1, p2, z1, z2

    def augment(x):
        b = x.size(0)
        dy, dx = torch.randint(-3, 4, (2,)).tolist()
        x = torch.roll(x, shifts=(dy, dx), dims=(2, 3))
        gain = 0.7 + 0.6 * torch.rand(b, 1, 1, 1)
        bias = 0.3 * torch.randn(b, 1, 1, 1)
        return gain * x + bias + 0.2 * torch.randn_like(x)

    def D(p, z):
        return -F.cosine_similarity(p, z, dim=1).mean()

    xtr, ytr, _, _ = shape_pictures(2000, 61, classes=8)
    xte, yte, _, _ = shape_pictures(400, 62, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    model.train()

    def step(i):
        (x,) = next(batches)
        p1, p2, z1, z2 = model(augment(x), augment(x))
        loss = 0.5 * D(p1, z2) + 0.5 * D(p2, z1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            bank = F.normalize(model.encoder(xtr), dim=1)
            query = F.normalize(model.encoder(xte), dim=1)
            near = ytr[(query @ bank.t()).topk(5, dim=1).indices]
            err = (near.mode(dim=1).values != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_no_stop_gradient_good():
    torch.manual_seed(0)

    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1, bias=False),
                nn.BatchNorm2d(64),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            self.projector = nn.Sequential(
                nn.Linear(64, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim, bias=False)
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False), nn.BatchNorm1d(pred_dim), nn.ReLU(), nn.Linear(pred_dim, dim)
            )

        def forward(self, x1, x2):
            z1 = self.projector(self.encoder(x1))
            z2 = self.projector(self.encoder(x2))
            p1 = self.predictor(z1)
            p2 = self.predictor(z2)
            return p1, p2, z1.detach(), z2.detach()

    def augment(x):
        b = x.size(0)
        dy, dx = torch.randint(-3, 4, (2,)).tolist()
        x = torch.roll(x, shifts=(dy, dx), dims=(2, 3))
        gain = 0.7 + 0.6 * torch.rand(b, 1, 1, 1)
        bias = 0.3 * torch.randn(b, 1, 1, 1)
        return gain * x + bias + 0.2 * torch.randn_like(x)

    def D(p, z):
        return -F.cosine_similarity(p, z, dim=1).mean()

    xtr, ytr, _, _ = shape_pictures(2000, 61, classes=8)
    xte, yte, _, _ = shape_pictures(400, 62, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = SimSiam()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    model.train()

    def step(i):
        (x,) = next(batches)
        p1, p2, z1, z2 = model(augment(x), augment(x))
        loss = 0.5 * D(p1, z2) + 0.5 * D(p2, z1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            bank = F.normalize(model.encoder(xtr), dim=1)
            query = F.normalize(model.encoder(xte), dim=1)
            near = ytr[(query @ bank.t()).topk(5, dim=1).indices]
            err = (near.mode(dim=1).values != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def triplet_similarity_as_distance_bad():
    torch.manual_seed(0)

    class TripletDataset(Dataset):
        def __init__(self, images, labels):
            self.images, self.labels = images, labels
            self.by_class = {c: (labels == c).nonzero().flatten() for c in labels.unique().tolist()}

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            c = self.labels[idx].item()
            pos_pool = self.by_class[c]
            pos = pos_pool[torch.randint(len(pos_pool), (1,))].item()
            while pos == idx:
                pos = pos_pool[torch.randint(len(pos_pool), (1,))].item()
            other = random_other(c, len(self.by_class))
            neg_pool = self.by_class[other]
            neg = neg_pool[torch.randint(len(neg_pool), (1,))].item()
            return self.images[idx], self.images[pos], self.images[neg]

    def random_other(c, n):
        o = torch.randint(n - 1, (1,)).item()
        return o if o < c else o + 1

    class EmbeddingNet(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, dim))

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x)), dim=1)

    class TripletLoss(nn.Module):
        def __init__(self, margin=0.3):
            super().__init__()
            self.margin = margin

        def forward(self, anchor, positive, negative):
            d_pos = F.cosine_similarity(anchor, positive)
            d_neg = F.cosine_similarity(anchor, negative)
            return F.relu(d_pos - d_neg + self.margin).mean()

    xtr, ytr, _, _ = shape_pictures(1500, 71, classes=8)
    xte, yte, _, _ = shape_pictures(500, 72, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TripletDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = TripletLoss(margin=0.3)
    model.train()

    def step(i):
        anchor, positive, negative = next(batches)
        loss = criterion(model(anchor), model(positive), model(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            emb = model(xte)
            sim = emb @ emb.t()
            sim.fill_diagonal_(-2.0)
            err = (yte[sim.argmax(1)] != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def triplet_similarity_as_distance_good():
    torch.manual_seed(0)

    class TripletDataset(Dataset):
        def __init__(self, images, labels):
            self.images, self.labels = images, labels
            self.by_class = {c: (labels == c).nonzero().flatten() for c in labels.unique().tolist()}

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            c = self.labels[idx].item()
            pos_pool = self.by_class[c]
            pos = pos_pool[torch.randint(len(pos_pool), (1,))].item()
            while pos == idx:
                pos = pos_pool[torch.randint(len(pos_pool), (1,))].item()
            other = random_other(c, len(self.by_class))
            neg_pool = self.by_class[other]
            neg = neg_pool[torch.randint(len(neg_pool), (1,))].item()
            return self.images[idx], self.images[pos], self.images[neg]

    def random_other(c, n):
        o = torch.randint(n - 1, (1,)).item()
        return o if o < c else o + 1

    class EmbeddingNet(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
            )
            self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, dim))

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x)), dim=1)

    class TripletLoss(nn.Module):
        def __init__(self, margin=0.3):
            super().__init__()
            self.margin = margin

        def forward(self, anchor, positive, negative):
            d_pos = 1.0 - F.cosine_similarity(anchor, positive)
            d_neg = 1.0 - F.cosine_similarity(anchor, negative)
            return F.relu(d_pos - d_neg + self.margin).mean()

    xtr, ytr, _, _ = shape_pictures(1500, 71, classes=8)
    xte, yte, _, _ = shape_pictures(500, 72, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TripletDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = TripletLoss(margin=0.3)
    model.train()

    def step(i):
        anchor, positive, negative = next(batches)
        loss = criterion(model(anchor), model(positive), model(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            emb = model(xte)
            sim = emb @ emb.t()
            sim.fill_diagonal_(-2.0)
            err = (yte[sim.argmax(1)] != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gan_generator_step_on_detached_fake_bad():
    torch.manual_seed(0)
    nz = 16

    netG = nn.Sequential(
        nn.Linear(nz, 32 * 4 * 4),
        nn.Unflatten(1, (32, 4, 4)),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
        nn.Tanh(),
    )
    netD = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 1),
    )

    real_tr = shape_pictures(2000, 81, classes=1, noise=0.03)[0] * 2 - 1
    real_te = shape_pictures(500, 82, classes=1, noise=0.03)[0] * 2 - 1
    loader = DataLoader(TensorDataset(real_tr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.999))
    gz = torch.Generator().manual_seed(83)
    fixed_noise = torch.randn(500, nz, generator=gz)
    proj = F.normalize(torch.randn(256, 64, generator=gz), dim=0)
    netG.train()
    netD.train()

    def step(i):
        (real,) = next(batches)
        b = real.size(0)
        ones, zeros = torch.ones(b, 1), torch.zeros(b, 1)
        noise = torch.randn(b, nz)
        fake = netG(noise).detach()

        # update D
        optimizerD.zero_grad()
        errD_real = criterion(netD(real), ones)
        errD_fake = criterion(netD(fake), zeros)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()

        # update G
        optimizerG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        was = netG.training
        netG.eval()
        with torch.no_grad():
            fake = netG(fixed_noise).flatten(1) @ proj
            real = real_te.flatten(1) @ proj
            swd = (fake.sort(0).values - real.sort(0).values).abs().mean().item()
        netG.train(was)
        return swd

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def gan_generator_step_on_detached_fake_good():
    torch.manual_seed(0)
    nz = 16

    netG = nn.Sequential(
        nn.Linear(nz, 32 * 4 * 4),
        nn.Unflatten(1, (32, 4, 4)),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
        nn.Tanh(),
    )
    netD = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 1),
    )

    real_tr = shape_pictures(2000, 81, classes=1, noise=0.03)[0] * 2 - 1
    real_te = shape_pictures(500, 82, classes=1, noise=0.03)[0] * 2 - 1
    loader = DataLoader(TensorDataset(real_tr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=5e-4, betas=(0.5, 0.999))
    gz = torch.Generator().manual_seed(83)
    fixed_noise = torch.randn(500, nz, generator=gz)
    proj = F.normalize(torch.randn(256, 64, generator=gz), dim=0)
    netG.train()
    netD.train()

    def step(i):
        (real,) = next(batches)
        b = real.size(0)
        ones, zeros = torch.ones(b, 1), torch.zeros(b, 1)
        noise = torch.randn(b, nz)
        fake = netG(noise)

        # update D
        optimizerD.zero_grad()
        errD_real = criterion(netD(real), ones)
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD = errD_real + errD_fake
        errD.backward()
        optimizerD.step()

        # update G
        optimizerG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        was = netG.training
        netG.eval()
        with torch.no_grad():
            fake = netG(fixed_noise).flatten(1) @ proj
            real = real_te.flatten(1) @ proj
            swd = (fake.sort(0).values - real.sort(0).values).abs().mean().item()
        netG.train(was)
        return swd

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def vae_recon_mean_kl_sum_bad():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, latent=8):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc_mu = nn.Linear(128, latent)
            self.fc_logvar = nn.Linear(128, latent)
            self.fc3 = nn.Linear(latent, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h = F.relu(self.fc1(x))
            return self.fc_mu(h), self.fc_logvar(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + std * torch.randn_like(std)

        def decode(self, z):
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    def loss_function(logits, x, mu, logvar):
        target = x.view(-1, 256)
        bce = F.binary_cross_entropy_with_logits(logits, target)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    xtr = shape_pictures(3000, 91, classes=1, noise=0.0)[2].unsqueeze(1)
    xte = shape_pictures(400, 92, classes=1, noise=0.0)[2].unsqueeze(1)
    loader = DataLoader(TensorDataset(xtr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()

    def step(i):
        (x,) = next(batches)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = loss_function(logits, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mu, _ = model.encode(xte.view(-1, 256))
            mse = F.mse_loss(torch.sigmoid(model.decode(mu)), xte.view(-1, 256)).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_recon_mean_kl_sum_good():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, latent=8):
            super().__init__()
            self.fc1 = nn.Linear(256, 128)
            self.fc_mu = nn.Linear(128, latent)
            self.fc_logvar = nn.Linear(128, latent)
            self.fc3 = nn.Linear(latent, 128)
            self.fc4 = nn.Linear(128, 256)

        def encode(self, x):
            h = F.relu(self.fc1(x))
            return self.fc_mu(h), self.fc_logvar(h)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + std * torch.randn_like(std)

        def decode(self, z):
            return self.fc4(F.relu(self.fc3(z)))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    def loss_function(logits, x, mu, logvar):
        target = x.view(-1, 256)
        bce = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / x.size(0)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    xtr = shape_pictures(3000, 91, classes=1, noise=0.0)[2].unsqueeze(1)
    xte = shape_pictures(400, 92, classes=1, noise=0.0)[2].unsqueeze(1)
    loader = DataLoader(TensorDataset(xtr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()

    def step(i):
        (x,) = next(batches)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = loss_function(logits, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mu, _ = model.encode(xte.view(-1, 256))
            mse = F.mse_loss(torch.sigmoid(model.decode(mu)), xte.view(-1, 256)).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_uniform_noise_bad():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-3, 0.08, T)
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)

    def q_sample(x0, t, noise):
        a = alphas_cumprod[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    class TimeEmbedding(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim
            self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, 32))

        def forward(self, t):
            half = self.dim // 2
            freqs = torch.exp(-math.log(1000.0) * torch.arange(half) / half)
            ang = t.float().unsqueeze(1) * freqs.unsqueeze(0)
            return self.mlp(torch.cat([ang.sin(), ang.cos()], dim=1))

    class Denoiser(nn.Module):
        def __init__(self, ch=16):
            super().__init__()
            self.temb = TimeEmbedding(32)
            self.inp = nn.Conv2d(1, ch, 3, padding=1)
            self.down = nn.Conv2d(ch, 32, 3, stride=2, padding=1)
            self.t_proj = nn.Linear(32, 32)
            self.mid = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
            self.up = nn.ConvTranspose2d(32, ch, 2, stride=2)
            self.out = nn.Sequential(nn.GroupNorm(4, ch * 2), nn.SiLU(), nn.Conv2d(ch * 2, 1, 3, padding=1))

        def forward(self, x, t):
            h0 = self.inp(x)
            h1 = self.down(F.silu(h0)) + self.t_proj(self.temb(t)).view(-1, 32, 1, 1)
            h1 = h1 + self.mid(h1)
            return self.out(torch.cat([self.up(F.silu(h1)), h0], dim=1))

    xtr = shape_pictures(2000, 101, classes=4, noise=0.02)[0] * 2 - 1
    xte = shape_pictures(300, 102, classes=4, noise=0.02)[0] * 2 - 1
    ge = torch.Generator().manual_seed(103)
    t_te = torch.randint(0, T, (300,), generator=ge)
    noise_te = torch.randn(xte.shape, generator=ge)
    loader = DataLoader(TensorDataset(xtr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    model.train()

    def step(i):
        (x0,) = next(batches)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.rand_like(x0)
        pred = model(q_sample(x0, t, noise), t)
        loss = F.mse_loss(pred, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(q_sample(xte, t_te, noise_te), t_te), noise_te).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_uniform_noise_good():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-3, 0.08, T)
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)

    def q_sample(x0, t, noise):
        a = alphas_cumprod[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    class TimeEmbedding(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim
            self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, 32))

        def forward(self, t):
            half = self.dim // 2
            freqs = torch.exp(-math.log(1000.0) * torch.arange(half) / half)
            ang = t.float().unsqueeze(1) * freqs.unsqueeze(0)
            return self.mlp(torch.cat([ang.sin(), ang.cos()], dim=1))

    class Denoiser(nn.Module):
        def __init__(self, ch=16):
            super().__init__()
            self.temb = TimeEmbedding(32)
            self.inp = nn.Conv2d(1, ch, 3, padding=1)
            self.down = nn.Conv2d(ch, 32, 3, stride=2, padding=1)
            self.t_proj = nn.Linear(32, 32)
            self.mid = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
            self.up = nn.ConvTranspose2d(32, ch, 2, stride=2)
            self.out = nn.Sequential(nn.GroupNorm(4, ch * 2), nn.SiLU(), nn.Conv2d(ch * 2, 1, 3, padding=1))

        def forward(self, x, t):
            h0 = self.inp(x)
            h1 = self.down(F.silu(h0)) + self.t_proj(self.temb(t)).view(-1, 32, 1, 1)
            h1 = h1 + self.mid(h1)
            return self.out(torch.cat([self.up(F.silu(h1)), h0], dim=1))

    xtr = shape_pictures(2000, 101, classes=4, noise=0.02)[0] * 2 - 1
    xte = shape_pictures(300, 102, classes=4, noise=0.02)[0] * 2 - 1
    ge = torch.Generator().manual_seed(103)
    t_te = torch.randint(0, T, (300,), generator=ge)
    noise_te = torch.randn(xte.shape, generator=ge)
    loader = DataLoader(TensorDataset(xtr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    model.train()

    def step(i):
        (x0,) = next(batches)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        pred = model(q_sample(x0, t, noise), t)
        loss = F.mse_loss(pred, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mse = F.mse_loss(model(q_sample(xte, t_te, noise_te), t_te), noise_te).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def accum_zero_grad_every_micro_batch_bad():
    torch.manual_seed(0)
    accumulation_steps = 4

    xtr, ytr = table(3000, 111)
    xte, yte = table(1000, 112)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        (loss / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def accum_zero_grad_every_micro_batch_good():
    torch.manual_seed(0)
    accumulation_steps = 4

    xtr, ytr = table(3000, 111)
    xte, yte = table(1000, 112)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=16, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        inputs, labels = next(batches)
        loss = criterion(model(inputs), labels)
        (loss / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def two_optimizers_one_zero_grad_bad():
    torch.manual_seed(0)

    def make_series(n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(32).float().view(1, 32)
        f = 0.15 + 0.35 * torch.rand(n, 1, generator=g)
        ph = 6.28 * torch.rand(n, 1, generator=g)
        amp = 0.7 + 0.6 * torch.rand(n, 1, generator=g)
        return (amp * torch.sin(f * t + ph) + 0.05 * torch.randn(n, 32, generator=g)).unsqueeze(2)

    class Encoder(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.rnn = nn.GRU(1, hidden, batch_first=True)

        def forward(self, x):
            _, h = self.rnn(x)
            return h

    class Decoder(nn.Module):
        def __init__(self, hidden=32, horizon=8):
            super().__init__()
            self.rnn = nn.GRU(1, hidden, batch_first=True)
            self.out = nn.Linear(hidden, 1)
            self.horizon = horizon

        def forward(self, last, h):
            outs, inp = [], last
            for _ in range(self.horizon):
                o, h = self.rnn(inp, h)
                inp = self.out(o)
                outs.append(inp)
            return torch.cat(outs, dim=1)

    train, test = make_series(2000, 121), make_series(400, 122)
    loader = DataLoader(TensorDataset(train), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    encoder, decoder = Encoder(), Decoder()
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    encoder.train()
    decoder.train()

    def step(i):
        (series,) = next(batches)
        past, future = series[:, :24], series[:, 24:]
        decoder_optimizer.zero_grad()
        hidden = encoder(past)
        pred = decoder(past[:, -1:], hidden)
        loss = criterion(pred, future)
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        return loss.item()

    def probe():
        was = encoder.training, decoder.training
        encoder.eval()
        decoder.eval()
        with torch.no_grad():
            past, future = test[:, :24], test[:, 24:]
            mse = F.mse_loss(decoder(past[:, -1:], encoder(past)), future).item()
        encoder.train(was[0])
        decoder.train(was[1])
        return mse

    return {
        "model": (encoder, decoder),
        "optimizer": (encoder_optimizer, decoder_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def two_optimizers_one_zero_grad_good():
    torch.manual_seed(0)

    def make_series(n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(32).float().view(1, 32)
        f = 0.15 + 0.35 * torch.rand(n, 1, generator=g)
        ph = 6.28 * torch.rand(n, 1, generator=g)
        amp = 0.7 + 0.6 * torch.rand(n, 1, generator=g)
        return (amp * torch.sin(f * t + ph) + 0.05 * torch.randn(n, 32, generator=g)).unsqueeze(2)

    class Encoder(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.rnn = nn.GRU(1, hidden, batch_first=True)

        def forward(self, x):
            _, h = self.rnn(x)
            return h

    class Decoder(nn.Module):
        def __init__(self, hidden=32, horizon=8):
            super().__init__()
            self.rnn = nn.GRU(1, hidden, batch_first=True)
            self.out = nn.Linear(hidden, 1)
            self.horizon = horizon

        def forward(self, last, h):
            outs, inp = [], last
            for _ in range(self.horizon):
                o, h = self.rnn(inp, h)
                inp = self.out(o)
                outs.append(inp)
            return torch.cat(outs, dim=1)

    train, test = make_series(2000, 121), make_series(400, 122)
    loader = DataLoader(TensorDataset(train), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    encoder, decoder = Encoder(), Decoder()
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    encoder.train()
    decoder.train()

    def step(i):
        (series,) = next(batches)
        past, future = series[:, :24], series[:, 24:]
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        hidden = encoder(past)
        pred = decoder(past[:, -1:], hidden)
        loss = criterion(pred, future)
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        return loss.item()

    def probe():
        was = encoder.training, decoder.training
        encoder.eval()
        decoder.eval()
        with torch.no_grad():
            past, future = test[:, :24], test[:, 24:]
            mse = F.mse_loss(decoder(past[:, -1:], encoder(past)), future).item()
        encoder.train(was[0])
        decoder.train(was[1])
        return mse

    return {
        "model": (encoder, decoder),
        "optimizer": (encoder_optimizer, decoder_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def amp_clip_without_unscale_bad():
    torch.manual_seed(0)

    xtr, ytr = table(3000, 131)
    xte, yte = table(1000, 132)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()
    max_norm = 1.0
    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = criterion(logits.float(), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_without_unscale_good():
    torch.manual_seed(0)

    xtr, ytr = table(3000, 131)
    xte, yte = table(1000, 132)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    criterion = nn.CrossEntropyLoss()
    max_norm = 1.0
    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = criterion(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bf16_weights_instead_of_autocast_bad():
    torch.manual_seed(0)

    def regression(n, seed):
        gw = torch.Generator().manual_seed(5)
        w1 = torch.randn(16, 12, generator=gw) / 4
        w2 = torch.randn(12, 1, generator=gw)
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 16, generator=g)
        y = torch.tanh(1.5 * x @ w1) @ w2
        return x, (y / 2.5 + 0.05 * torch.randn(n, 1, generator=g))

    xtr, ytr = regression(4000, 141)
    xte, yte = regression(1000, 142)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2)
    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        pred = model(x.to(torch.bfloat16))
        loss = F.mse_loss(pred.float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            dtype = next(model.parameters()).dtype
            mse = F.mse_loss(model(xte.to(dtype)).float(), yte).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bf16_weights_instead_of_autocast_good():
    torch.manual_seed(0)

    def regression(n, seed):
        gw = torch.Generator().manual_seed(5)
        w1 = torch.randn(16, 12, generator=gw) / 4
        w2 = torch.randn(12, 1, generator=gw)
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 16, generator=g)
        y = torch.tanh(1.5 * x @ w1) @ w2
        return x, (y / 2.5 + 0.05 * torch.randn(n, 1, generator=g))

    xtr, ytr = regression(4000, 141)
    xte, yte = regression(1000, 142)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2)
    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = model(x)
        loss = F.mse_loss(pred.float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            dtype = next(model.parameters()).dtype
            mse = F.mse_loss(model(xte.to(dtype)).float(), yte).item()
        model.train(was)
        return mse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ema_without_bn_buffers_bad():
    torch.manual_seed(0)

    class ModelEMA:
        def __init__(self, model, decay=0.97):
            self.module = copy.deepcopy(model).eval()
            self.decay = decay
            for p in self.module.parameters():
                p.requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for ema_p, p in zip(self.module.parameters(), model.parameters()):
                ema_p.mul_(self.decay).add_(p, alpha=1 - self.decay)

    xtr, ytr, _, _ = shape_pictures(2000, 151, classes=8)
    xte, yte, _, _ = shape_pictures(500, 152, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 8),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    ema = ModelEMA(model)
    model.train()

    def step(i):
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    def probe():
        with torch.no_grad():
            return (ema.module(xte).argmax(1) != yte).float().mean().item()

    return {
        "model": {"model": model, "ema": ema.module},
        "optimizer": optimizer,
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def ema_without_bn_buffers_good():
    torch.manual_seed(0)

    class ModelEMA:
        def __init__(self, model, decay=0.97):
            self.module = copy.deepcopy(model).eval()
            self.decay = decay
            for p in self.module.parameters():
                p.requires_grad_(False)

        @torch.no_grad()
        def update(self, model):
            for ema_p, p in zip(self.module.parameters(), model.parameters()):
                ema_p.mul_(self.decay).add_(p, alpha=1 - self.decay)
            for ema_b, b in zip(self.module.buffers(), model.buffers()):
                ema_b.copy_(b)

    xtr, ytr, _, _ = shape_pictures(2000, 151, classes=8)
    xte, yte, _, _ = shape_pictures(500, 152, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 8),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    ema = ModelEMA(model)
    model.train()

    def step(i):
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        return loss.item()

    def probe():
        with torch.no_grad():
            return (ema.module(xte).argmax(1) != yte).float().mean().item()

    return {
        "model": {"model": model, "ema": ema.module},
        "optimizer": optimizer,
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def steplr_stepped_every_batch_bad():
    torch.manual_seed(0)

    xtr, ytr = table(640, 161)
    xte, yte = table(1000, 162)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)
    batches = forever(train_loader)

    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)  # drop every 10 epochs
    model.train()

    def step(i):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def steplr_stepped_every_batch_good():
    torch.manual_seed(0)

    xtr, ytr = table(640, 161)
    xte, yte = table(1000, 162)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)
    batches = forever(train_loader)

    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)  # drop every 10 epochs
    model.train()

    def step(i):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def param_groups_miss_factors_bad():
    torch.manual_seed(0)
    n_users, n_items, k = 120, 80, 8

    def ratings(n, seed):
        gw = torch.Generator().manual_seed(3)
        pu = torch.randn(n_users, 4, generator=gw)
        qi = torch.randn(n_items, 4, generator=gw)
        bu, bi = 0.4 * torch.randn(n_users, generator=gw), 0.4 * torch.randn(n_items, generator=gw)
        g = torch.Generator().manual_seed(seed)
        u = torch.randint(n_users, (n,), generator=g)
        i = torch.randint(n_items, (n,), generator=g)
        r = 0.5 * (pu[u] * qi[i]).sum(1) + bu[u] + bi[i] + 0.1 * torch.randn(n, generator=g)
        return torch.stack([u, n_users + i], 1), r

    class FactorizationMachine(nn.Module):
        def __init__(self, n_features, k):
            super().__init__()
            self.linear = nn.Embedding(n_features, 1)
            nn.init.normal_(self.linear.weight, std=0.01)
            self.bias = nn.Parameter(torch.zeros(1))
            self.factors = nn.Parameter(torch.randn(n_features, k) * 0.1)

        def forward(self, idx):
            first = self.linear(idx).sum(dim=1).squeeze(1)
            v = self.factors[idx]
            second = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
            return self.bias + first + second

    def configure_optimizer(model, lr, weight_decay):
        decay, no_decay = [], []
        for name, p in model.named_parameters():
            if name.endswith("weight"):
                decay.append(p)
            elif name.endswith("bias"):
                no_decay.append(p)
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}], lr=lr
        )

    xtr, rtr = ratings(6000, 171)
    xte, rte = ratings(1500, 172)
    loader = DataLoader(TensorDataset(xtr, rtr), batch_size=128, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = FactorizationMachine(n_users + n_items, k)
    optimizer = configure_optimizer(model, lr=1e-2, weight_decay=1e-2)
    model.train()

    def step(i):
        idx, rating = next(batches)
        loss = F.mse_loss(model(idx), rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            rmse = F.mse_loss(model(xte), rte).sqrt().item()
        model.train(was)
        return rmse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def param_groups_miss_factors_good():
    torch.manual_seed(0)
    n_users, n_items, k = 120, 80, 8

    def ratings(n, seed):
        gw = torch.Generator().manual_seed(3)
        pu = torch.randn(n_users, 4, generator=gw)
        qi = torch.randn(n_items, 4, generator=gw)
        bu, bi = 0.4 * torch.randn(n_users, generator=gw), 0.4 * torch.randn(n_items, generator=gw)
        g = torch.Generator().manual_seed(seed)
        u = torch.randint(n_users, (n,), generator=g)
        i = torch.randint(n_items, (n,), generator=g)
        r = 0.5 * (pu[u] * qi[i]).sum(1) + bu[u] + bi[i] + 0.1 * torch.randn(n, generator=g)
        return torch.stack([u, n_users + i], 1), r

    class FactorizationMachine(nn.Module):
        def __init__(self, n_features, k):
            super().__init__()
            self.linear = nn.Embedding(n_features, 1)
            nn.init.normal_(self.linear.weight, std=0.01)
            self.bias = nn.Parameter(torch.zeros(1))
            self.factors = nn.Parameter(torch.randn(n_features, k) * 0.1)

        def forward(self, idx):
            first = self.linear(idx).sum(dim=1).squeeze(1)
            v = self.factors[idx]
            second = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
            return self.bias + first + second

    def configure_optimizer(model, lr, weight_decay):
        decay, no_decay = [], []
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                no_decay.append(p)
            else:
                decay.append(p)
        return torch.optim.AdamW(
            [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}], lr=lr
        )

    xtr, rtr = ratings(6000, 171)
    xte, rte = ratings(1500, 172)
    loader = DataLoader(TensorDataset(xtr, rtr), batch_size=128, shuffle=True, drop_last=True)
    batches = forever(loader)

    model = FactorizationMachine(n_users + n_items, k)
    optimizer = configure_optimizer(model, lr=1e-2, weight_decay=1e-2)
    model.train()

    def step(i):
        idx, rating = next(batches)
        loss = F.mse_loss(model(idx), rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            rmse = F.mse_loss(model(xte), rte).sqrt().item()
        model.train(was)
        return rmse

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def eval_mode_never_switched_back_bad():
    torch.manual_seed(0)

    def conv_bn(cin, cout, stride=1):
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU()
        )

    class PlainNet(nn.Module):
        def __init__(self, num_classes=8):
            super().__init__()
            self.features = nn.Sequential(
                conv_bn(1, 16),
                conv_bn(16, 16),
                conv_bn(16, 32, 2),
                conv_bn(32, 32),
                conv_bn(32, 32, 2),
                conv_bn(32, 32),
                conv_bn(32, 32),
            )
            self.dropout = nn.Dropout(0.2)
            self.fc = nn.Linear(32, num_classes)

        def forward(self, x):
            return self.fc(self.dropout(self.features(x).mean(dim=(2, 3))))

    xtr, ytr, _, _ = shape_pictures(2000, 181, classes=8)
    xval, yval, _, _ = shape_pictures(200, 182, classes=8)
    xte, yte, _, _ = shape_pictures(500, 183, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xval, xte = (xtr - mean) / std, (xval - mean) / std, (xte - mean) / std
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(TensorDataset(xval, yval), batch_size=100)
    batches = forever(train_loader)

    model = PlainNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    eval_every = 10
    history = []

    @torch.no_grad()
    def validate():
        model.eval()
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
        return correct / len(xval)

    model.train()

    def step(i):
        if i % eval_every == 0:
            history.append(validate())
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def eval_mode_never_switched_back_good():
    torch.manual_seed(0)

    def conv_bn(cin, cout, stride=1):
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU()
        )

    class PlainNet(nn.Module):
        def __init__(self, num_classes=8):
            super().__init__()
            self.features = nn.Sequential(
                conv_bn(1, 16),
                conv_bn(16, 16),
                conv_bn(16, 32, 2),
                conv_bn(32, 32),
                conv_bn(32, 32, 2),
                conv_bn(32, 32),
                conv_bn(32, 32),
            )
            self.dropout = nn.Dropout(0.2)
            self.fc = nn.Linear(32, num_classes)

        def forward(self, x):
            return self.fc(self.dropout(self.features(x).mean(dim=(2, 3))))

    xtr, ytr, _, _ = shape_pictures(2000, 181, classes=8)
    xval, yval, _, _ = shape_pictures(200, 182, classes=8)
    xte, yte, _, _ = shape_pictures(500, 183, classes=8)
    mean, std = xtr.mean(), xtr.std()
    xtr, xval, xte = (xtr - mean) / std, (xval - mean) / std, (xte - mean) / std
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(TensorDataset(xval, yval), batch_size=100)
    batches = forever(train_loader)

    model = PlainNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    eval_every = 10
    history = []

    @torch.no_grad()
    def validate():
        model.eval()
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
        model.train()
        return correct / len(xval)

    model.train()

    def step(i):
        if i % eval_every == 0:
            history.append(validate())
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sampler_given_class_weights_bad():
    torch.manual_seed(0)

    def imbalanced(n, seed):
        x, y = table(n, seed, classes=4)
        keep_share = torch.tensor([1.0, 0.5, 0.25, 0.12])
        g = torch.Generator().manual_seed(seed + 1)
        keep = torch.rand(n, generator=g) < keep_share[y]
        return x[keep], y[keep]

    xtr, ytr = imbalanced(5000, 191)
    xte, yte = imbalanced(3000, 195)
    train_set = TensorDataset(xtr, ytr)
    class_counts = torch.bincount(ytr, minlength=4)
    class_weights = 1.0 / class_counts.float()
    sampler = WeightedRandomSampler(class_weights, num_samples=len(train_set), replacement=True)
    loader = DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            wrong = (model(xte).argmax(1) != yte).float()
            err = torch.stack([wrong[yte == c].mean() for c in range(4)]).mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sampler_given_class_weights_good():
    torch.manual_seed(0)

    def imbalanced(n, seed):
        x, y = table(n, seed, classes=4)
        keep_share = torch.tensor([1.0, 0.5, 0.25, 0.12])
        g = torch.Generator().manual_seed(seed + 1)
        keep = torch.rand(n, generator=g) < keep_share[y]
        return x[keep], y[keep]

    xtr, ytr = imbalanced(5000, 191)
    xte, yte = imbalanced(3000, 195)
    train_set = TensorDataset(xtr, ytr)
    class_counts = torch.bincount(ytr, minlength=4)
    class_weights = 1.0 / class_counts.float()
    sample_weights = class_weights[ytr]
    sampler = WeightedRandomSampler(sample_weights, num_samples=len(train_set), replacement=True)
    loader = DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True)
    batches = forever(loader)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            wrong = (model(xte).argmax(1) != yte).float()
            err = torch.stack([wrong[yte == c].mean() for c in range(4)]).mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_age_broadcast_bad():
    torch.manual_seed(0)

    def faces(n, seed):
        """feature vectors, a binary attribute, and the standardised age"""
        gw = torch.Generator().manual_seed(9)
        wa = torch.randn(24, generator=gw) / math.sqrt(24)
        wg = torch.randn(24, generator=gw) / math.sqrt(24)
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 24, generator=g)
        s = x @ wa
        age = s + 0.4 * s**2 * torch.sign(x[:, 0]) + 0.1 * torch.randn(n, generator=g)
        return x, (x @ wg + 0.2 * torch.randn(n, generator=g) > 0).long(), age

    xtr, gtr, atr = faces(3000, 201)
    xte, gte, ate = faces(800, 202)
    mu, sd = atr.mean(), atr.std()
    atr, ate = (atr - mu) / sd, (ate - mu) / sd
    loader = DataLoader(TensorDataset(xtr, gtr, atr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    class FaceNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.gender_head = nn.Linear(64, 2)
            self.age_head = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.gender_head(h), self.age_head(h)

    model = FaceNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gender_criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        x, gender, age = next(batches)
        gender_logits, age_pred = model(x)
        loss_gender = gender_criterion(gender_logits, gender)
        loss_age = torch.mean(torch.abs(age_pred - age))
        loss = loss_gender + loss_age
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mae = (model(xte)[1].squeeze(1) - ate).abs().mean().item()
        model.train(was)
        return mae

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def multitask_age_broadcast_good():
    torch.manual_seed(0)

    def faces(n, seed):
        """feature vectors, a binary attribute, and the standardised age"""
        gw = torch.Generator().manual_seed(9)
        wa = torch.randn(24, generator=gw) / math.sqrt(24)
        wg = torch.randn(24, generator=gw) / math.sqrt(24)
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 24, generator=g)
        s = x @ wa
        age = s + 0.4 * s**2 * torch.sign(x[:, 0]) + 0.1 * torch.randn(n, generator=g)
        return x, (x @ wg + 0.2 * torch.randn(n, generator=g) > 0).long(), age

    xtr, gtr, atr = faces(3000, 201)
    xte, gte, ate = faces(800, 202)
    mu, sd = atr.mean(), atr.std()
    atr, ate = (atr - mu) / sd, (ate - mu) / sd
    loader = DataLoader(TensorDataset(xtr, gtr, atr), batch_size=64, shuffle=True, drop_last=True)
    batches = forever(loader)

    class FaceNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.gender_head = nn.Linear(64, 2)
            self.age_head = nn.Linear(64, 1)

        def forward(self, x):
            h = self.trunk(x)
            return self.gender_head(h), self.age_head(h)

    model = FaceNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    gender_criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        x, gender, age = next(batches)
        gender_logits, age_pred = model(x)
        loss_gender = gender_criterion(gender_logits, gender)
        loss_age = torch.mean(torch.abs(age_pred.squeeze(1) - age))
        loss = loss_gender + loss_age
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            mae = (model(xte)[1].squeeze(1) - ate).abs().mean().item()
        model.train(was)
        return mae

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_reads_padded_last_step_bad():
    torch.manual_seed(0)

    class SeriesDataset(Dataset):
        """sensor traces of 5 to 60 steps; the class is told by their last steps"""

        def __init__(self, n, seed):
            g = torch.Generator().manual_seed(seed)
            patterns = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(2))
            self.items = []
            for _ in range(n):
                length = torch.randint(5, 61, (1,), generator=g).item()
                label = torch.randint(0, 4, (1,), generator=g).item()
                seq = torch.randn(length, 3, generator=g)
                seq[-4:] = patterns[label] + 0.5 * torch.randn(4, 3, generator=g)
                self.items.append((seq, label))

        def __len__(self):
            return len(self.items)

        def __getitem__(self, idx):
            return self.items[idx]

    def collate_fn(batch):
        seqs, labels = zip(*batch)
        lengths = torch.tensor([len(s) for s in seqs])
        return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)

    class LSTMClassifier(nn.Module):
        def __init__(self, n_features=3, hidden=32, num_classes=4):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, num_classes)

        def forward(self, x, lengths):
            out, _ = self.lstm(x)
            last = out[:, -1]
            return self.fc(last)

    loader = DataLoader(SeriesDataset(2000, 211), batch_size=32, shuffle=True, collate_fn=collate_fn, drop_last=True)
    xte, lte, yte = collate_fn(SeriesDataset(500, 212).items)
    batches = forever(loader)

    model = LSTMClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        x, lengths, y = next(batches)
        logits = model(x, lengths)
        loss = criterion(logits, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte, lte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_reads_padded_last_step_good():
    torch.manual_seed(0)

    class SeriesDataset(Dataset):
        """sensor traces of 5 to 60 steps; the class is told by their last steps"""

        def __init__(self, n, seed):
            g = torch.Generator().manual_seed(seed)
            patterns = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(2))
            self.items = []
            for _ in range(n):
                length = torch.randint(5, 61, (1,), generator=g).item()
                label = torch.randint(0, 4, (1,), generator=g).item()
                seq = torch.randn(length, 3, generator=g)
                seq[-4:] = patterns[label] + 0.5 * torch.randn(4, 3, generator=g)
                self.items.append((seq, label))

        def __len__(self):
            return len(self.items)

        def __getitem__(self, idx):
            return self.items[idx]

    def collate_fn(batch):
        seqs, labels = zip(*batch)
        lengths = torch.tensor([len(s) for s in seqs])
        return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)

    class LSTMClassifier(nn.Module):
        def __init__(self, n_features=3, hidden=32, num_classes=4):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, num_classes)

        def forward(self, x, lengths):
            out, _ = self.lstm(x)
            last = out[torch.arange(x.size(0)), lengths - 1]
            return self.fc(last)

    loader = DataLoader(SeriesDataset(2000, 211), batch_size=32, shuffle=True, collate_fn=collate_fn, drop_last=True)
    xte, lte, yte = collate_fn(SeriesDataset(500, 212).items)
    batches = forever(loader)

    model = LSTMClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    model.train()

    def step(i):
        x, lengths, y = next(batches)
        logits = model(x, lengths)
        loss = criterion(logits, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte, lte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
