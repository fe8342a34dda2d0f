"""The weights are fp16 and Adam's default epsilon is 0 in it, so unused rows turn to NaN.

Threads: https://github.com/afiaka87/glide-finetune/issues/5
    https://github.com/pytorch/pytorch/issues/147437
Names: N25 N17 F5 B4
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(71)
WORDS, LENGTH, TAGS = 300, 9, 4
tag_of_word = torch.randint(TAGS, (WORDS,))


class Tagger(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mix = nn.Conv1d(width, 32, 3, padding=1)
        self.out = nn.Linear(32, TAGS)

    def forward(self, words):
        hidden = self.embed(words).transpose(1, 2)
        return self.out(F.relu(self.mix(hidden)).transpose(1, 2))


# broken
tagger = Tagger().half()
# mended
# tagger = Tagger()
# end
optimizer = torch.optim.Adam(tagger.parameters(), lr=2e-3)

for step in range(16):
    words = torch.randint(WORDS, (6, LENGTH))
    scores = tagger(words).float()
    loss = F.cross_entropy(scores.flatten(0, 1), tag_of_word[words].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
