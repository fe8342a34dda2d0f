"""Terms of a loss, made by hand, whose numbers come from the model and that train nothing, for they
were cut off.

    loss = data_loss + (u_t.detach() - k * u_xx.detach()).pow(2).mean()
    loss = data_loss + (u_t - k * u_xx).pow(2).mean()

What was cut off by detach() is followed through arithmetic to a mean or a sum. If that number is
added to a loss, as it is or times a number, it is a term without a slope.

Footguns: `surrogate + (value - surrogate).detach()` shows another number than it trains, on
purpose: no mean is taken of what is detached there; or one is, and then what was cut off is also a
part of the loss as it is. What was cut off may also be a target, and the term its entropy, which
makes a divergence of a cross-entropy: so it may meet nothing that learns. And a term that is only
printed is never added.
"""

from typing import NamedTuple

from torch import Tensor

from loopdoctor import graphs
from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, POWERS, TIMES, TURNS

REDUCES = {"mean", "sum"}
KEPT = PLUS | MINUS | TIMES | OVER | POWERS | TURNS
KEPT |= {
    "squeeze",
    "view",
    "reshape",
    "flatten",
    "__getitem__",
    "log",
    "exp",
    "relu",
    "clamp",
    "sqrt",
}
CUT, TERM, LOSS = "cut", "term", "loss"
KEY, NODES = "loopdoctor_cut_off", 500


class Fact(NamedTuple):
    what: str
    roots: frozenset[int]  # ids of what was cut off


class DetachedTerms(Watcher):
    begins = {"detach"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.met: set[int] = set()  # of what was cut off, what met something that learns

    def saw(self, op: Op) -> None:
        result = op.result
        if not isinstance(result, Tensor) or not op.given or not result.is_floating_point():
            return
        if op.name == "detach" and not self.known.get(op.given[0]):
            if op.given[0].grad_fn is not None:
                self.known.put(result, Fact(CUT, frozenset({id(result)})))
                before = graphs.told(op.given[0].grad_fn, KEY) or frozenset()
                graphs.tell(op.given[0], KEY, before | {id(result)})
        elif facts := [fact for t in op.given if (fact := self.known.get(t))]:
            roots = frozenset().union(*(fact.roots for fact in facts))
            what = self._made(op, {fact.what for fact in facts})
            if what is not None:
                self.known.put(result, Fact(what, roots))
            elif result.requires_grad:
                self.met |= roots

    def _made(self, op: Op, facts: set[str]) -> str | None:
        """Return what is known of the result; None where what was cut off met something that
        learns, or is lost sight of.
        """
        result = op.result
        if result.requires_grad:
            sums = LOSS in facts and op.name in KEPT or facts == {TERM} and op.name in PLUS
            return LOSS if sums and not result.dim() else None
        if op.name in REDUCES and not result.dim():
            return TERM
        return (TERM if TERM in facts else CUT) if op.name in KEPT | REDUCES else None

    def backward(self, loss: Tensor) -> None:
        fact = self.known.get(loss)
        if (
            fact is not None
            and fact.what == LOSS
            and not fact.roots & (self.met | _also_there(loss))
        ):
            self.note("F2 detached", True)
        self.met = set()

    def close(self) -> None:
        self.known.by_id.clear()


def _also_there(loss: Tensor) -> set[int]:
    """Return what was cut off from numbers that the loss is a sum of."""
    cut = (graphs.told(node, KEY) for node in graphs.summed(loss.grad_fn, NODES))
    return set().union(*(roots for roots in cut if roots))
