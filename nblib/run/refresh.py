"""Execute notebooks on their defaults and store the outputs in them, so that they can be read without being run.

Only outputs and execution counts are taken over, and only when every cell of the notebook succeeded: sources, ids and
tags stay what the author wrote. What would differ on every execution without telling anything is dropped: times,
papermill's metadata, widget state. The runs themselves happen in a temporary folder.

Footgun: a cell that prints the path of its run folder prints a different one each time.
"""

import copy
import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from nblib import files, paths
from nblib.run import jobs, runner

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"


def refresh(names: Sequence[str]) -> list[runner.Outcome]:
    """Re-execute the notebooks; those that succeed are replaced, the others stay as they are."""
    planned = jobs.plan(names)
    outputs = paths.outputs()
    store, before = os.environ.get("NBLIB_BASE") or str(outputs / "base"), dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="refresh-", dir=files.make_folder(outputs)) as folder:
        os.environ |= {"NBLIB_OUTPUTS": folder, "NBLIB_BASE": store}
        try:
            outcomes = runner.run(planned, jobs_at_once=None, force=True, keep_going=True)
        finally:
            os.environ.clear()
            os.environ |= before
        for job, outcome in zip(planned, outcomes):
            if outcome.status == "done":
                executed = json.loads((outcome.folder / "notebook.ipynb").read_text(encoding="utf-8"))
                source = json.loads(job.path.read_text(encoding="utf-8"))
                files.write(job.path, to_text(with_outputs(source, executed)))
        return [outcome._replace(folder=None) for outcome in outcomes]


def with_outputs(source: dict[str, Any], executed: dict[str, Any]) -> dict[str, Any]:
    """The source notebook with the outputs of the executed one, whose cells are the same ones in the same order."""
    notebook = copy.deepcopy(source)
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    notebook["nbformat"], notebook["nbformat_minor"] = 4, max(5, notebook.get("nbformat_minor", 5))
    for number, (cell, ran) in enumerate(zip(notebook["cells"], executed["cells"], strict=True)):
        cell.setdefault("id", f"cell-{number:02d}")
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)
        if cell["cell_type"] == "code":
            cell["execution_count"] = ran["execution_count"]
            cell["outputs"] = [_without_widget(output) for output in ran["outputs"]]
    return notebook


def to_text(notebook: dict[str, Any]) -> str:
    """The one spelling in which Jupyter writes a notebook."""
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _without_widget(output: dict[str, Any]) -> dict[str, Any]:
    data = output.get("data", {})
    return output | {"data": {kind: body for kind, body in data.items() if kind != WIDGET}} if data else output
