"""Compile gain: each mode beside eager mode, which is always there and gains nothing."""

import pytest

from lessons import compile_gain


@pytest.mark.slow
def test_eager_is_the_measure_and_every_mode_has_its_row():
    rows = compile_gain.by_mode(["graphs alone"], rows=1, length=32, rounds=3)
    assert [row["mode"] for row in rows] == ["eager", "graphs alone"]
    assert rows[0]["gain"] == 1 and rows[1]["gain"] == pytest.approx(
        rows[0]["step s"] / rows[1]["step s"]
    )
    assert rows[1]["first calls s"] > rows[1]["step s"]  # the first call compiles


def test_an_unknown_mode_lists_the_known():
    with pytest.raises(ValueError, match="allowed are eager, graphs alone"):
        compile_gain.by_mode(["fastest"])
