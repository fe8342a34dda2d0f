"""ARD-LoRA in the Hugging Face Trainer: new priors, calibration and predictions at every epoch, as
callbacks.

`hf.Trainer(loss=ard.loss(...), save=ard_run.save, load=ard_run.load)` trains, logs and resumes by
itself. The Trainer makes its train loader once, before the first epoch, so the training rows stay
the same; the rows that the priors are fitted to are drawn anew each epoch by a callback.
transformers 5 gives callbacks the tokenizer as `processing_class`, and nothing under the old name
`tokenizer`, so `kwargs.get("tokenizer")` returns None without an error.

Footgun: `on_epoch_begin` also fires when a run resumes in the middle of an epoch. Priors fitted
there would differ from those of the uninterrupted run, so `Priors` waits for a whole epoch.
"""

import transformers as tf
from torch import nn

from lessons import ard_watching
from nblib import runtime
from nblib.methods import ard
from nblib.methods.ard import ranks, uncertainty
from nblib.train import Batch


class Priors(tf.TrainerCallback):
    """At the start of every epoch, fit the priors to rows drawn anew from a pool that training
    never sees.
    """

    def __init__(self, pool: ranks.HeldOut, *, machine: runtime.Machine | None = None):
        self.pool, self.machine = pool, machine

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        epoch = state.epoch or 0
        if epoch == int(epoch):
            ranks.estimate_priors(model, self.pool.set_epoch(int(epoch)), machine=self.machine)


class Uncertainty(tf.TrainerCallback):
    """At the end of every epoch, accuracy, NLL and ECE of the point estimate and of the mean over
    `samples` draws, into the log history; `tables` holds the reliability tables.
    """

    def __init__(
        self, batches: list[Batch], *, samples: int = 8, machine: runtime.Machine | None = None
    ):
        if samples < 1:
            raise ValueError(f"samples = {samples}: must be at least 1")
        self.batches, self.samples, self.machine, self.tables = batches, samples, machine, []

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        entry, tables = {"epoch": state.epoch, "step": state.global_step}, {}
        for kind, samples in (("point", 0), ("mean", self.samples)):
            options = dict(samples=samples, sampling=ard.sampling, machine=self.machine)
            facts = uncertainty.measure(model, self.batches, **options)
            tables[kind] = facts["reliability"]
            entry |= {f"{kind}_{key}": facts[key] for key in ("accuracy", "nll", "ece")}
        self.tables.append(tables)
        state.log_history.append(entry)


class Predictions(tf.TrainerCallback):
    """The likeliest next tokens after the same prompts, before training and after every epoch, in
    `history`.
    """

    def __init__(self, prompts: list[str]):
        self.prompts, self.history = prompts, []

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        if processing_class is None:
            raise ValueError(
                "processing_class: the predictions need the tokenizer, give it to the Trainer"
            )
        self._note(state, model, processing_class)

    def on_epoch_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._note(state, model, processing_class)

    def _note(self, state, model: nn.Module, tokenizer) -> None:
        rows = ard_watching.predictions(model, tokenizer, self.prompts)
        self.history += [{"epoch": state.epoch or 0, **row} for row in rows]
