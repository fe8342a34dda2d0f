"""Stop and the slider of every training that a person meets, in a real browser: the training hears both, ends within
three steps, and whatever comes after it says that it is half-trained. Notebook 00 as a whole is in test_browser.py.

A page holds the cells that a table of the training needs, out of the notebook as it is, with parameters that make a
step take a good part of a second: then the page shows every step, and what it shows when Stop is pressed counts.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import browser
import pytest

from nblib import train

pytestmark = [pytest.mark.browser, pytest.mark.base]
# At one moment: what the page shows of the training, and the press.
PRESS = r"""(button, title) => {
    const text = button.closest(".jp-OutputArea-output").innerText
    button.click()
    return Number(text.match(title + ": step (\\d+) of")[1])
}"""
AMBER = "rgb(255, 195, 77)"
PRESSES = 5  # of the left arrow: 10 ** -0.5 of the rate


class Case(NamedTuple):
    """A notebook, the title of its training, a text of the cell whose table is read, and what that table must say."""

    name: str
    title: str
    cell: str
    says: str
    parameters: dict
    rate: Callable[[int], float]  # step -> what the loop would set, were the slider not moved


def cosine(lr: float, total: int, warmup: int) -> Callable[[int], float]:
    factor = train.cosine(total, warmup=warmup)
    return lambda step: lr * factor(step - 1)


TINY = dict(eval_rows=8)
CASES = [
    Case(
        "10_lrc",
        "corrected",
        "lrc_tables.gap(",
        "corrected, {step} of {of} steps",
        TINY | dict(steps=200, quick_rows=4),
        cosine(5e-4, 200, 10),
    ),
    Case(
        "11_ard_lora",
        "ARD-LoRA",
        "{training.label}: held-out loss",
        "ARD-LoRA, {step} of {of} steps: held-out loss",
        TINY | dict(steps=200, rows=16),
        cosine(1e-2, 200, 20),
    ),
    Case(
        "12_moe_muon",
        "mixture",
        'caption="on held-out rows"',
        "on held-out rows (mixture was stopped at step {step} of {of})",
        TINY | dict(steps=60, rows=64),
        cosine(0.02, 60, 6),
    ),
    Case(
        "13_distillation",
        "student",
        "'of the parameters' is",
        "of the parameters, {step} of {of} steps",
        TINY | dict(steps=40, rows=16, others=False),
        cosine(4e-3, 40, 5),
    ),
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_slider_and_stop_of_a_training(lab, case):
    with lab.open(case.name, _page(case)) as page:
        page.run_all()
        page.text(_live(case), browser.LONG)
        assert state(page) == "Busy"
        page.snapshot("live")
        page.press("rate x", "ArrowLeft", PRESSES)
        scale = 10 ** (-0.1 * PRESSES)

        def moved() -> bool:
            step, _, rate = page.text(_live(case))
            return math.isclose(float(rate), scale * case.rate(int(step)), rel_tol=0.06)  # two digits are shown

        page.until(moved, lambda: f"the rate is still {page.text(_live(case))[2]}")
        assert state(page) == "Busy"  # after the messages of a widget too
        stopped, of = stop(page, case.title)

        notice = f"{case.title} was stopped at step {stopped} of {of}"
        if case.name == "10_lrc":  # its control has a Stop of its own, which nobody has pressed
            ours, (stopped, _) = stopped, stop(page, "control")
            page.on_page.get_by_role("cell", name=f"float, {stopped} steps and not {ours}").wait_for()
            stopped = ours
        if case.says:
            page.on_page.locator("table").get_by_text(case.says.format(step=stopped, of=of)).wait_for()
            page.on_page.locator("table caption").get_by_text(notice).wait_for()
        page.finished()
        assert page.on_page.locator(".jp-OutputArea").get_by_role("button", name="Stop").count() == 0
        page.until(lambda: state(page) == "Idle", lambda: state(page))
        page.snapshot("stopped")
        record = next(r for r in records(lab.folder) if r.get("stopped") and r["step"] == stopped)
        assert record["lr"] == pytest.approx(scale * case.rate(stopped))
        assert facts(lab.folder)["stopped"][case.title] == {"step": stopped, "of": of, "by": "Stop"}


def test_run_again_a_stopped_training_goes_on(lab):
    """In the same kernel: the cell ends on the last step, and the table that is made anew is of a whole training."""
    case = CASES[2]._replace(parameters=CASES[2].parameters | {"steps": 16})
    with lab.open(case.name, _page(case)) as page:
        page.run_all()
        page.text(_live(case), browser.LONG)
        stopped, of = stop(page, case.title)
        page.finished()
        for text in ("show.Training(", case.cell):
            page.on_page.locator(".jp-CodeCell", has_text=text).locator(".jp-Editor").click()
            page.on_page.keyboard.press("Control+Enter")
        page.summary(re.compile(rf"{case.title}: step {of} of {of}, .*left$"), seconds=browser.LONG)
        page.finished()
        page.on_page.locator("table caption").get_by_text("on held-out rows", exact=True).wait_for()
        assert page.on_page.get_by_text("was stopped").count() == 0
        assert [r["step"] for r in records(lab.folder)][-1] == of and not facts(lab.folder).get("stopped")
        page.snapshot("again")


def _page(case: Case) -> dict:
    """The cells that the table needs, with the parameters of the case."""
    notebook = browser.only(browser.stored(case.name), case.cell)
    (cell,) = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    source = "".join(cell["source"])
    for name, value in case.parameters.items():
        source, changed = re.subn(rf"(?m)^({name}: \w+ =) \S+", rf"\1 {value}", source)
        assert changed == 1, name
    cell["source"] = source
    return notebook


def _live(case: Case | str) -> re.Pattern:
    title = case if isinstance(case, str) else case.title
    return re.compile(rf"{title}: step (\d+) of (\d+), loss \S+, rate (\S+),")


def stop(page, title: str) -> tuple[int, int]:
    """Press Stop; the step at which the training ended: at most three after the one that the page showed, and those
    that are made between two drawings, of which the page has four a second (show.Progress)."""
    page.text(_live(title), browser.LONG)
    button = page.on_page.locator(".jp-OutputArea").get_by_role("button", name="Stop")
    bars = page.on_page.locator(".jp-OutputArea-output").get_by_text(
        re.compile(r"^Stopped at step \d+ of \d+\. The num")
    )
    before, of = bars.count(), int(page.text(_live(title))[1])
    shown = button.evaluate(PRESS, title)
    page.until(lambda: bars.count() > before, lambda: "no amber bar")
    bar = bars.last
    stopped = int(re.search(r"\d+", bar.inner_text())[0])
    assert bar.evaluate("bar => getComputedStyle(bar).backgroundColor") == AMBER and bar.is_visible()
    ending = next(r for r in records(page.lab.folder) if r.get("stopped") and r["step"] == stopped)
    assert stopped - shown <= 3 + 0.25 * stopped / ending["seconds"]
    return stopped, of


def state(page) -> str:
    """What the page says of the kernel, below."""
    return re.search(r"Idle|Busy|\w+$", page.on_page.locator("#jp-main-statusbar").inner_text())[0]


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for file in folder.rglob("metrics.jsonl") for line in file.read_text().splitlines()]


def facts(folder: Path) -> dict:
    (file,) = (folder / "outputs").rglob("run.json")
    return json.loads(file.read_text())
