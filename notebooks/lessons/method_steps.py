"""One small training of each method, as `train.steps` takes it: what a step of it costs is measured in two places.

`nblib gpu-check` runs them on your card, and the tests count what they ask of one that is not there (tests/card). A
maker takes a `Size` and gives a `Training`: model, optimizers, loss, and what its batches hold besides ids and labels.

Footgun: the weights are random and every token is the same one, so the losses mean nothing. The cached teacher's
answers are made up, in the shapes and dtypes of a stored one.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import peft
import torch
from torch import Tensor, nn

from lessons import goose, mixture_of_depths, multi_token
from nblib import compiling, losses, models, train
from nblib.methods import ard, lrc, moe, objective, param_groups, teacher_cache


class Size(NamedTuple):
    """Of a model and its batches."""

    device: str = "cuda"
    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    rows: int = 4
    length: int = 256

    @property
    def held(self) -> torch.dtype:
        """What the notebooks store frozen weights in (models.hold)."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16


class Training(NamedTuple):
    """What `train.steps` takes."""

    model: nn.Module
    optimizers: object
    loss: losses.Loss = losses.causal_lm
    more: Callable[[Tensor], dict] = lambda ids: {}  # what a batch holds besides ids and labels


def model(size: Size, **options) -> nn.Module:
    shape = dict(hidden=size.hidden, layers=size.layers, heads=size.heads, length=max(1024, size.length))
    return models.tiny(size.vocabulary, **shape, **options).to(size.device)


def adamw(net: nn.Module, **parts) -> Training:
    return Training(net, train.adamw(net, lr=1e-3), **parts)


def dense(size: Size) -> Training:
    return adamw(model(size))


def checkpointed(size: Size) -> Training:
    return adamw(compiling.checkpoint_blocks(model(size)))


def lora(size: Size) -> Training:
    config = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)
    return adamw(models.hold(peft.get_peft_model(model(size), config), size.held))


def ternary(size: Size) -> Training:
    net = model(size)
    lrc.attach(net, percent=15, init="kaiming")
    return adamw(models.hold(net, size.held))


def ard_lora(size: Size) -> Training:
    net = models.hold(ard.attach(model(size), rank=8, alpha=8.0), size.held)
    optimizer = train.adamw(net, lr=1e-3)
    return Training(net, optimizer, ard.loss(net, beta=1e-3, warmup=10, optimizer=optimizer))


def mixture(size: Size, family: str = "qwen3_moe") -> Training:
    net = model(size, family=family)
    return Training(net, param_groups.optimizers(net), moe.loss())


def mixtral(size: Size) -> Training:
    return mixture(size, "mixtral")


def depths(size: Size) -> Training:
    net = model(size, family="qwen3_moe")
    mixture_of_depths.attach(net, capacity=0.5)
    return Training(net, param_groups.optimizers(net), moe.loss(language=mixture_of_depths.loss(losses.causal_lm)))


def several_ahead(size: Size) -> Training:
    net = model(size)
    multi_token.attach(net, heads=4)
    return adamw(net, loss=multi_token.loss())


def live_teacher(size: Size) -> Training:
    teacher = models.as_teacher(model(size), size.held)
    return adamw(model(size), loss=objective.from_teacher(teacher, ce=0.5))


def cached_teacher(size: Size) -> Training:
    cache = object.__new__(teacher_cache.Cache)
    cache.k, cache.draws, cache.vocabulary, cache.temperatures = 32, 4, size.vocabulary, (1.0, 2.0)
    cache.prior = torch.full((size.vocabulary,), 1 / size.vocabulary)

    def answers(ids: Tensor) -> dict:
        each = (len(ids), ids.shape[1] - 1)
        half, whole = dict(dtype=torch.float16), dict(dtype=torch.long)
        return {
            teacher_cache.VALUES: torch.zeros(*each, cache.k, **half),
            teacher_cache.INDICES: torch.zeros(*each, cache.k, **whole),
            teacher_cache.TAILS: torch.zeros(*each, len(cache.temperatures), **half),
            teacher_cache.DRAWN: torch.zeros(*each, cache.draws, **whole),
            teacher_cache.ENTROPIES: torch.zeros(*each, len(cache.temperatures), **half),
            teacher_cache.DRAWN_VALUES: torch.zeros(*each, cache.draws, **half),
        }

    return adamw(model(size), loss=objective.from_teacher(cache, ce=0.5), more=answers)


def spiking(size: Size) -> Training:
    shape = dict(hidden=size.hidden, layers=size.layers, length=size.length)
    return adamw(goose.tiny(size.vocabulary, **shape).to(size.device))


METHODS: dict[str, Callable[[Size], Training]] = {
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


def batches(size: Size, more: Callable[[Tensor], dict]) -> Iterator[dict[str, Tensor]]:
    while True:
        ids = torch.zeros(size.rows, size.length, dtype=torch.long)
        yield {"input_ids": ids, "labels": ids} | more(ids)
