"""Pieces that were shuffled and are given places as if they had not been: a masked autoencoder without its last gather.

    x = x.gather(1, ids_shuffle[:, :keep, None].expand(...))        a few pieces, in an order of their own
    x = torch.cat([encoder(x), mask_tokens], 1)
    x = x.gather(1, ids_restore[:, :, None].expand(...))            back to their places
    x = x + positions                                               without that, each gets another piece's place

Footgun: a decoder may be given the positions in the shuffled order as well. So only what is added to all rows alike,
and has as many places, is asked about. And pieces that were picked by one order for all rows may be meant.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import PLUS

PICKS = {"gather", "take_along_dim"}
ORDERS = {"argsort", "sort", "topk"}
VIEWS = {"__getitem__", "unsqueeze", "expand", "repeat", "expand_as", "view", "reshape", "narrow", "split", "chunk"}
JOINS = {"cat", "concat", "concatenate"}
ORDER, SHUFFLED, JOINED = "order", "shuffled", "joined"
LEAST = 4  # rows and places


class NotPutBack(Watcher):
    """Known is that a tensor is an ORDER for each row, holds SHUFFLED pieces, or these JOINED with others."""

    begins = ORDERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.results or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        for r in op.results:
            if fact := self._next(op, facts, r):
                self.known.put(r, fact)

    def _next(self, op: Op, facts: list, r: Tensor) -> str | None:
        x = op.given[0]
        if op.name in ORDERS:  # of numbers that were drawn for each row
            whole = not x.requires_grad and x.dim() == 2 and min(x.shape) >= LEAST and not r.is_floating_point()
            return ORDER if whole and facts[0] is None and r.dtype is not x.dtype else None
        if facts[0] == ORDER:
            return ORDER if op.name in VIEWS and not r.is_floating_point() else None
        if op.name in PICKS:
            fits = len(facts) == 2 and facts[1] == ORDER and facts[0] is None and x.requires_grad and r.dim() == 3
            return SHUFFLED if fits and r.shape[1] < x.shape[1] else None
        if facts[0] == JOINED and op.name in PLUS and len(op.given) == 2:
            places = op.given[1]
            if places.shape in (x.shape[1:], (1, *x.shape[1:])):
                self.note("F109", x.shape[1])
            return None
        if r.dim() != 3 or not r.requires_grad:
            return None
        if op.name in JOINS:
            joined = facts[0] == SHUFFLED and r.shape[1] > x.shape[1] and r.shape[2] == x.shape[2]
            return JOINED if joined else None
        return next((f for f in (SHUFFLED, JOINED) if f in facts and op.name != "__getitem__"), None)

    def close(self) -> None:
        self.known.by_id.clear()
