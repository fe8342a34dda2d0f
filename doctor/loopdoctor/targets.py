"""The targets of a loss, found in a recorded call of it or in its graph, laid over the positions of
the logits.

The rows of a loss's input are brought back to their places in the batch in three ways: by their
number, by correlation with the logits where they may be cropped at either end, and by equality
where some were picked out.

Footgun: the graph keeps what `gather` was given, but not from where: `logits[:, :-1]` is assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loopdoctor.evidence import Call, Entropy

IGNORED = -100
# offsets tried; the first that fits is taken, so that repetitive text passes as healthy
AHEAD = (1, 0, 2, 3, -1)
LARGEST = 2**27  # logits whose values are recomputed
INSIDE = (
    "Mm",
    "Addmm",
    "Bmm",
    "Embedding",
    "NativeLayerNorm",
    "Scaled",
    "Convolution",
    "Checkpoint",
    "Compiled",
)


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
    kept: Tensor | None = None  # (B, T) where a factor in the graph is not 0

    def counted(self) -> Tensor:
        """Return the targets, but those whose cost is multiplied with 0."""
        return self.targets if self.kept is None else torch.where(self.kept, self.targets, IGNORED)

    @property
    def tokens(self) -> int:
        return int((self.targets != IGNORED).sum())


# ---------------------------------------------------------------------------------- recorded losses
def recorded(entropy: Entropy, calls: list[Call]) -> Iterator[Part]:
    if (
        entropy.name not in ("cross_entropy", "nll_loss")
        or entropy.input is None
        or entropy.target is None
    ):
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
        yield Part(
            call, targets, each, total, total, entropy.reduction, odd=_odd(entropy.name, rows)
        )
        return


def _odd(name: str, rows: Tensor) -> str:
    """Probabilities given to cross_entropy, or logits to nll_loss: a softmax too many, or one too
    few.
    """
    if not rows.numel():
        return ""
    some = rows.reshape(-1, rows.shape[-1])[:16].float()
    if name == "cross_entropy" and rows.shape[-1] > 2 and bool((some >= 0).all()):
        return "probabilities" if bool(((some.sum(-1) - 1).abs() < 1e-2).all()) else ""
    if (
        name == "nll_loss"
        and bool(torch.isfinite(some).all())
        and bool((some.max(-1).values > 1e-3).any())
    ):
        return "logits"
    return ""


def _laid(flat: Tensor, where: Tensor, shape: torch.Size, fill) -> Tensor:
    """Values of rows put at the positions they belong to."""
    whole = torch.full((shape[0] * shape[1],), fill, dtype=flat.dtype)
    whole[where] = flat
    return whole.view(shape)


def _positions(rows: Tensor, call: Call) -> Tensor | None:
    """For each row of a loss's input, its position (b * T + t) in the batch; None when it cannot be
    told.
    """
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
    return (
        None
        if None in found or len(set(found)) < len(found)
        else torch.tensor(found, dtype=torch.long)
    )


def _together(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 0 else 0.0


# ----------------------------------------------------------------------------------- from the graph
def from_graph(loss: Tensor, calls: list[Call]) -> list[Part]:
    """Targets that `gather` or the kernel of nll_loss keeps in the graph between the logits and the
    loss.
    """
    parts: list[Part] = []
    queue, seen = [(loss.grad_fn, None)], set()
    while queue and len(seen) < 300:
        node, factor = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if kind.startswith(INSIDE):
            continue
        index = _index(node, kind)
        if index is not None:
            parts += _gathered(index, calls, factor)
            continue
        factor = _factor(node, kind, factor)
        queue += [(edge, factor) for edge, _ in node.next_functions]
    return parts


def picked_rows(loss: Tensor, call: Call) -> Tensor | None:
    """Which positions (B, T) of the hidden states a loss took, `hidden[:, :-1].flatten(0,
    1)[rows]`, by its graph.
    """
    many, length = call.ids.shape
    queue, seen = [loss.grad_fn], set()
    while queue and len(seen) < 300:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if kind.startswith(INSIDE):
            continue
        if kind == "IndexBackward0":
            rows = _rows_of(node)
            if rows is not None and rows.numel() and int(rows.max()) < many * (length - 1):
                mask = torch.zeros(many * (length - 1), dtype=torch.bool)
                mask[rows] = True
                return torch.cat(
                    [mask.view(many, length - 1), torch.zeros(many, 1, dtype=torch.bool)], 1
                )
        queue += [edge for edge, _ in node.next_functions]
    return None


def _rows_of(node) -> Tensor | None:
    try:
        found = [x for x in node._saved_indices if x is not None]
    except (AttributeError, RuntimeError):  # freed, or another version's name
        return None
    if len(found) != 1 or found[0].dtype != torch.int64 or found[0].dim() != 1:
        return None
    return found[0].cpu()


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


def _factor(node, kind: str, above: Tensor | None) -> Tensor | None:
    """Return what the costs of tokens are multiplied with, (cost * mask).sum(), where it has
    learned nothing; else what they are multiplied with later.
    """
    if not kind.startswith("MulBackward"):
        return above
    try:
        sides = [x for x in (node._saved_self, node._saved_other) if x is not None]
    except (AttributeError, RuntimeError):  # freed
        return above
    plain = len(sides) == 1 and sides[0].dim() == 2 and not sides[0].requires_grad
    return sides[0].detach() if plain else above


def _gathered(index: Tensor, calls: list[Call], factor: Tensor | None = None) -> list[Part]:
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
                offset = ahead_of(targets, call.ids, call)
                # which end of the logits was cropped is told by nothing but the value; logits[:,
                # :-1] is assumed
                part = Part(call, targets, None, None, None, "none", offset)
                if best is None:
                    best = part
                    if factor is not None and factor.numel() == flat.numel():
                        best.kept = _laid(
                            factor.reshape(-1).cpu() != 0, where, call.ids.shape, False
                        )
        if best is not None:
            best.each = each_of(call, best.targets)
            best.total = (
                float(best.each[best.targets != IGNORED].sum()) if best.each is not None else None
            )
            return [best]
    return []


def each_of(call: Call, targets: Tensor) -> Tensor | None:
    """Cross-entropy at each position, by chunks of rows so that large logits are never copied.
    Where the loss has made no logits, they are made here of the hidden states.
    """
    states = call.logits if call.logits is not None else call.hidden
    if states is None or call.vocabulary is None or states.shape[:2] != targets.shape:
        return None
    if not 0 < targets.numel() * call.vocabulary <= LARGEST:
        return None
    flat, wanted = states.detach().reshape(-1, states.shape[-1]), targets.reshape(-1)
    found = []
    for at in range(0, len(flat), 1024):
        rows = flat[at : at + 1024]
        if call.logits is None:
            rows = rows @ call.head.T.to(rows.dtype)
        rows, index = rows.float(), wanted[at : at + 1024].clamp(min=0).to(flat.device)
        picked = rows.gather(-1, index.clamp(max=rows.shape[-1] - 1)[:, None])[:, 0]
        found.append((rows.logsumexp(-1) - picked).cpu())
    return torch.cat(found).view(targets.shape)


# ------------------------------------------------------------------------------------------ offsets
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


def ahead_of(targets: Tensor, ids: Tensor, call: Call | None = None) -> int | None:
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


def given_to(call: Call) -> int | None:
    if call.labels is None or call.labels.shape != call.ids.shape:
        return None
    for k in (0, 1, 2):
        asked = (call.labels != IGNORED) & shifted(
            torch.ones_like(call.ids, dtype=torch.bool), k, False
        )
        n = int(asked.sum())
        if (
            n >= 8
            and int(((call.labels == shifted(call.ids, k, IGNORED)) & asked).sum()) >= 0.95 * n
        ):
            return k
    return None
