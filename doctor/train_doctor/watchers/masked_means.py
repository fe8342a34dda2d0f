"""A term of the loss that is a mean over all places though only a few of them count, beside one that is not.

    cls = F.binary_cross_entropy_with_logits(score, there, reduction="sum") / num_pos
    box = (error * there).mean()                     (error * there).sum() / num_pos was meant

The places that do not count are zeros in the mean, so the second term is as many times too small as there are places
for each that counts. What gives it away is the first one, which is divided by the very number of ones in that mask.

Footgun: alone, such a mean is the same loss at another rate, and of masks that hide little it is nearly the same loss.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, TIMES

RARE, LEAST, LOOKED, KEPT = 0.2, 64, 2**22, 8  # share of ones; places


class MaskedMeans(Watcher):
    """What is known of a tensor: the mask that it was multiplied with."""

    names = TIMES | OVER | {"mean"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.masks: list[Tensor] = []  # of means over all places, since the last backward
        self.counts: list[Tensor | float] = []  # that a term was divided by

    def saw(self, op: Op) -> None:
        r = op.result
        if not isinstance(r, Tensor) or not r.requires_grad or not op.given:
            return
        if op.name == "mean":
            mask = self.known.get(op.given[0])
            if mask is not None and not r.dim() and len(self.masks) < KEPT:
                self.masks.append(mask)
        elif op.name in OVER:
            by = op.args[1] if len(op.args) > 1 else None
            if not r.dim() and len(self.counts) < KEPT and (isinstance(by, int | float) or isinstance(by, Tensor)):
                if not isinstance(by, Tensor) or by.numel() == 1 and not by.requires_grad:
                    self.counts.append(by)
        elif len(op.given) == 2:
            error, mask = op.given if op.given[0].requires_grad else op.given[::-1]
            if mask.requires_grad or error.shape != mask.shape or not LEAST <= mask.numel() <= LOOKED:
                return
            if bool(((mask == 0) | (mask == 1)).all()) and not (mask.dim() == 2 and bool((mask.sum(1) == 1).all())):
                self.known.put(r, mask)

    def backward(self, loss: Tensor) -> None:
        masks, counts, self.masks, self.counts = self.masks, self.counts, [], []
        for mask in masks if counts else ():
            ones = float(mask.sum())
            if 1 < ones < RARE * mask.numel() and any(float(count) == ones for count in counts):
                self.note("F41", (ones, mask.numel()))

    def close(self) -> None:
        self.masks, self.counts = [], []
        self.known.by_id.clear()
