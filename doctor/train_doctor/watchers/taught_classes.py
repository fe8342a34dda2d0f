"""A teacher whose classes have another order than the student's.

    teacher: cat 0, dog 1, deer 2           student: deer 0, cat 1, dog 2
    loss = kl_div(log_softmax(student(x)), softmax(teacher(x))) + cross_entropy(student(x), y)

The two terms ask for different classes. It shows where the teacher's answers hardly ever are the labels, and nearly
always are once the classes are renamed one by one. So each step counts which answer meets which label.

Footguns: a teacher may be poor, new, or say the same of everything; then no renaming helps. Rows without labels may be
given to the teacher beside others that have one; then none helps either.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import TIMES

MEETS = TIMES | {"kl_div", "mse_loss", "cross_entropy"}
LOOKED, MOST = 2**20, 200  # numbers; classes


class TaughtClasses(Watcher):
    """Known are shares of classes that were made without a graph: the largest of each row."""

    begins = {"softmax", "log_softmax", "cross_entropy"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.taught: list[tuple] = []  # shape, the largest of each row and how large it is in the mean
        self.labels: dict[tuple, Tensor] = {}  # by the shape of the answers

    def saw(self, op: Op) -> None:
        if not op.given:
            return
        x, *others = op.given
        if op.name in ("softmax", "log_softmax"):
            if x.dim() == 2 and not x.requires_grad and 1 < x.shape[1] <= MOST and 0 < x.numel() <= LOOKED:
                shares = op.result if op.name == "softmax" else op.result.exp()
                self.known.put(op.result, (x.argmax(1), float(shares.amax(1).mean())))
            return
        if op.name == "cross_entropy" and others and not others[0].is_floating_point():
            if x.requires_grad and x.dim() == 2 and others[0].shape == x.shape[:1]:
                self.labels.setdefault(tuple(x.shape), others[0])
        elif op.name == "exp" and (said := self.known.get(x)) is not None:
            self.known.put(op.result, said)
        elif op.name in MEETS and len(op.given) == 2 and x.shape == others[0].shape:
            said = [f for f in map(self.known.get, op.given) if f is not None]
            if len(said) == 1 and any(t.requires_grad for t in op.given):
                self.taught.append((tuple(x.shape), said[0]))

    def backward(self, loss: Tensor) -> None:
        taught, self.taught = self.taught, []
        labels, self.labels = self.labels, {}
        self.known.by_id.clear()
        for shape, (said, sure) in taught[:1] if len({id(fact[0]) for _, fact in taught}) == 1 else ():
            y = labels.get(shape)
            if y is not None and y.device == said.device and bool(((y >= 0) & (y < shape[1])).all()):
                counts = torch.bincount(y.long() * shape[1] + said, minlength=shape[1] ** 2)
                self.note("F103", (counts.view(shape[1], shape[1]).cpu(), sure))  # labels down, answers across

    def close(self) -> None:
        self.known.by_id.clear()
        self.taught, self.labels = [], {}
