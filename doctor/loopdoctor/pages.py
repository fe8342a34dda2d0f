"""The manual pages of the checks as one Markdown page, for the book. Nothing of it is committed.

    python -m loopdoctor.pages > checks.md

Footgun: the texts stand in the docstrings of the checks; edit those.
"""

import re

from loopdoctor import checks
from loopdoctor.causes import CAUSES
from loopdoctor.check import Check


def page() -> str:
    """Write a table of all checks by symptom, then a section for each."""
    rows = [f"| [{c.id}](#{_anchor(c)}) | {_names(c)} | {c.symptom} |" for c in checks.ALL]
    table = ["| check | name | symptom |", "|---|---|---|", *rows]
    return "\n\n".join(["\n".join(table), *map(_section, checks.ALL)]) + "\n"


def _names(check: Check) -> str:
    return ", ".join(dict.fromkeys(fault.name for fault in check.faults.values()))


def _anchor(check: Check) -> str:
    return f"{check.id} {check.name}".lower().replace(" ", "-")


def _section(check: Check) -> str:
    """Write one check: symptom, how it decides, its faults with cause and fix, what follows."""
    faults = [
        f"- {' or '.join(f.severities)} `{f.name}`\n  - cause: {f.cause}\n  - fix: {f.fix}"
        for f in check.faults.values()
    ]
    parts = [f"## {check.id} {check.name}", f"**Symptom.** {check.symptom}", *check.about]
    # what stands in braces is filled in by a run
    parts.append(re.sub(r"\{\w+\}", "...", "\n".join(faults)))
    if follows := CAUSES.get(check.id):
        parts.append(f"What follows from it is folded under it: {', '.join(follows)}.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
