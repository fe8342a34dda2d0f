"""A line in a cell that shows nothing: "still running, 12 s of about 36 s", where a person sits at the kernel.

It appears after 1.5 s without an output, below what the cell has shown, and counts each second. Before the cell's next
output, and at its end, it goes without a trace: the page clears the outputs and gets them again without the line.
The ticker stands in the place of the function that sends the kernel's messages. There it sees when a cell begins, what
it shows and when it ends, so the line lands in the cell that runs, whichever thread or library shows something.

Footgun: a thread draws the line. A call that holds Python's lock for seconds, as some C code does, holds the line too.
"""

import os
import sys
import threading
import time
from typing import Any

SILENT, RHYTHM, POLL = 1.5, 1.0, 0.1  # seconds until the line appears, between its updates, between two looks
MOST = 200  # a cell of so many outputs gets no line any more: all of them would be sent again
ADDS = ("stream", "display_data", "execute_result", "error")  # the messages that add an output to their cell
SECONDS: dict[str, float] = {}  # how long each cell took when it last succeeded here, by its code


def start(*, running: bool = False) -> None:
    """Watch the cells of this kernel from the next one on; also the running one, if it has shown nothing yet."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    kernel = getattr(shell, "kernel", None)
    if kernel and not isinstance(getattr(kernel.session.send, "__self__", None), _Ticker):
        ticker = _Ticker(kernel)
        kernel.session.send = ticker.sends
        if running:
            ticker.begins(kernel.get_parent())
        threading.Thread(target=ticker.ticks, daemon=True, name="ticker").start()


class _Ticker:
    def __init__(self, kernel: Any) -> None:
        self.send, self.socket = kernel.session.send, kernel.iopub_socket
        self.lock, self.process, self.cell = threading.RLock(), os.getpid(), None

    def sends(self, stream: Any, message: Any, content: Any = None, parent: Any = None, *rest: Any, **options: Any):
        if os.getpid() != self.process:  # a fork; the lock may be closed in it for ever
            return self.send(stream, message, content, parent, *rest, **options)
        kind, body, of = message, content, parent or {}
        if isinstance(message, dict):
            kind, body, of = (message[part] for part in ("msg_type", "content", "parent_header"))
        with self.lock:
            if self.cell and of.get("header", of).get("msg_id") == self.cell["header"]["msg_id"]:
                self.shows(kind, body)
            sent = self.send(stream, message, content, parent, *rest, **options)
            if kind == "status" and body["execution_state"] == "busy":
                self.begins(of)
            return sent

    def begins(self, request: dict[str, Any]) -> None:
        if request["header"]["msg_type"] == "execute_request":
            self.cell, self.outputs, self.line, self.began = request, [], False, time.monotonic()
            self.due = self.began + SILENT

    def shows(self, kind: str, content: dict[str, Any]) -> None:
        """The running cell is about to send this."""
        if kind in ADDS:
            self.clear(wait=True)
            self.outputs.append([kind, content])
        elif kind == "update_display_data":
            own = [output for output in self.outputs if _name(output[1]) == _name(content)]
            for output in own:
                output[1] = content
            if not own:  # it stands in another cell
                return
        elif kind == "clear_output":
            self.outputs, self.line = [], self.line and content["wait"]
        elif kind == "status":  # idle
            if not any(kind == "error" for kind, _ in self.outputs):
                SECONDS[self.cell["content"]["code"]] = time.monotonic() - self.began
            self.clear(wait=bool(self.outputs))
            self.cell = None
            return
        self.due = self.due if self.line else time.monotonic() + SILENT

    def clear(self, *, wait: bool) -> None:
        if self.line:
            self.line = False
            for kind, content in [("clear_output", {"wait": wait}), *self.outputs]:
                self.send(self.socket, kind, content, parent=self.cell)

    def ticks(self) -> None:
        while True:
            with self.lock:
                if self.cell and time.monotonic() >= self.due and len(self.outputs) < MOST:
                    self.draws(time.monotonic() - self.began)
                    self.due = time.monotonic() + RHYTHM
            time.sleep(POLL)

    def draws(self, seconds: float) -> None:
        before = SECONDS.get(self.cell["content"]["code"], 0.0)
        text = f"still running, {seconds:.0f} s" + (f" of about {before:.0f} s" if before > seconds else "")
        where = {"display_id": f"ticker-{self.cell['header']['msg_id']}"}
        content = {"data": {"text/plain": text}, "metadata": {}, "transient": where}
        self.send(self.socket, "update_display_data" if self.line else "display_data", content, parent=self.cell)
        self.line = True


def _name(content: dict[str, Any]) -> str | None:
    return content.get("transient", {}).get("display_id")
