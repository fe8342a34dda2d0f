"""InfoGAN: a third optimizer holds the parameters of both networks again, for the loss that asks
for the codes back; each parameter is thus in two optimizers on purpose.

After: eriklindernoren/PyTorch-GAN
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

N_CLASSES, CODE_DIM, NOISE, BATCH = 3, 2, 5, 22


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(25, 40), nn.LeakyReLU(0.2))
        self.adv_layer, self.aux_layer = nn.Linear(40, 1), nn.Linear(40, N_CLASSES)
        self.latent_layer = nn.Linear(40, CODE_DIM)

    def forward(self, img):
        out = self.trunk(img)
        return self.adv_layer(out), self.aux_layer(out), self.latent_layer(out)


torch.manual_seed(8)


def ask(generator):
    wanted = torch.randint(0, N_CLASSES, (BATCH,))
    code = torch.empty(BATCH, CODE_DIM).uniform_(-1, 1)
    noise = torch.cat((torch.randn(BATCH, NOISE), F.one_hot(wanted, N_CLASSES), code), -1)
    return generator(noise), wanted, code


D = Discriminator()
G = nn.Sequential(
    nn.Linear(NOISE + N_CLASSES + CODE_DIM, 32), nn.LeakyReLU(0.2), nn.Linear(32, 25), nn.Tanh()
)
opt_G = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_D = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_info = torch.optim.Adam(itertools.chain(G.parameters(), D.parameters()), 1e-3, (0.5, 0.999))
shapes = torch.randn(N_CLASSES, 25).sign()
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
for step in range(16):
    imgs = shapes[torch.randint(0, N_CLASSES, (BATCH,))] * (0.6 + 0.3 * torch.rand(BATCH, 1))
    for optimizer in (opt_G, opt_D, opt_info):
        optimizer.zero_grad()
        made, wanted, code = ask(G)
        if optimizer is opt_G:
            loss = F.mse_loss(D(made)[0], ones)
        elif optimizer is opt_D:
            loss = (F.mse_loss(D(imgs)[0], ones) + F.mse_loss(D(made.detach())[0], zeros)) / 2
        else:
            _, guess, latent = D(made)
            loss = F.cross_entropy(guess, wanted) + 0.1 * F.mse_loss(latent, code)
        loss.backward()
        optimizer.step()
        print(step, loss.item())
