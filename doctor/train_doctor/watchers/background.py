"""Boxes that are asked for where there is nothing: the mean over all cells, anchors or queries counts the background.

    loss = F.cross_entropy(scores, classes) + F.smooth_l1_loss(boxes, wanted)          wanted is 0 at the background
    on = classes > 0;  F.smooth_l1_loss(boxes[on], wanted[on])                         was meant

Most places hold nothing, so most of what the boxes are asked for is zeros. Targets of several numbers for each place
are compared with those of a loss of classes in the same step: are they all 0 just where the class is 0?

Footgun: an amount may be 0 rightly where nothing happened. So there must be two to eight numbers for each place, and
nine places of ten must hold nothing.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import BINARY, CLASSES, PLAIN

NUMBERS, EMPTY, LEAST, LOOKED = (2, 8), 0.9, 8, 2**22  # for each place; share of background; places that hold something


class Background(Watcher):
    names = begins = {*CLASSES, *BINARY, *PLAIN}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.classes: list[Tensor] = []  # targets since the last backward
        self.wanted: list[Tensor] = []

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or not op.given[0].requires_grad or op.given[1].requires_grad:
            return
        target = op.given[1].detach()
        if op.name not in PLAIN:
            if len(self.classes) < 4 and target.dim():
                self.classes.append(target)
        elif op.kwargs.get("reduction", "mean") == "mean" and target.dim() > 2 and target.numel() <= LOOKED:
            if len(op.given) == 2 and target.shape == op.given[0].shape and len(self.wanted) < 4:
                self.wanted.append(target)

    def backward(self, loss: Tensor) -> None:
        for wanted in self.wanted:
            for classes in self.classes:
                if (share := _empty(wanted, classes)) > EMPTY:
                    self.note("D18", ("background", share))
        self.classes, self.wanted = [], []

    def close(self) -> None:
        self.classes, self.wanted = [], []


def _empty(wanted: Tensor, classes: Tensor) -> float:
    """The share of places that have neither a class nor numbers, where these are the same places."""
    for dim in {1, wanted.dim() - 1}:  # (B, K, H, W) and (B, N, K)
        here = wanted.shape[dim]
        if NUMBERS[0] <= here <= NUMBERS[1] and classes.numel() * here == wanted.numel():
            nothing = (wanted == 0).all(dim).flatten()
            if bool((nothing == (classes == 0).flatten()).all()) and int((~nothing).sum()) >= LEAST:
                return float(nothing.float().mean())
    return 0.0
