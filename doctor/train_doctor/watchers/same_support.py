"""A meta-learner whose outer loss is taken on what its inner step was fitted to.

    fast = adapt(xs, ys)                        a step on the support set, with a graph
    loss = loss_of(model(xq, fast), yq)         on other points of the task: does the step generalise?
    loss = loss_of(model(xs, fast), ys)         on the same: does it learn by heart?

A gradient with a graph of its own, of weights, ends an inner loss. The targets of the inner losses are held against
those of the loss that is differentiated in the end.

Footgun: a penalty on the gradient also takes one with a graph, and adds it to the loss it came from; there no target
comes after it. And what is fitted may be the input, not weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Op, Watcher, tensors
from train_doctor.fed import LOSSES
from train_doctor.watchers.operators import MINUS

NODES, FEW = 200, 4  # nodes that are looked through; of so many of what was differentiated for


class SameSupport(Watcher):
    names = begins = MINUS | set(LOSSES)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.recent: dict[int, Tensor] = {}  # targets since the last gradient
        self.inner: dict[int, Tensor] = {}  # those that inner losses were given
        self.around(torch.autograd, "grad", "graded")

    def graded(self, original: Callable, outputs: Any, inputs: Any, *args, **kwargs) -> Any:
        result = original(outputs, inputs, *args, **kwargs)
        graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        if self.eye.on and graph and self.recent and all(map(self._of_weights, list(tensors((inputs,)))[:FEW])):
            self.inner |= self.recent
            self.recent = {}
        return result

    def _of_weights(self, t: Tensor) -> bool:
        """A weight, or what was made of weights: expanded, or changed by an inner step."""
        leaves = {id(t)} if t.grad_fn is None else graphs.leaves(t.grad_fn, NODES)
        return any(leaves & o.ids for o in self.e.optimizers)

    def saw(self, op: Op) -> None:
        if len(op.given) == 2 and [t.requires_grad for t in op.given].count(True) == 1:
            target = next(t for t in op.given if not t.requires_grad)
            if target.dim() and target.grad_fn is None and len(self.recent) < 32:
                self.recent[id(target)] = target

    def backward(self, loss: Tensor) -> None:
        recent, inner, self.recent, self.inner = self.recent, self.inner, {}, {}
        if recent and inner and recent.keys() <= inner.keys():
            self.note("D25", tuple(next(iter(recent.values())).shape))

    def close(self) -> None:
        self.recent, self.inner = {}, {}
