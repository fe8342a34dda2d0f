"""Reads of a card in the middle of a step: counted by line on tensors that say they are on one, and on no others.

`far` makes tensors that say `cuda` and compute on the CPU. `everywhere` counts the CPU itself as a card, so that whole
programs, compiled ones too, run with the methods of torch.Tensor replaced.

Footgun: where the CPU counts as a card, a read of a batch counts as well. Only AdamW's own counters of steps, which are
on the CPU beside a card too, are left out there.
"""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import train_doctor as doctor
from tests import judge_healthy, test_noninterference
from tests.bench import assert_healthy, batches, quiet
from tests.test_severity import Stream
from train_doctor import NOTE, WARN, probes, waits
from train_doctor.finding import Finding


class Far(torch.Tensor):
    """A tensor of the CPU that says it is on a card; what is computed from it says so too."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def far(thing):
    if isinstance(thing, nn.Module):
        for part in thing.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    part._parameters[name] = nn.Parameter(p.detach().as_subclass(Far))
        return thing
    return thing.as_subclass(Far)


@pytest.fixture
def everywhere(monkeypatch):
    whose = waits.whose
    monkeypatch.setattr(waits, "HOST", ("meta",))
    monkeypatch.setattr(waits, "MOVED", ())  # every copy would end where the card is
    monkeypatch.setattr(waits, "whose", lambda file: "library" if "/torch/optim/" in file else whose(file))


def mean(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def once(model, ids):
    return mean(model(ids), ids)


def asks_in_the_middle(model, ids):
    keep = ids[:, 1:] > 40
    logits, labels = model(ids)[:, :-1], ids[:, 1:]
    loss = F.cross_entropy(logits[keep], labels[keep])  # two masks
    if loss > 100:  # a number
        return loss * 0
    return loss * (int(keep.sum()) / 64)  # a number


def steps(loss_of, *, put=far, micro=1, rounds=4, after=lambda loss: None, before=lambda loss: None):
    """A watched loop that asks `before` its step and `after` it."""
    model = put(Stream())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replays = mock.patch.object(probes, "run", lambda *_: None)  # they would send ids of the CPU to the card
    with replays, doctor.watch(model, optimizer=optimizer, say=False) as report:
        for ids in batches(rounds):
            for _ in range(micro):
                loss = loss_of(model, put(ids))
                loss.backward()
            before(loss)
            optimizer.step()
            optimizer.zero_grad()
            after(loss)
    return report


def found(report) -> Finding | None:
    assert report.done and not report.faults, report.faults
    return next((f for f in report.findings if f.check == "N19"), None)


def test_reads_in_the_middle_are_named_by_line_and_counted_per_step():
    finding = found(quiet(lambda: steps(asks_in_the_middle, micro=3)))
    assert finding.severity == WARN and finding.name == "host-waits"
    assert "12 reads from cuda per step of 3 micro-batches" in finding.observed
    code = asks_in_the_middle.__code__
    lines = [code.co_firstlineno + n for n in (3, 4, 6)]
    for line, times in zip(lines, (6, 3, 3)):
        assert f"{times} x test_waits.py:{line} `" in finding.observed
    assert "`loss = F.cross_entropy(logits[keep]" in finding.observed


@pytest.mark.parametrize(
    "ask", [float, int, bool, torch.Tensor.item, lambda x: x.tolist(), lambda x: x.to("cpu"), torch.Tensor.cpu]
)
def test_one_read_per_step_is_healthy_and_a_second_is_a_note(ask):
    report = quiet(lambda: steps(once, before=ask))
    assert_healthy(report)
    assert found(report) is None and report.verdicts["N19"].state == "OK"
    report = quiet(lambda: steps(once, before=lambda loss: (ask(loss), ask(loss))))
    assert_healthy(report)
    assert found(report).severity == NOTE and "2 reads" in found(report).observed


def test_what_is_read_after_the_step_is_left_alone():
    assert found(quiet(lambda: steps(once, after=lambda loss: [loss.item() for _ in range(9)]))) is None


def test_what_computes_or_fills_without_counting_is_no_read():
    def loss_of(model, ids):
        logits = model(ids).clone()
        logits[ids > 250] = 0.0
        return mean(torch.where(ids[..., None] > 3, logits, logits[..., :1]), ids[0:, torch.arange(32)])

    assert quiet(lambda: steps(loss_of)).verdicts["N19"].state == "OK"


def test_on_the_cpu_there_is_nothing_to_wait_for_and_nothing_is_touched():
    untouched = dict(vars(torch.Tensor))
    seen = []

    def loss_of(model, ids):
        seen.append(dict(vars(torch.Tensor)) == untouched)
        return asks_in_the_middle(model, ids)

    report = quiet(lambda: steps(loss_of, put=lambda x: x, micro=3))
    assert all(seen) and report.verdicts["N19"].state == "NOT-APPLICABLE"


def test_reads_of_the_host_beside_a_model_on_a_card_are_free():
    ids = batches(1)[0]
    report = quiet(lambda: steps(lambda m, x: once(m, x) * (1 if int(ids.sum()) > 0 and bool(ids.all()) else 0)))
    assert report.verdicts["N19"].state == "OK"


def test_the_methods_are_put_back():
    before = dict(vars(torch.Tensor))
    inside = []
    quiet(lambda: steps(once, after=lambda _: inside.append(set(vars(torch.Tensor)) - set(before))))
    assert inside[0] == {*waits.NUMBERS, *waits.INDEXED, *waits.MOVED} - set(before)
    assert dict(vars(torch.Tensor)) == before


@pytest.mark.parametrize("case", test_noninterference.CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_every_bit_is_the_same(case, everywhere):
    test_noninterference.test_every_bit_is_the_same(*case)


@pytest.mark.slow
def test_a_compiled_model_is_compiled_as_without(everywhere):
    def program(watching: bool):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Stream()
        called = torch.compile(model, backend="eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with doctor.watch(model, steps=3 if watching else 1, say=False) as report:
            for ids in batches(5):
                optimizer.zero_grad()
                mean(called(ids), ids).backward()
                optimizer.step()
        return report, model.state_dict()

    (report, ours), (_, theirs) = program(True), program(False)
    assert not report.faults and all(torch.equal(ours[k], theirs[k]) for k in ours)


HEALTHY = [judge_healthy.nanogpt_pretraining, judge_healthy.muon_beside_adamw]


@pytest.mark.parametrize("program", HEALTHY, ids=lambda p: p.__name__)
def test_a_healthy_program_is_clean_on_a_card(program, everywhere):
    report = quiet(program)
    assert not report.faults, report.faults
    assert not [f for f in report.findings if f.severity != NOTE], report
