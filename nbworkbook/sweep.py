"""One notebook over a grid of parameters: a run folder for each combination, and a table of what
came out.

A sweep file is flat YAML like a profile. `name: value` sets a parameter, `name: [a, b]` varies it,
and the grid is the product of all that vary, the last one in the file changing fastest. A parameter
that takes a list is varied by a list of lists. The file goes on top of a profile, and
`-p name=value` on top of both: it holds a parameter still.

Each combination becomes the job that `nblib run` would make of it. So a sweep skips, resumes and
stops as runs do. It counts a finished run of the same values whoever made it, and gives its table
again without running anything.

The table sets the varied parameters against what each run's result.json holds. As text it shows a
few numbers. Its JSON and CSV files hold every result, the parameters that all runs share and the
environment that the runs recorded, so they can be published as they are. A run whose environment
was another one carries its own. A run whose files were damaged since is a row with the status
"unreadable" and the reason; the others keep their numbers.

Footgun: a run's key holds its code and the versions of the packages. A change of either, between
two halves of a sweep, runs the first half again.

Footgun: only finished runs have numbers in the table. The result.json of a failed run may hold
results as well, from a first half or an earlier attempt. Nothing there distinguishes them from
those of a whole run.
"""

import csv
import io
import itertools
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import files, paths
from nbworkbook import jobs, parameters, runner, runs
from nbworkbook.jobs import Job
from nbworkbook.parameters import Parameter, ParameterError
from nbworkbook.runner import Outcome

FORMS = "`name: [a, b]`, or `name: [[a], [b]]` for a parameter that takes a list"
LIMIT = 1000  # combinations; more of them are a slip in the file
FEW = 8  # results in the text when none are named

Row = dict[str, Any]


class Sweep(NamedTuple):
    notebook: str
    command: str
    varied: dict[str, list]
    jobs: list[Job]

    def at(self, job: Job) -> dict[str, Any]:
        """Return the combination that the job is of."""
        return {name: job.parameters[name] for name in self.varied}


# ------------------------------------------------------------------ what is run


def plan(
    notebook: str,
    *,
    file: str | None = None,
    profile: str | None = None,
    overrides: Sequence[str] = (),
) -> Sweep:
    """Return every job of the grid, in order; ParameterError lists every problem of the file."""
    name = jobs.resolve(notebook)
    path = file_of(name, "sweep", file)
    source = paths.short(path)
    known = parameters.declared(paths.notebooks() / f"{name}.ipynb")

    # What each parameter takes, and how many combinations that makes.
    values = _values(path, known, overrides)
    varied = {name: several for name, several in values.items() if len(several) > 1}
    _check(source, known, values, varied)

    # A job for each, as `nblib run` would make it.
    grid = [dict(zip(values, each)) for each in itertools.product(*values.values())]
    texts = [list(itertools.starmap(parameters.assignment, each.items())) for each in grid]
    planned = jobs.variants(name, texts, profile=profile)

    labelled = []
    for number, (job, combination) in enumerate(zip(planned, grid), start=1):
        what = ", ".join(f"{each} {brief(combination[each])}" for each in varied)
        labelled.append(job._replace(label=f"{number} of {len(grid)}: {what}"))
    return Sweep(name, command_of(name, source, profile, overrides), varied, labelled)


def file_of(notebook: str, kind: str, given: str | None) -> Path:
    """Return the file that is given, or the notebook's own sweep or search file."""
    if given:
        return Path(given)

    path = paths.profiles() / f"{notebook}.{kind}.yaml"
    if not path.exists():
        what = f"{notebook} has no {kind} file {paths.short(path)}"
        raise ParameterError(f"{what}; write one, or name another with -f.")
    return path


def command_of(notebook: str, source: str, profile: str | None, overrides: Sequence[str]) -> str:
    """Return the command that makes the same sweep once more."""
    words = ["nblib", "sweep", notebook, "-f", source]
    if profile:
        words += ["--profile", profile]
    for text in overrides:
        words += ["-p", text]
    return shlex.join(words)


def _check(
    source: str, known: Mapping[str, Parameter], values: Mapping[str, list], varied: Iterable[str]
) -> None:
    """Raise ParameterError where the grid is none, is too large, or holds a secret."""
    if not varied:
        raise ParameterError(f"{source}: nothing varies; write {FORMS}.")

    secret = [name for name in varied if known[name].allowed == "secret"]
    if secret:
        why = "is secret and cannot vary: no result hangs on it."
        raise ParameterError(f"{source}: '{secret[0]}' {why}")

    size = math.prod(map(len, values.values()))
    if size > LIMIT:
        raise ParameterError(f"{source}: {size} combinations, allowed: {LIMIT}.")


def _values(
    file: Path, known: Mapping[str, Parameter], overrides: Sequence[str]
) -> dict[str, list]:
    """Return the values that each parameter takes, checked; one for those that are only set."""
    values: dict[str, list] = {}
    problems: list[str] = []
    source = paths.short(file)

    def take(source: str, name: str, items: list) -> None:
        values[name] = []
        for item in items:
            try:
                value = parameters.check(known, {name: item}, source)[name]
            except ParameterError as error:
                problems.append(str(error))
                continue
            if value in values[name]:
                problems.append(f"{source}: '{name}' takes {brief(value)} twice.")
            values[name].append(value)

    # The file: a list varies, except for a parameter that takes a list.
    content: dict[str, Any] = {}
    try:
        content = parameters.load_yaml(file, depth=2)
    except ParameterError as error:
        problems.append(str(error))
    for name, given in content.items():
        varies = is_several(known, name, given)
        take(source, name, given if varies else [given])
        if varies and not given:
            problems.append(f"{source}: '{name}' is [], but it must take one value or more.")

    # On top of it, what is held still.
    for text in overrides:
        try:
            name, value = parameters.parse_assignment(text, known)
        except ParameterError as error:
            problems.append(str(error))
            continue
        take(f"-p {text}", name, [value])

    if problems:
        raise ParameterError("\n".join(dict.fromkeys(problems)))
    return values


def is_several(known: Mapping[str, Parameter], name: str, given: Any) -> bool:
    """Return whether this is a list of values of the parameter, and not one value."""
    if not isinstance(given, list):
        return False
    takes_list = name in known and known[name].type.startswith("list")
    return not takes_list or any(isinstance(item, list) for item in given)


def listing(sweep: Sweep) -> str:
    """Return the combinations, and where those that are done lie."""
    lines = [[*sweep.varied, "done in"]]
    for job in sweep.jobs:
        folder = runner.done(job)
        lines.append([*map(brief, sweep.at(job).values()), folder.name if folder else ""])
    return runs.columns(lines)


def brief(value: Any) -> str:
    """Return a value as tables and lines of progress show it."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else parameters.spell(value)


# ------------------------------------------------------------------ what came out


def rows(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Row]:
    """Return what became of each combination, with the results of the finished ones."""
    pairs = zip(sweep.jobs, outcomes, strict=True)
    return [_row(sweep.at(job), outcome) for job, outcome in pairs]


def _row(combination: dict[str, Any], outcome: Outcome) -> Row:
    _, status, seconds, folder, sentence = outcome
    row: Row = {
        "parameters": combination,
        "status": status,
        "seconds": seconds,
        "run": "",
        "results": {},
    }

    if folder is None:  # stopped before its turn came
        row["status"] = "failed" if status == "failed" else "not run"
    else:
        row["run"] = folder.name
        is_finished = status in ("done", "skipped")
        try:
            if is_finished:
                row |= _facts(folder, seconds)
            else:
                row["environment"] = _environment(folder)
        except files.Unreadable as error:  # one bad file is one bad row
            row["status"] = "unreadable" if is_finished else status
            sentence = "; ".join(filter(None, [sentence, str(error)]))

    if sentence:
        row["sentence"] = sentence
    return row


def _facts(folder: Path, seconds: float) -> Row:
    """Return what a finished run recorded; Unreadable when a file is not what the run wrote."""
    problem = runs.problem(folder)
    if problem:
        raise files.Unreadable(problem)
    return {
        "status": "done",
        "seconds": files.read_json(folder / "run.json").get("seconds", seconds),
        "environment": _environment(folder),
        "results": files.read_json(folder / "result.json"),
    }


def _environment(folder: Path) -> dict[str, Any]:
    return files.read_json(folder / "environment.json")


def text(sweep: Sweep, rows: Sequence[Row], *, show: Sequence[str] = ()) -> str:
    """Return the rows in columns, with the results named in `show` or the first few numbers.

    Below it stands what is left out."""
    known = _scalars(rows)
    numbers = [name for name in known if any(_is_number(row["results"].get(name)) for row in rows)]
    names = list(show) or numbers[:FEW]
    lines = [list(map(brief, line)) for line in _grid(sweep, rows, names)]

    notes = [parameters.unknown("result", name, known) for name in names if name not in known]
    if len(known) > len(names) and not show:
        notes.append(f"--show a,b shows any of: {', '.join(known)}")
    notes += [f"{row['run']}: {row['sentence']}" for row in rows if row["status"] == "unreadable"]
    return "\n".join([runs.columns(lines), *notes])


def write(sweep: Sweep, rows: Sequence[Row]) -> tuple[Path, Path]:
    """Write all of it as sweep-<time>.json and .csv beside the run folders, and return both."""
    folder = files.make_folder(paths.outputs() / sweep.notebook)
    stem = _free_name(folder)

    # The environment of the first run stands once, and beside the rows of which it was another one.
    environment = next((row["environment"] for row in rows if row.get("environment")), {})
    plain = []
    for row in rows:
        same = row.get("environment") in ({}, environment)
        plain.append({k: v for k, v in row.items() if k != "environment" or not same})

    shared = sweep.jobs[0].parameters
    facts = {
        "notebook": sweep.notebook,
        "command": sweep.command,
        "varied": sweep.varied,
        "fixed": {name: value for name, value in shared.items() if name not in sweep.varied},
        "environment": environment,
        "rows": plain,
    }
    files.write(folder / f"{stem}.json", files.to_json(facts, indent=1) + "\n")
    files.write(folder / f"{stem}.csv", _csv(_grid(sweep, rows, _scalars(rows))))
    return folder / f"{stem}.json", folder / f"{stem}.csv"


def _free_name(folder: Path) -> str:
    """Return a name with the time that no sweep of the folder has."""
    name = f"sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    stem = name
    for number in itertools.count(1):
        if not (folder / f"{stem}.json").exists():
            break
        stem = f"{name}-{number}"
    return stem


def _csv(lines: Sequence[list]) -> str:
    """Return the table as CSV, with all digits of each number."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    for line in lines:
        writer.writerow(value if type(value) in (int, float) else brief(value) for value in line)
    return content.getvalue()


def _grid(sweep: Sweep, rows: Sequence[Row], results: Sequence[str]) -> list[list]:
    """Return head and lines of the table.

    A result that has the name of another column is `result.<name>` in the head."""
    first = [*sweep.varied, "status", "seconds"]
    taken = (*first, "run")
    heads = [f"result.{name}" if name in taken else name for name in results]

    lines = [[*first, *heads, "run"]]
    for row in rows:
        given = [*row["parameters"].values(), row["status"], row["seconds"]]
        found = [row["results"].get(name, "") for name in results]
        lines.append([*given, *found, row["run"]])
    return lines


def _scalars(rows: Sequence[Row]) -> list[str]:
    """Return the results that are one number or word in some run, in the order of the runs."""
    pairs = [pair for row in rows for pair in row["results"].items()]
    return list(dict.fromkeys(name for name, v in pairs if isinstance(v, (int, float, str))))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")  # as in JSON
