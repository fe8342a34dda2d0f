"""What may be called OK where little was seen: a list for each way of seeing little, so that no
check slips in unasked.

Footgun: a new check that falls through to OK passes every other test. Here it fails, until somebody
has thought about what it saw.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import loopdoctor as doctor
from tests.loops import assert_healthy, assert_root, batches, lm, quiet

BUILD = {
    "S1",
    "S2",
    "S6",
    "S7",
    "S9",
    "S14",
    "S15",
    "S18",
    "S19",
    "S26",
    "S30",
    "S41",
    "S50",
}  # how model and optimizer are built, seen without a step
# the losses themselves
BACKWARD = {"F1", "F2", "F3", "F4", "F5", "F8", "F9", "F10", "F14", "F17", "F21", "N17", "S11"}
ONE = BUILD | BACKWARD | {"N35", "N26", "S3", "S4", "S17", "B1", "B3", "B4", "F11"}
OUTSIDE = (
    BUILD
    | BACKWARD
    | {
        "S3",
        "S4",
        "S17",
        "S20",
        "N35",
        "N26",  # the decay stands in the optimizer
        "B8",
        "B3",
        "B4",
        "B7",
        "N1",
        "N2",
        "N3",
        "N5",
        "N11",
        "N13",
        "N14",
        "N16",
        "N18",
        "N24",
        "N33",
        "D8",
    }
)


class Hand(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.table, self.drop, self.head = (
            nn.Embedding(256, 32),
            nn.Dropout(dropout),
            nn.Linear(32, 256),
        )
        self.mix = nn.Linear(32, 32)

    def forward(self, ids):
        return self.head(self.drop(self.mix(self.table(ids))))


def ce(logits, ids):
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained(model, rounds: int, called=None):
    call = model if called is None else called  # the truth of a compiled module asks for its len()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for ids in batches(rounds):
            loss = ce(call(ids), ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return report


def one_step():
    return trained(lm(hidden=32), 1)


def one_step_by_hand():
    return trained(Hand(), 1)


def around():
    model = lm(hidden=32)
    return trained(model, 3, torch.compile(model, backend="eager"))


def in_place():
    model = lm(hidden=32)
    model.compile(backend="eager")
    return trained(model, 3)


def blocks():
    model = lm(hidden=32)
    for block in model.model.layers:
        block.compile(backend="eager")
    return trained(model, 3)


def evaluation(**named):
    model = lm(hidden=32)
    with doctor.watch(**{k: model for k in named}, say=False) as report, torch.no_grad():
        for ids in batches(3):
            model(input_ids=ids, labels=ids)
    return report


def never_called(model):
    with doctor.watch(model, optimizer=torch.optim.AdamW(model.parameters()), say=False) as report:
        pass
    return report


def never_stepped():
    model = lm(hidden=32)
    with doctor.watch(model, say=False) as report:
        for ids in batches(3):
            model(input_ids=ids, labels=ids).loss.backward()
    return report


def nothing():
    with doctor.watch(say=False) as report:
        pass
    return report


MAY_SAY_OK = {
    "one step": (one_step, ONE),
    "one step, by hand": (one_step_by_hand, ONE),
    "compiled around": (around, OUTSIDE),
    "compiled in place": (in_place, OUTSIDE),
    # a replay of the whole is possible
    "compiled blocks": (blocks, OUTSIDE | {"F11", "B1", "F33"}),
    "evaluation, declared": (lambda: evaluation(model=True), BUILD),
    "evaluation": (evaluation, set()),
    "never called": (lambda: never_called(lm(hidden=32)), BUILD),
    "never called, by hand": (lambda: never_called(Hand()), BUILD - {"S9"}),
    "never stepped": (never_stepped, BUILD | BACKWARD | {"N16", "D8", "F33"}),
    "nothing": (nothing, set()),
}


SLOW = {"compiled around": [pytest.mark.slow]}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=SLOW.get(case, [])) for case in MAY_SAY_OK]
)
def test_who_may_say_ok(case):
    program, allowed = MAY_SAY_OK[case]
    report = quiet(program)
    assert not report.faults and not report.errors, report
    said = {check for check, verdict in report.verdicts.items() if verdict.state == "OK"}
    assert said <= allowed, f"{sorted(said - allowed)} say OK"


def test_compiled_parts_without_a_gradient_are_unknown():
    def program():
        model = Hand()
        model.mix.compile(backend="eager")
        model.forward = lambda ids: model.head(
            model.table(ids) + model.mix(model.table(ids)).detach()
        )
        return trained(model, 3)

    report = quiet(program)
    assert (
        "B1" not in {f.check for f in report.findings} and report.verdicts["B1"].state == "UNKNOWN"
    )


def test_dropout_in_a_compiled_model():
    def program(train: bool):
        model = Hand(dropout=0.1).train(train)
        return trained(model, 3, torch.compile(model, backend="eager"))

    assert_root(quiet(lambda: program(False)), "S11")
    assert_healthy(quiet(lambda: program(True)))
