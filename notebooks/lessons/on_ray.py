"""Batches on Ray (https://docs.ray.io): `--on ray`, which is an extra: `pip install 'nblib[ray]'`.

A job is a task of Ray, and does what a job on Slurm does: it plans its run once more where it starts, and makes it in a
folder that all machines see (nblib/run/engines.py). The cluster is the one that RAY_ADDRESS names or that was started
by `ray start` on this machine. Where there is none, one of this machine begins and ends with the command.

Tasks belong to the process that submitted them, and end with it. Before they do, they are asked to stop, which saves
what they have. A task whose worker or machine dies is begun again, and its run goes on in its folder.

Beside batch.json lie `<job>.log`, which the job prints into from its start, `<job>.cancel`, by which anybody asks it to
stop, and `<job>.ended`. Ray's own way to cancel does not wake a task that waits for a thread, as ours do.

Footgun: a task that asks for more than any machine has waits for ever, as a cluster may grow. On a cluster that began
with the command it is refused.
"""

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nblib import files
from nblib.run import engines
from nblib.run.parameters import ParameterError, clip

ALLOWED = ("at_once", "cpus", "gb", "gpus")
LOOK = 0.3  # seconds between two looks for a wish to stop


class Ray:
    """Jobs end with the one who submits them."""

    every, outlives = 0.5, False  # seconds between two looks

    def __init__(self, wanted: dict[str, Any]):
        self.ray, self.wanted = engines.need("ray", "ray"), wanted
        if wrong := [name for name in wanted if name not in ALLOWED]:
            raise ParameterError(f"--resources: {wrong[0]} is of Slurm; Ray knows {', '.join(ALLOWED)}.")
        self.todo: dict[str, tuple[dict[str, Any], Path]] = {}  # by the name of the job
        self.live: dict[str, tuple[Any, Path]] = {}  # the task, and the folder of its batch

    def submit(self, orders: Sequence[dict[str, Any]], folder: Path) -> list[str]:
        self._join()
        names = [f"{folder.name.rpartition('-')[2]}_{number}" for number in range(len(orders))]
        self.todo |= {name: (order, folder) for name, order in zip(names, orders)}
        self.states()
        return names

    def _join(self) -> None:
        """The cluster that is there, or one of this machine."""
        if self.ray.is_initialized():
            return
        quiet = {"logging_level": "error", "log_to_driver": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray's makers are told of this run
        address = os.environ.get("RAY_ADDRESS", "")
        try:
            self.ray.init(address or "auto", **quiet)
        except ConnectionError:
            if address:
                raise ParameterError(f"No cluster of Ray answers at RAY_ADDRESS = {clip(address)}.") from None
            self.ray.init("local", include_dashboard=False, **quiet)
            self._must_fit()
        except (RuntimeError, ValueError) as error:  # other versions of Ray or Python; no address
            raise ParameterError(f"Ray's cluster does not take this machine: {clip(str(error), 400)}") from None

    def _must_fit(self) -> None:
        has = self.ray.cluster_resources()
        for name, of_ray, unit in (("cpus", "CPU", 1), ("gpus", "GPU", 1), ("gb", "memory", 2**30)):
            here = has.get(of_ray, 0) / unit
            if self.wanted.get(name, 0) > here:
                raise ParameterError(f"--resources: {name} is {self.wanted[name]}, and this machine has {here:.4g}.")

    def _start(self, name: str, order: dict[str, Any], folder: Path) -> None:
        asked = {"num_cpus": self.wanted.get("cpus", 1), "num_gpus": self.wanted.get("gpus", 0)}
        if "gb" in self.wanted:
            asked["memory"] = int(self.wanted["gb"] * 2**30)
        if path := os.environ.get("PYTHONPATH"):
            order = order | {"environment": order["environment"] | {"PYTHONPATH": path}}
        task = self.ray.remote(max_retries=engines.RESTARTS, max_calls=1, **asked)(job)
        self.live[name] = (task.remote(order, str(folder), name), folder)

    def states(self) -> dict[str, str]:
        """Of the jobs that have not ended; also starts what `at_once` kept back, and passes on wishes to stop."""
        tasks = [task for task, _ in self.live.values()]
        ended = self.ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if tasks else []
        for name, (task, folder) in list(self.live.items()):
            if task in ended:
                del self.live[name]
                files.write(folder / f"{name}.ended", "")
            elif (folder / f"{name}.cancel").exists() and not (folder / f"{name}.log").exists():
                self.ray.cancel(task)
        for name, (_, folder) in list(self.todo.items()):
            if (folder / f"{name}.cancel").exists():
                del self.todo[name]
            elif len(self.live) < self.wanted.get("at_once", len(self.live) + 1):
                self._start(name, *self.todo.pop(name))
        begun = {name: (folder / f"{name}.log").exists() for name, (_, folder) in self.live.items()}
        return {name: "running" if begun.get(name) else "pending" for name in (*self.live, *self.todo)}

    def cancel(self, ids: Sequence[str]) -> None:
        for name in ids:
            for _, folder in filter(None, (self.live.get(name), self.todo.get(name))):
                files.write(folder / f"{name}.cancel", "")


def job(order: dict[str, Any], folder: str, name: str) -> str:
    """What a task does, in a worker of Ray; the status of its run, or why there is none."""
    mark, over = Path(folder) / f"{name}.cancel", threading.Event()

    def stop_when_asked() -> None:
        while not mark.exists():
            if over.wait(LOOK):
                return
        os.kill(os.getpid(), signal.SIGINT)

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it, and what a worker starts inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(mark.with_suffix(".log"), "a", buffering=1) as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            print(time.strftime("%F %T"), order["command"])
            watcher = threading.Thread(target=stop_when_asked, daemon=True)
            try:
                watcher.start()
                return engines.work(order)
            except KeyboardInterrupt:
                return "stopped"
            except Exception as error:  # a task that raises is told by the record of its run, and by this page
                traceback.print_exc()
                return str(error)
            finally:
                over.set()
