"""Gradients that the program turns round between the backward and the step: then the loss is one that is to grow.

    log_likelihood.backward()
    for p in model.parameters():
        p.grad.neg_()                   or p.grad = -p.grad, or p.grad.mul_(-1)

What watchers said about the direction of this loss is taken back.

Footgun: a reversal of some weights' gradients (an adversary) turns round nothing for the others. So half of all
gradients must have been turned.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, TIMES, TURNS, written

LISTS = {"_foreach_neg", "_foreach_mul"}
DIRECTED = ("F71", "F75", "F75 weights")  # checks that ask whether a loss is to grow


class TurnedGradients(Watcher):
    """Known are gradients with the other sign."""

    names = TURNS | TIMES | OVER | LISTS | {"grad=", "copy"}
    begins = frozenset()
    between = True

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.held: set[int] | None = None  # ids of what optimizers hold, since the last backward
        self.turned: set[int] = set()  # of gradients, or of weights that were given one

    def saw(self, op: Op) -> None:
        if self.held is None:
            groups = [g for o in self.e.optimizers if o.object is not None for g in o.object.param_groups]
            self.held = {id(p.grad) for g in groups for p in g["params"] if p.grad is not None}
        if op.name in ("grad=", "copy"):
            if len(op.given) == 2 and self.known.get(op.given[1]):
                self._turn(op.given[:1])
        elif op.name in TURNS or op.name == "_foreach_neg" or _below_zero(op.args[-1]):
            mine = [t for t in op.given if id(t) in self.held]
            if mine and (written(op) or op.name in LISTS):
                self._turn(mine)
            for r in op.results if mine else ():
                self.known.put(r, True)

    def _turn(self, gradients: list[Tensor]) -> None:
        self.turned.update(map(id, gradients))
        if 2 * len(self.turned) >= len(self.held or ()):
            for check in DIRECTED:
                self.e.habits[check].pop(self.eye.turn, None)

    def backward(self, loss: Tensor) -> None:
        self.held, self.turned = None, set()

    def close(self) -> None:
        self.known.by_id.clear()


def _below_zero(factor: object) -> bool:
    return isinstance(factor, int | float) and factor < 0
