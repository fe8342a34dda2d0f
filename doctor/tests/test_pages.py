"""CHECKS.md and the README's table are what the records say, and every id in the graph of causes is that of a check."""

import re
from pathlib import Path

import pytest

from train_doctor import checks, pages
from train_doctor.causes import CAUSES
from train_doctor.check import fires, record
from train_doctor.finding import ERROR, NOTE, OK, WARN

HERE = Path(__file__).parents[1]
IDS = [check.id for check in checks.ALL]
# neither explain another finding nor are explained by one; a new check is in CAUSES or here
ALONE = {"D8", "F13", "F18", "F19", "N10", "N18", "S14", "S15", "S17"}


@pytest.mark.parametrize("name, made", [("CHECKS.md", lambda text: pages.page()), ("README.md", pages.readme)])
def test_the_files_are_those_of_the_code(name, made):
    text = (HERE / name).read_text()
    assert text == made(text), "run in doctor/: python -m train_doctor.pages"


def test_every_check_has_a_row_and_a_section_that_it_links_to():
    text = pages.page()
    for check in checks.ALL:
        assert f"| [{check.id}](#" in text and f"\n## {check.id} {check.name}\n" in text, check.id
    assert text.count("\n## ") == len(IDS) == len(set(IDS))


@pytest.mark.parametrize("check", checks.ALL, ids=IDS)
def test_a_page_is_whole(check):
    assert check.symptom.endswith(".") and check.about
    for key, fault in check.faults.items():
        assert re.fullmatch(r"[a-z0-9-]+(/[a-z-]+)?", key) and set(fault.severities) <= {ERROR, WARN, NOTE}
        assert fault.cause.endswith(".") and fault.fix.endswith("."), key
    lost = [text for text in check.about if re.match("(ERROR|WARN|NOTE)( or [A-Z]+)? [a-z]+-|Fix:", text)]
    assert not lost, f"a fault is written `SEVERITY name: cause` and, on the next line, `Fix: ...`: {lost[0]}"


def test_every_id_in_the_graph_of_causes_is_that_of_a_check_and_the_reverse():
    graph = set(CAUSES) | {effect for effects in CAUSES.values() for effect in effects}
    assert graph <= set(IDS), sorted(graph - set(IDS))
    assert set(IDS) - graph == ALONE


def test_a_record_quotes_its_page():
    def slow(e):
        """It is slow.

        Fires when it is slow.

        WARN or NOTE too-slow: {what} is slow.
        Fix: Make {what} fast.

        ERROR too-slow/standing: It stands.
        Fix: Push it.
        """
        return e

    check = record("X1", slow)
    assert (check.name, check.symptom, check.about) == ("too-slow", "It is slow.", ("Fires when it is slow.",))
    finding = check.look(fires("9 s", "1 s", NOTE, what="the loop"))
    assert finding[:5] == ("X1", "too-slow", NOTE, "9 s", "1 s")
    assert finding[5:7] == ("the loop is slow.", "Make the loop fast.")
    assert check.look(fires("9 s", "1 s", what="")).severity == WARN
    standing = check.look(fires("0", "1", fault="too-slow/standing"))
    assert (standing.name, standing.severity, standing.fix) == ("too-slow", ERROR, "Push it.")
    assert check.look(OK) is OK
    with pytest.raises(ValueError, match="severity = 'ERROR': the page of X1 allows WARN, NOTE"):
        check.look(fires("9 s", "1 s", ERROR, what=""))


def test_without_docstrings_there_are_no_pages():
    with pytest.raises(RuntimeError, match="-OO"):
        record("X1", lambda e: OK)
