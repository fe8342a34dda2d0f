"""Name the file that is imported in place of a package: a torch.py beside a script or a notebook.

Python looks for a module in the script's folder first. A file there with the name of a package
takes its place, and what fails then is far away: "cannot import name 'Tensor' from 'torch'".

Footgun: only files of the folders that are given are looked at, and only those whose name the error
mentions. An error of any other kind is none of a name.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path


def explain(problem: str, folders: Iterable[str | Path]) -> str:
    """Return the sentence about a file in these folders that explains the problem, if any does."""
    installed = set(sysconfig.get_paths().values())
    for folder in map(os.path.abspath, folders):
        if folder in installed:
            continue
        for name, file in _modules(Path(folder)):
            is_mentioned = re.search(rf"['\"/]{re.escape(name)}(\.py)?['\"/:).]", problem)
            if is_mentioned and _is_elsewhere(name, file.parent):
                kind = "module of Python" if name in sys.stdlib_module_names else "package"
                return f"{file} is imported in place of the {kind} {name}; give it another name."
    return ""


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the modules and packages in a folder, by name."""
    found = []
    try:
        for entry in sorted(folder.iterdir()):
            if entry.suffix == ".py" and entry.stem.isidentifier():
                found.append((entry.stem, entry))
            elif (entry / "__init__.py").is_file():
                found.append((entry.name, entry))
    except OSError:  # gone, or not ours to read
        pass
    return found


def _is_elsewhere(name: str, folder: Path) -> bool:
    """Return whether Python finds a module of this name without this folder."""
    others = [place for place in sys.path if os.path.abspath(place) != str(folder)]
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, others) is not None
