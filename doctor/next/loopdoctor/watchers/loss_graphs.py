"""What the graph of a loss itself tells, node by node, in three steps.

    scale * torch.round(w / scale)                     a flat function: no slope, so w has a gradient of 0
    -0.5 * ((y - mean) / spread) ** 2                  without - log(spread) the best spread is infinite
    GradientReversal.apply(features)                   whose backward forgets the minus sign

A function whose slope is 0 is found above the weights that it starves. A spread that divides an error, and that is used
for nothing else on the way to the loss, has no price. A function that is called a reversal is asked for its sign.

Footguns: a straight-through step (x + (round(x) - x).detach()) leaves no node of the rounding in the graph. A radial
function (exp of minus a distance) has a width without a price, so nothing but sums, logarithms and their like may lie
between the error and the loss. A term that stands at its floor (free nats, clamp(min=1)) lets rest what it alone
teaches, on purpose. Nodes are read, never run.
"""

from collections import Counter

import torch
from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Watcher
from loopdoctor.fed import kind
from loopdoctor.watchers.divergences import terms_of_loss

LIMIT = 600  # nodes that are looked at
FLAT = {"Round": "round", "Floor": "floor", "Ceil": "ceil", "Sign": "sign", "Trunc": "trunc"}
CLAMPS = {"Clamp", "ClampMin"}
POSITIVE = {"Exp", "Softplus"}
WRAPPED = {"Neg", "Add", "Clamp", "ClampMin", "Pow", "Sqrt", "Reciprocal", "Expand", "Unsqueeze", "Squeeze", "View"}
PARTS = {"Slice", "Select", "Split", "Unbind", "SplitWithSizes", "Index"}
ABOVE = {"Pow", "Mul", "Neg", "Mean", "Sum", "Add", "Sub", "Div", "Logsumexp", "View", "Squeeze", "Unsqueeze", "Rsub"}
ABOVE |= {"UnsafeView", "Select", "Index", "Expand", "NanToNum", "Where", "MaskedFill"}


class LossGraphs(Watcher):
    names = frozenset()

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or loss.dim():
            return
        nodes = list(graphs.walk(loss, LIMIT))
        self._flat(nodes)
        self._at_floors(loss)
        self._reversed(nodes)
        if self.eye.turn not in self.e.unpriced:
            found = _unpriced(nodes)
            if found is not None:
                self.e.unpriced[self.eye.turn] = found

    def _flat(self, nodes: list) -> None:
        for node in nodes:
            if kind(node) in FLAT:
                below = graphs.leaves(node, LIMIT)
                if below:
                    self.e.starving.setdefault(FLAT[kind(node)], set()).update(below)

    def _at_floors(self, loss: Tensor) -> None:
        """What only terms teach that stand at a floor above zero."""
        low = {node for node, factor in terms_of_loss(self.e, loss, CLAMPS) if factor > 0 and _at_floor(node)}
        if low:
            others = graphs.leaves(loss.grad_fn, LIMIT, low)
            self.note("B7 floor", set().union(*(graphs.leaves(node, LIMIT) for node in low)) - others)

    def _reversed(self, nodes: list) -> None:
        turn, told = self.eye.turn, self.e.reversals
        for node in nodes:
            name = type(node).__name__.removesuffix("Backward")
            if "revers" in name.lower() and not name.lower().startswith("flip"):

                def see(after, before, name=name):
                    if len(after) and len(before) and isinstance(after[0], Tensor) and isinstance(before[0], Tensor):
                        if after[0].shape == before[0].shape:
                            with torch._C.DisableTorchFunction(), torch.no_grad():
                                told.setdefault(turn, (name, float((after[0] * before[0]).sum())))

                node.register_hook(see)


def _at_floor(node) -> bool:
    least = node._saved_min if kind(node) in CLAMPS else None
    return isinstance(least, int | float) and least > 0 and bool((node._saved_self < least).all())


def _unpriced(nodes: list) -> str | None:
    """The function of a spread that divides an error of the loss and is used for nothing else."""
    uses = Counter(edge for node in nodes for edge in node.next_functions if edge[0] is not None)
    users: dict = {}
    for node in nodes:
        for edge, _ in node.next_functions:
            users.setdefault(edge, []).append(node)
    for node in nodes:
        edges = node.next_functions
        if kind(node) not in ("Mul", "Div") or len(edges) != 2 or None in (edges[0][0], edges[1][0]):
            continue
        for error, spread in (edges, edges[::-1]) if kind(node) == "Mul" else (edges,):
            squared = kind(error[0]) == "Pow"
            inner = error[0].next_functions[0][0] if squared else error[0]
            if not _difference(inner) or not (squared or _is_squared(node, users)):
                continue
            name = _alone(spread, uses)
            if name and _only_sums_above(node, users):
                return name
    return None


def _difference(node) -> bool:
    """Of something that learns and something that does not."""
    return kind(node) in ("Sub", "Rsub") and sum(edge is not None for edge, _ in node.next_functions) == 1


def _is_squared(node, users: dict) -> bool:
    above = users.get(node, [])
    return bool(above) and all(
        kind(n) == "Pow" or kind(n) == "Mul" and all(edge is node for edge, _ in n.next_functions) for n in above
    )


def _alone(edge: tuple, uses: Counter) -> str:
    """The name of the exp or softplus in a chain each link of which has one use; "" for anything else."""
    name = ""
    while edge[0] is not None and uses[edge] == 1:
        what = kind(edge[0])
        learning = [e for e in edge[0].next_functions if e[0] is not None]
        if what in POSITIVE:
            name = what.lower()
        elif what in PARTS or what == "AccumulateGrad" or len(learning) != 1:
            return name
        elif what not in WRAPPED and not (what in ("Mul", "Div") and len(edge[0].next_functions) == 2):
            return name
        if len(learning) != 1:
            return ""
        edge = learning[0]
    return ""


def _only_sums_above(node, users: dict) -> bool:
    queue, seen = [node], set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if kind(node) not in ABOVE:
            return False
        queue += users.get(node, [])
    return True
