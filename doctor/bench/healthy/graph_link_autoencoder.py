"""A variational graph autoencoder: pairs without a link are drawn anew at each step.

After: pyg-team/pytorch_geometric
"""

import torch
from torch import nn
from torch.nn import functional as F


class MeanConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        source, target = edge_index
        total = torch.zeros_like(x).index_add(0, target, x[source])
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
        return self.lin_l(total / degree.unsqueeze(1)) + self.lin_r(x)


class VGAE(nn.Module):
    def __init__(self, features, width=24, out=8):
        super().__init__()
        self.conv1 = MeanConv(features, width)
        self.conv_mu, self.conv_logstd = MeanConv(width, out), MeanConv(width, out)

    def encode(self, x, edge_index):
        h = self.conv1(x, edge_index).relu()
        self.mu, self.logstd = self.conv_mu(h, edge_index), self.conv_logstd(h, edge_index)
        return self.mu + torch.randn_like(self.mu) * torch.exp(self.logstd)

    def decode(self, z, edges):
        return torch.sigmoid((z[edges[0]] * z[edges[1]]).sum(dim=1))

    def kl_loss(self):
        inner = 1 + 2 * self.logstd - self.mu**2 - self.logstd.exp() ** 2
        return -0.5 * torch.mean(torch.sum(inner, dim=1))


torch.manual_seed(0)
nodes = 70
group = torch.randint(0, 4, (nodes,))
links = torch.rand(nodes, nodes) < torch.where(group == group.unsqueeze(1), 0.3, 0.01)
links = (links | links.T) & ~torch.eye(nodes, dtype=torch.bool)
edge_index, absent = links.nonzero().T, (~links).nonzero().T
x = F.one_hot(group, 4) + 0.8 * torch.randn(nodes, 4)
model = VGAE(features=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(20):
    optimizer.zero_grad()
    z = model.encode(x, edge_index)
    drawn = absent[:, torch.randint(0, absent.shape[1], (edge_index.shape[1],))]
    pos_loss = -torch.log(model.decode(z, edge_index) + 1e-15).mean()
    neg_loss = -torch.log(1 - model.decode(z, drawn) + 1e-15).mean()
    loss = pos_loss + neg_loss + model.kl_loss() / nodes
    loss.backward()
    optimizer.step()
    print(f"Epoch: {epoch:02d}, Loss: {loss.item():.4f}")
