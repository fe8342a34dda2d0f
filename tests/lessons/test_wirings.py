"""Wirings: the survey of one model agrees with models wired afresh, the heat map knows every
projection.
"""

import math

import pytest
import torch

from lessons import wirings
from lessons.pitfalls import bench
from nblib import models


@pytest.fixture(scope="module")
def model():
    return wirings.adapted()


def test_a_survey_finds_the_one_wiring_that_raises_and_all_others_whole(model):
    table = {row["checkpointing"]: row for row in wirings.survey(model)}
    assert set(table) == set(bench.CHECKPOINTING)
    for mode, row in table.items():
        outcomes = {hook: row[f"hook {hook}"] for hook in bench.HOOK}
        broken = {hook for hook, outcome in outcomes.items() if outcome == "raises"}
        assert broken == ({"removed"} if mode == "reentrant" else set())
        assert {o for o in outcomes.values() if o != "raises"} <= {"42 of 42"}


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("hook", ["asked for", "removed"])
def test_rewiring_equals_wiring_afresh(model, mode, hook):
    fresh, again = (
        bench.flow(bench.wired(mode, hook)),
        wirings.flowed(wirings.rewire(model, mode, hook)),
    )
    assert bool(fresh["raised"]) == bool(again["raised"])
    for name, gradient in fresh["gradients"].items():
        other = again["gradients"][name]
        assert (gradient is None) == (other is None) and (
            gradient is None or torch.equal(gradient, other)
        )


def test_all_seven_projections_of_every_layer_are_seen(model):
    kinds, norms = wirings.layer_norms(
        wirings.flowed(wirings.rewire(model, "none", "removed"))["gradients"]
    )
    assert tuple(kinds) == wirings.PROJECTIONS and len(norms) == bench.LAYERS
    assert all(norm > 0 for row in norms for norm in row)


def test_the_own_adapter_is_seen_too():
    gradients = bench.flow(bench.wired(adapter=bench.ADAPTER[1]))["gradients"]
    kinds, norms = wirings.layer_norms(gradients)
    assert tuple(kinds) == wirings.PROJECTIONS and all(norm > 0 for row in norms for norm in row)


def test_a_missing_gradient_is_no_number(model):
    gradients = dict.fromkeys(wirings.flowed(model)["gradients"])
    assert all(math.isnan(norm) for row in wirings.layer_norms(gradients)[1] for norm in row)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_model_of_the_readers_is_surveyed_from_its_folder(tmp_path, family):
    models.tiny(256, family=family, hidden=32, layers=2, length=64).save_pretrained(tmp_path)
    reader = wirings.adapted(str(tmp_path))
    table = wirings.survey(reader)
    assert len(table) == len(bench.CHECKPOINTING) and table[0]["checkpointing"] == "none"
    assert len({row["hook asked for"] for row in table}) == 1  # the hook makes every kind right
    drawn = wirings.draw(
        str(tmp_path),
        **{name: options[0] for name, options in wirings.menus(str(tmp_path)).items()},
    )
    assert "raised" in drawn.summary


def test_the_first_choices_draw_the_silent_fault():
    drawn = wirings.draw(**{name: options[0] for name, options in wirings.menus().items()})
    assert "42 of 43 tensors" in drawn.summary and "nothing was raised" in drawn.summary


def test_a_table_of_the_matrix_says_what_raised():
    at, shared = (
        ("reentrant", "removed"),
        {"tensors with a gradient": 2, "of": 2, "largest difference": 0.0},
    )
    cells = [
        {"checkpointing": mode, "hook": hook}
        | shared
        | {"raised": "e" if (mode, hook) == at else None}
        for mode in bench.CHECKPOINTING
        for hook in bench.HOOK
    ]
    table = {row["checkpointing"]: row for row in wirings.by_wiring(cells)}
    assert table["reentrant"]["hook removed"] == "raises in all 1"
    assert table["none"]["hook removed"] == "1 of 1 whole, off by 0"
