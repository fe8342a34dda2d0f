"""The end of each answer that is hidden with the padding (F16), where no tokenizer tells which token it is."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .test_meetings import named

WORDS, PAD, END, SEP = 20, 0, 1, 2
HOW = {
    "labels of the answers": True,
    "labels like the ids": True,
    "masked_fill": True,
    "where": True,
    "a fixed length": False,
    "multiples of eight": False,
    "padding of its own": False,
    "padding behind an end": False,
    "a mark in the text": False,
    "another number in their place": False,
}


def rows(how: str, long: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six rows whose longest has so many words; the number of their prompt's."""
    own = how in ("padding of its own", "padding behind an end")
    lengths = [long - 3, long - 4, long, long - 1, long - 2, long - 2]
    width = 15 if how == "a fixed length" else long + (2 if how == "padding behind an end" else 1)
    width += -width % 8 if how == "multiples of eight" else 0
    ids = torch.full((6, width), PAD)
    for row, n in zip(ids, lengths):
        row[:n] = torch.randint(3, WORDS, (n,))
        row[n] = END if own else PAD
        row[3] = SEP
    return ids


def hidden(how: str, ids: torch.Tensor) -> torch.Tensor:
    labels = ids.clone()
    if how == "masked_fill":
        return ids.masked_fill(ids == PAD, -100)
    if how == "where":
        return torch.where(ids == PAD, -100, ids)
    if how == "labels of the answers":
        labels[:, :4] = -100
        behind = (ids == PAD).int().cumsum(1) > 1
        labels.masked_fill_(behind, -100)
    if how == "a mark in the text":
        labels[labels == SEP] = -100
    elif how == "another number in their place":
        labels[labels == PAD] = 5
    else:
        labels[labels == PAD] = -100
    return labels


@pytest.mark.parametrize("how", HOW)
def test_the_end_is_hidden_with_the_padding(how):
    model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))
    longest = itertools.cycle({"a fixed length": [14], "multiples of eight": [15, 7]}.get(how, [11, 9, 12, 10]))

    def loss(model):
        ids = rows(how, next(longest))
        labels = hidden(how, ids)
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())

    assert named("F16", model, loss, "never a target") is HOW[how]
