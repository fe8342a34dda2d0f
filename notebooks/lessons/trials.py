"""The runs of a pitfall side by side: the facts of each, whether its symptom shows, and the verdict.

`trial = Trials()`, then `trial("P01", "broken", "claimed")` makes those two runs and shows a table with a column for
each; once "fixed" is among them the verdict and the fix stand below it. A run is made once per notebook: its facts stay
in `trial.facts[number, run]` and whether the symptom shows in `trial.shows[number, run]`, for figures and summaries.

Footgun: the table leaves out what is too long to read, a loss curve above all. `facts` has everything.
"""

import html
import re
import textwrap
from typing import Any

from lessons import facts as stored_facts
from lessons.pitfalls import Pitfall, Unavailable, pitfall
from nblib.run import show

RUNS = ("broken", "claimed", "fixed")
SYMPTOM = {True: "shows", False: "absent", None: "not known"}
SERIES = 8  # from this many values on a list is a curve, which a table leaves out
WIDEST = 100  # characters of one cell


class Trials:
    """Makes the runs of pitfalls, each once, and stores their facts."""

    def __init__(self) -> None:
        self.facts: dict[tuple[str, str], dict] = {}
        self.shows: dict[tuple[str, str], bool | None] = {}  # None: could not be run here

    def __call__(self, number: str, *runs: str) -> "SideBySide":
        """The named runs of one pitfall beside each other; without names all that it has."""
        p = pitfall(number)
        allowed = [run for run in RUNS if getattr(p, run) is not None]
        for run in runs:
            if run not in allowed:
                raise ValueError(f"run = {run!r}: allowed for {number} are {', '.join(allowed)}")
        runs = runs or tuple(allowed)
        for run in runs:
            if (number, run) not in self.facts:
                try:
                    facts = stored_facts.read(number, run) or getattr(p, run)()
                    self.facts[number, run], self.shows[number, run] = facts, p.seen(facts)
                except Unavailable as reason:  # no compiler, say: the table tells, and the notebook goes on
                    self.facts[number, run], self.shows[number, run] = {"not run here": str(reason)}, None
        return SideBySide(p, *({run: stored[number, run] for run in runs} for stored in (self.facts, self.shows)))


class SideBySide:
    """A table of facts by run; under it the verdict and the fix, for whoever has seen the fixed run."""

    def __init__(self, p: Pitfall, facts: dict[str, dict], shows: dict[str, bool]):
        names = dict.fromkeys(name for measured in facts.values() for name in measured)
        rows = {name: {run: measured[name] for run, measured in facts.items() if name in measured} for name in names}
        body = [
            {"fact": name} | {run: _brief(value) for run, value in row.items()}
            for name, row in rows.items()
            if not any(map(_is_series, row.values()))
        ]
        last = {"fact": "THE SYMPTOM"} | {run: SYMPTOM[seen] for run, seen in shows.items()}
        self.title, self.table = f"{p.id} {p.title}", show.Table([*body, last])
        self.sentences = {"Verdict": _sentence(p.verdict), "Fix": _sentence(p.fix)} if "fixed" in shows else {}

    def __str__(self) -> str:
        below = [
            textwrap.fill(f"{name}: {words}", 110, break_on_hyphens=False) for name, words in self.sentences.items()
        ]
        return "\n".join([self.title, str(self.table), *below])

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        table = self.table._repr_mimebundle_()["text/html"]
        below = "".join(f"<p><b>{name}:</b> {_marked(words)}</p>" for name, words in self.sentences.items())
        return {"text/plain": str(self), "text/html": f"<p><b>{html.escape(self.title)}</b></p>{table}{below}"}


def _sentence(words: str) -> str:
    return words if words.endswith(".") else f"{words}."


def _marked(words: str) -> str:
    """As HTML, with what stands in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(words))


def _is_series(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) >= SERIES


def _brief(value: Any) -> Any:
    """What fits a cell: numbers and booleans as they are, anything else as text on one line, cut between words."""
    if isinstance(value, dict):
        value = ", ".join(f"{name} {show.cell(_brief(inner))}" for name, inner in value.items())
    elif isinstance(value, (list, tuple)):
        value = ", ".join(show.cell(_brief(inner)) for inner in value)
    elif isinstance(value, (bool, int, float)):
        return value
    return textwrap.shorten(str("none" if value in (None, "") else value), WIDEST, placeholder=" ...")
