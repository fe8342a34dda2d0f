"""The Trainer with the loop's losses: its terms in the log, its evaluation, resume of experts and
of adapters.
"""

import copy
import json

import pytest
import torch
import transformers as tf
from ard_bench import adapted, noise_by_content
from conftest import FP32

from lessons.pitfalls import bench
from nblib import hf, losses, models, text, train, wiring
from nblib.methods import ard, moe
from nblib.methods.ard import adapter_files
from nblib.methods.muon import groups


@pytest.fixture
def mixture():
    return models.tiny(256, family="qwen3_moe", hidden=32, layers=4, heads=2)


class Rows(torch.utils.data.Dataset):
    ids = torch.randint(256, (16, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        labels = self.ids[i].clone()
        labels[: (i % 3) * 6] = losses.IGNORED  # micro-batches of different weight
        return {"input_ids": self.ids[i], "labels": labels}


def steps_of(trainer) -> list[dict]:
    return [line for line in trainer.state.log_history if "grad_norm" in line]


def by_trainer(model, folder, *, resume=None, steps=4, loss=None, **options):
    with bench.seeded(), bench.silent():
        args = bench.arguments(
            str(folder), max_steps=steps, gradient_accumulation_steps=2, **options
        )
        trainer = hf.Trainer(
            model=model,
            args=args,
            train_dataset=Rows(),
            eval_dataset=Rows(),
            loss=loss,
            make_optimizer=lambda m: groups.Together(groups.optimizers(m, lr=0.02, adamw_lr=3e-3)),
        )
        trainer.train(resume_from_checkpoint=resume)
        eval_loss = trainer.evaluate()["eval_loss"]
    return trainer, steps_of(trainer), eval_loss


def routed_loss():
    return moe.loss(balance_weight=0.1, z_weight=0.01, language=hf.causal_lm)


# ------------------------------------------------------------------ a mixture


def test_the_trainer_has_the_terms_and_evaluation_has_not(mixture, tmp_path):
    trainer, log, eval_loss = by_trainer(mixture, tmp_path, loss=routed_loss())
    for line in log:
        assert line["loss"] == pytest.approx(
            line["ce_loss"] + line["balance_loss"] + line["z_loss"], rel=1e-3
        )
        assert 0.09 < line["balance_loss"] < 0.2  # 0.1 x about 1, whatever the micro-batches
    sums, tokens = 0.0, 0
    for i in range(16):
        item = {name: t[None] for name, t in Rows()[i].items()}
        sums += float(losses.causal_lm(trainer.model.eval(), item)["ce"])
        tokens += int(losses.supervised(item["labels"]))
    # transformers averages evaluation batches of 8 rows by rows, so equal up to the batches'
    # different weights
    assert eval_loss == pytest.approx(sums / tokens, rel=2e-2)


def test_a_line_is_the_mean_of_the_steps_since_the_last_one(mixture, tmp_path):
    _, single, _ = by_trainer(copy.deepcopy(mixture), tmp_path, loss=routed_loss())
    _, double, _ = by_trainer(mixture, tmp_path, loss=routed_loss(), logging_steps=2)
    for name in ("loss", "ce_loss", "balance_loss", "z_loss"):
        means = [(a[name] + b[name]) / 2 for a, b in zip(single[::2], single[1::2])]
        assert [line[name] for line in double] == pytest.approx(means, rel=1e-5)


def test_without_a_loss_of_its_own_the_cross_entropy_is_the_term(tiny, tmp_path):
    _, log, _ = by_trainer(tiny, tmp_path)
    assert all(line["loss"] == pytest.approx(line["ce_loss"], rel=1e-6) for line in log)


def test_the_trainers_resume_brings_the_experts_back(mixture, tmp_path):
    other = copy.deepcopy(mixture)
    options = dict(loss=routed_loss(), save_strategy="steps", save_steps=2)
    straight, log, _ = by_trainer(mixture, tmp_path / "a", **options)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    resumed, rest, _ = by_trainer(
        other, tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-2"), **options
    )
    for (name, p), q in zip(straight.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(p, q), name
    for kind in ("loss", "ce_loss", "balance_loss"):
        assert [line[kind] for line in rest][-2:] == [line[kind] for line in log][-2:]


def test_a_models_own_auxiliary_loss_does_not_count_beside_ours(mixture, tmp_path):
    """With `output_router_logits` the model adds a balance of its own to its loss; a loss that is
    given replaces it.
    """
    plain, log, _ = by_trainer(copy.deepcopy(mixture), tmp_path, loss=routed_loss())
    mixture.config.output_router_logits = True
    other, again, _ = by_trainer(mixture, tmp_path, loss=routed_loss())
    assert "auxiliary_loss" not in again[0] and [a["loss"] for a in again] == [
        a["loss"] for a in log
    ]
    for (name, p), q in zip(plain.model.named_parameters(), other.model.parameters()):
        assert torch.equal(p, q), name
    _, without, _ = by_trainer(mixture, tmp_path, steps=1)
    assert without[0]["loss"] == pytest.approx(
        without[0]["ce_loss"] + without[0]["auxiliary_loss"], rel=1e-6
    )
    assert without[0]["auxiliary_loss"] > 0


# ------------------------------------------------------------------ adapters


def arguments(folder, **options) -> tf.TrainingArguments:
    plain = dict(max_steps=2, learning_rate=1e-2, logging_steps=1, save_strategy="no")
    quiet = dict(report_to=[], use_cpu=True, disable_tqdm=True)
    return tf.TrainingArguments(output_dir=str(folder), **(plain | quiet | options))


def items(stream, count: int = 32) -> list[dict]:
    return [{"input_ids": r, "labels": r} for r in text.fixed_rows(stream, length=32, limit=count)]


def test_the_trainer_takes_a_four_bit_base(stream, tmp_path):
    models.tiny(256, hidden=64, layers=2).save_pretrained(tmp_path)
    model = ard.attach(models.load(str(tmp_path), four_bit=True).train(), rank=4, alpha=8)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    hf.Trainer(
        model,
        arguments(tmp_path / "run"),
        train_dataset=items(stream),
        loss=ard.loss(model, beta=0.01),
    ).train()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(wiring.trainable(model))


@pytest.mark.parametrize("language", [hf.causal_lm, losses.causal_lm])
def test_the_trainer_and_the_loop_are_the_same_step(stream, tmp_path, monkeypatch, language):
    noise_by_content(monkeypatch)
    records = {}
    for kind in ("loop", "Trainer"):
        model = adapted(wake=False)
        adamw = train.adamw(model, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999))
        loss = ard.loss(model, beta=0.05, warmup=6, optimizer=adamw, language=language)
        if kind == "loop":
            rows = text.fixed_rows(stream, length=32)
            batches = iter(
                [{"input_ids": rows[i : i + 4], "labels": rows[i : i + 4]} for i in range(0, 16, 4)]
            )
            options = dict(total=2, accumulate=2, machine=FP32, clip=0)
            records[kind] = train.fit(model, batches, adamw, loss=loss, **options)
        else:
            constant = dict(lr_scheduler_type="constant", max_grad_norm=0.0)
            micro = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
            trainer = hf.Trainer(
                model,
                arguments(tmp_path, **constant, **micro),
                train_dataset=items(stream),
                loss=loss,
                optimizers=(adamw, None),
            )
            trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(
                items(stream)
            )
            trainer.train()
            records[kind] = steps_of(trainer)
    for name in ("ce", "kl"):
        loop = [r[name] for r in records["loop"]]
        assert loop == pytest.approx(
            [line[f"{name}_loss"] for line in records["Trainer"]], rel=1e-4
        )


def test_save_and_load_take_the_place_of_save_pretrained(stream, tmp_path):
    model = adapted(wake=False)
    adamw = train.adamw(model, lr=1e-2)
    options = dict(loss=ard.loss(model, beta=0.05, optimizer=adamw), optimizers=(adamw, None))
    options |= dict(train_dataset=items(stream), save=adapter_files.save, load=adapter_files.load)
    hf.Trainer(model, arguments(tmp_path, save_strategy="steps", save_steps=2), **options).train()
    folder = tmp_path / "checkpoint-2"
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 2
    assert (folder / adapter_files.FOLDER).exists() and not (folder / "model.safetensors").exists()
    again = adapter_files.load(models.tiny(256, hidden=64, layers=2), folder)
    assert int(again.ard_steps) == 2
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    )
    with pytest.raises(ValueError, match="save, load: give both or neither"):
        hf.Trainer(model, arguments(tmp_path), save=adapter_files.save)
