"""Accuracy, likelihood and calibration against plain loops, and averages over draws."""

import numpy
import pytest
import torch
from ard_bench import adapted, ragged
from torch import nn

from nblib import losses
from nblib.methods import ard
from nblib.methods.ard import uncertainty


def test_ece_and_reliability_against_a_plain_loop():
    draw = numpy.random.default_rng(0)
    # and every upper edge
    confidence = numpy.concatenate([draw.random(3000), numpy.arange(1, 16) / 15])
    right = draw.random(len(confidence)) < confidence**2
    rows = uncertainty.reliability(torch.tensor(confidence), torch.tensor(right))
    expected, edges = 0.0, numpy.linspace(0, 1, 16)
    for row, low, high in zip(rows, edges, edges[1:]):
        inside = (confidence > low) & (confidence <= high)
        assert row["tokens"] == inside.sum()
        expected += (
            inside.sum() / len(confidence) * abs(right[inside].mean() - confidence[inside].mean())
        )
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
    true, inputs = (
        batch["labels"][:, 1:][keep],
        {k: batch[k] for k in ("input_ids", "attention_mask")},
    )
    with torch.no_grad(), ard.sampling(model):
        p = sum(model(**inputs).logits[:, :-1][keep].softmax(-1) for _ in range(3)) / 3
    with torch.no_grad():
        point = model(**inputs).logits[:, :-1][keep]
    assert found["nll"] == pytest.approx(float(-p[range(len(true)), true].log().mean()), rel=1e-5)
    assert (
        found["accuracy"] == float((p.argmax(-1) == true).double().mean())
        and found["tokens"] == len(true) == 38
    )
    plain = uncertainty.measure(model, [batch])
    assert (
        plain["nll"]
        == pytest.approx(float(nn.functional.cross_entropy(point, true)), rel=1e-5)
        != found["nll"]
    )
    with pytest.raises(ValueError, match="samples = 3: give sampling"):
        uncertainty.measure(model, [batch], samples=3)


# ------------------------------------------------------------------ questions with a right answer


@pytest.fixture
def answered():
    """Probabilities of 60 questions, some of them equally sure, and answers that follow them in
    part.
    """
    draw = torch.Generator().manual_seed(2)
    logits = (torch.randn(60, 4, generator=draw).double() * 2).round()
    drawn = torch.randint(4, (60,), generator=draw)
    answer = torch.where(torch.rand(60, generator=draw) < 0.5, logits.argmax(1), drawn)
    return logits, answer


def test_brier_auroc_and_aurc_against_plain_loops(answered):
    logits, answer = answered
    p = logits.softmax(-1)
    facts = uncertainty.judge(p, answer)
    rows = [
        (max(row), row.index(max(row)) == true, row, true)
        for row, true in zip(p.tolist(), answer.tolist())
    ]
    brier = (
        sum(sum((x - (n == true)) ** 2 for n, x in enumerate(row)) for _, _, row, true in rows) / 60
    )
    assert facts["brier"] == pytest.approx(brier)
    good, bad = ([c for c, right, *_ in rows if right is kind] for kind in (True, False))
    pairs = [(a > b) + 0.5 * (a == b) for a in good for b in bad]
    assert facts["auroc"] == pytest.approx(sum(pairs) / len(pairs))
    draw, areas = numpy.random.default_rng(0), []
    for _ in range(3000):  # equally sure ones in any order
        order = sorted(rows, key=lambda row: (-row[0], draw.random()))
        wrong = numpy.cumsum([not right for _, right, *_ in order])
        areas.append(float((wrong / numpy.arange(1, 61)).mean()))
    assert facts["aurc"] == pytest.approx(sum(areas) / len(areas), abs=3e-3)
    assert facts["nll"] == pytest.approx(float(nn.functional.cross_entropy(logits, answer)))
    assert (
        facts["accuracy"] == sum(right for _, right, *_ in rows) / 60 and facts["questions"] == 60
    )


def test_who_is_always_right_has_no_auroc_and_no_risk():
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    facts = uncertainty.judge(p, torch.tensor([0, 1]))
    assert facts["auroc"] is None and facts["aurc"] == 0
    sure_when_right = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    assert uncertainty.judge(sure_when_right, torch.tensor([0, 1]))["auroc"] == 1
    # 0 of one, 1 of two
    assert uncertainty.judge(sure_when_right, torch.tensor([0, 1]))["aurc"] == 0.25


def test_who_says_what_is_so_is_calibrated_and_needs_no_temperature():
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(30_000, 4, generator=draw).double()
    answer = torch.multinomial(logits.softmax(-1), 1, generator=draw).squeeze(1)
    facts, sure = (uncertainty.judge((logits * k).softmax(-1), answer) for k in (1, 2))
    assert facts["ece"] < 0.015 and sure["ece"] > 0.05
    assert uncertainty.temperature(logits, answer) == pytest.approx(1, abs=0.04)
    assert uncertainty.temperature(3 * logits, answer) == pytest.approx(3, abs=0.12)


def test_a_temperature_has_the_lowest_loss_and_changes_no_answer(answered):
    logits, answer = answered
    heat = uncertainty.temperature(logits, answer)
    losses_of = {
        t: float(nn.functional.cross_entropy(logits / t, answer))
        for t in (heat * 0.97, heat, heat * 1.03)
    }
    assert min(losses_of, key=losses_of.get) == heat
    before, after = (uncertainty.judge(z.softmax(-1), answer) for z in (logits, logits / heat))
    assert before["accuracy"] == after["accuracy"] and before["nll"] > after["nll"]
    # a choice that no question has
    absent = torch.cat([logits, torch.full((60, 1), -torch.inf)], dim=1)
    assert uncertainty.temperature(absent, answer) == pytest.approx(heat, rel=1e-9)


def test_equally_sure_answers_count_as_in_any_order():
    confidence, right = torch.tensor([0.5, 0.9, 0.5]), torch.tensor([True, True, False])
    expected = torch.tensor([0, 0.25, 1 / 3], dtype=torch.float64)
    assert torch.allclose(uncertainty.risks(confidence, right), expected)
    assert torch.allclose(uncertainty.risks(confidence.flip(0), right.flip(0)), expected)
    assert uncertainty.auroc(confidence, right) == 0.75
