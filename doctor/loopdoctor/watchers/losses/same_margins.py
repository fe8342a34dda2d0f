"""Two differences of log-probabilities that are one and the same: the reference of a preference
loss is the policy.

    with torch.no_grad():
        before = logp(reference, chosen) - logp(reference, rejected)
        reference = model, no copy of it
    margin = logp(model, chosen) - logp(model, rejected) - before           0 for ever
    loss = (margin - 1 / (2 * beta)).pow(2).mean()
    IPO: 25 for ever; a hinge: 1

Footgun: one log-probability minus itself without its graph is the ratio of the first pass of PPO
and GRPO, and right. So both sides must be differences, the one of two texts under each model, or
the other way round.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS

LEARNT, GIVEN, NOTHING = "learnt", "given", "nothing"


class SameMargins(Watcher):
    """Known are differences of two that learn, of two that do not, and of one that does from itself
    without a graph.
    """

    names = begins = MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or len(op.given) != 2:
            return
        a, b = op.given
        if (
            a.shape != b.shape
            or a.dim() != 1
            or len(a) < 2
            or a.dtype is not torch.float32
            or b.dtype != a.dtype
        ):
            return  # fewer bits round small differences away
        kinds = self.known.get(a), self.known.get(b)
        same = kinds in ((LEARNT, GIVEN), (NOTHING, NOTHING)) and torch.equal(a, b)
        if same and op.result.requires_grad and (kinds[0] == NOTHING or bool((a != a[0]).any())):
            self.note("N14 margins", len(a))
        if a.requires_grad != b.requires_grad:
            if bool((a != a[0]).any()) and torch.equal(a, b):
                self.known.put(op.result, NOTHING)
        else:
            self.known.put(op.result, LEARNT if a.requires_grad else GIVEN)

    def close(self) -> None:
        self.known.by_id.clear()
