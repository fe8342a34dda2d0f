"""Picture and mask each draw their own flip, so half of the masks are mirrored against them.

Threads: https://github.com/fastai/fastai/issues/245
    https://github.com/mdbloice/Augmentor/issues/188
Names: D14
"""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


def random_flip(*tensors, p=0.5):
    if torch.rand(1).item() < p:
        tensors = [tensor.flip(-1) for tensor in tensors]
    return tensors


class NucleiDataset(Dataset):
    def __init__(self, count, height=18, width=26):
        self.masks = torch.zeros(count, 1, height, width)
        for mask in self.masks:
            top = int(torch.randint(0, height - 6, (1,)))
            left = int(torch.randint(0, width - 8, (1,)))
            mask[:, top : top + 6, left : left + 8] = 1.0
        self.pictures = self.masks * 0.8 + 0.3 * torch.randn(count, 1, height, width)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture, mask = self.pictures[index], self.masks[index]
        # broken
        (picture,) = random_flip(picture)
        (mask,) = random_flip(mask)
        # mended
        # picture, mask = random_flip(picture, mask)
        # end
        return picture, mask


def main():
    torch.manual_seed(45)
    loader = DataLoader(NucleiDataset(72), batch_size=12, shuffle=True)
    layers = [nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 1, 5, padding=2)]
    net = nn.Sequential(*layers)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(3):
        for picture, mask in loader:
            loss = criterion(net(picture), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
