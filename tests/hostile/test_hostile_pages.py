"""Notebooks that try to act on whoever opens their page: in the written HTML nothing is left that
could, and a real browser runs nothing.

After what is hostile each page has a cell of harmless text, which must still be there: a page that
shows nothing would be safe too.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import browser
import pytest
import small_notebooks
from attack import plant

from nbworkbook import pages, parameters, report, show

pytestmark = pytest.mark.slow


ACT = "document.body.dataset.hurt=1"
HTML = {
    "script": f"<script>{ACT}</script>",
    "broken script": f"<scr<script>ipt>{ACT}</scr</script>ipt><SCRIPT/x>{ACT}</SCRIPT\n>",
    "image": f"<img src=x onerror='{ACT}'><image src=x onerror='{ACT}'>",
    "svg": f"<svg onload='{ACT}'><script>{ACT}</script><animate onbegin='{ACT}' attributeName=x dur=1s></svg>",
    "svg use": "<svg><use href=\"data:image/svg+xml,<svg id='x' xmlns='http://www.w3.org/2000/svg'>"
    f'<script>{ACT}</script></svg>#x"/></svg>',
    "foreign": f"<svg><foreignObject><body onload='{ACT}'></foreignObject></svg><math><mtext><img src=x onerror={ACT}>",
    "frame": f'<iframe srcdoc="<script>parent.{ACT}</script>"></iframe>'
    f"<iframe src='javascript:parent.{ACT}'></iframe>",
    "link": f"<a id=go href='javascript:{ACT}'>go</a><a href=' &#106;avascript:{ACT}'>go</a>",
    "data link": f"<a id=go href='data:text/html,<script>{ACT}</script>'>go</a><a href='&#100;ata:text/html,x'>go</a>",
    "refresh": "<meta http-equiv=refresh content='0;url=https://example.invalid/'>",
    "policy": '<meta http-equiv=Content-Security-Policy content="script-src *">'
    "<base href='https://example.invalid/'>",
    "style": "<style>@import url(https://example.invalid/a.css); body {display: none}</style>"
    "<p style='background:url(https://example.invalid/b.png); position:fixed; width:1px'>p</p>"
    "<link rel=stylesheet href=https://example.invalid/c.css>",
    "objects": f"<object data='data:text/html,<script>{ACT}</script>'></object><embed src='javascript:{ACT}'>"
    f"<applet code=x></applet><portal src='data:text/html,x'></portal>",
    "form": f"<form id=f action='javascript:{ACT}'><button id=go>go</button><input autofocus onfocus='{ACT}'></form>",
    "events": f"<details open ontoggle='{ACT}'>d</details><video src=x onerror='{ACT}'></video><body onload='{ACT}'>"
    f"<marquee onstart='{ACT}'>m</marquee><progress value=1 onclick='{ACT}' style='x:expression({ACT})'></progress>",
    "template": f"<template><script>{ACT}</script></template>"
    f'<noscript><p title="</noscript><img src=x onerror={ACT}>">',
    "comment": f"<!--><img src=x onerror='{ACT}'>--><!-- ",
    "unclosed": f"</div></div></pre></body></html><textarea><xmp><plaintext><img src=x onerror='{ACT}'>",
    "formula": f"$\\text{{<img src=x onerror='{ACT}'>}}$ $$\\href{{javascript:{ACT}}}{{go}}$$"
    f"$x</mtext><script>{ACT}</script>$",
    "formula that is none": f"$\\frac{{<img src=x onerror='{ACT}'>$ $\\begin{{x}}<script>{ACT}</script>\\end{{y}}$",
    "formula with HTML": "<math><mtext><table><mglyph><style><!--</style>"
    f"<img title='--&gt;&lt;img src=1 onerror={ACT}&gt;'></mglyph></table></mtext>"
    f"<annotation-xml encoding='text/html'><img src=x onerror='{ACT}'></annotation-xml></math>"
    f"<math href='javascript:{ACT}'><mi xlink:href='javascript:{ACT}'>x</mi><maction actiontype='statusline#{ACT}'>",
    "picture from elsewhere": "<img src=https://example.invalid/d.png><img src=//example.invalid/e.png>"
    "<img src='\\\\example.invalid\\f.png'><img srcset='https://example.invalid/g.png'>",
}
OTHER = {  # outputs of other kinds, and metadata that the templates put into attributes
    "javascript": {
        "output_type": "display_data",
        "metadata": {},
        "data": {"application/javascript": ACT},
    },
    "svg picture": {
        "output_type": "display_data",
        "metadata": {},
        "data": {
            "image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg' onload='{ACT}'><script>{ACT}</script></svg>"
        },
    },
    "width": {
        "output_type": "display_data",
        "metadata": {"image/png": {"width": f"1 onerror={ACT}", "alt": f"' onerror='{ACT}"}},
        "data": {"image/png": f"x' onerror='{ACT}"},
    },
    "isolated": {
        "output_type": "display_data",
        "metadata": {"text/html": {"isolated": True}},
        "data": {"text/html": f"<script>{ACT}</script>"},
    },
    "widget": {
        "output_type": "display_data",
        "metadata": {},
        "data": {
            "application/vnd.jupyter.widget-view+json": {
                "model_id": "</script><script>" + ACT + "</script>"
            }
        },
    },
    "latex": {
        "output_type": "display_data",
        "metadata": {},
        "data": {"text/latex": f"$<script>{ACT}</script>$"},
    },
    "stream": {
        "output_type": "stream",
        "name": "stdout",
        "text": f"\x1b[31m<script>{ACT}</script>\x1b[0m",
    },
    "error": {
        "output_type": "error",
        "ename": "<script>",
        "evalue": ACT,
        "traceback": [f"<script>{ACT}</script>"],
    },
    "mermaid": {
        "output_type": "display_data",
        "metadata": {},
        "data": {"text/vnd.mermaid": f"<script>{ACT}</script>"},
    },
}
WORDS = "harmless words"


def _shown(kind: str, text: str) -> dict:
    return {
        "output_type": "display_data",
        "metadata": {},
        "data": {kind: text, "text/plain": "plain"},
    }


def _code(*outputs: dict, tags: list[str] | None = None) -> dict:
    metadata = {"tags": tags or []}
    return {
        "cell_type": "code",
        "metadata": metadata,
        "source": "1",
        "execution_count": 1,
        "outputs": list(outputs),
    }


def _markdown(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


CELLS = {f"html: {name}": [_code(_shown("text/html", text))] for name, text in HTML.items()}
CELLS |= {
    f"markdown output: {name}": [_code(_shown("text/markdown", text))]
    for name, text in HTML.items()
}
CELLS |= {f"markdown cell: {name}": [_markdown(text)] for name, text in HTML.items()}
CELLS |= {f"output: {name}": [_code(output)] for name, output in OTHER.items()}
CELLS |= {
    "markdown link": [
        _markdown(f"[go](javascript:{ACT}) ![x](javascript:{ACT}) <javascript:{ACT}>")
    ],
    "markdown title": [
        _markdown(f'# <img src=x onerror={ACT}>\n\n[a]: javascript:{ACT} "x"\n\n[a] ![a]')
    ],
    "markdown code": [_markdown(f"```<script>\n</code></pre><script>{ACT}</script>\n```")],
    "tag of a cell": [_code(tags=[f'"><script>{ACT}</script>'])],
    "attachment": [
        _markdown("![x](attachment:a)") | {"attachments": {"a": {"image/png": f'" onerror="{ACT}'}}}
    ],
    "raw cell": [
        {
            "cell_type": "raw",
            "metadata": {"raw_mimetype": "text/html"},
            "source": f"<script>{ACT}</script>",
        }
    ],
    "source of a cell": [_code() | {"source": f"'</pre><script>{ACT}</script>'"}],
}


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


def _pages(workbook: Path, cells: dict[str, list[dict]]) -> list[Path]:
    for number, (name, each) in enumerate(cells.items()):
        each = [cell | {"id": f"c{n}"} for n, cell in enumerate([*each, _markdown(WORDS)])]
        metadata = {"title": f"</title><script>{ACT}</script>", "language_info": {"name": "python"}}
        document = {"cells": each, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
        folder = workbook / "outputs" / "00_setup" / f"run-{number:03d}"
        plant(folder / "notebook.ipynb", document)
        plant(
            folder / "run.json",
            {"status": "failed", "sentence": f"<script>{ACT}</script>", "name": name},
        )
        plant(folder / "result.json", {f"<img src=x onerror={ACT}>": f"<script>{ACT}</script>"})
    report.write()
    return [
        workbook / "outputs" / "00_setup" / f"run-{number:03d}" / "notebook.html"
        for number in range(len(cells))
    ]


class _Tags(HTMLParser):
    """The tags of a page and their attributes, as a parser sees them that is not the one that
    cleaned the page.
    """

    def __init__(self, page: str):
        super().__init__()
        self.names, self.attributes = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]


def test_nothing_that_acts_is_left_in_the_page(workbook):
    for name, page in zip(CELLS, _pages(workbook, CELLS)):
        text = page.read_text()
        head, _, body = text.partition("<body>")
        assert "Content-Security-Policy" in head and "script-src 'none'" in head
        tags = _Tags(body)
        assert tags.names <= set(pages.TAGS) | {"tbody"}, name
        for tag, attribute, value in tags.attributes:
            value = re.sub(r"\s", "", value or "").lower()
            assert attribute in pages.ATTRIBUTES or (tag, attribute) in (
                ("a", "href"),
                ("img", "src"),
            ), name
            if attribute == "href":
                assert re.match("https?:|mailto:|#|[^:]*$", value), name
            if attribute == "src":
                assert re.match("data:image/(png|svg|jpeg)|[^:/][^:]*$", value), name
            assert "url(" not in value and "position" not in value, name
        assert f"<p>{WORDS}</p>" in body, f"{name}: what was harmless is gone too"
    index = (workbook / "outputs" / "index.html").read_text()
    assert index.count("<script") == 2 == index.count("</script>") and "<img src=x" not in index


def test_what_our_own_outputs_are_made_of_stays(workbook, monkeypatch):
    """Each tag and attribute of a stored notebook's page is there as many times as it would be
    without the filter.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic")
    # tables, pictures, source, the code of pitfalls
    stored = Path(__file__).parents[2] / "notebooks" / "10_lrc.ipynb"
    monkeypatch.setenv("NBLIB_NOTEBOOKS", str(stored.parent))  # from where its links count
    document, progress = json.loads(stored.read_text()), show.Progress("training")
    for step in (1, 2):
        progress({"step": step, "of": 9, "loss": 3.0 - step})
    # and what a run that was killed while it trained leaves: a bar with its line
    live = {"output_type": "display_data", "metadata": {}, "data": progress._repr_mimebundle_()}
    next(cell for cell in document["cells"] if cell["cell_type"] == "code")["outputs"].append(live)
    source = workbook / "live.ipynb"
    source.write_text(json.dumps(document))
    before, _ = exporter.from_filename(str(source))
    after, _ = pages._body(source)

    def parts(page: str) -> dict[str, int]:
        tags = re.findall(r"<(\w+)((?:\s[^<>]*)?)>", page)
        names = [
            f"{tag} {name}".lower()
            for tag, inside in tags
            for name in ("", *re.findall(r"([\w-]+)=", inside))
        ]
        return {
            name: names.count(name)
            for name in set(names)
            if not name.startswith(("tbody", "span role"))
        }

    before, after = parts(before), parts(after)
    assert {
        name: (count, after.get(name, 0))
        for name, count in before.items()
        if after.get(name, 0) < count
    } == {}
    assert {
        "progress value",
        "path d",
        "text transform",
        "svg width",
        "img src",
        "td style",
        "span style",
    } <= after.keys()
    assert {"p style", "pre style"} <= after.keys()


def test_a_page_of_an_older_version_is_made_again(workbook):
    (page,) = _pages(workbook, {"script": CELLS["html: script"]})
    page.write_text("<script>of a version without a policy</script>")
    report.write()
    assert "<script" not in page.read_text() and WORDS in page.read_text()


@pytest.mark.browser
def test_no_script_runs_in_a_real_browser(workbook):
    """Every page from the disk, each link and button pressed; then the same HTML without the
    filter, so that the policy alone stands between a script and the reader.
    """
    chromium = browser._chromium()
    from playwright.sync_api import sync_playwright

    files = _pages(workbook, CELLS)
    proof = workbook / "proof.html"  # the same browser does run scripts
    proof.write_text(pages.page("x", HTML["script"]).replace(pages.POLICY, ""))
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=browser.FLAGS)
        assert _hurt(opened, proof)[0] == "1"
        for file in [*files, workbook / "outputs" / "index.html"]:
            hurt, asked, words = _hurt(opened, file)
            assert hurt is None and asked == [] and (words or file.name == "index.html"), file
        for name in HTML.keys() - {"refresh"}:  # no policy of a page forbids that: the filter does
            proof.write_text(pages.page("x", f"<p>{WORDS}</p>{HTML[name]}"))
            assert _hurt(opened, proof)[0] is None, f"the policy lets {name} act"
        opened.close()


ATTEMPTS = [
    f"</script><script>{ACT}</script>",
    f"<!--<script>{ACT}",
    f"<img src=x onerror='{ACT}'>",
    f"\"><svg onload='{ACT}'>",
    f"'><a href='javascript:{ACT}'>go</a>",
    f"javascript:{ACT}",
    f"\u2028{ACT}//\u2029",
    "__proto__",
    "constructor",
    "toString",
    "=HYPERLINK(1)",
    "\ud800",
    "compare",
    "",
]


def _attack_by(folder: Path, name: str, *, text: str) -> None:
    """A run in which everything that can hold words holds the attempt."""
    record = {
        "status": text or "done",
        "sentence": text,
        "started": text,
        "seconds": text,
        "command": text,
    }
    record |= {
        "tags": [text, {text: text}],
        "notes": [{"time": text, "text": text}, text],
        "headline": [text],
    }
    plant(folder / "run.json", record | {"stopped": {text: {"step": text, "of": text}}})
    plant(
        folder / "result.json",
        {text: text, "number": 1.5, "inside": {text: {text: 2}}, f"{text} ": 3},
    )
    plant(
        folder / "environment.json",
        {text: text, "packages": {text: text}, "__proto__": {"polluted": 1}},
    )
    lines = [f"{parameters.spell(key)}: {parameters.spell(text)}" for key in {text, "lr"}]
    plant(folder / "parameters.yaml", "\n".join(lines).encode("utf-8", "replace"))
    values = {text: 1.0, "loss": 2.0, "__proto__": 3.0, "constructor": "nan", f"{text}!": {"a": 1}}
    records = [{"run": text, "step": step, "tokens": step, **values} for step in range(3)]
    plant(folder / "metrics.jsonl", "\n".join(map(json.dumps, records)).encode())
    row = {
        "run": text,
        "parameters": {text: text, "lr": text, "seed": 1},
        "results": {text: 1, "loss": 2},
    }
    facts = {
        "varied": {text: [text], "lr": [1], "seed": [1]},
        "rows": [row, [], text, {"parameters": text}],
    }
    plant(folder.parent / f"sweep-{name}.json", facts)
    for picture in ("a" if "/" in text or not text or "\ud800" in text else text,):
        plant(folder / "figures" / f"{picture}.png", _png(text))


def _png(sentence: str) -> bytes:
    import io

    from PIL import Image, PngImagePlugin

    about, file = PngImagePlugin.PngInfo(), io.BytesIO()
    about.add_itxt("Description", sentence.encode("utf-8", "replace").decode())
    Image.new("RGB", (9, 9)).save(file, format="png", pnginfo=about)
    return file.getvalue()


@pytest.mark.browser
def test_what_runs_say_is_text_on_the_comparison_page(workbook):
    """Every attempt in every place: names, values, notes, tags, metrics, figures, sweeps, folders.
    Everything is ticked and every control is used; nothing acts, nothing leaves, nothing complains,
    and the words are there as text.
    """
    from playwright.sync_api import sync_playwright

    for number, attempt in enumerate(ATTEMPTS):
        folder = (
            attempt if attempt and "/" not in attempt and "\ud800" not in attempt else f"n{number}"
        )
        for notebook in {folder, "10_all"}:
            _attack_by(
                workbook / "outputs" / notebook / f"{folder}-{number:02d}",
                f"{number:02d}",
                text=attempt,
            )
    index = report.write()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser._chromium(), args=browser.FLAGS
        )
        page, complaints = chromium.new_page(viewport={"width": 390, "height": 900}), []
        page.set_default_timeout(20_000)
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "blob:")) else complaints.append(r.url),
        )
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(index.as_uri())
        shown = page.locator("#compare").inner_text()
        for attempt in filter(str.strip, ATTEMPTS):
            words = re.sub(r"\s+", " ", parameters.clip(attempt)).replace("\ud800", "")
            assert words in re.sub(r"\s+", " ", shown) or not words.isascii(), words
        page.get_by_label("tick all shown runs").check()
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        everything = """() => {
            for (const select of document.querySelectorAll('#compare select'))
                for (const option of [...select.options]) {
                    select.value = option.value;
                    select.dispatchEvent(new Event('change'));
                }
            document.querySelectorAll('#compare input[type=checkbox]').forEach(each => each.click());
            document.querySelectorAll('th button').forEach(each => each.click());
            document.querySelectorAll('#compare td a, summary').forEach(each => each.click());
        }"""
        page.evaluate(everything)
        for attempt in ATTEMPTS:
            page.get_by_label("Filter").fill(f"{attempt} {attempt}={attempt}".replace("\ud800", ""))
        page.get_by_label("Filter").fill("")
        page.get_by_label("Notebook").select_option("10_all")
        page.get_by_role("button", name="Untick all").click()
        for box in page.locator("table[aria-label=runs] tbody input").all()[:2]:
            box.check()
        assert "second minus first" in page.locator("#difference").inner_text()
        page.wait_for_timeout(100)
        assert page.evaluate("[document.body.dataset.hurt, ({}).polluted]") == [None, None]
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, (
            "a long name widens the page"
        )
        scripts = (
            page.locator("script").count(),
            page.locator("#compare img, #compare iframe").count(),
        )
        assert scripts == (2, 0) and page.url.startswith("file:") and complaints == []
        links = page.locator("a").evaluate_all("all => all.map(each => each.protocol)")
        assert set(links) == {"file:"} and len(links) > 2 * len(ATTEMPTS)
        # the policy alone: a script that somebody got into the page does not run
        text = index.read_text().replace(
            "<h1>", f"<script>{ACT}</script><img src=x onerror='{ACT}'><h1>", 1
        )
        index.write_text(text)
        page.goto(index.as_uri())
        assert (
            page.evaluate("document.body.dataset.hurt") is None
            and page.locator("#compare h2").count() == 1
        )
        chromium.close()


def _hurt(opened, file: Path) -> tuple[str | None, list[str], bool]:
    """What scripts left on the page, which other places it asked for, and whether the harmless
    words are seen.
    """
    page = opened.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    pressed = "[...document.querySelectorAll('a, button, summary')].filter(each => each.protocol !== 'file:')"
    page.evaluate(f"{pressed}.forEach(each => each.click())")
    page.wait_for_timeout(50)
    hurt, words = (
        page.evaluate("document.body.dataset.hurt"),
        page.get_by_text(WORDS).first.is_visible(),
    )
    at = page.url.partition("#")[0]
    page.close()
    places = [url for url in asked if not url.startswith(("file:", "data:image"))]
    return hurt, places + [at] * (not at.startswith("file:")), words
