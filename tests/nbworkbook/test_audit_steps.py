"""A healthy training is described and passed; each way to go wrong is one sentence."""

import math

import pytest

from nbworkbook import audit_steps

MIXTURE = dict(lr=0.02, adamw_lr=0.003, balance_weight=0.1, experts=8, top_k=2)


def healthy(every=5, steps=60, of=60):
    """Records as the loop writes them: a warm-up of six steps, then a loss that falls with a little
    noise.
    """
    records = []
    for step in range(every, steps + 1, every):
        ce, lr = (
            8.0 - 2 * (1 - math.exp(-step / 20)) + 0.02 * math.sin(step),
            0.02 * min(1, step / 6) * (1 - step / 100),
        )
        record = dict(
            step=step,
            of=of,
            loss=ce + 0.1,
            ce=ce,
            balance=0.11,
            lr=lr,
            grad_norm=1.0 + 0.2 * math.cos(step),
        )
        record |= dict(tokens=1024 * step, seconds=0.5 * step, run="mixture")
        records.append(record | (dict(eval_smallest=0.7) if step % 20 == 0 else {}))
    return records


def test_a_healthy_training_is_described_and_passed():
    facts, told = audit_steps.judge(healthy(), MIXTURE)
    assert told == []
    words = " | ".join(facts)
    for fact in (
        "ce ",
        "gradient norm 0.8",
        "a norm can have moved by",
        "smallest load 0.70",
        "balance 1.100",
        "2,048 tok",
    ):
        assert fact in words


def test_how_far_a_norm_can_have_moved_is_the_sum_of_the_rates_of_its_group():
    records = [dict(step=s, of=9, loss=9.0 - s, lr=0.02) for s in range(1, 10)]
    facts, told = audit_steps.judge(records, MIXTURE)
    assert told == [] and f"moved by {9 * 0.003:.2g} at most" in facts[-1]


def change(**columns):
    """Records in which some columns are a function of the step and the record."""

    def damaged():
        return [
            r | {name: value(r["step"], r) for name, value in columns.items()} for r in healthy()
        ]

    return damaged


def spike():
    records = healthy()
    records[7]["loss"] *= 3
    return records


def slow():
    return [r | {"seconds": r["seconds"] + max(0, r["step"] - 40) * 2} for r in healthy()]


@pytest.mark.parametrize(
    "records, words",
    [
        (
            change(loss=lambda s, r: math.nan if s == 30 else r["loss"]),
            "the loss is not finite at step 30",
        ),
        (
            change(loss=lambda s, r: "nan" if s == 30 else r["loss"]),
            "the loss is not finite at step 30",
        ),
        (change(ce=lambda s, r: 7 + s / 30), "ce rises from"),
        (change(ce=lambda s, r: 7 + 0.1 * (-1) ** s), "ce does not fall"),
        (spike, "at step 40 the loss"),
        (
            change(grad_norm=lambda s, r: math.inf if s > 50 else 1.0),
            "the gradient norm is not finite at step 55",
        ),
        (change(grad_norm=lambda s, r: 0.0), "the gradients are zero"),
        (change(grad_norm=lambda s, r: math.exp(s / 10)), "gradient norms grow from"),
        (change(lr=lambda s, r: 0.0), "the rate is 0 in every record"),
        (change(lr=lambda s, r: s * 1e-4, of=lambda s, r: 1000), "at step 60 the rate still rises"),
        (change(eval_smallest=lambda s, r: 0.02), "an expert gets 0.02 of its fair share"),
        (change(balance=lambda s, r: 0.4), "the routers collapse"),
        (slow, "from 2,048 tokens per second it falls to 410 by step 60"),
        (lambda: healthy() + [dict(step=61, of=60, loss=9.0, event="rollback")], "1 rollbacks"),
    ],
)
def test_one_fault_is_one_finding(records, words):
    _, (said,) = audit_steps.judge(records(), MIXTURE)
    assert words in said


def test_a_run_that_diverges_is_named_by_its_loss_and_its_gradients():
    records = change(ce=lambda s, r: 7 + s / 10, grad_norm=lambda s, r: math.exp(s / 10))()
    _, (loss, gradients) = audit_steps.judge(records, MIXTURE)
    assert "rises" in loss and "grow" in gradients


def test_of_two_records_nothing_is_said():
    assert audit_steps.judge(healthy()[:2], MIXTURE) == (
        ["2 records of steps, too few to judge by"],
        [],
    )


def test_only_the_first_hundred_steps_count():
    late = [r | {"loss": 99.0, "ce": 99.0} for r in healthy(steps=200) if r["step"] > 100]
    early = [r for r in healthy(steps=100, of=200)]
    assert audit_steps.judge(early + late, MIXTURE) == audit_steps.judge(early, MIXTURE)


@pytest.mark.parametrize("times", [1e-3, 1e3])
def test_the_size_of_a_gradient_alone_is_no_finding(times):
    records = change(grad_norm=lambda s, r: times * r["grad_norm"])()
    assert audit_steps.judge(records, MIXTURE)[1] == []
