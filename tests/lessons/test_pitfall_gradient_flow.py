"""The whole matrix of notebook 01, its heat map, and gradients term by term."""

import math

import pytest
import torch

from lessons.pitfalls import bench, gradient_flow


@pytest.mark.slow
def test_the_matrix_raises_where_reentrant_meets_no_hook_and_nowhere_else():
    cells = gradient_flow.matrix()
    assert len(cells) == 48
    for cell in cells:
        assert bool(cell["raised"]) == (
            cell["checkpointing"] == "reentrant" and cell["hook"] == "removed"
        ), cell
        if not cell["raised"]:
            assert (
                cell["tensors with a gradient"] == cell["of"] and cell["largest difference"] < 1e-6
            ), cell


def test_layer_norms_leave_a_gap_where_there_is_no_gradient():
    found = bench.flow(bench.wired())
    assert all(norm > 0 for layer in gradient_flow.layer_norms(found) for norm in layer)
    dead = {
        "gradients": {n: None if "layers.1." in n else g for n, g in found["gradients"].items()}
    }
    assert [math.isnan(layer[0]) for layer in gradient_flow.layer_norms(dead)] == [
        False,
        True,
        False,
    ]


def test_term_gradients_sees_the_detached_and_the_unrelated():
    w = torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    terms = {"live": w.sum(), "detached": w.detach().sum(), "unrelated": other.sum()}
    assert gradient_flow.term_gradients(terms, [w]) == {
        "live": 3**0.5,
        "detached": 0.0,
        "unrelated": 0.0,
    }
