"""What one training step of each method asks of a card: waits, copies, fp32 products, casts, launches.

    python tests/card/count.py [METHOD ...] [--lines] [--json FILE]

Runs the loop itself, `nblib.train.steps`, on a card of shapes (card_shapes.py) in bf16. A step with one micro-batch and
a step with two are counted, so that what happens per step is told from what happens per micro-batch. The models have
two layers and a vocabulary of 4,096. Waits and copies do not depend on the width. Launches, and the waits of a
mixture's experts, grow with the layers. test_card_steps.py holds the bounds.
"""

import card_shapes  # isort: skip  # before torch
import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import peft
import torch
from torch import nn

from lessons import multi_token
from nblib import compiling, losses, models, runtime, train
from nblib.methods import ard, goose, lrc, mixture_of_depths, moe, objective, param_groups, teacher_cache

VOCABULARY, ROWS, LENGTH = 4096, 4, 256
MACHINE = runtime.Machine(torch.device("cuda:0"), "bf16", "a card that is not there")
NAMES = ("waits", "copies", "unpinned", "products", "casts", "launches")


class Training(NamedTuple):
    """What `train.steps` takes."""

    model: nn.Module
    optimizers: object
    loss: losses.Loss = losses.causal_lm
    more: Callable[[torch.Tensor], dict] = lambda ids: {}  # what a batch holds besides ids and labels


def model(**options) -> nn.Module:
    return models.tiny(VOCABULARY, hidden=256, layers=2, heads=4, length=1024, **options).to("cuda")


def held(net: nn.Module) -> nn.Module:
    return models.hold(net, MACHINE.frozen_dtype)


def adamw(net: nn.Module, **parts) -> Training:
    return Training(net, train.adamw(net, lr=1e-3), **parts)


def dense() -> Training:
    return adamw(model())


def checkpointed() -> Training:
    return adamw(compiling.checkpoint_blocks(model()))


def lora() -> Training:
    config = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)
    return adamw(held(peft.get_peft_model(model(), config)))


def ternary() -> Training:
    net = model()
    lrc.attach(net, percent=15, init="kaiming")
    return adamw(held(net))


def ard_lora() -> Training:
    net = held(ard.attach(model(), rank=8, alpha=8.0))
    optimizer = train.adamw(net, lr=1e-3)
    return Training(net, optimizer, ard.loss(net, beta=1e-3, warmup=10, optimizer=optimizer))


def mixture(family: str = "qwen3_moe") -> Training:
    net = model(family=family)
    return Training(net, param_groups.optimizers(net), moe.loss())


def mixtral() -> Training:
    return mixture("mixtral")


def depths() -> Training:
    net = model(family="qwen3_moe")
    mixture_of_depths.attach(net, capacity=0.5)
    return Training(net, param_groups.optimizers(net), moe.loss(language=mixture_of_depths.loss(losses.causal_lm)))


def several_ahead() -> Training:
    net = model()
    multi_token.attach(net, heads=4)
    return adamw(net, loss=multi_token.loss())


def live_teacher() -> Training:
    teacher = models.as_teacher(model(), MACHINE.frozen_dtype)
    return adamw(model(), loss=objective.from_teacher(teacher, ce=0.5))


def cached_teacher() -> Training:
    cache = object.__new__(teacher_cache.Cache)  # its answers are made below, in the shapes and dtypes of a stored one
    cache.k, cache.draws, cache.vocabulary, cache.temperatures = 32, 4, VOCABULARY, (1.0, 2.0)
    cache.prior = torch.zeros(VOCABULARY)

    def answers(ids: torch.Tensor) -> dict:
        each = (len(ids), ids.shape[1] - 1)
        half, whole = dict(dtype=torch.float16), dict(dtype=torch.long)
        return {
            teacher_cache.VALUES: torch.zeros(*each, cache.k, **half),
            teacher_cache.INDICES: torch.zeros(*each, cache.k, **whole),
            teacher_cache.TAILS: torch.zeros(*each, len(cache.temperatures), **half),
            teacher_cache.DRAWN: torch.zeros(*each, cache.draws, **whole),
        }

    return adamw(model(), loss=objective.from_teacher(cache, ce=0.5), more=answers)


def spiking() -> Training:
    return adamw(goose.tiny(VOCABULARY, hidden=256, layers=2, length=LENGTH).to("cuda"))


METHODS = {
    "dense": dense,
    "dense, checkpointed": checkpointed,
    "LoRA": lora,
    "LRC": ternary,
    "ARD-LoRA": ard_lora,
    "MoE with Muon": mixture,
    "Mixtral with Muon": mixtral,
    "mixture of depths": depths,
    "four tokens ahead": several_ahead,
    "distillation, live": live_teacher,
    "distillation, cached": cached_teacher,
    "goose": spiking,
}


def waiting(net: nn.Module, batch: dict) -> dict:
    """A loss with a planted wait and a planted product in fp32, which the tests look for by line."""
    terms = losses.causal_lm(net, batch)
    float(terms["ce"])
    with torch.autocast("cuda", enabled=False):
        weight = losses.backbone_and_head(net)[1]
        return terms | {"planted": (weight @ weight.T).sum()}


def planted() -> Training:
    return adamw(model(), loss=waiting)


def batches(more: Callable[[torch.Tensor], dict]):
    while True:
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
        yield {"input_ids": ids, "labels": ids} | more(ids)


def counted(make: Callable[[], Training], *, accumulate: int, watch: card_shapes.Watch) -> card_shapes.Count:
    """One step of the loop, after a first one that makes the optimizer's state."""
    net, optimizers, loss, more = make()
    options = dict(total=3, accumulate=accumulate, machine=MACHINE, loss=loss)
    steps = train.steps(net, batches(more), optimizers, **options)
    next(steps)
    watch.count = count = card_shapes.Count()
    next(steps)
    watch.count = None
    steps.close()
    return count


def measure(make: Callable[[], Training]) -> dict[str, dict[str, dict[str, int]]]:
    """What is counted -> 'step' and 'micro' -> line -> times."""
    with card_shapes.world() as watch:
        one, two = (counted(make, accumulate=n, watch=watch) for n in (1, 2))
    found = {}
    for name in NAMES:
        once, twice = getattr(one, name), getattr(two, name)
        micro = Counter({line: twice[line] - once[line] for line in twice if twice[line] != once[line]})
        step = Counter({line: once[line] - micro[line] for line in once if once[line] != micro[line]})
        found[name] = {"step": dict(step), "micro": dict(micro)}
    return found


def figures(measured: dict) -> dict[str, int]:
    """The sums that are bounded."""
    total = {(name, when): sum(measured[name][when].values()) for name in NAMES for when in ("step", "micro")}
    return {
        "waits per step": total["waits", "step"],
        "waits per micro-batch": total["waits", "micro"],
        "copies per micro-batch": total["copies", "micro"],
        "unpinned copies": total["unpinned", "micro"],
        "fp32 products per step": total["products", "step"],
        "fp32 products per micro-batch": total["products", "micro"],
        "casts per step": total["casts", "step"],
        "casts per micro-batch": total["casts", "micro"],
        "launches per step": total["launches", "step"],
        "launches per micro-batch": total["launches", "micro"],
    }


def table(measured: dict[str, dict]) -> str:
    """One line per method."""
    sums = {method: figures(counts) for method, counts in measured.items()}
    heads = list(next(iter(sums.values())))
    width = max(map(len, sums))
    lines = [f"{'':{width}}  " + "  ".join(heads)]
    for method, row in sums.items():
        lines.append(f"{method:{width}}  " + "  ".join(f"{row[head]:{len(head)}d}" for head in heads))
    return "\n".join(lines)


def by_line(counts: dict, name: str) -> list[str]:
    return [
        f"  {name} per {'step' if when == 'step' else 'micro-batch'}  {times:4d}  {line}"
        for when in ("step", "micro")
        for line, times in sorted(counts[name][when].items(), key=lambda item: -item[1])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="what one training step of each method asks of a card")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"{', '.join(METHODS)}; default all")
    parser.add_argument("--lines", action="store_true", help="all but launches, by line of source")
    parser.add_argument("--json", type=Path, help="a file for everything that was counted")
    options = parser.parse_args()
    known = METHODS | {"planted": planted, "dense again": dense}
    if unknown := [name for name in options.methods if name not in known]:
        parser.error(f"METHOD = {unknown[0]!r}: allowed are {', '.join(known)}")
    measured = {name: measure(known[name]) for name in options.methods or METHODS}
    if options.json:
        options.json.write_text(json.dumps(measured))
    print(table(measured))
    for method, counts in measured.items() if options.lines else ():
        print(method, *(row for name in NAMES[:-1] for row in by_line(counts, name)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
