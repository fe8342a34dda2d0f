"""A divergence that is a mean over rows and classes, where the sum over classes is meant.

    F.kl_div(log_q, p, reduction="mean")            divided by the number of classes as well
    F.kl_div(log_q, p, reduction="batchmean")       was meant

Calls of kl_div are followed through factors and sums into the loss that is differentiated. Who
multiplies by the number of classes again has mended it.

Footgun: "mean" is the default of kl_div, and torch itself warns of it.
"""

from typing import Any

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import TIMES, plain_number


class DivergencesPerClass(Watcher):
    """Known is the number of a divergence of which a tensor is a multiple."""

    names = {"kl_div"} | TIMES
    begins = {"kl_div"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.classes: dict[int, int] = {}  # number of a divergence -> its classes
        self.number = 0

    def saw(self, op: Op) -> None:
        if op.name == "kl_div":
            self._divergence(op)
            return
        fact: Any = next((f for f in map(self.known.get, op.given) if f), None)
        if fact is None or not op.results:
            return
        self._rescaled(op, fact)
        for r in op.results:
            self.known.put(r, fact)

    def _divergence(self, op: Op) -> None:
        x = op.given[0]
        kind = op.kwargs.get("reduction", op.args[4] if len(op.args) > 4 else "mean")
        if kind == "mean" and x.dim() == 2 and x.shape[1] > 1 and x.requires_grad:
            self.number += 1
            self.classes[self.number] = x.shape[1]
            self.known.put(op.result, self.number)

    def _rescaled(self, op: Op, number: int) -> None:
        """Forget a mean over the classes that is multiplied by their number."""
        factor = next((plain_number(a) for a in op.args[:2] if not isinstance(a, Tensor)), None)
        classes = self.classes.get(number)
        if factor and classes and factor % classes == 0:
            del self.classes[number]

    def backward(self, loss: Tensor) -> None:
        for classes in self.classes.values():
            self.note("F89", classes)
        self.classes.clear()

    def close(self) -> None:
        self.known.by_id.clear()
        self.classes.clear()
