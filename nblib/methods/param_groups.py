"""Which parameters go to Muon and which to AdamW, why, and whether the learning rates suit the choice.

The module that owns a parameter decides. Weights of linear layers inside the blocks and stacked experts are maps
between spaces and belong in Muon. Embeddings, heads, norms, biases and routers belong in AdamW. So do parameters that
are used entry by entry: the decay rates of a state space and the taps of a convolution have two or three dimensions,
but they are no maps.

    assign        the optimizer of every trainable parameter, with the reason
    optimizers    [Muon, AdamW] with their groups made by it
    audit         where each parameter really is, compared with where it belongs
    lint_rates    sentences about rates that look wrong

A rate means nothing without its convention (P30): 0.02 with "original" and 0.003 with "match_rms_adamw" move a matrix
of width 512 by about the same. So `lint_rates` reads the convention first, and then compares a step with the weights.

Footgun: a schedule that writes one rate into every group, as a hand-made loop easily does, undoes the split.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers.pytorch_utils import Conv1D

from nblib import wiring
from nblib.methods import muon
from nblib.methods.muon import Muon

# Usual rates. A rate outside its own convention's range and inside the other's was probably copied from there.
USUAL = {"original": (5e-3, 1e-1), "match_rms_adamw": (1e-5, 1e-2), "AdamW": (1e-5, 1e-2)}
LARGE_STEP = 0.5  # of a matrix's own size in one step
LARGEST, SMALLEST_BESIDE = 0.1, 2e-4  # rates of AdamW for anything; for embeddings, head and norms beside Muon


class Assignment(NamedTuple):
    """The optimizer that a parameter belongs in, and why."""

    optimizer: str  # Muon or AdamW
    reason: str
    transposed: bool = False
    fused: bool = False  # gate over up in one tensor


def assign(model: nn.Module) -> dict[str, Assignment]:
    """Every trainable parameter by name. The module that owns it decides."""
    lookups, assigned = _outside_blocks(model), {}
    for prefix, module in model.named_modules():
        for leaf, p in module._parameters.items():
            if p is not None and p.requires_grad:
                assigned[f"{prefix}.{leaf}".lstrip(".")] = _assign(module, leaf, p, lookups)
    unique = wiring.trainable(model)  # a tied tensor stands once, under its first name
    return {name: assignment for name, assignment in assigned.items() if name in unique}


def _outside_blocks(model: nn.Module) -> dict[int, str]:
    """Parameters of embeddings and output heads, by identity."""
    table = {}
    for what, module in (("output head", model.get_output_embeddings()), ("embedding", model.get_input_embeddings())):
        table |= {id(p): what for p in module.parameters()} if module is not None else {}
    vocabulary, trunk = model.get_input_embeddings().weight.shape[0], set(model.base_model.modules())
    for module in model.modules():  # further heads over the vocabulary
        if module not in trunk and isinstance(module, nn.Linear) and module.out_features == vocabulary:
            table.setdefault(id(module.weight), "output head")
    return table


def _assign(module: nn.Module, leaf: str, p: Tensor, lookups: dict[int, str]) -> Assignment:
    if id(p) in lookups:
        return Assignment("AdamW", f"{lookups[id(p)]}: its rows belong to single tokens")
    if p.ndim < 2:
        return Assignment("AdamW", "bias: one-dimensional" if leaf == "bias" else "norm or scale: one-dimensional")
    if p.ndim == 3 and getattr(module, "num_experts", None) == p.shape[0]:
        turned = bool(getattr(module, "is_transposed", False))
        reason = f"stacked experts: {p.shape[0]} maps, each orthogonalised alone"
        return Assignment("Muon", reason, turned, leaf == "gate_up_proj" and not turned)
    if hasattr(module, "top_k") and hasattr(module, "num_experts"):
        return Assignment("AdamW", "router: its rows are scores of single experts")
    if p.ndim == 2 and isinstance(module, (nn.Linear, Conv1D)):
        if min(p.shape) == 1:
            return Assignment("AdamW", "a map to or from one number: a vector")
        return Assignment("Muon", "hidden matrix: a map between spaces", isinstance(module, Conv1D))
    return Assignment("AdamW", f"{type(module).__name__}.{leaf}: used entry by entry, not as a map")


def optimizers(
    model: nn.Module,
    *,
    lr: float = 0.02,
    adamw_lr: float = 3e-3,
    weight_decay: float = 0.0,
    adjust: str = "original",
    compute: str = "auto",
    halves: bool = False,
) -> list[Optimizer]:
    """[Muon, fused AdamW] over every trainable parameter, split by `assign`. AdamW's matrices decay too."""
    named, assigned = wiring.trainable(model), assign(model)
    if not named:
        raise ValueError("nothing to train: no parameter of the model requires a gradient")
    layouts: dict[tuple[bool, bool], list] = {}
    for name, a in assigned.items():
        if a.optimizer == "Muon":
            layouts.setdefault((a.transposed, a.fused and halves), []).append(named[name])
    groups = [{"params": params, "transposed": turned, "halves": two} for (turned, two), params in layouts.items()]
    rest = [named[name] for name, a in assigned.items() if a.optimizer == "AdamW"]
    adam = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = dict(lr=lr, weight_decay=weight_decay, adjust=adjust, compute=compute)
    muons = [Muon(groups, **options)] if groups else []
    adam = [g for g in adam if g["params"]]
    return muons + ([AdamW(adam, lr=adamw_lr, betas=(0.9, 0.95), fused=True)] if adam else [])


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
    """Every trainable parameter, where it is and where it belongs. It may be 'nowhere', or 'twice' in groups."""
    groups_of: dict[int, list[dict]] = {}
    for group in (g for o in optimizers for g in o.param_groups):
        for p in group["params"]:
            groups_of.setdefault(id(p), []).append(group)
    assigned, rows = assign(model), []
    for name, p in wiring.trainable(model).items():
        groups = groups_of.get(id(p), [])
        group, belongs = groups[0] if groups else {}, assigned[name]
        is_in = "nowhere" if not groups else "twice" if len(groups) > 1 else _kind(group)
        rate, decay = float(group.get("lr", 0.0)), group.get("weight_decay", 0.0)
        rows.append(Row(name, tuple(p.shape), belongs.optimizer, is_in, rate, decay, belongs.reason))
    return rows


def lint_rates(model: nn.Module, optimizers: list[Optimizer]) -> list[str]:
    """A sentence for everything that looks wrong about the split and the rates; an empty list when nothing does."""
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
            doubts += _odd_adamw(group, maps=any(id(p) in maps for p in group["params"]), with_muon=with_muon)
        else:
            doubts += _odd_muon(group, mode)
    return list(dict.fromkeys(doubts))


def step_sizes(model: nn.Module, optimizers: list[Optimizer]) -> list[dict]:
    """Per parameter in Muon: rms of one step, of the weights, and their ratio, at the groups' base rates."""
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
    return {"rms of a step": step, "rms of the weights": size, "ratio": step / size if size else float("inf")}


def _odd_muon(group: dict, mode: str) -> list[str]:
    rate, (low, high), doubts = _rate(group), USUAL[mode], []
    if mode == "original" and rate < low:
        doubts.append(
            f"rate {rate:g} is AdamW's kind of number, and with 'original' scaling a matrix moves by {rate:g} in "
            "spectral norm: take about 0.02, or adjust = 'match_rms_adamw'"
        )
    if mode == "match_rms_adamw" and rate > high:
        doubts.append(
            f"rate {rate:g} is a number for 'original' scaling; with 'match_rms_adamw' take AdamW's, about 0.003"
        )
    large = [s for p in group["params"] if (s := _step(p, group)["ratio"]) > LARGE_STEP]
    if large:
        doubts.append(f"{len(large)} matrices move by up to {max(large):.2g} of their own size in one step at {rate:g}")
    return doubts


def _odd_adamw(group: dict, *, maps: bool, with_muon: bool) -> list[str]:
    rate, (low, high), doubts = _rate(group), USUAL["AdamW"], []
    if rate > high and maps:  # embeddings of a small model can take far more than its matrices
        doubts.append(f"rate {rate:g} in AdamW is Muon's kind of number: matrices need about 0.003")
    elif rate > LARGEST:
        doubts.append(
            f"rate {rate:g} in AdamW moves every entry by about that in each step: usual are {low:g} to {high:g}"
        )
    if with_muon and rate < SMALLEST_BESIDE:
        doubts.append(
            f"rate {rate:g} in the AdamW beside Muon: embeddings, head and norms hardly train at it, whatever Muon does"
        )
    if group["weight_decay"] and (flat := [p for p in group["params"] if p.ndim < 2]):
        doubts.append(f"weight decay {group['weight_decay']:g} pulls {len(flat)} norms and biases towards zero")
    return doubts


def _kind(group: dict) -> str:
    return "AdamW" if convention(group) == "AdamW" else "Muon"


def convention(group: dict) -> str:
    """The convention of a group; torch's Muon calls it `adjust_lr_fn`, and None there means 'original'."""
    if "adjust" in group:
        return group["adjust"]
    return (group["adjust_lr_fn"] or "original") if "adjust_lr_fn" in group else "AdamW"


class Together(Optimizer):
    """Several optimizers behind the interface of one, for trainers that hold a single one."""

    def __init__(self, parts: list[Optimizer]):
        if not parts:
            raise ValueError("parts = []: at least one optimizer")
        self.parts, self.defaults = list(parts), {}
        super().__init__([g for o in parts for g in o.param_groups], {})

    @property
    def param_groups(self) -> list[dict]:  # always the parts' own: loading a state gives them new ones
        return [g for o in self.parts for g in o.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list) -> None:
        pass  # the base class starts from an empty list; the parts have theirs

    @property
    def state(self) -> dict:
        return {p: s for o in self.parts for p, s in o.state.items()}

    @state.setter
    def state(self, state: dict) -> None:
        pass

    def add_param_group(self, group: dict) -> None:
        pass  # called by the base class for groups that the parts hold

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
