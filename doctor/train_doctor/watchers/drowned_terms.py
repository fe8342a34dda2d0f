"""A regression in its own unit beside a cross-entropy, through one trunk: the first outweighs the second by far.

    loss = F.mse_loss(age, years) + F.cross_entropy(scores, label)      1,500 and 1.6
    loss = F.mse_loss(age, (years - mean) / std) + ...                  1 and 1.6

The loss is taken apart into its terms with their factors; those that a regression's loss made and those that a
classification's made are told by their nodes.

Footgun: a term may be large at the start and small soon. So the targets must lie far from what an untrained network
gives (tens, not ones), and both terms must reach weights in common, which is where one drowns the other.
"""

from typing import NamedTuple

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Op, Watcher
from train_doctor.watchers.divergences import terms_of_loss

REGRESSIONS = {"mse_loss"}  # the gradients of the others are bounded, however large they are
CLASSES = {"cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy"}
TIMES, RAW = 100.0, 10.0  # one term over the other; root mean square of targets
EASY, LEARNED = 0.05, 0.2  # a classification that is learned; a regression, of the variance of its targets
NODES, KEPT = 2000, 16  # of a graph; losses of a step


class Term(NamedTuple):
    value: Tensor
    target: Tensor
    name: str


class DrownedTerms(Watcher):
    names = begins = REGRESSIONS | CLASSES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.now: list[Term] = []  # since the last backward

    def saw(self, op: Op) -> None:
        value = op.result
        if isinstance(value, Tensor) and value.requires_grad and not value.dim() and len(op.given) > 1:
            if len(self.now) < KEPT:
                self.now.append(Term(value, op.given[1], op.name))

    def backward(self, loss: Tensor) -> None:
        now, self.now = {id(term.value.grad_fn): term for term in self.now}, []
        if not {t.name for t in now.values()} & REGRESSIONS or not {t.name for t in now.values()} & CLASSES:
            return
        found = [(now[id(node)], node, factor) for node, factor in terms_of_loss(self.e, loss, now) if id(node) in now]
        large = [(t, node, abs(factor)) for t, node, factor in found if t.name in REGRESSIONS]
        small = [(t, node, abs(factor)) for t, node, factor in found if t.name in CLASSES]
        if len(large) != 1 or len(small) != 1:
            return
        (of_numbers, one, by), (of_classes, other, of) = large[0], small[0]
        high, low = by * float(of_numbers.value), of * float(of_classes.value)
        target = of_numbers.target.float()
        raw, learned = float(target.pow(2).mean().sqrt()), float(of_numbers.value) < LEARNED * float(target.var())
        if raw > RAW and high > TIMES * low and float(of_classes.value) > EASY and not learned:
            if graphs.leaves(one, NODES) & graphs.leaves(other, NODES):
                self.note("F125", (of_numbers.name, high, of_classes.name, low, raw))

    def close(self) -> None:
        self.now = []
