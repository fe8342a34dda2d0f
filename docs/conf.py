"""The book: the notebooks as they are stored, the documents and the API, as a static site with
search.

`make book` builds it without a network. The source folder is the root of the project, so that links
between notebooks and documents work here as they do in JupyterLab and on a forge. No notebook is
executed. The pages of the API are the docstrings of the packages, read by autodoc.
"""

import logging
import re
import shutil
import sys
from pathlib import Path

from loopdoctor import pages

# for heading ids, see below
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "notebooks"))
# autodoc imports it, and it warns of a missing kernel
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

project, author, copyright = "The workbook", "", ""
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx-mathjax-offline"]
root_doc = "README"
include_patterns = ["docs/*.md", "docs/api/*.md", "docs/*.ipynb", "notebooks/*.ipynb"]
include_patterns += ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
include_patterns += [
    f"{folder}/README.md" for folder in ("doctor", "nblib", "outputs", "parameters", "tests")
]
include_patterns += ["nblib/methods/*/README.md", "notebooks/experiments/README.md"]

nb_execution_mode = "off"
nb_mime_priority_overrides = [
    ("html", "text/html", 0),
    ("html", "image/png", 1),
    ("html", "text/plain", 9),
]
myst_enable_extensions = ["dollarmath", "amsmath"]
# tests/test_docs.py follows every link and anchor
suppress_warnings = ["myst.xref_missing", "myst.header"]
# a heading has the id that JupyterLab and forges give it, so that one link serves all three
myst_heading_anchors, myst_heading_slug_func = 4, "lessons.claims.heading_id"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
add_module_names = False
python_maximum_signature_line_length = 88

html_theme = "sphinx_book_theme"
html_title = "The workbook"
html_theme_options = {"show_toc_level": 2, "use_download_button": False}
html_copy_source = False
html_static_path, html_css_files = ["book.css"], ["book.css"]


FIRST = (
    '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=README.html"><a '
    'href="README.html">The workbook</a>\n'
)
CONTENTS = """
```{toctree}
:hidden:
:caption: Set-up and mechanics
:glob:
notebooks/0*
```
```{toctree}
:hidden:
:caption: Methods
:glob:
notebooks/1*
```
```{toctree}
:hidden:
:caption: Comparison
:glob:
notebooks/2*
```
```{toctree}
:hidden:
:caption: In your own script
docs/examples
nblib/README
nblib/methods/lrc/README
nblib/methods/ard/README
nblib/methods/moe/README
nblib/methods/muon/README
nblib/methods/distill/README
nblib/methods/goose/README
docs/api/nblib
docs/api/methods
docs/api/loopdoctor
```
```{toctree}
:hidden:
:caption: Reference
docs/clusters
docs/claims
notebooks/experiments/README
docs/glossary
docs/solutions
doctor/README
docs/checks
tests/README
parameters/README
outputs/README
CONTRIBUTING
CHANGELOG
docs/log
```
"""
COPIED = ("notebooks/lessons", "notebooks/experiments", "nblib", "examples", "outputs/published")


def setup(app) -> None:
    app.connect("source-read", _contents)
    app.connect("autodoc-process-docstring", _as_written)
    app.connect("build-finished", _complete)


def _contents(app, name: str, source: list[str]) -> None:
    """Add what stands in no file that a forge shows: the list at the side, and the pages of the
    doctor's checks.
    """
    if name == root_doc:
        source[0] += CONTENTS
    if name == "docs/checks":
        source[0] += "\n" + pages.page()


def _as_written(app, what: str, name: str, subject, options, lines: list[str]) -> None:
    """Show a docstring as it is written: sentences as text, all that is indented or in columns
    letter for letter.
    """
    paragraphs = re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines).strip("\n"))
    shown: list[str] = []
    for paragraph in paragraphs:
        rows = paragraph.split("\n")
        indented = all(row.startswith(" ") for row in rows)
        if indented or any(re.search(r"\S {2,}\S|^ *[-*] ", row) for row in rows):
            shown += [".. code-block:: text", "", *(f"   {row}" for row in rows), ""]
        else:
            shown += [*(_plain(row) for row in rows), ""]
    lines[:] = shown


def _plain(row: str) -> str:
    """Write a line as RST that means just its characters, with `names` as code."""
    parts = re.split(r"(`[^`\n]+`)", row.strip())
    return "".join(
        f"`{part}`" if part.startswith("`") else re.sub(r"([\\*`|_])", r"\\\1", part)
        for part in parts
    )


def _complete(app, failure) -> None:
    """Write the page that a browser opens first, and copy the files that pages and outputs of
    pitfalls link to.
    """
    if failure is None:
        root, site = Path(app.srcdir), Path(app.outdir)
        for folder in COPIED:
            ignore = shutil.ignore_patterns("__pycache__", "*.md", "unfinished")
            shutil.copytree(root / folder, site / folder, dirs_exist_ok=True, ignore=ignore)
        (site / "index.html").write_text(FIRST, encoding="utf-8")
