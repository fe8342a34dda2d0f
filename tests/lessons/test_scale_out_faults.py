"""Each fault in two real processes: the wrong lines give another number than one process, the right
ones the same.
"""

import pytest

from lessons import scale_out_faults as faults
from lessons import trials
from lessons.scale_out import World


@pytest.fixture(scope="module")
def trial():
    with World(2) as world:
        made = faults.Measured(world)
        made.pages = {name: str(made(name)) for name in faults.FAULTS}
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.FAULTS)
def test_wrong_shows_the_symptom_and_right_does_not(trial, name):
    assert trial.differ(name) == (True, False), trial.facts[name]
    page = trial.pages[name]
    fault = faults.FAULTS[name][1]
    assert page.startswith(fault.title) and "THE SYMPTOM" in page and "Verdict:" in page
    assert all(
        line in page for shown in (fault.wrong, fault.right) for line in trials.lines_of(shown)
    )


@pytest.mark.slow
def test_what_the_page_says_of_each_is_measured(trial):
    def both(name, fact, rank=0):
        return [by_rank[rank][fact] for by_rank in trial.facts[name]]

    wrong, right = both("mean of means", "gradient error")
    assert wrong > 0.1 and right < 1e-5
    assert both("mean of means", "loss")[1] == pytest.approx(
        both("mean of means", "loss in one process")[1], abs=1e-5
    )

    wrong, right = both("sends", "bytes given to all-reduce")
    assert wrong == 4 * right and both("sends", "gradient norm")[0] == pytest.approx(
        both("sends", "gradient norm")[1]
    )

    first, second = trial.facts["unused"][0]
    assert [first["steps"], second["steps"]] == [0, 1]
    assert "Timed out" in first["says"] and "Expected to have finished reduction" in second["says"]
    assert trial.facts["unused"][1][1]["gradient error"] < 1e-6

    first, second = trial.facts["leaves"][0]
    assert (
        "Timed out" in first["says"]
        and second["says"] == "nothing"
        and first["waited for seconds"] >= faults.LIMIT
    )
    assert [r["steps"] for r in trial.facts["leaves"][1]] == [3, 3]

    wrong, right = both("norm", "norm after the clip / limit")
    assert wrong == pytest.approx(2**0.5, rel=1e-3) and right == pytest.approx(1, rel=1e-4)
    parts = [r["norm that the rank used"] for r in trial.facts["norm"][0]]
    assert sum(part**2 for part in parts) == pytest.approx(
        both("norm", "true norm")[0] ** 2, rel=1e-3
    )

    assert both("seeds", "different rows") == [8, 16] and both(
        "seeds", "ranks with the same dropout"
    ) == [2, 1]


@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_lines_that_are_shown_fit_a_page_and_differ(name):
    fault = faults.FAULTS[name][1]
    shown = [trials.lines_of(fault.wrong), trials.lines_of(fault.right)]
    assert all(2 <= len(lines) <= 12 for lines in shown) and shown[0][1:] != shown[1][1:]
    assert all(len(line) <= 88 for lines in shown for line in lines)


def test_facts_on_which_the_ranks_agree_are_one_line():
    runs = [[{"a": 1, "b": 2}, {"a": 1, "b": 3}], [{"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 4}]]
    assert faults.by_line(runs) == [
        {"a": 1, "b, rank 0": 2, "b, rank 1": 3},
        {"a": 1, "b, rank 0": 2, "b, rank 1": 2, "c, rank 1": 4},
    ]
    with pytest.raises(ValueError, match="fault = 'x': allowed are mean of means"):
        faults.Measured(None)("x")
