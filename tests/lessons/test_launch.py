"""`nblib train`: real processes, each with its kernel, that train as one, end together and go on."""

import json
import os
import re
import signal
import subprocess
import time

import kill_worlds
import pytest
import small_notebooks
from kill_worlds import ENDS, OPENS, PARAMETERS, TRAINS, Command, kernels, losses, run_folder
from small_notebooks import nblib, start, write

from lessons import launch
from nblib.run import runner
from nblib.run.parameters import ParameterError


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return kill_worlds.open_workbook(tmp_path, monkeypatch)


def _until(out, text: str) -> str:
    return next(line for line in out if text in line)


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
    victim = next(pid for pid in kernels(run_folder(workbook) / "rank-1"))
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    sentence = _until(two.stderr, "failed")
    took = time.monotonic() - began
    print(f"a killed rank: all ended after {took:.1f} s")
    assert took < 10 and kernels(run_folder(workbook)) == kernels(run_folder(workbook) / "rank-1") == []
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
    assert took < 10 and kernels(run_folder(workbook)) == kernels(run_folder(workbook) / "rank-1") == []
    assert _end(again)[0] == 130

    one = start("train", "00", "-p", "steps=12", "-p", "pause=0.3")
    _until(one.stdout, "resumed at step")
    assert one.communicate(timeout=100)[1] == "" and one.returncode == 0
    together = losses(workbook)
    page = json.loads((run_folder(workbook) / "notebook.ipynb").read_text())
    assert "step 12" in json.dumps(page) and not (run_folder(workbook) / "rank-1" / "result.json").exists()

    (tmp_path / "other").mkdir()
    other = small_notebooks.move_workbook(tmp_path / "other", monkeypatch)
    write("00_world", OPENS, TRAINS, ENDS, parameters=PARAMETERS)
    code, _, err = nblib("run", "00", "-p", "steps=12")
    assert code == 0, err
    apart = max(abs(a - b) for a, b in zip(together, losses(other), strict=True))
    print(f"two, two, one process against one: largest difference {apart:.1e}")
    assert apart < 2e-5


@pytest.mark.slow
@pytest.mark.kernel
@pytest.mark.parametrize("whom", ["launcher", "all"])
def test_asked_to_end_all_do_within_ten_seconds_and_the_same_command_goes_on(workbook, whom):
    """A scheduler sends SIGTERM to the launcher, or to every process of the job."""
    training = ["train", "00", "-p", "steps=12", "-p", "pause=0.3", "--processes", "2"]
    two = Command(*training)
    assert two.until("step 3 pid")
    folder = run_folder(workbook)
    pids = [two.process.pid] if whom == "launcher" else [two.process.pid, *kill_worlds.members("WORLD_SIZE", "2")]
    began = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    code = two.end()
    while kernels(folder) or kernels(folder / "rank-1"):
        assert time.monotonic() - began < 10, "a process is left"
        time.sleep(0.05)
    took = time.monotonic() - began
    print(f"SIGTERM to {whom}: exit code {code}, all gone after {took:.1f} s, the launcher too: {two.errors}")
    asked, sentence = two.errors
    assert took < 10 and code == 130 and asked.startswith("nblib: stopping;")
    assert "was stopped" in sentence and "nblib train 00_world" in sentence and "--processes 2" in sentence

    again = Command(*training)
    assert again.end() == 0, again.errors
    (resumed,) = [int(re.search(r"at step (\d+)", line)[1]) for line in again.lines if "resumed at step" in line]
    assert resumed >= (3 if whom == "launcher" else 2)  # asked twice, a rank ends at once
    assert len(losses(workbook)) == 12


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
