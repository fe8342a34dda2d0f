"""ddp, fsdp and one process: equal losses, what each rank holds, and a checkpoint that moves
between worlds.
"""

import pytest
import torch

from lessons import scale_out_training as training
from lessons.scale_out import World

SHAPE = dict(steps=5, rows=4, hidden=256, layers=8, length=32)


@pytest.fixture(scope="module")
def worlds():
    with World(1) as alone, World(2) as two:
        yield alone, two


@pytest.fixture(scope="module")
def took(worlds):
    alone, two = worlds
    return {
        "one process": alone(training.measured, mesh="auto", **SHAPE),
        "ddp": two(training.measured, mesh="ddp", **SHAPE),
        "fsdp": two(training.measured, mesh="fsdp", **SHAPE),
        "fsdp, two micro-batches": two(training.measured, mesh="fsdp", accumulate=2, **SHAPE),
    }


@pytest.mark.slow
def test_the_losses_are_those_of_one_process(took):
    (one,) = took["one process"]
    for name, by_rank in took.items():
        far = training.apart(by_rank[0]["losses"], one["losses"])
        print(f"{name}: largest difference {far:.1e}")
        assert far <= 2e-5
    assert one["losses"][0] - one["losses"][-1] > 0.01


@pytest.mark.slow
def test_a_rank_holds_half_under_fsdp_and_its_peak_is_at_most_six_tenths(took):
    (one,) = took["one process"]
    assert one["moments"] == 2 * one["parameters"] == 2 * one["gradients"]
    ddp, fsdp, twice = (took[name] for name in ("ddp", "fsdp", "fsdp, two micro-batches"))
    for kind in (*training.KINDS, "held"):
        assert [r[kind] for r in ddp] == [one[kind]] * 2
        assert all(r[kind] == pytest.approx(one[kind] / 2, rel=0.01) for r in (*fsdp, *twice))
    peaks = {name: max(r["peak"] for r in by_rank) for name, by_rank in took.items()}
    print({name: f"{peak / 1e6:.0f} MB" for name, peak in peaks.items()})
    assert peaks["ddp"] >= one["held"] > peaks["fsdp"]
    assert peaks["fsdp"] <= 0.6 * peaks["ddp"]
    # no whole gradients wait for the last one
    assert peaks["fsdp, two micro-batches"] <= 0.6 * peaks["ddp"]


@pytest.mark.slow
def test_stopped_on_two_gone_on_with_one_and_back(worlds, tmp_path):
    alone, two = worlds
    folder, losses = str(tmp_path), None
    for world, mesh, first, last in [
        (two, "fsdp", 0, 3),
        (alone, "auto", 3, 6),
        (two, "ddp", 6, 9),
    ]:
        leg = world(training.part, mesh=mesh, folder=folder, first=first, last=last, total=9)[0]
        assert leg["steps"] == list(range(first + 1, last + 1))
        losses = leg["losses"]
    straight = alone(training.part, mesh="auto", folder="", first=0, last=9, total=9)[0]["losses"]
    assert len(straight) == 9 and training.apart(losses, straight) <= 2e-5


def test_held_counts_the_part_that_is_here():
    w = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = torch.optim.AdamW([w])
    w.grad = torch.ones(4, 3)
    optimizer.step()
    assert training.held(optimizer) == {"parameters": 48, "gradients": 48, "moments": 96}


def test_the_table_and_the_picture_take_the_hungriest_rank():
    facts = {
        "parameters": 1_000_000,
        "gradients": 0,
        "moments": 0,
        "peak": 3_000_000,
        "seconds of a step": 0.1,
    }
    took = {"a": [facts, facts | {"peak": 4_000_000, "seconds of a step": 0.2}]}
    (line,) = training.overview(took, {"a": 0.0})
    assert line["peak"] == 4 and line["ms per step"] == 200 and line["ranks"] == 2
    assert "Blue: parameters" in training.picture(took).summary


@pytest.mark.slow
def test_a_step_waits_less_for_a_checkpoint_that_is_written_in_the_background(worlds, tmp_path):
    by_rank = worlds[1](training.waits, mesh="fsdp", folder=str(tmp_path), hidden=256, layers=8)
    print(*by_rank[0]["steps"], sep="\n")
    at_once, background = (way["step that saves, ms"] for way in by_rank[0]["steps"])
    assert background < at_once
    sizes = {one["file"]: one["bytes"] for one in by_rank[0]["files"]}
    shards = [size for name, size in sizes.items() if name.startswith("training-")]
    others = {"model.safetensors", "training.pt", "meta.json", "manifest.json"}
    assert set(sizes) - others == {n for n in sizes if n.startswith("training-")}
    assert (
        len(shards) == 2
        and max(shards) < 0.6 * sum(shards)
        and sizes["training.pt"] < 0.1 * sum(shards)
    )
