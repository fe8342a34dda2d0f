"""Twenty-two small training programs, twenty-one of them outside language models, each with one bug that people often make, and
a mended twin, by somebody who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import copy
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


def make_gen(seed):
    return torch.Generator().manual_seed(seed)


def make_tabular(n, seed, d=20, classes=2):
    """Nonlinear classification table with standardised columns."""
    w = make_gen(7)
    w1 = torch.randn(d, 16, generator=w) / math.sqrt(d)
    w2 = torch.randn(16, classes, generator=w)
    x = torch.randn(n, d, generator=make_gen(seed))
    y = (torch.tanh(2.0 * x @ w1) @ w2).argmax(1)
    return x, y


def make_digits(n, seed, classes=10, size=16, noise=0.2):
    """Grey images in [0, 1]: a smooth glyph per class, moved by up to 2 pixels, with noise."""
    protos = torch.randn(classes, 1, 5, 5, generator=make_gen(11))
    protos = torch.sigmoid(2.5 * F.interpolate(protos, size=(size, size), mode="bicubic", align_corners=False))
    g = make_gen(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    dx = torch.randint(-2, 3, (n, 2), generator=g).tolist()
    x = torch.stack([torch.roll(protos[c], (a, b), (1, 2)) for c, (a, b) in zip(y.tolist(), dx)])
    x = (x + noise * torch.randn(x.shape, generator=g)).clamp(0, 1)
    return x, y


def endless(loader):
    while True:
        yield from loader


class SmallCNN(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(32 * 4 * 4, classes)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


@torch.no_grad()
def error_rate(model, x, y):
    was = model.training
    model.eval()
    err = (model(x).argmax(1) != y).float().mean().item()
    model.train(was)
    return err


def audio_nll_bad():
    torch.manual_seed(0)

    def make_clips(n, seed):
        g = make_gen(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        t = torch.arange(800) / 8000.0
        freq = 250.0 * (y + 1).float() * (1 + 0.05 * torch.randn(n, generator=g))
        phase = 2 * math.pi * torch.rand(n, generator=g)
        x = torch.sin(2 * math.pi * freq[:, None] * t + phase[:, None])
        x = x + 0.7 * torch.randn(n, 800, generator=g)
        return x.unsqueeze(1), y

    class AudioNet(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.conv1 = nn.Conv1d(1, 16, 40, stride=4)
            self.bn1 = nn.BatchNorm1d(16)
            self.conv2 = nn.Conv1d(16, 32, 5, stride=2)
            self.bn2 = nn.BatchNorm1d(32)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = x.mean(-1)
            x = self.fc(x)
            return x

    train_x, train_y = make_clips(1024, 1)
    val_x, val_y = make_clips(256, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))
    model = AudioNet(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.NLLLoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        v = F.cross_entropy(model(val_x), val_y).item()
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def audio_nll_good():
    torch.manual_seed(0)

    def make_clips(n, seed):
        g = make_gen(seed)
        y = torch.randint(0, 6, (n,), generator=g)
        t = torch.arange(800) / 8000.0
        freq = 250.0 * (y + 1).float() * (1 + 0.05 * torch.randn(n, generator=g))
        phase = 2 * math.pi * torch.rand(n, generator=g)
        x = torch.sin(2 * math.pi * freq[:, None] * t + phase[:, None])
        x = x + 0.7 * torch.randn(n, 800, generator=g)
        return x.unsqueeze(1), y

    class AudioNet(nn.Module):
        def __init__(self, n_classes):
            super().__init__()
            self.conv1 = nn.Conv1d(1, 16, 40, stride=4)
            self.bn1 = nn.BatchNorm1d(16)
            self.conv2 = nn.Conv1d(16, 32, 5, stride=2)
            self.bn2 = nn.BatchNorm1d(32)
            self.fc = nn.Linear(32, n_classes)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = x.mean(-1)
            x = self.fc(x)
            return F.log_softmax(x, dim=1)

    train_x, train_y = make_clips(1024, 1)
    val_x, val_y = make_clips(256, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))
    model = AudioNet(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.NLLLoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        v = F.cross_entropy(model(val_x), val_y).item()
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def distill_kl_bad():
    torch.manual_seed(0)
    train_x, train_y = make_tabular(2000, 1, classes=5)
    val_x, val_y = make_tabular(500, 2, classes=5)

    teacher = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
    t_loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=128, shuffle=True, generator=make_gen(3)))
    t_opt = torch.optim.AdamW(teacher.parameters(), lr=2e-3, weight_decay=1e-2)
    for _ in range(120):
        x, y = next(t_loader)
        t_opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        t_opt.step()
    t_opt.zero_grad()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(4)))
    T, alpha = 2.0, 0.9

    def step(i):
        x, y = next(loader)
        with torch.no_grad():
            t_logits = teacher(x)
        s_logits = student(x)
        soft = F.kl_div(F.softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        hard = F.cross_entropy(s_logits, y)
        loss = alpha * soft + (1 - alpha) * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.kl_div(F.log_softmax(student(val_x), 1), F.softmax(teacher(val_x), 1), reduction="batchmean").item()

    return {
        "model": {"student": student, "teacher": teacher},
        "optimizer": optimizer,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def distill_kl_good():
    torch.manual_seed(0)
    train_x, train_y = make_tabular(2000, 1, classes=5)
    val_x, val_y = make_tabular(500, 2, classes=5)

    teacher = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
    t_loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=128, shuffle=True, generator=make_gen(3)))
    t_opt = torch.optim.AdamW(teacher.parameters(), lr=2e-3, weight_decay=1e-2)
    for _ in range(120):
        x, y = next(t_loader)
        t_opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        t_opt.step()
    t_opt.zero_grad()
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)

    student = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(4)))
    T, alpha = 2.0, 0.9

    def step(i):
        x, y = next(loader)
        with torch.no_grad():
            t_logits = teacher(x)
        s_logits = student(x)
        soft = (
            F.kl_div(F.log_softmax(s_logits / T, dim=1), F.softmax(t_logits / T, dim=1), reduction="batchmean") * T * T
        )
        hard = F.cross_entropy(s_logits, y)
        loss = alpha * soft + (1 - alpha) * hard
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.kl_div(F.log_softmax(student(val_x), 1), F.softmax(teacher(val_x), 1), reduction="batchmean").item()

    return {
        "model": {"student": student, "teacher": teacher},
        "optimizer": optimizer,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def vae_kl_bad():
    torch.manual_seed(0)
    train_x, _ = make_digits(1024, 1, noise=0.05)
    val_x, _ = make_digits(256, 2, noise=0.05)

    class VAE(nn.Module):
        def __init__(self, latent=8):
            super().__init__()
            self.enc = nn.Linear(256, 128)
            self.mu = nn.Linear(128, latent)
            self.logvar = nn.Linear(128, latent)
            self.dec1 = nn.Linear(latent, 128)
            self.dec2 = nn.Linear(128, 256)

        def forward(self, x):
            h = F.relu(self.enc(x))
            mu, logvar = self.mu(h), self.logvar(h)
            std = torch.exp(0.5 * logvar)
            z = mu + std * torch.randn_like(std)
            return self.dec2(F.relu(self.dec1(z))), mu, logvar

    def loss_function(logits, x, mu, logvar):
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        kld = 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / x.size(0)

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = endless(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, generator=make_gen(3)))

    def step(i):
        (x,) = next(loader)
        x = x.flatten(1)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = loss_function(logits, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        x = val_x.flatten(1)
        logits, mu, logvar = model(x)
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mu, torch.exp(0.5 * logvar)), torch.distributions.Normal(0.0, 1.0)
        ).sum()
        return ((bce + kl) / x.size(0)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def vae_kl_good():
    torch.manual_seed(0)
    train_x, _ = make_digits(1024, 1, noise=0.05)
    val_x, _ = make_digits(256, 2, noise=0.05)

    class VAE(nn.Module):
        def __init__(self, latent=8):
            super().__init__()
            self.enc = nn.Linear(256, 128)
            self.mu = nn.Linear(128, latent)
            self.logvar = nn.Linear(128, latent)
            self.dec1 = nn.Linear(latent, 128)
            self.dec2 = nn.Linear(128, 256)

        def forward(self, x):
            h = F.relu(self.enc(x))
            mu, logvar = self.mu(h), self.logvar(h)
            std = torch.exp(0.5 * logvar)
            z = mu + std * torch.randn_like(std)
            return self.dec2(F.relu(self.dec1(z))), mu, logvar

    def loss_function(logits, x, mu, logvar):
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return (bce + kld) / x.size(0)

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = endless(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, generator=make_gen(3)))

    def step(i):
        (x,) = next(loader)
        x = x.flatten(1)
        optimizer.zero_grad()
        logits, mu, logvar = model(x)
        loss = loss_function(logits, x, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        x = val_x.flatten(1)
        logits, mu, logvar = model(x)
        bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mu, torch.exp(0.5 * logvar)), torch.distributions.Normal(0.0, 1.0)
        ).sum()
        return ((bce + kl) / x.size(0)).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def churn_one_logit_bad():
    torch.manual_seed(0)
    train_x, train_y = make_tabular(2000, 1)
    val_x, val_y = make_tabular(500, 2)
    train_y, val_y = train_y.float().unsqueeze(1), val_y.float().unsqueeze(1)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))

    class ChurnNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(20, 64)
            self.fc2 = nn.Linear(64, 32)
            self.out = nn.Linear(32, 1)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.out(x)

    model = ChurnNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.binary_cross_entropy_with_logits(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def churn_one_logit_good():
    torch.manual_seed(0)
    train_x, train_y = make_tabular(2000, 1)
    val_x, val_y = make_tabular(500, 2)
    train_y, val_y = train_y.float().unsqueeze(1), val_y.float().unsqueeze(1)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))

    class ChurnNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(20, 64)
            self.fc2 = nn.Linear(64, 32)
            self.out = nn.Linear(32, 1)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.relu(self.fc2(x))
            return self.out(x)

    model = ChurnNet()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.binary_cross_entropy_with_logits(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def simclr_temperature_bad():
    torch.manual_seed(0)
    mix = torch.randn(12, 48, generator=make_gen(21)) / math.sqrt(12)
    nuis = torch.randn(24, 48, generator=make_gen(22)) / math.sqrt(24) * 1.6
    g_train = make_gen(1)

    def two_views(n, g):
        content = torch.randn(n, 12, generator=g) @ mix
        a = content + torch.randn(n, 24, generator=g) @ nuis
        b = content + torch.randn(n, 24, generator=g) @ nuis
        return a, b

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
            self.proj = nn.Linear(128, 32)

        def forward(self, x):
            return F.normalize(self.proj(self.backbone(x)), dim=1)

    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    temperature = 0.1

    def step(i):
        a, b = two_views(64, g_train)
        za, zb = model(a), model(b)
        logits = za @ zb.t() * temperature
        labels = torch.arange(logits.size(0))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    val_a, val_b = two_views(128, make_gen(2))

    @torch.no_grad()
    def probe():
        sim = model(val_a) @ model(val_b).t()
        return (sim.argmax(1) != torch.arange(128)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def simclr_temperature_good():
    torch.manual_seed(0)
    mix = torch.randn(12, 48, generator=make_gen(21)) / math.sqrt(12)
    nuis = torch.randn(24, 48, generator=make_gen(22)) / math.sqrt(24) * 1.6
    g_train = make_gen(1)

    def two_views(n, g):
        content = torch.randn(n, 12, generator=g) @ mix
        a = content + torch.randn(n, 24, generator=g) @ nuis
        b = content + torch.randn(n, 24, generator=g) @ nuis
        return a, b

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
            self.proj = nn.Linear(128, 32)

        def forward(self, x):
            return F.normalize(self.proj(self.backbone(x)), dim=1)

    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    temperature = 0.1

    def step(i):
        a, b = two_views(64, g_train)
        za, zb = model(a), model(b)
        logits = za @ zb.t() / temperature
        labels = torch.arange(logits.size(0))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    val_a, val_b = two_views(128, make_gen(2))

    @torch.no_grad()
    def probe():
        sim = model(val_a) @ model(val_b).t()
        return (sim.argmax(1) != torch.arange(128)).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def gan_generator_labels_bad():
    torch.manual_seed(0)
    mean = torch.tensor([1.5, -1.0, 0.5, 1.0])
    chol = torch.randn(4, 4, generator=make_gen(31)) * 0.4 + 0.3 * torch.eye(4)
    g_data = make_gen(1)

    def sample_real(n, g):
        return mean + torch.randn(n, 4, generator=g) @ chol

    G = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 4))
    D = nn.Sequential(nn.Linear(4, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real_label = torch.ones(64, 1)
    fake_label = torch.zeros(64, 1)

    def step(i):
        real = sample_real(64, g_data)
        fake = G(torch.randn(64, 8))

        opt_d.zero_grad()
        d_loss = criterion(D(real), real_label) + criterion(D(fake.detach()), fake_label)
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = criterion(D(fake), fake_label)
        g_loss.backward()
        opt_g.step()
        return (d_loss + g_loss).item()

    held_out = sample_real(1000, make_gen(2))

    @torch.no_grad()
    def probe():
        fake = G(torch.randn(1000, 8, generator=make_gen(5)))
        return ((fake.mean(0) - held_out.mean(0)).norm() + (fake.std(0) - held_out.std(0)).norm()).item()

    return {
        "model": {"generator": G, "discriminator": D},
        "optimizer": [opt_g, opt_d],
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def gan_generator_labels_good():
    torch.manual_seed(0)
    mean = torch.tensor([1.5, -1.0, 0.5, 1.0])
    chol = torch.randn(4, 4, generator=make_gen(31)) * 0.4 + 0.3 * torch.eye(4)
    g_data = make_gen(1)

    def sample_real(n, g):
        return mean + torch.randn(n, 4, generator=g) @ chol

    G = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 4))
    D = nn.Sequential(nn.Linear(4, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real_label = torch.ones(64, 1)
    fake_label = torch.zeros(64, 1)

    def step(i):
        real = sample_real(64, g_data)
        fake = G(torch.randn(64, 8))

        opt_d.zero_grad()
        d_loss = criterion(D(real), real_label) + criterion(D(fake.detach()), fake_label)
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = criterion(D(fake), real_label)
        g_loss.backward()
        opt_g.step()
        return (d_loss + g_loss).item()

    held_out = sample_real(1000, make_gen(2))

    @torch.no_grad()
    def probe():
        fake = G(torch.randn(1000, 8, generator=make_gen(5)))
        return ((fake.mean(0) - held_out.mean(0)).norm() + (fake.std(0) - held_out.std(0)).norm()).item()

    return {
        "model": {"generator": G, "discriminator": D},
        "optimizer": [opt_g, opt_d],
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def reinforce_sign_bad():
    torch.manual_seed(0)
    n_env, horizon, gamma = 64, 10, 0.95
    moves = torch.tensor([-0.3, 0.0, 0.3])
    g_env = make_gen(1)

    def reset(n, g):
        return torch.rand(n, 2, generator=g) * 4 - 2

    def env_step(state, action):
        pos = state[:, 0] + moves[action]
        reward = -(pos - state[:, 1]).abs()
        return torch.stack([pos, state[:, 1]], 1), reward

    policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)

    def step(i):
        state = reset(n_env, g_env)
        log_probs, rewards = [], []
        for t in range(horizon):
            dist = torch.distributions.Categorical(logits=policy(state))
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            state, r = env_step(state, action)
            rewards.append(r)
        returns, R = [], torch.zeros(n_env)
        for r in reversed(rewards):
            R = r + gamma * R
            returns.insert(0, R)
        returns = torch.stack(returns)
        returns = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-8)
        loss = (torch.stack(log_probs) * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        g = make_gen(2)
        state, total = reset(256, g), torch.zeros(256)
        for t in range(horizon):
            p = F.softmax(policy(state), dim=1)
            state, r = env_step(state, torch.multinomial(p, 1, generator=g).squeeze(1))
            total += r
        return -total.mean().item()

    return {"model": policy, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def reinforce_sign_good():
    torch.manual_seed(0)
    n_env, horizon, gamma = 64, 10, 0.95
    moves = torch.tensor([-0.3, 0.0, 0.3])
    g_env = make_gen(1)

    def reset(n, g):
        return torch.rand(n, 2, generator=g) * 4 - 2

    def env_step(state, action):
        pos = state[:, 0] + moves[action]
        reward = -(pos - state[:, 1]).abs()
        return torch.stack([pos, state[:, 1]], 1), reward

    policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)

    def step(i):
        state = reset(n_env, g_env)
        log_probs, rewards = [], []
        for t in range(horizon):
            dist = torch.distributions.Categorical(logits=policy(state))
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            state, r = env_step(state, action)
            rewards.append(r)
        returns, R = [], torch.zeros(n_env)
        for r in reversed(rewards):
            R = r + gamma * R
            returns.insert(0, R)
        returns = torch.stack(returns)
        returns = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-8)
        loss = -(torch.stack(log_probs) * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        g = make_gen(2)
        state, total = reset(256, g), torch.zeros(256)
        for t in range(horizon):
            p = F.softmax(policy(state), dim=1)
            state, r = env_step(state, torch.multinomial(p, 1, generator=g).squeeze(1))
            total += r
        return -total.mean().item()

    return {"model": policy, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def seg_loss_rewrapped_bad():
    torch.manual_seed(0)

    def make_scenes(n, seed, size=24):
        g = make_gen(seed)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        c = torch.rand(n, 2, generator=g) * (size - 10) + 5
        r = torch.rand(n, generator=g) * 3 + 3
        mask = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2 < r[:, None, None] ** 2
        img = mask.float() * 1.5 - 0.5 + 0.8 * torch.randn(n, size, size, generator=g)
        return img.unsqueeze(1), mask.long()

    train_x, train_y = make_scenes(512, 1)
    val_x, val_y = make_scenes(64, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=16, shuffle=True, generator=make_gen(3)))

    class SegNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            self.mid = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.out = nn.Conv2d(16, 2, 1)

        def forward(self, x):
            return self.out(F.relu(self.up(self.mid(self.down(x)))))

    model = SegNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        images, masks = next(loader)
        optimizer.zero_grad()
        outputs = model(images)
        loss = torch.tensor(criterion(outputs, masks).item(), requires_grad=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def seg_loss_rewrapped_good():
    torch.manual_seed(0)

    def make_scenes(n, seed, size=24):
        g = make_gen(seed)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        c = torch.rand(n, 2, generator=g) * (size - 10) + 5
        r = torch.rand(n, generator=g) * 3 + 3
        mask = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2 < r[:, None, None] ** 2
        img = mask.float() * 1.5 - 0.5 + 0.8 * torch.randn(n, size, size, generator=g)
        return img.unsqueeze(1), mask.long()

    train_x, train_y = make_scenes(512, 1)
    val_x, val_y = make_scenes(64, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=16, shuffle=True, generator=make_gen(3)))

    class SegNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            self.mid = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
            self.out = nn.Conv2d(16, 2, 1)

        def forward(self, x):
            return self.out(F.relu(self.up(self.mid(self.down(x)))))

    model = SegNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        images, masks = next(loader)
        optimizer.zero_grad()
        outputs = model(images)
        loss = criterion(outputs, masks)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def warmup_per_epoch_bad():
    torch.manual_seed(0)
    train_x, train_y = make_digits(1280, 1, noise=0.35)
    val_x, val_y = make_digits(400, 2, noise=0.35)
    train_x, val_x = (train_x - 0.5) / 0.35, (val_x - 0.5) / 0.35
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3))
    batches = endless(loader)
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    warmup_steps = 50
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup_steps))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(loader) == 0:
            scheduler.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        v = F.cross_entropy(model(val_x), val_y).item()
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def warmup_per_epoch_good():
    torch.manual_seed(0)
    train_x, train_y = make_digits(1280, 1, noise=0.35)
    val_x, val_y = make_digits(400, 2, noise=0.35)
    train_x, val_x = (train_x - 0.5) / 0.35, (val_x - 0.5) / 0.35
    loader = DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3))
    batches = endless(loader)
    model = SmallCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    warmup_steps = 50
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup_steps))

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        model.eval()
        v = F.cross_entropy(model(val_x), val_y).item()
        model.train()
        return v

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def diffusion_ema_rebind_bad():
    torch.manual_seed(0)
    T = 50
    betas = torch.linspace(1e-3, 0.12, T)
    alpha_bar = torch.cumprod(1 - betas, 0)
    g_data = make_gen(1)

    def sample_data(n, g):
        angle = 2 * math.pi * torch.rand(n, generator=g)
        return torch.stack([angle.cos(), angle.sin()], 1) * 1.4 + 0.05 * torch.randn(n, 2, generator=g)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.t_emb = nn.Embedding(T, 32)
            self.net = nn.Sequential(nn.Linear(34, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))

        def forward(self, x, t):
            return self.net(torch.cat([x, self.t_emb(t)], 1))

    model = Denoiser()
    ema_model = copy.deepcopy(model).eval()
    for p in ema_model.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    decay = 0.95

    def q_sample(x0, t, noise):
        ab = alpha_bar[t].unsqueeze(1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    @torch.no_grad()
    def update_ema():
        for ema_p, p in zip(ema_model.parameters(), model.parameters()):
            ema_p = decay * ema_p + (1 - decay) * p

    def step(i):
        x0 = sample_data(128, g_data)
        t = torch.randint(0, T, (128,))
        noise = torch.randn_like(x0)
        loss = F.mse_loss(model(q_sample(x0, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema()
        return loss.item()

    @torch.no_grad()
    def probe():
        g = make_gen(2)
        x0 = sample_data(1000, g)
        t = torch.randint(0, T, (1000,), generator=g)
        noise = torch.randn(1000, 2, generator=g)
        return F.mse_loss(ema_model(q_sample(x0, t, noise), t), noise).item()

    return {
        "model": {"model": model, "ema": ema_model},
        "optimizer": optimizer,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def diffusion_ema_rebind_good():
    torch.manual_seed(0)
    T = 50
    betas = torch.linspace(1e-3, 0.12, T)
    alpha_bar = torch.cumprod(1 - betas, 0)
    g_data = make_gen(1)

    def sample_data(n, g):
        angle = 2 * math.pi * torch.rand(n, generator=g)
        return torch.stack([angle.cos(), angle.sin()], 1) * 1.4 + 0.05 * torch.randn(n, 2, generator=g)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.t_emb = nn.Embedding(T, 32)
            self.net = nn.Sequential(nn.Linear(34, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))

        def forward(self, x, t):
            return self.net(torch.cat([x, self.t_emb(t)], 1))

    model = Denoiser()
    ema_model = copy.deepcopy(model).eval()
    for p in ema_model.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    decay = 0.95

    def q_sample(x0, t, noise):
        ab = alpha_bar[t].unsqueeze(1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    @torch.no_grad()
    def update_ema():
        for ema_p, p in zip(ema_model.parameters(), model.parameters()):
            ema_p.copy_(decay * ema_p + (1 - decay) * p)

    def step(i):
        x0 = sample_data(128, g_data)
        t = torch.randint(0, T, (128,))
        noise = torch.randn_like(x0)
        loss = F.mse_loss(model(q_sample(x0, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema()
        return loss.item()

    @torch.no_grad()
    def probe():
        g = make_gen(2)
        x0 = sample_data(1000, g)
        t = torch.randint(0, T, (1000,), generator=g)
        noise = torch.randn(1000, 2, generator=g)
        return F.mse_loss(ema_model(q_sample(x0, t, noise), t), noise).item()

    return {
        "model": {"model": model, "ema": ema_model},
        "optimizer": optimizer,
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def amp_scaler_bypassed_bad():
    torch.manual_seed(0)
    train_x, train_y = make_digits(1024, 1)
    val_x, val_y = make_digits(400, 2)
    train_x, val_x = (train_x - 0.5) / 0.3, (val_x - 0.5) / 0.3
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def amp_scaler_bypassed_good():
    torch.manual_seed(0)
    train_x, train_y = make_digits(1024, 1)
    val_x, val_y = make_digits(400, 2)
    train_x, val_x = (train_x - 0.5) / 0.3, (val_x - 0.5) / 0.3
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def rnn_clip_too_early_bad():
    torch.manual_seed(0)

    def make_series(n, seed):
        g = make_gen(seed)
        t = torch.arange(31).float()
        phase = 6.28 * torch.rand(n, 1, generator=g)
        freq = 0.2 + 0.3 * torch.rand(n, 1, generator=g)
        s = torch.sin(freq * t + phase) + 0.1 * torch.randn(n, 31, generator=g)
        x, y = s[:, :30].unsqueeze(-1), s[:, 30:]
        spike = (torch.rand(n, 1, generator=g) < 0.02).float()
        return x, y + spike * 60.0 * torch.randn(n, 1, generator=g)

    train_x, train_y = make_series(2048, 1)
    val_x, val_y = make_series(500, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(1, 32, batch_first=True)
            self.out = nn.Linear(32, 1)

        def forward(self, x):
            h, _ = self.rnn(x)
            return self.out(h[:, -1])

    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.MSELoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (model(val_x) - val_y).abs().median().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def rnn_clip_too_early_good():
    torch.manual_seed(0)

    def make_series(n, seed):
        g = make_gen(seed)
        t = torch.arange(31).float()
        phase = 6.28 * torch.rand(n, 1, generator=g)
        freq = 0.2 + 0.3 * torch.rand(n, 1, generator=g)
        s = torch.sin(freq * t + phase) + 0.1 * torch.randn(n, 31, generator=g)
        x, y = s[:, :30].unsqueeze(-1), s[:, 30:]
        spike = (torch.rand(n, 1, generator=g) < 0.02).float()
        return x, y + spike * 60.0 * torch.randn(n, 1, generator=g)

    train_x, train_y = make_series(2048, 1)
    val_x, val_y = make_series(500, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(1, 32, batch_first=True)
            self.out = nn.Linear(32, 1)

        def forward(self, x):
            h, _ = self.rnn(x)
            return self.out(h[:, -1])

    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.MSELoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return (model(val_x) - val_y).abs().median().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def multitask_loss_overwritten_bad():
    torch.manual_seed(0)
    proj = torch.randn(20, 3, generator=make_gen(41)) / math.sqrt(20)

    def make_data(n, seed):
        x = torch.randn(n, 20, generator=make_gen(seed))
        s = x @ proj
        return x, (s[:, 0] * s[:, 1] > 0).float(), torch.sin(1.5 * s[:, 1]), s[:, 2].abs()

    train, val = make_data(4000, 1), make_data(500, 2)
    loader = endless(DataLoader(TensorDataset(*train), batch_size=64, shuffle=True, generator=make_gen(3)))

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.heads = nn.ModuleDict({k: nn.Linear(64, 1) for k in ("buys", "spend", "visits")})

        def forward(self, x):
            h = self.trunk(x)
            return {k: head(h).squeeze(1) for k, head in self.heads.items()}

    model = MultiTask()
    criteria = {"buys": F.binary_cross_entropy_with_logits, "spend": F.mse_loss, "visits": F.mse_loss}
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, *ys = next(loader)
        targets = dict(zip(criteria, ys))
        optimizer.zero_grad()
        outputs = model(x)
        loss = 0.0
        for name, criterion in criteria.items():
            loss = criterion(outputs[name], targets[name])
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        out = model(val[0])
        return sum(c(out[k], y).item() for (k, c), y in zip(criteria.items(), val[1:]))

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def multitask_loss_overwritten_good():
    torch.manual_seed(0)
    proj = torch.randn(20, 3, generator=make_gen(41)) / math.sqrt(20)

    def make_data(n, seed):
        x = torch.randn(n, 20, generator=make_gen(seed))
        s = x @ proj
        return x, (s[:, 0] * s[:, 1] > 0).float(), torch.sin(1.5 * s[:, 1]), s[:, 2].abs()

    train, val = make_data(4000, 1), make_data(500, 2)
    loader = endless(DataLoader(TensorDataset(*train), batch_size=64, shuffle=True, generator=make_gen(3)))

    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.heads = nn.ModuleDict({k: nn.Linear(64, 1) for k in ("buys", "spend", "visits")})

        def forward(self, x):
            h = self.trunk(x)
            return {k: head(h).squeeze(1) for k, head in self.heads.items()}

    model = MultiTask()
    criteria = {"buys": F.binary_cross_entropy_with_logits, "spend": F.mse_loss, "visits": F.mse_loss}
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        x, *ys = next(loader)
        targets = dict(zip(criteria, ys))
        optimizer.zero_grad()
        outputs = model(x)
        loss = 0.0
        for name, criterion in criteria.items():
            loss += criterion(outputs[name], targets[name])
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        out = model(val[0])
        return sum(c(out[k], y).item() for (k, c), y in zip(criteria.items(), val[1:]))

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def layers_in_python_list_bad():
    torch.manual_seed(0)
    w = torch.randn(8, 3, generator=make_gen(51)) / math.sqrt(8)

    def make_data(n, seed):
        g = make_gen(seed)
        x = torch.randn(n, 8, generator=g)
        s = x @ w
        y = torch.sin(2 * s[:, 0]) * s[:, 1] + torch.cos(2 * s[:, 2])
        return x, y.unsqueeze(1)

    train_x, train_y = make_data(4000, 1)
    val_x, val_y = make_data(500, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))

    class Block(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            self.fc = nn.Linear(dim, dim)

        def forward(self, x):
            return x + F.gelu(self.fc(self.norm(x)))

    class ResMLP(nn.Module):
        def __init__(self, dim=48, depth=4):
            super().__init__()
            self.inp = nn.Linear(8, dim)
            self.blocks = [Block(dim) for _ in range(depth)]
            self.out = nn.Linear(dim, 1)

        def forward(self, x):
            x = self.inp(x)
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    model = ResMLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def layers_in_python_list_good():
    torch.manual_seed(0)
    w = torch.randn(8, 3, generator=make_gen(51)) / math.sqrt(8)

    def make_data(n, seed):
        g = make_gen(seed)
        x = torch.randn(n, 8, generator=g)
        s = x @ w
        y = torch.sin(2 * s[:, 0]) * s[:, 1] + torch.cos(2 * s[:, 2])
        return x, y.unsqueeze(1)

    train_x, train_y = make_data(4000, 1)
    val_x, val_y = make_data(500, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))

    class Block(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            self.fc = nn.Linear(dim, dim)

        def forward(self, x):
            return x + F.gelu(self.fc(self.norm(x)))

    class ResMLP(nn.Module):
        def __init__(self, dim=48, depth=4):
            super().__init__()
            self.inp = nn.Linear(8, dim)
            self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
            self.out = nn.Linear(dim, 1)

        def forward(self, x):
            x = self.inp(x)
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    model = ResMLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.MSELoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(val_x), val_y).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def vqvae_no_straight_through_bad():
    torch.manual_seed(0)
    train_x, _ = make_digits(1024, 1, noise=0.05)
    val_x, _ = make_digits(256, 2, noise=0.05)
    loader = endless(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, generator=make_gen(3)))

    class VQVAE(nn.Module):
        def __init__(self, n_codes=32, dim=8):
            super().__init__()
            self.enc = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, dim, 4, 2, 1))
            self.codebook = nn.Embedding(n_codes, dim)
            nn.init.uniform_(self.codebook.weight, -0.3, 0.3)
            self.dec = nn.Sequential(
                nn.ConvTranspose2d(dim, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
            )

        def forward(self, x):
            z = self.enc(x)
            flat = z.permute(0, 2, 3, 1).reshape(-1, z.size(1))
            idx = torch.cdist(flat, self.codebook.weight).argmin(1)
            q = self.codebook(idx).view(z.size(0), z.size(2), z.size(3), z.size(1)).permute(0, 3, 1, 2)
            vq_loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
            return self.dec(q), vq_loss

    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        (x,) = next(loader)
        recon, vq_loss = model(x)
        loss = F.mse_loss(recon, x) + vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(val_x)[0], val_x).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def vqvae_no_straight_through_good():
    torch.manual_seed(0)
    train_x, _ = make_digits(1024, 1, noise=0.05)
    val_x, _ = make_digits(256, 2, noise=0.05)
    loader = endless(DataLoader(TensorDataset(train_x), batch_size=64, shuffle=True, generator=make_gen(3)))

    class VQVAE(nn.Module):
        def __init__(self, n_codes=32, dim=8):
            super().__init__()
            self.enc = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, dim, 4, 2, 1))
            self.codebook = nn.Embedding(n_codes, dim)
            nn.init.uniform_(self.codebook.weight, -0.3, 0.3)
            self.dec = nn.Sequential(
                nn.ConvTranspose2d(dim, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)
            )

        def forward(self, x):
            z = self.enc(x)
            flat = z.permute(0, 2, 3, 1).reshape(-1, z.size(1))
            idx = torch.cdist(flat, self.codebook.weight).argmin(1)
            q = self.codebook(idx).view(z.size(0), z.size(2), z.size(3), z.size(1)).permute(0, 3, 1, 2)
            vq_loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
            q = z + (q - z).detach()
            return self.dec(q), vq_loss

    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        (x,) = next(loader)
        recon, vq_loss = model(x)
        loss = F.mse_loss(recon, x) + vq_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(val_x)[0], val_x).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def dropout_always_on_bad():
    torch.manual_seed(0)
    train_x, train_y = make_tabular(3000, 1, classes=4)
    val_x, val_y = make_tabular(600, 2, classes=4)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))

    class TabNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(20, 128)
            self.fc2 = nn.Linear(128, 64)
            self.fc3 = nn.Linear(64, 4)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.dropout(x, p=0.5)
            x = F.relu(self.fc2(x))
            return self.fc3(x)

    model = TabNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def evaluate():
        model.eval()
        with torch.no_grad():
            v = criterion(model(val_x), val_y).item()
        model.train()
        return v

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % 10 == 0:
            evaluate()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": evaluate}


def dropout_always_on_good():
    torch.manual_seed(0)
    train_x, train_y = make_tabular(3000, 1, classes=4)
    val_x, val_y = make_tabular(600, 2, classes=4)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))

    class TabNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(20, 128)
            self.fc2 = nn.Linear(128, 64)
            self.fc3 = nn.Linear(64, 4)

        def forward(self, x):
            x = F.relu(self.fc1(x))
            x = F.dropout(x, p=0.5, training=self.training)
            x = F.relu(self.fc2(x))
            return self.fc3(x)

    model = TabNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def evaluate():
        model.eval()
        with torch.no_grad():
            v = criterion(model(val_x), val_y).item()
        model.train()
        return v

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % 10 == 0:
            evaluate()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": evaluate}


def sorted_no_shuffle_bad():
    torch.manual_seed(0)
    train_x, train_y = make_digits(1280, 1)
    val_x, val_y = make_digits(400, 2)
    order = torch.argsort(train_y, stable=True)
    train_x, train_y = train_x[order], train_y[order]
    train_x, val_x = (train_x - 0.5) / 0.3, (val_x - 0.5) / 0.3
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=False))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def sorted_no_shuffle_good():
    torch.manual_seed(0)
    train_x, train_y = make_digits(1280, 1)
    val_x, val_y = make_digits(400, 2)
    order = torch.argsort(train_y, stable=True)
    train_x, train_y = train_x[order], train_y[order]
    train_x, val_x = (train_x - 0.5) / 0.3, (val_x - 0.5) / 0.3
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def inplace_normalise_bad():
    torch.manual_seed(0)

    class DigitDataset(Dataset):
        def __init__(self, images, labels, mean=0.5, std=0.3):
            self.images, self.labels = images, labels
            self.mean, self.std = mean, std

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, idx):
            img = self.images[idx]
            img = img.sub_(self.mean).div_(self.std)
            return img, self.labels[idx]

    train_x, train_y = make_digits(320, 1)
    val_x, val_y = make_digits(400, 2)
    loader = endless(DataLoader(DigitDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))
    val_x = (val_x - 0.5) / 0.3
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def inplace_normalise_good():
    torch.manual_seed(0)

    class DigitDataset(Dataset):
        def __init__(self, images, labels, mean=0.5, std=0.3):
            self.images, self.labels = images, labels
            self.mean, self.std = mean, std

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, idx):
            img = self.images[idx]
            img = img.sub(self.mean).div(self.std)
            return img, self.labels[idx]

    train_x, train_y = make_digits(320, 1)
    val_x, val_y = make_digits(400, 2)
    loader = endless(DataLoader(DigitDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))
    val_x = (val_x - 0.5) / 0.3
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def custom_swish_backward_bad():
    torch.manual_seed(0)

    class SwishFn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return s * (1 + x * (1 - s))

    class Swish(nn.Module):
        def forward(self, x):
            return SwishFn.apply(x)

    train_x, train_y = make_digits(1280, 1)
    val_x, val_y = make_digits(400, 2)
    train_x, val_x = (train_x - 0.5) / 0.3, (val_x - 0.5) / 0.3
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), Swish(), nn.Linear(128, 64), Swish(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def custom_swish_backward_good():
    torch.manual_seed(0)

    class SwishFn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return grad_output * (s * (1 + x * (1 - s)))

    class Swish(nn.Module):
        def forward(self, x):
            return SwishFn.apply(x)

    train_x, train_y = make_digits(1280, 1)
    val_x, val_y = make_digits(400, 2)
    train_x, val_x = (train_x - 0.5) / 0.3, (val_x - 0.5) / 0.3
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, generator=make_gen(3)))
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 128), Swish(), nn.Linear(128, 64), Swish(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def gcn_unnormalised_bad():
    torch.manual_seed(0)
    g = make_gen(1)
    n, classes = 300, 4
    y = torch.randint(0, classes, (n,), generator=g)
    hub = 0.3 + 2.0 * torch.rand(n, generator=g) ** 3
    p = torch.where(y[:, None] == y[None, :], 0.25, 0.05) * hub[:, None] * hub[None, :]
    A = (torch.rand(n, n, generator=g) < p).float().triu(1)
    A = A + A.t() + torch.eye(n)
    centers = torch.randn(classes, 16, generator=g)
    X = 0.5 * centers[y] + torch.randn(n, 16, generator=g)
    perm = torch.randperm(n, generator=g)
    train_idx, val_idx = perm[:120], perm[120:]

    d = A.sum(1).pow(-0.5)
    A_hat = A

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin1 = nn.Linear(16, 32)
            self.lin2 = nn.Linear(32, 32)
            self.lin3 = nn.Linear(32, classes)

        def forward(self, x, adj):
            x = F.relu(adj @ self.lin1(x))
            x = F.relu(adj @ self.lin2(x))
            return adj @ self.lin3(x)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def step(i):
        optimizer.zero_grad()
        out = model(X, A_hat)
        loss = F.cross_entropy(out[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(X, A_hat)[val_idx], y[val_idx]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def gcn_unnormalised_good():
    torch.manual_seed(0)
    g = make_gen(1)
    n, classes = 300, 4
    y = torch.randint(0, classes, (n,), generator=g)
    hub = 0.3 + 2.0 * torch.rand(n, generator=g) ** 3
    p = torch.where(y[:, None] == y[None, :], 0.25, 0.05) * hub[:, None] * hub[None, :]
    A = (torch.rand(n, n, generator=g) < p).float().triu(1)
    A = A + A.t() + torch.eye(n)
    centers = torch.randn(classes, 16, generator=g)
    X = 0.5 * centers[y] + torch.randn(n, 16, generator=g)
    perm = torch.randperm(n, generator=g)
    train_idx, val_idx = perm[:120], perm[120:]

    d = A.sum(1).pow(-0.5)
    A_hat = d[:, None] * A * d[None, :]

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin1 = nn.Linear(16, 32)
            self.lin2 = nn.Linear(32, 32)
            self.lin3 = nn.Linear(32, classes)

        def forward(self, x, adj):
            x = F.relu(adj @ self.lin1(x))
            x = F.relu(adj @ self.lin2(x))
            return adj @ self.lin3(x)

    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def step(i):
        optimizer.zero_grad()
        out = model(X, A_hat)
        loss = F.cross_entropy(out[train_idx], y[train_idx])
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.cross_entropy(model(X, A_hat)[val_idx], y[val_idx]).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def padding_mask_inverted_bad():
    torch.manual_seed(0)

    def make_text(n, seed, max_len=20):
        g = make_gen(seed)
        y = torch.randint(0, 2, (n,), generator=g)
        tok = torch.randint(4, 40, (n, max_len), generator=g)
        cue = torch.rand(n, max_len, generator=g) < 0.3
        tok = torch.where(cue, 2 + y[:, None], tok)
        flip = torch.rand(n, max_len, generator=g) < 0.05
        tok = torch.where(flip, 3 - y[:, None], tok)
        length = torch.randint(8, max_len - 1, (n,), generator=g)
        tok[torch.arange(max_len)[None, :] >= length[:, None]] = 0
        tok[:, 0] = 1
        return tok, y

    train_x, train_y = make_text(2000, 1)
    val_x, val_y = make_text(400, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))

    class TextClassifier(nn.Module):
        def __init__(self, vocab=40, dim=32):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim, padding_idx=0)
            self.pos = nn.Parameter(0.02 * torch.randn(1, 20, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.fc = nn.Linear(dim, 2)

        def forward(self, tokens):
            mask = tokens != 0
            h = self.emb(tokens) + self.pos
            h = self.encoder(h, src_key_padding_mask=mask)
            return self.fc(h[:, 0])

    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def padding_mask_inverted_good():
    torch.manual_seed(0)

    def make_text(n, seed, max_len=20):
        g = make_gen(seed)
        y = torch.randint(0, 2, (n,), generator=g)
        tok = torch.randint(4, 40, (n, max_len), generator=g)
        cue = torch.rand(n, max_len, generator=g) < 0.3
        tok = torch.where(cue, 2 + y[:, None], tok)
        flip = torch.rand(n, max_len, generator=g) < 0.05
        tok = torch.where(flip, 3 - y[:, None], tok)
        length = torch.randint(8, max_len - 1, (n,), generator=g)
        tok[torch.arange(max_len)[None, :] >= length[:, None]] = 0
        tok[:, 0] = 1
        return tok, y

    train_x, train_y = make_text(2000, 1)
    val_x, val_y = make_text(400, 2)
    loader = endless(DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, generator=make_gen(3)))

    class TextClassifier(nn.Module):
        def __init__(self, vocab=40, dim=32):
            super().__init__()
            self.emb = nn.Embedding(vocab, dim, padding_idx=0)
            self.pos = nn.Parameter(0.02 * torch.randn(1, 20, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.fc = nn.Linear(dim, 2)

        def forward(self, tokens):
            mask = tokens == 0
            h = self.emb(tokens) + self.pos
            h = self.encoder(h, src_key_padding_mask=mask)
            return self.fc(h[:, 0])

    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step(i):
        x, y = next(loader)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        return error_rate(model, val_x, val_y)

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def rating_sigmoid_bad():
    torch.manual_seed(0)
    n_users, n_items = 100, 80
    g = make_gen(1)
    u_true = torch.randn(n_users, 3, generator=g)
    i_true = torch.randn(n_items, 3, generator=g)
    users = torch.randint(0, n_users, (6000,), generator=g)
    items = torch.randint(0, n_items, (6000,), generator=g)
    ratings = (3.2 + 0.8 * (u_true[users] * i_true[items]).sum(1)).round().clamp(1, 5)
    loader = endless(
        DataLoader(
            TensorDataset(users[:5000], items[:5000], ratings[:5000]),
            batch_size=128,
            shuffle=True,
            generator=make_gen(3),
        )
    )

    class MatrixFactorization(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, u, i):
            dot = (self.user(u) * self.item(i)).sum(1)
            score = dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)
            return torch.sigmoid(score)

    model = MatrixFactorization()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()

    def step(i):
        u, it, r = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(u, it), r)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(users[5000:], items[5000:]), ratings[5000:]).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def rating_sigmoid_good():
    torch.manual_seed(0)
    n_users, n_items = 100, 80
    g = make_gen(1)
    u_true = torch.randn(n_users, 3, generator=g)
    i_true = torch.randn(n_items, 3, generator=g)
    users = torch.randint(0, n_users, (6000,), generator=g)
    items = torch.randint(0, n_items, (6000,), generator=g)
    ratings = (3.2 + 0.8 * (u_true[users] * i_true[items]).sum(1)).round().clamp(1, 5)
    loader = endless(
        DataLoader(
            TensorDataset(users[:5000], items[:5000], ratings[:5000]),
            batch_size=128,
            shuffle=True,
            generator=make_gen(3),
        )
    )

    class MatrixFactorization(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.user = nn.Embedding(n_users, dim)
            self.item = nn.Embedding(n_items, dim)
            self.user_bias = nn.Embedding(n_users, 1)
            self.item_bias = nn.Embedding(n_items, 1)
            nn.init.normal_(self.user.weight, std=0.1)
            nn.init.normal_(self.item.weight, std=0.1)
            nn.init.zeros_(self.user_bias.weight)
            nn.init.zeros_(self.item_bias.weight)

        def forward(self, u, i):
            dot = (self.user(u) * self.item(i)).sum(1)
            score = dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)
            return 1 + 4 * torch.sigmoid(score)

    model = MatrixFactorization()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()

    def step(i):
        u, it, r = next(loader)
        optimizer.zero_grad()
        loss = criterion(model(u, it), r)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def probe():
        return F.mse_loss(model(users[5000:], items[5000:]), ratings[5000:]).sqrt().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


CASES = [
    {
        "name": "audio_nll",
        "what": "nn.NLLLoss is fed raw logits without log_softmax, so the loss falls below zero without bound by inflating all logits.",
    },
    {
        "name": "distill_kl",
        "what": "F.kl_div gets the student's probabilities where it wants log-probabilities, so the 'KL' goes negative and the student becomes overconfident instead of matching the teacher.",
    },
    {
        "name": "vae_kl",
        "what": "The minus sign of the VAE's KL term is missing, so training pushes the posterior away from the prior and the loss goes to minus infinity.",
    },
    {
        "name": "churn_one_logit",
        "what": "CrossEntropyLoss is used on a model with a single output and float labels of shape (N, 1): the softmax over one class is 1, the loss is always 0 and nothing is learned.",
    },
    {
        "name": "simclr_temperature",
        "what": "The cosine similarities are multiplied by the temperature instead of divided by it, so the InfoNCE logits are nearly equal and the loss stays at log(batch).",
    },
    {
        "name": "gan_generator_labels",
        "what": "The generator is trained with the 'fake' label for its own samples, so it helps the discriminator instead of fooling it and drifts away from the data.",
    },
    {
        "name": "reinforce_sign",
        "what": "The policy-gradient loss lacks its minus sign, so the policy is trained to make high-return actions less likely.",
    },
    {
        "name": "seg_loss_rewrapped",
        "what": "The loss is rebuilt with torch.tensor(loss.item(), requires_grad=True), which cuts it from the graph, so backward runs but no parameter gets a gradient.",
    },
    {
        "name": "warmup_per_epoch",
        "what": "A warm-up written in optimizer steps is stepped only once per epoch, so the learning rate stays at a few percent of its intended value.",
    },
    {
        "name": "diffusion_ema_rebind",
        "what": "The EMA update rebinds the loop variable instead of writing into the parameter, so the EMA network used for sampling stays at its initial weights.",
    },
    {
        "name": "amp_scaler_bypassed",
        "what": "The loss is scaled by the GradScaler but optimizer.step() is called directly, so SGD applies gradients multiplied by the loss scale.",
    },
    {
        "name": "rnn_clip_too_early",
        "what": "clip_grad_norm_ is called before backward (right after zero_grad), so it clips nothing and spikes in the series blow the recurrent net up.",
    },
    {
        "name": "multitask_loss_overwritten",
        "what": "In the loop over the tasks the loss is assigned instead of added, so only the last task's head is trained.",
    },
    {
        "name": "layers_in_python_list",
        "what": "The residual blocks are kept in a plain Python list, so they are not registered and the optimizer never sees them.",
    },
    {
        "name": "vqvae_no_straight_through",
        "what": "The quantised codes go to the decoder without the straight-through estimator, so the encoder gets no gradient from the reconstruction.",
    },
    {
        "name": "dropout_always_on",
        "what": "F.dropout is called without training=self.training, so dropout stays active in eval mode.",
    },
    {
        "name": "sorted_no_shuffle",
        "what": "The training set is stored class by class and the loader does not shuffle, so each batch holds one class and the net forgets the others.",
    },
    {
        "name": "inplace_normalise",
        "what": "The dataset normalises the stored image in place on every access, so the pictures are normalised again each epoch and their values grow without bound.",
    },
    {
        "name": "custom_swish_backward",
        "what": "The backward of a hand-written Swish returns the local derivative without multiplying by grad_output, so every layer below it gets a wrong gradient.",
    },
    {
        "name": "gcn_unnormalised",
        "what": "The GCN multiplies by the raw adjacency with self-loops instead of the degree-normalised one, so activations grow with the node degree at each layer.",
    },
    {
        "name": "padding_mask_inverted",
        "what": "src_key_padding_mask is True for the real tokens instead of for the padding, so attention sees nothing but padding.",
    },
    {
        "name": "rating_sigmoid",
        "what": "A matrix-factorisation model ends in a bare sigmoid while the ratings run from 1 to 5, so its output saturates at 1 and can never reach them.",
    },
]
