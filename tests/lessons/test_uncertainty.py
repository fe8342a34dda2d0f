"""Accuracy, likelihood and calibration against plain loops, and averages over draws."""

import numpy
import pytest
import torch
from ard_bench import adapted, ragged
from torch import nn

from lessons import uncertainty
from nblib import losses
from nblib.methods import ard


def test_ece_and_reliability_against_a_plain_loop():
    draw = numpy.random.default_rng(0)
    confidence = numpy.concatenate([draw.random(3000), numpy.arange(1, 16) / 15])  # and every upper edge
    right = draw.random(len(confidence)) < confidence**2
    rows = uncertainty.reliability(torch.tensor(confidence), torch.tensor(right))
    expected, edges = 0.0, numpy.linspace(0, 1, 16)
    for row, low, high in zip(rows, edges, edges[1:]):
        inside = (confidence > low) & (confidence <= high)
        assert row["tokens"] == inside.sum()
        expected += inside.sum() / len(confidence) * abs(right[inside].mean() - confidence[inside].mean())
    assert uncertainty.ece(rows) == pytest.approx(expected, abs=1e-12) and expected > 0.05
    assert uncertainty.ece(uncertainty.reliability(torch.ones(4), torch.ones(4))) == 0


def test_monte_carlo_averages_probabilities_and_leaves_the_run_alone():
    model, batch = adapted().train(), ragged()[0]
    options = dict(sampling=ard.sampling, seed=4)
    state = torch.get_rng_state()
    found = uncertainty.measure(model, [batch], samples=3, **options)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    in_chunks = uncertainty.measure(model, [batch], samples=3, chunk=7, **options)
    for kind in ("accuracy", "nll", "ece", "tokens"):
        assert found[kind] == pytest.approx(in_chunks[kind], rel=1e-6)
    assert not any(a.sampled for a in ard.adapters(model).values())

    model.eval()
    torch.manual_seed(4)
    keep = batch["labels"][:, 1:] != losses.IGNORED
    true, inputs = batch["labels"][:, 1:][keep], {k: batch[k] for k in ("input_ids", "attention_mask")}
    with torch.no_grad(), ard.sampling(model):
        p = sum(model(**inputs).logits[:, :-1][keep].softmax(-1) for _ in range(3)) / 3
    with torch.no_grad():
        point = model(**inputs).logits[:, :-1][keep]
    assert found["nll"] == pytest.approx(float(-p[range(len(true)), true].log().mean()), rel=1e-5)
    assert found["accuracy"] == float((p.argmax(-1) == true).double().mean()) and found["tokens"] == len(true) == 38
    plain = uncertainty.measure(model, [batch])
    assert plain["nll"] == pytest.approx(float(nn.functional.cross_entropy(point, true)), rel=1e-5) != found["nll"]
    with pytest.raises(ValueError, match="samples = 3: give sampling"):
        uncertainty.measure(model, [batch], samples=3)
