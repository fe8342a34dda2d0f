"""Adapters and tables: S16, N20, N12, S9, N13, S14, S15, with the runs that look like them."""

import copy
import tempfile
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import train_doctor as doctor
from tests.bench import assert_healthy, assert_root, batches, lm, quiet
from tests.programs_a import HandLora, Nano, adamw, four_bit, hand_lora, lora, loss_of, train


def lora_of(model):
    return [p for n, p in model.named_parameters() if "lora_" in n]


def scale_zero():
    model = lora(lm(), lora_alpha=0)
    return train(model, adamw(model))


def scale_zero_by_hand():
    model = hand_lora(Nano(), alpha=0.0)
    return train(model, adamw(model))


def wrong_adapter_trains():
    model = lora(lm("llama"), modules_to_save=["lm_head"])
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules="all-linear"))
    for n, p in model.named_parameters():
        p.requires_grad_("second" in n or "modules_to_save.default" in n)
    return train(model, adamw(model))


def merged():
    model = lora(lm("llama"), modules_to_save=["lm_head"])
    model.merge_adapter()
    return train(model, adamw(model))


def switched_off():
    model, report = lora(lm()), None
    try:
        with doctor.watch(model, say=False) as report, model.disable_adapter():
            optimizer = torch.optim.AdamW(lora_of(model), lr=1e-3)
            loss_of(model, batches(1)[0]).backward()
            optimizer.step()
    except RuntimeError:
        pass
    return report


def keys_lost():
    with tempfile.TemporaryDirectory() as folder:
        lora(lm()).save_pretrained(folder)
        file = f"{folder}/adapter_model.safetensors"
        save_file(
            {k.replace("base_model.model.model", "base_model.model"): v for k, v in load_file(file).items()}, file
        )
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with doctor.watch(say=False, steps=3) as report:
                model = peft.PeftModel.from_pretrained(lm(), folder, is_trainable=True)
                optimizer = adamw(model)
                for ids in batches(3):
                    optimizer.zero_grad()
                    loss_of(model, ids).backward()
                    optimizer.step()
    return report


def keys_lost_by_hand():
    model = hand_lora(Nano())
    state = {f"module.{k}": v for k, v in model.state_dict().items() if "lora_" in k}
    with doctor.watch(say=False, steps=3) as report:
        model.load_state_dict(state, strict=False)
        optimizer = adamw(model)
        for ids in batches(3):
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
    return report


class Dropped(HandLora):
    """Its forward forgets the factors but for a term of zero."""

    def forward(self, x):
        return self.linear(x) + 0.0 * (x @ self.lora_A.T @ self.lora_B.T)


def dropped_branch():
    model = hand_lora(Nano(), Dropped)
    return train(model, adamw(model))


def momentum_after_freezing():
    model = Nano(tie=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, batches(1)[0]).backward()
    for n, p in model.named_parameters():
        p.requires_grad_("blocks.0" not in n)
    with doctor.watch(say=False, steps=4) as report:
        for ids in batches(4):
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = None
            loss_of(model, ids).backward()
            optimizer.step()
    return report


def to_empty():
    model = lm("llama", tie_word_embeddings=True)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model = model.to("meta").to_empty(device="cpu")  # what a start on the meta device ends with
    model.load_state_dict(state)
    model.model.rotary_emb.inv_freq = lm("llama").model.rotary_emb.inv_freq
    return train(model, adamw(model))


def both_ends_saved():
    model = lora(lm(tie_word_embeddings=True), modules_to_save=["embed_tokens", "lm_head"])
    return train(model, adamw(model))


def replaced_in_the_loop():
    model = Nano()

    def between(step):
        if step == 1:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    return train(model, adamw(model), steps=5, between=between)


def with_new(model, ids_from=256, count=8):
    def loss(m, ids):
        ids = ids.clone()
        ids[:, 3] = ids_from + 1
        ids[:, 7] = ids_from + count - 1
        return loss_of(m, ids)

    return loss


def new_tokens(declare: bool, **options):
    model = lm("llama")
    model.resize_token_embeddings(264)
    model = lora(model, **({"target_modules": ["q_proj", "v_proj"]} | options))
    return train(model, adamw(model), loss=with_new(model), **({"orig_vocab": 256} if declare else {}))


def new_tokens_declared():
    return new_tokens(True)


def new_tokens_by_their_mean():
    return new_tokens(False)


def rounded_frequencies():
    model = lm("llama", max_position_embeddings=512).float()
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16()
    optimizer = adamw(model)
    with doctor.watch(say=False, steps=2) as report:
        for ids in batches(2, rows=1, length=300):
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
    return report


FAULTS = {
    scale_zero: ("S16",),
    scale_zero_by_hand: ("S16",),
    wrong_adapter_trains: ("S16",),
    merged: ("S16",),
    switched_off: ("S16",),
    keys_lost: ("S16",),
    keys_lost_by_hand: ("S16",),
    dropped_branch: ("N20",),
    momentum_after_freezing: ("N12",),
    to_empty: ("S9",),
    both_ends_saved: ("S9",),
    replaced_in_the_loop: ("N13", "S3"),
    new_tokens_declared: ("S14",),
    new_tokens_by_their_mean: ("S14",),
    rounded_frequencies: ("S15",),
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda p: p.__name__)
def test_faults(program):
    assert_root(quiet(program), *FAULTS[program])


def two_adapters():
    model = lora(lm("llama"))
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules="all-linear"))
    model.set_adapter("second")
    return train(model, adamw(model))


def another_waits_while_the_first_has_learned():
    """The watch begins when the loop has gone on for a while: the loop trained the first, nobody before it."""
    model = lora(lm("llama"))
    model.add_adapter("later", peft.LoraConfig(r=4, target_modules="all-linear"))
    optimizer = adamw(model)
    for ids in batches(3):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    return train(model, optimizer, optimizer=optimizer)


def with_dropout():
    model = lora(lm(), lora_dropout=0.5)
    return train(model, adamw(model))


def by_hand():
    model = hand_lora(Nano(dropout=0.1))
    return train(model, adamw(model))


def dora_on_four_bits():
    model = lora(four_bit().requires_grad_(False))
    return train(model, adamw(model))


def rslora():
    model = lora(lm("gpt2"), use_rslora=True)
    return train(model, adamw(model), how="gather")


def loaded_right():
    with tempfile.TemporaryDirectory() as folder:
        lora(lm()).save_pretrained(folder)
        with doctor.watch(say=False, steps=3) as report:
            model = peft.PeftModel.from_pretrained(lm(), folder, is_trainable=True)
            optimizer = adamw(model)
            for ids in batches(3):
                optimizer.zero_grad()
                loss_of(model, ids).backward()
                optimizer.step()
    return report


def base_into_adapted():
    model = hand_lora(Nano())
    state = {k: v for k, v in model.state_dict().items() if "lora_" not in k}
    with doctor.watch(say=False, steps=3) as report:
        model.load_state_dict(state, strict=False)
        optimizer = adamw(model)
        for ids in batches(3):
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            optimizer.step()
    return report


def reference_with_adapter_off():
    model = lora(lm())

    def loss(m, ids):
        with torch.no_grad(), m.disable_adapter():
            m(ids)
        return loss_of(m, ids)

    return train(model, adamw(model), loss=loss)


def momentum_without_freezing():
    model = Nano()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def frozen_from_the_start():
    model = Nano(tie=False)
    model.blocks[0].requires_grad_(False)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))


def tied():
    model = lm("llama", tie_word_embeddings=True)
    return train(model, adamw(model))


def tied_with_lora_everywhere():
    model = lora(lm(tie_word_embeddings=True), target_modules=["q_proj", "embed_tokens"])
    return train(model, adamw(model))


def untied():
    model = lm("llama", tie_word_embeddings=False)
    return train(model, adamw(model))


def untied_by_hand():
    model = Nano(tie=False)
    return train(model, adamw(model))


def untied_with_a_config():
    model = Nano(tie=False)
    model.config = lm("gpt2").config  # whose default says tied
    return train(model, adamw(model))


def untied_on_purpose():
    model = lm("llama", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return train(model, adamw(model), untied=True)


def new_tokens_trained():
    return new_tokens(True, trainable_token_indices={"embed_tokens": list(range(256, 264))})


def old_tokens_only():
    model = lm("llama")
    model.resize_token_embeddings(264)
    model = lora(model)
    return train(model, adamw(model))


def frozen_on_the_way():
    model = Nano()
    return train(model, adamw(model), between=lambda step: model.blocks[0].requires_grad_(False))


def layers_take_turns():
    model = Nano()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def turn(step):
        for i, block in enumerate(model.blocks):
            block.requires_grad_(i == step % 2)

    return train(model, optimizer, steps=4, between=turn)


def merged_and_taken_out_again():
    model = lora(lm("llama"))

    def between(step):
        model.merge_adapter()
        model.unmerge_adapter()

    return train(model, adamw(model), between=between)


HEALTHY = [
    frozen_on_the_way,
    layers_take_turns,
    merged_and_taken_out_again,
    two_adapters,
    another_waits_while_the_first_has_learned,
    with_dropout,
    by_hand,
    dora_on_four_bits,
    rslora,
    loaded_right,
    base_into_adapted,
    reference_with_adapter_off,
    momentum_without_freezing,
    frozen_from_the_start,
    tied,
    tied_with_lora_everywhere,
    untied,
    untied_by_hand,
    untied_with_a_config,
    untied_on_purpose,
    new_tokens_trained,
    old_tokens_only,
]


@pytest.mark.parametrize("program", HEALTHY, ids=lambda p: p.__name__)
def test_healthy(program):
    assert_healthy(quiet(program))


def frozen_backbone(statistics: str):
    """A new head on a frozen body with statistics of the batch."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
    if statistics != "all train":
        body.requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(16, 3)).train()
    if statistics == "kept":
        body.eval()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for _ in range(6):
            x = torch.randn(16, 8) + 2
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()
    assert not report.faults, report.faults
    return report


def test_statistics_of_a_frozen_body_that_move():
    assert frozen_backbone("moving").root.check == "N12"
    assert frozen_backbone("kept").root is None
    assert frozen_backbone("all train").root is None


@pytest.mark.parametrize("how", ["average", "fast average", "decay", "drift", "copy"])
def test_frozen_weights_that_are_an_average(how):
    """Only what follows the student is left alone."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"student": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))})
    model["mean"] = copy.deepcopy(model["student"]).requires_grad_(False)
    optimizer = torch.optim.Adam(model["student"].parameters(), 1e-2)
    with doctor.watch(model, optimizer=optimizer, steps=6, say=False) as report:
        for _ in range(6):
            x = torch.randn(16, 8)
            loss = nn.functional.cross_entropy(model["student"](x), x[:, :3].argmax(1))
            loss = loss + nn.functional.mse_loss(model["student"](x), model["mean"](x + 0.1).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p, s in zip(model["mean"].parameters(), model["student"].parameters()):
                    if "average" in how:
                        p.lerp_(s, 0.02 if how == "average" else 0.5)
                    elif how == "copy":
                        p.copy_(s)
                    else:
                        p.mul_(0.99) if how == "decay" else p.add_(0.01)
    assert not report.faults, report.faults
    assert ("N12" in {f.check for f in report.findings}) == ("average" not in how), f"\n{report}"
