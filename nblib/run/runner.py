"""Run jobs headlessly: skip what is done, resume what was interrupted, and report how each one ended.

Each job executes in a process of its own (execute.py), `jobs_at_once` side by side, each of those on a GPU of its own
or on its share of the cores, the longest first. Several at once would wait at the lock of the base model for the one
that makes it. So it is made before them, with all cores: beside other jobs, with its share of the cores, it takes as
much longer as they gain, and they end up waiting for it.

Among the runs with a job's key the newest counts. If it is done, the job is skipped, or with `force` made again in a
fresh folder. If it was killed, stopped or failed, forced or not, it is continued in its own folder, where its
checkpoints are. If it is running, we wait for its end. A run whose result changed since, or whose base model is not the
stored one any more, does not count.

What reaches the terminal: what cells print, the notebook's headings, its tables and the sentences of its pictures, a
line for each cell that takes longer than execute.SLOW, and with several jobs how far they are (pace.py).

Footgun: without `keep_going` a failure stops jobs from starting; those that run beside it are left to finish.
"""

import codecs
import contextlib
import functools
import json
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from nblib import closure, files, paths
from nblib.run import jobs as planning
from nblib.run import parameters, runs
from nblib.run.execute import GRACE, sweep, unforeseen
from nblib.run.jobs import Job, cells, gpus
from nblib.run.pace import Pace, clock

NEEDS_GIB = 3  # of memory, set aside for each notebook: a cautious share, no measured peak
LONGEST = 40  # lines of one table on the terminal
BASE = {"recipe": "default", "device": "auto", "precision": "auto"}  # what decides which base model a notebook loads


class Workers:
    """The processes that work for us. All are told when somebody asks to stop."""

    def __init__(self, crew: Any = None) -> None:
        self.live, self.crew = set[subprocess.Popen](), crew
        self.stopping = threading.Event()

    def start(self, *module: str, share: dict[str, str], **pipes: Any) -> subprocess.Popen:
        """A program of ours in a process of its own, with a card or a part of the cores as its share."""
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal reaches us alone, and we pass it on once
            env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONIOENCODING": "utf-8"} | share,
            **pipes,
        )
        self.live.add(process)
        if self.stopping.is_set():  # asked while this process was being started
            process.send_signal(signal.SIGINT)
        return process

    def stop(self) -> None:
        self.stopping.set()
        for process in list(self.live):
            process.send_signal(signal.SIGINT)


class Outcome(NamedTuple):
    notebook: str
    status: str  # done, skipped, failed, stopped, not run, or unwritten: something of it could not be written
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
    detail: str = "some",
    crew: Any = None,
) -> list[Outcome]:
    """Execute the jobs, `capacity()` at once where that is None. After a failure those not yet started stay unstarted,
    unless `keep_going`. `detail` is little (no tables), some, or all (a line for every cell). A `crew` are further
    processes of one job (lessons/launch.py)."""
    jobs_at_once = min(jobs_at_once or capacity(), max(1, len(jobs)))
    for job in jobs:  # a place that cannot be written to is refused before anything starts
        probe = files.make_folder(paths.outputs() / job.notebook) / f".probe-{os.getpid()}"
        files.write(probe, "")
        probe.unlink()
    _remove_leftovers({job.notebook for job in jobs})
    expected, outcomes = _expected(jobs, force), {}
    times = [_once_took(job) if seconds == math.inf else seconds for job, seconds in zip(jobs, expected)]
    waiting = sorted(range(len(jobs)), key=lambda number: -times[number] if jobs_at_once > 1 else 0)  # positions
    turn, halt, workers = threading.Lock(), threading.Event(), Workers(crew)
    pace = Pace([job.notebook for job in jobs], expected, waiting, jobs_at_once)

    def work(slot: int) -> None:
        share = _share(slot, jobs_at_once)
        while True:
            with turn:
                if halt.is_set() or not waiting:
                    return
                number = waiting.pop(0)
                pace.starts(number)
            job = jobs[number]
            try:
                outcome = _one(job, workers, pace, share=share, force=force, timeout=timeout, detail=detail)
            except Exception as error:  # nothing that one run does ends the others
                status = "unwritten" if isinstance(error, files.Unwritable) else "failed"
                sentence = f"{job.notebook} failed: {unforeseen(error, paths.outputs() / job.notebook)}"
                outcome = Outcome(job.notebook, status, 0.0, None, sentence)
            outcomes[number] = outcome
            pace.ends(number, outcome.seconds if outcome.status == "done" else None)
            ended = f"{outcome.status}, {clock(outcome.seconds)}"
            if outcome.status == "skipped":
                ended = f"done already in {paths.short(outcome.folder)}; --force runs it again"
            _say(f"[{job.notebook}] {ended}{pace}")
            if outcome.sentence:
                _say(f"nblib: {outcome.sentence}", sys.stderr)
            if outcome.status in ("failed", "unwritten") and not keep_going:
                halt.set()

    def stop(*_: Any) -> None:
        if not workers.stopping.is_set():
            sentence = f"stopping; cells have {GRACE} s to save what they have; ask again to kill them"
            _say(f"nblib: {sentence}", sys.stderr)
        halt.set()
        workers.stop()

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(jobs_at_once)]
    with handling(stop):
        if jobs_at_once > 1 or crew:
            _make_bases([job for job in jobs if force or not done(job)], workers)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    left = "stopped" if workers.stopping.is_set() else "not run"
    return [outcomes.get(n) or Outcome(job.notebook, left, 0.0, None) for n, job in enumerate(jobs)]


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table a batch ends with."""
    rows = [["notebook", "status", "seconds", "results"]]
    for notebook, status, seconds, folder, _ in outcomes:
        rows.append([notebook, status, f"{seconds:.1f}", headline(folder) if folder else ""])
    return runs.columns(rows)


def headline(folder: Path) -> str:
    """The first four numbers and words among the results that the run itself names as those that count, else among all,
    on one line; or what is wrong with the file."""
    try:
        result, names = files.read_json(folder / "result.json"), ()
        with contextlib.suppress(files.Unreadable, TypeError):  # a record may hold anything
            names = [name for name in runs.record(folder).get("headline", ()) if name in result]
    except files.Unreadable as error:
        return str(error)
    plain = [(n, v) for n in names or result if isinstance(v := result[n], (int, float, str)) and len(str(v)) < 40]
    return ", ".join(f"{name} {v:.4g}" if type(v) is float else f"{name} {v}" for name, v in plain[:4])


def took(facts: dict[str, Any]) -> float | None:
    seconds = facts.get("seconds")
    return seconds if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9 else None


def preview(jobs: Sequence[Job], *, jobs_at_once: int | None = 1, force: bool = False) -> str:
    """What `run` would do with each job and why, as text; nothing is started or written."""
    lines = []
    for job in jobs:
        folder = newest(job)
        state = runs.status(folder) if folder else "done"
        if state.startswith("done") and (folder is None or force):
            why = "forced" if folder else _why(job)
            what = f"runs again: {why}" if why else "runs"
        else:
            does = {"done": "is skipped, done in", "running": "waits for"}.get(state, f"({state}) continues in")
            what = f"{does} {paths.short(folder)}"
        known, profile = parameters.declared(job.path), re.findall(r" --(profile \S+)", job.resume)
        differ = [parameters.assignment(name, v) for name, v in job.values.items() if v != known[name].default]
        lines += [f"{job.notebook} {what}", f"    {parameters.clip(', '.join([*profile, *differ]) or 'defaults', 400)}"]
    at_once = min(jobs_at_once or capacity(), len(jobs))
    pace = Pace([job.notebook for job in jobs], _expected(jobs, force), list(range(len(jobs))), at_once)
    return "\n".join([*lines, f"nothing was started{pace}"])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    states = {outcome.status for outcome in outcomes}
    if "stopped" in states or "unwritten" in states:
        return 130 if "stopped" in states else 74
    return 0 if states <= {"done", "skipped"} else 1


def done(job: Job) -> Path | None:
    """The job's newest run, if it is finished."""
    folder = newest(job)
    return folder if folder and runs.is_done(folder) else None


def records(notebook: str) -> Iterator[tuple[Path, dict[str, Any], str | None]]:
    """The runner's runs of the notebook, newest first: folder, record, and what is wrong with the record."""
    for path in sorted((paths.outputs() / notebook).glob("*/run.json"), reverse=True):
        try:
            facts, wrong = runs.record(path.parent), None
        except files.Unreadable as error:
            facts, wrong = {}, str(error)
        if facts.get("by") != "hand":  # its code was that of a page, which may have been edited
            yield path.parent, facts, wrong


def newest(job: Job, tell: Callable[[str], None] = lambda _: None) -> Path | None:
    """The newest run of the job that counts; says of others why they do not."""
    for folder, facts, wrong in records(job.notebook):
        if wrong is None and not planning.same(job, facts):
            continue
        wrong = wrong or _other_base(folder)
        if facts.get("status") == "done" and not runs.is_done(folder):
            wrong = wrong or runs.problem(folder) or "its notebook is not whole"
        if wrong is None:
            return folder
        tell(f"[{job.notebook}] {paths.short(folder)} does not count: {wrong}")
    return None


def _other_base(folder: Path) -> str | None:
    """Why the base model that a run loaded (its base.json) is not the one in the store, if one is there."""
    try:
        loaded = files.read_json(folder / "base.json")
    except files.Unreadable as error:
        return str(error)
    with contextlib.suppress(files.Unreadable):  # damaged in the store: it is made again when a run loads it
        stored = files.read_json(paths.store() / Path(str(loaded.get("base"))).name / "base.json")
        if "content" in loaded and stored.get("content", loaded["content"]) != loaded["content"]:
            return f"the base model {loaded['base']} is another one"
    return None


def _take_folder(job: Job, force: bool, stopping: threading.Event) -> tuple[Path | None, int | None]:
    """Where the job runs from now on, with the lock on it. Without a lock: the folder of a finished run, or None when
    somebody asked to stop while another process had it."""
    home, began = paths.outputs() / job.notebook, time.monotonic()
    while not stopping.is_set():
        waited = time.monotonic() - began
        if (alone := files.claim(home)) is not None:  # of two that start together the second sees the first one's run
            try:
                folder = newest(job, _say_once)
                facts = runs.record(folder) if folder else {}
                finished = facts.get("status") == "done"
                if finished and not force:
                    return folder, None
                lock = files.claim(folder) if folder and not finished else None
                # without its runner a kernel ends within GRACE; one that does not is left behind
                orphaned = waited > GRACE + 5 and not _alive(facts.get("runner", 0))
                if lock is None and (folder is None or finished or orphaned):
                    if folder is None and (why := _why(job)):
                        _say(f"[{job.notebook}] runs again: {why}")
                    folder, facts = runs.new_folder(job.notebook), {}
                    lock = files.claim(folder)
                if lock is not None:
                    return _begin(job, folder, lock, facts.get("attempts", 0) + 1, force), lock
            finally:
                os.close(alone)
            if waited > 0.5:  # for less than that it may be somebody who asks for its status
                where = f"(pid {facts.get('runner')}, in {paths.short(folder)})"
                _say_once(f"[{job.notebook}] is running already {where}; waiting for it")
        stopping.wait(0.2)
    return None, None


def _begin(job: Job, folder: Path, lock: int, attempts: int, force: bool) -> Path:
    """The folder, after what is known of the run was written into it."""
    facts = {"notebook": job.notebook, "key": job.key, "inputs": job.inputs, "status": "running"}
    facts |= {"runner": os.getpid(), "attempts": attempts, "started": time.time(), "command": job.resume}
    try:
        runs.note(folder, facts | ({"forced": True} if force else {}))
        files.write(folder / "parameters.yaml", parameters.dump_yaml(job.parameters))
    except BaseException:
        os.close(lock)
        if not (folder / "run.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _why(job: Job) -> str:
    """What changed since the newest finished run with the job's parameters; empty when there is none."""
    for _, facts, _ in records(job.notebook):
        if facts.get("status") == "done" and _same_parameters(job, facts):
            return planning.why(facts["inputs"], job.inputs)
    return ""


def _same_parameters(job: Job, facts: dict[str, Any]) -> bool:
    asked, before = {p: v for p, v in job.inputs.items() if p.startswith("parameter ")}, facts.get("inputs")
    return isinstance(before, dict) and all(before.get(part, value) == value for part, value in asked.items())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # a killed process stays listed until its parent, in a container perhaps a careless one, has asked for it
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or no /proc here
        return True


def _one(
    job: Job, workers: Workers, pace: Pace, *, share: dict[str, str], force: bool, timeout: int | None, detail: str
) -> Outcome:
    """Execute one job in a process of its own and pass on what it prints."""
    crew = workers.crew
    if job.label:
        _say(f"[{job.notebook}] {job.label}")
    folder, lock = _take_folder(job, force, workers.stopping)
    if folder is None:
        return Outcome(job.notebook, "stopped", 0.0, None)
    if lock is None:
        return Outcome(job.notebook, "skipped", 0.0, folder)
    words, theirs = os.pipe()
    with open(words, "rb") as words:
        try:
            resumes = runs.record(folder).get("attempts", 1) > 1
            _say(f"[{job.notebook}] {'resumes' if resumes else 'runs'} in {paths.short(folder)}{pace}")
            pipes = {"stdin": subprocess.PIPE, "bufsize": 0, "pass_fds": (lock, theirs)}  # 0: the order does not wait
            ranked = crew.environment(0) if crew else {}
            process = workers.start("nblib.run.execute", share=share | ranked, **pipes)
            order = {"notebook": job.notebook, "path": str(job.path), "folder": str(folder), "values": job.values}
            order |= {"lock": lock, "words": theirs, "timeout": timeout, "resume": job.resume}
            if crew:
                crew.start(process, order, workers)
        finally:
            os.close(lock), os.close(theirs)
        with process.stdout, process.stdin:
            with contextlib.suppress(BrokenPipeError):  # it died at once
                process.stdin.write(json.dumps(order).encode() + b"\n")
            prefix = f"[{job.notebook}] " if share else ""
            record = _relay(process.stdout, words, job.notebook, prefix=prefix, detail=detail, pace=pace)
            process.wait()
        workers.live.remove(process)
    record = crew.end(record) if crew else record
    if record is None:
        status = "stopped" if workers.stopping.is_set() else "failed"
        how = f"{status}: its process ended with code {process.returncode}"
        record = {"status": status, "sentence": f"{job.notebook} {how}; resume with: {job.resume}", "seconds": 0.0}
        runs.note(folder, record)
    status = "unwritten" if record.get("unwritten") and record["status"] == "failed" else record["status"]
    return Outcome(job.notebook, status, record["seconds"], folder, record["sentence"])


def _relay(stdout: Any, words: Any, notebook: str, *, prefix: str, detail: str, pace: Pace) -> dict[str, Any] | None:
    """Print what comes until the process ends, which alone holds `words`; its outcome, or None when it ended without.
    Something that the notebook started may hold `stdout` for longer, and is not waited for."""
    record, rest, told, last = None, "", b"", ""
    decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode

    def pass_on(text: str) -> None:
        nonlocal rest
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            _say(prefix + line)

    def tell(said: dict[str, Any]) -> None:
        """A line of its own; where a picture says what the progress said, one of them."""
        nonlocal last
        cell = f"{said['cell']}{pace}" if "cell" in said else ""
        if cell and said["slow"] == (detail == "all"):
            return _say(f"[{notebook}] {cell}", end="")
        text = cell or said.get("progress") or (said.get("shown") if detail != "little" else "")
        if text and text != last:
            pass_on("\n" if rest else "")
            last, lines = text, text.split("\n")
            if "shown" in said and len(lines) > LONGEST:
                lines[LONGEST:] = [f"... and {len(lines) - LONGEST} lines more"]
            _say("\n".join(f"{prefix}    {line}" for line in lines) if "shown" in said else f"[{notebook}] {text}")

    with selectors.DefaultSelector() as pipes:
        pipes.register(stdout, selectors.EVENT_READ)
        pipes.register(words, selectors.EVENT_READ)
        ended = False
        while not ended:
            ready = [key.fileobj for key, _ in pipes.select()]
            if stdout in ready:  # also once more at the end, for what is left in it
                pass_on(decode(heard := os.read(stdout.fileno(), 2**16)))
                if not heard:
                    pipes.unregister(stdout)
            if words in ready:
                heard = os.read(words.fileno(), 2**16)
                ended = not heard
                *lines, told = (told + heard).split(b"\n")
                for said in map(json.loads, lines):
                    pass_on(said.get("text", ""))
                    tell(said)
                    record = said.get("outcome", record)
    pass_on("\n" if rest else "")
    return record


def _say(text: str, file: TextIO | None = None, *, end: str = "\n") -> None:
    """Print a line, whatever it holds, and whether or not anybody can still read it. Without an `end` the next line
    takes its place on a terminal, and it is nothing elsewhere."""
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):  # a closed pipe, a full disk: the work goes on
        terminal = file.isatty()
        text = text if end else text[: shutil.get_terminal_size().columns - 1] * terminal
        file.write("\r\x1b[K" * terminal + text.encode(encoding, "backslashreplace").decode(encoding) + end)
        file.flush()


_say_once = functools.cache(_say)


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


def _make_bases(jobs: Sequence[Job], workers: Workers) -> None:
    """Make the base models that the jobs will load; `nblib.base` ends at once where one is there."""
    needy = [job.parameters for job in jobs if "nblib.base" in closure.reached(cells(job.path))]
    wanted = [tuple(p.get(name, value) for name, value in BASE.items()) for p in needy if not p.get("model")]
    for arguments in dict.fromkeys(wanted):
        if workers.stopping.is_set():
            return
        process = workers.start("nblib.base", *arguments, share={})
        for line in process.stdout:
            if not workers.stopping.is_set():
                _say(line.decode("utf-8", "backslashreplace").rstrip("\n"))
        if process.wait() and not workers.stopping.is_set():
            _say("nblib: the base model was not made; each notebook that needs it tries again", sys.stderr)
        workers.live.remove(process)


def _expected(jobs: Sequence[Job], force: bool) -> list[float]:
    """Seconds that each job will take: none where it is done, inf where nobody knows, else those of the notebook's
    newest finished run, with the same parameters if there is such a one."""

    @functools.cache
    def finished(notebook: str) -> list[dict[str, Any]]:
        ended = [facts for _, facts, _ in records(notebook) if facts.get("status") == "done"]
        return [facts for facts in ended if took(facts) is not None]

    def seconds(job: Job) -> float:
        if not force and done(job):
            return 0.0
        likely = sorted(finished(job.notebook), key=lambda facts: not _same_parameters(job, facts))
        return likely[0]["seconds"] if likely else math.inf

    return list(map(seconds, jobs))


def _once_took(job: Job) -> float:
    """Seconds that the notebook took where its stored outputs come from: which are long, on a machine that is new."""
    with contextlib.suppress(files.Unreadable, LookupError, TypeError, AttributeError):  # it may hold anything
        seconds = took(files.read_json(job.path)["metadata"]["nblib"])
        return math.inf if seconds is None else seconds
    return math.inf


def _remove_leftovers(notebooks: Collection[str]) -> None:
    """What processes that were killed left in the folders of these notebooks, and refreshes anywhere."""
    outputs = paths.outputs()
    sweep(outputs, "refresh-*")
    files.remove_partials(outputs)  # of runs that were being deleted
    for home in (outputs / notebook for notebook in notebooks):
        for place in (home, *home.glob("*/"), *home.glob("*/figures/")):
            files.remove_partials(place)
        # a runner that was killed before it wrote anything leaves an empty folder; who makes one holds this lock
        if home.is_dir() and (alone := files.claim(home)) is not None:
            for place in home.glob("*/"):
                with contextlib.suppress(OSError):  # it is not empty
                    place.rmdir()
            os.close(alone)


@contextlib.contextmanager
def handling(stop: Callable) -> Iterator[None]:
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
