"""Replays of the first batch: what changes when something is changed that must not matter?

Some faults show neither in gradients nor in shapes: a model that looks ahead, packed documents that
see each other, padding that is not masked, a teacher that answers differently each time. One more
forward pass with a changed input shows them. Replays run without gradients before the first
optimizer step, on copies; generators are put back.

Footgun: a replay must repeat the call as it was made, autocast and all, or it measures the
difference it made itself.
"""

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopdoctor import decoders, documents, replays, series
from loopdoctor.draws import generators, restore
from loopdoctor.evidence import Backward, Call, Evidence
from loopdoctor.reading import read_call

TOKENS = 512  # in a replay, at most
# products of a token and a parameter in a replay, at most: seconds
WORK = {"cpu": 5e10, "other": 2e13}
# that read all places
ENCODERS = ("Bert", "BERT", "Roberta", "Deberta", "Electra", "Albert", "MPNet", "XLM")
IDS = ("input_ids", "ids", "idx", "tokens", "x")  # names that read_call looks for


def run(e: Evidence, *more: Callable[[Evidence], None]) -> None:
    """Fill e.probes before the first optimizer step, with those of other files as well."""
    replays.run(e)
    series.run(e)
    decoders.run(e)
    for probe in (_reach, _documents, _padding, _padding_of_rows, *more):
        with contextlib.suppress(Unfit):
            probe(e)
    e.probes.pop("replayed", None)


class Unfit(Exception):
    """This call cannot be repeated, or says nothing."""


# --------------------------------------------------------------------------------------- the probes
def _reach(e: Evidence) -> None:
    """How far ahead of its own position the model looks: 0 for a causal one, more for one that sees
    the future.

    e.probes["reach"]: None when the model sees everything at once, else the distance; "ahead" how
    much earlier logits at supervised positions changed.
    """
    event, call, reading = next(_readings(e), (None, None, None))
    if call is None:
        return
    asked = reading.targets != -100
    if call.mask is not None and call.mask.shape == asked.shape:
        asked &= call.mask != 0  # what padding attends to is nobody's concern
    many, length = call.ids.shape
    # the middle of the supervised part: a prefix may see all of itself
    cut = torch.full((many,), length)
    for row in range(many):
        at = asked[row].nonzero()[:, 0]
        if len(at) >= 4:
            cut[row] = at[len(at) // 2]
    later = torch.arange(length)[None, :] >= cut[:, None]
    changed = _other(e, call, later)
    if not bool((changed != call.ids).any()):
        return
    first = torch.where(changed != call.ids, torch.arange(length)[None, :], length).min(1).values
    before, after = _twice(e, call, changed)
    moved = _moved(before, after)
    rows = before.shape[0]
    asked, first = asked[:rows], first[:rows]
    e.probes["ahead"] = _most(moved, asked & (torch.arange(length)[None, :] < first[:, None]))
    hit = moved > _threshold(before)
    reaches = []
    for row in range(rows):
        at = (hit[row] & asked[row]).nonzero()[:, 0]
        if int(first[row]) < length and len(at):
            reaches.append(int(first[row]) - int(at[0]))
    e.probes["reach"] = max(reaches) if reaches else None


def _documents(e: Evidence) -> None:
    """Whether the last document of a row, whose positions begin anew, sees those before it."""
    calls = [
        c for c in e.forwards if c.round == 0 and c.ids is not None and c.args + tuple(c.kwargs)
    ]
    call, found = next(
        ((c, found) for c in calls if (found := documents.packed(c)) is not None), (None, None)
    )
    if call is None:
        return
    starts, length = found.starts, call.ids.shape[1]
    places = torch.arange(length)[None, :]
    last = torch.where(starts, places, 0).max(1, keepdim=True).values
    changed = _other(e, call, (places < last) & (last > 0))
    marks = documents.marks(call.ids, starts, found.text)
    changed = torch.where(
        torch.isin(call.ids, marks) | torch.isin(changed, marks), call.ids, changed
    )
    with documents.Order(starts) as order:
        before, after = _twice(e, call, changed)
    if order.goes_on and not found.named:
        return
    rows = before.shape[0]
    late = ((places >= last) & (last > 0) & found.text)[:rows]
    if call.mask is not None and call.mask.shape == call.ids.shape:
        late &= call.mask[:rows] != 0
    e.probes["packed"] = _most(_moved(before, after), late), _threshold(before), found.named


def _padding(e: Evidence) -> None:
    """Whether what stands in padding changes the logits of the tokens that count."""
    for call in (
        c for c in e.forwards if c.round == 0 and c.ids is not None and (c.args or c.kwargs)
    ):
        pads = padding(e, call)
        if pads is None or not bool(pads.any()):
            continue
        changed = _other(e, call, pads, special=True)
        before, after = _twice(e, call, changed)
        kept = ~pads[: before.shape[0]]
        e.probes["pads"] = (
            _most(_moved(before, after), kept),
            _threshold(before),
            call.mask is not None,
        )
        return


def _padding_of_rows(e: Evidence) -> None:
    """Ask the same of a model that has one answer for each row, or answers with other places.

    That is an encoder or a decoder that was given no mask and would take one. One that looks for
    the padding by itself (a causal classifier) is left alone.
    """
    for call in (
        c for c in e.forwards if c.round == 0 and c.ids is not None and (c.args or c.kwargs)
    ):
        decodes = bool(getattr(e.config, "is_encoder_decoder", False))
        if (
            "pads" in e.probes
            or not call.grad
            or call.mask is not None
            or call.logits is not None
            and not decodes
        ):
            continue
        module, pads = _module(call), padding(e, call)
        name = type(module).__name__
        looks = "SequenceClassification" in name and not any(kind in name for kind in ENCODERS)
        takes = "attention_mask" in inspect.signature(module.forward).parameters
        if pads is None or looks or not takes or call.kwargs.get("past_key_values") is not None:
            continue
        if int(pads.sum()) < 2:
            continue
        changed = _other(e, call, pads, special=True)
        before, again, after = (
            _rows_of(module, call, ids) for ids in (call.ids, call.ids, changed)
        )
        if before is None or len(before) != len(call.ids) or not torch.equal(before, again):
            continue
        size = float(before.std())
        if size > 0:
            moved = (before - after).abs().flatten(1).amax(1)[pads.any(1)] / size
            e.probes["pads"] = float(moved.max()), 100 * _threshold(before), False
        return


def _rows_of(module: nn.Module, call: Call, ids: Tensor) -> Tensor | None:
    """Return what a call answers to these ids in eval mode: its logits, or the first thing with
    numbers in it.
    """
    args, kwargs = _with_ids(call, ids, lambda x: x)
    device = next((p.device.type for p in module.parameters()), "cpu")
    if ids.numel() * sum(p.numel() for p in module.parameters()) > WORK.get(device, WORK["other"]):
        raise Unfit
    if replays.packed(module):
        raise Unfit
    with replays.resting(module.modules()), _as_made(module, call):
        out = replays.again(module, args, kwargs)
    logits = out.get("logits") if hasattr(out, "get") else None
    found = (
        logits
        if isinstance(logits, Tensor)
        else next((x for x in replays.floats(out) if x.dim()), None)
    )
    return None if found is None else found.detach().float()


def spoilt(e: Evidence) -> bool:
    """Whether a call or a loss of the round under way was not finite, and `fault` has something to
    look for.
    """
    if "broken" in e.probes:
        return False
    backwards, calls = e.every(Backward), e.every(Call)
    now = backwards[-1].round if backwards else 0
    late = itertools.takewhile(lambda event: event.round >= now, reversed(backwards))
    if any(b.value is not None and not math.isfinite(b.value) for b in late):
        return True
    return any(
        c.finite is False
        for c in itertools.takewhile(lambda event: event.round >= now, reversed(calls))
    )


def fault(e: Evidence) -> None:
    """Find the first module whose output is not finite although its input and weights are.

    The result is e.probes["broken"]. Only for a round in which something was not finite. A call
    without token ids is repeated whole, if it is no longer than seconds.
    """
    if "broken" in e.probes:
        return
    now = max((b.round for b in e.of(Backward)), default=0)
    spoilt = any(
        b.value is not None and not math.isfinite(b.value) for b in e.of(Backward, round=now)
    )
    calls = [c for c in e.forwards if c.round == now and (c.args or c.kwargs)]
    wrong = [
        c
        for c in calls
        if c.finite is False or spoilt and c.logits is None and c.vocabulary is None
    ]
    if not wrong:
        return
    with contextlib.suppress(Unfit):
        e.probes["broken"] = _first_broken(e, wrong[0])


class Broken(NamedTuple):
    """The first module that gave what is not finite; of one whose weights are not finite only the
    fact.
    """

    name: str
    kind: str
    fact: str  # its dtype and the largest number that went in, or "weights"
    inputs: str = ""  # what went in: shapes and ranges


def _first_broken(e: Evidence, call: Call) -> Broken | None:
    module = _module(call)
    if not all(
        bool(torch.isfinite(p.detach()).all()) for p in module.parameters() if p.is_floating_point()
    ):
        return Broken("", "", "weights")
    found: list[Broken] = []
    hooks = []
    # then hidden states have three dimensions, and masks, which may be -inf, others
    tokens = call.finite is False
    for name, m in module.named_modules():

        def look(m, args, kwargs, output, name=name):
            outs = [x for x in _floats(output) if x.dim() > 1 or not tokens]
            ins = [x for x in _floats((args, kwargs)) if x.numel() and (x.dim() == 3 or not tokens)]
            if found or not any(_bad(x) for x in outs) or any(_bad(x) for x in ins):
                return
            big = max((float(x.float().abs().max()) for x in ins), default=0.0)
            fact = f"{outs[0].dtype}".removeprefix("torch.") + f" {big:.3g}"
            ranges = ", ".join(
                f"{tuple(x.shape)} from {x.min():.3g} to {x.max():.3g}" for x in ins[:3]
            )
            found.append(Broken(name, type(m).__name__, fact, ranges))

        hooks.append(m.register_forward_hook(look, with_kwargs=True))
    try:
        _replay(e, call, call.ids) if tokens and call.ids is not None else _repeat(e, call, module)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _repeat(e: Evidence, call: Call, module: nn.Module) -> None:
    """Repeat a call that is no text: same modes, same autocast, no trace."""
    device = next((p.device.type for p in module.parameters()), "cpu")
    rows = max((len(x) for x in _floats((call.args, call.kwargs)) if x.dim()), default=1)
    if e.opaque or rows * sum(p.numel() for p in module.parameters()) > WORK.get(
        device, WORK["other"]
    ):
        raise Unfit
    with _as_made(module, call):
        replays.again(module, call.args, call.kwargs)


@contextlib.contextmanager
def _as_made(module: nn.Module, call: Call):
    """Restore the call's autocast and generators, without gradients; raise Unfit where it can't be
    made again.
    """
    state = generators()
    try:
        with replays.without_gradients(module, call.autocast):
            yield
    except Exception as error:  # whatever a user's forward raises
        raise Unfit from error
    finally:
        restore(state)


def _bad(x: Tensor) -> bool:
    return bool(torch.isnan(x).any()) or bool((x == float("inf")).any())


def _floats(x) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        if x.is_floating_point():
            yield x.detach()
    elif isinstance(x, dict):
        for value in x.values():
            yield from _floats(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from _floats(value)


# ------------------------------------------------------------------------------- what is in a batch
def padding(e: Evidence, call: Call) -> Tensor | None:
    """Positions of padding: by the mask; without one, runs of the pad token at the ends of a row,
    for a transformers model, which sees no padding by itself. None when it cannot be told.
    """
    if call.mask is not None:
        return call.mask == 0 if call.mask.shape == call.ids.shape else None
    if e.config is None or any(
        isinstance(v, Tensor) and v.dim() == 4 for v in call.kwargs.values()
    ):
        return None
    pad = e.token("pad")
    return None if pad is None else runs(call.ids, pad)


def tail(ids: Tensor, token: int | Tensor) -> Tensor:
    """Where a row ends in a run of one token."""
    return (ids == token).flip(1).int().cumprod(1).flip(1).bool()


def runs(ids: Tensor, pad: int) -> Tensor:
    """Return runs of at least two pad tokens at either end of a row."""
    left, right = (ids == pad).int().cumprod(1).bool(), tail(ids, pad)
    left &= left.sum(1, keepdim=True) > 1
    right &= right.sum(1, keepdim=True) > 1
    return left | right


def _readings(e: Evidence) -> Iterator[tuple]:
    for event in e.of(Backward, round=0):
        reading = event.reading
        if reading is not None and reading.targets is not None:
            for call in event.calls:
                if call.ids is reading.ids and call.grad and (call.args or call.kwargs):
                    yield event, call, reading


# ---------------------------------------------------------------------------------------- replaying
def _other(e: Evidence, call: Call, where: Tensor, special: bool = False) -> Tensor:
    """Return the ids with other ordinary tokens of the same batch at these places; special tokens
    stay unless asked for.
    """
    ids = call.ids
    marks = [t for t in (e.token(w) for w in ("eos", "bos", "pad")) if t is not None]
    ordinary = torch.ones_like(ids, dtype=torch.bool)
    for mark in marks:
        ordinary &= ids != mark
    pool = torch.unique(ids[ordinary])
    if len(pool) < 2:
        raise Unfit
    place = torch.searchsorted(pool, ids.clamp(max=int(pool.max())))
    other = pool[(place + 1 + len(pool) // 3) % len(pool)]
    other = torch.where(other == ids, pool[(place + 1) % len(pool)], other)
    return torch.where(where & (ordinary | special), other, ids)


def _twice(e: Evidence, call: Call, changed: Tensor) -> tuple[Tensor, Tensor]:
    """Logits for the batch as it was and as changed. Unfit where two equal calls differ."""
    if "replayed" not in e.probes or e.probes["replayed"][0] is not call:
        first, again = _replay(e, call, call.ids), _replay(e, call, call.ids)
        if not torch.equal(first, again) and _most(_moved(first, again), None) > _threshold(first):
            raise Unfit
        e.probes["replayed"] = call, first
    return e.probes["replayed"][1], _replay(e, call, changed)


def _moved(a: Tensor, b: Tensor) -> Tensor:
    """How far each position's logits moved, in standard deviations of the logits."""
    a, b = a.float(), b.float()
    few = a[:1]
    finite = few[torch.isfinite(few)]
    size = float(finite.std()) if finite.numel() > 1 else 0.0
    if not size > 0:
        raise Unfit
    # inf on both sides is no move
    return (a - b).abs_().nan_to_num_(0.0, 0.0, 0.0).amax(-1).cpu() / size


def _most(moved: Tensor, where: Tensor | None) -> float:
    chosen = moved if where is None else moved[where]
    return float(chosen.max()) if chosen.numel() else 0.0


def _threshold(logits: Tensor) -> float:
    return 1e-4 if logits.dtype == torch.float32 else 2e-2


def _module(call: Call) -> nn.Module:
    module = call.module() if hasattr(call, "module") else None
    if module is None:
        raise Unfit
    return module


def _replay(e: Evidence, call: Call, ids: Tensor) -> Tensor:
    """Repeat a call with other ids: same modes, same draws, same autocast; leaves no trace."""
    module = _module(call)
    if not (call.args or call.kwargs) or e.opaque or call.kwargs.get("past_key_values") is not None:
        raise Unfit
    device = next((p.device.type for p in module.parameters()), "cpu")
    tokens = WORK.get(device, WORK["other"]) / max(1, sum(p.numel() for p in module.parameters()))
    if tokens < ids.shape[1]:
        raise Unfit
    rows = max(1, int(min(tokens, TOKENS)) // ids.shape[1])
    cut = _cutter(call.ids.shape, rows)
    args, kwargs = _with_ids(call, ids, cut)
    again = Call(call.round, "other", False, False, call.training, call.autocast)
    with _as_made(module, call):
        read_call(again, module, args, kwargs, replays.again(module, args, kwargs))
    if again.logits is None or again.logits.shape[1] != ids.shape[1]:
        raise Unfit
    return again.logits.detach()


def _cutter(shape: torch.Size, rows: int) -> Callable:
    """Return takes the first rows of whatever has one row per sequence."""

    def cut(x):
        if isinstance(x, Tensor) and x.dim() and x.shape[0] == shape[0] and rows < shape[0]:
            return x[:rows]
        return x

    return cut


def _with_ids(call: Call, ids: Tensor, cut: Callable) -> tuple[tuple, dict]:
    """Return the arguments of a call with its ids replaced."""

    def swap(x: Tensor) -> Tensor:
        return cut(ids.to(x.device, x.dtype))

    def named(given: dict) -> dict | None:
        for name in IDS:
            if isinstance(given.get(name), Tensor):
                return {k: swap(v) if k == name else cut(v) for k, v in given.items()}
        return None

    kwargs = {k: cut(v) for k, v in call.kwargs.items()}
    if len(call.args) == 1 and isinstance(call.args[0], dict):
        inner = named(dict(call.args[0]))
        if inner is not None:
            return (inner,), kwargs
    if (found := named(call.kwargs)) is not None:
        return tuple(cut(x) for x in call.args), found
    args = list(call.args)
    for place, x in enumerate(args):
        if (
            isinstance(x, Tensor)
            and x.dim() == 2
            and not x.is_floating_point()
            and x.shape == call.ids.shape
        ):
            args[place] = swap(x)
            return tuple(cut(x) if i != place else x for i, x in enumerate(args)), kwargs
    raise Unfit
