"""One small training of each method, as `train.steps` takes it, to measure what a step of it costs.

`nblib gpu-check` runs them on your card, and the tests count the operations on a card that is not
there (tests/card). A maker takes a `Size` and returns a `Training`: model, optimizers, loss, and
what its batches hold besides ids and labels.

Footgun: the weights are random and every token is the same one, so the losses mean nothing. The
cached teacher's answers are made up, in the shapes and dtypes of a stored one.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor, nn

from nblib import compiling, losses, models, train
from nblib.methods import ard, goose, lrc, moe
from nblib.methods.distill import objective, teacher_cache
from nblib.methods.moe import depths as mixture_of_depths
from nblib.methods.moe import multi_token
from nblib.methods.muon import groups


class Size(NamedTuple):
    """The size of a model and of its batches."""

    device: str = "cuda"
    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    rows: int = 4
    length: int = 256

    @property
    def held(self) -> torch.dtype:
        """Return the dtype in which the notebooks store frozen weights (models.hold)."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16


class Training(NamedTuple):
    """The parts of a training, as `train.steps` takes them."""

    model: nn.Module
    optimizers: object
    loss: losses.Loss = losses.causal_lm
    more: Callable[[Tensor], dict] = lambda ids: {}  # what a batch holds besides ids and labels


def model(size: Size, **options: Any) -> nn.Module:
    """Return a small model with random weights."""
    net = models.tiny(
        size.vocabulary,
        hidden=size.hidden,
        layers=size.layers,
        heads=size.heads,
        length=max(1024, size.length),
        **options,
    )
    return net.to(size.device)


def adamw(net: nn.Module, **parts: Any) -> Training:
    """Return the training of a model by AdamW."""
    return Training(net, train.adamw(net, lr=1e-3), **parts)


def dense(size: Size) -> Training:
    """Return the training of all weights."""
    return adamw(model(size))


def checkpointed(size: Size) -> Training:
    """Return the training of all weights, with each block computed again in backward."""
    return adamw(compiling.checkpoint_blocks(model(size)))


def lora(size: Size) -> Training:
    """Return the training of plain adapters."""
    config = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)
    net = peft.get_peft_model(model(size), config)
    return adamw(models.hold(net, size.held))


def ternary(size: Size) -> Training:
    """Return the training of a low-rank correction of ternary weights."""
    net = model(size)
    lrc.attach(net, percent=15, init="kaiming")
    return adamw(models.hold(net, size.held))


def ard_lora(size: Size) -> Training:
    """Return the training of adapters whose ranks are pruned by relevance."""
    net = models.hold(ard.attach(model(size), rank=8, alpha=8.0), size.held)
    optimizer = train.adamw(net, lr=1e-3)
    loss = ard.loss(net, beta=1e-3, warmup=10, optimizer=optimizer)
    return Training(net, optimizer, loss)


def mixture(size: Size, family: str = "qwen3_moe") -> Training:
    """Return the training of a mixture of experts by Muon."""
    net = model(size, family=family)
    return Training(net, groups.optimizers(net), moe.loss())


def mixtral(size: Size) -> Training:
    """Return the same of another family of mixtures."""
    return mixture(size, "mixtral")


def depths(size: Size) -> Training:
    """Return the training of a mixture whose blocks skip half of the tokens."""
    net = model(size, family="qwen3_moe")
    mixture_of_depths.attach(net, capacity=0.5)
    loss = moe.loss(language=mixture_of_depths.loss(losses.causal_lm))
    return Training(net, groups.optimizers(net), loss)


def several_ahead(size: Size) -> Training:
    """Return the training of a model that predicts four tokens ahead."""
    net = model(size)
    multi_token.attach(net, heads=4)
    return adamw(net, loss=multi_token.loss())


def live_teacher(size: Size) -> Training:
    """Return the distillation from a teacher that is there."""
    teacher = models.as_teacher(model(size), size.held)
    return adamw(model(size), loss=objective.from_teacher(teacher, ce=0.5))


def cached_teacher(size: Size) -> Training:
    """Return the distillation from stored answers of a teacher."""
    cache = object.__new__(teacher_cache.Cache)  # without files: the answers are made up below
    cache.k = 32
    cache.draws = 4
    cache.vocabulary = size.vocabulary
    cache.temperatures = (1.0, 2.0)
    cache.prior = torch.full((size.vocabulary,), 1 / size.vocabulary)
    widths = {
        teacher_cache.VALUES: (cache.k, torch.float16),
        teacher_cache.INDICES: (cache.k, torch.long),
        teacher_cache.TAILS: (len(cache.temperatures), torch.float16),
        teacher_cache.DRAWN: (cache.draws, torch.long),
        teacher_cache.ENTROPIES: (len(cache.temperatures), torch.float16),
        teacher_cache.DRAWN_VALUES: (cache.draws, torch.float16),
    }

    def answers(ids: Tensor) -> dict[str, Tensor]:
        rows, length = ids.shape
        return {
            name: torch.zeros(rows, length - 1, width, dtype=dtype)  # (4, 255, 32)
            for name, (width, dtype) in widths.items()
        }

    return adamw(model(size), loss=objective.from_teacher(cache, ce=0.5), more=answers)


def spiking(size: Size) -> Training:
    """Return the training of a spiking recurrent model."""
    net = goose.tiny(size.vocabulary, hidden=size.hidden, layers=size.layers, length=size.length)
    return adamw(net.to(size.device))


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
    """Yield batches of one token, with what else the training takes."""
    while True:
        ids = torch.zeros(size.rows, size.length, dtype=torch.long)
        yield {"input_ids": ids, "labels": ids} | more(ids)
