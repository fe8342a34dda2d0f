"""The label for "no condition" of a guided diffusion model that is a class of the data itself.

    y = torch.where(torch.rand(len(y)) < 0.1, torch.zeros_like(y), y)       0 is the first class
    y = torch.where(torch.rand(len(y)) < 0.1, classes, y)                   and nn.Embedding(classes + 1, width)

A mask of random numbers is followed to where it writes one number into labels, and these to a table. The table has as
many rows as there are classes, and the labels that were left as they were hold that number as often as the others.

Footguns: an id that is unknown in the data as well (0 for words and items that are rare) is put in at random on
purpose, and rows of texts are no classes. So there must be one label for each row, noise of as many rows in the same
step, whose size a regression is asked for, and few classes. A time of the noise, or the number of an augmentation,
picks what is done to the data as well: what picks from numbers that do not learn is no class.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, TIMES

DRAWS, NOISE = {"rand", "rand_like", "bernoulli", "uniform"}, {"randn", "randn_like"}
COMPARED = {"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__", "less", "greater"}
SAME = {"bool", "to", "long", "int", "view", "reshape", "squeeze", "logical_not", "__invert__", "bitwise_not", "float"}
PICKS = {"__getitem__", "index_select", "gather", "take"}
WRITES = {"where", "masked_fill", "__setitem__"} | TIMES
ROWS, CLASSES = 8, 1000
DRAWN, LABELS = "drawn", "labels"


class NullClasses(Watcher):
    """Known are random numbers and masks, and labels into which one wrote -> the number, and those that were left."""

    begins = DRAWS | NOISE | MINUS | set(PLAIN)

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self._forget()

    def _forget(self) -> None:
        self.noise: set[int] = set()  # rows of noise since the last backward
        self.errors: set[int] = set()  # and of what a regression was asked for
        self.used: set[int] = set()  # of these labels, those that say more than the class
        self.tables: list[tuple[int, int, Tensor]] = []  # rows, the number that was written, labels that were left

    def saw(self, op: Op) -> None:
        result = op.result
        if op.name in NOISE:
            if isinstance(result, Tensor) and result.dim() > 1:
                self.noise.add(len(result))
        elif op.name in MINUS or op.name in PLAIN:
            sides = op.given[:2]
            if len(sides) == 2 and sides[0].dim() > 1 and sides[0].shape == sides[1].shape and self.eye.grad:
                if sides[0].requires_grad != sides[1].requires_grad:
                    self.errors.add(len(sides[0]))
        elif op.name in DRAWS:
            if isinstance(result, Tensor) and result.dim() and result.numel() == len(result) >= ROWS:
                self.known.put(result, (DRAWN,))
        else:
            self._follow(op, [self.known.get(t) or ("",) for t in op.given])

    def _follow(self, op: Op, facts: list[tuple]) -> None:
        kinds, result = [fact[0] for fact in facts], op.result
        if op.name in ("embedding", "one_hot") and kinds[0] == LABELS:
            rows = len(op.given[1]) if op.name == "embedding" else result.shape[-1]
            self.tables.append((rows, *facts[0][1:]))
        elif op.name in PICKS and LABELS in kinds[1:]:
            if not op.given[0].requires_grad:
                self.used.add(id(facts[1 + kinds[1:].index(LABELS)][2]))
        elif op.name in WRITES and DRAWN in kinds and LABELS not in kinds:
            self._write(op, op.given[kinds.index(DRAWN)])
        elif op.name in COMPARED | SAME and kinds[0] and isinstance(result, Tensor):
            self.known.put(result, facts[0])

    def _write(self, op: Op, mask: Tensor) -> None:
        """What was written into labels by a mask: one number."""
        after = op.result if isinstance(op.result, Tensor) else op.args[0]
        if not _are_labels(after) or after.numel() != mask.numel() or not bool(((mask == 0) | (mask == 1)).all()):
            return
        hit = mask.reshape(after.shape).bool()
        changed, left = after[hit], after[~hit]
        if op.name in TIMES or op.name == "where" and len(changed) and bool((changed != changed[0]).any()):
            changed, left = left, changed  # a mask of what is kept
        if len(changed) and bool((changed == changed[0]).all()):
            self.known.put(after, (LABELS, int(changed[0]), left.detach().clone()))

    def backward(self, loss: Tensor) -> None:
        for rows, null, left in self.tables:
            if id(left) not in self.used and self.noise & self.errors and rows <= CLASSES:
                self.note("F104", (rows, null, left.flatten()[:4096].tolist()))
        self._forget()

    def close(self) -> None:
        self.known.by_id.clear()
        self._forget()


def _are_labels(t: object) -> bool:
    whole = isinstance(t, Tensor) and not t.is_floating_point() and t.dtype != torch.bool
    return whole and t.dim() > 0 and t.numel() == len(t) >= ROWS
