"""The report shows every run, works without a network and lets nothing of a run become markup."""

import base64
import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import small_notebooks
from matplotlib.figure import Figure
from small_notebooks import write

from nblib import files
from nbworkbook import report, runs, show


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
        cell |= {
            "execution_count": 1,
            "outputs": [{"output_type": "stream", "name": "stdout", "text": "<script>"}],
        }
    (run.dir / "notebook.ipynb").write_text(json.dumps(document))
    return run.dir


def test_a_run_with_its_links_its_results_and_no_foreign_markup(workbook):
    folder = a_run()
    page = report.write()
    text = page.read_text() + (folder / "notebook.html").read_text()
    assert text.count("<script") == 2 and "&lt;script&gt;" in text, "the report's own two"
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(|@import""", text), (
        "the report needs the network"
    )
    links = re.findall(r"(?:src|href)='([^#'][^']*)'", page.read_text())
    assert all((page.parent / link).exists() for link in links), links
    assert {"figures/curve.png", "notebook.html"} <= {link.split("/", 2)[-1] for link in links}
    assert (
        "loss 1.25" in page.read_text()
        and "<td>steps</td><td><code>5</code></td>" in page.read_text()
    )
    assert "<td>lr</td>" not in page.read_text(), (
        "a parameter with its default value is shown as changed"
    )


def test_a_deleted_run_is_gone_and_an_unreadable_notebook_spoils_nothing(workbook):
    gone, left = a_run("00_gone"), a_run("01_left")
    (left / "notebook.ipynb").write_text("{")
    shutil.rmtree(gone)
    text = report.write().read_text()
    assert left.name in text and gone.name not in text


def test_what_a_reader_asks_first_stands_on_top(workbook):
    """The result that the notebook names, uncut, of its newest run; a run without a duration ends
    in no comma.
    """
    folder = a_run()
    runs.note(
        folder,
        {
            "headline": ["recovered", "sizes"],
            "tags": ["night"],
            "notes": [{"time": 0, "text": "a note"}],
        },
    )
    files.merge(
        folder / "result.json",
        {f"x{n}": n for n in range(50)} | {"recovered": 0.123456789, "sizes": {"a": 7}},
    )
    text = report.write().read_text()
    top = text[: text.index("<section")]
    assert (
        "recovered 0.123457" in top
        and "sizes.a 7" in top
        and "loss" not in top
        and "x1 " not in top
    )
    assert "night" in top and "About 00_good &amp; &lt;more&gt;" in top and ": a note</p>" in text
    assert not re.search(r",\s*<", top), "a dangling comma"


def test_a_stopped_run_says_so(workbook):
    folder = a_run()
    stopped = {
        "corrected": {"step": 44, "of": 600, "by": "Stop"},
        "control": {"step": 1, "of": 600},
    }
    runs.note(folder, {"status": "stopped, 44 of 600", "stopped": stopped})
    text = report.write().read_text()
    sentence = (
        "Stopped at step 44 of 600 (corrected), at step 1 of 600 (control): these numbers come from"
    )
    assert sentence in text and "<b class='stopped'>stopped, 44 of 600</b>" in text


def test_the_sentence_of_a_picture_is_its_caption(workbook):
    folder = a_run()
    run = runs.Run(folder, {})
    run.figure("picture", show.bars({"a": 1.0}, x="x", summary="One bar; <b> & “quotes”, é."))
    text = report.write().read_text()
    assert "alt='One bar; &lt;b&gt; &amp; “quotes”, é.'" in text and "alt='curve'" in text
    assert "<figcaption>One bar; &lt;b&gt; &amp; “quotes”, é.</figcaption>" in text


def inlined(page: Path) -> dict:
    """The JSON of the page, read as the browser reads it: up to the first end of a script."""
    return json.loads(
        re.search(r"<script type='application/json'>(.*?)</script", page.read_text(), re.DOTALL)[1]
    )


def test_thinned_curves_keep_both_ends_and_every_peak(workbook):
    folder = a_run()
    losses = {step: 2.0 + step / 1e5 for step in range(1, 20_001)} | {
        777: 99.0,
        778: -99.0,
        5000: math.nan,
    }
    lines = [
        json.dumps({"run": "long", "step": step, "loss": loss, "tokens": 2 * step})
        for step, loss in losses.items()
    ]
    (folder / "metrics.jsonl").write_text(
        "\n".join([*lines, '{"run": "long", "step": 20000, "loss": 7.5}', '{"torn'])
    )
    facts = inlined(report.write())
    ((training, ((metric, points),)),) = facts["runs"][0]["curves"]
    assert (
        (training, metric) == ("long", "loss")
        and len(points) <= 500
        and "500" in facts["notices"][0]
    )
    assert points[0] == [1, 2, None, 2.00001] and points[-1] == [20_000, None, None, 7.5], (
        "the later line counts"
    )
    assert [777, 1554, None, 99.0] in points and [778, 1556, None, -99.0] in points
    assert [5000, 10_000, None, "nan"] in points
    assert [point[0] for point in points] == sorted(point[0] for point in points)


def test_a_page_that_would_be_too_large_leaves_out_the_curves_of_old_runs(workbook, monkeypatch):
    names = iter(f"20260101-00000{n}-aaaaaa" for n in range(3))
    monkeypatch.setattr(
        runs,
        "new_folder",
        lambda notebook: files.make_folder(workbook / "outputs" / notebook / next(names)),
    )
    for _ in range(3):
        folder = a_run()
        records = ({"step": step, "loss": 1 / step} for step in range(1, 400))
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    whole = report.write()
    assert (
        all(run["curves"] for run in inlined(whole)["runs"]) and len(inlined(whole)["notices"]) == 1
    )
    monkeypatch.setattr(report, "MOST_PAGE", limit := whole.stat().st_size)
    page = report.write()
    facts = inlined(page)
    assert [bool(run["curves"]) for run in facts["runs"]] == [True, True, False] and facts["runs"][
        0
    ]["folder"] > "2026"
    assert "The curves of 1 runs are left out" in facts["notices"][1]
    assert page.stat().st_size < limit


def test_the_policy_names_the_one_script_of_the_page(workbook):
    a_run()
    text = report.write().read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert re.findall(r"script-src ([^;]*);", policy) == [f"'sha256-{digest}'"]
    assert "connect-src 'none'" in policy and "default-src 'none'" in policy
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script
    )
