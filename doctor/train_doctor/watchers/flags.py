"""`~` on flags that are whole numbers: ~1 is 254 in uint8 and -2 in int64, and neither is false.

Environments, buffers and files often keep flags as 0 and 1 in an integer dtype. `~done` then turns every bit. What
comes out goes into a product, a sum or `bool()`, where 255 stands for what should be 1 and 254 for what should be 0.

Footgun: turning bits is right before `&` and `|`, and ~i counts from the end in an index. Only a result that goes into
arithmetic with floats, or is made a bool, is one that was meant as a flag.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

TURNED = {"__invert__", "bitwise_not"}
ARITHMETIC = {"mul", "multiply", "add", "sub", "subtract", "rsub", "__rsub__", "div", "where", "__rmul__", "__radd__"}
MADE = {"float": torch.float32, "bool": torch.bool, "double": torch.float64, "half": torch.float16}
LOOKED = 2**20  # elements


class Flags(Watcher):
    begins = TURNED

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in TURNED and isinstance(op.result, Tensor) and op.given:
            x = op.given[0]
            if x.dtype is not torch.bool and 0 < x.numel() <= LOOKED and bool(((x == 0) | (x == 1)).all()):
                self.known.put(op.result, str(x.dtype).removeprefix("torch."))
            return
        dtype = next((d for t in op.given if (d := self.known.get(t))), None)
        if dtype is None or not isinstance(op.result, Tensor):
            return
        others = any(t.is_floating_point() for t in op.given)
        cast = (
            op.name in MADE
            or op.name in ("to", "type")
            and (op.result.is_floating_point() or op.result.dtype is torch.bool)
        )
        if cast or op.name in ARITHMETIC and others:
            self.e.turned.setdefault(self.eye.turn, dtype)

    def close(self) -> None:
        self.known.by_id.clear()
