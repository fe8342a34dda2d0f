"""Cells that are hidden from the loss's point of view, and shown to the model: an imputation that copies.

    mask = torch.rand_like(x) < 0.25
    loss = ((model(x) - x)[mask] ** 2).mean()               with model(x * ~mask), or the answer stands in the input

A mask that is drawn in the step and picks the numbers of a loss is followed, and so are the inputs of first layers. It
is wrong where the target itself was an input, whole, and the mask was put on nothing else. And it is wrong where all
that the loss asks for is what the mask has left in the input:

    tokens = torch.where(mask[..., None], embed(patches), mask_token);  loss = (error * mask).sum() / mask.sum()

Footgun: a mask of what is known (ratings, cells with a sensor) comes with the data and hides nothing.
"""

import math

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, TIMES

DRAWS = {"rand", "rand_like", "bernoulli", "uniform", "randperm"}
KEEPS = {"lt", "gt", "le", "ge", "__lt__", "__gt__", "__le__", "__ge__", "__invert__", "logical_not", "bitwise_not"}
KEEPS |= {"float", "to", "bool", "type", "rsub", "__rsub__", "unsqueeze", "expand", "expand_as", "view", "reshape"}
KEEPS |= {"repeat", "argsort"}
PUTS = TIMES | {"where", "masked_fill", "__setitem__", "__getitem__", "masked_select", "index_fill"}
FIRST = {"linear", "conv1d", "conv2d", "lstm", "gru"}
MASK, ERROR, MASKED = "mask", "error", "masked"
LOOKED = 2**22


class Shown(Watcher):
    """What is known of a tensor: a mask that was drawn, or the error of a target that was an input."""

    begins = DRAWS | FIRST | MINUS | {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cat"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.inputs: list[Tensor] = []
        self.hidden = self.masked = False  # data were; the error of a shown target was
        self.left: list[Tensor] = []  # flat masks: what the input keeps, what the loss asks for
        self.asked: list[Tensor] = []

    def saw(self, op: Op) -> None:
        if not op.given and op.name not in DRAWS:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in FIRST or op.name == "cat":
            self.inputs += [t for t in op.given if not t.requires_grad and t.dim() > 1][: 8 - len(self.inputs)]
        elif op.name in DRAWS:
            self._put(op, MASK)
        elif facts == [MASK] and op.name == "__getitem__":  # mask[..., None]
            self._put(op, MASK)
        elif MASK in facts and op.name in PUTS:
            self.masked = self.masked or ERROR in facts
            self.hidden = self.hidden or ERROR not in facts  # on data, or on what was made of them
            self._sides(op, op.given[facts.index(MASK)], ERROR in facts)
            if ERROR in facts or not any(t.requires_grad for t in op.given):
                self._put(op, ERROR if ERROR in facts else MASKED)
        elif MASK in facts and op.name in KEEPS:
            self._put(op, MASK)
        elif ERROR in facts and op.name in ("pow", "square", "abs", "__pow__", "mean", "sum"):
            self._put(op, ERROR)
        elif len(op.given) == 2 and op.given[0].requires_grad != op.given[1].requires_grad:
            target = op.given[1 if op.given[0].requires_grad else 0]
            if MASKED in facts:
                self.left.clear()  # what is asked for is what was given: nothing was to be filled in
            elif (op.name in MINUS or "loss" in op.name) and any(_same(x, target) for x in self.inputs):
                self._put(op, ERROR)

    def _put(self, op: Op, fact: str) -> None:
        if isinstance(op.result, Tensor) and op.result.dim():
            self.known.put(op.result, fact)

    def backward(self, loss: Tensor) -> None:
        if self.masked and not self.hidden:
            self.note("D21", "")
        if self.asked and self.left and all(any(_same(a, kept) for kept in self.left) for a in self.asked):
            self.note("D21", "left")
        self.inputs, self.hidden, self.masked, self.left, self.asked = [], False, False, [], []

    def _sides(self, op: Op, mask: Tensor, error: bool) -> None:
        """What a mask of zeros and ones leaves of data, or of an error."""
        flat = mask.detach().bool().flatten()
        if mask.dtype is not torch.bool and bool((mask.detach() != flat.view_as(mask)).any()):
            return  # numbers, not yet a mask
        if op.name == "where" and len(op.args) < 3:
            return  # the places of a mask
        if op.name == "where":
            first, second = (a if isinstance(a, Tensor) and a.numel() > 1 else None for a in op.args[1:3])
            fills = [t is None or _held(t) < op.result.numel() for t in (first, second)]
            flat = flat if fills == [False, True] else ~flat if fills == [True, False] else None
        elif op.name in TIMES:
            others = [t for t in op.given if t is not mask]
            if any(t.is_leaf and t.requires_grad or _held(t) < op.result.numel() for t in others):
                return  # what is filled in
        elif op.name in ("masked_fill", "__setitem__", "index_fill"):
            flat = ~flat
        if flat is not None and len(self.left) + len(self.asked) < 8 and bool(flat.any()) and not bool(flat.all()):
            (self.asked if error else self.left).append(flat)

    def close(self) -> None:
        self.known.by_id.clear()
        self.inputs, self.left, self.asked = [], [], []


def _held(t: Tensor) -> int:
    """Numbers in it, each once: what was expanded holds fewer than its shape tells."""
    return math.prod(size for size, step in zip(t.shape, t.stride()) if step)


def _same(x: Tensor, target: Tensor) -> bool:
    if x is target:
        return True
    return x.shape == target.shape and x.dtype == target.dtype and x.numel() <= LOOKED and torch.equal(x, target)
