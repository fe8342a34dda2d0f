"""A machine that is not as it should be: no home, nowhere to write, closed streams, odd locales.

Real processes.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import small_notebooks
from attack import SECONDS, Ending, held, plant

NBLIB = f"{sys.executable} -m nbworkbook.cli"


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.move_workbook(tmp_path, monkeypatch)
    small_notebooks.write("00_setup", "1")
    small_notebooks.write("10_éλ🙂", "1", parameters='corpus: str = "prose"  # text [a corpus]')
    for name in ("00_setup", "10_éλ🙂"):
        plant(folder / "parameters" / f"{name}.sweep.yaml", b"steps: [1, 2]\n")
    for name in ("folder", "gone", "home"):
        (folder / name).mkdir()
    plant(folder / "link", "LINK folder")
    plant(folder / "dangling", "LINK nowhere")
    plant(folder / "circle", "LINK circle")
    plant(folder / "a-file", b"earlier results")
    return folder


class Case(NamedTuple):
    command: str  # for bash, in the workbook's folder
    code: int
    words: str = ""  # of what is said, on stdout or stderr
    set: dict = {}  # names that the environment gets; None takes one away


LIST = f"{NBLIB} list"
REPORT = f"{NBLIB} report"
NOBODY = "set -o pipefail; (sleep .5"  # the reader is gone by then
CASES = {
    "no HOME": Case(LIST, 0, "00_setup", {"HOME": None}),
    "HOME is not there": Case(REPORT, 0, "index.html", {"HOME": "/nonexistent"}),
    "no HOME, ~ in a value": Case(
        f"{NBLIB} run 10 -p corpus=~x/y", 2, "allowed is a corpus", {"HOME": None}
    ),
    "HOME is a file": Case(LIST, 0, "00_setup", {"HOME": "/dev/null"}),
    "no PATH": Case(LIST, 0, "00_setup", {"PATH": ""}),
    "no TMPDIR": Case(REPORT, 0, "index.html", {"TMPDIR": "/nonexistent"}),
    "TMPDIR is a file": Case(LIST, 0, "00_setup", {"TMPDIR": "/dev/null"}),
    "LC_ALL=C": Case(LIST, 0, "00_setup", {"LC_ALL": "C"}),
    "LC_ALL=C without UTF-8 mode": Case(
        LIST, 0, "10_\\xe9\\u03bb", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ),
    "ascii streams": Case(LIST, 0, "10_\\xe9\\u03bb", {"PYTHONIOENCODING": "ascii"}),
    "ascii streams, an error": Case(
        f"{NBLIB} run 10_éλ", 2, "Unknown notebook", {"PYTHONIOENCODING": "ascii"}
    ),
    "latin-1 streams, a report": Case(REPORT, 0, "index.html", {"PYTHONIOENCODING": "latin-1"}),
    "a locale that is not there": Case(f"env LC_ALL=xx_YY.UTF-8 {LIST}", 0, "00_setup"),
    "bytes that are no text": Case(
        f"{NBLIB} run 00 -p precision=$'\\xff'", 2, "must be of type str (UTF-8)"
    ),
    "bytes as a notebook": Case(f"{NBLIB} run $'\\xff'", 2, "Unknown notebook '\\udcff'"),
    "no columns": Case(f"{NBLIB} --help", 0, "usage", {"COLUMNS": "0"}),
    "outputs is a link": Case(REPORT, 0, "folder/index.html", {"NBLIB_OUTPUTS": "link"}),
    "outputs is a dangling link": Case(
        REPORT, 0, "nowhere/index.html", {"NBLIB_OUTPUTS": "dangling"}
    ),
    "outputs is a circle": Case(REPORT, 2, "circle", {"NBLIB_OUTPUTS": "circle"}),
    "outputs is a circle, list": Case(LIST, 0, "never run", {"NBLIB_OUTPUTS": "circle"}),
    "outputs is a file": Case(REPORT, 2, "Cannot create the folder", {"NBLIB_OUTPUTS": "a-file"}),
    "outputs below a file": Case(
        f"{NBLIB} run 00", 2, "Cannot create the folder", {"NBLIB_OUTPUTS": "a-file/x"}
    ),
    "outputs is a device": Case(
        REPORT, 2, "Cannot create the folder", {"NBLIB_OUTPUTS": "/dev/null"}
    ),
    "outputs takes nothing": Case(
        f"{NBLIB} run 00", 2, "Cannot create the folder", {"NBLIB_OUTPUTS": "/proc/x"}
    ),
    "outputs is too long": Case(REPORT, 2, "File name too long", {"NBLIB_OUTPUTS": "x" * 3000}),
    "outputs is empty": Case(LIST, 0, "00_setup", {"NBLIB_OUTPUTS": ""}),
    "outputs with a new line": Case(REPORT, 0, "index.html", {"NBLIB_OUTPUTS": "a\nb"}),
    "the report is a folder": Case(f"mkdir -p outputs/index.html && {REPORT}", 0, "index.html"),
    "no notebooks": Case(LIST, 2, "There are no notebooks", {"NBLIB_NOTEBOOKS": "nowhere"}),
    "no notebooks to run": Case(
        f"{NBLIB} run --all", 2, "There are no notebooks", {"NBLIB_NOTEBOOKS": "nowhere"}
    ),
    "notebooks is a file": Case(
        f"{NBLIB} run 00", 2, "Unknown notebook", {"NBLIB_NOTEBOOKS": "a-file"}
    ),
    "notebooks is a circle": Case(LIST, 2, "There are no notebooks", {"NBLIB_NOTEBOOKS": "circle"}),
    "profiles are not there": Case(LIST, 0, "profiles: none", {"NBLIB_PARAMETERS": "nowhere"}),
    "profiles are a circle": Case(LIST, 0, "profiles: none", {"NBLIB_PARAMETERS": "circle"}),
    "the store is a device": Case(LIST, 0, "00_setup", {"NBLIB_BASE": "/dev/null"}),
    "a run folder of nobody": Case(LIST, 0, "00_setup", {"NBLIB_RUN_DIR": "/nonexistent"}),
    "the working folder is gone": Case(f"cd gone && rmdir ../gone && {LIST}", 0, "00_setup"),
    "the working folder is gone, report": Case(
        f"cd gone && rmdir ../gone && {REPORT}", 0, "index.html"
    ),
    "stdin closed": Case(f"{LIST} <&-", 0, "00_setup"),
    "stdout closed": Case(f"{REPORT} >&- && cat outputs/index.html", 0, "No runs yet"),
    "stdout closed, help": Case(f"{NBLIB} --help >&-", 0),
    "stderr closed": Case(f"{NBLIB} run 99 2>&-", 2),
    "all closed": Case(f"{LIST} <&- >&- 2>&-", 0),
    "all closed, an error": Case(f"{NBLIB} run 99 <&- >&- 2>&-", 2),
    "stdout full": Case(f"{LIST} > /dev/full", 74, "nblib: stdout: No space left on device."),
    "stdout full, help": Case(
        f"{NBLIB} --help > /dev/full", 74, "nblib: stdout: No space left on device."
    ),
    "stderr full": Case(f"{NBLIB} run 99 2> /dev/full", 2),
    "nobody reads": Case(f"{NOBODY}; {LIST}) | true", 141),
    "nobody reads the help": Case(f"{NOBODY}; {NBLIB} sweep --help) | true", 141),
    "nobody reads the completion": Case(f"{NOBODY}; {NBLIB} completion bash) | true", 141),
    "nobody reads the error": Case(f"{NOBODY}; {NBLIB} run 99 2>&1) | true", 2),
    "few files": Case(f"ulimit -n 16; {LIST}", 0, "00_setup"),
    "a link to the command's folder": Case(
        f"ln -s . loop; cd loop/loop/loop && {LIST}", 0, "00_setup"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_hostile_surrounding(workbook, case):
    ending = _ends(workbook, case)
    assert ending.code == case.code and case.words in ending.out + ending.err, ending
    assert (workbook / "a-file").read_bytes() == b"earlier results"


def _ends(workbook: Path, case: Case, *, foreseen: bool = True) -> Ending:
    changed = {name: value for name, value in case.set.items() if value is not None}
    for name in ("NBLIB_OUTPUTS", "NBLIB_NOTEBOOKS", "NBLIB_PARAMETERS"):
        if changed.get(name) and not changed[name].startswith("/"):
            changed[name] = str(workbook / changed[name])
    # unbuffered, argparse would pass over a help that cannot be written
    environment = {
        k: v for k, v in os.environ.items() if k not in (*case.set, "PYTHONUNBUFFERED")
    } | changed
    process = subprocess.run(
        ["/bin/bash", "-c", case.command],
        cwd=workbook,
        env=environment,
        capture_output=True,
        timeout=SECONDS,
        text=True,
        errors="backslashreplace",
    )
    ending = Ending(process.returncode, process.stdout, process.stderr)
    if foreseen:
        held(ending)
    return ending


@pytest.mark.slow
@pytest.mark.parametrize("place", ["outputs", "folder"])
def test_what_nobody_foresaw(workbook, place):
    """One sentence, code 70, and a file with the traceback: among the outputs, or else in the
    temporary folder.
    """
    (workbook / place).mkdir(exist_ok=True)
    broken = (
        b"import nbworkbook.jobs as j\ndef names(): raise KeyError('a\\nb' * 200)\nj.names = names"
    )
    plant(workbook / "broken" / "sitecustomize.py", broken)
    surroundings = {
        "PYTHONPATH": f"{workbook}/broken:{os.environ.get('PYTHONPATH', '')}",
        "TMPDIR": f"{workbook}/folder",
    }
    ending = _ends(workbook, Case(LIST, 70, set=surroundings), foreseen=False)
    assert ending.code == 70 and ending.out == ""
    (line,) = ending.err.splitlines()
    assert (
        line.startswith("nblib: internal error (KeyError: 'a\\nba\\nb")
        and "…); please report it with " in line
    )
    (file,) = (workbook / place).glob("nblib-error-*.txt")
    assert str(file) == line.rpartition(" ")[2]
    assert "Traceback" in file.read_text() and "in names" in file.read_text()
