"""Targets between whole numbers that were made whole: `torch.tensor(0.8, dtype=torch.long)` is 0.

A dataset that was written for classes is used for a regression, and its cast stays. Nearly all targets are then one
number, and the loss asks for that.

Footgun: to make classes of numbers is what the cast is for, and whole numbers are drawn so. What was computed in the
step is left alone. Only where the result becomes a float again, and is what a regression or a binary loss is asked for,
was it not meant.
"""

import math

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import BINARY, PLAIN
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

CASTS = {"long", "int", "to", "type", "short"}
MADE = {"tensor", "as_tensor"}
KEEPS = {"stack", "cat", "float", "double", "to", "view", "squeeze", "unsqueeze", "reshape", "flatten", "__getitem__"}
DRAWN = {"rand", "rand_like", "randn", "uniform", "normal", "bernoulli"}
COMPUTED = TIMES | OVER | PLUS | MINUS | TURNS | DRAWN | {"where", "clamp", "floor", "round"}
LOOKED, LISTED = 2**16, 4096


class FractionsCut(Watcher):
    begins = CASTS | MADE | COMPUTED

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.computed = Known(self), Known(self)

    def saw(self, op: Op) -> None:
        result = op.result
        if op.name in PLAIN or op.name in BINARY:
            if len(op.given) > 1 and self.known.get(op.given[1]):
                self.note("D17", len(op.given[1]) if op.given[1].dim() else 1)
        elif not isinstance(result, Tensor) or result.dtype is torch.bool:
            return
        elif any(map(self.known.get, op.given)):
            if op.name in KEEPS:
                self.known.put(result, True)
        elif not result.is_floating_point() and self._cut(op):
            self.known.put(result, True)
        elif op.name in COMPUTED and not result.requires_grad:
            self.computed.put(result, True)

    def _cut(self, op: Op) -> bool:
        if op.name in MADE and not op.given:
            numbers = op.args[0] if op.args and isinstance(op.args[0], (list, tuple)) else op.args[:1]
            return any(isinstance(n, float) and math.isfinite(n) and n != int(n) for n in numbers[:LISTED])
        x = op.given[0] if op.given else None
        if op.name not in CASTS or x is None or not x.is_floating_point() or not 0 < x.numel() <= LOOKED:
            return False
        if self.computed.get(x):
            return False
        return bool((x != x.trunc()).any())

    def close(self) -> None:
        self.known.by_id.clear()
        self.computed.by_id.clear()
