"""Places that were divided by the sides of the picture the wrong way round.

    height, width = x.shape[2:]
    box / torch.tensor([height, width, height, width])          x by the height, y by the width

On a picture twice as wide as high, x then ends at 2 and y at a half. Where the columns of a target take turns as x and
y, and reach as far as that tells, and no further, their sides were exchanged.

Footguns: a picture that is as wide as high tells nothing. Two numbers of a row may be a length and a height in metres.
"""

import torch

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.watchers.operators import MINUS

LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"} | MINUS
SLACK, LEAST, LOOKED = 0.02, 8, 2**16  # beyond an end; rows of a batch; numbers
COLUMNS = 4  # of a box, or of two points


class Sides(Watcher):
    names = begins = {"conv2d"} | LOSSES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.sizes: set[tuple[int, int]] = set()  # of pictures that a first layer was given

    def saw(self, op: Op) -> None:
        if op.name == "conv2d":
            if not (x := op.given[0]).requires_grad and x.dim() == 4 and x.shape[2] != x.shape[3]:
                self.sizes.add((x.shape[2], x.shape[3]))
            return
        targets = [t for t in op.given if not t.requires_grad]
        if len(self.sizes) != 1 or len(op.given) != 2 or len(targets) != 1 or op.given[0].shape != op.given[1].shape:
            return
        y = targets[0].detach()
        even = y.dim() in (2, 3) and y.shape[-1] % 2 == 0 and len(y) >= LEAST and 0 < y.numel() <= LOOKED
        even = even and y[0].numel() >= COLUMNS
        if not even or not y.is_floating_point():
            return
        ((high, wide),) = self.sizes
        ends = torch.stack([y[..., 0::2].max(), y[..., 1::2].max(), -y.min()]).tolist()
        limits = wide / high, high / wide
        longer, shorter = (0, 1) if wide > high else (1, 0)
        beyond = 1 + SLACK < ends[longer] <= limits[longer] + SLACK
        if beyond and ends[shorter] <= limits[shorter] + SLACK and ends[2] <= SLACK:
            self.note("D41", (ends[0], ends[1], high, wide))

    def close(self) -> None:
        self.sizes = set()
