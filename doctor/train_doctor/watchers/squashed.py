"""Actions that were squashed by a tanh, and a log-probability that does not know of it: SAC without its correction.

    u = Normal(mean, spread).rsample()
    action = torch.tanh(u)
    log_prob = Normal(mean, spread).log_prob(u).sum(-1)
    log_prob = log_prob - torch.log(1 - action**2 + 1e-6).sum(-1)           the correction

Without it the entropy is that of u, which grows without end while all actions go to -1 and 1.

A draw with a gradient is followed into a tanh and into a log_prob. It is wrong where that log-probability reaches a
loss and was never added to anything that was made of the draw itself.

Footgun: a difference of two log-probabilities of one draw (PPO, a prior) has the correction on both sides, so it may be
left out; and of a draw without a gradient it is a constant.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS, TIMES, TURNS

LAYERS = {"linear", "conv1d", "conv2d", "addmm", "matmul", "bilinear", "embedding", "cat", "concat", "stack"}
KEEPS = {"sum", "mean", "view", "squeeze", "unsqueeze", "reshape", "flatten", "__getitem__"} | TIMES | TURNS
DRAWN, MADE, SCORE = "drawn", "made of it", "score"


class Squashed(Watcher):
    begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.inside = 0
        self.squashed = False  # a draw was, since the last backward
        self.around(distributions.Normal, "rsample", "draw")
        self.around(distributions.Normal, "log_prob", "score")

    def draw(self, original: Callable, of: distributions.Normal, *args, **kwargs) -> Tensor:
        u = self._called(original, of, *args, **kwargs)
        if self.eye.on and not self.inside and isinstance(u, Tensor) and u.requires_grad:
            self.known.put(u, DRAWN)
        return u

    def score(self, original: Callable, of: distributions.Normal, value: Any, *args, **kwargs) -> Tensor:
        score = self._called(original, of, value, *args, **kwargs)
        if self.eye.on and not self.inside and isinstance(score, Tensor) and self.known.get(value) == DRAWN:
            self.known.put(score, SCORE)
        return score

    def _called(self, original: Callable, *args, **kwargs) -> Tensor:
        self.inside += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.inside -= 1

    def saw(self, op: Op) -> None:
        if self.inside:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name == "tanh" and DRAWN in facts:
            self.squashed = True
        if any(facts) and ((fact := self._fact(op.name, facts)) or op.result is op.given[0]):
            for r in op.results or [op.given[0]]:  # in place: log_prob -= correction
                self.known.put(r, fact)

    def _fact(self, name: str, facts: list) -> str | None:
        """What a layer makes of a draw, or what it is joined with, is another thing."""
        if SCORE in facts:
            alone = [f for f in facts if f] == [SCORE]
            return SCORE if alone and name in KEEPS | PLUS | MINUS else None
        return None if name in LAYERS else MADE

    def backward(self, loss: Tensor) -> None:
        if self.squashed and self.known.get(loss) == SCORE:
            self.note("F77", True)
        self.squashed = False

    def close(self) -> None:
        self.known.by_id.clear()
