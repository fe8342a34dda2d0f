"""After a power cut at any instant a reader finds the old thing or the new one, and what was
promised is there.
"""

import json
import os
import shutil

import pytest
import torch
from conftest import FP32
from power_cut import states
from safetensors.torch import load_file

from nblib import checkpoint, files, models, text, train
from nblib.methods import lrc
from nblib.methods.distill import teacher_cache


def test_the_disk_forgets_what_was_not_flushed(tmp_path):
    """The model itself: a careless writer loses the file in some state, in each of its ways."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "a").write_text("old" * 100)

    def careless(flush_file, flush_folder):
        def act():
            (folder / "b").write_text("new" * 100)
            files.flush(folder / "b") if flush_file else None
            os.replace(folder / "b", folder / "a")
            files.flush(folder) if flush_folder else None

        return act

    def outcomes(act):
        return {(left.done, (left.folder / "a").read_text()[:3] + str((left.folder / "a").stat().st_size // 150))
                for left in states(folder, act)}  # fmt: skip

    assert (True, "new1") in outcomes(careless(False, True))  # half of it
    assert (True, "old2") in outcomes(careless(True, False))  # the name was lost
    assert outcomes(careless(True, True)) == {(False, "old2"), (False, "new2"), (True, "new2")}


def test_a_file(tmp_path):
    path = tmp_path / "run" / "run.json"
    files.merge(path, {"status": "running"})
    for left in states(path.parent, lambda: files.merge(path, {"status": "done"})):
        status = files.read_json(left.folder / "run.json")["status"]
        assert status == "done" if left.done else status in ("running", "done")


def test_a_folder(tmp_path):
    folder = tmp_path / "store" / "model"

    def act(content="new"):
        with files.replacing(folder) as partial:
            partial.mkdir()
            (partial / "weights").write_text(content * 100)
            files.seal(partial)

    act("old")
    for left in states(folder.parent, act):
        files.verify(left.folder / "model")  # which also puts back the old one
        content = (left.folder / "model" / "weights").read_text()[:3]
        assert content == "new" if left.done else content in ("old", "new")


def _training(stream, folder, total):
    torch.manual_seed(0)
    model = models.tiny(256, family="gpt2", hidden=16, layers=1, heads=2)
    batches = text.Batches(stream, rows=2, length=16)
    optimizer = train.adamw(model, lr=1e-2)
    train.fit(
        model,
        batches,
        optimizer,
        total=total,
        machine=FP32,
        checkpoints=train.Checkpoints(folder, keep=1),
    )
    return model, [optimizer]


@pytest.mark.parametrize("step", [3, 2])
def test_a_checkpoint_and_one_of_the_same_step(tmp_path, stream, step):
    folder = tmp_path / "checkpoints"
    model, optimizers = _training(stream, folder, total=2)
    state = checkpoint.read(checkpoint.folders(folder)[0])
    state["training"]["progress"]["step"] = step
    state["training"]["new"] = True
    for left in states(folder, lambda: checkpoint.save(folder, state, keep=1)):
        found = checkpoint.newest(left.folder)
        assert found is not None and (found["training"].get("new") or not left.done)


def test_a_corrected_model(tmp_path, tiny):
    lrc.attach(tiny, percent=5, init="kaiming")
    lrc.save(tiny, tmp_path / "runs" / "model")
    whole = load_file(tmp_path / "runs" / "model" / lrc.WEIGHTS)
    for left in states(tmp_path / "runs", lambda: lrc.save(tiny, tmp_path / "runs" / "model")):
        files.verify(left.folder / "model")
        found = load_file(left.folder / "model" / lrc.WEIGHTS)
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
        assert json.loads((left.folder / "model" / lrc.RECIPE).read_text())


def test_a_teacher_cache(tmp_path, tiny, stream):
    models.as_teacher(tiny)
    source = {"teacher": "a", "tokenizer": "b", "data": "c"}

    def make():
        batches = text.Batches(stream, rows=2, length=16)
        options = dict(steps=3, source=source, k=4, machine=FP32, shard_rows=2)
        return teacher_cache.make(tmp_path / "run" / "cache", tiny, batches, **options)

    (tmp_path / "run").mkdir()
    for left in states(tmp_path / "run", make):
        os.rename(tmp_path / "run", tmp_path / "kept")
        shutil.copytree(left.folder, tmp_path / "run")
        rows = len(make()._rows)
        shutil.rmtree(tmp_path / "run")
        os.rename(tmp_path / "kept", tmp_path / "run")
        assert rows == 6
