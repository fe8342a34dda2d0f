"""Targets that were standardised by themselves: the window to come has lost its level and its scale.

    mean, std = x.mean(), x.std()
    return (x - mean) / std, (y - y.mean()) / y.std()       how far y lies above x, nothing knows any more
    return (x - mean) / std, (y - mean) / std

Each row of such targets has the mean 0 and the spread 1, to the last digits, which no data have. So has each row of
what a first layer was given.

Footguns: an autoencoder is asked for its input, and a finer picture of the same signal is no window to come: where the
target looks like the input, stretched to its length, nothing is said. Patches of pictures are standardised one by one
(masked autoencoders); their input is not.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.watchers.operators import MINUS

LAYERS = {"linear", "conv1d", "gru", "lstm"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"} | MINUS
ROWS, LENGTH, LOOKED = 4, 4, 2**18  # least of a batch and of a window; most numbers
LEVEL, SPREAD, ALIKE = 1e-3, 0.02, 0.7  # distances from 0 and 1; correlation


class OwnScale(Watcher):
    names = begins = LAYERS | LOSSES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.windows: list[Tensor] = []  # standardised rows that a first layer was given in this step

    def saw(self, op: Op) -> None:
        if op.name in LAYERS:
            if not (x := op.given[0]).requires_grad and len(self.windows) < 4 and (rows := _rows(x)) is not None:
                self.windows.append(rows)
        elif self.windows and len(op.given) == 2 and op.given[0].shape == op.given[1].shape:
            target = [t for t in op.given if not t.requires_grad]
            if len(target) == 1 and (rows := _rows(target[0])) is not None:
                if any(len(x) == len(rows) and x.shape[1] != rows.shape[1] and _strange(x, rows) for x in self.windows):
                    self.note("D37", tuple(target[0].shape))

    def backward(self, loss: Tensor) -> None:
        self.windows = []

    def close(self) -> None:
        self.windows = []


def _rows(x: Tensor) -> Tensor | None:
    """As (rows, length), where each has the mean 0 and the spread 1."""
    if x.dim() not in (2, 3) or not x.is_floating_point() or len(x) < ROWS or x.numel() > LOOKED:
        return None
    if x.dim() == 3 and 1 not in x.shape[1:] or x[0].numel() < LENGTH:
        return None
    rows = x.detach().flatten(1).float()
    if float(rows[0].mean().abs()) > LEVEL:  # nearly always already here
        return None
    centred = bool((rows.mean(1).abs() < LEVEL).all())
    scaled = any(bool(((rows.std(1, correction=c) - 1).abs() < SPREAD).all()) for c in (0, 1))
    return rows if centred and scaled else None


def _strange(x: Tensor, y: Tensor) -> bool:
    """Whether a target is not its input once more, at another length."""
    if x.device != y.device:
        return False
    stretched = F.interpolate(x[:, None], y.shape[1], mode="linear", align_corners=True)[:, 0]
    pairs = torch.stack([stretched - stretched.mean(1, keepdim=True), y])
    alike = F.cosine_similarity(*pairs, dim=1)
    return float(alike.mean()) < ALIKE
