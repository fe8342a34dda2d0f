"""`python -m tests.judge5 FILE.json`: what the doctor says of twenty-four more programs outside language models.

Their author had not seen the checks. `judge5_a.py` and `judge5_b.py` have twelve each; every one has a mended twin and
returns a number that tells the two apart, which its author held to for five seeds. The watch is the default one.

`judge5_first_sight.json` is what was said before any check was changed for them, and is not to be edited.

Footgun: whether a finding states the author's cause is read by a person. A check's id alone does not tell.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import train_doctor as doctor

from . import judge5_a, judge5_b
from .judge4 import STEPS, told, undisturbed, write

FAULTS = {f["name"]: (getattr(part, f["name"]), f) for part in (judge5_a, judge5_b) for f in part.FAULTS}
RECORD = Path(__file__).parent / "judge5_first_sight.json"


def examine(name: str, mended: bool, programs: dict = FAULTS) -> tuple[doctor.Report, float]:
    """The report of one program, and its number."""
    reports = []

    @contextmanager
    def watch(model, optimizer):
        models = model if isinstance(model, list | tuple) else [model]
        one = models[0] if len(models) == 1 else None
        with doctor.watch(one, optimizer=optimizer, steps=STEPS, say=False) as report:
            reports.append(report)
            yield report

    with undisturbed():
        number = programs[name][0](not mended, watch)
    return reports[0], number


def main(path: str, programs: dict = FAULTS) -> None:
    entries = {}
    for name, (_, about) in programs.items():
        (faulty, wrong), (twin, right) = examine(name, False, programs), examine(name, True, programs)
        assert wrong < right if about["worse"] == "lower" else wrong > right, (name, wrong, right)
        print(name, end=": ")
        entries[name] = told(about["what"], faulty, twin)
    write(path, entries)


if __name__ == "__main__":
    main(sys.argv[1])
