"""A teacher that is an average of its student: how far does it go to meet it at each step?

    t = t + rate * (s - t)          a mean teacher, a target network, BYOL: a rate of 0.001 to 0.1

Pairs of tensors that were equal before the first step, one that an optimizer holds and one that none does, are compared
before each step of the optimizer. With the decay and its complement swapped the rate is 0.9 or more, the teacher is the
student of a moment ago, and says what the student says.

Footguns: a rate of 1 is a copy, which a target network may be at every step. An average over all steps so far begins
with 1, 1/2, 1/3, and many averages warm up like that; so the rate must be the same at each step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from train_doctor import measures
from train_doctor.evidence import Evidence

PAIRS, NUMBERS, STEPS = 4, 256, 6
CLOSE = 1e-2  # what is left over, of the way between both


@dataclass
class Pair:
    name: str
    teacher: Tensor
    student: Tensor
    was: tuple[Tensor, Tensor] | None  # teacher and student before the last step
    rates: list[float]
    still: int = 0  # steps in which the teacher stayed where it was, as where two optimizers take turns


def find(e: Evidence) -> list[Pair]:
    """Before the first step."""
    held = e.optimized()
    learning = {id(p): p for p in e.trainable().values() if p.dim() > 1 and (id(p) in held or not held)}
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for p in filter(_in_rows, learning.values()):
        by_shape.setdefault(p.shape, []).append(p)
    others = [(n, p) for m in (*e.models, *e.teachers) for n, p in m.named_parameters() if id(p) not in learning]
    others = [(n, p) for n, p in others if (p.dim() > 1 or not p.requires_grad) and _in_rows(p)]
    pairs: list[Pair] = []
    for name, t in others:
        if len(pairs) == PAIRS:
            break
        few = _few(t) if t.shape in by_shape and not t.is_meta else None
        for s in by_shape.get(t.shape, []) if few is not None else []:
            alike = s.dtype == t.dtype and s.device == t.device and torch.equal(few, _few(s))
            if alike and bool((few != few[0]).any()):
                pairs.append(Pair(name, t, s, (few, few), []))
                break
    return pairs


def look(pairs: list[Pair]) -> None:
    """Before each later step."""
    for pair in pairs:
        if len(pair.rates) >= STEPS:
            continue
        was, now = pair.was, (_few(pair.teacher), _few(pair.student))
        pair.was = now
        if torch.equal(was[0], now[0]):
            pair.still += 1
            continue
        pair.rates.append(next((r for s in (now[1], was[1]) if (r := _rate(was[0], now[0], s)) is not None), -1.0))


def _in_rows(p: Tensor) -> bool:
    """A sparse tensor is not."""
    return p.layout == torch.strided


def _few(p: Tensor) -> Tensor:
    flat = measures.strided(p)
    return flat[:: max(1, flat.numel() // NUMBERS)][:NUMBERS].float().clone()


def _rate(before: Tensor, after: Tensor, student: Tensor) -> float | None:
    """The share of the way to the student that was gone, where it was gone straight."""
    way, gone = student - before, after - before
    length = float(way.norm())
    if not length > 0:
        return None
    rate = float(gone @ way) / length**2
    return rate if float((gone - rate * way).norm()) < CLOSE * length else None
