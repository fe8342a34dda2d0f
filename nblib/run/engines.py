"""Batches on other machines: Slurm, by submitit, an extra: `pip install 'nblib[slurm]'`. Ray is in lessons/on_ray.py.

One job is one run: it plans its run once more where it starts, and does what `nblib run` does. What it needs is one
file system that all machines see, with the project, its Python and `outputs` on it. The machine that plans is in no key
(jobs.py), so whoever asks again finds what is done, and waits for what is still in a queue.

A job that Slurm requeues is the same order again, which continues its own folder. Slurm asks a job to stop by SIGTERM
to each of its processes, 90 s before its time is over: the run saves and ends, and the job asks to be queued again. A
job that a person cancelled does not.

outputs/batches/<time>-<id>/ holds what was submitted (batch.json) and what the jobs print.

Footgun: a lock that no other machine sees lets two of them write into one folder. `check` refuses what it can know:
locks that another process does not see, and mounts whose options keep them to one machine.
"""

import contextlib
import functools
import importlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nblib import files, inputs, paths
from nblib.run import jobs, runner, runs
from nblib.run.jobs import Job
from nblib.run.parameters import ParameterError, clip, unknown
from nblib.run.runner import Outcome

COUNT, NAME = (r"[1-9]\d{0,5}", int, "a whole number from 1"), (r"\S+", str, "a name")
AMOUNT = (r"(?=.*[1-9])\d{0,6}\.?\d{0,6}", float, "a number above 0")
RESOURCES = {"cpus": COUNT, "gpus": (r"\d{1,3}", int, "a whole number from 0"), "hours": AMOUNT, "gb": AMOUNT}
RESOURCES |= {"at_once": COUNT, "partition": NAME, "account": NAME}
NOTICE = 90  # seconds before the end of its time at which Slurm asks a job to stop
DAY, LOOKS, RESTARTS = 86_400, 5, 50  # what `status` shows; looks for a run; times that a job asks to come back
OWN_LOCKS = {"nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock"}  # options of NFS and Lustre
CLAIM = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"  # fails where it is seen


def resources(text: str) -> dict[str, Any]:
    """`cpus=4,gpus=1,hours=2` as values; ParameterError where a word is unknown or a value is no number."""
    given: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        if name not in RESOURCES:
            raise ParameterError(f"--resources: {unknown('resource', name, RESOURCES)}")
        pattern, kind, allowed = RESOURCES[name]
        if not re.fullmatch(pattern, value):
            raise ParameterError(f"--resources: {name} is '{clip(value)}', allowed: {allowed}.")
        given[name] = kind(value)
    return given


def need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ParameterError(f"{module} is not installed; pip install 'nblib[{extra}]'") from None


def check(folder: Path) -> None:
    """ParameterError where a file system does not do what runs of several machines rely on."""
    probe, why = files.make_folder(folder) / f".probe-{socket.gethostname()}-{os.getpid()}", ""
    try:
        for content in ("old", "new"):
            files.write(probe, content)
        lock = files.claim(probe)
        other = subprocess.run([sys.executable, "-c", CLAIM, str(probe)], capture_output=True)
        if probe.read_text() != "new":
            why = "a file that is renamed does not take the place of the old one"
        elif lock is None or other.returncode == 0:
            why = "another process does not see a lock (flock)"
        elif own := OWN_LOCKS & _mount_options(folder):
            why = f"it is mounted with '{min(own)}', and no other machine sees its locks (flock)"
        os.close(lock) if lock is not None else None
    except OSError as error:
        why = f"{error.strerror or error}"
    finally:
        probe.unlink(missing_ok=True)
    if why:
        raise ParameterError(f"{folder} cannot hold runs of several machines: {why}; NBLIB_OUTPUTS names another.")


def _mount_options(folder: Path) -> set[str]:
    """Those of the mount that the folder lies on; nothing where the system does not tell."""
    options, longest = set[str](), -1
    table = Path("/proc/self/mountinfo")
    for line in table.read_text().splitlines() if table.exists() else ():
        fields, _, more = line.partition(" - ")
        point = fields.split()[4].encode().decode("unicode_escape")
        if folder.is_relative_to(point) and len(point) >= longest:  # of two at one place the later one counts
            options, longest = {*fields.split()[5].split(","), *more.split()[-1].split(",")}, len(point)
    return options


def work(order: dict[str, Any]) -> str:
    """What a job does, on whichever machine; the run's status. RuntimeError with the sentence if it is not done."""
    for name in inputs.THREADS:  # a cluster may set one, and what was asked for is in the key
        os.environ.pop(name, None)
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    _, _, name, *options = shlex.split(order["command"])
    given = {option: options[1::2][n] for n, option in enumerate(options[::2]) if option == "--profile"}
    lists = {o: [text for n, text in enumerate(options[1::2]) if options[2 * n] == o] for o in ("-f", "-p")}
    (job,) = jobs.plan([name], profile=given.get("--profile"), files=lists["-f"], overrides=lists["-p"])
    if not jobs.same(job, order):
        why = jobs.why(order["inputs"], job.inputs)
        raise RuntimeError(f"{name}: {socket.gethostname()} would make another run than was asked for: {why}.")
    if "cpus" in order["resources"]:
        os.environ.setdefault("OMP_NUM_THREADS", str(order["resources"]["cpus"]))
    (outcome,) = runner.run([job], **order["how"])
    if outcome.status == "stopped" and "SLURM_JOB_ID" in os.environ:
        _come_back()
    if outcome.status not in ("done", "skipped"):
        raise RuntimeError(outcome.sentence or f"{name} was {outcome.status}")
    return outcome.status


def _come_back() -> None:
    """Slurm counts a job that ends as finished. Where nobody cancelled it or queued it again, it was asked to stop for
    its time was over or to make room, and it asks to be queued again."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    name = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    is_running = "JobState=RUNNING" in _ask("scontrol", "show", "job", name)
    if is_running and int(os.environ.get("SLURM_RESTART_COUNT") or 0) < RESTARTS:
        _ask("scontrol", "requeue", name)


def _ask(*command: str, times: int = 5) -> str:
    """What Slurm says. A controller that is busy does not answer at once."""
    for _ in range(times):
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode == 0:
            return told.stdout
        time.sleep(3)
    raise files.Unreadable(f"Slurm does not answer: {clip(told.stderr)}")


class Slurm:
    """Jobs outlive the one who submits them: they are cancelled by name."""

    every, outlives = 2.0, True  # seconds between two looks

    def __init__(self, wanted: dict[str, Any]):
        self.submitit, self.wanted = need("submitit", "slurm"), wanted
        if lacking := [name for name in ("sbatch", "srun", "squeue") if not shutil.which(name)]:
            raise ParameterError(f"There is no Slurm on this machine (no {lacking[0]}): ask from a login node.")

    def submit(self, orders: Sequence[dict[str, Any]], folder: Path) -> list[str]:
        wanted = {"cpus": 1, "hours": 1.0} | self.wanted
        names = {"gpus": "slurm_gpus_per_node", "gb": "mem_gb", "at_once": "slurm_array_parallelism"}
        names |= {"partition": "slurm_partition", "account": "slurm_account"}
        executor = self.submitit.AutoExecutor(folder=folder, cluster="slurm")
        try:
            executor.update_parameters(
                name="nblib",
                cpus_per_task=wanted["cpus"],
                timeout_min=math.ceil(60 * wanted["hours"]),
                slurm_srun_args=[f"--cpus-per-task={wanted['cpus']}"],  # which Slurm from 22.05 on does not pass on
                slurm_additional_parameters={"requeue": True, "signal": f"TERM@{NOTICE}"},
                **{names[name]: value for name, value in wanted.items() if name in names},
            )
            with contextlib.redirect_stderr(open(os.devnull, "w")), executor.batch():  # the error below says it
                submitted = [executor.submit(work, order) for order in orders]
            return [job.job_id for job in submitted]
        except self.submitit.core.utils.FailedJobError as error:
            raise ParameterError(f"Slurm does not take the jobs: {clip(str(error.args[-1]), 500)}") from None

    def states(self) -> dict[str, str]:
        """Of the jobs of this user that have not ended."""
        return dict(line.lower().split(" ", 1) for line in _ask("squeue", "--me", "-hro%i %T", times=20).splitlines())

    def cancel(self, ids: Sequence[str]) -> None:
        subprocess.run(["scancel", *ids], check=False)


ENGINES = {"slurm": Slurm}


def submit(engine: Any, on: str, planned: Sequence[Job], *, wanted: dict[str, Any], how: dict[str, Any]) -> list[str]:
    """Give the jobs to the engine, and note in batch.json what was given; their names there."""
    places = {"NOTEBOOKS": paths.notebooks(), "PARAMETERS": paths.profiles(), "OUTPUTS": paths.outputs()}
    environment = {f"NBLIB_{name}": str(place) for name, place in (places | {"BASE": paths.store()}).items()}
    environment |= {name: os.environ[name] for name in inputs.THREADS if os.environ.get(name, "").strip()}
    common = {"environment": environment, "cwd": os.getcwd(), "resources": wanted, "how": how}
    folder = runs.new_folder("batches")
    ids = engine.submit([{"command": j.resume, "key": j.key, "inputs": j.inputs} | common for j in planned], folder)
    given = [{"id": n, "key": j.key, "notebook": j.notebook, "label": j.label} for n, j in zip(ids, planned)]
    facts = {"on": on, "by": os.getpid(), "host": socket.gethostname(), "started": time.time(), "jobs": given}
    files.write(folder / "batch.json", files.to_json(facts, indent=1))
    return ids


def run(planned: Sequence[Job], on: str, *, wanted: dict[str, Any], how: dict[str, Any], wait: bool) -> list[Outcome]:
    """Run the jobs on an engine and wait for their ends, or not. What is done is skipped, what is queued stays so."""
    engine = ENGINES[on](wanted)
    if not (wait or engine.outlives):
        raise ParameterError(f"--no-wait: jobs on {on} end with the command that gives them.")
    check(paths.outputs())
    before = {job.key for job in planned if runner.done(job) and not how.get("force")}
    waiting = {job["key"]: job["id"] for on_, job, state in batches() if state and on_ == on}
    waiting = {job.key: waiting[job.key] for job in planned if job.key in waiting}
    fresh = [job for job in planned if job.key not in before | waiting.keys()]
    told = f"{len(fresh)} jobs given to {on}, {len(waiting)} there already, {len(before)} done before"
    waiting |= zip([job.key for job in fresh], submit(engine, on, fresh, wanted=wanted, how=how) if fresh else [])
    print(f"{told}; `nblib status` shows them, `nblib cancel` ends them", flush=True)
    stopping, total, looks = threading.Event(), len(waiting), dict[str, int]()
    with runner.handling(lambda *_: stopping.set()):
        while waiting and wait and not stopping.wait(engine.every):
            alive = engine.states()
            for job in [job for job in planned if job.key in waiting and waiting[job.key] not in alive]:
                outcome, looks[job.key] = ending(job), looks.get(job.key, 0) + 1
                if outcome.status in ("not run", "running") and looks[job.key] < LOOKS:
                    continue  # what another machine wrote may be seen some seconds late
                del waiting[job.key]
                ended = f"{outcome.status}, {runs.clock(outcome.seconds)}; {total - len(waiting)} of {total}"
                print(f"[{job.notebook}] {f'{job.label}: ' * bool(job.label)}{ended}", flush=True)
                if outcome.sentence:
                    print(f"nblib: {outcome.sentence}", file=sys.stderr, flush=True)
        if not engine.outlives:
            end(engine, list(waiting.values()))
    if waiting and engine.outlives:
        print("The jobs go on; the same command waits for them again.", flush=True)
    outcomes = [ending(job)._replace(**({"status": "skipped"} if job.key in before else {})) for job in planned]
    return [o._replace(status="stopped", sentence="") if j.key in waiting else o for j, o in zip(planned, outcomes)]


def end(engine: Any, names: Sequence[str]) -> None:
    """Ask the jobs to stop, which saves what they have, and wait until they did."""
    engine.cancel(names)
    while set(names) & engine.states().keys():
        time.sleep(engine.every)


def ending(job: Job) -> Outcome:
    """What its newest run says of a job that is in no queue any more."""
    folder = runner.newest(job)
    if folder is None:
        hint = f"{job.notebook} left no run; see {paths.short(paths.outputs() / 'batches')} for what its job printed"
        return Outcome(job.notebook, "not run", 0.0, None, f"{hint}, and whether its machine sees this folder")
    status, facts = runs.status(folder).split(",")[0].split(" ")[0], {}
    with contextlib.suppress(files.Unreadable):
        facts = runs.record(folder)
    sentence = facts.get("sentence") or f"{job.notebook} was {status} in {paths.short(folder)}; {job.resume}"
    word = status if status in ("done", "failed", "stopped", "running") else "failed"
    return Outcome(job.notebook, word, runner.took(facts) or 0.0, folder, sentence * (word in ("failed", "stopped")))


def batches() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Engine, job and its state of all that was submitted, newest first; the state is empty when the job ended."""
    queue = functools.cache(lambda: Slurm.states(None) if shutil.which("squeue") else {})
    for file in sorted(paths.outputs().glob("batches/*/batch.json"), reverse=True):
        with contextlib.suppress(files.Unreadable, LookupError, TypeError, AttributeError):  # it may hold anything
            facts = files.read_json(file)
            here = facts["host"] == socket.gethostname() and facts["by"] != os.getpid() and _is_ours(facts["by"])
            for job in facts["jobs"]:
                log, end = (file.parent / f"{job['id']}.{kind}" for kind in ("log", "ended"))
                state = "pending" if facts["on"] == "ray" and not log.exists() else "running"
                state *= here and not end.exists()
                state = queue().get(job["id"], "") if facts["on"] == "slurm" else state
                yield facts["on"], job | {"by": facts["by"], "started": facts["started"], "folder": file.parent}, state


def _is_ours(process: int) -> bool:
    with contextlib.suppress(OSError):
        return b"nblib" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def listing() -> str:
    """The jobs that have not ended, and those that were submitted in the last day, with their runs."""
    rows = [["job", "on", "state", "run", "status", "what"]]
    known: dict[str, dict[str, Path]] = {}
    for on, job, state in batches():
        if job["notebook"] not in known:
            known[job["notebook"]] = {f.get("key"): p for p, f, _ in reversed([*runner.records(job["notebook"])])}
        folder = known[job["notebook"]].get(job["key"])
        if state or time.time() - job["started"] < DAY:
            run = [f"{folder.parent.name}/{folder.name}", runs.status(folder)] if folder else ["", ""]
            cells = (job["id"], on, state or "ended", *run, job["label"] or job["notebook"])
            rows.append([clip(text) for text in cells])
    return runs.columns(rows) if len(rows) > 1 else "No jobs were given to an engine in the last day."


def cancel(names: Sequence[str]) -> str:
    """End the jobs that are called so: by notebook, by the id of a job or of its array, or `all`."""
    live = [(on, job) for on, job, state in batches() if state]
    known = {name for _, job in live for name in (job["id"], job["id"].partition("_")[0], job["notebook"], "all")}
    if wrong := [name for name in names if name not in known]:
        raise ParameterError(unknown("job", wrong[0], known).capitalize())
    chosen = [(on, j) for on, j in live if {"all", j["id"], j["id"].partition("_")[0], j["notebook"]} & {*names}]
    if slurm := [job["id"] for on, job in chosen if on == "slurm"]:
        Slurm.cancel(None, slurm)
    for job in [job for on, job in chosen if on == "ray"]:
        files.write(job["folder"] / f"{job['id']}.cancel", "")
    for process in {job["by"] for on, job in chosen if on not in ("slurm", "ray")}:
        os.kill(process, signal.SIGINT)  # who started them ends them
    return f"jobs that were asked to stop: {len(chosen)}"
