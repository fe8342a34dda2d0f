"""What the graph of a loss itself tells, node by node, in three steps: functions without a slope,
terms at a floor.

    scale * torch.round(w / scale)
    a flat function: no slope, so w has a gradient of 0
    torch.clamp(kl, min=1.0)                           free nats: below 1 the term teaches nothing,
                                                       on purpose

A function whose slope is 0 is found above the weights that it starves, and what only terms at a
floor teach is noted.

Footgun: a straight-through step (x + (round(x) - x).detach()) leaves no node of the rounding in the
graph. Nodes are read, never run.
"""

from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Watcher
from loopdoctor.fed import kind
from loopdoctor.watchers.losses.divergences import terms_of_loss

LIMIT = 600  # nodes that are looked at
FLAT = {"Round": "round", "Floor": "floor", "Ceil": "ceil", "Sign": "sign", "Trunc": "trunc"}
CLAMPS = {"Clamp", "ClampMin"}


class LossGraphs(Watcher):
    names = frozenset()

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or loss.dim():
            return
        nodes = list(graphs.walk(loss, LIMIT))
        self._flat(nodes)
        self._at_floors(loss)

    def _flat(self, nodes: list) -> None:
        for node in nodes:
            if kind(node) in FLAT:
                below = graphs.leaves(node, LIMIT)
                if below:
                    self.e.starving.setdefault(FLAT[kind(node)], set()).update(below)

    def _at_floors(self, loss: Tensor) -> None:
        """Find what only terms teach that stand at a floor above zero."""
        low = {
            node
            for node, factor in terms_of_loss(self.e, loss, CLAMPS)
            if factor > 0 and _at_floor(node)
        }
        if low:
            others = graphs.leaves(loss.grad_fn, LIMIT, low)
            self.note(
                "B7 floor", set().union(*(graphs.leaves(node, LIMIT) for node in low)) - others
            )


def _at_floor(node) -> bool:
    least = node._saved_min if kind(node) in CLAMPS else None
    return isinstance(least, int | float) and least > 0 and bool((node._saved_self < least).all())
