"""`assert_trains`: a test of a training step, which fails with the name of the cause and changes
nothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopdoctor as doctor


def parts(replaced: bool = False, rate: float = 1e-3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if replaced:
        model[3] = nn.Linear(32, 100)
    text = torch.randint(1, 4, (5000,)).cumsum(0) % 100

    def step():
        ids = torch.stack([text[i : i + 17] for i in torch.randint(len(text) - 17, (8,))])
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return model, step, optimizer


def test_a_sound_step_passes_and_nothing_is_changed():
    model, step, optimizer = parts()
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    assert doctor.assert_trains(model, step, optimizer).rounds == 8
    assert all(map(torch.equal, before, model.parameters())) and torch.equal(
        state, torch.get_rng_state()
    )
    assert not optimizer.state_dict()["state"]


def test_a_faulty_step_fails_with_its_cause():
    with pytest.raises(AssertionError, match="S3 optimizer-misses-trainables"):
        doctor.assert_trains(*parts(replaced=True))
    doctor.assert_trains(*parts(replaced=True), ignore={"S3": "for a test", "S4": "for a test"})


def test_warnings_fail_where_they_are_asked_to():
    model, step, optimizer = parts(replaced=True)
    options = dict(severity={"S3": "warn", "S4": "warn"})
    doctor.assert_trains(model, step, optimizer, **options)
    with pytest.raises(AssertionError, match="WARN S3"):
        doctor.assert_trains(model, step, optimizer, warnings=True, **options)


def test_a_step_that_raises_is_the_cause():
    model, step, optimizer = parts()

    def fails():
        return step() / int("none")

    with pytest.raises(AssertionError, match="the step raises") as failed:
        doctor.assert_trains(model, fails, optimizer)
    assert (
        isinstance(failed.value.__cause__, ValueError)
        and failed.value.__cause__.__traceback__ is not None
    )
