"""Each table and figure of notebook 10 says what its numbers say."""

import pytest
import torch

from lessons import lrc_tables
from nblib import models
from nblib.methods import lrc
from nblib.methods.lrc import ternary
from nbworkbook import show


@pytest.fixture
def corrected():
    model = models.tiny(64, hidden=32, layers=1, heads=2)
    lrc.attach(model, init="svd_residual")
    return model


def test_the_histogram_counts_the_zeros():
    weight = torch.tensor([[0.1, -0.1, 2.0, -2.0]])
    picture = lrc_tables.three_values(weight, *ternary.codes_and_scale(weight), "q_proj")
    assert (
        "50% of the weights become zero" in picture.summary
        and "q_proj" in picture.figure.axes[0].get_xlabel()
    )


def test_the_energy_at_the_parameter_is_that_of_its_rank():
    held = {"a": torch.linspace(0.1, 1, 10), "b": torch.linspace(0.2, 1, 10)}
    picture, at = lrc_tables.energy(held, torch.linspace(0.1, 1, 10), 30)
    assert at == {name: pytest.approx(float(share[2])) for name, share in held.items()}
    assert picture.summary.index("(a)") < picture.summary.index("(b)")  # from the least to the most


def test_differences_are_relative_and_see_a_zero():
    g = {"U": torch.tensor([1.0, 4.0]), "V": torch.tensor([2.0])}
    other = {"U": torch.tensor([1.0, 3.0]), "V": torch.tensor([0.0])}
    same, apart = lrc_tables.differences({"eager": (1.0, g), "compiled": (1.0, other)})
    assert same["worst difference"] == 0 and same["all zero"] == 0
    assert apart["worst difference"] == 1.0 and apart["all zero"] == 1


def test_the_phase_diagram_compares_the_published_router_with_the_line():
    ratios, penalties = [1.05, 4.0], [0.1, 0.2]
    collapsed = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    picture = lrc_tables.phase_diagram(
        {"published": collapsed, "mended": torch.full((2, 2), 0.4)}, ratios, penalties
    )
    assert (
        "in 100% of the cells" in picture.summary
        and "published 0.00, mended 0.40" in picture.summary
    )


def test_the_gap_counts_the_steps_that_were_made():
    history = {"corrected": [{}] * 3, "float, same steps": [{}]}
    losses = {"ternary": 5.0, "corrected": 4.25, "float, same steps": 4.0}
    rows = lrc_tables.gap(losses, history, rounded=5.0, full=4.0)
    assert [row["share of the gap"] for row in rows] == [0, 0.75, 1]
    assert [row["steps"] for row in rows] == [0, 3, 1]


def test_the_control_claims_the_same_steps_only_where_it_took_them(capsys):
    ours, control = show.Training("corrected"), show.Training("control")
    for step in (1, 2):
        ours({"step": step, "of": 2, "loss": 1.0})
    control({"step": 1, "of": 2, "loss": 1.0, "stopped": "Stop"})
    assert lrc_tables.control_name(ours, ours) == "float, same steps"
    assert lrc_tables.control_name(ours, control) == "float, 1 steps and not 2"


@pytest.mark.parametrize("records, share", [([{"step": 4, "eval_loss": 4.25}], "75%"), ([], "50%")])
def test_the_training_says_the_first_and_the_last_share(records, share):
    first, history = {"corrected": 4.5}, {"corrected": records}
    for label, after in (("corrected", "it"), ("corrected, 4 of 9 steps", "4 of 9 steps")):
        picture = lrc_tables.training(
            first, history, {"float": 4.0, "ternary": 5.0}, {"corrected": label}
        )
        assert f"50% of it before training and {share} after {after}." in picture.summary
        assert picture.figure.axes[0].lines[0].get_label() == label


@pytest.mark.parametrize("bits, size", [(0, 4), (8, 1)])
def test_the_parts_on_disk_are_all_of_the_model(corrected, bits, size):
    rows = {row["part"]: row for row in lrc_tables.on_disk(corrected, bits)}
    assert sum(row["numbers"] for row in rows.values()) == models.count(corrected)["all"]
    assert rows["ternary weights"]["bytes"] == rows["ternary weights"]["numbers"] // 4
    assert rows["U and V"]["bytes"] == size * rows["U and V"]["numbers"]
