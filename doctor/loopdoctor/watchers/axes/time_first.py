"""Language models whose texts stand in columns, (T, B): what their targets and their layers make of
time.

    x, y = data[i : i + T], data[i + 1 : i + 1 + T]         (T, B): the next tokens
    x, y = data[i : i + T], data[i + 2 : i + 2 + T]         one too far
    x, y = data[i + 1 : i + 1 + T], data[i : i + T]         those before
    F.cross_entropy(scores.view(-1, V), y.t().reshape(-1))  scores (T, B, V) and targets (B, T)
    nn.LSTM(..., bidirectional=True)                        sees what it is asked for
    nn.LSTM(..., batch_first=True)                          runs from text to text

Rows (B, T) are read elsewhere (fingerprint.py). Here the ids that a table was given are laid over
the targets along their first dimension. It is the one of time if the targets are the ids, moved
along it, and are not along the second.

What a table gave for the ids is followed place by place to the scores, for only what these hang on
is judged: a layer that runs both ways over a source, or for tags, tells nothing of them. It is also
known whether its first two axes have changed places since, and have come back.

Footguns: a text that repeats itself is its own next text, so many different tokens must be asked
for, and nearly all of them must fit. A second head may foretell the token after the next, beside
one for the next. A model that is run backwards (flip, or a cell in a loop, which ends what is
followed) is asked for those before. And a model may turn ids of rows for its layers, and turn its
answer back.
"""

from typing import NamedTuple

from torch import Tensor

from loopdoctor.eye import Eye, Known, Op, Watcher
from loopdoctor.watchers.axes.crossed_rows import TURNS
from loopdoctor.watchers.axes.in_order import NETWORKS

BOTH, BATCH_FIRST = 7, 8  # places of two arguments of the function of a recurrent network

FLAT, LOSSES = {"view", "reshape", "flatten"}, {"cross_entropy", "nll_loss"}
# places, and keep the shape
MOVES = {"flip", "flipud", "roll", "index_select", "gather", "take_along_dim"}
LEAST, VARIETY, SHARE = 3, 6, 0.97  # columns and places; different targets; of them that fit


class Layer(NamedTuple):
    """A recurrent one that was given what was known."""

    name: str
    wrong: bool  # batch_first=True, and time was first
    both: bool  # ways


class Fact(NamedTuple):
    """What is known of a tensor with one row for each place of ids, (T, B, ...) or (T * B, ...)."""

    ids: Tensor
    turned: bool  # (B, T, ...)
    layers: frozenset[Layer]  # that it hangs on


class TimeFirst(Watcher):
    """Known are the targets (T, B) that were flattened, and what hangs on ids, place by place."""

    begins = FLAT | LOSSES | {"embedding", "flip"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.known, self.facts = Known(self), Known(self)
        self.shifts: set[int] = set()  # of the targets of this step
        self.flipped = False

    def saw(self, op: Op) -> None:
        if op.name == "embedding":
            ids = op.given[0]
            if ids.dim() == 2 and not ids.is_floating_point() and min(ids.shape) >= LEAST:
                self.facts.put(op.result, [Fact(ids, False, frozenset())])
            return
        self.flipped = self.flipped or op.name == "flip" and op.given[0].is_floating_point()
        if op.name in FLAT:
            x = op.given[0]
            if (
                x.dim() == 2
                and not x.is_floating_point()
                and op.results
                and op.results[0].dim() == 1
            ):
                self.known.put(op.results[0], x)
        if op.name in LOSSES:
            for fact in (
                self.facts.get(op.given[0]) or ()
                if len(op.given) > 1 and op.given[0].requires_grad
                else ()
            ):
                self._judge(fact, op.given[1])
        elif op.name not in MOVES and (op.name != "__getitem__" or len(op.given) == 1):
            self._follow(op)

    def _follow(self, op: Op) -> None:
        # what they are given, and answer; the rest are states
        first = 1 if op.name in NETWORKS else None
        facts = [fact for t in op.given[:first] for fact in self.facts.get(t) or ()]
        for r in op.results[:first] if facts else ():
            known: dict[int, Fact] = {}  # of ids
            for now in [now for fact in facts if (now := _now(op, fact, r))]:
                layers = known[id(now.ids)].layers if id(now.ids) in known else frozenset()
                known[id(now.ids)] = now._replace(layers=layers | now.layers)
            if known:
                self.facts.put(r, list(known.values()))

    def _judge(self, fact: Fact, target: Tensor) -> None:
        rows, x = self.known.get(target), fact.ids
        if rows is None or rows.device != x.device or len(rows.unique()) < VARIETY:
            return
        if (
            rows.shape == x.shape[::-1]
            and len(set(x.shape)) > 1
            and not fact.turned
            and _moved(x, rows.t(), 1)
        ):
            self.note("F3 turned", tuple(x.shape))
        if rows.shape != x.shape or _moved(x.t(), rows.t(), 1):
            return
        for shift in (1, 2, -1):
            if _moved(x, rows, shift):
                self._along(shift, fact)

    def _along(self, shift: int, fact: Fact) -> None:
        self.shifts.add(shift)
        for layer in fact.layers:
            if layer.wrong:
                self.note("S21 columns", (layer.name, tuple(fact.ids.shape)))
            elif layer.both and shift == 1:
                self.note("F11 both ways", layer.name)

    def backward(self, loss: Tensor) -> None:
        if self.shifts and 1 not in self.shifts and not self.flipped:
            self.note("F3 in columns", min(self.shifts))
        self.shifts, self.flipped = set(), False

    def close(self) -> None:
        self.known.by_id.clear()
        self.facts.by_id.clear()


def _now(op: Op, fact: Fact, r: Tensor) -> Fact | None:
    """Return what is known of a result, if each of its rows belongs to one place."""
    sizes = tuple(fact.ids.shape[::-1] if fact.turned else fact.ids.shape)
    if not r.is_floating_point():
        return None
    if op.name in TURNS:
        swapped = tuple(r.shape[:2]) == sizes[::-1] != sizes
        return fact._replace(turned=not fact.turned) if swapped else None
    if tuple(r.shape[:2]) != sizes and (r.dim() != 2 or len(r) != fact.ids.numel()):
        return None
    # and not packed: (data, sizes, ...)
    plain = op.name in NETWORKS and r.dim() == 3 and len(op.args) > BATCH_FIRST
    if plain and isinstance(op.args[BATCH_FIRST], bool):
        layer = Layer(op.name, op.args[BATCH_FIRST] and not fact.turned, bool(op.args[BOTH]))
        return fact._replace(layers=fact.layers | {layer})
    return fact


def _moved(x: Tensor, y: Tensor, shift: int) -> bool:
    """Whether y is x, so many places later along the first dimension."""
    here, there = (x[shift:], y[:-shift]) if shift > 0 else (x[:shift], y[-shift:])
    return len(here) >= LEAST and bool((here == there).float().mean() > SHARE)
