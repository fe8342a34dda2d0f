"""Execute notebooks on their defaults and store the outputs in them, so that they can be read
without being run.

    python -m nbworkbook.refresh 00_setup      one notebook
    python -m nbworkbook.refresh               all of them, as `make refresh` does

Only outputs and execution counts are taken over, and only when every cell of the notebook
succeeded: sources, ids and tags stay what the author wrote. What would differ on every execution is
dropped: times of cells, papermill's metadata, widget state. The runs lie in a temporary folder. A
notebook that its author saved meanwhile stays as it is: nobody can say which of its code has run.

Footgun: a cell that prints the path of its run folder prints a different one each time.
"""

import argparse
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
from nbworkbook import cli, jobs, runner

WIDGET = "application/vnd.jupyter.widget-view+json"
REFRESH = "python -m nbworkbook.refresh"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# JupyterLab shows the beginning of the first output of a cell whose outputs are collapsed
ANSWER = {
    "name": "stdout",
    "output_type": "stream",
    "text": ["The answer to the question above:\n"],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Refresh the notebooks that are named, or all, and return the exit code."""
    parser = cli.Parser(
        prog=REFRESH,
        description="Execute notebooks on their defaults and store the outputs in them.",
    )
    parser.add_argument(
        "notebooks",
        nargs="*",
        metavar="NOTEBOOK",
        help="all of them when none is named",
    )

    def work(options: argparse.Namespace) -> int:
        parser.parse_args(arguments, options)
        outcomes = refresh(options.notebooks or jobs.names())
        options.ran = True
        print(f"\n{runner.summary(outcomes)}")
        return runner.exit_code(outcomes)

    return cli.guarded(work)


def refresh(names: Sequence[str]) -> list[runner.Outcome]:
    """Execute the notebooks, replace those that succeed, and return how each ended."""
    planned = [job._replace(resume=f"{REFRESH} {job.notebook}") for job in jobs.plan(names)]
    sources = [job.path.read_bytes() for job in planned]
    outputs = paths.outputs()
    before = dict(os.environ)

    # A folder of its own for the runs; unlocked, it counts as what a dead process left.
    runner.sweep(outputs, "refresh-*")
    folder = files.make_folder(outputs / f"refresh-{secrets.token_hex(4)}")
    with contextlib.ExitStack() as after:
        after.callback(shutil.rmtree, folder, ignore_errors=True)
        after.callback(os.close, files.claim(folder))

        # The runs: all of them again, and on to the next after a failure.
        os.environ |= {"NBLIB_OUTPUTS": str(folder), "NBLIB_BASE": str(paths.store())}
        try:
            outcomes = runner.run(
                planned, jobs_at_once=None, force=True, keep_going=True, detail="all"
            )
        finally:
            os.environ.clear()
            os.environ |= before

        return [_stored(*each) for each in zip(planned, sources, outcomes)]


def _stored(job: jobs.Job, source: bytes, outcome: runner.Outcome) -> runner.Outcome:
    """Store the outputs if the notebook is still the one that was executed; return the outcome."""
    status = ""
    sentence = ""
    try:
        if outcome.status == "done":
            if job.path.read_bytes() == source:
                files.write(job.path, _refreshed(source, outcome))
            else:
                status = "failed"
                what = "changed while it was executed; its outputs are not stored"
                sentence = f"{job.notebook} {what}"
    except OSError as error:
        status = "unwritten"
        sentence = f"{job.notebook} was executed, but: {error}"

    if status:
        print(f"nblib: {sentence}; again with: {job.resume}", file=sys.stderr)
        outcome = outcome._replace(status=status, sentence=sentence)
    return outcome._replace(folder=None)


def _refreshed(source: bytes, outcome: runner.Outcome) -> str:
    """Return the text of the notebook with the outputs of its run."""
    executed = json.loads((outcome.folder / "notebook.ipynb").read_bytes())
    notebook = with_outputs(json.loads(source), executed)

    # By its seconds a batch starts the long ones first. They are rounded to half a minute, so that
    # the next refresh changes nothing.
    notebook["metadata"]["nblib"] = {"seconds": 30 * round(outcome.seconds / 30)}
    return to_text(notebook)


def with_outputs(source: dict[str, Any], executed: dict[str, Any]) -> dict[str, Any]:
    """Return the source notebook with the outputs of the executed one.

    Both have the same cells in the same order."""
    notebook = copy.deepcopy(source)
    notebook["metadata"] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    notebook["nbformat"] = 4
    notebook["nbformat_minor"] = max(5, notebook.get("nbformat_minor", 5))

    cells = zip(notebook["cells"], executed["cells"], strict=True)
    for number, (cell, ran) in enumerate(cells):
        cell.setdefault("id", f"cell-{number:02d}")
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)

        # Of the metadata stay the tags, and whether the answer to a question is collapsed.
        is_answer = cell["metadata"].get("jupyter", {}).get("outputs_hidden")
        kept = {key: value for key, value in cell["metadata"].items() if key == "tags"}
        if is_answer:
            kept["jupyter"] = {"outputs_hidden": True}
        cell["metadata"] = kept

        if cell["cell_type"] == "code":
            outputs = [_without_widget(output) for output in ran["outputs"]]
            cell["outputs"] = [ANSWER, *outputs] if is_answer else outputs
            cell["execution_count"] = ran["execution_count"]
    return notebook


def to_text(notebook: dict[str, Any]) -> str:
    """Return the one spelling in which Jupyter writes a notebook."""
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _without_widget(output: dict[str, Any]) -> dict[str, Any]:
    data = output.get("data")
    if not data:
        return output
    return output | {"data": {kind: body for kind, body in data.items() if kind != WIDGET}}


if __name__ == "__main__":
    sys.exit(main())
