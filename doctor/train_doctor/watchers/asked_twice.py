"""One layer that is asked for two things of the same input, while the layer beside it, of the same shape, is idle.

    mu, logvar = self.to_mu(h), self.to_mu(h)           to_logvar was meant: both are the same
    q, k, v = self.q(x), self.q(x), self.v(x)           k was meant

A name that was copied and not changed. Both answers must be in the loss, and no way may lead from it to the idle one.

Footgun: a layer is called again with what it was given for a second random draw behind it, or for a number that is only
printed, or in each turn of a loop, so the answers must go into different functions, or to different places of one. A
layer beside it may rest in this step (another task, a branch that was not drawn), so it must rest in all of them; it
may be of a list, for tasks that come later; or it may be called without gradients.
"""

from collections import Counter
from typing import Any

from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import VIEWS, kind

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose2d"}
NODES, CALLS = 3000, 512
KEY = "train_doctor_asked"


class AskedTwice(Watcher):
    """An answer's node carries the ids of its weight and input, as long as it lives."""

    names = begins = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.calls = Counter[tuple[int, int]]()  # weight and input -> how often
        self.awake: set[int] = set()  # ids of weights of layers that were called

    def saw(self, op: Op) -> None:
        if len(op.given) < 2 or len(self.calls) > CALLS:
            return
        self.awake.add(id(op.given[1]))
        if not op.results or op.results[0].grad_fn is None:
            return
        key = id(op.given[1]), id(op.given[0])  # as long as both answers are in a graph, so is the input
        self.calls[key] += 1
        graphs.tell(op.results[0], KEY, key)

    def backward(self, loss: Tensor) -> None:
        calls, self.calls, awake, self.awake = self.calls, Counter(), self.awake, set()
        twice = {key for key, count in calls.items() if count > 1}
        if not twice or loss.grad_fn is None:
            return
        below = set(graphs.below(loss.grad_fn, NODES))
        busy = {id(getattr(node, "variable", None)) for node in below} | awake | self._listed()
        parameters = {name: p for name, p in self.e.parameters().items() if p.requires_grad and p.dim() > 1}
        names = {id(p): name for name, p in parameters.items()}
        for key in twice:
            nodes = [node for node in below if graphs.told(node, KEY) == key]
            if len(below) >= NODES or key[0] not in names or len(nodes) < calls[key]:
                continue
            idle = _beside(names[key[0]], parameters, busy)
            in_a_loop = idle and len({frozenset(_uses(node, below)) for node in nodes}) < len(nodes)
            if idle is not None and not in_a_loop:
                self.note("S67", (names[key[0]].rpartition(".")[0], idle.rpartition(".")[0]))

    def _listed(self) -> set[int]:
        """Weights of layers that stand in a list."""
        lists = (m for _, m in self.e.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict))
        return {id(p) for m in lists for layer in m.children() for p in layer.parameters(recurse=False)}

    def close(self) -> None:
        self.calls.clear()


def _uses(node, below: set) -> set[tuple[str, int]]:
    """The functions that an answer goes into, and at which place."""
    found, queue = set(), [node]
    while queue:
        node = queue.pop()
        for user in below:
            for place, (edge, _) in enumerate(user.next_functions):
                if edge is node:
                    found.add((kind(user), place)) if kind(user) not in VIEWS else queue.append(user)
    return found


def _beside(name: str, parameters: dict[str, Any], busy: set[int]) -> str | None:
    """A weight of the same shape, of a layer in the same module, that is not busy elsewhere."""
    layer, _, weight = name.rpartition(".")
    for other, p in parameters.items():
        others, _, kind = other.rpartition(".")
        near = kind == weight and others != layer and others.rpartition(".")[0] == layer.rpartition(".")[0]
        if near and p.shape == parameters[name].shape and id(p) not in busy:
            return other
    return None
