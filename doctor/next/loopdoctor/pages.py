"""CHECKS.md and the table of the README, both from the records of the checks.

    python -m loopdoctor.pages        in the folder doctor/: writes both

Footgun: what it writes is committed. A test compares both files to the code.
"""

import re
from pathlib import Path

from loopdoctor import checks
from loopdoctor.causes import CAUSES
from loopdoctor.check import Check

HEAD = """# The doctor's checks, by symptom

Written by `python -m loopdoctor.pages` from the docstrings of the checks; edit those. README.md says how to use them.

An ERROR cannot happen in a healthy run, a WARN may be there on purpose, a NOTE is worth knowing. UNKNOWN means that a
check could not see enough, as inside a compiled model, and never that all is well. Dots stand for what a run fills in.
"""
MARKS = "<!-- checks: written by loopdoctor.pages -->\n", "<!-- end of checks -->"


def page() -> str:
    """The whole of CHECKS.md."""
    return "\n".join([HEAD, table(""), "\n\n".join(map(_section, checks.ALL)), ""])


def table(file: str) -> str:
    """One row for each check; `file` is the one with the sections that the rows link to."""
    rows = [f"| [{c.id}]({file}#{_anchor(c)}) | {_names(c)} | {c.symptom} |" for c in checks.ALL]
    return "\n".join(["| check | name | symptom |", "|---|---|---|", *rows, ""])


def readme(text: str) -> str:
    """The README with its table as the checks are now."""
    head, tail = text.partition(MARKS[0])[0], text.partition(MARKS[1])[2]
    return head + MARKS[0] + table("CHECKS.md") + MARKS[1] + tail


def _names(check: Check) -> str:
    return ", ".join(dict.fromkeys(fault.name for fault in check.faults.values()))


def _anchor(check: Check) -> str:
    return f"{check.id} {check.name}".lower().replace(" ", "-")


def _section(check: Check) -> str:
    lines = [
        f"- {' or '.join(f.severities)} `{f.name}`\n  - cause: {f.cause}\n  - fix: {f.fix}"
        for f in check.faults.values()
    ]
    parts = [f"## {check.id} {check.name}", f"**Symptom.** {check.symptom}", *check.about]
    parts.append(re.sub(r"\{\w+\}", "...", "\n".join(lines)))
    if follows := CAUSES.get(check.id):
        parts.append(f"What follows from it is folded under it: {', '.join(follows)}.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    Path("CHECKS.md").write_text(page(), encoding="utf-8")
    Path("README.md").write_text(readme(Path("README.md").read_text(encoding="utf-8")), encoding="utf-8")
