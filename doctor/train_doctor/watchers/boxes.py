"""Boxes of another form than the formula takes them for: a width where a corner was meant.

    area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])        of corners (x1, y1, x2, y2)

Annotations often come as (x, y, width, height). Then these differences are below 0 for many boxes, which no box with
corners has. So columns of a target are followed into their difference, and that into an area.

    box[:, 0], box[:, 2] = 1 - box[:, 0], 1 - box[:, 2]              x1 and x2 must change places as well

A flip that forgets so turns a part of the boxes, along one axis alone. So the corners of boxes that a loss of single
numbers is given are looked at too, where there are pictures.

Boxes that weights made (an answer without its graph, for a matcher) may be anything at first, and are left alone.

Footgun: a target of four numbers is no box by that alone; only a product of both differences makes it one.
"""

import torch
from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, TIMES

PICKS, MADE = {"__getitem__", "select", "unbind", "split", "chunk"}, {"detach", "data", "linear", "conv2d"}
KEEPS = {"clamp", "clamp_min", "clip", "relu", "maximum", "__getitem__", "select", "unbind"}
SHARE, LEAST = 0.05, 8  # of boxes that are turned inside out; boxes
PARTS, STEPS, SIZES = (0.2, 0.8), 3, 1.4  # a part of the boxes; steps; how far their sizes are apart


class Boxes(Watcher):
    """What is known of a tensor: a column of which target, or the share of differences below 0."""

    begins = PICKS | MADE | {*PLAIN}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pictures = False
        self.sides: dict[int, Tensor] = {}  # (N, 2) by steps

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None:
            return
        self.pictures = self.pictures or op.name == "conv2d"
        if op.name in PLAIN and len(op.given) > 1:
            self._flipped(*op.given[:2])
            return
        facts = [self.known.get(t) for t in op.given]
        weights = op.name in MADE and any(t.requires_grad or isinstance(t, nn.Parameter) for t in op.given)
        if weights or any(f and f[0] == "answer" for f in facts):
            for r in op.results:
                if not r.requires_grad:
                    self.known.put(r, ("answer", 0, 0))
            return
        if x.requires_grad:
            return
        if op.name in PICKS and x.dim() == 2 and x.shape[1] == 4 and len(x) >= LEAST and x.is_floating_point():
            for r in op.results:
                if r.shape == x.shape[:1]:
                    self.known.put(r, ("column", id(x), r.data_ptr() - x.data_ptr()))
                elif r.shape == (len(x), 2):
                    self.known.put(r, ("corner", id(x), r.data_ptr() - x.data_ptr()))
        elif op.name in MINUS and len(op.given) == 2 and all(f and f[0] in ("column", "corner") for f in facts):
            (what, of, high), (_, same, low) = facts
            if of == same and high - low == 2 * x.element_size():  # the third and the first, the fourth and the second
                sides = (op.result < 0).float()
                self.known.put(op.result, ("side", float(sides.mean() if what == "column" else sides.mean(0).max())))
        elif op.name in KEEPS and facts[0] and facts[0][0] == "side":
            for r in op.results:
                self.known.put(r, facts[0])
        elif op.name == "prod" and facts[0] and facts[0][0] == "side" and x.shape[-1] == 2 and facts[0][1] > SHARE:
            self.note("F86", ("", facts[0][1]))
        elif op.name in TIMES and len(op.given) == 2 and all(f and f[0] == "side" for f in facts):
            if (share := max(f[1] for f in facts)) > SHARE:
                self.note("F86", ("", share))

    def _flipped(self, answer: Tensor, target: Tensor) -> None:
        fits = target.dim() == 2 and target.shape == answer.shape and target.shape[1] == 4 and len(target) >= LEAST
        if not fits or target.requires_grad or not self.pictures or len(self.sides) >= STEPS:
            return
        self.sides.setdefault(self.eye.turn, (target[:, 2:] - target[:, :2]).detach())
        if len(self.sides) == STEPS:
            sides = torch.cat([*self.sides.values()])
            for one, other in ((0, 1), (1, 0)):
                turned, size = sides[:, one] < 0, sides[:, one].abs()
                share = float(turned.float().mean())
                if PARTS[0] < share < PARTS[1] and bool((sides[:, other] > 0).all()):
                    if 1 / SIZES < float(size[turned].mean() / size[~turned].mean()) < SIZES:
                        self.e.habits["F86"] |= dict.fromkeys(self.sides, ("turned", share))

    def close(self) -> None:
        self.known.by_id.clear()
        self.sides = {}
