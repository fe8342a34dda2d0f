"""Run the tests of `make test` under other versions of Python and torch, once per release, and
store what came out.

    python tests/run_versions.py                                   Python 3.11 and 3.13, torch
                                                                   2.11.0 and 2.13.0
    python tests/run_versions.py --python 3.13 --torch 2.11.0      one of them

Each pair gets a fresh environment in a temporary folder, with the locked packages and that torch.
The record goes to outputs/published/<date>-versions.json: versions, counts of tests and the names
of those that failed.

Footgun: an environment takes about two gigabytes and two minutes before its first test.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "requirements-test.lock")
MARKS = "not slow and not base and not kernel and not browser and not gpu"


def find_python(version: str) -> str:
    """Return the path of an interpreter of this version that can make environments."""
    candidates = [shutil.which(f"python{version}")]
    candidates += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in filter(None, candidates):
        probe = [
            candidate,
            "-c",
            "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])",
        ]
        done = subprocess.run(probe, capture_output=True, text=True)
        if done.stdout.strip() == version:
            return candidate
    raise SystemExit(f"--python {version}: no such interpreter with venv is on this machine")


def make_environment(folder: Path, python: str, torch: str) -> Path:
    """Make a virtual environment with the locked packages and this torch; return its
    interpreter.
    """
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside = folder / "bin" / "python"
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]

    # The lock with another torch.
    lines = [
        line
        for name in LOCKS
        if (ROOT / name).exists()
        for line in (ROOT / name).read_text().splitlines()
    ]
    pins = [re.sub(r"^torch==.*", f"torch=={torch}", line) for line in lines]
    lock = folder / "requirements.txt"
    lock.write_text("\n".join(pins) + "\n")
    subprocess.run([*pip, "-r", lock], check=True)

    # This project.
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "-e", ROOT, "-e", ROOT / "doctor"], check=True
    )
    return inside


def run_tests(python: Path, report: Path, workers: int) -> dict:
    """Run the tests and return counts, seconds and the names of those that failed."""
    command = [
        python,
        "-m",
        "pytest",
        "-p",
        "no:nbval",
        "-q",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
    ]
    command += ["-m", MARKS, f"--junit-xml={report}"]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    facts = {"exit status": done.returncode, "seconds": round(time.monotonic() - began)}
    if not report.exists():
        return facts | {"end of output": done.stdout[-2000:] + done.stderr[-2000:]}
    suite = next(ElementTree.parse(report).iter("testsuite"))
    facts |= {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    broken = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    return facts | {"failed": [f"{case.get('classname')}::{case.get('name')}" for case in broken]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python", action="append", metavar="3.13", help="a version; may be given again"
    )
    parser.add_argument(
        "--torch", action="append", metavar="2.11.0", help="a version; may be given again"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that test (default 2)")
    options = parser.parse_args()
    pairs = list(
        itertools.product(options.python or ["3.11", "3.13"], options.torch or ["2.11.0", "2.13.0"])
    )

    today = datetime.date.today().isoformat()
    file = ROOT / "outputs" / "published" / f"{today}-versions.json"
    record = {"date": today, "machine": platform.platform(), "runs": []}
    for version, torch in pairs:
        with tempfile.TemporaryDirectory(prefix="nblib-versions-") as place:
            python = make_environment(Path(place) / "env", find_python(version), torch)
            facts = {"python": version, "torch": torch} | run_tests(
                python, Path(place) / "report.xml", options.workers
            )
        record["runs"].append(facts)
        file.write_text(json.dumps(record, indent=1) + "\n")
        print({name: value for name, value in facts.items() if name != "failed"}, flush=True)
        for name in facts.get("failed", []):
            print(f"  failed: {name}", flush=True)
    print(file)
    return max(run["exit status"] for run in record["runs"])


if __name__ == "__main__":
    sys.exit(main())
