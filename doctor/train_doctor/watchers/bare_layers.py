"""Layers with nothing between them: `nn.Linear(20, 64), nn.Linear(64, 64)` is one linear layer.

The product of two matrices is a matrix. Without a function that bends between them, a deep network can do what its
first and last layer could do together, and no more. What a linear layer or a convolution gives is followed through
views, dropouts and batch normalisations into the next one.

Footguns: two maps through a narrow waist are another thing than one (a low-rank adapter, a bottleneck), so the width
between them must not be below both others. What is used twice (a residual path) is left alone, and so is one pair in a
network that bends elsewhere: an embedding and its classifier.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES

LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
STILL = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "dropout", "dropout2d", "batch_norm", "contiguous", "to"}
ASKED = {"shape", "size", "dim", "backward", "", "is_nested", "item", "detach", "grad", "data"}
SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "neg", "mean", "sum", "cat", "stack", "transpose"}
SUMS |= {"permute", "T", "__getitem__", "double", "float", "__truediv__", "div"}
UNBENT = LAYERS | STILL | SUMS | set(LOSSES)  # what else makes something that learns bends it


class BareLayers(Watcher):
    """What is known of what a layer gave: [sizes in and out, uses by layers, other uses, id of its weights]."""

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pairs: list[tuple[list, tuple[int, int], int]] = []

    def saw(self, op: Op) -> None:
        if op.name in ASKED:
            return
        sizes = _sizes(op) if op.name in LAYERS else None
        for t in op.given:
            fact = self.known.get(t)
            if fact is None:
                continue
            if sizes is not None and t is op.given[0]:
                fact[1] += 1
                self.pairs.append((fact, sizes, id(op.given[1])))
            elif op.name in STILL and isinstance(op.result, Tensor):
                self.known.put(op.result, fact)
            else:
                fact[2] += 1
        if sizes is not None and isinstance(op.result, Tensor) and op.result.requires_grad:
            self.known.put(op.result, [sizes, 0, 0, id(op.given[1])])

    def backward(self, loss: Tensor) -> None:
        pairs = {}  # by their weights: a network may be called twice
        for (before, layers, others, first), after, second in self.pairs:
            if layers == 1 and not others and before[1] >= min(before[0], after[1]):
                pairs[first, second] = (*before, after[1])
        bent = self.eye.learning - UNBENT - ASKED
        if pairs and (len(pairs) > 1 or not bent):
            self.e.unbent.setdefault(self.eye.turn, [*pairs.values()])
        self.known.by_id.clear()
        self.pairs = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.pairs = []


def _sizes(op: Op) -> tuple[int, int] | None:
    """In and out, of a layer that learns and mixes all that it is given."""
    if len(op.given) < 2 or not isinstance(op.given[1], nn.Parameter) or not op.given[1].requires_grad:
        return None
    weight, x = op.given[1], op.given[0]
    if weight.dim() == 2 and op.name == "linear":
        return weight.shape[1], weight.shape[0]
    if weight.dim() > 2 and weight[0, 0].numel() > 1 and x.dim() == weight.dim() and x.shape[1] == weight.shape[1]:
        return weight.shape[1], weight.shape[0]
    return None
