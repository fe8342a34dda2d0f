"""Which line of the user's program did it: the place that a finding names.

A call may go through functions of torch in Python and through the wrappers of the watch. What the
program wrote stands in the first frame behind these, unless that frame is a library's. Each event
and each fact that a watcher notes keeps this place, so a finding can say where it comes from.
Optimizers and schedulers are made before a watch begins, so from the import on the line that made
each of them is kept beside a weak reference to it.

Footgun: code without a file (exec, a REPL) has a name and a line and no text; a notebook's cell has
a name that nobody has seen. cells.py says how a person reads either.
"""

import functools
import linecache
import site
import sys
import sysconfig
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from loopdoctor import cells

Place = tuple[str, int]  # file name of the code, number of the line

TORCH = Path(torch.__file__).parent
OURS = Path(__file__).parent
INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | set(
    site.getsitepackages()
)
MARK = "_loopdoctor_made"  # of a function that listens: a second import must not listen twice
TEXT = 80  # letters of a line of code that are shown

# optimizer or scheduler -> its line
MADE: "weakref.WeakKeyDictionary[Any, Place]" = weakref.WeakKeyDictionary()


@functools.cache
def whose(file: str) -> str:
    """Tell whose code a file holds: "torch", "doctor", an installed "library" or the "program"."""
    path = Path(file)
    if TORCH in path.parents:
        return "torch"
    if OURS in path.parents:
        return "doctor"
    libraries = [Path(p) for p in INSTALLED if p]
    if any(p in path.parents for p in libraries) or file.startswith("<frozen"):
        return "library"
    return "program"


def caller() -> FrameType | None:
    """Return the frame of the program that called a function of torch; None where a library did."""
    frame = sys._getframe(1)
    while frame is not None and whose(frame.f_code.co_filename) in ("torch", "doctor"):
        frame = frame.f_back
    if frame is None or whose(frame.f_code.co_filename) != "program":
        return None
    return frame


def here() -> Place | None:
    """Return the line of the program that is under way, also where a library called torch for
    it.
    """
    frame = sys._getframe(1)
    while frame is not None and whose(frame.f_code.co_filename) != "program":
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def made(thing: Any) -> Place | None:
    """Return the line that made an optimizer or a scheduler; None where it is not known."""
    try:
        return MADE.get(thing)
    except TypeError:  # it takes no weak reference
        return None


def spell(place: Place) -> str:
    """Write a place as a person reads it, with the text of the line where it is at hand."""
    file, line = place
    text = linecache.getline(file, line).strip()
    where = cells.place(file, line)
    return f"{where} `{text[:TEXT]}`" if text else where


def _listen(kind: type) -> None:
    """Keep the line that makes each object of a class."""
    original = kind.__init__
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        place = here()
        if place is not None and self not in MADE:
            MADE[self] = place
        return original(self, *args, **kwargs)

    setattr(init, MARK, True)
    kind.__init__ = init


_listen(torch.optim.Optimizer)
_listen(LRScheduler)
