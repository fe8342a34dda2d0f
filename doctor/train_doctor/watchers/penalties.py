"""A gradient penalty that asks one length of the wrong thing: of all rows together, or of each place of a picture.

    slope = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]           (B, C, H, W)
    penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()                   one length for each row
    penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()                              of C numbers, in each place
    penalty = (slope.norm(2) - 1) ** 2                                              of the whole batch

A critic with slope 1 has a length of 1 in each row, and of the root of B over all rows. So a slope that is followed to
a length, from which a number is taken, must leave as many lengths as there are rows.

Footguns: a sum of squares without a target (R1) may be taken over everything. And where a network judges each point by
itself (a distance field), each point has its length; so of places only those of pictures are meant.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS

VIEWS = {"view", "reshape", "flatten", "contiguous", "squeeze"}
LENGTHS = {"norm", "linalg_norm", "vector_norm", "linalg_vector_norm"}
SLOPE, SQUARE, SUMMED, LENGTH = range(4)
LEAST = 4  # rows


class Penalties(Watcher):
    """What is known of a tensor: how far it is on the way to a length, and how many rows there are."""

    begins = {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name == "grad":
            asked = op.args[1] if len(op.args) > 1 else op.kwargs.get("inputs", ())
            asked = asked if isinstance(asked, (list, tuple)) else (asked,)
            for t, r in zip(asked, op.results):
                if r.requires_grad and r.dim() > 1 and len(r) >= LEAST and not isinstance(t, nn.Parameter):
                    self.known.put(r, (SLOPE, len(r), r.dim() == 4))
            return
        fact = self.known.get(op.given[0]) if op.given else None
        if fact is None or not isinstance(op.result, Tensor):
            return
        way, rows, pictures = fact
        if op.name in MINUS and way == LENGTH and len(op.given) == 1 and op.given[0].numel() != rows:
            if op.given[0].numel() == 1 or pictures:  # points of rays and tokens are judged one by one
                self.note("F79", "the whole batch" if op.given[0].numel() == 1 else "each place")
        elif (way := self._next(op.name, way)) is not None:
            self.known.put(op.result, (way, rows, pictures))

    def _next(self, name: str, way: int) -> int | None:
        if name in VIEWS or name in PLUS and way == SUMMED:
            return way
        if name in LENGTHS and way == SLOPE:
            return LENGTH
        if name in ("pow", "square", "__pow__") and way == SLOPE:
            return SQUARE
        if name == "sum" and way == SQUARE:
            return SUMMED
        return LENGTH if name == "sqrt" and way == SUMMED else None

    def close(self) -> None:
        self.known.by_id.clear()
