"""Cosines that are made smaller before a softmax: a temperature that multiplies where it should divide.

    z = F.normalize(z); F.cross_entropy(z @ z.T * 0.1, target)      logits from -0.1 to 0.1, whatever is learned

A cosine lies between -1 and 1. Divided by a temperature of 0.1 it becomes a logit from -10 to 10. Multiplied by it, the
softmax over N rows stays flat and the loss near ln N, for ever. So vectors of length one are followed into a product,
and the product through factors that are plain numbers into a cross-entropy. Cosines as they are do little better where
there are many rows: of 500 with logits up to 1, the right one can have a share of 1.5 percent.

Footgun: a factor that learns (CLIP's logit_scale) finds its size by itself. Attention with normalised queries may be
flat on purpose; it has more dimensions, and ends in a softmax.
"""

import math

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import plain_number

LARGEST = 0.5  # a factor above it may be meant
LEAST, MANY = 4, 64  # rows to choose from; with cosines as they are
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
VIEWS |= {"clamp", "chunk", "clone", "contiguous", "squeeze", "masked_fill", "where", "float", "to", "concat", "split"}
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
            classes = len(op.given) > 1 and not op.given[1].is_floating_point()  # shares may be of cosines as well
            bare = factor == 1 and name == "cross_entropy" and classes
            least = LEAST if factor <= LARGEST else MANY if bare else math.inf
            if first.requires_grad and first.dim() == 2 and first.shape[1] >= least:
                self.e.cosines.setdefault(self.eye.turn, facts[0][1])
            return None
        if name in PRODUCTS and len(facts) == 2 and facts[0] == facts[1] == ("unit",):
            return "cosine", 1.0
        if name in ("div", "true_divide", "divide") and len(facts) == 2 and facts[1] == ("length of", id(first)):
            return ("unit",)
        if name in SCALED and facts[0] and facts[0][0] == "cosine":
            factor = plain_number(op.args[1]) if len(op.args) == 2 else None
            if factor:
                return "cosine", facts[0][1] * (factor if "mul" in name else 1 / factor)
            return None
        fact = next(f for f in facts if f)
        if name == "where" or name in ("add", "sub") and len(facts) < 3 and fact[0] == "cosine":  # a margin
            return fact
        return facts[0] if name in VIEWS and facts[0] and facts[0][0] != "length of" else None

    def backward(self, loss: Tensor) -> None:
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()
