"""A graph network that gets the whole graph at every step: the inputs are the same each time, most
nodes have no label in training, and dropout acts on the inputs too.

After: tkipf/pygcn
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(42)


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        for parameter in self.parameters():
            parameter.data.uniform_(-(out_features**-0.5), out_features**-0.5)

    def forward(self, input, adj):
        return torch.spmm(adj, torch.mm(input, self.weight)) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(nfeat, nhid), GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.dropout(x, self.dropout, training=self.training)
        x = F.dropout(F.relu(self.gc1(x, adj)), self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


nodes, classes = 90, 3
labels = torch.randint(0, classes, (nodes,))
same = labels.unsqueeze(0) == labels.unsqueeze(1)
links = torch.rand(nodes, nodes) < torch.where(same, 0.12, 0.01)
adj = ((links | links.T).float() + torch.eye(nodes)).clamp(max=1)
adj = (adj / adj.sum(1, keepdim=True)).to_sparse()
features = (torch.rand(nodes, 14) < 0.15).float()
features[torch.arange(nodes), labels] += (torch.rand(nodes) < 0.5).float()
idx_train, idx_val = torch.arange(20), torch.arange(20, 90)
model = GCN(nfeat=14, nhid=16, nclass=classes, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=5e-4)
for epoch in range(20):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        output = model(features, adj)
    acc_val = (output.argmax(1) == labels)[idx_val].float().mean()
    print(f"Epoch: {epoch + 1:04d} {loss_train.item():.4f} {acc_val.item():.4f}")
