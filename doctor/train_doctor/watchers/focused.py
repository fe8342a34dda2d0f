"""A focal loss that looks at what is known already: `p**2 * -log(p)` where `(1 - p)**2 * -log(p)` was meant.

Each row's loss has a weight that falls as the row is learned. Turned round, the rows that are learned count and the
others hardly do. A power of a probability (above 1) is followed through plain factors to a product with that
probability's own negative logarithm; numbers tell whether it is one.

Footguns: a distance between 0 and 1 (r**2 * log(r), a spline) is no probability, so it must come from a softmax, a
sigmoid or an exponential. p * log(p) is an entropy, so a power of 1 says nothing.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.operators import TIMES

NEGATIVE = {"neg", "negative", "__neg__"}
LEAST, LOOKED, NODES = 4, 2**20, 16
APART = 0.02  # p and 1 - p, so that they can be told apart


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
                    self.known.put(op.result, p.detach())
        elif op.name in TIMES:
            self._times(op)
        elif op.name in NEGATIVE and (p := self.known.get(op.given[0])) is not None:
            self.known.put(op.result, p)

    def _times(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        at = next((n for n, f in enumerate(facts) if f is not None), None)
        if at is None:
            return
        others = [t for n, t in enumerate(op.given) if n != at]
        if not others or not others[0].requires_grad:
            self.known.put(op.result, facts[at])
        elif len(others) == 1 and others[0].shape == facts[at].shape:
            p, loss = facts[at].float(), others[0].detach().float()
            one = (-loss.abs()).exp()
            if torch.allclose(p, one, rtol=1e-3, atol=1e-4) and bool(((p - (1 - one)).abs() > APART).any()):
                self.note("F80", len(p) if p.dim() else 1)

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
