"""requires_grad is set on the module and not on its parameters, so the encoder learns.

Threads: https://github.com/catalyst-team/catalyst/pull/81
Names: S18
"""

import torch
from torch import nn
from torch.nn import functional as F


class SpeechEncoder(nn.Module):
    def __init__(self, mels=18, width=26):
        super().__init__()
        self.conv = nn.Conv1d(mels, width, 5, padding=2)
        self.rnn = nn.GRU(width, width, batch_first=True)

    def forward(self, mel):
        return self.rnn(F.relu(self.conv(mel)).transpose(1, 2))[0].mean(dim=1)


class KeywordModel(nn.Module):
    def __init__(self, encoder, words=7, frozen=True):
        super().__init__()
        self.encoder = encoder
        self.linear = nn.Linear(26, words)
        # broken
        self.encoder.requires_grad = not frozen
        # mended
        # self.encoder.requires_grad_(not frozen)
        # end

    def forward(self, mel):
        return self.linear(self.encoder(mel))


def utterances(templates, count):
    word = torch.randint(len(templates), (count,))
    return templates[word] + 0.4 * torch.randn(count, 18, 30), word


def main():
    torch.manual_seed(31)
    templates = torch.randn(7, 18, 30)
    encoder = SpeechEncoder()
    for param in encoder.parameters():
        param.data.mul_(2.0 + torch.rand_like(param))  # stands in for trained weights
    model = KeywordModel(encoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(17):
        mel, word = utterances(templates, 22)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(mel), word)
        loss.backward()
        optimizer.step()
        print(step, f"{loss.item():.4f}")


if __name__ == "__main__":
    main()
