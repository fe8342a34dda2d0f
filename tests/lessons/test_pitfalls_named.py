"""Every pitfall of notebooks 01 to 04 that a check can see: the broken run is named by it, and a
fixed one is clean.

Where one watch can stand around the catalogue's own runs, test_pitfalls.py makes them under it
(diagnosis.NAMED). Where they train several models for comparison, or need more than their facts (a
step after the backward, the terms of the loss), the family's training function is watched here for
the broken variant and for the fixed one.

Footgun: the trained byte model is cached (`bench.trained`), and a watch sees the run that fills the
cache.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from diagnosis import NAMED, assert_healthy, assert_root, quiet
from torch.nn import functional as F

from lessons import pitfalls
from lessons.pitfalls import (
    autocast,
    bench,
    data,
    distillation,
    four_bit,
    gradient_flow,
    hf_trainer,
    interfaces,
    loop,
    loss_scaling,
    moe_muon,
    optimizers,
    precision,
    recomputation,
    rollback,
)
from loopdoctor import Report
from nblib import doctor, hf, models
from nblib.methods.muon import groups

CATALOGUE = {p.id: p for p in pitfalls.catalogue()}
Run = Callable[[], object]


@pytest.fixture(scope="module", autouse=True)
def cached_model():
    bench.trained()


def watched(run: Run, **declared) -> Report:
    """What the doctor says of a run, which may end in an exception."""

    def program() -> Report:
        with contextlib.suppress(RuntimeError, ValueError), bench.seeded():
            with doctor.watch(say=False, **({"steps": 10} | declared)) as report:
                run()
        return report

    return quiet(program)


def by_callback(kind: type, model, rows, **options) -> Report:
    """What the doctor says of a run of the Trainer."""
    callback = doctor.TrainerCallback(say=False)
    quiet(lambda: bench.run_trainer(kind, model, rows, callbacks=[callback], **options))
    return callback.report


def steps(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor], count: int = 5, **declared
) -> Report:
    """A plain loop on one loss."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad] or [torch.zeros(())], lr=1e-3
    )

    def run() -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    return watched(run, **declared)


# -------------------------------------------------------- runs that are watched in part, by pitfall
def on_a_loaded_adapter(**options) -> Report:
    model, _ = interfaces.loaded(**options)
    return watched(lambda: interfaces.train_on(model))


def on_walked_factors(order: str) -> Report:
    walk, attach, base = four_bit.walk, bench.attach, partial(bench.base, hidden=64)
    model = walk(attach(base())) if order == "attach first" else attach(walk(base()))
    return steps(model, lambda: bench.loss_of(model))


def on_a_trainable_head(*, reentrant: bool) -> Report:
    """The eager half of P16: the compiled one hides the fault, and nothing could be seen inside it
    anyway.
    """
    model = recomputation.lora(layers=2, tie_word_embeddings=False)
    model.get_output_embeddings().requires_grad_(True)
    recomputation.library_checkpointing(model, use_reentrant=reentrant)
    return steps(model, lambda: recomputation.whole_logits(model, recomputation.tokens()))


def on_two_terms(*, detached: bool) -> Report:
    def program() -> Report:
        with bench.seeded(), doctor.watch(say=False) as report:
            gradient_flow.two_terms(detached, steps=5, declare=report.terms)
        return report

    return quiet(program)


def on_bf16_rows(*, bf16: bool, lr: float) -> Report:
    model = bench.byte_model().to(torch.bfloat16 if bf16 else torch.float32)
    return watched(lambda: precision.trainer_logs(model, bf16=True, learning_rate=lr))


def with_a_scaler(scaler: torch.amp.GradScaler) -> Report:
    model, batches = bench.byte_model(), bench.batches("code")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(4):
            with torch.autocast("cpu", torch.float16):
                loss = bench.mean_loss(model, next(batches))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return watched(run)


def with_muon(rate: float, aux: float) -> Report:
    def make(model):
        return groups.optimizers(model, lr=rate, adamw_lr=aux, weight_decay=0.0, adjust="original")

    return watched(lambda: optimizers.from_scratch(make, steps=12))


def with_a_split(split: str) -> Report:
    def make(model):
        if split == "ndim == 2":
            return optimizers.by_shape(model, 3e-3, 3e-3, "match_rms_adamw")
        return groups.optimizers(
            model, lr=3e-3, adamw_lr=3e-3, weight_decay=0.0, adjust="match_rms_adamw"
        )

    return watched(lambda: optimizers.from_scratch(make, steps=12))


def on_a_teacher(**options) -> Report:
    return watched(lambda: autocast.downstream("mse(s, t)", **options).backward())


def on_ragged_rows(how: str, lengths: tuple[int, ...] = loop.RAGGED) -> Report:
    model, micro = bench.byte_model(heads=4), loop.micro_batches(lengths)
    tokens = [int(loop.losses.supervised(batch["labels"])) for batch in micro]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> None:
        for _ in range(4):
            for batch, mine in zip(micro, tokens):
                share = {
                    "undivided": 1,
                    "by_count": 1 / len(micro),
                    "by_tokens": mine / sum(tokens),
                }[how]
                (model(**batch).loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()

    return watched(run)


def on_a_nan_gradient(*, zero_row: bool) -> Report:
    model, step = rollback.nan_gradient(zero_row=zero_row)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return watched(lambda: (step(), optimizer.step()))


def on_a_trainer(kind: type, model) -> Report:
    return by_callback(kind, model, hf_trainer.Rows(), max_steps=2, learning_rate=0.0)


def on_ends(*, pad_is_eos: bool) -> Report:
    tokenizer, _ = data.collator(pad_is_eos=pad_is_eos)
    return watched(lambda: data.ends(pad_is_eos=pad_is_eos, steps=10), tokenizer=tokenizer)


def on_packed_rows(**inputs) -> Report:
    model, row = bench.byte_model(heads=4), bench.byte_rows(1, 32)
    return steps(model, lambda: model(row, labels=row, position_ids=data.RESTART, **inputs).loss)


def on_a_distilled_student(*, flatten: bool) -> Report:
    ids = bench.byte_rows(8, 48)
    student, teacher = bench.byte_model(heads=4), bench.byte_model(heads=4, seed=1)
    models.as_teacher(teacher)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            p = teacher(ids).logits.softmax(-1)
        log_q = student(ids).logits.log_softmax(-1)
        if flatten:
            p, log_q = p.flatten(0, 1), log_q.flatten(0, 1)
        return F.kl_div(log_q, p, reduction="batchmean")

    return steps(student, loss, teacher=teacher)


def on_micro_batches(kind: type) -> Report:
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=3)
    return by_callback(kind, hf_trainer.small(), hf_trainer.Rows(8), **options)


def on_experts(who: str) -> Report:
    """With the model's own loss: F11 needs to see the targets, and in chunks, as the loop has them,
    it does not.
    """
    model, rows = moe_muon.choosing(who), bench.stream("prose")[: 8 * 64].view(8, 64)
    return steps(model, lambda: model(input_ids=rows, labels=rows).loss)


# ---------------------------------------------------------------------------------------- the pairs
PAIRS: dict[str, tuple[Callable[[], Report], Callable[[], Report]]] = {
    "P07": (on_a_loaded_adapter, partial(on_a_loaded_adapter, is_trainable=True)),
    "P10": (
        partial(on_walked_factors, "attach first"),
        partial(on_walked_factors, "quantise first"),
    ),
    "P13": (partial(on_two_terms, detached=True), partial(on_two_terms, detached=False)),
    "P16": (
        partial(on_a_trainable_head, reentrant=True),
        partial(on_a_trainable_head, reentrant=False),
    ),
    "P24": (
        partial(watched, lambda: precision.fine_tune.__wrapped__("bf16")),
        partial(watched, lambda: precision.fine_tune.__wrapped__("fp32 + autocast")),
    ),
    "P25": (partial(on_bf16_rows, bf16=True, lr=1e-5), partial(on_bf16_rows, bf16=False, lr=1e-5)),
    "P28": (
        lambda: with_a_scaler(loss_scaling.absent_card()[0]),
        lambda: with_a_scaler(torch.amp.GradScaler("cpu")),
    ),
    "P30": (partial(with_muon, 3e-4, 9e-5), partial(with_muon, 0.02, 3e-3)),
    "P31": (partial(with_a_split, "ndim == 2"), partial(with_a_split, "by name")),
    "P33": (on_a_teacher, partial(on_a_teacher, clone=True)),
    "P34": (
        partial(
            watched, lambda: optimizers.scheduled("transformers", per_micro_batch=True, steps=8)
        ),
        partial(watched, lambda: optimizers.scheduled("nblib", steps=8)),
    ),
    "P36": (partial(on_ragged_rows, "by_count"), partial(on_ragged_rows, "by_tokens")),
    "P40": (partial(on_a_nan_gradient, zero_row=True), partial(on_a_nan_gradient, zero_row=False)),
    # its fixed run writes the nan into the log, and the model has it still
    "P41": (
        lambda: on_a_trainer(hf_trainer.tf.Trainer, hf_trainer.poisoned()),
        lambda: on_a_trainer(hf.Trainer, hf_trainer.small()),
    ),
    "P42": (
        partial(watched, lambda: data.shifted(2, steps=10)),
        partial(watched, lambda: data.shifted(1, steps=10)),
    ),
    "P43": (
        partial(on_packed_rows, attention_mask=torch.ones(1, 32, dtype=torch.long)),
        partial(on_packed_rows, use_cache=False),
    ),
    "P44": (
        partial(on_a_distilled_student, flatten=False),
        partial(on_a_distilled_student, flatten=True),
    ),
    "P46": (
        partial(on_micro_batches, hf_trainer.CustomLoss),
        partial(on_micro_batches, hf.Trainer),
    ),
    "P65": (partial(on_experts, "experts"), partial(on_experts, "tokens")),
    "P68": (
        partial(watched, lambda: distillation.by_heart("mean", steps=10)),
        partial(watched, lambda: distillation.by_heart("batchmean", steps=10)),
    ),
}


@pytest.mark.parametrize("number", PAIRS)
def test_the_broken_run_is_named(number):
    assert_root(PAIRS[number][0](), CATALOGUE[number].check)


@pytest.mark.parametrize("number", PAIRS)
def test_the_fixed_run_is_clean(number):
    assert_healthy(PAIRS[number][1]())


def test_every_pitfall_with_a_check_has_its_pair():
    assert {p.id for p in CATALOGUE.values() if p.check} == {*PAIRS, *NAMED}


# -------------------------------------------------------- further variants, and what only looks bad
VARIANTS = {
    "P08 on a copy": ("S3", partial(watched, lambda: interfaces.optimizer_on("on a copy"))),
    "P26 the filter's 0.0": (
        "N17",
        lambda: on_a_trainer(hf_trainer.tf.Trainer, hf_trainer.poisoned()),
    ),
    "P36 undivided": ("N6", partial(watched, lambda: loop.trained("undivided", "AdamW", steps=10))),
    "P42 never shifted": ("F3", partial(watched, lambda: data.shifted(0, steps=10))),
    "P42 padding is the end": ("F16", partial(on_ends, pad_is_eos=True)),
    "P43 with a cache": ("F12", partial(on_packed_rows, use_cache=True)),
}
HEALTHY = {
    "P20 gradients of the input": partial(
        watched, lambda: recomputation.kept_and_flops(4, "blocks")
    ),
    "P24 stochastic": partial(watched, lambda: precision.fine_tune.__wrapped__("bf16, stochastic")),
    "P24 kahan": partial(watched, lambda: precision.fine_tune.__wrapped__("bf16, kahan")),
    "P36 divided": partial(watched, lambda: loop.trained("divided", "AdamW", steps=10)),
    "P41 claimed": lambda: by_callback(
        hf_trainer.tf.Trainer,
        hf_trainer.checkpointed_then_adapted(hf_trainer.small()),
        hf_trainer.Rows(),
        max_steps=3,
    ),
    "P42 a padding of its own": partial(on_ends, pad_is_eos=False),
    "P65 room for the first that come": partial(on_experts, "tokens, while there is room"),
    "P46 two models one after the other": partial(
        watched, lambda: hf_trainer.loss_scale(hf.Trainer)
    ),
    "P46 mixtures one after the other": partial(
        watched, lambda: hf_trainer.auxiliary_scale(hf.Trainer)
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_named(name):
    check, program = VARIANTS[name]
    assert_root(program(), check)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_only_looks_bad_is_clean(name):
    assert_healthy(HEALTHY[name]())


def test_recomputation_that_appends_to_the_cache_is_seen_by_its_length():
    report = watched(CATALOGUE["P21"].broken)
    assert "held 16 positions after the forward, 32 after the backward" in report.root.observed
    # a note: it is only kept
    assert "F10" in {f.check for f in watched(CATALOGUE["P21"].claimed).findings}
