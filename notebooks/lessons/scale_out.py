"""Several real processes beside a notebook, which run functions together: `world = World(2)`,
`world(function, x=1)`.

Each process is a Python of its own with one thread and the environment that torchrun would give it,
joined to the others over gloo, or over NCCL with a card each. A call runs one function of a module
in all of them at once and returns a list: what each rank returned, rank 0 first. Arguments and
results travel as JSON. The processes stay until `end`, so the time that torch takes to load is paid
once per world.

    world(function, ...)       the results; RuntimeError with the first rank's reason if one failed
    world.ask(function, ...)   {"value": ...}, {"error": sentence} or {"gone": how} of each rank, to
                               look at failures

A rank that waits for one that is gone would wait for torch's own limit, half an hour over gloo. So
when one has failed the others get `patience` seconds to tell what they met, and then the world
ends. The processes also end by themselves when whoever started them is gone.

Footgun: a function is found by its module and name, so one that is defined in a cell cannot be run
here.
"""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Self

# The folder that holds `lessons`, from which each process imports.
NOTEBOOKS = Path(__file__).resolve().parents[1]
LAST_WORDS = 3  # lines of a dead process that are repeated
FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NBLIB_MESH",
)


class World:
    """Processes that wait for calls. They load torch while the notebook goes on."""

    def __init__(
        self, processes: int = 2, *, threads: int = 1, cards: bool = False, patience: float = 10.0
    ):
        self.folder, self.patience, self.answers = (
            tempfile.TemporaryDirectory(),
            patience,
            queue.Queue(),
        )
        self.ended = False
        self.processes = [self._start(rank, processes, threads, cards) for rank in range(processes)]

    def _start(self, rank: int, processes: int, threads: int, cards: bool) -> subprocess.Popen:
        ranks = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_WORLD_SIZE": processes,
        }
        ours = ranks | {
            "OMP_NUM_THREADS": threads,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": 1,
        }
        env = {k: v for k, v in os.environ.items() if k not in FOREIGN} | {
            k: str(v) for k, v in ours.items()
        }
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(NOTEBOOKS), os.environ.get("PYTHONPATH")])
        )
        read, write = os.pipe()
        backend = "nccl" if cards else "gloo"
        command = [
            sys.executable,
            "-m",
            "lessons.scale_out",
            f"{self.folder.name}/store",
            backend,
            str(write),
        ]
        with open(f"{self.folder.name}/errors-{rank}", "wb") as errors:
            pipes = dict(stdin=subprocess.PIPE, stdout=errors, stderr=errors, pass_fds=(write,))
            # Ctrl-C is ours alone
            process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        os.close(write)
        threading.Thread(target=self._listen, args=(rank, process, read), daemon=True).start()
        return process

    def _listen(self, rank: int, process: subprocess.Popen, read: int) -> None:
        with open(read, encoding="utf-8") as lines:
            for line in lines:
                self.answers.put((rank, json.loads(line)))
        code = process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self.answers.put((rank, {"gone": how, "last words": self._last_words(rank)}))

    def _last_words(self, rank: int) -> list[str]:
        path = Path(self.folder.name) / f"errors-{rank}"
        return path.read_text(errors="replace").splitlines()[-LAST_WORDS:] if path.exists() else []

    def ask(self, function: Callable, *, seconds: float = 900.0, **arguments: Any) -> list[dict]:
        """Return what each rank answers, or how it went.

        If one fails, the world is over afterwards.
        """
        if self.ended:
            raise RuntimeError(f"{function.__name__}: this world has ended; make another one")
        call = json.dumps(
            {"module": function.__module__, "name": function.__name__, "arguments": arguments}
        )
        for process in self.processes:
            try:
                process.stdin.write(call.encode() + b"\n")
                process.stdin.flush()
            except OSError:
                pass  # it is gone, which its listener tells
        answers: dict[int, dict] = {}
        until = time.monotonic() + seconds
        try:
            while len(answers) < len(self.processes):
                try:
                    rank, answer = self.answers.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if "value" not in answer and all("value" in each for each in answers.values()):
                    until = min(until, time.monotonic() + self.patience)
                answers.setdefault(rank, answer)
        except BaseException:
            self.end()  # interrupted: answers would come to the next call
            raise
        late = {"error": "no answer: it waited for the others until it was ended"}
        told = [answers.get(rank, late) for rank in range(len(self.processes))]
        if not all("value" in each for each in told):
            self.end()
        return told

    def __call__(self, function: Callable, **arguments: Any) -> list[Any]:
        told = self.ask(function, **arguments)
        for rank, answer in enumerate(told):
            if "value" not in answer:
                why = answer.get("error") or f"{answer['gone']}: {' '.join(answer['last words'])}"
                raise RuntimeError(
                    f"{function.__name__} failed on rank {rank} of {len(told)}: {why}"
                )
        return [answer["value"] for answer in told]

    def end(self) -> None:
        """All are gone when this returns."""
        self.ended = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            # A call that it did not read cannot be written out any more.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def enough_cards(processes: int) -> bool:
    """One card for each, which is when NCCL can be used."""
    import torch

    return torch.cuda.device_count() >= processes


# ------------------------------------------------------------------ inside of a process
def serve(store: str, backend: str, answers: int) -> None:
    """Answer calls until there is nobody who could make one."""
    calls: queue.Queue = queue.Queue()
    threading.Thread(target=_hear, args=(calls,), daemon=True).start()
    import torch
    from torch import distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    if world > 1:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    with open(answers, "w", encoding="utf-8") as out:
        while True:
            call = calls.get()
            try:
                function = getattr(import_module(call["module"]), call["name"])
                answer = {"value": function(**call["arguments"])}
            except Exception as error:
                answer = {"error": sentence(error)}
            out.write(json.dumps(answer) + "\n")
            out.flush()


def _hear(calls: queue.Queue) -> None:
    for line in sys.stdin:
        calls.put(json.loads(line))
    os._exit(0)  # also out of a sum that never comes


def sentence(error: BaseException) -> str:
    """Return the first sentence of an error, without the place in torch's C++ where it was raised
    and without a port.
    """
    words = re.sub(r"^\[/\S+\] ", "", " ".join(str(error).split())).split(". ")[0]
    return f"{type(error).__name__}: " + re.sub(r"(\[[0-9a-f.:]+\]):[0-9]+", r"\1", words)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
