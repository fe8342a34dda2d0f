"""The report shows every run, works without a network and lets nothing of a run become markup."""

import json
import re
import shutil
from pathlib import Path

import pytest
import small_notebooks
from matplotlib.figure import Figure
from small_notebooks import write

from nblib.run import report, runs


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


def a_run(name: str = "00_good") -> Path:
    """A finished run with a figure, a result and an executed notebook, made without a kernel."""
    path = write(name, "print('<script>')")
    run = runs.begin(name, {"steps": 5})
    run.log({"step": 1, "loss": 2.0})
    run.result(loss=1.25, note="<script>")
    figure = Figure((2, 1))
    figure.subplots().plot([1, 2])
    run.figure("curve", figure)
    run.finish()
    document = json.loads(path.read_text())
    for cell in document["cells"][1:]:
        cell |= {"execution_count": 1, "outputs": [{"output_type": "stream", "name": "stdout", "text": "<script>"}]}
    (run.dir / "notebook.ipynb").write_text(json.dumps(document))
    return run.dir


def test_a_run_with_its_links_its_results_and_no_foreign_markup(workbook):
    folder = a_run()
    page = report.write()
    text = page.read_text() + (folder / "notebook.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", text), "the report needs the network"
    links = re.findall(r"(?:src|href)='([^#'][^']*)'", page.read_text())
    assert all((page.parent / link).exists() for link in links), links
    assert {"figures/curve.png", "notebook.html"} <= {link.split("/", 2)[-1] for link in links}
    assert "loss 1.25" in page.read_text() and "<td>steps</td><td><code>5</code></td>" in page.read_text()
    assert "<td>lr</td>" not in page.read_text(), "a parameter with its default value is shown as changed"


def test_a_page_is_converted_again_only_when_its_notebook_changed(workbook):
    folder = a_run()
    report.write()
    stamp = (folder / "notebook.html").stat().st_mtime_ns
    report.write()
    assert (folder / "notebook.html").stat().st_mtime_ns == stamp, "converted again although nothing changed"
    (folder / "notebook.ipynb").touch()
    report.write()
    assert (folder / "notebook.html").stat().st_mtime_ns > stamp


def test_a_deleted_run_is_gone_and_an_unreadable_notebook_spoils_nothing(workbook):
    gone, left = a_run("00_gone"), a_run("01_left")
    (left / "notebook.ipynb").write_text("{")
    shutil.rmtree(gone)
    text = report.write().read_text()
    assert left.name in text and gone.name not in text
