"""Twenty-two small programs of research code, each with one bug that people often make, and a mended twin, by somebody
who had not seen the checks.

See step_programs.py. They are kept as they were written.
"""
# ruff: noqa

import contextlib
import copy
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)


# ---------------------------------------------------------------- shared helpers (synthetic data, probes)


@contextlib.contextmanager
def untouched(*modules):
    """Evaluation that leaves no trace: modes and random state are put back."""
    modes = [(m, m.training) for top in modules for m in top.modules()]
    state, pystate = torch.get_rng_state(), random.getstate()
    for top in modules:
        top.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode
        torch.set_rng_state(state)
        random.setstate(pystate)


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


def grid16():
    y, x = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    return x, y


def blob_images(n, seed):
    """n pictures 1x16x16 in [0, 1]: a soft ring or disc of random place and size."""
    g = torch.Generator().manual_seed(seed)
    x, y = grid16()
    c = (torch.rand(n, 2, generator=g) - 0.5) * 0.8
    r = 0.25 + 0.35 * torch.rand(n, generator=g)
    ring = (torch.rand(n, generator=g) < 0.5).float()
    d = ((x[None] - c[:, 0, None, None]) ** 2 + (y[None] - c[:, 1, None, None]) ** 2).sqrt()
    disc = torch.sigmoid((r[:, None, None] - d) * 14)
    hole = torch.sigmoid((0.55 * r[:, None, None] - d) * 14) * ring[:, None, None]
    return (disc - hole).clamp(0, 1).unsqueeze(1)


def sliced_distance(a, b, seed=7, n_proj=64):
    """Sliced Wasserstein-1 distance of two equally large samples."""
    a, b = a.flatten(1), b.flatten(1)
    g = torch.Generator().manual_seed(seed)
    p = F.normalize(torch.randn(a.size(1), n_proj, generator=g), dim=0)
    return (torch.sort(a @ p, dim=0)[0] - torch.sort(b @ p, dim=0)[0]).abs().mean().item()


def shape_classes(n, seed, n_classes=6):
    """n pictures 3x16x16 in [0, 1]; class = stripe pattern, nuisance = colour, phase, brightness."""
    g = torch.Generator().manual_seed(seed)
    x, y = grid16()
    label = torch.randint(0, n_classes, (n,), generator=g)
    ang = label.float() * math.pi / n_classes
    ph = torch.rand(n, generator=g) * 2 * math.pi
    u = x[None] * torch.cos(ang)[:, None, None] + y[None] * torch.sin(ang)[:, None, None]
    s = 0.5 + 0.5 * torch.sin(7.0 * u + ph[:, None, None])
    fg, bg = torch.rand(n, 3, 1, 1, generator=g), torch.rand(n, 3, 1, 1, generator=g)
    img = s[:, None] * fg + (1 - s[:, None]) * bg
    img = img + 0.03 * torch.randn(n, 3, 16, 16, generator=g)
    return img.clamp(0, 1), label


def knn_error(train_x, train_y, test_x, test_y, k=5):
    a, b = F.normalize(train_x, dim=1), F.normalize(test_x, dim=1)
    idx = (b @ a.t()).nan_to_num(0.0).topk(k, dim=1)[1]
    votes = F.one_hot(train_y[idx], int(train_y.max()) + 1).sum(1)
    return (votes.argmax(1) != test_y).float().mean().item()


class ReplayBuffer:
    def __init__(self, capacity, seed):
        self.data, self.capacity, self.rng = [], capacity, random.Random(seed)

    def __len__(self):
        return len(self.data)

    def push(self, *transition):
        if len(self.data) >= self.capacity:
            self.data.pop(0)
        self.data.append(transition)

    def sample(self, n):
        return zip(*self.rng.sample(self.data, n))


class CartPole:
    """The classic cart-pole; an episode ends when the pole falls, or is cut off after max_steps."""

    def __init__(self, seed, max_steps=200):
        self.rng, self.max_steps = random.Random(seed), max_steps

    def reset(self):
        self.s, self.t = [self.rng.uniform(-0.05, 0.05) for _ in range(4)], 0
        return list(self.s)

    def step(self, action):
        x, xd, th, thd = self.s
        force = 10.0 if action == 1 else -10.0
        cos, sin = math.cos(th), math.sin(th)
        tmp = (force + 0.05 * thd**2 * sin) / 1.1
        tacc = (9.8 * sin - cos * tmp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        xacc = tmp - 0.05 * tacc * cos / 1.1
        self.s = [x + 0.02 * xd, xd + 0.02 * xacc, th + 0.02 * thd, thd + 0.02 * tacc]
        self.t += 1
        terminated = abs(self.s[0]) > 2.4 or abs(self.s[2]) > 12 * math.pi / 180
        return list(self.s), 1.0, terminated, self.t >= self.max_steps


class ReachEnv:
    """Vectorised point mass: drive the position to the goal. Observation = (offset to the goal, velocity)."""

    def __init__(self, n, seed, horizon=32):
        self.n, self.horizon, self.g = n, horizon, torch.Generator().manual_seed(seed)

    def reset(self):
        self.off = torch.rand(self.n, 2, generator=self.g) * 2 - 1
        self.vel = torch.zeros(self.n, 2)
        self.t = 0
        return torch.cat([self.off, self.vel], 1)

    def step(self, action):
        a = action.clamp(-1, 1)
        self.vel = 0.8 * self.vel + 0.1 * a
        self.off = (self.off + self.vel).clamp(-2, 2)
        self.t += 1
        reward = -self.off.norm(dim=1) - 0.02 * (a**2).sum(1)
        return torch.cat([self.off, self.vel], 1), reward, self.t >= self.horizon


def reach_cost(policy, seed=123, n=64):
    """Mean cost per step (= minus mean reward) of a deterministic policy."""
    env = ReachEnv(n, seed)
    obs, done, total = env.reset(), False, 0.0
    while not done:
        obs, rew, done = env.step(policy(obs))
        total -= rew.mean().item()
    return total / env.horizon


CASES = [
    {
        "name": "dcgan_generator_on_detached_fake",
        "what": "In the generator update the discriminator is again fed fake.detach() (copied from the discriminator update), so the generator gets no gradient and never learns.",
        "steps": 600,
    },
    {
        "name": "wgan_gp_critic_grads_never_zeroed",
        "what": "The critic's gradients are never zeroed before its backward, so gradients of all earlier critic and generator updates pile up in every critic step.",
        "steps": 500,
    },
    {
        "name": "vae_recon_mean_kl_sum",
        "what": "The reconstruction loss is averaged over all pixels while the KL term is summed over the latent dimensions, so the KL outweighs it by the number of pixels and the posterior collapses.",
        "steps": 500,
    },
    {
        "name": "ddpm_noise_drawn_twice",
        "what": "q_sample is called without the noise, so it draws its own; the network is then trained to predict another, independent noise tensor.",
        "steps": 400,
    },
    {
        "name": "realnvp_couplings_in_python_list",
        "what": "The coupling layers are kept in a plain Python list instead of an nn.ModuleList, so they are not registered and model.parameters() gives the optimizer only the base distribution.",
        "steps": 600,
    },
    {
        "name": "dqn_no_done_mask",
        "what": "The TD target bootstraps from the next state even when the episode has terminated (the factor 1 - done is missing), so falling costs nothing and all values run to the same limit.",
        "steps": 1500,
    },
    {
        "name": "ppo_ratio_times_advantage_broadcast",
        "what": "log_prob summed over the action dimensions has shape [B] while the advantages have shape [B, 1]; ratio * advantage broadcasts to [B, B], so each action is credited with everybody's (zero-mean) advantages.",
        "steps": 120,
    },
    {
        "name": "sac_action_by_sample_not_rsample",
        "what": "The actor draws its action with dist.sample() instead of dist.rsample(), so no gradient of Q flows through the action into the actor.",
        "steps": 600,
    },
    {
        "name": "simclr_same_view_twice",
        "what": "The dataset augments a picture once and returns that one tensor as both views, so the positive pair is identical and the contrastive task teaches no invariance.",
        "steps": 300,
    },
    {
        "name": "simsiam_no_stop_gradient",
        "what": "The target branch z is not detached in the negative cosine similarity, so without the stop-gradient both branches are pulled together and the representation collapses.",
        "steps": 600,
    },
    {
        "name": "batch_hard_triplet_sqrt_at_zero",
        "what": "The pairwise Euclidean distance takes sqrt of exact zeros (the diagonal) without an epsilon; the infinite gradient times zero turns all weights to NaN in the first backward.",
        "steps": 200,
    },
    {
        "name": "gnn_edge_list_viewed_not_transposed",
        "what": "The list of (source, target) pairs is turned into edge_index with .view(2, -1) instead of .t(), which scrambles the end points: the network passes messages over a random graph.",
        "steps": 300,
    },
    {
        "name": "pinn_second_derivative_without_create_graph",
        "what": "The second derivative is taken with retain_graph=True instead of create_graph=True, so the PDE residual carries no gradient to the network and only the boundary loss is trained.",
        "steps": 1500,
    },
    {
        "name": "neural_ode_scheduler_stepped_per_batch",
        "what": "scheduler.step() is called after every batch although the ExponentialLR decay is meant for epochs, so the learning rate has all but vanished within a few epochs.",
        "steps": 400,
    },
    {
        "name": "siren_default_linear_init",
        "what": "The sine layers (omega_0 = 30) keep nn.Linear's default initialisation instead of SIREN's uniform(+-sqrt(6/n)/omega_0), so the hidden pre-activations are an order of magnitude too large and the function is noise between the samples.",
        "steps": 500,
    },
    {
        "name": "mdn_density_without_log_sigma",
        "what": "The Gaussian log-density of the mixture leaves out -log(sigma), so the loss is lowered simply by blowing up all sigmas and the means are not learned.",
        "steps": 600,
    },
    {
        "name": "dann_reversal_layer_without_minus",
        "what": "The gradient reversal layer's backward returns +lambda * grad instead of -lambda * grad, so the features are trained to tell the domains apart instead of being made domain-invariant.",
        "steps": 500,
    },
    {
        "name": "set_pooling_padding_mask_inverted",
        "what": "key_padding_mask is given True for the real elements, but nn.MultiheadAttention ignores positions that are True: the pooling attends only to the padding.",
        "steps": 300,
    },
    {
        "name": "arcface_head_not_in_optimizer",
        "what": "The ArcFace head owns the class-centre weights, but the optimizer is built from the backbone's parameters only, so the centres stay at their random initial places.",
        "steps": 300,
    },
    {
        "name": "amp_clip_without_unscale",
        "what": "Gradients are clipped while still multiplied by GradScaler's loss scale (scaler.unscale_ is missing), so after unscaling the update is tens of thousands of times too small.",
        "steps": 400,
    },
    {
        "name": "mc_dropout_eval_never_back_to_train",
        "what": "model.train() is called once before the loop; the validation after each epoch calls model.eval() and never switches back, so from the second epoch on the network trains without dropout.",
        "steps": 600,
    },
    {
        "name": "pointnet_sorted_by_class_not_shuffled",
        "what": "The clouds are stored class by class and the training DataLoader has shuffle=False, so every batch holds a single class and the network keeps forgetting the others.",
        "steps": 320,
    },
]

PROBE_WORDS = {  # what each probe measures (lower is better)
    "dcgan_generator_on_detached_fake": "sliced Wasserstein distance between generated and held-out pictures",
    "wgan_gp_critic_grads_never_zeroed": "sliced Wasserstein distance between generated and held-out points",
    "vae_recon_mean_kl_sum": "squared error per picture (x256 pixels) of reconstructions of held-out pictures",
    "ddpm_noise_drawn_twice": "mean squared error of the predicted noise on held-out pictures",
    "realnvp_couplings_in_python_list": "negative log-likelihood (nats) of held-out points",
    "dqn_no_done_mask": "200 minus the mean greedy episode length on CartPole",
    "ppo_ratio_times_advantage_broadcast": "mean cost per step of the deterministic policy in fresh episodes",
    "sac_action_by_sample_not_rsample": "mean cost per step of the deterministic policy in fresh episodes",
    "simclr_same_view_twice": "5-nearest-neighbour error of the encoder features on held-out pictures",
    "simsiam_no_stop_gradient": "5-nearest-neighbour error of the encoder features on held-out rows",
    "batch_hard_triplet_sqrt_at_zero": "5-nearest-neighbour error of the embedding on held-out series",
    "gnn_edge_list_viewed_not_transposed": "mean squared error on held-out graphs (targets have unit variance)",
    "pinn_second_derivative_without_create_graph": "relative L2 error against the exact solution",
    "neural_ode_scheduler_stepped_per_batch": "mean squared error of predicted held-out trajectories",
    "siren_default_linear_init": "root mean squared error on held-out pixels",
    "mdn_density_without_log_sigma": "CRPS of samples from the predicted density on held-out points",
    "dann_reversal_layer_without_minus": "error rate on held-out target-domain rows",
    "set_pooling_padding_mask_inverted": "mean squared error on held-out sets (targets have unit variance)",
    "arcface_head_not_in_optimizer": "error rate of the nearest class centre on held-out pictures",
    "amp_clip_without_unscale": "mean squared error (x1000) of held-out upscaled pictures",
    "mc_dropout_eval_never_back_to_train": "mean squared error of the MC-dropout predictive mean on held-out rows",
    "pointnet_sorted_by_class_not_shuffled": "error rate on held-out clouds",
}


def dcgan_generator_on_detached_fake_bad():
    torch.manual_seed(0)
    nz, ngf, ndf, lr, beta1 = 16, 16, 16, 2e-4, 0.5

    def weights_init(m):
        name = m.__class__.__name__
        if name.find("Conv") != -1:
            nn.init.normal_(m.weight.data, 0.0, 0.02)
        elif name.find("BatchNorm") != -1:
            nn.init.normal_(m.weight.data, 1.0, 0.02)
            nn.init.constant_(m.bias.data, 0)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
                nn.BatchNorm2d(ngf * 4),
                nn.ReLU(True),
                nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(ngf * 2),
                nn.ReLU(True),
                nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1),
                nn.Tanh(),
            )

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, ndf, 4, 2, 1),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(ndf * 2),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(ndf * 2, 1, 4, 1, 0),
            )

        def forward(self, x):
            return self.main(x).view(-1)

    images = blob_images(1024, seed=1) * 2 - 1
    heldout = blob_images(256, seed=2) * 2 - 1
    loader = cycle(DataLoader(TensorDataset(images), batch_size=32, shuffle=True, drop_last=True))

    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))

    def step(i):
        (real,) = next(loader)
        b = real.size(0)
        real_label, fake_label = torch.ones(b), torch.zeros(b)

        # (1) update D: maximise log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        errD_real = criterion(netD(real), real_label)
        errD_real.backward()
        noise = torch.randn(b, nz, 1, 1)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) update G: maximise log(D(G(z)))
        netG.zero_grad()
        output = netD(fake.detach())
        errG = criterion(output, real_label)
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        with untouched(netG, netD):
            z = torch.randn(256, nz, 1, 1, generator=torch.Generator().manual_seed(5))
            return sliced_distance(netG(z), heldout)

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def dcgan_generator_on_detached_fake_good():
    torch.manual_seed(0)
    nz, ngf, ndf, lr, beta1 = 16, 16, 16, 2e-4, 0.5

    def weights_init(m):
        name = m.__class__.__name__
        if name.find("Conv") != -1:
            nn.init.normal_(m.weight.data, 0.0, 0.02)
        elif name.find("BatchNorm") != -1:
            nn.init.normal_(m.weight.data, 1.0, 0.02)
            nn.init.constant_(m.bias.data, 0)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
                nn.BatchNorm2d(ngf * 4),
                nn.ReLU(True),
                nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(ngf * 2),
                nn.ReLU(True),
                nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1),
                nn.Tanh(),
            )

        def forward(self, z):
            return self.main(z)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, ndf, 4, 2, 1),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
                nn.BatchNorm2d(ndf * 2),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Conv2d(ndf * 2, 1, 4, 1, 0),
            )

        def forward(self, x):
            return self.main(x).view(-1)

    images = blob_images(1024, seed=1) * 2 - 1
    heldout = blob_images(256, seed=2) * 2 - 1
    loader = cycle(DataLoader(TensorDataset(images), batch_size=32, shuffle=True, drop_last=True))

    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))

    def step(i):
        (real,) = next(loader)
        b = real.size(0)
        real_label, fake_label = torch.ones(b), torch.zeros(b)

        # (1) update D: maximise log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        errD_real = criterion(netD(real), real_label)
        errD_real.backward()
        noise = torch.randn(b, nz, 1, 1)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), fake_label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) update G: maximise log(D(G(z)))
        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, real_label)
        errG.backward()
        optimizerG.step()
        return errD.item() + errG.item()

    def probe():
        with untouched(netG, netD):
            z = torch.randn(256, nz, 1, 1, generator=torch.Generator().manual_seed(5))
            return sliced_distance(netG(z), heldout)

    return {
        "model": {"G": netG, "D": netD},
        "optimizer": (optimizerD, optimizerG),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def wgan_gp_critic_grads_never_zeroed_bad():
    torch.manual_seed(0)
    latent_dim, n_critic, lambda_gp = 8, 5, 1.0

    def eight_gaussians(n, seed):
        g = torch.Generator().manual_seed(seed)
        k = torch.randint(0, 8, (n,), generator=g).float() * math.pi / 4
        centers = torch.stack([k.cos(), k.sin()], 1) * 1.4
        return centers + 0.1 * torch.randn(n, 2, generator=g)

    class MLP(nn.Module):
        def __init__(self, d_in, d_out, width=64):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(d_in, width),
                nn.LeakyReLU(0.2),
                nn.Linear(width, width),
                nn.LeakyReLU(0.2),
                nn.Linear(width, d_out),
            )

        def forward(self, x):
            return self.net(x)

    generator, critic = MLP(latent_dim, 2), MLP(2, 1)
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_D = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))

    data, heldout = eight_gaussians(4096, 1), eight_gaussians(1024, 2)
    loader = cycle(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))

    def compute_gradient_penalty(D, real, fake):
        alpha = torch.rand(real.size(0), 1)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        d_interpolates = D(interpolates)
        gradients = torch.autograd.grad(
            outputs=d_interpolates,
            inputs=interpolates,
            grad_outputs=torch.ones_like(d_interpolates),
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )[0]
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(n_critic):
            (real,) = next(loader)
            z = torch.randn(real.size(0), latent_dim)
            fake = generator(z).detach()
            gp = compute_gradient_penalty(critic, real, fake)
            d_loss = -critic(real).mean() + critic(fake).mean() + lambda_gp * gp
            d_loss.backward()
            optimizer_D.step()

        optimizer_G.zero_grad()
        z = torch.randn(128, latent_dim)
        g_loss = -critic(generator(z)).mean()
        g_loss.backward()
        optimizer_G.step()
        return d_loss.item()

    def probe():
        with untouched(generator, critic):
            z = torch.randn(1024, latent_dim, generator=torch.Generator().manual_seed(5))
            return sliced_distance(generator(z), heldout)

    return {
        "model": (generator, critic),
        "optimizer": (optimizer_G, optimizer_D),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def wgan_gp_critic_grads_never_zeroed_good():
    torch.manual_seed(0)
    latent_dim, n_critic, lambda_gp = 8, 5, 1.0

    def eight_gaussians(n, seed):
        g = torch.Generator().manual_seed(seed)
        k = torch.randint(0, 8, (n,), generator=g).float() * math.pi / 4
        centers = torch.stack([k.cos(), k.sin()], 1) * 1.4
        return centers + 0.1 * torch.randn(n, 2, generator=g)

    class MLP(nn.Module):
        def __init__(self, d_in, d_out, width=64):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(d_in, width),
                nn.LeakyReLU(0.2),
                nn.Linear(width, width),
                nn.LeakyReLU(0.2),
                nn.Linear(width, d_out),
            )

        def forward(self, x):
            return self.net(x)

    generator, critic = MLP(latent_dim, 2), MLP(2, 1)
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_D = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))

    data, heldout = eight_gaussians(4096, 1), eight_gaussians(1024, 2)
    loader = cycle(DataLoader(TensorDataset(data), batch_size=128, shuffle=True, drop_last=True))

    def compute_gradient_penalty(D, real, fake):
        alpha = torch.rand(real.size(0), 1)
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        d_interpolates = D(interpolates)
        gradients = torch.autograd.grad(
            outputs=d_interpolates,
            inputs=interpolates,
            grad_outputs=torch.ones_like(d_interpolates),
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )[0]
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    def step(i):
        for _ in range(n_critic):
            (real,) = next(loader)
            z = torch.randn(real.size(0), latent_dim)
            fake = generator(z).detach()
            gp = compute_gradient_penalty(critic, real, fake)
            d_loss = -critic(real).mean() + critic(fake).mean() + lambda_gp * gp
            optimizer_D.zero_grad()
            d_loss.backward()
            optimizer_D.step()

        optimizer_G.zero_grad()
        z = torch.randn(128, latent_dim)
        g_loss = -critic(generator(z)).mean()
        g_loss.backward()
        optimizer_G.step()
        return d_loss.item()

    def probe():
        with untouched(generator, critic):
            z = torch.randn(1024, latent_dim, generator=torch.Generator().manual_seed(5))
            return sliced_distance(generator(z), heldout)

    return {
        "model": (generator, critic),
        "optimizer": (optimizer_G, optimizer_D),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def vae_recon_mean_kl_sum_bad():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, d=256, hidden=128, latent=8):
            super().__init__()
            self.fc1 = nn.Linear(d, hidden)
            self.fc21 = nn.Linear(hidden, latent)
            self.fc22 = nn.Linear(hidden, latent)
            self.fc3 = nn.Linear(latent, hidden)
            self.fc4 = nn.Linear(hidden, d)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return mu + eps * std

        def decode(self, z):
            h3 = F.relu(self.fc3(z))
            return torch.sigmoid(self.fc4(h3))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        x = x.view(-1, 256)
        bce = F.binary_cross_entropy(recon_x, x)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    train_loader = cycle(
        DataLoader(TensorDataset(blob_images(2048, seed=1)), batch_size=64, shuffle=True, drop_last=True)
    )
    heldout = blob_images(256, seed=2)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (data,) = next(train_loader)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            mu, _ = model.encode(heldout.view(-1, 256))
            return (model.decode(mu) - heldout.view(-1, 256)).pow(2).sum(1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def vae_recon_mean_kl_sum_good():
    torch.manual_seed(0)

    class VAE(nn.Module):
        def __init__(self, d=256, hidden=128, latent=8):
            super().__init__()
            self.fc1 = nn.Linear(d, hidden)
            self.fc21 = nn.Linear(hidden, latent)
            self.fc22 = nn.Linear(hidden, latent)
            self.fc3 = nn.Linear(latent, hidden)
            self.fc4 = nn.Linear(hidden, d)

        def encode(self, x):
            h1 = F.relu(self.fc1(x))
            return self.fc21(h1), self.fc22(h1)

        def reparameterize(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return mu + eps * std

        def decode(self, z):
            h3 = F.relu(self.fc3(z))
            return torch.sigmoid(self.fc4(h3))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 256))
            z = self.reparameterize(mu, logvar)
            return self.decode(z), mu, logvar

    def loss_function(recon_x, x, mu, logvar):
        x = x.view(-1, 256)
        bce = F.binary_cross_entropy(recon_x, x, reduction="sum") / x.size(0)
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1).mean()
        return bce + kld

    train_loader = cycle(
        DataLoader(TensorDataset(blob_images(2048, seed=1)), batch_size=64, shuffle=True, drop_last=True)
    )
    heldout = blob_images(256, seed=2)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        (data,) = next(train_loader)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            mu, _ = model.encode(heldout.view(-1, 256))
            return (model.decode(mu) - heldout.view(-1, 256)).pow(2).sum(1).mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_noise_drawn_twice_bad():
    torch.manual_seed(0)
    timesteps = 100
    betas = torch.linspace(1e-3, 0.1, timesteps)
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
    sqrt_alphas_cumprod = torch.sqrt(alphas_cumprod)
    sqrt_one_minus_alphas_cumprod = torch.sqrt(1.0 - alphas_cumprod)

    def extract(a, t, x_shape):
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))

    def q_sample(x_start, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x_start)
        return (
            extract(sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    class SinusoidalPositionEmbeddings(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, time):
            half = self.dim // 2
            freqs = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
            ang = time[:, None].float() * freqs[None, :]
            return torch.cat((ang.sin(), ang.cos()), dim=-1)

    class Block(nn.Module):
        def __init__(self, c_in, c_out, emb):
            super().__init__()
            self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
            self.norm1 = nn.GroupNorm(4, c_out)
            self.time = nn.Linear(emb, c_out)
            self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
            self.norm2 = nn.GroupNorm(4, c_out)

        def forward(self, x, emb):
            h = F.silu(self.norm1(self.conv1(x)))
            h = h + self.time(emb)[:, :, None, None]
            return F.silu(self.norm2(self.conv2(h)))

    class SmallUNet(nn.Module):
        def __init__(self, c=8, emb=32):
            super().__init__()
            self.time_mlp = nn.Sequential(
                SinusoidalPositionEmbeddings(emb), nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb)
            )
            self.down1 = Block(1, c, emb)
            self.down2 = Block(c, 2 * c, emb)
            self.up1 = Block(3 * c, c, emb)
            self.out = nn.Conv2d(c, 1, 1)

        def forward(self, x, t):
            emb = self.time_mlp(t)
            h1 = self.down1(x, emb)
            h2 = self.down2(F.avg_pool2d(h1, 2), emb)
            up = F.interpolate(h2, scale_factor=2, mode="nearest")
            return self.out(self.up1(torch.cat([up, h1], dim=1), emb))

    dataset = TensorDataset(blob_images(1024, seed=1) * 2 - 1)
    loader = cycle(DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True))
    heldout = blob_images(128, seed=2) * 2 - 1
    model = SmallUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def p_losses(denoise_model, x_start, t):
        noise = torch.randn_like(x_start)
        x_noisy = q_sample(x_start, t)
        predicted_noise = denoise_model(x_noisy, t)
        return F.mse_loss(predicted_noise, noise)

    def step(i):
        (batch,) = next(loader)
        optimizer.zero_grad()
        t = torch.randint(0, timesteps, (batch.shape[0],)).long()
        loss = p_losses(model, batch, t)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            g = torch.Generator().manual_seed(5)
            t = torch.randint(0, timesteps, (heldout.size(0),), generator=g)
            noise = torch.randn(heldout.shape, generator=g)
            return F.mse_loss(model(q_sample(heldout, t, noise), t), noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ddpm_noise_drawn_twice_good():
    torch.manual_seed(0)
    timesteps = 100
    betas = torch.linspace(1e-3, 0.1, timesteps)
    alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
    sqrt_alphas_cumprod = torch.sqrt(alphas_cumprod)
    sqrt_one_minus_alphas_cumprod = torch.sqrt(1.0 - alphas_cumprod)

    def extract(a, t, x_shape):
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))

    def q_sample(x_start, t, noise=None):
        if noise is None:
            noise = torch.randn_like(x_start)
        return (
            extract(sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    class SinusoidalPositionEmbeddings(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.dim = dim

        def forward(self, time):
            half = self.dim // 2
            freqs = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
            ang = time[:, None].float() * freqs[None, :]
            return torch.cat((ang.sin(), ang.cos()), dim=-1)

    class Block(nn.Module):
        def __init__(self, c_in, c_out, emb):
            super().__init__()
            self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
            self.norm1 = nn.GroupNorm(4, c_out)
            self.time = nn.Linear(emb, c_out)
            self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
            self.norm2 = nn.GroupNorm(4, c_out)

        def forward(self, x, emb):
            h = F.silu(self.norm1(self.conv1(x)))
            h = h + self.time(emb)[:, :, None, None]
            return F.silu(self.norm2(self.conv2(h)))

    class SmallUNet(nn.Module):
        def __init__(self, c=8, emb=32):
            super().__init__()
            self.time_mlp = nn.Sequential(
                SinusoidalPositionEmbeddings(emb), nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb)
            )
            self.down1 = Block(1, c, emb)
            self.down2 = Block(c, 2 * c, emb)
            self.up1 = Block(3 * c, c, emb)
            self.out = nn.Conv2d(c, 1, 1)

        def forward(self, x, t):
            emb = self.time_mlp(t)
            h1 = self.down1(x, emb)
            h2 = self.down2(F.avg_pool2d(h1, 2), emb)
            up = F.interpolate(h2, scale_factor=2, mode="nearest")
            return self.out(self.up1(torch.cat([up, h1], dim=1), emb))

    dataset = TensorDataset(blob_images(1024, seed=1) * 2 - 1)
    loader = cycle(DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True))
    heldout = blob_images(128, seed=2) * 2 - 1
    model = SmallUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def p_losses(denoise_model, x_start, t):
        noise = torch.randn_like(x_start)
        x_noisy = q_sample(x_start, t, noise)
        predicted_noise = denoise_model(x_noisy, t)
        return F.mse_loss(predicted_noise, noise)

    def step(i):
        (batch,) = next(loader)
        optimizer.zero_grad()
        t = torch.randint(0, timesteps, (batch.shape[0],)).long()
        loss = p_losses(model, batch, t)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            g = torch.Generator().manual_seed(5)
            t = torch.randint(0, timesteps, (heldout.size(0),), generator=g)
            noise = torch.randn(heldout.shape, generator=g)
            return F.mse_loss(model(q_sample(heldout, t, noise), t), noise).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_couplings_in_python_list_bad():
    torch.manual_seed(0)

    def two_moons(n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.rand(n, generator=g) * math.pi
        up = (torch.rand(n, generator=g) < 0.5).float()
        x = up * t.cos() + (1 - up) * (1 - t.cos())
        y = up * t.sin() + (1 - up) * (0.5 - t.sin())
        return torch.stack([x, y], 1) + 0.08 * torch.randn(n, 2, generator=g)

    class AffineCoupling(nn.Module):
        def __init__(self, flip, hidden=64):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(
                nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
            )

        def forward(self, x):
            a, b = x[:, :1], x[:, 1:]
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            b = b * s.exp() + t
            out = torch.cat([b, a] if self.flip else [a, b], dim=1)
            return out, s.sum(dim=1)

    class RealNVP(nn.Module):
        def __init__(self, n_layers=6):
            super().__init__()
            self.loc = nn.Parameter(torch.zeros(2))
            self.log_scale = nn.Parameter(torch.zeros(2))
            self.layers = [AffineCoupling(flip=bool(k % 2)) for k in range(n_layers)]

        def log_prob(self, x):
            log_det = torch.zeros(x.size(0))
            for layer in self.layers:
                x, ld = layer(x)
                log_det = log_det + ld
            base = torch.distributions.Normal(self.loc, self.log_scale.exp())
            return base.log_prob(x).sum(dim=1) + log_det

    train_x, test_x = two_moons(4096, 1), two_moons(1024, 2)
    mean, std = train_x.mean(0), train_x.std(0)
    train_x, test_x = (train_x - mean) / std, (test_x - mean) / std
    loader = cycle(DataLoader(TensorDataset(train_x), batch_size=128, shuffle=True, drop_last=True))

    flow = RealNVP()
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    def step(i):
        (x,) = next(loader)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(flow):
            return -flow.log_prob(test_x).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def realnvp_couplings_in_python_list_good():
    torch.manual_seed(0)

    def two_moons(n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.rand(n, generator=g) * math.pi
        up = (torch.rand(n, generator=g) < 0.5).float()
        x = up * t.cos() + (1 - up) * (1 - t.cos())
        y = up * t.sin() + (1 - up) * (0.5 - t.sin())
        return torch.stack([x, y], 1) + 0.08 * torch.randn(n, 2, generator=g)

    class AffineCoupling(nn.Module):
        def __init__(self, flip, hidden=64):
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(
                nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
            )

        def forward(self, x):
            a, b = x[:, :1], x[:, 1:]
            if self.flip:
                a, b = b, a
            s, t = self.net(a).chunk(2, dim=1)
            s = torch.tanh(s)
            b = b * s.exp() + t
            out = torch.cat([b, a] if self.flip else [a, b], dim=1)
            return out, s.sum(dim=1)

    class RealNVP(nn.Module):
        def __init__(self, n_layers=6):
            super().__init__()
            self.loc = nn.Parameter(torch.zeros(2))
            self.log_scale = nn.Parameter(torch.zeros(2))
            self.layers = nn.ModuleList([AffineCoupling(flip=bool(k % 2)) for k in range(n_layers)])

        def log_prob(self, x):
            log_det = torch.zeros(x.size(0))
            for layer in self.layers:
                x, ld = layer(x)
                log_det = log_det + ld
            base = torch.distributions.Normal(self.loc, self.log_scale.exp())
            return base.log_prob(x).sum(dim=1) + log_det

    train_x, test_x = two_moons(4096, 1), two_moons(1024, 2)
    mean, std = train_x.mean(0), train_x.std(0)
    train_x, test_x = (train_x - mean) / std, (test_x - mean) / std
    loader = cycle(DataLoader(TensorDataset(train_x), batch_size=128, shuffle=True, drop_last=True))

    flow = RealNVP()
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-3)

    def step(i):
        (x,) = next(loader)
        loss = -flow.log_prob(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(flow):
            return -flow.log_prob(test_x).mean().item()

    return {"model": flow, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_no_done_mask_bad():
    torch.manual_seed(0)
    GAMMA, BATCH_SIZE, TAU, LR = 0.98, 64, 0.01, 1e-3
    rng = random.Random(0)

    class QNetwork(nn.Module):
        def __init__(self, n_obs=4, n_actions=2):
            super().__init__()
            self.layer1 = nn.Linear(n_obs, 64)
            self.layer2 = nn.Linear(64, 64)
            self.layer3 = nn.Linear(64, n_actions)

        def forward(self, x):
            x = F.relu(self.layer1(x))
            x = F.relu(self.layer2(x))
            return self.layer3(x)

    env = CartPole(seed=0)
    memory = ReplayBuffer(20000, seed=0)
    policy_net, target_net = QNetwork(), QNetwork()
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=LR)
    cur = {"state": env.reset(), "n": 0}

    def select_action(state):
        eps = 0.05 + 0.95 * math.exp(-cur["n"] / 1500.0)
        cur["n"] += 1
        if rng.random() < eps:
            return rng.randrange(2)
        with torch.no_grad():
            return int(policy_net(torch.tensor(state).unsqueeze(0)).argmax(1))

    def interact(action):
        nxt, reward, terminated, truncated = env.step(action)
        memory.push(cur["state"], action, reward, nxt, float(terminated))
        cur["state"] = env.reset() if terminated or truncated else nxt

    for _ in range(500):
        interact(rng.randrange(2))

    def step(i):
        for _ in range(4):
            interact(select_action(cur["state"]))

        states, actions, rewards, next_states, dones = memory.sample(BATCH_SIZE)
        states, next_states = torch.tensor(states), torch.tensor(next_states)
        actions = torch.tensor(actions).unsqueeze(1)
        rewards, dones = torch.tensor(rewards), torch.tensor(dones)

        q = policy_net(states).gather(1, actions).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_states).max(1)[0]
        target = rewards + GAMMA * next_q
        loss = F.smooth_l1_loss(q, target)

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for tp, p in zip(target_net.parameters(), policy_net.parameters()):
                tp.mul_(1 - TAU).add_(TAU * p)
        return loss.item()

    def probe():
        with untouched(policy_net, target_net):
            test_env, total = CartPole(seed=77), 0
            for _ in range(20):
                s, done = test_env.reset(), False
                while not done:
                    s, r, term, trunc = test_env.step(int(policy_net(torch.tensor([s])).argmax(1)))
                    total, done = total + 1, term or trunc
            return 200.0 - total / 20

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dqn_no_done_mask_good():
    torch.manual_seed(0)
    GAMMA, BATCH_SIZE, TAU, LR = 0.98, 64, 0.01, 1e-3
    rng = random.Random(0)

    class QNetwork(nn.Module):
        def __init__(self, n_obs=4, n_actions=2):
            super().__init__()
            self.layer1 = nn.Linear(n_obs, 64)
            self.layer2 = nn.Linear(64, 64)
            self.layer3 = nn.Linear(64, n_actions)

        def forward(self, x):
            x = F.relu(self.layer1(x))
            x = F.relu(self.layer2(x))
            return self.layer3(x)

    env = CartPole(seed=0)
    memory = ReplayBuffer(20000, seed=0)
    policy_net, target_net = QNetwork(), QNetwork()
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.Adam(policy_net.parameters(), lr=LR)
    cur = {"state": env.reset(), "n": 0}

    def select_action(state):
        eps = 0.05 + 0.95 * math.exp(-cur["n"] / 1500.0)
        cur["n"] += 1
        if rng.random() < eps:
            return rng.randrange(2)
        with torch.no_grad():
            return int(policy_net(torch.tensor(state).unsqueeze(0)).argmax(1))

    def interact(action):
        nxt, reward, terminated, truncated = env.step(action)
        memory.push(cur["state"], action, reward, nxt, float(terminated))
        cur["state"] = env.reset() if terminated or truncated else nxt

    for _ in range(500):
        interact(rng.randrange(2))

    def step(i):
        for _ in range(4):
            interact(select_action(cur["state"]))

        states, actions, rewards, next_states, dones = memory.sample(BATCH_SIZE)
        states, next_states = torch.tensor(states), torch.tensor(next_states)
        actions = torch.tensor(actions).unsqueeze(1)
        rewards, dones = torch.tensor(rewards), torch.tensor(dones)

        q = policy_net(states).gather(1, actions).squeeze(1)
        with torch.no_grad():
            next_q = target_net(next_states).max(1)[0]
        target = rewards + GAMMA * next_q * (1 - dones)
        loss = F.smooth_l1_loss(q, target)

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy_net.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            for tp, p in zip(target_net.parameters(), policy_net.parameters()):
                tp.mul_(1 - TAU).add_(TAU * p)
        return loss.item()

    def probe():
        with untouched(policy_net, target_net):
            test_env, total = CartPole(seed=77), 0
            for _ in range(20):
                s, done = test_env.reset(), False
                while not done:
                    s, r, term, trunc = test_env.step(int(policy_net(torch.tensor([s])).argmax(1)))
                    total, done = total + 1, term or trunc
            return 200.0 - total / 20

    return {"model": policy_net, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ppo_ratio_times_advantage_broadcast_bad():
    torch.manual_seed(0)
    gamma, lam, clip_eps, epochs, minibatch, horizon, n_envs = 0.95, 0.95, 0.2, 4, 160, 20, 16

    def layer_init(layer, std=math.sqrt(2)):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.constant_(layer.bias, 0.0)
        return layer

    class Agent(nn.Module):
        def __init__(self, obs_dim=4, act_dim=2):
            super().__init__()
            self.critic = nn.Sequential(
                layer_init(nn.Linear(obs_dim, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 1), std=1.0),
            )
            self.actor_mean = nn.Sequential(
                layer_init(nn.Linear(obs_dim, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, act_dim), std=0.01),
            )
            self.actor_logstd = nn.Parameter(torch.full((1, act_dim), -0.5))

        def get_dist(self, obs):
            mean = self.actor_mean(obs)
            return torch.distributions.Normal(mean, self.actor_logstd.expand_as(mean).exp())

        def evaluate(self, obs, action):
            dist = self.get_dist(obs)
            log_prob = dist.log_prob(action).sum(-1)
            return log_prob, dist.entropy().sum(-1), self.critic(obs)

    env = ReachEnv(n_envs, seed=3, horizon=horizon)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)

    @torch.no_grad()
    def collect():
        obs_buf, act_buf, logp_buf, rew_buf, val_buf = [], [], [], [], []
        obs, done = env.reset(), False
        while not done:
            action = agent.get_dist(obs).sample()
            logp, _, value = agent.evaluate(obs, action)
            nxt, reward, done = env.step(action)
            obs_buf.append(obs)
            act_buf.append(action)
            logp_buf.append(logp)
            rew_buf.append(0.2 * reward.unsqueeze(1))
            val_buf.append(value)
            obs = nxt
        next_value = agent.critic(obs)  # episodes are cut off by time: bootstrap
        advantages, gae = [None] * len(rew_buf), 0.0
        for t in reversed(range(len(rew_buf))):
            delta = rew_buf[t] + gamma * next_value - val_buf[t]
            gae = delta + gamma * lam * gae
            advantages[t] = gae
            next_value = val_buf[t]
        adv, val = torch.cat(advantages), torch.cat(val_buf)
        return torch.cat(obs_buf), torch.cat(act_buf), torch.cat(logp_buf), adv, adv + val

    def step(i):
        obs, actions, old_logp, adv, returns = collect()
        losses = []
        for _ in range(epochs):
            perm = torch.randperm(obs.size(0))
            for start in range(0, obs.size(0), minibatch):
                mb = perm[start : start + minibatch]
                logp, entropy, value = agent.evaluate(obs[mb], actions[mb])
                mb_adv = adv[mb]
                mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
                ratio = (logp - old_logp[mb]).exp()
                surr1 = ratio * mb_adv
                surr2 = ratio.clamp(1 - clip_eps, 1 + clip_eps) * mb_adv
                policy_loss = -torch.min(surr1, surr2).mean()
                value_loss = F.mse_loss(value, returns[mb])
                loss = policy_loss + 0.5 * value_loss - 0.001 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)

    def probe():
        with untouched(agent):
            return reach_cost(agent.actor_mean)

    return {"model": agent, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def ppo_ratio_times_advantage_broadcast_good():
    torch.manual_seed(0)
    gamma, lam, clip_eps, epochs, minibatch, horizon, n_envs = 0.95, 0.95, 0.2, 4, 160, 20, 16

    def layer_init(layer, std=math.sqrt(2)):
        nn.init.orthogonal_(layer.weight, std)
        nn.init.constant_(layer.bias, 0.0)
        return layer

    class Agent(nn.Module):
        def __init__(self, obs_dim=4, act_dim=2):
            super().__init__()
            self.critic = nn.Sequential(
                layer_init(nn.Linear(obs_dim, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 1), std=1.0),
            )
            self.actor_mean = nn.Sequential(
                layer_init(nn.Linear(obs_dim, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, 64)),
                nn.Tanh(),
                layer_init(nn.Linear(64, act_dim), std=0.01),
            )
            self.actor_logstd = nn.Parameter(torch.full((1, act_dim), -0.5))

        def get_dist(self, obs):
            mean = self.actor_mean(obs)
            return torch.distributions.Normal(mean, self.actor_logstd.expand_as(mean).exp())

        def evaluate(self, obs, action):
            dist = self.get_dist(obs)
            log_prob = dist.log_prob(action).sum(-1, keepdim=True)
            return log_prob, dist.entropy().sum(-1), self.critic(obs)

    env = ReachEnv(n_envs, seed=3, horizon=horizon)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)

    @torch.no_grad()
    def collect():
        obs_buf, act_buf, logp_buf, rew_buf, val_buf = [], [], [], [], []
        obs, done = env.reset(), False
        while not done:
            action = agent.get_dist(obs).sample()
            logp, _, value = agent.evaluate(obs, action)
            nxt, reward, done = env.step(action)
            obs_buf.append(obs)
            act_buf.append(action)
            logp_buf.append(logp)
            rew_buf.append(0.2 * reward.unsqueeze(1))
            val_buf.append(value)
            obs = nxt
        next_value = agent.critic(obs)  # episodes are cut off by time: bootstrap
        advantages, gae = [None] * len(rew_buf), 0.0
        for t in reversed(range(len(rew_buf))):
            delta = rew_buf[t] + gamma * next_value - val_buf[t]
            gae = delta + gamma * lam * gae
            advantages[t] = gae
            next_value = val_buf[t]
        adv, val = torch.cat(advantages), torch.cat(val_buf)
        return torch.cat(obs_buf), torch.cat(act_buf), torch.cat(logp_buf), adv, adv + val

    def step(i):
        obs, actions, old_logp, adv, returns = collect()
        losses = []
        for _ in range(epochs):
            perm = torch.randperm(obs.size(0))
            for start in range(0, obs.size(0), minibatch):
                mb = perm[start : start + minibatch]
                logp, entropy, value = agent.evaluate(obs[mb], actions[mb])
                mb_adv = adv[mb]
                mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
                ratio = (logp - old_logp[mb]).exp()
                surr1 = ratio * mb_adv
                surr2 = ratio.clamp(1 - clip_eps, 1 + clip_eps) * mb_adv
                policy_loss = -torch.min(surr1, surr2).mean()
                value_loss = F.mse_loss(value, returns[mb])
                loss = policy_loss + 0.5 * value_loss - 0.001 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)

    def probe():
        with untouched(agent):
            return reach_cost(agent.actor_mean)

    return {"model": agent, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def sac_action_by_sample_not_rsample_bad():
    torch.manual_seed(0)
    gamma, tau, alpha, batch_size = 0.95, 0.01, 0.02, 128

    class Actor(nn.Module):
        def __init__(self, obs_dim=4, act_dim=2, hidden=64):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.mu = nn.Linear(hidden, act_dim)
            self.log_std = nn.Linear(hidden, act_dim)

        def forward(self, obs):
            h = self.trunk(obs)
            return self.mu(h), self.log_std(h).clamp(-5, 2)

        def sample(self, obs):
            mu, log_std = self(obs)
            dist = torch.distributions.Normal(mu, log_std.exp())
            u = dist.sample()
            action = torch.tanh(u)
            log_prob = dist.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
            return action, log_prob.sum(-1)

    class QNet(nn.Module):
        def __init__(self, obs_dim=4, act_dim=2, hidden=64):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(obs_dim + act_dim, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Linear(hidden, 1),
            )

        def forward(self, obs, act):
            return self.net(torch.cat([obs, act], dim=-1)).squeeze(-1)

    env = ReachEnv(8, seed=3)
    memory = ReplayBuffer(4000, seed=0)  # one entry holds a row for each of the 8 environments
    actor, q1, q2 = Actor(), QNet(), QNet()
    q1_target, q2_target = copy.deepcopy(q1), copy.deepcopy(q2)
    for p in list(q1_target.parameters()) + list(q2_target.parameters()):
        p.requires_grad_(False)
    q_optimizer = torch.optim.Adam(list(q1.parameters()) + list(q2.parameters()), lr=1e-3)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    cur = {"obs": env.reset()}

    @torch.no_grad()
    def interact(explore):
        obs = cur["obs"]
        action = torch.rand(8, 2) * 2 - 1 if explore else actor.sample(obs)[0]
        nxt, reward, timeout = env.step(action)
        memory.push(obs, action, reward, nxt)  # episodes end by time only, so there is no terminal flag
        cur["obs"] = env.reset() if timeout else nxt

    for _ in range(64):
        interact(explore=True)

    def step(i):
        interact(explore=False)
        obs, act, rew, nxt = (torch.cat(x) for x in memory.sample(batch_size // 8))

        with torch.no_grad():
            next_act, next_logp = actor.sample(nxt)
            q_next = torch.min(q1_target(nxt, next_act), q2_target(nxt, next_act)) - alpha * next_logp
            target = rew + gamma * q_next
        q_loss = F.mse_loss(q1(obs, act), target) + F.mse_loss(q2(obs, act), target)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        new_act, logp = actor.sample(obs)
        actor_loss = (alpha * logp - torch.min(q1(obs, new_act), q2(obs, new_act))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        with torch.no_grad():
            for net, tgt in ((q1, q1_target), (q2, q2_target)):
                for p, tp in zip(net.parameters(), tgt.parameters()):
                    tp.lerp_(p, tau)
        return q_loss.item() + actor_loss.item()

    def probe():
        with untouched(actor, q1, q2):
            return reach_cost(lambda o: torch.tanh(actor(o)[0]))

    return {
        "model": {"actor": actor, "q1": q1, "q2": q2},
        "optimizer": (q_optimizer, actor_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def sac_action_by_sample_not_rsample_good():
    torch.manual_seed(0)
    gamma, tau, alpha, batch_size = 0.95, 0.01, 0.02, 128

    class Actor(nn.Module):
        def __init__(self, obs_dim=4, act_dim=2, hidden=64):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
            self.mu = nn.Linear(hidden, act_dim)
            self.log_std = nn.Linear(hidden, act_dim)

        def forward(self, obs):
            h = self.trunk(obs)
            return self.mu(h), self.log_std(h).clamp(-5, 2)

        def sample(self, obs):
            mu, log_std = self(obs)
            dist = torch.distributions.Normal(mu, log_std.exp())
            u = dist.rsample()
            action = torch.tanh(u)
            log_prob = dist.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))
            return action, log_prob.sum(-1)

    class QNet(nn.Module):
        def __init__(self, obs_dim=4, act_dim=2, hidden=64):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(obs_dim + act_dim, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Linear(hidden, 1),
            )

        def forward(self, obs, act):
            return self.net(torch.cat([obs, act], dim=-1)).squeeze(-1)

    env = ReachEnv(8, seed=3)
    memory = ReplayBuffer(4000, seed=0)  # one entry holds a row for each of the 8 environments
    actor, q1, q2 = Actor(), QNet(), QNet()
    q1_target, q2_target = copy.deepcopy(q1), copy.deepcopy(q2)
    for p in list(q1_target.parameters()) + list(q2_target.parameters()):
        p.requires_grad_(False)
    q_optimizer = torch.optim.Adam(list(q1.parameters()) + list(q2.parameters()), lr=1e-3)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    cur = {"obs": env.reset()}

    @torch.no_grad()
    def interact(explore):
        obs = cur["obs"]
        action = torch.rand(8, 2) * 2 - 1 if explore else actor.sample(obs)[0]
        nxt, reward, timeout = env.step(action)
        memory.push(obs, action, reward, nxt)  # episodes end by time only, so there is no terminal flag
        cur["obs"] = env.reset() if timeout else nxt

    for _ in range(64):
        interact(explore=True)

    def step(i):
        interact(explore=False)
        obs, act, rew, nxt = (torch.cat(x) for x in memory.sample(batch_size // 8))

        with torch.no_grad():
            next_act, next_logp = actor.sample(nxt)
            q_next = torch.min(q1_target(nxt, next_act), q2_target(nxt, next_act)) - alpha * next_logp
            target = rew + gamma * q_next
        q_loss = F.mse_loss(q1(obs, act), target) + F.mse_loss(q2(obs, act), target)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        new_act, logp = actor.sample(obs)
        actor_loss = (alpha * logp - torch.min(q1(obs, new_act), q2(obs, new_act))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        with torch.no_grad():
            for net, tgt in ((q1, q1_target), (q2, q2_target)):
                for p, tp in zip(net.parameters(), tgt.parameters()):
                    tp.lerp_(p, tau)
        return q_loss.item() + actor_loss.item()

    def probe():
        with untouched(actor, q1, q2):
            return reach_cost(lambda o: torch.tanh(actor(o)[0]))

    return {
        "model": {"actor": actor, "q1": q1, "q2": q2},
        "optimizer": (q_optimizer, actor_optimizer),
        "steps": 20,
        "step": step,
        "probe": probe,
    }


def simclr_same_view_twice_bad():
    torch.manual_seed(0)
    temperature = 0.2

    class RandomAugment:
        def __call__(self, img):
            dy, dx = int(torch.randint(-4, 5, ())), int(torch.randint(-4, 5, ()))
            img = torch.roll(img, (dy, dx), dims=(1, 2))
            img = img[torch.randperm(3)]
            gain = 0.5 + torch.rand(3, 1, 1)
            bias = (torch.rand(3, 1, 1) - 0.5) * 0.8
            img = (img - 0.5) * gain + 0.5 + bias
            if torch.rand(()) < 0.5:
                img = 1 - img
            return (img + 0.03 * torch.randn_like(img) - 0.5) / 0.3

    class ContrastiveDataset(Dataset):
        def __init__(self, images, transform):
            self.images, self.transform = images, transform

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            view1 = self.transform(self.images[idx])
            view2 = view1
            return view1, view2

    class Encoder(nn.Module):
        def __init__(self, dim=64):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, dim, 3, padding=1, bias=False),
                nn.BatchNorm2d(dim),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            self.projector = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            h = self.features(x)
            return h, self.projector(h)

    def nt_xent(z1, z2):
        n = z1.size(0)
        z = F.normalize(torch.cat([z1, z2], dim=0), dim=1)
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(0, n)])
        return F.cross_entropy(sim, target)

    images, _ = shape_classes(1024, seed=1)
    bank_x, bank_y = shape_classes(512, seed=2)
    test_x, test_y = shape_classes(256, seed=3)
    loader = cycle(DataLoader(ContrastiveDataset(images, RandomAugment()), batch_size=64, shuffle=True, drop_last=True))
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)

    def step(i):
        model.train()
        x1, x2 = next(loader)
        _, z = model(torch.cat([x1, x2]))
        loss = nt_xent(*z.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            a, b = model((bank_x - 0.5) / 0.3)[0], model((test_x - 0.5) / 0.3)[0]
            return knn_error(a, bank_y, b, test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simclr_same_view_twice_good():
    torch.manual_seed(0)
    temperature = 0.2

    class RandomAugment:
        def __call__(self, img):
            dy, dx = int(torch.randint(-4, 5, ())), int(torch.randint(-4, 5, ()))
            img = torch.roll(img, (dy, dx), dims=(1, 2))
            img = img[torch.randperm(3)]
            gain = 0.5 + torch.rand(3, 1, 1)
            bias = (torch.rand(3, 1, 1) - 0.5) * 0.8
            img = (img - 0.5) * gain + 0.5 + bias
            if torch.rand(()) < 0.5:
                img = 1 - img
            return (img + 0.03 * torch.randn_like(img) - 0.5) / 0.3

    class ContrastiveDataset(Dataset):
        def __init__(self, images, transform):
            self.images, self.transform = images, transform

        def __len__(self):
            return len(self.images)

        def __getitem__(self, idx):
            view1 = self.transform(self.images[idx])
            view2 = self.transform(self.images[idx])
            return view1, view2

    class Encoder(nn.Module):
        def __init__(self, dim=64):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, dim, 3, padding=1, bias=False),
                nn.BatchNorm2d(dim),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            self.projector = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x):
            h = self.features(x)
            return h, self.projector(h)

    def nt_xent(z1, z2):
        n = z1.size(0)
        z = F.normalize(torch.cat([z1, z2], dim=0), dim=1)
        sim = z @ z.t() / temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(0, n)])
        return F.cross_entropy(sim, target)

    images, _ = shape_classes(1024, seed=1)
    bank_x, bank_y = shape_classes(512, seed=2)
    test_x, test_y = shape_classes(256, seed=3)
    loader = cycle(DataLoader(ContrastiveDataset(images, RandomAugment()), batch_size=64, shuffle=True, drop_last=True))
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)

    def step(i):
        model.train()
        x1, x2 = next(loader)
        _, z = model(torch.cat([x1, x2]))
        loss = nt_xent(*z.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            a, b = model((bank_x - 0.5) / 0.3)[0], model((test_x - 0.5) / 0.3)[0]
            return knn_error(a, bank_y, b, test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_no_stop_gradient_bad():
    torch.manual_seed(0)

    def rows(n, seed, d=64, k=10):
        """A table of d noisy columns driven by an 8-dimensional latent with k clusters."""
        gp = torch.Generator().manual_seed(99)
        centers, mix = torch.randn(k, 8, generator=gp), torch.randn(8, d, generator=gp) / math.sqrt(8)
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, k, (n,), generator=g)
        z = centers[y] + 0.35 * torch.randn(n, 8, generator=g)
        return torch.tanh(z @ mix) + torch.randn(n, d, generator=g), y

    def augment(x, mask_rate=0.5, sigma=0.3):
        keep = (torch.rand_like(x) > mask_rate).float()
        return x * keep + sigma * torch.randn_like(x)

    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(64, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
            )
            self.projector = nn.Sequential(
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim),
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False),
                nn.BatchNorm1d(pred_dim),
                nn.ReLU(inplace=True),
                nn.Linear(pred_dim, dim),
            )

        def forward(self, x1, x2):
            z1, z2 = self.projector(self.encoder(x1)), self.projector(self.encoder(x2))
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1, z2

    train_x, _ = rows(4096, seed=1)
    bank_x, bank_y = rows(512, seed=2)
    test_x, test_y = rows(512, seed=3)
    mean, std = train_x.mean(0), train_x.std(0)
    train_x, bank_x, test_x = ((v - mean) / std for v in (train_x, bank_x, test_x))
    loader = cycle(DataLoader(TensorDataset(train_x), batch_size=128, shuffle=True, drop_last=True))
    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        (x,) = next(loader)
        p1, p2, z1, z2 = model(augment(x), augment(x))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return knn_error(model.encoder(bank_x), bank_y, model.encoder(test_x), test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def simsiam_no_stop_gradient_good():
    torch.manual_seed(0)

    def rows(n, seed, d=64, k=10):
        """A table of d noisy columns driven by an 8-dimensional latent with k clusters."""
        gp = torch.Generator().manual_seed(99)
        centers, mix = torch.randn(k, 8, generator=gp), torch.randn(8, d, generator=gp) / math.sqrt(8)
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, k, (n,), generator=g)
        z = centers[y] + 0.35 * torch.randn(n, 8, generator=g)
        return torch.tanh(z @ mix) + torch.randn(n, d, generator=g), y

    def augment(x, mask_rate=0.5, sigma=0.3):
        keep = (torch.rand_like(x) > mask_rate).float()
        return x * keep + sigma * torch.randn_like(x)

    class SimSiam(nn.Module):
        def __init__(self, dim=64, pred_dim=16):
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(64, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
            )
            self.projector = nn.Sequential(
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim),
                nn.ReLU(inplace=True),
                nn.Linear(dim, dim, bias=False),
                nn.BatchNorm1d(dim),
            )
            self.predictor = nn.Sequential(
                nn.Linear(dim, pred_dim, bias=False),
                nn.BatchNorm1d(pred_dim),
                nn.ReLU(inplace=True),
                nn.Linear(pred_dim, dim),
            )

        def forward(self, x1, x2):
            z1, z2 = self.projector(self.encoder(x1)), self.projector(self.encoder(x2))
            p1, p2 = self.predictor(z1), self.predictor(z2)
            return p1, p2, z1.detach(), z2.detach()

    train_x, _ = rows(4096, seed=1)
    bank_x, bank_y = rows(512, seed=2)
    test_x, test_y = rows(512, seed=3)
    mean, std = train_x.mean(0), train_x.std(0)
    train_x, bank_x, test_x = ((v - mean) / std for v in (train_x, bank_x, test_x))
    loader = cycle(DataLoader(TensorDataset(train_x), batch_size=128, shuffle=True, drop_last=True))
    model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(i):
        model.train()
        (x,) = next(loader)
        p1, p2, z1, z2 = model(augment(x), augment(x))
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return knn_error(model.encoder(bank_x), bank_y, model.encoder(test_x), test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def batch_hard_triplet_sqrt_at_zero_bad():
    torch.manual_seed(0)
    margin, P, K, n_classes = 0.3, 8, 8, 8

    def series_classes(n_per_class, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 1, 48)
        xs, ys = [], []
        for c in range(n_classes):
            f = 2.0 + 0.6 * c
            ph = torch.rand(n_per_class, 1, generator=g) * 2 * math.pi
            amp = 0.7 + 0.6 * torch.rand(n_per_class, 1, generator=g)
            x = amp * torch.sin(2 * math.pi * f * t[None] + ph) + 0.6 * torch.randn(n_per_class, 48, generator=g)
            xs.append(x)
            ys.append(torch.full((n_per_class,), c))
        return torch.cat(xs).unsqueeze(1), torch.cat(ys)

    def pairwise_distances(emb):
        dot = emb @ emb.t()
        sq = dot.diagonal()
        d2 = (sq[:, None] - 2 * dot + sq[None, :]).clamp(min=0)
        return d2.sqrt()

    def batch_hard_triplet_loss(emb, labels):
        dist = pairwise_distances(emb)
        same = labels[:, None] == labels[None, :]
        mask_pos = same & ~torch.eye(len(labels), dtype=torch.bool)
        hardest_pos = (dist * mask_pos.float()).max(dim=1)[0]
        hardest_neg = (dist + dist.max().detach() * same.float()).min(dim=1)[0]
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    class Embedder(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(1, 32, 7, padding=3),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.MaxPool1d(2),
                nn.Conv1d(32, 64, 5, padding=2),
                nn.BatchNorm1d(64),
                nn.ReLU(),
                nn.AdaptiveAvgPool1d(1),
            )
            self.fc = nn.Linear(64, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x).flatten(1)), dim=1)

    train_x, train_y = series_classes(100, seed=1)
    test_x, test_y = series_classes(40, seed=2)
    by_class = [torch.where(train_y == c)[0] for c in range(n_classes)]

    def pk_batch():
        idx = []
        for c in torch.randperm(n_classes)[:P].tolist():
            pool = by_class[c]
            idx.append(pool[torch.randperm(len(pool))[:K]])
        idx = torch.cat(idx)
        return train_x[idx], train_y[idx]

    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = pk_batch()
        loss = batch_hard_triplet_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return knn_error(model(train_x), train_y, model(test_x), test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def batch_hard_triplet_sqrt_at_zero_good():
    torch.manual_seed(0)
    margin, P, K, n_classes = 0.3, 8, 8, 8

    def series_classes(n_per_class, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 1, 48)
        xs, ys = [], []
        for c in range(n_classes):
            f = 2.0 + 0.6 * c
            ph = torch.rand(n_per_class, 1, generator=g) * 2 * math.pi
            amp = 0.7 + 0.6 * torch.rand(n_per_class, 1, generator=g)
            x = amp * torch.sin(2 * math.pi * f * t[None] + ph) + 0.6 * torch.randn(n_per_class, 48, generator=g)
            xs.append(x)
            ys.append(torch.full((n_per_class,), c))
        return torch.cat(xs).unsqueeze(1), torch.cat(ys)

    def pairwise_distances(emb):
        dot = emb @ emb.t()
        sq = dot.diagonal()
        d2 = (sq[:, None] - 2 * dot + sq[None, :]).clamp(min=0)
        return (d2 + 1e-12).sqrt()

    def batch_hard_triplet_loss(emb, labels):
        dist = pairwise_distances(emb)
        same = labels[:, None] == labels[None, :]
        mask_pos = same & ~torch.eye(len(labels), dtype=torch.bool)
        hardest_pos = (dist * mask_pos.float()).max(dim=1)[0]
        hardest_neg = (dist + dist.max().detach() * same.float()).min(dim=1)[0]
        return F.relu(hardest_pos - hardest_neg + margin).mean()

    class Embedder(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.conv = nn.Sequential(
                nn.Conv1d(1, 32, 7, padding=3),
                nn.BatchNorm1d(32),
                nn.ReLU(),
                nn.MaxPool1d(2),
                nn.Conv1d(32, 64, 5, padding=2),
                nn.BatchNorm1d(64),
                nn.ReLU(),
                nn.AdaptiveAvgPool1d(1),
            )
            self.fc = nn.Linear(64, dim)

        def forward(self, x):
            return F.normalize(self.fc(self.conv(x).flatten(1)), dim=1)

    train_x, train_y = series_classes(100, seed=1)
    test_x, test_y = series_classes(40, seed=2)
    by_class = [torch.where(train_y == c)[0] for c in range(n_classes)]

    def pk_batch():
        idx = []
        for c in torch.randperm(n_classes)[:P].tolist():
            pool = by_class[c]
            idx.append(pool[torch.randperm(len(pool))[:K]])
        idx = torch.cat(idx)
        return train_x[idx], train_y[idx]

    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = pk_batch()
        loss = batch_hard_triplet_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return knn_error(model(train_x), train_y, model(test_x), test_y)

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_edge_list_viewed_not_transposed_bad():
    torch.manual_seed(0)

    def random_graphs(n, seed):
        rng = random.Random(seed)
        graphs = []
        for _ in range(n):
            n_nodes = rng.randint(8, 14)
            kind = [rng.randint(0, 2) for _ in range(n_nodes)]
            edges = []
            for v in range(1, n_nodes):
                edges.append((rng.randint(max(0, v - 4), v - 1), v))
            for _ in range(n_nodes // 3):
                u, v = rng.sample(range(n_nodes), 2)
                if (u, v) not in edges and (v, u) not in edges:
                    edges.append((u, v))
            y = sum(1.0 if kind[u] == kind[v] else 0.0 for u, v in edges) / len(edges)
            both = [e for u, v in edges for e in ((u, v), (v, u))]
            graphs.append((kind, both, y))
        return graphs

    class MoleculeLikeDataset(Dataset):
        def __init__(self, graphs, y_mean, y_std):
            self.graphs, self.y_mean, self.y_std = graphs, y_mean, y_std

        def __len__(self):
            return len(self.graphs)

        def __getitem__(self, idx):
            kind, edges, y = self.graphs[idx]
            x = F.one_hot(torch.tensor(kind), 3).float()
            edge_index = torch.tensor(edges, dtype=torch.long).view(2, -1)
            return x, edge_index, (y - self.y_mean) / self.y_std

    def collate(items):
        xs, eis, batch, ys, offset = [], [], [], [], 0
        for k, (x, ei, y) in enumerate(items):
            xs.append(x)
            eis.append(ei + offset)
            batch.append(torch.full((x.size(0),), k))
            ys.append(y)
            offset += x.size(0)
        return torch.cat(xs), torch.cat(eis, dim=1), torch.cat(batch), torch.tensor(ys)

    class GINConv(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.eps = nn.Parameter(torch.zeros(1))
            self.mlp = nn.Sequential(nn.Linear(d_in, d_out), nn.BatchNorm1d(d_out), nn.ReLU(), nn.Linear(d_out, d_out))

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x).index_add(0, dst, x[src])
            return self.mlp((1 + self.eps) * x + agg)

    class GIN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.conv1 = GINConv(3, hidden)
            self.conv2 = GINConv(hidden, hidden)
            self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

        def forward(self, x, edge_index, batch, n_graphs):
            h = F.relu(self.conv1(x, edge_index))
            h = F.relu(self.conv2(h, edge_index))
            count = torch.zeros(n_graphs).index_add(0, batch, torch.ones(batch.size(0)))
            pooled = torch.zeros(n_graphs, h.size(1)).index_add(0, batch, h) / count[:, None]
            return self.head(pooled).squeeze(-1)

    train_graphs, test_graphs = random_graphs(1024, seed=1), random_graphs(256, seed=2)
    ys = torch.tensor([g[2] for g in train_graphs])
    y_mean, y_std = ys.mean().item(), ys.std().item()
    train_loader = cycle(
        DataLoader(
            MoleculeLikeDataset(train_graphs, y_mean, y_std),
            batch_size=32,
            shuffle=True,
            drop_last=True,
            collate_fn=collate,
        )
    )
    test_set = MoleculeLikeDataset(test_graphs, y_mean, y_std)
    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x, edge_index, batch, y = next(train_loader)
        optimizer.zero_grad()
        out = model(x, edge_index, batch, y.size(0))
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x, edge_index, batch, y = collate([test_set[k] for k in range(len(test_set))])
            return F.mse_loss(model(x, edge_index, batch, y.size(0)), y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def gnn_edge_list_viewed_not_transposed_good():
    torch.manual_seed(0)

    def random_graphs(n, seed):
        rng = random.Random(seed)
        graphs = []
        for _ in range(n):
            n_nodes = rng.randint(8, 14)
            kind = [rng.randint(0, 2) for _ in range(n_nodes)]
            edges = []
            for v in range(1, n_nodes):
                edges.append((rng.randint(max(0, v - 4), v - 1), v))
            for _ in range(n_nodes // 3):
                u, v = rng.sample(range(n_nodes), 2)
                if (u, v) not in edges and (v, u) not in edges:
                    edges.append((u, v))
            y = sum(1.0 if kind[u] == kind[v] else 0.0 for u, v in edges) / len(edges)
            both = [e for u, v in edges for e in ((u, v), (v, u))]
            graphs.append((kind, both, y))
        return graphs

    class MoleculeLikeDataset(Dataset):
        def __init__(self, graphs, y_mean, y_std):
            self.graphs, self.y_mean, self.y_std = graphs, y_mean, y_std

        def __len__(self):
            return len(self.graphs)

        def __getitem__(self, idx):
            kind, edges, y = self.graphs[idx]
            x = F.one_hot(torch.tensor(kind), 3).float()
            edge_index = torch.tensor(edges, dtype=torch.long).t().contiguous()
            return x, edge_index, (y - self.y_mean) / self.y_std

    def collate(items):
        xs, eis, batch, ys, offset = [], [], [], [], 0
        for k, (x, ei, y) in enumerate(items):
            xs.append(x)
            eis.append(ei + offset)
            batch.append(torch.full((x.size(0),), k))
            ys.append(y)
            offset += x.size(0)
        return torch.cat(xs), torch.cat(eis, dim=1), torch.cat(batch), torch.tensor(ys)

    class GINConv(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.eps = nn.Parameter(torch.zeros(1))
            self.mlp = nn.Sequential(nn.Linear(d_in, d_out), nn.BatchNorm1d(d_out), nn.ReLU(), nn.Linear(d_out, d_out))

        def forward(self, x, edge_index):
            src, dst = edge_index
            agg = torch.zeros_like(x).index_add(0, dst, x[src])
            return self.mlp((1 + self.eps) * x + agg)

    class GIN(nn.Module):
        def __init__(self, hidden=32):
            super().__init__()
            self.conv1 = GINConv(3, hidden)
            self.conv2 = GINConv(hidden, hidden)
            self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

        def forward(self, x, edge_index, batch, n_graphs):
            h = F.relu(self.conv1(x, edge_index))
            h = F.relu(self.conv2(h, edge_index))
            count = torch.zeros(n_graphs).index_add(0, batch, torch.ones(batch.size(0)))
            pooled = torch.zeros(n_graphs, h.size(1)).index_add(0, batch, h) / count[:, None]
            return self.head(pooled).squeeze(-1)

    train_graphs, test_graphs = random_graphs(1024, seed=1), random_graphs(256, seed=2)
    ys = torch.tensor([g[2] for g in train_graphs])
    y_mean, y_std = ys.mean().item(), ys.std().item()
    train_loader = cycle(
        DataLoader(
            MoleculeLikeDataset(train_graphs, y_mean, y_std),
            batch_size=32,
            shuffle=True,
            drop_last=True,
            collate_fn=collate,
        )
    )
    test_set = MoleculeLikeDataset(test_graphs, y_mean, y_std)
    model = GIN()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(i):
        model.train()
        x, edge_index, batch, y = next(train_loader)
        optimizer.zero_grad()
        out = model(x, edge_index, batch, y.size(0))
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x, edge_index, batch, y = collate([test_set[k] for k in range(len(test_set))])
            return F.mse_loss(model(x, edge_index, batch, y.size(0)), y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_second_derivative_without_create_graph_bad():
    torch.manual_seed(0)

    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(1, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, 1),
            )
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x):
            return self.net(x)

    # u'' = f on [-1, 1], u(-1) = u(1) = 0, exact solution u = sin(pi x)
    def exact(x):
        return torch.sin(math.pi * x)

    def source(x):
        return -(math.pi**2) * torch.sin(math.pi * x)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x_bc = torch.tensor([[-1.0], [1.0]])
    u_bc = torch.zeros(2, 1)

    def pde_residual(x):
        u = model(x)
        u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), retain_graph=True)[0]
        return u_xx - source(x)

    def step(i):
        optimizer.zero_grad()
        x_f = (torch.rand(128, 1) * 2 - 1).requires_grad_(True)
        loss_f = torch.mean(pde_residual(x_f) ** 2)
        loss_b = torch.mean((model(x_bc) - u_bc) ** 2)
        loss = loss_f + 10.0 * loss_b
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x = torch.linspace(-1, 1, 201).unsqueeze(1)
            return ((model(x) - exact(x)).norm() / exact(x).norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pinn_second_derivative_without_create_graph_good():
    torch.manual_seed(0)

    class PINN(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(1, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, width),
                nn.Tanh(),
                nn.Linear(width, 1),
            )
            for m in self.net:
                if isinstance(m, nn.Linear):
                    nn.init.xavier_normal_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, x):
            return self.net(x)

    # u'' = f on [-1, 1], u(-1) = u(1) = 0, exact solution u = sin(pi x)
    def exact(x):
        return torch.sin(math.pi * x)

    def source(x):
        return -(math.pi**2) * torch.sin(math.pi * x)

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x_bc = torch.tensor([[-1.0], [1.0]])
    u_bc = torch.zeros(2, 1)

    def pde_residual(x):
        u = model(x)
        u_x = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, grad_outputs=torch.ones_like(u_x), create_graph=True)[0]
        return u_xx - source(x)

    def step(i):
        optimizer.zero_grad()
        x_f = (torch.rand(128, 1) * 2 - 1).requires_grad_(True)
        loss_f = torch.mean(pde_residual(x_f) ** 2)
        loss_b = torch.mean((model(x_bc) - u_bc) ** 2)
        loss = loss_f + 10.0 * loss_b
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x = torch.linspace(-1, 1, 201).unsqueeze(1)
            return ((model(x) - exact(x)).norm() / exact(x).norm()).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def neural_ode_scheduler_stepped_per_batch_bad():
    torch.manual_seed(0)
    n_points, dt = 12, 0.1

    def true_field(y):
        cubic = y**3
        return torch.stack(
            [-0.1 * cubic[..., 0] + 2.0 * cubic[..., 1], -2.0 * cubic[..., 0] - 0.1 * cubic[..., 1]], dim=-1
        )

    def odeint_rk4(func, y0, n, h):
        ys, y = [y0], y0
        for _ in range(n - 1):
            k1 = func(y)
            k2 = func(y + 0.5 * h * k1)
            k3 = func(y + 0.5 * h * k2)
            k4 = func(y + h * k3)
            y = y + h / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
            ys.append(y)
        return torch.stack(ys, dim=1)

    def spirals(n, seed):
        g = torch.Generator().manual_seed(seed)
        y0 = (torch.rand(n, 2, generator=g) * 2 - 1) * 1.5
        return odeint_rk4(true_field, y0, n_points, dt)

    class ODEFunc(nn.Module):
        def __init__(self, hidden=50):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
            )
            for m in self.net.modules():
                if isinstance(m, nn.Linear):
                    nn.init.xavier_uniform_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, y):
            return self.net(y)

    train_loader = DataLoader(TensorDataset(spirals(320, seed=1)), batch_size=32, shuffle=True)
    test_y = spirals(128, seed=2)
    func = ODEFunc()
    optimizer = torch.optim.Adam(func.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.93)
    batches = cycle(train_loader)

    def step(i):
        (traj,) = next(batches)
        optimizer.zero_grad()
        pred = odeint_rk4(func, traj[:, 0], n_points, dt)
        loss = F.mse_loss(pred, traj)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    def probe():
        with untouched(func):
            return F.mse_loss(odeint_rk4(func, test_y[:, 0], n_points, dt), test_y).item()

    return {"model": func, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def neural_ode_scheduler_stepped_per_batch_good():
    torch.manual_seed(0)
    n_points, dt = 12, 0.1

    def true_field(y):
        cubic = y**3
        return torch.stack(
            [-0.1 * cubic[..., 0] + 2.0 * cubic[..., 1], -2.0 * cubic[..., 0] - 0.1 * cubic[..., 1]], dim=-1
        )

    def odeint_rk4(func, y0, n, h):
        ys, y = [y0], y0
        for _ in range(n - 1):
            k1 = func(y)
            k2 = func(y + 0.5 * h * k1)
            k3 = func(y + 0.5 * h * k2)
            k4 = func(y + h * k3)
            y = y + h / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
            ys.append(y)
        return torch.stack(ys, dim=1)

    def spirals(n, seed):
        g = torch.Generator().manual_seed(seed)
        y0 = (torch.rand(n, 2, generator=g) * 2 - 1) * 1.5
        return odeint_rk4(true_field, y0, n_points, dt)

    class ODEFunc(nn.Module):
        def __init__(self, hidden=50):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2)
            )
            for m in self.net.modules():
                if isinstance(m, nn.Linear):
                    nn.init.xavier_uniform_(m.weight)
                    nn.init.zeros_(m.bias)

        def forward(self, y):
            return self.net(y)

    train_loader = DataLoader(TensorDataset(spirals(320, seed=1)), batch_size=32, shuffle=True)
    test_y = spirals(128, seed=2)
    func = ODEFunc()
    optimizer = torch.optim.Adam(func.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.93)
    batches = cycle(train_loader)

    def step(i):
        (traj,) = next(batches)
        optimizer.zero_grad()
        pred = odeint_rk4(func, traj[:, 0], n_points, dt)
        loss = F.mse_loss(pred, traj)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:
            scheduler.step()
        return loss.item()

    def probe():
        with untouched(func):
            return F.mse_loss(odeint_rk4(func, test_y[:, 0], n_points, dt), test_y).item()

    return {"model": func, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siren_default_linear_init_bad():
    torch.manual_seed(0)

    class SineLayer(nn.Module):
        def __init__(self, in_features, out_features, is_first=False, omega_0=30.0):
            super().__init__()
            self.omega_0, self.is_first, self.in_features = omega_0, is_first, in_features
            self.linear = nn.Linear(in_features, out_features)

        def init_weights(self):
            with torch.no_grad():
                bound = 1.0 / self.in_features if self.is_first else math.sqrt(6.0 / self.in_features) / self.omega_0
                self.linear.weight.uniform_(-bound, bound)

        def forward(self, x):
            return torch.sin(self.omega_0 * self.linear(x))

    class Siren(nn.Module):
        def __init__(self, hidden=64, n_hidden=2):
            super().__init__()
            layers = [SineLayer(2, hidden, is_first=True)]
            layers += [SineLayer(hidden, hidden) for _ in range(n_hidden)]
            final = nn.Linear(hidden, 3)
            with torch.no_grad():
                final.weight.uniform_(-math.sqrt(6.0 / hidden) / 30.0, math.sqrt(6.0 / hidden) / 30.0)
            self.net = nn.Sequential(*layers, final)

        def forward(self, coords):
            return self.net(coords)

    def picture(n):
        y, x = torch.meshgrid(torch.linspace(-1, 1, n), torch.linspace(-1, 1, n), indexing="ij")
        r = torch.sin(5 * x + 2 * torch.cos(3 * y))
        g = torch.tanh(6 * (0.6 - (x**2 + y**2).sqrt()))
        b = torch.cos(4 * x * y + 3 * y)
        return torch.stack([x, y], -1).reshape(-1, 2), torch.stack([r, g, b], -1).reshape(-1, 3)

    coords, pixels = picture(40)
    perm = torch.randperm(coords.size(0))
    fit, hold = perm[:1200], perm[1200:]
    model = Siren()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    def step(i):
        model_output = model(coords[fit])
        loss = ((model_output - pixels[fit]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return ((model(coords[hold]) - pixels[hold]) ** 2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def siren_default_linear_init_good():
    torch.manual_seed(0)

    class SineLayer(nn.Module):
        def __init__(self, in_features, out_features, is_first=False, omega_0=30.0):
            super().__init__()
            self.omega_0, self.is_first, self.in_features = omega_0, is_first, in_features
            self.linear = nn.Linear(in_features, out_features)
            self.init_weights()

        def init_weights(self):
            with torch.no_grad():
                bound = 1.0 / self.in_features if self.is_first else math.sqrt(6.0 / self.in_features) / self.omega_0
                self.linear.weight.uniform_(-bound, bound)

        def forward(self, x):
            return torch.sin(self.omega_0 * self.linear(x))

    class Siren(nn.Module):
        def __init__(self, hidden=64, n_hidden=2):
            super().__init__()
            layers = [SineLayer(2, hidden, is_first=True)]
            layers += [SineLayer(hidden, hidden) for _ in range(n_hidden)]
            final = nn.Linear(hidden, 3)
            with torch.no_grad():
                final.weight.uniform_(-math.sqrt(6.0 / hidden) / 30.0, math.sqrt(6.0 / hidden) / 30.0)
            self.net = nn.Sequential(*layers, final)

        def forward(self, coords):
            return self.net(coords)

    def picture(n):
        y, x = torch.meshgrid(torch.linspace(-1, 1, n), torch.linspace(-1, 1, n), indexing="ij")
        r = torch.sin(5 * x + 2 * torch.cos(3 * y))
        g = torch.tanh(6 * (0.6 - (x**2 + y**2).sqrt()))
        b = torch.cos(4 * x * y + 3 * y)
        return torch.stack([x, y], -1).reshape(-1, 2), torch.stack([r, g, b], -1).reshape(-1, 3)

    coords, pixels = picture(40)
    perm = torch.randperm(coords.size(0))
    fit, hold = perm[:1200], perm[1200:]
    model = Siren()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    def step(i):
        model_output = model(coords[fit])
        loss = ((model_output - pixels[fit]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return ((model(coords[hold]) - pixels[hold]) ** 2).mean().sqrt().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mdn_density_without_log_sigma_bad():
    torch.manual_seed(0)
    n_components = 5

    def inverse_sine(n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.rand(n, 1, generator=g) * 2 - 1
        x = y + 0.3 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn(n, 1, generator=g)
        return x, y

    class MDN(nn.Module):
        def __init__(self, hidden=50):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
            self.z_pi = nn.Linear(hidden, n_components)
            self.z_mu = nn.Linear(hidden, n_components)
            self.z_sigma = nn.Linear(hidden, n_components)

        def forward(self, x):
            h = self.trunk(x)
            return F.log_softmax(self.z_pi(h), dim=-1), self.z_mu(h), self.z_sigma(h).clamp(-5, 5)

    def mdn_loss(log_pi, mu, log_sigma, y):
        z = (y - mu) * torch.exp(-log_sigma)
        log_gauss = -0.5 * z**2 - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(log_pi + log_gauss, dim=-1).mean()

    train_x, train_y = inverse_sine(2048, seed=1)
    test_x, test_y = inverse_sine(512, seed=2)
    mx, sx, my, sy = train_x.mean(), train_x.std(), train_y.mean(), train_y.std()
    train_x, test_x = (train_x - mx) / sx, (test_x - mx) / sx
    train_y, test_y = (train_y - my) / sy, (test_y - my) / sy
    loader = cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=128, shuffle=True))
    model = MDN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(loader)
        loss = mdn_loss(*model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            g = torch.Generator().manual_seed(5)
            log_pi, mu, log_sigma = model(test_x)
            k = torch.multinomial(log_pi.exp(), 64, replacement=True, generator=g)
            s = mu.gather(1, k) + log_sigma.exp().gather(1, k) * torch.randn(k.shape, generator=g)
            spread = (s[:, :32] - s[:, 32:]).abs().mean()
            return ((s - test_y).abs().mean() - 0.5 * spread).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mdn_density_without_log_sigma_good():
    torch.manual_seed(0)
    n_components = 5

    def inverse_sine(n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.rand(n, 1, generator=g) * 2 - 1
        x = y + 0.3 * torch.sin(2 * math.pi * y) + 0.05 * torch.randn(n, 1, generator=g)
        return x, y

    class MDN(nn.Module):
        def __init__(self, hidden=50):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
            self.z_pi = nn.Linear(hidden, n_components)
            self.z_mu = nn.Linear(hidden, n_components)
            self.z_sigma = nn.Linear(hidden, n_components)

        def forward(self, x):
            h = self.trunk(x)
            return F.log_softmax(self.z_pi(h), dim=-1), self.z_mu(h), self.z_sigma(h).clamp(-5, 5)

    def mdn_loss(log_pi, mu, log_sigma, y):
        z = (y - mu) * torch.exp(-log_sigma)
        log_gauss = -0.5 * z**2 - log_sigma - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(log_pi + log_gauss, dim=-1).mean()

    train_x, train_y = inverse_sine(2048, seed=1)
    test_x, test_y = inverse_sine(512, seed=2)
    mx, sx, my, sy = train_x.mean(), train_x.std(), train_y.mean(), train_y.std()
    train_x, test_x = (train_x - mx) / sx, (test_x - mx) / sx
    train_y, test_y = (train_y - my) / sy, (test_y - my) / sy
    loader = cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=128, shuffle=True))
    model = MDN()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(i):
        x, y = next(loader)
        loss = mdn_loss(*model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            g = torch.Generator().manual_seed(5)
            log_pi, mu, log_sigma = model(test_x)
            k = torch.multinomial(log_pi.exp(), 64, replacement=True, generator=g)
            s = mu.gather(1, k) + log_sigma.exp().gather(1, k) * torch.randn(k.shape, generator=g)
            spread = (s[:, :32] - s[:, 32:]).abs().mean()
            return ((s - test_y).abs().mean() - 0.5 * spread).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dann_reversal_layer_without_minus_bad():
    torch.manual_seed(0)
    total_steps, max_lambda = 500, 0.3

    class GradReverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lambd):
            ctx.lambd = lambd
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad_output):
            return ctx.lambd * grad_output, None

    def sensor_rows(n, seed, target):
        """20 sensor readings of 4 states; on the target machine the last ten sensors are offset."""
        gp = torch.Generator().manual_seed(99)
        first, last = torch.randn(4, 10, generator=gp), torch.randn(4, 10, generator=gp)
        offset = torch.randn(10, generator=gp) * 2.0
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 4, (n,), generator=g)
        a = first[y] + 0.8 * torch.randn(n, 10, generator=g)
        b = last[y] + 0.5 * torch.randn(n, 10, generator=g)
        return torch.cat([a, b + offset if target else b], dim=1), y

    class DANN(nn.Module):
        def __init__(self, dim=64):
            super().__init__()
            self.feature = nn.Sequential(nn.Linear(20, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
            self.class_classifier = nn.Linear(dim, 4)
            self.domain_classifier = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))

        def forward(self, x, lambd):
            f = self.feature(x)
            return self.class_classifier(f), self.domain_classifier(GradReverse.apply(f, lambd))

    src_x, src_y = sensor_rows(1024, 1, target=False)
    tgt_x, _ = sensor_rows(1024, 2, target=True)
    test_x, test_y = sensor_rows(512, 3, target=True)
    mean, std = src_x.mean(0), src_x.std(0)
    src_x, tgt_x, test_x = ((v - mean) / std for v in (src_x, tgt_x, test_x))
    src_loader = cycle(DataLoader(TensorDataset(src_x, src_y), batch_size=64, shuffle=True, drop_last=True))
    tgt_loader = cycle(DataLoader(TensorDataset(tgt_x), batch_size=64, shuffle=True, drop_last=True))
    model = DANN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        p = min(1.0, i / total_steps)
        lambd = max_lambda * (2.0 / (1.0 + math.exp(-10 * p)) - 1.0)
        xs, ys = next(src_loader)
        (xt,) = next(tgt_loader)
        class_out, domain_out = model(torch.cat([xs, xt]), lambd)
        domain = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))]).long()
        loss = criterion(class_out[: len(xs)], ys) + criterion(domain_out, domain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return (model(test_x, 0.0)[0].argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def dann_reversal_layer_without_minus_good():
    torch.manual_seed(0)
    total_steps, max_lambda = 500, 0.3

    class GradReverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, lambd):
            ctx.lambd = lambd
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad_output):
            return -ctx.lambd * grad_output, None

    def sensor_rows(n, seed, target):
        """20 sensor readings of 4 states; on the target machine the last ten sensors are offset."""
        gp = torch.Generator().manual_seed(99)
        first, last = torch.randn(4, 10, generator=gp), torch.randn(4, 10, generator=gp)
        offset = torch.randn(10, generator=gp) * 2.0
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 4, (n,), generator=g)
        a = first[y] + 0.8 * torch.randn(n, 10, generator=g)
        b = last[y] + 0.5 * torch.randn(n, 10, generator=g)
        return torch.cat([a, b + offset if target else b], dim=1), y

    class DANN(nn.Module):
        def __init__(self, dim=64):
            super().__init__()
            self.feature = nn.Sequential(nn.Linear(20, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
            self.class_classifier = nn.Linear(dim, 4)
            self.domain_classifier = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))

        def forward(self, x, lambd):
            f = self.feature(x)
            return self.class_classifier(f), self.domain_classifier(GradReverse.apply(f, lambd))

    src_x, src_y = sensor_rows(1024, 1, target=False)
    tgt_x, _ = sensor_rows(1024, 2, target=True)
    test_x, test_y = sensor_rows(512, 3, target=True)
    mean, std = src_x.mean(0), src_x.std(0)
    src_x, tgt_x, test_x = ((v - mean) / std for v in (src_x, tgt_x, test_x))
    src_loader = cycle(DataLoader(TensorDataset(src_x, src_y), batch_size=64, shuffle=True, drop_last=True))
    tgt_loader = cycle(DataLoader(TensorDataset(tgt_x), batch_size=64, shuffle=True, drop_last=True))
    model = DANN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    def step(i):
        model.train()
        p = min(1.0, i / total_steps)
        lambd = max_lambda * (2.0 / (1.0 + math.exp(-10 * p)) - 1.0)
        xs, ys = next(src_loader)
        (xt,) = next(tgt_loader)
        class_out, domain_out = model(torch.cat([xs, xt]), lambd)
        domain = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))]).long()
        loss = criterion(class_out[: len(xs)], ys) + criterion(domain_out, domain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            return (model(test_x, 0.0)[0].argmax(1) != test_y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def set_pooling_padding_mask_inverted_bad():
    torch.manual_seed(0)
    max_len = 20

    def random_sets(n, seed):
        g = torch.Generator().manual_seed(seed)
        sets, ys = [], []
        for _ in range(n):
            k = int(torch.randint(4, 17, (), generator=g))
            center = torch.randn(3, generator=g)
            s = center + 0.7 * torch.randn(k, 3, generator=g)
            sets.append(s)
            ys.append(s.mean(0).norm() + s[:, 0].max())
        return sets, torch.stack(ys)

    def collate_sets(items):
        x = torch.zeros(len(items), max_len, 3)
        lengths = torch.tensor([len(s) for s, _ in items])
        for k, (s, _) in enumerate(items):
            x[k, : len(s)] = s
        return x, lengths, torch.stack([y for _, y in items])

    class PoolingByAttention(nn.Module):
        def __init__(self, dim=32, heads=4):
            super().__init__()
            self.phi = nn.Sequential(nn.Linear(3, dim), nn.ReLU(), nn.Linear(dim, dim))
            self.seed = nn.Parameter(torch.randn(1, 2, dim))
            self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
            self.norm = nn.LayerNorm(dim)
            self.rho = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

        def forward(self, x, lengths):
            h = self.phi(x)
            position = torch.arange(x.size(1))[None, :]
            mask = position < lengths[:, None]
            query = self.seed.expand(x.size(0), -1, -1)
            pooled, _ = self.attn(query, h, h, key_padding_mask=mask)
            return self.rho(self.norm(pooled).flatten(1)).squeeze(-1)

    train_sets, train_y = random_sets(1024, seed=1)
    test_sets, test_y = random_sets(256, seed=2)
    mu, sd = train_y.mean(), train_y.std()
    train_data = list(zip(train_sets, (train_y - mu) / sd))
    test_data = list(zip(test_sets, (test_y - mu) / sd))
    loader = cycle(DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate_sets))
    model = PoolingByAttention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, lengths, y = next(loader)
        loss = F.mse_loss(model(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x, lengths, y = collate_sets(test_data)
            return F.mse_loss(model(x, lengths), y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def set_pooling_padding_mask_inverted_good():
    torch.manual_seed(0)
    max_len = 20

    def random_sets(n, seed):
        g = torch.Generator().manual_seed(seed)
        sets, ys = [], []
        for _ in range(n):
            k = int(torch.randint(4, 17, (), generator=g))
            center = torch.randn(3, generator=g)
            s = center + 0.7 * torch.randn(k, 3, generator=g)
            sets.append(s)
            ys.append(s.mean(0).norm() + s[:, 0].max())
        return sets, torch.stack(ys)

    def collate_sets(items):
        x = torch.zeros(len(items), max_len, 3)
        lengths = torch.tensor([len(s) for s, _ in items])
        for k, (s, _) in enumerate(items):
            x[k, : len(s)] = s
        return x, lengths, torch.stack([y for _, y in items])

    class PoolingByAttention(nn.Module):
        def __init__(self, dim=32, heads=4):
            super().__init__()
            self.phi = nn.Sequential(nn.Linear(3, dim), nn.ReLU(), nn.Linear(dim, dim))
            self.seed = nn.Parameter(torch.randn(1, 2, dim))
            self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
            self.norm = nn.LayerNorm(dim)
            self.rho = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

        def forward(self, x, lengths):
            h = self.phi(x)
            position = torch.arange(x.size(1))[None, :]
            mask = position >= lengths[:, None]
            query = self.seed.expand(x.size(0), -1, -1)
            pooled, _ = self.attn(query, h, h, key_padding_mask=mask)
            return self.rho(self.norm(pooled).flatten(1)).squeeze(-1)

    train_sets, train_y = random_sets(1024, seed=1)
    test_sets, test_y = random_sets(256, seed=2)
    mu, sd = train_y.mean(), train_y.std()
    train_data = list(zip(train_sets, (train_y - mu) / sd))
    test_data = list(zip(test_sets, (test_y - mu) / sd))
    loader = cycle(DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True, collate_fn=collate_sets))
    model = PoolingByAttention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, lengths, y = next(loader)
        loss = F.mse_loss(model(x, lengths), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x, lengths, y = collate_sets(test_data)
            return F.mse_loss(model(x, lengths), y).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def arcface_head_not_in_optimizer_bad():
    torch.manual_seed(0)
    n_classes, emb_dim = 24, 8

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(32 * 16, emb_dim),
            )

        def forward(self, x):
            return self.net(x)

    class ArcMarginProduct(nn.Module):
        def __init__(self, s=16.0, m=0.2):
            super().__init__()
            self.s, self.m = s, m
            self.weight = nn.Parameter(torch.empty(n_classes, emb_dim))
            nn.init.xavier_uniform_(self.weight)

        def cosine(self, emb):
            return F.linear(F.normalize(emb), F.normalize(self.weight))

        def forward(self, emb, label):
            cos = self.cosine(emb).clamp(-1 + 1e-6, 1 - 1e-6)
            phi = torch.cos(torch.acos(cos) + self.m)
            one_hot = F.one_hot(label, n_classes).float()
            return self.s * (one_hot * phi + (1 - one_hot) * cos)

    def glyphs(n, seed):
        protos = torch.rand(n_classes, 1, 5, 5, generator=torch.Generator().manual_seed(99))
        protos = F.interpolate(protos, size=(16, 16), mode="bilinear", align_corners=False)
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, n_classes, (n,), generator=g)
        x = protos[y].clone()
        for k in range(n):
            dy, dx = torch.randint(-2, 3, (2,), generator=g).tolist()
            x[k] = torch.roll(x[k], (dy, dx), dims=(1, 2))
        x = x + 0.15 * torch.randn(x.shape, generator=g)
        return (x - 0.5) / 0.3, y

    train_x, train_y = glyphs(2048, 1)
    test_x, test_y = glyphs(512, 2)
    loader = cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, drop_last=True))
    model = Backbone()
    arc = ArcMarginProduct()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = criterion(arc(model(x), y), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model, arc):
            return (arc.cosine(model(test_x)).argmax(1) != test_y).float().mean().item()

    return {"model": (model, arc), "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def arcface_head_not_in_optimizer_good():
    torch.manual_seed(0)
    n_classes, emb_dim = 24, 8

    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(32 * 16, emb_dim),
            )

        def forward(self, x):
            return self.net(x)

    class ArcMarginProduct(nn.Module):
        def __init__(self, s=16.0, m=0.2):
            super().__init__()
            self.s, self.m = s, m
            self.weight = nn.Parameter(torch.empty(n_classes, emb_dim))
            nn.init.xavier_uniform_(self.weight)

        def cosine(self, emb):
            return F.linear(F.normalize(emb), F.normalize(self.weight))

        def forward(self, emb, label):
            cos = self.cosine(emb).clamp(-1 + 1e-6, 1 - 1e-6)
            phi = torch.cos(torch.acos(cos) + self.m)
            one_hot = F.one_hot(label, n_classes).float()
            return self.s * (one_hot * phi + (1 - one_hot) * cos)

    def glyphs(n, seed):
        protos = torch.rand(n_classes, 1, 5, 5, generator=torch.Generator().manual_seed(99))
        protos = F.interpolate(protos, size=(16, 16), mode="bilinear", align_corners=False)
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, n_classes, (n,), generator=g)
        x = protos[y].clone()
        for k in range(n):
            dy, dx = torch.randint(-2, 3, (2,), generator=g).tolist()
            x[k] = torch.roll(x[k], (dy, dx), dims=(1, 2))
        x = x + 0.15 * torch.randn(x.shape, generator=g)
        return (x - 0.5) / 0.3, y

    train_x, train_y = glyphs(2048, 1)
    test_x, test_y = glyphs(512, 2)
    loader = cycle(DataLoader(TensorDataset(train_x, train_y), batch_size=64, shuffle=True, drop_last=True))
    model = Backbone()
    arc = ArcMarginProduct()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(list(model.parameters()) + list(arc.parameters()), lr=1e-3)

    def step(i):
        model.train()
        x, y = next(loader)
        loss = criterion(arc(model(x), y), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model, arc):
            return (arc.cosine(model(test_x)).argmax(1) != test_y).float().mean().item()

    return {"model": (model, arc), "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_without_unscale_bad():
    torch.manual_seed(0)

    def mosaics(n, seed):
        """3x24x24 pictures in [0, 1] with sharp edges."""
        g = torch.Generator().manual_seed(seed)
        y, x = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
        img = torch.rand(n, 3, 1, 1, generator=g).expand(n, 3, 24, 24).clone()
        for _ in range(4):
            a = torch.rand(n, 1, 1, 1, generator=g) * 2 * math.pi
            off = torch.rand(n, 1, 1, 1, generator=g) * 24
            side = (x[None, None] - 12) * a.cos() + (y[None, None] - 12) * a.sin() > off - 12
            img = torch.where(side, torch.rand(n, 3, 1, 1, generator=g), img)
        return img

    class ESPCN(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.conv1 = nn.Conv2d(3, width, 5, padding=2)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.conv3 = nn.Conv2d(width, 3 * 4, 3, padding=1)
            self.shuffle = nn.PixelShuffle(2)

        def forward(self, lr_img):
            h = F.relu(self.conv1(lr_img - 0.5))
            h = F.relu(self.conv2(h))
            base = F.interpolate(lr_img, scale_factor=2, mode="bilinear", align_corners=False)
            return base + self.shuffle(self.conv3(h))

    loader = cycle(DataLoader(TensorDataset(mosaics(1024, seed=1)), batch_size=8, shuffle=True, drop_last=True))
    heldout = mosaics(128, seed=2)
    model = ESPCN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")

    def step(i):
        model.train()
        (hr,) = next(loader)
        lr_img = F.avg_pool2d(hr, 2)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            sr = model(lr_img)
            loss = F.mse_loss(sr.float(), hr)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with untouched(model):
            return 1000 * F.mse_loss(model(F.avg_pool2d(heldout, 2)), heldout).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def amp_clip_without_unscale_good():
    torch.manual_seed(0)

    def mosaics(n, seed):
        """3x24x24 pictures in [0, 1] with sharp edges."""
        g = torch.Generator().manual_seed(seed)
        y, x = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
        img = torch.rand(n, 3, 1, 1, generator=g).expand(n, 3, 24, 24).clone()
        for _ in range(4):
            a = torch.rand(n, 1, 1, 1, generator=g) * 2 * math.pi
            off = torch.rand(n, 1, 1, 1, generator=g) * 24
            side = (x[None, None] - 12) * a.cos() + (y[None, None] - 12) * a.sin() > off - 12
            img = torch.where(side, torch.rand(n, 3, 1, 1, generator=g), img)
        return img

    class ESPCN(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.conv1 = nn.Conv2d(3, width, 5, padding=2)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.conv3 = nn.Conv2d(width, 3 * 4, 3, padding=1)
            self.shuffle = nn.PixelShuffle(2)

        def forward(self, lr_img):
            h = F.relu(self.conv1(lr_img - 0.5))
            h = F.relu(self.conv2(h))
            base = F.interpolate(lr_img, scale_factor=2, mode="bilinear", align_corners=False)
            return base + self.shuffle(self.conv3(h))

    loader = cycle(DataLoader(TensorDataset(mosaics(1024, seed=1)), batch_size=8, shuffle=True, drop_last=True))
    heldout = mosaics(128, seed=2)
    model = ESPCN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")

    def step(i):
        model.train()
        (hr,) = next(loader)
        lr_img = F.avg_pool2d(hr, 2)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            sr = model(lr_img)
            loss = F.mse_loss(sr.float(), hr)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    def probe():
        with untouched(model):
            return 1000 * F.mse_loss(model(F.avg_pool2d(heldout, 2)), heldout).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mc_dropout_eval_never_back_to_train_bad():
    torch.manual_seed(0)

    def table(n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 16, generator=g)
        f = torch.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.7 * x[:, 3]
        return x, f, f + 0.5 * torch.randn(n, generator=g)

    train_x, _, train_y = table(256, 1)
    val_x, _, val_y = table(128, 2)
    test_x, test_f, _ = table(512, 3)
    my, sy = train_y.mean(), train_y.std()
    train_y, val_y, test_f = (train_y - my) / sy, (val_y - my) / sy, (test_f - my) / sy
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(TensorDataset(val_x, val_y), batch_size=64)

    class MCDropoutNet(nn.Module):
        def __init__(self, hidden=128, p=0.4):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(16, hidden),
                nn.ReLU(),
                nn.Dropout(p),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Dropout(p),
                nn.Linear(hidden, 1),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = MCDropoutNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    batches = cycle(train_loader)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            losses = [criterion(model(x), y).item() for x, y in val_loader]
        return sum(losses) / len(losses)

    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:
            history.append(validate())
        return loss.item()

    def probe():
        with untouched(model):
            for m in model.modules():
                if isinstance(m, nn.Dropout):
                    m.train()
            torch.manual_seed(5)
            mean = torch.stack([model(test_x) for _ in range(30)]).mean(0)
            return criterion(mean, test_f).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def mc_dropout_eval_never_back_to_train_good():
    torch.manual_seed(0)

    def table(n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 16, generator=g)
        f = torch.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.7 * x[:, 3]
        return x, f, f + 0.5 * torch.randn(n, generator=g)

    train_x, _, train_y = table(256, 1)
    val_x, _, val_y = table(128, 2)
    test_x, test_f, _ = table(512, 3)
    my, sy = train_y.mean(), train_y.std()
    train_y, val_y, test_f = (train_y - my) / sy, (val_y - my) / sy, (test_f - my) / sy
    train_loader = DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(TensorDataset(val_x, val_y), batch_size=64)

    class MCDropoutNet(nn.Module):
        def __init__(self, hidden=128, p=0.4):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(16, hidden),
                nn.ReLU(),
                nn.Dropout(p),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Dropout(p),
                nn.Linear(hidden, 1),
            )

        def forward(self, x):
            return self.net(x).squeeze(-1)

    model = MCDropoutNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    batches = cycle(train_loader)
    history = []

    def validate():
        model.eval()
        with torch.no_grad():
            losses = [criterion(model(x), y).item() for x, y in val_loader]
        model.train()
        return sum(losses) / len(losses)

    model.train()

    def step(i):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if (i + 1) % len(train_loader) == 0:
            history.append(validate())
        return loss.item()

    def probe():
        with untouched(model):
            for m in model.modules():
                if isinstance(m, nn.Dropout):
                    m.train()
            torch.manual_seed(5)
            mean = torch.stack([model(test_x) for _ in range(30)]).mean(0)
            return criterion(mean, test_f).item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_sorted_by_class_not_shuffled_bad():
    torch.manual_seed(0)

    def clouds(n_per_class, seed, n_points=64):
        g = torch.Generator().manual_seed(seed)
        xs, ys = [], []
        for c in range(4):
            n = n_per_class
            d = F.normalize(torch.randn(n, n_points, 3, generator=g), dim=-1)
            if c == 1:  # cube
                d = d / d.abs().max(dim=-1, keepdim=True)[0] * 0.8
            elif c == 2:  # cylinder
                d = torch.cat(
                    [F.normalize(d[..., :2], dim=-1) * 0.8, torch.rand(n, n_points, 1, generator=g) * 1.6 - 0.8], -1
                )
            elif c == 3:  # torus
                ring = F.normalize(d[..., :2], dim=-1)
                a = torch.rand(n, n_points, 1, generator=g) * 2 * math.pi
                d = torch.cat([ring * (0.8 + 0.3 * a.cos()), 0.3 * a.sin()], -1)
            scale = 0.8 + 0.4 * torch.rand(n, 1, 1, generator=g)
            xs.append(d * scale + 0.04 * torch.randn(n, n_points, 3, generator=g))
            ys.append(torch.full((n,), c))
        return torch.cat(xs), torch.cat(ys)

    class PointNet(nn.Module):
        def __init__(self, n_classes=4):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32)
            self.conv2, self.bn2 = nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64)
            self.fc1, self.bn3 = nn.Linear(64, 32), nn.BatchNorm1d(32)
            self.fc2 = nn.Linear(32, n_classes)

        def forward(self, pts):
            x = pts.transpose(1, 2)
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = x.max(dim=2)[0]
            x = F.relu(self.bn3(self.fc1(x)))
            return self.fc2(x)

    train_set, test_set = TensorDataset(*clouds(256, 1)), TensorDataset(*clouds(64, 2))
    train_loader = DataLoader(train_set, batch_size=32, shuffle=False, drop_last=True)
    batches = cycle(train_loader)
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        pts, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pts), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x, y = test_set.tensors
            return (model(x).argmax(1) != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}


def pointnet_sorted_by_class_not_shuffled_good():
    torch.manual_seed(0)

    def clouds(n_per_class, seed, n_points=64):
        g = torch.Generator().manual_seed(seed)
        xs, ys = [], []
        for c in range(4):
            n = n_per_class
            d = F.normalize(torch.randn(n, n_points, 3, generator=g), dim=-1)
            if c == 1:  # cube
                d = d / d.abs().max(dim=-1, keepdim=True)[0] * 0.8
            elif c == 2:  # cylinder
                d = torch.cat(
                    [F.normalize(d[..., :2], dim=-1) * 0.8, torch.rand(n, n_points, 1, generator=g) * 1.6 - 0.8], -1
                )
            elif c == 3:  # torus
                ring = F.normalize(d[..., :2], dim=-1)
                a = torch.rand(n, n_points, 1, generator=g) * 2 * math.pi
                d = torch.cat([ring * (0.8 + 0.3 * a.cos()), 0.3 * a.sin()], -1)
            scale = 0.8 + 0.4 * torch.rand(n, 1, 1, generator=g)
            xs.append(d * scale + 0.04 * torch.randn(n, n_points, 3, generator=g))
            ys.append(torch.full((n,), c))
        return torch.cat(xs), torch.cat(ys)

    class PointNet(nn.Module):
        def __init__(self, n_classes=4):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32)
            self.conv2, self.bn2 = nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64)
            self.fc1, self.bn3 = nn.Linear(64, 32), nn.BatchNorm1d(32)
            self.fc2 = nn.Linear(32, n_classes)

        def forward(self, pts):
            x = pts.transpose(1, 2)
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = x.max(dim=2)[0]
            x = F.relu(self.bn3(self.fc1(x)))
            return self.fc2(x)

    train_set, test_set = TensorDataset(*clouds(256, 1)), TensorDataset(*clouds(64, 2))
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    batches = cycle(train_loader)
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(i):
        model.train()
        pts, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pts), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def probe():
        with untouched(model):
            x, y = test_set.tensors
            return (model(x).argmax(1) != y).float().mean().item()

    return {"model": model, "optimizer": optimizer, "steps": 20, "step": step, "probe": probe}
