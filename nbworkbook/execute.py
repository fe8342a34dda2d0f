"""One notebook, one kernel, one process: execute it with papermill and report in one sentence how
it ended.

The runner starts `python -m nbworkbook.execute` and sends it a job as one line of JSON on stdin.
What cells print, their tables, how far they are and how it ended goes back as lines of JSON through
a pipe that only this process holds. Stdin stays open: when it ends, the runner is gone, and this
process stops like on Ctrl-C.

Stopping means: interrupt the kernel as the button in JupyterLab would, so that a training cell can
write its checkpoint and end; start no further cell; kill the kernel after GRACE seconds, or at once
when asked a second time.

The kernel talks over sockets in a folder of its own, because kernels that start together race for
TCP ports. It inherits the lock on the run folder: whoever can take that lock knows that nothing
writes there any more. What the kernel forks or starts does not get the lock (kernel_extension.py),
and ends with the run (leftover_processes.py).

A disk can be full at any write. notebook.ipynb is then the last one that could be written whole,
and the sentence keeps the failure that came first. A run whose end could not be stored is not done.

Footgun: a stopped training cell ends *without* an error, so "the cell succeeded" does not mean that
it was completed. A server that a notebook starts for others, a TensorBoard for example, ends with
the run like any other process.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from nblib import files, paths
from nbworkbook import parameters, runs
from nbworkbook.leftover_processes import adopt_orphans, end_descendants, end_processes_of
from nbworkbook.run_record import RUN_LOCK

GRACE = 20  # seconds a cell gets to end by itself after it was interrupted
SLOW = 2  # seconds after which the runner is told once more which cell it is
# Of the kernel: IPython's option for what it loads first, and Jupyter's for what writes its
# messages.
ARGUMENTS = [
    "--IPKernelApp.extra_extensions=nbworkbook.kernel_extension",
    "--Session.packer=nbworkbook.kernel_extension.pack",
]


class Stopped(Exception):
    """Raised between two cells once somebody asked to stop."""


class Stop:
    """The signal handler, and whether it was called."""

    def __init__(self) -> None:
        self.asked, self.kernel = 0, None  # the kernel is its process group
        self.signals: list[int] = []

    def __call__(self, number: int, _: Any = None) -> None:
        """Take a signal to stop; several that come together count once.

        A scheduler sends SIGTERM to every process of a job, and the runner passes its own on as
        SIGINT.
        """
        self.signals.append(number)
        if self.signals.count(number) <= self.asked:
            return
        self.asked += 1
        if self.asked == 1:
            timer = threading.Timer(GRACE, self._signal, [signal.SIGKILL])
            timer.daemon = True
            timer.start()
        self._signal(signal.SIGINT if self.asked == 1 else signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            if self.kernel is not None:
                os.killpg(self.kernel, number)


class Words:
    """The pipe to the runner, and a file that papermill copies what cells print to."""

    def __init__(self, descriptor: int) -> None:
        self.pipe = open(descriptor, "wb")

    def tell(self, **said: Any) -> None:
        with contextlib.suppress(OSError):  # the runner is gone, and we are about to stop
            self.pipe.write(json.dumps(said).encode() + b"\n")
            self.pipe.flush()

    def write(self, text: str) -> None:
        self.tell(text=text)

    def flush(self) -> None:
        pass


class Notebook:
    """The executed notebook; papermill saves to it as to one of its stores.

    What is at the path is always whole.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.text, self.saved = path, "", time.monotonic()

    def write(self, text: str, _: str) -> None:
        self.text = text
        # before and after each cell would be often, for what is flushed
        if time.monotonic() - self.saved > 1:
            with contextlib.suppress(OSError):  # what counts is whether the last one can be written
                self.save()

    def save(self) -> None:
        self.saved = time.monotonic()
        if self.text:  # a half character that a cell printed becomes its escape in JSON
            files.write(self.path, self.text.encode("utf-8", "backslashreplace"))

    def pretty_path(self, path: str) -> str:
        return path


def main() -> None:
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_when_stdin_ends, daemon=True).start()
    began, folder, words = time.monotonic(), Path(job["folder"]), Words(job["words"])
    notebook, unwritten = Notebook(folder / "notebook.ipynb"), ""
    try:
        status, problem = execute(job, stop, words, notebook)
    except Exception as error:
        status, problem = "failed", unforeseen(error, folder)
    try:
        notebook.save()
        record = _record(job, status, problem, began)
        runs.note(folder, record | ({"sealed": runs.seal(folder)} if status == "done" else {}))
    except OSError as error:
        unwritten = str(error).rstrip(".")
        record = _record(job, "failed" if status == "done" else status, problem, began, unwritten)
        with contextlib.suppress(OSError):  # without this record the run counts as killed
            runs.note(folder, record)
    words.tell(outcome=record | {"unwritten": bool(unwritten)})


def _record(
    job: dict[str, Any], status: str, problem: str, began: float, unwritten: str = ""
) -> dict[str, Any]:
    if unwritten:
        problem = (
            f"{problem}, and then: {unwritten}" if problem else f"all cells ran, but: {unwritten}"
        )
    sentence = {
        "done": "",
        "stopped": f"{job['notebook']} was stopped in {problem}; what it saved is kept, "
        f"continue with: {job['resume']}",
        "failed": f"{job['notebook']} failed: {problem}; see "
        f"{paths.short(Path(job['folder'], 'notebook.ipynb'))}, "
        f"then resume with: {job['resume']}",
    }[status]
    seconds = round(time.monotonic() - began, 2)
    return {"status": status, "sentence": sentence, "seconds": seconds, "finished": time.time()}


def unforeseen(error: Exception, folder: Path) -> str:
    """Return what to say of it; the traceback of what nobody foresaw is kept in the folder."""
    if isinstance(error, (OSError, parameters.ParameterError, files.Unreadable)):
        named = getattr(error, "filename", None)
        return parameters.clip(
            f"{error.strerror} ({named})" if named else str(error).rstrip("."), 300
        )
    with contextlib.suppress(OSError):
        files.write(folder / "internal-error.txt", traceback.format_exc())
    where = paths.short(folder / "internal-error.txt")
    return (
        f"internal error {type(error).__name__}: {parameters.clip(str(error), 200)}, please "
        f"report it with {where}"
    )


def execute(job: dict[str, Any], stop: Stop, words: Words, notebook: Notebook) -> tuple[str, str]:
    """Return the job's status, and what there is to say about it; the notebook holds what was
    executed.
    """
    # jsonschema would build a grammar of URIs that no notebook needs, 0.7 s in every run; it does
    # without
    sys.modules["rfc3987_syntax"] = None
    from jupyter_client.kernelspec import NoSuchKernel
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    folder, lock = Path(job["folder"]), job["lock"]
    sockets, in_use = socket_folder()
    kernel = AsyncKernelManager(
        kernel_name="python3",
        transport="ipc",
        ip=str(sockets / "k"),
        connection_file=str(sockets / "kernel.json"),
    )
    at, clean, ended = _Position(), False, threading.Event()
    follower = threading.Thread(
        target=_follow, args=(folder / runs.PROGRESS, words, ended), daemon=True
    )
    follower.start()
    try:
        end_processes_of(folder)  # of an attempt whose executing process was killed
        adopt_orphans()
        environment = _environment(folder) | {RUN_LOCK: str(lock)}
        options = {"cwd": str(paths.notebooks()), "env": environment, "pass_fds": (lock,)}
        run_sync(kernel.start_kernel)(extra_arguments=ARGUMENTS, **options)
        stop.kernel = kernel.provisioner.process.pid
        # imports papermill while the kernel starts
        problem = _run_cells(job, kernel, stop, at, words, notebook)
        clean = problem is None
    except NoSuchKernel:
        problem = "no Jupyter kernel named python3 is installed here; `make env` installs it"
    finally:
        if kernel.has_kernel:
            run_sync(kernel.shutdown_kernel)(now=not clean)
        stop._signal(signal.SIGKILL)
        end_descendants()  # whatever the notebook started and left
        stop.kernel = None
        ended.set()
        follower.join()
        shutil.rmtree(sockets, ignore_errors=True)
        os.close(in_use)
    if stop.asked:
        return "stopped", str(at)
    if (
        problem is None
        and (left := runs.unfinished_cell(json.loads(notebook.text)["cells"])) is not None
    ):
        problem = (
            f"{at} ended the kernel's run (sys.exit?), cell {left} of the file and those "
            "after it did not execute"
        )
    return ("failed", problem) if problem else ("done", "")


class _Position:
    """Which code cell is executing, counted as Jupyter counts: In [1], In [2], ..."""

    number, source, timer = 0, "", threading.Timer(0, print)

    def __str__(self) -> str:
        if not self.number:
            return "the kernel's start"
        line = next((line for line in self.source.splitlines() if line.strip()), "").strip()
        return f"cell {self.number} (`{parameters.clip(line, 70)}`)"


def _run_cells(
    job: dict, kernel: Any, stop: Stop, at: _Position, words: Words, notebook: Notebook
) -> str | None:
    """Execute through papermill; return None, or what went wrong."""
    from papermill.execute import execute_notebook
    from papermill.iorw import papermill_io

    papermill_io.register(notebook.path.name, notebook)  # what it saves under this name goes there
    # what it has to say, we say in one sentence
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    total = sum(
        c["cell_type"] == "code" and bool(c["source"].strip())
        for c in parameters.cells(Path(job["path"]))
    )
    total += bool(job["values"])  # papermill injects them as a cell

    def reached(cell: Any, cell_index: int) -> None:
        for heading in (
            re.findall(r"^## .+", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else ()
        ):
            words.tell(progress=heading)

    def starts(cell: Any, cell_index: int) -> None:
        if stop.asked:
            raise Stopped
        at.number, at.source = at.number + 1, cell.source
        where = f"cell {at.number}/{total}"
        words.tell(cell=where, slow=False)
        at.timer = threading.Timer(SLOW, words.tell, kwargs={"cell": where, "slow": True})
        at.timer.start()

    def ended(cell: Any, cell_index: int, execute_reply: Any) -> None:
        at.timer.cancel()
        for text in filter(None, map(_shown, cell.outputs)):
            words.tell(shown=text)

    try:
        execute_notebook(
            job["path"],
            notebook.path.name,
            parameters=job["values"],
            # whatever the file says: its kernel may not exist on this machine
            kernel_name="python3",
            language="python",
            cwd=str(paths.notebooks()),
            progress_bar=False,
            stdout_file=words,
            stderr_file=words,
            start_timeout=120,
            execution_timeout=job["timeout"],
            # the rest goes to nbclient
            km=kernel,
            # else every refresh of a text progress bar is an output for ever
            coalesce_streams=True,
            record_timing=False,
            iopub_timeout=60,  # the default of 4 s fails good cells on a busy machine
            on_cell_start=reached,
            on_cell_execute=starts,
            on_cell_executed=ended,
        )
    except Exception as error:
        if sentence := _explain(error, at, job, kernel):
            return sentence
        raise
    finally:
        at.timer.cancel()
    return None


def _explain(error: Exception, at: _Position, job: dict, kernel: Any) -> str | None:
    """Return one sentence for what ended an execution; None for an error of our own."""
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from nbformat import ValidationError
    from papermill.exceptions import PapermillExecutionError

    match error:
        case Stopped():
            return "stopped"
        case PapermillExecutionError():
            return f"{at} raised {error.ename}: {parameters.clip(error.evalue, 300)}"
        case CellTimeoutError():
            return f"{at} took longer than the timeout of {job['timeout']} s"
        case DeadKernelError():
            return f"the kernel died in {at}, {_death(kernel.provisioner.process)}"
        case ValidationError():
            return f"it is no valid notebook: {parameters.clip(str(error).partition(chr(10))[0])}"
        case RuntimeError():
            # jupyter_client has no type of its own for a kernel that does not come up
            return f"the kernel did not start ({parameters.clip(str(error), 200)})"
        case OSError():
            return f"{at}: {error.strerror or error} ({error.filename})"
    return None


def _shown(output: Any) -> str:
    """Return the text of a table, or the sentence of a picture; nothing of what else a cell
    shows.
    """
    data = output.get("data", {})
    text = str(data.get("text/plain", ""))
    is_picture = "image/png" in data and not text.startswith("<")  # as "<Figure size 640x480>" does
    return text if "<table" in str(data.get("text/html", "")) or is_picture else ""


def _death(process: Any) -> str:
    code = process.poll() if process else None
    if code is not None and code < 0:
        likely = ", most likely for lack of memory" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{likely}"
    return f"exit code {code}: the process ended itself or was killed, possibly for lack of memory"


def _environment(folder: Path) -> dict[str, str]:
    ours = {runs.RUN_DIR: str(folder), "NBLIB_HEADLESS": "1", "PYTHONUNBUFFERED": "1"}
    # JPY_SESSION_NAME would say that somebody sits in JupyterLab
    return {key: value for key, value in os.environ.items() if key != "JPY_SESSION_NAME"} | ours


def socket_folder() -> tuple[Path, int]:
    """Return a short path (a socket's may have about 100 characters) and the lock that says it is
    in use.
    """
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 60 else "/tmp"
    sweep(Path(base), "nblib-kernel-*")
    folder = Path(tempfile.mkdtemp(prefix="nblib-kernel-", dir=base))
    return folder, files.claim(folder)


def sweep(place: Path, pattern: str) -> None:
    """Delete the folders that a kill left behind: nobody holds their lock.

    The minute is for one not locked yet.
    """
    for old in place.glob(pattern):
        with contextlib.suppress(OSError):  # somebody else's, or swept by another run just now
            if time.time() - old.stat().st_mtime > 60 and (lock := files.claim(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)


def _stop_when_stdin_ends() -> None:
    sys.stdin.read()
    # nobody reads our lines any more, and a broken pipe would cut the stop short
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)


def _follow(path: Path, words: Words, ended: threading.Event) -> None:
    """Pass on what long cells say of their progress: displays that update in place reach no log."""
    at, last = path.stat().st_size if path.exists() else 0, False
    while not last:
        last = ended.wait(0.5)
        with contextlib.suppress(OSError), path.open("rb") as lines:
            lines.seek(at)
            whole = lines.read().rpartition(b"\n")[0]
            at += len(whole) + bool(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                words.tell(progress=line)


if __name__ == "__main__":
    main()
