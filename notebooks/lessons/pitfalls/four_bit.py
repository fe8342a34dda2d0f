"""Adapters over quantised weights: which tensors may train, which are packed, and what rounding does to a gradient.

A 4-bit weight is a column of bytes with its scales beside it. It cannot require a gradient, and must not: the factors
beside it train, in floating point, and the gradient runs through the dequantised product. So the order is always:
quantise, prepare, attach. Everything here is real NF4 by bitsandbytes, on the CPU as on CUDA.

Footgun: a packed weight is a matrix of one column. A search for adapters by shape (two axes, one of them small) meets
the packed base weights first.
"""

import copy
import tempfile

import bitsandbytes as bnb
import peft
import torch
import transformers as tf
from bitsandbytes.functional import has_avx512bf16
from torch import Tensor, nn

from lessons.pitfalls import WITH_BNB, Pitfall
from lessons.pitfalls.bench import ADAPTER, LAYERS, LowRank, attach, base, fit, flow, loss_of, quiet, sentence, wake
from nblib import models, wiring
from nblib.models import keep_differentiable


def nf4() -> nn.Module:
    """The tiny model with its linear layers in 4 bits, by the way every QLoRA takes: saved, and loaded quantised."""
    with tempfile.TemporaryDirectory() as folder:
        base(hidden=64).save_pretrained(folder)  # bitsandbytes packs blocks of 64
        model = quiet(models.load, folder, four_bit=True)[0].train()
    for m in model.modules():
        if isinstance(m, bnb.nn.Linear4bit):  # as it comes without our loader, which forbids the repacking
            m.support_avx512bf16_for_cpu = has_avx512bf16()
    return model


def one_evaluation(keep: bool) -> dict:
    """The gradients of a 4-bit LoRA model before and after one evaluation, on this machine."""
    model = wake(attach(nf4()))
    repacks = any(getattr(m, "support_avx512bf16_for_cpu", False) for m in model.modules())
    if keep:
        keep_differentiable(model)
    before = flow(model)["gradients"]
    with torch.no_grad():
        loss_of(model.eval())
    after = flow(model.train())["gradients"]
    alike = [float(torch.cosine_similarity(after[n].flatten(), g.flatten(), dim=0)) for n, g in before.items()]
    return {
        "this machine repacks": repacks,
        "kept differentiable": keep,
        "tensors with the right gradient": sum(c > 0.99 for c in alike),
        "of": len(alike),
        "lowest cosine": min(alike),
        **sentence(model),
    }


# P06: prepare after attach


def _prepared(order: str) -> dict:
    """Five steps of a 4-bit LoRA model that was prepared last, first or not at all."""
    if order == "prepare last":
        model = quiet(peft.prepare_model_for_kbit_training, attach(nf4()))[0]
    elif order == "prepare first":
        model = attach(quiet(peft.prepare_model_for_kbit_training, nf4())[0])
    else:
        model = attach(nf4())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)  # as most loops make it
    return {"order": order} | fit(model, steps=5, optimizer=optimizer) | sentence(model)


def _silent_and_still(facts: dict) -> bool:
    return facts["of"] == 0 and facts["tensors that moved"] == 0 and facts["first loss"] == facts["last loss"]


# P09: gradients on packed weights


def by_shape(name: str, p: nn.Parameter) -> bool:
    return p.ndim == 2 and min(p.shape) <= 64


def _factor(name: str, p: nn.Parameter) -> bool:
    return "lora_A" in name or "lora_B" in name


def ask(select) -> dict:
    """Freeze a 4-bit LoRA model and ask for gradients on what `select` takes for adapters."""
    model = attach(nf4())
    model.requires_grad_(False)
    facts = {"raised": None, "at": None}
    for name, p in model.named_parameters():
        if select(name, p):
            try:
                p.requires_grad_(True)
            except RuntimeError as error:
                facts = {"raised": str(error), "at": f"{name} {tuple(p.shape)} {p.dtype}"}
                break
    factors = [p for name, p in model.named_parameters() if _factor(name, p)]
    return facts | {
        "factors that are quantised": sum(not p.is_floating_point() for p in factors),
        "factors": len(factors),
        "trainable": len(wiring.trainable(model)),
        "trainable, no factor": sum(not _factor(n, p) for n, p in wiring.trainable(model).items()),
    }


def _by_module() -> dict:
    """The same by identity: the factors are what LoRA layers hold, whatever they are called or shaped."""
    model = attach(nf4())
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    wiring.freeze(model, train=[part for m in layers for part in (m.lora_A, m.lora_B)])
    trains = wiring.trainable(model)
    return {
        "raised": None,
        "at": None,
        "factors that are quantised": sum(not p.is_floating_point() for p in trains.values()),
        "factors": sum(_factor(n, p) for n, p in trains.items()),
        "trainable": len(trains),
        "trainable, no factor": sum(not _factor(n, p) for n, p in trains.items()),
    }


def messages() -> list[dict]:
    """The answer to each way of asking a packed or byte tensor for a gradient."""
    packed = next(m for m in nf4().modules() if isinstance(m, bnb.nn.Linear4bit)).weight
    ways = {
        "p.requires_grad = True": lambda: setattr(packed, "requires_grad", True),
        "p.requires_grad_(True)": lambda: packed.requires_grad_(True),
        "nn.Parameter(bytes)": lambda: nn.Parameter(packed.data.clone()),
        "Params4bit(w, requires_grad=True)": lambda: bnb.nn.Params4bit(torch.randn(64, 64), True).to("cpu"),
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


def walk(model: nn.Module) -> nn.Module:
    """Quantise every nn.Linear there is. Once adapters are attached, peft's factors are nn.Linear too."""

    def packed(_, linear: nn.Linear) -> nn.Module:
        new = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
        new.weight = bnb.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type="nf4")
        return new.to("cpu")

    wiring.swap(model, packed, {n: m for n, m in wiring.select(model).items() if type(m) is nn.Linear})
    return model


def _dynamic(model: nn.Module) -> nn.Module:
    return quiet(torch.ao.quantization.quantize_dynamic, model, {nn.Linear}, torch.qint8)[0]


def _replaced(model: nn.Module) -> nn.Module:
    from transformers.integrations import replace_with_bnb_linear

    config = tf.BitsAndBytesConfig(load_in_4bit=True)
    return quiet(replace_with_bnb_linear, model, quantization_config=config)[0]


def _state(model: nn.Module) -> dict:
    """How many factors are floating-point parameters on a real device and train, and whether the model trains."""
    factors = {n: p for n, p in model.named_parameters() if _factor(n, p)}
    kinds = sorted({f"{p.dtype} on {p.device}".replace("torch.", "") for p in factors.values()})
    whole = [p for p in factors.values() if p.is_floating_point() and p.device.type != "meta" and p.requires_grad]
    trial = quiet(_try, model)[0]
    return {"factors that can train": len(whole), "factors kept as": ", ".join(kinds) or "no parameters", **trial}


def _try(model: nn.Module) -> dict:
    try:
        canary = wiring.canary(model, lambda: loss_of(model))
        return {"alive": canary.alive, "canary": canary.sentence}
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return {"alive": False, "canary": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


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


class Rounded(LowRank):
    """A low-rank adapter beside a frozen branch that sees its input rounded to a few bits, row by row."""

    bits, straight_through = 8, True

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / (2 ** (self.bits - 1) - 1)
        rounded = (x / step).round() * step
        if self.straight_through:
            rounded = x + (rounded - x).detach()  # the value is rounded, the gradient is that of x
        return self.base(rounded) + x @ self.down.T @ self.up.T


def _rounded(straight_through: bool, bits: int = 8) -> dict:
    plain = wake(attach(base(), ADAPTER[1]))
    model = copy.deepcopy(plain)
    for m in model.modules():
        if isinstance(m, LowRank):
            m.__class__, m.bits, m.straight_through = Rounded, bits, straight_through
    true, got = flow(plain)["gradients"], flow(model)["gradients"]
    alike = {n: float(torch.cosine_similarity(got[n].flatten(), g.flatten(), dim=0)) for n, g in true.items()}
    by_layer = [min(c for n, c in alike.items() if f"layers.{i}." in n) for i in range(LAYERS)]
    return {
        "bits": bits,
        "straight through": straight_through,
        "lowest cosine by layer": ", ".join(f"{c:.3f}" for c in by_layer),
        "lowest cosine": min(by_layer),
        **sentence(model),
        **fit(model, steps=40),
    }


PITFALLS = [
    Pitfall(
        id="P06",
        title="Prepared for 4 bits after the adapters were attached",
        symptom="QLoRA runs without an error, and the loss does not move by one digit.",
        claim="gradients cannot pass 4-bit weights, or not on a CPU (folklore)",
        verdict="NF4 with adapters trains on a CPU. prepare_model_for_kbit_training freezes all it finds, adapters "
        f"included, and its hook gives the loss a graph, so backward passes over nothing. Seen on {WITH_BNB}.",
        fix="Quantise, prepare, attach, in that order; assert that something trains.",
        broken=lambda: _prepared("prepare last"),
        fixed=lambda: _prepared("prepare first"),
        seen=_silent_and_still,
        claimed=lambda: _prepared("not prepared"),
        check="S1",
    ),
    Pitfall(
        id="P09",
        title="Asking a packed weight for a gradient",
        symptom="only Tensors of floating point dtype can require gradients",
        claim="bitsandbytes quantised the LoRA factors themselves (a fine-tuning repository)",
        verdict="No factor was quantised, and asking the factors alone is accepted. The search by shape met a packed "
        f"base weight, a column of bytes, and took it for a factor. Seen on {WITH_BNB}.",
        fix="Find the factors by the module that holds them, not by name or shape.",
        broken=lambda: ask(by_shape),
        fixed=_by_module,
        seen=lambda facts: facts["raised"] is not None,
        claimed=lambda: ask(_factor),
    ),
    Pitfall(
        id="P10",
        title="Factors that really are quantised",
        symptom="After quantising there is nothing left to train.",
        claim="",
        verdict="peft's factors are nn.Linear. Every walk over nn.Linear that comes after attaching packs them too: "
        f"as bytes, on the meta device, or out of the parameters altogether. Seen on {WITH_BNB}.",
        fix="Quantise first, attach after; assert that every factor is floating point.",
        broken=lambda: _state(walk(attach(base(hidden=64)))),
        fixed=lambda: _state(attach(walk(base(hidden=64)))),
        seen=lambda facts: facts["factors that can train"] == 0 and not facts["alive"],
        check="S1",
    ),
    Pitfall(
        id="P11",
        title="Rounding without a straight-through estimator",
        symptom="Quantisation-aware training learns, but worse than it should.",
        claim="so few bits are too coarse (folklore)",
        verdict="Half the bits with a straight-through estimator keep the direction of the gradient; all of them "
        "without it do not. The derivative of rounding is zero, and what is left runs through the scale alone. "
        f"Every tensor moves, so the canary is content. Seen on {WITH_BNB}.",
        fix="x + (round(x) - x).detach(), and one comparison with the gradients of the unrounded model.",
        broken=lambda: _rounded(straight_through=False),
        fixed=lambda: _rounded(straight_through=True),
        seen=lambda facts: facts["lowest cosine"] < 0.8,
        claimed=lambda: _rounded(straight_through=True, bits=4),
    ),
]
