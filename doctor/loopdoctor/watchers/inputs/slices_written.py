"""Noise, or a mask, that is written into a slice of the stored data, where a copy was meant.

    x = data[i : i + 64]                a view of what is stored
    x.mul_(a).add_(noise * b)           so the noise stays, and the next visit adds more
    ids[torch.rand(ids.shape) < 0.15] = mask_id

Arithmetic in place with numbers that were drawn in this step, on a view of a tensor that has been
there since an earlier step, is remembered until the model is given that view. A data set behind a
DataLoader is the matter of stored.

Footguns: a buffer that is filled anew is written into on purpose, so whatever other tensors are
copied into, or all of whose slice is drawn at once, is left alone. The chains of a Langevin sampler
are too: the model is given them before they are changed. And a copy that was made for one epoch
(data[perm]) may be written into: it is read once, from one end to the other, so some slice must lie
elsewhere than beside the one before it.
"""

import weakref

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

DRAWS = {"randn", "randn_like", "rand", "rand_like", "bernoulli", "normal"}
FOLLOWED = {
    "mul",
    "add",
    "sub",
    "div",
    "__rmul__",
    "lt",
    "gt",
    "le",
    "ge",
    "float",
    "bool",
    "to",
    "logical_and",
}
FOLLOWED |= {"__and__", "bitwise_and", "unsqueeze", "expand", "view", "reshape", "sqrt"}
INTO = {
    "add",
    "sub",
    "mul",
    "div",
    "masked_fill",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__setitem__",
}
# in place, they draw by themselves
AT_ONCE = {"normal", "uniform", "bernoulli", "geometric", "exponential"}
FILLED = {"copy", "__setitem__", "index_copy", "scatter"}
FED = {
    "linear",
    "cat",
    "embedding",
    "matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "lstm",
    "gru",
    "layer_norm",
}
KEPT = 64  # tensors that are remembered


class SlicesWritten(Watcher):
    """What is known of a tensor: that it was drawn in this step, or computed from what was."""

    names = DRAWS | FOLLOWED | INTO | FILLED | FED | AT_ONCE

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.drawn = Known(self)
        # of each tensor that has slices, when it was met first
        self.data: dict[int, tuple[weakref.ref, int]] = {}
        self.filled: set[int] = set()  # those that other tensors are copied into
        self.fed: set[int] = set()  # those of which the model was given something in this step
        # that something drawn was written into, and the slice's shape
        self.written: dict[int, tuple[int, ...]] = {}
        # where the last slice that was written into began and ended
        self.ends: dict[int, tuple[int, int]] = {}

    def saw(self, op: Op) -> None:
        if op.name in FED:
            for whole in map(self._whole, op.given):
                if whole in self.written and whole not in self.filled and self.eye.grad:
                    self.note("D13 slices", self.written.pop(whole))
                self.fed.add(whole)
            return
        first = op.given[0] if op.given else None
        inside = first is not None and (op.result is first or op.name == "__setitem__")
        if inside and (whole := self._whole(first) or id(first) * (id(first) in self.data)):
            self._write(op, first, whole)
        elif inside and op.name in AT_ONCE:  # empty_like(x).normal_()
            self.drawn.put(first, True)
        elif not inside and (
            op.name in DRAWS or op.name in FOLLOWED and any(map(self.drawn.get, op.given))
        ):
            for result in op.results:
                self.drawn.put(result, True)

    def _write(self, op: Op, first: Tensor, whole: int) -> None:
        drawn = any(self.drawn.get(t) for t in op.given[1:])
        value = op.args[2] if op.name == "__setitem__" and len(op.args) == 3 else None
        if op.name in AT_ONCE | {"copy"} or isinstance(value, Tensor) and not self.drawn.get(value):
            self.filled.add(whole)
        elif drawn and op.name in INTO and not isinstance(value, Tensor):
            began = first.storage_offset(), first.storage_offset() + first.stride(0) * len(first)
            last, self.ends[whole] = self.ends.get(whole, began), began
            if not {*began} & {*last}:
                self.note("D13 elsewhere", began[0])
            if whole not in self.fed and self.data[whole][1] < self.eye.turn:
                self.written[whole] = tuple(first.shape)

    def _whole(self, t: Tensor) -> int:
        """Return a name for the tensor of which this is a view: 0 where there is none, or it
        learns.
        """
        base = t._base
        if base is None or base.requires_grad or t.requires_grad:
            return 0
        ref, _ = self.data.get(id(base), (None, 0))
        if ref is None or ref() is not base:
            if len(self.data) >= KEPT:
                return 0
            self.data[id(base)] = weakref.ref(base), self.eye.turn
            self.filled.discard(id(base))
            self.ends.pop(id(base), None)
        return id(base)

    def backward(self, loss: Tensor) -> None:
        self.written, self.fed = {}, set()
        self.data = {name: kept for name, kept in self.data.items() if kept[0]() is not None}

    def close(self) -> None:
        self.drawn.by_id.clear()
        self.written, self.fed, self.data, self.ends = {}, set(), {}, {}
