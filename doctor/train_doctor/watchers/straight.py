"""A straight-through estimator without its detach: `z + (q - z)`.

    q = z + (q - z).detach()            the value of q, and z gets q's gradient
    q = z + (q - z)                     the value of q, and z gets none: what is added is taken away again

Nothing else is ever meant by adding a tensor to its own difference: the sum is the other tensor.

Footgun: with a factor on the difference it is a way between the two, and right.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS


class Straight(Watcher):
    """Known is what a difference was taken of, and what was taken away."""

    begins = MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if len(op.given) != 2 or not isinstance(op.result, Tensor) or not op.result.requires_grad:
            return
        if op.name in MINUS:
            away = op.given[1]
            if away.requires_grad and away.grad_fn is not None and op.given[0].shape == away.shape and away.dim() > 1:
                self.known.put(op.result, away.grad_fn)
        elif op.name in PLUS:
            for one, other in (op.given, op.given[::-1]):
                node = self.known.get(other)
                if node is not None and one.grad_fn is node:
                    self.note("F93", tuple(one.shape))

    def close(self) -> None:
        self.known.by_id.clear()
