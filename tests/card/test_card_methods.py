"""Every method trains on a card that is not there, and a tensor on the wrong device ends its
training.
"""

import absent_card
import card_runs
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent_card.missing()), reason=absent_card.missing()),
]

# The method, and where the mismatch that is planted in it is met: the line must be found, whatever
# it is by now.
METHODS = {
    "dense": "transformers/models/qwen3/",
    "LoRA": "peft/",
    "LRC": "nblib/methods/lrc/layer.py",
    "ARD-LoRA": "nblib/methods/ard/layer.py",
    "MoE with Muon": "transformers/models/qwen3_moe/",
    "mixture of depths": "nblib/methods/moe/depths.py",
    "tokens ahead": "nblib/losses.py",
    "distillation, live": "transformers/models/qwen3/",
    "distillation, cached": "nblib/methods/",
    "goose": "nblib/methods/goose/model.py",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict:
    return card_runs.answer(tmp_path_factory, "run_method.py", *METHODS, "--plant")


@pytest.mark.parametrize("method", METHODS)
def test_it_trains_resumes_and_evaluates_on_a_card(method, ends):
    assert ends[method][0] == ""


@pytest.mark.parametrize("method", METHODS)
def test_a_planted_mismatch_fails_it(method, ends):
    planted = ends[method][1]
    assert (
        planted.startswith("RuntimeError")
        and "same device" in planted
        and METHODS[method] in planted
    )
