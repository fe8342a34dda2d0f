"""A run killed at any instant goes on to the same bits; damage is noticed; a full disk loses nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FP32

from nblib import checkpoint, files, models, text, train


@pytest.mark.slow
def test_killed_runs_end_on_the_same_bits(tmp_path):
    script = Path(__file__).with_name("kill_runs.py")
    out = subprocess.run(
        [sys.executable, script, tmp_path / "kills", "24", "0"], capture_output=True, text=True, timeout=500
    )
    assert out.returncode == 0, out.stderr[-2000:]
    facts = json.loads(out.stdout.strip().splitlines()[-1])
    print(facts)
    assert facts["kills"] >= 20 and facts["equal"]
    assert facts["while_writing"] >= 3 and len(set(facts["killed_after_step"])) > 5


def _trained(folder, stream, total=6, seed=0):
    torch.manual_seed(seed)
    model = models.tiny(256, family="gpt2", hidden=32, layers=2, heads=2)
    batches = text.Batches(stream, rows=4, length=32)
    optimizer = train.adamw(model, lr=1e-2)
    records = train.fit(
        model, batches, optimizer, total=total, machine=FP32, checkpoints=folder, checkpoint_every=2, keep=3
    )
    return model, records


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "one bit flipped", "empty", "missing"])
def test_damage_is_noticed_and_the_one_before_is_used(file, damage, stream, tmp_path, capsys):
    straight, _ = _trained(tmp_path / "straight", stream, total=8)
    _trained(tmp_path / "run", stream)
    hurt = tmp_path / "run" / "step-00000006" / file
    data = bytearray(hurt.read_bytes())
    if damage == "truncated":
        hurt.write_bytes(data[: len(data) * 2 // 3])
    elif damage == "one bit flipped":
        data[len(data) // 2] ^= 1
        hurt.write_bytes(data)
    elif damage == "empty":
        hurt.write_bytes(b"")
    else:
        hurt.unlink()
    capsys.readouterr()
    resumed, records = _trained(tmp_path / "run", stream, total=8, seed=99)  # resume brings its own generator state
    said = capsys.readouterr().out
    assert "step-00000006 is damaged" in said and "resumed at step 4 of 8" in said
    assert [r["step"] for r in records] == list(range(1, 9))  # the history is whole
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))


def test_no_space_left_is_one_sentence_and_keeps_the_earlier_ones(stream, tmp_path):
    """A real full device: a tmpfs that holds one checkpoint and not the next."""
    disk = tmp_path / "disk"
    disk.mkdir()
    _trained(tmp_path / "elsewhere", stream, total=2)
    size = sum(f.stat().st_size for f in checkpoint.folders(tmp_path / "elsewhere")[0].iterdir())
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 8 // 5}", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with pytest.raises(checkpoint.CheckpointError, match="no space left on the device.*Intact: step-00000002"):
            _trained(disk / "run", stream)
        left = checkpoint.folders(disk / "run")
        assert [p.name for p in left] == ["step-00000002"]
        assert checkpoint.read(left[0])["training"]["progress"]["step"] == 2
        assert not list((disk / "run").glob(".step*"))  # the half-written one is gone, its space free again
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_an_unwritable_folder_is_one_sentence(stream, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="not written.*Intact: none"):
        _trained(tmp_path / "file" / "run", stream)


def test_a_snapshot_is_not_aliased(tiny, batches):
    """Restoring, training on and restoring again gives the same state twice: nothing writes into the snapshot."""
    optimizer = train.adamw(tiny, lr=1e-2)
    train.fit(tiny, batches, optimizer, total=3, machine=FP32)
    snapshot = checkpoint.capture(tiny, [optimizer], progress={"step": 3}, batches=batches, clone=True)
    seen = []
    for _ in range(2):
        checkpoint.restore(snapshot, tiny, [optimizer], batches=batches)
        seen.append([r["loss"] for r in train.fit(tiny, batches, optimizer, total=4, machine=FP32)])
    assert seen[0] == seen[1]


def test_only_what_trains_is_saved_and_the_base_is_recognised(stream, tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted(seed):
        model = models.tiny(256, hidden=32, layers=2, heads=2, seed=seed)
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))

    def run(model, total):
        batches = text.Batches(stream, rows=4, length=32)
        train.fit(model, batches, train.adamw(model, lr=1e-2), total=total, machine=FP32, checkpoints=tmp_path)

    run(adapted(0), 2)
    names = checkpoint.newest(tmp_path)["weights"].keys()
    assert names and all("lora_" in name for name in names)
    run(adapted(0), 3)
    with pytest.raises(checkpoint.CheckpointError, match="frozen base under this checkpoint is not the one"):
        run(adapted(1), 4)


def test_a_checkpoint_of_another_model_is_refused(tiny, batches, tmp_path):
    train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=1, machine=FP32, checkpoints=tmp_path)
    deeper = models.tiny(256, hidden=32, layers=3, heads=2)
    with pytest.raises(checkpoint.CheckpointError, match="train different parameters"):
        train.fit(deeper, batches, train.adamw(deeper, lr=1e-3), total=2, machine=FP32, checkpoints=tmp_path)


def test_old_checkpoints_and_leftovers_go(tiny, batches, tmp_path):
    leftover = tmp_path / ".step-00000001.999999999.partial"
    leftover.mkdir()
    train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-3),
        total=9,
        machine=FP32,
        checkpoints=tmp_path,
        checkpoint_every=2,
        keep=2,
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000008", "step-00000009"]


def test_nothing_unsafe_is_unpickled(tiny, batches, tmp_path):
    """A checkpoint whose training state carries code is refused, even with a matching hash."""
    train.fit(tiny, batches, train.adamw(tiny, lr=1e-3), total=1, machine=FP32, checkpoints=tmp_path)
    path = checkpoint.folders(tmp_path)[0]

    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "owned"),)

    torch.save(Evil(), path / "training.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["training.pt"] = files.sha256(path / "training.pt")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match="Weights only load failed|damaged"):
        checkpoint.read(path)
    assert not (tmp_path / "owned").exists()
    shutil.rmtree(path)
