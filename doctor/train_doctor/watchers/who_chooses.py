"""Double Q-learning with its two networks in each other's place.

    best = online(next).argmax(1, keepdim=True)         the network that learns chooses
    value = target(next).gather(1, best)                and the other one says what the choice is worth

Then what one overrates by chance the other one does not. With the places changed, the values that are learned from are
those of the network that learns, which runs after itself as it does without any target network.

Footgun: both may learn (two critics that choose for each other), or neither. So the one that says the value must be in
an optimizer, and the one that chooses must not. A fixed policy that is judged chooses as well; it is no copy of the
network that learns. And a teacher's label picks a logit of the student to see how sure it is: what was picked must get
into the target of a regression.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

LAYERS, CHOICES, PICKS = {"linear", "addmm"}, {"argmax", "max"}, {"gather", "take_along_dim"}
VIEWS = {"unsqueeze", "view", "reshape", "long", "squeeze"}
KEEPS = VIEWS | PLUS | MINUS | TIMES | OVER | {"addcmul", "detach", "clamp", "to", "float", "flatten"}
COPY = 0.5  # the cosine of weights with those that they were copied from
VALUE = "value"


class WhoChooses(Watcher):
    """Known are answers without a graph -> (the last weight, False), choices -> (it, True), and (VALUE,), picked from
    the network that learns."""

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in LAYERS:
            if len(op.given) > 1 and op.results and op.results[0].dim() == 2 and not op.results[0].requires_grad:
                self.known.put(op.results[0], (op.given[1], False))
            return
        facts = [self.known.get(t) for t in op.given]
        fact = (*facts, None)[0]
        if (VALUE,) in facts:
            return self._follow(op)
        if op.name in PICKS and len(op.given) == 2:
            self._pick(op, fact, facts[1])
        elif fact and (op.name in CHOICES and op.given[0].is_floating_point() or op.name in VIEWS and fact[1]):
            for r in op.results:
                if not r.is_floating_point():
                    self.known.put(r, (fact[0], True))

    def _pick(self, op: Op, value: tuple | None, choice: tuple | None) -> None:
        if value and choice and choice[1] and not value[1] and value[0] is not choice[0]:
            learning = self.e.optimized()
            if id(value[0]) in learning and id(choice[0]) not in learning and copied(value[0], choice[0]):
                self.known.put(op.result, (VALUE,))

    def _follow(self, op: Op) -> None:
        for r in op.results:
            if r.requires_grad and (op.name in PLAIN or op.name in MINUS):
                self.note("F108", True)
            elif not r.requires_grad and op.name in KEEPS:
                self.known.put(r, (VALUE,))

    def close(self) -> None:
        self.known.by_id.clear()


def copied(one: Tensor, two: Tensor) -> bool:
    """Whether weights are about those that others were copied from."""
    if one.shape != two.shape or one.device != two.device:
        return False
    one, two = one.detach().flatten().double(), two.detach().flatten().double()
    return float(one @ two) > COPY * float(one.norm() * two.norm())
