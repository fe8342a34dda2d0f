"""A model of series that is asked for values which stand in its input: does it see them?

    x, y = s[:, :-1], s[:, 1:]          y at time t is x at time t + 1

That is how a forecaster is trained, and right where the answer at t hangs on x up to t alone. An
encoder without a causal mask, a recurrent layer that runs both ways or a convolution padded on both
sides reads the answer off its input. Where a target is found to be the input, shifted, the call is
made twice more: as it was, and with the second half of each series taken from another row. Answers
before that half must not move.

A loss of torch is given its target. One by hand squares a difference, which its graph holds: the
answer without it is the target, up to rounding.

Footguns: taking the half from another row leaves the statistics of the batch as they were, nearly,
so that a normalisation over the batch does not pass for a leak. A target that is the input turned
round in a circle is an exercise in permutations, and no forecast. A table has columns without an
order, but none is its own neighbour's copy. Half a row later, what is asked for may be the
derivative of a state: of places and speeds it is speeds and forces.
"""

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from loopdoctor import replays
from loopdoctor.draws import generators, restore
from loopdoctor.evidence import Backward, Call, Evidence
from loopdoctor.fed import kind
from loopdoctor.reading import readable

LEAST, CHANNELS = 6, 8  # times in a series; channels of the input that a target may be
# from a loss to its square
REDUCED = {"Mean", "Sum", "Div", "Mul", "Sqrt", "View", "UnsafeView", "Squeeze", "Add"}
COUPLING = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


class Shifted(NamedTuple):
    """The target is the input so many times later."""

    call: Call
    at: int  # number of the argument
    time: int  # dimension
    shift: int
    shape: tuple[int, ...]  # of the target


class Leak(NamedTuple):
    shift: int
    early: float  # how far answers moved before the half that was changed
    late: float  # and in it
    coupled: bool  # rows or times share statistics


def match(e: Evidence, event: Backward, loss: Tensor) -> None:
    """Before the first backward: e.probes["shifted"], where there is one, or ["squared"]: a
    difference, and a call.
    """
    if "shifted" in e.probes:
        return
    # to read what a checkpoint holds would compute it anew
    gap = None if e.packed else _squared(loss)
    if gap is not None and gap.dim() in (2, 3) and len(gap) > 1:
        series = (
            (c, n, x)
            for c in event.calls
            for n, x in enumerate(c.args)
            if _is_series(c, x, len(gap))
        )
        fit = ((gap, call, n) for call, n, x in series if x.dim() == 3 or x.shape == gap.shape)
        e.probes["squared"] = next(fit, None)
    for n in event.entropies:
        y = n.target
        if (
            n.fed is None
            or not readable(y)
            or not y.is_floating_point()
            or y.dim() not in (2, 3)
            or len(y) < 2
        ):
            continue
        for call in event.calls:
            for number, x in enumerate(call.args):
                if _is_series(call, x, len(y)):
                    found = _find(x.detach(), y.detach())
                    if found is not None:
                        e.probes["shifted"] = Shifted(call, number, *found, tuple(y.shape))
                        return


def _is_series(call: Call, x, rows: int) -> bool:
    learns = call.role == "model" and call.grad
    return learns and readable(x) and x.is_floating_point() and x.dim() in (2, 3) and len(x) == rows


def _squared(loss: Tensor) -> Tensor | None:
    """Return the difference whose squares or absolute values a loss is the mean or the sum of."""
    queue = [loss.grad_fn]
    for _ in range(12):
        node = queue.pop(0) if queue else None
        what = kind(node)
        edges = [edge for edge, _ in node.next_functions] if node is not None else []
        if what in ("Pow", "Abs") or what == "Mul" and len(edges) == 2 and edges[0] is edges[1]:
            saved = getattr(node, "_saved_self", None)  # another version's name
            return saved.detach() if isinstance(saved, Tensor) else None
        if what in REDUCED:
            queue += [edge for edge in edges if edge is not None]
    return None


def _find(x: Tensor, y: Tensor) -> tuple[int, int] | None:
    times = (1, 2)
    if x.dim() == 2:
        x, y, times = x.unsqueeze(-1), y.unsqueeze(-1), (1,)
    for time in times:
        s, t = (
            (x, y) if time == 1 else (x.transpose(1, 2), y.transpose(1, 2) if y.dim() == 3 else y)
        )
        if t.dim() == 2:
            t = t.unsqueeze(-1)
        if s.shape[1] != t.shape[1] or s.shape[1] < LEAST or (shift := _shift(s, t)) is None:
            continue
        return time, shift
    return None


def _shift(s: Tensor, t: Tensor) -> int | None:
    """Of (rows, times, channels) against (rows, times, channels or one of them)."""
    width, length = t.shape[2], s.shape[1]
    starts = range(min(s.shape[2], CHANNELS)) if width == 1 else (0,) if width <= s.shape[2] else ()
    for first in starts:
        part = s[:, :, first : first + width]
        if part.shape != t.shape or bool((part == part[:, :1]).all()):
            continue
        for shift in range(1, (length + 1) // 2):
            later = _same(part[:, shift], t[:, 0]) and _same(part[:, shift:], t[:, :-shift])
            if later and not _same(part[:, :shift], t[:, -shift:]):
                return shift
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    """Up to the rounding of a difference that was taken and undone."""
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5)


def run(e: Evidence) -> None:
    """Before the first step: e.probes["leak"]."""
    shifted, squared = e.probes.pop("shifted", None), e.probes.pop("squared", None)
    with contextlib.suppress(
        RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError
    ):
        if shifted is None and squared is not None and not e.opaque:
            shifted = _undone(*squared)
        if (
            shifted is not None
            and not e.opaque
            and shifted.call.module() is not None
            and shifted.call.args
        ):
            e.probes["leak"] = _leak(shifted)


def _undone(gap: Tensor, call: Call, number: int) -> Shifted | None:
    """Return the target of a loss by hand: what was answered, without the difference."""
    x = call.args[number].detach()
    for answer in _floats(_again(call, call.args)) if call.module() is not None else ():
        # either may stand first
        for y in (answer - gap, answer + gap) if answer.shape == gap.shape else ():
            if (found := _find(x, y)) is not None:
                return Shifted(call, number, *found, tuple(y.shape))
    return None


def _again(call: Call, args: tuple):
    module = call.module()
    device = next((p.device.type for p in module.parameters()), "cpu")
    with (
        torch.no_grad(),
        torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None),
    ):
        return replays.again(module, args, call.kwargs)


def _leak(shifted: Shifted) -> Leak | None:
    call, module = shifted.call, shifted.call.module()
    x = call.args[shifted.at]
    cut = x.shape[shifted.time] // 2
    other = x.detach().clone()
    later = [slice(None)] * x.dim()
    later[shifted.time] = slice(cut, None)
    other[tuple(later)] = x.detach().roll(1, 0)[tuple(later)]
    state = generators()
    answers = []
    for given in (x, x, other):
        restore(state)
        out = _again(call, (*call.args[: shifted.at], given, *call.args[shifted.at + 1 :]))
        found = [o for o in _floats(out) if tuple(o.shape) == shifted.shape] or [
            o for o in _floats(out) if o.shape[: shifted.time + 1] == x.shape[: shifted.time + 1]
        ]
        if not found:
            return None
        answers.append(found[0].float())
    if not torch.equal(*answers[:2]):
        return None  # draws that cannot be repeated
    time = min(shifted.time, answers[0].dim() - 1)
    moved = (answers[0] - answers[2]).abs()
    early = moved.narrow(time, cut - shifted.shift, shifted.shift)
    late = moved.narrow(time, cut, moved.shape[time] - cut)
    coupled = any(isinstance(m, COUPLING) for m in module.modules())
    return Leak(shifted.shift, float(early.mean()), float(late.mean()), coupled)


def _floats(out) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() and out.dim() > 1 else []
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, (list, tuple)) else ()
    return [x for part in parts for x in _floats(part)]
