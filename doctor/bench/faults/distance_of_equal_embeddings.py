"""The slope of a square root at zero is infinite, and the weights are NaN after equal pairs.

Threads: https://github.com/pytorch/pytorch/issues/2421
Names: B4 N17
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)
PEOPLE, PIXELS = 12, 40
faces = torch.randn(PEOPLE, PIXELS)
# one photo per person is stored twice, as it is in most albums
album = faces.repeat_interleave(4, dim=0) + 0.4 * torch.randn(4 * PEOPLE, PIXELS)
album[1::4] = album[0::4]


def draw_pairs(count):
    first = torch.randint(4 * PEOPLE, (count,))
    same = torch.rand(count) < 0.5
    partner = torch.randint(4 * PEOPLE, (count,))
    second = torch.where(same, first // 4 * 4 + partner % 4, partner)
    keep = first != second
    first, second = first[keep], second[keep]
    return album[first], album[second], (first // 4 == second // 4).float()


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, 12))

    def forward(self, a, b):
        squared = (self.encoder(a) - self.encoder(b)).pow(2).sum(dim=1)
        # broken
        return squared.sqrt()
        # mended
        # return (squared + 1e-8).sqrt()
        # end


net = Siamese()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
for step in range(18):
    a, b, same = draw_pairs(50)
    distance = net(a, b)
    loss = (same * distance**2 + (1 - same) * F.relu(2.0 - distance) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}  contrastive loss {loss.item():.4f}")
