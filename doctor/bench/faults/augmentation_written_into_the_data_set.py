"""The augmentation writes into the stored pictures, so each epoch leaves them more distorted.

Threads: https://github.com/facebookresearch/pycls/pull/21
    https://github.com/sefibk/KernelGAN/issues/35
Names: D13
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class SmallPictures(Dataset):
    def __init__(self, count, classes=4, side=14):
        self.labels = torch.randint(0, classes, (count,))
        patterns = torch.randn(classes, 3, side, side)
        self.inputs = patterns[self.labels] + 0.5 * torch.randn(count, 3, side, side)

    def __len__(self):
        return len(self.labels)

    def transform(self, image):
        image += 0.3 * torch.randn(3, 1, 1)
        top, left = torch.randint(0, 10, (2,)).tolist()
        image[:, top : top + 4, left : left + 4] = 0.0
        return image

    def __getitem__(self, index):
        # broken
        image = self.inputs[index]
        # mended
        # image = self.inputs[index].clone()
        # end
        return self.transform(image), self.labels[index]


def main():
    torch.manual_seed(21)
    loader = DataLoader(SmallPictures(50), batch_size=10, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
