"""Score functions of samples that carry a gradient: `rsample()` where `sample()` was meant.

    action = dist.sample()                      a number; log_prob tells how to make it likelier
    action = dist.rsample()                     moves with the mean, so log_prob of it does not hang on the mean at all
    loss = -(dist.log_prob(action) * advantage).mean()

The two ways to the mean cancel exactly, and the policy stands still. What log_prob makes of such a sample is followed
to a product with numbers that do not learn, one for each row.

Footgun: soft actor-critic scores its own samples rightly, with one temperature for all rows or for each task, and a
critic beside them; and a bound on padded series has a mask there. These are not negative, and an advantage is for some.
"""

import weakref
from typing import Any

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import PLUS, TIMES, TURNS

KEEPS = {"sum", "view", "reshape", "squeeze", "unsqueeze", "flatten", "mean", "stack", "cat"} | TURNS | PLUS
SCORE = "score"


class OwnSamples(Watcher):
    """What is known of a tensor: the distribution that drew it with a gradient, or SCORE, if it scores such a one."""

    names = TIMES | KEEPS
    begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.of_distributions("rsample", "sampled", after=True)
        self.of_distributions("log_prob", "score", after=True)

    def sampled(self, result: Any, of: distributions.Distribution, *shape: Any, **named: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad:
            self.known.put(result, weakref.ref(of))

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        drawn = self.known.get(value) if isinstance(value, Tensor) else None
        if isinstance(drawn, weakref.ref) and drawn() is of and isinstance(result, Tensor) and result.requires_grad:
            self.known.put(result, SCORE)

    def saw(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        if SCORE not in facts:
            return
        if op.name in TIMES and len(op.given) == 2:
            other = op.given[1 - facts.index(SCORE)]
            if not other.requires_grad and other.numel() > 1 and bool((other < 0).any()):
                self.note("F97", tuple(other.shape))
        for r in op.results if op.name in KEEPS or op.name in TIMES else ():
            self.known.put(r, SCORE)

    def close(self) -> None:
        self.known.by_id.clear()
