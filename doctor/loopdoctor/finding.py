"""A finding, and the verdict of a check that found nothing.

Four verdicts are possible for each check: FIRE (a Finding), OK, NOT-APPLICABLE and UNKNOWN. UNKNOWN
is what honesty demands where nothing could be seen; it is listed, never counted as OK.

Severities: ERROR only for what cannot happen in a healthy run; WARN for what a healthy run may do
on purpose; NOTE for what is worth knowing.
"""

from typing import NamedTuple

ERROR, WARN, NOTE = "ERROR", "WARN", "NOTE"
SEVERITIES = (ERROR, WARN, NOTE)


class Finding(NamedTuple):
    check: str  # S3, F14, N4 ...
    name: str  # optimizer-misses-trainables
    severity: str
    observed: str
    expected: str
    diagnosis: str  # the cause, in one sentence
    fix: str
    because: str = ""  # check whose finding explains this one; "" for a root
    where: tuple[str, ...] = ()  # lines of the program that are to blame, as a person reads them


class Verdict(NamedTuple):
    """The outcome of a check that did not fire."""

    state: str  # OK, NOT-APPLICABLE, UNKNOWN
    why: str = ""


OK = Verdict("OK")


def not_applicable(why: str) -> Verdict:
    return Verdict("NOT-APPLICABLE", why)


def unknown(why: str) -> Verdict:
    return Verdict("UNKNOWN", why)
