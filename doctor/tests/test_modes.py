"""Modes: S11 and N16, with the runs that look like them."""

import pytest
import torch

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet
from tests.programs_a import Nano, adamw, lora, loss_of, reloaded, train


def gpt2(p=0.1):
    return lm("gpt2", resid_pdrop=p, embd_pdrop=p, attn_pdrop=p)


def from_pretrained():
    model = reloaded(gpt2())
    return train(model, adamw(model))


def attention_only():
    model = lm("llama", attention_dropout=0.1).eval()
    return train(model, adamw(model), how="gather")


def by_hand():
    model = Nano(dropout=0.2)
    model.eval()
    return train(model, adamw(model), steps=3)


def peft_around_eval():
    model = lora(reloaded(gpt2()))
    return train(model, adamw(model))


def lora_dropout_off():
    model = lora(lm(), lora_dropout=0.1).eval()
    return train(model, adamw(model))


def evaluated(model, back: bool):
    def between(step):
        if step == 1:
            model.eval()
            with torch.no_grad():
                loss_of(model, batches(1, seed=9)[0])
            if back:
                model.train()

    return train(model, adamw(model), steps=5, between=between)


def never_back():
    return evaluated(gpt2(), back=False)


def never_back_by_hand():
    return evaluated(Nano(dropout=0.1), back=False)


def evaluated_before_the_first_step():
    model, evaluations = gpt2().train(), []

    def loss(network, ids):
        if not evaluations:
            network.eval()
            with torch.no_grad():
                evaluations.append(loss_of(network, ids))
        return loss_of(network, ids)

    return train(model, adamw(model), loss=loss)


FAULTS = {
    from_pretrained: "S11",
    evaluated_before_the_first_step: "S11",
    attention_only: "S11",
    by_hand: "S11",
    peft_around_eval: "S11",
    lora_dropout_off: "S11",
    never_back: "N16",
    never_back_by_hand: "N16",
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda p: p.__name__)
def test_faults(program):
    report = quiet(program)
    assert_root(report, FAULTS[program])
    if FAULTS[program] == "S11":
        assert ("before the first step" in report.root.diagnosis) == (program is evaluated_before_the_first_step)


def trained():
    model = reloaded(gpt2()).train()
    return train(model, adamw(model))


def no_dropout():
    model = reloaded(lm())
    return train(model, adamw(model))


def frozen_part_in_eval():
    model = gpt2()
    model.transformer.h[0].eval().requires_grad_(False)
    return train(model, adamw(model))


def dropout_zero():
    model = reloaded(gpt2(0.0))
    return train(model, adamw(model))


def and_back():
    return evaluated(gpt2(), back=True)


def evaluation_with_gradients_on():
    model = Nano(dropout=0.1)

    def between(step):
        loss_of(model.eval(), batches(1, seed=9)[0])  # nobody calls backward on this
        model.train()

    return train(model, adamw(model), between=between)


def evaluated_at_the_end():
    model = lora(lm("llama", attention_dropout=0.1), lora_dropout=0.1)
    optimizer = adamw(model)
    with doctor.watch(say=False, steps=10) as report:
        for ids in batches(3):
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
        model.eval().requires_grad_(False)
        with torch.no_grad():
            loss_of(model, batches(1, seed=3)[0])
    return report


def flip_without_dropout():
    return evaluated(lm(), back=False)


@pytest.mark.parametrize(
    "program",
    [
        trained,
        no_dropout,
        frozen_part_in_eval,
        dropout_zero,
        and_back,
        evaluation_with_gradients_on,
        flip_without_dropout,
        evaluated_at_the_end,
    ],
    ids=lambda p: p.__name__,
)
def test_healthy(program):
    assert_healthy(quiet(program))


def test_modes_are_warnings():
    assert {f.severity for f in quiet(from_pretrained).findings if f.check == "S11"} == {doctor.WARN}
