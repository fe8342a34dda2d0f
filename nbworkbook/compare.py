"""Two or more runs side by side as text: what came out, what they were given, what they ran on.

First come the results that count (`Run.headline`), of every run. Then, of the parameters, versions,
results and metrics that all of them have, those that differ; the equal ones are counted. What is
equal and what only some of them have is printed where everything is wanted: between runs of two
notebooks that is most of it. Differences are taken from the first run. Of each metric the last
value counts, by the name of its training, beside how far that training came.

Footgun: a difference between two runs is no effect. Two seeds of one setting differ as well;
compare them first.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import files
from nbworkbook import manage, parameters, runs

FEW = 4  # results of a run that names none that count

Facts = dict[str, Any]


class Part(NamedTuple):
    """One kind of facts of all runs."""

    title: str
    columns: list[Facts]  # of each run
    numeric: bool  # whether differences are numbers

    def names(self) -> list[str]:
        """Return the names of all facts, in the order in which runs have them."""
        return list(dict.fromkeys(name for column in self.columns for name in column))

    def without(self, names: Sequence[str]) -> "Part":
        """Return the part without these facts."""
        kept = [{n: v for n, v in column.items() if n not in names} for column in self.columns]
        return self._replace(columns=kept)

    def is_shared(self, name: str) -> bool:
        return all(name in column for column in self.columns)

    def differs(self, name: str) -> bool:
        return any(column.get(name) != self.columns[0].get(name) for column in self.columns)


def text(folders: Sequence[Path], *, everything: bool = False) -> str:
    """Return the comparison, with a letter for each run.

    A file that cannot be read is a sentence at the end."""
    letters = [chr(ord("A") + number) for number in range(len(folders))]
    problems: list[str] = []

    def read(title: str, of: Callable[[Path], Facts], *, numeric: bool) -> Part:
        return Part(title, [_read(of, folder, problems) for folder in folders], numeric)

    # Which runs they are, and the results that count.
    lines = [[letter, *manage.row(folder)] for letter, folder in zip(letters, folders)]
    sections = [runs.columns(lines)]
    results = read("Other results", _results, numeric=True)
    names = _names_that_count(folders, results)
    if names:
        sections.append("The results that count\n" + _table(results, names, letters))

    parts = [
        read("Parameters", _parameters, numeric=False),
        read("Versions, hardware and commit", _environment, numeric=False),
        results.without(names),
        read("Metrics, the last value of each", last_values, numeric=True),
    ]

    # What all of them have and is not the same.
    for part in parts:
        sections.append(_differences(part, letters, everything=everything))

    # The rest: what is equal, and what only some of them have.
    if everything:
        for part in parts:
            sections += _rest(part, letters)
    return "\n\n".join([*sections, *dict.fromkeys(problems)])


def last_values(folder: Path) -> Facts:
    """Return how far each training came, and the last value of each of its metrics."""
    values: Facts = {}
    for record in runs.Run(folder, {}).history():
        if "step" not in record:
            continue
        name = f"{record['run']} " if "run" in record else ""
        values[f"{name}step"] = f"{record['step']} of {record.get('of', '?')}"
        for metric, value in runs.scalars(record).items():
            if metric != "eta_s":
                values[f"{name}{metric}"] = value
    return values


def _parameters(folder: Path) -> Facts:
    return parameters.load_yaml(folder / "parameters.yaml")


def _environment(folder: Path) -> Facts:
    return runs.flat(files.read_json(folder / "environment.json"))


def _results(folder: Path) -> Facts:
    return runs.flat(files.read_json(folder / "result.json"))


def _read(of: Callable[[Path], Facts], folder: Path, problems: list[str]) -> Facts:
    """Return these facts of the run; nothing where they cannot be read, which is noted."""
    try:
        return of(folder)
    except (files.Unreadable, parameters.ParameterError) as error:
        problems.append(parameters.clip(str(error), 400))
        return {}


def _names_that_count(folders: Sequence[Path], results: Part) -> list[str]:
    """Return the results that any of the runs names as those that count, or its first numbers."""
    names: list[str] = []
    for folder, column in zip(folders, results.columns):
        named: Any = ()
        with contextlib.suppress(files.Unreadable):
            named = runs.record(folder).get("headline")

        chosen = []
        for each in named if isinstance(named, list) else ():
            chosen += [name for name in column if f"{name}.".startswith(f"{each}.")]
        if not chosen:
            chosen = [name for name in column if runs.scalars({"": column[name]})][:FEW]
        names += chosen
    return list(dict.fromkeys(names))


def _differences(part: Part, letters: Sequence[str], *, everything: bool) -> str:
    """Return the section of what all runs have and is not the same in them."""
    shared = [name for name in part.names() if part.is_shared(name)]
    differ = [name for name in shared if part.differs(name)]

    # What is left out is counted.
    counts = [f"{len(differ)} different", f"{len(shared) - len(differ)} equal"]
    in_some = len(part.names()) - len(shared)
    if in_some:
        counts.append(f"{in_some} not in all of them")
    head = f"{part.title}: {', '.join(counts)}"
    if len(part.names()) > len(differ) and not everything:
        head += " (--all shows them)"
    return "\n".join([head, _table(part, differ, letters)]) if differ else head


def _rest(part: Part, letters: Sequence[str]) -> list[str]:
    """Return the sections of what is equal, and of what only some of the runs have."""
    names = part.names()
    equal = [name for name in names if part.is_shared(name) and not part.differs(name)]
    in_some = [name for name in names if not part.is_shared(name)]

    sections = []
    for kind, chosen in (("equal", equal), ("not in all of them", in_some)):
        if chosen:
            sections.append(f"{part.title}, {kind}\n{_table(part, chosen, letters)}")
    return sections


def _table(part: Part, names: Sequence[str], letters: Sequence[str]) -> str:
    """Return a row for each name, with the values of all runs and their distance from the first."""
    head = ["", *letters]
    if part.numeric:
        head += [f"{letter} - A" for letter in letters[1:]]

    rows = [head]
    for name in names:
        values = [column.get(name) for column in part.columns]
        line = [parameters.clip(name), *map(_spelled, values)]
        if part.numeric:
            line += [_difference(values[0], value) for value in values[1:]]
        rows.append(line)
    return runs.columns(rows)


def _difference(first: Any, other: Any) -> str:
    a, b = (runs.scalars({"": value}).get("") for value in (first, other))
    with contextlib.suppress(TypeError, OverflowError):  # one is no number, or no float can hold it
        return f"{b - a:+.4g}"
    return ""


def _spelled(value: Any) -> str:
    return "" if value is None else parameters.clip(runs.spelled(value), 60)
