"""A softmax of maps over their width, where their classes lie in dim 1.

    p = logits.softmax(-1)                          (B, C, H, W): the shares of one line of one
                                                    class
    p = logits.softmax(1)

So the loss tells: it is given log-shares of classes by dim 1 (nll_loss), or meets targets whose
classes lie there, one of them in each place.

Footgun: a softmax over places is what attention does, and heat maps that are to sum to 1. There no
target has one class in each place along dim 1. In an assignment (a jigsaw, a Latin square) it has,
and one along the softmax's own dim as well: there both dims would do.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import PLAIN
from loopdoctor.watchers.operators import TIMES

SHARES = {"softmax", "log_softmax"}
KEEPS = {"log", "clamp", "clip", "add", "exp", "neg"}
LOOKED = 2**22


class ClassAxis(Watcher):
    """Known is the dim over which shares were taken, where it is not 1."""

    begins = SHARES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.given or not op.results:
            return
        x = op.given[0]
        if op.name in SHARES:
            dim = op.kwargs.get("dim", next((a for a in op.args[1:] if isinstance(a, int)), None))
            if x.requires_grad and x.dim() in (3, 4) and isinstance(dim, int) and dim % x.dim() > 1:
                self.known.put(op.results[0], dim % x.dim())
            return
        dim = next((f for f in map(self.known.get, op.given) if f), None)
        if dim is None:
            return
        if op.name == "nll_loss":
            self.note("S33 axis", dim)
        elif (
            op.name in TIMES | set(PLAIN)
            and len(op.given) == 2
            and op.given[0].shape == op.given[1].shape
        ):
            target = next((t for t in op.given if not t.requires_grad), None)
            if target is not None and _classes(target, dim):
                self.note("S33 axis", dim)
        elif op.name in KEEPS:
            self.known.put(op.results[0], dim)

    def close(self) -> None:
        self.known.by_id.clear()


def _classes(target: Tensor, dim: int) -> bool:
    """Zeros, and a one for one class of dim 1 in each place, but not for one place of each
    class.
    """
    if target.shape[1] < 2 or target.numel() > LOOKED:
        return False
    ones = bool(((target == 0) | (target == 1)).all()) and bool((target.sum(1) == 1).all())
    return ones and not bool((target.sum(dim) == 1).all())
