"""Each threshold holds for a run on its right side and not for one on the other."""

import pytest
import torch

from lessons import spiking_health
from nblib.methods import goose


def test_correlation_is_pearsons_over_the_vocabulary():
    s, t = torch.randn(2, 3, 5, 40)
    expected = torch.stack(
        [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(s.flatten(0, 1), t.flatten(0, 1))]
    )
    assert spiking_health.correlation(s, t) == pytest.approx(float(expected.mean()), abs=1e-5)
    # scores are free up to a constant
    assert spiking_health.correlation(s, 3 * s + 7) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "norms, spikes, correlation, holds",
    [
        ([0.5] * 19 + [2.0], dict(dead=0.01, rate=0.4), 0.95, [True, True, True, True]),
        ([2.0, 0.5], dict(dead=0.2, rate=0.1), 0.5, [False, False, False, False]),
        ([0.5], dict(dead=0.0, rate=0.7), 0.95, [True, True, False, True]),
    ],
)
def test_a_threshold_holds_on_one_side(norms, spikes, correlation, holds):
    rows = spiking_health.rows([{"grad_norm": norm} for norm in norms], spikes, correlation)
    assert [row["holds"] for row in rows] == holds
    assert rows[0]["measured"] == sum(norm > 1 for norm in norms) / len(norms)


def test_facts_about_spikes():
    model = goose.tiny(64, hidden=32, layers=3, length=64)
    ids = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(5))
    facts = spiking_health.spiking(model, ids)
    assert 0.2 < facts["rate"] < 0.6 and facts["saturated"] == 0 and model.training
    assert facts["rate"] == pytest.approx((facts["rate_k"] + facts["rate_v"]) / 2)
    with torch.no_grad():
        model.model.layers[0].recurrent.key.weight[:8] = 0  # a quarter of one of six: dead
        loud = model.model.layers[1].recurrent
        loud.norm.weight.zero_()
        loud.norm.bias.fill_(1.0)
        # an eighth of two others: always over the mean, and the rest never
        for linear in (loud.key, loud.value):
            linear.weight.zero_()
            linear.weight[:4] = 1.0
    facts = spiking_health.spiking(model, ids)
    assert facts["saturated"] == pytest.approx(8 / 192) and facts["dead"] == pytest.approx(
        (8 + 56) / 192
    )
