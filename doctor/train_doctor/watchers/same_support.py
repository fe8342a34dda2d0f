"""A meta-learner whose outer loss is taken on what its inner step was fitted to.

    fast = adapt(xs, ys)                        a step on the support set, with a graph
    loss = loss_of(model(xq, fast), yq)         on other points of the task: does the step generalise?
    loss = loss_of(model(xs, fast), ys)         on the same: does it learn by heart?

A gradient with a graph of its own, of weights, ends an inner loss. The targets of the inner losses are held against
those of the loss that is differentiated in the end.

Footgun: a penalty on the gradient also takes one with a graph, and no weights are adapted by it. A rule of steps that
is learned is asked about the data that it stepped on, rightly; what is adapted is none of its own weights. And what is
fitted may be the input.
"""

from typing import Any

import torch
from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher, tensors
from train_doctor.fed import LOSSES
from train_doctor.watchers.operators import MINUS, PLUS, TIMES

MOVES, TARGETS = MINUS | PLUS, MINUS | set(LOSSES)
NODES, FEW, HELD = 200, 4, 32  # nodes that are looked through; of what was differentiated for; targets


class SameSupport(Watcher):
    names = MOVES | TIMES | TARGETS
    begins = TARGETS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.recent: dict[int, Tensor] = {}  # targets since the last gradient
        self.inner: dict[int, Tensor] = {}  # those that inner losses were given
        self.known = Known(self)  # derivatives of inner losses, times a number
        self.adapted = self.others = False  # weights minus such a one; something else was adapted
        self.after(torch.autograd, "grad", "graded")

    def graded(self, result: Any, outputs: Any, inputs: Any, *args: Any, **named: Any) -> None:
        """With a graph of its own, after a loss with a target, it ends an inner loss."""
        if not self.recent or not named.get("create_graph", args[2] if len(args) > 2 else False):
            return
        of_weights = all(map(self._of_weights, list(tensors((inputs,)))[:FEW]))
        self.others |= not of_weights
        self.inner |= self.recent if of_weights else {}
        self.recent = {}
        for g in tensors((result,)):
            self.known.put(g, True)

    def _of_weights(self, t: Tensor) -> bool:
        """A weight, or what was made of weights: expanded, or changed by an inner step."""
        leaves = {id(t)} if t.grad_fn is None else graphs.leaves(t.grad_fn, NODES)
        return any(leaves & o.ids for o in self.e.optimizers)

    def saw(self, op: Op) -> None:
        facts = [self.known.get(t) for t in op.given]
        for r in op.results if op.name in TIMES and facts == [True] else ():
            self.known.put(r, True)
        self.adapted |= op.name in MOVES and facts in ([None, True], [True, None])
        if op.name in TARGETS and len(op.given) == 2 and [t.requires_grad for t in op.given].count(True) == 1:
            target = next(t for t in op.given if not t.requires_grad)
            if target.dim() and target.numel() and len(self.recent) < HELD:
                self.recent[id(target)] = target

    def backward(self, loss: Tensor) -> None:
        recent, inner, self.recent, self.inner = self.recent, self.inner, {}, {}
        adapted, self.adapted, others, self.others = self.adapted, False, self.others, False
        plain = any(bool((t == t.flatten()[0]).all()) for t in recent.values())  # flags of real and false
        if adapted and not others and not plain and recent and recent.keys() <= inner.keys():
            self.note("D25", tuple(next(iter(recent.values())).shape))

    def close(self) -> None:
        self.known.by_id.clear()
        self.recent, self.inner = {}, {}
