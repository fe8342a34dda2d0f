"""Ends of episodes that are drawn from memory and left out of the target of Q-learning.

    target = reward + gamma * next_q
    the value of a state after the end is counted
    target = reward + gamma * next_q * (1 - done)

Nothing is lost by an end, so all values run to the same limit. A target that holds a maximum, or a
reward and a factor below 1 times what a network answered without a graph, is one of those; and
flags of zeros and ones of its length are followed: whether any of them was used before the loss.

A product with the flags themselves is the opposite: only the ends are looked beyond. Where flags
are 1 for what goes on they are mostly 1.

Footguns: an end by time alone is left out on purpose, so it is asked whether any flag at all went
into anything. And actions may be zeros and ones as well, but they are whole numbers.
"""

from typing import Any

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import PLAIN
from loopdoctor.watchers.operators import PLUS, TIMES

KEPT = {
    *(
        "mul",
        "multiply",
        "add",
        "sub",
        "subtract",
        "rsub",
        "__rsub__",
        "where",
        "masked_fill",
        "squeeze",
        "unsqueeze",
    ),
    *(
        "view",
        "reshape",
        "detach",
        "flatten",
        "__getitem__",
        "clamp",
        "float",
        "to",
        "neg",
        "div",
        "minimum",
    ),
}

MAKES = {
    "tensor",
    "as_tensor",
    "from_numpy",
    "stack",
    "cat",
    "__getitem__",
    "index_select",
    "float",
    "to",
    "unsqueeze",
}
MAKES |= {"bool", "view", "reshape", "squeeze", "flatten"}
LOOKED = 4096
VALUES = {
    "gather",
    "squeeze",
    "view",
    "reshape",
    "flatten",
    "minimum",
    "min",
    "detach",
    "__getitem__",
    "sub",
}
DISCOUNT = 0.5  # below which a factor is none


class EndsOfEpisodes(Watcher):
    """What is known of a tensor: "flags", or "next" of a target with a maximum in it."""

    begins = MAKES | {"max", "amax", "linear"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        # length of the flags of this step -> 1, or 0 once any of them was used
        self.unused: dict[int, int] = {}
        self.after(torch, "from_numpy", "made")  # which no mode is told of

    def made(self, result: Any, *given: Any) -> None:
        if isinstance(result, Tensor) and _flags(result):
            self.known.put(result, "flags")
            self.unused.setdefault(result.numel(), 1)

    def saw(self, op: Op) -> None:
        if op.name in ("max", "amax"):
            if (
                op.results
                and op.given
                and op.given[0].dim() == 2
                and not op.results[0].requires_grad
            ):
                self.known.put(op.results[0], "next")
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name == "linear" or "value" in facts or "discounted" in facts:
            self._value(op, facts)
        if "flags" in facts and op.name not in MAKES:
            self.unused[op.given[facts.index("flags")].numel()] = 0
        if "next" in facts:
            self._of_the_next(op, facts)
        if op.name in TIMES and facts == ["flags"] and isinstance(op.result, Tensor):
            self.known.put(op.result, "flags")  # times a discount
        if op.name in MAKES:
            self.made(op.result)

    def _value(self, op: Op, facts: list) -> None:
        """reward + gamma * value, of a value that a network answered without a graph."""
        made = None
        if op.name == "linear" or "value" in facts and op.name in VALUES:
            made = "value"
        elif "value" in facts and op.name in TIMES and len(op.given) == 1:
            number = next((a for a in op.args if isinstance(a, float)), 0.0)
            made = "discounted" if DISCOUNT < number < 1 else None
        elif "discounted" in facts and op.name in PLUS and len(op.given) == 2:
            other = op.given[1 - facts.index("discounted")]
            made = (
                "next" if other.numel() == op.given[0].numel() and not other.requires_grad else None
            )
        for r in op.results if made else ():
            if not r.requires_grad and r.is_floating_point():
                self.known.put(r, made)

    def _of_the_next(self, op: Op, facts: list) -> None:
        if op.name in PLAIN and len(op.given) > 1 and self.unused.get(op.given[1].numel()):
            self.e.endless.setdefault(self.eye.turn, op.given[1].numel())
        elif op.name in KEPT or op.name in MAKES:
            for r in op.results:
                if not r.requires_grad:
                    self.known.put(r, "next")

    def backward(self, loss: Tensor) -> None:
        self.unused = {}

    def close(self) -> None:
        self.known.by_id.clear()


def _flags(t: Tensor) -> bool:
    """Zeros and ones, both, of one number in a row."""
    if (
        not 1 < t.numel() <= LOOKED
        or t.requires_grad
        or not (t.is_floating_point() or t.dtype is torch.bool)
    ):
        return False
    if t.dim() != 1 and t.shape[1:] != (1,):
        return False
    zeros, ones = t == 0, t == 1
    return bool((zeros | ones).all()) and bool(zeros.any()) and bool(ones.any())
