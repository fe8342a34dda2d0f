"""Losses written by hand that take a last layer's numbers for something else: overlaps and margins.

    2 * (logits * mask).sum() / (logits.sum() + mask.sum())
    a Dice loss wants torch.sigmoid(logits)
    torch.relu(1 - target * logits)
    a hinge wants targets of -1 and 1, not 0 and 1

Both come from formulas with the same letters and run without a word. An overlap of numbers below 0
has no lower end, and of a hinge with targets of 0 the rows of one class count for nothing. A
product of answers, of both signs, with zeros and ones is followed into a quotient or into what is
cut at zero. The overlap of boxes is known too: extents between the larger and the smaller of two
edges, their product, and its quotient.

Footgun: answers are picked by zeros and ones on purpose (q * actions), and masked. Neither ends in
a quotient whose lower half learns, nor in 1 - x. What is missing of 1 in a scenario is relu(1 -
capacity * up): there the capacity has an end at 0 of its own (softplus, exp), as no score of a
class has.
"""

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import OVER, PLUS, TIMES

SUMS = {"sum", "mean", "view", "reshape", "flatten", "squeeze"}
FROM_ONE = {"rsub", "__rsub__", "sub", "__sub__", "subtract"}
CUT = {"relu", "clamp", "clamp_min", "clip", "maximum"}
ENDS, PARTS = {"max", "min", "maximum", "minimum"}, {"__getitem__", "unbind", "squeeze", "prod"}
LEAST, LOOKED = 8, 2**22
BOUND = ("Softplus", "Relu", "Exp", "Sigmoid", "Softmax", "Abs", "Pow", "Elu", "Sqrt")
PASSED = (
    "Add",
    "Sub",
    "Squeeze",
    "Unsqueeze",
    "View",
    "Reshape",
    "Unsafe",
    "Select",
    "Slice",
    "Clone",
    "Clamp",
)


class Overlaps(Watcher):
    """What is known of a tensor: (the step of the formula, least and largest answer)."""

    names = TIMES | SUMS | PLUS | OVER | FROM_ONE | CUT | ENDS | PARTS
    begins = TIMES | ENDS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not op.results or not op.given:
            return
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if (
            fact is None
            and op.name in ENDS
            and [t.requires_grad for t in op.given] in ([True, False], [False, True])
        ):
            made = "edge", 0, 0
        else:
            made = (
                self._of_answers(op)
                if fact is None and op.name in TIMES
                else self._next(op, fact)
                if fact
                else None
            )
        for r in op.results if made is not None else ():
            self.known.put(r, made)

    def _of_answers(self, op: Op) -> tuple | None:
        if (
            len(op.given) != 2
            or op.given[0].shape != op.given[1].shape
            or not LEAST <= op.given[0].numel() <= LOOKED
        ):
            return None
        learns = [t.requires_grad for t in op.given]
        if learns not in ([True, False], [False, True]):
            return None
        answers, marks = op.given if learns[0] else op.given[::-1]
        if marks.dtype is not answers.dtype or not answers.is_floating_point():
            return None
        if bool(((marks != 0) & (marks != 1)).any()) or bool((marks == marks.flatten()[0]).all()):
            return None
        low, high = torch_ends(answers)
        if 0 <= low and high <= 1:
            return "share", low, high
        if low >= 0 and bounded(answers):
            return None
        return "product", low, high

    def _next(self, op: Op, fact: tuple) -> tuple | None:
        what, low, high = fact
        alone = len(op.given) == 1
        first = self.known.get(op.given[0]) is fact
        if what == "product":
            if op.name in ("sum", "mean"):
                return ("sum", low, high) if low < 0 < high else None
            if op.name in SUMS:
                return fact
            if (
                op.name in FROM_ONE
                and alone
                and 1 in [a for a in op.args if not isinstance(a, Tensor)]
            ):
                return "margin", low, high
        elif what == "sum":
            if op.name in OVER and first and len(op.given) == 2 and op.given[1].requires_grad:
                self.e.overlaps.setdefault(self.eye.turn, ("overlap", low, high))
            elif alone and op.name in TIMES | PLUS | SUMS:
                return fact
        elif what == "share" and op.name in SUMS:
            return "shares" if op.name in ("sum", "mean") else "share", low, high
        elif (
            what == "shares"
            and op.name in OVER
            and first
            and len(op.given) == 2
            and op.given[1].requires_grad
        ):
            return "score", low, high
        elif what == "shares" and alone and op.name in TIMES | PLUS | SUMS:
            return fact
        elif what == "edge" and op.name in FROM_ONE and len(op.given) == 2:
            return "extent", low, high
        elif what == "extent" and (
            op.name in CUT | PARTS and alone or op.name in TIMES and len(op.given) == 2
        ):
            return "shares" if op.name in TIMES or op.name == "prod" else "extent", low, high
        elif what == "score" and op.name in SUMS | PLUS:
            return fact
        elif what == "margin" and op.name in CUT:
            self.e.overlaps.setdefault(self.eye.turn, ("hinge", low, high))
        return None

    def backward(self, loss: Tensor) -> None:
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()


def bounded(x: Tensor) -> bool:
    """Whether a function with an end gave these numbers, but for what was added."""
    node = x.grad_fn
    while node is not None and node.name().startswith(PASSED) and node.next_functions:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(BOUND)


def torch_ends(x: Tensor) -> tuple[float, float]:
    """Least and largest number."""
    low, high = x.detach().aminmax()
    return float(low), float(high)
