"""Sentences about what goes wrong, while it goes wrong: non-finite numbers, loss spikes, clipping,
a starved loop.

Each guard is a question about numbers the loop has anyway, answered with a sentence or None:

    non-finite   the loss or the gradient norm is nan or inf; where did it start?
    spike        the loss is more than `factor` times the median of the recent ones (median: one
                 spike must not raise the bar for the next); PaLM (arXiv:2204.02311) goes back and
                 skips the data, and so do we
    clipping     more than a tenth of the recent steps were clipped, so clipping has become the
                 learning rate
    starvation   more than a fifth of the time went into waiting for data
    repetition   the third epoch began; up to four cost little (arXiv:2305.16264), then each teaches
                 less

Footgun: `loss > 3 * average` is False for nan. Test finiteness first, always.
"""

import math
from collections import deque
from statistics import median

import torch
from torch import Tensor, nn


class NonFinite(RuntimeError):
    """Training met nan or inf; the message names the first module that produced it."""


def spiked(
    loss: float, recent: deque[float] | list[float], *, factor: float = 2.0, at_least: int = 8
) -> str | None:
    """Return a sentence if this loss is out of line with the recent ones."""
    if len(recent) < at_least or not loss > factor * median(recent):
        return None
    times = loss / median(recent)
    return f"loss {loss:.3f} is {times:.1f} times the median of the last {len(recent)} steps"


def clipped_too_often(
    clipped: deque[bool] | list[bool], *, share: float = 0.1, at_least: int = 50
) -> str | None:
    """Return a sentence if so many steps were clipped that the clip sets their size."""
    if len(clipped) < at_least or sum(clipped) / len(clipped) <= share:
        return None
    return (
        f"{sum(clipped)} of the last {len(clipped)} steps were clipped: the clip, not the learning "
        "rate, now sets the step; raise clip, lower the rate, or warm up longer"
    )


def starved(
    waiting: float, total: float, *, share: float = 0.2, at_least: float = 5.0
) -> str | None:
    """Return a sentence if much of the time, in seconds, goes into waiting for data."""
    if total < at_least or waiting / total <= share:
        return None
    return (
        f"{waiting / total:.0%} of the time goes into waiting for data: tokenise beforehand or "
        "load in workers"
    )


def repeated(epoch: int, tokens: int, *, allowed: int = 2) -> str | None:
    """`epoch` counts from 0; `tokens` are those of one."""
    size = f"{tokens / 1e6:.1f} M" if tokens >= 1e5 else f"{tokens:,}"
    said = f"epoch {epoch + 1} of a corpus of {size} tokens: a larger corpus would show it new text"
    return said if epoch >= allowed else None


def source_of_nonfinite(model: nn.Module, forward_and_backward) -> str:
    """Repeat a step under hooks; name the first module whose output or gradient is not finite.

    `forward_and_backward()` must repeat it exactly: same batches, same generator state. Parameters
    are looked at first, then outputs in forward order, then gradients in backward order: the first
    hit is nearest the source.
    """
    bad = [name for name, p in model.named_parameters() if p.is_floating_point() and not _finite(p)]
    if bad:
        return (
            f"parameter {bad[0]} is already non-finite ({len(bad)} such): "
            "an earlier update broke it"
        )
    first: list[str] = []  # the sentence about the first hit

    def forward_hook(name):
        def look(module, inputs, output):
            if not first and not all(map(_finite, _tensors(output))):
                fresh = all(map(_finite, _tensors(inputs)))
                origin = ", from finite inputs" if fresh else ""
                first.append(f"the forward pass of {name} ({type(module).__name__}){origin}")

        return look

    def gradient_hook(name):
        def look(grad):
            if not first and not _finite(grad):
                first.append(f"the gradient of {name}, the first in the backward pass")

        return look

    # Leaves first: a block's output is non-finite because something inside it was.
    handles = [
        m.register_forward_hook(forward_hook(n or "the model")) for n, m in model.named_modules()
    ]
    handles += [
        p.register_hook(gradient_hook(n)) for n, p in model.named_parameters() if p.requires_grad
    ]
    try:
        forward_and_backward()
    finally:
        for handle in handles:
            handle.remove()
    if first:
        return first[0]
    return "the loss function itself: every module's output and every gradient was finite"


def is_finite(*numbers: float) -> bool:
    return all(map(math.isfinite, numbers))


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _tensors(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []
