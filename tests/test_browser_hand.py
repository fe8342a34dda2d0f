"""Runs by hand as a person meets them: a real JupyterLab, a real Chromium, a small notebook, and things that go wrong.

The notebook asks a file how slow it shall be and whether it shall fail, so one page can go through all of it.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import small_notebooks

from nblib.run import runs

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SET_UP = "from nblib.run import runs, show\nrun = runs.begin('00_a', globals())"
ASKED = (
    "import json, os, time\nfrom pathlib import Path\nasked = json.loads(Path(os.environ['HAND_ASKED']).read_text())"
)
TRAIN = f"""{ASKED}
Path(os.environ["HAND_ASKED"] + ".pid").write_text(str(os.getpid()))
import torch
from nblib import models, runtime, text, train
runtime.seed_all(0)
model = models.tiny(64, hidden=16, layers=1, heads=2)
batches = text.Batches(torch.randint(0, 64, (4000,)), rows=2, length=16)
machine = runtime.Machine(torch.device("cpu"), "fp32", "a test")
options = dict(checkpoints=run.checkpoints / "main", checkpoint_every=2, log=run.log, log_every=1, machine=machine)
records = []
for record in train.steps(model, batches, train.adamw(model, lr=1e-2), total=40, records=records, **options):
    time.sleep(asked["pace"])"""
PICTURE = "show.bars({'a': 1.0}, x='x', summary='one bar')"
RESULT = f"{ASKED}\nassert not asked['fail'], 'asked to fail'\nrun.result(losses=[r['loss'] for r in records])"
CONTINUES = re.compile(r"continues run (\S+) from step (\d+) \((.*)\)")


class Hand:
    """The page, and what the notebook is asked for."""

    def __init__(self, page, folder: Path):
        self.page, self.folder, self.asked = page, folder, folder / "asked.json"

    def ask(self, *, pace: float = 0.0, fail: bool = False) -> None:
        self.asked.write_text(json.dumps({"pace": pace, "fail": fail}))

    def runs(self) -> list[Path]:
        return sorted(path.parent for path in (self.folder / "outputs" / "00_a").glob("*/run.json"))

    def steps(self) -> int:
        """Logged in the newest run."""
        file = self.runs()[-1] / "metrics.jsonl" if self.runs() else self.asked
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return max([json.loads(line).get("step", 0) for line in lines if line.endswith("\n")], default=0)

    def wait(self, fact, seconds: float = 60) -> None:
        """Also for pages on which a cell failed."""
        for _ in range(int(10 * seconds)):
            if fact():
                return
            self.page.on_page.wait_for_timeout(100)
        raise AssertionError(f"{[(f.name, runs.status(f)) for f in self.runs()]}, {self.texts()}")

    def texts(self) -> list[str]:
        return self.page.on_page.locator(".jp-OutputArea-output").all_inner_texts()

    def says(self, words: str) -> bool:
        return any(words in text for text in self.texts())

    def cell(self, number: int):
        """A code cell, counted from 0."""
        return self.page.on_page.locator(".jp-CodeCell").nth(number)

    def status(self) -> str:
        return runs.status(self.runs()[-1])

    def result(self) -> dict:
        return json.loads((self.runs()[-1] / "result.json").read_text())


@pytest.fixture
def hand(tmp_path, monkeypatch, request):
    monkeypatch.setenv("NBLIB_NOTEBOOKS", str(tmp_path / "notebooks"))
    monkeypatch.setenv("HAND_ASKED", str(tmp_path / "asked.json"))
    lab = request.getfixturevalue("lab")
    path = small_notebooks.write("00_a", SET_UP, TRAIN, PICTURE, RESULT, "run.finish()")
    with lab.open("00_a", json.loads(path.read_text())) as page:
        yield Hand(page, tmp_path)


def test_a_person_meets_kills_failures_and_edits(hand):
    page = hand.page.on_page
    # the kernel dies in the middle of the training
    hand.ask(pace=0.4)
    hand.page.run_all()
    hand.wait(lambda: hand.steps() >= 5)
    line = re.compile(r"^cell 3 of 6, 0:\d\d$")
    before = hand.cell(1).inner_text()
    assert any(line.match(text.strip()) for text in hand.texts()), hand.texts()
    hand.wait(lambda: hand.cell(1).inner_text() != before, 5)
    assert hand.status() == "running"
    os.kill(int(Path(f"{hand.asked}.pid").read_text()), signal.SIGKILL)
    hand.wait(lambda: hand.status() == "killed")
    page.get_by_role("button", name="Ok", exact=True).click()
    hand.wait(lambda: all(s["kernel"]["execution_state"] == "idle" for s in hand.page.lab.ask("sessions")))
    hand.page.complaints.clear()  # of the connection that broke

    # Run All continues, and goes on to the end
    hand.ask()
    hand.page.run_all()
    hand.wait(lambda: hand.status() == "done")
    first = hand.runs()[-1]
    name, step, why = CONTINUES.search("\n".join(hand.texts())).groups()
    assert (name, why) == (first.name, "killed") and int(step) >= 4
    hand.wait(lambda: hand.says("6 cells in 0:"))
    hand.wait(lambda: runs.is_done(first))
    hand.page.snapshot("continued")
    continued = hand.result()

    # Run All twice: a new run, straight through, with the same result
    hand.page.run_all()
    hand.wait(lambda: len(hand.runs()) == 2 and hand.status() == "done")
    assert hand.result() == continued and not hand.says("continues run")

    # the square, in a training without a Stop button: its cell fails, after a checkpoint
    hand.ask(pace=0.4)
    hand.page.run_all()
    hand.wait(lambda: len(hand.runs()) == 3 and hand.steps() >= 3)
    hand.wait(lambda: hand.says(" left"), 10)  # the runs before say how long it takes
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Interrupt Kernel")).click()
    hand.wait(lambda: hand.status() == "failed in cell 3")
    hand.page.snapshot("interrupted")

    # a cell fails in the run that continues; the button begins another one
    hand.ask(fail=True)
    hand.page.run_all()
    hand.wait(lambda: hand.status() == "failed in cell 5")
    third = hand.runs()[-1]
    assert len(hand.runs()) == 3 and CONTINUES.search("\n".join(hand.texts())).group(3) == "failed in cell 3"
    hand.wait(lambda: hand.says("failed in cell 5 of 6"))
    page.get_by_role("button", name="Start a new run instead").click()
    hand.wait(lambda: hand.says("Run the notebook again from the set-up cell: it starts a new run."))
    hand.page.snapshot("left")
    hand.ask()
    hand.page.run_all()
    hand.wait(lambda: len(hand.runs()) == 4 and hand.status() == "done")
    assert runs.status(third) == "failed in cell 5" and runs.record(third)["left"] is True
    assert hand.result() == continued

    # a parameter is edited and the set-up cell is not run again
    hand.cell(0).locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.type("\nsteps = 60")
    page.keyboard.press("Control+Enter")
    hand.cell(3).locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    hand.wait(lambda: "steps is 60 now and was 3 when the set-up cell ran" in hand.cell(3).inner_text())
    hand.page.snapshot("edited")
    hand.wait(lambda: "edited" in runs.record(hand.runs()[-1]))
