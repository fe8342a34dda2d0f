"""A hand-written batch norm averages its statistics with their graph, which grows at every step.

Threads: https://github.com/pytorch/pytorch/issues/20275
Names: N27
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(79)
SPEAKERS = 6
voices = torch.randn(SPEAKERS, 26)


class FeatureNorm(nn.Module):
    def __init__(self, features, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.momentum, self.eps = momentum, eps
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = x.mean(0), x.var(0)
            # broken
            self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * mean
            self.running_var = (1 - self.momentum) * self.running_var + self.momentum * var
            # mended
            # self.running_mean.lerp_(mean.detach(), self.momentum)
            # self.running_var.lerp_(var.detach(), self.momentum)
            # end
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


model = nn.Sequential(
    nn.Linear(26, 40),
    FeatureNorm(40),
    nn.ReLU(),
    nn.Linear(40, SPEAKERS),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(18):
    speaker = torch.randint(SPEAKERS, (33,))
    loss = F.cross_entropy(model(voices[speaker] + torch.randn(33, 26)), speaker)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.4f}")
