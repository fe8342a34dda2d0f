"""Where things are, answered without importing torch, so that `nblib list` and every `--help` are
instant.

The root is the workbook that a command is given in: the nearest parent of the current folder whose
pyproject.toml has a table `[tool.nblib]`, or that holds both `notebooks/` and `parameters/`. From
everywhere else it is the clone that an editable install points at, and without one the current
folder. Each folder can be moved by an environment variable: NBLIB_NOTEBOOKS, NBLIB_PARAMETERS,
NBLIB_OUTPUTS, NBLIB_BASE. The tests do so, and so may anyone with a larger disk.

Corpora and base models are made once and read by every run. The clone keeps them in its own
outputs/, so that deleting it gives the disk back. Everywhere else they lie in the user's cache
folder, `$XDG_CACHE_HOME/nblib` or `~/.cache/nblib`, where all workbooks share them.

Footgun: the root depends on the current folder. A process that changes its folder and then names
outputs would name others, so the runner gives its root to the kernels it starts as NBLIB_ROOT.
"""

import contextlib
import os
import tomllib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

FOLDERS = ("notebooks", "parameters")  # a folder with both of them is a workbook

_NOTEBOOKS: ContextVar[Path | None] = ContextVar("notebooks", default=None)


def code() -> Path:
    """Return the folder that holds our packages: the clone, or site-packages."""
    return Path(__file__).resolve().parents[1]


def root() -> Path:
    """Return the folder of the workbook, or the current folder where there is none."""
    given = os.environ.get("NBLIB_ROOT")
    if given:
        return Path(os.path.realpath(given))

    here = _current()
    for folder in (here, *here.parents):
        if _marks_workbook(folder):
            return folder

    return code() if _marks_workbook(code()) else here


def is_workbook() -> bool:
    """Return whether the root is a workbook, and not just the folder we happen to be in."""
    return _marks_workbook(root())


def notebooks() -> Path:
    """Return the folder of the notebooks, where they run; without a workbook, the root itself."""
    inside = _NOTEBOOKS.get()
    if inside is not None:
        return inside
    return _folder("NBLIB_NOTEBOOKS", "notebooks" if is_workbook() else ".")


@contextlib.contextmanager
def notebooks_at(folder: Path) -> Iterator[None]:
    """Let `notebooks()` be this folder while the block runs, for a notebook that lies elsewhere."""
    token = _NOTEBOOKS.set(Path(os.path.realpath(folder)))
    try:
        yield
    finally:
        _NOTEBOOKS.reset(token)


def profiles() -> Path:
    """Return the folder of `<notebook>.<profile>.yaml` and `<notebook>.sweep.yaml` files."""
    return _folder("NBLIB_PARAMETERS", "parameters")


def outputs() -> Path:
    """Return the folder of the runs and of the report."""
    return _folder("NBLIB_OUTPUTS", "outputs")


def store() -> Path:
    """Return the folder of what is made once and read by every run: base models and their text."""
    given = os.environ.get("NBLIB_BASE")
    return Path(given).resolve() if given else usual_store()


def usual_store() -> Path:
    """Return where the store is as long as NBLIB_BASE moves it nowhere."""
    return _kept() / "base"


def corpora() -> Path:
    """Return the folder of tokenised corpora."""
    return _kept() / "corpora"


def cache() -> Path:
    """Return our folder in the user's cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # the specification says to ignore a relative path
    home = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))
    return home / "nblib"


def short(path: Path) -> str:
    """Return a path as a person would type it: relative to here or to the root if it is inside."""
    for base in (Path.cwd, root):
        with contextlib.suppress(FileNotFoundError):  # the working folder was deleted
            if path.is_relative_to(base()):
                return str(path.relative_to(base()))
    return str(path)


def _kept() -> Path:
    """Return the folder for what outlives a run: the clone's outputs, else the user's cache."""
    in_clone = root() == code() and _marks_workbook(code())
    return outputs() if in_clone else cache()


def _folder(variable: str, name: str) -> Path:
    # realpath goes on where links make a circle, and Path.resolve does not
    return Path(os.path.realpath(os.environ.get(variable) or root() / name))


def _current() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was deleted; the shell may still have its name
        return Path(os.environ.get("PWD") or "/")


def _marks_workbook(folder: Path) -> bool:
    if all((folder / name).is_dir() for name in FOLDERS):
        return True
    try:
        text = (folder / "pyproject.toml").read_text("utf-8")
        tables = tomllib.loads(text).get("tool") if "nblib" in text else None
    except (OSError, ValueError):  # there is none, not ours to read, no TOML
        return False
    return isinstance(tables, dict) and "nblib" in tables
