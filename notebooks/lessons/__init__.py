"""lessons: what the notebooks teach with. The methods are in nblib.methods, the measured records in
experiments.

    pitfalls, trials, pitfall_cache   the catalogue, its runs side by side, what they measured
    exercises, resume                 `from lessons import check`; a resumed run beside the straight
                                      one
    drawings, claims                  mechanisms as boxes and arrows; the claims of the write-ups
                                      and their verdicts
    demo, programs                    the first minute; small programs for the doctor
    progress, dropdowns, seeds        which run a cell is making; menus over a figure; trainings at
                                      several seeds
    wirings, step_memory, ...         tables and pictures of one notebook each

Importing it is light: torch comes with the module that needs it.

Footgun: it is part of no installed package. It imports where the notebooks are: in a kernel, which
starts in their folder, or after `cd notebooks`.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`check` by name, and not by an import: it judges readers' answers, so its code is part of no
    run's key.
    """
    if name == "check":
        return import_module("lessons.exercises").check
    raise AttributeError(f"module 'lessons' has no attribute {name!r}")
