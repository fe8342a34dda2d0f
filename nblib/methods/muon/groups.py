"""Which parameters go to Muon and which to AdamW, and why.

The module that owns a parameter decides. Weights of linear layers inside the blocks and stacked
experts are maps between spaces and belong in Muon. Embeddings, heads, norms, biases and routers
belong in AdamW. So do parameters that are used entry by entry: the decay rates of a state space and
the taps of a convolution have two or three dimensions, but they are no maps.

    assign        the optimizer of every trainable parameter, with the reason
    optimizers    [Muon, AdamW] with their groups made by it
    Together      both behind the interface of one, for trainers that hold a single one

Footgun: a schedule that writes one rate into every group, as a hand-made loop easily does, undoes
the split.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from nblib import wiring
from nblib.methods.muon.muon import Muon


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
    for what, module in (
        ("output head", model.get_output_embeddings()),
        ("embedding", model.get_input_embeddings()),
    ):
        table |= {id(p): what for p in module.parameters()} if module is not None else {}
    vocabulary, trunk = (
        model.get_input_embeddings().weight.shape[0],
        set(model.base_model.modules()),
    )
    for module in model.modules():  # further heads over the vocabulary
        if (
            module not in trunk
            and isinstance(module, nn.Linear)
            and module.out_features == vocabulary
        ):
            table.setdefault(id(module.weight), "output head")
    return table


def _assign(module: nn.Module, leaf: str, p: Tensor, lookups: dict[int, str]) -> Assignment:
    if id(p) in lookups:
        return Assignment("AdamW", f"{lookups[id(p)]}: its rows belong to single tokens")
    if p.ndim < 2:
        return Assignment(
            "AdamW", "bias: one-dimensional" if leaf == "bias" else "norm or scale: one-dimensional"
        )
    if p.ndim == 3 and getattr(module, "num_experts", None) == p.shape[0]:
        turned = bool(getattr(module, "is_transposed", False))
        reason = f"stacked experts: {p.shape[0]} maps, each orthogonalised alone"
        return Assignment("Muon", reason, turned, leaf == "gate_up_proj" and not turned)
    if hasattr(module, "top_k") and hasattr(module, "num_experts"):
        return Assignment("AdamW", "router: its rows are scores of single experts")
    if p.ndim == 2 and wiring.is_linear(module):
        if min(p.shape) == 1:
            return Assignment("AdamW", "a map to or from one number: a vector")
        return Assignment("Muon", "hidden matrix: a map between spaces", wiring.is_conv1d(module))
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
    """[Muon, fused AdamW] over every trainable parameter, split by `assign`.

    AdamW's matrices decay too.
    """
    named, assigned = wiring.trainable(model), assign(model)
    if not named:
        raise ValueError("nothing to train: no parameter of the model requires a gradient")
    layouts: dict[tuple[bool, bool], list] = {}
    for name, a in assigned.items():
        if a.optimizer == "Muon":
            layouts.setdefault((a.transposed, a.fused and halves), []).append(named[name])
    groups = [
        {"params": params, "transposed": turned, "halves": two}
        for (turned, two), params in layouts.items()
    ]
    rest = [named[name] for name, a in assigned.items() if a.optimizer == "AdamW"]
    adam = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = dict(lr=lr, weight_decay=weight_decay, adjust=adjust, compute=compute)
    muons = [Muon(groups, **options)] if groups else []
    adam = [g for g in adam if g["params"]]
    return muons + ([AdamW(adam, lr=adamw_lr, betas=(0.9, 0.95), fused=True)] if adam else [])


class Together(Optimizer):
    """Several optimizers behind the interface of one, for trainers that hold a single one."""

    def __init__(self, parts: list[Optimizer]):
        if not parts:
            raise ValueError("parts = []: at least one optimizer")
        self.parts, self.defaults = list(parts), {}
        super().__init__([g for o in parts for g in o.param_groups], {})

    @property
    # always the parts' own: loading a state gives them new ones
    def param_groups(self) -> list[dict]:
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
