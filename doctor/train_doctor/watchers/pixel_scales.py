"""Pictures from 0 to 1 that go in, and pictures from 0 to 255 that are asked for.

    x, y = low / 255, high                          the network must learn a factor of 255
    x, y = low / 255, high / 255

Footgun: maps of depth or of temperature are asked for in their own units. Pixels reach far up to 255. And a model may
multiply by 255 itself, at its end: then its answers reach as far from the first step on.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import PLAIN

LOOKED, FAR = 2**22, 200.0  # numbers; what the largest pixels of a batch reach
NEAR = 0.1  # of what the pixels reach, what answers do


class PixelScales(Watcher):
    names = begins = {"conv2d"} | set(PLAIN)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.unit = False  # pictures from 0 to 1 were given to a layer

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or op.given[0].dim() != 4:
            return
        if op.name == "conv2d":
            self.unit = self.unit or not op.given[0].requires_grad and _within(op.given[0], 1.0)
        elif self.unit and op.given[0].requires_grad and not op.given[1].requires_grad:
            y = op.given[1]
            pixels = _within(y, 255.0) and float(y.max()) > FAR
            if pixels and float(op.given[0].detach().abs().max()) < NEAR * float(y.max()):
                self.note("F42 pixels", float(y.max()))

    def backward(self, loss: Tensor) -> None:
        self.unit = False


def _within(x: Tensor, most: float) -> bool:
    if not x.is_floating_point() or x.numel() > LOOKED:
        return False
    low, high = (float(end) for end in x.detach().aminmax())
    return low >= 0 and 0.5 * most < high <= most
