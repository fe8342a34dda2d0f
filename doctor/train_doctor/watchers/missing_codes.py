"""Codes of missing values that went in as if somebody had measured them: -999 in a column of numbers around 3.

    table = table.fillna(table.mean())              or a column of its own that says what is missing
    x = (table - table.mean()) / table.std()        with -999 in it: all that was measured lies within a hundredth

Of each column of a table that a first layer is given, it is asked whether one end is a number that several rows share,
far from all others, and whether all others differ.

Footguns: a device that is off takes exactly 0, and runs at 230. So the gap must be twenty times as wide as all others
are spread, and two columns must have their code in other rows each: what is off is off in all columns. As it stands in
a table, -999 and its like are known by themselves. Counts, flags and cut values repeat; a column that says where the
code stands is told apart from the rest, and nothing is said, be it in a table of flags that another layer is given.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

FIRST = {"linear", "batch_norm", "layer_norm"}
ROWS, COLUMNS, LOOKED, TABLES = 16, (2, 512), 2**18, 4
SHARE, OTHERS, DISTINCT = (0.01, 0.5), 12, 0.9  # of rows with the code; rows without; different numbers among them
GAP, NAMED = 20.0, 3.0  # times the range of the others; where the code is one that people write
SCALED = 2.0  # numbers up to here may have been brought between -1 and 1
CODES = {*(-(10.0**n - 1) for n in range(2, 7)), *(10.0**n - 1 for n in range(3, 7)), -1.0, -9.0, -10000.0}


class MissingCodes(Watcher):
    names = begins = FIRST

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.tables: list[Tensor] = []  # since the last backward

    def saw(self, op: Op) -> None:
        x = op.given[0] if op.given else None
        if x is None or len(self.tables) >= TABLES or not self.eye.grad:
            return
        fits = x.dim() == 2 and x.dtype in (torch.float32, torch.float64) and not x.requires_grad
        if fits and len(x) >= ROWS and COLUMNS[0] <= x.shape[1] <= COLUMNS[1] and x.numel() <= LOOKED:
            self.tables.append(x.detach())

    def backward(self, loss: Tensor) -> None:
        tables, self.tables = self.tables, []
        flags = [column for x in tables for column in _flags(x)]
        for x in tables:
            if found := _coded(x, [f for f in flags if len(f) == len(x) and f.device == x.device]):
                self.note("D31", found)

    def close(self) -> None:
        self.tables = []


def _flags(x: Tensor) -> list[Tensor]:
    """Where the columns with two numbers have the larger one."""
    low, high = x.aminmax(dim=0)
    two = ((x == low) | (x == high)).all(0) & (low < high)
    return [x[:, n] == high[n] for n in two.nonzero()[:, 0].tolist()]


def _coded(x: Tensor, flags: list[Tensor]) -> list[tuple[int, float, float, bool]]:
    """Column, code, share of rows that have it, and whether it is one that people write, of each that has one."""
    ends = x.sort(0).values
    if not bool(ends[[0, -1]].isfinite().all()):
        return []
    codes, where = {}, {}
    for end in (0, -1):
        for at in _far(x, ends, end):
            code, at_code = ends[end, at], x[:, at] == ends[end, at]
            others, share = x[~at_code, at], float(at_code.float().mean())
            if len(others) < OTHERS or not SHARE[0] <= share <= SHARE[1]:
                continue
            wide, gap = float(others.max() - others.min()), float((others - code).abs().min())
            named = round(float(code), 4) in CODES and float(others.abs().max()) > SCALED
            if (named or gap > GAP * wide) and len(others.unique()) >= DISTINCT * len(others):
                codes[at], where[at] = (float(code), share, named), at_code
    if not codes:
        return []
    told = {at for at, w in where.items() if any(torch.equal(w, f) or torch.equal(w, ~f) for f in flags)}
    apart = any(not torch.equal(where[a], where[b]) for a in codes for b in codes if not {a, b} & told)
    return [(at, *codes[at]) for at in codes if at not in told and (codes[at][2] or apart)]


def _far(x: Tensor, ends: Tensor, end: int) -> list[int]:
    """Columns of which several rows share the least (or the largest) number, far from all others."""
    shared = (x == ends[end]).sum(0).clamp_max(len(x) - 1)
    next_one = ends.gather(0, (shared if end == 0 else len(x) - 1 - shared)[None])[0]
    gap, wide = (next_one - ends[end]).abs(), (ends[-1 - end] - next_one).abs()
    return ((shared > 1) & (wide > 0) & (gap > NAMED * wide)).nonzero()[:, 0].tolist()
