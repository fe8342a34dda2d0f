"""A plain GAN on pictures of bars; the generator's pass leaves gradients in the discriminator,
which its own zero_grad clears before they are used.

After: eriklindernoren/PyTorch-GAN
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
np.random.seed(0)
latent_dim, img_shape = 10, (1, 8, 8)


def bars(count):
    rows = torch.randint(0, 8, (count,))
    imgs = -torch.ones(count, *img_shape)
    imgs[torch.arange(count), 0, rows] = 1.0
    return imgs + 0.05 * torch.randn_like(imgs)


def block(in_feat, out_feat, normalize=True):
    layers = [nn.Linear(in_feat, out_feat)]
    if normalize:
        layers.append(nn.BatchNorm1d(out_feat))
    layers.append(nn.LeakyReLU(0.2, inplace=True))
    return layers


generator = nn.Sequential(
    *block(latent_dim, 32, normalize=False), *block(32, 48), nn.Linear(48, 64), nn.Tanh()
)
discriminator = nn.Sequential(
    nn.Flatten(), *block(64, 40, False), *block(40, 20, False), nn.Linear(20, 1), nn.Sigmoid()
)
adversarial_loss = nn.BCELoss()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=0.001, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=0.001, betas=(0.5, 0.999))
dataloader = DataLoader(TensorDataset(bars(24 * 18)), batch_size=24, shuffle=True)

for epoch in range(1):
    for (imgs,) in dataloader:
        valid, fake = torch.ones(imgs.size(0), 1), torch.zeros(imgs.size(0), 1)
        optimizer_G.zero_grad()
        z = torch.tensor(np.random.normal(0, 1, (imgs.shape[0], latent_dim)), dtype=torch.float32)
        gen_imgs = generator(z).view(imgs.size(0), *img_shape)
        g_loss = adversarial_loss(discriminator(gen_imgs), valid)
        g_loss.backward()
        optimizer_G.step()

        optimizer_D.zero_grad()
        real_loss = adversarial_loss(discriminator(imgs), valid)
        fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d_loss.backward()
        optimizer_D.step()
    print(f"[Epoch {epoch}] [D loss: {d_loss.item():.4f}] [G loss: {g_loss.item():.4f}]")
