"""Nothing runs in silence: a whole notebook in a real kernel, every message timed."""

import json

import pytest
import silence
from silence import Execution, Message

from nblib.run import ticker


def message(time: float, kind: str, **content) -> Message:
    return Message(time, kind, content)


def test_silences_lie_between_what_a_person_sees():
    shown = {"data": {"text/plain": "x"}, "transient": {"display_id": "a"}}
    elsewhere = {"data": {"text/plain": "y"}, "transient": {"display_id": "of another cell"}}
    messages = [
        message(1.0, "status", execution_state="busy"),
        message(3.0, "display_data", **shown),
        message(4.0, "update_display_data", **elsewhere),
        message(5.0, "comm_msg", comm_id="bar", data={"state": {"value": "of another cell"}}),
        message(5.5, "comm_open", comm_id="bar", data={"state": {"value": ""}}),
        message(6.0, "comm_msg", comm_id="bar", data={"state": {"value": "step 2"}}),
        message(7.0, "comm_msg", comm_id="bar", data={"state": {"disabled": True}}),
        message(7.5, "status", execution_state="busy"),
        message(8.0, "update_display_data", **shown),
    ]
    waits = [wait for wait, _ in Execution(1.0, 9.0, messages, None).silences()]
    assert waits == [2.0, 3.0, 2.0, 1.0]


@pytest.mark.slow
@pytest.mark.kernel
def test_a_notebook_is_never_silent_for_more_than_two_seconds(tmp_path):
    """On a machine that others use as well everything is late. How late, say the lines that count each second."""
    notebook = json.loads((silence.ROOT / "notebooks" / "03_precision_and_optimizers.ipynb").read_text())
    facts = silence.measure(notebook, folder=tmp_path)
    assert facts["error"] is None
    late = max(1.0, (facts["rhythm"] or 0) / ticker.RHYTHM)
    assert facts["longest"] <= 1.5 * late * silence.LIMIT, facts["waits"]
