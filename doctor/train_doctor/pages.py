"""CHECKS.md: one section per check, its symptom first, so that a search for the symptom finds it.

    python -m train_doctor.pages doctor/CHECKS.md

Everything comes from the code: the docstring of a check is its page, names, severities, causes and fixes are read from
its findings, and what follows from it from the graph in causes.py. A test holds the file to the code.

Footgun: a docstring begins with the id and the symptom, in a person's words, up to the first blank line. What stands
there is index and page at once.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from train_doctor import checks
from train_doctor.causes import CAUSES

HEAD = """# The doctor's checks, by symptom

Written by `python -m train_doctor.pages doctor/CHECKS.md` from the docstrings of the checks; edit those.

```python
from nblib import doctor

with doctor.watch(model, optimizer=optimizer, steps=10) as report:
    train()                      # your own loop, as it is
report.raise_for_errors()
```

`nblib doctor FILE.py` watches a script, `doctor.preflight(model, step)` makes a few steps of its own and puts
everything back, `Trainer(..., callbacks=[doctor.TrainerCallback()])` watches the HF Trainer. An ERROR cannot happen in
a healthy run, a WARN may be there on purpose, a NOTE is worth knowing. UNKNOWN means that a check could not see
enough, as inside a compiled model, and never that all is well. Notebook `05_doctor` shows how it works.
"""


class Said(NamedTuple):
    """One finding as the code spells it; what is filled in at run time stands as dots."""

    name: str
    severity: str
    cause: str
    fix: str


def render() -> str:
    """The whole file."""
    said = _findings()
    index = ["| check | name | symptom |", "|---|---|---|"]
    sections = []
    for check, function in checks.ALL:
        symptom, rest = _page(function)
        names = list(dict.fromkeys(s.name for s in said.get(check, ()))) or [function.__name__.replace("_", "-")]
        title = f"{check} {names[0]}"
        anchor = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        index.append(f"| [{check}](#{anchor}) | {', '.join(names)} | {symptom.replace('|', chr(92) + '|')} |")
        sections.append("\n\n".join([f"## {title}", f"**Symptom.** {symptom}", *rest, *_tail(check, said)]))
    return "\n".join([HEAD, *index, "", "\n\n".join(sections), ""])


def _page(function: Callable) -> tuple[str, list[str]]:
    """The symptom, and the paragraphs after it, each on one line."""
    paragraphs = [" ".join(p.split()) for p in inspect.getdoc(function).split("\n\n")]
    return re.sub(r"^[A-Z]\d+b?\. ", "", paragraphs[0]), paragraphs[1:]


def _tail(check: str, said: dict[str, list[Said]]) -> list[str]:
    parts = []
    for s in said.get(check, ()):
        lines = [f"{label}: {text}" for label, text in (("cause", s.cause), ("fix", s.fix)) if text.strip(". ")]
        parts.append("\n".join([f"- {s.severity} `{s.name}`"] + [f"  - {line}" for line in lines]))
    follows = [effect for effect in CAUSES.get(check, ()) if effect in dict(checks.ALL)]
    said_once = "\n".join(dict.fromkeys(parts))
    return [said_once] * bool(parts) + [f"What follows from it is folded under it: {', '.join(follows)}."] * bool(
        follows
    )


def _findings() -> dict[str, list[Said]]:
    """Every `Finding(...)` in the modules of the checks, by id."""
    found: dict[str, list[Said]] = {}
    for module in checks.MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"):
                continue
            given = dict(zip(("check", "name", "severity", "observed", "expected", "cause", "fix"), node.args))
            given |= {("cause" if k.arg == "diagnosis" else k.arg): k.value for k in node.keywords}
            check, name = (_text(given.get(part)) for part in ("check", "name"))
            if check in dict(checks.ALL) and name.strip("."):
                severity = given.get("severity")
                how = severity.id if isinstance(severity, ast.Name) and severity.id.isupper() else "ERROR or WARN"
                found.setdefault(check, []).append(Said(name, how, _text(given.get("cause")), _text(given.get("fix"))))
    return found


def _text(node: ast.expr | None) -> str:
    """A string of the source; dots where a value is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    return "..."


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
