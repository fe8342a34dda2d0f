"""Preference training against the log-probabilities of other rows: a reference that was kept in another order.

    reference = cache[step * B : (step + 1) * B]        kept in the order of the files, and the loader shuffles
    reference = cache[index]
    loss = -logsigmoid(beta * ((pi_c - ref_c) - (pi_r - ref_r)))

Reference and policy begin as one model, and a row that is long or odd is unlikely for both. So the two
log-probabilities of the same rows go together, row by row, and those of strangers do not. Differences of two such
columns are followed to the difference of two of them.

Where the reference's difference itself was kept, nothing tells it from a reward that the policy's is to meet. But a
loader that gives the numbers of its rows gives the proof: the kept values under these numbers are near, and those that
are used are not.

Footgun: a value less its return is a difference as well, but these are no two pairs of negative numbers. And rows that
are all alike go together with anything, so their spread is asked for.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.operators import MINUS, PLUS

LEAST, LOOKED, TOGETHER, SPREAD = 8, 4096, 0.3, 0.05  # rows; correlation of the same rows; beside their mean
PARTS = {"chunk", "split", "unbind", "__getitem__", "tensor_split"}
LOOKUPS, SURE, MANY = {"__getitem__", "index_select"}, 0.9, 8  # correlation; tensors of numbers in a step
NEARER = 0.3  # beside the distance from the own one


class OtherReferences(Watcher):
    """What is known of a difference: how its two columns go together, or that of which side it is made."""

    names = MINUS | PLUS | PARTS | LOOKUPS | {"tensor", "stack"}
    begins = MINUS | LOOKUPS | {"tensor", "stack"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.kept = Known(self), Known(self)
        self.numbers: list[Tensor] = []  # that may be those of rows, since the last backward

    def saw(self, op: Op) -> None:
        if op.name in LOOKUPS | {"tensor", "stack"}:
            self._looks(op)
        if op.name in PLUS and len(op.given) == 2:
            if sorted(f for f in map(self.known.get, op.given) if isinstance(f, str)) == ["policy", "reference"]:
                if (_together(*op.given) or 0.0) > TOGETHER:
                    self.note("D46 added", True)
            return
        if op.name in PARTS and (fact := self.known.get(op.given[0])) is not None and isinstance(fact, tuple):
            for r in op.results:
                first = r.storage_offset() - op.given[0].storage_offset()
                if r.dim() == 1 and r.stride() == (1,) == op.given[0].stride() and len(r) >= LEAST:
                    one, two = (column[first : first + len(r)] for column in fact[1:])
                    found = _together(one, two) if len(one) == len(r) else None
                    self.known.put(r, (found, one, two)) if found is not None else None
            return
        if op.name not in MINUS or len(op.given) != 2 or not isinstance(op.result, Tensor):
            return
        one, two = op.given
        if one.dim() != 1 or one.shape != two.shape or not LEAST <= len(one) <= LOOKED:
            return
        facts = self.known.get(one), self.known.get(two)
        if all(isinstance(f, tuple) for f in facts):
            if max(f[0] for f in facts) < TOGETHER and all(_alike(*f[1:]) for f in facts):
                self.note("D46", max(f[0] for f in facts))
            elif _crossed(*facts[0][1:], *facts[1][1:]):
                self.note("D46 crossed", True)
        elif facts == ("policy", "reference"):
            if (found := _together(one, two)) is not None and found < TOGETHER:
                self.note("D46", found)
        elif facts[0] == "policy" and (kept := self.kept.get(two)) is not None:
            if any(_belongs(one.detach(), kept, rows, two) for rows in self.numbers):
                self.note("D46", _together(one, two) or 0.0)
        elif one.requires_grad and not two.requires_grad:
            if _negative(one) and _negative(two) and (found := _together(one, two)) is not None:
                self.known.put(op.result, (found, one.detach(), two.detach()))
        elif one.requires_grad == two.requires_grad and _negative(one) and _negative(two):
            self.known.put(op.result, "policy" if one.requires_grad else "reference")

    def _looks(self, op: Op) -> None:
        """Numbers of rows, and what was looked up in a column of kept values."""
        r = op.result
        if not isinstance(r, Tensor) or r.dim() != 1 or not LEAST <= len(r) <= LOOKED or r.requires_grad:
            return
        if op.name not in LOOKUPS:
            if r.dtype == torch.int64 and len(self.numbers) < MANY and len(r.unique()) == len(r) and int(r.min()) >= 0:
                self.numbers.append(r)
        elif r.is_floating_point() and op.given and op.given[0].dim() == 1 and len(op.given[0]) > len(r):
            self.kept.put(r, op.given[0])

    def backward(self, loss: Tensor) -> None:
        self.numbers = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.kept.by_id.clear()
        self.numbers = []


def _crossed(one: Tensor, other: Tensor, two: Tensor, another: Tensor) -> bool:
    """Whether each policy's column is far nearer to the other one's reference than to its own."""
    own = (one - other).abs().mean() + (two - another).abs().mean()
    return bool((one - another).abs().mean() + (two - other).abs().mean() < NEARER * own)


def _belongs(mine: Tensor, kept: Tensor, rows: Tensor, used: Tensor) -> bool:
    """Whether what was kept under these numbers is mine, and what was used is not."""
    if rows.device != kept.device or len(rows) != len(mine) or int(rows.max()) >= len(kept):
        return False
    own = kept[rows]
    near = bool((mine - own).abs().mean() < NEARER * (mine - used).abs().mean())
    return near and (_together(mine, own) or 0.0) > SURE


def _alike(one: Tensor, two: Tensor) -> bool:
    """Whether two columns could be of one model: as large, and as spread."""
    spread = float(one.float().std()), float(two.float().std())
    apart = abs(float(one.float().mean() - two.float().mean()))
    return apart < 2 * max(spread) and max(spread) < 4 * min(spread)


def _negative(t: Tensor) -> bool:
    return t.is_floating_point() and bool((t < 0).all())


def _together(one: Tensor, two: Tensor) -> float | None:
    """The correlation of two columns; None where one of them hardly varies."""
    one, two = one.detach().float(), two.detach().float()
    if any(float(t.std()) < SPREAD * float(t.abs().mean()) for t in (one, two)):
        return None
    return float(torch.corrcoef(torch.stack([one, two]))[0, 1])
