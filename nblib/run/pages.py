"""A page of our own, and an executed notebook as one: readable from a disk, and nothing on it can act.

Of a notebook's HTML only what is looked at stays (`TAGS`), and the page's policy lets no script run, no form send and
nothing be fetched. A notebook is converted only when it is newer than its page.

Footgun: formulas in the notebooks' text stay LaTeX on these pages; to render them would need MathJax from the network.
"""

import html
import re
import sys
from pathlib import Path
from typing import Any

from nblib import files, paths
from nblib.run import parameters

POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'none';
 object-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src 'self' file: data:">"""
# What is left of a notebook's HTML: what its text and our own tables, pictures and lines of progress are made of.
TAGS = """a abbr b blockquote br caption code col colgroup dd del details div dl dt em figcaption figure h1 h2 h3 h4
 h5 h6 hr i img kbd li mark ol p path polyline pre progress s samp small span strong sub summary sup svg table tbody td
 text tfoot th thead tr u ul var""".split()
ATTRIBUTES = """align alt aria-label class colspan d fill font-size height id max open points role rowspan start stroke
 stroke-linecap stroke-width style text-anchor title transform value width x y""".split()
LEADS = {"a": r"(https?:|mailto:|#).*|[^:&]*", "img": r"data:image/.*|(?![/\\]{2})[^:&]*"}  # no picture by a network
LOOKS = set("border border-collapse margin margin-left max-width overflow-x padding".split())  # and what bleach allows
MOST_TAGS = 20_000  # in one output
HIDDEN = re.compile(r"<(style|script)\b[^<]*</\1\s*>", re.IGNORECASE)  # its words are no text to show
STYLE = Path(__file__).with_name("pages.css").read_text(encoding="utf-8")


def convert(folder: Path) -> str | None:
    """Bring notebook.html up to date where there is a notebook; what kept it from that, in one sentence."""
    source, target = folder / "notebook.ipynb", folder / "notebook.html"
    try:
        if not source.exists() or (target.stat().st_mtime >= source.stat().st_mtime and POLICY in target.read_text()):
            return None
    except (OSError, ValueError):  # no page yet
        pass
    try:
        parameters.cells(source)  # a file that is none, or too large
        files.write(target, page(folder.parent.name, *_body(source)))
    except files.Unwritable:
        raise
    except Exception as error:  # of any type: whatever the libraries make of a damaged notebook
        target.unlink(missing_ok=True)
        return f"unreadable: {paths.short(source)}: {parameters.clip(str(error))}"
    return None


def _body(source: Path) -> tuple[str, str]:
    """The notebook as HTML, and the colours of its code."""
    sys.modules["rfc3987_syntax"] = None  # a second of work: see execute.py
    import nbformat
    from bleach.css_sanitizer import ALLOWED_CSS_PROPERTIES, CSSSanitizer
    from bleach.sanitizer import Cleaner
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    notebook = nbformat.read(source, as_version=4)
    notebook.metadata.pop("widgets", None)  # their script would come from the network
    protocols, looks = ("http", "https", "mailto", "data"), CSSSanitizer(ALLOWED_CSS_PROPERTIES | LOOKS)
    clean = Cleaner(TAGS, _is_harmless, protocols, strip=True, css_sanitizer=looks).clean
    # the 'basic' template is the notebook's body alone: no script, no font, no style from elsewhere
    exporter = HTMLExporter(template_name="basic", sanitize_html=True)
    # its own filter drops all colours and the heads of tables
    exporter.register_filter("clean_html", lambda part: clean(_bounded(str(part))))
    body = clean(exporter.from_notebook_node(notebook)[0])  # once more as a whole: its templates quote not everything
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    return body, f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n.highlight {{ background: none }}"


def _bounded(part: str) -> str:
    """Without the words of styles and scripts, and with no more tags than a parser can nest in seconds."""
    if (tags := part.count("<")) > MOST_TAGS:
        return f"<p>({tags:,} tags: too many for this page; they are in notebook.ipynb)</p>"
    return HIDDEN.sub("", part)


def _is_harmless(tag: str, name: str, value: str) -> bool:
    if (tag, name) in (("a", "href"), ("img", "src")):
        return re.fullmatch(LEADS[tag], value, re.DOTALL) is not None
    return name in ATTRIBUTES


def page(title: str, body: str, style: str = "", policy: str = POLICY) -> str:
    top = "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    return f"{top}{policy}<title>{text(title)}</title><style>{STYLE}{style}</style><body>{body}</body></html>"


def text(value: Any) -> str:
    """A value as text of a page, and as the value of an attribute."""
    return html.escape(str(value).encode("utf-8", "replace").decode())  # half a pair of surrogates has no place here
