"""Weights of a mixture that are no shares: a layer's answer is added to log-densities as it is.

    log_pi = F.log_softmax(pi, -1)              shares, whose sum is one
    loss = -torch.logsumexp(log_pi + component.log_prob(y), -1).mean()
    loss = -torch.logsumexp(pi + component.log_prob(y), -1).mean()      grows without end with all of pi

The same among densities: `(pi * component.log_prob(y).exp()).sum(-1).log()`, where pi does not sum to one.

And a sum of logarithms in place of the logarithm of a sum:

    loss = -(pi * log_density).sum(-1).mean()

where a share is rewarded with its component's logarithm, so all of it goes to one component, and all components to the
middle of the data. What pi multiplies has a square and a spread in it, as densities have, and pi is in nothing else.

Footgun: who subtracts the logsumexp of the weights afterwards is right too, and so is an intensity whose sum is added
to the loss. So both are waited for until the backward.
"""

import itertools
import weakref
from typing import Any

from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind, shape_of
from train_doctor.watchers import divergences
from train_doctor.watchers.operators import PLUS, TIMES

LAYERS = {"linear", "addmm", "matmul", "__matmul__", "conv1d", "conv2d"}
VIEWS = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "chunk", "split", "unbind"}
VIEWS |= {"__getitem__", "narrow", "select", "expand", "contiguous", "float", "to", "clamp"}
SHAPED = VIEWS | {"sum"}
RAW, LOG, DENSITY = "raw", "log", "density"
PRICES = {"logsumexp", "sum"}
CLOSE, MOST, PIECES = 1e-2, 1000, 24
POINTWISE = {"Add", "Sub", "Rsub", "Mul", "Neg", "Div", "Pow"}


class ComponentWeights(Watcher):
    """What is known of a tensor: RAW (an answer of a layer), or (LOG or DENSITY, the weights it was given)."""

    begins = LAYERS | PRICES

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.free: list[tuple[Tensor, int]] = []  # weights that are no shares, since the last backward
        self.taken: list[weakref.ref] = []  # of which the logsumexp or the sum was asked for
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: Any, of: distributions.Distribution, value: Any) -> None:
        data = not (isinstance(value, Tensor) and value.requires_grad)
        if data and isinstance(result, Tensor) and result.requires_grad and result.dim() > 1:
            self.known.put(result, (LOG, None))

    def saw(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        fact = next((f for f in facts if isinstance(f, tuple)), None)
        made = None
        if op.name in PRICES and op.given and op.given[0].requires_grad and len(self.taken) < MOST:
            self.taken.append(weakref.ref(op.given[0]))  # what an intensity sums to has its price
        if op.name in LAYERS and fact is not None:
            made = DENSITY, None  # a forward algorithm: what comes of densities is no weight
        elif op.name in LAYERS or op.name in VIEWS and facts and facts[0] == RAW:
            made = RAW
        elif fact is None:
            return
        elif op.name == "exp" and fact[0] == LOG:
            made = DENSITY, fact[1]
        elif op.name in PLUS and len(op.given) == 2 and fact[0] == LOG:
            made = LOG, fact[1] if fact[1] is not None else _other(op, facts, RAW)
        elif op.name in TIMES and len(op.given) == 2 and fact[0] == DENSITY:
            made = DENSITY, fact[1] if fact[1] is not None else _other(op, facts, None)
        elif op.name == "logsumexp" and fact[0] == LOG or op.name == "sum" and fact[0] == DENSITY:
            self._reduced(op, fact)
            made = fact[0], None
        if made is None and op.name in SHAPED and facts[0] is fact and fact[1] is None:
            made = fact
        for r in op.results if made else ():
            self.known.put(r, made)

    def _reduced(self, op: Op, fact: tuple) -> None:
        x, weights = op.given[0], fact[1]
        dim = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
        dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
        if weights is None or not isinstance(dim, int):
            return
        back = dim % x.dim() - x.dim()  # from the end, where shapes meet
        if weights.dim() < -back or weights.shape[back] != x.shape[back] or x.shape[back] < 2:
            return
        w = weights.detach().float()
        sums = w.logsumexp(back).exp() if fact[0] == LOG else w.sum(back)
        if not bool(((sums - 1).abs() < CLOSE).all()):
            self.free.append((weights, x.shape[back]))

    def backward(self, loss: Tensor) -> None:
        if components := _summed_logarithms(divergences.terms_of_loss(self.e, loss)):
            self.note("F95", -components)
        free, self.free, taken, self.taken = self.free, [], self.taken, []
        for weights, count in free:
            if not any(t() is weights for t in taken):
                self.note("F95", count)

    def close(self) -> None:
        self.known.by_id.clear()
        self.free, self.taken = [], []


def _summed_logarithms(terms: list[tuple]) -> int:
    """How many components there are in -(pi * log_density).sum(dim).mean(), the whole of a loss; 0 in any other."""
    if len(terms) != 1 or kind(terms[0][0]) != "Mean" or terms[0][1] >= 0:
        return 0
    node = terms[0][0].next_functions[0][0]
    if kind(node) != "Sum" or kind(node.next_functions[0][0]) != "Mul":
        return 0
    for shares, logs in itertools.permutations(edge for edge, _ in node.next_functions[0][0].next_functions):
        soft = shares.next_functions[0][0] if kind(shares) == "Exp" else shares
        if kind(soft) not in ("Softmax", "LogSoftmax") or (kind(soft) == "LogSoftmax") == (soft is shares):
            continue
        queue, squares, own, spread = [logs], False, False, False
        for _ in range(PIECES):
            here = queue.pop(0) if queue else None
            by_itself = kind(here) == "Mul" and len({edge for edge, _ in here.next_functions}) == 1
            squares = squares or by_itself or kind(here) == "Pow"
            own = own or here is soft
            spread = spread or kind(here) in ("Exp", "Log")
            if kind(here) in POINTWISE:
                queue += [edge for edge, _ in here.next_functions if edge is not None]
        if squares and spread and not own:
            return shape_of(node.next_functions[0][0])[-1]
    return 0


def _other(op: Op, facts: list, kind: str | None) -> Tensor | None:
    """What was added or multiplied, where it learns and is of this kind."""
    other = next((t for t, f in zip(op.given, facts) if not isinstance(f, tuple)), None)
    if other is None or not other.requires_grad:
        return None
    raw = other.is_leaf or any(t is other and f == RAW for t, f in zip(op.given, facts))
    return other if kind is None or raw else None
