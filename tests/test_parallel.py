"""Several processes train as one does: real worlds over gloo, started by torchrun, with many
trainings in each.

What is compared with one process is the loss of each of 12 steps, with two micro-batches per step,
whose rows supervise different numbers of tokens.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import worlds
from safetensors.torch import load_file
from torch import nn

from nblib import checkpoint, files, losses, parallel, runtime, train

CPU = torch.device("cpu")
ALIKE = (
    "dense",
    "checkpointed",
    "compiled",
    "corrected",
    "latents",
    "experts",
    "taught",
    "part_of_it",
    "spiky",
)
BOTH = [f"{name}:{mesh}" for name in ALIKE for mesh in ("ddp", "fsdp")]
FURTHER = [
    "joint:ddp",
    "joint:fsdp",
    "drawing:ddp",
    "drawing:ddp:0-4",
    "drawing:ddp:4-12",
    "dense:hsdp",
]
BROKEN = ["poisoned:ddp", "poisoned:fsdp"]
STOPPED = ["dense:fsdp:0-4", "experts:fsdp:0-4", "experts:ddp:4-6"]
WRITTEN = [
    "taught:fsdp:0-4",
    "corrected:ddp:0-4:async",
    "experts:fsdp:0-4:async",
    "spiky:fsdp:0-8:async",
]


def _world(processes: int, folder: Path, *jobs: str) -> list[dict]:
    """What each process of a world measured."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    script = [worlds.__file__, folder / "results.json", folder, *jobs]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(
        [*launch, *map(str, script)], capture_output=True, text=True, timeout=1500, env=env
    )
    assert out.returncode == 0, out.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def two(folder):
    return _world(2, folder, *BOTH, *BROKEN, *FURTHER, *STOPPED, *WRITTEN)


@pytest.fixture(scope="module")
def one():
    return {name: worlds.run(name) for name in (*ALIKE, "joint")}


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_two_processes_train_as_one_does(two, one):
    for job in BOTH:
        ours, theirs = two[0][job], one[job.split(":")[0]]
        apart = {
            name: _apart(ours[name], theirs[name]) for name in ("losses", "norms", "evaluated")
        }
        print(
            f"{job:20} largest difference of "
            + ", ".join(f"{name} {value:.1e}" for name, value in apart.items())
        )
        assert max(apart.values()) < 2e-5, job
        assert ours["weights"] == pytest.approx(theirs["weights"], rel=1e-4)
        assert ours["losses"] == two[1][job]["losses"] and ours["weights"] == two[1][job]["weights"]
        # it learned
        assert (
            ours["losses"][0] - ours["losses"][-1] > 0.1 or "latents" in job or "corrected" in job
        )


@pytest.mark.slow
def test_rounding_of_weights_that_train_is_alike_until_a_code_flips(two, one):
    """-1, 0 and 1 are cut at a point, and the order of additions, each mesh's own, decides for who
    stands on it.
    """
    for mesh in ("ddp", "fsdp"):
        together, alone = two[0][f"joint:{mesh}"]["losses"], one["joint"]["losses"]
        print(
            f"joint:{mesh} differs by "
            + ", ".join(f"{abs(a - b):.1e}" for a, b in zip(together, alone))
        )
        assert _apart(together[:4], alone[:4]) < 2e-5 and _apart(together, alone) < 1e-2


@pytest.mark.slow
def test_every_process_draws_its_own_noise_also_after_a_stop_and_all_go_on_alike(two):
    first, second = (results["drawing:ddp"] for results in two)
    assert len(first["draws"]) == 24 and not set(first["draws"]) & set(second["draws"])
    assert first["next"] == second["next"]
    for results in two:
        straight, stopped = results["drawing:ddp"], results["drawing:ddp:4-12"]
        assert stopped["losses"] == straight["losses"] and stopped["draws"] == straight["draws"][8:]


@pytest.mark.slow
def test_a_number_that_is_none_ends_all_with_its_source(two):
    for results in two:
        for mesh in ("ddp", "fsdp"):
            said = results[f"poisoned:{mesh}"]
            assert (
                "step 2: loss nan" in said and "the forward pass of model.layers.1.mlp" in said
            ), said


@pytest.mark.slow
def test_a_mesh_that_does_not_divide_is_refused(two):
    assert (
        two[0]["dense:hsdp"]
        == "mesh = 'hsdp': 2 processes do not divide into 2 equal groups of two or more"
    )


@pytest.mark.slow
def test_stopped_on_two_gone_on_with_one_and_back_to_two(two, one, folder):
    for name in ("dense", "experts"):
        worlds.run(name, "auto", "4-8", folder)
    again = _world(2, folder, "dense:fsdp:8-12", "experts:fsdp:8-12")
    for name in ("dense", "experts"):
        assert [len(list((folder / name).glob("step-*")))] == [2]
        apart = _apart(again[0][f"{name}:fsdp:8-12"]["losses"], one[name]["losses"])
        print(f"{name}: two, one, two processes against straight: largest difference {apart:.1e}")
        assert apart < 2e-5
        # position and counters are of all
        assert again[0][f"{name}:fsdp:8-12"]["tokens"] == one[name]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("job", WRITTEN)
def test_each_process_writes_its_shards_and_one_process_reads_them(two, one, folder, job):
    name, how = job.split(":")[0], job.split(":")[3:]
    place = folder / "-".join([name, *how])
    path = checkpoint.folders(place)[0]
    shards = [f"training-0000{number}-of-00002.safetensors" for number in (1, 2)]
    others = {"model.safetensors", "training.pt", "meta.json", "manifest.json"}
    assert {file.name for file in path.iterdir()} == {*others, *shards}
    sizes = [(path / shard).stat().st_size for shard in shards]
    assert max(sizes) < 0.65 * sum(sizes)
    whole = checkpoint.read(path)  # by one process
    total = sum(t.nbytes for t in whole["weights"].values())
    assert sum(sizes) > 1.1 * total  # AdamW has two moments, Muon one
    assert (path / "training.pt").stat().st_size < 2e5 + 0.1 * total
    weights = load_file(path / "model.safetensors")  # by any tool
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole["weights"].items())
    assert weights.keys() == whole["weights"].keys()
    assert checkpoint.read_meta(path)["written_by"]["processes"] == 2
    straight = one[name]["losses"]
    at = whole["training"]["progress"]["step"]
    went_on = worlds.run(name, "auto", f"{at}-12", folder, *how)
    assert _apart(went_on["losses"][: len(straight)], straight) < 2e-5
    before = two[0][job]["losses"]
    assert before == went_on["losses"][: len(before)] and len(before) >= at


@pytest.mark.slow
def test_a_shard_that_is_not_what_was_written_is_noticed(two, folder, tmp_path, capsys):
    places = checkpoint.folders(folder / "dense")  # another test goes on with one process there
    of_two = next(place for place in places if [*place.glob("training-00002-*")])
    shutil.copytree(of_two, tmp_path / "whole")
    hurts = {
        "training-00002*": lambda file: file.write_bytes(file.read_bytes()[:-9]),
        "training-00001*": lambda file: file.unlink(),
        "training.pt": lambda file: file.write_bytes(bytes([1]) + file.read_bytes()[1:]),
        "manifest.json": lambda file: file.write_text(
            file.read_text().replace("training-00002", "training-00003")
        ),
    }
    for number, (name, hurt) in enumerate(hurts.items()):
        path = shutil.copytree(tmp_path / "whole", tmp_path / str(number) / "step-00000004")
        (file,) = path.glob(name)
        hurt(file)
        with pytest.raises(checkpoint.CheckpointError, match="step-00000004 is damaged"):
            checkpoint.read(path)
        assert (
            checkpoint.newest(path.parent) is None and "is set aside as" in capsys.readouterr().out
        )
    path = shutil.copytree(tmp_path / "whole", tmp_path / "less" / "step-00000004")
    # the manifest forgets a shard, and all that it names is unchanged
    next(path.glob("training-00002*")).unlink()
    files.seal(path)
    with pytest.raises(checkpoint.CheckpointError, match="does not name .*training-00002"):
        checkpoint.read(path)


def test_processes_take_their_generators_and_new_ones_make_theirs(tiny, monkeypatch):
    """Written by two, read by three: the rule of checkpoint.py."""
    states = []
    for seed in (1, 2):
        runtime.seed_all(seed)
        states.append(runtime.generators())
    state = checkpoint.capture(tiny, [], progress={"step": 4, "tokens": 9})
    state["training"]["generators"] = states
    draws = []
    for rank in range(3):
        monkeypatch.setattr(runtime, "rank", lambda rank=rank: rank)
        assert checkpoint.restore(state, tiny, []) == {"step": 4, "tokens": 9}
        draws.append(float(torch.rand(())))
    expected = []
    for seed, branch in ((1, 0), (2, 0), (1, 2)):
        runtime.seed_all(seed)
        if branch:
            runtime.branch(branch)
        expected.append(float(torch.rand(())))
    assert draws == expected and len(set(draws)) == 3


@pytest.mark.slow
def test_four_processes_in_two_groups_train_as_one_does(one, tmp_path):
    jobs = ["dense:hsdp", "experts:hsdp", "latents:hsdp"]
    results = _world(4, tmp_path, *jobs)
    for job in jobs:
        assert _apart(results[0][job]["losses"], one[job.split(":")[0]]["losses"]) < 2e-5, job


# ------------------------------------------------------------------ one process


def test_the_shares_of_all_processes_are_the_batch():
    ids = torch.arange(20).view(5, 4)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(5, 4)}
    shares = [parallel.Plan("ddp", CPU, world=3, rank=rank).mine(batch) for rank in range(3)]
    assert [len(share["labels"]) for share in shares] == [2, 2, 1]
    assert torch.equal(torch.cat([share["input_ids"] for share in shares]), ids)
    assert all(share["input_ids"] is share["labels"] for share in shares)
    with pytest.raises(ValueError, match="rows = 5: fewer than the 6 processes that share them"):
        parallel.Plan("ddp", CPU, world=6).mine(batch)


def test_what_cannot_be_is_refused_in_a_sentence_that_names_the_parameter(
    tiny, machine, monkeypatch, stream
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for match, mesh, world in [
        ("mesh = 'fdsp': allowed are auto, ddp, fsdp, hsdp", "fdsp", 2),
        ("mesh = 'fsdp': this is one process; .*--processes 2", "fsdp", 1),
        ("mesh = 'hsdp': 5 processes do not divide into 2 equal groups", "hsdp", 5),
    ]:
        with pytest.raises(ValueError, match=match):
            parallel.check(mesh, world)
    assert [parallel.check("hsdp", 4), parallel.check("fsdp", 3), parallel.check("auto", 1)] == [
        2,
        1,
        1,
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert parallel.check("hsdp", 32) == 4
    with pytest.raises(ValueError, match="mesh = 'ddp': this is one process"):
        two = machine._replace(mesh="ddp")
        train.fit(tiny, iter([]), train.adamw(tiny, lr=1e-3), total=1, machine=two)
    monkeypatch.setenv(parallel.MESH, "fsdp")
    with pytest.raises(ValueError, match="mesh = 'fsdp': this is one process"):
        parallel.plan(machine)
    tiny.packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"mesh = 'fsdp': 4-bit weights cannot be cut \(packed\); take ddp"
    ):
        parallel.Spread(parallel.Plan("fsdp", CPU, world=2), tiny, losses.causal_lm, [])


def test_a_branch_is_decided_by_rank_and_state_and_unlike_both():
    def draws(rank: int, seed: int = 0) -> float:
        runtime.seed_all(seed)
        runtime.branch(rank)
        return float(torch.rand(()))

    assert draws(1) == draws(1)
    runtime.seed_all(0)
    assert len({draws(1), draws(2), draws(1, seed=1), float(torch.rand(()))}) == 4
