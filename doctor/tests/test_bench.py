"""Each program of the bench: a fault is named first, its mended twin and the healthy programs are
left alone.

A miss that is known carries its reason in the program (`Missed:`). It has no test here, but `python
-m bench` counts it as a miss. Whatever is said, the program leaves the same numbers with the doctor
as without it.
"""

import pytest

from bench.__main__ import apart, verdict
from bench.programs import programs

ALL = programs()
FAULTS = [p for p in ALL if p.fault]
HEALTHY = [p for p in ALL if not p.fault]
pytestmark = pytest.mark.usefixtures("imported")


def named(p) -> str:
    return p.name


@pytest.mark.parametrize("p", [p for p in FAULTS if not p.missed], ids=named)
def test_a_fault_is_named_first(p):
    plain = apart(p.text, p.name, watched=False)
    told = apart(p.text, p.name, watched=True)
    assert verdict({**told, "fault": True, "names": p.names}) == "first", (
        told["said"] or told["raised"]
    )
    assert told["faults"] == [] and told["left"] == plain["left"]


@pytest.mark.parametrize("p", FAULTS, ids=named)
def test_its_twin_is_left_alone(p):
    told = apart(p.twin, p.name, watched=True)
    assert (told["said"], told["raised"], told["faults"]) == ([], "", [])


@pytest.mark.parametrize("p", HEALTHY, ids=named)
def test_a_healthy_program_is_left_alone(p):
    plain = apart(p.text, p.name, watched=False)
    told = apart(p.text, p.name, watched=True)
    assert (told["said"], told["raised"], told["faults"]) == ([], "", [])
    assert told["left"] == plain["left"]
