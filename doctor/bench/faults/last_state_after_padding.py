"""The LSTM runs on through the padding, and the last state that is read comes after it.

Threads: https://github.com/ray-project/ray/issues/21392
    https://github.com/bentrevett/pytorch-sentiment-analysis/issues/86
Names: S25
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import rnn

torch.manual_seed(38)
WORDS = 40


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 18, padding_idx=0)
        self.lstm = nn.LSTM(18, 26, batch_first=True)
        self.fc = nn.Linear(26, 3)

    def forward(self, text, lengths):
        embedded = self.embedding(text)
        # broken
        _, (hidden, _) = self.lstm(embedded)
        # mended
        # packed = rnn.pack_padded_sequence(embedded, lengths, True, enforce_sorted=False)
        # _, (hidden, _) = self.lstm(packed)
        # end
        return self.fc(hidden[-1])


def sample(count):
    texts = []
    labels = torch.randint(3, (count,))
    for label in labels.tolist():
        length = int(torch.randint(4, 20, ()))
        words = torch.randint(13, WORDS, (length,))
        words[: length // 2] = torch.randint(1 + 4 * label, 5 + 4 * label, (length // 2,))
        texts.append(words)
    lengths = torch.tensor([len(t) for t in texts])
    return rnn.pad_sequence(texts, batch_first=True), lengths, labels


model = Sentiment()
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
for step in range(18):
    text, lengths, labels = sample(30)
    loss = F.cross_entropy(model(text, lengths), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d} loss {loss.item():.4f}")
