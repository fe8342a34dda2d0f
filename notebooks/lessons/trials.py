"""The runs of a pitfall side by side: the lines that differ, the verdict, and what each run
measured.

`trial = Trials()`, then `trial("P01", "broken", "claimed")` makes those two runs. It shows the few
lines of the broken run that are at fault, and a table with a column for each run, the symptom
first. Once "fixed" is among them, the mended lines stand beside the broken ones and the verdict
above the table. While runs are being made, a line says which.

A run is made once per notebook: its facts stay in `trial.facts[number, run]` and whether the
symptom shows in `trial.shows[number, run]`, for figures and summaries.

Footgun: the table leaves out what is too long to read, a loss curve above all. `facts` has
everything.
"""

import ast
import html
import inspect
import os
import re
import textwrap
import time
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from lessons import pitfall_cache as stored_facts
from lessons.pitfalls import Pitfall, Unavailable, pitfall
from lessons.progress import Counting
from lessons.single_process import alone
from nbworkbook import show

RUNS = ("broken", "claimed", "fixed")
SYMPTOM = {True: "shows", False: "absent", None: "not known"}
SERIES = 8  # from this many values on a list is a curve, which a table leaves out
WIDEST = 100  # characters of one cell
BESIDE = 110  # characters of code that fit beside each other
RED, GREEN = "background-color: #fbdcdc; color: #000", "background-color: #d8f1d8; color: #000"
GREY = "background-color: #e6e6e6; color: #000"


class Trials:
    """Makes the runs of pitfalls, each once, and stores their facts."""

    def __init__(self) -> None:
        self.facts: dict[tuple[str, str], dict] = {}
        self.shows: dict[tuple[str, str], bool | None] = {}  # None: could not be run here

    def __call__(self, number: str, *runs: str) -> "SideBySide":
        """Return the named runs of one pitfall beside each other; without names all that it has."""
        p = pitfall(number)
        allowed = [run for run in RUNS if getattr(p, run) is not None]
        for run in runs:
            if run not in allowed:
                raise ValueError(f"run = {run!r}: allowed for {number} are {', '.join(allowed)}")
        runs = runs or tuple(allowed)
        timed = []
        with Counting() as line:
            for run in runs:
                if (number, run) not in self.facts:
                    line.says(f"{number}: {', '.join([*timed, f'{run} is running'])}")
                    since = time.monotonic()
                    try:
                        with alone():
                            facts = stored_facts.read(number, run) or getattr(p, run)()
                        self.facts[number, run], self.shows[number, run] = facts, p.seen(facts)
                    except Unavailable as reason:
                        # no compiler, say: the table tells, and the notebook goes on
                        self.facts[number, run], self.shows[number, run] = (
                            {"not run here": str(reason)},
                            None,
                        )
                    timed.append(f"{run} {time.monotonic() - since:.1f} s")
        both = ({run: stored[number, run] for run in runs} for stored in (self.facts, self.shows))
        return SideBySide(p, *both, line.handle)


class SideBySide:
    """The lines at fault and a table of facts by run; the verdict and the fix for whoever has seen
    the fixed run.
    """

    def __init__(
        self, p: Pitfall, facts: dict[str, dict], shows: dict[str, bool | None], handle: Any = None
    ):
        names = dict.fromkeys(name for measured in facts.values() for name in measured)
        rows = {
            name: {run: measured[name] for run, measured in facts.items() if name in measured}
            for name in names
        }
        body = [
            {"fact": name} | {run: _brief(value) for run, value in row.items()}
            for name, row in rows.items()
            if not any(map(_is_series, row.values()))
        ]
        first = {"fact": "THE SYMPTOM"} | {run: SYMPTOM[seen] for run, seen in shows.items()}
        self.title, self.table, self.handle = (
            f"{p.id} {p.title}",
            show.Table([first, *body]),
            handle,
        )
        self.file = file_of(p.wrong)
        self.code = {"broken": lines_of(p.wrong)} if "broken" in shows else {}
        self.verdict, self.sentences = None, {}
        if "fixed" in shows:
            self.code["fixed"] = lines_of(p.right)
            self.verdict = _verdict(p, shows)
            self.sentences = {"Verdict": _sentence(p.verdict), "Fix": _sentence(p.fix)}

    def __str__(self) -> str:
        code = [
            f"{name}, {self.file}:\n" + textwrap.indent("\n".join(lines), "    ")
            for name, lines in self.code.items()
        ]
        below = [
            textwrap.fill(f"{name}: {words}", 110, break_on_hyphens=False)
            for name, words in self.sentences.items()
        ]
        return "\n".join(
            [
                self.title,
                *code,
                *([self.verdict[0]] if self.verdict else []),
                str(self.table),
                *below,
            ]
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        above = f"<p><b>{html.escape(self.title)}</b></p>{self._code()}"
        if self.verdict:
            above += (
                f"<p style='{self.verdict[1]}; padding: 3px 6px'>{html.escape(self.verdict[0])}</p>"
            )
        table = self.table._repr_mimebundle_()["text/html"]
        below = "".join(
            f"<p><b>{name}:</b> {_marked(words)}</p>" for name, words in self.sentences.items()
        )
        return {"text/plain": str(self), "text/html": f"{above}{table}{below}"}

    def _ipython_display_(self) -> None:
        """In the place of the line that said which run is being made, if there is one."""
        handle, self.handle = self.handle, None
        show.displayed(show.Page(self._repr_mimebundle_()), handle)

    def _code(self) -> str:
        """Return the code of the broken run beside that of the fixed one, or above it where lines
        are long; what differs is coloured.
        """
        style = "text-align: left; vertical-align: top"
        both = list(self.code.values())
        cells = []
        for n, (name, lines) in enumerate(self.code.items()):
            other = both[1 - n] if len(both) == 2 else None
            shown = _coloured(lines, other, RED if name == "broken" else GREEN)
            cells.append(f"<td style='{style}'><b>{name}</b>{shown}</td>")
        wide = sum(max(map(len, lines)) for lines in both) > BESIDE
        rows = f"<tr>{('</tr><tr>' if wide else '').join(cells)}</tr>"
        return f"<table>{rows}</table><p><a href='{self.file}'>{self.file}</a></p>" if cells else ""


def lines_of(thing: Callable) -> list[str]:
    """Return the source of a function or class, without its docstring and its decorators."""
    text = textwrap.dedent(inspect.getsource(thing)).rstrip()
    (node,) = ast.parse(text).body
    lines = text.splitlines()
    if ast.get_docstring(node) is not None and len(node.body) > 1:
        del lines[node.body[0].lineno - 1 : node.body[0].end_lineno]
    return lines[node.lineno - 1 :]


def file_of(thing: Callable) -> str:
    """Where it stands, as a link from a notebook."""
    return Path(os.path.relpath(inspect.getsourcefile(thing), Path(__file__).parents[1])).as_posix()


def _coloured(lines: list[str], beside: list[str] | None, style: str) -> str:
    same = set()
    if beside is not None:
        for block in SequenceMatcher(None, lines, beside, autojunk=False).get_matching_blocks():
            same.update(range(block.a, block.a + block.size))
    rows = [
        html.escape(line)
        if beside is None or n in same or n == 0
        else f"<span style='{style}'>{html.escape(line)}</span>"
        # the first line is the name of the function, which always differs
        for n, line in enumerate(lines)
    ]
    return (
        "<pre style='text-align: left; margin: 0; font-family: "
        f"monospace'>{chr(10).join(rows)}</pre>"
    )


def _verdict(p: Pitfall, shows: dict[str, bool | None]) -> tuple[str, str]:
    """Return what the runs say, in a line and its colour."""
    if None in shows.values():
        return "Not known on this machine: a run could not be made.", GREY
    if p.claimed is None:
        return "The broken lines bring the symptom; the fix ends it.", GREEN
    if p.claim_holds:
        return (
            "The claim holds: the cause that is named brings the symptom, and the fix ends it.",
            GREEN,
        )
    return (
        "The claim does not hold: the cause that is named does not bring the symptom. The "
        "broken lines do.",
        RED,
    )


def _sentence(words: str) -> str:
    return words if words.endswith(".") else f"{words}."


def _marked(words: str) -> str:
    """As HTML, with what stands in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(words))


def _is_series(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) >= SERIES


def _brief(value: Any) -> Any:
    """Return what fits a cell: numbers and booleans as they are, anything else as text on one line,
    cut between words.
    """
    if isinstance(value, dict):
        value = ", ".join(f"{name} {show.cell(_brief(inner))}" for name, inner in value.items())
    elif isinstance(value, (list, tuple)):
        value = ", ".join(show.cell(_brief(inner)) for inner in value)
    elif isinstance(value, (bool, int, float)):
        return value
    return textwrap.shorten(
        str("none" if value in (None, "") else value), WIDEST, placeholder=" ..."
    )
