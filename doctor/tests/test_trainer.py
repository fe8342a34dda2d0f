"""The callback for the Hugging Face Trainer: accumulation, a custom loss, and a training that
raises.
"""

import pytest
import torch

import loopdoctor as doctor
from loopdoctor import checks
from loopdoctor.evidence import Backward, Call, Clip, Schedule, Step
from tests import loops

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Custom(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        loss = out.loss / 1.0
        return (loss, out) if return_outputs else loss


class Failing(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise RuntimeError("on purpose")
        return super().training_step(*args, **kwargs)


def trainer(kind, folder, accumulation=1, **how):
    rows = [{"input_ids": row, "labels": row} for x in loops.batches(8) for row in x]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    callback = doctor.TrainerCallback(say=False, **how)
    return kind(loops.lm(hidden=32), arguments, train_dataset=rows, callbacks=[callback]), callback


@pytest.fixture
def seen(monkeypatch):
    evidences, real = [], checks.examine
    monkeypatch.setattr(checks, "examine", lambda e: (evidences.append(e), real(e))[1])
    return evidences


@pytest.mark.parametrize(
    "kind, accumulation", [(transformers.Trainer, 1), (transformers.Trainer, 2), (Custom, 2)]
)
def test_a_training_is_seen(seen, tmp_path, kind, accumulation):
    run, callback = trainer(kind, tmp_path, accumulation)
    run.train()
    e = seen[0]
    assert callback.report.done and not e.faults and e.rounds == 4
    assert len(e.of(Backward)) == len(e.of(Call)) == len(e.forwards) == 4 * accumulation
    assert [len(e.of(k)) for k in (Step, Clip, Schedule)] == [4, 4, 4]
    assert e.models == [run.model] and len(e.optimizers) == 1


def test_a_training_that_raises_leaves_nothing_behind(seen, tmp_path):
    backward = torch.autograd.backward
    run, callback = trainer(Failing, tmp_path)
    with pytest.raises(RuntimeError):
        run.train()
    assert (
        callback.report.done
        and callback.report.rounds == 2
        and "on purpose" in str(callback.report.exception)
    )
    assert torch.autograd.backward is backward and callback.observer is None


def test_the_callback_can_train_twice(seen, tmp_path):
    run, callback = trainer(transformers.Trainer, tmp_path, steps=2)
    run.train()
    first = callback.report
    run.train()
    assert first.done and callback.report.done and callback.report is not first and len(seen) == 2


@pytest.mark.parametrize("windows", [{}, {"at": [0, 2]}])
def test_the_trainer_has_its_own_step_again(tmp_path, windows):
    run, callback = trainer(
        transformers.Trainer, tmp_path, steps=1, severity={"N5": "info"}, **windows
    )
    seen = []
    run.add_callback(looking(lambda: seen.append("training_step" in vars(run))))
    run.train()
    assert seen[0] and seen[-1] == bool(windows), (
        "it is needed for as long as something may be watched"
    )
    assert "training_step" not in vars(run) and callback.report.done and not callback.report.faults
    assert [w.first for w in callback.report.windows] == ([0, 2] if windows else [])


def looking(note):
    class Looks(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            note()

    return Looks()
