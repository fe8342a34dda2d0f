"""Shares that were made along one axis, and are used along another.

    log_p = logits.log_softmax(1)                       (B, T, V): the shares of the places, for each word
    log_p.gather(2, y[..., None])                       picks a word
    F.kl_div(logits.log_softmax(1), ..., ...)           the same, where a linear layer has made the logits

Footgun: a softmax over places is what attention does. So only those count from which a class is picked along another
axis, and those that a divergence is given as both of its sides, of what a linear layer gave.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, TIMES

SHARES, MADE = {"softmax", "log_softmax"}, "linear"
KEEPS = TIMES | OVER | {"log", "clamp", "float", "to", "__getitem__", "detach"}


class PickedAcross(Watcher):
    """Known are outputs of linear layers, and the axes along which shares were made of them."""

    names, begins = SHARES | KEEPS | {MADE, "gather", "kl_div"}, SHARES | {MADE}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.given or not isinstance(op.result, Tensor):
            return
        x, fact = op.given[0], self.known.get(op.given[0])
        if op.name == MADE:
            if op.result.dim() == 3:
                self.known.put(op.result, MADE)
        elif op.name in SHARES:
            dim = op.kwargs.get("dim", next((a for a in op.args[1:] if isinstance(a, int)), None))
            if x.dim() > 2 and isinstance(dim, int):
                self.known.put(op.result, (dim % x.dim(), fact == MADE))
        elif op.name == "gather":
            along = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0)
            if isinstance(fact, tuple) and isinstance(along, int) and along % x.dim() != fact[0]:
                if x.requires_grad and op.result.shape[along] == 1:
                    self.note("S33 picked", (fact[0], along % x.dim()))
        elif op.name == "kl_div":
            sides = [self.known.get(t) for t in op.given[:2]]
            if x.requires_grad and all(side == (1, True) for side in sides) and len(sides) == 2:
                self.note("S33 picked", (1, 2))
        elif fact and op.result.dim() == x.dim():
            self.known.put(op.result, fact)

    def close(self) -> None:
        self.known.by_id.clear()
