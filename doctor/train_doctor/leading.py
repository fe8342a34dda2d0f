"""Does the answer to a text hang on how much padding stands before it?

    tokenizer.padding_side = "left"
    model(input_ids, attention_mask=mask)              place 0 is the first padding, and a text begins at 3, at 7, at 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(input_ids, attention_mask=mask, position_ids=positions)

A mask hides padding from attention, and a table of positions counts it all the same. Where rows are padded on the left
by different numbers of places, one call is made again in eval mode with each row moved to the left, so that its padding
stands behind it. Relative positions (rotary, ALiBi, T5's), and those that are counted from the mask, give the same
answers; absolute ones do not.

Footguns: padding that is seen moves answers as well, and so do live draws; so the padding is filled with other tokens
first, under other draws, and nothing may move. A state that is carried along a row knows how long it is: models with
one are left alone. In 16 bits, sums in another order move answers too.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train_doctor import probes
from train_doctor.evidence import Call, Evidence
from train_doctor.reading import on_cpu, readable

CLEAR, ROUGH = 1e-2, 0.25  # spreads of the logits: the mean move of a text's tokens; the same in 16 bits
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
    masks = [(call.mask, (0,))] if call.mask is not None else [(m, (0, 1)) for m in _masks(call)]
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
        if readable(x) and x.shape == call.ids.shape and bool(((x == 0) | (x == 1)).all()):
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


def _moved(e: Evidence, call: Call, pads: Tensor) -> Moved | None:
    order = pads.sum(1).argsort(descending=True, stable=True)  # few rows may be replayed
    pads, none = pads[order], torch.zeros(len(order), dtype=torch.long)
    many = pads.sum(1)
    as_it_was, moved = _laid(call, order, none), _laid(call, order, many)
    filled = torch.where(pads, probes._other(e, as_it_was, pads, special=True), as_it_was.ids)
    with _resting(e):
        before = probes._replay(e, as_it_was, as_it_was.ids)
        after = probes._replay(e, moved, moved.ids)
        state = probes.generators()
        try:
            torch.manual_seed(1 + torch.initial_seed() % 2**31)
            unseen = probes._replay(e, as_it_was, filled)
        finally:
            probes.restore(state)
    rows = len(before)
    text = ~pads[:rows] & (many[:rows, None] > 0)
    rough = call.autocast is not None or any(p.element_size() < 4 for p in call.module().parameters())
    limit = ROUGH if rough or before.dtype != torch.float32 else CLEAR
    if float(probes._moved(before, unseen)[text].mean()) > limit / 4:
        return None
    after = _rolled(after, -many[:rows])
    by = float(probes._moved(before, after)[text].mean())
    return Moved(by, limit, int(many.min()), int(many.max()))


def _laid(call: Call, order: Tensor, shift: Tensor) -> Call:
    """The call with its rows in this order, and each moved to the left by so many places."""
    rows, places = call.ids.shape

    def put(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: put(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [*map(put, x)] if isinstance(x, list) else tuple(map(put, x))
        if isinstance(x, Tensor) and x.dim() > 2 and x.shape[-2:] == (places, places):
            raise probes.Unfit  # a mask of pairs
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != rows:
            return x
        x = x[order.to(x.device)]
        alike = x.dim() == 2 and bool((x == x[:1]).all())  # places, and nothing of the text
        return x if alike or x.dim() < 2 or x.shape[1] != places else _rolled(x, shift)

    return dataclasses.replace(call, args=put(call.args), kwargs=put(call.kwargs), ids=_rolled(call.ids[order], shift))


def _rolled(x: Tensor, shift: Tensor) -> Tensor:
    return torch.stack([row.roll(-int(n), 0) for row, n in zip(x, shift)])


class _resting:
    """All modules of the models in eval mode, and back."""

    def __init__(self, e: Evidence):
        self.modes = [(m, m.training) for _, m in e.modules()]

    def __enter__(self):
        for m, _ in self.modes:
            m.training = False

    def __exit__(self, *_):
        for m, mode in self.modes:
            m.training = mode
