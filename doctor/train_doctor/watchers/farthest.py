"""Neighbours that are the farthest of all: topk takes the largest, and the nearest have the least distances.

    idx = torch.cdist(x, x).topk(k).indices                     the k farthest
    idx = torch.cdist(x, x).topk(k, largest=False).indices      the k nearest

Tables of distances are known by how they were made: cdist, the length of differences of all pairs, or a sum with a
product of points with themselves, whose numbers are then compared with the distances of these points. What is picked
at their largest (or at the end of their order) is followed through a gather into a layer.

Footguns: negative distances have the nearest at the top. The farthest are wanted as hard positives (under a mask), as
negatives (which go into a loss and no layer, or whose answers are held against zeros) and as points that cover a set
(by one argmax after the other). So what is masked is not followed, nothing is said where the nearest are picked in the
same step, and what was picked must go into a layer.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import BINARY
from train_doctor.watchers.operators import MINUS, OVER, PLUS, POWERS, TIMES, TURNS

PRODUCTS = {"matmul", "mm", "bmm", "__matmul__", "einsum", "baddbmm"}
DISTANCES = {"cdist", "pairwise_distance"}
KEEPS = {"sqrt", "clamp", "clamp_min", "relu", "view", "reshape", "squeeze", "unsqueeze", "float", "to", "detach"}
KEEPS |= POWERS | {"contiguous", "clone", "maximum", "double", "half", "nan_to_num"}
LENGTHS = {"sum", "mean", "norm", "linalg_norm", "vector_norm", "linalg_vector_norm"}
PICKS = {"gather", "__getitem__", "index_select", "take_along_dim", "embedding"}
LAYERS = {"linear", "conv1d", "conv2d", "matmul", "mm", "__matmul__", "addmm"}
APART, TABLE, SUM, ORDER, PICKED, TAKEN = "apart", "table", "sum", "order", "picked", "taken"
POINTS, NEAR = 4096, 0.01  # of a table that is compared; what it may differ by


class Farthest(Watcher):
    """What is known of a tensor, and its sign, or the points whose product it holds, or how many were picked."""

    begins = PRODUCTS | DISTANCES | MINUS | set(BINARY)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.nearest, self.taken = False, 0  # since the last backward: whether nearest were picked, farthest taken

    def saw(self, op: Op) -> None:
        if op.name in BINARY:
            self.nearest |= len(op.given) > 1 and not op.given[1].requires_grad and not bool(op.given[1].any())
            return None
        if op.name in ("topk", "sort", "argsort"):
            return self._chosen(op)
        fact = self._fact(op, [self.known.get(t) for t in op.given])
        if fact or op.given and op.result is op.given[0] and self.known.get(op.result):  # written in place
            for r in op.results or op.given[:1]:
                self.known.put(r, fact)

    def _fact(self, op: Op, facts: list) -> tuple | None:
        if not isinstance(op.result, Tensor):
            return None
        name, given, result = op.name, op.given, op.result
        kinds = [fact[0] if fact else "" for fact in facts]
        if PICKED in kinds or TAKEN in kinds or ORDER in kinds:
            return self._followed(op, facts, kinds)
        if name in DISTANCES:
            every = result.dim() > 1 and result.shape[-2] > 1 if name == "cdist" else _of_every_pair(op)
            return (TABLE, 1) if every else None
        if name in PRODUCTS:
            return (SUM, given[0].detach()) if len(given) == 2 and _with_itself(given, result) else None
        if SUM in kinds:
            whole = name in PLUS | MINUS or name in TIMES | OVER and len(given) == 1 or name in TURNS | KEEPS
            return facts[kinds.index(SUM)] if whole and result.shape == given[kinds.index(SUM)].shape else None
        if name in MINUS and len(given) == 2 and not any(facts):
            return (APART, 1) if _of_all_pairs(*given, result.shape) else None
        if not kinds or kinds[0] not in (APART, TABLE) or len(given) > 1:
            return None
        if kinds[0] == APART:
            if name in LENGTHS and result.dim() == given[0].dim() - 1 and result.shape == given[0].shape[:-1]:
                return TABLE, 1
            return facts[0] if name in POWERS | {"mul"} and result.shape == given[0].shape else None
        number = next((a for a in op.args if isinstance(a, int | float) and not isinstance(a, bool)), 1)
        if name in TURNS or name in TIMES | OVER and number < 0:
            return TABLE, -facts[0][1]
        rises = name in KEEPS | PLUS | MINUS | TIMES | OVER and not (name in ("pow", "__pow__") and number < 0)
        return facts[0] if rises and (op.args and op.args[0] is given[0]) else None

    def _chosen(self, op: Op) -> None:
        table, at = op.given[0], 2 if op.name == "topk" else 1
        dim = op.kwargs.get("dim", op.args[at] if len(op.args) > at else -1)
        sign = self._sign(table) if dim in (-1, table.dim() - 1, None) and table.dim() > 1 else 0
        index = op.result if isinstance(op.result, Tensor) else op.result[1]
        if not sign:
            return
        if op.name == "topk":
            number = op.kwargs.get("k", op.args[1] if len(op.args) > 1 else 0)
            largest = op.kwargs.get("largest", op.args[3] if len(op.args) > 3 else True)
            self._picked(index, number, table.shape[-1], bool(largest) is (sign > 0))
        else:
            falls = op.kwargs.get("descending", op.args[2] if len(op.args) > 2 else False)
            self.known.put(index, (ORDER, bool(falls) is (sign > 0)))

    def _picked(self, index: Tensor, number: int, of: int, farthest: bool) -> None:
        if not farthest:
            self.nearest = True
        elif 1 < number <= of / 2:
            self.known.put(index, (PICKED, number))

    def _sign(self, table: Tensor) -> int:
        """1 of distances, -1 of negative ones, 0 of anything else."""
        kind, what = self.known.get(table) or ("", 0)
        return what if kind == TABLE else _compared(table.detach(), what) if kind == SUM else 0

    def _followed(self, op: Op, facts: list, kinds: list) -> tuple | None:
        result = op.result
        if ORDER in kinds:
            if op.name == "__getitem__" and kinds[0] == ORDER and (cut := _cut(op.args[1], result)):
                self._picked(result, result.shape[-1], op.given[0].shape[-1], facts[0][1] is (cut > 0))
            return self.known.get(result)
        if TAKEN in kinds:
            if op.name in LAYERS and any(t.requires_grad and t.is_leaf for t in op.given) and self.eye.grad:
                self.taken = facts[kinds.index(TAKEN)][1]
                return None
            return facts[kinds.index(TAKEN)] if result.is_floating_point() else None
        fact = facts[kinds.index(PICKED)]
        if op.name in PICKS and result.is_floating_point():
            return (TAKEN, fact[1]) if not kinds[0] else None  # else it is the distances that are taken
        return fact if not result.is_floating_point() and result.dtype != torch.bool else None

    def backward(self, loss: Tensor) -> None:
        if self.taken and not self.nearest:
            self.note("F101", self.taken)
        self.nearest, self.taken = False, 0
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()


def _with_itself(given: list[Tensor], result: Tensor) -> bool:
    """Whether points were multiplied with themselves, all pairs of them."""
    a, b = given
    one = (
        a.numel() == b.numel()
        and a.is_floating_point()
        and (a if a._base is None else a._base) is (b if b._base is None else b._base)
    )
    return (
        one
        and a.storage_offset() == b.storage_offset()
        and result.dim() in (2, 3)
        and result.shape[-1] == result.shape[-2] in a.shape[-2:]
    )


def _of_all_pairs(a: Tensor, b: Tensor, shape: torch.Size) -> bool:
    """Whether rows of one were taken from all rows of the other: (..., N, 1, D) and (..., 1, M, D)."""
    if not a.dim() == b.dim() == len(shape) >= 3 or min(shape[-3:-1]) < 3:
        return False
    wide = [[t.shape[at] == 1 or t.stride(at) == 0 for at in (-3, -2)] for t in (a, b)]
    return wide in ([[True, False], [False, True]], [[False, True], [True, False]]) and a.shape[-1] == b.shape[-1]


def _of_every_pair(op: Op) -> bool:
    """The same of a function that takes both, and the length of their differences."""
    a, b = (t.detach() for t in op.given[:2]) if len(op.given) > 1 else (op.result, op.result)
    return a.dim() == b.dim() > 2 and _of_all_pairs(a, b, torch.broadcast_shapes(a.shape, b.shape))


def _compared(table: Tensor, points: Tensor) -> int:
    """The sign of a table that is distances of these points, squared or not; 0 of any other."""
    if table.dim() == 3:
        table, points = table[0], points[0] if points.dim() == 3 else points
    if table.shape[0] != table.shape[1] or len(table) > POINTS or points.dim() != 2:
        return 0
    table = table.float()
    for x in (points.float(), points.float().T):
        if len(x) == len(table):
            far = torch.cdist(x, x)
            for ruler in (far.square(), far):
                over = float((table * ruler).sum() / ruler.square().sum().clamp_min(1e-30))
                if over and float((table / over - ruler).abs().max()) < NEAR * float(ruler.max()):
                    return 1 if over > 0 else -1
    return 0


def _cut(at: object, result: Tensor) -> int:
    """1 where the first few of the last dim are taken, -1 where the last few are."""
    at = at if isinstance(at, tuple) else (at,)
    whole = bool(at) and (len(at) == result.dim() or at[0] is Ellipsis)
    if not whole or not isinstance(at[-1], slice) or at[-1].step not in (None, 1):
        return 0
    start, stop = at[-1].start, at[-1].stop
    if stop is not None and stop > 0 and start in (None, 0, 1):
        return 1
    return -1 if stop is None and start is not None and start < 0 else 0
