"""Mixup of the inputs alone: `x = lam * x + (1 - lam) * x[order]`, and the loss asks for the labels of the one half.

    loss = lam * ce(out, y) + (1 - lam) * ce(out, y[order])

Without the second term the other half of each picture is noise, and a picture that is mostly a cat is called a dog.

A batch that is summed with itself in another order is followed no further. It is asked whether anything else of its
length was put into that order, or turned, before the loss.

Footguns: a share of its own for each row is used in other methods, so one for all is asked for. Where the partner comes
from another loader its labels do too, and nothing is known of that here.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import CLASSES
from train_doctor.watchers.operators import PLUS, TIMES

LEAST = 8


class Mixups(Watcher):
    """What is known of a tensor: (id of the batch, whether its rows are in another order); True of an order."""

    begins = TIMES | {"__getitem__", "index_select", "flip", "randperm", *CLASSES}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.mixed: dict[int, int] = {}  # rows -> id of the batch
        self.asked: set[int] = set()  # rows of losses
        self.elsewhere = False  # an order was used for something else
        self.moved: dict[int, set[int]] = {}  # rows -> ids of what was put in another order

    def saw(self, op: Op) -> None:
        result, given = op.result, op.given
        if any(self.known.get(t) is True for t in given):
            indexed = op.name in ("__getitem__", "index_select") and len(given) == 2 and given[0].is_floating_point()
            if not indexed or given[0].dim() < 2:
                self.elsewhere = True  # the order is used for something else: labels, in whatever way
        if not isinstance(result, Tensor) or result.requires_grad:
            if op.name in CLASSES:
                self._asked(given)
            return
        if op.name == "randperm":
            return self.known.put(result, True)
        if not given or not given[0].dim() or not result.dim() or len(given[0]) != len(result) or len(result) < LEAST:
            return
        x = given[0]
        if op.name == "flip" and _rows(*op.args[1:], *op.kwargs.values()):
            self._turned(x, result)
        elif op.name in ("__getitem__", "index_select") and len(given) == 2 and self.known.get(given[1]) is True:
            self._turned(x, result)
        elif op.name in TIMES and x.is_floating_point() and x.dim() > 1:
            others = [t for t in given if t.shape != result.shape]
            if not any(t.numel() > 1 for t in others):  # one share for all rows
                whole = next((t for t in given if t.shape == result.shape), x)
                self.known.put(result, self.known.get(whole) or (id(whole), False))
        elif op.name in PLUS and len(given) == 2:
            facts = [self.known.get(t) for t in given]
            if all(isinstance(f, tuple) for f in facts) and facts[0][0] == facts[1][0] and facts[0][1] != facts[1][1]:
                self.mixed[len(result)] = facts[0][0]

    def _turned(self, x: Tensor, result: Tensor) -> None:
        self.known.put(result, (id(x), True))
        self.moved.setdefault(len(x), set()).add(id(x))

    def _asked(self, given: list[Tensor]) -> None:
        self.asked.add(len(given[0]) if given and given[0].dim() else 0)

    def backward(self, loss: Tensor) -> None:
        """The second term of the loss may put the targets in order after the first was computed."""
        for rows, batch in self.mixed.items():
            if rows in self.asked and not self.elsewhere and not self.moved.get(rows, set()) - {batch}:
                self.note("F68", rows)
        self.mixed, self.moved, self.asked, self.elsewhere = {}, {}, set(), False

    def close(self) -> None:
        self.known.by_id.clear()


def _rows(*dims: object) -> bool:
    """Whether the rows are turned round: flip(0), flip([0]), flip(dims=(0,))."""
    return any(0 in d if isinstance(d, list | tuple) else d == 0 for d in dims)
