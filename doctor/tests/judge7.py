"""`python -m tests.judge7 FILE.json`: what the doctor says of forty more programs, ten of them language models.

Their author had not seen the checks. `judge7_a.py` and `judge7_b.py` have twenty each; every one has a mended twin. A
program gives its models, its optimizers and one step; the watch is the default one and stands around its twenty steps.
`judge7_proofs.json` has the author's measure of both after more steps (lower is better), which proves the harm.

`judge7_first_sight.json` is what was said before any check was changed for them, and is not to be edited.

Footgun: whether a finding states the author's cause is read by a person. A check's id alone does not tell.
"""

import sys
from pathlib import Path

import torch

import train_doctor as doctor

from . import judge7_a, judge7_b
from .judge4 import STEPS, told, undisturbed, write

FAULTS = {case["name"]: (part, case) for part in (judge7_a, judge7_b) for case in part.CASES}
RECORD = Path(__file__).parent / "judge7_first_sight.json"
PROOFS = Path(__file__).parent / "judge7_proofs.json"


def examine(name: str, mended: bool) -> doctor.Report:
    """The report of one program. Several models are found by the doctor itself."""
    part, _ = FAULTS[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as its author ran it
    try:
        with undisturbed():
            program = getattr(part, f"{name}_{'good' if mended else 'bad'}")()
            model = program["model"] if isinstance(program["model"], torch.nn.Module) else None
            with doctor.watch(model, optimizer=program["optimizer"], steps=STEPS, say=False) as report:
                for i in range(program["steps"]):
                    program["step"](i)
                    if report.done:  # what comes after is not watched
                        break
    finally:
        torch.set_num_threads(threads)
    return report


def main(path: str) -> None:
    entries = {}
    for name, (_, case) in FAULTS.items():
        print(name, end=": ")
        entries[name] = told(case["what"], examine(name, False), examine(name, True))
    write(path, entries)


if __name__ == "__main__":
    main(sys.argv[1])
