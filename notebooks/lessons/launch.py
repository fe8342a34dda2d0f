"""`nblib train`: one notebook in several processes, which torch's engines make into one training (nblib/parallel.py).

Each process executes the notebook's code in a kernel of its own, with the environment that torchrun would give it.
Rank 0 is the run as anybody knows it: its folder, its progress, its page. The others have a folder each inside of that
one, `rank-1` and so on, with the page that they executed and nothing that another one reads. Checkpoints are rank 0's.
A run has the same key whatever the number of processes, so another number goes on where one stopped.

They end together. Asked to stop, all end after the step in hand. If one dies or raises, the others wait for it in a
sum that never comes, or raise because it is gone: they get PATIENCE to tell, are ended, and the sentence names the one
that was first to have a reason of its own.

With `--nodes` the same command is given on each of several machines, with its `--node`. The launchers meet (nodes.py),
node 0's does all of the above for the ranks of all, and the others start their ranks and tell how they ended. They see
one file system, as checkpoints and pages lie in one folder.

Footgun: `rows` are those of all processes together, and each takes its part. More processes make no larger batch.
"""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGINT
from typing import Any, NamedTuple

from lessons import nodes as meeting
from nblib import files, parallel, paths
from nblib.run import jobs, report, runner, runs
from nblib.run.parameters import ParameterError, declared

PATIENCE = 3  # seconds for the others to tell what they met, after one failed
GONE = 60  # seconds for a process whose launcher was killed
LEAVE = 7  # seconds for all to end, after somebody asked to stop
ECHO = re.compile(r"connection|gloo|nccl|peer|DistBackend|DistNetwork", re.IGNORECASE)  # words of one who lost another


def plan(
    notebook: str, processes: int, *, overrides: Sequence[str], nodes: int = 1, **options: Any
) -> tuple[jobs.Job, str]:
    """The job and its mesh; ParameterError where they do not fit together."""
    name = jobs.resolve(notebook)
    own = "mesh" in declared(paths.notebooks() / f"{name}.ipynb")
    chosen = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == "mesh"]
    (job,) = jobs.plan([name], overrides=[o for o in overrides if own or not o.startswith("mesh=")], **options)
    mesh = str(job.parameters["mesh"]) if own else chosen[-1] if chosen else "auto"
    world, before = processes * nodes, os.environ.get("LOCAL_WORLD_SIZE")
    try:
        os.environ["LOCAL_WORLD_SIZE"] = str(processes)  # as in each of the processes: hsdp's groups are nodes
        parallel.check(mesh, world)
    except ValueError as error:
        raise ParameterError(str(error)) from None
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        os.environ |= {"LOCAL_WORLD_SIZE": before} if before else {}
    rows, cards = job.parameters.get("rows"), runner.gpus()
    if isinstance(rows, int) and rows < world:
        raise ParameterError(f"rows = {rows}: fewer than the {world} processes that share them")
    if cards and processes > len(cards) and job.parameters.get("device") != "cpu":
        raise ParameterError(f"processes = {processes}: one drives one card, and {len(cards)} are here; -p device=cpu")
    command = job.resume.replace("nblib run", "nblib train", 1) + f" --processes {processes}"
    return job._replace(resume=command + (f" -p mesh={mesh}" if chosen and not own else "")), mesh


def main(options: Namespace, **how: Any) -> int:
    """What the command line does; its exit code."""
    given = {"overrides": options.parameters, "profile": options.profile, "files": options.files}
    count, processes = options.nodes, options.processes
    job, mesh = plan(options.notebook, processes, nodes=count, **given)
    crew = Crew(processes, mesh) if processes > 1 else None
    if count > 1:
        place, node = meeting.address(options.rendezvous), meeting.number(options.node, count)
        job = job._replace(resume=f"{job.resume} --nodes {count} --node {node} --rendezvous {options.rendezvous}")
        mine = {"node": node, "processes": processes, "nodes": count, "mesh": mesh}
        mine |= {"key": job.key, "inputs": job.inputs}
        crew = Crew(processes, mesh, nodes=count, node=node, host=place[0])
        if node:
            return visit(job, crew, meeting.visit(place, wait=options.wait, mine=mine))
        crew.lines = meeting.host(place, count, wait=options.wait, mine=mine)
    outcomes = []
    try:
        outcomes = runner.run([job], crew=crew, **how)
    finally:
        for line in crew.lines.values() if crew else ():
            line.send(over=[outcome.status for outcome in outcomes])
            line.close()
    options.ran = True
    code = runner.exit_code(outcomes)
    print(f"\n{runner.summary(outcomes)}")
    if code != 130:  # whoever asked all to end waits for that, and pages take seconds
        print(f"\nreport: {report.write()}")
    return code


def visit(job: jobs.Job, crew: "Crew", line: meeting.Line) -> int:
    """Another node than the first: its ranks, until node 0 says how the run ended; the exit code."""
    first = meeting.first(line)
    workers, ended = runner.Workers(), [first.get("over", ["failed"])]
    if "order" not in first:
        print(f"[{job.notebook}] {', '.join(ended[0]) or 'failed'} on node 0, before this one had anything to do")
        return 0 if ended[0] in (["done"], ["skipped"]) else 1
    order = first["order"]
    where = paths.short(Path(order["folder"]))
    print(f"[{job.notebook}] node {crew.node} of {crew.nodes}: ranks {', '.join(map(str, crew.ranks))} in {where}")

    def listen() -> None:
        for message in line.messages():
            process = crew.processes.get(message.get("signal"))
            if process is not None:
                process.send_signal(SIGINT)
            if "over" in message:
                ended[0] = message["over"]
                return
        print(f"nblib: node 0 is gone; its run is in {where}", file=sys.stderr, flush=True)
        crew.end_in(0)

    with runner.handling(lambda *_: line.send(stop=True)):  # node 0 asks all of them
        crew.tell = lambda rank, record: line.send(rank=rank, record=record)
        crew.begin(crew.ranks, order | {"path": str(job.path)}, workers)
        listener = threading.Thread(target=listen)
        listener.start()
        for thread in (*crew.threads, listener):
            thread.join()
    print(f"[{job.notebook}] {', '.join(ended[0])}", flush=True)
    return {"done": 0, "stopped": 130}.get(ended[0][0] if ended[0] else "", 1)


class Elsewhere(NamedTuple):
    """A process of another node, which its launcher ends for us."""

    line: meeting.Line
    rank: int

    def send_signal(self, _: int) -> None:
        self.line.send(signal=self.rank)


class Crew:
    """The processes of a run beside its first one."""

    def __init__(self, processes: int, mesh: str, *, nodes: int = 1, node: int = 0, host: str = "127.0.0.1"):
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        cores = max(1, len(os.sched_getaffinity(0)) // processes)
        self.world, self.nodes, self.node = processes * nodes, nodes, node
        self.ranks = range(processes * node, processes * (node + 1))
        self.lock, self.ended_by_us = threading.Lock(), False
        ours = {"WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": host}
        wishes = {"OMP_NUM_THREADS": cores, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # DDP warns of what we do on purpose
        self.common = {k: os.environ.get(k, str(v)) for k, v in wishes.items()} | {parallel.MESH: mesh}
        self.common |= {name: str(value) for name, value in ours.items()}
        self.processes: dict[int, Any] = {}
        self.endings: list[tuple[int, dict]] = []  # (rank, record) of those that ended, in this order
        self.lines: dict[int, meeting.Line] = {}  # to other nodes
        self.threads: list[threading.Thread] = []
        self.tell: Callable[[int, dict], None] = lambda rank, record: None  # of one that ended

    def environment(self, rank: int) -> dict[str, str]:
        place = {"RANK": rank, "LOCAL_RANK": rank - self.ranks[0], "MASTER_PORT": self.port}
        return self.common | {name: str(value) for name, value in place.items()}

    def start(self, first: Any, order: dict, workers: runner.Workers) -> None:
        """All but the first, which runs already; `order` is what it was told."""
        self.processes[0] = first
        for node, line in self.lines.items():
            ranks = [rank + node * len(self.ranks) for rank in self.ranks]
            self.processes |= {rank: Elsewhere(line, rank) for rank in ranks}
            self.threads.append(threading.Thread(target=self._listen, args=(node, line, ranks)))
        self.begin(self.ranks[1:], order, workers)
        for line in self.lines.values():
            line.send(order=order | {"port": self.port})
        threading.Thread(target=self._leave_when_asked, daemon=True).start()

    def begin(self, ranks: Sequence[int], order: dict, workers: runner.Workers) -> None:
        """Processes of this machine, each with a folder within the run's."""
        self.order, self.workers, self.port = order, workers, order.get("port", self.port)
        listening, self.threads = self.threads, []
        for rank in ranks:
            words, theirs = os.pipe()
            folder = files.make_folder(Path(order["folder"]) / f"rank-{rank}")
            lock = _claimed(folder) if self.node else order["lock"]
            pipes = {"stdin": subprocess.PIPE, "bufsize": 0, "pass_fds": (lock, theirs)}
            process = workers.start("nblib.run.execute", share=self.environment(rank), **pipes)
            os.close(theirs), self.node and os.close(lock)
            self.processes[rank] = process
            told = order | {"folder": str(folder), "words": theirs, "lock": lock}
            process.stdin.write(json.dumps(told).encode() + b"\n")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            self.threads.append(threading.Thread(target=self._follow, args=(rank, words)))
        self.threads += listening
        for thread in self.threads:
            thread.start()

    def _follow(self, rank: int, words: int) -> None:
        record = {"status": "failed", "sentence": f"{self.order['notebook']} failed: its process was killed"}
        with open(words, "rb") as lines:
            for line in lines:
                record = json.loads(line).get("outcome", record)
        self.processes[rank].wait()
        self._note(rank, record)

    def _listen(self, node: int, line: meeting.Line, ranks: Sequence[int]) -> None:
        """What another node tells of its ranks, until all of them ended."""
        for message in line.messages():
            if message.get("stop"):
                self.workers.stop()
            if message.get("rank") in self.processes:
                self._note(message["rank"], message["record"])
            if not set(ranks) & self.processes.keys():
                return
        gone = {"status": "failed", "sentence": f"{self.order['notebook']} failed: node {node} of {self.nodes} is gone"}
        for rank in set(ranks) & self.processes.keys():
            self._note(rank, gone)

    def _note(self, rank: int, record: dict) -> None:
        with self.lock:
            del self.processes[rank]
            if not self.ended_by_us:
                self.endings.append((rank, record))
            if record["status"] != "done" and len(self.endings) == 1 and not self.node:
                threading.Thread(target=self.end_in, args=(PATIENCE,)).start()
        self.tell(rank, record)

    def _leave_when_asked(self) -> None:
        self.workers.stopping.wait()
        for process in [p for p in self.processes.values() if isinstance(p, Elsewhere)]:
            process.send_signal(SIGINT)  # those of here were told by `workers`
        self.end_in(LEAVE)

    def end_in(self, seconds: float) -> None:
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


def _claimed(folder: Path) -> int:
    """The lock on a rank's folder; what was killed before may hold it for some seconds."""
    until = time.monotonic() + GONE
    while (lock := files.claim(folder)) is None:
        if time.monotonic() > until:
            raise ParameterError(f"{folder} is in use by a process that does not end.")
        time.sleep(0.2)
    return lock
