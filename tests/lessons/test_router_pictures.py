"""Known routings have the balance that they must have, and the pictures say what they hold."""

import math

import pytest
import torch

from lessons import router_pictures, token_kinds
from nblib.methods import moe


@pytest.mark.parametrize("experts, top_k", [(8, 2), (4, 1), (6, 3)])
def test_the_balance_of_the_known(experts, top_k):
    for name, (layers, expected) in router_pictures.known(experts, top_k).items():
        value = sum(float(moe.balance(*layer)) for layer in layers) / len(layers)
        assert math.isclose(value, expected, rel_tol=1e-5), name
        assert all(int(chosen.max()) < experts for _, chosen in layers)


def test_a_training_has_its_curves_and_its_terms():
    history = [dict(step=n, ce=3.0 - n, ahead1=2.0, balance=0.1, z=0.2) for n in (1, 2)]
    history[-1] |= dict(eval_loss=1.0, eval_smallest=0.5, eval_entropy=0.9)
    picture = router_pictures.training(history, {"ce": "next token", "ahead1": "1 ahead"}, "A training, 2 of 9 steps")
    left, right = picture.figure.axes
    assert len(left.lines) == 2 and len(right.lines) == 3
    assert "balance 0.1000, z 0.2000." in picture.summary and "depth" not in picture.summary
    assert picture.figure.get_suptitle().startswith("A training, 2 of 9 steps: ")
    bare = router_pictures.training([dict(step=1, ce=1.0), dict(step=2, ce=1.0)], {"ce": "next token"}, "A training")
    assert "without other terms" in bare.summary


def test_the_map_leaves_out_a_layer_that_skips():
    rows, kind_of = torch.arange(32).view(2, 16) % 4, torch.tensor([0, 1, 2, 3])
    logits = torch.nn.functional.one_hot(rows.flatten(), 4) * 9.0
    whole = moe.Routed("model.layers.0.gate", logits, rows.flatten()[:, None])
    part = moe.Routed("model.layers.1.gate", logits[:5], rows.flatten()[:5, None])
    picture = router_pictures.by_kind([whole, part], rows, kind_of)
    assert "100% in model.layers.0.gate" in picture.summary and "layers.1" not in picture.summary
    assert len(picture.figure.axes[0].get_yticks()) == len(token_kinds.KINDS)
