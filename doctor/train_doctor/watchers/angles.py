"""Angles that are asked for as if they were numbers with two ends, where 359 degrees and 1 degree are neighbours.

    loss = F.mse_loss(model(x), angle)                                      -3.1 and 3.1 count as far apart
    loss = F.mse_loss(model(x), torch.cat([angle.sin(), angle.cos()], 1))   was meant, and atan2 of the answer

The targets of a regression of one number are kept over some steps. Whether they fill a circle up to both of its ends is
asked by the check.

Footgun: numbers between 0 and 6 are no angles, so both ends must be met closely. Whoever knows of the circle takes a
sine, a cosine, an atan2 or a remainder of as many numbers in the same step, and then nothing is said. And where the
target is what went in, it is one number like another.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, POWERS

WRAPS = {"sin", "cos", "tan", "atan2", "arctan2", "atan", "remainder", "fmod", "__mod__", "polar", "angle", "where"}
ROWS, LOOKED, NODES = 8, 4096, 500  # numbers; nodes of a loss


class Angles(Watcher):
    """Known are differences of an answer and a target of one number, and their squares -> the target."""

    begins = WRAPS | MINUS | {*PLAIN, "linear"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self._forget()

    def _forget(self) -> None:
        self.means: list[tuple] = []  # targets, and the nodes of their losses, since the last backward
        self.wrapped: set[int] = set()  # how many numbers a sine, or its like, was taken of
        self.inputs: list[Tensor] = []

    def saw(self, op: Op) -> None:
        if op.name in WRAPS:
            self.wrapped.update(t.numel() for t in op.given)
        elif op.name == "linear":
            if not op.given[0].requires_grad and op.given[0].dim() == 2 and len(self.inputs) < 4:
                self.inputs.append(op.given[0])
        elif op.name in MINUS or op.name in PLAIN:
            target = _target(op.given) if len(op.given) == 2 and isinstance(op.result, Tensor) else None
            if target is not None and op.name in MINUS:
                self.known.put(op.result, target)
            elif target is not None and op.kwargs.get("reduction", "mean") != "none":
                self.means.append((target, op.result.grad_fn))
        elif op.given and (target := self.known.get(op.given[0])) is not None and isinstance(op.result, Tensor):
            if op.name in POWERS or op.name == "mul" and all(t is op.given[0] for t in op.given):
                self.known.put(op.result, target)
            elif op.name in ("mean", "sum") and not op.result.dim():
                self.means.append((target, op.result.grad_fn))

    def backward(self, loss: Tensor) -> None:
        reached = set(graphs.walk(loss, NODES)) if self.means else ()
        for target in [target for target, node in self.means[:4] if node in reached]:  # others are for the log
            y = target.detach().flatten()
            own = any(bool((x == y[:, None]).all(0).any()) for x in self.inputs if len(x) == len(y))
            if len(y) not in self.wrapped and not own:
                self.note("F102", y[:LOOKED].tolist())
        self._forget()

    def close(self) -> None:
        self.known.by_id.clear()
        self._forget()


def _target(sides: list[Tensor]) -> Tensor | None:
    """Of one number for each row."""
    one = sides[0].shape == sides[1].shape and sides[0].dim() in (1, 2) and sides[0].shape[1:] in ((), (1,))
    if not one or len(sides[0]) < ROWS or sides[0].requires_grad == sides[1].requires_grad:
        return None
    return sides[1] if sides[0].requires_grad else sides[0]
