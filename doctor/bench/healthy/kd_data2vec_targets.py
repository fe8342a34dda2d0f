"""A transformer regresses, at masked places only, the mean of all layers of its own slow copy,
which reads the whole row in eval mode, while places that are not masked have no loss.

After: facebookresearch/fairseq (data2vec)
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)
features, dim, length, batch = 9, 32, 16, 12


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.place = nn.Linear(features, dim), nn.Parameter(torch.randn(length, dim))
        layers = (nn.TransformerEncoderLayer(dim, 4, 64, 0.1, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x, mask=None, mask_emb=None):
        x, states = self.project(x), []
        x = (x if mask is None else torch.where(mask.unsqueeze(-1), mask_emb, x)) + self.place
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return states


class Data2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mask_emb = Encoder(), nn.Parameter(0.1 * torch.randn(dim))
        self.regression_head = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.ema = copy.deepcopy(self.encoder).requires_grad_(False).eval()

    def forward(self, x, mask):
        with torch.no_grad():
            y = sum(F.layer_norm(s, (dim,)) for s in self.ema(x)) / len(self.encoder.layers)
        pred = self.regression_head(self.encoder(x, mask, self.mask_emb)[-1][mask])
        return F.smooth_l1_loss(pred, y[mask], beta=1.0)


model = Data2Vec()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
num_updates = 20
for update in range(num_updates):
    phase = torch.rand(batch, 1, 1) * 6 + torch.arange(length).view(1, -1, 1) * 0.7
    x = torch.sin(phase * torch.linspace(0.5, 1.5, features)) + 0.1 * torch.randn(batch, length, 1)
    loss = model(x, torch.rand(batch, length) < 0.4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(model.ema.parameters(), model.encoder.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
    print(update, loss.item())
