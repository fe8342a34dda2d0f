"""Make a workbook of one's own: one notebook that trains a small model, its parameters, and a
pyproject.toml whose table `[tool.nblib]` marks the root.

What is copied lies in template/. The notebook is an ordinary one to change or to replace: what
makes it a run that resumes is its cell tagged `parameters`, the call of `runs.begin`, and
checkpoints in the folder of the run.

Footgun: a file that is there and says something else is never replaced, so `nblib init` in a folder
with another pyproject.toml asks for another folder; add the line `[tool.nblib]` to that file by
hand.
"""

import re
from pathlib import Path

from nblib import files, paths
from nbworkbook.parameters import ParameterError, clip

TEMPLATE = Path(__file__).with_name("template")
NOTEBOOK = "00_first_training"
PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["nblib[workbook]"]

# This table marks the root of the workbook: nblib finds notebooks/, parameters/ and outputs/
# beside it.
[tool.nblib]
"""
GITIGNORE = """\
outputs/
.ipynb_checkpoints/
__pycache__/
.venv/
"""


def make(folder: Path) -> list[Path]:
    """Write the workbook into the folder and return its files; ParameterError where another file
    has one of their names."""
    folder = Path(folder).absolute()
    contents = template(folder.name)

    # nothing is written before all of it can be
    if folder.exists() and not folder.is_dir():
        raise ParameterError(f"{clip(str(folder))} is a file; name a folder for the workbook.")
    taken = [name for name, text in contents.items() if _is_other(folder / name, text)]
    if taken:
        raise ParameterError(
            f"{clip(paths.short(folder / taken[0]))} is there already and is not replaced; "
            "name another folder for the workbook."
        )

    for name, text in contents.items():
        files.make_folder((folder / name).parent)
        files.write(folder / name, text)
    return [folder / name for name in contents]


def template(name: str) -> dict[str, str]:
    """Return the files of a workbook of this name, by their paths in it."""
    sources = sorted(path for path in TEMPLATE.glob("*/*") if path.suffix in (".ipynb", ".yaml"))
    contents = {str(path.relative_to(TEMPLATE)): path.read_text("utf-8") for path in sources}
    # the root is marked last: a folder that a kill left half made is no workbook
    return contents | {
        ".gitignore": GITIGNORE,
        "pyproject.toml": PYPROJECT.format(name=_project_name(name)),
    }


def _project_name(folder: str) -> str:
    """Return a name that a pyproject.toml may have for a folder of any name."""
    return re.sub("[^a-z0-9]+", "-", folder.lower()).strip("-") or "workbook"


def _is_other(path: Path, text: str) -> bool:
    """Return whether something else than this text lies there."""
    try:
        return path.read_text("utf-8") != text
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # a folder, not ours to read, no text
        return True
