"""F33: targets that went in at the place where they are asked for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import quiet
from tests.test_arithmetic import said
from train_doctor.echoes import DECODER, MASK, UNMASKED, echo

V, T = 12, 6


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(V, 16), nn.Embedding(V + 1, 16)
        self.encoder, self.decoder = nn.GRU(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, V)

    def forward(self, source, target):
        _, state = self.encoder(self.source(source))
        return self.head(self.decoder(self.target(target), state)[0])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(V + 1, 16)
        self.body, self.head = nn.GRU(16, 16, batch_first=True, bidirectional=True), nn.Linear(32, V)

    def forward(self, ids):
        return self.head(self.body(self.tokens(ids))[0])


def run(how: str):
    torch.manual_seed(0)
    model = Masked() if "mask" in how else Translator()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
        for _ in range(5):
            ids = torch.randint(V, (16, T))
            shifted = torch.cat([torch.full((16, 1), V), ids.flip(1)[:, :-1]], 1)
            hidden = torch.rand(16, T) < 0.3
            if how == "unshifted":
                logits, labels = model(ids, ids.flip(1)), ids.flip(1)
            elif how == "shifted":
                logits, labels = model(ids, shifted), ids.flip(1)
            elif how == "autoencoder":
                logits, labels = model(ids, torch.cat([torch.full((16, 1), V), ids[:, :-1]], 1)), ids
            elif how == "mask inverted":
                logits, labels = model(ids.masked_fill(hidden, V)), ids.masked_fill(hidden, -100)
            else:  # "masked"
                logits, labels = model(ids.masked_fill(hidden, V)), ids.masked_fill(~hidden, -100)
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return report


@pytest.mark.parametrize("how", ["unshifted", "mask inverted"])
def test_echoed_targets_are_named(how):
    report = quiet(lambda: run(how))
    assert report.root is not None and report.root.check == "F33", f"\n{report}"
    assert ("inverted" in report.root.diagnosis) == ("mask" in how)


@pytest.mark.parametrize("how", ["shifted", "autoencoder", "masked"])
def test_others_are_left_alone(how):
    assert "F33" not in said(quiet(lambda: run(how)))


def test_which_echo_it_is():
    ids, other = torch.arange(24).view(4, 6), torch.arange(24).view(4, 6).flip(1)
    assert echo([other, ids], ids, -100) == DECODER
    assert echo([ids], ids, -100) == echo([ids, other], ids, -100) == echo([other, ids], other + 1, -100) == ""
    hidden = torch.zeros(4, 6, dtype=torch.bool).index_fill(1, torch.tensor([1, 4]), True)
    assert echo([ids.masked_fill(hidden, 99)], ids.masked_fill(hidden, -100), -100) == MASK
    assert echo([ids.masked_fill(hidden, 99)], ids.masked_fill(~hidden, -100), -100) == ""
    padded = hidden.clone().index_fill_(1, torch.tensor([5]), True)  # the last place is padding, which nobody asks for
    given = ids.masked_fill(hidden, 99).index_fill(1, torch.tensor([5]), 98)
    assert echo([given], ids.masked_fill(padded, -100), -100) == MASK
    one = hidden.clone().index_fill_(1, torch.tensor([4]), False)
    assert echo([other], other.masked_fill(~hidden, -100), -100) == UNMASKED
    assert echo([other.repeat(2, 1)], other.masked_fill(~one, -100).repeat(2, 1), -100) == ""  # an answer


class Rewriter(Translator):
    def forward(self, source, decoder_input_ids):
        return super().forward(source, decoder_input_ids)


@pytest.mark.parametrize("how", ["unshifted", "shifted", "some hidden"])
def test_a_decoder_that_is_told_what_an_own_loss_asks_for(how):
    def loss_of(model):
        length = torch.randint(3, T + 1, (16, 1))
        pad = torch.arange(T) >= length
        ids = torch.randint(1, V, (16, T))
        labels = ids.masked_fill(pad, -100)
        given = ids.masked_fill(pad, V)
        if how == "shifted":
            given = torch.cat([torch.full((16, 1), V), given[:, :-1]], 1)
        elif how == "some hidden":  # words are to be put back
            given = given.masked_fill(torch.rand(16, T) < 0.15, V)
        logp = model(ids, decoder_input_ids=given).log_softmax(-1)
        nll = -logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (nll * ~pad).sum() / (~pad).sum()

    torch.manual_seed(0)
    model = Rewriter()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def watched():
        with doctor.watch(model, optimizer=optimizer, steps=5, say=False) as report:
            for _ in range(5):
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
        return report

    assert ("F3" in said(quiet(watched))) is (how == "unshifted")
