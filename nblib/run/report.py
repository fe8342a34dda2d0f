"""outputs/index.html: every run on one page that needs no network, newest first, built from the run folders alone.

Each run shows how it ended, which parameters differ from the defaults, its key results, its figures and what it ran
on, and links to its notebook as a page. Pages are converted only when the notebook is newer. Nothing is kept between
reports, so deleting a run folder removes the run.

Nothing that a notebook shows can act on a page. Of its HTML only what is looked at is kept (`_clean`), and the page's
policy lets no script run, no form send and nothing be fetched. A damaged file is a sentence in the row of its run.

Footgun: formulas in the notebooks' text stay LaTeX source on these pages; rendering them would need MathJax from the
network.
"""

import contextlib
import html
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nblib import files, paths
from nblib.run import parameters, runs
from nblib.run.runner import key_results

POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'none';
 object-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src 'self' file: data:">"""
# What is left of a notebook's HTML: what its text and our own tables, pictures and lines of progress are made of.
TAGS = """a abbr b blockquote br caption code col colgroup dd del details div dl dt em figcaption figure h1 h2 h3 h4
 h5 h6 hr i img kbd li mark ol p path polyline pre progress s samp small span strong sub summary sup svg table tbody td
 text tfoot th thead tr u ul var""".split()
ATTRIBUTES = """align alt aria-label class colspan d fill font-size height id max open points role rowspan start stroke
 stroke-linecap stroke-width style text-anchor title transform value width x y""".split()
LEADS = {
    "a": r"(https?:|mailto:|#).*|[^:&]*",
    "img": r"data:image/.*|(?![/\\]{2})[^:&]*",
}  # pictures come by no network
LOOKS = set("border border-collapse margin margin-left max-width overflow-x padding".split())  # and what bleach allows
MOST_TAGS = 20_000  # in one output
HIDDEN = re.compile(r"<(style|script)\b[^<]*</\1\s*>", re.IGNORECASE)  # its words are no text to show

STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --soft: light-dark(#f5f5f3, #26262a); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem;
  background: light-dark(#fff, #18181b); color: light-dark(#222, #ddd); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
a { color: light-dark(#0b57a4, #8ab8f0); } table { border-collapse: collapse; margin: .5rem 0; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
pre, code { font: 13px/1.45 ui-monospace, monospace; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
details { background: var(--soft); border-radius: 6px; padding: .5rem 1rem; margin: .6rem 0; }
summary { cursor: pointer; } img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
.done { color: light-dark(#17702f, #6cc784); } .failed, .killed { color: light-dark(#b3261e, #f28b82); }
.stopped, .running { color: light-dark(#8a5a00, #e0b050); } .muted { color: light-dark(#666, #999); }
.input_area, .output_subarea > pre { background: var(--soft); border-radius: 4px; padding: .1rem .7rem; }
.prompt { font: 12px ui-monospace, monospace; color: light-dark(#777, #999); }
.anchor-link { display: none; } .ansi-red-fg { color: light-dark(#b3261e, #f28b82); } .ansi-bold { font-weight: 600; }
"""


def write() -> Path:
    """Build the report; the path of its first page."""
    outputs = files.make_folder(paths.outputs())
    folders: dict[str, list[Path]] = {}
    for record in sorted(outputs.glob("*/*/run.json"), reverse=True):
        folders.setdefault(record.parent.parent.name, []).append(record.parent)
    notebooks = sorted(folders)
    head = ["notebook", "newest run", "status", "time", "results"]
    rows = [[f"<a href='#{_text(name)}'>{_text(name)}</a>", *_newest(folders[name][0])] for name in notebooks]
    body = ["<h1>Runs</h1>", _table(rows, head) if rows else "<p>No runs yet: <code>nblib run --all</code>.</p>"]
    for name in notebooks:
        body.append(f"<h2 id='{_text(name)}'>{_text(name)}</h2>")
        body += [_run(folder, outputs, is_open=folder == folders[name][0]) for folder in folders[name]]
    body.append(f"<p class='muted'>{_text(outputs)}, {time.strftime('%Y-%m-%d %H:%M')}</p>")
    page = outputs / "index.html"
    files.write(page, _page("Runs", "\n".join(body)))
    return page


def _newest(folder: Path) -> list[str]:
    return [*_ending(folder), _text(key_results(_facts(folder / "result.json"), limit=6))]


def _facts(file: Path) -> dict[str, Any]:
    """What the file says, nothing where it is damaged: `runs.problem` says so."""
    try:
        return files.read_json(file)
    except files.Unreadable:
        return {}


def _ending(folder: Path) -> list[str]:
    """When the run started, how it ended, how long it took; a record may hold anything."""
    record, state = _facts(folder / "run.json"), _text(runs.status(folder))
    started = seconds = ""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(record["started"])))
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        seconds = f"{float(record['seconds']):.1f} s"
    return [started, f"<b class='{state}'>{state}</b>", seconds]


def _run(folder: Path, outputs: Path, *, is_open: bool) -> str:
    address, (started, state, seconds) = quote(os.fsencode(folder.relative_to(outputs))), _ending(folder)
    parts = [f"<summary>{state} {started}, {seconds}</summary>"]
    sentences = [_facts(folder / "run.json").get("sentence"), runs.problem(folder), _convert(folder)]
    parts += [f"<p>{_text(sentence)}</p>" for sentence in sentences if sentence]
    links = [("notebook.html", "notebook as a page"), ("notebook.ipynb", "notebook")]
    links += [("metrics.jsonl", "metrics"), ("parameters.yaml", "parameters")]
    links = [f"<a href='{address}/{name}'>{text}</a>" for name, text in links if (folder / name).exists()]
    parts.append(f"<p>{' · '.join(links)} <span class='muted'>{_text(folder.name)}</span></p>")
    parts.append(_listed("Results", _facts(folder / "result.json")))
    parts.append(_listed("Parameters that differ from the defaults", _changed(folder)))
    for figure in sorted((folder / "figures").glob("*.png")):
        source = f"{address}/figures/{quote(os.fsencode(figure.name))}"
        parts.append(f"<img src='{source}' alt='{_text(figure.stem)}' loading='lazy'>")
    environment = _listed("", _facts(folder / "environment.json"))
    parts.append(f"<details><summary>Environment</summary>{environment}</details>" if environment else "")
    return f"<details{' open' if is_open else ''}>{''.join(parts)}</details>"


def _changed(folder: Path) -> dict[str, Any]:
    """The run's parameters that are not what the notebook now declares; all of them when that cannot be read."""
    try:
        values = parameters.load_yaml(folder / "parameters.yaml")
    except parameters.ParameterError:
        return {}
    try:
        known = parameters.declared(paths.notebooks() / f"{folder.parent.name}.ipynb")
    except parameters.ParameterError:
        return values
    return {name: value for name, value in values.items() if name not in known or known[name].default != value}


def _convert(folder: Path) -> str | None:
    """Bring notebook.html up to date where there is a notebook; what kept it from that, in one sentence."""
    source, page = folder / "notebook.ipynb", folder / "notebook.html"
    try:
        if not source.exists() or (page.stat().st_mtime >= source.stat().st_mtime and POLICY in page.read_text()):
            return None
    except (OSError, ValueError):  # no page yet
        pass
    try:
        parameters.cells(source)  # a file that is none, or too large
        files.write(page, _page(folder.parent.name, *_body(source)))
    except files.Unwritable:
        raise
    except Exception as error:  # of any type: whatever the libraries make of a damaged notebook
        page.unlink(missing_ok=True)
        return f"unreadable: {paths.short(source)}: {parameters.clip(str(error))}"
    return None


def _body(source: Path) -> tuple[str, str]:
    """The notebook as HTML, and the colours of its code."""
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


def _listed(title: str, facts: dict[str, Any]) -> str:
    rows = [[_text(name), f"<code>{_text(_flat(value))}</code>"] for name, value in facts.items()]
    return (f"<p class='muted'>{title}</p>" if title else "") + _table(rows) if rows else ""


def _flat(value: Any) -> str:
    try:
        if isinstance(value, dict):
            return ", ".join(f"{name} {_flat(item)}" for name, item in value.items())
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    except RecursionError:
        return "…"


def _table(rows: Iterable[list[str]], head: list[str] | None = None) -> str:
    """Cells are HTML already."""
    top = "<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>" if head else ""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{top}{''.join(lines)}</table>"


def _page(title: str, body: str, style: str = "") -> str:
    top = "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    return f"{top}{POLICY}<title>{_text(title)}</title><style>{STYLE}{style}</style><body>{body}</body></html>"


def _text(value: Any) -> str:
    text = str(value).encode("utf-8", "replace").decode()  # half a pair of surrogates has no place in a page
    return html.escape(text, quote=True)
