"""Batches on other machines: Slurm, by submitit, an extra: `pip install 'nblib[slurm]'`. Ray is in
on_ray.py.

One job is one run: it plans its run once more where it starts, and does what `nblib run` does. It
needs one file system that all machines see, with the project, its Python and `outputs` on it. The
machine that plans is in no key (jobs.py), so the same command given again finds what is done, and
waits for what is still in a queue.

A job that Slurm requeues is the same order again, which continues its own folder. Slurm signals a
job by SIGTERM to each of its processes, 90 s before its time is over: the run saves and ends, and
the job puts itself into the queue again. A job that a person cancelled does not.

outputs/batches/<time>-<id>/ holds what was submitted (batch.json) and what the jobs print.

Footgun: a lock that no other machine sees lets two of them write into one folder. `check` refuses
what it can find out: locks that another process does not see, and mounts whose options keep them to
one machine.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import files, paths
from nbworkbook import input_hash, jobs, runner, runs
from nbworkbook.jobs import Job
from nbworkbook.parameters import ParameterError, clip, unknown
from nbworkbook.runner import Outcome


class Resource(NamedTuple):
    """One word of `--resources`."""

    pattern: str
    type: type
    allowed: str


COUNT = Resource(r"[1-9]\d{0,5}", int, "a whole number from 1")
COUNT_OR_NONE = Resource(r"\d{1,3}", int, "a whole number from 0")
AMOUNT = Resource(r"(?=.*[1-9])\d{0,6}\.?\d{0,6}", float, "a number above 0")
NAME = Resource(r"\S+", str, "a name")
RESOURCES = {
    "cpus": COUNT,
    "gpus": COUNT_OR_NONE,
    "hours": AMOUNT,
    "gb": AMOUNT,
    "at_once": COUNT,
    "partition": NAME,
    "account": NAME,
}
# Our words as submitit spells them.
OF_SUBMITIT = {
    "gpus": "slurm_gpus_per_node",
    "gb": "mem_gb",
    "at_once": "slurm_array_parallelism",
    "partition": "slurm_partition",
    "account": "slurm_account",
}
NOTICE = 90  # seconds before the end of its time at which Slurm signals a job
DAY = 86_400  # seconds for which `listing` shows a job that ended
LOOKS = 5  # for the run of a job that ended: another machine's files may be seen some seconds late
RESTARTS = 50  # times that a job puts itself into the queue again
# mounts of NFS and Lustre
OWN_LOCKS = {"nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock"}
# A program that fails where another process has the lock.
CLAIM = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
Order = dict[str, Any]


def resources(text: str) -> dict[str, Any]:
    """Return `cpus=4,gpus=1,hours=2` as values; ParameterError for an unknown word or a wrong
    value.
    """
    given: dict[str, Any] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, _, value = part.strip().partition("=")
        if name not in RESOURCES:
            raise ParameterError(f"--resources: {unknown('resource', name, RESOURCES)}")
        resource = RESOURCES[name]
        if not re.fullmatch(resource.pattern, value):
            raise ParameterError(
                f"--resources: {name} is '{clip(value)}', allowed: {resource.allowed}."
            )
        given[name] = resource.type(value)
    return given


def need(module: str, extra: str) -> Any:
    """Return a module that an extra of nblib brings; ParameterError with the extra's name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ParameterError(f"{module} is not installed; pip install 'nblib[{extra}]'") from None


# ------------------------------------------------------------------ the file system


def check(folder: Path) -> None:
    """Raise ParameterError where a file system does not do what runs of several machines rely
    on.
    """
    probe = files.make_folder(folder) / f".probe-{socket.gethostname()}-{os.getpid()}"
    try:
        problem = _probe(probe)
    except OSError as error:
        problem = f"{error.strerror or error}"
    finally:
        probe.unlink(missing_ok=True)
    if problem:
        raise ParameterError(
            f"{folder} cannot hold runs of several machines: {problem}; NBLIB_OUTPUTS names "
            "another."
        )


def _probe(probe: Path) -> str:
    """Return what is wrong with renames and locks in the folder of this file, empty where nothing
    is.
    """
    files.write(probe, "old")
    files.write(probe, "new")
    lock = files.claim(probe)
    try:
        other = subprocess.run([sys.executable, "-c", CLAIM, str(probe)], capture_output=True)
        own = OWN_LOCKS & _mount_options(probe.parent)
        if probe.read_text() != "new":
            return "a file that is renamed does not take the place of the old one"
        if lock is None or other.returncode == 0:
            return "another process does not see a lock (flock)"
        if own:
            return f"it is mounted with '{min(own)}', and no other machine sees its locks (flock)"
        return ""
    finally:
        if lock is not None:
            os.close(lock)


def _mount_options(folder: Path) -> set[str]:
    """Return those of the mount that the folder lies on; nothing where the system does not say."""
    table = Path("/proc/self/mountinfo")
    if not table.exists():
        return set()
    options: set[str] = set()
    longest = -1
    for line in table.read_text().splitlines():
        mount, _, of_type = line.partition(" - ")
        fields = mount.split()
        point = fields[4].encode().decode("unicode_escape")
        # The innermost mount counts, and of two at one place the later one.
        if folder.is_relative_to(point) and len(point) >= longest:
            longest = len(point)
            options = {*fields[5].split(","), *of_type.split()[-1].split(",")}
    return options


# ------------------------------------------------------------------ the job, where it runs


def work(order: Order) -> str:
    """Do what a job does, on whichever machine, and return the run's status.

    RuntimeError with the sentence where the run is not done.
    """
    # A cluster may set a number of threads. The key holds what was asked for, and nothing else.
    for name in input_hash.THREADS:
        os.environ.pop(name, None)
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])

    # The run is planned once more: it must be the one that was submitted.
    job = _plan(order["command"])
    if not jobs.same(job, order):
        why = jobs.why(order["inputs"], job.inputs)
        raise RuntimeError(
            f"{job.notebook}: {socket.gethostname()} would make another run than was asked "
            f"for: {why}."
        )

    if "cpus" in order["resources"]:
        os.environ.setdefault("OMP_NUM_THREADS", str(order["resources"]["cpus"]))
    (outcome,) = runner.run([job], **order["how"])
    if outcome.status == "stopped" and "SLURM_JOB_ID" in os.environ:
        _come_back()
    if outcome.status not in ("done", "skipped"):
        raise RuntimeError(outcome.sentence or f"{job.notebook} was {outcome.status}")
    return outcome.status


def _plan(command: str) -> Job:
    """Return the job of `nblib run NOTEBOOK --profile P -f file -p name=value`, as jobs.py writes
    it.
    """
    _, _, name, *options = shlex.split(command)
    given: dict[str, list[str]] = {"--profile": [], "-f": [], "-p": []}
    for option, value in zip(options[::2], options[1::2]):
        given[option].append(value)
    profile = given["--profile"][-1] if given["--profile"] else None
    (job,) = jobs.plan([name], profile=profile, files=given["-f"], overrides=given["-p"])
    return job


def _come_back() -> None:
    """Put this job into the queue again, unless somebody cancelled it or did so already.

    Slurm counts a job that ends as finished. One that still counts as running was stopped because
    its time was over, or to make room.
    """
    name = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        name = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    is_running = "JobState=RUNNING" in _ask("scontrol", "show", "job", name)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if is_running and restarts < RESTARTS:
        _ask("scontrol", "requeue", name)


def _ask(*command: str, times: int = 5) -> str:
    """Return what a command of Slurm prints. A controller that is busy does not answer at once."""
    for _ in range(times):
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout
        time.sleep(3)
    raise files.Unreadable(f"Slurm does not answer: {clip(answer.stderr)}")


# ------------------------------------------------------------------ Slurm


class Slurm:
    """Jobs on Slurm. They outlive the command that submits them, and are cancelled by name."""

    every = 2.0  # seconds between two looks
    outlives = True

    def __init__(self, wanted: dict[str, Any]):
        self.submitit = need("submitit", "slurm")
        self.wanted = wanted
        for name in ("sbatch", "srun", "squeue"):
            if not shutil.which(name):
                raise ParameterError(
                    f"There is no Slurm on this machine (no {name}): ask from a login node."
                )

    def submit(self, orders: Sequence[Order], folder: Path) -> list[str]:
        """Submit the jobs as one array, and return their ids."""
        cpus = self.wanted.get("cpus", 1)
        hours = self.wanted.get("hours", 1.0)
        others = {
            OF_SUBMITIT[name]: value for name, value in self.wanted.items() if name in OF_SUBMITIT
        }
        executor = self.submitit.AutoExecutor(folder=folder, cluster="slurm")
        try:
            executor.update_parameters(
                name="nblib",
                cpus_per_task=cpus,
                timeout_min=math.ceil(60 * hours),
                # which Slurm from 22.05 on does not pass on
                slurm_srun_args=[f"--cpus-per-task={cpus}"],
                slurm_additional_parameters={"requeue": True, "signal": f"TERM@{NOTICE}"},
                **others,
            )
            # What sbatch writes is in the error below.
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stderr(nowhere),
                executor.batch(),
            ):
                submitted = [executor.submit(work, order) for order in orders]
            return [job.job_id for job in submitted]
        except self.submitit.core.utils.FailedJobError as error:
            raise ParameterError(
                f"Slurm does not take the jobs: {clip(str(error.args[-1]), 500)}"
            ) from None

    def states(self) -> dict[str, str]:
        """Return the states of the jobs of this user that have not ended, by id."""
        return slurm_states()

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel the jobs."""
        slurm_cancel(ids)


def slurm_states() -> dict[str, str]:
    """Return the states of the jobs of this user that have not ended, by id."""
    lines = _ask("squeue", "--me", "-hro%i %T", times=20).splitlines()
    return dict(line.lower().split(" ", 1) for line in lines)


def slurm_cancel(ids: Sequence[str]) -> None:
    """Cancel jobs of Slurm."""
    subprocess.run(["scancel", *ids], check=False)


ENGINES: dict[str, Callable[[dict[str, Any]], Any]] = {"slurm": Slurm}


# ------------------------------------------------------------------ a batch, where it is submitted


def submit(
    engine: Any, on: str, planned: Sequence[Job], *, wanted: dict[str, Any], how: dict[str, Any]
) -> list[str]:
    """Submit the jobs, note in batch.json what was submitted, and return their ids."""
    places = {
        "NBLIB_NOTEBOOKS": paths.notebooks(),
        "NBLIB_PARAMETERS": paths.profiles(),
        "NBLIB_OUTPUTS": paths.outputs(),
        "NBLIB_BASE": paths.store(),
    }
    environment = {name: str(place) for name, place in places.items()}
    for name in input_hash.THREADS:
        if os.environ.get(name, "").strip():
            environment[name] = os.environ[name]
    common = {"environment": environment, "cwd": os.getcwd(), "resources": wanted, "how": how}
    orders = [
        {"command": job.resume, "key": job.key, "inputs": job.inputs} | common for job in planned
    ]

    folder = runs.new_folder("batches")
    ids = engine.submit(orders, folder)
    facts = {
        "on": on,
        "by": os.getpid(),
        "host": socket.gethostname(),
        "started": time.time(),
        "jobs": [
            {"id": id_, "key": job.key, "notebook": job.notebook, "label": job.label}
            for id_, job in zip(ids, planned, strict=True)
        ],
    }
    files.write(folder / "batch.json", files.to_json(facts, indent=1))
    return ids


def run(
    planned: Sequence[Job], on: str, *, wanted: dict[str, Any], how: dict[str, Any], wait: bool
) -> list[Outcome]:
    """Run the jobs on an engine, wait for their ends where `wait`, and return how they ended.

    What is done is skipped, and what is in the queue is not submitted again.
    """
    engine = ENGINES[on](wanted)
    if not wait and not engine.outlives:
        raise ParameterError(f"--no-wait: jobs on {on} end with the command that gives them.")
    check(paths.outputs())

    # What is done, what is in the queue, and what is to be submitted.
    done = set()
    if not how.get("force"):
        done = {job.key for job in planned if runner.done(job)}
    queued = {
        given.job["key"]: given.job["id"] for given in batches() if given.state and given.on == on
    }
    ids = {job.key: queued[job.key] for job in planned if job.key in queued}
    fresh = [job for job in planned if job.key not in done and job.key not in ids]
    counts = f"{len(fresh)} jobs given to {on}, {len(ids)} there already, {len(done)} done before"
    if fresh:
        new_ids = submit(engine, on, fresh, wanted=wanted, how=how)
        ids |= zip([job.key for job in fresh], new_ids, strict=True)
    print(
        f"{counts}; `nblib list --jobs` shows them, `nblib sweep --cancel JOB` ends them",
        flush=True,
    )

    stopping = threading.Event()
    with runner.handling(lambda *_: stopping.set()):
        if wait:
            _wait(engine, planned, ids, stopping)
        if not engine.outlives:
            end(engine, list(ids.values()))
    if ids and engine.outlives:
        print("The jobs go on; the same command waits for them again.", flush=True)
    return [_outcome(job, done, ids) for job in planned]


def _wait(
    engine: Any, planned: Sequence[Job], ids: dict[str, str], stopping: threading.Event
) -> None:
    """Print how each job ended and take it out of `ids`, until all did or somebody asked to
    stop.
    """
    total = len(ids)
    looks: dict[str, int] = {}
    while ids and not stopping.wait(engine.every):
        alive = engine.states()
        for job in planned:
            if job.key not in ids or ids[job.key] in alive:
                continue
            outcome = ending(job)
            looks[job.key] = looks.get(job.key, 0) + 1
            if outcome.status in ("not run", "running") and looks[job.key] < LOOKS:
                continue
            del ids[job.key]
            label = f"{job.label}: " if job.label else ""
            ended = (
                f"{outcome.status}, {runs.clock(outcome.seconds)}; {total - len(ids)} of {total}"
            )
            print(f"[{job.notebook}] {label}{ended}", flush=True)
            if outcome.sentence:
                print(f"nblib: {outcome.sentence}", file=sys.stderr, flush=True)


def _outcome(job: Job, done: set[str], waiting: dict[str, str]) -> Outcome:
    """Return how a job ended: before, in this batch, or not yet."""
    outcome = ending(job)
    if job.key in waiting:
        return outcome._replace(status="stopped", sentence="")
    if job.key in done:
        return outcome._replace(status="skipped")
    return outcome


def end(engine: Any, ids: Sequence[str]) -> None:
    """Stop the jobs, which save what they have, and wait until they ended."""
    engine.cancel(ids)
    while set(ids) & engine.states().keys():
        time.sleep(engine.every)


def ending(job: Job) -> Outcome:
    """Return what the newest run of a job says, which is in no queue any more."""
    folder = runner.newest(job)
    if folder is None:
        batches_folder = paths.short(paths.outputs() / "batches")
        sentence = (
            f"{job.notebook} left no run; see {batches_folder} for what its job printed, and "
            "whether its machine "
            "sees this folder"
        )
        return Outcome(job.notebook, "not run", 0.0, None, sentence)

    facts: dict[str, Any] = {}
    with contextlib.suppress(files.Unreadable):
        facts = runs.record(folder)
    word = re.split("[, ]", runs.status(folder))[0]
    status = word if word in ("done", "failed", "stopped", "running") else "failed"
    sentence = ""
    if status in ("failed", "stopped"):
        sentence = (
            facts.get("sentence")
            or f"{job.notebook} was {word} in {paths.short(folder)}; {job.resume}"
        )
    return Outcome(job.notebook, status, runner.took(facts) or 0.0, folder, sentence)


# ------------------------------------------------------------------ all batches


class Given(NamedTuple):
    """One job that was submitted."""

    on: str  # the engine
    job: dict[str, Any]  # id, key, notebook, label; by, started and folder of its batch
    state: str  # empty when it ended


def batches() -> Iterator[Given]:
    """Yield all jobs that were submitted, newest first."""

    @functools.cache
    def queue() -> dict[str, str]:
        return slurm_states() if shutil.which("squeue") else {}

    for file in sorted(paths.outputs().glob("batches/*/batch.json"), reverse=True):
        # it may hold anything
        with contextlib.suppress(files.Unreadable, LookupError, TypeError, AttributeError):
            facts = files.read_json(file)
            by = facts["by"]
            # Jobs of Ray live as long as the process of this machine that submitted them.
            is_alive = facts["host"] == socket.gethostname() and by != os.getpid() and _is_ours(by)
            for job in facts["jobs"]:
                if facts["on"] == "slurm":
                    state = queue().get(job["id"], "")
                else:
                    state = _state_by_files(file.parent, facts["on"], job["id"]) if is_alive else ""
                of_batch = {"by": by, "started": facts["started"], "folder": file.parent}
                yield Given(facts["on"], job | of_batch, state)


def _state_by_files(folder: Path, on: str, id_: str) -> str:
    """Return the state of a job whose engine writes `<job>.log` at its start and `<job>.ended` at
    its end.
    """
    if (folder / f"{id_}.ended").exists():
        return ""
    if on == "ray" and not (folder / f"{id_}.log").exists():
        return "pending"
    return "running"


def _is_ours(process: int) -> bool:
    """Return whether a process of this machine is a command of ours."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes()
        return b"nblib" in words or b"nbworkbook" in words
    return False


def listing() -> str:
    """Return a table of the jobs that have not ended or were submitted in the last day, with their
    runs.
    """
    rows = [["job", "on", "state", "run", "status", "what"]]
    folders: dict[str, dict[str, Path]] = {}
    for given in batches():
        job = given.job
        notebook = job["notebook"]
        if notebook not in folders:
            newest_last = reversed([*runner.records(notebook)])
            folders[notebook] = {facts.get("key"): folder for folder, facts, _ in newest_last}
        if not given.state and time.time() - job["started"] >= DAY:
            continue

        run_name = ""
        status = ""
        folder = folders[notebook].get(job["key"])
        if folder is not None:
            run_name = f"{folder.parent.name}/{folder.name}"
            status = runs.status(folder)
        row = [
            job["id"],
            given.on,
            given.state or "ended",
            run_name,
            status,
            job["label"] or notebook,
        ]
        rows.append([clip(text) for text in row])
    if len(rows) == 1:
        return "No jobs were given to an engine in the last day."
    return runs.columns(rows)


def cancel(names: Sequence[str]) -> str:
    """Stop the jobs of these names, and return how many there were.

    A name is that of a notebook, the id of a job or of its array, or `all`.
    """
    live = [given for given in batches() if given.state]
    known = set().union(*(_names_of(given) for given in live))
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ParameterError(unknown("job", wrong[0], known).capitalize())
    chosen = [given for given in live if _names_of(given) & set(names)]

    of_slurm = [given.job["id"] for given in chosen if given.on == "slurm"]
    if of_slurm:
        slurm_cancel(of_slurm)
    processes = set()
    for given in chosen:
        if given.on == "ray":
            files.write(given.job["folder"] / f"{given.job['id']}.cancel", "")
        elif given.on != "slurm":
            processes.add(given.job["by"])
    for process in processes:
        os.kill(process, signal.SIGINT)  # who started the jobs ends them
    return f"jobs that were asked to stop: {len(chosen)}"


def _names_of(given: Given) -> set[str]:
    """Return the names by which a person may cancel a job."""
    id_ = given.job["id"]
    return {id_, id_.partition("_")[0], given.job["notebook"], "all"}
