"""Programs written by people who had not seen the checks: the cause is named first, and healthy ones raise no error.

`python -m tests.judge` prints the same programs with what was said of each.
"""

import pytest

from train_doctor import ERROR

from .bench import quiet
from .judge2_faulty import FAULTY as FAULTY_2
from .judge2_healthy import HEALTHY as HEALTHY_2
from .judge3_faulty import FAULTY as FAULTY_3
from .judge3_healthy import HEALTHY as HEALTHY_3
from .judge_faulty import FAULTY
from .judge_healthy import HEALTHY

PROGRAMS = [(program, checks) for program, checks, _ in FAULTY + FAULTY_2 + FAULTY_3]


@pytest.mark.parametrize(("program", "checks"), PROGRAMS, ids=[program.__name__ for program, _ in PROGRAMS])
def test_the_cause_is_named_first(program, checks):
    report = quiet(program)
    assert not report.faults, report.faults
    assert report.root is not None and report.root.check in checks, f"expected {checks}\n{report}"


@pytest.mark.parametrize("program", HEALTHY + HEALTHY_2 + HEALTHY_3, ids=lambda p: p.__name__)
def test_no_error_on_a_healthy_program(program):
    report = quiet(program)
    assert not report.faults, report.faults
    assert not [f for f in report.findings if f.severity == ERROR], f"\n{report}"
