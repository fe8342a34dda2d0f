"""A focal loss that looks at what is known already: `p**2 * -log(p)` where `(1 - p)**2 * -log(p)` was meant.

Each row's loss has a weight that falls as the row is learned. Turned round, the rows that are learned count and the
others hardly do. A power of a probability (above 1) is followed through plain factors to a product with that
probability's own negative logarithm; numbers tell whether it is one.

And it is the probability of the row's own label that is meant: `(1 - sigmoid(z))**2` for all rows is right for those of
class 1, and takes the learned ones of class 0 for the hard ones.

Footguns: a distance between 0 and 1 (r**2 * log(r), a spline) is no probability, so it must come from a softmax, a
sigmoid or an exponential. p * log(p) is an entropy, so a power of 1 says nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.operators import PLUS, TIMES

NEGATIVE = {"neg", "negative", "__neg__"}
ADDS = PLUS | {"mean", "sum"}
LEAST, LOOKED, NODES = 4, 2**20, 16
APART = 0.02  # p and 1 - p, so that they can be told apart


class Power(NamedTuple):
    p: Tensor  # of which it is a power
    where: Tensor | None = None  # the rows that a plain factor has left
    loss: Tensor | None = None  # that was multiplied with it


def _both(where: Tensor | None, factor: Tensor | None, p: Tensor) -> Tensor | None:
    if factor is None or factor.shape != p.shape:
        return where
    left = factor.detach() != 0
    return left if where is None else where & left


class Focused(Watcher):
    """What is known of a tensor: the probabilities of which it is a power, times plain numbers."""

    begins = {"pow", "__pow__", "square"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or not op.given:
            return
        if op.name in self.begins:
            power = 2 if op.name == "square" else op.args[1] if len(op.args) > 1 else op.kwargs.get("exponent")
            p = op.given[0]
            if (
                isinstance(power, (int, float))
                and power > 1
                and p.requires_grad
                and op.result.requires_grad
                and LEAST <= p.numel() <= LOOKED
                and _likely(p.grad_fn)
            ):
                low, high = p.detach().aminmax()
                if 0 <= low and high <= 1 and low < high:
                    self.known.put(op.result, Power(p.detach()))
        elif op.name in TIMES:
            self._times(op)
        elif op.name in ADDS and (found := [f for f in map(self.known.get, op.given) if f is not None]):
            for fact in found if op.name in PLUS or op.result.dim() < op.given[0].dim() else ():
                if fact.loss is not None:
                    self._reduced(fact)
        elif op.name in NEGATIVE and (p := self.known.get(op.given[0])) is not None:
            self.known.put(op.result, p)

    def _times(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        at = next((n for n, f in enumerate(facts) if f is not None), None)
        if at is None:
            return
        fact, others = facts[at], [t for n, t in enumerate(op.given) if n != at]
        if not others or not others[0].requires_grad:
            self.known.put(op.result, fact._replace(where=_both(fact.where, others[0] if others else None, fact.p)))
        elif fact.loss is None and len(others) == 1 and others[0].shape == fact.p.shape:
            self.known.put(op.result, fact._replace(loss=others[0].detach()))

    def _reduced(self, fact: "Power") -> None:
        """Which rows have a power of their own probability as their weight, of those that have any."""
        p, loss = fact.p.float(), fact.loss.float()
        one = (-loss.abs()).exp()
        known, other = (torch.isclose(p, q, rtol=1e-3, atol=1e-4) for q in (one, 1 - one))
        told = ((one - 0.5).abs() > APART / 2) & (fact.where if fact.where is not None else torch.ones_like(known))
        many = int((known & told).sum()), int((other & told).sum())
        if bool(known.all()) and many[0]:
            self.note("F80", len(p) if p.dim() else 1)
        elif bool((known | other).all()) and min(many) >= LEAST:
            self.note("F80 one", (many[0], int(told.sum())))

    def close(self) -> None:
        self.known.by_id.clear()


def _likely(node) -> bool:
    """Whether a softmax, a sigmoid or an exponential is near."""
    queue = [node]
    for _ in range(NODES):
        here = queue.pop(0) if queue else None
        if kind(here) in ("Sigmoid", "Softmax", "LogSoftmax", "Exp", "LogSigmoidForward"):
            return True
        queue += [edge for edge, _ in here.next_functions if edge is not None] if here is not None else []
    return False
