"""Batch normalisation over very few numbers: a batch of two rows, and pictures of one pixel.

    nn.BatchNorm1d(64) on (2, 64)           each feature becomes -1 in one row and 1 in the other

What a row is told then is only which of two is larger. The statistics of so few numbers are noise, and those that are
kept for the evaluation fit none of them.

Footgun: the last batch of an epoch may be small. So it must be so in several steps.
"""

from torch import Tensor

from train_doctor.eye import Op, Watcher

FEWEST = 4  # numbers for each feature


class NormOfFew(Watcher):
    names = {"batch_norm"}

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None or x.dim() < 2 or not isinstance(op.result, Tensor) or not op.result.requires_grad:
            return
        training = op.kwargs.get("training", op.args[5] if len(op.args) > 5 else False)
        numbers = x.numel() // max(1, x.shape[1])
        if training and numbers <= FEWEST:
            self.e.few.setdefault(self.eye.turn, (tuple(x.shape), numbers))
