"""Data that are standardised by their own mean and spread, batch by batch or row by row.

    y = (y - y.mean()) / y.std()                    of this batch: another scale in every step, and none in use
    y = (y - train_mean) / train_std

    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)      a window, without its level
    loss = mse(model(x), y)                         and what follows it has one: answer * std + mean, or y likewise

The mean and the spread of data are followed to what they are taken from and divide. Of a batch it is asked whether the
result is the target of a regression. Of a row it is asked whether the level was used for anything else, and if not,
whether the targets hang on it.

Footguns: returns of a policy are standardised by the batch on purpose, to weigh; so nothing is said where they multiply
what learns or a log-probability is asked for. Patches are (MAE), each by itself. Who trains on all data in each step
has the same mean in each. Groups (the stocks of a day, the slices of a scan) are standardised by themselves as well:
their means or spreads differ by more than those of random rows do. Where the answers are standardised too, the scale is
to cancel. What a network answered is no data, and a level that is kept by any use is kept, also as a column of another
input. A picture keeps what stands out of its level. What follows a window has its unit: where the level rises by one,
so does it; water in a spectrum has another.
"""

from typing import NamedTuple

import torch
from torch import Tensor, distributions

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.fed import PLAIN
from train_doctor.watchers.operators import MINUS, OVER, PLUS, TIMES

LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "embedding", "batch_norm", "layer_norm", "lstm", "gru", "rnn_tanh"}
SPREADS = {"std", "var", "sqrt", "clamp", "clamp_min", "add", "__add__", "__radd__", "maximum"}
VIEWS = {"view", "reshape", "squeeze", "unsqueeze", "flatten", "float", "to", "transpose", "permute", "__getitem__"}
MADE, LEVEL, SPREAD, CENTRED, STANDARD = "made", "level", "spread", "centred", "standard"
WEIGHT = "weight"  # a standardised number less something: an advantage
ROWS, HANGS, LOOKED = 16, 0.8, 2**22  # rows; the correlation of targets with levels; numbers
WINDOW = 3  # dims of a window; a picture has four
ONE, GIVEN = (0.7, 1.4), 0.99  # by how much targets rise with the level; the correlation of a level with an input


class Row(NamedTuple):
    """A mean that was taken, as its fact goes on: of what, over the batch or not, and its numbers."""

    kind: str
    of: int
    batch: bool
    level: Tensor | None
    count: int = 0  # numbers that each mean was made of


class OwnStatistics(Watcher):
    """Known is a Row of each step, or MADE of what a layer gave."""

    begins = LAYERS | {"mean", "std", "var"} | set(PLAIN) | MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.fed: dict[int, Tensor] = {}  # of rows that were given to a layer without their level -> the levels
        self.kept: set[int] = set()  # rows whose level had another use
        self.asked: list[Tensor] = []  # targets of a regression
        self.others: list[Tensor] = []  # tables that were given to a layer
        self.spread: Tensor | None = None  # that something was divided by last
        self.batch: tuple | None = None  # mean and spread of a target that was standardised by its batch
        self.weighs = False
        self.of_distributions("log_prob", "score", after=True)

    def score(self, result: object, of: distributions.Distribution, *value: object) -> None:
        self.weighs = True

    def saw(self, op: Op) -> None:
        r = op.results[0] if op.results else None
        if r is None or not op.given:
            return
        facts = [self.known.get(t) for t in op.given]
        if op.name in LAYERS:
            self._layer(op, facts)
        elif op.name in ("std", "var") and op.given[0].requires_grad:
            self.weighs = True  # the answers have no scale either
        elif op.name in ("mean", "std", "var") and (fact := self._statistic(op, facts[0])):
            self.known.put(r, fact)
        elif op.name in PLAIN or op.name in MINUS and len(op.given) == 2 and r.requires_grad:
            self._compared(op, facts)
        elif any(facts):
            for result in op.results:
                if fact := self._next(op, facts, result):
                    self.known.put(result, fact)

    def _statistic(self, op: Op, known: Row | None) -> Row | None:
        x = op.given[0]
        if x.requires_grad or not x.is_floating_point() or not x.dim() or len(x) < ROWS or x.numel() > LOOKED:
            return None
        if known and known.kind != CENTRED:
            return None
        dims = op.kwargs.get("dim", next((a for a in op.args[1:] if isinstance(a, int | tuple | list)), None))
        dims = (
            range(x.dim()) if dims is None or isinstance(dims, bool) else dims if not isinstance(dims, int) else [dims]
        )
        batch = 0 in {d % x.dim() for d in dims}
        if not batch and op.result.shape[:1] != x.shape[:1]:
            return None
        count = x.numel() // max(1, op.result.numel())
        return Row(LEVEL if op.name == "mean" else SPREAD, id(x), batch, op.result, count)

    def _layer(self, op: Op, facts: list) -> None:
        for fact in facts[:1]:
            x = op.given[0]
            if fact and fact.kind == STANDARD and not fact.batch and fact.level is not None and x.dim() <= WINDOW:
                self.fed[fact.of] = fact.level
            elif not fact and x.dim() == 2 and not x.requires_grad and len(self.others) < 4:
                self.others.append(x)
        for r in op.results:
            if not r.requires_grad:  # else that tells it
                self.known.put(r, Row(MADE, 0, False, None))

    def _next(self, op: Op, facts: list, r: Tensor) -> Row | None:
        first, second = (*facts, None, None)[:2]
        kinds = [f.kind if f else "" for f in facts]
        if MADE in kinds or r.requires_grad:
            self._used(facts)
            if op.name in TIMES and not all(t is op.given[0] for t in op.given):
                self.weighs = self.weighs or STANDARD in kinds or WEIGHT in kinds
            if WEIGHT in kinds and len(op.given) == 1 and not r.requires_grad:
                return next(f for f in facts if f)  # detached
            return Row(MADE, 0, False, None) if not r.requires_grad else None
        if op.name in MINUS and (kinds[0] == STANDARD and first.batch) or kinds[0] == WEIGHT:
            return first._replace(kind=WEIGHT)
        if op.name in MINUS and kinds[1:] == [LEVEL] and second.of == id(op.given[0]):
            return second._replace(kind=CENTRED)
        if op.name in OVER and kinds == [CENTRED, SPREAD]:
            self.spread = second.level
            return first._replace(kind=STANDARD)
        if kinds[0] == SPREAD and len(op.given) == 1 and op.name in SPREADS | PLUS:
            return first
        if op.name in VIEWS and kinds[0] in (LEVEL, SPREAD, CENTRED, STANDARD):
            return first
        if kinds[0] in (CENTRED, STANDARD) and len(op.given) == 1:
            return None  # its square, its size
        self._used(facts)
        return None

    def _used(self, facts: list) -> None:
        self.kept |= {f.of for f in facts if f and f.kind in (LEVEL, SPREAD)}

    def _compared(self, op: Op, facts: list) -> None:
        for one, two, fact in ((*op.given[:2], facts[1:2]), (*op.given[1::-1], facts[:1])):
            fact = fact[0] if fact else None
            if not one.requires_grad or two.requires_grad or not two.is_floating_point() or len(two.shape) < 1:
                continue
            if fact and fact.kind == STANDARD and fact.batch and op.name in PLAIN and fact.level is not None:
                self.batch = *(float(t.double().mean()) for t in (fact.level, self.spread)), fact.count
            elif not fact and len(self.asked) < 4:
                self.asked.append(two)
            elif fact:
                self._used([fact])
                if fact.kind == STANDARD and fact.batch:  # returns less values
                    self.known.put(op.results[0], fact._replace(kind=WEIGHT))

    def backward(self, loss: Tensor) -> None:
        if self.batch and not self.weighs:
            self.note("D33", self.batch)
        for of, level in self.fed.items():
            if of not in self.kept and not any(_given(level, x) for x in self.others):
                told = max((abs(_together(level, t)) for t in self.asked), default=0.0)
                if told > HANGS:
                    self.note("D34", told)
        self.fed, self.kept, self.asked, self.batch, self.weighs, self.spread = {}, set(), [], None, False, None
        self.others = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.fed, self.asked, self.others, self.spread = {}, [], [], None


def _together(level: Tensor, target: Tensor) -> float:
    """The correlation of each row's level with its target, where one rises by as much as the other."""
    rows = len(level)
    if rows < ROWS or len(target) != rows or target.numel() > LOOKED or level.device != target.device:
        return 0.0
    pair = [t.detach().double().reshape(rows, -1).mean(1) for t in (level, target)]
    if any(float(t.std()) == 0 or not bool(torch.isfinite(t).all()) for t in pair):
        return 0.0
    told = float(torch.corrcoef(torch.stack(pair))[0, 1])
    return told if ONE[0] < told * float(pair[1].std() / pair[0].std()) < ONE[1] else 0.0


def _given(level: Tensor, table: Tensor) -> bool:
    """Whether a column of another input is the level."""
    if len(level) != len(table) or table.numel() > LOOKED or level.device != table.device:
        return False
    one = level.detach().double().reshape(len(level), -1).mean(1, keepdim=True)
    one, columns = (t - t.mean(0) for t in (one, table.detach().double()))
    alike = (one * columns).sum(0) / (one.norm(dim=0) * columns.norm(dim=0)).clamp_min(1e-12)
    return bool((alike.abs() > GIVEN).any())
