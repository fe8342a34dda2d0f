"""Targets that were standardised by themselves: the window to come has lost its level and its scale.

    x, y = series[k : k + 24], series[k + 24 : k + 36]
    return (x - x.mean()) / x.std(), (y - y.mean()) / y.std()       how far y lies above x, nothing knows any more
    return (x - x.mean()) / x.std(), (y - x.mean()) / x.std()

Each row of such targets has the mean 0 and the spread 1, to the last digits, which no data have. So has each row of
what a first layer was given, and one window goes on where the other ends: their storage tells it, or the numbers that
they had before.

Footguns: a spectrum, or a signal of another sensor, is standardised by itself where its level means nothing; it does
not go on where the input ends. What was standardised before the watch began is not seen.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher, plain
from train_doctor.watchers.operators import MINUS, OVER

LAYERS = {"linear", "conv1d", "gru", "lstm"}
LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
FOLLOWED = OVER | {"stack", "cat", "unsqueeze", "float", "to", "squeeze", "transpose", "permute", "contiguous", "clone"}
ROWS, LENGTH, LOOKED = 4, 4, 2**18  # least of a batch and of a window; most numbers
LEVEL, SPREAD = 1e-3, 0.02  # distances from 0 and from 1
JUMP, MOST, FEW = 4.0, 0.8, 0.5  # in mean changes of a window; shares of rows that go on, and of strangers that do
Window = tuple[int, int, int]  # storage, first number, number of them


class OwnScale(Watcher):
    """What is known of what is left of a tensor after a subtraction: the window that it was, and its numbers."""

    names = LAYERS | LOSSES | MINUS | FOLLOWED
    begins = MINUS

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.windows: list[tuple] = []  # what is known of standardised ones that a layer was given in this step

    def saw(self, op: Op) -> None:
        fact = next((f for f in map(self.known.get, op.given) if f), None)
        if fact is not None and op.name in LAYERS:
            if self.known.get(op.given[0]) and _standard(op.given[0]):
                self.windows.append(fact)
            return
        learns = [t.requires_grad for t in op.given]
        if fact is not None and (op.name in LOSSES or op.name in MINUS) and sorted(learns) == [False, True]:
            target = op.given[learns.index(False)]
            its = self.known.get(target)
            if its and any(_goes_on(mine, its) for mine in self.windows) and _standard(target):
                self.note("D37", tuple(target.shape))
            return
        if fact is None and op.name in MINUS and not any(learns):
            fact = _window(op.given[0]), op.given[0]
        for r in op.results if fact else ():
            self.known.put(r, fact)

    def backward(self, loss: Tensor) -> None:
        self.windows = []

    def close(self) -> None:
        self.known.by_id.clear()
        self.windows = []


def _window(t: Tensor) -> Window | None:
    """A slice of the last dimension, or of the first of a series with one column."""
    whole = t._base
    if whole is None or not t.dim() or not whole.dim() or not t.numel() or not plain(whole):
        return None
    length = t.shape[-1] if t.dim() > 1 and t.shape[-1] > 1 else t[0].numel() * len(t) if t.dim() < 3 else t.shape[1]
    return whole.data_ptr(), t.storage_offset(), length


def _goes_on(mine: tuple, its: tuple) -> bool:
    """Whether one window begins where the other ends, by their storage or by their numbers."""
    (window, x), (next_window, y) = mine, its
    if x.dim() < 2 or y.dim() < 2:
        return bool(window and next_window) and (window[0], window[1] + window[2]) == next_window[:2]
    if x.dim() != y.dim() or x.dim() not in (2, 3) or len(x) != len(y) or len(x) < ROWS or x.device != y.device:
        return False
    if x.dim() == 3 and 1 not in x.shape[1:] or x[0].numel() < LENGTH or x is y or not x.is_floating_point():
        return False
    x, y = x.flatten(1), y.flatten(1)
    change = JUMP * (x[:, 1:] - x[:, :-1]).abs().mean(1)
    own, strange = ((first - x[:, -1]).abs() <= change for first in (y[:, 0], y[:, 0].roll(1)))
    return float(own.float().mean()) >= MOST and float(strange.float().mean()) <= FEW


def _standard(x: Tensor) -> bool:
    """Whether each row has the mean 0 and the spread 1."""
    if x.dim() not in (2, 3) or not x.is_floating_point() or len(x) < ROWS or x.numel() > LOOKED:
        return False
    if x.dim() == 3 and 1 not in x.shape[1:] or x[0].numel() < LENGTH:
        return False
    rows = x.detach().flatten(1).float()
    if float(rows[0].mean().abs()) > LEVEL:  # nearly always already here
        return False
    centred = bool((rows.mean(1).abs() < LEVEL).all())
    return centred and any(bool(((rows.std(1, correction=c) - 1).abs() < SPREAD).all()) for c in (0, 1))
