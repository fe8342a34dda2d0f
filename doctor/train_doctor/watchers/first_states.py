"""A recurrent network of whose answer the first place is read: that place has seen one step of each row.

    output, _ = lstm(x)                                 # (B, T, H) with batch_first
    head(output[:, 0])                                  the state after the first step
    head(output[:, -1])

    output, _ = lstm(x)                                 # (B, T, H)
    head(output[0]), head(output[-1])                   a row, where batch_first was forgotten: S21

Footgun: with two directions the first place holds the end of the way back. And the first place may be one of several
that are read.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.carried_states import NETWORKS

BOTH, BATCH_FIRST, LEAST = 7, 8, 3  # places of two arguments of the function; steps of a row


class FirstStates(Watcher):
    """What is known of a tensor: the number of the answer, and the dim along which time runs; None of its states."""

    begins = NETWORKS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.read: dict[int, list] = {}  # number of the answer -> its steps, whether all that was read was first
        self.count = 0

    def saw(self, op: Op) -> None:
        if op.name in NETWORKS:
            self._ask(op)
        for t in op.given:
            if (fact := self.known.get(t)) is not None:
                number, dim = fact
                asked = self.read.get(number)
                if asked is not None:
                    first = dim is not None and op.name == "__getitem__" and _first(op.args[1], dim)
                    asked[1] = first and asked[1] is not False

    def _ask(self, op: Op) -> None:
        plain = len(op.args) > BATCH_FIRST and isinstance(op.args[BATCH_FIRST], bool) and isinstance(op.args[0], Tensor)
        if not plain or op.args[BOTH] or op.args[0].dim() != 3 or not op.result[0].requires_grad:
            return
        dim = 1 if op.args[BATCH_FIRST] else 0
        if op.args[0].shape[dim] < LEAST:
            return
        self.count += 1
        self.read[self.count] = [op.args[0].shape[dim], None]
        self.known.put(op.result[0], (self.count, dim))
        for state in op.result[1:]:
            self.known.put(state, (self.count, None))

    def backward(self, loss: Tensor) -> None:
        for steps, first in self.read.values():
            if first:
                self.note("S66", steps)
        self.read = {}

    def close(self) -> None:
        self.known.by_id.clear()
        self.read = {}


def _first(index, dim: int) -> bool:
    """Whether the first place along this dim, and nothing else, is taken."""
    index = index if isinstance(index, tuple) else (index,)
    before = index[:dim]
    return len(index) > dim and all(i == slice(None) for i in before) and type(index[dim]) is int and index[dim] == 0
