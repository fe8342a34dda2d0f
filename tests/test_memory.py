"""Predicted bytes against counted ones, peaks against known sizes."""

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers as tf
from conftest import native_bf16

from nblib import compiling, memory, models, runtime, text, train, wiring
from nblib.methods import ard, goose, lrc, moe
from nblib.methods.distill import objective, teacher_cache
from nblib.methods.muon import groups
from nbworkbook import cli

VOCABULARY = 8192


def config():
    config = models.tiny(64, hidden=256, layers=4).config
    config.vocab_size = VOCABULARY
    return config


def measure(config, *, rank=0, checkpointing=False, optimizer="adamw", **options) -> int:
    """The peak of two steps of a real model, adapters by peft."""
    import peft

    with memory.peak() as peak:
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        if rank:
            model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
        if checkpointing:
            compiling.checkpoint_blocks(model)
        updater = memory.OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
        ids = torch.randint(VOCABULARY, (4, 256))
        for _ in range(2):
            memory.training_step(model, updater, ids, **options)
    return peak.bytes


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(logits="full"),
        dict(checkpointing=True),
        dict(rank=8),
        dict(rank=8, checkpointing=True, logits="full"),
        pytest.param(dict(precision="bf16", optimizer="momentum"), marks=native_bf16),
        pytest.param(dict(precision="bf16", optimizer="sgd", logits="full"), marks=native_bf16),
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
@pytest.mark.slow
def test_the_prediction_is_within_a_percent_of_the_peak_of_real_steps(options):
    kinds = memory.estimate(config(), rows=4, length=256, **options)
    measured = measure(config(), **options)
    print(f"predicted {kinds['peak'] / 1e6:.1f} MB, measured {measured / 1e6:.1f}")
    assert abs(kinds["peak"] / measured - 1) < 0.01
    if not options.get("checkpointing"):  # else the peak also holds the block that is recomputed
        assert kinds["peak"] < sum(kinds.values()) - kinds["peak"]


def test_kinds_are_what_can_be_counted_by_hand():
    kinds = memory.estimate(config(), rows=2, length=64)
    count = models.count(models.tiny(VOCABULARY, hidden=256, layers=4))["all"]
    assert kinds["gradients"] == 4 * count and kinds["weights"] >= 4 * count
    assert 8 * count <= kinds["optimizer"] < 8 * count + 1000
    assert memory.estimate(config(), rows=2, length=64, optimizer="sgd")["optimizer"] == 0
    assert (
        memory.estimate(config(), rows=2, length=64, checkpointing=True)["activations"]
        < kinds["activations"] / 4
    )


def test_adapters_of_gpt2_are_counted():
    gpt2 = models.tiny(64, family="gpt2", hidden=64, layers=2).config
    # in + out of each
    sides = sum(sum(wiring.shape(m)) for m in wiring.select(tf.GPT2LMHeadModel(gpt2)).values())
    assert memory.estimate(gpt2, rows=1, length=8, rank=3)["gradients"] == 4 * 3 * sides > 0


def test_an_estimate_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    memory.estimate(config(), rows=1, length=8, rank=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_command_prints_every_kind(capsys):
    assert cli.main(["estimate", "--rows", "2", "--rank", "4", "--checkpointing"]) == 0
    out = capsys.readouterr().out
    assert all(
        kind in out
        for kind in ("weights", "optimizer", "gradients", "activations", "logits", "peak")
    )


def test_a_peak_counts_what_is_freed_again_once():
    there = torch.ones(2**20)
    with memory.peak() as peak:
        for _ in range(4):  # freed and made again: once, not four times
            held = [torch.ones(2**18) for _ in range(256)]
            del held
        there.mul_(2)[:7].add_(1)  # no new memory, and what was there before
    assert peak.bytes == 2**28 and peak.source == "counted tensors"


def test_a_peak_forgets_what_came_before_and_not_what_is_still_held():
    with memory.peak() as peak:
        held = torch.ones(1000)
        torch.ones(9000)
        peak.forget()
        torch.ones(500)
    assert peak.bytes == 4 * 1500 and len(held)


def test_a_peak_counts_the_backward_pass_and_the_optimizer():
    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with memory.peak() as peak:
        model(torch.zeros(1, 100)).sum().backward()
        optimizer.step()
    moments_and_gradient = 3 * 4 * 100 * 100
    assert moments_and_gradient <= peak.bytes < moments_and_gradient + 2000


def test_an_account_counts_storages_and_not_views():
    old = torch.ones(1000)
    with memory.Account() as account:
        new = torch.ones(1000)
        views = [new[:10], new.view(10, 100), old[5:]]
        assert account.live == 4000
        del new, views
    assert account.live == 0 and account.most == 4000


def test_an_account_follows_a_storage_that_is_resized():
    """As those of FSDP, which hold the weights of a block while it computes."""
    resize, before = torch.UntypedStorage.resize_, torch.ones(1000)
    with memory.Account() as account:
        new = torch.empty(500)
        before.untyped_storage().resize_(0)
        assert account.live == 2000 - 4000
        before.untyped_storage().resize_(8000)
        new.untyped_storage().resize_(1000)
        assert account.live == 1000 + 4000 and account.most == 2000 + 4000
        del new
        assert account.live == 4000
    assert torch.UntypedStorage.resize_ is resize


def test_an_account_counts_the_part_of_a_cut_tensor_that_is_here(tmp_path):
    """A DTensor says the size of the whole; here one process of two is played."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.ones(100, 10), mesh, [Shard(0)])
        assert part.shape == (200, 10)
        with memory.Account() as account:
            twice = part * 2
            assert twice.shape == (200, 10) and account.live == 4000
            part.add_(1)
        assert account.most == 4000
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------- every method, against the loop's own steps

WORDS, ROWS, LENGTH = 4096, 4, 64
STREAM = torch.randint(0, WORDS, (4000,), generator=torch.Generator().manual_seed(0))


def small(hidden: int = 128, **options):
    return models.tiny(WORDS, hidden=hidden, layers=4, length=LENGTH, **options).config


def batches() -> text.Batches:
    return text.Batches(STREAM, rows=ROWS, length=LENGTH)


def live(model):
    """A teacher of twice the width, made beside the student."""
    return objective.from_teacher(models.as_teacher(memory.build(small(256))), ce=0.5)


MIXTURE = dict(loss=lambda model: moe.loss(), optimizer=groups.optimizers)
CASES = {
    "dense fp32": dict(),
    "dense bf16": dict(precision="bf16"),
    "checkpointed": dict(checkpointing=True),
    "accumulated": dict(accumulate=3),
    "LoRA": dict(rank=8),
    "LRC": dict(attach=partial(lrc.attach, init="kaiming")),
    "ARD": dict(
        attach=partial(ard.attach, rank=8, alpha=8.0), loss=lambda model: ard.loss(model, beta=1e-3)
    ),
    "4 bits and LoRA": dict(four_bit=True, rank=8),
    "4 bits and LoRA, bf16, checkpointed": dict(
        four_bit=True, rank=8, precision="bf16", checkpointing=True
    ),
    "4 bits and ARD": dict(
        four_bit=True,
        attach=partial(ard.attach, rank=8, alpha=8.0),
        loss=lambda model: ard.loss(model, beta=1e-3),
    ),
    "distillation, live": dict(loss=live),
    "distillation, cached": dict(loss="cached"),
    "goose": dict(family="goose"),
    "Qwen3-MoE and Muon": dict(family="qwen3_moe", **MIXTURE),
    "Qwen3-MoE and Muon, bf16, checkpointed": dict(
        family="qwen3_moe", precision="bf16", checkpointing=True, accumulate=2, **MIXTURE
    ),
    "Mixtral and Muon": dict(family="mixtral", **MIXTURE),
}


def counted(
    config, data, *, rank=0, attach=None, four_bit=False, checkpointing=False, **options
) -> int:
    """Bytes alive at most in the third step of the loop, every storage since before the model
    counted.
    """
    import bitsandbytes
    import peft

    def packed(_, base):
        four = bitsandbytes.nn.Linear4bit(
            base.in_features, base.out_features, bias=False, quant_type="nf4"
        )
        four.weight = bitsandbytes.nn.Params4bit(
            base.weight.detach(), quant_type="nf4", module=four
        ).to("cpu")
        four.compute_dtype, four.compute_type_is_set = torch.float32, True
        return four

    precision, loss = options.get("precision", "fp32"), options.get("loss")
    machine = runtime.Machine(torch.device("cpu"), precision, "a test")
    with memory.Account() as account:
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        if four_bit:
            wiring.swap(model, packed, wiring.select(model))
        if rank:
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
            )
        if attach:
            attach(model)
        if checkpointing:
            compiling.checkpoint_blocks(model)
        kept = dict(loss=loss(model)) if loss else {}
        optimizers = options.get("optimizer", partial(train.adamw, lr=1e-3))(model)

        def again(record) -> None:
            if record["step"] < 3:
                account.forget()

        train.fit(
            model,
            data,
            optimizers,
            total=3,
            machine=machine,
            accumulate=options.get("accumulate", 1),
            **kept,
            on_step=again,
        )
    return account.most


def both(case: str, folder: Path) -> tuple[int, int]:
    """(estimated, counted)"""
    options = dict(CASES[case])
    family, data = options.pop("family", "qwen3"), batches()
    config = (
        goose.tiny(WORDS, hidden=128, layers=2, length=LENGTH).config
        if family == "goose"
        else small(family=family)
    )
    real = dict(options)
    if options.get("loss") == "cached":
        teacher = models.as_teacher(memory.build(small(256)))
        made = dict(steps=6, source=dict(teacher="t", tokenizer="t", data="d"), k=32)
        machine = runtime.Machine(torch.device("cpu"), "fp32", "a test")
        cache = teacher_cache.make(folder, teacher, batches(), machine=machine, **made)
        data = teacher_cache.Cached(batches(), cache)
        shapes = {
            name: (t.shape, t.dtype)
            for name, t in next(teacher_cache.Cached(batches(), cache)).items()
        }

        def answered(model):
            answers = {
                name: torch.empty(s, dtype=d)
                for name, (s, d) in shapes.items()
                if name in teacher_cache.KEYS
            }
            told = objective.from_teacher(cache, ce=0.5)
            return lambda model, batch: told(model, batch | answers)

        options["loss"], real["loss"] = (
            answered,
            lambda model: objective.from_teacher(cache, ce=0.5),
        )
    estimated = memory.estimate(config, rows=ROWS, length=LENGTH, **options)["peak"]
    return estimated, counted(config, data, **real)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_a_percent_of_a_counted_step_of_the_loop(case, tmp_path):
    estimated, real = both(case, tmp_path / "cache")
    print(f"{case:42s} {estimated / 1e6:8.2f} {real / 1e6:8.2f} MB {estimated / real:6.3f}")
    assert abs(estimated / real - 1) < 0.01, (estimated, real)


def test_rows_fill_the_card_and_the_batch_stays(capsys):
    cpu, sizes = runtime.Machine(torch.device("cpu"), "fp32", "a test"), []

    def need(rows: int) -> int:
        sizes.append(rows)
        return int(10e9 + rows * 1e9)

    ask = dict(rows=0, accumulate=8, default=8, machine=cpu)
    for gigabytes, expected in ((24, (8, 8)), (80, (32, 2)), (141, (64, 1)), (12.3, (1, 64))):
        sizes.clear()
        assert memory.fit(need, room=int(gigabytes * 1e9), **ask) == expected
        assert len(sizes) == len(set(sizes)) <= 4
    assert "rows 32 x 2: 42.0 of 80.0 GB by estimate" in capsys.readouterr().out
    assert memory.fit(need, room=int(80e9), beside=int(40e9), **ask) == (16, 4)
    with pytest.raises(
        ValueError,
        match="not even one row fits, it needs 11.0 GB by estimate, and 90% of the 10.0 GB",
    ):
        memory.fit(need, room=int(10e9), **ask)


def test_rows_that_are_given_and_a_cpu_need_no_estimate(capsys):
    def need(rows: int) -> int:
        raise AssertionError("estimated")

    cpu, card = (runtime.Machine(torch.device(kind), "fp32", "a test") for kind in ("cpu", "cuda"))
    assert memory.fit(need, rows=0, accumulate=4, default=8, machine=cpu) == (8, 4)
    assert memory.fit(need, rows=16, accumulate=32, default=8, machine=card) == (16, 32)
    assert not capsys.readouterr().out


def test_a_model_in_which_nothing_trains_is_refused():
    with pytest.raises(ValueError, match="nothing trains"):
        memory.estimate(small(), rows=1, length=8, four_bit=True)
