"""Rounded weights, or rounded states, that a layer multiplies with: no gradient comes through a rounding.

    w = (self.weight / scale).round() * scale               the weight learns by its scale alone, if at all
    w = self.weight + (w - self.weight).detach()            straight through

Where the scale is made of the weight (its mean, its largest number) some gradient is left, so it is not exactly zero
and the layer seems to learn. What came out of a rounding with a graph is followed to the layer that uses it.

    self.weight.data = w                                    and the small steps of the optimizer are rounded away

Footgun: each row, or each group of a row, may have a scale of its own, so a few neighbours are looked at together. What
was pruned or clamped to its ends has few different numbers as well: nearly all of these stand there once.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import OVER, TIMES

ROUNDS, LAYERS = {"round", "sign"}, {"linear", "conv1d", "conv2d", "conv3d"}
KEEPS = TIMES | OVER | {"clamp", "clip", "view", "reshape", "transpose", "t", "T", "to", "float", "contiguous"}
WRITES = {"data=", "copy", "set"}
LEAST, LEVELS, LOOKED = 64, 16, 2**22  # numbers, as many of which are neighbours; different ones of what was rounded


class RoundedWeights(Watcher):
    """Known are results of a rounding that have a graph, and the function."""

    names = ROUNDS | LAYERS | KEEPS | WRITES
    begins = ROUNDS | WRITES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.names_of: dict[int, str] = {}

    def saw(self, op: Op) -> None:
        if op.name in WRITES:
            self._written(op)
            return
        r = op.result
        if not isinstance(r, Tensor) or not r.requires_grad:
            return
        if op.name in ROUNDS:
            if op.given[0].requires_grad and op.given[0].numel() >= LEAST:
                self.known.put(r, op.name)
            return
        fact = next((f for f in map(self.known.get, op.given[:2]) if f), None)
        if fact is not None and op.name in LAYERS:
            self.note("B7 rounded", fact)
        elif fact is not None and not any(t.requires_grad and not self.known.get(t) and t.dim() > 1 for t in op.given):
            self.known.put(r, fact)

    def _written(self, op: Op) -> None:
        """A weight of an optimizer is given numbers of which there are few."""
        p, numbers = (*op.given, None, None)[:2]
        if not self.eye.grad or not isinstance(p, nn.Parameter) or numbers is None or numbers.dim() < 2:
            return
        if p.requires_grad and LEAST <= numbers.numel() <= LOOKED and id(p) in self.e.optimized():
            if of_few_levels(numbers.detach()):
                self.names_of = self.names_of or {id(q): n for n, q in self.e.parameters().items()}
                self.note("N3 rounded", self.names_of.get(id(p), "a weight"))

    def close(self) -> None:
        self.known.by_id.clear()


def of_few_levels(numbers: Tensor) -> bool:
    """Whether most groups of neighbours hold a few numbers again and again."""
    groups = numbers.reshape(-1)[: LEAST * LEVELS].split(LEAST)
    groups = [g for g in groups if len(g) == LEAST]
    return 2 * sum(map(_few_levels, groups)) > len(groups)


def _few_levels(group: Tensor) -> bool:
    levels, counts = group.unique(return_counts=True)
    return 1 < len(levels) <= LEVELS and 2 * int((counts == 1).sum()) <= len(levels)
