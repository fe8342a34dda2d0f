"""Adapted weights that nobody uses: a meta-learner whose query loss is computed with the weights it
began with.

    fast = {name: p - rate * g for (name, p), g in zip(params.items(), grads)}
    loss = criterion(net(x_query), y_query)
    functional_call(net, fast, (x_query,)) was meant

What a weight and a derivative give is watched for: whether anything is ever computed with it. With
several inner steps the earlier ones are used, to make the next; so it is asked about the last
weights of each inner loop.

Footgun: an optimizer that is written by hand puts such results back into the weights, which uses
them.
"""

from torch import Tensor, nn

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

SUMS, SCALES = MINUS | PLUS, TIMES | OVER | TURNS
SLOPE, FAST = "slope", "fast"


class Adapted(Watcher):
    """What is known of a tensor: that it is a derivative or an adapted weight, and the number of
    the derivative.
    """

    begins = {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.number = 0
        self.made: dict[int, int] = {}  # number -> weights that were made of it
        self.further: set[int] = set()  # those of which others were made in turn
        self.used: set[int] = set()
        self.turn = -1

    def saw(self, op: Op) -> None:
        if self.turn != self.eye.turn:
            self._ends()
        facts = [self.known.get(t) for t in op.given]
        fast = {f[1] for f in facts if f and f[0] == FAST}
        if op.name == "grad":
            self._derived(op)
            return
        slope = next((f for f in facts if f and f[0] == SLOPE), None)
        if slope and op.results and op.name in SCALES and not fast:
            self.known.put(op.results[0], slope)
        elif slope and op.results and op.name in SUMS and op.results[0].shape == op.given[0].shape:
            if fast or isinstance(op.given[0], nn.Parameter):
                self.known.put(op.results[0], (FAST, slope[1]))
                self.made[slope[1]] = self.made.get(slope[1], 0) + 1
                self.further |= fast
        else:
            self.used |= fast

    def _derived(self, op: Op) -> None:
        if not isinstance(op.result, tuple) or len(op.args) < 2:
            return
        self.number += 1
        inputs = op.args[1] if isinstance(op.args[1], list | tuple) else (op.args[1],)
        for t, gradient in zip(inputs, op.result):
            if isinstance(gradient, Tensor) and (isinstance(t, nn.Parameter) or self.known.get(t)):
                self.known.put(gradient, (SLOPE, self.number))

    def _ends(self) -> None:
        """Of a step: whether all of it was for nothing."""
        last = set(self.made) - self.further
        if last and not last & self.used:
            self.note("N28", sum(self.made[n] for n in last), self.turn)
        self.made, self.further, self.used, self.turn = {}, set(), set(), self.eye.turn

    def close(self) -> None:
        self._ends()
        self.known.by_id.clear()
