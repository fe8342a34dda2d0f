"""Runs by name: the right one is found, or a sentence says what is near; and the list of them."""

import shutil

import pytest
import small_notebooks

from nblib import files
from nbworkbook import manage, runs
from nbworkbook.parameters import ParameterError

NAMES = (
    "10_lrc/20260101-000000-aaa111",
    "10_lrc/20260102-000000-bbb222",
    "11_ard/20260103-000000-aaa333",
)


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
    assert (
        said in str(caught.value)
        and len(str(caught.value).splitlines()) == 1
        and len(str(caught.value)) < 700
    )


def test_a_short_name_of_two_notebooks_is_ambiguous(three, workbook):
    files.merge(workbook / "outputs" / "10_other" / "1" / "run.json", {"status": "done"})
    with pytest.raises(ParameterError, match="'10' may be 2 things: 10_lrc, 10_other"):
        manage.find("10")
    assert manage.find("10_lrc") == three[1]


def test_without_any_run_it_says_so(workbook):
    with pytest.raises(ParameterError, match="there are no runs yet"):
        manage.find("10")
    assert manage.listing().split() == "run status started time results".split()


def test_the_list_shows_status_time_and_the_headline(three):
    runs.note(three[0], {"headline": ["recovered", "no such result"]})
    runs.note(three[1], {"status": "failed", "seconds": "long", "started": "x", "headline": 7})
    (three[2] / "run.json").write_bytes(b"\xff")
    head, *lines = manage.listing().splitlines()
    assert [line.split()[0] for line in lines] == sorted(
        NAMES, key=lambda name: name[7:], reverse=True
    )
    assert "unreadable" in lines[0] and "failed" in lines[1] and "a 1, b 2, c 3, d 4" in lines[1]
    assert "61.2 s" in lines[2] and lines[2].endswith("recovered 0.94")
    assert len(manage.listing("11_ard").splitlines()) == 2


def test_a_run_whose_folder_was_deleted_is_gone_and_the_others_stay(three):
    shutil.rmtree(three[1])
    assert manage.find("10") == three[0] and len(manage.listing().splitlines()) == 3
