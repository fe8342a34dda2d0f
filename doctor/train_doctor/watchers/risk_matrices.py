"""Risk sets that are written as a matrix of comparisons, the wrong way round.

    at_risk = times[None, :] <= times[:, None]          of i: those who left before; >= was meant
    log_risk = torch.log((at_risk * hazard[None, :]).sum(1))
    loss = -((log_hazard - log_risk) * event).sum() / event.sum()

Who has the longest time is at risk with all others gone: the sets grow smaller as times grow. So the size of each set
is laid beside the times of which the matrix was made.

Footgun: a ranking by lists (ListMLE) has the same sums, over what is ranked lower. So flags of events must multiply
what comes of them.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, TIMES

COMPARES = {"le", "lt", "ge", "gt", "__le__", "__lt__", "__ge__", "__gt__"}
VIEWS = {"float", "to", "double", "t", "T", "transpose", "__getitem__", "type_as", "bool"}
OPPOSITES = {"__invert__", "bitwise_not", "logical_not"}
LEAST, MOST = 8, 2048  # rows


class RiskMatrices(Watcher):
    """Known is (times, what it is: the matrix, its product with something that learns, the logarithm of its sum)."""

    begins = COMPARES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.grows = False  # the sets with the times

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        if op.name in COMPARES:
            pair = [t for t in op.given if not t.requires_grad and t.is_floating_point() and LEAST <= t.numel() <= MOST]
            if len(pair) == 2 and r.dim() == 2 and r.shape[0] == r.shape[1] == pair[0].numel() == pair[1].numel():
                if torch.equal(pair[0].flatten(), pair[1].flatten()):
                    self.known.put(r, ("matrix", pair[0].flatten(), r))
            return
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if fact is not None and (made := self._next(op, r, *fact)):
            self.known.put(r, made)

    def _next(self, op: Op, r: Tensor, what: str, times: Tensor, matrix: Tensor) -> tuple | None:
        rows = len(times)
        if what == "matrix":
            if op.name in OPPOSITES and not r.requires_grad:
                return what, times, ~matrix.bool()
            if op.name in VIEWS and not r.requires_grad:
                turned = op.name in ("t", "T", "transpose")
                return what, times, matrix.T if turned else matrix
            product = op.name in TIMES | {"masked_fill", "where"} and r.requires_grad and r.shape == matrix.shape
            if (
                op.name in ("matmul", "mm", "__matmul__", "mv")
                and r.requires_grad
                and op.given[0].shape == matrix.shape
            ):
                self._sum(matrix, times, 1)
                return "sum", times, matrix
            hidden = op.name == "masked_fill"  # what is filled is left out
            return ("product", times, ~matrix.bool() if hidden else matrix) if product else None
        if what == "product" and op.name in ("sum", "logsumexp"):
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            if isinstance(dim, int) and -2 <= dim < 2:
                self._sum(matrix, times, dim % 2)
                return "sum", times, matrix
        if what == "sum" and (op.name in {"log", "add", "clamp", "squeeze", "view"} | MINUS or op.name == "__add__"):
            return (what, times, matrix) if r.numel() == rows else None
        if what == "sum" and op.name in TIMES and len(op.given) == 2:
            flags = next((t for t in op.given if not t.requires_grad and t.numel() == rows), None)
            if (
                self.grows
                and flags is not None
                and bool(((flags == 0) | (flags == 1)).all())
                and bool((flags == 1).any())
            ):
                self.note("F69", rows)
        return None

    def _sum(self, matrix: Tensor, times: Tensor, dim: int) -> None:
        sizes, order = matrix.sum(dim).double(), times.argsort()
        gone = sizes[order]
        self.grows = bool((gone[1:] >= gone[:-1]).all()) and bool(gone[-1] > gone[0])

    def backward(self, loss: Tensor) -> None:
        self.grows = False

    def close(self) -> None:
        self.known.by_id.clear()
