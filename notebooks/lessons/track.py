"""A run's metrics in TensorBoard or Trackio, once or as the run goes on. Both are extras: `pip install -e '.[track]'`.

Each training of a run is a series of its own there. What is exported is what `Run.history` reads, so a step that came
again after a resume replaces the earlier one. TensorBoard gets files in the run's folder `tensorboard/`, Trackio a
project with the notebook's name in its own store. An export replaces an earlier one of the same run.

Footgun: Trackio sends to a server where its own environment variables (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL) name one.
"""

import contextlib
import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nblib.run import runs

Rows = dict[int, dict[str, Any]]  # records by step, in order
Write = Callable[[str, Rows, int, bool], None]  # of a training, from a step on; True where that replaces steps


def export(folder: Path, to: str, *, follow: bool = False, every: float = 1.0) -> dict[str, int]:
    """Write all series, with `follow` until the run ends; how many steps each has."""
    write: Write = {"tensorboard": _tensorboard, "trackio": _trackio}[to](folder)
    known: dict[str, Rows] = {}
    while True:
        running = follow and runs.status(folder).startswith("running")
        for name, rows in series(folder).items():
            before = known.get(name, {})
            if new := [step for step, record in rows.items() if record != before.get(step)]:
                write(name, rows, min(new), bool(before) and min(new) <= max(before))
            known[name] = rows
        if not running:
            return {name: len(rows) for name, rows in known.items()}
        time.sleep(every)


def series(folder: Path) -> dict[str, Rows]:
    """The records with a step of each training, by its name; empty for one without a name."""
    trainings: dict[str, Rows] = {}
    for record in runs.Run(folder, {}).history():
        if type(record.get("step")) is int:
            trainings.setdefault(str(record.get("run", "")), {})[record["step"]] = record
    return {name: dict(sorted(rows.items())) for name, rows in trainings.items()}


def _tensorboard(folder: Path) -> Write:
    from torch.utils.tensorboard import SummaryWriter

    place, writers = folder / "tensorboard", {}
    shutil.rmtree(place, ignore_errors=True)

    def write(name: str, rows: Rows, since: int, again: bool) -> None:
        if again or name not in writers:  # told a purge_step, TensorBoard forgets the steps from there on
            below = place / f"series {quote(name, safe=' ')}"
            writers[name] = SummaryWriter(str(below), purge_step=since if again else None)
        for step, record in rows.items():
            for metric, value in runs.scalars(record).items() if step >= since else ():
                writers[name].add_scalar(metric, value, step)
        writers[name].flush()

    return write


def _trackio(folder: Path) -> Write:
    import trackio

    project, begun = folder.parent.name, set()
    quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}

    def write(name: str, rows: Rows, since: int, again: bool) -> None:
        called = f"{folder.name} {name}".rstrip()
        with contextlib.redirect_stdout(io.StringIO()):  # it says where its dashboard is, each time
            if again or name not in begun:
                begun.add(name)
                since = min(rows)
                with contextlib.suppress(ValueError):  # there is no such project yet
                    [each.delete() for each in trackio.Api().runs(project) if each.name == called]
            trackio.init(project=project, name=called, resume="allow", **quiet)
            [trackio.log(runs.scalars(record), step=step) for step, record in rows.items() if step >= since]
            trackio.finish()

    return write
