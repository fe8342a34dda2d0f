"""The bench of notebook 01: the whole matrix, and that its measures can tell right from wrong."""

import math

import pytest
import torch

from lessons.pitfalls import adapted, four_bit, gradient_flow, interfaces
from nblib import wiring


def test_the_matrix_raises_where_reentrant_meets_no_hook_and_nowhere_else():
    cells = adapted.matrix()
    assert len(cells) == 48
    for cell in cells:
        assert bool(cell["raised"]) == (cell["checkpointing"] == "reentrant" and cell["hook"] == "removed"), cell
        if not cell["raised"]:
            assert cell["tensors with a gradient"] == cell["of"] and cell["largest difference"] < 1e-6, cell


def test_the_comparison_sees_a_wrong_gradient():
    model = adapted.wired()
    reference = adapted.flow(model)
    next(iter(wiring.trainable(model).values())).data.mul_(2)
    assert adapted.compare(model, reference)["largest difference"] > 1e-4


def test_fit_counts_what_moved():
    model = adapted.wired()
    few = list(wiring.trainable(model).values())[:2]
    assert adapted.fit(model, steps=2, optimizer=torch.optim.SGD(few, lr=0.1))["tensors that moved"] == 2


def test_layer_norms_leave_a_gap_where_there_is_no_gradient():
    found = adapted.flow(adapted.wired())
    assert all(norm > 0 for layer in adapted.layer_norms(found) for norm in layer)
    dead = {"gradients": {n: None if "layers.1." in n else g for n, g in found["gradients"].items()}}
    assert [math.isnan(layer[0]) for layer in adapted.layer_norms(dead)] == [False, True, False]


def test_term_gradients_sees_the_detached_and_the_unrelated():
    w = torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    terms = {"live": w.sum(), "detached": w.detach().sum(), "unrelated": other.sum()}
    assert gradient_flow.term_gradients(terms, [w]) == {"live": 3**0.5, "detached": 0.0, "unrelated": 0.0}


def test_missed_by_goes_by_identity():
    model = adapted.wired()
    held = list(wiring.trainable(model).values())
    assert interfaces.missed_by(model, torch.optim.SGD(held[:40], lr=1), torch.optim.SGD(held[40:], lr=1)) == []
    twins = [torch.nn.Parameter(p.detach().clone()) for p in held]
    assert len(interfaces.missed_by(model, torch.optim.SGD(twins, lr=1))) == len(held)


def test_one_evaluation_spoils_4_bit_gradients_where_bitsandbytes_repacks_and_is_kept_from_it():
    as_it_comes, kept = four_bit.one_evaluation(keep=False), four_bit.one_evaluation(keep=True)
    assert kept["tensors with the right gradient"] == kept["of"]
    right = as_it_comes["tensors with the right gradient"] == as_it_comes["of"]
    assert right != as_it_comes["this machine repacks"], as_it_comes


def test_what_trains_above_the_blocks_makes_the_fault_silent():
    for above, counts in (("norm", 1), ("head", 1)):
        facts = adapted.flow(adapted.wired("reentrant", "removed", above=above))
        alive = [name for name, g in facts["gradients"].items() if g is not None]
        assert facts["raised"] is None and len(alive) == counts and "lora" not in alive[0]


@pytest.mark.parametrize("choice", [dict(checkpointing="re-entrant"), dict(hook="off"), dict(above="all")])
def test_a_misspelt_wiring_is_refused(choice):
    ((name, value),) = choice.items()
    with pytest.raises(ValueError, match=f"{name} = '{value}': allowed are "):
        adapted.wired(**choice)
