"""Results of arithmetic on weights and gradients that nobody took: an update that was not made.

    for p in critic.parameters():
        p = p.data.clamp(-c, c)
        a new tensor; the weight stays what it was. p.data.clamp_(-c, c) was meant

A weight (or its `.data`, or its gradient) goes into arithmetic between a backward and the next
forward, what comes out has its shape, and dies without having been an argument of anything. The
same instruction must do so in several steps.

Footguns: a tensor may die while its numbers live on (`nn.Parameter(result)` makes another tensor of
them), so the storage is asked as well. A difference of two weights is something to look at, and may
be thrown away in most steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from loopdoctor.eye import Eye, Known, Op, Watcher, place

ARITHMETIC = {
    *(
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "hardtanh",
        "nan_to_num",
        "where",
        "masked_fill",
        "renorm",
        "normalize",
    ),
    *(
        "mul",
        "multiply",
        "div",
        "divide",
        "true_divide",
        "add",
        "sub",
        "subtract",
        "rsub",
        "lerp",
        "addcmul",
        "addcdiv",
    ),
    *(
        "neg",
        "negative",
        "maximum",
        "minimum",
        "__rsub__",
        "__radd__",
        "__rmul__",
        "__rtruediv__",
        "__rdiv__",
        "sign",
    ),
}
ALIASES = ("data", "detach", "view", "reshape", "flatten")
KEPT = 4096
WEIGHT, GRADIENT = "weight", "gradient"


@dataclass
class Result:
    """Of a weight or a gradient, or of both; `place` is None for what only has another name."""

    of: frozenset[str]
    shape: torch.Size
    round: int
    name: str = ""
    place: tuple | None = None
    storage: Any = None
    used: bool = False


class Dropped(Watcher):
    begins = frozenset()
    between = True

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self, self._died)
        self.dead: list[Result] = []
        self.dying: list[Result] = []  # since the last call
        self.taken: set[tuple] = set()  # places some of whose results were used
        self.others: set[int] = set()  # buffers, and what optimizers hold outside of modules
        self.met = -1

    def backward(self, loss: Tensor) -> None:
        if self.met != self.eye.turn:
            self.met = self.eye.turn
            owners = (*self.e.models, *self.e.teachers)
            self.others = {
                id(b) for m in owners for b in m.buffers() if b.is_floating_point()
            } | self.e.optimized()

    def saw(self, op: Op) -> None:
        facts = [self._fact(t) for t in op.given]
        for fact in facts:
            if fact is not None and fact.place is not None and not fact.used:
                fact.used = True
                self.taken.add(fact.place)
        if self.eye.forward or not op.results:
            return
        if len(op.results) != 1 or not isinstance(op.result, Tensor):
            return
        result = op.results[0]
        if op.name == "grad" and op.given and self._is_weight(op.given[0]):
            return self.known.put(
                result, Result(frozenset({GRADIENT}), result.shape, self.eye.turn)
            )
        if not any(facts):
            self.eye.forward = self.eye.forward or result.requires_grad
            return
        shapes = {f.shape for f in facts if f is not None}
        if result.requires_grad and any(
            f is None and t.numel() > 1 and t.shape not in shapes for f, t in zip(facts, op.given)
        ):
            self.eye.forward = True
            return
        first = next(fact for fact in facts if fact is not None)
        if op.name in ALIASES and first.place is None:
            return self.known.put(result, Result(first.of, result.shape, self.eye.turn))
        if (
            op.name in ARITHMETIC
            and result.numel() > 1
            and any(f is not None and f.shape == result.shape for f in facts)
        ):
            of = frozenset().union(*(f.of for f in facts if f is not None))
            where = place()
            if where is not None and (op.name not in ("sub", "subtract") or GRADIENT in of):
                storage = StorageWeakRef(result.untyped_storage())
                fact = Result(of, result.shape, self.eye.turn, op.name, (*where, op.name), storage)
                self.known.put(result, fact)

    def _is_weight(self, t: Tensor) -> bool:
        return isinstance(t, nn.Parameter) or id(t) in self.others

    def _fact(self, t: Tensor) -> Result | None:
        fact = self.known.get(t)
        if fact is None and self._is_weight(t):
            fact = Result(frozenset({WEIGHT}), t.shape, self.eye.turn)
        return fact

    def _died(self, fact: Result) -> None:
        """Its storage is let go of just afterwards, so it is asked later."""
        if fact.place is not None and not fact.used and len(self.dead) < KEPT:
            if not self.dying:
                self.eye.soon.append(self._settle)
            self.dying.append(fact)

    def _settle(self) -> None:
        while self.dying:
            fact = self.dying.pop()
            if fact.storage.expired():
                fact.storage = None
                self.dead.append(fact)
            else:  # another tensor has its numbers
                self.taken.add(fact.place)

    def close(self) -> None:
        self._settle()
        for fact in self.dead:
            if fact.place not in self.taken:
                self.e.dropped.setdefault(fact.place, []).append((fact.round, fact.of))
        self.dead.clear()
