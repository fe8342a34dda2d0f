"""Does a decoder see the tokens that it is asked for?

    h = self.core(source, target)                       nn.Transformer without a tgt_mask
    tgt_mask = torch.tril(torch.ones(T, T)).bool()
    True hides in torch's layers: this shows what comes later
    tgt_mask = torch.ones(T, T).tril()
    numbers are added to the scores: this hides nothing

A model that is given two texts, of which one is the target of the loss moved on by a place, has
that one as its decoder's input. The call is made once more before the first step, in eval mode,
with the second half of that text taken from another row: the answers before it must not move.

Whether what fills such texts up to one length counts in the loss is asked as well.

Footguns: only places of the first half that the loss asks for are compared, and a text that is not
what the loss asks for (tags, an input of a denoiser) is none. Where each token has a loss of its
own (reduction="none") a mask comes behind it, so nothing is known of padding, and a prompt in front
may see itself: the last tokens alone are changed. A decoder may be told how long the text is, so
the padding stays where it is. The last of sorted numbers, or a goal that is not left again, ends
rows as well: so padding fills the other text too, or stands behind one token, that of the end.
"""

import contextlib
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from loopdoctor import replays
from loopdoctor.evidence import Backward, Call, Entropy, Evidence
from loopdoctor.reading import readable

WORK = 2**34  # numbers of a text times weights of a model: what a replay may cost
# rows; places; of the targets that follow; different ones
LEAST, PLACES, SHARE, VARIETY = 3, 4, 0.95, 4
ROUNDS = 3  # in which texts are filled up


class Decoded(NamedTuple):
    call: Call
    key: int | str  # of the decoder's text among the arguments
    asked: Tensor  # (B, T): where the loss asks for something
    cut: int  # place from which on it is changed


class Ahead(NamedTuple):
    early: float  # how far answers before the change moved
    late: float  # and those behind it


def match(e: Evidence, event: Backward) -> None:
    """At a backward of the first rounds: e.probes["decoded"] of the first one, and
    e.probes["filled"] of each.
    """
    losses = [
        n
        for n in event.entropies
        if n.name == "cross_entropy" and n.connected and n.target is not None
    ]
    for call in event.calls:
        if call.role != "model" or not call.grad:
            continue
        texts = {key: x for key, x in [*enumerate(call.args), *call.kwargs.items()] if _text(x)}
        # its labels are given to it
        told = any(_same(x, n.target) for x in texts.values() for n in losses)
        told = told or any(_labels(x, y) for x, y in itertools.permutations(texts.values(), 2))
        if len(texts) < 2 or len({len(x) for x in texts.values()}) > 1 or told:
            continue
        for key, x in texts.items():
            if of := next((n for n in losses if _follows(x, n.target)), None):
                target = of.target.detach().reshape(x.shape)
                if not e.rounds:
                    cut = x.shape[1] - 1 if of.reduction == "none" else x.shape[1] // 2
                    asked = (target >= 0) & (target != of.ignored)
                    e.probes.setdefault("decoded", Decoded(call, key, asked, cut))
                others = [y for y in texts.values() if y is not x]
                counted = None if of.reduction == "none" else _filled(target, of, others)
                e.probes.setdefault("filled", {}).setdefault(e.rounds, counted)
                if any(_goes_on(x, y) for y in others):
                    e.probes["goes on"] = True


def _text(x) -> bool:
    """Whether it holds tokens, and is no mask."""
    whole = isinstance(x, Tensor) and readable(x) and x.dim() == 2 and x.dtype is torch.int64
    return whole and len(x) >= LEAST and x.shape[1] >= PLACES and int(x.max()) > 1


def _same(x: Tensor, target: Tensor) -> bool:
    return (
        target.numel() == x.numel()
        and target.device == x.device
        and bool((target.reshape(x.shape) == x).all())
    )


def _labels(x: Tensor, y: Tensor) -> bool:
    """Whether y holds tokens of x at their own places, and others that do not count: the model
    shifts them itself.
    """
    asked = y >= 0
    return x.shape == y.shape and bool(asked.any()) and bool((x == y)[asked].float().mean() > SHARE)


def _follows(x: Tensor, target: Tensor) -> bool:
    """Whether the targets (B * T) or (B, T) are the text, one place later."""
    if target.is_floating_point() or target.numel() != x.numel() or target.device != x.device:
        return False
    here, there = x[:, 1:], target.reshape(x.shape)[:, :-1]
    asked = there >= 0
    return len(there[asked].unique()) >= VARIETY and bool(
        (here == there)[asked].float().mean() > SHARE
    )


def _filled(target: Tensor, loss: Entropy, others: list[Tensor]) -> tuple[int, int, int] | None:
    """Return what fills the rows up to one length, and counts: how many targets, of how many, and
    which.
    """
    last = target[:, -1].mode().values
    runs = _ending(target, last).sum(1)
    some = (
        len(target.unique()) >= 2 * VARIETY
        and _at_ends(target, last)
        and int(last) != loss.ignored
        and last >= 0
    )
    # or its class counts nothing
    if not some or loss.weight is not None and not float(loss.weight[last]):
        return None
    found = _behind_one(target, runs) or any(
        _at_ends(x, last) for x in others if x.device == last.device
    )
    return (int(runs.sum()), target.numel(), int(last)) if found else None


def _ending(text: Tensor, token: Tensor) -> Tensor:
    """(B, T): where rows end in runs of one token."""
    return (text == token).flip(1).int().cumprod(1).flip(1).bool()


def _at_ends(text: Tensor, token: Tensor) -> bool:
    """Whether it ends rows in runs of several lengths, and stands nowhere else."""
    runs = _ending(text, token).sum(1)
    some = len(set(runs.tolist())) > 2 and int((runs > 1).sum()) >= LEAST
    return some and int((text == token).sum()) == int(runs.sum())


def _behind_one(target: Tensor, runs: Tensor) -> bool:
    """Whether the same token stands in front of all of these runs."""
    rows = ((runs > 0) & (runs < target.shape[1])).nonzero()[:, 0]
    return len(target[rows, target.shape[1] - runs[rows] - 1].unique()) == 1


def _goes_on(x: Tensor, y: Tensor) -> bool:
    """Whether y (actions) goes up and down where the text, a place each, ends in one and the same
    token (a goal).
    """
    if x.shape != y.shape or x.device != y.device:
        return False
    moved = y.diff(dim=1) * _ending(x, x[:, -1].mode().values)[:, :-1]
    return int(((moved > 0).any(1) & (moved < 0).any(1)).sum()) >= LEAST


def fills(e: Evidence) -> tuple[int, int, int] | None:
    """Return the same of all rounds, if all are filled up with one and the same."""
    found = list(e.probes.get("filled", {}).values())
    same = len(found) >= ROUNDS and None not in found and len({token for *_, token in found}) == 1
    return found[0] if same else None


def run(e: Evidence) -> None:
    """Before the first step: e.probes["decoder"]."""
    found: Decoded | None = e.probes.pop("decoded", None)
    module = found.call.module() if found is not None else None
    if module is None or e.opaque or e.accelerator or replays.packed(module):
        return
    text = _given(found.call)[found.key]
    if text.numel() * sum(p.numel() for p in module.parameters()) > WORK:
        return
    # no padding: a token is asked for a place before
    words = torch.cat([found.asked[:, :1], found.asked[:, :-1]], 1)
    later = (
        words & words.roll(1, 0) & (torch.arange(text.shape[1], device=text.device) >= found.cut)
    )
    changed = torch.where(later, text.roll(1, 0), text)
    unfit = contextlib.suppress(
        RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError
    )
    with unfit, replays.resting(module.modules()):
        first, again, after = (_answer(module, found, x) for x in (text, text, changed))
        if (
            first is not None
            and after is not None
            and first.equal(again)
            and first.shape == after.shape
        ):
            moved = (first - after).abs().amax(-1) * found.asked
            e.probes["decoder"] = Ahead(
                float(moved[:, : found.cut].max()), float(moved[:, found.cut :].max())
            )


def _given(call: Call) -> dict:
    return {**dict(enumerate(call.args)), **call.kwargs}


def _answer(module, found: Decoded, text: Tensor) -> Tensor | None:
    """(B, T, C) of what is answered for this text."""
    given = _given(found.call) | {found.key: text}
    with replays.without_gradients(module, found.call.autocast):
        args = tuple(given[n] for n in range(len(found.call.args)))
        out = replays.again(module, args, {key: given[key] for key in found.call.kwargs})
    return next((found for x in replays.floats(out) if (found := _laid(x, text)) is not None), None)


def _laid(x: Tensor, text: Tensor) -> Tensor | None:
    """Return an answer as (B, T, C), which may come as (T, B, C), (B, C, T) or (B * T, C)."""
    (rows, places), x = text.shape, x.float().nan_to_num()
    if x.dim() == 2 and len(x) == rows * places:
        return x.reshape(rows, places, -1)
    if x.dim() != 3 or rows == places:
        return None
    turns = {(0, 1): x, (1, 0): x.transpose(0, 1), (0, 2): x.transpose(1, 2)}
    return next(
        (y for at, y in turns.items() if (x.shape[at[0]], x.shape[at[1]]) == (rows, places)), None
    )
