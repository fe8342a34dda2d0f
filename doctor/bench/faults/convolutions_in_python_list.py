"""The convolutions stand in a Python list, so model.parameters() misses them.

Threads: https://github.com/pytorch/pytorch/issues/1053
    https://github.com/asyml/texar-pytorch/issues/72
Names: S19 S3
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(14)
VOCAB, LENGTH, CLASSES = 60, 16, 3


class TextCNN(nn.Module):
    def __init__(self, width=20, filters=10, sizes=(2, 3, 4)):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        # broken
        self.convs = [nn.Conv1d(width, filters, k) for k in sizes]
        # mended
        # self.convs = nn.ModuleList([nn.Conv1d(width, filters, k) for k in sizes])
        # end
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(filters * len(sizes), CLASSES)

    def forward(self, text):
        x = self.embedding(text).transpose(1, 2)
        pooled = [F.relu(conv(x)).max(dim=2).values for conv in self.convs]
        return self.fc(self.dropout(torch.cat(pooled, dim=1)))


def reviews(count):
    text = torch.randint(VOCAB, (count, LENGTH))
    labels = torch.randint(CLASSES, (count,))
    start = torch.randint(LENGTH - 3, (count,))
    for row in range(count):
        phrase = 10 * int(labels[row]) + torch.arange(3)
        text[row, start[row] : start[row] + 3] = phrase
    return text, labels


model = TextCNN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model.train()
for step in range(18):
    text, labels = reviews(40)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(text), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step:02d} | loss {loss.item():.4f}")
