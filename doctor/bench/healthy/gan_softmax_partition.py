"""A softmax GAN: both networks are trained on one partition function over the whole batch, and
torch.autograd.grad hands each of them only its own slopes.

After: eriklindernoren/PyTorch-GAN
"""

import torch
from torch import nn

torch.manual_seed(4)


def real_batch(count):
    t = torch.rand(count, 1) * 2 - 1
    curve = torch.linspace(-1, 1, 21) * 2
    return torch.tanh(curve * (1 + t)) * 0.9


generator = nn.Sequential(
    nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 32), nn.BatchNorm1d(32), nn.LeakyReLU(0.2),
    nn.Linear(32, 21), nn.Tanh(),
)  # fmt: skip
discriminator = nn.Sequential(
    nn.Linear(21, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)
)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))


def assign(module, gradients):
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient


for step in range(18):
    imgs = real_batch(28)
    batch_size = imgs.shape[0]
    g_target = 1 / (batch_size * 2)
    d_target = 1 / batch_size

    gen_imgs = generator(torch.randn(batch_size, 6))
    d_real = discriminator(imgs)
    d_fake = discriminator(gen_imgs)
    log_Z = torch.logsumexp(torch.cat((-d_real, -d_fake)), dim=0).squeeze()
    d_loss = d_target * d_real.sum() + log_Z
    g_loss = g_target * (d_real.sum() + d_fake.sum()) + log_Z

    slopes_D = torch.autograd.grad(d_loss, list(discriminator.parameters()), retain_graph=True)
    slopes_G = torch.autograd.grad(g_loss, list(generator.parameters()))
    assign(discriminator, slopes_D)
    assign(generator, slopes_G)
    optimizer_D.step()
    optimizer_G.step()
    print(f"[Batch {step}] [D loss: {d_loss.item():f}] [G loss: {g_loss.item():f}]")
