"""The report in a terminal, in Jupyter, as JSON and as an exception; and one that has nothing to
report says so.
"""

import json
import warnings

import pytest
import torch

import loopdoctor as doctor
from loopdoctor.finding import ERROR, NOTE, OK, WARN, Finding
from loopdoctor.observe import Optimizers
from loopdoctor.report import Report, Unhealthy
from tests import loops


def made(*findings) -> Report:
    report = Report()
    report.findings, report.rounds, report.done = list(findings), 3, True
    report.verdicts["S2"] = OK
    return report


def finding(check, severity, because=""):
    return Finding(
        check,
        f"name-{check}",
        severity,
        "<nan>",
        "finite",
        f"Cause {check}.",
        f"Fix {check}.",
        because,
    )


FULL = made(
    finding("N4", ERROR), finding("N5", WARN, "N4"), finding("S9", WARN), finding("F6", NOTE)
)


def test_plain_text():
    text = str(FULL)
    assert text.startswith("doctor, 3 steps watched: 1 ERROR, 1 WARN, 1 NOTE; 1 checks passed")
    assert (
        text.index("ERROR N4")
        < text.index("follows: N5")
        < text.index("WARN S9")
        < text.index("NOTE F6")
    )
    assert "cause: Cause N4." in text and "fix: Fix N4." in text and "Cause N5" not in text


def test_jupyter():
    shown = FULL._repr_mimebundle_()
    assert shown["text/plain"] == str(FULL) and "&lt;nan&gt;" in shown["text/html"]
    assert "Fix N4." in shown["text/html"] and "<nan>" not in shown["text/html"]


def test_json():
    read = json.loads(FULL.json(), parse_constant=lambda name: pytest.fail(name))
    assert [f["check"] for f in read["findings"]] == ["N4", "N5", "S9", "F6"] and read[
        "rounds"
    ] == 3
    assert not read["healthy"] and json.loads(made().json())["healthy"]


def test_raise_for_errors():
    with pytest.raises(Unhealthy, match="N4 name-N4: Cause N4. Fix: Fix N4."):
        FULL.raise_for_errors()
    made(finding("S9", WARN)).raise_for_errors()
    assert made(finding("F6", NOTE)).root is None and FULL.root.check == "N4"


def test_nothing_watched_is_said():
    with doctor.watch(torch.nn.Linear(2, 2)) as report:
        assert "still watching" in str(report)
    assert (
        "nothing was watched" in str(report)
        and "nothing was watched" in report._repr_mimebundle_()["text/html"]
    )
    assert not json.loads(report.json())["healthy"]


def test_a_loss_that_is_nan_stays_json():
    m = torch.nn.Linear(2, 2)
    o = torch.optim.SGD(m.parameters(), float("inf"))
    with warnings.catch_warnings(), doctor.watch(m, say=False) as report:
        warnings.simplefilter("ignore")
        for _ in range(3):
            (m(torch.ones(1, 2)).sum() * float("nan")).backward()
            o.step()
    json.loads(report.json(), parse_constant=lambda name: pytest.fail(name))
    assert report.rounds == 1 or report.rounds == 3


def test_after_a_fault_in_watching_no_check_says_ok(monkeypatch):
    def fails(self, *args):
        raise RuntimeError("seen wrongly")

    monkeypatch.setattr(Optimizers, "_note_step", fails)
    model = loops.lm(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters())
    with doctor.watch(model, optimizer=optimizer, say=False) as report:
        for ids in loops.batches(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert report.faults and "seen wrongly" in str(report)
    assert not [check for check, verdict in report.verdicts.items() if verdict.state == "OK"]


def test_an_option_that_does_not_exist_is_named():
    model = loops.lm(hidden=32)
    with pytest.raises(
        TypeError, match="tokeniser = 3: no such option; allowed are tokenizer, untied"
    ):
        doctor.preflight(model, lambda: None, tokeniser=3)
