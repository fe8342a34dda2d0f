"""A state that is cut off its past in each turn of a loop: `h = cell(x[:, t], h.detach())`.

    for t in range(steps):
        h = cell(x[:, t], h.detach())
    loss = criterion(head(h), y)                    only the last turn learns

To detach the state once between two losses is truncation, and right. Here three turns or more are cut before one
backward, and of what was cut off nothing else is in the loss.

Footgun: who refines an answer in turns detaches it as well, and asks for each of them (RAFT); samplers detach what no
weight made; an agent that only plays asks for nothing. So what was cut must hang on a weight that an optimizer holds,
nothing of it may be in the loss, and what came after it must be.
"""

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher

LEAST, NODES, NEAR = 3, 20000, 400  # turns; nodes of a loss; of a state


class CutStates(Watcher):
    """What is known of a tensor: the nodes of the states that were cut on the way to it."""

    begins = {"detach", "data"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.cuts: tuple = ()  # the longest chain since the last backward
        self.ends: set = set()  # nodes of what was made after all of a chain

    def saw(self, op: Op) -> None:
        if not op.given or not op.results:
            return
        x, before = op.given[0], max((self.known.get(t) or () for t in op.given), key=len)
        if op.name in ("detach", "data"):
            if x.grad_fn is not None and x.dim() > 1 and x.numel() > 1:
                if len(before) < LEAST:  # more need not be known
                    before = (*before, x.grad_fn)
                self.known.put(op.results[0], before)
                self.cuts = max(self.cuts, before, key=len)
            return
        for r in op.results:
            if before and r.dim() > 1 and r.requires_grad:
                self.known.put(r, before)
                if len(before) >= LEAST and len(self.ends) < NEAR:
                    self.ends.add(r.grad_fn)

    def backward(self, loss: Tensor) -> None:
        cuts, ends, self.cuts, self.ends = self.cuts, self.ends, (), set()
        self.known.by_id.clear()
        if len(cuts) < LEAST:
            return
        held = set().union(*(o.ids for o in self.e.optimizers))
        if all(graphs.leaves(node, NEAR) & held for node in cuts):
            reached = set(graphs.walk(loss, NODES))
            if len(reached) < NODES and reached & ends and not any(node in reached for node in cuts):
                self.note("S38", len(cuts))

    def close(self) -> None:
        self.known.by_id.clear()
        self.cuts, self.ends = (), set()
