"""Scores of two answers that are compared, and belong to different prompts.

    ids = [chosen, rejected, chosen, rejected, ...]         as the collator laid them
    chosen, rejected = scores.chunk(2)                      the first half and the second. scores[0::2], scores[1::2]
    loss = -F.logsigmoid(chosen - rejected).mean()          was meant; or ids of [chosen, ...] + [rejected, ...]

Which rows a part of the scores came from is found by cutting their numbers in the same way. What layers are given in
the step has as many rows, and two answers to one prompt begin alike. Answers without a prompt belong together as the
items of a data set do, where a DataLoader is seen to hand them to its collate function (items.py).

Footgun: all prompts may begin alike, so only what pairs share beyond that counts: nearly all neighbours must share some
of it and few of those that are compared, or the other way round. Values of states that follow each other are alike both
ways. A condition that is one constant for a whole half (a treatment, a time, a boundary) is no prompt, so most pairs
must begin otherwise than the next one; rows that are the same to the end are copies and no two answers; and what is
compared along a series (s[1:] - s[:-1]) has rows that stand on both sides.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from train_doctor import items
from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS

LAYERS = {"embedding", "linear"}
CUTS = {"chunk", "split", "tensor_split", "__getitem__", "unbind", "view", "reshape", "squeeze", "flatten", "hsplit"}
PAIRS, KEPT, LOOKED = 4, 16, 2**20  # at least; things given in a step; numbers of each
MOST, FEW, MIXED = 0.9, 0.5, 0.5  # of the pairs


class PairsApart(Watcher):
    """Known are parts of scores -> the rows that they are of."""

    begins = LAYERS | CUTS
    names = LAYERS | CUTS | MINUS | {"margin_ranking_loss"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.given: list[Tensor] = []
        self.compared: list[tuple[Tensor, Tensor, int]] = []  # rows of both sides, and of how many
        self.items: list[Any] = []  # of the last batch
        self.around(fetch._MapDatasetFetcher, "fetch", "_fetching")

    def _fetching(self, original: Callable, fetcher: Any, index: Any) -> Any:
        """See what the collate function is given; it is called by a copy of torch's fetcher, as ever."""
        if self.eye.over or not fetcher.auto_collation or get_worker_info() is not None:
            return original(fetcher, index)
        mine, collate = copy.copy(fetcher), fetcher.collate_fn

        def collated(data: Any) -> Any:
            self.items = list(data) if isinstance(data, (list, tuple)) and len(data) <= items.ITEMS else []
            return collate(data)

        mine.collate_fn = collated
        return original(mine, index)

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None:
            return
        if op.name in LAYERS:
            if not x.requires_grad and x.dim() > 1 and x.numel() <= LOOKED and len(self.given) < KEPT:
                self.given.append(x)
        elif op.name in CUTS:
            self._cut(op, x)
        elif len(op.given) > 1 and len(self.compared) < KEPT:
            one, two = map(self.known.get, op.given[:2])
            if one is not None and two is not None and one[1] == two[1] and one[0].numel() == two[0].numel() >= PAIRS:
                if not torch.isin(one[0], two[0]).any():
                    self.compared.append((one[0].flatten(), two[0].flatten(), one[1]))

    def _cut(self, op: Op, x: Tensor) -> None:
        known = self.known.get(x)
        if known is None:
            if x.dim() not in (1, 2) or x.numel() != len(x) or not (x.requires_grad and x.is_floating_point()):
                return
            if len(x) < 2 * PAIRS or len(x) % 2:
                return
            known = torch.arange(len(x)).view(x.shape), len(x)
        parts = _like(op, known[0])
        if len(parts) == len(op.results):
            for part, rows in zip(op.results, parts, strict=True):
                if part.shape == rows.shape:
                    self.known.put(part, (rows, known[1]))

    def backward(self, loss: Tensor) -> None:
        for one, two, count in self.compared:
            halves = count // 2
            rows = torch.arange(count)
            beside, behind = (rows[0::2], rows[1::2]), (rows[:halves], rows[halves:])
            for meant, name in ((beside, "halves"), (behind, "pairs")):
                if any(_apart(x.detach().flatten(1), (one, two), meant) for x in self.given if len(x) == count):
                    self.note("S61 pairs", name)
            apart = {items.BESIDE: one // 2 != two // 2, items.BEHIND: one % halves != two % halves}
            if count == 2 * len(self.items):
                how = next((way for x in self.given if len(x) == count and (way := items.laid(self.items, x))), "")
                if how and apart[how].float().mean() > MIXED:
                    self.note("S61 items", "halves" if how == items.BESIDE else "pairs")
        self.given, self.compared, self.items = [], [], []

    def close(self) -> None:
        self.known.by_id.clear()
        self.given, self.items = [], []


def _like(op: Op, rows: Tensor) -> list[Tensor]:
    """The same cut of the rows' numbers."""
    try:
        cut: Any = getattr(Tensor, op.name)(rows, *op.args[1:], **op.kwargs)
    except (TypeError, IndexError, RuntimeError):  # x was given by its name, or cut by a tensor of another device
        return []
    return [cut] if isinstance(cut, Tensor) else list(cut)


def _apart(given: Tensor, compared: tuple[Tensor, Tensor], meant: tuple[Tensor, Tensor]) -> bool:
    """Rows that were meant to be compared begin alike, each pair in its own way, and those that are compared don't."""
    shared = _alike(given, given[:1]).min()  # by all rows
    begun, used = (_alike(given[one], given[two]) for one, two in (meant, compared))
    answers = (begun > shared) & (begun < given.shape[1])  # rows that are the same to the end are copies
    if answers.float().mean() < MOST or (used > shared).float().mean() > FEW:
        return False
    next_one = _alike(given[meant[0].roll(-1)], given[meant[1]])  # the first of the next pair, beside the second of one
    return bool((next_one > shared).float().mean() <= MIXED)


def _alike(one: Tensor, two: Tensor) -> Tensor:
    """How many numbers the rows of both sides begin with alike, pair by pair."""
    return (one == two).cumprod(1).sum(1)
