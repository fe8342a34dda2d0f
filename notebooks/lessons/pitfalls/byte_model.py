"""A byte-level model for demonstrations of milliseconds: trained once per process on prose, fine-tuned on code.

Bytes need no tokenizer, so 256 tokens suffice and nothing but the text decides the numbers. The parameters trained
once are cached; every caller gets a copy, because a demonstration that trains the shared model would answer for the
next one.

Footgun: cached does not mean stored. A fresh process trains it again (under two seconds), and another Python version
has other prose, so its losses are comparable within one process only.
"""

import copy
from functools import cache

import torch
from torch import Tensor, nn

from nblib import losses, models, runtime, text, train

CPU = runtime.Machine(torch.device("cpu"), "fp32", "demonstrations are exact on a CPU in fp32")
LENGTH = 64
SIZE = 200_000  # bytes of each corpus that are looked at


@cache
def stream(source: str, split: str = "train") -> Tensor:
    """Bytes of a corpus, as token ids."""
    joined = "\n".join(text.documents(source, split))[:SIZE].encode()[:SIZE]
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def batches(source: str = "prose", *, rows: int = 8, seed: int = 0) -> text.Batches:
    return text.Batches(stream(source), rows=rows, length=LENGTH, seed=seed)


def untrained(*, seed: int = 0, **shape) -> nn.Module:
    return models.tiny(256, **(dict(hidden=64, layers=2, heads=2, length=LENGTH, seed=seed) | shape))


@cache
def _base() -> nn.Module:
    model = untrained()
    train.fit(model, batches(), train.adamw(model, lr=5e-3), total=100, schedule=train.cosine(100), clip=0, machine=CPU)
    return model


def trained() -> nn.Module:
    """A copy of the model that has seen prose, ready to train."""
    return copy.deepcopy(_base()).train()


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loop's loss per supervised token, for demonstrations that write their own few steps."""
    return losses.causal_lm(model, batch)["ce"] / losses.supervised(batch["labels"])


def held_out_loss(model: nn.Module, source: str = "prose") -> float:
    """Nats per byte on held-out rows, judged by an fp32 copy so that no rounding of the judge is in it."""
    judge = copy.deepcopy(model).float()
    rows = text.fixed_rows(stream(source, "held_out"), length=LENGTH, limit=128)
    return train.evaluate(judge, rows, machine=CPU, batch=64)["loss"]
