"""A learned number that goes into the forward pass as a plain one: `self.scale.item()`,
`float(self.scale)`.

    return h * self.scale.item()                    the number of now, and no gradient to the weight
    return h * self.scale

The layer does what it should at first, and the weight stays what it was for ever. Which weights are
read so is noted here; whether any of them has a gradient all the same (a log reads them too) is for
the check to ask.

Footgun: weights are read for logs and plots under no_grad, and after the backward. So it counts
only while gradients are on and a forward is under way, which ends with the backward.
"""

from torch import nn

from loopdoctor.eye import Op, Watcher

READS = {"item", "tolist", "__float__", "__int__", "numpy"}
KEPT = 16


class WeightsAsNumbers(Watcher):
    names = begins = READS

    def saw(self, op: Op) -> None:
        p = op.given[0] if op.given else None
        if (
            isinstance(p, nn.Parameter)
            and p.requires_grad
            and p.is_leaf
            and self.eye.grad
            and self.eye.forward
        ):
            read = self.e.habits["B1 read"]
            if len(read) < KEPT:
                read.setdefault(id(p), op.name)
