"""Heatmaps that were drawn with the coordinates of the picture, on maps that are smaller.

    target = gaussians(points, size // stride)              points up to 32 on a map of 16: most lie outside
    target = gaussians(points / stride, size // stride)

Most maps are then empty, and some hold the foot of a hill whose top lies beyond the last line or the last column, never
before the first.

Footgun: a class or a joint that is not in the picture leaves its map empty as well. What was cut out of a larger map
ends at all of its sides, and who stands at the lower edge, at that one.
"""

import torch

from train_doctor.eye import Eye, Op, Watcher

LAYERS = {"conv2d"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy"}
EMPTY, TOP, FOOT = 0.1, 0.6, 0.01  # largest number of an empty map, of one with a hill; of one with its foot
LEAST = 8  # maps


class EmptyMaps(Watcher):
    names = begins = LAYERS | LOSSES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.sizes: set[tuple[int, ...]] = set()  # of pictures that a first layer was given

    def saw(self, op: Op) -> None:
        if op.name in LAYERS:
            if not op.given[0].requires_grad and op.given[0].dim() == 4:
                self.sizes.add(tuple(op.given[0].shape[2:]))
            return
        maps = next((t for t in op.given[:2] if not t.requires_grad), None)
        if maps is None or maps.dim() != 4 or not maps.is_floating_point() or maps.shape[0] * maps.shape[1] < LEAST:
            return
        h, w = maps.shape[2:]
        if min(h, w) < 4 or not any(s[0] % h == 0 == s[1] % w and s[0] // h == s[1] // w > 1 for s in self.sizes):
            return
        flat = maps.detach().flatten(0, 1)
        top, at = flat.flatten(1).max(1)
        low, high = torch.aminmax(flat)
        if low < 0 or high > 1.01 or high < 0.5:
            return
        y, x = at // w, at % w
        foot = (top > FOOT) & (top < TOP)
        ends = [int((foot & at_end).sum()) for at_end in (y == h - 1, x == w - 1, y == 0, x == 0)]
        empty = float((top < EMPTY).float().mean())
        self.note("D40", (len(flat), empty, ends, tuple(next(iter(self.sizes))), (h, w)))
