"""`python -m tests.judge6 FILE.json`: what the doctor says of thirty-two more programs, most outside language models.

Their author had not seen the checks. `judge6_a.py` and `judge6_b.py` have sixteen each; every one has a mended twin and
returns a number that tells the two apart, which its author held to for five seeds. The watch is the default one.

`judge6_first_sight.json` is what was said before any check was changed for them, and is not to be edited.

Footgun: whether a finding states the author's cause is read by a person. A check's id alone does not tell.
"""

import sys
from pathlib import Path

from . import judge5, judge6_a, judge6_b

FAULTS = {f["name"]: (getattr(part, f["name"]), f) for part in (judge6_a, judge6_b) for f in part.FAULTS}
RECORD = Path(__file__).parent / "judge6_first_sight.json"


def examine(name: str, mended: bool) -> tuple:
    """The report of one program, and its number."""
    return judge5.examine(name, mended, FAULTS)


if __name__ == "__main__":
    judge5.main(sys.argv[1], FAULTS)
