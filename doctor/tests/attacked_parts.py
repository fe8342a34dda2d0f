"""What the healthy programs of labels, of picks and of steps are made of."""

import torch
import torch.nn as nn


def net(i, o, h=32, act=nn.ReLU):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, o))


def update(opt, loss):
    opt.zero_grad()
    loss.backward()
    opt.step()


def texts(rows, length, vocab=64, low=4):
    first = torch.randint(low, vocab, (rows, 1))
    return (first + torch.randint(1, 4, (rows, length)).cumsum(1) - low) % (vocab - low) + low


def causal(n):
    return torch.triu(torch.full((n, n), float("-inf")), 1)


class LM(nn.Module):
    """A small causal transformer; places from a learned parameter."""

    def __init__(self, vocab=64, width=32, length=64, layers=1):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, x):
        n = x.shape[1]
        return self.norm(self.layers(x + self.places[:n], mask=causal(n)))

    def forward(self, ids):
        return self.head(self.hidden(self.words(ids)))
