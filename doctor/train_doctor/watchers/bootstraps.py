"""The value of the best action where that of the action taken was meant: both sides of a Q-learning loss are a maximum.

    q = net(states).max(1).values                   that of another action than the one that earned the reward
    target = reward + gamma * target_net(next_states).max(1).values

The target of Q-learning asks for the best next action; what learns is the value of the action that was taken, picked by
`gather`. So maxima without a graph are followed through arithmetic into a target, and it is asked what meets them.

Footgun: a maximum that learns is right elsewhere (pooling, several instances). Only one over as many values as the
target's own maximum is meant here.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN, VIEWS, kind, shape_of

KEPT = {
    *("mul", "multiply", "add", "sub", "subtract", "rsub", "__rsub__", "where", "masked_fill", "squeeze", "unsqueeze"),
    *("view", "reshape", "detach", "flatten", "__getitem__", "clamp", "float", "to", "neg", "div", "minimum"),
}
LEAST = 2  # sizes of what a maximum is taken of


class Bootstraps(Watcher):
    """What is known of a tensor without a graph: the shape of what it is a maximum of."""

    names = {"max", "amax", *PLAIN} | KEPT
    begins = {"max", "amax"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if op.name in ("max", "amax"):
            if op.results and op.given and op.given[0].dim() == LEAST and not op.results[0].requires_grad:
                if op.results[0].dim() and op.given[0].is_floating_point():
                    self.known.put(op.results[0], tuple(op.given[0].shape))
            return
        if not self.known.by_id or not op.given:
            return
        if op.name in PLAIN or op.name in ("sub", "subtract"):
            self._compare(op.given[:2])
        fact = next((f for f in map(self.known.get, op.given) if f), None) if op.name in KEPT else None
        for r in op.results if fact else ():
            if not r.requires_grad:
                self.known.put(r, fact)

    def _compare(self, sides: list[Tensor]) -> None:
        for one, two in (sides, sides[::-1]) if len(sides) == 2 else ():
            wanted, node = self.known.get(two), one.grad_fn
            while wanted and kind(node) in VIEWS:
                node = node.next_functions[0][0]
            if wanted and kind(node) in ("Max", "Amax") and shape_of(node.next_functions[0][0]) == wanted:
                self.e.largest.setdefault(self.eye.turn, wanted)

    def close(self) -> None:
        self.known.by_id.clear()
