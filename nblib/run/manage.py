"""Runs by name: which one is meant, a list of them, a note on one, and the end of one.

A run is named by its folder, by a part of the folder's name that no other run has (its short id), by a path, or by its
notebook: `10` and `10_lrc` are the newest run of 10_lrc, `10~1` the one before it.

Whoever executes a run holds the lock on its folder and writes run.json at any time. So a run that is locked takes no
note and is not deleted. A run to delete is first moved, in one step, to a name that counts for nothing. What a kill
leaves of it there is swept by the next `nblib run`.

Footgun: `10~1` is another run after the next run of that notebook. Scripts should use the folder's name.
"""

import contextlib
import difflib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nblib import files, paths
from nblib.run import runner, runs
from nblib.run.parameters import ParameterError, clip, unknown

NO_RUNS = ("base", "published")  # folders of outputs that hold something else
LONGEST = 2000  # characters of a note
TAG = "[A-Za-z0-9._-]{1,40}"


def folders() -> list[Path]:
    """Every run, the newest first; what a link leads to is none."""
    places = sorted((path.parent for path in paths.outputs().glob("*/*/run.json")), key=lambda p: p.name, reverse=True)
    return [p for p in places if p.parent.name not in NO_RUNS and not p.is_symlink() and not p.parent.is_symlink()]


def find(name: str) -> Path:
    """The folder of the run that is called so; ParameterError with the nearest names."""
    known = folders()
    stem, _, back = name.partition("~")
    homes = sorted({place.parent.name for place in known})
    of = [home for home in homes if home == stem] or [home for home in homes if stem and home.startswith(f"{stem}_")]
    if len(of) == 1 and re.fullmatch(r"[0-9]{0,6}", back):
        hits = [place for place in known if place.parent.name == of[0]][int(back or 0) :][:1]
    else:
        hits = [place for place in known if name in (place.name, f"{place.parent.name}/{place.name}")]
        with contextlib.suppress(OSError, ValueError):  # there is no such path, or it cannot be one
            path = os.lstat(name.rstrip("/") if "/" in name else "")
            hits = hits or [place for place in known if os.path.samestat(path, place.lstat())]
        hits = hits or [place for place in known if len(name) > 2 and name in place.name]
    if len(hits) == 1:
        return hits[0]
    if several := [place.name for place in hits] or (of if len(of) > 1 else []):
        raise ParameterError(f"'{name}' may be {len(several)} things: {', '.join(several[:5])}.")
    names = [*homes, *(part for place in known for part in (place.name, place.name.rpartition("-")[2]))]
    near = difflib.get_close_matches(name[-99:], names, n=3, cutoff=0.5) or [place.name for place in known[:3]]
    hint = f"the nearest are {', '.join(near)}" if near else "there are no runs yet"
    raise ParameterError(f"Unknown run '{clip(name)}'; {hint}. `nblib list --runs` shows all.")


def listing(notebook: str = "") -> str:
    """All runs, or those of one notebook, with tags and the results that count."""
    places = [place for place in folders() if notebook in ("", place.parent.name)]
    head = ["run", "status", "started", "time", "tags", "results"]
    return runs.columns([head, *([*row(place), clip(runner.headline(place))] for place in places)])


def row(folder: Path) -> list[str]:
    """The run's name, how it ended, when it started, how long it took, its tags."""
    facts: dict[str, Any] = {}
    with contextlib.suppress(files.Unreadable):
        facts = runs.record(folder)
    seconds, tags = runner.took(facts), ", ".join(_listed(facts, "tags", str))
    time = "" if seconds is None else f"{seconds:.1f} s"
    name = f"{folder.parent.name}/{folder.name}"
    return [clip(text) for text in (name, runs.status(folder), runs.moment(facts.get("started")), time, tags)]


def note(folder: Path, *, text: str | None = None, tags: Sequence[str] = (), untag: Sequence[str] = ()) -> str:
    """Add a note and tags to run.json; what is there then, as text."""
    if text is not None and not 1 <= len(text := text.strip()) <= LONGEST:
        raise ParameterError(f"text has {len(text):,} characters, allowed: 1 .. {LONGEST:,}.")
    if wrong := [tag for tag in tags if not re.fullmatch(TAG, tag)]:
        raise ParameterError(f"--tag '{clip(wrong[0])}': allowed are 1 to 40 of the characters A-Z a-z 0-9 . _ -")
    changes = text is not None or bool(tags or untag)
    with _alone(folder, "takes no note") if changes else contextlib.nullcontext():
        facts = runs.record(folder)
        notes, before = _listed(facts, "notes", dict), _listed(facts, "tags", str)
        if absent := [tag for tag in untag if tag not in before]:
            raise ParameterError(f"--untag: {unknown('tag', absent[0], before)}")
        after = [tag for tag in dict.fromkeys([*before, *tags]) if tag not in untag]
        notes += [{"time": time.time(), "text": text}] if text is not None else []
        if changes:
            runs.note(folder, {"notes": notes, "tags": after})
    lines = [f"{runs.moment(each.get('time'))}  {clip(str(each.get('text')), LONGEST)}" for each in notes]
    return "\n".join([f"{paths.short(folder)}: {runs.status(folder)}", f"tags: {', '.join(after) or 'none'}", *lines])


def size(folder: Path) -> str:
    """What goes when the run is deleted."""
    with _alone(folder, "is not deleted"):
        size = sum(path.lstat().st_size for path in folder.rglob("*")) / 2**20
    return f"{paths.short(folder)}: {runs.status(folder)}, {size:,.1f} MiB"


def remove(folder: Path) -> None:
    """Delete a run that nobody executes; after a kill there is the whole run, or nothing that counts as one."""
    home, outputs = folder.parent, paths.outputs()
    gone = outputs / f".{folder.name}.{os.getpid()}.partial"  # called so, it is swept by files.remove_partials
    with _alone(home, "loses no run"), _alone(folder, "is not deleted"):  # the first is whoever looks for a run
        os.rename(folder, gone)
        files.flush(home), files.flush(outputs)
        shutil.rmtree(gone)


@contextlib.contextmanager
def _alone(folder: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock on the folder. Who only asks for a status holds it for an instant, so we try for a second."""
    deadline = time.monotonic() + 1
    while (lock := files.claim(folder)) is None:
        if time.monotonic() > deadline:
            raise ParameterError(f"{paths.short(folder)} {otherwise} while it runs or its kernel is open.")
        time.sleep(0.05)
    try:
        yield
    finally:
        os.close(lock)


def _listed(facts: dict[str, Any], name: str, kind: type) -> list:
    """A list of the record, which anybody may have edited."""
    value = facts.get(name)
    return [each for each in value if isinstance(each, kind)] if isinstance(value, list) else []
