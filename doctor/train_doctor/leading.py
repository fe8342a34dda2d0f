"""Does the answer to a text hang on how much padding stands before it?

    tokenizer.padding_side = "left"
    model(input_ids, attention_mask=mask)              place 0 is the first padding, and a text begins at 3, at 7, at 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids, attention_mask=mask, position_ids=positions)

A mask hides padding from attention, and a table of positions counts it all the same. Where rows are padded on the left
by different numbers of places, one call is made again in eval mode with more columns of that padding before all rows,
as a longer text in the batch would make them. Relative positions (rotary, ALiBi, T5's), those that are counted from the
mask, from the number of pads or from the end give the same answers; those that are counted from the left do not.

Footguns: padding that is seen moves answers as well, and so do live draws; so the padding is filled with other tokens
first, under other draws, and nothing may move. What hangs on the length alone moves too, but not from columns before
the text to columns behind it. A state that is carried along a row knows how long it is: models with one are left alone.
In 16 bits, sums in another order move answers too. Whatever else is given must grow with the row: places that all rows
share count on, and what holds one value in all of the padding gets more of it. With anything else that has a place for
each token (a bias for attention, three axes of positions), or if a table might end, nothing can be said. And on a GPU
a table that is asked for what it lacks ends the whole run, so that is not left to an exception.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train_doctor import probes, replays
from train_doctor.draws import generators, restore
from train_doctor.evidence import Call, Evidence
from train_doctor.reading import on_cpu, readable

CLEAR, ROUGH = 1e-2, 0.25  # spreads of the logits: the mean move of a text's tokens; the same in 16 bits
COLUMNS = 2  # of padding, put before the text
TARGETS = ("labels", "targets", "target", "y")
WORDS = ("mamba", "rwkv", "ssm", "recurren", "retention", "deltanet", "batchnorm", "expert", "moe", "router")


class Moved(NamedTuple):
    """How far the answers moved, in spreads, what is still rounding, and the padding of the rows."""

    by: float
    limit: float
    least: int
    most: int


def run(e: Evidence) -> None:
    """Fill e.probes["leading"], before the first step."""
    for call in (c for c in e.forwards if c.round == 0 and c.ids is not None and (c.args or c.kwargs)):
        if (pads := padding(call)) is not None:
            e.probes["leading"] = None
            if not _carries(e) and call.decoder is None:
                e.probes["leading"] = _moved(e, call, pads)
            return


def padding(call: Call) -> Tensor | None:
    """Padding before the text of a row, by a mask that is given; None where all rows have as much of it."""
    ids = call.ids
    named = call.mask is not None and call.mask.layout == torch.strided
    masks = [(call.mask, (0,))] if named else [(m, (0, 1)) for m in _masks(call)]
    for mask, hides in masks:
        for value in hides if mask.shape == ids.shape else ():
            run = (mask == value).int().cumprod(1).bool()
            uneven = bool((run.sum(1) != run.sum(1)[:1]).any()) and not bool(run.all(1).any())
            if uneven and bool((ids[run] == ids[run][0]).all()):
                return run
    return None


def _masks(call: Call) -> Iterator[Tensor]:
    """What has a zero or a one for each token."""
    for x in _tensors((call.args, call.kwargs)):
        plain = readable(x) and x.layout == torch.strided and x.numel() and x.shape == call.ids.shape
        if plain and bool(((x == 0) | (x == 1)).all()):
            yield on_cpu(x)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict | list | tuple):
        for x in given.values() if isinstance(given, dict) else given:
            yield from _tensors(x)


def _carries(e: Evidence) -> bool:
    """Whether tokens meet outside of attention: states, convolutions, experts, statistics of a batch."""
    kinds = nn.RNNBase | nn.Conv1d | nn.RNNCellBase
    named = (f"{name} {type(m).__name__}".lower() for name, m in e.modules())
    return any(isinstance(m, kinds) for _, m in e.modules()) or any(word in name for name in named for word in WORDS)


def _fits(e: Evidence, places: int) -> bool:
    """Whether no table of places, or of distances both ways, ends before a row so long.

    On the CPU an exception tells. Two places of a table may be kept for something else.
    """
    longest = getattr(e.config, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < places:
        return False
    ends = {*range(places - COLUMNS, places + 2), *range(2 * (places - COLUMNS) - 1, 2 * places + 2, 2)}
    kinds = [m for _, m in e.modules() if isinstance(m, nn.Embedding) or not type(m).__module__.startswith("torch.nn.")]
    held = [x for m in kinds for x in (*m._parameters.values(), *m._buffers.values()) if isinstance(x, Tensor)]
    return not any(x.device.type != "cpu" and size in ends for x in held for size in x.shape[:2])


def _moved(e: Evidence, call: Call, pads: Tensor) -> Moved | None:
    places = call.ids.shape[1]
    if not _fits(e, places + COLUMNS) or any(map(replays.packed, e.models)):
        return None
    order = pads.sum(1).argsort(descending=True, stable=True)  # few rows may be replayed
    pads = pads[order]
    many = pads.sum(1)
    ordered = _ordered(call, order)
    longer = [_Longer(ordered, pads, behind).call() for behind in (False, True)]
    filled = torch.where(pads, probes._other(e, ordered, pads, special=True), ordered.ids)
    with replays.resting(m for _, m in e.modules()):
        before = probes._replay(e, ordered, ordered.ids)
        first = probes._replay(e, longer[0], longer[0].ids)[:, COLUMNS:]
        second = probes._replay(e, longer[1], longer[1].ids)[:, :places]
        state = generators()
        try:
            torch.manual_seed(1 + torch.initial_seed() % 2**31)
            unseen = probes._replay(e, ordered, filled)
        finally:
            restore(state)
    rows = len(first)
    text, before = ~pads[:rows], before[:rows]
    rough = call.autocast is not None or any(p.element_size() < 4 for p in call.module().parameters())
    limit = ROUGH if rough or before.dtype != torch.float32 else CLEAR
    if float(probes._moved(before, unseen[:rows])[text].mean()) > limit / 4:
        return None
    by = min(float(probes._moved(x, first)[text].mean()) for x in (before, second))
    return Moved(by, limit, int(many.min()), int(many.max()))


def _ordered(call: Call, order: Tensor) -> Call:
    """The call with its rows in this order."""

    def put(x: Any, name: str) -> Any:
        of_rows = isinstance(x, list | tuple) and len(x) == len(order)
        if of_rows or isinstance(x, Tensor) and not (readable(x) and x.layout == torch.strided):
            raise probes.Unfit
        return x[order.to(x.device)] if isinstance(x, Tensor) and x.dim() and len(x) == len(order) else x

    return dataclasses.replace(call, args=_each(call.args, put), kwargs=_each(call.kwargs, put), ids=call.ids[order])


def _each(x: Any, put: Callable, name: str = "") -> Any:
    """The same containers, with what is in them exchanged; an entry of a dict by its name, and plain numbers whole."""
    if isinstance(x, dict):
        return {key: _each(value, put, str(key)) for key, value in x.items()}
    if isinstance(x, list | tuple) and any(isinstance(value, Tensor | dict | list | tuple) for value in x):
        made = [_each(value, put, name) for value in x]
        return made if isinstance(x, list) else tuple(made)
    return put(x, name)


class _Longer:
    """A call with more columns of its padding, before the text or behind it; Unfit where that cannot be made."""

    def __init__(self, call: Call, pads: Tensor, behind: bool):
        self.given, self.pads, self.behind = call, pads, behind
        self.rows, self.places = pads.shape

    def call(self) -> Call:
        args, kwargs = _each(self.given.args, self.put), _each(self.given.kwargs, self.put)
        return dataclasses.replace(self.given, args=args, kwargs=kwargs, ids=self.put(self.given.ids, ""))

    def put(self, x: Any, name: str) -> Any:
        if not isinstance(x, Tensor):
            return self.number(x)
        if self.places not in x.shape:
            return self.of_rows(x)
        shared = x.dim() == 1 and len(x) != self.rows or x.dim() == 2 and bool((x == x[:1]).all())
        if shared and x.shape[-1] == self.places:
            return self.shared(x)
        if x.shape[:2] != self.pads.shape or self.places in x.shape[2:]:
            raise probes.Unfit
        held = x[:1, 0] if name in TARGETS else x[self.pads.to(x.device)]
        if not bool((held == held[:1]).all()):
            raise probes.Unfit
        more = held[:1, None].expand(self.rows, COLUMNS, *x.shape[2:])
        return torch.cat([x, more] if self.behind else [more, x], 1)

    def number(self, x: Any) -> Any:
        """What may be the length of a row would have to grow."""
        if any(type(n) is int and n == self.places for n in (x if isinstance(x, list | tuple) else [x])):
            raise probes.Unfit
        return x

    def of_rows(self, x: Tensor) -> Tensor:
        """Of numbers for each row, only the length of its text and where that begins are known."""
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            return x
        pads, one = self.pads.sum(1).to(x.device), x.dim() > 0 and len(x) == x.numel() == self.rows
        if x.dim() == 0:
            self.number(int(x))
        elif one and torch.equal(x.flatten().long(), pads):
            return x if self.behind else x + COLUMNS
        elif len(x) == self.rows and not (one and torch.equal(x.flatten().long(), self.places - pads)):
            raise probes.Unfit
        return x

    def shared(self, x: Tensor) -> Tensor:
        """Places that all rows share, which count up or down."""
        known = x.long() if x.dtype == torch.bool else x
        steps = known[..., 1:] - known[..., :-1]
        step = steps.flatten()[:1]
        if not len(step) or not bool((steps == step).all()) or abs(float(step)) > 1:
            raise probes.Unfit
        count = torch.arange(1, COLUMNS + 1, device=x.device, dtype=known.dtype)
        if step < 0:
            return torch.cat([(known[..., :1] - step * count).flip(-1), known], -1)
        return torch.cat([known, known[..., -1:] + step * count], -1).to(x.dtype)
