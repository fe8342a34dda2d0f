"""A softmax of a softmax, or a sigmoid of a sigmoid, in a program whose loss is written by hand.

    p = torch.softmax(model(x), dim=1)              where the model ends in a softmax already
    p = torch.sigmoid(model(x))                     where it ends in a sigmoid

What comes out of the second one lies in a narrow range: of two classes between 0.27 and 0.73. No training reaches the
ends. Torch's own losses show it by what they are given (fed.py); here it is what one function gives and the other one
takes, with nothing in between but another shape.

Footgun: a softmax over other places than the first one's normalises something else, and a temperature in between means
it. A sigmoid may stand before a softmax as a bound on scores, so nothing is said of that.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

SOFT, LOG, SIGMOIDS = {"softmax"}, {"log_softmax"}, {"sigmoid", "logsigmoid", "log_sigmoid"}
KEEPS = {"view", "reshape", "squeeze", "unsqueeze", "contiguous", "clone", "float", "to"}


class SquashedTwice(Watcher):
    """What is known of a tensor: the function that made it, and over which dimension from the end."""

    names = SOFT | LOG | SIGMOIDS | KEEPS
    begins = SOFT | {"sigmoid"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        x, r = op.given[0] if op.given else None, op.result
        if x is None or not isinstance(r, Tensor) or not r.requires_grad:
            return
        first = self.known.get(x)
        if op.name in KEEPS:
            if first is not None and (first[0] == "sigmoid" or r.shape == x.shape):
                self.known.put(r, first)
            return
        dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
        dim = dim - x.dim() if isinstance(dim, int) and dim >= 0 else dim
        if first is not None:
            same = first[0] == "softmax" and op.name in SOFT | LOG and first[1] == dim and x.shape[dim or -1] > 1
            if same or op.name in SIGMOIDS:
                self.note("F126", (first[0], op.name))
        if op.name in self.begins:
            self.known.put(r, ("sigmoid" if op.name == "sigmoid" else "softmax", dim))

    def close(self) -> None:
        self.known.by_id.clear()
