"""The names under which the operators of arithmetic are seen: `a * b` is mul, a method of a or of b, or multiply.

Footgun: in-place forms lose their last underscore before a watcher is told of them (eye.py), so none stands here.
"""

from typing import Any

from torch import Tensor

TIMES = {"mul", "multiply", "__mul__", "__rmul__"}
OVER = {"div", "true_divide", "divide", "__truediv__"}
PLUS = {"add", "__add__", "__radd__"}
MINUS = {"sub", "subtract", "__sub__"}
TURNS = {"rsub", "__rsub__", "neg", "negative", "__neg__"}  # a number minus it, and its negative
POWERS = {"pow", "square", "abs", "__pow__"}


def plain_number(given: Any) -> float | None:
    """The size of a factor that is a number, or a tensor of one that does not learn; None of anything else."""
    if isinstance(given, Tensor):
        still = given.numel() == 1 and not given.requires_grad and given.device.type == "cpu"
        given = given.item() if still else None
    return abs(float(given)) if isinstance(given, int | float) else None
