"""Where a tensor that hangs on weights was cut off from them, before each backward.

    judged = D(fake.detach())            the loss of G is taken on this: G has no gradient

A cut is right where one network is to rest (the discriminator's own loss). It is told of only where
an optimizer then finds no gradient on any of its tensors (B8), and only if the cut was off one of
these.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Op, Watcher
from loopdoctor.places import Place, here

CUTS = {"detach", "data"}
NODES, KEPT = 300, 16  # of a graph that are looked at; cuts before one backward


class CutOff(Watcher):
    """Writes e.cut_off: line of a backward -> lines of the cuts before it, each with ids of the
    weights behind it.
    """

    begins = CUTS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.cuts: list[tuple[Place, frozenset[int]]] = []

    def saw(self, op: Op) -> None:
        if (
            op.name in CUTS
            and op.given
            and op.given[0].grad_fn is not None
            and len(self.cuts) < KEPT
        ):
            place = here()
            if place is not None:
                self.cuts.append((place, _weights(op.given[0])))

    def backward(self, loss: Tensor) -> None:
        place = here()
        if place is not None and self.cuts:
            self.e.cut_off.setdefault(place, self.cuts)
        self.cuts = []


def _weights(t: Tensor) -> frozenset[int]:
    """Ids of the leaves that a tensor hangs on."""
    queue, seen, found = [t.grad_fn], set(), set()
    while queue and len(seen) < NODES:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        queue += [edge for edge, _ in node.next_functions]
    return frozenset(found)
