"""What is read off a loss: how far ahead it predicts, over how many tokens, divided by what."""

import pytest
import torch
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import batches, lm
from tests.test_loss import Small, ce, chunked, picked, shift
from train_doctor import watching
from train_doctor.evidence import Backward


def readings(loss_of, model=Small, monkeypatch=None):
    """The readings of three steps."""
    seen = []
    original = watching.checks.examine
    monkeypatch.setattr(watching.checks, "examine", lambda e: seen.append(e) or original(e))
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with doctor.watch(net, say=False):
        for ids in batches(3):
            optimizer.zero_grad()
            loss_of(net, ids).backward()
            optimizer.step()
    return [b.reading for b in seen[0].of(Backward)]


def onehot(k):
    def loss(model, ids):
        logits, targets = shift(model, ids, k)
        return -(F.one_hot(targets, 256).float() * logits.log_softmax(-1)).sum(-1).mean()

    return loss


CASES = {
    "hf": (lambda m, i: m(input_ids=i, labels=i).loss, lm, "recorded", 1, 124, 1.0),
    "hf, a quarter": (lambda m, i: m(input_ids=i, labels=i).loss / 4, lm, "recorded", 1, 124, 0.25),
    "hf, items": (lambda m, i: m(input_ids=i, labels=i, num_items_in_batch=248).loss, lm, "recorded", 1, 124, 0.5),
    "xy": (lambda m, i: m(i[:, :-1], i[:, 1:])[1], Small, "recorded", 1, 124, 1.0),
    "two ahead": (lambda m, i: ce(*shift(m, i, 2)), Small, "recorded", 2, 120, 1.0),
    "front crop": (lambda m, i: ce(m(i)[:, 1:], i[:, 1:]), Small, "recorded", 0, 124, 1.0),
    "sum": (lambda m, i: ce(*shift(m, i, 1), reduction="sum"), Small, "recorded", 1, 124, 124.0),
    "chunked": (chunked, Small, "recorded", 1, 124, 1.0),
    "gather": (lambda m, i: picked(*shift(m, i, 1)).mean() / 2, Small, "graph", 1, 124, 0.5),
    "gather, xy": (lambda m, i: picked(m(i[:, :-1]), i[:, 1:]).mean(), Small, "graph", 1, 124, 1.0),
    "one-hot": (onehot(1), Small, "enumerated", 1, 124, 1.0),
    "one-hot, two ahead": (onehot(2), Small, "enumerated", 2, 120, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_read(name, monkeypatch):
    loss, model, how, offset, tokens, ratio = CASES[name]
    for reading in readings(loss, model, monkeypatch):
        assert (reading.how, reading.offset, reading.tokens) == (how, offset, tokens)
        assert reading.ratio == pytest.approx(ratio, rel=1e-3)


def test_a_loss_of_another_kind_is_not_read(monkeypatch):
    assert readings(lambda m, i: m(i).square().mean(), Small, monkeypatch) == [None] * 3
