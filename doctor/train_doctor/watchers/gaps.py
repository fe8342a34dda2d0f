"""Gaps that are rebuilt as if they were data: an autoencoder of ratings whose loss counts what nobody rated.

    loss = ((model(r) - r) ** 2).mean()                       r is 0 where there is no rating
    loss = ((model(r) - r) ** 2 * known).sum() / known.sum()

Most of the loss asks for zeros, so all answers are pulled to zero. A difference of an answer and the model's own input
is followed to its mean, and it is asked whether a mask came between.

Footgun: counts and dark pixels are zeros that are meant. Numbers around zero have none by themselves: where more than
half are exactly 0, and the others lie on both sides of it or far above it, zeros stand for nothing.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

FIRST = {"linear", "dropout"}
MINUS = {"sub", "subtract", "__sub__", "rsub", "__rsub__"}
POWERS = {"pow", "square", "abs", "__pow__"}
SAME = {"view", "reshape", "flatten"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
EMPTY, LEAST, LOOKED = 0.5, 64, 2**22  # share of zeros; numbers


class Gaps(Watcher):
    names = FIRST | MINUS | POWERS | SAME | LOSSES | {"mean"}
    begins = FIRST | MINUS | LOSSES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # a difference of an answer and an input with gaps -> share of gaps
        self.inputs: list[Tensor] = []

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        if op.name in FIRST:
            x = op.given[0]
            if not x.requires_grad and x.dim() == 2 and x.is_floating_point() and len(self.inputs) < 4:
                self.inputs.append(x)
            return
        if op.name in MINUS or op.name in LOSSES:
            share = self._share(op.given) if len(op.given) == 2 else 0.0
            if share and op.name in MINUS and isinstance(op.result, Tensor):
                self.known.put(op.result, share)
            elif share and op.kwargs.get("reduction", "mean") == "mean":
                self.e.gaps.setdefault(self.eye.turn, (share, op.name))
            return
        share = self.known.get(op.given[0])
        if share and op.name == "mean":
            self.e.gaps.setdefault(self.eye.turn, (share, "a square"))
        elif share and isinstance(op.result, Tensor):
            self.known.put(op.result, share)

    def _share(self, sides: list[Tensor]) -> float:
        """Of gaps in the target, which is the input."""
        for answer, target in (sides, sides[::-1]):
            if not answer.requires_grad or target.requires_grad or answer.shape != target.shape:
                continue
            for x in self.inputs:
                if x.shape == target.shape and LEAST <= x.numel() <= LOOKED and (x is target or torch.equal(x, target)):
                    return _gaps(x)
        return 0.0

    def backward(self, loss: Tensor) -> None:
        self.inputs = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.inputs = []


def _gaps(x: Tensor) -> float:
    """The share of zeros, where they are no numbers like the others."""
    held = x[x != 0]
    share = 1 - held.numel() / x.numel()
    if not EMPTY < share < 1:
        return 0.0
    low, high = held.aminmax()
    both = low < 0 < high
    far = low > 0 and held.median() >= 2 * low and low >= 0.1 * high
    return float(share) if both or far else 0.0
