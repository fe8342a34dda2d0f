"""Data that an augmentation writes into: the second epoch is given what the first one has left.

    def __getitem__(self, k):
        x = self.pictures[k]            a view of what is stored
        x[:, a:b] = 0
        so this stays, and with each epoch more of the pictures is gone

While a DataLoader fetches in this process, numbers that are written into a tensor of its data set,
and arithmetic in place on it, are remembered by the storage, and it is asked whether an item of the
batch lies there.

Footgun: a data set that keeps what it has read writes tensors into itself, each once. So only plain
numbers and arithmetic count, and only in what is given out.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import dataloader

from loopdoctor.eye import Eye, Op, Watcher, tensors
from loopdoctor.measures import values_of

ARITHMETIC = {
    *(
        "add",
        "sub",
        "subtract",
        "mul",
        "multiply",
        "div",
        "divide",
        "clamp",
        "zero",
        "fill",
        "masked_fill",
        "neg",
    ),
    *(
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "index_fill",
        "clip",
        "normal",
        "uniform",
        "bernoulli",
    ),
}
DEEP = 3  # data sets inside each other


class Stored(Watcher):
    names = ARITHMETIC | {"__setitem__", "stack"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.fetched: Any = None  # the data set that is read just now
        self.written: set[int] = set()  # storages of it
        self.around(dataloader._BaseDataLoaderIter, "__next__", "_fetching")

    def _fetching(self, original: Callable, iterator: Any) -> Any:
        if not self.eye.on:
            return original(iterator)
        self.fetched, self.written = getattr(iterator, "_dataset", None), set()
        try:
            return original(iterator)
        finally:
            self.fetched = None

    def saw(self, op: Op) -> None:
        if self.fetched is None or not op.given:
            return
        if op.name == "stack":
            if self.written and any(_storage(t) in self.written for t in op.given):
                self.e.stored.setdefault(self.eye.turn, type(self.fetched).__name__)
            return
        number = (
            op.name == "__setitem__" and len(op.args) == 3 and not isinstance(op.args[2], Tensor)
        )
        if number or op.name in ARITHMETIC and op.result is op.given[0]:
            where = _storage(op.given[0])
            if where in set(map(_storage, _kept(self.fetched))):
                self.written.add(where)

    def close(self) -> None:
        self.fetched = None


def _storage(t: Tensor) -> int:
    return values_of(t).untyped_storage().data_ptr()


def _kept(dataset: Any, deep: int = DEEP) -> Iterator[Tensor]:
    """Tensors that a data set has, also those of a data set inside of it."""
    held = list(getattr(dataset, "__dict__", {}).values())
    yield from tensors(held)
    for inner in held if deep else ():
        if (
            hasattr(inner, "__getitem__")
            and hasattr(inner, "__dict__")
            and not isinstance(inner, Tensor)
        ):
            yield from _kept(inner, deep - 1)
