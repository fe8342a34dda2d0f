"""outputs/index.html: every run on one page that needs no network, newest first, built from the run folders alone.

Each run shows how it ended, which parameters differ from the defaults, its key results, its figures and what it ran
on, and links to its notebook as a page. All of that is HTML. The same facts stand in the page once more as JSON, with
the metrics, for comparison.js: the table that sorts and filters, curves of several runs, what differs between two, and
sweeps. Nothing is kept between reports, so deleting a run folder removes the run.

Nothing that a run says can act on the page. It is text in the HTML, and in the JSON no character of it can end a
script. The policy lets one script run, the one with the hash of comparison.js. A damaged file costs the row of its run:
of metrics.jsonl `MOST_READ` bytes are read, and the page stays below `MOST_PAGE` bytes by leaving out old curves.

Footgun: curves are thinned to `MOST_POINTS` points each. What a run logged in full is in its metrics.jsonl alone.
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
from nblib.run import pages, parameters, runs
from nblib.run.pages import text

SCRIPT, STYLE = (Path(__file__).with_name(f"comparison.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = pages.POLICY.replace("script-src 'none'", f"script-src 'sha256-{HASH}'; connect-src 'none'")
MOST_PAGE, MOST_READ, MOST_SWEEPS = 20_000_000, 32_000_000, 5_000_000  # bytes: index.html, a metrics.jsonl, all sweeps
MOST_POINTS, MOST_SERIES, MOST_FACTS, FEW = 500, 200, 300, 6  # of a curve; of a run, two times; numbers nobody chose


def write() -> Path:
    """Build the report; the path of its first page."""
    outputs = files.make_folder(paths.outputs())
    folders: dict[str, list[Path]] = {}
    for record in sorted(outputs.glob("*/*/run.json"), reverse=True):
        folders.setdefault(record.parent.parent.name, []).append(record.parent)
    rows, body, every = [], [], []
    for name in sorted(folders):
        title, defaults = _notebook(name)
        pairs = [(folder, _summary(folder, outputs, defaults)) for folder in folders[name]]
        newest, anchor = pairs[0][1], quote(os.fsencode(name)) + "/"  # no id of this page's own parts holds a slash
        link = f"<a href='#{anchor}'>{text(name)}</a><br><span class='muted'>{text(title)}</span>"
        rows.append([link, _ending(newest, "<br>"), _chips(newest) + _banner(newest)])
        body.append(f"<h2 id='{anchor}'>{text(name)}</h2>")
        body += [_run(folder, facts, is_open=facts is newest) for folder, facts in pairs]
        every += pairs
    sweeps, items = _sweeps(outputs)
    top = (
        _table(rows, ["notebook", "newest run", "results"])
        if rows
        else "<p>No runs yet: <code>nblib run --all</code>.</p>"
    )
    body = ["<h1>Runs</h1><div class='cards'>", top, "</div><section id='compare'></section>", *body]
    body += ["<h2>Sweeps</h2><ul>", *items, "</ul>"] if items else []
    body.append(f"<p class='muted'>{text(outputs)}, {time.strftime('%Y-%m-%d %H:%M')}</p>")
    room = MOST_PAGE - sum(len(part.encode("utf-8", "replace")) for part in (*body, sweeps, SCRIPT, pages.STYLE, STYLE))
    data = f'{{"sweeps":{sweeps},{_runs(every, room)}}}'
    body.append(f"<script type='application/json'>{data}</script><script>{SCRIPT}</script>")
    page = outputs / "index.html"
    files.write(page, pages.page("Runs", "\n".join(body), STYLE, POLICY))
    return page


def _summary(folder: Path, outputs: Path, defaults: dict[str, Any] | None) -> dict[str, Any]:
    """What the page says of a run, under names of ours, as short texts and numbers: its files may hold anything."""
    record, results, state = _facts(folder / "run.json"), _facts(folder / "result.json"), runs.status(folder)
    values, pairs = _values(folder / "parameters.yaml"), _pairs(results)
    promised = [name for each in _list(record, "headline") for name, _ in pairs if f"{name}.".startswith(f"{each}.")]
    numbers = [name for name, value in pairs if _is_number(value)] or [name for name, _ in pairs]
    changed = [n for n, v in values.items() if defaults is None or n not in defaults or defaults[n] != v]
    notes = [note for note in _list(record, "notes") if isinstance(note, dict)]
    return {
        "notebook": parameters.clip(folder.parent.name),
        "folder": parameters.clip(folder.name),
        "address": quote(os.fsencode(folder.relative_to(outputs))),
        "status": parameters.clip(state),
        "kind": re.match("[a-z]*", state)[0],
        "started": _clock(record.get("started")),
        "seconds": record["seconds"] if _is_number(record.get("seconds")) else None,
        "command": parameters.clip(str(record.get("command", ""))),
        "stopped": _stopped(record.get("stopped")),
        "parameters": _pairs(values),
        "changed": [parameters.clip(name) for name in changed],
        "results": pairs,
        "headline": promised or numbers[:FEW],
        "environment": _pairs(_facts(folder / "environment.json")),
        "tags": [parameters.clip(str(tag)) for tag in _list(record, "tags")],
        "notes": [[_clock(note.get("time")), parameters.clip(str(note.get("text", "")), 1000)] for note in notes],
    }


def _notebook(name: str) -> tuple[str, dict[str, Any] | None]:
    """The notebook's title, and the defaults of the parameters that it now declares; None where it cannot be read."""
    title, path = "", paths.notebooks() / f"{name}.ipynb"
    with contextlib.suppress(parameters.ParameterError):
        title = parameters.title(path)
        return title, {name: parameter.default for name, parameter in parameters.declared(path).items()}
    return title, None


def _facts(file: Path) -> dict[str, Any]:
    """What the file says, nothing where it is damaged: `runs.problem` says so."""
    try:
        return files.read_json(file) if not file.is_file() or file.stat().st_size <= MOST_READ else {}
    except (files.Unreadable, OSError):
        return {}


def _values(file: Path) -> dict[str, Any]:
    try:
        return parameters.load_yaml(file)
    except parameters.ParameterError:
        return {}


def _list(record: dict[str, Any], name: str) -> list:
    return record[name][:20] if isinstance(record.get(name), list) else []


def _pairs(facts: dict[str, Any], lead: str = "", depth: int = 3) -> list[list]:
    """Names and values; what stands inside another fact is called `outer.inner`."""
    pairs: list[list] = []
    for name, value in itertools.islice(facts.items(), MOST_FACTS):
        inner = isinstance(value, dict) and value and depth
        pairs += (
            _pairs(value, f"{lead}{name}.", depth - 1) if inner else [[parameters.clip(f"{lead}{name}"), _plain(value)]]
        )
    return pairs[:MOST_FACTS]


def _plain(value: Any) -> int | float | str:
    return value if _is_number(value) else parameters.clip(_flat(value))


def _is_number(value: Any) -> bool:
    """One that JavaScript can hold."""
    return (type(value) is int and abs(value) < 2**53) or (type(value) is float and math.isfinite(value))


def _clock(value: Any) -> str:
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(value)))
    return parameters.clip(value) if isinstance(value, str) else ""


def _stopped(value: Any) -> str:
    """The sentence about the trainings that were stopped."""
    entries = [(name, at) for name, at in value.items() if isinstance(at, dict)] if isinstance(value, dict) else []
    at = ", ".join(
        f"at step {_plain(at.get('step'))} of {_plain(at.get('of'))} ({_plain(name)})" for name, at in entries
    )
    return f"Stopped {at}: these numbers come from a half-trained model." if at else ""


def _sweeps(outputs: Path) -> tuple[str, list[str]]:
    """Every sweep's table as JSON, and as an item of a list with links to its files."""
    data, items, room = [], [], MOST_SWEEPS
    for file in sorted(outputs.glob("*/sweep-*.json"), key=lambda file: file.name, reverse=True):
        facts = _facts(file)
        rows = (
            [row for row in facts.get("rows") or [] if isinstance(row, dict)]
            if isinstance(facts.get("rows"), list)
            else []
        )
        varied = facts["varied"] if isinstance(facts.get("varied"), dict) else {}
        sweep = {"notebook": parameters.clip(file.parent.name), "name": parameters.clip(file.stem)}
        sweep["varied"] = [parameters.clip(name) for name in varied]
        sweep["rows"] = [
            [_pairs(row[part]) if isinstance(row.get(part), dict) else [] for part in ("parameters", "results")]
            for row in rows[:1000]
        ]
        line = _json(sweep)
        if is_shown := rows and len(line) <= room:
            room -= len(line)
            data.append(line)
        stem = quote(os.fsencode(file.relative_to(outputs).with_suffix("")))
        links = [
            f"<a href='{stem}.{kind}'>{kind}</a>" for kind in ("json", "csv") if file.with_suffix(f".{kind}").exists()
        ]
        about = f"{len(rows)} runs, varied: {', '.join(sweep['varied'])}" if rows else "not readable"
        items.append(
            f"<li>{text(sweep['notebook'])}, {text(sweep['name'])}: {text(about)} {' '.join(links)}{'' if is_shown else ' (not drawn here)'}</li>"
        )
    return f"[{','.join(data)}]", items


def _runs(pairs: list[tuple[Path, dict[str, Any]]], room: int) -> str:
    """The runs as JSON, newest first, with the curves of as many as there is room for."""
    pairs = sorted(pairs, key=lambda pair: pair[0].name, reverse=True)
    lines, cut, left_out = [_json(facts) for _, facts in pairs], 0, 0
    room -= sum(map(len, lines))
    for index, (folder, _) in enumerate(pairs):
        curves, is_cut = _curves(folder / "metrics.jsonl") if room > 0 else ([], False)
        drawn = _json(curves)
        if len(drawn) > room:  # nor are older ones drawn, so that the newest are a whole
            room, drawn, left_out = 0, "[]", left_out + (folder / "metrics.jsonl").is_file()
        room, cut = room - len(drawn), cut + is_cut
        lines[index] = f'{lines[index][:-1]},"curves":{drawn}}}'
    notices = [f"Curves are thinned to at most {MOST_POINTS} points each; the lowest and the highest ones stay."]
    notices += [f"The curves of the {left_out} oldest runs are left out: the page would be too large."] * (left_out > 0)
    notices += [f"Of {cut} runs only the first {MOST_READ:,} bytes of metrics.jsonl are drawn."] * (cut > 0)
    return f'"notices":{_json(notices)},"runs":[{",".join(lines)}]'


def _curves(file: Path) -> tuple[list[list], bool]:
    """Each training's metrics as [step, tokens, seconds, value], in the order of the steps; whether the file is cut."""
    trainings: dict[str, dict[float, dict]] = {}
    try:
        if not file.is_file():  # a pipe would never end
            return [], False
        with file.open("rb") as lines:
            content, is_cut = lines.read(MOST_READ), bool(lines.read(1))
    except OSError:
        return [], False
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # a torn line
            record = json.loads(line)
            if isinstance(record, dict) and _is_number(record.get("step")):  # after a resume the later line counts
                trainings.setdefault(parameters.clip(str(record.get("run", ""))), {})[record["step"]] = record
    curves, series = [], MOST_SERIES
    for name, records in trainings.items():
        ordered = [records[step] for step in sorted(records)]
        metrics = dict.fromkeys(metric for record in ordered for metric in record)
        metrics = {parameters.clip(metric): _points(ordered, metric) for metric in itertools.islice(metrics, series)}
        curves.append([name, [[metric, _thin(points)] for metric, points in metrics.items() if points]])
        series -= len(metrics)
    return curves, is_cut


def _points(records: list[dict], metric: str) -> list[list]:
    if metric in ("step", "of", "run", "tokens", "seconds", "eta_s"):
        return []
    where = [
        [record[x] if _is_number(record.get(x)) else None for x in ("step", "tokens", "seconds")] for record in records
    ]
    values = [record.get(metric) for record in records]
    return [
        [*x, float(f"{float(y):.6g}") if _is_number(y) else str(y)]
        for x, y in zip(where, values)
        if _is_number(y) or str(y) in ("nan", "inf", "-inf")
    ]


def _thin(points: list[list]) -> list[list]:
    """The first, the last, and of each bucket between them the lowest, the highest and the first that is no number."""
    if len(points) <= MOST_POINTS:
        return points
    buckets, chosen = (MOST_POINTS - 2) // 3, {0, len(points) - 1}
    for n in range(buckets):
        bucket = range(len(points) * n // buckets, len(points) * (n + 1) // buckets)
        numbers = [i for i in bucket if _is_number(points[i][3])]
        chosen |= (
            {min(numbers, key=lambda i: points[i][3]), max(numbers, key=lambda i: points[i][3])} if numbers else set()
        )
        chosen |= set([i for i in bucket if not _is_number(points[i][3])][:1])
    return [points[i] for i in sorted(chosen)]


def _json(value: Any) -> str:
    """JSON of ASCII alone, in which no character can end the script element that it stands in."""
    line = json.dumps(value, allow_nan=False, separators=(",", ":"))  # U+2028 is escaped like all that is not ASCII
    return line.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _ending(facts: dict[str, Any], between: str = ", ") -> str:
    """How the run ended, when it started, how long it took."""
    state = f"<b class='{facts['kind']}'>{text(facts['status'])}</b>"
    seconds = "" if facts["seconds"] is None else f"{facts['seconds']:.1f} s"
    return between.join(filter(None, [state, text(facts["started"]), seconds]))


def _chips(facts: dict[str, Any]) -> str:
    """The results that the notebook's title promises, each a piece of its own; tags."""
    results = dict(facts["results"])
    pieces = [f"<span class='fact'>{text(name)} {text(_flat(results[name]))}</span>" for name in facts["headline"]]
    pieces += [f"<span class='tag'>{text(tag)}</span>" for tag in facts["tags"]]
    return f"<span class='facts'>{''.join(pieces)}</span>"


def _banner(facts: dict[str, Any]) -> str:
    return f"<p class='banner'>{text(facts['stopped'])}</p>" if facts["stopped"] else ""


def _run(folder: Path, facts: dict[str, Any], *, is_open: bool) -> str:
    address = facts["address"]
    parts = [f"<summary>{_ending(facts)} {_chips(facts)}</summary>{_banner(facts)}"]
    sentences = [_facts(folder / "run.json").get("sentence"), runs.problem(folder), pages.convert(folder)]
    sentences += [": ".join(filter(None, note)) for note in facts["notes"]]
    parts += [f"<p>{text(sentence)}</p>" for sentence in sentences if sentence]
    links = [("notebook.html", "notebook as a page"), ("notebook.ipynb", "notebook")]
    links += [("metrics.jsonl", "metrics"), ("parameters.yaml", "parameters")]
    links = [f"<a href='{address}/{name}'>{label}</a>" for name, label in links if (folder / name).exists()]
    parts.append(f"<p>{' · '.join(links)} <span class='muted'>{text(folder.name)}</span></p>")
    parts.append(_listed("Results", _facts(folder / "result.json").items()))
    changed = [pair for pair in facts["parameters"] if pair[0] in facts["changed"]]
    parts.append(_listed("Parameters that differ from the defaults", changed))
    for figure in sorted((folder / "figures").glob("*.png")):
        source, caption = f"{address}/figures/{quote(os.fsencode(figure.name))}", text(_caption(figure) or figure.stem)
        image = f"<img src='{source}' alt='{caption}' loading='lazy'>"
        parts.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    environment = _listed("", _facts(folder / "environment.json").items())
    parts.append(f"<details><summary>Environment</summary>{environment}</details>" if environment else "")
    return f"<details id='{address}'{' open' if is_open else ''}>{''.join(parts)}</details>"


def _caption(picture: Path) -> str:
    """The sentence that `show.Picture` wrote into the PNG."""
    from PIL import Image

    if picture.is_file():  # a pipe would never end
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):  # whatever PIL makes of damage
            with Image.open(picture, formats=["PNG"]) as opened:
                return str(opened.info.get("Description", ""))
    return ""


def _listed(title: str, facts: Iterable[tuple[str, Any]]) -> str:
    rows = [[text(name), f"<code>{text(_flat(value))}</code>"] for name, value in facts]
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
