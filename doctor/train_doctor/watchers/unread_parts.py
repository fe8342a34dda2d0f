"""Parts of a batch that nothing reads: flags of events, a mask of padding, the lengths of the rows.

    x, time, event = next(batches)
    loss = nll(model(x), time)                      the censored rows count as events
    x, lengths, y = next(batches)
    loss = mse(model(x), y)                         the padding counts as data

Whoever puts such a thing into a data set means it to be used. So of what a DataLoader gives it is asked which tensors
of zeros and ones, and which lengths, were given to no function of torch before the next batch was fetched. Another form
or dtype of a tensor is that tensor still.

Footguns: a label is left out on purpose where nothing is supervised, and a gap may have been filled in before. So two
other parts must have been read; beside flags, one of them must be a number for each row, and a mask must be of places
that hold one number. What goes into a function of the user's own (autograd.Function, a compiled or scripted one) is not
seen; then the other parts are mostly not seen either.
"""

from typing import Any

from torch import Tensor
from torch.utils.data import dataloader

from train_doctor.eye import Eye, Known, Op, Watcher, plain

SAME = {"to", "float", "double", "half", "long", "int", "bool", "cuda", "cpu", "clone", "detach", "contiguous", "type"}
SAME |= {"squeeze", "unsqueeze", "view", "reshape", "flatten", "pin_memory", "is_pinned"}
LEAST, PARTS, NUMBERS = 4, 16, 2**16  # rows of a batch; parts of it; numbers of a mask that are looked at


class UnreadParts(Watcher):
    """What is known of a tensor: the number of the part of the last batch that it is."""

    begins: frozenset[str] = frozenset()

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.parts: list[Tensor] = []  # of the last batch
        self.read: set[int] = set()
        self.after(dataloader._BaseDataLoaderIter, "__next__", "given")

    def given(self, batch: Any, iterator: Any) -> None:
        """The next batch: what was not read of the last one never will be."""
        self._told()
        self.known.by_id.clear()
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        tensors = isinstance(parts, list | tuple) and 3 <= len(parts) <= PARTS
        self.parts = [p for p in parts if _looked_at(p)] if tensors else []
        self.read = set()
        for n, part in enumerate(self.parts):
            self.known.put(part, n)

    def saw(self, op: Op) -> None:
        for t in op.given:
            if (part := self.known.get(t)) is not None:
                if op.name in SAME and len(op.given) == 1:
                    for r in op.results:
                        self.known.put(r, part)
                else:
                    self.read.add(part)

    def _told(self) -> None:
        read = [self.parts[n] for n in self.read]
        if len(read) < 2 or len(self.parts) - len(read) != 1:
            return
        (left,) = (part for n, part in enumerate(self.parts) if n not in self.read)
        if len(left) >= LEAST and (what := _what(left, read)):
            self.note("D36", (what, tuple(left.shape)))

    def close(self) -> None:
        self.known.by_id.clear()
        self.parts = []


def _looked_at(part: Any) -> bool:
    return type(part) is Tensor and plain(part) and part.dim() > 0 < part.numel() and not part.is_complex()


def _what(left: Tensor, read: list[Tensor]) -> str:
    """What a tensor is by its numbers; nothing for numbers of any other kind."""
    if left.numel() > NUMBERS:
        return ""
    flags = bool(((left == 0) | (left == 1)).all()) and bool((left != left.flatten()[0]).any())
    if flags and left.numel() == len(left):
        return "flags" if any(p.numel() == len(p) for p in read) else ""
    if left.dim() > 1 and flags and any(_empty(p, left == 0) for p in read if p.is_floating_point()):
        return "mask"
    if left.dim() == 1 and not left.is_floating_point() and len(left.unique()) > 2:
        return "lengths" if any(_ends(p, left) for p in read if p.dim() > 1 and p.is_floating_point()) else ""
    return ""


def _empty(x: Tensor, out: Tensor) -> bool:
    """Whether x holds one number where a mask is 0, and nearly never where it is not: places, or pairs for points."""
    if x.shape == (len(out), 2 * out.shape[1]):
        x = x.unflatten(1, (-1, 2))
    if out.dim() == x.dim() and out.shape[1] == 1 < x.shape[1]:  # (N, 1, H, W) of (N, C, H, W)
        x, out = x.movedim(1, -1), out.squeeze(1)
    if x.shape[: out.dim()] != out.shape or x.dim() == out.dim():
        return False
    empty, filled = x[out], x[~out]
    return bool((empty == empty.flatten()[0]).all()) and float((filled == empty.flatten()[0]).float().mean()) < 0.5


def _ends(x: Tensor, lengths: Tensor) -> bool:
    """Whether each row of x has zeros from its length on, and something before."""
    long = [int(n) for n in lengths]
    if not all(0 < n <= x.shape[1] for n in long):
        return False
    return all(bool((row[n:] == 0).all()) and bool((row[n - 1] != 0).any()) for row, n in zip(x.detach(), long))
