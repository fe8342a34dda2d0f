"""Run everything before a merge: pitfalls, notebooks, the doctor and all tests; end with the ten
slowest.

    python tests/run_all.py [--workers 2]

The pitfalls come first, because notebooks and tests read what their runs measured
(lessons/pitfall_cache.py). Then two lines of work run side by side: the tests, many of which wait
for kernels, kills, browsers and queues; and beside them, with the lowest priority, the notebooks
and the doctor, which only compute.

Footgun: a killed run of this file leaves no process behind, but its pages under outputs/tests stay
as they were.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "outputs" / "tests"
FACTS = REPORTS / "facts"
PITFALLS = "tests/lessons/test_pitfalls.py"
LOWEST_PRIORITY = 19


def pytest_command(name: str, *arguments: str, workers: int) -> list[str]:
    """Return the command that runs some tests and writes its report under a name.

    nbval is left out: only notebooks need it, and each process would import it for a second.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:nbval", "-n", str(workers)]
    command += ["--dist", "worksteal", f"--junit-xml={REPORTS / name}.xml"]
    return [*command, *arguments]


def run(command: list[str], *, threads: int | None = 1) -> int:
    """Run a command, with one thread for each process unless told otherwise; return its exit
    status.
    """
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return subprocess.call(command, cwd=ROOT, env=environment)


def run_beside(workers: int) -> int:
    """Run the notebooks and the doctor with the lowest priority; return the worse of the two exit
    statuses.
    """
    os.nice(LOWEST_PRIORITY)
    notebooks = [sys.executable, "tests/validate.py", "--all", f"--facts={FACTS}"]
    notebooks.append(f"--junit-xml={REPORTS / 'notebooks'}.xml")
    status = run(notebooks)
    return max(status, run(pytest_command("doctor", "doctor/tests", workers=workers)))


def start_beside(workers: int, output: Path) -> subprocess.Popen:
    """Start this file's other line of work in a group of its own, its output in a file."""
    command = [sys.executable, __file__, "--beside", "--workers", str(workers)]
    with open(output, "w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)


def print_slowest() -> None:
    """Print the ten slowest tests, and the seconds of each notebook, from the reports."""
    tests: Counter[str] = Counter()
    notebooks: Counter[str] = Counter()
    for file in sorted(REPORTS.glob("*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            place = case.get("classname", "")
            name = case.get("name", "")
            seconds = float(case.get("time", 0))
            if name.startswith("Cell "):
                notebooks[place] += seconds
            else:
                tests[f"{place}::{name}"] += seconds
    for title, seconds_of in (("The ten slowest tests", tests), ("The notebooks", notebooks)):
        print(f"{title} (of {len(seconds_of)}, {sum(seconds_of.values()):.0f} s in all)")
        for name, seconds in seconds_of.most_common(10 if seconds_of is tests else None):
            print(f"{seconds:8.1f} s  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of each line of work (default 2)"
    )
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.beside:
        return run_beside(options.workers)

    # Start with empty reports and the base model, which tests and notebooks share.
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    status = run([sys.executable, "-m", "nbworkbook.base_model"], threads=None)

    # The pitfalls, whose facts the others read.
    facts = f"--facts={FACTS}"
    status = max(status, run(pytest_command("pitfalls", facts, PITFALLS, workers=options.workers)))

    # The tests, and beside them the notebooks and the doctor.
    output = REPORTS / "beside.txt"
    beside = start_beside(options.workers, output)
    try:
        others = ("tests", f"--ignore={PITFALLS}")
        status = max(status, run(pytest_command("tests", facts, *others, workers=options.workers)))
        status = max(status, beside.wait())
    finally:
        if beside.poll() is None:
            os.killpg(beside.pid, signal.SIGTERM)

    print("beside these, the notebooks and the doctor:")
    print(output.read_text())
    print_slowest()
    return status


if __name__ == "__main__":
    sys.exit(main())
