"""Pictures with their channels last are reshaped to channels first, which scrambles the pixels.

Threads: https://github.com/BonnBytes/PyTorch-FWD/issues/16
    https://github.com/zamanzadeh/CARLA/issues/16
Names: F30
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

HEIGHT, WIDTH, CLASSES = 20, 24, 4


class Leaves(torch.utils.data.Dataset):
    def __init__(self, size):
        rng = np.random.default_rng(5)
        self.labels = rng.integers(0, CLASSES, size)
        row, column = np.mgrid[0:HEIGHT, 0:WIDTH]
        photos = []
        for label in self.labels:
            angle = label * np.pi / CLASSES + 0.1 * rng.standard_normal()
            wave = np.sin(0.9 * (np.cos(angle) * column + np.sin(angle) * row) + rng.uniform(0, 6))
            noise = 0.3 * rng.standard_normal((HEIGHT, WIDTH, 3))
            photos.append(wave[..., None] * rng.uniform(0.5, 1.0, 3) + noise)
        self.photos = np.stack(photos).astype(np.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.photos[index], int(self.labels[index])


def main():
    torch.manual_seed(92)
    loader = torch.utils.data.DataLoader(Leaves(432), batch_size=27, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 12, CLASSES),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    for step, (photos, labels) in enumerate(loader):
        # broken
        images = photos.reshape(len(photos), 3, HEIGHT, WIDTH)
        # mended
        # images = photos.permute(0, 3, 1, 2)
        # end
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
