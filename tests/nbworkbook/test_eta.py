"""How long a batch will still take: the slots are simulated, stored seconds scaled by what
ended.
"""

import pytest

from nbworkbook import eta
from nbworkbook.eta import Pace


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(eta.time, "monotonic", lambda: now[0])
    return now


def test_one_after_the_other(clock):
    batch = Pace(["00_a", "01_b", "02_c"], [60, 30, 300], [None] * 3, 1)
    assert str(batch) == "; 0 of 3 notebooks, 0:00, about 6:30 left"
    assert batch.start_next() == 0
    clock[0] += 20
    assert str(batch) == "; 0 of 3 notebooks, 0:20, about 6:10 left"
    assert batch.of(0) == "0:20, about 0:40 left"
    clock[0] += 50
    assert batch.left() == 7 + 330, "it takes longer than before: a tenth more"
    batch.end(0, 70.0)
    assert str(batch) == "; 1 of 3 notebooks, 1:10, about 5:30 left"
    for _ in range(2):
        batch.end(batch.start_next(), 1.0)
    assert str(batch) == "; 3 of 3 notebooks, 1:10" and batch.start_next() is None


def test_side_by_side_each_slot_takes_the_next_one_the_longest_first(clock):
    batch = Pace(list("dbca"), [10, 60, 50, 100], [None] * 4, 2)
    assert batch.waiting == [3, 1, 2, 0]
    assert batch.left() == 110, "100 and then 10 beside 60 and then 50: 110 and 110"
    assert [batch.start_next(), batch.start_next()] == [3, 1]
    clock[0] += 30
    assert batch.left() == 80
    batch.end(1, 30.0)
    assert batch.left() == 70, "70 of the first beside 50 and 10"


def test_published_seconds_count_as_they_are_until_one_ended_and_then_scaled(clock):
    batch = Pace(["00_a", "01_b", "02_c"], [None] * 3, [30, 60, 90], 1)
    assert batch.left() == 180, "known from the first moment on"
    batch.start_next()
    clock[0] += 60
    assert batch.left() == 6 + 2 * 150, "it has taken twice as long already, so will the others"
    batch.end(0, 75.0)
    assert batch.left() == 2.5 * 150
    batch.start_next()
    batch.end(1, 60.0)
    assert batch.left() == pytest.approx(90 * (75 + 60) / (30 + 60))
    batch.start_next()
    batch.end(2, None)  # it failed, or was continued: its time says nothing
    assert batch.left() == 0


def test_what_is_known_of_this_machine_is_not_scaled_and_one_that_is_done_takes_nothing(clock):
    batch = Pace(["00_a", "01_b", "02_c", "03_d"], [None, 40, 0, None], [30, 30, 30, 0], 1)
    batch.start_next()
    batch.end(0, 90.0)
    assert batch.left() == 40 + 0 + 0, "0 seconds are stored where it took less than half a minute"


def test_the_time_left_of_the_base_model_is_added(clock):
    batch = Pace(["00_a"], [50], [None], 1)
    batch.first = 200.0
    assert str(batch) == "; about 4:10 left"


def test_what_nobody_has_measured_takes_what_the_others_take(clock):
    batch = Pace(["00_a", "01_b", "02_c"], [60, None, None], [None, None, 30], 1)
    assert batch.left() == 60 + 45 + 30
    unknown = Pace(["00_a"] * 3, [None] * 3, [None] * 3, 1)
    assert str(unknown) == "; 0 of 3 runs, 0:00, time left unknown"
    unknown.start_next()
    assert unknown.of(0) == "0:00"
    unknown.end(0, None)
    assert unknown.left() is None
    unknown.start_next()
    unknown.end(1, 3700.0)
    assert str(unknown) == "; 2 of 3 runs, 0:00, about 1:01:40 left"


def test_a_single_job_is_no_batch():
    assert str(Pace(["00_a"], [None], [None], 1)) == ""
    assert str(Pace(["00_a"], [5.0], [None], 1)) == "; about 0:05 left"
