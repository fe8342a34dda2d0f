"""What the user decides: ignored findings, other severities, in the code and in pyproject.toml."""

import json

import pytest
import torch

import loopdoctor as doctor
from loopdoctor import ERROR, NOTE, WARN, script
from loopdoctor.control import control
from tests.test_report import FULL, finding, made


def frozen_part(**how):
    """S3: a trainable part that no optimizer holds, a warning; and nothing else."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    with doctor.watch(model, optimizer=optimizer, steps=4, say=False, **how) as report:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    return report


def test_what_is_ignored_is_listed_with_its_reason_and_decides_nothing():
    plain, report = (
        frozen_part(severity={"S3": "error"}),
        frozen_part(ignore={"S3": "a probe on purpose"}),
    )
    assert (
        plain.root.check == "S3"
        and plain.errors
        and not [f for f in report.findings if f.check == "S3"]
    )
    (ignored, reason), *others = report.ignored
    assert ignored.check == "S3" and reason == "a probe on purpose" and not others
    report.raise_for_errors()
    for text in (
        str(report),
        report.html(),
        report.markdown(),
        report.junit(),
        report.annotations(),
    ):
        assert "S3" in text and "a probe on purpose" in text
    assert json.loads(report.json())["ignored"][0]["reason"] == "a probe on purpose"
    assert "S3" not in report.verdicts, "ignored is not OK"


def test_an_ignored_cause_hides_none_of_its_effects():
    kept, ignored = control({"N4": "known"}, None).sort(
        [finding("N4", ERROR), finding("N5", WARN, "N4")]
    )
    assert [(f.check, f.because) for f in kept] == [("N5", "")] and [
        f.check for f, _ in ignored
    ] == ["N4"]


@pytest.mark.parametrize(
    "text, meant", [("error", ERROR), ("warn", WARN), ("info", NOTE), ("Note", NOTE)]
)
def test_severity(text, meant):
    kept, _ = control(None, {"S9": text}).sort(FULL.findings)
    assert {f.check: f.severity for f in kept}["S9"] == meant
    assert [f.severity for f in kept if not f.because] == sorted(
        (f.severity for f in kept if not f.because), key=(ERROR, WARN, NOTE).index
    )


@pytest.mark.parametrize(
    "ignore, severity, said",
    [
        (
            {"s3": "x"},
            None,
            "names 's3', and no check has that id; did you mean 'S3'? Allowed are S1, S2",
        ),
        ({"optimizer-misses-trainable": "x"}, None, "did you mean 'S3'"),
        (
            None,
            {"zzzzzzzz": "note"},
            "severity names 'zzzzzzzz', and no check has that id. Allowed are",
        ),
        ({"S3": ""}, None, "ignore['S3'] = '': must be a text"),
        (["S3"], None, "must name checks"),
        (None, {"S3": "fatal"}, "severity['S3'] = 'fatal': allowed are error, warn, note"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(ignore, severity, said):
    with pytest.raises(ValueError) as refused:
        frozen_part(ignore=ignore, severity=severity)
    assert said in str(refused.value)


def test_the_same_in_pyproject(tmp_path, monkeypatch, capsys):
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    # without a table: the search goes on
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    file = tmp_path / "pyproject.toml"
    file.write_text("[tool.loopdoctor]\nignore = { S3 = 'a probe' }\nseverity = { N5 = 'note' }\n")
    assert [reason for _, reason in frozen_part().ignored] == ["a probe"]
    assert frozen_part(ignore={"S3": "said here"}).ignored[0][1] == "said here", "the code wins"
    for text, said in [
        ("[tool.loopdoctor]\nignore = { S330 = 'x' }", "did you mean 'S3"),
        ("[tool.loopdoctor]\nsteps = 3", "'steps' is no option; allowed are ignore and severity"),
        ("[tool]\nloopdoctor = 3", "must be a table"),
        ("[tool.loopdoctor\n", "cannot be read"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            frozen_part()
    program = inner / "train.py"
    program.write_text("print('ran')")
    assert script.command([str(program)]) == 2, "the command says it in one sentence"
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_ignored_error_does_not_decide_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import torch\nm = torch.nn.Linear(4, 4)\no = torch.optim.SGD(m.parameters(), 0.0)\n"
        "for _ in range(6):\n    o.zero_grad(); m(torch.randn(8, 4)).square().mean().backward(); o.step()\n"
    )
    table = "[tool.loopdoctor]\nseverity = { N11 = 'error' }\n"
    (tmp_path / "pyproject.toml").write_text(table)
    assert script.command(["train.py"]) == 1
    (tmp_path / "pyproject.toml").write_text(table + "ignore = { N11 = 'a dry run' }\n")
    assert script.command(["train.py"]) == 0
    assert "ignored: N11 learning-rate-zero, because: a dry run" in capsys.readouterr().out


def test_a_report_that_was_made_without_a_watch_has_all_forms():
    assert made().html() and made().markdown() and made().junit()
