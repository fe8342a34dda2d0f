"""Each table and figure of notebook 11 says what its numbers say."""

import pytest
import torch

from lessons import ard_tables
from nblib import models
from nblib.methods import ard


def test_the_row_of_an_adapter_says_how_far_the_stream_is_off():
    row = ard_tables.kl_row("q_proj", torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]), torch.tensor([10.0, 30.0]))
    assert row["in its own forward"] == row["torch"] == 2 and row["that is, times"] == 10


def test_a_rank_counts_from_a_hundredth_of_the_strongest():
    signals = {"ARD": torch.tensor([1.0, 0.02, 0.005]), "plain LoRA": torch.tensor([1.0, 0.9, 0.8])}
    picture, on = ard_tables.planted(signals)
    assert on == {"ARD": 2, "plain LoRA": 3} and "2 of ARD, 3 of plain LoRA" in picture.summary


def test_the_priors_are_those_of_all_adapters():
    model = ard.attach(models.tiny(64, hidden=32, layers=1, heads=2), rank=2, alpha=2)
    names = list(ard.adapters(model))
    ard.adapters(model)[names[0]].prior.fill_(0.5)
    ard.adapters(model)[names[-1]].prior.fill_(7.0)
    assert ard_tables.priors(model) == {"smallest": 0.5, "median": 1.0, "largest": 7.0}


def test_the_training_shows_the_strongest_and_the_weakest_rank():
    history = [{"step": 1, "ce": 4.0, "kl": 0.1}, {"step": 2, "ce": 3.0, "kl": 0.2, "eval_loss": 3.5}]
    mean = torch.tensor([[0.0, 1.0, 2.0], [9.0, 9.0, 9.0], [9.0, 9.0, 9.0], [9.0, 9.0, 9.0], [0.0, 3.0, 4.0]])
    picture = ard_tables.training(history, mean, torch.tensor([0.1, 0.9, 0.5]), "model.q_proj", "ARD, 1 of 2 steps")
    assert picture.figure.axes[1].collections[0].get_offsets().tolist() == [[1, 0], [3, 0]]
    assert picture.figure.get_suptitle() == "Training ARD, 1 of 2 steps"


def test_pruning_names_each_order_once():
    curve = {way: [(1.0, 4.0), (0.5, 4.1)] for way in ("signal", "at random 1", "at random 2")}
    picture = ard_tables.pruning(curve, {("plain LoRA", 4): 4.05}, 8, "What it costs.")
    (legend,) = picture.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["pruned by signal", "pruned at random", "plain LoRA"]


def test_budgets_are_sorted_by_loss():
    rows = ard_tables.budgets({("plain LoRA", 4): 4.2}, {4: 4.3}, 8, 4.1, "ARD, 1 of 2 steps")
    assert [row["adapter"] for row in rows] == ["ARD, 1 of 2 steps, whole", "plain LoRA", "ARD, 1 of 2 steps, pruned"]
    assert [row["ranks"] for row in rows] == [8, 4, 4]


@pytest.fixture
def judged():
    def facts(nll, ece):
        bins = [{"tokens": 30, "confidence": 0.5, "accuracy": 0.4}, {"tokens": 3, "confidence": 0.9, "accuracy": 0.1}]
        return {"accuracy": 0.4, "nll": nll, "ece": ece, "reliability": bins}

    values = {"base": (1.0, 0.01), "LoRA": (3.0, 0.2), "ARD": (2.0, 0.3)}
    return {(name, text): facts(*values[name]) for name in values for text in ("code", "prose")}


def test_the_untrained_model_wins_nothing(judged):
    rows, winner = ard_tables.uncertainty(judged)
    assert [row["model"] for row in rows] == ["base", "LoRA", "ARD"] and rows[1]["nll, prose"] == 3.0
    assert {winner["nll", text] for text in ("code", "prose")} == {"ARD"}
    assert {winner["ece", text] for text in ("code", "prose")} == {"LoRA"}


def test_reliability_leaves_out_bins_of_few_tokens(judged):
    picture = ard_tables.reliability(judged, ["LoRA"], "LoRA")
    drawn = [list(line.get_xdata()) for line in picture.figure.axes[0].lines]
    assert drawn == [[0, 1], [0.5]]  # the diagonal, and the bin of thirty
    assert "on prose: LoRA" in picture.summary
