"""outputs/index.html: every run on one page that needs no network, newest first, built from the run
folders alone.

Each run shows how it ended, which parameters differ from the defaults, its key results, its figures
and what it ran on, and links to its notebook as a page. All of that is HTML. The same facts stand
in the page once more as JSON, with the metrics, for comparison.js: the table that sorts and
filters, curves of several runs, what differs between two, and sweeps. Nothing is kept between
reports, so deleting a run folder removes the run.

Nothing that a run says can act on the page. It is text in the HTML, and in the JSON no character of
it can end a script. The policy lets one script run, the one with the hash of comparison.js. A
damaged file costs the row of its run: no file above `MOST_READ` bytes is read, and the page stays
below `MOST_PAGE` bytes by leaving out old curves.

Footgun: curves are thinned to `MOST_POINTS` points each. What a run logged in full is in its
metrics.jsonl alone.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nblib import files, paths
from nbworkbook import pages, parameters, runs
from nbworkbook.pages import text

SCRIPT, STYLE = (
    Path(__file__).with_name(f"comparison.{kind}").read_text(encoding="utf-8")
    for kind in ("js", "css")
)
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = pages.POLICY.replace(
    "script-src 'none'", f"script-src 'sha256-{HASH}'; connect-src 'none'"
)
# bytes: index.html, a metrics.jsonl, all sweeps
MOST_PAGE, MOST_READ, MOST_SWEEPS = 20_000_000, 64_000_000, 5_000_000
AXES = ("step", "tokens", "seconds")
NO_METRICS = (*AXES, "of", "run", "eta_s")
# of a curve; of a run, two times; numbers nobody chose
MOST_POINTS, MOST_SERIES, MOST_FACTS, FEW = 500, 200, 300, 6


def write() -> Path:
    """Build the report; the path of its first page."""
    outputs = files.make_folder(paths.outputs())
    folders: dict[str, list[Path]] = {}
    for record in sorted(outputs.glob("*/*/run.json"), reverse=True):
        folders.setdefault(record.parent.parent.name, []).append(record.parent)
    rows, body, every = [], [], []
    for name in sorted(folders):
        title, defaults = _notebook(pages.notebook_folder(folders[name][0]) / f"{name}.ipynb")
        pairs = [(folder, _summary(folder, outputs, defaults)) for folder in folders[name]]
        # no id of this page's own parts holds a slash
        newest, anchor = pairs[0][1], quote(os.fsencode(name)) + "/"
        link = f"<a href='#{anchor}'>{text(name)}</a><br><span class='muted'>{text(title)}</span>"
        rows.append([link, _ending(newest, "<br>"), _chips(newest)])
        body.append(f"<h2 id='{anchor}'>{text(name)}</h2>")
        body += [_run(folder, facts, is_open=facts is newest) for folder, facts in pairs]
        every += pairs
    nothing = "<p>No runs yet: <code>nblib run --all</code>.</p>"
    top = _table(rows, ["notebook", "newest run", "results"]) if rows else nothing
    body = [f"<h1>Runs</h1><div class='cards'>{top}</div><section id='compare'></section>", *body]
    body.append(f"<p class='muted'>{text(outputs)}, {time.strftime('%Y-%m-%d %H:%M')}</p>")
    sweeps = _sweeps(outputs)
    taken = "".join([*body, sweeps, SCRIPT, pages.STYLE, STYLE]).encode("utf-8", "replace")
    room = MOST_PAGE - 5000 - len(taken)  # 5000 for what stands around them
    data = f'{{"sweeps":{sweeps},{_runs(every, room)}}}'
    body.append(f"<script type='application/json'>{data}</script><script>{SCRIPT}</script>")
    page = outputs / "index.html"
    files.write(page, pages.page("Runs", "\n".join(body), STYLE, POLICY))
    return page


def _notebook(path: Path) -> tuple[str, dict[str, Any] | None]:
    """Return the notebook's title, and the defaults of the parameters that it now declares; None
    where it cannot be read.
    """
    title = ""
    with contextlib.suppress(parameters.ParameterError):
        title = parameters.title(path)
        return title, {
            name: parameter.default for name, parameter in parameters.declared(path).items()
        }
    return title, None


def _summary(folder: Path, outputs: Path, defaults: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the page says of a run, under names of ours, as short texts and numbers: its
    files may hold anything.
    """
    record, pairs = _facts(folder / "run.json"), _pairs(_facts(folder / "result.json"))
    values: dict[str, Any] = {}
    with contextlib.suppress(parameters.ParameterError):
        values = parameters.load_yaml(folder / "parameters.yaml")
    words = folder.parent.name, folder.name, runs.status(folder), _get(record, "command", str)
    facts = dict(zip(("notebook", "folder", "status", "command"), map(parameters.clip, words)))
    facts |= {
        "kind": re.match("[a-z]*", facts["status"])[0],
        "started": runs.moment(record.get("started")),
    }
    facts["seconds"] = record["seconds"] if _is_number(record.get("seconds")) else None
    facts["address"] = quote(os.fsencode(folder.relative_to(outputs)))
    environment = _pairs(_facts(folder / "environment.json"))
    facts |= {"parameters": _pairs(values), "results": pairs, "environment": environment}
    changed = [
        n for n, v in values.items() if defaults is None or n not in defaults or defaults[n] != v
    ]
    promised = [
        n
        for each in _get(record, "headline", list)[:20]
        for n, _ in pairs
        if f"{n}.".startswith(f"{each}.")
    ]
    numbers = [n for n, value in pairs if _is_number(value)] or [n for n, _ in pairs]
    facts |= {"changed": list(map(parameters.clip, changed)), "headline": promised or numbers[:FEW]}
    tags = [parameters.clip(runs.spelled(tag)) for tag in _get(record, "tags", list)[:20]]
    facts |= {"promised": bool(promised), "tags": tags}
    notes = [
        (_get(note, "time"), _get(note, "text", str)) for note in _get(record, "notes", list)[-20:]
    ]
    facts["notes"] = [[runs.moment(at), parameters.clip(words, 1000)] for at, words in notes]
    ends = [
        (_plain(name), _get(at, "step"), _get(at, "of"))
        for name, at in _get(record, "stopped", dict).items()
    ]
    cut = ", ".join(f"at step {_plain(step)} of {_plain(of)} ({name})" for name, step, of in ends)
    facts["stopped"] = (
        f"Stopped {cut}: these numbers come from a half-trained model." if cut else ""
    )
    return facts


def _facts(file: Path) -> dict[str, Any]:
    """Return what the file says, nothing where it is damaged: `runs.problem` says so."""
    try:
        return (
            files.read_json(file) if not file.is_file() or file.stat().st_size <= MOST_READ else {}
        )
    except (files.Unreadable, OSError):
        return {}


def _get(facts: Any, name: str, kind: type = object) -> Any:
    """Return a fact if it is of its kind, else an empty one."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, kind) else kind()


def _pairs(facts: dict[str, Any]) -> list[list]:
    """Names and values; what stands inside another fact is called `outer.inner`."""
    pairs = itertools.islice(runs.flat(facts).items(), MOST_FACTS)
    return [[parameters.clip(name), _plain(value)] for name, value in pairs]


def _plain(value: Any) -> int | float | str:
    return value if _is_number(value) else parameters.clip(runs.spelled(value))


def _is_number(value: Any) -> bool:
    """One that JavaScript can hold."""
    return (type(value) is int and abs(value) < 2**53) or (
        type(value) is float and math.isfinite(value)
    )


def _sweeps(outputs: Path) -> str:
    """Return the tables of sweeps as JSON, newest first, as many as there is room for."""
    lines, room = [], MOST_SWEEPS
    for file in sorted(outputs.glob("*/sweep-*.json"), key=lambda file: file.name, reverse=True):
        facts, address = _facts(file), quote(os.fsencode(file.relative_to(outputs)))
        given = _get(facts, "rows", list)
        rows = [
            [_pairs(_get(row, part, dict)) for part in ("parameters", "results")] for row in given
        ]
        sweep = {
            "notebook": parameters.clip(file.parent.name),
            "name": parameters.clip(file.stem),
            "address": address,
        }
        line = _json(
            sweep | {"varied": [_plain(name) for name in _get(facts, "varied", dict)], "rows": rows}
        )
        line = line if len(line) <= room else _json(sweep | {"varied": [], "rows": []})
        lines, room = [*lines, line], room - len(line)
    return f"[{','.join(lines)}]"


def _runs(pairs: list[tuple[Path, dict[str, Any]]], room: int) -> str:
    """Return the runs as JSON, newest first, with the curves of as many as there is room for."""
    pairs = sorted(pairs, key=lambda pair: pair[0].name, reverse=True)
    lines, left_out = [_json(facts) for _, facts in pairs], 0
    room -= sum(len(line) + 20 for line in lines)
    for index, file in enumerate(folder / "metrics.jsonl" for folder, _ in pairs):
        is_read = room > 0 and file.is_file() and file.stat().st_size <= MOST_READ
        curves = _json(_curves(file) if is_read else [])
        if len(curves) > room:
            room, is_read, curves = 0, False, "[]"  # nor are older ones drawn
        room, left_out = room - len(curves), left_out + (file.is_file() and not is_read)
        lines[index] = f'{lines[index][:-1]},"curves":{curves}}}'
    notices = [
        f"Curves are thinned to at most {MOST_POINTS} points each; the lowest and the highest "
        "ones stay."
    ]
    why = (
        f"the page would be larger than {MOST_PAGE:,} bytes, or metrics.jsonl is larger than "
        f"{MOST_READ:,}"
    )
    notices += [f"The curves of {left_out} runs are left out: {why}."] * (left_out > 0)
    return f'"notices":{_json(notices)},"runs":[{",".join(lines)}]'


def _curves(file: Path) -> list[list]:
    """Each training's metrics as [step, tokens, seconds, value], in the order of the steps."""
    trainings: dict[str, dict[float, dict]] = {}
    for line in file.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # a torn line
            # after a resume the later line counts
            if _is_number(step := _get(record := json.loads(line), "step")):
                trainings.setdefault(str(_plain(record.get("run", ""))), {})[step] = record
    curves, room = [], MOST_SERIES
    for training, by_step in trainings.items():
        records = [by_step[step] for step in sorted(by_step)]
        axes = [
            [x if _is_number(x := record.get(axis)) else None for axis in AXES]
            for record in records
        ]
        names = dict.fromkeys(
            name for record in records for name in record if name not in NO_METRICS
        )
        series = []
        for name in itertools.islice(names, room):
            values = [record.get(name) for record in records]
            points = [
                [*x, _plain(float(f"{float(y):.6g}"))]
                for x, y in zip(axes, values)
                if _is_number(y) or str(y) in ("nan", "inf", "-inf")
            ]
            series += [[parameters.clip(name), _thin(points)]] if points else []
        curves, room = [*curves, [training, series]], room - len(series)
    return curves


def _thin(points: list[list]) -> list[list]:
    """Return the first, the last, and of each bucket between them the lowest, the highest and the
    first that is no number.
    """
    if len(points) <= MOST_POINTS:
        return points
    size, chosen = -(-len(points) // ((MOST_POINTS - 2) // 3)), {0, len(points) - 1}
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        numbers = sorted(
            (i for i in bucket if _is_number(points[i][3])), key=lambda i: points[i][3]
        )
        chosen.update(
            numbers[:1], numbers[-1:], [i for i in bucket if not _is_number(points[i][3])][:1]
        )
    return [points[i] for i in sorted(chosen)]


def _json(value: Any) -> str:
    """JSON of ASCII alone, in which no character can end the script element that it stands in."""
    # U+2028 is escaped like all that is not ASCII
    line = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return line.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _ending(facts: dict[str, Any], between: str = ", ") -> str:
    """How the run ended, when it started, how long it took."""
    state = f"<b class='{facts['kind']}'>{text(facts['status'])}</b>"
    seconds = "" if facts["seconds"] is None else f"{facts['seconds']:.1f} s"
    return between.join(filter(None, [state, text(facts["started"]), seconds]))


def _chips(facts: dict[str, Any]) -> str:
    """Return the results that the notebook's title promises, each a piece of its own; tags; whether
    it was stopped.
    """
    results = dict(facts["results"])
    pieces = [("fact", f"{name} {runs.spelled(results[name])}") for name in facts["headline"]]
    pieces += [("tag", tag) for tag in facts["tags"]] + [("banner", facts["stopped"])] * bool(
        facts["stopped"]
    )
    return " ".join(f"<span class='{kind}'>{text(piece)}</span>" for kind, piece in pieces)


def _run(folder: Path, facts: dict[str, Any], *, is_open: bool) -> str:
    address = facts["address"]
    parts = [f"<summary>{_ending(facts)} {_chips(facts)}</summary>"]
    sentences = [
        _facts(folder / "run.json").get("sentence"),
        runs.problem(folder),
        pages.convert(folder),
    ]
    sentences += [": ".join(filter(None, note)) for note in facts["notes"]]
    parts += [f"<p>{text(sentence)}</p>" for sentence in sentences if sentence]
    links = [("notebook.html", "notebook as a page"), ("notebook.ipynb", "notebook")]
    links += [("metrics.jsonl", "metrics"), ("parameters.yaml", "parameters")]
    links = [
        f"<a href='{address}/{name}'>{label}</a>"
        for name, label in links
        if (folder / name).exists()
    ]
    parts.append(f"<p>{' · '.join(links)} <span class='muted'>{text(folder.name)}</span></p>")
    parts.append(_listed("Results", _facts(folder / "result.json").items()))
    changed = [pair for pair in facts["parameters"] if pair[0] in facts["changed"]]
    parts.append(_listed("Parameters that differ from the defaults", changed))
    for figure in sorted((folder / "figures").glob("*.png")):
        source, caption = (
            f"{address}/figures/{quote(os.fsencode(figure.name))}",
            text(_caption(figure) or figure.stem),
        )
        image = f"<img src='{source}' alt='{caption}' loading='lazy'>"
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    environment = _listed("", _facts(folder / "environment.json").items())
    parts.append(
        f"<details><summary>Environment</summary>{environment}</details>" if environment else ""
    )
    return f"<details id='{address}'{' open' if is_open else ''}>{''.join(parts)}</details>"


def _caption(picture: Path) -> str:
    """Return the sentence that `show.Picture` wrote into the PNG."""
    from PIL import Image

    if picture.is_file():  # a pipe would never end
        # whatever PIL makes of damage
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            with Image.open(picture, formats=["PNG"]) as opened:
                return str(opened.info.get("Description", ""))
    return ""


def _listed(title: str, facts: Iterable[tuple[str, Any]]) -> str:
    rows = [[text(name), f"<code>{text(runs.spelled(value))}</code>"] for name, value in facts]
    return (f"<p class='muted'>{title}</p>" if title else "") + _table(rows) if rows else ""


def _table(rows: Iterable[list[str]], head: list[str] | None = None) -> str:
    """Cells are HTML already."""
    top = "<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>" if head else ""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{top}{''.join(lines)}</table>"
