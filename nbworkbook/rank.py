"""One rank of a training: what torch's launcher starts on each node, so many times as there are
processes (launch.py).

A rank starts `nbworkbook.execute`, which holds the kernel, with the environment that the launcher
gave the rank: RANK, WORLD_SIZE, MASTER_ADDR and the others, by which the kernels join one world.
Rank 0 does so as the runner, in the run's folder; another one does so in the folder `rank-K` of
that. The ranks agree through the launcher's own store:

    job K       what rank K would run: all of them must make the same run, or none starts
    order       what rank 0 runs, once it has a folder; empty where there is nothing to run
    outcome K   how rank K ended
    stop        somebody asked one of them to stop, so all do
    failed      one of them failed, so all end
    whole       how the run ended, said by rank 0: the others end with it
    beats K     a number that grows while rank K lives

They end together. If one dies or raises, the others raise in their next sum, because it is gone.
They have PATIENCE seconds to say what they met, and the sentence names the one that was first to
have a reason of its own.

Footgun: the store is a port without a password, as the connections of torch.distributed are. It
belongs into a network that one trusts.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed as dist

from nblib import files, parallel, paths
from nbworkbook import jobs, report, runner, runs
from nbworkbook.parameters import ParameterError

PATIENCE = 3  # seconds for the others to say what they met, after one failed
LEAVE = 25  # seconds for all to end after somebody asked to stop: execute.GRACE and a little
FINISH = 600  # seconds for the others to end after rank 0 is done: a last evaluation, say
# seconds in which the process that has a rank's folder must end, if its launcher was killed
GONE = 60
LOOK = 0.2  # seconds between two looks at the store
BEAT = 1  # seconds between two signs of life
SILENT = 6  # seconds without one, after which it counts as dead
GIVEN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")
GIVEN += ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
# Words of a rank that lost another one.
ECHO = re.compile(r"connection|gloo|nccl|peer|DistBackend|DistNetwork", re.IGNORECASE)
# What the loop raises on every rank when one of them was asked to stop (nblib/train.py).
AGREED = re.compile(r"raised (KeyboardInterrupt|SystemExit)")
Record = dict[str, Any]


class Task(NamedTuple):
    """What the launcher of a node gives to its ranks, as a file."""

    job: jobs.Job
    mesh: str
    processes: int  # of each node
    nodes: int
    wait: float  # seconds until all ranks must be there
    launcher: int  # the process that started the ranks
    how: dict[str, Any]  # options of runner.run

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        job = self.job._asdict() | {"path": str(self.job.path)}
        return json.dumps(self._asdict() | {"job": job})

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Return the task that was written so."""
        facts = json.loads(text)
        job = jobs.Job(**facts["job"])
        return cls(**facts | {"job": job._replace(path=Path(job.path))})


class Ranks:
    """This rank among the others. On rank 0 it is what the runner knows as its crew."""

    def __init__(self, task: Task):
        self.task = task
        self.stopping = threading.Event()
        self.has_ordered = False
        self.is_over = False
        self.beats: dict[int, int] = {}  # of other ranks
        self.last_beat: dict[int, float] = {}

        # The launcher's variables are for the kernel. Whatever else this process starts is no part
        # of the world.
        names = [name for name in os.environ if name in GIVEN or name.startswith("TORCHELASTIC_")]
        self.given = {name: os.environ.pop(name) for name in names}
        self.rank = int(self.given["RANK"])
        self.node = int(self.given["GROUP_RANK"])
        self.world = int(self.given["WORLD_SIZE"])
        self.is_first_of_node = self.given["LOCAL_RANK"] == "0"

        store = dist.TCPStore(
            self.given["MASTER_ADDR"],
            int(self.given["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=task.wait),
        )
        self.store = dist.PrefixStore("nblib", store)

    # ------------------------------------------------------------------ the store

    def put(self, name: str, value: Any) -> None:
        """Store a value of JSON. Where the store is gone, nobody is left to read it."""
        with contextlib.suppress(dist.DistError):
            self.store.set(name, json.dumps(value))

    def get(self, name: str) -> Any:
        """Return a stored value, or None where it is not there yet.

        DistError where the store is gone.
        """
        if not self.store.check([name]):
            return None
        return json.loads(self.store.get(name))

    def wait_for(self, name: str, seconds: float) -> Any:
        """Return a stored value as soon as it is there, or None after so many seconds, or when the
        store is gone.
        """
        until = time.monotonic() + seconds
        try:
            while (value := self.get(name)) is None and time.monotonic() < until:
                time.sleep(LOOK)
        except dist.DistError:
            return None
        return value

    def agree(self) -> None:
        """Compare what the ranks would run; ParameterError on all of them where they differ, or one
        does not come.
        """
        task = self.task
        mine = {"node": self.node, "key": task.job.key, "inputs": task.job.inputs}
        mine |= {"processes": task.processes, "nodes": task.nodes, "mesh": task.mesh}
        self.put(f"job {self.rank}", mine)
        first = None
        for rank in range(self.world):
            other = self.wait_for(f"job {rank}", task.wait)
            if other is None:
                raise ParameterError(
                    f"The nodes do not train together: rank {rank} did not come in {task.wait:g} s."
                )
            first = first or other
            if problem := difference(first, other):
                raise ParameterError(f"The nodes do not train together: {problem}.")

    def watch(self) -> None:
        """Stop this rank when another one was asked to stop or failed, or when the launcher is
        gone.
        """
        while not self.stopping.wait(LOOK):
            try:
                is_asked = os.getppid() != self.task.launcher or self.get("stop") is not None
                has_failed = self.get("failed") is not None
            except dist.DistError:  # the launcher of node 0 is gone
                is_asked = True
                has_failed = False
            if self.is_over:
                return
            if has_failed:
                # First this rank may say what it met. Then it may wait for the other for ever: the
                # second signal kills.
                time.sleep(PATIENCE)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(LOOK)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if is_asked:
                os.kill(os.getpid(), signal.SIGTERM)
                return
        self.put("stop", True)

    def _tell_outcome(self, outcome: Record) -> None:
        """Store how this rank ended; the others follow one that failed."""
        self.is_over = True
        self.put(f"outcome {self.rank}", outcome)
        if outcome["status"] == "failed" and not AGREED.search(outcome["sentence"]):
            self.put("failed", self.rank)

    def beat(self) -> None:
        """Count up in the store for as long as this rank lives."""
        with contextlib.suppress(dist.DistError):  # the launcher is gone
            while True:
                self.store.add(f"beats {self.rank}", 1)
                time.sleep(BEAT)

    def is_silent(self, rank: int) -> bool:
        """Return whether another rank gave no sign of life for some seconds in which this one
        looked.
        """
        now = time.monotonic()
        beats = self.store.add(f"beats {rank}", 0)
        if beats != self.beats.get(rank):
            self.beats[rank] = beats
            self.last_beat[rank] = now
        return now - self.last_beat[rank] > SILENT

    # ---------------------------------------------------------------- rank 0: what the runner calls

    def environment(self, _: int = 0) -> dict[str, str]:
        """Return the variables of a kernel that joins this world."""
        cores = max(1, len(os.sched_getaffinity(0)) // self.task.processes)
        threads = os.environ.get("OMP_NUM_THREADS", str(cores))
        return {"OMP_NUM_THREADS": threads, parallel.MESH: self.task.mesh} | self.given

    def start(self, _: Any, order: dict[str, Any], workers: runner.Workers) -> None:
        """Tell the others what the process of rank 0 was told."""
        self.order = order
        self.stopping = workers.stopping
        self.has_ordered = True
        self.put("order", order)

    def end(self, record: Record | None) -> Record | None:
        """Return the record of the whole run, after the process of rank 0 ended with this one."""
        notebook = self.task.job.notebook
        self._tell_outcome(record or self._killed())
        outcomes = self._outcomes()

        # Who lost another one says so in words of the network; the cause is a rank with a reason of
        # its own.
        failed = {}
        for rank, outcome in outcomes.items():
            if outcome["status"] == "failed" and not AGREED.search(outcome["sentence"]):
                failed[rank] = outcome
        causes = {rank: each for rank, each in failed.items() if not ECHO.search(each["sentence"])}

        whole = record
        if causes or (failed and not self.stopping.is_set()):
            rank, cause = min(
                (causes or failed).items(), key=lambda each: each[1].get("finished", 0.0)
            )
            where = f" failed on rank {rank} of {self.world}: "
            sentence = cause["sentence"].replace(" failed: ", where, 1)
            if "resume with" not in sentence:
                sentence += f"; resume with: {self.task.job.resume}"
            whole = {"seconds": 0.0} | (record or {}) | {"status": "failed", "sentence": sentence}
        elif record and record["status"] == "failed" and 0 not in failed:
            kept = f"what it saved is kept, continue with: {self.task.job.resume}"
            sentence = f"{notebook} was stopped, as another rank was asked to stop; {kept}"
            whole = record | {"status": "stopped", "sentence": sentence}
        if whole is not record:
            runs.note(Path(self.order["folder"]), whole)
        self.put("whole", whole or self._killed())
        return whole

    def _outcomes(self) -> dict[int, Record]:
        """Return how the ranks ended, as far as they say so in time."""
        began = time.monotonic()
        outcomes: dict[int, Record] = {}
        while True:
            try:
                for rank in range(self.world):
                    outcome = self.get(f"outcome {rank}")
                    if outcome is None and rank > 0 and self.is_silent(rank):
                        outcome = self._killed()
                    if outcome is not None:
                        outcomes[rank] = outcome
            except dist.DistError:
                return outcomes

            allowed = FINISH
            if any(outcome["status"] == "failed" for outcome in outcomes.values()):
                allowed = PATIENCE
            elif self.stopping.is_set():
                allowed = LEAVE
            if len(outcomes) == self.world or time.monotonic() - began > allowed:
                return outcomes
            time.sleep(LOOK)

    # ------------------------------------------------------------------ the other ranks

    def follow(self) -> int:
        """Execute the notebook as rank 0 does, in a folder beside, and return the exit code."""
        order = self._wait_for_order()
        if not order:
            return 0

        # The folder is this rank's own. A process of a killed launcher may have it for some
        # seconds.
        folder = files.make_folder(Path(order["folder"]) / f"rank-{self.rank}")
        lock = _claim(folder)
        words, theirs = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "nbworkbook.execute"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(lock, theirs),
            # a Ctrl-C in the terminal reaches the launcher, which passes it on once
            start_new_session=True,
            env=os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"} | self.environment(),
        )
        os.close(theirs)
        os.close(lock)

        def stop(*_: Any) -> None:
            self.stopping.set()
            process.send_signal(signal.SIGINT)

        with runner.handling(stop):
            if self.stopping.is_set():  # asked before there was a process
                process.send_signal(signal.SIGINT)
            told = order | {"folder": str(folder), "words": theirs, "lock": lock}
            process.stdin.write(json.dumps(told).encode() + b"\n")
            self._say_of_node(
                f"ranks of node {self.node} of {self.task.nodes} train in "
                f"{paths.short(folder.parent)}"
            )
            outcome = self._read(words)
            process.wait()

            # It ends with the others: torch's launcher ends all ranks of a node when one of them
            # fails.
            self._tell_outcome(outcome)
            patience = FINISH if outcome["status"] == "done" else LEAVE
            whole = self._wait_for_whole(patience) or outcome
        self._say_of_node(whole["status"])
        if whole.get("unwritten") and whole["status"] == "failed":
            return 74
        return {"done": 0, "stopped": 130}.get(whole["status"], 1)

    def _wait_for_order(self) -> dict[str, Any]:
        """Return what rank 0 runs; nothing where it has nothing to run, or is gone."""
        with runner.handling(lambda *_: self.stopping.set()):
            while not self.stopping.is_set():
                try:
                    order = self.get("order")
                except dist.DistError:
                    return {}
                if order is not None:
                    return order
                time.sleep(LOOK)
        return {}

    def _wait_for_whole(self, seconds: float) -> Record | None:
        """Return how the run ended, as rank 0 says; None where it does not in time, or is dead."""
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until and not self.is_silent(0):
                whole = self.get("whole")
                if whole is not None:
                    return whole
                time.sleep(LOOK)
        except dist.DistError:  # the launcher of node 0 is gone
            pass
        return None

    def _read(self, words: int) -> Record:
        """Return the outcome that `nbworkbook.execute` writes into its pipe as its last line."""
        outcome = self._killed()
        with open(words, "rb") as lines:
            for line in lines:
                outcome = json.loads(line).get("outcome", outcome)
        return outcome

    def _killed(self) -> Record:
        """Return the outcome of a rank that left none."""
        return {
            "status": "failed",
            "sentence": f"{self.task.job.notebook} failed: its process was killed",
        }

    def _say_of_node(self, text: str) -> None:
        """Print a line on a node where rank 0 is not."""
        if self.node > 0 and self.is_first_of_node:
            print(f"[{self.task.job.notebook}] {text}", flush=True)


def difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Return in what another rank's job is not that of rank 0, in a few words; empty where it is
    the same.
    """
    node = other["node"]
    if other["key"] != first["key"]:
        why = jobs.why(first["inputs"], other["inputs"]) or "its inputs"
        return f"node {node} would make another run than node 0: {why}"
    for name in ("processes", "nodes", "mesh"):
        if other[name] != first[name]:
            return f"{name} is {first[name]} on node 0 and {other[name]} on node {node}"
    return ""


def finish(outcomes: Sequence[runner.Outcome]) -> int:
    """Print how the run ended, write the report, and return the exit code."""
    code = runner.exit_code(outcomes)
    print(f"\n{runner.summary(outcomes)}", flush=True)
    if code != 130:  # whoever asked all to end waits for that, and pages take seconds
        print(f"\nreport: {report.write()}", flush=True)
    return code


def _claim(folder: Path) -> int:
    """Return the lock on a rank's folder, after waiting for a process that was left in it."""
    until = time.monotonic() + GONE
    while (lock := files.claim(folder)) is None:
        if time.monotonic() > until:
            raise ParameterError(f"{folder} is in use by a process that does not end.")
        time.sleep(LOOK)
    return lock


def main() -> int:
    """Be the rank that the launcher's environment names, and return the exit code."""
    ranks = Ranks(Task.from_json(Path(sys.argv[1]).read_text()))
    try:
        ranks.agree()
        threading.Thread(target=ranks.watch, daemon=True).start()
        threading.Thread(target=ranks.beat, daemon=True).start()
        if ranks.rank > 0:
            return ranks.follow()

        try:
            outcomes = runner.run([ranks.task.job], crew=ranks, **ranks.task.how)
        finally:
            if not ranks.has_ordered:  # done already, or asked to stop before it began
                ranks.put("order", {})
        return finish(outcomes)
    except (ParameterError, files.Unreadable, files.Unwritable) as error:
        if ranks.is_first_of_node:
            print(f"nblib: {error}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
