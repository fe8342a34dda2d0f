"""Targets that carry a gradient into the network that made them.

    target = reward + gamma * value(next_states)
    both sides of the error learn, and meet half way
    loss = (target - value(states)).pow(2).mean()

    loss = F.mse_loss(features(answer), features(picture))  and the optimizer trains the features as
    well, which are
                                                            soonest alike where they tell nothing

In the first, one side of a difference is what the network answered and the other is a plain number
more than what the same network answered. In the second, both sides went through the same weights,
of which the loss reaches some by this difference alone, and only one side is made of others too.

Footgun: two answers of one network are also compared as they are (Siamese networks), and are then
left alone.
"""

from torch import Tensor, nn

from loopdoctor import graphs
from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.fed import PLAIN
from loopdoctor.watchers.operators import MINUS, PLUS, POWERS, TIMES

VIEWS = {
    "view",
    "squeeze",
    "unsqueeze",
    "flatten",
    "reshape",
    "__getitem__",
    "gather",
    "max",
    "amax",
    "min",
    "minimum",
}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
ANSWER, SCALED, SUMMED, BENT, ERROR = "answer", "scaled", "summed", "bent", "error"
NODES = 3000  # of a graph


class OwnTargets(Watcher):
    """What is known of a tensor: the last weight of what answered, and what was done to it
    since.
    """

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.pairs: list[tuple] = []  # nodes of the sides of a regression, and of its error

    def saw(self, op: Op) -> None:
        if not op.results or not op.given or not op.results[0].requires_grad:
            return
        if op.name in LAYERS and len(op.given) > 1 and op.given[1].requires_grad:
            self.known.put(op.results[0], (ANSWER, id(op.given[1])))
            return
        facts = [self.known.get(t) for t in op.given]
        if None not in facts and len(facts) == 2 and (op.name in MINUS or op.name in PLAIN):
            self._compare(op, *facts)
        elif facts[0] and facts[0][0] == ERROR:
            if op.name in POWERS:
                self._error(facts[0][1])
        elif sum(map(bool, facts)) == 1:
            fact = next(filter(None, facts))
            self.known.put(op.results[0], (self._next(op, fact[0]), fact[1]))

    def _next(self, op: Op, way: str) -> str:
        """Return a weight of a normalisation is a plain number here."""
        learn = [t.requires_grad and not isinstance(t, nn.Parameter) for t in op.given]
        if op.name in VIEWS:
            return way
        if sum(learn) > 1:
            return BENT
        if op.name in TIMES and way in (ANSWER, SCALED):
            return SCALED
        if op.name in PLUS and len(op.given) == 2 and way in (ANSWER, SCALED):
            other = op.given[learn.index(False)]
            fits = (
                way == SCALED
                and other.is_floating_point()
                and other.numel() == op.results[0].numel()
            )
            return SUMMED if fits else BENT
        return BENT

    def _compare(self, op: Op, one: tuple, two: tuple) -> None:
        if one[1] != two[1] or ERROR in (one[0], two[0]):
            return
        if {one[0], two[0]} == {ANSWER, SUMMED}:
            pair = None
        elif (
            op.given[0].shape == op.given[1].shape and op.given[0].dim() > 1 and len(self.pairs) < 8
        ):
            pair = tuple(t.grad_fn for t in (*op.given, op.results[0]))
        else:
            return
        if op.name in PLAIN:
            self._error(pair)
        else:
            self.known.put(op.results[0], (ERROR, pair))

    def _error(self, pair: tuple | None) -> None:
        if pair is None:
            self.note("F81", "value")
        else:
            self.pairs.append(pair)

    def backward(self, loss: Tensor) -> None:
        pairs, self.pairs = self.pairs, []
        for one, two, difference in pairs:
            a, b = (graphs.leaves(node, NODES) for node in (one, two))
            shared, more = a & b, a ^ b
            together = any(shared <= o.ids and more & o.ids for o in self.e.optimizers)
            if shared and together and (a < b or b < a):
                if not shared & graphs.leaves(loss.grad_fn, NODES, {difference}):
                    self.note("F81", "features")

    def close(self) -> None:
        self.known.by_id.clear()
        self.pairs = []
