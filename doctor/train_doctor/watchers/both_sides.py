"""Two views that are pulled together from both sides, and nothing that keeps them apart.

    loss = -cosine(p1, z2).mean()               both learn: the shortest way is one answer for everything
    loss = -cosine(p1, z2.detach()).mean()      SimSiam, BYOL: only one side moves

Where nothing is pushed away (no other rows, no variance), the answers to all data become alike. The cosines of two
tensors that both learn are followed, with their sign, up to the loss.

Footgun: what is pulled and pushed by turns (pairs, triplets, InfoNCE) ends in something else than a mean of cosines
with one sign, and so does a loss with further terms that learn.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher

SUMS = {"mean", "sum", "view", "reshape", "squeeze", "flatten"}
PLUS = {"add", "__add__", "__radd__"}
MINUS = {"sub", "subtract", "__sub__"}
FROM = {"rsub", "__rsub__"}
TIMES = {"mul", "multiply", "__mul__", "__rmul__", "div", "true_divide", "__truediv__"}


class BothSides(Watcher):
    """Known: "unit" of what was normalised, "product" of two of these, or the signs of cosines."""

    names = SUMS | PLUS | MINUS | FROM | TIMES | {"neg", "negative", "__neg__", "cosine_similarity", "normalize"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known()

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or not op.result.requires_grad:
            return
        learn = [t.requires_grad for t in op.given]
        facts = [self.known.get(t) for t in op.given]
        made = None
        if op.name == "cosine_similarity":
            made = frozenset({1}) if learn == [True, True] and op.given[0].shape == op.given[1].shape else None
        elif op.name == "normalize":
            made = "unit"
        elif op.name in TIMES and facts == ["unit", "unit"] and op.given[0].shape == op.given[1].shape:
            made = "product" if op.given[0] is not op.given[1] else None
        elif facts[:1] == ["product"] and op.name == "sum":
            made = frozenset({1}) if op.result.dim() == op.given[0].dim() - 1 else None
        elif any(isinstance(f, frozenset) for f in facts):
            made = self._signs(op, facts, learn)
        if made is not None:
            self.known.put(op.result, made)

    def _signs(self, op: Op, facts: list, learn: list[bool]) -> frozenset | None:
        if any(learns and not isinstance(f, frozenset) for f, learns in zip(facts, learn)):
            return None  # another term that learns
        first = facts[0] if isinstance(facts[0], frozenset) else None
        if op.name in SUMS:
            return first
        if op.name in PLUS:
            return frozenset().union(*(f for f in facts if f))
        if op.name in MINUS and first is not None:
            return first | _turned(facts[1]) if len(facts) == 2 and facts[1] else first
        if op.name in TIMES and first is not None or op.name in TIMES and len(op.given) == 2:
            factor = [a for a in op.args if not (isinstance(a, Tensor) and self.known.get(a))]
            if len(factor) != 1 or isinstance(factor[0], Tensor) and factor[0].numel() > 1:
                return None
            of = first or facts[1]
            return of if float(factor[0]) > 0 else _turned(of)
        return _turned(first) if first is not None and op.name not in MINUS else None  # neg, 1 - x

    def backward(self, loss: Tensor) -> None:
        if self.known.get(loss) == frozenset({-1}):
            self.e.both_sides.add(self.eye.turn)
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()


def _turned(signs: frozenset | None) -> frozenset:
    return frozenset(-s for s in signs or ())
