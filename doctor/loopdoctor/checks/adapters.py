"""Adapters that are there and do nothing: S16, N20; and frozen weights that move: N12.

Whether an adapter has an effect is not read from flags but tried (probes.py): its factors are replaced by other
numbers for one forward pass, and the logits must change.

Footgun: at the start B is zero, so an adapter that works has no effect either. Hence other numbers, not on and off.
"""

import itertools

import torch
from torch import Tensor

from loopdoctor import measures
from loopdoctor.check import Fired, check, fires
from loopdoctor.checks.static import moved
from loopdoctor.evidence import Evidence, Gradients, Step
from loopdoctor.finding import OK, Verdict, not_applicable, unknown

SMALL = 64  # numbers of a tensor
TWINS, STRAIGHT = 8, 0.8  # trained tensors whose names fit best; cosine of an average's way and the way to its twin


@check("N12")
def frozen_moved(e: Evidence) -> Fired | Verdict:
    """Weights that should stay as they are drift.

    Fires when a frozen parameter changed between the first backward and the end. In an optimizer that means it was
    frozen after it had a gradient, and is stepped with what is left of it (an error); outside of one it may be a
    codebook that the loop keeps on purpose. An average is left alone: what goes straight towards a tensor that trains,
    of the same shape, whose name ends alike. The statistics of a batch normalisation whose weights are
    frozen are looked at as well.

    ERROR frozen-moved/stepped: Frozen weights (requires_grad=False) change: they were frozen after a backward and the
    optimizer still has their gradient or momentum. Fix: Freeze before the optimizer is built, and set the gradients of
    what is frozen to None.
    WARN frozen-moved/statistics: The layers are frozen, and their batch normalisation is in train mode: it goes on
    averaging its running mean and variance, so the frozen part changes. Fix: Put the frozen part in eval mode, and
    again after each model.train(). If its statistics should follow the new data, this is right.
    WARN frozen-moved/written: Frozen weights (requires_grad=False) change: something other than the optimizer writes to
    them. Fix: If it is no average that is meant to move, look for what writes to them (copy_, load_state_dict).
    """
    if not e.stepped or not e.first:
        return unknown("no optimizer step was seen")
    # an average may be in the optimizer and never get a gradient: no step writes to it
    live = set().union(*(o.live for o in e.optimizers))
    every, mine = e.parameters(), e.optimized() & live
    shared = {measures.values_of(p).data_ptr() for p in e.trainable().values()}
    thawed = {n for g in e.of(Gradients) for n in g.norms}  # layers may take turns
    frozen = {n: p for n, p in every.items() if n in e.frozen_at_start - thawed and not p.requires_grad}
    frozen = {n: p for n, p in frozen.items() if p.data_ptr() not in shared and id(p) == e.first[n][0]}
    drifted = [n for n, p in frozen.items() if p.is_floating_point() and moved(e, n)]
    drifted = [n for n in drifted if id(every[n]) in mine or _more_than_rounding(e, n)]
    drifted = _without_averages(e, drifted, mine)
    if not drifted and (moving := _statistics(e, thawed)):
        return fires(
            f"{len(moving)} normalisations whose weights are frozen have counted more batches ({moving[0]} ...)",
            "statistics that stay as they are where the weights do",
            fault="frozen-moved/statistics",
        )
    if not drifted:
        return OK if frozen else not_applicable("nothing is frozen")
    held = [n for n in drifted if id(every[n]) in mine]
    return fires(
        f"{len(drifted)} of {len(frozen)} frozen tensors that were followed changed in {len(e.of(Step))} steps "
        f"({(held or drifted)[0]})",
        "0",
        fault="frozen-moved/stepped" if held else "frozen-moved/written",
    )


def _statistics(e: Evidence, thawed: set[str]) -> list[str]:
    """Batch normalisations with frozen weights, in a model that trains others, whose statistics are updated all the
    same. A copy that is averaged (a momentum encoder) is called without gradients and is left alone."""
    now = measures.tracked(e)
    frozen = {id(p) for n, p in e.parameters().items() if n not in thawed and not p.requires_grad}
    layers = [(n, m) for n, m in e.modules() if id(m) in now and id(m) in e.tracked and m.affine]
    layers = [(n, m) for n, m in layers if all(id(p) in frozen for p in m.parameters(recurse=False))]
    others = frozen - {id(p) for _, m in layers for p in m.parameters(recurse=False)}
    moving = [n for n, m in layers if now[id(m)] > e.tracked[id(m)] + 1 and e.called_with_grad.get(id(m))]
    return moving if others and e.trainable() else []


def _without_averages(e: Evidence, drifted: list[str], mine: set[int]) -> list[str]:
    """What follows a tensor that trains is left out. A small one has too few numbers to tell, and goes with others."""
    every = e.parameters()
    follow = {n for n in drifted if id(every[n]) not in mine and _follows(e, n)}
    rest = [n for n in drifted if n not in follow]
    large = [n for n in rest if id(every[n]) in mine or every[n].numel() >= SMALL]
    return rest if large or all(every[n].numel() < SMALL for n in follow) else []


def _follows(e: Evidence, name: str) -> bool:
    """Whether a frozen tensor has gone towards one that trains, and has not become its copy: an average of it."""
    p = e.parameters()[name]
    first = e.first[name][1].float().to(p.device)
    common = {n: _common(n, name) for n, t in e.trainable().items() if t.shape == p.shape}
    most = max(common.values(), default=0)
    twins = [e.trainable()[n] for n, many in common.items() if many == most > 0][:TWINS]
    gone = measures.strided(p).float() - first
    return any(_along(gone, measures.strided(t).float().to(p.device) - first) for t in twins)


def _common(one: str, other: str) -> int:
    """How many parts the ends of two names share."""
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")))
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _along(gone: Tensor, way: Tensor) -> bool:
    length = float(gone.norm()) * float(way.norm())
    return length > 0 and float(gone @ way) > STRAIGHT * length and not torch.equal(gone, way)


def _more_than_rounding(e: Evidence, name: str) -> bool:
    """An adapter that was merged and taken out again leaves rounding behind."""
    now, (_, first) = measures.strided(e.parameters()[name]), e.first[name]
    gap, size = float((now.float() - first.to(now.device).float()).norm()), float(first.float().norm())
    return gap > (1e-4 if now.dtype.itemsize >= 4 else 2e-2) * size
