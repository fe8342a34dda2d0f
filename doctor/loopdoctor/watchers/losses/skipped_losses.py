"""Losses that are NaN or infinite, and whose batches are passed over without a word.

    if not torch.isfinite(loss):
        continue

The guard keeps the weights sound, and hides that most batches teach nothing: p * log(p) is NaN
where p is 0. No backward is ever made of such a loss, so it is met where the program asks whether
it is finite, or for its number.

Footguns: a search for the length of a step tries losses of the same data, which no backward
follows; and the range of masked numbers is infinite in many a log. A guard under a gradient scaler
has something to do now and then. How often is for the check to judge.
"""

import math

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import kind

ASKS = {"isfinite", "isnan", "isinf", "item", "tolist"}
LAYERS, ENDS = {"linear", "conv1d", "conv2d", "embedding"}, {"Min", "Max", "Amin", "Amax"}
KEPT, FEW = 64, 16


class SkippedLosses(Watcher):
    names = begins = ASKS | LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        # what the network was given for each, since the last backward
        self.met: list[Tensor | None] = []
        self.data: Tensor | None = None

    def saw(self, op: Op) -> None:
        loss = op.given[0] if op.given else None
        if op.name in LAYERS:
            self._given(op)
            return
        if loss is not None and kind(loss.grad_fn) in ENDS:
            return  # a range for the log
        if loss is None or loss.numel() != 1 or not loss.requires_grad or self.known.get(loss):
            return
        number = op.result if isinstance(op.result, float) else None
        if isinstance(op.result, Tensor):
            number = 0.0 if bool(op.result) is (op.name == "isfinite") else math.nan
        if number is not None and not math.isfinite(number):
            self.known.put(loss, True)
            self.met.append(self.data)

    def backward(self, loss: Tensor) -> None:
        own = bool(self.known.get(loss))
        self._passed(
            len([data for data in self.met[: len(self.met) - own] if not _same(data, self.data)])
        )
        self.met = []

    def close(self) -> None:
        self._passed(len(self.met))
        self.known.by_id.clear()

    def _given(self, op: Op) -> None:
        """Keep a few numbers of what a first layer is given: a search tries the same data again."""
        x = op.given[0]
        if not x.requires_grad and x.numel() and self.eye.grad:
            # no sync
            self.data = (
                x.detach().flatten()[:: max(1, x.numel() // FEW)][:FEW].to(torch.float32, copy=True)
            )

    def _passed(self, losses: int) -> None:
        skipped = self.e.habits["N17 skipped"]
        for _ in range(min(losses, KEPT - len(skipped))):
            skipped[len(skipped)] = True


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.shape == two.shape and one.device == two.device and torch.equal(one, two)
