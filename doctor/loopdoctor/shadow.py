"""The fp32 shadow: how much of each update arrives in parameters of 16 bits?

A bf16 number has 8 bits. An update smaller than half the gap to the next number is rounded away. A
weight of 1 does not move at all for steps below 0.004. Counting elements that did not change is no
measure: stochastic rounding leaves most of them where they are and is right on average. So a few
tensors are cloned to fp32 and given the very same gradients through an optimizer of the same class;
after some steps

    c = <moved, shadow moved> / <shadow moved, shadow moved>

is the share of the shadow's way that the real tensor went: 1 for fp32 and for stochastic rounding,
near 0 when the updates are lost.

Footgun: an optimizer that keeps the lost part itself (Kahan sums, master weights) is late, not
lost; it is recognised by its state and left out.
"""

import copy
import inspect

import torch
from torch import Tensor

TENSORS, ELEMENTS = 8, 2**20
# of the rate: what a number moves in a step of Adam, once its first steps (of the whole rate) are
# over
SETTLED = 0.2
FAILURES = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
)
# each element's update depends on nothing but its own gradients, so that a piece can stand for the
# tensor
ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Lion",
    "Adamax",
)
KEEPERS = (
    "kahan",
    "comp",
    "master",
    "shift",
    "residual",
    "carr",
    "lost",
)  # what such optimizers call their compensation


class Shadow:
    """Follows up to eight low-precision tensors of each optimizer.

    `before` and `after` stand around its step.
    """

    def __init__(self):
        # id(optimizer) -> its shadow, or {} where there can be none
        self.pairs: dict[int, dict] = {}
        self.why = ""  # why there is none, "" where there is one or none is needed

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self.pairs:
            self.pairs[id(optimizer)] = self._make(optimizer)
        pair = self.pairs[id(optimizer)]
        if not pair:
            return
        for theirs, mine in pair["groups"]:  # rates change from step to step
            group = optimizer.param_groups[theirs]
            pair["optimizer"].param_groups[mine].update(
                {k: v for k, v in group.items() if k != "params"}
            )
        for p, double in pair["tensors"]:
            double.grad = (
                None if p.grad is None or p.grad.is_sparse else _piece(p.grad).float().clone()
            )
        try:
            pair["optimizer"].step()
        except FAILURES as error:
            self.pairs[id(optimizer)] = {}
            self.why = f"the shadow of {type(optimizer).__name__} could not step: {error}"

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        pair = self.pairs.get(id(optimizer))
        if pair and any(
            key for p, _ in pair["tensors"] for key in optimizer.state.get(p, {}) if _keeps(key)
        ):
            self.pairs[id(optimizer)] = {}
            self.why = "the optimizer keeps what rounding takes (compensation or master weights)"

    def coefficients(self) -> dict[str, float]:
        """Of each optimizer's tensors together, by index, and over all of them as "all"; empty
        where nothing moved.
        """
        moved = wanted = 0.0
        for key, pair in self.pairs.items():
            if _rounds_by_itself(pair):
                self.pairs[key] = pair = {}
                self.why = (
                    "the optimizer rounds what it writes, so an fp32 copy of it would "
                    "be rounded too"
                )
            for (p, double), start in zip(pair.get("tensors", ()), pair.get("starts", ())):
                way = double.detach() - start
                moved += float(((_piece(p.detach()).float() - start) * way).sum())
                wanted += float((way * way).sum())
        return {"all": moved / wanted} if wanted > 0 else {}

    def coarse(self) -> float:
        """Return the share of an Adam's numbers that a settled step, a fifth of the rate, can't
        change.
        """
        lost, numbers = 0, 0
        for pair in self.pairs.values():
            if not pair or "Adam" not in type(pair["optimizer"]).__name__:
                continue
            rates = {
                id(d): float(g["lr"]) for g in pair["optimizer"].param_groups for d in g["params"]
            }
            for p, double in pair["tensors"]:
                size, rate = _piece(p.detach()).float().abs().clamp_min(1e-30), rates[id(double)]
                # to the next number
                gap = torch.exp2(size.log2().floor()) * torch.finfo(p.dtype).eps
                lost += int((gap / 2 > SETTLED * rate).sum()) if rate else 0
                numbers += size.numel() if rate else 0
        return lost / numbers if numbers else 0.0

    def _make(self, optimizer: torch.optim.Optimizer) -> dict:
        chosen: list[tuple[int, Tensor]] = []
        for index, group in enumerate(optimizer.param_groups):
            low = [
                p
                for p in group["params"]
                if p.is_floating_point() and p.dtype.itemsize < 4 and p.requires_grad
            ]
            if type(optimizer).__name__ not in ELEMENTWISE:
                low = [p for p in low if p.numel() <= ELEMENTS]
            step = max(1, len(low) // TENSORS)
            chosen += [(index, p) for p in low[::step][:TENSORS]]
        if not chosen:
            return {}
        doubles = [_piece(p.detach()).float().clone().requires_grad_() for _, p in chosen]
        groups, order = [], sorted({index for index, _ in chosen})
        for index in order:
            options = {
                k: v
                for k, v in optimizer.param_groups[index].items()
                if k not in ("params", "initial_lr")
            }
            groups.append(
                {"params": [d for (i, _), d in zip(chosen, doubles) if i == index]} | options
            )
        twin = self._twin(optimizer, groups)
        if twin is None:
            return {}
        for (_, p), double in zip(chosen, doubles):  # a run under way has moments already
            if optimizer.state.get(p):
                twin.state[double] = {k: _wide(v, p) for k, v in optimizer.state[p].items()}
        return {
            "optimizer": twin,
            "groups": [(theirs, mine) for mine, theirs in enumerate(order)],
            "tensors": [(p, d) for (_, p), d in zip(chosen, doubles)],
            "starts": [d.detach().clone() for d in doubles],
        }

    def _twin(
        self, optimizer: torch.optim.Optimizer, groups: list[dict]
    ) -> torch.optim.Optimizer | None:
        """Another of the same class, or None: constructors differ."""
        kind = type(optimizer)
        if kind.__module__.startswith("bitsandbytes"):
            self.why = "the optimizer keeps its state in 8 bits or pages, which cannot be shadowed"
            return None
        known = inspect.signature(kind.__init__).parameters
        for more in ({}, {"lr": float(groups[0].get("lr", 1e-3))}, optimizer.defaults):
            try:
                return kind(
                    [dict(g) for g in groups], **{k: v for k, v in more.items() if k in known}
                )
            except FAILURES as error:
                self.why = f"no second {kind.__name__} could be made: {error}"
        return None


def _rounds_by_itself(pair: dict) -> bool:
    """Whether the fp32 copies hold nothing finer than the real tensors although they moved: the
    class itself rounds.
    """
    moved = [
        (p, d)
        for (p, d), start in zip(pair.get("tensors", ()), pair.get("starts", ()))
        if not torch.equal(d, start)
    ]
    return bool(moved) and all(
        torch.equal(d.detach(), d.detach().to(p.dtype).float()) for p, d in moved
    )


def _piece(t: Tensor) -> Tensor:
    """Return the tensor itself, or the first elements of a large one."""
    return t if t.numel() <= ELEMENTS else t.reshape(-1)[:ELEMENTS]


def _wide(value, like: Tensor):
    if isinstance(value, Tensor):
        return _piece(value).float().clone() if value.shape == like.shape else value.clone()
    return copy.deepcopy(value)


def _keeps(key) -> bool:
    return isinstance(key, str) and any(word in key.lower() for word in KEEPERS)
