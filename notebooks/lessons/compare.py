"""Two or more runs side by side as text: what they were given, what they ran on, and what came out.

Rows in which all runs agree are counted and left out, unless all are asked for. Differences are taken from the first
run. Of each metric the last value counts, by the name of its training, beside how far that training came.

Footgun: a difference between two runs is no effect. Two seeds of one setting differ as well; compare them first.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nblib import files
from nblib.run import manage, parameters, runs

Facts = dict[str, Any]


def text(folders: Sequence[Path], *, everything: bool = False) -> str:
    """The comparison, with a letter for each run. A file that cannot be read is a sentence at the end."""
    letters = [chr(ord("A") + number) for number in range(len(folders))]
    sections = [runs.columns([[letter, *manage.row(folder)] for letter, folder in zip(letters, folders)])]
    problems = []
    for title, part, numeric in (
        ("Parameters", lambda place: parameters.load_yaml(place / "parameters.yaml"), False),
        ("Versions, hardware and commit", lambda place: runs.flat(files.read_json(place / "environment.json")), False),
        ("Results", lambda place: runs.flat(files.read_json(place / "result.json")), True),
        ("Metrics, the last value of each", last_values, True),
    ):
        columns: list[Facts] = []
        for folder in folders:
            columns.append({})
            try:
                columns[-1] = part(folder)
            except (files.Unreadable, parameters.ParameterError) as error:
                problems.append(parameters.clip(str(error), 400))
        sections.append(_section(title, letters, columns, numeric, everything))
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


def _section(title: str, letters: Sequence[str], columns: Sequence[Facts], numeric: bool, everything: bool) -> str:
    names = list(dict.fromkeys(name for column in columns for name in column))
    differ = [name for name in names if any(column.get(name) != columns[0].get(name) for column in columns)]
    rows = [["", *letters, *(f"{letter} - A" for letter in letters[1:] if numeric)]]
    for name in names if everything else differ:
        values = [column.get(name) for column in columns]
        differences = [_difference(values[0], value) for value in values[1:] if numeric]
        rows.append([parameters.clip(name), *map(_spelled, values), *differences])
    equal = len(names) - len(differ)
    head = f"{title}: {len(differ)} different, {equal} equal{' (--all shows them)' if equal and not everything else ''}"
    return "\n".join([head, *([runs.columns(rows)] if len(rows) > 1 else [])])


def _difference(first: Any, other: Any) -> str:
    a, b = (runs.scalars({"": value}).get("") for value in (first, other))
    with contextlib.suppress(TypeError, OverflowError):  # one is no number, or no float can hold it
        return f"{b - a:+.4g}"
    return ""


def _spelled(value: Any) -> str:
    return "" if value is None else parameters.clip(runs.spelled(value), 60)
