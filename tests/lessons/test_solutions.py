"""docs/solutions.ipynb solves every exercise that is judged, and its stored outputs are those of
its code.
"""

import os
import re

import nbclient
import nbformat
import pytest

from lessons.exercises import EXERCISES
from nblib import paths

PAGE = paths.root() / "docs" / "solutions.ipynb"


def said(page) -> str:
    """Return what the cells print, in one piece: no warnings, which are of the machine."""
    outputs = [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def test_every_judged_exercise_is_solved_and_stored_as_right():
    page = nbformat.read(PAGE, as_version=4)
    checked = re.findall(r'^check\("([^"]+)"', "\n".join(c.source for c in page.cells), re.M)
    assert sorted(checked) == sorted(EXERCISES)
    assert sorted(re.findall(r"^(\S+): right\.$", said(page), re.M)) == sorted(EXERCISES)


@pytest.mark.kernel
@pytest.mark.slow
def test_the_page_runs_and_every_answer_is_right():
    page = nbformat.read(PAGE, as_version=4)
    stored = said(page)
    environment = os.environ | {"PYTHONPATH": str(paths.notebooks())}
    client = nbclient.NotebookClient(
        page, timeout=300, resources={"metadata": {"path": PAGE.parent}}
    )
    client.execute(env=environment)
    assert said(page) == stored
