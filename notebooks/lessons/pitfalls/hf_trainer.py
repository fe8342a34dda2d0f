"""P41 and P46: what the Hugging Face Trainer does without a message.

The Trainer logs a number in place of nan. Whether it divides a loss by the number of micro-batches
depends on the signature of the model. It resumes a mixture of experts without its experts. Nothing
is raised: the run goes on and the loss falls. nblib/hf.py has the corrected Trainer.

Footgun: everything is measured in one process without a GPU, in fp32.
"""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from safetensors import safe_open
from torch.nn import functional as F

from lessons.pitfalls import Pitfall
from lessons.pitfalls.bench import (
    VOCABULARY,
    arguments,
    byte_model,
    lora,
    run_trainer,
    seeded,
    silent,
)
from nblib import hf

LENGTH = 32


def small(**options) -> torch.nn.Module:
    """Return the model of every run here."""
    return byte_model(**(dict(hidden=32, heads=4) | options))


class Rows(torch.utils.data.Dataset):
    """Random tokens.

    Every second row has labels only in its last quarter, so micro-batches differ in tokens.
    """

    def __init__(self, count: int = 16, *, ragged: bool = True):
        self.ids = torch.randint(
            VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0)
        )
        self.labels = self.ids.clone()
        if ragged:
            self.labels[1::2, : LENGTH * 3 // 4] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


# ---------------------------------------------------------------------------- P41 nan logged as 0.0
def filtered(model: torch.nn.Module, data: Rows, folder: str) -> tf.Trainer:
    # logging_nan_inf_filter is True by default: nan is left out of the logged average
    args = arguments(folder, max_steps=2, learning_rate=0.0)
    return tf.Trainer(model=model, args=args, train_dataset=data)


def unfiltered(model: torch.nn.Module, data: Rows, folder: str) -> tf.Trainer:
    options = dict(logging_nan_inf_filter=False)
    args = arguments(folder, max_steps=2, learning_rate=0.0, **options)
    return tf.Trainer(model=model, args=args, train_dataset=data)


def _first_line(make: Callable[..., tf.Trainer], model, data) -> dict:
    """Return the true first loss, beside what the Trainer logs."""
    with torch.no_grad():
        true = float(model(data.ids, labels=data.labels).loss)
    with tempfile.TemporaryDirectory() as folder, seeded(), silent():
        trainer = make(model, data, folder)
        trainer.train()
    log = [line for line in trainer.state.log_history if "grad_norm" in line]
    return {"true_loss": true, "logged_loss": log[0]["loss"], "grad_norm": log[0]["grad_norm"]}


def poisoned() -> torch.nn.Module:
    """Return a model with one weight that overflowed."""
    model = small()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    return model


def checkpointed_then_adapted(model, *, rank: int = 8, kind: dict | None = None):
    """Return the order that the write-ups call wrong.

    `kind` is that of checkpointing, None for the library's default.
    """
    model.activation_checkpointing_enable(kind)
    return lora(model, target_modules=["q_proj", "v_proj"], r=rank)


class _Poison(tf.TrainerCallback):
    """Breaks a weight after a step, as an overflow would."""

    def __init__(self, after: int):
        self.after = after

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step == self.after:
            with torch.no_grad():
                model.model.norm.weight[0] = math.nan


def nan_in_mid_run(kind: type) -> list[float]:
    """Eight steps, nan from the sixth on, a log line every fourth step: the two losses that are
    logged.
    """
    options = dict(max_steps=8, logging_steps=4, callbacks=[_Poison(5)])
    _, log = run_trainer(kind, small(), Rows(), **options)
    return [line["loss"] for line in log]


def _a_number_for_nan(facts: dict) -> bool:
    return not math.isfinite(facts["true_loss"]) and facts["logged_loss"] == 0.0


# --------------------------------------------------------------- P46 the four habits of the Trainer
class CustomLoss(tf.Trainer):
    """What most custom losses do: take the item count, because the Trainer passes it, and return a
    mean.
    """

    def compute_loss(self, model, inputs, num_items_in_batch=None, **options):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = inputs["labels"][:, 1:].flatten()
        # a mean: the Trainer expects it over all micro-batches, and does not divide
        return F.cross_entropy(logits, targets)


class CountedLoss(hf.Trainer):
    """The same loss with its count; the optimizer, the auxiliary loss and the resume are those of
    nblib/hf.py.
    """

    def compute_loss(self, model, inputs, num_items_in_batch=None, **options):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        targets = inputs["labels"][:, 1:].flatten()
        summed = F.cross_entropy(logits, targets, reduction="sum")
        return summed / num_items_in_batch  # the tokens of all micro-batches


class OptimizerNotSet(tf.Trainer):
    """Makes an optimizer and returns it. The Trainer reads `self.optimizer`."""

    def create_optimizer(self, model=None):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def loss_scale(kind: type) -> float:
    """Return logged loss of a step of four micro-batches, divided by that of the same eight rows at
    once; 1 is right.
    """
    data, logged = Rows(8), {}
    for micro in (1, 4):
        _, log = run_trainer(
            kind,
            small(),
            data,
            per_device_train_batch_size=8 // micro,
            gradient_accumulation_steps=micro,
        )
        logged[micro] = log[0]["loss"]
    return logged[4] / logged[1]


def auxiliary_scale(kind: type) -> float:
    """How often the balancing loss is counted: logged loss with it minus without it, four
    micro-batches against one.

    The eight rows are equal, so the auxiliary loss of any part is that of the whole.
    """
    data = Rows(8, ragged=False)
    data.ids[:] = data.ids[:1]
    data.labels[:] = data.ids[:1]
    added = {}
    for micro in (1, 4):
        lines = []
        for coefficient in (0.0, 0.5):
            config = dict(output_router_logits=True, router_aux_loss_coef=coefficient)
            _, log = run_trainer(
                kind,
                small(family="qwen3_moe", **config),
                data,
                per_device_train_batch_size=8 // micro,
                gradient_accumulation_steps=micro,
            )
            lines.append(log[0]["loss"])
        added[micro] = lines[1] - lines[0]
    return added[4] / added[1]


def optimizer_error(kind: type, **options) -> str:
    """Return the error of training with a custom optimizer, or 'trains'."""
    try:
        run_trainer(kind, small(), Rows(), **options)
    except AttributeError as error:
        return f"AttributeError: {error}"
    return "trains"


def resume_mixture(kind: type, *, family: str = "qwen3_moe") -> dict:
    """Four steps in one run, against two, a stop, and two more in a model that starts from other
    weights.
    """
    data = Rows(ragged=False)
    with tempfile.TemporaryDirectory() as folder:
        options = dict(max_steps=4, save_strategy="steps", save_steps=2, folder=folder)
        straight = small(family=family)
        run_trainer(kind, straight, data, **options)
        fresh = small(family=family, seed=1)
        resumed, _ = run_trainer(
            kind, fresh, data, resume=str(Path(folder) / "checkpoint-2"), **options
        )
    pairs = zip(straight.named_parameters(), fresh.parameters(), strict=True)
    wrong = [name for (name, p), q in pairs if not torch.equal(p, q)]
    experts = [p for name, p in straight.named_parameters() if ".experts." in name]
    return {
        "bit_equal": not wrong,
        "experts_lost": sum(".experts." in name for name in wrong),
        "experts_share": sum(p.numel() for p in experts)
        / sum(p.numel() for p in straight.parameters()),
        "missing_keys_logged": "missing keys" in resumed.output,
    }


def experts_on_disk() -> dict:
    """How many tensors hold the experts of a mixture in memory, and in the file that is saved of
    it.
    """
    model = small(family="qwen3_moe")
    with tempfile.TemporaryDirectory() as folder:
        with silent():
            model.save_pretrained(folder)
        with safe_open(str(Path(folder) / "model.safetensors"), "pt") as file:
            saved = [name for name in file.keys() if ".experts." in name]
    memory = [name for name in model.state_dict() if ".experts." in name]
    return {
        "in_memory": len(memory),
        "on_disk": len(saved),
        "e.g. memory": memory[0],
        "e.g. disk": sorted(saved)[0],
    }


def stock_trainer() -> dict:
    return {
        "loss_scale": loss_scale(CustomLoss),
        "custom_optimizer": optimizer_error(OptimizerNotSet),
        "auxiliary_scale": auxiliary_scale(tf.Trainer),
        **resume_mixture(tf.Trainer),
    }


def corrected_trainer() -> dict:
    make = {"make_optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)}
    return {
        "loss_scale": loss_scale(CountedLoss),
        "custom_optimizer": optimizer_error(hf.Trainer, **make),
        "auxiliary_scale": auxiliary_scale(hf.Trainer),
        **resume_mixture(hf.Trainer),
    }


def trainer_faults(facts: dict) -> list[str]:
    """Which of the four show."""
    return [
        name
        for name, shows in {
            "custom loss multiplied": abs(facts["loss_scale"] - 1) > 0.01,
            "optimizer never set": facts["custom_optimizer"] != "trains",
            "auxiliary loss multiplied": abs(facts["auxiliary_scale"] - 1) > 0.05,
            "experts lost on resume": facts["experts_lost"] > 0 or not facts["bit_equal"],
        }.items()
        if shows
    ]


PITFALLS = [
    Pitfall(
        id="P41",
        title="The Trainer writes 0.0 where the loss is nan",
        symptom="the log says loss 0.0 and grad_norm nan, from the first step on",
        claim="gradient checkpointing was enabled before the LoRA adapters were attached (a "
        "fine-tuning write-up)",
        verdict="The loss is nan, and the log hides it. `logging_nan_inf_filter` is on by "
        "default and puts the average "
        "of earlier losses in place of nan; at the first step that is 0.0. Checkpointing "
        "before the adapters logs an "
        "ordinary loss. Seen on transformers 5.23, peft 0.21.",
        fix="`logging_nan_inf_filter=False`, and stop at the first loss that is not finite",
        broken=lambda: _first_line(filtered, poisoned(), Rows()),
        fixed=lambda: _first_line(unfiltered, poisoned(), Rows()),
        claimed=lambda: _first_line(filtered, checkpointed_then_adapted(small()), Rows()),
        seen=_a_number_for_nan,
        check="N17",
        wrong=filtered,
        right=unfiltered,
    ),
    Pitfall(
        id="P46",
        title="Four silent habits of the Trainer",
        symptom="the loss depends on the number of micro-batches, a custom optimizer crashes "
        "or forgets, and a mixture "
        "of experts is worse after resume",
        claim="",
        verdict="All four come from the stock Trainer. It multiplies a custom loss that "
        "ignores the item count by the "
        "number of micro-batches (the code above), and the auxiliary loss too. An optimizer "
        "that is returned but not "
        "set raises. Experts are not restored on resume; the log line about missing keys also "
        "appears for dense models "
        "that lose nothing. Seen on transformers 5.23.",
        fix="`nblib.hf.Trainer`; in a loss of your own, the sum divided by `num_items_in_batch`",
        broken=stock_trainer,
        fixed=corrected_trainer,
        seen=lambda facts: bool(trainer_faults(facts)),
        check="N6",
        slow=True,
        wrong=CustomLoss,
        right=CountedLoss,
    ),
]
