"""A ratio of probabilities for each dimension of an action, where the action has one.

    log_prob = Normal(mean, spread).log_prob(action)            (rows, dimensions); .sum(-1) is missing
    ratio = (log_prob - old).exp();  loss = -(ratio * advantage[:, None])

The probability of an action is the product over its dimensions. Taken apart, each is cut by itself, and the advantage
counts as often as there are dimensions.

Footgun: agents that share an advantage have a ratio each, as have the words of a text. Theirs are mostly of classes; so
only normal distributions are looked at, with rows and dimensions and no more.
"""

from typing import Any

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, TIMES

SCORE, GAP, RATIO = "score", "gap", "ratio"
LEAST = 8  # rows


class RatiosApart(Watcher):
    begins = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        if isinstance(of, distributions.Normal) and isinstance(result, Tensor) and result.dim() == 2:
            if len(result) >= LEAST and result.shape[1] > 1:
                self.known.put(result, SCORE)

    def saw(self, op: Op) -> None:
        if not op.results or not op.given:
            return
        facts, made = [self.known.get(t) for t in op.given], None
        alike = len(op.given) == 2 and op.given[0].shape == op.given[1].shape
        if op.name in MINUS and SCORE in facts and alike:
            made = GAP
        elif op.name == "exp" and facts[0] == GAP:
            made = RATIO
        elif op.name in ("clamp", "clip") and facts[0] == RATIO or op.name in ("detach", "clone") and facts[0]:
            made = facts[0]
        elif op.name in TIMES and facts.count(RATIO) == 1 and len(op.given) == 2:
            other = op.given[1 - facts.index(RATIO)]
            if not other.requires_grad and other.numel() == len(op.given[facts.index(RATIO)]):
                self.note("F113", op.given[facts.index(RATIO)].shape[1])
        if made:
            self.known.put(op.results[0], made)

    def close(self) -> None:
        self.known.by_id.clear()
