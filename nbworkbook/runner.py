"""Run jobs headlessly: skip what is done, resume what was interrupted, report how each ended.

A batch goes through six phases:

    plan     how long each job takes (eta.py), and so their order: longest first, side by side
    base     the base models that the jobs load are made, alone and with all cores: beside other
             jobs one would be finished so late that they all waited for it
    share    each of `jobs_at_once` slots gets a card, or its part of the cores (capacity.py)
    claim    a job gets its folder and the lock on it
    relay    the job executes in a process of its own (execute.py), and what that says is passed on
    outcome  how it ended

Claim: among the runs with a job's key the newest counts (run_history.py). If it is done, the job
is skipped, or with `force` made again in a fresh folder. If it was killed, stopped or failed,
forced or not, it is continued in its own folder, where its checkpoints are. If it is running, we
wait for its end.

What is printed: of one job, or with `detail="all"`, what its cells print, the notebook's headings,
its tables and the sentences of its pictures, and a line for each cell that takes longer than
execute.SLOW. Of several jobs a line when one starts and one when it ends; the rest is in the pages
of their runs. A terminal shows besides, at its bottom and rewritten in place, where each slot is
and the time left (status_lines.py).

Footgun: without `keep_going` a failure stops jobs from starting; those that run beside it are left
to finish.
"""

import codecs
import contextlib
import json
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
from typing import IO, Any, NamedTuple

from nblib import files, paths
from nbworkbook import code_hash, parameters, runs, shadowing
from nbworkbook.capacity import capacity, share_of
from nbworkbook.eta import Pace, clock
from nbworkbook.execute import GRACE, sweep, unforeseen
from nbworkbook.jobs import Job, cells
from nbworkbook.leftover_processes import end_processes_of
from nbworkbook.run_history import (
    done,
    headline,
    measured_seconds,
    newest,
    published_seconds,
    records,
    took,
    why_again,
)
from nbworkbook.status_lines import StatusLines

__all__ = ["Outcome", "Workers", "done", "exit_code", "handling", "headline", "newest"]
__all__ += ["preview", "records", "run", "summary", "sweep", "took"]

LONGEST = 40  # lines of one table on the terminal
BASE_EVERY = 60.0  # seconds between two lines about the base model, where the output is no terminal
# what decides which base model a notebook loads
BASE = {"recipe": "default", "device": "auto", "precision": "auto"}


class Workers:
    """The processes that work for us. All are told when somebody asks to stop."""

    def __init__(self, crew: Any = None) -> None:
        self.live: set[subprocess.Popen] = set()
        self.crew = crew
        self.stopping = threading.Event()

    def start(self, *module: str, share: dict[str, str], **pipes: Any) -> subprocess.Popen:
        """Start a program of ours as a process with a card or a part of the cores as its share."""
        process = subprocess.Popen(
            # -P: no file of the current folder, torch.py say, takes the place of a package
            [sys.executable, "-P", "-m", *module],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal reaches us, and we pass it on once
            env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONIOENCODING": "utf-8"} | share,
            **pipes,
        )
        self.live.add(process)
        if self.stopping.is_set():  # asked while this process was being started
            process.send_signal(signal.SIGINT)
        return process

    def stop(self) -> None:
        """Ask all of them to stop."""
        self.stopping.set()
        for process in list(self.live):
            process.send_signal(signal.SIGINT)


class Outcome(NamedTuple):
    """How a job ended."""

    notebook: str
    # done, skipped, failed, stopped, not run, or unwritten: something of it could not be written
    status: str
    seconds: float
    folder: Path | None
    sentence: str = ""


class Options(NamedTuple):
    """How the jobs of a batch run."""

    force: bool
    keep_going: bool
    timeout: int | None
    detail: str


class Claim(NamedTuple):
    """The folder of a job and the lock on it.

    Without a lock: the folder of a finished run, or no folder when somebody asked to stop while
    another process had it."""

    folder: Path | None
    lock: int | None
    attempts: int = 0
    why: str = ""  # what changed since the newest finished run


class Place:
    """Where a slot is: its job, the cell, and the last line of progress."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.cell = ""
        self.progress = ""

    def enter(self, number: int | None) -> None:
        """Begin the job at this position, or none."""
        self.number = number
        self.cell = ""
        self.progress = ""


class Batch:
    """What the slots share: the jobs, how far they are, their processes, and the terminal."""

    def __init__(self, jobs: Sequence[Job], slots: int, options: Options, crew: Any) -> None:
        self.jobs = list(jobs)
        self.slots = slots
        self.options = options
        self.workers = Workers(crew)
        self.halt = threading.Event()  # no further job starts
        self.outcomes: dict[int, Outcome] = {}

        self.pace = plan(jobs, slots, options.force)
        self.places = [Place() for _ in range(slots)]
        self.base = ""  # what is said of the base model while it is made
        self.lines = StatusLines(self.status)
        self.streams = len(jobs) == 1 or options.detail == "all"

    def stop(self, *_: Any) -> None:
        """Ask all that runs to stop, and start nothing more; the second time kills."""
        is_first = not self.workers.stopping.is_set()
        self.halt.set()
        self.workers.stop()
        if is_first:
            saving = f"cells have {GRACE} s to save what they have"
            self.lines.print(f"nblib: stopping; {saving}; ask again to kill them", sys.stderr)

    def status(self) -> list[str]:
        """Return the lines at the bottom of the terminal: one for each slot, and one for all."""
        width = max((len(job.notebook) for job in self.jobs), default=0)
        lines = [self.base]
        for place in self.places:
            number = place.number
            if number is None:
                continue
            name = f"[{self.jobs[number].notebook}]".ljust(width + 3)
            parts = [self.pace.of(number), place.cell, place.progress]
            lines.append(name + ", ".join(part for part in parts if part))
        if len(self.jobs) > 1:
            lines.append(self.pace.so_far(self.pace.left()))
        return lines

    def end(self, number: int, attempts: int, outcome: Outcome) -> None:
        """Note and print how a job ended that ran so many times."""
        self.outcomes[number] = outcome
        is_whole = outcome.status == "done" and attempts == 1
        self.pace.end(number, outcome.seconds if is_whole else None)

        job = self.jobs[number]
        if outcome.status == "skipped":
            label = f"{job.label}: " if job.label else ""
            ended = f"{label}done already in {paths.short(outcome.folder)}; --force runs it again"
        else:
            ended = f"{outcome.status}, {clock(outcome.seconds)}"
        if outcome.status == "done" and len(self.jobs) > 1:
            results = parameters.clip(headline(outcome.folder), 120)
            ended += f", {results}" if results else ""
        self.lines.print(f"[{job.notebook}] {ended}{self.pace}")
        if outcome.sentence:
            self.lines.print(f"nblib: {outcome.sentence}", sys.stderr)
        if outcome.status in ("failed", "unwritten") and not self.options.keep_going:
            self.halt.set()


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
    """Execute the jobs, `capacity()` at once where `jobs_at_once` is None, and return the outcomes.

    After a failure those not yet started stay unstarted, unless `keep_going`. `detail` is little
    (no tables), some, or all (what cells print also of several jobs, and a line for every cell). A
    `crew` are further processes of one job (nbworkbook/launch.py)."""
    # a place that cannot be written to is refused before anything starts
    for job in jobs:
        _check_writable(paths.outputs() / job.notebook)
    _remove_leftovers({job.notebook for job in jobs})  # of processes that were killed

    slots = min(jobs_at_once or capacity(), max(1, len(jobs)))
    batch = Batch(jobs, slots, Options(force, keep_going, timeout, detail), crew)
    threads = [threading.Thread(target=_work, args=(batch, slot)) for slot in range(slots)]

    with handling(batch.stop), batch.lines:
        if len(jobs) > 1 or crew:
            make_bases(batch)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    left = "stopped" if batch.workers.stopping.is_set() else "not run"
    unstarted = [Outcome(job.notebook, left, 0.0, None) for job in jobs]
    return [batch.outcomes.get(number, outcome) for number, outcome in enumerate(unstarted)]


def _work(batch: Batch, slot: int) -> None:
    """Run one job after the other in this slot, until none waits."""
    share = share_of(slot, batch.slots)
    place = batch.places[slot]
    while not batch.halt.is_set():
        number = batch.pace.start_next()
        if number is None:
            return

        place.enter(number)
        job = batch.jobs[number]
        claimed = Claim(None, None)
        try:
            claimed = claim(
                job, batch.options.force, batch.workers.stopping, batch.lines.print_once
            )
            outcome = _execute(batch, number, claimed, share, place)
        except Exception as error:  # nothing that one run does ends the others
            status = "unwritten" if isinstance(error, files.Unwritable) else "failed"
            sentence = f"{job.notebook} failed: {unforeseen(error, paths.outputs() / job.notebook)}"
            outcome = Outcome(job.notebook, status, 0.0, None, sentence)
        place.enter(None)
        batch.end(number, claimed.attempts, outcome)


# ------------------------------------------------------------------ plan


def plan(jobs: Sequence[Job], slots: int, force: bool) -> Pace:
    """Return the jobs' pace: their order, and how long each takes as far as that is known."""
    names = [job.notebook for job in jobs]
    published = {job.path: published_seconds(job) for job in jobs}
    return Pace(names, measured_seconds(jobs, force), [published[job.path] for job in jobs], slots)


def preview(jobs: Sequence[Job], *, jobs_at_once: int | None = 1, force: bool = False) -> str:
    """Return what `run` would do with each job and why, as text; nothing is started or written."""
    lines = []
    for job in jobs:
        lines.append(f"{job.notebook} {_would(job, force)}")

        known = parameters.declared(job.path)
        profile = re.findall(r" --(profile \S+)", job.resume)
        differ = [
            parameters.assignment(name, v)
            for name, v in job.values.items()
            if v != known[name].default
        ]
        lines.append(f"    {parameters.clip(', '.join([*profile, *differ]) or 'defaults', 400)}")

    slots = min(jobs_at_once or capacity(), len(jobs))
    lines.append(f"nothing was started{plan(jobs, slots, force)}")
    return "\n".join(lines)


def _would(job: Job, force: bool) -> str:
    """Return what `run` would do with the job, and why."""
    folder = newest(job)
    state = runs.status(folder) if folder else "done"
    if state.startswith("done") and (folder is None or force):
        why = "forced" if folder else why_again(job)
        return f"runs again: {why}" if why else "runs"
    does = {"done": "is skipped, done in", "running": "waits for"}.get(
        state, f"({state}) continues in"
    )
    return f"{does} {paths.short(folder)}"


def _check_writable(folder: Path) -> None:
    """Write a file into the folder and delete it; files.Unwritable where that does not go."""
    probe = files.make_folder(folder) / f".probe-{os.getpid()}"
    files.write(probe, "")
    probe.unlink()


def _remove_leftovers(notebooks: Collection[str]) -> None:
    """Remove what killed processes left in the folders of these notebooks, and old refreshes."""
    outputs = paths.outputs()
    sweep(outputs, "refresh-*")
    files.remove_partials(outputs)  # of runs that were being deleted
    for home in (outputs / notebook for notebook in notebooks):
        for place in (home, *home.glob("*/"), *home.glob("*/figures/")):
            files.remove_partials(place)
        if home.is_dir():
            _remove_empty_runs(home)


def _remove_empty_runs(home: Path) -> None:
    """Remove the folders that runners left which were killed before they wrote anything."""
    alone = files.claim(home)
    if alone is None:  # who makes a folder holds this lock
        return
    for place in home.glob("*/"):
        with contextlib.suppress(OSError):  # it is not empty
            place.rmdir()
    os.close(alone)


# ------------------------------------------------------------------ base


def make_bases(batch: Batch) -> None:
    """Make the base models that the jobs load; the program ends at once where one is there."""
    stopping = batch.workers.stopping
    for arguments in wanted_bases(
        [job for job in batch.jobs if batch.options.force or not done(job)]
    ):
        if stopping.is_set():
            return
        process = batch.workers.start("nbworkbook.base_model", *arguments, share={})
        _follow_base(batch, process.stdout)
        if process.wait() and not stopping.is_set():
            sentence = "the base model was not made; each notebook that needs it tries again"
            batch.lines.print(f"nblib: {sentence}", sys.stderr)
        process.stdout.close()
        batch.workers.live.remove(process)


def wanted_bases(jobs: Sequence[Job]) -> list[tuple[str, ...]]:
    """Return the arguments of `nbworkbook.base_model` for each base model that the jobs load."""
    wanted = {}
    for job in jobs:
        chosen = job.parameters
        if "nbworkbook.base_model" in code_hash.reached(cells(job.path)) and not chosen.get(
            "model"
        ):
            wanted[tuple(chosen.get(name, value) for name, value in BASE.items())] = None
    return list(wanted)


def _follow_base(batch: Batch, stdout: IO[bytes]) -> None:
    """Show how far the base model is, and how long it will still take, until its process ends."""
    began = time.monotonic()
    printed = None
    for line in stdout:
        if batch.workers.stopping.is_set():
            continue
        text = line.decode("utf-8", "backslashreplace").rstrip("\n")
        at = re.search(r"\bstep (\d+) of (\d+)", text)
        if at is None:
            batch.lines.print(text)
            continue

        now = time.monotonic()
        step, of = int(at[1]), int(at[2])
        batch.pace.first = (now - began) / max(1, step) * (of - step)
        batch.base = f"{text}, about {clock(batch.pace.first)} left"
        is_due = printed is None or now - printed >= BASE_EVERY
        if batch.options.detail == "all" or (is_due and not batch.lines.is_live):
            batch.lines.print(batch.base)
            printed = now
        batch.lines.draw()

    if batch.base and not batch.workers.stopping.is_set():
        batch.lines.print(f"base model: made in {clock(time.monotonic() - began)}{batch.pace}")
    batch.base = ""
    batch.pace.first = 0.0


# ------------------------------------------------------------------ claim


def claim(job: Job, force: bool, stopping: threading.Event, tell: Callable[[str], None]) -> Claim:
    """Return where the job runs from now on; wait while another process runs it."""
    home = paths.outputs() / job.notebook
    began = time.monotonic()
    while not stopping.is_set():
        waited = time.monotonic() - began
        alone = files.claim(home)  # of two that start together the second sees the first one's run
        if alone is not None:
            try:
                folder = newest(job, tell)
                facts = runs.record(folder) if folder else {}
                claimed = _claim_now(job, folder, facts, force, waited)
            finally:
                os.close(alone)
            if claimed is not None:
                return claimed
            if waited > 0.5:  # for less than that it may be somebody who asks for its status
                where = f"(pid {facts.get('runner')}, in {paths.short(folder)})"
                tell(f"[{job.notebook}] is running already {where}; waiting for it")
        stopping.wait(0.2)
    return Claim(None, None)


def _claim_now(
    job: Job, folder: Path | None, facts: dict[str, Any], force: bool, waited: float
) -> Claim | None:
    """Return the claim on the newest run, or on a fresh one; None while another process has it."""
    is_finished = facts.get("status") == "done"
    if is_finished and not force:
        return Claim(folder, None)

    lock = files.claim(folder) if folder and not is_finished else None
    why = ""
    # without its runner a kernel ends within GRACE; one that does not is left behind
    is_orphaned = waited > GRACE + 5 and not _alive(facts.get("runner", 0))
    if lock is None and (folder is None or is_finished or is_orphaned):
        why = why_again(job) if folder is None else ""
        folder = runs.new_folder(job.notebook)
        facts = {}
        lock = files.claim(folder)
    if lock is None:
        return None

    attempts = facts.get("attempts", 0) + 1
    _begin(job, folder, lock, attempts, force)
    return Claim(folder, lock, attempts, why)


def _begin(job: Job, folder: Path, lock: int, attempts: int, force: bool) -> None:
    """Write what is known of the run into its folder."""
    facts = {
        "notebook": job.notebook,
        "path": str(job.path),
        "key": job.key,
        "inputs": job.inputs,
        "status": "running",
        "runner": os.getpid(),
        "attempts": attempts,
        "started": time.time(),
        "command": job.resume,
    }
    if force:
        facts["forced"] = True
    try:
        runs.note(folder, facts)
        files.write(folder / "parameters.yaml", parameters.dump_yaml(job.parameters))
    except BaseException:
        os.close(lock)
        if not (folder / "run.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _alive(pid: int) -> bool:
    """Return whether a process with this number runs."""
    try:
        os.kill(pid, 0)
        # a killed process stays listed until its parent reads its exit code, which some never do
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or no /proc here
        return True


# ------------------------------------------------------------------ relay


def _execute(
    batch: Batch, number: int, claimed: Claim, share: dict[str, str], place: Place
) -> Outcome:
    """Execute a claimed job in a process of its own and pass on what it says."""
    job = batch.jobs[number]
    if claimed.folder is None:
        return Outcome(job.notebook, "stopped", 0.0, None)
    if claimed.lock is None:
        return Outcome(job.notebook, "skipped", 0.0, claimed.folder)

    words, theirs = os.pipe()
    with open(words, "rb") as words:
        try:
            _say_start(batch, job, claimed)
            process = _start(batch, job, claimed, share, theirs)
        finally:
            os.close(claimed.lock)
            os.close(theirs)
        listener = Listener(
            batch, job.notebook, place, prefix=f"[{job.notebook}] " if share else ""
        )
        with process.stdout, process.stdin:
            relay(process.stdout, words, listener)
            process.wait()
        batch.workers.live.remove(process)
        if listener.outcome is None:  # it was killed, and could not end what its kernel started
            end_processes_of(claimed.folder)

    crew = batch.workers.crew
    record = crew.end(listener.outcome) if crew else listener.outcome
    return _outcome(
        job, claimed.folder, record, process.returncode, batch.workers.stopping.is_set()
    )


def _say_start(batch: Batch, job: Job, claimed: Claim) -> None:
    """Print that the job starts, and where, unless the lines at the bottom show all of that."""
    is_shown = batch.lines.is_live and len(batch.jobs) > 1 and not batch.streams
    if is_shown and not (claimed.why or job.label or claimed.attempts > 1):
        return
    label = f"{job.label}: " if job.label else ""
    what = "resumes in" if claimed.attempts > 1 else "runs in"
    why = f" (runs again: {claimed.why})" if claimed.why else ""
    batch.lines.print(
        f"[{job.notebook}] {label}{what} {paths.short(claimed.folder)}{why}{batch.pace}"
    )


def _start(
    batch: Batch, job: Job, claimed: Claim, share: dict[str, str], theirs: int
) -> subprocess.Popen:
    """Return the process that executes the job and has its order; of a crew, the first one."""
    crew = batch.workers.crew
    ranked = crew.environment(0) if crew else {}
    # without a buffer the order does not wait in ours
    pipes = {"stdin": subprocess.PIPE, "bufsize": 0, "pass_fds": (claimed.lock, theirs)}
    where = share | job.environment() | ranked
    process = batch.workers.start("nbworkbook.execute", share=where, **pipes)

    order = {
        "notebook": job.notebook,
        "path": str(job.path),
        "folder": str(claimed.folder),
        "values": job.values,
        "lock": claimed.lock,
        "words": theirs,
        "timeout": batch.options.timeout,
        "resume": job.resume,
    }
    if crew:
        crew.start(process, order, batch.workers)
    with contextlib.suppress(BrokenPipeError):  # it died at once
        process.stdin.write(json.dumps(order).encode() + b"\n")
    return process


def relay(stdout: IO[bytes], words: IO[bytes], listener: "Listener") -> None:
    """Pass on what comes until the process ends, which alone holds `words`.

    Something that the notebook started may hold `stdout` for longer, and is not waited for."""
    with selectors.DefaultSelector() as pipes:
        pipes.register(stdout, selectors.EVENT_READ)
        pipes.register(words, selectors.EVENT_READ)
        has_ended = False
        while not has_ended:
            ready = [key.fileobj for key, _ in pipes.select()]
            if stdout in ready:  # also once more at the end, for what is left in it
                heard = os.read(stdout.fileno(), 2**16)
                listener.hear_bytes(heard)
                if not heard:
                    pipes.unregister(stdout)
            if words in ready:
                heard = os.read(words.fileno(), 2**16)
                listener.hear_messages(heard)
                has_ended = not heard
    listener.end_line()


class Listener:
    """What one process says: bytes that it prints, and messages, the last of them its outcome."""

    def __init__(self, batch: Batch, notebook: str, place: Place, *, prefix: str) -> None:
        self.batch = batch
        self.notebook = notebook
        self.place = place
        self.prefix = prefix
        self.outcome: dict[str, Any] | None = None  # None when the process ended without one

        self.decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
        self.unfinished = ""  # the beginning of a line
        self.torn = b""  # the beginning of a message
        self.last = ""  # what was said last

    def hear_bytes(self, heard: bytes) -> None:
        """Pass on what the process printed itself."""
        self.hear_text(self.decode(heard))

    def hear_messages(self, heard: bytes) -> None:
        """Pass on the messages that are whole now."""
        *lines, self.torn = (self.torn + heard).split(b"\n")
        for message in map(json.loads, lines):
            self.hear_text(message.get("text", ""))
            self.outcome = message.get("outcome", self.outcome)
            self._say(message)

    def hear_text(self, text: str) -> None:
        """Print the lines that are whole now."""
        if not self.batch.streams:
            return
        *lines, self.unfinished = (self.unfinished + text).split("\n")
        for line in lines:
            self.batch.lines.print(self.prefix + line)

    def end_line(self) -> None:
        """Print the line that was begun."""
        if self.unfinished:
            self.hear_text("\n")

    def _say(self, message: dict[str, Any]) -> None:
        """Show where the process is, and print what stays of that."""
        if "cell" in message or "progress" in message:
            self.place.cell = message.get("cell", self.place.cell)
            self.place.progress = message.get("progress", self.place.progress)
            self.batch.lines.draw()
        if not self.batch.streams:
            return

        text = self._worth_a_line(message)
        if not text or text == self.last:  # a picture may say what the progress said
            return
        self.end_line()
        self.last = text
        if "shown" in message:
            lines = text.split("\n")
            if len(lines) > LONGEST:
                lines[LONGEST:] = [f"... and {len(lines) - LONGEST} lines more"]
            self.batch.lines.print("\n".join(f"{self.prefix}    {line}" for line in lines))
        else:
            self.batch.lines.print(f"[{self.notebook}] {text}")

    def _worth_a_line(self, message: dict[str, Any]) -> str:
        """Return what is printed of a message; a cell sends one as it starts, one if it is slow."""
        detail = self.batch.options.detail
        if "cell" in message:
            is_wanted = message["slow"] != (detail == "all")
            return f"{message['cell']}{self.batch.pace}" if is_wanted else ""
        if "progress" in message:
            return message["progress"]
        return message.get("shown", "") if detail != "little" else ""


# ------------------------------------------------------------------ outcome


def _outcome(
    job: Job, folder: Path, record: dict[str, Any] | None, code: int, is_stopped: bool
) -> Outcome:
    """Return how the job ended; of a process that left no record, that it died."""
    if record is None:
        status = "stopped" if is_stopped else "failed"
        how = f"{status}: its process ended with code {code}"
        sentence = f"{job.notebook} {how}; resume with: {job.resume}"
        record = {"status": status, "sentence": sentence, "seconds": 0.0}
        runs.note(folder, record)
    status = record["status"]
    sentence = record["sentence"]
    if status == "failed" and record.get("unwritten"):
        status = "unwritten"
    if status == "failed" and re.search(
        r" raised \w*(Import|ModuleNotFound|Attribute)Error", sentence
    ):
        wrong = shadowing.explain(sentence, [job.path.parent])
        if wrong:
            sentence = f"{wrong.rstrip('.')}; {sentence}"
            runs.note(folder, {"sentence": sentence})
    return Outcome(job.notebook, status, record["seconds"], folder, sentence)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return what is printed at the end: a row for a single job; of several how many ended how, and
    a row for each that did not succeed."""
    rows = [["notebook", "status", "seconds", "results"]]
    for outcome in outcomes:
        if len(outcomes) == 1 or outcome.status not in ("done", "skipped"):
            results = headline(outcome.folder) if outcome.folder else ""
            rows.append([outcome.notebook, outcome.status, f"{outcome.seconds:.1f}", results])
    table = runs.columns(rows) if len(rows) > 1 else ""
    if len(outcomes) == 1:
        return table

    states = [outcome.status for outcome in outcomes]
    names = {outcome.notebook for outcome in outcomes}
    what = "notebooks" if len(names) == len(outcomes) else "runs"
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    sentence = f"{len(outcomes)} {what}: {counts}"
    return f"{table}\n\n{sentence}" if table else sentence


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 0 if all succeeded, 1 after a failure, 74 if some write failed, 130 if stopped."""
    states = {outcome.status for outcome in outcomes}
    if "stopped" in states:
        return 130
    if "unwritten" in states:
        return 74
    return 0 if states <= {"done", "skipped"} else 1


@contextlib.contextmanager
def handling(stop: Callable) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM call `stop` for a while (Python lets only the main thread say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
