"""Where things are, answered without importing torch, so that `nblib list` and every `--help` are instant.

Each folder can be moved by an environment variable; the tests do so, and so may anyone with a larger disk.
"""

import contextlib
import os
from pathlib import Path


def root() -> Path:
    """The project folder, found from this file and not from the working directory."""
    return Path(__file__).resolve().parents[1]


def notebooks() -> Path:
    return _folder("NBLIB_NOTEBOOKS", "notebooks")


def profiles() -> Path:
    """The folder of `<notebook>.<profile>.yaml` and `<notebook>.sweep.yaml` files."""
    return _folder("NBLIB_PARAMETERS", "parameters")


def outputs() -> Path:
    return _folder("NBLIB_OUTPUTS", "outputs")


def store() -> Path:
    """What is made once and reused by every run: corpora and base models."""
    return Path(os.environ.get("NBLIB_BASE") or outputs() / "base").resolve()


def short(path: Path) -> str:
    """A path as a person would type it: relative to the project or to here when it lies inside."""
    for base in (Path.cwd, root):
        with contextlib.suppress(FileNotFoundError):  # the working folder was deleted
            if path.is_relative_to(base()):
                return str(path.relative_to(base()))
    return str(path)


def _folder(variable: str, name: str) -> Path:
    return Path(os.path.realpath(os.environ.get(variable) or root() / name))  # goes on where links make a circle
