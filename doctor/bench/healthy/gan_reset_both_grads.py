"""A GAN that does not detach the generated pictures for the discriminator's loss; one function
clears the gradients of both networks before each backward, so nothing of it reaches a step.

After: yunjey/pytorch-tutorial
"""

import torch
import torch.nn as nn

torch.manual_seed(11)

latent_size, hidden_size, image_size = 8, 40, 49
num_epochs, batch_size = 2, 32

prototypes = (torch.rand(4, image_size) > 0.5).float() * 2 - 1
images_all = prototypes[torch.arange(batch_size * 9) % 4]
images_all = images_all[torch.randperm(len(images_all))] * 0.6
images_all += 0.3 * torch.randn_like(images_all)

D = nn.Sequential(
    nn.Linear(image_size, hidden_size),
    nn.LeakyReLU(0.2),
    nn.Linear(hidden_size, hidden_size),
    nn.LeakyReLU(0.2),
    nn.Linear(hidden_size, 1),
    nn.Sigmoid(),
)
G = nn.Sequential(
    nn.Linear(latent_size, hidden_size),
    nn.ReLU(),
    nn.Linear(hidden_size, hidden_size),
    nn.ReLU(),
    nn.Linear(hidden_size, image_size),
    nn.Tanh(),
)
criterion = nn.BCELoss()
d_optimizer = torch.optim.Adam(D.parameters(), lr=0.001)
g_optimizer = torch.optim.Adam(G.parameters(), lr=0.001)


def reset_grad():
    d_optimizer.zero_grad()
    g_optimizer.zero_grad()


for epoch in range(num_epochs):
    for i, images in enumerate(images_all.split(batch_size)):
        real_labels = torch.ones(batch_size, 1)
        fake_labels = torch.zeros(batch_size, 1)
        real_score = D(images)
        fake_score = D(G(torch.randn(batch_size, latent_size)))
        d_loss = criterion(real_score, real_labels) + criterion(fake_score, fake_labels)
        reset_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = criterion(D(G(torch.randn(batch_size, latent_size))), real_labels)
        reset_grad()
        g_loss.backward()
        g_optimizer.step()
        print(f"Epoch {epoch} Step {i}, d {d_loss.item():.3f}, g {g_loss.item():.3f}")
