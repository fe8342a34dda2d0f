"""Every rule names a pitfall that its notebook runs."""

import json

from lessons import training_rules
from nblib import paths


def test_every_rule_is_tried_in_the_notebook_that_is_named():
    found = training_rules.rows()
    assert [row["rule"] for row in found] == list(training_rules.RULES)
    for row in found:
        (path,) = paths.notebooks().glob(f"{row['notebook']}_*.ipynb")
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        number = row["what came out"].split(" ")[0]
        assert any(number in "".join(cell["source"]) for cell in cells), f"{path.stem} has no {number}"
        assert row["instead"]
