"""End what a run started: a program in the background, a daemon, workers of a kernel that was
killed.

A process that detaches itself leaves the kernel's process group, and when its parent ends, its
place below the kernel as well. Linux gives such an orphan to the nearest process above that adopts
orphans (PR_SET_CHILD_SUBREAPER). The process that executes a notebook does, so all that its kernel
ever started stays below it, and ends with the run.

If the executing process is itself killed, nothing adopts them. Then they are known by their
environment, which names the run's folder: the runner ends them at once, and the next attempt of the
run before it starts.

Footgun: Linux alone has the call and /proc. Elsewhere only the kernel's own process group is ended.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

from nbworkbook.run_record import RUN_DIR

PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>; Python has no function for it
PATIENCE = 5  # seconds until what does not die, in a call of a driver perhaps, is left alone


def adopt_orphans() -> None:
    """Become the parent of each process below this one whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill all processes below this one, and those that they start meanwhile, until none is
    left.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        below = _descendants(os.getpid())
        if not below:
            return
        _kill(below)
        _reap_children()
        time.sleep(0.01)


def end_processes_of(folder: Path) -> None:
    """Kill the processes whose environment names this folder as that of their run."""
    mark = f"{RUN_DIR}={folder}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or it is somebody else's
            if mark in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    _kill([pid for pid in found if pid != os.getpid()])


def _descendants(pid: int) -> list[int]:
    """Return the processes below this one, by what Linux says of each one's parent."""
    children = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # after the program's name in brackets, which may hold anything: state, parent, ...
            parent = int(file.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            children[parent].append(int(file.parent.name))

    below = list(children[pid])
    for each in below:  # grows while it is read
        below += children[each]
    return below


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _reap_children() -> None:
    """Take note of the children that ended, so that they leave the list of processes."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
