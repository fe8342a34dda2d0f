"""Codes of missing values that went in as if somebody had measured them: -999 in a column of numbers around 3.

    table = table.fillna(table.mean())              or a column of its own that says what is missing
    x = (table - table.mean()) / table.std()        with -999 in it: all that was measured lies within a hundredth

Of each column of a table that a first layer is given, it is asked whether one end is a number that several rows share,
far from all others, and whether all others differ.

Footguns: a device that is off takes exactly 0, and runs at 230. So the gap must be twenty times as wide as all others
are spread, and two columns must have their code in other rows each: what is off is off in all columns. As it stands in
a table, -999 and its like are known by themselves. Counts, flags and cut values repeat; a column that says where the
code stands is told apart from the rest, and nothing is said.
"""

import torch
from torch import Tensor

from train_doctor.eye import Op, Watcher

FIRST = {"linear", "batch_norm", "layer_norm"}
ROWS, COLUMNS, LOOKED = 16, (2, 512), 2**18
SHARE, OTHERS, DISTINCT = (0.01, 0.5), 12, 0.9  # of rows with the code; rows without; different numbers among them
GAP, NAMED = 20.0, 3.0  # times the range of the others; where the code is one that people write
CODES = {*(-(10.0**n - 1) for n in range(2, 7)), *(10.0**n - 1 for n in range(3, 7)), -1.0, -9.0, -10000.0}


class MissingCodes(Watcher):
    names = begins = FIRST

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None or self.eye.turn in self.e.habits["D31"] or not self.eye.grad:
            return
        fits = x.dim() == 2 and x.dtype in (torch.float32, torch.float64) and not x.requires_grad
        if fits and len(x) >= ROWS and COLUMNS[0] <= x.shape[1] <= COLUMNS[1] and x.numel() <= LOOKED:
            if found := _coded(x.detach()):
                self.note("D31", found)


def _coded(x: Tensor) -> list[tuple[int, float, float, bool]]:
    """Column, code, share of rows that have it, and whether it is one that people write, of each that has one."""
    ends = x.sort(0).values
    span = ends[-1] - ends[0]
    repeated = (ends[0] == ends[1]) & (ends[0] < ends[-1]), (ends[-1] == ends[-2]) & (ends[0] < ends[-1])
    if not bool((repeated[0] | repeated[1]).any()) or not bool(span.isfinite().all()):
        return []
    codes, flags = {}, (x == ends[0]) | (x == ends[-1])
    found = [(end, at) for end in (0, -1) for at in repeated[end].nonzero()[:, 0].tolist()]
    for end, at in found:
        column, code = x[:, at], ends[end, at]
        others, share = column[column != code], float((column == code).float().mean())
        if len(others) < OTHERS or not SHARE[0] <= share <= SHARE[1] or len(others.unique()) < DISTINCT * len(others):
            continue
        gap, wide = float((others - code).abs().min()), float(others.max() - others.min())
        named = round(float(code), 4) in CODES
        if wide > 0 and gap > (NAMED if named else GAP) * wide:
            codes[at] = float(code), share, named
    where = {at: x[:, at] == code for at, (code, *_) in codes.items()}
    marks = [flags[:, n].all() for n in range(x.shape[1])]  # columns of two values, as flags have
    told = [x[:, n] == ends[-1, n] for n, two in enumerate(marks) if two]
    kept = {at: w for at, w in where.items() if not any(torch.equal(w, t) or torch.equal(w, ~t) for t in told)}
    apart = any(not torch.equal(a, b) for a in kept.values() for b in kept.values())
    return [(at, *codes[at]) for at in kept if codes[at][2] or apart]
