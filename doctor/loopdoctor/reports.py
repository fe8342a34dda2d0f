"""A report as a file: a page of HTML with its pictures, Markdown, JUnit for CI, and annotations as
GitHub reads them.

The page needs nothing from outside: pictures are SVG that is written here, there is no script, and
every text of the program that was watched is escaped. In JUnit each check is a test: only an ERROR
fails, as in the exit code.

Footgun: what stands in a finding came from somebody's program: names of parameters, texts of
exceptions. In HTML, XML, Markdown and in a line of annotations other characters mean something, so
each writer has an escape of its own.
"""

import html as escapes
import math
import os
import re
from typing import Any
from xml.etree import ElementTree

from loopdoctor import histograms
from loopdoctor.finding import ERROR, NOTE, WARN, Finding

COLOURS = {ERROR: "#c0392b", WARN: "#b9770e", NOTE: "#566573"}
LEVELS = {ERROR: "error", WARN: "warning", NOTE: "notice"}
# characters that XML cannot hold
UNFIT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
WIDE, HIGH, EDGE = 360, 150, 44  # of a picture, and of the room left for its numbers
BARS = 24  # tensors with the largest gradients of the last step
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>loopdoctor</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
color: #1b2631 }
table { border-collapse: collapse; margin: .4em 0 1em }
td, th { padding: .15em .8em .15em 0; vertical-align: top; text-align: left }
.follows { margin-left: 2em } figure { display: inline-block; margin: 0 1em 1em 0 }
figcaption { font-weight: 600 } svg { max-width: 100% }
svg text { font: 10px system-ui, sans-serif; fill: #566573 }
</style></head><body>
"""


def _parts(f: Finding) -> list[tuple[str, str]]:
    where = [("where", place) for place in f.where]
    return [
        *where,
        ("observed", f.observed),
        ("expected", f.expected),
        ("cause", f.diagnosis),
        ("fix", f.fix),
    ]


def ends(report: Any) -> list[str]:
    """Return what stands under the findings: what was ignored, what changed, what went wrong in
    watching.
    """
    lines = [
        f"ignored: {f.check} {f.name}, because: {reason} ({f.observed})"
        for f, reason in report.ignored
    ]
    lines += [f"against the baseline: {line}" for line in report.compared]
    lines += [f"of the log: {note}" for note in report.notes]
    return lines + [f"the doctor itself failed at: {fault}" for fault in report.faults]


# --------------------------------------------------------------------------------------------- HTML
def html(report: Any) -> str:
    e = escapes.escape
    parts = [HEAD, f"<h1>{e(report.headline())}</h1>"]
    for f in report.findings:
        if f.because:
            parts.append(
                f"<p class='follows'>follows: {e(f'{f.check} {f.name} ({f.observed})')}</p>"
            )
            continue
        rows = "".join(f"<tr><th>{name}</th><td>{e(text)}</td></tr>" for name, text in _parts(f))
        parts.append(
            f"<h2><span style='color:{COLOURS[f.severity]}'>{f.severity}</span> {e(f.check)} "
            f"{e(f.name)}</h2>"
        )
        parts.append(f"<table>{rows}</table>")
    parts += [f"<p>{e(line)}</p>" for line in ends(report)]
    if pictures := _pictures(report):
        parts.append("<h2>What was seen</h2>" + "".join(pictures))
    rows = "".join(
        f"<tr><td>{e(check)}</td><td>{e(v.state)}</td><td>{e(v.why)}</td></tr>"
        for check, v in report.verdicts.items()
    )
    parts.append(f"<h2>Checks that found nothing</h2><table>{rows}</table></body></html>\n")
    return "\n".join(parts)


def _pictures(report: Any) -> list[str]:
    record = report.record
    made = [
        _figure(f"{name} per step", _line(values))
        for name, values in record.get("curves", {}).items()
        if len(values) > 1 and any(map(math.isfinite, values))
    ]
    last = {name: values[-1] for name, values in record.get("tensors", {}).items() if values}
    there = sorted((n for n in last if math.isfinite(last[n])), key=lambda n: -last[n])
    shown = there[: BARS // 2] + there[max(BARS // 2, len(there) - BARS // 2) :]
    if shown:
        made.append(
            _figure(
                "gradient norm of tensors, last step (log)", _bars([(n, last[n]) for n in shown])
            )
        )
    for kind in (histograms.GRADIENTS, histograms.GIVEN):
        if tensors := record.get("histograms", {}).get(kind):
            made.append(_figure(f"size of the numbers: {kind}", _strips(tensors)))
    return made


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{escapes.escape(title)}</figcaption>{svg}</figure>"


def _line(values: list[float]) -> str:
    """Values over their steps; those that are no numbers are red marks at the top."""
    there = [v for v in values if math.isfinite(v)]
    low, high = min(there), max(there)
    span = high - low or abs(high) or 1.0

    def at(step: int, value: float) -> tuple[float, float]:
        x = EDGE + (WIDE - EDGE - 8) * step / (len(values) - 1)
        return round(x, 1), round(HIGH - 18 - (HIGH - 30) * (value - low) / span, 1)

    points = " ".join(
        f"{x},{y}" for step, v in enumerate(values) if math.isfinite(v) for x, y in [at(step, v)]
    )
    marks = "".join(
        f"<text x='{at(step, high)[0]}' y='10' style='fill:{COLOURS[ERROR]}'>{v}</text>"
        for step, v in enumerate(values)
        if math.isinf(v)
    )
    return (
        f"{_svg(WIDE, HIGH)}"
        f"<polyline points='{points}' fill='none' stroke='#2471a3' stroke-width='1.5'/>{marks}"
        f"<text x='2' y='{at(0, high)[1] + 4}'>{high:.3g}</text><text x='2' "
        f"y='{at(0, low)[1]}'>{low:.3g}</text>"
        f"<text x='{EDGE}' y='{HIGH - 4}'>1</text><text x='{WIDE - 30}' "
        f"y='{HIGH - 4}'>{len(values)}</text></svg>"
    )


def _bars(rows: list[tuple[str, float]]) -> str:
    """Return a bar for each tensor, its length by the logarithm; one that is exactly 0 has none and
    says so.
    """
    logs = [math.log10(v) for _, v in rows if v > 0]
    low, high = (min(logs) - 0.5, max(logs)) if logs else (0.0, 1.0)
    lines = []
    for number, (name, value) in enumerate(rows):
        y, text = 14 * number, escapes.escape(name[-44:])
        length = round(230 * (math.log10(value) - low) / (high - low or 1), 1) if value > 0 else 0
        colour = "#2471a3" if value > 0 else COLOURS[ERROR]
        lines.append(f"<text x='250' y='{y + 10}' text-anchor='end'>{text}</text>")
        lines.append(f"<rect x='256' y='{y + 2}' width='{length}' height='9' fill='#2471a3'/>")
        lines.append(
            f"<text x='{260 + length}' y='{y + 10}' style='fill:{colour}'>{value:.2g}</text>"
        )
    return f"{_svg(560, 14 * len(rows))}{''.join(lines)}</svg>"


def _strips(tensors: dict[str, dict[str, list[int]]]) -> str:
    """Return a row for each tensor: its histogram in the first and in the last step that was
    counted, darker where more is.

    Left of each are the exact zeros and right of it what is not finite.
    """
    steps = sorted({step for kept in tensors.values() for step in kept}, key=int)
    lines, cell, room = [], 6, 6 * (histograms.COLUMNS + 3)
    for number, step in enumerate(steps[:1] + steps[1:][-1:]):
        x = 256 + number * room
        ends = f"2^{histograms.LOW}", f"2^{histograms.LOW + histograms.WIDTH * histograms.BINS}"
        lines.append(f"<text x='{x}' y='9'>step {step}: 0 | {ends[0]} to {ends[1]} | nan</text>")
        for row, (name, kept) in enumerate(tensors.items(), 1):
            if not number:
                lines.append(
                    f"<text x='250' y='{14 * row + 10}' "
                    f"text-anchor='end'>{escapes.escape(name[-44:])}</text>"
                )
            counts = kept.get(step, [])
            for column, count in enumerate(counts):
                if count:
                    left = (
                        x
                        + cell * column
                        + 2 * (column > 0)
                        + 2 * (column == histograms.COLUMNS - 1)
                    )
                    fill = {0: COLOURS[WARN], histograms.COLUMNS - 1: COLOURS[ERROR]}.get(
                        column, "#2471a3"
                    )
                    shade = round(max(0.1, count / max(counts)), 2)
                    size = f"width='{cell}' height='11' fill='{fill}' fill-opacity='{shade}'"
                    lines.append(f"<rect x='{left}' y='{14 * row + 1}' {size}/>")
    return f"{_svg(264 + 2 * room, 14 * len(tensors) + 18)}{''.join(lines)}</svg>"


def _svg(wide: int, high: int) -> str:
    size = f"width='{wide}' height='{high}' viewBox='0 0 {wide} {high}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>"


# ----------------------------------------------------------------------------------------- Markdown
def markdown(report: Any) -> str:
    lines = [f"# {_plain(report.headline())}", ""]
    for f in report.findings:
        if f.because:
            lines += [f"- follows: {_plain(f'{f.check} {f.name} ({f.observed})')}", ""]
            continue
        lines += [f"## {f.severity} {_plain(f'{f.check} {f.name}')}", ""]
        lines += [f"- **{name}**: {_plain(text)}" for name, text in _parts(f)] + [""]
    lines += [f"- {_plain(line)}" for line in ends(report)]
    lines += ["", "| check | verdict | why |", "|---|---|---|"]
    lines += [
        f"| {_plain(check)} | {v.state} | {_plain(v.why)} |" for check, v in report.verdicts.items()
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """One line in which no character of Markdown or HTML means anything."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", line)


# -------------------------------------------------------------------------------------------- JUnit
def junit(report: Any) -> str:
    suite = ElementTree.Element("testsuite", name="loopdoctor")

    def case(name: str, tag: str = "", message: str = "", text: str = "") -> None:
        each = ElementTree.SubElement(suite, "testcase", classname="loopdoctor", name=_fit(name))
        if tag == "system-out":
            ElementTree.SubElement(each, tag).text = _fit(f"{message}\n{text}")
        elif tag:
            ElementTree.SubElement(each, tag, message=_fit(message)).text = _fit(text)

    if report.exception is not None:
        case("the run", "error", f"{type(report.exception).__name__}: {report.exception}")
    elif not report.rounds:
        case("the run", "skipped", report.headline())
    for f in report.findings:
        text = "\n".join(f"{name}: {part}" for name, part in _parts(f))
        tag = "failure" if f.severity == ERROR else "system-out"
        case(f"{f.check} {f.name}", tag, f"{f.severity}: {f.diagnosis}", text)
    for f, reason in report.ignored:
        case(f"{f.check} {f.name}", "skipped", f"ignored: {reason}", f.observed)
    for check, verdict in report.verdicts.items():
        case(
            check,
            *(() if verdict.state == "OK" else ("skipped", f"{verdict.state}: {verdict.why}")),
        )
    for fault in report.faults:
        case("the doctor itself", "system-out", fault)
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    ElementTree.indent(suite)
    return (
        "<?xml version='1.0' encoding='utf-8'?>\n"
        + ElementTree.tostring(suite, encoding="unicode")
        + "\n"
    )


def _fit(text: str) -> str:
    return UNFIT.sub("?", text)


# -------------------------------------------------------------------------------------- annotations
def annotations(report: Any, file: str = "") -> str:
    """Return a line for each root cause, as `::error title=...::...`, which GitHub shows beside the
    file.
    """
    lines = []
    if report.exception is not None:
        said = f"{type(report.exception).__name__}: {report.exception}"
        lines.append(_annotation("error", "the run raised", said, file))
    for f in report.findings:
        if not f.because:
            text = f"{f.diagnosis} Observed: {f.observed}. Fix: {f.fix}"
            lines.append(
                _annotation(
                    LEVELS[f.severity], f"{f.check} {f.name}", text, file, _line_in(f, file)
                )
            )
    for f, reason in report.ignored:
        lines.append(_annotation("notice", f"ignored {f.check} {f.name}", reason, file))
    return "".join(line + "\n" for line in lines)


def _line_in(f: Finding, file: str) -> str:
    """Return the number of the line that is to blame, where it is one of this file."""
    places = [re.match(r"(.*), line (\d+)(?: |$)", place) for place in f.where]
    return next(
        (m[2] for m in places if m and file and os.path.abspath(m[1]) == os.path.abspath(file)), ""
    )


def _annotation(level: str, title: str, text: str, file: str, line: str = "") -> str:
    def kept(part: str, more: str = "") -> str:
        for mark in "%\r\n" + more:
            part = part.replace(mark, f"%{ord(mark):02X}")
        return part

    where = f"file={kept(file, ':,')}," + (f"line={line}," if line else "") if file else ""
    return f"::{level} {where}title={kept(title, ':,')}::{kept(text)}"
