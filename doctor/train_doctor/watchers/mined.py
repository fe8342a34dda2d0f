"""The hardest negative of a row that may be of its own class: only the row itself was left out.

    same = labels[:, None] == labels[None, :]
    d = torch.cdist(z, z)
    hardest_positive = (d * same).amax(1)
    hardest_negative = (d + 1e6 * torch.eye(len(z))).amin(1)            1e6 * same was meant

In a batch with several rows of a class the nearest other row is often one of them, and is pushed away. The least of a
table of distances is looked at: what was added to it, or filled in, before.

Footgun: without labels each row is a class of its own. So a table of "the same", with more in it than the diagonal,
must have been put on the distances in the same step, for the positives. And where the least of what the classes leave
is asked for as well, that of all others is a price of its own (KoLeo). A least that keeps its dim is taken off the row.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import PLUS, TIMES

LEAST = {"min", "amin"}
ITSELF, CLASS = "itself", "class"
SMALL, LARGE = 4, 2**11  # rows


class Mined(Watcher):
    """Known are distances of which only each row's own was put out of the way."""

    begins = PLUS | TIMES | {"masked_fill", "where", "fill_diagonal"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.mined = self.labelled = self.sorted = False

    def saw(self, op: Op) -> None:
        if op.name in LEAST:
            facts = [self.known.get(t) for t in op.given if op.results and op.results[0].dim() == 1]
            self.mined, self.sorted = self.mined or ITSELF in facts, self.sorted or CLASS in facts
            return
        table, result = next((t for t in op.given if _table(t) and t.requires_grad), None), op.result
        if table is None or not isinstance(result, Tensor):
            return
        other = next((t for t in op.given if t is not table and _table(t) and not t.requires_grad), None)
        what = ITSELF if op.name == "fill_diagonal" else _what(other) if other is not None else None
        self.labelled = self.labelled or what == CLASS
        if what is not None and op.name not in TIMES:
            self.known.put(result, what)

    def backward(self, loss: Tensor) -> None:
        if self.mined and self.labelled and not self.sorted:
            self.note("F99", "itself")
        self.mined = self.labelled = self.sorted = False

    def close(self) -> None:
        self.known.by_id.clear()


def _table(t: Tensor) -> bool:
    return t.dim() == 2 and SMALL <= len(t) == t.shape[1] <= LARGE


def _what(t: Tensor) -> str | None:
    """Whether the two values of a table mark the diagonal, or the pairs of one class (or all others)."""
    marked = t.detach().bool()
    if t.is_floating_point() and not bool(((t == 0) | (t == t.max())).all()):
        return None
    if torch.equal(marked, torch.eye(len(t), dtype=torch.bool, device=t.device)):
        return ITSELF
    marked = marked if marked[0, 0] else ~marked
    pairs = bool(marked.diagonal().all()) and torch.equal(marked, marked.T)
    return CLASS if pairs and len(t) < int(marked.sum()) < t.numel() else None
