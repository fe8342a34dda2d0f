"""Losses by position against the loss of the whole, and the record that the notebook shows."""

import math

import pytest
import torch

from experiments import goose_context
from nblib import runtime, train
from nblib.methods import goose
from nbworkbook.setup import Setup

FP32 = runtime.pick("cpu", "fp32")


def test_the_groups_together_are_the_loss_of_the_rows():
    model, rows = goose.tiny(50, hidden=16, layers=1, length=32), torch.randint(0, 50, (3, 32))
    groups = goose_context.by_position(model, rows, FP32, up_to=(4, 16, 32))
    # 31 predictions of a row of 32
    whole = sum(loss * size for loss, size in zip(groups, (4, 12, 15))) / 31
    assert whole == pytest.approx(train.evaluate(model, rows, machine=FP32)["loss"], abs=1e-5)
    assert len(goose_context.by_position(model, rows[:, :10], FP32)) == 1


@pytest.mark.slow
def test_every_kind_is_trained_once_and_a_killed_record_goes_on(tmp_path):
    half = torch.randint(0, 20, (40, 1), generator=torch.Generator().manual_seed(0))
    stream = (half + torch.zeros(40, 16, dtype=torch.long)).flatten()  # 16 times the same token
    opened = Setup(
        goose.tiny(20, hidden=16, layers=1, length=16),
        None,
        stream,
        *2 * [stream.view(40, 16)],
        FP32,
    )
    path, options = tmp_path / "record.json", dict(steps=8, rows=4, hidden=16, layers=1)
    lines = goose_context.measure(path, opened, seeds=1, **options)["lines"]
    assert [line["model"] for line in lines] == list(goose_context.KINDS)
    assert goose_context.measure(path, opened, seeds=2, **options)["lines"][: len(lines)] == lines
    assert all(len(line["losses"]) == 1 and math.isfinite(line["losses"][0]) for line in lines)


def test_the_record_holds_three_seeds_of_each_and_is_drawn():
    record = goose_context.published()
    assert {(line["model"], line["seed"]) for line in record["lines"]} == {
        (kind, seed) for kind in goose_context.KINDS for seed in range(3)
    }
    assert all(len(line["losses"]) == len(record["up_to"]) for line in record["lines"])
    assert {"packages", "cpu"} <= record[
        "environment"
    ].keys() and "mean of the seeds" in goose_context.picture(record).summary
