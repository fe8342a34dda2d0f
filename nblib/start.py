"""What the notebook of a method starts from: a model, its tokenizer, and a corpus in its three splits.

`start.open()` gives the stored base model on the embedded prose. With a name it gives any causal model of the hub or
of a folder, with that model's own tokenizer, on any corpus; a large one stays on disk (shards.py). The rows for
validation and for the final result are the same in every run and come from documents that training never sees.

Footgun: a method changes the model in place. Take `copy.deepcopy(start.model)` for each run of a comparison.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from nblib import base, models, runtime, shards, text, train


class Start(NamedTuple):
    model: nn.Module
    tokenizer: object
    stream: Tensor  # training documents end to end, (N,)
    validation: Tensor  # rows to evaluate on while training, (R, length)
    held_out: Tensor  # rows for the result
    machine: runtime.Machine

    def batches(self, *, rows: int, seed: int = 0) -> text.Batches:
        return text.Batches(self.stream, rows=rows, length=self.validation.shape[1], seed=seed)

    def loss(self, model: nn.Module, rows: int | None = None) -> float:
        """Next-token loss on the held-out rows, or the first of them, nats per token."""
        return train.evaluate(model, self.held_out[:rows], machine=self.machine)["loss"]


def open(
    name: str = "",
    *,
    recipe: str = "default",
    corpus: str = "prose",
    length: int = 256,
    rows: int = 64,
    machine: runtime.Machine,
    on_step: Callable[[dict], None] | None = None,
) -> Start:
    """`name` is a hub name or folder, empty for the stored base model of `recipe`; `rows` of each fixed split."""
    if not name:
        model, tokenizer, *_ = base.load(recipe, machine=machine, on_step=on_step)
    else:
        tokenizer = models.load_tokenizer(name)  # first, because it is small: a wrong name ends at once
        model = models.load(name, device=machine.device).train()
    streams = shards.open(corpus, tokenizer)
    fixed = {s: text.fixed_rows(streams[s], length=length, limit=rows) for s in ("validation", "held_out")}
    return Start(model, tokenizer, streams["train"], **fixed, machine=machine)
