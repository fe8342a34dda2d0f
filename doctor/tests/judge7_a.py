"""Twenty small training programs, outside language models, each with one bug and a mended twin, by somebody who had not seen the checks.

See judge7.py. They are kept as they were written.
"""
# ruff: noqa: E501, B007, B905, E731, I001, E402, E741, B006, B023, C4, F401, F841, UP, SIM, RUF

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def ring(n, gen, modes=4, r=2.0):
    k = torch.randint(0, modes, (n,), generator=gen)
    ang = k.float() * (2 * math.pi / modes)
    return torch.stack([ang.cos(), ang.sin()], 1) * r + 0.1 * torch.randn(n, 2, generator=gen)


def wgan_gp_bad():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    gen = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def gradient_penalty(real, fake):
        eps = torch.rand(real.size(0), 1)
        mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
        score = critic(mix)
        grad = torch.autograd.grad(score.sum(), mix, retain_graph=True)[0]
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(2):
            real = ring(64, g)
            fake = gen(torch.randn(64, 4)).detach()
            d_loss = critic(fake).mean() - critic(real).mean() + 10.0 * gradient_penalty(real, fake)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
        g_loss = -critic(gen(torch.randn(64, 4))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        return d_loss.item()

    def probe():
        x = ring(256, torch.Generator().manual_seed(9)).requires_grad_(True)
        gr = torch.autograd.grad(critic(x).sum(), x)[0]
        return (gr.norm(dim=1) - 1).abs().mean().item()

    return {
        "model": {"generator": gen, "critic": critic},
        "optimizer": [opt_g, opt_d],
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def wgan_gp_good():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    gen = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def gradient_penalty(real, fake):
        eps = torch.rand(real.size(0), 1)
        mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
        score = critic(mix)
        grad = torch.autograd.grad(score.sum(), mix, create_graph=True)[0]
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(2):
            real = ring(64, g)
            fake = gen(torch.randn(64, 4)).detach()
            d_loss = critic(fake).mean() - critic(real).mean() + 10.0 * gradient_penalty(real, fake)
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
        g_loss = -critic(gen(torch.randn(64, 4))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        return d_loss.item()

    def probe():
        x = ring(256, torch.Generator().manual_seed(9)).requires_grad_(True)
        gr = torch.autograd.grad(critic(x).sum(), x)[0]
        return (gr.norm(dim=1) - 1).abs().mean().item()

    return {
        "model": {"generator": gen, "critic": critic},
        "optimizer": [opt_g, opt_d],
        "step": step,
        "steps": 20,
        "probe": probe,
    }


def vae_kl_batch_sum_bad():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, d=48, z=4):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(d, 64), nn.ReLU())
            self.mu, self.logvar = nn.Linear(64, z), nn.Linear(64, z)
            self.dec = nn.Sequential(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, d))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.dec(z), mu, logvar

    basis = torch.randn(4, 48)
    train = torch.randn(1024, 4) @ basis / 2 + 0.1 * torch.randn(1024, 48)
    held = torch.randn(256, 4) @ basis / 2 + 0.1 * torch.randn(256, 48)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x = train[torch.randint(0, 1024, (64,))]
        recon, mu, logvar = model(x)
        rec = F.mse_loss(recon, x, reduction="sum") / x.size(0)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = rec + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            h = model.enc(held)
            return F.mse_loss(model.dec(model.mu(h)), held).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def vae_kl_batch_sum_good():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, d=48, z=4):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(d, 64), nn.ReLU())
            self.mu, self.logvar = nn.Linear(64, z), nn.Linear(64, z)
            self.dec = nn.Sequential(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, d))

        def forward(self, x):
            h = self.enc(x)
            mu, logvar = self.mu(h), self.logvar(h)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            return self.dec(z), mu, logvar

    basis = torch.randn(4, 48)
    train = torch.randn(1024, 4) @ basis / 2 + 0.1 * torch.randn(1024, 48)
    held = torch.randn(256, 4) @ basis / 2 + 0.1 * torch.randn(256, 48)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x = train[torch.randint(0, 1024, (64,))]
        recon, mu, logvar = model(x)
        rec = F.mse_loss(recon, x, reduction="sum") / x.size(0)
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
        loss = rec + kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            h = model.enc(held)
            return F.mse_loss(model.dec(model.mu(h)), held).item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def vqvae_straight_through_bad():
    torch.manual_seed(0)

    class VQ(nn.Module):
        def __init__(self, k=32, d=4):
            super().__init__()
            self.codebook = nn.Embedding(k, d)
            nn.init.normal_(self.codebook.weight)

        def forward(self, z):
            idx = torch.cdist(z, self.codebook.weight).argmin(1)
            q = self.codebook(idx)
            commit = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
            q = q.detach()
            return q, commit

    class VQVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
            self.vq = VQ()
            self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 20))

        def forward(self, x):
            q, commit = self.vq(self.encoder(x))
            return self.decoder(q), commit

    centres = torch.randn(16, 20)

    def batch(n, gen):
        k = torch.randint(0, 16, (n,), generator=gen)
        noise = torch.randn(n, 20, generator=gen)
        return centres[k] + 0.3 * noise

    tr = torch.Generator().manual_seed(1)
    net = VQVAE()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(i):
        x = batch(128, tr)
        rec, commit = net(x)
        loss = F.mse_loss(rec, x) + commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x = batch(512, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.mse_loss(net(x)[0], x).item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def vqvae_straight_through_good():
    torch.manual_seed(0)

    class VQ(nn.Module):
        def __init__(self, k=32, d=4):
            super().__init__()
            self.codebook = nn.Embedding(k, d)
            nn.init.normal_(self.codebook.weight)

        def forward(self, z):
            idx = torch.cdist(z, self.codebook.weight).argmin(1)
            q = self.codebook(idx)
            commit = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
            q = z + (q - z).detach()
            return q, commit

    class VQVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
            self.vq = VQ()
            self.decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 20))

        def forward(self, x):
            q, commit = self.vq(self.encoder(x))
            return self.decoder(q), commit

    centres = torch.randn(16, 20)

    def batch(n, gen):
        k = torch.randint(0, 16, (n,), generator=gen)
        noise = torch.randn(n, 20, generator=gen)
        return centres[k] + 0.3 * noise

    tr = torch.Generator().manual_seed(1)
    net = VQVAE()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)

    def step(i):
        x = batch(128, tr)
        rec, commit = net(x)
        loss = F.mse_loss(rec, x) + commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x = batch(512, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.mse_loss(net(x)[0], x).item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def diffusion_target_noise_bad():
    torch.manual_seed(0)

    class Diffusion:
        def __init__(self, T=50):
            betas = torch.linspace(1e-3, 0.12, T)
            self.T = T
            self.abar = torch.cumprod(1 - betas, 0)

        def q_sample(self, x0, t, noise=None):
            if noise is None:
                noise = torch.randn_like(x0)
            a = self.abar[t][:, None]
            return a.sqrt() * x0 + (1 - a).sqrt() * noise

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.temb = nn.Embedding(50, 16)
            self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

        def forward(self, x, t):
            return self.net(torch.cat([x, self.temb(t)], 1))

    diff, model = Diffusion(), Denoiser()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(4)

    def step(i):
        x0 = ring(128, gen)
        t = torch.randint(0, diff.T, (128,))
        noise = torch.randn_like(x0)
        xt = diff.q_sample(x0, t)
        loss = F.mse_loss(model(xt, t), noise)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        g2 = torch.Generator().manual_seed(8)
        x0 = ring(1000, g2)
        t = torch.randint(0, diff.T, (1000,), generator=g2)
        n = torch.randn(1000, 2, generator=g2)
        with torch.no_grad():
            return F.mse_loss(model(diff.q_sample(x0, t, n), t), n).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def diffusion_target_noise_good():
    torch.manual_seed(0)

    class Diffusion:
        def __init__(self, T=50):
            betas = torch.linspace(1e-3, 0.12, T)
            self.T = T
            self.abar = torch.cumprod(1 - betas, 0)

        def q_sample(self, x0, t, noise=None):
            if noise is None:
                noise = torch.randn_like(x0)
            a = self.abar[t][:, None]
            return a.sqrt() * x0 + (1 - a).sqrt() * noise

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.temb = nn.Embedding(50, 16)
            self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

        def forward(self, x, t):
            return self.net(torch.cat([x, self.temb(t)], 1))

    diff, model = Diffusion(), Denoiser()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(4)

    def step(i):
        x0 = ring(128, gen)
        t = torch.randint(0, diff.T, (128,))
        noise = torch.randn_like(x0)
        xt = diff.q_sample(x0, t, noise)
        loss = F.mse_loss(model(xt, t), noise)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        g2 = torch.Generator().manual_seed(8)
        x0 = ring(1000, g2)
        t = torch.randint(0, diff.T, (1000,), generator=g2)
        n = torch.randn(1000, 2, generator=g2)
        with torch.no_grad():
            return F.mse_loss(model(diff.q_sample(x0, t, n), t), n).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def seg_mask_interpolation_bad():
    torch.manual_seed(0)
    n_cls = 5
    proto = torch.randn(n_cls, 3) * 1.5

    def scenes(n, gen):
        mask = torch.zeros(n, 12, 12, dtype=torch.long)
        for b in range(n):
            for _ in range(4):
                c = int(torch.randint(1, n_cls, (1,), generator=gen))
                y, x = torch.randint(0, 10, (2,), generator=gen).tolist()
                mask[b, y : y + 3, x : x + 3] = c
        img = proto[mask].permute(0, 3, 1, 2) + 0.3 * torch.randn(n, 3, 12, 12, generator=gen)
        return img, mask

    imgs, masks = scenes(96, torch.Generator().manual_seed(1))
    himgs, hmasks = scenes(48, torch.Generator().manual_seed(2))

    def augment(img, mask, scale):
        img = F.interpolate(img, scale_factor=scale, mode="bilinear", align_corners=False)
        mask = F.interpolate(mask[:, None].float(), scale_factor=scale, mode="bilinear", align_corners=False)
        return img, mask[:, 0].long()

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, n_cls, 1)
    )
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def step(i):
        idx = torch.randint(0, 96, (16,))
        x, y = augment(imgs[idx], masks[idx], [1.5, 2.0][i % 2])
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x = F.interpolate(himgs, scale_factor=2, mode="bilinear", align_corners=False)
        y = F.interpolate(hmasks[:, None].float(), scale_factor=2, mode="nearest")[:, 0].long()
        with torch.no_grad():
            return (net(x).argmax(1) != y).float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def seg_mask_interpolation_good():
    torch.manual_seed(0)
    n_cls = 5
    proto = torch.randn(n_cls, 3) * 1.5

    def scenes(n, gen):
        mask = torch.zeros(n, 12, 12, dtype=torch.long)
        for b in range(n):
            for _ in range(4):
                c = int(torch.randint(1, n_cls, (1,), generator=gen))
                y, x = torch.randint(0, 10, (2,), generator=gen).tolist()
                mask[b, y : y + 3, x : x + 3] = c
        img = proto[mask].permute(0, 3, 1, 2) + 0.3 * torch.randn(n, 3, 12, 12, generator=gen)
        return img, mask

    imgs, masks = scenes(96, torch.Generator().manual_seed(1))
    himgs, hmasks = scenes(48, torch.Generator().manual_seed(2))

    def augment(img, mask, scale):
        img = F.interpolate(img, scale_factor=scale, mode="bilinear", align_corners=False)
        mask = F.interpolate(mask[:, None].float(), scale_factor=scale, mode="nearest")
        return img, mask[:, 0].long()

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, n_cls, 1)
    )
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def step(i):
        idx = torch.randint(0, 96, (16,))
        x, y = augment(imgs[idx], masks[idx], [1.5, 2.0][i % 2])
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x = F.interpolate(himgs, scale_factor=2, mode="bilinear", align_corners=False)
        y = F.interpolate(hmasks[:, None].float(), scale_factor=2, mode="nearest")[:, 0].long()
        with torch.no_grad():
            return (net(x).argmax(1) != y).float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def det_box_loss_all_cells_bad():
    torch.manual_seed(0)
    S = 8

    def make(n, gen):
        img = 0.1 * torch.randn(n, 1, 32, 32, generator=gen)
        obj = torch.zeros(n, S, S)
        box = torch.zeros(n, 4, S, S)
        for b in range(n):
            cy, cx = (torch.rand(2, generator=gen) * 20 + 6).tolist()
            h, w = (torch.rand(2, generator=gen) * 6 + 4).tolist()
            img[b, 0, int(cy - h / 2) : int(cy + h / 2), int(cx - w / 2) : int(cx + w / 2)] += 1.0
            gy, gx = int(cy // 4), int(cx // 4)
            obj[b, gy, gx] = 1
            box[b, :, gy, gx] = torch.tensor([cy / 4 - gy, cx / 4 - gx, h / 8, w / 8])
        return img, obj, box

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, 1, 1),
                nn.ReLU(),
            )
            self.cls = nn.Conv2d(32, 1, 1)
            self.reg = nn.Conv2d(32, 4, 1)

        def forward(self, x):
            f = self.body(x)
            return self.cls(f)[:, 0], self.reg(f)

    X, O, B = make(200, torch.Generator().manual_seed(1))
    hX, hO, hB = make(100, torch.Generator().manual_seed(2))
    net = Detector()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def detection_loss(cls, reg, obj, box):
        cls_loss = F.binary_cross_entropy_with_logits(cls, obj, pos_weight=torch.tensor(10.0))
        pos = obj[:, None].expand_as(box) > 0
        reg_loss = F.smooth_l1_loss(reg, box)
        return cls_loss + reg_loss

    def step(i):
        idx = torch.randint(0, 200, (24,))
        cls, reg = net(X[idx])
        loss = detection_loss(cls, reg, O[idx], B[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            _, reg = net(hX)
        pos = hO[:, None].expand_as(hB) > 0
        return (reg[pos] - hB[pos]).abs().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def det_box_loss_all_cells_good():
    torch.manual_seed(0)
    S = 8

    def make(n, gen):
        img = 0.1 * torch.randn(n, 1, 32, 32, generator=gen)
        obj = torch.zeros(n, S, S)
        box = torch.zeros(n, 4, S, S)
        for b in range(n):
            cy, cx = (torch.rand(2, generator=gen) * 20 + 6).tolist()
            h, w = (torch.rand(2, generator=gen) * 6 + 4).tolist()
            img[b, 0, int(cy - h / 2) : int(cy + h / 2), int(cx - w / 2) : int(cx + w / 2)] += 1.0
            gy, gx = int(cy // 4), int(cx // 4)
            obj[b, gy, gx] = 1
            box[b, :, gy, gx] = torch.tensor([cy / 4 - gy, cx / 4 - gx, h / 8, w / 8])
        return img, obj, box

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, 1, 1),
                nn.ReLU(),
            )
            self.cls = nn.Conv2d(32, 1, 1)
            self.reg = nn.Conv2d(32, 4, 1)

        def forward(self, x):
            f = self.body(x)
            return self.cls(f)[:, 0], self.reg(f)

    X, O, B = make(200, torch.Generator().manual_seed(1))
    hX, hO, hB = make(100, torch.Generator().manual_seed(2))
    net = Detector()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def detection_loss(cls, reg, obj, box):
        cls_loss = F.binary_cross_entropy_with_logits(cls, obj, pos_weight=torch.tensor(10.0))
        pos = obj[:, None].expand_as(box) > 0
        reg_loss = F.smooth_l1_loss(reg[pos], box[pos])
        return cls_loss + reg_loss

    def step(i):
        idx = torch.randint(0, 200, (24,))
        cls, reg = net(X[idx])
        loss = detection_loss(cls, reg, O[idx], B[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            _, reg = net(hX)
        pos = hO[:, None].expand_as(hB) > 0
        return (reg[pos] - hB[pos]).abs().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def simclr_temperature_bad():
    torch.manual_seed(0)
    protos = torch.randn(200, 16)
    mix = torch.randn(32, 32) / 32**0.5

    def view(idx, gen):
        nuis = 2.0 * torch.randn(len(idx), 16, generator=gen)
        return torch.cat([protos[idx] + 0.3 * torch.randn(len(idx), 16, generator=gen), nuis], 1) @ mix

    class NTXent(nn.Module):
        def __init__(self, temperature=0.1):
            super().__init__()
            self.temperature = temperature

        def forward(self, a, b):
            z = F.normalize(torch.cat([a, b]), dim=1)
            sim = z @ z.T * self.temperature
            n = a.size(0)
            sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
            target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
            return F.cross_entropy(sim, target)

    enc = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    crit = NTXent()
    opt = torch.optim.SGD(enc.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        idx = torch.randperm(200)[:64]
        loss = crit(enc(view(idx, gen)), enc(view(idx, gen)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        g2 = torch.Generator().manual_seed(5)
        idx = torch.arange(200)
        with torch.no_grad():
            a, b = F.normalize(enc(view(idx, g2)), dim=1), F.normalize(enc(view(idx, g2)), dim=1)
        return ((a @ b.T).argmax(1) != idx).float().mean().item()

    return {"model": enc, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def simclr_temperature_good():
    torch.manual_seed(0)
    protos = torch.randn(200, 16)
    mix = torch.randn(32, 32) / 32**0.5

    def view(idx, gen):
        nuis = 2.0 * torch.randn(len(idx), 16, generator=gen)
        return torch.cat([protos[idx] + 0.3 * torch.randn(len(idx), 16, generator=gen), nuis], 1) @ mix

    class NTXent(nn.Module):
        def __init__(self, temperature=0.1):
            super().__init__()
            self.temperature = temperature

        def forward(self, a, b):
            z = F.normalize(torch.cat([a, b]), dim=1)
            sim = z @ z.T / self.temperature
            n = a.size(0)
            sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
            target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
            return F.cross_entropy(sim, target)

    enc = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    crit = NTXent()
    opt = torch.optim.SGD(enc.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        idx = torch.randperm(200)[:64]
        loss = crit(enc(view(idx, gen)), enc(view(idx, gen)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        g2 = torch.Generator().manual_seed(5)
        idx = torch.arange(200)
        with torch.no_grad():
            a, b = F.normalize(enc(view(idx, g2)), dim=1), F.normalize(enc(view(idx, g2)), dim=1)
        return ((a @ b.T).argmax(1) != idx).float().mean().item()

    return {"model": enc, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def simsiam_stop_gradient_bad():
    torch.manual_seed(0)
    protos = torch.randn(100, 24)

    class SimSiam(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32, affine=False)
            )
            self.predictor = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            return self.predictor(z1), self.predictor(z2), z1, z2

    model = SimSiam()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    gen = torch.Generator().manual_seed(1)

    def aug(idx):
        return protos[idx] + 0.4 * torch.randn(len(idx), 24, generator=gen)

    def step(i):
        idx = torch.randint(0, 100, (64,))
        p1, p2, z1, z2 = model(aug(idx), aug(idx))
        loss = -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        g2 = torch.Generator().manual_seed(6)
        with torch.no_grad():
            z = F.normalize(model.encoder(protos + 0.4 * torch.randn(100, 24, generator=g2)), dim=1)
            s = torch.linalg.svdvals(z - z.mean(0))
        model.train()
        p = s / s.sum()
        return -torch.exp(-(p * (p + 1e-12).log()).sum()).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def simsiam_stop_gradient_good():
    torch.manual_seed(0)
    protos = torch.randn(100, 24)

    class SimSiam(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32, affine=False)
            )
            self.predictor = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()

    model = SimSiam()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    gen = torch.Generator().manual_seed(1)

    def aug(idx):
        return protos[idx] + 0.4 * torch.randn(len(idx), 24, generator=gen)

    def step(i):
        idx = torch.randint(0, 100, (64,))
        p1, p2, z1, z2 = model(aug(idx), aug(idx))
        loss = -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        model.eval()
        g2 = torch.Generator().manual_seed(6)
        with torch.no_grad():
            z = F.normalize(model.encoder(protos + 0.4 * torch.randn(100, 24, generator=g2)), dim=1)
            s = torch.linalg.svdvals(z - z.mean(0))
        model.train()
        p = s / s.sum()
        return -torch.exp(-(p * (p + 1e-12).log()).sum()).item()

    return {"model": model, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def dqn_terminal_bootstrap_bad():
    torch.manual_seed(0)
    N, gamma = 8, 0.95
    gen = torch.Generator().manual_seed(1)
    s = torch.randint(0, N, (2000,), generator=gen)
    a = torch.randint(0, 2, (2000,), generator=gen)
    nxt = s + 2 * a - 1
    done = (nxt >= N).float()
    r = done.clone()
    s2 = torch.where(nxt >= N, torch.zeros_like(nxt), nxt.clamp(min=0))
    obs = torch.eye(N)
    q_net = nn.Sequential(nn.Linear(N, 32), nn.ReLU(), nn.Linear(32, 2))
    target = copy.deepcopy(q_net)
    for p in target.parameters():
        p.requires_grad_(False)
    opt = torch.optim.Adam(q_net.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, 2000, (64,))
        with torch.no_grad():
            best = target(obs[s2[idx]]).max(1).values
            y = r[idx] + gamma * best
        q = q_net(obs[s[idx]]).gather(1, a[idx][:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 10 == 9:
            target.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        v = torch.tensor([gamma ** (N - 1 - k) for k in range(N)])
        with torch.no_grad():
            return (q_net(obs).max(1).values - v).abs().mean().item()

    return {"model": {"q": q_net, "target": target}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def dqn_terminal_bootstrap_good():
    torch.manual_seed(0)
    N, gamma = 8, 0.95
    gen = torch.Generator().manual_seed(1)
    s = torch.randint(0, N, (2000,), generator=gen)
    a = torch.randint(0, 2, (2000,), generator=gen)
    nxt = s + 2 * a - 1
    done = (nxt >= N).float()
    r = done.clone()
    s2 = torch.where(nxt >= N, torch.zeros_like(nxt), nxt.clamp(min=0))
    obs = torch.eye(N)
    q_net = nn.Sequential(nn.Linear(N, 32), nn.ReLU(), nn.Linear(32, 2))
    target = copy.deepcopy(q_net)
    for p in target.parameters():
        p.requires_grad_(False)
    opt = torch.optim.Adam(q_net.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, 2000, (64,))
        with torch.no_grad():
            best = target(obs[s2[idx]]).max(1).values
            y = r[idx] + gamma * best * (1 - done[idx])
        q = q_net(obs[s[idx]]).gather(1, a[idx][:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 10 == 9:
            target.load_state_dict(q_net.state_dict())
        return loss.item()

    def probe():
        v = torch.tensor([gamma ** (N - 1 - k) for k in range(N)])
        with torch.no_grad():
            return (q_net(obs).max(1).values - v).abs().mean().item()

    return {"model": {"q": q_net, "target": target}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def dqn_max_not_taken_action_bad():
    torch.manual_seed(0)

    class GridBuffer:
        def __init__(self, n=3000, size=5):
            g = torch.Generator().manual_seed(2)
            self.size = size
            y, x = torch.randint(0, size, (2, n), generator=g)
            self.act = torch.randint(0, 4, (n,), generator=g)
            dy = torch.tensor([-1, 1, 0, 0])[self.act]
            dx = torch.tensor([0, 0, -1, 1])[self.act]
            y2, x2 = (y + dy).clamp(0, size - 1), (x + dx).clamp(0, size - 1)
            self.done = ((y2 == size - 1) & (x2 == size - 1)).float()
            self.rew = self.done - 0.02
            self.s, self.s2 = self.enc(y, x), self.enc(y2, x2)

        def enc(self, y, x):
            return F.one_hot(y * self.size + x, self.size**2).float()

    class Agent:
        def __init__(self):
            self.net = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4))
            self.tgt = copy.deepcopy(self.net).requires_grad_(False)
            self.opt = torch.optim.Adam(self.net.parameters(), lr=2e-3)
            self.mem = GridBuffer()

        def learn(self, i):
            m, idx = self.mem, torch.randint(0, 3000, (64,))
            q_sa, _ = self.net(m.s[idx]).max(dim=1)
            with torch.no_grad():
                y = m.rew[idx] + 0.9 * (1 - m.done[idx]) * self.tgt(m.s2[idx]).max(dim=1)[0]
            loss = F.mse_loss(q_sa, y)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
            self.opt.step()
            for p, tp in zip(self.net.parameters(), self.tgt.parameters()):
                tp.data.lerp_(p.data, 0.02)
            return loss.item()

    agent = Agent()

    def probe():
        q = agent.net(torch.eye(25)).argmax(1)
        bad = 0
        for k in range(24):
            y, x = divmod(k, 5)
            ok = (q[k] == 1 and y < 4) or (q[k] == 3 and x < 4)
            bad += 0 if ok else 1
        return bad / 24

    return {
        "model": {"net": agent.net, "target": agent.tgt},
        "optimizer": agent.opt,
        "step": agent.learn,
        "steps": 20,
        "probe": probe,
    }


def dqn_max_not_taken_action_good():
    torch.manual_seed(0)

    class GridBuffer:
        def __init__(self, n=3000, size=5):
            g = torch.Generator().manual_seed(2)
            self.size = size
            y, x = torch.randint(0, size, (2, n), generator=g)
            self.act = torch.randint(0, 4, (n,), generator=g)
            dy = torch.tensor([-1, 1, 0, 0])[self.act]
            dx = torch.tensor([0, 0, -1, 1])[self.act]
            y2, x2 = (y + dy).clamp(0, size - 1), (x + dx).clamp(0, size - 1)
            self.done = ((y2 == size - 1) & (x2 == size - 1)).float()
            self.rew = self.done - 0.02
            self.s, self.s2 = self.enc(y, x), self.enc(y2, x2)

        def enc(self, y, x):
            return F.one_hot(y * self.size + x, self.size**2).float()

    class Agent:
        def __init__(self):
            self.net = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4))
            self.tgt = copy.deepcopy(self.net).requires_grad_(False)
            self.opt = torch.optim.Adam(self.net.parameters(), lr=2e-3)
            self.mem = GridBuffer()

        def learn(self, i):
            m, idx = self.mem, torch.randint(0, 3000, (64,))
            q_sa = self.net(m.s[idx]).gather(1, m.act[idx].unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                y = m.rew[idx] + 0.9 * (1 - m.done[idx]) * self.tgt(m.s2[idx]).max(dim=1)[0]
            loss = F.mse_loss(q_sa, y)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
            self.opt.step()
            for p, tp in zip(self.net.parameters(), self.tgt.parameters()):
                tp.data.lerp_(p.data, 0.02)
            return loss.item()

    agent = Agent()

    def probe():
        q = agent.net(torch.eye(25)).argmax(1)
        bad = 0
        for k in range(24):
            y, x = divmod(k, 5)
            ok = (q[k] == 1 and y < 4) or (q[k] == 3 and x < 4)
            bad += 0 if ok else 1
        return bad / 24

    return {
        "model": {"net": agent.net, "target": agent.tgt},
        "optimizer": agent.opt,
        "step": agent.learn,
        "steps": 20,
        "probe": probe,
    }


def ppo_old_logprob_live_bad():
    torch.manual_seed(0)
    W = torch.randn(6, 4)

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
            self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

        def dist(self, s):
            return torch.distributions.Categorical(logits=self.actor(s))

    ac = ActorCritic()
    opt = torch.optim.Adam(ac.parameters(), lr=3e-3)
    roll = {}

    def collect():
        s = torch.randn(256, 6)
        with torch.no_grad():
            d = ac.dist(s)
            a = d.sample()
            roll["logp"] = d.log_prob(a)
        roll["s"], roll["a"] = s, a
        roll["r"] = ((s @ W).argmax(1) == a).float()

    def step(i):
        if i % 4 == 0:
            collect()
        s, a, r = roll["s"], roll["a"], roll["r"]
        d = ac.dist(s)
        v = ac.critic(s).squeeze(-1)
        adv = r - v.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        logp = d.log_prob(a)
        old = ac.dist(s).log_prob(a)
        ratio = torch.exp(logp - old)
        pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        loss = pg + 0.5 * F.mse_loss(v, r) - 0.001 * d.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
        opt.step()
        return loss.item()

    def probe():
        s = torch.randn(2000, 6, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            p = ac.dist(s).probs.gather(1, (s @ W).argmax(1)[:, None])
        return 1 - p.mean().item()

    return {"model": ac, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def ppo_old_logprob_live_good():
    torch.manual_seed(0)
    W = torch.randn(6, 4)

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
            self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

        def dist(self, s):
            return torch.distributions.Categorical(logits=self.actor(s))

    ac = ActorCritic()
    opt = torch.optim.Adam(ac.parameters(), lr=3e-3)
    roll = {}

    def collect():
        s = torch.randn(256, 6)
        with torch.no_grad():
            d = ac.dist(s)
            a = d.sample()
            roll["logp"] = d.log_prob(a)
        roll["s"], roll["a"] = s, a
        roll["r"] = ((s @ W).argmax(1) == a).float()

    def step(i):
        if i % 4 == 0:
            collect()
        s, a, r = roll["s"], roll["a"], roll["r"]
        d = ac.dist(s)
        v = ac.critic(s).squeeze(-1)
        adv = r - v.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        logp = d.log_prob(a)
        old = roll["logp"]
        ratio = torch.exp(logp - old)
        pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        loss = pg + 0.5 * F.mse_loss(v, r) - 0.001 * d.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ac.parameters(), 0.5)
        opt.step()
        return loss.item()

    def probe():
        s = torch.randn(2000, 6, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            p = ac.dist(s).probs.gather(1, (s @ W).argmax(1)[:, None])
        return 1 - p.mean().item()

    return {"model": ac, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def a2c_advantage_live_bad():
    torch.manual_seed(0)
    W = torch.randn(5, 6)
    actor = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 6))
    critic = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    params = list(actor.parameters()) + list(critic.parameters())
    opt = torch.optim.Adam(params, lr=3e-3)

    def reward(s, a):
        return torch.tanh((s @ W).gather(1, a[:, None]).squeeze(1))

    def step(i):
        s = torch.randn(128, 5)
        dist = torch.distributions.Categorical(logits=actor(s))
        a = dist.sample()
        ret = reward(s, a)
        value = critic(s).squeeze(1)
        advantage = ret - value
        actor_loss = -(dist.log_prob(a) * advantage).mean()
        critic_loss = 0.5 * advantage.pow(2).mean()
        loss = actor_loss + critic_loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        return critic_loss.item()

    def probe():
        s = torch.randn(2000, 5, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            probs = torch.softmax(actor(s), 1)
            v = (probs * torch.tanh(s @ W)).sum(1)
            return (critic(s).squeeze(1) - v).abs().mean().item()

    return {"model": {"actor": actor, "critic": critic}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def a2c_advantage_live_good():
    torch.manual_seed(0)
    W = torch.randn(5, 6)
    actor = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 6))
    critic = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    params = list(actor.parameters()) + list(critic.parameters())
    opt = torch.optim.Adam(params, lr=3e-3)

    def reward(s, a):
        return torch.tanh((s @ W).gather(1, a[:, None]).squeeze(1))

    def step(i):
        s = torch.randn(128, 5)
        dist = torch.distributions.Categorical(logits=actor(s))
        a = dist.sample()
        ret = reward(s, a)
        value = critic(s).squeeze(1)
        advantage = ret - value
        actor_loss = -(dist.log_prob(a) * advantage.detach()).mean()
        critic_loss = 0.5 * advantage.pow(2).mean()
        loss = actor_loss + critic_loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        return critic_loss.item()

    def probe():
        s = torch.randn(2000, 5, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            probs = torch.softmax(actor(s), 1)
            v = (probs * torch.tanh(s @ W)).sum(1)
            return (critic(s).squeeze(1) - v).abs().mean().item()

    return {"model": {"actor": actor, "critic": critic}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def regression_broadcast_bad():
    torch.manual_seed(0)
    X = torch.randn(600, 8)
    w = torch.randn(8)
    y = torch.sin(X @ w) + 0.5 * X[:, 0] + 0.05 * torch.randn(600)
    Xtr, ytr, Xte, yte = X[:500], y[:500], X[500:], y[500:]
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, 500, (64,))
        pred = model(Xtr[idx])
        loss = ((pred - ytr[idx]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(Xte).squeeze(-1), yte).item() / yte.var().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def regression_broadcast_good():
    torch.manual_seed(0)
    X = torch.randn(600, 8)
    w = torch.randn(8)
    y = torch.sin(X @ w) + 0.5 * X[:, 0] + 0.05 * torch.randn(600)
    Xtr, ytr, Xte, yte = X[:500], y[:500], X[500:], y[500:]
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        idx = torch.randint(0, 500, (64,))
        pred = model(Xtr[idx]).squeeze(-1)
        loss = ((pred - ytr[idx]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return F.mse_loss(model(Xte).squeeze(-1), yte).item() / yte.var().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def gru_batch_axis_bad():
    torch.manual_seed(0)

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(2, 24)
            self.fc = nn.Linear(24, 1)

        def forward(self, x):
            out, _ = self.gru(x)
            return self.fc(out[:, -1]).squeeze(-1)

    def series(n, gen):
        f = torch.rand(n, 1, generator=gen) * 0.5 + 0.2
        ph = torch.rand(n, 1, generator=gen) * 6.28
        t = torch.arange(17).float()
        x = torch.sin(f * t + ph)
        return torch.stack([x[:, :16], 0.1 * torch.randn(n, 16, generator=gen)], 2), x[:, 16]

    gen = torch.Generator().manual_seed(1)
    net = Forecaster()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def step(i):
        x, y = series(48, gen)
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x, y = series(400, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.mse_loss(net(x), y).item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def gru_batch_axis_good():
    torch.manual_seed(0)

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(2, 24, batch_first=True)
            self.fc = nn.Linear(24, 1)

        def forward(self, x):
            out, _ = self.gru(x)
            return self.fc(out[:, -1]).squeeze(-1)

    def series(n, gen):
        f = torch.rand(n, 1, generator=gen) * 0.5 + 0.2
        ph = torch.rand(n, 1, generator=gen) * 6.28
        t = torch.arange(17).float()
        x = torch.sin(f * t + ph)
        return torch.stack([x[:, :16], 0.1 * torch.randn(n, 16, generator=gen)], 2), x[:, 16]

    gen = torch.Generator().manual_seed(1)
    net = Forecaster()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)

    def step(i):
        x, y = series(48, gen)
        loss = F.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x, y = series(400, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.mse_loss(net(x), y).item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def gnn_index_add_bad():
    torch.manual_seed(0)
    n, C = 240, 4
    y = torch.randint(0, C, (n,))
    same = y[:, None] == y[None]
    adj = torch.rand(n, n) < torch.where(same, 0.22, 0.03)
    adj = adj | adj.T
    adj.fill_diagonal_(False)
    dst, src = adj.nonzero(as_tuple=True)
    x = F.one_hot(y, C).float() @ torch.randn(C, 16) + 2.5 * torch.randn(n, 16)
    deg = adj.sum(1, keepdim=True).clamp(min=1).float()
    train_mask = torch.rand(n) < 0.4

    class SageLayer(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.self_lin, self.nb_lin = nn.Linear(i, o), nn.Linear(i, o)

        def forward(self, h):
            agg = torch.zeros_like(h)
            agg[dst] += h[src]
            return self.self_lin(h) + self.nb_lin(agg / deg)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.c2 = SageLayer(16, 24), SageLayer(24, C)

        def forward(self, x):
            return self.c2(torch.relu(self.c1(x)))

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-3)

    def step(i):
        loss = F.cross_entropy(net(x)[train_mask], y[train_mask])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (net(x).argmax(1) != y)[~train_mask].float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def gnn_index_add_good():
    torch.manual_seed(0)
    n, C = 240, 4
    y = torch.randint(0, C, (n,))
    same = y[:, None] == y[None]
    adj = torch.rand(n, n) < torch.where(same, 0.22, 0.03)
    adj = adj | adj.T
    adj.fill_diagonal_(False)
    dst, src = adj.nonzero(as_tuple=True)
    x = F.one_hot(y, C).float() @ torch.randn(C, 16) + 2.5 * torch.randn(n, 16)
    deg = adj.sum(1, keepdim=True).clamp(min=1).float()
    train_mask = torch.rand(n) < 0.4

    class SageLayer(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.self_lin, self.nb_lin = nn.Linear(i, o), nn.Linear(i, o)

        def forward(self, h):
            agg = torch.zeros_like(h)
            agg.index_add_(0, dst, h[src])
            return self.self_lin(h) + self.nb_lin(agg / deg)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.c2 = SageLayer(16, 24), SageLayer(24, C)

        def forward(self, x):
            return self.c2(torch.relu(self.c1(x)))

    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-3)

    def step(i):
        loss = F.cross_entropy(net(x)[train_mask], y[train_mask])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (net(x).argmax(1) != y)[~train_mask].float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def ranking_margin_sign_bad():
    torch.manual_seed(0)
    w = torch.randn(10)
    docs = torch.randn(2000, 10)
    rel = torch.tanh(docs @ w) + 0.1 * torch.randn(2000)
    scorer = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    opt = torch.optim.SGD(scorer.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.MarginRankingLoss(margin=0.5)

    def step(i):
        idx = torch.randint(0, 1600, (2, 64))
        hi = torch.where(rel[idx[0]] > rel[idx[1]], idx[0], idx[1])
        lo = torch.where(rel[idx[0]] > rel[idx[1]], idx[1], idx[0])
        target = -torch.ones(64)
        loss = criterion(scorer(docs[hi]).squeeze(1), scorer(docs[lo]).squeeze(1), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        scorer.eval()
        with torch.no_grad():
            s = scorer(docs[1600:]).squeeze(1)
        scorer.train()
        r = rel[1600:]
        up = r[:, None] > r[None]
        return 1 - (s[:, None] > s[None])[up].float().mean().item()

    return {"model": scorer, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def ranking_margin_sign_good():
    torch.manual_seed(0)
    w = torch.randn(10)
    docs = torch.randn(2000, 10)
    rel = torch.tanh(docs @ w) + 0.1 * torch.randn(2000)
    scorer = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    opt = torch.optim.SGD(scorer.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.MarginRankingLoss(margin=0.5)

    def step(i):
        idx = torch.randint(0, 1600, (2, 64))
        hi = torch.where(rel[idx[0]] > rel[idx[1]], idx[0], idx[1])
        lo = torch.where(rel[idx[0]] > rel[idx[1]], idx[1], idx[0])
        target = torch.ones(64)
        loss = criterion(scorer(docs[hi]).squeeze(1), scorer(docs[lo]).squeeze(1), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        scorer.eval()
        with torch.no_grad():
            s = scorer(docs[1600:]).squeeze(1)
        scorer.train()
        r = rel[1600:]
        up = r[:, None] > r[None]
        return 1 - (s[:, None] > s[None])[up].float().mean().item()

    return {"model": scorer, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def recsys_tables_in_list_bad():
    torch.manual_seed(0)
    cards = [60, 80, 7]
    truth = [torch.randn(c, 2) for c in cards]

    class WideDeep(nn.Module):
        def __init__(self, cards, dim=6):
            super().__init__()
            self.tables = [nn.Embedding(c, dim) for c in cards]
            self.mlp = nn.Sequential(nn.Linear(dim * len(cards), 48), nn.ReLU(), nn.Linear(48, 1))

        def forward(self, ids):
            e = [t(ids[:, k]) for k, t in enumerate(self.tables)]
            return self.mlp(torch.cat(e, 1)).squeeze(1)

    def draw(n, gen):
        ids = torch.stack([torch.randint(0, c, (n,), generator=gen) for c in cards], 1)
        u, v, c = (truth[k][ids[:, k]] for k in range(3))
        return ids, ((u * v).sum(1) + 0.5 * c[:, 0] > 0).float()

    net = WideDeep(cards)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    ids, clicks = draw(12000, torch.Generator().manual_seed(1))
    hids, hclicks = draw(600, torch.Generator().manual_seed(2))

    def step(i):
        b = torch.randint(0, 12000, (128,))
        loss = F.binary_cross_entropy_with_logits(net(ids[b]), clicks[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((net(hids) > 0).float() != hclicks).float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def recsys_tables_in_list_good():
    torch.manual_seed(0)
    cards = [60, 80, 7]
    truth = [torch.randn(c, 2) for c in cards]

    class WideDeep(nn.Module):
        def __init__(self, cards, dim=6):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(c, dim) for c in cards)
            self.mlp = nn.Sequential(nn.Linear(dim * len(cards), 48), nn.ReLU(), nn.Linear(48, 1))

        def forward(self, ids):
            e = [t(ids[:, k]) for k, t in enumerate(self.tables)]
            return self.mlp(torch.cat(e, 1)).squeeze(1)

    def draw(n, gen):
        ids = torch.stack([torch.randint(0, c, (n,), generator=gen) for c in cards], 1)
        u, v, c = (truth[k][ids[:, k]] for k in range(3))
        return ids, ((u * v).sum(1) + 0.5 * c[:, 0] > 0).float()

    net = WideDeep(cards)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    ids, clicks = draw(12000, torch.Generator().manual_seed(1))
    hids, hclicks = draw(600, torch.Generator().manual_seed(2))

    def step(i):
        b = torch.randint(0, 12000, (128,))
        loss = F.binary_cross_entropy_with_logits(net(ids[b]), clicks[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return ((net(hids) > 0).float() != hclicks).float().mean().item()

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def audio_specaugment_inplace_bad():
    torch.manual_seed(0)

    class Keywords(torch.utils.data.Dataset):
        def __init__(self, n, seed, train):
            g = torch.Generator().manual_seed(seed)
            self.y = torch.randint(0, 5, (n,), generator=g)
            tmpl = torch.randn(5, 20, 24, generator=torch.Generator().manual_seed(99))
            self.specs = 0.5 * tmpl[self.y] + torch.randn(n, 20, 24, generator=g)
            self.train = train

        def __len__(self):
            return len(self.y)

        def spec_augment(self, spec):
            f, t = int(torch.randint(0, 16, (1,))), int(torch.randint(0, 19, (1,)))
            spec[f : f + 4] = 0
            spec[:, t : t + 5] = 0
            return spec

        def __getitem__(self, k):
            spec = self.specs[k]
            if self.train:
                spec = self.spec_augment(spec)
            return spec, self.y[k]

    ds, held = Keywords(128, 1, True), Keywords(300, 2, False)
    loader = torch.utils.data.DataLoader(ds, batch_size=32, shuffle=True)
    net = nn.Sequential(
        nn.Conv1d(20, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(24 * 24, 5)
    )
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = {"it": iter(loader)}

    def step(i):
        try:
            x, y = next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            x, y = next(state["it"])
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            e = (net(held.specs).argmax(1) != held.y).float().mean().item()
        net.train()
        return e

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def audio_specaugment_inplace_good():
    torch.manual_seed(0)

    class Keywords(torch.utils.data.Dataset):
        def __init__(self, n, seed, train):
            g = torch.Generator().manual_seed(seed)
            self.y = torch.randint(0, 5, (n,), generator=g)
            tmpl = torch.randn(5, 20, 24, generator=torch.Generator().manual_seed(99))
            self.specs = 0.5 * tmpl[self.y] + torch.randn(n, 20, 24, generator=g)
            self.train = train

        def __len__(self):
            return len(self.y)

        def spec_augment(self, spec):
            f, t = int(torch.randint(0, 16, (1,))), int(torch.randint(0, 19, (1,)))
            spec[f : f + 4] = 0
            spec[:, t : t + 5] = 0
            return spec

        def __getitem__(self, k):
            spec = self.specs[k].clone()
            if self.train:
                spec = self.spec_augment(spec)
            return spec, self.y[k]

    ds, held = Keywords(128, 1, True), Keywords(300, 2, False)
    loader = torch.utils.data.DataLoader(ds, batch_size=32, shuffle=True)
    net = nn.Sequential(
        nn.Conv1d(20, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(24 * 24, 5)
    )
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = {"it": iter(loader)}

    def step(i):
        try:
            x, y = next(state["it"])
        except StopIteration:
            state["it"] = iter(loader)
            x, y = next(state["it"])
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        net.eval()
        with torch.no_grad():
            e = (net(held.specs).argmax(1) != held.y).float().mean().item()
        net.train()
        return e

    return {"model": net, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def loader_restarted_bad():
    torch.manual_seed(0)
    protos = torch.randn(10, 16)
    y = torch.randint(0, 10, (800,))
    x = protos[y] + 1.1 * torch.randn(800, 16)
    ds = torch.utils.data.TensorDataset(x[:600], y[:600])
    loader = torch.utils.data.DataLoader(ds, batch_size=32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forever():
        while True:
            yield from loader

    stream = forever()

    def step(i):
        xb, yb = next(iter(loader))
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(x[600:]).argmax(1) != y[600:]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def loader_restarted_good():
    torch.manual_seed(0)
    protos = torch.randn(10, 16)
    y = torch.randint(0, 10, (800,))
    x = protos[y] + 1.1 * torch.randn(800, 16)
    ds = torch.utils.data.TensorDataset(x[:600], y[:600])
    loader = torch.utils.data.DataLoader(ds, batch_size=32)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forever():
        while True:
            yield from loader

    stream = forever()

    def step(i):
        xb, yb = next(stream)
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with torch.no_grad():
            return (model(x[600:]).argmax(1) != y[600:]).float().mean().item()

    return {"model": model, "optimizer": optimizer, "step": step, "steps": 20, "probe": probe}


def multitask_uncertainty_weights_bad():
    torch.manual_seed(0)

    class UncertaintyLoss(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(n))

        def forward(self, losses):
            return sum(torch.exp(-s) * l + 0.5 * s for s, l in zip(self.log_vars, losses))

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(12, 6), nn.Tanh())
            self.price, self.kind = nn.Linear(6, 1), nn.Linear(6, 3)

        def forward(self, x):
            h = self.trunk(x)
            return self.price(h).squeeze(1), self.kind(h)

    wa, wb = torch.randn(12, 8) / 2, torch.randn(12, 3)

    def batch(n, gen):
        x = torch.randn(n, 12, generator=gen)
        price = 12 * torch.sin(2 * (x @ wa)).sum(1) / 8**0.5 + 8 * torch.randn(n, generator=gen)
        return x, price, (x @ wb).argmax(1)

    model, mtl = TwoHeads(), UncertaintyLoss(2)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, price, kind = batch(64, gen)
        p, k = model(x)
        loss = mtl([F.mse_loss(p, price), F.cross_entropy(k, kind)])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x, price, kind = batch(1000, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.cross_entropy(model(x)[1], kind).item()

    return {"model": {"net": model, "weighting": mtl}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


def multitask_uncertainty_weights_good():
    torch.manual_seed(0)

    class UncertaintyLoss(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.log_vars = nn.Parameter(torch.zeros(n))

        def forward(self, losses):
            return sum(torch.exp(-s) * l + 0.5 * s for s, l in zip(self.log_vars, losses))

    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(12, 6), nn.Tanh())
            self.price, self.kind = nn.Linear(6, 1), nn.Linear(6, 3)

        def forward(self, x):
            h = self.trunk(x)
            return self.price(h).squeeze(1), self.kind(h)

    wa, wb = torch.randn(12, 8) / 2, torch.randn(12, 3)

    def batch(n, gen):
        x = torch.randn(n, 12, generator=gen)
        price = 12 * torch.sin(2 * (x @ wa)).sum(1) / 8**0.5 + 8 * torch.randn(n, generator=gen)
        return x, price, (x @ wb).argmax(1)

    model, mtl = TwoHeads(), UncertaintyLoss(2)
    opt = torch.optim.Adam(list(model.parameters()) + list(mtl.parameters()), lr=1e-2)
    gen = torch.Generator().manual_seed(1)

    def step(i):
        x, price, kind = batch(64, gen)
        p, k = model(x)
        loss = mtl([F.mse_loss(p, price), F.cross_entropy(k, kind)])
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    def probe():
        x, price, kind = batch(1000, torch.Generator().manual_seed(2))
        with torch.no_grad():
            return F.cross_entropy(model(x)[1], kind).item()

    return {"model": {"net": model, "weighting": mtl}, "optimizer": opt, "step": step, "steps": 20, "probe": probe}


CASES = [
    {
        "name": "wgan_gp",
        "what": "The WGAN gradient penalty is taken without create_graph, so it adds a constant and the critic is never held to slope one.",
        "cause": "gradient penalty without create_graph",
        "where": "gradient_penalty / critic",
        "kind": "GAN",
    },
    {
        "name": "vae_kl_batch_sum",
        "what": "The KL term is summed over the batch while the reconstruction is averaged over it, so the KL weighs 64 times too much and the posterior collapses.",
        "cause": "KL weight too large, posterior collapse",
        "where": "kl term; mu and logvar heads",
        "kind": "VAE",
    },
    {
        "name": "vqvae_straight_through",
        "what": "The quantised code is detached without the straight-through trick, so the reconstruction loss never reaches the encoder.",
        "cause": "missing straight-through estimator",
        "where": "VQ.forward / encoder",
        "kind": "VQ-VAE",
    },
    {
        "name": "diffusion_target_noise",
        "what": "The noisy sample is built with a fresh noise, not the one that is the target, so the target is independent of the input.",
        "cause": "noise target not the noise added",
        "where": "q_sample call in step",
        "kind": "diffusion",
    },
    {
        "name": "seg_mask_interpolation",
        "what": "Class-id masks are resized with bilinear interpolation and truncated, inventing wrong classes along every edge.",
        "cause": "label mask interpolated bilinearly",
        "where": "augment (targets)",
        "kind": "segmentation",
    },
    {
        "name": "det_box_loss_all_cells",
        "what": "The box regression loss is averaged over all grid cells, empty ones with zero targets included, so boxes are drawn to zero.",
        "cause": "regression loss not masked to positives",
        "where": "detection_loss / reg head",
        "kind": "detection",
    },
    {
        "name": "simclr_temperature",
        "what": "The similarities are multiplied by the temperature rather than divided, so logits span 0.2 and the contrastive loss stands at log N.",
        "cause": "temperature multiplied, logits too flat",
        "where": "NTXent.forward",
        "kind": "contrastive",
    },
    {
        "name": "simsiam_stop_gradient",
        "what": "SimSiam's target branch has no stop-gradient, so the representation collapses to few dimensions.",
        "cause": "missing stop-gradient, collapse",
        "where": "SimSiam.forward z1, z2",
        "kind": "self-supervised",
    },
    {
        "name": "dqn_terminal_bootstrap",
        "what": "The TD target bootstraps through terminal states (no 1-done), so values are inflated.",
        "cause": "terminal states bootstrapped",
        "where": "target y in step",
        "kind": "DQN",
    },
    {
        "name": "dqn_max_not_taken_action",
        "what": "The Q value trained is the maximum over actions, not that of the action taken, so rewards are credited to the wrong action.",
        "cause": "max instead of gather of taken action",
        "where": "Agent.learn q_sa",
        "kind": "DQN",
    },
    {
        "name": "ppo_old_logprob_live",
        "what": "The old log-probability is recomputed from the current policy with its graph, so the ratio is always one and the policy gradient cancels to zero.",
        "cause": "old log-probs not stored/detached; ratio constant one",
        "where": "ratio in step / actor",
        "kind": "PPO",
    },
    {
        "name": "a2c_advantage_live",
        "what": "The advantage in the actor loss is not detached, so the policy loss pushes the critic's values upward.",
        "cause": "advantage not detached",
        "where": "actor_loss / critic",
        "kind": "actor-critic",
    },
    {
        "name": "regression_broadcast",
        "what": "Predictions (N,1) minus targets (N,) broadcast to N by N, so the model learns the batch mean only.",
        "cause": "shape broadcast in loss",
        "where": "loss in step",
        "kind": "regression",
    },
    {
        "name": "gru_batch_axis",
        "what": "Batch-first data go into a GRU built sequence-first, so it recurs across samples and sees one time step of each.",
        "cause": "batch_first missing",
        "where": "gru",
        "kind": "time series",
    },
    {
        "name": "gnn_index_add",
        "what": "Messages are gathered with agg[dst] += h[src], which keeps only one message per node, not their sum.",
        "cause": "duplicate-index assignment loses messages",
        "where": "SageLayer.forward agg",
        "kind": "GNN",
    },
    {
        "name": "ranking_margin_sign",
        "what": "The margin ranking target is -1 for (better, worse) pairs, so the scorer learns the reversed order.",
        "cause": "ranking loss sign reversed",
        "where": "target of MarginRankingLoss",
        "kind": "ranking",
    },
    {
        "name": "recsys_tables_in_list",
        "what": "The embedding tables sit in a plain Python list, so they are not parameters and never train.",
        "cause": "submodules not registered",
        "where": "WideDeep.tables",
        "kind": "recommender",
    },
    {
        "name": "audio_specaugment_inplace",
        "what": "SpecAugment writes zeros in place into the stored spectrograms, so the data set is wiped out over the epochs.",
        "cause": "in-place augmentation corrupts data set",
        "where": "Keywords.__getitem__ / specs",
        "kind": "audio",
    },
    {
        "name": "loader_restarted",
        "what": "Each step takes next(iter(loader)) from an unshuffled loader, so the model sees the first batch for ever.",
        "cause": "same batch every step",
        "where": "step (loader)",
        "kind": "data loader",
    },
    {
        "name": "multitask_uncertainty_weights",
        "what": "The learned loss weights (log variances) are not given to the optimizer, so the large task drowns the small one.",
        "cause": "parameter missing from optimizer",
        "where": "UncertaintyLoss.log_vars",
        "kind": "multi-task",
    },
]
