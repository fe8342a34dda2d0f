"""Slips in losses that are written by hand, where a step of the formula is missing or in the wrong place.

    (answer - target).mean()                        without a square or abs: falls for ever
    (answer - target).mean() ** 2                   squared after the mean: only the mean is learned
    -softmax(z).gather(1, y).mean()                 without the log
    -z.gather(1, y).mean()                          without the log-softmax
    F.cross_entropy(z, z.argmax(1))                 asked for what it says already
    F.kl_div(log_p, q, reduction="mean")            divides by the number of classes as well; "batchmean" was meant
    relu(d_positive - d_negative - margin)          with + margin

Each begins at what it is made of and is followed to the loss.

Footgun: a mean of differences is also a part of some formulas (scale-invariant depth), beside the mean of squares. So
nothing is said where the difference itself goes into anything that bends, or its two sides into a loss as well; nor of
a squared mean of what hangs on answers that a cross-entropy is asked for too (a penalty of calibration). A step of an
attack may ask for the model's own choice: its loss has a gradient for the input; and norms alone are tuned by that to
new data. A difference of two answers of one frozen layer has no target, and a distance is never below 0. And an answer
may be climbed as it is, where its layer is frozen (prototypes), or several optimizers hold what the loss hangs on (an
actor before its critic). A mean divergence that is multiplied by the classes again, or by a multiple of these, is one
over the rows.
"""

from typing import Any

from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import PLAIN
from loopdoctor.watchers import signs
from loopdoctor.watchers.operators import MINUS, PLUS, POWERS, TIMES, TURNS, plain_number

MEANS, PICKS = {"mean", "sum"}, {"gather", "__getitem__", "index_select"}
VIEWS = {"squeeze", "view", "flatten", "reshape", "unsqueeze"}
CHOICES = {"argmax", "max", "topk"}
LOSSES = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
LEAST, NODES, DEEP, NEAR = 8, 400, 5000, 60  # numbers; of a loss; to its weights; in front of a difference
GAP, FLAT, SHARE, PICKED, CHOICE, RAW = "gap", "flat", "share", "picked", "choice", "raw"
STILL = "still"  # an answer of a frozen layer
ASKED, SIDE = "loopdoctor_asked_too", "loopdoctor_gap"  # marks in the graph, which live as long as it does
DIVERGENCE = "divergence"
OF = {SHARE: "no-logarithm", RAW: "no-softmax"}  # what was picked from


class Slips(Watcher):
    """What is known of a tensor: a step of a formula and the number of the gap, or the tensor that was chosen from."""

    begins = MINUS | CHOICES | LOSSES | {"softmax", "kl_div", "linear"} | set(PLAIN)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.bent: set[int] = set()  # gaps that go into something else
        self.sides: dict[int, set[int]] = {}  # of each gap
        self.judged: set[int] = set()  # what a loss of torch was given
        self.plain: set[int] = set()  # gaps of a layer's own answer
        self.above: set[int] = set()  # gaps that are distances
        self.number = 0
        self.others = False  # a cross-entropy of labels
        self.own = False  # one of its own choice
        self.classes: dict[int, int] = {}  # over which each divergence is a mean, since the last backward

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in LOSSES:
            graphs.tell(op.given[0], ASKED, True)
        if op.name in PLAIN:
            self.judged |= set(map(id, op.given))
        elif op.name == "kl_div":
            self._divergence(op)
        elif op.name == "cross_entropy" and len(op.given) > 1:
            own = facts[1] and facts[1][0] == CHOICE and facts[1][1] == id(op.given[0])
            self.own, self.others = self.own or bool(own), self.others or not own
        elif fact := self._begins(op, facts):
            for r in op.results:
                if fact[0] != CHOICE or not r.is_floating_point():
                    self.known.put(r, fact)
        elif facts[0] and op.results and (fact := self._next(op, *facts[0])):
            self.known.put(op.results[0], fact)

    def _begins(self, op: Op, facts: list) -> tuple | None:
        x, r = op.given[0], op.results[0] if op.results else None
        if op.name in CHOICES and x.requires_grad and x.dim() > 1:
            return CHOICE, id(x)
        if op.name == "linear" and r is not None and len(op.given) > 1 and not op.given[1].requires_grad:
            return STILL, id(op.given[1])
        if r is None or not r.requires_grad:
            return None
        if op.name == "softmax" and x.dim() == 2:
            return SHARE, 0
        if op.name == "linear" and r.dim() > 1:
            return RAW, 0
        if op.name in MINUS and len(op.given) == 2 and r.numel() >= LEAST:
            one, two = op.given
            of_one = facts[0] is not None and facts[0] == facts[1] and facts[0][0] == STILL
            if one.shape == two.shape and one.requires_grad != two.requires_grad and not of_one:
                return GAP, self._gap(one, two, [f[0] for f in facts if f])
        return None

    def _gap(self, one: Tensor, two: Tensor, known: list) -> int:
        self.number += 1
        self.sides[self.number] = {id(one), id(two)}
        graphs.tell(one if one.requires_grad else two, SIDE, self.number)
        if RAW in known:
            self.plain.add(self.number)
        return self.number

    def _next(self, op: Op, step: Any, number: int) -> tuple | None:
        if step == GAP:
            if op.name in MEANS and not op.results[0].dim():
                gaps = op.given[0]
                if number not in self.plain and not gaps.is_complex() and bool((gaps >= 0).all()):
                    self.above.add(number)
                return FLAT, number
            if op.name in VIEWS or op.name in TURNS and len(op.given) == 1:
                return GAP, number
            self.bent.add(number)
        elif step == FLAT:
            if op.name in POWERS:
                return "squared", number
            return (FLAT, number) if op.name in PLUS | MINUS | TIMES else None
        elif step == DIVERGENCE:
            self._rescaled(op, number)
            return (DIVERGENCE, number) if op.name in TIMES else None
        elif step == "squared":
            return (step, number) if op.name in PLUS | MINUS | TIMES else None
        elif step in (RAW, STILL) and op.name in VIEWS:
            return step, number
        elif step in OF and op.name in PICKS and len(op.given) > 1 and not op.given[1].is_floating_point():
            if step == SHARE or op.name == "gather" or op.given[0].dim() == 2:  # else a place is picked
                return PICKED, step
        elif step == PICKED:
            if op.name in VIEWS:
                return PICKED, number
            if op.name in MEANS | {"neg", "negative", "__neg__"}:
                return frozenset({1 if op.name in MEANS else -1}), number
        elif isinstance(step, frozenset) and op.name in MEANS | TURNS | {"neg"} and len(op.given) == 1:
            return (step if op.name in MEANS else signs.turned(step)), number
        return None

    def _divergence(self, op: Op) -> None:
        x = op.given[0]
        kind = op.kwargs.get("reduction", op.args[4] if len(op.args) > 4 else "mean")
        if kind == "mean" and x.dim() == 2 and x.shape[1] > 1 and x.requires_grad:
            self.number += 1
            self.classes[self.number] = x.shape[1]
            self.known.put(op.result, (DIVERGENCE, self.number))

    def _rescaled(self, op: Op, number: int) -> None:
        """A mean over the classes that is multiplied by their number."""
        factor = next((plain_number(a) for a in op.args[:2] if not isinstance(a, Tensor)), None)
        classes = self.classes.get(number)
        if factor and classes and op.name in TIMES and factor % classes == 0:
            del self.classes[number]

    def backward(self, loss: Tensor) -> None:
        step, number = self.known.get(loss) or ("", 0)
        if step in (FLAT, "squared") and number not in self.bent and not self.sides[number] & self.judged:
            if number not in self.above if step == FLAT else not _asked_too(loss, number):
                self.note("F88", "no-error" if step == FLAT else "squared-mean")
        elif step == frozenset({-1}) and (number == SHARE or not self._attack(loss) and not self._of_several(loss)):
            self.note("F88", OF[number])
        if self.own and not self.others and not self._attack(loss) and self._tunes_matrices(loss):
            self.note("F88", "own-choice")
        for classes in self.classes.values():
            self.note("F89", classes)
        self.bent, self.number, self.own, self.others, self.classes = set(), 0, False, False, {}
        self.sides, self.judged = {}, set()
        self.plain, self.above = set(), set()

    def _attack(self, loss: Tensor) -> bool:
        return graphs.asks_inputs(loss, self.e.optimized(), NODES)

    def _of_several(self, loss: Tensor) -> bool:
        leaves = {id(n.variable) for n in graphs.walk(loss, DEEP) if hasattr(n, "variable")}
        return sum(bool(leaves & o.ids) for o in self.e.optimizers) > 1

    def _tunes_matrices(self, loss: Tensor) -> bool:
        held = self.e.optimized()
        leaves = [n.variable for n in graphs.walk(loss, DEEP) if hasattr(n, "variable")]
        return any(leaf.dim() > 1 and id(leaf) in held for leaf in leaves)

    def close(self) -> None:
        self.known.by_id.clear()


def _asked_too(loss: Tensor, number: int) -> bool:
    """The side of a gap that learns was made of what a cross-entropy is asked for."""
    sides = [n for n in graphs.walk(loss, DEEP) if graphs.told(n, SIDE) == number]
    return any(graphs.told(n, ASKED) for side in sides for n in graphs.below(side, NEAR))
