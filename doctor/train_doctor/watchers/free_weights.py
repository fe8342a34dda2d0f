"""Weights of terms of a loss that are learned by that loss, and cost nothing: they make the term nothing.

    loss = (torch.exp(-s) * errors + s).sum()           the weight of each error is as large as its error is small
    loss = (torch.exp(-s) * errors).sum()               s grows for ever, and the errors count less and less

In the graph of the loss a small parameter is followed up to where it meets an error. All of its ways must end in one,
with nothing but sums between there and the loss.

Footguns: a multiplier of a constraint grows with the constraint, by an optimizer that maximises or a gradient that was
turned round; weights may be learned from another loss (with p.grad = ... after the backward), or be shared out by a
softmax. So the weights must have fallen, all of them, from step to step. A term that can be negative needs no price, so
it must be an error.
"""

import contextlib

import torch
from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.weight_penalties import even

LIMIT, SMALL = 1500, 64  # nodes; numbers of a parameter
VIEWS = {"View", "UnsafeView", "Squeeze", "Unsqueeze", "Expand", "Select", "Slice", "Unbind", "Split", "Index", "Alias"}
VIEWS |= {"Clone", "ToCopy", "Reshape", "Permute", "T"}
CHAIN = VIEWS | {"Exp", "Neg", "Pow", "Softplus", "Sigmoid", "Reciprocal", "Abs", "Clamp", "ClampMin", "Sqrt", "Rsub"}
ONE_SIDED = {"Mul", "Div", "Add", "Sub"}  # with something that does not learn
ABOVE = VIEWS | {"Mean", "Sum", "Add", "Stack", "Cat", "NanToNum"}
ERRORS = {"MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Abs"}
ERRORS |= {"Norm", "LinalgVectorNorm"}
DEEP = 8  # nodes between a term and what makes it an error


class FreeWeights(Watcher):
    names = begins = {"grad="}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.seen: dict[int, dict[int, Tensor]] = {}  # id of a parameter -> turn -> its weights
        self.priced: set[int] = set()  # those that stood in a loss in another way

    def saw(self, op: Op) -> None:
        if len(op.given) == 2:  # its gradient is of something else
            self.priced.add(id(op.given[0]))

    def backward(self, loss: Tensor) -> None:
        if loss.grad_fn is None or loss.numel() != 1 or self.e.packed or self.eye.rising:
            return
        nodes = list(graphs.walk(loss, LIMIT))
        if len(nodes) == LIMIT:
            return  # it may have uses that were not looked at
        users: dict = {}
        for node in nodes:
            for edge, _ in node.next_functions:
                if edge is not None:
                    users.setdefault(edge, []).append(node)
        held = self.e.optimized()
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf.numel() <= SMALL and leaf.dim() < 2 and id(leaf) in held:
                with contextlib.suppress(AttributeError, RuntimeError, TypeError, IndexError):  # another version's name
                    self._look(id(leaf), _weights(node, users))

    def _look(self, leaf: int, weights: list[Tensor]) -> None:
        if not weights:
            self.priced.add(leaf)
            return
        each = [w.detach().double().flatten().cpu() for w in weights]
        whole = each[0] if len(each) == 1 else torch.stack([w.sum() for w in each])
        self.seen.setdefault(leaf, {}).setdefault(self.eye.turn, whole)

    def close(self) -> None:
        for turns in (turns for leaf, turns in self.seen.items() if leaf not in self.priced):
            for (turn, before), after in zip(turns.items(), list(turns.values())[1:]):
                if before.shape == after.shape and bool((after < before).all()):
                    self.note("F58", "weight", turn)
        self.seen = {}


def _weights(leaf, users: dict) -> list[Tensor]:
    """What multiplies errors, on all ways up from a parameter; nothing where one of them leads elsewhere."""
    found, queue = [], [(leaf, user) for user in users.get(leaf, [])]
    while queue:
        below, node = queue.pop()
        edges = [edge for edge, _ in node.next_functions]
        both = len(edges) == 2 and None not in edges
        what = kind(node)
        if what in CHAIN or what in ONE_SIDED and not both or what == "Mul" and both and edges[0] is edges[1]:
            queue += [(node, user) for user in users.get(node, [])]
            if node not in users:
                return []
            continue
        here = edges.index(below)
        if not both or what not in ("Mul", "Div") or what == "Div" and not here or not _error(edges[1 - here]):
            return []
        if not _only_sums_above(node, users):
            return []
        weight = node._saved_other if here else node._saved_self
        found.append(-weight.abs() if what == "Div" else weight)
    return found


def _error(node, deep: int = DEEP) -> bool:
    """A term that cannot be negative."""
    what, edges = kind(node), [edge for edge, _ in node.next_functions if edge is not None] if node is not None else []
    if what in ERRORS:
        return True
    if what == "Pow":
        return even(node)
    if what in ("NllLoss", "NllLoss2D"):
        return kind(edges[0]) == "LogSoftmax"
    if what == "Mul" and len(edges) == 2:
        return edges[0] is edges[1]
    return bool(edges) and deep > 0 and what in ABOVE | ONE_SIDED - {"Sub"} and all(_error(e, deep - 1) for e in edges)


def _only_sums_above(node, users: dict) -> bool:
    queue, seen = list(users.get(node, [])), set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        learning = sum(edge is not None for edge, _ in node.next_functions)
        if kind(node) not in ABOVE and not (kind(node) in ONE_SIDED and learning == 1):
            return False
        queue += users.get(node, [])
    return True
