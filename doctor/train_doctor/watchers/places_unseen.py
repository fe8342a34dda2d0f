"""Attention over a series that is not told which place is which.

    h = encoder(embed(x))                           every place by itself, then attention: a bag of places
    h = encoder(embed(x) + positions)

Attention treats its places alike. What was made of a series (batch, places, features) by layers that work on each place
by itself is followed to attention without a mask. Something that is added and is the same for all rows tells the
places; so do a convolution, a recurrent layer, and a column of the data that counts them.

Footguns: points, sets of items and nodes have no order, and there nothing is missing. So only series are judged: their
neighbours must be much more alike than places far from each other. Rows with times of their own have them as a column
that only rises or falls, and so have sets that were sorted. Outlines are closed, and their columns are places. A
recurrent layer or a convolution after attention reads the order, and so does a layer on all places laid side by side.
And where a series was turned, its tokens may be variables, each with an answer of its own.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS

FIRST = {"linear"}
ATTENDS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
READS_ORDER = {"lstm", "gru", "rnn_tanh", "rnn_relu", "conv1d", "conv2d"}
LAYS_FLAT = {"flatten", "reshape", "view"}
KEEPS = {
    *("linear", "layer_norm", "dropout", "relu", "gelu", "tanh", "silu", "mul", "div", "view", "reshape", "transpose"),
    *("permute", "unflatten", "flatten", "squeeze", "unsqueeze", "contiguous", "chunk", "__getitem__", "split"),
    *("select", "to", "float", "rms_norm", "leaky_relu", "elu", "swapaxes", "movedim", "einops", "clone", "baddbmm"),
    "unbind",
}
LEAST, LOOKED, ALIKE = 8, 2**21, 0.3  # rows and places; numbers; the step to a neighbour, of that to anywhere

POINTS, CLOSED = (2, 3), 2.0  # columns of points; from the last to the first, of a step to a neighbour


class PlacesUnseen(Watcher):
    """Known is how many places there are, of what was made of a series place by place."""

    begins = FIRST | ATTENDS | READS_ORDER | LAYS_FLAT | set(PLAIN) | MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.places = 0  # of a series that met in attention
        self.turned = False  # the series was turned before
        self.ordered = False  # something later knows one place from another
        self.answers: set[int] = set()  # sizes of answers with one for each token

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        self._later(op, r)
        if op.name in ATTENDS:
            masked = op.kwargs.get("is_causal") or op.kwargs.get("attn_mask") is not None
            masked = masked or op.name == "scaled_dot_product_attention" and len(op.given) > 3
            if facts[0] and len(set(facts[:3])) == 1 and not masked:
                self.places = facts[0]
        elif facts[0] is None and op.name in FIRST:
            x = op.given[0]
            if not x.requires_grad and x.dim() == 3 and r.requires_grad and series(x):
                self.known.put(r, x.shape[1])
                self.turned = not x.is_contiguous() and x.stride(1) < x.stride(2)
        elif op.name in KEEPS and any(facts) and len([t for t in op.given if t.dim() > 2]) == 1:
            for result in op.results:
                self.known.put(result, next(f for f in facts if f))

    def _later(self, op: Op, r: Tensor) -> None:
        """What tells places apart after attention."""
        x = op.given[0]
        if op.name in READS_ORDER:
            self.ordered = self.ordered or bool(self.places) and x.requires_grad
        elif op.name in LAYS_FLAT and x.requires_grad and x.dim() == 3 and self.places == x.shape[1]:
            self.ordered = self.ordered or r.shape == (len(x), x.shape[1:].numel())
        elif op.name in PLAIN or op.name in MINUS and len(op.given) == 2:
            self.answers.update(n for t in op.given if t.requires_grad and t.dim() == 3 for n in t.shape[1:])

    def backward(self, loss: Tensor) -> None:
        variables = self.turned and self.places in self.answers
        if self.places and not self.ordered and not variables:
            self.note("S48", self.places)
        self.places, self.turned, self.ordered, self.answers = 0, False, False, set()

    def close(self) -> None:
        self.known.by_id.clear()


def series(x: Tensor) -> bool:
    """Whether neighbours among the places (dim 1) are alike, and no column tells the order: by counting places alike in
    all rows, by rising or falling in every row, or as the points of a closed outline."""
    rows, places = x.shape[:2]
    if min(rows, places) < LEAST or x.numel() > LOOKED or not x.is_floating_point():
        return False
    x = x.detach().double()
    moving = x.std(1).mean(0) > 0
    if not bool(moving.any()) or bool((moving & (x.std(0).mean(0) < 1e-6)).any()):
        return False
    x = x[..., moving]
    steps = x[:, 1:] - x[:, :-1]
    if bool(((steps >= 0).all(1) | (steps <= 0).all(1)).all(0).any()):
        return False
    if x.shape[2] in POINTS and float((x[:, -1] - x[:, 0]).square().mean()) < CLOSED * float(steps.square().mean()):
        return False
    near, far = steps.square().mean(), 2 * x.var(1).mean()
    return bool(torch.isfinite(near)) and float(near) < ALIKE * float(far)
