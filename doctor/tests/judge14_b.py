"""Twenty-two small programs of tensors that do not learn, and of structures, each with one bug that people often make,
and a mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""

import copy
import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

CASES = []


# ----------------------------------------------------------------------------- shared data helpers
def _gen(seed):
    return torch.Generator().manual_seed(seed)


def _cycle(loader):
    while True:
        yield from loader


def _pictures(n, seed, classes=6, size=16, noise=0.5, template_seed=100):
    """Pictures of `classes` smooth patterns, shifted and noisy, roughly zero mean and unit variance."""
    t = torch.randn(classes, 1, 5, 5, generator=_gen(template_seed))
    t = F.interpolate(t, size=(size, size), mode="bilinear", align_corners=False)
    t = (t - t.mean(dim=(1, 2, 3), keepdim=True)) / t.std(dim=(1, 2, 3), keepdim=True)
    g = _gen(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    dx = torch.randint(-3, 4, (n, 2), generator=g)
    x = torch.stack([torch.roll(t[c], (int(a), int(b)), dims=(1, 2)) for c, (a, b) in zip(y.tolist(), dx.tolist())])
    x = x + noise * torch.randn(x.shape, generator=g)
    return x / math.sqrt(1 + noise ** 2), y


def _table(n, seed, d=12, classes=0):
    """A standardised table with a non-linear target (standardised), or a class label."""
    g = _gen(seed)
    x = torch.randn(n, d, generator=g)
    w = torch.randn(d, 6, generator=_gen(77)) / math.sqrt(d)
    h = torch.tanh(2.0 * x @ w)
    t = 1.2 * h[:, 0] * h[:, 1] + h[:, 2] - 0.8 * h[:, 3].abs() + 0.9 * h[:, 4] * h[:, 5]
    if classes:
        t = t + 0.05 * torch.randn(n, generator=g)
        edges = torch.tensor([-1.1, -0.5, 0.1])[: classes - 1]
        return x, torch.bucketize(t, edges)
    t = (t + 0.5) / 0.95
    return x, t + 0.05 * torch.randn(n, generator=g)


# ----------------------------------------------------------------------------- 1
CASES.append({
    "name": "vit_pos_embed_plain_tensor",
    "probe": "error rate on held-out pictures",
    "what": "The position embedding of a small vision transformer is a plain tensor with requires_grad=True and not an "
            "nn.Parameter, so it is in no module's parameters() and the optimizer never moves it from its start.",
    "steps": 500,
})


def _placed_glyphs(n, seed):
    """One of two glyphs lies in one of 16 cells; the label is glyph x quadrant."""
    g = _gen(seed)
    glyph = torch.tensor([[[1., 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]],
                          [[1., 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]]])
    k = torch.randint(0, 2, (n,), generator=g)
    r = torch.randint(0, 4, (n,), generator=g)
    c = torch.randint(0, 4, (n,), generator=g)
    x = torch.zeros(n, 1, 16, 16)
    for i in range(n):
        x[i, 0, r[i] * 4:r[i] * 4 + 4, c[i] * 4:c[i] * 4 + 4] = 3.0 * glyph[k[i]]
    x = x + 0.4 * torch.randn(x.shape, generator=g)
    x = (x - 0.105) / 0.68
    return x, k * 4 + (r // 2) * 2 + (c // 2)


def vit_pos_embed_plain_tensor_bad():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.norm1 = nn.LayerNorm(dim)
            self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
            self.norm2 = nn.LayerNorm(dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

        def forward(self, x):
            h = self.norm1(x)
            x = x + self.attn(h, h, h, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    class TinyViT(nn.Module):
        def __init__(self, dim=32, depth=2, heads=4, num_classes=8):
            super().__init__()
            self.patch_embed = nn.Conv2d(1, dim, kernel_size=4, stride=4)
            self.pos_embed = torch.zeros(1, 16, dim, requires_grad=True)
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
            self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, num_classes)

        def forward(self, x):
            x = self.patch_embed(x).flatten(2).transpose(1, 2)
            x = x + self.pos_embed
            x = self.norm(self.blocks(x))
            return self.head(x.mean(dim=1))

    xtr, ytr = _placed_glyphs(2048, 1)
    xte, yte = _placed_glyphs(512, 2)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(3))
    batches = _cycle(loader)
    model = TinyViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
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


def vit_pos_embed_plain_tensor_good():
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.norm1 = nn.LayerNorm(dim)
            self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
            self.norm2 = nn.LayerNorm(dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

        def forward(self, x):
            h = self.norm1(x)
            x = x + self.attn(h, h, h, need_weights=False)[0]
            return x + self.mlp(self.norm2(x))

    class TinyViT(nn.Module):
        def __init__(self, dim=32, depth=2, heads=4, num_classes=8):
            super().__init__()
            self.patch_embed = nn.Conv2d(1, dim, kernel_size=4, stride=4)
            self.pos_embed = nn.Parameter(torch.zeros(1, 16, dim))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
            self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
            self.norm = nn.LayerNorm(dim)
            self.head = nn.Linear(dim, num_classes)

        def forward(self, x):
            x = self.patch_embed(x).flatten(2).transpose(1, 2)
            x = x + self.pos_embed
            x = self.norm(self.blocks(x))
            return self.head(x.mean(dim=1))

    xtr, ytr = _placed_glyphs(2048, 1)
    xte, yte = _placed_glyphs(512, 2)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(3))
    batches = _cycle(loader)
    model = TinyViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
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


# ----------------------------------------------------------------------------- pretrained picture net (shared by 2, 3)
class _ConvNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.LayerNorm(32 * 4 * 4),
        )
        self.fc = nn.Linear(32 * 4 * 4, num_classes)

    def forward(self, x):
        return self.fc(self.features(x))


@functools.lru_cache(None)
def _pretrained_convnet_state():
    """Weights of a picture classifier trained on 12 'source' classes, as from a model zoo."""
    state = torch.get_rng_state()
    torch.manual_seed(123)
    net = _ConvNet(12)
    x, y = _pictures(2400, 11, classes=12, template_seed=5)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(4):
        perm = torch.randperm(len(x))
        for b in perm.split(64):
            opt.zero_grad()
            F.cross_entropy(net(x[b]), y[b]).backward()
            opt.step()
    torch.set_rng_state(state)
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


# ----------------------------------------------------------------------------- 2
CASES.append({
    "name": "head_replaced_after_optimizer",
    "probe": "error rate on held-out pictures",
    "what": "The classifier head model.fc is replaced for the new classes after the optimizer was built from "
            "model.parameters(), so the optimizer still holds the old head and the new one keeps its random weights.",
    "steps": 200,
})


def head_replaced_after_optimizer_bad():
    torch.manual_seed(0)
    xtr, ytr = _pictures(1024, 21, classes=8, template_seed=9)
    xte, yte = _pictures(512, 22, classes=8, template_seed=9)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(3))
    batches = _cycle(train_loader)

    model = _ConvNet(num_classes=12)
    model.load_state_dict(_pretrained_convnet_state())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    model.fc = nn.Linear(model.fc.in_features, 8)
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
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def head_replaced_after_optimizer_good():
    torch.manual_seed(0)
    xtr, ytr = _pictures(1024, 21, classes=8, template_seed=9)
    xte, yte = _pictures(512, 22, classes=8, template_seed=9)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(3))
    batches = _cycle(train_loader)

    model = _ConvNet(num_classes=12)
    model.load_state_dict(_pretrained_convnet_state())
    model.fc = nn.Linear(model.fc.in_features, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
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
        was = model.training
        model.eval()
        with torch.no_grad():
            err = (model(xte).argmax(1) != yte).float().mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 3
CASES.append({
    "name": "require_grad_misspelt_backbone",
    "probe": "mean error rate of the new head and of the old head on the shared backbone",
    "what": "The backbone is meant to be frozen, but the loop sets p.require_grad = False (a misspelt, new attribute), so "
            "all pretrained weights move at the head's rate and the old head that shares the backbone no longer fits.",
    "steps": 250,
})


def require_grad_misspelt_backbone_bad():
    torch.manual_seed(0)
    xtr, ytr = _pictures(256, 31, classes=8, template_seed=9, noise=1.0)
    xte, yte = _pictures(1024, 32, classes=8, template_seed=9, noise=1.0)
    xold, yold = _pictures(1024, 33, classes=12, template_seed=5)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, generator=_gen(4))
    batches = _cycle(loader)

    model = _ConvNet(num_classes=12)
    model.load_state_dict(_pretrained_convnet_state())
    for p in model.features.parameters():
        p.require_grad = False
    old_head = copy.deepcopy(model.fc)  # stays in use for the first 12 classes
    model.fc = nn.Linear(model.fc.in_features, 8)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-3)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            new = (model(xte).argmax(1) != yte).float().mean().item()
            old = (old_head(model.features(xold)).argmax(1) != yold).float().mean().item()
        model.train(was)
        return 0.5 * (new + old)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def require_grad_misspelt_backbone_good():
    torch.manual_seed(0)
    xtr, ytr = _pictures(256, 31, classes=8, template_seed=9, noise=1.0)
    xte, yte = _pictures(1024, 32, classes=8, template_seed=9, noise=1.0)
    xold, yold = _pictures(1024, 33, classes=12, template_seed=5)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, generator=_gen(4))
    batches = _cycle(loader)

    model = _ConvNet(num_classes=12)
    model.load_state_dict(_pretrained_convnet_state())
    for p in model.features.parameters():
        p.requires_grad = False
    old_head = copy.deepcopy(model.fc)  # stays in use for the first 12 classes
    model.fc = nn.Linear(model.fc.in_features, 8)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=5e-3)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            new = (model(xte).argmax(1) != yte).float().mean().item()
            old = (old_head(model.features(xold)).argmax(1) != yold).float().mean().item()
        model.train(was)
        return 0.5 * (new + old)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 4
CASES.append({
    "name": "steplr_stepped_every_batch",
    "probe": "error rate on held-out rows",
    "what": "StepLR(step_size=8) is meant in epochs but scheduler.step() sits inside the batch loop, so the rate falls "
            "tenfold every 8 batches and training is over in the first epoch.",
    "steps": 400,
})


def steplr_stepped_every_batch_bad():
    torch.manual_seed(0)
    xtr, ytr = _table(1280, 41, classes=4)
    xte, yte = _table(1024, 42, classes=4)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, generator=_gen(5))
    batches = _cycle(train_loader)

    model = nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(),
        nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 4),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.1)  # epochs
    steps_per_epoch = len(train_loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
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
    xtr, ytr = _table(1280, 41, classes=4)
    xte, yte = _table(1024, 42, classes=4)
    train_loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, generator=_gen(5))
    batches = _cycle(train_loader)

    model = nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(),
        nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 4),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.1)  # epochs
    steps_per_epoch = len(train_loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % steps_per_epoch == 0:
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


# ----------------------------------------------------------------------------- 5
CASES.append({
    "name": "amp_clip_while_scaled",
    "probe": "mean squared error on held-out windows",
    "what": "With a GradScaler the gradients are clipped to norm 1 while they still carry the loss scale (no "
            "scaler.unscale_ before clip_grad_norm_), so after unscaling in scaler.step almost nothing is left of each update.",
    "steps": 300,
})


def _sensor_windows(n, seed, t=48):
    """Windows of two sensors; the target is the (standardised) mix of frequency and phase lag of the pair."""
    g = _gen(seed)
    f = 1.0 + 3.0 * torch.rand(n, 1, generator=g)
    lag = 1.5 * torch.rand(n, 1, generator=g)
    ph = 2 * math.pi * torch.rand(n, 1, generator=g)
    s = torch.linspace(0, 2 * math.pi, t)[None]
    a, b = torch.sin(f * s + ph), torch.sin(f * s + ph + lag)
    x = torch.stack([a, b], dim=1) + 0.1 * torch.randn(n, 2, t, generator=g)
    y = ((f - 2.5) / 0.866 + (lag - 0.75) / 0.433) / math.sqrt(2)
    return x / 0.714, y


def amp_clip_while_scaled_bad():
    torch.manual_seed(0)
    device = "cpu"
    xtr, ytr = _sensor_windows(2048, 51)
    xte, yte = _sensor_windows(512, 52)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(6))
    batches = _cycle(loader)

    net = nn.Sequential(nn.Flatten(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 12)

    def step(i):
        net.train()
        x, y = next(batches)
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device, dtype=torch.float16):
            pred = net(x)
            loss = F.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        was = net.training
        net.eval()
        with torch.no_grad():
            err = F.mse_loss(net(xte), yte).item()
        net.train(was)
        return err

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_while_scaled_good():
    torch.manual_seed(0)
    device = "cpu"
    xtr, ytr = _sensor_windows(2048, 51)
    xte, yte = _sensor_windows(512, 52)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(6))
    batches = _cycle(loader)

    net = nn.Sequential(nn.Flatten(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=2.0 ** 12)

    def step(i):
        net.train()
        x, y = next(batches)
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device, dtype=torch.float16):
            pred = net(x)
            loss = F.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        was = net.training
        net.eval()
        with torch.no_grad():
            err = F.mse_loss(net(xte), yte).item()
        net.train(was)
        return err

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 6
CASES.append({
    "name": "bf16_weights_lose_updates",
    "probe": "mean squared error on held-out rows",
    "what": "The whole model is cast to bfloat16 (.to(torch.bfloat16)) and trained with a small rate and no float32 "
            "master weights, so most updates are smaller than half a bfloat16 step and are rounded away.",
    "steps": 1200,
})


def bf16_weights_lose_updates_bad():
    torch.manual_seed(0)
    xtr, ytr = _table(4096, 61)
    xte, yte = _table(1024, 62)
    loader = DataLoader(TensorDataset(xtr, ytr.unsqueeze(1)), batch_size=128, shuffle=True, drop_last=True, generator=_gen(7))
    batches = _cycle(loader)

    class Regressor(nn.Module):
        def __init__(self, d_in=12, hidden=256):
            super().__init__()
            self.fc1 = nn.Linear(d_in, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.out = nn.Linear(hidden, 1)

        def forward(self, x):
            x = F.gelu(self.fc1(x))
            x = F.gelu(self.fc2(x))
            return self.out(x)

    model = Regressor().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def step(i):
        model.train()
        x, y = next(batches)
        pred = model(x.to(torch.bfloat16))
        loss = F.mse_loss(pred.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            pred = model(xte.to(torch.bfloat16))
            err = F.mse_loss(pred.float().squeeze(1), yte).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def bf16_weights_lose_updates_good():
    torch.manual_seed(0)
    xtr, ytr = _table(4096, 61)
    xte, yte = _table(1024, 62)
    loader = DataLoader(TensorDataset(xtr, ytr.unsqueeze(1)), batch_size=128, shuffle=True, drop_last=True, generator=_gen(7))
    batches = _cycle(loader)

    class Regressor(nn.Module):
        def __init__(self, d_in=12, hidden=256):
            super().__init__()
            self.fc1 = nn.Linear(d_in, hidden)
            self.fc2 = nn.Linear(hidden, hidden)
            self.out = nn.Linear(hidden, 1)

        def forward(self, x):
            x = F.gelu(self.fc1(x))
            x = F.gelu(self.fc2(x))
            return self.out(x)

    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def step(i):
        model.train()
        x, y = next(batches)
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            pred = model(x)
        loss = F.mse_loss(pred.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad(), torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            pred = model(xte)
            err = F.mse_loss(pred.float().squeeze(1), yte).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 7
CASES.append({
    "name": "atanh_eps_lost_in_float32",
    "probe": "mean absolute distance to the expert's action on held-out states (an undefined action counts as 1)",
    "what": "Expert actions are clamped to [-1 + 1e-8, 1 - 1e-8] before atanh, but 1 - 1e-8 is exactly 1 in float32, so "
            "actions at the limit give an infinite log-likelihood and the policy turns to NaN.",
    "steps": 500,
})


def _expert_pairs(n, seed):
    g = _gen(seed)
    s = torch.randn(n, 8, generator=g)
    k = torch.randn(8, 2, generator=_gen(70)) / math.sqrt(8)
    u = 0.4 * s @ k + 0.25 * torch.sin(2 * s[:, :2]) - 0.15 * s[:, 2:4] * s[:, 4:6]
    return s, (u + 0.05 * torch.randn(n, 2, generator=g)).clamp(-1, 1), u.clamp(-1, 1)


def atanh_eps_lost_in_float32_bad():
    torch.manual_seed(0)
    EPS = 1e-8

    class SquashedGaussianPolicy(nn.Module):
        def __init__(self, obs_dim, act_dim, hidden=64):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.mu = nn.Linear(hidden, act_dim)
            self.log_std = nn.Linear(hidden, act_dim)

        def forward(self, obs):
            h = self.body(obs)
            return self.mu(h), self.log_std(h).clamp(-5, 2)

        def log_prob(self, obs, action):
            mu, log_std = self(obs)
            action = action.clamp(-1 + EPS, 1 - EPS)
            u = torch.atanh(action)
            logp = -0.5 * ((u - mu) / log_std.exp()).pow(2) - log_std - 0.5 * math.log(2 * math.pi)
            logp = logp - torch.log(1 - action.pow(2) + 1e-6)
            return logp.sum(dim=-1)

    obs, act, _ = _expert_pairs(4096, 71)
    obs_te, _, act_te = _expert_pairs(512, 72)
    batches = _cycle(DataLoader(TensorDataset(obs, act), batch_size=128, shuffle=True, drop_last=True, generator=_gen(8)))
    policy = SquashedGaussianPolicy(8, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def step(i):
        policy.train()
        o, a = next(batches)
        loss = -policy.log_prob(o, a).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = policy.training
        policy.eval()
        with torch.no_grad():
            a = torch.tanh(policy(obs_te)[0])
            d = torch.nan_to_num((a - act_te).abs(), nan=1.0).mean().item()
        policy.train(was)
        return d

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def atanh_eps_lost_in_float32_good():
    torch.manual_seed(0)
    EPS = 1e-4

    class SquashedGaussianPolicy(nn.Module):
        def __init__(self, obs_dim, act_dim, hidden=64):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.mu = nn.Linear(hidden, act_dim)
            self.log_std = nn.Linear(hidden, act_dim)

        def forward(self, obs):
            h = self.body(obs)
            return self.mu(h), self.log_std(h).clamp(-5, 2)

        def log_prob(self, obs, action):
            mu, log_std = self(obs)
            action = action.clamp(-1 + EPS, 1 - EPS)
            u = torch.atanh(action)
            logp = -0.5 * ((u - mu) / log_std.exp()).pow(2) - log_std - 0.5 * math.log(2 * math.pi)
            logp = logp - torch.log(1 - action.pow(2) + 1e-6)
            return logp.sum(dim=-1)

    obs, act, _ = _expert_pairs(4096, 71)
    obs_te, _, act_te = _expert_pairs(512, 72)
    batches = _cycle(DataLoader(TensorDataset(obs, act), batch_size=128, shuffle=True, drop_last=True, generator=_gen(8)))
    policy = SquashedGaussianPolicy(8, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def step(i):
        policy.train()
        o, a = next(batches)
        loss = -policy.log_prob(o, a).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = policy.training
        policy.eval()
        with torch.no_grad():
            a = torch.tanh(policy(obs_te)[0])
            d = torch.nan_to_num((a - act_te).abs(), nan=1.0).mean().item()
        policy.train(was)
        return d

    return {"model": policy, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 8
CASES.append({
    "name": "zero_grad_between_two_losses",
    "probe": "error rate of the class plus mean distance of the centre on held-out pictures",
    "what": "optimizer.zero_grad() is called between the backward pass of the class loss and that of the box loss, so the "
            "class loss's gradients are thrown away and the class head never moves.",
    "steps": 300,
})


def _located_pictures(n, seed):
    """One of four glyphs anywhere in a 16x16 picture: its class and its centre in [-1, 1]^2."""
    g = _gen(seed)
    p = torch.zeros(4, 5, 5)
    p[0, 2, :] = p[0, :, 2] = 1
    p[1, torch.arange(5), torch.arange(5)] = 1
    p[1, torch.arange(5), 4 - torch.arange(5)] = 1
    p[2, 0, :] = p[2, 4, :] = p[2, :, 0] = p[2, :, 4] = 1
    p[3, 0, :] = p[3, :, 0] = 1
    y = torch.randint(0, 4, (n,), generator=g)
    rc = torch.randint(0, 12, (n, 2), generator=g)
    x = torch.zeros(n, 1, 16, 16)
    for i, (c, (a, b)) in enumerate(zip(y.tolist(), rc.tolist())):
        x[i, 0, a:a + 5, b:b + 5] = p[c]
    x = x + 0.15 * torch.randn(x.shape, generator=g)
    return (x - 0.04) / 0.25, y, rc.float() / 5.5 - 1.0


def zero_grad_between_two_losses_bad():
    torch.manual_seed(0)

    class Detector(nn.Module):
        def __init__(self, num_classes=4):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(512, 64), nn.ReLU(),
            )
            self.cls_head = nn.Linear(64, num_classes)
            self.box_head = nn.Linear(64, 2)

        def forward(self, x):
            h = self.backbone(x)
            return self.cls_head(h), self.box_head(h)

    x, y, c = _located_pictures(2048, 81)
    xte, yte, cte = _located_pictures(512, 82)
    batches = _cycle(DataLoader(TensorDataset(x, y, c), batch_size=64, shuffle=True, drop_last=True, generator=_gen(9)))
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    cls_criterion, box_criterion = nn.CrossEntropyLoss(), nn.SmoothL1Loss()

    def step(i):
        model.train()
        images, labels, centres = next(batches)
        logits, boxes = model(images)
        loss_cls = cls_criterion(logits, labels)
        loss_box = box_criterion(boxes, centres)

        optimizer.zero_grad()
        loss_cls.backward(retain_graph=True)
        optimizer.zero_grad()
        loss_box.backward()
        optimizer.step()
        return loss_cls.item() + loss_box.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            logits, boxes = model(xte)
            err = (logits.argmax(1) != yte).float().mean().item() + (boxes - cte).norm(dim=1).mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def zero_grad_between_two_losses_good():
    torch.manual_seed(0)

    class Detector(nn.Module):
        def __init__(self, num_classes=4):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(512, 64), nn.ReLU(),
            )
            self.cls_head = nn.Linear(64, num_classes)
            self.box_head = nn.Linear(64, 2)

        def forward(self, x):
            h = self.backbone(x)
            return self.cls_head(h), self.box_head(h)

    x, y, c = _located_pictures(2048, 81)
    xte, yte, cte = _located_pictures(512, 82)
    batches = _cycle(DataLoader(TensorDataset(x, y, c), batch_size=64, shuffle=True, drop_last=True, generator=_gen(9)))
    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    cls_criterion, box_criterion = nn.CrossEntropyLoss(), nn.SmoothL1Loss()

    def step(i):
        model.train()
        images, labels, centres = next(batches)
        logits, boxes = model(images)
        loss_cls = cls_criterion(logits, labels)
        loss_box = box_criterion(boxes, centres)

        optimizer.zero_grad()
        loss_cls.backward(retain_graph=True)
        loss_box.backward()
        optimizer.step()
        return loss_cls.item() + loss_box.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            logits, boxes = model(xte)
            err = (logits.argmax(1) != yte).float().mean().item() + (boxes - cte).norm(dim=1).mean().item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------------------- 9
CASES.append({
    "name": "lora_both_factors_zero",
    "probe": "error rate on held-out pictures of the new domain",
    "what": "Both LoRA factors A and B are initialised to zero, so each one's gradient is multiplied by the other's zeros: "
            "the adapters have exactly zero gradient for ever and only the new head learns.",
    "steps": 300,
})


class _MLPBackbone(nn.Module):
    def __init__(self, num_classes, dim=256, hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x):
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.head(x)


@functools.lru_cache(None)
def _pretrained_mlp_state():
    state = torch.get_rng_state()
    torch.manual_seed(321)
    net = _MLPBackbone(4)
    x, y = _pictures(2400, 91, classes=4, template_seed=15)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    for epoch in range(10):
        for b in torch.randperm(len(x)).split(64):
            opt.zero_grad()
            F.cross_entropy(net(x[b]), y[b]).backward()
            opt.step()
    torch.set_rng_state(state)
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


def lora_both_factors_zero_bad():
    torch.manual_seed(0)

    class LoRALinear(nn.Module):
        def __init__(self, base, r=8, alpha=16):
            super().__init__()
            self.base = base
            for p in self.base.parameters():
                p.requires_grad = False
            self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
            self.lora_B = nn.Parameter(torch.empty(base.out_features, r))
            self.scaling = alpha / r
            nn.init.zeros_(self.lora_A)
            nn.init.zeros_(self.lora_B)

        def forward(self, x):
            return self.base(x) + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling

    xtr, ytr = _pictures(2048, 92, classes=8, template_seed=16)
    xte, yte = _pictures(512, 93, classes=8, template_seed=16)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(10)))

    model = _MLPBackbone(4)
    model.load_state_dict(_pretrained_mlp_state())
    model.fc1 = LoRALinear(model.fc1)
    model.fc2 = LoRALinear(model.fc2)
    model.head = nn.Linear(64, 8)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.0)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
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


def lora_both_factors_zero_good():
    torch.manual_seed(0)

    class LoRALinear(nn.Module):
        def __init__(self, base, r=8, alpha=16):
            super().__init__()
            self.base = base
            for p in self.base.parameters():
                p.requires_grad = False
            self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
            self.lora_B = nn.Parameter(torch.empty(base.out_features, r))
            self.scaling = alpha / r
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
            nn.init.zeros_(self.lora_B)

        def forward(self, x):
            return self.base(x) + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling

    xtr, ytr = _pictures(2048, 92, classes=8, template_seed=16)
    xte, yte = _pictures(512, 93, classes=8, template_seed=16)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(10)))

    model = _MLPBackbone(4)
    model.load_state_dict(_pretrained_mlp_state())
    model.fc1 = LoRALinear(model.fc1)
    model.fc2 = LoRALinear(model.fc2)
    model.head = nn.Linear(64, 8)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.0)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
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


# ----------------------------------------------------------------------------- 10
CASES.append({
    "name": "critic_optimizer_holds_actor",
    "probe": "mean cost per step (distance to the goal) of the deterministic policy from held-out starts",
    "what": "In DDPG the critic's optimizer was built from actor.parameters() (copy and paste), so the critic is never "
            "updated and the actor climbs a random critic.",
    "steps": 600,
})


class _PointEnv:
    """64 points in a plane that must reach their goals; reward is minus the distance; an episode has 20 steps."""

    def __init__(self, n, seed):
        self.n, self.g = n, _gen(seed)
        self.reset()

    def reset(self):
        self.pos = 2 * torch.rand(self.n, 2, generator=self.g) - 1
        self.goal = 2 * torch.rand(self.n, 2, generator=self.g) - 1
        self.t = 0
        return self.obs()

    def obs(self):
        return torch.cat([self.pos, self.goal], dim=1) / 0.577

    def step(self, a):
        self.pos = (self.pos + 0.2 * a.clamp(-1, 1)).clamp(-2, 2)
        self.t += 1
        return self.obs(), -(self.pos - self.goal).norm(dim=1, keepdim=True), self.t >= 20


def critic_optimizer_holds_actor_bad():
    torch.manual_seed(0)

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, s):
            return torch.tanh(self.net(s))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], dim=1))

    gamma, tau, batch_size = 0.9, 0.02, 128
    actor, critic = Actor(), Critic()
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    for p in list(actor_target.parameters()) + list(critic_target.parameters()):
        p.requires_grad_(False)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)

    env, g = _PointEnv(16, 101), _gen(102)
    state = env.reset()
    buffer = []

    def act_and_store(random):
        nonlocal state
        if random:
            a = 2 * torch.rand(env.n, 2, generator=g) - 1
        else:
            with torch.no_grad():
                a = (actor(state) + 0.2 * torch.randn(env.n, 2, generator=g)).clamp(-1, 1)
        nxt, r, done = env.step(a)
        buffer.append((state, a, r, nxt))
        del buffer[:-2000]
        state = env.reset() if done else nxt

    for _ in range(60):
        act_and_store(random=True)

    def step(i):
        act_and_store(random=False)
        rows = torch.randint(len(buffer), (batch_size // 16,), generator=g).tolist()
        s, a, r, s2 = (torch.cat(z) for z in zip(*[buffer[j] for j in rows]))

        with torch.no_grad():
            target = r + gamma * critic_target(s2, actor_target(s2))
        critic_loss = F.mse_loss(critic(s, a), target)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        actor_loss = -critic(s, actor(s)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        with torch.no_grad():
            for net, tgt in ((actor, actor_target), (critic, critic_target)):
                for p, pt in zip(net.parameters(), tgt.parameters()):
                    pt.lerp_(p, tau)
        return critic_loss.item()

    def probe():
        e, cost = _PointEnv(256, 103), 0.0
        s = e.obs()
        with torch.no_grad():
            for _ in range(20):
                s, r, _ = e.step(actor(s))
                cost -= r.mean().item() / 20
        return cost

    return {"model": {"actor": actor, "critic": critic}, "optimizer": (actor_optimizer, critic_optimizer), "steps": 20,
            "step": step, "probe": probe}


def critic_optimizer_holds_actor_good():
    torch.manual_seed(0)

    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

        def forward(self, s):
            return torch.tanh(self.net(s))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, s, a):
            return self.net(torch.cat([s, a], dim=1))

    gamma, tau, batch_size = 0.9, 0.02, 128
    actor, critic = Actor(), Critic()
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    for p in list(actor_target.parameters()) + list(critic_target.parameters()):
        p.requires_grad_(False)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)

    env, g = _PointEnv(16, 101), _gen(102)
    state = env.reset()
    buffer = []

    def act_and_store(random):
        nonlocal state
        if random:
            a = 2 * torch.rand(env.n, 2, generator=g) - 1
        else:
            with torch.no_grad():
                a = (actor(state) + 0.2 * torch.randn(env.n, 2, generator=g)).clamp(-1, 1)
        nxt, r, done = env.step(a)
        buffer.append((state, a, r, nxt))
        del buffer[:-2000]
        state = env.reset() if done else nxt

    for _ in range(60):
        act_and_store(random=True)

    def step(i):
        act_and_store(random=False)
        rows = torch.randint(len(buffer), (batch_size // 16,), generator=g).tolist()
        s, a, r, s2 = (torch.cat(z) for z in zip(*[buffer[j] for j in rows]))

        with torch.no_grad():
            target = r + gamma * critic_target(s2, actor_target(s2))
        critic_loss = F.mse_loss(critic(s, a), target)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        actor_loss = -critic(s, actor(s)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        with torch.no_grad():
            for net, tgt in ((actor, actor_target), (critic, critic_target)):
                for p, pt in zip(net.parameters(), tgt.parameters()):
                    pt.lerp_(p, tau)
        return critic_loss.item()

    def probe():
        e, cost = _PointEnv(256, 103), 0.0
        s = e.obs()
        with torch.no_grad():
            for _ in range(20):
                s, r, _ = e.step(actor(s))
                cost -= r.mean().item() / 20
        return cost

    return {"model": {"actor": actor, "critic": critic}, "optimizer": (actor_optimizer, critic_optimizer), "steps": 20,
            "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 11
CASES.append({
    "name": "weights_filled_with_constant",
    "probe": "mean squared error on held-out rows",
    "what": "The init function applied to the net fills every Linear weight with the constant 0.01, so all units of a layer "
            "compute the same thing, get the same gradient and stay one unit.",
    "steps": 500,
})


def weights_filled_with_constant_bad():
    torch.manual_seed(0)

    def init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.constant_(m.weight, 0.01)
            nn.init.zeros_(m.bias)

    xtr, ytr = _table(2048, 111)
    xte, yte = _table(1024, 112)
    loader = DataLoader(TensorDataset(xtr, ytr[:, None]), batch_size=64, shuffle=True, drop_last=True, generator=_gen(11))
    batches = _cycle(loader)
    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    net.apply(init_weights)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        x, y = next(batches)
        loss = loss_fn(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = net.training
        net.eval()
        with torch.no_grad():
            err = loss_fn(net(xte), yte[:, None]).item()
        net.train(was)
        return err

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def weights_filled_with_constant_good():
    torch.manual_seed(0)

    def init_weights(m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    xtr, ytr = _table(2048, 111)
    xte, yte = _table(1024, 112)
    loader = DataLoader(TensorDataset(xtr, ytr[:, None]), batch_size=64, shuffle=True, drop_last=True, generator=_gen(11))
    batches = _cycle(loader)
    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    net.apply(init_weights)
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(i):
        net.train()
        x, y = next(batches)
        loss = loss_fn(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = net.training
        net.eval()
        with torch.no_grad():
            err = loss_fn(net(xte), yte[:, None]).item()
        net.train(was)
        return err

    return {"model": net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------------------- 12
CASES.append({
    "name": "lstm_without_batch_first",
    "probe": "error rate on held-out series",
    "what": "Series of shape (batch, time, feature) go into nn.LSTM without batch_first=True, so the LSTM runs over the rows "
            "of the batch as if they were time, and out[:, -1] keeps only each row's last sample.",
    "steps": 300,
})


def _motion_series(n, seed, t=24):
    """Three-axis accelerometer snippets of four movements (two speeds, two senses of turning)."""
    g = _gen(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    f = torch.where(y % 2 == 0, 1.5, 3.0)[:, None] * (1 + 0.15 * torch.randn(n, 1, generator=g))
    turn = torch.where(y < 2, 1.0, -1.0)[:, None]
    ph = 2 * math.pi * torch.rand(n, 1, generator=g)
    s = torch.linspace(0, 2 * math.pi, t)[None]
    x = torch.stack([torch.cos(f * s + ph), turn * torch.sin(f * s + ph), 0.7 * torch.cos(2 * f * s + ph)], dim=2)
    return (x + 0.3 * torch.randn(n, t, 3, generator=g)) / 0.72, y


def lstm_without_batch_first_bad():
    torch.manual_seed(0)

    class LSTMClassifier(nn.Module):
        def __init__(self, n_features=3, hidden=48, num_classes=4):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden)
            self.fc = nn.Linear(hidden, num_classes)

        def forward(self, x):  # x: (batch, time, feature)
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    xtr, ytr = _motion_series(2048, 121)
    xte, yte = _motion_series(512, 122)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(12)))
    model = LSTMClassifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
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
            wrong = sum((model(x).argmax(1) != y).sum().item() for x, y in zip(xte.split(64), yte.split(64)))
        model.train(was)
        return wrong / len(yte)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def lstm_without_batch_first_good():
    torch.manual_seed(0)

    class LSTMClassifier(nn.Module):
        def __init__(self, n_features=3, hidden=48, num_classes=4):
            super().__init__()
            self.lstm = nn.LSTM(n_features, hidden, batch_first=True)
            self.fc = nn.Linear(hidden, num_classes)

        def forward(self, x):  # x: (batch, time, feature)
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    xtr, ytr = _motion_series(2048, 121)
    xte, yte = _motion_series(512, 122)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(12)))
    model = LSTMClassifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        model.train()
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
            wrong = sum((model(x).argmax(1) != y).sum().item() for x, y in zip(xte.split(64), yte.split(64)))
        model.train(was)
        return wrong / len(yte)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 13
CASES.append({
    "name": "mil_attention_softmax_over_batch",
    "probe": "error rate on held-out bags, scored one bag at a time",
    "what": "Attention pooling over the instances of a bag takes the softmax over dim 0, which is the batch, and not over "
            "the instances (dim 1), so each bag's weights depend on the other bags of the batch.",
    "steps": 400,
})


def _bags(n, seed, inst=12, d=16):
    """Bags of instance features; a bag is positive if it holds one instance of the key kind."""
    g = _gen(seed)
    key = torch.randn(d, generator=_gen(130))
    key = 4.0 * key / key.norm()
    x = torch.randn(n, inst, d, generator=g)
    y = torch.randint(0, 2, (n,), generator=g)
    where = torch.randint(0, inst, (n,), generator=g)
    x[torch.arange(n), where] += y[:, None] * key
    return x, y.float()


def mil_attention_softmax_over_batch_bad():
    torch.manual_seed(0)

    class AttentionMIL(nn.Module):
        def __init__(self, d=16, hidden=32):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d, hidden), nn.ReLU())
            self.attention = nn.Sequential(nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))
            self.classifier = nn.Linear(hidden, 1)

        def forward(self, bags):  # (batch, instances, d)
            h = self.encoder(bags)
            a = torch.softmax(self.attention(h), dim=0)
            z = (a * h).sum(dim=1)
            return self.classifier(z).squeeze(1)

    xtr, ytr = _bags(2048, 131)
    xte, yte = _bags(512, 132)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(13)))
    model = AttentionMIL()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        bags, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(bags), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(bag[None]) for bag in xte])
        model.train(was)
        return ((logits > 0).float() != yte).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mil_attention_softmax_over_batch_good():
    torch.manual_seed(0)

    class AttentionMIL(nn.Module):
        def __init__(self, d=16, hidden=32):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d, hidden), nn.ReLU())
            self.attention = nn.Sequential(nn.Linear(hidden, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))
            self.classifier = nn.Linear(hidden, 1)

        def forward(self, bags):  # (batch, instances, d)
            h = self.encoder(bags)
            a = torch.softmax(self.attention(h), dim=1)
            z = (a * h).sum(dim=1)
            return self.classifier(z).squeeze(1)

    xtr, ytr = _bags(2048, 131)
    xte, yte = _bags(512, 132)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(13)))
    model = AttentionMIL()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        bags, labels = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(bags), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(bag[None]) for bag in xte])
        model.train(was)
        return ((logits > 0).float() != yte).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 14
CASES.append({
    "name": "td_target_keeps_gradient",
    "probe": "root mean squared error of the state values against the exact solution",
    "what": "The TD target r + gamma * V(s') is computed with the network being trained and without detach or no_grad, so "
            "the loss also pulls V(s') towards V(s) (residual gradient) and the values of a random walk come out wrong.",
    "steps": 800,
})


class _GridWalk:
    """Random walk on a 5x5 grid with a rewarding corner (episode ends there) and a costly cell; state one-hot of 25."""
    gamma = 0.95

    def __init__(self, n, seed):
        self.g = _gen(seed)
        self.n = n
        self.s = torch.randint(0, 24, (n,), generator=self.g)

    @staticmethod
    def move(s, a):
        r, c = s // 5, s % 5
        dr = torch.tensor([-1, 1, 0, 0])[a]
        dc = torch.tensor([0, 0, -1, 1])[a]
        return (r + dr).clamp(0, 4) * 5 + (c + dc).clamp(0, 4)

    def rollout(self):
        s = self.s
        a = torch.randint(0, 4, (self.n,), generator=self.g)
        s2 = self.move(s, a)
        r = torch.where(s2 == 24, 5.0, 0.0) - torch.where(s2 == 12, 1.0, 0.0)
        done = (s2 == 24).float()
        fresh = torch.randint(0, 24, (self.n,), generator=self.g)
        self.s = torch.where(s2 == 24, fresh, s2)
        return F.one_hot(s, 25).float(), r, F.one_hot(s2, 25).float(), done

    @classmethod
    def true_values(cls):
        P, R = torch.zeros(25, 25), torch.zeros(25)
        for s in range(24):
            for a in range(4):
                s2 = int(cls.move(torch.tensor(s), torch.tensor(a)))
                R[s] += 0.25 * (5.0 * (s2 == 24) - 1.0 * (s2 == 12))
                if s2 != 24:
                    P[s, s2] += 0.25
        return torch.linalg.solve(torch.eye(25) - cls.gamma * P, R)[:24]


def td_target_keeps_gradient_bad():
    torch.manual_seed(0)

    class ValueNet(nn.Module):
        def __init__(self, n_states=25, hidden=64):
            super().__init__()
            self.fc1 = nn.Linear(n_states, hidden)
            self.fc2 = nn.Linear(hidden, 1)

        def forward(self, s):
            return self.fc2(F.relu(self.fc1(s))).squeeze(-1)

    env = _GridWalk(64, 141)
    v_true = _GridWalk.true_values()
    value = ValueNet()
    optimizer = torch.optim.Adam(value.parameters(), lr=2e-3)

    def step(i):
        s, r, s_next, done = env.rollout()
        target = r + env.gamma * value(s_next) * (1 - done)
        td_error = target - value(s)
        loss = td_error.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (value(torch.eye(25)[:24]) - v_true).pow(2).mean().sqrt().item()

    return {"model": value, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def td_target_keeps_gradient_good():
    torch.manual_seed(0)

    class ValueNet(nn.Module):
        def __init__(self, n_states=25, hidden=64):
            super().__init__()
            self.fc1 = nn.Linear(n_states, hidden)
            self.fc2 = nn.Linear(hidden, 1)

        def forward(self, s):
            return self.fc2(F.relu(self.fc1(s))).squeeze(-1)

    env = _GridWalk(64, 141)
    v_true = _GridWalk.true_values()
    value = ValueNet()
    optimizer = torch.optim.Adam(value.parameters(), lr=2e-3)

    def step(i):
        s, r, s_next, done = env.rollout()
        with torch.no_grad():
            target = r + env.gamma * value(s_next) * (1 - done)
        td_error = target - value(s)
        loss = td_error.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (value(torch.eye(25)[:24]) - v_true).pow(2).mean().sqrt().item()

    return {"model": value, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 15
CASES.append({
    "name": "perceptual_net_is_trained",
    "probe": "distance of reconstruction and picture in the features of an untouched copy of the pretrained net (held out)",
    "what": "The pretrained feature net of the perceptual loss is a submodule of the autoencoder and is not frozen, so "
            "Adam(model.parameters()) trains it to make its own features agree instead of the pictures.",
    "steps": 300,
})


def perceptual_net_is_trained_bad():
    torch.manual_seed(0)

    class PerceptualAE(nn.Module):
        def __init__(self, feature_net, latent=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(512, latent),
            )
            self.decoder = nn.Sequential(
                nn.Linear(latent, 512), nn.ReLU(), nn.Unflatten(1, (32, 4, 4)),
                nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.ReLU(),
                nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
            )
            self.feature_net = feature_net

        def forward(self, x):
            return self.decoder(self.encoder(x))

        def loss(self, x):
            recon = self(x)
            perceptual = F.mse_loss(self.feature_net(recon), self.feature_net(x))
            return perceptual + 0.1 * F.l1_loss(recon, x)

    xtr, _ = _pictures(2048, 151, classes=12, template_seed=5, noise=0.2)
    xte, _ = _pictures(256, 152, classes=12, template_seed=5, noise=0.2)
    pretrained = _ConvNet(12)
    pretrained.load_state_dict(_pretrained_convnet_state())
    reference = copy.deepcopy(pretrained.features).eval()
    model = PerceptualAE(pretrained.features)
    batches = _cycle(DataLoader(TensorDataset(xtr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(15)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        loss = model.loss(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            d = F.mse_loss(reference(model(xte)), reference(xte)).item()
        model.train(was)
        return d

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def perceptual_net_is_trained_good():
    torch.manual_seed(0)

    class PerceptualAE(nn.Module):
        def __init__(self, feature_net, latent=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(512, latent),
            )
            self.decoder = nn.Sequential(
                nn.Linear(latent, 512), nn.ReLU(), nn.Unflatten(1, (32, 4, 4)),
                nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.ReLU(),
                nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
            )
            self.feature_net = feature_net.requires_grad_(False)

        def forward(self, x):
            return self.decoder(self.encoder(x))

        def loss(self, x):
            recon = self(x)
            perceptual = F.mse_loss(self.feature_net(recon), self.feature_net(x))
            return perceptual + 0.1 * F.l1_loss(recon, x)

    xtr, _ = _pictures(2048, 151, classes=12, template_seed=5, noise=0.2)
    xte, _ = _pictures(256, 152, classes=12, template_seed=5, noise=0.2)
    pretrained = _ConvNet(12)
    pretrained.load_state_dict(_pretrained_convnet_state())
    reference = copy.deepcopy(pretrained.features).eval()
    model = PerceptualAE(pretrained.features)
    batches = _cycle(DataLoader(TensorDataset(xtr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(15)))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        loss = model.loss(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            d = F.mse_loss(reference(model(xte)), reference(xte)).item()
        model.train(was)
        return d

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------------------- 16
CASES.append({
    "name": "frozen_backbone_batchnorm_moves",
    "probe": "mean error rate of the old head (old domain) and the new head (new domain) on the shared frozen backbone",
    "what": "The backbone's parameters are frozen, but model.train() at every step leaves its BatchNorm layers in training "
            "mode, so their running statistics drift to the new domain and the old head on that backbone breaks.",
    "steps": 200,
})


class _BNBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
        )

    def forward(self, x):
        return self.net(x)


@functools.lru_cache(None)
def _pretrained_bn_states():
    state = torch.get_rng_state()
    torch.manual_seed(99)
    body, head = _BNBackbone(), nn.Linear(512, 6)
    x, y = _pictures(2048, 160, classes=6, template_seed=25)
    opt = torch.optim.Adam(list(body.parameters()) + list(head.parameters()), lr=1e-3)
    for epoch in range(4):
        for b in torch.randperm(len(x)).split(64):
            opt.zero_grad()
            F.cross_entropy(head(body(x[b])), y[b]).backward()
            opt.step()
    torch.set_rng_state(state)
    return body.state_dict(), head.state_dict()


def _dim_pictures(n, seed):
    """The new domain: other classes, a camera with less contrast and a brighter ground."""
    x, y = _pictures(n, seed, classes=5, template_seed=26)
    return 0.5 * x + 0.7, y


def frozen_backbone_batchnorm_moves_bad():
    torch.manual_seed(0)

    class TwoDomainNet(nn.Module):
        def __init__(self, backbone, old_head, num_new):
            super().__init__()
            self.backbone = backbone
            self.old_head = old_head
            self.new_head = nn.Linear(old_head.in_features, num_new)

        def forward(self, x, head="new"):
            h = self.backbone(x)
            return self.new_head(h) if head == "new" else self.old_head(h)

    body_state, head_state = _pretrained_bn_states()
    backbone, old_head = _BNBackbone(), nn.Linear(512, 6)
    backbone.load_state_dict(body_state)
    old_head.load_state_dict(head_state)
    model = TwoDomainNet(backbone, old_head, num_new=5)
    for p in model.backbone.parameters():
        p.requires_grad = False
    for p in model.old_head.parameters():
        p.requires_grad = False

    xtr, ytr = _dim_pictures(1024, 161)
    xnew, ynew = _dim_pictures(512, 162)
    xold, yold = _pictures(512, 163, classes=6, template_seed=25)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(16)))
    optimizer = torch.optim.Adam(model.new_head.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        x, y = next(batches)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        modes = [(m, m.training) for m in model.modules()]
        model.eval()
        with torch.no_grad():
            new = (model(xnew).argmax(1) != ynew).float().mean().item()
            old = (model(xold, head="old").argmax(1) != yold).float().mean().item()
        for m, t in modes:
            m.training = t
        return 0.5 * (new + old)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def frozen_backbone_batchnorm_moves_good():
    torch.manual_seed(0)

    class TwoDomainNet(nn.Module):
        def __init__(self, backbone, old_head, num_new):
            super().__init__()
            self.backbone = backbone
            self.old_head = old_head
            self.new_head = nn.Linear(old_head.in_features, num_new)

        def forward(self, x, head="new"):
            h = self.backbone(x)
            return self.new_head(h) if head == "new" else self.old_head(h)

    body_state, head_state = _pretrained_bn_states()
    backbone, old_head = _BNBackbone(), nn.Linear(512, 6)
    backbone.load_state_dict(body_state)
    old_head.load_state_dict(head_state)
    model = TwoDomainNet(backbone, old_head, num_new=5)
    for p in model.backbone.parameters():
        p.requires_grad = False
    for p in model.old_head.parameters():
        p.requires_grad = False

    xtr, ytr = _dim_pictures(1024, 161)
    xnew, ynew = _dim_pictures(512, 162)
    xold, yold = _pictures(512, 163, classes=6, template_seed=25)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(16)))
    optimizer = torch.optim.Adam(model.new_head.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        model.backbone.eval()
        x, y = next(batches)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        modes = [(m, m.training) for m in model.modules()]
        model.eval()
        with torch.no_grad():
            new = (model(xnew).argmax(1) != ynew).float().mean().item()
            old = (model(xold, head="old").argmax(1) != yold).float().mean().item()
        for m, t in modes:
            m.training = t
        return 0.5 * (new + old)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 17
CASES.append({
    "name": "gan_generator_optimizer_holds_d",
    "probe": "energy distance between generated and held-out points",
    "what": "The generator's optimizer was given the discriminator's parameters as well, so each generator step also trains "
            "the discriminator to call fakes real and undoes what the discriminator's own step did.",
    "steps": 1200,
})


def _ring_points(n, g):
    k = torch.randint(0, 8, (n,), generator=g)
    ang = 2 * math.pi * k.float() / 8
    return 1.4 * torch.stack([ang.cos(), ang.sin()], dim=1) + 0.1 * torch.randn(n, 2, generator=g)


def _energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).clamp(min=0).item()


def gan_generator_optimizer_holds_d_bad():
    torch.manual_seed(0)
    z_dim = 8
    G = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(list(G.parameters()) + list(D.parameters()), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    train = _ring_points(8192, _gen(171))
    held_out = _ring_points(512, _gen(172))
    z_probe = torch.randn(512, z_dim, generator=_gen(173))
    batches = _cycle(DataLoader(TensorDataset(train), batch_size=128, shuffle=True, drop_last=True, generator=_gen(17)))

    def step(i):
        (real,) = next(batches)
        opt_g.zero_grad()
        opt_d.zero_grad()

        fake = G(torch.randn(real.size(0), z_dim))
        d_loss = F.relu(1.0 - D(real)).mean() + F.relu(1.0 + D(fake.detach())).mean()
        d_loss.backward()
        opt_d.step()

        g_loss = -D(fake).mean()
        g_loss.backward()
        opt_g.step()
        return d_loss.item()

    def probe():
        with torch.no_grad():
            return _energy_distance(G(z_probe), held_out)

    return {"model": (G, D), "optimizer": (opt_g, opt_d), "steps": 20, "step": step, "probe": probe}


def gan_generator_optimizer_holds_d_good():
    torch.manual_seed(0)
    z_dim = 8
    G = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    train = _ring_points(8192, _gen(171))
    held_out = _ring_points(512, _gen(172))
    z_probe = torch.randn(512, z_dim, generator=_gen(173))
    batches = _cycle(DataLoader(TensorDataset(train), batch_size=128, shuffle=True, drop_last=True, generator=_gen(17)))

    def step(i):
        (real,) = next(batches)
        opt_g.zero_grad()
        opt_d.zero_grad()

        fake = G(torch.randn(real.size(0), z_dim))
        d_loss = F.relu(1.0 - D(real)).mean() + F.relu(1.0 + D(fake.detach())).mean()
        d_loss.backward()
        opt_d.step()

        g_loss = -D(fake).mean()
        g_loss.backward()
        opt_g.step()
        return d_loss.item()

    def probe():
        with torch.no_grad():
            return _energy_distance(G(z_probe), held_out)

    return {"model": (G, D), "optimizer": (opt_g, opt_d), "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 18
CASES.append({
    "name": "unet_skip_concats_itself",
    "probe": "1 - IoU of the foreground on held-out pictures",
    "what": "The U-Net's decoder concatenates the upsampled tensor with itself and not with the encoder's feature map, so "
            "the skip connections do nothing and fine detail is lost in the bottleneck.",
    "steps": 300,
})


def _thin_lines(n, seed, size=24):
    """Noisy pictures of thin curves (vessels); the target is the mask."""
    g = _gen(seed)
    rows = torch.arange(size).float()
    amp = 2 + 5 * torch.rand(n, 2, 1, generator=g)
    f = 0.2 + 0.5 * torch.rand(n, 2, 1, generator=g)
    ph = 2 * math.pi * torch.rand(n, 2, 1, generator=g)
    mid = 4 + 16 * torch.rand(n, 2, 1, generator=g)
    c = mid + amp * torch.sin(f * rows + ph)
    d = (torch.arange(size).float()[None, None, None] - c[..., None]).abs()
    m0 = d[:, 0].lt(0.8).float()
    m1 = d[:, 1].lt(0.8).float().transpose(1, 2)
    mask = torch.maximum(m0, m1)[:, None]
    x = 1.5 * mask + 0.5 * torch.randn(mask.shape, generator=g)
    return (x - 0.2) / 0.71, mask


def unet_skip_concats_itself_bad():
    torch.manual_seed(0)

    def conv_block(cin, cout):
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        )

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc1 = conv_block(1, 8)
            self.enc2 = conv_block(8, 16)
            self.bottleneck = conv_block(16, 32)
            self.pool = nn.MaxPool2d(2)
            self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.dec2 = conv_block(32, 16)
            self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec1 = conv_block(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            e1 = self.enc1(x)
            e2 = self.enc2(self.pool(e1))
            b = self.bottleneck(self.pool(e2))
            d2 = self.up2(b)
            d2 = self.dec2(torch.cat([d2, d2], dim=1))
            d1 = self.up1(d2)
            d1 = self.dec1(torch.cat([d1, d1], dim=1))
            return self.out(d1)

    xtr, mtr = _thin_lines(1024, 181)
    xte, mte = _thin_lines(256, 182)
    batches = _cycle(DataLoader(TensorDataset(xtr, mtr), batch_size=16, shuffle=True, drop_last=True, generator=_gen(18)))
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), masks)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            p = (model(xte) > 0).float()
        model.train(was)
        return 1 - ((p * mte).sum() / torch.maximum(p, mte).sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def unet_skip_concats_itself_good():
    torch.manual_seed(0)

    def conv_block(cin, cout):
        return nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        )

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc1 = conv_block(1, 8)
            self.enc2 = conv_block(8, 16)
            self.bottleneck = conv_block(16, 32)
            self.pool = nn.MaxPool2d(2)
            self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.dec2 = conv_block(32, 16)
            self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec1 = conv_block(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, x):
            e1 = self.enc1(x)
            e2 = self.enc2(self.pool(e1))
            b = self.bottleneck(self.pool(e2))
            d2 = self.up2(b)
            d2 = self.dec2(torch.cat([d2, e2], dim=1))
            d1 = self.up1(d2)
            d1 = self.dec1(torch.cat([d1, e1], dim=1))
            return self.out(d1)

    xtr, mtr = _thin_lines(1024, 181)
    xte, mte = _thin_lines(256, 182)
    batches = _cycle(DataLoader(TensorDataset(xtr, mtr), batch_size=16, shuffle=True, drop_last=True, generator=_gen(18)))
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    def step(i):
        model.train()
        images, masks = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(images), masks)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            p = (model(xte) > 0).float()
        model.train(was)
        return 1 - ((p * mte).sum() / torch.maximum(p, mte).sum()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 19
CASES.append({
    "name": "noise_reseeded_every_batch",
    "probe": "mean squared error of the denoised pictures (held-out pictures, fresh noise)",
    "what": "The corrupt() function of a denoising net makes a new generator with the same seed at every call, so "
            "every batch gets the very same noise and the net learns that pattern by heart.",
    "steps": 800,
})


def noise_reseeded_every_batch_bad():
    torch.manual_seed(0)

    def corrupt(x, sigma=1.0):
        g = torch.Generator().manual_seed(42)  # reproducible noise
        return x + sigma * torch.randn(x.shape, generator=g)

    class Denoiser(nn.Module):
        def __init__(self, d=256, hidden=512, latent=256):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, latent), nn.ReLU())
            self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, d))

        def forward(self, x):
            return self.decoder(self.encoder(x))

    xtr = _pictures(2048, 191, classes=10, template_seed=35, noise=0.05)[0].flatten(1)
    xte = _pictures(512, 192, classes=10, template_seed=35, noise=0.05)[0].flatten(1)
    noisy_te = xte + torch.randn(xte.shape, generator=_gen(193))
    batches = _cycle(DataLoader(TensorDataset(xtr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(19)))
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        (clean,) = next(batches)
        loss = criterion(model(corrupt(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = criterion(model(noisy_te), xte).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def noise_reseeded_every_batch_good():
    torch.manual_seed(0)

    g = torch.Generator().manual_seed(42)  # reproducible noise

    def corrupt(x, sigma=1.0):
        return x + sigma * torch.randn(x.shape, generator=g)

    class Denoiser(nn.Module):
        def __init__(self, d=256, hidden=512, latent=256):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, latent), nn.ReLU())
            self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, d))

        def forward(self, x):
            return self.decoder(self.encoder(x))

    xtr = _pictures(2048, 191, classes=10, template_seed=35, noise=0.05)[0].flatten(1)
    xte = _pictures(512, 192, classes=10, template_seed=35, noise=0.05)[0].flatten(1)
    noisy_te = xte + torch.randn(xte.shape, generator=_gen(193))
    batches = _cycle(DataLoader(TensorDataset(xtr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(19)))
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()

    def step(i):
        model.train()
        (clean,) = next(batches)
        loss = criterion(model(corrupt(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = criterion(model(noisy_te), xte).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}



# ----------------------------------------------------------------------------- 20
CASES.append({
    "name": "imputer_sees_the_missing_values",
    "probe": "mean squared error of the imputed cells on held-out rows whose missing cells are really absent (zero)",
    "what": "The imputation net is trained to restore cells hidden at random, but it is fed the whole row x and not "
            "x * mask, so the answer is in its input and it learns to copy.",
    "steps": 400,
})


def _correlated_table(n, seed, d=16, rank=4):
    g = _gen(seed)
    W = torch.randn(rank, d, generator=_gen(200))
    z = torch.randn(n, rank, generator=g)
    x = z @ W + 0.6 * torch.sin(2 * z @ W.flip(1) / 2)
    x = x / torch.sqrt((W ** 2).sum(0) + 0.18)
    return x + 0.1 * torch.randn(n, d, generator=g)


def imputer_sees_the_missing_values_bad():
    torch.manual_seed(0)

    class Imputer(nn.Module):
        def __init__(self, d=16, hidden=96):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2 * d, hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(),
                nn.Linear(hidden, d),
            )

        def forward(self, x, observed):
            return self.net(torch.cat([x, observed], dim=1))

    x_train, x_test = _correlated_table(4096, 201), _correlated_table(1024, 202)
    obs_test = (torch.rand(x_test.shape, generator=_gen(203)) > 0.25).float()
    x_absent = x_test * obs_test
    batches = _cycle(DataLoader(TensorDataset(x_train), batch_size=128, shuffle=True, drop_last=True, generator=_gen(20)))
    model = Imputer()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        observed = (torch.rand_like(x) > 0.25).float()
        pred = model(x, observed)
        missing = 1 - observed
        loss = ((pred - x) ** 2 * missing).sum() / missing.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            missing = 1 - obs_test
            err = (((model(x_absent, obs_test) - x_test) ** 2 * missing).sum() / missing.sum()).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def imputer_sees_the_missing_values_good():
    torch.manual_seed(0)

    class Imputer(nn.Module):
        def __init__(self, d=16, hidden=96):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2 * d, hidden), nn.ReLU(),
                nn.Linear(hidden, hidden), nn.ReLU(),
                nn.Linear(hidden, d),
            )

        def forward(self, x, observed):
            return self.net(torch.cat([x, observed], dim=1))

    x_train, x_test = _correlated_table(4096, 201), _correlated_table(1024, 202)
    obs_test = (torch.rand(x_test.shape, generator=_gen(203)) > 0.25).float()
    x_absent = x_test * obs_test
    batches = _cycle(DataLoader(TensorDataset(x_train), batch_size=128, shuffle=True, drop_last=True, generator=_gen(20)))
    model = Imputer()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        (x,) = next(batches)
        observed = (torch.rand_like(x) > 0.25).float()
        pred = model(x * observed, observed)
        missing = 1 - observed
        loss = ((pred - x) ** 2 * missing).sum() / missing.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            missing = 1 - obs_test
            err = (((model(x_absent, obs_test) - x_test) ** 2 * missing).sum() / missing.sum()).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 21
CASES.append({
    "name": "task_heads_are_one_module",
    "probe": "mean squared error over five standardised targets on held-out rows",
    "what": "The heads of a multi-task net are built as nn.ModuleList([nn.Linear(...)] * n_tasks), which repeats one and the "
            "same Linear, so all tasks share a single head by accident.",
    "steps": 400,
})


def _multi_task_table(n, seed, d=10, tasks=5):
    g = _gen(seed)
    x = torch.randn(n, d, generator=g)
    A = torch.randn(d, tasks, generator=_gen(210)) / math.sqrt(d)
    B = torch.randn(d, tasks, generator=_gen(211)) / math.sqrt(d)
    y = x @ A + torch.tanh(2 * x @ B)
    y = y / 1.25 + 0.1 * torch.randn(n, tasks, generator=g)
    return x, y


def task_heads_are_one_module_bad():
    torch.manual_seed(0)

    class MultiTaskNet(nn.Module):
        def __init__(self, d_in=10, hidden=64, n_tasks=5):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(hidden, 1)] * n_tasks)

        def forward(self, x):
            h = self.trunk(x)
            return [head(h) for head in self.heads]

    xtr, ytr = _multi_task_table(4096, 212)
    xte, yte = _multi_task_table(1024, 213)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(21)))
    model = MultiTaskNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x, y = next(batches)
        outputs = model(x)
        loss = sum(F.mse_loss(out, y[:, k:k + 1]) for k, out in enumerate(outputs)) / len(outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = F.mse_loss(torch.cat(model(xte), dim=1), yte).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def task_heads_are_one_module_good():
    torch.manual_seed(0)

    class MultiTaskNet(nn.Module):
        def __init__(self, d_in=10, hidden=64, n_tasks=5):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(hidden, 1) for _ in range(n_tasks)])

        def forward(self, x):
            h = self.trunk(x)
            return [head(h) for head in self.heads]

    xtr, ytr = _multi_task_table(4096, 212)
    xte, yte = _multi_task_table(1024, 213)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True, drop_last=True, generator=_gen(21)))
    model = MultiTaskNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x, y = next(batches)
        outputs = model(x)
        loss = sum(F.mse_loss(out, y[:, k:k + 1]) for k, out in enumerate(outputs)) / len(outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            err = F.mse_loss(torch.cat(model(xte), dim=1), yte).item()
        model.train(was)
        return err

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


# ----------------------------------------------------------------------------- 22
CASES.append({
    "name": "anchor_weights_not_cloned",
    "probe": "mean error rate on held-out pictures of the old and the new task",
    "what": "The old weights for the stay-close penalty (L2-SP, as in EWC) are kept as p.detach() without clone(), so they "
            "are the live weights themselves, the penalty is always zero and the old task is forgotten.",
    "steps": 300,
})


def anchor_weights_not_cloned_bad():
    torch.manual_seed(0)

    model = _ConvNet(12)
    model.load_state_dict(_pretrained_convnet_state())
    old_params = {n: p.detach() for n, p in model.named_parameters()}
    lam = 0.1

    def new_domain(n, seed):  # the same 12 classes, seen in a mirror, under another light
        x, y = _pictures(n, seed, classes=12, template_seed=5)
        return 0.8 * x.flip(3) - 0.3, y

    xtr, ytr = new_domain(2048, 221)
    xnew, ynew = new_domain(512, 222)
    xold, yold = _pictures(512, 223, classes=12, template_seed=5)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(22)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        penalty = sum(((p - old_params[n]) ** 2).sum() for n, p in model.named_parameters())
        loss = loss + 0.5 * lam * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            new = (model(xnew).argmax(1) != ynew).float().mean().item()
            old = (model(xold).argmax(1) != yold).float().mean().item()
        model.train(was)
        return 0.5 * (new + old)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def anchor_weights_not_cloned_good():
    torch.manual_seed(0)

    model = _ConvNet(12)
    model.load_state_dict(_pretrained_convnet_state())
    old_params = {n: p.detach().clone() for n, p in model.named_parameters()}
    lam = 0.1

    def new_domain(n, seed):  # the same 12 classes, seen in a mirror, under another light
        x, y = _pictures(n, seed, classes=12, template_seed=5)
        return 0.8 * x.flip(3) - 0.3, y

    xtr, ytr = new_domain(2048, 221)
    xnew, ynew = new_domain(512, 222)
    xold, yold = _pictures(512, 223, classes=12, template_seed=5)
    batches = _cycle(DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=_gen(22)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(i):
        model.train()
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        penalty = sum(((p - old_params[n]) ** 2).sum() for n, p in model.named_parameters())
        loss = loss + 0.5 * lam * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        was = model.training
        model.eval()
        with torch.no_grad():
            new = (model(xnew).argmax(1) != ynew).float().mean().item()
            old = (model(xold).argmax(1) != yold).float().mean().item()
        model.train(was)
        return 0.5 * (new + old)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
