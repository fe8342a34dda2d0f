"""Runs side by side: made once, told apart, and read in a table."""

import math
import re

import pytest

from lessons import pitfalls, trials
from lessons.pitfalls import Pitfall, Unavailable, pitfall
from nblib import paths

VERDICT = (
    "what the runs say, <in more words> than one line of a hundred and ten characters would ever hold, as here. "
    * 2
)


def _mend(model):
    """Not shown."""
    scale = 2  # a comment
    return model < scale


def _spoil(model):
    scale = 1
    return model < scale


@pytest.fixture
def made(monkeypatch):
    """A small catalogue, and the runs made so far."""
    calls = []

    def run(name, **facts):
        return lambda: calls.append(name) or facts

    words = dict(
        title="a title",
        symptom="s",
        claim="c",
        verdict=VERDICT.strip(),
        fix="`mend` it",
        seen=lambda f: f["bad"],
    ) | dict(wrong=_spoil, right=_mend)
    curve = [0.5] * 40
    broken = run(
        "broken",
        bad=True,
        loss=math.nan,
        scale=65536.0,
        said="",
        gone=[],
        curve=curve,
        parts={"one": {"x": 0.123456}},
    )
    fixed = run(
        "fixed", bad=False, loss=2 / 3, said="word " * 99, gone=["k", "v"], curve=curve, only="here"
    )
    claimed = run("claimed", bad=False, loss=1234567, shape=(3, 4))
    book = {
        "P01": Pitfall(id="P01", broken=broken, fixed=fixed, claimed=claimed, **words),
        "P02": Pitfall(id="P02", broken=broken, fixed=fixed, **words),
    }
    monkeypatch.setattr(trials, "pitfall", lambda number: book[number])
    return calls


def _rows(shown) -> dict[str, dict]:
    return {row["fact"]: row for row in shown.table.rows}


def test_each_run_is_made_once_and_remembered(made):
    trial = trials.Trials()
    trial("P01", "broken", "claimed")
    trial("P01", "broken", "claimed", "fixed")
    assert made == ["broken", "claimed", "fixed"]
    assert trial.shows == {
        ("P01", "broken"): True,
        ("P01", "claimed"): False,
        ("P01", "fixed"): False,
    }
    assert len(trial.facts["P01", "broken"]["curve"]) == 40  # only the table leaves it out


def test_two_notebooks_share_nothing(made):
    trials.Trials()("P01", "fixed")
    assert not trials.Trials().facts


def test_facts_are_rows_runs_are_columns_the_symptom_is_first(made):
    shown = trials.Trials()("P01", "broken", "fixed")
    assert shown.table.columns == ["fact", "broken", "fixed"] and str(shown).startswith(
        "P01 a title\n"
    )
    assert shown.table.rows[0] == {"fact": "THE SYMPTOM", "broken": "shows", "fixed": "absent"}
    rows = _rows(shown)
    assert rows["loss"] == {"fact": "loss", "broken": "nan", "fixed": "0.6667"}
    assert rows["scale"] == {"fact": "scale", "broken": "65,536"}
    assert rows["gone"] == {"fact": "gone", "broken": "none", "fixed": "k, v"}
    assert rows["only"] == {"fact": "only", "fixed": "here"}  # not measured is not the same as none
    assert rows["parts"]["broken"] == "one x 0.1235"


def test_the_broken_lines_are_on_the_page_and_the_mended_ones_once_the_fixed_run_is_seen(made):
    trial = trials.Trials()
    before, after = trial("P01", "broken"), trial("P01", "broken", "claimed", "fixed")
    assert before.code == {
        "broken": ["def _spoil(model):", "    scale = 1", "    return model < scale"]
    }
    assert after.code["fixed"] == [
        "def _mend(model):",
        "    scale = 2  # a comment",
        "    return model < scale",
    ]
    assert (
        "    scale = 1\n" in str(before)
        and "scale = 2" not in str(before)
        and "scale = 2" in str(after)
    )
    page = after._repr_mimebundle_()["text/html"]
    assert (
        f"<span style='{trials.RED}'>    scale = 1</span>\n    return model &lt; scale</pre>"
        in page
    )
    assert f"<span style='{trials.GREEN}'>    scale = 2  # a comment</span>" in page
    assert f"<a href='{before.file}'>" in page and before.file.endswith("lessons/test_trials.py")


def test_code_that_is_too_wide_for_two_columns_stands_in_two_rows(made, monkeypatch):
    narrow = trials.Trials()("P01")._code()
    assert narrow.count("<tr>") == 1 and narrow.count("<td") == 2
    monkeypatch.setattr(trials, "BESIDE", 20)
    wide = trials.Trials()("P01")._code()
    assert wide.count("<tr>") == 2 and wide.replace("</tr><tr>", "") == narrow


def test_the_verdict_is_one_line_in_a_colour_above_the_table(made):
    page = trials.Trials()("P01")._repr_mimebundle_()["text/html"]
    assert page.index("</pre>") < page.index("The claim does not hold") < page.index("THE SYMPTOM")
    assert "The broken lines bring the symptom" in str(trials.Trials()("P02"))
    assert "The claim" not in str(trials.Trials()("P01", "broken", "claimed"))


def test_while_runs_are_made_a_line_says_which_and_the_page_takes_its_place(made, monkeypatch):
    said = []
    monkeypatch.setattr(
        trials.show,
        "displayed",
        lambda thing, handle=None: said.append((str(thing), handle)) or "place",
    )
    trial = trials.Trials()
    shown = trial("P01", "broken", "fixed")
    assert said[0] == ("P01: broken is running", None)
    assert (
        re.fullmatch(r"P01: broken \d+\.\d s, fixed is running", said[1][0])
        and said[1][1] == "place"
    )
    shown._ipython_display_()
    assert said[2] == (str(shown), "place")
    shown._ipython_display_()  # shown again, it gets a place of its own
    assert said[3] == (str(shown), None)
    trial("P01", "broken")  # made before: nothing runs
    assert len(said) == 4


def test_what_is_too_long_is_cut_or_left_out(made):
    rows = _rows(trials.Trials()("P01", "broken", "fixed"))
    assert "curve" not in rows
    assert rows["said"]["broken"] == "none" and len(rows["said"]["fixed"]) <= trials.WIDEST
    assert rows["said"]["fixed"].endswith("word ...")


def test_verdict_and_fix_stand_below_once_the_fixed_run_is_seen(made):
    trial = trials.Trials()
    before, after = (
        trial("P01", *runs)._repr_mimebundle_() for runs in (("broken",), ("broken", "fixed"))
    )
    assert "what the runs say" not in str(before) and "mend" not in str(before)
    below = after["text/plain"].split("\n")[-4:]
    assert below[0].startswith("Verdict: what the runs say") and below[-1] == "Fix: `mend` it."
    assert max(map(len, below)) <= 110
    assert (
        "</table><p><b>Verdict:</b> what the runs say, &lt;in more words&gt; than"
        in after["text/html"]
    )
    assert after["text/html"].endswith("<p><b>Fix:</b> <code>mend</code> it.</p>")


def test_without_names_every_run_there_is(made):
    trial = trials.Trials()
    assert trial("P01").table.columns == ["fact", "broken", "claimed", "fixed"]
    assert trial("P02").table.columns == ["fact", "broken", "fixed"]


@pytest.mark.parametrize(
    ("number", "run", "said"),
    [
        ("P01", "repaired", "run = 'repaired': allowed for P01 are broken, claimed, fixed"),
        ("P02", "claimed", "run = 'claimed': allowed for P02 are broken, fixed"),
        ("P02", "title", "run = 'title': allowed for P02 are broken, fixed"),
    ],
)
def test_a_run_that_is_not_there_is_refused_before_anything_is_made(made, number, run, said):
    with pytest.raises(ValueError) as error:
        trials.Trials()(number, "broken", run)
    assert str(error.value) == said and not made


def test_an_unknown_pitfall_lists_the_known():
    with pytest.raises(ValueError, match="pitfall = 'P99': allowed are P01, P02"):
        trials.Trials()("P99", "broken")


def test_a_run_that_this_machine_cannot_make_is_told_and_the_notebook_goes_on(monkeypatch):
    def lacking():
        raise Unavailable("needs a C++ compiler, found none")

    found = pitfall("P04")
    monkeypatch.setattr(trials, "pitfall", lambda number: found._replace(broken=lacking))
    trial = trials.Trials()
    told = str(trial("P04", "broken"))
    assert (
        "needs a C++ compiler" in told
        and "not known" in told
        and trial.shows["P04", "broken"] is None
    )


def test_the_link_leads_from_a_notebook_to_the_file_of_the_lines():
    for p in pitfalls.catalogue():
        assert not p.wrong or (paths.root() / "notebooks" / trials.file_of(p.wrong)).is_file(), p.id
