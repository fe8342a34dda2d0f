"""Each program of this folder in a process of its own, and its answer for all tests that ask, in whichever worker."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from absent_card import HERE, ROOT

from nblib import files


def run(program: str, *arguments: str, timeout: float = 400) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "notebooks", "doctor"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command, pipe = [sys.executable, str(HERE / program), *arguments], subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            out, problem = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # Python says where every thread stands
            words = f"{program} had not ended after {timeout} s: {process.communicate()[1][-6000:]}"
            raise AssertionError(words) from None
    return subprocess.CompletedProcess(command, process.returncode, out, problem)


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
