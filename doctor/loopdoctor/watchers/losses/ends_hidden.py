"""The end of each answer hidden from the loss, together with the padding that has the same number.

    labels[labels == pad_id] = -100             and pad_id is eos_id
    labels = ids.masked_fill(ids == pad_id, -100)

No tokenizer is asked. Where rows are filled up to the longest of their batch, the longest one has
no padding at all. So if every row of every batch ends in the number that is hidden, and batches are
of several lengths, the last but the padding of each row is the mark of its end. The same holds
where one token is hidden in each row, and all behind it was hidden before.

Footguns: rows that are filled up to a fixed length all end in padding, and some append one to each
row: where the token in front of it is the same in all rows, that one is the mark. And a token at
another place than the end of what is asked (a mark in the text) says nothing. Targets that are
moved by one, cat([ids[:, 1:], pad]), end in a number that stands in no text: it fills the last
place, which asks for nothing. And labels that are not the compared tokens (the tags of a tagger)
have no end to be learnt.
"""

import torch
from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher

SAME, HIDES = {"eq", "__eq__"}, {"__setitem__", "masked_fill", "where"}
MOVES = {"cat", "pad", "roll"}  # and a piece that is written into another tensor
ROWS, PLACES = 4, 4  # of a batch


class EndsHidden(Watcher):
    """What is known of a mask: the number that it marks, and in what."""

    names = SAME | HIDES | MOVES
    begins = SAME | MOVES | {"__setitem__"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.moved = Known(self)  # targets: their rows begin at the second place of the ids

    def saw(self, op: Op) -> None:
        if _moves(op):
            self.moved.put(op.args[0] if op.name == "__setitem__" else op.results[0], True)
        if op.name in SAME:
            plain = (
                len(op.args) == 2
                and isinstance(op.args[1], int)
                and not isinstance(op.args[1], bool)
            )
            if (
                plain
                and (ids := op.given[0]).dim() == 2
                and not ids.is_floating_point()
                and op.args[1] >= 0
            ):
                if not self.moved.get(ids) or not bool((ids[:, -1:] == op.args[1]).all()):
                    self.known.put(op.result, (op.args[1], ids))
            return
        mask = next((t for t in op.given if self.known.get(t) is not None), None)
        labels = _labels(op)
        if (
            mask is None
            or labels is None
            or labels.shape != mask.shape
            or len(mask) < ROWS
            or mask.shape[1] < PLACES
        ):
            return
        asked = (labels >= 0) & ~mask  # (B, T) what is a target after this
        number, ids = self.known.get(mask)
        if not bool((labels == ids)[asked].all()):
            return
        behind = mask.int().cumsum(1) > 0
        fewest, most = torch.stack([*mask.sum(1).aminmax()]).tolist()
        ends = fewest == 1 and not bool((behind & asked).any()) and bool(asked.any(1).all())
        # (B,) of the last one that is asked
        place = asked.shape[1] - 1 - asked.flip(1).int().argmax(1)
        alike = ends and bool((labels.gather(1, place[:, None]) == labels[0, place[0]]).all())
        self.note("F16 hidden", (number, ends, most, mask.shape[1], alike))

    def close(self) -> None:
        self.known.by_id.clear()
        self.moved.by_id.clear()


def _moves(op: Op) -> bool:
    """Whether rows that lack their first place become rows of targets, one longer."""
    if op.name == "__setitem__":
        whole, part = op.args[0], op.args[2]
    elif op.name in MOVES and op.results and op.given:
        whole, part = op.results[0], op.given[0]
    else:
        return False
    if (
        not isinstance(part, Tensor)
        or part.is_floating_point()
        or not part.dim() == whole.dim() == 2
    ):
        return False
    behind = part.stride(0) > part.shape[1] and part.storage_offset() % part.stride(0) > 0
    return op.name == "roll" or behind and whole.shape[1] == part.shape[1] + 1


def _labels(op: Op) -> Tensor | None:
    """Return what is hidden in, where all that is marked becomes one negative number."""
    args = (*op.args, *op.kwargs.values())
    if op.name == "where":
        args = (args[2], args[0], args[1]) if len(args) == 3 else args
    if len(args) != 3 or not isinstance(args[0], Tensor) or isinstance(args[2], float | bool):
        return None
    number = args[2]
    negative = (
        isinstance(number, int) and number < 0 or isinstance(number, Tensor) and _negative(number)
    )
    return args[0] if negative and not args[0].is_floating_point() else None


def _negative(number: Tensor) -> bool:
    return number.numel() == 1 and not number.is_floating_point() and int(number) < 0
