"""A flow whose couplings all keep the same half: some columns of the data come out as they went in.

    a, b = x.chunk(2, 1);  b = b * s(a).exp() + t(a)        one coupling, which leaves a as it is
    flip = k % 2 == 1                                       so the next must leave the other half

What stays is given to the normal density as it is, and no weight can change what the flow says of it. The columns of
what is squared (or given to a normal distribution that does not learn) are compared with those of the data, number by
number, where something was multiplied by an exponential on the way.

Footguns: the cost of a controller squares the state as it is too, with what was decided. It has no exponential. And one
coupling alone can't but leave a half. And rows may begin with a condition that all couplings keep: there more than one
mask and its other half are used.
"""

from typing import Any

import torch
from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, POWERS, TIMES

PIECES = {"chunk", "split", "tensor_split", "__getitem__", "unbind"}
PARTED = PIECES | TIMES | MINUS
ROWS, LOOKED, COLUMNS, HELD, COUPLINGS = 8, 64, 256, 4, 2


class KeptHalves(Watcher):
    """Known are exponentials that learn."""

    begins = PIECES | TIMES | {"exp"} | POWERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.data: dict[int, Tensor] = {}  # that pieces were made of, or that were masked, since the last backward
        self.masks: set[tuple] = set()  # of columns, and their other halves
        self.scaled = 0  # how often something was multiplied by an exponential
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        if isinstance(value, Tensor) and value.requires_grad and self.scaled >= COUPLINGS:
            self._look(value)

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if op.name == "exp" and op.results and op.results[0].requires_grad:
            self.known.put(op.results[0], True)
        elif op.name in TIMES and len(op.given) == 2 and any(map(self.known.get, op.given)):
            self.scaled += 1
        if op.name in PARTED:
            for t in op.given:  # z * mask or mask * z
                if op.name in TIMES and not t.requires_grad and t.dim() and 2 <= t.numel() == t.shape[-1] <= COLUMNS:
                    if len(self.masks) < 8 and bool(((t == 0) | (t == 1)).all()):
                        self.masks.add(tuple(t.flatten().tolist()))
                if not t.requires_grad and _is_table(t) and len(self.data) < HELD:
                    self.data[id(t)] = t
        elif op.name in POWERS and self.scaled >= COUPLINGS and x is not None and x.requires_grad:
            self._look(x)

    def _look(self, z: Tensor) -> None:
        for x in self.data.values() if _is_table(z) and len(self.masks) <= 2 else ():
            if x.shape == z.shape:
                given, made = x[:LOOKED].T, z.detach()[:LOOKED].T  # (columns, rows)
                same = (made[:, None] == given[None]).all(-1)  # (columns of z, columns of x)
                moving = (given != given[:, :1]).any(1)
                kept = int((same & moving).any(1).sum())
                if 0 < kept < len(made):
                    self.note("S40", (kept, len(made)))

    def backward(self, loss: Tensor) -> None:
        self.data, self.scaled, self.masks = {}, 0, set()

    def close(self) -> None:
        self.known.by_id.clear()
        self.data = {}


def _is_table(x: Tensor) -> bool:
    return x.dim() == 2 and len(x) >= ROWS and 2 <= x.shape[1] <= COLUMNS and x.dtype in (torch.float32, torch.float64)
