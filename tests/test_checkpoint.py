"""A run killed at any instant goes on to the same bits; damage is noticed; a full disk loses
nothing.
"""

import hashlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from bit_flips import flips
from conftest import FP32

from nblib import checkpoint, files, losses, models, text, train


@pytest.mark.slow
def test_killed_runs_end_on_the_same_bits(tmp_path):
    script = Path(__file__).with_name("kill_runs.py")
    out = subprocess.run(
        [sys.executable, script, tmp_path / "kills", "24", "0"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert out.returncode == 0, out.stderr[-2000:]
    facts = json.loads(out.stdout.strip().splitlines()[-1])
    print(facts)
    assert facts["kills"] >= 20 and facts["equal"]
    assert facts["while_writing"] >= 3 and len(set(facts["killed_after_step"])) > 5


def _trained(folder, stream, total=6, seed=0, keep=3, background=False, **options):
    torch.manual_seed(seed)
    model = models.tiny(256, family="gpt2", hidden=32, layers=2, heads=2)
    batches = text.Batches(stream, rows=4, length=32)
    optimizer = train.adamw(model, lr=1e-2)
    checkpoints = train.Checkpoints(folder, every=2, keep=keep, background=background)
    options = dict(total=total, machine=FP32, checkpoints=checkpoints) | options
    records = train.fit(model, batches, optimizer, **options)
    return model, records


SHARD = "training-00001-of-00001.safetensors"  # of the one process that wrote


@pytest.mark.parametrize(
    "file", ["model.safetensors", SHARD, "training.pt", "meta.json", "manifest.json"]
)
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
    # resume brings its own generator state
    resumed, records = _trained(tmp_path / "run", stream, total=8, seed=99)
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
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size * 8 // 5}", "none", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with pytest.raises(
            checkpoint.CheckpointError, match="no space left on the device.*Intact: step-00000002"
        ):
            _trained(disk / "run", stream)
        left = checkpoint.folders(disk / "run")
        assert [p.name for p in left] == ["step-00000002"]
        assert checkpoint.read(left[0])["training"]["progress"]["step"] == 2
        # the half-written one is gone, its space free again
        assert not list((disk / "run").glob(".step*"))
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_an_unwritable_folder_is_one_sentence(stream, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="not written.*Intact: none"):
        _trained(tmp_path / "file" / "run", stream)


def test_a_snapshot_is_not_aliased(tiny, batches):
    """Restoring, training on and restoring again gives the same state twice: nothing writes into
    the snapshot.
    """
    optimizer = train.adamw(tiny, lr=1e-2)
    train.fit(tiny, batches, optimizer, total=3, machine=FP32)
    snapshot = checkpoint.capture(
        tiny, [optimizer], progress={"step": 3}, batches=batches, clone=True
    )
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
        train.fit(
            model,
            batches,
            train.adamw(model, lr=1e-2),
            total=total,
            machine=FP32,
            checkpoints=train.Checkpoints(tmp_path),
        )

    run(adapted(0), 2)
    names = checkpoint.newest(tmp_path)["weights"].keys()
    assert names and all("lora_" in name for name in names)
    run(adapted(0), 3)
    with pytest.raises(
        checkpoint.CheckpointError, match="frozen base under this checkpoint is not the one"
    ):
        run(adapted(1), 4)


def test_a_checkpoint_of_another_model_is_refused(tiny, batches, tmp_path):
    train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-3),
        total=1,
        machine=FP32,
        checkpoints=train.Checkpoints(tmp_path),
    )
    deeper = models.tiny(256, hidden=32, layers=3, heads=2)
    with pytest.raises(checkpoint.CheckpointError, match="train different parameters"):
        train.fit(
            deeper,
            batches,
            train.adamw(deeper, lr=1e-3),
            total=2,
            machine=FP32,
            checkpoints=train.Checkpoints(tmp_path),
        )


def test_old_checkpoints_and_leftovers_go(tiny, batches, tmp_path):
    leftover = tmp_path / ".step-00000001.999999999.partial"
    leftover.mkdir()
    train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-3),
        total=9,
        machine=FP32,
        checkpoints=train.Checkpoints(tmp_path, every=2, keep=2),
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000008", "step-00000009"]


def test_nothing_unsafe_is_unpickled(tiny, batches, tmp_path):
    """A checkpoint whose training state carries code is refused, even with a matching hash."""
    train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-3),
        total=1,
        machine=FP32,
        checkpoints=train.Checkpoints(tmp_path),
    )
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


def test_any_safetensors_tool_reads_the_weights(tiny, batches, tmp_path):
    """Whole, by the model's own names: transformers takes them as they are."""
    train.fit(
        tiny,
        batches,
        train.adamw(tiny, lr=1e-3),
        total=1,
        machine=FP32,
        checkpoints=train.Checkpoints(tmp_path),
    )
    (path,) = checkpoint.folders(tmp_path)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    assert weights.keys() == dict(tiny.named_parameters()).keys()
    assert all(torch.equal(weights[name], p) for name, p in tiny.named_parameters())
    tiny.config.save_pretrained(path)
    again = type(tiny).from_pretrained(path, dtype=torch.float32)
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), tiny.parameters(), strict=True)
    )


def test_a_person_reads_the_step_the_loss_and_what_wrote_it(tiny, batches, tmp_path):
    optimizer = train.adamw(tiny, lr=1e-3)
    records = train.fit(
        tiny, batches, optimizer, total=3, machine=FP32, checkpoints=train.Checkpoints(tmp_path)
    )
    (path,) = checkpoint.folders(tmp_path)
    meta = json.loads((path / "meta.json").read_text())
    assert (
        meta["step"] == 3
        and meta["loss"] == records[-1]["loss"]
        and meta["tokens"] == records[-1]["tokens"]
    )
    assert meta["versions"]["torch"] == torch.__version__ and "nblib" in meta["versions"]
    assert meta["written_by"]["processes"] == 1 and meta["optimizers"] == ["AdamW"]
    assert meta["saved_numbers"] == models.count(tiny)["trainable"] and meta["parameters"] is None
    state = checkpoint.read(path)
    checkpoint.save(tmp_path, state, parameters={"lr": 1e-3, "at": tmp_path})
    assert checkpoint.read_meta(path)["parameters"] == {"lr": 1e-3, "at": str(tmp_path)}
    assert checkpoint.read_meta(tmp_path) == {}


def test_a_checkpoint_of_an_earlier_version_is_refused_and_stays(tiny, batches, tmp_path):
    """Its manifest is true and names no meta.json."""
    optimizer = train.adamw(tiny, lr=1e-3)
    train.fit(
        tiny, batches, optimizer, total=1, machine=FP32, checkpoints=train.Checkpoints(tmp_path)
    )
    (path,) = checkpoint.folders(tmp_path)
    (path / "meta.json").unlink()
    files.seal(path)
    with pytest.raises(
        checkpoint.OldFormat, match="step-00000001 was written by nblib 0.1.*delete the folder"
    ):
        train.fit(
            tiny, batches, optimizer, total=2, machine=FP32, checkpoints=train.Checkpoints(tmp_path)
        )
    with pytest.raises(checkpoint.CheckpointError, match="nblib 0.1"):
        checkpoint.newest(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_torch_wraps_comes_out_as_it_was(error, tiny, batches, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise error

    monkeypatch.setattr("torch.distributed.checkpoint.HuggingFaceStorageWriter.write_data", stop)
    expected = (
        KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else checkpoint.CheckpointError
    )
    with pytest.raises(expected) as caught:
        train.fit(
            tiny,
            batches,
            train.adamw(tiny, lr=1e-3),
            total=1,
            machine=FP32,
            checkpoints=train.Checkpoints(tmp_path),
        )
    assert expected is KeyboardInterrupt or "no space left on the device" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def _damage(path):
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_ones_never_count_and_the_one_just_written_stays(keep, stream, tmp_path, capsys):
    """All checkpoints are damaged and have a higher step: the run begins again, and what it saves
    is there.
    """
    _trained(tmp_path, stream, total=20, keep=keep)
    for path in checkpoint.folders(tmp_path):
        _damage(path)
    _trained(tmp_path, stream, total=7, keep=keep)
    said = capsys.readouterr().out
    assert said.count("is set aside as") == keep and "resumed" not in said
    assert len(list(tmp_path.glob("damaged-step-*"))) == keep
    assert checkpoint.newest(tmp_path)["training"]["progress"]["step"] == 7
    assert [p.name for p in checkpoint.folders(tmp_path)] == ["step-00000007", "step-00000006"][
        :keep
    ]


def test_names_that_are_not_ours_are_left_alone_and_take_no_place(stream, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / "step-99999999").write_text("a file")
    (run / "step-00000001").symlink_to(elsewhere)
    (run / "step-latest").symlink_to(elsewhere)
    (run / "step-999999990").mkdir()
    _trained(run, stream, total=4, keep=1)
    assert [p.name for p in checkpoint.folders(run)] == ["step-00000004"]
    assert len(list(run.iterdir())) == 5 and elsewhere.is_dir()
    assert checkpoint.newest(run)["training"]["progress"]["step"] == 4


RUBBISH = {
    "no safetensors": ("model.safetensors", lambda old: b"rubbish" * 100),
    "no weights": ("model.safetensors", lambda old: b""),
    "no moments": (SHARD, lambda old: b""),
    "weights alone": (SHARD, lambda old: safetensors.torch.save({"w": torch.ones(2)})),
    "no archive": ("training.pt", lambda old: b"rubbish" * 100),
    "half an archive": ("training.pt", lambda old: old[: len(old) // 2]),
    "nothing in it": ("training.pt", lambda old: _saved({})),
    "a list": ("training.pt", lambda old: _saved([1, 2])),
    "optimizers of nothing": (
        "training.pt",
        lambda old: _saved(_loaded(old) | {"optimizers": [{}]}),
    ),
    "one optimizer too many": (
        "training.pt",
        lambda old: _saved(_loaded(old) | {"optimizers": [{}, {}]}),
    ),
    "another position": (
        "training.pt",
        lambda old: _saved(_loaded(old) | {"batches": {"wrong": 1}}),
    ),
    "no generator": ("training.pt", lambda old: _saved(_loaded(old) | {"generators": [{}]})),
    "no step": ("training.pt", lambda old: _saved(_loaded(old) | {"progress": {}})),
    "a step that is text": (
        "training.pt",
        lambda old: _saved(_loaded(old) | {"progress": {"step": "six"}}),
    ),
}


def _saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loaded(content: bytes) -> dict:
    return torch.load(io.BytesIO(content), weights_only=True)


@pytest.mark.parametrize("file, content", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_with_a_true_hash_falls_back_to_the_one_before(
    file, content, stream, tmp_path, capsys
):
    straight, _ = _trained(tmp_path / "straight", stream, total=8)
    _trained(tmp_path / "run", stream)
    newest = tmp_path / "run" / "step-00000006"
    (newest / file).write_bytes(content((newest / file).read_bytes()))
    files.seal(newest)
    resumed, records = _trained(tmp_path / "run", stream, total=8, seed=99)
    assert "resumed at step 4 of 8" in capsys.readouterr().out and len(records) == 8
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))
    # where nothing is left, the half-filled model is not used
    for path in checkpoint.folders(tmp_path / "run"):
        (path / file).write_bytes(content((path / file).read_bytes()))
        files.seal(path)
    try:
        _, records = _trained(tmp_path / "run", stream, total=8)
        assert [r["step"] for r in records] == list(range(1, 9))
    except checkpoint.CheckpointError as error:
        assert "can be restored; start this run again" in str(error)


def test_a_half_filled_model_is_never_a_fresh_start(stream, tmp_path):
    """The newest checkpoint fills the weights and then fails; the one before it is damaged: nothing
    puts it right.
    """
    _trained(tmp_path, stream, keep=2)
    newest, before = checkpoint.folders(tmp_path)
    content = (newest / "training.pt").read_bytes()
    (newest / "training.pt").write_bytes(_saved(_loaded(content) | {"optimizers": [{}]}))
    files.seal(newest)
    _damage(before)
    with pytest.raises(checkpoint.CheckpointError, match="can be restored; start this run again"):
        _trained(tmp_path, stream)


def test_each_flipped_bit_is_noticed(stream, tmp_path, capsys):
    _trained(tmp_path, stream, total=2)
    path = checkpoint.folders(tmp_path)[0]
    weights = checkpoint.read(path)["weights"]
    for file in ("model.safetensors", SHARD, "training.pt", "meta.json", "manifest.json"):
        for _ in flips(path / file, count=60):
            try:
                found = checkpoint.read(path)["weights"]
                assert file == "manifest.json" and all(
                    torch.equal(found[n], t) for n, t in weights.items()
                )
            except checkpoint.CheckpointError:
                pass
    assert checkpoint.read(path)


@pytest.mark.parametrize("element", [3, 500, -1])
def test_the_whole_frozen_base_counts(element, batches, tmp_path):
    def run(total, changed=False):
        model = models.tiny(256, hidden=32, layers=2, heads=2)
        model.requires_grad_(False)
        model.lm_head.weight.requires_grad_(True)
        if changed:
            model.model.layers[1].mlp.up_proj.weight.data.view(-1)[element] += 1e-3
        train.fit(
            model,
            batches,
            train.adamw(model, lr=1e-3),
            total=total,
            machine=FP32,
            checkpoints=train.Checkpoints(tmp_path),
        )

    run(1)
    run(2)
    with pytest.raises(
        checkpoint.CheckpointError, match="frozen base under this checkpoint is not the one"
    ):
        run(3, changed=True)


def test_a_frozen_tensor_is_hashed_once_and_again_after_a_change(monkeypatch):
    hashed, frozen = [], torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    real = hashlib.sha256
    monkeypatch.setattr(
        checkpoint.hashlib, "sha256", lambda data=b"": hashed.append(len(data)) or real(data)
    )
    prints = [checkpoint.fingerprint([("frozen", frozen)]) for _ in range(3)]
    assert len(set(prints)) == 1 and hashed.count(16) == 1
    with torch.no_grad():
        frozen[3] = 1
    assert checkpoint.fingerprint([("frozen", frozen)]) != prints[0] and hashed.count(16) == 2


def test_a_resumed_training_has_the_history_of_a_straight_one(stream, tmp_path):
    _, straight = _trained(tmp_path / "straight", stream, total=9)
    for total in (3, 4, 9, 9):  # the last call has nothing left to do
        _, records = _trained(tmp_path / "run", stream, total=total)
    assert [r["step"] for r in records] == list(range(1, 10))
    stored = checkpoint.newest(tmp_path / "run")["training"]["history"]
    for known in (records, stored):
        assert [(r["loss"], r["lr"], r["grad_norm"], r["tokens"]) for r in known] == [
            (r["loss"], r["lr"], r["grad_norm"], r["tokens"]) for r in straight
        ]


@pytest.mark.parametrize("stop", [5, 8, 11, 12, 13])
def test_a_training_that_rolls_back_resumes_as_the_straight_one(stop, stream, tmp_path):
    """The snapshot to roll back to is older than the checkpoint, so it is in the checkpoint."""

    def run(folder, stop_after=0):
        torch.manual_seed(0)
        model = models.tiny(256, family="gpt2", hidden=32, layers=2, heads=2)
        seen = 0

        def loss(model, batch):
            terms = losses.causal_lm(model, batch)
            return {"ce": terms["ce"] * (100 if batches.position == 12 else 1)}

        class Controls:
            lr_scale = 1.0

            @property
            def stop(self):
                nonlocal seen
                seen += 1
                return seen == stop_after

        batches = text.Batches(stream, rows=2, length=16)
        records = train.fit(
            model,
            batches,
            train.adamw(model, lr=1e-2),
            total=14,
            loss=loss,
            machine=FP32,
            recovery=train.Recovery(spike=3.0, snapshot_every=4),
            checkpoints=train.Checkpoints(folder, every=5),
            watch=train.Watch(controls=Controls()),
        )
        return model, [(r["step"], r["loss"], r.get("event")) for r in records]

    straight, records = run(tmp_path / "straight")
    assert sum(event == "rollback" for *_, event in records) == 1
    run(tmp_path / "run", stop_after=stop)
    resumed, again = run(tmp_path / "run")
    assert again == records
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters()))


# ------------------------------------------------------------------ in the background


def _slowly(monkeypatch, seconds=0.15):
    """Checkpoints that take a while to write; a list of how many were being written when each
    began.
    """
    real, running, seen = checkpoint.save_file, [], []

    def slow(*args, **options):
        running.append(1)
        seen.append(len(running))
        time.sleep(seconds)
        real(*args, **options)
        running.pop()

    monkeypatch.setattr(checkpoint, "save_file", slow)
    return seen


def test_in_the_background_the_same_is_written_one_after_the_other(stream, tmp_path, monkeypatch):
    straight, _ = _trained(tmp_path / "plain", stream, keep=9)
    seen = _slowly(monkeypatch)
    model, _ = _trained(tmp_path / "async", stream, keep=9, background=True)
    assert seen == [1, 1, 1]
    for one, other in zip(
        checkpoint.folders(tmp_path / "plain"), checkpoint.folders(tmp_path / "async"), strict=True
    ):
        assert one.name == other.name
        assert files.sha256(one / "model.safetensors") == files.sha256(other / "model.safetensors")
        assert checkpoint.read_meta(one)["loss"] == checkpoint.read_meta(other)["loss"]
        ours, theirs = (checkpoint.read(path)["training"] for path in (one, other))
        assert [r["loss"] for r in ours.pop("history")] == [
            r["loss"] for r in theirs.pop("history")
        ]
        for state in (ours, theirs):
            state["progress"].pop("seconds")
        assert _same(ours, theirs)
    resumed, records = _trained(tmp_path / "async", stream, total=8, seed=99, background=True)
    straight, _ = _trained(tmp_path / "plain", stream, total=8)
    assert len(records) == 8 and all(
        torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters())
    )


def _same(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_write_in_the_background_that_fails_ends_the_next_step(stream, tmp_path, monkeypatch):
    real, count = checkpoint.save_file, iter(range(9))

    def failing(*args, **options):
        if next(count):
            raise OSError(5, "Input/output error")
        real(*args, **options)

    monkeypatch.setattr(checkpoint, "save_file", failing)
    steps = []

    def slow_step(record):
        steps.append(record["step"])
        time.sleep(0.1)  # enough for the thread to fail

    with pytest.raises(
        checkpoint.CheckpointError, match="step-00000004 not written.*error. Intact: step-00000002"
    ):
        _trained(tmp_path, stream, total=20, background=True, on_step=slow_step)
    assert steps[-1] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("how", ["left", "stopped", "an error"])
def test_whatever_ends_the_training_what_is_being_written_becomes_whole(
    how, stream, tmp_path, monkeypatch
):
    _slowly(monkeypatch, seconds=0.5)
    controls = SimpleNamespace(stop=False, lr_scale=1.0)
    model = models.tiny(256, hidden=32, layers=2, heads=2)
    batches, optimizer = text.Batches(stream, rows=4, length=32), train.adamw(model, lr=1e-2)
    options = dict(
        machine=FP32,
        checkpoints=train.Checkpoints(tmp_path, every=2, background=True),
        watch=train.Watch(controls=controls),
    )
    loop = train.steps(model, batches, optimizer, total=9, **options)
    for record in loop:
        if record["step"] == 3:
            assert not checkpoint.folders(tmp_path)  # it is being written
            if how == "left":
                break
            if how == "an error":
                with pytest.raises(ZeroDivisionError):
                    loop.throw(ZeroDivisionError)
                break
            controls.stop = True
    loop.close()
    last = {"left": 2, "an error": 2, "stopped": 4}[how]
    assert [
        checkpoint.read(path)["training"]["progress"]["step"]
        for path in checkpoint.folders(tmp_path)
    ][0] == last
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_save_in_the_background_delays_its_step_by_at_most_a_fifth(tmp_path):
    """Both ways in turn, of the same 250 MB; the step waits while the states are copied."""
    model = models.tiny(4096, hidden=512, layers=6, heads=8)
    optimizer = train.adamw(model, lr=1e-3)
    ids = torch.randint(0, 4096, (2, 16))
    losses.causal_lm(model, {"input_ids": ids, "labels": ids})["ce"].backward()
    optimizer.step()
    took = {True: [], False: []}
    with checkpoint.Saver(train.Checkpoints(tmp_path, keep=1, background=True)) as saver:
        for step in range(6):
            for last in (True, False):
                state = checkpoint.capture(model, [optimizer], progress={"step": 2 * step + last})
                began = time.perf_counter()
                saver.save(state, last=last)
                took[last].append(time.perf_counter() - began)
            saver.wait()
    size = sum(t.nbytes for t in state["weights"].values())
    shares = [a / b for a, b in zip(took[False], took[True])]
    best = min(took[False]) / min(took[True])  # who else computes makes single pairs long
    print(
        f"states of {3 * size / 1e6:.0f} MB: {best:.2f} of the best times, pairs {statistics.median(shares):.2f}"
    )
    assert 3 * size > 200e6 and best <= 0.2
