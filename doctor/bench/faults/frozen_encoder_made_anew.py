"""The classifier makes a new encoder and freezes it, so its head learns on random features.

Threads: https://github.com/LibreYOLO/libreyolo/pull/444
    https://github.com/TNI-playground/Fed_HeLLo/issues/2
Names: S22 S51
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(33)
mixing = torch.randn(6, 30) / 2


def make_encoder():
    hidden = [nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(32, 10))


def samples(count):
    source = torch.randn(count, 6)
    return source, torch.tanh(source @ mixing) + 0.1 * torch.randn(count, 30)


class Probe(nn.Module):
    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.head = nn.Linear(10, classes)

    def forward(self, x):
        return self.head(self.encoder(x))


pretrained = make_encoder()
with torch.no_grad():
    # stands in for weights of a long training on other data
    for layer in pretrained[::2]:
        low_rank = torch.randn(len(layer.weight), 3) @ torch.randn(3, layer.in_features)
        layer.weight.add_(0.3 * low_rank / layer.in_features**0.5)

# broken
model = Probe(make_encoder(), classes=4)
# mended
# model = Probe(pretrained, classes=4)
# end
optimizer = torch.optim.Adam(model.head.parameters(), lr=2e-2)
for step in range(18):
    source, x = samples(40)
    labels = source[:, :4].argmax(dim=1)
    loss = F.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
