"""Gradients of inputs that the program reads, after a backward that also filled those of the weights.

    F.cross_entropy(model(x + delta), y).backward()
    delta = delta + alpha * delta.grad.sign()       the weights have a gradient now, which nobody asked for

If nothing clears these before the training loss is differentiated, the step is made of both (N1).

Footgun: points of an equation are leaves with a gradient as well, and their .grad is filled by each backward; nothing
reads it but to clear it. And free adversarial training uses both gradients of one backward, without another.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

CLEARS = {"zero", "grad="}


class Attacks(Watcher):
    """Known are gradients of what no optimizer holds."""

    begins = {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.held: set[int] | None = None  # what optimizers hold, since the last backward

    def saw(self, op: Op) -> None:
        if op.name != "grad":
            if op.name not in CLEARS and any(map(self.known.get, op.given)):
                self.note("N1 attack", True)
        elif isinstance(op.result, Tensor) and op.given:
            self.held = self.e.optimized() if self.held is None else self.held
            if id(op.given[0]) not in self.held:
                self.known.put(op.result, True)

    def backward(self, loss: Tensor) -> None:
        self.held = None

    def close(self) -> None:
        self.known.by_id.clear()
