"""Attention over a series that is not told which place is which.

    h = encoder(embed(x))                           every place by itself, then attention: a bag of places
    h = encoder(embed(x) + positions)

Attention treats its places alike. What was made of a series (batch, places, features) by layers that work on each place
by itself is followed to attention without a mask. Something that is added and is the same for all rows tells the
places; so do a convolution, a recurrent layer, and a column of the data that counts them.

Footguns: points, sets of items and nodes have no order, and there nothing is missing. So only series are judged: their
neighbours must be much more alike than places far from each other.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

FIRST = {"linear"}
ATTENDS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
KEEPS = {
    *("linear", "layer_norm", "dropout", "relu", "gelu", "tanh", "silu", "mul", "div", "view", "reshape", "transpose"),
    *(
        "permute",
        "unflatten",
        "flatten",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "chunk",
        "__getitem__",
        "split",
        "unbind",
    ),
    *("select", "to", "float", "rms_norm", "leaky_relu", "elu", "swapaxes", "movedim", "einops", "clone", "baddbmm"),
}
LEAST, LOOKED, ALIKE = 8, 2**21, 0.3  # rows and places; numbers; the step to a neighbour, of that to anywhere


class PlacesUnseen(Watcher):
    """Known is how many places there are, of what was made of a series place by place."""

    begins = FIRST | ATTENDS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in ATTENDS:
            masked = op.kwargs.get("is_causal") or op.kwargs.get("attn_mask") is not None
            masked = masked or op.name == "scaled_dot_product_attention" and len(op.given) > 3
            if facts[0] and len(set(facts[:3])) == 1 and not masked:
                self.note("S48", facts[0])
        elif facts[0] is None and op.name in FIRST:
            x = op.given[0]
            if not x.requires_grad and x.dim() == 3 and r.requires_grad and series(x):
                self.known.put(r, x.shape[1])
        elif op.name in KEEPS and any(facts) and len([t for t in op.given if t.dim() > 2]) == 1:
            for result in op.results:
                self.known.put(result, next(f for f in facts if f))

    def close(self) -> None:
        self.known.by_id.clear()


def series(x: Tensor) -> bool:
    """Whether neighbours among the places (dim 1) are alike, and no column is the same for all rows and counts them."""
    rows, places = x.shape[:2]
    if min(rows, places) < LEAST or x.numel() > LOOKED or not x.is_floating_point():
        return False
    x = x.detach().double()
    moving = x.std(1).mean(0) > 0
    if not bool(moving.any()) or bool((moving & (x.std(0).mean(0) < 1e-6)).any()):
        return False
    x = x[..., moving]
    near, far = (x[:, 1:] - x[:, :-1]).square().mean(), 2 * x.var(1).mean()
    return bool(torch.isfinite(near)) and float(near) < ALIKE * float(far)
