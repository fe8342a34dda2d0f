"""The names under which the operators of arithmetic are seen: `a * b` is mul, a method of a or of
b, or multiply.

Footgun: in-place forms lose their last underscore before a watcher is told of them (eye.py), so
none stands here.
"""

from typing import Any

from torch import Tensor

from loopdoctor.eye import Op

TIMES = {"mul", "multiply", "__mul__", "__rmul__"}
OVER = {"div", "true_divide", "divide", "__truediv__"}
PLUS = {"add", "__add__", "__radd__"}
MINUS = {"sub", "subtract", "__sub__"}
TURNS = {"rsub", "__rsub__", "neg", "negative", "__neg__"}  # a number minus it, and its negative
POWERS = {"pow", "square", "abs", "__pow__"}
UNCHANGED = {  # may return what they are given, as it is
    *(
        "to",
        "float",
        "double",
        "half",
        "type",
        "type_as",
        "contiguous",
        "cuda",
        "cpu",
        "data",
        "dropout",
        "expand_as",
    ),
    *(
        "view",
        "reshape",
        "squeeze",
        "flatten",
        "clone",
        "detach",
        "resolve_conj",
        "resolve_neg",
        "broadcast_tensors",
    ),
}


def written(op: Op) -> bool:
    """Whether what it was given first is no longer what it was: x[rows] = 0, x.mul_(mask), x -=
    y.
    """
    return bool(op.given) and (
        op.name == "__setitem__" or op.result is op.given[0] and op.name not in UNCHANGED
    )


def plain_number(given: Any) -> float | None:
    """Return the size of a factor that is a number, or a tensor of one that does not learn; None of
    anything else.
    """
    if isinstance(given, Tensor):
        still = given.numel() == 1 and not given.requires_grad and given.device.type == "cpu"
        still = still and not given.is_complex()
        given = given.item() if still else None
    return abs(float(given)) if isinstance(given, int | float) else None
