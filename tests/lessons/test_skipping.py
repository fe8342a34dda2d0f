"""What is watched is what the layers did, and the hooks are gone afterwards."""

import pytest
import torch
from torch import nn

from lessons import skipping
from nblib import models
from nblib.methods.moe import depths


@pytest.fixture
def skips():
    model = models.tiny(64, hidden=32, layers=2, heads=2)
    depths.attach(model, capacity=0.5, layers=[0, 1])
    return model


def test_each_layer_with_its_choice_input_and_output(skips):
    ids = torch.randint(64, (3, 8))
    seen = skipping.watched(skips, ids)
    assert len(seen) == 2 and torch.equal(seen[0][1], skips.get_input_embeddings()(ids))
    assert torch.equal(seen[0][2], seen[1][1])  # what leaves the first enters the second
    for choice, x, y in seen:
        assert int(choice.chosen.sum()) == 12 and torch.equal(x[~choice.chosen], y[~choice.chosen])
    assert all(not m._forward_hooks and m.seen is None for m in depths.wrapped(skips).values())


def test_doubled_tokens_do_not_pass_unchanged(skips):
    for layer in depths.wrapped(skips).values():
        layer.skipped = "doubled"
    choice, x, y = skipping.watched(skips, torch.randint(64, (3, 8)))[0]
    assert torch.equal(2 * x[~choice.chosen], y[~choice.chosen])


@pytest.mark.parametrize(
    "reach, words",
    [
        (dict(one=0.0, other=0.0), "in neither mode"),
        (dict(one=0.5, other=0.0), "one only"),
        (dict(one=0.0, other=0.5), "other only"),
        (dict(one=0.5, other=0.5), "in both"),
    ],
)
def test_modes_in_words(reach, words):
    assert skipping.modes(reach) == words


def test_calls_counts_each_module_once():
    some = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    assert (
        skipping.calls(
            some, lambda: [some[0](torch.ones(2)), some[0](torch.ones(2)), some[2](torch.ones(2))]
        )
        == 2
    )
    assert not any(m._forward_pre_hooks for m in some)
    assert skipping.close(1.0, 1.00001) and not skipping.close(1.0, 1.001)
