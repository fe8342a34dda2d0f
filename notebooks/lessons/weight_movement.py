"""How far each weight moved, compared with how far its learning rates and its dtype allow.

An entry moves by at most about the rate in an AdamW step. In a Muon step a matrix moves by
rate x scale x 0.9 / sqrt(max(out, in)), root mean square. So the sum of the rates of a run bounds
how far a tensor can move. A norm that is 0.004 from 1 after rates that sum to 0.0047 moved as fast
as it could. The run was short; the norm was not stuck.

Rounding depends on the spacing of numbers. A number p of a dtype with epsilon e ignores an update
that is smaller than half the distance to its neighbour, which lies between e |p| / 4 and e |p| / 2.
A norm weight of 1.0 in bf16 does not change at any rate up to 0.0019 (downwards; 0.0039 upwards),
however many steps are made. In fp32 it moves at 1e-7.

Footgun: 'not one entry changed' has three causes that look the same: no gradient, no rate, or every
step rounded away.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblib import wiring
from nblib.methods import muon
from nblib.methods.muon import audit as group_audit


class Moved(NamedTuple):
    """How one trainable tensor moved."""

    parameter: str
    dtype: str
    changed: float  # share of entries that are not what they were
    moved: float  # root mean square of the change
    relative: float  # that, over the root mean square of the first values
    reach: float  # root mean square that the summed rates allow
    # share of entries for which a step at the highest rate is under half their spacing
    rounded: float
    verdict: str


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every trainable tensor."""
    return {name: p.detach().clone() for name, p in wiring.trainable(model).items()}


def audit(
    model: nn.Module,
    start: dict[str, Tensor],
    optimizers: list[Optimizer],
    records: list[dict],
    *,
    never: float = 0.0,
) -> list[Moved]:
    """Judge every tensor of `start` after the steps of `records`, with the optimizers that took
    them.

    never  share of changed entries up to which a tensor counts as stuck
    """
    if not records:
        raise ValueError("records = []: nothing was trained")
    first = optimizers[0].param_groups[0]
    base = first.get("base_lr", first["lr"])
    factors = [r["lr"] / base for r in records] if base else [0.0] * len(records)
    group_of = {id(p): g for o in optimizers for g in o.param_groups for p in g["params"]}
    named, table = dict(model.named_parameters()), []
    for name, before in start.items():
        now, group = named[name].detach(), group_of.get(id(named[name]))
        rate = group.get("base_lr", group["lr"]) if group else 0.0
        step = _step(now, group, rate) if group else 0.0
        change = (now.double() - before.double()).abs()
        changed, moved = float((change > 0).double().mean()), float(change.square().mean().sqrt())
        size = float(before.double().square().mean().sqrt())
        reach, highest = step * sum(factors), step * max(factors)
        rounded = float((highest < half_spacing(before)).double().mean())
        verdict = _verdict(changed <= never, group, reach, rounded, moved)
        relative = moved / size if size else float("inf") if moved else 0.0
        dtype = str(now.dtype).removeprefix("torch.")
        table.append(Moved(name, dtype, changed, moved, relative, reach, rounded, verdict))
    return table


def by_kind(moved: list[Moved], reasons: dict[str, str]) -> list[dict]:
    """One line per kind of parameter, which is what its reason says before the colon."""
    kinds: dict[str, list[Moved]] = {}
    for m in moved:
        kinds.setdefault(reasons[m.parameter].partition(":")[0], []).append(m)
    return [
        {
            "kind": kind,
            "tensors": len(ms),
            "stuck": sum(m.verdict.startswith("stuck") for m in ms),
            "moved, of their size": f"{min(m.relative for m in ms):.2g} to "
            f"{max(m.relative for m in ms):.2g}",
            "of their reach": f"{min(m.moved / m.reach for m in ms):.0%} to "
            f"{max(m.moved / m.reach for m in ms):.0%}",
        }
        for kind, ms in kinds.items()
    ]


def _step(p: Tensor, group: dict, rate: float) -> float:
    """Root mean square of a step at this rate; for AdamW the most that it usually is."""
    if group_audit.convention(group) == "AdamW":
        return rate
    return muon.step_rms(muon.map_shape(p.shape, group), rate, group_audit.convention(group))


def _verdict(stuck: bool, group: dict | None, reach: float, rounded: float, moved: float) -> str:
    if group is None:
        return "stuck: in no optimizer" if stuck else "moved, though in no optimizer"
    if not stuck:
        return f"moved {moved / reach:.0%} of its reach" if reach else "moved"
    if reach == 0:
        return "stuck: its rate is 0"
    return "stuck: every step rounds away" if rounded > 0.5 else "stuck: no gradient"


def half_spacing(p: Tensor) -> Tensor:
    """Half the distance from each entry to the next number towards zero: a smaller change is
    lost.
    """
    p = p.detach()
    lower = torch.nextafter(p, torch.zeros_like(p))
    return (p.double() - lower.double()).abs() / 2


def precision(model: nn.Module) -> list[dict]:
    """Per dtype: tensors, entries, and the lowest rate at which most entries still feel an AdamW
    step.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for p in model.parameters():
        by_dtype.setdefault(p.dtype, []).append(p)
    return [
        {
            "dtype": str(dtype).removeprefix("torch."),
            "tensors": len(ps),
            "entries": sum(p.numel() for p in ps),
            "train": sum(p.requires_grad for p in ps),
            "matrices feel": max(
                (float(half_spacing(p).median()) for p in ps if p.ndim > 1), default=0.0
            ),
            "norms feel": max(
                (float(half_spacing(p).median()) for p in ps if p.ndim < 2), default=0.0
            ),
        }
        for dtype, ps in by_dtype.items()
        if dtype.is_floating_point
    ]


def gradient_range(
    records: list[dict], *, low: float = 0.1, high: float = 10.0
) -> dict[str, float]:
    """Least, middle and largest gradient norm of a run, and the share of steps outside of [low,
    high].

    The size matters for clipping. It matters little for Adam and Muon, which divide it away.
    """
    norms = torch.tensor([r["grad_norm"] for r in records if "grad_norm" in r], dtype=torch.float64)
    if not len(norms):
        raise ValueError("records: none has a 'grad_norm'")
    outside = ~((norms >= low) & (norms <= high))  # nan is outside
    return {
        "least": float(norms.min()),
        "median": float(norms.median()),
        "largest": float(norms.max()),
        "outside": float(outside.double().mean()),
    }
