"""Whole numbers of a byte that wrap around: `images - 128` of uint8 is 255 where -1 was meant.

    x = (images - 128).float() / 128        the dark half becomes the brightest
    x = (images.float() - 128) / 128

Nothing is raised: a byte has no number below 0. A result of bytes that lies on the wrong side of what it was made of is
followed until it becomes a float.

Footgun: bytes that hold codes (packed weights, hashes) wrap on purpose, and stay whole numbers.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS

FLOATS = {"float", "to", "type", "div", "true_divide", "__truediv__", "half", "double"}
SAME = {"permute", "view", "reshape", "unsqueeze", "__getitem__", "contiguous", "stack", "flatten"}
LOOKED = 2**22


class Wraps(Watcher):
    names = MINUS | PLUS | FLOATS | SAME
    begins = MINUS | PLUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # wrapped -> the function

    def saw(self, op: Op) -> None:
        result = op.result
        if not isinstance(result, Tensor) or not op.given:
            return
        fact = next(filter(None, map(self.known.get, op.given)), None)
        if fact is not None and result.is_floating_point():
            self.e.wrapped.setdefault(self.eye.turn, fact)
        elif fact is not None and result.dtype is torch.uint8:
            self.known.put(result, fact)
        elif fact is None and op.name in MINUS | PLUS and result.dtype is torch.uint8 and result.numel() <= LOOKED:
            x = op.given[0]
            if x.dtype is torch.uint8 and x.shape == result.shape and x is not result:
                if bool(((result > x) if op.name in MINUS else (result < x)).any()):
                    self.known.put(result, (op.name, tuple(result.shape)))

    def close(self) -> None:
        self.known.by_id.clear()
