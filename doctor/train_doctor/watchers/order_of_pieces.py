"""Labels in blocks for rows that alternate, or the other way round.

    candidates = torch.cat([pos[:, None], neg], 1)          (B, 1 + K), laid out row by row: + - - + - - + - -
    labels = torch.cat([ones(B), zeros(B * K)])             + + + - - - - - -
    views = torch.cat([x.rot90(k, (2, 3)) for k in range(4)])       all of k = 0 first
    labels = torch.arange(4).repeat(B)                              0 1 2 3 0 1 2 3

Both have as many rows. What was put together of pieces keeps the order of its pieces through the network, until its
rows are laid out anew, and labels that are the same number in each piece tell theirs by their numbers.

Footguns: with as many pieces as rows the two orders can't be told from each other by their shapes. Labels that were put
together like the rows fit them, whatever their numbers.
"""

from typing import Any

from torch import Tensor
from torch.utils.data import dataloader

from train_doctor.eye import Eye, Known, Op, Watcher, tensors

LOSSES = {"cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy"}
JOINS = {"cat", "concat", "stack"}
LAID = {"reshape", "view", "flatten"}
MIXES = {"__getitem__", "index_select", "gather", "sort", "flip", "roll", "repeat", "split", "chunk", "unbind", "T"}
MIXES |= {"t", "transpose", "permute", "repeat_interleave", "matmul", "__matmul__", "mm", "bmm", "einsum", "index_add"}
GRID, ROWS, BLOCKS = "grid", "row by row", "in blocks"
LEAST, MOST = 4, 16  # rows of a piece; pieces


class OrderOfPieces(Watcher):
    """What is known of a tensor: (ROWS or BLOCKS, rows, pieces), or (GRID, ...) before it is laid out."""

    begins = JOINS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.after(dataloader._BaseDataLoaderIter, "__next__", "given")

    def given(self, batch: Any, iterator: Any) -> None:
        """Its items are rows, and no pieces."""
        for part in tensors((batch,)):
            self.known.put(part, None)

    def saw(self, op: Op) -> None:
        if op.name in LOSSES:
            self._labelled(op)
            return
        fact = _joined(op) if op.name in JOINS else None
        if fact is None and op.name in LAID and (before := self.known.get(op.given[0])):
            fact = _laid(op, before)
        elif fact is None and op.name not in MIXES | JOINS | LAID:
            facts = {f for f in map(self.known.get, op.given) if f and f[0] != GRID}
            fact = facts.pop() if len(facts) == 1 else None
        for r in op.results if fact else ():
            if fact[0] == GRID or r.dim() and len(r) == fact[1] * fact[2]:
                self.known.put(r, fact)

    def _labelled(self, op: Op) -> None:
        fact = self.known.get(op.given[0])
        if fact is None or len(op.given) < 2 or not op.given[0].requires_grad or self.known.get(op.given[1]) == fact:
            return
        (how, rows, pieces), labels = fact, op.given[1].detach()
        if labels.dim() and labels.numel() == len(labels) == rows * pieces and rows != pieces:
            alternate, blocks = labels.view(rows, pieces), labels.view(pieces, rows).T
            mine, other = (alternate, blocks) if how == ROWS else (blocks, alternate)
            if _same_in_each_row(other) and not _same_in_each_row(mine):
                self.note("D38", fact)

    def close(self) -> None:
        self.known.by_id.clear()


def _joined(op: Op) -> tuple | None:
    dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
    pieces, out = op.given, op.result
    if not isinstance(dim, int) or len(pieces) < 2 or not isinstance(out, Tensor) or not all(t.dim() for t in pieces):
        return None
    rows, many = len(pieces[0]), len(pieces)
    if any(t.requires_grad or len(t) != rows for t in pieces) or not LEAST <= rows or many > MOST:
        return None
    same = all(t.shape == pieces[0].shape for t in pieces)
    if op.name == "stack":
        return (GRID, ROWS if dim else BLOCKS, rows, many) if dim in (0, 1) else None
    if dim == 0 and same:
        return BLOCKS, rows, many
    if dim in (1, -1) and out.dim() == 2 and not out.is_floating_point() and out.shape[1] <= MOST:
        return GRID, ROWS, *out.shape
    return None


def _laid(op: Op, fact: tuple) -> tuple | None:
    """A grid whose first two dimensions have become one, or rows that stay."""
    out, before = op.result, op.given[0]
    if fact[0] == GRID:
        return fact[1:] if out.dim() and len(out) == fact[2] * fact[3] and out.dim() < before.dim() else None
    return fact if out.dim() and len(out) == len(before) else None


def _same_in_each_row(labels: Tensor) -> bool:
    """Whether each column (a piece) has one label, and not all have the same."""
    return bool((labels == labels[:1]).all()) and bool((labels[0] != labels[0, 0]).any())
