"""Twelve small training programs, each with one bug and a mended twin, by somebody who had not seen the checks.

See judge5.py. They are kept as they were written.
"""
# ruff: noqa: E501, B007, E731

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = 0


def seg_flip_image_only(fault, watch):
    torch.manual_seed(SEED)
    size = 24

    def make(n):
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        cx = torch.randint(4, size - 4, (n, 1, 1))
        cy = torch.randint(4, size - 4, (n, 1, 1))
        r = torch.randint(4, 7, (n, 1, 1))
        mask = (((xx - cx) ** 2 + (yy - cy) ** 2) <= r**2).float().unsqueeze(1)
        return 1.5 * mask + 0.7 * torch.randn(n, 1, size, size), mask

    def augment(img, mask):
        flip = torch.rand(len(img)) < 0.5
        img, mask = img.clone(), mask.clone()
        img[flip] = img[flip].flip(-1)
        if not fault:
            mask[flip] = mask[flip].flip(-1)
        return img, mask

    class SegNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
            )
            self.head = nn.Conv2d(16, 1, 1)

        def forward(self, x):
            return self.head(self.enc(x))

    images, masks = make(640)
    val_images, val_masks = make(128)
    loader = DataLoader(TensorDataset(images, masks), batch_size=32, shuffle=True)
    model = SegNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    model.train()
    with watch(model, optimizer):
        for img, mask in loader:
            img, mask = augment(img, mask)
            optimizer.zero_grad()
            loss = criterion(model(img), mask)
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        p = torch.sigmoid(model(val_images))
    return float(2 * (p * val_masks).sum() / (p.sum() + val_masks.sum()))


def tabular_constant_init(fault, watch):
    torch.manual_seed(SEED)
    centres = torch.randn(6, 10) * 1.2
    y = torch.randint(0, 6, (2500,))
    x = centres[y] + torch.randn(2500, 10)
    x = (x - x[:2000].mean(0)) / x[:2000].std(0)

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(10, 64)
            self.fc2 = nn.Linear(64, 64)
            self.out = nn.Linear(64, 6)

        def forward(self, x):
            return self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))

    def init_weights(m):
        if isinstance(m, nn.Linear):
            if fault:
                nn.init.constant_(m.weight, 0.05)
            else:
                nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)

    model = MLP()
    model.apply(init_weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(TensorDataset(x[:2000], y[:2000]), batch_size=80, shuffle=True)
    model.train()
    with watch(model, optimizer):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        return float((model(x[2000:]).argmax(1) == y[2000:]).float().mean())


def detection_boxes_in_pixels(fault, watch):
    torch.manual_seed(SEED)
    size = 32

    def make(n):
        images = 0.3 * torch.randn(n, 1, size, size)
        boxes = torch.zeros(n, 4)
        for i in range(n):
            w, h = torch.randint(8, 17, (2,)).tolist()
            x0 = int(torch.randint(0, size - w + 1, (1,)))
            y0 = int(torch.randint(0, size - h + 1, (1,)))
            images[i, 0, y0 : y0 + h, x0 : x0 + w] += 1.0
            boxes[i] = torch.tensor([x0 + w / 2, y0 + h / 2, w, h])  # cx, cy, w, h in pixels
        return images, boxes

    class BoxNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.BatchNorm2d(32),
                nn.ReLU(),
            )
            self.box = nn.Linear(32 * 8 * 8, 4)

        def forward(self, x):
            return torch.sigmoid(self.box(self.features(x).flatten(1)))  # fractions of the image

    images, boxes = make(768)
    val_images, val_boxes = make(128)
    loader = DataLoader(TensorDataset(images, boxes), batch_size=32, shuffle=True)
    model = BoxNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    with watch(model, optimizer):
        for img, box in loader:
            target = box if fault else box / size
            optimizer.zero_grad()
            loss = F.smooth_l1_loss(model(img), target)
            loss.backward()
            optimizer.step()

    def corners(b):
        return torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1)

    model.eval()
    with torch.no_grad():
        a, b = corners(model(val_images) * size), corners(val_boxes)
    wh = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0)
    inter = wh.prod(1)
    union = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1) - inter
    return float((inter / union).mean())


def gan_generator_fed_detached(fault, watch):
    torch.manual_seed(SEED)
    z_dim, batch = 8, 64

    def real_batch():
        angle = torch.randint(0, 8, (batch,)) * (2 * math.pi / 8)
        return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(batch, 2)

    g = nn.Sequential(nn.Linear(z_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    d = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)
    before = [p.detach().clone() for p in g.parameters()]

    with watch([g, d], [opt_g, opt_d]):
        for step in range(24):
            real = real_batch()
            z = torch.randn(batch, z_dim)
            fake = g(z).detach() if fault else g(z)

            # discriminator
            opt_d.zero_grad()
            loss_d = criterion(d(real), ones) + criterion(d(fake.detach()), zeros)
            loss_d.backward()
            opt_d.step()

            # generator
            opt_g.zero_grad()
            loss_g = criterion(d(fake), ones)
            loss_g.backward()
            opt_g.step()

    moved = [float((p.detach() != b).float().mean() > 0) for p, b in zip(g.parameters(), before)]
    return sum(moved) / len(moved)


def vae_sample_without_rsample(fault, watch):
    torch.manual_seed(SEED)
    latent = 4
    basis = torch.randn(latent, 64)

    def make(n):
        return torch.sigmoid(2.0 * torch.randn(n, latent) @ basis / 2)

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
            self.mu = nn.Linear(128, latent)
            self.logvar = nn.Linear(128, latent)
            self.dec = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64))

        def encode(self, x):
            h = self.enc(x - 0.5)
            return self.mu(h), self.logvar(h)

        def forward(self, x):
            mu, logvar = self.encode(x)
            q = torch.distributions.Normal(mu, torch.exp(0.5 * logvar))
            z = q.sample() if fault else q.rsample()
            return self.dec(z), mu, logvar

    data, val = make(1920), make(256)
    loader = DataLoader(TensorDataset(data), batch_size=64, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model.train()
    with watch(model, optimizer):
        for (x,) in loader:
            optimizer.zero_grad()
            logits, mu, logvar = model(x)
            rec = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
            kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
            loss = rec + kl
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        mu, _ = model.encode(val)
        return float(F.mse_loss(torch.sigmoid(model.dec(mu)), val))


def diffusion_target_is_other_noise(fault, watch):
    torch.manual_seed(SEED)
    steps_T = 50
    betas = torch.linspace(1e-3, 0.2, steps_T)
    alpha_bar = torch.cumprod(1 - betas, 0)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Embedding(steps_T, 32)
            self.inp = nn.Linear(2, 128)
            self.cond = nn.Linear(32, 128)
            self.mid = nn.Linear(128, 128)
            self.out = nn.Linear(128, 2)

        def forward(self, x, t):
            h = F.silu(self.inp(x) + self.cond(self.time(t)))
            return self.out(F.silu(self.mid(h)))

    def make(n):
        a = torch.rand(n) * 2 * math.pi
        return torch.stack([a.cos(), a.sin()], 1) * 1.4 + 0.05 * torch.randn(n, 2)

    data, val = make(3840), make(512)
    loader = DataLoader(TensorDataset(data), batch_size=128, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    with watch(model, optimizer):
        for (x0,) in loader:
            t = torch.randint(0, steps_T, (len(x0),))
            noise = torch.randn_like(x0)
            x_t = q_sample(x0, t) if fault else q_sample(x0, t, noise)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x_t, t), noise)
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        t = torch.randint(0, steps_T, (len(val),))
        noise = torch.randn_like(val)
        return float(F.mse_loss(model(q_sample(val, t, noise), t), noise))


def simclr_one_view_twice(fault, watch):
    torch.manual_seed(SEED)

    def make(n):
        return torch.randn(n, 1, 8, 8).repeat(1, 3, 1, 1)  # the pattern that matters

    def augment(x):  # strong colour jitter and noise
        tint = 1.5 * torch.randn(len(x), 3, 1, 1)
        shade = 1.5 * torch.randn(len(x), 3, 1, 8)
        return (x + tint + shade + 0.3 * torch.randn_like(x)) / 2

    class PairDataset(torch.utils.data.Dataset):
        def __init__(self, x):
            self.x = x

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            img = self.x[i : i + 1]
            v1 = augment(img)
            v2 = v1 if fault else augment(img)
            return v1[0], v2[0]

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 256), nn.BatchNorm1d(256), nn.ReLU())
            self.proj = nn.Linear(256, 64)

        def forward(self, x):
            return F.normalize(self.proj(self.body(x)), dim=1)

    def nt_xent(z1, z2, temperature=0.2):
        n = len(z1)
        z = torch.cat([z1, z2])
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(sim, (torch.arange(2 * n) + n) % (2 * n))

    loader = DataLoader(PairDataset(make(2560)), batch_size=128, shuffle=True)
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    with watch(model, optimizer):
        for v1, v2 in loader:
            optimizer.zero_grad()
            loss = nt_xent(model(v1), model(v2))
            loss.backward()
            optimizer.step()

    model.eval()
    val = make(128)
    with torch.no_grad():
        sim = model(augment(val)) @ model(augment(val)).t()
    return float((sim.argmax(1) == torch.arange(128)).float().mean())


def siamese_label_convention(fault, watch):
    torch.manual_seed(SEED)
    protos = torch.randn(10, 1, 12, 12)

    def make_pairs(n):
        a = torch.randint(0, 10, (n,))
        b = torch.where(torch.rand(n) < 0.5, a, (a + torch.randint(1, 10, (n,))) % 10)
        xa = protos[a] + 1.2 * torch.randn(n, 1, 12, 12)
        xb = protos[b] + 1.2 * torch.randn(n, 1, 12, 12)
        return xa, xb, a, b

    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 16))

        def forward(self, xa, xb):
            return F.pairwise_distance(self.embed(xa), self.embed(xb))

    def contrastive_loss(dist, same, margin=2.0):
        return (same * dist.pow(2) + (1 - same) * F.relu(margin - dist).pow(2)).mean()

    loader = DataLoader(TensorDataset(*make_pairs(1536)), batch_size=64, shuffle=True)
    model = Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    with watch(model, optimizer):
        for xa, xb, la, lb in loader:
            y = (la != lb).float() if fault else (la == lb).float()
            optimizer.zero_grad()
            loss = contrastive_loss(model(xa, xb), y)
            loss.backward()
            optimizer.step()

    model.eval()
    xa, xb, la, lb = make_pairs(600)
    with torch.no_grad():
        dist = model(xa, xb)
    pos, neg = dist[la == lb], dist[la != lb]
    return float((pos[:, None] < neg[None, :]).float().mean())  # AUC


def lstm_runs_over_the_batch(fault, watch):
    torch.manual_seed(SEED)

    def make(n, length=20):
        level = torch.randn(n, 1, 1)
        x = level + torch.randn(n, length, 1)
        return x, level.view(n, 1)

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(1, 32, batch_first=not fault)
            self.head = nn.Linear(32, 1)

        def forward(self, x):  # x: batch, time, feature
            out, _ = self.lstm(x)
            return self.head(out[:, -1])

    x, y = make(1920)
    vx, vy = make(256)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    model.train()
    with watch(model, optimizer):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        return float(1 - F.mse_loss(model(vx), vy) / vy.var())  # R2


def forecast_transformer_sees_future(fault, watch):
    torch.manual_seed(SEED)
    length, dim = 24, 32

    def make(n):
        phase, freq = 6.28 * torch.rand(n, 1), 0.3 + 0.5 * torch.rand(n, 1)
        t = torch.arange(length + 1).float()
        return (torch.sin(freq * t + phase) + 0.3 * torch.randn(n, length + 1)).unsqueeze(-1)

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(1, dim)
            self.pos = nn.Parameter(0.1 * torch.randn(1, length, dim))
            layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.out = nn.Linear(dim, 1)

        def forward(self, x):
            h = self.inp(x) + self.pos[:, : x.size(1)]
            if fault:
                h = self.encoder(h)
            else:
                mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
                h = self.encoder(h, mask=mask)
            return self.out(h)

    series = make(1600)
    loader = DataLoader(TensorDataset(series), batch_size=64, shuffle=True)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    with watch(model, optimizer):
        for (s,) in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(s[:, :-1]), s[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        x = make(64)[:, :-1]
        other = x.clone()
        other[:, 12:] = torch.randn_like(other[:, 12:])
        return float((model(x)[:, :12] - model(other)[:, :12]).abs().mean())


def gnn_layers_in_plain_list(fault, watch):
    torch.manual_seed(SEED)
    nodes = 12

    def make(n):
        y = torch.randint(0, 2, (n,))
        p = torch.where(y == 1, 0.35, 0.2).view(n, 1, 1)
        upper = torch.triu((torch.rand(n, nodes, nodes) < p).float(), 1)
        adj = upper + upper.transpose(1, 2) + torch.eye(nodes)
        return torch.randn(n, nodes, 8) * 0.5 + adj.sum(-1, keepdim=True) / 5, adj, y

    class GCNLayer(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.lin = nn.Linear(d_in, d_out)

        def forward(self, h, a):
            return F.relu(self.lin(a @ h / a.sum(-1, keepdim=True)))

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [GCNLayer(8, 32), GCNLayer(32, 32), GCNLayer(32, 32)]
            self.layers = layers if fault else nn.ModuleList(layers)
            self.readout = nn.Linear(32, 2)

        def forward(self, h, a):
            for layer in self.layers:
                h = layer(h, a)
            return self.readout(h.mean(1))

    loader = DataLoader(TensorDataset(*make(1280)), batch_size=64, shuffle=True)
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    weights = [layer.lin.weight for layer in model.layers] + [model.readout.weight]
    before = [w.detach().clone() for w in weights]
    model.train()
    with watch(model, optimizer):
        for feats, adj, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(feats, adj), y)
            loss.backward()
            optimizer.step()

    return sum(float(not torch.equal(w, b)) for w, b in zip(weights, before)) / len(weights)


def tcn_lambda_lr_absolute(fault, watch):
    torch.manual_seed(SEED)
    base_lr = 5e-3

    def make(n, length=40):
        phase, freq = 6.28 * torch.rand(n, 1), 0.2 + 0.4 * torch.rand(n, 1)
        s = torch.sin(freq * torch.arange(length + 1).float() + phase) + 0.1 * torch.randn(n, length + 1)
        return s[:, None, :-1], s[:, -1:]

    class Causal(nn.Module):
        def __init__(self, c_in, c_out, dilation):
            super().__init__()
            self.pad = 2 * dilation
            self.conv = nn.Conv1d(c_in, c_out, 3, dilation=dilation)

        def forward(self, x):
            return F.relu(self.conv(F.pad(x, (self.pad, 0))))

    class TCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(Causal(1, 24, 1), Causal(24, 24, 2), Causal(24, 24, 4))
            self.head = nn.Linear(24, 1)

        def forward(self, x):
            return self.head(self.body(x)[:, :, -1])

    x, y = make(1792)
    vx, vy = make(256)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    model = TCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=base_lr)
    if fault:
        decay = lambda step: base_lr * 0.97**step
    else:
        decay = lambda step: 0.97**step
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=decay)
    model.train()
    with watch(model, optimizer):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()
            scheduler.step()

    model.eval()
    with torch.no_grad():
        return float(F.mse_loss(model(vx), vy))


FAULTS = [
    dict(
        name="seg_flip_image_only",
        what="Segmentation augmentation flips the image at random but leaves its mask unflipped.",
        proof="Soft Dice on held-out images.",
        worse="lower",
    ),
    dict(
        name="tabular_constant_init",
        what="Every weight of the MLP is initialised to one constant, so all hidden units stay identical.",
        proof="Held-out accuracy over six classes.",
        worse="lower",
    ),
    dict(
        name="detection_boxes_in_pixels",
        what="The box head ends in a sigmoid (fractions of the image) but the box targets are left in pixels.",
        proof="Mean IoU on held-out images.",
        worse="lower",
    ),
    dict(
        name="gan_generator_fed_detached",
        what="The fake batch is detached once and reused in the generator's loss, so the generator gets no gradient.",
        proof="Share of the generator's parameter tensors that moved.",
        worse="lower",
    ),
    dict(
        name="vae_sample_without_rsample",
        what="The VAE draws z with Normal.sample() instead of rsample(), so the reconstruction loss never reaches the encoder.",
        proof="Held-out reconstruction error from the posterior mean.",
        worse="higher",
    ),
    dict(
        name="diffusion_target_is_other_noise",
        what="q_sample draws its own noise, while the loss compares the prediction with another noise tensor never added to x_t.",
        proof="Held-out error in predicting the noise that was added.",
        worse="higher",
    ),
    dict(
        name="simclr_one_view_twice",
        what="The dataset returns the same augmented view twice, so the positive pair is identical and no invariance is learnt.",
        proof="Top-1 retrieval between two views of held-out images.",
        worse="lower",
    ),
    dict(
        name="siamese_label_convention",
        what="The pair label is 1 for different while the contrastive loss takes 1 for same, so same pairs are pushed apart.",
        proof="Verification AUC on held-out pairs.",
        worse="lower",
    ),
    dict(
        name="lstm_runs_over_the_batch",
        what="The LSTM lacks batch_first=True, so with (batch, time, feature) input it recurs over the samples of the batch.",
        proof="Held-out R2.",
        worse="lower",
    ),
    dict(
        name="forecast_transformer_sees_future",
        what="The next-step forecasting transformer is trained without a causal mask, so each position sees its answer.",
        proof="Mean change of forecasts at t<12 when only inputs at t>=12 are changed.",
        worse="higher",
    ),
    dict(
        name="gnn_layers_in_plain_list",
        what="The graph layers are kept in a plain Python list instead of nn.ModuleList and are never trained.",
        proof="Share of the network's weight matrices that moved.",
        worse="lower",
    ),
    dict(
        name="tcn_lambda_lr_absolute",
        what="The LambdaLR function returns the absolute learning rate instead of a factor, so the rate is base_lr squared.",
        proof="Held-out forecast error.",
        worse="higher",
    ),
]
