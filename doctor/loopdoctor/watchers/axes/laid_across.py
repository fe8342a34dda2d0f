"""A number for each row of a batch that is laid along the columns: `alphas[t] * x` where x is (B,
C, H, W) and B is W.

    a = alpha_bar[t]                                (B): one for each picture
    a.sqrt() * x                                    a.view(-1, 1, 1, 1) was meant

torch lays sizes upon each other from the right. A batch that is not as wide as its pictures is
refused; one that is gives every column the number of another picture. Vectors that are drawn, or
taken from a table with an index of the batch's length, are followed into a product.

Footgun: a number for each column of pictures may be drawn too. So whole numbers count only as an
index, flags do not, and the batch must be as large as the last size.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import TIMES

TAKES, LEAST = {"__getitem__", "index_select", "gather"}, 4  # rows


class LaidAcross(Watcher):
    """Known are vectors with a number for each row."""

    begins = TAKES | {"rand"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.result if isinstance(op.result, Tensor) else None
        if r is None or r.requires_grad or not r.is_floating_point():
            return
        known = [t for t in op.given if self.known.get(t)]
        if op.name in TIMES and known and len(op.given) == 2:
            x = op.given[0] if op.given[1] is known[0] else op.given[1]
            if x.dim() > 2 and len(x) == x.shape[-1] == len(known[0]):
                self.note("F21", (tuple(x.shape), len(x)))
        taken = op.name in TAKES and len(op.given) == 2 and all(t.dim() == 1 for t in op.given)
        taken = taken and not op.given[1].is_floating_point() and len(op.given[1]) == r.numel()
        if r.dim() == 1 and len(r) >= LEAST and (known or taken or op.name == "rand"):
            self.known.put(r, True)

    def close(self) -> None:
        self.known.by_id.clear()
