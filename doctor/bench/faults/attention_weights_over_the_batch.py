"""The attention takes its softmax over dim 0, the batch, so documents share weight among them.

Threads: https://github.com/PetrochukM/PyTorch-NLP/issues/2
    https://github.com/ctallec/world-models/issues/10
Names: S33
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, TOPICS, BATCH, LENGTH = 90, 4, 30, 12


class AttentiveReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.lstm = nn.LSTM(32, 24, batch_first=True, bidirectional=True)
        self.attention = nn.Linear(48, 1)
        # broken
        self.softmax = nn.Softmax(dim=0)
        # mended
        # self.softmax = nn.Softmax(dim=1)
        # end
        self.classifier = nn.Linear(48, TOPICS)

    def forward(self, words):
        states, _ = self.lstm(self.embedding(words))
        scores = self.attention(torch.tanh(states)).squeeze(-1)
        weights = self.softmax(scores)
        document = torch.bmm(weights.unsqueeze(1), states).squeeze(1)
        return self.classifier(document)


def documents():
    topic = torch.randint(0, TOPICS, (BATCH,))
    words = torch.randint(10, VOCAB, (BATCH, LENGTH))
    place = torch.randint(0, LENGTH, (BATCH, 2))
    keyword = (2 * topic + torch.randint(0, 2, (BATCH,))).unsqueeze(1).expand(-1, 2)
    return words.scatter(1, place, keyword), topic


def main():
    torch.manual_seed(101)
    model = AttentiveReader()
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    for step in range(20):
        words, topic = documents()
        loss = F.cross_entropy(model(words), topic)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:02d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
