"""What a sweep ends with: the varied parameters against what each run's result.json says, as text, JSON and CSV.

The text shows a few numbers; the files hold every result, the parameters that all runs share and the environment that
the runs recorded, so that they can be published as they are. A run whose environment was another one carries its own.

Footgun: only finished runs have numbers in the table. The result.json of a failed one may hold some as well, from a
first half or an earlier attempt, and nothing there tells them from those of a whole run.
"""

import csv
import io
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nblib import paths
from nblib.run.parameters import unknown
from nblib.run.records import make_folder, read_json, to_json, write_atomic
from nblib.run.runner import Outcome, columns
from nblib.run.sweep import Sweep, brief

FEW = 8  # results in the text when none are named


def rows(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What became of each combination, with the results of the finished ones."""
    found = []
    for job, (_, status, seconds, folder, sentence) in zip(sweep.jobs, outcomes, strict=True):
        row = {"parameters": sweep.at(job), "status": status, "seconds": seconds, "run": "", "results": {}}
        if folder is None:
            row["status"] = "failed" if status == "failed" else "not run"  # stopped before its turn came
        else:
            row |= {"run": folder.name, "environment": read_json(folder / "environment.json")}
        if status in ("done", "skipped"):
            seconds = read_json(folder / "run.json").get("seconds", seconds)
            row |= {"status": "done", "seconds": seconds, "results": read_json(folder / "result.json")}
        found.append(row | ({"sentence": sentence} if sentence else {}))
    return found


def text(sweep: Sweep, found: Sequence[dict[str, Any]], *, show: Sequence[str] = ()) -> str:
    """The rows in columns, with the results named in `show` or the first few numbers; then what is left out."""
    known = _scalars(found)
    numbers = [name for name in known if any(_is_number(row["results"].get(name)) for row in found)]
    names = list(show) or numbers[:FEW]
    notes = [unknown("result", name, known) for name in names if name not in known]
    if len(known) > len(names) and not show:
        notes.append(f"--show a,b shows any of: {', '.join(known)}")
    return "\n".join([columns([list(map(brief, line)) for line in _grid(sweep, found, names)]), *notes])


def write(sweep: Sweep, found: Sequence[dict[str, Any]]) -> tuple[Path, Path]:
    """All of it, as sweep-<time>.json and .csv beside the run folders."""
    folder, now = make_folder(paths.outputs() / sweep.notebook), time.strftime("%Y%m%d-%H%M%S")
    stems = (f"sweep-{now}{f'-{n}' if n else ''}" for n in itertools.count())
    stem = next(stem for stem in stems if not (folder / f"{stem}.json").exists())
    environment = next((row["environment"] for row in found if row.get("environment")), {})
    kept = [{k: v for k, v in row.items() if k != "environment" or v not in ({}, environment)} for row in found]
    fixed = {name: value for name, value in sweep.jobs[0].parameters.items() if name not in sweep.varied}
    facts = {"notebook": sweep.notebook, "command": sweep.command, "varied": sweep.varied, "fixed": fixed}
    lines = io.StringIO()
    for line in _grid(sweep, found, _scalars(found)):
        plain = (value if type(value) in (int, float) else brief(value) for value in line)  # all digits of a number
        csv.writer(lines, lineterminator="\n").writerow(plain)
    write_atomic(folder / f"{stem}.json", to_json(facts | {"environment": environment, "rows": kept}, indent=1) + "\n")
    write_atomic(folder / f"{stem}.csv", lines.getvalue())
    return folder / f"{stem}.json", folder / f"{stem}.csv"


def _grid(sweep: Sweep, found: Sequence[dict[str, Any]], results: Sequence[str]) -> list[list]:
    """Head and lines of the table; a result that is called like another column says that it is a result."""
    first = [*sweep.varied, "status", "seconds"]
    lines = [[*first, *(f"result.{name}" if name in (*first, "run") else name for name in results), "run"]]
    for row in found:
        given = [*row["parameters"].values(), row["status"], row["seconds"]]
        lines.append([*given, *(row["results"].get(name, "") for name in results), row["run"]])
    return lines


def _scalars(found: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the results that are one number or word in some run, in the order in which runs gave them."""
    pairs = [pair for row in found for pair in row["results"].items()]
    return list(dict.fromkeys(name for name, value in pairs if isinstance(value, (int, float, str))))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")  # as JSON has to have them
