"""Errors as shares of their targets, where some targets are zero: those rows are all of the loss.

    ((answer - y).abs() / (y + 1e-6)).mean()            where y = 0 an error of 1 counts a million times
    (answer - y).abs().sum() / y.sum()                  one share for all

The target is known from the difference. What the error is divided by is compared with it, number by number: so it is
the target where both are the same but for something tiny.

Footguns: a mask after the division, a bound, a weight or a 0 that is written in may take these rows away. So the
quotient is followed to the loss through sums and plain numbers alone. What is divided by a spread or a probability is
none of this, for that is not the target.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, POWERS, TIMES, TURNS, written

APART = {"l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss"}
SIZES = POWERS | TURNS | {"sqrt"}
LEAST, LOOKED = 16, 2**20  # numbers
SMALL, FEW, MOST = 1e-3, 0.02, 0.5  # of the median; shares of the rows that are so small
WHOLE = 0.8  # of the loss


class RelativeErrors(Watcher):
    """Known are errors with their target, and quotients with the share of their smallest divisors."""

    begins = MINUS | APART

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name == "__setitem__" and op.given and self.known.get(op.given[0]) is not None:
            self.known.put(op.given[0], None)
        r = op.result
        if not isinstance(r, Tensor) or not r.requires_grad or not op.given:
            return
        fact = self._fact(op, r, [self.known.get(t) for t in op.given])
        if fact is not None or written(op):
            self.known.put(r, fact)

    def _fact(self, op: Op, r: Tensor, facts: list) -> object:
        fact = next((f for f in facts if f is not None), None)
        if fact is None:
            return _target(op, r) if op.name in MINUS | APART else None
        if op.name in OVER and isinstance(fact, Tensor):
            divisor = op.given[1] if len(op.given) == 2 and facts[0] is not None else None
            return _share(r, divisor, fact) if divisor is not None else fact
        if op.name in SIZES and len(op.given) == 1:
            return fact
        if isinstance(fact, Tensor):
            return None
        scalars = all(t.numel() == 1 or self.known.get(t) for t in op.given)
        return fact if op.name in ({"mean", "sum"} | TIMES | OVER | PLUS | MINUS | TURNS) and scalars else None

    def backward(self, loss: Tensor) -> None:
        if isinstance(fact := self.known.get(loss), tuple):
            self.note("F100", fact)
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()


def _target(op: Op, r: Tensor) -> Tensor | None:
    """Of an error that is left number by number."""
    if len(op.given) < 2 or not LEAST <= r.numel() <= LOOKED:
        return None
    one, two = op.given[:2]
    if one.shape != two.shape or r.shape != one.shape or one.requires_grad == two.requires_grad:
        return None
    return two if one.requires_grad else one


def _share(quotient: Tensor, divisor: Tensor, target: Tensor) -> tuple | None:
    """Of the rows whose divisor is next to nothing, and of the quotients that they make."""
    if (
        divisor.requires_grad
        or not divisor.is_floating_point()
        or not target.is_floating_point()
        or divisor.shape != quotient.shape
        or target.shape != quotient.shape
    ):
        return None
    size = divisor.detach().double().abs()
    median = float(size.median())
    same = (size - target.detach().double().abs()).abs() < SMALL * median
    tiny = (size < SMALL * median) & (size > 0)
    share = float(tiny.double().mean())
    if not median or not bool(same.all()) or not FEW <= share < MOST:
        return None
    made = quotient.detach().double().abs()
    part = float(made[tiny].sum() / made.sum())
    return (share, part) if part > WHOLE else None
