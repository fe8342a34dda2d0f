"""Operations against torch's own counter, and what spikes can and cannot save."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lessons import goose_energy
from nblib import models
from nblib.methods import goose

VOCABULARY = 64


@pytest.fixture(scope="module")
def bird():
    return goose.tiny(VOCABULARY, hidden=32, layers=2, length=64).eval()


@pytest.fixture(scope="module")
def transformer():
    model = models.tiny(VOCABULARY, hidden=32, layers=2, heads=2).eval()
    model.set_attn_implementation("eager")  # torch counts no fused attention on a CPU
    return model


@pytest.mark.parametrize("context", [1, 17])
@pytest.mark.parametrize("which", ["bird", "transformer"])
@torch.no_grad()
def test_multiply_adds_are_those_of_torchs_counter(which, context, request):
    model, ids = request.getfixturevalue(which), torch.arange(context + 1)[None] % VOCABULARY
    past = model(ids[:, :-1], use_cache=True).past_key_values
    with FlopCounterMode(display=False) as counter:
        model(ids[:, -1:], past_key_values=past, use_cache=True)
    counted = goose_energy.operations(model, context=context)
    assert counter.get_total_flops() == 2 * (counted["matrices"] + counted["attention"])


def test_a_goose_costs_the_same_wherever_it_stands(bird, transformer):
    near, far = (
        [goose_energy.energy(goose_energy.operations(m, context=c)) for m in (bird, transformer)]
        for c in (8, 64)
    )
    assert near[0] == far[0] and near[1] < far[1]


@torch.no_grad()
def test_together_is_what_the_layers_multiply(bird):
    ids, products = torch.randint(0, VOCABULARY, (2, 16)), []
    real = bird.model.layers[0].recurrent.scan
    for block in bird.model.layers:
        block.recurrent.scan = lambda x, d: (
            products.append((x[:, 1:] != 0).float().mean()),
            real(x, d),
        )[1]
    try:
        bird(ids)
    finally:
        for block in bird.model.layers:
            block.recurrent.scan = real
    # all positions but the first, into which the past goes
    share = float(sum(products) / len(products))
    assert 0 < share < 1 and goose_energy.together(bird, ids) == pytest.approx(share, abs=0.05)
    with pytest.raises(ValueError, match="no goose"):
        goose_energy.together(models.tiny(VOCABULARY, hidden=16, layers=1, heads=2), ids)


def test_spikes_save_the_product_of_key_and_value_and_no_matrix(bird, transformer):
    table = {
        line["one token"]: line
        for line in goose_energy.rows(bird, transformer, context=16, rate=0.3, fires=0.1)
    }
    spiking, dense, _, imagined = table.values()
    assert spiking["thousand multiply-adds"] == dense["thousand multiply-adds"]
    assert imagined["microjoules"] < spiking["microjoules"] < dense["microjoules"]
    saved = dense["microjoules"] - spiking["microjoules"]
    channels = 2 * 32
    assert saved == pytest.approx(channels * (goose_energy.MULTIPLY + 0.9 * goose_energy.ADD) / 1e6)


@pytest.mark.parametrize("wrong", [dict(context=-1), dict(context=1, fires=1.5)])
def test_impossible_numbers_are_refused(bird, wrong):
    with pytest.raises(ValueError, match="must be"):
        goose_energy.operations(bird, **wrong)


def test_the_curve_says_how_many_times(bird, transformer):
    picture = goose_energy.curve(bird, transformer, contexts=(0, 64), fires=0.1)
    assert "times as much" in str(picture.summary)
