"""A small ResNet whose learning rate is written into the optimizer's groups by hand at the end of
each epoch, and which is tested in between.

After: yunjey/pytorch-tutorial
"""

import torch
import torch.nn as nn

torch.manual_seed(0)
num_epochs, batch_size, learning_rate = 3, 20, 0.002


def draw(count):
    labels = torch.randint(0, 4, (count,))
    images = 0.4 * torch.randn(count, 3, 12, 12)
    for image, label in zip(images, labels, strict=True):
        row, col = divmod(label.item(), 2)
        image[:, 6 * row : 6 * row + 6, 6 * col : 6 * col + 6] += 0.8
    return images, labels


class ResidualBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1, downsample=None):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = downsample

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


shortcut = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16))
stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True))
blocks = nn.Sequential(ResidualBlock(8, 8), ResidualBlock(8, 16, 2, shortcut))
model = nn.Sequential(stem, blocks, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(64, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
images, labels = draw(batch_size * 6)
for _ in range(num_epochs):
    model.train()
    for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learning_rate /= 3
    for param_group in optimizer.param_groups:
        param_group["lr"] = learning_rate
    model.eval()
    with torch.no_grad():
        x, y = draw(50)
        print(loss.item(), (model(x).argmax(1) == y).float().mean().item())
