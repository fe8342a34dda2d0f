"""The logarithm of a scale, and the sign with which it enters the loss: flows, and densities with a spread.

    z = x * s.exp() + t             what was stretched has a lower density: log p(x) = log p(z) + s
    loss = -(prior.log_prob(z) + s.sum(1)).mean()                           s has the sign -1

    loss = (error**2 * (-s).exp() + s).mean()                               here the scale is exp(-s), and s has +1

In a negative log-likelihood a scale and its logarithm pull in opposite directions. With the same sign both pull one
way, and the scale goes to 0 or without end. So the graph of a loss is read from its end: each logarithm that it holds
as a sum, with its sign, and each exp of the same tensor that multiplies something. Of several scales of one shape, as
the layers of a flow have, the loss must hold all: also where it holds none, though their logarithms were summed, for
nothing, and it is one of squares or log-probabilities of what came out.

What came out has a density for each of its numbers, and they must be summed as the logarithms are. As a mean over the
numbers of a row (prior.log_prob(z).mean(), of (B, D)) it weighs D times too little.

Footgun: a logarithm that is multiplied by what has several numbers (a mask, a weight, a count) has no one sign. And one
scale that stretches several numbers (of a row, or in all rows) counts once for each of them.
"""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import VIEWS, kind, shape_of
from train_doctor.watchers import divergences
from train_doctor.watchers.operators import OVER, TIMES

SAME = {"Sum", "Mean", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Stack", "Cat", "Add", "Clone", "Expand", "Select"}
DISTANCES = {"Sub", "Rsub"}
CHOICES = {"Minimum", "Maximum", "Where", "Clamp", "ClampMin", "Relu"}
LAYERS = 3  # scales of one shape, at least
CLOSE = 0.01
NODES, KEY = 3000, "train_doctor_factor"


class LogScales(Watcher):
    names = begins = TIMES | OVER | {"sum"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.summed: dict[tuple, Any] = {}  # what was summed over its columns since the last backward -> the sum
        self.scored: list[Tensor] = []  # nodes of log-probabilities of what has a graph
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: Any, of: Any, value: Any) -> None:
        if isinstance(value, Tensor) and value.requires_grad and isinstance(result, Tensor):
            self.scored.append(result.grad_fn)

    def saw(self, op: Op) -> None:
        """What a result was multiplied with is kept at its node; the node's own copy may be packed by the program."""
        if op.name == "sum":
            if op.result.dim() == 1 and op.result.requires_grad and len(self.summed) < NODES:
                self.summed[op.given[0].grad_fn, op.given[0].output_nr] = op.result.grad_fn
        elif isinstance(op.result, Tensor) and op.result.grad_fn is not None and len(op.args) == 2:
            number = next((a for a in op.args if not (isinstance(a, Tensor) and a.requires_grad)), None)
            if isinstance(number, Tensor):
                one = number.numel() == 1 and number.device.type == "cpu" and not number.is_complex()
            else:
                one = isinstance(number, int | float)
            if one and float(number):
                op.result.grad_fn.metadata[KEY] = 1 if float(number) > 0 else -1

    def backward(self, loss: Tensor) -> None:
        summed, scored = self.summed, self.scored
        self.summed, self.scored = {}, []
        if loss.grad_fn is None or loss.dim() or self.eye.rising:
            return
        nodes = list(graphs.walk(loss, NODES))
        scales = {}
        for node in nodes:
            for edge, sign in _scales(node):
                scales.setdefault(edge, set()).add(sign)
        if scales:
            held = _held(loss.grad_fn)
            for edge, sign in scales.items():
                if len(sign) == 1 and held.get(edge) == sign:
                    self.note("F82", next(iter(sign)))
            there = set(nodes)
            unused = {edge for edge, total in summed.items() if total not in there}
            squares = _squares(nodes)
            self._of_some(scales, held, unused if scored or squares else set())
            densities = [(n, 1.0) for n in scored] + [(n, 2.0) for n in nodes if squares and kind(n) == "Pow"]
            if densities:
                self._averaged(_weights(loss.grad_fn), nodes, densities)

    def _of_some(self, scales: dict, held: dict, summed: set) -> None:
        """Logarithms that are missing beside others of their shape and making, which stand there with a right sign; or
        all of them, where each was summed."""
        sorts: dict[tuple, list[bool | None]] = {}
        for edge, sign in scales.items():
            if len(sign) == 1:
                found = held.get(edge)
                right = None if found and found != {-one for one in sign} else bool(found)
                sorts.setdefault((kind(edge[0]), edge[1], shape_of(edge[0])), []).append((edge in summed, right))
        for sort in sorts.values():
            sums, each = zip(*sort)
            none = len(each) > 1 and all(sums)
            if None not in each and sum(each) < len(each) and (len(each) >= LAYERS and any(each) or none):
                self.note("F82", (sum(each), len(each)))

    def _averaged(self, weights: dict, nodes: list, densities: list) -> None:
        """A density that is a mean over the numbers of a row, beside logarithms that are summed over as many."""
        logs = {share for node in nodes for share in _shares(node, weights)}
        for node, times in densities if logs and max(logs) - min(logs) < CLOSE * max(logs) else ():
            numbers = math.prod(shape_of(node)[1:]) if node is not None else 1
            share = times * abs(weights.get((node, 0), 0.0)) * numbers
            if numbers > 1 and share and abs(share / max(logs) - 1) < CLOSE:
                self.note("F82", ("averaged", numbers))

    def close(self) -> None:
        self.summed, self.scored = {}, []


def _exponents(node) -> Iterator[tuple[tuple, int]]:
    """What stands in the exponents of what a product multiplies with, and -1 where it divides."""
    if kind(node) not in ("Mul", "Div") or factor_sign(node):  # 2 * exp(s) is no more than another scale
        return
    for n, edge in enumerate(node.next_functions):
        while edge[0] is not None and (kind(edge[0]) in ("View", "Unsqueeze", "Expand") or factor_sign(edge[0]) > 0):
            edge = next(e for e in edge[0].next_functions if e[0] is not None)
        if edge[0] is not None and kind(edge[0]) == "Exp":
            yield edge[0].next_functions[0], -1 if kind(node) == "Div" and n else 1


def _scales(node) -> Iterator[tuple]:
    """The logarithms of what a product multiplies with, and the sign in the exponent."""
    for edge, sign in _exponents(node):
        while edge[0] is not None and (way := factor_sign(edge[0])):
            sign, edge = sign * way, next(e for e in edge[0].next_functions if e[0] is not None)
        if edge[0] is not None:
            yield edge, sign


def factor_sign(node) -> int:
    """1 or -1 for a negative or a product with one plain number, 0 for anything else."""
    return -1 if kind(node) == "Neg" else node.metadata.get(KEY, 0) if kind(node) in ("Mul", "Div") else 0


def _squares(nodes: list) -> bool:
    """Whether squares of an answer itself are all that the loss is of."""
    powers = [kind(n.next_functions[0][0]) for n in nodes if kind(n) == "Pow"]
    errors = any("Loss" in kind(n) for n in nodes)
    return bool(powers) and not errors and not any(what in DISTANCES for what in powers)


def _held(root) -> dict[tuple, set[int]]:
    """With which signs the loss holds each result as a sum."""
    held: dict[tuple, set[int]] = {}
    seen, left = set(), [((root, 0), 1)]
    while left and len(seen) < NODES:
        edge, sign = left.pop()
        if edge[0] is None or (edge, sign) in seen:
            continue
        seen.add((edge, sign))
        held.setdefault(edge, set()).add(sign)
        node, what = edge[0], kind(edge[0])
        if what in SAME:
            left += [(e, sign) for e in node.next_functions]
        elif what in ("Sub", "Rsub"):
            turned = 0 if what == "Rsub" else 1
            left += [(e, -sign if n == turned else sign) for n, e in enumerate(node.next_functions)]
        elif way := factor_sign(node):
            left += [(e, sign * way) for e in node.next_functions if e[0] is not None]
        elif what in CHOICES or what == "Mul" and sum(e is not None for e, _ in node.next_functions) == 1:
            for below in _below(node):  # weighted: by advantages, for example
                held[below] = {1, -1}
    return held


def _shares(node, weights: dict) -> Iterator[float]:
    """How much the logarithms of what a product multiplies with count in the loss, for each number stretched."""
    for edge, _ in _exponents(node):
        times = math.prod(shape_of(node)) / max(1, math.prod(shape_of(edge[0])))  # one scale laid out over several
        while edge not in weights and edge[0] is not None and factor_sign(edge[0]):
            times *= 1.0 if kind(edge[0]) == "Neg" else divergences.number_of(edge[0]) or 1.0
            edge = next(e for e in edge[0].next_functions if e[0] is not None)
        yield abs(weights.get(edge, 0.0) / times)


def _weights(root) -> dict[tuple, float]:
    """How much one number of each result counts in the loss, where only sums, means and factors lie between."""
    weights: dict[tuple, float] = {}
    seen, left = 0, [((root, 0), 1.0)]
    while left and seen < NODES:
        (node, place), weight = left.pop()
        seen += 1
        what = kind(node)
        weights[node, place] = weights.get((node, place), 0.0) + weight
        live = [edge for edge in node.next_functions if edge[0] is not None] if node is not None else []
        if what in ("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", *VIEWS):
            for edge in live:  # what is smaller was laid out over the rest
                into, out = math.prod(shape_of(edge[0])), math.prod(shape_of(node))
                times = out / into if what == "Mean" or out > into else 1.0
                left.append((edge, weight * times))
        elif what in ("Mul", "Div") and len(live) == 1 and (number := divergences.number_of(node)):
            left.append((live[0], weight * number if what == "Mul" else weight / number))
    return weights


def _below(root) -> set[tuple]:
    found, left = set(), [root]
    while left and len(found) < NODES:
        for edge in left.pop().next_functions:
            if edge[0] is not None and edge not in found:
                found.add(edge)
                left.append(edge[0])
    return found
