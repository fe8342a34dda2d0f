"""Shares of a mixed batch that the loss takes the other way round.

    x[:, :, y1:y2, x1:x2] = x[order, :, y1:y2, x1:x2];  lam = 1 - area         CutMix: what is left of the row itself
    loss = lam * ce(out, y) + (1 - lam) * ce(out, y[order])

With `lam = area` each row is asked most for the label of which it shows least. The share of what came from the rows in
another order is known from the pasted box, or from the factor of the sum (mixup), and so is the factor of the loss that
was given their labels.

Footgun: at half and half both ways are the same, so the two must differ clearly. And a step may have several mixtures,
whose losses come in another order; then nothing is said.
"""

import math

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import CLASSES
from train_doctor.watchers.operators import PLUS, TIMES, plain_number

TAKES = {"__getitem__", "index_select", "flip", "roll"}
LEAST, CLEAR, CLOSE = 4, 0.05, 1e-3
ORDER, PIECE, LABELS, MIXED = "order", "piece", "labels", "mixed"


class MixShares(Watcher):
    """Known are ORDER, a PIECE of rows in another order -> its share, LABELS of these, and their losses."""

    begins = {"randperm", "__setitem__"} | TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.share: float | None = None  # of the other rows in the mixed batch, since the last backward
        self.asked: float | None = None  # the factor of their labels' loss
        self.shares: set[float] = set()  # all of them
        self.both = False  # both sides are in an order of their own
        self.orders = Known(self)  # of an index and of what it picked -> a number of the draw
        self.number = 0
        self.mixed: set[int] = set()  # orders of pieces that were mixed in
        self.judged: set[int] = set()  # orders of labels that a loss was given

    def saw(self, op: Op) -> None:
        result, facts = op.result, [self.known.get(t) for t in op.given]
        if op.name == "randperm":
            self.number += 1
            self.known.put(result, (ORDER, 1.0))
            self.orders.put(result, self.number)
        elif op.name == "__setitem__":
            self._pasted(op, facts)
        elif not isinstance(result, Tensor):
            return
        elif op.name in TAKES and (ORDER, 1.0) in facts[1:]:
            whole = result.is_floating_point() and result.dim() > 1
            self.known.put(result, (PIECE if whole else LABELS, 1.0))
            self.orders.put(result, self._order(op))
        elif op.name in ("__getitem__", "clone") and facts[0] == (PIECE, 1.0) and len(result) == len(op.given[0]):
            self.known.put(result, facts[0])
            self.orders.put(result, self._order(op))
        elif op.name in CLASSES and len(facts) > 1 and facts[1] == (LABELS, 1.0) and not result.dim():
            self.known.put(result, (LABELS, 1.0))
            self.judged.add(self._order(op))
        elif op.name in CLASSES and len(facts) > 1 and facts[1] and facts[1][0] == MIXED:
            self.judged.add(self.orders.get(op.given[1]) or 0)  # soft labels, which were mixed as pieces are
            self.mixed.discard(self.orders.get(op.given[1]))
        elif op.name in TIMES and len(op.given) <= 2 and any(facts):
            self._times(op, next(f for f in facts if f))
        elif op.name in PLUS and len(op.given) == 2:
            kind, share = next(f for f in facts if f)
            self.both = self.both or all(facts)
            if kind == PIECE and result.dim() > 1 and not result.requires_grad:
                self.share = share
                self.shares.add(round(share, 3))
                self.mixed.add(self._order(op))
                self.known.put(result, (MIXED, share))
                self.orders.put(result, self._order(op))
            elif kind == LABELS and not result.dim():
                self.asked = share

    def _pasted(self, op: Op, facts: list) -> None:
        x, value = op.args[0], op.args[-1]
        self.both = self.both or isinstance(x, Tensor) and bool(self.known.get(x))
        if isinstance(value, Tensor) and self.known.get(value) == (PIECE, 1.0) and isinstance(x, Tensor) and x.numel():
            if len(value) == len(x) >= LEAST:
                self.share = value.numel() / x.numel()
                self.mixed.add(self._order(op))

    def _order(self, op: Op) -> int:
        return next((n for n in map(self.orders.get, op.given) if n), 0)

    def _times(self, op: Op, fact: tuple) -> None:
        others = [a for a in op.args if not (isinstance(a, Tensor) and self.known.get(a) == fact)]
        if len(others) == 1 and (factor := plain_number(others[0])) is not None:
            self.known.put(op.result, (fact[0], fact[1] * factor))
            self.orders.put(op.result, self._order(op))

    def backward(self, loss: Tensor) -> None:
        share, asked, both = self.share, self.asked, self.both
        self.share, self.asked, self.both = None, None, False
        both, self.shares = both or len(self.shares) > 1, set()
        mixed, judged, self.mixed, self.judged = self.mixed - {0}, self.judged - {0}, set(), set()
        if len(mixed) == len(judged) == 1 and mixed != judged:
            self.note("F68 orders", True)
        if not both and share is not None and asked is not None and math.isclose(asked, 1 - share, abs_tol=CLOSE):
            if abs(asked - share) > CLEAR:
                self.note("F68", (share, asked))

    def close(self) -> None:
        self.known.by_id.clear()
