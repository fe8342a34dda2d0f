"""The plan is arithmetic on shapes: held against the estimator on deeper models, and against what
must be so.
"""

import pytest

from lessons import scale_out_plan as plan
from nblib import memory

SMALL = plan.small(64, 6, 256)


@pytest.fixture(scope="module")
def need():
    return plan.need(SMALL, 2, 64)


@pytest.mark.slow
def test_two_blocks_foretell_six(need):
    deep = memory.estimate(
        plan.config(SMALL, 6), rows=2, length=64, precision="bf16", checkpointing=True
    )
    assert need.weights == deep["weights"]
    one = plan.held(plan.per_rank(need, "ddp", 1))
    print(f"ddp on one card {one:,}, counted by the estimator {deep['peak']:,}")
    assert deep["peak"] <= one <= 1.4 * deep["peak"]


@pytest.mark.slow
def test_a_checkpointed_block_keeps_its_input():
    kept = [
        memory.estimate(
            plan.config(SMALL, n), rows=2, length=64, precision="fp32", checkpointing=True
        )["activations"]
        for n in (4, 5)
    ]
    assert kept[1] - kept[0] == 2 * 64 * SMALL.hidden * 4


@pytest.mark.slow
def test_shards_and_groups(need):
    ddp, fsdp, hsdp = (plan.per_rank(need, mesh, 64) for mesh in plan.MESHES)
    assert ddp["states"] == 4 * need.weights
    assert fsdp["states"] == pytest.approx(ddp["states"] / 64, abs=1)
    assert hsdp["states"] == pytest.approx(ddp["states"] / 8, abs=1)
    assert fsdp["between"] == ddp["between"] == 0 < hsdp["between"] < hsdp["sent"]
    assert plan.per_rank(need, "fsdp", 64, accumulate=3)["sent"] == pytest.approx(
        3 * fsdp["sent"], abs=3
    )
    assert ddp["sent"] < hsdp["sent"] < fsdp["sent"] <= 3 * need.weights
    assert [plan.groups_of(n) for n in (4, 8, 16, 1024)] == [2, 2, 2, 128]
    with pytest.raises(ValueError, match="mesh = 'tp': allowed are ddp, fsdp, hsdp"):
        plan.per_rank(need, "tp", 8)


@pytest.mark.slow
def test_the_models_have_the_sizes_of_their_names_and_more_cards_never_need_more():
    shape = plan.SHAPES["0.6 B"]
    of = plan.need(shape, 1, 64)
    assert of.weights / 4e9 == pytest.approx(0.6, rel=0.03)
    needs = [plan.held(plan.per_rank(of, "fsdp", n)) for n in (8, 64, 1024)]
    assert needs == sorted(needs, reverse=True)
    (line, *_) = plan.table(["0.6 B"], [8], rows=1, length=64, card_gb=80)
    assert line["mesh"] == "ddp" and line["GB, 8 cards"].endswith("fits")
    options = dict(rows=1, length=64)
    assert plan.first_that_fits("0.6 B", [64, 8], card_gb=80, **options) == "ddp on 8"
    assert plan.first_that_fits("0.6 B", [8], card_gb=1, **options) == "none"
    assert "Computed, not measured" in plan.picture(["0.6 B"], 64, length=64, card_gb=80).summary
