"""The sweep of test_cluster.py on a cluster of Ray on this machine: killed, cancelled, the same
table.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import small_batches
from small_batches import elsewhere, nblib, running, start, table, until

from nbworkbook import cli, cluster, on_ray, runs
from nbworkbook.parameters import ParameterError


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_batches.open_workbook(tmp_path, monkeypatch)


@pytest.fixture
def ray(monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'nblib[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def worker_of(place: Path) -> int:
    """The worker of Ray that makes the run in this folder."""
    return runs.record(place)["runner"]


@pytest.mark.slow
@pytest.mark.kernel
def test_six_on_ray_one_killed_one_cancelled_and_the_table_is_that_of_here(
    ray, workbook, tmp_path, monkeypatch, capsys
):
    ask = ["sweep", "10", "--on", "ray"]
    process = start(*ask)
    (killed, first), (cancelled, second) = until(
        lambda: pair if len(pair := running()[:2]) == 2 else None
    )
    assert cli.main(["sweep", "--cancel", cancelled]) == 0
    assert capsys.readouterr().out == "jobs that were asked to stop: 1\n"
    os.kill(worker_of(first), signal.SIGKILL)
    until(lambda: runs.status(second) == "stopped")
    states = {line.split()[0]: line.split()[2] for line in cluster.listing().splitlines()[1:]}
    assert len(states) == 6 and states[killed] == "running", states
    out, err = process.communicate(timeout=900)
    assert process.returncode == 130, (out, err)
    assert (
        "6 jobs given to ray, 0 there already, 0 done before" in out
        and err.count("was stopped") == 1
    ), err
    assert sorted(row[2] for row in table(workbook)[1:]) == ["done"] * 5 + ["stopped"]
    assert cluster.listing().count(" ended ") == 6 and nblib("sweep", "--cancel", cancelled)[0] == 2

    facts = runs.record(first)
    steps = [
        record["step"]
        for record in map(json.loads, (first / "metrics.jsonl").read_text().splitlines())
    ]
    assert facts["attempts"] == 2 and steps[-1] == 20 and set(steps) == set(range(1, 21))

    code, out, err = nblib(*ask)  # the one that was cancelled goes on
    assert code == 0 and "1 jobs given to ray, 0 there already, 5 done before" in out, (out, err)
    assert (
        runs.record(second)["attempts"] == 2
        and len(list((workbook / "outputs/10_small").glob("*/run.json"))) == 6
    )
    assert table(workbook) == elsewhere(workbook, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.kernel
def test_ctrl_c_asks_the_jobs_on_ray_to_stop_and_none_is_left(ray, workbook):
    process = start("sweep", "10", "--on", "ray", "--resources", "at_once=1")
    ((_, place),) = until(running)
    states = [line.split()[2] for line in cluster.listing().splitlines()[1:]]
    assert sorted(states) == ["pending"] * 5 + ["running"]
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and runs.status(place) == "stopped", (out, err)
    assert [path.parent for path in (workbook / "outputs" / "10_small").glob("*/run.json")] == [
        place
    ]
    assert (place / "state.json").exists(), "it was killed and not asked"


def test_what_ray_cannot_give_is_told_in_a_sentence(ray, workbook, monkeypatch, capsys):
    for given, said in {
        (
            "--resources",
            "hours=2",
        ): "--resources: hours is of Slurm; Ray knows at_once, cpus, gb, gpus.",
        ("--no-wait",): "--no-wait: jobs on ray end with the command that gives them.",
    }.items():
        assert cli.main(["sweep", "10", "--on", "ray", *given]) == 2
        assert capsys.readouterr().err == f"nblib: {said}\n"
    engine = on_ray.Ray({"gpus": 900})
    monkeypatch.setattr(engine.ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ParameterError, match="gpus is 900, and this machine has 0"):
        engine._must_fit()
    assert not (workbook / "outputs" / "batches").exists()
