"""A run that a person makes in JupyterLab: the folder it takes, and the page that is kept of it.

Run All continues. If the newest run by hand of a notebook had the same parameters and the same
code, is unfinished and has checkpoints, the set-up cell takes its folder, and each training goes on
from its last checkpoint as under the runner. The kernel holds the lock on the folder as long as it
lives, so another kernel that opens the same notebook begins a run of its own.

JupyterLab saves the notebook itself. `run.finish()` copies the file as it lies on the disk then,
and the record says when it was saved.

Footgun: "the same code" is that of the file. What was edited in the page and not saved cannot be
known here.

Footgun: JupyterLab saves every two minutes and on Ctrl+S, not when a cell ends. Save the page and
execute `run.finish()` once more to keep it with the outputs of its last cells.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nblib import files, paths
from nbworkbook import jobs, parameters, run_record

# What the record of a run says of an earlier attempt, and what is not so any more once it goes on.
OF_AN_ENDING = ("finished", "seconds", "sealed", "sentence", "failed_in", "page", "left")


class Begun(NamedTuple):
    """How a run by hand begins."""

    folder: Path | None  # of the run that goes on; None for a new one
    facts: dict[str, Any]  # for its record
    remark: str  # one line for the person, or empty


def find_run_to_continue(
    notebook: str, known: Mapping[str, parameters.Parameter], values: Mapping[str, Any]
) -> Begun:
    """Return the unfinished run that these parameters and this code continue, held by this
    process.
    """
    given = []
    for name, value in values.items():
        if value != known[name].default:
            given.append(parameters.assignment(name, value))

    facts: dict[str, Any] = {"key": None, "inputs": None, "attempts": 1}
    folder, remark = None, ""
    # a module that does not parse: this run will not be continued
    with contextlib.suppress(parameters.ParameterError):
        (job,) = jobs.variants(notebook, [given])
        facts |= {"key": job.key, "inputs": job.inputs}
        folder, remark = _unfinished(notebook, job)

    _end_other_runs_of_this_kernel(folder)
    if folder is not None:
        facts["attempts"] = run_record.record(folder).get("attempts", 1) + 1
        facts |= dict.fromkeys(OF_AN_ENDING)
    return Begun(folder, facts, remark)


def _unfinished(notebook: str, job: jobs.Job) -> tuple[Path | None, str]:
    """Return the newest run by hand if it can go on, held by this process, and a line that says so
    or why not.
    """
    folder, facts = _newest(notebook)
    if folder is None or facts.get("status") == "done" or facts.get("left"):
        return None, ""
    step = _last_step(folder)
    if step is None:
        return None, ""

    # from here on there is something to go on from
    ended = run_record.status(folder)
    was_held = folder in run_record.HELD
    if not run_record.hold(folder):
        return None, f"run {folder.name} is running in another kernel, so this is a new run"
    if not jobs.same(job, facts):
        why = jobs.why(facts.get("inputs") or {}, job.inputs) or "it noted no code"
        if not was_held:
            run_record.let_go(folder)
        return (
            None,
            f"run {folder.name} is unfinished and is not continued, because it differs: {why}",
        )

    ended = ended.replace("stopped, ", "stopped at step ")
    if was_held and ended == "running":
        ended = "its cells were run again"
    instead = "for a new run execute run.leave() and run all cells again"
    return folder, f"continues run {folder.name} from step {step} ({ended}); {instead}"


def _newest(notebook: str) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest run by hand and its record."""
    for path in sorted((paths.outputs() / notebook).glob("*/run.json"), reverse=True):
        with contextlib.suppress(files.Unreadable):
            facts = run_record.record(path.parent)
            if facts.get("by") == "hand":
                return path.parent, facts
    return None, {}


def _last_step(folder: Path) -> int | None:
    """Return the step of the checkpoint that was written last.

    Of one that is being deleted only the folder is new.
    """
    manifests = (folder / "checkpoints").rglob(f"step-{8 * '[0-9]'}/{files.MANIFEST}")
    wrote = {path.stat().st_mtime: path.parent.name for path in manifests}
    return int(wrote[max(wrote)].removeprefix("step-")) if wrote else None


def _end_other_runs_of_this_kernel(goes_on: Path | None) -> None:
    """Give back the locks on the runs that this kernel made before; one that has not ended was
    stopped.
    """
    for folder in [each for each in run_record.HELD if each != goes_on]:
        with contextlib.suppress(files.Unreadable):
            if run_record.record(folder).get("status") == "running":
                run_record.note(folder, {"status": "stopped"})
        run_record.let_go(folder)


def keep_page(folder: Path, notebook: str) -> str:
    """Copy the page as it was saved into the run's folder; return one sentence on what was kept."""
    page = _page_of_this_kernel(notebook)
    if page is None:
        return "not kept: the notebook's file was not found"
    try:
        saved = time.localtime(page.stat().st_mtime)
        files.write(folder / "notebook.ipynb", page.read_bytes())
        return f"kept as saved on {time.strftime('%Y-%m-%d at %H:%M:%S', saved)}"
    except OSError as error:
        return f"not kept: {error}"


def _page_of_this_kernel(notebook: str) -> Path | None:
    """Return the file of the notebook that this kernel belongs to: as JupyterLab and VS Code name
    it, else by its name beside the others.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    names = [
        os.environ.get("JPY_SESSION_NAME"),
        getattr(shell, "user_ns", {}).get("__vsc_ipynb_file__"),
        paths.notebooks() / f"{notebook}.ipynb",
    ]
    for name in filter(None, names):
        path = Path(name)
        if path.suffix == ".ipynb" and path.is_file():
            return path
    return None
