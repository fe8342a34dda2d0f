"""What a loss of classes is told beside the answers: their weights, a class to leave out; and a target that went in.

    weight = counts / counts.sum()              the common class counts more, where the rare one was meant to
    ignore_index=0                              of classes that begin at 0: the first one is never learned
    features = table.drop(columns=["id"])       with the target still in it

All are seen at the call of the loss. The classes of some batches are counted, and the columns that went into the model
are laid beside the target.

Footgun: a class is left out on purpose in text (padding) and in pictures (void), so only whole rows are looked at. And
the derivative of a state (place, speed) begins with a part of it: only the last of three times or more begins a window,
and times go along with the one before them, as a speed does not with a place.
"""

import torch
from torch import Tensor

from train_doctor.evidence import Call, Entropy, Evidence
from train_doctor.reading import readable

LARGEST = 1000  # classes
COLUMNS, NUMBERS, ROWS = 4096, 2**20, 16  # of an input that is compared; rows at least
EXACT = 1e-7  # what a correlation may lack
HORIZON = 256  # values of a target
FOLLOWS = 0.3  # the correlation of a time and the one before it, at least


def look(e: Evidence, loss: Entropy, args: tuple, kwargs: dict, calls: list[Call], text: bool) -> None:
    """At one call of a loss that is connected."""
    target, given = loss.target, loss.input
    if not isinstance(target, Tensor) or target.is_meta or not isinstance(given, Tensor) or not target.numel():
        return
    if loss.name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
        _weighed(e, loss, kwargs.get("weight", args[2] if len(args) > 2 else None))
        if not text:
            _left_out(e, loss, calls)
    elif loss.name == "binary_cross_entropy_with_logits":
        _positive(e, loss, kwargs.get("pos_weight"))
    if e.rounds not in e.leaks and (compared := _leaked(target, calls)):
        e.leaks[e.rounds] = compared


def _weighed(e: Evidence, loss: Entropy, weight) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not 1 < weight.numel() <= LARGEST:
        return
    asked = loss.target.detach().flatten()
    asked = asked[(asked >= 0) & (asked < weight.numel()) & (asked != loss.ignored)]
    _add(e, loss.name, weight.tolist(), torch.bincount(asked, minlength=weight.numel()).tolist())


def _positive(e: Evidence, loss: Entropy, weight) -> None:
    if not isinstance(weight, Tensor) or not weight.numel() or not readable(loss.target):
        return
    asked = loss.target.detach()
    if weight.dim() == 1 and 1 < len(weight) <= LARGEST and asked.dim() > 1 and asked.shape[-1] == len(weight):
        hits = (asked.reshape(-1, len(weight)) > 0.5).sum(0)
        _count(e, weight.tolist(), hits.tolist(), asked.numel() // len(weight))
    if weight.numel() != 1:
        return
    hits = int((asked > 0.5).sum())
    _add(e, loss.name, [1.0, float(weight)], [loss.target.numel() - hits, hits])


def _add(e: Evidence, name: str, weights: list[float], counts: list[int]) -> None:
    if len(seen := e.weights_seen.setdefault(name, set())) < 2:
        seen.add(tuple(weights))
    before = e.weighed.get(name, (weights, [0] * len(counts)))[1]
    if len(before) == len(counts):
        e.weighed[name] = weights, [a + b for a, b in zip(before, counts)]


def _count(e: Evidence, weights: list[float], hits: list[int], rows: int) -> None:
    """Of labels that are there or not, each with a weight of its own: how often each is there."""
    kept, before, seen = e.weighed_labels or (weights, [0] * len(hits), 0)
    if kept == weights:
        e.weighed_labels = weights, [a + b for a, b in zip(before, hits)], seen + rows


def _left_out(e: Evidence, loss: Entropy, calls: list[Call]) -> None:
    x, asked = loss.input, loss.target
    if loss.ignored is None or x.dim() != 2 or not 0 <= loss.ignored < x.shape[1] or asked.dim() != 1:
        return
    inputs = [t for call in calls for t in _tensors(call)]
    if any(len(t) == len(x) for t in inputs if t.dim()):
        _, there, rows = e.left_out.get(loss.ignored, (0, 0, 0))
        there += int((asked == loss.ignored).sum())
        e.left_out[loss.ignored] = loss.ignored, there, rows + len(asked)


def _tensors(call: Call) -> list[Tensor]:
    return [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, Tensor)] if call.role == "model" else []


def _leaked(target: Tensor, calls: list[Call]) -> tuple[int | None, tuple[int, ...], bool] | None:
    """The column of an input that is the target, but for a factor and a constant, and the shape that was looked at."""
    if not target.dim() or len(target) < ROWS:
        return None
    y, compared = target.detach().reshape(len(target), -1), None
    several = 1 < y.shape[1] <= HORIZON and y.is_floating_point()
    if y.shape[1] != 1 and not several:
        return None
    for x in (t for call in calls if call.grad for t in _tensors(call)):
        fits = readable(x) and x.dim() > 1 and len(x) == len(y) and x.is_floating_point() and x.numel() <= NUMBERS
        columns = x.detach().reshape(len(x), -1) if fits else None
        if columns is None or not 1 < columns.shape[1] <= COLUMNS:
            continue
        if several:
            if (at := _first_of_several(columns, y)) is not None and _at_an_end(at, x.detach()):
                return at, tuple(x.shape), True
            continue
        a, b = (t.double() - t.double().mean(0) for t in (columns, y))
        a, b = a / a.norm(dim=0).clamp_min(1e-12), b / b.norm().clamp_min(1e-12)
        alike, at = (a * b).sum(0).abs().max(0)
        if float(alike) > 1 - EXACT:
            return int(at), tuple(x.shape), False
        compared = None, tuple(x.shape), False
    return compared


def _first_of_several(columns: Tensor, y: Tensor) -> int | None:
    """The column that is the first of several values to come, and none of them the second: windows may overlap."""
    same = [(columns == y[:, n : n + 1]).all(0) for n in (0, 1)]
    moves = bool((y[:, 0] != y[0, 0]).any()) and bool((y[:, 0] != y[:, 1]).any())
    return int(same[0].nonzero()[-1]) if moves and bool(same[0].any()) and not bool(same[1].any()) else None


def _at_an_end(column: int, x: Tensor) -> bool:
    """Whether a column is the last one of three or more along some axis, where it goes along with the one before it,
    and so does each other one (by half of that), as times may do."""
    columns, stride, place = x.reshape(len(x), -1), 1, column
    for size in reversed(x.shape[1:]):
        place, at = divmod(place, size)
        if size > 2 and at == size - 1:
            times = columns[:, [column - n * stride for n in range(size)]].double()
            beside = torch.corrcoef(times.T).diagonal(1)
            if float(beside[0]) > FOLLOWS and not bool((beside < FOLLOWS / 2).any()):
                return True
        stride *= size
    return False
