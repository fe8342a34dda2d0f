"""Pairs whose two scores are one and the same number: a reward model that reads what both texts
share.

    end = (ids == eos).int().argmax(1)
    the first end: that of the question, which both begin with
    chosen, rejected = head(hidden[rows, end]).chunk(2)
    loss = -F.logsigmoid(chosen - rejected).mean()          ln 2 for ever

Footgun: with a reference that is the policy itself a preference loss is ln 2 as well. There
differences are subtracted from each other, or logarithms from those of the reference that has no
graph.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS, OVER, TIMES

LOSSES = {"logsigmoid", "log_sigmoid", "softplus", "binary_cross_entropy_with_logits", "sigmoid"}
KEEPS = TIMES | OVER | {"neg", "__neg__"}


class SameScores(Watcher):
    """Known are differences, and whether both sides were the same, which are no differences
    themselves.
    """

    names, begins = LOSSES | KEEPS | MINUS, MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        facts = [fact for t in op.given if (fact := self.known.get(t)) is not None]
        if op.name in LOSSES:
            if facts and facts[0]:
                self.note("N14 same", len(op.given[0]))
        elif (
            op.name in MINUS and isinstance(op.result, Tensor) and len(op.given) == 2 and not facts
        ):
            a, b = op.given
            if a.shape == b.shape and op.result.requires_grad and a.numel() > 1 and a.dim() < 3:
                self.known.put(op.result, a.requires_grad and b.requires_grad and torch.equal(a, b))
        else:
            for r in op.results if facts else ():
                self.known.put(r, facts[0] and op.name in KEEPS and len(op.given) == 1)

    def close(self) -> None:
        self.known.by_id.clear()
