"""A loss of triplets without its floor: it falls for ever as all embeddings grow.

    loss = (d(a, p) - d(a, n) + margin).mean()
    loss = torch.relu(d(a, p) - d(a, n) + margin).mean()

A difference of two distances that learn is followed to the loss; relu, clamp and the like are its floor.

    loss = torch.relu(d(a, p) - d(a, n) - margin).mean()

asks nothing of a triplet that is wrong by less than the margin; it must be added.

And the hinge that keeps columns apart (VICReg) has its floor at a spread of 1: relu(1 - std). With relu(std - 1) it
draws all rows together.

Footgun: distances of what lies on a sphere have an end by themselves, so nothing is said of cosines.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, POWERS, TIMES

DIFFERENCE, SQUARE, DISTANCE, GAP, SUMMED, UNIT, SHORT, SPREAD, BEYOND = range(1, 10)
BOUNDED = {"normalize", "tanh", "sigmoid", "softmax"}
CUT = {"relu", "clamp", "clamp_min", "maximum", "max"}
KEEPS = {"view", "squeeze", "flatten", "sqrt"} | PLUS | TIMES | OVER


class Triplets(Watcher):
    begins = {"pairwise_distance", "std", "var"} | MINUS | BOUNDED | OVER

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.results or not op.given or not op.results[0].requires_grad:
            return
        made = self._made(op, [self.known.get(t) for t in op.given])
        if made:
            self.known.put(op.results[0], made)

    def _made(self, op: Op, facts: list) -> int | None:
        name, one, pair = op.name, facts[0], len(op.given) == 2
        if name in BOUNDED or name in OVER and pair and op.given[1].shape[1:] == (1,) and op.given[1].requires_grad:
            return UNIT
        if name in ("std", "var"):
            dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
            return SPREAD if op.given[0].dim() == 2 and dim in (0, -2) else None
        if one == SPREAD and not pair:
            above = name in MINUS and any(isinstance(a, int | float) and a > 0 for a in op.args)
            return BEYOND if above else SPREAD if name in KEEPS else None
        if one == BEYOND:
            if name in CUT:
                self.note("F90", "spread")
            return None
        if name == "pairwise_distance":
            return DISTANCE if UNIT not in facts and pair and all(t.requires_grad for t in op.given) else None
        if name in MINUS and not pair and one == GAP:
            margin = next((a for a in op.args if isinstance(a, int | float)), 0)
            return SHORT if margin > 0 else GAP
        if one == SHORT:
            if name in CUT:
                self.note("F90", "margin")
            return None
        if name in MINUS and pair:
            if one == facts[1] == DISTANCE:
                return GAP
            both = all(t.requires_grad and t.dim() == 2 for t in op.given) and op.given[0].shape == op.given[1].shape
            return DIFFERENCE if both and one is None and facts[1] is None else None
        if name in POWERS and one == DIFFERENCE:
            return SQUARE
        row = op.results[0].dim() == 1
        if row and (name in ("sum", "mean") and one == SQUARE or name == "norm" and one == DIFFERENCE):
            return DISTANCE
        if name in ("mean", "sum") and one == GAP and not op.results[0].dim():
            return SUMMED
        if name in KEEPS and one in (DISTANCE, GAP, SUMMED):
            return one if not pair or one == SUMMED else None
        return facts[1] if name in KEEPS and pair and facts[1] == SUMMED else None

    def backward(self, loss: Tensor) -> None:
        if self.known.get(loss) == SUMMED:
            self.note("F70", True)

    def close(self) -> None:
        self.known.by_id.clear()
