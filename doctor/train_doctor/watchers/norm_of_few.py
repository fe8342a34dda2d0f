"""Normalisation over very few numbers: a batch of two rows, and pictures of one pixel.

    nn.BatchNorm1d(64) on (2, 64)           each feature becomes -1 in one row and 1 in the other

What a row is told then is only which of two is larger. The statistics of so few numbers are noise, and those that are
kept for the evaluation fit none of them.

    nn.LayerNorm(1), nn.GroupNorm(64, 64) on (B, 64)        one number less itself is 0, whatever it was

Footgun: the last batch of an epoch may be small. So it must be so in several steps.
"""

import math

import torch
from torch import Tensor

from train_doctor.eye import Op, Watcher

FEWEST = 4  # numbers for each feature


class NormOfFew(Watcher):
    names = {"batch_norm", "layer_norm", "group_norm"}

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None or x.dim() < 2 or not isinstance(op.result, Tensor) or not op.result.requires_grad:
            return
        if op.name != "batch_norm":
            self._of_one(op, x)
            return
        training = op.kwargs.get("training", op.args[5] if len(op.args) > 5 else False)
        numbers = x.numel() // max(1, x.shape[1])
        if training and numbers <= FEWEST:
            self.e.few.setdefault(self.eye.turn, (tuple(x.shape), numbers))

    def _of_one(self, op: Op, x: Tensor) -> None:
        given = op.args[1] if len(op.args) > 1 else op.kwargs.get("normalized_shape", op.kwargs.get("num_groups"))
        if op.name == "layer_norm":
            numbers = math.prod(given) if isinstance(given, tuple | list | torch.Size) else 0
        else:
            numbers = x[0].numel() // given if isinstance(given, int) and given else 0
        if numbers == 1 and x.requires_grad:
            self.note("S29 one", (op.name, tuple(x.shape)))
