"""A mixture in the Hugging Face Trainer: its terms, its evaluation, its experts after a resume."""

import copy

import pytest
import torch

from lessons.pitfalls import bench
from nblib import losses, models
from nblib.methods import moe_trainer


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


def by_trainer(model, folder, *, resume=None, steps=4, balance_weight=0.1, **options):
    with bench.seeded(), bench.silent():
        args = bench.arguments(str(folder), max_steps=steps, gradient_accumulation_steps=2, **options)
        muon = dict(lr=0.02, adamw_lr=3e-3)
        kinds = dict(balance_weight=balance_weight, z_weight=0.01, muon=muon)
        trainer = moe_trainer.Trainer(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(), **kinds)
        trainer.train(resume_from_checkpoint=resume)
        judged = trainer.evaluate()["eval_loss"]
    return trainer, [line for line in trainer.state.log_history if "grad_norm" in line], judged


def test_the_trainer_has_the_terms_and_evaluation_has_not(mixture, tmp_path):
    trainer, log, judged = by_trainer(mixture, tmp_path)
    for line in log:
        parts = line["language_loss"] + line["balance_loss"] + line["z_loss"]
        assert line["loss"] == pytest.approx(parts, rel=1e-3)
        assert 0.09 < line["balance_loss"] < 0.2  # 0.1 x about 1, whatever the micro-batches
    sums, tokens = 0.0, 0
    for i in range(16):
        item = {name: t[None] for name, t in Rows()[i].items()}
        sums += float(losses.causal_lm(trainer.model.eval(), item)["ce"])
        tokens += int(losses.supervised(item["labels"]))
    # transformers averages evaluation batches of 8 rows by rows, so equal up to the batches' different weights
    assert judged == pytest.approx(sums / tokens, rel=2e-2)


def test_the_trainers_resume_brings_the_experts_back(mixture, tmp_path):
    other = copy.deepcopy(mixture)
    straight, log, _ = by_trainer(mixture, tmp_path / "a", save_strategy="steps", save_steps=2)
    with torch.no_grad():
        for p in other.parameters():
            p.normal_()
    resumed, rest, _ = by_trainer(other, tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-2"))
    for (name, p), q in zip(straight.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(p, q), name
    for kind in ("loss", "language_loss", "balance_loss"):
        assert [line[kind] for line in rest][-2:] == [line[kind] for line in log][-2:]


def test_the_trainer_refuses_what_would_count_twice(mixture, tmp_path):
    mixture.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits"):
        by_trainer(mixture, tmp_path)
