"""One notebook over a grid of parameters: a run folder for each combination, and a table of what came out.

A sweep file is flat YAML like a profile. `name: value` sets a parameter, `name: [a, b]` varies it, and the grid is
the product of all that vary, the last one in the file changing fastest. A parameter that takes a list is varied by a
list of lists. The file goes on top of a profile, and `-p name=value` on top of both: it holds a parameter still.

Each combination becomes the job that `nblib run` would make of it. So a sweep skips, resumes and stops as runs do,
counts a finished run of the same values whoever asked for it, and gives its table (sweep_table.py) again for nothing.

Footgun: a run's key is the code too. A change in a module that the notebook imports, between two halves of a sweep,
runs the first half once more.
"""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nblib import paths
from nblib.run import jobs, parameters, runner
from nblib.run.flat_yaml import spell
from nblib.run.jobs import Job
from nblib.run.parameters import Parameter, ParameterError

FORMS = "`name: [a, b]`, or `name: [[a], [b]]` for a parameter that takes a list"
LIMIT = 1000  # combinations; more of them are a slip in the file


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
    values = _values(path, parameters.declared(paths.notebooks() / f"{name}.ipynb"), overrides)
    varied, size = {n: v for n, v in values.items() if len(v) > 1}, math.prod(map(len, values.values()))
    if not varied:
        raise ParameterError(f"{paths.short(path)}: nothing varies; write {FORMS}.")
    if size > LIMIT:
        raise ParameterError(f"{paths.short(path)}: {size} combinations, allowed: {LIMIT}.")
    grid = [dict(zip(values, each)) for each in itertools.product(*values.values())]
    texts = [[parameters.assignment(n, value) for n, value in each.items()] for each in grid]
    planned = jobs.variants(name, texts, profile=profile)
    command = ["nblib", "sweep", name, "-f", paths.short(path), *(["--profile", profile] if profile else [])]
    command += [part for text in overrides for part in ("-p", text)]
    sweep = Sweep(name, shlex.join(command), varied, planned)
    labels = [", ".join(f"{n} {brief(v)}" for n, v in sweep.at(job).items()) for job in planned]
    numbered = [job._replace(label=f"{n} of {size}: {t}") for n, (job, t) in enumerate(zip(planned, labels), start=1)]
    return sweep._replace(jobs=numbered)


def read(file: Path, known: Mapping[str, Parameter]) -> dict[str, list]:
    """The values that each parameter in a sweep file takes, checked; one value for those that it only sets."""
    values, problems, source = {}, [], paths.short(file)
    for name, given in parameters.load_yaml(file, depth=2).items():
        is_list = name in known and known[name].type.startswith("list")
        varies = isinstance(given, list) and (not is_list or any(isinstance(item, list) for item in given))
        values[name] = []
        for item in given if varies else [given]:
            try:
                fit = parameters.check(known, {name: item}, source)[name]
                if fit in values[name]:
                    problems.append(f"{source}: '{name}' takes {brief(fit)} twice.")
                values[name].append(fit)
            except ParameterError as error:
                problems.append(str(error))
        if varies and not given:
            problems.append(f"{source}: '{name}' is [], but it must take one value or more.")
    if problems:
        raise ParameterError("\n".join(dict.fromkeys(problems)))
    return values


def _values(file: Path, known: Mapping[str, Parameter], overrides: Sequence[str]) -> dict[str, list]:
    """What the file and the assignments on top of it say, with all that is wrong in either."""
    values, problems = {}, []
    try:
        values = read(file, known)
    except ParameterError as error:
        problems.append(str(error))
    for text in overrides:
        try:
            given = dict([parameters.parse_assignment(text, known)])
            values |= {name: [value] for name, value in parameters.check(known, given, f"-p {text}").items()}
        except ParameterError as error:
            problems.append(str(error))
    if problems:
        raise ParameterError("\n".join(problems))
    return values


def listing(sweep: Sweep) -> str:
    """The combinations, and where those that are done lie."""
    folders = [runner.done(job) for job in sweep.jobs]
    rows = [[*map(brief, sweep.at(job).values()), f.name if f else ""] for job, f in zip(sweep.jobs, folders)]
    return runner.columns([[*sweep.varied, "done in"], *rows])


def brief(value: Any) -> str:
    """A value as tables and lines of progress show it."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else spell(value)
