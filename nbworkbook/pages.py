"""A page of our own, and an executed notebook as one: readable from a disk, nothing on it can act.

Of a notebook's HTML only what is looked at stays (`TAGS`), and the page's policy lets no script
run, no form send and nothing be fetched. Formulas are MathML (page_markdown.py), and relative links
lead from the page to the files of the project (page_links.py). A notebook is converted only when it
is newer than its page, or when its links lead elsewhere because the site was made or deleted.

Footgun: what an output may do is decided by nh3, a parser of its own. A tag or an attribute that is
added to the lists is a decision about every page; tests/hostile/test_hostile_pages.py tries them.
"""

import html
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nblib import files, paths
from nbworkbook import parameters, runs
from nbworkbook.page_links import Links, site

POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'none'; object-src 'none'; base-uri 'none'; form-action 'none';
 style-src 'unsafe-inline'; img-src 'self' file: data:">"""
# What is left of a notebook's HTML: what its text and our own tables, pictures and lines of
# progress are made of, and what formulas are.
TAGS = """a abbr b blockquote br caption code col colgroup dd del details div dl dt em figcaption
 figure h1 h2 h3 h4 h5 h6 hr i img kbd li mark ol p path polyline pre progress s samp small span
 strong sub summary sup svg table tbody td text tfoot th thead tr u ul var
 math menclose mfrac mi mn mo mover mpadded mphantom mroot mrow mspace msqrt mstyle msub msubsup
 msup mtable mtd mtext mtr munder munderover""".split()
ATTRIBUTES = """align alt aria-label class colspan d fill font-size height id max open points role
 rowspan start stroke stroke-linecap stroke-width style text-anchor title transform value width x y
 accent accentunder columnalign columnlines columnspacing depth display displaystyle fence form
 largeop linethickness lspace mathvariant maxsize minsize movablelimits notation rowlines
 rowspacing rspace scriptlevel separator stretchy symmetric voffset""".split()
LEADS = {
    "a": r"(https?:|mailto:|#).*|[^:&]*",
    "img": r"data:image/.*|(?![/\\]{2})[^:&]*",  # no picture by a network
}
LOOKS = """background-color border border-collapse border-color color display font-family font-size
 font-style font-weight height line-height margin margin-left max-width overflow overflow-x padding
 text-align text-decoration vertical-align white-space width""".split()
MOST_TAGS = 20_000  # in one output
FORM = 2  # of the pages; one that was made in another form is made again
STYLE = Path(__file__).with_name("pages.css").read_text(encoding="utf-8")


def convert(folder: Path) -> str | None:
    """Bring notebook.html up to date where there is a notebook.

    Return what kept it from that, in one sentence."""
    source, target = folder / "notebook.ipynb", folder / "notebook.html"
    head = f"{POLICY}<meta name='form' content='{FORM}, {'site' if site().is_dir() else 'files'}'>"
    try:
        if not source.exists():
            return None
        if target.stat().st_mtime >= source.stat().st_mtime and head in target.read_text():
            return None
    except (OSError, ValueError):  # no page yet
        pass

    try:
        parameters.cells(source)  # a file that is none, or too large
        body, colours = _body(source)
        files.write(target, page(folder.parent.name, body, colours, head))
    except files.Unwritable:
        raise
    except Exception as error:  # of any type: whatever the libraries make of a damaged notebook
        target.unlink(missing_ok=True)
        return f"unreadable: {paths.short(source)}: {parameters.clip(str(error))}"
    return None


def _body(source: Path) -> tuple[str, str]:
    """Return the notebook as HTML, and the colours of its code."""
    # jsonschema would build a grammar of URIs that no notebook needs, two seconds of work
    sys.modules.setdefault("rfc3987_syntax", None)
    import nbformat
    from nbconvert import HTMLExporter
    from nbconvert.filters.highlight import Highlight2HTML
    from pygments.formatters import HtmlFormatter

    from nbworkbook.page_markdown import markdown_to_html

    notebook = nbformat.read(source, as_version=4)
    notebook.metadata.pop("widgets", None)  # their script would come from the network
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            _show_latex_as_text(output.get("data", {}))

    # the 'basic' template is the notebook's body alone: no script, no font, no style from elsewhere
    exporter = HTMLExporter(template_name="basic", sanitize_html=True)
    # its own filters drop all colours and the heads of tables, and leave formulas as they are
    clean_part = cleaner(_keep_harmless)
    exporter.register_filter("clean_html", lambda part: clean_part(_bounded(str(part))))
    exporter.register_filter("markdown2html", markdown_to_html)
    language = notebook.metadata.get("language_info", {})
    lexer = language.get("pygments_lexer", language.get("name"))
    exporter.register_filter(
        "highlight_code", Highlight2HTML(pygments_lexer=lexer, parent=exporter)
    )
    # HTMLExporter's own method would parse the page once more, for half of all the time
    body = super(HTMLExporter, exporter).from_notebook_node(notebook)[0]

    # once more as a whole: its templates quote not everything, and only now all headings are there
    names = [html.unescape(name) for name in re.findall(r"""\bid=["']([^"'>]*)["']""", body)]
    links = Links(notebook_folder(source.parent), source.parent, names)
    body = cleaner(lambda *attribute: _keep_leading(links, *attribute))(body)

    light, dark = (
        HtmlFormatter(style=name).get_style_defs(".highlight")
        for name in ("default", "github-dark")
    )
    night = f"@media (prefers-color-scheme: dark) {{ {dark} }}"
    return body, f"{light}\n{night}\n.highlight {{ background: none }}"


def notebook_folder(folder: Path) -> Path:
    """Return the folder of a run's notebook: the workbook's, unless its record names another."""
    try:
        path = Path(runs.record(folder)["path"])
        return path.parent if path.is_file() else paths.notebooks()
    except (files.Unreadable, LookupError, TypeError, ValueError, OSError):  # it may hold anything
        return paths.notebooks()


def _show_latex_as_text(data: dict[str, Any]) -> None:
    """Let an output of LaTeX be drawn as a formula in a cell of text is."""
    if "text/latex" in data and "text/html" not in data:
        data["text/markdown"] = data.pop("text/latex")


def cleaner(keep: Callable[[str, str, str], str | None]) -> Callable[[str], str]:
    """Return the function that leaves of HTML what is on the lists; `keep` says what an attribute
    becomes, None where it goes."""
    import nh3

    return nh3.Cleaner(
        tags=set(TAGS),
        attributes={"*": set(ATTRIBUTES), "a": {"href"}, "img": {"src"}},
        attribute_filter=keep,
        link_rel=None,
        url_schemes={"http", "https", "mailto", "data"},
        filter_style_properties=set(LOOKS),
    ).clean


def _keep_harmless(tag: str, name: str, value: str) -> str | None:
    """Return the value, or None where it could act or fetch something."""
    if name == "style":
        return None if "(" in value and "url" in value.lower() else value
    if name in ("href", "src"):
        leads = LEADS.get(tag)  # of a tag that goes, attributes come here too
        return value if leads and re.fullmatch(leads, value, re.DOTALL) else None
    return value


def _keep_leading(links: Links, tag: str, name: str, value: str) -> str | None:
    """Return the value, of a link the one that leads from the page; None where it leads nowhere."""
    kept = _keep_harmless(tag, name, value)
    if kept is not None and name in ("href", "src"):
        return links.lead(kept)
    return kept


def _bounded(part: str) -> str:
    """Return a part that has no more tags than a parser can nest in seconds."""
    tags = part.count("<")
    if tags > MOST_TAGS:
        return f"<p>({tags:,} tags: too many for this page; they are in notebook.ipynb)</p>"
    return part


def page(title: str, body: str, style: str = "", policy: str = POLICY) -> str:
    """Return a whole page."""
    top = "<!doctype html><html lang='en'><meta charset='utf-8'>"
    top += "<meta name='viewport' content='width=device-width'>"
    head = f"{policy}<title>{text(title)}</title><style>{STYLE}{style}</style>"
    return f"{top}{head}<body>{body}</body></html>"


def text(value: Any) -> str:
    """Return a value as text of a page, and as the value of an attribute."""
    # half a pair of surrogates has no place here
    return html.escape(str(value).encode("utf-8", "replace").decode())
