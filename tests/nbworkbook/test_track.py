"""Metrics in TensorBoard and Trackio, read back by TensorBoard and Trackio themselves where they
are installed.
"""

import json
import math
import os
import subprocess
import sys
import time

import pytest
import small_notebooks

from nblib import files
from nbworkbook import runs, track


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Two trainings; one was continued from step 2, so its step 3 stands there twice."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = (
        small_notebooks.steady_workbook(tmp_path, monkeypatch)
        / "outputs"
        / "10_lrc"
        / "20260101-000000-abc123"
    )
    run = runs.Run(files.make_folder(folder), {})
    runs.note(folder, {"status": "done"})
    for step, loss in ((1, 4.0), (2, 3.0), (3, 9.0), (4, 9.5), (3, 2.0), (4, 1.0)):
        run.log(
            {
                "run": "../a b",
                "step": step,
                "of": 4,
                "loss": loss,
                "ce": float("inf"),
                "stopped": "Stop",
            }
        )
    run.log({"step": 7, "loss": 5})
    run.log({"run": "../a b", "epoch": 1})
    return run


def test_the_series_of_a_run(run):
    series = track.series(run.dir)
    assert {name: list(rows) for name, rows in series.items()} == {"../a b": [1, 2, 3, 4], "": [7]}
    assert [runs.scalars(record)["loss"] for record in series["../a b"].values()] == [
        4.0,
        3.0,
        2.0,
        1.0,
    ]
    with (run.dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 8, "lo')  # as a kill leaves it
    assert track.series(run.dir) == series


def test_one_mapping_of_a_record_to_numbers():
    record = {
        "step": 1,
        "of": 2,
        "loss": 1.5,
        "n": 3,
        "ok": True,
        "bad": "nan",
        "far": "-inf",
        "run": "a",
        "x": [1],
    }
    numbers = runs.scalars(json.loads(json.dumps(record)))
    assert math.isnan(numbers.pop("bad")) and numbers == {"loss": 1.5, "n": 3, "far": -math.inf}


def _tensorboard(folder):
    """Series by its folder: metric to (step, value) pairs, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = {}
    for place in (folder / "tensorboard").iterdir():
        events = EventAccumulator(str(place)).Reload()
        read[place.name] = {
            tag: [(e.step, e.value) for e in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
    return read


def test_tensorboard_reads_it_and_a_second_export_replaces_the_first(run):
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install -e '.[track]'"
    )
    before = small_notebooks.files(run.dir)
    for _ in range(2):
        assert track.export(run.dir, "tensorboard") == {"../a b": 4, "": 1}
        read = _tensorboard(run.dir)
        assert set(read) == {"series ..%2Fa b", "series "}
        assert read["series ..%2Fa b"]["loss"] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
        assert read["series ..%2Fa b"]["ce"] == [(step, math.inf) for step in (1, 2, 3, 4)]
        assert read["series "] == {"loss": [(7, 5.0)]}
    assert {
        k: v for k, v in small_notebooks.files(run.dir).items() if not k.startswith("tensorboard/")
    } == before


def _trackio(folder):
    """The same from Trackio's store: run to [step, loss] pairs."""
    code = """import json, trackio
runs = [run.name for run in trackio.Api().runs("10_lrc")]
print(json.dumps({name: trackio.SQLiteStorage.get_logs("10_lrc", name) for name in runs}))"""
    text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    logs = json.loads(text.splitlines()[-1])
    return {name: [[row["step"], row["loss"]] for row in rows] for name, rows in logs.items()}


EXPORT = "import sys; from pathlib import Path; from nbworkbook import track; "
EXPORT += "print(track.export(Path(sys.argv[1]), {}))"


@pytest.mark.slow
def test_trackio_reads_it_and_a_second_export_replaces_the_first(run):
    pytest.importorskip("trackio", reason="trackio is not installed: pip install -e '.[track]'")
    for _ in range(2):
        command = [sys.executable, "-c", EXPORT.format("'trackio'"), str(run.dir)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ended.stdout.splitlines() == ["{'../a b': 4, '': 1}"], (
            "it says where its dashboard is, each time"
        )
        assert _trackio(run.dir) == {
            f"{run.dir.name} ../a b": [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]],
            run.dir.name: [[7, 5]],
        }


@pytest.mark.slow
@pytest.mark.parametrize("to, read", [("tensorboard", _tensorboard), ("trackio", _trackio)])
def test_follow_goes_on_until_the_run_ends_and_a_resumed_step_replaces_the_earlier_one(
    run, to, read
):
    """The run is alive: this process holds its lock.

    It logs, is continued from step 5, and ends.
    """
    pytest.importorskip(to, reason=f"{to} is not installed: pip install -e '.[track]'")
    runs.note(run.dir, {"status": "running"})
    lock = files.claim(run.dir)
    code = EXPORT.format(f"'{to}', follow=True, every=0.1")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run.dir)], stdout=subprocess.PIPE, text=True
    )
    name = "series ..%2Fa b" if to == "tensorboard" else f"{run.dir.name} ../a b"

    def losses():
        try:
            series = read(run.dir)[name]
        except Exception:  # it is being written for the first time
            return []
        return [list(pair) for pair in (series["loss"] if isinstance(series, dict) else series)]

    def wait_for(expected):
        deadline = time.monotonic() + 60
        while losses() != expected and time.monotonic() < deadline:
            time.sleep(0.3)
        assert losses() == expected

    first = [[1, 4.0], [2, 3.0], [3, 2.0], [4, 1.0]]
    wait_for(first)
    for step in (5, 6, 7):
        run.log({"run": "../a b", "step": step, "of": 9, "loss": 0.5})
    with (run.dir / "metrics.jsonl").open("a") as lines:
        lines.write('{"run": "../a b", "st')  # half a line
    wait_for([*first, [5, 0.5], [6, 0.5], [7, 0.5]])
    assert process.poll() is None
    runs.drop_torn_line(run.dir / "metrics.jsonl")  # as a resume does
    for step in (6, 7, 8):
        run.log({"run": "../a b", "step": step, "of": 9, "loss": 0.25})
    end = [*first, [5, 0.5], [6, 0.25], [7, 0.25], [8, 0.25]]
    wait_for(end)
    runs.note(run.dir, {"status": "done"})
    os.close(lock)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "'../a b': 8" in out and losses() == end


def test_follow_a_run_that_has_ended_is_one_export(run, monkeypatch):
    written = []
    monkeypatch.setattr(track, "_tensorboard", lambda folder: lambda *each: written.append(each))
    assert track.export(run.dir, "tensorboard", follow=True) == {"../a b": 4, "": 1}
    assert [(name, since, again) for name, _, since, again in written] == [
        ("../a b", 1, False),
        ("", 7, False),
    ]
