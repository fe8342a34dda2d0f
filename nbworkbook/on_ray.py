"""Batches on Ray (https://docs.ray.io): `--on ray`, which is an extra: `pip install 'nblib[ray]'`.

A job is a task of Ray, and does what a job on Slurm does: it plans its run once more where it
starts, and makes it in a folder that all machines see (cluster.py). The cluster is the one that
RAY_ADDRESS names or that was started by `ray start` on this machine. Where there is none, one of
this machine begins and ends with the command.

Tasks belong to the process that submitted them, and end with it. Before they do, they are signalled
to stop, which saves what they have. A task whose worker or machine dies is begun again, and its run
goes on in its folder.

Beside batch.json lie `<job>.log`, which the job prints into from its start, `<job>.cancel`, by
which anybody stops it, and `<job>.ended`. Ray's own way to cancel does not wake a task that waits
for a thread, as ours do.

Footgun: a task that needs more than any machine has waits for ever, as a cluster may grow. On a
cluster that began with the command it is refused.
"""

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import files
from nbworkbook import cluster
from nbworkbook.parameters import ParameterError, clip

ALLOWED = ("at_once", "cpus", "gb", "gpus")
# Our words as Ray spells them, and how many of Ray's units one of ours is.
OF_RAY = {"cpus": ("CPU", 1), "gpus": ("GPU", 1), "gb": ("memory", 2**30)}
LOOK = 0.3  # seconds between two looks for a file that stops a job


class Waiting(NamedTuple):
    """A job that has not started."""

    order: cluster.Order
    folder: Path  # of its batch


class Started(NamedTuple):
    """A job that Ray has."""

    task: Any
    folder: Path  # of its batch


class Ray:
    """Jobs on Ray. They end with the command that submits them."""

    every = 0.5  # seconds between two looks
    outlives = False

    def __init__(self, wanted: dict[str, Any]):
        self.ray = cluster.need("ray", "ray")
        self.wanted = wanted
        for name in wanted:
            if name not in ALLOWED:
                raise ParameterError(
                    f"--resources: {name} is of Slurm; Ray knows {', '.join(ALLOWED)}."
                )
        self.waiting: dict[str, Waiting] = {}  # by the name of the job
        self.started: dict[str, Started] = {}

    def submit(self, orders: Sequence[cluster.Order], folder: Path) -> list[str]:
        """Start the jobs, as many as may run at once, and return the names of all."""
        self._join()
        batch = folder.name.rpartition("-")[2]
        names = [f"{batch}_{number}" for number in range(len(orders))]
        for name, order in zip(names, orders, strict=True):
            self.waiting[name] = Waiting(order, folder)
        self.states()
        return names

    def _join(self) -> None:
        """Join the cluster that is there, or begin one of this machine."""
        if self.ray.is_initialized():
            return
        quiet = {"logging_level": "error", "log_to_driver": False}
        # else Ray reports this run to its makers
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS", "")
        try:
            self.ray.init(address or "auto", **quiet)
        except ConnectionError:
            if address:
                raise ParameterError(
                    f"No cluster of Ray answers at RAY_ADDRESS = {clip(address)}."
                ) from None
            self.ray.init("local", include_dashboard=False, **quiet)
            self._must_fit()
        except (RuntimeError, ValueError) as error:  # other versions of Ray or Python; no address
            raise ParameterError(
                f"Ray's cluster does not take this machine: {clip(str(error), 400)}"
            ) from None

    def _must_fit(self) -> None:
        """Raise ParameterError where a job needs more than this machine has."""
        resources = self.ray.cluster_resources()
        for name, (of_ray, unit) in OF_RAY.items():
            here = resources.get(of_ray, 0) / unit
            if self.wanted.get(name, 0) > here:
                raise ParameterError(
                    f"--resources: {name} is {self.wanted[name]}, and this machine has {here:.4g}."
                )

    def _start(self, name: str) -> None:
        """Give a waiting job to Ray."""
        order, folder = self.waiting.pop(name)
        path = os.environ.get("PYTHONPATH")
        if path:
            order = order | {"environment": order["environment"] | {"PYTHONPATH": path}}

        options = {
            "max_retries": cluster.RESTARTS,
            "max_calls": 1,
            "num_cpus": self.wanted.get("cpus", 1),
            "num_gpus": self.wanted.get("gpus", 0),
        }
        if "gb" in self.wanted:
            options["memory"] = int(self.wanted["gb"] * 2**30)
        task = self.ray.remote(**options)(job)
        self.started[name] = Started(task.remote(order, str(folder), name), folder)

    def states(self) -> dict[str, str]:
        """Return the states of the jobs that have not ended, by name.

        It also starts what `at_once` kept back, and cancels what was to be stopped before it began.
        """
        # What ended since the last look.
        tasks = [started.task for started in self.started.values()]
        ended = self.ray.wait(tasks, num_returns=len(tasks), timeout=0)[0] if tasks else []
        for name, (task, folder) in list(self.started.items()):
            has_begun = (folder / f"{name}.log").exists()
            if task in ended:
                del self.started[name]
                files.write(folder / f"{name}.ended", "")
            elif (folder / f"{name}.cancel").exists() and not has_begun:
                self.ray.cancel(task)

        # What may start now.
        at_once = self.wanted.get("at_once")
        for name, (_, folder) in list(self.waiting.items()):
            if (folder / f"{name}.cancel").exists():
                del self.waiting[name]
            elif at_once is None or len(self.started) < at_once:
                self._start(name)

        states = {}
        for name, (_, folder) in self.started.items():
            states[name] = "running" if (folder / f"{name}.log").exists() else "pending"
        return states | dict.fromkeys(self.waiting, "pending")

    def cancel(self, ids: Sequence[str]) -> None:
        """Write the files that stop the jobs."""
        for name in ids:
            for known in (self.started.get(name), self.waiting.get(name)):
                if known is not None:
                    files.write(known.folder / f"{name}.cancel", "")


def job(order: cluster.Order, folder: str, name: str) -> str:
    """Do what a task does, in a worker of Ray; return the status of its run, or why there is
    none.
    """
    mark = Path(folder) / f"{name}.cancel"
    is_over = threading.Event()

    def stop_when_cancelled() -> None:
        while not mark.exists():
            if is_over.wait(LOOK):
                return
        os.kill(os.getpid(), signal.SIGINT)

    # Ray blocks this signal, and what a worker starts inherits that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)

    with open(mark.with_suffix(".log"), "a", buffering=1) as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            print(time.strftime("%F %T"), order["command"])
            try:
                threading.Thread(target=stop_when_cancelled, daemon=True).start()
                return cluster.work(order)
            except KeyboardInterrupt:
                return "stopped"
            except Exception as error:  # the record of its run says it, and this page
                traceback.print_exc()
                return str(error)
            finally:
                is_over.set()
