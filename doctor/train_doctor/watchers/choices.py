"""Codes that were chosen by a distance and cut the graph: a VQ-VAE without its straight-through step.

    index = torch.cdist(z, codebook.weight).argmin(1)       no gradient goes through a choice
    q = codebook(index)
    x = decoder(q)                                          z + (q - z).detach() was meant

The nearest row of a table is followed from the distance over the index to the row that is looked up. Where that row
enters a layer as it is, no gradient of what is behind reaches the encoder that made z.

Footgun: an index may come from a frozen tokenizer, and look up a table of the next model. So the distance must have a
graph, and the table must be in it.
"""

from typing import Any

from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher

LAYERS = {
    *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("layer_norm", "group_norm", "batch_norm"),
}
VIEWS = {
    *("detach", "data", "view", "reshape", "permute", "transpose", "contiguous", "clone", "squeeze", "unsqueeze"),
    *("flatten", "unflatten", "movedim", "float", "to", "long", "T", "__getitem__", "view_as", "reshape_as"),
}
LOOKUPS = {"embedding", "index_select", "__getitem__"}
NODES = 60  # of a distance's graph that are looked through for the table


class Choices(Watcher):
    """What is known of a tensor: the node of the distance of an index, or True of a row that was looked up by it."""

    names = {"argmin", "min"} | LOOKUPS | VIEWS | LAYERS
    begins = {"argmin", "min"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in ("argmin", "min"):
            index = op.result if op.name == "argmin" else op.results[1] if len(op.results) == 2 else None
            if isinstance(index, Tensor) and op.given and op.given[0].grad_fn is not None:
                self.known.put(index, op.given[0].grad_fn)
            return
        if not self.known.by_id or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if not any(facts):
            return
        if op.name in LAYERS and facts[0] is True and any(isinstance(t, nn.Parameter) for t in op.given[1:]):
            self.e.chosen.setdefault(self.eye.turn, op.name)
            return
        fact = self._looked_up(op, facts) or (facts[0] if op.name in VIEWS else None)
        if fact is not None:
            for r in op.results:
                self.known.put(r, fact)

    def _looked_up(self, op: Op, facts: list) -> Any:
        if op.name in LOOKUPS and len(op.given) == 2:
            for table, fact in (op.given, facts[::-1]), (op.given[::-1], facts):
                if (
                    isinstance(table[0], nn.Parameter)
                    and fact[0] not in (None, True)
                    and id(table[0]) in graphs.leaves(fact[0], NODES)
                ):
                    return True
        return None

    def backward(self, loss: Tensor) -> None:
        self.known.by_id.clear()  # nodes hold their graphs

    def close(self) -> None:
        self.known.by_id.clear()
