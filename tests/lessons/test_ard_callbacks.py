"""ARD-LoRA in the Hugging Face Trainer: priors, calibration and predictions per epoch, and
resume.
"""

import pytest
import torch
import transformers as tf
from ard_bench import adapted

from lessons import ard_callbacks
from nblib import hf, text, train
from nblib.methods import ard
from nblib.methods.ard import adapter_files, ranks


def _trainer(folder, stream) -> tuple:
    model = adapted(wake=False)
    rows = text.fixed_rows(stream, length=32)
    train_rows, eval_rows = (
        [{"input_ids": r, "labels": r} for r in part] for part in (rows[:32], rows[96:104])
    )
    arguments = tf.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    tokenizer = text.train_tokenizer(["abc abd"] * 20, vocab_size=300)
    model.resize_token_embeddings(len(tokenizer))
    adamw = train.adamw(model, lr=1e-2, weight_decay=0.0)
    calibration = ard_callbacks.Uncertainty(
        [{"input_ids": rows[96:104], "labels": rows[96:104]}], samples=2
    )
    predictions = ard_callbacks.Predictions(["ab"])
    trainer = hf.Trainer(
        model,
        arguments,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        callbacks=[
            ard_callbacks.Priors(ranks.HeldOut(rows[32:96], count=16)),
            calibration,
            predictions,
        ],
        loss=ard.loss(model, beta=0.05, warmup=6, optimizer=adamw, language=hf.causal_lm),
        optimizers=(adamw, None),
        save=adapter_files.save,
        load=adapter_files.load,
    )
    return trainer, calibration, predictions


def test_the_trainer_route_trains_logs_and_resumes_bit_equal(stream, tmp_path):
    trainer, calibration, predictions = _trainer(tmp_path / "straight", stream)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "ce_loss" in entry]
    assert len(logs) == 12 and logs[-1]["ce_loss"] < logs[0]["ce_loss"]
    assert all(
        entry["loss"] == pytest.approx(entry["ce_loss"] + entry["kl_loss"], rel=1e-4)
        for entry in logs
    )
    # a sixth of beta at first, all of it at the sixth step
    assert 3 < logs[5]["kl_loss"] / logs[0]["kl_loss"]
    measured = [entry for entry in trainer.state.log_history if "mean_ece" in entry]
    assert [entry["epoch"] for entry in measured] == [1, 2, 3] and len(calibration.tables) == 3
    # and the tokenizer arrived
    assert [entry["epoch"] for entry in predictions.history] == [0, 1, 2, 3]
    assert all(
        not torch.equal(a.prior, torch.ones(4)) for a in ard.adapters(trainer.model).values()
    )

    again, _, _ = _trainer(tmp_path / "resumed", stream)  # from the middle of the second epoch
    again.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-6"))
    resumed = [entry for entry in again.state.log_history if "ce_loss" in entry]
    assert [entry["ce_loss"] for entry in resumed] == [entry["ce_loss"] for entry in logs]
    # no KL in it
    assert trainer.evaluate()["eval_loss"] == pytest.approx(measured[-1]["point_nll"], rel=1e-4)
    mine, theirs = trainer.model.state_dict(), again.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_callbacks_say_what_they_need(stream, tmp_path):
    with pytest.raises(ValueError, match="samples = 0: must be at least 1"):
        ard_callbacks.Uncertainty([], samples=0)
    trainer, _, _ = _trainer(tmp_path, stream)
    trainer.processing_class = trainer.callback_handler.processing_class = None
    with pytest.raises(ValueError, match="processing_class: the predictions need the tokenizer"):
        trainer.train()
