"""What makes a folder of notebooks a workbook: parameters, run folders, the runner, the report, what cells show."""

import sys
from importlib.machinery import ModuleSpec, PathFinder

from nblib import paths


class _Lessons:
    """Where Python looks last for the notebooks' package `lessons`: beside them; else it says how to install it."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if name != "lessons":
            return None
        beside = PathFinder.find_spec(name, [str(paths.root() / "notebooks")])
        if beside is None or beside.origin is None:  # a folder without __init__.py is not the package
            raise ModuleNotFoundError(
                f"No module named 'lessons': it is installed with nblib, by `make env` or `pip install -e .` in "
                f"{paths.root()}.",
                name=name,
            )
        return beside


sys.meta_path.append(_Lessons)
