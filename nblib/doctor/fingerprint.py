"""The loss fingerprint: what does the number that the user's loop differentiates stand for?

The targets of a loss are known exactly: from a recorded call of cross_entropy or nll_loss (which also shows what a
transformers model does inside), else from the graph, where `gather` keeps the indices it was given. Laid against the
ids that went into the model they tell how far ahead each position predicts: 1 is the next token, 0 the token that the
model has just read, 2 the one after the next. The value of the loss, laid against the cross-entropy per token under
each mask and reduction, tells what it was averaged over.

Where neither shows targets (a fused loss), the few dozen ways of computing a cross-entropy from the logits are tried.

Footgun: a loss with other terms in it matches nothing, and that is no finding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nblib.doctor.evidence import Backward, Call, Entropy, Evidence

IGNORED = -100
AHEAD = (1, 0, 2, 3, -1)  # offsets tried; the first that fits is taken, so that monotonous text reads as healthy
ROUNDS, LARGEST = 4, 2**27  # how long, and with how many logits, values are recomputed
INSIDE = ("Mm", "Addmm", "Bmm", "Embedding", "NativeLayerNorm", "Scaled", "Convolution", "Checkpoint", "Compiled")


@dataclass
class Reading:
    """What a loss turned out to be."""

    how: str  # "recorded": a call of a loss was seen; "graph": found in it; "enumerated": by trying; "": neither
    offset: int | None = None  # how far ahead in the ids the target of a position lies: 1 predicts the next token
    given: int | None = None  # how far ahead the labels passed to the model lie: 0 where the model shifts itself
    tokens: int | None = None  # supervised tokens
    mean: float | None = None  # cross-entropy per supervised token, in nats, as it should be computed
    ratio: float | None = None  # the loss over that mean
    reduction: str = ""  # "mean" or "sum"
    masked: str = ""  # "labels", "attention", "nothing"
    hits: list[str] = field(default_factory=list)  # every way that gave the number, in words
    offsets: list[int] = field(default_factory=list)  # of all losses at work: several heads predict several tokens
    targets: Tensor | None = None  # (B, T) at the positions of the logits, IGNORED where nothing is asked
    ids: Tensor | None = None  # (B, T) that went in, on the CPU
    mask: Tensor | None = None  # (B, T) attention mask, on the CPU
    odd: str = ""  # "probabilities" given to cross_entropy, "logits" given to nll_loss


@dataclass
class Part:
    """One loss at work: its targets laid over the positions of the logits."""

    call: Call
    targets: Tensor  # (B, T), IGNORED outside
    each: Tensor | None  # (B, T) cross-entropy of each position where it is known
    total: float | None  # sum over the supervised tokens
    value: float | None
    reduction: str
    offset: int | None = None
    odd: str = ""

    @property
    def tokens(self) -> int:
        return int((self.targets != IGNORED).sum())


def read(e: Evidence, event: Backward, loss: Tensor | None = None) -> Reading | None:
    """The reading of one backward's loss, from the logits and losses recorded since the last one."""
    calls = [c for c in event.calls if c.role == "model" and c.ids is not None and not c.raised and not _seq2seq(e)]
    calls = [c for c in calls if c.grad] or calls
    if not calls:
        return None
    parts = [p for entropy in event.entropies if entropy.connected for p in _recorded(entropy, calls)]
    how = "recorded"
    if not parts and loss is not None and event.requires_grad:
        parts, how = _from_graph(loss, calls), "graph"
    for part in parts:
        part.offset = _ahead(part.targets, part.call.ids, part.call)
    if not parts:
        return _enumerated(event, calls[-1]) if event.round < ROUNDS else None
    return _conclude(event, parts, how)


def _seq2seq(e: Evidence) -> bool:
    """The ids that an encoder reads say nothing about the shift of a decoder's targets."""
    return bool(getattr(e.config, "is_encoder_decoder", False))


def _conclude(event: Backward, parts: list[Part], how: str) -> Reading:
    known = [p for p in parts if p.offset is not None]
    offsets = [p.offset for p in known]
    best = next((p.offset for p in known if p.offset == 1), offsets[0] if offsets else None)
    chosen = [p for p in parts if p.offset == best]
    call = chosen[0].call
    reading = Reading(how, best, _given(call), offsets=sorted(set(offsets)), ids=call.ids, mask=call.mask)
    reading.odd = next((p.odd for p in parts if p.odd), "")
    same = [p for p in chosen if p.call is call]
    reading.targets = _joined([p.targets for p in same])
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
        masks["labels"] = asked & shifted(part.call.labels != IGNORED, (part.offset or 0) - (reading.given or 0), False)
    loose = 2e-4 if part.call.autocast is None and each.dtype == torch.float32 else 2e-3
    reading.mean, reading.masked, found = None, "", None
    # the narrowest first: near the start of training all tokens cost about the same, and doubt speaks for the user
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


# ------------------------------------------------------------------------------------------------ recorded losses
def _recorded(entropy: Entropy, calls: list[Call]) -> Iterator[Part]:
    if entropy.name not in ("cross_entropy", "nll_loss") or entropy.input is None or entropy.target is None:
        return
    rows, target = entropy.input.detach(), entropy.target.detach()
    if target.is_floating_point() or rows.dim() < 2:
        return
    if rows.dim() == 3:
        rows = rows.transpose(1, 2)
    elif rows.dim() != 2:
        return
    width = rows.shape[-1]
    for call in reversed(calls):
        if call.vocabulary is not None and call.vocabulary != width:
            continue
        where = _positions(rows, call)
        if where is None:
            continue
        flat = target.reshape(-1).cpu()
        ignored = entropy.ignored if entropy.ignored is not None else IGNORED
        flat = torch.where(flat == ignored, IGNORED, flat)
        n, total, each = int((flat != IGNORED).sum()), None, None
        value = entropy.value.detach().float() if entropy.value is not None else None
        if value is not None and value.numel() == 1 and entropy.reduction != "none":
            total = float(value) * (n if entropy.reduction == "mean" else 1)
        elif value is not None and value.numel() == flat.numel():
            each = _laid(value.reshape(-1).cpu(), where, call.ids.shape, 0.0)
            total = float(value.sum())
        targets = _laid(flat, where, call.ids.shape, IGNORED)
        yield Part(call, targets, each, total, total, entropy.reduction, odd=_odd(entropy.name, rows))
        return


def _odd(name: str, rows: Tensor) -> str:
    """Probabilities given to cross_entropy, or logits to nll_loss: a softmax too many, or one too few."""
    some = rows.reshape(-1, rows.shape[-1])[:16].float()
    if name == "cross_entropy" and rows.shape[-1] > 2 and bool((some >= 0).all()):
        return "probabilities" if bool(((some.sum(-1) - 1).abs() < 1e-2).all()) else ""
    if name == "nll_loss" and bool(torch.isfinite(some).all()) and bool((some.max(-1).values > 1e-3).any()):
        return "logits"
    return ""


def _laid(flat: Tensor, where: Tensor, shape: torch.Size, fill) -> Tensor:
    """Values of rows put at the positions they belong to."""
    whole = torch.full((shape[0] * shape[1],), fill, dtype=flat.dtype)
    whole[where] = flat
    return whole.view(shape)


def _positions(rows: Tensor, call: Call) -> Tensor | None:
    """For each row of a loss's input, its position (b * T + t) in the batch; None when it cannot be told."""
    many, length = call.ids.shape
    count = rows.numel() // rows.shape[-1]
    every = torch.arange(many * length).view(many, length)
    if count == many * length:
        return every.reshape(-1)
    crops = []
    for k in (1, 2):
        if length > k and count == many * (length - k):
            crops += [every[:, start : start + length - k].reshape(-1) for start in range(k + 1)]
    few = slice(None, 8)
    mine = rows.reshape(-1, rows.shape[-1])[:, few].float().cpu()
    if call.logits is None or call.logits.shape[:2] != call.ids.shape:
        return crops[0] if crops else None
    theirs = call.logits.detach()[..., few].reshape(-1, mine.shape[-1]).float().cpu()
    if crops:  # scaled or capped logits still go with those they come from
        fits = [_together(mine, theirs[crop]) for crop in crops]
        return crops[max(range(len(crops)), key=fits.__getitem__)]
    if count > 2**14 or count > many * length:
        return None
    places: dict[tuple, int] = {}
    for at, key in enumerate(map(tuple, theirs.tolist())):
        places.setdefault(key, at)
    found = [places.get(key) for key in map(tuple, mine.tolist())]
    return None if None in found or len(set(found)) < len(found) else torch.tensor(found, dtype=torch.long)


def _together(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 0 else 0.0


# ------------------------------------------------------------------------------------------------ from the graph
def _from_graph(loss: Tensor, calls: list[Call]) -> list[Part]:
    """Targets that `gather` or the kernel of nll_loss keeps in the graph between the logits and the loss."""
    parts: list[Part] = []
    queue, seen = [loss.grad_fn], set()
    while queue and len(seen) < 300:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if kind.startswith(INSIDE):
            continue
        index = _index(node, kind)
        if index is not None:
            parts += _gathered(index, calls)
            continue
        queue += [edge for edge, _ in node.next_functions]
    return parts


def _index(node, kind: str) -> Tensor | None:
    try:
        if kind == "GatherBackward0":
            return node._saved_index
        if kind.startswith("NllLoss"):
            target = node._saved_target
            return torch.where(target == node._saved_ignore_index, IGNORED, target)
        if kind == "IndexBackward0":
            found = [x for x in node._saved_indices if x is not None and not x.is_floating_point()]
            return found[-1] if len(found) > 1 and found[-1].dtype == torch.int64 else None
    except (AttributeError, RuntimeError):  # freed, or another version's name
        return None
    return None


def _gathered(index: Tensor, calls: list[Call]) -> list[Part]:
    index = index.detach()
    for call in reversed(calls):
        many, length = call.ids.shape
        flat = index.reshape(-1).cpu()
        best = None
        for k in (0, 1, 2):
            if length <= k or flat.numel() != many * (length - k):
                continue
            for start in range(k + 1):
                every = torch.arange(many * length).view(many, length)
                where = every[:, start : start + length - k].reshape(-1)
                targets = _laid(flat, where, call.ids.shape, IGNORED)
                offset = _ahead(targets, call.ids, call)
                # which end of the logits was cropped is told by nothing but the value; logits[:, :-1] is assumed
                part = Part(call, targets, None, None, None, "none", offset)
                if best is None:
                    best = part
        if best is not None:
            best.each = _each(call, best.targets)
            best.total = float(best.each[best.targets != IGNORED].sum()) if best.each is not None else None
            return [best]
    return []


def _each(call: Call, targets: Tensor) -> Tensor | None:
    """Cross-entropy at each position, by chunks of rows so that large logits are never copied."""
    logits = call.logits
    if logits is None or logits.shape[:2] != targets.shape or logits.numel() > LARGEST:
        return None
    flat, wanted = logits.detach().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    found = []
    for at in range(0, len(flat), 1024):
        rows, index = flat[at : at + 1024].float(), wanted[at : at + 1024].clamp(min=0).to(flat.device)
        picked = rows.gather(-1, index.clamp(max=rows.shape[-1] - 1)[:, None])[:, 0]
        found.append((rows.logsumexp(-1) - picked).cpu())
    return torch.cat(found).view(targets.shape)


# ------------------------------------------------------------------------------------------------ offsets
def shifted(x: Tensor, ahead: int, fill) -> Tensor:
    """x[:, t + ahead] at t, `fill` where that lies outside."""
    if ahead == 0:
        return x
    out = torch.full_like(x, fill)
    if ahead > 0:
        out[:, :-ahead] = x[:, ahead:]
    else:
        out[:, -ahead:] = x[:, :ahead]
    return out


def _ahead(targets: Tensor, ids: Tensor, call: Call | None = None) -> int | None:
    """How far ahead in the ids these targets lie, when nearly all of them agree."""
    asked = targets != IGNORED
    for k in AHEAD:
        if abs(k) >= ids.shape[1]:
            continue
        inside = asked & shifted(torch.ones_like(ids, dtype=torch.bool), k, False)
        there = shifted(ids, k, IGNORED)
        masks = [inside]
        if call is not None and call.mask is not None:  # filler may stand for what is not asked
            masks.append(inside & shifted(call.mask != 0, k, False))
        if call is not None and call.labels is not None and call.labels.shape == ids.shape:
            masks += [inside & shifted(call.labels != IGNORED, j, False) for j in (0, 1)]
        for mask in masks:
            n = int(mask.sum())
            if n >= 8 and int(((targets == there) & mask).sum()) >= 0.95 * n:
                return k
    return None


def _given(call: Call) -> int | None:
    if call.labels is None or call.labels.shape != call.ids.shape:
        return None
    for k in (0, 1, 2):
        asked = (call.labels != IGNORED) & shifted(torch.ones_like(call.ids, dtype=torch.bool), k, False)
        n = int(asked.sum())
        if n >= 8 and int(((call.labels == shifted(call.ids, k, IGNORED)) & asked).sum()) >= 0.95 * n:
            return k
    return None


# ------------------------------------------------------------------------------------------------ by trying
def _enumerated(event: Backward, call: Call) -> Reading | None:
    """Which shift, mask, reduction and scale of a cross-entropy gives the value? None when nothing does."""
    if call.logits is None or event.value is None or not math.isfinite(event.value) or event.value == 0:
        return None
    given = _given(call)
    loose = 2e-4 if call.autocast is None and call.logits.dtype == torch.float32 else 2e-3
    best: Reading | None = None
    for k in (1, 0, 2):
        targets = shifted(call.ids, k, IGNORED)
        if call.labels is not None and given is not None:
            targets = shifted(call.labels, k - given, IGNORED) if k >= given else targets
        each = _each(call, targets)
        if each is None:
            return None
        asked = targets != IGNORED
        masks = {"labels": asked}
        if call.mask is not None:
            masks["attention"] = asked & shifted(call.mask != 0, k, False)
        for name, mask in masks.items():
            n = int(mask.sum())
            if n < 32:
                continue
            mean = float(each[mask].mean())
            for reduction, made in (("mean", mean), ("sum", mean * n)):
                if not simple(event.value / made, loose):
                    continue
                if best is None:
                    best = Reading("enumerated", k, given, n, mean, event.value / mean, reduction, name)
                    best.targets = torch.where(mask, targets, IGNORED)
                    best.ids, best.mask, best.offsets = call.ids, call.mask, [k]
                best.hits.append(f"{k} ahead, {reduction} over {name}")
    return best
