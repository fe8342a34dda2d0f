"""Small training programs for the doctor and its peers to examine: five are ill (wrong), four are
well (healthy).

Each is a model, an optimizer and a loss on a batch of token ids, as people write them; `train` is
the loop around it. The ill ones raise nothing, and in most of them the loss falls. The well ones do
something that looks alarming. `OF_KINDS` has programs without tokens: of each kind one with a fault
that is common there, and the same one mended.

Footgun: a program holds the state of its model. Make a new one for each examination.
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


def batches(count: int, *, rows: int = 4, length: int = 32) -> list[Tensor]:
    """Ids in which a token mostly follows from the one before it, so that there is something to
    learn.
    """
    generator = torch.Generator().manual_seed(0)
    follower = torch.randint(VOCABULARY, (VOCABULARY,), generator=generator)
    ids = torch.randint(VOCABULARY, (count, rows, length), generator=generator)
    for t in range(1, length):
        follows = torch.rand(count, rows, generator=generator) < 0.7
        ids[..., t] = torch.where(follows, follower[ids[..., t - 1]], ids[..., t])
    return list(ids)


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    """Features (32, 16) and a class of four, which follows from them."""
    generator = torch.Generator().manual_seed(0)
    rule = torch.randn(16, 4, generator=generator)
    features = torch.randn(count, 32, 16, generator=generator)
    return list(zip(features, (features @ rule).argmax(-1)))


class Program(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor], Tensor]  # of a batch: ids (rows, tokens), or features and targets
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    teacher: nn.Module | None = None
    batches: Callable[[int], list] = batches


def train(program: Program, steps: int) -> list[float]:
    """Return the loop, and its losses."""
    losses = []
    for batch in program.batches(steps):
        program.optimizer.zero_grad()
        loss = program.loss(batch)
        loss.backward()
        program.optimizer.step()
        if program.schedule is not None:
            program.schedule.step()
        losses.append(float(loss.detach()))
    return losses


# ---------------------------------------------------------------------------------------------- ill
def adapters_cut_off() -> Program:
    """LoRA in blocks that are checkpointed the reentrant way, and a head that trains above them."""
    model = _lora(modules_to_save=["lm_head"])
    # what peft and transformers do for you when checkpointing is enabled through them is missing
    # here
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": True})
    model.get_base_model().disable_input_require_grads()
    return _next_token(model, lr=1e-2)


def labels_shifted_twice() -> Program:
    """Return inputs and targets cut by hand, as in a loop of one's own, and given to a model that
    shifts its labels itself.
    """
    model = models.tiny(VOCABULARY, hidden=64, layers=2)

    def loss(ids: Tensor) -> Tensor:
        x, y = ids[:, :-1], ids[:, 1:]
        return model(input_ids=x, labels=y).loss

    return Program(model, _adamw(model), loss)


def updates_lost_in_bf16(lr: float = 1e-5) -> Program:
    """Return the weights themselves in bf16, and the small rate of a fine-tuning."""
    return _next_token(models.tiny(VOCABULARY, hidden=64, layers=2).bfloat16(), lr=lr)


def teacher_in_train_mode() -> Program:
    """Distillation from a teacher whose dropout is on: its answers differ from call to call."""
    return _distilled(training=True)


def optimizer_made_too_early() -> Program:
    """Return the head is replaced after the optimizer was made, which still holds the old one."""
    model = models.tiny(VOCABULARY, hidden=64, layers=2, tie_word_embeddings=False)
    optimizer = _adamw(model)
    model.lm_head = nn.Linear(64, VOCABULARY, bias=False)
    return Program(model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss)


def a_weight_overflowed() -> Program:
    """Nothing is wrong with the program, but one weight is infinite."""
    program = warm_up_from_zero()
    with torch.no_grad():
        program.model.model.norm.weight[0] = torch.inf
    return program


# --------------------------------------------------------------------------------------------- well
def warm_up_from_zero() -> Program:
    """Return the first step has a rate of exactly zero and moves nothing."""
    program = _next_token(models.tiny(VOCABULARY, hidden=64, layers=2))
    schedule = torch.optim.lr_scheduler.LambdaLR(program.optimizer, lambda step: min(1.0, step / 4))
    return program._replace(schedule=schedule)


def second_factor_zero() -> Program:
    """Return a fresh LoRA: B is zero, so the first step leaves every A without a gradient."""
    return _next_token(_lora(), lr=1e-2)


def reference_without_gradients() -> Program:
    """Return a frozen reference, checkpointed too and called under no_grad: torch warns that
    gradients will be None.
    """
    program = _distilled(training=False)
    # transformers checkpoints in train mode only; this teacher has no dropout
    program.teacher.train()
    program.teacher.activation_checkpointing_enable({"use_reentrant": True})
    return program


def experts_not_yet_asked() -> Program:
    """Return a mixture in which some experts get no token of these small batches, and so no
    gradient.
    """
    return _next_token(
        models.tiny(VOCABULARY, family="qwen3_moe", hidden=32, layers=2, num_experts=32)
    )


# ---------------------------------------------------------- without tokens: a fault, and without it
def classification(mended: bool) -> Program:
    """Return the model ends in a softmax, and the loss takes logits: it can never be sure, and
    learns slowly.
    """
    last = [] if mended else [nn.Softmax(-1)]
    model = nn.Sequential(*_layers(4), *last)
    return _of_pairs(model, lambda x, y: F.cross_entropy(model(x), y))


def regression(mended: bool) -> Program:
    """(32, 1) against (32,): every answer is compared with every target, and the model learns their
    mean.
    """
    model = nn.Sequential(*_layers(1))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        answer = model(x)
        return F.mse_loss(answer[:, 0] if mended else answer, y.float())

    return _of_pairs(model, loss)


def several_labels(mended: bool) -> Program:
    """Return a sigmoid in the model, and another one in the loss."""
    last = [] if mended else [nn.Sigmoid()]
    model = nn.Sequential(*_layers(4), *last)
    return _of_pairs(
        model, lambda x, y: F.binary_cross_entropy_with_logits(model(x), F.one_hot(y, 4).float())
    )


def fine_tuning(mended: bool) -> Program:
    """Return the first layer shall be frozen. The flag is misspelt, and Python takes any name."""
    model = nn.Sequential(*_layers(4))
    for p in model[0].parameters():
        setattr(p, "requires_grad" if mended else "require_grad", False)
    return _of_pairs(model, lambda x, y: F.cross_entropy(model(x), y))


def branches(mended: bool) -> Program:
    """Layers in a plain list: parameters() does not know them, and they stay as they began."""

    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            parts = [nn.Linear(16, 32) for _ in range(3)]
            self.parts = nn.ModuleList(parts) if mended else parts
            self.head = nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(sum(part(x).relu() for part in self.parts))

    model = Branched()
    return _of_pairs(model, lambda x, y: F.cross_entropy(model(x), y))


def distillation(mended: bool) -> Program:
    """kl_div wants log-probabilities of the student and is given probabilities."""
    student, teacher = (
        nn.Sequential(*_layers(4)),
        nn.Sequential(*_layers(4)).requires_grad_(False).eval(),
    )

    def loss(x: Tensor, y: Tensor) -> Tensor:
        own, target = student(x), teacher(x).softmax(-1)
        return F.kl_div(
            own.log_softmax(-1) if mended else own.softmax(-1), target, reduction="batchmean"
        )

    return _of_pairs(student, loss)._replace(teacher=teacher)


OF_KINDS: dict[str, Callable[[bool], Program]] = {
    kind.__name__.replace("_", " "): kind
    for kind in (classification, regression, several_labels, fine_tuning, branches, distillation)
}


def _by_name(*programs: Callable[[], Program]) -> dict[str, Callable[[], Program]]:
    return {program.__name__.replace("_", " "): program for program in programs}


ILL = _by_name(
    adapters_cut_off,
    labels_shifted_twice,
    updates_lost_in_bf16,
    teacher_in_train_mode,
    optimizer_made_too_early,
)
WELL = _by_name(
    warm_up_from_zero, second_factor_zero, reference_without_gradients, experts_not_yet_asked
)


# -------------------------------------------------------------------------------------------- parts
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
        return peft.get_peft_model(
            base, peft.LoraConfig(r=4, target_modules=targets, **options)
        ).train()


def _distilled(*, training: bool) -> Program:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1 if training else 0.0)
    teacher = models.tiny(VOCABULARY, family="gpt2", hidden=64, layers=2, seed=1, **dropout)
    teacher.requires_grad_(False).train(training)
    student = models.tiny(VOCABULARY, hidden=32, layers=2)

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(input_ids=ids).logits.log_softmax(-1)
        out = student(input_ids=ids, labels=ids)
        kd = (
            F.kl_div(out.logits.log_softmax(-1), target, log_target=True, reduction="none")
            .sum(-1)
            .mean()
        )
        return 0.5 * out.loss + 0.5 * kd

    return Program(student, _adamw(student), loss, teacher=teacher)


def _layers(out: int) -> list[nn.Module]:
    return [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, out)]


def _of_pairs(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Program:
    return Program(model, _adamw(model), lambda batch: loss(*batch), batches=pairs)
