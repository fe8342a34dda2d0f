"""Agreement with a teacher by position against its definition, and what a model costs."""

import pytest
import torch
from conftest import FP32
from torch.distributions import Categorical, kl_divergence

from lessons import teacher_agreement
from nblib import models


@pytest.fixture
def teacher():
    return models.as_teacher(models.tiny(256, hidden=48, layers=4, heads=2, seed=9))


def test_agreement_by_position_equals_the_definition(tiny, teacher):
    rows = torch.randint(256, (5, 24))
    found = teacher_agreement.agreement(tiny, teacher, rows, machine=FP32, batch=2, parts=3)
    with torch.no_grad():
        s, t = (m(rows).logits[:, :-1].double() for m in (tiny.eval(), teacher))
    kl = kl_divergence(Categorical(logits=t), Categorical(logits=s))
    same = (s.argmax(-1) == t.argmax(-1)).double()
    assert found["kl"] == pytest.approx(float(kl.mean()), rel=1e-4) and found["top1"] == float(
        same.mean()
    )
    assert found["up_to"] == [7, 14, 23]
    cuts = [slice(0, 7), slice(7, 14), slice(14, 23)]
    assert found["kl_by_position"] == pytest.approx(
        [float(kl[:, c].mean()) for c in cuts], rel=1e-4
    )
    assert found["top1_by_position"] == pytest.approx([float(same[:, c].mean()) for c in cuts])
    perfect = teacher_agreement.agreement(teacher, teacher, rows, machine=FP32)
    assert perfect["top1"] == 1 and abs(perfect["kl"]) < 1e-6
    with pytest.raises(ValueError, match="parts = 24: must be from 1 to the 23"):
        teacher_agreement.agreement(tiny, teacher, rows, machine=FP32, parts=24)


def test_costs_tell_a_large_model_from_a_small_one(tiny):
    ids = torch.randint(256, (4, 64))
    large = models.tiny(256, hidden=256, layers=4)
    small, big = (teacher_agreement.costs(m, ids, machine=FP32) for m in (tiny, large))
    assert (
        big["parameters"] > 10 * small["parameters"] and big["step_bytes"] > 2 * small["step_bytes"]
    )
    assert big["train_tokens_per_s"] < small["train_tokens_per_s"] and tiny.training
    assert big["eval_tokens_per_s"] > big["train_tokens_per_s"]


def test_a_picture_and_a_table_of_what_was_found(tiny, teacher):
    rows = torch.randint(256, (4, 24))
    found = {
        name: teacher_agreement.agreement(model, teacher, rows, machine=FP32, parts=3)
        for name, model in {"new": tiny, "itself": teacher}.items()
    }
    made = teacher_agreement.picture(found, title="Close to the teacher")
    left, right = made.figure.axes
    assert [list(line.get_ydata()) for line in right.lines] == [
        each["kl_by_position"] for each in found.values()
    ]
    assert [list(line.get_ydata()) for line in left.lines] == [
        each["top1_by_position"] for each in found.values()
    ]
    # the legend stands off the curves
    assert "itself 100%" in made.summary and left.get_legend() is None
    (row,) = teacher_agreement.cost_rows({"new": tiny}, rows, machine=FP32)
    assert row["model"] == "new" and row["parameters"] > 0 and 0 < row["MiB of a step"] < 1000
    assert "step_bytes" not in row
