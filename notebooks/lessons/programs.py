"""Small training programs, five ill and four well, for the doctor and its peers to look at.

Each is a model, an optimizer and a loss on a batch of token ids, as people write them; `train` is the loop around it.
The ill ones raise nothing, and in most of them the loss falls. The well ones do something that looks alarming.

Footgun: a program holds the state of its model. Make a new one for each look.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import peft
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nblib import models

VOCABULARY = 256


class Program(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor], Tensor]  # of a batch of ids (rows, tokens)
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    teacher: nn.Module | None = None


def batches(count: int, *, rows: int = 4, length: int = 32) -> list[Tensor]:
    """Ids in which a token mostly follows from the one before it, so that there is something to learn."""
    make = torch.Generator().manual_seed(0)
    follower = torch.randint(VOCABULARY, (VOCABULARY,), generator=make)
    made = torch.randint(VOCABULARY, (count, rows, length), generator=make)
    for t in range(1, length):
        known = torch.rand(count, rows, generator=make) < 0.7
        made[..., t] = torch.where(known, follower[made[..., t - 1]], made[..., t])
    return list(made)


def train(p: Program, steps: int) -> list[float]:
    """The loop, and its losses."""
    losses = []
    for ids in batches(steps):
        p.optimizer.zero_grad()
        loss = p.loss(ids)
        loss.backward()
        p.optimizer.step()
        if p.schedule is not None:
            p.schedule.step()
        losses.append(float(loss.detach()))
    return losses


# ------------------------------------------------------------------------------------------------------------- ill
def adapters_cut_off() -> Program:
    """LoRA in blocks that are checkpointed the reentrant way, and a head that trains above them."""
    model = _lora(modules_to_save=["lm_head"])
    # what peft and transformers do for you when checkpointing is enabled through them is missing here
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": True})
    model.get_base_model().disable_input_require_grads()
    return _next_token(model, lr=1e-2)


def labels_shifted_twice() -> Program:
    """Inputs and targets cut by hand, as in a loop of one's own, and given to a model that shifts its labels itself."""
    model = models.tiny(VOCABULARY, hidden=64, layers=2)

    def loss(ids: Tensor) -> Tensor:
        x, y = ids[:, :-1], ids[:, 1:]
        return model(input_ids=x, labels=y).loss

    return Program(model, _adamw(model), loss)


def updates_lost_in_bf16(lr: float = 1e-5) -> Program:
    """The weights themselves in bf16, and the small rate of a fine-tuning."""
    return _next_token(models.tiny(VOCABULARY, hidden=64, layers=2).bfloat16(), lr=lr)


def teacher_in_train_mode() -> Program:
    """Distillation from a teacher whose dropout is on: its answers differ from call to call."""
    return _distilled(training=True)


def optimizer_made_too_early() -> Program:
    """The head is exchanged after the optimizer was made, which goes on holding the old one."""
    model = models.tiny(VOCABULARY, hidden=64, layers=2, tie_word_embeddings=False)
    optimizer = _adamw(model)
    model.lm_head = nn.Linear(64, VOCABULARY, bias=False)
    return Program(model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss)


# ------------------------------------------------------------------------------------------------------------ well
def warm_up_from_zero() -> Program:
    """The first step has a rate of exactly zero and moves nothing."""
    p = _next_token(models.tiny(VOCABULARY, hidden=64, layers=2))
    return p._replace(schedule=torch.optim.lr_scheduler.LambdaLR(p.optimizer, lambda step: min(1.0, step / 4)))


def second_factor_zero() -> Program:
    """A fresh LoRA: B is zero, so the first step leaves every A without a gradient."""
    return _next_token(_lora(), lr=1e-2)


def reference_without_gradients() -> Program:
    """A frozen reference that is checkpointed too and asked under no_grad: torch warns that gradients will be None."""
    p = _distilled(training=False)
    p.teacher.train()  # transformers checkpoints in train mode only; nothing in this teacher answers by chance
    p.teacher.activation_checkpointing_enable({"use_reentrant": True})
    return p


def experts_not_yet_asked() -> Program:
    """A mixture in which some experts get no token of these small batches, and so no gradient."""
    return _next_token(models.tiny(VOCABULARY, family="qwen3_moe", hidden=32, layers=2, num_experts=32))


ILL = {
    made.__name__.replace("_", " "): made
    for made in (
        adapters_cut_off,
        labels_shifted_twice,
        updates_lost_in_bf16,
        teacher_in_train_mode,
        optimizer_made_too_early,
    )
}
WELL = {
    made.__name__.replace("_", " "): made
    for made in (warm_up_from_zero, second_factor_zero, reference_without_gradients, experts_not_yet_asked)
}


# ----------------------------------------------------------------------------------------------------------- parts
def _adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def _next_token(model: nn.Module, lr: float = 1e-3) -> Program:
    return Program(model, _adamw(model, lr), lambda ids: model(input_ids=ids, labels=ids).loss)


def _lora(**options) -> nn.Module:
    base = models.tiny(VOCABULARY, hidden=64, layers=2, tie_word_embeddings=False)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets, **options)).train()


def _distilled(*, training: bool) -> Program:
    dropout = (
        dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        if training
        else dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    )
    teacher = models.tiny(VOCABULARY, family="gpt2", hidden=64, layers=2, seed=1, **dropout)
    teacher.requires_grad_(False).train(training)
    student = models.tiny(VOCABULARY, hidden=32, layers=2)

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(input_ids=ids).logits.log_softmax(-1)
        out = student(input_ids=ids, labels=ids)
        kd = F.kl_div(out.logits.log_softmax(-1), goal, log_target=True, reduction="none").sum(-1).mean()
        return 0.5 * out.loss + 0.5 * kd

    return Program(student, _adamw(student), loss, teacher=teacher)
