"""Penalties on weights that reward them: with a minus in front, or of the weights as they are, without their size.

    loss = error + 1e-3 * sum(p.abs().sum() for p in weights)       large weights cost something
    loss = error - 1e-3 * sum(p.pow(2).sum() for p in weights)      the larger the better
    loss = error + 1e-3 * sum(p.sum() for p in weights)             the more below zero the better

From the loss its graph is followed through sums and numbers, with the sign that they give, to the weights.

Footguns: 0 * p.sum() is written to give each weight a gradient. Logarithms of scales stand in densities as they are,
and noise that is learned is to be large. So only matrices are meant that a layer of the same loss multiplies with; and
a plain sum of weights that are kept above zero is their size, and so is minus a sum of those that are kept below. Where
weights are cut in place, they can't grow without end.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.operators import written

LIMIT = 1500  # nodes
VIEWS = {"View", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias", "T", "Reshape"}
PASSES = VIEWS | {"Sum", "Mean", "Stack", "Cat", "Select", "Unbind", "Slice", "Split", "Index"}
LAYERS = {"Addmm", "Mm", "Convolution", "ConvolutionOverrideable", "Embedding", "Bmm", "Linear"}
SIZES = {"Abs", "Norm", "LinalgVectorNorm"}
BELOW = 0.05  # of weights that lie below zero


class WeightPenalties(Watcher):
    names = begins = {"clamp", "clip"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.bounded: set[int] = set()  # addresses of weights that are cut in place

    def saw(self, op: Op) -> None:
        if written(op):
            self.bounded.add(op.given[0].data_ptr())

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or loss.numel() != 1 or self.eye.rising:
            return
        with contextlib.suppress(
            AttributeError, RuntimeError, TypeError, IndexError, ValueError
        ):  # a name of another version
            held, ways = self.e.optimized(), {"size": set(), "": set()}
            found = [fact for fact in _penalties(loss) if fact[0].dim() > 1 and id(fact[0]) in held]
            used = _multiplied(loss) if found else set()
            for leaf, sign, how in found:
                kept_above = not how and float((leaf.detach() < 0).float().mean()) < BELOW
                kept_below = not how and sign < 0 and not bool((leaf.detach() > 0).any())
                bounded = how and leaf.data_ptr() in self.bounded
                ways[how].add(sign if id(leaf) in used and not (kept_above or kept_below or bounded) else 0)
            if ways["size"] == {-1}:
                self.note("F75 weights", True)
            elif ways[""] and 0 not in ways[""]:
                self.note("F88", "no-size")


def _penalties(loss: Tensor) -> Iterator[tuple]:
    """Weights that the loss is a sum of, the sign of each, and whether it is of their sizes."""
    for node, sign in terms(loss.grad_fn):
        what, edges = kind(node), [edge for edge, _ in node.next_functions]
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf, sign, ""
        elif what in SIZES or what == "Pow" and even(node) or what == "Mul" and len(set(edges)) == 1:
            yield from ((leaf, sign, "size") for leaf in _leaves(edges[0], 3))


def terms(node) -> Iterator[tuple]:
    """What a loss is a sum of, and the sign of each: 1, -1, or 0 where it is multiplied by 0."""
    queue, many = [(node, 1)], 0
    while queue and many < LIMIT:
        (node, sign), many = queue.pop(), many + 1
        what, edges = kind(node), [edge for edge, _ in node.next_functions]
        there = [edge for edge in edges if edge is not None]
        if what in PASSES:
            queue += [(edge, sign) for edge in there]
        elif what == "Neg":
            queue.append((there[0], -sign))
        elif what in ("Add", "Sub", "Rsub"):
            signs = {"Add": (1, _sign(node)), "Sub": (1, -_sign(node)), "Rsub": (-1, 1)}[what]
            queue += [(edge, sign * s) for edge, s in zip(edges, signs) if edge is not None]
        elif what == "Mul" and len(there) == 1 or what == "Div" and there == edges[:1]:
            factor = node._saved_self if edges[0] is None else node._saved_other
            if factor is not None and factor.numel() == 1:
                queue.append((there[0], sign * _sign_of(float(factor))))
        else:
            yield node, sign


def _sign(node) -> int:
    return _sign_of(float(getattr(node, "_saved_alpha", 1)))


def _sign_of(number: float) -> int:
    return (number > 0) - (number < 0)


def even(node) -> bool:
    power = node._saved_exponent
    return power in (2, 4) if isinstance(power, int | float) else power.numel() == 1 and power.item() in (2, 4)


def _leaves(node, deep: int) -> list[Tensor]:
    """What a size was taken of, where that is weights as they are."""
    if (leaf := getattr(node, "variable", None)) is not None:
        return [leaf]
    if not deep or kind(node) not in VIEWS | SIZES | {"Cat"}:
        return []
    return [leaf for edge, _ in node.next_functions if edge is not None for leaf in _leaves(edge, deep - 1)]


def _multiplied(loss: Tensor) -> set[int]:
    """Weights that a layer of this loss multiplies with."""
    layers = (node for node in graphs.walk(loss, LIMIT) if kind(node) in LAYERS)
    near = (n for layer in layers for n in graphs.near(layer))
    return {id(n.variable) for n in near if hasattr(n, "variable")}
