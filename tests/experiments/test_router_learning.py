"""Measures of what experts learn, on choices whose measures are known, and the record that the
notebook draws.
"""

import pytest
import torch

from experiments import router_learning
from nblib import runtime
from nblib.methods import moe


def test_saturation_counts_what_is_kept_in_any_order():
    end = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert router_learning.saturation(end, end) == router_learning.saturation(end.flip(1), end) == 1
    assert router_learning.saturation(torch.tensor([[1, 7], [0, 1], [6, 7]]), end) == pytest.approx(
        1 / 6
    )
    drawn = [
        torch.rand(4000, 8, generator=torch.Generator().manual_seed(s)).topk(2).indices
        for s in (0, 1)
    ]
    assert router_learning.saturation(*drawn) == pytest.approx(2 / 8, abs=0.02)  # chance
    with pytest.raises(ValueError, match="of one router"):
        router_learning.saturation(end, end[:2])


def test_pairs_that_always_work_together_and_those_that_never_do():
    chosen = torch.tensor([[0, 1]] * 6 + [[2, 3]] * 2 + [[2, 0]] * 2)
    table = router_learning.together(chosen, 5)
    assert table[1, 0] == 1 and table[0, 1] == 0.75 and table[0, 2] == 0.25 and table[1, 2] == 0
    assert (table.diagonal() == 0).all() and (table[4] == 0).all()


def test_domains_apart_and_alike():
    low, high = torch.tensor([[0, 1]] * 9), torch.tensor([[2, 3]] * 9)
    assert (
        router_learning.apart(low, high, 4) == 1 and router_learning.apart(low, low.flip(1), 4) == 0
    )
    assert router_learning.apart(low, torch.cat([low, high]), 4) == pytest.approx(0.5)


def test_a_training_is_measured_from_start_to_end(monkeypatch, stream):
    monkeypatch.setattr(router_learning, "PROBES", (0, 1, 3))
    small = dict(family="qwen3_moe", hidden=32, layers=2, heads=2, width=16, experts=4, top_k=2)
    monkeypatch.setattr(router_learning.muon_race, "SHAPE", small)
    streams = {
        d: {"train": stream[n::2], "held_out": stream[n:400:2]}
        for n, d in enumerate(router_learning.DOMAINS)
    }
    options = dict(seed=1, rows=2, length=16, eval_rows=4, machine=runtime.pick("cpu", "fp32"))
    lines = router_learning.trained(streams, 256, **options)
    assert len(lines) == 2
    for line in lines:
        assert (
            list(line["saturation"]) == ["0", "1", "3"]
            and line["saturation"]["3"] == 1 >= line["saturation"]["0"]
        )
        assert sum(line["load"]["3"]) == pytest.approx(4) and line["chance"] == 0.5
        assert sum(line["domain"]["code"]) == pytest.approx(1) and 0 <= line["apart"] <= 1
        # k - 1 others each
        assert torch.tensor(line["together"]).sum(dim=1) == pytest.approx(torch.ones(4))


def test_the_record_is_drawn_and_its_words_are_its_numbers():
    record = router_learning.published()
    assert {line["seed"] for line in record["lines"]} == {0, 1, 2}
    assert all(
        line["saturation"][str(max(router_learning._steps(line)))] == 1 for line in record["lines"]
    )
    picture = router_learning.picture(record)
    assert len(picture.figure.axes) == 5 and picture.summary == router_learning.words(record)
    assert len(picture.figure.axes[0].lines) == record["shape"]["experts"]


def test_a_line_per_router_and_its_layer():
    chosen = torch.tensor([[0, 1], [1, 2]])
    seen = {d: [moe.Routed("a", torch.zeros(2, 3), chosen)] for d in router_learning.DOMAINS}
    (line,) = router_learning.learned({0: seen, 4: seen})
    assert (
        line["layer"] == "a" and line["apart"] == 0 and line["saturation"] == {"0": 1.0, "4": 1.0}
    )
