"""Losses that grow as answers come nearer to their targets: an error that was negated, a likeness that was not.

    loss = -F.mse_loss(answer, target)          loss = ssim(answer, target)     loss = torch.min(q * e, (q - 1) * e)

Whatever stands between the answer and the loss, its gradient g tells: along (target - answer) the loss changes by
g . (target - answer), which is below 0 for every measure of an error. So each answer that meets a target of its shape
is listened to in the backward.

A product of the two counts as a meeting where both are squared as well, as in a correlation or an SSIM.

Footguns: to push away is right from what should not be (a negative, a reference, an action that earned little). So a
target must be data, made by no weights; where something is drawn nearer in the same step, or a loss of classes is there
too, nothing is said. And an attack changes its input so that the error grows.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import BINARY, CLASSES, PLAIN
from train_doctor.watchers.operators import MINUS, PLUS, POWERS, TIMES

SQUARES = POWERS | {"norm", "linalg_norm", "vector_norm", "linalg_vector_norm", "std", "var", "square", "dot"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "embedding", "matmul", "addmm", "lstm", "gru", "detach", "data"}
LINEAR = {"mean", "sum", "neg", "negative", "__neg__"} | MINUS | PLUS
MEETS, CLASSIFIED = MINUS | TIMES | SQUARES | set(PLAIN), {*CLASSES, *BINARY}
LEAST, MOST = 16, 2**22  # numbers
NODES = 2000  # of a graph
SOME, MOST_ROWS = 0.1, 0.5  # of the rows
AWAY, NEARER = 0.5, -0.2  # of what is gained along the way to the target, per what would be if all agreed


class Aims(Watcher):
    begins = MEETS | LAYERS | CLASSIFIED | {"__setitem__"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # what weights made, without a graph: a teacher's answer, a reference, an average
        self.met: list[tuple[Tensor, Tensor, bool]] = []  # answer, target, whether in a product
        self.inside = False  # of a log_prob, whose value may be an action
        self.classified = False  # a loss of classes draws answers nearer to something else
        self.of_distributions("log_prob", "score")
        self.squared: list[Tensor] = []
        self.gaps = Known(self)  # differences -> which of those that met
        self.linear: set[int] = set()

    def score(self, original: Callable, *args, **kwargs) -> Tensor:
        before, self.inside = self.inside, True
        try:
            return original(*args, **kwargs)
        finally:
            self.inside = before

    def saw(self, op: Op) -> None:
        if op.name == "__setitem__":  # a bank of earlier answers
            if any(t.requires_grad or self.known.get(t) for t in op.given[1:]):
                self.known.put(op.given[0], True)
            return
        self.classified = self.classified or op.name in CLASSIFIED and bool(op.given) and op.given[0].requires_grad
        weights = op.name in LAYERS and any(t.requires_grad or isinstance(t, nn.Parameter) for t in op.given)
        if weights or any(map(self.known.get, op.given)):
            for r in op.results:
                if not r.requires_grad:
                    self.known.put(r, True)
        if op.name in LINEAR:  # a term beside another, and no error
            self.linear |= {gap for t in op.given if (gap := self.gaps.get(t)) is not None}
        if op.name not in MEETS or self.inside:
            return
        if op.name in SQUARES or op.name in TIMES and len(op.given) == 2 and op.given[0] is op.given[1]:
            self.squared += op.given[:1]
            return
        if len(op.given) != 2 or len(self.met) > 16 or op.given[0].shape != op.given[1].shape:
            return
        answer, target = op.given if op.given[0].requires_grad else op.given[::-1]
        data = not target.requires_grad and target.is_floating_point() and not self.known.get(target)
        if data and answer.grad_fn is not None and answer.is_floating_point() and LEAST <= answer.numel() <= MOST:
            self.met.append((answer, target, op.name in TIMES))
            if op.name in MINUS and op.results:
                self.gaps.put(op.results[0], len(self.met) - 1)

    def backward(self, loss: Tensor) -> None:
        met = [one for n, one in enumerate(self.met) if n not in self.linear]
        squared = {id(t) for t in self.squared}
        self.met, self.squared, self.linear = [], [], set()
        classified, self.classified = self.classified, False
        asked = [one for one in met if not one[2] or {id(one[0]), id(one[1])} <= squared]
        if not asked or self.eye.rising or classified or graphs.asks_inputs(loss, self.e.optimized(), NODES):
            return
        first = _roots([answer for answer, _, _ in asked])
        asked = [one for one in asked if one[0].grad_fn in first]
        ways: list[float] = []
        for answer, target, product in asked:
            self.hear(answer, partial(_gain, target - answer.detach(), product, ways))
        self.e.habits["F75"][self.eye.turn] = (len(asked), ways)

    def close(self) -> None:
        self.known.by_id.clear()
        self.met, self.squared = [], []


def _roots(answers: list[Tensor]) -> list:
    """Those that are made of none of the others: the gradient of a mean that is taken of an answer is a part of it."""
    nodes = {answer.grad_fn: answer for answer in answers}
    if len(nodes) == 1:
        return list(nodes)
    below = {node: set(itertools.islice(graphs.walk(answer, NODES), 1, None)) for node, answer in nodes.items()}
    return [node for node in nodes if not below[node] & nodes.keys()]


def _gain(way: Tensor, product: bool, ways: list[float], g: Tensor) -> None:
    """How much the loss gains on the way to the target, per what it would if all numbers agreed."""
    gains = g.float() * way.float()
    whole = gains.abs().sum()
    if bool(torch.isfinite(whole)) and bool(whole > 0):
        rows = gains.flatten(1).sum(1) if gains.dim() > 1 else gains
        nearer = 0.0 if product else float((rows < 0).float().mean())  # of the rows, are drawn nearer
        ways.append(-1.0 if nearer > MOST_ROWS else 0.0 if nearer > SOME else float(gains.sum() / whole))
