"""Quantiles in a mirror: the pinball loss of (answer - target) where (target - answer) was meant.

    for k, q in enumerate((0.1, 0.5, 0.9)):
        e = answers[:, k] - target
        loss += torch.max((q - 1) * e, q * e).mean()        the column of 0.1 learns the quantile 0.9

    e = answers - target[:, None]
    loss = torch.maximum(q * e, (q - 1) * e).mean()         the same with a tensor of rising quantiles

How much an error weighs on either side tells which quantile is learned. Where answer minus target is weighed, and
several columns one after the other learn falling quantiles, the list is written rising and the sign is wrong.

Footgun: one quantile alone says nothing, for the formula of 1 - q is the same. And who weighs answer minus target
rightly writes (1 - q) and -q; of a falling list that gives the same numbers. So the line of the program is read: q - 1
stands only in the formula of target minus answer.
"""

import linecache
import re

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher, place
from train_doctor.watchers.operators import MINUS, TIMES

LARGER = {"max", "maximum", "where"}
ERROR, WEIGHED, VECTOR, MOST = "error", "weighed", "vector", 256


class Quantiles(Watcher):
    """What is known of a tensor: that it is an answer minus its target, or that, weighed."""

    begins = MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.learned: list[float] = []  # quantiles, in the order in which they are computed

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in MINUS and len(op.given) == 2 and op.given[0].requires_grad and not op.given[1].requires_grad:
            self.known.put(op.result, (ERROR, len(self.learned), 1.0))
        elif op.name in ("__getitem__", "select") and facts[0] and facts[0][0] == ERROR and len(op.given) == 1:
            self.known.put(op.result, facts[0])
        elif op.name in TIMES and len(op.given) == 1 and facts[0] and facts[0][0] == ERROR:
            number = next((a for a in op.args if isinstance(a, int | float)), None)
            if number is not None:
                self.known.put(op.result, (WEIGHED, facts[0][1], float(number)))
        elif op.name in TIMES and len(op.given) == 2 and op.result.requires_grad:
            self._by_tensor(op, facts)
        elif op.name in LARGER and [f and f[0] for f in facts[-2:]] == [VECTOR, VECTOR]:
            low, high = sorted((f[1] for f in facts[-2:]), key=min)
            if max(low) < 0 < min(high) and all(abs(h - n - 1) < 1e-6 for n, h in zip(low, high)):
                self.learned += [-n for n in low]
        elif op.name in LARGER and len(op.given) == 2 and all(f and f[0] == WEIGHED for f in facts):
            low, high = sorted(f[2] for f in facts)
            copied = facts[0][2] < 0 or _less_one()  # (q - 1) * e belongs to the formula of target - answer
            if copied and low < 0 < high and abs(high - low - 1) < 1e-6 and facts[0][1] == facts[1][1]:
                self.learned.append(-low)

    def _by_tensor(self, op: Op, facts: list) -> None:
        """One weight for each column."""
        for error, weights in zip(facts, op.given[::-1]):
            row = weights.numel() == weights.shape[-1:].numel() == op.result.shape[-1]
            if error and error[0] == ERROR and not weights.requires_grad and 2 <= weights.numel() <= MOST and row:
                self.known.put(op.result, (VECTOR, weights.detach().double().flatten().tolist()))

    def backward(self, loss: Tensor) -> None:
        falling = all(a > b for a, b in zip(self.learned, self.learned[1:]))
        if len(self.learned) > 1 and falling:
            self.note("F85", tuple(self.learned))
        self.learned = []

    def close(self) -> None:
        self.known.by_id.clear()


def _less_one() -> bool:
    """Whether something less 1 is written where the program takes the larger of two."""
    where = place()
    line = linecache.getline(*where[:2]) if where is not None else ""
    return re.search(r"[\w\])] *- *1(\.0*)? *\)", line) is not None
