"""The line of a silent cell, in a real kernel: where it lands, what it says, and that nothing of it stays.

`outputs` keeps what a page would keep: it clears, adds and updates as JupyterLab does.
"""

import re

import pytest
from silence import LIMIT, Kernel, page

from nblib.run import ticker

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

START = "import time\nfrom IPython.display import display, clear_output\nfrom nblib.run import ticker\nticker.start()"
LINE = re.compile(r"still running, (\d+) s")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with Kernel(tmp_path_factory.mktemp("kernel")) as running:
        assert running.execute(START).error is None
        yield running


def lines(messages) -> list[str]:
    """What our line said, in turn."""
    texts = [m.content.get("data", {}).get("text/plain", "") for m in messages]
    return [text for text in texts if LINE.match(text)]


def stays(run) -> list[str]:
    """The texts that a page shows once the cell has ended."""
    outputs = page(run.messages)
    return [o.get("text") or o["data"]["text/plain"] for o in outputs]


def test_a_silent_cell_says_that_it_runs_and_nothing_stays(kernel):
    run = kernel.execute("time.sleep(4.2)")
    said = [int(LINE.match(text)[1]) for text in lines(run.messages)]
    assert said and said == sorted(set(said)) and said[0] in (1, 2) and said[-1] >= 3
    assert stays(run) == []


def test_the_outputs_of_the_cell_stay_in_their_order(kernel):
    code = "print('first')\nh = display('a', display_id=True)\ntime.sleep(2.4)\nh.update('b')\nprint('second')\n"
    run = kernel.execute(code + "time.sleep(2.4)\ndisplay('third')\ntime.sleep(2.4)\n'the result'")
    assert len(lines(run.messages)) >= 3
    assert stays(run) == ["first\n", "'b'", "second\n", "'third'", "'the result'"]
    assert [o["output_type"] for o in page(run.messages)][-1] == "execute_result"


def test_an_update_of_an_output_shown_again_finds_it(kernel):
    run = kernel.execute("h = display('a', display_id=True)\ntime.sleep(2.4)\nprint('x')\nh.update('b')")
    assert lines(run.messages) and stays(run) == ["'b'", "x\n"]


def test_an_output_in_place_keeps_the_line_away(kernel):
    code = "h = display('0', display_id=True)\nfor i in range(6):\n    time.sleep(0.5)\n    h.update(str(i))"
    assert lines(kernel.execute(code).messages) == []


def test_a_cell_that_says_busy_once_more_keeps_its_outputs(kernel):
    """As a training with a slider does, since each answer to the slider says that the kernel is idle."""
    code = "from IPython import get_ipython\nkernel = get_ipython().kernel\ndisplay('first')\n"
    code += (
        "kernel.session.send(kernel.iopub_socket, 'status', {'execution_state': 'busy'}, parent=kernel.get_parent())\n"
    )
    run = kernel.execute(code + "time.sleep(2.4)\ndisplay('second')")
    assert lines(run.messages) and stays(run) == ["'first'", "'second'"]


def test_two_cells_in_a_row(kernel):
    first, second = kernel.execute_all(["time.sleep(2.4)\nprint('one')", "time.sleep(2.4)\nprint('two')"])
    assert lines(first.messages) and lines(second.messages)
    assert stays(first) == ["one\n"] and stays(second) == ["two\n"]


def test_a_cell_that_fails(kernel):
    run = kernel.execute("print('before')\ntime.sleep(2.4)\n1 / 0")
    assert lines(run.messages) and run.error.startswith("ZeroDivisionError")
    assert [o["output_type"] for o in page(run.messages)] == ["stream", "error"]


def test_a_cell_that_clears_its_outputs(kernel):
    run = kernel.execute("print('gone')\ntime.sleep(2.4)\nclear_output()\ntime.sleep(2.4)\nprint('stays')")
    assert len(lines(run.messages)) >= 2 and stays(run) == ["stays\n"]
    run = kernel.execute("print('gone')\ntime.sleep(2.4)\nclear_output(wait=True)\nprint('stays')")
    assert lines(run.messages) and stays(run) == ["stays\n"]


def test_a_cell_known_from_before_says_about_how_long(kernel):
    code = "time.sleep(2.6)  # again"
    assert not any("of about" in text for text in lines(kernel.execute(code).messages))
    assert lines(kernel.execute(code).messages)[0].endswith("of about 3 s")


def test_a_fork_that_prints_does_not_hang(kernel):
    code = "import os\npid = os.fork()\nif pid == 0:\n    print('child', flush=True)\n    os._exit(0)\n"
    run = kernel.execute(code + "assert os.waitpid(pid, 0)[1] == 0\nprint('parent')")
    assert run.error is None and "parent\n" in "".join(stays(run))  # the line of a fork comes in two pieces


def test_async_cell(kernel):
    run = kernel.execute("import asyncio\nawait asyncio.sleep(2.4)\n'end'")
    assert lines(run.messages) and stays(run) == ["'end'"]


def test_started_twice_it_is_one(kernel):
    run = kernel.execute("ticker.start()\ntime.sleep(3.4)")
    assert len(lines(run.messages)) == len(set(lines(run.messages)))


def test_it_costs_next_to_nothing(kernel):
    """What one message costs more with the ticker in between; a training draws four times a second.

    The messages go to a socket that nobody reads: of thousands on the kernel's own, a slow reader loses the last.
    """
    code = """
import zmq
from timeit import timeit
kernel, parent, nobody = get_ipython().kernel, get_ipython().kernel.get_parent(), zmq.Context.instance().socket(zmq.PUB)
def cost(send):
    return timeit(lambda: send(nobody, "comm_msg", {"data": {}}, parent), number=500) / 500
through, beside = kernel.session.send, kernel.session.send.__self__.send
print(min(cost(through) for _ in range(5)) - min(cost(beside) for _ in range(5)))
nobody.close()
"""
    run = kernel.execute(code, timeout=120)
    assert run.error is None and float(stays(run)[-1]) < 1e-3


def test_the_rhythm_is_within_two_seconds():
    assert max(ticker.SILENT, ticker.RHYTHM) + 2 * ticker.POLL < LIMIT
