"""How long a batch will still take: the slots are simulated, and nobody knows what nobody measured."""

import math

import pytest

from nblib.run import pace
from nblib.run.pace import Pace


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def test_one_after_the_other(clock):
    waiting = [0, 1, 2]
    batch = Pace(["00_a", "01_b", "02_c"], [60, 30, 300], waiting, 1)
    assert str(batch) == "; 0 of 3 notebooks, 0:00, about 6:30 left"
    batch.starts(waiting.pop(0))
    clock[0] += 20
    assert str(batch) == "; 0 of 3 notebooks, 0:20, about 6:10 left"
    clock[0] += 50
    assert batch.left() == math.inf and str(batch).endswith("1:10, time left unknown"), "it takes longer than before"
    batch.ends(0, 70.0)
    assert str(batch) == "; 1 of 3 notebooks, 1:10, about 5:30 left"
    for number in (1, 2):
        batch.starts(waiting.pop(0))
        batch.ends(number, 1.0)
    assert str(batch) == "; 3 of 3 notebooks, 1:10"


def test_side_by_side_each_slot_takes_the_next_one(clock):
    waiting = [0, 1, 2, 3]
    batch = Pace(list("abcd"), [100, 60, 50, 10], waiting, 2)
    assert batch.left() == 110, "100 and then 10 beside 60 and then 50: 110 and 110"
    for _ in range(2):
        batch.starts(waiting.pop(0))
    clock[0] += 30
    assert batch.left() == 80
    batch.ends(1, 30.0)
    assert batch.left() == 70, "70 of the first beside 50 and 10"


def test_what_nobody_knows_is_unknown_until_a_run_of_the_notebook_ends(clock):
    waiting = [0, 1, 2]
    batch = Pace(["00_a"] * 3, [math.inf] * 3, waiting, 1)
    assert str(batch) == "; 0 of 3 runs, 0:00, time left unknown"
    batch.starts(waiting.pop(0))
    batch.ends(0, None)  # it failed: its time says nothing
    assert batch.left() == math.inf
    batch.starts(waiting.pop(0))
    batch.ends(1, 3700.0)
    assert str(batch) == "; 2 of 3 runs, 0:00, about 1:01:40 left"


def test_a_single_job_is_no_batch():
    assert str(Pace(["00_a"], [5.0], [0], 1)) == ""
