"""Cells of the table are measured once, on the rows that are named, and the record says what its
lines say.
"""

import copy
import json

import pytest
import torch
from conftest import FP32

from experiments import lrc_spreads
from experiments.lrc_spreads import Cell
from nblib import losses, models
from nblib.methods import lrc
from nblib.methods.lrc import ternary
from nbworkbook.setup import Setup


@pytest.fixture
def bench(stream) -> lrc_spreads.Bench:
    """A model that counts, trained until rounding costs it something."""
    model = models.tiny(256, hidden=32, layers=1, heads=2)
    rows = stream[: 24 * 32].view(24, 32)
    opened = Setup(model, None, stream, rows[:8], rows[8:], FP32)
    lrc_spreads.fit(opened, model, seed=0, steps=40, loss=losses.causal_lm)
    return lrc_spreads.bench(opened)


def cell(**changed) -> Cell:
    return Cell(
        **(
            dict(
                base="stored",
                seed=0,
                percent=15.0,
                scale="least_squares",
                start="alternating",
                steps=0,
            )
            | changed
        )
    )


def test_every_kind_is_measured_at_every_seed_on_every_base_and_none_twice():
    cells = list(lrc_spreads.cells())
    assert len(set(cells)) == len(cells)
    kinds = {c[2:] for c in cells if c.start != "none" or c.steps}
    expected = {
        Cell(base, seed, *kind)
        for kind in kinds
        for base in lrc_spreads.BASES
        for seed in lrc_spreads.SEEDS
    }
    assert expected <= set(cells)
    pairs = {(scale, how) for scale in ternary.SCALES for how in lrc_spreads.STARTS}
    assert {(c.scale, c.start) for c in cells} == pairs


def test_a_start_of_none_is_the_rounded_model_and_the_other_starts_are_closer(bench):
    none, activation, turns = (
        lrc_spreads.corrected(bench.opened, cell(start=how)) for how in lrc_spreads.STARTS
    )
    ids = bench.opened.held_out[:2]
    bare = copy.deepcopy(bench.opened.model)
    lrc.ternarise(bare, "least_squares")
    assert torch.equal(none.eval()(ids).logits, bare.eval()(ids).logits)
    float_logits = bench.opened.model.eval()(ids).logits
    with torch.no_grad():
        errors = [
            float((m.eval()(ids).logits - float_logits).square().mean())
            for m in (none, activation, turns)
        ]
    assert errors[1] < errors[0] and errors[2] < errors[0]


def test_shares_are_zero_for_the_rounded_and_one_for_the_float_model(bench):
    assert bench.share(bench.rounded) == 0 and bench.share(bench.full) == 1
    line = lrc_spreads.measured(bench, cell(scale="mean", start="none"))
    assert line["share"] == pytest.approx(0, abs=1e-6) and line["loss"] == pytest.approx(
        bench.rounded
    )


def test_training_wins_back_more_and_a_seed_repeats(bench):
    before, after = (
        lrc_spreads.measured(bench, cell(percent=5.0, start="none", steps=steps))
        for steps in (0, 20)
    )
    assert after["share"] > before["share"]
    assert lrc_spreads.measured(bench, cell(percent=5.0, start="none", steps=20)) == after
    other = lrc_spreads.measured(bench, cell(percent=5.0, start="none", steps=20, seed=1))
    assert other["loss"] != after["loss"]


def test_a_stopped_table_goes_on_where_it_was(bench, tmp_path, monkeypatch):
    path, wanted = tmp_path / "record.json", [cell(start="none"), cell(), cell(seed=1)]
    lrc_spreads.measure(path, {"stored": bench}, wanted[:2])
    seen, measured = [], lrc_spreads.measured
    monkeypatch.setattr(lrc_spreads, "measured", lambda b, c: seen.append(c) or measured(b, c))
    record = lrc_spreads.measure(path, {"stored": bench}, wanted)
    assert seen == wanted[2:]
    assert [Cell(*(line[f] for f in Cell._fields)) for line in record["lines"]] == wanted
    assert json.loads(path.read_text())["lines"] == record["lines"]


def line(seed: int, percent: float, share: float, **changed) -> dict:
    return cell(seed=seed, percent=percent, **changed)._asdict() | {"loss": 4.0, "share": share}


def test_the_smallest_rank_is_one_that_is_enough_at_every_seed():
    lines = [
        line(0, 2.5, 0.9),
        line(1, 2.5, 0.7),
        line(0, 5.0, 0.81),
        line(1, 5.0, 0.82),
        line(0, 15.0, 0.95),
    ]
    record = {"lines": lines, "bases": {"stored": {"hidden": 8}}}
    assert lrc_spreads.smallest(record, "stored", 0) == 5.0
    assert lrc_spreads.smallest(record, "stored", 0, enough=0.99) is None
    assert lrc_spreads.smallest(record, "stored", 90) is None
    rows = lrc_spreads.table(record)
    assert [row["rank %"] for row in rows] == [2.5, 5.0, 15.0]
    assert rows[0]["stored"] == "0.800 (0.700 to 0.900)" and rows[2]["stored"] == "0.950"


def test_the_record_holds_every_seed_of_what_it_holds_and_is_told():
    record = lrc_spreads.published()
    lines = [Cell(*(line[name] for name in Cell._fields)) for line in record["lines"]]
    assert len(set(lines)) == len(lines) and set(lines) <= set(lrc_spreads.cells())
    for kind in {(c.base, *c[2:]) for c in lines if c.start != "none" or c.steps}:
        assert {c.seed for c in lines if (c.base, *c[2:]) == kind} == set(lrc_spreads.SEEDS)
    for entry, measured in zip(lines, record["lines"]):
        gap = record["bases"][entry.base]
        share = lrc.recovered(measured["loss"], rounded=gap["ternary"], full=gap["float"])
        assert share == pytest.approx(measured["share"])
    assert {"packages", "cpu"} <= record["environment"].keys()
    assert lrc_spreads.words(record).count("trained at 15 %") == len(record["bases"])
    assert all(any(row[base] for base in record["bases"]) for row in lrc_spreads.table(record))
