"""Weights of rows that meet a loss which is a mean already: they multiply one number, and cancel.

    loss = (criterion(logits, y) * weight).mean()       criterion's reduction is "mean"
    loss = (F.cross_entropy(logits, y, reduction="none") * weight).mean()

Each row has the same share again, whatever its weight. What a loss of torch gives as one number is followed into a
product with several numbers that do not learn; and into the exponential of a focal loss, which is meant for each row:

    pt = torch.exp(-F.cross_entropy(logits, y))         of the mean of all rows

Footgun: one number for the whole batch is a weight of the term. So there must be several.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES
from train_doctor.watchers.operators import TIMES

NEGATIVE = {"neg", "negative", "__neg__"}
NODES = 2000  # of a graph


class WeightsAfterMean(Watcher):
    """What is known of a number: the loss that gave it, of how many rows, and whether its sign was turned."""

    names = set(LOSSES) | TIMES | NEGATIVE | {"exp"}
    begins = set(LOSSES)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.exps: list[tuple] = []  # nodes of exponentials of minus a mean, and the losses that gave it

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or not op.result.requires_grad:
            return
        if op.name in LOSSES:
            if not op.result.dim() and op.given and op.given[0].dim() and len(op.given[0]) > 1:
                self.known.put(op.result, (op.name, len(op.given[0]), False))
            return
        if op.name not in TIMES:
            name, rows, minus = (self.known.get(op.given[0]) if op.given else None) or ("", 0, False)
            if name and op.name in NEGATIVE:
                self.known.put(op.result, (name, rows, not minus))
            elif name and minus:
                self.exps.append((op.result.grad_fn, name))
            return
        for loss, weights in (op.given, op.given[::-1]) if len(op.given) == 2 else ():
            fact = self.known.get(loss)
            if fact is not None and not weights.requires_grad and weights.dim() and len(weights) == fact[1] > 1:
                self.e.late_weights.setdefault(self.eye.turn, (fact[0], tuple(weights.shape)))

    def backward(self, loss: Tensor) -> None:
        """One that is only printed is no weight, and those of several losses are weights of tasks."""
        exps, self.exps = self.exps, []
        if len(exps) == 1 and exps[0][0] in set(graphs.walk(loss, NODES)):
            self.e.focal.setdefault(self.eye.turn, exps[0][1])

    def close(self) -> None:
        self.known.by_id.clear()
