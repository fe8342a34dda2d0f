"""A masked convolution over pixels that sees the pixel it predicts: type B where type A must come
first.

    mask[k // 2, k // 2 + 1:] = 0; mask[k // 2 + 1:] = 0
    type B: what comes before, and the pixel itself
    mask[k // 2, k // 2:] = 0; mask[k // 2 + 1:] = 0            type A: what comes before

Layers after the first may use their own place, which knows only what lies before it. The first one
is given the picture itself. If its kernel is zero behind its middle and not at it, and the loss
asks for that picture, the network learns to copy.

Footgun: where the picture goes in shifted by one pixel, type B is right for all layers.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Op, Watcher

LOSSES = {
    "binary_cross_entropy_with_logits",
    "binary_cross_entropy",
    "cross_entropy",
    "nll_loss",
    "mse_loss",
}
# numbers of a picture that is compared; its correlation with what is asked for
LARGEST, ALIKE = 2**20, 1 - 1e-6


class MaskedPixels(Watcher):
    names = begins = LOSSES | {"conv2d"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.pictures: list[Tensor] = []  # that went into such a layer since the last backward

    def saw(self, op: Op) -> None:
        if len(op.args) < 2 or len(op.given) < 2:
            return
        x, y = op.given[:2]
        if op.name == "conv2d":
            learns = (
                y.requires_grad and not x.requires_grad and self.eye.grad and x.numel() <= LARGEST
            )
            if learns and _with_its_middle(y):
                self.pictures.append(x)
        elif x.requires_grad and any(_alike(picture, y) for picture in self.pictures):
            self.note("F33 pixels", tuple(self.pictures[0].shape))

    def backward(self, loss: Tensor) -> None:
        self.pictures = []

    def close(self) -> None:
        self.pictures = []


def _with_its_middle(kernel: Tensor) -> bool:
    """Whether it is zero everywhere behind its middle, row by row, and neither at it nor everywhere
    before it.
    """
    high, wide = kernel.shape[-2:]
    if kernel.dim() != 4 or high != wide or high < 3 or not high % 2:
        return False
    rows = kernel.detach().abs().amax((0, 1)).flatten()
    middle = len(rows) // 2
    return not bool(rows[middle + 1 :].any()) and bool(rows[middle]) and bool(rows[:middle].any())


def _alike(picture: Tensor, asked: Tensor) -> bool:
    if picture.numel() != asked.numel() or picture.device != asked.device:
        return False
    both = torch.stack([picture.flatten().double(), asked.flatten().double()])
    return bool(both.std(1).gt(0).all()) and float(torch.corrcoef(both)[0, 1]) > ALIKE
