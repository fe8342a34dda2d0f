"""The phase diagram of a router of two losses: where it collapses, and what helps."""

import math

import pytest
import torch

from lessons.loss_weight_phases import phase_diagram
from nblib import runtime
from nblib.methods.distill.loss_weights import Router


@pytest.mark.parametrize("penalty", [0.1, 0.3, 0.5])
def test_the_published_router_collapses_beyond_its_threshold(penalty):
    threshold = (1 + penalty) / (1 - penalty)
    ratios = [0.9 * threshold, 1.1 * threshold]
    inside, outside = phase_diagram(
        ratios, [penalty], normalise="none", learns="total", steps=800
    ).flatten()
    print(
        f"penalty {penalty}, threshold {threshold:.3f}: w1 {inside:.3f} at {ratios[0]:.2f}, {outside:.4f} beyond"
    )
    assert abs(float(inside) - 1 / (1 + ratios[0])) < 0.03  # at the balance w1 l1 = w2 l2
    assert float(outside) < 0.01


# ratios, and a second loss that falls twenty-fold
CONSTANT, APART = [1.5, 3.0, 10.0], dict(falls=(0.0, 3.0))


def test_dividing_by_the_first_value_only_hides_the_threshold():
    options = dict(normalise="initial", learns="total")
    assert (phase_diagram(CONSTANT, [0.1], **options) - 0.5).abs().max() < 0.02
    assert phase_diagram([1.0], [0.1], **options, **APART) < 0.01


@pytest.mark.slow
def test_dividing_by_the_running_mean_helps_while_losses_change_slowly():
    options = dict(normalise="running", learns="total", **APART)
    fast, slow = (phase_diagram([3.0], [0.1], steps=n, **options) for n in (400, 2000))
    assert fast < 0.01 and slow > 0.45


@pytest.mark.slow
def test_learning_the_spread_alone_does_not_collapse():
    balance = phase_diagram(CONSTANT, [0.1, 0.5], normalise="none", learns="spread", steps=800)
    torch.testing.assert_close(
        balance, (1 / (1 + torch.tensor(CONSTANT)))[:, None].expand(-1, 2), atol=0.01, rtol=0
    )
    # the default normalises by the running mean as well
    for falls in ((0.0, 3.0), (3.0, 0.0), (0.0, 0.0)):
        weights = phase_diagram(CONSTANT, [0.1], falls=falls)
        assert weights.min() > 0.35 and weights.max() < 0.65


def test_the_diagram_is_made_by_the_router_itself():
    """One cell under vmap is the same module stepped by hand."""
    options = dict(normalise="running", learns="total")
    ours = phase_diagram([1.0, 1.4], [0.3, 0.1], steps=40, falls=(0.0, 1.0), seed=4, **options)[
        1, 0
    ]
    runtime.seed_all(4)
    router = Router(("one", "two"), penalty=0.3, **options)
    adam, late = torch.optim.Adam(router.parameters(), lr=3e-3), []
    for step in range(40):
        mixed, spread, weights = router(torch.tensor([1.4, math.exp(-step / 40)]))
        late.append(weights[0])
        adam.zero_grad()
        (mixed.sum() + spread).backward()
        adam.step()
    torch.testing.assert_close(ours, torch.stack(late[-2:]).mean(), rtol=1e-4, atol=1e-5)
