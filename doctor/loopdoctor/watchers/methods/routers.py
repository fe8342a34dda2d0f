"""The router of a mixture of experts: what its scores are made of, and what its balance loss is
made of.

    logits = router(x)                                  (N, E)
    scores = logits.softmax(-1)                         or logits.sigmoid()
    weight, chosen = scores.topk(k)
    balance = E * (share * logits.softmax(-1).mean(0)).sum()

Three mistakes raise nothing. A balance loss that takes a softmax of probabilities is nearly flat,
so it hardly pushes. One that takes a softmax of the logits of a sigmoid router balances numbers
that nobody routes by. And the weight of a single expert, divided by the sum of the weights, is 1
whatever the router says: it has no slope.

Footgun: a softmax of what `topk` picked, of k numbers, is how Mixtral renormalises; with k above 1
it is right.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import OVER

FEWEST, MOST = 2, 512  # experts
SOFTMAX = {"softmax", "log_softmax"}
PICKS = {"topk", "max", "argmax"}
LOGITS, SHARES, GATES, FLAT = "logits", "softmax", "sigmoid", "softmax of shares"
KEEPS = {
    "view",
    "reshape",
    "flatten",
    "float",
    "to",
    "__getitem__",
    "contiguous",
    "squeeze",
    "unsqueeze",
}


class Routers(Watcher):
    """Known are logits and what was made of them over the experts; and the one weight of each
    row.
    """

    begins = SOFTMAX | {"sigmoid"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # tensor -> kind, and the id of the logits that it was made of
        self.single = Known(self)  # the weight of the one expert of each row
        self.routes: dict[int, str] = {}  # id of logits -> what was picked from
        self.balanced: dict[int, str] = {}  # id of logits -> what a loss was made of

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        first, result = op.given[0], op.result
        if (
            op.name in self.begins
            and self.known.get(first) is None
            and first.dim() >= 2
            and first.requires_grad
        ):
            if FEWEST <= first.shape[-1] <= MOST:
                self.known.put(first, (LOGITS, id(first)))
        kind, source = self.known.get(first) or (None, 0)
        if (
            op.name in SOFTMAX
            and isinstance(result, Tensor)
            and self.single.get(first)
            and result.shape[-1] == 1
        ):
            self.note("M2 one", result.numel())
        elif op.name in SOFTMAX and kind in (LOGITS, SHARES) and isinstance(result, Tensor):
            made = SHARES if kind == LOGITS else FLAT
            self.known.put(result, (made, source))
            if result.requires_grad:
                self.balanced[source] = FLAT if FLAT in (made, self.balanced.get(source)) else made
        elif op.name == "sigmoid" and kind == LOGITS and isinstance(result, Tensor):
            self.known.put(result, (GATES, source))
        elif op.name in PICKS and kind in (SHARES, GATES):
            self.routes[source] = kind
            values = result[0] if isinstance(result, tuple) else result
            if isinstance(values, Tensor) and values.is_floating_point():
                if values.dim() < 2 or values.shape[-1] == 1:
                    self.single.put(values, True)
        elif (
            op.name in OVER
            and self.single.get(first)
            and isinstance(result, Tensor)
            and result.requires_grad
        ):
            if bool((result.detach() - 1).abs().max() < 1e-5):
                self.note("M2 one", result.numel())
        elif op.name in KEEPS and isinstance(result, Tensor):
            if kind is not None and result.dim() and result.shape[-1] == first.shape[-1]:
                self.known.put(result, (kind, source))
            if self.single.get(first):
                self.single.put(result, True)

    def backward(self, loss: Tensor) -> None:
        for source, kind in self.routes.items():
            made = self.balanced.get(source)
            if made == FLAT:
                self.note("M2 twice", True)
            elif kind == GATES and made == SHARES:
                self.note("M2 mixed", True)
        self.routes, self.balanced = {}, {}

    def close(self) -> None:
        self.known.by_id.clear()
        self.single.by_id.clear()
