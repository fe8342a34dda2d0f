"""Risk sets of a survival model that run the wrong way: a running sum over rows from the shortest time to the longest.

    order = durations.argsort()                          descending=True is missing
    log_risk = torch.logcumsumexp(log_h[order], 0)       of those who left before, not of those who were still there

Cox's likelihood sets each event against all who were still at risk, those with a longer time. A running sum has these
behind it where times fall.

Nothing is sorted at all where the program leaves that to its data, and a loader then shuffles them. So it is asked
whether the batch holds times that run neither way.

Footgun: times that were computed (negated) first, and rows that were turned round before the sum, may run the right
way. Rankings have such sums as well, so flags of events must have been put into that order too.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, TIMES, TURNS

KEEPS = {"exp", "view", "squeeze", "unsqueeze", "reshape", "flatten", "sub", "add", "clamp", "__getitem__", "float"}
COMPUTED = TIMES | OVER | MINUS | TURNS
VIEWS = {"view", "squeeze", "unsqueeze", "reshape", "flatten", "__getitem__", "detach"}
NEGATED, RISING, ROWS, SUMMED = range(1, 5)
LEAST, MANY = 8, 0.5  # rows; share of a batch's times that differ


class RiskSets(Watcher):
    begins = {"argsort", "sort", "stack", "__getitem__", "logcumsumexp", "cumsum", "topk"} | COMPUTED

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.summed, self.events = 0, False  # rows of a running sum, since the last backward; flags in its order
        self.sorts, self.unsorted, self.flagged = False, 0, False  # is anything sorted; rows of a sum of none; flags
        self.times: set[int] = set()  # rows of a batch's numbers that run neither way

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        first, name = op.given[0], op.name
        self._without_order(op)
        if name in COMPUTED and not any(t.requires_grad for t in op.given) and op.results:
            return self.known.put(op.results[0], NEGATED)
        if name in VIEWS and self.known.get(first) == NEGATED and op.results:
            return self.known.put(op.results[0], NEGATED)
        if name in ("argsort", "sort"):
            falls = op.kwargs.get("descending") or any(a is True for a in op.args[1:])
            if first.dim() == 1 and not first.requires_grad and not falls and self.known.get(first) != NEGATED:
                self.known.put(op.results[-1], RISING)
            return
        facts = [self.known.get(t) for t in op.given]
        if name in ("__getitem__", "index_select", "gather") and RISING in facts[1:]:
            if first.requires_grad:
                self.known.put(op.results[0], ROWS)
            elif bool(((first == 0) | (first == 1)).all()):
                self.events = True
        elif name == "logcumsumexp" and facts[0] == ROWS or name == "log" and facts[0] == SUMMED:
            self.summed = len(first)
        elif name in MINUS and len(facts) > 1 and facts[1] == SUMMED:
            return  # the total minus what came before is what comes after
        elif name == "cumsum" and facts[0] == ROWS:
            self.known.put(op.results[0], SUMMED)
        elif name in KEEPS and facts[0] in (ROWS, SUMMED) and op.results:
            self.known.put(op.results[0], facts[0])

    def _without_order(self, op: Op) -> None:
        """A running sum of exponentials over rows as they come, whose difference flags of events multiply."""
        first, name = op.given[0], op.name
        result = op.results[0] if op.results else None
        if name in ("argsort", "sort", "topk"):
            self.sorts = True
        elif name in ("stack", "__getitem__") and result is not None and result.dim() == 1 and _times(result):
            self.times.add(len(result))
        elif name == "logcumsumexp" and first.requires_grad and op.kwargs.get("dim", op.args[-1]) == 0:
            self.unsorted = len(first)
        elif name in TIMES and self.unsorted and len(op.given) == 2:
            flags = next((t for t in op.given if not t.requires_grad and t.shape == (self.unsorted,)), None)
            self.flagged |= flags is not None and bool(((flags == 0) | (flags == 1)).all())

    def backward(self, loss: Tensor) -> None:
        """Where events were put into the same order, it is a survival model."""
        if self.summed and self.events:
            self.note("F69", self.summed)
        elif self.flagged and self.unsorted in self.times and not self.sorts:
            self.note("F69", -self.unsorted)
        self.summed, self.events = 0, False
        self.sorts, self.unsorted, self.flagged, self.times = False, 0, False, set()

    def close(self) -> None:
        self.known.by_id.clear()


def _times(x: Tensor) -> bool:
    """Numbers above 0 that differ and run neither way."""
    if not x.is_floating_point() or x.requires_grad or len(x) < LEAST or not bool((x >= 0).all()):
        return False
    steps = x[1:] - x[:-1]
    return len(x.unique()) > MANY * len(x) and bool((steps > 0).any()) and bool((steps < 0).any())
