"""The Hugging Face Trainer: each habit of the stock one alone, and that the corrected one has none
of them.
"""

import math
import os
import subprocess
import sys

import pytest
import torch

from lessons.pitfalls import bench, hf_trainer
from nblib import hf, models, paths


@pytest.mark.slow
def test_each_habit_of_the_stock_trainer_shows():
    assert len(hf_trainer.trainer_faults(hf_trainer.stock_trainer())) == 4


def test_the_stock_trainer_resumes_a_dense_model_and_logs_the_same_line():
    dense = hf_trainer.resume_mixture(hf_trainer.tf.Trainer, family="qwen3")
    assert dense["bit_equal"] and dense["missing_keys_logged"]


def test_the_corrected_trainer_refuses_an_optimizer_that_forgets():
    with pytest.raises(ValueError, match="trainable parameters are in no optimizer, the first is"):
        hf_trainer.optimizer_error(
            hf.Trainer,
            make_optimizer=lambda model: torch.optim.AdamW(
                model.model.layers.parameters(), lr=1e-3
            ),
        )


def test_the_corrected_trainer_leaves_the_auxiliary_loss_out_of_evaluation(tmp_path):
    model = hf_trainer.small(family="qwen3_moe", output_router_logits=True)
    rows = hf_trainer.Rows(4)
    options = dict(per_device_eval_batch_size=4)
    with bench.silent():
        trainer = hf.Trainer(
            model=model, args=bench.arguments(str(tmp_path), **options), eval_dataset=rows
        )
        measured = trainer.evaluate()["eval_loss"]
        model.config.router_aux_loss_coef = 10.0
        assert trainer.evaluate()["eval_loss"] == measured
    with torch.no_grad():
        out = model(rows.ids, labels=rows.labels)
    assert math.isclose(
        measured, float(out.loss - model.router_aux_loss_coef * out.aux_loss), rel_tol=1e-5
    )


def test_the_corrected_trainer_loads_the_best_mixture(tmp_path):
    model = hf_trainer.small(family="qwen3_moe")
    every = dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)
    args = bench.arguments(
        str(tmp_path), max_steps=3, learning_rate=0.5, load_best_model_at_end=True, **every
    )
    with bench.silent():
        trainer = hf.Trainer(
            model=model, args=args, train_dataset=hf_trainer.Rows(), eval_dataset=hf_trainer.Rows(4)
        )
        trainer.train()
    # or there is nothing to go back to
    assert not trainer.state.best_model_checkpoint.endswith("checkpoint-3")
    best = models.load(trainer.state.best_model_checkpoint)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), best.parameters(), strict=True)
    )


def test_the_corrected_trainer_equals_the_stock_one_where_that_is_right():
    seen = []
    for kind in (hf_trainer.tf.Trainer, hf.Trainer):
        model = hf_trainer.small()
        bench.run_trainer(
            kind,
            model,
            hf_trainer.Rows(),
            max_steps=3,
            gradient_accumulation_steps=4,
            per_device_train_batch_size=1,
        )
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*seen, atol=1e-6)


TWO_PROCESSES = """
import os, sys, torch
from nblib import hf
from lessons.pitfalls import bench, hf_trainer as stock
model = stock.small()
options = dict(max_steps=2, gradient_accumulation_steps=2, optim="sgd", max_grad_norm=0.0)
rows = 4 // int(os.environ.get("WORLD_SIZE", 1))
arguments = bench.arguments(sys.argv[1] + "-folder", per_device_train_batch_size=rows, **options)
hf.Trainer(model, arguments, train_dataset=stock.Rows()).train()  # not by bench.run_trainer, where each would be alone
if os.environ.get("RANK", "0") == "0":
    torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), sys.argv[1])
"""


@pytest.mark.slow
def test_the_corrected_trainer_is_the_same_on_two_processes(tmp_path):
    script, weights = tmp_path / "script.py", []
    script.write_text(TWO_PROCESSES)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = os.environ | {"PYTHONPATH": str(paths.notebooks())}
    for launcher in ([sys.executable], torchrun):
        target = tmp_path / f"{len(launcher)}.pt"
        command = [*launcher, script, target]
        subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
        weights.append(torch.load(target, weights_only=True))
    assert torch.allclose(*weights, atol=1e-7)
