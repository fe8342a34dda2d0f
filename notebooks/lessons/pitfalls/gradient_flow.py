"""Gradients that do not arrive: what stops them, what is only blamed for it, and what merely looks like it.

The wires of an adapted model are few: a frozen embedding at the bottom, blocks that may be recomputed in backward, two
small factors beside every linear layer, a loss at the top. The reentrant kind of checkpointing is a function whose
inputs decide whether its output belongs to the graph. Weights inside do not count. So if nothing below the blocks
requires a gradient, the blocks drop out of the graph: an error if nothing trains above them, silence if something does.

Footgun: none of these is visible in the loss curve. Ask every trainable tensor whether it moved (`wiring.canary`).
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lessons.pitfalls import WITH_PEFT, Pitfall
from lessons.pitfalls.bench import (
    ADAPTER,
    CHECKPOINTING,
    HOOK,
    LAYERS,
    ORDER,
    LowRank,
    attach,
    base,
    checkpointed,
    compare,
    fit,
    flow,
    loss_of,
    plain_loop,
    rows,
    sentence,
    wake,
    wired,
)
from nblib import wiring

# P01: frozen embeddings are said to stop gradients


def _wire(mode: str, hook: str) -> dict:
    """Frozen embeddings, against the same adapters over embeddings that train."""
    model, reference = wired(mode, hook), wired()
    reference.get_input_embeddings().requires_grad_(True)
    return compare(model, flow(reference)) | sentence(model)


def matrix() -> list[dict]:
    """Every checkpointing x hook x adapter x family, each against its own model without checkpointing."""
    cells = []
    for family in ("qwen3", "llama"):
        for adapter in ADAPTER:
            reference = flow(wired(adapter=adapter, family=family))
            for mode in CHECKPOINTING:
                for hook in HOOK:
                    model = wired(mode, hook, adapter=adapter, family=family)
                    cell = {"family": family, "adapter": adapter, "checkpointing": mode, "hook": hook}
                    cells.append(cell | compare(model, reference))
    return cells


def layer_norms(flowed: dict) -> list[list[float]]:
    """Gradient norm by layer and kind of linear layer, NaN where there was none: the picture of a heat map."""
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def norm(layer: int, kind: str) -> float:
        parts = [g for n, g in flowed["gradients"].items() if f"layers.{layer}." in n and f".{kind}." in n]
        arrived = [g for g in parts if g is not None]
        return float(torch.stack([g.square().sum() for g in arrived]).sum().sqrt()) if arrived else float("nan")

    return [[norm(layer, kind) for kind in kinds] for layer in range(LAYERS)]


def _gradients_missing(facts: dict) -> bool:
    return bool(facts["raised"]) or facts["tensors with a gradient"] < facts["of"] or facts["largest difference"] > 1e-6


# P02: something above the blocks trains, so nothing is raised


def _with_head(mode: str, lr: float = 1e-2) -> dict:
    """The head trains too, as for new tokens; the adapters sit below it, in the blocks."""
    model = wired(mode, "removed", above="head")
    canary = sentence(model)
    return fit(model, lr=lr) | canary


def _learns_without_its_adapters(facts: dict) -> bool:
    return facts["last loss"] < facts["first loss"] and facts["tensors that moved"] < facts["of"]


# P03: the order that is argued about, and the one that counts


def order_of(order: str) -> dict:
    """Reentrant, the hook as the library sets it: the only wiring in which order could count at all."""
    model = wired("reentrant", order=order)
    return compare(model, flow(wired())) | sentence(model)


def _new_embedding(first: bool) -> dict:
    """Give the model another embedding (a new vocabulary, a wrapper) before or after checkpointing is switched on."""
    model = attach(base(), ADAPTER[1])
    reference = flow(wake(copy.deepcopy(model)))
    new = copy.deepcopy(model.get_input_embeddings())
    if first:
        model.set_input_embeddings(new)
    checkpointed(model, "reentrant")
    if not first:
        model.set_input_embeddings(new)
    return compare(wake(model), reference) | sentence(model)


# P04: both factors zero


def zeroed(both: bool, lr: float = 1e-2) -> dict:
    model = attach(base(), ADAPTER[1])
    for layer in model.modules():
        if isinstance(layer, LowRank) and both:
            nn.init.zeros_(layer.down)
    canary = sentence(model)
    return {"rate": lr} | fit(model, lr=lr) | canary


def _nothing_moves(facts: dict) -> bool:
    return facts["tensors that moved"] == 0 and facts["first loss"] == facts["last loss"]


# P05: zero, and healthy


def _zeros(steps: int = 0, woken: bool = False) -> dict:
    """How many adapter tensors have a gradient of exactly zero, after `steps` optimizer steps."""
    model = attach(base())
    if woken:
        wake(model)
    if steps:
        fit(model, steps=steps)
    gradients = flow(model)["gradients"]
    zero = [name for name, g in gradients.items() if not g.any()]
    return {
        "steps before": steps,
        "gradients exactly zero": len(zero),
        "of": len(gradients),
        "all of them lora_A": bool(zero) and all("lora_A" in name for name in zero),
        **sentence(model),
    }


# P12: an anchor that keeps backward from complaining


def _anchored(mode: str, hook: str, anchor: bool) -> dict:
    """Backward on the loss, with `+ p.sum() * 0` over the trainable tensors or without, and an optimizer step."""
    model = wired(mode, hook)
    params = wiring.trainable(model)

    def loss() -> Tensor:
        return loss_of(model) + (sum(p.sum() * 0 for p in params.values()) if anchor else 0)

    flowed = flow(model, loss)
    norms = [float(g.norm()) for g in flowed["gradients"].values() if g is not None]
    return {
        "raised": flowed["raised"],
        "tensors with a gradient": len(norms),
        "of them not zero": sum(n > 0 for n in norms),
        "of": len(params),
        **sentence(model, loss),
        "anchor on one infinite weight": float(torch.tensor([1.0, float("inf")]).sum() * 0),
        "anchor on many fp16 ones": float(torch.ones(1 << 17, dtype=torch.float16).sum() * 0),
    }


def _passes_and_trains_nothing(facts: dict) -> bool:
    return facts["raised"] is None and facts["of them not zero"] == 0


# P13: one term of the loss is outside the graph


def term_gradients(terms: dict[str, Tensor], params: list[Tensor]) -> dict[str, float]:
    """The norm of each term's own gradient, 0 where it has none: the check to make before training."""
    norms = {}
    for name, term in terms.items():
        own = torch.autograd.grad(term, params, retain_graph=True, allow_unused=True) if term.requires_grad else ()
        norms[name] = float(sum(g.square().sum() for g in own if g is not None)) ** 0.5
    return norms


def two_terms(detached: bool, weight: float = 1.0, steps: int = 40, declare: Callable = lambda **terms: None) -> dict:
    """Cross-entropy and distillation; the helper that computes the second may have been written for evaluation.

    `declare` is given the terms of each step, as the doctor's `report.terms` wants them.
    """
    model, teacher = wake(attach(base())), wake(attach(base(), seed=5), seed=5)
    params, ids = list(wiring.trainable(model).values()), rows()
    with torch.no_grad():
        target = 30 * teacher(input_ids=ids).logits  # sharp, as a trained teacher is

    def terms() -> dict[str, Tensor]:
        with torch.set_grad_enabled(not detached):
            student = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            kd = F.kl_div(student, target.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
        return {"ce": loss_of(model), "kd": weight * kd}

    kds = []

    def loss() -> Tensor:
        now = terms()
        declare(**now)
        kds.append(float(now["kd"].detach()) / weight)
        return sum(now.values())

    gradients = term_gradients(terms(), params)
    sums = plain_loop(model, torch.optim.AdamW(params, lr=3e-3, weight_decay=0.0), loss, steps=steps)
    return {
        "first sum": sums[0],
        "last sum": sums[-1],
        "first kd": kds[0],
        "last kd": kds[-1],
        **{f"gradient of {name}": norm for name, norm in gradients.items()},
        **sentence(model, lambda: sum(terms().values())),
    }


def _sum_falls_term_does_not(facts: dict) -> bool:
    return facts["last sum"] < facts["first sum"] and facts["last kd"] > 0.99 * facts["first kd"]


PITFALLS = [
    Pitfall(
        id="P01",
        title="Frozen embeddings and reentrant checkpointing",
        symptom="element 0 of tensors does not require grad and does not have a grad_fn",
        claim="frozen embeddings break the gradient flow to the adapters (a repository's notes on its H100 runs)",
        verdict="Frozen embeddings alone change nothing, not by one bit. The reentrant kind of checkpointing needs an "
        f"input that requires a gradient, and nobody provided one. Seen on {WITH_PEFT}, whose defaults avoid it.",
        fix="use_reentrant=False. The hook (enable_input_require_grads) also helps, and costs a gradient nobody uses.",
        broken=lambda: _wire("reentrant", "removed"),
        fixed=lambda: _wire("non-reentrant", "removed"),
        seen=_gradients_missing,
        claimed=lambda: _wire("none", "removed"),
        check="S10",
    ),
    Pitfall(
        id="P02",
        title="The loss falls and the adapters are dead",
        symptom="Training looks fine, the loss falls, and the result is hardly better than the base model.",
        claim="the adapters' learning rate is too small (folklore)",
        verdict="A rate ten thousand times smaller still moves every tensor. Here the fault of P01 is hidden by a "
        "trainable head above the blocks: it gives the loss a graph, it alone learns, and on the training batch it "
        f"learns almost as well as all together. Seen on {WITH_PEFT}.",
        fix="use_reentrant=False, and a test that every trainable tensor moves, not that the loss falls.",
        broken=lambda: _with_head("reentrant"),
        fixed=lambda: _with_head("non-reentrant"),
        seen=_learns_without_its_adapters,
        claimed=lambda: _with_head("non-reentrant", lr=1e-6),
        check="S10",
    ),
    Pitfall(
        id="P03",
        title="Checkpointing before the adapters, or after",
        symptom="element 0 of tensors does not require grad, after two lines of set-up changed places.",
        claim="checkpointing must be enabled after the adapters are attached (a write-up of a 7B fine-tune)",
        verdict="Either order gives the reference's gradients to the last bit, reentrant too. What must come first is "
        f"a new embedding: replacing it throws away the hook that sat on the old one. Seen on {WITH_PEFT}.",
        fix="use_reentrant=False makes every order right; otherwise replace the embedding first.",
        broken=lambda: _new_embedding(first=False),
        fixed=lambda: _new_embedding(first=True),
        seen=_gradients_missing,
        claimed=lambda: order_of(ORDER[1]),
        check="S10",
    ),
    Pitfall(
        id="P04",
        title="Both low-rank factors start at zero",
        symptom="The validation loss is flat from the first step to the last.",
        claim="the learning rate, or the weights of the objective (a repository's notes on its H100 runs)",
        verdict="Each factor's gradient is a product with the other. One zero is healthy; with two nothing can ever "
        f"move, at any rate. Seen on {WITH_PEFT}.",
        fix="Set one factor to zero and the other to random values, or both from an SVD.",
        broken=lambda: zeroed(both=True),
        fixed=lambda: zeroed(both=False),
        seen=_nothing_moves,
        claimed=lambda: zeroed(both=False, lr=1e-5),
        check="B3",
    ),
    Pitfall(
        id="P05",
        title="Gradients that are exactly zero, and healthy",
        symptom="My gradient check reports half of the adapter as dead.",
        claim="the frozen weights below cut the path to lora_A (folklore)",
        verdict="lora_B starts at zero, so the first gradient of lora_A is zero, and alive one step later. With lora_B "
        f"random and the same weights frozen there is no zero. Seen on {WITH_PEFT}.",
        fix="Judge after two steps, as the canary does.",
        broken=lambda: _zeros(),
        fixed=lambda: _zeros(steps=1),
        seen=lambda facts: facts["gradients exactly zero"] > 0,
        claimed=lambda: _zeros(woken=True),
    ),
    Pitfall(
        id="P12",
        title="Anchoring the loss with p.sum() * 0",
        symptom="The grad_fn error is gone since I tied the parameters to the loss. Nothing trains.",
        claim="the loss had lost its parameters, and a term of value zero ties them to it (a fine-tuning repository)",
        verdict="The anchor gives backward something to walk: zeros. It cures the message and keeps the fault, and one "
        "infinite weight makes the loss NaN. Without an anchor, and with the hook, all is well. "
        f"Seen on {WITH_PEFT}.",
        fix="Take the anchor out, read the error, and mend the graph.",
        broken=lambda: _anchored("reentrant", "removed", anchor=True),
        fixed=lambda: _anchored("non-reentrant", "removed", anchor=False),
        seen=_passes_and_trains_nothing,
        claimed=lambda: _anchored("reentrant", "asked for", anchor=False),
        check="S10",
    ),
    Pitfall(
        id="P13",
        title="A term of the loss outside the graph",
        symptom="The total falls, but the distillation term stays where it was.",
        claim="the weight of the term is too small (folklore)",
        verdict="At a third of the weight a live term still falls. The helper ran under no_grad: the term is a number, "
        f"and the sum hides it because its other part has a graph. Seen on {WITH_PEFT}.",
        fix="Before training, take the gradient of each term alone and look for zero.",
        broken=lambda: two_terms(detached=True),
        fixed=lambda: two_terms(detached=False),
        seen=_sum_falls_term_does_not,
        claimed=lambda: two_terms(detached=False, weight=0.3),
        check="F2",
    ),
]
