"""Angles that are asked for as if they were numbers with two ends, where 359 degrees and 1 degree are neighbours.

    loss = F.mse_loss(model(x), angle)                                      -3.1 and 3.1 count as far apart
    loss = F.mse_loss(model(x), torch.cat([angle.sin(), angle.cos()], 1))   was meant, and atan2 of the answer

The targets of a regression of one number are kept over some steps. Whether they fill a circle up to both of its ends is
asked by the check.

Footgun: numbers between 0 and 6 are no angles, so both ends must be met closely. Whoever knows of the circle takes a
sine, a cosine, an atan2 or a remainder of as many numbers in the same step, and then nothing is said. And where the
target is what went in, it is one number like another. What has two ends that differ (a wheel with a stop, minutes of an
oven) shows it in the input: rows with the least targets and those with the largest lie farther apart there than both do
from the middle, and on a circle they are neighbours. An error that is written into (brought back by one turn, say) is
no longer followed.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, POWERS, written

WRAPS = {"sin", "cos", "tan", "atan2", "arctan2", "atan", "remainder", "fmod", "__mod__", "polar", "angle", "where"}
ROWS, LOOKED, NODES = 8, 4096, 500  # numbers; nodes of a loss
PART, COLUMNS = 8, 2**14  # of the rows, in order of their targets; of an input


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
        if written(op) and op.name not in POWERS and self.known.get(op.given[0]) is not None:
            self.known.put(op.given[0], None)
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
                inputs = [x for x in self.inputs if len(x) == len(y) and x.shape[1] <= COLUMNS]
                self.note("F102", (y[:LOOKED].tolist(), _ends(y, inputs)))
        self._forget()

    def close(self) -> None:
        self.known.by_id.clear()
        self._forget()


def _target(sides: list[Tensor]) -> Tensor | None:
    """Of one number for each row."""
    one = sides[0].shape == sides[1].shape and sides[0].dim() in (1, 2) and sides[0].shape[1:] in ((), (1,))
    if not one or len(sides[0]) < ROWS or sides[0].requires_grad == sides[1].requires_grad:
        return None
    if any(side.is_complex() for side in sides):
        return None
    return sides[1] if sides[0].requires_grad else sides[0]


def _ends(y: Tensor, inputs: list[Tensor]) -> tuple[float, float]:
    """Squares of how far the rows with the least targets lie from those with the largest, and from those in the middle,
    less what chance alone puts between them."""
    order, part = y.argsort(), len(y) // PART
    if part < 2 or not bool(y.isfinite().all()):
        return 0.0, 0.0
    middle = (len(y) - part) // 2
    at = [order[:part], order[-part:], order[middle : middle + part]]
    far, near = 0.0, 0.0
    for x in inputs:
        x = x.detach().double()
        if not bool(x.isfinite().all()):
            continue
        x = (x - x.mean(0)) / x.std(0).clamp_min(1e-9)
        low, high, half = ((x[rows].mean(0), x[rows].var(0) / part) for rows in at)
        far += float(_apart(low, high))
        near += float(_apart(low, half) + _apart(high, half)) / 2
    return far, near


def _apart(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> Tensor:
    return ((one[0] - two[0]).square() - one[1] - two[1]).sum()
