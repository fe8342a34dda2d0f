"""Wiring faults and the healthy set-ups that look like them: S1 to S4, S6, S8, S17."""

import copy

import peft
import pytest
import torch
from torch import nn

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet
from tests.programs_a import Nano, adamw, four_bit, hand_lora, lora, loss_of, reloaded, train


def matrices(model):
    return [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "head" not in n]


def rest(model):
    mine = {id(p) for p in matrices(model)}
    return [p for p in model.parameters() if id(p) not in mine]


def groups_of_nothing():
    model = lora(lm()).requires_grad_(True)
    model.requires_grad_(False)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": d} for d in (0.0, 0.1)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for n, p in model.named_parameters():
        p.requires_grad_("lora_" in n)
    return train(model, optimizer)


def empty_list():
    model = lm().requires_grad_(False)
    report = None
    try:
        with doctor.watch(model, say=False) as report:
            ps = [p for n, p in model.named_parameters() if "adapter" in n]
            optimizer = torch.optim.AdamW(ps)
            optimizer.step()
    except ValueError:
        pass
    return report


def empty_but_trainable():
    model, report = lm("gpt2"), None
    try:
        with doctor.watch(model, say=False) as report:
            ps = model.parameters()
            print(f"{sum(p.numel() for p in ps):,} parameters", end="\r")  # this uses the generator up
            torch.optim.AdamW(ps)
    except ValueError:
        pass
    return report


def declared_empty():
    model = lora(lm("llama"))
    optimizer = torch.optim.SGD([{"params": []}, {"params": []}], lr=0.1)
    return train(model, optimizer, optimizer=optimizer, model=model, how="gather")


def before_peft(family="qwen3", make=adamw):
    model = lm(family)
    optimizer = make(model)
    return train(lora(model), optimizer)


def before_hand_lora():
    model = Nano()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(hand_lora(model), optimizer)


def on_a_deepcopy():
    model = lm("llama")
    return train(copy.deepcopy(model), adamw(model), how="cross_entropy")


def lora_on_a_deepcopy():
    model = lora(lm("llama"))
    return train(copy.deepcopy(model), adamw(model))


def loaded_again():
    model = lm("gpt2")
    optimizer = adamw(model)
    return train(reloaded(model).train(), optimizer)


def assigned_weights():
    model = Nano(tie=False)
    optimizer = adamw(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return train(model, optimizer, steps=3)


def resized_after(family="llama"):
    model = lm(family, tie_word_embeddings=False)
    optimizer = adamw(model)
    model.resize_token_embeddings(264, mean_resizing=False)
    return train(model, optimizer)


def muon_alone():
    model = lm()
    return train(model, torch.optim.Muon(matrices(model), lr=0.02))


def forgotten_group():
    model = lm("llama")
    return train(model, adamw(p for n, p in model.named_parameters() if "mlp" not in n))


def new_head_after():
    model = Nano(tie=False)
    optimizer = adamw(model)
    model.lm_head = nn.Linear(32, 256)
    return train(model, optimizer)


def two_own_the_same():
    model = lm()
    return train(model, [adamw(model), torch.optim.SGD(matrices(model), lr=0.01)])


def stepped_twice():
    model = Nano()
    optimizer = adamw(model)
    return train(model, optimizer, between=lambda step: optimizer.step())


def four_bits_bare():
    model = four_bit()
    return train(model, adamw(model))


def four_bits_frozen():
    model, report = four_bit().requires_grad_(False), None
    try:
        with doctor.watch(model, say=False) as report:
            loss_of(model, batches(1)[0]).backward()
    except RuntimeError:
        pass
    return report


def prepared_last():
    model = peft.prepare_model_for_kbit_training(lora(four_bit()), use_gradient_checkpointing=False)
    optimizer, report = torch.optim.AdamW(model.parameters(), lr=1e-3), None
    try:
        report = train(model, optimizer, model=model)
    except RuntimeError:
        with doctor.watch(model, say=False) as report:
            pass
    return report


def frozen_but_hooked():
    """Gradients flow to the embedding's output, so backward is content; nothing is told to the doctor."""
    model = lora(lm("llama")).requires_grad_(False)
    model.enable_input_require_grads()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def frozen_untold():
    model, report = Nano().requires_grad_(False), None
    try:
        with doctor.watch(say=False) as report:
            loss_of(model, batches(1)[0]).backward()
    except RuntimeError:
        pass
    return report


def born_in_inference():
    with torch.inference_mode():
        model = Nano()
    report = None
    try:
        with doctor.watch(model, say=False) as report:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss_of(model, batches(1)[0]).backward()
            optimizer.step()
    except RuntimeError:
        pass
    return report


FAULTS = {
    groups_of_nothing: ("S2",),
    empty_list: ("S1", "S2"),
    empty_but_trainable: ("S2",),
    declared_empty: ("S2",),
    before_peft: ("S3",),
    before_hand_lora: ("S3",),
    on_a_deepcopy: ("S3",),
    lora_on_a_deepcopy: ("S3",),
    loaded_again: ("S3",),
    assigned_weights: ("S3",),
    resized_after: ("S3",),
    muon_alone: ("S3",),
    forgotten_group: ("S3",),
    new_head_after: ("S3",),
    two_own_the_same: ("S17",),
    stepped_twice: ("S17",),
    four_bits_bare: ("S8",),
    four_bits_frozen: ("S8",),
    prepared_last: ("S1",),
    born_in_inference: ("S6",),
    frozen_but_hooked: ("S1",),
    frozen_untold: ("S1",),
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda p: p.__name__)
def test_faults(program):
    assert_root(quiet(program), *FAULTS[program])


@pytest.mark.parametrize(
    "program, words",
    [
        (before_peft, "before the adapter"),
        (before_hand_lora, "before the adapter"),
        (on_a_deepcopy, "another instance"),
        (lora_on_a_deepcopy, "another instance"),
        (loaded_again, "another instance"),
        (assigned_weights, "another instance"),
        (resized_after, "resize_token_embeddings"),
        (lambda: resized_after("gpt2"), "resize_token_embeddings"),
        (muon_alone, "Muon alone"),
    ],
)
def test_the_reason_is_named(program, words):
    root = quiet(program).root
    assert root.check == "S3" and root.severity == doctor.ERROR and words in root.diagnosis


def after_peft():
    model = lora(lm())
    return train(model, adamw(model))


def after_hand_lora():
    model = hand_lora(Nano())
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def resized_before():
    model = lm("llama", tie_word_embeddings=False)
    model.resize_token_embeddings(264, mean_resizing=False)
    return train(model, adamw(model))


def muon_and_adamw():
    model = lm()
    return train(model, [torch.optim.Muon(matrices(model), lr=0.02), adamw(rest(model))])


def one_empty_beside():
    model = lm("gpt2")
    return train(model, [torch.optim.SGD([{"params": []}], lr=0.1), adamw(model)])


def temperature_beside():
    model, scale = lm("llama"), nn.Parameter(torch.zeros(()))
    return train(model, adamw(model, [scale]), loss=lambda m, ids: loss_of(m, ids) * (1 + scale**2))


def frozen_probe():
    model = lm("gpt2").requires_grad_(False)
    for norm in (model.transformer.ln_f, model.transformer.h[0].ln_1):
        norm.requires_grad_(True)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def fused_in_backward():
    model = Nano()
    mine = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def update(p):
        mine[p].step()
        mine[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    with doctor.watch(say=False, steps=4) as report:
        for ids in batches(4):
            loss_of(model, ids).backward()
    return report


def masters_in_fp32():
    model = Nano(tie=False)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    with doctor.watch(say=False, steps=4) as report:
        for ids in batches(4):
            loss_of(model, ids).backward()
            for m, p in zip(masters, model.parameters()):
                m.grad, p.grad = p.grad, None
            optimizer.step()
            with torch.no_grad():
                for m, p in zip(masters, model.parameters()):
                    p.copy_(m)
    return report


def four_bits_with_lora():
    model = lora(peft.prepare_model_for_kbit_training(four_bit(), use_gradient_checkpointing=False))
    return train(model, adamw(model))


def head_on_four_bits():
    model = four_bit().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return train(model, adamw(model))


def soft_prompt():
    model, soft = lm("llama").requires_grad_(False), nn.Parameter(torch.randn(1, 4, 64) * 0.02)
    optimizer = torch.optim.AdamW([soft], lr=1e-2)
    with doctor.watch(say=False, steps=3) as report:
        for ids in batches(3):
            x = torch.cat([soft.expand(len(ids), -1, -1), model.get_input_embeddings()(ids)], 1)
            logits = model(inputs_embeds=x).logits[:, 4:-1]
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    return report


def alternating_optimizers():
    model = Nano(tie=False)
    halves = [[p for n, p in model.named_parameters() if ("blocks.0" in n) == first] for first in (True, False)]
    optimizers = [torch.optim.AdamW(half, lr=1e-3) for half in halves]
    with doctor.watch(say=False, steps=4) as report:
        for step, ids in enumerate(batches(4)):
            model.zero_grad()
            loss_of(model, ids).backward()
            optimizers[step % 2].step()
    return report


def unused_parameters():
    model = Nano()
    model.spare = nn.Linear(32, 32)  # in no forward: gets no gradient
    return train(model, adamw(p for n, p in model.named_parameters() if "spare" not in n))


def two_losses_two_optimizers():
    model = Nano()
    one, two = adamw(model), torch.optim.SGD(model.parameters(), lr=0.01)
    with doctor.watch(say=False, steps=6) as report:
        for ids in batches(3):
            for o in (one, two):
                o.zero_grad()
                loss_of(model, ids).backward()
                o.step()
    return report


HEALTHY = [
    after_peft,
    after_hand_lora,
    resized_before,
    muon_and_adamw,
    one_empty_beside,
    temperature_beside,
    frozen_probe,
    fused_in_backward,
    masters_in_fp32,
    four_bits_with_lora,
    head_on_four_bits,
    soft_prompt,
    alternating_optimizers,
    unused_parameters,
    two_losses_two_optimizers,
]


@pytest.mark.parametrize("program", HEALTHY, ids=lambda p: p.__name__)
def test_healthy(program):
    assert_healthy(quiet(program))


def test_a_probe_on_a_backbone_that_was_not_frozen_is_no_error():
    def program():
        model = lm("llama")
        return train(model, adamw(model.lm_head))

    assert_healthy(quiet(program), warnings_allowed=("S3",))  # wasteful, and sometimes meant
