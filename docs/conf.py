"""The book: the notebooks as they are stored, and the pages of documentation, as a static site with search.

`make book` builds it without a network. The source folder is the root of the project, so that links between notebooks
and documents work here as they do in JupyterLab and on a forge. No notebook is executed.
"""

import shutil
from pathlib import Path

from loopdoctor import pages

project, author, copyright = "The workbook", "", ""
extensions = ["myst_nb", "sphinx-mathjax-offline"]
root_doc = "README"
include_patterns = ["docs/*.md", "docs/*.ipynb", "notebooks/*.ipynb", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
include_patterns += [f"{folder}/README.md" for folder in ("doctor", "nblib", "outputs", "parameters", "tests")]

nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "image/png", 1), ("html", "text/plain", 9)]
myst_enable_extensions = ["dollarmath", "amsmath"]
suppress_warnings = ["myst.xref_missing", "myst.header"]  # tests/test_docs.py follows every link and anchor
# a heading has the id that JupyterLab and forges give it, so that one link serves all three
myst_heading_anchors, myst_heading_slug_func = 4, "lessons.claims.heading_id"

html_theme = "sphinx_book_theme"
html_title = "The workbook"
html_theme_options = {"show_toc_level": 2, "use_download_button": False}
html_copy_source = False
html_static_path, html_css_files = ["book.css"], ["book.css"]


FIRST = (
    '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=README.html"><a href="README.html">The workbook</a>\n'
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
:caption: Reference
docs/clusters
docs/claims
docs/glossary
docs/solutions
doctor/README
docs/checks
nblib/README
tests/README
parameters/README
outputs/README
CONTRIBUTING
CHANGELOG
docs/log
```
"""


def setup(app) -> None:
    app.connect("source-read", _contents)
    app.connect("build-finished", _complete)


def _contents(app, name: str, source: list[str]) -> None:
    """Add what stands in no file that a forge shows: the list at the side, and the pages of the doctor's checks."""
    if name == root_doc:
        source[0] += CONTENTS
    if name == "docs/checks":
        source[0] += "\n" + pages.page()


def _complete(app, failure) -> None:
    """The page that a browser opens first, and the files that the outputs of pitfalls link to."""
    if failure is None:
        root, site = Path(app.srcdir), Path(app.outdir)
        for folder in ("notebooks/lessons", "nblib"):
            ignore = shutil.ignore_patterns("__pycache__", "*.md")
            shutil.copytree(root / folder, site / folder, dirs_exist_ok=True, ignore=ignore)
        (site / "index.html").write_text(FIRST, encoding="utf-8")
