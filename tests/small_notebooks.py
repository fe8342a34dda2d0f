"""A workbook of tiny notebooks in a temporary folder, for the tests of parameters, runner and
command line.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from nbworkbook import code_hash, jobs, runner, runs

PARAMETERS = """steps: int = 3  # optimizer steps [1 .. 100]
lr: float = 1e-3  # learning rate [0 .. 1]
precision: str = "auto"  # dtype [auto, fp32]
sizes: list[int] = [1, 2]  # layer sizes [1 .. 9]
shuffle: bool = True  # mix the data"""


def write(
    name: str, *sources: str, parameters: str = PARAMETERS, kernelspec: dict | None = None
) -> Path:
    """A notebook of a title, the parameters cell and one code cell per source, where
    NBLIB_NOTEBOOKS says.
    """
    if kernelspec is None:
        kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [
        {
            "cell_type": "markdown",
            "id": "title",
            "metadata": {},
            "source": f"# About {name} & <more>",
        }
    ]
    for number, source in enumerate((parameters, *sources)):
        tags = {"tags": ["parameters"]} if number == 0 else {}
        code = {"cell_type": "code", "id": f"code-{number}", "metadata": tags, "source": source}
        cells.append(code | {"outputs": [], "execution_count": None})
    metadata = {"kernelspec": kernelspec} if kernelspec else {}
    path = Path(os.environ["NBLIB_NOTEBOOKS"]) / f"{name}.ipynb"
    path.write_text(
        json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def move_workbook(folder: Path, monkeypatch) -> Path:
    """Point nblib to an empty workbook in the folder."""
    for name in ("notebooks", "parameters"):
        (folder / name).mkdir()
    for name in ("notebooks", "parameters", "outputs"):
        monkeypatch.setenv(f"NBLIB_{name.upper()}", str(folder / name))
    monkeypatch.delenv("NBLIB_RUN_DIR", raising=False)
    return folder


def steady_workbook(folder: Path, monkeypatch) -> Path:
    """The same, and every run has the same code: somebody may be editing nblib while a test
    runs.
    """
    monkeypatch.setattr(code_hash, "reached", lambda *_, **__: {})
    return move_workbook(folder, monkeypatch)


def run_one(name: str, **options) -> runner.Outcome:
    (outcome,) = runner.run(jobs.plan([name]), **options)
    return outcome


def sentence_of(outcome: runner.Outcome, status: str = "failed") -> str:
    """The one sentence in which a run that did not succeed says how to go on."""
    assert outcome.status == status == runs.status(outcome.folder) and not runs.is_done(
        outcome.folder
    )
    assert (
        len(outcome.sentence.splitlines()) == 1
        and f"nblib run {outcome.notebook}" in outcome.sentence
    )
    assert not (outcome.folder / "notebook.partial.ipynb").exists()
    return outcome.sentence


def start(*arguments: str) -> subprocess.Popen:
    """`nblib` as a process of its own."""
    command = [sys.executable, "-u", "-m", "nbworkbook.cli", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


def nblib(*arguments: str) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
