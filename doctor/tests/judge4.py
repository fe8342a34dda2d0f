"""`python -m tests.judge4 FILE.json`: what the doctor says of forty-four programs outside language models.

Their authors had not seen the checks: `judge4_a.py` has images, `judge4_b.py` the rest. Each fault is proven by a
measurement after the loop, and each has a mended twin. A program names its models and optimizers, as its author did;
where it names several models the doctor is left to find them. The watch is the default one, of ten steps.

`judge4_first_sight.json` is what was said before any check was changed for them, and is not to be edited.

Footgun: whether a finding states the author's cause is read by a person. A check's id alone does not tell.
"""

import datetime
import json
import platform
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

import train_doctor as doctor
from train_doctor import ERROR, NOTE

from . import judge4_a, judge4_b

FAULTS = {f.__name__: (f, words) for f, words in judge4_a.FAULTS + judge4_b.FAULTS}
STEPS = 10
RECORD = Path(__file__).parent / "judge4_first_sight.json"


@contextmanager
def watch(*modules, optimizer=None):
    model = modules[0] if len(modules) == 1 else None
    with doctor.watch(model, optimizer=optimizer, steps=STEPS, say=False) as report:
        yield report


@contextmanager
def undisturbed():
    """The generator and the default dtype come back, and warnings are not shown."""
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)


def examine(name: str, mended: bool):
    """The report of one program; a program that fails its own measurement raises."""
    with undisturbed():
        return FAULTS[name][0](watch, mended)


def said(report) -> list[dict[str, str]]:
    """All findings but notes, in the order of the report."""
    return [
        {"severity": f.severity, "check": f"{f.check} {f.name}", "cause": f.diagnosis, "observed": f.observed}
        | ({"follows": f.because} if f.because else {})
        for f in report.findings
        if f.severity != NOTE
    ]


def told(words: str, faulty, twin) -> dict:
    """What is kept of one program: its author's cause, what was said of it and of its twin."""
    assert not faulty.faults + twin.faults, faulty.faults + twin.faults
    entry = {"cause": words, "said": said(faulty), "of the twin": said(twin)}
    print(f"{words}\n    {[(f['severity'], f['check'], f['cause'][:160]) for f in entry['said'][:3]]}")
    errors = [f.check for f in twin.findings if f.severity == ERROR]
    print(f"    twin: {errors or ''} {[f['check'] for f in entry['of the twin']]}", flush=True)
    return entry


def write(path: str, programs: dict[str, dict]) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit.stdout.strip()}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    record = {"date": date, "versions": versions, "steps": STEPS, "programs": programs}
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(path: str) -> None:
    programs = {}
    for name, (_, words) in FAULTS.items():
        print(name, end=": ")
        programs[name] = told(words, examine(name, False), examine(name, True))
    write(path, programs)


if __name__ == "__main__":
    main(sys.argv[1])
