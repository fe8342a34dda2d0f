"""`python -m tests.judge5 FILE.json`: what the doctor says of twenty-four more programs outside language models.

Their author had not seen the checks. `judge5_a.py` and `judge5_b.py` have twelve each; every one has a mended twin and
returns a number that tells the two apart, which its author held to for five seeds. The watch is the default one.

`judge5_first_sight.json` is what was said before any check was changed for them, and is not to be edited.

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
from train_doctor import ERROR

from . import judge5_a, judge5_b
from .judge4 import STEPS, said

FAULTS = {f["name"]: (getattr(part, f["name"]), f) for part in (judge5_a, judge5_b) for f in part.FAULTS}
RECORD = Path(__file__).parent / "judge5_first_sight.json"


def examine(name: str, mended: bool) -> tuple[doctor.Report, float]:
    """The report of one program, and its number."""
    reports = []

    @contextmanager
    def watch(model, optimizer):
        models = model if isinstance(model, list | tuple) else [model]
        one = models[0] if len(models) == 1 else None
        with doctor.watch(one, optimizer=optimizer, steps=STEPS, say=False) as report:
            reports.append(report)
            yield report

    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            number = FAULTS[name][0](not mended, watch)
    finally:
        torch.set_rng_state(state)
    return reports[0], number


def main(path: str) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    made = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "commit": commit.stdout.strip()},
        "steps": STEPS,
        "programs": {},
    }
    for name, (_, about) in FAULTS.items():
        (faulty, wrong), (twin, right) = examine(name, False), examine(name, True)
        assert not faulty.faults + twin.faults, faulty.faults + twin.faults
        assert wrong < right if about["worse"] == "lower" else wrong > right, (name, wrong, right)
        made["programs"][name] = {"cause": about["what"], "said": said(faulty), "of the twin": said(twin)}
        first = made["programs"][name]["said"][:3]
        print(f"{name}: {about['what']}\n    {[(f['severity'], f['check'], f['cause'][:200]) for f in first]}")
        errors = [f.check for f in twin.findings if f.severity == ERROR]
        print(f"    twin: {errors or ''} {[f['check'] for f in said(twin)]}", flush=True)
    Path(path).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
