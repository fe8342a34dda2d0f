"""Twenty small training programs, nineteen of them outside language models, each with one bug that people often make, and
a mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa: UP028, E501, B007, B905, E731, I001, E402, E741, B006, B023, C4, F401, F841, UP, SIM, RUF

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


def make_images(n, classes, seed, size=16, noise=2.0):
    templates = torch.randn(classes, 3, 4, 4, generator=torch.Generator().manual_seed(7))
    templates = F.interpolate(templates, size=(size, size), mode="bilinear")
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = templates[y] * 0.8 + noise * torch.randn(n, 3, size, size, generator=g)
    return x / (0.3 + noise**2) ** 0.5, y


def make_tabular(n, seed, dim=16, noise=0.1):
    gw = torch.Generator().manual_seed(3)
    w = torch.randn(dim, generator=gw) / dim**0.5
    v = torch.randn(dim, generator=gw) / dim**0.5
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    y = x @ w + torch.sin(2 * (x @ v)) + noise * torch.randn(n, generator=g)
    return x, y


def make_loader(x, y, batch_size, seed=0):
    g = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True, drop_last=True, generator=g)


def image_softmax_ce_bad():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)

    class SmallCNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = F.relu(self.fc1(x.flatten(1)))
            return F.softmax(self.fc2(x), dim=1)

    model = SmallCNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batches = cycle(make_loader(xtr, ytr, 64))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            wrong = (model(xva).argmax(1) != yva).float().mean().item()
        model.train()
        return wrong

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def image_softmax_ce_good():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)

    class SmallCNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
            self.fc1 = nn.Linear(32 * 4 * 4, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            x = F.relu(self.fc1(x.flatten(1)))
            return self.fc2(x)

    model = SmallCNN()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    batches = cycle(make_loader(xtr, ytr, 64))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            wrong = (model(xva).argmax(1) != yva).float().mean().item()
        model.train()
        return wrong

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def vae_recon_mean_kl_sum_bad():
    torch.manual_seed(0)

    def blobs(n, seed):
        g = torch.Generator().manual_seed(seed)
        cx = torch.rand(n, 1, 1, generator=g) * 12 + 2
        cy = torch.rand(n, 1, 1, generator=g) * 12 + 2
        r = torch.arange(16.0)
        d = (r.view(1, 1, 16) - cx) ** 2 + (r.view(1, 16, 1) - cy) ** 2
        return torch.exp(-d / 10).flatten(1)

    xtr, xva = blobs(2048, 1), blobs(256, 2)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(256, 128), nn.ReLU())
            self.mu = nn.Linear(128, 8)
            self.logvar = nn.Linear(128, 8)
            self.dec = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 256))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.dec(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(make_loader(xtr, torch.zeros(len(xtr)), 64))

    def step(i):
        x, _ = next(batches)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        recon = F.binary_cross_entropy_with_logits(logits, x)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        loss = recon + kl
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            out = torch.sigmoid(model.dec(model.mu(model.enc(xva))))
        return (out - xva).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def vae_recon_mean_kl_sum_good():
    torch.manual_seed(0)

    def blobs(n, seed):
        g = torch.Generator().manual_seed(seed)
        cx = torch.rand(n, 1, 1, generator=g) * 12 + 2
        cy = torch.rand(n, 1, 1, generator=g) * 12 + 2
        r = torch.arange(16.0)
        d = (r.view(1, 1, 16) - cx) ** 2 + (r.view(1, 16, 1) - cy) ** 2
        return torch.exp(-d / 10).flatten(1)

    xtr, xva = blobs(2048, 1), blobs(256, 2)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(256, 128), nn.ReLU())
            self.mu = nn.Linear(128, 8)
            self.logvar = nn.Linear(128, 8)
            self.dec = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 256))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.dec(z), mu, logvar

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = cycle(make_loader(xtr, torch.zeros(len(xtr)), 64))

    def step(i):
        x, _ = next(batches)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        recon = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / x.size(0)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        loss = recon + kl
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            out = torch.sigmoid(model.dec(model.mu(model.enc(xva))))
        return (out - xva).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def gnn_log_softmax_dim0_bad():
    torch.manual_seed(0)
    n, classes = 800, 4
    g = torch.Generator().manual_seed(5)
    labels = torch.multinomial(torch.tensor([0.55, 0.25, 0.12, 0.08]), n, replacement=True, generator=g)
    same = labels[:, None] == labels[None, :]
    adj = (torch.rand(n, n, generator=g) < torch.where(same, 0.02, 0.006)).float()
    adj = torch.triu(adj, 1)
    adj = adj + adj.t() + torch.eye(n)
    dinv = adj.sum(1).rsqrt()
    adj = dinv[:, None] * adj * dinv[None, :]
    centers = torch.randn(classes, 16, generator=g)
    feats = 0.6 * centers[labels] + torch.randn(n, 16, generator=g)
    train_mask = torch.rand(n, generator=g) < 0.4
    test_mask = ~train_mask

    class GCN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.lin1 = nn.Linear(16, hidden)
            self.lin2 = nn.Linear(hidden, classes)

        def forward(self, x, adj):
            x = F.relu(adj @ self.lin1(x))
            x = F.dropout(x, p=0.3, training=self.training)
            x = adj @ self.lin2(x)
            return F.log_softmax(x, dim=0)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(feats, adj)
        loss = F.nll_loss(out[train_mask], labels[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            out = model(feats, adj)
        model.train()
        return F.cross_entropy(out[test_mask], labels[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def gnn_log_softmax_dim0_good():
    torch.manual_seed(0)
    n, classes = 800, 4
    g = torch.Generator().manual_seed(5)
    labels = torch.multinomial(torch.tensor([0.55, 0.25, 0.12, 0.08]), n, replacement=True, generator=g)
    same = labels[:, None] == labels[None, :]
    adj = (torch.rand(n, n, generator=g) < torch.where(same, 0.02, 0.006)).float()
    adj = torch.triu(adj, 1)
    adj = adj + adj.t() + torch.eye(n)
    dinv = adj.sum(1).rsqrt()
    adj = dinv[:, None] * adj * dinv[None, :]
    centers = torch.randn(classes, 16, generator=g)
    feats = 0.6 * centers[labels] + torch.randn(n, 16, generator=g)
    train_mask = torch.rand(n, generator=g) < 0.4
    test_mask = ~train_mask

    class GCN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.lin1 = nn.Linear(16, hidden)
            self.lin2 = nn.Linear(hidden, classes)

        def forward(self, x, adj):
            x = F.relu(adj @ self.lin1(x))
            x = F.dropout(x, p=0.3, training=self.training)
            x = adj @ self.lin2(x)
            return F.log_softmax(x, dim=1)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

    def step(i):
        model.train()
        optimizer.zero_grad()
        out = model(feats, adj)
        loss = F.nll_loss(out[train_mask], labels[train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            out = model(feats, adj)
        model.train()
        return F.cross_entropy(out[test_mask], labels[test_mask]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def triplet_args_swapped_bad():
    torch.manual_seed(0)
    xtr, ytr = make_images(2000, 8, seed=1)
    xva, yva = make_images(400, 8, seed=2)
    g = torch.Generator().manual_seed(0)

    def sample_triplets(x, y, n):
        a = torch.randint(0, len(y), (n,), generator=g)
        pos, neg = [], []
        for k in a.tolist():
            same = torch.nonzero(y == y[k]).flatten()
            diff = torch.nonzero(y != y[k]).flatten()
            pos.append(same[torch.randint(0, len(same), (1,), generator=g)])
            neg.append(diff[torch.randint(0, len(diff), (1,), generator=g)])
        return x[a], x[torch.cat(pos)], x[torch.cat(neg)]

    class EmbeddingNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
            self.fc = nn.Linear(32 * 4 * 4, 32)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            return F.normalize(self.fc(x.flatten(1)), dim=1)

    model = EmbeddingNet()
    criterion = nn.TripletMarginLoss(margin=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    val_triplets = sample_triplets(xva, yva, 400)

    def step(i):
        anchor, positive, negative = sample_triplets(xtr, ytr, 32)
        optimizer.zero_grad()
        ea, ep, en = model(anchor), model(positive), model(negative)
        loss = criterion(ea, en, ep)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            ea, ep, en = (model(t) for t in val_triplets)
        return ((ea - ep).norm(dim=1) > (ea - en).norm(dim=1)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def triplet_args_swapped_good():
    torch.manual_seed(0)
    xtr, ytr = make_images(2000, 8, seed=1)
    xva, yva = make_images(400, 8, seed=2)
    g = torch.Generator().manual_seed(0)

    def sample_triplets(x, y, n):
        a = torch.randint(0, len(y), (n,), generator=g)
        pos, neg = [], []
        for k in a.tolist():
            same = torch.nonzero(y == y[k]).flatten()
            diff = torch.nonzero(y != y[k]).flatten()
            pos.append(same[torch.randint(0, len(same), (1,), generator=g)])
            neg.append(diff[torch.randint(0, len(diff), (1,), generator=g)])
        return x[a], x[torch.cat(pos)], x[torch.cat(neg)]

    class EmbeddingNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
            self.fc = nn.Linear(32 * 4 * 4, 32)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            return F.normalize(self.fc(x.flatten(1)), dim=1)

    model = EmbeddingNet()
    criterion = nn.TripletMarginLoss(margin=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    val_triplets = sample_triplets(xva, yva, 400)

    def step(i):
        anchor, positive, negative = sample_triplets(xtr, ytr, 32)
        optimizer.zero_grad()
        ea, ep, en = model(anchor), model(positive), model(negative)
        loss = criterion(ea, ep, en)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            ea, ep, en = (model(t) for t in val_triplets)
        return ((ea - ep).norm(dim=1) > (ea - en).norm(dim=1)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def diffusion_noise_resampled_bad():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-4, 0.05, T)
    alphas_bar = torch.cumprod(1 - betas, dim=0)

    def ring(n, seed):
        g = torch.Generator().manual_seed(seed)
        a = torch.rand(n, generator=g) * 2 * math.pi
        r = 1.4 + 0.05 * torch.randn(n, generator=g)
        return torch.stack([r * torch.cos(a), r * torch.sin(a)], dim=1)

    xtr, xva = ring(4096, 1), ring(1024, 2)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        ab = alphas_bar[t].unsqueeze(1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.temb = nn.Embedding(T, 32)
            self.net = nn.Sequential(
                nn.Linear(2 + 32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2)
            )

        def forward(self, x, t):
            return self.net(torch.cat([x, self.temb(t)], dim=1))

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(xtr, torch.zeros(len(xtr)), 128))
    gv = torch.Generator().manual_seed(9)
    tva = torch.randint(0, T, (len(xva),), generator=gv)
    nva = torch.randn(len(xva), 2, generator=gv)

    def step(i):
        x0, _ = next(batches)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        xt = q_sample(x0, t)
        optimizer.zero_grad()
        loss = F.mse_loss(model(xt, t), noise)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(q_sample(xva, tva, nva), tva), nva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def diffusion_noise_resampled_good():
    torch.manual_seed(0)
    T = 100
    betas = torch.linspace(1e-4, 0.05, T)
    alphas_bar = torch.cumprod(1 - betas, dim=0)

    def ring(n, seed):
        g = torch.Generator().manual_seed(seed)
        a = torch.rand(n, generator=g) * 2 * math.pi
        r = 1.4 + 0.05 * torch.randn(n, generator=g)
        return torch.stack([r * torch.cos(a), r * torch.sin(a)], dim=1)

    xtr, xva = ring(4096, 1), ring(1024, 2)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        ab = alphas_bar[t].unsqueeze(1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.temb = nn.Embedding(T, 32)
            self.net = nn.Sequential(
                nn.Linear(2 + 32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2)
            )

        def forward(self, x, t):
            return self.net(torch.cat([x, self.temb(t)], dim=1))

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(xtr, torch.zeros(len(xtr)), 128))
    gv = torch.Generator().manual_seed(9)
    tva = torch.randint(0, T, (len(xva),), generator=gv)
    nva = torch.randn(len(xva), 2, generator=gv)

    def step(i):
        x0, _ = next(batches)
        t = torch.randint(0, T, (x0.size(0),))
        noise = torch.randn_like(x0)
        xt = q_sample(x0, t, noise)
        optimizer.zero_grad()
        loss = F.mse_loss(model(xt, t), noise)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(q_sample(xva, tva, nva), tva), nva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def seg_dice_on_hard_mask_bad():
    torch.manual_seed(0)

    def discs(n, seed):
        g = torch.Generator().manual_seed(seed)
        c = torch.rand(n, 2, 1, 1, generator=g) * 16 + 4
        r = torch.rand(n, 1, 1, generator=g) * 3 + 3
        ax = torch.arange(24.0)
        d = (ax.view(1, 1, 24) - c[:, 0]) ** 2 + (ax.view(1, 24, 1) - c[:, 1]) ** 2
        mask = (d < r**2).float().unsqueeze(1)
        img = mask * 1.2 - 0.2 + 0.6 * torch.randn(n, 1, 24, 24, generator=g)
        return img, mask

    xtr, mtr = discs(1024, 1)
    xva, mva = discs(128, 2)

    class SegNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1 = nn.Conv2d(1, 16, 3, padding=1)
            self.down2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
            self.mid = nn.Conv2d(32, 32, 3, padding=1)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.head = nn.Conv2d(32, 1, 1)

        def forward(self, x):
            a = F.relu(self.down1(x))
            b = F.relu(self.mid(F.relu(self.down2(a))))
            return self.head(torch.cat([a, F.relu(self.up(b))], dim=1))

    def dice_loss(pred, target, eps=1.0):
        inter = (pred * target).sum(dim=(1, 2, 3))
        union = pred.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
        return (1 - (2 * inter + eps) / (union + eps)).mean()

    model = SegNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(xtr, mtr, 16))

    def step(i):
        x, mask = next(batches)
        optimizer.zero_grad()
        logits = model(x)
        pred = (torch.sigmoid(logits) > 0.5).float()
        loss = dice_loss(pred, mask).requires_grad_(True)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = (torch.sigmoid(model(xva)) > 0.5).float()
            return dice_loss(pred, mva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def seg_dice_on_hard_mask_good():
    torch.manual_seed(0)

    def discs(n, seed):
        g = torch.Generator().manual_seed(seed)
        c = torch.rand(n, 2, 1, 1, generator=g) * 16 + 4
        r = torch.rand(n, 1, 1, generator=g) * 3 + 3
        ax = torch.arange(24.0)
        d = (ax.view(1, 1, 24) - c[:, 0]) ** 2 + (ax.view(1, 24, 1) - c[:, 1]) ** 2
        mask = (d < r**2).float().unsqueeze(1)
        img = mask * 1.2 - 0.2 + 0.6 * torch.randn(n, 1, 24, 24, generator=g)
        return img, mask

    xtr, mtr = discs(1024, 1)
    xva, mva = discs(128, 2)

    class SegNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1 = nn.Conv2d(1, 16, 3, padding=1)
            self.down2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
            self.mid = nn.Conv2d(32, 32, 3, padding=1)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.head = nn.Conv2d(32, 1, 1)

        def forward(self, x):
            a = F.relu(self.down1(x))
            b = F.relu(self.mid(F.relu(self.down2(a))))
            return self.head(torch.cat([a, F.relu(self.up(b))], dim=1))

    def dice_loss(pred, target, eps=1.0):
        inter = (pred * target).sum(dim=(1, 2, 3))
        union = pred.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
        return (1 - (2 * inter + eps) / (union + eps)).mean()

    model = SegNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(xtr, mtr, 16))

    def step(i):
        x, mask = next(batches)
        optimizer.zero_grad()
        logits = model(x)
        pred = torch.sigmoid(logits)
        loss = dice_loss(pred, mask)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            pred = (torch.sigmoid(model(xva)) > 0.5).float()
            return dice_loss(pred, mva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def detection_box_loss_all_cells_bad():
    torch.manual_seed(0)
    S, cell = 8, 4

    def scenes(n, seed):
        g = torch.Generator().manual_seed(seed)
        img = 0.3 * torch.randn(n, 1, S * cell, S * cell, generator=g)
        obj = torch.zeros(n, S, S)
        box = torch.zeros(n, S, S, 4)
        for k in range(n):
            w, h = (torch.randint(4, 13, (2,), generator=g)).tolist()
            x0 = int(torch.randint(0, S * cell - w, (1,), generator=g))
            y0 = int(torch.randint(0, S * cell - h, (1,), generator=g))
            img[k, 0, y0 : y0 + h, x0 : x0 + w] += 1.0
            cx, cy = (x0 + w / 2) / cell, (y0 + h / 2) / cell
            gx, gy = int(cx), int(cy)
            obj[k, gy, gx] = 1
            box[k, gy, gx] = torch.tensor([cx - gx, cy - gy, w / cell, h / cell])
        return img, obj, box

    xtr, otr, btr = scenes(1024, 1)
    xva, ova, bva = scenes(256, 2)

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.ReLU(),
            )
            self.obj = nn.Conv2d(32, 1, 1)
            self.box = nn.Conv2d(32, 4, 1)

        def forward(self, x):
            h = self.body(x)
            return self.obj(h).squeeze(1), self.box(h).permute(0, 2, 3, 1)

    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(
        TensorDataset(xtr, otr, btr),
        batch_size=32,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    batches = cycle(loader)

    def step(i):
        img, obj, box = next(batches)
        optimizer.zero_grad()
        obj_logits, pred = model(img)
        obj_loss = F.binary_cross_entropy_with_logits(obj_logits, obj)
        pos = obj.bool()
        box_loss = F.smooth_l1_loss(pred, box)
        loss = obj_loss + box_loss
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            _, pred = model(xva)
        pos = ova.bool()
        return (pred[pos] - bva[pos]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def detection_box_loss_all_cells_good():
    torch.manual_seed(0)
    S, cell = 8, 4

    def scenes(n, seed):
        g = torch.Generator().manual_seed(seed)
        img = 0.3 * torch.randn(n, 1, S * cell, S * cell, generator=g)
        obj = torch.zeros(n, S, S)
        box = torch.zeros(n, S, S, 4)
        for k in range(n):
            w, h = (torch.randint(4, 13, (2,), generator=g)).tolist()
            x0 = int(torch.randint(0, S * cell - w, (1,), generator=g))
            y0 = int(torch.randint(0, S * cell - h, (1,), generator=g))
            img[k, 0, y0 : y0 + h, x0 : x0 + w] += 1.0
            cx, cy = (x0 + w / 2) / cell, (y0 + h / 2) / cell
            gx, gy = int(cx), int(cy)
            obj[k, gy, gx] = 1
            box[k, gy, gx] = torch.tensor([cx - gx, cy - gy, w / cell, h / cell])
        return img, obj, box

    xtr, otr, btr = scenes(1024, 1)
    xva, ova, bva = scenes(256, 2)

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.ReLU(),
            )
            self.obj = nn.Conv2d(32, 1, 1)
            self.box = nn.Conv2d(32, 4, 1)

        def forward(self, x):
            h = self.body(x)
            return self.obj(h).squeeze(1), self.box(h).permute(0, 2, 3, 1)

    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(
        TensorDataset(xtr, otr, btr),
        batch_size=32,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    batches = cycle(loader)

    def step(i):
        img, obj, box = next(batches)
        optimizer.zero_grad()
        obj_logits, pred = model(img)
        obj_loss = F.binary_cross_entropy_with_logits(obj_logits, obj)
        pos = obj.bool()
        box_loss = F.smooth_l1_loss(pred[pos], box[pos])
        loss = obj_loss + box_loss
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            _, pred = model(xva)
        pos = ova.bool()
        return (pred[pos] - bva[pos]).abs().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def transfer_new_head_after_optimizer_bad():
    torch.manual_seed(0)
    xtr, ytr = make_images(1024, 5, seed=1)
    xva, yva = make_images(512, 5, seed=2)

    class Backbone(nn.Module):
        def __init__(self, num_classes=100):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
                nn.AvgPool2d(4),
            )
            self.fc = nn.Linear(32 * 2 * 2, num_classes)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    model = Backbone()
    for p in model.features.parameters():
        p.requires_grad = False
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-2)
    model.fc = nn.Linear(model.fc.in_features, 5)
    criterion = nn.CrossEntropyLoss()
    batches = cycle(make_loader(xtr, ytr, 32))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            wrong = (model(xva).argmax(1) != yva).float().mean().item()
        model.train()
        return wrong

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def transfer_new_head_after_optimizer_good():
    torch.manual_seed(0)
    xtr, ytr = make_images(1024, 5, seed=1)
    xva, yva = make_images(512, 5, seed=2)

    class Backbone(nn.Module):
        def __init__(self, num_classes=100):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.GroupNorm(4, 32),
                nn.ReLU(),
                nn.AvgPool2d(4),
            )
            self.fc = nn.Linear(32 * 2 * 2, num_classes)

        def forward(self, x):
            return self.fc(self.features(x).flatten(1))

    model = Backbone()
    for p in model.features.parameters():
        p.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, 5)
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    batches = cycle(make_loader(xtr, ytr, 32))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            wrong = (model(xva).argmax(1) != yva).float().mean().item()
        model.train()
        return wrong

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def audio_scheduler_every_batch_bad():
    torch.manual_seed(0)

    def keywords(n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        t = torch.arange(512) / 512
        f = 20 + 12 * y.float() + 4 * torch.rand(n, generator=g)
        sweep = 30 * (torch.rand(n, generator=g) - 0.5)
        phase = 2 * math.pi * (f[:, None] * t + sweep[:, None] * t**2 / 2)
        wav = torch.sin(phase) + 1.0 * torch.randn(n, 512, generator=g)
        spec = torch.stft(wav, 128, hop_length=32, window=torch.hann_window(128), return_complex=True)
        spec = torch.log(spec.abs() + 1e-3).unsqueeze(1)
        return (spec - 1.5) / 0.9, y

    xtr, ytr = keywords(512, 1)
    xva, yva = keywords(256, 2)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((8, 1)),
        nn.Flatten(),
        nn.Linear(16 * 8, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
    loader = make_loader(xtr, ytr, 32)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def audio_scheduler_every_batch_good():
    torch.manual_seed(0)

    def keywords(n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        t = torch.arange(512) / 512
        f = 20 + 12 * y.float() + 4 * torch.rand(n, generator=g)
        sweep = 30 * (torch.rand(n, generator=g) - 0.5)
        phase = 2 * math.pi * (f[:, None] * t + sweep[:, None] * t**2 / 2)
        wav = torch.sin(phase) + 1.0 * torch.randn(n, 512, generator=g)
        spec = torch.stft(wav, 128, hop_length=32, window=torch.hann_window(128), return_complex=True)
        spec = torch.log(spec.abs() + 1e-3).unsqueeze(1)
        return (spec - 1.5) / 0.9, y

    xtr, ytr = keywords(512, 1)
    xva, yva = keywords(256, 2)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((8, 1)),
        nn.Flatten(),
        nn.Linear(16 * 8, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
    loader = make_loader(xtr, ytr, 32)
    batches = cycle(loader)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def amp_clip_without_unscale_bad():
    torch.manual_seed(0)
    xtr, ytr = make_tabular(4096, seed=1)
    xva, yva = make_tabular(1024, seed=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    batches = cycle(make_loader(xtr, ytr, 64))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x).squeeze(1)
            loss = F.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(xva).squeeze(1), yva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def amp_clip_without_unscale_good():
    torch.manual_seed(0)
    xtr, ytr = make_tabular(4096, seed=1)
    xva, yva = make_tabular(1024, seed=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    batches = cycle(make_loader(xtr, ytr, 64))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x).squeeze(1)
            loss = F.mse_loss(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(xva).squeeze(1), yva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def accum_zero_grad_every_micro_batch_bad():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation_steps = 4
    batches = cycle(make_loader(xtr, ytr, 16))

    def step(i):
        model.train()
        total = 0.0
        for _ in range(accumulation_steps):
            optimizer.zero_grad()
            x, y = next(batches)
            loss = criterion(model(x), y) / accumulation_steps
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        model.eval()
        with torch.no_grad():
            loss = criterion(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def accum_zero_grad_every_micro_batch_good():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulation_steps = 4
    batches = cycle(make_loader(xtr, ytr, 16))

    def step(i):
        model.train()
        total = 0.0
        optimizer.zero_grad()
        for _ in range(accumulation_steps):
            x, y = next(batches)
            loss = criterion(model(x), y) / accumulation_steps
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    def probe():
        model.eval()
        with torch.no_grad():
            loss = criterion(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def ema_without_buffers_bad():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    ema = copy.deepcopy(model).eval()
    for p in ema.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    batches = cycle(make_loader(xtr, ytr, 64))

    @torch.no_grad()
    def update_ema(decay=0.98):
        for pe, p in zip(ema.parameters(), model.parameters()):
            pe.mul_(decay).add_(p, alpha=1 - decay)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        update_ema()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(ema(xva), yva).item()

    return {"model": {"model": model, "ema": ema}, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def ema_without_buffers_good():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    ema = copy.deepcopy(model).eval()
    for p in ema.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    batches = cycle(make_loader(xtr, ytr, 64))

    @torch.no_grad()
    def update_ema(decay=0.98):
        for pe, p in zip(ema.parameters(), model.parameters()):
            pe.mul_(decay).add_(p, alpha=1 - decay)
        for be, b in zip(ema.buffers(), model.buffers()):
            be.copy_(b)

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        update_ema()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.cross_entropy(ema(xva), yva).item()

    return {"model": {"model": model, "ema": ema}, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def gan_generator_detached_bad():
    torch.manual_seed(0)

    def real_data(n, seed):
        g = torch.Generator().manual_seed(seed)
        a = torch.rand(n, generator=g) * 2 * math.pi
        return torch.stack([1.5 + 0.8 * torch.cos(a), -1.0 + 0.8 * torch.sin(a)], dim=1) + 0.05 * torch.randn(
            n, 2, generator=g
        )

    xtr, xva = real_data(4096, 1), real_data(512, 2)
    G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    batches = cycle(make_loader(xtr, torch.zeros(len(xtr)), 64))
    zva = torch.randn(512, 8, generator=torch.Generator().manual_seed(9))

    def step(i):
        real, _ = next(batches)
        ones = torch.ones(real.size(0), 1)
        zeros = torch.zeros(real.size(0), 1)
        fake = G(torch.randn(real.size(0), 8)).detach()

        opt_d.zero_grad()
        d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = bce(D(fake), ones)
        g_loss.backward()
        opt_g.step()
        return d_loss.item() + g_loss.item()

    def probe():
        with torch.no_grad():
            f = G(zva)
        return (2 * torch.cdist(f, xva).mean() - torch.cdist(f, f).mean() - torch.cdist(xva, xva).mean()).item()

    return {"model": {"G": G, "D": D}, "optimizer": [opt_g, opt_d], "step": step, "steps": 20, "probe": probe}


def gan_generator_detached_good():
    torch.manual_seed(0)

    def real_data(n, seed):
        g = torch.Generator().manual_seed(seed)
        a = torch.rand(n, generator=g) * 2 * math.pi
        return torch.stack([1.5 + 0.8 * torch.cos(a), -1.0 + 0.8 * torch.sin(a)], dim=1) + 0.05 * torch.randn(
            n, 2, generator=g
        )

    xtr, xva = real_data(4096, 1), real_data(512, 2)
    G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    batches = cycle(make_loader(xtr, torch.zeros(len(xtr)), 64))
    zva = torch.randn(512, 8, generator=torch.Generator().manual_seed(9))

    def step(i):
        real, _ = next(batches)
        ones = torch.ones(real.size(0), 1)
        zeros = torch.zeros(real.size(0), 1)
        fake = G(torch.randn(real.size(0), 8))

        opt_d.zero_grad()
        d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = bce(D(fake), ones)
        g_loss.backward()
        opt_g.step()
        return d_loss.item() + g_loss.item()

    def probe():
        with torch.no_grad():
            f = G(zva)
        return (2 * torch.cdist(f, xva).mean() - torch.cdist(f, f).mean() - torch.cdist(xva, xva).mean()).item()

    return {"model": {"G": G, "D": D}, "optimizer": [opt_g, opt_d], "step": step, "steps": 20, "probe": probe}


def actor_critic_advantage_not_detached_bad():
    torch.manual_seed(0)
    n_actions = 4
    gw = torch.Generator().manual_seed(4)
    W = torch.randn(6, n_actions, generator=gw)
    env = torch.Generator().manual_seed(1)
    sva = torch.randn(512, 6, generator=torch.Generator().manual_seed(2))

    def reward_fn(s, a):
        return torch.tanh((s @ W).gather(1, a.unsqueeze(1)).squeeze(1))

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 64), nn.Tanh())
            self.pi = nn.Linear(64, n_actions)
            self.v = nn.Linear(64, 1)

        def forward(self, s):
            h = self.body(s)
            return self.pi(h), self.v(h).squeeze(-1)

    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        s = torch.randn(64, 6, generator=env)
        logits, value = model(s)
        dist = torch.distributions.Categorical(logits=logits)
        a = dist.sample()
        r = reward_fn(s, a) + 0.1 * torch.randn(64, generator=env)
        advantage = r - value
        policy_loss = -(dist.log_prob(a) * advantage).mean()
        value_loss = F.mse_loss(value, r)
        loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logits, value = model(sva)
            p = logits.softmax(1)
            true_v = (p * torch.tanh(sva @ W)).sum(1)
        return F.mse_loss(value, true_v).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def actor_critic_advantage_not_detached_good():
    torch.manual_seed(0)
    n_actions = 4
    gw = torch.Generator().manual_seed(4)
    W = torch.randn(6, n_actions, generator=gw)
    env = torch.Generator().manual_seed(1)
    sva = torch.randn(512, 6, generator=torch.Generator().manual_seed(2))

    def reward_fn(s, a):
        return torch.tanh((s @ W).gather(1, a.unsqueeze(1)).squeeze(1))

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 64), nn.Tanh())
            self.pi = nn.Linear(64, n_actions)
            self.v = nn.Linear(64, 1)

        def forward(self, s):
            h = self.body(s)
            return self.pi(h), self.v(h).squeeze(-1)

    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        s = torch.randn(64, 6, generator=env)
        logits, value = model(s)
        dist = torch.distributions.Categorical(logits=logits)
        a = dist.sample()
        r = reward_fn(s, a) + 0.1 * torch.randn(64, generator=env)
        advantage = r - value
        policy_loss = -(dist.log_prob(a) * advantage.detach()).mean()
        value_loss = F.mse_loss(value, r)
        loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            logits, value = model(sva)
            p = logits.softmax(1)
            true_v = (p * torch.tanh(sva @ W)).sum(1)
        return F.mse_loss(value, true_v).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def recsys_zero_init_embeddings_bad():
    torch.manual_seed(0)
    n_users, n_items, dim = 200, 150, 8
    g = torch.Generator().manual_seed(1)
    U, V = torch.randn(n_users, 3, generator=g), torch.randn(n_items, 3, generator=g)
    ub = 0.3 * torch.randn(n_users, generator=g)
    u = torch.randint(0, n_users, (16000,), generator=g)
    v = torch.randint(0, n_items, (16000,), generator=g)
    r = 3.5 + ub[u] + 0.6 * (U[u] * V[v]).sum(1) + 0.2 * torch.randn(16000, generator=g)
    pairs = torch.stack([u, v], dim=1)
    ptr, rtr, pva, rva = pairs[:14000], r[:14000], pairs[14000:], r[14000:]

    class MF(nn.Module):
        def __init__(self, mean):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            self.register_buffer("mean", mean)
            nn.init.zeros_(self.user.weight)
            nn.init.zeros_(self.item.weight)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, u, v):
            dot = (self.user(u) * self.item(v)).sum(dim=1)
            return self.mean + dot + self.user_bias(u).squeeze(1) + self.item_bias(v).squeeze(1)

    model = MF(rtr.mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batches = cycle(make_loader(ptr, rtr, 128))

    def step(i):
        p, r = next(batches)
        optimizer.zero_grad()
        pred = model(p[:, 0], p[:, 1])
        loss = F.mse_loss(pred, r)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(pva[:, 0], pva[:, 1]), rva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def recsys_zero_init_embeddings_good():
    torch.manual_seed(0)
    n_users, n_items, dim = 200, 150, 8
    g = torch.Generator().manual_seed(1)
    U, V = torch.randn(n_users, 3, generator=g), torch.randn(n_items, 3, generator=g)
    ub = 0.3 * torch.randn(n_users, generator=g)
    u = torch.randint(0, n_users, (16000,), generator=g)
    v = torch.randint(0, n_items, (16000,), generator=g)
    r = 3.5 + ub[u] + 0.6 * (U[u] * V[v]).sum(1) + 0.2 * torch.randn(16000, generator=g)
    pairs = torch.stack([u, v], dim=1)
    ptr, rtr, pva, rva = pairs[:14000], r[:14000], pairs[14000:], r[14000:]

    class MF(nn.Module):
        def __init__(self, mean):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            self.register_buffer("mean", mean)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, u, v):
            dot = (self.user(u) * self.item(v)).sum(dim=1)
            return self.mean + dot + self.user_bias(u).squeeze(1) + self.item_bias(v).squeeze(1)

    model = MF(rtr.mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    batches = cycle(make_loader(ptr, rtr, 128))

    def step(i):
        p, r = next(batches)
        optimizer.zero_grad()
        pred = model(p[:, 0], p[:, 1])
        loss = F.mse_loss(pred, r)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(pva[:, 0], pva[:, 1]), rva).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def tabular_mse_broadcast_bad():
    torch.manual_seed(0)
    xtr, ytr = make_tabular(4096, seed=1)
    xva, yva = make_tabular(1024, seed=2)

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(16, 64)
            self.fc2 = nn.Linear(64, 64)
            self.out = nn.Linear(64, 1)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.out(x)

    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(xtr, ytr, 64))

    def step(i):
        x, y = next(batches)
        pred = model(x)
        loss = ((pred - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xva).squeeze(1) - yva).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def tabular_mse_broadcast_good():
    torch.manual_seed(0)
    xtr, ytr = make_tabular(4096, seed=1)
    xva, yva = make_tabular(1024, seed=2)

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(16, 64)
            self.fc2 = nn.Linear(64, 64)
            self.out = nn.Linear(64, 1)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.out(x)

    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(xtr, ytr, 64))

    def step(i):
        x, y = next(batches)
        pred = model(x).squeeze(1)
        loss = ((pred - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(xva).squeeze(1) - yva).pow(2).mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def lstm_without_batch_first_bad():
    torch.manual_seed(0)

    def series(n, seed):
        g = torch.Generator().manual_seed(seed)
        f = 0.2 + 0.8 * torch.rand(n, 1, generator=g)
        ph = 2 * math.pi * torch.rand(n, 1, generator=g)
        t = torch.arange(25.0)
        s = torch.sin(f * t + ph) + 0.05 * torch.randn(n, 25, generator=g)
        return s[:, :24].unsqueeze(-1), s[:, 24:]

    xtr, ytr = series(2048, 1)
    xva, yva = series(256, 2)

    class Forecaster(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(1, hidden, num_layers=1)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    batches = cycle(make_loader(xtr, ytr, 32))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            loss = criterion(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def lstm_without_batch_first_good():
    torch.manual_seed(0)

    def series(n, seed):
        g = torch.Generator().manual_seed(seed)
        f = 0.2 + 0.8 * torch.rand(n, 1, generator=g)
        ph = 2 * math.pi * torch.rand(n, 1, generator=g)
        t = torch.arange(25.0)
        s = torch.sin(f * t + ph) + 0.05 * torch.randn(n, 25, generator=g)
        return s[:, :24].unsqueeze(-1), s[:, 24:]

    xtr, ytr = series(2048, 1)
    xva, yva = series(256, 2)

    class Forecaster(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.lstm = nn.LSTM(1, hidden, num_layers=1, batch_first=True)
            self.fc = nn.Linear(hidden, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.fc(out[:, -1, :])

    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()
    batches = cycle(make_loader(xtr, ytr, 32))

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            loss = criterion(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def lm_labels_not_shifted_bad():
    torch.manual_seed(0)
    vocab, length = 40, 32
    trans = torch.softmax(3 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(6)), dim=1)

    def sample(n, seed):
        g = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, vocab, (n,), generator=g)]
        for _ in range(length - 1):
            ids.append(torch.multinomial(trans[ids[-1]], 1, generator=g).squeeze(1))
        return torch.stack(ids, dim=1)

    train_ids, val_ids = sample(2048, 1), sample(128, 2)

    class TinyGPT(nn.Module):
        def __init__(self, d=48):
            super().__init__()
            self.tok = nn.Embedding(vocab, d)
            self.pos = nn.Embedding(length, d)
            layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(d)
            self.head = nn.Linear(d, vocab)

        def forward(self, ids):
            T = ids.size(1)
            x = self.tok(ids) + self.pos(torch.arange(T))
            mask = nn.Transformer.generate_square_subsequent_mask(T)
            return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))

    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(train_ids, torch.zeros(len(train_ids)), 16))

    def step(i):
        model.train()
        ids, _ = next(batches)
        optimizer.zero_grad()
        logits = model(ids)
        loss = F.cross_entropy(logits.reshape(-1, vocab), ids.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            logits = model(val_ids)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, vocab), val_ids[:, 1:].reshape(-1)).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def lm_labels_not_shifted_good():
    torch.manual_seed(0)
    vocab, length = 40, 32
    trans = torch.softmax(3 * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(6)), dim=1)

    def sample(n, seed):
        g = torch.Generator().manual_seed(seed)
        ids = [torch.randint(0, vocab, (n,), generator=g)]
        for _ in range(length - 1):
            ids.append(torch.multinomial(trans[ids[-1]], 1, generator=g).squeeze(1))
        return torch.stack(ids, dim=1)

    train_ids, val_ids = sample(2048, 1), sample(128, 2)

    class TinyGPT(nn.Module):
        def __init__(self, d=48):
            super().__init__()
            self.tok = nn.Embedding(vocab, d)
            self.pos = nn.Embedding(length, d)
            layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(d)
            self.head = nn.Linear(d, vocab)

        def forward(self, ids):
            T = ids.size(1)
            x = self.tok(ids) + self.pos(torch.arange(T))
            mask = nn.Transformer.generate_square_subsequent_mask(T)
            return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))

    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = cycle(make_loader(train_ids, torch.zeros(len(train_ids)), 16))

    def step(i):
        model.train()
        ids, _ = next(batches)
        optimizer.zero_grad()
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, vocab), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            logits = model(val_ids)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, vocab), val_ids[:, 1:].reshape(-1)).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def same_batch_every_step_bad():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)

    def get_loader():
        g = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=g)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    batches = cycle(get_loader())

    def step(i):
        model.train()
        x, y = next(iter(get_loader()))
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            loss = criterion(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def same_batch_every_step_good():
    torch.manual_seed(0)
    xtr, ytr = make_images(2048, 10, seed=1)
    xva, yva = make_images(512, 10, seed=2)

    def get_loader():
        g = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True, generator=g)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    batches = cycle(get_loader())

    def step(i):
        model.train()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            loss = criterion(model(xva), yva).item()
        model.train()
        return loss

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def inputs_and_labels_shuffled_apart_bad():
    torch.manual_seed(0)
    centers = torch.randn(6, 12, generator=torch.Generator().manual_seed(8))

    def sensors(n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        return centers[y] + torch.randn(n, 12, generator=g), y

    xtr, ytr = sensors(640, 1)
    xva, yva = sensors(512, 2)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch_size = 64
    n_batches = len(xtr) // batch_size
    data = {}

    def step(i):
        model.train()
        b = i % n_batches
        if b == 0:
            perm = torch.randperm(len(xtr))
            data["x"] = xtr[perm]
            data["y"] = ytr[torch.randperm(len(ytr))]
        x = data["x"][b * batch_size : (b + 1) * batch_size]
        y = data["y"][b * batch_size : (b + 1) * batch_size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            wrong = (model(xva).argmax(1) != yva).float().mean().item()
        model.train()
        return wrong

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def inputs_and_labels_shuffled_apart_good():
    torch.manual_seed(0)
    centers = torch.randn(6, 12, generator=torch.Generator().manual_seed(8))

    def sensors(n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        return centers[y] + torch.randn(n, 12, generator=g), y

    xtr, ytr = sensors(640, 1)
    xva, yva = sensors(512, 2)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch_size = 64
    n_batches = len(xtr) // batch_size
    data = {}

    def step(i):
        model.train()
        b = i % n_batches
        if b == 0:
            perm = torch.randperm(len(xtr))
            data["x"] = xtr[perm]
            data["y"] = ytr[perm]
        x = data["x"][b * batch_size : (b + 1) * batch_size]
        y = data["y"][b * batch_size : (b + 1) * batch_size]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        model.eval()
        with torch.no_grad():
            wrong = (model(xva).argmax(1) != yva).float().mean().item()
        model.train()
        return wrong

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


CASES = [
    {
        "name": "image_softmax_ce",
        "what": "The CNN ends with softmax and its probabilities go into CrossEntropyLoss, which applies log-softmax again: gradients are squashed, the loss cannot fall near 0 and learning is slow.",
    },
    {
        "name": "vae_recon_mean_kl_sum",
        "what": "The VAE's reconstruction term is averaged over pixels while the KL term is summed over latents: KL outweighs it by far, the posterior collapses and reconstructions are all the same.",
    },
    {
        "name": "gnn_log_softmax_dim0",
        "what": "The GCN applies log_softmax over the nodes (dim=0) instead of the classes before nll_loss: the outputs are not class distributions, the classes do not compete within a node.",
    },
    {
        "name": "triplet_args_swapped",
        "what": "TripletMarginLoss is called as (anchor, negative, positive): the embedding pulls other classes together and pushes the own class away.",
    },
    {
        "name": "diffusion_noise_resampled",
        "what": "q_sample draws its own noise while the loss compares with another draw: the target is independent of the input and the network only learns to output zero.",
    },
    {
        "name": "seg_dice_on_hard_mask",
        "what": "Dice loss is computed on the thresholded mask and the loss then gets requires_grad_(True) so that backward() does not complain: no gradient reaches the network, nothing trains.",
    },
    {
        "name": "detection_box_loss_all_cells",
        "what": "The box regression loss runs over all grid cells although only the cells with an object have a box (the others hold zeros): background drowns the few positive cells and pulls their boxes to zero.",
    },
    {
        "name": "transfer_new_head_after_optimizer",
        "what": "The head is replaced after the optimizer was built, so the optimizer still holds the old head: the new one never moves.",
    },
    {
        "name": "audio_scheduler_every_batch",
        "what": "StepLR meant for epochs is stepped after every batch: the learning rate is gone after a few dozen batches.",
    },
    {
        "name": "amp_clip_without_unscale",
        "what": "Gradients are clipped while still multiplied by the loss scale (no scaler.unscale_): after unscaling they are tens of thousands of times too small and training stands still.",
    },
    {
        "name": "accum_zero_grad_every_micro_batch",
        "what": "With gradient accumulation, zero_grad() is called before every micro-batch, so only the last micro-batch (divided by the number of them) counts.",
    },
    {
        "name": "ema_without_buffers",
        "what": "The EMA copy averages the parameters but never takes over the BatchNorm buffers: its running statistics stay at their initial values and the EMA model predicts badly.",
    },
    {
        "name": "gan_generator_detached",
        "what": "The fake batch is detached when generated and reused for the generator's own loss: no gradient reaches the generator, it never trains.",
    },
    {
        "name": "actor_critic_advantage_not_detached",
        "what": "The advantage in the policy loss is not detached, so the policy gradient flows into the critic and pushes its values up: the value estimates are biased.",
    },
    {
        "name": "recsys_zero_init_embeddings",
        "what": "User and item embeddings are both initialised to zero: each one's gradient is the other, so both stay zero for ever and only the biases learn.",
    },
    {
        "name": "tabular_mse_broadcast",
        "what": "Predictions of shape (N, 1) minus targets of shape (N,) broadcast to (N, N): the network learns the mean of the targets only.",
    },
    {
        "name": "lstm_without_batch_first",
        "what": "Data is (batch, time, features) but the LSTM is built without batch_first: it runs over the batch as if it were time, the samples leak into one another and the history of each is lost.",
    },
    {
        "name": "lm_labels_not_shifted",
        "what": "The language model's targets are its own inputs without a shift by one: it learns to copy the current token, not to predict the next.",
    },
    {
        "name": "same_batch_every_step",
        "what": "Each step takes next(iter(loader)) of a freshly built, seeded loader and so always gets the very same batch: the network memorises it and learns nothing else.",
    },
    {
        "name": "inputs_and_labels_shuffled_apart",
        "what": "Inputs and labels are shuffled with two different permutations each epoch: the pairs are torn apart and there is nothing to learn.",
    },
]
