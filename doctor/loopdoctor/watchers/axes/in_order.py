"""Rows that were cut into other groups in their order, and laid flat again: nothing has changed
places.

    h = h.reshape(-1, 8, d)
    (B, T, d): tokens in groups of eight, for experts or a ghost batch
    logits = head(h).reshape(-1, classes)           in the order of (B, T) again

What is done in between must be done to each row by itself, or be a statistic of a group that is
laid over it. Whatever else meets the groups (a recurrent layer, an attention, a mean) takes the
first two axes for something that they are not.

Footgun: windows of a series may be as long as a batch is large. They are cut back to the first
shape by a view, and whatever meets them runs within each, along dim 1.
"""

from typing import Any

from torch import Tensor

from loopdoctor.eye import Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, POWERS, TIMES, TURNS

NETWORKS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}

FLAT = {"reshape", "view", "flatten"}
ATTENTION = "multi_head_attention_forward"
ALONE = (
    TIMES
    | OVER
    | PLUS
    | MINUS
    | TURNS
    | POWERS
    | {"linear", "layer_norm", "relu", "gelu", "silu", "tanh"}
)
ALONE |= {
    "sigmoid",
    "exp",
    "sqrt",
    "dropout",
    "clamp",
    "clip",
    "__getitem__",
    "float",
    "contiguous",
    "clone",
    "detach",
}
STATISTICS, OVER_LAST = {"mean", "std", "var"}, {"softmax", "log_softmax"}


class InOrder:
    """Known are groups, by the number of their fact, which is told at the backward unless they were
    laid flat again.
    """

    def __init__(self, watcher: Watcher):
        self.watcher, self.known = watcher, Known(watcher)
        self.facts: list[tuple[str, Any, int]] = []
        # of each fact: the first sizes before and after
        self.cuts: list[tuple[tuple, tuple] | None] = []
        self.flat: set[int] = set()
        self.mixed: set[int] = set()
        self.back: set[int] = set()  # cut back to the first shape
        self.across: set[int] = set()  # what meets them runs along dim 0

    def begin(self, groups: Tensor, check: str, fact: Any, before: Tensor | None = None) -> None:
        self.known.put(groups, len(self.facts) + 1)
        self.facts.append((check, fact, self.watcher.eye.turn))
        self.cuts.append(
            None if before is None else (tuple(before.shape[:2]), tuple(groups.shape[:2]))
        )

    def saw(self, op: Op) -> None:
        if op.name in FLAT and self.cuts and op.given and op.results:
            self.back |= self.returns(op.given[0], op.results[0])
        for x in op.given:
            if (number := self.known.get(x)) is None:
                continue
            if op.name == ATTENTION or op.name in NETWORKS and op.args[-1] is False:
                self.across.add(number)
            for r in op.results:
                if op.name in FLAT and r.dim() == x.dim() - 1 and len(r) == x.shape[0] * x.shape[1]:
                    self.flat.add(number)
                elif _alone(op, x, r):
                    self.known.put(r, number)
                else:
                    self.mixed.add(number)

    def returns(self, x: Tensor, r: Tensor) -> set[int]:
        """Return the groups that are cut back by this view, if any."""
        cut = tuple(r.shape[:2]), tuple(x.shape[:2])
        return {number for number, known in enumerate(self.cuts, 1) if cut == known}

    def tell(self) -> None:
        for number, (check, fact, turn) in enumerate(self.facts, 1):
            windows = number in self.back and number not in self.across
            if not windows and (number in self.mixed or number not in self.flat):
                self.watcher.note(check, fact, turn)
        self.facts, self.cuts = [], []
        self.flat, self.mixed, self.back, self.across = set(), set(), set(), set()
        self.known.by_id.clear()


def _alone(op: Op, x: Tensor, r: Tensor) -> bool:
    """Whether each row was given something by itself, or is about to get a statistic of its
    group.
    """
    if op.name in STATISTICS:
        return bool(op.kwargs.get("keepdim")) and r.dim() == x.dim() and len(r) == len(x)
    if op.name in OVER_LAST:
        return op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None) in (-1, x.dim() - 1)
    return op.name in ALONE and (
        r.shape[:2] == x.shape[:2] or x.shape[1] == 1 and r.dim() == x.dim()
    )
