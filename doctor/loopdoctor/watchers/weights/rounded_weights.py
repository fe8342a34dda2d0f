"""Rounded weights, or rounded states, that a layer multiplies with: no gradient comes through a
rounding.

    w = (self.weight / scale).round() * scale
    the weight learns by its scale alone, if at all
    w = self.weight + (w - self.weight).detach()            straight through

Where the scale is made of the weight (its mean, its largest number) some gradient is left, so it is
not exactly zero and the layer seems to learn. What came out of a rounding with a graph is followed
to the layer that uses it.

    self.weight.data = w                                    and the small steps of the optimizer are
                                                            rounded away

Footgun: each row, or each group of a row, may have a scale of its own, so a few neighbours are
looked at together. What was pruned or clamped to its ends has few different numbers as well: nearly
all of these stand there once. Where a scale alone learns, or an input is rounded, nothing is lost.
And steps are kept in the mean where noise was added first or jumps were drawn, and by centroids
that move with their weights.
"""

import torch
from torch import Tensor, nn

from loopdoctor import graphs
from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import kind
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, TIMES

ROUNDS, LAYERS = {"round", "sign"}, {"linear", "conv1d", "conv2d", "conv3d"}
KEEPS = (
    TIMES
    | OVER
    | {"clamp", "clip", "view", "reshape", "transpose", "t", "T", "to", "float", "contiguous"}
)
WRITES = {"data=", "copy", "set"}
DRAWS = {"rand", "rand_like", "bernoulli"}
OF_DRAWS = (
    KEEPS | PLUS | MINUS | {"lt", "__lt__", "gt", "__gt__", "le", "ge", "floor", "round", "where"}
)
# numbers of a codebook; of a graph
TAKES, TABLE, NODES = {"__getitem__", "index_select", "gather"}, 256, 300
# numbers, as many of which are neighbours; different ones of what was rounded
LEAST, LEVELS, LOOKED = 64, 16, 2**22


class RoundedWeights(Watcher):
    """Known are results of a rounding that have a graph, and the function; what was drawn, and what
    was taken from a table, with its numbers.
    """

    names = ROUNDS | LAYERS | KEEPS | WRITES | DRAWS | OF_DRAWS | TAKES
    begins = ROUNDS | WRITES | DRAWS | TAKES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.drawn, self.taken = Known(self), Known(self), Known(self)
        self.tables: dict[int, Tensor] = {}  # that a weight was last taken from
        self.names_of: dict[int, str] = {}

    def saw(self, op: Op) -> None:
        if op.name in WRITES:
            self._written(op)
            return
        r = op.result
        if not isinstance(r, Tensor):
            return
        if not r.requires_grad:
            self._still(op, r)
            return
        if op.name in ROUNDS:
            if (
                op.given[0].requires_grad
                and op.given[0].numel() >= LEAST
                and self._learns(op.given[0])
            ):
                self.known.put(r, op.name)
            return
        fact = next((f for f in map(self.known.get, op.given[:2]) if f), None)
        if fact is None or op.name not in LAYERS | KEEPS:
            return
        if op.name in LAYERS:
            self.note("B7 rounded", fact)
        elif not any(t.requires_grad and not self.known.get(t) and t.dim() > 1 for t in op.given):
            self.known.put(r, fact)

    def _still(self, op: Op, r: Tensor) -> None:
        """Numbers without a graph, of which weights may be made."""
        if op.name in DRAWS or op.name in OF_DRAWS and any(map(self.drawn.get, op.given)):
            self.drawn.put(r, True)
        elif (
            op.name in TAKES
            and op.given[0].is_floating_point()
            and op.given[0].dim() == 1 < r.dim()
        ):
            if len(op.given[0]) <= TABLE:
                self.taken.put(r, op.given[0].detach().clone())

    def _learns(self, x: Tensor) -> bool:
        """Whether what is rounded hangs on a tensor of an optimizer that is more than a scale."""
        held = self.e.optimized()
        leaves = (n.variable for n in graphs.walk(x, NODES) if kind(n) == "AccumulateGrad")
        return any(
            id(p) in held and (p.numel() == x.numel() or sum(s > 1 for s in p.shape) > 1)
            for p in leaves
        )

    def _moves(self, p: Tensor, numbers: Tensor) -> bool:
        """Whether they come from a table that was another one in the step before."""
        table, last = self.taken.get(numbers), self.tables.get(id(p))
        if table is not None:
            self.tables[id(p)] = table
        return table is not None and last is not None and not torch.equal(table, last)

    def _written(self, op: Op) -> None:
        """Note that a weight of an optimizer is given numbers of which there are few."""
        p, numbers = (*op.given, None, None)[:2]
        if (
            not self.eye.grad
            or not isinstance(p, nn.Parameter)
            or numbers is None
            or numbers.dim() < 2
        ):
            return
        if self.drawn.get(numbers) or self._moves(p, numbers):
            return
        if p.requires_grad and LEAST <= numbers.numel() <= LOOKED and id(p) in self.e.optimized():
            if of_few_levels(numbers.detach()):
                self.names_of = self.names_of or {id(q): n for n, q in self.e.parameters().items()}
                self.note("N3 rounded", self.names_of.get(id(p), "a weight"))

    def close(self) -> None:
        for known in (self.known, self.drawn, self.taken):
            known.by_id.clear()


def of_few_levels(numbers: Tensor) -> bool:
    """Whether most groups of neighbours hold a few numbers again and again."""
    groups = numbers.reshape(-1)[: LEAST * LEVELS].split(LEAST)
    groups = [g for g in groups if len(g) == LEAST]
    return 2 * sum(map(_few_levels, groups)) > len(groups)


def _few_levels(group: Tensor) -> bool:
    levels, counts = group.unique(return_counts=True)
    return 1 < len(levels) <= LEVELS and 2 * int((counts == 1).sum()) <= len(levels)
