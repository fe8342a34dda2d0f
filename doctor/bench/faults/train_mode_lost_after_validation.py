"""The validation puts the model in eval mode, and the rest of the epoch trains without dropout.

Threads: https://github.com/joeynmt/joeynmt/issues/184
    https://github.com/huggingface/lerobot/issues/3668
Names: N16 S11
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(59)
WORDS, LENGTH, WIDTH = 45, 12, 32


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.encoder = nn.TransformerEncoderLayer(
            WIDTH, 4, dim_feedforward=64, dropout=0.1, batch_first=True
        )
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source):
        return self.out(self.encoder(self.source(source) + self.places))


def sentence_pairs(size):
    source = torch.randint(WORDS, (size, LENGTH))
    target = (source * 7 + 3) % WORDS
    return source, target


model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
held_out = sentence_pairs(30)


@torch.no_grad()
def validate():
    model.eval()
    source, target = held_out
    loss = F.cross_entropy(model(source).flatten(0, 1), target.flatten()).item()
    # broken
    # mended
    # model.train()
    # end
    return loss


model.train()
for step in range(18):
    source, target = sentence_pairs(16)
    loss = F.cross_entropy(model(source).flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 3:
        print(step, f"train {loss.item():.4f} validation {validate():.4f}")
