"""The site that `make book` builds: without a warning, every link in it leads somewhere, nothing
comes from a network.

Its packages are not in the lock. `make test-all` installs them; without them these tests are
skipped.
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

from nblib import paths

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("myst_nb") is None,
        reason="needs the packages of docs/requirements.txt: make book",
    ),
]


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, file: Path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "source") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and "stylesheet" in given.get("rel", ""):
            self.loads.append(given["href"])


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    site, cache = tmp_path_factory.mktemp("book"), tmp_path_factory.mktemp("cache")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-c",
        "docs",
        "-d",
        cache,
        "-q",
        "-W",
        "--keep-going",
    ]
    built = subprocess.run([*command, ".", site], cwd=paths.root(), capture_output=True, text=True)
    assert built.returncode == 0 and not built.stderr, built.stderr
    return site


@pytest.fixture(scope="module")
def pages(book) -> dict[Path, Page]:
    return {
        file: Page(file) for file in sorted(book.rglob("*.html")) if "_static" not in file.parts
    }


def test_every_notebook_and_document_is_a_page(book, pages):
    names = {file.relative_to(book).with_suffix("").as_posix() for file in pages}
    wanted = {f"notebooks/{notebook.stem}" for notebook in paths.notebooks().glob("*.ipynb")}
    assert wanted | {"README", "docs/claims", "docs/glossary", "docs/log", "search"} <= names


def test_every_link_leads_to_a_file_and_an_id(book, pages):
    dead = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or "?" in path:
                continue
            target = (file.parent / unquote(path)).resolve() if path else file
            if not target.exists():
                dead.append(f"{file.relative_to(book)}: {link}")
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                dead.append(f"{file.relative_to(book)}: {link} (no such id)")
    assert not dead, "\n".join(sorted(set(dead))[:40])


def test_no_page_loads_anything_from_a_network(pages):
    for file, page in pages.items():
        for address in page.loads:
            assert not re.match(r"(https?:)?//", address), f"{file.name}: {address}"
            if not address.startswith("data:"):
                assert (file.parent / unquote(address.split("?")[0])).resolve().exists(), (
                    f"{file.name}: {address}"
                )


def test_formulas_are_formulas_and_a_phone_gets_its_width(book):
    text = (book / "notebooks" / "10_lrc.html").read_text(encoding="utf-8")
    assert 'class="math' in text and "mathjax" in text.lower() and 'name="viewport"' in text
    assert (book / "searchindex.js").stat().st_size > 10_000
