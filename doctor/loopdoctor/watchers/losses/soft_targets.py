"""Soft targets by hand whose rows do not sum to 1.

    target = one_hot * (1 - s) + s                          1 + s * (classes - 1) in each row
    target = one_hot * (1 - s) + s / classes
    loss = -(target * logits.log_softmax(1)).sum(1).mean()

The loss of torch is asked by F20 itself. Here a product of log-shares with numbers that do not
learn is looked at.

Footgun: weights of classes make rows that sum to anything, and leave zeros. So all numbers must be
above 0, and all rows must have one and the same sum.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import TIMES

FAR, LEAST, LOOKED = 0.02, 4, 2**20  # from 1; rows; numbers


class SoftTargets(Watcher):
    begins = {"log_softmax"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name == "log_softmax":
            if op.results and op.given and op.given[0].requires_grad and op.given[0].dim() == 2:
                self.known.put(op.results[0], True)
            return
        if op.name in ("neg", "__neg__") and op.results:
            self.known.put(op.results[0], True)
        elif op.name in TIMES and len(op.given) == 2 and op.given[0].shape == op.given[1].shape:
            target = op.given[1] if self.known.get(op.given[0]) else op.given[0]
            if (total := _sum(target)) is not None:
                self.note("F20 sum", total)

    def close(self) -> None:
        self.known.by_id.clear()


def _sum(target: Tensor) -> float | None:
    """Of each row, where all have the same one, which is not 1."""
    if (
        target.requires_grad
        or not target.is_floating_point()
        or len(target) < LEAST
        or target.numel() > LOOKED
    ):
        return None
    target = target.detach().double()
    sums = target.sum(1)
    low, high = float(sums.min()), float(sums.max())
    alike = high - low < 1e-4 and abs(high - 1) > FAR and bool((target > 0).all())
    return high if alike and float(target.max()) > 2 * float(target.min()) else None
