"""Which rows of a batch hold the two texts of one item, told by what a collate function was given.

    data = [(chosen, rejected), ...]                        what a DataLoader hands to collate_fn
    rows = [chosen, rejected, chosen, rejected, ...]        side by side: what the model is given
    rows = [chosen, chosen, ..., rejected, rejected, ...]   or half a batch apart

A text may stand anywhere in its row, behind a prompt or behind padding, and its end may have been cut off.

Footgun: masks and lengths are numbers in an item too. So any two of its parts may be the texts, and both must be found
in all of their rows, where the other way to lay them finds less.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

PARTS, ITEMS, LONG = 6, 128, 1024  # of an item; of a batch; numbers of a row
BESIDE, BEHIND = "beside", "behind"


def laid(items: Sequence[Any], rows: Tensor) -> str:
    """How the texts of the items stand in the rows (2 n, T): "beside", "behind", or "" where neither is plain."""
    count = len(items)
    if rows.dim() != 2 or len(rows) != 2 * count or not 2 < count <= ITEMS or rows.shape[1] > LONG:
        return ""
    if rows.is_floating_point():
        return ""
    parts, rows = [_texts(item) for item in items], rows.detach().cpu()
    if not 1 < len(parts[0]) <= PARTS or any(len(p) != len(parts[0]) for p in parts):
        return ""
    for one, two in permutations(range(len(parts[0])), 2):
        if all(p[one] == p[two] for p in parts):
            continue  # a copy of itself
        ways = {
            BESIDE: all(_holds(rows[2 * k], p[one]) and _holds(rows[2 * k + 1], p[two]) for k, p in enumerate(parts)),
            BEHIND: all(_holds(rows[k], p[one]) and _holds(rows[count + k], p[two]) for k, p in enumerate(parts)),
        }
        if ways[BESIDE] != ways[BEHIND]:
            return BESIDE if ways[BESIDE] else BEHIND
    return ""


def _texts(item: Any) -> list[list[int]]:
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, (tuple, list)) else ()
    return [numbers for numbers in map(_numbers, values) if len(numbers) > 1]


def _numbers(value: Any) -> list[int]:
    """The whole numbers of a list, a row of a tensor or of an array; none of anything else."""
    if not isinstance(value, (list, tuple)):
        if getattr(value, "ndim", 0) != 1 or not hasattr(value, "tolist"):
            return []
        value = value.tolist()
    return list(value) if all(type(n) is int for n in value) else []


def _holds(row: Tensor, text: list[int]) -> bool:
    wanted = torch.tensor(text[: len(row)])
    return bool((row.unfold(0, len(wanted), 1) == wanted).all(1).any())
