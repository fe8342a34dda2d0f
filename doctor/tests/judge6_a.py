"""Sixteen small training programs, each with one bug and a mended twin, by somebody who had not seen the checks.

See judge6.py. They are kept as they were written.
"""
# ruff: noqa: E501, B007, E731, I001, E402, E741, B006, B023, C4, F401, F841, UP, SIM, RUF

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 0


# --------------------------------------------------------------------------- image classification
def glyph_cnn(fault, watch):
    torch.manual_seed(SEED)

    protos = F.interpolate(torch.randn(10, 1, 4, 4), size=16, mode="bilinear", align_corners=False)

    def sample(n):
        y = torch.randint(0, 10, (n,))
        x = protos[y] + 1.2 * torch.randn(n, 1, 16, 16)
        return x, y

    xtr, ytr = sample(1024)
    xte, yte = sample(512)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    class Net(nn.Module):
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
            )
            self.fc = nn.Linear(32 * 4 * 4, 10)

        def forward(self, x):
            out = self.fc(self.features(x).flatten(1))
            return F.softmax(out, dim=1) if fault else out

    model = Net()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=64, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(2):
            model.train()
            for xb, yb in loader:
                optimizer.zero_grad()
                loss = criterion(model(xb), yb)
                loss.backward()
                optimizer.step()

    model.eval()
    with torch.no_grad():
        return (model(xte).argmax(1) == yte).float().mean().item()


# --------------------------------------------------------------------------- segmentation
def lesion_segmentation(fault, watch):
    torch.manual_seed(SEED)

    grid = torch.linspace(-1, 1, 24)
    gy, gx = torch.meshgrid(grid, grid, indexing="ij")

    def sample(n):
        cx, cy = torch.rand(2, n, 1, 1) * 1.4 - 0.7
        r = 0.2 + 0.2 * torch.rand(n, 1, 1)
        mask = (((gx - cx) ** 2 + (gy - cy) ** 2) < r**2).float().unsqueeze(1)
        img = 1.5 * mask + 0.6 * torch.randn(n, 1, 24, 24)
        return img, mask

    xtr, mtr = sample(384)
    xte, mte = sample(128)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    def augment(img, mask):
        flip = torch.rand(len(img), 1, 1, 1) < 0.5
        img = torch.where(flip, img.flip(-1), img)
        if fault:
            flip = torch.rand(len(mask), 1, 1, 1) < 0.5
        mask = torch.where(flip, mask.flip(-1), mask)
        return img, mask

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc1 = self.block(1, 8)
            self.enc2 = self.block(8, 16)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.dec = self.block(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        @staticmethod
        def block(cin, cout):
            return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())

        def forward(self, x):
            e1 = self.enc1(x)
            e2 = self.enc2(F.max_pool2d(e1, 2))
            return self.out(self.dec(torch.cat([self.up(e2), e1], dim=1)))

    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(xtr, mtr), batch_size=32, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(4):
            model.train()
            for img, mask in loader:
                img, mask = augment(img, mask)
                loss = F.binary_cross_entropy_with_logits(model(img), mask)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    model.eval()
    with torch.no_grad():
        pred = (model(xte) > 0).float()
    inter = (pred * mte).sum()
    return (2 * inter / (pred.sum() + mte.sum() + 1e-6)).item()


# --------------------------------------------------------------------------- detection
def box_detector(fault, watch):
    torch.manual_seed(SEED)

    pix = (torch.arange(20) + 0.5) / 20

    def sample(n):
        wh = 0.25 + 0.3 * torch.rand(n, 2)
        c = wh / 2 + torch.rand(n, 2) * (1 - wh)
        inx = ((pix[None] - c[:, :1]).abs() < wh[:, :1] / 2).float()
        iny = ((pix[None] - c[:, 1:]).abs() < wh[:, 1:] / 2).float()
        cls = torch.randint(0, 2, (n,))
        stripes = 1.0 - (torch.arange(20) % 2).float() * 1.2
        texture = torch.where(cls[:, None, None] == 1, stripes.expand(20, 20), torch.ones(20, 20))
        img = iny[:, :, None] * inx[:, None, :] * texture + 0.2 * torch.randn(n, 20, 20)
        return img.unsqueeze(1), torch.cat([c, wh], 1), cls

    xtr, btr, ctr = sample(512)
    xte, bte, cte = sample(256)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(1, 12, 3, padding=1, bias=False),
                nn.BatchNorm2d(12),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(12, 24, 3, padding=1, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(24 * 25, 64),
                nn.SiLU(),
            )
            self.box = nn.Linear(64, 4)
            self.cls = nn.Linear(64, 2)

        def forward(self, x):
            h = self.backbone(x)
            return self.box(h).sigmoid(), self.cls(h)

    def iou(a, b):
        lo = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
        hi = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
        inter = (hi - lo).clamp_min(0).prod(1)
        return inter / (a[:, 2:].prod(1) + b[:, 2:].prod(1) - inter)

    model = Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)
    loader = DataLoader(TensorDataset(xtr, btr, ctr), batch_size=32, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(6):
            model.train()
            for img, box, cls in loader:
                pbox, pcls = model(img)
                loss = 5 * F.l1_loss(pbox, box) + F.cross_entropy(pcls, cls)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if fault:
                    scheduler.step()
            if not fault:
                scheduler.step()

    model.eval()
    with torch.no_grad():
        pbox, _ = model(xte)
    return iou(pbox, bte).mean().item()


# --------------------------------------------------------------------------- tabular regression
def house_prices(fault, watch):
    torch.manual_seed(SEED)

    x = torch.randn(1200, 8)
    w = torch.randn(8)
    price = 200 + 40 * (x @ w) + 30 * torch.sin(2 * x[:, 0]) * x[:, 1] + 10 * torch.randn(1200)
    xtr, xte = x[:900], x[900:]
    ytr, yte = price[:900], price[900:]
    mu, sd = xtr.mean(0), xtr.std(0)
    xtr, xte = (xtr - mu) / sd, (xte - mu) / sd
    ymu, ysd = ytr.mean(), ytr.std()
    ytr, yte = (ytr - ymu) / ysd, (yte - ymu) / ysd

    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=50, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(8):
            for xb, yb in loader:
                pred = model(xb) if fault else model(xb).squeeze(1)
                loss = ((pred - yb) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        err = ((model(xte).squeeze(1) - yte) ** 2).mean()
    return (1 - err / yte.var()).item()


# --------------------------------------------------------------------------- time series
def load_forecast(fault, watch):
    torch.manual_seed(SEED)

    n, window, split = 1600, 24, 1176
    t = torch.arange(n).float()
    series = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 7)
    series = series * (1 + 0.3 * torch.sin(2 * math.pi * t / 168)) + 0.1 * torch.randn(n)
    series = (series - series[:split].mean()) / series[:split].std()
    wins = series.unfold(0, window + 1, 1)
    xtr, ytr = wins[: split - window, :window], wins[: split - window, window]
    xte, yte = wins[split:, :window], wins[split:, window]

    model = nn.Sequential(nn.Linear(window, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=16, shuffle=True)
    accum = 8

    with watch(model, optimizer):
        for epoch in range(10):
            for i, (xb, yb) in enumerate(loader):
                loss = F.smooth_l1_loss(model(xb).squeeze(1), yb)
                if not fault:
                    loss = loss / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    with torch.no_grad():
        return (model(xte).squeeze(1) - yte).abs().mean().item()


# --------------------------------------------------------------------------- audio
def keyword_audio(fault, watch):
    torch.manual_seed(SEED)

    length = 1024
    t = torch.linspace(0, 1, length)

    def sample(n):
        y = torch.randint(0, 4, (n,))
        f0 = 80 + 200 * torch.rand(n, 1)
        span = 70 + 50 * torch.rand(n, 1)
        phase = 2 * math.pi * torch.rand(n, 1)
        up = f0 * t + span * t**2 / 2
        down = f0 * t + span * (t - t**2 / 2)
        flat = f0 * t + span * t / 2
        wob = f0 * t + span * t / 2 + span * torch.sin(4 * math.pi * t) / (8 * math.pi)
        cycles = torch.stack([up, down, flat, wob], 1)[torch.arange(n), y]
        wave = torch.sin(2 * math.pi * cycles + phase) + 0.3 * torch.randn(n, length)
        spec = torch.stft(wave, 64, hop_length=24, window=torch.hann_window(64), return_complex=True)
        return (spec.abs() + 1e-3).log(), y

    xtr, ytr = sample(768)
    xte, yte = sample(384)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    class KeywordNet(nn.Module):
        def __init__(self, n_bins):
            super().__init__()
            self.proj = nn.Linear(n_bins, 32)
            self.gru = nn.GRU(32, 32, batch_first=True)
            self.fc = nn.Linear(32, 4)

        def forward(self, spec):
            b, f, frames = spec.shape
            x = spec.reshape(b, frames, f) if fault else spec.transpose(1, 2)
            x = torch.tanh(self.proj(x))
            _, h = self.gru(x)
            return self.fc(h[-1])

    model = KeywordNet(xtr.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(6):
            for xb, yb in loader:
                loss = F.cross_entropy(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        return (model(xte).argmax(1) == yte).float().mean().item()


# --------------------------------------------------------------------------- GAN
def ring_gan(fault, watch):
    torch.manual_seed(SEED)

    def real_batch(n):
        a = 2 * math.pi * torch.rand(n)
        pts = torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2)
        return pts * 1.4

    def energy(a, b):
        return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()

    gen = nn.Sequential(nn.Linear(4, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))
    disc = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    batch = 128
    ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)

    with watch([gen, disc], [opt_g, opt_d]):
        for step in range(250):
            real = real_batch(batch)
            fake = gen(torch.randn(batch, 4))
            if fault:
                fake = fake.detach()

            d_loss = bce(disc(real), ones) + bce(disc(fake.detach()), zeros)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()

            g_loss = bce(disc(fake), ones)
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()

    with torch.no_grad():
        return energy(gen(torch.randn(600, 4)), real_batch(600))


# --------------------------------------------------------------------------- VAE
def blob_vae(fault, watch):
    torch.manual_seed(SEED)

    grid = torch.linspace(-1, 1, 12)
    gy, gx = torch.meshgrid(grid, grid, indexing="ij")

    def sample(n):
        cx, cy = torch.rand(2, n, 1, 1) * 1.2 - 0.6
        r = 0.25 + 0.25 * torch.rand(n, 1, 1)
        return torch.exp(-((gx - cx) ** 2 + (gy - cy) ** 2) / (2 * r**2)).flatten(1)

    xtr, xte = sample(768), sample(256)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(144, 96), nn.SiLU())
            self.mu = nn.Linear(96, 6)
            self.logvar = nn.Linear(96, 6)
            self.dec = nn.Sequential(nn.Linear(6, 96), nn.SiLU(), nn.Linear(96, 144))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return self.dec(z), mu, logvar

    def elbo(logits, x, mu, logvar):
        if fault:
            recon = F.binary_cross_entropy_with_logits(logits, x)
        else:
            recon = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return recon + kl

    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(xtr), batch_size=64, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(15):
            for (xb,) in loader:
                logits, mu, logvar = model(xb)
                loss = elbo(logits, xb, mu, logvar)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        h = model.enc(xte)
        return F.mse_loss(model.dec(model.mu(h)).sigmoid(), xte).item()


# --------------------------------------------------------------------------- diffusion
def point_diffusion(fault, watch):
    torch.manual_seed(SEED)

    def data(n):
        side = torch.randint(0, 2, (n,)).float() * 2 - 1
        along = torch.randn(n)
        return torch.stack([side + 0.1 * along, 0.7 * side + 0.7 * along], 1)

    def energy(a, b):
        return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()

    steps = 60
    betas = torch.linspace(1e-3, 0.15, steps)
    alphas = 1 - betas
    alphas_cumprod = torch.cumprod(alphas, 0)
    freqs = 2.0 ** torch.arange(4)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2 + 8, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

        def forward(self, x, t):
            ang = (t.float() / steps)[:, None] * freqs
            return self.net(torch.cat([x, ang.sin(), ang.cos()], 1))

    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    with watch(model, optimizer):
        for it in range(500):
            x0 = data(128)
            t = torch.randint(0, steps, (128,))
            noise = torch.randn_like(x0)
            a = (alphas if fault else alphas_cumprod)[t][:, None]
            xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
            loss = F.mse_loss(model(xt, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        x = torch.randn(500, 2)
        for i in reversed(range(steps)):
            eps = model(x, torch.full((500,), i))
            x = (x - betas[i] / (1 - alphas_cumprod[i]).sqrt() * eps) / alphas[i].sqrt()
            if i > 0:
                x = x + betas[i].sqrt() * torch.randn_like(x)
        return energy(x, data(500))


# --------------------------------------------------------------------------- graph network
def citation_gnn(fault, watch):
    torch.manual_seed(SEED)

    n, classes = 400, 4
    y = torch.randint(0, classes, (n,))
    same = (y[:, None] == y[None]).float()
    prob = 0.06 * same + 0.006 * (1 - same)
    upper = torch.triu(torch.rand(n, n) < prob, diagonal=1)
    src, dst = upper.nonzero().t()
    src, dst = torch.cat([src, dst]), torch.cat([dst, src])
    deg = torch.bincount(dst, minlength=n).clamp_min(1).float().unsqueeze(1)
    x = torch.randn(classes, 16)[y] * 0.35 + torch.randn(n, 16)
    x = (x - x.mean(0)) / x.std(0)
    perm = torch.randperm(n)
    train_idx, test_idx = perm[:120], perm[120:]

    class SageConv(nn.Module):
        def __init__(self, din, dout):
            super().__init__()
            self.lin_self = nn.Linear(din, dout)
            self.lin_neigh = nn.Linear(din, dout, bias=False)

        def forward(self, h):
            agg = torch.zeros_like(h)
            if fault:
                agg[dst] += h[src]
            else:
                agg.index_add_(0, dst, h[src])
            return self.lin_self(h) + self.lin_neigh(agg / deg)

    class GraphSage(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = SageConv(16, 32)
            self.conv2 = SageConv(32, classes)

        def forward(self, h):
            return self.conv2(F.dropout(F.elu(self.conv1(h)), 0.3, self.training))

    model = GraphSage()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-3)

    with watch(model, optimizer):
        for epoch in range(40):
            model.train()
            loss = F.cross_entropy(model(x)[train_idx], y[train_idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        return (model(x)[test_idx].argmax(1) == y[test_idx]).float().mean().item()


# --------------------------------------------------------------------------- sensor sequences
def machine_wear(fault, watch):
    torch.manual_seed(SEED)

    def sample(n):
        x = torch.randn(n, 20, 3)
        x[:, :, 0] += torch.randn(n, 1)
        wear = x[:, :, 0].mean(1) + 0.8 * (x[:, :, 1] * x[:, :, 2]).mean(1)
        return x, wear

    xtr, ytr = sample(768)
    xte, yte = sample(256)
    mu, sd = xtr.mean((0, 1)), xtr.std((0, 1))
    xtr, xte = (xtr - mu) / sd, (xte - mu) / sd
    ymu, ysd = ytr.mean(), ytr.std()
    ytr, yte = (ytr - ymu) / ysd, (yte - ymu) / ysd

    class WearLSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 32, batch_first=not fault)
            self.head = nn.Linear(32, 1)

        def forward(self, x):
            out, _ = self.lstm(x)
            return self.head(out[:, -1]).squeeze(1)

    model = WearLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True)

    with watch(model, optimizer):
        for epoch in range(5):
            for xb, yb in loader:
                loss = F.mse_loss(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with torch.no_grad():
        return F.mse_loss(model(xte), yte).item()


# --------------------------------------------------------------------------- seq2seq
def reverse_seq2seq(fault, watch):
    torch.manual_seed(SEED)

    vocab, bos, length = 8, 8, 4

    def sample(n):
        s = torch.randint(0, vocab, (n, length))
        return s, s.flip(1)

    class Seq2Seq(nn.Module):
        def __init__(self):
            super().__init__()
            self.src_emb = nn.Embedding(vocab, 24)
            self.tgt_emb = nn.Embedding(vocab + 1, 24)
            self.encoder = nn.GRU(24, 64, batch_first=True)
            self.decoder = nn.GRU(24, 64, batch_first=True)
            self.out = nn.Linear(64, vocab)

        def forward(self, src, dec_in):
            _, h = self.encoder(self.src_emb(src))
            out, _ = self.decoder(self.tgt_emb(dec_in), h)
            return self.out(out)

        @torch.no_grad()
        def greedy(self, src):
            _, h = self.encoder(self.src_emb(src))
            tok = torch.full((len(src), 1), bos)
            result = []
            for _ in range(length):
                out, h = self.decoder(self.tgt_emb(tok), h)
                tok = self.out(out).argmax(-1)
                result.append(tok)
            return torch.cat(result, 1)

    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    with watch(model, optimizer):
        for step in range(200):
            src, tgt = sample(64)
            if fault:
                dec_in = tgt
            else:
                dec_in = torch.cat([torch.full((len(tgt), 1), bos), tgt[:, :-1]], 1)
            logits = model(src, dec_in)
            loss = F.cross_entropy(logits.flatten(0, 1), tgt.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    src, tgt = sample(300)
    return (model.greedy(src) == tgt).float().mean().item()


# --------------------------------------------------------------------------- self-supervised
def simclr_patches(fault, watch):
    torch.manual_seed(SEED)

    protos = F.interpolate(torch.randn(6, 1, 4, 4), size=12, mode="bilinear", align_corners=False)

    def sample(n):
        y = torch.randint(0, 6, (n,))
        light = F.interpolate(torch.randn(n, 1, 2, 2), size=12, mode="bilinear", align_corners=True)
        return protos[y] + 2.0 * light + 0.3 * torch.randn(n, 1, 12, 12), y

    def augment(x):
        light = F.interpolate(torch.randn(len(x), 1, 2, 2), size=12, mode="bilinear", align_corners=True)
        gain = 0.7 + 0.6 * torch.rand(len(x), 1, 1, 1)
        return gain * x + 1.2 * light + 0.2 * torch.randn_like(x)

    xtr, ytr = sample(768)
    xte, yte = sample(384)
    mean, std = xtr.mean(), xtr.std()
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 9, 24),
    )
    projector = nn.Sequential(nn.SiLU(), nn.Linear(24, 24))
    model = nn.Sequential(encoder, projector)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def nt_xent(z1, z2, temperature=0.3):
        n = len(z1)
        z = F.normalize(torch.cat([z1, z2]), dim=1)
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(sim, target)

    loader = DataLoader(TensorDataset(xtr), batch_size=96, shuffle=True)
    with watch(model, optimizer):
        for epoch in range(8):
            model.train()
            for (xb,) in loader:
                v1 = augment(xb)
                v2 = v1 if fault else augment(xb)
                loss = nt_xent(model(v1), model(v2))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    model.eval()
    with torch.no_grad():
        ztr = F.normalize(encoder(xtr), dim=1)
        zte = F.normalize(encoder(xte), dim=1)
        nearest = (zte @ ztr.t()).topk(5, dim=1).indices
        votes = F.one_hot(ytr[nearest], 6).sum(1).argmax(1)
        return (votes == yte).float().mean().item()


# --------------------------------------------------------------------------- metric learning
def triplet_retrieval(fault, watch):
    torch.manual_seed(SEED)

    centers = torch.randn(8, 6)
    mix = torch.randn(6, 30) / 6**0.5
    nuisance = torch.randn(10, 30)

    def sample(n):
        y = torch.randint(0, 8, (n,))
        x = (centers[y] + 0.3 * torch.randn(n, 6)) @ mix + 0.5 * torch.randn(n, 10) @ nuisance
        return x, y

    xtr, ytr = sample(800)
    xte, yte = sample(400)
    mu, sd = xtr.mean(0), xtr.std(0)
    xtr, xte = (xtr - mu) / sd, (xte - mu) / sd
    by_class = [(ytr == c).nonzero().squeeze(1) for c in range(8)]

    model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.TripletMarginLoss(margin=0.5)

    def embed(x):
        return F.normalize(model(x), dim=1)

    def pick(labels):
        return torch.stack([by_class[c][torch.randint(len(by_class[c]), ())] for c in labels.tolist()])

    with watch(model, optimizer):
        for step in range(100):
            a = torch.randint(0, 800, (64,))
            p = pick(ytr[a])
            n = pick((ytr[a] + torch.randint(1, 8, (64,))) % 8)
            anchor, pos, neg = embed(xtr[a]), embed(xtr[p]), embed(xtr[n])
            loss = criterion(anchor, neg, pos) if fault else criterion(anchor, pos, neg)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        nn_idx = (embed(xte) @ embed(xtr).t()).argmax(1)
        return (ytr[nn_idx] == yte).float().mean().item()


# --------------------------------------------------------------------------- actor-critic
def actor_critic_tracker(fault, watch):
    torch.manual_seed(SEED)

    horizon, gamma, envs = 12, 0.9, 32
    moves = torch.tensor([-0.25, 0.0, 0.25])

    actor = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 3))
    critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=5e-3)

    def rollout(n):
        pos, goal = torch.rand(2, n) * 2 - 1
        obs, acts, rewards = [], [], []
        for k in range(horizon):
            o = torch.stack([pos, goal, torch.full((n,), 1 - 2 * k / horizon)], 1)
            with torch.no_grad():
                a = torch.distributions.Categorical(logits=actor(o)).sample()
            pos = (pos + moves[a] + 0.05 * torch.randn(n)).clamp(-1.5, 1.5)
            obs.append(o)
            acts.append(a)
            rewards.append(0.5 - (pos - goal).abs())
        ret, returns = torch.zeros(n), []
        for r in reversed(rewards):
            ret = r + gamma * ret
            returns.insert(0, ret)
        return torch.cat(obs), torch.cat(acts), torch.cat(returns)

    with watch([actor, critic], optimizer):
        for it in range(150):
            obs, acts, returns = rollout(envs)
            dist = torch.distributions.Categorical(logits=actor(obs))
            value = critic(obs).squeeze(1)
            advantage = returns - value
            value_loss = advantage.pow(2).mean()
            weight = advantage if fault else advantage.detach()
            policy_loss = -(dist.log_prob(acts) * weight).mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        obs, _, returns = rollout(500)
        return F.mse_loss(critic(obs).squeeze(1), returns).item()


# --------------------------------------------------------------------------- DQN
def dqn_docking(fault, watch):
    torch.manual_seed(SEED)

    gamma, envs = 0.9, 32
    thrust = torch.tensor([-0.2, 0.0, 0.2])

    q_net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))
    target_net = copy.deepcopy(q_net).requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)

    def reset(n):
        return torch.rand(n, 2) * 3 - 1.5

    def env_step(s, a):
        nxt = s.clone()
        nxt[:, 0] = (s[:, 0] + thrust[a] + 0.02 * torch.randn(len(s))).clamp(-2, 2)
        done = (nxt[:, 0] - nxt[:, 1]).abs() < 0.2
        return nxt, done.float(), done

    buffer = []
    state = reset(envs)

    def collect(state, eps):
        with torch.no_grad():
            a = q_net(state).argmax(1)
        a = torch.where(torch.rand(envs) < eps, torch.randint(0, 3, (envs,)), a)
        nxt, r, done = env_step(state, a)
        buffer.append((state, a, r, nxt, done.float()))
        return torch.where(done[:, None], reset(envs), nxt)

    for _ in range(40):
        state = collect(state, 1.0)

    with watch(q_net, optimizer):
        for step in range(400):
            state = collect(state, max(0.1, 1.0 - step / 200))
            picks = torch.randint(0, len(buffer), (4,)).tolist()
            s, a, r, s2, done = (torch.cat(part) for part in zip(*[buffer[i] for i in picks]))
            with torch.no_grad():
                best = target_net(s2).max(1).values
                target = r + gamma * best if fault else r + gamma * (1 - done) * best
            q = q_net(s).gather(1, a[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(q, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                target_net.load_state_dict(q_net.state_dict())

    with torch.no_grad():
        s = reset(256)
        value = q_net(s).max(1).values
        ret, alive = torch.zeros(256), torch.ones(256)
        for k in range(40):
            s, r, done = env_step(s, q_net(s).argmax(1))
            ret += alive * gamma**k * r
            alive = alive * (1 - done.float())
        return (value - ret).abs().mean().item()


FAULTS = [
    dict(
        name="glyph_cnn",
        what="the model ends in a softmax although CrossEntropyLoss applies one itself",
        proof="held-out accuracy",
        worse="lower",
    ),
    dict(
        name="lesion_segmentation",
        what="the random flip of the mask is drawn apart from the flip of its image",
        proof="held-out Dice",
        worse="lower",
    ),
    dict(
        name="box_detector",
        what="an epoch-wise StepLR is stepped after every batch, so the rate is gone after a few steps",
        proof="held-out mean IoU",
        worse="lower",
    ),
    dict(
        name="house_prices",
        what="(N,1) predictions minus (N,) targets broadcast to an N by N loss",
        proof="held-out R2",
        worse="lower",
    ),
    dict(
        name="load_forecast",
        what="the loss is not divided by the number of accumulated micro-batches, so the step is eight times too long",
        proof="held-out mean absolute error",
        worse="higher",
    ),
    dict(
        name="keyword_audio",
        what="spectrogram axes are swapped with reshape instead of transpose",
        proof="held-out accuracy",
        worse="lower",
    ),
    dict(
        name="ring_gan",
        what="the fake batch is detached for the generator's own step too, so the generator gets no gradient",
        proof="energy distance of samples to data",
        worse="higher",
    ),
    dict(
        name="blob_vae",
        what="the reconstruction term is a mean over pixels while KL is a sum over latents, so the posterior collapses",
        proof="held-out reconstruction MSE",
        worse="higher",
    ),
    dict(
        name="point_diffusion",
        what="the forward noising uses alphas[t] instead of their cumulative product",
        proof="energy distance of samples to data",
        worse="higher",
    ),
    dict(
        name="citation_gnn",
        what="neighbours are summed with agg[dst] += h[src], which keeps only one edge of repeated indices",
        proof="held-out node accuracy",
        worse="lower",
    ),
    dict(
        name="machine_wear",
        what="the LSTM gets (batch, time, feature) input without batch_first",
        proof="held-out MSE",
        worse="higher",
    ),
    dict(
        name="reverse_seq2seq",
        what="the decoder is fed the unshifted target, so it copies its input",
        proof="token accuracy of greedy decoding",
        worse="lower",
    ),
    dict(
        name="simclr_patches",
        what="both views of the contrastive pair are the same augmented tensor",
        proof="k-nearest-neighbour accuracy of the embedding",
        worse="lower",
    ),
    dict(
        name="triplet_retrieval",
        what="positive and negative are swapped in the call of the triplet loss",
        proof="held-out nearest-neighbour accuracy",
        worse="lower",
    ),
    dict(
        name="actor_critic_tracker",
        what="the advantage is not detached in the policy loss, so the policy term trains the critic",
        proof="MSE of the critic on fresh returns",
        worse="higher",
    ),
    dict(
        name="dqn_docking",
        what="the bootstrapped target is not masked where the episode ended",
        proof="mean error of the predicted value against the discounted return really earned",
        worse="higher",
    ),
]
