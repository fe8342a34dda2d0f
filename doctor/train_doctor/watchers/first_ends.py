"""A row that is read where the padding's token stands first, and that token stands in the text as well.

    tokenizer.pad_token = tokenizer.eos_token
    end = (ids == pad_id).int().argmax(-1) - 1              the end of the first turn, not of the conversation
    reward = values.gather(1, end[:, None])

In a chat each turn ends with the end-of-text token. The answer that is to be judged comes after it, so chosen and
rejected are read at a place where they are still the same.

    end = attention_mask.sum(-1) - 1                        of rows with their padding on the left

counts from the wrong side: the text ends at the last place, and this one is in its middle.

Footgun: rows may be read in their middle on purpose (the end of a prompt, a marker). So the place must be the one
before the first such token in every row, and the same token must also fill the rows up.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

SHARE, LARGEST, SCORES = 0.5, 2**22, 8  # of the rows, how many go on after the place; ids; numbers of a score


class FirstEnds(Watcher):
    names = begins = {"gather", "__getitem__"}

    def __init__(self, eye: Eye):
        super().__init__(eye)

    def saw(self, op: Op) -> None:
        source = op.given[0] if op.given else None
        if source is None or source.dim() not in (2, 3) or not source.requires_grad or len(source) < 4:
            return
        at = _places(op, source)
        if at is None:
            return
        for ids in self.e.lookups:
            if ids.shape == source.shape[:2] and ids.device == at.device and ids.numel() <= LARGEST:
                if (rows := _from_the_left(ids.detach(), at)) is not None:
                    self.note("F122 left", (rows, len(ids)))
        if source.dim() == 3 and source.shape[2] > SCORES or not bool((at < source.shape[1] - 1).all()):
            return  # what is taken of the states of a place may be for something that ends there
        for ids in self.e.lookups:
            if ids.shape == source.shape[:2] and ids.device == at.device and ids.numel() <= LARGEST:
                if (rows := _go_on(ids.detach(), at)) is not None:
                    self.note("F122", (rows, len(ids)))

    def close(self) -> None:
        pass


def _places(op: Op, source: Tensor) -> Tensor | None:
    """One place of each row, (B,)."""
    rows, length = source.shape[:2]
    if op.name == "gather":
        axis, index = op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else None), op.given[-1]
        fits = index.dim() > 1 and index.shape[:2] == (rows, 1) and index.numel() > 0
        if axis not in (1, 1 - source.dim()) or not fits:
            return None
        at = index.reshape(rows, -1)[:, 0]
    else:
        key = op.args[1]
        if not isinstance(key, tuple) or len(key) != 2 or not all(isinstance(k, Tensor) and k.dim() == 1 for k in key):
            return None
        if len(key[0]) != rows or key[0].dtype is torch.bool or not bool((key[0].diff() == 1).all()):
            return None
        at = key[1]
    whole = at.dtype is torch.int64 and len(at) == rows and bool((at >= 0).all()) and bool((at < length).all())
    return at if whole else None


def _go_on(ids: Tensor, at: Tensor) -> int | None:
    """Rows with text after the place, where each is read before its first token of those that fill the rows up."""
    rows = torch.arange(len(ids), device=ids.device)
    ends = ids[rows, at + 1]
    pad = ends[0]
    filled = (ids == pad).flip(1).int().cumprod(1).sum(1)  # (B,) at the end of each row
    if not bool((ends == pad).all()) or int(filled.max()) < 2:
        return None
    places = torch.arange(ids.shape[1], device=ids.device)  # (T,)
    before, after = places <= at[:, None], places > at[:, None] + 1
    if bool(((ids == pad) & before).any()):
        return None
    on = int(((ids != pad) & after).any(1).sum())
    return on if on >= SHARE * len(ids) else None


def _from_the_left(ids: Tensor, at: Tensor) -> int | None:
    """Rows that are filled up on the left, where each is read at the number of its tokens less one."""
    first = ids[:, :1]  # (B, 1)
    runs = (ids == first).int().cumprod(1).sum(1)  # (B,) at the beginning of each row
    filled = runs > 1
    if 2 * int(filled.sum()) < len(ids) or int(runs.max()) == ids.shape[1]:
        return None
    pad = first[filled][0, 0]
    filled &= ids[:, 0] == pad
    lengths = ids.shape[1] - torch.where(ids[:, 0] == pad, runs, 0)
    apart = len(at[filled].unique()) > 1 and 2 * int(filled.sum()) >= len(ids)
    return int(filled.sum()) if apart and bool((at == lengths - 1).all()) else None
