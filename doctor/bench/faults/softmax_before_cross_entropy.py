"""The network ends in a softmax and CrossEntropyLoss applies another, so the loss stays high.

Threads: https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10
    https://github.com/Lightning-Universe/lightning-bolts/issues/654
Names: F3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

ACTIVITIES, CHANNELS, WINDOW = 6, 9, 50


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(CHANNELS, 32, 9)
        self.conv2 = nn.Conv1d(32, 64, 9)
        self.fc1 = nn.Linear(64 * 6, 100)
        self.fc2 = nn.Linear(100, ACTIVITIES)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = self.fc2(x)
        # broken
        return F.softmax(x, dim=1)
        # mended
        # return x
        # end


def make_windows(count):
    activity = torch.randint(0, ACTIVITIES, (count,))
    time = torch.linspace(0, 1, WINDOW)
    phase = torch.arange(CHANNELS) * 0.4
    wave = torch.sin(6.28 * (activity[:, None, None] + 1) * time + phase[:, None])
    return wave + 0.3 * torch.randn(count, CHANNELS, WINDOW), activity


def train():
    torch.manual_seed(1)
    model = Network()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for index in range(20):
        sample, target = make_windows(32)
        output = model(sample)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if index % 5 == 0:
            accuracy = (output.argmax(1) == target).float().mean()
            print(f"batch {index} loss {loss.item():.4f} acc {accuracy.item():.2f}")


train()
