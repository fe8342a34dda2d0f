"""A straight-through estimator without its detach: `z + (q - z)`.

    q = z + (q - z).detach()            the value of q, and z gets q's gradient
    q = z + (q - z)                     the value of q, and z gets none: what is added is taken away again

Nothing else is ever meant by adding a tensor to its own difference: the sum is the other tensor.

    q = q + (z - q).detach()            the wrong way round: the value of z, and q gets its gradient

What was looked up in a table, or rounded, is the one that is to be seen and can't lead a gradient on.

Footgun: with a factor on the difference it is a way between the two, and right.
"""

import weakref

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import VIEWS, kind
from train_doctor.watchers.operators import MINUS, PLUS

SCALES, DEEP = ("Mul", "Div", "Clamp"), 8
PICKED = {"Embedding", "IndexSelect", "Index", "Round", "Floor", "Sign"}


class Straight(Watcher):
    """Known is what was taken away in a difference, whether the difference was detached, and whether the other one was
    neither looked up nor rounded."""

    begins = MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor):
            return
        if op.name == "detach" and (fact := self.known.get(op.given[0])) is not None:
            self.known.put(op.result, (fact[0], True, fact[2]))
        if len(op.given) != 2 or not op.result.requires_grad:
            return
        if op.name in MINUS:
            away = op.given[1]
            if away.requires_grad and away.grad_fn is not None and op.given[0].shape == away.shape and away.dim() > 1:
                self.known.put(
                    op.result,
                    (weakref.ref(away), False, op.given[0].requires_grad and not _picked(op.given[0].grad_fn)),
                )
        elif op.name in PLUS:
            for one, other in (op.given, op.given[::-1]):
                fact = self.known.get(other)
                away = fact[0]() if fact is not None else None
                if away is None or one.grad_fn is None or one.grad_fn is not away.grad_fn:
                    continue
                if not fact[1]:
                    self.note("F93", tuple(one.shape))
                elif fact[2] and _picked(one.grad_fn):
                    self.note("F93 turned", tuple(one.shape))

    def close(self) -> None:
        self.known.by_id.clear()


def _picked(node) -> bool:
    """Whether a tensor, but for its shape, was looked up or rounded."""
    for _ in range(DEEP):
        if kind(node) in PICKED or kind(node) not in VIEWS and kind(node) not in SCALES:
            break
        node = node.next_functions[0][0]
    return kind(node) in PICKED
