"""What a check is: an id, a function, and a manual page, which is the docstring of the function.

    Steps are made and nothing changes, because the learning rate is zero.        the symptom, as a person meets it

    Fires when all rates of all optimizers were zero in three steps running ...   what is looked at, and what is spared

    ERROR or WARN learning-rate-zero: The learning rate (lr) is zero: {why}.      a fault: severities, name, cause
    Fix: Look at the schedule's arguments ...

A page may have several faults, told apart after a slash where they share a name (wrong-loss/summed). The function looks
at the Evidence and returns `fires(observed, expected, ...)`, or a Verdict. What it fires with are the figures of this
run; name, cause and fix are quoted from the page, so that each text stands once, for the report, CHECKS.md and the
README.

Footgun: `python -OO` removes docstrings, so there this package cannot be imported, and says so.
"""

import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

from train_doctor.evidence import Evidence
from train_doctor.finding import Finding, Verdict

FAULT = re.compile(r"((?:ERROR|WARN|NOTE)(?: or (?:ERROR|WARN|NOTE))*) (\S+): (.*) Fix: (.*)")


class Fired(NamedTuple):
    """What a check saw; its record makes a Finding of it."""

    observed: str
    expected: str
    severity: str  # "" for the first that the page allows
    fault: str  # key of the fault; "" for the first on the page
    blanks: dict[str, object]  # what stands in braces in its cause and fix


def fires(observed: str, expected: str, severity: str = "", fault: str = "", **blanks) -> Fired:
    return Fired(observed, expected, severity, fault, blanks)


class Fault(NamedTuple):
    name: str  # optimizer-misses-trainables
    severities: tuple[str, ...]
    cause: str  # in one sentence, with {blanks}
    fix: str


class Check(NamedTuple):
    id: str  # S3, F14, N4 ...
    name: str  # of its first fault
    symptom: str
    about: tuple[str, ...]  # paragraphs
    faults: dict[str, Fault]
    function: Callable[[Evidence], Fired | Verdict]

    def look(self, e: Evidence) -> Finding | Verdict:
        outcome = self.function(e)
        return outcome if isinstance(outcome, Verdict) else self._finding(*outcome)

    def _finding(self, observed: str, expected: str, severity: str, fault: str, blanks: dict) -> Finding:
        name, severities, cause, fix = self.faults[fault or next(iter(self.faults))]
        if severity and severity not in severities:
            raise ValueError(f"severity = {severity!r}: the page of {self.id} allows {', '.join(severities)}")
        cause, fix = cause.format(**blanks), fix.format(**blanks)
        return Finding(self.id, name, severity or severities[0], observed, expected, cause, fix)


def record(id: str, function: Callable) -> Check:
    """Read the page of a check."""
    if not function.__doc__:
        raise RuntimeError("train_doctor reads its texts from docstrings, which python -OO removes; run without -OO")
    symptom, *rest = (" ".join(text.split()) for text in inspect.getdoc(function).split("\n\n"))
    faults = {}
    for severities, key, cause, fix in (match.groups() for text in rest if (match := FAULT.fullmatch(text))):
        faults[key] = Fault(key.partition("/")[0], tuple(severities.split(" or ")), cause, fix)
    about = tuple(text for text in rest if not FAULT.fullmatch(text))
    return Check(id, next(iter(faults.values())).name, symptom, about, faults, function)
