"""`%%doctor` as a person meets it, in a real JupyterLab and a real Chromium: a faulty cell, a
healthy one, one that is interrupted.
"""

import re

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SET_UP = """%load_ext loopdoctor
import time
from pathlib import Path
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
text = torch.randint(1, 4, (5000,)).cumsum(0) % 100
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 100))
def batch():
    at = torch.randint(len(text) - 17, (8,))
    return torch.stack([text[i : i + 17] for i in at])"""
STEP = """    ids = batch()
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    {clear}
    loss.backward()
    optimizer.step()"""
BEGIN = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
FAULTY = (
    "%%doctor --steps 6\n"
    + BEGIN
    + "for step in range(8):\n"
    + STEP.format(clear="pass  # zero_grad is missing")
)
HEALTHY = "%%doctor --steps 6 --into report\n" + BEGIN + "for step in range(8):\n"
HEALTHY += STEP.format(clear="optimizer.zero_grad()") + "\nloss.item()"
LONG = "%%doctor --steps 6\n" + BEGIN + "while not Path('stop').exists():\n    time.sleep(0.2)\n"
LONG += STEP.format(clear="optimizer.zero_grad()")
PICTURE = "plt.plot([1, 2]);"


def page_of(*codes: str) -> dict:
    cells = [{"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# Mine"}]
    for number, code in enumerate(codes):
        cell = {"cell_type": "code", "id": f"code-{number}", "metadata": {}, "source": code}
        cells.append(cell | {"outputs": [], "execution_count": None})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def test_the_report_stands_under_the_cell(lab):
    """Rich in the page; nothing of it is left in the cell below; an interrupted cell has its report
    as well.
    """
    with lab.open("mine", page_of(SET_UP, FAULTY, HEALTHY, LONG, PICTURE)) as page:
        shown = page.on_page.locator('.jp-OutputArea-output[data-mime-type="text/html"]')
        page.run_all()
        page.until(
            lambda: shown.count() == 2, lambda: f"{shown.count()} reports are shown", seconds=300
        )
        faulty, healthy = shown.all_inner_texts()
        assert "N1" in faulty and "zero_grad" in faulty and "nothing found" in healthy
        assert re.search(r"In\[2\], line \d+|cell 2, line \d+", faulty)

        page.on_page.get_by_role("menuitem", name="Kernel", exact=True).click()
        page.on_page.get_by_role("menuitem", name=re.compile("^Interrupt Kernel")).click()
        interrupted = page.on_page.locator(".jp-CodeCell").nth(3)
        for _ in range(600):
            said = interrupted.inner_text()
            if "KeyboardInterrupt" in said and "steps watched" in said:
                break
            page.on_page.wait_for_timeout(100)
        assert "KeyboardInterrupt" in said
        assert re.search(r"doctor, \d steps watched, then interrupted: nothing found", said)
        page.snapshot("reports")

        (page.path.parent / "stop").touch()  # and all of it runs again
        page.run_all()
        page.on_page.wait_for_timeout(1000)
        for _ in range(600):
            if (
                page.images.count()
                and not page.on_page.locator(".jp-InputPrompt", has_text="[*]").count()
            ):
                break
            page.on_page.wait_for_timeout(100)
