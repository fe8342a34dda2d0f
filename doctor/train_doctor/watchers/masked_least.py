"""The least of what a mask made zero: `(distances * mask).min(dim=1)`.

    hardest = (d + 1e9 * (1 - mask)).min(dim=1).values          what is masked can't be the least
    hardest = (d * mask).min(dim=1).values                      what is masked is 0, which is less than any distance

A product of numbers that learn and a mask of zeros and ones is followed to a minimum over one dim. It is wrong where
the minimum is exactly zero in nearly each row. The greatest of such a product is right.

Footgun: scores may lie below zero, and then what is masked is not the least of them.
"""

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import TIMES

LEAST = {"min", "amin", "argmin"}
ROWS, MOST, SHARE = 4, 2**22, 0.9  # rows; numbers of a mask; of rows whose least is what was masked


class MaskedLeast(Watcher):
    """Known are products with a mask: the mask."""

    names = TIMES | LEAST
    begins = TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in TIMES:
            for x, mask in (op.given, op.given[::-1]) if len(op.given) == 2 else ():
                if x.requires_grad and not mask.requires_grad and x.dim() > 1 and x.shape == mask.shape:
                    if mask.numel() <= MOST and bool(((mask == 0) | (mask == 1)).all()) and op.results:
                        self.known.put(op.results[0], mask)
        elif (mask := self.known.get(op.given[0])) is not None:
            x = op.given[0].detach()
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            if isinstance(dim, int) and x.numel() // x.shape[dim] >= ROWS:
                masked = (mask == 0).any(dim) & (mask != 0).any(dim)
                taken = (x.amin(dim) == 0) & masked
                if bool(masked.any()) and float(taken.sum() / masked.sum()) > SHARE and bool((x != 0).any()):
                    self.note("F99", tuple(x.shape))

    def close(self) -> None:
        self.known.by_id.clear()
