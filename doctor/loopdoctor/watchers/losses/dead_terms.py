"""Losses that carry no gradient and are added to one that does: they change the number and train
nothing.

    with torch.no_grad():
        features = vgg(generated)                   the way to what generated them is cut
    loss = mse(features, wanted) + 0.001 * total_variation(generated)

A loss of torch whose inputs have no graph is followed through factors and sums into the loss that
is differentiated.

Footgun: what is summed for a log has no graph at all, and reaches no backward.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import LOSSES
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, TIMES

KEEPS = PLUS | MINUS | TIMES | OVER | {"sum", "mean", "stack", "view", "squeeze"}


class DeadTerms(Watcher):
    """What is known of a number: the loss without a gradient that is in it, and its value."""

    begins = set(LOSSES)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        result = op.result
        if not isinstance(result, Tensor) or result.dim() > 1:
            return
        if op.name in LOSSES:
            if (
                not result.requires_grad
                and not result.dim()
                and self.eye.grad
                and not torch.is_inference(result)
            ):
                self.known.put(result, (op.name, float(result)))
            return
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if fact is not None and op.name in KEEPS and fact[1]:
            self.known.put(result, fact)

    def backward(self, loss: Tensor) -> None:
        if fact := self.known.get(loss):
            self.note("F2", fact)

    def close(self) -> None:
        self.known.by_id.clear()
