"""Faults between two parts that are each right: an adapter and its loader, an optimizer and its model, a callback.

Each part would pass its own test. The gradient arrives and the optimizer holds other tensors; the adapter has its
weights and was loaded for reading; the callback runs and looks for a name that the trainer no longer passes. Only a
check across the two parts finds the fault.

Footgun: the canary takes its own steps. It shows that the model *can* train, not that your optimizer trains it.
"""

import copy
import tempfile

import peft
import torch
import transformers as tf
from torch import nn

from lessons.pitfalls import WITH_PEFT, Pitfall
from lessons.pitfalls.bench import arguments, attach, base, fit, quiet, rows, seeded, sentence, silent, wake
from nblib import text, wiring

# P07: loaded for inference


def loaded(**options) -> tuple[nn.Module, bool]:
    """Save a trained adapter and load it as a second session would: the model, and whether the weights came back."""
    first = wake(attach(base()))
    fit(first, steps=3)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        first.save_pretrained(folder)
        second = quiet(peft.PeftModel.from_pretrained, base(), folder, **options)[0]
        same = torch.equal(first(input_ids=rows()).logits, second(input_ids=rows()).logits)
    return second, same


def _reload(**options) -> dict:
    second, same = loaded(**options)
    return {"weights came back": same} | train_on(second)


def _not_in_file() -> dict:
    """The claim: the file held no adapter, so the second session trains a fresh one."""
    first, second = wake(attach(base())), wake(attach(base()))
    fit(first, steps=3)
    with torch.no_grad():
        same = torch.equal(first(input_ids=rows()).logits, second(input_ids=rows()).logits)
    return {"weights came back": same} | train_on(second)


def train_on(model: nn.Module) -> dict:
    """Five steps with an optimizer over all parameters, as most loops make it."""
    model.train().get_base_model().activation_checkpointing_enable()  # its hook gives any loss a graph
    facts = fit(model, steps=5, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0))
    return facts | sentence(model)


def _trains_on_nothing(facts: dict) -> bool:
    return facts["tensors that moved"] == 0 and facts["first loss"] == facts["last loss"]


# P08: the optimizer holds other tensors than the model


def optimizer_on(when: str, lr: float = 1e-2) -> dict:
    model = base().requires_grad_(True)
    early = list(model.parameters())
    model = attach(model)
    trains = list(wiring.trainable(model).values())
    twin = list(wiring.trainable(copy.deepcopy(model)).values())
    params = {"before the adapters": early, "on a copy": twin, "after": trains}[when]
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    missed = len(wiring.missed(model, [optimizer]))
    facts = {"optimizer made": when} | fit(model, optimizer=optimizer)
    return facts | {"not in optimizer": missed} | sentence(model)


# P14: the callback's tokenizer


class Pads(tf.TrainerCallback):
    """A callback as they are written: fetch the tokenizer from what the trainer passes, and use it."""

    def __init__(self, key: str):
        self.key, self.trainer, self.facts = key, None, {}

    def on_step_end(self, args, state, control, **passed):
        tokenizer = passed.get(self.key, getattr(self.trainer, "tokenizer", None))
        self.facts = {"handed over": ", ".join(sorted(k for k, v in passed.items() if v is not None))}
        self.facts["found"] = type(tokenizer).__name__
        try:
            tokenizer.pad({"input_ids": [[1, 2]]})
            self.facts["raised"] = None
        except AttributeError as error:
            self.facts["raised"] = str(error)


def _callback(key: str) -> dict:
    """One step of the HF Trainer, with a tokenizer given to it, and a callback that looks under `key`."""
    tokenizer = text.train_tokenizer(["a few words, and a few words more"], vocab_size=256)
    callback = Pads(key)
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
        title="An adapter loaded to be read, not trained",
        symptom="I went on from a saved adapter. Nothing failed, and after a day it is what it was.",
        claim="the adapter was not in the file (folklore)",
        verdict=f"The weights came back exactly. Loading freezes them unless it is told otherwise; with the hook that "
        f"checkpointing brings, the loss still has a graph and nothing is raised. Seen on {WITH_PEFT}.",
        fix="PeftModel.from_pretrained(base, folder, is_trainable=True), and assert that something trains.",
        broken=_reload,
        fixed=lambda: _reload(is_trainable=True),
        seen=_trains_on_nothing,
        claimed=_not_in_file,
        check="S1",
    ),
    Pitfall(
        id="P08",
        title="The optimizer holds other tensors than the model",
        symptom="Every adapter gets a gradient, and the loss is flat to the last digit.",
        claim="the learning rate is too small (folklore)",
        verdict=f"A tiny rate still moves every tensor. An optimizer made before the adapters, or on a copy, holds "
        f"tensors that this model does not train; the canary cannot see it. Seen on {WITH_PEFT}.",
        fix="Make the optimizer last, and compare identities: every trainable tensor must be in some optimizer.",
        broken=lambda: optimizer_on("before the adapters"),
        fixed=lambda: optimizer_on("after"),
        seen=_trains_on_nothing,
        claimed=lambda: optimizer_on("after", lr=1e-5),
        check="S3",
    ),
    Pitfall(
        id="P14",
        title="The tokenizer that callbacks no longer receive",
        symptom="My callback stops with: 'NoneType' object has no attribute 'pad'.",
        claim="",
        verdict=f"Callbacks are handed `processing_class`; `tokenizer` is gone from their arguments, from the "
        f"trainer's attributes and from its constructor, so the usual fallback finds nothing. Seen on {WITH_PEFT}.",
        fix='Take kwargs["processing_class"], with brackets: a missing key should fail by its name.',
        broken=lambda: _callback("tokenizer"),
        fixed=lambda: _callback("processing_class"),
        seen=lambda facts: facts["raised"] is not None,
    ),
]
