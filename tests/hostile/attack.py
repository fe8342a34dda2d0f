"""How every attack must end: with a promised exit code, in sentences, without a traceback, within
seconds.

    ending = attack(capsys, "run", "00", "-f", "/dev/zero")      the command line, in this process
    refused(ending, "it is no file")
    code 2, and these words in one of its sentences

Footgun: a case that expects "some error" passes when the program fails for another reason. So each
names words of the sentence that it expects.
"""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nbworkbook import cli

SECONDS = 30  # for one attack on a busy machine; most take milliseconds


class Ending(NamedTuple):
    code: int
    out: str
    err: str


class Hang(BaseException):
    """Not an Exception, so that nothing takes it for bad input."""


@contextlib.contextmanager
def within(seconds: int = SECONDS) -> Iterator[None]:
    def stop(*_):
        raise Hang(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attack(capsys, *arguments: str) -> Ending:
    """`nblib` with these arguments in this process."""
    with within():
        try:
            code = cli.main(arguments)
        except SystemExit as leaving:
            code = leaving.code
    ending = Ending(code, *capsys.readouterr())
    held(ending)
    return ending


def held(ending: Ending) -> None:
    """What holds for every ending, good or bad."""
    assert "Traceback" not in ending.out + ending.err and "internal error" not in ending.err, ending
    for line in ending.err.splitlines():
        assert line.startswith("nblib: ") and len(line) < 5000 and line.isprintable(), ending


def refused(ending: Ending, words: str) -> None:
    assert ending.code == 2 and ending.out == "" and words in ending.err, ending


def done(ending: Ending, words: str = "") -> None:
    assert ending.code == 0 and ending.err == "" and words in ending.out, ending


def plant(path: Path, what: object) -> None:
    """Put at `path` a folder, a pipe, a link, bytes, or anything else as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() or path.is_symlink():
        path.unlink()
    if what == "FOLDER":
        path.mkdir()
    elif what == "PIPE":
        os.mkfifo(path)
    elif isinstance(what, str) and what.startswith("LINK "):
        path.symlink_to(what[5:])
    else:
        path.write_bytes(what if isinstance(what, bytes) else json.dumps(what).encode())
