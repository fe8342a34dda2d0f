"""One notebook, one kernel, one process: execute it with papermill and report in one sentence how it ended.

The runner starts `python -m nblib.run.execute` and sends it a job as one line of JSON on stdin. What the
notebook prints goes to stdout as it comes; lines of our own start with a control character. Stdin stays open: when
it ends, the runner is gone, and this process stops like on Ctrl-C.

Stopping means: interrupt the kernel as the button in JupyterLab would, so that a training cell can write its
checkpoint and end; start no further cell; kill the kernel after GRACE seconds, or at once when asked a second time.

The kernel talks over sockets in a folder of its own, because kernels that start together race for TCP ports, and it
inherits the lock on the run folder: whoever can take that lock knows that nothing writes there any more.

Footgun: a stopped training cell ends *without* an error, so "the cell succeeded" does not mean that it was completed.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from nblib import files, paths
from nblib.run import parameters, runs

PROGRESS, OUTCOME = "\x1f", "\x1e"
GRACE = 20  # seconds a cell gets to end by itself after it was interrupted


class Stopped(Exception):
    """Raised between two cells once somebody asked to stop."""


class Stop:
    """The signal handler, and whether it was called."""

    def __init__(self) -> None:
        self.asked, self.kernel = 0, None  # the kernel is its process group

    def __call__(self, *_: Any) -> None:
        self.asked += 1
        if self.asked == 1:
            timer = threading.Timer(GRACE, self._signal, [signal.SIGKILL])
            timer.daemon = True
            timer.start()
        self._signal(signal.SIGINT if self.asked == 1 else signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            if self.kernel is not None:
                os.killpg(self.kernel, number)


def main() -> None:
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_when_stdin_ends, daemon=True).start()
    record = dict(zip(("status", "sentence", "seconds"), execute(job, stop))) | {"finished": time.time()}
    files.merge(Path(job["folder"]) / "run.json", record)
    _tell(OUTCOME, json.dumps(record))


def execute(job: dict[str, Any], stop: Stop) -> tuple[str, str, float]:
    """Status, sentence and seconds of the job; its folder holds the executed notebook, however far it came."""
    # jsonschema would build a grammar of URIs that no notebook needs, 0.7 s in every run; it does without
    sys.modules["rfc3987_syntax"] = None
    from jupyter_client.kernelspec import NoSuchKernel
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    began, name, folder = time.monotonic(), job["notebook"], Path(job["folder"])
    sockets, in_use = socket_folder()
    kernel = AsyncKernelManager(
        kernel_name="python3", transport="ipc", ip=str(sockets / "k"), connection_file=str(sockets / "kernel.json")
    )
    at, clean, ended = _Position(), False, threading.Event()
    follower = threading.Thread(target=_follow, args=(folder / runs.PROGRESS, ended), daemon=True)
    follower.start()
    try:
        run_sync(kernel.start_kernel)(cwd=str(paths.notebooks()), env=_environment(folder), pass_fds=(job["lock"],))
        stop.kernel = kernel.provisioner.process.pid
        problem = _run_cells(job, kernel, stop, at)  # imports papermill while the kernel starts
        clean = problem is None
    except NoSuchKernel:
        problem = "no Jupyter kernel named python3 is installed here; `make env` installs it"
    finally:
        if kernel.has_kernel:
            run_sync(kernel.shutdown_kernel)(now=not clean)
        stop.kernel = None
        ended.set()
        follower.join()
        shutil.rmtree(sockets, ignore_errors=True)
        os.close(in_use)
    if (partial := folder / "notebook.partial.ipynb").exists():
        files.put(partial, folder / "notebook.ipynb")
    seconds = round(time.monotonic() - began, 2)
    if stop.asked:
        return "stopped", f"{name} was stopped in {at}; what it saved is kept, continue with: {job['resume']}", seconds
    if problem is None and (left := runs.unfinished_cell(parameters.cells(folder / "notebook.ipynb"))) is not None:
        problem = f"{at} ended the kernel's run (sys.exit?), cell {left} of the file and those after it did not execute"
    if problem is None:
        return "done", "", seconds
    notebook = paths.short(folder / "notebook.ipynb")
    return "failed", f"{name} failed: {problem}; see {notebook}, then resume with: {job['resume']}", seconds


class _Position:
    """Which code cell is executing, counted as Jupyter counts: In [1], In [2], ..."""

    number, source = 0, ""

    def __str__(self) -> str:
        if not self.number:
            return "the kernel's start"
        line = next((line for line in self.source.splitlines() if line.strip()), "").strip()
        return f"cell {self.number} (`{_clip(line, 70)}`)"


def _run_cells(job: dict[str, Any], kernel: Any, stop: Stop, at: _Position) -> str | None:
    """Execute through papermill; None, or what went wrong."""
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from papermill.execute import execute_notebook

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it has to say, we say in one sentence
    total = sum(c["cell_type"] == "code" and bool(c["source"].strip()) for c in parameters.cells(Path(job["path"])))
    total += bool(job["values"])  # papermill injects them as a cell

    def starts(cell: Any, cell_index: int) -> None:
        if stop.asked:
            raise Stopped
        at.number, at.source = at.number + 1, cell.source
        _tell(PROGRESS, f"cell {at.number}/{total}")

    try:
        execute_notebook(
            job["path"],
            str(Path(job["folder"]) / "notebook.partial.ipynb"),
            parameters=job["values"],
            kernel_name="python3",  # whatever the file says: its kernel may not exist on this machine
            language="python",
            cwd=str(paths.notebooks()),
            progress_bar=False,
            stdout_file=sys.stdout,
            stderr_file=sys.stdout,
            start_timeout=120,
            execution_timeout=job["timeout"],
            # the rest goes to nbclient
            km=kernel,
            coalesce_streams=True,  # else every refresh of a text progress bar is an output for ever
            record_timing=False,
            iopub_timeout=60,  # the default of 4 s fails good cells on a busy machine
            on_cell_execute=starts,
        )
    except Stopped:
        return "stopped"
    except PapermillExecutionError as error:
        return f"{at} raised {error.ename}: {_clip(error.evalue, 300)}"
    except CellTimeoutError:
        return f"{at} took longer than the timeout of {job['timeout']} s"
    except DeadKernelError:
        return f"the kernel died in {at}, {_death(kernel.provisioner.process)}"
    except RuntimeError as error:  # jupyter_client has no type of its own for a kernel that does not come up
        return f"the kernel did not start ({_clip(str(error), 200)})"
    except OSError as error:
        return f"{at}: {error.strerror or error} ({error.filename})"
    return None


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
    """A short path (a socket's may have about 100 characters) and the lock that says it is in use."""
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 60 else "/tmp"
    for old in Path(base).glob("nblib-kernel-*"):  # left behind by a kill; the minute is for one not locked yet
        with contextlib.suppress(OSError):  # somebody else's, or swept by another run just now
            if time.time() - old.stat().st_mtime > 60 and (lock := files.claim(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix="nblib-kernel-", dir=base))
    return folder, files.claim(folder)


def _stop_when_stdin_ends() -> None:
    sys.stdin.read()
    # nobody reads our lines any more, and a broken pipe would cut the stop short
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1), os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)


def _follow(path: Path, ended: threading.Event) -> None:
    """Pass on what long cells say of their progress: displays that update in place reach no log."""
    at = path.stat().st_size if path.exists() else 0
    while True:
        last = ended.wait(0.5)
        if path.exists() and path.stat().st_size > at:
            with path.open(encoding="utf-8") as lines:
                lines.seek(at)
                for line in lines.read().splitlines():
                    _tell(PROGRESS, line)
                at = lines.tell()
        if last:
            return


def _tell(mark: str, text: str) -> None:
    sys.stdout.write(f"{mark}{text}\n")
    sys.stdout.flush()


def _clip(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


if __name__ == "__main__":
    main()
