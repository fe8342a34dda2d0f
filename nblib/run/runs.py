"""A run is a folder, and what the folder says is all anybody needs to know about the run.

    outputs/<notebook>/<time>-<short id>/
        notebook.ipynb   parameters.yaml   environment.json   run.json      what ran, on what, how it ended
        metrics.jsonl    result.json       figures/           checkpoints/  adapter/     what came out
        events/                                                    the metrics again, where tensorboard is installed

A notebook's set-up cell calls `run = runs.begin("00_setup", globals())`, which checks the parameters once more (they
may come from plain papermill or from a hand edit) and gives back the `Run` to log to. A reader sees the old file or the
new one, never half of one; `metrics.jsonl` grows line by line.

A run is done when its own record says so *and* every code cell in its notebook executed without error. Papermill calls
all cells "completed" after a dead kernel. Whoever executes a run holds a lock on its folder, kernel included, so a
status of 'running' without a lock means that the run was killed. `run.json` carries a hash of itself, and once the run
is done the hashes of what came out. `record`, `problem` and `is_done` notice a byte that changed since.

A run whose training was stopped is not done, also when all its cells ran: `status` says "stopped, 44 of 600". Where a
person sits at the kernel, by_hand.py keeps the notebook of the run and continues the run that was left unfinished.

Footgun: a run that resumes appends to `metrics.jsonl`, so steps after its last checkpoint appear twice; the later
line counts. `Run.history` reads them so.
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
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nblib import files, hashed, paths
from nblib.run import parameters as declarations
from nblib.run import ticker

RUN_DIR = "NBLIB_RUN_DIR"  # set by the runner for the kernel it starts
PROGRESS = "progress.txt"  # the lines that a long cell writes about its progress, for the runner to print
SEALED = ("result.json", "notebook.ipynb", "parameters.yaml", "metrics.jsonl", "environment.json", "base.json")


@dataclass
class Run:
    dir: Path
    parameters: dict[str, Any]
    writes: bool = True  # only rank 0 of a multi-process run does
    events: Any = field(default=None, repr=False)  # TensorBoard's writer, once there is something to write
    page: Any = field(default=None, repr=False)  # what is recorded of a person's kernel (by_hand.py)

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
        """What was logged, or what was logged with this name as `run`, since the run began and over every resume: one
        record for each step, and each record without a step."""
        path, records = self.dir / "metrics.jsonl", {}
        whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""  # a line may be half written
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = json.loads(line)
                step = entry.get("step")
                records[number if step is None else (entry.get("run"), step)] = entry
            except (ValueError, RecursionError, AttributeError, TypeError):  # no JSON, no object, a step that is a list
                raise files.Unreadable(f"cannot read {path}: line {number} is no record") from None
        return [entry for entry in records.values() if name is None or entry.get("run") == name]

    def _to_tensorboard(self, record: Mapping[str, Any]) -> None:
        """The numbers of a step as scalars in events/, where tensorboard is installed. The runs of one notebook keep
        apart by their name; a step that comes again after a resume replaces the earlier one in the plots."""
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
        """Keep a matplotlib Figure, or a `show.Picture`, as figures/<name>.png; returns it, for the cell to show."""
        if self.writes:
            with files.replacing(self.dir / "figures" / f"{name}.png") as partial:
                if hasattr(fig, "save"):
                    fig.save(partial)
                else:
                    fig.savefig(partial, format="png", dpi=160)
        return fig

    def stopped(self, title: str, step: int, of: int, reason: str) -> None:
        """Note that a training was stopped: the run is not done until the training reached its end."""
        if self.writes:
            known = _stopped(record(self.dir))
            note(self.dir, {"stopped": known | {title: {"step": step, "of": of, "by": reason}}})

    def resumed(self, title: str) -> None:
        """Note that the training of this title, stopped before, reached its end."""
        if self.writes and title in (known := _stopped(record(self.dir))):
            note(self.dir, {"stopped": {name: where for name, where in known.items() if name != title}})

    def headline(self, *names: str) -> None:
        """Name the one to three results that the notebook's title promises; `finish` refuses one that is not there."""
        if self.writes:
            note(self.dir, {"headline": list(names)})

    def finish(self) -> None:
        """Mark a run made by hand as done, or as stopped; under the runner it is the runner who says so."""
        if self.events is not None:
            self.events.close()
        if not self.writes:
            return
        facts, results = record(self.dir), files.read_json(self.dir / "result.json")
        if unknown := [name for name in facts.get("headline") or () if name not in results]:
            raise declarations.ParameterError(f"run.headline: {declarations.unknown('result', unknown[0], results)}")
        if RUN_DIR in os.environ:
            return
        ending = {"status": "done", "finished": time.time(), "sentence": None, "failed_in": None}
        ending["seconds"] = round(time.time() - facts.get("started", time.time()), 2)
        if sentence := _sentence(facts):
            sentence = f"{sentence}. Run all cells again: the run goes on from there."
            ending |= {"status": "stopped", "sentence": sentence}
            print(sentence)
        before = [name for name in SEALED if name != "notebook.ipynb"]  # which is written after this cell
        ending["sealed"] = seal(self.dir, before)
        note(self.dir, ending if self.page is None else self.page.ended(ending))


_HELD: dict[Path, int] = {}  # the locks on runs by hand, held as long as this process lives
_HERE: list[Run] = []  # the run of this process


def _let_go_all() -> None:
    while _HELD:
        os.close(_HELD.popitem()[1])


os.register_at_fork(after_in_child=_let_go_all)  # what outlives the kernel does not keep its run running


def hold(folder: Path) -> bool:
    """Take the lock on a run's folder for this process; False where another one has it."""
    if folder not in _HELD and (lock := files.claim(folder)) is not None:
        _HELD[folder] = lock
    return folder in _HELD


def let_go(folder: Path) -> None:
    if folder in _HELD:
        os.close(_HELD.pop(folder))


def begin(notebook: str, namespace: MutableMapping[str, Any]) -> Run:
    """Check the parameters found in `namespace` (a cell passes globals()), put what secrets stand for in there, and
    open the run's folder. At a person's kernel that may be the folder of the unfinished run that this one continues."""
    from nblib import runtime  # imports torch, which the runner and `nblib list` do not need

    known = declarations.declared(paths.notebooks() / f"{notebook}.ipynb")
    given = namespace if "__name__" not in namespace else {k: namespace[k] for k in known if k in namespace}
    given = dict.fromkeys(_injected_names() - known.keys()) | dict(given)
    given |= {k: v.reference for k, v in given.items() if isinstance(v, declarations.Secret)}  # the cell runs again
    values = {name: parameter.default for name, parameter in known.items()}
    values |= declarations.check(known, given, notebook)
    writes, by_hand, continued, remark, facts = runtime.rank() == 0, None, None, "", {}
    if runtime.interactive():
        ticker.start()
    if RUN_DIR not in os.environ and runtime.world() > 1:
        raise RuntimeError(f"{runtime.world()} processes share one run: set {RUN_DIR} to its folder for all of them.")
    if RUN_DIR not in os.environ and writes and runtime.interactive():
        # by its name: it does nothing in a run of the runner, so its code is in no such run's key
        by_hand = import_module("nblib.run.by_hand")
        continued, remark, facts = by_hand.take(notebook, known, values)
    if secret := declarations.secrets(known, values):
        namespace.update(secret)  # here and nowhere else: all that is stored is what they are called
    folder = Path(os.environ[RUN_DIR]) if RUN_DIR in os.environ else _folder_by_hand(notebook, continued, facts, writes)
    run = Run(folder, values, writes)
    if writes:
        drop_torn_line(files.make_folder(folder) / "metrics.jsonl")
        files.write(folder / "parameters.yaml", declarations.dump_yaml(values))
        files.write(folder / "environment.json", files.to_json(runtime.environment(), indent=1))
    if by_hand:
        run.page = by_hand.Page(run, notebook, known, namespace, remark, continued is not None)
    _HERE[:] = [run]
    if not gc.get_freeze_count():  # once: what was imported stays, and a full collection need not walk through it
        gc.freeze()
    return run


def _folder_by_hand(notebook: str, continued: Path | None, facts: dict[str, Any], writes: bool) -> Path:
    """The folder of a run by hand, held by this process and with its first record in it."""
    facts = {"notebook": notebook, "status": "running", "by": "hand", "started": time.time()} | facts
    if continued is None:
        home = files.make_folder(paths.outputs() / notebook)
        while (alone := files.claim(home)) is None:  # the runner makes folders there, and sweeps empty ones
            time.sleep(0.02)
    folder = continued or new_folder(notebook)
    if writes:
        hold(folder)
        note(folder, facts)
    if continued is None:
        os.close(alone)
    return folder


def notice() -> str:
    """What was stopped half-way in the run of this process, in one sentence; empty when nothing was."""
    with contextlib.suppress(files.Unreadable):
        return _sentence(record(_HERE[0].dir)) if _HERE else ""
    return ""


def _stopped(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The trainings that were stopped, and at which step; a record may hold anything."""
    trainings = facts.get("stopped")
    pairs = trainings.items() if isinstance(trainings, dict) else ()
    return {title: at for title, at in pairs if isinstance(at, dict) and {"step", "of"} <= at.keys()}


def _sentence(facts: Mapping[str, Any]) -> str:
    parts = [f"{title} was stopped at step {at['step']} of {at['of']}" for title, at in _stopped(facts).items()]
    return ", ".join(parts)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name, also those that JSON spells as words; the step that they are of is none."""
    words = ("nan", "inf", "-inf")
    numbers = {name: float(v) if isinstance(v, str) and v in words else v for name, v in record.items()}
    numbers = {name: v for name, v in numbers.items() if isinstance(v, (int, float)) and type(v) is not bool}
    return {name: v for name, v in numbers.items() if name not in ("step", "of")}


def new_folder(notebook: str) -> Path:
    """Names sort by the time a run began, two of the same second too: the last six digits are the second's fraction."""
    second, rest = divmod(time.time_ns(), 10**9)
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(second))}-{rest * 2**24 // 10**9:06x}"
    return files.make_folder(paths.outputs() / notebook / name)


def record(folder: Path) -> dict[str, Any]:
    """What run.json says, empty when there is none; Unreadable when it is not as it was written."""
    return hashed.read(folder / "run.json", needed=False)


def note(folder: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to run.json; one that is None goes away."""
    try:
        known = record(folder)
    except files.Unreadable as error:
        files.set_aside(folder / "run.json", str(error))
        known = {}
    hashed.write(folder / "run.json", {name: v for name, v in (known | dict(facts)).items() if v is not None})


def seal(folder: Path, names: Sequence[str] = SEALED) -> dict[str, str]:
    """The hashes of the files that are there, flushed to the device: what a done run is known by."""
    paths = [path for name in names if (path := folder / name).exists()]
    for path in paths:
        files.flush(path)
    return {path.name: files.sha256(path) for path in paths}


def is_done(folder: Path) -> bool:
    """Its record says so, no training of it was stopped, its notebook shows it, and neither that nor the result changed
    since."""
    try:
        facts = record(folder)
        notebook, changed = folder / "notebook.ipynb", _changed(folder, facts, ("notebook.ipynb", "result.json"))
        if facts.get("status") != "done" or facts.get("stopped") or changed:
            return False
        return notebook.is_file() and unfinished_cell(declarations.cells(notebook)) is None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # unreadable, or no notebook
        return False


def problem(folder: Path) -> str | None:
    """One sentence on what is wrong with the files of a run, or None."""
    try:
        if changed := _changed(folder, record(folder), SEALED):
            return changed
        for name in ("result.json", "environment.json"):
            files.read_json(folder / name)
    except files.Unreadable as error:
        return f"unreadable: {str(error).removeprefix('cannot read ')}"
    except (OSError, ValueError, TypeError) as error:  # ours to see but not to read; a record made by hand
        return f"unreadable: {folder}: {getattr(error, 'strerror', None) or error}"
    return None


def _changed(folder: Path, facts: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of the files that is not as it was when the run was done; runs of old carry no hashes."""
    sealed = dict(facts.get("sealed") or {})
    for name in names:
        if name in sealed and not (folder / name).is_file():
            return f"{name} went away since the run ended"
        if name in sealed and files.sha256(folder / name) != sealed[name]:
            return f"{name} changed since the run ended"
    return None


def unfinished_cell(cells: list[dict]) -> int | None:
    """The position of the first code cell that did not execute or that shows an error; None when there is none."""
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip():
            failed = any(output["output_type"] == "error" for output in cell.get("outputs", []))
            if failed or cell.get("execution_count") is None:
                return index
    return None


def status(folder: Path) -> str:
    """One word: done, failed, stopped, running, killed, unreadable or unknown. After it may stand where it ended:
    "stopped, 44 of 600", "failed in cell 12"."""
    try:
        facts = record(folder)
        word = str(facts.get("status", "unknown"))
        if word == "running":
            if (lock := files.claim(folder)) is None:
                return "running"
            os.close(lock)
            word = "killed"
    except (files.Unreadable, OSError):
        return "unreadable"
    if word in ("done", "stopped", "killed") and (at := next(iter(_stopped(facts).values()), None)):
        return f"stopped, {at['step']} of {at['of']}"
    return f"failed in {facts['failed_in']}" if word == "failed" and facts.get("failed_in") else word


def flat(facts: Mapping[str, Any], above: str = "", depth: int = 3) -> dict[str, Any]:
    """Dictionaries within dictionaries, so many deep, as names with dots."""
    pairs: dict[str, Any] = {}
    for name, value in facts.items():
        inner = isinstance(value, dict) and value and depth
        pairs |= flat(value, f"{above}{name}.", depth - 1) if inner else {f"{above}{name}": value}
    return pairs


def spelled(value: Any) -> str:
    """A fact of a record on one line, whatever it is."""
    try:
        if isinstance(value, dict):
            return ", ".join(f"{name} {spelled(item)}" for name, item in value.items())
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    except (RecursionError, ValueError):  # too deep; more digits than Python writes
        return "…"


def moment(value: Any) -> str:
    """A time of a record, which may hold anything."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(value)))
    return declarations.clip(value, 30) if isinstance(value, str) else ""


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table as text; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


def drop_torn_line(path: Path) -> None:
    """A kill may have cut the last line short; keep the whole ones."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        files.write(path, content[: content.rfind(b"\n") + 1])


def _injected_names() -> set[str]:
    """What papermill injected into this kernel: the cell it puts in starts with `# Parameters`."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    statements = []
    for source in shell.user_ns.get("In", []) if shell else []:
        with contextlib.suppress(SyntaxError):  # a cell of IPython's own syntax, so not one that papermill wrote
            statements += ast.parse(source).body if source.startswith("# Parameters") else []
    return {s.targets[0].id for s in statements if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)}
