"""Curriculum and router by themselves: values, gradients by the formula, losses that are absent,
bad input.
"""

import pytest
import torch
from torch.nn import functional as F

from nblib.methods.distill.loss_weights import Curriculum, Router


def test_curriculum_values():
    a, b, c = {"ce": 1.0}, {"ce": 0.5, "logits": 2.0}, {"logits": 1.0}
    made = {
        how: Curriculum([(0.25, a), (0.75, b), (1, c)], total=100, how=how)
        for how in ("step", "linear", "cosine")
    }
    for how, at in made.items():  # a phase starts at its own weights, whatever the way to the next
        starts = (at.at(s) for s in (0.0, 0.25, 0.75))
        assert [[w.get(n, 0) for n in ("ce", "logits")] for w in starts] == [
            [1, 0],
            [0.5, 2],
            [0, 1],
        ], how
        assert at.at(0.99) == at.at(1.0) == at.at(7.0)
    assert made["step"].at(0.2499)["ce"] == 1.0
    assert made["linear"].at(0.125) == {"ce": 0.75, "logits": 1.0}
    assert made["linear"].at(0.65)["ce"] == pytest.approx(0.1) and made["linear"].at(0.65)[
        "logits"
    ] == pytest.approx(1.2)
    third = 0.25 / 3
    assert made["cosine"].at(third)["logits"] == pytest.approx(2 * 0.25)  # (1 - cos 60 degrees) / 2
    assert made["cosine"].at(0.125)["ce"] == pytest.approx(0.75)


def _router(k: int = 2, **options) -> Router:
    return Router([f"l{i}" for i in range(k)], **options)


def test_router_total_and_gradients_equal_the_formula():
    router = _router(3, penalty=0.2, normalise="none", learns="total").double()
    l = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mixed, spread, weights = router(l)
    w = F.softmax(router.net(l.detach()), dim=0)
    order = (w * l).sort().values
    # the write-up's sum of gaps of the sorted losses
    total = (w * l).sum() + 0.2 * (order.diff().sum())
    leaves = [l, *router.parameters()]
    torch.testing.assert_close(mixed.sum() + spread, total)
    for ours, plain in zip(
        torch.autograd.grad(mixed.sum() + spread, leaves), torch.autograd.grad(total, leaves)
    ):
        torch.testing.assert_close(ours, plain)
    assert torch.equal(weights, w.detach()) and float(weights.sum()) == pytest.approx(1)


def test_learning_the_spread_keeps_the_two_levels_apart():
    router = _router(2, penalty=0.2, normalise="none", learns="spread")
    l = torch.tensor([3.0, 1.0], requires_grad=True)
    mixed, spread, weights = router(l)
    # the model sees the weighted sum ...
    assert torch.equal(torch.autograd.grad(mixed.sum(), l)[0], weights)
    mixed, spread, _ = router(l)
    assert set(torch.autograd.grad(mixed.sum(), list(router.parameters()), allow_unused=True)) == {
        None
    }
    # ... the weights the spread
    assert torch.autograd.grad(spread, l, allow_unused=True, retain_graph=True)[0] is None
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(spread, list(router.parameters())))


def test_absent_losses_take_no_weight():
    router = _router(3, normalise="none", learns="total")
    mixed, spread, weights = router(torch.tensor([2.0, 0.0, 1.0]))
    assert weights[1] == 0 and float(weights.sum()) == pytest.approx(1) and mixed[1] == 0
    alone, spread, weights = router(torch.tensor([0.0, 4.0, 0.0]))
    assert weights.tolist() == [0, 1, 0] and alone.tolist() == [0, 4, 0] and spread == 0
    nothing, spread, _ = router(torch.zeros(3))
    assert not nothing.any() and spread == 0  # and not NaN
    router = _router(2, normalise="running")
    for values in ([2.0, 0.0], [4.0, 0.0], [4.0, 5.0]):
        router(torch.tensor(values))
    assert router.scale.tolist() == pytest.approx([0.98 * (0.98 * 2 + 0.02 * 4) + 0.02 * 4, 5.0])
    router.eval()(torch.tensor([9.0, 9.0]))
    assert router.scale[1] == 5.0


def test_bad_input_is_named():
    for match, call in {
        r"phases end at \[0.5\]: must rise": lambda: Curriculum([(0.5, {"ce": 1})], total=3),
        "how = 'sine': allowed are step": lambda: Curriculum([(1, {"ce": 1})], total=3, how="sine"),
        "total = 0": lambda: Curriculum([(1, {"ce": 1})], total=0),
        "'ce': 0.* not all zero": lambda: Curriculum([(1, {"ce": 0})], total=1),
        "normalise = 'first': allowed are none": lambda: _router(normalise="first"),
        "learns = 'all': allowed are total": lambda: _router(learns="all"),
        "penalty = 0": lambda: _router(penalty=0),
        "decay = 1": lambda: _router(decay=1),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
