"""The report as Jupyter shows it under a cell: HTML that is readable in light and dark themes.

A healthy run is one line. A finding has a bar in the colour of its severity, and what follows from
it is folded.

All style stands at the elements, and no colour is set but white on a dark badge: text and
background are the theme's. So nothing of the page around it changes, and a page that removes styles
(GitHub, a notebook that is not trusted) shows the same words one under the other. The whole page
with pictures is `Report.html`.

Footgun: names and texts in a finding are the program's own, so each goes through `_text` before it
is HTML.
"""

import html
from typing import Any

from loopdoctor import reports
from loopdoctor.finding import ERROR, NOTE, WARN, Finding

BADGES = {ERROR: "#b3261e", WARN: "#8a5a00", NOTE: "#566573"}  # dark enough for white on them
ALL = "font-size:13px;line-height:1.5;max-width:72em;overflow-wrap:anywhere"
BADGE = "color:#fff;border-radius:3px;padding:1px 6px;font-size:11px;font-weight:600"
GRID = "display:grid;grid-template-columns:max-content 1fr;column-gap:12px;margin-top:2px"
BAR = "border-left:3px solid;padding-left:10px;margin:8px 0"
FAINT = "opacity:.75"


def fragment(report: Any) -> str:
    """Write what stands under a cell."""
    parts = [_div(_text(report.headline()), "font-weight:600")]
    if report.done:
        parts += [_finding(root, effects) for root, effects in _by_root(report.findings)]
        parts += [
            _div(_text(line), f"{FAINT};white-space:pre-wrap") for line in reports.ends(report)
        ]
    return _div("".join(parts), ALL)


def _by_root(findings: list[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """Give each root cause with what follows from it; a report has them in this order."""
    groups: list[tuple[Finding, list[Finding]]] = []
    for finding in findings:
        if finding.because and groups:
            groups[-1][1].append(finding)
        else:
            groups.append((finding, []))
    return groups


def _finding(root: Finding, effects: list[Finding]) -> str:
    """Write one root cause."""
    colour = BADGES[root.severity]
    badge = f"<span style='{BADGE};background:{colour}'>{root.severity}</span>"
    head = _div(f"{badge} <b>{_text(f'{root.check} {root.name}')}</b>")
    rows = "".join(_div(label, FAINT) + _div(_text(text)) for label, text in reports._parts(root))
    # The cause is what to read first, so its effects are folded.
    folded = ""
    if effects:
        lines = "".join(_div(_text(f"{f.check} {f.name}: {f.observed}")) for f in effects)
        count = "1 effect of this" if len(effects) == 1 else f"{len(effects)} effects of this"
        folded = f"<summary style='{FAINT}'>{count}</summary>{lines}"
        folded = f"<details style='margin-top:4px'>{folded}</details>"
    return _div(head + _div(rows, GRID) + folded, f"{BAR};border-left-color:{colour}")


def _div(inner: str, style: str = "") -> str:
    return f"<div style='{style}'>{inner}</div>" if style else f"<div>{inner}</div>"


def _text(text: str) -> str:
    return html.escape(text)
