"""Losses that grow as answers come nearer to their targets: an error that was negated, a likeness that was not.

    loss = -F.mse_loss(answer, target)          loss = ssim(answer, target)     loss = torch.min(q * e, (q - 1) * e)

Whatever stands between the answer and the loss, its gradient g tells: along (target - answer) the loss changes by
g . (target - answer), which is below 0 for every measure of an error. So each answer that meets a target of its shape
is listened to in the backward.

A product of the two counts as a meeting where both are squared as well, as in a correlation or an SSIM.

Footgun: to push away is right from what should not be (a negative, a reference). So a target must be data, made by no
weights; and where something is drawn nearer in the same step, nothing is said.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, POWERS, TIMES

SQUARES = POWERS | {"norm", "linalg_norm", "vector_norm", "linalg_vector_norm", "std", "var", "square", "dot"}
LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "embedding", "matmul", "addmm", "lstm", "gru", "detach", "data"}
LEAST, MOST = 16, 2**22  # numbers
NODES = 2000  # of a graph
AWAY, NEARER = 0.5, -0.2  # of what is gained along the way to the target, per what would be if all agreed


class Aims(Watcher):
    begins = MINUS | TIMES | SQUARES | LAYERS | set(PLAIN)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)  # what weights made, without a graph: a teacher's answer, a reference, an average
        self.met: list[tuple[Tensor, Tensor, bool]] = []  # answer, target, whether in a product
        self.squared: list[Tensor] = []

    def saw(self, op: Op) -> None:
        weights = op.name in LAYERS and any(t.requires_grad or isinstance(t, nn.Parameter) for t in op.given)
        if weights or any(map(self.known.get, op.given)):
            for r in op.results:
                if not r.requires_grad:
                    self.known.put(r, True)
        if op.name not in self.begins or op.name in LAYERS:
            return
        if op.name in SQUARES or op.name in TIMES and len(op.given) == 2 and op.given[0] is op.given[1]:
            self.squared += op.given[:1]
            return
        if len(op.given) != 2 or len(self.met) > 16 or op.given[0].shape != op.given[1].shape:
            return
        answer, target = op.given if op.given[0].requires_grad else op.given[::-1]
        if (
            not answer.requires_grad
            or target.requires_grad
            or self.known.get(target)
            or not LEAST <= answer.numel() <= MOST
        ):
            return
        if answer.grad_fn is not None and answer.is_floating_point() and target.is_floating_point():
            self.met.append((answer, target, op.name in TIMES))

    def backward(self, loss: Tensor) -> None:
        met, squared = self.met, {id(t) for t in self.squared}
        self.met, self.squared = [], []
        asked = [(a, t) for a, t, product in met if not product or {id(a), id(t)} <= squared]
        if not asked or self.eye.rising:
            return
        first = _roots([answer for answer, _ in asked])
        asked = [(a, t) for a, t in asked if a.grad_fn in first]
        ways: list[float] = []
        for answer, target in asked:
            answer.grad_fn.register_prehook(_listener(answer.detach(), answer.output_nr, target.detach(), ways))
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


def _listener(answer: Tensor, number: int, target: Tensor, ways: list[float]) -> Callable:
    def see(grads: tuple) -> None:
        g = grads[number] if number < len(grads) else None
        if isinstance(g, Tensor) and g.shape == answer.shape:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                gains = (g.float() * (target - answer).float()).flatten()
                whole = gains.abs().sum()
                if bool(torch.isfinite(whole)) and bool(whole > 0):
                    ways.append(float(gains.sum() / whole))

    return see
