"""While it runs it is the progress that all trainings show; when it has ended, one line."""

import pytest

from lessons.progress_line import Line

FIRST = {"step": 1, "of": 3, "loss": 2.0}


@pytest.mark.parametrize(
    "last", [{"step": 3, "of": 3, "loss": 1.5}, {"step": 2, "of": 3, "loss": 1.5, "stopped": "Stop"}]
)
def test_a_bar_while_it_runs_and_one_line_at_its_end(last, capsys):
    line = Line("control")
    assert "not started" in str(line)
    line(FIRST)
    assert "<progress" in line._repr_mimebundle_()["text/html"]
    line(last)
    ended = line._repr_mimebundle_()
    assert set(ended) == {"text/plain"} and ended["text/plain"].startswith(f"control: step {last['step']} of 3")
