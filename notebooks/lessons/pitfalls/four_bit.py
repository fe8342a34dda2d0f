"""Adapters over quantised weights: which tensors can train, which are packed, and what rounding
does to a gradient.

A 4-bit weight is stored as a column of bytes, with its scales beside it. Bytes cannot require a
gradient and need none: the factors beside the weight train, in floating point, and the gradient
flows through the dequantised product. So the order is always: quantise, prepare, attach. The
weights here are real NF4 by bitsandbytes, which runs on a CPU too.

Footgun: a packed weight is a matrix of one column. A search for adapters by shape (two axes, one of
them small) finds the packed base weights first.
"""

import copy
import tempfile
from collections.abc import Callable

import bitsandbytes as bnb
import peft
import torch
import transformers as tf
from bitsandbytes.functional import has_avx512bf16
from torch import Tensor, nn

from lessons.pitfalls import WITH_BNB, Pitfall
from lessons.pitfalls.bench import (
    ADAPTER,
    LAYERS,
    LowRank,
    attach,
    base,
    fit,
    flow,
    loss_of,
    quiet,
    seeded,
    sentence,
    wake,
)
from nblib import models, wiring
from nblib.models import keep_differentiable


def nf4() -> nn.Module:
    """Return the tiny model with its linear layers in 4 bits, made as for every QLoRA: saved, then
    loaded quantised.
    """
    with tempfile.TemporaryDirectory() as folder:
        base(hidden=64).save_pretrained(folder)  # bitsandbytes packs blocks of 64
        model = quiet(models.load, folder, four_bit=True)[0].train()
    for m in model.modules():
        # our loader forbids the repacking; here it is allowed again
        if isinstance(m, bnb.nn.Linear4bit):
            m.support_avx512bf16_for_cpu = has_avx512bf16()
    return model


def one_evaluation(keep: bool) -> dict:
    """Return the gradients of a 4-bit LoRA model before and after one evaluation, on this
    machine.
    """
    model = wake(attach(nf4()))
    repacks = any(getattr(m, "support_avx512bf16_for_cpu", False) for m in model.modules())
    if keep:
        keep_differentiable(model)
    before = flow(model)["gradients"]
    with torch.no_grad():
        loss_of(model.eval())
    after = flow(model.train())["gradients"]
    alike = [
        float(torch.cosine_similarity(after[n].flatten(), g.flatten(), dim=0))
        for n, g in before.items()
    ]
    return {
        "this machine repacks": repacks,
        "kept differentiable": keep,
        "tensors with the right gradient": sum(c > 0.99 for c in alike),
        "of": len(alike),
        "lowest cosine": min(alike),
        **sentence(model),
    }


# P06: prepare after attach


def prepare_last(model: nn.Module) -> nn.Module:
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    model = peft.get_peft_model(model, lora)
    return peft.prepare_model_for_kbit_training(model)  # freezes all it finds: LoRA too


def prepare_first(model: nn.Module) -> nn.Module:
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    model = peft.prepare_model_for_kbit_training(model)
    return peft.get_peft_model(model, lora)


def not_prepared(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


def _prepared(order: Callable[[nn.Module], nn.Module]) -> dict:
    """Five steps of a 4-bit LoRA model that was put together in this order."""
    model = nf4()
    with seeded():
        model = quiet(order, model)[0]
    # as most loops make it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    return (
        {"order": order.__name__.replace("_", " ")}
        | fit(model, steps=5, optimizer=optimizer)
        | sentence(model)
    )


def _silent_and_still(facts: dict) -> bool:
    return (
        facts["of"] == 0
        and facts["tensors that moved"] == 0
        and facts["first loss"] == facts["last loss"]
    )


# P09: gradients on packed weights


def train_what_is_thin(model: nn.Module) -> None:
    for p in model.parameters():
        if p.ndim == 2 and min(p.shape) <= 64:  # packed weights too: (n, 1)
            p.requires_grad_(True)


def train_what_lora_holds(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.lora_A.requires_grad_(True)
            module.lora_B.requires_grad_(True)


def by_shape(name: str, p: nn.Parameter) -> bool:
    return p.ndim == 2 and min(p.shape) <= 64


def _factor(name: str, p: nn.Parameter) -> bool:
    return "lora_A" in name or "lora_B" in name


def ask(select: Callable[[str, nn.Parameter], bool]) -> dict:
    """Freeze a 4-bit LoRA model and ask for gradients on what `select` takes for adapters."""

    def train(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if select(name, p):
                p.requires_grad_(True)

    return _asked(train)


def _asked(train: Callable[[nn.Module], None]) -> dict:
    """Return what `train` raised on a frozen 4-bit LoRA model, and which tensors require a gradient
    after it.
    """
    model, facts = attach(nf4()).requires_grad_(False), {"raised": None, "at": None}
    packed = [
        f"{n} {tuple(p.shape)} {p.dtype}"
        for n, p in model.named_parameters()
        if not p.is_floating_point()
    ]
    try:
        train(model)
    except RuntimeError as error:
        facts = {"raised": str(error), "at": packed[0]}
    factors = [p for name, p in model.named_parameters() if _factor(name, p)]
    return facts | {
        "factors that are quantised": sum(not p.is_floating_point() for p in factors),
        "factors": len(factors),
        "trainable": len(wiring.trainable(model)),
        "trainable, no factor": sum(not _factor(n, p) for n, p in wiring.trainable(model).items()),
    }


def messages() -> list[dict]:
    """Return what each way of asking a packed or byte tensor for a gradient answers."""
    packed = next(m for m in nf4().modules() if isinstance(m, bnb.nn.Linear4bit)).weight
    ways = {
        "p.requires_grad = True": lambda: setattr(packed, "requires_grad", True),
        "p.requires_grad_(True)": lambda: packed.requires_grad_(True),
        "nn.Parameter(bytes)": lambda: nn.Parameter(packed.data.clone()),
        "Params4bit(w, requires_grad=True)": lambda: bnb.nn.Params4bit(
            torch.randn(64, 64), True
        ).to("cpu"),
        "nn.Parameter(float8)": lambda: nn.Parameter(torch.zeros(4, dtype=torch.float8_e4m3fn)),
    }
    return [{"asked": name, "answer": _answer(way)} for name, way in ways.items()]


def _answer(way) -> str:
    try:
        way()
        return "accepted"
    except RuntimeError as error:
        return str(error).splitlines()[0]


# P10: how factors really get quantised


def attach_then_quantise(model: nn.Module) -> nn.Module:
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    model = peft.get_peft_model(model, lora)
    for name, linear in wiring.select(model, nn.Linear).items():
        if type(linear) is nn.Linear:  # so are lora_A and lora_B
            model.set_submodule(name, packed(linear))
    return model


def quantise_then_attach(model: nn.Module) -> nn.Module:
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    for name, linear in wiring.select(model, nn.Linear).items():
        if type(linear) is nn.Linear:
            model.set_submodule(name, packed(linear))
    return peft.get_peft_model(model, lora)


def packed(linear: nn.Linear) -> nn.Module:
    """Return the layer with its weight in NF4."""
    new = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    new.weight = bnb.nn.Params4bit(
        linear.weight.data.clone(), requires_grad=False, quant_type="nf4"
    )
    return new.to("cpu")


def walk(model: nn.Module) -> nn.Module:
    """Quantise every nn.Linear there is.

    Once adapters are attached, peft's factors are nn.Linear too.
    """
    linear = {name: m for name, m in wiring.select(model).items() if type(m) is nn.Linear}
    wiring.swap(model, lambda _, m: packed(m), linear)
    return model


def _dynamic(model: nn.Module) -> nn.Module:
    return quiet(torch.ao.quantization.quantize_dynamic, model, {nn.Linear}, torch.qint8)[0]


def _replaced(model: nn.Module) -> nn.Module:
    from transformers.integrations import replace_with_bnb_linear

    config = tf.BitsAndBytesConfig(load_in_4bit=True)
    return quiet(replace_with_bnb_linear, model, quantization_config=config)[0]


def _ordered(order: Callable[[nn.Module], nn.Module]) -> dict:
    model = base(hidden=64)
    with seeded():
        return _state(quiet(order, model)[0])


def _state(model: nn.Module) -> dict:
    """How many factors can train (floating point, on a real device), and whether the model
    trains.
    """
    factors = {n: p for n, p in model.named_parameters() if _factor(n, p)}
    kinds = sorted({f"{p.dtype} on {p.device}".replace("torch.", "") for p in factors.values()})
    whole = [
        p
        for p in factors.values()
        if p.is_floating_point() and p.device.type != "meta" and p.requires_grad
    ]
    trial = quiet(_try, model)[0]
    return {
        "factors that can train": len(whole),
        "factors kept as": ", ".join(kinds) or "no parameters",
        **trial,
    }


def _try(model: nn.Module) -> dict:
    try:
        canary = wiring.canary(model, lambda: loss_of(model))
        return {"alive": canary.alive, "canary": canary.sentence}
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return {
            "alive": False,
            "canary": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }


def ways() -> list[dict]:
    """Four orders of quantising and attaching, and what is left of the factors."""
    orders = {
        "attach, then walk over nn.Linear": lambda: walk(attach(base(hidden=64))),
        "attach, then replace_with_bnb_linear": lambda: _replaced(attach(base(hidden=64))),
        "attach, then quantize_dynamic": lambda: _dynamic(attach(base(hidden=64))),
        "quantise, then attach": lambda: attach(walk(base(hidden=64))),
    }
    return [{"order": name} | _state(make()) for name, make in orders.items()]


# P11: rounding without a straight-through estimator


def rounded(x: Tensor, bits: int) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-8)  # of each row
    step = largest / (2 ** (bits - 1) - 1)
    return (x / step).round() * step  # slope 0: only `largest` passes a gradient


def rounded_straight_through(x: Tensor, bits: int) -> Tensor:
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-8)
    step = largest / (2 ** (bits - 1) - 1)
    y = (x / step).round() * step
    return x + (y - x).detach()  # the value is y, the gradient is that of x


class Rounded(LowRank):
    """A low-rank adapter beside a frozen branch that sees its input rounded to a few bits, row by
    row.
    """

    rounding: Callable[[Tensor, int], Tensor]
    bits = 8

    def forward(self, x: Tensor) -> Tensor:
        return self.base(self.rounding(x, self.bits)) + x @ self.down.T @ self.up.T


def _rounded(rounding: Callable[[Tensor, int], Tensor], bits: int = 8) -> dict:
    plain = wake(attach(base(), ADAPTER[1]))
    model = copy.deepcopy(plain)
    for m in model.modules():
        if isinstance(m, LowRank):
            m.__class__, m.bits, m.rounding = Rounded, bits, rounding
    true, got = flow(plain)["gradients"], flow(model)["gradients"]
    alike = {
        n: float(torch.cosine_similarity(got[n].flatten(), g.flatten(), dim=0))
        for n, g in true.items()
    }
    by_layer = [min(c for n, c in alike.items() if f"layers.{i}." in n) for i in range(LAYERS)]
    return {
        "bits": bits,
        "straight through": rounding is rounded_straight_through,
        "lowest cosine by layer": ", ".join(f"{c:.3f}" for c in by_layer),
        "lowest cosine": min(by_layer),
        **sentence(model),
        **fit(model, steps=40),
    }


PITFALLS = [
    Pitfall(
        id="P06",
        title="Prepared for 4 bits after the adapters were attached",
        symptom="QLoRA runs without an error, and no digit of the loss changes.",
        claim="gradients cannot pass 4-bit weights, or not on a CPU (folklore)",
        verdict="NF4 with adapters trains, on a CPU too. prepare_model_for_kbit_training "
        "freezes every parameter it "
        "finds. Called last, it freezes the adapters as well. It also adds a hook that gives "
        "the loss a graph, so "
        f"backward raises nothing although nothing trains. Seen on {WITH_BNB}.",
        fix="Quantise, prepare, attach, in that order; assert that something trains.",
        broken=lambda: _prepared(prepare_last),
        fixed=lambda: _prepared(prepare_first),
        seen=_silent_and_still,
        claimed=lambda: _prepared(not_prepared),
        check="S1",
        wrong=prepare_last,
        right=prepare_first,
    ),
    Pitfall(
        id="P09",
        title="Asking a packed weight for a gradient",
        symptom="only Tensors of floating point dtype can require gradients",
        claim="bitsandbytes quantised the LoRA factors themselves (the write-up on ARD-LoRA)",
        verdict="No factor was quantised: asking the factors alone for gradients is accepted. "
        "The loop searched for "
        "adapters by shape. It found a packed base weight, a column of bytes, and took it for "
        "a factor. "
        f"Seen on {WITH_BNB}.",
        fix="Find the factors by the module that holds them, not by name or shape.",
        broken=lambda: _asked(train_what_is_thin),
        fixed=lambda: _asked(train_what_lora_holds),
        seen=lambda facts: facts["raised"] is not None,
        claimed=lambda: ask(_factor),
        wrong=train_what_is_thin,
        right=train_what_lora_holds,
    ),
    Pitfall(
        id="P10",
        title="Factors that really are quantised",
        symptom="After quantising there is nothing left to train.",
        claim="",
        verdict="The factors themselves were packed. peft's factors are nn.Linear, so every "
        "loop over nn.Linear that "
        "runs after attaching quantises them too. Other quantisers leave them on the meta "
        "device, or remove them from "
        f"the parameters. Seen on {WITH_BNB}.",
        fix="Quantise first and attach after; assert that every factor is floating point.",
        broken=lambda: _ordered(attach_then_quantise),
        fixed=lambda: _ordered(quantise_then_attach),
        seen=lambda facts: facts["factors that can train"] == 0 and not facts["alive"],
        check="S1",
        wrong=attach_then_quantise,
        right=quantise_then_attach,
    ),
    Pitfall(
        id="P11",
        title="Rounding without a straight-through estimator",
        symptom="Quantisation-aware training learns, but worse than it should.",
        claim="so few bits are too coarse (folklore)",
        verdict="Half the bits with a straight-through estimator keep the direction of the "
        "gradient; all bits without "
        "one do not. The slope of rounding is zero, so what is left of the gradient flows "
        "through the scale alone. "
        f"Every tensor still moves, so the canary finds nothing. Seen on {WITH_BNB}.",
        fix="x + (round(x) - x).detach(), and one comparison with the gradients of the "
        "unrounded model.",
        broken=lambda: _rounded(rounded),
        fixed=lambda: _rounded(rounded_straight_through),
        seen=lambda facts: facts["lowest cosine"] < 0.8,
        claimed=lambda: _rounded(rounded_straight_through, bits=4),
        wrong=rounded,
        right=rounded_straight_through,
    ),
]
