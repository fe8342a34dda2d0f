"""The student's own words: that they are its own, that the loss is the loss on them, and that
nothing is lost.
"""

import pytest
import torch

from nblib import losses, models, runtime, text, train
from nblib.methods.distill import objective, on_policy

CPU = runtime.pick("cpu", "fp32")


def model(seed, **shape):
    return models.tiny(96, seed=seed, **(dict(hidden=32, layers=2, heads=2, length=64) | shape))


@pytest.fixture
def teacher():
    return models.as_teacher(model(1))


@pytest.fixture
def ids():
    return torch.randint(96, (4, 24), generator=torch.Generator().manual_seed(0))


def test_the_prompt_stays_and_each_token_follows_from_all_before(ids):
    """A model with such large scores that it always draws the likeliest token, with and without its
    cache.
    """
    student = model(0)
    with torch.no_grad():
        student.get_output_embeddings().weight.mul_(1000)
    student.train()
    rows = on_policy.continued(student, ids, prompt=6)
    assert rows.shape == ids.shape and torch.equal(rows[:, :6], ids[:, :6]) and student.training
    with torch.no_grad():
        likeliest = student.eval()(input_ids=rows).logits[:, 5:-1].argmax(-1)
    assert torch.equal(rows[:, 6:], likeliest)


def test_draws_have_the_models_own_probabilities():
    student = model(0, layers=1)
    prompts = torch.zeros(4000, 2, dtype=torch.long)
    with runtime.seeded(0):
        second = on_policy.continued(student, prompts, prompt=1)[:, 1]
    with torch.no_grad():
        p = student(input_ids=prompts[:1, :1]).logits[0, -1].softmax(-1)
    share = torch.bincount(second, minlength=96) / 4000
    assert float((share - p).abs().max()) < 5 * float((p * (1 - p) / 4000).sqrt().max())


def test_with_share_one_the_loss_is_that_of_the_written_rows(teacher, ids):
    student, loss = model(0).train(), objective.from_teacher(teacher, 1.0)
    batch = {"input_ids": ids, "labels": ids}
    with runtime.seeded(3):
        terms = on_policy.on_policy(loss, share=1.0, prompt=6)(student, batch)
    with runtime.seeded(3):
        torch.rand(())
        written = on_policy.continued(student, ids, prompt=6)
    expected = loss(student, {"input_ids": written, "labels": written})
    assert torch.equal(terms["distillation"], expected["distillation"])
    assert not torch.equal(terms["distillation"], loss(student, batch)["distillation"])
    assert int(losses.supervised(written)) == int(losses.supervised(ids))


def test_share_zero_and_evaluation_are_the_loss_itself(teacher, ids):
    student, loss = model(0), objective.from_teacher(teacher, 1.0)
    batch = {"input_ids": ids, "labels": ids}
    for mode, share in ((True, 0.0), (False, 1.0)):
        student.train(mode)
        ours = on_policy.on_policy(loss, share=share, prompt=6)(student, batch)["distillation"]
        assert torch.equal(ours, loss(student, batch)["distillation"])


def test_a_run_that_goes_on_is_the_straight_run(teacher, tmp_path):
    stream = torch.randint(96, (3000,), generator=torch.Generator().manual_seed(1))

    def trained(folder, stop=None):
        runtime.seed_all(0)
        student = model(0)
        options = dict(
            loss=on_policy.on_policy(objective.from_teacher(teacher, 1.0), share=0.5, prompt=8),
            machine=CPU,
        )
        batches = text.Batches(stream, rows=2, length=24, seed=0)
        steps = train.steps(
            student,
            batches,
            train.adamw(student, lr=1e-2),
            total=6,
            checkpoints=train.Checkpoints(folder, every=1),
            **options,
        )
        for record in steps:
            if record["step"] == stop:
                break
        return student.state_dict()

    straight = trained(tmp_path / "straight")
    trained(tmp_path / "cut", stop=3)
    resumed = trained(tmp_path / "cut")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_on_own_words_is_zero_against_oneself(teacher, ids):
    same = on_policy.on_own_words(teacher, teacher, ids, prompt=6)
    other = on_policy.on_own_words(model(5), teacher, ids, prompt=6)
    assert same["KL"] == pytest.approx(0, abs=1e-6) and other["KL"] > 1e-4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(share=1.5, prompt=6), "share = 1.5: must be from 0 to 1"),
        (dict(share=0.5, prompt=24), "prompt = 24: must be from 1 to 23"),
    ],
)
def test_refused(teacher, ids, options, sentence):
    with pytest.raises(ValueError, match=sentence), runtime.seeded(0):
        loss = on_policy.on_policy(objective.from_teacher(teacher, 1.0), **options)
        for _ in range(20):
            loss(model(0).train(), {"input_ids": ids, "labels": ids})


def test_labels_have_no_place(teacher):
    with pytest.raises(ValueError, match="ce must be 0"):
        on_policy.on_policy(objective.from_teacher(teacher, 1.0, ce=0.5), share=0.5, prompt=6)
