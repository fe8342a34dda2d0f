"""CHECKS.md and the README's table are what the records say, and every id in the graph of causes is that of a check."""

import re
from pathlib import Path

import pytest

from train_doctor import checks, logs, pages
from train_doctor.causes import CAUSES
from train_doctor.check import check, fires
from train_doctor.finding import ERROR, NOTE, OK, WARN

HERE = Path(__file__).parents[1]
IDS = [c.id for c in checks.ALL]
# neither explain another finding nor are explained by one; a new check is in CAUSES or here
ALONE = {"D8", "F13", "F18", "F19", "N10", "N18", "N19", "S14", "S15", "S17"}


@pytest.mark.parametrize("name, made", [("CHECKS.md", lambda text: pages.page()), ("README.md", pages.readme)])
def test_the_files_are_those_of_the_code(name, made):
    text = (HERE / name).read_text()
    assert text == made(text), "run in doctor/: python -m train_doctor.pages"


def test_every_check_has_a_row_and_a_section_that_it_links_to():
    text = pages.page()
    for c in checks.ALL:
        assert f"| [{c.id}](#" in text and f"\n## {c.id} {c.name}\n" in text, c.id
    assert text.count("\n## ") == len(IDS) == len(set(IDS))


@pytest.mark.parametrize("one", checks.ALL, ids=IDS)
def test_a_page_is_whole(one):
    assert one.symptom.endswith(".") and one.about
    for key, fault in one.faults.items():
        assert re.fullmatch(r"[a-z0-9-]+(/[a-z-]+)?", key) and set(fault.severities) <= {ERROR, WARN, NOTE}
        assert fault.cause.endswith(".") and fault.fix.endswith("."), key
    plain = [key for key in one.faults if "/" not in key]
    assert not plain or list(one.faults)[0] == plain[0], "the first is what is said where a check names none"


def test_every_id_in_the_graph_of_causes_is_that_of_a_check_and_the_reverse():
    graph = set(CAUSES) | {effect for effects in CAUSES.values() for effect in effects}
    graph -= {fault.id for fault in logs.FAULTS}
    assert graph <= set(IDS), sorted(graph - set(IDS))
    assert set(IDS) - graph == ALONE


def test_a_record_quotes_its_page():
    @check("X1")
    def slow(e):
        """It is slow.

        Fires when it is slow.

        WARN or NOTE too-slow: {what} is slow.
        Fix: Make {what} fast.
        ERROR too-slow/standing: It stands. Fix: Push it.
        """
        return e

    assert (slow.id, slow.name, slow.symptom, slow.about) == (
        "X1",
        "too-slow",
        "It is slow.",
        ("Fires when it is slow.",),
    )
    finding = slow.look(fires("9 s", "1 s", NOTE, what="the loop"))
    assert finding[:5] == ("X1", "too-slow", NOTE, "9 s", "1 s")
    assert finding[5:7] == ("the loop is slow.", "Make the loop fast.")
    assert slow.look(fires("9 s", "1 s", what="")).severity == WARN
    standing = slow.look(fires("0", "1", fault="too-slow/standing"))
    assert (standing.name, standing.severity, standing.fix) == ("too-slow", ERROR, "Push it.")
    assert slow.look(OK) is OK
    with pytest.raises(ValueError, match="severity = 'ERROR': the page of X1 allows WARN, NOTE"):
        slow.look(fires("9 s", "1 s", ERROR, what=""))


def test_a_page_that_cannot_be_read_is_refused():
    with pytest.raises(RuntimeError, match="-OO"):
        check("X1")(lambda e: OK)

    def bare(e):
        """It is slow.

        Fires when it is slow.
        """

    with pytest.raises(ValueError, match="the page of X1 ends in 'Fires when it is slow.'"):
        check("X1")(bare)
