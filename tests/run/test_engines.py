"""Batches on a real Slurm of one node and on Ray: requeued, cancelled, asked twice, and the same table as here."""

import csv
import json
import subprocess
import time
from pathlib import Path

import pytest
import slurm_node
import small_notebooks
from small_notebooks import nblib, start, write

from nblib import paths
from nblib.run import engines, jobs, runner, runs

PARAMETERS = """lr: float = 0.1  # rate [0 .. 1]
size: int = 1  # size [1 .. 9]
steps: int = 12  # steps [1 .. 1000]
pause: float = 0.25  # seconds of a step [0 .. 9]"""
# Counts its steps in a file, as a training does in its checkpoints. Asked to stop, it has half a second's work to save.
BODY = """import json, os, time
from nblib.run import runs
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


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.move_workbook(tmp_path, monkeypatch)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write("10_small", BODY, parameters=PARAMETERS)
    (folder / "parameters" / "10_small.sweep.yaml").write_text(GRID)
    return folder


@pytest.fixture(scope="module")
def slurm():
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'nblib[slurm]'")
    if reason := slurm_node.why_not():
        pytest.skip(reason)
    with slurm_node.running() as folder:
        yield folder


def until(condition, seconds: float = 90):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)
    return value


def table(workbook: Path) -> list[list[str]]:
    """The newest table without its times and names of runs, which differ from place to place."""
    newest = max((workbook / "outputs" / "10_small").glob("sweep-*.csv"), key=lambda path: path.stat().st_mtime_ns)
    head, *rows = csv.reader(newest.open())
    keep = [n for n, name in enumerate(head) if name not in ("seconds", "run")]
    return [[row[n] for n in keep] for row in (head, *rows)]


def starts(size: int, lr: float) -> list[int]:
    """At which step each attempt of this run began."""
    (job,) = jobs.variants("10_small", [[f"size={size}", f"lr={lr}"]])
    return list(map(int, (runner.newest(job) / "starts.txt").read_text().split()))


def running(status: str = "running") -> list[tuple[str, Path]]:
    """Job and run folder of those that have made two steps."""
    rows = [line.split() for line in engines.listing().splitlines()[1:]]
    pairs = [(row[0], paths.outputs() / row[3]) for row in rows if row[2:3] == ["running"] and "/" in row[3]]
    return [(name, place) for name, place in pairs if len(runs.Run(place, {}).history()) >= 2]


def elsewhere(workbook: Path, tmp_path: Path, monkeypatch) -> list[list[str]]:
    """The table of the same sweep without an engine."""
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path / "here" / "outputs"))
    monkeypatch.setenv("NBLIB_BASE", str(paths.store()))
    code, _, err = nblib("sweep", "10")
    assert code == 0, err
    return table(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.kernel
def test_six_on_slurm_one_requeued_one_cancelled_and_the_table_is_that_of_here(slurm, workbook, tmp_path, monkeypatch):
    ask = ["sweep", "10", "--on", "slurm", "--resources", "cpus=1,gb=1,hours=0.5,at_once=2"]
    process = start(*ask)
    (requeued, first), (cancelled, second) = until(lambda: pair if len(pair := running()[:2]) == 2 else None)
    subprocess.run(["scontrol", "requeue", requeued], check=True)
    code, out, err = nblib("cancel", cancelled)
    assert (code, out) == (0, "jobs that were asked to stop: 1\n"), err
    until(lambda: runs.status(first) == runs.status(second) == "stopped")
    until(lambda: subprocess.run(["scontrol", "update", f"jobid={requeued}", "starttime=now"]).returncode == 0)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, (out, err)
    assert "6 jobs given to slurm, 0 there already, 0 done before" in out and err.count("was stopped") == 1
    rows = table(workbook)[1:]
    assert sorted(row[2] for row in rows) == ["done"] * 5 + ["stopped"]

    facts = runs.record(first)
    begun = list(map(int, (first / "starts.txt").read_text().split()))
    steps = [record["step"] for record in map(json.loads, (first / "metrics.jsonl").read_text().splitlines())]
    assert facts["attempts"] == 2 and begun[0] == 0 and begun[1] >= 2, "it was killed and not asked"
    assert steps == list(range(1, 13)), "a step was lost or made twice"

    code, out, err = nblib(*ask)  # the one that was cancelled goes on
    assert code == 0 and "1 jobs given to slurm, 0 there already, 5 done before" in out, (out, err)
    assert runs.record(second)["attempts"] == 2 and len(list((workbook / "outputs/10_small").glob("*/run.json"))) == 6
    assert table(workbook) == elsewhere(workbook, tmp_path, monkeypatch)
