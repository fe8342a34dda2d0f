"""Gradients that the program takes out after a backward: they were not lost when they are cleared
then.

    loss_of_old_tasks.backward()
    reference = torch.cat([p.grad.flatten() for p in model.parameters()])
    (A-GEM, PCGrad, per-sample clipping)
    optimizer.zero_grad()

Footgun: a norm for a log reads gradients as well, and keeps nothing of them. So only copies and
views count.
"""

import weakref

from torch import Tensor

from loopdoctor.eye import Eye, Op, Watcher


class TakenGradients(Watcher):
    names = {"flatten", "view", "reshape", "clone", "cat", "stack", "concat", "ravel"}
    begins = frozenset()
    between = True

    def __init__(self, eye: Eye):
        super().__init__(eye)
        # of what optimizers hold, since the last backward
        self.gradients: dict[int, weakref.ref] | None = None

    def saw(self, op: Op) -> None:
        if self.gradients is None:
            groups = [
                g for o in self.e.optimizers if o.object is not None for g in o.object.param_groups
            ]
            held = [p.grad for g in groups for p in g["params"] if p.grad is not None]
            self.gradients = {id(grad): weakref.ref(grad) for grad in held}
        for t in op.given[:2]:  # one that is gone leaves its id to another
            if id(t) in self.gradients and self.gradients[id(t)]() is t:
                self.note("N2", len(op.given))

    def backward(self, loss: Tensor) -> None:
        self.gradients = None
