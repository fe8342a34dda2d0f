"""Several processes: N21.

What the ranks have to tell each other goes through the key-value store that they met in: each rank
leaves a few numbers there and reads those that are there already.

Footgun: never a collective here. A rank that does not take part, because it is not watched, would
hang the run.
"""

import json
import math
import time

import torch
from torch import Tensor

from loopdoctor import measures
from loopdoctor.check import Fired, check, fires
from loopdoctor.evidence import Evidence, Step
from loopdoctor.finding import ERROR, OK, WARN, Verdict, not_applicable, unknown

PATIENCE = 0.5  # seconds; ranks that are averaged end their steps together
APART = 0.05  # of the way gone: less is rounding
told = 0  # times this process has left its numbers


@check("N21")
def ranks_apart(e: Evidence) -> Fired | Verdict:
    """Each process trains a model of its own: the loss is fine on every rank and evaluation is
    worse than it.

    Fires when the model was called with gradients while its DistributedDataParallel wrapper never
    was, so that gradients are not averaged (a call of `.module` under no_grad is fine); or when
    weights that were equal on all ranks went different ways. Without a wrapper this is a warning,
    because some average weights every few steps on purpose. Shards, which differ from the start,
    are not compared, nor are ranks that are not watched.

    ERROR ddp-wrapper-gone-round: The forward pass goes through ddp.module and not through the DDP
    wrapper, so gradients are never averaged (no all-reduce) and the ranks drift apart. Fix: Call
    the wrapper itself: ddp(...), not ddp.module(...).
    ERROR or WARN ranks-apart: The ranks drift apart: gradients are not averaged over the processes
    (no all-reduce), or something is done on one rank only. Fix: Wrap the model in
    DistributedDataParallel and call the wrapper; do the same to the weights on every rank.
    """
    wrappers = [w for w in e.wrappers if type(w).__name__ == "DistributedDataParallel"]
    world = torch.distributed.get_world_size() if _met() else 1
    if not wrappers and world < 2:
        return not_applicable("one process, and no DistributedDataParallel wrapper")
    if not e.forwards:
        return unknown("no training forward was seen")
    if any(not e.called.get(id(w)) for w in wrappers):
        return fires(
            f"the model was called {len(e.forwards)} times with gradients, its "
            "DistributedDataParallel wrapper never",
            "training calls go through the wrapper",
        )
    if world < 2:
        return OK
    return _compared(e, bool(wrappers), world)


def _compared(e: Evidence, wrapped: bool, world: int) -> Fired | Verdict:
    start, way = _state(e)
    if not way or not e.of(Step):
        return unknown("no weight was followed through a step")
    others = _exchange({"start": start, "steps": len(e.of(Step)), "way": way}, world)
    others = [
        o
        for o in others
        if o["start"] == start and o["steps"] == len(e.of(Step)) and o["way"].keys() == way.keys()
    ]
    if not others:
        return unknown("no other rank has left numbers that could be compared")
    gap = max(_apart(way[name], other["way"][name]) for other in others for name in way)
    if gap < APART:
        return OK
    return fires(
        f"weights that were equal on {len(others) + 1} ranks differ by {gap:.2g} of the way "
        "they went, after "
        f"{len(e.of(Step))} steps",
        "equal weights on all ranks",
        ERROR if wrapped else WARN,
        fault="ranks-apart",
    )


def _state(e: Evidence) -> tuple[list[str], dict[str, list[float]]]:
    """Of the followed trainable weights: a fingerprint of where they were, and by tensor how they
    went on.
    """
    ps, start, way = e.parameters(), [], {}
    for name, (_, first) in sorted(e.first.items()):
        if name not in ps or not ps[name].requires_grad or not first.is_floating_point():
            continue
        now = measures.strided(ps[name])
        if now.shape != first.shape:
            continue
        before = first.to(now.device).float()
        gone = now.float() - before
        start += [f"{x:.6g}" for x in _views(before)]
        way[name] = [*_views(gone), float(gone.norm())]
    return start, way


def _views(x: Tensor) -> list[float]:
    """Two numbers that hardly agree for tensors that do not."""
    wave = torch.cos(torch.arange(x.numel(), device=x.device, dtype=torch.float32) * 1.7)
    return [float(x.sum()), float((x * wave).sum())]


def _apart(a: list[float], b: list[float]) -> float:
    size = max(a[-1], b[-1])
    if not math.isfinite(size) or size == 0:
        return 0.0
    return max(abs(x - y) for x, y in zip(a, b)) / size


def _exchange(mine: dict, world: int) -> list[dict]:
    """Leave these numbers for the other ranks and take theirs, waiting a moment for those that are
    not there yet.
    """
    global told
    store, rank = (
        torch.distributed.distributed_c10d._get_default_store(),
        torch.distributed.get_rank(),
    )
    keys = {other: f"nblib-doctor/{told}/{other}" for other in range(world)}
    told += 1
    store.set(keys.pop(rank), json.dumps(mine))
    end = time.monotonic() + PATIENCE
    while not store.check(list(keys.values())) and time.monotonic() < end:
        time.sleep(0.02)
    return [json.loads(store.get(key)) for key in keys.values() if store.check([key])]


def _met() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
