"""JupyterLab as a person meets it: a real server, a real Chromium, notebook 00 by Run All, a slider, the Stop button.

The browser test asserts what the page shows, not what the kernel holds: the progress line while the live cell trains,
the rate that the slider asked for, the word of the button, pictures that are drawn, no error, no foreign host. The
other test needs no browser: `make lab` on a port that is taken.
"""

import json
import math
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import browser
import pytest
from test_browser_training import facts, stop

TOTAL = 100_000  # steps of the live cell: more than anyone waits for, so only Stop ends it
LIVE = re.compile(rf"live: step (\d+) of {TOTAL}, loss \d")
ENDED = re.compile(rf"ended at step (\d+) of {TOTAL}, rate (\S+)")
RATE = 3e-4  # what the live cell asks for, before the slider
PRESSES = 5  # of the left arrow: 10 ** -0.5 of the rate


@pytest.mark.browser
@pytest.mark.base
def test_run_all_slider_and_stop_in_jupyterlab(lab):
    with lab.open("00_setup", _with_a_long_live_cell(browser.stored("00_setup"))) as page:
        page.run_all()
        (first,) = page.text(LIVE, browser.LONG)
        page.snapshot("live")
        scale = _move_slider(page)
        _wait_for_rate(page, RATE * scale)
        page.snapshot("slider")
        said, of = stop(page, "live")
        stopped, rate = page.text(ENDED)
        assert int(first) < int(stopped) == said and of == TOTAL
        assert rate == f"{RATE * scale:.2e}" != f"{RATE:.2e}"
        page.summary(re.compile(rf"live: step {stopped} of {TOTAL}, .*stopped by Stop"))  # what stays is a picture
        buttons = page.on_page.locator(".jp-OutputArea").get_by_role("button", name="Stop")
        assert buttons.count() == 0  # controls of a finished cell would do nothing

        page.text(re.compile("resume bit-equal: True"))
        page.finished()
        cells = page.saved()
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        assert "error" not in {output["output_type"] for cell in cells for output in cell["outputs"]}
        assert facts(lab.folder)["stopped"]["live"] == {"step": said, "of": of, "by": "Stop"}


def test_make_lab_on_a_port_in_use():
    if shutil.which("make") is None:
        pytest.skip("needs make on the PATH")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # -o env: the environment is the one that runs this test, never one that make sets up now
        command = ["make", "-C", browser.ROOT, "--no-print-directory", "-o", "env", "lab"]
        command += [f"BIN={Path(sys.executable).parent}", f"PORT={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if not re.match(r"make(\[\d+\])?: \*\*\*", line)]
    assert done.returncode == 2 and done.stdout == ""
    assert len(said) == 1 and f"port {port} is in use" in said[0] and "choose another" in said[0]


def _with_a_long_live_cell(notebook: dict) -> dict:
    (cell,) = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    source, changed = re.subn(r"(?m)^(live_steps: int =) \d+", rf"\1 {TOTAL}", "".join(cell["source"]))
    assert changed == 1
    cell["source"] = source
    return notebook


def _move_slider(page) -> float:
    """Press the left arrow a few times; what the slider now says, unrounded."""
    page.press("rate x", "ArrowLeft", PRESSES)
    scale = 10 ** (-0.1 * PRESSES)
    page.on_page.locator(".jp-OutputArea .widget-readout", has_text=f"{scale:.2f}").wait_for()
    return scale


def _wait_for_rate(page, rate: float) -> None:
    """Until the run's own metrics carry the rate and the page a later step: the slider acts while the cell runs."""
    (shown,) = page.text(LIVE)

    def rates() -> list[float]:
        files = (page.lab.folder / "outputs").rglob("metrics.jsonl")
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line)["lr"] for line in lines if line.endswith("\n")]

    page.until(
        lambda: any(math.isclose(seen, rate, rel_tol=1e-6) for seen in rates()),
        lambda: f"the slider says {rate}, the run's last rates are {rates()[-3:]}",
    )
    page.until(lambda: int(page.text(LIVE)[0]) > int(shown), lambda: f"step {shown} stays")
