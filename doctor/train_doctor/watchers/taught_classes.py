"""A teacher whose classes have another order than the student's.

    teacher: cat 0, dog 1, deer 2           student: deer 0, cat 1, dog 2
    loss = kl_div(log_softmax(student(x)), softmax(teacher(x))) + cross_entropy(student(x), y)

The two terms ask for different classes. It shows where the teacher's answers hardly ever are the labels, and nearly
always are once the classes are renamed one by one. So each step counts which answer meets which label.

A teacher that answers in the step itself is not asked about that: it may be new.

Footguns: a teacher may be poor, new, or say the same of everything; then no renaming helps. Rows without labels may be
given to the teacher beside others that have one; then none helps either. A head of its own may learn the teacher's
classes, and the student's answers may be put into the teacher's order; so both terms must be given what one layer said.
"""

import torch
from torch import Tensor

from train_doctor import graphs
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import kind
from train_doctor.watchers.operators import TIMES

MEETS = TIMES | {"kl_div", "mse_loss", "cross_entropy"}
SHARED = {"LogSoftmax", "Softmax", "Div", "Mul", "Log", "Sub", "Add", "ToCopy", "Clone", "Exp", "Clamp", "ClampMin"}
SCALES = {"div", "mul", "to", "float", "detach", "sub", "add"}
LIVE = "live"  # what a layer answers in this step
LOOKED, MOST = 2**20, 200  # numbers; classes


class TaughtClasses(Watcher):
    """Known are shares of classes that were made without a graph: the largest of each row."""

    begins = {"softmax", "log_softmax", "cross_entropy", "linear"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.taught: list[tuple] = []  # shape, what is known of the teacher's shares; the student's node
        self.labels: dict[tuple, tuple] = {}  # by the shape of the answers, with their nodes

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        x, *others = op.given
        if op.name == "linear" or op.name in SCALES and self.known.get(x) == LIVE:
            for r in op.results:
                if not r.requires_grad:
                    self.known.put(r, LIVE)
            return
        if op.name in ("softmax", "log_softmax"):
            if x.dim() == 2 and not x.requires_grad and 1 < x.shape[1] <= MOST and 0 < x.numel() <= LOOKED:
                shares = op.result if op.name == "softmax" else op.result.exp()
                live = self.known.get(x) == LIVE
                self.known.put(op.result, (x.argmax(1), float(shares.amax(1).mean()), live))
            return
        if op.name == "cross_entropy" and others and not others[0].is_floating_point():
            if x.requires_grad and x.dim() == 2 and others[0].shape == x.shape[:1]:
                self.labels.setdefault(tuple(x.shape), (others[0], (x.grad_fn, x.output_nr)))
        elif op.name == "exp" and (said := self.known.get(x)) not in (None, LIVE):
            self.known.put(op.result, said)
        elif op.name in MEETS and len(op.given) == 2 and x.shape == others[0].shape:
            said = [f for f in map(self.known.get, op.given) if f not in (None, LIVE)]
            if len(said) == 1 and any(t.requires_grad for t in op.given):
                student = x if x.requires_grad else others[0]
                self.taught.append((tuple(x.shape), said[0], (student.grad_fn, student.output_nr)))

    def backward(self, loss: Tensor) -> None:
        taught, self.taught = self.taught, []
        labels, self.labels = self.labels, {}
        self.known.by_id.clear()
        one_teacher = len({id(fact[0]) for _, fact, _ in taught}) == 1
        for shape, (said, sure, live), student in taught[:1] if one_teacher else ():
            y, answer = labels.get(shape, (None, None))
            if y is None or y.device != said.device or not bool(((y >= 0) & (y < shape[1])).all()):
                continue
            if _made_by(answer) == _made_by(student):
                counts = torch.bincount(y.long() * shape[1] + said, minlength=shape[1] ** 2).view(shape[1], shape[1])
                one = not live and _source(answer) == _source(student)
                self.note("F103", (counts.cpu(), sure, one))  # labels down, answers across

    def close(self) -> None:
        self.known.by_id.clear()
        self.taught, self.labels = [], {}


def _made_by(edge: tuple) -> object:
    """The weights of the last layer, where it is near; else the node that is left when shares and scales are undone."""
    node, _ = _source(edge)
    weights = frozenset(id(n.variable) for n in graphs.near(node) if hasattr(n, "variable")) if node else ()
    return weights or id(node)


def _source(edge: tuple) -> tuple:
    """The node, and which of its results, that is left when shares and scales are undone."""
    while kind(edge[0]) in SHARED:
        edge = next((e for e in edge[0].next_functions if e[0] is not None), (None, 0))
    return edge
