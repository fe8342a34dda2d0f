"""Probabilities where a distribution takes logits: `Categorical(logits=policy(x))` of a policy that ends in a softmax.

The softmax of numbers between 0 and 1 is nearly flat, so the policy can never be sure of anything: of four actions none
gets more than 0.48. The same of Bernoulli(logits=sigmoid(x)), and of gumbel_softmax, which takes logits too.

Footgun: log-probabilities are logits, so only what comes straight from a softmax or a sigmoid is meant.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, distributions

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import kind

VIEWS = {"View", "Squeeze", "Unsqueeze", "Select", "Reshape", "UnsafeView", "Slice", "Expand"}
GIVEN = {"Categorical": "Softmax", "OneHotCategorical": "Softmax", "Bernoulli": "Sigmoid"}


class LogitsGiven(Watcher):
    names = begins = {"gumbel_softmax"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        for name in GIVEN:
            self.around(getattr(distributions, name), "__init__", "made")

    def made(self, original: Callable, of: Any, probs: Any = None, logits: Any = None, *args, **kwargs) -> None:
        wanted = GIVEN.get(type(of).__name__)
        if self.eye.on and wanted and isinstance(logits, Tensor):
            self._look(logits, wanted, type(of).__name__)
        original(of, probs, logits, *args, **kwargs)

    def saw(self, op: Op) -> None:
        self._look(op.given[0], "Softmax", "gumbel_softmax")

    def _look(self, logits: Tensor, wanted: str, name: str) -> None:
        node = logits.grad_fn
        while kind(node) in VIEWS:
            node = node.next_functions[0][0]
        if kind(node) == wanted:
            self.note("F83", name)
