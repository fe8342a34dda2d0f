"""Which optimizer each parameter belongs in, the reason, and whether its rate is a number of the right convention.

A parameter is judged by the module that owns it. Weights of linear layers inside the blocks and stacked experts are
maps between spaces and belong in Muon. Embeddings, heads, norms, biases, routers, and what is used entry by entry (a
state space's decay rates, a convolution's taps: two and three dimensions, and no map) belong in AdamW.

A rate means nothing without its convention (P30): 0.02 with "original" and 0.003 with "match_rms_adamw" move a matrix
of width 512 by about the same. So `lint_rates` reads the mode first, and shows what a step moves next to what is there.

Footgun: a schedule that writes one rate into every group, as a hand-made loop easily does, undoes the split.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers.pytorch_utils import Conv1D

from nblib.methods import muon
from nblib.methods.muon import Muon

# Where a rate usually lies. A number outside its own convention's range and inside the other's was copied.
USUAL = {"original": (5e-3, 1e-1), "match_rms_adamw": (1e-5, 1e-2), "AdamW": (1e-5, 1e-2)}
LARGE_STEP = 0.5  # of a matrix's own size in one step
LARGEST, SMALLEST_BESIDE = 0.1, 2e-4  # rates of AdamW for anything; for embeddings, head and norms beside Muon


class Place(NamedTuple):
    """Where a parameter belongs, and why."""

    optimizer: str  # Muon or AdamW
    reason: str
    transposed: bool = False
    fused: bool = False  # gate over up in one tensor


def places(model: nn.Module) -> dict[str, Place]:
    """Every trainable parameter by name. Decided by the module that owns it, and what that module is for."""
    lookups = _outside_blocks(model)
    found = {}
    for prefix, module in model.named_modules():
        for leaf, p in module._parameters.items():
            name = f"{prefix}.{leaf}".lstrip(".")
            if p is not None and p.requires_grad:
                found[name] = _place(module, leaf, p, lookups)
    shared = {name for name, _ in model.named_parameters()}  # a tied tensor stands once, under its first name
    return {name: place for name, place in found.items() if name in shared}


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


def _place(module: nn.Module, leaf: str, p: Tensor, lookups: dict[int, str]) -> Place:
    if id(p) in lookups:
        return Place("AdamW", f"{lookups[id(p)]}: its rows belong to single tokens")
    if p.ndim < 2:
        return Place("AdamW", "bias: one-dimensional" if leaf == "bias" else "norm or scale: one-dimensional")
    if p.ndim == 3 and getattr(module, "num_experts", None) == p.shape[0]:
        turned = bool(getattr(module, "is_transposed", False))
        reason = f"stacked experts: {p.shape[0]} maps, each orthogonalised alone"
        return Place("Muon", reason, turned, leaf == "gate_up_proj" and not turned)
    if hasattr(module, "top_k") and hasattr(module, "num_experts"):
        return Place("AdamW", "router: its rows are scores of single experts")
    if p.ndim == 2 and isinstance(module, (nn.Linear, Conv1D)):
        if min(p.shape) == 1:
            return Place("AdamW", "a map to or from one number: a vector")
        return Place("Muon", "hidden matrix: a map between spaces", isinstance(module, Conv1D))
    return Place("AdamW", f"{type(module).__name__}.{leaf}: used entry by entry, not as a map")


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
    """[Muon, fused AdamW] over all that trains, as `places` deals it out. AdamW's matrices decay too."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    where = places(model)
    if not named:
        raise ValueError("nothing to train: no parameter of the model requires a gradient")
    sides: dict[tuple[bool, bool], list] = {}
    for name, place in where.items():
        if place.optimizer == "Muon":
            sides.setdefault((place.transposed, place.fused and halves), []).append(named[name])
    groups = [{"params": params, "transposed": turned, "halves": two} for (turned, two), params in sides.items()]
    rest = [named[name] for name, place in where.items() if place.optimizer == "AdamW"]
    adam = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = dict(lr=lr, weight_decay=weight_decay, adjust=adjust, compute=compute)
    made = [Muon(groups, **options)] if groups else []
    adam = [g for g in adam if g["params"]]
    return made + ([AdamW(adam, lr=adamw_lr, betas=(0.9, 0.95), fused=True)] if adam else [])


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


def audit(model: nn.Module, made: list[Optimizer]) -> list[Row]:
    """Every trainable parameter, where it is and where it belongs. 'nowhere' and 'twice' are places, too."""
    held: dict[int, list[tuple[str, dict]]] = {}
    for optimizer in made:
        for group in optimizer.param_groups:
            kind = _kind(group)
            for p in group["params"]:
                held.setdefault(id(p), []).append((kind, group))
    where, rows = places(model), []
    for name, p in model.named_parameters():
        if p.requires_grad:
            found = held.get(id(p), [])
            kind, group = found[0] if found else ("nowhere", {})
            kind = "twice" if len(found) > 1 else kind
            rate, decay = group.get("lr", 0.0), group.get("weight_decay", 0.0)
            place = where[name]
            rows.append(Row(name, tuple(p.shape), place.optimizer, kind, float(rate), decay, place.reason))
    return rows


def lint_rates(model: nn.Module, made: list[Optimizer]) -> list[str]:
    """What is doubtful about the split and the rates, a sentence each; an empty list when nothing is."""
    rows = audit(model, made)
    said = [
        f"{row.parameter} is in {row.is_in}, belongs in {row.belongs_in} ({row.reason})"
        for row in rows
        if not row.right
    ]
    named, groups = dict(model.named_parameters()), [g for o in made for g in o.param_groups]
    maps = {id(named[row.parameter]) for row in rows if row.belongs_in == "Muon"}
    with_muon = any(convention(g) != "AdamW" for g in groups)
    for group in groups:
        mode = convention(group)
        if mode == "AdamW":
            said += _odd_adamw(group, maps=any(id(p) in maps for p in group["params"]), with_muon=with_muon)
        else:
            said += _odd_muon(group, mode)
    return list(dict.fromkeys(said))


def step_sizes(model: nn.Module, made: list[Optimizer]) -> list[dict]:
    """Per parameter in Muon: rms of one step, of the weights, and their ratio, at the groups' base rates."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        {"parameter": names[id(p)], "convention": convention(g), "rate": _rate(g), **_step(p, g)}
        for o in made
        for g in o.param_groups
        if convention(g) != "AdamW"
        for p in g["params"]
    ]


def _rate(group: dict) -> float:
    return float(group.get("base_lr", group["lr"]))  # the loop's schedule moves `lr`


def _step(p: Tensor, group: dict) -> dict:
    moved = muon.step_rms(muon.map_shape(p.shape, group), _rate(group), convention(group))
    there = float(p.detach().float().norm()) / p.numel() ** 0.5
    return {"rms of a step": moved, "rms of the weights": there, "ratio": moved / there if there else float("inf")}


def _odd_muon(group: dict, mode: str) -> list[str]:
    rate, (low, high), said = _rate(group), USUAL[mode], []
    if mode == "original" and rate < low:
        said.append(
            f"rate {rate:g} is AdamW's kind of number, and with 'original' scaling a matrix moves by {rate:g} in "
            "spectral norm: take about 0.02, or adjust = 'match_rms_adamw'"
        )
    if mode == "match_rms_adamw" and rate > high:
        said.append(
            f"rate {rate:g} is a number for 'original' scaling; with 'match_rms_adamw' take AdamW's, about 0.003"
        )
    large = [s for p in group["params"] if (s := _step(p, group)["ratio"]) > LARGE_STEP]
    if large:
        said.append(f"{len(large)} matrices move by up to {max(large):.2g} of their own size in one step at {rate:g}")
    return said


def _odd_adamw(group: dict, *, maps: bool, with_muon: bool) -> list[str]:
    rate, (low, high), said = _rate(group), USUAL["AdamW"], []
    if rate > high and maps:  # embeddings of a small model can take far more than its matrices
        said.append(f"rate {rate:g} in AdamW is Muon's kind of number: matrices need about 0.003")
    elif rate > LARGEST:
        said.append(
            f"rate {rate:g} in AdamW moves every entry by about that in each step: usual are {low:g} to {high:g}"
        )
    if with_muon and rate < SMALLEST_BESIDE:
        said.append(
            f"rate {rate:g} in the AdamW beside Muon: embeddings, head and norms hardly train at it, whatever Muon does"
        )
    if group["weight_decay"] and (flat := [p for p in group["params"] if p.ndim < 2]):
        said.append(f"weight decay {group['weight_decay']:g} pulls {len(flat)} norms and biases towards zero")
    return said


def _kind(group: dict) -> str:
    return "AdamW" if convention(group) == "AdamW" else "Muon"


def convention(group: dict) -> str:
    """The convention of a group; torch's Muon calls it `adjust_lr_fn`, and None there means 'original'."""
    if "adjust" in group:
        return group["adjust"]
    return (group["adjust_lr_fn"] or "original") if "adjust_lr_fn" in group else "AdamW"


class Together(Optimizer):
    """Several optimizers that pass for one, for trainers that hold a single one."""

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
