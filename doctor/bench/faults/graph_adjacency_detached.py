"""The learned adjacency is detached, so the two projections that make it never learn.

Threads: https://github.com/queenie88/A-GCN/issues/4
Names: B1 B7
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
NODES, FEATURES, CLASSES = 14, 10, 4
centres = torch.randn(CLASSES, FEATURES)


def sample_graphs(count):
    labels = torch.randint(CLASSES, (count,))
    noise = torch.randn(count, NODES, FEATURES)
    return centres[labels].unsqueeze(1) + 1.5 * noise, labels


class AdaptiveGraphConv(nn.Module):
    def __init__(self, size_in, size_out):
        super().__init__()
        self.phi = nn.Linear(size_in, 8)
        self.theta = nn.Linear(size_in, 8)
        self.update = nn.Linear(size_in, size_out)

    def forward(self, x):
        similarity = self.phi(x) @ self.theta(x).transpose(1, 2)
        adjacency = F.softmax(similarity / 8**0.5, dim=-1)
        # broken
        adjacency = adjacency.detach() + torch.eye(x.size(1))
        # mended
        # adjacency = adjacency + torch.eye(x.size(1))
        # end
        return F.relu(self.update(adjacency @ x))


class GraphClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = AdaptiveGraphConv(FEATURES, 24)
        self.conv2 = AdaptiveGraphConv(24, 24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.head(self.conv2(self.conv1(x)).mean(dim=1))


model = GraphClassifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(18):
    graphs, labels = sample_graphs(20)
    loss = F.cross_entropy(model(graphs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
