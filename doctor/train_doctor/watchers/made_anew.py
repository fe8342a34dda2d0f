"""A layer that is made inside of forward, `nn.Linear(64, 64)(h)`: each call has new random weights, and learns none.

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(nn.Linear(64, 64)(h))

A weight that belongs to no model and to no optimizer is used on what the model computed, and does not outlive its
step. In the next step another of its shape is there.

Footgun: a copy that learns a task and is thrown away (MAML) has such weights too, but all of them: nothing that belongs
to the model goes into them.
"""

import weakref

from torch import Tensor, nn

from train_doctor import graphs
from train_doctor.eye import Eye, Op, Watcher

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "bilinear", "layer_norm", "embedding"}
NEAR = 0.7  # of its size: how far a copy has gone from what it was made of; two random ones are 1.4 apart
NODES = 100  # of the graph of what goes in


class MadeAnew(Watcher):
    names = LAYERS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.owned: set[int] = set()
        self.weights: list[Tensor] = []
        self.used: list[tuple[int, weakref.ref, str, tuple[int, ...]]] = []

    def backward(self, loss: Tensor) -> None:
        owners = (*self.e.models, *self.e.teachers)
        self.weights = [p for m in owners for p in m.parameters()]
        self.owned = {id(p) for p in self.weights} | self.e.optimized()

    def saw(self, op: Op) -> None:
        if not self.owned or len(op.given) < 2:
            return
        weight = op.given[1] if op.name != "embedding" else op.given[-1]
        if isinstance(weight, nn.Parameter) and weight.requires_grad and id(weight) not in self.owned:
            if graphs.leaves(op.given[0].grad_fn, NODES) & self.owned and not self._copied(weight):
                self.used.append((self.eye.turn, weakref.ref(weight), op.name, tuple(weight.shape)))

    def _copied(self, weight: Tensor) -> bool:
        """A copy that is adapted is still near the weight that it was made of."""
        same = [p for p in self.weights if p.shape == weight.shape and p.device == weight.device]
        return any(bool((p - weight).norm() < NEAR * p.norm()) for p in same)

    def close(self) -> None:
        """A loss that is kept keeps the graph of the last step, and its weights."""
        gone = {(name, shape) for _, weight, name, shape in self.used if weight() is None}
        for turn, _, *which in self.used:
            if tuple(which) in gone:
                self.note("S32", tuple(which), turn)
        self.used, self.weights = [], []
