"""A run is a folder, and what the folder says is all anybody needs to know about the run.

    outputs/<notebook>/<time>-<short id>/
        notebook.ipynb   parameters.yaml   environment.json   run.json      what ran, on what, how
                         it ended
        metrics.jsonl    result.json       figures/           checkpoints/  adapter/     what came
                         out
        events/                                                    the metrics again, where
                                                                   tensorboard is installed

A notebook's set-up cell calls `run = runs.begin("00_setup", globals())`, which checks the
parameters once more (they may come from plain papermill or from a hand edit) and gives back the
`Run` to log to. A reader sees the old file or the new one, never half of one; `metrics.jsonl` grows
line by line.

What run.json says of a run, its locks and whether it is done stand in run_record.py. Where a person
sits at the kernel, `begin` continues the run that was left unfinished (interactive_run.py). A run
whose training was stopped is not done, also when all its cells ran: `status` says "stopped, 44 of
600".

Footgun: a run that resumes appends to `metrics.jsonl`, so steps after its last checkpoint appear
twice; the later line counts. `Run.history` reads them so.
"""

import ast
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nblib import files, paths
from nbworkbook import interactive_run
from nbworkbook import parameters as declarations
from nbworkbook.run_record import (
    RUN_DIR,
    SEALED,
    hold,
    is_done,
    let_go,
    note,
    problem,
    record,
    seal,
    status,
    stop_sentence,
    stopped_trainings,
    unfinished_cell,
)

# A run's record is used under this module's name everywhere.
__all__ = ["RUN_DIR", "SEALED", "hold", "is_done", "let_go", "note", "problem", "record", "seal"]
__all__ += ["status", "stop_sentence", "stopped_trainings", "unfinished_cell"]
__all__ += ["PROGRESS", "Run", "begin", "clock", "columns", "drop_torn_line", "flat", "moment"]
__all__ += ["new_folder", "notice", "scalars", "spelled"]

# the lines that a long cell writes about its progress, for the runner to print
PROGRESS = "progress.txt"
_HERE: list["Run"] = []  # the run of this process


@dataclass
class Run:
    dir: Path
    parameters: dict[str, Any]
    writes: bool = True  # only rank 0 of a multi-process run does
    # TensorBoard's writer, once there is something to write
    events: Any = field(default=None, repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl, on disk when this returns from the process."""
        if self.writes:
            with (self.dir / "metrics.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(files.to_json(record) + "\n")
            self._to_tensorboard(record)

    def history(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return what was logged, or what was logged with this name as `run`, since the run began
        and over every resume: one record for each step, and each record without a step.
        """
        path, records = self.dir / "metrics.jsonl", {}
        # a line may be half written
        whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = json.loads(line)
                step = entry.get("step")
                records[number if step is None else (entry.get("run"), step)] = entry
            except (ValueError, RecursionError, AttributeError, TypeError):
                # no JSON, no object, a step that is a list
                raise files.Unreadable(f"cannot read {path}: line {number} is no record") from None
        return [entry for entry in records.values() if name is None or entry.get("run") == name]

    def _to_tensorboard(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a step as scalars to events/, where tensorboard is installed.

        The runs of one notebook keep apart by their name; a step that comes again after a resume
        replaces the earlier one in the plots.
        """
        if "step" not in record or (self.events is None and find_spec("tensorboard") is None):
            return
        if self.events is None:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(files.make_folder(self.dir / "events")))
        run = f"{record['run']}/" if "run" in record else ""
        for name, value in scalars(record).items():
            self.events.add_scalar(run + name, value, record["step"])
        self.events.flush()

    def result(self, **facts: Any) -> None:
        """Add to the summary by which runs are compared."""
        if self.writes:
            files.merge(self.dir / "result.json", facts)

    def figure(self, name: str, fig: Any) -> Any:
        """Keep a matplotlib Figure, or a `show.Picture`, as figures/<name>.png; returns it, for the
        cell to show.
        """
        if self.writes:
            with files.replacing(self.dir / "figures" / f"{name}.png") as partial:
                if hasattr(fig, "save"):
                    fig.save(partial)
                else:
                    fig.savefig(partial, format="png", dpi=160)
        return fig

    def stopped(self, title: str, step: int, of: int, reason: str) -> None:
        """Note that a training was stopped: the run is not done until the training reached its
        end.
        """
        if self.writes:
            known = stopped_trainings(record(self.dir))
            note(self.dir, {"stopped": known | {title: {"step": step, "of": of, "by": reason}}})

    def resumed(self, title: str) -> None:
        """Note that the training of this title, stopped before, reached its end."""
        if not self.writes:
            return
        known = stopped_trainings(record(self.dir))
        if title in known:
            note(
                self.dir,
                {"stopped": {name: where for name, where in known.items() if name != title}},
            )

    def leave(self) -> None:
        """Note that nobody will continue this run: the next set-up cell begins a new one."""
        if self.writes:
            note(self.dir, {"left": True})

    def headline(self, *names: str) -> None:
        """Name the one to three results that the notebook's title promises; `finish` refuses one
        that is not there.
        """
        if self.writes:
            note(self.dir, {"headline": list(names)})

    def finish(self) -> None:
        """Mark a run made by hand as done, or as stopped; under the runner it is the runner who
        says so.
        """
        if self.events is not None:
            self.events.close()
        if not self.writes:
            return
        facts = record(self.dir)
        results = files.read_json(self.dir / "result.json")
        unknown = [name for name in facts.get("headline") or () if name not in results]
        if unknown:
            what = declarations.unknown("result", unknown[0], results)
            raise declarations.ParameterError(f"run.headline: {what}")
        if RUN_DIR not in os.environ:
            self._finish_by_hand(facts)

    def _finish_by_hand(self, facts: Mapping[str, Any]) -> None:
        """Keep the page, seal what came out, and note how the run ended."""
        from nblib import runtime  # imports torch, which the runner and `nblib list` do not need

        now = time.time()
        ending = {"status": "done", "finished": now, "sentence": None, "failed_in": None}
        ending["seconds"] = round(now - facts.get("started", now), 2)

        # a training that was stopped is to go on
        stopped = stop_sentence(facts)
        if stopped:
            sentence = f"{stopped}. Run all cells again: the run goes on from there."
            ending |= {"status": "stopped", "sentence": sentence}
            print(sentence)

        # the page, which only a person's kernel has
        if runtime.interactive():
            page = interactive_run.keep_page(self.dir, facts.get("notebook", ""))
            ending["page"] = page
            print(f"This page is {page}.")

        ending["sealed"] = seal(self.dir)
        note(self.dir, ending)


def begin(notebook: str, namespace: MutableMapping[str, Any]) -> Run:
    """Check the parameters found in `namespace` (a cell passes globals()), put what secrets stand
    for in there, and open the run's folder. At a person's kernel that may be the folder of the
    unfinished run that this one continues.
    """
    from nblib import runtime  # imports torch, which the runner and `nblib list` do not need

    known = declarations.declared(paths.notebooks() / f"{notebook}.ipynb")
    given = (
        namespace
        if "__name__" not in namespace
        else {k: namespace[k] for k in known if k in namespace}
    )
    given = dict.fromkeys(_injected_names() - known.keys()) | dict(given)
    # the cell runs again
    given |= {k: v.reference for k, v in given.items() if isinstance(v, declarations.Secret)}
    values = {name: parameter.default for name, parameter in known.items()}
    values |= declarations.check(known, given, notebook)
    writes = runtime.rank() == 0
    if RUN_DIR not in os.environ and runtime.world() > 1:
        raise RuntimeError(
            f"{runtime.world()} processes share one run: set {RUN_DIR} to its folder for all "
            "of them."
        )

    begun = interactive_run.Begun(None, {}, "")
    if RUN_DIR not in os.environ and writes and runtime.interactive():
        begun = interactive_run.find_run_to_continue(notebook, known, values)
        if begun.remark:
            print(begun.remark)
    if secret := declarations.secrets(known, values):
        # here and nowhere else: all that is stored is what they are called
        namespace.update(secret)
    if RUN_DIR in os.environ:
        folder = Path(os.environ[RUN_DIR])
    else:
        folder = _folder_by_hand(notebook, begun.folder, begun.facts, writes)
    run = Run(folder, values, writes)
    if writes:
        drop_torn_line(files.make_folder(folder) / "metrics.jsonl")
        files.write(folder / "parameters.yaml", declarations.dump_yaml(values))
        files.write(folder / "environment.json", files.to_json(runtime.environment(), indent=1))
    _HERE[:] = [run]
    # its bars go to stderr and, saved in a notebook, stay at 0 % for ever
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    # once: what was imported stays, and a full collection need not walk through it
    if not gc.get_freeze_count():
        gc.freeze()
    return run


def _folder_by_hand(
    notebook: str, continued: Path | None, facts: dict[str, Any], writes: bool
) -> Path:
    """Return the folder of a run by hand, held by this process and with its first record in it."""
    facts = {
        "notebook": notebook,
        "status": "running",
        "by": "hand",
        "started": time.time(),
    } | facts
    if continued is None:
        home = files.make_folder(paths.outputs() / notebook)
        # the runner makes folders there, and sweeps empty ones
        while (alone := files.claim(home)) is None:
            time.sleep(0.02)
    folder = continued or new_folder(notebook)
    if writes:
        hold(folder)
        note(folder, facts)
    if continued is None:
        os.close(alone)
    return folder


def notice() -> str:
    """Return what was stopped half-way in the run of this process, in one sentence; empty when
    nothing was.
    """
    with contextlib.suppress(files.Unreadable):
        return stop_sentence(record(_HERE[0].dir)) if _HERE else ""
    return ""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by name, also those that JSON spells as words; the step that
    they are of is none.
    """
    words = ("nan", "inf", "-inf")
    numbers = {
        name: float(v) if isinstance(v, str) and v in words else v for name, v in record.items()
    }
    numbers = {
        name: v
        for name, v in numbers.items()
        if isinstance(v, (int, float)) and type(v) is not bool
    }
    return {name: v for name, v in numbers.items() if name not in ("step", "of")}


def new_folder(notebook: str) -> Path:
    """Names sort by the time a run began, two of the same second too: the last six digits are the
    second's fraction.
    """
    second, rest = divmod(time.time_ns(), 10**9)
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(second))}-{rest * 2**24 // 10**9:06x}"
    return files.make_folder(paths.outputs() / notebook / name)


def flat(facts: Mapping[str, Any], above: str = "", depth: int = 3) -> dict[str, Any]:
    """Dictionaries within dictionaries, so many deep, as names with dots."""
    pairs: dict[str, Any] = {}
    for name, value in facts.items():
        inner = isinstance(value, dict) and value and depth
        pairs |= flat(value, f"{above}{name}.", depth - 1) if inner else {f"{above}{name}": value}
    return pairs


def spelled(value: Any) -> str:
    """Return a fact of a record on one line, whatever it is."""
    try:
        if isinstance(value, dict):
            return ", ".join(f"{name} {spelled(item)}" for name, item in value.items())
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    except (RecursionError, ValueError):  # too deep; more digits than Python writes
        return "…"


def moment(value: Any) -> str:
    """Return a time of a record, which may hold anything."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(value)))
    return declarations.clip(value, 30) if isinstance(value, str) else ""


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows
    )


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        if minutes >= 60
        else f"{minutes}:{seconds:02d}"
    )


def drop_torn_line(path: Path) -> None:
    """Drop the last line if a kill cut it short; keep the whole ones."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        files.write(path, content[: content.rfind(b"\n") + 1])


def _injected_names() -> set[str]:
    """Return what papermill injected into this kernel: the cell it puts in starts with `#
    Parameters`.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    statements = []
    for source in shell.user_ns.get("In", []) if shell else []:
        # a cell of IPython's own syntax, so not one that papermill wrote
        with contextlib.suppress(SyntaxError):
            statements += ast.parse(source).body if source.startswith("# Parameters") else []
    return {
        s.targets[0].id
        for s in statements
        if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
    }
