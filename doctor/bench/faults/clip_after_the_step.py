"""Gradients are clipped after the optimizer has used them, so clipping does nothing.

Threads: https://github.com/VGraphRNN/VGRNN/issues/4
    https://github.com/awslabs/graphstorm/issues/1366
Names: N8
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(9)
NODES, FEATURES, COMMUNITIES = 60, 12, 4
community = torch.arange(NODES) % COMMUNITIES
same = (community[:, None] == community[None, :]).float()
edges = (torch.rand(NODES, NODES) < 0.05 + 0.3 * same).float()
adjacency = ((edges + edges.t()) > 0).float() + torch.eye(NODES)
normalised = adjacency / adjacency.sum(1, keepdim=True)
features = torch.randn(COMMUNITIES, FEATURES)[community] + torch.randn(NODES, FEATURES)


class GraphNet(nn.Module):
    def __init__(self, hidden=20):
        super().__init__()
        self.first = nn.Linear(FEATURES, hidden)
        self.second = nn.Linear(hidden, COMMUNITIES)

    def forward(self, nodes, links):
        hidden = F.elu(links @ self.first(nodes))
        hidden = F.dropout(hidden, 0.3, self.training)
        return links @ self.second(hidden)


def train():
    net = GraphNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(20):
        chosen = torch.randperm(NODES)[:32]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(features, normalised)[chosen], community[chosen])
        loss.backward()
        # broken
        optimizer.step()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        # mended
        # nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        # optimizer.step()
        # end
        print("epoch", epoch, "loss", round(loss.item(), 4))


if __name__ == "__main__":
    train()
