"""An average of the weights that is made with their graph, and grows by a step at every step.

    target[name] = torch.lerp(target[name], p, 1 - tau)
    p.detach(), or under no_grad, was meant
    ema = decay * ema + (1 - decay) * p

That the graphs of all steps are kept is seen at the end (N27); this says by what. The sum of
something and a weight, scaled perhaps, that has a graph is known with its step. Where it meets a
weight in a later step, it grows.

Footgun: weights meet each other within a step (a penalty, weights that are made of others), and
what is computed once and kept meets none again. A state that is carried on may meet a bias, but has
rows, or a constant that does not learn.
"""

from torch import Tensor, nn

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, TIMES

SUMS, SCALES = PLUS | MINUS | {"lerp"}, TIMES | OVER
PART = -1  # in place of a step: a weight, scaled perhaps


class GrowingAverages(Watcher):
    """What is known of a tensor with the shape of a weight that is in it: the step in which that
    was added.
    """

    names = SUMS | SCALES
    begins = frozenset()
    between = True

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        made = op.result
        if not isinstance(made, Tensor) or not made.requires_grad:
            return
        steps = {self._step(t) for t in op.given if t.shape == made.shape} - {None}
        if not steps:
            return
        old = max(steps)
        if op.name in SCALES:
            self.known.put(made, old)
            return
        if 0 <= old < self.eye.turn and PART in steps:
            self.note("N27", old)
        self.known.put(made, self.eye.turn)

    def _step(self, t: Tensor) -> int | None:
        if isinstance(t, nn.Parameter):
            return PART if t.requires_grad else None
        return self.known.get(t)

    def close(self) -> None:
        self.known.by_id.clear()
