"""outputs/index.html as a person meets it: a real Chromium, opened from the disk, over folders of
real runs.

What a chart shows is read back from the picture: the labels of its axes say where a number stands,
so each point of a line has a value again, and that value must be the one that was logged.

Footgun: a number of the table is shown with six digits, and the CSV holds all of them.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
import small_notebooks

from nblib import files
from nbworkbook import report, runs, show

pytestmark = pytest.mark.browser

SENTENCE = "The loss falls from 3 to 1; “quoted” & <b>bold</b>."
LOSSES = {  # of each training of a run: by learning rate
    0.01: {"student": [3.0, 2.0, 1.5, 1.25, 1.0], "control": [3.0, 2.9, 2.8, 2.7, 2.6]},
    0.1: {"student": [3.0, 8.0, "nan", 40.0, 90.0]},
    0.001: {"student": [3.0, 2.75, 2.5, 2.25, 2.0]},
}


def a_run(lr: float, *, seconds: float, precision: str = "auto", **facts) -> Path:
    """A run by the real interface: logged, with results and a figure, finished."""
    run = runs.begin("10_small", {"lr": lr, "precision": precision})
    for training, losses in LOSSES[lr].items():
        for step, loss in enumerate(losses, start=1):
            record = {
                "run": training,
                "step": 10 * step,
                "of": 50,
                "loss": float(loss),
                "tokens": 2000 * step,
            }
            run.log(record | {"seconds": 1.5 * step, "lr": lr})
    last = [float(losses[-1]) for losses in LOSSES[lr].values()]
    run.result(trainable=1200, final_loss=last[0], by_size={"small": last[0], "large": 2 * last[0]})
    run.figure(
        "curve", show.curves({"loss": [(1, 3.0), (2, 1.0)]}, x="step", y="loss", summary=SENTENCE)
    )
    run.finish()
    runs.note(run.dir, {"seconds": seconds, "headline": ["final_loss"]} | facts)
    return run.dir


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Iterator[Path]:
    """The page of four runs of one notebook, one of another, and a sweep."""
    with pytest.MonkeyPatch.context() as patch:
        folder = small_notebooks.move_workbook(tmp_path_factory.mktemp("workbook"), patch)
        for name in ("10_small", "11_other"):
            small_notebooks.write(name, "1")
        names = iter(["20260101-000001-aaaaaa", "20260101-000002-bbbbbb", "20260101-000003-cccccc"])
        home = folder / "outputs"
        patch.setattr(
            runs, "new_folder", lambda notebook: files.make_folder(home / notebook / next(names))
        )
        a_run(0.01, seconds=9.0, tags=["night", "long"], started=1.7e9)
        note = {"time": 1.7e9, "text": "rate too large"}
        a_run(0.1, seconds=100.0, notes=[note], precision="fp32", started=1.7e9 + 60)
        stopped = {"student": {"step": 50, "of": 600, "by": "Stop"}}
        a_run(
            0.001, seconds=20.0, status="stopped, 50 of 600", stopped=stopped, started=1.7e9 + 120
        )
        patch.undo()
        patch.setenv("NBLIB_NOTEBOOKS", str(folder / "notebooks"))
        patch.setenv("NBLIB_OUTPUTS", str(folder / "outputs"))
        other = runs.begin("11_other", {})
        other.result(score=0.5)
        other.finish()
        rows = [
            {
                "parameters": {"steps": steps, "seed": seed},
                "results": {"final_loss": 10 / steps + seed},
                "status": "done",
            }
            for steps in (1, 10, 100)
            for seed in (0, 2)
        ]
        sweep = {
            "varied": {"steps": [1, 10, 100], "seed": [0, 2]},
            "rows": [*rows, {"parameters": {}, "results": {}}],
        }
        (folder / "outputs" / "10_small" / "sweep-20260101-000000.json").write_text(
            json.dumps(sweep)
        )
        yield report.write()


@pytest.fixture
def opened(index, tmp_path):
    """A function that opens the page; at the end nothing was asked of another place and nothing
    complained.
    """
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser._chromium(), args=browser.FLAGS
        )

        def open_page(width: int = 1280, **options):
            page = chromium.new_context(
                viewport={"width": width, "height": 900}, **options
            ).new_page()
            page.set_default_timeout(20_000)
            page.on(
                "request",
                lambda r: (
                    complaints.append(r.url) if not r.url.startswith(("file:", "blob:")) else None
                ),
            )
            page.on(
                "console",
                lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None,
            )
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(index.as_uri())
            return page

        yield open_page
        chromium.close()
    assert complaints == []


def table(page) -> list[list[str]]:
    """The table of runs as it is shown, heads first, without the boxes."""
    rows = page.locator("#compare [aria-label='table of runs'] tr").all()
    return [
        [text.strip(" ▲▼") for text in row.locator("th, td").all_inner_texts()[1:]] for row in rows
    ]


def column(page, name: str) -> list[str]:
    head, *rows = table(page)
    return [row[head.index(name)] for row in rows]


def tick(page, *rates: str) -> None:
    page.get_by_role("combobox", name="Notebook").select_option("10_small")
    for rate in rates:
        page.locator("table[aria-label=runs] tbody tr").nth(
            column(page, "lr").index(rate)
        ).get_by_role("checkbox").check()


def drawn(
    page, box: str = "#curves", *, kind: str = "line", log_y: bool = False, log_x: bool = False
) -> dict:
    """Name to points (x, y) of every line, or of the circles of a chart, in the numbers of its
    axes.
    """
    read = """(svg) => ({
        x: [...svg.querySelectorAll('text.x')].map(e => [+e.getAttribute('x'), +e.dataset.value]),
        y: [...svg.querySelectorAll('text.y')].map(e => [+e.getAttribute('y') - 4, +e.dataset.value]),
        lines: [...svg.querySelectorAll('g')].map(g => [g.dataset.name, ['line', 'faint'].map(
            c => g.querySelector('path.' + c).getAttribute('d')),
            [...g.querySelectorAll('circle')].map(c => [+c.getAttribute('cx'), +c.getAttribute('cy')])])})"""
    chart = page.locator(f"{box} > svg").evaluate(read)

    def scale(ticks, log):
        (p, a), (q, b) = ticks[0], ticks[-1]
        a, b = (math.log(a), math.log(b)) if log else (a, b)
        return lambda at: (math.exp if log else float)(a + (at - p) * (b - a) / (q - p))

    to_x, to_y = scale(chart["x"], log_x), scale(chart["y"], log_y)
    lines = {}
    for name, paths, circles in chart["lines"]:
        path = paths[("line", "faint").index(kind)] if kind != "circle" else ""
        points = [
            tuple(map(float, pair.split())) for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", path)
        ]
        lines[name] = [(to_x(x), to_y(y)) for x, y in (circles if kind == "circle" else points)]
    return lines


def near(points: list, expected: list) -> bool:
    return len(points) == len(expected) and all(
        one == pytest.approx(other, rel=5e-3, abs=1e-2)
        for point, pair in zip(points, expected)
        for one, other in zip(point, pair)
    )


def test_sorting_is_by_value_and_by_keyboard(opened):
    page = opened()
    page.get_by_role("combobox", name="Notebook").select_option("10_small")
    assert column(page, "started") == sorted(column(page, "started"), reverse=True), (
        "not newest first"
    )
    page.get_by_role("button", name="seconds").click()
    assert column(page, "seconds") == ["9.0", "20.0", "100.0"]
    head = page.get_by_role("button", name="lr")
    head.focus()
    page.keyboard.press("Enter")
    assert column(page, "lr") == ["0.001", "0.01", "0.1"] and column(page, "final_loss") == [
        "2",
        "1",
        "90",
    ]
    page.keyboard.press("Enter")  # the head has the focus still
    assert column(page, "lr") == ["0.1", "0.01", "0.001"]
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("lr")


FILTERS = {
    "lr=0.01": ["0.01"],
    "lr=1e-2": ["0.01"],
    "status:done": ["0.01", "0.1"],
    "status:stopped": ["0.001"],
    "tag:night": ["0.01"],
    "tag:nigh": [],
    "final_loss<3": ["0.001", "0.01"],
    "by_size.large>=4 final_loss<3": ["0.001"],
    "TOO large": ["0.1"],
    '"too large"': ["0.1"],
    "large too lr=0.01": [],
    "__proto__=1": [],
    "constructor": [],
}


def test_filter(opened):
    page = opened()
    page.get_by_role("combobox", name="Notebook").select_option("10_small")
    for words, rates in FILTERS.items():
        page.get_by_label("Filter").fill(words)
        assert len(table(page)) == 1 + len(rates), words
        assert not rates or sorted(column(page, "lr")) == rates, words
    assert "0 of 4 runs" in page.locator("#compare").inner_text()


def test_parameters_that_vary_and_promised_results_have_columns(opened):
    page = opened()
    head = table(page)[0]
    assert head == [
        "notebook",
        "status",
        "started",
        "seconds",
        "parameters",
        "results",
        "tags",
        "notes",
    ]
    assert "lr 0.1, precision fp32" in column(page, "parameters") and "score 0.5" in column(
        page, "results"
    )
    page.get_by_role("combobox", name="Notebook").select_option("10_small")
    assert table(page)[0][4:] == ["lr", "precision", "final_loss", "tags", "notes"]
    assert column(page, "status") == [
        "stopped, 50 of 600",
        "done",
        "done",
    ] and "night, long" in column(page, "tags")
    assert page.locator("td.stopped").count() == 1 and any(
        "rate too large" in text for text in column(page, "notes")
    )


def test_the_csv_is_the_table(opened):
    page = opened()
    page.get_by_role("combobox", name="Notebook").select_option("10_small")
    page.get_by_label("Filter").fill("final_loss<3")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as CSV").click()
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
    shown = table(page)
    assert rows[0] == ["run", *shown[0]] and len(rows) == len(shown) == 3
    for line, cells in zip(rows[1:], shown[1:]):
        assert line[0].startswith("10_small/2026")
        for one, other in zip(line[1:], cells):
            assert one == other or float(one) == float(other), (one, other)


def test_curves_stand_where_they_were_logged(opened):
    page = opened()
    tick(page, "0.01", "0.001")
    lines = drawn(page)
    assert len(lines) == 3 and page.locator("#curves .legend li").count() == 3
    for name, points in lines.items():
        training, rate = re.match(r"(\w+) · lr ([\d.]+)", name).groups()
        losses = LOSSES[float(rate)][training]
        assert near(points, [(10 * k, loss) for k, loss in enumerate(losses, start=1)]), name
        assert ("stopped, 50 of 600" in name) == (rate == "0.001")
    page.get_by_role("combobox", name="Training").select_option("control")
    page.get_by_role("combobox", name="Against").select_option("tokens")
    (points,) = drawn(page).values()
    assert near(
        points, [(2000 * k, loss) for k, loss in enumerate(LOSSES[0.01]["control"], start=1)]
    )
    page.get_by_role("combobox", name="Against").select_option("seconds")
    (points,) = drawn(page).values()
    assert [x for x, _ in points] == pytest.approx([1.5, 3, 4.5, 6, 7.5], rel=1e-2)
    assert "seconds of training" in page.locator("#curves svg").first.text_content()
    page.get_by_role("combobox", name="Metric").select_option("lr")
    (points,) = drawn(page).values()
    assert [y for _, y in points] == pytest.approx([0.01] * 5)


def test_log_scale_and_a_value_that_is_no_number(opened):
    page = opened()
    tick(page, "0.1")
    (name,) = drawn(page)
    assert "nan or inf: 1" in name
    page.get_by_label("log scale", exact=True).check()
    expected = [(10, 3.0), (20, 8.0), (40, 40.0), (50, 90.0)]
    (points,) = drawn(page, log_y=True).values()
    assert near(points, expected)
    assert page.locator("path.line").first.get_attribute("d").count("M") == 2, (
        "the line goes through the gap"
    )


def test_smoothing_is_a_mean_of_what_came_before(opened):
    page = opened()
    tick(page, "0.01")
    page.get_by_role("combobox", name="Training").select_option("student")
    page.get_by_label("Smoothing").fill("0.5")
    mean = total = 0.0
    expected = []
    for step, loss in enumerate(LOSSES[0.01]["student"], start=1):
        mean, total = 0.5 * mean + 0.5 * loss, 0.5 * total + 0.5
        expected.append((10 * step, mean / total))
    (points,), (faint,) = drawn(page).values(), drawn(page, kind="faint").values()
    assert near(points, expected) and [round(y, 1) for _, y in faint] == [3.0, 2.0, 1.5, 1.2, 1.0]


def test_the_legend_reads_the_value_under_the_pointer_and_under_the_arrow_keys(opened):
    page = opened()
    tick(page, "0.001")
    chart = page.locator("#curves > svg")
    chart.scroll_into_view_if_needed()
    place = page.locator("#curves text.x[data-value='30']")
    chart.hover(position={"x": float(place.get_attribute("x")) + 3, "y": 100})
    assert page.locator("#curves .legend b").inner_text() == ": 2.5 at 30"
    chart.focus()
    for _ in range(200):
        page.keyboard.press("ArrowRight")
    assert page.locator("#curves .legend b").inner_text() == ": 2 at 50"


def test_difference_of_two_runs(opened):
    page = opened()
    assert "Tick two runs" in page.locator("#difference").inner_text()
    tick(page, "0.01", "0.1")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#difference tr").all()]
    by_name = {row[0]: row[1:] for row in rows if row}
    assert by_name["lr"] == ["0.01", "0.1", "+0.09"] and by_name["precision"] == [
        "auto",
        "fp32",
        "",
    ]
    assert by_name["final_loss"] == ["1", "90", "+89"] and by_name["by_size.large"] == [
        "2",
        "180",
        "+178",
    ]
    assert (
        by_name["seconds"] == ["9", "100", "+91"]
        and "steps" not in by_name
        and "python" not in by_name
    )
    page.get_by_label("show equal rows").check()
    names = page.locator("#difference td:first-child").all_inner_texts()
    assert {"steps", "python", "commit", "packages.torch", "trainable"} <= set(
        names
    ) and "lr" in names
    tick(page, "0.001")
    assert "3 are ticked" in page.locator("#difference").inner_text()
    page.get_by_role("button", name="Untick all").click()
    assert (
        page.locator("table[aria-label=runs] tbody input:checked").count() == 0
        and "Tick runs" in page.locator("#curves").inner_text()
    )


def test_a_sweep_has_its_seeds_as_points_and_their_mean_as_a_line(opened):
    page = opened()
    assert page.get_by_label("log parameter").is_checked(), "1 to 100 is drawn on a log scale"
    (dots,) = drawn(page, "#sweep", kind="circle", log_x=True).values()
    assert near(
        sorted(dots),
        sorted((steps, 10 / steps + seed) for steps in (1, 10, 100) for seed in (0, 2)),
    )
    (line,) = drawn(page, "#sweep", log_x=True).values()
    assert near(line, [(1, 11), (10, 2), (100, 1.1)])
    assert "Runs without a number here: 1." in page.locator("#sweep").inner_text()
    page.get_by_role("combobox", name="Parameter").select_option("seed")
    lines = drawn(page, "#sweep", kind="circle")
    assert set(lines) == {"steps 1", "steps 10", "steps 100"} and near(
        lines["steps 1"], [(0, 10), (2, 12)]
    )


def test_readable_without_a_script(opened):
    page = opened(java_script_enabled=False)
    text = page.locator("body").inner_text()
    assert "final_loss 2" in text and "stopped, 50 of 600" in text and "score 0.5" in text
    assert (
        "Stopped at step 50 of 600 (student): these numbers come from a half-trained model." in text
    )
    page.locator("summary", has_text="final_loss 90").click()
    text = page.locator("body").inner_text()
    assert "rate too large" in text and "precision" in text and SENTENCE in text
    assert page.locator("img").first.get_attribute("alt") == SENTENCE
    assert page.locator("#compare").inner_text() == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_the_page_in_one_direction(opened, scheme):
    page = opened(width=390, color_scheme=scheme)
    tick(page, "0.01", "0.1")
    page.get_by_label("show equal rows").check()
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#curves > svg").bounding_box()["width"] <= 390
    controls = page.locator("#compare").locator("input, select, button").all()
    assert len(controls) > 15
    for control in controls:
        name = control.evaluate("e => e.ariaLabel || e.labels?.[0]?.innerText || e.innerText")
        assert name.strip(), control.evaluate("e => e.outerHTML")


def test_a_link_of_the_table_opens_its_run(opened):
    page = opened()
    page.get_by_role("combobox", name="Notebook").select_option("10_small")
    closed = page.locator("details[id*='000001']")
    assert closed.get_attribute("open") is None
    page.locator("td.date a").last.click()
    assert closed.get_attribute("open") is not None and "000001" in page.url
