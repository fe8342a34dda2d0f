"""A router's health: even and collapsed routings whose figures are known, and the Gini coefficient
by its curve.
"""

import math

import pytest
import torch
from routings import E, K, routed, towards

from nblib.methods import moe
from nblib.methods.moe import router_health


def test_health_tells_spread_from_collapse():
    spread = router_health.health(
        moe.Routed("a", torch.zeros(400, E), torch.arange(400 * K).view(400, K) % E)
    )
    assert spread.entropy == pytest.approx(1) and spread.effective == pytest.approx(E, rel=1e-4)
    assert spread.gini == pytest.approx(0, abs=1e-6)
    assert (spread.dead, spread.starved, spread.collapsed) == (0, 0, False)
    fallen = router_health.health(routed(towards([2, 5])))
    assert fallen.effective == pytest.approx(K) and fallen.entropy == pytest.approx(
        math.log(K) / math.log(E)
    )
    assert (fallen.dead, fallen.starved, fallen.collapsed) == (E - K, E - K, True)
    assert fallen.largest == pytest.approx(E / K) and fallen.smallest == 0
    assert fallen.gini == pytest.approx(1 - K / E)
    assert not router_health.health(routed(torch.randn(400, E), E)).collapsed  # k = E cannot


def test_gini_is_that_of_the_lorenz_curve():
    share = torch.rand(12).softmax(0).sort().values.double()
    rank = torch.arange(1, 13)
    lorenz = float((2 * (rank * share).sum() / (12 * share.sum())) - 13 / 12)
    assert router_health.gini(share) == pytest.approx(lorenz)


def test_starved_is_under_a_tenth_of_the_fair_share():
    counts = [1, 20, 100, 100, 100, 100, 100, 100]  # fair is 77.6
    chosen = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.tensor([2])])[
        :, None
    ]
    found = router_health.health(moe.Routed("a", torch.zeros(len(chosen), E), chosen))
    assert (found.dead, found.starved) == (0, 1)
