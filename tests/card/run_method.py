"""A tiny training of each method on a card of values, with its checkpoint, and what the method does
beside it.

    python tests/card/run_method.py METHOD [--plant]

Three steps of the loop in bf16, a resume for a fourth, and an evaluation. With --plant a tensor of
the CPU is slipped into the computation of the method itself, in the place that is most easily
forgotten when a model moves.
"""

import card_values  # isort: skip  # before torch
import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import peft
import torch
from torch import nn

from lessons import skipping, spiking_health
from nblib import losses, models, runtime, text, train
from nblib.methods import ard, goose, lrc, moe
from nblib.methods.ard import ranks
from nblib.methods.distill import objective, teacher_cache
from nblib.methods.distill.temperature import Learned
from nblib.methods.lrc import packed
from nblib.methods.moe import depths as mixture_of_depths
from nblib.methods.moe import multi_token, router_health
from nblib.methods.muon import groups

VOCABULARY, LENGTH = 256, 32
MACHINE = runtime.Machine(torch.device("cuda:0"), "bf16", "a card that is not there")
STREAM = torch.randint(0, VOCABULARY, (4000,), generator=torch.Generator().manual_seed(0))


def batches() -> text.Batches:
    return text.Batches(STREAM, rows=2, length=LENGTH)


def fixed() -> torch.Tensor:
    return text.fixed_rows(STREAM, length=LENGTH, limit=4)


def tiny(**options) -> nn.Module:
    return models.tiny(VOCABULARY, hidden=32, layers=2, heads=2, length=64, **options).to("cuda")


def stay_behind(part: nn.Module, name: str) -> None:
    """The tensor of that name is on the CPU, as if it had been made without a device."""
    value = getattr(part, name).detach().cpu()
    tensor = nn.Parameter(value, requires_grad=False) if name in part._parameters else value
    (part._parameters if name in part._parameters else part._buffers)[name] = tensor


def dense(folder: Path, plant: bool) -> None:
    net = tiny()
    if plant:
        stay_behind(net.model.norm, "weight")
    learn(net, train.adamw(net, lr=1e-3), folder)


def lora(folder: Path, plant: bool) -> None:
    net = peft.get_peft_model(
        tiny(), peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    )
    models.hold(net, MACHINE.frozen_dtype)
    if plant:
        stay_behind(
            next(m for n, m in net.named_modules() if n.endswith("lora_A.default")), "weight"
        )
    learn(net, train.adamw(net, lr=1e-3), folder)


def ternary(folder: Path, plant: bool) -> None:
    net = tiny()
    lrc.attach(net, init="svd_activation", moments=lrc.input_moments(net, [next(batches())]))
    models.hold(net, MACHINE.frozen_dtype)
    if plant:
        stay_behind(next(iter(lrc.layers(net).values())), "U")
    learn(net, train.adamw(net, lr=1e-3), folder)
    lrc.save(net, folder / "saved")
    again = lrc.load(folder / "saved").to("cuda")
    again(fixed().to("cuda"))
    packed.pack(again)
    with torch.no_grad():
        again(fixed().to("cuda"))


def ard_lora(folder: Path, plant: bool) -> None:
    net = models.hold(ard.attach(tiny(), rank=4, alpha=4.0), MACHINE.frozen_dtype)
    if plant:
        stay_behind(next(iter(ard.adapters(net).values())), "prior")
    optimizer = train.adamw(net, lr=1e-3)
    learn(net, optimizer, folder, loss=ard.loss(net, beta=1e-3, warmup=2, optimizer=optimizer))
    ranks.estimate_priors(net, [next(batches())], machine=MACHINE)
    ranks.prune(net, ranks.relevance(net), keep=8)


def mixture(folder: Path, plant: bool) -> None:
    net = tiny(family="qwen3_moe")
    if plant:
        stay_behind(next(iter(moe.routers(net).values())), "weight")
    learn(net, groups.optimizers(net), folder, loss=moe.loss())
    router_health.diagnose(net, fixed())


def depths(folder: Path, plant: bool) -> None:
    net = tiny()
    mixture_of_depths.attach(net, capacity=0.5)
    if plant:
        layer = next(iter(mixture_of_depths.wrapped(net).values()))
        stay_behind(next(m for m in layer.children() if isinstance(m, nn.Linear)), "weight")
    learn(net, train.adamw(net, lr=1e-3), folder, loss=mixture_of_depths.loss())
    skipping.agreement(net, fixed())


def several_ahead(folder: Path, plant: bool) -> None:
    net = tiny()
    multi_token.attach(net, heads=3)
    if plant:
        stay_behind(next(iter(net.ahead.values())), "weight")
    learn(net, train.adamw(net, lr=1e-3), folder, loss=multi_token.loss())
    multi_token.evaluate(net, fixed())


def live_teacher(folder: Path, plant: bool) -> None:
    teacher, net = models.as_teacher(tiny(seed=5), MACHINE.frozen_dtype), tiny()
    net.temperature = Learned(2.0).to("cuda")
    if plant:
        teacher.to("cpu")
    learn(
        net,
        train.adamw(net, lr=1e-3),
        folder,
        loss=objective.from_teacher(teacher, net.temperature, ce=0.5),
    )


def cached_teacher(folder: Path, plant: bool) -> None:
    teacher, net = models.as_teacher(tiny(seed=5), MACHINE.frozen_dtype), tiny()
    source = {"teacher": "one", "tokenizer": "none", "data": "random"}
    cache = teacher_cache.make(
        folder / "cache", teacher, batches(), steps=4, source=source, k=8, machine=MACHINE
    )
    loss = objective.from_teacher(cache, ce=0.5)
    if plant:  # the answers do not travel with their batch
        inner = loss
        loss = lambda m, b: inner(m, b | {name: b[name].cpu() for name in teacher_cache.KEYS})  # noqa: E731
    learn(
        net,
        train.adamw(net, lr=1e-3),
        folder,
        loss=loss,
        data=lambda: teacher_cache.Cached(batches(), cache),
    )


def spiking(folder: Path, plant: bool) -> None:
    net = goose.tiny(VOCABULARY, hidden=32, layers=2, length=64).to("cuda")
    if plant:
        stay_behind(next(m for m in net.modules() if isinstance(m, goose.Recurrent)), "w")
    learn(net, train.adamw(net, lr=1e-3), folder)
    spiking_health.spiking(net, fixed().to("cuda"))
    net.generate(fixed()[:1, :8].to("cuda"), max_new_tokens=3)


METHODS: dict[str, Callable[[Path, bool], None]] = {
    "dense": dense,
    "LoRA": lora,
    "LRC": ternary,
    "ARD-LoRA": ard_lora,
    "MoE with Muon": mixture,
    "mixture of depths": depths,
    "tokens ahead": several_ahead,
    "distillation, live": live_teacher,
    "distillation, cached": cached_teacher,
    "goose": spiking,
}


def learn(net: nn.Module, optimizers, folder: Path, *, loss=losses.causal_lm, data=batches) -> None:
    """Three steps, a resume for the fourth, an evaluation; with snapshots, as a run with `spike`
    makes them.
    """
    options = dict(
        loss=loss,
        machine=MACHINE,
        checkpoints=train.Checkpoints(folder / "checkpoints"),
        recovery=train.Recovery(spike=5.0),
    )
    for total in (3, 4):
        records = train.fit(net, data(), optimizers, total=total, **options)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(p.device.type == "cuda" for p in net.parameters())
    train.evaluate(net, fixed(), machine=MACHINE)


def attempt(method: str, plant: bool) -> str:
    """The error that it ends in; empty if there is none."""
    with tempfile.TemporaryDirectory(prefix="nblib-card-") as folder:
        try:
            METHODS[method](Path(folder), plant)
            return ""
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="a tiny training of each method on a card of values"
    )
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", help=f"{', '.join(METHODS)}; default all"
    )
    parser.add_argument(
        "--plant", action="store_true", help="also with a tensor on the wrong device"
    )
    parser.add_argument("--json", type=Path, help="a file for the errors, by method")
    options = parser.parse_args()
    if unknown := [name for name in options.methods if name not in METHODS]:
        parser.error(f"METHOD = {unknown[0]!r}: allowed are {', '.join(METHODS)}")
    card_values.begin()
    ends = {}
    for name in options.methods or METHODS:
        ends[name] = [attempt(name, plant) for plant in (False, True)[: 1 + options.plant]]
        print(f"{name}: {ends[name][0] or 'no device mixed'}", *ends[name][1:], sep="; planted: ")
    if options.json:
        options.json.write_text(json.dumps(ends))
    return int(any(clean for clean, *_ in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
