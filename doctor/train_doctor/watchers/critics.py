"""Critics whose answers come from a sigmoid, in a loss that is a difference of means (WGAN).

    c_loss = critic(fake).mean() - critic(real).mean() + penalty        any number may be answered
    critic = nn.Sequential(..., nn.Linear(64, 1), nn.Sigmoid())         numbers between 0 and 1

The graph of each loss is followed, through sums and their signs, to sigmoids and to the layer in front of them. A
critic's loss has the same layer with both signs. Of each sigmoid it is known whose weights had a part in it.

Footgun: the mean share of one class minus that of another is a measure of a classifier, and a fair one. So what another
optimizer's network made must be answered in the first of them and not in the second; and where the sigmoid goes into a
logarithm or a binary cross-entropy, it is a discriminator. The GAN of the total variation has a critic that is bounded
by half a tanh: where a number is taken from the sigmoid, that is known.
"""

import contextlib

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.adversaries import LAYERS
from train_doctor.watchers.operators import MINUS, PLUS
from train_doctor.watchers.weight_penalties import VIEWS, terms

NODES = 1500
BINARY = {"BinaryCrossEntropy", "Log", "Pow", "Log1P", "MseLoss"}
ONE_USE = VIEWS | {"Slice", "Split", "Index", "Select"}


class Critics(Watcher):
    """Known are the optimizers whose weights had a part in a tensor."""

    begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.made: dict = {}  # node of a sigmoid -> these optimizers
        self.bounded: dict[int, set[int]] = {}  # id of a critic's last weight -> turns with a difference of means
        self.judged: set[int] = set()  # in a loss of another kind

    def saw(self, op: Op) -> None:
        if len(self.e.optimizers) < 2:
            return
        if op.name in MINUS | PLUS and len(op.given) == 1:  # a number: half a tanh is a sigmoid less a half
            self.made.pop(op.given[0].grad_fn, None)
        made = frozenset().union(*filter(None, map(self.known.get, op.given)))
        if op.name in LAYERS:
            ids = {id(t) for t in op.given}
            made |= {n for n, optimizer in enumerate(self.e.optimizers) if ids & optimizer.ids}
        if not made:
            return
        for r in op.results:
            if r.is_floating_point():
                self.known.put(r, made)
                if op.name == "sigmoid" and r.grad_fn is not None and (r.dim() < 2 or r.shape[1] == 1):
                    self.made[r.grad_fn] = made

    def backward(self, loss: Tensor) -> None:
        made, self.made = self.made, {}
        if not made or loss.grad_fn is None or loss.numel() != 1 or self.eye.rising:
            return
        with contextlib.suppress(AttributeError, RuntimeError, TypeError, IndexError):  # another version's name
            for node in graphs.walk(loss, NODES):
                if kind(node) in BINARY:
                    self.judged |= {_last(below) for below in map(_viewed, node.next_functions) if below is not None}
            answers: dict[int, list[tuple]] = {}
            for node, sign in terms(loss.grad_fn):
                if node in made and (last := _last(node)):
                    answers.setdefault(last, []).append((sign, made[node]))
            for last, of in answers.items():
                if self._apart(last, of):
                    self.bounded.setdefault(last, set()).add(self.eye.turn)

    def _apart(self, last: int, of: list[tuple]) -> bool:
        """Whether one answer, to what others made, is to fall, and one to what nobody made is to rise."""
        mine = {n for n, optimizer in enumerate(self.e.optimizers) if last in optimizer.ids}
        return {(sign, bool(made - mine)) for sign, made in of} == {(1, True), (-1, False)}

    def close(self) -> None:
        for last, turns in self.bounded.items():
            for turn in turns if last not in self.judged else ():
                self.note("F105", True, turn)
        self.known.by_id.clear()
        self.bounded, self.made, self.judged = {}, {}, set()


def _viewed(edge: tuple):
    """The sigmoid that views of an edge were taken of; None for anything else."""
    node = edge[0]
    while kind(node) in ONE_USE:
        node = node.next_functions[0][0]
    return node if kind(node) == "Sigmoid" else None


def _last(sigmoid) -> int:
    """The id of the weight of the layer in front of it."""
    node = sigmoid.next_functions[0][0]
    while kind(node) in ONE_USE:
        node = node.next_functions[0][0]
    found = [n.variable for n in graphs.near(node) if hasattr(n, "variable") and n.variable.dim() > 1]
    return id(found[0]) if found else 0
