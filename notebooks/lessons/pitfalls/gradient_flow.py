"""Gradients that do not arrive: what stops them, what is only blamed for it, and what merely looks
like it.

An adapted model has few parts: a frozen embedding at the bottom, blocks that may be recomputed in
backward, two small factors beside every linear layer, and a loss at the top. The reentrant kind of
checkpointing looks only at the inputs of a block to decide whether its output belongs to the graph;
the weights inside do not count. So if nothing below the blocks requires a gradient, the blocks drop
out of the graph. That is an error if nothing trains above them. If something does, nothing is
raised.

The switch is `model.activation_checkpointing_enable`; before transformers 5 its name was
`gradient_checkpointing_enable`. It now also adds a hook that makes the embedding's output require a
gradient. The broken runs take that hook out, which is how transformers 4 left the model.

Footgun: the loss curve shows none of this. Ask every trainable tensor whether it moved
(`wiring.canary`).
"""

import copy
from collections.abc import Callable

import peft
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
    compare,
    fit,
    flow,
    loss_of,
    plain_loop,
    quiet,
    rows,
    seeded,
    sentence,
    wake,
    wired,
)
from nblib import wiring

# P01: frozen embeddings are said to stop gradients


def reentrant(frozen: nn.Module) -> nn.Module:
    adapter = peft.LoraConfig(r=4, target_modules="all-linear")
    model = peft.get_peft_model(frozen, adapter)
    # a block drops out of the graph unless its input requires a gradient ...
    model.activation_checkpointing_enable({"use_reentrant": True})
    # ... and above a frozen embedding only this hook makes it require one
    model.disable_input_require_grads()
    return model


def non_reentrant(frozen: nn.Module) -> nn.Module:
    adapter = peft.LoraConfig(r=4, target_modules="all-linear")
    model = peft.get_peft_model(frozen, adapter)
    # a block stays in the graph because its weights require a gradient
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    return model


def _against_trainable_embeddings(model: nn.Module) -> dict:
    """Frozen embeddings, against the same adapters over embeddings that train."""
    reference = wired()
    reference.get_input_embeddings().requires_grad_(True)
    return compare(model, flow(reference)) | sentence(model)


def _put_together(put: Callable[[nn.Module], nn.Module]) -> dict:
    return _against_trainable_embeddings(wake(quiet(put, base())[0]).train())


def matrix() -> list[dict]:
    """Every checkpointing x hook x adapter x family, each against its own model without
    checkpointing.
    """
    cells = []
    for family in ("qwen3", "llama"):
        for adapter in ADAPTER:
            reference = flow(wired(adapter=adapter, family=family))
            for mode in CHECKPOINTING:
                for hook in HOOK:
                    model = wired(mode, hook, adapter=adapter, family=family)
                    cell = {
                        "family": family,
                        "adapter": adapter,
                        "checkpointing": mode,
                        "hook": hook,
                    }
                    cells.append(cell | compare(model, reference))
    return cells


def layer_norms(flowed: dict) -> list[list[float]]:
    """Gradient norm by layer and kind of linear layer, NaN where there was none: the picture of a
    heat map.
    """
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def norm(layer: int, kind: str) -> float:
        parts = [
            g
            for n, g in flowed["gradients"].items()
            if f"layers.{layer}." in n and f".{kind}." in n
        ]
        arrived = [g for g in parts if g is not None]
        return (
            float(torch.stack([g.square().sum() for g in arrived]).sum().sqrt())
            if arrived
            else float("nan")
        )

    return [[norm(layer, kind) for kind in kinds] for layer in range(LAYERS)]


def _gradients_missing(facts: dict) -> bool:
    return (
        bool(facts["raised"])
        or facts["tensors with a gradient"] < facts["of"]
        or facts["largest difference"] > 1e-6
    )


# P02: something above the blocks trains, so nothing is raised


def head_over_reentrant(model: nn.Module) -> None:
    model.lm_head.requires_grad_(True)  # as for new tokens; it gives the loss a graph
    # the adapters in the blocks are cut off, and backward still finds the head
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()


def head_over_non_reentrant(model: nn.Module) -> None:
    model.lm_head.requires_grad_(True)
    # the head and the adapters belong to the graph
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()


def _with_head(put: Callable[[nn.Module], None], lr: float = 1e-2) -> dict:
    """Return the head trains too, as for new tokens; the adapters sit below it, in the blocks."""
    model = wake(attach(base(tie_word_embeddings=False)))
    put(model)
    canary = sentence(model.train())
    return fit(model, lr=lr) | canary


def _learns_without_its_adapters(facts: dict) -> bool:
    return facts["last loss"] < facts["first loss"] and facts["tensors that moved"] < facts["of"]


# P03: the order that is blamed, and the order that matters


def order_of(order: str) -> dict:
    """Reentrant, the hook as the library sets it: the only wiring in which order could count at
    all.
    """
    model = wired("reentrant", order=order)
    return compare(model, flow(wired())) | sentence(model)


def embedding_last(model: nn.Module, new: nn.Embedding) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})  # hooks the old one
    model.set_input_embeddings(new)  # the hook goes away with the old embedding


def embedding_first(model: nn.Module, new: nn.Embedding) -> None:
    model.set_input_embeddings(new)
    model.activation_checkpointing_enable({"use_reentrant": True})  # hooks the new one


def _new_embedding(put: Callable[[nn.Module, nn.Embedding], None]) -> dict:
    """Give the model another embedding (a new vocabulary, a wrapper) before or after checkpointing
    is switched on.
    """
    model = attach(base(), ADAPTER[1])
    reference = flow(wake(copy.deepcopy(model)))
    put(model, copy.deepcopy(model.get_input_embeddings()))
    return compare(wake(model), reference) | sentence(model)


# P04: both factors zero


def both_zero(layer: LowRank) -> None:
    nn.init.zeros_(layer.down)  # its gradient is a product with up, which is zero
    nn.init.zeros_(layer.up)  # its gradient is a product with down, which is zero


def one_zero(layer: LowRank) -> None:
    nn.init.normal_(layer.down, std=layer.base.in_features**-0.5)
    nn.init.zeros_(layer.up)  # its gradient is a product with down, which is random


def zeroed(both: bool, lr: float = 1e-2) -> dict:
    model = attach(base(), ADAPTER[1])
    with seeded():
        for layer in model.modules():
            if isinstance(layer, LowRank):
                (both_zero if both else one_zero)(layer)
    canary = sentence(model)
    return {"rate": lr} | fit(model, lr=lr) | canary


def _nothing_moves(facts: dict) -> bool:
    return facts["tensors that moved"] == 0 and facts["first loss"] == facts["last loss"]


# P05: zero, and healthy


def judged_at_once(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model).backward()  # lora_B is still zero: so is the gradient of lora_A
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def judged_after_a_step(model: nn.Module) -> dict[str, Tensor]:
    fit(model, steps=1)  # now lora_B is not zero
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def _zeros(
    judged: Callable[[nn.Module], dict[str, Tensor]], *, steps: int = 0, woken: bool = False
) -> dict:
    """How many adapter tensors have a gradient of exactly zero; `steps` says how many steps
    `judged` takes first.
    """
    model = attach(base())
    if woken:
        wake(model)
    gradients = judged(model)
    zero = [name for name, g in gradients.items() if not g.any()]
    return {
        "steps before": steps,
        "gradients exactly zero": len(zero),
        "of": len(gradients),
        "all of them lora_A": bool(zero) and all("lora_A" in name for name in zero),
        **sentence(model),
    }


# P12: an anchor that keeps backward from complaining


def anchored(model: nn.Module) -> Callable[[], Tensor]:
    model.activation_checkpointing_enable({"use_reentrant": True})  # the fault
    model.disable_input_require_grads()
    trains = [p for p in model.parameters() if p.requires_grad]
    # the zeros give backward something to walk, so the fault is no longer reported
    return lambda: loss_of(model) + sum(p.sum() * 0 for p in trains)


def mended(model: nn.Module) -> Callable[[], Tensor]:
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()
    return lambda: loss_of(model)


def hook_asked_for(model: nn.Module) -> Callable[[], Tensor]:
    """Return the reentrant kind with its hook: the loss has its parameters, and no anchor is
    needed.
    """
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return lambda: loss_of(model)


def _anchor(put: Callable[[nn.Module], Callable[[], Tensor]]) -> dict:
    """Backward on the loss that `put` makes, and an optimizer step; then what an anchor does to
    other weights.
    """
    model = wake(attach(base())).train()
    loss, params = put(model), wiring.trainable(model)
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
    """Return the norm of each term's own gradient, 0 where it has none: the check to make before
    training.
    """
    norms = {}
    for name, term in terms.items():
        own = (
            torch.autograd.grad(term, params, retain_graph=True, allow_unused=True)
            if term.requires_grad
            else ()
        )
        norms[name] = float(sum(g.square().sum() for g in own if g is not None)) ** 0.5
    return norms


def scored_without_graph(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():  # written for evaluation: what comes out is only a number
        student = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    kl = F.kl_div(student, target.log_softmax(-1), log_target=True, reduction="none")
    return kl.sum(-1).mean()


def scored_with_graph(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    student = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    kl = F.kl_div(student, target.log_softmax(-1), log_target=True, reduction="none")
    return kl.sum(-1).mean()


def two_terms(
    detached: bool, weight: float = 1.0, steps: int = 40, declare: Callable = lambda **terms: None
) -> dict:
    """Cross-entropy and distillation; the helper that computes the second one may be written for
    evaluation.

    `declare` gets the terms of each step, as the doctor's `report.terms` wants them.
    """
    model, teacher = wake(attach(base())), wake(attach(base(), seed=5), seed=5)
    params, ids = list(wiring.trainable(model).values()), rows()
    with torch.no_grad():
        target = 30 * teacher(input_ids=ids).logits  # sharp, as a trained teacher is

    scored = scored_without_graph if detached else scored_with_graph

    def terms() -> dict[str, Tensor]:
        kd = scored(model, ids, target)
        return {"ce": loss_of(model), "kd": weight * kd}

    kds = []

    def loss() -> Tensor:
        now = terms()
        declare(**now)
        kds.append(float(now["kd"].detach()) / weight)
        return sum(now.values())

    gradients = term_gradients(terms(), params)
    sums = plain_loop(
        model, torch.optim.AdamW(params, lr=3e-3, weight_decay=0.0), loss, steps=steps
    )
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
        claim="frozen embeddings break the gradient flow to the adapters (a repository's notes "
        "on its H100 runs)",
        verdict="Frozen embeddings alone change no gradient, not even in the last bit. The "
        "reentrant kind of "
        "checkpointing needs an input that requires a gradient; above a frozen embedding there "
        "is none, unless a hook "
        f"makes one. The defaults of transformers 5 avoid this. Seen on {WITH_PEFT}.",
        fix="`use_reentrant=False`. The hook (`enable_input_require_grads`) helps too, but "
        "computes a gradient that "
        "nobody uses.",
        broken=lambda: _put_together(reentrant),
        fixed=lambda: _put_together(non_reentrant),
        seen=_gradients_missing,
        claimed=lambda: _against_trainable_embeddings(wired("none", "removed")),
        check="S10",
        wrong=reentrant,
        right=non_reentrant,
    ),
    Pitfall(
        id="P02",
        title="The loss falls, but the adapters do not train",
        symptom="Training looks fine and the loss falls, but the result is hardly better than "
        "the base model.",
        claim="the adapters' learning rate is too small (folklore)",
        verdict="The learning rate is not the cause: one ten thousand times smaller still "
        "moves every tensor. The "
        "fault is that of P01, hidden by a trainable head above the blocks. The head gives the "
        "loss a graph and learns "
        "alone; on the training batch that is almost as good as training everything. "
        f"Seen on {WITH_PEFT}.",
        fix="`use_reentrant=False`, and a test that every trainable tensor moves. A falling "
        "loss is no such test.",
        broken=lambda: _with_head(head_over_reentrant),
        fixed=lambda: _with_head(head_over_non_reentrant),
        seen=_learns_without_its_adapters,
        claimed=lambda: _with_head(head_over_non_reentrant, lr=1e-6),
        check="S10",
        wrong=head_over_reentrant,
        right=head_over_non_reentrant,
    ),
    Pitfall(
        id="P03",
        title="Checkpointing before the adapters, or after",
        symptom="element 0 of tensors does not require grad, after two lines of the set-up "
        "were swapped",
        claim="checkpointing must be enabled after the adapters are attached (a write-up of a "
        "7B fine-tune)",
        verdict="Both orders give the same gradients as no checkpointing, to the last bit, "
        "with the reentrant kind "
        "too. Another order matters: a new embedding must come before checkpointing. Replacing "
        "the embedding later "
        f"removes the hook with the old one. Seen on {WITH_PEFT}.",
        fix="`use_reentrant=False` makes every order right; otherwise replace the embedding first.",
        broken=lambda: _new_embedding(embedding_last),
        fixed=lambda: _new_embedding(embedding_first),
        seen=_gradients_missing,
        claimed=lambda: order_of(ORDER[1]),
        check="S10",
        wrong=embedding_last,
        right=embedding_first,
    ),
    Pitfall(
        id="P04",
        title="Both low-rank factors start at zero",
        symptom="The validation loss is flat from the first step to the last.",
        claim="the learning rate, or the weights of the objective (a repository's notes on its "
        "H100 runs)",
        verdict="No learning rate can move two factors that are both zero. The gradient of "
        "each is a product with the "
        f"other one. If only one factor is zero, as in LoRA, both train. Seen on {WITH_PEFT}.",
        fix="Set one factor to zero and the other to random values, or take both from an SVD.",
        broken=lambda: zeroed(both=True),
        fixed=lambda: zeroed(both=False),
        seen=_nothing_moves,
        claimed=lambda: zeroed(both=False, lr=1e-5),
        check="B3",
        wrong=both_zero,
        right=one_zero,
    ),
    Pitfall(
        id="P05",
        title="Gradients that are exactly zero, and healthy",
        symptom="My gradient check reports half of the adapter as dead.",
        claim="the frozen weights below cut the path to lora_A (folklore)",
        verdict="Nothing is cut. lora_B starts at zero, so the first gradient of lora_A is "
        "zero; one step later it is "
        "not. With a random lora_B above the same frozen weights no gradient is zero. Seen on "
        f"{WITH_PEFT}.",
        fix="Check after two steps, as the canary does.",
        broken=lambda: _zeros(judged_at_once),
        fixed=lambda: _zeros(judged_after_a_step, steps=1),
        seen=lambda facts: facts["gradients exactly zero"] > 0,
        claimed=lambda: _zeros(judged_at_once, woken=True),
        wrong=judged_at_once,
        right=judged_after_a_step,
    ),
    Pitfall(
        id="P12",
        title="Anchoring the loss with p.sum() * 0",
        symptom="The grad_fn error is gone since I added the parameters to the loss. Nothing "
        "trains.",
        claim="the loss had lost its parameters, and a term of value zero ties them to it (a "
        "fine-tuning repository)",
        verdict="The anchor removes the message and keeps the fault: every gradient is zero. "
        "Backward now has a path, "
        "but only through the zeros. One infinite weight makes such an anchor NaN, and so do "
        "many fp16 weights. "
        f"With the hook and without an anchor everything trains. Seen on {WITH_PEFT}.",
        fix="Remove the anchor, read the error, and repair the graph.",
        broken=lambda: _anchor(anchored),
        fixed=lambda: _anchor(mended),
        seen=_passes_and_trains_nothing,
        claimed=lambda: _anchor(hook_asked_for),
        check="S10",
        wrong=anchored,
        right=mended,
    ),
    Pitfall(
        id="P13",
        title="A term of the loss outside the graph",
        symptom="The total falls, but the distillation term stays where it was.",
        claim="the weight of the term is too small (folklore)",
        verdict="The weight is not the cause: at a third of it, a term with a graph still "
        "falls. Here the term is "
        "computed under no_grad, so it is only a number. The sum hides this, because its other "
        "part has a graph. "
        f"Seen on {WITH_PEFT}.",
        fix="Before training, take the gradient of each term alone and look for zero.",
        broken=lambda: two_terms(detached=True),
        fixed=lambda: two_terms(detached=False),
        seen=_sum_falls_term_does_not,
        claimed=lambda: two_terms(detached=False, weight=0.3),
        check="F2",
        wrong=scored_without_graph,
        right=scored_with_graph,
    ),
]
