"""A generator whose last function cannot make the real data: the discriminator tells them apart by the sign alone.

    real = ToTensor()(image)                        0..1
    fake = torch.tanh(net(z))                       -1..1
    real = real * 2 - 1                             was forgotten

    real = (image - mean) / std                     -2..2: a tanh makes nothing beyond 1

    real = Normalize(0.5, 0.5)(ToTensor()(image))   -1..1
    fake = torch.sigmoid(net(z))                    0..1: the dark half is out of reach

What a tanh or a sigmoid gave is followed to a first layer of a network that learns, and to the same layer go data
without a graph. A few numbers of both are compared: negatives in one, none in the other.

Footguns: a recurrent network gives its layer the last tanh as well, and zeros first; so the data must be spread, and of
one shape with what was made, and what was made may not come from that layer (one that is called again and again, first
with data). Where the made ones are compared with data themselves (an autoencoder, a forecast that is
fed back), that loss says where they are to lie. What was computed of made ones is no data. Features beyond a tanh meet
what a pooler made in one layer as well; so it must be two optimizers that work against each other.
"""

import weakref
from typing import NamedTuple

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import LOSSES
from train_doctor.watchers.operators import MINUS, TURNS

LAYERS = {"linear", "conv1d", "conv2d", "conv3d"}
VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "clone", "contiguous", "to"}
VIEWS |= {"float", "__getitem__", "requires_grad"}
COMPARES = set(LOSSES) | MINUS | TURNS
TANH, SIGMOID, OTHER = "tanh", "sigmoid", "other"
SAMPLE, FEW, SPREAD, KEPT = 2048, 128, 0.05, 16  # numbers; of data, from which on; their spread; layers
LIMIT, SHARE, BELOW = (
    2000,
    0.01,
    -0.1,
)  # nodes of a graph; of what was made, how much is below 0 at least; its least number
BEYOND, FAR = 0.25, 1.5  # of the data, how much lies beyond what a tanh can make at least; how far the farthest does
DARK = 0.1  # of the data, how much lies below BELOW at least where a sigmoid is to make them


class Given(NamedTuple):
    shape: tuple[int, ...]
    numbers: Tensor  # a few
    by: str = ""


class Ranges(Watcher):
    """Known is what a tanh or a sigmoid gave, and what something else was computed of."""

    begins = LAYERS | {TANH, SIGMOID}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.made: dict[int, Given] = {}  # id of the weights of a layer
        self.real: dict[int, Given] = {}
        self.taken: dict[int, tuple[weakref.ref, set[int]]] = {}  # data of this round -> the layers they were given to
        self.own: dict[int, bool] = {}  # whether what was made comes from the layer itself
        self.compared = False
        self.beyond: dict[int, tuple] = {}  # step -> data beyond a tanh, should there be an adversary

    def saw(self, op: Op) -> None:
        if op.name in LAYERS:
            self._layer(op)
            return
        if op.name in (TANH, SIGMOID):
            fact = op.name if op.given and op.given[0].requires_grad and op.given[0].dim() > 1 else OTHER
        else:
            facts = [self.known.get(t) for t in op.given]
            if not any(facts):
                return
            fact = facts[0] if op.name in VIEWS and facts[0] in (TANH, SIGMOID) else OTHER
            if op.name in COMPARES and {TANH, SIGMOID} & set(facts) and len(op.given) > 1:
                self.compared = True
        for r in (op.result, *op.results) if isinstance(op.result, Tensor) else op.results:
            self.known.put(r, fact)

    def _layer(self, op: Op) -> None:
        if len(op.args) < 2 or len(op.given) < 2 or not self.eye.grad or self.compared:
            return
        x, weight = op.given[:2]
        if not x.requires_grad:
            seen = self.taken.get(id(x))
            layers = seen[1] if seen is not None and seen[0]() is x else set()
            self.taken[id(x)] = weakref.ref(x), layers | {id(weight)}
        fact = self.known.get(x)
        if fact is not None:
            for r in op.results:
                self.known.put(r, OTHER)
        learns = weight.requires_grad and weight.is_leaf and x.is_floating_point() and x.dim() > 1
        if not learns or fact == OTHER or fact is None and x.requires_grad or x.numel() < FEW:
            return
        if fact and x.grad_fn is not None and id(weight) not in self.own:
            self.own[id(weight)] = id(weight) in graphs.leaves(x.grad_fn, LIMIT)
        side = self.made if fact else self.real
        if len(side) < KEPT or id(weight) in side:
            side[id(weight)] = Given(tuple(x.shape[1:]), _few(x), fact or "")
            self._compare(id(weight))

    def _compare(self, key: int) -> None:
        made, real = self.made.get(key), self.real.get(key)
        if made is None or real is None or made.shape != real.shape or self.own.get(key, True):
            return
        if any(key in weights and len(weights) > 1 for _, weights in self.taken.values()):
            return  # the data went into another network as well, which may have made the others of them
        low, high, spread = float(real.numbers.min()), float(real.numbers.max()), float(real.numbers.std())
        if made.by == SIGMOID:
            dark = float((real.numbers < BELOW).float().mean())
            if dark > DARK and spread > SPREAD:
                self.note("D35", (low, high, dark, SIGMOID))
            return
        beyond = float((real.numbers.abs() > 1).float().mean())
        if beyond > BEYOND and max(-low, high) > FAR:
            self.beyond[self.eye.turn] = low, high, beyond, "beyond"
            return
        below = float((made.numbers < 0).float().mean())
        if low >= 0 and 0.5 < high <= 1 and spread > SPREAD and below > SHARE and float(made.numbers.min()) < BELOW:
            self.note("D35", (low, high, below, TANH))

    def backward(self, loss: Tensor) -> None:
        self.taken = {}
        if self.compared:
            self.e.habits["D35"].clear()
            self.beyond = {}

    def close(self) -> None:
        for turn, fact in self.beyond.items() if len(self.e.optimizers) > 1 else ():
            self.note("D35", fact, turn)
        self.known.by_id.clear()
        self.made, self.real, self.taken = {}, {}, {}


def _few(x: Tensor) -> Tensor:
    flat = x.detach().reshape(-1)
    step = max(1, len(flat) // SAMPLE) | 1  # odd: the columns of a picture are often a power of 2
    return flat[::step][:SAMPLE].float().clone()
