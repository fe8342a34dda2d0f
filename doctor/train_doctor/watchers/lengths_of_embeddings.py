"""Embeddings of any length where a temperature was meant for cosines.

    logits = image @ text.T / 0.07                          lengths of 5 make logits of hundreds, and one pair decides
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)

A temperature of a tenth or less is for numbers from -1 to 1. The rows of both sides of a square table of products are
measured, and the table is followed through its factor to a cross-entropy.

Footgun: products without a temperature have a scale of their own, and who divides by the root of the width has one of
that. So the factor must be five or more, and rows of both sides must differ clearly from a length of 1.
"""

from typing import Any

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, TIMES

PRODUCTS = {"matmul", "mm", "__matmul__", "einsum", "linear"}
KEEPS = {"masked_fill", "t", "T", "transpose", "fill_diagonal", "float", "clone", "where"}
FACTOR, LEAST, LOOKED, AWAY = 5.0, 4, 2**20, 0.05


class LengthsOfEmbeddings(Watcher):
    """Known is (the mean length of rows, the factor so far) of a table of products."""

    begins = PRODUCTS | TIMES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.scaled = Known(self)  # embeddings that were multiplied first: scale * image @ text.T -> the factor

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if op.name in PRODUCTS:
            factors = [self.scaled.get(t) or 1.0 for t in op.given]
            factors = [f / min(factors) for f in factors]  # what both were multiplied by is no temperature
            if r is not None and (length := _length(op, r, factors)) is not None:
                self.known.put(r, (length, factors[0] * factors[1]))
            return
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if fact is None:
            self._scaled(op, r)
        elif op.name == "cross_entropy":
            if self.known.get(op.given[0]) and fact[1] >= FACTOR:
                self.note("F115", fact)
        elif r is not None and op.name in TIMES | OVER and r.dim() == 2:
            others = [a for a in op.args if not (isinstance(a, Tensor) and self.known.get(a))]
            number = _number(others[0]) if len(others) == 1 else 0.0
            if number > 0:
                self.known.put(r, (fact[0], fact[1] * (number if op.name in TIMES else 1 / number)))
        elif r is not None and op.name in KEEPS and r.dim() == 2:
            self.known.put(r, fact)

    def _scaled(self, op: Op, r: Tensor | None) -> None:
        if r is not None and op.name in ("t", "T", "mT", "transpose") and (factor := self.scaled.get(op.given[0])):
            self.scaled.put(r, factor)
        if op.name in TIMES and r is not None and r.dim() == 2 and r.requires_grad and len(op.args) == 2:
            sides = [a for a in op.args if isinstance(a, Tensor) and a.dim() == 2]
            others = [a for a in op.args if not (isinstance(a, Tensor) and a.dim() == 2)]
            if len(sides) == len(others) == 1 and (number := _number(others[0])) > 0:
                self.scaled.put(r, number * (self.scaled.get(sides[0]) or 1.0))

    def close(self) -> None:
        self.known.by_id.clear()
        self.scaled.by_id.clear()


def _number(given: Any) -> float:
    """A factor, learned or not; 0 for anything else."""
    if isinstance(given, Tensor):
        return float(given.detach()) if given.numel() == 1 and not given.is_complex() else 0.0
    return float(given) if isinstance(given, int | float) else 0.0


def _length(op: Op, table: Tensor, factors: list[float]) -> float | None:
    """Of the rows of both sides of a square table, where they are clearly not 1."""
    if table.dim() != 2 or len(table) != table.shape[1] or len(table) < LEAST or not table.requires_grad:
        return None
    if len(op.given) != 2 or any(t.dim() != 2 or t.is_leaf or t.numel() > LOOKED for t in op.given):
        return None
    one, two = (t.detach() for t in op.given)
    two = two.T if op.name in ("matmul", "mm", "__matmul__") and two.shape[1] == len(table) else two
    if one.shape != two.shape or not one.is_floating_point():
        return None
    lengths = [side.float().norm(dim=1) / factor for side, factor in zip((one, two), factors)]
    if not all(bool(torch.isfinite(n).all()) and bool(((n - 1).abs() > AWAY).float().mean() > 0.5) for n in lengths):
        return None
    return float(torch.cat(lengths).mean())
