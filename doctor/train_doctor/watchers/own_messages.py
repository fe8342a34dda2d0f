"""Messages along edges that are summed where they come from: each node is told what it says itself.

    message = f(x[src])
    sums.index_add(0, src, message)                     dst was meant: who is at the other end has no part

Rows that were taken at an index are followed through functions of rows. If a sum at the same index is made of nothing
else, an edge tells how many neighbours a node has, and nothing of them.

Footgun: rows with an edge's own numbers, or of both ends, may be summed at either end. An index is known by its place
in memory, since edge_index[0] is another tensor each time.
"""

from typing import Any

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.first_graphs import SUMS

TAKES = {"__getitem__", "index_select"}
EDGES, KEPT = 8, 64


class OwnMessages(Watcher):
    """Known are rows and the places of the indices that they were taken at; None where there is more in them."""

    begins = TAKES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pending: list[int] = []
        self.ends = False
        self.kept: list[Tensor] = []  # indices, so that no other tensor comes to their places

    def saw(self, op: Op) -> None:
        index = next((t for t in op.given if not t.is_floating_point() and t.dtype.itemsize > 1), None)
        given = op.given[1:] if op.name in SUMS else op.given  # the first is what the rows are summed into
        rows = [t for t in given if t.is_floating_point() and t.dim()]
        facts = [(t, fact) for t in rows if (fact := self.known.get(t))]
        if op.name in SUMS and index is not None and facts:
            (message, taken), *others = facts
            if not others and taken == {_place(index)} and message.requires_grad and _repeats(index):
                self.pending.append(len(message))
            elif None not in taken and _place(index) not in taken:
                self.ends = True  # another sum comes to the other end
        elif op.name in TAKES and (not facts or _others(index, rows, op.result)):
            if index is None or len(rows) != 1 or index.dim() != 1 or len(index) < EDGES or len(self.kept) > KEPT:
                return
            self.kept.append(index)
            for r in op.results:
                if len(r) == len(index) and r.dim() > 1:
                    self.known.put(r, frozenset({_place(index)}))
        elif facts and op.name not in SUMS:
            of = len(facts[0][0])
            whole = all(self.known.get(t) or len(t) != of for t in rows)
            taken = frozenset().union(*(fact for _, fact in facts), () if whole else (None,))
            for r in op.results:
                if r.is_floating_point() and r.dim() and len(r) == of:
                    self.known.put(r, taken)

    def backward(self, loss: Tensor) -> None:
        if self.pending and not self.ends:
            self.note("S43", self.pending[0])
        self.kept, self.pending, self.ends = [], [], False

    def close(self) -> None:
        self.known.by_id.clear()
        self.kept = []


def _repeats(index: Tensor) -> bool:
    """Several edges begin at one node; rows that were sent to an expert come back one by one."""
    return index.dim() > 1 or len(index.unique()) < len(index)


def _others(index: Tensor | None, rows: list[Tensor], taken: Any) -> bool:
    """Whether rows of edges are taken of rows of nodes, which may have been picked for this step themselves."""
    return index is not None and index.dim() == 1 and len(rows[0]) != len(index) == len(taken)


def _place(index: Tensor) -> tuple[int, int]:
    return index.data_ptr(), len(index)
