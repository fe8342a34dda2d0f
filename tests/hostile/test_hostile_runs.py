"""Run folders in which one file is not what it should be: its row says so, and the others are as
before.
"""

import json
import os
import re
from pathlib import Path

import pytest
import small_notebooks
from attack import attack, done, plant

from nbworkbook import jobs, report

pytestmark = pytest.mark.slow  # not one of them, all together


DEEP = b'{"a": ' * 900 + b"1" + b"}" * 900
CONTENTS = [  # of a JSON file; True where nothing of it can be used
    (b"", True),
    (b"{", True),
    (b"\xff\xfe", True),
    (b"\x00" * 100, True),
    (b"null", True),
    (b"[]", True),
    (b'"text"', True),
    (b"3", True),
    (b"[" * 100_000, True),
    (b'{"a": ' * 100_000, True),
    (b'{"a": ' + b"9" * 5000 + b"}", True),
    (b'{"a": 1} {"b": 2}', True),
    (DEEP, None),  # depends on the depth that Python allows
    (b'{"a": NaN, "b": -Infinity}', False),
    (b'{"a": "\\ud800", "\\udfff": 1}', False),
    ({"": "", "<script>": "<script>alert(1)</script>", "x" * 50_000: "y" * 50_000}, False),
    (
        {"a": 10**4000, "b": 1e308, "c": -0.0, "d": True, "e": None, "f": [[[]]], "g": {"h": {}}},
        False,
    ),
    ("FOLDER", True),
    ("PIPE", True),
    ("LINK /dev/zero", True),
    ("LINK run.json", None),
]
RECORDS = [  # readable, and of types that nobody expects
    {},
    {"status": 3},
    {"status": None},
    {"status": ["done"]},
    {"status": {"done": 1}},
    {"status": "<script>"},
    {"status": "running", "by": ["hand"]},
    {"status": "done", "seconds": "soon"},
    {"status": "done", "seconds": None},
    {"status": "done", "seconds": [1]},
    {"status": "done", "seconds": 1e308},
    {"status": "done", "seconds": 10**400},
    {"status": "done", "seconds": "nan"},
    {"status": "done", "started": "yesterday"},
    {"status": "done", "started": None},
    {"status": "done", "started": 1e300},
    {"status": "done", "started": -1e18},
    {"status": "done", "started": "inf"},
    {"status": "done", "started": {}},
    {"status": "failed", "sentence": ["x"]},
    {"status": "failed", "sentence": {"a": 1}},
    {"status": "failed", "sentence": "<script>alert(1)</script>"},
    {"status": "failed", "sentence": "\ud800"},
    {"status": "done", "key": ["a"]},
    {"status": "done", "key": None},
    {"status": "running", "runner": "nobody"},
    {"status": "running", "runner": -1, "attempts": "many"},
    {"status": "done", "sealed": ["result.json"]},
    {"status": "done", "sealed": {"result.json": 3}},
    {"status": "done", "sealed": {"../../../../etc/passwd": "0"}},
    {"status": "done", "inputs": [1]},
    {"status": "done", "command": 3},
]
CELL = {"cell_type": "code", "id": "a", "metadata": {}, "source": "1", "execution_count": 1}
SHOWN = {"output_type": "display_data", "metadata": {}}
NOTEBOOKS = [  # executed ones; True where no page can be made
    (b"", True),
    (b"{", True),
    (b"\xff", True),
    (b"[" * 100_000, True),
    ({"cells": [], "metadata": {}, "nbformat": 99, "nbformat_minor": 0}, True),
    (
        {
            "cells": [CELL | {"cell_type": "poem"}],
            "metadata": {},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        True,
    ),
    ({"cells": [CELL | {"outputs": 3}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, True),
    (
        {"cells": [CELL | {"outputs": [{}]}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5},
        True,
    ),
    (
        {"cells": [CELL | {"metadata": []}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5},
        True,
    ),
    (
        {
            "cells": [CELL | {"outputs": [SHOWN | {"data": {"text/html": 3}}]}],
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        None,
    ),
    (
        {
            "cells": [CELL | {"outputs": [SHOWN | {"data": {"image/png": {}}}]}],
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        None,
    ),
    (
        {
            "cells": [CELL | {"outputs": [SHOWN | {"data": []}]}],
            "metadata": {},
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        None,
    ),
    ({"cells": [], "metadata": [], "nbformat": 4, "nbformat_minor": 5}, None),
    (
        {
            "cells": [],
            "metadata": {"language_info": 3, "kernelspec": []},
            "nbformat": 4,
            "nbformat_minor": "x",
        },
        None,
    ),
    (
        {"cells": [CELL | {"outputs": [], "source": "<" * 300_000}], "metadata": {}, "nbformat": 4},
        None,
    ),
    ("FOLDER", True),
    ("PIPE", True),
    ("LINK /dev/zero", True),
    ("LINK notebook.ipynb", False),
]
PLANTED = [  # any other file of a run
    ("parameters.yaml", b"\xff"),
    ("parameters.yaml", b"a: !!int foo"),
    ("parameters.yaml", b"a: " + b"[" * 5000),
    ("parameters.yaml", b"a: 1\n" * 100_000),
    ("parameters.yaml", b"'<script>': '<script>'"),
    ("parameters.yaml", "PIPE"),
    ("parameters.yaml", "FOLDER"),
    ("notebook.html", "FOLDER"),
    ("notebook.html", b"\xff"),
    ("metrics.jsonl", b"\xff{"),
    ("metrics.jsonl", "PIPE"),
    ("progress.txt", b"\xff"),
    ("figures", b"a file"),
    ("figures/a.png", "PIPE"),
    ("figures/<script>'\".png", b""),
    ("figures/\udcff.png", b""),
    ("figures/a\nb.png", b""),
    ("checkpoints", b"a file"),
]
NAMES = [
    "\udcff",
    "<script>alert(1)",
    "a\nb",
    "'\"&",
    " ",
    "-",
    "..x",
    "#x",
    "%00",
    "x" * 200,
    "🙂",
]


RUN = "20260101-000000-abcdef"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a healthy run: to convert it anew in every test would be most of the time that
    they take.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = small_notebooks.steady_workbook(tmp_path_factory.mktemp("healthy"), patch)
        small_notebooks.write("00_setup", "1")
        _run(folder, "00_setup")
        report.write()
        return (folder / "outputs" / "00_setup" / RUN / "notebook.html").read_bytes()


@pytest.fixture
def workbook(tmp_path, monkeypatch, page):
    folder = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    for name in ("00_setup", "10_lrc"):
        small_notebooks.write(name, "1")
        plant(folder / "parameters" / f"{name}.sweep.yaml", b"steps: [3, 4]\n")
        plant(_run(folder, name) / "notebook.html", page)
    return folder


def _run(workbook: Path, name: str) -> Path:
    """A finished run of the defaults, as the runner leaves it."""
    folder = workbook / "outputs" / name / RUN
    (job,) = jobs.plan([name])
    plant(
        folder / "run.json",
        {"status": "done", "key": job.key, "seconds": 1.5, "started": 1.7e9, "notebook": name},
    )
    plant(folder / "result.json", {"loss": 1.25})
    plant(folder / "environment.json", {"python": "3"})
    plant(folder / "parameters.yaml", b"steps: 3\n")
    document = json.loads((workbook / "notebooks" / f"{name}.ipynb").read_text())
    for cell in document["cells"][1:]:
        cell |= {"execution_count": 1, "outputs": []}
    plant(folder / "notebook.ipynb", document)
    return folder


def _judged(workbook: Path, capsys, *, unreadable: bool | None, file: str) -> str:
    """List, plan and report: each goes on, the other run is whole, and what is damaged is named.

    The page.
    """
    done(attack(capsys, "list"), "10_lrc  About 10_lrc & <more>\n    profiles: none;")
    done(attack(capsys, "sweep", "10", "--list"), RUN)
    done(attack(capsys, "sweep", "00", "--list"), "steps")
    done(attack(capsys, "list", "--runs"), f"10_lrc/{RUN}")
    done(attack(capsys, "run", "--all", "--dry-run"), "10_lrc is skipped")
    # a circle of links is no run
    if (workbook / "outputs" / "00_setup" / RUN / "run.json").exists():
        done(attack(capsys, "report", f"00_setup/{RUN}", "10"), f"10_lrc/{RUN}")
    done(attack(capsys, "report"), "index.html")
    page = (workbook / "outputs" / "index.html").read_text()
    # the page's own
    assert page.count("<script") == 2 == page.count("</script") and "<td>10_lrc" not in page
    assert page.count("loss 1.25") >= 1 and "1.5 s" in page, "the other run is not shown"
    if unreadable is not None:
        named = re.findall(r"unreadable: [^<]*", page)
        assert bool(named) == unreadable and all(file in sentence for sentence in named), named
    return page


@pytest.mark.parametrize("content, unreadable", CONTENTS, ids=lambda each: ascii(each)[:40])
@pytest.mark.parametrize("file", ["run.json", "result.json", "environment.json"])
def test_a_damaged_json_file(workbook, capsys, file, content, unreadable):
    folder = workbook / "outputs" / "00_setup" / RUN
    plant(folder / file, content)
    if content == "LINK run.json" and file == "run.json":
        unreadable = None  # a circle: glob does not even list it
    _judged(workbook, capsys, unreadable=unreadable, file=file)


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: ascii(each)[:60])
def test_a_record_of_unexpected_types(workbook, capsys, record):
    folder = workbook / "outputs" / "00_setup" / RUN
    (job,) = jobs.plan(["00"])
    plant(folder / "run.json", {"key": job.key} | record)
    _judged(workbook, capsys, unreadable=None, file="run.json")


@pytest.mark.parametrize("content, unreadable", NOTEBOOKS, ids=lambda each: ascii(each)[:60])
def test_a_damaged_executed_notebook(workbook, capsys, content, unreadable):
    folder = workbook / "outputs" / "00_setup" / RUN
    plant(folder / "notebook.ipynb", content)
    os.utime(folder / "notebook.html", (0, 0))
    _judged(workbook, capsys, unreadable=unreadable, file="notebook.ipynb")


@pytest.mark.parametrize("file, content", PLANTED, ids=lambda each: ascii(each)[:40])
def test_a_planted_file(workbook, capsys, file, content):
    plant(workbook / "outputs" / "00_setup" / RUN / file, content)
    _judged(workbook, capsys, unreadable=None, file=file)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("of", ["run", "notebook"])
def test_a_hostile_name(workbook, capsys, name, of):
    """Of a run folder, or of a folder of runs; its links lead to it."""
    folder = workbook / "outputs" / "00_setup" / RUN
    if of == "run":
        folder.rename(folder.with_name(name))
    else:
        folder.parent.rename(workbook / "outputs" / name)
    page = _judged(workbook, capsys, unreadable=None, file="")
    from urllib.parse import unquote

    links = [
        unquote(link, errors="surrogateescape")
        for link in re.findall(r"(?:src|href)='([^#'][^']*)'", page)
    ]
    assert links and all(os.path.exists(workbook / "outputs" / link) for link in links), links


def test_a_run_that_is_a_circle_of_links(workbook, capsys):
    plant(workbook / "outputs" / "00_setup" / "circle", "LINK circle")
    plant(workbook / "outputs" / "00_setup" / "again", "LINK ../00_setup/20260101-000000-abcdef")
    plant(workbook / "outputs" / "a-file", b"")
    plant(workbook / "outputs" / "itself", "LINK .")
    _judged(workbook, capsys, unreadable=False, file="")
