"""Texts whose targets are those of other rows, and batches of one text.

    perm = torch.randperm(len(x)); model(x), y[perm]    the next words of another text
    ids[:1].expand(B, -1)                               one text, as often as there are rows

Footgun: rows of places, of types and of prompts that are learned are all alike as well: they rise by one, or hold one
number. Answers of a group to one question begin alike, and are others. One batch may be learned by heart. Other texts
may be looked up beside those whose next words are asked for. And pictures may come with one caption, so one text is
told of only where the loss asks all rows for the same as well.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

ROWS, PLACES, LOOKED = 4, 8, 2**24  # rows and places at least; numbers that are compared, each row with each
APART = 0.7  # of the rows: their targets follow from another row
IGNORED = -100


class TextsApart(Watcher):
    names = begins = {"embedding", "cross_entropy", "nll_loss"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.texts: list[Tensor] = []  # since the last backward
        self.last: Tensor | None = None  # the one text of the step before
        self.alike = False  # a loss asked all rows for the same

    def saw(self, op: Op) -> None:
        if op.name == "embedding":
            ids = op.given[0] if op.given else None
            if ids is not None and self.eye.grad and not ids.is_floating_point() and _text(ids):
                self.texts.append(ids)
        elif len(op.given) > 1 and self.texts and op.given[0].requires_grad:
            ids, targets = self.texts[-1], op.given[1]
            if targets.is_floating_point() or not targets.numel() or targets.numel() % len(ids):
                return
            rows = targets.reshape(len(ids), -1)
            self.alike = self.alike or bool((rows == rows[:1]).all())
            if targets.numel() == ids.numel() and _of_others(ids, rows):
                if not any(t.shape == ids.shape and _of_their_own(t, rows) for t in self.texts[:-1]):
                    self.note("D11 texts", len(ids))

    def backward(self, loss: Tensor) -> None:
        if self.alike and all(len(ids) >= ROWS and bool((ids == ids[:1]).all()) for ids in self.texts):
            if self.last is not None and torch.equal(self.last, self.texts[0]):
                self.e.habits["D53"].clear()  # one batch is learned by heart
            else:
                self.note("D53", tuple(self.texts[0].shape))
            self.last = self.texts[0]
        self.texts, self.alike = [], False

    def close(self) -> None:
        self.texts, self.last = [], None


def _text(ids: Tensor) -> bool:
    """Not places, nor types: neither one number nor numbers that rise by one."""
    if ids.dim() != 2 or len(ids) < 2 or ids.shape[1] < PLACES or len(ids) * ids.numel() > LOOKED:
        return False
    steps = ids[:, 1:] - ids[:, :-1]
    return bool((steps != steps[0, 0]).any())


def _of_others(ids: Tensor, targets: Tensor) -> bool:
    """Whether the target at each place is the next word of another row, and of none its own."""
    same, some = _goes_on(ids, targets)
    others = same.any(1) & ~same.diagonal()
    return int(some.sum()) >= ROWS and float(others[some].float().mean()) >= APART


def _of_their_own(ids: Tensor, targets: Tensor) -> bool:
    same, some = _goes_on(ids, targets)
    return float(same.diagonal()[some].float().mean()) >= APART


def _goes_on(ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the targets of one row are the next words of another, (rows, rows), and which rows ask for enough."""
    near, asked = ids[:, 1:], targets[:, :-1]
    same = ((near[None] == asked[:, None]) | (asked[:, None] == IGNORED)).all(-1)  # (rows, rows): asked of i, text of j
    return same, (asked != IGNORED).sum(1) >= PLACES // 2
