"""The two sliders of notebook 03 in a real browser: moving one draws the picture anew, and the verdict changes.

Only the cells up to the sliders are opened, so that the test asks the page and not the machine.
"""

import json

import pytest
from test_browser import ROOT, _check_pictures, _chromium, _errors, _lab, _page, _run_all, _until, _wait_for_kernel


@pytest.mark.slow
@pytest.mark.browser
def test_sliders_of_the_surviving_update(tmp_path):
    chromium = _chromium()
    (tmp_path / "notebooks").mkdir()
    notebook = tmp_path / "notebooks" / "03_precision_and_optimizers.ipynb"
    cells = json.loads((ROOT / "notebooks" / notebook.name).read_text())
    last = next(i for i, cell in enumerate(cells["cells"]) if "FloatLogSlider" in "".join(cell["source"]))
    cells["cells"] = [c | ({"outputs": []} if "outputs" in c else {}) for c in cells["cells"][: last + 1]]
    notebook.write_text(json.dumps(cells))
    with _lab(tmp_path) as (url, token), _page(chromium, tmp_path) as (page, seen):
        page.goto(f"{url}/lab/tree/{notebook.name}?token={token}")
        page.get_by_role("heading", name="03 Precision").wait_for()
        _wait_for_kernel(page, url, token)
        _run_all(page)
        images, sliders = page.locator(".jp-OutputArea img"), page.locator(".jp-OutputArea").get_by_role("slider")
        wait = page.wait_for_timeout
        _until(lambda: images.count() == 1 and sliders.count() == 2, lambda: page.inner_text("body"), wait)
        assert "rounded away" in _sentence(page, notebook)

        before = images.first.get_attribute("src")
        sliders.nth(1).focus()
        for _ in range(10):  # half a decade up
            page.keyboard.press("ArrowRight")
        _until(lambda: images.first.get_attribute("src") != before, lambda: "same picture", wait)
        _until(lambda: "survives" in _sentence(page, notebook), lambda: "still rounded away", wait)
        sliders.nth(0).focus()
        for _ in range(40):  # two decades up: now the same update is too small again
            page.keyboard.press("ArrowRight")
        _until(lambda: "rounded" in _sentence(page, notebook), lambda: "still survives", wait)
        assert _errors(page).count() == 0
        _check_pictures(page)
    assert seen == {"hosts": {"127.0.0.1"}, "errors": []}


def _sentence(page, notebook) -> str:
    """What the picture says in words, from the saved file: the page itself shows only the drawing."""
    page.keyboard.press("Control+s")
    page.wait_for_timeout(300)
    outputs = json.loads(notebook.read_text())["cells"][-1].get("outputs", [])
    drawn = [output["data"] for output in outputs if "image/png" in output.get("data", {})]
    return " ".join("".join(data["text/plain"]) for data in drawn)
