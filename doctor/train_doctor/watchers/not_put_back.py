"""Pieces that were shuffled and are given places as if they had not been: a masked autoencoder without its last gather.

    x = x.gather(1, ids_shuffle[:, :keep, None].expand(...))        a few pieces, in an order of their own
    x = torch.cat([encoder(x), mask_tokens], 1)
    x = x.gather(1, ids_restore[:, :, None].expand(...))            back to their places
    x = x + positions                                               without that, each gets another piece's place

Footgun: a decoder may be given the positions in the shuffled order as well. So only what is added to all rows alike,
and has as many places, is asked about. And pieces that were picked by one order for all rows may be meant. The best
proposals and the latest events have an order that was not drawn, and with what follows them they are not as many as all
pieces were. What tells seen pieces from hidden ones is added as well, and has two rows only.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import PLUS

PICKS = {"gather", "take_along_dim"}
ORDERS, DRAWS = {"argsort", "sort", "topk"}, {"rand", "randn", "rand_like", "randn_like", "uniform", "normal"}
VIEWS = {"__getitem__", "unsqueeze", "expand", "repeat", "expand_as", "view", "reshape", "narrow", "split", "chunk"}
JOINS = {"cat", "concat", "concatenate"}
DRAWN, ORDER, SHUFFLED, JOINED = "drawn", "order", "shuffled", "joined"
LEAST = 4  # rows and places


class NotPutBack(Watcher):
    """Known is that numbers were DRAWN, that a tensor is an ORDER for each row, and (SHUFFLED, all pieces) or these
    JOINED with others."""

    begins = DRAWS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in DRAWS and isinstance(op.result, Tensor) and op.result.dim() == 2:
            self.known.put(op.result, (DRAWN,))
        if not op.results or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        for r in op.results:
            if fact := self._next(op, facts, r):
                self.known.put(r, fact)

    def _next(self, op: Op, facts: list, r: Tensor) -> tuple | None:
        x, kinds = op.given[0], [f[0] if f else "" for f in facts]
        if op.name in ORDERS:  # of numbers that were drawn for each row
            whole = x.dim() == 2 and min(x.shape) >= LEAST and r.dtype is not x.dtype
            return (ORDER,) if whole and kinds[0] == DRAWN and not r.is_floating_point() else None
        if kinds[0] == DRAWN:
            return facts[0] if len(op.given) == 1 and r.shape == x.shape and r.dtype is x.dtype else None
        if kinds[0] == ORDER:
            return facts[0] if op.name in VIEWS and not r.is_floating_point() else None
        if op.name in PICKS:
            fits = len(kinds) == 2 and kinds[1] == ORDER and not kinds[0] and x.requires_grad and r.dim() == 3
            return (SHUFFLED, x.shape[1]) if fits and r.shape[1] < x.shape[1] else None
        if kinds[0] == JOINED and op.name in PLUS and len(op.given) == 2:
            places = op.given[1].detach()
            if places.shape in (x.shape[1:], (1, *x.shape[1:])):
                if len(places.reshape(x.shape[1:]).unique(dim=0)) > x.shape[1] // 2:
                    self.note("F109", x.shape[1])
            return None
        if r.dim() != 3 or not r.requires_grad:
            return None
        if op.name in JOINS:
            whole = kinds[0] == SHUFFLED and r.shape[1] - facts[0][1] in (0, 1) and r.shape[2] == x.shape[2]
            return (JOINED, facts[0][1]) if whole else None
        return next((f for f in facts if f and f[0] in (SHUFFLED, JOINED) and op.name != "__getitem__"), None)

    def close(self) -> None:
        self.known.by_id.clear()
