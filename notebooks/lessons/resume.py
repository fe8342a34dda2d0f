"""Does a run that was stopped and resumed end on the same bits as one that was never stopped?

    resume.bit_equal(build, folder, total=6, machine=machine)

`build()` returns a new model, its batches and its optimizers. It is called three times: for a run
that goes straight through, for a run that is stopped in the middle, and to resume the second from
its checkpoint. Every notebook of a method ends with this comparison, because a method brings state
of its own (priors, routers, caches, temperatures). State that a checkpoint forgets shows here and
in no loss curve.

Footgun: `build` must not use anything that an earlier call of it changed. The generators are seeded
before each call.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lessons.progress import Counting
from nblib import runtime, train


class StopAfter:
    """Controls of the loop that press Stop after a number of steps."""

    lr_scale = 1.0

    def __init__(self, steps: int):
        self.left = steps

    @property
    def stop(self) -> bool:  # the loop asks once per step
        self.left -= 1
        return self.left <= 0


def bit_equal(
    build: Callable[[], tuple],
    folder: Path,
    *,
    total: int,
    machine: runtime.Machine,
    look: dict | None = None,
    **options: Any,
) -> bool:
    """Whether parameters and buffers end the same; `look` is of `train.Watch`, `options` are of
    `train.fit`.
    """
    shutil.rmtree(folder, ignore_errors=True)

    def run(name: str, stop_after: int = 0):
        runtime.seed_all(0)
        model, batches, optimizers = build()
        controls = StopAfter(stop_after) if stop_after else None
        watch = train.Watch(controls=controls, **(look or {}))
        checkpoints = train.Checkpoints(folder / name)
        where = dict(total=total, machine=machine, checkpoints=checkpoints, watch=watch)
        return model, train.fit(model, batches, optimizers, **where, **options)

    with Counting("trainings", of=3) as line:
        line.says("straight through")
        straight, _ = run("straight")
        line.says("stopped in the middle")
        _, before = run("stopped", stop_after=total // 2)
        line.says("resumed")
        resumed, after = run("stopped")
    paces = [[record["tokens_per_s"] for record in records] for records in (before, after)]
    # a checkpoint holds rank 0's records
    continued = paces[1][: len(before)] == paces[0] or runtime.rank() > 0
    if len(before) != total // 2 or len(after) != total or not continued:
        raise RuntimeError(
            f"{len(before)} of {total} steps before the stop and {len(after)} in all: not resumed"
        )
    ends = [[*m.parameters(), *m.buffers()] for m in (straight, resumed)]
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
