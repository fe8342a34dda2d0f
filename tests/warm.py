"""A process that has imported torch, transformers and nblib, and forks for every script that it is given.

A fork has computed nothing yet, as little as a new process, and is there three seconds of a processor sooner.

Footgun: what a script puts into the environment comes too late for a library that reads it on import.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


class Warm:
    def __init__(self) -> None:
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}  # no thread is lost in a fork
        self.process: subprocess.Popen | None = None

    def __call__(self, words: Sequence[str]) -> subprocess.CompletedProcess:
        """As `python words[0] words[1] ...`."""
        if self.process is None:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.process = subprocess.Popen([sys.executable, __file__], env=self.environment, **pipes)
        with tempfile.TemporaryDirectory() as place:
            self.process.stdin.write(json.dumps([place, list(map(str, words))]) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline())
            said = [(Path(place) / name).read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess(words, code, *said)

    def end(self) -> None:
        if self.process:
            self.process.communicate()


@pytest.fixture(scope="session")
def forked() -> Iterator[Warm]:
    python = Warm()
    yield python
    python.end()


def _serve() -> None:
    import IPython.core.formatters  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import peft  # noqa: F401

    from nblib import compiling, doctor, losses, memory, models, runtime, start, text, train, wiring  # noqa: F401

    for line in sys.stdin:
        place, words = json.loads(line)
        if pid := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        else:
            os._exit(_run(Path(place), words))


def _run(place: Path, words: list[str]) -> int:
    """In the fork: the exit status."""
    for number, name in enumerate((os.devnull, place / "out", place / "err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    _serve()
