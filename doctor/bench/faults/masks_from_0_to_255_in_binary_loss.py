"""The masks hold 0 and 255 where the binary loss wants 0 and 1, so the loss falls below zero.

Threads: https://github.com/milesial/Pytorch-UNet/issues/78
    https://github.com/MontaEllis/Pytorch-Medical-Segmentation/issues/8
Names: F20
"""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class CellDataset(Dataset):
    def __init__(self, count, height=24, width=20):
        random = np.random.default_rng(6)
        self.images = random.normal(90, 12, (count, height, width)).astype(np.float32)
        self.masks = np.zeros((count, height, width), dtype=np.uint8)
        rows, columns = np.mgrid[:height, :width]
        for image, mask in zip(self.images, self.masks, strict=True):
            y, x = random.integers(5, height - 5), random.integers(5, width - 5)
            disc = (rows - y) ** 2 + (columns - x) ** 2 < 20
            image[disc] += 80
            mask[disc] = 255

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index] / 255.0).unsqueeze(0)
        mask = torch.from_numpy(self.masks[index].astype(np.float32)).unsqueeze(0)
        # broken
        # mended
        # mask = mask / 255.0
        # end
        return image, mask


def main():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 1, 1),
    )
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3)
    for epoch in range(4):
        for images, masks in DataLoader(CellDataset(40), batch_size=8, shuffle=True):
            loss = criterion(net(images), masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


main()
