"""Each program of this folder in a process of its own, and its answer for all tests that ask, in
whichever worker.
"""

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import warm
from absent_card import HERE, ROOT

from nblib import files


@cache
def _forks() -> warm.Warm:
    """The process of this worker that has imported everything (forks.py)."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "notebooks", "doctor"))
    # offline is read when a library is imported; new memory holds -1.7e38: what reads it before it
    # was written shows
    return warm.Warm(HERE / "forks.py", PYTHONPATH=paths, HF_HUB_OFFLINE="1", MALLOC_PERTURB_="1")


def run(program: str, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess:
    return _forks()([str(HERE / program), *arguments], timeout)


def shared(tmp_path_factory) -> Path:
    """A folder that all workers of this session have."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "card"
    folder.mkdir(exist_ok=True)
    return folder


def answer(tmp_path_factory, program: str, *arguments: str) -> dict:
    """What the program writes with --json; the first who asks runs it, the others wait."""
    file = shared(tmp_path_factory) / f"{program}.json"
    with files.locked(file.with_suffix(".lock"), waiting=f"another worker runs {program}"):
        if not file.exists():
            ended = run(program, *arguments, "--json", str(file))
            assert file.exists(), f"{program} ended with {ended.returncode}: {ended.stderr[-3000:]}"
    return json.loads(file.read_text())
