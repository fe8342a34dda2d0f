"""Error feedback is what GPTQ says, every method is measured with the bits that it reads, and the
record is whole.
"""

import copy

import pytest
import torch
from conftest import FP32

from experiments import lrc_comparison as comparison
from experiments import lrc_spreads
from experiments.lrc_comparison import Cell
from nblib import losses, models
from nblib.methods import lrc
from nblib.methods.lrc import ternary
from nbworkbook.setup import Setup


@pytest.fixture
def bench(stream) -> lrc_spreads.Bench:
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    rows = stream[: 16 * 32].view(16, 32)
    opened = Setup(model, None, stream, rows[:8], rows[8:], FP32)
    lrc_spreads.fit(opened, model, seed=0, steps=40, loss=losses.causal_lm)
    return lrc_spreads.bench(opened)


def inputs(width: int, tokens: int = 400) -> torch.Tensor:
    """Second moments of inputs that are far from independent."""
    x = torch.randn(tokens, 6) @ torch.randn(6, width) + 0.3 * torch.randn(tokens, width)
    return x.T @ x / tokens


@pytest.mark.parametrize("scale", ["least_squares", "rows"])
def test_feedback_leaves_less_error_of_the_output_on_the_same_grid(scale):
    W, C = torch.randn(20, 32).double(), inputs(32).double()
    a = ternary.codes_and_scale(W, scale)[1].double()
    Q, nearest = comparison.feedback(W, C, scale), a * (W / a).round().clamp(-1, 1)
    codes = (Q / a).round()
    assert torch.allclose(codes * a, Q) and set(codes.unique().tolist()) == {-1, 0, 1}
    errors = [float(((W - each) @ C * (W - each)).sum()) for each in (Q, nearest)]
    assert errors[0] < 0.7 * errors[1]


def test_feedback_without_correlations_is_the_nearest_value():
    W, C = torch.randn(20, 32).double(), torch.diag(torch.rand(32) + 0.1)
    a = ternary.codes_and_scale(W, "least_squares")[1].double()
    assert torch.allclose(comparison.feedback(W, C), a * (W / a).round().clamp(-1, 1))


def test_feedback_is_the_choice_of_the_last_column_given_all_others():
    """The last column is rounded to what suits the errors of all before it: the optimum of a
    quadratic in it.
    """
    W, C = torch.randn(9, 12), inputs(12)
    a, last = ternary.codes_and_scale(W, "least_squares")[1].double(), int(C.diagonal().argmin())
    Q, H = comparison.feedback(W, C), C.double()
    H.diagonal().add_(comparison.DAMPING * H.diagonal().mean())
    others = [j for j in range(12) if j != last]
    best = W[:, last] + (W - Q)[:, others] @ H[others, last] / H[last, last]
    assert torch.allclose(Q[:, last], a * (best / a).round().clamp(-1, 1))


def test_the_fed_back_model_keeps_its_grid_and_is_better_than_the_nearest(bench):
    model = comparison.made(bench, Cell("stored", 0, "feedback, least_squares"))
    for layer in lrc.layers(model).values():
        assert len(layer.weight.unique()) == 3 and not layer.U.any()
    shares = {
        method: comparison.measured(bench, Cell("stored", 0, method))["share"]
        for method in (
            "feedback, least_squares",
            "nearest, least_squares",
            "nearest, mean",
            "float",
        )
    }
    assert shares["nearest, mean"] == pytest.approx(0, abs=1e-6) and shares["float"] == 1
    assert shares["feedback, least_squares"] > shares["nearest, least_squares"]


def test_bits_are_counted_by_hand(bench):
    model = copy.deepcopy(bench.opened.model)
    assert comparison.bits_per_weight(model) == 16
    linears = [m.weight.shape for m in lrc.linear_layers(model).values()]
    weights, rank = sum(out * width for out, width in linears), 4
    factors = sum(rank * (out + width) for out, width in linears)
    lrc.attach(model, rank=rank, bits=8)
    bits = 2 * weights + 16 * len(linears) + 9 * factors
    assert comparison.bits_per_weight(model) == pytest.approx(bits / weights)
    bare = copy.deepcopy(bench.opened.model)
    lrc.ternarise(bare, "rows")
    bits = comparison.bits_per_weight(bare, factors=False)
    assert bits == pytest.approx(2 + 16 * sum(out for out, _ in linears) / weights)


@pytest.mark.parametrize(
    "method, percent", [("float, trained", 0.0), ("LRC", 15.0), ("joint", 0.0), ("joint", 15.0)]
)
def test_what_trains_is_what_the_row_says(bench, method, percent):
    before = comparison.made(bench, Cell("stored", 0, method, percent))
    after = comparison.made(bench, Cell("stored", 0, method, percent, steps=3))
    moved = {
        name
        for name, p in after.named_parameters()
        if not torch.equal(p, before.state_dict()[name])
    }
    linear = {
        name.rpartition(".")[2] for name in moved if name.startswith(tuple(lrc.layers(after)))
    } or {"all"}
    expected = {
        "float, trained": {"all"},
        "LRC": {"U", "V"},
        "joint": {"weight", "U", "V"} if percent else {"weight"},
    }
    assert linear == expected[method]


def test_what_another_record_holds_is_taken_from_there():
    for method, percent, steps in (
        ("QERA", 2.5, 0),
        (comparison.TURNS, 15.0, 0),
        ("LRC", 15.0, 30),
        ("LRC", 15.0, 90),
    ):
        assert comparison.on_record(Cell("narrow", 1, method, percent, 0, steps)) > 4
    assert comparison.on_record(Cell("narrow", 1, "LRC", 15.0, 8, 30)) is None
    assert comparison.on_record(Cell("narrow", 1, "joint", 15.0, 0, 30)) is None
    kinds = {
        (line["method"], line["percent"], line["steps"]) for line in comparison.published()["lines"]
    }
    for line in comparison.published()["lines"]:
        gap = comparison.published()["bases"][line["base"]]
        share = lrc.recovered(line["loss"], rounded=gap["ternary"], full=gap["float"])
        assert share == pytest.approx(line["share"])
    assert ("LRC", 15.0, 90) in kinds and ("feedback, rows", 0.0, 0) in kinds


def test_the_table_is_sorted_by_bits_and_counts_seeds():
    lines = [
        Cell("stored", seed, method, 15.0, bits)._asdict()
        | {"bits per weight": b, "loss": loss, "share": 0.5}
        for seed, method, bits, b, loss in (
            (0, "LRC", 0, 6.0, 1.0),
            (1, "LRC", 0, 6.0, 2.0),
            (0, "LRC", 8, 4.0, 1.0),
        )
    ]
    rows = comparison.table({"lines": lines}, "stored")
    assert [row["method"] for row in rows] == ["LRC, 15 %, factors of 8 bits", "LRC, 15 %"]
    assert rows[1]["seeds"] == 2 and rows[1]["perplexity"] == "5.054 (2.718 to 7.389)"
