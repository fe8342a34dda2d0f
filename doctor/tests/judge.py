"""`python -m tests.judge`: what the doctor says of programs whose writer had not seen its checks."""

import sys
import time
import warnings

import torch

from train_doctor import ERROR, NOTE

from .judge2_faulty import FAULTY as FAULTY_2
from .judge2_healthy import HEALTHY as HEALTHY_2
from .judge3_faulty import FAULTY as FAULTY_3
from .judge3_healthy import HEALTHY as HEALTHY_3
from .judge_faulty import FAULTY
from .judge_healthy import HEALTHY


def run(program):
    """(report, seconds), or (None, seconds) with the error printed: a program that does not run judges nothing."""
    start = time.perf_counter()
    rng, default = torch.get_rng_state(), torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = program()
    except Exception as error:
        print(f"BROKE      {program.__name__}: {type(error).__name__}: {error}")
        report = None
    torch.set_rng_state(rng)
    torch.set_default_dtype(default)
    return report, time.perf_counter() - start


def says(finding, words) -> bool:
    text = f"{finding.name} {finding.observed} {finding.diagnosis} {finding.fix}".lower()
    return any(word.lower() in text for word in words)


def judge_faulty(chosen) -> tuple[int, int, int]:
    first = named = total = 0
    for program, checks, words in FAULTY + FAULTY_2 + FAULTY_3:
        if chosen and program.__name__ not in chosen:
            continue
        total += 1
        report, seconds = run(program)
        if report is None:
            continue
        root = report.root
        if root is not None and root.check in checks and says(root, words):
            verdict, first, named = "FIRST", first + 1, named + 1
        elif any(f.check in checks and says(f, words) for f in report.findings):
            verdict, named = "named", named + 1
        else:
            verdict = "MISSED"
        given = "nothing" if root is None else f"{root.check} {root.name}: {root.diagnosis}"
        faults = f"  [the doctor itself failed: {report.faults}]" if report.faults else ""
        others = [f.check for f in report.findings if f is not root]
        print(
            f"{verdict:10} {program.__name__} ({seconds:.1f} s), wanted {'/'.join(checks)}: {given}"
            f"{' + ' + ','.join(others) if others else ''}{faults}"
        )
    return first, named, total


def judge_healthy(chosen) -> tuple[int, int, int]:
    clean = quiet = total = 0
    for program in HEALTHY + HEALTHY_2 + HEALTHY_3:
        if chosen and program.__name__ not in chosen:
            continue
        total += 1
        report, seconds = run(program)
        if report is None:
            continue
        errors = [f for f in report.findings if f.severity == ERROR]
        warned = [f for f in report.findings if f.severity not in (ERROR, NOTE)]
        clean, quiet = clean + (not errors), quiet + (not errors and not warned)
        faults = f"  [the doctor itself failed: {report.faults}]" if report.faults else ""
        print(
            f"{'ERROR' if errors else 'warned' if warned else 'clean':10} {program.__name__} ({seconds:.1f} s){faults}"
        )
        for f in errors + warned:
            print(f"           {f.severity} {f.check} {f.name}: {f.diagnosis} (observed {f.observed})")
    return clean, quiet, total


def main(chosen) -> None:
    first, named, faulty = judge_faulty(chosen)
    clean, quiet, healthy = judge_healthy(chosen)
    print(f"\nfaulty: {first} of {faulty} named first, {named} named at all")
    print(f"healthy: {clean} of {healthy} without an error, {quiet} without a warning")


if __name__ == "__main__":
    main(set(sys.argv[1:]))
