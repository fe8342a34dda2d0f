"""The line that names the run being made: in place, counted, and the same in every stored
output.
"""

import json
import re
from pathlib import Path

import pytest
from hand_kernels import kernel

from lessons.progress import Counting, each, label

ROOT = Path(__file__).resolve().parents[2]


def test_each_thing_is_named_in_turn(capsys):
    assert list(each(["bf16", "fp32"], "trainings")) == ["bf16", "fp32"]
    assert capsys.readouterr().out.splitlines() == ["1 of 2: bf16", "2 of 2: fp32", "2 trainings"]


def test_the_line_comes_before_the_run(capsys):
    for thing in each("ab"):
        assert capsys.readouterr().out.strip().endswith(f": {thing}")


def test_a_name_of_ones_own(capsys):
    list(each([(), ("x", "y")], name=lambda names: " + ".join(names) or "no fault"))
    assert capsys.readouterr().out.splitlines()[:2] == ["1 of 2: no fault", "2 of 2: x + y"]


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ("a", "a"),
        (0.003, "0.003"),
        (("bf16", 1e-4), "bf16, 0.0001"),
        (len, "len"),
        ((), "none"),
        ({"lr": 1}, "lr 1"),
    ],
)
def test_labels(thing, text):
    assert label(thing) == text


def test_after_an_error_the_line_says_in_which_run(capsys):
    with pytest.raises(ZeroDivisionError):
        [thing / 0 for thing in each([1, 2])]
    assert capsys.readouterr().out.splitlines() == ["1 of 2: 1"]


def test_without_a_name_for_all_nothing_is_said_at_the_end(capsys):
    with Counting() as line:
        line.says("P21: broken is running")
    assert capsys.readouterr().out.splitlines() == ["P21: broken is running"]


@pytest.mark.slow
@pytest.mark.kernel
def test_where_a_person_sits_the_seconds_count_in_place():
    code = "import time\nfrom lessons.progress import each\nfor name in each(['a', 'b']):\n    time.sleep(2.5)"
    with kernel() as page:
        assert page.run(code) == "ok"
    texts = page.shown()
    assert texts[0] == "1 of 2: a"
    for name in ("1 of 2: a", "2 of 2: b"):  # on a busy machine a second may be left out
        seconds = [
            int(told[1]) for text in texts if (told := re.fullmatch(rf"{name}, (\d+) s", text))
        ]
        assert seconds == sorted(seconds) and seconds[-1] >= 1, texts
    kinds = [m["msg_type"] for m in page.messages if "data" in m["content"]]
    assert kinds[0] == "display_data" and set(kinds[1:]) == {"update_display_data"}, (
        "one line, in its place"
    )
    assert texts[-1].startswith("2 runs in ")


@pytest.mark.slow
@pytest.mark.kernel
def test_a_cell_of_a_notebook_names_each_of_its_runs():
    """Notebook 03: two ways to split the parameters, two trainings."""
    cells = json.loads((ROOT / "notebooks" / "03_precision_and_optimizers.ipynb").read_text())[
        "cells"
    ]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (split,) = [source for source in sources if source.startswith("splits = ")]
    needed = "from IPython.display import display\nfrom nblib.methods.muon import groups\nfrom nbworkbook import show\n"
    needed += "from lessons.progress import each\nfrom lessons.pitfalls import optimizers"
    with kernel() as page:
        assert page.run(needed) == page.run(split) == "ok"
    texts = page.shown()
    assert {"1 of 2: ndim == 2", "2 of 2: by module"} <= set(texts)
    assert any(text.startswith("2 trainings in ") for text in texts)
