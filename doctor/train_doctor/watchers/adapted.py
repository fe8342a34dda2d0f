"""Adapted weights that nobody uses: a meta-learner whose query loss is computed with the weights it began with.

    fast = {name: p - rate * g for (name, p), g in zip(params.items(), grads)}
    loss = criterion(net(x_query), y_query)             functional_call(net, fast, (x_query,)) was meant

What a weight and a derivative with respect to weights give is watched for: whether anything is ever computed with it.

Footgun: an optimizer that is written by hand puts such results back into the weights, which uses them.
"""

from torch import Tensor, nn

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES, TURNS

SUMS, SCALES = MINUS | PLUS, TIMES | OVER | TURNS
GRADIENT = "gradient"


class Adapted(Watcher):
    """What is known of a tensor: GRADIENT, or [round, whether it was used]."""

    begins = {"grad"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.made: list[list] = []

    def saw(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        for fact in facts:
            if isinstance(fact, list):
                fact[1] = True
        if op.name == "grad" and isinstance(op.result, tuple) and len(op.args) > 1:
            inputs = op.args[1] if isinstance(op.args[1], list | tuple) else (op.args[1],)
            for t, gradient in zip(inputs, op.result):
                if isinstance(t, nn.Parameter) and isinstance(gradient, Tensor):
                    self.known.put(gradient, GRADIENT)
        elif GRADIENT in facts and op.results:
            if op.name in SCALES:
                self.known.put(op.results[0], GRADIENT)
            elif op.name in SUMS and isinstance(op.given[0], nn.Parameter) and op.results[0].shape == op.given[0].shape:
                self.made.append([self.eye.turn, False])
                self.known.put(op.results[0], self.made[-1])

    def close(self) -> None:
        """Of each round: whether all of it was for nothing."""
        for turn in {turn for turn, _ in self.made}:
            if not any(used for of, used in self.made if of == turn):
                self.note("N28", sum(of == turn for of, _ in self.made), turn)
        self.known.by_id.clear()
        self.made = []
