"""A run's metrics in TensorBoard or Trackio, once or as the run goes on.

Both are extras: `pip install 'nblib[track]'`. Each training of a run is a series of its own there.
What is exported is what `Run.history` reads, so a step that came again after a resume replaces the
earlier one. TensorBoard gets files in the run's folder `tensorboard/`, Trackio a project with the
notebook's name in its own store. An export replaces an earlier one of the same run.

Footgun: Trackio sends to a server where its own environment variables (TRACKIO_SPACE_ID,
TRACKIO_SERVER_URL) name one.
"""

import contextlib
import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nbworkbook import runs

Rows = dict[int, dict[str, Any]]  # records by step, in order
Write = Callable[
    [str, Rows, int, bool], None
]  # of a training, from a step on; True: replaces steps


def export(folder: Path, to: str, *, follow: bool = False, every: float = 1.0) -> dict[str, int]:
    """Write all series, with `follow` until the run ends, and return how many steps each has."""
    open_writer = {"tensorboard": _tensorboard, "trackio": _trackio}[to]
    write = open_writer(folder)
    known: dict[str, Rows] = {}

    while True:
        # Looked at first: what a run that ended wrote last is then read once more.
        is_running = follow and runs.status(folder).startswith("running")

        for name, rows in series(folder).items():
            before = known.get(name, {})
            new = [step for step, record in rows.items() if record != before.get(step)]
            if new:
                replaces = bool(before) and min(new) <= max(before)
                write(name, rows, min(new), replaces)
            known[name] = rows

        if not is_running:
            return {name: len(rows) for name, rows in known.items()}
        time.sleep(every)


def series(folder: Path) -> dict[str, Rows]:
    """Return the records with a step of each training, by its name; "" is one without a name."""
    trainings: dict[str, Rows] = {}
    for record in runs.Run(folder, {}).history():
        if type(record.get("step")) is int:
            name = str(record.get("run", ""))
            trainings.setdefault(name, {})[record["step"]] = record
    return {name: dict(sorted(rows.items())) for name, rows in trainings.items()}


def _tensorboard(folder: Path) -> Write:
    """Return what writes a series into the run's folder for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    place = folder / "tensorboard"
    shutil.rmtree(place, ignore_errors=True)
    writers: dict[str, SummaryWriter] = {}

    def write(name: str, rows: Rows, since: int, replaces: bool) -> None:
        # Given a purge_step, TensorBoard forgets the steps from there on.
        if replaces or name not in writers:
            below = place / f"series {quote(name, safe=' ')}"
            purge_step = since if replaces else None
            writers[name] = SummaryWriter(str(below), purge_step=purge_step)

        for step, record in rows.items():
            if step >= since:
                for metric, value in runs.scalars(record).items():
                    writers[name].add_scalar(metric, value, step)
        writers[name].flush()

    return write


def _trackio(folder: Path) -> Write:
    """Return what writes a series into Trackio's project of the notebook."""
    import trackio

    project = folder.parent.name
    begun: set[str] = set()
    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}

    def delete(called: str) -> None:
        with contextlib.suppress(ValueError):  # there is no such project yet
            for each in trackio.Api().runs(project):
                if each.name == called:
                    each.delete()

    def write(name: str, rows: Rows, since: int, replaces: bool) -> None:
        called = f"{folder.name} {name}".rstrip()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its dashboard's place each time
            # Steps cannot be replaced there, so the series is deleted and written again.
            if replaces or name not in begun:
                begun.add(name)
                since = min(rows)
                delete(called)

            trackio.init(project=project, name=called, resume="allow", **quiet)
            for step, record in rows.items():
                if step >= since:
                    trackio.log(runs.scalars(record), step=step)
            trackio.finish()

    return write
