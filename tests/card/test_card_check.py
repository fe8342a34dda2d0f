"""`nblib gpu-check` on a card that is not there: its steps run, and only the loop's own reading may
wait.
"""

import absent_card
import card_runs
import pytest

from nbworkbook import gpu_check

METHODS = {"dense", "LRC", "MoE with Muon"}  # those of run_gpu_check.py
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent_card.missing()), reason=absent_card.missing()),
]


@pytest.fixture(scope="module")
def answer(tmp_path_factory) -> dict:
    return card_runs.answer(tmp_path_factory, "run_gpu_check.py")


def test_every_method_has_its_row(answer):
    assert answer["problem"] == ""
    rows = answer["rows"]
    assert set(rows) == METHODS and not {name: row for name, row in rows.items() if not row["ok"]}
    assert all(row["mfu"] > 0 and row["tokens_per_s"] > 0 for row in rows.values())
    assert {name for name, row in rows.items() if "estimate_gib" in row} == {"dense", "LRC"}
    assert answer["muon"]["ok"], answer["muon"]


def test_only_the_reading_of_the_loop_may_wait(answer):
    warm, after = gpu_check.WARM, gpu_check.STEPS - gpu_check.WARM
    first, others = [None] * warm + ["default"] * after, ["default"] * (warm + after)
    assert answer["at reading"] == first + (len(METHODS) - 1) * others
    assert answer["modes"] == len(METHODS) * (
        ["error"] + ["default", "error"] * after + ["default"]
    )


def test_the_environment_names_the_card(answer):
    card = {
        "compute_capability": "9.0",
        "card_memory_gib": 80.0,
        "device": "cuda:0",
        "precision": "bf16",
    }
    assert card.items() <= answer["environment"].items()
    assert {"driver", "cudnn", "nccl", "packages"} <= set(answer["environment"])
