"""The start of a method's notebook: a model, its tokenizer, and a corpus in its three splits.

`load_setup()` loads the stored base model on the embedded prose. With a name it loads any causal
model of the hub or of a folder, with that model's own tokenizer, on any corpus; a large one stays
on disk (corpora.py). The rows for validation and for the final result are the same in every run and
come from documents that training never sees.

Footgun: a method changes the model in place. Take `copy.deepcopy(setup.model)` for each run of a
comparison.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from nblib import corpora, models, runtime, text, train
from nbworkbook import base_model


class Setup(NamedTuple):
    """A model with its tokenizer and its data."""

    model: nn.Module
    tokenizer: object
    stream: Tensor  # training documents end to end, (N,)
    validation: Tensor  # rows to evaluate on while training, (rows, length)
    held_out: Tensor  # rows for the result, (rows, length)
    machine: runtime.Machine

    def batches(self, *, rows: int, seed: int = 0) -> text.Batches:
        """Return batches of the training documents."""
        length = self.validation.shape[1]
        return text.Batches(self.stream, rows=rows, length=length, seed=seed)

    def loss(self, model: nn.Module, rows: int | None = None) -> float:
        """Return the next-token loss on the held-out rows, or the first of them, in nats per
        token.
        """
        return train.evaluate(model, self.held_out[:rows], machine=self.machine)["loss"]


def load_setup(
    name: str = "",
    *,
    recipe: str = "default",
    corpus: str = "prose",
    length: int = 256,
    rows: int = 64,
    machine: runtime.Machine,
    on_step: Callable[[dict], None] | None = None,
) -> Setup:
    """Return the setup of a model: a hub name or folder, empty for the stored base model of
    `recipe`.

    `rows` are those of each fixed split, of `length` tokens each.
    """
    if name:
        # first, because it is small: a wrong name ends at once
        tokenizer = models.load_tokenizer(name)
        model = models.load(name, device=machine.device).train()
    else:
        model, tokenizer, *_ = base_model.load(recipe, machine=machine, on_step=on_step)

    streams = corpora.open(corpus, tokenizer)
    return Setup(
        model=model,
        tokenizer=tokenizer,
        stream=streams["train"],
        validation=text.fixed_rows(streams["validation"], length=length, limit=rows),
        held_out=text.fixed_rows(streams["held_out"], length=length, limit=rows),
        machine=machine,
    )
