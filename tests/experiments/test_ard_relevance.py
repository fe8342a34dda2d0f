"""Leave one out and Fisher against plain loops, and a measure that another spelling of the same
function changes.
"""

import copy

import pytest
import torch
from ard_bench import adapted, random_batch
from conftest import FP32

from experiments import ard_relevance
from nblib import losses, models, train
from nblib.methods import ard
from nblib.methods.ard import ranks
from nbworkbook.setup import Setup


@pytest.fixture
def model():
    model = adapted(rank=3, kinds=("q_proj", "v_proj"), hidden=32)
    ranks.estimate_priors(model, [random_batch()])
    return model


def _loss(model, rows) -> float:
    return train.evaluate(model, rows, machine=FP32)["loss"]


def test_leave_one_out_is_the_loss_of_a_model_without_that_rank(model):
    rows = random_batch()["input_ids"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scores = ard_relevance.leave_one_out(model, lambda: _loss(model, rows))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name in list(scores)[:2]:
        for k in range(3):
            keep = {n: torch.ones(3) for n in scores}
            keep[name][k] = 0
            pruned = copy.deepcopy(model)
            ranks.prune(pruned, keep, keep=3 * len(scores) - 1)
            assert float(scores[name][k]) == pytest.approx(
                _loss(pruned, rows) - _loss(model, rows), abs=1e-5
            )


def test_fisher_is_the_squared_slope_in_the_strength_of_a_rank(model):
    rows = random_batch(rows=3)["input_ids"]
    scores = ard_relevance.fisher(model.train(), rows, machine=FP32)
    assert model.training and all(p.grad is None for p in model.parameters())
    doubled = copy.deepcopy(model).double().eval()
    name, a = list(ard.adapters(doubled).items())[1]
    for k in range(3):
        slopes, column = [], a.lora_up[:, k].detach().clone()
        for row in rows:
            values = []
            for strength in (1 - 1e-4, 1 + 1e-4):
                with torch.no_grad():
                    a.lora_up[:, k] = column * strength
                    values.append(
                        float(
                            losses.causal_lm(
                                doubled, {"input_ids": row[None], "labels": row[None]}
                            )["ce"]
                        )
                    )
            slopes.append((values[1] - values[0]) / 2e-4 / (rows.shape[1] - 1))
            with torch.no_grad():
                a.lora_up[:, k] = column
        assert float(scores[name][k]) == pytest.approx(sum(s**2 for s in slopes) / 3, rel=1e-2)


def test_the_same_function_in_other_numbers_has_the_same_signal_and_another_variance(model):
    other, ids = ard_relevance.rescale(model), random_batch()["input_ids"]
    assert torch.allclose(other.eval()(ids).logits, model.eval()(ids).logits, atol=1e-4)
    scores = {by: [ranks.relevance(m, by=by) for m in (model, other)] for by in ranks.MEASURES}
    for by in ("signal", "weighted"):
        assert all(
            torch.allclose(scores[by][0][n], scores[by][1][n], rtol=1e-3) for n in scores[by][0]
        )
        assert ard_relevance.spearman(*scores[by]) == pytest.approx(1, abs=0.02)
    assert ard_relevance.spearman(*scores["variance"]) < 0.9


def test_spearman_is_that_of_places_where_equal_ones_share_theirs():
    a, b = (
        {"x": torch.tensor([3.0, 1.0]), "y": torch.tensor([2.0, 2.0])},
        {"x": torch.tensor([9.0, 0.0])},
    )
    b["y"] = torch.tensor([4.0, 7.0])
    expected = torch.corrcoef(torch.tensor([[4.0, 1.0, 2.5, 2.5], [4.0, 1.0, 2.0, 3.0]]))[0, 1]
    assert ard_relevance.spearman(a, b) == pytest.approx(float(expected), abs=1e-6)
    assert ard_relevance.spearman(a, a) == pytest.approx(1)
    assert ard_relevance.spearman(a, {n: -s for n, s in a.items()}) == pytest.approx(-1)


def test_a_budget_per_layer_keeps_as_many_in_each_and_the_best_of_them(model):
    scores = {name: torch.rand(3) * (n + 1) for n, name in enumerate(ard.adapters(model))}
    left = ranks.prune(copy.deepcopy(model), ard_relevance.per_layer(scores), keep=2 * len(scores))
    assert set(left.values()) == {2}
    kept = {name: ard_relevance.per_layer(scores)[name].argsort().tolist() for name in scores}
    assert all(kept[name] == scores[name].argsort().tolist() for name in scores)


def test_a_record_holds_every_measure_once_per_seed(stream, tmp_path, monkeypatch):
    for name, value in dict(STEPS=3, RANK=2, LOOKED=2, JUDGED=2).items():
        monkeypatch.setattr(ard_relevance, name, value)
    rows = stream[: 8 * 16].view(8, 16)
    opened = Setup(
        models.tiny(256, hidden=32, layers=1, heads=2), None, stream, rows[:4], rows[4:], FP32
    )
    path = tmp_path / "record.json"
    record = ard_relevance.measure(path, opened, seeds=(0,))
    again = ard_relevance.measure(path, opened, seeds=(0, 1))
    assert again["lines"][: len(record["lines"])] == record["lines"] and len(
        again["lines"]
    ) == 2 * len(record["lines"])
    rows_of = ard_relevance.table(again)
    assert rows_of[0]["pruned by"] == "leave one out" and len(rows_of) == len(record["lines"])
    agrees = {line["measure"]: line["agrees"] for line in record["lines"]}
    assert agrees["signal"] == pytest.approx(agrees["signal, rescaled"], abs=0.05)
    assert {line["passes"] for line in again["lines"] if line["measure"] == "leave one out"} == {7}
