"""Batches on a real Slurm of one node: requeued, cancelled, asked twice, and the same table as
here.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import slurm_node
import small_batches
from small_batches import elsewhere, nblib, running, start, table, until

from nblib import files
from nbworkbook import cli, cluster, input_hash, jobs, runner, runs
from nbworkbook.parameters import ParameterError


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_batches.open_workbook(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def slurm():
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'nblib[slurm]'")
    if reason := slurm_node.why_not():
        pytest.skip(reason)
    with slurm_node.running() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.kernel
def test_six_on_slurm_one_requeued_one_cancelled_and_the_table_is_that_of_here(
    slurm, workbook, tmp_path, monkeypatch, capsys
):
    ask = ["sweep", "10", "--on", "slurm", "--resources", "cpus=1,gb=1,hours=0.5,at_once=2"]
    process = start(*ask)
    (requeued, first), (cancelled, second) = until(
        lambda: pair if len(pair := running()[:2]) == 2 else None
    )
    subprocess.run(["scontrol", "requeue", requeued], check=True)
    assert cli.main(["sweep", "--cancel", cancelled]) == 0
    assert capsys.readouterr().out == "jobs that were asked to stop: 1\n"
    until(lambda: runs.status(first) == runs.status(second) == "stopped")
    until(lambda: cluster.slurm_states().get(requeued) in ("pending", "running"))
    slurm_node.again(requeued)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 130, (out, err)
    assert (
        "6 jobs given to slurm, 0 there already, 0 done before" in out
        and err.count("was stopped") == 1
    )
    rows = table(workbook)[1:]
    assert sorted(row[2] for row in rows) == ["done"] * 5 + ["stopped"]

    facts = runs.record(first)
    begun = list(map(int, (first / "starts.txt").read_text().split()))
    steps = [
        record["step"]
        for record in map(json.loads, (first / "metrics.jsonl").read_text().splitlines())
    ]
    assert facts["attempts"] == 2 and begun[0] == 0 and begun[1] >= 2, "it was killed and not asked"
    assert steps == list(range(1, 21)), "a step was lost or made twice"

    code, out, err = nblib(*ask)  # the one that was cancelled goes on
    assert code == 0 and "1 jobs given to slurm, 0 there already, 5 done before" in out, (out, err)
    assert (
        runs.record(second)["attempts"] == 2
        and len(list((workbook / "outputs/10_small").glob("*/run.json"))) == 6
    )
    assert table(workbook) == elsewhere(workbook, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.kernel
def test_a_job_whose_time_ends_asks_to_come_back_and_whoever_asks_again_waits_for_it(
    slurm, workbook
):
    """Before the end of its time, and to make room, Slurm sends SIGTERM to a job that goes on
    running.
    """
    ask = ["run", "10", "--on", "slurm", "--resources", "gb=1", "-p", "size=4"]
    code, out, err = nblib(*ask, "--no-wait")
    assert code == 0 and "1 jobs given to slurm" in out, (out, err)
    ((name, place),) = until(running)
    subprocess.run(["scancel", "--signal=TERM", name], check=True)
    until(lambda: runs.status(place) == "stopped")
    until(lambda: cluster.slurm_states().get(name) == "pending")
    code, out, err = nblib(*ask, "--no-wait")
    assert (
        "0 jobs given to slurm, 1 there already, 0 done before" in out
        and cluster.listing().splitlines()[1].split()[:3] == [name, "slurm", "pending"]
    )
    slurm_node.again(name)
    code, out, err = nblib(*ask)
    assert code == 0 and runs.status(place) == "done" and runs.record(place)["attempts"] == 2, (
        out,
        err,
    )
    assert len((place / "starts.txt").read_text().split()) == 2
    assert nblib("cancel", name)[0] == 2, "it ended, so there is nothing to cancel"


@pytest.mark.slow
@pytest.mark.kernel
def test_what_slurm_refuses_is_told_in_a_sentence(slurm, workbook):
    code, _, err = nblib("sweep", "10", "--on", "slurm", "--resources", "partition=nowhere")
    assert (
        code == 2 and err.startswith("nblib: Slurm does not take the jobs: ") and "partition" in err
    ), err
    assert list((workbook / "outputs").glob("10_small/*/run.json")) == []


# ------------------------------------------------------------------ what needs no cluster


@pytest.mark.parametrize("refused, answered", [(0, True), (4, True), (5, False)])
def test_a_controller_that_is_busy_is_asked_again(refused, answered, monkeypatch):
    told = [subprocess.CompletedProcess([], 1, "", "try again")] * refused
    told += [subprocess.CompletedProcess([], 0, "JobState=RUNNING", "")]
    monkeypatch.setattr(cluster.subprocess, "run", lambda *_, **__: told.pop(0))
    monkeypatch.setattr(cluster.time, "sleep", lambda _: None)
    if answered:
        assert cluster._ask("scontrol", "show", "job", "1") == "JobState=RUNNING" and told == []
    else:
        with pytest.raises(files.Unreadable, match="try again"):
            cluster._ask("scontrol", "show", "job", "1")


@pytest.mark.parametrize(
    "text, said",
    [
        ("cpu=4", "--resources: unknown resource 'cpu'; did you mean 'cpus'?"),
        ("cpus", "--resources: cpus is '', allowed: a whole number from 1"),
        ("cpus=many", "--resources: cpus is 'many', allowed: a whole number from 1"),
        ("cpus=0", "--resources: cpus is '0', allowed: a whole number from 1"),
        ("cpus=1.5", "--resources: cpus is '1.5', allowed: a whole number from 1"),
        ("gpus=-1", "--resources: gpus is '-1', allowed: a whole number from 0"),
        ("hours=nan", "--resources: hours is 'nan', allowed: a number above 0"),
        ("hours=0.0", "--resources: hours is '0.0', allowed: a number above 0"),
        ("cpus=1,partition=", "--resources: partition is '', allowed: a name"),
    ],
)
def test_wrong_resources_end_in_a_sentence(text, said):
    with pytest.raises(ParameterError) as raised:
        cluster.resources(text)
    assert str(raised.value).removesuffix(".") == said


def test_resources_are_read():
    assert cluster.resources("cpus=4, gpus=0,hours=.5,partition=lab") == dict(
        cpus=4, gpus=0, hours=0.5, partition="lab"
    )
    assert cluster.resources("") == {}


@pytest.mark.parametrize("engine, package", [("slurm", "submitit"), ("ray", "ray")])
def test_a_missing_package_is_named_with_its_extra(engine, package, workbook, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["sweep", "10", "--on", engine]) == 2
    assert (
        capsys.readouterr().err
        == f"nblib: {package} is not installed; pip install 'nblib[{engine}]'\n"
    )
    assert not (workbook / "outputs" / "batches").exists()


@pytest.mark.parametrize("option", [["--resources", "cpus=1"], ["--no-wait"]])
def test_what_only_a_job_can_do_is_refused_here(option, workbook, capsys):
    assert cli.main(["sweep", "10", *option]) == 2
    assert (
        capsys.readouterr().err
        == "nblib: --resources and --no-wait are of jobs; add --on slurm or --on ray.\n"
    )
    assert not (workbook / "outputs" / "batches").exists()


def test_without_slurm_here_a_sentence_says_so(monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(cluster.shutil, "which", lambda name: None)
    with pytest.raises(ParameterError, match=r"no Slurm on this machine \(no sbatch\)"):
        cluster.Slurm({})


def test_a_file_system_without_locks_that_others_see_is_refused(tmp_path, monkeypatch):
    cluster.check(tmp_path)  # this one has them
    assert list(tmp_path.iterdir()) == []
    free = os.open(tmp_path, os.O_RDONLY)
    with monkeypatch.context() as m:
        # says that it is locked, and nothing is
        m.setattr(files, "claim", lambda path: os.dup(free))
        with pytest.raises(ParameterError, match="another process does not see a lock"):
            cluster.check(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(
            files, "claim", lambda path: (_ for _ in ()).throw(OSError(37, "No locks available"))
        )
        with pytest.raises(ParameterError, match="No locks available; NBLIB_OUTPUTS names another"):
            cluster.check(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(cluster, "_mount_options", lambda folder: {"rw", "nolock", "vers=3"})
        with pytest.raises(
            ParameterError, match="mounted with 'nolock', and no other machine sees its locks"
        ):
            cluster.check(tmp_path)
    with monkeypatch.context() as m:
        m.setattr(files.os, "replace", lambda old, new: shutil.copy(old, f"{new}.other"))
        with pytest.raises(ParameterError, match="cannot hold runs of several machines"):
            cluster.check(tmp_path)


def test_the_options_of_a_mount_are_those_of_the_innermost_one(tmp_path, monkeypatch):
    table = "1 0 8:1 / / rw,relatime - ext4 /dev/a rw,data=x\n2 1 0:5 / {}\\040b rw - nfs4 s:/x rw,local_lock=none\n"
    table += "3 1 0:6 / {}\\040b/c rw,nosuid - lustre s:/y rw,localflock\n"
    listing = tmp_path / "mountinfo"
    listing.write_text(table.replace("{}", str(tmp_path / "a")))
    path = cluster.Path
    monkeypatch.setattr(
        cluster, "Path", lambda name: listing if name == "/proc/self/mountinfo" else path(name)
    )
    for place, option in (
        (tmp_path / "other", "data=x"),
        (tmp_path / "a b" / "d", "local_lock=none"),
    ):
        options = cluster._mount_options(place)
        assert option in options and not options & cluster.OWN_LOCKS
    assert cluster._mount_options(tmp_path / "a b" / "c" / "d") & cluster.OWN_LOCKS == {
        "localflock"
    }


def order_of(job: jobs.Job, **other) -> dict:
    order = {
        "command": job.resume,
        "key": job.key,
        "inputs": job.inputs,
        "environment": {},
        "resources": {},
        "how": {},
    }
    return json.loads(json.dumps(order | {"cwd": os.getcwd()} | other))  # as an engine carries it


def test_a_job_plans_the_run_that_was_asked_for(workbook, monkeypatch):
    (workbook / "parameters" / "10_small.full.yaml").write_text("steps: 50\n")
    (workbook / "more.yaml").write_text("pause: 0.5\n")
    given = {"profile": "full", "files": ["more.yaml"], "overrides": ["size=3", "lr=0.5"]}
    (job,) = jobs.plan(["10"], **given)
    seen = []

    def run(planned, **how):
        seen.append(
            (planned[0], how, os.environ.get("OMP_NUM_THREADS"), os.environ.get("NBLIB_OUTPUTS"))
        )
        return [runner.Outcome("10_small", "done", 1.0, None)]

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = {"NBLIB_OUTPUTS": str(workbook / "elsewhere"), "OMP_NUM_THREADS": "1"}
    assert cluster.work(order_of(job, environment=place, how={"force": True})) == "done"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("NBLIB_OUTPUTS", str(workbook / "outputs"))
    (job,) = jobs.plan(["10"], **given)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # as a cluster may: nobody asked for it
    cluster.work(order_of(job, resources={"cpus": 4}))
    (first, how, threads, outputs), (second, _, share, _) = seen
    assert (
        second.key == job.key
        and first.key != job.key
        and first.parameters == second.parameters == job.parameters
    )
    assert (how, threads, outputs, share) == (
        {"force": True},
        "1",
        str(workbook / "elsewhere"),
        "4",
    )
    assert first.parameters == {"lr": 0.5, "size": 3, "steps": 50, "pause": 0.5}


def test_a_machine_with_other_versions_refuses_and_says_what_differs(workbook, monkeypatch):
    (job,) = jobs.plan(["10"])
    monkeypatch.setattr(input_hash, "versions", lambda *_: {"python": "0.1"})
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(
        RuntimeError, match=r"10_small: .* would make another run than was asked for: .*0\.1"
    ):
        cluster.work(order_of(job, environment={"OMP_NUM_THREADS": "1"}))


def test_a_run_that_is_not_done_is_a_job_that_failed(workbook, monkeypatch):
    (job,) = jobs.plan(["10"])
    monkeypatch.setattr(
        runner,
        "run",
        lambda *_, **__: [runner.Outcome("10_small", "failed", 1.0, None, "it failed: x")],
    )
    with pytest.raises(RuntimeError, match="it failed: x"):
        cluster.work(order_of(job, environment={"OMP_NUM_THREADS": "1"}))


@pytest.mark.parametrize(
    "state, restarts, comes", [("RUNNING", 0, 1), ("CANCELLED", 0, 0), ("RUNNING", 50, 0)]
)
def test_only_a_job_that_nobody_cancelled_comes_back_and_not_for_ever(
    state, restarts, comes, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        cluster,
        "_ask",
        lambda *command: asked.append(command) or f"JobId=8 JobState={state} Reason=None",
    )
    for name, value in {
        "JOB_ID": 8,
        "ARRAY_JOB_ID": 3,
        "ARRAY_TASK_ID": 5,
        "RESTART_COUNT": restarts,
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    cluster._come_back()
    assert asked[1:] == [("scontrol", "requeue", "3_5")] * comes and asked[0] == (
        "scontrol",
        "show",
        "job",
        "3_5",
    )


def test_what_was_given_is_listed_and_cancelled_by_name(workbook, monkeypatch):
    assert cluster.listing() == "No jobs were given to an engine in the last day."

    class Queue:
        def submit(self, orders, folder):
            return [f"7_{n}" for n in range(len(orders))]

    planned = jobs.variants("10_small", [["size=1"], ["size=2"]])
    wanted, how = {"cpus": 2}, {"force": False, "timeout": None, "detail": "some"}
    assert cluster.submit(Queue(), "slurm", planned, wanted=wanted, how=how) == ["7_0", "7_1"]
    asked = []
    monkeypatch.setattr(cluster.shutil, "which", lambda name: name)
    monkeypatch.setattr(cluster, "slurm_states", lambda: {"7_1": "pending", "9_0": "running"})
    monkeypatch.setattr(cluster, "slurm_cancel", asked.append)
    assert [line.split() for line in cluster.listing().splitlines()[1:]] == [
        ["7_0", "slurm", "ended", "10_small"],
        ["7_1", "slurm", "pending", "10_small"],
    ]
    place = runs.new_folder("10_small")
    runs.note(place, {"key": planned[0].key, "status": "done"})
    assert f"7_0  slurm  ended    10_small/{place.name}  done" in cluster.listing()
    with pytest.raises(ParameterError, match="Unknown job '7_0'; did you mean '7_1'?"):
        cluster.cancel(["7_0"])
    for name in ("7_1", "7", "10_small", "all"):
        assert cluster.cancel([name]).endswith(": 1") and asked.pop() == ["7_1"]
    (file,) = (workbook / "outputs" / "batches").glob("*/batch.json")
    file.write_text('{"jobs": 3}')
    assert "No jobs" in cluster.listing(), "a damaged record is passed over"


def test_a_job_that_left_nothing_says_where_to_look(workbook):
    (job,) = jobs.plan(["10"])
    outcome = cluster.ending(job)
    assert outcome.status == "not run" and "outputs/batches" in outcome.sentence
    place = runs.new_folder("10_small")
    runs.note(place, {"key": job.key, "inputs": job.inputs, "status": "running"})
    outcome = cluster.ending(job)
    assert (
        outcome.status == "failed"
        and f"was killed in outputs/10_small/{place.name}; nblib run 10_small" in outcome.sentence
    )
