"""Gradients of inputs that the program reads, after a backward that also filled those of the
weights.

    F.cross_entropy(model(x + delta), y).backward()
    delta = delta + alpha * delta.grad.sign()
    the weights have a gradient now, which nobody asked for

If nothing clears these before the training loss is differentiated, the step is made of both (N1).

Footgun: points of an equation are leaves with a gradient as well, and their .grad is filled by each
backward; nothing reads it but to clear it. And free adversarial training uses both gradients of one
backward, without another. A loss with a factor below 1 is a share of what is trained (of clean and
of attacked rows): an attack has no need of one.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import OVER, TIMES, plain_number

CLEARS = {"zero", "grad="}
CARRIES_ON = {"backward"}  # the gradient of a cut goes on below it: z.backward(cut.grad)


class Attacks(Watcher):
    """Known are gradients of what no optimizer holds, and losses with a factor below 1."""

    begins = {"grad"} | TIMES | OVER

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.held: set[int] | None = None  # what optimizers hold, since the last backward
        self.shares = Known(self)
        self.share = False  # the last backward was of such a loss

    def saw(self, op: Op) -> None:
        if op.name != "grad":
            if (
                op.name not in CLEARS | CARRIES_ON
                and any(map(self.known.get, op.given))
                and not self.share
            ):
                self.note("N1 attack", True)
            if op.name in TIMES | OVER and _is_share(op):
                self.shares.put(op.result, True)
        elif isinstance(op.result, Tensor) and op.given:
            self.held = self.e.optimized() if self.held is None else self.held
            if id(op.given[0]) not in self.held:
                self.known.put(op.result, True)

    def backward(self, loss: Tensor) -> None:
        self.held, self.share = None, bool(self.shares.get(loss))

    def close(self) -> None:
        self.known.by_id.clear()
        self.shares.by_id.clear()


def _is_share(op: Op) -> bool:
    """Whether a number that hangs on a network was made smaller, by a number that is written
    there.
    """
    r = op.result
    if not isinstance(r, Tensor) or r.dim() or not r.requires_grad:
        return False
    factor = next((plain_number(a) for a in op.args[:2] if not isinstance(a, Tensor)), None)
    return bool(factor) and (1 / factor if op.name in OVER else factor) < 1
