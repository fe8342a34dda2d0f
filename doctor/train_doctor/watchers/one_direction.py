"""Edges of a graph without directions that are listed once: messages go along each edge one way only.

    edges = adjacency.triu(1).nonzero().t()                    each edge once, from the lower number to the higher one
    edges = torch.cat([edges, edges.flip(0)], dim=1)           both ways

Where nodes are numbered at random, a direction that means something goes up in half of the edges and down in the
others. Edges that all go up were taken from half of a symmetric matrix. So the index at which rows are taken and the
one at which they are summed are held side by side, and so are the places of a matrix that is not 0 in a few of them.

Footguns: numbers that mean an order make such lists as well. Sequences and grids have few different steps from node to
node, a causal mask is full below its diagonal, and a tree has one parent each. What was sorted by time can't be told
apart, and so the check speaks of graphs without directions. Sums in both directions, one after the other, are right.
A sparse matrix is not shown to watchers.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.watchers.first_graphs import SUMS
from train_doctor.watchers.own_messages import TAKES

DIAGONAL = 0.4  # of the places of as many diagonals, that are no list of edges any more
EDGES, STEPS_APART = 24, 8  # edges at least, and how many different distances from node to node
LOOKED, KEPT = 2**20, 16
PRODUCTS = {"matmul", "__matmul__", "mm", "bmm"}
FULL = 0.3  # of the places of a matrix, from where on it is no list of edges


class OneDirection(Watcher):
    names = begins = TAKES | SUMS | PRODUCTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.taken: dict[tuple, Tensor] = {}  # nodes, place of the index -> the index at which rows were taken
        self.summed: dict[tuple, Tensor] = {}
        self.matrices: dict[int, Tensor] = {}

    def saw(self, op: Op) -> None:
        if op.name in PRODUCTS:
            matrix, rows = (*op.given, None, None)[:2]
            if rows is None or matrix.requires_grad or not rows.requires_grad or len(self.matrices) >= KEPT:
                return
            if matrix.dim() in (2, 3) and matrix.shape[-1] == matrix.shape[-2] and matrix.numel() <= LOOKED:
                self.matrices.setdefault(id(matrix), matrix)
            return
        index = next((t for t in op.given if not t.is_floating_point() and t.dtype.itemsize > 1), None)
        rows = next((t for t in op.given if t.is_floating_point() and t.dim() > 1), None)
        if index is None or rows is None or not self.eye.grad:
            return
        index = index[:, 0] if index.dim() == 2 and op.name in SUMS else index  # as scatter_add wants it
        if index.dim() == 1 and EDGES <= len(index) <= LOOKED:
            nodes = len(op.result) if op.name in SUMS and isinstance(op.result, Tensor) else len(rows)
            kept = self.summed if op.name in SUMS else self.taken
            if len(kept) < KEPT:
                kept.setdefault((nodes, index.data_ptr(), len(index)), index)

    def backward(self, loss: Tensor) -> None:
        taken, summed, self.taken, self.summed = self.taken, self.summed, {}, {}
        pairs = [
            (src, dst, nodes)
            for (nodes, place, edges), src in taken.items()
            for (into, other, length), dst in summed.items()
            if nodes == into and edges == length and place != other
        ]
        matrices, self.matrices = self.matrices, {}
        pairs += [pair for matrix in matrices.values() if (pair := _edges(matrix)) is not None]
        ways = {_way(*pair) for pair in pairs}
        if len(ways) == 1 and (way := ways.pop()) is not None:
            self.note("D45", way)

    def close(self) -> None:
        self.taken, self.summed, self.matrices = {}, {}, {}


def _edges(matrix: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """The two ends of what is not 0 in a matrix, or in several of them, and the number of nodes."""
    places = matrix.nonzero().t()  # (2 or 3, edges)
    graph, nodes = 0, matrix.shape[:-1].numel()
    if len(places) == 3:
        graph, places = places[0] * matrix.shape[-1], places[1:]
    return (places[1] + graph, places[0] + graph, nodes) if places.shape[1] < FULL * matrix.numel() else None


def _way(src: Tensor, dst: Tensor, nodes: int) -> tuple[bool, int] | None:
    """Whether all edges but loops go up, or all down, and how many there are; None if neither, or if they have an
    order."""
    loops = src == dst
    src, dst = src[~loops], dst[~loops]
    if len(src) < max(EDGES, nodes):
        return None
    up = dst > src
    if not bool(up.all()) and bool(up.any()):
        return None
    steps = (dst - src).unique()
    if len(src) >= DIAGONAL * len(steps) * nodes or _even(dst) or _contiguous(src, dst):
        return None
    single = min(int(src.bincount().max()), int(dst.bincount().max())) < 2
    return None if len(steps) < STEPS_APART or single else (bool(up[0]), len(src))


def _even(dst: Tensor) -> bool:
    """Whether nearly all nodes that hear of any hear of as many: the gates of a circuit have two inputs each."""
    heard = dst.bincount()
    heard = heard[heard > 0]
    return bool((heard == heard.mode().values).float().mean() > 0.8)


def _contiguous(src: Tensor, dst: Tensor) -> bool:
    """Whether each node hears of nodes that lie side by side, as the sets of those at risk do."""
    nodes = int(torch.maximum(src.max(), dst.max())) + 1
    least = torch.full((nodes,), nodes, device=src.device).scatter_reduce_(0, dst, src, "amin")
    most = torch.full((nodes,), -1, device=src.device).scatter_reduce_(0, dst, src, "amax")
    heard = dst.bincount(minlength=nodes)
    several = heard > 1
    return bool((most - least + 1 == heard)[several].float().mean() > 0.5) if bool(several.any()) else True
