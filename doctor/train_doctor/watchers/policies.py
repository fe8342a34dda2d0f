"""The sign with which the score of an action enters the loss: `(log_prob * advantage).mean()` without a minus.

    loss = -(log_prob * advantage).mean()                       what was better than expected becomes likelier
    loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()

An optimizer makes a loss smaller, so a product that should grow needs a minus. The log-probabilities of a distribution
that learns are followed with their sign: through the exponential of a ratio, products with weights that do not learn,
the smaller of two, sums and means. Weights that were negated before have turned it.

Footguns: where the weights are costs the sign is right, which is why this is a warning. Weights that are made of
log-probabilities themselves belong to a variational bound, and are left alone; so is an action with a gradient (SAC).
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher

KEEPS = {"exp", "min", "minimum", "max", "maximum", "clamp", "clip", "stack", "cat", "sum", "mean", "view", "squeeze"}
KEEPS |= {"reshape", "flatten", "unsqueeze", "__getitem__", "to", "float", "add", "__add__", "__radd__"}
TIMES, MINUS = {"mul", "multiply", "__mul__", "__rmul__"}, {"sub", "subtract", "__sub__"}
OVER, TURNS = {"div", "true_divide", "__truediv__"}, {"neg", "negative", "rsub", "__rsub__"}
TURNED = "turned"  # weights that were negated
SCORE = "score"  # what is made of scores without a graph


class Policies(Watcher):
    """What is known of a tensor: (sign, whether it was weighted), TURNED or SCORE."""

    begins = {"neg", "negative"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        mine = weakref.proxy(self)
        for kind in vars(distributions).values():
            if isinstance(kind, type) and issubclass(kind, distributions.Distribution) and "log_prob" in vars(kind):
                eye.at.around(kind, "log_prob", lambda *a, **k: mine.score(*a, **k))

    def score(self, original: Callable, of: distributions.Distribution, value: Any, *args, **kwargs) -> Tensor:
        result = original(of, value, *args, **kwargs)
        if self.eye.on and isinstance(result, Tensor):
            learns = result.requires_grad and not (isinstance(value, Tensor) and value.requires_grad)
            self.known.put(result, (1, False) if learns else SCORE)
        return result

    def saw(self, op: Op) -> None:
        made = self._made(op, [self.known.get(t) for t in op.given])
        for r in op.results if made else ():
            self.known.put(r, made)

    def _made(self, op: Op, facts: list) -> Any:
        name, signed = op.name, [f for f in facts if isinstance(f, tuple)]
        if not signed or not any(r.requires_grad for r in op.results):
            if signed or SCORE in facts:
                return SCORE
            return TURNED if name in ("neg", "negative") and not op.given[0].requires_grad else None
        sign, weighted = signed[0]
        if name in TURNS:
            return -sign, weighted
        if name in MINUS:
            if isinstance(facts[0], tuple):
                return (sign, weighted) if len(signed) == 1 else None
            return -sign, weighted
        if name in TIMES:
            return self._weighed(op, facts, sign, weighted)
        if name in OVER:
            return (sign, weighted) if isinstance(facts[0], tuple) and len(signed) == 1 else None
        if name in KEEPS and len(set(signed)) == 1:
            return sign, weighted
        return None

    def _weighed(self, op: Op, facts: list, sign: int, weighted: bool) -> tuple[int, bool] | None:
        numbers = [a for a in op.args if isinstance(a, int | float)]
        if numbers:
            return sign if numbers[0] > 0 else -sign, weighted
        if len(op.given) != 2:
            return None
        other = 1 if isinstance(facts[0], tuple) else 0
        if op.given[other].requires_grad or facts[other] == SCORE or isinstance(facts[other], tuple):
            return None
        return (-sign if facts[other] == TURNED else sign), weighted or op.given[other].numel() > 1

    def backward(self, loss: Tensor) -> None:
        if self.known.get(loss) == (1, True):
            self.note("F63", True)

    def close(self) -> None:
        self.known.by_id.clear()
