"""Experts that take their tokens in turn, and whose answers are never put back in the tokens' order.

    order = expert.argsort()
    chunks = x[order].split(counts)
    out = torch.cat([f(c) for f, c in zip(experts, chunks)])
    out = out[order.argsort()]                                  was forgotten
    return out * gate.unsqueeze(-1)

All shapes fit, so each token gets what an expert said of another one. Rows that went through one index are followed
into their pieces and together again, until they meet rows that did not.

Footgun: the gates may have gone through the same index, and the sum into the tokens' places may do the sorting back
(index_add, scatter). So what is written by an index is not followed.
"""

from typing import NamedTuple

from torch import nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS, TIMES

INDICES = {"argsort", "sort", "topk"}
PIECES, JOINS, KEPT = {"split", "chunk", "tensor_split"}, {"cat", "concat"}, {"view", "reshape", "unsqueeze", "to"}
MEETS = PLUS | MINUS | TIMES
LEAST, MOST = 8, 2**20  # rows
ANOTHER = {"__setitem__", "index_add", "index_copy", "scatter", "scatter_add", "index_put", "scatter_reduce"}


class Sorted(NamedTuple):
    key: int  # of the index that the rows went through
    piece: int = -1
    pieces: int = 0
    joined: bool = False


class Unsorted(Watcher):
    """Known are indices that torch made by sorting, and rows that went through one."""

    begins = INDICES | {"arange"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.indices, self.count = Known(self), Known(self), 0

    def saw(self, op: Op) -> None:
        if op.name == "arange":  # ranks, which are in every order
            for r in op.results:
                self.known.put(r, Sorted(0))
        if not op.given or op.name in ANOTHER:
            return
        x = op.given[0]
        if op.name in INDICES:
            self.count += 1
            for r in op.results:
                if r.dim() == 1 and LEAST <= len(r) <= MOST:
                    values = op.name == "sort" and r is op.results[0]
                    self.known.put(r, Sorted(self.count)) if values else self.indices.put(r, self.count)
        elif op.name in ("__getitem__", "index_select"):
            index = op.given[-1]
            key = next(filter(None, map(self.indices.get, op.given[1:])), None) if op.results else None
            if key and x.dim() and len(x) == len(index) and self.known.get(x) is None:
                self.known.put(op.results[0], Sorted(key))
            elif key and (fact := self.known.get(x)) and fact.joined and fact.key == key and len(x) == len(index):
                self.note("D11 sorted", (tuple(x.shape),))  # sorted again, where it was to be put back
            elif len(op.given) == 1:
                self._follow(op)
        elif op.name in PIECES and (fact := self.known.get(x)) and not fact.pieces:
            for n, r in enumerate(op.results):
                self.known.put(r, fact._replace(piece=n, pieces=len(op.results)))
        elif op.name in JOINS:
            self._join(op)
        else:
            self._follow(op)

    def _join(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        if op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0) != 0 or None in facts:
            return
        if facts == [facts[0]._replace(piece=n) for n in range(facts[0].pieces)]:
            self.known.put(op.results[0], Sorted(facts[0].key, joined=True))

    def _follow(self, op: Op) -> None:
        if key := next(filter(None, map(self.indices.get, op.given)), None):
            for r in op.results:
                self.known.put(r, Sorted(key))  # told by the order: it is in it
            return
        others = [t for t in op.given if not isinstance(t, nn.Parameter)]
        facts = [(t, self.known.get(t)) for t in others]
        mine = [(t, fact) for t, fact in facts if fact is not None]
        if not mine or not op.results or op.name.endswith("_like") or op.name.startswith("new_"):
            return
        t, fact = max(mine, key=lambda pair: pair[1].joined)
        if op.name in MEETS and fact.joined and len(facts) == 2:
            other, its = next((pair for pair in facts if pair[0] is not t), (None, None))
            if other is not None and its is None and other.requires_grad and other.dim() and len(other) == len(t):
                self.note("D11 sorted", (tuple(t.shape),))
            return
        rows = [len(r) == len(t) if r.dim() else False for r in op.results]
        if all(rows) or fact.joined and op.name in KEPT:
            for r in op.results:
                self.known.put(r, fact)

    def close(self) -> None:
        self.known.by_id.clear()
        self.indices.by_id.clear()
