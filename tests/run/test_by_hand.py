"""A person's kernel: real ones, that believe to be in JupyterLab, killed, run again and continued."""

import json
import time

import pytest
import small_notebooks
from hand_kernels import folders, kernel
from small_notebooks import write

from nblib.run import runs

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

SET_UP = "from nblib.run import runs, show\nrun = runs.begin('00_a', globals())"
# A training that leaves a checkpoint every two steps, and says where it is; `pace` makes it long enough to be killed.
TRAIN = """import os, time, torch
from nblib import models, runtime, text, train
runtime.seed_all(0)
model = models.tiny(64, hidden=16, layers=1, heads=2)
stream = torch.randint(0, 64, (4000,), generator=torch.Generator().manual_seed(1))
batches = text.Batches(stream, rows=2, length=16)
machine = runtime.Machine(torch.device("cpu"), "fp32", "a test")
options = dict(checkpoints=run.checkpoints / "main", checkpoint_every=2, log=run.log, log_every=1, machine=machine)
records = []
for record in train.steps(model, batches, train.adamw(model, lr=1e-2), total=steps, records=records, **options):
    time.sleep(float(os.environ.get("PACE", 0)))
"""
RESULT = "run.result(loss=records[-1]['loss'], losses=[r['loss'] for r in records])\nrun.headline('loss')"
TRAINING = (SET_UP, TRAIN, RESULT, "run.finish()")


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.move_workbook(tmp_path, monkeypatch)


def steps_logged(name: str) -> int:
    return sum(line.count("\n") for f in folders(name) for line in [(f / "metrics.jsonl").read_text()] if line)


def result(folder) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_killed_in_the_middle_of_a_training_run_all_gives_the_straight_run(workbook, monkeypatch):
    write("00_a", *TRAINING)
    with kernel() as straight:
        assert set(straight.run_all("00_a")) == {"ok"}
        (first,) = folders("00_a")
        assert runs.status(first) == "done" and runs.is_done(first) and runs.problem(first) is None
    write("00_a", *TRAINING, parameters=small_notebooks.PARAMETERS.replace("steps: int = 3", "steps: int = 12"))
    with kernel() as other:
        assert set(other.run_all("00_a")) == {"ok"}
        whole = folders("00_a")[-1]
        assert whole != first
    with kernel(PACE="0.2") as killed:

        def half() -> bool:
            new = [f for f in folders("00_a") if f not in (first, whole)]
            return bool(new) and (new[0] / "checkpoints/main/step-00000004").exists()

        time.sleep(1)
        assert killed.run_all("00_a", until=half)[-1] == ""
        (folder,) = set(folders("00_a")) - {first, whole}
        assert runs.status(folder) == "running"
        killed.kill()
    assert runs.status(folder) == "killed" and not (folder / "result.json").exists()
    with kernel() as fresh:
        assert set(fresh.run_all("00_a")) == {"ok"}
        assert [t for t in fresh.shown() if t.startswith("continues run")] != [], fresh.shown()
    assert folders("00_a")[-1] == folder and runs.status(folder) == "done" and runs.is_done(folder)
    assert result(folder) == result(whole)
    assert runs.record(folder)["attempts"] == 2
