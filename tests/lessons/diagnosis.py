"""How a diagnosis is judged: which check is the root, and what a healthy report looks like."""

import warnings
from collections.abc import Callable

import torch

from train_doctor import ERROR, NOTE, Report


def quiet(program: Callable[[], Report]) -> Report:
    """Run a program without its warnings; one that ends in an exception must have caught it itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return program()


def assert_root(report: Report, *checks: str) -> None:
    """The first cause named is one of these, and watching itself had no fault."""
    assert report.done and not report.faults, report.faults
    assert report.root is not None and report.root.check in checks, f"expected {checks}\n{report}"


def assert_healthy(report: Report, *, warnings_allowed: tuple[str, ...] = ()) -> None:
    """No error at all, no warning but those allowed, and something was really looked at."""
    assert report.done and not report.faults, report.faults
    wrong = [f for f in report.findings if f.severity == ERROR]
    wrong += [f for f in report.findings if f.severity not in (ERROR, NOTE) and f.check not in warnings_allowed]
    assert not wrong, f"\n{report}"
    assert sum(v.state == "OK" for v in report.verdicts.values()) >= 3
