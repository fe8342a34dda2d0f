"""lessons: code that only demonstrates, beside the notebooks that teach with it. The library itself is nblib.

    from lessons import check                   the judges of the exercises
    from lessons.trials import Trials           a pitfall's runs side by side
    from lessons.pitfalls import pitfall        the catalogue

Importing it is light: torch comes with the module that needs it.

Footgun: it is installed with the project (`make env`), so it imports from any folder; a copy of a notebook alone does
not bring it along.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """`check` by name, and not by an import: it judges readers' answers, so its code is part of no run's key."""
    if name == "check":
        return import_module("lessons.exercises").check
    raise AttributeError(f"module 'lessons' has no attribute {name!r}")
