"""The loss falls for a few steps and then jumps, because no gradient is ever cleared.

Threads: https://github.com/wenet-e2e/wekws/pull/73
    https://github.com/tenstorrent/tt-blacksmith/pull/711
Names: N1
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(11)
WORDS = 6
patterns = torch.randn(WORDS, 20, 1) + torch.randn(WORDS, 20, 32)


def make_batch(size):
    word = torch.randint(WORDS, (size,))
    features = patterns[word] + 0.7 * torch.randn(size, 20, 32)
    return features, word


class KeywordSpotter(nn.Module):
    def __init__(self, mels=20, channels=24):
        super().__init__()
        self.conv1 = nn.Conv1d(mels, channels, 5, padding=2)
        self.conv2 = nn.Conv1d(channels, channels, 3, stride=2)
        self.head = nn.Linear(channels, WORDS)

    def forward(self, features):
        hidden = F.relu(self.conv1(features))
        hidden = F.relu(self.conv2(hidden))
        return self.head(hidden.mean(-1))


model = KeywordSpotter()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

for step in range(18):
    features, word = make_batch(28)
    logits = model(features)
    loss = F.cross_entropy(logits, word)
    # broken
    # mended
    # optimizer.zero_grad()
    # end
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
