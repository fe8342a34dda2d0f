"""A softmax over the rows of a batch: `softmax(scores, dim=0)` where rows lie along dim 0.

    weights = torch.softmax(scores, dim=0)
    (B, N), and each of the N places is shared out among B rows
    weights = torch.softmax(scores, dim=1)          among the N places of a row

What is learned then hangs on the other rows of the batch, and a row alone is answered differently.
F.softmax without a dim takes dim 0 for one and for three dimensions.

What came out of such a softmax is followed to a loss, of torch or by hand. It is wrong where that
still has one answer for each of its rows, or meets a part of a loader's batch that was shared out
among the rows in the same way.

Footgun: the rows of one graph or one bag are no batch: there what is pooled with these weights is a
single answer. And a matrix of all pairs has rows on both sides, a table that learns no rows of a
batch, and time may come first.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import dataloader, default_collate

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import LOSSES, kind
from loopdoctor.watchers.operators import MINUS, TIMES

SOFT = {"softmax", "log_softmax", "softmin", "sparsemax"}
SUMS = {"matmul", "mm", "bmm", "__matmul__", "einsum"}
NETWORKS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
LEAST, CLOSE = 4, 1e-3  # rows; to a sum of 1


class OverBatch(Watcher):
    """What is known of a tensor: over how many rows a softmax in it was taken."""

    begins = SOFT | NETWORKS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.across: set[int] = set()  # what went through a softmax over rows
        self.otherwise: set[int] = set()  # and over another dim
        self.pending: list[int] = []
        self.parts = Known(self)  # of a batch whose rows torch has put together
        self.listed = Known(self)  # such, shared out among its rows
        self.after(dataloader._BaseDataLoaderIter, "__next__", "given")
        self.time_first = False

    def given(self, batch: Any, iterator: Any) -> None:
        plain = getattr(iterator, "_collate_fn", None) is default_collate
        for part in batch if plain and isinstance(batch, list | tuple) else ():
            if isinstance(part, Tensor) and part.dim() == 2:
                self.parts.put(part, True)

    def saw(self, op: Op) -> None:
        if (
            op.name in SOFT
            and op.results
            and self.parts.get(op.given[0])
            and op.kwargs.get("dim") == 0
        ):
            self.listed.put(op.results[0], True)
        if op.name in NETWORKS:
            self.time_first = self.time_first or op.args[-1] is False
            return
        facts = [self.known.get(t) for t in op.given]
        rows = next((f for f in facts if f), None)
        if op.name in SOFT and rows is None and op.given:
            rows = self._begins(op)
        elif rows is None:
            return
        elif op.name in LOSSES or op.name in MINUS and len(op.given) == 2:
            answer, target = op.given[0], op.given[-1]
            if (
                len(op.given) > 1
                and not target.requires_grad
                and target.dim()
                and len(target) == rows == len(answer)
            ):
                if not bool(
                    ((target.detach().float().sum(0) - 1).abs() < CLOSE).all()
                ):  # it is shared out in the same way
                    self.pending.append(rows)
        elif op.name in TIMES | {"__getitem__", "gather"} and self._by_hand(op, facts, rows):
            self.pending.append(rows)
        elif op.name in TIMES and len(op.given) == 2 and any(self.listed.get(t) for t in op.given):
            self.pending.append(rows)
        elif op.name in SUMS and any(
            len(t) == t.shape[-1] == rows for t in op.given if t.dim() == 2
        ):
            return  # over all pairs
        if rows:
            for r in op.results:
                if r.requires_grad and r.dim() and len(r) == rows:
                    self.known.put(r, rows)

    def _by_hand(self, op: Op, facts: list, rows: int) -> bool:
        """Return a cross-entropy without torch's: the column of each row's class is picked, or all
        are multiplied with one-hot rows.
        """
        answers = op.given[[f == rows for f in facts].index(True)]
        if answers.dim() != 2 or not isinstance(op.result, Tensor) or answers.shape[1] < 2:
            return False
        if op.name not in TIMES:
            return (
                op.result.numel() == rows
                and len(op.given) > 1
                and not op.given[-1].is_floating_point()
            )
        other = next((t for t in op.given if t is not answers), None)
        hot = other is not None and other.shape == answers.shape and not other.requires_grad
        return hot and bool(((other == 0) | (other == 1)).all()) and bool((other.sum(1) == 1).all())

    def _begins(self, op: Op) -> int | None:
        x = op.given[0]
        dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
        dim = 0 if dim is None and x.dim() in (1, 3) else dim
        first = dim in (0, -x.dim())
        if not first:
            self.otherwise.add(id(x))
        if isinstance(x, nn.Parameter) or self.time_first and x.dim() == 3:
            return None
        if _pairs(x.grad_fn):
            return None
        across = first and x.dim() > 1 and len(x) >= LEAST
        self.across.add(id(x)) if across else None
        return len(x) if across and x.requires_grad and len(x) not in x.shape[1:] else None

    def backward(self, loss: Tensor) -> None:
        """Leave alone a softmax over both dims, which compares all with all."""
        if self.pending and not self.across & self.otherwise:
            self.note("S33", self.pending[0])
        self.across, self.otherwise, self.pending, self.time_first = set(), set(), [], False

    def close(self) -> None:
        self.known.by_id.clear()


def _pairs(node) -> bool:
    """Whether it is a product of two things that were made, all of one with all of the other: no
    layer's answers.
    """
    while (
        kind(node) in ("Div", "Mul", "Sub", "Add", "MaskedFill")
        and node.next_functions[0][0] is not None
    ):
        node = node.next_functions[0][0]
    sides = (
        [edge for edge, _ in node.next_functions]
        if kind(node) in ("Mm", "Bmm", "UnsafeView")
        else []
    )
    while len(sides) == 1 and sides[0] is not None:
        sides = [edge for edge, _ in sides[0].next_functions]
    sides = [
        side.next_functions[0][0] if kind(side) in ("T", "Transpose") else side for side in sides
    ]
    return len(sides) == 2 and all(
        side is not None and not hasattr(side, "variable") for side in sides
    )
