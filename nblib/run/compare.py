"""Two or more runs side by side as text: what they were given, what they ran on, and what came out.

Rows in which all runs agree are counted and left out, unless all are asked for. Differences are taken from the first
run. Of each metric the last value counts, by the name of its training, beside how far that training came: a run that
was stopped at step 44 of 600 has other last values than one that ended.

Footgun: a difference between two runs is no effect. Two seeds of one setting differ as well; compare them first.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nblib import files
from nblib.run import parameters, runs

Facts = dict[str, Any]


def text(folders: Sequence[Path], *, everything: bool = False) -> str:
    """The comparison, with a letter for each run."""
    letters = [chr(ord("A") + number) for number in range(len(folders))]
    problems: list[str] = []

    def read(part: Callable[[Path], Facts]) -> list[Facts]:
        """That part of each run; a file that cannot be read is a sentence, and its run an empty column."""
        parts = []
        for letter, folder in zip(letters, folders):
            try:
                parts.append(part(folder))
            except (files.Unreadable, parameters.ParameterError, RecursionError) as error:
                parts.append({})
                problems.append(f"{letter}: {error}")
        return parts

    which = [[letter, f"{each.parent.name}/{each.name}", _ending(each)] for letter, each in zip(letters, folders)]
    sections = [runs.columns(which)]
    for title, part, numeric in (
        ("Parameters", lambda folder: parameters.load_yaml(folder / "parameters.yaml"), False),
        ("Versions, hardware and commit", lambda folder: _flat(files.read_json(folder / "environment.json")), False),
        ("Results", lambda folder: _flat(files.read_json(folder / "result.json")), True),
        ("Metrics, the last value of each", last_values, True),
    ):
        sections.append(_section(title, letters, read(part), numeric, everything))
    return "\n\n".join([*sections, *problems])


def last_values(folder: Path) -> Facts:
    """How far each training came, and the last value of each of its metrics."""
    values: Facts = {}
    for record in runs.Run(folder, {}).history():
        name = f"{record['run']} " if "run" in record else ""
        if "step" in record:
            values[f"{name}step"] = f"{record['step']} of {record.get('of', '?')}"
            values |= {f"{name}{metric}": value for metric, value in runs.scalars(record).items() if metric != "eta_s"}
    return values


def _ending(folder: Path) -> str:
    """How the run ended, and which of its trainings were stopped on the way."""
    try:
        facts = runs.record(folder)
    except files.Unreadable as error:
        return str(error)
    stopped = facts.get("stopped")
    phrases = [
        f"{name} was stopped at step {at.get('step')} of {at.get('of')}"
        for name, at in (stopped.items() if isinstance(stopped, dict) else ())
        if isinstance(at, dict)
    ]
    seconds = [f"{facts['seconds']:.1f} s"] if isinstance(facts.get("seconds"), (int, float)) else []
    return parameters.clip("; ".join([", ".join([runs.status(folder), *seconds]), *phrases]), 999)


def _section(title: str, letters: Sequence[str], columns: Sequence[Facts], numeric: bool, everything: bool) -> str:
    names = list(dict.fromkeys(name for column in columns for name in column))
    differ = [name for name in names if any(column.get(name) != columns[0].get(name) for column in columns)]
    rows = []
    for name in names if everything else differ:
        values = [column.get(name) for column in columns]
        differences = [_difference(values[0], value) for value in values[1:]] if numeric else []
        rows.append([parameters.clip(name), *map(_spelled, values), *differences])
    equal = len(names) - len(differ)
    head = f"{title}: {len(differ)} differ, {equal} equal{'' if everything or not equal else ' (--all shows them)'}"
    if not rows:
        return head
    top = ["", *letters, *([f"{letter} - A" for letter in letters[1:]] if numeric else [])]
    return f"{head}\n{runs.columns([top, *rows])}"


def _flat(facts: Mapping[str, Any], above: str = "") -> Facts:
    """Dictionaries within dictionaries as names with dots."""
    flat: Facts = {}
    for name, value in facts.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return flat


def _difference(first: Any, other: Any) -> str:
    a, b = (runs.scalars({"": value}).get("") for value in (first, other))
    with contextlib.suppress(TypeError, OverflowError):  # one is no number, or no float can hold it
        return f"{b - a:+.4g}"
    return ""


def _spelled(value: Any) -> str:
    """On one line; floats with six digits that count."""
    return "" if value is None else parameters.clip(f"{value:.6g}" if isinstance(value, float) else str(value), 60)
