"""The better of two where the worse was meant: PPO's two objectives, and the values of two critics.

    loss = -torch.max(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    target = reward + gamma * (1 - done) * torch.max(q1(next), q2(next))

Both minima are there for caution: a policy gains nothing by going further than the cut, and a value that one critic
overrates is not handed on. The maximum takes the caution away.

Of PPO, what was cut to a range around 1 is followed through a product to a maximum or minimum with what was not cut,
and that to the loss, for max(-a, -b) is right. Two critics are two layers without a graph, and two answers that are
asked for what came of the larger one.

A product of what was cut and something that learns (F29) is told once the better of two is taken of it: a gate may be
cut to such a range too.

Footgun: some methods use both (the mean of least and largest, in offline learning); a step in which the other one was
taken of the same kind of thing is left alone.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers import signs
from train_doctor.watchers.operators import MINUS, PLUS, TIMES, TURNS

LARGER, SMALLER = {"max", "maximum"}, {"min", "minimum"}
CUT, PUSHED, VALUE, LARGEST, TARGET = "cut", "cut, times what learns", "value", "largest", "target"
VIEWS = {"squeeze", "view", "flatten", "reshape", "unsqueeze"}


class Surrogates(Watcher):
    """What is known of a tensor: that it was cut or is the larger of two values, the last weight of a critic that
    answered it, or the signs with which the better of two objectives is part of it."""

    begins = {"clamp", "clip", "linear"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.asked: set[int] = set()  # answers that met a target with the larger of two values in it
        self.smaller = False  # of two values was taken

    def saw(self, op: Op) -> None:
        if isinstance(op.result, Tensor) and op.given and op.result is not op.given[0]:
            facts = [self.known.get(t) for t in op.given]
            if fact := self._begins(op) or (self._follows(op, facts) if any(facts) else None):
                self.known.put(op.result, fact)

    def _begins(self, op: Op) -> object:
        if op.name in ("clamp", "clip") and op.given[0].requires_grad:
            asked = [*op.args, None, None, None]
            low, high = op.kwargs.get("min", asked[1]), op.kwargs.get("max", asked[2])
            return CUT if isinstance(low, float) and isinstance(high, float) and 0.4 < low < 1 < high < 2 else None
        alone = op.name == "linear" and op.result.shape[1:] == (1,) and len(op.result) > 1 and len(op.given) > 1
        return (VALUE, id(op.given[1])) if alone and not op.result.requires_grad else None

    def _follows(self, op: Op, facts: list) -> object:
        if op.name in LARGER | SMALLER and len(op.given) == 2:
            return self._of_two(op, facts)
        if CUT in facts or PUSHED in facts:
            if op.name in TIMES and len(op.given) == 2 and all(t.requires_grad and t.numel() > 1 for t in op.given):
                return PUSHED
            return (PUSHED if PUSHED in facts else CUT) if op.name in TIMES | TURNS else None
        if LARGEST in facts or TARGET in facts:
            if op.name in PLAIN or op.name in MINUS:
                answers = [t for t, f in zip(op.given, facts) if f not in (LARGEST, TARGET) and t.requires_grad]
                self.asked |= {id(t) for t in answers}
                return None
            return TARGET if op.name in TIMES | PLUS else facts[0] if op.name in VIEWS else None
        if op.name in VIEWS and not isinstance(facts[0], frozenset):
            return facts[0]
        return signs.followed(op, self.known)

    def _of_two(self, op: Op, facts: list) -> object:
        if facts.count(CUT) + facts.count(PUSHED) == 1 and op.given[0].shape == op.given[1].shape:
            if PUSHED in facts:
                self.note("F29", True)
            return frozenset({1 if op.name in LARGER else -1})
        values = {f for f in facts if isinstance(f, tuple)}
        if len(values) == 2 and op.name in LARGER:
            return LARGEST
        self.smaller = self.smaller or len(values) == 2
        return None

    def backward(self, loss: Tensor) -> None:
        """In a loss, the worse of two objectives has the sign 1: max(-a, -b), or -min(a, b)."""
        if self.known.get(loss) == frozenset({-1}) and not self.eye.rising:
            self.note("F76", "objective")
        if len(self.asked) > 1 and not self.smaller:
            self.note("F76", "value")
        self.asked, self.smaller = set(), False

    def close(self) -> None:
        self.known.by_id.clear()
