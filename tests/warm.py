"""A process that has imported what takes longest, and forks for every script that it is given.

    forked = Warm()                     forked([FILE, ARGUMENT ...]) is `python FILE ARGUMENT ...`,
                                        three seconds sooner

A fork has computed nothing yet, as little as a new process; what a script does to torch dies with
it. The folder card has a server of its own (card/forks.py), whose torch sees a card.

Footgun: nothing may compute before a fork, because the threads of torch and of the tokenizers do
not come along; and what a script puts into the environment comes too late for a library that reads
it on import.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

NEEDED = (
    "IPython.core.formatters",
    "matplotlib.figure",
    "peft",
    "nblib.doctor",
    "nbworkbook.setup",
    "nblib.train",
)


class Warm:
    """The server starts with the first script, and ends with this process."""

    def __init__(self, server: Path | str = __file__, **environment: str):
        self.command = [sys.executable, str(server)]
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MPLBACKEND": "agg",
            "PYTHONFAULTHANDLER": "1",
        }
        self.environment |= environment
        self.process: subprocess.Popen | None = None

    def __call__(self, words: Sequence[str], timeout: float = 900) -> subprocess.CompletedProcess:
        if self.process is None:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.process = subprocess.Popen(self.command, env=self.environment, **pipes)
            atexit.register(lambda: (self.process.kill(), self.process.wait()))
        with tempfile.TemporaryDirectory(prefix="nblib-warm-") as place:
            said = [Path(place) / name for name in ("out", "err")]
            print(
                json.dumps([*map(str, said), *map(str, words)]), file=self.process.stdin, flush=True
            )
            pid = self.process.stdout.readline()
            assert pid, f"{self.command[1]} ended with {self.process.wait()}"
            # Python says where each thread stands
            late = threading.Timer(timeout, os.kill, (int(pid), signal.SIGABRT))
            late.start()
            code = int(self.process.stdout.readline())
            late.cancel()
            out, err = (file.read_text(errors="replace") for file in said)
        assert code != -signal.SIGABRT, (
            f"{words[0]} aborted, or had not ended after {timeout} s: {err[-6000:]}"
        )
        return subprocess.CompletedProcess(words, code, out, err)


def serve(needed: Sequence[str]) -> None:
    """Lines of JSON, [OUT, ERR, FILE, ARGUMENT ...], each answered by the fork's process id and its
    exit status.
    """
    for name in needed:
        importlib.import_module(name)
    for line in sys.stdin:
        if not (pid := os.fork()):
            os._exit(_run(*json.loads(line)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(out: str, err: str, *words: str) -> int:
    """In the fork: the exit status."""
    for number, name in enumerate((os.devnull, out, err)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv, sys.path[0] = [*words], str(Path(words[0]).parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    serve(NEEDED)
