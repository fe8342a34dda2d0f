"""ARD-LoRA with the Hugging Face Trainer: the loss with its KL, priors per epoch, calibration, checkpoints that resume.

`Trainer` is nblib.hf's, which divides summed losses by the tokens of the whole step, with two changes: the forward
pass runs inside `ard.collect`, so the KL is that of the very same pass, and a checkpoint holds the adapters alone.
The stock resume goes through `from_pretrained`, where an adapted projection has another name than in the file.

The train loader is made once, before the first epoch, so training data cannot be exchanged between epochs; what is
drawn anew each epoch is the pool for the priors, by a callback. Callbacks get the tokenizer as `processing_class`;
under its old name, `tokenizer`, there is nothing in transformers 5, and `kwargs.get` would not complain.

Footgun: `on_epoch_begin` also fires when a run resumes in the middle of an epoch. Priors fitted again there are not
those of the straight run, so `Priors` waits for a whole epoch.
"""

import transformers as tf
from torch import Tensor, nn

from nblib import hf, losses, runtime
from nblib.methods import ard, ard_ranks, ard_run, uncertainty


class Trainer(hf.Trainer):
    """`beta` and `warmup` as in `ard.objective`; logs "ce" and "kl" (weighted) beside the training loss. The loss of an
    evaluation is the cross-entropy alone."""

    def __init__(self, model, *args, beta: float, warmup: int = 0, **options):
        if beta < 0 or warmup < 0:
            raise ValueError(f"beta = {beta}, warmup = {warmup}: neither may be negative")
        if not ard.adapters(model):
            raise ValueError("the model has no adapters: attach first")
        if getattr(model, "is_quantized", False):
            model._hf_peft_config_loaded = True  # the Trainer asks this before it trains beside quantised weights
        super().__init__(model, *args, **options)
        self.beta, self.warmup = beta, warmup
        self._sums: dict[str, Tensor] = {}  # terms since the last log, each divided by the tokens of its step
        self._steps: set[int] = set()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.model.ard_steps.fill_(self.state.global_step)
        weight = self.beta * ard.warm(self.model, self.warmup)

        def sums(outputs, labels: Tensor) -> dict[str, Tensor]:
            terms = hf.cross_entropy(outputs, labels)
            if not model.training:
                return terms
            terms |= {"kl": weight * ard.kl(seen, inputs.get("attention_mask"))}
            tokens = losses.supervised(labels) if num_items_in_batch is None else num_items_in_batch
            self._steps.add(self.state.global_step)
            for name, term in terms.items():
                self._sums[name] = self._sums.get(name, 0) + term.detach() / tokens
            return terms

        self.loss_sums = sums  # a closure, because only this call knows what was collected and what is padding
        with ard.collect(self.model) as seen:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._sums:
            logs |= {name: float(value) / len(self._steps) for name, value in self._sums.items()}
            self._sums, self._steps = {}, set()
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = output_dir or self.args.output_dir
        if self.args.should_save:
            self.model.ard_steps.fill_(self.state.global_step)
            ard_run.save(self.model, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        ard_run.load(model or self.model, resume_from_checkpoint)


class Priors(tf.TrainerCallback):
    """At the start of every epoch, fit the priors to rows drawn anew from a pool that training never sees."""

    def __init__(self, pool: ard_ranks.HeldOut, *, machine: runtime.Machine | None = None):
        self.pool, self.machine = pool, machine

    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        epoch = state.epoch or 0
        if epoch == int(epoch):
            ard_ranks.estimate_priors(model, self.pool.set_epoch(int(epoch)), machine=self.machine)


class Uncertainty(tf.TrainerCallback):
    """At the end of every epoch, accuracy, NLL and ECE of the point estimate and of the mean over `samples` draws,
    into the log history; the reliability tables are kept in `tables`."""

    def __init__(self, batches: list[ard.Batch], *, samples: int = 8, machine: runtime.Machine | None = None):
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
    """What the model says next after the same prompts, before training and after every epoch, in `history`."""

    def __init__(self, prompts: list[str]):
        self.prompts, self.history = prompts, []

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        if processing_class is None:
            raise ValueError("processing_class: the predictions need the tokenizer, give it to the Trainer")
        self._note(state, model, processing_class)

    def on_epoch_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._note(state, model, processing_class)

    def _note(self, state, model: nn.Module, tokenizer) -> None:
        rows = ard_run.predictions(model, tokenizer, self.prompts)
        self.history += [{"epoch": state.epoch or 0, **row} for row in rows]
