"""Runs by name: the right one is found, or a sentence says what is near; notes break nothing; a kill leaves no half."""

import os
import shutil
import subprocess
import sys

import pytest
import small_notebooks
from small_notebooks import run_one, write

from nblib import files
from nblib.run import manage, runner, runs
from nblib.run.parameters import ParameterError

NAMES = ("10_lrc/20260101-000000-aaa111", "10_lrc/20260102-000000-bbb222", "11_ard/20260103-000000-aaa333")


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    folder = small_notebooks.steady_workbook(tmp_path, monkeypatch)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def three(workbook):
    """Three run folders, as records alone."""
    places = [files.make_folder(workbook / "outputs" / name) for name in NAMES]
    for place in places:
        runs.note(place, {"status": "done", "started": 1.7e9, "seconds": 61.25})
        files.merge(place / "result.json", {"a": 1, "b": 2, "c": 3, "d": 4, "recovered": 0.94})
    return places


@pytest.mark.parametrize(
    "name, which",
    [
        ("10", 1),
        ("10_lrc", 1),
        ("10~1", 0),
        ("10_lrc~0", 1),
        ("11", 2),
        ("aaa111", 0),
        ("0102-00", 1),
        (NAMES[0], 0),
        (NAMES[2].partition("/")[2], 2),
        (f"outputs/{NAMES[1]}/", 1),
        (f"./outputs/10_lrc/../{NAMES[2]}", 2),
    ],
)
def test_a_run_is_found_by_any_of_its_names(three, name, which):
    assert manage.find(name) == three[which]


def test_an_absolute_path_is_one_of_its_names(three):
    assert manage.find(str(three[0])) == three[0]


@pytest.mark.parametrize(
    "name, said",
    [
        ("1", "Unknown run '1'; the nearest are"),
        ("aaa112", "the nearest are aaa111"),
        ("10_lrk", "the nearest are 10_lrc"),
        ("10~2", "Unknown run '10~2'"),
        ("10~x", "Unknown run"),
        ("-000000-", "'-000000-' may be 3 things: 20260103-000000-aaa333, 20260102"),
        ("outputs", "Unknown run"),
        ("outputs/10_lrc", "Unknown run"),
        ("/etc/passwd", "Unknown run"),
        ("link/", "Unknown run"),
        ("./link", "Unknown run"),
        ("outputs/base/x", "Unknown run"),
        ("elsewhere/1", "Unknown run"),
        ("", "Unknown run ''"),
        ("\x00/", "Unknown run"),
        ("../../etc/passwd", "Unknown run"),
        ("x" * 5000, "Unknown run 'xxx"),
    ],
)
def test_what_is_no_run_or_several_is_one_sentence(workbook, three, name, said):
    (workbook / "link").symlink_to(three[0])
    (workbook / "outputs" / "linked").symlink_to(three[0].parent)
    for place in ("outputs/base/x", "elsewhere/1"):
        files.merge(workbook / place / "run.json", {"status": "done"})
    assert sorted(manage.folders()) == sorted(three), "what a link leads to is no second run"
    with pytest.raises(ParameterError) as caught:
        manage.find(name)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 700


def test_a_short_name_of_two_notebooks_is_ambiguous(three, workbook):
    files.merge(workbook / "outputs" / "10_other" / "1" / "run.json", {"status": "done"})
    with pytest.raises(ParameterError, match="'10' may be 2 things: 10_lrc, 10_other"):
        manage.find("10")
    assert manage.find("10_lrc") == three[1]


def test_without_any_run_it_says_so(workbook):
    with pytest.raises(ParameterError, match="there are no runs yet"):
        manage.find("10")
    assert manage.listing().split() == "run status started time tags results".split()


def test_the_list_shows_status_time_tags_and_the_headline(three):
    runs.note(three[0], {"headline": ["recovered", "no such result"], "tags": ["best", "v1"]})
    runs.note(three[1], {"status": "failed", "seconds": "long", "started": "x", "tags": 5, "headline": 7})
    (three[2] / "run.json").write_bytes(b"\xff")
    head, *lines = manage.listing().splitlines()
    assert [line.split()[0] for line in lines] == sorted(NAMES, key=lambda name: name[7:], reverse=True)
    assert "unreadable" in lines[0] and "failed" in lines[1] and "a 1, b 2, c 3, d 4" in lines[1]
    assert "61.2 s" in lines[2] and "best, v1" in lines[2] and lines[2].endswith("recovered 0.94")
    assert len(manage.listing("11_ard").splitlines()) == 2


@pytest.mark.kernel
def test_a_note_breaks_neither_the_seal_nor_what_is_done(workbook):
    write("00_a", "from nblib.run import runs\nrun = runs.begin('00_a', globals())\nrun.result(loss=1.5)\nrun.finish()")
    folder = run_one("00_a").folder
    before = {name: content for name, content in small_notebooks.files(folder).items() if name != "run.json"}
    facts = runs.record(folder)
    said = manage.note(folder, text=" lower rate\nthan before ", tags=["best", "v1", "best"])
    assert said.splitlines()[1] == "tags: best, v1" and said.endswith("lower rate than before")
    manage.note(folder, text="again", untag=["v1"])
    record = runs.record(folder)
    assert record["tags"] == ["best"] and [n["text"] for n in record["notes"]] == ["lower rate\nthan before", "again"]
    assert all(abs(n["time"] - record["finished"]) < 60 for n in record["notes"])
    assert {k: record[k] for k in facts if k != "sha256"} == {k: v for k, v in facts.items() if k != "sha256"}
    assert runs.is_done(folder) and runs.problem(folder) is None and run_one("00_a").status == "skipped"
    assert before == {k: v for k, v in small_notebooks.files(folder).items() if k != "run.json"}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"text": ""}, "text has 0 characters, allowed: 1 .. 2,000"),
        ({"text": "x" * 2001}, "text has 2,001 characters"),
        ({"tags": ["good", "a b"]}, "--tag 'a b': allowed are 1 to 40"),
        ({"tags": [""]}, "--tag ''"),
        ({"tags": ["x" * 41]}, "--tag 'xxx"),
        ({"tags": ["<script>"]}, "--tag '<script>'"),
        ({"tags": ["ok\n"]}, "--tag"),
        ({"untag": ["bets"]}, "unknown tag 'bets'; did you mean 'best'?"),
    ],
)
def test_a_bad_note_changes_nothing(three, given, said):
    manage.note(three[0], tags=["best"])
    before = small_notebooks.files(three[0])
    with pytest.raises(ParameterError) as caught:
        manage.note(three[0], **{"text": "good", **given})
    assert said in str(caught.value) and small_notebooks.files(three[0]) == before


def test_the_longest_note_and_tag_are_taken_and_asking_writes_nothing(three):
    manage.note(three[0], text="é" * 2000, tags=["x" * 40, "A.b_c-9"])
    before = small_notebooks.files(three[0])
    assert "é" * 2000 in manage.note(three[0]) and small_notebooks.files(three[0]) == before


def test_a_damaged_record_takes_no_note(three):
    (three[0] / "run.json").write_text('{"status": "done", "sha256": "0"}')
    with pytest.raises(files.Unreadable):
        manage.note(three[0], text="x")
    assert (three[0] / "run.json").read_text() == '{"status": "done", "sha256": "0"}'
    assert not list(three[0].glob("damaged-*"))


def test_a_record_that_somebody_edited_is_no_surprise(three):
    runs.note(three[0], {"notes": [1, {"text": 5}, {"time": "x"}], "tags": "best"})
    assert "5" in manage.note(three[0], tags=["new"]) and runs.record(three[0])["tags"] == ["new"]


def test_a_run_that_is_locked_takes_no_note_and_is_not_deleted(three):
    """Another process holds the lock, as a kernel does."""
    code = f"import sys; from nblib import files; files.claim({str(three[0])!r}); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    before = small_notebooks.files(three[0])
    for refused in (
        lambda: manage.note(three[0], text="x"),
        lambda: manage.size(three[0]),
        lambda: manage.remove(three[0]),
    ):
        with pytest.raises(ParameterError, match="while it runs or its kernel is open"):
            refused()
    assert "tags: none" in manage.note(three[0]), "what is there can be read"
    assert small_notebooks.files(three[0]) == before
    holder.communicate("\n")
    manage.remove(three[0])
    assert not three[0].exists()


def test_deleting_follows_no_link_and_leaves_everything_else(workbook, three):
    files.write(workbook / "precious" / "file", "x")
    (three[0] / "to").symlink_to(workbook / "precious")
    others = {path: small_notebooks.files(path) for path in (three[1], three[2], workbook / "precious")}
    assert "done, 0.0 MiB" in manage.size(three[0])
    manage.remove(three[0])
    assert not three[0].exists() and {path: small_notebooks.files(path) for path in others} == others
    assert {path.name for path in (workbook / "outputs").iterdir()} == {"10_lrc", "11_ard"}


KILLED = """import os, shutil, sys
from pathlib import Path
from nblib import files
from nblib.run import manage
def die(*_, **__):
    os._exit(9)
target, name = sys.argv[1:]
module, attribute = {"rename": (os, "rename"), "flush": (files, "flush"), "rmtree": (shutil, "rmtree")}[name]
setattr(module, attribute, die)
manage.remove(Path(target))"""


@pytest.mark.parametrize("moment, there", [("rename", True), ("flush", False), ("rmtree", False)])
def test_killed_while_it_deletes_there_is_the_run_or_nothing_that_counts(workbook, three, moment, there):
    before = small_notebooks.files(three[0])
    assert subprocess.run([sys.executable, "-c", KILLED, str(three[0]), moment]).returncode == 9
    assert (three[0] in manage.folders()) is there
    if there:
        assert small_notebooks.files(three[0]) == before
    assert len(manage.folders()) == 2 + there and len(list((workbook / "outputs").iterdir())) == 3 - there
    runner._remove_leftovers(["10_lrc"])  # as the next `nblib run` does
    assert len(manage.folders()) == 2 + there
    assert sorted(p.name for p in (workbook / "outputs").iterdir()) == ["10_lrc", "11_ard"]


def test_a_runner_that_looks_for_its_run_meets_no_half_of_one(three):
    """Whoever looks holds the lock on the notebook's folder."""
    home = files.claim(three[0].parent)
    try:
        code = f"from pathlib import Path; from nblib.run import manage; manage.remove(Path({str(three[0])!r}))"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    finally:
        os.close(home)
    assert "ParameterError" in process.stderr and three[0].exists()
    shutil.rmtree(three[0])
