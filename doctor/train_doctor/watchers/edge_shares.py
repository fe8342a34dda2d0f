"""Attention along edges whose shares are those of the edges that leave a node, and are summed where the edges end.

    e = exp(score(h[src], h[dst]))
    share = e / zeros(n).index_add(0, src, e)[src]      dst was meant: what reaches a node is to sum to 1
    out = zeros(n, d).index_add(0, dst, share[:, None] * h[src])

The exponential of scores that learn is followed to its sum at one end of the edges, to the quotient of both, and with
rows that were taken at that end to a sum at the other.

Footguns: shares of a node may be sent out on purpose. A random walk sends one number, and a pool sends rows to fewer
places than there are; so the rows are wider than 1 and there are as many places as nodes. A mean over degrees has no
exponential. What is divided once more is normalised again. An index may be a copy, so it is known by its numbers.
"""

from typing import NamedTuple

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.first_graphs import SUMS
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

TAKES = {"__getitem__", "index_select", "gather"}
KEEPS = {"view", "reshape", "squeeze", "unsqueeze", "expand", "expand_as", "clamp", "clamp_min", "dropout", "float"}
KEEPS |= PLUS | {"__getitem__", "contiguous", "clone", "repeat", "detach", "to", "maximum"}
EXP, TOTAL, TAKEN, SHARE, ROWS, PART = "exp", "total", "total, taken", "share", "rows", "share of rows"
EDGES, WIDE = 8, 2  # edges; numbers of a row


class Fact(NamedTuple):
    kind: str
    index: Tensor | None = None  # the end of the edges at which it was summed or taken
    nodes: int = 0
    of: object = None  # the exponential


class EdgeShares(Watcher):
    begins = TAKES | {"exp"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.result
        if not isinstance(r, Tensor) or not op.given or not r.is_floating_point():
            return
        facts = [f for t in op.given if (f := self.known.get(t))]
        if op.name == "exp":
            fact = Fact(EXP, of=object()) if op.given[0].requires_grad and r.dim() and len(r) >= EDGES else None
        elif op.name in TAKES and (index := _index(op)) is not None:
            fact = self._taken(op, index, facts)
        elif op.name in SUMS:
            fact = self._summed(op, facts)
        else:
            fact = _next(op, facts)
        if fact is not None:
            self.known.put(r, fact)

    def _taken(self, op: Op, index: Tensor, facts: list[Fact]) -> Fact | None:
        if facts and facts[0].kind == TOTAL:
            return facts[0]._replace(kind=TAKEN) if _same(facts[0].index, index) else None
        table = op.given[0]
        if facts or not table.requires_grad or table.dim() < 2 or op.result.shape[:1] != index.shape:
            return None
        return Fact(ROWS, index, len(table))

    def _summed(self, op: Op, facts: list[Fact]) -> Fact | None:
        index = _index(op)
        if index is None or len(facts) != 1 or len(index) < EDGES:
            return None
        (fact,), nodes = facts, len(op.result)
        if fact.kind == EXP:
            return Fact(TOTAL, index, nodes, fact.of)
        wide = op.result.dim() > 1 and op.result[0].numel() >= WIDE
        if fact.kind == PART and wide and nodes == fact.nodes and len(fact.index) == len(index):
            if not _same(fact.index, index):
                self.note("F48", len(index))
        return None

    def close(self) -> None:
        self.known.by_id.clear()


def _next(op: Op, facts: list[Fact]) -> Fact | None:
    kinds = [f.kind for f in facts]
    if op.name in OVER and kinds == [EXP, TAKEN]:
        return facts[1]._replace(kind=SHARE) if facts[0].of is facts[1].of else None
    if op.name in TIMES and sorted(kinds) == [ROWS, SHARE]:
        rows, share = sorted(facts, key=lambda f: f.kind)
        whole = rows.nodes == share.nodes and _same(rows.index, share.index)
        return share._replace(kind=PART) if whole else None
    if len(facts) != 1:
        return None
    (fact,) = facts
    if fact.kind == ROWS:  # whatever is computed of rows alone
        return fact if op.name not in MINUS and op.result.shape[:1] == fact.index.shape else None
    one = len(op.given) == 1 or all(t.numel() == 1 for t in op.given[1:])
    return fact if op.name in KEEPS and (one or op.name in ("expand_as", "maximum")) else None


def _index(op: Op) -> Tensor | None:
    """The one index of rows in what is given, of one dimension or repeated for each column."""
    found = [t for t in op.given if not t.is_floating_point() and not t.is_complex() and t.dtype.itemsize > 1]
    if len(found) != 1 or not found[0].dim():
        return None
    index = found[0]
    return index if index.dim() == 1 else index.flatten(1)[:, 0] if index[0].numel() else None


def _same(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and (one.data_ptr() == two.data_ptr() or bool((one == two).all()))
