"""Maps with a channel against maps without one: (B, 1, H, W) times (B, H, W) is (B, B, H, W), each
picture with all.

    overlap = (probabilities * masks).sum()         probabilities of a network, masks of a loader

Nothing is raised, and the sum of all pairs is a number as well. A channel that was put in on
purpose (unsqueeze, None in an index) makes pairs on purpose, and is left alone.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS, PLUS, TIMES

MADE = {"unsqueeze", "__getitem__", "view", "reshape", "expand", "stack"}
LEAST = 4  # dimensions of the one with a channel


class CrossedMaps(Watcher):
    """Known are maps whose single channel was put in."""

    names = begins = TIMES | PLUS | MINUS | MADE

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        r = op.result
        if not isinstance(r, Tensor) or r.dim() < LEAST:
            return
        if op.name in MADE:
            if r.shape[1] == 1 and not (
                op.given and op.given[0].dim() == r.dim() and op.given[0].shape[1] == 1
            ):
                self.known.put(r, True)
            return
        if len(op.given) != 2 or not r.requires_grad:
            return
        large, small = sorted(op.given, key=lambda t: -t.dim())
        fits = large.dim() == small.dim() + 1 and large.shape[1] == 1 < len(large) == len(small)
        if fits and large.shape[2:] == small.shape[1:] and not self.known.get(large):
            self.note("F21 maps", (tuple(large.shape), tuple(small.shape)))

    def close(self) -> None:
        self.known.by_id.clear()
