"""A conditional GAN whose generator is asked for labels drawn at random, which is its task.

After: eriklindernoren/PyTorch-GAN
"""

import torch
from torch import nn

n_classes, latent_dim, batch_size, pixels = 5, 9, 26, 36


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_emb = nn.Embedding(n_classes, n_classes)
        self.model = nn.Sequential(
            nn.Linear(latent_dim + n_classes, 40), nn.ReLU(), nn.Linear(40, pixels), nn.Tanh()
        )

    def forward(self, noise, labels):
        return self.model(torch.cat((self.label_emb(labels), noise), -1))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(n_classes, n_classes)
        self.model = nn.Sequential(
            nn.Linear(n_classes + pixels, 48), nn.Dropout(0.4), nn.LeakyReLU(0.2), nn.Linear(48, 1)
        )

    def forward(self, img, labels):
        return self.model(torch.cat((img, self.emb(labels)), -1))


def main():
    torch.manual_seed(7)
    templates = torch.randn(n_classes, pixels).sign()
    generator, discriminator, adversarial_loss = Generator(), Discriminator(), nn.MSELoss()
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    valid, fake = torch.ones(batch_size, 1), torch.zeros(batch_size, 1)
    for step in range(17):
        labels, gen_labels = torch.randint(0, n_classes, (2, batch_size))
        real_imgs = 0.9 * templates[labels] + 0.05 * torch.randn(batch_size, pixels)
        optimizer_G.zero_grad()
        gen_imgs = generator(torch.randn(batch_size, latent_dim), gen_labels)
        g_loss = adversarial_loss(discriminator(gen_imgs, gen_labels), valid)
        g_loss.backward()
        optimizer_G.step()
        optimizer_D.zero_grad()
        d_loss = adversarial_loss(discriminator(real_imgs, labels), valid) / 2
        d_loss += adversarial_loss(discriminator(gen_imgs.detach(), gen_labels), fake) / 2
        d_loss.backward()
        optimizer_D.step()
        print(step, d_loss.item(), g_loss.item())


if __name__ == "__main__":
    main()
