"""An average of a network that goes the wrong way: what is trained is drawn to its target, which never moves.

    def soft_update(target, source, tau): ...
    soft_update(critic, critic_target, 0.005)               soft_update(critic_target, critic, 0.005) was meant

Between a backward and the next forward, a weight that an optimizer holds is written to, with what was made of a weight
of a network that is asked for targets. That other weight is never written to itself.

Footgun: to be drawn back to a copy is also a way not to forget; such a copy is mostly not asked for anything. What
functions of whole lists write (torch._foreach_lerp_) is not seen.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.measures import values_of
from train_doctor.watchers.operators import PLUS, TIMES

INTO = {"add", "lerp", "copy"}
MIXES = TIMES | PLUS | {"lerp", "data", "detach", "sub", "clone"}


class SwappedAverage(Watcher):
    """What is known of a tensor: the memory of the targets' weights that it was made of."""

    names = INTO | MIXES
    between = True

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.mine: set[int] = set()  # memory of what optimizers hold
        self.others: set[int] = set()  # of weights of networks that are asked for targets
        self.written: set[int] = set()  # of these
        self.drawn: dict[int, int] = {}  # step -> weights that were drawn to others

    def backward(self, loss: Tensor) -> None:
        held = self.e.optimized()
        mine = [p for m in self.e.models for p in m.parameters() if id(p) in held]
        self.mine = {values_of(p).data_ptr() for p in mine}
        others = (p for m in self.e.teachers for p in m.parameters() if id(p) not in held)
        self.others = {values_of(p).data_ptr() for p in others}

    def saw(self, op: Op) -> None:
        if self.eye.forward or not self.others or not op.given or op.name not in INTO | MIXES:
            return
        facts = [self._fact(t) for t in op.given]
        made = frozenset().union(*(f for f in facts if f))
        into = op.given[0].data_ptr()
        if op.name in INTO and op.result is op.given[0] and len(op.given) > 1:
            if into in self.others:
                self.written.add(into)
            elif into in self.mine and made:
                self.drawn[self.eye.turn] = self.drawn.get(self.eye.turn, 0) + 1
        elif made and isinstance(op.result, Tensor) and op.result is not op.given[0]:
            self.known.put(op.result, made)

    def _fact(self, t: Tensor) -> frozenset:
        here = t.data_ptr()
        return frozenset({here}) if here in self.others else self.known.get(t) or frozenset()

    def close(self) -> None:
        if not self.written:
            for turn, count in self.drawn.items():
                self.note("N36", count, turn)
        self.known.by_id.clear()
