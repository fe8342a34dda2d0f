"""Cosines that are made larger before a cross-entropy, which then begins far from guessing on
purpose.

    z = F.normalize(z); F.cross_entropy(16 * z @ w.T, target)
    logits from -16 to 16, before anything is learned

Vectors of length one are followed into a product, and the product through factors that are plain
numbers into a cross-entropy. F4, which asks whether the first loss is that of guessing, leaves such
a loss alone.

Footgun: a factor that learns (CLIP's logit_scale) is no plain number, and is not followed.
"""

import math

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import plain_number

NORMS = {"norm", "linalg_norm", "vector_norm", "linalg_vector_norm"}
PRODUCTS = {"matmul", "mm", "__matmul__", "linear"}
VIEWS = {
    "T",
    "t",
    "transpose",
    "permute",
    "view",
    "reshape",
    "__getitem__",
    "cat",
    "stack",
    "detach",
    "unsqueeze",
    "mT",
}
VIEWS |= {
    "clamp",
    "chunk",
    "clone",
    "contiguous",
    "squeeze",
    "masked_fill",
    "where",
    "float",
    "to",
    "concat",
    "split",
}
VIEWS |= {"unbind"}
SCALED = {"mul", "__rmul__", "__mul__", "multiply", "div", "true_divide", "divide"}
ENDS = {"cross_entropy", "log_softmax", "logsumexp", "exp"}


class Cosines(Watcher):
    """What is known of a tensor: ("length of", id), ("unit",), ("cosine", factor)."""

    names = {"normalize", "add", "sub"} | NORMS | PRODUCTS | SCALED | VIEWS | ENDS
    begins = {"normalize"} | NORMS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        fact = self._fact(op) if op.given else None
        if fact is not None:
            for r in op.results or op.given[:1]:
                self.known.put(r, fact)

    def _fact(self, op: Op) -> tuple | None:
        first, name = op.given[0], op.name
        if name == "normalize":
            return ("unit",)
        if name in NORMS and op.kwargs.get("keepdim"):
            return "length of", id(first)
        facts = [self.known.get(t) for t in op.given]
        if not any(facts):
            return None
        if name in ENDS:
            factor = facts[0][1] if facts[0] is not None and facts[0][0] == "cosine" else math.inf
            if 1 < factor < math.inf and name == "cross_entropy":
                self.note("F4", factor)  # a scale that begins far from guessing on purpose
            return None
        if name in PRODUCTS and len(facts) == 2 and facts[0] == facts[1] == ("unit",):
            return "cosine", 1.0
        if (
            name in ("div", "true_divide", "divide")
            and len(facts) == 2
            and facts[1] == ("length of", id(first))
        ):
            return ("unit",)
        if name in SCALED and facts[0] and facts[0][0] == "cosine":
            factor = plain_number(op.args[1]) if len(op.args) == 2 else None
            if factor:
                return "cosine", facts[0][1] * (factor if "mul" in name else 1 / factor)
            return None
        fact = next(f for f in facts if f)
        # a margin
        if name == "where" or name in ("add", "sub") and len(facts) < 3 and fact[0] == "cosine":
            return fact
        return facts[0] if name in VIEWS and facts[0] and facts[0][0] != "length of" else None

    def backward(self, loss: Tensor) -> None:
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()
