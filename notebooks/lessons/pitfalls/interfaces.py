"""Faults between two parts that are each right: an adapter and its loader, an optimizer and its
model, a callback.

Each part would pass its own test. Every tensor gets its gradient, but the optimizer holds other
tensors. The adapter has its weights, but was loaded for inference. The callback runs, but looks for
a name that the trainer no longer passes. Only a check across the two parts finds the fault.

Footgun: the canary takes its own steps. It shows that the model *can* train, not that your
optimizer trains it.
"""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as tf
from torch import nn

from lessons.pitfalls import WITH_PEFT, Pitfall
from lessons.pitfalls.bench import (
    arguments,
    attach,
    base,
    fit,
    quiet,
    rows,
    seeded,
    sentence,
    silent,
    wake,
)
from nblib import text, wiring

# P07: loaded for inference


def for_inference(base: nn.Module, folder: str) -> nn.Module:
    # is_trainable is False by default: the adapter's weights come back frozen
    return peft.PeftModel.from_pretrained(base, folder)


def for_training(base: nn.Module, folder: str) -> nn.Module:
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


def loaded(*, is_trainable: bool = False) -> tuple[nn.Module, bool]:
    """Save a trained adapter and load it as a second session would: the model, and whether the
    weights came back.
    """
    first = wake(attach(base()))
    fit(first, steps=3)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        first.save_pretrained(folder)
        second = quiet(for_training if is_trainable else for_inference, base(), folder)[0]
        same = torch.equal(first(input_ids=rows()).logits, second(input_ids=rows()).logits)
    return second, same


def _reload(*, is_trainable: bool) -> dict:
    second, same = loaded(is_trainable=is_trainable)
    return {"weights came back": same} | train_on(second)


def _not_in_file() -> dict:
    """Return the claimed cause: the file held no adapter, so the second session trains a fresh
    one.
    """
    first, second = wake(attach(base())), wake(attach(base()))
    fit(first, steps=3)
    with torch.no_grad():
        same = torch.equal(first(input_ids=rows()).logits, second(input_ids=rows()).logits)
    return {"weights came back": same} | train_on(second)


def train_on(model: nn.Module) -> dict:
    """Five steps with an optimizer over all parameters, as most loops make it."""
    # its hook gives any loss a graph
    model.train().get_base_model().activation_checkpointing_enable()
    facts = fit(
        model, steps=5, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    )
    return facts | sentence(model)


def _trains_on_nothing(facts: dict) -> bool:
    return facts["tensors that moved"] == 0 and facts["first loss"] == facts["last loss"]


# P08: the optimizer holds other tensors than the model


Built = tuple[nn.Module, torch.optim.Optimizer]


def optimizer_first(model: nn.Module, lr: float) -> Built:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model = attach(model)  # freezes those tensors and adds others
    return model, optimizer


def optimizer_last(model: nn.Module, lr: float) -> Built:
    model = attach(model)
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=lr, weight_decay=0.0)
    return model, optimizer


def optimizer_on_a_copy(model: nn.Module, lr: float) -> Built:
    """Return the other way to the same fault."""
    model = attach(model)
    _, optimizer = optimizer_last(copy.deepcopy(model), lr)
    return model, optimizer


def optimizer_on(when: str, lr: float = 1e-2) -> dict:
    made = {
        "before the adapters": optimizer_first,
        "on a copy": optimizer_on_a_copy,
        "after": optimizer_last,
    }
    model, optimizer = made[when](base().requires_grad_(True), lr)
    missed = len(wiring.missed(model, [optimizer]))
    facts = {"optimizer made": when} | fit(model, optimizer=optimizer)
    return facts | {"not in optimizer": missed} | sentence(model)


# P14: the callback's tokenizer


def by_old_name(trainer: tf.Trainer, **passed: Any) -> tf.PreTrainedTokenizerBase:
    # neither the callback's arguments nor the trainer have a `tokenizer` any more
    return passed.get("tokenizer", getattr(trainer, "tokenizer", None))


def by_new_name(trainer: tf.Trainer, **passed: Any) -> tf.PreTrainedTokenizerBase:
    # brackets: if this name changes too, the error will say so
    return passed["processing_class"]


class Pads(tf.TrainerCallback):
    """A callback that fetches the tokenizer and uses it."""

    def __init__(self, fetch: Callable[..., tf.PreTrainedTokenizerBase]):
        self.fetch, self.trainer, self.facts = fetch, None, {}

    def on_step_end(self, args, state, control, **passed):
        tokenizer = self.fetch(self.trainer, **passed)
        self.facts = {
            "handed over": ", ".join(sorted(k for k, v in passed.items() if v is not None))
        }
        self.facts["found"] = type(tokenizer).__name__
        try:
            tokenizer.pad({"input_ids": [[1, 2]]})
            self.facts["raised"] = None
        except AttributeError as error:
            self.facts["raised"] = str(error)


def _callback(fetch: Callable[..., tf.PreTrainedTokenizerBase]) -> dict:
    """One step of the HF Trainer, with a tokenizer given to it, and a callback that fetches it in
    this way.
    """
    tokenizer = text.train_tokenizer(["a few words, and a few words more"], vocab_size=256)
    callback = Pads(fetch)
    data = [{"input_ids": row, "labels": row} for row in rows(2, 8)]
    with tempfile.TemporaryDirectory() as folder, seeded(), silent():
        model, args = base().requires_grad_(True), arguments(folder)
        options = dict(model=model, args=args, train_dataset=data, callbacks=[callback])
        callback.trainer = trainer = tf.Trainer(**options, processing_class=tokenizer)
        trainer.train()
        try:
            tf.Trainer(**options, tokenizer=tokenizer)
            callback.facts["Trainer(tokenizer=...)"] = "accepted"
        except TypeError as error:
            callback.facts["Trainer(tokenizer=...)"] = str(error)
    return callback.facts


PITFALLS = [
    Pitfall(
        id="P07",
        title="An adapter loaded for inference, then trained",
        symptom="I continued from a saved adapter. Nothing failed, and after a day it has not "
        "changed.",
        claim="the adapter was not in the file (folklore)",
        verdict="The weights came back exactly, and frozen. Loading freezes an adapter unless "
        "it is told otherwise. "
        "Nothing is raised, because the hook that comes with checkpointing gives the loss a graph. "
        f"Seen on {WITH_PEFT}.",
        fix="`PeftModel.from_pretrained(base, folder, is_trainable=True)`, and assert that "
        "something trains.",
        broken=lambda: _reload(is_trainable=False),
        fixed=lambda: _reload(is_trainable=True),
        seen=_trains_on_nothing,
        claimed=_not_in_file,
        check="S1",
        wrong=for_inference,
        right=for_training,
    ),
    Pitfall(
        id="P08",
        title="The optimizer holds other tensors than the model",
        symptom="Every adapter gets a gradient, and the loss is flat to the last digit.",
        claim="the learning rate is too small (folklore)",
        verdict="The learning rate is not the cause: a tiny one still moves every tensor. An "
        "optimizer made before the "
        "adapters, or on a copy, holds tensors that this model does not train. The canary "
        "cannot see this. "
        f"Seen on {WITH_PEFT}.",
        fix="Make the optimizer last. Then check by identity that every trainable tensor is in "
        "an optimizer "
        "(`wiring.missed`).",
        broken=lambda: optimizer_on("before the adapters"),
        fixed=lambda: optimizer_on("after"),
        seen=_trains_on_nothing,
        claimed=lambda: optimizer_on("after", lr=1e-5),
        check="S3",
        wrong=optimizer_first,
        right=optimizer_last,
    ),
    Pitfall(
        id="P14",
        title="The tokenizer that callbacks no longer receive",
        symptom="My callback stops with: 'NoneType' object has no attribute 'pad'.",
        claim="",
        verdict="The callback finds no tokenizer under its old name, and neither does the "
        "usual fallback. Callbacks "
        "now receive `processing_class`; `tokenizer` is gone from their arguments, from the "
        "trainer's attributes "
        f"and from its constructor. Seen on {WITH_PEFT}.",
        fix='Take `kwargs["processing_class"]`, with brackets, so that a missing name is reported.',
        broken=lambda: _callback(by_old_name),
        fixed=lambda: _callback(by_new_name),
        seen=lambda facts: facts["raised"] is not None,
        wrong=by_old_name,
        right=by_new_name,
    ),
]
