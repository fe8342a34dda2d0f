"""The Hugging Face Trainer with five of its habits corrected, and with the losses of our loop.

    loss       summed over the micro-batch, divided by the supervised tokens of the whole step
               (`num_items_in_batch`)
    auxiliary  a mixture's balancing loss counts once per step, not once per micro-batch, and never
               in evaluation
    optimizer  made by `make_optimizer(model)`, *set* on the trainer, and refused when it forgets a
               parameter
    resume     through `from_pretrained`, because experts are one stacked tensor in memory and many
               on disk; the stock Trainer matches names, finds no expert, says so in a log line and
               trains on fresh ones
    nan        logged as nan; stock, `logging_nan_inf_filter` puts an average of earlier losses
               there, 0.0 at first

`loss(model, batch) -> {name: summed loss}` is a loss of the loop (moe.loss, ard.loss, ...) and
replaces the cross-entropy in training; a mixture's own auxiliary loss then counts only if `loss`
contains it. Every term has a column of its own in the log, `<name>_loss`: the mean over the steps
since the last line. An evaluation reports the cross-entropy alone. `from_pretrained` cannot build
an adapted model, so give `save(model, folder)` and `load(...)`:

    optimizer = train.adamw(model, lr=1e-2)
    loss = ard.loss(model, beta=1e-3, warmup=50, optimizer=optimizer, language=hf.causal_lm)
    hf.Trainer(model, args, loss=loss, optimizers=(optimizer, None), save=ard_run.save,
    load=ard_run.load)

Footgun: an override of `compute_loss` that takes the item count and ignores it is wrong, and
nothing says so. The Trainer assumes that the count was used and stops dividing by the number of
micro-batches. One device per process only, and with several processes `loss` must call the model it
is given, as `causal_lm` here does: `losses.causal_lm` calls the layers inside it, past the wrapper
that averages gradients.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from nblib import losses, wiring
from nblib.train import Batch, Terms


def causal_lm(model: nn.Module, batch: Batch) -> Terms:
    """Next-token cross-entropy by a call of the model itself: the language loss for a Trainer."""
    return _cross_entropy(_forward(model, batch), batch["labels"])


def _forward(model: nn.Module, batch: Batch) -> tf.utils.ModelOutput:
    return model(**{name: value for name, value in batch.items() if name != "labels"})


def _cross_entropy(outputs: tf.utils.ModelOutput, labels: Tensor) -> Terms:
    # the one shift
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return {"ce": F.cross_entropy(logits, targets, ignore_index=losses.IGNORED, reduction="sum")}


class Trainer(tf.Trainer):
    loss_is_scaled_for_ga = True  # compute_loss divides by the whole step, so nobody else may

    def __init__(
        self,
        model: nn.Module | None = None,
        *args,
        loss: Callable[[nn.Module, Batch], Terms] | None = None,
        make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
        save: Callable[[nn.Module, Path], object] | None = None,
        load: Callable[[nn.Module, Path], object] | None = None,
        **options,
    ):
        if (save is None) != (load is None):
            raise ValueError(
                "save, load: give both or neither, or a checkpoint could not be resumed from"
            )
        if getattr(model, "is_quantized", False) and any(
            "lora_" in name for name in wiring.trainable(model)
        ):
            # the Trainer asks this before it trains beside quantised weights
            model._hf_peft_config_loaded = True
        super().__init__(model, *args, **options)
        if self.args.n_gpu > 1:
            raise ValueError(
                f"n_gpu = {self.args.n_gpu}: one device per process; start with torchrun"
            )
        self.loss, self.make_optimizer, self.save_adapters, self.load_adapters = (
            loss,
            make_optimizer,
            save,
            load,
        )
        self.args.logging_nan_inf_filter = False
        self.args.average_tokens_across_devices = True  # the item count is that of all processes
        self.term_sums: Terms = {}  # since the last line of the log
        self.logged_step = 0

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        if self.optimizer is None and self.make_optimizer is not None:
            self.optimizer = self.make_optimizer(model or self.model)  # returning it is not enough
        optimizer = super().create_optimizer(model)  # keeps what is set
        wiring.refuse_missed(self.model, [optimizer])
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens, processes = losses.supervised(inputs["labels"]), 1
        # the tokens are those of all processes, the gradients will be averaged
        if num_items_in_batch is not None:
            tokens, processes = num_items_in_batch, self.accelerator.num_processes
        if model.training and self.loss is not None:
            with self.accelerator.autocast():  # around the model's own forward pass it is anyway
                outputs, terms = None, self.loss(model, inputs)
        else:
            outputs = _forward(model, inputs)
            terms = _cross_entropy(outputs, inputs["labels"])
        terms = {name: term / tokens * processes for name, term in terms.items()}
        if (
            model.training
            and outputs is not None
            and (auxiliary := outputs.get("aux_loss")) is not None
        ):
            weighted = self.model.config.router_aux_loss_coef * auxiliary
            terms["auxiliary"] = weighted / self.current_gradient_accumulation_steps
        if model.training:
            self.logged_step = self.logged_step if self.term_sums else self.state.global_step
            self.term_sums |= {
                name: self.term_sums.get(name, 0) + term.detach() for name, term in terms.items()
            }
        loss = sum(terms.values())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args, **options) -> None:
        if "loss" in logs and self.term_sums:
            steps = max(1, self.state.global_step - self.logged_step)
            logs |= {f"{name}_loss": float(total) / steps for name, total in self.term_sums.items()}
            self.term_sums = {}
        super().log(logs, *args, **options)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.save_adapters is None:
            return super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            self.save_adapters(self.model, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        model = model or self.model
        if self.load_adapters is not None:
            return self.load_adapters(model, Path(resume_from_checkpoint))
        if not isinstance(model, tf.PreTrainedModel) or self.is_fsdp_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        saved, report = type(model).from_pretrained(
            resume_from_checkpoint,
            config=model.config,
            dtype=torch.float32,
            output_loading_info=True,
        )
        if report["missing_keys"]:
            raise ValueError(
                f"{resume_from_checkpoint} has no weights for {sorted(report['missing_keys'])[:3]}"
            )
        model.load_state_dict(saved.state_dict())  # copies into the tensors the optimizer will hold

    def _load_best_model(self) -> None:
        if isinstance(self.model, tf.PreTrainedModel) and not self.is_fsdp_enabled:
            return self._load_from_checkpoint(self.state.best_model_checkpoint)
        return super()._load_best_model()
