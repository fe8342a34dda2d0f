"""A sweep of six tiny runs that save what they have, for the tests of engines."""

import csv
import time
from pathlib import Path

import small_notebooks
from small_notebooks import start, write

from nblib import paths
from nbworkbook import cluster, runs

PARAMETERS = """lr: float = 0.1  # rate [0 .. 1]
size: int = 1  # size [1 .. 9]
steps: int = 20  # steps [1 .. 1000]
pause: float = 0.4  # seconds of a step [0 .. 9]"""
# Counts its steps in a file, as a training does in its checkpoints. Asked to stop, it has half a
# second's work to save.
BODY = """import json, os, time
from nbworkbook import runs
run = runs.begin('10_small', globals())
state = run.dir / 'state.json'
done = json.loads(state.read_text()) if state.exists() else 0
(run.dir / 'starts.txt').open('a').write(f'{done}\\n')
try:
    for step in range(done + 1, steps + 1):
        run.log({'step': step, 'of': steps, 'loss': (lr - 0.2) ** 2 + size / step})
        done = step
        time.sleep(pause)
    run.result(loss=(lr - 0.2) ** 2 + size / steps, threads=os.environ.get('OMP_NUM_THREADS', ''))
finally:
    time.sleep(0.5)
    state.write_text(json.dumps(done))"""
GRID = "size: [1, 2, 3]\nlr: [0.1, 0.3]\n"


def open_workbook(tmp_path: Path, monkeypatch) -> Path:
    folder = small_notebooks.move_workbook(tmp_path, monkeypatch)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write("10_small", BODY, parameters=PARAMETERS)
    (folder / "parameters" / "10_small.sweep.yaml").write_text(GRID)
    return folder


def until(condition, seconds: float = 240):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
    return value


def table(workbook: Path) -> list[list[str]]:
    """The newest table without its times and names of runs, which differ from place to place."""
    newest = max(
        (workbook / "outputs" / "10_small").glob("sweep-*.csv"),
        key=lambda path: path.stat().st_mtime_ns,
    )
    head, *rows = csv.reader(newest.open())
    keep = [n for n, name in enumerate(head) if name not in ("seconds", "run")]
    return [[row[n] for n in keep] for row in (head, *rows)]


def nblib(*arguments: str) -> tuple[int, str, str]:
    """On two cores that others use as well, six jobs may take minutes."""
    process = start(*arguments)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def running() -> list[tuple[str, Path]]:
    """Job and run folder of those that have made two steps."""
    rows = [line.split() for line in cluster.listing().splitlines()[1:]]
    pairs = [
        (row[0], paths.outputs() / row[3]) for row in rows if row[2] == "running" and "/" in row[3]
    ]
    return [(name, place) for name, place in pairs if len(runs.Run(place, {}).history()) >= 2]


def elsewhere(workbook: Path, tmp_path: Path, monkeypatch) -> list[list[str]]:
    """The table of the same sweep without an engine."""
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path / "here" / "outputs"))
    monkeypatch.setenv("NBLIB_BASE", str(paths.store()))
    code, _, err = nblib("sweep", "10", "-p", "pause=0")  # which no result hangs on
    assert code == 0, err
    return table(tmp_path / "here")
