"""The log_softmax is taken over dim 0, so the point clouds of a batch compete with each other.

Threads: https://github.com/fxia22/pointnet.pytorch/issues/27
    https://github.com/MicrosoftDocs/pytorchfundamentals/pull/21
Names: F3 S33
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

KINDS, POINTS, BATCH = 5, 64, 18


class PointNetCls(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(3, 32, 1)
        self.conv2 = nn.Conv1d(32, 64, 1)
        self.bn1 = nn.BatchNorm1d(32)
        self.bn2 = nn.BatchNorm1d(64)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, KINDS)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x = torch.max(x, 2).values
        x = self.fc2(F.relu(self.fc1(x)))
        # broken
        return F.log_softmax(x, dim=0)
        # mended
        # return F.log_softmax(x, dim=-1)
        # end


def clouds():
    kind = torch.randint(0, KINDS, (BATCH,))
    sphere = F.normalize(torch.randn(BATCH, POINTS, 3), dim=-1)
    stretch = torch.tensor([[1, 1, 1], [2, 1, 1], [1, 2, 1], [1, 1, 2], [0.4, 0.4, 0.4]])
    points = sphere * stretch[kind].unsqueeze(1)
    return points.transpose(1, 2) + 0.02 * torch.randn(BATCH, 3, POINTS), kind


torch.manual_seed(27)
classifier = PointNetCls()
optimizer = torch.optim.SGD(classifier.parameters(), lr=0.02, momentum=0.9)
for i in range(20):
    points, kind = clouds()
    optimizer.zero_grad()
    classifier.train()
    pred = classifier(points)
    loss = F.nll_loss(pred, kind)
    loss.backward()
    optimizer.step()
    if i % 5 == 0:
        correct = pred.argmax(1).eq(kind).sum().item()
        print(f"[{i}] train loss {loss.item():.4f} accuracy {correct / BATCH:.2f}")
