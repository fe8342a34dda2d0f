"""How long a notebook keeps a person waiting without a sign: every cell executed in a real kernel, every message timed.

    python tests/silence.py                        all notebooks
    python tests/silence.py 02 11 --json after.json

The kernel is told that a person sits at it, as in JupyterLab, so what only a person sees is there. The base model
comes from the store (NBLIB_BASE), the runs go to a temporary folder. A silence is the time between two messages of a
running cell that change what stands below it: text, an output, an update of one, a new value of a widget, an error. It
begins with the cell and ends with it.

Footgun: on a busy machine every silence is longer. Compare two tables of the same hour, or the longest silence with
the rhythm of what should have spoken.
"""

import argparse
import json
import os
import queue
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jupyter_client.manager import KernelManager

from nblib.run.execute import socket_folder

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 2.0  # seconds that a person should not have to wait for a sign
ADDS = ("stream", "display_data", "execute_result", "error")


class Message(NamedTuple):
    time: float
    kind: str
    content: dict[str, Any]


class Execution(NamedTuple):
    began: float
    ended: float
    messages: list[Message]
    error: str | None

    def silences(self) -> list[tuple[float, float]]:
        """(how long, from when after the start), each from one sign to the next."""
        marks = [self.began, *(message.time for message in seen(self.messages)), self.ended]
        return [(later - earlier, earlier - self.began) for earlier, later in zip(marks, marks[1:])]

    def rhythm(self) -> list[float]:
        """Seconds from one update in place to the next: how fast a line that counts each second really counts."""
        pairs = pairwise(seen(self.messages))
        return [b.time - a.time for a, b in pairs if a.kind == b.kind == "update_display_data"]


class Kernel:
    """A kernel as JupyterLab starts it, and a client that hears everything."""

    def __init__(self, folder: Path, *, cwd: Path = ROOT / "notebooks"):
        headless = ("NBLIB_HEADLESS", "NBLIB_RUN_DIR")
        environment = {name: value for name, value in os.environ.items() if name not in headless}
        environment |= {"JPY_SESSION_NAME": "notebook.ipynb", "NBLIB_OUTPUTS": str(folder / "outputs")}
        environment |= {"IPYTHONDIR": str(folder / "ipython")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(cwd.parent), os.environ.get("PYTHONPATH")]))
        self.sockets, self.in_use = socket_folder()
        places = {"ip": str(self.sockets / "k"), "connection_file": str(self.sockets / "kernel.json")}
        self.manager = KernelManager(kernel_name="python3", transport="ipc", **places)
        self.manager.start_kernel(cwd=str(cwd), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def __enter__(self) -> "Kernel":
        return self

    def __exit__(self, *_: Any) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        shutil.rmtree(self.sockets, ignore_errors=True)
        os.close(self.in_use)

    def execute(self, source: str, timeout: float = 1800) -> Execution:
        return self.execute_all([source], timeout)[0]

    def execute_all(self, sources: Sequence[str], timeout: float = 1800) -> list[Execution]:
        """All asked for at once, as Run All does."""
        asked = [self.client.execute(source, allow_stdin=False) for source in sources]
        return [self._listen(request, timeout) for request in asked]

    def _listen(self, request: str, timeout: float) -> Execution:
        began, messages, error = None, [], None
        asked = time.monotonic()
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                if time.monotonic() > asked + timeout or not self.client.is_alive():
                    return Execution(began or asked, time.monotonic(), messages, "the kernel died, or the time is up")
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            now, kind, content = time.monotonic(), message["msg_type"], message["content"]
            messages.append(Message(now, kind, content))
            if kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            if kind == "status" and content["execution_state"] == "busy":
                began = began or now  # a training with controls says again and again that its cell is running
            if kind == "status" and content["execution_state"] == "idle":
                return Execution(began or asked, now, messages, error)


def seen(messages: Sequence[Message]) -> list[Message]:
    """Those that change what stands below the cell; a display or a widget of another cell may be far away."""
    own, signs = set(), []
    for message in messages:
        content = message.content
        name = content.get("comm_id") or content.get("transient", {}).get("display_id")
        if message.kind in (*ADDS, "comm_open"):
            own.add(name)
        updates = message.kind == "update_display_data" or "value" in content.get("data", {}).get("state", ())
        if message.kind in ADDS or (updates and name in own and message.kind != "comm_open"):
            signs.append(message)
    return signs


def page(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The outputs that JupyterLab keeps of them."""
    outputs, cleared = [], False
    for _, kind, content in messages:
        if kind == "clear_output":
            outputs, cleared = (outputs, True) if content["wait"] else ([], False)
        elif kind in ADDS:
            outputs, cleared = [] if cleared else outputs, False
            last = outputs[-1] if outputs else {}
            if kind == "stream" and last.get("output_type") == kind and last["name"] == content["name"]:
                last["text"] += content["text"]
            else:
                outputs.append({"output_type": kind, **content})
        elif kind == "update_display_data":
            for output in outputs:
                if output.get("transient", {}).get("display_id") == content["transient"]["display_id"]:
                    output |= content
    return outputs


def measure(notebook: dict[str, Any], *, folder: Path, cwd: Path = ROOT / "notebooks") -> dict[str, Any]:
    """Execute the code cells one by one up to the first that fails; the silences above the limit, the longest first."""
    waits, error, seconds, longest, number, beats = [], None, 0.0, (0.0, 0, ""), 0, []
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with Kernel(folder, cwd=cwd) as kernel:
        for number, source in enumerate(filter(str.strip, sources), start=1):
            run = kernel.execute(source)
            line = next(line for line in source.splitlines() if line.strip())
            seconds += run.ended - run.began
            beats += run.rhythm()
            for wait, at in run.silences():
                longest = max(longest, (wait, number, line))
                if wait > LIMIT:
                    waits.append({"seconds": round(wait, 2), "cell": number, "after": round(at, 2), "line": line})
            if run.error:
                error = f"cell {number}: {run.error}"
                break
    waits.sort(key=lambda wait: -wait["seconds"])
    facts = dict(zip(("longest", "cell", "line"), longest)) | {"above": len(waits), "error": error}
    silent = sum(wait["seconds"] for wait in waits)
    facts |= {"silent": round(silent, 1), "rhythm": round(statistics.median(beats), 2) if beats else None}
    return {"cells": number, "seconds": round(seconds, 1), **facts, "waits": waits}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="the beginnings of their names; none: all")
    parser.add_argument("--json", type=Path, help="also write the table, with every silence above the limit")
    asked = parser.parse_args(arguments)
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    if strangers := [name for name in asked.notebooks if not any(each.startswith(name) for each in names)]:
        parser.error(f"notebook {strangers[0]!r}: allowed are the beginnings of {', '.join(names)}")
    table, row = {}, "{:30} {:>8} {:>8} {:>6} {:>7}  {}"
    print(
        row.format("notebook", "seconds", "longest", f"> {LIMIT:g} s", "in all", "the longest is in cell"), flush=True
    )
    for name in names:
        if asked.notebooks and not name.startswith(tuple(asked.notebooks)):
            continue
        with tempfile.TemporaryDirectory(prefix="nblib-silence-") as folder:
            notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
            facts = table[name] = measure(notebook, folder=Path(folder))
        where = f"{facts['cell']}: {facts['line'][:60]}" + (
            f"  FAILED, {facts['error'][:200]}" if facts["error"] else ""
        )
        numbers = (f"{facts[n]:.1f}" for n in ("seconds", "longest"))
        print(row.format(name, *numbers, facts["above"], f"{facts['silent']:.1f}", where), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(table, indent=1) + "\n")
    return int(any(facts["error"] for facts in table.values()))


if __name__ == "__main__":
    sys.exit(main())
