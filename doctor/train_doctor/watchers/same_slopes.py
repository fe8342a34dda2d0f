"""A second derivative that is the first one once more.

    u_x = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    u_xx = torch.autograd.grad(u.sum(), x, create_graph=True)[0]        of u again
    u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]

Nobody needs the derivative of one answer by one input twice. Where none of that derivative is taken in the same step, a
second one was meant.

Footguns: an answer that was computed anew is another one, and so is one column of several. A Jacobian is taken row by
row, each with a vector of its own.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import kind

MOST = 64  # slopes of a step
VIEWS = {"Sum", "Mean", "Squeeze", "View", "Unsqueeze"}


class SameSlopes(Watcher):
    names = begins = frozenset({"grad"})

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.taken: dict[tuple, int] = {}  # an answer and the number of an input -> how often
        self.made: dict[tuple, int] = {}  # a slope -> the input
        self.inputs: list[Tensor] = []  # which keep their numbers as long as they are there
        self.twice: set[int] = set()  # inputs by which a slope was derived again

    def saw(self, op: Op) -> None:
        if len(op.args) < 2 or not isinstance(op.result, tuple) or not op.kwargs.get("create_graph"):
            return
        answers, inputs = (a if isinstance(a, list | tuple) else [a] for a in op.args[:2])
        if len(answers) != 1 or not isinstance(answers[0], Tensor) or not isinstance(inputs, list | tuple):
            return
        by = op.kwargs.get("grad_outputs", op.args[2] if len(op.args) > 2 else None)
        by = by[0] if isinstance(by, list | tuple) and by else by
        if isinstance(by, Tensor) and not bool((by == 1).all()):
            return  # one product of several with the Jacobian
        if len(self.taken) > MOST:
            self.close()  # a program that takes all of its gradients in this way
        self.inputs += inputs
        source = _source((answers[0].grad_fn, answers[0].output_nr))
        for x, slope in zip(inputs, op.result):
            if source in self.made and self.made[source] == id(x):
                self.twice.add(id(x))
            self.taken[source, id(x)] = self.taken.get((source, id(x)), 0) + 1
            if isinstance(slope, Tensor) and slope.grad_fn is not None:
                self.made[_source((slope.grad_fn, slope.output_nr))] = id(x)

    def backward(self, loss: Tensor) -> None:
        taken, twice = self.taken, self.twice
        self.close()
        if any(many > 1 and x not in twice for (_, x), many in taken.items()):
            self.note("F117", max(taken.values()))

    def close(self) -> None:
        self.taken, self.made, self.twice, self.inputs = {}, {}, set(), []


def _source(edge: tuple) -> tuple:
    """What a number was summed of: the node, and which of its results."""
    while kind(edge[0]) in VIEWS:
        edge = edge[0].next_functions[0]
    return edge
