"""Packed rows whose documents read each other (F12), by models of one's own, and other numbers that begin anew."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor

from .bench import quiet
from .test_arithmetic import said

WORDS, WIDTH, PLACES = 24, 32, 24
BOS, EOS = 0, 1


def rows(count=6, short=3, long=8, end=False):
    """Ids, positions and numbers of documents, in rows that are cut at 24 tokens."""
    made = []
    for _ in range(count):
        ids, places, numbers = [], [], []
        while len(ids) < PLACES:
            n = int(torch.randint(short, long, ()))
            words = torch.randint(2, WORDS, (n,)).tolist()
            words[-1 if end else 0] = EOS if end else BOS
            numbers += [max(numbers, default=-1) + 1] * n
            ids, places = ids + words, places + [*range(n)]
        made.append([ids[:PLACES], places[:PLACES], numbers[:PLACES]])
    return [torch.tensor(kind) for kind in zip(*made)]


class Net(nn.Module):
    """Attention of one layer, with its positions and its mask made in one of several ways."""

    def __init__(self, how="", see="causal"):
        super().__init__()
        self.how, self.see = how, see
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.more = (
            nn.Embedding(64, WIDTH) if how in ("counts on", "counts on, in rows", "numbers in a table") else None
        )
        self.row = nn.Parameter(torch.randn(1, PLACES, WIDTH)) if how == "a table of the row" else None
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def read(self, ids, places, numbers):
        n = ids.shape[1]
        h = self.words(ids)
        h = h + (self.places(places) if self.how != "turned" else 0)
        if self.row is not None:
            h = h + self.row
        if self.how == "counts on":
            h = h + self.more(torch.arange(n))
        if self.how == "counts on, in rows":
            h = h + self.more(torch.arange(n).expand(ids.shape))
        if self.how == "numbers in a table":
            h = h + self.more(numbers)
        q, k, v = self.qkv(h).view(len(ids), n, 3, 2, -1).unbind(2)
        if self.how in ("turned", "turned over the row"):
            places = places if self.how == "turned" else torch.arange(n)[None]
            angles = places[..., None] * 10.0 ** -torch.arange(WIDTH // 4)
            cos, sin = angles.cos()[:, :, None].repeat(1, 1, 1, 2), angles.sin()[:, :, None].repeat(1, 1, 1, 2)
            q, k = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = torch.ones(n, n).tril().bool()
        if self.see == "causal":
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            same = (numbers[:, :, None] == numbers[:, None])[:, None]
            same = same if self.see == "blocks, both ways" else same & causal
            mask = torch.zeros(same.shape).masked_fill(~same, -1e9) if self.see == "blocks in numbers" else same
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(self.out(h.transpose(1, 2).flatten(2)))


class Named(Net):
    def forward(self, ids, position_ids, doc_ids):
        return self.read(ids, position_ids, doc_ids)


class Unnamed(Net):
    def forward(self, ids, where, which):
        return self.read(ids, where, which)


class Told(Net):
    def forward(self, ids, position):
        return self.read(ids, position, None)


class Inside(Net):
    """Counts its positions from where documents begin, or end."""

    def forward(self, ids):
        n = ids.shape[1]
        begins = ids == BOS
        if self.how == "ends":
            begins = F.pad(ids[:, :-1] == EOS, (1, 0))
        at = torch.arange(n).expand(ids.shape)
        places = at - (at * begins).cummax(1).values
        return self.read(ids, places, begins.long().cumsum(1))


def program(model, batch, give):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for _ in range(5):
            ids, *more = batch()
            targets = ids[:, 1:].masked_fill(ids[:, 1:] == BOS, -100)
            loss = F.cross_entropy(give(model, ids, *more)[:, :-1].flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert not report.faults
    return report


def in_order(model, ids, places, numbers):
    return model(ids, places, numbers)


def by_name(model, ids, places, numbers):
    return model(ids=ids, position_ids=places, doc_ids=numbers)


def alone(model, ids, places, numbers):
    return model(ids)


def told(model, ids, places, numbers):
    return model(ids, position=places)


def without_restarts(model, ids, places, numbers):
    return model(ids, torch.arange(PLACES).expand(ids.shape), numbers)


def grid():
    """Pixels with their columns, and their rows."""
    ids, at = torch.randint(2, WORDS, (6, PLACES)), torch.arange(PLACES)
    ids[:, ::6] = BOS
    return ids, (at % 6).expand(6, -1), (at // 6).expand(6, -1)


def pairs():
    """A text and its sound, which is counted anew."""
    ids, places, numbers = rows(short=9, long=13)
    places = torch.where(numbers > 1, places + 30, places)
    first = (numbers > 1).int().argmax(1)
    for row, at in enumerate(first.tolist()):  # what comes third goes on
        if at:
            places[row, at:] = places[row, at - 1] + 1 + torch.arange(PLACES - at)
            ids[row, at] = 5
    return ids, places, numbers


def topics():
    """Documents that begin with one of three words, which stand nowhere else."""
    ids, places, numbers = rows()
    starts = places == 0
    ids = torch.where(starts, 2 + ids.roll(1, 1) % 3, ids.clamp(min=5))
    return ids, places, numbers


def filled():
    """Rows that are filled up with the token that documents begin with, as a part of their first one."""
    ids, places, numbers = rows()
    end = torch.arange(PLACES) >= torch.randint(PLACES - 5, PLACES - 2, (len(ids), 1))
    return tuple(part.masked_fill(end, 0) for part in (ids, places, numbers))


def beats():
    """Chords with their beat in the bar; none of them stands at its beginning alone."""
    ids, places, numbers = rows()
    return torch.randint(2, WORDS, ids.shape), places, numbers


def digits():
    """Numbers with the place of each digit, and signs between them."""
    ids, places, numbers = rows(short=2, long=5)
    starts = places == 0
    ids[starts] = torch.randint(2, 5, (int(starts.sum()),))
    return ids, places, torch.zeros_like(numbers)


WRONG = {
    "given by name": (Named(), rows, by_name, "ERROR"),
    "given in order": (Named(), rows, in_order, "ERROR"),
    "angles": (Named("turned"), rows, in_order, "ERROR"),
    "under other names": (Unnamed(), rows, in_order, "WARN"),
    "angles under other names": (Unnamed("turned"), rows, in_order, "WARN"),
    "called position": (Told(), rows, told, "WARN"),
    "called position, with several first words": (Told(), topics, told, "WARN"),
    "filled up": (Told(), filled, told, "WARN"),
    "called position, angles": (Told("turned"), topics, told, "WARN"),
    "by name, in a row with places": (Named("a table of the row"), rows, by_name, "ERROR"),
    "counted inside": (Inside(), rows, alone, "WARN"),
    "counted inside, from their ends": (Inside("ends"), lambda: rows(end=True), alone, "WARN"),
}
RIGHT = {
    "blocks": (Named(see="blocks"), rows, by_name),
    "blocks in numbers": (Named(see="blocks in numbers"), rows, in_order),
    "blocks under other names": (Unnamed(see="blocks"), rows, in_order),
    "blocks, angles": (Unnamed("turned", see="blocks"), rows, in_order),
    "blocks, counted inside": (Inside(see="blocks"), rows, alone),
    "blocks, counted inside, from their ends": (Inside("ends", see="blocks"), lambda: rows(end=True), alone),
    "blocks, filled up": (Unnamed(see="blocks"), filled, in_order),
    "end to end": (Named(), rows, without_restarts),
    "counts on": (Unnamed("counts on"), rows, in_order),
    "counts on, in rows": (Unnamed("counts on, in rows"), rows, in_order),
    "numbers in a table": (Unnamed("numbers in a table"), rows, in_order),
    "columns of a picture": (Unnamed(), grid, in_order),
    "columns of a picture, by name": (Named(), grid, in_order),
    "pairs": (Unnamed(), pairs, in_order),
    "digits": (Unnamed(), digits, in_order),
    "beats": (Told(), beats, told),
    "angles over the row": (Unnamed("turned over the row"), rows, in_order),
    "a table of the row": (Unnamed("a table of the row"), rows, in_order),
}


@pytest.mark.parametrize("name", WRONG)
def test_documents_that_read_each_other(name):
    *parts, severity = WRONG[name]
    report = quiet(lambda: program(*parts))
    assert report.root is not None and (report.root.check, report.root.severity) == ("F12", severity), f"\n{report}"


@pytest.mark.parametrize("name", RIGHT)
def test_documents_that_do_not_and_other_things_that_begin_anew(name):
    assert not said(quiet(lambda: program(*RIGHT[name])))
