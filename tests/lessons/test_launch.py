"""`nblib train`: real processes, each with its kernel, that train as one, end together and go on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import nblib, start, write

from lessons import launch
from nblib.run import runner
from nblib.run.parameters import ParameterError

PARAMETERS = """steps: int = 8  # optimizer steps [1 .. 1000]
rows: int = 4  # rows of a batch, of all processes together [1 .. 64]
pause: float = 0.0  # seconds after each step [0 .. 10]"""
OPENS = """import os, time, torch
from nblib import models, runtime, text, train
from nblib.run import runs
run = runs.begin("00_world", globals())
machine = runtime.pick("cpu", "fp32")
runtime.seed_all(0)
model = models.tiny(256, hidden=32, layers=2, heads=2)
stream = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % 256
print("world", runtime.world())"""
TRAINS = """def tell(record):
    print("step", record["step"], "pid", os.getpid(), flush=True)
    time.sleep(pause)
records = train.fit(model, text.Batches(stream, rows=rows, length=32), train.adamw(model, lr=1e-2), total=steps,
    accumulate=2, machine=machine, checkpoints=run.dir / "checkpoints", checkpoint_every=2, on_step=tell)"""
ENDS = """run.result(losses=[r["loss"] for r in records], loss=records[-1]["loss"])
print("loss", train.evaluate(model, stream[:64].view(2, 32), machine=machine)["loss"])
run.finish()"""


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    small_notebooks.move_workbook(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    write("00_world", OPENS, TRAINS, ENDS, parameters=PARAMETERS)
    return tmp_path


def _folder(workbook: Path) -> Path:
    (folder,) = (workbook / "outputs" / "00_world").glob("2*/")
    return folder


def _losses(workbook: Path) -> list[float]:
    return json.loads((_folder(workbook) / "result.json").read_text())["losses"]


def _until(out, text: str) -> str:
    return next(line for line in out if text in line)


def _kernels(folder: Path) -> list[int]:
    """The processes that were told to work in this folder or in one inside of it."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"NBLIB_RUN_DIR={folder}".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def _end(process: subprocess.Popen) -> tuple[int, str]:
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.kernel
def test_killed_interrupted_and_gone_on_with_fewer_it_is_the_run_of_one_process(workbook, tmp_path, monkeypatch):
    slow = ["train", "00", "-p", "steps=12", "-p", "mesh=fsdp"]
    two = start(*slow, "-p", "pause=0.3", "--processes", "2")
    _until(two.stdout, "world 2")
    _until(two.stdout, "step 3 ")
    victim = next(pid for pid in _kernels(_folder(workbook) / "rank-1"))
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    sentence = _until(two.stderr, "failed")
    took = time.monotonic() - began
    print(f"a killed rank: all ended after {took:.1f} s")
    assert took < 10 and _kernels(_folder(workbook)) == _kernels(_folder(workbook) / "rank-1") == []
    how = r"00_world failed on rank 1 of 2: the kernel died in cell \d .*killed by SIGKILL"
    assert re.search(how, sentence), sentence
    assert "nblib train 00_world" in sentence and "--processes 2" in sentence and "mesh=fsdp" in sentence
    assert _end(two)[0] == 1

    again = start(*slow, "-p", "pause=0.3", "--processes", "2")
    _until(again.stdout, "resumed at step")
    _until(again.stdout, "step 6 ")
    began = time.monotonic()
    again.send_signal(signal.SIGINT)
    sentence = _until(again.stderr, "was stopped")
    took = time.monotonic() - began
    print(f"Ctrl-C: all ended after {took:.1f} s")
    assert took < 10 and _kernels(_folder(workbook)) == _kernels(_folder(workbook) / "rank-1") == []
    assert _end(again)[0] == 130

    one = start("train", "00", "-p", "steps=12", "-p", "pause=0.3")
    _until(one.stdout, "resumed at step")
    assert one.communicate(timeout=100)[1] == "" and one.returncode == 0
    together = _losses(workbook)
    page = json.loads((_folder(workbook) / "notebook.ipynb").read_text())
    assert "step 12" in json.dumps(page) and not (_folder(workbook) / "rank-1" / "result.json").exists()

    (tmp_path / "other").mkdir()
    other = small_notebooks.move_workbook(tmp_path / "other", monkeypatch)
    write("00_world", OPENS, TRAINS, ENDS, parameters=PARAMETERS)
    code, _, err = nblib("run", "00", "-p", "steps=12")
    assert code == 0, err
    apart = max(abs(a - b) for a, b in zip(together, _losses(other), strict=True))
    print(f"two, two, one process against one: largest difference {apart:.1e}")
    assert apart < 2e-5


@pytest.mark.slow
@pytest.mark.kernel
def test_who_raises_alone_is_named(workbook):
    write("00_world", OPENS, "if runtime.rank() == 1: raise ZeroDivisionError('mine')", TRAINS, parameters=PARAMETERS)
    code, _, err = nblib("train", "00", "--processes", "2")
    assert code == 1 and "00_world failed on rank 1 of 2: cell 3 (`if runtime.rank()" in err, err
    assert "raised ZeroDivisionError: mine" in err


def test_what_does_not_fit_is_one_sentence_and_starts_nothing(workbook, monkeypatch, capsys):
    for name in ("LOCAL_WORLD_SIZE", "NBLIB_MESH"):
        monkeypatch.delenv(name, raising=False)
    from nblib import cli

    for given, sentence in {
        "--processes 5": "rows = 4: fewer than the 5 processes that share them",
        "--processes 3 -p mesh=hsdp": "mesh = 'hsdp': 3 processes do not divide into 2 equal groups of two or more",
        "-p mesh=fsdp": "mesh = 'fsdp': this is one process; `nblib train NOTEBOOK --processes 2` starts several",
        "--processes 2 -p mesh=tp": "mesh = 'tp': allowed are auto, ddp, fsdp, hsdp",
        "--processes 0": "argument --processes: '0' is not a whole number from 1 to 999,999,999",
        "--processes 2 -p row=3": "unknown parameter 'row'; did you mean 'rows'?",
    }.items():
        try:
            code = cli.main(["train", "00", *given.split()])
        except SystemExit as error:
            code = error.code
        err = capsys.readouterr().err
        assert code == 2 and sentence in err and len(err.splitlines()) == 1, (given, err)
    monkeypatch.setattr(runner, "gpus", lambda: [("0", "card")])
    with pytest.raises(ParameterError, match="processes = 2: one drives one card, and 1 are here"):
        launch.plan("00", 2, overrides=[])
    assert not (workbook / "outputs").exists() or not list((workbook / "outputs").rglob("run.json"))
