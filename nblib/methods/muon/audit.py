"""Is every parameter in the optimizer that it belongs in, and do the rates suit it?

    audit         where each parameter really is, compared with where it belongs
                  (nblib/methods/muon/groups.py)
    lint_rates    sentences about rates that look wrong
    step_sizes    one step of Muon against the size of the weights

A rate means nothing without its convention (P30): 0.02 with "original" and 0.003 with
"match_rms_adamw" move a matrix of width 512 by about the same. So `lint_rates` reads the convention
first, and then compares a step with the weights.

Footgun: a schedule moves `lr`. A group without `base_lr`, which the loop adds, shows the rate of
this moment.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from nblib import wiring
from nblib.methods.muon import groups as param_groups
from nblib.methods.muon import muon

# Usual rates. A rate outside its own convention's range and inside the other's was probably copied
# from there.
USUAL = {"original": (5e-3, 1e-1), "match_rms_adamw": (1e-5, 1e-2), "AdamW": (1e-5, 1e-2)}
LARGE_STEP = 0.5  # of a matrix's own size in one step
# rates of AdamW for anything; for embeddings, head and norms beside Muon
LARGEST, SMALLEST_BESIDE = 0.1, 2e-4


class Row(NamedTuple):
    """One parameter of an audit."""

    parameter: str
    shape: tuple[int, ...]
    belongs_in: str
    is_in: str
    rate: float
    decay: float
    reason: str

    @property
    def right(self) -> bool:
        return self.belongs_in == self.is_in


def audit(model: nn.Module, optimizers: list[Optimizer]) -> list[Row]:
    """Every trainable parameter, where it is and where it belongs.

    It may be 'nowhere', or 'twice' in groups.
    """
    groups_of: dict[int, list[dict]] = {}
    for group in (g for o in optimizers for g in o.param_groups):
        for p in group["params"]:
            groups_of.setdefault(id(p), []).append(group)
    assigned, rows = param_groups.assign(model), []
    for name, p in wiring.trainable(model).items():
        groups = groups_of.get(id(p), [])
        group, belongs = groups[0] if groups else {}, assigned[name]
        is_in = "nowhere" if not groups else "twice" if len(groups) > 1 else _kind(group)
        rate, decay = float(group.get("lr", 0.0)), group.get("weight_decay", 0.0)
        rows.append(
            Row(name, tuple(p.shape), belongs.optimizer, is_in, rate, decay, belongs.reason)
        )
    return rows


def lint_rates(model: nn.Module, optimizers: list[Optimizer]) -> list[str]:
    """Return a sentence for everything that looks wrong about the split and the rates; an empty
    list when nothing does.
    """
    rows = audit(model, optimizers)
    doubts = [
        f"{row.parameter} is in {row.is_in}, belongs in {row.belongs_in} ({row.reason})"
        for row in rows
        if not row.right
    ]
    named, groups = dict(model.named_parameters()), [g for o in optimizers for g in o.param_groups]
    maps = {id(named[row.parameter]) for row in rows if row.belongs_in == "Muon"}
    with_muon = any(convention(g) != "AdamW" for g in groups)
    for group in groups:
        mode = convention(group)
        if mode == "AdamW":
            doubts += _odd_adamw(
                group, maps=any(id(p) in maps for p in group["params"]), with_muon=with_muon
            )
        else:
            doubts += _odd_muon(group, mode)
    return list(dict.fromkeys(doubts))


def step_sizes(model: nn.Module, optimizers: list[Optimizer]) -> list[dict]:
    """Per parameter in Muon: rms of one step, of the weights, and their ratio, at the groups' base
    rates.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        {"parameter": names[id(p)], "convention": convention(g), "rate": _rate(g), **_step(p, g)}
        for o in optimizers
        for g in o.param_groups
        if convention(g) != "AdamW"
        for p in g["params"]
    ]


def _rate(group: dict) -> float:
    return float(group.get("base_lr", group["lr"]))  # the loop's schedule moves `lr`


def _step(p: Tensor, group: dict) -> dict:
    step = muon.step_rms(muon.map_shape(p.shape, group), _rate(group), convention(group))
    size = float(p.detach().float().norm()) / p.numel() ** 0.5
    return {
        "rms of a step": step,
        "rms of the weights": size,
        "ratio": step / size if size else float("inf"),
    }


def _odd_muon(group: dict, mode: str) -> list[str]:
    rate, (low, high), doubts = _rate(group), USUAL[mode], []
    if mode == "original" and rate < low:
        doubts.append(
            f"rate {rate:g} is AdamW's kind of number, and with 'original' scaling a matrix "
            f"moves by {rate:g} in "
            "spectral norm: take about 0.02, or adjust = 'match_rms_adamw'"
        )
    if mode == "match_rms_adamw" and rate > high:
        doubts.append(
            f"rate {rate:g} is a number for 'original' scaling; with 'match_rms_adamw' take "
            "AdamW's, about 0.003"
        )
    large = [s for p in group["params"] if (s := _step(p, group)["ratio"]) > LARGE_STEP]
    if large:
        doubts.append(
            f"{len(large)} matrices move by up to {max(large):.2g} of their own size in one "
            f"step at {rate:g}"
        )
    return doubts


def _odd_adamw(group: dict, *, maps: bool, with_muon: bool) -> list[str]:
    rate, (low, high), doubts = _rate(group), USUAL["AdamW"], []
    if rate > high and maps:  # embeddings of a small model can take far more than its matrices
        doubts.append(f"rate {rate:g} in AdamW is Muon's kind of number: matrices need about 0.003")
    elif rate > LARGEST:
        doubts.append(
            f"rate {rate:g} in AdamW moves every entry by about that in each step: usual are "
            f"{low:g} to {high:g}"
        )
    if with_muon and rate < SMALLEST_BESIDE:
        doubts.append(
            f"rate {rate:g} in the AdamW beside Muon: embeddings, head and norms hardly train "
            "at it, whatever Muon does"
        )
    if group["weight_decay"] and (flat := [p for p in group["params"] if p.ndim < 2]):
        doubts.append(
            f"weight decay {group['weight_decay']:g} pulls {len(flat)} norms and biases "
            "towards zero"
        )
    return doubts


def _kind(group: dict) -> str:
    return "AdamW" if convention(group) == "AdamW" else "Muon"


def convention(group: dict) -> str:
    """Return the convention of a group; torch's Muon calls it `adjust_lr_fn`, and None there means
    'original'.
    """
    if "adjust" in group:
        return group["adjust"]
    return (group["adjust_lr_fn"] or "original") if "adjust_lr_fn" in group else "AdamW"
