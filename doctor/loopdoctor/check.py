"""What a check is: an id, a function, and a manual page, which is the docstring of the function.

    @check("N11")
    def rate_is_zero(e: Evidence) -> Fired | Verdict:
        '''Steps are made and nothing changes, because the learning rate is zero.
        the symptom, as it is met

        Fires when all rates of all optimizers were zero in three steps running ...
        how it decides

        ERROR or WARN learning-rate-zero: The learning rate (lr) is zero: {why}. Fix: Look at the
        schedule's ... '''

The last paragraph has one fault or several, each on a line of its own: severities, name, cause,
fix. Faults that share a name are told apart after a slash (wrong-loss/summed). The function returns
`fires(observed, expected, ...)` or a Verdict. It fires with the figures of this run; name, cause
and fix are quoted from the page, so that each text stands once, for the report, the page of the
checks and the README.

Footgun: `python -OO` removes docstrings, so there this package cannot be imported, and says so.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from loopdoctor.evidence import Evidence
from loopdoctor.finding import Finding, Verdict
from loopdoctor.looked import Looked
from loopdoctor.places import Place, spell

PLACES = 3  # lines of the program that a finding names
FAULT = re.compile(r"((?:ERROR|WARN|NOTE)(?: or (?:WARN|NOTE))*) ([a-z0-9/-]+): (.*) Fix: (.*)")


class Fired(NamedTuple):
    """What a check saw; its record makes a Finding of it."""

    observed: str
    expected: str
    severity: str  # "" for the first that the page allows
    fault: str  # key of the fault; "" for the first on the page
    blanks: dict[str, object]  # what stands in braces in its cause and fix
    # lines of the program; those that the check looked at where it names none
    at: tuple[Place, ...] = ()


def fires(
    observed: str,
    expected: str,
    severity: str = "",
    fault: str = "",
    at: Iterable[Place | None] = (),
    **blanks,
) -> Fired:
    """Say what was seen; `at` are the lines that did it, where the check knows better than what it
    looked at.
    """
    places = tuple(place for place in at if place is not None)
    return Fired(observed, expected, severity, fault, blanks, places)


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
        if isinstance(outcome, Verdict):
            return outcome
        if not outcome.at and isinstance(e, Looked):
            outcome = outcome._replace(at=tuple(e.places()))
        return self.finding(*outcome)

    def finding(
        self,
        observed: str,
        expected: str,
        severity: str,
        fault: str,
        blanks: dict,
        at: tuple[Place, ...] = (),
    ) -> Finding:
        name, severities, cause, fix = self.faults[fault or next(iter(self.faults))]
        if severity and severity not in severities:
            raise ValueError(
                f"severity = {severity!r}: the page of {self.id} allows {', '.join(severities)}"
            )
        cause, fix = cause.format(**blanks), fix.format(**blanks)
        where = tuple(spell(place) for place in at[:PLACES])
        return Finding(
            self.id, name, severity or severities[0], observed, expected, cause, fix, where=where
        )


def check(id: str) -> Callable[[Callable], Check]:
    """Make a check of a function."""
    return functools.partial(_read, id)


def _read(id: str, function: Callable) -> Check:
    if not function.__doc__:
        raise RuntimeError(
            "loopdoctor reads its texts from docstrings, which python -OO removes; run without -OO"
        )
    symptom, *about, last = inspect.getdoc(function).split("\n\n")
    faults = {}
    for text in re.split(r"\n(?=ERROR |WARN |NOTE )", last):
        match = FAULT.fullmatch(_line(text))
        if match is None:
            raise ValueError(
                f"the page of {id} ends in {text!r}; a fault is written `SEVERITY name: cause "
                "Fix: fix`"
            )
        severities, key, cause, fix = match.groups()
        faults[key] = Fault(key.partition("/")[0], tuple(severities.split(" or ")), cause, fix)
    name = next(iter(faults.values())).name
    return Check(id, name, _line(symptom), tuple(map(_line, about)), faults, function)


def _line(text: str) -> str:
    return " ".join(text.split())
