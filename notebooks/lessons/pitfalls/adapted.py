"""The bench of the gradient pitfalls: a small adapted model wired one way or another, and what backward leaves in it.

Two adapters, so that no finding is blamed on one library: peft's LoRA, and eight lines of our own. `flow` makes one
forward and one backward pass and reports what was raised, what was warned, and the gradient of every trainable tensor;
`compare` sets that against a model of the same weights without checkpointing, which is the reference.

Footgun: a fresh LoRA has one factor at zero, so half of its gradients are zero for a good reason. Every comparison
here gives both factors random values first (`wake`), or it could not tell a dead gradient from a healthy zero.
"""

from collections.abc import Callable

import peft
import torch
from torch import Tensor, nn

from lessons.pitfalls.bench import quiet, seeded
from nblib import models, wiring

VOCABULARY, LAYERS = 256, 3
CHECKPOINTING = ("none", "non-reentrant", "reentrant", "default")
HOOK = ("left to the library", "asked for", "removed")
ORDER = ("adapter, then checkpointing", "checkpointing, then adapter")
ABOVE = ("nothing", "norm", "head")
ADAPTER = ("LoRA (peft)", "low rank (own)")


class LowRank(nn.Module):
    """y = W x + up (down x) with W frozen: the whole idea of an adapter."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def rows(count: int = 4, length: int = 24) -> Tensor:
    """Fixed random token ids, the same on every call."""
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(7))


def inside(model: nn.Module) -> nn.Module:
    """The causal model itself, without what peft wraps around it."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def base(family: str = "qwen3", hidden: int = 32, **config) -> nn.Module:
    model = models.tiny(VOCABULARY, family=family, hidden=hidden, layers=LAYERS, length=64, **config)
    return model.requires_grad_(False)


def attach(model: nn.Module, adapter: str = ADAPTER[0], *, seed: int = 0) -> nn.Module:
    """Adapters on every linear layer of the blocks; everything else is frozen."""
    with seeded(seed):
        if adapter == ADAPTER[0]:
            config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
            return quiet(peft.get_peft_model, model, config)[0]
        wiring.swap(model, lambda _, linear: LowRank(linear), wiring.select(model))
        return model


def wake(model: nn.Module, *, seed: int = 1) -> nn.Module:
    """Random values in every adapter tensor, the same for the same shapes in the same order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in wiring.trainable(model).values():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


def checkpointed(model: nn.Module, mode: str) -> nn.Module:
    """Switch activation checkpointing on as `mode` says; "default" leaves the kind to transformers."""
    if mode != "none":
        inside(model).activation_checkpointing_enable(*[{"use_reentrant": mode == "reentrant"}][: mode != "default"])
    return model


def hooked(model: nn.Module, hook: str) -> nn.Module:
    """The hook that makes the embedding's output require a gradient: as the library left it, asked for, or removed."""
    inner = inside(model)
    if hook == "asked for":
        inner.enable_input_require_grads()
    elif hook == "removed" and getattr(inner, "_require_grads_hooks", None):
        inner.disable_input_require_grads()
    return model


def wired(
    checkpointing: str = "none",
    hook: str = HOOK[0],
    order: str = ORDER[0],
    adapter: str = ADAPTER[0],
    family: str = "qwen3",
    above: str = ABOVE[0],
) -> nn.Module:
    """A frozen tiny model with adapters that have something to learn, put together in the given order.

    `above` names what else trains, above the blocks: the final norm, or a head of its own, not tied to the embedding.
    """
    for name, value, allowed in (
        ("checkpointing", checkpointing, CHECKPOINTING),
        ("hook", hook, HOOK),
        ("order", order, ORDER),
        ("adapter", adapter, ADAPTER),
        ("above", above, ABOVE),
    ):
        if value not in allowed:  # or a misspelt wiring would be shown as another one
            raise ValueError(f"{name} = {value!r}: allowed are {'; '.join(allowed)}")
    model = base(family, tie_word_embeddings=above != "head")
    if order == ORDER[0]:
        model = checkpointed(attach(model, adapter), checkpointing)
    else:
        model = attach(checkpointed(model, checkpointing), adapter)
    wake(hooked(model, hook))
    top = {"nothing": None, "norm": inside(model).model.norm, "head": inside(model).lm_head}[above]
    if top is not None:
        top.requires_grad_(True)
    return model.train()


def loss_of(model: nn.Module, ids: Tensor | None = None) -> Tensor:
    ids = rows() if ids is None else ids
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def flow(model: nn.Module, loss: Callable[[], Tensor] | None = None) -> dict:
    """One forward and one backward pass: what it raised, what it warned, and the gradients by name."""
    model.zero_grad()

    def both() -> str | None:
        try:
            (loss or (lambda: loss_of(model)))().backward()
        except RuntimeError as error:
            return str(error).splitlines()[0]

    raised, warned = quiet(both)
    found = {name: None if p.grad is None else p.grad.clone() for name, p in wiring.trainable(model).items()}
    return {"raised": raised, "warned": [w for w in warned if "requires_grad" in w], "gradients": found}


def compare(model: nn.Module, reference: dict) -> dict:
    """`flow` in words and numbers: how many tensors got a gradient, and how far it is from the reference's."""
    seen = flow(model)
    alive = {n: g for n, g in seen["gradients"].items() if g is not None}
    apart = [float((g - reference["gradients"][n]).abs().max()) for n, g in alive.items()]
    return {
        "raised": seen["raised"],
        "warned": seen["warned"][0] if seen["warned"] else None,
        "tensors with a gradient": len(alive),
        "of": len(seen["gradients"]),
        "largest difference": max(apart) if apart else None,
    }


def sentence(model: nn.Module, loss: Callable[[], Tensor] | None = None) -> dict:
    """What the canary says, as a fact."""
    return {"canary": quiet(wiring.canary, model, loss or (lambda: loss_of(model)))[0].sentence}


def matrix() -> list[dict]:
    """Every checkpointing x hook x adapter x family, each against its own model without checkpointing."""
    found = []
    for family in ("qwen3", "llama"):
        for adapter in ADAPTER:
            reference = flow(wired(adapter=adapter, family=family))
            for mode in CHECKPOINTING:
                for hook in HOOK:
                    model = wired(mode, hook, adapter=adapter, family=family)
                    cell = {"family": family, "adapter": adapter, "checkpointing": mode, "hook": hook}
                    found.append(cell | compare(model, reference))
    return found


def fit(model: nn.Module, *, steps: int = 20, lr: float = 1e-2, optimizer=None, ids: Tensor | None = None) -> dict:
    """Train on one batch with AdamW and say what moved: the loss, and the trainable tensors that changed at all."""
    params = wiring.trainable(model)
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = optimizer or torch.optim.AdamW(params.values(), lr=lr, weight_decay=0.0)

    def go() -> list[float]:
        losses = []
        for _ in range(steps):
            model.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    losses, warned = quiet(go)
    moved = sum(not torch.equal(p, before[name]) for name, p in params.items())
    return {"first loss": losses[0], "last loss": losses[-1], "tensors that moved": moved, "of": len(params)}


def layer_norms(found: dict, layers: int = LAYERS) -> list[list[float]]:
    """Gradient norm by layer and kind of linear layer, NaN where there was none: the picture of a heat map."""
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def norm(layer: int, kind: str) -> float:
        parts = [g for n, g in found["gradients"].items() if f"layers.{layer}." in n and f".{kind}." in n]
        alive = [g for g in parts if g is not None]
        return float(torch.stack([g.square().sum() for g in alive]).sum().sqrt()) if alive else float("nan")

    return [[norm(layer, kind) for kind in kinds] for layer in range(layers)]
