"""A log alone: what it shows is named, what it cannot tell is said, and a healthy one is left alone."""

import json
import math
import random

import pytest

from loopdoctor import logs, script
from loopdoctor.control import control


def log(entries, *, rate=lambda n: 1e-4, loss=lambda n: 3 / (1 + n / 9), norm=lambda n: 1.0):
    draw = random.Random(0)
    return [
        {
            "step": 10 * n + 10,
            "loss": loss(n) * (1 + 0.02 * draw.random()),
            "grad_norm": norm(n) * (1 + 0.2 * draw.random()),
            "learning_rate": rate(n),
        }
        for n in range(entries)
    ]


TRIPLE = dict(loss=lambda n: 0.0, norm=lambda n: math.nan, rate=lambda n: 0.0)
LATE = dict(loss=lambda n: 3 / (1 + n) if n < 12 else 0.0, norm=lambda n: 1.0 if n < 12 else math.nan)
CASES = {
    "healthy": (log(40), []),
    "healthy, warming up": (log(40, rate=lambda n: 1e-4 * min(n, 10)), []),
    "healthy, rate ends at 0": (log(40, rate=lambda n: 1e-4 * (39 - n)), []),
    "healthy, a scaler skipped": (log(40, norm=lambda n: math.inf if n in (0, 20) else 1.0), []),
    "healthy, short": (log(5), []),
    "the triple": (log(20, **TRIPLE), ["L1"]),
    "the triple, from step 130 on": (log(40, **LATE), ["L1"]),
    "nan from a step on": (log(40, loss=lambda n: 3 / (1 + n) if n < 30 else math.nan), ["L2"]),
    "rate 0 from the start": (log(40, rate=lambda n: 0.0, loss=lambda n: 3.0), ["L3"]),
    "norm exploding": (log(40, norm=lambda n: 1.5**n), ["L4"]),
    "never falls": (log(40, loss=lambda n: 3.0), ["L5"]),
    "rises": (log(40, loss=lambda n: 3.0 + n), ["L5"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_log_shows(name):
    entries, wanted = CASES[name]
    report = logs.diagnose([logs._entry(e, 1) for e in entries], control(None, None))
    assert [f.check for f in report.findings if not f.because] == wanted, f"\n{report}"
    assert all("The log cannot tell " in f.diagnosis for f in report.findings)
    assert {f.check for f in report.findings} | set(report.verdicts) == {f.id for f in logs.FAULTS}
    json.loads(report.json(), parse_constant=lambda text: pytest.fail(text))
    assert report.html() and "step" not in report.verdicts


def test_where_it_begins_is_named():
    entries, _ = CASES["the triple, from step 130 on"]
    report = logs.diagnose([logs._entry(e, 1) for e in entries], control(None, None))
    assert "first at step 130" in report.root.observed


def test_short_logs_say_that_they_are():
    report = logs.diagnose([logs._entry(e, 1) for e in CASES["healthy, short"][0]], control(None, None))
    assert report.verdicts["L5"].state == report.verdicts["L4"].state == "UNKNOWN"


def test_the_command_reads_what_loggers_write(tmp_path, capsys):
    state, lines = tmp_path / "trainer_state.json", tmp_path / "log.jsonl"
    healthy = log(40) + [{"step": 400, "eval_loss": 1.0}, {"step": 400, "train_runtime": 3.0, "train_loss": 1.0}]
    state.write_text(json.dumps({"log_history": healthy, "global_step": 400}))
    assert script.command(["--log", str(state)]) == 0
    assert "nothing found that a log can show" in capsys.readouterr().out
    rows = [{"train/loss": str(e["loss"]), "lr": e["learning_rate"], "grad_norm": "nan"} for e in log(9, **TRIPLE)]
    lines.write_text("\n".join(map(json.dumps, rows)))
    assert script.command(["--log", str(lines), "--format", "annotations"]) == 1
    assert capsys.readouterr().out.startswith("::error ")


@pytest.mark.parametrize("text, said", [("{]", "is no JSON"), ("[1]", "is no log"), ('[{"a": 1}]', "no entry")])
def test_what_is_no_log(tmp_path, capsys, text, said):
    path = tmp_path / "log.json"
    path.write_text(text)
    assert script.command(["--log", str(path)]) == 2 and said in capsys.readouterr().err
    assert script.command(["--log", str(tmp_path / "none")]) == 2
    assert script.command([]) == script.command(["x.py", "--log", "y"]) == 2
