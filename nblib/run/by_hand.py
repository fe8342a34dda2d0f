"""A run that a person makes in a page: its executed notebook, how it ended, and how it goes on after a kill.

The runner starts a kernel and knows all that happens in it. Here the kernel is the person's, and the only thing that is
ours is the set-up cell. So from `runs.begin` on the kernel itself records which cell executed what and what it put out:
every message to the page passes `kernel.session.send`. The run's notebook.ipynb is the file in notebooks/ with these
sources and outputs put in by the cell's id. Where a front end sends no id, or one of its own, the cell is the one of
the file with the same source; without one it comes at the end. Cells above the set-up cell ran before anything could be
recorded: the kernel knows their sources, and their outputs are those of the file.

Run All continues: if the newest run by hand had the same parameters and the same code, is unfinished and has
checkpoints, the set-up cell takes its folder, and each training goes on from its last checkpoint as under the runner.

Footgun: "the same code" is that of the file. What was edited in the page and not saved cannot be known here.

Footgun: outputs are bounded. Of a longer text the beginning and the end are kept, and of a cell 20 MB.
"""

import asyncio
import atexit
import contextlib
import html
import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.display import display
from jupyter_client.jsonutil import json_default  # a picture's bytes as base64, as on their way to the page

from nblib import files, paths
from nblib.run import jobs, parameters, runs, show

WIDGET = "application/vnd.jupyter.widget-view+json"
ENDS, LARGEST = 100_000, 20_000_000  # characters: at each end of a long text, of all that a cell put out
PAUSE = 10  # seconds between two writings of the notebook while nothing special happens
HEARD = {"stream", "display_data", "update_display_data", "execute_result", "error", "clear_output"}
AMBER = "background: #fff3cd; color: #5c4400; padding: .3em .6em"
PAGES: list["Page"] = []  # the one that this kernel writes to
SEND: list[Callable] = []  # how the kernel sends, once we listen


def take(notebook: str, known: Mapping, values: Mapping[str, Any]) -> tuple[Path | None, str, dict[str, Any]]:
    """The folder of the run to continue (None for a new one), one line about it, and the first facts of the record."""
    given = [parameters.assignment(n, v) for n, v in values.items() if v != known[n].default]
    facts, folder, remark = {"key": None, "inputs": None, "attempts": 1}, None, ""
    with contextlib.suppress(parameters.ParameterError):  # a module that does not parse: this run will not be continued
        (job,) = jobs.variants(notebook, [given])
        facts |= {"key": job.key, "inputs": job.inputs}
        folder, remark = _unfinished(notebook, job)
    for page in PAGES:
        page.close(left=page.run.dir != folder)
    if folder is not None:
        facts |= {"attempts": runs.record(folder).get("attempts", 1) + 1}
        facts |= dict.fromkeys(("finished", "seconds", "sealed", "sentence", "failed_in"))
    return folder, remark, facts


def _unfinished(notebook: str, job: jobs.Job) -> tuple[Path | None, str]:
    """The newest run by hand if it can go on; it is held then. And a line that says so, or why not."""
    folder, facts = None, {"left": True}
    for path in sorted((paths.outputs() / notebook).glob("*/run.json")):
        with contextlib.suppress(files.Unreadable):
            if (known := runs.record(path.parent)).get("by") == "hand":
                folder, facts = path.parent, known
    if facts.get("status") == "done" or facts.get("left") or (step := _last_step(folder)) is None:
        return None, ""
    ours, ended = [page for page in PAGES if page.run.dir == folder], runs.status(folder)
    if not runs.hold(folder):
        return None, f"run {folder.name} is running in another kernel, so this is a new run"
    if facts.get("edited") or not jobs.same(job, facts):
        why = jobs.why(facts.get("inputs") or {}, job.inputs) or "its parameters were edited, or it noted no code"
        if not ours:
            runs.let_go(folder)
        return None, f"run {folder.name} is unfinished and is not continued, because it differs: {why}"
    ended = ended.replace("stopped, ", "stopped at step ").replace("running", "its cells were run again")
    return folder, f"continues run {folder.name} from step {step} ({ended})"


def _last_step(folder: Path) -> int | None:
    """The step of the checkpoint that was written last. Of one that is being deleted only the folder is new."""
    manifests = (folder / "checkpoints").rglob(f"step-{8 * '[0-9]'}/{files.MANIFEST}")
    wrote = {path.stat().st_mtime: path.parent.name for path in manifests}
    return int(wrote[max(wrote)][5:]) if wrote else None


class Cell:
    """One execution of a cell: its source, its outputs, how long it took and whether it failed."""

    def __init__(self, source: str, count: int | None, outputs: list[dict[str, Any]] | None = None) -> None:
        self.source, self.count, self.outputs, self.size = source, count, outputs or [], 0
        self.seconds, self.failed, self.to_clear = 0.0, False, False

    def hear(self, kind: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """Add what a message brings; the output, where a later message may replace its content."""
        if kind == "clear_output" or self.to_clear:
            self.to_clear = kind == "clear_output" and bool(content.get("wait"))
            if not self.to_clear:
                self.outputs, self.size = [], 0
        last = self.outputs[-1] if self.outputs else {}
        if kind == "clear_output" or self.size > LARGEST:
            return None
        if kind == "stream":
            same = last.get("name") == content["name"]
            text = (last["text"] if same else "") + content["text"]
            if len(text) > 4 * ENDS:
                text = f"{text[:ENDS]}\n... the middle of this text is left out ...\n{text[-ENDS:]}"
            if same:
                last["text"] = text
                return None
            content = content | {"text": text}
        bodies = (body if isinstance(body, (str, bytes)) else str(body) for body in content.get("data", {}).values())
        self.size += 200 + len(last.get("text", "")) + sum(map(len, bodies))
        output = {"output_type": kind} | {name: body for name, body in content.items() if name != "transient"}
        if self.size > LARGEST:
            output = {"output_type": "stream", "name": "stderr", "text": "more outputs of this cell are left out\n"}
        self.outputs.append(output)
        return output

    def stored(self) -> list[dict[str, Any]]:
        """The outputs as a notebook has them: no widgets, and of a progress bar in text the last state."""
        outputs = [dict(output) for output in self.outputs]
        for output in outputs:
            if "data" in output:
                output["data"] = {mime: body for mime, body in output["data"].items() if mime != WIDGET}
            elif "text" in output:
                lines = "".join(output["text"]).split("\n")
                output["text"] = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
        return outputs


class Page:
    """What this kernel executes and puts out from the set-up cell of a run on, and the line that says how far it is."""

    def __init__(self, run: runs.Run, notebook: str, known: Mapping, namespace: Mapping, remark: str, goes_on: bool):
        self.run, self.known, self.namespace, self.shell = run, known, namespace, get_ipython()
        self.path, self.stamp, self.codes, self.document = paths.notebooks() / f"{notebook}.ipynb", None, {}, {}
        self.cells, self.requests, self.displays, self.lock = {}, {}, {}, threading.RLock()
        self.ending, self.told, self.edited, self.closed = {}, {"status": "running"}, {}, threading.Event()
        self.depth, self.ignored, self.finishing = 1, False, False
        self.saved, self.dirty, self.shown, self.pid = time.monotonic(), False, "", os.getpid()
        request = self.shell.kernel.get_parent()
        self.header, self.set_up = request["header"], self._key(request)
        self.times = _times(notebook)
        self._above()
        self._enter(request)
        PAGES[:] = [self]
        if not SEND:
            session = self.shell.kernel.session
            SEND.append(session.send)
            session.send = _send
        self.line = display(show.Page(_line(str(self))), display_id=True)
        if remark:
            display(show.Page(_line(remark)))
        self.button = _offer(run) if goes_on else None
        self.hooks = {"pre_run_cell": self._before, "post_run_cell": self._after}
        for event, hook in self.hooks.items():
            self.shell.events.register(event, hook)
        atexit.register(self._save_when_idle)
        threading.Thread(target=self._tick, daemon=True).start()

    def close(self, *, left: bool) -> None:
        """Another run begins in this kernel; `left` unless it goes on with this one."""
        for event, hook in self.hooks.items():
            self.shell.events.unregister(event, hook)
        atexit.unregister(self._save_when_idle)
        self.closed.set()
        PAGES.clear()
        if self.dirty:
            self._save()
        if left and not self.ending:
            status = "stopped" if self.told["status"] == "running" else self.told["status"]
            runs.note(self.run.dir, {"left": True, "status": status})
        if left:
            runs.let_go(self.run.dir)

    def ended(self, ending: dict[str, Any]) -> dict[str, Any]:
        """What `run.finish` notes: its ending, unless a cell of the notebook failed and was not run again."""
        self.ending, self.finishing = ending | {"seconds": self._seconds()}, True
        if self.button is not None:
            self.button.update(show.Page(_line("")))
        self.told = self._state()
        return self.ending | self.told

    def hear(self, message: dict[str, Any]) -> None:
        """Record what goes to the page; a fork of the kernel records nothing."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind not in HEARD or os.getpid() != self.pid:
            return
        name = content.get("transient", {}).get("display_id")
        with self.lock:
            if kind == "update_display_data":
                for output in self.displays.get(name, []):
                    output |= {"data": content["data"], "metadata": content["metadata"]}
            elif (cell := self.requests.get(message["parent_header"].get("msg_id"))) is not None:
                output = cell.hear(kind, content)
                if name and output:
                    self.displays.setdefault(name, []).append(output)

    def _read(self) -> dict[str, str]:
        """The code cells of the file as it is now: their sources by id."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # just being saved: as it was before
            if (stamp := self.path.stat().st_mtime_ns) != self.stamp:
                document = json.loads(self.path.read_bytes())
                for number, cell in enumerate(document["cells"]):
                    cell["id"], cell["source"] = cell.get("id", f"cell-{number:02d}"), "".join(cell["source"])
                codes = [cell for cell in document["cells"] if cell["cell_type"] == "code" and cell["source"].strip()]
                self.document, self.stamp = document, stamp
                self.codes = {cell["id"]: cell["source"] for cell in codes}
        return self.codes

    def _key(self, request: dict[str, Any]) -> str:
        """The id of the cell that a request executes."""
        given, source, codes = request["metadata"].get("cellId"), request["content"]["code"], self._read()
        if given in codes:
            return given
        same = (key for key, text in codes.items() if text == source)
        return next(same, re.sub(r"[^\w-]", "-", str(given or f"added-{self.shell.execution_count}"))[-64:])

    def _number(self, key: str) -> int | None:
        """The cell's place among the code cells of the file, from 1."""
        return next((n for n, each in enumerate(self._read(), start=1) if each == key), None)

    def _above(self) -> None:
        """The cells above the set-up cell: that they ran is known by their source, for the parameters by its names."""
        ran = list(enumerate(self.shell.user_ns.get("In", [])))[:0:-1]  # the latest first
        names = re.compile(rf"^{next(iter(self.known), ' ')}\s*:", re.M)
        for key, source in itertools.takewhile(lambda pair: pair[0] != self.set_up, self._read().items()):
            fits = names.search if names.search(source) else (lambda text, like=source: text.strip() == like.strip())
            for number, text in [pair for pair in ran if fits(pair[1])][:1]:
                outputs = next(cell.get("outputs", []) for cell in self.document["cells"] if cell["id"] == key)
                self.cells[key] = Cell(text, number, outputs)

    def _enter(self, request: dict[str, Any]) -> None:
        """What answers this request from now on belongs to this cell."""
        self.key, self.began = self._key(request), time.monotonic()
        with self.lock:
            old = self.cells.pop(self.key, None)  # nothing of it is kept; an added cell stands where it ran last
            self.requests = {asked: cell for asked, cell in self.requests.items() if cell is not old}
            of_old = {id(output) for output in old.outputs} if old else set()
            self.displays = {n: [o for o in each if id(o) not in of_old] for n, each in self.displays.items()}
            self.current = Cell(request["content"]["code"], self.shell.execution_count - 1)
            self.cells[self.key] = self.requests[request["header"]["msg_id"]] = self.current

    def _before(self, info: Any) -> None:
        self.depth += 1
        if self.depth > 1:  # a cell that runs a cell
            return
        request = self.shell.kernel.get_parent()
        here, first = self._number(self._key(request)), self._number(self.set_up)
        self.ignored = here is not None and first is not None and here <= first  # it belongs to the next run
        if not self.ignored:
            self._enter(request)
            with contextlib.suppress(OSError):
                self._compare()
            self._show()

    def _compare(self) -> None:
        """Say in this cell which parameters are not those that the set-up cell read."""
        was, edited = self.run.parameters, {}
        for name in [n for n in self.known if n in self.namespace and self.known[n].allowed != "secret"]:
            value = self.namespace[name]
            if not isinstance(value, (bool, int, float, str, list)):  # the name is used for something else
                value = parameters.clip(str(value))
            if value != was[name]:
                edited[name] = {"was": was[name], "is": value}
        if edited:
            changes = (f"{n} is {show.cell(v['is'])} now and was {show.cell(v['was'])}" for n, v in edited.items())
            advice = "when the set-up cell ran; run the set-up cell again, or this run's records are wrong"
            display(show.Page(_line(f"{', '.join(changes)} {advice}", AMBER)))
        if any(self.edited.get(name) != change for name, change in edited.items()):
            self.edited |= edited
            runs.note(self.run.dir, {"edited": self.edited})

    def _after(self, result: Any) -> None:
        self.depth -= 1
        if self.depth or self.ignored:
            return
        self.current.seconds, self.current.failed = time.monotonic() - self.began, result is None or not result.success
        self._show()
        with contextlib.suppress(OSError):  # a full disk fails the cell that writes to it
            if (state := self._state()) != self.told:
                self.told = state
                runs.note(self.run.dir, state | {"seconds": self.ending.get("seconds", self._seconds())})
            self.dirty = True
            if self.current.failed or self.finishing or time.monotonic() - self.saved > PAUSE:
                sys.stdout.flush(), sys.stderr.flush()
                self._save()
            else:
                asyncio.get_running_loop().call_later(PAUSE, self._save_when_idle)

    def _state(self) -> dict[str, Any]:
        """How the run stands now."""
        failed = [key for key, cell in self.cells.items() if self.ending and cell.failed and key in self._read()]
        if self.current.failed or failed:
            number = self._number(self.key if self.current.failed else failed[0])
            return {"status": "failed", "failed_in": f"cell {number}" if number else "a new cell"}
        return {"status": self.ending.get("status", "running"), "failed_in": None}

    def _save_when_idle(self) -> None:
        with contextlib.suppress(OSError):
            if self.dirty and not self.depth and os.getpid() == self.pid:
                self._save()

    def _save(self) -> None:
        """Write notebook.ipynb, and seal it where the run has ended."""
        self.saved, self.dirty, self.finishing = time.monotonic(), False, False
        with self.lock:
            self._read()
            document = self.document
            cells = [self._executed(cell) if cell["cell_type"] == "code" else cell for cell in document["cells"]]
            added = [key for key, cell in self.cells.items() if key not in self.codes and not cell.failed]  # or a slip
            cells += [self._executed({"cell_type": "code", "id": key, "metadata": {}}) for key in added]
        how = {"ensure_ascii": False, "indent": 1, "sort_keys": True, "default": json_default}
        files.write(self.run.dir / "notebook.ipynb", json.dumps(document | {"cells": cells}, **how) + "\n")
        if self.ending:
            self.ending["sealed"] |= runs.seal(self.run.dir, ["notebook.ipynb"])
            runs.note(self.run.dir, {"sealed": self.ending["sealed"]})

    def _executed(self, cell: dict[str, Any]) -> dict[str, Any]:
        """A cell of the file with what the run knows of it; what another run left in the file goes."""
        if (ran := self.cells.get(cell["id"])) is None:
            return cell | {"outputs": [], "execution_count": None}
        took = {"papermill": {"duration": round(ran.seconds, 3)}}  # where the runner's notebooks have it
        known = {"source": ran.source, "outputs": ran.stored(), "execution_count": ran.count}
        return cell | known | {"metadata": cell["metadata"] | took}

    def _tick(self) -> None:
        while not self.closed.wait(1):
            if self.depth and not self.ignored:
                self._show()

    def _show(self) -> None:
        """Update the line, by a message of our own: `display` in a thread would end in the cell that runs."""
        if (text := str(self)) != self.shown and PAGES == [self]:
            self.shown, kernel = text, self.shell.kernel
            notice = runs.notice()
            content = {"data": _line(f"{text}. {notice}" if notice else text, AMBER if notice else "")}
            content |= {"metadata": {}, "transient": {"display_id": self.line.display_id}}
            kernel.session.send(kernel.iopub_socket, "update_display_data", content, parent=self.header)

    def __str__(self) -> str:
        codes, seconds = list(self._read()), self._seconds()
        number = self._number(self.key)
        at = f"cell {number} of {len(codes)}" if number else "a new cell"
        if self.depth:
            now = self.times.get(self.key, 0) - self._running()
            left = max(0, now) + sum(self.times.get(key, 0) for key in codes[number or len(codes) :])
            return f"{at}, {runs.clock(seconds)}" + (f", about {runs.clock(left)} left" if self.times else "")
        if self.current.failed:
            return f"failed in {at}, after {runs.clock(seconds)}"
        ran = sum(key in self.cells for key in codes)
        return f"{'' if ran == len(codes) else f'{ran} of '}{len(codes)} cells in {runs.clock(seconds)}"

    def _seconds(self) -> float:
        return round(sum(cell.seconds for cell in list(self.cells.values())) + self._running(), 2)

    def _running(self) -> float:
        return time.monotonic() - self.began if self.depth else 0.0


def _send(*args: Any, **options: Any) -> Any:
    """The kernel's own sending, and then our hearing."""
    message = SEND[0](*args, **options)
    if PAGES and message is not None:
        with contextlib.suppress(LookupError, TypeError, AttributeError):  # some library sends in its own way
            PAGES[0].hear(message)
    return message


def _times(notebook: str) -> dict[str, float]:
    """Seconds by cell of the newest runs, by hand or not. Of runs that went straight through: a training that was found
    finished took no time."""
    times: dict[str, float] = {}
    for path in sorted((paths.outputs() / notebook).glob("*/notebook.ipynb"), reverse=True)[:3]:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            if runs.record(path.parent).get("attempts", 1) == 1:
                for cell in json.loads(path.read_bytes())["cells"]:
                    if seconds := cell["metadata"].get("papermill", {}).get("duration"):
                        times.setdefault(cell["id"], float(seconds))
    return times


def _offer(run: runs.Run) -> Any:
    """The button of a continued run; what closes it."""
    from ipywidgets import Button

    button = Button(description="Start a new run instead", layout={"width": "auto"})
    handle = display(button, display_id=True)

    def pressed(_: Any) -> None:
        runs.note(run.dir, {"left": True})
        handle.update(show.Page(_line("Run the notebook again from the set-up cell: it starts a new run.")))

    button.on_click(pressed)
    return handle


def _line(text: str, style: str = "") -> dict[str, str]:
    return {"text/plain": text, "text/html": f"<div style='{style}'>{html.escape(text)}</div>"}
