"""The loss fingerprint: what does the number that the user's loop differentiates stand for?

The targets of a loss are known exactly: from a recorded call of cross_entropy or nll_loss (which
also shows what a transformers model does inside), else from the graph, where `gather` keeps the
indices it was given. Laid against the ids that went into the model they tell how far ahead each
position predicts: 1 is the next token, 0 the token that the model has just read, 2 the one after
the next. The value of the loss, laid against the cross-entropy per token under each mask and
reduction, tells what it was averaged over.

Where neither shows targets (a fused loss), the few dozen ways of computing a cross-entropy from the
logits are tried.

Footgun: a loss with other terms in it matches nothing, and that is no finding.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loopdoctor.evidence import Backward, Call, Evidence
from loopdoctor.targets import (
    IGNORED,
    Part,
    ahead_of,
    each_of,
    from_graph,
    given_to,
    picked_rows,
    recorded,
    shifted,
)

ROUNDS = 4  # for how long values are tried
NEAR = 2e-6  # of a loss: what sums in another order differ by


@dataclass
class Reading:
    """What a loss turned out to be."""

    # "recorded": a call of a loss was seen; "graph": found in it; "enumerated": by trying; "":
    # neither
    how: str
    # how far ahead in the ids the target of a position lies: 1 predicts the next token
    offset: int | None = None
    # how far ahead the labels passed to the model lie: 0 where the model shifts itself
    given: int | None = None
    tokens: int | None = None  # supervised tokens
    # cross-entropy per supervised token, in nats, as it should be computed
    mean: float | None = None
    ratio: float | None = None  # the loss over that mean
    reduction: str = ""  # "mean" or "sum"
    masked: str = ""  # "labels", "attention", "nothing"
    hits: list[str] = field(default_factory=list)  # every way that gave the number, in words
    # of all losses at work: several heads predict several tokens
    offsets: list[int] = field(default_factory=list)
    # (B, T) at the positions of the logits, IGNORED where nothing is asked
    targets: Tensor | None = None
    ids: Tensor | None = None  # (B, T) that went in, on the CPU
    mask: Tensor | None = None  # (B, T) attention mask, on the CPU
    odd: str = ""  # "probabilities" given to cross_entropy, "logits" given to nll_loss


def read(e: Evidence, event: Backward, loss: Tensor | None = None) -> Reading | None:
    """Return the reading of one backward's loss, from the logits and losses recorded since the last
    one.
    """
    calls = [
        c
        for c in event.calls
        if c.role == "model" and c.ids is not None and not c.raised and not _seq2seq(e)
    ]
    calls = [c for c in calls if c.grad] or calls
    if not calls:
        return None
    parts = [
        p for entropy in event.entropies if entropy.connected for p in recorded(entropy, calls)
    ]
    how = "recorded"
    if not parts and loss is not None and event.requires_grad:
        parts, how = from_graph(loss, calls), "graph"
    for part in parts:
        part.offset = ahead_of(part.targets, part.call.ids, part.call)
    if not parts:
        return _tried(event, calls[-1], loss) if event.round < ROUNDS else None
    return _conclude(event, parts, how)


def _seq2seq(e: Evidence) -> bool:
    """Return the ids that an encoder reads say nothing about the shift of a decoder's targets."""
    return bool(getattr(e.config, "is_encoder_decoder", False))


def _conclude(event: Backward, parts: list[Part], how: str) -> Reading:
    known = [p for p in parts if p.offset is not None]
    offsets = [p.offset for p in known]
    best = next((p.offset for p in known if p.offset == 1), offsets[0] if offsets else None)
    chosen = [p for p in parts if p.offset == best]
    call = chosen[0].call
    reading = Reading(
        how, best, given_to(call), offsets=sorted(set(offsets)), ids=call.ids, mask=call.mask
    )
    reading.odd = next((p.odd for p in parts if p.odd), "")
    same = [p for p in chosen if p.call is call]
    # of one part it is asked below which mask its value fits
    reading.targets = _joined([p.counted() for p in same]) if len(chosen) > 1 else chosen[0].targets
    reading.tokens = sum(p.tokens for p in chosen)
    reading.reduction = chosen[0].reduction
    totals = [p.total for p in chosen]
    if reading.tokens and None not in totals:
        reading.mean, reading.masked = sum(totals) / reading.tokens, "labels"
    if len(chosen) == 1 and chosen[0].each is not None and event.value is not None:
        _match(event.value, chosen[0], reading)
    if reading.mean and event.value is not None and math.isfinite(event.value):
        reading.ratio = event.value / reading.mean
    return reading


def _joined(targets: list[Tensor]) -> Tensor:
    """Targets of chunks of one batch, together."""
    whole = targets[0].clone()
    for more in targets[1:]:
        whole = torch.where(whole == IGNORED, more, whole)
    return whole


def _match(value: float, part: Part, reading: Reading) -> None:
    """By which mask was a loss that came as one value per token reduced?"""
    each, asked = part.each, part.targets != IGNORED
    masks = {"nothing": asked}
    if part.call.mask is not None:
        masks["attention"] = asked & shifted(part.call.mask != 0, part.offset or 0, False)
        masks["attention here"] = asked & (part.call.mask != 0)
    if part.call.labels is not None:
        masks["labels"] = asked & shifted(
            part.call.labels != IGNORED, (part.offset or 0) - (reading.given or 0), False
        )
    loose = 2e-4 if part.call.autocast is None and each.dtype == torch.float32 else 2e-3
    reading.mean, reading.masked, found = None, "", None
    # the narrowest first: near the start all tokens cost about the same, so several masks fit; this
    # one is no fault
    for name, mask in sorted(masks.items(), key=lambda pair: int(pair[1].sum())):
        n = int(mask.sum())
        if not n:
            continue
        mean = float(each[mask].sum()) / n
        counts = mask.sum(1)
        rows = float(((each * mask).sum(1) / counts.clamp(min=1))[counts > 0].mean())
        for reduction, made in (("mean", mean), ("row mean", rows), ("sum", mean * n)):
            exact = reduction == "sum" and abs(value / made - 1) > loose if made else True
            if not exact and simple(value / made, loose):
                reading.hits.append(f"{reduction} over {name}")
                found = found or (name, reduction, mask, mean, n)
    if found is not None:
        reading.masked, reading.reduction, mask, reading.mean, reading.tokens = found
        reading.targets = torch.where(mask, part.targets, IGNORED)


def simple(ratio: float, loose: float) -> bool:
    """1, or one over the number of micro-batches."""
    if not math.isfinite(ratio) or ratio <= 0 or ratio > 1 + loose:
        return False
    k = round(1 / ratio)
    return 1 <= k <= 64 and abs(ratio * k - 1) < loose


# ---------------------------------------------------------------------------------------- by trying
def _tried(event: Backward, call: Call, loss: Tensor | None) -> Reading | None:
    """Return the loss read by its value; a sum of terms by that of the first of its named terms
    that is a cross-entropy.
    """
    picked = (
        picked_rows(loss, call)
        if call.logits is None and loss is not None and event.requires_grad
        else None
    )
    reading = _enumerated(event.value, call, picked)
    for value, alive in event.declared.values():
        if reading is None and alive:
            reading = _enumerated(value, call, picked)
            if reading is not None:
                reading.ratio = None  # of the term, not of the loss
    return reading


def _enumerated(value: float | None, call: Call, picked: Tensor | None) -> Reading | None:
    """Which shift, mask, reduction and scale of a cross-entropy gives the value?

    None when nothing does.
    """
    states = call.logits if call.logits is not None else call.hidden
    if states is None or value is None or not math.isfinite(value) or value == 0:
        return None
    given = given_to(call)
    loose = 2e-4 if call.autocast is None and states.dtype == torch.float32 else 2e-3
    found: list[tuple[float, Reading]] = []  # how far off, relative, and what
    for k in (1, 0, 2):
        targets = shifted(call.ids, k, IGNORED)
        if call.labels is not None and given is not None:
            targets = shifted(call.labels, k - given, IGNORED) if k >= given else targets
        each = each_of(call, targets)
        if each is None:
            return None
        asked = targets != IGNORED
        masks = {"labels": asked}
        if call.mask is not None:
            masks["attention"] = asked & shifted(call.mask != 0, k, False)
        if picked is not None:
            masks = {"picked": asked & picked}
        for name, mask in masks.items():
            n = int(mask.sum())
            if n < 32:
                continue
            mean = float(each[mask].mean())
            for reduction, made in (("mean", mean), ("sum", mean * n)):
                ratio = value / made
                if not simple(ratio, loose):
                    continue
                reading = Reading("enumerated", k, given, n, mean, value / mean, reduction, name)
                reading.targets = torch.where(mask, targets, IGNORED)
                reading.ids, reading.mask, reading.offsets = call.ids, call.mask, [k]
                reading.hits = [f"{k} ahead, {reduction} over {name}"]
                found.append((abs(ratio * round(1 / ratio) - 1), reading))
    if not found:
        return None
    # near the start all tokens cost about the same and several ways fit: the nearest counts, and
    # one ahead in doubt
    least = min(off for off, _ in found)
    near = [reading for off, reading in found if off <= max(3 * least, NEAR)]
    best = next((reading for reading in near if reading.offset == 1), near[0])
    best.hits = [hit for _, reading in found for hit in reading.hits]
    return best
