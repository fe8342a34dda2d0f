"""Runs by name: which one is meant, and a list of them.

A run is named by its folder, by a part of the folder's name that no other run has (its short id),
by a path, or by its notebook: `10` and `10_lrc` are the newest run of 10_lrc, `10~1` the one
before it. A run is nothing but its folder, so `rm -r` deletes it.

Footgun: `10~1` is another run after the next run of that notebook. Scripts should use the
folder's name.
"""

import contextlib
import difflib
import os
import re
from pathlib import Path
from typing import Any

from nblib import files, paths
from nbworkbook import runner, runs
from nbworkbook.parameters import ParameterError, clip

NO_RUNS = ("base", "published")  # folders of outputs that hold something else


def folders() -> list[Path]:
    """Return the folder of every run, the newest first; what a link leads to is none."""
    records = paths.outputs().glob("*/*/run.json")
    places = sorted((path.parent for path in records), key=lambda place: place.name, reverse=True)
    return [
        place
        for place in places
        if place.parent.name not in NO_RUNS
        and not place.is_symlink()
        and not place.parent.is_symlink()
    ]


def find(name: str) -> Path:
    """Return the folder of the run that is called so; ParameterError with the nearest names."""
    known = folders()
    stem, _, back = name.partition("~")
    homes = sorted({place.parent.name for place in known})

    # A notebook's whole name, or else the beginning of one.
    notebooks = [home for home in homes if home == stem]
    if not notebooks and stem:
        notebooks = [home for home in homes if home.startswith(f"{stem}_")]

    if len(notebooks) == 1 and re.fullmatch(r"[0-9]{0,6}", back):
        of_notebook = [place for place in known if place.parent.name == notebooks[0]]
        hits = of_notebook[int(back or 0) :][:1]
    else:
        hits = _called(name, known)
    if len(hits) == 1:
        return hits[0]

    # None or several: what else may have been meant.
    several = [place.name for place in hits]
    if not several and len(notebooks) > 1:
        several = notebooks
    if several:
        raise ParameterError(f"'{name}' may be {len(several)} things: {', '.join(several[:5])}.")
    hint = _nearest(name, known, homes)
    raise ParameterError(f"Unknown run '{clip(name)}'; {hint}. `nblib list --runs` shows all.")


def _called(name: str, known: list[Path]) -> list[Path]:
    """Return the runs whose folder has this name or path; else those that have it in their name."""
    hits = [place for place in known if name in (place.name, f"{place.parent.name}/{place.name}")]
    if hits:
        return hits

    with contextlib.suppress(OSError, ValueError):  # there is no such path, or it cannot be one
        path = os.lstat(name.rstrip("/") if "/" in name else "")
        hits = [place for place in known if os.path.samestat(path, place.lstat())]

    if not hits and len(name) > 2:
        hits = [place for place in known if name in place.name]
    return hits


def _nearest(name: str, known: list[Path], homes: list[str]) -> str:
    """Return the end of the sentence about a name that no run has."""
    names = list(homes)
    for place in known:
        names += [place.name, place.name.rpartition("-")[2]]

    near = difflib.get_close_matches(name[-99:], names, n=3, cutoff=0.5)
    if not near:
        near = [place.name for place in known[:3]]
    return f"the nearest are {', '.join(near)}" if near else "there are no runs yet"


def listing(notebook: str = "") -> str:
    """Return all runs, or those of one notebook, with the results that count, in columns."""
    rows = [["run", "status", "started", "time", "results"]]
    for place in folders():
        if notebook in ("", place.parent.name):
            rows.append([*row(place), clip(runner.headline(place))])
    return runs.columns(rows)


def row(folder: Path) -> list[str]:
    """Return the run's name, how it ended, when it started and how long it took."""
    facts: dict[str, Any] = {}
    with contextlib.suppress(files.Unreadable):
        facts = runs.record(folder)

    name = f"{folder.parent.name}/{folder.name}"
    seconds = runner.took(facts)
    time = "" if seconds is None else f"{seconds:.1f} s"
    texts = (name, runs.status(folder), runs.moment(facts.get("started")), time)
    return [clip(text) for text in texts]
