"""Sums into places that are named more than once: `total[index] += values`.

Python makes three calls of that line: it reads `total[index]`, adds the values to what it read, and writes the result
to `total[index]`. Where an index stands there twice, the second write replaces the first, and one value is lost.
`total.index_add_(0, index, values)` adds all of them.

Footgun: without repeated indices the line is right, so the indices themselves are looked at, in each step.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

ADDED = {"__iadd__", "__isub__", "add", "sub", "subtract", "__radd__"}
WHOLE = (torch.int64, torch.int32)
LOOKED = 2**20  # indices


class Repeats(Watcher):
    names = {"__getitem__", "__setitem__"} | ADDED
    begins = {"__getitem__"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # what was read or computed from it -> ids of the tensor and its indices

    def saw(self, op: Op) -> None:
        if op.name == "__getitem__" and len(op.given) > 1 and isinstance(op.result, Tensor):
            if indices := _whole(op.args[1]):
                self.known.put(op.result, (id(op.given[0]), [id(i) for i in indices]))
        elif op.name in ADDED and isinstance(op.result, Tensor) and op.given:
            fact = next((f for t in op.given if (f := self.known.get(t))), None)
            if fact is not None:
                self.known.put(op.result, fact)
        elif op.name == "__setitem__" and len(op.args) == 3 and isinstance(op.args[2], Tensor):
            indices, fact = _whole(op.args[1]), self.known.get(op.args[2])
            if indices and fact == (id(op.args[0]), [id(i) for i in indices]):
                self._written(indices)

    def _written(self, indices: list[Tensor]) -> None:
        count = indices[0].numel()
        if len({i.shape for i in indices}) > 1 or not 1 < count <= LOOKED:
            return
        different = torch.stack([i.detach().flatten().long() for i in indices]).unique(dim=1).shape[1]
        if different < count:
            self.e.overwritten.setdefault(self.eye.turn, (count, count - different))

    def close(self) -> None:
        self.known.by_id.clear()


def _whole(index) -> list[Tensor]:
    """The tensors of whole numbers in an index, if there are no others."""
    tensors = [i for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, Tensor)]
    return tensors if all(t.dtype in WHOLE for t in tensors) else []
