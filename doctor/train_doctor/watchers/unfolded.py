"""Two axes that were made one, and taken apart again in the other order.

    x = frames.flatten(0, 1)                        (B, T, ...) to (B * T, ...): all frames of the first film first
    features = encoder(x).view(T, B, -1)            row t of this is a piece of several films
    features = encoder(x).view(B, T, -1)

What keeps its rows on the way through a network keeps the order of the two axes.

Footgun: as many frames as films tell nothing. Rows that are laid flat again were groups in their order (in_order.py).
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher, place
from train_doctor.watchers.in_order import InOrder

FOLDS = {"flatten", "reshape", "view"}
UNFOLDS = FOLDS | {"unflatten"}
MIXES = {"cat", "concat", "stack", "__getitem__", "index_select", "gather", "sort", "flip", "roll", "repeat", "split"}
MIXES |= {"transpose", "permute", "T", "t", "matmul", "__matmul__", "mm", "bmm", "einsum", "repeat_interleave", "chunk"}


class Unfolded(Watcher):
    """What is known of a tensor: the sizes of the two axes that its rows were."""

    begins = FOLDS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.groups = InOrder(self)

    def backward(self, loss: Tensor) -> None:
        self.groups.tell()

    def saw(self, op: Op) -> None:
        self.groups.saw(op)
        if not op.results or not op.given or not op.given[0].dim():
            return
        fact, out = self.known.get(op.given[0]), op.results[0]
        if op.name in UNFOLDS and fact is not None:
            one, two = fact
            if out.shape[:2] == (two, one) != (one, two) and out.dim() > 1 and len(op.given[0]) == one * two:
                if place() is not None:
                    self.groups.begin(out, "F30 unfolded", (op.name, one, two))
                return
        elif op.name in FOLDS:
            shape = op.given[0].shape
            if len(shape) < 3 or not out.dim() or len(out) != shape[0] * shape[1] or min(shape[:2]) < 2:
                return
            fact = (shape[0], shape[1]) if out.shape[1:] == shape[2:] else None
        if fact is not None and op.name not in MIXES:
            for r in op.results:
                if r.dim() and len(r) == fact[0] * fact[1]:
                    self.known.put(r, fact)

    def close(self) -> None:
        self.known.by_id.clear()
        self.groups.known.by_id.clear()
