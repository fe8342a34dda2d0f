"""NOT-APPLICABLE for what a kind of program has nothing of, UNKNOWN for what could have been seen."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests.bench import batches, lm, quiet
from train_doctor.checks import ALL, kinds


def watched(model, batch, loss, steps: int = 10, optimizer=None, by_hand: bool = False):
    optimizer = None if by_hand else optimizer or torch.optim.SGD(model.parameters(), 0.05)
    with doctor.watch(steps=steps, say=False) as report:
        for n in range(steps):
            model.zero_grad()
            loss(model, *batch(n)).backward()
            for p in model.parameters() if by_hand else ():
                p.data.add_(p.grad, alpha=-0.05)
            if not by_hand:
                optimizer.step()
    return report


def classifier(**how):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    return watched(
        model,
        lambda n: (torch.rand(8, 1, 8, 8), torch.randint(0, 4, (8,))),
        lambda m, x, y: F.cross_entropy(m(x), y),
        **how,
    )


def picture():
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).requires_grad_(False)
    x = torch.rand(1, 1, 8, 8, requires_grad=True)
    return watched(body, lambda n: (x,), lambda m, x: m(x).square().mean(), optimizer=torch.optim.Adam([x], 0.01))


def language_model(**how):
    text = batches(12)
    return watched(lm(hidden=32), lambda n: (text[n],), lambda m, x: m(input_ids=x, labels=x).loss, **how)


def recommender():
    model = nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 1))
    return watched(
        model, lambda n: (torch.randint(0, 50, (8, 3)),), lambda m, x: (m(x)[:, 0] - x.float().mean(1)).square().mean()
    )


def states(report):
    found = {check: verdict.state for check, verdict in report.verdicts.items()}
    return {state: {c for c, s in found.items() if s == state} for state in ("UNKNOWN", "NOT-APPLICABLE", "OK")}


def test_every_id_is_that_of_a_check():
    assert kinds.TEXT | kinds.STEPS | kinds.GRADIENTS <= {c.id for c in ALL}


def test_a_classifier_of_pictures_has_no_text():
    said = states(quiet(classifier))
    assert (
        said["UNKNOWN"] == set() and kinds.TEXT <= said["NOT-APPLICABLE"] and kinds.STEPS - {"N12", "N25"} <= said["OK"]
    )


def test_weights_moved_by_hand_have_no_optimizer():
    said = states(quiet(lambda: classifier(by_hand=True)))
    assert kinds.STEPS <= said["NOT-APPLICABLE"] and {"B3", "B4"} <= said["UNKNOWN"], "gradients could have been seen"


def test_a_picture_that_is_trained_has_no_gradients_in_its_model():
    assert states(quiet(picture))["NOT-APPLICABLE"] >= kinds.GRADIENTS - {"B4"}


@pytest.mark.parametrize("program", [language_model, recommender])
def test_text_and_tables_are_looked_at(program):
    report = quiet(program)
    assert not any("no token ids" in v.why for v in report.verdicts.values())


def test_what_more_steps_would_show_stays_unknown():
    said = states(quiet(lambda: classifier(steps=1)))
    assert {"N11", "N24", "B7", "N1"} <= said["UNKNOWN"]
    with doctor.watch(nn.Linear(2, 2), say=False) as report:
        pass
    assert states(report)["UNKNOWN"] >= {"F14", "F15", "S3", "B1"}, "nothing was seen, so nothing is known"
