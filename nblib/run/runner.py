"""Run jobs headlessly: skip what is done, resume what was interrupted, and report how each one ended.

Each job executes in a process of its own (execute.py), `jobs_at_once` side by side, each of those on a GPU of its
own or on its share of the cores. Several at once would wait at the lock of the base model for the one that makes it,
so it is made before them, with all cores. A done run with the same key is skipped. The newest one that was killed,
stopped or failed is continued in its own folder, where its checkpoints are, as soon as nothing holds the folder's lock.

Footgun: without `keep_going` a failure stops jobs from starting; those that run beside it are left to finish.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import closure, files, paths
from nblib.run import parameters, runs
from nblib.run.execute import GRACE, OUTCOME, PROGRESS
from nblib.run.jobs import Job, cells, gpus

NEEDS_GIB = 3  # of memory, set aside for each notebook: a cautious share, no measured peak
BASE = {"recipe": "default", "device": "auto", "precision": "auto"}  # what decides which base model a notebook loads


class Outcome(NamedTuple):
    notebook: str
    status: str  # done, skipped, failed, stopped, or not run
    seconds: float
    folder: Path | None
    sentence: str = ""


def run(
    jobs: Sequence[Job],
    *,
    jobs_at_once: int | None = 1,
    force: bool = False,
    keep_going: bool = False,
    timeout: int | None = None,
) -> list[Outcome]:
    """Execute the jobs, `capacity()` at once where that is None. After a failure those not yet started stay unstarted,
    unless `keep_going`."""
    jobs_at_once = min(jobs_at_once or capacity(), max(1, len(jobs)))
    for job in jobs:  # a place that cannot be written to is refused before anything starts
        probe = files.make_folder(paths.outputs() / job.notebook) / f".probe-{os.getpid()}"
        files.write(probe, "")
        probe.unlink()
    waiting, outcomes = list(enumerate(jobs)), {}  # by position: jobs may be of one notebook
    turn, halt, stopping, live = threading.Lock(), threading.Event(), threading.Event(), {}

    def work(slot: int) -> None:
        while True:
            with turn:
                if halt.is_set() or not waiting:
                    return
                number, job = waiting.pop(0)
            if job.label:
                print(f"[{job.notebook}] {job.label}", flush=True)
            try:
                if not force and (folder := done(job)):
                    print(f"[{job.notebook}] done already in {paths.short(folder)}; --force runs it again", flush=True)
                    outcome = Outcome(job.notebook, "skipped", 0.0, folder)
                else:
                    outcome = _one(job, slot, jobs_at_once, force, timeout, live, stopping)
            except OSError as error:
                outcome = Outcome(job.notebook, "failed", 0.0, None, f"{job.notebook} failed: {error}")
            outcomes[number] = outcome
            if outcome.sentence:
                print(f"nblib: {outcome.sentence}", file=sys.stderr, flush=True)
            if outcome.status == "failed" and not keep_going:
                halt.set()

    def stop(*_: Any) -> None:
        if not stopping.is_set():
            sentence = f"stopping; cells have {GRACE} s to save what they have; ask again to kill them"
            print(f"nblib: {sentence}", file=sys.stderr, flush=True)
        halt.set()
        stopping.set()
        for process in list(live.values()):
            process.send_signal(signal.SIGINT)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(jobs_at_once)]
    with _handling(stop):
        if jobs_at_once > 1:
            _make_bases([job for job in jobs if force or not done(job)], live, stopping)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    left = "stopped" if stopping.is_set() else "not run"
    return [outcomes.get(n) or Outcome(job.notebook, left, 0.0, None) for n, job in enumerate(jobs)]


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table a batch ends with."""
    rows = [["notebook", "status", "seconds", "results"]]
    for notebook, status, seconds, folder, _ in outcomes:
        results = key_results(files.read_json(folder / "result.json")) if folder else ""
        rows.append([notebook, status, f"{seconds:.1f}", results])
    return runs.columns(rows)


def key_results(result: dict[str, Any], *, limit: int = 4) -> str:
    """The first few numbers and words of a result, on one line."""
    plain = [(k, v) for k, v in result.items() if isinstance(v, (int, float, str)) and len(str(v)) < 40]
    return ", ".join(f"{k} {v:.4g}" if type(v) is float else f"{k} {v}" for k, v in plain[:limit])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    states = {outcome.status for outcome in outcomes}
    return 130 if "stopped" in states else 0 if states <= {"done", "skipped"} else 1


def done(job: Job) -> Path | None:
    """The newest finished run of the job."""
    return next((folder for folder in _same(job) if runs.is_done(folder)), None)


def _same(job: Job) -> Iterator[Path]:
    """Folders of earlier runs with the job's key, newest first."""
    for record in sorted((paths.outputs() / job.notebook).glob("*/run.json"), reverse=True):
        if files.read_json(record).get("key") == job.key:
            yield record.parent


def _take_folder(job: Job, force: bool) -> tuple[Path, int]:
    """The unfinished folder to continue, or a new one; with the lock on it."""
    for folder in [] if force else _same(job):
        lock, deadline = files.claim(folder), time.monotonic() + GRACE + 5
        orphaned = not _alive(files.read_json(folder / "run.json").get("runner", 0) or os.getpid())
        while lock is None and orphaned and time.monotonic() < deadline:  # its kernel is still saving
            time.sleep(0.2)
            lock = files.claim(folder)
        if lock is not None:
            return folder, lock
    folder = runs.new_folder(job.notebook)
    lock = files.claim(folder)
    assert lock is not None, f"{folder} was created by us just now"
    return folder, lock


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # a killed process stays listed until its parent, in a container perhaps a careless one, has asked for it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or no /proc here
        return True


def _one(job: Job, slot: int, slots: int, force: bool, timeout: int | None, live: dict, stopping: Any) -> Outcome:
    """Execute one job in a process of its own and pass on what it prints."""
    folder, lock = _take_folder(job, force)
    attempts = files.read_json(folder / "run.json").get("attempts", 0) + 1
    facts = {"notebook": job.notebook, "key": job.key, "status": "running", "runner": os.getpid(), "attempts": attempts}
    files.merge(folder / "run.json", facts | {"started": time.time(), "command": job.resume})
    files.write(folder / "parameters.yaml", parameters.dump_yaml(job.parameters))
    print(f"[{job.notebook}] {'resumes' if attempts > 1 else 'runs'} in {paths.short(folder)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "nblib.run.execute"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
        start_new_session=True,  # a Ctrl-C in the terminal reaches us alone, and we pass it on once
        env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONIOENCODING": "utf-8"} | _share(slot, slots),
    )
    os.close(lock)
    live[slot] = process
    if stopping.is_set():  # asked while this process was being started
        process.send_signal(signal.SIGINT)
    order = {"notebook": job.notebook, "path": str(job.path), "folder": str(folder), "values": job.values}
    process.stdin.write(json.dumps(order | {"lock": lock, "timeout": timeout, "resume": job.resume}).encode() + b"\n")
    process.stdin.flush()
    record = _relay(process, job.notebook, prefix=slots > 1)
    process.wait()
    del live[slot]
    process.stdin.close()
    if record is None:
        status = "stopped" if stopping.is_set() else "failed"
        how = f"{status}: its process ended with code {process.returncode}"
        record = {"status": status, "sentence": f"{job.notebook} {how}; resume with: {job.resume}", "seconds": 0.0}
        files.merge(folder / "run.json", record)
    return Outcome(job.notebook, record["status"], record["seconds"], folder, record["sentence"])


def _relay(process: subprocess.Popen, notebook: str, *, prefix: bool) -> dict[str, Any] | None:
    """Print the process's lines as they come; its outcome, or None when it ended without one."""
    record = None
    for raw in process.stdout:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        text, mark = next(((line.partition(m)[0], m) for m in (OUTCOME, PROGRESS) if m in line), (line, ""))
        if text or not mark:
            print(f"[{notebook}] {text}" if prefix else text, flush=True)
        if mark == OUTCOME:
            record = json.loads(line.partition(mark)[2])
        elif mark:
            print(f"[{notebook}] {line.partition(mark)[2]}", flush=True)
    return record


def _share(slot: int, slots: int) -> dict[str, str]:
    """What one of several processes may use: a card, or its part of the cores."""
    if slots == 1:
        return {}
    if cards := gpus():
        return {"CUDA_VISIBLE_DEVICES": cards[slot % len(cards)][0]}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // slots))}


def capacity() -> int:
    """How many notebooks at once: one per card; else one per core, as far as memory goes."""
    if cards := gpus():
        return len(cards)
    cores, memory = len(os.sched_getaffinity(0)), [_numbers("/proc/meminfo")[2] * 1024]  # what is available
    # a container may be given less than the machine has, and the kernel tells so in one of two ways
    group = "/sys/fs/cgroup/"
    quota = _numbers(f"{group}cpu.max", f"{group}cpu/cpu.cfs_quota_us", f"{group}cpu/cpu.cfs_period_us")
    if len(quota) == 2:  # without a limit only the period is a number
        cores = min(cores, math.ceil(quota[0] / quota[1]))
    memory += _numbers(f"{group}memory.max", f"{group}memory/memory.limit_in_bytes")
    return max(1, min(cores, min(memory) // (NEEDS_GIB * 2**30)))


def _numbers(*files: str) -> list[int]:
    """The numbers above 0 in those of the files that exist."""
    text = " ".join(Path(file).read_text() for file in files if Path(file).is_file())
    return [int(number) for number in re.findall(r"(?<!\S)[1-9]\d*\b", text)]


def _make_bases(jobs: Sequence[Job], live: dict, stopping: threading.Event) -> None:
    """Make the base models that the jobs will load; `nblib.base` ends at once where one is there."""
    needy = [job.parameters for job in jobs if "nblib.base" in closure.reached(cells(job.path))]
    wanted = [tuple(p.get(name, value) for name, value in BASE.items()) for p in needy if not p.get("model")]
    for arguments in dict.fromkeys(wanted):
        if stopping.is_set():
            return
        process = subprocess.Popen(
            [sys.executable, "-m", "nblib.base", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # as in _one
        )
        live["base"] = process
        if stopping.is_set():  # asked while this process was being started
            process.send_signal(signal.SIGINT)
        for line in process.stdout:
            if not stopping.is_set():
                print(line.decode("utf-8", "replace"), end="", flush=True)
        if process.wait() and not stopping.is_set():
            print("nblib: the base model was not made; each notebook that needs it tries again", file=sys.stderr)
        del live["base"]


@contextlib.contextmanager
def _handling(stop: Callable) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `stop` for a while (Python lets only the main thread say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
