"""Numbers about tensors: norms, what a step changed, and which few tensors stand for all.

A watch must cost little, so nothing is looked at twice and nothing waits more often than it must.
Norms of many tensors are taken together and read with one synchronisation, and so is what a step
changed. Of a large tensor evenly spread elements are compared, of many tensors eight are followed,
and of many steps some are measured in full (`looked`).

Footgun: evenly spread is not random. A stride that divides the width of a matrix sees the same
columns of every row.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from loopdoctor.evidence import Evidence, Update

# tensors whose change is measured, and how much of each from the start to the end
SAMPLED, ELEMENTS = 8, 2**18
STEPPED = 2**14  # and how much of each in a step
PLAIN = (Tensor, torch.nn.Parameter)


def looked(number: int) -> bool:
    """Whether a step of this number is measured in full: 0, 1, 2, 7, 15, 31 and so on."""
    return number < 3 or number > 3 and number & (number + 1) == 0


def gradient_of(p: Tensor) -> Tensor | None:
    """Return the gradient, of a sparse one its values; None where there is none, or one without
    numbers (on meta).
    """
    g = p.grad
    if g is None or g.is_meta:
        return None
    return g.detach().coalesce().values() if g.is_sparse else g.detach()


def largest(ps: dict[str, Tensor], ids: frozenset[int]) -> tuple[str, float, float]:
    """Which of these tensors has the largest number in its gradient, that number, and that of the
    middle one.
    """
    have = {
        n: g
        for n, p in ps.items()
        if id(p) in ids and (g := gradient_of(p)) is not None and g.numel()
    }
    sizes = sorted((float(g.abs().max()), n) for n, g in have.items())
    return (
        (sizes[-1][1], sizes[-1][0], sizes[len(sizes) // 2][0])
        if sizes
        else ("a tensor", math.inf, math.inf)
    )


def gradients_of(ps: Iterable[Tensor]) -> list[Tensor]:
    return [g for g in map(gradient_of, ps) if g is not None]


def values_of(t: Tensor) -> Tensor:
    """Itself, of a sparse tensor the numbers that are kept: these have an address."""
    if t.layout == torch.strided:
        return t
    return t._values() if t.is_sparse else t.values()


def _real(t: Tensor) -> Tensor:
    """Return a complex tensor as pairs of numbers."""
    return torch.view_as_real(t) if t.is_complex() else t


def strided(p: Tensor, most: int = ELEMENTS) -> Tensor:
    """At most so many elements of a tensor, or a few more, evenly spread."""
    flat = _real(p.detach()).reshape(-1)
    step = flat.numel() // most
    return flat[::step] if step > 1 else flat


class Pieces(NamedTuple):
    """Elements of some tensors of one dtype on one device, one behind the other."""

    names: list[str]
    sizes: list[int]
    values: Tensor


def pieces(tensors: dict[str, Tensor]) -> list[Pieces]:
    """Return a copy of some elements of each."""
    kinds: dict[tuple, dict[str, Tensor]] = {}
    for name, p in tensors.items():
        # sharded or wrapped: not to be mixed with others
        alone = None if type(p) in PLAIN else name
        kinds.setdefault((p.device, p.dtype, alone), {})[name] = strided(p, STEPPED)
    return [
        Pieces(list(each), [x.numel() for x in each.values()], torch.cat(list(each.values())))
        for each in kinds.values()
    ]


def updates(
    before: list[Pieces],
    tensors: dict[str, Tensor],
    rates: dict[int, float],
    gradients: dict[str, float],
) -> list[Update]:
    """Return what a step did to these tensors, given the norms of the gradients that it used."""
    found = []
    for piece in before:
        piece = _of(piece, tensors)
        names, sizes = piece.names, piece.sizes
        now = pieces({n: tensors[n] for n in names})
        if len(now) != 1 or now[0].sizes != sizes or now[0].values.dtype != piece.values.dtype:
            continue  # none of them is this optimizer's, or they were replaced meanwhile
        was = piece.values.float()
        dense = {
            n: g for n in names if (g := tensors[n].grad) is not None and g.layout == torch.strided
        }
        zero = pieces(dense) if dense else []
        facts = [
            *torch._foreach_norm((now[0].values.float() - was).split(sizes)),
            *torch._foreach_norm(was.split(sizes)),
            *torch._foreach_norm((now[0].values != piece.values).float().split(sizes), 1),
        ]
        silent = [
            x for z in zero for x in torch._foreach_norm((z.values == 0).float().split(z.sizes), 1)
        ]
        numbers = torch.stack([*facts, *silent]).tolist()
        many = len(names)
        share = dict(zip([n for z in zero for n in z.names], numbers[3 * many :]))
        counts = dict(
            zip([n for z in zero for n in z.names], [size for z in zero for size in z.sizes])
        )
        for name, size, moved, norm, other in zip(
            names, sizes, numbers, numbers[many:], numbers[2 * many :]
        ):
            p = tensors[name]
            found.append(
                Update(
                    name=name,
                    shape=tuple(p.shape),
                    dtype=p.dtype,
                    lr=rates[id(p)],
                    rms=moved / size**0.5 if size else math.nan,
                    relative=moved / norm if norm > 0 else math.inf if moved > 0 else 0.0,
                    changed=other / size if size else math.nan,
                    gradient=gradients.get(name),
                    silent=share[name] / counts[name] if counts.get(name) else None,
                )
            )
    return found


def _of(piece: Pieces, names: Iterable[str]) -> Pieces:
    """Without other tensors than these."""
    there = [n in names for n in piece.names]
    if all(there):
        return piece
    values = [x for x, is_there in zip(piece.values.split(piece.sizes), there) if is_there]
    return Pieces(
        [n for n, is_there in zip(piece.names, there) if is_there],
        [x.numel() for x in values],
        torch.cat(values) if values else piece.values[:0],
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


def tracked(e: Evidence) -> dict[int, int]:
    """How many batches each normalisation of the models has taken into its statistics, by id."""
    kinds = torch.nn.modules.batchnorm._BatchNorm
    counts = {id(m): m.num_batches_tracked for _, m in e.modules() if isinstance(m, kinds)}
    counts = {key: n.detach().cpu() for key, n in counts.items() if n is not None and not n.is_meta}
    return dict(zip(counts, torch.stack(list(counts.values())).tolist())) if counts else {}


def tied(e: Evidence) -> bool | None:
    into, out = e.embedding(), e.head()
    return None if into is None or out is None else into.data_ptr() == out.data_ptr()
