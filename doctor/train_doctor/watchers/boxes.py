"""Boxes of another form than the formula takes them for: a width where a corner was meant.

    area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])        of corners (x1, y1, x2, y2)

Annotations often come as (x, y, width, height). Then these differences are below 0 for many boxes, which no box with
corners has. So columns of a target are followed into their difference, and that into an area.

Boxes that weights made (an answer without its graph, for a matcher) may be anything at first, and are left alone.

Footgun: a target of four numbers is no box by that alone; only a product of both differences makes it one.
"""

from torch import nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, TIMES

PICKS, MADE = {"__getitem__", "select", "unbind", "split", "chunk"}, {"detach", "data", "linear", "conv2d"}
KEEPS = {"clamp", "clamp_min", "clip", "relu", "maximum", "__getitem__", "select", "unbind"}
SHARE, LEAST = 0.05, 8  # of boxes that are turned inside out; boxes


class Boxes(Watcher):
    """What is known of a tensor: a column of which target, or the share of differences below 0."""

    begins = PICKS | MADE

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None:
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
            self.note("F86", facts[0][1])
        elif op.name in TIMES and len(op.given) == 2 and all(f and f[0] == "side" for f in facts):
            if (share := max(f[1] for f in facts)) > SHARE:
                self.note("F86", share)

    def close(self) -> None:
        self.known.by_id.clear()
