"""The Hugging Face Trainer with five of its habits corrected, for people who prefer it to `train.steps`.

    loss       summed over the micro-batch, divided by the supervised tokens of the whole step (`num_items_in_batch`)
    auxiliary  a mixture's balancing loss counts once per step, not once per micro-batch, and never in evaluation
    optimizer  made by `make_optimizer(model)`, *set* on the trainer, and refused when it forgets a parameter
    resume     through `from_pretrained`, because experts are one stacked tensor in memory and many on disk; the
               stock Trainer matches names, finds no expert, says so in a log line and trains on fresh ones
    nan        logged as nan; stock, `logging_nan_inf_filter` puts an average of earlier losses there, 0.0 at first

`loss_sums(outputs, labels) -> {name: summed loss}` replaces the cross-entropy, with the convention of losses.py.

Footgun: an override of `compute_loss` that takes the item count and ignores it is silently wrong: the Trainer sees a
model that could have used the count and stops dividing by the number of micro-batches. One device per process only.
"""

from collections.abc import Callable

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from nblib import losses

Sums = Callable[[tf.utils.ModelOutput, Tensor], dict[str, Tensor]]


def cross_entropy(outputs: tf.utils.ModelOutput, labels: Tensor) -> dict[str, Tensor]:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()  # the one shift
    return {"ce": F.cross_entropy(logits, targets, ignore_index=losses.IGNORED, reduction="sum")}


class Trainer(tf.Trainer):
    loss_is_scaled_for_ga = True  # compute_loss divides by the whole step, so nobody else may

    def __init__(
        self,
        *args,
        loss_sums: Sums = cross_entropy,
        make_optimizer: Callable[[nn.Module], Optimizer] | None = None,
        **options,
    ):
        super().__init__(*args, **options)
        if self.args.n_gpu > 1:
            raise ValueError(f"n_gpu = {self.args.n_gpu}: one device per process; start with torchrun")
        self.loss_sums, self.make_optimizer = loss_sums, make_optimizer
        self.args.logging_nan_inf_filter = False
        self.args.average_tokens_across_devices = True  # the item count is that of all processes

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        if self.optimizer is None and self.make_optimizer is not None:
            self.optimizer = self.make_optimizer(model or self.model)  # returning it is not enough
        optimizer = super().create_optimizer(model)  # keeps what is set
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left_out = [n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in held]
        if left_out:
            raise ValueError(f"{len(left_out)} trainable parameters are in no optimizer, the first is {left_out[0]}")
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        tokens = losses.supervised(labels) if num_items_in_batch is None else num_items_in_batch
        loss = sum(self.loss_sums(outputs, labels).values()) / tokens
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # the tokens are everybody's, the gradients will be averaged
        auxiliary = outputs.get("aux_loss")
        if model.training and auxiliary is not None:
            loss = loss + self.model.config.router_aux_loss_coef * auxiliary / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = model or self.model
        if not isinstance(model, tf.PreTrainedModel) or self.is_fsdp_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        saved, report = type(model).from_pretrained(
            resume_from_checkpoint, config=model.config, dtype=torch.float32, output_loading_info=True
        )
        if report["missing_keys"]:
            raise ValueError(f"{resume_from_checkpoint} has no weights for {sorted(report['missing_keys'])[:3]}")
        model.load_state_dict(saved.state_dict())  # copies into the tensors the optimizer will hold

    def _load_best_model(self) -> None:
        if isinstance(self.model, tf.PreTrainedModel) and not self.is_fsdp_enabled:
            return self._load_from_checkpoint(self.state.best_model_checkpoint)
        return super()._load_best_model()
