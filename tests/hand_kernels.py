"""A kernel as JupyterLab starts it, and a person who runs all cells: `with kernel() as page:
page.run_all("00_a")`.

The kernel believes that a person sits there (JPY_SESSION_NAME), and each request carries the id of
its cell, which jupyter_client alone would not send.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from nblib import paths
from nbworkbook.execute import socket_folder

LONG = 120  # seconds


class Kernel:
    def __init__(self, manager: KernelManager):
        self.manager, self.client, self.messages = manager, manager.blocking_client(), []
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LONG)
        self.pid = manager.provisioner.process.pid

    def run(
        self, source: str, cell_id: str | None = None, until: Callable[[], bool] = lambda: False
    ) -> str:
        """Execute one cell: ok, error, or "" when `until` became true first."""
        content = {"code": source, "silent": False, "store_history": True, "user_expressions": {}}
        content |= {"allow_stdin": False, "stop_on_error": True}
        metadata = {"cellId": cell_id} if cell_id else {}
        request = self.client.session.msg("execute_request", content, metadata=metadata)
        self.client.shell_channel.send(request)
        end, reply, idle = time.monotonic() + LONG, "", False
        while not (reply and idle):
            assert time.monotonic() < end, f"no end of: {source}"
            if until():
                return ""
            idle = self._listen(request["header"]["msg_id"]) or idle
            if not reply and self.client.shell_channel.msg_ready():
                answer = self.client.shell_channel.get_msg(timeout=1)
                if answer["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                    reply = answer["content"]["status"]
        return reply

    def _listen(self, asked: str) -> bool:
        try:
            message = self.client.iopub_channel.get_msg(timeout=0.05)
        except Exception as error:
            if type(error).__name__ != "Empty":
                raise
            return False
        self.messages.append(message)
        ours = message["parent_header"].get("msg_id") == asked
        return ours and message["content"].get("execution_state") == "idle"

    def run_all(self, name: str, until: Callable[[], bool] = lambda: False) -> list[str]:
        """Every code cell of the notebook as it is now, up to the first that fails."""
        document, ends = json.loads((paths.notebooks() / f"{name}.ipynb").read_text()), []
        for cell in document["cells"]:
            if cell["cell_type"] == "code":
                ends.append(self.run("".join(cell["source"]), cell["id"], until))
                if ends[-1] != "ok":
                    break
        return ends

    def shown(self) -> list[str]:
        """Return the plain texts of what came to the page, and the lines of what was printed, in
        order.
        """
        texts = []
        for message in self.messages:
            content = message["content"]
            if message["msg_type"] == "stream":
                texts += content["text"].splitlines()
            elif "text/plain" in content.get("data", {}):
                texts.append(content["data"]["text/plain"])
        return texts

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.manager.provisioner.process.wait()


@contextmanager
def kernel(**environment: Any) -> Iterator[Kernel]:
    sockets, in_use = socket_folder()
    files = {"ip": str(sockets / "k"), "connection_file": str(sockets / "kernel.json")}
    manager = KernelManager(kernel_name="python3", transport="ipc", **files)
    person = {k: v for k, v in os.environ.items() if k not in ("NBLIB_HEADLESS", "NBLIB_RUN_DIR")}
    person |= {"JPY_SESSION_NAME": "a page", "OMP_NUM_THREADS": "1"}
    person |= {name: str(value) for name, value in environment.items()}
    manager.start_kernel(env=person, cwd=str(paths.notebooks()))
    held = None
    try:
        held = Kernel(manager)
        yield held
    finally:
        if held:
            held.client.stop_channels()
        manager.shutdown_kernel(now=True)
        shutil.rmtree(sockets, ignore_errors=True)
        os.close(in_use)


def folders(name: str) -> list[Path]:
    return sorted(path.parent for path in (paths.outputs() / name).glob("*/run.json"))
