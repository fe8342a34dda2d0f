"""Run All, the buttons of a training, Stop, and Run All once more: in a real JupyterLab and a real
Chromium.

Asserted is what the page shows and what the run's folder says, not what the kernel holds. The other
test needs no browser: `make lab` on a port that is taken.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import browser
import pytest
import small_notebooks

from nbworkbook import runs

# steps; at the pace of the first Run All more than anyone waits for, so only Stop ends it
TOTAL = 600
RATE = 4e-3
SET_UP = "from nbworkbook import runs, show\nrun = runs.begin('00_a', globals())"
TRAIN = f"""import os, time, torch
from pathlib import Path
from nblib import models, runtime, text, train
runtime.seed_all(0)
model = models.tiny(64, hidden=16, layers=1, heads=2)
batches = text.Batches(torch.randint(0, 64, (4000,)), rows=2, length=16)
def log(record):
    run.log(record)
    time.sleep(float(Path(os.environ["PACE_FILE"]).read_text()))
training = show.Training("small", run)
options = dict(checkpoints=train.Checkpoints(run.checkpoints / "small"))
options |= dict(machine=runtime.Machine(torch.device("cpu"), "fp32", "a test"))
options |= dict(watch=train.Watch(log=log, log_every=1, controls=training, records=training.records))
optimizer = train.adamw(model, lr={RATE})
await training.follow(train.steps(model, batches, optimizer, total={TOTAL}, **options))"""
RESULT = "run.result(steps=len(training.records))\nshow.Table([{'a': 1}], caption='after it')"
LIVE = re.compile(rf"small: step (\d+) of {TOTAL}, loss \d")
STOPPED = re.compile(rf"Stopped at step (\d+) of {TOTAL}\.")


class Hand:
    """The page of the notebook, and the newest run that it made."""

    def __init__(self, page: browser.Page, folder: Path):
        self.page = page
        self.folder = folder
        self.outputs = page.on_page.locator(".jp-OutputArea-output")

    def press(self, name: str) -> None:
        self.page.on_page.locator(".jp-OutputArea").get_by_role("button", name=name).click()

    def count(self, text: str | re.Pattern) -> int:
        return self.outputs.get_by_text(text).count()

    def run(self) -> Path:
        (record,) = (self.folder / "outputs" / "00_a").glob("*/run.json")
        return record.parent

    def rates(self) -> list[float]:
        lines = (self.run() / "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line)["lr"] for line in lines if line.endswith("\n")]


@pytest.fixture
def hand(tmp_path, monkeypatch, request):
    monkeypatch.setenv("NBLIB_NOTEBOOKS", str(tmp_path / "notebooks"))
    monkeypatch.setenv("PACE_FILE", str(tmp_path / "pace"))
    lab = request.getfixturevalue("lab")
    path = small_notebooks.write("00_a", SET_UP, TRAIN, RESULT, "run.finish()")
    with lab.open("00_a", json.loads(path.read_text())) as page:
        yield Hand(page, tmp_path)


@pytest.mark.browser
@pytest.mark.slow
def test_run_all_rate_stop_and_run_all_again(hand, tmp_path):
    page = hand.page

    # a training runs, and hears more than one press of a button while it does
    (tmp_path / "pace").write_text("0.2")
    page.run_all()
    page.until(lambda: hand.count(LIVE), lambda: "no training is shown", browser.LONG)
    for name, factor in (("rate / 2", 1 / 2), ("rate / 2", 1 / 4), ("rate x 2", 1 / 2)):
        hand.press(name)
        page.until(lambda f=factor: hand.rates()[-1] == pytest.approx(f * RATE), hand.rates)
    assert page.running.count() >= 1 and runs.status(hand.run()) == "running"
    page.snapshot("live")

    # Stop ends it after a step; a picture takes its place, and what comes after says what was
    # stopped
    hand.press("Stop")
    page.until(lambda: hand.count(STOPPED), lambda: "no amber bar")
    page.finished()
    step = int(STOPPED.search(hand.outputs.get_by_text(STOPPED).first.inner_text())[1])
    assert hand.page.on_page.get_by_role("button", name="Stop", exact=True).count() == 0
    assert hand.count("after it (small was stopped at step") == 1 and page.images.count() == 1
    folder = hand.run()
    assert runs.status(folder) == f"stopped, {step} of {TOTAL}" and len(hand.rates()) == step
    assert runs.record(folder)["page"].startswith("kept as saved on")
    page.snapshot("stopped")

    # Run All goes on from there to the end, at the rate that the code asks for
    (tmp_path / "pace").write_text("0")
    page.run_all()
    page.until(lambda: runs.status(folder) == "done", lambda: runs.status(folder), browser.LONG)
    assert hand.count(f"continues run {folder.name} from step {step}") == 1
    page.finished()
    assert hand.run() == folder and runs.is_done(folder) and runs.record(folder)["attempts"] == 2
    assert json.loads((folder / "result.json").read_text()) == {"steps": TOTAL}
    assert len(hand.rates()) == TOTAL and hand.rates()[-1] == pytest.approx(RATE)
    assert hand.count("was stopped at step") == 0


def test_make_lab_on_a_port_in_use():
    if shutil.which("make") is None:
        pytest.skip("needs make on the PATH")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # -o env: the environment is the one that runs this test, never one that make sets up now
        command = ["make", "-C", browser.ROOT, "--no-print-directory", "-o", "env", "lab"]
        command += [f"BIN={Path(sys.executable).parent}", f"PORT={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    said = [
        line for line in done.stderr.splitlines() if not re.match(r"make(\[\d+\])?: \*\*\*", line)
    ]
    assert done.returncode == 2 and done.stdout == ""
    assert len(said) == 1 and f"port {port} is in use" in said[0]
