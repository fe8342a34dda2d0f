"""A line in a cell that shows nothing: "still running, 12 s of about 36 s", where a person sits at the kernel.

It appears after 1.5 s without an output, and counts each second. Before the cell's next output, and at its end, it goes
without a trace: the page clears the outputs of the cell and gets them again without the line. The ticker stands in the
place of the function that sends the kernel's messages, so it sees a cell begin and end, and whatever it shows.

Footgun: a thread draws the line. A call that holds Python's lock for seconds, as some C code does, holds the line too.
"""

import os
import sys
import threading
import time
from typing import Any

SILENT, RHYTHM, POLL = 1.5, 1.0, 0.1  # seconds until the line appears, between its updates, between two looks
ADDS = ("stream", "display_data", "execute_result", "error")  # the messages that add an output to their cell
SECONDS: dict[str, float] = {}  # how long each cell took here last time, by its code
WATCHED: list["_Ticker"] = []  # the one of this kernel; others may stand in front of it and listen too


def start(*, running: bool = False) -> None:
    """Watch the cells of this kernel from the next one on; also the running one, if it has shown nothing yet."""
    kernel = getattr("IPython" in sys.modules and sys.modules["IPython"].get_ipython(), "kernel", None)
    if kernel and not WATCHED:
        WATCHED.append(ticker := _Ticker())
        ticker.send, ticker.socket, kernel.session.send = kernel.session.send, kernel.iopub_socket, ticker.sends
        os.register_at_fork(after_in_child=ticker.__init__)  # there the old lock may be closed for ever
        if running:
            ticker.begins(kernel.get_parent())
        threading.Thread(target=ticker.ticks, daemon=True, name="ticker").start()


class _Ticker:
    def __init__(self) -> None:
        self.lock, self.cell = threading.RLock(), None

    def sends(self, stream: Any, message: Any, content: Any = None, parent: Any = None, *rest: Any, **options: Any):
        kind, body, of = message, content, parent or {}
        if isinstance(message, dict):
            kind, body, of = (message[part] for part in ("msg_type", "content", "parent_header"))
        with self.lock:
            ours = self.cell and of.get("header", of).get("msg_id") == self.cell["header"]["msg_id"]
            busy = kind == "status" and body["execution_state"] == "busy"  # a training says so once more now and then
            if ours and not busy:
                self.shows(kind, body)
            sent = self.send(stream, message, content, parent, *rest, **options)
            if busy and not ours and of.get("msg_type") == "execute_request":
                self.begins(of)
            return sent

    def begins(self, request: dict[str, Any]) -> None:
        self.cell, self.outputs, self.line, self.began = request, [], False, time.monotonic()
        self.due = self.began + SILENT

    def shows(self, kind: str, content: dict[str, Any]) -> None:
        if kind in ADDS:
            self.clear()
            self.outputs.append([kind, content])
        elif kind == "update_display_data":
            own = [output for output in self.outputs if output[1].get("transient") == content["transient"]]
            for output in own:
                output[1] = content
            if not own:  # it stands in another cell
                return
        elif kind == "clear_output":
            self.outputs, self.line = [], self.line and content["wait"]
        elif kind == "status":  # idle
            self.clear()
            SECONDS[self.cell["content"]["code"]], self.cell = time.monotonic() - self.began, None
        self.due = self.due if self.line else time.monotonic() + SILENT

    def clear(self) -> None:
        shown, self.line = self.line, False
        for kind, content in [("clear_output", {"wait": bool(self.outputs)}), *self.outputs] if shown else ():
            self.send(self.socket, kind, content, parent=self.cell)

    def ticks(self) -> None:
        while True:
            time.sleep(POLL)
            with self.lock:
                if self.cell and time.monotonic() >= self.due and len(self.outputs) < 200:  # all are sent again
                    seconds, before = time.monotonic() - self.began, SECONDS.get(self.cell["content"]["code"], 0.0)
                    self.draws(f"still running, {seconds:.0f} s", f" of about {before:.0f} s" * (before > seconds))

    def draws(self, *text: str) -> None:
        kind, where = "update_display_data" if self.line else "display_data", f"ticker-{self.cell['header']['msg_id']}"
        content = {"data": {"text/plain": "".join(text)}, "metadata": {}, "transient": {"display_id": where}}
        self.send(self.socket, kind, content, parent=self.cell)
        self.line, self.due = True, time.monotonic() + RHYTHM
