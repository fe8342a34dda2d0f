"""A logarithm that is summed over the rows of a batch, and added to the number of each row.

    log_det = s.sum()                                   one number, of all rows. s.sum(dim=1) was meant
    loss = -(log_prob + log_det).mean()                 log_prob is (B)

So each row is given the sum of all, and the term weighs B times too much: a flow or a spread grows to its bounds. The
numbers that layers make for rows are followed into a sum over everything, and from there onto a vector of the rows that
hangs on layers too, of which the mean is taken. It must be a logarithm that belongs to a density: its exponential was
taken as well, or it is one, or came from a distribution.

Footgun: a penalty is often a sum with a factor of its own, or one that was divided by the rows, so any factor but a
sign or a half ends it, and so does a division by the rows, or a weight of each row that is a share of one, before the
sum. A handful of rows may be the parts of one thing (the agents of a joint policy). Logarithms of weights, as in
ActNorm, are the same for each row. A table of all pairs is no longer one of rows, and a sum that is added to a mean has
another meaning.
"""

import itertools
from typing import Any

from torch import Tensor, distributions, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS, plain_number

LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
CROSSES = {"matmul", "mm", "bmm", "__matmul__", "einsum", "softmax", "log_softmax", "cdist", "logsumexp", "mean"}
LOGS = {"log", "log1p", "logsigmoid"}
LEAST, HALF = 8, (0.5, 1.0)  # rows; factors of a formula
CLOSE = 1e-3


class SummedRows(Watcher):
    """Known are the layers that numbers of rows hang on; and of the sum of all, and of vectors that it was added to,
    how many rows there are and these layers."""

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.rows, self.sums, self.added = Known(self), Known(self), Known(self)
        self.layers = itertools.count()
        self.logs: set[int] = set()  # layers whose numbers are logarithms, or have one
        self.pending: list[tuple[int, frozenset]] = []
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            self.logs |= self.rows.get(result) or set()

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not r.requires_grad or not op.given:
            return
        rows = [fact for t in op.given if (fact := self.rows.get(t))]
        if op.name == "exp" or op.name in LOGS:
            self.logs |= frozenset().union(*rows)
        if op.name in LAYERS:
            if len(op.given) > 1 and isinstance(op.given[1], nn.Parameter) and r.dim() > 1 and len(r) >= LEAST:
                self.rows.put(r, frozenset({next(self.layers)}))
        elif not r.dim():
            self._number(op, r)
        elif any(summed := [self.sums.get(t) for t in op.given]) and op.name in PLUS | MINUS:
            of, layers = next(s for s in summed if s)
            if r.shape == (of,) and rows:
                self.added.put(r, (of, layers))
        elif any(facts := [self.added.get(t) for t in op.given]):
            if r.shape == op.given[0].shape and op.name in PLUS | MINUS | TURNS:
                self.added.put(r, next(f for f in facts if f))
        elif rows and op.name not in CROSSES:
            of = len(next(t for t in op.given if self.rows.get(t)))
            for result in op.results if op.name not in TIMES | OVER or not _is_mean(op, of) else ():
                if result.dim() and len(result) == of:
                    self.rows.put(result, frozenset().union(*rows))

    def _number(self, op: Op, r: Tensor) -> None:
        x = op.given[0]
        if op.name == "sum" and x.dim() > 0 and (layers := self.rows.get(x)):
            self.sums.put(r, (len(x), layers))
        elif op.name in ("mean", "sum") and (fact := self.added.get(x)):
            self.pending.append(fact)
        elif known := [f for t in op.given if (f := self.sums.get(t))]:
            if op.name in PLUS | MINUS | TURNS or op.name in TIMES | OVER and _of_the_formula(op):
                self.sums.put(r, (known[0][0], frozenset().union(*(layers for _, layers in known))))

    def backward(self, loss: Tensor) -> None:
        for of, layers in self.pending:
            if layers & self.logs:
                self.note("F135", of)
        self.logs, self.pending = set(), []

    def close(self) -> None:
        for known in (self.rows, self.sums, self.added):
            known.by_id.clear()


def _is_mean(op: Op, rows: int) -> bool:
    """Whether a product makes a mean of the sum: by one over the rows, or by a share of one for each."""
    share = next((t for t in op.given if t.numel() == rows and not t.requires_grad and t.is_floating_point()), None)
    if share is not None:
        return op.name in TIMES and abs(float(share.sum()) - 1) < CLOSE
    factor = next((plain_number(a) for a in op.args[:2] if not isinstance(a, Tensor)), None)
    return bool(factor) and abs((factor if op.name in OVER else 1 / factor) - rows) < CLOSE


def _of_the_formula(op: Op) -> bool:
    """Whether the factor is a sign or a half, and no weight."""
    factor = next((plain_number(a) for a in op.args[:2] if not isinstance(a, Tensor)), None)
    return factor is not None and (1 / factor if op.name in OVER and factor else factor) in HALF
