"""One notebook over a grid of parameters: a run folder for each combination, and a table of what came out.

A sweep file is flat YAML like a profile. `name: value` sets a parameter, `name: [a, b]` varies it, and the grid is
the product of all that vary, the last one in the file changing fastest. A parameter that takes a list is varied by a
list of lists. The file goes on top of a profile, and `-p name=value` on top of both: it holds a parameter still.

Each combination becomes the job that `nblib run` would make of it. So a sweep skips, resumes and stops as runs do. It
counts a finished run of the same values whoever asked for it, and gives its table again without running anything.

The table sets the varied parameters against what each run's result.json says. As text it shows a few numbers. Its JSON
and CSV files hold every result, the parameters that all runs share and the environment that the runs recorded, so they
can be published as they are. A run whose environment was another one carries its own.

Footgun: a run's key holds its code and the versions of the packages. A change of either, between two halves of a sweep,
runs the first half again.

A run whose files were damaged since is a row that says "unreadable" and why; the others keep their numbers.

Footgun: only finished runs have numbers in the table. The result.json of a failed run may hold results as well, from a
first half or an earlier attempt. Nothing there tells them from those of a whole run.
"""

import csv
import io
import itertools
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import files, paths
from nblib.run import jobs, parameters, runner, runs
from nblib.run.jobs import Job
from nblib.run.parameters import Parameter, ParameterError
from nblib.run.runner import Outcome

FORMS = "`name: [a, b]`, or `name: [[a], [b]]` for a parameter that takes a list"
LIMIT = 1000  # combinations; more of them are a slip in the file
FEW = 8  # results in the text when none are named


class Sweep(NamedTuple):
    notebook: str
    command: str
    varied: dict[str, list]
    jobs: list[Job]

    def at(self, job: Job) -> dict[str, Any]:
        """The combination that the job is of."""
        return {name: job.parameters[name] for name in self.varied}


def plan(notebook: str, *, file: str | None = None, profile: str | None = None, overrides: Sequence[str] = ()) -> Sweep:
    """Every job of the grid, in order, before any is started. ParameterError lists every problem."""
    name = jobs.resolve(notebook)
    path = Path(file) if file else paths.profiles() / f"{name}.sweep.yaml"
    if not file and not path.exists():
        raise ParameterError(f"{name} has no sweep file {paths.short(path)}; write one, or name another with -f.")
    known = parameters.declared(paths.notebooks() / f"{name}.ipynb")
    values = _values(path, known, overrides)
    varied, size = {n: v for n, v in values.items() if len(v) > 1}, math.prod(map(len, values.values()))
    if not varied:
        raise ParameterError(f"{paths.short(path)}: nothing varies; write {FORMS}.")
    if secret := [n for n in varied if known[n].allowed == "secret"]:
        raise ParameterError(f"{paths.short(path)}: '{secret[0]}' is secret and cannot vary: no result hangs on it.")
    if size > LIMIT:
        raise ParameterError(f"{paths.short(path)}: {size} combinations, allowed: {LIMIT}.")
    grid = [dict(zip(values, combination)) for combination in itertools.product(*values.values())]
    texts = [[parameters.assignment(n, value) for n, value in combination.items()] for combination in grid]
    planned = jobs.variants(name, texts, profile=profile)
    command = ["nblib", "sweep", name, "-f", paths.short(path), *(["--profile", profile] if profile else [])]
    command += [part for text in overrides for part in ("-p", text)]
    labels = [", ".join(f"{n} {brief(combination[n])}" for n in varied) for combination in grid]
    labelled = [job._replace(label=f"{n} of {size}: {t}") for n, (job, t) in enumerate(zip(planned, labels), start=1)]
    return Sweep(name, shlex.join(command), varied, labelled)


def _values(file: Path, known: Mapping[str, Parameter], overrides: Sequence[str]) -> dict[str, list]:
    """The values that each parameter takes, checked; one value for those that are only set."""
    values, problems, source, content = {}, [], paths.short(file), {}

    def take(source: str, name: str, items: list) -> None:
        values[name] = []
        for item in items:
            try:
                value = parameters.check(known, {name: item}, source)[name]
                if value in values[name]:
                    problems.append(f"{source}: '{name}' takes {brief(value)} twice.")
                values[name].append(value)
            except ParameterError as error:
                problems.append(str(error))

    try:
        content = parameters.load_yaml(file, depth=2)
    except ParameterError as error:
        problems.append(str(error))
    for name, given in content.items():
        is_list = name in known and known[name].type.startswith("list")
        varies = isinstance(given, list) and (not is_list or any(isinstance(item, list) for item in given))
        take(source, name, given if varies else [given])
        if varies and not given:
            problems.append(f"{source}: '{name}' is [], but it must take one value or more.")
    for text in overrides:
        try:
            name, value = parameters.parse_assignment(text, known)
            take(f"-p {text}", name, [value])
        except ParameterError as error:
            problems.append(str(error))
    if problems:
        raise ParameterError("\n".join(dict.fromkeys(problems)))
    return values


def listing(sweep: Sweep) -> str:
    """The combinations, and where those that are done lie."""
    folders = [runner.done(job) for job in sweep.jobs]
    rows = [[*map(brief, sweep.at(job).values()), f.name if f else ""] for job, f in zip(sweep.jobs, folders)]
    return runs.columns([[*sweep.varied, "done in"], *rows])


def brief(value: Any) -> str:
    """A value as tables and lines of progress show it."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else parameters.spell(value)


def rows(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What became of each combination, with the results of the finished ones."""
    table = []
    for job, (_, status, seconds, folder, sentence) in zip(sweep.jobs, outcomes, strict=True):
        row = {"parameters": sweep.at(job), "status": status, "seconds": seconds, "run": "", "results": {}}
        if folder is None:
            row["status"] = "failed" if status == "failed" else "not run"  # stopped before its turn came
        else:
            finished, row["run"] = status in ("done", "skipped"), folder.name
            try:
                row |= _facts(folder, seconds) if finished else {"environment": _environment(folder)}
            except files.Unreadable as error:  # one bad file is one bad row
                row["status"] = "unreadable" if finished else status
                sentence = "; ".join(filter(None, [sentence, str(error)]))
        table.append(row | ({"sentence": sentence} if sentence else {}))
    return table


def _facts(folder: Path, seconds: float) -> dict[str, Any]:
    """What a finished run says of itself; Unreadable when a file is not what the run wrote."""
    if problem := runs.problem(folder):
        raise files.Unreadable(problem)
    seconds = files.read_json(folder / "run.json").get("seconds", seconds)
    facts = {"status": "done", "seconds": seconds, "environment": _environment(folder)}
    return facts | {"results": files.read_json(folder / "result.json")}


def _environment(folder: Path) -> dict[str, Any]:
    return files.read_json(folder / "environment.json")


def text(sweep: Sweep, rows: Sequence[dict[str, Any]], *, show: Sequence[str] = ()) -> str:
    """The rows in columns, with the results named in `show` or the first few numbers; then what is left out."""
    known = _scalars(rows)
    numbers = [name for name in known if any(_is_number(row["results"].get(name)) for row in rows)]
    names = list(show) or numbers[:FEW]
    notes = [parameters.unknown("result", name, known) for name in names if name not in known]
    if len(known) > len(names) and not show:
        notes.append(f"--show a,b shows any of: {', '.join(known)}")
    notes += [f"{row['run']}: {row['sentence']}" for row in rows if row["status"] == "unreadable"]
    return "\n".join([runs.columns([list(map(brief, line)) for line in _grid(sweep, rows, names)]), *notes])


def write(sweep: Sweep, rows: Sequence[dict[str, Any]]) -> tuple[Path, Path]:
    """All of it, as sweep-<time>.json and .csv beside the run folders."""
    folder, now = files.make_folder(paths.outputs() / sweep.notebook), time.strftime("%Y%m%d-%H%M%S")
    stems = (f"sweep-{now}{f'-{n}' if n else ''}" for n in itertools.count())
    stem = next(stem for stem in stems if not (folder / f"{stem}.json").exists())
    environment = next((row["environment"] for row in rows if row.get("environment")), {})
    plain = [{k: v for k, v in row.items() if k != "environment" or v not in ({}, environment)} for row in rows]
    fixed = {name: value for name, value in sweep.jobs[0].parameters.items() if name not in sweep.varied}
    facts = {"notebook": sweep.notebook, "command": sweep.command, "varied": sweep.varied, "fixed": fixed}
    lines = io.StringIO()
    for line in _grid(sweep, rows, _scalars(rows)):
        texts = (value if type(value) in (int, float) else brief(value) for value in line)  # all digits of a number
        csv.writer(lines, lineterminator="\n").writerow(texts)
    facts |= {"environment": environment, "rows": plain}
    files.write(folder / f"{stem}.json", files.to_json(facts, indent=1) + "\n")
    files.write(folder / f"{stem}.csv", lines.getvalue())
    return folder / f"{stem}.json", folder / f"{stem}.csv"


def _grid(sweep: Sweep, rows: Sequence[dict[str, Any]], results: Sequence[str]) -> list[list]:
    """Head and lines of the table; a result that is called like another column says that it is a result."""
    first = [*sweep.varied, "status", "seconds"]
    lines = [[*first, *(f"result.{name}" if name in (*first, "run") else name for name in results), "run"]]
    for row in rows:
        given = [*row["parameters"].values(), row["status"], row["seconds"]]
        lines.append([*given, *(row["results"].get(name, "") for name in results), row["run"]])
    return lines


def _scalars(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the results that are one number or word in some run, in the order in which runs gave them."""
    pairs = [pair for row in rows for pair in row["results"].items()]
    return list(dict.fromkeys(name for name, value in pairs if isinstance(value, (int, float, str))))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")  # as JSON has to have them
