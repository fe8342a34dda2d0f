"""`nblib train`: one notebook in several processes, which torch's engines make into one training (nblib/parallel.py).

Each process executes the notebook's code in a kernel of its own, with the environment that torchrun would give it.
Rank 0 is the run as anybody knows it: its folder, its progress, its page. The others have a folder each inside of that
one, `rank-1` and so on, with the page that they executed and nothing that another one reads. Checkpoints are rank 0's.
A run has the same key whatever the number of processes, so another number goes on where one stopped.

They end together. Asked to stop, all end after the step in hand. If one dies or raises, the others wait for it in a
sum that never comes, or raise because it is gone: they get PATIENCE to tell, are ended, and the sentence names the one
that was first to have a reason of its own.

Footgun: `rows` are those of all processes together, and each takes its part. More processes make no larger batch.
"""

import json
import os
import re
import socket
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT
from typing import Any

from nblib import files, parallel, paths
from nblib.run import jobs, report, runner, runs
from nblib.run.parameters import ParameterError, declared

PATIENCE = 3  # seconds for the others to tell what they met, after one failed
LEAVE = 7  # seconds for all to end, after somebody asked to stop
ECHO = re.compile(r"connection|gloo|nccl|peer|DistBackend|DistNetwork", re.IGNORECASE)  # words of one who lost another


def plan(notebook: str, processes: int, *, overrides: Sequence[str], **options: Any) -> tuple[jobs.Job, str]:
    """The job and its mesh; ParameterError where they do not fit together."""
    name = jobs.resolve(notebook)
    own = "mesh" in declared(paths.notebooks() / f"{name}.ipynb")
    chosen = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == "mesh"]
    (job,) = jobs.plan([name], overrides=[o for o in overrides if own or not o.startswith("mesh=")], **options)
    mesh = str(job.parameters["mesh"]) if own else chosen[-1] if chosen else "auto"
    try:
        parallel.check(mesh, processes)
    except ValueError as error:
        raise ParameterError(str(error)) from None
    rows, cards = job.parameters.get("rows"), runner.gpus()
    if isinstance(rows, int) and rows < processes:
        raise ParameterError(f"rows = {rows}: fewer than the {processes} processes that share them")
    if cards and processes > len(cards) and job.parameters.get("device") != "cpu":
        raise ParameterError(f"processes = {processes}: one drives one card, and {len(cards)} are here; -p device=cpu")
    command = job.resume.replace("nblib run", "nblib train", 1) + f" --processes {processes}"
    return job._replace(resume=command + (f" -p mesh={mesh}" if chosen and not own else "")), mesh


def main(options: Namespace, **how: Any) -> int:
    """What the command line does; its exit code."""
    given = {"overrides": options.parameters, "profile": options.profile, "files": options.files}
    job, mesh = plan(options.notebook, options.processes, **given)
    outcomes = runner.run([job], crew=Crew(options.processes, mesh) if options.processes > 1 else None, **how)
    options.ran = True
    code = runner.exit_code(outcomes)
    print(f"\n{runner.summary(outcomes)}")
    if code != 130:  # whoever asked all to end waits for that, and pages take seconds
        print(f"\nreport: {report.write()}")
    return code


class Crew:
    """The processes of a run beside its first one."""

    def __init__(self, processes: int, mesh: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cores = max(1, len(os.sched_getaffinity(0)) // processes)
        self.world, self.lock, self.ended_by_us = processes, threading.Lock(), False
        ours = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        wishes = {"OMP_NUM_THREADS": cores, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # DDP warns of what we do on purpose
        self.common = {k: os.environ.get(k, str(v)) for k, v in wishes.items()} | {parallel.MESH: mesh}
        self.common |= {name: str(value) for name, value in ours.items()}
        self.processes: dict[int, Any] = {}
        self.endings: list[tuple[int, dict]] = []  # (rank, record) of those that ended, in this order

    def environment(self, rank: int) -> dict[str, str]:
        return self.common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}

    def start(self, first: Any, order: dict, workers: runner.Workers) -> None:
        """All but the first, which runs already; `order` is what it was told."""
        self.order, self.workers, self.processes[0] = order, workers, first
        self.threads = []
        for rank in range(1, self.world):
            words, theirs = os.pipe()
            pipes = {"stdin": subprocess.PIPE, "bufsize": 0, "pass_fds": (order["lock"], theirs)}
            process = workers.start("nblib.run.execute", share=self.environment(rank), **pipes)
            os.close(theirs)
            self.processes[rank] = process
            folder = files.make_folder(Path(order["folder"]) / f"rank-{rank}")
            process.stdin.write(json.dumps(order | {"folder": str(folder), "words": theirs}).encode() + b"\n")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            self.threads.append(threading.Thread(target=self._follow, args=(rank, words)))
            self.threads[-1].start()
        threading.Thread(target=self._leave_when_asked, daemon=True).start()

    def _follow(self, rank: int, words: int) -> None:
        record = {"status": "failed", "sentence": f"{self.order['notebook']} failed: its process was killed"}
        with open(words, "rb") as lines:
            for line in lines:
                record = json.loads(line).get("outcome", record)
        self.processes[rank].wait()
        self._note(rank, record)

    def _note(self, rank: int, record: dict) -> None:
        with self.lock:
            del self.processes[rank]
            if not self.ended_by_us:
                self.endings.append((rank, record))
            if record["status"] != "done" and len(self.endings) == 1:
                threading.Thread(target=self._end_in, args=(PATIENCE,)).start()

    def _leave_when_asked(self) -> None:
        self.workers.stopping.wait()
        self._end_in(LEAVE)

    def _end_in(self, seconds: float) -> None:
        until = time.monotonic() + (LEAVE if self.workers.stopping.is_set() else seconds)
        while self.processes and time.monotonic() < until:
            time.sleep(0.1)
        with self.lock:
            self.ended_by_us = True
            left = list(self.processes.values())
        for _ in range(2):  # the second time kills at once
            for process in left:
                process.send_signal(SIGINT)
            time.sleep(0.3)

    def end(self, record: dict | None) -> dict | None:
        """The record of the whole run, after the first process ended with this one."""
        killed = {"status": "failed", "sentence": f"{self.order['notebook']} failed: its process was killed"}
        self._note(0, record or killed)
        for thread in self.threads:
            thread.join()
        for process in set(self.workers.live):
            if process.poll() is not None:
                process.stdout.close(), process.stdin and process.stdin.close()
                self.workers.live.discard(process)
        failed = [(rank, each) for rank, each in self.endings if each["status"] == "failed"]
        if not failed or self.workers.stopping.is_set():
            return record
        rank, first = min(failed, key=lambda each: bool(ECHO.search(each[1]["sentence"])))
        sentence = first["sentence"].replace(" failed: ", f" failed on rank {rank} of {self.world}: ", 1)
        if "resume with" not in sentence:
            sentence += f"; resume with: {self.order['resume']}"
        whole = (record or {"seconds": 0.0}) | {"status": "failed", "sentence": sentence}
        runs.note(Path(self.order["folder"]), whole)
        return whole
