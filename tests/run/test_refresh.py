"""Refreshing stores outputs in a notebook and touches nothing else."""

import json

import pytest
import small_notebooks
from small_notebooks import write

from nblib.run import refresh


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.mark.kernel
def test_refresh_stores_outputs_and_touches_nothing_else(workbook):
    shows = "from IPython.display import HTML\nHTML('<b>x</b>')"
    good = write("00_a", "import time\nprint('one', steps, flush=True)\ntime.sleep(0.4)\nprint('two')", shows)
    bad = write("01_b", "1 / 0")
    before, broken = json.loads(good.read_text()), bad.read_bytes()
    assert [outcome.status for outcome in refresh.refresh(["00", "01"])] == ["done", "failed"]
    first = good.read_bytes()
    after = json.loads(first)
    assert bad.read_bytes() == broken, "a notebook that failed was replaced"
    assert [cell["execution_count"] for cell in after["cells"][1:]] == [1, 2, 3]
    assert after["cells"][2]["outputs"] == [
        {"name": "stdout", "output_type": "stream", "text": ["one 3\n", "two\n"]},
    ]
    assert after["metadata"] == {"kernelspec": refresh.KERNEL, "language_info": {"name": "python"}}
    for old, new in zip(before["cells"], after["cells"], strict=True):
        assert (old["id"], old["metadata"], old["source"]) == (new["id"], new["metadata"], "".join(new["source"]))
    refresh.refresh(["00"])
    assert good.read_bytes() == first, "refreshing twice gives another file"
    assert [path.name for path in (workbook / "outputs").iterdir()] == []
