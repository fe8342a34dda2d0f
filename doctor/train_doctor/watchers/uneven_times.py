"""One step size for readings that lie unevenly in time: the solver does not come to where the readings were made.

    h = ts[1] - ts[0]                       or (ts[-1] - ts[0]) / (len(ts) - 1), or ts.diff().mean()
    for _ in range(len(ts) - 1):
        y = rk4(field, y, h); path.append(y)
    loss = mse(torch.stack(path), readings)

The field that is learned is that of other times. Times are known by their numbers: they rise, and by uneven steps. What
is computed from some of their places is followed into what has a gradient.

Footgun: a solver may go from the first time to the last one in steps of its own and meet a single reading there. So it
must make a state for each time, and nothing with a gradient may have been given more of the times than one step.
"""

from typing import NamedTuple

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

LEAST, MOST, LOOKED = 5, 512, 2**16  # times of a row; numbers
UNEVEN = 0.1  # spread of the steps, over their mean
ALL, MEAN = "all", "mean"
STACKS = {"stack", "cat", "concat"}


class Part(NamedTuple):
    times: int  # number of the tensor of times
    length: int
    uneven: float
    places: frozenset


class UnevenTimes(Watcher):
    """Known is what came from some places of times; `ranges` are these times themselves."""

    begins = {"__getitem__", "diff", "select", "narrow", "unbind"} | STACKS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.ranges, self.count = Known(self), Known(self), 0
        # times -> a part, all places that reached what has a gradient, and how often
        self.reached: dict[int, tuple[Part, frozenset, int]] = {}
        self.stacked: set[int] = set()  # states that were put together since the last backward

    def saw(self, op: Op) -> None:
        if not op.given or not op.results:
            return
        if op.name in STACKS and op.results[0].requires_grad:
            self.stacked.add(len(op.given))
        if op.results[0].requires_grad:
            for part in filter(None, map(self.known.get, op.given)):
                _, before, often = self.reached.get(part.times, (part, frozenset(), 0))
                self.reached[part.times] = part, before | part.places, often + 1
            return
        places, times = set(), None
        for t in op.given:
            if (part := self.known.get(t)) is not None:
                places, times = places | part.places, part
        if (whole := self._times(op.given[0])) is not None:
            times, places = whole, places | _places(op, whole.length)
        if times is None:
            return
        if op.name == "mean" and ALL in places:
            places = {MEAN}
        for r in op.results:
            if self._times(r) is None:  # a piece of the times, or those of some rows, are times themselves
                self.known.put(r, times._replace(places=frozenset(places)))

    def _times(self, t: Tensor) -> Part | None:
        """The tensor as times, where it is one."""
        known = self.ranges.get(t)
        if known is None:
            known = False
            fits = t.dim() in (1, 2) and t.is_floating_point() and not t.requires_grad and not t.is_meta
            if fits and LEAST <= t.shape[-1] <= MOST and 0 < t.numel() <= LOOKED and self.known.get(t) is None:
                steps = t.detach().diff(dim=-1)
                spread = float((steps.std(-1) / steps.mean(-1)).mean()) if bool((steps > 0).all()) else 0.0
                if spread > UNEVEN:
                    self.count += 1
                    known = Part(self.count, t.shape[-1], spread, frozenset())
            self.ranges.put(t, known)
        return known or None

    def backward(self, loss: Tensor) -> None:
        for part, places, often in self.reached.values():
            steps = part.length - 1
            if ALL not in places and len(places) <= 2 and often >= steps and {steps, part.length} & self.stacked:
                self.note("F123", (part.length, part.uneven))
        self.reached, self.stacked = {}, set()

    def close(self) -> None:
        self.known.by_id.clear()
        self.ranges.by_id.clear()
        self.reached, self.stacked = {}, set()


def _places(op: Op, length: int) -> set:
    """The places along the last axis that were taken: of one, or all."""
    if op.name != "__getitem__":
        return {ALL}
    index = op.args[1]
    last = index[-1] if isinstance(index, tuple) and index else index
    if op.given[0].dim() == 2:
        pair = isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], slice)
        if not pair or index[0] != slice(None):
            return {ALL}
    if isinstance(last, slice):
        taken = range(*last.indices(length))
        return {taken[0]} if len(taken) == 1 else {ALL}
    return {last % length} if isinstance(last, int) and not isinstance(last, bool) else {ALL}
