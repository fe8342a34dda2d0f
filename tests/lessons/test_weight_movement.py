"""What moved against what could have: rates, rounding, gradients."""

import copy
import math

import pytest
import torch
from torch import nn

from lessons import weight_movement
from nblib import text, train
from nblib.methods import muon


def moved(model, made, machine, stream, total=5, **options):
    start = weight_movement.snapshot(model)
    options |= dict(total=total, machine=machine, clip=0)
    records = train.fit(model, text.Batches(stream, rows=2, length=16), made, **options)
    return {m.parameter: m for m in weight_movement.audit(model, start, made, records)}, records


def test_bf16_norms_round_away_and_fp32_norms_move(tiny, stream, machine):
    low = copy.deepcopy(tiny).bfloat16()
    norm = "model.norm.weight"
    table, _ = moved(low, [train.adamw(low, lr=1e-3)], machine, stream)
    assert table[norm].verdict == "stuck: every step rounds away" and table[norm].changed == 0
    table, _ = moved(tiny, [train.adamw(tiny, lr=1e-3)], machine, stream)
    assert table[norm].changed == 1 and table[norm].rounded == 0
    assert all(m.verdict.startswith("moved") for m in table.values())


def test_the_reach_is_how_far_steady_gradients_go():
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(24, 16)), nn.Parameter(torch.ones(8))
    model.c, model.d, model.e = (nn.Parameter(torch.ones(3)) for _ in range(3))
    made = [
        muon.Muon([model.a], lr=0.02),
        torch.optim.AdamW([model.b, model.c], lr=1e-3, weight_decay=0.0),
    ]
    made.append(torch.optim.AdamW([model.d], lr=0.0))
    start, steady = weight_movement.snapshot(model), torch.randn(24, 16)
    for _ in range(20):
        model.a.grad, model.b.grad, model.d.grad = steady.clone(), torch.ones(8), torch.ones(3)
        for optimizer in made:
            optimizer.step()
    table = {m.parameter: m for m in weight_movement.audit(model, start, made, [{"lr": 0.02}] * 20)}
    for name in "ab":
        assert table[name].moved == pytest.approx(table[name].reach, rel=0.1)
    assert table["c"].verdict == "stuck: no gradient"
    assert table["d"].verdict == "stuck: its rate is 0"
    assert table["e"].verdict == "stuck: in no optimizer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_the_spacing_is_where_an_update_begins_to_count(dtype):
    p = torch.tensor([1.0, 1.5, 0.02, -3.0, 1e-3], dtype=dtype)
    half = weight_movement.half_spacing(p)
    towards_zero = -p.double().sign() * half
    kept = (p.double() + 1.01 * towards_zero).to(dtype)
    lost = (p.double() + 0.99 * towards_zero).to(dtype)
    assert (kept != p).all() and torch.equal(lost, p)


def test_precision_names_what_a_norm_feels(tiny):
    tiny.model.layers[0].bfloat16()
    found = {row["dtype"]: row for row in weight_movement.precision(tiny)}
    assert found["bfloat16"]["norms feel"] == 2**-9 and found["float32"]["norms feel"] < 1e-7
    assert sum(row["entries"] for row in found.values()) == sum(
        p.numel() for p in tiny.parameters()
    )


def test_gradient_range():
    found = weight_movement.gradient_range(
        [{"grad_norm": n} for n in (0.01, 1.0, 2.0, math.nan)] + [{"event": "rollback"}]
    )
    assert found["outside"] == 0.5
    with pytest.raises(ValueError, match="grad_norm"):
        weight_movement.gradient_range([{"loss": 1.0}])


def test_by_kind_counts_the_stuck_of_each_kind():
    def row(name, relative, verdict):
        return weight_movement.Moved(name, "float32", 1.0, 0.5, relative, 2.0, 0.0, verdict)

    moved = [row("a", 0.1, "moved"), row("b", 0.3, "stuck: no gradient"), row("c", 0.2, "moved")]
    table = weight_movement.by_kind(
        moved, {"a": "norm: one", "b": "norm: other", "c": "router: rows"}
    )
    assert [(line["kind"], line["tensors"], line["stuck"]) for line in table] == [
        ("norm", 2, 1),
        ("router", 1, 0),
    ]
    assert (
        table[0]["moved, of their size"] == "0.1 to 0.3"
        and table[0]["of their reach"] == "25% to 25%"
    )
