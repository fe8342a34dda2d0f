"""Language models whose texts stand in columns, (T, B): what their targets and their layers make of time.

    x, y = data[i : i + T], data[i + 1 : i + 1 + T]         (T, B): the next tokens
    x, y = data[i : i + T], data[i + 2 : i + 2 + T]         one too far
    x, y = data[i + 1 : i + 1 + T], data[i : i + T]         those before
    F.cross_entropy(scores.view(-1, V), y.t().reshape(-1))  scores (T, B, V) and targets (B, T)
    nn.LSTM(..., bidirectional=True)                        sees what it is asked for
    nn.LSTM(..., batch_first=True)                          runs from text to text

Rows (B, T) are read elsewhere (fingerprint.py). Here the ids that a table was given are laid over the targets along
their first dimension. It is the one of time if the targets are the ids, moved along it, and are not along the second.

Footguns: a text that repeats itself is its own next text, so many different tokens must be asked for, and nearly all of
them must fit. A second head may foretell the token after the next, beside one for the next. And a model that is run
backwards (flip) is asked for those before.
"""

from torch import Tensor

from train_doctor.eye import Eye, Known, Op, Watcher
from train_doctor.watchers.carried_states import NETWORKS
from train_doctor.watchers.first_states import BATCH_FIRST, BOTH

FLAT, LOSSES = {"view", "reshape", "flatten"}, {"cross_entropy", "nll_loss"}
LEAST, VARIETY, SHARE = 3, 6, 0.97  # columns and places; different targets; of them that fit


class TimeFirst(Watcher):
    """Known are the targets (T, B) that were flattened."""

    names = FLAT | LOSSES | NETWORKS | {"embedding", "flip"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known = Known(self)
        self.ids: Tensor | None = None
        self.ways: list[tuple[bool, bool, str]] = []  # of recurrent layers: batch_first, bidirectional, the name
        self.shifts: set[int] = set()  # of the targets of this step
        self.flipped = False

    def saw(self, op: Op) -> None:
        if op.name == "embedding":
            ids = op.given[0]
            if ids.dim() == 2 and not ids.is_floating_point() and min(ids.shape) >= LEAST:
                self.ids = ids
        elif op.name == "flip":
            self.flipped = self.flipped or op.given[0].is_floating_point()
        elif op.name in NETWORKS:
            if len(op.args) > BATCH_FIRST and isinstance(op.args[BATCH_FIRST], bool):
                self.ways.append((op.args[BATCH_FIRST], bool(op.args[BOTH]), op.name))
        elif op.name in FLAT:
            x = op.given[0]
            if x.dim() == 2 and not x.is_floating_point() and op.results and op.results[0].dim() == 1:
                self.known.put(op.results[0], x)
        elif len(op.given) > 1 and op.given[0].requires_grad and self.ids is not None:
            self._judge(op.given[1])

    def _judge(self, target: Tensor) -> None:
        rows = self.known.get(target)
        x = self.ids
        if rows is None or rows.device != x.device or len(rows.unique()) < VARIETY:
            return
        if rows.shape == x.shape[::-1] and len(set(x.shape)) > 1 and _moved(x, rows.t(), 1):
            self.note("F3 turned", tuple(x.shape))
        if rows.shape != x.shape or _moved(x.t(), rows.t(), 1):
            return
        for shift in (1, 2, -1):
            if _moved(x, rows, shift):
                self._along(shift, tuple(x.shape))

    def _along(self, shift: int, shape: tuple[int, ...]) -> None:
        self.shifts.add(shift)
        for batch_first, both, name in self.ways:
            if batch_first:
                self.note("S21 columns", (name, shape))
            elif both and shift == 1:
                self.note("F11 both ways", name)

    def backward(self, loss: Tensor) -> None:
        if self.shifts and 1 not in self.shifts and not self.flipped:
            self.note("F3 in columns", min(self.shifts))
        self.ids, self.ways, self.shifts, self.flipped = None, [], set(), False

    def close(self) -> None:
        self.known.by_id.clear()
        self.ids = None


def _moved(x: Tensor, y: Tensor, shift: int) -> bool:
    """Whether y is x, so many places later along the first dimension."""
    here, there = (x[shift:], y[:-shift]) if shift > 0 else (x[:shift], y[-shift:])
    return len(here) >= LEAST and bool((here == there).float().mean() > SHARE)
