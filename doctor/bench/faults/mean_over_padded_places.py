"""The mean over time takes the padded frames along, so short clips are mostly padding.

Threads: https://github.com/ray-project/ray/issues/21392
Names: S25
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence


class ClipClassifier(nn.Module):
    def __init__(self, inputs=9, width=24, classes=5):
        super().__init__()
        self.frame = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, clips, mask):
        states, _ = self.gru(self.frame(clips))
        # broken
        pooled = states.mean(dim=1)
        # mended
        # mask = mask.unsqueeze(-1)
        # pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
        # end
        return self.head(pooled)


def make_clips(centres, count):
    labels = torch.randint(len(centres), (count,))
    clips = []
    for label in labels.tolist():
        frames = int(torch.randint(3, 25, ()))
        clips.append(centres[label] + 1.2 * torch.randn(frames, centres.size(1)))
    mask = pad_sequence([torch.ones(len(c)) for c in clips], batch_first=True)
    return pad_sequence(clips, batch_first=True), mask, labels


def main():
    torch.manual_seed(41)
    centres = torch.randn(5, 9)
    model = ClipClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(18):
        clips, mask, labels = make_clips(centres, 28)
        loss = F.cross_entropy(model(clips, mask), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"{step} {loss.item():.4f}")


if __name__ == "__main__":
    main()
