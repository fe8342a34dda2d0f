"""Attention whose weights sum to one over the wrong places, or whose mask hides nothing.

    weights = (q @ k.transpose(1, 2)).softmax(dim=1)         over the places that ask
    weights = (q @ k.transpose(1, 2)).softmax(dim=-1)        over the places that are asked
    answer = weights @ v

An answer is a weighted mean of values: the weights of one question sum to one. The product with the values sums over
an axis of the weights, and that must be the axis of the softmax. Any other one trains, and mixes worse. What is to be
hidden needs a score of minus infinity: a score of 0, or one that is 1 smaller, is a score like any other, and weights
that are set to 0 after the softmax have taken their share from the rest.

Footgun: where groups compete for places (slot attention, soft assignment), the softmax is over the groups on purpose.
There the scores are no product of two things that learn, or the weights are divided by their sums afterwards.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

PRODUCTS = {"matmul", "bmm", "__matmul__", "einsum", "baddbmm"}
BETWEEN = {"masked_fill", "where", "float", "to"} | PLUS | MINUS | TIMES | OVER
BETWEEN |= {
    "leaky_relu",
    "tanh",
    "squeeze",
    "view",
    "unsqueeze",
    "reshape",
}  # additive scores, of graphs and of Bahdanau
TURNS, UNIT = {"transpose", "T", "mT", "t", "permute", "view", "reshape", "__getitem__", "unflatten", "mul"}, "unit"
AFTER = {"dropout", "to", "float", "type_as", "contiguous", "clone"} | TIMES
HIDES = -10.0  # a score below it hides
LOOKED = 2**22


class Scores(NamedTuple):
    """A product of two things that learn, on its way to a softmax."""

    width: int  # over which it was summed
    queried: bool  # by two things that were computed; a gate of experts is a product with weights
    odd: str = ""  # what was done to it
    hides: bool = False  # large negative numbers stand in it, so a mask works already
    unit: bool = False  # both sides have a length of 1


class Weights(NamedTuple):
    """What a softmax made of them."""

    axis: int  # over which they sum to one
    queried: bool
    hidden: bool = False  # some were set to 0 afterwards
    odd: str = ""  # what was strange in the scores
    masked: bool = False  # before the softmax


class Attending(Watcher):
    names = PRODUCTS | BETWEEN | AFTER | TURNS | {"softmax", "normalize"}
    begins = PRODUCTS | {"normalize"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)

    def saw(self, op: Op) -> None:
        if not isinstance(op.result, Tensor) or not op.given:
            return
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if op.name in PRODUCTS:
            if isinstance(fact, Weights):
                self._summed(op)
            elif len(op.given) == 2 and all(t.requires_grad and t.dim() > 1 for t in op.given):
                unit = [self.known.get(t) == UNIT for t in op.given] == [True, True]
                queried = not any(t.is_leaf for t in op.given)
                self.known.put(op.result, Scores(op.given[0].shape[-1], queried, unit=unit))
        elif op.name == "normalize" or op.name in TURNS and fact == UNIT:
            self.known.put(op.result, UNIT)
        elif isinstance(fact, Scores):
            if op.name == "softmax":
                self._weights(op, fact)
            elif op.name in BETWEEN:
                hides = fact.hides or _hides(op)
                odd = "" if hides else fact.odd or _odd(op, fact)
                self.known.put(op.result, fact._replace(odd=odd, hides=hides))
        elif isinstance(fact, Weights) and op.name in OVER and len(op.given) == 2:
            return  # by their sum over some axis: they are weights of another kind now
        elif isinstance(fact, Weights) and op.name in AFTER:
            self.known.put(op.result, fact._replace(hidden=fact.hidden or op.name in TIMES and _flags(op, op.result)))

    def _weights(self, op: Op, scores: Scores) -> None:
        axis = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None)
        if isinstance(axis, int):
            odd = "" if scores.unit and scores.odd == "sharpened" else scores.odd
            self.known.put(op.result, Weights(axis % op.result.dim(), scores.queried, odd=odd, masked=scores.hides))

    def _summed(self, op: Op) -> None:
        """Which axis of the weights a product sums over."""
        if len(op.given) != 2:
            return
        at = 0 if self.known.get(op.given[0]) else 1
        weights, (axis, queried, hidden, odd, masked) = op.given[at], self.known.get(op.given[at])
        if odd:
            self.e.unmasked.setdefault(self.eye.turn, odd)
            return
        axes = _einsum(op.args[0], at) if op.name == "einsum" else {weights.dim() - 1 - at}
        if axes and axis not in axes and all(weights.shape[i] > 1 for i in (axis, *axes)):
            self.e.attending.setdefault(self.eye.turn, (tuple(weights.shape), axis, min(axes)))
        elif hidden and queried and not masked:
            self.e.unmasked.setdefault(self.eye.turn, "after")

    def backward(self, loss: Tensor) -> None:
        self.known.by_id.clear()

    def close(self) -> None:
        self.known.by_id.clear()


def _hides(op: Op) -> bool:
    """Whether large negative numbers are put in."""
    numbers = [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, int | float) and not isinstance(a, bool)]
    if op.name in ("masked_fill", "where"):
        small = [float(t) for t in op.given if t.numel() == 1 and t.is_floating_point()]
        return any(n <= HIDES for n in (*numbers, *small))
    if op.name not in PLUS | MINUS or len(op.given) != 2:
        return False
    others = [t for t in op.given if not t.requires_grad and t.is_floating_point() and 1 < t.numel() <= LOOKED]
    return any(float(t.abs().max()) >= -HIDES for t in others)


def _odd(op: Op, scores: Scores) -> str:
    """What is strange in a step from scores to scores."""
    numbers = [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, int | float) and not isinstance(a, bool)]
    if op.name in ("masked_fill", "where"):
        flags = [t for t in op.given if t.dtype is torch.bool]
        return "filled" if numbers and numbers[-1] > HIDES and flags and bool(flags[0].any()) else ""
    if op.name in TIMES and numbers and scores.width > 3:
        return "sharpened" if math.isclose(numbers[0], math.sqrt(scores.width), rel_tol=1e-3) else ""
    if _flags(op, op.result) and op.name not in OVER:
        return "multiplied" if op.name in TIMES else "added"
    return ""


def _flags(op: Op, like: Tensor) -> bool:
    """Whether one of two tensors holds zeros and ones, both, and learns nothing."""
    if len(op.given) != 2:
        return False
    for t in op.given:
        if not t.requires_grad and t.dim() > 1 and t.numel() <= LOOKED and t.shape[-1] == like.shape[-1]:
            zeros, ones = (t == 0), (t == 1)
            if bool((zeros | ones).all()) and bool(zeros.any()) and bool(ones.any()):
                return True
    return False


def _einsum(equation: object, at: int) -> set[int]:
    """The axes of an operand that do not come out."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return set()
    left, out = equation.replace(" ", "").split("->")
    terms = left.split(",")
    return {i for i, letter in enumerate(terms[at]) if letter not in out} if len(terms) == 2 else set()
