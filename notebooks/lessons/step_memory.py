"""What a training step keeps in memory: the cures for an out-of-memory error tried, the estimator
held to a real run.

    logits       rows x (length - 1) x vocabulary x 4 bytes, and the plain loss holds about three
                 such tables
    activations  kept until backward; with checkpointing rows x length x hidden x 4 bytes for each
                 block

`cures` measures real steps, `compared` sets `memory.estimate` beside them, `chart` draws an
estimate by kind.

Footgun: the kinds of an estimate are each counted where they are largest. They do not add up to the
peak.
"""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch

from lessons.pitfalls import recomputation
from lessons.progress import each
from nblib import compiling, losses, memory, models
from nbworkbook import show

MIB, GIB = 2**20, 2**30


def cures(*, rank: int, **shared: Any) -> dict[str, dict]:
    """Return the measured peak of one step under each cure; `shared` are the other options of
    `recomputation.step_memory`.
    """
    plain = recomputation.whole_logits
    tried = {
        "nothing": dict(loss=plain, rank=rank),
        "rank 1": dict(loss=plain, rank=1),
        "checkpointing": dict(loss=plain, rank=rank, checkpointing=True),
        "torch's fused loss, default": dict(loss=recomputation.torch_linear, rank=rank),
        "torch's fused loss, chunks of 256": dict(
            loss=partial(recomputation.torch_linear, chunk=256), rank=rank
        ),
        "nblib's chunks": dict(loss=recomputation.in_chunks, rank=rank),
    }
    return {
        name: recomputation.step_memory(**tried[name], **shared)
        for name in each(tried, "measured steps")
    }


def config_of(vocabulary: int, hidden: int = 256, layers: int = 4):
    """Return the config of a small Qwen3 with this vocabulary; a config costs no memory."""
    config = copy.deepcopy(_small(hidden, layers))
    config.vocab_size = vocabulary
    return config


@cache
def _small(hidden: int, layers: int):
    return models.tiny(64, hidden=hidden, layers=layers, length=8192).config


def measured(
    config, rows: int, length: int, *, checkpointing: bool = False, **options: Any
) -> float:
    """MiB: the peak of building such a model and training it for two steps on this CPU."""
    with memory.peak() as peak:
        model = type(models.tiny(64))(config).train()
        if checkpointing:
            compiling.checkpoint_blocks(model)
        optimizer = memory.OPTIMIZERS["adamw"](list(model.parameters()))
        ids = torch.randint(config.vocab_size, (rows, length))
        for _ in range(2):
            memory.training_step(model, optimizer, ids, **options)
    return peak.bytes / MIB


def compared(config, settings: list[dict], *, rows: int = 2, length: int = 256) -> list[dict]:
    """Each setting predicted on fake tensors and measured in a real run."""
    table = []
    for options in each(settings, "settings"):
        said = memory.estimate(config, rows=rows, length=length, **options)["peak"] / MIB
        real = measured(config, rows, length, **options)
        table.append({**options, "predicted MiB": said, "measured MiB": real, "ratio": said / real})
    return table


def chart(kinds: dict[str, int]) -> show.Picture:
    """Return an estimate by kind, and the peak."""
    gib = {kind: size / GIB for kind, size in kinds.items()}
    largest = max((kind for kind in kinds if kind != "peak"), key=kinds.get)
    summary = (
        f"Predicted bytes of one training step. The peak is {gib['peak']:.3g} GiB, and the "
        f"largest kind is {largest}. "
        "Each kind is counted where it is largest, so the bars above the peak do not add up to it."
    )
    return show.bars(gib, x="GiB", summary=summary, title="Where the memory of a step goes")


MENUS = dict(
    logits=("full", "chunked"),
    checkpointing=(False, True),
    rows=(16, 1, 4, 64),
    length=(1024, 512, 4096, 8192),
    vocabulary=(32768, 4096, 131072),
    rank=(0, 8, 64),
    precision=("fp32", "bf16"),
    optimizer=tuple(memory.OPTIMIZERS),
)  # the first choice of each is what is drawn headless


def draw(*, vocabulary: int, **options: Any) -> show.Picture:
    """Return the chart of one choice of the menus, in less than a second."""
    # as `runs.begin` does: collections would walk through all that was imported
    if not gc.get_freeze_count():
        gc.freeze()
    with _two_of_each():
        return chart(memory.estimate(config_of(vocabulary), **options))


@contextmanager
def _two_of_each() -> Iterator[None]:
    """Let the chunked loss work on two chunks, and on two blocks of each.

    All full ones hold the same bytes, one at a time, so the count is the same to a few bytes. With
    long rows there are thousands, and to count them takes minutes.
    """
    with mock.patch.object(
        losses,
        "range",
        lambda first, end, step: range(first, min(end, 2 * step), step),
        create=True,
    ):
        yield
