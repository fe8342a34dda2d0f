"""What a run's folder says about the run: its record run.json, its locks, and whether it is done.

`run.json` carries a hash of itself, and once the run is done the hashes of what came out. `record`,
`problem` and `is_done` notice a byte that changed since. A run is done when its own record says so
*and*, under the runner, every code cell in its notebook executed without error. Papermill calls all
cells "completed" after a dead kernel. A run by hand is done when its record says so: its notebook
is the page as JupyterLab saved it, perhaps before its cells ran.

Whoever executes a run holds a lock on its folder, kernel included, so a status of 'running' without
a lock means that the run was killed.

Footgun: `status` takes the lock for a moment to see whether it is free. Two that look at the same
time may both see "running".
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nblib import files
from nbworkbook import parameters

RUN_DIR = "NBLIB_RUN_DIR"  # set by the runner for the kernel it starts
RUN_LOCK = "NBLIB_RUN_LOCK"  # the number of the open file that is the lock, for the same kernel
SEALED = (
    "result.json",
    "notebook.ipynb",
    "parameters.yaml",
    "metrics.jsonl",
    "environment.json",
    "base.json",
)
HELD: dict[Path, int] = {}  # the locks on runs by hand, held as long as this process lives


def _let_go_all() -> None:
    while HELD:
        os.close(HELD.popitem()[1])


# what outlives the kernel does not keep its run running
os.register_at_fork(after_in_child=_let_go_all)


def hold(folder: Path) -> bool:
    """Take the lock on a run's folder for this process; return False where another one has it."""
    if folder not in HELD:
        lock = files.claim(folder)
        if lock is not None:
            HELD[folder] = lock
    return folder in HELD


def let_go(folder: Path) -> None:
    """Give the lock on a run's folder back, if this process holds it."""
    if folder in HELD:
        os.close(HELD.pop(folder))


def record(folder: Path) -> dict[str, Any]:
    """Return what run.json says, empty when there is none; Unreadable when it is not as it was
    written.
    """
    return files.read_checked_json(folder / "run.json", needed=False)


def note(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to run.json; one that is None goes away."""
    try:
        known = record(folder)
    except files.Unreadable as error:
        files.set_aside(folder / "run.json", str(error))
        known = {}
    merged = known | dict(facts)
    kept = {name: value for name, value in merged.items() if value is not None}
    files.write_checked_json(folder / "run.json", kept)


def seal(folder: Path, names: Sequence[str] = SEALED) -> dict[str, str]:
    """Return the hashes of the files that are there, flushed to the device: what a done run is
    known by.
    """
    found = [folder / name for name in names if (folder / name).exists()]
    for path in found:
        files.flush(path)
    return {path.name: files.sha256(path) for path in found}


def is_done(folder: Path) -> bool:
    """Return whether the run ended well: its record and its notebook say so, no training of it was
    stopped, and neither its notebook nor its result changed since.
    """
    try:
        facts = record(folder)
        if facts.get("status") != "done" or facts.get("stopped"):
            return False
        if _changed(folder, facts, ("notebook.ipynb", "result.json")):
            return False
        if facts.get("by") == "hand":
            return True
        notebook = folder / "notebook.ipynb"
        return notebook.is_file() and unfinished_cell(parameters.cells(notebook)) is None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False  # unreadable, or no notebook


def problem(folder: Path) -> str | None:
    """Return one sentence on what is wrong with the files of a run, or None."""
    try:
        changed = _changed(folder, record(folder), SEALED)
        if changed:
            return changed
        for name in ("result.json", "environment.json"):
            files.read_json(folder / name)
    except files.Unreadable as error:
        return f"unreadable: {str(error).removeprefix('cannot read ')}"
    except (OSError, ValueError, TypeError) as error:  # not ours to read; a record made by hand
        return f"unreadable: {folder}: {getattr(error, 'strerror', None) or error}"
    return None


def _changed(folder: Path, facts: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return a sentence on the first file that is not as it was when the run was done; runs of old
    carry no hashes.
    """
    sealed = dict(facts.get("sealed") or {})
    for name in names:
        if name in sealed and not (folder / name).is_file():
            return f"{name} went away since the run ended"
        if name in sealed and files.sha256(folder / name) != sealed[name]:
            return f"{name} changed since the run ended"
    return None


def unfinished_cell(cells: list[dict]) -> int | None:
    """Return the position of the first code cell that did not execute or that shows an error, or
    None.
    """
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip():
            failed = any(output["output_type"] == "error" for output in cell.get("outputs", []))
            if failed or cell.get("execution_count") is None:
                return index
    return None


def status(folder: Path) -> str:
    """Return one word: done, failed, stopped, running, killed, unreadable or unknown. After it may
    stand where the run ended: "stopped, 44 of 600", "failed in cell 12".
    """
    try:
        facts = record(folder)
        word = str(facts.get("status", "unknown"))
        if word == "running":
            lock = files.claim(folder)
            if lock is None:
                return "running"
            os.close(lock)
            word = "killed"
    except (files.Unreadable, OSError):
        return "unreadable"

    at = next(iter(stopped_trainings(facts).values()), None)
    if word in ("done", "stopped", "killed") and at:
        return f"stopped, {at['step']} of {at['of']}"
    if word == "failed" and facts.get("failed_in"):  # a run by hand of an earlier version
        return f"failed in {facts['failed_in']}"
    return word


def stopped_trainings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainings that were stopped, and at which step; a record may hold anything."""
    trainings = facts.get("stopped")
    pairs = trainings.items() if isinstance(trainings, dict) else ()
    return {
        title: at for title, at in pairs if isinstance(at, dict) and {"step", "of"} <= at.keys()
    }


def stop_sentence(facts: Mapping[str, Any]) -> str:
    """Return what was stopped half-way in one sentence, empty when nothing was."""
    stopped = stopped_trainings(facts).items()
    parts = [f"{title} was stopped at step {at['step']} of {at['of']}" for title, at in stopped]
    return ", ".join(parts)
