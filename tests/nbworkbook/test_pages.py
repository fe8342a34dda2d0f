"""An executed notebook becomes a page whose links lead somewhere; a damaged one is a sentence."""

import json
import os
import re
import shutil
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from nblib import files, paths
from nbworkbook import page_links, page_markdown, pages

CELL = {
    "cell_type": "code",
    "id": "a",
    "metadata": {},
    "source": "1 + 1",
    "execution_count": 1,
    "outputs": [],
}


@pytest.fixture
def folder(tmp_path):
    document = {"cells": [CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "notebook.ipynb").write_text(json.dumps(document))
    return tmp_path


def test_a_page_is_converted_again_only_when_its_notebook_changed(folder):
    assert pages.convert(folder) is None
    stamp = (folder / "notebook.html").stat().st_mtime_ns
    pages.convert(folder)
    assert (folder / "notebook.html").stat().st_mtime_ns == stamp, (
        "converted again although nothing changed"
    )
    (folder / "notebook.ipynb").touch()
    pages.convert(folder)
    assert (folder / "notebook.html").stat().st_mtime_ns > stamp


def test_a_page_of_another_policy_is_converted_again(folder):
    pages.convert(folder)
    page = folder / "notebook.html"
    page.write_text(page.read_text().replace("script-src", "style-src"))
    pages.convert(folder)
    assert pages.POLICY in page.read_text() and "1" in page.read_text()


def test_what_is_no_notebook_leaves_no_page_and_says_so(folder):
    pages.convert(folder)
    files.write(folder / "notebook.ipynb", "{")
    sentence = pages.convert(folder)
    assert sentence.startswith("unreadable: ") and "notebook.ipynb" in sentence
    assert not (folder / "notebook.html").exists()
    assert pages.convert(folder / "nowhere") is None, "a run without a notebook has no page"


def test_text_is_no_markup_in_an_attribute_either():
    assert (
        pages.text("<b a='1' c=\"2\">&\ud800") == "&lt;b a=&#x27;1&#x27; c=&quot;2&quot;&gt;&amp;?"
    )


class _Page(HTMLParser):
    """The links of a page, its ids, and its text outside of code."""

    def __init__(self, page: str):
        super().__init__()
        self.links, self.ids, self.words, self.inside = [], set(), [], 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.inside += tag in ("code", "pre", "style", "script")
        found = dict(attributes)
        self.ids.add(found.get("id"))
        self.links += [found[name] for name in ("href", "src") if name in found]

    def handle_endtag(self, tag):
        self.inside -= tag in ("code", "pre", "style", "script")

    def handle_data(self, data):
        if not self.inside:
            self.words.append(data)


def leads_nowhere(page: Path) -> list[str]:
    """The links of a page that lead to no file and to no heading."""
    parsed = _Page(page.read_text())
    broken = []
    for link in parsed.links:
        if re.match(r"(https?|mailto|data):", link):
            continue
        path, _, fragment = link.partition("#")
        is_there = (
            (page.parent / unquote(path)).exists() if path else unquote(fragment) in parsed.ids
        )
        broken += [] if is_there else [link]
    return broken


@pytest.mark.slow
def test_in_the_page_of_each_notebook_every_link_leads_somewhere_and_formulas_are_drawn(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("NBLIB_OUTPUTS", str(tmp_path))
    links = formulas = 0
    for notebook in sorted(paths.notebooks().glob("*.ipynb")):
        folder = tmp_path / notebook.stem / "run"
        folder.mkdir(parents=True)
        shutil.copy(notebook, folder / "notebook.ipynb")
        assert pages.convert(folder) is None
        page = folder / "notebook.html"
        assert leads_nowhere(page) == [], notebook.stem
        words = "".join(_Page(page.read_text()).words)
        assert not re.search(r"\$\$|\\[a-z]{3,}", words), notebook.stem
        links += len([link for link in _Page(page.read_text()).links if link.startswith("..")])
        formulas += page.read_text().count("<math")
    assert links > 200 and formulas > 150, "what the notebooks have"


def a_page(folder: Path, text: str) -> str:
    """The page of a notebook with this text, in the folder of its run."""
    cell = {"cell_type": "markdown", "id": "m", "metadata": {}, "source": text}
    document = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    files.write(folder / "notebook.ipynb", json.dumps(document))
    assert pages.convert(folder) is None
    return (folder / "notebook.html").read_text()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a notebook's folder, a document, and the folder of a run."""
    for name in ("notebooks/helper.py", "docs/glossary.md", "docs/two words.md"):
        files.write(tmp_path / name, "# Words")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    for name in ("notebooks", "outputs"):
        monkeypatch.setenv(f"NBLIB_{name.upper()}", str(tmp_path / name))
    (tmp_path / "outputs" / "00_a" / "run").mkdir(parents=True)
    return tmp_path


def test_links_lead_from_the_page_to_the_files_and_what_leads_nowhere_is_text(project):
    run = project / "outputs" / "00_a" / "run"
    page = a_page(
        run,
        "[a](../docs/glossary.md#rank) [b](helper.py) [c](../docs/two%20words.md) [d](gone.md)"
        " [e](/etc/passwd) [f](../../outside.md) [g](https://example.org/x)"
        " ![h](../docs/glossary.md)"
        " [i](x%00.md)\n\n# The *First* part!\n\n[j](#the-first-part) [k](#another-part)",
    )
    files.write(project.parent / "outside.md", "of somebody else")
    links = dict(re.findall(r'<a href="([^"]*)">(\w)</a>', page))
    leads = {text: unescape(link) for link, text in links.items()}
    assert (
        leads["a"] == "../../../docs/glossary.md#rank"
        and leads["b"] == "../../../notebooks/helper.py"
    )
    assert leads["c"] == "../../../docs/two%20words.md" and leads["g"] == "https://example.org/x"
    assert 'src="../../../docs/glossary.md"' in page and leads["j"] == "#The-First-part%21"
    assert leads.keys() == {"a", "b", "c", "g", "j"} and not leads_nowhere(run / "notebook.html")
    assert all(f"<a>{text}</a>" in page for text in "defik"), "their text is there"


def test_links_lead_to_the_site_once_it_is_made_and_back_when_it_is_deleted(project):
    run, site = project / "outputs" / "00_a" / "run", page_links.site()
    assert '"../../../docs/glossary.md"' in a_page(run, "[a](../docs/glossary.md) [b](helper.py)")
    files.write(site / "docs" / "glossary.html", "")
    assert pages.convert(run) is None
    page = (run / "notebook.html").read_text()
    assert '"../../book/docs/glossary.html"' in page and '"../../../notebooks/helper.py"' in page
    shutil.rmtree(site)
    assert pages.convert(run) is None
    assert '"../../../docs/glossary.md"' in (run / "notebook.html").read_text()


def test_the_links_of_a_notebook_by_its_path_count_from_its_own_folder(project):
    run, notebook = project / "outputs" / "00_a" / "run", project / "mine" / "00_a.ipynb"
    files.write(notebook, "{}")
    files.write(project / "mine" / "beside.py", "")
    files.write(run / "run.json", json.dumps({"path": str(notebook)}))
    assert '"../../../mine/beside.py"' in a_page(run, "[a](beside.py)")
    for path in (3, "gone", "x" * 5000, "\x00"):
        files.write(run / "run.json", json.dumps({"path": path}))
        os.utime(run / "notebook.ipynb", (time.time() + 10, time.time() + 10))
        assert pages.convert(run) is None and "<a>a</a>" in (run / "notebook.html").read_text()


def test_formulas_are_mathml_and_what_is_no_formula_is_code(project):
    run = project / "outputs" / "00_a" / "run"
    page = a_page(
        run,
        "The loss $\\frac{a}{b}$ is\n\n$$\\sum_{i=1}^n x_i$$\n\n"
        "\\begin{align}a &= b\\end{align}\n\n"
        "`$$code$$` and $\\left( x$, 5 \\$.",
    )
    assert page.count("<math") == 3 and page.count('display="block"') == 2 and "<mfrac>" in page
    assert "<code>$$code$$</code>" in page and "<code>\\left( x</code>" in page
    assert "$$" not in "".join(_Page(page).words)
    assert page_markdown.mathml("a<b", "inline").count("<") == 10, "its sign is no tag"


def test_an_output_of_latex_is_a_formula(project):
    run = project / "outputs" / "00_a" / "run"
    output = {
        "output_type": "display_data",
        "metadata": {},
        "data": {"text/latex": r"$\frac{1}{2}$"},
    }
    document = {
        "cells": [CELL | {"outputs": [output]}],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    files.write(run / "notebook.ipynb", json.dumps(document))
    assert pages.convert(run) is None and "<mfrac>" in (run / "notebook.html").read_text()
