"""Numbers about tensors: norms, what a step changed, and which few tensors stand for all.

A watch must cost little, so nothing is looked at twice and nothing waits more often than it must. Norms of many tensors
are taken together and read with one synchronisation. Of a large tensor evenly spread elements are compared, and of many
tensors eight are followed.

Footgun: evenly spread is not random. A stride that divides the width of a matrix sees the same columns of every row.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from train_doctor.evidence import Evidence, Update

SAMPLED, ELEMENTS = 8, 2**18  # tensors whose change is measured, and how much of each


def gradient_of(p: Tensor) -> Tensor | None:
    """The gradient, of a sparse one its values; None where there is none, or one without numbers (on meta)."""
    g = p.grad
    if g is None or g.is_meta:
        return None
    return g.detach().coalesce().values() if g.is_sparse else g.detach()


def gradients_of(ps: Iterable[Tensor]) -> list[Tensor]:
    return [g for g in map(gradient_of, ps) if g is not None]


def _real(t: Tensor) -> Tensor:
    """A complex tensor as pairs of numbers."""
    return torch.view_as_real(t) if t.is_complex() else t


def strided(p: Tensor) -> Tensor:
    """At most ELEMENTS elements of a tensor, evenly spread."""
    flat = _real(p.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)]


def update(name: str, p: Tensor, before: Tensor, lr: float) -> Update:
    now, gradient = strided(p), gradient_of(p)
    delta = now.float() - before.float()
    size = float(before.float().norm())
    return Update(
        name=name,
        shape=tuple(p.shape),
        dtype=p.dtype,
        lr=lr,
        rms=float(delta.square().mean().sqrt()),
        relative=float(delta.norm()) / size if size > 0 else float("inf") if float(delta.norm()) > 0 else 0.0,
        changed=float((now != before).float().mean()),
        gradient=None if gradient is None else norms([gradient])[0],
        silent=None if gradient is None or p.grad.is_sparse else float((strided(p.grad) == 0).float().mean()),
    )


def norms(tensors: list[Tensor]) -> list[float]:
    """Norm of each tensor, in fp32 or better, with one synchronisation per device and dtype."""
    tensors = [_real(t) for t in tensors]
    found: list[float] = [0.0] * len(tensors)
    kinds: dict[tuple, list[int]] = {}
    for i, t in enumerate(tensors):
        kinds.setdefault((t.device, t.dtype), []).append(i)
    for (_, dtype), members in kinds.items():
        norms = torch._foreach_norm(
            [tensors[i] for i in members], dtype=dtype if dtype == torch.float64 else torch.float32
        )
        for i, norm in zip(members, torch.stack(norms).tolist()):
            found[i] = norm
    return found


def spread(names: list[str], count: int) -> list[str]:
    if len(names) <= count:
        return names
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]


def tied(e: Evidence) -> bool | None:
    into, out = e.embedding(), e.head()
    return None if into is None or out is None else into.data_ptr() == out.data_ptr()
