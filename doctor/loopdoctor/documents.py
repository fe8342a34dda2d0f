"""Where the documents of a packed row begin, by positions that begin anew.

    ids        0 17 4 4 9   0 12 5 5   0 11 3 8 8 2
    positions  0  1 2 3 4   0  1 2 3   0  1 2 3 4 5

Positions that are given by name tell it. Others are looked for among what the model is given in
another place of its arguments, and what its tables are asked for: numbers that rise by one and fall
back to the least of them.

Footgun: other things are counted so too. Columns of a picture fall back at the same places in each
row, and the second part of a pair (the sound of a text) once in a row. Digits of a number and words
of a turn stand beside a position that counts on, or a number for the turn. So, but for positions
that are given by name, a row needs three documents, and rows other ones; nothing else may be looked
up that counts on; and where no argument is called position_ids, documents must begin or end with
tokens that stand nowhere else, or their numbers must be given. A replay then shows whether the row
has an order of its own: angles (rotary) or a table of places that go on over the borders.
"""

import inspect
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loopdoctor.evidence import Call
from loopdoctor.reading import on_cpu, readable

NAME = "position_ids"  # others, such as position, are also said of a beat in its bar
ROWS = 3  # documents of a row, at least
TIMES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
PLUS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
OFTEN = 4  # times that a token at a border stands there, on average


class Packed(NamedTuple):
    starts: Tensor  # (B, T), but for those at place 0
    named: bool  # by an argument
    text: Tensor  # (B, T), without what rows are filled up with


def packed(call: Call) -> Packed | None:
    """Return the documents of a call whose positions begin anew inside a row."""
    if call.ids is None or call.ids.shape[1] < ROWS:
        return None
    if call.positions is not None:
        starts = resets(call) if call.positions.shape[-1] == call.ids.shape[1] else None
        text = torch.ones_like(call.ids, dtype=torch.bool)
        return Packed(starts, True, text) if starts is not None and bool(starts.any()) else None
    given = dict(_given(call))
    looked = [on_cpu(x) for x in call.looked if not x.is_floating_point()]
    for name, p in (
        *given.items(),
        *(("", x) for x in looked if x.dim() == 2 and x.shape == call.ids.shape),
    ):
        starts = None if torch.equal(p, call.ids) else _restarts(p)
        if starts is None or _counts_on(looked, starts):
            continue
        text = _text(p, starts)
        if (
            name == NAME
            or _bordered(call.ids, starts, text)
            or any(_numbers(x, starts) for x in given.values())
        ):
            return Packed(starts, name == NAME, text)
    return None


def resets(call: Call) -> Tensor:
    """Where inside a row positions begin anew with a document of at least two tokens."""
    p = call.positions.expand_as(call.ids) if call.positions.shape[0] == 1 else call.positions
    starts = torch.zeros_like(p, dtype=torch.bool)
    starts[:, 1:-1] = (
        (p[:, 1:-1] == p[:, :1]) & (p[:, 1:-1] < p[:, :-2]) & (p[:, 2:] == p[:, 1:-1] + 1)
    )
    if call.mask is not None and call.mask.shape == p.shape:
        starts &= call.mask != 0
    return starts


def marks(ids: Tensor, starts: Tensor, text: Tensor) -> Tensor:
    """Tokens by which a model may tell where documents begin and end: a few that stand at all of
    the borders.
    """
    kinds = [
        ids[where].unique() for where in (starts, _before(starts)) if _borders(ids, where, text)
    ]
    kinds += [kind for where in (starts, _before(starts)) if len(kind := ids[where].unique()) <= 2]
    return torch.cat(kinds or [ids.new_empty(0)])


class Order(TorchFunctionMode):
    """Whether a model, while this is open, uses places that go on over the borders of documents."""

    def __init__(self, starts: Tensor):
        super().__init__()
        self.starts, self.tables, self.goes_on = starts, [], False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if (
            name in TIMES | PLUS
            and len(args) == 2
            and all(isinstance(x, Tensor) for x in args)
            and not self.goes_on
        ):
            x, table = args if args[0].numel() >= args[1].numel() else args[::-1]
            if self._laid(x, table):
                self.goes_on = self._added(x, table) if name in PLUS else self._turned(table)
        return func(*args, **(kwargs or {}))

    def _laid(self, x: Tensor, table: Tensor) -> bool:
        """Whether a table with numbers for each place of a row is used for several rows, or
        heads.
        """
        places, shape = self.starts.shape[1], table.shape[:-1]
        fits = (
            1 < table.dim() <= x.dim()
            and table.numel() < x.numel()
            and table.shape[-1] == x.shape[-1]
        )
        numbers = table.is_floating_point() or table.is_complex()
        return (
            fits and numbers and [*shape].count(places) == 1 and table.shape[-1] not in (1, places)
        )

    def _added(self, x: Tensor, table: Tensor) -> bool:
        """Return a table of places that all rows share."""
        return x.dim() == 3 and table.shape[-2] == self.starts.shape[1] and self._on(table)

    def _turned(self, table: Tensor) -> bool:
        """Angles, as complex numbers of size 1, or as the second of cosines and sines."""
        alike = [t for t in self.tables if t.shape == table.shape]
        self.tables = [*self.tables[-7:], table]
        sizes = (
            [table.abs()]
            if table.is_complex()
            else [t.float().square() + table.float().square() for t in alike]
        )
        return any(bool((size - 1).abs().max() < 0.03) for size in sizes) and self._on(table)

    def _on(self, table: Tensor) -> bool:
        """Whether where a document begins is another place than where the row does."""
        at = [*table.shape[:-1]].index(self.starts.shape[1])
        rows = table.movedim(at, 0)
        own = rows.dim() > 2 and at > 0 and 1 < rows.shape[1] == min(len(table), len(self.starts))
        begins = self.starts[: rows.shape[1]] if own else self.starts[:1]
        numbers = rows.flatten(2) if own else rows.flatten(1)[:, None]
        row, place = begins.nonzero(as_tuple=True)
        return len(row) > 0 and not bool(
            torch.isclose(numbers[place, row], numbers[0, row]).all(1).any()
        )


def _given(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Whole numbers that are given beside the ids, one for each token, by the name of the
    argument.
    """
    module = call.module()
    try:
        names = [*inspect.signature(module.forward).parameters]
    except (TypeError, ValueError, AttributeError):
        names = []
    inner = call.args[0] if len(call.args) == 1 and isinstance(call.args[0], dict) else {}
    places = [(names[n] if n < len(names) else f"{n}", x) for n, x in enumerate(call.args)]
    for name, x in (*places, *inner.items(), *call.kwargs.items()):
        plain = readable(x) and x.layout == torch.strided and not x.is_floating_point()
        if plain and x.shape == call.ids.shape:
            yield str(name), on_cpu(x)


def _restarts(p: Tensor) -> Tensor | None:
    """Where numbers that rise by one begin anew, in rows of several documents that are not all
    alike.
    """
    p, least = p.long(), int(p.min())
    steps = p[:, 1:] - p[:, :-1]
    anew = (p[:, 1:] == least) & (steps < 0)
    if not bool((anew | (steps == 1) | (p[:, 1:] == least)).all()):
        return None
    starts = torch.zeros_like(p, dtype=torch.bool)
    starts[:, 1:-1] = anew[:, :-1] & (steps[:, 1:] == 1)
    alike = bool((starts == starts[:1]).all()) if len(p) > 1 else len(set(_lengths(starts[0]))) == 1
    return None if alike or int(starts.sum(1).max()) < ROWS - 1 else starts


def _lengths(starts: Tensor) -> list[int]:
    at = starts.nonzero()[:, 0]
    return (at[1:] - at[:-1]).tolist() if len(at) > 1 else [0]


def _counts_on(looked: list[Tensor], starts: Tensor) -> bool:
    """Whether a table is asked for places of the whole row, or for numbers of the documents."""
    places = starts.shape[1]
    for x in looked:
        rows = x.reshape(-1, places) if x.numel() and x.numel() % places == 0 else None
        if rows is not None and bool((rows[:, 1:] - rows[:, :-1] == 1).all()):
            return True
        if rows is not None and rows.shape == starts.shape and _numbers(rows, starts):
            return True
    return False


def _numbers(x: Tensor, starts: Tensor) -> bool:
    """Whether something is one number within each document and another one in the next."""
    changes = x[:, 1:] != x[:, :-1]
    return bool((changes >= starts[:, 1:]).all()) and int(changes.sum()) <= int(
        starts.sum()
    ) + 2 * len(x)


def _text(p: Tensor, starts: Tensor) -> Tensor:
    """All but the end of a row whose numbers stay at their least: it is filled up."""
    stays = (p == p.min()) & ~starts
    return ~stays.flip(1).int().cummin(1).values.bool().flip(1)


def _bordered(ids: Tensor, starts: Tensor, text: Tensor) -> bool:
    """Whether each document begins, or each ends, with one of a few tokens, which stand nowhere
    else inside.
    """
    return any(_borders(ids, where, text) for where in (starts, _before(starts)))


def _borders(ids: Tensor, where: Tensor, text: Tensor) -> bool:
    tokens = ids[where].unique()
    few = len(tokens) <= max(1, int(where.sum()) // OFTEN)
    return few and not bool(torch.isin(ids, tokens)[:, 1:-2][(text & ~where)[:, 1:-2]].any())


def _before(starts: Tensor) -> Tensor:
    return torch.cat([starts[:, 1:], torch.zeros_like(starts[:, :1])], 1)
