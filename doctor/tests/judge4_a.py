"""Twenty-two small training programs on images, each with one realistic fault, each with a mended twin.

Every program makes its own seeded data, trains for 10 to 30 optimizer steps and then measures its fault on the very
run that has just ended (a weight that did not move, a loss that differs from its formula, ...).  With `mended=True`
the same program runs with that one fault repaired.  Footgun: the measures are made after the watched block, so a
`watch` that changes a model's mode or its gradients on leaving would also change what is measured.
"""
import contextlib
import copy
import sys
import time
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULTS = []   # (function, words)


def fault(words):
    def put(f):
        FAULTS.append((f, words))
        return f
    return put


def real(holds, words):
    if not holds:
        raise AssertionError(words)


# ---- data ---------------------------------------------------------------------------------------------------------

def corner_images(n, seed, size=16):
    """Grey images with a square in one of four corners, faint in some and bright in others; the class is the corner."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = 0.5 * torch.randn(n, 1, size, size, generator=g)
    half = size // 2
    bright = 0.2 + torch.rand(n, generator=g)
    for i, corner in enumerate(y.tolist()):
        row, col = divmod(corner, 2)
        x[i, 0, row * half:row * half + half, col * half:col * half + half] += bright[i]
    return x, y


def disc_images(n, seed, size=16):
    """Noisy images with one disc; returns the images, the 0/1 masks, the radii and the centres (row, column)."""
    g = torch.Generator().manual_seed(seed)
    radius = 2 + 3 * torch.rand(n, generator=g)
    centre = 5 + (size - 10) * torch.rand(n, 2, generator=g)
    grid = torch.arange(size).float()
    away = (grid[None, :, None] - centre[:, 0, None, None]) ** 2 + (grid[None, None, :] - centre[:, 1, None, None]) ** 2
    mask = (away <= radius[:, None, None] ** 2).float()
    x = mask[:, None] + 0.3 * torch.randn(n, 1, size, size, generator=g)
    return x, mask, radius, centre


def stripes(n, seed, size=12):
    """Smooth pictures of values between 0 and 1: stripes of random direction and phase."""
    g = torch.Generator().manual_seed(seed)
    angle = 3.14159 * torch.rand(n, 1, 1, generator=g)
    phase = 6.28318 * torch.rand(n, 1, 1, generator=g)
    grid = torch.arange(size).float()
    wave = grid[None, :, None] * angle.cos() + grid[None, None, :] * angle.sin()
    return (0.5 + 0.45 * torch.sin(0.8 * wave + phase)).unsqueeze(1)


def weights_of(module):
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


# ---- GANs ---------------------------------------------------------------------------------------------------------

@fault("the discriminator ends in a sigmoid and the loss, BCEWithLogitsLoss, takes a second one")
def gan_sigmoid_twice(watch, mended):
    torch.manual_seed(0)
    z_dim = 16
    G = nn.Sequential(nn.Linear(z_dim, 128), nn.ReLU(), nn.Linear(128, 144), nn.Tanh())
    layers = [nn.Linear(144, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)]
    if not mended:
        layers.append(nn.Sigmoid())
    D = nn.Sequential(*layers)
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=3e-3, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    images = stripes(480, seed=1).flatten(1) * 2 - 1
    lowest = 1.0
    with watch(G, D, optimizer=[opt_g, opt_d]) as report:
        for real_x in images.split(32):
            ones, zeros = torch.ones(len(real_x), 1), torch.zeros(len(real_x), 1)
            # discriminator
            opt_d.zero_grad()
            fake = G(torch.randn(len(real_x), z_dim))
            loss_real = criterion(D(real_x), ones)
            scores = D(fake.detach())
            loss_fake = criterion(scores, zeros)
            (loss_real + loss_fake).backward()
            opt_d.step()
            # generator
            opt_g.zero_grad()
            loss_g = criterion(D(fake), ones)
            loss_g.backward()
            opt_g.step()
            lowest = min(lowest, scores.min().item())
    real(mended or lowest >= 0, f"no fake ever gets a logit under 0: {lowest}")
    real(not mended or lowest < -0.1, f"fakes get logits under 0: {lowest}")
    return report


@fault("the critic's weight clipping gives the clamped copy to a name and leaves the weights as they are")
def wgan_clamp_not_in_place(watch, mended):
    torch.manual_seed(1)
    gen = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 144), nn.Tanh())
    critic = nn.Sequential(nn.Linear(144, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_gen = torch.optim.RMSprop(gen.parameters(), lr=5e-4)
    opt_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    c, n_critic = 0.05, 3
    data = (stripes(64 * 21, seed=2).flatten(1) * 2 - 1).split(64)
    with watch(gen, critic, optimizer=[opt_gen, opt_critic]) as report:
        for it, x in enumerate(data):
            opt_critic.zero_grad()
            with torch.no_grad():
                fake = gen(torch.randn(len(x), 8))
            loss = critic(fake).mean() - critic(x).mean()
            loss.backward()
            opt_critic.step()
            for p in critic.parameters():
                if mended:
                    p.data.clamp_(-c, c)
                else:
                    p = p.data.clamp(-c, c)
            if it % n_critic == n_critic - 1:
                opt_gen.zero_grad()
                g_loss = -critic(gen(torch.randn(64, 8))).mean()
                g_loss.backward()
                opt_gen.step()
    widest = weights_of(critic).abs().max().item()
    real(mended or widest > 1.5 * c, "the critic has weights far outside the clipping range")
    real(not mended or widest <= c + 1e-6, "all of the critic's weights are in the clipping range")
    return report


# ---- VAEs ---------------------------------------------------------------------------------------------------------

class VAE(nn.Module):
    def __init__(self, pixels=144, hidden=96, latent=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, pixels))

    def encode(self, x):
        h = self.enc(x)
        return self.mu(h), self.logvar(h)


@fault("the reconstruction loss is a mean over all pixels while the KL term is a sum, so the KL term outweighs it")
def vae_mean_against_sum(watch, mended):
    torch.manual_seed(0)
    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=5e-3)
    loader = DataLoader(TensorDataset(disc_images(480, seed=3, size=12)[1]), batch_size=32, shuffle=True)
    kls = []
    with watch(vae, optimizer=optimizer) as report:
        for epoch in range(2):
            for (x,) in loader:
                mu, logvar = vae.encode(x)
                z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
                logits = vae.dec(z)
                how = "sum" if mended else "mean"
                recon = F.binary_cross_entropy_with_logits(logits, x.flatten(1), reduction=how)
                kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
                loss = (recon + kl) / len(x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                kls.append(kl.item() / len(x))
    real(mended or kls[-1] < 0.1, "the KL term fell to nothing: the code tells nothing of the image")
    real(not mended or kls[-1] > 1.0, "the code carries more than one nat about the image")
    return report


@fault("the latent is drawn with sample() and not rsample(), so the reconstruction sends no gradient to the encoder")
def vae_sample_without_gradient(watch, mended):
    torch.manual_seed(2)
    model = VAE(latent=6)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    images = disc_images(480, seed=4, size=12)[1]

    def losses(x):
        mu, logvar = model.encode(x)
        q = torch.distributions.Normal(mu, (0.5 * logvar).exp())
        z = q.rsample() if mended else q.sample()
        recon = F.binary_cross_entropy_with_logits(model.dec(z), x.flatten(1), reduction="none").sum(1).mean()
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
        return recon, kl

    with watch(model, optimizer=opt) as report:
        for epoch in range(2):
            order = torch.randperm(len(images))
            for idx in order.split(32):
                opt.zero_grad()
                recon, kl = losses(images[idx])
                (recon + kl).backward()
                opt.step()
    recon, kl = losses(images[:64])
    grad = torch.autograd.grad(recon, model.mu.weight, allow_unused=True)[0]
    real(mended or grad is None, "the reconstruction loss has no path to the encoder")
    real(mended or kl.item() < 0.2, "only the KL term trains the encoder, and it fell to nothing")
    real(not mended or grad.norm() > 0, "the reconstruction loss reaches the encoder")
    real(not mended or kl.item() > 1.0, "the code carries information")
    return report


# ---- diffusion ----------------------------------------------------------------------------------------------------

class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t.float()[:, None] / 100)[:, :, None, None])
        h = h + F.silu(self.norm(self.mid(h)))
        return self.out(h)


@fault("the noise that the network must predict is not the noise that was put in the image: it was drawn again")
def diffusion_noise_drawn_twice(watch, mended):
    torch.manual_seed(0)
    T = 100
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-3, 0.1, T), 0)

    def q_sample(x0, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x0)
        a = alpha_bar[t][:, None, None, None]
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    net = Denoiser()
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    data = stripes(64 * 15, seed=5) * 2 - 1
    losses = []
    with watch(net, optimizer=opt) as report:
        for epoch in range(2):
            for x0 in data.split(64):
                t = torch.randint(0, T, (len(x0),))
                noise = torch.randn_like(x0)
                xt = q_sample(x0, t, noise) if mended else q_sample(x0, t)
                loss = F.mse_loss(net(xt, t), noise)
                opt.zero_grad()
                loss.backward()
                opt.step()
                losses.append(loss.item())
    last = sum(losses[-5:]) / 5
    real(mended or last > 0.97, "the loss stays at the variance of the noise, which is 1")
    real(not mended or last < 0.5, "the loss falls far under the variance of the noise")
    return report


# ---- self-supervised learning -------------------------------------------------------------------------------------

@fault("the target projections are not detached in SimSiam, so both branches are pulled together and collapse")
def simsiam_without_stop_gradient(watch, mended):
    torch.manual_seed(0)

    class SimSiam(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
                nn.Linear(32 * 16, dim))
            self.predictor = nn.Sequential(nn.Linear(dim, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, dim))

        def forward(self, x1, x2):
            z1, z2 = self.encoder(x1), self.encoder(x2)
            return self.predictor(z1), self.predictor(z2), z1, z2

    def neg_cos(p, z):
        if mended:
            z = z.detach()
        return -F.cosine_similarity(p, z, dim=1).mean()

    model = SimSiam()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    images, _ = corner_images(64 * 10, seed=6)
    jitter = lambda x: x * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.3 * torch.randn_like(x)
    with watch(model, optimizer=opt) as report:
        for epoch in range(3):
            for x in images[torch.randperm(len(images))].split(64):
                p1, p2, z1, z2 = model(jitter(x), jitter(x))
                loss = 0.5 * neg_cos(p1, z2) + 0.5 * neg_cos(p2, z1)
                opt.zero_grad()
                loss.backward()
                opt.step()
    p1, p2, z1, z2 = model(jitter(images[:64]), jitter(images[:64]))
    into_target = torch.autograd.grad(neg_cos(p1, z2), z2, allow_unused=True)[0]
    spread = F.normalize(z1, dim=1).std(0).mean().item() * 32 ** 0.5
    real(mended or into_target is not None and into_target.abs().sum() > 0, "gradient flows into the target branch")
    real(mended or spread < 0.3, f"the embeddings collapsed: {spread}")
    real(not mended or into_target is None, "the target branch gets no gradient")
    real(not mended or spread > 0.4, f"the embeddings stay spread: {spread}")
    return report


@fault("the decay of the mean teacher is swapped, so the teacher is a copy of the last student and no average")
def mean_teacher_decay_swapped(watch, mended):
    torch.manual_seed(3)
    student = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
                            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    teacher = copy.deepcopy(student).requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)
    x, y = corner_images(300, seed=7)
    x_free, _ = corner_images(900, seed=8)
    decay = 0.9

    @torch.no_grad()
    def update_teacher():
        for pt, ps in zip(teacher.parameters(), student.parameters()):
            if mended:
                pt.mul_(decay).add_(ps, alpha=1 - decay)
            else:
                pt.mul_(1 - decay).add_(ps, alpha=decay)

    # the average by its formula, kept aside for the measure
    average = weights_of(student)
    with watch(student, teacher, optimizer=opt) as report:
        for epoch in range(2):
            for xb, yb, xu in zip(x.split(20), y.split(20), x_free.split(60)):
                opt.zero_grad()
                with torch.no_grad():
                    aim = F.softmax(teacher(xu), 1)
                ce = F.cross_entropy(student(xb), yb)
                consistency = F.mse_loss(F.softmax(student(xu + 0.2 * torch.randn_like(xu)), 1), aim)
                (ce + consistency).backward()
                opt.step()
                update_teacher()
                average = decay * average + (1 - decay) * weights_of(student)
    off = (weights_of(teacher) - average).norm() / (weights_of(student) - average).norm()
    real(mended or off > 0.5, f"the teacher is far from the moving average: {off}")
    real(not mended or off < 1e-3, f"the teacher is the moving average: {off}")
    return report


# ---- segmentation and detection -----------------------------------------------------------------------------------

@fault("the class maps are reshaped to rows without moving the channels last, so scores and labels do not line up")
def segmentation_reshape_without_permute(watch, mended):
    torch.manual_seed(0)
    C = 3
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, C, 1))
    x, mask, _, _ = disc_images(320, seed=9)
    left = (torch.arange(16) < 8).float()[None, None, :]
    x = x + mask[:, None] * left[:, None]                       # the left part of a disc is brighter
    y = (mask + mask * left).long()                             # 0: ground, 1: disc, 2: its left part
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    with watch(net, optimizer=optimizer) as report:
        net.train()
        for epoch in range(2):
            for xb, yb in zip(x.split(32), y.split(32)):
                optimizer.zero_grad()
                out = net(xb)
                if mended:
                    out = out.permute(0, 2, 3, 1)
                loss = criterion(out.reshape(-1, C), yb.reshape(-1))
                loss.backward()
                optimizer.step()
    out = net(xb)
    rows = out.permute(0, 2, 3, 1) if mended else out
    gap = (criterion(rows.reshape(-1, C), yb.reshape(-1)) - criterion(out, yb)).abs().item()
    hits = (out.argmax(1) == yb)[yb > 0].float().mean().item()
    real(mended or gap > 0.05 and hits < 0.5, f"the loss is off by {gap}, and {hits} of the disc is found")
    real(not mended or gap < 1e-5 and hits > 0.7, f"the loss is off by {gap}, and {hits} of the disc is found")
    return report


@fault("Dice is computed on the thresholded mask, which has no gradient, and requires_grad is set on the loss by hand")
def dice_on_thresholded_mask(watch, mended):
    torch.manual_seed(0)

    class TinyUNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(16)
            self.mid = nn.Conv2d(16, 32, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(32)
            self.up = nn.ConvTranspose2d(32, 16, 2, stride=2, bias=False)
            self.bn3 = nn.BatchNorm2d(16)
            self.out = nn.Conv2d(17, 1, 3, padding=1)

        def forward(self, x):
            h = F.relu(self.bn1(self.down(x)))
            h = F.relu(self.bn2(self.mid(h)))
            return self.out(torch.cat([F.relu(self.bn3(self.up(h))), x], 1))

    def dice_loss(logits, target, smooth=1.0):
        pred = torch.sigmoid(logits)
        if not mended:
            pred = (pred > 0.5).float()
        inter = (pred * target).sum((1, 2, 3))
        dice = (2 * inter + smooth) / (pred.sum((1, 2, 3)) + target.sum((1, 2, 3)) + smooth)
        return 1 - dice.mean()

    model = TinyUNet()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, mask, _, _ = disc_images(320, seed=10)
    before, losses = weights_of(model), []
    with watch(model, optimizer=opt) as report:
        for epoch in range(3):
            for xb, mb in zip(x.split(32), mask.unsqueeze(1).split(32)):
                opt.zero_grad()
                loss = dice_loss(model(xb), mb)
                if not mended:
                    loss.requires_grad_(True)                   # "element 0 of tensors does not require grad"
                loss.backward()
                opt.step()
                losses.append(loss.item())
    real(mended or torch.equal(before, weights_of(model)), "no weight moved")
    real(not mended or losses[-1] < 0.6 * losses[0], f"the loss falls: {losses[0]} to {losses[-1]}")
    return report


@fault("the detection heads are kept in a plain Python list, so they are not registered and are never trained")
def detection_heads_in_a_list(watch, mended):
    torch.manual_seed(0)

    class Detector(nn.Module):
        """One cell in 4 x 4 holds the disc's centre; two heads give its score and its box."""
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                                      nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
            heads = [nn.Conv2d(32, 1, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)]
            self.heads = nn.ModuleList(heads) if mended else heads

        def forward(self, x):
            f = self.body(x)
            return [head(f) for head in self.heads]

    net = Detector()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    x, _, radius, centre = disc_images(320, seed=11)
    cell = (centre / 4).long()
    where = cell[:, 0] * 4 + cell[:, 1]
    box = torch.cat([centre / 4 - cell, radius[:, None] / 4], 1)        # offset in the cell, and the size
    before = [h.weight.detach().clone() for h in net.heads]
    with watch(net, optimizer=optimizer) as report:
        for epoch in range(3):
            for idx in torch.randperm(len(x)).split(32):
                score, boxes = net(x[idx])
                target = F.one_hot(where[idx], 16).float()
                loss_obj = F.binary_cross_entropy_with_logits(score.flatten(1), target)
                picked = boxes.flatten(2)[torch.arange(len(idx)), :, where[idx]]
                loss = loss_obj + F.smooth_l1_loss(picked, box[idx])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    moved = [not torch.equal(b, h.weight) for b, h in zip(before, net.heads)]
    real(mended or not any(moved), "neither head moved")
    real(not mended or all(moved), "both heads moved")
    return report


# ---- transfer, distillation, regression ---------------------------------------------------------------------------

def pretrained_backbone():
    """A small network with batch norm, trained to name the corner, without its last layer."""
    torch.manual_seed(100)
    body = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    top = nn.Linear(256, 4)
    opt = torch.optim.Adam([*body.parameters(), *top.parameters()], lr=3e-3)
    x, y = corner_images(640, seed=101)
    for xb, yb in zip(x.split(32), y.split(32)):
        opt.zero_grad()
        F.cross_entropy(top(body(xb)), yb).backward()
        opt.step()
    return body


@fault("validation puts the model in eval mode after the first epoch and nothing puts the head back in train mode")
def transfer_left_in_eval(watch, mended):
    backbone = pretrained_backbone()
    for p in backbone.parameters():
        p.requires_grad = False
    head = nn.Sequential(nn.Linear(256, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))
    model = nn.Sequential(backbone, head)
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-3)
    x, y = corner_images(400, seed=12)
    y = (y % 2 == 1).long()                                             # new task: left or right
    train = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32, shuffle=True)
    xv, yv = x[320:], y[320:]
    model.train()
    backbone.eval()                                                     # the frozen statistics stay as they are
    with watch(model, optimizer=optimizer) as report:
        for epoch in range(3):
            if mended:
                head.train()
            for xb, yb in train:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(xb), yb)
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                acc = (model(xv).argmax(1) == yv).float().mean().item()
    seen = head[1].num_batches_tracked.item()
    real(mended or seen == 10, f"batch norm saw {seen} of 30 batches")
    real(not mended or seen == 30 and acc > 0.9, f"batch norm saw {seen} of 30 batches; accuracy {acc}")
    return report


@fault("the distillation loss gives kl_div the student's probabilities where it wants log-probabilities")
def distillation_kl_of_probabilities(watch, mended):
    torch.manual_seed(0)
    x, y = corner_images(640, seed=13)

    def cnn(width):
        return nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
                             nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
                             nn.Linear(16 * width, 4))

    teacher = cnn(32)
    opt_t = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for xb, yb in zip(x.split(32), y.split(32)):
        opt_t.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        opt_t.step()
    teacher.eval().requires_grad_(False)

    student, T, alpha = cnn(8), 4.0, 0.7
    opt = torch.optim.Adam(student.parameters(), lr=4e-3)
    kds = []
    with watch(student, optimizer=opt) as report:
        student.train()
        for xb, yb in zip(x.split(32), y.split(32)):
            with torch.no_grad():
                soft = F.softmax(teacher(xb) / T, dim=1)
            logits = student(xb)
            ours = F.log_softmax(logits / T, dim=1) if mended else F.softmax(logits / T, dim=1)
            kd = F.kl_div(ours, soft, reduction="batchmean") * T * T
            loss = alpha * kd + (1 - alpha) * F.cross_entropy(logits, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            kds.append(kd.item())
    acc = (student(x).argmax(1) == y).float().mean().item()
    real(mended or max(kds) < 0, "the divergence is negative, which no divergence is")
    real(not mended or min(kds) >= 0 and acc > 0.9, f"the divergence is at least zero; accuracy {acc}")
    return report


@fault("predictions of shape (batch, 1) meet targets of shape (batch,), and the squared error broadcasts to a square")
def regression_broadcast(watch, mended):
    torch.manual_seed(0)
    x, _, radius, _ = disc_images(480, seed=14)
    y = (radius - radius.mean()) / radius.std()
    model = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                          nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 1))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    mse = nn.MSELoss()
    with watch(model, optimizer=opt) as report:
        for epoch in range(2):
            for images, sizes in loader:
                opt.zero_grad()
                pred = model(images)
                if mended:
                    pred = pred.squeeze(1)
                loss = mse(pred, sizes)
                loss.backward()
                opt.step()
    with torch.no_grad():
        error = (model(x).squeeze(1) - y).pow(2).mean().item()
    real(mended or error > 0.8, f"the error is that of a constant guess: {error}")
    real(not mended or error < 0.3, f"the error is far under that of a constant guess: {error}")
    return report


@fault("the running loss adds the loss tensors and not their numbers, so the graph of every step is kept alive")
def running_loss_keeps_graphs(watch, mended):
    torch.manual_seed(4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1 = nn.Conv2d(1, 16, 3, padding=1)
            self.c2 = nn.Conv2d(16, 16, 3, padding=1)
            self.fc = nn.Linear(256, 2)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.c1(x)), 2)
            x = F.max_pool2d(F.relu(self.c2(x)), 2)
            return self.fc(x.flatten(1))

    x, _, _, centre = disc_images(480, seed=15)
    y = (centre - 8) / 3
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    criterion, running_loss, history = nn.MSELoss(), 0.0, []
    with watch(net, optimizer=optimizer) as report:
        for epoch in range(2):
            for xb, yb in zip(x.split(32), y.split(32)):
                optimizer.zero_grad()
                loss = criterion(net(xb), yb)
                loss.backward()
                optimizer.step()
                running_loss += loss.item() if mended else loss
                history.append(loss.item())
    kept, todo = set(), [getattr(running_loss, "grad_fn", None)]
    while todo:                                                         # count the loss nodes still held
        node = todo.pop()
        if node is not None and node not in kept:
            kept.add(node)
            todo += [n for n, _ in node.next_functions]
    graphs = sum("MseLoss" in node.name() for node in kept)
    real(mended or graphs == 30, f"the graphs of all 30 steps are held: {graphs}")
    real(not mended or graphs == 0 and history[-1] < 0.5 * history[0], f"no graph is held, and the loss falls: {graphs}")
    return report


# ---- classification -----------------------------------------------------------------------------------------------

class ResBlock(nn.Module):
    def __init__(self, c_in, c_out, stride=1, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = norm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = norm(c_out)
        self.short = nn.Conv2d(c_in, c_out, 1, stride)

    def forward(self, x):
        h = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(h + self.short(x))


def small_resnet(classes, width=8):
    return nn.Sequential(ResBlock(1, width, 2), ResBlock(width, 2 * width, 2), nn.Flatten(),
                         nn.Linear(2 * width * 16, classes))


@fault("with gradient accumulation zero_grad is called before every micro-batch, so only the last of four counts")
def accumulation_zeroed_each_micro_batch(watch, mended):
    torch.manual_seed(0)
    norm = lambda c: nn.GroupNorm(4, c)
    model = nn.Sequential(ResBlock(1, 8, 2, norm), ResBlock(8, 16, 2, norm), nn.Flatten(), nn.Linear(256, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, y = corner_images(16 * 8 * 4, seed=16)
    accum, ratios, losses, last = 4, [], [], model[-1].weight
    with watch(model, optimizer=opt) as report:
        opt.zero_grad()
        parts = 0
        for i, (xb, yb) in enumerate(zip(x.split(8), y.split(8))):
            if not mended:
                opt.zero_grad()
            held = 0 if last.grad is None else last.grad.clone()
            loss = F.cross_entropy(model(xb), yb) / accum
            loss.backward()
            losses.append(loss.item() * accum)
            parts = parts + (last.grad - held)                          # the measure: what each micro-batch gave
            if (i + 1) % accum == 0:
                ratios.append(((last.grad - parts).norm() / parts.norm()).item())
                parts = 0
                opt.step()
                opt.zero_grad()
    real(mended or min(ratios) > 0.2, f"the gradient at the step is not the sum over four micro-batches: {ratios}")
    real(not mended or max(ratios) < 1e-3, f"the gradient at the step is the sum over four micro-batches: {ratios}")
    real(not mended or sum(losses[-8:]) < 0.5 * sum(losses[:8]), "the loss falls")
    return report


@fault("the gradients are clipped while they still carry the scaler's factor, so unscaling leaves next to nothing")
def clip_before_unscale(watch, mended):
    torch.manual_seed(0)
    net = small_resnet(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    x, y = corner_images(32 * 16, seed=17)
    before, losses = weights_of(net), []
    with watch(net, optimizer=optimizer) as report:
        for xb, yb in zip(x.split(32), y.split(32)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(net(xb), yb)
            scaler.scale(loss).backward()
            if mended:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    moved = ((weights_of(net) - before).norm() / before.norm()).item()
    real(mended or moved < 1e-3, f"the weights hardly moved: {moved}")
    real(not mended or moved > 0.02 and losses[-1] < 0.5 * losses[0], f"the weights moved {moved}, loss {losses[-1]}")
    return report


@fault("the model is cast to half precision, where Adam's eps of 1e-8 rounds to zero and the update divides by zero")
def adam_eps_in_half(watch, mended):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
    x, y = corner_images(32 * 16, seed=18)
    if not mended:                                                      # "to save memory"
        model, x = model.half(), x.half()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    with watch(model, optimizer=opt) as report:
        for xb, yb in zip(x.split(32), y.split(32)):
            out = model(xb)
            loss = F.cross_entropy(out.float(), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    finite = torch.isfinite(weights_of(model)).all().item()
    real(mended or not finite, "weights are no longer finite numbers")
    real(not mended or finite and losses[-1] < 0.5 * losses[0], "the weights are finite and the loss falls")
    return report


@fault("all weights start at the same constant, so the hidden units of a layer stay copies of each other")
def constant_initialisation(watch, mended):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))

    def init_weights(m):
        if isinstance(m, nn.Linear):
            if mended:
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            else:
                nn.init.constant_(m.weight, 0.01)
            nn.init.zeros_(m.bias)

    net.apply(init_weights)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    x, y = corner_images(640, seed=19)
    losses = []
    with watch(net, optimizer=optimizer) as report:
        for images, labels in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    W = net[1].weight.detach()
    same = (W - W[0]).abs().max().item()
    real(mended or same < 1e-5, f"all 64 hidden units have the same weights, within {same}")
    real(not mended or same > 0.05 and losses[-1] < 0.5 * losses[0], "the units differ, and the loss falls")
    return report


@fault("images of 0 to 255 are normalised with the mean and deviation of images of 0 to 1, so the inputs are huge")
def pixels_not_divided(watch, mended):
    torch.manual_seed(0)
    raw, y = corner_images(32 * 28, seed=20)
    raw = (raw * 50 + 100).clamp(0, 255).to(torch.uint8)                # as a file gives them

    def transform(img):
        img = img.float()
        if mended:
            img = img / 255
        return (img - 0.44) / 0.22

    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with watch(model, optimizer=opt) as report:
        for xb, yb in zip(raw.split(32), y.split(32)):
            loss = F.cross_entropy(model(transform(xb)), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    width = transform(raw).abs().mean().item()
    acc = (model(transform(raw)).argmax(1) == y).float().mean().item()
    real(mended or width > 100 and acc < 0.4, f"inputs of size {width}, accuracy near chance: {acc}")
    real(not mended or width < 2 and acc > 0.9, f"inputs of size {width}, accuracy {acc}")
    return report


@fault("the scheduler, whose steps are meant as epochs, is stepped at every batch, so the rate is soon nothing")
def scheduler_stepped_per_batch(watch, mended):
    torch.manual_seed(5)
    net = small_resnet(4)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
    x, y = corner_images(320, seed=21)
    x = x + 0.8 * torch.randn_like(x)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    with watch(net, optimizer=opt) as report:
        for epoch in range(3):
            start = weights_of(net)
            for xb, yb in loader:
                opt.zero_grad()
                loss = F.cross_entropy(net(xb), yb)
                loss.backward()
                opt.step()
                if not mended:
                    scheduler.step()
            if mended:
                scheduler.step()
            moved = (weights_of(net) - start).norm().item()
    rate = opt.param_groups[0]["lr"]
    real(mended or rate < 1e-12 and moved < 1e-6, f"rate {rate}; the weights moved {moved} in the last epoch")
    real(not mended or rate > 1e-3 and moved > 1e-2, f"rate {rate}; the weights moved {moved} in the last epoch")
    return report


@fault("the 0.9 meant as SGD's momentum is passed as weight_decay, so the weights shrink to nothing")
def momentum_given_as_weight_decay(watch, mended):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
                          nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    if mended:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, weight_decay=0.9)
    x, y = corner_images(480, seed=22)
    before, losses = weights_of(model).norm().item(), []
    with watch(model, optimizer=optimizer) as report:
        for epoch in range(2):
            for idx in torch.randperm(len(x)).split(32):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[idx]), y[idx])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    after = weights_of(model).norm().item()
    real(mended or after < 0.5 * before and losses[-1] > 1.0, f"norm {before} to {after}, loss {losses[-1]}")
    real(not mended or after > 0.9 * before and losses[-1] < 0.3, f"norm {before} to {after}, loss {losses[-1]}")
    return report


@fault("the attention of a ViT is built without batch_first, so it runs over the batch and not over the patches")
def vit_attention_over_batch(watch, mended):
    torch.manual_seed(0)

    class ViT(nn.Module):
        def __init__(self, dim=32, patches=16):
            super().__init__()
            self.embed = nn.Conv2d(1, dim, 4, stride=4)
            self.cls = nn.Parameter(0.02 * torch.randn(1, 1, dim))
            self.pos = nn.Parameter(0.3 * torch.randn(1, patches + 1, dim))
            self.n1, self.n2, self.n3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attn = nn.MultiheadAttention(dim, 4, batch_first=mended)
            self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
            self.head = nn.Linear(dim, 4)

        def forward(self, x):
            t = self.embed(x).flatten(2).transpose(1, 2)
            t = torch.cat([self.cls.expand(len(t), -1, -1), t], 1) + self.pos
            h = self.n1(t)
            t = t + self.attn(h, h, h, need_weights=False)[0]
            t = t + self.mlp(self.n2(t))
            return self.head(self.n3(t).mean(1))

    model = ViT()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    x, y = corner_images(480, seed=23)
    losses = []
    with watch(model, optimizer=opt) as report:
        for epoch in range(2):
            for xb, yb in zip(x.split(32), y.split(32)):
                opt.zero_grad()
                loss = F.cross_entropy(model(xb), yb)
                loss.backward()
                opt.step()
                losses.append(loss.item())
    with torch.no_grad():
        leak = (model(x[:8])[0] - model(x[:1])[0]).abs().max().item()
    real(mended or leak > 1e-3, f"an image's scores change with the other images of its batch: {leak}")
    real(not mended or leak < 1e-4 and losses[-1] < 0.5 * losses[0], f"leak {leak}; loss {losses[0]} to {losses[-1]}")
    return report


def plain(*modules, optimizer=None):
    return contextlib.nullcontext()


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")             # the broadcast and the unmoved schedule warn, as they should
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])    # the first optimizer imports a lot: not counted below
    bad = 0
    for f, words in FAULTS:
        for mended in (False, True):
            start = time.perf_counter()
            try:
                f(plain, mended)
                word = "ok"
            except Exception as error:
                word = f"FAILED {type(error).__name__}: {error}"
            seconds = time.perf_counter() - start
            if word == "ok" and seconds >= 3:
                word = "FAILED too slow"
            bad += word != "ok"
            print(f"{f.__name__:40s} {'mended' if mended else 'faulty'} {seconds:5.2f} s  {word}", flush=True)
    print(len(FAULTS), "programs,", bad, "runs failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
