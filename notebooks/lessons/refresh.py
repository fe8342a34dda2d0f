"""Execute notebooks on their defaults and store the outputs in them, so that they can be read without being run.

Only outputs and execution counts are taken over, and only when every cell of the notebook succeeded: sources, ids and
tags stay what the author wrote. What would differ on every execution without telling anything is dropped: times of
cells, papermill's metadata, widget state. The runs themselves happen in a temporary folder, on copies of the
notebooks. A notebook that its author saved meanwhile stays as it is, since its new code has not run.

Footgun: a cell that prints the path of its run folder prints a different one each time.
"""

import contextlib
import copy
import json
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from nblib import files, paths
from nblib.run import jobs, runner
from nblib.run.by_hand import WIDGET

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# JupyterLab shows the beginning of the first output of a cell whose outputs are collapsed
ANSWER = {"name": "stdout", "output_type": "stream", "text": ["The answer to the question above:\n"]}


def refresh(names: Sequence[str]) -> list[runner.Outcome]:
    """Re-execute the notebooks; those that succeed are replaced, the others stay as they are."""
    planned = [job._replace(resume=f"nblib refresh {job.notebook}") for job in jobs.plan(names)]
    sources = [job.path.read_bytes() for job in planned]
    outputs, before = paths.outputs(), dict(os.environ)
    runner.sweep(outputs, "refresh-*")
    folder = files.make_folder(outputs / f"refresh-{secrets.token_hex(4)}")
    with contextlib.ExitStack() as after:
        after.callback(shutil.rmtree, folder, ignore_errors=True)
        after.callback(os.close, files.claim(folder))  # unlocked, it counts as what a dead one left
        copies = [job._replace(path=folder / job.path.name) for job in planned]
        for copied, source in zip(copies, sources):
            files.write(copied.path, source)
        os.environ |= {"NBLIB_OUTPUTS": str(folder), "NBLIB_BASE": str(paths.store())}
        try:
            outcomes = runner.run(copies, jobs_at_once=None, force=True, keep_going=True, detail="all")
        finally:
            os.environ.clear()
            os.environ |= before
        return [_stored(*each) for each in zip(planned, sources, outcomes)]


def _stored(job: jobs.Job, source: bytes, outcome: runner.Outcome) -> runner.Outcome:
    """The outcome, after the outputs were stored if the notebook is still the one that was executed."""
    status = sentence = ""
    try:
        if outcome.status == "done" and job.path.read_bytes() == source:
            executed = json.loads((outcome.folder / "notebook.ipynb").read_bytes())
            notebook = with_outputs(json.loads(source), executed)
            # which are long, for a batch to know; to the half minute, so that the next refresh changes nothing
            notebook["metadata"]["nblib"] = {"seconds": 30 * round(outcome.seconds / 30)}
            files.write(job.path, to_text(notebook))
        elif outcome.status == "done":
            status, sentence = "failed", f"{job.notebook} changed while it was executed; its outputs are not stored"
    except OSError as error:
        status, sentence = "unwritten", f"{job.notebook} was executed, but: {error}"
    if status:
        print(f"nblib: {sentence}; again with: {job.resume}", file=sys.stderr)
        outcome = outcome._replace(status=status, sentence=sentence)
    return outcome._replace(folder=None)


def with_outputs(source: dict[str, Any], executed: dict[str, Any]) -> dict[str, Any]:
    """The source notebook with the outputs of the executed one, whose cells are the same ones in the same order."""
    notebook = copy.deepcopy(source)
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    notebook["nbformat"], notebook["nbformat_minor"] = 4, max(5, notebook.get("nbformat_minor", 5))
    for number, (cell, ran) in enumerate(zip(notebook["cells"], executed["cells"], strict=True)):
        cell.setdefault("id", f"cell-{number:02d}")
        hidden = cell["metadata"].get("jupyter", {}).get("outputs_hidden")  # the answer to a question, collapsed
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        if hidden:
            cell["metadata"]["jupyter"] = {"outputs_hidden": True}
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)
        if cell["cell_type"] == "code":
            cell["execution_count"] = ran["execution_count"]
            cell["outputs"] = [ANSWER] * bool(hidden) + [_without_widget(output) for output in ran["outputs"]]
    return notebook


def to_text(notebook: dict[str, Any]) -> str:
    """The one spelling in which Jupyter writes a notebook."""
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _without_widget(output: dict[str, Any]) -> dict[str, Any]:
    data = output.get("data", {})
    return output | {"data": {kind: body for kind, body in data.items() if kind != WIDGET}} if data else output
