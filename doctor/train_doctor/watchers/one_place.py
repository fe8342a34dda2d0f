"""Positions that are one and the same for all places of a text, so a table of positions tells no order.

    positions = torch.zeros(T, dtype=torch.long)        torch.arange(T) was meant
    h = words(ids) + places(positions)

The table has a row for each of T places or more, and every place looks up the same one. Angles of rotary positions are
one and the same then: position_ids are all 0.

Footgun: types of tokens, languages and speakers are the same all along a text, and their tables may be large; the time
of a noise has one angle at all places. So nothing is said where another table was asked for rising numbers, nor where
angles (rotary) turn the queries, nor where vectors of places (T, D) are added to all rows, nor where a recurrent layer
or a convolution knows the order by itself.
"""

from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher
from train_doctor.watchers.operators import PLUS

PLACES = 8
ORDERED = {"gru", "lstm", "rnn_tanh", "rnn_relu", "conv1d", "conv2d"}  # know the order by themselves


class OnePlace(Watcher):
    names = begins = {"embedding", "cos"} | PLUS | ORDERED

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.one: tuple[int, int] | None = None  # places, and rows of their table
        self.words = self.ordered = False

    def saw(self, op: Op) -> None:
        if op.name in ORDERED or op.name in PLUS:
            self.ordered = self.ordered or op.name in ORDERED or _places_added(op.given)
            return
        if op.name == "cos":
            x = op.given[0] if op.given else None
            if x is not None and x.dim() == 3 and x.shape[1] >= PLACES and bool((x == x[:, :1]).all()):
                self.one = x.shape[1], 0  # (B, T, features): one angle for all places
            else:
                self.ordered = True
            return
        if len(op.given) < 2 or not self.eye.grad:
            return
        ids, table = op.given[:2]
        few = not 0 < ids.dim() < 3 or ids.shape[-1] < PLACES or not len(ids)
        if few or ids.is_floating_point() or not table.requires_grad:
            return
        row = ids.reshape(-1, ids.shape[-1])
        if bool((row == row[0, 0]).all()):
            if len(table) >= ids.shape[-1]:
                self.one = ids.shape[-1], len(table)
        elif bool((row[0, 1:] > row[0, :-1]).all()):
            self.ordered = True
        else:
            self.words = True

    def backward(self, loss: Tensor) -> None:
        if self.one and self.words and not self.ordered:
            self.note("S65", self.one)
        self.one, self.words, self.ordered = None, False, False


def _places_added(given: list[Tensor]) -> bool:
    """(T, D), a vector for each place and not one for all, to (B, T, D)."""
    if len(given) != 2 or {t.dim() for t in given} != {2, 3}:
        return False
    places, rows = sorted(given, key=Tensor.dim)
    fits = places.shape == rows.shape[1:] and len(places) >= PLACES and places.is_floating_point()
    return fits and bool(places.isfinite().all()) and bool((places != places[:1]).any())  # or it is a mask
