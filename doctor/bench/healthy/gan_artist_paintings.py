"""A GAN of curves with its two losses written out as logarithms; the generator's loss is a negative
number that falls.

After: MorvanZhou/PyTorch-Tutorial
"""

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(1)
np.random.seed(1)

BATCH_SIZE = 48
LR_G = 0.001
LR_D = 0.001
N_IDEAS = 5
ART_COMPONENTS = 15
PAINT_POINTS = np.vstack([np.linspace(-1, 1, ART_COMPONENTS) for _ in range(BATCH_SIZE)])


def artist_works():
    a = np.random.uniform(1, 2, size=BATCH_SIZE)[:, np.newaxis]
    paintings = a * np.power(PAINT_POINTS, 2) + (a - 1)
    return torch.from_numpy(paintings).float()


G = nn.Sequential(nn.Linear(N_IDEAS, 64), nn.ReLU(), nn.Linear(64, ART_COMPONENTS))
D = nn.Sequential(
    nn.Linear(ART_COMPONENTS, 64),
    nn.ReLU(),
    nn.Linear(64, 1),
    nn.Sigmoid(),
)

opt_D = torch.optim.Adam(D.parameters(), lr=LR_D)
opt_G = torch.optim.Adam(G.parameters(), lr=LR_G)

for step in range(20):
    artist_paintings = artist_works()
    G_ideas = torch.randn(BATCH_SIZE, N_IDEAS)
    G_paintings = G(G_ideas)
    prob_artist1 = D(G_paintings)
    G_loss = torch.mean(torch.log(1.0 - prob_artist1))
    opt_G.zero_grad()
    G_loss.backward()
    opt_G.step()

    prob_artist0 = D(artist_paintings)
    prob_artist1 = D(G_paintings.detach())
    D_loss = -torch.mean(torch.log(prob_artist0) + torch.log(1.0 - prob_artist1))
    opt_D.zero_grad()
    D_loss.backward()
    opt_D.step()

    if step % 5 == 0:
        print(f"D accuracy={prob_artist0.data.numpy().mean():.2f} (0.5 for D to converge)")
        print(f"D score={-D_loss.data.numpy():.2f} (-1.38 for G to converge)")
