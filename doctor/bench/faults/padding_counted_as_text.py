"""The loss counts the padding behind each formula as text, so it looks better than it is.

Threads: https://github.com/lukas-blecher/LaTeX-OCR/issues/305
    https://github.com/lucidrains/DALLE-pytorch/issues/57
Names: F15
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(8)
PAD_ID, BOS_ID, EOS_ID, VOCAB = 0, 1, 2, 40


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32, padding_idx=PAD_ID)
        self.image = nn.Linear(12, 48)
        self.gru = nn.GRU(32, 48, batch_first=True)
        self.to_logits = nn.Linear(48, VOCAB)

    def forward(self, picture, tokens):
        state = torch.tanh(self.image(picture)).unsqueeze(0)
        out, _ = self.gru(self.embedding(tokens), state)
        return self.to_logits(out)


projection = torch.randn(1, 12)


def formulas(count):
    sequences = []
    pictures = []
    for _ in range(count):
        length = int(torch.randint(3, 15, (1,)))
        first = int(torch.randint(3, VOCAB - 1, (1,)))
        body = (first + 2 * torch.arange(length) - 3) % (VOCAB - 3) + 3
        sequences.append(torch.cat([torch.tensor([BOS_ID]), body, torch.tensor([EOS_ID])]))
        pictures.append(projection[0] * first / VOCAB + 0.05 * torch.randn(12))
    return torch.stack(pictures), pad_sequence(sequences, batch_first=True, padding_value=PAD_ID)


model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(20):
    picture, tokens = formulas(18)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(picture, inputs)
    # broken
    loss = F.cross_entropy(logits.transpose(1, 2), targets)
    # mended
    # loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD_ID)
    # end
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step:3d} {loss.item():.4f}")
