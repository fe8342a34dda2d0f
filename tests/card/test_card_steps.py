"""A step of each method asks no more of a card that is not there than today: waits, copies, fp32
products, casts.
"""

import absent_card
import card_runs
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent_card.missing()), reason=absent_card.missing()),
]

# Today's figures, as upper bounds: waits per step, waits per micro-batch, and per micro-batch
# copies from the host, products in fp32 and casts. Who lowers one writes the new one here. `python
# tests/card/count.py --lines` says where.
BOUNDS = {
    "dense": (1, 0, 1, 0, 83),
    "dense, checkpointed": (1, 0, 1, 0, 119),
    "LoRA": (1, 0, 1, 0, 141),
    "LRC": (1, 0, 1, 0, 133),
    "ARD-LoRA": (1, 0, 1, 81, 88),
    "MoE with Muon": (1, 0, 1, 0, 99),
    "Mixtral with Muon": (1, 0, 1, 0, 83),
    "mixture of depths": (1, 0, 1, 0, 117),
    "four tokens ahead": (1, 0, 1, 0, 92),
    "distillation, live": (1, 0, 1, 0, 111),
    # the tail's entropy and the draws' log-probabilities travel too
    "distillation, cached": (1, 0, 7, 2, 94),
    "goose": (1, 0, 1, 0, 71),
}
# Where fp32 products belong, by method and file. TF32 makes them quick on a real card.
IN_FP32 = {
    # e^l of a log-variance loses digits, see its docstring
    "ARD-LoRA": {"nblib/methods/ard/layer.py", "backward"},
    "distillation, cached": {
        "nblib/methods/distill/divergences.py"
    },  # a polynomial for the tail's score, n x 3 by 3 x 1
}
WHAT = (
    "waits per step",
    "waits per micro-batch",
    "copies per micro-batch",
    "fp32 products per micro-batch",
    "casts per micro-batch",
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict:
    return card_runs.answer(tmp_path_factory, "count.py", *BOUNDS, "planted", "dense again")


def figures(counts: dict) -> tuple[int, ...]:
    sums = {
        (name, when): sum(counts[name][when].values()) for name in counts for when in counts[name]
    }
    whats = (
        ("waits", "step"),
        ("waits", "micro"),
        ("copies", "micro"),
        ("products", "micro"),
        ("casts", "micro"),
    )
    return tuple(sums[what] for what in whats)


@pytest.mark.parametrize("method", BOUNDS)
def test_no_step_asks_for_more_than_it_did(method, measured):
    over = [
        f"{what}: {now}, at most {most}"
        for what, now, most in zip(WHAT, figures(measured[method]), BOUNDS[method])
        if now > most
    ]
    assert not over, (method, over, measured[method]["waits"], measured[method]["products"])


@pytest.mark.parametrize("method", BOUNDS)
def test_products_in_fp32_are_those_that_belong_there(method, measured):
    lines = {line for when in ("step", "micro") for line in measured[method]["products"][when]}
    assert {line.partition(":")[0] for line in lines} == IN_FP32.get(method, set())


def test_every_method_reads_its_numbers_in_one_place_and_sends_its_batch_in_one_place(measured):
    for method in BOUNDS:
        (read,) = measured[method]["waits"]["step"]
        assert (
            read.startswith("nblib/parallel.py") and measured[method]["waits"]["step"][read] == 1
        ), method
        assert any(
            line.startswith("nblib/device_batches.py")
            for line in measured[method]["copies"]["micro"]
        ), method


def test_two_counts_of_the_same_step_are_the_same(measured):
    assert measured["dense"] == measured["dense again"]


def test_a_planted_wait_and_a_planted_product_are_counted_with_their_lines(measured):
    lines = (absent_card.HERE / "count.py").read_text().splitlines()
    wait, product = (
        1 + next(n for n, text in enumerate(lines) if words in text)
        for words in ("float(t", "@ weight.T")
    )
    dense, planted = measured["dense"], measured["planted"]
    assert set(planted["waits"]["micro"]) - set(dense["waits"]["micro"]) == {
        f"count.py:{wait} waiting"
    }
    assert planted["waits"]["micro"][f"count.py:{wait} waiting"] == 1
    assert planted["products"]["micro"][f"count.py:{product} waiting"] == 1
    assert sum(planted["products"]["micro"].values()) > 1  # its backward is in fp32, too
