"""Kill a training in two processes at random moments, give the same command again, and compare with
a straight run.

    python tests/kill_worlds.py --kills 20 --seed 0 [--mesh fsdp] [--at-once]

Each run is killed up to three times by SIGKILL: the launcher, a rank, its kernel or the process
that holds that kernel, drawn by the seed. The moment is drawn between the first step that is
printed and the last, or it is the next one at which a checkpoint is being written: in the
background, or with `--at-once` between two steps. Then the same command runs to its end. Prints a
line per kill and one JSON line; exits with 1 if a run could not go on, ended more than 2e-5 from
the straight run of one process, found a checkpoint that is not whole, or left a process behind.

Footgun: a kill before the first checkpoint is a start from nothing. The lines say at which step a
run went on.
"""

import argparse
import json
import os
import queue
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import nblib, start, write

PARAMETERS = """steps: int = 8  # optimizer steps [1 .. 1000]
rows: int = 4  # rows of a batch, of all processes together [1 .. 64]
pause: float = 0.0  # seconds after each step [0 .. 10]
background: bool = True  # write checkpoints while the steps go on"""
OPENS = """import os, time, torch
from nblib import models, runtime, text, train
from nbworkbook import runs
run = runs.begin("00_world", globals())
machine = runtime.pick("cpu", "fp32")
runtime.seed_all(0)
model = models.tiny(256, hidden=32, layers=2, heads=2)
stream = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % 256
print("world", runtime.world())"""
TRAINS = """def tell(record):
    print("step", record["step"], "pid", os.getpid(), flush=True)
    time.sleep(pause)
records = train.fit(model, text.Batches(stream, rows=rows, length=32), train.adamw(model, lr=1e-2), total=steps,
    accumulate=2, machine=machine, on_step=tell,
    checkpoints=train.Checkpoints(run.dir / "checkpoints", every=2, background=background))"""
ENDS = """run.result(losses=[r["loss"] for r in records], loss=records[-1]["loss"])
print("loss", train.evaluate(model, stream[:64].view(2, 32), machine=machine)["loss"])
run.finish()"""
STEPS, PAUSE = 20, 0.15
GONE = 30  # seconds in which nothing of a killed run may be left; a launcher that is asked has ten


def open_workbook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_notebooks.move_workbook(folder, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    write("00_world", OPENS, TRAINS, ENDS, parameters=PARAMETERS)
    return folder


def run_folder(workbook: Path) -> Path:
    (folder,) = (workbook / "outputs" / "00_world").glob("2*/")
    return folder


def losses(workbook: Path) -> list[float]:
    return json.loads((run_folder(workbook) / "result.json").read_text())["losses"]


def members(name: str, value: str) -> list[int]:
    """The processes whose environment has this variable with this value."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{name}={value}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def kernels(folder: Path) -> list[int]:
    """The processes that were told to work in this folder."""
    return members("NBLIB_RUN_DIR", str(folder))


class Command:
    """`nblib train ...` whose lines are read while it runs."""

    def __init__(self, *arguments: str):
        self.process, self.lines, self.queue = start(*arguments), [], queue.Queue()
        self.errors: list[str] = []
        self.readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors)),
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip())
            self.queue.put(line.rstrip())

    def until(self, pattern: str, seconds: float = 90) -> str | None:
        """The next line that has this, or None if the command ended before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                line = self.queue.get(timeout=0.05)
            except queue.Empty:
                if self.process.poll() is not None and self.queue.empty():
                    return None
                continue
            if re.search(pattern, line):
                return line
        raise TimeoutError(
            f"no line with {pattern!r} in {seconds} s: {self.lines[-5:]} {self.errors[-5:]}"
        )

    def end(self, seconds: float = 90) -> int:
        self.process.wait(seconds)
        for reader in self.readers:
            reader.join()
        return self.process.returncode


def victims(workbook: Path, command: Command) -> dict[str, int]:
    """Return who can be hit: the launcher, and of each rank itself, its kernel and the kernel's
    holder.
    """
    folder, store = run_folder(workbook), str(workbook / "outputs")
    found = {"the launcher": command.process.pid}
    for rank, place in ((0, folder), (1, folder / "rank-1")):
        for pid in kernels(place):
            found[f"rank {rank}'s kernel"] = pid
    ours = set(members("NBLIB_OUTPUTS", store)) & set(members("WORLD_SIZE", "2"))
    for pid in ours - set(found.values()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        rank = next(r for r in (0, 1) if pid in members("RANK", str(r)))
        if b"nbworkbook.execute" in words:
            found[f"rank {rank}'s holder"] = pid
        elif b"nbworkbook.rank" in words:
            found[f"rank {rank}"] = pid
    return found


def gone(workbook: Path) -> float | None:
    """Seconds until no process of this workbook is left, or None."""
    began = time.monotonic()
    while time.monotonic() - began < GONE:
        if not members("NBLIB_OUTPUTS", str(workbook / "outputs")):
            return time.monotonic() - began
        time.sleep(0.1)
    return None


def being_written(workbook: Path) -> bool:
    return any((run_folder(workbook) / "checkpoints").glob(".step-*.partial"))


def hit(workbook: Path, command: Command, draw: random.Random) -> dict | None:
    """One kill at a drawn moment, or None where the run ended before."""
    resumed = None
    line = command.until(r"resumed at step|step \d+ pid|^step 1 ")
    if line and "resumed" in line:
        resumed = int(re.search(r"at step (\d+)", line)[1])
        line = command.until(r"step \d+ pid")
    if line is None:
        return None
    at_a_write = draw.random() < 0.5
    if not at_a_write:
        time.sleep(draw.uniform(0, STEPS * PAUSE * 1.2))
    if command.process.poll() is not None:
        return None
    named = victims(workbook, command)
    name = draw.choice(sorted(named))
    while at_a_write and not being_written(workbook) and command.process.poll() is None:
        time.sleep(0.001)
    try:
        os.kill(named[name], signal.SIGKILL)
    except ProcessLookupError:
        return None
    seconds = gone(workbook)
    writing = being_written(workbook)  # nobody is there to end it
    command.end()
    last = [int(n) for n in re.findall(r"step (\d+) pid", "\n".join(command.lines))]
    facts = {
        "hit": name,
        "resumed at": resumed,
        "after step": max(last, default=0),
        "gone after": seconds,
    }
    return facts | {"while writing": writing}


def campaign(folder: Path, kills: int, seed: int, mesh: str, *, background: bool = True) -> dict:
    draw, hits, runs, apart, cannot, damaged = random.Random(seed), [], 0, [], [], 0
    arguments = [
        "train",
        "00",
        "-p",
        f"steps={STEPS}",
        "-p",
        f"pause={PAUSE}",
        "-p",
        f"background={str(background).lower()}",
        "--processes",
        "2",
        "-p",
        f"mesh={mesh}",
    ]
    with pytest.MonkeyPatch.context() as patch:
        straight = open_workbook(_new(folder / "straight"), patch)
        code, _, err = nblib("run", "00", "-p", f"steps={STEPS}")
        assert code == 0, err
        expected = losses(straight)
    while len(hits) < kills:
        runs += 1
        with pytest.MonkeyPatch.context() as patch:
            workbook = open_workbook(_new(folder / f"run-{runs}"), patch)
            for _ in range(min(3, kills - len(hits))):
                command = Command(*arguments)
                if (one := hit(workbook, command, draw)) is None:
                    command.end()
                    break  # it ended before; the next command finds it done
                hits.append(one)
                print(f"kill {len(hits)} of {kills}, run {runs}: {one}", flush=True)
            last = Command(*arguments)
            if last.end() != 0:
                cannot.append({"run": runs, "said": last.errors[-3:]})
                continue
            damaged += len(list((run_folder(workbook) / "checkpoints").glob("damaged-*")))
            together = losses(workbook)
            far = max(abs(a - b) for a, b in zip(together, expected, strict=True))
            apart.append(far)
            print(f"run {runs} went on and ended {far:.1e} from the straight run", flush=True)
    late = [one for one in hits if one["gone after"] is None]
    slowest = max((one["gone after"] for one in hits if one["gone after"] is not None), default=0.0)
    facts = {
        "kills": len(hits),
        "runs": runs,
        "largest difference": max(apart, default=None),
        "cannot go on": cannot,
    }
    facts |= {"while writing": sum(one["while writing"] for one in hits), "not whole": damaged}
    facts |= {"left processes behind": len(late), "all gone after at most (s)": round(slowest, 1)}
    return facts | {"hit": sorted({one["hit"] for one in hits})}


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def fine(facts: dict) -> bool:
    far = facts["largest difference"]
    wrong = ("cannot go on", "left processes behind", "not whole")
    return far is not None and far <= 2e-5 and not any(facts[name] for name in wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="fsdp")
    parser.add_argument("--at-once", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = campaign(
            Path(place), options.kills, options.seed, options.mesh, background=not options.at_once
        )
    print(json.dumps(result))
    sys.exit(0 if fine(result) else 1)
