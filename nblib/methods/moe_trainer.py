"""The Hugging Face Trainer for a mixture of experts: auxiliary losses, both of Muon's optimizers, experts on resume.

`hf.Trainer` mends what holds for every model. A mixture needs three things more: the balance and z terms of moe.py in
place of the model's own auxiliary loss, weighted by the tokens of each micro-batch and left out of evaluation; Muon
and AdamW in one optimizer, because a Trainer holds one; and a log in which the language loss stands by itself.

Footgun: in a saved checkpoint each expert has files of its own, in memory all are one tensor. That the two match on
resume is `hf.Trainer`'s doing; a stock Trainer goes on with fresh experts and says so in one log line.
"""

import torch
from torch import nn

from nblib import hf, losses
from nblib.methods import moe, param_groups


class Trainer(hf.Trainer):
    """`muon` are the options of `placement.optimizers`; None keeps the Trainer's own optimizer."""

    def __init__(
        self, *args, balance_weight: float = 0.01, z_weight: float = 0.001, muon: dict | None = None, **options
    ):
        if muon is not None and "make_optimizer" in options:
            raise ValueError("muon and make_optimizer: give one of them")
        if muon is not None:
            options["make_optimizer"] = lambda model: param_groups.Together(param_groups.optimizers(model, **muon))
        super().__init__(*args, **options)
        if self.model.config.output_router_logits:
            raise ValueError(
                "config.output_router_logits = True: the model adds an auxiliary loss of its own; set False"
            )
        self.weights = dict(balance_weight=balance_weight, z_weight=z_weight)
        self._sums: dict[str, torch.Tensor] = {}
        self._since = 0

    def compute_loss(self, model: nn.Module, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with moe.routing(self.model) as seen:
            language, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        here = losses.supervised(inputs["labels"])
        all_of_step = here if num_items_in_batch is None else num_items_in_batch
        terms = moe.auxiliary(seen, tokens=here, mask=inputs.get("attention_mask"), **self.weights)
        shares = {"language": language} | {
            name: term / all_of_step * (self.accelerator.num_processes if num_items_in_batch is not None else 1)
            for name, term in terms.items()
        }
        if not self._sums:
            self._since = self.state.global_step
        self._sums = {name: self._sums.get(name, 0) + share.detach() for name, share in shares.items()}
        loss = sum(shares.values())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict, *args, **options) -> None:
        """Adds the terms, as means over the steps since the last line that had a loss."""
        if "loss" in logs and self._sums:
            steps = max(1, self.state.global_step - self._since)
            logs |= {f"{name}_loss": float(total) / steps for name, total in self._sums.items()}
            self._sums = {}
        super().log(logs, *args, **options)
