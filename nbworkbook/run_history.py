"""The runs that were made of a job, and which of them counts: is it done, stopped, out of date?

Among the runs with a job's key the newest counts. A run whose result changed since, or whose base
model is not the stored one any more, does not count; nor does one that a person made by hand,
whose code was that of a page that may have been edited.

Footgun: the seconds of a run are those of its last attempt. A run that was continued took longer
than it says.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nblib import files, paths
from nbworkbook import jobs as planning
from nbworkbook import parameters, runs
from nbworkbook.jobs import Job


def records(notebook: str) -> Iterator[tuple[Path, dict[str, Any], str | None]]:
    """Yield the runner's runs of the notebook, newest first: folder, record, what is wrong."""
    for path in sorted((paths.outputs() / notebook).glob("*/run.json"), reverse=True):
        try:
            facts, wrong = runs.record(path.parent), None
        except files.Unreadable as error:
            facts, wrong = {}, str(error)
        if facts.get("by") != "hand":
            yield path.parent, facts, wrong


def newest(job: Job, tell: Callable[[str], None] = lambda _: None) -> Path | None:
    """Return the newest run of the job that counts; `tell` why others do not."""
    for folder, facts, wrong in records(job.notebook):
        if wrong is None and not planning.same(job, facts):
            continue
        wrong = wrong or _other_base(folder)
        if facts.get("status") == "done" and not runs.is_done(folder):
            wrong = wrong or runs.problem(folder) or "its notebook is not whole"
        if wrong is None:
            return folder
        tell(f"[{job.notebook}] {paths.short(folder)} does not count: {wrong}")
    return None


def done(job: Job) -> Path | None:
    """Return the job's newest run, if it is finished."""
    folder = newest(job)
    return folder if folder and runs.is_done(folder) else None


def _other_base(folder: Path) -> str | None:
    """Return why the base model of a run (base.json) is not the stored one, if one is stored."""
    try:
        loaded = files.read_json(folder / "base.json")
    except files.Unreadable as error:
        return str(error)
    with contextlib.suppress(
        files.Unreadable
    ):  # damaged in the store: it is made again when a run loads it
        stored = files.read_json(paths.store() / Path(str(loaded.get("base"))).name / "base.json")
        if "content" in loaded and stored.get("content", loaded["content"]) != loaded["content"]:
            return f"the base model {loaded['base']} is another one"
    return None


def why_again(job: Job) -> str:
    """Return what changed since the newest finished run with the job's parameters."""
    for _, facts, _ in records(job.notebook):
        if facts.get("status") == "done" and _has_same_parameters(job, facts):
            return planning.why(facts["inputs"], job.inputs)
    return ""


def _has_same_parameters(job: Job, facts: dict[str, Any]) -> bool:
    before = facts.get("inputs")
    if not isinstance(before, dict):
        return False
    asked = {part: value for part, value in job.inputs.items() if part.startswith("parameter ")}
    return all(before.get(part, value) == value for part, value in asked.items())


def took(facts: dict[str, Any]) -> float | None:
    """Return the seconds of a record, which may hold anything."""
    seconds = facts.get("seconds")
    return seconds if isinstance(seconds, (int, float)) and 0 <= seconds < 1e9 else None


def measured_seconds(jobs: Sequence[Job], force: bool) -> list[float | None]:
    """Return the seconds that each job will take: 0 where it is done, None where nothing says so.

    Else they are those of the notebook's newest finished run, with the same parameters if there is
    such a one."""

    @functools.cache
    def finished(notebook: str) -> list[dict[str, Any]]:
        ended = [facts for _, facts, _ in records(notebook) if facts.get("status") == "done"]
        return [facts for facts in ended if took(facts) is not None]

    seconds = []
    for job in jobs:
        if not force and done(job):
            seconds.append(0.0)
            continue
        likely = sorted(
            finished(job.notebook), key=lambda facts: not _has_same_parameters(job, facts)
        )
        seconds.append(likely[0]["seconds"] if likely else None)
    return seconds


def published_seconds(job: Job) -> float | None:
    """Return the seconds that the notebook took where its outputs come from, if it says so."""
    with contextlib.suppress(
        files.Unreadable, LookupError, TypeError, AttributeError
    ):  # it may hold anything
        return took(files.read_json(job.path)["metadata"]["nblib"])
    return None


def headline(folder: Path) -> str:
    """Return, on one line, the first four results that are a number or a word, or what is wrong.

    They are chosen from those that the run itself names as its headline, else from all."""
    try:
        result = files.read_json(folder / "result.json")
    except files.Unreadable as error:
        return str(error)
    names: Sequence[str] = ()
    with contextlib.suppress(files.Unreadable, TypeError):  # a record may hold anything
        names = [name for name in runs.record(folder).get("headline", ()) if name in result]

    plain = []
    for name in names or result:
        value = result[name]
        if isinstance(value, (int, float, str)) and len(str(value)) < 40:
            plain.append(f"{name} {value:.4g}" if type(value) is float else f"{name} {value}")
    return parameters.clip(", ".join(plain[:4]), 400)
