"""Each program of this folder in a process of its own, and its answer for all tests that ask, in whichever worker."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from absent_card import HERE, ROOT

from nblib import files


@cache
def _forks() -> subprocess.Popen:
    """The process of this worker that has imported everything (forks.py)."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "notebooks", "doctor"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}  # read when a library is imported
    environment["MALLOC_PERTURB_"] = "1"  # new memory holds -1.7e38: what reads it before it was written shows at once
    command, pipe = [sys.executable, str(HERE / "forks.py")], subprocess.PIPE
    process = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe)
    atexit.register(lambda: (process.kill(), process.wait()))
    return process


def run(program: str, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess:
    forks = _forks()
    with tempfile.NamedTemporaryFile("r", prefix="nblib-card-", errors="replace") as error:
        print(json.dumps([error.name, program, *arguments]), file=forks.stdin, flush=True)
        pid = forks.stdout.readline()
        assert pid, f"forks.py ended with {forks.wait()}"
        late = threading.Timer(timeout, os.kill, (int(pid), signal.SIGABRT))  # Python says where every thread stands
        late.start()
        code = int(forks.stdout.readline())
        late.cancel()
        problem = error.read()
    assert code != -signal.SIGABRT, f"{program} aborted, or had not ended after {timeout} s: {problem[-6000:]}"
    return subprocess.CompletedProcess([program, *arguments], code, "", problem)


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
